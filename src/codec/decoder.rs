//! From the stored bytes of a chunk to raw bytes that are known to be right.

use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::model::{BaseRef, ChunkRef, Codec};

use super::{Scratch, decode};

/// Decodes chunks, with their bases, and compares them with their digests; its memory is used again.
#[derive(Debug, Default)]
pub struct Decoder {
    base_stored: Vec<u8>,
    base_raw: Vec<u8>,
    raw: Vec<u8>,
    scratch: Scratch,
}

/// Why a chunk has no raw bytes.
#[derive(Debug)]
pub enum Refusal {
    /// The stored bytes of its base could not be read.
    Unread(Error),
    /// The stored bytes of the chunk, or of its base, are not those that were written.
    Damaged {
        /// The pack they lie in.
        pack: u32,
        /// Their offset from the pack's first byte.
        offset_bytes: u64,
        /// What was expected.
        expected: String,
        /// What was found instead.
        found: String,
    },
}

impl Decoder {
    /// Raw bytes of a chunk, verified. `read_base` fills a buffer with the stored bytes of the base; it is
    /// called only where there is one.
    ///
    /// # Errors
    /// [`Refusal`]: nothing of the bytes may be used then.
    pub fn raw<'a>(
        &'a mut self,
        chunk: &ChunkRef,
        raw_length_bytes: u64,
        stored: &'a [u8],
        read_base: impl FnOnce(&BaseRef, &mut [u8]) -> Result<()>,
    ) -> std::result::Result<&'a [u8], Refusal> {
        if chunk.codec == Codec::Store {
            return verify(chunk, raw_length_bytes, stored);
        }
        let Self { base_stored, base_raw, raw, scratch } = self;
        let base = match chunk.base {
            None => None,
            Some(base) => {
                base_stored.resize(base.stored_length_bytes as usize, 0);
                read_base(&base, base_stored).map_err(Refusal::Unread)?;
                let base = ChunkRef::from(base);
                let bytes = if base.codec == Codec::Store {
                    base_stored.as_slice()
                } else {
                    base_raw.resize(raw_length_bytes as usize, 0);
                    decode(base.codec, base_stored, None, base_raw, scratch)
                        .map_err(|error| undecodable(&base, &error))?;
                    base_raw.as_slice()
                };
                Some((base, bytes))
            }
        };
        raw.resize(raw_length_bytes as usize, 0);
        let decoded = decode(chunk.codec, stored, base.map(|(_, bytes)| bytes), raw, scratch)
            .map_err(|error| undecodable(chunk, &error));
        let verified = decoded.and_then(|()| verify(chunk, raw_length_bytes, raw));
        if verified.is_err()
            && let Some((base, bytes)) = base
        {
            // Which of the two is damaged? The base has a digest of its own.
            verify(&base, raw_length_bytes, bytes)?;
        }
        verified
    }
}

/// Compares raw bytes with the digest of their chunk.
fn verify<'a>(
    chunk: &ChunkRef,
    raw_length_bytes: u64,
    raw: &'a [u8],
) -> std::result::Result<&'a [u8], Refusal> {
    let found = ChunkDigest::of(raw);
    if found == chunk.digest && raw.len() as u64 == raw_length_bytes {
        return Ok(raw);
    }
    let (expected, found) = (format!("digest {}", chunk.digest), format!("digest {found}"));
    Err(damaged(chunk, expected, found))
}

fn undecodable(chunk: &ChunkRef, error: &Error) -> Refusal {
    let expected = format!("bytes of codec {}", chunk.codec.number());
    damaged(chunk, expected, error.chain())
}

fn damaged(chunk: &ChunkRef, expected: String, found: String) -> Refusal {
    Refusal::Damaged { pack: chunk.pack, offset_bytes: chunk.offset_bytes, expected, found }
}
