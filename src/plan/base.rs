//! What a save need not write: chunks that the base, or the save itself, holds already.

use std::collections::{HashMap, HashSet};

use crate::digest::ChunkDigest;
use crate::format::model::{BaseRef, Body, ChunkRef, Codec, Entry, PackRecord, Shard, find_entry};
use crate::format::names;
use crate::tensor::{Dtype, Region, raw_length_bytes};

use super::chunk_ranges;

/// A pack of the base is referred to only where at least one part in so many of it is.
const LIVE_SHARE: u64 = 16;

/// The chunks of one snapshot, which a save may refer to instead of writing them again.
#[derive(Debug)]
pub struct Base {
    /// Snapshot it was built from.
    pub seq: u64,
    /// Packs of that snapshot.
    pub packs: Vec<PackRecord>,
    /// True once every chunk was read and verified, or written, by this process. An untrusted chunk is
    /// verified before a save refers to it: else one rotten chunk would spread through new snapshots.
    pub trusted: bool,
    chunk_bytes: u64,
    entries: Vec<Entry>,
    chunks: HashMap<(ChunkDigest, u64), ChunkRef>,
    /// For each pack, whether it was written by the save of this very snapshot.
    own_packs: Vec<bool>,
}

impl Base {
    /// Indexes the chunks of a snapshot.
    #[must_use]
    pub fn new(seq: u64, body: Body, trusted: bool) -> Self {
        let Body { chunk_bytes, packs, entries, .. } = body;
        let mut chunks = HashMap::new();
        for entry in &entries {
            for shard in &entry.shards {
                let length_bytes = raw_length_bytes(&shard.lengths, entry.stored_dtype).unwrap_or(0);
                for (range, chunk) in chunk_ranges(length_bytes, chunk_bytes).zip(&shard.chunks) {
                    let raw_length_bytes = range.end - range.start;
                    if chunk.codec != Codec::Rounded {
                        chunks.entry((chunk.digest, raw_length_bytes)).or_insert(*chunk);
                    }
                    // A value may come back to what it was.
                    if let Some(base) = chunk.base {
                        chunks.entry((base.digest, raw_length_bytes)).or_insert(base.into());
                    }
                }
            }
        }
        let own_packs = packs
            .iter()
            .map(|pack| names::parse_pack_name(&pack.name).is_some_and(|name| name.seq == seq))
            .collect();
        Self { seq, packs, trusted, chunk_bytes, entries, chunks, own_packs }
    }

    /// The chunk with these raw bytes, if the base has it; `pack` indexes [`Base::packs`].
    #[must_use]
    pub fn find(&self, digest: ChunkDigest, raw_length_bytes: u64) -> Option<ChunkRef> {
        self.chunks.get(&(digest, raw_length_bytes)).copied()
    }

    /// The entry of this name and rank.
    #[must_use]
    pub fn entry(&self, name: &str, rank: Option<u32>) -> Option<&Entry> {
        find_entry(&self.entries, name, rank).and_then(|index| self.entries.get(index))
    }

    /// The shard of an entry that holds this region in elements of this dtype, cut as a save with
    /// `chunk_bytes` cuts it.
    #[must_use]
    pub fn shard(
        &self,
        (name, rank): (&str, Option<u32>),
        region: &Region,
        stored_dtype: Dtype,
        chunk_bytes: u64,
    ) -> Option<&Shard> {
        let entry = self.entry(name, rank).filter(|entry| entry.stored_dtype == stored_dtype)?;
        entry.shards.iter().find(|shard| {
            self.chunk_bytes == chunk_bytes
                && shard.offsets == region.offsets
                && shard.lengths == region.lengths
        })
    }

    /// As [`Base::shard`], where the base has no other shard of the entry: its statistics are the entry's.
    #[must_use]
    pub fn sole_shard(
        &self,
        key: (&str, Option<u32>),
        region: &Region,
        stored_dtype: Dtype,
        chunk_bytes: u64,
    ) -> Option<&Shard> {
        let is_sole = self.entry(key.0, key.1).is_some_and(|entry| entry.shards.len() == 1);
        self.shard(key, region, stored_dtype, chunk_bytes).filter(|_| is_sole)
    }

    /// True where every chunk of a shard was in an older pack already when the base was saved.
    #[must_use]
    pub fn did_not_change(&self, shard: &Shard) -> bool {
        shard.chunks.iter().all(|chunk| {
            chunk.codec != Codec::Rounded
                && self.own_packs.get(chunk.pack as usize).is_some_and(|is_own| !is_own)
        })
    }

    /// Packs that are worth referring to, given chunks of the base and how many stored bytes each stands
    /// for.
    ///
    /// A pack stays on disk as long as one of its chunks is referred to. Where a save would use less than
    /// one part in [`LIVE_SHARE`] of a pack, writing those few bytes again is cheaper than keeping it.
    #[must_use]
    pub fn packs_worth_keeping(&self, used: impl Iterator<Item = ChunkRef>, always: bool) -> HashSet<u32> {
        let mut live: HashMap<u32, u64> = HashMap::new();
        let mut seen = HashSet::new();
        for chunk in used {
            for part in std::iter::once(chunk).chain(chunk.base.map(ChunkRef::from)) {
                if seen.insert((part.pack, part.offset_bytes)) {
                    let bytes = live.entry(part.pack).or_insert(0);
                    *bytes = bytes.saturating_add(part.stored_length_bytes);
                }
            }
        }
        live.into_iter()
            .filter(|(pack, bytes)| {
                let length = self.packs.get(*pack as usize).map_or(u64::MAX, |record| record.length_bytes);
                always || bytes.saturating_mul(LIVE_SHARE) >= length
            })
            .map(|(pack, _)| pack)
            .collect()
    }
}

/// What a difference to this chunk, or to the one it is a difference to itself, would be taken against.
#[must_use]
pub fn delta_base(chunk: &ChunkRef) -> Option<BaseRef> {
    chunk.base.or_else(|| chunk.as_base())
}

/// Counts what a save refers to, and builds the pack table of the part.
///
/// Index 0 of the table is the pack being written; packs of the base follow as they are first used.
#[derive(Debug)]
pub struct Reuse<'a> {
    base: Option<&'a Base>,
    written: HashMap<(ChunkDigest, u64), ChunkRef>,
    packs: Vec<PackRecord>,
    base_indices: HashMap<u32, u32>,
    reused_count: u64,
}

impl<'a> Reuse<'a> {
    /// Starts with the pack that is being written.
    #[must_use]
    pub fn new(own_pack: &str, base: Option<&'a Base>) -> Self {
        Self {
            base,
            written: HashMap::new(),
            packs: vec![PackRecord { name: own_pack.to_owned(), length_bytes: 0 }],
            base_indices: HashMap::new(),
            reused_count: 0,
        }
    }

    /// The chunk of the pack being written that has the same bytes, to be referred to instead.
    pub fn twin(&mut self, digest: ChunkDigest, raw_length_bytes: u64) -> Option<ChunkRef> {
        let twin = self.written.get(&(digest, raw_length_bytes)).copied();
        self.reused_count += u64::from(twin.is_some());
        twin
    }

    /// A chunk of the base, as the part refers to it.
    pub fn refer(&mut self, mut reference: ChunkRef) -> ChunkRef {
        reference.pack = self.own_index(reference.pack);
        reference.base = reference.base.map(|base| BaseRef { pack: self.own_index(base.pack), ..base });
        self.reused_count += 1;
        reference
    }

    /// Notes a chunk that was appended to the pack being written; a base of it is one of [`Base`].
    pub fn note_written(&mut self, raw_length_bytes: u64, mut written: ChunkRef) -> ChunkRef {
        written.pack = 0;
        written.base = written.base.map(|base| BaseRef { pack: self.own_index(base.pack), ..base });
        self.written.insert((written.digest, raw_length_bytes), written);
        written
    }

    /// The pack table of the part, and how many chunks were not written again.
    #[must_use]
    pub fn finish(self) -> (Vec<PackRecord>, u64) {
        (self.packs, self.reused_count)
    }

    /// Index in the part's table of a pack of the base.
    fn own_index(&mut self, base_pack: u32) -> u32 {
        let Some(record) = self.base.and_then(|base| base.packs.get(base_pack as usize)) else {
            // No table is that long: the part would be refused before it is written.
            return u32::MAX;
        };
        let packs = &mut self.packs;
        *self.base_indices.entry(base_pack).or_insert_with(|| {
            packs.push(record.clone());
            (packs.len() - 1) as u32
        })
    }
}
