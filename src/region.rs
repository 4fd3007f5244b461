//! Geometry of hyper-rectangles: which bytes of a shard belong where in a wanted region.
//!
//! Pure functions; this is all that resharding is. Lengths are in elements until the last step.

use crate::tensor::Region;

/// A run of bytes that is consecutive both in a shard and in the wanted region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Offset from the first byte of the shard's row-major raw bytes.
    pub source_offset_bytes: u64,
    /// Offset from the first byte of the wanted region's row-major raw bytes.
    pub target_offset_bytes: u64,
    /// Bytes of the run, never 0.
    pub length_bytes: u64,
}

/// The common part of two regions of the same tensor, or `None` where they share no element.
#[must_use]
pub fn intersect(left: &Region, right: &Region) -> Option<Region> {
    let mut common = Region { offsets: Vec::new(), lengths: Vec::new() };
    for dimension in 0..left.offsets.len() {
        let start = left.offsets[dimension].max(right.offsets[dimension]);
        let left_end = left.offsets[dimension] + left.lengths[dimension];
        let right_end = right.offsets[dimension] + right.lengths[dimension];
        let end = left_end.min(right_end);
        if start >= end {
            return None;
        }
        common.offsets.push(start);
        common.lengths.push(end - start);
    }
    Some(common)
}

/// Byte runs that copy what `shard` and `wanted` have in common from the one to the other.
///
/// Both are regions of one tensor with elements of `element_bytes`; both lie inside its shape (checked
/// when the manifest was decoded and when the request was made). Runs are sorted by source offset;
/// contiguous rows are merged, so two equal regions give a single run.
#[must_use]
pub fn runs(shard: &Region, wanted: &Region, element_bytes: u64) -> Vec<Run> {
    let Some(common) = intersect(shard, wanted) else { return Vec::new() };
    let rank = common.lengths.len();
    // Dimensions from `split` on are whole in both, so that one index of dimension `split - 1` after
    // the other is one run.
    let mut split = rank;
    let mut block_elements = 1;
    while split > 0 {
        block_elements *= common.lengths[split - 1];
        split -= 1;
        if common.lengths[split] != shard.lengths[split] || common.lengths[split] != wanted.lengths[split] {
            break;
        }
    }
    let strides = |region: &Region| -> Vec<u64> {
        let mut strides = vec![1; rank];
        for dimension in (1..rank).rev() {
            strides[dimension - 1] = strides[dimension] * region.lengths[dimension];
        }
        strides
    };
    let (shard_strides, wanted_strides) = (strides(shard), strides(wanted));
    let offset = |region: &Region, strides: &[u64], index: &[u64]| -> u64 {
        (0..rank)
            .map(|dimension| {
                let inner = if dimension < split { index[dimension] } else { 0 };
                (common.offsets[dimension] + inner - region.offsets[dimension]) * strides[dimension]
            })
            .sum()
    };
    let mut runs = Vec::new();
    let mut index = vec![0; split];
    loop {
        runs.push(Run {
            source_offset_bytes: offset(shard, &shard_strides, &index) * element_bytes,
            target_offset_bytes: offset(wanted, &wanted_strides, &index) * element_bytes,
            length_bytes: block_elements * element_bytes,
        });
        let mut dimension = split;
        loop {
            if dimension == 0 {
                return runs;
            }
            dimension -= 1;
            index[dimension] += 1;
            if index[dimension] < common.lengths[dimension] {
                break;
            }
            index[dimension] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(offsets: &[u64], lengths: &[u64]) -> Region {
        Region { offsets: offsets.to_vec(), lengths: lengths.to_vec() }
    }

    #[test]
    fn equal_regions_are_one_run() {
        let whole = Region::whole(&[3, 4, 5]);
        let expected = Run { source_offset_bytes: 0, target_offset_bytes: 0, length_bytes: 240 };
        assert_eq!(runs(&whole, &whole, 4), [expected]);
    }

    #[test]
    fn scalars_are_one_element() {
        let whole = Region::whole(&[]);
        let expected = Run { source_offset_bytes: 0, target_offset_bytes: 0, length_bytes: 8 };
        assert_eq!(runs(&whole, &whole, 8), [expected]);
    }

    #[test]
    fn rows_of_a_matrix_are_one_run() {
        let shard = region(&[2, 0], &[2, 3]);
        let wanted = region(&[0, 0], &[4, 3]);
        let expected = Run { source_offset_bytes: 0, target_offset_bytes: 6 * 4, length_bytes: 6 * 4 };
        assert_eq!(runs(&shard, &wanted, 4), [expected]);
    }

    #[test]
    fn columns_of_a_matrix_are_one_run_a_row() {
        let shard = region(&[0, 1], &[2, 2]);
        let wanted = region(&[0, 0], &[2, 4]);
        assert_eq!(
            runs(&shard, &wanted, 1),
            [
                Run { source_offset_bytes: 0, target_offset_bytes: 1, length_bytes: 2 },
                Run { source_offset_bytes: 2, target_offset_bytes: 5, length_bytes: 2 },
            ]
        );
    }

    #[test]
    fn regions_that_only_touch_have_nothing_in_common() {
        assert!(runs(&region(&[0], &[3]), &region(&[3], &[2]), 2).is_empty());
    }

    /// Every pair of regions of a 3 x 3 x 2 tensor against copying element by element.
    #[test]
    fn runs_equal_a_naive_copy() {
        let shape = [3_u64, 3, 2];
        let mut regions = Vec::new();
        for first in 0..3 {
            for second in 0..3 {
                for third in 0..2 {
                    for lengths in [[1, 1, 1], [2, 1, 2], [1, 3, 2], [3, 2, 1], [3, 3, 2], [2, 2, 1]] {
                        let candidate = region(&[first, second, third], &lengths);
                        if candidate.fits(&shape) {
                            regions.push(candidate);
                        }
                    }
                }
            }
        }
        let elements = |region: &Region| -> Vec<u64> {
            let mut ids = Vec::new();
            for a in 0..region.lengths[0] {
                for b in 0..region.lengths[1] {
                    for c in 0..region.lengths[2] {
                        let at = [region.offsets[0] + a, region.offsets[1] + b, region.offsets[2] + c];
                        ids.push(at[0] * 6 + at[1] * 2 + at[2]);
                    }
                }
            }
            ids
        };
        assert!(regions.len() > 20);
        for shard in &regions {
            for wanted in &regions {
                let source = elements(shard);
                let target = elements(wanted);
                let mut found = vec![None; target.len()];
                for run in runs(shard, wanted, 1) {
                    for step in 0..run.length_bytes {
                        let to = (run.target_offset_bytes + step) as usize;
                        assert_eq!(found[to], None, "no byte is written twice");
                        found[to] = Some(source[(run.source_offset_bytes + step) as usize]);
                    }
                }
                let expected: Vec<_> = target.iter().map(|id| source.contains(id).then_some(*id)).collect();
                assert_eq!(found, expected, "{shard:?} into {wanted:?}");
            }
        }
    }
}
