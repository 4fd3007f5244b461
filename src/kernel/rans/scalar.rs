//! The portable path: one lane after the other.

use super::{
    BIAS_MASK, BIAS_SHIFT, COMPLEMENT_MASK, DISTANCE_SHIFT, DecodeTable, EncodeTable, FREQUENCY_SHIFT,
    LIMIT_SHIFT, PROBABILITY_BITS, PROBABILITY_SUM, QUOTIENT_SHIFT, SLOT_MASK, STATE_MIN, WORD_BYTES,
};

/// Codes the symbols from the last to the first, the first of which belongs to lane 0. Writes words down
/// from the end of `buffer` and returns where they start.
pub(super) fn encode<const LANES: usize>(
    table: &EncodeTable,
    symbols: &[u8],
    states: &mut [u32; LANES],
    buffer: &mut [u8],
) -> usize {
    let mut end = buffer.len();
    for (index, &symbol) in symbols.iter().enumerate().rev() {
        let state = &mut states[index % LANES];
        let parameters = table.parameters[usize::from(symbol)];
        let complement = parameters & COMPLEMENT_MASK;
        if *state >= (PROBABILITY_SUM - complement) << LIMIT_SHIFT {
            end -= WORD_BYTES;
            buffer[end..end + WORD_BYTES].copy_from_slice(&(*state as u16).to_le_bytes());
            *state >>= 16;
        }
        let product = u64::from(*state) * u64::from(table.reciprocals[usize::from(symbol)]);
        let quotient = (product >> 32) as u32 >> (parameters >> QUOTIENT_SHIFT);
        *state += (parameters >> BIAS_SHIFT & BIAS_MASK) + quotient * complement;
    }
    end
}

/// Decodes symbols, the first of which belongs to lane 0. Returns the words that are left, or `None` where
/// there are too few.
pub(super) fn decode<'a, const LANES: usize>(
    table: &DecodeTable,
    states: &mut [u32; LANES],
    mut words: &'a [u8],
    symbols: &mut [u8],
) -> Option<&'a [u8]> {
    for group in symbols.chunks_mut(LANES) {
        for (symbol, state) in group.iter_mut().zip(&mut *states) {
            let slot = table.0[(*state & SLOT_MASK) as usize];
            *symbol = slot as u8;
            *state = (slot >> FREQUENCY_SHIFT) * (*state >> PROBABILITY_BITS)
                + (slot >> DISTANCE_SHIFT & SLOT_MASK);
            if *state < STATE_MIN {
                let (word, rest) = words.split_first_chunk::<WORD_BYTES>()?;
                *state = *state << 16 | u32::from(u16::from_le_bytes(*word));
                words = rest;
            }
        }
    }
    Some(words)
}
