//! Where options and credentials come from that the program does not pass: the environment, and the files that
//! the tools of Amazon share.
//!
//! Nothing else of the engine looks at either. What the program passes wins over the environment, and that over
//! the files, but for a profile that the program names.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::profile::{Profile, profile};
use crate::error::{Error, Result};
use crate::store::local::read_settings;

/// The longest file of settings or certificates.
pub(super) const FILE_LIMIT_BYTES: u64 = 16 << 20;

/// Variables of the environment by name.
#[derive(Clone, Default)]
pub(super) struct Environment(BTreeMap<String, String>);

impl Environment {
    /// That of this process.
    pub(super) fn of_process() -> Self {
        let variables = std::env::vars_os();
        Self(
            variables
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
                .collect(),
        )
    }

    #[cfg(test)]
    pub(super) fn of(variables: &[(&str, &str)]) -> Self {
        Self(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    /// The value of a variable that is set to something.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// All that begin so and are set to something, by their names in lower case.
    pub(super) fn beginning(&self, start: &str) -> impl Iterator<Item = (String, &str)> {
        let set = self.0.iter().filter(move |(name, value)| name.starts_with(start) && !value.is_empty());
        set.map(|(name, value)| (name.to_ascii_lowercase(), value.as_str()))
    }

    fn shared_file(&self, variable: &str, name: &str) -> Option<PathBuf> {
        let chosen = self.get(variable).map(PathBuf::from);
        chosen.or_else(|| Some(PathBuf::from(self.get("HOME")?).join(".aws").join(name)))
    }

    fn text(&self, variable: &str, name: &str) -> Result<String> {
        let Some(path) = self.shared_file(variable, name) else { return Ok(String::new()) };
        match read_settings(&path, FILE_LIMIT_BYTES) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) if error.is_not_found() => Ok(String::new()),
            Err(error) => Err(error),
        }
    }

    /// The profile that `named` or the environment names, or the default one, which need not be there.
    pub(super) fn profile(&self, named: Option<&str>) -> Result<Profile> {
        let wanted = named.or_else(|| self.get("AWS_PROFILE"));
        let credentials = self.text("AWS_SHARED_CREDENTIALS_FILE", "credentials")?;
        let config = self.text("AWS_CONFIG_FILE", "config")?;
        match (profile(&credentials, &config, wanted.unwrap_or("default")), wanted) {
            (Err(_absent), None) => Ok(Profile::default()),
            (found, _) => found,
        }
    }
}

/// The keys of a profile that was asked for.
pub(super) fn keys_of(profile: &Profile, name: &str) -> Result<super::profile::Keys> {
    let wants = profile.wants.as_ref().map_or_else(
        || "holds no `aws_access_key_id` and `aws_secret_access_key`".to_owned(),
        |wants| format!("needs `{wants}`, which is not done here"),
    );
    profile.keys.clone().ok_or_else(|| {
        let reason =
            format!("{wants}: pass `credentials`, a callable that asks your own tools, such as boto3");
        Error::invalid(format!("profile `{}`", name.escape_debug()), reason)
    })
}
