//! Raw bytes to stored bytes and back, chunk by chunk (FORMAT.md, "Codecs").
//!
//! A decoder never writes past the raw length it was given and never allocates more than in proportion to it.

use crate::error::{Error, Result};
use crate::format::model::Codec;
use crate::tensor::Dtype;

/// How much time coding may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// As fast as memory, nearly.
    Fast,
    /// As small as it gets.
    Max,
}

/// Buffers of one worker that are used again.
#[derive(Debug, Default)]
pub struct Scratch {}

/// Codes one chunk.
pub fn encode(
    _dtype: Dtype,
    _raw: &[u8],
    _base: Option<&[u8]>,
    _effort: Effort,
    _scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> Codec {
    out.clear();
    Codec::Store
}

/// Estimates stored/raw.
pub fn estimate_self_contained(_dtype: Dtype, _raw: &[u8], _scratch: &mut Scratch) -> f64 {
    1.0
}

/// Decodes one chunk into `raw`, which has exactly the chunk's raw length.
///
/// # Errors
/// [`Error::InvalidInput`] where the stored bytes can't be those of a chunk of this length; the caller
/// knows object and offset and reports them.
pub fn decode(
    codec: Codec,
    stored: &[u8],
    _base: Option<&[u8]>,
    raw: &mut [u8],
    _scratch: &mut Scratch,
) -> Result<()> {
    match codec {
        Codec::Store if stored.len() == raw.len() => {
            raw.copy_from_slice(stored);
            Ok(())
        }
        Codec::Store => Err(Error::invalid(
            "stored chunk",
            format!("has {} bytes, but the raw chunk has: {}", stored.len(), raw.len()),
        )),
        _ => Err(Error::Internal { what: "a codec is not built yet".to_owned() }),
    }
}
