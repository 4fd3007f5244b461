//! Which bytes of which packs a load needs, and where each verified byte goes.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::format::model::{Body, ChunkRef, Codec, Entry, Shard, find_entry};
use crate::region;
use crate::tensor::{Dtype, Region, raw_length_bytes};

use super::chunk_ranges;

/// How chunks are joined to reads: by what one read costs where the packs lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadShape {
    /// Longest read that is joined of several chunks.
    pub join_bytes: u64,
    /// Unwanted bytes that a read may carry between two wanted ranges.
    pub gap_bytes: u64,
    /// Unwanted bytes that all reads of a plan may carry together: one of so many wanted ones, and
    /// [`ReadShape::SPARE_BYTES`]. `None` for any number.
    pub waste_share: Option<u64>,
    /// Reads that are announced before they are asked for.
    pub ahead_count: usize,
    /// Whether reads are announced from the start, and not only once the medium has shown to be slow.
    pub is_slow: bool,
}

impl ReadShape {
    /// Unwanted bytes that are nothing beside what a snapshot's manifest takes.
    const SPARE_BYTES: u64 = 256 << 10;

    /// Packs in files: a read costs microseconds.
    pub const FILE: Self =
        Self { join_bytes: 1 << 20, gap_bytes: 16 << 10, waste_share: None, ahead_count: 16, is_slow: false };

    /// Packs across a network: a read costs tens of milliseconds, and bytes cost money.
    pub const NETWORK: Self = Self {
        join_bytes: 8 << 20,
        gap_bytes: 64 << 10,
        waste_share: Some(20),
        ahead_count: 8,
        is_slow: true,
    };
}

/// A region of an entry that a load wants in one of the caller's buffers.
#[derive(Clone, Debug)]
pub struct Want {
    /// Index into the body's entries.
    pub entry: usize,
    /// The region, in elements.
    pub region: Region,
    /// Index of the buffer, which holds exactly this region in row-major order, in the entry's dtype.
    pub target: usize,
}

/// Which bytes to read, and where each verified byte goes.
#[derive(Debug)]
pub struct ReadPlan {
    /// Reads in order of pack and offset.
    pub groups: Vec<ReadGroup>,
    /// Number of pieces of all chunks.
    pub piece_count: usize,
    /// What the reads were joined by.
    pub shape: ReadShape,
}

/// One read: consecutive bytes of a pack that hold one chunk or several, or one rounded chunk.
#[derive(Debug)]
pub struct ReadGroup {
    /// Index into the body's packs.
    pub pack: u32,
    /// Bytes to read, from the pack's first byte. Empty for a rounded chunk, which lies nowhere.
    pub range: Range<u64>,
    /// Chunks inside the range, by offset.
    pub chunks: Vec<ReadChunk>,
}

/// A chunk to read, verify and scatter.
#[derive(Debug)]
pub struct ReadChunk {
    /// Where it lies.
    pub reference: ChunkRef,
    /// Length of its raw bytes.
    pub raw_length_bytes: u64,
    /// Index of an entry that has it, for messages.
    pub entry: usize,
    /// What it is computed from, for codec [`Codec::Rounded`].
    pub rounded_from: Option<RoundedFrom>,
    /// Where its raw bytes go.
    pub pieces: Vec<Piece>,
}

/// The chunks of a wider float whose values, rounded, are the raw bytes of a chunk.
#[derive(Clone, Debug)]
pub struct RoundedFrom {
    /// Index of the entry they belong to.
    pub entry: usize,
    /// Element type of their raw bytes.
    pub source_dtype: Dtype,
    /// Element type of the rounded chunk.
    pub dtype: Dtype,
    /// Consecutive chunks, each with the length of its raw bytes.
    pub chunks: Vec<(ChunkRef, u64)>,
}

/// How stored elements become those of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CastBack {
    /// Element type of the raw bytes.
    pub stored_dtype: Dtype,
    /// Element type of the target.
    pub dtype: Dtype,
    /// Power of two that the stored values are multiplied by.
    pub scale_log2: i32,
}

/// Consecutive raw bytes of a chunk and their place in a target.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Number of this piece among all of the plan.
    pub id: usize,
    /// Offset in the chunk's raw bytes.
    pub chunk_offset_bytes: u64,
    /// Raw bytes of the piece, never 0.
    pub length_bytes: u64,
    /// Index of the target buffer.
    pub target: usize,
    /// Offset in the target buffer.
    pub target_offset_bytes: u64,
    /// Bytes of the piece in the target.
    pub target_length_bytes: u64,
    /// What happens to its elements; `None` where they are copied.
    pub cast: Option<CastBack>,
}

impl ReadPlan {
    /// Indices of all packs that the plan reads from.
    #[must_use]
    pub fn packs(&self) -> BTreeSet<u32> {
        self.groups.iter().flat_map(|group| &group.chunks).flat_map(ReadChunk::packs).collect()
    }
}

impl ReadChunk {
    /// Indices of the packs that this chunk needs.
    #[must_use]
    pub fn packs(&self) -> Vec<u32> {
        let of =
            |chunk: &ChunkRef| [Some(chunk.pack), chunk.base.map(|base| base.pack)].into_iter().flatten();
        match &self.rounded_from {
            Some(source) => source.chunks.iter().flat_map(|(chunk, _)| of(chunk)).collect(),
            None => of(&self.reference).collect(),
        }
    }
}

/// Plans the reads that fill all wanted regions of a validated body.
///
/// Each needed chunk is read once, however many targets want it; chunks that none wants are not read.
#[must_use]
pub fn plan_read(body: &Body, wants: &[Want], shape: ReadShape) -> ReadPlan {
    let mut planner = Planner { body, chunks: Vec::new(), piece_count: 0 };
    for want in wants {
        for shard in &body.entries[want.entry].shards {
            planner.add_shard(want, shard);
        }
    }
    let groups = group(merge_equal(planner.chunks), shape);
    ReadPlan { groups, piece_count: planner.piece_count, shape }
}

struct Planner<'a> {
    body: &'a Body,
    chunks: Vec<ReadChunk>,
    piece_count: usize,
}

impl Planner<'_> {
    fn add_shard(&mut self, want: &Want, shard: &Shard) {
        let body = self.body;
        let entry = &body.entries[want.entry];
        let shard_region = Region { offsets: shard.offsets.clone(), lengths: shard.lengths.clone() };
        let element_bytes = entry.stored_dtype.size_bytes();
        let length_bytes = raw_length_bytes(&shard.lengths, entry.stored_dtype).unwrap_or(0);
        let cast = (entry.stored_dtype != entry.dtype).then_some(CastBack {
            stored_dtype: entry.stored_dtype,
            dtype: entry.dtype,
            scale_log2: shard.scale_log2,
        });
        let in_target = |bytes: u64| bytes / element_bytes * entry.dtype.size_bytes();
        for run in region::runs(&shard_region, &want.region, element_bytes) {
            let mut done = 0;
            while done < run.length_bytes {
                let source = run.source_offset_bytes + done;
                let index = source / body.chunk_bytes;
                let chunk_start = index * body.chunk_bytes;
                let chunk_end = (chunk_start + body.chunk_bytes).min(length_bytes);
                let length = (chunk_end - source).min(run.length_bytes - done);
                let piece = Piece {
                    id: self.piece_count,
                    chunk_offset_bytes: source - chunk_start,
                    length_bytes: length,
                    target: want.target,
                    target_offset_bytes: in_target(run.target_offset_bytes + done),
                    target_length_bytes: in_target(length),
                    cast,
                };
                self.piece_count += 1;
                done += length;
                self.add_piece(want.entry, shard, index, chunk_end - chunk_start, piece);
            }
        }
    }

    fn add_piece(&mut self, entry: usize, shard: &Shard, index: u64, raw_length_bytes: u64, piece: Piece) {
        let reference = shard.chunks[index as usize];
        match self.chunks.last_mut() {
            Some(last) if last.reference == reference && last.entry == entry => last.pieces.push(piece),
            _ => self.chunks.push(ReadChunk {
                reference,
                raw_length_bytes,
                entry,
                rounded_from: (reference.codec == Codec::Rounded)
                    .then(|| rounded_from(self.body, &self.body.entries[entry], shard, index))
                    .flatten(),
                pieces: vec![piece],
            }),
        }
    }
}

/// The chunks that a rounded one is computed from; a validated body has them.
fn rounded_from(body: &Body, entry: &Entry, shard: &Shard, index: u64) -> Option<RoundedFrom> {
    let found = find_entry(&body.entries, entry.rounded_from.as_deref()?, entry.rank)?;
    let source = &body.entries[found];
    let source_shard = source.shard_at(&shard.offsets)?;
    // A source element has more bytes, so its chunks are cut at least as often.
    let ratio = source.stored_dtype.size_bytes() / entry.stored_dtype.size_bytes();
    let length_bytes = raw_length_bytes(&source_shard.lengths, source.stored_dtype)?;
    let chunks = chunk_ranges(length_bytes, body.chunk_bytes)
        .zip(&source_shard.chunks)
        .skip((index * ratio) as usize)
        .take(ratio as usize)
        .map(|(range, chunk)| (*chunk, range.end - range.start))
        .collect();
    Some(RoundedFrom { entry: found, source_dtype: source.stored_dtype, dtype: entry.stored_dtype, chunks })
}

/// Sorts chunks by place and merges the pieces of equal ones. A rounded chunk has the place of the first
/// that it is computed from, so that both are read at about the same time.
fn merge_equal(mut chunks: Vec<ReadChunk>) -> Vec<ReadChunk> {
    chunks.sort_by_key(|chunk| {
        let first = chunk.rounded_from.as_ref().and_then(|source| source.chunks.first());
        let place = first.map_or(chunk.reference, |(first, _)| *first);
        (place.pack, place.offset_bytes, chunk.rounded_from.is_some())
    });
    let mut merged: Vec<ReadChunk> = Vec::with_capacity(chunks.len());
    for chunk in chunks {
        match merged.last_mut() {
            Some(last)
                if last.reference == chunk.reference && last.raw_length_bytes == chunk.raw_length_bytes =>
            {
                last.pieces.extend(chunk.pieces);
            }
            _ => merged.push(chunk),
        }
    }
    merged
}

/// Joins chunks that lie close together into one read.
fn group(chunks: Vec<ReadChunk>, shape: ReadShape) -> Vec<ReadGroup> {
    let wanted_bytes: u64 = chunks.iter().map(|chunk| chunk.reference.stored_length_bytes).sum();
    let mut waste_bytes =
        shape.waste_share.map_or(u64::MAX, |share| wanted_bytes / share + ReadShape::SPARE_BYTES);
    let mut groups: Vec<ReadGroup> = Vec::new();
    // Rounded chunks stand in between and don't end a group.
    let mut open: Option<usize> = None;
    for chunk in chunks {
        if let Some(source) = &chunk.rounded_from {
            let pack = source.chunks.first().map_or(0, |(first, _)| first.pack);
            groups.push(ReadGroup { pack, range: 0..0, chunks: vec![chunk] });
            continue;
        }
        let start = chunk.reference.offset_bytes;
        let end = start + chunk.reference.stored_length_bytes;
        match open.and_then(|index| groups.get_mut(index)) {
            Some(last)
                if last.pack == chunk.reference.pack
                    && start.saturating_sub(last.range.end) <= shape.gap_bytes.min(waste_bytes)
                    && end.max(last.range.end) - last.range.start <= shape.join_bytes =>
            {
                waste_bytes -= start.saturating_sub(last.range.end);
                last.range.end = last.range.end.max(end);
                last.chunks.push(chunk);
            }
            _ => {
                open = Some(groups.len());
                groups.push(ReadGroup { pack: chunk.reference.pack, range: start..end, chunks: vec![chunk] });
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::ChunkDigest;

    /// Stored chunks at these places of one pack.
    fn chunks(places: &[(u64, u64)]) -> Vec<ReadChunk> {
        let chunk = |&(offset_bytes, stored_length_bytes): &(u64, u64)| ReadChunk {
            reference: ChunkRef {
                pack: 0,
                offset_bytes,
                stored_length_bytes,
                codec: Codec::Store,
                digest: ChunkDigest(u128::from(offset_bytes)),
                base: None,
            },
            raw_length_bytes: stored_length_bytes,
            entry: 0,
            rounded_from: None,
            pieces: Vec::new(),
        };
        places.iter().map(chunk).collect()
    }

    fn ranges(places: &[(u64, u64)], shape: ReadShape) -> Vec<Range<u64>> {
        group(chunks(places), shape).into_iter().map(|group| group.range).collect()
    }

    #[test]
    fn a_network_gets_longer_reads_than_a_file() {
        let mebibyte = 1 << 20;
        let places: Vec<(u64, u64)> = (0..20).map(|index| (index * mebibyte, mebibyte)).collect();
        assert_eq!(ranges(&places, ReadShape::FILE).len(), 20);
        assert_eq!(
            ranges(&places, ReadShape::NETWORK),
            [0..8 * mebibyte, 8 * mebibyte..16 * mebibyte, 16 * mebibyte..20 * mebibyte]
        );
    }

    #[test]
    fn over_a_network_unwanted_bytes_are_read_only_as_far_as_the_plan_can_spare_them() {
        // A kilobyte every 33: a file's reads carry nothing that far apart, a network's some of it.
        let places: Vec<(u64, u64)> = (0..100).map(|index| (index * 33 * 1024, 1024)).collect();
        assert_eq!(ranges(&places, ReadShape::FILE).len(), 100);
        let joined = ranges(&places, ReadShape::NETWORK);
        let moved_bytes: u64 = joined.iter().map(|range| range.end - range.start).sum();
        let wanted_bytes = 100 * 1024;
        let spare_bytes = wanted_bytes / 20 + ReadShape::SPARE_BYTES;
        // The spare bytes are used up to the last gap that fits.
        assert_eq!(moved_bytes - wanted_bytes, spare_bytes / (32 * 1024) * (32 * 1024));
        assert_eq!(joined.len() as u64, 100 - spare_bytes / (32 * 1024));
    }

    #[test]
    fn a_gap_that_is_too_long_ends_a_read() {
        let gap_bytes = ReadShape::NETWORK.gap_bytes;
        let apart = |gap: u64| ranges(&[(0, 100), (100 + gap, 100)], ReadShape::NETWORK).len();
        assert_eq!([apart(gap_bytes), apart(gap_bytes + 1)], [1, 2]);
    }
}
