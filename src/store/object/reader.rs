//! Reading an object of a bucket by ranges, always of the version that was opened.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use super::super::remote::Version;
use super::super::{Folder, Key, ReadAt};
use super::attempt::runtime;
use super::client::{Backend, Client, Outcome, cut_short, streamed, version};
use super::failure::{Failure, Kind};
use crate::error::{Error, Result};

/// Objects up to this length come whole with the request that opens them.
const SMALL_BYTES: u64 = 64 << 10;

/// An open object.
pub(super) struct BucketObject {
    of: Arc<Pinned>,
    /// Its first bytes, where opening brought them.
    start: Vec<u8>,
    ahead: Mutex<Vec<Ahead>>,
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
        Ok(Self { of: Arc::new(of), start, ahead: Mutex::default() })
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

    /// Takes the read ahead that covers a range, if there is one.
    fn take_ahead(&self, range: &Range<u64>) -> Option<Ahead> {
        let mut ahead = self.lock_ahead();
        let covers = |one: &Ahead| one.range.start <= range.start && range.end <= one.range.end;
        let index = ahead.iter().position(covers)?;
        Some(ahead.swap_remove(index))
    }

    /// Fills `buffer` from a read ahead; `false` where that has failed.
    fn read_ahead(&self, one: Ahead, range: &Range<u64>, buffer: &mut [u8]) -> Result<bool> {
        let bytes = match one.state {
            State::Here(bytes) => bytes,
            State::Coming(mut coming) => match runtime()?.block_on(&mut coming.0) {
                Ok(Ok(bytes)) => bytes,
                _ => return Ok(false),
            },
        };
        let start = (range.start - one.range.start) as usize;
        buffer.copy_from_slice(&bytes[start..start + buffer.len()]);
        if range.end < one.range.end {
            self.lock_ahead().push(Ahead { state: State::Here(bytes), ..one });
        }
        Ok(true)
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
        let end = offset_bytes.checked_add(buffer.len() as u64).filter(|end| *end <= self.of.length_bytes);
        let Some(end) = end else {
            return Err(Error::corrupt(
                self.of.name(),
                offset_bytes,
                "length",
                format!("{} bytes from there on", buffer.len()),
                format!("the end of the object at byte {}", self.of.length_bytes),
            ));
        };
        if buffer.is_empty() {
            return Ok(());
        }
        if end <= self.start.len() as u64 {
            buffer.copy_from_slice(&self.start[offset_bytes as usize..end as usize]);
            return Ok(());
        }
        let range = offset_bytes..end;
        if let Some(one) = self.take_ahead(&range)
            && self.read_ahead(one, &range, buffer)?
        {
            return Ok(());
        }
        let backend = self.of.client.backend()?;
        let read = runtime()?.block_on(self.of.fetch(&backend, range, buffer));
        read.map_err(|failure| failure.error("read", self.of.name()))
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
        let coming = runtime.spawn(async move {
            let mut bytes = vec![0; length_bytes as usize];
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
