//! From a url, options and the environment to a connection of `object_store`.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::hash::Hash;
use std::str::FromStr;
use std::sync::Arc;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey as S3Key};
use object_store::azure::{AzureConfigKey as AzureKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey as GoogleKey};
use object_store::memory::InMemory;
use object_store::multipart::MultipartStore;
use object_store::{ClientConfigKey, ObjectStore, RetryConfig};

use super::address::{Address, Provider};
use super::client::{Backend, Connect};
use super::credentials::{CachedCredentials, CredentialSource};
use super::failure::NoCredentials;
use super::http::Connector;
use super::settings::take_flag;
use super::sources::{Environment, FILE_LIMIT_BYTES, keys_of};
use crate::error::{Error, Result};
use crate::store::local::read_settings;

/// Options that every provider has, for messages.
const COMMON: &str =
    "endpoint anonymous ca_bundle part_bytes parallel timeout_seconds retry_seconds single_writer";

/// Options for S3 beyond these.
const OF_S3: &str = "region access_key_id secret_access_key session_token profile virtual_hosted";

/// What a connection goes by, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connection {
    /// The server that was named; `None` for that of the provider.
    pub endpoint: Option<String>,
    /// The region, where one was named.
    pub region: Option<String>,
    /// Where the credentials come from; `None` where the provider's own client finds them.
    pub credentials: Option<String>,
    /// The file of certificates that was named.
    pub certificates: Option<String>,
}

/// Options that arrive as strings, and what else the way to a bucket depends on.
pub(super) struct Way<'a> {
    pub(super) address: &'a Address,
    /// Options by name; ours are taken out already.
    pub(super) options: BTreeMap<String, String>,
    pub(super) environment: Environment,
    pub(super) credentials: Option<Arc<dyn CredentialSource>>,
    pub(super) timeout_seconds: Option<f64>,
}

/// Settings of a provider, as `object_store` names them.
type Config<K> = HashMap<K, String>;

impl Way<'_> {
    /// Finds the way; sends nothing.
    pub(super) fn connect(mut self) -> Result<(Box<Connect>, Connection)> {
        for (name, value) in &self.address.options {
            self.options.entry((*name).to_owned()).or_insert_with(|| value.clone());
        }
        let brings_credentials = self.credentials.is_some();
        match self.address.provider {
            Provider::S3 => self.s3(),
            _ if brings_credentials => {
                Err(Error::invalid("`credentials`", "is for S3; other providers take options of their own"))
            }
            Provider::Google => self.google(),
            Provider::Azure => self.azure(),
            Provider::Memory => Ok((self.memory()?, Connection::default())),
        }
    }

    fn s3(mut self) -> Result<(Box<Connect>, Connection)> {
        let profile_name = self.options.remove("profile");
        let takes_none = take_flag(&mut self.options, "anonymous")?.unwrap_or(false);
        let virtual_hosted = take_flag(&mut self.options, "virtual_hosted")?.unwrap_or(false);
        let (connector, certificates) = self.connector(true)?;
        let mut config = self.s3_config()?;
        let has_credentials = takes_none || self.credentials.is_some();
        let profile = self.add_profile(&mut config, profile_name.as_deref(), has_credentials)?;
        let disabled = self.environment.get("AWS_EC2_METADATA_DISABLED").is_some_and(|value| value == "true");
        let has_none = disabled && !has_source(&config) && !takes_none;
        let endpoint = config.remove(&S3Key::S3Endpoint).or_else(|| config.remove(&S3Key::Endpoint));
        let source = if takes_none {
            "none: requests are not signed".to_owned()
        } else if self.credentials.is_some() {
            "the function that was passed".to_owned()
        } else if has_none {
            "nowhere".to_owned()
        } else {
            self.source_of(&config, profile.as_deref())
        };
        let connection = Connection {
            endpoint: endpoint.clone(),
            region: config.get(&S3Key::Region).or_else(|| config.get(&S3Key::DefaultRegion)).cloned(),
            credentials: Some(source),
            certificates,
        };
        let mut builder = AmazonS3Builder::new().with_bucket_name(&self.address.bucket);
        if let Some(endpoint) = endpoint {
            let endpoint = checked_endpoint(&endpoint, virtual_hosted.then_some(&self.address.bucket))?;
            builder = builder.with_allow_http(endpoint.starts_with("http://")).with_endpoint(endpoint);
        }
        builder = builder.with_virtual_hosted_style_request(virtual_hosted).with_skip_signature(takes_none);
        let credentials = self.credentials.take().map(|source| Arc::new(CachedCredentials::new(source)));
        if let Some(credentials) = &credentials {
            builder = builder.with_credentials(Arc::clone(credentials) as _);
        } else if has_none {
            builder = builder.with_credentials(Arc::new(NoSource));
        }
        builder = config.into_iter().fold(builder, |builder, (key, value)| builder.with_config(key, value));
        builder = builder.with_retry(no_retry()).with_http_connector(connector);
        let complete = move |backend: Backend| Backend { credentials: credentials.clone(), ..backend };
        Ok((connecting(move || builder.clone().build(), complete), connection))
    }

    /// Where the credentials come from that a request is signed with, in the order in which `object_store` looks.
    fn source_of(&self, config: &Config<S3Key>, profile: Option<&str>) -> String {
        let has = |key| config.contains_key(&key);
        let by_role = || {
            if has(S3Key::WebIdentityTokenFile) {
                "a web identity token"
            } else if has(S3Key::ContainerCredentialsRelativeUri) || has(S3Key::ContainerCredentialsFullUri) {
                "the role of the container"
            } else {
                "the role of the instance, asked of its metadata service"
            }
        };
        match profile {
            Some(name) => format!("profile `{}`", name.escape_debug()),
            None if !has(S3Key::AccessKeyId) => by_role().to_owned(),
            None if self.has_keys() => "the options".to_owned(),
            None => "`AWS_ACCESS_KEY_ID` in the environment".to_owned(),
        }
    }

    /// Whether the options name keys.
    fn has_keys(&self) -> bool {
        ["access_key_id", "aws_access_key_id"].iter().any(|name| self.options.contains_key(*name))
    }

    /// What the environment and the options say.
    fn s3_config(&self) -> Result<Config<S3Key>> {
        let mut config = self.in_environment("AWS_", S3Key::from_str);
        // These would take away what the store rests on.
        for key in [S3Key::Bucket, S3Key::ConditionalPut, S3Key::CopyIfNotExists] {
            config.remove(&key);
        }
        let translate = |name: &str| match name {
            "endpoint" => Some("aws_endpoint"),
            "region" => Some("aws_region"),
            "access_key_id" => Some("aws_access_key_id"),
            "secret_access_key" => Some("aws_secret_access_key"),
            "session_token" => Some("aws_session_token"),
            _ => None,
        };
        let chosen = self.chosen("aws_", OF_S3, translate, S3Key::from_str)?;
        if chosen.contains_key(&S3Key::Endpoint) {
            config.remove(&S3Key::S3Endpoint);
        }
        if chosen.contains_key(&S3Key::AccessKeyId) {
            config.remove(&S3Key::Token);
        }
        config.extend(chosen);
        // The checksum guards the bytes, and TLS their way: a second digest of all would only cost time.
        config.entry(S3Key::Checksum).or_insert_with(|| "CRC64NVME".to_owned());
        if config.get(&S3Key::Checksum).is_some_and(|name| name == "none") {
            config.remove(&S3Key::Checksum);
        }
        config.entry(S3Key::UnsignedPayload).or_insert_with(|| "true".to_owned());
        Ok(config)
    }

    /// Takes from the shared files what nothing else has said; returns the profile whose keys were taken.
    fn add_profile(
        &self,
        config: &mut Config<S3Key>,
        named: Option<&str>,
        has_credentials: bool,
    ) -> Result<Option<String>> {
        let wanted = named.or_else(|| self.environment.get("AWS_PROFILE"));
        let profile = self.environment.profile(named)?;
        let needs_keys = named.is_some() && !self.has_keys() || !has_source(config);
        let mut of_profile = None;
        if !has_credentials
            && needs_keys
            && (wanted.is_some() || profile.keys.is_some() || profile.wants.is_some())
        {
            let name = wanted.unwrap_or("default");
            let keys = keys_of(&profile, name)?;
            of_profile = Some(name.to_owned());
            config.insert(S3Key::AccessKeyId, keys.access_key_id);
            config.insert(S3Key::SecretAccessKey, keys.secret_access_key.expose().to_owned());
            match keys.session_token {
                Some(token) => config.insert(S3Key::Token, token.expose().to_owned()),
                None => config.remove(&S3Key::Token),
            };
        }
        if let Some(region) = profile.region
            && !config.contains_key(&S3Key::Region)
            && !config.contains_key(&S3Key::DefaultRegion)
        {
            config.insert(S3Key::Region, region);
        }
        if let Some(endpoint) = profile.endpoint
            && !config.contains_key(&S3Key::Endpoint)
            && !config.contains_key(&S3Key::S3Endpoint)
        {
            config.insert(S3Key::Endpoint, endpoint);
        }
        Ok(of_profile)
    }

    fn google(mut self) -> Result<(Box<Connect>, Connection)> {
        let mut config = self.in_environment("GOOGLE_", GoogleKey::from_str);
        config.remove(&GoogleKey::Bucket);
        let takes_none = take_flag(&mut self.options, "anonymous")?.unwrap_or(false);
        let (connector, certificates) = self.connector(false)?;
        let translate = |name: &str| (name == "endpoint").then_some("google_base_url");
        config.extend(self.chosen("google_", "", translate, GoogleKey::from_str)?);
        let mut builder = GoogleCloudStorageBuilder::new()
            .with_bucket_name(&self.address.bucket)
            .with_skip_signature(takes_none)
            .with_retry(no_retry())
            .with_http_connector(connector);
        let endpoint = config.remove(&GoogleKey::BaseUrl);
        if let Some(endpoint) = &endpoint {
            builder = builder.with_config(GoogleKey::BaseUrl, checked_endpoint(endpoint, None)?);
        }
        let connection = Connection { endpoint, certificates, ..Connection::default() };
        builder = config.into_iter().fold(builder, |builder, (key, value)| builder.with_config(key, value));
        let complete = |backend| Backend { has_generations: true, ..backend };
        Ok((connecting(move || builder.clone().build(), complete), connection))
    }

    fn azure(mut self) -> Result<(Box<Connect>, Connection)> {
        let mut config = self.in_environment("AZURE_", AzureKey::from_str);
        config.remove(&AzureKey::ContainerName);
        let takes_none = take_flag(&mut self.options, "anonymous")?.unwrap_or(false);
        let (connector, certificates) = self.connector(false)?;
        let translate = |name: &str| (name == "endpoint").then_some("azure_endpoint");
        config.extend(self.chosen("azure_", "", translate, AzureKey::from_str)?);
        let mut builder = MicrosoftAzureBuilder::new()
            .with_container_name(&self.address.bucket)
            .with_skip_signature(takes_none)
            .with_retry(no_retry())
            .with_http_connector(connector);
        let endpoint = config.get(&AzureKey::Endpoint).cloned();
        if let Some(endpoint) = &endpoint {
            builder = builder.with_allow_http(checked_endpoint(endpoint, None)?.starts_with("http://"));
        }
        builder = config.into_iter().fold(builder, |builder, (key, value)| builder.with_config(key, value));
        let connection = Connection { endpoint, certificates, ..Connection::default() };
        Ok((connecting(move || builder.clone().build(), |backend| backend), connection))
    }

    /// A bucket in the memory of this process, one for each name: for tests.
    fn memory(self) -> Result<Box<Connect>> {
        use std::sync::{LazyLock, Mutex, PoisonError};
        static BUCKETS: LazyLock<Mutex<HashMap<String, InMemory>>> = LazyLock::new(Mutex::default);
        if let Some(name) = self.options.keys().next() {
            return Err(unknown(name, "", COMMON));
        }
        let mut buckets = BUCKETS.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = buckets.entry(self.address.bucket.clone()).or_default().clone();
        Ok(Box::new(move || Ok(Backend::in_memory(&bucket))))
    }

    /// What the environment says, where `object_store` knows it.
    fn in_environment<K: Eq + Hash + Debug>(
        &self,
        start: &str,
        parse: impl Fn(&str) -> object_store::Result<K>,
    ) -> Config<K> {
        let set = self.environment.beginning(start);
        set.filter_map(|(name, value)| {
            let key = parse(&name).ok()?;
            // Time-outs and the like are ours to choose.
            (!is_of_client(&key)).then(|| (key, value.to_owned()))
        })
        .collect()
    }

    /// The options of the program, as `object_store` names them.
    fn chosen<K: Eq + Hash + Debug>(
        &self,
        start: &str,
        of_provider: &str,
        translate: impl Fn(&str) -> Option<&'static str>,
        parse: impl Fn(&str) -> object_store::Result<K>,
    ) -> Result<Config<K>> {
        let mut config = Config::new();
        for (name, value) in &self.options {
            let theirs = translate(name).or_else(|| name.starts_with(start).then_some(name.as_str()));
            let key = theirs.and_then(|theirs| parse(theirs).ok()).filter(|key| !is_of_client(key));
            let key = key.ok_or_else(|| unknown(name, start, &format!("{COMMON} {of_provider}")))?;
            config.insert(key, value.clone());
        }
        Ok(config)
    }

    /// What carries requests, and the file of certificates that was named.
    fn connector(&mut self, conditional_join: bool) -> Result<(Connector, Option<String>)> {
        let path = self.options.remove("ca_bundle");
        let path = path.or_else(|| self.environment.get("AWS_CA_BUNDLE").map(ToOwned::to_owned));
        let ca_bundle = match &path {
            Some(path) => Some(Arc::new(read_settings(path.as_ref(), FILE_LIMIT_BYTES)?)),
            None => None,
        };
        Ok((Connector { ca_bundle, timeout_seconds: self.timeout_seconds, conditional_join }, path))
    }
}

/// Whether a key is one of the HTTP client, which is ours, but for those that the client heeds.
fn is_of_client<K: Debug>(key: &K) -> bool {
    let heeded =
        [ClientConfigKey::AllowHttp, ClientConfigKey::AllowInvalidCertificates, ClientConfigKey::ProxyUrl];
    let name = format!("{key:?}");
    name.starts_with("Client(") && !heeded.iter().any(|heeded| name == format!("Client({heeded:?})"))
}

fn unknown(name: &str, start: &str, legal: &str) -> Error {
    let names = legal.split_whitespace().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let theirs = if start.is_empty() {
        String::new()
    } else {
        format!(", and what object_store names beginning with `{start}`")
    };
    Error::invalid(
        format!("option `{}`", name.escape_debug()),
        format!("is not known; there are: {names}{theirs}"),
    )
}

/// Whether credentials are named, wherever they come from.
fn has_source(config: &Config<S3Key>) -> bool {
    let named = [
        S3Key::AccessKeyId,
        S3Key::SecretAccessKey,
        S3Key::WebIdentityTokenFile,
        S3Key::ContainerCredentialsRelativeUri,
        S3Key::ContainerCredentialsFullUri,
        S3Key::SkipSignature,
    ];
    named.iter().any(|key| config.contains_key(key))
}

/// An endpoint without a slash at its end; `bucket` is put in front of its host.
fn checked_endpoint(endpoint: &str, bucket: Option<&str>) -> Result<String> {
    let invalid = |reason: String| Error::invalid("option `endpoint`", reason);
    let host = match endpoint.split_once("://") {
        Some((scheme @ ("http" | "https"), host)) if !host.contains(['@', '?', '#']) => Some((scheme, host)),
        _ => None,
    };
    let Some((scheme, host)) = host else {
        return Err(invalid("must be like `https://host` or `http://host:port`".to_owned()));
    };
    let before = bucket.map_or_else(String::new, |bucket| format!("{bucket}."));
    let whole = format!("{scheme}://{before}{}", host.trim_end_matches('/'));
    // What is no url would end in a panic further down.
    match reqwest::Url::parse(&whole) {
        Ok(_) => Ok(whole),
        Err(error) => Err(invalid(format!("`{}` is no url: {error}", whole.escape_debug()))),
    }
}

/// A connection to the store that `build` makes, with what `complete` adds.
fn connecting<S: ObjectStore + MultipartStore>(
    build: impl Fn() -> object_store::Result<S> + Send + Sync + 'static,
    complete: impl Fn(Backend) -> Backend + Send + Sync + 'static,
) -> Box<Connect> {
    Box::new(move || build().map(|store| complete(Backend::of(store))).map_err(|error| refused(&error)))
}

/// Retries are ours.
fn no_retry() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

fn refused(error: &object_store::Error) -> Error {
    let failure = super::failure::Failure::of(error);
    Error::invalid("options of the bucket", failure.text)
}

/// Says that there are no credentials, for a machine that was told not to ask for its own.
#[derive(Debug)]
struct NoSource;

#[async_trait::async_trait]
impl object_store::CredentialProvider for NoSource {
    type Credential = object_store::aws::AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<Self::Credential>> {
        Err(NoCredentials::nowhere().into_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings that a url, options and an environment lead to, and whose the credentials are.
    fn way(options: &[(&str, &str)], variables: &[(&str, &str)]) -> Result<(Config<S3Key>, String)> {
        let mut options: BTreeMap<String, String> =
            options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let profile = options.remove("profile");
        let address = Address::parse("s3://bkt/run")?;
        let environment = Environment::of(variables);
        let way = Way { address: &address, options, environment, credentials: None, timeout_seconds: None };
        let mut config = way.s3_config()?;
        let taken = way.add_profile(&mut config, profile.as_deref(), false)?;
        let source = way.source_of(&config, taken.as_deref());
        Ok((config, source))
    }

    fn config(options: &[(&str, &str)], variables: &[(&str, &str)]) -> Result<Config<S3Key>> {
        way(options, variables).map(|(config, _)| config)
    }

    /// Files of profiles, and the variables that point there.
    fn files() -> (tempfile::TempDir, [(&'static str, String); 2]) {
        use crate::store::local::{LocalOptions, LocalStore};
        use crate::store::{Folder, Key, PutMode, Store};
        let folder = tempfile::tempdir().unwrap();
        let store = LocalStore::open(folder.path(), LocalOptions { sync: false, read_only: false }).unwrap();
        store.create_folders().unwrap();
        for (name, text) in [
            (
                "credentials",
                "[default]\naws_access_key_id=AKD\naws_secret_access_key=s\n[work]\naws_access_key_id=AKW\naws_secret_access_key=s\naws_session_token=t\n",
            ),
            (
                "config",
                "[default]\nregion=eu-north-1\n[profile work]\nregion=us-west-2\nendpoint_url=http://here\n[profile login]\nsso_session=x\n",
            ),
        ] {
            store.put(&Key::new(Folder::Root, name).unwrap(), text.as_bytes(), PutMode::Replace).unwrap();
        }
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let variables =
            [("AWS_SHARED_CREDENTIALS_FILE", path("credentials")), ("AWS_CONFIG_FILE", path("config"))];
        (folder, variables)
    }

    #[test]
    fn options_win_over_the_environment_and_that_over_the_files() {
        let (_folder, files) = files();
        let files = files.each_ref().map(|(name, value)| (*name, value.as_str()));
        let own = [("AWS_ACCESS_KEY_ID", "AKE"), ("AWS_SECRET_ACCESS_KEY", "e"), ("AWS_SESSION_TOKEN", "te")];
        let keys = [("access_key_id", "AKO"), ("secret_access_key", "o")];
        let by_profile = [("profile", "work")];
        let named = [("AWS_PROFILE", "work")];
        let none: [(&str, &str); 0] = [];
        let environment = "`AWS_ACCESS_KEY_ID` in the environment";
        for (options, variables, key, token, region, source) in [
            (&keys[..], &[&files[..], &own].concat(), "AKO", None, Some("eu-north-1"), "the options"),
            (&none, &[&files[..], &own].concat(), "AKE", Some("te"), Some("eu-north-1"), environment),
            (&none, &files.to_vec(), "AKD", None, Some("eu-north-1"), "profile `default`"),
            (&none, &[&files[..], &named].concat(), "AKW", Some("t"), Some("us-west-2"), "profile `work`"),
            (&none, &[&files[..], &own, &named].concat(), "AKE", Some("te"), Some("us-west-2"), environment),
            (
                &by_profile,
                &[&files[..], &own].concat(),
                "AKW",
                Some("t"),
                Some("us-west-2"),
                "profile `work`",
            ),
            (&keys, &own.to_vec(), "AKO", None, None, "the options"),
        ] {
            let (config, found) = way(options, variables).unwrap();
            assert_eq!(found, source, "{options:?} {variables:?}");
            let value = |key| config.get(&key).map(String::as_str);
            assert_eq!(value(S3Key::AccessKeyId), Some(key), "{options:?} {variables:?}");
            assert_eq!(value(S3Key::Token), token, "{options:?} {variables:?}");
            assert_eq!(value(S3Key::Region), region, "{options:?} {variables:?}");
        }
    }

    #[test]
    fn what_stands_nowhere_is_left_to_the_machine() {
        let variables = [("HOME", "/nowhere"), ("AWS_TIMEOUT", "3"), ("AWS_BUCKET", "other")];
        let (config, source) = way(&[], &variables).unwrap();
        assert!(!has_source(&config));
        assert_eq!(source, "the role of the instance, asked of its metadata service");
        let told: Vec<_> = [S3Key::Bucket, S3Key::Client(ClientConfigKey::Timeout)]
            .iter()
            .filter(|key| config.contains_key(key))
            .collect();
        assert_eq!(told, [] as [&S3Key; 0]);
        assert_eq!(config.get(&S3Key::Checksum).map(String::as_str), Some("CRC64NVME"));
        let web = [("AWS_WEB_IDENTITY_TOKEN_FILE", "/token"), ("AWS_ROLE_ARN", "arn")];
        let (by_web, source) = way(&[], &web).unwrap();
        assert!(has_source(&by_web));
        assert_eq!(source, "a web identity token");
        let none = super::tests::config(&[("aws_checksum_algorithm", "none")], &[]).unwrap();
        assert_eq!(none.get(&S3Key::Checksum), None);
    }

    #[test]
    fn a_profile_that_gives_no_keys_says_what_to_do() {
        let (_folder, files) = files();
        let files = files.each_ref().map(|(name, value)| (*name, value.as_str()));
        let error = config(&[("profile", "login")], &files).unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid profile `login`: needs `sso_session`, which is not done here: pass `credentials`, a callable \
             that asks your own tools, such as boto3"
        );
        let error = config(&[], &[&files[..], &[("AWS_PROFILE", "gone")]].concat()).unwrap_err();
        assert!(error.to_string().ends_with("there are: `default`, `login`, `work`"), "{error}");
    }

    #[test]
    fn an_endpoint_of_the_environment_gives_way_to_that_of_the_options() {
        let variables = [("AWS_ENDPOINT_URL", "http://a"), ("AWS_ENDPOINT_URL_S3", "http://b")];
        let found = config(&[("endpoint", "http://c")], &variables).unwrap();
        assert_eq!(found.get(&S3Key::Endpoint).map(String::as_str), Some("http://c"));
        assert_eq!(found.get(&S3Key::S3Endpoint), None);
        let found = config(&[], &variables).unwrap();
        assert_eq!(found.get(&S3Key::S3Endpoint).map(String::as_str), Some("http://b"));
        assert_eq!(checked_endpoint("https://host:9000/", Some("bkt")).unwrap(), "https://bkt.host:9000");
        assert!(checked_endpoint("http://a b", None).is_err());
    }
}
