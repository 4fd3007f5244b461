//! What is said of a tensor's values, found while its bytes are in the cache.
//!
//! Results are the same on every machine: each element belongs to one of [`LANES`] sums by its index, and
//! those are added in a fixed order, so that wide vectors and plain code do the same additions.

use crate::float::lanes::{Float16, float32_of_bfloat16, widen_to_float32};
use crate::kernel;
use crate::tensor::Dtype;

/// Partial sums, each over every so-many-th element.
const LANES: usize = 16;

/// Statistics of the elements of a float tensor, or of a part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Elements that are NaN or infinite; a complex number counts once for each bad component.
    pub nonfinite: u64,
    /// Largest magnitude of a finite element, or component of a complex one; 0 where there is none.
    pub abs_max: f64,
    /// Sum of the squares of all finite elements or components. Infinite where it is beyond `f64`, which
    /// takes magnitudes above `1e150`.
    pub square_sum: f64,
}

impl Statistics {
    /// Statistics of both parts together.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        Self {
            nonfinite: self.nonfinite.saturating_add(other.nonfinite),
            abs_max: self.abs_max.max(other.abs_max),
            square_sum: self.square_sum + other.square_sum,
        }
    }

    /// Statistics of the same elements times two to this power.
    #[must_use]
    pub fn scaled(self, scale_log2: i32) -> Self {
        if scale_log2 == 0 {
            return self;
        }
        let scale = f64::from(scale_log2).exp2();
        Self {
            nonfinite: self.nonfinite,
            abs_max: self.abs_max * scale,
            square_sum: self.square_sum * scale * scale,
        }
    }

    /// Euclidean norm of the finite elements.
    #[must_use]
    pub fn l2_norm(&self) -> f64 {
        self.square_sum.sqrt()
    }
}

/// Statistics of little-endian elements, `None` for dtypes that are no floats: booleans, integers and packed
/// 4-bit floats.
///
/// A chunk boundary never cuts an element, because chunk sizes are multiples of 4096.
#[must_use]
pub fn of(dtype: Dtype, bytes: &[u8]) -> Option<Statistics> {
    kernel::with_wide_vectors(
        #[inline(always)]
        || of_elements(dtype, bytes),
    )
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled once more with the vectors of its caller")]
fn of_elements(dtype: Dtype, bytes: &[u8]) -> Option<Statistics> {
    Some(match dtype {
        Dtype::Float32 | Dtype::Complex64 => of_words(bytes, u32::from_le_bytes),
        Dtype::Bfloat16 => of_words(bytes, |word| float32_of_bfloat16(u16::from_le_bytes(word))),
        Dtype::Float16 | Dtype::Complex32 => {
            of_words(bytes, |word| widen_to_float32::<Float16>(u16::from_le_bytes(word).into()))
        }
        Dtype::Float64 | Dtype::Complex128 => of_doubles(bytes),
        Dtype::Float8E4m3fn => {
            of_bytes(bytes, |byte| (byte & 0x7F != 0x7F).then(|| magnitude_of_8_bits(byte, 3, 7)))
        }
        Dtype::Float8E5m2 => {
            of_bytes(bytes, |byte| (byte & 0x7C != 0x7C).then(|| magnitude_of_8_bits(byte, 2, 15)))
        }
        Dtype::Float8E4m3fnuz => {
            of_bytes(bytes, |byte| (byte != 0x80).then(|| magnitude_of_8_bits(byte, 3, 8)))
        }
        Dtype::Float8E5m2fnuz => {
            of_bytes(bytes, |byte| (byte != 0x80).then(|| magnitude_of_8_bits(byte, 2, 16)))
        }
        Dtype::Float8E8m0fnu => {
            of_bytes(bytes, |byte| (byte != 0xFF).then(|| power_of_two(i32::from(byte) - 127)))
        }
        _ => return None,
    })
}

/// Adds up the lanes in a fixed order.
fn sum(mut lanes: [f64; LANES]) -> f64 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Calls `add` with the elements, [`LANES`] at a time; the last are filled up with zeros, which add nothing.
#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled once more with the vectors of its caller")]
fn each_row<const WIDTH: usize>(bytes: &[u8], mut add: impl FnMut(&[[u8; WIDTH]; LANES])) {
    let (words, _) = bytes.as_chunks::<WIDTH>();
    let (rows, rest) = words.as_chunks::<LANES>();
    for row in rows {
        add(row);
    }
    if !rest.is_empty() {
        let mut last = [[0; WIDTH]; LANES];
        last[..rest.len()].copy_from_slice(rest);
        add(&last);
    }
}

/// Statistics of elements that `float32` holds.
#[inline(always)]
fn of_words<const WIDTH: usize>(bytes: &[u8], to_float32: impl Fn([u8; WIDTH]) -> u32) -> Statistics {
    const INFINITY: i32 = 0x7F80_0000;
    let mut squares = [0.0; LANES];
    let mut largest = [0; LANES];
    let mut nonfinite = [0_u64; LANES];
    each_row(bytes, |row: &[[u8; WIDTH]; LANES]| {
        for lane in 0..LANES {
            // Magnitudes read as integers are ordered as the floats are.
            let magnitude = (to_float32(row[lane]) & 0x7FFF_FFFF).cast_signed();
            let is_finite = magnitude < INFINITY;
            let finite = if is_finite { magnitude } else { 0 };
            nonfinite[lane] += u64::from(!is_finite);
            largest[lane] = finite.max(largest[lane]);
            let value = f64::from(f32::from_bits(finite.cast_unsigned()));
            squares[lane] += value * value;
        }
    });
    let largest = largest.into_iter().fold(0, i32::max);
    Statistics {
        nonfinite: nonfinite.iter().sum(),
        abs_max: f64::from(f32::from_bits(largest.cast_unsigned())),
        square_sum: sum(squares),
    }
}

#[inline(always)]
fn of_doubles(bytes: &[u8]) -> Statistics {
    const INFINITY: i64 = 0x7FF0_0000_0000_0000;
    let mut squares = [0.0; LANES];
    let mut largest = [0; LANES];
    let mut nonfinite = [0_u64; LANES];
    each_row(bytes, |row| {
        for lane in 0..LANES {
            let magnitude = (u64::from_le_bytes(row[lane]) & (u64::MAX >> 1)).cast_signed();
            let is_finite = magnitude < INFINITY;
            let finite = if is_finite { magnitude } else { 0 };
            nonfinite[lane] += u64::from(!is_finite);
            largest[lane] = finite.max(largest[lane]);
            let value = f64::from_bits(finite.cast_unsigned());
            squares[lane] += value * value;
        }
    });
    let largest = largest.into_iter().fold(0, i64::max);
    Statistics {
        nonfinite: nonfinite.iter().sum(),
        abs_max: f64::from_bits(largest.cast_unsigned()),
        square_sum: sum(squares),
    }
}

/// Statistics by how often each byte stands there; `magnitude` is `None` for NaN and infinity.
#[expect(clippy::cast_precision_loss, reason = "a count above 2^53 is rounded, as its product would be")]
fn of_bytes(bytes: &[u8], magnitude: impl Fn(u8) -> Option<f64>) -> Statistics {
    // Equal bytes follow each other closely: with one table each increment would wait for the one before.
    let mut tables = [[0_u64; 256]; 4];
    let (rows, rest) = bytes.as_chunks::<4>();
    for row in rows {
        for (table, &byte) in tables.iter_mut().zip(row) {
            table[usize::from(byte)] += 1;
        }
    }
    for &byte in rest {
        tables[0][usize::from(byte)] += 1;
    }
    let mut statistics = Statistics::default();
    for byte in 0..=u8::MAX {
        let count = tables.iter().map(|table| table[usize::from(byte)]).sum::<u64>();
        match magnitude(byte) {
            _ if count == 0 => {}
            None => statistics.nonfinite += count,
            Some(value) => {
                statistics.abs_max = statistics.abs_max.max(value);
                statistics.square_sum += value * value * count as f64;
            }
        }
    }
    statistics
}

/// Magnitude of a finite 8-bit float with a sign bit.
fn magnitude_of_8_bits(byte: u8, mantissa_bits: u32, bias: i32) -> f64 {
    let magnitude = byte & 0x7F;
    let field = magnitude >> mantissa_bits;
    let hidden = u8::from(field > 0) << mantissa_bits;
    let significand = magnitude & ((1 << mantissa_bits) - 1) | hidden;
    f64::from(significand) * power_of_two(i32::from(field.max(1)) - bias - mantissa_bits.cast_signed())
}

/// `2^exponent`, for exponents of normal numbers.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(u64::from((exponent + 1023).cast_unsigned()) << 52)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::float_cmp, reason = "the same bits on every machine are what is promised")]

    use super::*;

    const FLOATS: [Dtype; 12] = [
        Dtype::Float16,
        Dtype::Bfloat16,
        Dtype::Float32,
        Dtype::Float64,
        Dtype::Complex32,
        Dtype::Complex64,
        Dtype::Complex128,
        Dtype::Float8E4m3fn,
        Dtype::Float8E4m3fnuz,
        Dtype::Float8E5m2,
        Dtype::Float8E5m2fnuz,
        Dtype::Float8E8m0fnu,
    ];

    fn noise(length: usize) -> Vec<u8> {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let step = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        (0..length).map(step).collect()
    }

    /// Values of the 16-bit floats by another implementation, of the wider ones by the language.
    fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
        match dtype {
            Dtype::Float16 | Dtype::Complex32 => {
                bytes.as_chunks().0.iter().map(|&word| half::f16::from_le_bytes(word).to_f64()).collect()
            }
            Dtype::Bfloat16 => {
                bytes.as_chunks().0.iter().map(|&word| half::bf16::from_le_bytes(word).to_f64()).collect()
            }
            Dtype::Float32 | Dtype::Complex64 => {
                bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word).into()).collect()
            }
            _ => bytes.as_chunks().0.iter().map(|&word| f64::from_le_bytes(word)).collect(),
        }
    }

    fn naive(values: &[f64]) -> Statistics {
        let finite = || values.iter().filter(|value| value.is_finite());
        Statistics {
            nonfinite: (values.len() - finite().count()) as u64,
            abs_max: finite().fold(0.0, |largest, value| value.abs().max(largest)),
            square_sum: finite().map(|value| value * value).sum(),
        }
    }

    #[test]
    fn equal_a_naive_sum_at_every_length() {
        // Quarters: their squares add up exactly in every order.
        let quarters: Vec<f64> =
            noise(3 * LANES).iter().map(|&byte| f64::from(byte.cast_signed()) / 4.0).collect();
        for length in 0..=quarters.len() {
            let values = &quarters[..length];
            let singles: Vec<u8> = values.iter().flat_map(|&value| (value as f32).to_le_bytes()).collect();
            let doubles: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let halves: Vec<u8> =
                values.iter().flat_map(|&value| half::f16::from_f64(value).to_le_bytes()).collect();
            let upper_halves: Vec<u8> =
                values.iter().flat_map(|&value| half::bf16::from_f64(value).to_le_bytes()).collect();
            let expected = Some(naive(values));
            assert_eq!(of(Dtype::Float32, &singles), expected);
            assert_eq!(of(Dtype::Float64, &doubles), expected);
            assert_eq!(of(Dtype::Float16, &halves), expected);
            assert_eq!(of(Dtype::Bfloat16, &upper_halves), expected);
        }
    }

    #[test]
    fn noise_of_all_patterns_is_near_a_naive_sum() {
        // Every bit pattern of 16 bits stands in it, so that subnormals, NaN and infinities do.
        let mut bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        bytes.extend(noise(1 << 16));
        for dtype in &FLOATS[..7] {
            let values = values(*dtype, &bytes);
            let (found, expected) = (of(*dtype, &bytes).unwrap(), naive(&values));
            assert_eq!((found.nonfinite, found.abs_max), (expected.nonfinite, expected.abs_max), "{dtype:?}");
            let ratio = found.square_sum / expected.square_sum;
            assert!(
                found.square_sum == expected.square_sum || (ratio - 1.0).abs() < 1e-12,
                "{dtype:?}: {ratio}"
            );
        }
    }

    #[test]
    fn vectors_of_every_width_give_the_same_bits() {
        let bytes = noise((1 << 16) + 3);
        for dtype in FLOATS {
            for length in [0, 1, 16, 100, 4096, bytes.len()] {
                let found = kernel::with_each_vectors(
                    #[inline(always)]
                    || of_elements(dtype, &bytes[..length]).unwrap(),
                );
                for other in &found {
                    assert_eq!(other.square_sum.to_bits(), found[0].square_sum.to_bits(), "{dtype:?}");
                    assert_eq!(*other, found[0], "{dtype:?}");
                }
            }
        }
    }

    /// The sum of the same values, lane by lane, in Python.
    #[test]
    fn sums_are_those_of_every_other_machine() {
        let bytes: Vec<u8> = noise(1000)
            .iter()
            .flat_map(|&byte| (f32::from(byte.cast_signed()) / 7.0).to_le_bytes())
            .collect();
        let found = of(Dtype::Float32, &bytes).unwrap();
        assert_eq!(found.square_sum.to_bits(), 0x40FB_B47F_057A_D223, "{found:?}");
    }

    /// Half of a unit in the last place of 1 is lost when it joins alone, but two of them don't.
    #[test]
    fn the_order_of_additions_is_fixed() {
        let square_sum = |places: &[usize]| {
            let mut values = [0.0_f64; 2 * LANES];
            values[0] = 1.0;
            for &place in places {
                values[place] = 2.0_f64.powi(-27) * 1.4;
            }
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            of(Dtype::Float64, &bytes).unwrap().square_sum
        };
        assert_eq!(square_sum(&[LANES]), 1.0, "the same lane");
        assert_eq!(square_sum(&[8, 4]), 1.0, "lanes that join lane 0 one after the other");
        assert_eq!(square_sum(&[4, 12]), 1.0 + f64::EPSILON, "lanes that join each other first");
    }

    #[test]
    fn squares_of_tiny_moments_are_not_lost() {
        let bytes: Vec<u8> = [1e-25_f32; 4].iter().flat_map(|value| value.to_le_bytes()).collect();
        let found = of(Dtype::Float32, &bytes).unwrap();
        assert!((found.l2_norm() / 2e-25 - 1.0).abs() < 1e-7, "{found:?}");
        assert_eq!(found.abs_max, f64::from(1e-25_f32));
    }

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
        assert_eq!(of(Dtype::Float32, &bytes).unwrap().nonfinite, 4);
        assert_eq!(of(Dtype::Complex64, &bytes).unwrap().abs_max, f64::from(f32::MAX));
        let bytes: Vec<u8> =
            [-3.0, f64::NAN, 0.0, f64::INFINITY].iter().flat_map(|value| value.to_le_bytes()).collect();
        let expected = Statistics { nonfinite: 2, abs_max: 3.0, square_sum: 9.0 };
        assert_eq!(of(Dtype::Float64, &bytes), Some(expected));
        assert_eq!(of(Dtype::Complex128, &bytes), Some(expected));
    }

    #[test]
    fn small_floats_follow_their_own_tables() {
        let every: Vec<u8> = (0..=255).collect();
        let of_every = |dtype| of(dtype, &every).map(|found| (found.nonfinite, found.abs_max)).unwrap();
        assert_eq!(of_every(Dtype::Float8E4m3fn), (2, 448.0), "two NaN, no infinity");
        assert_eq!(of_every(Dtype::Float8E5m2), (8, 57_344.0), "two infinities, six NaN");
        assert_eq!(of_every(Dtype::Float8E4m3fnuz), (1, 240.0));
        assert_eq!(of_every(Dtype::Float8E5m2fnuz), (1, 57_344.0));
        assert_eq!(of_every(Dtype::Float8E8m0fnu), (1, 2.0_f64.powi(127)));
        let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        assert_eq!(of(Dtype::Float16, &every).unwrap().nonfinite, 2 * 1024);
        assert_eq!(of(Dtype::Bfloat16, &every).unwrap().nonfinite, 2 * 128);
    }

    #[test]
    fn small_floats_add_up_by_value() {
        let found = |dtype, bytes: &[u8]| of(dtype, bytes).unwrap();
        let expected = |abs_max, square_sum| Statistics { nonfinite: 0, abs_max, square_sum };
        // 1, -2, the smallest subnormal; five bytes, so that not every table is filled equally.
        let found_e4m3 = found(Dtype::Float8E4m3fn, &[0x38, 0xC0, 0x01, 0x00, 0x38]);
        assert_eq!(found_e4m3, expected(2.0, 6.0 + 2.0_f64.powi(-18)));
        assert_eq!(found(Dtype::Float8E5m2, &[0x3C, 0xC0, 0x01]), expected(2.0, 5.0 + 2.0_f64.powi(-32)));
        assert_eq!(found(Dtype::Float8E4m3fnuz, &[0x40, 0xC8, 0x01]), expected(2.0, 5.0 + 2.0_f64.powi(-20)));
        assert_eq!(found(Dtype::Float8E5m2fnuz, &[0x40, 0xC4, 0x01]), expected(2.0, 5.0 + 2.0_f64.powi(-34)));
        assert_eq!(found(Dtype::Float8E8m0fnu, &[127, 128, 126]), expected(2.0, 5.25));
    }

    #[test]
    fn parts_join_and_nothing_is_neutral() {
        let first = Statistics { nonfinite: 1, abs_max: 4.0, square_sum: 16.0 };
        let second = Statistics { nonfinite: 2, abs_max: 3.0, square_sum: 9.0 };
        let both = first.join(second);
        assert_eq!(both, Statistics { nonfinite: 3, abs_max: 4.0, square_sum: 25.0 });
        assert_eq!(both.l2_norm(), 5.0);
        assert_eq!(both.join(of(Dtype::Float32, &[]).unwrap()), both);
    }

    #[test]
    fn what_is_no_float_has_none() {
        for dtype in
            [Dtype::Int32, Dtype::Bool, Dtype::Uint8, Dtype::Int64, Dtype::Uint16, Dtype::Float4E2m1fnX2]
        {
            assert_eq!(of(dtype, &[0xFF; 8]), None);
        }
    }
}
