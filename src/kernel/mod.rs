//! What is written for the processor: the copy that callers wait for, and wide vectors for others.
//!
//! Staging writes hundreds of megabytes that nobody reads soon. Ordinary stores first read each target
//! line into the cache; non-temporal stores don't, which saves a third of the memory traffic. This is
//! the only folder outside the bindings with `unsafe`.
#![expect(unsafe_code, reason = "vector intrinsics; each block has its proof")]

pub mod cast;

/// Copies below this length use the ordinary path: their bytes fit the cache.
const STREAM_FROM_BYTES: usize = 64 * 1024;

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

/// Runs a small computation compiled for the widest vectors of this machine.
///
/// Only what is inlined into it gains: mark the closure and what it calls `#[inline(always)]`.
pub fn with_wide_vectors<T>(compute: impl FnOnce() -> T) -> T {
    #[cfg(target_arch = "x86_64")]
    if has_avx512() {
        // SAFETY: the features were detected on this machine in the line above.
        return unsafe { with_avx512(compute) };
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was detected on this machine in the line above.
        return unsafe { with_avx2(compute) };
    }
    compute()
}

/// True where vectors of 64 bytes pay. VBMI2 is not needed as such: the processors before it slow down all
/// of a core for a while after each use of wide vectors.
#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vbmi2")
}

/// # Safety
/// The processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn with_avx2<T>(compute: impl FnOnce() -> T) -> T {
    compute()
}

/// # Safety
/// The processor must have the features of [`has_avx512`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2")]
unsafe fn with_avx512<T>(compute: impl FnOnce() -> T) -> T {
    compute()
}

/// For tests: results of the computation without wide vectors, and with each kind that this machine has.
#[cfg(test)]
pub(crate) fn with_each_vectors<T>(compute: impl Fn() -> T) -> Vec<T> {
    let mut results = vec![compute()];
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was detected on this machine in the line above.
        results.push(unsafe { with_avx2(&compute) });
    }
    #[cfg(target_arch = "x86_64")]
    if has_avx512() {
        // SAFETY: the features were detected on this machine in the line above.
        results.push(unsafe { with_avx512(&compute) });
    }
    results
}

/// Copies with 32-byte non-temporal stores, four at a time.
///
/// # Safety
/// The processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
#[expect(clippy::cast_ptr_alignment, reason = "loads may be unaligned; stores are aligned by the head")]
unsafe fn stream_avx2(target: &mut [u8], source: &[u8]) {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256,
    };
    const BLOCK_BYTES: usize = 128;
    const AHEAD_BYTES: usize = 2048;

    let head = target.as_ptr().align_offset(32).min(target.len());
    let (target_head, target_rest) = target.split_at_mut(head);
    let (source_head, source_rest) = source.split_at(head);
    target_head.copy_from_slice(source_head);

    let blocks = target_rest.len() / BLOCK_BYTES;
    let to = target_rest.as_mut_ptr();
    let from = source_rest.as_ptr();
    for block in 0..blocks {
        let offset = block * BLOCK_BYTES;
        // SAFETY: `offset + 128 <= blocks * 128 <= len` of both slices, which have equal length, so that
        // all loads and stores stay inside them; `to + offset` is 32-byte aligned because `to` was
        // aligned above and `offset` is a multiple of 128; the slices don't overlap because one is
        // borrowed mutably. The prefetch may point past the end: it never faults.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(offset + AHEAD_BYTES).cast::<i8>());
            _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(offset + AHEAD_BYTES + 64).cast::<i8>());
            let source_at = from.add(offset).cast::<__m256i>();
            let target_at = to.add(offset).cast::<__m256i>();
            let first = _mm256_loadu_si256(source_at);
            let second = _mm256_loadu_si256(source_at.add(1));
            let third = _mm256_loadu_si256(source_at.add(2));
            let fourth = _mm256_loadu_si256(source_at.add(3));
            _mm256_stream_si256(target_at, first);
            _mm256_stream_si256(target_at.add(1), second);
            _mm256_stream_si256(target_at.add(2), third);
            _mm256_stream_si256(target_at.add(3), fourth);
        }
    }
    // Non-temporal stores are weakly ordered; another thread reads these bytes next.
    _mm_sfence();
    let done = blocks * BLOCK_BYTES;
    target_rest[done..].copy_from_slice(&source_rest[done..]);
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
