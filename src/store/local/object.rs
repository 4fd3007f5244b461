//! An open file, read at positions.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::Advice;

use super::files::{open_regular, shown};
use crate::error::{Error, Result};
use crate::store::{ReadAt, end_of_read, past_the_end};

/// An open object of a local store.
#[derive(Debug)]
pub(super) struct LocalObject {
    path: PathBuf,
    file: File,
    length_bytes: u64,
}

impl LocalObject {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let (file, length_bytes) = open_regular(path, OpenOptions::new().read(true))?;
        Ok(Self { path: path.to_owned(), file, length_bytes })
    }
}

impl ReadAt for LocalObject {
    fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        let wanted_bytes = buffer.len();
        end_of_read(|| shown(&self.path), offset_bytes, wanted_bytes, self.length_bytes)?;
        match self.file.read_exact_at(buffer, offset_bytes) {
            // The file has shrunk since it was opened.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                let end_bytes = self.file.metadata().map_or(offset_bytes, |metadata| metadata.len());
                Err(past_the_end(shown(&self.path), offset_bytes, wanted_bytes, end_bytes))
            }
            read => read.map_err(Error::store("read", shown(&self.path))),
        }
    }

    fn will_read(&self, range: Range<u64>) {
        if let Some(length_bytes) = NonZeroU64::new(range.end.saturating_sub(range.start)) {
            // Only a hint: a file system that takes none reads just as well.
            let _ = rustix::fs::fadvise(&self.file, range.start, Some(length_bytes), Advice::WillNeed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_shrinks_under_an_open_object_is_corrupt_and_says_where_it_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("object");
        std::fs::write(&path, [1; 100]).unwrap();
        let object = LocalObject::open(&path).unwrap();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(40).unwrap();

        let error = object.read_at(10, &mut [0; 50]).unwrap_err();
        let Error::Corrupt { object, offset_bytes, expected, found, .. } = error else { panic!("{error}") };
        assert_eq!(object, shown(&path));
        assert_eq!(offset_bytes, 10);
        assert_eq!(expected, "50 bytes from there on");
        assert_eq!(found, "the end of the object at byte 40");
    }
}
