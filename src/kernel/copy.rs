//! The copy that callers wait for.
//!
//! Staging writes hundreds of megabytes that nobody reads soon. Ordinary stores first read each target
//! line into the cache; non-temporal stores don't, which saves a third of the memory traffic.

/// Copies below this length use the ordinary path: their bytes fit the cache.
const STREAM_FROM_BYTES: usize = 64 * 1024;

/// Bytes of a page of memory.
const PAGE_BYTES: usize = 4096;
/// Pages that are read in turn.
const GROUP_BYTES: usize = 4 * PAGE_BYTES;
/// Bytes of one page before the next one's turn: two cache lines.
const LINES_BYTES: usize = 128;

/// Copies `source` over `target`, past the cache where that pays.
///
/// # Panics
/// If the lengths differ, as `copy_from_slice` does.
pub fn copy(target: &mut [u8], source: &[u8]) {
    assert_eq!(target.len(), source.len(), "a copy needs equal lengths");
    #[cfg(target_arch = "x86_64")]
    if source.len() >= STREAM_FROM_BYTES && is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was detected on this machine in the line above.
        unsafe { stream_avx2(target, source) };
        return;
    }
    target.copy_from_slice(source);
}

/// Copies with 32-byte non-temporal stores, from four pages in turn: memory answers requests to several
/// pages at once, so this is faster than one page after the other.
///
/// # Safety
/// The processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stream_avx2(target: &mut [u8], source: &[u8]) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch, _mm_sfence};

    // To whole cache lines: a line that is written half is read before the other half comes.
    let head = target.as_ptr().align_offset(64).min(target.len());
    let (target_head, target_rest) = target.split_at_mut(head);
    let (source_head, source_rest) = source.split_at(head);
    target_head.copy_from_slice(source_head);

    let (target_groups, target_tail) = target_rest.as_chunks_mut::<GROUP_BYTES>();
    let (source_groups, source_tail) = source_rest.as_chunks::<GROUP_BYTES>();
    for (target, source) in target_groups.iter_mut().zip(source_groups) {
        for line in (0..PAGE_BYTES).step_by(LINES_BYTES) {
            for page in (0..GROUP_BYTES).step_by(PAGE_BYTES) {
                let offset = page + line;
                let ahead = source.as_ptr().wrapping_add(GROUP_BYTES + offset).cast::<i8>();
                // SAFETY: a prefetch never faults, wherever it points. `offset + 128 <= 4 x 4096`, the
                // length of both arrays, which don't overlap because one is borrowed mutably;
                // `target` is 64-byte aligned because the head was cut off and groups are multiples of 64.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(ahead);
                    _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(64));
                    stream_lines(target.as_mut_ptr().add(offset), source.as_ptr().add(offset));
                }
            }
        }
    }
    // Non-temporal stores are weakly ordered; another thread reads these bytes next.
    _mm_sfence();
    target_tail.copy_from_slice(source_tail);
}

/// Copies 128 bytes past the cache.
///
/// # Safety
/// The processor must have AVX2; both pointers are good for 128 bytes that don't overlap, and `to` is aligned
/// to 32 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[expect(clippy::cast_ptr_alignment, reason = "loads may be unaligned; stores are aligned by the caller")]
unsafe fn stream_lines(to: *mut u8, from: *const u8) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    // SAFETY: the caller promises 128 bytes behind each pointer and the alignment of `to`.
    unsafe {
        let (from, to) = (from.cast::<__m256i>(), to.cast::<__m256i>());
        let first = _mm256_loadu_si256(from);
        let second = _mm256_loadu_si256(from.add(1));
        let third = _mm256_loadu_si256(from.add(2));
        let fourth = _mm256_loadu_si256(from.add(3));
        _mm256_stream_si256(to, first);
        _mm256_stream_si256(to.add(1), second);
        _mm256_stream_si256(to.add(2), third);
        _mm256_stream_si256(to.add(3), fourth);
    }
}

#[cfg(test)]
mod tests {
    use super::copy;

    #[test]
    fn copies_every_byte_at_every_alignment_and_tail() {
        let source: Vec<u8> =
            (0..300_000_u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for (start, length) in [
            (0, 0),
            (1, 1),
            (3, 65_535),
            (5, 65_536),
            (7, 65_537),
            (0, 299_999),
            (31, 200_001),
            (64, 131_072),
        ] {
            for shift in [0, 1, 17, 32] {
                let mut target = vec![0xEE_u8; length + shift + 8];
                copy(&mut target[shift..shift + length], &source[start..start + length]);
                assert_eq!(target[shift..shift + length], source[start..start + length]);
                assert!(
                    target[shift + length..].iter().all(|&byte| byte == 0xEE),
                    "nothing is written past the end"
                );
                assert!(
                    target[..shift].iter().all(|&byte| byte == 0xEE),
                    "nothing is written before the start"
                );
            }
        }
    }
}
