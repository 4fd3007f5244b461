//! Walks two arrays word by word, at the speed of memory.
//!
//! What a cast does to a word is its own; here is what makes a copy fast, for a cast of long arrays: source
//! lines are asked for ahead of time, and target lines are written past the cache, without being read first.

/// Words converted between two requests for lines of the source.
const GROUP_WORDS: usize = 64;

/// Words converted into the buffer before it is written past the cache.
const BLOCK_WORDS: usize = 1024;

/// Shorter targets stay in the cache: whoever cast them reads them next.
const STREAM_FROM_BYTES: usize = 4 << 20;

/// Bytes by which requests for source lines run ahead of the conversion.
const AHEAD_BYTES: usize = 4096;

/// Converts the words of `source` one after the other into those of `target`, as many as both have.
///
/// Only what is inlined gains from wide vectors: call it in [`super::with_wide_vectors`].
#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled again with the vectors of each caller")]
pub fn map<const FROM: usize, const TO: usize>(
    source: &[u8],
    target: &mut [u8],
    convert: impl Fn([u8; FROM]) -> [u8; TO],
) {
    let (source, _) = source.as_chunks::<FROM>();
    let (target, _) = target.as_chunks_mut::<TO>();
    if size_of_val(target) < STREAM_FROM_BYTES {
        return each(source, target, &convert);
    }
    // A head that ends at a line; where words straddle lines there is none, and all is head.
    let head = target.as_ptr().align_offset(LINE_BYTES).min(target.len()).min(source.len());
    let (source_head, source) = source.split_at(head);
    let (target_head, target) = target.split_at_mut(head);
    each(source_head, target_head, &convert);

    let mut buffer = [[0; TO]; BLOCK_WORDS];
    let (source_blocks, source_rest) = source.as_chunks::<BLOCK_WORDS>();
    let (target_blocks, target_rest) = target.as_chunks_mut::<BLOCK_WORDS>();
    for (source, target) in source_blocks.iter().zip(target_blocks) {
        let (source, _) = source.as_chunks::<GROUP_WORDS>();
        let (buffer_groups, _) = buffer.as_chunks_mut::<GROUP_WORDS>();
        for (source, buffer) in source.iter().zip(buffer_groups) {
            request_ahead(source.as_flattened());
            each(source, buffer, &convert);
        }
        stream(target.as_flattened_mut(), buffer.as_flattened());
    }
    finish_streams();
    each(source_rest, target_rest, &convert);
}

const LINE_BYTES: usize = 64;

#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled again with the vectors of each caller")]
fn each<From: Copy, To>(source: &[From], target: &mut [To], convert: &impl Fn(From) -> To) {
    for (source, target) in source.iter().zip(target) {
        *target = convert(*source);
    }
}

/// Asks for the lines that lie [`AHEAD_BYTES`] after these.
#[inline]
fn request_ahead(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..bytes.len() / LINE_BYTES {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let ahead = bytes.as_ptr().wrapping_add(line * LINE_BYTES + AHEAD_BYTES);
        // SAFETY: a prefetch never faults and changes no memory, wherever it points.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead.cast()) };
    }
}

/// Copies with non-temporal stores where `target` is aligned to them; [`finish_streams`] must follow.
#[inline]
#[cfg_attr(
    target_arch = "x86_64",
    expect(clippy::cast_ptr_alignment, reason = "loads may be unaligned; that of the stores is checked")
)]
fn stream(target: &mut [u8], source: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if target.len() == source.len() && target.as_ptr().align_offset(16) == 0 {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        let words = target.len() / 16;
        let (to, from) = (target.as_mut_ptr().cast::<__m128i>(), source.as_ptr().cast::<__m128i>());
        for word in 0..words {
            // SAFETY: `16 * (word + 1) <= len` of both slices, so that the load and the store stay inside
            // them; `to` is 16-byte aligned, as was checked above, and loads may be unaligned; the slices
            // don't overlap because one is borrowed mutably. Every x86-64 has SSE2.
            unsafe { _mm_stream_si128(to.add(word), _mm_loadu_si128(from.add(word))) };
        }
        target[16 * words..].copy_from_slice(&source[16 * words..]);
        return;
    }
    target.copy_from_slice(source);
}

/// Orders non-temporal stores before all later ones: another thread may read these bytes next.
#[inline]
fn finish_streams() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has SSE, and a fence has no other condition.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    };
}
