//! A repository in a folder of a local or mounted file system.
//!
//! Layout: FORMAT.md, section "Repository". These are the only files of the crate that name
//! `std::fs`. An object is written to a file of its own in `tmp/` and then renamed to its final name,
//! so a name never stands for half an object; which step makes what durable is the business of
//! `files`. Assumed of the file system: `rename` and `link` are atomic, and what `fsync` has confirmed
//! survives.

#![expect(
    clippy::disallowed_methods,
    reason = "the one place that may name `std::fs`; all else goes through `Store`"
)]

mod blocks;
mod files;
mod lock;
mod object;
mod staged;
mod writers;

use std::fs::{self, DirEntry};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::blocks::BlockPool;
use self::files::{StagedFile, create_folder, shown, sync_folder};
use self::lock::LocalLock;
use self::object::LocalObject;
use self::staged::LocalStagedWrite;
use super::{Folder, Key, Listed, PutMode, ReadAt, StagedWrite, Store, WriterLock};
use crate::error::{Error, Result};
use crate::kill;

/// Folder of staged files below the root.
const STAGED_FOLDER: &str = "tmp";

/// File below the root that the writer locks.
const LOCK_NAME: &str = "writer.lock";

/// How a [`LocalStore`] is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalOptions {
    /// Wait until the medium confirms each change. Without it a power loss may take everything: for
    /// tests only.
    pub sync: bool,
    /// Refuse every verb that changes something.
    pub read_only: bool,
}

impl Default for LocalOptions {
    fn default() -> Self {
        Self { sync: true, read_only: false }
    }
}

/// A [`Store`] in a folder.
///
/// It keeps up to 16 MiB of buffers between staged writes.
#[derive(Debug)]
pub struct LocalStore {
    root: PathBuf,
    options: LocalOptions,
    pool: Arc<BlockPool>,
}

impl LocalStore {
    /// Opens the folder `root`, which need not exist yet. A relative path means the one it means now.
    ///
    /// # Errors
    /// [`Error::Store`] where `root` is relative and the working directory can't be told.
    pub fn open(root: &Path, options: LocalOptions) -> Result<Self> {
        let root = std::path::absolute(root).map_err(Error::store("find", shown(root)))?;
        Ok(Self { root, options, pool: Arc::default() })
    }

    fn folder_path(&self, folder: Folder) -> PathBuf {
        match folder {
            Folder::Root => self.root.clone(),
            folder => self.root.join(folder.name()),
        }
    }

    fn object_path(&self, key: &Key) -> PathBuf {
        self.folder_path(key.folder()).join(key.name())
    }

    fn create_staged(&self, key: &Key) -> Result<StagedFile> {
        self.refuse_if_read_only(|| key.to_string())?;
        StagedFile::create(&self.root.join(STAGED_FOLDER), self.object_path(key), self.options.sync)
    }

    fn refuse_if_read_only(&self, object: impl FnOnce() -> String) -> Result<()> {
        if self.options.read_only {
            let what = format!("write of `{}` to a repository opened read-only", object());
            return Err(Error::invalid(what, format!("open `{}` for writing", self.root())));
        }
        Ok(())
    }
}

impl Store for LocalStore {
    fn root(&self) -> String {
        shown(&self.root)
    }

    fn create_folders(&self) -> Result<()> {
        self.refuse_if_read_only(|| self.root())?;
        create_folder(&self.root, self.options.sync)?;
        for name in Folder::BELOW_ROOT.map(Folder::name).into_iter().chain([STAGED_FOLDER]) {
            create_folder(&self.root.join(name), false)?;
        }
        // Also where nothing was missing: an earlier process may have died between making and syncing.
        if self.options.sync { sync_folder(&self.root) } else { Ok(()) }
    }

    fn list(&self, folder: Folder) -> Result<Vec<Listed>> {
        let mut rows = Vec::new();
        each_entry(&self.folder_path(folder), |entry| {
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| Key::new(folder, name).is_ok()) else {
                return Ok(());
            };
            let file_type = entry.file_type()?;
            // Outside the root a link or a pipe under an object's name is listed, so that it is found
            // and refused instead of being overlooked.
            let listed = match folder {
                Folder::Root => file_type.is_file() && name != LOCK_NAME,
                _ => !file_type.is_dir(),
            };
            if listed {
                rows.push(Listed { name: name.to_owned(), length_bytes: None });
            }
            Ok(())
        })?;
        Ok(rows)
    }

    fn open(&self, key: &Key) -> Result<Box<dyn ReadAt>> {
        Ok(Box::new(LocalObject::open(&self.object_path(key))?))
    }

    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>> {
        Ok(Box::new(LocalStagedWrite::new(self.create_staged(key)?, Arc::clone(&self.pool))))
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        let staged = self.create_staged(key)?;
        staged.write_at(0, bytes)?;
        staged.publish(mode, kill::PUT).map(|_seconds| ())
    }

    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        self.refuse_if_read_only(|| folder.name().to_owned())?;
        let keys = names.iter().map(|name| Key::new(folder, name)).collect::<Result<Vec<_>>>()?;
        let mut freed_bytes = 0;
        let mut unlinked = Ok(());
        for key in &keys {
            match unlink(&self.object_path(key)) {
                Ok(length_bytes) => {
                    freed_bytes += length_bytes;
                    kill::point("delete.unlinked");
                }
                Err(error) => {
                    unlinked = Err(error);
                    break;
                }
            }
        }
        // Also after an error and where nothing was there: an earlier deletion may not be durable yet.
        let synced = if keys.is_empty() { Ok(()) } else { self.sync_folder(folder) };
        unlinked.and(synced)?;
        kill::point("delete.folder_synced");
        Ok(freed_bytes)
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        if !self.options.sync {
            return Ok(());
        }
        let synced = sync_folder(&self.folder_path(folder));
        synced.or_else(|error| if error.is_not_found() { Ok(()) } else { Err(error) })
    }

    fn sweep_staged(&self) -> Result<u64> {
        self.refuse_if_read_only(|| STAGED_FOLDER.to_owned())?;
        let mut count = 0;
        each_entry(&self.root.join(STAGED_FOLDER), |entry| {
            if entry.file_type()?.is_dir() {
                return Ok(());
            }
            match fs::remove_file(entry.path()) {
                Ok(()) => count += 1,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            Ok(())
        })?;
        Ok(count)
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn WriterLock>> {
        self.refuse_if_read_only(|| LOCK_NAME.to_owned())?;
        Ok(Box::new(LocalLock::take(&self.root(), &self.root.join(LOCK_NAME), holder)?))
    }

    fn free_bytes(&self) -> Option<u64> {
        let space = rustix::fs::statvfs(&self.root).ok()?;
        space.f_bavail.checked_mul(space.f_frsize)
    }

    fn local_path(&self, key: &Key) -> Option<PathBuf> {
        Some(self.object_path(key))
    }
}

/// Calls `visit` with every entry of a folder; an absent folder has none.
fn each_entry(folder: &Path, mut visit: impl FnMut(&DirEntry) -> io::Result<()>) -> Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(Error::store("list", shown(folder)))?,
    };
    for entry in entries {
        let entry = entry.map_err(Error::store("list", shown(folder)))?;
        match visit(&entry) {
            // Deleted by another process since it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            visited => visited.map_err(Error::store("list", shown(&entry.path())))?,
        }
    }
    Ok(())
}

/// Removes a file and returns its length in bytes, 0 where it was absent.
fn unlink(path: &Path) -> Result<u64> {
    let removed = fs::symlink_metadata(path).and_then(|metadata| {
        fs::remove_file(path)?;
        Ok(if metadata.is_file() { metadata.len() } else { 0 })
    });
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        removed => removed.map_err(Error::store("delete", shown(path))),
    }
}

/// Opens a regular file for reading, as every object is opened: for a caller that maps it.
///
/// # Errors
/// [`Error::Store`] where it can't be opened, [`Error::Corrupt`] where it is no regular file.
pub fn open_file(path: &Path) -> Result<fs::File> {
    files::open_regular(path, fs::OpenOptions::new().read(true)).map(|(file, _)| file)
}

/// Reads a file that is no object: one of the user's settings, of at most `limit_bytes`. Unlike an object it
/// may lie behind a link, as what a cluster mounts does.
///
/// # Errors
/// [`Error::Store`] where it can't be read, [`Error::InvalidInput`] where it is too long.
pub fn read_settings(path: &Path, limit_bytes: u64) -> Result<Vec<u8>> {
    use std::io::Read;
    let file = fs::File::open(path).map_err(Error::store("open", shown(path)))?;
    let mut bytes = Vec::new();
    file.take(limit_bytes + 1).read_to_end(&mut bytes).map_err(Error::store("read", shown(path)))?;
    if bytes.len() as u64 > limit_bytes {
        return Err(Error::invalid(
            format!("file `{}`", shown(path)),
            format!("is longer than {limit_bytes} bytes"),
        ));
    }
    Ok(bytes)
}
