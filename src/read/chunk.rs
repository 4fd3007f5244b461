//! One chunk from a pack to raw bytes that are known to be right, and on to the caller's buffers.

use crate::cast;
use crate::codec::{self, Scratch};
use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::model::{Body, ChunkRef, Codec};
use crate::kernel;
use crate::plan::{Piece, ReadChunk, RoundedFrom};

use super::OpenPacks;

/// Buffers of one thread that reads: they grow to its longest read and stay.
#[derive(Debug, Default)]
pub struct Worker {
    /// Stored bytes of a group.
    pub(super) group: Vec<u8>,
    buffers: ChunkBuffers,
    rounded: Vec<u8>,
}

/// Buffers between the stored and the raw bytes of one chunk.
#[derive(Debug, Default)]
struct ChunkBuffers {
    stored: Vec<u8>,
    base_stored: Vec<u8>,
    base_raw: Vec<u8>,
    raw: Vec<u8>,
    scratch: Scratch,
}

/// Packs to read from, and the body whose pack table counts them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source<'a> {
    pub(super) packs: &'a OpenPacks,
    pub(super) body: &'a Body,
}

impl Worker {
    /// Fills the slices of a chunk's pieces; `range` is where its stored bytes lie in `group`.
    pub(super) fn fill(
        &mut self,
        source: Source<'_>,
        chunk: &ReadChunk,
        range: std::ops::Range<usize>,
        slices: Vec<&mut [u8]>,
    ) -> Result<()> {
        let raw = if let Some(rounded_from) = &chunk.rounded_from {
            self.buffers.round(source, chunk, rounded_from, &mut self.rounded)?;
            self.rounded.as_slice()
        } else {
            let stored = self
                .group
                .get(range)
                .ok_or_else(|| Error::Internal { what: "a chunk lies outside of its read".to_owned() })?;
            self.buffers.raw_of(source, chunk.entry, &chunk.reference, chunk.raw_length_bytes, stored)?
        };
        for (piece, slice) in chunk.pieces.iter().zip(slices) {
            scatter(piece, raw, slice)?;
        }
        Ok(())
    }

    /// Reads and verifies one chunk without keeping its bytes.
    ///
    /// # Errors
    /// [`Error::Corrupt`] or [`Error::Store`], as [`super::run`].
    pub fn check(&mut self, packs: &OpenPacks, body: &Body, chunk: &ReadChunk) -> Result<()> {
        let source = Source { packs, body };
        match &chunk.rounded_from {
            Some(rounded_from) => self.buffers.round(source, chunk, rounded_from, &mut self.rounded),
            None => {
                self.buffers.read(source, chunk.entry, &chunk.reference, chunk.raw_length_bytes).map(|_| ())
            }
        }
    }
}

impl ChunkBuffers {
    /// Raw bytes of a chunk that is read by itself.
    fn read(
        &mut self,
        source: Source<'_>,
        entry: usize,
        reference: &ChunkRef,
        raw_length_bytes: u64,
    ) -> Result<&[u8]> {
        let mut stored = std::mem::take(&mut self.stored);
        let read = read_stored(source, reference, &mut stored)
            .and_then(|()| self.decode(source, entry, reference, raw_length_bytes, &stored));
        self.stored = stored;
        read?;
        let raw = if reference.codec == Codec::Store { &self.stored } else { &self.raw };
        Ok(raw)
    }

    /// Raw bytes of a chunk whose stored bytes are at hand.
    fn raw_of<'a>(
        &'a mut self,
        source: Source<'_>,
        entry: usize,
        reference: &ChunkRef,
        raw_length_bytes: u64,
        stored: &'a [u8],
    ) -> Result<&'a [u8]> {
        self.decode(source, entry, reference, raw_length_bytes, stored)?;
        Ok(if reference.codec == Codec::Store { stored } else { &self.raw })
    }

    /// Decodes into `raw`, unless the stored bytes are the raw ones, and verifies.
    fn decode(
        &mut self,
        source: Source<'_>,
        entry: usize,
        reference: &ChunkRef,
        raw_length_bytes: u64,
        stored: &[u8],
    ) -> Result<()> {
        if reference.codec == Codec::Store {
            return verify(source, entry, reference, raw_length_bytes, stored);
        }
        if let Some(base) = reference.base {
            let base = ChunkRef::from(base);
            let Self { base_stored, base_raw, scratch, .. } = self;
            read_stored(source, &base, base_stored)?;
            base_raw.resize(raw_length_bytes as usize, 0);
            codec::decode(base.codec, base_stored, None, base_raw, scratch)
                .map_err(|error| damaged(source, entry, &base, &error))?;
        }
        self.raw.resize(raw_length_bytes as usize, 0);
        let base_raw = reference.base.map(|_| self.base_raw.as_slice());
        let decoded = codec::decode(reference.codec, stored, base_raw, &mut self.raw, &mut self.scratch)
            .map_err(|error| damaged(source, entry, reference, &error))
            .and_then(|()| verify(source, entry, reference, raw_length_bytes, &self.raw));
        if decoded.is_err()
            && let Some(base) = reference.base
        {
            // Which of the two is damaged? The base has a digest of its own.
            verify(source, entry, &base.into(), raw_length_bytes, &self.base_raw)?;
        }
        decoded
    }

    /// Computes a rounded chunk from those it was rounded from, and verifies it.
    fn round(
        &mut self,
        source: Source<'_>,
        chunk: &ReadChunk,
        rounded_from: &RoundedFrom,
        rounded: &mut Vec<u8>,
    ) -> Result<()> {
        let RoundedFrom { entry, source_dtype, dtype, chunks } = rounded_from;
        rounded.resize(chunk.raw_length_bytes as usize, 0);
        let mut rest = rounded.as_mut_slice();
        for (reference, raw_length_bytes) in chunks {
            let wide = self.read(source, *entry, reference, *raw_length_bytes)?;
            let length = wide.len() as u64 / source_dtype.size_bytes() * dtype.size_bytes();
            let (target, after) = rest.split_at_mut_checked(length as usize).ok_or_else(|| {
                Error::Internal { what: "a rounded chunk is shorter than what it is rounded from".to_owned() }
            })?;
            cast::narrow(*source_dtype, *dtype, 0, wide, target)?;
            rest = after;
        }
        verify(source, chunk.entry, &chunk.reference, chunk.raw_length_bytes, rounded)
    }
}

fn read_stored(source: Source<'_>, reference: &ChunkRef, stored: &mut Vec<u8>) -> Result<()> {
    let (_, object) = source.packs.get(reference.pack)?;
    stored.resize(reference.stored_length_bytes as usize, 0);
    object.read_at(reference.offset_bytes, stored)
}

/// Compares a chunk's raw bytes with its digest.
fn verify(
    source: Source<'_>,
    entry: usize,
    reference: &ChunkRef,
    raw_length_bytes: u64,
    raw: &[u8],
) -> Result<()> {
    let found = ChunkDigest::of(raw);
    if found == reference.digest && raw.len() as u64 == raw_length_bytes {
        return Ok(());
    }
    Err(corrupt(source, entry, reference, format!("digest {}", reference.digest), format!("digest {found}")))
}

fn damaged(source: Source<'_>, entry: usize, reference: &ChunkRef, error: &Error) -> Error {
    corrupt(source, entry, reference, format!("bytes of codec {}", reference.codec.number()), error.chain())
}

fn corrupt(source: Source<'_>, entry: usize, reference: &ChunkRef, expected: String, found: String) -> Error {
    let name = source.body.entries.get(entry).map_or("?", |entry| entry.name.as_str());
    let object = match source.packs.get(reference.pack) {
        Ok((object, _)) if reference.codec != Codec::Rounded => object,
        _ => "packs",
    };
    Error::corrupt(object, reference.offset_bytes, format!("chunk of `{name}`"), expected, found)
}

fn scatter(piece: &Piece, raw: &[u8], slice: &mut [u8]) -> Result<()> {
    let start = piece.chunk_offset_bytes as usize;
    let raw = &raw[start..start + piece.length_bytes as usize];
    match piece.cast {
        None => kernel::copy(slice, raw),
        Some(cast) => cast::widen(cast.stored_dtype, cast.dtype, cast.scale_log2, raw, slice)?,
    }
    Ok(())
}
