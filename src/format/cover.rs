//! Do these shards cover a tensor, each element exactly once? Exact, and never quadratic.
//!
//! The number of shards at each element is a function that is constant on boxes. Its differences along
//! a dimension are nonzero only where a shard starts or ends, and the shards cover exactly if all those
//! differences equal the differences of the one region that is the whole tensor. So: count the whole
//! once negatively, group starts and ends by their coordinate in one dimension, and ask the same of each
//! group in the remaining dimensions. With `n` shards and `k` dimensions in which some shard is shorter
//! than the tensor this sorts at most `n * 2^k` events; `k` is limited ([`CUT_DIMENSION_LIMIT`]), and is
//! 1 to 3 in practice. Memory is linear in `n`.

use super::limits::CUT_DIMENSION_LIMIT;
use super::model::Shard;

/// What [`check_cover`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Cover {
    /// Each element lies in exactly one shard.
    Exact,
    /// The first element, in lexicographic order, that lies in another number of shards than one.
    Wrong {
        /// Index in each dimension.
        element: Vec<u64>,
        /// Number of shards it lies in.
        shard_count: i64,
    },
    /// The shards cut more dimensions than [`CUT_DIMENSION_LIMIT`].
    TooManyCutDimensions {
        /// How many they cut.
        cut_dimension_count: usize,
    },
}

/// Counts how often shards cover the elements of a tensor of this shape.
///
/// Every shard must lie inside the shape and have as many dimensions.
#[must_use]
pub fn check_cover(shape: &[u64], shards: &[Shard]) -> Cover {
    let is_cut = |dimension: usize, length: u64| {
        shards.iter().any(|shard| shard.lengths.get(dimension) != Some(&length))
    };
    let cut_dimensions: Vec<usize> = shape
        .iter()
        .enumerate()
        .filter(|&(dimension, &length)| is_cut(dimension, length))
        .map(|(dimension, _)| dimension)
        .collect();
    if cut_dimensions.len() > CUT_DIMENSION_LIMIT {
        return Cover::TooManyCutDimensions { cut_dimension_count: cut_dimensions.len() };
    }
    let origin = vec![0; shape.len()];
    let mut regions: Vec<Region<'_>> = Vec::with_capacity(shards.len().saturating_add(1));
    regions.push(Region { offsets: &origin, lengths: shape, count: -1 });
    regions.extend(shards.iter().map(|shard| Region {
        offsets: &shard.offsets,
        lengths: &shard.lengths,
        count: 1,
    }));
    let mut corner = Vec::new();
    match first_surplus(&regions, &cut_dimensions, &mut corner) {
        None => Cover::Exact,
        Some(surplus) => {
            let mut element = origin;
            for (&dimension, &coordinate) in cut_dimensions.iter().zip(&corner) {
                if let Some(index) = element.get_mut(dimension) {
                    *index = coordinate;
                }
            }
            Cover::Wrong { element, shard_count: surplus.saturating_add(1) }
        }
    }
}

/// A region that is counted `count` times.
#[derive(Clone, Copy)]
struct Region<'a> {
    offsets: &'a [u64],
    lengths: &'a [u64],
    count: i64,
}

impl Region<'_> {
    fn start(&self, dimension: usize) -> u64 {
        self.offsets.get(dimension).copied().unwrap_or(0)
    }

    fn end(&self, dimension: usize) -> u64 {
        self.start(dimension).saturating_add(self.lengths.get(dimension).copied().unwrap_or(0))
    }
}

/// The sum of all counts at the first point, in lexicographic order, where it isn't zero; its coordinates
/// are left in `corner`. `None` where it is zero everywhere.
fn first_surplus(regions: &[Region<'_>], dimensions: &[usize], corner: &mut Vec<u64>) -> Option<i64> {
    let Some((&dimension, rest)) = dimensions.split_first() else {
        let surplus = regions.iter().fold(0_i64, |sum, region| sum.saturating_add(region.count));
        return (surplus != 0).then_some(surplus);
    };
    let mut events: Vec<(u64, Region<'_>)> = Vec::with_capacity(regions.len().saturating_mul(2));
    for region in regions {
        events.push((region.start(dimension), *region));
        events.push((region.end(dimension), Region { count: region.count.saturating_neg(), ..*region }));
    }
    events.sort_unstable_by_key(|event| event.0);
    let mut group = Vec::new();
    for equal in events.chunk_by(|left, right| left.0 == right.0) {
        group.clear();
        group.extend(equal.iter().map(|event| event.1));
        corner.extend(equal.first().map(|event| event.0));
        if let Some(surplus) = first_surplus(&group, rest, corner) {
            return Some(surplus);
        }
        corner.pop();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(offsets: &[u64], lengths: &[u64]) -> Shard {
        Shard { offsets: offsets.to_vec(), lengths: lengths.to_vec(), scale_log2: 0, chunks: Vec::new() }
    }

    #[test]
    fn one_shard_covers_a_scalar_and_two_cover_it_twice() {
        assert_eq!(check_cover(&[], &[shard(&[], &[])]), Cover::Exact);
        assert_eq!(
            check_cover(&[], &[shard(&[], &[]), shard(&[], &[])]),
            Cover::Wrong { element: vec![], shard_count: 2 }
        );
        assert_eq!(check_cover(&[], &[]), Cover::Wrong { element: vec![], shard_count: 0 });
    }

    #[test]
    fn rows_of_unequal_length_cover_exactly() {
        assert_eq!(check_cover(&[10, 4], &[shard(&[0, 0], &[3, 4]), shard(&[3, 0], &[7, 4])]), Cover::Exact);
    }

    #[test]
    fn a_gap_is_found_at_its_first_element() {
        assert_eq!(
            check_cover(&[10, 4], &[shard(&[0, 0], &[3, 4]), shard(&[4, 0], &[6, 4])]),
            Cover::Wrong { element: vec![3, 0], shard_count: 0 }
        );
    }

    #[test]
    fn an_overlap_is_found_at_its_first_element() {
        assert_eq!(
            check_cover(&[4, 10], &[shard(&[0, 0], &[4, 6]), shard(&[0, 5], &[4, 5])]),
            Cover::Wrong { element: vec![0, 5], shard_count: 2 }
        );
    }

    #[test]
    fn a_gap_and_an_overlap_of_the_same_volume_do_not_cancel() {
        let shards = [
            shard(&[0, 0], &[2, 2]),
            shard(&[0, 2], &[2, 2]),
            shard(&[1, 1], &[2, 2]),
            shard(&[2, 2], &[2, 2]),
        ];
        assert_eq!(check_cover(&[4, 4], &shards), Cover::Wrong { element: vec![1, 1], shard_count: 2 });
    }

    #[test]
    fn a_pinwheel_that_no_straight_cut_divides_covers_exactly() {
        let shards = [
            shard(&[0, 0], &[1, 2]),
            shard(&[0, 2], &[2, 1]),
            shard(&[1, 0], &[2, 1]),
            shard(&[1, 1], &[1, 1]),
            shard(&[2, 1], &[1, 2]),
        ];
        assert_eq!(check_cover(&[3, 3], &shards), Cover::Exact);
    }

    #[test]
    fn a_missing_last_shard_is_a_gap_at_its_offset() {
        let shards: Vec<Shard> = (0..7).map(|row| shard(&[row, 0], &[1, 5])).collect();
        assert_eq!(check_cover(&[8, 5], &shards), Cover::Wrong { element: vec![7, 0], shard_count: 0 });
    }

    #[test]
    fn a_grid_of_many_shards_covers_exactly() {
        let shards: Vec<Shard> = (0..200)
            .flat_map(|row| (0..200).map(move |column| shard(&[row, 0, column], &[1, 9, 1])))
            .collect();
        assert_eq!(check_cover(&[200, 9, 200], &shards), Cover::Exact);
    }

    #[test]
    fn nine_cut_dimensions_are_too_many() {
        let shape = [2_u64; 9];
        assert_eq!(
            check_cover(&shape, &[shard(&[0; 9], &[1; 9])]),
            Cover::TooManyCutDimensions { cut_dimension_count: 9 }
        );
    }

    /// The same answer as counting element by element, over every pair of intervals of a small tensor.
    #[test]
    fn the_answer_equals_counting() {
        let intervals: Vec<(u64, u64)> =
            (0..3).flat_map(|start| (1..=3 - start).map(move |length| (start, length))).collect();
        let boxes: Vec<Shard> = intervals
            .iter()
            .flat_map(|&(row, rows)| {
                intervals.iter().map(move |&(column, columns)| shard(&[row, column], &[rows, columns]))
            })
            .collect();
        for first in &boxes {
            for second in &boxes {
                let shards = [first.clone(), second.clone()];
                let holds = |shard: &Shard, element: [u64; 2]| {
                    (0..2).all(|axis| {
                        (shard.offsets[axis]..shard.offsets[axis] + shard.lengths[axis])
                            .contains(&element[axis])
                    })
                };
                let wrong = (0..9_u64).map(|index| [index / 3, index % 3]).find_map(|element| {
                    let shard_count: i64 = shards.iter().map(|shard| i64::from(holds(shard, element))).sum();
                    (shard_count != 1).then(|| Cover::Wrong { element: element.to_vec(), shard_count })
                });
                assert_eq!(check_cover(&[3, 3], &shards), wrong.unwrap_or(Cover::Exact), "{shards:?}");
            }
        }
    }
}
