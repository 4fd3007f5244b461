//! Which codec a chunk gets: the one that stores least, where it gains enough to be worth decoding.
#![expect(
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "lengths are far below 2^52, and never negative"
)]

use crate::format::limits::CHUNK_BYTES_RANGE;
use crate::format::model::Codec;
use crate::tensor::Dtype;

use super::estimate::{self, BaseEstimate, Elements, PlanesEstimate, Sample};
use super::stream::GAIN_SHARE;
use super::words::Transform;
use super::{Effort, Scratch, Workspace, planes, sparse, zstandard};

/// A difference ties a chunk to its base: it must store at most this share of what the chunk takes alone.
const BASE_SHARE: f64 = 0.9;
/// Where more elements than this share changed, planes of all differences code faster than single changes.
const SPARSE_SHARE: f64 = 0.25;
/// No chunk is stored in less than this share, so that an estimate is never 0.
const SHARE_MIN: f64 = 1e-9;

/// What a chunk is expected to take without a base.
#[derive(Clone, Copy)]
struct SelfEstimate {
    planes: PlanesEstimate,
    /// Where zstd stores less than the planes do: the share that it takes.
    zstd_share: Option<f64>,
}

impl SelfEstimate {
    fn share(&self) -> f64 {
        self.zstd_share.unwrap_or(self.planes.share).clamp(SHARE_MIN, 1.0)
    }
}

/// Codes one chunk; returns the codec, and leaves the stored bytes in `out`, whatever it held before.
///
/// `base` holds raw bytes of a chunk of the same length and dtype, if a difference may be stored. For
/// [`Codec::Store`] `out` is left empty: the stored bytes are `raw`, and nobody needs a copy of them.
pub fn encode(
    dtype: Dtype,
    raw: &[u8],
    base: Option<&[u8]>,
    effort: Effort,
    scratch: &mut Scratch,
    out: &mut Vec<u8>,
) -> Codec {
    out.clear();
    let elements = Elements::of(dtype);
    let base = base.filter(|base| base.len() == raw.len());
    if raw.is_empty() || raw.len() as u64 > *CHUNK_BYTES_RANGE.end() {
        return Codec::Store;
    }
    let chunk = Chunk { elements, raw, base };
    match effort {
        Effort::Fast => chunk.encode_fast(scratch, out),
        Effort::Max => chunk.encode_max(scratch, out),
    }
}

/// Share of its raw bytes that a chunk takes without a base, in `0.0..=1.0` but never 0, from a sample.
pub fn estimate_self_contained(dtype: Dtype, raw: &[u8], scratch: &mut Scratch) -> f64 {
    Chunk { elements: Elements::of(dtype), raw, base: None }.estimate_self(scratch).share()
}

#[derive(Clone, Copy)]
struct Chunk<'a> {
    elements: Elements,
    raw: &'a [u8],
    base: Option<&'a [u8]>,
}

impl Chunk<'_> {
    fn element_count(&self) -> usize {
        self.raw.len() / self.elements.width_bytes
    }

    fn estimate_self(&self, scratch: &mut Scratch) -> SelfEstimate {
        let Scratch { workspace: Workspace { planes, .. }, sample, .. } = scratch;
        sample.clear();
        estimate::append_sample(self.raw, sample);
        let sampled = Sample { raw: sample, element_count: self.element_count() };
        let planes = estimate::self_contained(self.elements, sampled, planes);
        let zstd_share =
            if self.elements.is_float { None } else { sampled_zstd_share(scratch, planes.share) };
        SelfEstimate { planes, zstd_share }
    }

    fn estimate_base(&self, base: &[u8], scratch: &mut Scratch) -> BaseEstimate {
        let Scratch { workspace: Workspace { planes, .. }, sample, base_sample, .. } = scratch;
        base_sample.clear();
        estimate::append_sample(base, base_sample);
        let sampled = Sample { raw: sample, element_count: self.element_count() };
        estimate::with_base(self.elements, sampled, base_sample, planes)
    }

    fn encode_fast(&self, scratch: &mut Scratch, out: &mut Vec<u8>) -> Codec {
        let alone = self.estimate_self(scratch);
        if let Some(base) = self.base {
            let estimate = self.estimate_base(base, scratch);
            let is_sparse = estimate.changed_share < SPARSE_SHARE;
            let share = if is_sparse { estimate.sparse_share } else { estimate.delta.share };
            if share < BASE_SHARE * alone.share() {
                let codec = self.encode_with_base(base, &estimate, is_sparse, scratch, out);
                if self.share_of(out) < BASE_SHARE * alone.share() {
                    return codec;
                }
            }
        }
        out.clear();
        if alone.share() > GAIN_SHARE {
            return Codec::Store;
        }
        // Repeats may lie too far apart for a sample to see: other dtypes are rare enough to try.
        let zstd_limit = alone.planes.share.min(GAIN_SHARE);
        let codec =
            if !self.elements.is_float && self.encode_zstd(zstandard::FAST_LEVEL, zstd_limit, scratch, out) {
                Codec::Zstd
            } else {
                out.clear();
                self.encode_planes(alone.planes, scratch, out);
                Codec::Planes
            };
        self.kept(codec, out)
    }

    fn encode_max(&self, scratch: &mut Scratch, out: &mut Vec<u8>) -> Codec {
        let sampled = self.estimate_self(scratch);
        let may_repeat =
            !self.elements.is_float || sampled_zstd_share(scratch, sampled.planes.share).is_some();
        let whole = Sample { raw: self.raw, element_count: self.element_count() };
        let exact = estimate::self_contained(self.elements, whole, &mut scratch.workspace.planes);
        self.encode_planes(exact, scratch, out);
        let mut codec = Codec::Planes;
        let mut candidate = std::mem::take(&mut scratch.candidate);
        if may_repeat
            && self.encode_zstd(zstandard::MAX_LEVEL, GAIN_SHARE, scratch, &mut candidate)
            && candidate.len() < out.len()
        {
            std::mem::swap(out, &mut candidate);
            codec = Codec::Zstd;
        }
        codec = self.kept(codec, out);
        if let Some(base) = self.base {
            let estimate = estimate::with_base(self.elements, whole, base, &mut scratch.workspace.planes);
            for is_sparse in [false, true] {
                candidate.clear();
                let found = self.encode_with_base(base, &estimate, is_sparse, scratch, &mut candidate);
                let is_best = match codec {
                    Codec::Delta | Codec::Sparse => candidate.len() < out.len(),
                    Codec::Store => self.share_of(&candidate) < BASE_SHARE,
                    _ => (candidate.len() as f64) < BASE_SHARE * out.len() as f64,
                };
                if is_best {
                    std::mem::swap(out, &mut candidate);
                    codec = found;
                }
            }
        }
        scratch.candidate = candidate;
        codec
    }

    fn encode_planes(&self, estimate: PlanesEstimate, scratch: &mut Scratch, out: &mut Vec<u8>) {
        let Elements { width_bytes, rotation_bits, .. } = self.elements;
        let transform = Transform::Rotation(rotation_bits);
        planes::encode(width_bytes, transform, estimate.verbatim, self.raw, &mut scratch.workspace, out);
    }

    /// Appends the difference from the base; too many changes for [`Codec::Sparse`] make it
    /// [`Codec::Delta`].
    fn encode_with_base(
        &self,
        base: &[u8],
        estimate: &BaseEstimate,
        is_sparse: bool,
        scratch: &mut Scratch,
        out: &mut Vec<u8>,
    ) -> Codec {
        let Elements { width_bytes, order, .. } = self.elements;
        let workspace = &mut scratch.workspace;
        if is_sparse && sparse::encode(width_bytes, order, base, self.raw, workspace, out) {
            return Codec::Sparse;
        }
        let transform = Transform::Difference(order, base);
        planes::encode(width_bytes, transform, estimate.delta.verbatim, self.raw, workspace, out);
        Codec::Delta
    }

    /// False, and nothing of use in `out`, where the frame takes more than this share.
    fn encode_zstd(&self, level: i32, share: f64, scratch: &mut Scratch, out: &mut Vec<u8>) -> bool {
        let limit_bytes = (self.raw.len() as f64 * share) as usize;
        scratch.contexts.compress(self.raw, level, limit_bytes, out)
    }

    fn share_of(&self, stored: &[u8]) -> f64 {
        stored.len() as f64 / self.raw.len() as f64
    }

    /// The codec where its stored bytes are worth it.
    fn kept(&self, codec: Codec, out: &mut Vec<u8>) -> Codec {
        if self.share_of(out) <= GAIN_SHARE {
            return codec;
        }
        out.clear();
        Codec::Store
    }
}

/// Share that zstd takes of the sample in `scratch`, where that is less than what planes take.
fn sampled_zstd_share(scratch: &mut Scratch, planes_share: f64) -> Option<f64> {
    let Scratch { contexts, sample, candidate, .. } = scratch;
    let limit_bytes = (sample.len() as f64 * planes_share.min(GAIN_SHARE)) as usize;
    contexts
        .compress(sample, zstandard::FAST_LEVEL, limit_bytes, candidate)
        .then(|| candidate.len() as f64 / sample.len() as f64)
}
