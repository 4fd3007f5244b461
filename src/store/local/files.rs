//! Files and folders: the steps between bytes in memory and an object that survives a power loss.
//!
//! [`StagedFile::publish`] bundles them (sync the file, rename, sync the folder), so that no caller can
//! leave one out. What POSIX promises and what it doesn't: `fsync` of a file says nothing of its
//! name, which lives in the folder; a failed `fsync` marks the pages clean, so a second one would lie.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, FileType, OpenOptions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::kill;
use crate::store::PutMode;

/// A file in `tmp/` that will become the object `target`. Dropping it removes it.
#[derive(Debug)]
pub(super) struct StagedFile {
    path: PathBuf,
    target: PathBuf,
    file: Arc<File>,
    sync: bool,
    /// The process that owns the file: a forked child holds a copy of this value, but not the file.
    owner: u32,
}

impl StagedFile {
    /// Creates an empty file with a name of its own in `folder`.
    pub(super) fn create(folder: &Path, target: PathBuf, sync: bool) -> Result<Self> {
        let owner = std::process::id();
        let path = folder.join(staged_name(owner, target.file_name().unwrap_or_default()));
        // The mode is left to the umask: a checkpoint that the group can't read helps nobody.
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(Error::store("create a staged file for", shown(&target)))?;
        Ok(Self { path, target, file: Arc::new(file), sync, owner })
    }

    /// The open file, to be written at positions.
    pub(super) fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Writes to another file from now on, such as one whose device is full.
    #[cfg(test)]
    pub(super) fn with_file(mut self, file: File) -> Self {
        self.file = Arc::new(file);
        self
    }

    /// Path of the object to be, for messages.
    pub(super) fn object(&self) -> String {
        shown(&self.target)
    }

    /// True in the process that created the file.
    pub(super) fn is_owned_here(&self) -> bool {
        self.owner == std::process::id()
    }

    /// Writes all bytes at an offset, through the page cache.
    pub(super) fn write_at(&self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, offset_bytes).map_err(Error::store("write", self.object()))
    }

    /// Cuts the file to its true length.
    pub(super) fn cut(&self, length_bytes: u64) -> Result<()> {
        self.file.set_len(length_bytes).map_err(Error::store("set the length of", self.object()))
    }

    /// Makes the bytes durable, the object visible under its name, and the name durable; returns the
    /// seconds spent on that. Tests may kill the process at each of `points`.
    ///
    /// The descriptor is closed unchecked: after a successful `fsync` there is nothing left that a
    /// close could fail to write.
    ///
    /// # Errors
    /// [`Error::Conflict`] where `mode` is [`PutMode::IfAbsent`] and the object exists. After every
    /// error the staged file is gone; where the last sync failed, the object is visible but may not
    /// survive a power loss.
    pub(super) fn publish(self, mode: PutMode, points: kill::Steps) -> Result<f64> {
        let kill::Steps { written, synced, renamed, folder_synced } = points;
        let start = Instant::now();
        kill::point(written);
        if self.sync {
            self.file.sync_all().map_err(Error::store("sync", self.object()))?;
        }
        kill::point(synced);
        match mode {
            PutMode::IfAbsent => self.rename_if_absent()?,
            PutMode::Replace => fs::rename(&self.path, &self.target)
                .map_err(Error::store("rename the staged file to", self.object()))?,
        }
        kill::point(renamed);
        if self.sync {
            sync_folder(parent(&self.target))?;
        }
        kill::point(folder_synced);
        Ok(seconds(start.elapsed()))
    }

    fn rename_if_absent(&self) -> Result<()> {
        let renamed = rename_noreplace(&self.path, &self.target).or_else(|errno| match errno {
            // The file system doesn't know the flag; a hard link is as good an arbiter.
            Errno::INVAL | Errno::NOSYS | Errno::NOTSUP => link_and_unlink(&self.path, &self.target),
            errno => Err(errno.into()),
        });
        match renamed {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(Error::Conflict { object: self.object(), by: describe_present(&self.target) })
            }
            renamed => renamed.map_err(Error::store("publish", self.object())),
        }
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        if self.is_owned_here() {
            // After a publish the name is gone already; and where it can't be removed, the next sweep does.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Name of a staged file: unlike that of any other process, thread or attempt.
fn staged_name(owner: u32, object_name: &OsStr) -> OsString {
    let random = RandomState::new().build_hasher().finish();
    let mut name = OsString::from(format!("{owner}-{random:016x}-"));
    name.push(object_name);
    name
}

fn rename_noreplace(from: &Path, to: &Path) -> Result<(), Errno> {
    rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)
}

fn link_and_unlink(from: &Path, to: &Path) -> io::Result<()> {
    fs::hard_link(from, to)?;
    // The object is visible; a second name in `tmp/` is only litter, and the next sweep takes it.
    let _ = fs::remove_file(from);
    Ok(())
}

fn describe_present(path: &Path) -> String {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() => format!("{} bytes lie there", metadata.len()),
        Ok(metadata) => format!("{} lies there", kind_of(metadata.file_type())),
        Err(error) => format!("what lies there can't be read ({error})"),
    }
}

/// Makes the names inside a folder durable.
///
/// File systems that can't sync a folder say so with `EINVAL` or `ENOTSUP`; they are taken as they
/// are. Any other error means that the change may be lost.
pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(folder);
    let file = opened.map_err(Error::store("open", shown(folder)))?;
    tolerate_unsupported(file.sync_all()).map_err(Error::store("sync folder", shown(folder)))
}

fn tolerate_unsupported(synced: io::Result<()>) -> io::Result<()> {
    match synced {
        Err(error) if [Errno::INVAL, Errno::NOTSUP].iter().any(|errno| is_errno(&error, *errno)) => Ok(()),
        synced => synced,
    }
}

/// Makes a folder and its missing parents; with `sync`, each new name is made durable in its parent.
pub(super) fn create_folder(folder: &Path, sync: bool) -> Result<()> {
    let missing: Vec<&Path> = folder.ancestors().take_while(|path| !path.is_dir()).collect();
    for path in missing.into_iter().rev() {
        match fs::create_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            created => created.map_err(Error::store("make folder", shown(path)))?,
        }
        if sync {
            sync_folder(parent(path))?;
        }
    }
    Ok(())
}

/// Opens a regular file without following a symbolic link and without waiting for the other end of a
/// pipe; returns it with its length in bytes.
///
/// # Errors
/// [`Error::Corrupt`] where something other than a regular file lies there.
pub(super) fn open_regular(path: &Path, options: &mut OpenOptions) -> Result<(File, u64)> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match options.custom_flags(flags.bits().cast_signed()).open(path) {
        Ok(file) => file,
        Err(error) => {
            return Err(refuse_odd(path).unwrap_or_else(|| Error::store("open", shown(path))(error)));
        }
    };
    let metadata = file.metadata().map_err(Error::store("read the length of", shown(path)))?;
    if metadata.is_file() { Ok((file, metadata.len())) } else { Err(odd(path, metadata.file_type())) }
}

/// The better reason why `path` can't be opened: it is no regular file.
fn refuse_odd(path: &Path) -> Option<Error> {
    let file_type = fs::symlink_metadata(path).ok()?.file_type();
    (!file_type.is_file()).then(|| odd(path, file_type))
}

fn odd(path: &Path, file_type: FileType) -> Error {
    Error::corrupt(shown(path), 0, "object", "a regular file", kind_of(file_type))
}

fn kind_of(file_type: FileType) -> &'static str {
    if file_type.is_dir() {
        "a folder"
    } else if file_type.is_symlink() {
        "a symbolic link"
    } else if file_type.is_fifo() {
        "a named pipe"
    } else if file_type.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

/// The folder in which `path` lies. Paths here are absolute, so only the root has none.
fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

/// A path as text for messages.
pub(super) fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

pub(super) fn is_errno(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

pub(super) fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_fallback_has_one_winner_and_leaves_no_second_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("a"), b"first").unwrap();
        fs::write(path("b"), b"second").unwrap();
        link_and_unlink(&path("a"), &path("object")).unwrap();
        let error = link_and_unlink(&path("b"), &path("object")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(path("object")).unwrap(), b"first");
        assert!(!path("a").exists());
        assert!(path("b").exists());
    }

    #[test]
    fn only_not_supported_is_forgiven_by_a_folder_sync() {
        let outcome = |errno: Errno| tolerate_unsupported(Err(errno.into()));
        outcome(Errno::INVAL).unwrap();
        outcome(Errno::NOTSUP).unwrap();
        for errno in [Errno::IO, Errno::NOSPC, Errno::DQUOT, Errno::ROFS] {
            assert_eq!(outcome(errno).unwrap_err().raw_os_error(), Some(errno.raw_os_error()));
        }
    }

    #[test]
    fn a_copy_of_a_staged_file_in_another_process_does_not_remove_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut staged = StagedFile::create(folder.path(), folder.path().join("object"), true).unwrap();
        let path = staged.path.clone();
        staged.owner += 1;
        drop(staged);
        assert!(path.exists());
    }

    #[test]
    fn a_file_in_the_way_of_a_folder_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let in_the_way = folder.path().join("file");
        fs::write(&in_the_way, b"").unwrap();
        let error = create_folder(&in_the_way.join("below"), true).unwrap_err();
        assert!(
            matches!(error, Error::Store { operation: "make folder", object, .. } if object == shown(&in_the_way))
        );
    }
}
