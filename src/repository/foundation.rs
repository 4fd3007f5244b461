//! What a save builds on: the snapshot before it, whose chunks it need not write again.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::prelude::*;

use crate::digest::{ChunkDigest, xxh3_64};
use crate::error::Result;
use crate::format::model::{ChunkRef, PackRecord, Shard};
use crate::format::ticket::TicketBase;
use crate::inflight::Hold;
use crate::plan::{Base, chunk_ranges};
use crate::write::{BasePacks, EntryInput};

use super::Shared;

/// Bytes that are digested before another thread would be awake.
const FEW_BYTES: usize = 1 << 20;

/// Which snapshot a save may build on.
#[derive(Clone, Debug)]
pub(super) enum Ground {
    /// The one that this handle committed or restored last, else the newest.
    Newest,
    /// What a ticket names, for a part of this rank.
    Ticket { rank: u32, generation: String, base: Option<TicketBase> },
}

impl Ground {
    /// As in the ticket; empty without one.
    pub(super) fn generation(&self) -> String {
        match self {
            Self::Newest => String::new(),
            Self::Ticket { generation, .. } => generation.clone(),
        }
    }
}

/// What a rank may refer to after its part was committed.
#[derive(Clone, Debug)]
pub(super) struct PartBase {
    /// As in the ticket of that part.
    pub(super) generation: String,
    /// The chunks of its own part.
    pub(super) base: Arc<Base>,
}

/// The base of a save, with its packs open and held.
#[derive(Debug)]
pub(super) struct Foundation {
    pub(super) base_packs: BasePacks,
    /// Keeps the packs of the base, and the one that is written, from deletion.
    pub(super) hold: Hold,
}

impl Shared {
    /// Chooses a base, registers its packs and the pack that is about to be written, and opens them.
    pub(super) fn foundation(&self, pack_name: &str, choose: impl Fn() -> Option<Arc<Base>>) -> Foundation {
        loop {
            let base = choose();
            let packs = base.iter().flat_map(|base| &base.packs).map(|record| record.name.clone());
            // IMPORTANT: held until the commit is in `state`, which a sweep reads after it has claimed packs.
            let (hold, gone_packs) =
                self.registry.hold(base.as_ref().map(|base| base.seq), packs.chain([pack_name.to_owned()]));
            let now = choose();
            // A merge in between has made another base of it, and its packs may be gone already.
            if base.is_none() || base.as_ref().map(Arc::as_ptr) == now.as_ref().map(Arc::as_ptr) {
                return Foundation {
                    base_packs: BasePacks::open(self.store.as_ref(), base, &gone_packs),
                    hold,
                };
            }
        }
    }

    /// For each source, whether its bytes are those of the base: such a tensor needs no copy. False for a
    /// source that isn't given.
    ///
    /// Only tensors that did not change from the base's parent to the base are compared, by digest and in
    /// place; for all others that would be a read for nothing before the copy.
    pub(super) fn find_unchanged(
        &self,
        base_packs: &BasePacks,
        entries: &[EntryInput],
        sources: &[Option<&[u8]>],
    ) -> Result<Vec<bool>> {
        let mut unchanged = vec![false; sources.len()];
        let Some(base) = base_packs.base().filter(|base| base.trusted) else { return Ok(unchanged) };
        let candidates: Vec<(usize, &[u8], &Shard)> = self
            .candidates(base, base_packs, entries)
            .into_iter()
            .filter_map(|(source, shard)| Some((source, sources[source]?, shard)))
            .collect();
        if candidates.is_empty() {
            return Ok(unchanged);
        }
        let differs: Vec<AtomicBool> = candidates.iter().map(|_| AtomicBool::new(false)).collect();
        let chunks: Vec<(usize, &[u8], ChunkDigest)> = candidates
            .iter()
            .enumerate()
            .flat_map(|(candidate, &(_, bytes, shard))| {
                chunk_ranges(bytes.len() as u64, self.options.chunk_bytes).zip(&shard.chunks).map(
                    move |(range, chunk)| {
                        (candidate, &bytes[range.start as usize..range.end as usize], chunk.digest)
                    },
                )
            })
            .collect();
        let compare = |(candidate, bytes, digest): &(usize, &[u8], ChunkDigest)| {
            // One chunk that differs is enough: the tensor is copied whole.
            let is_known = differs[*candidate].load(Ordering::Relaxed);
            if !is_known && ChunkDigest::of_uncached(bytes) != *digest {
                differs[*candidate].store(true, Ordering::Relaxed);
            }
        };
        if chunks.iter().map(|(_, bytes, _)| bytes.len()).sum::<usize>() <= FEW_BYTES {
            chunks.iter().for_each(compare);
        } else {
            self.threads.pool()?.install(|| {
                let piece_count = if chunks.len() > 256 { 64 } else { 1 };
                chunks.par_iter().with_min_len(piece_count).for_each(compare);
            });
        }
        for ((source, ..), differs) in candidates.iter().zip(&differs) {
            unchanged[*source] = !differs.load(Ordering::Relaxed);
        }
        Ok(unchanged)
    }

    /// The sources that [`Shared::find_unchanged`] compares.
    pub(super) fn worth_comparing(&self, base_packs: &BasePacks, entries: &[EntryInput]) -> HashSet<usize> {
        let Some(base) = base_packs.base().filter(|base| base.trusted) else { return HashSet::new() };
        self.candidates(base, base_packs, entries).into_iter().map(|(source, _)| source).collect()
    }

    /// Sources that did not change last time, with the shards that may hold their bytes, in packs that are
    /// there and worth keeping for these alone.
    fn candidates<'b>(
        &self,
        base: &'b Base,
        base_packs: &BasePacks,
        entries: &[EntryInput],
    ) -> Vec<(usize, &'b Shard)> {
        let found: Vec<(usize, &Shard)> = entries
            .iter()
            .filter(|entry| entry.stored_dtype == entry.dtype && !entry.region.lengths.contains(&0))
            .filter_map(|entry| {
                let key = (entry.name.as_str(), entry.rank);
                let shard =
                    base.sole_shard(key, &entry.region, entry.stored_dtype, self.options.chunk_bytes)?;
                Some((entry.source?, shard))
            })
            .filter(|(_, shard)| base.did_not_change(shard))
            .collect();
        let chunks = found.iter().flat_map(|(_, shard)| &shard.chunks).copied();
        let worth = base.packs_worth_keeping(chunks, self.options.rules.is_empty());
        let is_kept = |pack: u32| worth.contains(&pack) && base_packs.has(pack);
        let is_usable =
            |chunk: &ChunkRef| is_kept(chunk.pack) && chunk.base.is_none_or(|base| is_kept(base.pack));
        found.into_iter().filter(|(_, shard)| shard.chunks.iter().all(is_usable)).collect()
    }

    /// The base that needs no look at the store: what this handle committed or restored last.
    pub(super) fn base_at_hand(&self, ground: &Ground) -> Option<Arc<Base>> {
        let state = self.lock_state();
        match ground {
            Ground::Newest => state.base.clone(),
            Ground::Ticket { rank, generation, base } => {
                let wanted = base.as_ref()?;
                let own = state
                    .part_bases
                    .get(rank)
                    .filter(|own| own.base.seq == wanted.seq && own.generation == *generation);
                own.map(|own| &own.base)
                    .or_else(|| state.base.as_ref().filter(|base| is_that_of(base, wanted)))
                    .cloned()
            }
        }
    }

    /// The snapshot whose chunks the save may refer to: the one at hand, else one that is read from the store,
    /// whose chunks are verified before they are referred to.
    pub(super) fn base_for_save(&self, ground: &Ground) -> Option<Arc<Base>> {
        self.base_at_hand(ground).or_else(|| {
            let wanted = match ground {
                Ground::Newest => self.lock_state().listing.seqs.last().copied()?,
                Ground::Ticket { base, .. } => base.as_ref()?.seq,
            };
            if !self.has_manifest_at_hand(wanted) {
                return None;
            }
            // A damaged or unseen snapshot only means that this save writes everything.
            let manifest = self.manifest(wanted).ok()?;
            let read = Arc::new(Base::new(wanted, manifest.body, false));
            if let Ground::Ticket { base: Some(wanted), .. } = ground
                && !is_that_of(&read, wanted)
            {
                return None;
            }
            self.lock_state().base = Some(Arc::clone(&read));
            Some(read)
        })
    }
}

fn is_that_of(base: &Base, wanted: &TicketBase) -> bool {
    base.seq == wanted.seq && pack_table_digest(&base.packs) == wanted.pack_table
}

/// Digest of a pack table, as tickets have it.
pub(super) fn pack_table_digest(packs: &[PackRecord]) -> String {
    let names: String = packs.iter().flat_map(|record| [record.name.as_str(), "\n"]).collect();
    format!("{:016x}", xxh3_64(names.as_bytes()))
}
