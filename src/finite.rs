//! Counts NaN and infinite elements while the bytes are in the cache.

use crate::tensor::Dtype;

/// Number of elements of `bytes` that are NaN or infinite (a complex number counts once for each bad
/// component), or `None` for dtypes that have neither.
///
/// `bytes` are little-endian elements of `dtype`; a chunk boundary never cuts an element, because chunk
/// sizes are multiples of 4096.
#[must_use]
pub fn count_nonfinite(dtype: Dtype, bytes: &[u8]) -> Option<u64> {
    crate::kernel::with_wide_vectors(
        #[inline(always)]
        || count_any(dtype, bytes),
    )
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled once more with the vectors of its caller")]
fn count_any(dtype: Dtype, bytes: &[u8]) -> Option<u64> {
    Some(match dtype {
        Dtype::Float32 | Dtype::Complex64 => {
            count::<4>(bytes, |word| u32::from_le_bytes(word) & 0x7F80_0000 == 0x7F80_0000)
        }
        Dtype::Bfloat16 => count::<2>(bytes, |word| u16::from_le_bytes(word) & 0x7F80 == 0x7F80),
        Dtype::Float16 | Dtype::Complex32 => {
            count::<2>(bytes, |word| u16::from_le_bytes(word) & 0x7C00 == 0x7C00)
        }
        Dtype::Float64 | Dtype::Complex128 => count::<8>(bytes, |word| {
            u64::from_le_bytes(word) & 0x7FF0_0000_0000_0000 == 0x7FF0_0000_0000_0000
        }),
        Dtype::Float8E4m3fn => count::<1>(bytes, |word| word[0] & 0x7F == 0x7F),
        Dtype::Float8E5m2 => count::<1>(bytes, |word| word[0] & 0x7C == 0x7C),
        Dtype::Float8E4m3fnuz | Dtype::Float8E5m2fnuz => count::<1>(bytes, |word| word[0] == 0x80),
        Dtype::Float8E8m0fnu => count::<1>(bytes, |word| word[0] == 0xFF),
        _ => return None,
    })
}

/// Counts words for which `bad` holds, in blocks whose counters the compiler keeps in vector registers.
#[inline]
fn count<const WIDTH: usize>(bytes: &[u8], bad: impl Fn([u8; WIDTH]) -> bool) -> u64 {
    const BLOCK_WORDS: usize = 4096;
    let (words, _) = bytes.as_chunks::<WIDTH>();
    words
        .chunks(BLOCK_WORDS)
        .map(|block| u64::from(block.iter().map(|word| u32::from(bad(*word))).sum::<u32>()))
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_nan_and_both_infinities_but_no_large_number() {
        let values = [
            1.0,
            f32::NAN,
            -f32::INFINITY,
            f32::MAX,
            f32::INFINITY,
            -0.0,
            f32::from_bits(0x7F80_0001),
            f32::MIN_POSITIVE,
        ];
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(count_nonfinite(Dtype::Float32, &bytes), Some(4));
        let bytes: Vec<u8> =
            [f64::MAX, f64::NAN, 0.0, f64::INFINITY].iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(count_nonfinite(Dtype::Float64, &bytes), Some(2));
    }

    #[test]
    fn small_floats_follow_their_own_tables() {
        let every: Vec<u8> = (0..=255).collect();
        assert_eq!(count_nonfinite(Dtype::Float8E4m3fn, &every), Some(2), "two NaN, no infinity");
        assert_eq!(count_nonfinite(Dtype::Float8E5m2, &every), Some(8), "two infinities, six NaN");
        assert_eq!(count_nonfinite(Dtype::Float8E4m3fnuz, &every), Some(1));
        assert_eq!(count_nonfinite(Dtype::Float8E8m0fnu, &every), Some(1));
        let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        assert_eq!(count_nonfinite(Dtype::Float16, &every), Some(2 * 1024));
        assert_eq!(count_nonfinite(Dtype::Bfloat16, &every), Some(2 * 128));
    }

    #[test]
    fn integers_have_none() {
        assert_eq!(count_nonfinite(Dtype::Int32, &[0xFF; 8]), None);
        assert_eq!(count_nonfinite(Dtype::Bool, &[1]), None);
    }
}
