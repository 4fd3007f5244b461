//! Raw bytes to stored bytes and back, chunk by chunk, without loss (FORMAT.md, "Codecs").
//!
//! An encoder takes the codec that stores least, judged from a sample ([`Effort::Fast`]) or by trying
//! ([`Effort::Max`]). Stored bytes describe themselves: a decoder needs no dtype, only the base chunk where
//! there is one. A decoder never reads or writes out of bounds, and never allocates more than a small
//! multiple of the raw length it was given, whatever the bytes.

mod choose;
mod decoder;
mod estimate;
mod frequencies;
mod input;
mod planes;
mod sparse;
mod stream;
#[cfg(test)]
mod tests;
mod words;
mod zstandard;

use crate::error::{Error, Result};
use crate::format::model::Codec;

use input::Input;

pub use choose::{encode, estimate_self_contained};
pub use decoder::{Decoder, Refusal};

/// How much time an encoder may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Decides from a sample, and codes once.
    Fast,
    /// Tries every codec that may win.
    Max,
}

/// Buffers of one worker, reused from chunk to chunk: once warm, coding allocates nothing.
#[derive(Default)]
pub struct Scratch {
    workspace: Workspace,
    contexts: zstandard::Contexts,
    sample: Vec<u8>,
    base_sample: Vec<u8>,
    candidate: Vec<u8>,
}

/// What the codecs of our own work with.
#[derive(Default)]
struct Workspace {
    coder: stream::Coder,
    /// Planes that are coded or were decoded, one behind the other.
    planes: Vec<u8>,
    changes: sparse::Changes,
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Scratch").finish_non_exhaustive()
    }
}

/// Decodes one chunk into `raw`, which has exactly the chunk's raw length.
///
/// `base` holds the raw bytes of the base chunk, as long as `raw`; [`Codec::Delta`] and [`Codec::Sparse`]
/// need it, the others ignore it. After an error the content of `raw` means nothing. Stored bytes that
/// were damaged may also decode to other raw bytes: only the chunk's digest tells.
///
/// # Errors
/// [`Error::InvalidInput`] where the stored bytes can't be those of a chunk of this length, or the base is
/// missing; the caller knows object and offset and reports them.
pub fn decode(
    codec: Codec,
    stored: &[u8],
    base: Option<&[u8]>,
    raw: &mut [u8],
    scratch: &mut Scratch,
) -> Result<()> {
    let Scratch { workspace, contexts, .. } = scratch;
    match codec {
        Codec::Store if stored.len() == raw.len() => {
            raw.copy_from_slice(stored);
            Ok(())
        }
        Codec::Store => Err(Error::invalid(
            "stored chunk",
            format!("has {} bytes, but the raw chunk has: {}", stored.len(), raw.len()),
        )),
        Codec::Planes => planes::decode(Input::new(stored), None, raw, workspace),
        Codec::Delta => {
            let base = checked_base(base, raw.len())?;
            planes::decode(Input::new(stored), Some(base), raw, workspace)
        }
        Codec::Sparse => {
            let base = checked_base(base, raw.len())?;
            sparse::decode(Input::new(stored), base, raw, workspace)
        }
        Codec::Zstd => contexts.decompress(stored, raw),
        Codec::Rounded => Err(Error::invalid("codec", "`rounded` stores no bytes of its own to decode")),
    }
}

fn checked_base(base: Option<&[u8]>, raw_length_bytes: usize) -> Result<&[u8]> {
    match base {
        Some(base) if base.len() == raw_length_bytes => Ok(base),
        Some(base) => Err(Error::invalid(
            "base chunk",
            format!("has {} bytes, but the raw chunk has: {raw_length_bytes}", base.len()),
        )),
        None => Err(Error::invalid("base chunk", "is missing, and the stored chunk is a difference")),
    }
}
