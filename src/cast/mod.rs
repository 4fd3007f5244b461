//! Casts of tensors: a float stored as a narrower float, and the way back.
//!
//! Everything is rounded once, to nearest with ties to even, from the source straight to the target. NaN
//! stays NaN with its sign and the top bits of its payload, infinity and zero keep their sign, subnormals
//! are exact. `float8_e4m3fn` has no infinity: infinity and what overflows become NaN with the sign, so that
//! a tensor that diverged doesn't come back finite (torch's own cast may saturate instead). An 8-bit float has
//! a scale for its whole tensor, a power of two, which by itself rounds nothing.
//!
//! What was stored comes back exactly, and casting it again gives the same bits.

#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::float::lanes::{
    self, Bfloat16, Float, Float8E4m3fn, Float8E5m2, Float16, Float32, Float32Scale, Float64Scale,
};
use crate::float::{Layout, convert};
use crate::kernel;
use crate::kernel::cast::map;
use crate::tensor::Dtype;

/// Layout of the dtypes that are cast, `None` for all others.
fn layout(dtype: Dtype) -> Option<Layout> {
    Some(match dtype {
        Dtype::Float64 => Layout::FLOAT64,
        Dtype::Float32 => Layout::FLOAT32,
        Dtype::Float16 => Layout::FLOAT16,
        Dtype::Bfloat16 => Layout::BFLOAT16,
        Dtype::Float8E5m2 => Layout::FLOAT8_E5M2,
        Dtype::Float8E4m3fn => Layout::FLOAT8_E4M3FN,
        _ => return None,
    })
}

/// The scale with which a tensor whose largest finite magnitude is `abs_max` is stored: a stored number
/// times `2^scale_log2` is the value.
///
/// It is the lowest with which `abs_max` doesn't overflow when it is rounded; 0 for tensors without a finite
/// number other than zero, for targets of more than 8 bits, and where `from` isn't cast to `to` at all.
///
/// Rounding is relative to the stored number: the largest finite numbers of `from` can round to a power of
/// two that `from` doesn't have, and come back as infinity, just as in a cast without scale.
#[must_use]
pub fn scale_log2(from: Dtype, to: Dtype, abs_max: f64) -> i32 {
    let target = match layout(to) {
        Some(target) if from.narrows_to(to) && to.size_bytes() == 1 => target,
        _ => return 0,
    };
    if !abs_max.is_finite() || abs_max <= 0.0 {
        return 0;
    }
    // Scaled by this, `abs_max` has the target's highest exponent or, where that overflows, the one below.
    let highest = if target.has_infinity { target.bias() } else { target.bias() + 1 };
    let scale = exponent_log2(abs_max) - highest.cast_signed();
    let stored = convert(Layout::FLOAT64, target, scale, abs_max.to_bits());
    if stored == target.overflow() { scale + 1 } else { scale }
}

/// Floor of the binary logarithm of a positive finite number.
fn exponent_log2(value: f64) -> i32 {
    const MANTISSA_BITS: i32 = 52;
    const BIAS: i32 = 1023;
    let bits = value.to_bits();
    let field = (bits >> MANTISSA_BITS) as u16;
    if field > 0 { i32::from(field) - BIAS } else { bits.ilog2().cast_signed() - MANTISSA_BITS - BIAS + 1 }
}

/// Casts little-endian elements of `from` in `source`, divided by `2^scale_log2`, to `to` in `target`.
///
/// # Errors
/// [`Error::InvalidInput`] where [`narrows`] is false, or the two don't hold equally many elements.
pub fn narrow(from: Dtype, to: Dtype, scale_log2: i32, source: &[u8], target: &mut [u8]) -> Result<()> {
    check_pair(from, to)?;
    check_lengths((from, source.len()), (to, target.len()))?;
    kernel::with_wide_vectors(
        #[inline(always)]
        || narrow_elements(from, to, scale_log2, source, target),
    );
    Ok(())
}

/// Casts little-endian elements of `stored` in `source`, times `2^scale_log2`, to `original` in `target`.
///
/// Products are exact where `original` has them; others are rounded to nearest, ties to even.
///
/// # Errors
/// [`Error::InvalidInput`] where `original` isn't stored as `stored`, or the two don't hold equally many
/// elements.
pub fn widen(
    stored: Dtype,
    original: Dtype,
    scale_log2: i32,
    source: &[u8],
    target: &mut [u8],
) -> Result<()> {
    check_pair(original, stored)?;
    check_lengths((stored, source.len()), (original, target.len()))?;
    kernel::with_wide_vectors(
        #[inline(always)]
        || widen_elements(stored, original, scale_log2, source, target),
    );
    Ok(())
}

fn check_pair(original: Dtype, stored: Dtype) -> Result<()> {
    if original.narrows_to(stored) {
        return Ok(());
    }
    let pair = format!("cast of `{}` to `{}`", original.name(), stored.name());
    Err(Error::invalid(pair, "must be from a real float to one of fewer bytes"))
}

fn check_lengths(source: (Dtype, usize), target: (Dtype, usize)) -> Result<()> {
    let elements = |(dtype, length): (Dtype, usize)| {
        let size = dtype.size_bytes() as usize;
        (length % size == 0).then_some(length / size)
    };
    if elements(source).is_some() && elements(source) == elements(target) {
        return Ok(());
    }
    let what = format!("length of a cast: {} bytes of `{}`", source.1, source.0.name());
    Err(Error::invalid(what, format!("don't fill {} bytes of `{}`", target.1, target.0.name())))
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled once more with the vectors of its caller")]
fn narrow_elements(from: Dtype, to: Dtype, scale_log2: i32, source: &[u8], target: &mut [u8]) {
    match (from, to) {
        (_, Dtype::Float8E5m2) => narrow_to_8_bits::<Float8E5m2>(from, scale_log2, source, target),
        (_, Dtype::Float8E4m3fn) => narrow_to_8_bits::<Float8E4m3fn>(from, scale_log2, source, target),
        _ if scale_log2 != 0 => convert_elements(from, to, scale_log2, source, target),
        (Dtype::Float32, Dtype::Bfloat16) => {
            map(source, target, |word| lanes::bfloat16_of_float32(u32::from_le_bytes(word)).to_le_bytes());
        }
        (Dtype::Float32, Dtype::Float16) => {
            let scale = Float32Scale::new::<Float16>(0);
            map(source, target, |word| {
                (lanes::narrow_float32::<Float16>(u32::from_le_bytes(word), scale) as u16).to_le_bytes()
            });
        }
        (Dtype::Float64, Dtype::Float32) => {
            let scale = Float64Scale::new::<Float32>(0);
            map(source, target, |word| {
                (lanes::narrow_float64::<Float32>(u64::from_le_bytes(word), scale) as u32).to_le_bytes()
            });
        }
        (Dtype::Float64, Dtype::Float16) => narrow_to_16_bits::<Float16>(source, target),
        (Dtype::Float64, Dtype::Bfloat16) => narrow_to_16_bits::<Bfloat16>(source, target),
        _ => convert_elements(from, to, 0, source, target),
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled once more with the vectors of its caller")]
fn narrow_to_16_bits<Target: Float>(source: &[u8], target: &mut [u8]) {
    let scale = Float64Scale::new::<Target>(0);
    map(source, target, |word| {
        (lanes::narrow_float64::<Target>(u64::from_le_bytes(word), scale) as u16).to_le_bytes()
    });
}

/// Two bytes go through `float32`, which holds all their numbers.
#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled once more with the vectors of its caller")]
fn narrow_to_8_bits<Target: Float>(from: Dtype, scale_log2: i32, source: &[u8], target: &mut [u8]) {
    let scale = Float32Scale::new::<Target>(scale_log2);
    let narrow = |bits| [lanes::narrow_float32::<Target>(bits, scale) as u8];
    match from {
        Dtype::Float32 => map(source, target, |word| narrow(u32::from_le_bytes(word))),
        Dtype::Bfloat16 => {
            map(source, target, |word| narrow(lanes::float32_of_bfloat16(u16::from_le_bytes(word))));
        }
        Dtype::Float16 => map(source, target, |word| {
            narrow(lanes::widen_to_float32::<Float16>(u32::from(u16::from_le_bytes(word))))
        }),
        _ => {
            let scale = Float64Scale::new::<Target>(scale_log2);
            map(source, target, |word| {
                [lanes::narrow_float64::<Target>(u64::from_le_bytes(word), scale) as u8]
            });
        }
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "compiled once more with the vectors of its caller")]
fn widen_elements(stored: Dtype, original: Dtype, scale_log2: i32, source: &[u8], target: &mut [u8]) {
    match (stored, original) {
        (Dtype::Float8E5m2 | Dtype::Float8E4m3fn, _) => {
            widen_from_8_bits(stored, original, scale_log2, source, target);
        }
        _ if scale_log2 != 0 => {
            convert_elements(stored, original, scale_log2.saturating_neg(), source, target);
        }
        (Dtype::Bfloat16, Dtype::Float32) => {
            map(source, target, |word| lanes::float32_of_bfloat16(u16::from_le_bytes(word)).to_le_bytes());
        }
        (Dtype::Float16, Dtype::Float32) => map(source, target, |word| {
            lanes::widen_to_float32::<Float16>(u32::from(u16::from_le_bytes(word))).to_le_bytes()
        }),
        (Dtype::Bfloat16, Dtype::Float64) => map(source, target, |word| {
            lanes::widen_to_float64::<Bfloat16>(u64::from(u16::from_le_bytes(word))).to_le_bytes()
        }),
        (Dtype::Float16, Dtype::Float64) => map(source, target, |word| {
            lanes::widen_to_float64::<Float16>(u64::from(u16::from_le_bytes(word))).to_le_bytes()
        }),
        (Dtype::Float32, Dtype::Float64) => map(source, target, |word| {
            lanes::widen_to_float64::<Float32>(u64::from(u32::from_le_bytes(word))).to_le_bytes()
        }),
        _ => convert_elements(stored, original, 0, source, target),
    }
}

/// Looks each byte up in a table of all 256, which are converted one by one.
fn widen_from_8_bits(stored: Dtype, original: Dtype, scale_log2: i32, source: &[u8], target: &mut [u8]) {
    let (Some(from), Some(to)) = (layout(stored), layout(original)) else { return };
    let scale = scale_log2.saturating_neg();
    let table: [u64; 256] = std::array::from_fn(|byte| convert(from, to, scale, byte as u64));
    match original.size_bytes() {
        2 => {
            let table = table.map(|bits| (bits as u16).to_le_bytes());
            map(source, target, |[byte]| table[usize::from(byte)]);
        }
        4 => {
            let table = table.map(|bits| (bits as u32).to_le_bytes());
            map(source, target, |[byte]| table[usize::from(byte)]);
        }
        _ => {
            let table = table.map(u64::to_le_bytes);
            map(source, target, |[byte]| table[usize::from(byte)]);
        }
    }
}

/// Converts one element after the other: for a scale where there is none by [`scale_log2`].
fn convert_elements(from: Dtype, to: Dtype, scale_log2: i32, source: &[u8], target: &mut [u8]) {
    let (Some(from_layout), Some(to_layout)) = (layout(from), layout(to)) else { return };
    let (from_bytes, to_bytes) = (from.size_bytes() as usize, to.size_bytes() as usize);
    for (source, target) in source.chunks_exact(from_bytes).zip(target.chunks_exact_mut(to_bytes)) {
        let mut bits = [0; 8];
        bits[..from_bytes].copy_from_slice(source);
        let converted = convert(from_layout, to_layout, scale_log2, u64::from_le_bytes(bits));
        target.copy_from_slice(&converted.to_le_bytes()[..to_bytes]);
    }
}
