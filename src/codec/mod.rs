//! Raw bytes to stored bytes and back, chunk by chunk (FORMAT.md, "Codecs").
//!
//! A decoder never writes past the raw length it was given and never allocates.

use crate::error::{Error, Result};
use crate::format::model::Codec;

/// Decodes one chunk into `raw`, which has exactly the chunk's raw length.
///
/// # Errors
/// [`Error::InvalidInput`] where the stored bytes can't be those of a chunk of this length; the caller
/// knows object and offset and reports them.
pub fn decode(codec: Codec, stored: &[u8], raw: &mut [u8]) -> Result<()> {
    match codec {
        Codec::Store if stored.len() == raw.len() => {
            raw.copy_from_slice(stored);
            Ok(())
        }
        Codec::Store => Err(Error::invalid(
            "stored chunk",
            format!("has {} bytes, but the raw chunk has: {}", stored.len(), raw.len()),
        )),
    }
}
