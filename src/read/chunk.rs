//! One chunk from a pack to raw bytes that are known to be right, and on to the caller's buffers.

use crate::cast;
use crate::codec::{Decoder, Refusal};
use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::model::{BaseRef, Body, ChunkRef};
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
    decoder: Decoder,
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
            let decoder = &mut self.buffers.decoder;
            source.raw(decoder, chunk.entry, &chunk.reference, chunk.raw_length_bytes, stored)?
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

impl Source<'_> {
    /// Raw bytes of a chunk whose stored bytes are at hand.
    fn raw<'b>(
        &self,
        decoder: &'b mut Decoder,
        entry: usize,
        reference: &ChunkRef,
        raw_length_bytes: u64,
        stored: &'b [u8],
    ) -> Result<&'b [u8]> {
        let read_base =
            |base: &BaseRef, bytes: &mut [u8]| self.packs.get(base.pack)?.1.read_at(base.offset_bytes, bytes);
        decoder.raw(reference, raw_length_bytes, stored, read_base).map_err(|refusal| match refusal {
            Refusal::Unread(error) => error,
            Refusal::Damaged { pack, offset_bytes, expected, found } => {
                let object = self.packs.get(pack).map_or("packs", |(object, _)| object);
                self.corrupt(entry, object, offset_bytes, expected, found)
            }
        })
    }

    fn corrupt(
        &self,
        entry: usize,
        object: &str,
        offset_bytes: u64,
        expected: String,
        found: String,
    ) -> Error {
        let name = self.body.entries.get(entry).map_or("?", |entry| entry.name.as_str());
        Error::corrupt(object, offset_bytes, format!("chunk of `{name}`"), expected, found)
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
        let Self { stored, decoder } = self;
        let (_, object) = source.packs.get(reference.pack)?;
        stored.resize(reference.stored_length_bytes as usize, 0);
        object.read_at(reference.offset_bytes, stored)?;
        source.raw(decoder, entry, reference, raw_length_bytes, stored)
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
        let found = ChunkDigest::of(rounded);
        if found == chunk.reference.digest {
            return Ok(());
        }
        let expected = format!("digest {}", chunk.reference.digest);
        // It lies nowhere by itself.
        Err(source.corrupt(chunk.entry, "packs", 0, expected, format!("digest {found}")))
    }
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
