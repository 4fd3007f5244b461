//! What a store across a network can do beyond [`Store`]: versions of objects, compare-and-swap, and uploads
//! that go on after a crash.
//!
//! Every verb blocks its caller, and none is called by a save that somebody waits for.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Folder, Key, ReadAt, Store};
use crate::error::Result;

/// Identity of the bytes of an object at one moment, such as an entity tag. It is compared and never read: it
/// need not be a digest.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Version(pub String);

/// One row of a listing with everything the store tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteListed {
    /// Name inside the listed folder.
    pub name: String,
    /// Length of the object.
    pub length_bytes: u64,
    /// What it holds now.
    pub version: Version,
    /// When it was put there, by the clock of the store.
    pub modified_unix_ms: u64,
}

/// A large object that is being sent in parts; lives on disk while it is under way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upload {
    /// The store's name for it.
    pub id: String,
    /// Length of the whole object.
    pub length_bytes: u64,
    /// Length of every part but the last.
    pub part_bytes: u64,
    /// What the store answered for each part; `None` for one that has to be sent yet.
    pub parts: Vec<Option<String>>,
}

/// How a transfer is watched, slowed and ended.
#[derive(Clone, Copy, Debug)]
pub struct Transfer<'a> {
    /// Set to end it: it fails with [`crate::Error::Interrupted`] soon.
    pub cancelled: &'a AtomicBool,
    /// Bytes that went over the wire so far, of all transfers that share it.
    pub moved_bytes: &'a AtomicU64,
    /// Bytes in a second that it may move, on average.
    pub limit_bytes_per_second: Option<u64>,
}

/// A store across a network.
///
/// Beyond [`Store`]: `list` and `open` see at once what was published before they were called. A request is
/// sent again only where the answer was one of the server or of the transport that says nothing about the
/// object (5xx, 429, a broken connection), and a publish whose answer was lost is resolved by reading what lies
/// there: it never reports a conflict with itself.
pub trait RemoteStore: Store {
    /// Rows of a folder with versions, in no particular order; names that are no legal key are left out.
    fn list_versions(&self, folder: Folder) -> Result<Vec<RemoteListed>>;

    /// Reads a whole object of at most `limit_bytes`, and which version that was.
    fn get_versioned(&self, key: &Key, limit_bytes: u64) -> Result<(Vec<u8>, Version)>;

    /// Puts an object if it still has the version `expected`, or with `None` if it is absent. Exactly one of
    /// any number of writers that expect the same wins.
    ///
    /// # Errors
    /// [`crate::Error::Conflict`] where it has another version by now.
    fn swap(&self, key: &Key, bytes: &[u8], expected: Option<&Version>) -> Result<Version>;

    /// Deletes objects of one folder; absent ones are no error. Begins no request after `time`: by then somebody else
    /// may rely on them.
    fn delete_within(&self, folder: Folder, names: &[String], time: Duration) -> Result<()>;

    /// Refuses a store that does not keep these promises. Asked by who is going to write where nobody has before.
    ///
    /// # Errors
    /// [`crate::Error::Store`] that says what it lacks.
    fn require_promises(&self) -> Result<()> {
        Ok(())
    }

    /// Longest object that is better put in one request than sent in parts.
    fn single_put_limit_bytes(&self) -> u64 {
        8 << 20
    }

    /// Starts a large object of so many bytes. Nothing is visible until [`RemoteStore::complete_upload`], but an
    /// object of a single part, which is when that part is sent.
    fn begin_upload(&self, key: &Key, length_bytes: u64) -> Result<Upload>;

    /// Sends the parts that were not sent yet, several at once; memory is bounded by the parts in flight.
    /// `sent` is told after each part, by the calling thread, so that it can note on disk how far it is.
    ///
    /// # Errors
    /// [`crate::Error::Store`] with `io::ErrorKind::NotFound` where the store has forgotten the upload: begin
    /// another. [`crate::Error::Conflict`] where the object has a single part and other bytes lie there. After any
    /// other error the upload can be gone on with.
    fn send_parts(
        &self,
        key: &Key,
        source: &dyn ReadAt,
        upload: &mut Upload,
        transfer: Transfer<'_>,
        sent: &mut dyn FnMut(&Upload) -> Result<()>,
    ) -> Result<()>;

    /// Makes the object visible under its key, whole. Doing it again after it has succeeded is no error.
    ///
    /// # Errors
    /// [`crate::Error::Conflict`] where another object of another length lies there.
    fn complete_upload(&self, key: &Key, upload: &Upload) -> Result<Version>;

    /// Throws away what was sent. An upload that the store does not know is no error.
    fn abort_upload(&self, key: &Key, upload: &Upload) -> Result<()>;
}
