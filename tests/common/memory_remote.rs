//! A bucket in memory, and the machines that use it: versions, uploads in parts, compare-and-swap, a clock that the
//! test moves, and a plan of what goes wrong at which request.
//!
//! Every request of a [`MemoryRemote`] is a numbered step, reads of an open object included. Handles of one bucket
//! that [`MemoryRemote::elsewhere`] makes have plans and logs of their own, as two machines have.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use varvite::error::{Error, Result};
use varvite::store::memory::MemoryStore;
use varvite::store::remote::{RemoteListed, RemoteStore, Transfer, Upload, Version};
use varvite::store::{Folder, Key, Listed, Published, PutMode, ReadAt, StagedWrite, Store, WriterLock};
use varvite::sync::Clock;

/// Which request goes wrong, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The request, counted from 1 since the fault was armed.
    pub(crate) at: u64,
    pub(crate) mode: FaultMode,
}

/// How a request goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultMode {
    /// It is not carried out and fails; all later ones work.
    FailOnce,
    /// It and all later ones are not carried out and fail.
    FailForever,
    /// It is carried out, and its answer is lost; all later ones work.
    LoseAnswer,
    /// The process is dead before the request: nothing of the machine works any more.
    KillBefore,
    /// The process is dead after the request.
    KillAfter,
}

impl FaultMode {
    pub(crate) const ALL: [Self; 5] =
        [Self::FailOnce, Self::FailForever, Self::LoseAnswer, Self::KillBefore, Self::KillAfter];
}

#[derive(Debug, Default)]
struct Bucket {
    objects: BTreeMap<Key, Object>,
    uploads: BTreeMap<String, Sending>,
    next_version: u64,
    now_unix_ms: u64,
}

#[derive(Clone, Debug)]
struct Object {
    bytes: Arc<Vec<u8>>,
    version: Version,
    modified_unix_ms: u64,
}

#[derive(Debug)]
struct Sending {
    key: Key,
    length_bytes: u64,
    parts: BTreeMap<usize, Vec<u8>>,
}

type Hook = Arc<dyn Fn(&str) + Send + Sync>;

#[derive(Default)]
struct Wire {
    fault: Option<Fault>,
    count: u64,
    log: Vec<String>,
    hook: Option<Hook>,
    is_forbidden: bool,
    /// Puts of this object to the disk of the machine fail.
    refused_put: Option<&'static str>,
    /// Times in which deletions had to begin.
    deletion_times: Vec<Duration>,
}

/// The bucket as one machine reaches it. Clones share everything.
#[derive(Clone)]
pub(crate) struct MemoryRemote {
    root: Arc<str>,
    bucket: Arc<Mutex<Bucket>>,
    wire: Arc<Mutex<Wire>>,
    is_dead: Arc<AtomicBool>,
    part_bytes: u64,
    single_put_limit_bytes: u64,
}

impl MemoryRemote {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let root = format!("mem://bucket-{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let bucket = Bucket { now_unix_ms: 1_000_000_000_000, ..Bucket::default() };
        Self {
            root: root.into(),
            bucket: Arc::new(Mutex::new(bucket)),
            wire: Arc::default(),
            is_dead: Arc::default(),
            part_bytes: 4_096,
            single_put_limit_bytes: 0,
        }
    }

    /// The same bucket as another process or machine reaches it.
    pub(crate) fn elsewhere(&self) -> Self {
        Self { wire: Arc::default(), is_dead: Arc::default(), ..self.clone() }
    }

    /// The same, with packs of up to so many bytes in one request.
    pub(crate) fn with_single_puts(&self, limit_bytes: u64) -> Self {
        Self { single_put_limit_bytes: limit_bytes, ..self.clone() }
    }

    /// Arms a fault; requests are counted and logged from here.
    pub(crate) fn arm(&self, fault: Fault) {
        let mut wire = self.wire();
        (wire.fault, wire.count) = (Some(fault), 0);
        wire.log.clear();
    }

    /// Nothing goes wrong any more; requests are counted and logged from here.
    pub(crate) fn heal(&self) {
        let mut wire = self.wire();
        (wire.fault, wire.count, wire.is_forbidden) = (None, 0, false);
        wire.log.clear();
    }

    /// From here on every request is a failure of the test.
    pub(crate) fn forbid(&self) {
        self.heal();
        self.wire().is_forbidden = true;
    }

    /// From here on every request fails.
    pub(crate) fn cut_off(&self) {
        self.arm(Fault { at: 1, mode: FaultMode::FailForever });
    }

    /// From here on the disk beside this bucket takes no object of this name, or takes all again.
    pub(crate) fn refuse_put(&self, object: Option<&'static str>) {
        self.wire().refused_put = object;
    }

    /// Times in which the deletions so far had to begin.
    pub(crate) fn deletion_times(&self) -> Vec<Duration> {
        self.wire().deletion_times.clone()
    }

    /// True once the armed request was reached.
    pub(crate) fn fired(&self) -> bool {
        let wire = self.wire();
        wire.fault.is_some_and(|fault| wire.count >= fault.at)
    }

    /// True after a kill.
    pub(crate) fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::SeqCst)
    }

    /// Names of the requests, as `put packs/x`.
    pub(crate) fn log(&self) -> Vec<String> {
        self.wire().log.clone()
    }

    /// How many requests of this kind were made.
    pub(crate) fn count(&self, kind: &str) -> usize {
        self.log().iter().filter(|line| line.split(' ').next() == Some(kind)).count()
    }

    /// Calls this before each request, on the thread that makes it.
    pub(crate) fn set_hook(&self, hook: impl Fn(&str) + Send + Sync + 'static) {
        self.wire().hook = Some(Arc::new(hook));
    }

    pub(crate) fn no_hook(&self) {
        self.wire().hook = None;
    }

    /// Moves the clock of the bucket.
    pub(crate) fn advance(&self, time: Duration) {
        self.bucket().now_unix_ms += time.as_millis() as u64;
    }

    /// Uploads that the bucket knows of.
    pub(crate) fn upload_count(&self) -> usize {
        self.bucket().uploads.len()
    }

    /// Forgets all uploads, as a bucket does after some days.
    pub(crate) fn forget_uploads(&self) {
        self.bucket().uploads.clear();
    }

    /// Everything in the bucket, without a request.
    pub(crate) fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        self.bucket().objects.iter().map(|(key, object)| (key.to_string(), object.bytes.to_vec())).collect()
    }

    /// Names in a folder of the bucket, ascending, without a request.
    pub(crate) fn names(&self, folder: Folder) -> Vec<String> {
        let bucket = self.bucket();
        bucket.objects.keys().filter(|key| key.folder() == folder).map(|key| key.name().to_owned()).collect()
    }

    /// Puts an object there without a request.
    pub(crate) fn plant(&self, key: &Key, bytes: &[u8]) {
        self.bucket().put(key, bytes.to_vec());
    }

    /// Removes an object without a request.
    pub(crate) fn lose(&self, key: &Key) {
        self.bucket().objects.remove(key);
    }

    fn bucket(&self) -> MutexGuard<'_, Bucket> {
        self.bucket.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        self.wire.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// One request.
    fn request<T>(
        &self,
        kind: &'static str,
        object: &str,
        act: impl FnOnce(&mut Bucket) -> Result<T>,
    ) -> Result<T> {
        let hook = self.wire().hook.clone();
        if let Some(hook) = hook {
            hook(&format!("{kind} {object}"));
        }
        let lost = |text: &str| {
            Error::store(kind, format!("{}/{object}", self.root))(io::Error::new(
                io::ErrorKind::ConnectionReset,
                text.to_owned(),
            ))
        };
        if self.is_dead.load(Ordering::SeqCst) {
            return Err(lost("the process is dead"));
        }
        let mode = {
            let mut wire = self.wire();
            wire.count += 1;
            let line = format!("{kind} {object}");
            assert!(!wire.is_forbidden, "a request that must not be made: {line}");
            wire.log.push(line);
            let (count, fault) = (wire.count, wire.fault);
            fault.filter(|fault| {
                count == fault.at || (count > fault.at && fault.mode == FaultMode::FailForever)
            })
        };
        match mode.map(|fault| fault.mode) {
            Some(FaultMode::FailOnce | FaultMode::FailForever) => return Err(lost("simulated")),
            Some(FaultMode::KillBefore) => {
                self.is_dead.store(true, Ordering::SeqCst);
                return Err(lost("killed"));
            }
            _ => {}
        }
        let done = act(&mut self.bucket());
        match mode.map(|fault| fault.mode) {
            Some(FaultMode::LoseAnswer) => Err(lost("the answer was lost")),
            Some(FaultMode::KillAfter) => {
                self.is_dead.store(true, Ordering::SeqCst);
                Err(lost("killed"))
            }
            _ => done,
        }
    }

    fn name(&self, key: &Key) -> String {
        format!("{}/{key}", self.root)
    }

    fn missing(&self, operation: &'static str, key: &Key) -> Error {
        Error::store(operation, self.name(key))(io::ErrorKind::NotFound.into())
    }

    fn conflict(&self, key: &Key) -> Error {
        Error::Conflict { object: self.name(key), by: "another version lies there".to_owned() }
    }
}

impl Bucket {
    fn put(&mut self, key: &Key, bytes: Vec<u8>) -> Version {
        self.next_version += 1;
        let version = Version(format!("v{}", self.next_version));
        let object =
            Object { bytes: Arc::new(bytes), version: version.clone(), modified_unix_ms: self.now_unix_ms };
        self.objects.insert(key.clone(), object);
        version
    }
}

impl fmt::Debug for MemoryRemote {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "MemoryRemote({})", self.root)
    }
}

impl Store for MemoryRemote {
    fn root(&self) -> String {
        self.root.to_string()
    }

    fn create_folders(&self) -> Result<()> {
        Ok(())
    }

    fn list(&self, folder: Folder) -> Result<Vec<Listed>> {
        let rows = self.list_versions(folder)?.into_iter();
        Ok(rows.map(|row| Listed { name: row.name, length_bytes: Some(row.length_bytes) }).collect())
    }

    fn open(&self, key: &Key) -> Result<Box<dyn ReadAt>> {
        let bytes = self.request("open", &key.to_string(), |bucket| {
            let object = bucket.objects.get(key).ok_or_else(|| self.missing("open", key))?;
            Ok(Arc::clone(&object.bytes))
        })?;
        Ok(Box::new(RemoteObject { remote: self.clone(), key: key.clone(), bytes }))
    }

    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>> {
        panic!("nobody stages `{key}` in a bucket")
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.request("put", &key.to_string(), |bucket| {
            if mode == PutMode::IfAbsent && bucket.objects.contains_key(key) {
                return Err(self.conflict(key));
            }
            bucket.put(key, bytes.to_vec());
            Ok(())
        })
    }

    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        let keys = names.iter().map(|name| Key::new(folder, name)).collect::<Result<Vec<_>>>()?;
        // A bucket deletes one after the other: each may be the last.
        let mut freed = 0;
        for key in &keys {
            freed += self.request("delete", &key.to_string(), |bucket| {
                Ok(bucket.objects.remove(key).map_or(0, |object| object.bytes.len() as u64))
            })?;
        }
        Ok(freed)
    }

    fn sync_folder(&self, _folder: Folder) -> Result<()> {
        Ok(())
    }

    fn sweep_staged(&self) -> Result<u64> {
        Ok(0)
    }

    fn lock(&self, _holder: &str) -> Result<Box<dyn WriterLock>> {
        panic!("a bucket has no lock")
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn local_path(&self, _key: &Key) -> Option<PathBuf> {
        None
    }
}

impl RemoteStore for MemoryRemote {
    fn delete_within(&self, folder: Folder, names: &[String], time: Duration) -> Result<()> {
        self.wire().deletion_times.push(time);
        self.delete(folder, names).map(drop)
    }

    fn list_versions(&self, folder: Folder) -> Result<Vec<RemoteListed>> {
        self.request("list", folder.name(), |bucket| {
            let rows = bucket.objects.iter().filter(|(key, _)| key.folder() == folder);
            Ok(rows
                .map(|(key, object)| RemoteListed {
                    name: key.name().to_owned(),
                    length_bytes: object.bytes.len() as u64,
                    version: object.version.clone(),
                    modified_unix_ms: object.modified_unix_ms,
                })
                .collect())
        })
    }

    fn get_versioned(&self, key: &Key, limit_bytes: u64) -> Result<(Vec<u8>, Version)> {
        self.request("get", &key.to_string(), |bucket| {
            let object = bucket.objects.get(key).ok_or_else(|| self.missing("read", key))?;
            assert!(object.bytes.len() as u64 <= limit_bytes);
            Ok((object.bytes.to_vec(), object.version.clone()))
        })
    }

    fn swap(&self, key: &Key, bytes: &[u8], expected: Option<&Version>) -> Result<Version> {
        self.request("swap", &key.to_string(), |bucket| {
            if bucket.objects.get(key).map(|object| &object.version) != expected {
                return Err(self.conflict(key));
            }
            Ok(bucket.put(key, bytes.to_vec()))
        })
    }

    fn single_put_limit_bytes(&self) -> u64 {
        self.single_put_limit_bytes
    }

    fn begin_upload(&self, key: &Key, length_bytes: u64) -> Result<Upload> {
        let part_bytes = self.part_bytes;
        self.request("begin", &key.to_string(), |bucket| {
            bucket.next_version += 1;
            let id = format!("upload-{}", bucket.next_version);
            let parts = vec![None; length_bytes.div_ceil(part_bytes) as usize];
            let sending = Sending { key: key.clone(), length_bytes, parts: BTreeMap::new() };
            bucket.uploads.insert(id.clone(), sending);
            Ok(Upload { id, length_bytes, part_bytes, parts })
        })
    }

    fn send_parts(
        &self,
        key: &Key,
        source: &dyn ReadAt,
        upload: &mut Upload,
        transfer: Transfer<'_>,
        sent: &mut dyn FnMut(&Upload) -> Result<()>,
    ) -> Result<()> {
        for index in 0..upload.parts.len() {
            if upload.parts[index].is_some() {
                continue;
            }
            if transfer.cancelled.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            let start = index as u64 * upload.part_bytes;
            let mut bytes = vec![0; upload.part_bytes.min(source.length_bytes() - start) as usize];
            source.read_at(start, &mut bytes)?;
            let length = bytes.len() as u64;
            self.request("part", &format!("{key} {index}"), |bucket| {
                let sending = bucket.uploads.get_mut(&upload.id).ok_or_else(|| self.missing("send", key))?;
                assert_eq!(sending.key, *key);
                sending.parts.insert(index, bytes);
                Ok(())
            })?;
            transfer.moved_bytes.fetch_add(length, Ordering::Relaxed);
            upload.parts[index] = Some(format!("etag-{index}"));
            sent(upload)?;
        }
        Ok(())
    }

    fn complete_upload(&self, key: &Key, upload: &Upload) -> Result<Version> {
        let told = upload
            .parts
            .iter()
            .enumerate()
            .all(|(index, etag)| etag.as_deref() == Some(format!("etag-{index}").as_str()));
        assert!(told, "{upload:?} is not complete");
        self.request("complete", &key.to_string(), |bucket| {
            let Some(sending) = bucket.uploads.remove(&upload.id) else {
                let object = bucket.objects.get(key).ok_or_else(|| self.missing("complete", key))?;
                return Ok(object.version.clone());
            };
            let bytes: Vec<u8> = sending.parts.into_values().flatten().collect();
            assert_eq!(bytes.len() as u64, sending.length_bytes);
            if let Some(object) = bucket.objects.get(key) {
                if object.bytes.len() != bytes.len() {
                    return Err(self.conflict(key));
                }
                return Ok(object.version.clone());
            }
            Ok(bucket.put(key, bytes))
        })
    }

    fn abort_upload(&self, key: &Key, upload: &Upload) -> Result<()> {
        self.request("abort", &key.to_string(), |bucket| {
            bucket.uploads.remove(&upload.id);
            Ok(())
        })
    }
}

struct RemoteObject {
    remote: MemoryRemote,
    key: Key,
    bytes: Arc<Vec<u8>>,
}

impl ReadAt for RemoteObject {
    fn length_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        self.remote.request("read", &self.key.to_string(), |_| {
            let start = offset_bytes as usize;
            let bytes = self.bytes.get(start..start + buffer.len());
            buffer.copy_from_slice(bytes.unwrap());
            Ok(())
        })
    }
}

impl fmt::Debug for RemoteObject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "RemoteObject({})", self.key)
    }
}

/// The folder of a machine: objects in memory that survive the process, and that a dead one can't change any more.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    objects: MemoryStore,
    remote: MemoryRemote,
}

impl Disk {
    /// The disk of a machine that dies with this bucket's process.
    pub(crate) fn beside(objects: &MemoryStore, remote: &MemoryRemote) -> Arc<Self> {
        Arc::new(Self { objects: objects.clone(), remote: remote.clone() })
    }

    fn check(&self, operation: &'static str) -> Result<()> {
        if self.remote.is_dead() {
            return Err(Error::store(operation, self.objects.root())(io::Error::other(
                "the process is dead",
            )));
        }
        Ok(())
    }
}

impl Store for Disk {
    fn root(&self) -> String {
        self.objects.root()
    }

    fn create_folders(&self) -> Result<()> {
        self.check("make")
    }

    fn list(&self, folder: Folder) -> Result<Vec<Listed>> {
        self.check("list")?;
        self.objects.list(folder)
    }

    fn open(&self, key: &Key) -> Result<Box<dyn ReadAt>> {
        self.check("open")?;
        self.objects.open(key)
    }

    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>> {
        self.check("stage")?;
        Ok(Box::new(DiskWrite { inner: self.objects.stage(key)?, disk: self.clone() }))
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.check("put")?;
        if self.remote.wire().refused_put.is_some_and(|refused| refused == key.to_string()) {
            return Err(Error::store("put", key.to_string())(io::ErrorKind::StorageFull.into()));
        }
        self.objects.put(key, bytes, mode)
    }

    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        self.check("delete")?;
        self.objects.delete(folder, names)
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        self.check("sync")?;
        self.objects.sync_folder(folder)
    }

    fn sweep_staged(&self) -> Result<u64> {
        self.check("sweep")?;
        self.objects.sweep_staged()
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn WriterLock>> {
        self.check("lock")?;
        self.objects.lock(holder)
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn local_path(&self, _key: &Key) -> Option<PathBuf> {
        None
    }
}

#[derive(Debug)]
struct DiskWrite {
    inner: Box<dyn StagedWrite>,
    disk: Disk,
}

impl StagedWrite for DiskWrite {
    fn position_bytes(&self) -> u64 {
        self.inner.position_bytes()
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.disk.check("write")?;
        self.inner.append(bytes)
    }

    fn publish(self: Box<Self>) -> Result<Published> {
        self.disk.check("publish")?;
        self.inner.publish()
    }
}

type SleepHook = Arc<dyn Fn() + Send + Sync>;

/// A clock that moves when it is told to, or when somebody sleeps by it.
#[derive(Default)]
pub(crate) struct TestClock {
    now: Mutex<Duration>,
    slept: Mutex<Option<SleepHook>>,
}

impl TestClock {
    pub(crate) fn advance(&self, time: Duration) {
        *self.now.lock().unwrap() += time;
    }

    /// Calls this after each sleep.
    pub(crate) fn on_sleep(&self, hook: impl Fn() + Send + Sync + 'static) {
        *self.slept.lock().unwrap() = Some(Arc::new(hook));
    }
}

impl Clock for TestClock {
    fn now(&self) -> Duration {
        *self.now.lock().unwrap()
    }

    fn sleep(&self, time: Duration) {
        self.advance(time);
        let hook = self.slept.lock().unwrap().clone();
        if let Some(hook) = hook {
            hook();
        }
    }
}

impl fmt::Debug for TestClock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "TestClock({:?})", self.now())
    }
}
