//! Conversions without branches, which compilers turn into vectors where they are inlined into a loop.
//!
//! Each equals [`super::convert`] for every pattern. Call them inside `kernel::with_wide_vectors`.
#![expect(clippy::inline_always, reason = "compiled again with the vectors of each caller")]

use super::Layout;

/// A layout as a type, so that its widths are constants of the loop.
pub trait Float {
    /// Its layout.
    const LAYOUT: Layout;
}

macro_rules! floats {
    ($($(#[$doc:meta])* $name:ident = $layout:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub struct $name;

        impl Float for $name {
            const LAYOUT: Layout = Layout::$layout;
        }
    )*};
}

floats! {
    /// [`Layout::FLOAT32`].
    Float32 = FLOAT32;
    /// [`Layout::FLOAT16`].
    Float16 = FLOAT16;
    /// [`Layout::BFLOAT16`].
    Bfloat16 = BFLOAT16;
    /// [`Layout::FLOAT8_E5M2`].
    Float8E5m2 = FLOAT8_E5M2;
    /// [`Layout::FLOAT8_E4M3FN`].
    Float8E4m3fn = FLOAT8_E4M3FN;
}

/// A binary32 rounded to its upper half.
#[inline(always)]
#[must_use]
pub fn bfloat16_of_float32(bits: u32) -> u16 {
    let is_nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let cut = bits >> 16;
    let payload = cut & 0x7F;
    let nan = if payload == 0 { cut | 0x40 } else { cut };
    (if is_nan { nan } else { rounded }) as u16
}

/// A binary32 whose upper half this is.
#[inline(always)]
#[must_use]
pub fn float32_of_bfloat16(bits: u16) -> u32 {
    u32::from(bits) << 16
}

/// Conversions between a wide float (`$float`, whose bits are `$bits`) and narrower layouts.
macro_rules! conversions {
    ($narrow:ident, $widen:ident, $scale:ident, $float:ident, $bits:ident, $signed:ident) => {
        #[doc = concat!("A power of two by which each `", stringify!($float), "` is divided first.")]
        ///
        /// Bits of positive floats, read as integers, are ordered as the floats, and one step of the
        /// exponent field is a factor of two: scaling is a subtraction. What lies beyond every number of
        /// the target is clamped before, so that no difference leaves the exponent field.
        #[derive(Clone, Copy, Debug)]
        pub struct $scale {
            floor: $signed,
            ceiling: $signed,
            difference: $signed,
        }

        impl $scale {
            /// Division by `2^scale_log2` on the way to `Target`.
            #[must_use]
            pub fn new<Target: Float>(scale_log2: i32) -> Self {
                const MANTISSA: u32 = $float::MANTISSA_DIGITS - 1;
                const BIAS: i32 = $float::MAX_EXP - 1;
                // Below `2^-reach` everything is rounded to zero, and `2^reach` overflows.
                let reach = (Target::LAYOUT.bias() + Target::LAYOUT.mantissa_bits + 3).cast_signed();
                let lowest = -(BIAS + MANTISSA.cast_signed() + reach);
                let scale_log2 = scale_log2.clamp(lowest, BIAS + 1 + reach);
                let ceiling = (BIAS + reach + scale_log2).min(2 * BIAS + 1);
                Self {
                    floor: $signed::from(scale_log2 + 1) << MANTISSA,
                    ceiling: $signed::from(ceiling) << MANTISSA,
                    difference: $signed::from(scale_log2) << MANTISSA,
                }
            }
        }

        #[doc = concat!("A `", stringify!($float), "` divided by `scale` and rounded to `Target`.")]
        ///
        /// Only 8-bit targets are scaled; for others `scale` must be that of 0.
        #[inline(always)]
        #[must_use]
        pub fn $narrow<Target: Float>(bits: $bits, scale: $scale) -> $bits {
            const MANTISSA: u32 = $float::MANTISSA_DIGITS - 1;
            const BIAS: u32 = ($float::MAX_EXP - 1).cast_unsigned();
            const HIDDEN: $bits = 1 << MANTISSA;
            const INFINITY: $bits = $float::INFINITY.to_bits();
            let to = const { Target::LAYOUT };
            let is_scaled = const { Target::LAYOUT.magnitude_bits() == 7 };
            let cut = MANTISSA - to.mantissa_bits;
            let overflow = to.overflow() as $bits;
            let magnitude = bits & ($bits::MAX >> 1);

            let mut linear = magnitude.cast_signed();
            if is_scaled {
                // The mantissa of a subnormal as a number of its own, exactly, then its exponent.
                let integer = const { ((MANTISSA + BIAS) as $bits) << MANTISSA };
                let counted = $float::from_bits(magnitude | integer) - $float::from_bits(integer);
                let quantum = const { ((MANTISSA + BIAS - 1) as $bits) << MANTISSA };
                let normalized = counted.to_bits().wrapping_sub(quantum).cast_signed();
                linear = if magnitude < HIDDEN { normalized } else { linear };
            }
            let scaled = linear.max(scale.floor).min(scale.ceiling).wrapping_sub(scale.difference);

            let rebias = const { ((BIAS - Target::LAYOUT.bias()) as $bits) << MANTISSA }.cast_signed();
            let odd = scaled >> cut & 1;
            let normal = scaled.wrapping_sub(rebias).wrapping_add((1 << (cut - 1)) - 1 + odd) >> cut;
            // One unit in the last place of `unit` is the quantum of the target's subnormals: the sum
            // rounds to it.
            let unit = const {
                let field = BIAS + 1 - Target::LAYOUT.bias() + MANTISSA - Target::LAYOUT.mantissa_bits;
                (field as $bits) << MANTISSA
            };
            let sum = $float::from_bits(scaled.cast_unsigned()) + $float::from_bits(unit);
            let subnormal = sum.to_bits().wrapping_sub(unit).cast_signed();
            let is_subnormal = scaled < rebias + HIDDEN.cast_signed();
            let finite = if is_subnormal { subnormal } else { normal }.min(overflow.cast_signed());

            let payload = (magnitude & (HIDDEN - 1)) >> cut;
            let quiet = 1 << (to.mantissa_bits - 1);
            let nan = overflow | if payload == 0 { quiet } else { payload };
            let nonfinite = if magnitude > INFINITY { nan } else { overflow };
            let result = if magnitude >= INFINITY { nonfinite } else { finite.cast_unsigned() };
            bits >> ($bits::BITS - 1) << to.magnitude_bits() | result
        }

        #[doc = concat!("The `", stringify!($float), "` of the same value; `Source` must have infinity.")]
        #[inline(always)]
        #[must_use]
        pub fn $widen<Source: Float>(bits: $bits) -> $bits {
            const MANTISSA: u32 = $float::MANTISSA_DIGITS - 1;
            const BIAS: u32 = ($float::MAX_EXP - 1).cast_unsigned();
            let from = const {
                assert!(Source::LAYOUT.has_infinity);
                Source::LAYOUT
            };
            let rebias = const { ((BIAS - Source::LAYOUT.bias()) as $bits) << MANTISSA };
            let magnitude = bits & ((1 << from.magnitude_bits()) - 1);
            let shifted = magnitude << (MANTISSA - from.mantissa_bits);
            let normal = shifted + rebias;
            // With a hidden bit it is a normal number; taking the hidden bit away again is exact.
            let hidden = rebias + (1 << MANTISSA);
            let subnormal = ($float::from_bits(shifted + hidden) - $float::from_bits(hidden)).to_bits();
            let finite = if magnitude < 1 << from.mantissa_bits { subnormal } else { normal };
            let is_finite = magnitude < from.overflow() as $bits;
            let result = if is_finite { finite } else { shifted | $float::INFINITY.to_bits() };
            bits >> from.magnitude_bits() << ($bits::BITS - 1) | result
        }
    };
}

conversions!(narrow_float32, widen_to_float32, Float32Scale, f32, u32, i32);
conversions!(narrow_float64, widen_to_float64, Float64Scale, f64, u64, i64);
