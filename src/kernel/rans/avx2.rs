//! 64 lanes as eight vectors of eight: the word-based coder of Fabian Giesen ("Interleaved entropy coders",
//! 2014), widened.
//!
//! A group is one symbol of each lane. Within a group the words of lower lanes come first, so a decoder
//! deals consecutive words to the lanes that need one, and an encoder that walks backwards packs those
//! that give one to the end of what it still has.
#![expect(clippy::cast_ptr_alignment, reason = "loads and stores may be unaligned")]

use std::arch::x86_64::{
    __m128i, __m256i, _mm_loadl_epi64, _mm_loadu_si128, _mm_storeu_si128, _mm256_add_epi32, _mm256_and_si256,
    _mm256_blend_epi32, _mm256_blendv_epi8, _mm256_castsi256_ps, _mm256_castsi256_si128, _mm256_cmpgt_epi32,
    _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_i32gather_epi32, _mm256_loadu_si256,
    _mm256_movemask_ps, _mm256_mul_epu32, _mm256_mullo_epi32, _mm256_or_si256, _mm256_packus_epi16,
    _mm256_packus_epi32, _mm256_permute4x64_epi64, _mm256_permutevar8x32_epi32, _mm256_set1_epi32,
    _mm256_setr_epi32, _mm256_slli_epi32, _mm256_srli_epi32, _mm256_srli_epi64, _mm256_srlv_epi32,
    _mm256_storeu_si256, _mm256_sub_epi32,
};

use super::{
    BIAS_MASK, BIAS_SHIFT, COMPLEMENT_MASK, DISTANCE_SHIFT, DecodeTable, EncodeTable, FREQUENCY_SHIFT,
    LIMIT_SHIFT, PROBABILITY_BITS, PROBABILITY_SUM, QUOTIENT_SHIFT, SLOT_MASK, STATE_MIN, WIDE_LANES,
    WORD_BYTES,
};

const VECTOR_LANES: usize = 8;
const VECTORS: usize = WIDE_LANES / VECTOR_LANES;
/// Most bytes that the lanes of one group take or give.
const GROUP_BYTES: usize = WIDE_LANES * WORD_BYTES;
/// Bytes of the words of one vector's lanes.
const VECTOR_WORD_BYTES: usize = VECTOR_LANES * WORD_BYTES;

/// For each set of lanes, by its bit mask: which of the next words each of these lanes takes.
static DEAL: [[u8; VECTOR_LANES]; 256] = deal();
/// For each set of lanes: the lanes in ascending order at the end, anything before.
static PACK: [[u8; VECTOR_LANES]; 256] = pack();

const fn deal() -> [[u8; VECTOR_LANES]; 256] {
    let mut table = [[0; VECTOR_LANES]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut lane, mut next) = (0, 0);
        while lane < VECTOR_LANES {
            if mask >> lane & 1 == 1 {
                table[mask][lane] = next;
                next += 1;
            }
            lane += 1;
        }
        mask += 1;
    }
    table
}

const fn pack() -> [[u8; VECTOR_LANES]; 256] {
    let mut table = [[0; VECTOR_LANES]; 256];
    let mut mask = 0;
    while mask < 256 {
        let (mut lane, mut end) = (VECTOR_LANES, VECTOR_LANES);
        while lane > 0 {
            lane -= 1;
            if mask >> lane & 1 == 1 {
                end -= 1;
                table[mask][end] = lane as u8;
            }
        }
        mask += 1;
    }
    table
}

#[target_feature(enable = "avx2")]
fn load_states(states: &[u32; WIDE_LANES]) -> [__m256i; VECTORS] {
    let (vectors, _) = states.as_chunks::<VECTOR_LANES>();
    std::array::from_fn(|vector| {
        // SAFETY: `vectors` are arrays of eight 32-bit integers, 32 bytes each.
        unsafe { _mm256_loadu_si256(vectors[vector].as_ptr().cast()) }
    })
}

#[target_feature(enable = "avx2")]
fn store_states(vectors: &[__m256i; VECTORS], states: &mut [u32; WIDE_LANES]) {
    let (targets, _) = states.as_chunks_mut::<VECTOR_LANES>();
    for (target, &vector) in targets.iter_mut().zip(vectors) {
        // SAFETY: `target` is eight 32-bit integers, 32 bytes, borrowed mutably.
        unsafe { _mm256_storeu_si256(target.as_mut_ptr().cast(), vector) };
    }
}

/// Eight bytes as 32-bit lanes.
#[target_feature(enable = "avx2")]
fn widen(bytes: &[u8; VECTOR_LANES]) -> __m256i {
    // SAFETY: eight bytes are read, which is what the array has.
    _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(bytes.as_ptr().cast()) })
}

#[target_feature(enable = "avx2")]
fn splat(value: u32) -> __m256i {
    _mm256_set1_epi32(value.cast_signed())
}

/// Bit mask of the lanes in which a comparison held.
#[target_feature(enable = "avx2")]
fn mask_of(comparison: __m256i) -> usize {
    _mm256_movemask_ps(_mm256_castsi256_ps(comparison)).cast_unsigned() as usize & 0xFF
}

/// Codes groups from the last to the first, writes words down from the end of `buffer` and returns where
/// they start. The buffer has room for [`GROUP_BYTES`] for each group and one more.
#[target_feature(enable = "avx2")]
pub(super) fn encode(
    table: &EncodeTable,
    groups: &[[u8; WIDE_LANES]],
    states: &mut [u32; WIDE_LANES],
    buffer: &mut [u8],
) -> usize {
    let mut vectors = load_states(states);
    let mut end = buffer.len();
    for group in groups.iter().rev() {
        let Some(window) = buffer[..end].last_chunk_mut::<GROUP_BYTES>() else {
            unreachable!("the caller's buffer has room for all words of every group");
        };
        let (symbols, _) = group.as_chunks::<VECTOR_LANES>();
        let mut free = GROUP_BYTES;
        for vector in (0..VECTORS).rev() {
            free -= encode_vector(table, &symbols[vector], &mut vectors[vector], window, free);
        }
        end -= GROUP_BYTES - free;
    }
    store_states(&vectors, states);
    end
}

/// Codes one symbol of each lane; returns how many bytes of words now stand before `free` in the window.
///
/// `free` is at least [`VECTOR_WORD_BYTES`]: each of the vectors of a group takes at most so many.
#[target_feature(enable = "avx2")]
#[inline]
fn encode_vector(
    table: &EncodeTable,
    symbols: &[u8; VECTOR_LANES],
    state: &mut __m256i,
    window: &mut [u8; GROUP_BYTES],
    free: usize,
) -> usize {
    let index = widen(symbols);
    // SAFETY: each index is a byte, and both tables have 256 entries of four bytes.
    let (reciprocal, parameters) = unsafe {
        (
            _mm256_i32gather_epi32::<4>(table.reciprocals.as_ptr().cast(), index),
            _mm256_i32gather_epi32::<4>(table.parameters.as_ptr().cast(), index),
        )
    };
    let complement = _mm256_and_si256(parameters, splat(COMPLEMENT_MASK));
    let frequency = _mm256_sub_epi32(splat(PROBABILITY_SUM), complement);
    let limit = _mm256_slli_epi32::<{ LIMIT_SHIFT.cast_signed() }>(frequency);
    // States and limits are below 2^31, so a signed comparison is right.
    let stays = _mm256_cmpgt_epi32(limit, *state);
    let gives = mask_of(stays) ^ 0xFF;

    let packed = _mm256_permutevar8x32_epi32(*state, widen(&PACK[gives]));
    let words = _mm256_and_si256(packed, splat(0xFFFF));
    let words = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(words, words));
    let target = &mut window[free - VECTOR_WORD_BYTES..free];
    // SAFETY: `target` is 16 bytes long and borrowed mutably.
    unsafe { _mm_storeu_si128(target.as_mut_ptr().cast::<__m128i>(), _mm256_castsi256_si128(words)) };

    let shifted = _mm256_srli_epi32::<16>(*state);
    let current = _mm256_blendv_epi8(shifted, *state, stays);
    let even = _mm256_srli_epi64::<32>(_mm256_mul_epu32(current, reciprocal));
    let odd = _mm256_mul_epu32(_mm256_srli_epi64::<32>(current), _mm256_srli_epi64::<32>(reciprocal));
    let high = _mm256_blend_epi32::<0b1010_1010>(even, odd);
    let quotient = _mm256_srlv_epi32(high, _mm256_srli_epi32::<{ QUOTIENT_SHIFT.cast_signed() }>(parameters));
    let bias =
        _mm256_and_si256(_mm256_srli_epi32::<{ BIAS_SHIFT.cast_signed() }>(parameters), splat(BIAS_MASK));
    *state = _mm256_add_epi32(_mm256_add_epi32(current, bias), _mm256_mullo_epi32(quotient, complement));
    gives.count_ones() as usize * WORD_BYTES
}

/// Decodes whole groups. Returns the words that are left, or `None` where there are too few.
#[target_feature(enable = "avx2")]
pub(super) fn decode<'a>(
    table: &DecodeTable,
    states: &mut [u32; WIDE_LANES],
    words: &'a [u8],
    groups: &mut [[u8; WIDE_LANES]],
) -> Option<&'a [u8]> {
    let mut vectors = load_states(states);
    // Few words may serve many groups, where one symbol has almost all of the probability: so the last
    // words, with zeros behind them, are read as fast as the others.
    let tail_start = words.len().saturating_sub(GROUP_BYTES);
    let mut tail = [0; 2 * GROUP_BYTES];
    tail[..words.len() - tail_start].copy_from_slice(&words[tail_start..]);
    let mut position = 0;
    for group in groups {
        let window = match words[position..].first_chunk::<GROUP_BYTES>() {
            Some(window) => window,
            None => tail[position - tail_start..].first_chunk::<GROUP_BYTES>()?,
        };
        position += decode_group(table, &mut vectors, window, group);
        if position > words.len() {
            return None;
        }
    }
    store_states(&vectors, states);
    words.get(position..)
}

/// Decodes one symbol of each lane; returns how many bytes of the window were taken.
#[target_feature(enable = "avx2")]
#[inline]
fn decode_group(
    table: &DecodeTable,
    vectors: &mut [__m256i; VECTORS],
    window: &[u8; GROUP_BYTES],
    group: &mut [u8; WIDE_LANES],
) -> usize {
    let mut taken = 0;
    let (targets, _) = group.as_chunks_mut::<{ 4 * VECTOR_LANES }>();
    let (quartets, _) = vectors.as_chunks_mut::<4>();
    for (target, [first, second, third, fourth]) in targets.iter_mut().zip(quartets) {
        let first = decode_vector(table, first, window, &mut taken);
        let second = decode_vector(table, second, window, &mut taken);
        let third = decode_vector(table, third, window, &mut taken);
        let fourth = decode_vector(table, fourth, window, &mut taken);
        let low = _mm256_packus_epi32(first, second);
        let high = _mm256_packus_epi32(third, fourth);
        // Packing works in halves of 128 bits: put runs of four symbols back in order.
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        // SAFETY: the target is 32 bytes, borrowed mutably.
        unsafe { _mm256_storeu_si256(target.as_mut_ptr().cast(), bytes) };
    }
    taken
}

/// Decodes one symbol of each lane from the words at `taken`, and moves it on.
///
/// `taken` leaves [`VECTOR_WORD_BYTES`] in the window: each of the vectors of a group takes at most so many.
#[target_feature(enable = "avx2")]
#[inline]
fn decode_vector(
    table: &DecodeTable,
    state: &mut __m256i,
    window: &[u8; GROUP_BYTES],
    taken: &mut usize,
) -> __m256i {
    let index = _mm256_and_si256(*state, splat(SLOT_MASK));
    // SAFETY: each index is below 4096, the number of entries of four bytes.
    let slot = unsafe { _mm256_i32gather_epi32::<4>(table.0.as_ptr().cast(), index) };
    let frequency = _mm256_srli_epi32::<{ FREQUENCY_SHIFT.cast_signed() }>(slot);
    let distance =
        _mm256_and_si256(_mm256_srli_epi32::<{ DISTANCE_SHIFT.cast_signed() }>(slot), splat(SLOT_MASK));
    let quotient = _mm256_srli_epi32::<{ PROBABILITY_BITS.cast_signed() }>(*state);
    let reduced = _mm256_add_epi32(_mm256_mullo_epi32(frequency, quotient), distance);

    let needs = _mm256_cmpgt_epi32(splat(STATE_MIN), reduced);
    let mask = mask_of(needs);
    let source = &window[*taken..*taken + VECTOR_WORD_BYTES];
    // SAFETY: `source` is 16 bytes long.
    let words = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(source.as_ptr().cast()) });
    let dealt = _mm256_permutevar8x32_epi32(words, widen(&DEAL[mask]));
    let refilled = _mm256_or_si256(_mm256_slli_epi32::<16>(reduced), dealt);
    *state = _mm256_blendv_epi8(reduced, refilled, needs);
    *taken += mask.count_ones() as usize * WORD_BYTES;
    _mm256_and_si256(slot, splat(0xFF))
}
