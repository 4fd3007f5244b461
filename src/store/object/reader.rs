//! Reading an object of a bucket by ranges, always of the version that was opened.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use super::super::remote::Version;
use super::super::{Folder, Key, ReadAt, end_of_read};
use super::attempt::{finish, runtime};
use super::client::{Backend, Client, Outcome, cut_short, streamed, version};
use super::failure::{Failure, Kind};
use crate::error::Result;
use crate::threads::Spares;

/// Objects up to this length come whole with the request that opens them.
const SMALL_BYTES: u64 = 64 << 10;

/// An open object.
pub(super) struct BucketObject {
    of: Arc<Pinned>,
    /// Its first bytes, where opening brought them.
    start: Vec<u8>,
    ahead: Mutex<Vec<Ahead>>,
    buffers: Arc<Spares<Vec<u8>>>,
}

/// One version of an object.
struct Pinned {
    client: Arc<Client>,
    key: Key,
    path: Path,
    length_bytes: u64,
    version: Version,
}

/// A range that somebody said would be read next.
struct Ahead {
    range: Range<u64>,
    state: State,
    _permit: OwnedSemaphorePermit,
}

/// How far a read ahead is.
enum State {
    Coming(Task),
    Here(Vec<u8>),
}

/// A task that ends with whoever waits for it.
struct Task(JoinHandle<Outcome<Vec<u8>>>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl BucketObject {
    /// Opens an object with one request; a small one comes whole.
    pub(super) fn open(client: &Arc<Client>, key: &Key) -> Result<Self> {
        let path = client.key_path(key)?;
        // Packs are large, and what is read of them lies at their end.
        let wants_start = key.folder() != Folder::Packs;
        let opened = if wants_start { Self::open_with_start(client, key, &path)? } else { None };
        let (meta, start) = if let Some(opened) = opened {
            opened
        } else {
            let missing = || Failure::new(Kind::Missing, "there is no such object");
            let meta = client.head("open", key)?;
            (meta.ok_or_else(|| missing().error("open", client.name(key)))?, Vec::new())
        };
        let of = Pinned {
            client: Arc::clone(client),
            key: key.clone(),
            path,
            length_bytes: meta.size,
            version: version(&meta),
        };
        Ok(Self { of: Arc::new(of), start, ahead: Mutex::default(), buffers: client.buffers() })
    }

    /// `None` where the object has no first byte, or there is none.
    fn open_with_start(
        client: &Arc<Client>,
        key: &Key,
        path: &Path,
    ) -> Result<Option<(ObjectMeta, Vec<u8>)>> {
        let opened = client.send(async |backend| {
            let range = Some(GetRange::Bounded(0..SMALL_BYTES));
            let options = GetOptions { range, ..GetOptions::default() };
            let answer = streamed(backend.objects.get_opts(path, options)).await?;
            let meta = answer.meta.clone();
            let mut start = vec![0; meta.size.min(SMALL_BYTES) as usize];
            if client.fill(answer, &mut start).await? < start.len() {
                return Err(cut_short());
            }
            Ok((meta, start))
        })?;
        match opened {
            Ok(opened) => Ok(Some(opened)),
            Err(failure) if matches!(failure.kind, Kind::Missing | Kind::OutOfRange) => Ok(None),
            Err(failure) => Err(failure.error("open", client.name(key))),
        }
    }

    fn lock_ahead(&self) -> MutexGuard<'_, Vec<Ahead>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a read ahead whose range is right, and waits for its bytes; `None` where there is none, or it has failed.
    fn take_ahead(&self, is_right: impl Fn(&Range<u64>) -> bool) -> Result<Option<(Ahead, Vec<u8>)>> {
        let found = {
            let mut ahead = self.lock_ahead();
            let index = ahead.iter().position(|one| is_right(&one.range));
            index.map(|index| ahead.swap_remove(index))
        };
        let Some(mut one) = found else { return Ok(None) };
        let bytes = match &mut one.state {
            State::Here(bytes) => std::mem::take(bytes),
            State::Coming(coming) => match finish(&mut coming.0)? {
                Ok(Ok(bytes)) => bytes,
                _ => return Ok(None),
            },
        };
        Ok(Some((one, bytes)))
    }

    /// Reads what no read ahead brings.
    fn fetch(&self, range: Range<u64>, buffer: &mut [u8]) -> Result<()> {
        let backend = self.of.client.backend()?;
        let read = finish(self.of.fetch(&backend, range, buffer))?;
        read.map_err(|failure| failure.error("read", self.of.name()))
    }
}

impl Pinned {
    /// Reads a range; what was cut off is asked for again from where it stopped.
    async fn fetch(&self, backend: &Backend, range: Range<u64>, buffer: &mut [u8]) -> Outcome<()> {
        let mut filled = 0;
        let mut attempts = self.client.attempts(backend);
        loop {
            let before = filled;
            let rest = range.start + filled as u64..range.end;
            let Err(error) = self.fetch_once(backend, rest, buffer, &mut filled).await else { return Ok(()) };
            if Failure::of(&error).kind == Kind::Changed {
                return Err(Failure::new(Kind::Missing, "it was replaced or deleted since it was opened"));
            }
            if filled > before {
                // What moves on is alive, however long it takes.
                attempts = self.client.attempts(backend);
            }
            attempts.after(&error).await?;
        }
    }

    async fn fetch_once(
        &self,
        backend: &Backend,
        rest: Range<u64>,
        buffer: &mut [u8],
        filled: &mut usize,
    ) -> object_store::Result<()> {
        let options = GetOptions {
            range: Some(GetRange::Bounded(rest)),
            if_match: Some(self.version.0.clone()),
            ..GetOptions::default()
        };
        let answer = streamed(backend.objects.get_opts(&self.path, options)).await?;
        if version(&answer.meta) != self.version {
            // A server that does not look at conditions of reads.
            return Err(changed());
        }
        let mut arrived = 0;
        let read = self.client.fill_counted(answer, &mut buffer[*filled..], &mut arrived).await;
        *filled += arrived;
        read?;
        if *filled < buffer.len() { Err(cut_short()) } else { Ok(()) }
    }

    fn name(&self) -> String {
        self.client.name(&self.key)
    }
}

fn changed() -> object_store::Error {
    object_store::Error::Precondition { path: String::new(), source: "another version was sent".into() }
}

impl ReadAt for BucketObject {
    fn length_bytes(&self) -> u64 {
        self.of.length_bytes
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        let end = end_of_read(|| self.of.name(), offset_bytes, buffer.len(), self.of.length_bytes)?;
        if buffer.is_empty() {
            return Ok(());
        }
        if end <= self.start.len() as u64 {
            buffer.copy_from_slice(&self.start[offset_bytes as usize..end as usize]);
            return Ok(());
        }
        let range = offset_bytes..end;
        let found = self.take_ahead(|ahead| ahead.start <= range.start && range.end <= ahead.end)?;
        let Some((one, bytes)) = found else { return self.fetch(range, buffer) };
        let start = (range.start - one.range.start) as usize;
        buffer.copy_from_slice(&bytes[start..start + buffer.len()]);
        if range.end < one.range.end {
            self.lock_ahead().push(Ahead { state: State::Here(bytes), ..one });
        } else {
            self.buffers.give_back(bytes);
        }
        Ok(())
    }

    fn exchange(&self, range: Range<u64>, buffer: &mut Vec<u8>) -> Result<bool> {
        let Some((_, bytes)) = self.take_ahead(|ahead| *ahead == range)? else { return Ok(false) };
        self.buffers.give_back(std::mem::replace(buffer, bytes));
        Ok(true)
    }

    fn will_read(&self, range: Range<u64>) {
        let end = range.end.min(self.of.length_bytes);
        let length_bytes = end.saturating_sub(range.start);
        let client = &self.of.client;
        if length_bytes == 0
            || end <= self.start.len() as u64
            || length_bytes > client.settings.part_bytes
            || self.lock_ahead().iter().any(|one| one.range.start <= range.start && end <= one.range.end)
        {
            return;
        }
        // A hint may be lost: where too many are under way, or nothing can be started.
        let Ok(permit) = Arc::clone(&client.ahead).try_acquire_owned() else { return };
        let (Ok(runtime), Ok(backend)) = (runtime(), client.backend()) else { return };
        let range = range.start..end;
        let (of, wanted) = (Arc::clone(&self.of), range.clone());
        let mut bytes = self.buffers.take();
        let coming = runtime.spawn(async move {
            bytes.resize(length_bytes as usize, 0);
            of.fetch(&backend, wanted, &mut bytes).await.map(|()| bytes)
        });
        self.lock_ahead().push(Ahead { range, state: State::Coming(Task(coming)), _permit: permit });
    }
}

impl fmt::Debug for BucketObject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "BucketObject({}, {} bytes)", self.of.name(), self.of.length_bytes)
    }
}
