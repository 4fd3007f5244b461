//! A repository in a bucket: Amazon S3 and what speaks its language, Google Cloud Storage, Azure Blob Storage.
//!
//! Keys are those of a folder (FORMAT.md, section "Repository"), below the prefix of the url. There are no
//! folder markers, no lock and no staged objects: what is being sent is known to the server alone. A bucket can't promise that a handle outlives the deletion of
//! its object: reading then fails with "not found", and never gives other bytes.

mod address;
mod attempt;
mod client;
mod connect;
mod credentials;
mod failure;
mod http;
mod probe;
mod profile;
mod reader;
mod settings;
mod sources;
mod staged;
mod upload;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use object_store::memory::InMemory;

use self::address::Address;
use self::client::{Backend, Client};
use self::connect::Way;
use self::reader::BucketObject;
use self::settings::Settings;
use self::sources::Environment;
use self::staged::BucketStagedWrite;
use super::remote::{RemoteListed, RemoteStore, Transfer, Upload, Version};
use super::{Folder, Key, Listed, PutMode, ReadAt, StagedWrite, Store, WriterLock};
use crate::error::{Error, Result};

pub use self::probe::PROBE_START;

pub use self::connect::Connection;
pub use self::credentials::{CredentialSource, Credentials, Secret};

/// How a bucket is opened.
pub struct BucketOptions {
    /// `s3://bucket/prefix`, `gs://...`, `az://...`, or the address of a provider.
    pub url: String,
    /// Options by name; see the guide on buckets.
    pub options: BTreeMap<String, String>,
    /// Credentials that the program brings itself.
    pub credentials: Option<Arc<dyn CredentialSource>>,
}

impl fmt::Debug for BucketOptions {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Values may be secrets.
        let names: Vec<&String> = self.options.keys().collect();
        write!(formatter, "BucketOptions({}, options {names:?})", self.url)
    }
}

/// What a server was seen to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// It publishes only where nothing lies yet.
    pub put_if_absent: bool,
    /// It replaces only the version that was expected.
    pub swap: bool,
}

/// A [`Store`] and [`RemoteStore`] in a bucket.
///
/// Memory of a transfer is bounded by `parallel` (8) times `part_bytes` (16 MiB).
#[derive(Clone, Debug)]
pub struct BucketStore {
    client: Arc<Client>,
    connection: Arc<Connection>,
}

impl BucketStore {
    /// Opens a bucket without sending a request.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where the url or an option is wrong.
    pub fn open(options: BucketOptions) -> Result<Self> {
        Self::open_in(options, Environment::of_process())
    }

    fn open_in(options: BucketOptions, environment: Environment) -> Result<Self> {
        let BucketOptions { url, mut options, credentials } = options;
        let address = Address::parse(&url)?;
        let settings = Settings::take(&mut options)?;
        let timeout_seconds = settings.timeout_seconds;
        let address = &address;
        let way = Way { address, options, environment, credentials, timeout_seconds };
        let (connect, connection) = way.connect()?;
        let client = Client::new(address.root.clone(), address.prefix.clone(), settings, connect);
        client.backend()?;
        Ok(Self { client: Arc::new(client), connection: Arc::new(connection) })
    }

    /// A bucket in memory, empty, for tests. A clone is another handle of the same bucket.
    #[must_use]
    pub fn in_memory() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(1);
        let root = format!("memory://{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let settings = Settings { part_bytes: 1 << 20, retry_seconds: 0.0, ..Settings::default() };
        let objects = InMemory::new();
        let connect = move || Ok(Backend::in_memory(&objects));
        let client = Client::new(root, "run".to_owned(), settings, Box::new(connect));
        Self { client: Arc::new(client), connection: Arc::default() }
    }

    /// What the connection goes by; sends nothing.
    #[must_use]
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Asks the server for everything that is needed of it, with an object of its own: whether it is reached,
    /// knows us and the bucket, and keeps the conditions of a put.
    ///
    /// # Errors
    /// [`Error::Store`] with the cause.
    pub fn probe(&self) -> Result<Capabilities> {
        self.client.probe()
    }
}

impl Store for BucketStore {
    fn root(&self) -> String {
        self.client.root.clone()
    }

    fn create_folders(&self) -> Result<()> {
        Ok(())
    }

    fn list(&self, folder: Folder) -> Result<Vec<Listed>> {
        let rows = self.client.list(folder)?.into_iter();
        Ok(rows.map(|row| Listed { name: row.name, length_bytes: Some(row.length_bytes) }).collect())
    }

    fn get(&self, key: &Key, limit_bytes: u64) -> Result<Vec<u8>> {
        self.client.get(key, limit_bytes).map(|(bytes, _)| bytes)
    }

    fn open(&self, key: &Key) -> Result<Box<dyn ReadAt>> {
        Ok(Box::new(BucketObject::open(&self.client, key)?))
    }

    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>> {
        Ok(Box::new(BucketStagedWrite::new(&self.client, key)))
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.client.put(key, bytes, &Client::put_mode(mode)).map(|_version| ())
    }

    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        self.client.delete(folder, names)
    }

    fn sync_folder(&self, _folder: Folder) -> Result<()> {
        Ok(())
    }

    fn sweep_staged(&self) -> Result<u64> {
        // The server alone knows them; whoever begins an upload that is to outlive a crash notes it himself.
        Ok(0)
    }

    fn lock(&self, _holder: &str) -> Result<Box<dyn WriterLock>> {
        let reason = "a bucket has no lock: write through a local folder, with the bucket as its remote";
        Err(Error::invalid(format!("writer in `{}`", self.root()), reason))
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn local_path(&self, _key: &Key) -> Option<PathBuf> {
        None
    }

    fn is_at_hand(&self, _key: &Key) -> bool {
        false
    }
}

impl RemoteStore for BucketStore {
    fn require_promises(&self) -> Result<()> {
        self.probe().map(drop)
    }

    fn list_versions(&self, folder: Folder) -> Result<Vec<RemoteListed>> {
        self.client.list(folder)
    }

    fn get_versioned(&self, key: &Key, limit_bytes: u64) -> Result<(Vec<u8>, Version)> {
        self.client.get(key, limit_bytes)
    }

    fn swap(&self, key: &Key, bytes: &[u8], expected: Option<&Version>) -> Result<Version> {
        self.client.swap(key, bytes, expected)
    }

    fn delete_within(&self, folder: Folder, names: &[String], time: Duration) -> Result<()> {
        self.client.delete_within(folder, names, time)
    }

    fn begin_upload(&self, key: &Key, length_bytes: u64) -> Result<Upload> {
        self.client.begin_upload(key, length_bytes)
    }

    fn send_parts(
        &self,
        key: &Key,
        source: &dyn ReadAt,
        upload: &mut Upload,
        transfer: Transfer<'_>,
        sent: &mut dyn FnMut(&Upload) -> Result<()>,
    ) -> Result<()> {
        self.client.send_parts(key, source, upload, transfer, sent)
    }

    fn complete_upload(&self, key: &Key, upload: &Upload) -> Result<Version> {
        self.client.complete_upload(key, upload)
    }

    fn abort_upload(&self, key: &Key, upload: &Upload) -> Result<()> {
        self.client.abort_upload(key, &upload.id)
    }
}
