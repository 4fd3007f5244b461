//! Who we are to a bucket: secrets that are never printed, and where they come from when the program brings
//! them itself.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use object_store::CredentialProvider;
use object_store::aws::AwsCredential;

use super::failure::NoCredentials;
use crate::error::Result;

/// Seconds before its end at which a credential is replaced: longer than one request lasts.
const MARGIN_SECONDS: f64 = 300.0;

/// A text that no message shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret(***)")
    }
}

/// What signs requests.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// Which key signs.
    pub access_key_id: String,
    /// The key.
    pub secret_access_key: Secret,
    /// Goes with keys that end.
    pub session_token: Option<Secret>,
    /// When they end, if they do.
    pub expires_at_unix_seconds: Option<f64>,
}

/// Where credentials come from that the program brings itself.
pub trait CredentialSource: Send + Sync {
    /// Fetches them anew; may block, and is called by one thread at a time.
    fn fetch(&self) -> Result<Credentials>;
}

/// Keeps what a source gave until shortly before it ends, or until a server calls it expired.
pub(super) struct CachedCredentials {
    source: Arc<dyn CredentialSource>,
    kept: Mutex<Option<(Arc<AwsCredential>, Option<f64>)>>,
    fetching: tokio::sync::Mutex<()>,
}

impl CachedCredentials {
    pub(super) fn new(source: Arc<dyn CredentialSource>) -> Self {
        Self { source, kept: Mutex::new(None), fetching: tokio::sync::Mutex::new(()) }
    }

    /// Forgets what is kept: the server says that it has ended.
    pub(super) fn forget(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Arc<AwsCredential>, Option<f64>)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fresh(&self) -> Option<Arc<AwsCredential>> {
        let kept = self.lock();
        let (credential, expires_at) = kept.as_ref()?;
        let ends = expires_at.is_some_and(|end| end - MARGIN_SECONDS <= now_unix_seconds());
        (!ends).then(|| Arc::clone(credential))
    }
}

#[async_trait::async_trait]
impl CredentialProvider for CachedCredentials {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        if let Some(credential) = self.fresh() {
            return Ok(credential);
        }
        // One request fetches for all that wait.
        let _turn = self.fetching.lock().await;
        if let Some(credential) = self.fresh() {
            return Ok(credential);
        }
        let source = Arc::clone(&self.source);
        let fetched = tokio::task::spawn_blocking(move || source.fetch()).await;
        let fetched =
            fetched.map_err(|_panicked| NoCredentials::new("`credentials` panicked").into_error())?;
        let fetched = fetched.map_err(|error| NoCredentials::new(error.chain()).into_error())?;
        let credential = Arc::new(AwsCredential {
            key_id: fetched.access_key_id,
            secret_key: fetched.secret_access_key.0,
            token: fetched.session_token.map(|token| token.0),
        });
        *self.lock() = Some((Arc::clone(&credential), fetched.expires_at_unix_seconds));
        Ok(credential)
    }
}

impl fmt::Debug for CachedCredentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("CachedCredentials")
    }
}

/// Ends of credentials are moments of the wall clock, so this needs one; nothing else here does.
#[expect(clippy::disallowed_methods, reason = "credentials end at a moment of the wall clock")]
fn now_unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
