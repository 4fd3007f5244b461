//! Urls of buckets.
//!
//! What follows the bucket in `s3://bucket/prefix` is the key as it stands, as in the provider's own tools: no
//! `%20` is decoded there. The address of a provider, `https://...`, is a real url and is decoded.

use std::collections::BTreeMap;

use object_store::path::Path;

use crate::error::{Error, Result};

/// What is understood, for messages.
const LEGAL: &str = "must be like `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, \
                     `abfss://container@account.dfs.core.windows.net/prefix`, or the https address of Amazon \
                     S3, Cloudflare R2, Google Cloud Storage or Azure; another server is named by option `endpoint`";

/// Whose language a server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Provider {
    S3,
    Google,
    Azure,
    Memory,
}

/// A url, read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) provider: Provider,
    pub(super) bucket: String,
    /// Below what in the bucket everything lies; without slashes at its ends.
    pub(super) prefix: String,
    /// The url for messages, without a slash at its end.
    pub(super) root: String,
    /// Options that the url holds, by their names.
    pub(super) options: BTreeMap<&'static str, String>,
}

impl Address {
    /// Reads a url.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] that says what is legal.
    pub(super) fn parse(url: &str) -> Result<Self> {
        let refuse = |reason: &str| Error::invalid(format!("url `{}`", url.escape_debug()), reason);
        let (scheme, rest) = url.split_once("://").ok_or_else(|| refuse(LEGAL))?;
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let mut address = match scheme.to_ascii_lowercase().as_str() {
            "s3" | "s3a" => Self::new(Provider::S3, host, path),
            "gs" => Self::new(Provider::Google, host, path),
            "az" | "adl" | "azure" | "abfs" | "abfss" => Self::azure(host, path),
            "memory" => Self::new(Provider::Memory, host, path),
            "https" => Self::https(host, path).ok_or_else(|| refuse(LEGAL))?,
            "file" => return Err(refuse("is a folder: give its path, without `file://`")),
            _ => return Err(refuse(LEGAL)),
        };
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b'$');
        if address.bucket.is_empty() || !address.bucket.bytes().all(legal) {
            return Err(refuse("must name a bucket of A-Z a-z 0-9 . _ - after `://`"));
        }
        let prefix =
            Path::parse(address.prefix.trim_matches('/')).map_err(|error| refuse(&error.to_string()))?;
        prefix.as_ref().clone_into(&mut address.prefix);
        let below = if address.prefix.is_empty() { "" } else { "/" };
        address.root = match scheme {
            "https" => url.trim_end_matches('/').to_owned(),
            scheme => format!("{scheme}://{host}{below}{}", address.prefix),
        };
        Ok(address)
    }

    fn new(provider: Provider, bucket: &str, prefix: &str) -> Self {
        Self {
            provider,
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
            root: String::new(),
            options: BTreeMap::new(),
        }
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.options.insert(name, value.to_owned());
        self
    }

    /// `container` or `container@account.dfs.core.windows.net`.
    fn azure(host: &str, path: &str) -> Self {
        match host.split_once('@') {
            None => Self::new(Provider::Azure, host, path),
            Some((container, server)) => {
                let account = server.split('.').next().unwrap_or_default();
                Self::new(Provider::Azure, container, path).with("azure_storage_account_name", account)
            }
        }
    }

    /// The address of a provider; `None` where it is nobody we know, or holds more than a path.
    fn https(host: &str, path: &str) -> Option<Self> {
        if path.contains(['?', '#']) || host.contains(['@', ':', '?', '#']) {
            return None;
        }
        let path = Path::from_url_path(path.trim_end_matches('/')).ok()?;
        let path = path.as_ref();
        let (first, below) = path.split_once('/').unwrap_or((path, ""));
        if let Some(server) = host.strip_suffix(".amazonaws.com") {
            return Self::amazon(server, path, first, below);
        }
        if host.ends_with(".r2.cloudflarestorage.com") {
            let address = Self::new(Provider::S3, first, below).with("endpoint", &format!("https://{host}"));
            return Some(address.with("region", "auto"));
        }
        if host == "storage.googleapis.com" {
            return Some(Self::new(Provider::Google, first, below));
        }
        if let Some(bucket) = host.strip_suffix(".storage.googleapis.com") {
            return Some(Self::new(Provider::Google, bucket, path));
        }
        let account = [".blob.core.windows.net", ".dfs.core.windows.net"]
            .iter()
            .find_map(|suffix| host.strip_suffix(suffix))?;
        Some(Self::new(Provider::Azure, first, below).with("azure_storage_account_name", account))
    }

    /// `s3.region`, `s3.dualstack.region`, or either behind `bucket.`.
    fn amazon(server: &str, path: &str, first: &str, below: &str) -> Option<Self> {
        let (bucket, service) = match server.strip_prefix("s3.") {
            Some(service) => (None, service),
            None if server == "s3" => (None, ""),
            None => match server.rsplit_once(".s3.") {
                Some((bucket, service)) => (Some(bucket), service),
                None => (Some(server.strip_suffix(".s3")?), ""),
            },
        };
        let region = service.strip_prefix("dualstack.").unwrap_or(service);
        let address = match bucket {
            Some(bucket) => Self::new(Provider::S3, bucket, path),
            None => Self::new(Provider::S3, first, below),
        };
        Some(if region.is_empty() { address } else { address.with("region", region) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(url: &str) -> (Provider, String, String, Vec<(&'static str, String)>) {
        let address = Address::parse(url).unwrap();
        (address.provider, address.bucket, address.prefix, address.options.into_iter().collect())
    }

    fn plain(
        provider: Provider,
        bucket: &str,
        prefix: &str,
    ) -> (Provider, String, String, Vec<(&'static str, String)>) {
        (provider, bucket.to_owned(), prefix.to_owned(), Vec::new())
    }

    #[test]
    fn a_prefix_is_taken_as_it_stands() {
        for scheme in ["s3", "s3a", "S3"] {
            assert_eq!(parsed(&format!("{scheme}://b/run")), plain(Provider::S3, "b", "run"));
        }
        assert_eq!(parsed("s3://b"), plain(Provider::S3, "b", ""));
        assert_eq!(parsed("s3://b/"), plain(Provider::S3, "b", ""));
        assert_eq!(parsed("s3://b/a b/%20/\u{e4}#?&/"), plain(Provider::S3, "b", "a b/%20/\u{e4}#?&"));
        assert_eq!(parsed("gs://b-1.x/runs/7"), plain(Provider::Google, "b-1.x", "runs/7"));
        assert_eq!(parsed("az://c/p"), plain(Provider::Azure, "c", "p"));
        assert_eq!(Address::parse("s3://b/run/").unwrap().root, "s3://b/run");
        assert_eq!(Address::parse("s3://b/").unwrap().root, "s3://b");
    }

    #[test]
    fn the_address_of_a_provider_is_decoded() {
        let region = |name: &str| vec![("region", name.to_owned())];
        for url in [
            "https://s3.eu-west-1.amazonaws.com/b/a%20b",
            "https://s3.dualstack.eu-west-1.amazonaws.com/b/a%20b/",
            "https://b.s3.eu-west-1.amazonaws.com/a%20b",
            "https://b.s3.dualstack.eu-west-1.amazonaws.com/a%20b",
        ] {
            assert_eq!(parsed(url), (Provider::S3, "b".into(), "a b".into(), region("eu-west-1")), "{url}");
        }
        assert_eq!(parsed("https://b.s3.amazonaws.com/p"), plain(Provider::S3, "b", "p"));
        assert_eq!(parsed("https://storage.googleapis.com/b/p"), plain(Provider::Google, "b", "p"));
        let account = vec![("azure_storage_account_name", "acc".to_owned())];
        for url in ["https://acc.blob.core.windows.net/c/p", "abfss://c@acc.dfs.core.windows.net/p"] {
            assert_eq!(parsed(url), (Provider::Azure, "c".into(), "p".into(), account.clone()), "{url}");
        }
        let r2 = parsed("https://id.r2.cloudflarestorage.com/b/p").3;
        assert_eq!(r2[0], ("endpoint", "https://id.r2.cloudflarestorage.com".to_owned()));
    }

    #[test]
    fn what_is_no_bucket_is_refused_with_what_is_legal() {
        for (url, told) in [
            ("bucket/prefix", "must be like `s3://bucket/prefix`"),
            ("http://127.0.0.1:9000/b", "named by option `endpoint`"),
            ("https://example.com/b", "named by option `endpoint`"),
            ("https://acc.blob.core.windows.net/c?sig=secret", "must be like"),
            ("ftp://b/p", "must be like"),
            ("file:///tmp/x", "is a folder"),
            ("s3:///prefix", "must name a bucket"),
            ("s3://b?x/p", "must name a bucket"),
            ("s3://b/a//c", "empty"),
            ("s3://b/a/../c", ".."),
            ("s3://b/a\nb", "a\\nb"),
        ] {
            let Err(Error::InvalidInput { what, reason }) = Address::parse(url) else { panic!("{url}") };
            let text = format!("{what} {reason}");
            assert!(text.contains(told), "{url}: {text}");
        }
    }
}
