//! Codecs as the engine uses them: ratios on the state of a real training run, random chunks, and stored
//! bytes that were damaged.
//!
//! What follows from single fields is tested beside the code, in `src/codec/tests.rs`.

#![expect(
    clippy::cast_precision_loss,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "helpers of tests fail by panic; the fixture is no object of a store; its lengths are below 2^52"
)]

use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use varvite::codec::{self, Effort, Scratch};
use varvite::format::model::Codec;
use varvite::tensor::Dtype;

/// Tensors that each file of the fixture has a slice of, of equal length.
const SLICES: usize = 4;

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/codec_fixture").join(name)).unwrap()
}

/// 32-bit floats rounded to nearest even; none of them is NaN.
fn bfloat16_of(float32: &[u8]) -> Vec<u8> {
    let round = |four: &[u8; 4]| {
        let bits = u32::from_le_bytes(*four);
        ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
    };
    float32.as_chunks().0.iter().map(round).flat_map(u16::to_le_bytes).collect()
}

/// Codec and ratio, after the chunk came back.
fn coded(dtype: Dtype, raw: &[u8], base: Option<&[u8]>, effort: Effort) -> (Codec, f64) {
    let mut scratch = Scratch::default();
    let mut stored = Vec::new();
    let codec = codec::encode(dtype, raw, base, effort, &mut scratch, &mut stored);
    if codec == Codec::Store {
        return (codec, 1.0);
    }
    let mut decoded = vec![0; raw.len()];
    codec::decode(codec, &stored, base, &mut decoded, &mut scratch).unwrap();
    assert!(decoded == raw, "{codec:?} gives other bytes");
    (codec, raw.len() as f64 / stored.len() as f64)
}

#[track_caller]
fn assert_ratio(found: (Codec, f64), codec: Codec, at_least: f64) {
    assert!(
        found.0 == codec && found.1 >= at_least,
        "{:?} with {:.3} instead of {at_least}",
        found.0,
        found.1
    );
}

/// A slice of a tensor is a chunk, as in a snapshot: tensors differ in their exponents.
fn coded_by_slices(dtype: Dtype, raw: &[u8], effort: Effort) -> (Codec, f64) {
    let slices: Vec<(Codec, f64)> =
        raw.chunks(raw.len() / SLICES).map(|slice| coded(dtype, slice, None, effort)).collect();
    assert!(slices.iter().all(|slice| slice.0 == slices[0].0), "{slices:?}");
    let stored: f64 = slices.iter().map(|slice| 1.0 / slice.1).sum();
    (slices[0].0, SLICES as f64 / stored)
}

#[test]
fn trained_float32_shrinks_by_its_exponents() {
    for effort in [Effort::Fast, Effort::Max] {
        let alone = |name| coded_by_slices(Dtype::Float32, &fixture(name), effort);
        assert_ratio(alone("weights.f32"), Codec::Planes, 1.20);
        assert_ratio(alone("exp_avg.f32"), Codec::Planes, 1.18);
        assert_ratio(alone("exp_avg_sq.f32"), Codec::Planes, 1.22);
    }
}

#[test]
fn trained_bfloat16_shrinks_by_its_exponents() {
    for effort in [Effort::Fast, Effort::Max] {
        let raw = bfloat16_of(&fixture("weights.f32"));
        assert_ratio(coded_by_slices(Dtype::Bfloat16, &raw, effort), Codec::Planes, 1.48);
    }
}

#[test]
fn steps_later_the_difference_is_smaller() {
    let base = fixture("weights.f32");
    let base_halves = bfloat16_of(&base);
    for effort in [Effort::Fast, Effort::Max] {
        let float32 = |name| coded(Dtype::Float32, &fixture(name), Some(&base), effort);
        let bfloat16 = |name| coded(Dtype::Bfloat16, &fixture(name), Some(&base_halves), effort);
        assert_ratio(float32("weights-3e-4-10.f32"), Codec::Delta, 1.44);
        assert_ratio(bfloat16("weights-3e-4-1.bf16"), Codec::Delta, 5.0);
        assert_ratio(bfloat16("weights-3e-4-10.bf16"), Codec::Delta, 2.7);
        assert_ratio(bfloat16("weights-3e-4-100.bf16"), Codec::Delta, 1.95);
        assert_ratio(bfloat16("weights-1e-6-1.bf16"), Codec::Sparse, 100.0);
    }
}

const DTYPES: [Dtype; 6] =
    [Dtype::Uint8, Dtype::Int64, Dtype::Float8E4m3fn, Dtype::Bfloat16, Dtype::Float32, Dtype::Complex128];

/// A chunk and a base of the same length; bytes of few values make every codec likely.
fn chunks() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let symbols = prop_oneof![Just(vec![0_u8]), vec(any::<u8>(), 1..4), vec(any::<u8>(), 200)];
    (symbols, 0_usize..6_000, any::<u64>(), 1_usize..400).prop_map(|(symbols, length, seed, period)| {
        let raw: Vec<u8> = (0..length as u64)
            .map(|index| (index ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33)
            .map(|random| symbols[random as usize % symbols.len()])
            .collect();
        let mut base = raw.clone();
        base.iter_mut().step_by(period).for_each(|byte| *byte = byte.wrapping_add(3));
        (raw, base)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_chunks_come_back((raw, base) in chunks(), dtype in prop::sample::select(DTYPES.as_slice())) {
        for effort in [Effort::Fast, Effort::Max] {
            coded(dtype, &raw, None, effort);
            coded(dtype, &raw, Some(&base), effort);
        }
    }

    #[test]
    fn random_bytes_never_make_a_decoder_panic(
        mut stored in vec(any::<u8>(), 0..300),
        width in 0_u8..4,
        length in 0_usize..5_000,
    ) {
        let base = vec![7; length];
        let mut raw = vec![0; length];
        let mut scratch = Scratch::default();
        for head in [1 << width, 0, 0] {
            for codec in [Codec::Planes, Codec::Delta, Codec::Sparse, Codec::Zstd, Codec::Store] {
                let _ = codec::decode(codec, &stored, Some(&base), &mut raw, &mut scratch);
            }
            stored.insert(0, head);
        }
    }
}

/// A stored chunk, with what its decoder needs.
struct StoredChunk {
    codec: Codec,
    stored: Vec<u8>,
    base: Option<Vec<u8>>,
    raw_length: usize,
}

/// One or two for every codec.
fn stored_chunks() -> Vec<StoredChunk> {
    // Enough elements for streams of many lanes, and an odd tail.
    let take = |name| fixture(name)[..132_003].to_vec();
    let halves = |name: &str| fixture(name)[..66_001].to_vec();
    let weights = take("weights.f32");
    let base_halves = bfloat16_of(&fixture("weights.f32"))[..66_001].to_vec();
    let counters: Vec<u8> = (0..3_000_u64).flat_map(|index| (index % 50 * 1_000_003).to_le_bytes()).collect();
    let cases = [
        (Dtype::Float32, weights.clone(), None),
        (Dtype::Float32, weights[..4_003].to_vec(), None),
        (Dtype::Float32, take("weights-3e-4-10.f32"), Some(weights)),
        (Dtype::Bfloat16, halves("weights-1e-6-1.bf16"), Some(base_halves)),
        (Dtype::Int64, counters, None),
    ];
    let encode = |(dtype, raw, base): (Dtype, Vec<u8>, Option<Vec<u8>>)| {
        let mut stored = Vec::new();
        let codec =
            codec::encode(dtype, &raw, base.as_deref(), Effort::Fast, &mut Scratch::default(), &mut stored);
        StoredChunk { codec, stored, base, raw_length: raw.len() }
    };
    cases.into_iter().map(encode).collect()
}

#[test]
fn a_stored_chunk_cut_anywhere_is_refused() {
    let mut scratch = Scratch::default();
    let mut codecs = Vec::new();
    for StoredChunk { codec, stored, base, raw_length } in stored_chunks() {
        codecs.push(codec);
        let mut raw = vec![0; raw_length];
        let ends = (0..stored.len()).filter(|end| *end < 1_500 || end % 211 == 0 || stored.len() - end < 300);
        for end in ends {
            let result = codec::decode(codec, &stored[..end], base.as_deref(), &mut raw, &mut scratch);
            assert!(result.is_err(), "{codec:?} cut at {end} of {}", stored.len());
        }
        let longer = [&stored[..], &[0]].concat();
        assert!(codec::decode(codec, &longer, base.as_deref(), &mut raw, &mut scratch).is_err());
    }
    assert_eq!(codecs, [Codec::Planes, Codec::Planes, Codec::Delta, Codec::Sparse, Codec::Zstd]);
}

/// A digest finds what a decoder can't; the decoder only must not panic, and must decode again afterwards.
#[test]
fn a_stored_chunk_with_any_byte_changed_is_no_danger() {
    let mut scratch = Scratch::default();
    for StoredChunk { codec, mut stored, base, raw_length } in stored_chunks() {
        let mut expected = vec![0; raw_length];
        codec::decode(codec, &stored, base.as_deref(), &mut expected, &mut scratch).unwrap();
        let mut raw = vec![0; raw_length];
        let positions: Vec<usize> = (0..stored.len()).filter(|at| *at < 600 || at % 331 == 0).collect();
        for at in positions {
            for flip in [0x01, 0x80, 0xFF] {
                stored[at] ^= flip;
                let _ = codec::decode(codec, &stored, base.as_deref(), &mut raw, &mut scratch);
                stored[at] ^= flip;
            }
        }
        codec::decode(codec, &stored, base.as_deref(), &mut raw, &mut scratch).unwrap();
        assert!(raw == expected, "{codec:?} decodes as before");
    }
}
