//! How far a chunk would shrink, from a sample of it: which planes to code, and which codec to take.
#![expect(clippy::cast_precision_loss, reason = "lengths are far below 2^52")]

use crate::tensor::Dtype;

use super::frequencies::{self, Counts};
use super::planes::{Verbatim, WIDTH_LIMIT_BYTES, grow};
use super::stream::{GAIN_SHARE, fixed_bytes};
use super::words::{self, Order, Transform};

/// Bytes that are looked at to decide, taken from pieces all over the chunk.
const SAMPLE_BYTES: usize = 32 * 1024;
const SAMPLE_PIECES: usize = 8;
/// Pieces start at multiples of this, so that they hold whole elements.
const SAMPLE_ALIGNMENT_BYTES: usize = 16;

/// What the bytes of a dtype are to the codecs.
#[derive(Clone, Copy)]
pub(super) struct Elements {
    /// Bytes of an element; a complex number is two elements.
    pub(super) width_bytes: usize,
    /// Bits to rotate by, so that an exponent fills one byte as well as it can.
    pub(super) rotation_bits: u32,
    /// How elements are subtracted.
    pub(super) order: Order,
    /// False for those in which repeats are worth looking for.
    pub(super) is_float: bool,
}

impl Elements {
    pub(super) fn of(dtype: Dtype) -> Self {
        let (width_bytes, rotation_bits, order, is_float) = match dtype {
            Dtype::Bool | Dtype::Uint8 | Dtype::Int8 => (1, 0, Order::Integer, false),
            Dtype::Uint16 | Dtype::Int16 => (2, 0, Order::Integer, false),
            Dtype::Uint32 | Dtype::Int32 => (4, 0, Order::Integer, false),
            Dtype::Uint64 | Dtype::Int64 => (8, 0, Order::Integer, false),
            // The sign goes to the other end, and 8 bits of exponent fill the top byte; in float16 its 5
            // bits share it with the head of the mantissa.
            Dtype::Float16 | Dtype::Complex32 | Dtype::Bfloat16 => (2, 1, Order::Float, true),
            Dtype::Float32 | Dtype::Complex64 => (4, 1, Order::Float, true),
            // Of 11 bits of exponent the lower 8 fill the top byte; the upper 3 follow from them in practice.
            Dtype::Float64 | Dtype::Complex128 => (8, 4, Order::Float, true),
            Dtype::Float8E4m3fn | Dtype::Float8E4m3fnuz | Dtype::Float8E5m2 | Dtype::Float8E5m2fnuz => {
                (1, 0, Order::Float, true)
            }
            Dtype::Float8E8m0fnu | Dtype::Float4E2m1fnX2 => (1, 0, Order::Integer, true),
        };
        Self { width_bytes, rotation_bits, order, is_float }
    }
}

/// Planes to store as they are, and the share of raw bytes that is then stored.
#[derive(Clone, Copy)]
pub(super) struct PlanesEstimate {
    pub(super) verbatim: Verbatim,
    pub(super) share: f64,
}

/// What a base would do for a chunk.
#[derive(Clone, Copy)]
pub(super) struct BaseEstimate {
    pub(super) delta: PlanesEstimate,
    /// Share of raw bytes that the changes alone take.
    pub(super) sparse_share: f64,
    /// Share of elements that differ.
    pub(super) changed_share: f64,
}

/// Copies pieces from all over the chunk to the end of `sample`, or the whole chunk where it is short.
pub(super) fn append_sample(raw: &[u8], sample: &mut Vec<u8>) {
    if raw.len() <= SAMPLE_BYTES {
        sample.extend_from_slice(raw);
        return;
    }
    let piece_bytes = SAMPLE_BYTES / SAMPLE_PIECES;
    for piece in 0..SAMPLE_PIECES {
        let start = (raw.len() - piece_bytes) * piece / (SAMPLE_PIECES - 1);
        let start = start - start % SAMPLE_ALIGNMENT_BYTES;
        sample.extend_from_slice(&raw[start..start + piece_bytes]);
    }
}

/// A part of a chunk, or all of it, and how many elements the chunk has.
#[derive(Clone, Copy)]
pub(super) struct Sample<'a> {
    pub(super) raw: &'a [u8],
    pub(super) element_count: usize,
}

/// Histograms of the planes of a sample.
struct Histograms {
    counts: [Counts; WIDTH_LIMIT_BYTES],
    width_bytes: usize,
    sampled_count: usize,
    unchanged_count: usize,
}

impl Histograms {
    fn of(width_bytes: usize, transform: Transform<'_>, raw: &[u8], planes: &mut Vec<u8>) -> Self {
        let sampled_count = raw.len() / width_bytes;
        grow(planes, width_bytes * sampled_count);
        let mut counts = [[0; 256]; WIDTH_LIMIT_BYTES];
        let mut unchanged_count = 0;
        if sampled_count > 0 {
            let mut targets: [&mut [u8]; WIDTH_LIMIT_BYTES] = Default::default();
            for (target, plane) in
                targets[..width_bytes].iter_mut().zip(planes.chunks_exact_mut(sampled_count))
            {
                *target = plane;
            }
            words::split(width_bytes, transform, raw, &mut targets[..width_bytes]);
            for (counts, plane) in counts.iter_mut().zip(&targets[..width_bytes]) {
                *counts = frequencies::count(plane);
            }
            if matches!(transform, Transform::Difference(..)) {
                unchanged_count = count_zero_words(&mut targets[..width_bytes]);
            }
        }
        Self { counts, width_bytes, sampled_count, unchanged_count }
    }

    /// Plane by plane, the shorter of coding it and of leaving it as it is.
    fn planes_estimate(&self, element_count: usize) -> PlanesEstimate {
        let mut verbatim = 0;
        let mut share = 0.0;
        for (plane, counts) in self.counts[..self.width_bytes].iter().enumerate() {
            let coded = coded_bytes(counts) / self.sampled_count.max(1) as f64
                + fixed_bytes(counts, element_count) / element_count.max(1) as f64;
            if coded > GAIN_SHARE {
                verbatim |= 1 << plane;
            }
            share += if coded > GAIN_SHARE { 1.0 } else { coded };
        }
        PlanesEstimate { verbatim, share: share / self.width_bytes as f64 }
    }

    /// Positions at their entropy, and the differences other than 0 by planes.
    fn sparse_share(&self, element_count: usize) -> f64 {
        let mut positions: Counts = [0; 256];
        positions[0] = self.unchanged_count as u32;
        positions[1] = (self.sampled_count - self.unchanged_count) as u32;
        let mut sampled_bytes = frequencies::entropy_bytes(&positions);
        let mut fixed = 0.0;
        for counts in &self.counts[..self.width_bytes] {
            let mut changed = *counts;
            changed[0] -= self.unchanged_count as u32;
            sampled_bytes += coded_bytes(&changed);
            fixed += fixed_bytes(&changed, element_count);
        }
        let sampled_raw_bytes = (self.sampled_count * self.width_bytes).max(1) as f64;
        let raw_bytes = (element_count * self.width_bytes).max(1) as f64;
        sampled_bytes / sampled_raw_bytes + fixed / raw_bytes
    }
}

/// Uses up the planes: the first becomes all of them, or-ed.
fn count_zero_words(planes: &mut [&mut [u8]]) -> usize {
    let Some((any, others)) = planes.split_first_mut() else { return 0 };
    for plane in others {
        for (any, byte) in any.iter_mut().zip(&**plane) {
            *any |= byte;
        }
    }
    frequencies::count(any)[0] as usize
}

/// Length of the coded symbols. A sample shows less than the whole: each symbol seen adds what Miller and
/// Madow found the entropy of a sample to lack.
fn coded_bytes(counts: &Counts) -> f64 {
    let present = counts.iter().filter(|&&count| count > 0).count();
    frequencies::entropy_bytes(counts)
        + present.saturating_sub(1) as f64 / (2.0 * std::f64::consts::LN_2 * 8.0)
}

pub(super) fn self_contained(elements: Elements, sample: Sample<'_>, planes: &mut Vec<u8>) -> PlanesEstimate {
    let transform = Transform::Rotation(elements.rotation_bits);
    Histograms::of(elements.width_bytes, transform, sample.raw, planes).planes_estimate(sample.element_count)
}

pub(super) fn with_base(
    elements: Elements,
    sample: Sample<'_>,
    base: &[u8],
    planes: &mut Vec<u8>,
) -> BaseEstimate {
    let transform = Transform::Difference(elements.order, base);
    let histograms = Histograms::of(elements.width_bytes, transform, sample.raw, planes);
    let changed_count = histograms.sampled_count - histograms.unchanged_count;
    BaseEstimate {
        delta: histograms.planes_estimate(sample.element_count),
        sparse_share: histograms.sparse_share(sample.element_count),
        changed_share: changed_count as f64 / histograms.sampled_count.max(1) as f64,
    }
}
