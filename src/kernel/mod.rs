//! What is written for the processor: the copy that callers wait for, the entropy coder of the codecs, casts,
//! and wide vectors for others.
//!
//! Each kernel has a portable path with the same results; what the processor can do is asked at run time.
//! Outside the bindings, only this folder has `unsafe`.
#![expect(unsafe_code, reason = "vector intrinsics; each block has its proof")]

pub mod cast;
mod copy;
pub mod rans;

pub use copy::copy;

/// Runs a small computation compiled for the widest vectors of this machine.
///
/// Only what is inlined into it gains: mark the closure and what it calls `#[inline(always)]`.
pub fn with_wide_vectors<T>(compute: impl FnOnce() -> T) -> T {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was detected on this machine in the line above.
        return unsafe { with_avx2(compute) };
    }
    compute()
}

/// # Safety
/// The processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn with_avx2<T>(compute: impl FnOnce() -> T) -> T {
    compute()
}
