//! What several ranks hold of one entry, made one.

use std::collections::HashSet;

use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::cover::{Cover, check_cover};
use crate::format::model::{Codec, Entry, Shard};

use super::disagreement;

/// An entry, and who gave what of it.
#[derive(Debug)]
pub(super) struct JoinedEntry {
    /// The entry. Until [`JoinedEntry::finish`] its shards are those of all ranks, in their order.
    pub(super) entry: Entry,
    /// The first rank that described it.
    pub(super) rank: u32,
    /// By shard, the rank that wrote it.
    pub(super) shard_ranks: Vec<u32>,
    /// What each rank with shards found out about its share; ranks ascend.
    shares: Vec<Share>,
}

/// What a rank found out about its share of an entry.
#[derive(Debug)]
struct Share {
    rank: u32,
    nonfinite: Option<u64>,
    abs_max: Option<f64>,
    l2_norm: Option<f64>,
    rounded_from: Option<String>,
}

impl Share {
    fn take(rank: u32, entry: &mut Entry) -> Self {
        let rounded_from = entry.rounded_from.take();
        Self {
            rank,
            nonfinite: entry.nonfinite,
            abs_max: entry.abs_max,
            l2_norm: entry.l2_norm,
            rounded_from,
        }
    }
}

impl JoinedEntry {
    /// What one rank holds.
    pub(super) fn new(rank: u32, mut entry: Entry) -> Self {
        let share = Share::take(rank, &mut entry);
        let shard_ranks = vec![rank; entry.shards.len()];
        let shares = if entry.shards.is_empty() { Vec::new() } else { vec![share] };
        Self { entry, rank, shard_ranks, shares }
    }

    /// Name and rank: the order of entries.
    pub(super) fn position(&self) -> (&str, Option<u32>) {
        (&self.entry.name, self.entry.rank)
    }

    /// Adds what another rank holds.
    pub(super) fn add(&mut self, rank: u32, mut entry: Entry) -> Result<()> {
        let known = &self.entry;
        let (left, right) = (known.dtype.name(), entry.dtype.name());
        self.compare("dtype", left, right, rank)?;
        let (left, right) = (known.stored_dtype.name(), entry.stored_dtype.name());
        self.compare("stored dtype", left, right, rank)?;
        if known.shape != entry.shape {
            let (left, right) = (format!("{:?}", known.shape), format!("{:?}", entry.shape));
            self.compare("shape", &left, &right, rank)?;
        }
        if known.tied_to != entry.tied_to {
            let shown =
                |tie: &Option<String>| tie.as_ref().map_or("none".to_owned(), |to| format!("to `{to}`"));
            self.compare("tie", &shown(&known.tied_to), &shown(&entry.tied_to), rank)?;
        }
        if !entry.shards.is_empty() {
            self.shares.push(Share::take(rank, &mut entry));
            self.shard_ranks.resize(self.shard_ranks.len() + entry.shards.len(), rank);
            self.entry.shards.append(&mut entry.shards);
        }
        Ok(())
    }

    fn compare(&self, field: &'static str, left: &str, right: &str, rank: u32) -> Result<()> {
        if left == right {
            return Ok(());
        }
        Err(disagreement(&self.entry.name, field, (self.rank, left), (rank, right)))
    }

    /// Puts the shards in order, keeps one of each replica, and joins what ranks found out.
    pub(super) fn finish(&mut self) -> Result<()> {
        if self.shares.len() > 1 {
            self.sort_shards();
            self.drop_replicas()?;
        }
        self.join_statistics();
        self.join_rounding()
    }

    fn sort_shards(&mut self) {
        if self
            .entry
            .shards
            .is_sorted_by(|left, right| (&left.offsets, &left.lengths) <= (&right.offsets, &right.lengths))
        {
            return;
        }
        let ranks = std::mem::take(&mut self.shard_ranks);
        let mut pairs: Vec<(Shard, u32)> =
            std::mem::take(&mut self.entry.shards).into_iter().zip(ranks).collect();
        // Stable: of replicas the one of the lowest rank comes first.
        pairs.sort_by(|(left, _), (right, _)| {
            (&left.offsets, &left.lengths).cmp(&(&right.offsets, &right.lengths))
        });
        (self.entry.shards, self.shard_ranks) = pairs.into_iter().unzip();
    }

    /// Keeps the first of the shards of one region, and the shares of ranks of which a shard is kept.
    fn drop_replicas(&mut self) -> Result<()> {
        let is_replica =
            |left: &Shard, right: &Shard| left.offsets == right.offsets && left.lengths == right.lengths;
        if !self.entry.shards.windows(2).any(|pair| is_replica(&pair[0], &pair[1])) {
            return Ok(());
        }
        let ranks = std::mem::take(&mut self.shard_ranks);
        let shards = std::mem::take(&mut self.entry.shards);
        for (shard, rank) in shards.into_iter().zip(ranks) {
            match (self.entry.shards.last(), self.shard_ranks.last()) {
                (Some(known), Some(&first)) if is_replica(known, &shard) => {
                    check_equal(&self.entry.name, (first, known), (rank, &shard))?;
                }
                _ => {
                    self.entry.shards.push(shard);
                    self.shard_ranks.push(rank);
                }
            }
        }
        let kept: HashSet<u32> = self.shard_ranks.iter().copied().collect();
        self.shares.retain(|share| kept.contains(&share.rank));
        Ok(())
    }

    /// Joins the statistics of the ranks. What one of them didn't count isn't known.
    fn join_statistics(&mut self) {
        let Self { entry, shares, .. } = self;
        if shares.is_empty() {
            return;
        }
        let all = |of: fn(&Share) -> Option<f64>, add: fn(f64, f64) -> f64| {
            let joined = shares.iter().try_fold(0.0, |sum, share| of(share).map(|value| add(sum, value)));
            joined.filter(|value| value.is_finite())
        };
        entry.abs_max = all(|share| share.abs_max, f64::max);
        entry.l2_norm = all(|share| share.l2_norm, f64::hypot);
        // Absent where there are none.
        entry.nonfinite = shares.iter().filter_map(|share| share.nonfinite).reduce(u64::saturating_add);
    }

    /// An entry can be rounded from one other only, so all its rounded shards have to be from the same.
    fn join_rounding(&mut self) -> Result<()> {
        if self.shares.iter().all(|share| share.rounded_from.is_none()) {
            return Ok(());
        }
        let is_rounded = |shard: &Shard| shard.chunks.iter().any(|chunk| chunk.codec == Codec::Rounded);
        let shards = self.entry.shards.iter().zip(&self.shard_ranks);
        let ranks: HashSet<u32> =
            shards.filter(|(shard, _)| is_rounded(shard)).map(|(_, rank)| *rank).collect();
        let mut sources = self
            .shares
            .iter()
            .filter(|share| ranks.contains(&share.rank))
            .filter_map(|share| Some((share.rank, share.rounded_from.as_deref()?)));
        let first = sources.next();
        if let Some((rank, known)) = first
            && let Some(other) = sources.find(|(_, source)| *source != known)
        {
            let field = "entry it is rounded from";
            return Err(disagreement(&self.entry.name, field, (rank, known), other));
        }
        self.entry.rounded_from = first.map(|(_, source)| source.to_owned());
        Ok(())
    }
}

/// Refuses two shards of one region that differ.
fn check_equal(name: &str, left: (u32, &Shard), right: (u32, &Shard)) -> Result<()> {
    let digests = |shard: &Shard| shard.chunks.iter().map(|chunk| chunk.digest).collect::<Vec<_>>();
    let (left_digests, right_digests) = (digests(left.1), digests(right.1));
    if left_digests == right_digests && left.1.scale_log2 == right.1.scale_log2 {
        return Ok(());
    }
    let shown = |digests: &[ChunkDigest], shard: &Shard| {
        let scale = if shard.scale_log2 == 0 { String::new() } else { format!(" x 2^{}", shard.scale_log2) };
        format!("bytes of digest {}{scale}", ChunkDigest::of_digests(digests))
    };
    let (left_text, right_text) = (shown(&left_digests, left.1), shown(&right_digests, right.1));
    Err(disagreement(name, "value", (left.0, &left_text), (right.0, &right_text)))
}

/// Gives a tie the shards of its target: what is one storage has one set of bytes. What ranks said of the tie
/// itself has to fit.
pub(super) fn fill_tie(tie: &mut JoinedEntry, target: &JoinedEntry) -> Result<()> {
    for (shard, rank) in tie.entry.shards.iter().zip(&tie.shard_ranks) {
        let at = target.entry.shards.binary_search_by(|other| other.offsets.cmp(&shard.offsets));
        match at.ok().filter(|&at| target.entry.shards[at].lengths == shard.lengths) {
            Some(at) => {
                let known = (target.shard_ranks[at], &target.entry.shards[at]);
                check_equal(&tie.entry.name, known, (*rank, shard))?;
            }
            None => {
                return Err(Error::Mismatch {
                    name: tie.entry.name.clone(),
                    field: "region than what it is tied to",
                    expected: format!("one that a rank wrote of `{}`", target.entry.name),
                    found: format!("{} on rank {rank}", shown_region(&shard.offsets, &shard.lengths)),
                });
            }
        }
    }
    tie.entry.shards.clone_from(&target.entry.shards);
    tie.shard_ranks.clone_from(&target.shard_ranks);
    tie.entry.rounded_from.clone_from(&target.entry.rounded_from);
    let Entry { nonfinite, abs_max, l2_norm, .. } = target.entry;
    (tie.entry.nonfinite, tie.entry.abs_max, tie.entry.l2_norm) = (nonfinite, abs_max, l2_norm);
    Ok(())
}

/// `[0..2, 4..8]`.
pub(super) fn shown_region(offsets: &[u64], lengths: &[u64]) -> String {
    let ranges = offsets
        .iter()
        .zip(lengths)
        .map(|(offset, length)| format!("{offset}..{}", offset.saturating_add(*length)));
    format!("[{}]", ranges.collect::<Vec<_>>().join(", "))
}

/// Says which ranks are around the first gap or overlap, where one is what is wrong with these entries.
pub(super) fn explain(entries: &[Entry], ranks: &[Vec<u32>]) -> Option<Error> {
    let (entry, ranks, element, shard_count) = entries.iter().zip(ranks).find_map(|(entry, ranks)| {
        let is_inside = |shard: &Shard| {
            let Shard { offsets, lengths, .. } = shard;
            offsets.len() == entry.shape.len()
                && lengths.len() == entry.shape.len()
                && entry.shape.iter().zip(offsets).zip(lengths).all(|((size, offset), length)| {
                    offset.checked_add(*length).is_some_and(|end| end <= *size)
                })
        };
        if entry.shape.contains(&0) || !entry.shards.iter().all(is_inside) {
            return None;
        }
        match check_cover(&entry.shape, &entry.shards) {
            Cover::Wrong { element, shard_count } => Some((entry, ranks, element, shard_count)),
            _ => None,
        }
    })?;
    let shown = |index: usize| {
        format!(
            "{} of rank {}",
            shown_region(&entry.shards[index].offsets, &entry.shards[index].lengths),
            ranks[index]
        )
    };
    let around: Vec<String> = if shard_count == 0 {
        let next = entry.shards.partition_point(|shard| shard.offsets <= element);
        [next.checked_sub(1), Some(next).filter(|next| *next < entry.shards.len())]
            .into_iter()
            .flatten()
            .map(shown)
            .collect()
    } else {
        let holds = |shard: &Shard| {
            let bounds = shard.offsets.iter().zip(&shard.lengths);
            element.iter().zip(bounds).all(|(at, (offset, length))| (*offset..offset + length).contains(at))
        };
        (0..entry.shards.len()).filter(|&index| holds(&entry.shards[index])).take(2).map(shown).collect()
    };
    let found = match (shard_count, around.as_slice()) {
        (0, []) => format!("element {element:?} on no rank"),
        (0, [one]) => format!("element {element:?} on no rank, next to {one}"),
        (0, _) => format!("element {element:?} on no rank, between {}", around.join(" and ")),
        _ => format!("element {element:?} in {}", around.join(" and in ")),
    };
    let expected = "each element of it in exactly one".to_owned();
    Some(Error::Mismatch { name: entry.name.clone(), field: "set of regions", expected, found })
}
