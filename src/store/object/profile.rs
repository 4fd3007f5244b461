//! The files that `aws configure` writes: keys, region and endpoint of a named profile.

use std::collections::BTreeMap;

use super::credentials::Secret;
use crate::error::{Error, Result};

/// What a profile says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Profile {
    pub(super) keys: Option<Keys>,
    pub(super) region: Option<String>,
    pub(super) endpoint: Option<String>,
    /// What it wants that we can't do, such as a login in a browser.
    pub(super) wants: Option<String>,
}

/// Keys that stand in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Keys {
    pub(super) access_key_id: String,
    pub(super) secret_access_key: Secret,
    pub(super) session_token: Option<Secret>,
}

/// Settings of a profile by which others hand out credentials.
const OTHER_WAYS: [&str; 6] = [
    "sso_session",
    "sso_start_url",
    "role_arn",
    "credential_process",
    "web_identity_token_file",
    "login_session",
];

type Sections = BTreeMap<String, BTreeMap<String, String>>;

/// Finds a profile in the text of the two files, `credentials` and `config`. What stands in the first wins.
///
/// # Errors
/// [`Error::InvalidInput`] with the names that there are, where `name` is in neither.
pub(super) fn profile(credentials: &str, config: &str, name: &str) -> Result<Profile> {
    let (credentials, config) = (sections(credentials), sections(config));
    let in_config = if name == "default" { name.to_owned() } else { format!("profile {name}") };
    let found = [credentials.get(name), config.get(&in_config).or_else(|| config.get(name))];
    if found.iter().all(Option::is_none) {
        let names = credentials.keys().chain(config.keys()).map(|name| name.trim_start_matches("profile "));
        let names: std::collections::BTreeSet<&str> = names.collect();
        let names = names.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let there = if names.is_empty() { "none".to_owned() } else { names };
        let reason = format!("is not in the shared files of AWS; there are: {there}");
        return Err(Error::invalid(format!("profile `{}`", name.escape_debug()), reason));
    }
    let value = |key: &str| found.iter().flatten().find_map(|section| section.get(key)).cloned();
    let keys = match (value("aws_access_key_id"), value("aws_secret_access_key")) {
        (Some(access_key_id), Some(secret)) => Some(Keys {
            access_key_id,
            secret_access_key: Secret::new(secret),
            session_token: value("aws_session_token").map(Secret::new),
        }),
        _ => None,
    };
    let wants = OTHER_WAYS.into_iter().find(|key| value(key).is_some()).map(ToOwned::to_owned);
    Ok(Profile {
        wants: if keys.is_some() { None } else { wants },
        keys,
        region: value("region"),
        endpoint: value("endpoint_url"),
    })
}

/// Sections of an INI file. Lines that are indented belong to the setting above, and are none of ours.
fn sections(text: &str) -> Sections {
    let mut sections = Sections::new();
    let mut present: Option<String> = None;
    for line in text.trim_start_matches('\u{feff}').lines() {
        if line.starts_with([' ', '\t', '#', ';']) || line.trim().is_empty() {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.split(']').next()) {
            let name = name.split_whitespace().collect::<Vec<_>>().join(" ");
            sections.entry(name.clone()).or_default();
            present = Some(name);
        } else if let Some((key, value)) = line.split_once('=')
            && let Some(section) = present.as_ref().and_then(|name| sections.get_mut(name))
        {
            let value = value.split(" #").next().unwrap_or_default().trim();
            section.insert(key.trim().to_ascii_lowercase(), value.to_owned());
        }
    }
    sections
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREDENTIALS: &str = "# made by hand\n[default]\naws_access_key_id = AK1\naws_secret_access_key=a/b+c=\n\n\
                               [ other ]\nAWS_ACCESS_KEY_ID = AK2 # ours\naws_secret_access_key = s2\naws_session_token = t2\n\
                               [half]\naws_access_key_id = AK3\n";

    const CONFIG: &str = "[default]\nregion = eu-central-1\n[profile other]\nregion=us-west-2\ns3 =\n  max_concurrent_requests = 20\n\
                          endpoint_url = http://127.0.0.1:9000\n[profile login]\nsso_session = work\n[profile role]\nrole_arn = arn\n";

    fn of(name: &str) -> Profile {
        profile(CREDENTIALS, CONFIG, name).unwrap()
    }

    #[test]
    fn keys_region_and_endpoint_come_from_both_files() {
        let default = of("default");
        let keys = default.keys.unwrap();
        assert_eq!((keys.access_key_id.as_str(), keys.secret_access_key.expose()), ("AK1", "a/b+c="));
        assert_eq!((keys.session_token, default.region.as_deref()), (None, Some("eu-central-1")));
        let other = of("other");
        let keys = other.keys.unwrap();
        assert_eq!((keys.access_key_id.as_str(), keys.secret_access_key.expose()), ("AK2", "s2"));
        assert_eq!(keys.session_token.unwrap().expose(), "t2");
        assert_eq!(other.region.as_deref(), Some("us-west-2"));
        assert_eq!(other.endpoint.as_deref(), Some("http://127.0.0.1:9000"));
    }

    #[test]
    fn what_a_profile_wants_instead_of_keys_is_named() {
        assert_eq!(of("login").wants.as_deref(), Some("sso_session"));
        assert_eq!(of("role").wants.as_deref(), Some("role_arn"));
        assert_eq!((of("half").keys, of("half").wants), (None, None));
        assert_eq!(of("other").wants, None);
    }

    #[test]
    fn a_profile_that_is_not_there_is_an_error_with_those_that_are() {
        let Err(Error::InvalidInput { reason, .. }) = profile(CREDENTIALS, CONFIG, "gone") else { panic!() };
        assert!(reason.ends_with("there are: `default`, `half`, `login`, `other`, `role`"), "{reason}");
        let Err(Error::InvalidInput { reason, .. }) = profile("", "", "default") else { panic!() };
        assert!(reason.ends_with("there are: none"), "{reason}");
    }

    #[test]
    fn secrets_are_not_printed() {
        let text = format!("{:?}", of("other"));
        assert!(text.contains("AK2") && !text.contains("s2\"") && !text.contains("t2"), "{text}");
    }
}
