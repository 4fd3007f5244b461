//! The writer lock: `flock` on a file that is never deleted.
//!
//! The kernel lets go of it when the process dies, so there is no stale lock and no time-out. `flock`
//! belongs to the open file description: a forked child shares it, and merely closing the child's
//! copy doesn't release it for the parent.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::files::{open_regular, shown};
use crate::error::{Error, Result};
use crate::store::WriterLock;

/// Bytes of the holder's text that are read back at most.
const HOLDER_LIMIT_BYTES: u64 = 4096;

/// The held lock.
#[derive(Debug)]
pub(super) struct LocalLock {
    file: File,
    owner: u32,
}

impl LocalLock {
    /// Takes the lock on the file `path` of the repository `root`, or says who holds it.
    pub(super) fn take(root: &str, path: &Path, holder: &str) -> Result<Self> {
        let mut options = OpenOptions::new();
        let (file, _) = open_regular(path, options.read(true).write(true).create(true))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Locked { root: root.to_owned(), holder: read_holder(&file) });
            }
            Err(TryLockError::Error(source)) => return Err(Error::store("lock", shown(path))(source)),
        }
        let lock = Self { file, owner: std::process::id() };
        lock.write_holder(holder).map_err(Error::store("write the holder of", shown(path)))?;
        Ok(lock)
    }

    fn write_holder(&self, holder: &str) -> std::io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(holder.as_bytes(), 0)
    }
}

impl WriterLock for LocalLock {
    fn abandon(mut self: Box<Self>) {
        // From here on dropping only closes.
        self.owner = 0;
    }
}

impl Drop for LocalLock {
    fn drop(&mut self) {
        // Closing would do, were it not for forked children (data-loader workers) that still hold a
        // copy of the descriptor. A child must never do this itself: it would release the parent's lock.
        if self.owner == std::process::id() {
            let _ = self.file.set_len(0);
            let _ = self.file.unlock();
        }
    }
}

fn read_holder(file: &File) -> String {
    let mut text = Vec::new();
    match file.take(HOLDER_LIMIT_BYTES).read_to_end(&mut text) {
        Ok(0) | Err(_) => "it has not written who it is".to_owned(),
        Ok(_) => String::from_utf8_lossy(&text).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lock with a second descriptor of the same open file, as a forked child has one.
    fn forked(path: &Path) -> (LocalLock, LocalLock) {
        let lock = LocalLock::take("root", path, "parent").unwrap();
        let copy = lock.file.try_clone().unwrap();
        (lock, LocalLock { file: copy, owner: std::process::id() })
    }

    #[test]
    fn abandoning_in_a_child_leaves_the_lock_to_the_parent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("writer.lock");
        let (parent, child) = forked(&path);
        Box::new(child).abandon();
        let error = LocalLock::take("root", &path, "other").unwrap_err();
        assert!(matches!(error, Error::Locked { root, holder } if root == "root" && holder == "parent"));
        drop(parent);
        LocalLock::take("root", &path, "other").unwrap();
    }

    #[test]
    fn a_child_that_lives_on_does_not_keep_the_lock_of_a_parent_that_released_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("writer.lock");
        let (parent, mut child) = forked(&path);
        child.owner += 1;
        drop(parent);
        LocalLock::take("root", &path, "other").unwrap();
        drop(child);
    }

    #[test]
    fn a_lock_without_text_is_still_a_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("writer.lock");
        let _held = LocalLock::take("root", &path, "").unwrap();
        let error = LocalLock::take("root", &path, "other").unwrap_err();
        assert!(matches!(error, Error::Locked { holder, .. } if holder == "it has not written who it is"));
    }
}
