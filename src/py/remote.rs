//! Buckets: from what Python knows of one to stores, credentials from a Python function, and pulls.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Deserialize;

use crate::crypt::MasterKey;
use crate::error::{Error, Result};
use crate::repository::{Access, Clear, holder};
use crate::store::local::{LocalOptions, LocalStore};
use crate::store::object::{
    BucketOptions, BucketStore, Connection, CredentialSource, Credentials, PROBE_START, Secret,
};
use crate::store::remote::{RemoteStore, Transfer};
use crate::store::{Folder, Key, PutMode, Store};
use crate::sync::{SyncOptions, TierAccess, TieredStore, pull};

use super::convert;
use super::error::raise;
use super::wait::interruptible;

/// What `varvite.buckets.read_remote` makes of a bucket.
#[derive(Deserialize)]
struct RemoteText {
    url: String,
    options: BTreeMap<String, String>,
    #[serde(flatten)]
    sync: SyncOptions,
}

/// A bucket that was asked for and is not opened yet.
pub(super) struct Remote {
    bucket: BucketOptions,
    sync: SyncOptions,
}

impl Remote {
    pub(super) fn read(text: &str, credentials: Option<Py<PyAny>>) -> Result<Self> {
        let RemoteText { url, options, sync } =
            serde_json::from_str(text).map_err(|error| Error::invalid("remote", error.to_string()))?;
        let credentials =
            credentials.map(|function| Arc::new(PythonCredentials(function)) as Arc<dyn CredentialSource>);
        Ok(Self { bucket: BucketOptions { url, options, credentials }, sync })
    }

    fn open(self) -> Result<Arc<BucketStore>> {
        BucketStore::open(self.bucket).map(Arc::new)
    }
}

/// Where a repository lies.
pub(super) struct Places {
    pub(super) store: Arc<dyn Store>,
    /// The same, where there are a folder and a bucket.
    pub(super) tiers: Option<Arc<TieredStore>>,
}

impl Places {
    /// A folder, a folder with a bucket behind it, or a bucket alone.
    pub(super) fn open(
        folder: Option<&Path>,
        local: LocalOptions,
        remote: Option<Remote>,
        access: Access,
        key: Option<MasterKey>,
    ) -> Result<Self> {
        let folder: Option<Arc<dyn Store>> = match folder {
            Some(folder) => Some(Arc::new(LocalStore::open(folder, local)?)),
            None => None,
        };
        match (folder, remote) {
            (Some(store), None) => Ok(Self { store, tiers: None }),
            (Some(folder), Some(remote)) => {
                let sync = SyncOptions { key, ..remote.sync.clone() };
                let bucket: Arc<dyn RemoteStore> = remote.open()?;
                let tiers = TieredStore::open(folder, bucket, tier_access(access), sync)?;
                let store = Arc::clone(&tiers);
                Ok(Self { store, tiers: Some(tiers) })
            }
            (None, Some(remote)) if matches!(access, Access::Read | Access::Tag) => {
                Ok(Self { store: remote.open()?, tiers: None })
            }
            (None, _) => Err(Error::invalid("path", "who writes needs a folder")),
        }
    }
}

fn tier_access(access: Access) -> TierAccess {
    match access {
        Access::Write => TierAccess::Write,
        Access::Rank => TierAccess::Rank,
        Access::Tag => TierAccess::Tag,
        Access::Read => TierAccess::Read,
    }
}

/// A Python function that gives credentials.
struct PythonCredentials(Py<PyAny>);

impl CredentialSource for PythonCredentials {
    fn fetch(&self) -> Result<Credentials> {
        Python::attach(|py| {
            credentials(self.0.bind(py)).map_err(|error| {
                let text = error.to_string();
                Error::invalid("credentials", format!("the function that is to give them failed: {text}"))
            })
        })
    }
}

fn credentials(function: &Bound<'_, PyAny>) -> PyResult<Credentials> {
    let given = function.call0()?;
    if !given.hasattr("get")? {
        let kind = given.get_type().name()?;
        let wanted = "a dict with `access_key_id` and `secret_access_key`";
        return Err(PyTypeError::new_err(format!("it returned a {kind}, not {wanted}")));
    }
    let text = |name: &str| given.get_item(name).and_then(|value| value.extract::<String>());
    let optional = |name: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
        Ok(given.call_method1("get", (name,))?.into_any()).map(|value| (!value.is_none()).then_some(value))
    };
    let expires_at_unix_seconds = match optional("expires_at")? {
        None => None,
        Some(value) if value.hasattr("timestamp")? => Some(value.call_method0("timestamp")?.extract()?),
        Some(value) => Some(value.extract().map_err(|_| {
            PyTypeError::new_err("`expires_at` must be a datetime, or seconds since 1970 as a number")
        })?),
    };
    Ok(Credentials {
        access_key_id: text("access_key_id")?,
        secret_access_key: Secret::new(text("secret_access_key")?),
        session_token: optional("session_token")?
            .map(|value| value.extract::<String>().map(Secret::new))
            .transpose()?,
        expires_at_unix_seconds,
    })
}

/// Copies snapshots of a bucket into a folder that is empty or of the same repository, newest first.
#[pyfunction]
#[pyo3(name = "pull", signature = (folder, remote, credentials, seqs, moved=None, key=None))]
#[expect(clippy::needless_pass_by_value, reason = "arguments are extracted from Python as owned values")]
pub(super) fn pull_snapshots<'py>(
    py: Python<'py>,
    folder: PathBuf,
    remote: &str,
    credentials: Option<Py<PyAny>>,
    seqs: Vec<u64>,
    moved: Option<Py<PyAny>>,
    key: Option<&[u8]>,
) -> PyResult<Bound<'py, PyDict>> {
    let moved_bytes = AtomicU64::new(0);
    let ended = AtomicBool::new(false);
    let report = std::thread::scope(|scope| {
        let told = moved.map(|function| {
            let (moved_bytes, ended) = (&moved_bytes, &ended);
            scope.spawn(move || tell(&function, moved_bytes, ended))
        });
        let report = interruptible(py, |cancelled| {
            let master = key.map(MasterKey::new).transpose()?;
            let remote = Remote::read(remote, credentials)?;
            let limit_bytes_per_second = remote.sync.limit_bytes_per_second;
            let bucket = remote.open()?;
            let local: Arc<dyn Store> = Arc::new(LocalStore::open(&folder, LocalOptions::default())?);
            local.create_folders()?;
            let _lock = local.lock(&holder())?;
            let transfer = Transfer { cancelled, moved_bytes: &moved_bytes, limit_bytes_per_second };
            pull(bucket.as_ref(), &local, &seqs, master.as_ref(), transfer)
        });
        ended.store(true, Ordering::Relaxed);
        // It calls Python for the last time.
        let told = py.detach(|| told.map_or(Ok(Ok(())), std::thread::ScopedJoinHandle::join));
        report.and_then(|report| told.unwrap_or(Ok(())).map(|()| report))
    })?;
    convert::pulled(py, &report)
}

/// What an encrypted repository shows without a key, as `varvite.native_types.Clear`; `None` where it is not encrypted.
#[pyfunction]
#[pyo3(signature = (path, remote=None, credentials=None))]
#[expect(clippy::needless_pass_by_value, reason = "arguments are extracted from Python as owned values")]
pub(super) fn read_clear<'py>(
    py: Python<'py>,
    path: Option<PathBuf>,
    remote: Option<&str>,
    credentials: Option<Py<PyAny>>,
) -> PyResult<Option<Bound<'py, PyDict>>> {
    let clear = interruptible(py, |_| {
        let remote = remote.map(|text| Remote::read(text, credentials)).transpose()?;
        let local = LocalOptions { read_only: true, ..LocalOptions::default() };
        Clear::read(Places::open(path.as_deref(), local, remote, Access::Read, None)?.store.as_ref())
    })?;
    clear.map(|clear| convert::clear(py, &clear)).transpose()
}

/// Tells a Python function how many bytes have come, until the end.
fn tell(function: &Py<PyAny>, moved_bytes: &AtomicU64, ended: &AtomicBool) -> PyResult<()> {
    loop {
        let is_last = ended.load(Ordering::Relaxed);
        let so_far = moved_bytes.load(Ordering::Relaxed);
        Python::attach(|py| function.call1(py, (so_far,)).map(drop))?;
        if is_last {
            return Ok(());
        }
        std::thread::sleep(super::wait::POLL);
    }
}

/// What a connection to a bucket goes by; sends nothing.
#[pyfunction]
#[pyo3(name = "connection", signature = (remote, credentials))]
pub(super) fn connection_of<'py>(
    py: Python<'py>,
    remote: &str,
    credentials: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let opened = Remote::read(remote, credentials).and_then(Remote::open);
    let Connection { endpoint, region, credentials, certificates } =
        opened.map_err(|error| raise(py, &error))?.connection().clone();
    let dict = PyDict::new(py);
    dict.set_item("endpoint", endpoint)?;
    dict.set_item("region", region)?;
    dict.set_item("credentials", credentials)?;
    dict.set_item("certificates", certificates)?;
    Ok(dict)
}

/// What a bucket was seen to do, and how fast it is; it needs to hold no repository.
#[pyfunction]
#[pyo3(name = "probe", signature = (remote, credentials))]
pub(super) fn probe_bucket<'py>(
    py: Python<'py>,
    remote: &str,
    credentials: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let (found, rates) = interruptible(py, |_| {
        let bucket = Remote::read(remote, credentials)?.open()?;
        let found = bucket.probe()?;
        Ok((found, Rates::measure(bucket.as_ref())?))
    })?;
    let dict = PyDict::new(py);
    dict.set_item("put_if_absent", found.put_if_absent)?;
    dict.set_item("swap", found.swap)?;
    dict.set_item("measured_bytes", MEASURED_BYTES)?;
    dict.set_item("request_seconds", rates.request)?;
    dict.set_item("put_bytes_per_second", f64::from(MEASURED_BYTES) / rates.put)?;
    dict.set_item("get_bytes_per_second", f64::from(MEASURED_BYTES) / rates.get)?;
    Ok(dict)
}

/// Bytes of the object that shows how fast a bucket is.
const MEASURED_BYTES: u32 = 8 << 20;

/// Seconds that one object took there and back.
struct Rates {
    request: f64,
    put: f64,
    get: f64,
}

impl Rates {
    fn measure(bucket: &BucketStore) -> Result<Self> {
        let name = format!("{PROBE_START}rate-{}", std::process::id());
        let key = Key::new(Folder::Uploads, &name)?;
        let measured = Self::with(bucket, &key);
        bucket.delete(Folder::Uploads, &[name])?;
        measured
    }

    fn with(bucket: &BucketStore, key: &Key) -> Result<Self> {
        // What compresses well on the way would look faster than a pack.
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let bytes: Vec<u8> = (0..MEASURED_BYTES / 8)
            .flat_map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state.to_le_bytes()
            })
            .collect();
        let (put_seconds, put) = timed(|| bucket.put(key, &bytes, PutMode::Replace));
        put?;
        let (request_seconds, found) = timed(|| bucket.open(key));
        found?;
        let (get_seconds, got) = timed(|| bucket.get(key, MEASURED_BYTES.into()));
        if got? == bytes {
            return Ok(Self { request: request_seconds, put: put_seconds, get: get_seconds });
        }
        Err(Error::corrupt(key.to_string(), 0, "object", "the bytes that were put", "other bytes"))
    }
}

fn timed<T>(work: impl FnOnce() -> T) -> (f64, T) {
    let started = Instant::now();
    let done = work();
    (started.elapsed().as_secs_f64(), done)
}
