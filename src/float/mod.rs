//! Floating-point numbers as bits: what their layouts are, and the exact conversion of one number.
//!
//! Everything here is arithmetic on integers (or on normal floats whose sum is exact or rounded once), so
//! that neither a processor's quieting of NaN nor flushing of subnormals, which torch can switch on for a
//! whole process, changes a bit. [`lanes`] has the same conversions in the form that compilers turn into
//! vectors; [`convert`] is what they are tested against and does what is rare.

pub mod lanes;

/// How the bits of a binary float are divided: one sign bit, then the exponent, then the mantissa.
///
/// The bias is `2^(exponent_bits - 1) - 1`; exponent field 0 holds zero and the subnormals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Width of the exponent field.
    pub exponent_bits: u32,
    /// Width of the mantissa field, without the hidden bit.
    pub mantissa_bits: u32,
    /// True where the highest exponent field holds infinity and NaN, as in IEEE 754; false where it holds
    /// finite numbers, but for the one pattern of all ones, which is NaN.
    pub has_infinity: bool,
}

impl Layout {
    /// IEEE 754 binary64.
    pub const FLOAT64: Self = Self::ieee(11, 52);
    /// IEEE 754 binary32.
    pub const FLOAT32: Self = Self::ieee(8, 23);
    /// IEEE 754 binary16.
    pub const FLOAT16: Self = Self::ieee(5, 10);
    /// The upper half of a binary32.
    pub const BFLOAT16: Self = Self::ieee(8, 7);
    /// The upper half of a binary16.
    pub const FLOAT8_E5M2: Self = Self::ieee(5, 2);
    /// Finite up to 448; no infinity.
    pub const FLOAT8_E4M3FN: Self = Self { exponent_bits: 4, mantissa_bits: 3, has_infinity: false };

    const fn ieee(exponent_bits: u32, mantissa_bits: u32) -> Self {
        Self { exponent_bits, mantissa_bits, has_infinity: true }
    }

    /// Position of the sign bit: the number of bits of a magnitude.
    #[must_use]
    pub const fn magnitude_bits(self) -> u32 {
        self.exponent_bits + self.mantissa_bits
    }

    /// What is subtracted from an exponent field to give the power of two.
    #[must_use]
    pub const fn bias(self) -> u32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    /// The first magnitude above every finite one: infinity, or NaN where there is none. What overflows
    /// becomes this.
    #[must_use]
    pub const fn overflow(self) -> u64 {
        if self.has_infinity {
            ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        } else {
            (1 << self.magnitude_bits()) - 1
        }
    }

    const fn mantissa_mask(self) -> u64 {
        (1 << self.mantissa_bits) - 1
    }

    /// Magnitude of the NaN whose mantissa starts with the same bits as `payload`, of `payload_bits`.
    fn nan(self, payload: u64, payload_bits: u32) -> u64 {
        if !self.has_infinity {
            return self.overflow();
        }
        let kept = if payload_bits > self.mantissa_bits {
            payload >> (payload_bits - self.mantissa_bits)
        } else {
            payload << (self.mantissa_bits - payload_bits)
        };
        let quiet = 1 << (self.mantissa_bits - 1);
        self.overflow() | if kept == 0 { quiet } else { kept }
    }
}

/// The bits of `to` nearest to the number `bits` of `from` times `2^-scale_log2`, ties to even, rounded once.
///
/// Signs are kept, of zero and NaN too. NaN keeps the top bits of its payload; where none of them is set,
/// the quiet bit is. Infinity and what overflows become infinity, or NaN where `to` has no infinity.
#[must_use]
pub fn convert(from: Layout, to: Layout, scale_log2: i32, bits: u64) -> u64 {
    let sign = (bits >> from.magnitude_bits() & 1) << to.magnitude_bits();
    let magnitude = bits & ((1 << from.magnitude_bits()) - 1);
    let mantissa = magnitude & from.mantissa_mask();
    let is_nan = magnitude > from.overflow() || !from.has_infinity && magnitude == from.overflow();
    if is_nan {
        return sign | to.nan(mantissa, from.mantissa_bits);
    }
    if magnitude == from.overflow() {
        return sign | to.overflow();
    }
    let field = magnitude >> from.mantissa_bits;
    let significand = if field == 0 { mantissa } else { mantissa | 1 << from.mantissa_bits };
    let quantum = i64::from(from.bias() + from.mantissa_bits);
    let power = field.max(1).cast_signed() - quantum - i64::from(scale_log2);
    sign | round(to, significand, power)
}

/// The magnitude of `to` nearest to `significand * 2^power`, ties to even; `significand` is below `2^53`.
fn round(to: Layout, significand: u64, power: i64) -> u64 {
    if significand == 0 {
        return 0;
    }
    let smallest_normal = 1 - i64::from(to.bias());
    let exponent = power + i64::from(significand.ilog2());
    if exponent > i64::from(to.bias()) + 1 {
        return to.overflow();
    }
    let steps = (exponent - smallest_normal).max(0);
    let quantum = smallest_normal + steps - i64::from(to.mantissa_bits);
    let cut = quantum - power;
    let rounded = if cut <= 0 {
        significand << -cut
    } else {
        // Cuts longer than the significand all leave less than a half.
        let cut = cut.min(60);
        let half = 1 << (cut - 1);
        let odd = significand >> cut & 1;
        (significand + half - 1 + odd) >> cut
    };
    // A normal `rounded` has its hidden bit, which adds the one that `steps` lacks; a carry out of the
    // mantissa raises the exponent by itself.
    ((steps.cast_unsigned() << to.mantissa_bits) + rounded).min(to.overflow())
}
