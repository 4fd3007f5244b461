//! A large object on its way to the disk.
//!
//! Bytes are collected in aligned blocks; two threads write full blocks past the page cache, which is
//! several times faster than copying them into fresh cache pages and flushing those. An object of
//! less than one block never starts a thread.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::blocks::{Block, BlockPool};
use super::files::{StagedFile, is_errno, seconds};
use super::writers::{Failure, Writers};
use crate::error::{Error, Result};
use crate::kill;
use crate::store::{Published, PutMode, StagedWrite};

/// A staged write of a local store.
#[derive(Debug)]
pub(super) struct LocalStagedWrite {
    /// `None` after the first failure: the file is gone, and its space free.
    staged: Option<StagedFile>,
    pool: Arc<BlockPool>,
    /// The block being filled.
    block: Option<Block>,
    writers: Option<Writers>,
    position_bytes: u64,
    /// Offset of the block being filled.
    block_offset_bytes: u64,
    /// Text of the first failure.
    first_failure: String,
}

impl LocalStagedWrite {
    pub(super) fn new(staged: StagedFile, pool: Arc<BlockPool>) -> Self {
        Self {
            staged: Some(staged),
            pool,
            block: None,
            writers: None,
            position_bytes: 0,
            block_offset_bytes: 0,
            first_failure: String::new(),
        }
    }

    fn try_append(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let mut block = match self.block.take() {
                Some(block) => block,
                None => self.empty_block()?,
            };
            let count = block.fill(bytes);
            bytes = &bytes[count..];
            self.position_bytes += count as u64;
            if block.is_full() {
                self.write_block(block)?;
            } else {
                self.block = Some(block);
            }
        }
        Ok(())
    }

    fn empty_block(&mut self) -> Result<Block> {
        match &self.writers {
            Some(writers) => writers.empty_block(&self.pool).map_err(|failure| self.explain(failure)),
            None => Ok(self.pool.take()),
        }
    }

    /// Hands a block to the threads, which start with the first one.
    fn write_block(&mut self, block: Block) -> Result<()> {
        let offset_bytes = self.block_offset_bytes;
        self.block_offset_bytes = self.position_bytes;
        if self.writers.is_none() {
            let staged = self.staged()?;
            let file = Arc::clone(staged.file());
            bypass_page_cache(&file);
            let started =
                Writers::start(Box::new(move |offset_bytes, bytes| write_at(&file, offset_bytes, bytes)));
            self.writers =
                Some(started.map_err(Error::store("start the threads that write", staged.object()))?);
        }
        match &self.writers {
            Some(writers) => writers.write(offset_bytes, block).map_err(|failure| self.explain(failure)),
            None => Ok(()),
        }
    }

    /// Writes what is still in memory and ends the threads.
    fn drain(&mut self) -> Result<()> {
        let tail = self.block.take();
        if self.writers.is_none() {
            if let Some(block) = tail {
                let written = self.staged().and_then(|staged| staged.write_at(0, block.filled()));
                self.pool.give_back(block);
                written?;
            }
            return Ok(());
        }
        if let Some(mut block) = tail {
            block.pad();
            self.write_block(block)?;
        }
        if let Some(writers) = self.writers.take() {
            writers.stop(&self.pool).map_err(|failure| self.explain(failure))?;
        }
        self.staged()?.cut(self.position_bytes)
    }

    fn staged(&self) -> Result<&StagedFile> {
        self.staged.as_ref().ok_or_else(|| Error::Poisoned { first: self.first_failure.clone() })
    }

    fn explain(&self, failure: Failure) -> Error {
        let object = self.staged.as_ref().map(StagedFile::object).unwrap_or_default();
        match failure {
            Failure::Io(source) => Error::Store { operation: "write", object, source },
            Failure::Panic(text) => {
                Error::Internal { what: format!("a thread that writes `{object}` panicked: {text}") }
            }
            Failure::Reported => Error::Poisoned { first: self.first_failure.clone() },
        }
    }

    /// Remembers the first failure and frees the file's space at once.
    fn poison(&mut self, error: Error) -> Error {
        if self.staged.is_some() {
            self.first_failure = error.chain();
            self.release();
        }
        error
    }

    /// Ends the threads, removes the file, gives the blocks back.
    fn release(&mut self) {
        let owned_here = self.staged.as_ref().is_some_and(StagedFile::is_owned_here);
        if !owned_here && self.staged.is_some() {
            // A forked child: the threads don't exist here, and locks may be held by none that ever
            // lets go of them.
            std::mem::forget((self.writers.take(), self.block.take()));
        }
        if let Some(writers) = self.writers.take() {
            writers.cancel(&self.pool);
        }
        if let Some(block) = self.block.take() {
            self.pool.give_back(block);
        }
        self.staged = None;
    }
}

impl StagedWrite for LocalStagedWrite {
    fn position_bytes(&self) -> u64 {
        self.position_bytes
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.staged()?;
        self.try_append(bytes).map_err(|error| self.poison(error))
    }

    fn publish(mut self: Box<Self>) -> Result<Published> {
        self.staged()?;
        let start = Instant::now();
        self.drain().map_err(|error| self.poison(error))?;
        let drain_seconds = seconds(start.elapsed());
        let Some(staged) = self.staged.take() else {
            return Err(Error::Poisoned { first: self.first_failure.clone() });
        };
        let sync_seconds = staged.publish(PutMode::IfAbsent, kill::PUBLISH)?;
        Ok(Published { length_bytes: self.position_bytes, drain_seconds, sync_seconds })
    }
}

impl Drop for LocalStagedWrite {
    fn drop(&mut self) {
        self.release();
    }
}

/// Asks that writes go past the page cache. Where the file system can't (tmpfs, some FUSE), they go
/// through it: slower, and just as correct.
fn bypass_page_cache(file: &File) {
    let _ = fcntl_getfl(file).and_then(|flags| fcntl_setfl(file, flags | OFlags::DIRECT));
}

/// Writes all bytes at an offset.
///
/// A file system may take the request for direct writes and then refuse the alignment with `EINVAL`,
/// before it has written anything; only then the same bytes go through the page cache.
fn write_at(file: &File, offset_bytes: u64, bytes: &[u8]) -> io::Result<()> {
    match file.write_all_at(bytes, offset_bytes) {
        Err(error) if is_errno(&error, Errno::INVAL) && fcntl_getfl(file)?.contains(OFlags::DIRECT) => {
            fcntl_setfl(file, fcntl_getfl(file)? - OFlags::DIRECT)?;
            file.write_all_at(bytes, offset_bytes)
        }
        written => written,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};

    use super::super::blocks::BLOCK_BYTES;
    use super::*;

    const NO_SPACE: i32 = Errno::NOSPC.raw_os_error();

    /// A staged write of `<folder>/object` whose device is full.
    fn on_a_full_device(folder: &tempfile::TempDir) -> LocalStagedWrite {
        let staged = StagedFile::create(folder.path(), folder.path().join("object"), true).unwrap();
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        LocalStagedWrite::new(staged.with_file(full), Arc::default())
    }

    fn names_in(folder: &tempfile::TempDir) -> Vec<std::ffi::OsString> {
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect()
    }

    fn assert_no_space(error: &Error, folder: &tempfile::TempDir) {
        let Error::Store { operation, object, source } = error else { panic!("{error}") };
        assert_eq!(*operation, "write");
        assert_eq!(*object, folder.path().join("object").to_string_lossy());
        assert_eq!(source.raw_os_error(), Some(NO_SPACE));
    }

    #[test]
    fn a_full_disk_surfaces_at_a_later_append_frees_the_file_and_poisons() {
        let folder = tempfile::tempdir().unwrap();
        let mut staged = on_a_full_device(&folder);
        assert_eq!(names_in(&folder).len(), 1);
        let block = vec![1; BLOCK_BYTES];
        // More blocks than there are buffers: one of these appends waits for a write that fails.
        let error = (0..8).find_map(|_| staged.append(&block).err()).unwrap();
        assert_no_space(&error, &folder);
        assert_eq!(names_in(&folder).len(), 0, "the space is given back before the caller hears of it");

        let first = error.chain();
        assert!(matches!(staged.append(&[1]), Err(Error::Poisoned { first: text }) if text == first));
        assert!(matches!(Box::new(staged).publish(), Err(Error::Poisoned { first: text }) if text == first));
    }

    #[test]
    fn a_full_disk_surfaces_at_the_latest_at_publish() {
        for length_bytes in [1, BLOCK_BYTES, BLOCK_BYTES + 1] {
            let folder = tempfile::tempdir().unwrap();
            let mut staged = on_a_full_device(&folder);
            // Whether the append of more than a block hears of it already is a matter of speed.
            let appended = staged.append(&vec![1; length_bytes]);
            let error = appended.and_then(|()| Box::new(staged).publish()).unwrap_err();
            assert_no_space(&error, &folder);
            assert_eq!(names_in(&folder).len(), 0);
        }
    }

    #[test]
    fn a_file_that_cannot_be_synced_is_thrown_away() {
        let folder = tempfile::tempdir().unwrap();
        // Nothing is written, so the sync is the first to fail: a character device has none.
        let error = Box::new(on_a_full_device(&folder)).publish().unwrap_err();
        assert!(matches!(error, Error::Store { operation: "sync", .. }), "{error}");
        assert_eq!(names_in(&folder).len(), 0);
    }

    #[test]
    fn a_write_whose_alignment_is_refused_goes_through_the_page_cache() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("object");
        let file = File::create(&path).unwrap();
        bypass_page_cache(&file);
        write_at(&file, 3, b"unaligned").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"\0\0\0unaligned");
    }

    #[test]
    fn blocks_return_to_the_pool_after_success_failure_and_drop() {
        let folder = tempfile::tempdir().unwrap();
        let pool: Arc<BlockPool> = Arc::default();
        let stage = || {
            let target = folder.path().join("object");
            let _ = fs::remove_file(&target);
            LocalStagedWrite::new(StagedFile::create(folder.path(), target, true).unwrap(), Arc::clone(&pool))
        };
        let block = vec![1; BLOCK_BYTES];
        let mut published = stage();
        (0..6).for_each(|_| published.append(&block).unwrap());
        Box::new(published).publish().unwrap();
        let after_publish = pool.empty_count();
        assert!((1..=4).contains(&after_publish), "{after_publish} blocks");

        let mut dropped = stage();
        (0..6).for_each(|_| dropped.append(&block).unwrap());
        dropped.append(&[1]).unwrap();
        drop(dropped);
        assert!(pool.empty_count() >= after_publish);
    }
}
