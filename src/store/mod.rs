//! Where objects lie: the [`Store`] contract, and its implementations.
//!
//! A store maps keys to immutable byte strings. It never looks inside them. Everything that decides
//! whether a snapshot survives a crash (write, sync, rename, sync of the folder) is bundled behind
//! three verbs that cannot be half-called: [`StagedWrite::publish`], [`Store::put`] and
//! [`Store::delete`]. `local` is the only file of the crate that names `std::fs`.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, Result};

pub mod local;
pub mod memory;
#[cfg(feature = "cloud")]
pub mod object;
pub mod remote;

/// Folder of a key below the root (FORMAT.md, section "Repository").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Folder {
    /// The root itself: `varvite.json`.
    Root,
    /// `packs/`
    Packs,
    /// `snapshots/`: manifests
    Snapshots,
    /// `tags/`
    Tags,
    /// `receipts/`
    Receipts,
    /// `sync/`: what a local repository knows of its bucket; never in a bucket itself
    Sync,
    /// `uploads/`: which large objects are being sent; only in a bucket
    Uploads,
}

impl Folder {
    /// Folders below the root of a local repository, in the order in which they are made.
    pub const BELOW_ROOT: [Self; 5] = [Self::Packs, Self::Snapshots, Self::Tags, Self::Receipts, Self::Sync];

    /// Name of the folder, empty for the root.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Root => "",
            Self::Packs => "packs",
            Self::Snapshots => "snapshots",
            Self::Tags => "tags",
            Self::Receipts => "receipts",
            Self::Sync => "sync",
            Self::Uploads => "uploads",
        }
    }
}

/// Longest name of an object in bytes, below what every file system and bucket takes.
pub const NAME_LIMIT_BYTES: usize = 200;

/// Address of an object: a folder and a name of `[A-Za-z0-9._-]`, not starting with a dot.
///
/// A key can therefore never leave the root, whatever bytes a manifest or a listing holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    folder: Folder,
    name: String,
}

impl Key {
    /// Builds a key.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where the name is empty, too long, or has other characters.
    pub fn new(folder: Folder, name: &str) -> Result<Self> {
        let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if name.is_empty()
            || name.len() > NAME_LIMIT_BYTES
            || name.starts_with('.')
            || !name.bytes().all(legal)
        {
            return Err(Error::invalid(
                format!("object name `{}`", name.escape_debug()),
                format!(
                    "must be 1 to {NAME_LIMIT_BYTES} characters of A-Z a-z 0-9 . _ - and not start with a dot"
                ),
            ));
        }
        Ok(Self { folder, name: name.to_owned() })
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> Folder {
        self.folder
    }

    /// The name inside the folder.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.folder {
            Folder::Root => formatter.write_str(&self.name),
            folder => write!(formatter, "{}/{}", folder.name(), self.name),
        }
    }
}

/// One row of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Name inside the listed folder.
    pub name: String,
    /// Length of the object, where the listing gives it without extra cost.
    pub length_bytes: Option<u64>,
}

/// What [`Store::put`] does where the object exists already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutMode {
    /// Publish only if absent; an existing object is [`Error::Conflict`] and stays as it is. Atomic
    /// between any number of writers: exactly one wins.
    IfAbsent,
    /// Replace in one step: a reader sees the old bytes or the new ones.
    Replace,
}

/// A place for immutable objects.
///
/// Guarantees that every implementation gives, and that `tests/store_conformance.rs` checks:
///
/// * **Atomic**: an object is visible whole or not at all; staged bytes are never listed or readable.
/// * **Durable**: when `publish`, `put` or `delete` returns `Ok`, the change survives a power loss
///   (unless the store was opened without sync, for tests).
/// * **Never retried**: a failed write or sync is reported once; the staged bytes are thrown away.
/// * **Immutable**: no verb changes the bytes of a published object; only `put` with
///   [`PutMode::Replace`] puts another object in its place.
/// * A handle of [`Store::open`] keeps reading the same bytes after the object was deleted.
///
/// Missing objects are [`Error::Store`] with `io::ErrorKind::NotFound` ([`Error::is_not_found`]).
pub trait Store: Send + Sync + fmt::Debug {
    /// The root, for messages.
    fn root(&self) -> String;

    /// Makes the folders of a repository, durably, where they are missing.
    fn create_folders(&self) -> Result<()>;

    /// Rows of a folder, in no particular order; names that are no legal key are left out. An absent
    /// folder is an empty one.
    fn list(&self, folder: Folder) -> Result<Vec<Listed>>;

    /// Reads a whole object of at most `limit_bytes`; a longer one is [`Error::Corrupt`], found before
    /// anything is allocated.
    fn get(&self, key: &Key, limit_bytes: u64) -> Result<Vec<u8>> {
        let object = self.open(key)?;
        if object.length_bytes() > limit_bytes {
            let name = format!("{}/{key}", self.root());
            let expected = format!("at most {limit_bytes} bytes");
            return Err(Error::corrupt(name, 0, "length", expected, object.length_bytes()));
        }
        let mut bytes = vec![0; object.length_bytes() as usize];
        object.read_at(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Opens an object for reading at positions.
    fn open(&self, key: &Key) -> Result<Box<dyn ReadAt>>;

    /// Starts a large object. Nothing is visible until [`StagedWrite::publish`].
    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>>;

    /// Publishes a small object in one durable step.
    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()>;

    /// Deletes objects of one folder, then makes the deletion durable once. Absent ones are no error.
    /// Returns the bytes freed.
    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64>;

    /// Makes the present names of a folder durable, whoever made or removed them: for a writer that goes
    /// on where another one stopped midway.
    fn sync_folder(&self, folder: Folder) -> Result<()>;

    /// Removes what staged writes of dead processes left behind; returns how many files. Call only
    /// while holding the lock.
    fn sweep_staged(&self) -> Result<u64>;

    /// Takes the writer lock without waiting; `holder` is what a second writer gets to read.
    ///
    /// # Errors
    /// [`Error::Locked`] with the text of the present holder.
    fn lock(&self, holder: &str) -> Result<Box<dyn WriterLock>>;

    /// Bytes free for this user where the objects lie, if the store can tell.
    fn free_bytes(&self) -> Option<u64>;

    /// Path of an object as a file that other code may map, where there is one.
    fn local_path(&self, key: &Key) -> Option<std::path::PathBuf>;

    /// Whether reading an object that is there needs no network. A save refers to no other packs, and a merge
    /// reads no others.
    fn is_at_hand(&self, _key: &Key) -> bool {
        true
    }

    /// Whether an object lies everywhere it is to lie: retention keeps what doesn't.
    fn is_pushed(&self, _key: &Key) -> bool {
        true
    }

    /// Refuses where another writer has taken the place over: a handle that lost it writes nothing more.
    ///
    /// # Errors
    /// [`Error::Conflict`] that names both writers.
    fn require_ours(&self) -> Result<()> {
        Ok(())
    }
}

/// An open, immutable object.
pub trait ReadAt: Send + Sync + fmt::Debug {
    /// Length of the object.
    fn length_bytes(&self) -> u64;

    /// Fills `buffer` from `offset_bytes` on (from the object's first byte).
    ///
    /// # Errors
    /// [`Error::Corrupt`] where the object ends before; [`Error::Store`] where reading fails.
    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()>;

    /// Exchanges `buffer` for one that begins with the bytes of a range, where the object has them in memory of its own;
    /// `false` where it hasn't, and has left `buffer` alone.
    ///
    /// # Errors
    /// As [`ReadAt::read_at`].
    fn exchange(&self, _range: Range<u64>, _buffer: &mut Vec<u8>) -> Result<bool> {
        Ok(false)
    }

    /// Fills the first `length` bytes of `buffer` as [`ReadAt::read_at`] does; what it held is lost.
    ///
    /// # Errors
    /// As there.
    fn read_into(&self, offset_bytes: u64, length: usize, buffer: &mut Vec<u8>) -> Result<()> {
        if self.exchange(offset_bytes..offset_bytes.saturating_add(length as u64), buffer)? {
            return Ok(());
        }
        if buffer.len() < length {
            buffer.resize(length, 0);
        }
        self.read_at(offset_bytes, &mut buffer[..length])
    }

    /// Tells the store which range will be read next, as a hint.
    fn will_read(&self, _range: Range<u64>) {}
}

/// A large object being written. Dropping it without `publish` removes what was staged.
pub trait StagedWrite: Send + fmt::Debug {
    /// Bytes appended so far: the offset of the next byte.
    fn position_bytes(&self) -> u64;

    /// Appends bytes. Errors of earlier background writes may surface here; after one, every further
    /// call fails.
    fn append(&mut self, bytes: &[u8]) -> Result<()>;

    /// Makes the bytes durable and the object visible under its key, if that key is absent. Returns
    /// how the time was spent.
    fn publish(self: Box<Self>) -> Result<Published>;
}

/// What a publish did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Published {
    /// Length of the object.
    pub length_bytes: u64,
    /// Seconds in which bytes went to the medium, from the last append until they were handed over.
    pub drain_seconds: f64,
    /// Seconds spent waiting for the medium to confirm (sync of file and folder).
    pub sync_seconds: f64,
}

/// Where a read of `wanted_bytes` at an offset ends in an object of a length; `object` is its name for messages.
///
/// # Errors
/// [`Error::Corrupt`] where that is past the end of the object.
pub(crate) fn end_of_read(
    object: impl FnOnce() -> String,
    offset_bytes: u64,
    wanted_bytes: usize,
    length_bytes: u64,
) -> Result<u64> {
    let end = offset_bytes.checked_add(wanted_bytes as u64).filter(|end| *end <= length_bytes);
    end.ok_or_else(|| past_the_end(object(), offset_bytes, wanted_bytes, length_bytes))
}

/// The error of a read that goes past the end of an object, which is at `end_bytes`.
fn past_the_end(object: String, offset_bytes: u64, wanted_bytes: usize, end_bytes: u64) -> Error {
    let expected = format!("{wanted_bytes} bytes from there on");
    Error::corrupt(
        object,
        offset_bytes,
        "length",
        expected,
        format!("the end of the object at byte {end_bytes}"),
    )
}

/// The held writer lock; dropping it releases.
pub trait WriterLock: Send + Sync + fmt::Debug {
    /// Forgets the lock in a forked child without releasing it for the parent.
    fn abandon(self: Box<Self>);
}
