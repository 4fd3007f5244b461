//! The first line of a manifest, read without the rest.

use crate::error::{Error, Result};
use crate::format::model::Header;
use crate::format::{manifest, names};
use crate::store::{Folder, Key, Store};

/// Bytes of a manifest that are read to get its header; enough for nearly all.
const HEADER_READ_BYTES: u64 = 16 * 1024;

/// Reads the first line of a manifest.
pub(super) fn read_header(store: &dyn Store, seq: u64) -> Result<Header> {
    let key = Key::new(Folder::Snapshots, &names::manifest_name(seq))?;
    let object = store.open(&key)?;
    let mut length = HEADER_READ_BYTES.min(object.length_bytes());
    loop {
        let mut prefix = vec![0; length as usize];
        object.read_at(0, &mut prefix)?;
        if let Some(line) = manifest::decode_header(&key.to_string(), &prefix)? {
            check_seq(&key, seq, &line.header)?;
            return Ok(line.header);
        }
        if length == object.length_bytes() {
            return Err(Error::corrupt(
                key.to_string(),
                length,
                "header line",
                "a line end",
                "the end of the object",
            ));
        }
        length = (length * 8).min(object.length_bytes());
    }
}

/// A manifest that lies under another number than its own was copied or renamed.
pub(super) fn check_seq(key: &Key, seq: u64, header: &Header) -> Result<()> {
    if header.seq == seq {
        return Ok(());
    }
    Err(Error::corrupt(key.to_string(), 0, "seq", seq, header.seq))
}
