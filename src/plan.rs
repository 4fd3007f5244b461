//! What to write and what to read, decided from structs alone: no bytes are touched here.
//!
//! Three decisions: which chunks of a save the base already holds ([`Base`]), which byte ranges of which
//! packs a load needs ([`plan_read`]), and which manifest the parts of all ranks make ([`assemble`]).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::model::{Body, ChunkRef, Codec, Entry, Header, Manifest, PackRecord, Part};
use crate::format::state_digest::state_digest;
use crate::format::{limits, manifest, names};
use crate::region;
use crate::tensor::{Region, raw_length_bytes};

/// Reads of at most this many bytes are merged when they lie close together in a pack.
const COALESCE_BYTES: u64 = 1 << 20;
/// Unwanted bytes that a merged read may carry between two wanted ranges.
const COALESCE_GAP_BYTES: u64 = 16 * 1024;

/// A pack of the base is referred to only where at least one part in so many of it is.
const LIVE_SHARE: u64 = 16;

/// Cuts `length_bytes` raw bytes into chunks of `chunk_bytes`; only the last may be shorter.
pub fn chunk_ranges(length_bytes: u64, chunk_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..length_bytes.div_ceil(chunk_bytes)).map(move |index| {
        let start = index * chunk_bytes;
        start..(start + chunk_bytes).min(length_bytes)
    })
}

/// The chunks of one snapshot by content, which a save may refer to instead of writing them again.
#[derive(Debug)]
pub struct Base {
    /// Snapshot it was built from.
    pub seq: u64,
    /// Packs of that snapshot.
    pub packs: Vec<PackRecord>,
    /// True once every chunk was read and verified, or written, by this process. An untrusted chunk is
    /// verified before a save refers to it: else one rotten chunk would spread through new snapshots.
    pub trusted: bool,
    chunks: HashMap<(ChunkDigest, u64), ChunkRef>,
}

impl Base {
    /// Indexes the chunks of a snapshot.
    #[must_use]
    pub fn new(seq: u64, body: &Body, trusted: bool) -> Self {
        let mut chunks = HashMap::new();
        for entry in &body.entries {
            for shard in &entry.shards {
                let length_bytes = raw_length_bytes(&shard.lengths, entry.stored_dtype).unwrap_or(0);
                for (range, chunk) in chunk_ranges(length_bytes, body.chunk_bytes).zip(&shard.chunks) {
                    chunks.entry((chunk.digest, range.end - range.start)).or_insert(*chunk);
                }
            }
        }
        Self { seq, packs: body.packs.clone(), trusted, chunks }
    }

    /// The chunk with these raw bytes, if the base has it; `pack` indexes [`Base::packs`].
    #[must_use]
    pub fn find(&self, digest: ChunkDigest, raw_length_bytes: u64) -> Option<ChunkRef> {
        self.chunks.get(&(digest, raw_length_bytes)).copied()
    }
}

/// A region of an entry that a load wants in one of the caller's buffers.
#[derive(Clone, Debug)]
pub struct Want {
    /// Index into the body's entries.
    pub entry: usize,
    /// The region, in elements.
    pub region: Region,
    /// Index of the buffer, which holds exactly this region in row-major order.
    pub target: usize,
}

/// Which bytes to read, and where each verified byte goes.
#[derive(Debug, Default)]
pub struct ReadPlan {
    /// Reads in order of pack and offset.
    pub groups: Vec<ReadGroup>,
    /// Number of pieces of all chunks.
    pub piece_count: usize,
}

/// One read: consecutive bytes of a pack that hold one chunk or several.
#[derive(Debug)]
pub struct ReadGroup {
    /// Index into the body's packs.
    pub pack: u32,
    /// Bytes to read, from the pack's first byte.
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
    /// Where its raw bytes go.
    pub pieces: Vec<Piece>,
}

/// Consecutive raw bytes of a chunk and their place in a target.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Number of this piece among all of the plan.
    pub id: usize,
    /// Offset in the chunk's raw bytes.
    pub chunk_offset_bytes: u64,
    /// Index of the target buffer.
    pub target: usize,
    /// Offset in the target buffer.
    pub target_offset_bytes: u64,
    /// Bytes of the piece, never 0.
    pub length_bytes: u64,
}

/// Plans the reads that fill all wanted regions of a validated body.
///
/// Each needed chunk is read once, however many targets want it; chunks that none wants are not read.
#[must_use]
pub fn plan_read(body: &Body, wants: &[Want]) -> ReadPlan {
    let mut chunks: Vec<ReadChunk> = Vec::new();
    let mut piece_count = 0;
    for want in wants {
        let entry = &body.entries[want.entry];
        for shard in &entry.shards {
            let shard_region = Region { offsets: shard.offsets.clone(), lengths: shard.lengths.clone() };
            let runs = region::runs(&shard_region, &want.region, entry.stored_dtype.size_bytes());
            let length_bytes = raw_length_bytes(&shard.lengths, entry.stored_dtype).unwrap_or(0);
            for run in runs {
                let mut done = 0;
                while done < run.length_bytes {
                    let source = run.source_offset_bytes + done;
                    let index = source / body.chunk_bytes;
                    let chunk_start = index * body.chunk_bytes;
                    let chunk_end = (chunk_start + body.chunk_bytes).min(length_bytes);
                    let length = (chunk_end - source).min(run.length_bytes - done);
                    let reference = shard.chunks[index as usize];
                    let piece = Piece {
                        id: piece_count,
                        chunk_offset_bytes: source - chunk_start,
                        target: want.target,
                        target_offset_bytes: run.target_offset_bytes + done,
                        length_bytes: length,
                    };
                    piece_count += 1;
                    done += length;
                    match chunks.last_mut() {
                        Some(last) if last.reference == reference && last.entry == want.entry => {
                            last.pieces.push(piece);
                        }
                        _ => chunks.push(ReadChunk {
                            reference,
                            raw_length_bytes: chunk_end - chunk_start,
                            entry: want.entry,
                            pieces: vec![piece],
                        }),
                    }
                }
            }
        }
    }
    ReadPlan { groups: group(merge_equal(chunks)), piece_count }
}

/// Sorts chunks by place and merges the pieces of equal ones.
fn merge_equal(mut chunks: Vec<ReadChunk>) -> Vec<ReadChunk> {
    chunks.sort_by_key(|chunk| (chunk.reference.pack, chunk.reference.offset_bytes));
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
fn group(chunks: Vec<ReadChunk>) -> Vec<ReadGroup> {
    let mut groups: Vec<ReadGroup> = Vec::new();
    for chunk in chunks {
        let start = chunk.reference.offset_bytes;
        let end = start + chunk.reference.stored_length_bytes;
        match groups.last_mut() {
            Some(last)
                if last.pack == chunk.reference.pack
                    && start <= last.range.end.saturating_add(COALESCE_GAP_BYTES)
                    && end.max(last.range.end) - last.range.start <= COALESCE_BYTES =>
            {
                last.range.end = last.range.end.max(end);
                last.chunks.push(chunk);
            }
            _ => {
                groups.push(ReadGroup { pack: chunk.reference.pack, range: start..end, chunks: vec![chunk] });
            }
        }
    }
    groups
}

/// A part and the pack that carries it.
#[derive(Debug)]
pub struct WrittenPart {
    /// The part, as in the pack's footer.
    pub part: Part,
    /// The pack, with its true length.
    pub pack: PackRecord,
}

/// Makes the one manifest that the parts of all ranks describe.
///
/// Entries of one name are joined over ranks; a region that several ranks wrote is a replica and must
/// be equal by digest. The result is validated as if it had been read.
///
/// # Errors
/// [`Error::Incomplete`] where ranks are missing, [`Error::Mismatch`] where parts disagree.
pub fn assemble(mut parts: Vec<WrittenPart>) -> Result<Manifest> {
    parts.sort_by_key(|written| written.part.rank);
    let Some(first) = parts.first() else {
        return Err(Error::Incomplete { seq: 0, missing_ranks: vec![0] });
    };
    let mut header: Header = first.part.header.clone();
    let present: Vec<u32> = parts.iter().map(|written| written.part.rank).collect();
    let missing_ranks: Vec<u32> = (0..header.world_size).filter(|rank| !present.contains(rank)).collect();
    if !missing_ranks.is_empty() {
        return Err(Error::Incomplete { seq: header.seq, missing_ranks });
    }
    let mut body = Body {
        chunk_bytes: first.part.body.chunk_bytes,
        packs: Vec::new(),
        entries: Vec::new(),
        structure: first.part.body.structure.clone(),
        rank_structures: Vec::new(),
    };
    header.stored_bytes = 0;
    let mut entries: BTreeMap<(String, Option<u32>), Entry> = BTreeMap::new();
    for written in parts {
        agree(&header, &body, &written.part)?;
        header.stored_bytes += written.pack.length_bytes;
        let table = join_packs(&mut body.packs, &written);
        body.rank_structures.extend(written.part.body.rank_structures);
        for mut entry in written.part.body.entries {
            for chunk in entry.shards.iter_mut().flat_map(|shard| &mut shard.chunks) {
                chunk.pack = table[chunk.pack as usize];
            }
            join_entry(&mut entries, entry)?;
        }
    }
    body.entries = entries.into_values().collect();
    header.raw_bytes = body
        .entries
        .iter()
        .filter(|entry| entry.tied_to.is_none())
        .filter_map(|entry| raw_length_bytes(&entry.shape, entry.stored_dtype))
        .sum();
    header.nonfinite = nonfinite(&body.entries);
    header.self_contained = body
        .packs
        .iter()
        .all(|pack| names::parse_pack_name(&pack.name).is_some_and(|name| name.seq == header.seq));
    header.state_digest = state_digest(&body);
    manifest::validate(&names::manifest_name(header.seq), &header, &body)?;
    Ok(Manifest { header, body })
}

/// Non-finite elements by entry, as many entries as a header holds; never empty where one has some.
fn nonfinite(entries: &[Entry]) -> BTreeMap<String, u64> {
    let mut names_bytes = 0;
    entries
        .iter()
        .filter_map(|entry| {
            entry.nonfinite.filter(|&count| count > 0).map(|count| (entry.name.clone(), count))
        })
        .take(limits::NONFINITE_COUNT_LIMIT)
        .take_while(|(name, _)| {
            let first = names_bytes == 0;
            names_bytes += name.len();
            first || names_bytes <= limits::NONFINITE_NAMES_LIMIT_BYTES
        })
        .collect()
}

/// Refuses a part that belongs to another save than the first one.
fn agree(header: &Header, body: &Body, part: &Part) -> Result<()> {
    let facts = |header: &Header, chunk_bytes: u64| {
        [
            ("session", header.session_id.clone()),
            ("seq", header.seq.to_string()),
            ("step", header.step.to_string()),
            ("world size", header.world_size.to_string()),
            ("chunk size", chunk_bytes.to_string()),
        ]
    };
    let expected = facts(header, body.chunk_bytes);
    let found = facts(&part.header, part.body.chunk_bytes);
    for ((field, expected), (_, found)) in expected.into_iter().zip(found) {
        if expected != found {
            return Err(Error::Mismatch {
                name: format!("part of rank {}", part.rank),
                field,
                expected,
                found,
            });
        }
    }
    Ok(())
}

/// Adds a part's packs to the table; returns the new index of each of the part's indices.
fn join_packs(packs: &mut Vec<PackRecord>, written: &WrittenPart) -> Vec<u32> {
    let own = std::iter::once(&written.pack);
    let others = written.part.body.packs.iter().skip(1);
    own.chain(others)
        .map(|record| {
            let index = packs.iter().position(|known| known.name == record.name).unwrap_or_else(|| {
                packs.push(record.clone());
                packs.len() - 1
            });
            index as u32
        })
        .collect()
}

/// Adds a rank's share of an entry to what other ranks gave.
fn join_entry(entries: &mut BTreeMap<(String, Option<u32>), Entry>, mut entry: Entry) -> Result<()> {
    let key = (entry.name.clone(), entry.rank);
    let Some(known) = entries.get_mut(&key) else {
        entries.insert(key, entry);
        return Ok(());
    };
    if (known.dtype, known.stored_dtype, &known.shape, &known.tied_to)
        != (entry.dtype, entry.stored_dtype, &entry.shape, &entry.tied_to)
    {
        return Err(Error::Mismatch {
            name: entry.name,
            field: "description on two ranks",
            expected: format!("{} {:?}", known.dtype.name(), known.shape),
            found: format!("{} {:?}", entry.dtype.name(), entry.shape),
        });
    }
    for shard in entry.shards {
        match known
            .shards
            .iter()
            .find(|other| other.offsets == shard.offsets && other.lengths == shard.lengths)
        {
            None => {
                // Once, however many shards of the entry this rank holds; a replica is counted already.
                let counted = entry.nonfinite.take();
                known.nonfinite = known.nonfinite.into_iter().chain(counted).reduce(u64::saturating_add);
                known.shards.push(shard);
            }
            Some(replica) => {
                let digests =
                    |chunks: &[ChunkRef]| chunks.iter().map(|chunk| chunk.digest).collect::<Vec<_>>();
                if digests(&replica.chunks) != digests(&shard.chunks) {
                    return Err(Error::Mismatch {
                        name: entry.name,
                        field: "value on two ranks that both hold it",
                        expected: format!("{:?}", replica.chunks.first().map(|chunk| chunk.digest)),
                        found: format!("{:?}", shard.chunks.first().map(|chunk| chunk.digest)),
                    });
                }
            }
        }
    }
    known.shards.sort_by(|left, right| left.offsets.cmp(&right.offsets));
    Ok(())
}

/// What becomes of a chunk of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The base or this very pack has the same bytes: refer to them.
    Refer(ChunkRef),
    /// New bytes: append them to the pack.
    Write,
}

/// Decides chunk by chunk, and builds the pack table of the part.
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

    /// Packs of the base that are worth referring to, given all chunks of the save that the base holds.
    ///
    /// A pack stays on disk as long as one of its chunks is referred to. Where a save would use less than
    /// one part in [`LIVE_SHARE`] of a pack, writing those few bytes again is cheaper than keeping it.
    pub fn packs_worth_keeping(
        &self,
        held: impl Iterator<Item = (ChunkDigest, u64)>,
        always: bool,
    ) -> HashSet<u32> {
        let Some(base) = self.base else { return HashSet::new() };
        let mut live: HashMap<u32, u64> = HashMap::new();
        let mut seen = HashSet::new();
        for (digest, raw_length_bytes) in held {
            if seen.insert((digest, raw_length_bytes))
                && let Some(reference) = base.find(digest, raw_length_bytes)
            {
                let bytes = live.entry(reference.pack).or_insert(0);
                *bytes = bytes.saturating_add(reference.stored_length_bytes);
            }
        }
        live.into_iter()
            .filter(|(pack, bytes)| {
                let length = base.packs.get(*pack as usize).map_or(u64::MAX, |record| record.length_bytes);
                always || bytes.saturating_mul(LIVE_SHARE) >= length
            })
            .map(|(pack, _)| pack)
            .collect()
    }

    /// Decides about a chunk; `usable` says whether a chunk of the base may be referred to.
    pub fn decide(
        &mut self,
        digest: ChunkDigest,
        raw_length_bytes: u64,
        usable: impl FnOnce(&ChunkRef) -> bool,
    ) -> Decision {
        if let Some(twin) = self.written.get(&(digest, raw_length_bytes)) {
            self.reused_count += 1;
            return Decision::Refer(*twin);
        }
        let Some(base) = self.base else { return Decision::Write };
        let Some(mut reference) = base.find(digest, raw_length_bytes).filter(|reference| usable(reference))
        else {
            return Decision::Write;
        };
        let packs = &mut self.packs;
        reference.pack = *self.base_indices.entry(reference.pack).or_insert_with(|| {
            packs.push(base.packs[reference.pack as usize].clone());
            (packs.len() - 1) as u32
        });
        self.reused_count += 1;
        Decision::Refer(reference)
    }

    /// Notes a chunk that was appended to the pack being written.
    pub fn note_written(
        &mut self,
        digest: ChunkDigest,
        raw_length_bytes: u64,
        offset_bytes: u64,
        stored_length_bytes: u64,
        codec: Codec,
    ) -> ChunkRef {
        let reference = ChunkRef { pack: 0, offset_bytes, stored_length_bytes, codec, digest, base: None };
        self.written.insert((digest, raw_length_bytes), reference);
        reference
    }

    /// The pack table of the part, and how many chunks were not written again.
    #[must_use]
    pub fn finish(self) -> (Vec<PackRecord>, u64) {
        (self.packs, self.reused_count)
    }
}
