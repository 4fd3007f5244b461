//! Which packs a merge rewrites, decided from sizes alone, and what is live in them.
//!
//! Four steps, all pure: [`Survey`] adds up what snapshots use of packs, [`plan`] groups the packs that are
//! worth rewriting, [`Live`] lists what has to be copied from the packs of a group, and [`Moves`] makes the
//! manifests that point to the copies.
//!
//! # What is worth it
//!
//! A group is rewritten only where some snapshot then refers to fewer packs, or where at least one byte in
//! [`LEAST_GAIN_SHARE`] of it goes. Bytes are rewritten seldom:
//!
//! * A snapshot with too many packs has its smallest ones merged, until half of what it may have is left:
//!   a large pack is rewritten only when the others together have grown as large.
//! * A merge by count of saves stops at the first pack that is more than [`TIER_FACTOR`] times what stands
//!   before it, so that each byte is rewritten about as often as the repository doubles.
//! * A merged pack takes at most [`MERGED_LIMIT_BYTES`]. One that has more than half of it is rewritten
//!   only alone, for what is dead in it: the merge of a huge repository is never one giant rewrite.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde::Deserialize;

use crate::format::model::{Body, ChunkRef, Codec, PackRecord};
use crate::format::pack::{LARGE_ALIGNMENT_BYTES, SMALLEST_PACK_LENGTH_BYTES, alignment_of};

mod live;

pub use live::{Live, LiveChunk, Moved, Moves};

/// Most bytes of packs that are merged with others, after the merge.
pub const MERGED_LIMIT_BYTES: u64 = 4 << 30;
/// A merge that makes no snapshot refer to fewer packs frees at least one byte in so many.
pub const LEAST_GAIN_SHARE: u64 = 16;
/// Shorter packs are not rewritten for their dead bytes alone: the syncs would cost more than they gain.
pub const LEAST_WASTE_LENGTH_BYTES: u64 = 1 << 20;
/// By count of saves, a pack is merged with those before it that together have at least one part in so
/// many of it.
pub const TIER_FACTOR: u64 = 2;

/// Bytes of a chunk's row in the chunk table, before compression.
const ROW_BYTES: u64 = 48;
/// Bytes of a pack beside its chunks and their rows, at most.
const FRAME_BYTES: u64 = SMALLEST_PACK_LENGTH_BYTES + LARGE_ALIGNMENT_BYTES;

/// When old packs are rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergePolicy {
    /// After so many saves; 0 for never by count.
    pub stride: u64,
    /// Where a snapshot refers to more packs than this, for each of its ranks.
    pub max_packs: u64,
    /// Where more than this share of a pack's bytes is of no use to any snapshot.
    pub dead_ratio: f64,
}

/// What to look for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Demand {
    /// What the policy says; `stride` of it is over.
    Due {
        /// The policy.
        policy: MergePolicy,
        /// True where as many saves as its stride have passed.
        is_stride_over: bool,
    },
    /// Everything of which something is gained.
    Everything,
}

/// What a snapshot uses of one pack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Used {
    /// The pack.
    pub record: PackRecord,
    /// Offset and stored length of each chunk, ascending, each once.
    pub places: Vec<(u64, u64)>,
}

/// What a snapshot uses of packs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotUse {
    /// Ranks that wrote it.
    pub world_size: u32,
    /// Its packs, in the order of its pack table.
    pub packs: Vec<Used>,
}

impl SnapshotUse {
    /// Adds up the chunks of a body, bases of differences among them.
    #[must_use]
    pub fn of(world_size: u32, body: &Body) -> Self {
        let mut packs: Vec<Used> =
            body.packs.iter().map(|record| Used { record: record.clone(), places: Vec::new() }).collect();
        for chunk in body.entries.iter().flat_map(|entry| &entry.shards).flat_map(|shard| &shard.chunks) {
            for stored in stored_chunks(chunk) {
                packs[stored.pack as usize].places.push((stored.offset_bytes, stored.stored_length_bytes));
            }
        }
        for used in &mut packs {
            used.places.sort_unstable();
            used.places.dedup();
        }
        Self { world_size, packs }
    }
}

/// The chunk itself and the one it is a difference to, without those that lie nowhere.
fn stored_chunks(chunk: &ChunkRef) -> impl Iterator<Item = ChunkRef> {
    let own = (chunk.codec != Codec::Rounded).then_some(*chunk);
    own.into_iter().chain(chunk.base.map(ChunkRef::from))
}

/// A pack as the planner sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackSize {
    /// Name in `packs/`.
    pub name: String,
    /// Length of the pack.
    pub length_bytes: u64,
    /// Bytes that its live chunks take in another pack, at most; 0 where none is live.
    pub live_bytes: u64,
    /// True where it must be left alone.
    pub is_fixed: bool,
}

/// All packs that snapshots refer to, and which.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// Ascending by name.
    pub packs: Vec<PackSize>,
    /// World size and packs (indices) of each snapshot.
    pub snapshots: Vec<(u32, Vec<usize>)>,
}

impl Survey {
    /// Adds up what snapshots use. Packs of a snapshot that is `fixed` are left alone.
    pub fn of<'a>(snapshots: impl IntoIterator<Item = (&'a SnapshotUse, bool)>) -> Self {
        let snapshots: Vec<(&SnapshotUse, bool)> = snapshots.into_iter().collect();
        let names: BTreeSet<&str> = snapshots
            .iter()
            .flat_map(|(snapshot, _)| &snapshot.packs)
            .map(|used| &*used.record.name)
            .collect();
        let index: HashMap<&str, usize> =
            names.iter().enumerate().map(|(index, name)| (*name, index)).collect();
        let mut packs: Vec<PackSize> = names
            .iter()
            .map(|name| PackSize {
                name: (*name).to_owned(),
                length_bytes: 0,
                live_bytes: 0,
                is_fixed: false,
            })
            .collect();
        let mut places: Vec<Vec<(u64, u64)>> = vec![Vec::new(); packs.len()];
        for (snapshot, is_fixed) in &snapshots {
            for used in &snapshot.packs {
                let pack = index[used.record.name.as_str()];
                packs[pack].length_bytes = used.record.length_bytes;
                packs[pack].is_fixed |= is_fixed;
                places[pack].extend(&used.places);
            }
        }
        for (pack, mut places) in packs.iter_mut().zip(places) {
            places.sort_unstable();
            places.dedup();
            pack.live_bytes = places.iter().map(|(_, stored)| rewritten_bytes(*stored)).sum();
        }
        let snapshots = snapshots
            .iter()
            .map(|(snapshot, _)| {
                let packs = snapshot.packs.iter().map(|used| index[used.record.name.as_str()]).collect();
                (snapshot.world_size, packs)
            })
            .collect();
        Self { packs, snapshots }
    }

    fn may_be_merged(&self, pack: usize) -> bool {
        let PackSize { live_bytes, is_fixed, .. } = self.packs[pack];
        !is_fixed && live_bytes <= MERGED_LIMIT_BYTES / 2
    }

    /// The packs of a snapshot that may be merged with others, smallest first.
    fn smallest_first(&self, packs: &[usize]) -> Vec<usize> {
        let mut packs: Vec<usize> = packs.iter().copied().filter(|&pack| self.may_be_merged(pack)).collect();
        packs.sort_by_key(|&pack| (self.packs[pack].live_bytes, pack));
        packs
    }

    /// Bytes that go if these packs are rewritten.
    fn gained_bytes(&self, packs: &[usize]) -> u64 {
        let length: u64 = packs.iter().map(|&pack| self.packs[pack].length_bytes).sum();
        let live: u64 = packs.iter().map(|&pack| self.packs[pack].live_bytes).sum();
        length.saturating_sub(live.saturating_add(FRAME_BYTES))
    }

    fn frees_enough(&self, packs: &[usize]) -> bool {
        let length: u64 = packs.iter().map(|&pack| self.packs[pack].length_bytes).sum();
        length > 0 && self.gained_bytes(packs).saturating_mul(LEAST_GAIN_SHARE) >= length
    }

    fn is_worth_it(&self, packs: &[usize]) -> bool {
        let group: HashSet<usize> = packs.iter().copied().collect();
        let shared =
            |of_snapshot: &[usize]| of_snapshot.iter().filter(|pack| group.contains(pack)).nth(1).is_some();
        self.frees_enough(packs) || self.snapshots.iter().any(|(_, of_snapshot)| shared(of_snapshot))
    }
}

/// Bytes that a chunk takes in a new pack, at most.
fn rewritten_bytes(stored_length_bytes: u64) -> u64 {
    stored_length_bytes
        .checked_next_multiple_of(alignment_of(stored_length_bytes))
        .unwrap_or(u64::MAX)
        .saturating_add(ROW_BYTES)
}

/// Groups of packs to rewrite, each into one new pack, by their indices in the survey; smallest group first.
#[must_use]
pub fn plan(survey: &Survey, demand: Demand) -> Vec<Vec<usize>> {
    let mut together = Together::new(survey.packs.len());
    for pack in 0..survey.packs.len() {
        if is_wasteful(survey, pack, demand) {
            together.choose(&[pack]);
        }
    }
    for (world_size, packs) in &survey.snapshots {
        together.choose(&too_many(survey, *world_size, packs, demand));
        if matches!(demand, Demand::Due { is_stride_over: true, .. }) {
            together.choose(&tier(survey, packs));
        }
    }
    let mut groups: Vec<Vec<usize>> = together
        .sets()
        .into_iter()
        .flat_map(|set| split(survey, set))
        .filter(|group| survey.is_worth_it(group))
        .collect();
    groups.sort_by_key(|group| {
        (group.iter().map(|&pack| survey.packs[pack].live_bytes).sum::<u64>(), group[0])
    });
    groups
}

#[expect(clippy::cast_precision_loss, reason = "a share that is compared with a threshold")]
fn dead_share(length_bytes: u64, live_bytes: u64) -> f64 {
    1.0 - live_bytes as f64 / length_bytes.max(1) as f64
}

/// True where enough of a pack is dead to rewrite it for that alone.
fn is_wasteful(survey: &Survey, pack: usize, demand: Demand) -> bool {
    let PackSize { length_bytes, live_bytes, is_fixed, .. } = survey.packs[pack];
    if is_fixed {
        return false;
    }
    match demand {
        Demand::Everything => survey.frees_enough(&[pack]),
        Demand::Due { policy, .. } => {
            length_bytes >= LEAST_WASTE_LENGTH_BYTES
                && dead_share(length_bytes, live_bytes) > policy.dead_ratio
        }
    }
}

/// The packs of a snapshot to merge because it has too many: the smallest, so many that half of what it
/// may have is left.
fn too_many(survey: &Survey, world_size: u32, packs: &[usize], demand: Demand) -> Vec<usize> {
    let (limit, target) = match demand {
        Demand::Everything => (1, 1),
        Demand::Due { policy, .. } => {
            let limit = policy.max_packs.max(1).saturating_mul(u64::from(world_size.max(1)));
            (limit, limit.div_ceil(2))
        }
    };
    let count = packs.len() as u64;
    if count <= limit {
        return Vec::new();
    }
    let merged = survey.smallest_first(packs);
    let needed = count.saturating_sub(target).saturating_add(1);
    merged.into_iter().take(usize::try_from(needed).unwrap_or(usize::MAX)).collect()
}

/// The smallest packs of a snapshot up to the first that is much larger than all before it.
fn tier(survey: &Survey, packs: &[usize]) -> Vec<usize> {
    let mut before = None;
    survey
        .smallest_first(packs)
        .into_iter()
        .take_while(|&pack| {
            let weight = survey.packs[pack].live_bytes.saturating_add(FRAME_BYTES);
            let fits = before.is_none_or(|sum: u64| weight <= sum.saturating_mul(TIER_FACTOR));
            before = Some(before.unwrap_or(0).saturating_add(weight));
            fits
        })
        .collect()
}

/// Cuts a set into groups that fit into a pack, smallest first; what fits into none stands alone.
fn split(survey: &Survey, mut set: Vec<usize>) -> Vec<Vec<usize>> {
    set.sort_by_key(|&pack| (survey.packs[pack].live_bytes, pack));
    let mut groups: Vec<Vec<usize>> = Vec::new();
    let mut sum: u64 = 0;
    for pack in set {
        let live_bytes = survey.packs[pack].live_bytes;
        let fits = survey.may_be_merged(pack) && sum.saturating_add(live_bytes) <= MERGED_LIMIT_BYTES;
        match groups.last_mut() {
            Some(last) if fits => last.push(pack),
            _ => {
                groups.push(vec![pack]);
                sum = 0;
            }
        }
        sum = sum.saturating_add(live_bytes);
    }
    groups
}

/// Packs that are to be merged, in sets of those that some snapshot has in common.
struct Together {
    chosen: Vec<bool>,
    parents: Vec<usize>,
}

impl Together {
    fn new(count: usize) -> Self {
        Self { chosen: vec![false; count], parents: (0..count).collect() }
    }

    /// Puts packs into one set.
    fn choose(&mut self, packs: &[usize]) {
        for &pack in packs {
            self.chosen[pack] = true;
            let (one, other) = (self.root(packs[0]), self.root(pack));
            self.parents[other.max(one)] = other.min(one);
        }
    }

    fn root(&mut self, mut pack: usize) -> usize {
        while self.parents[pack] != pack {
            self.parents[pack] = self.parents[self.parents[pack]];
            pack = self.parents[pack];
        }
        pack
    }

    fn sets(mut self) -> Vec<Vec<usize>> {
        let mut sets: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for pack in 0..self.chosen.len() {
            if self.chosen[pack] {
                sets.entry(self.root(pack)).or_default().push(pack);
            }
        }
        sets.into_values().collect()
    }
}

#[cfg(test)]
mod tests;
