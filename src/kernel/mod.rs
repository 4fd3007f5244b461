//! What is written for the processor: the copy that callers wait for, the entropy coder of the codecs, casts,
//! and wide vectors for others; and the one call of the system that has no safe form.
//!
//! Each kernel has a portable path with the same results; what the processor can do is asked at run time.
//! Outside the bindings, only this folder has `unsafe`.
#![expect(unsafe_code, reason = "vector intrinsics, and a call of the C library; each block has its proof")]

pub mod cast;
mod copy;
mod exit;
pub mod fetch;
pub mod rans;

pub use copy::copy;
pub use exit::exit_at_once;

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
