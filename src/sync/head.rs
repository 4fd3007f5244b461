//! The first bytes of small objects in a bucket, read once and in parallel: what a listing of snapshots or
//! tags needs of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::encrypted::{HEAD_LENGTH_BYTES, STORED_PAGE_BYTES, is_encrypted};
use crate::format::limits::HEADER_LINE_LIMIT_BYTES;
use crate::store::remote::{RemoteStore, Version};
use crate::store::{Key, ReadAt};
use crate::threads::for_each_waiting;

use super::view::Row;

/// Bytes that are read first; enough for nearly every header line, also of an encrypted manifest.
const FIRST_BYTES: u64 = HEAD_LENGTH_BYTES + STORED_PAGE_BYTES;
/// Reads at once.
const THREAD_COUNT: usize = 8;

/// First bytes of an object: up to the end of its first line at least, or all of it; of an encrypted one, its first
/// page.
pub(super) fn read_head(object: &dyn ReadAt) -> Result<Vec<u8>> {
    let mut length = FIRST_BYTES.min(object.length_bytes());
    loop {
        let mut bytes = vec![0; length as usize];
        object.read_at(0, &mut bytes)?;
        let is_enough = is_encrypted(&bytes) || bytes.contains(&b'\n');
        if is_enough || length == object.length_bytes() || length >= HEADER_LINE_LIMIT_BYTES {
            return Ok(bytes);
        }
        length = (length * 8).min(object.length_bytes());
    }
}

/// The first line of these bytes with its line break, or all of them; of an encrypted object, what stands in the
/// clear: no other object has the same.
pub(super) fn first_line(bytes: &[u8]) -> &[u8] {
    if is_encrypted(bytes) {
        return bytes.get(..HEAD_LENGTH_BYTES as usize).unwrap_or(bytes);
    }
    let end = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1);
    &bytes[..end]
}

/// Digest of a manifest as the journal has it: its header line holds the digest of the rest.
pub(super) fn line_digest(head: &[u8]) -> ChunkDigest {
    ChunkDigest::of(first_line(head))
}

/// Heads of objects of a bucket, by the version they were read of.
#[derive(Debug, Default)]
pub(super) struct Heads {
    known: Mutex<HashMap<Key, Head>>,
}

/// First bytes of an object, and the version that they were read of.
type Head = (Version, Arc<[u8]>);

impl Heads {
    /// The head of an object, if it was read of this version.
    pub(super) fn get(&self, key: &Key, version: &Version) -> Option<Arc<[u8]>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(key).filter(|(of, _)| of == version).map(|(_, head)| Arc::clone(head))
    }

    /// Reads those that are not known yet, several at once, and forgets all others. One that is gone by now is left
    /// out.
    ///
    /// # Errors
    /// The first that the bucket gave.
    pub(super) fn fetch(&self, remote: &dyn RemoteStore, wanted: &[(Key, Row)]) -> Result<()> {
        let missing: Vec<&(Key, Row)> =
            wanted.iter().filter(|(key, row)| self.get(key, &row.version).is_none()).collect();
        for_each_waiting(&missing, THREAD_COUNT, |(key, row)| {
            let head = match remote.open(key).and_then(|object| read_head(object.as_ref())) {
                Err(error) if error.is_not_found() => return Ok(()),
                read => read?,
            };
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.insert(key.clone(), (row.version.clone(), head.into()));
            Ok(())
        })
    }

    /// Forgets all but these.
    pub(super) fn keep_only(&self, is_kept: impl Fn(&Key) -> bool) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).retain(|key, _| is_kept(key));
    }
}

/// An object of a bucket that is opened when more than its head is asked for.
pub(super) struct Lazy {
    remote: Arc<dyn RemoteStore>,
    key: Key,
    length_bytes: u64,
    head: Option<Arc<[u8]>>,
    opened: OnceLock<Box<dyn ReadAt>>,
}

impl Lazy {
    pub(super) fn new(
        remote: Arc<dyn RemoteStore>,
        key: Key,
        length_bytes: u64,
        head: Option<Arc<[u8]>>,
    ) -> Self {
        Self { remote, key, length_bytes, head, opened: OnceLock::new() }
    }

    fn opened(&self) -> Result<&dyn ReadAt> {
        if let Some(opened) = self.opened.get() {
            return Ok(opened.as_ref());
        }
        let object = self.remote.open(&self.key)?;
        if object.length_bytes() != self.length_bytes {
            // Another object by now: what was listed is gone.
            let name = format!("{}/{}", self.remote.root(), self.key);
            return Err(Error::store("read", name)(std::io::ErrorKind::NotFound.into()));
        }
        Ok(self.opened.get_or_init(|| object).as_ref())
    }
}

impl ReadAt for Lazy {
    fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        let start = usize::try_from(offset_bytes).ok();
        let range = start.and_then(|start| Some(start..start.checked_add(buffer.len())?));
        let known = self.head.as_ref().zip(range).and_then(|(head, range)| head.get(range));
        if let Some(known) = known {
            buffer.copy_from_slice(known);
            return Ok(());
        }
        self.opened()?.read_at(offset_bytes, buffer)
    }
}

impl std::fmt::Debug for Lazy {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Lazy({}, {} bytes)", self.key, self.length_bytes)
    }
}
