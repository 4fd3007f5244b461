//! Requests to one prefix of one bucket, each sent until it is answered, and their failures by name.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream;
use object_store::memory::InMemory;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    GetOptions, GetResult, ObjectMeta, ObjectStore, PutMode as Put, PutOptions, PutResult, UpdateVersion,
};
use tokio::sync::Semaphore;

use super::super::remote::{RemoteListed, Version};
use super::super::{Folder, Key, PutMode};
use super::attempt::{Attempts, finish};
use super::credentials::CachedCredentials;
use super::failure::{Failure, Kind};
use super::http::{MODE, Mode, seconds_for};
use super::settings::Settings;
use crate::error::{Error, Result};
use crate::threads::{PerProcess, Spares};

/// Objects that one folder may list: a hostile bucket lists without end.
const LISTING_LIMIT: usize = 1 << 21;

/// Seconds that a listing may take, with all its pages.
const LISTING_SECONDS: u64 = 600;

/// Seconds that a stream of bytes may stand still.
const IDLE_SECONDS: u64 = 30;

/// Names up to which a deletion asks for lengths one by one, instead of listing the folder.
const FEW_NAMES: usize = 4;

/// Outcome of a request.
pub(super) type Outcome<T> = std::result::Result<T, Failure>;

/// The connection to a provider.
pub(super) struct Backend {
    pub(super) objects: Arc<dyn ObjectStore>,
    pub(super) parts: Arc<dyn MultipartStore>,
    /// Where conditions take a generation beside the entity tag.
    pub(super) has_generations: bool,
    /// Nothing goes over a wire.
    pub(super) is_memory: bool,
    pub(super) credentials: Option<Arc<CachedCredentials>>,
}

impl Backend {
    /// A connection to something that is both of what `object_store` knows.
    pub(super) fn of(store: impl ObjectStore + MultipartStore) -> Self {
        let store = Arc::new(store);
        let objects = Arc::clone(&store);
        Self { objects, parts: store, has_generations: false, is_memory: false, credentials: None }
    }

    /// A bucket in memory.
    pub(super) fn in_memory(bucket: &InMemory) -> Self {
        Self { is_memory: true, ..Self::of(bucket.clone()) }
    }
}

/// How a connection is made, once in each process.
pub(super) type Connect = dyn Fn() -> Result<Backend> + Send + Sync;

/// One prefix of one bucket.
pub(super) struct Client {
    /// For messages: the url without a slash at its end.
    pub(super) root: String,
    prefix: String,
    pub(super) settings: Settings,
    connect: Box<Connect>,
    backend: PerProcess<Backend>,
    /// Reads ahead that may be under way or waiting to be taken.
    pub(super) ahead: Arc<Semaphore>,
    /// Buffers of reads ahead, kept while an object is open.
    buffers: Mutex<Weak<Spares<Vec<u8>>>>,
}

impl Client {
    /// Connects when first used.
    pub(super) fn new(root: String, prefix: String, settings: Settings, connect: Box<Connect>) -> Self {
        let ahead = Arc::new(Semaphore::new(settings.parallel));
        Self { root, prefix, settings, connect, backend: PerProcess::new(), ahead, buffers: Mutex::default() }
    }

    /// The buffers that all open objects share.
    pub(super) fn buffers(&self) -> Arc<Spares<Vec<u8>>> {
        let mut shared = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let fresh = Arc::default();
            *shared = Arc::downgrade(&fresh);
            fresh
        })
    }

    pub(super) fn backend(&self) -> Result<Arc<Backend>> {
        self.backend.get(|| (self.connect)())
    }

    /// Full name of an object, for messages.
    pub(super) fn name(&self, key: &Key) -> String {
        format!("{}/{key}", self.root)
    }

    fn folder_path(&self, folder: Folder) -> Result<Path> {
        let whole = [self.prefix.as_str(), folder.name()];
        let parts: Vec<&str> = whole.into_iter().filter(|part| !part.is_empty()).collect();
        self.path(&parts.join("/"))
    }

    pub(super) fn key_path(&self, key: &Key) -> Result<Path> {
        if self.prefix.is_empty() {
            self.path(&key.to_string())
        } else {
            self.path(&format!("{}/{key}", self.prefix))
        }
    }

    fn path(&self, whole: &str) -> Result<Path> {
        Path::parse(whole).map_err(|error| Error::invalid(format!("url `{}`", self.root), error.to_string()))
    }

    /// Sends a request until it is answered; blocks the caller.
    pub(super) fn send<T>(
        &self,
        request: impl AsyncFnMut(&Backend) -> object_store::Result<T>,
    ) -> Result<Outcome<T>> {
        let backend = self.backend()?;
        finish(self.attempt(&backend, request))
    }

    /// Sends a request until it is answered.
    pub(super) async fn attempt<T>(
        &self,
        backend: &Backend,
        request: impl AsyncFnMut(&Backend) -> object_store::Result<T>,
    ) -> Outcome<T> {
        repeated(self.attempts(backend), backend, request).await
    }

    /// For loops around a request that run as a task of their own: those can't lend to a closure.
    pub(super) fn attempts<'a>(&self, backend: &'a Backend) -> Attempts<'a> {
        Attempts::new(self.settings.retry_seconds, backend.credentials.as_deref())
    }

    /// What lies under a key, without its bytes; `None` where nothing does.
    pub(super) fn head(&self, operation: &'static str, key: &Key) -> Result<Option<ObjectMeta>> {
        let path = self.key_path(key)?;
        let sent = self.send(async |backend| meta(backend, &path).await)?;
        match sent {
            Ok(meta) => Ok(Some(meta)),
            Err(failure) if failure.kind == Kind::Missing => Ok(None),
            Err(failure) => Err(failure.error(operation, self.name(key))),
        }
    }

    /// Puts an object under a condition. A conflict with what this very call has put before its answer was
    /// lost is none.
    pub(super) fn put(&self, key: &Key, bytes: &[u8], mode: &Put) -> Result<Version> {
        let backend = self.backend()?;
        let payload = Bytes::copy_from_slice(bytes);
        let put = finish(self.attempt_put(&backend, key, &payload, mode))?;
        self.settle_put(key, bytes, mode, put, false)
    }

    /// The request of [`Client::put`].
    pub(super) async fn attempt_put(
        &self,
        backend: &Backend,
        key: &Key,
        bytes: &Bytes,
        mode: &Put,
    ) -> Result<Outcome<PutResult>> {
        let path = self.key_path(key)?;
        if self.settings.single_writer && !self.holds(backend, &path, mode).await {
            return Ok(Err(Failure::new(Kind::Changed, "another object lies there")));
        }
        let put = self.attempt(backend, async |backend| {
            let options = PutOptions { mode: mode.clone(), ..PutOptions::default() };
            backend.objects.put_opts(&path, bytes.clone().into(), options).await
        });
        Ok(put.await)
    }

    /// Looks whether the condition of a put holds, for a server that would not. What can't be looked at is left
    /// to the put itself, which fails for the same cause.
    async fn holds(&self, backend: &Backend, path: &Path, mode: &Put) -> bool {
        let present = self.attempt(backend, async |backend| meta(backend, path).await);
        match (mode, present.await) {
            (Put::Create, Ok(_)) => false,
            (Put::Update(expected), Ok(meta)) => {
                expected.e_tag.as_deref().map(version_of) == Some(version(&meta))
            }
            (Put::Update(_), Err(failure)) => failure.kind != Kind::Missing,
            _ => true,
        }
    }

    /// Decides how a put ended, where it failed or met a condition by what lies there now.
    pub(super) fn settle_put(
        &self,
        key: &Key,
        bytes: &[u8],
        mode: &Put,
        put: Result<Outcome<PutResult>>,
        may_be_done: bool,
    ) -> Result<Version> {
        let mut failure = match put? {
            Ok(PutResult { e_tag: Some(tag), .. }) => return Ok(version_of(&tag)),
            Ok(_) => return self.version_after_put(key),
            Err(failure) => failure,
        };
        // Some servers say of an absent object that it is not found, where they are to replace it.
        let is_absent = failure.kind == Kind::Missing;
        let is_condition = failure.kind == Kind::Changed || is_absent && matches!(mode, Put::Update(_));
        if is_absent && !is_condition {
            failure.kind = Kind::NoBucket;
        }
        if (may_be_done || failure.may_be_done)
            && (is_condition || failure.leaves_doubt())
            && let Ok((present, version)) = self.get(key, bytes.len() as u64)
            && present == bytes
        {
            return Ok(version);
        }
        if !is_condition || matches!(mode, Put::Overwrite) {
            return Err(failure.error("write", self.name(key)));
        }
        self.conflict(key, mode).and_then(Err)
    }

    fn version_after_put(&self, key: &Key) -> Result<Version> {
        let meta = self.head("write", key)?;
        let missing =
            || Failure::new(Kind::Missing, "it was there and is gone").error("write", self.name(key));
        meta.map(|meta| version(&meta)).ok_or_else(missing)
    }

    /// The conflict with what lies under a key.
    pub(super) fn conflict(&self, key: &Key, mode: &Put) -> Result<Error> {
        let by = match (mode, self.head("write", key)?) {
            (Put::Update(expected), Some(meta)) => {
                let expected = expected.e_tag.as_deref().unwrap_or_default();
                format!("version {} lies there, not {expected}", version(&meta).0)
            }
            (_, Some(meta)) => format!("{} bytes lie there", meta.size),
            (_, None) => "it was deleted since".to_owned(),
        };
        Ok(Error::Conflict { object: self.name(key), by })
    }

    /// Puts an object where the version `expected` lies, or nothing.
    pub(super) fn swap(&self, key: &Key, bytes: &[u8], expected: Option<&Version>) -> Result<Version> {
        let Some(expected) = expected else { return self.put(key, bytes, &Put::Create) };
        let mut update = UpdateVersion { e_tag: Some(expected.0.clone()), version: None };
        if self.backend()?.has_generations {
            match self.head("write", key)? {
                Some(meta) if version(&meta) == *expected => update.version = meta.version,
                _ => return self.conflict(key, &Put::Update(update)).and_then(Err),
            }
        }
        self.put(key, bytes, &Put::Update(update))
    }

    /// Reads a whole object of at most `limit_bytes`.
    pub(super) fn get(&self, key: &Key, limit_bytes: u64) -> Result<(Vec<u8>, Version)> {
        let path = self.key_path(key)?;
        let sent = self.send(async |backend| {
            let answer = streamed(backend.objects.get_opts(&path, GetOptions::default())).await?;
            let (version, length_bytes) = (version(&answer.meta), answer.meta.size);
            if length_bytes > limit_bytes {
                return Ok(Err(length_bytes));
            }
            let mut bytes = vec![0; length_bytes as usize];
            let filled = self.fill(answer, &mut bytes).await?;
            if filled < bytes.len() { Err(cut_short()) } else { Ok(Ok((bytes, version))) }
        })?;
        let name = || self.name(key);
        match sent.map_err(|failure| failure.error("read", name()))? {
            Ok(read) => Ok(read),
            Err(length_bytes) => {
                let expected = format!("at most {limit_bytes} bytes");
                Err(Error::corrupt(name(), 0, "length", expected, length_bytes))
            }
        }
    }

    /// Copies a body into `buffer` and returns how much came; more than fits is an error.
    pub(super) async fn fill(&self, answer: GetResult, buffer: &mut [u8]) -> object_store::Result<usize> {
        let mut filled = 0;
        let read = self.fill_counted(answer, buffer, &mut filled).await;
        read.map(|()| filled)
    }

    /// The same, telling in `filled` also on failure how much has arrived.
    pub(super) async fn fill_counted(
        &self,
        answer: GetResult,
        buffer: &mut [u8],
        filled: &mut usize,
    ) -> object_store::Result<()> {
        let whole_time = seconds_for(buffer.len() as u64, self.settings.timeout_seconds);
        let idle_time = std::time::Duration::from_secs(IDLE_SECONDS);
        let deadline = tokio::time::Instant::now() + whole_time;
        let mut frames = answer.into_stream();
        loop {
            let turn = deadline.min(tokio::time::Instant::now() + idle_time);
            let Ok(frame) = tokio::time::timeout_at(turn, frames.next()).await else {
                return Err(stalled(*filled));
            };
            let Some(frame) = frame.transpose()? else { return Ok(()) };
            let rest = &mut buffer[*filled..];
            let Some(place) = rest.get_mut(..frame.len()) else {
                return Err(too_long());
            };
            place.copy_from_slice(&frame);
            *filled += frame.len();
        }
    }

    /// Rows of a folder.
    pub(super) fn list(&self, folder: Folder) -> Result<Vec<RemoteListed>> {
        let path = self.folder_path(folder)?;
        let sent = self.send(async |backend| {
            let listing = list_rows(backend, folder, &path);
            let time = std::time::Duration::from_secs(LISTING_SECONDS);
            tokio::time::timeout(time, listing).await.unwrap_or_else(|_late| Err(stalled(0)))
        })?;
        let name = || format!("{}/{}", self.root, folder.name());
        let (inside, rows) = sent.map_err(|failure| failure.error("list", name()))?;
        if inside > LISTING_LIMIT {
            let expected = format!("at most {LISTING_LIMIT} objects");
            return Err(Error::corrupt(name(), 0, "listing", expected, "more"));
        }
        Ok(rows)
    }

    /// Deletes objects and returns how long they were together.
    pub(super) fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        let keys = names.iter().map(|name| Key::new(folder, name)).collect::<Result<Vec<_>>>()?;
        let present = self.lengths(folder, &keys)?;
        let paths = present.iter().map(|(key, _)| self.key_path(key)).collect::<Result<Vec<_>>>()?;
        if paths.is_empty() {
            return Ok(0);
        }
        self.remove(folder, &paths, self.settings.retry_seconds)?;
        Ok(present.iter().map(|(_, length_bytes)| length_bytes).sum())
    }

    /// Deletes objects that may be there; begins no request after `time`.
    pub(super) fn delete_within(&self, folder: Folder, names: &[String], time: Duration) -> Result<()> {
        let path = |name: &String| self.key_path(&Key::new(folder, name)?);
        let paths = names.iter().map(path).collect::<Result<Vec<_>>>()?;
        self.remove(folder, &paths, self.settings.retry_seconds.min(time.as_secs_f64()))
    }

    fn remove(&self, folder: Folder, paths: &[Path], retry_seconds: f64) -> Result<()> {
        let backend = self.backend()?;
        let request = async |backend: &Backend| {
            let paths: Vec<_> = paths.iter().cloned().map(Ok).collect();
            let mut deleted = backend.objects.delete_stream(stream::iter(paths).boxed());
            while let Some(outcome) = deleted.next().await {
                match outcome {
                    Err(error) if Failure::of(&error).kind == Kind::Missing => {}
                    outcome => _ = outcome?,
                }
            }
            Ok(())
        };
        let attempts = Attempts::new(retry_seconds, backend.credentials.as_deref());
        let sent = finish(repeated(attempts, &backend, request))?;
        let name = format!("{}/{}", self.root, folder.name());
        sent.map_err(|failure| failure.error("delete in", name))
    }

    /// The keys that are there, and how long their objects are.
    fn lengths<'a>(&self, folder: Folder, keys: &'a [Key]) -> Result<Vec<(&'a Key, u64)>> {
        if keys.len() > FEW_NAMES {
            let rows = self.list(folder)?;
            let lengths: std::collections::HashMap<&str, u64> =
                rows.iter().map(|row| (row.name.as_str(), row.length_bytes)).collect();
            return Ok(keys.iter().filter_map(|key| Some((key, *lengths.get(key.name())?))).collect());
        }
        let mut present = Vec::new();
        for key in keys {
            if let Some(meta) = self.head("delete", key)? {
                present.push((key, meta.size));
            }
        }
        Ok(present)
    }

    /// The mode of `object_store` for one of the crate.
    pub(super) fn put_mode(mode: PutMode) -> Put {
        match mode {
            PutMode::IfAbsent => Put::Create,
            PutMode::Replace => Put::Overwrite,
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Client({})", self.root)
    }
}

/// Sends a request until it is answered, or `attempts` end.
async fn repeated<T>(
    mut attempts: Attempts<'_>,
    backend: &Backend,
    mut request: impl AsyncFnMut(&Backend) -> object_store::Result<T>,
) -> Outcome<T> {
    loop {
        match request(backend).await {
            Ok(answer) => return Ok(answer),
            Err(error) => attempts.after(&error).await?,
        }
    }
}

/// Asks once what lies under a path, without its bytes.
async fn meta(backend: &Backend, path: &Path) -> object_store::Result<ObjectMeta> {
    let options = GetOptions { head: true, ..GetOptions::default() };
    Ok(backend.objects.get_opts(path, options).await?.meta)
}

/// How many objects a folder has, up to the limit, and the rows of those that are ours.
async fn list_rows(
    backend: &Backend,
    folder: Folder,
    path: &Path,
) -> object_store::Result<(usize, Vec<RemoteListed>)> {
    let prefix = (!path.is_root()).then_some(path);
    if folder == Folder::Root {
        let metas = backend.objects.list_with_delimiter(prefix).await?.objects;
        return Ok((metas.len(), metas.iter().filter_map(|meta| row(folder, path, meta)).collect()));
    }
    let (mut inside, mut rows) = (0, Vec::new());
    let mut metas = backend.objects.list(prefix).take(LISTING_LIMIT + 1);
    while let Some(meta) = metas.next().await {
        inside += 1;
        rows.extend(row(folder, path, &meta?));
    }
    Ok((inside, rows))
}

/// A row of a listing, unless it is none of ours.
fn row(folder: Folder, path: &Path, meta: &ObjectMeta) -> Option<RemoteListed> {
    let below = meta.location.as_ref().strip_prefix(path.as_ref())?;
    let name = if path.is_root() { below } else { below.strip_prefix('/')? };
    Key::new(folder, name).ok()?;
    Some(RemoteListed {
        name: name.to_owned(),
        length_bytes: meta.size,
        version: version(meta),
        modified_unix_ms: u64::try_from(meta.last_modified.timestamp_millis()).unwrap_or(0),
    })
}

/// Sends a request whose body is read as it arrives.
pub(super) async fn streamed<T>(
    request: impl Future<Output = object_store::Result<T>>,
) -> object_store::Result<T> {
    MODE.scope(Mode::Streamed, request).await
}

/// What the server answered for each part, as it wants it back.
pub(super) fn part_ids(parts: &[Option<String>]) -> Option<Vec<PartId>> {
    parts.iter().map(|part| Some(PartId { content_id: part.clone()? })).collect()
}

/// The version of an object: its entity tag. Headers quote it and some listings don't.
pub(super) fn version(meta: &ObjectMeta) -> Version {
    match &meta.e_tag {
        Some(tag) => version_of(tag),
        None => Version(format!("\"{}-{}\"", meta.size, meta.last_modified.timestamp_millis())),
    }
}

pub(super) fn version_of(tag: &str) -> Version {
    let bare = tag.strip_prefix("W/").unwrap_or(tag).trim_matches('"');
    Version(format!("\"{bare}\""))
}

pub(super) fn cut_short() -> object_store::Error {
    transport_error("the answer ended early")
}

fn too_long() -> object_store::Error {
    transport_error("the answer is longer than what was asked for")
}

fn stalled(filled: usize) -> object_store::Error {
    transport_error(&format!("the answer stood still after {filled} bytes"))
}

fn transport_error(text: &str) -> object_store::Error {
    use object_store::client::{HttpError, HttpErrorKind};
    let error = std::io::Error::new(std::io::ErrorKind::UnexpectedEof, text.to_owned());
    let source = Box::new(HttpError::new(HttpErrorKind::Interrupted, error));
    object_store::Error::Generic { store: "bucket", source }
}
