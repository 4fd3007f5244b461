//! Interleaved range ANS over bytes with a static table (FORMAT.md, "Coded streams"), without its framing.
//!
//! Symbol `i` belongs to lane `i % lanes`. Each lane has a state in `STATE_MIN..STATE_MIN << 16` that
//! takes or gives 16 bits at a time, all lanes from one sequence of words. 64 lanes run as four or
//! eight vectors, enough for one to compute while another waits for its table; a few lanes serve short streams, whose
//! states would outweigh their symbols. The states stay below 2^31 whatever the words and the table, so that both paths agree on every input.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;
#[cfg(test)]
mod tests;

/// Frequencies of a table sum to two to this power.
pub const PROBABILITY_BITS: u32 = 12;
/// Sum of the frequencies of a table.
pub const PROBABILITY_SUM: u32 = 1 << PROBABILITY_BITS;
/// Lower bound of a state between symbols, and the state that coding starts and decoding ends with.
pub const STATE_MIN: u32 = 1 << 15;
/// Lanes of a long stream.
pub const WIDE_LANES: usize = 64;
/// Lanes of a short stream.
pub const NARROW_LANES: usize = 4;
/// Bytes of a word.
const WORD_BYTES: usize = 2;
/// What [`encode`] needs beyond two bytes for each symbol.
const SLACK_BYTES: usize = WORD_BYTES * WIDE_LANES;

const SLOT_MASK: u32 = PROBABILITY_SUM - 1;

/// Frequencies of the 256 symbols; their sum is [`PROBABILITY_SUM`] and no symbol has all of it.
pub type Frequencies = [u16; 256];

/// What coding one symbol needs, so that no step divides.
///
/// With frequency `f` and start `s`, a state `x` becomes `(x / f << 12) + x % f + s`, which is
/// `x + bias + (x / f) * (4096 - f)`. The quotient is the high half of `x * reciprocal`, shifted: exact
/// for `x < 2^31` (Alverson, "Integer division using reciprocals", 1991).
pub struct EncodeTable {
    reciprocals: [u32; 256],
    /// Complement `4096 - f` in bits 0..12, bias in bits 12..25, shift in bits 25..29.
    parameters: [u32; 256],
}

impl Default for EncodeTable {
    fn default() -> Self {
        Self { reciprocals: [0; 256], parameters: [0; 256] }
    }
}

const COMPLEMENT_MASK: u32 = PROBABILITY_SUM - 1;
const BIAS_SHIFT: u32 = 12;
const BIAS_MASK: u32 = (1 << 13) - 1;
const QUOTIENT_SHIFT: u32 = 25;
/// A state of at least `f << LIMIT_SHIFT` gives a word before a symbol of frequency `f`.
const LIMIT_SHIFT: u32 = 31 - PROBABILITY_BITS;

impl EncodeTable {
    /// Prepares the table; symbols of frequency 0 can't be coded.
    pub fn fill(&mut self, frequencies: &Frequencies) {
        let mut start = 0;
        for (symbol, &frequency) in frequencies.iter().enumerate() {
            let frequency = u32::from(frequency);
            if frequency == 0 {
                continue;
            }
            // For 1 the exact reciprocal needs 33 bits; with the next smaller one the quotient is
            // `x - 1`, and the bias puts that right.
            let (reciprocal, shift, bias) = if frequency == 1 {
                (u32::MAX, 0, start + PROBABILITY_SUM - 1)
            } else {
                let shift = u32::BITS - (frequency - 1).leading_zeros();
                let reciprocal = (1_u64 << (shift + 31)).div_ceil(u64::from(frequency));
                (reciprocal as u32, shift - 1, start)
            };
            self.reciprocals[symbol] = reciprocal;
            self.parameters[symbol] =
                (PROBABILITY_SUM - frequency) | bias << BIAS_SHIFT | shift << QUOTIENT_SHIFT;
            start += frequency;
        }
    }
}

/// For each of the 4096 slots: its symbol in bits 0..8, its distance from the symbol's first slot in bits
/// 8..20, the symbol's frequency in bits 20..32.
pub struct DecodeTable(Box<[u32; PROBABILITY_SUM as usize]>);

impl Default for DecodeTable {
    fn default() -> Self {
        Self(Box::new([0; PROBABILITY_SUM as usize]))
    }
}

const DISTANCE_SHIFT: u32 = 8;
const FREQUENCY_SHIFT: u32 = 20;

impl DecodeTable {
    /// Prepares the table.
    ///
    /// # Panics
    /// If the frequencies sum to more than [`PROBABILITY_SUM`].
    pub fn fill(&mut self, frequencies: &Frequencies) {
        let mut start = 0;
        for (symbol, &frequency) in (0_u32..).zip(frequencies) {
            let first = symbol | u32::from(frequency) << FREQUENCY_SHIFT;
            for (distance, slot) in (0_u32..).zip(&mut self.0[start..start + usize::from(frequency)]) {
                *slot = first | distance << DISTANCE_SHIFT;
            }
            start += usize::from(frequency);
        }
    }
}

/// Bytes that [`encode`] needs for so many symbols.
#[must_use]
pub fn buffer_length_bytes(symbol_count: usize) -> usize {
    symbol_count * WORD_BYTES + SLACK_BYTES
}

/// Ways to the same result. One exists only where this machine was found to have what it needs: they
/// come from [`Path::all`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Path {
    /// The ways of this machine, the fastest last.
    fn all() -> impl Iterator<Item = Self> {
        let portable = std::iter::once(Self::Portable);
        #[cfg(target_arch = "x86_64")]
        let portable = {
            let has_avx2 = is_x86_feature_detected!("avx2");
            let has_avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl");
            portable.chain(has_avx2.then_some(Self::Avx2)).chain(has_avx512.then_some(Self::Avx512))
        };
        portable
    }

    fn best() -> Self {
        Self::all().last().unwrap_or(Self::Portable)
    }

    /// As [`encode`].
    fn encode<const LANES: usize>(
        self,
        table: &EncodeTable,
        symbols: &[u8],
        states: &mut [u32; LANES],
        buffer: &mut [u8],
    ) -> usize {
        assert!(buffer.len() >= buffer_length_bytes(symbols.len()), "the buffer holds all words");
        *states = [STATE_MIN; LANES];
        #[cfg(target_arch = "x86_64")]
        if self != Self::Portable
            && let Ok(states) = <&mut [u32; WIDE_LANES]>::try_from(states.as_mut_slice())
        {
            let (groups, rest) = symbols.as_chunks::<WIDE_LANES>();
            let end = scalar::encode(table, rest, states, buffer);
            let buffer = &mut buffer[..end];
            // SAFETY: this way exists because the features it uses were detected.
            return unsafe {
                match self {
                    Self::Avx512 => avx512::encode(table, groups, states, buffer),
                    _ => avx2::encode(table, groups, states, buffer),
                }
            };
        }
        scalar::encode(table, symbols, states, buffer)
    }

    /// Decodes symbols; returns the words that are left, or `None` where there are too few.
    fn decode<'a, const LANES: usize>(
        self,
        table: &DecodeTable,
        states: &mut [u32; LANES],
        words: &'a [u8],
        symbols: &mut [u8],
    ) -> Option<&'a [u8]> {
        #[cfg(target_arch = "x86_64")]
        if self != Self::Portable
            && let Ok(states) = <&mut [u32; WIDE_LANES]>::try_from(states.as_mut_slice())
        {
            let (groups, rest) = symbols.as_chunks_mut::<WIDE_LANES>();
            // SAFETY: this way exists because the features it uses were detected.
            let words = unsafe {
                match self {
                    Self::Avx512 => avx512::decode(table, states, words, groups),
                    _ => avx2::decode(table, states, words, groups),
                }
            }?;
            return scalar::decode(table, states, words, rest);
        }
        scalar::decode(table, states, words, symbols)
    }
}

/// Codes the symbols; returns where in `buffer` the words start, which end with it.
///
/// Every symbol has a frequency of at least 1 in the table. `states` become those to be stored.
///
/// # Panics
/// If the buffer is shorter than [`buffer_length_bytes`] says.
pub fn encode<const LANES: usize>(
    table: &EncodeTable,
    symbols: &[u8],
    states: &mut [u32; LANES],
    buffer: &mut [u8],
) -> usize {
    Path::best().encode(table, symbols, states, buffer)
}

/// Decodes as many symbols as there is room for; false where the words are not exactly those of so many
/// symbols under this table. Then the symbols mean nothing.
pub fn decode<const LANES: usize>(
    table: &DecodeTable,
    states: &mut [u32; LANES],
    words: &[u8],
    symbols: &mut [u8],
) -> bool {
    if states.iter().any(|state| !(STATE_MIN..STATE_MIN << 16).contains(state)) {
        return false;
    }
    let rest = Path::best().decode(table, states, words, symbols);
    rest.is_some_and(<[u8]>::is_empty) && states.iter().all(|&state| state == STATE_MIN)
}
