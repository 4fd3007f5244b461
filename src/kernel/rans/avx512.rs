//! 64 lanes as four vectors of sixteen, with the steps of `avx2`: compressing and expanding by a mask take the
//! place of its tables.

use std::arch::x86_64::{
    __m512i, _mm_loadu_si128, _mm_storeu_si128, _mm256_loadu_si256, _mm256_mask_storeu_epi16,
    _mm512_add_epi32, _mm512_and_si512, _mm512_cmpge_epu32_mask, _mm512_cmplt_epu32_mask,
    _mm512_cvtepi32_epi8, _mm512_cvtepi32_epi16, _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32,
    _mm512_i32gather_epi32, _mm512_loadu_si512, _mm512_mask_blend_epi32, _mm512_mask_or_epi32,
    _mm512_mask_slli_epi32, _mm512_mask_srli_epi32, _mm512_maskz_compress_epi32, _mm512_maskz_expand_epi32,
    _mm512_mul_epu32, _mm512_mullo_epi32, _mm512_set1_epi32, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_srli_epi64, _mm512_srlv_epi32, _mm512_storeu_si512, _mm512_sub_epi32,
};

use super::{
    BIAS_MASK, BIAS_SHIFT, COMPLEMENT_MASK, DISTANCE_SHIFT, DecodeTable, EncodeTable, FREQUENCY_SHIFT,
    LIMIT_SHIFT, PROBABILITY_BITS, PROBABILITY_SUM, QUOTIENT_SHIFT, SLOT_MASK, STATE_MIN, WIDE_LANES,
    WORD_BYTES,
};

const VECTOR_LANES: usize = 16;
const VECTORS: usize = WIDE_LANES / VECTOR_LANES;
/// Most bytes that the lanes of one group take or give.
const GROUP_BYTES: usize = WIDE_LANES * WORD_BYTES;
/// Bytes of the words of one vector's lanes.
const VECTOR_WORD_BYTES: usize = VECTOR_LANES * WORD_BYTES;

#[target_feature(enable = "avx512f")]
fn load_states(states: &[u32; WIDE_LANES]) -> [__m512i; VECTORS] {
    let (vectors, _) = states.as_chunks::<VECTOR_LANES>();
    std::array::from_fn(|vector| {
        // SAFETY: `vectors` are arrays of sixteen 32-bit integers, 64 bytes each.
        unsafe { _mm512_loadu_si512(vectors[vector].as_ptr().cast()) }
    })
}

#[target_feature(enable = "avx512f")]
fn store_states(vectors: &[__m512i; VECTORS], states: &mut [u32; WIDE_LANES]) {
    let (targets, _) = states.as_chunks_mut::<VECTOR_LANES>();
    for (target, &vector) in targets.iter_mut().zip(vectors) {
        // SAFETY: `target` is sixteen 32-bit integers, 64 bytes, borrowed mutably.
        unsafe { _mm512_storeu_si512(target.as_mut_ptr().cast(), vector) };
    }
}

#[target_feature(enable = "avx512f")]
fn splat(value: u32) -> __m512i {
    _mm512_set1_epi32(value.cast_signed())
}

/// Codes groups from the last to the first, writes words down from the end of `buffer` and returns where
/// they start. The buffer has room for [`GROUP_BYTES`] for each group and one more.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
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
        for (symbols, state) in symbols.iter().zip(&mut vectors).rev() {
            free -= encode_vector(table, symbols, state, &mut window[..free]);
        }
        end -= GROUP_BYTES - free;
    }
    store_states(&vectors, states);
    end
}

/// Codes one symbol of each lane; returns how many bytes of words now stand at the end of `free`, which
/// has at least [`VECTOR_WORD_BYTES`]: each of the vectors of a group takes at most so many.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn encode_vector(
    table: &EncodeTable,
    symbols: &[u8; VECTOR_LANES],
    state: &mut __m512i,
    free: &mut [u8],
) -> usize {
    // SAFETY: the array has the sixteen bytes that are read.
    let index = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(symbols.as_ptr().cast()) });
    // SAFETY: each index is a byte, and both tables have 256 entries of four bytes.
    let (reciprocal, parameters) = unsafe {
        (
            _mm512_i32gather_epi32::<4>(index, table.reciprocals.as_ptr().cast()),
            _mm512_i32gather_epi32::<4>(index, table.parameters.as_ptr().cast()),
        )
    };
    let complement = _mm512_and_si512(parameters, splat(COMPLEMENT_MASK));
    let frequency = _mm512_sub_epi32(splat(PROBABILITY_SUM), complement);
    let gives = _mm512_cmpge_epu32_mask(*state, _mm512_slli_epi32::<LIMIT_SHIFT>(frequency));

    let words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(gives, *state));
    let given_bytes = gives.count_ones() as usize * WORD_BYTES;
    let start = free.len() - given_bytes;
    let target = &mut free[start..];
    let first_lanes = ((1_u32 << gives.count_ones()) - 1) as u16;
    // SAFETY: as many words are written as lanes give one, and `target`, borrowed mutably, has room for
    // exactly those.
    unsafe { _mm256_mask_storeu_epi16(target.as_mut_ptr().cast(), first_lanes, words) };

    let current = _mm512_mask_srli_epi32::<16>(*state, gives, *state);
    let even = _mm512_srli_epi64::<32>(_mm512_mul_epu32(current, reciprocal));
    let odd = _mm512_mul_epu32(_mm512_srli_epi64::<32>(current), _mm512_srli_epi64::<32>(reciprocal));
    let high = _mm512_mask_blend_epi32(0b1010_1010_1010_1010, even, odd);
    let quotient = _mm512_srlv_epi32(high, _mm512_srli_epi32::<QUOTIENT_SHIFT>(parameters));
    let bias = _mm512_and_si512(_mm512_srli_epi32::<BIAS_SHIFT>(parameters), splat(BIAS_MASK));
    *state = _mm512_add_epi32(_mm512_add_epi32(current, bias), _mm512_mullo_epi32(quotient, complement));
    given_bytes
}

/// Decodes whole groups. Returns the words that are left, or `None` where there are too few.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn decode<'a>(
    table: &DecodeTable,
    states: &mut [u32; WIDE_LANES],
    words: &'a [u8],
    groups: &mut [[u8; WIDE_LANES]],
) -> Option<&'a [u8]> {
    let mut vectors = load_states(states);
    // As in `avx2`: few words may serve many groups.
    let tail_start = words.len().saturating_sub(GROUP_BYTES);
    let mut tail = [0; 2 * GROUP_BYTES];
    tail[..words.len() - tail_start].copy_from_slice(&words[tail_start..]);
    let mut position = 0;
    for group in groups {
        let window = match words[position..].first_chunk::<GROUP_BYTES>() {
            Some(window) => window,
            None => tail[position - tail_start..].first_chunk::<GROUP_BYTES>()?,
        };
        let mut taken = 0;
        let (targets, _) = group.as_chunks_mut::<VECTOR_LANES>();
        for (symbols, state) in targets.iter_mut().zip(&mut vectors) {
            taken += decode_vector(table, state, &window[taken..], symbols);
        }
        position += taken;
        if position > words.len() {
            return None;
        }
    }
    store_states(&vectors, states);
    words.get(position..)
}

/// Decodes one symbol of each lane; returns how many bytes of words it took. `words` has at least
/// [`VECTOR_WORD_BYTES`]: each of the vectors of a group takes at most so many.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn decode_vector(
    table: &DecodeTable,
    state: &mut __m512i,
    words: &[u8],
    symbols: &mut [u8; VECTOR_LANES],
) -> usize {
    let index = _mm512_and_si512(*state, splat(SLOT_MASK));
    // SAFETY: each index is below 4096, the number of entries of four bytes.
    let slot = unsafe { _mm512_i32gather_epi32::<4>(index, table.0.as_ptr().cast()) };
    let frequency = _mm512_srli_epi32::<FREQUENCY_SHIFT>(slot);
    let distance = _mm512_and_si512(_mm512_srli_epi32::<DISTANCE_SHIFT>(slot), splat(SLOT_MASK));
    let quotient = _mm512_srli_epi32::<PROBABILITY_BITS>(*state);
    let reduced = _mm512_add_epi32(_mm512_mullo_epi32(frequency, quotient), distance);

    let needs = _mm512_cmplt_epu32_mask(reduced, splat(STATE_MIN));
    let source = &words[..VECTOR_WORD_BYTES];
    // SAFETY: `source` is 32 bytes long.
    let next = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(source.as_ptr().cast()) });
    let shifted = _mm512_mask_slli_epi32::<16>(reduced, needs, reduced);
    *state = _mm512_mask_or_epi32(shifted, needs, shifted, _mm512_maskz_expand_epi32(needs, next));
    // SAFETY: `symbols` is 16 bytes, borrowed mutably.
    unsafe { _mm_storeu_si128(symbols.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(slot)) };
    needs.count_ones() as usize * WORD_BYTES
}
