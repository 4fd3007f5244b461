//! Which rank writes what, where several hold the same.

use std::collections::hash_map::Entry as Place;
use std::collections::{HashMap, HashSet};

use crate::error::{Error, Result};
use crate::tensor::{Dtype, Region};

use super::{Holding, disagreement};

/// What a rank does with a region that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// Another rank writes it; this one tells its digest.
    Tell,
    /// It writes it.
    Write,
    /// It writes it in another dtype than the one in which others tell its digest, and so tells that too.
    WriteAndTell,
}

/// Decides by rank what it does with each of its tensors; the answer has the order of the holdings.
///
/// Who writes is decided by `plan_writers`.
///
/// # Errors
/// [`Error::Disagreement`] where two ranks describe one entry differently; [`Error::InvalidInput`] where a
/// rank has a name twice, or a tie to what it hasn't.
pub fn plan_shares(holdings: &[Vec<Holding>]) -> Result<Vec<Vec<Share>>> {
    let masks = plan_writers(holdings)?;
    let rows = || holdings.iter().zip(&masks).flat_map(|(own, mask)| own.iter().zip(mask));
    let told: HashSet<(&str, &Region)> = rows()
        .filter(|(holding, writes)| !**writes && !holding.is_empty() && holding.tied_to.is_none())
        .map(|(holding, _)| (holding.name.as_str(), &holding.region))
        .collect();
    let share = |(holding, writes): (&Holding, &bool)| match writes {
        false => Share::Tell,
        true if holding.dtype != holding.stored_dtype
            && told.contains(&(holding.name.as_str(), &holding.region)) =>
        {
            Share::WriteAndTell
        }
        true => Share::Write,
    };
    Ok(holdings.iter().zip(&masks).map(|(own, mask)| own.iter().zip(mask).map(share).collect()).collect())
}

/// Decides by rank which of its tensors it writes; the answer has the order of the holdings.
///
/// A region that one rank holds is written by that rank. One that several hold is written by one of them,
/// the largest first, each by the rank that has the fewest bytes until then. A tie goes with its target,
/// and a float that may be a narrower copy of another, by name, with that one. An entry without elements
/// is written, which costs nothing, by the first rank that has it, so that it is described. The answer
/// doesn't depend on the order inside a rank's holdings.
///
/// # Errors
/// [`Error::Disagreement`] where two ranks describe one entry differently; [`Error::InvalidInput`] where a
/// rank has a name twice, or a tie to what it hasn't.
fn plan_writers(holdings: &[Vec<Holding>]) -> Result<Vec<Vec<bool>>> {
    check_descriptions(holdings)?;
    let targets = holdings.iter().map(|own| tie_targets(own)).collect::<Result<Vec<_>>>()?;
    let mut masks: Vec<Vec<bool>> = holdings.iter().map(|own| vec![false; own.len()]).collect();
    let mut plan = Plan::new(holdings, &targets);
    plan.assign(&mut masks);
    for (mask, targets) in masks.iter_mut().zip(&targets) {
        for (tie, target) in targets.iter().enumerate() {
            mask[tie] = mask[target.unwrap_or(tie)];
        }
    }
    describe_all(holdings, &targets, &mut masks);
    Ok(masks)
}

/// Refuses a name that a rank has twice, and descriptions that differ between ranks.
fn check_descriptions(holdings: &[Vec<Holding>]) -> Result<()> {
    let mut known: HashMap<&str, (usize, usize, &Holding)> = HashMap::new();
    for (rank, own) in holdings.iter().enumerate() {
        for holding in own {
            match known.entry(&holding.name) {
                Place::Vacant(place) => {
                    place.insert((rank, rank, holding));
                }
                Place::Occupied(mut place) => {
                    let (first, latest, other) = place.get_mut();
                    if *latest == rank {
                        let reason = format!("rank {rank} has two tensors of this name");
                        return Err(Error::invalid(format!("tensor `{}`", holding.name), reason));
                    }
                    *latest = rank;
                    if let Some((field, expected, found)) = difference(other, holding) {
                        let (left, right) = ((*first as u32, &*expected), (rank as u32, &*found));
                        return Err(disagreement(&holding.name, field, left, right));
                    }
                }
            }
        }
    }
    Ok(())
}

/// The first field in which two descriptions of one entry differ, and both values.
fn difference(left: &Holding, right: &Holding) -> Option<(&'static str, String, String)> {
    let dtype = |dtype: Dtype| dtype.name().to_owned();
    let tie = |holding: &Holding| {
        holding.tied_to.as_ref().map_or_else(|| "none".to_owned(), |target| format!("to `{target}`"))
    };
    if left.dtype != right.dtype {
        return Some(("dtype", dtype(left.dtype), dtype(right.dtype)));
    }
    if left.stored_dtype != right.stored_dtype {
        return Some(("stored dtype", dtype(left.stored_dtype), dtype(right.stored_dtype)));
    }
    if left.shape != right.shape {
        return Some(("shape", format!("{:?}", left.shape), format!("{:?}", right.shape)));
    }
    (left.tied_to != right.tied_to).then(|| ("tie", tie(left), tie(right)))
}

/// By holding of a rank, the position of what it is tied to.
fn tie_targets(own: &[Holding]) -> Result<Vec<Option<usize>>> {
    if own.iter().all(|holding| holding.tied_to.is_none()) {
        return Ok(vec![None; own.len()]);
    }
    let positions: HashMap<&str, usize> =
        own.iter().enumerate().map(|(index, holding)| (holding.name.as_str(), index)).collect();
    own.iter()
        .map(|holding| {
            let Some(name) = &holding.tied_to else { return Ok(None) };
            let found = positions.get(name.as_str()).filter(|&&target| own[target].tied_to.is_none());
            found.map(|&target| Some(target)).ok_or_else(|| {
                let reason = format!("`{name}` is no tensor of this rank, or a tie itself");
                Error::invalid(format!("tie of `{}`", holding.name), reason)
            })
        })
        .collect()
}

/// A region of an entry that ranks hold.
struct Slot<'a> {
    holding: &'a Holding,
    /// Rank, and position among its holdings; ascending.
    holders: Vec<(usize, usize)>,
}

impl Slot<'_> {
    fn position(&self) -> (&str, &[u64], &[u64]) {
        let Holding { name, region, .. } = self.holding;
        (name, &region.offsets, &region.lengths)
    }

    /// True where the same ranks hold the other region.
    fn holders_are(&self, other: &Self) -> bool {
        let ranks = |slot: &Self| slot.holders.iter().map(|holder| holder.0).collect::<Vec<_>>();
        ranks(self) == ranks(other)
    }
}

/// What has to be written, and by whom it can be.
struct Plan<'a> {
    slots: Vec<Slot<'a>>,
    /// Ties by (rank, position) of their target.
    tie_counts: HashMap<(usize, usize), usize>,
    written_bytes: Vec<u64>,
}

impl<'a> Plan<'a> {
    fn new(holdings: &'a [Vec<Holding>], targets: &[Vec<Option<usize>>]) -> Self {
        let mut slots: Vec<Slot<'a>> = Vec::new();
        let mut known: HashMap<(&str, &Region), usize> = HashMap::new();
        let mut tie_counts = HashMap::new();
        for (rank, (own, targets)) in holdings.iter().zip(targets).enumerate() {
            for (index, (holding, target)) in own.iter().zip(targets).enumerate() {
                if let Some(target) = target {
                    *tie_counts.entry((rank, *target)).or_insert(0) += 1;
                } else if !holding.is_empty() {
                    let slot = *known.entry((&holding.name, &holding.region)).or_insert_with(|| {
                        slots.push(Slot { holding, holders: Vec::new() });
                        slots.len() - 1
                    });
                    slots[slot].holders.push((rank, index));
                }
            }
        }
        Self { slots, tie_counts, written_bytes: vec![0; holdings.len()] }
    }

    fn assign(&mut self, masks: &mut [Vec<bool>]) {
        let (single, mut shared): (Vec<Slot<'_>>, Vec<Slot<'_>>) =
            std::mem::take(&mut self.slots).into_iter().partition(|slot| slot.holders.len() == 1);
        for slot in &single {
            self.give(slot, slot.holders[0].0, masks);
        }
        for slot in &mut shared {
            self.keep_ties(slot);
        }
        // Not by the order of any rank's holdings.
        shared.sort_unstable_by(|left, right| left.position().cmp(&right.position()));
        let mut units = units(shared);
        units.sort_by_cached_key(|unit| {
            let bytes = unit.iter().fold(0, |sum: u64, slot| sum.saturating_add(slot.holding.stored_bytes()));
            std::cmp::Reverse(bytes)
        });
        for unit in &units {
            let ranks = unit[0].holders.iter().map(|&(rank, _)| rank);
            let Some(writer) = ranks.min_by_key(|&rank| (self.written_bytes[rank], rank)) else { continue };
            for slot in unit {
                self.give(slot, writer, masks);
            }
        }
    }

    /// Leaves only the holders that have the most ties to this region, so that one write serves them all.
    fn keep_ties(&self, slot: &mut Slot<'_>) {
        if self.tie_counts.is_empty() {
            return;
        }
        let count = |holder: &(usize, usize)| self.tie_counts.get(holder).copied().unwrap_or(0);
        let most = slot.holders.iter().map(count).max().unwrap_or(0);
        slot.holders.retain(|holder| count(holder) == most);
    }

    fn give(&mut self, slot: &Slot<'_>, writer: usize, masks: &mut [Vec<bool>]) {
        if let Some(&(rank, index)) = slot.holders.iter().find(|(rank, _)| *rank == writer) {
            masks[rank][index] = true;
            let bytes = slot.holding.stored_bytes();
            self.written_bytes[rank] = self.written_bytes[rank].saturating_add(bytes);
        }
    }
}

/// What follows the first dot of narrow floats' names: the first slot with it, and its dtype.
type Stems<'a> = HashMap<&'a str, (usize, Dtype)>;

/// Puts regions that one rank has to write together: floats and what may be their narrower copies.
///
/// Whether a float really is another one rounded is known only when the bytes are. Here names decide: what
/// follows the first dot of the narrow one's name stands, as whole parts, in the name of the wide one, as in
/// `model.layers.0.weight` and `optimizer.state.layers.0.weight.master`.
fn units(slots: Vec<Slot<'_>>) -> Vec<Vec<Slot<'_>>> {
    let uncast = |slot: &Slot<'_>| slot.holding.dtype == slot.holding.stored_dtype;
    let is_narrow = |slot: &Slot<'_>| uncast(slot) && Dtype::Float64.narrows_to(slot.holding.dtype);
    let mut narrow: HashMap<(&[u64], &Region), Stems<'_>> = HashMap::new();
    let mut unit_of: Vec<usize> = (0..slots.len()).collect();
    for (index, slot) in slots.iter().enumerate().filter(|(_, slot)| is_narrow(slot)) {
        let Holding { name, shape, region, dtype, .. } = slot.holding;
        let stem = name.split_once('.').map_or(name.as_str(), |(_, stem)| stem);
        let first = narrow.entry((shape, region)).or_default().entry(stem).or_insert((index, *dtype));
        let is_with_it = slots[first.0].holders_are(slot) && first.1 == *dtype;
        unit_of[index] = if is_with_it { first.0 } else { index };
    }
    for (index, slot) in slots.iter().enumerate().filter(|(_, slot)| uncast(slot)) {
        let Holding { name, shape, region, dtype, .. } = slot.holding;
        let Some(stems) = narrow.get(&(shape.as_slice(), region)) else { continue };
        // A float32 is the narrower one of a float64, and finds itself among the stems.
        let is_copy = |(first, narrower): &&(usize, Dtype)| {
            dtype.narrows_to(*narrower) && slots[*first].holders_are(slot)
        };
        if let Some((first, _)) = parts_of(name).find_map(|part| stems.get(part).filter(is_copy)) {
            unit_of[index] = *first;
        }
    }
    let mut units: Vec<Vec<Slot<'_>>> = slots.iter().map(|_| Vec::new()).collect();
    for (slot, unit) in slots.into_iter().zip(unit_of) {
        units[unit].push(slot);
    }
    units.retain(|unit| !unit.is_empty());
    units
}

/// Every run of whole parts of a name, the longest from each dot first.
fn parts_of(name: &str) -> impl Iterator<Item = &str> {
    let ends = |start: usize| {
        let rest = &name[start..];
        std::iter::once(rest).chain(rest.rmatch_indices('.').map(move |(end, _)| &rest[..end]))
    };
    std::iter::once(0).chain(name.match_indices('.').map(|(dot, _)| dot + 1)).flat_map(ends)
}

/// Lets the first rank that has it write an entry that nobody would write: one without elements, or a tie
/// that stands on other ranks than those that write its target.
fn describe_all(holdings: &[Vec<Holding>], targets: &[Vec<Option<usize>>], masks: &mut [Vec<bool>]) {
    let mut described: HashMap<&str, bool> = HashMap::new();
    for (own, mask) in holdings.iter().zip(&*masks) {
        for (holding, is_written) in own.iter().zip(mask) {
            *described.entry(&holding.name).or_insert(false) |= is_written;
        }
    }
    if described.values().all(|is_described| *is_described) {
        return;
    }
    for (rank, own) in holdings.iter().enumerate() {
        for (index, holding) in own.iter().enumerate() {
            if described.get(holding.name.as_str()) == Some(&false) {
                let target = targets[rank][index].unwrap_or(index);
                for (tie, _) in targets[rank].iter().enumerate().filter(|(_, to)| **to == Some(target)) {
                    masks[rank][tie] = true;
                    described.insert(&own[tie].name, true);
                }
                masks[rank][target] = true;
                described.insert(&own[target].name, true);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn holding(name: &str, shape: &[u64]) -> Holding {
        Holding {
            name: name.to_owned(),
            dtype: Dtype::Float32,
            stored_dtype: Dtype::Float32,
            shape: shape.to_vec(),
            region: Region::whole(shape),
            tied_to: None,
        }
    }

    fn rows(name: &str, shape: &[u64], rows: std::ops::Range<u64>) -> Holding {
        let mut found = holding(name, shape);
        found.region.offsets[0] = rows.start;
        found.region.lengths[0] = rows.end - rows.start;
        found
    }

    fn tie(name: &str, target: &Holding) -> Holding {
        Holding { name: name.to_owned(), tied_to: Some(target.name.clone()), ..target.clone() }
    }

    /// Names that each rank writes.
    fn written(holdings: &[Vec<Holding>]) -> Vec<Vec<String>> {
        let masks = plan_writers(holdings).unwrap();
        assert_eq!(masks.len(), holdings.len());
        let names = |(own, mask): (&Vec<Holding>, Vec<bool>)| {
            assert_eq!(own.len(), mask.len());
            let written = own.iter().zip(mask).filter(|(_, writes)| *writes);
            written.map(|(holding, _)| holding.name.clone()).collect()
        };
        holdings.iter().zip(masks).map(names).collect()
    }

    #[test]
    fn what_one_rank_holds_it_writes() {
        let shard = |rank: u64| rows("w", &[6, 2], rank * 3..rank * 3 + 3);
        let own = [vec![shard(0), holding("stage.0", &[4])], vec![shard(1), holding("stage.1", &[4])]];
        assert_eq!(written(&own), [["w", "stage.0"], ["w", "stage.1"]]);
        assert!(plan_writers(&[]).unwrap().is_empty());
    }

    #[test]
    fn replicas_go_largest_first_to_the_rank_with_the_fewest_bytes() {
        let replicas = || {
            [("a", 50), ("b", 40), ("c", 30), ("d", 20), ("e", 10)].map(|(name, size)| holding(name, &[size]))
        };
        let own = [replicas().to_vec(), replicas().to_vec()];
        assert_eq!(written(&own), [["a", "d", "e"].as_slice(), &["b", "c"]]);
        // What a rank alone holds counts.
        let [first, mut second] = own;
        second.push(holding("alone", &[1_000]));
        assert_eq!(written(&[first, second]), [["a", "b", "c", "d", "e"].as_slice(), &["alone"]]);
        // The size that counts is the stored one.
        let small = Holding { stored_dtype: Dtype::Float8E5m2, ..holding("a", &[50]) };
        let own = [vec![small.clone(), holding("b", &[40])], vec![small, holding("b", &[40])]];
        assert_eq!(written(&own), [["b"], ["a"]]);
    }

    #[test]
    fn the_order_of_a_rank_does_not_count() {
        let names = ["model.a", "opt.state.a.m", "model.b", "opt.state.b.m", "x", "y", "z"];
        let own: Vec<Holding> = names.iter().map(|name| holding(name, &[8])).collect();
        let mut reversed = own.clone();
        reversed.reverse();
        let sorted = |ranks: [&Vec<Holding>; 2]| {
            let mut found = written(&ranks.map(Clone::clone));
            for names in &mut found {
                names.sort();
            }
            found
        };
        let expected = sorted([&own, &own]);
        assert_eq!(expected.concat().len(), names.len());
        assert_eq!(sorted([&own, &reversed]), expected);
        assert_eq!(sorted([&reversed, &own]), expected);
    }

    #[test]
    fn a_tie_is_written_with_its_target() {
        let (large, target) = (holding("large", &[9]), holding("embed", &[5]));
        let all = || vec![large.clone(), target.clone(), tie("head", &target)];
        assert_eq!(written(&[all(), all()]), [["large"].as_slice(), &["embed", "head"]]);
        // A rank without the tie is not asked.
        let without = vec![target.clone()];
        assert_eq!(written(&[without.clone(), all()]), [[].as_slice(), &["large", "embed", "head"]]);
        // Ties on different ranks: both write the target, so that each tie is described.
        let (left, right) =
            (vec![target.clone(), tie("l", &target)], vec![target.clone(), tie("r", &target)]);
        assert_eq!(written(&[left, right]), [["embed", "l"], ["embed", "r"]]);
    }

    #[test]
    fn a_copy_in_a_narrower_float_is_written_with_its_master() {
        let narrow = |name: &str| Holding {
            dtype: Dtype::Bfloat16,
            stored_dtype: Dtype::Bfloat16,
            ..holding(name, &[64, 64])
        };
        let layer = |index: u32| {
            [
                narrow(&format!("model.layers.{index}.weight")),
                holding(&format!("optimizer.state.layers.{index}.weight.master"), &[64, 64]),
                holding(&format!("optimizer.state.layers.{index}.weight.step"), &[]),
            ]
        };
        // By sizes alone, `other` would come between the masters and their copies.
        let own = || [layer(0).as_slice(), &layer(1), &[holding("other", &[3_000])]].concat();
        let names = written(&[own(), own()]);
        for (rank, index) in [(0, 0), (1, 1)] {
            let [narrow, master, _] = layer(index);
            assert!(names[rank].contains(&narrow.name), "{names:?}");
            assert!(names[rank].contains(&master.name), "{names:?}");
        }
        // Not where a cast makes the bytes others.
        let cast = |mut holding: Holding| {
            holding.stored_dtype = Dtype::Bfloat16;
            holding
        };
        let own = || vec![narrow("model.w"), cast(holding("opt.w.master", &[64, 64]))];
        assert_eq!(written(&[own(), own()]), [["model.w"], ["opt.w.master"]]);
    }

    #[test]
    fn what_has_no_elements_is_described_once() {
        let empty = || vec![holding("empty", &[0, 3]), holding("w", &[1])];
        assert_eq!(written(&[empty(), empty()]), [["empty", "w"].as_slice(), &[]]);
        // A rank with an empty share of what others hold writes nothing of it.
        let own = [vec![rows("w", &[2], 2..2)], vec![rows("w", &[2], 0..2)], vec![rows("w", &[2], 2..2)]];
        assert_eq!(written(&own), [[].as_slice(), &["w"], &[]]);
        let target = holding("empty", &[0]);
        let own = [vec![target.clone()], vec![target.clone(), tie("tie", &target)]];
        assert_eq!(written(&own), [["empty"].as_slice(), &["empty", "tie"]]);
    }

    #[test]
    fn descriptions_that_differ_name_the_key_and_both_ranks() {
        let known = holding("w", &[4]);
        let bfloat16 = Dtype::Bfloat16;
        for (other, field, found) in [
            (Holding { dtype: bfloat16, ..known.clone() }, "dtype", "float32 and bfloat16"),
            (Holding { stored_dtype: bfloat16, ..known.clone() }, "stored dtype", "float32 and bfloat16"),
            (holding("w", &[2, 2]), "shape", "[4] and [2, 2]"),
            (tie("w", &holding("v", &[4])), "tie", "none and to `v`"),
        ] {
            let own = [vec![], vec![known.clone()], vec![known.clone()], vec![holding("v", &[4]), other]];
            let error = plan_writers(&own).unwrap_err();
            assert!(
                matches!(&error, Error::Disagreement { name, field: at, ranks: (1, 3), left, right }
                    if name == "w" && *at == field && format!("{left} and {right}") == found),
                "{error:?}"
            );
        }
    }

    #[test]
    fn a_name_twice_and_a_tie_to_nothing_are_refused() {
        let known = holding("w", &[4]);
        let twice = plan_writers(&[vec![], vec![known.clone(), known.clone()]]).unwrap_err();
        assert!(
            matches!(&twice, Error::InvalidInput { what, reason } if what == "tensor `w`"
                && reason == "rank 1 has two tensors of this name"),
            "{twice:?}"
        );
        let lost = plan_writers(&[vec![tie("t", &known)]]).unwrap_err();
        let chain = plan_writers(&[vec![known.clone(), tie("t", &known), tie("u", &tie("t", &known))]]);
        for error in [lost, chain.unwrap_err()] {
            assert!(
                matches!(&error, Error::InvalidInput { what, .. } if what.starts_with("tie of")),
                "{error:?}"
            );
        }
    }

    proptest! {
        /// Each region with elements has exactly one writer, who holds it; nobody has more than the largest
        /// region above anybody else, where all hold all.
        #[test]
        fn each_region_is_written_once_and_the_load_is_even(
            sizes in prop::collection::vec(0_u64..100, 0..20), world_size in 1_usize..6,
        ) {
            let own: Vec<Holding> = sizes.iter().enumerate().map(|(index, &size)| holding(&format!("t{index}"), &[size])).collect();
            let masks = plan_writers(&vec![own.clone(); world_size]).unwrap();
            for index in 0..own.len() {
                prop_assert_eq!(masks.iter().filter(|mask| mask[index]).count(), 1);
            }
            let bytes = |mask: &Vec<bool>| -> u64 {
                own.iter().zip(mask).filter(|(_, writes)| **writes).map(|(held, _)| held.stored_bytes()).sum()
            };
            let loads: Vec<u64> = masks.iter().map(bytes).collect();
            let largest = own.iter().map(Holding::stored_bytes).max().unwrap_or(0);
            prop_assert!(loads.iter().max().unwrap() - loads.iter().min().unwrap() <= largest);
        }
    }
}
