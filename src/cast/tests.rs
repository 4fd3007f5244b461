//! Casts against exact arithmetic on rational numbers, and against the `half` crate.

use std::cmp::Ordering;

use super::*;

/// Narrower dtypes with the widths of exponent and mantissa, apart from [`Layout`].
const STORED: [(Dtype, u32, u32); 5] = [
    (Dtype::Float32, 8, 23),
    (Dtype::Float16, 5, 10),
    (Dtype::Bfloat16, 8, 7),
    (Dtype::Float8E5m2, 5, 2),
    (Dtype::Float8E4m3fn, 4, 3),
];
const ORIGINAL: [Dtype; 4] = [Dtype::Float64, Dtype::Float32, Dtype::Float16, Dtype::Bfloat16];

fn widths(dtype: Dtype) -> (u32, u32) {
    STORED.iter().find(|row| row.0 == dtype).map_or((11, 52), |row| (row.1, row.2))
}

fn pairs() -> impl Iterator<Item = (Dtype, Dtype)> {
    let stored = STORED.iter().map(|row| row.0);
    stored.flat_map(|to| {
        ORIGINAL.into_iter().filter(move |&from| from.narrows_to(to)).map(move |from| (from, to))
    })
}

fn encode(dtype: Dtype, patterns: &[u64]) -> Vec<u8> {
    let size = dtype.size_bytes() as usize;
    patterns.iter().flat_map(|pattern| pattern.to_le_bytes().into_iter().take(size)).collect()
}

fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<u64> {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
    bytes.chunks(dtype.size_bytes() as usize).map(word).collect()
}

fn narrowed(from: Dtype, to: Dtype, scale_log2: i32, patterns: &[u64]) -> Vec<u64> {
    let mut target = vec![0xEE; patterns.len() * to.size_bytes() as usize];
    narrow(from, to, scale_log2, &encode(from, patterns), &mut target).unwrap();
    decode(to, &target)
}

fn widened(stored: Dtype, original: Dtype, scale_log2: i32, patterns: &[u64]) -> Vec<u64> {
    let mut target = vec![0xEE; patterns.len() * original.size_bytes() as usize];
    widen(stored, original, scale_log2, &encode(stored, patterns), &mut target).unwrap();
    decode(original, &target)
}

/// `significand * 2^power`, exactly.
#[derive(Clone, Copy)]
struct Exact {
    significand: u128,
    power: i64,
}

impl Exact {
    /// The value of a magnitude, as if every exponent field held numbers.
    fn of(dtype: Dtype, magnitude: u64) -> Self {
        let (exponent_bits, mantissa_bits) = widths(dtype);
        let bias = (1_i64 << (exponent_bits - 1)) - 1;
        let field = (magnitude >> mantissa_bits).cast_signed();
        let mantissa = u128::from(magnitude) % (1 << mantissa_bits);
        let (significand, field) =
            if field == 0 { (mantissa, 1) } else { (mantissa + (1 << mantissa_bits), field) };
        Self { significand, power: field - bias - i64::from(mantissa_bits) }
    }

    /// Both as multiples of one power of two, where they are near enough to need it.
    fn compare(self, other: Self) -> Ordering {
        let top = |number: Self| number.power + i64::from(number.significand.max(1).ilog2());
        if self.significand == 0 || other.significand == 0 || top(self) != top(other) {
            let zero = (self.significand > 0).cmp(&(other.significand > 0));
            return if zero == Ordering::Equal && self.significand > 0 {
                top(self).cmp(&top(other))
            } else {
                zero
            };
        }
        let power = self.power.min(other.power);
        (self.significand << (self.power - power)).cmp(&(other.significand << (other.power - power)))
    }

    /// Half of the sum of two neighbours.
    fn between(lower: Self, upper: Self) -> Self {
        let power = lower.power.min(upper.power);
        let at = |number: Self| number.significand << (number.power - power);
        Self { significand: at(lower) + at(upper), power: power - 1 }
    }
}

/// The magnitude of the first pattern that is no finite number.
fn overflow(dtype: Dtype) -> u64 {
    let (exponent_bits, mantissa_bits) = widths(dtype);
    if dtype == Dtype::Float8E4m3fn { 0x7F } else { ((1 << exponent_bits) - 1) << mantissa_bits }
}

/// What a cast must give, found by searching the target's numbers.
fn reference(from: Dtype, to: Dtype, scale_log2: i32, pattern: u64) -> u64 {
    let (from_exponent, from_mantissa) = widths(from);
    let (to_exponent, to_mantissa) = widths(to);
    let sign = pattern >> (from_exponent + from_mantissa);
    let magnitude = pattern - (sign << (from_exponent + from_mantissa));
    let signed = |magnitude| sign << (to_exponent + to_mantissa) | magnitude;
    let is_nan = if from == Dtype::Float8E4m3fn { magnitude == 0x7F } else { magnitude > overflow(from) };
    if is_nan {
        let payload = u128::from(magnitude) % (1 << from_mantissa);
        let kept = ((payload << 64 >> from_mantissa << to_mantissa) >> 64) as u64;
        let kept = if kept == 0 { 1 << (to_mantissa - 1) } else { kept };
        return signed(if to == Dtype::Float8E4m3fn { 0x7F } else { overflow(to) + kept });
    }
    if magnitude == overflow(from) {
        return signed(overflow(to));
    }
    let mut value = Exact::of(from, magnitude);
    value.power -= i64::from(scale_log2);
    // The last magnitude that isn't above the value.
    let (mut low, mut high) = (0, overflow(to));
    while high - low > 1 {
        let middle = u64::midpoint(low, high);
        if Exact::of(to, middle).compare(value) == Ordering::Greater { high = middle } else { low = middle }
    }
    let middle = Exact::between(Exact::of(to, low), Exact::of(to, low + 1));
    signed(match value.compare(middle) {
        Ordering::Less => low,
        Ordering::Greater => low + 1,
        Ordering::Equal => low + low % 2,
    })
}

/// All patterns of narrow floats; of wide ones every exponent with the mantissas at which rounding turns,
/// for each narrower width.
fn patterns(dtype: Dtype) -> Vec<u64> {
    if dtype.size_bytes() <= 2 {
        return (0..1 << (8 * dtype.size_bytes())).collect();
    }
    let (exponent_bits, mantissa_bits) = widths(dtype);
    let mantissas = 1_u64 << mantissa_bits;
    let mut corners = vec![0, 1, 2, 3, mantissas - 1, mantissas - 2];
    for kept in [0, 1, 2, 3, 7, 10, 23].into_iter().filter(|&kept| kept < mantissa_bits) {
        let unit = 1 << (mantissa_bits - kept);
        for steps in [0, 1, 2, 3, (1_u64 << kept).wrapping_sub(2), (1 << kept) - 1] {
            let middle = (steps % (1 << kept)) * unit + unit / 2;
            corners.extend([middle - 1, middle, middle + 1, middle - unit / 2, middle / 2, unit / 2 - 1]);
        }
    }
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut patterns = Vec::new();
    for field in 0..1_u64 << exponent_bits {
        let mut mantissas_here = corners.clone();
        for _ in 0..32 {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            mantissas_here.push((state >> 11) % mantissas);
        }
        for sign in [0, 1] {
            patterns.extend(
                mantissas_here
                    .iter()
                    .map(|mantissa| (sign << exponent_bits | field) << mantissa_bits | mantissa),
            );
        }
    }
    // Half-way cases among subnormals: every shift of a bit, and its neighbours.
    for bit in 1..mantissa_bits {
        patterns.extend([(1 << bit) - 1, 1 << bit, (1 << bit) + 1, 3 << (bit - 1)]);
    }
    patterns
}

fn assert_equals_reference(from: Dtype, to: Dtype, scale_log2: i32, patterns: &[u64], found: &[u64]) {
    for (&pattern, &found) in patterns.iter().zip(found) {
        let expected = reference(from, to, scale_log2, pattern);
        assert_eq!(
            found, expected,
            "{pattern:#x} of {from:?} by 2^-{scale_log2} as {to:?}: {found:#x} {expected:#x}"
        );
    }
}

#[test]
fn every_narrowing_rounds_once_to_nearest_even() {
    for (from, to) in pairs() {
        let patterns = patterns(from);
        assert_equals_reference(from, to, 0, &patterns, &narrowed(from, to, 0, &patterns));
    }
}

#[test]
fn every_scaled_narrowing_rounds_once_to_nearest_even() {
    for (from, to) in pairs() {
        let all = patterns(from);
        let far = [i32::MIN, -1300, -170, -150, -20, -1, 1, 9, 120, 160, 1080, 1200, i32::MAX];
        for (index, scale_log2) in far.into_iter().enumerate() {
            let some: Vec<u64> = all.iter().copied().skip(index).step_by(29).collect();
            assert_equals_reference(from, to, scale_log2, &some, &narrowed(from, to, scale_log2, &some));
        }
    }
}

#[test]
fn every_widening_is_exact_or_rounded_to_nearest_even() {
    for (original, stored) in pairs() {
        let patterns = patterns(stored);
        for scale_log2 in [0, 1, -1, 8, -9, 100, -120, 1000, -1080, i32::MIN, i32::MAX] {
            let step = if scale_log2 == 0 || stored.size_bytes() == 1 { 1 } else { 29 };
            let patterns: Vec<u64> = patterns.iter().copied().step_by(step).collect();
            let found = widened(stored, original, scale_log2, &patterns);
            assert_equals_reference(stored, original, scale_log2.saturating_neg(), &patterns, &found);
        }
    }
}

#[test]
fn what_was_stored_is_stored_again_bit_for_bit() {
    for (original, stored) in pairs() {
        let patterns = patterns(stored);
        // Scales that keep all of the stored numbers in the original's range, subnormals included.
        let scales: &[i32] = match (original, stored) {
            (Dtype::Float64, Dtype::Float32 | Dtype::Bfloat16) => &[0, -800, 800],
            (Dtype::Float64, _) => &[0, -1000, 1000],
            (_, Dtype::Bfloat16) => &[0],
            (Dtype::Float32 | Dtype::Bfloat16, _) => &[0, -100, 100],
            (_, Dtype::Float8E4m3fn) => &[0, -8, 7],
            _ => &[0],
        };
        for &scale_log2 in scales {
            let back = widened(stored, original, scale_log2, &patterns);
            let again = narrowed(original, stored, scale_log2, &back);
            assert!(again == patterns, "{original:?} {stored:?} {scale_log2}");
        }
    }
}

#[test]
fn another_implementation_agrees() {
    for pattern in 0..=u16::MAX {
        let wide = |dtype| widened(dtype, Dtype::Float32, 0, &[pattern.into()])[0];
        let (half, upper) = (half::f16::from_bits(pattern), half::bf16::from_bits(pattern));
        if !half.is_nan() {
            assert_eq!(wide(Dtype::Float16), u64::from(half.to_f32().to_bits()));
        }
        if !upper.is_nan() {
            assert_eq!(wide(Dtype::Bfloat16), u64::from(upper.to_f32().to_bits()));
        }
    }
    let patterns = patterns(Dtype::Float32);
    let halves = narrowed(Dtype::Float32, Dtype::Float16, 0, &patterns);
    let uppers = narrowed(Dtype::Float32, Dtype::Bfloat16, 0, &patterns);
    for ((&pattern, half), upper) in patterns.iter().zip(halves).zip(uppers) {
        let value = f32::from_bits(pattern as u32);
        if !value.is_nan() {
            assert_eq!(half, u64::from(half::f16::from_f32(value).to_bits()), "{pattern:#x}");
            assert_eq!(upper, u64::from(half::bf16::from_f32(value).to_bits()), "{pattern:#x}");
        }
    }
    // The language's own conversion, which is IEEE's, for numbers.
    let doubles: Vec<u64> =
        self::patterns(Dtype::Float64).into_iter().filter(|&bits| !f64::from_bits(bits).is_nan()).collect();
    for (&bits, found) in doubles.iter().zip(narrowed(Dtype::Float64, Dtype::Float32, 0, &doubles)) {
        assert_eq!(found, u64::from((f64::from_bits(bits) as f32).to_bits()), "{bits:#x}");
    }
}

#[test]
fn vectors_of_every_width_and_single_elements_give_the_same_bits() {
    for (from, to) in pairs() {
        for scale_log2 in [0, -7, 130] {
            let expected = |from, to, scale_log2: i32, patterns: &[u64]| -> Vec<u64> {
                let (from, to) = (layout(from).unwrap(), layout(to).unwrap());
                patterns.iter().map(|&bits| convert(from, to, scale_log2, bits)).collect()
            };
            let (wide, narrow) = (patterns(from), patterns(to));
            let source = encode(from, &wide);
            let wanted = expected(from, to, scale_log2, &wide);
            for found in each_narrowing(from, to, scale_log2, &source) {
                assert!(decode(to, &found) == wanted, "{from:?} {to:?} {scale_log2}");
            }
            let source = encode(to, &narrow);
            let wanted = expected(to, from, -scale_log2, &narrow);
            for found in each_widening(to, from, scale_log2, &source) {
                assert!(decode(from, &found) == wanted, "{to:?} {from:?} {scale_log2}");
            }
        }
    }
}

fn target(from: Dtype, to: Dtype, source: &[u8]) -> Vec<u8> {
    vec![0xEE; source.len() / from.size_bytes() as usize * to.size_bytes() as usize]
}

fn each_narrowing(from: Dtype, to: Dtype, scale_log2: i32, source: &[u8]) -> Vec<Vec<u8>> {
    kernel::with_each_vectors(
        #[inline(always)]
        || {
            let mut target = target(from, to, source);
            narrow_elements(from, to, scale_log2, source, &mut target);
            target
        },
    )
}

fn each_widening(stored: Dtype, original: Dtype, scale_log2: i32, source: &[u8]) -> Vec<Vec<u8>> {
    kernel::with_each_vectors(
        #[inline(always)]
        || {
            let mut target = target(stored, original, source);
            widen_elements(stored, original, scale_log2, source, &mut target);
            target
        },
    )
}

#[test]
fn every_length_and_alignment_is_cast_whole() {
    let patterns: Vec<u64> = (0..80).map(|index| 0x3F80_0000 + index * 0x1_8001).collect();
    let source = encode(Dtype::Float32, &patterns);
    let whole = encode(Dtype::Bfloat16, &narrowed(Dtype::Float32, Dtype::Bfloat16, 0, &patterns));
    for (start, end) in [(0, 0), (0, 1), (1, 2), (3, 80), (5, 20), (0, 79)] {
        let mut target = vec![0xEE; 2 * (end - start) + 3];
        let inner = 1..target.len() - 2;
        narrow(Dtype::Float32, Dtype::Bfloat16, 0, &source[4 * start..4 * end], &mut target[inner.clone()])
            .unwrap();
        assert_eq!(target[inner], whole[2 * start..2 * end]);
        assert_eq!((target[0], &target[target.len() - 2..]), (0xEE, [0xEE; 2].as_slice()));
    }
}

/// Long targets are written past the cache, from the first line on that starts in them.
#[test]
fn long_arrays_are_cast_as_short_ones() {
    const COUNT: usize = 2_200_000;
    let source: Vec<u8> =
        (0..4 * COUNT as u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut expected = vec![0; 2 * COUNT];
    for (source, target) in source.chunks(4000).zip(expected.chunks_mut(2000)) {
        narrow(Dtype::Float32, Dtype::Bfloat16, 0, source, target).unwrap();
    }
    for (shift, count) in [(0, COUNT), (2, COUNT - 1), (1, COUNT - 63), (62, COUNT)] {
        let mut target = vec![0xEE; shift + 2 * count + 9];
        let inner = shift..shift + 2 * count;
        narrow(Dtype::Float32, Dtype::Bfloat16, 0, &source[..4 * count], &mut target[inner.clone()]).unwrap();
        assert!(target[inner.clone()] == expected[..2 * count], "shift {shift}");
        assert!(
            target[..shift].iter().chain(&target[inner.end..]).all(|&byte| byte == 0xEE),
            "shift {shift}"
        );
    }
}

#[test]
fn scales_bring_the_largest_magnitude_as_high_as_it_goes() {
    let scale = |to, abs_max| scale_log2(Dtype::Float32, to, abs_max);
    for (to, largest, last) in
        [(Dtype::Float8E4m3fn, 448.0, 464.0), (Dtype::Float8E5m2, 57_344.0, 61_439.996_f64)]
    {
        assert_eq!((scale(to, largest), scale(to, largest / 1024.0)), (0, -10));
        assert_eq!((scale(to, last), scale(to, last.next_up() * 1.000_001)), (0, 1), "{to:?}");
    }
    assert_eq!(scale(Dtype::Float8E5m2, 61_440.0), 1, "a tie whose even neighbour is infinity");
    assert_eq!(scale(Dtype::Float8E4m3fn, 1.0), -8);
    for abs_max in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert_eq!(scale(Dtype::Float8E4m3fn, abs_max), 0);
    }
    assert_eq!(scale(Dtype::Bfloat16, 1e30), 0);
    assert_eq!(scale_log2(Dtype::Int64, Dtype::Float8E5m2, 3.0), 0);
}

/// For every exponent of the source: nothing overflows, and one step less would.
#[test]
fn scaled_values_never_overflow_and_use_the_whole_range() {
    for to in [Dtype::Float8E4m3fn, Dtype::Float8E5m2] {
        for bits in patterns(Dtype::Float64).into_iter().filter(|&bits| f64::from_bits(bits) > 0.0) {
            let value = f64::from_bits(bits);
            if !value.is_finite() {
                continue;
            }
            let scale = scale_log2(Dtype::Float64, to, value);
            let at = |scale| convert(Layout::FLOAT64, layout(to).unwrap(), scale, bits);
            assert!(at(scale) < overflow(to), "{value} by 2^-{scale}");
            assert_eq!(at(scale - 1), overflow(to), "{value} by 2^-{scale}");
        }
    }
}

#[test]
fn special_values_keep_their_meaning() {
    let one = |from, to, pattern| narrowed(from, to, 0, &[pattern])[0];
    let (wide, half, upper) = (Dtype::Float32, Dtype::Float16, Dtype::Bfloat16);
    assert_eq!(one(wide, half, 0x8000_0000), 0x8000, "minus zero");
    assert_eq!(one(wide, half, 0xFF80_0000), 0xFC00, "minus infinity");
    assert_eq!(one(wide, half, 0x7F80_0001), 0x7E00, "a payload that doesn't survive");
    assert_eq!(one(wide, half, 0xFFA0_2000), 0xFD01, "a signalling NaN is not quieted");
    assert_eq!(widened(half, wide, 0, &[0xFD01]), [0xFFA0_2000], "nor on the way back");
    assert_eq!(one(wide, upper, 0x7FFF_FFFF), 0x7FFF, "the highest NaN doesn't wrap into zero");
    assert_eq!(one(wide, upper, 0x7F7F_FFFF), 0x7F80, "the largest number overflows");
    assert_eq!(one(wide, Dtype::Float8E4m3fn, 0xFF80_0000), 0xFF, "no infinity, but NaN with the sign");
    // Half-way in float16, a little above it in float64, and again half-way after float32.
    assert_eq!(one(Dtype::Float64, half, (1.0 + 2.0_f64.powi(-11) + 2.0_f64.powi(-40)).to_bits()), 0x3C01);
}

#[test]
fn wrong_arguments_are_refused() {
    let refusal = |result: Result<()>| result.unwrap_err().to_string();
    let mut target = [0; 8];
    for (from, to) in [
        (Dtype::Float16, Dtype::Bfloat16),
        (Dtype::Float32, Dtype::Float32),
        (Dtype::Bfloat16, Dtype::Float32),
        (Dtype::Int64, Dtype::Float32),
        (Dtype::Float32, Dtype::Float8E4m3fnuz),
        (Dtype::Complex64, Dtype::Float16),
    ] {
        assert!(!from.narrows_to(to));
        let expected = format!(
            "invalid cast of `{}` to `{}`: must be from a real float to one of fewer bytes",
            from.name(),
            to.name()
        );
        assert_eq!(refusal(narrow(from, to, 0, &[0; 8], &mut target)), expected);
        assert_eq!(refusal(widen(to, from, 0, &[0; 8], &mut target)), expected);
    }
    let mut cast = |source: &[u8]| narrow(Dtype::Float32, Dtype::Bfloat16, 0, source, &mut target);
    assert_eq!(
        refusal(cast(&[0; 12])),
        "invalid length of a cast: 12 bytes of `float32`: don't fill 8 bytes of `bfloat16`"
    );
    assert!(cast(&[0; 17]).is_err() && cast(&[0; 16]).is_ok());
    let result = widen(Dtype::Float16, Dtype::Float32, 0, &[0; 8], &mut target);
    assert_eq!(
        refusal(result),
        "invalid length of a cast: 8 bytes of `float16`: don't fill 8 bytes of `float32`"
    );
}

/// All numbers of `float32` take minutes.
#[test]
#[ignore = "casts every float32, which takes minutes: run it when the lanes change"]
fn every_float32_is_cast_as_one_by_one() {
    for to in [Dtype::Bfloat16, Dtype::Float16, Dtype::Float8E5m2, Dtype::Float8E4m3fn] {
        let layout = layout(to).unwrap();
        let scale_log2 = if to.size_bytes() == 1 { -3 } else { 0 };
        for block in 0..1_u64 << 12 {
            let patterns: Vec<u64> = (block << 20..(block + 1) << 20).collect();
            for (&bits, found) in patterns.iter().zip(narrowed(Dtype::Float32, to, scale_log2, &patterns)) {
                assert_eq!(found, convert(Layout::FLOAT32, layout, scale_log2, bits), "{bits:#x} as {to:?}");
            }
        }
    }
}
