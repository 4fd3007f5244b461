//! Throughput of the codecs in raw bytes, one core, chunk by chunk: `cargo bench --bench codecs`.
//!
//! Weights are made, not trained: normal, with a scale for each row, so that their exponents spread as those
//! of a network do. A step of an optimizer moves each by about its learning rate.
#![expect(clippy::expect_used, clippy::cast_precision_loss, reason = "a bench has no caller to report to")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use varvite::codec::{self, Effort, Scratch};
use varvite::format::model::Codec;
use varvite::tensor::Dtype;

const CHUNK_BYTES: usize = 1 << 20;
/// Elements that share a scale.
const ROW_ELEMENTS: usize = 768;
/// Chunks of a case: more than the nearest caches hold, as in a save.
const CHUNKS: usize = 16;

/// `SplitMix64` (Steele, Lea, Flood, 2014): enough for test data, and the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// In `0.0..1.0`.
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 24) as f32
    }

    /// About normal, with variance 1.
    fn normal(&mut self) -> f32 {
        let sum: f32 = (0..12).map(|_| self.uniform()).sum();
        sum - 6.0
    }
}

fn weights(count: usize) -> Vec<f32> {
    let mut random = Random(1);
    let mut scale = 0.0;
    (0..count)
        .map(|index| {
            if index % ROW_ELEMENTS == 0 {
                scale = 0.02 * (0.3 * random.normal()).exp();
            }
            scale * random.normal()
        })
        .collect()
}

/// The weights after a step of this size.
fn moved(weights: &[f32], step: f32) -> Vec<f32> {
    let mut random = Random(2);
    weights.iter().map(|weight| weight + step * random.normal()).collect()
}

fn bytes_of_float32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Rounded to nearest even; the values are finite.
fn bytes_of_bfloat16(values: &[f32]) -> Vec<u8> {
    let round = |value: &f32| {
        let bits = value.to_bits();
        ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
    };
    values.iter().map(round).flat_map(u16::to_le_bytes).collect()
}

struct Case {
    name: &'static str,
    dtype: Dtype,
    raw: Vec<u8>,
    base: Option<Vec<u8>>,
    codec: Codec,
}

fn cases() -> Vec<Case> {
    let floats = weights(CHUNKS * CHUNK_BYTES / 4);
    let many_floats = weights(CHUNKS * CHUNK_BYTES / 2);
    let alone = |name, dtype, raw, codec| Case { name, dtype, raw, base: None, codec };
    let with_base = |name, dtype, raw, base, codec| Case { name, dtype, raw, base: Some(base), codec };
    vec![
        alone("planes, float32", Dtype::Float32, bytes_of_float32(&floats), Codec::Planes),
        alone("planes, bfloat16", Dtype::Bfloat16, bytes_of_bfloat16(&many_floats), Codec::Planes),
        with_base(
            "delta, float32, step 3e-4",
            Dtype::Float32,
            bytes_of_float32(&moved(&floats, 3e-4)),
            bytes_of_float32(&floats),
            Codec::Delta,
        ),
        with_base(
            "delta, bfloat16, step 3e-4",
            Dtype::Bfloat16,
            bytes_of_bfloat16(&moved(&many_floats, 3e-4)),
            bytes_of_bfloat16(&many_floats),
            Codec::Delta,
        ),
        with_base(
            "sparse, bfloat16, step 1e-6",
            Dtype::Bfloat16,
            bytes_of_bfloat16(&moved(&many_floats, 1e-6)),
            bytes_of_bfloat16(&many_floats),
            Codec::Sparse,
        ),
        alone("zstd, uint8", Dtype::Uint8, text(), Codec::Zstd),
        alone("noise, float32", Dtype::Float32, noise(), Codec::Store),
    ]
}

/// Sentences that come back in any order: repeats that a coder of single bytes can't see.
fn text() -> Vec<u8> {
    let mut random = Random(4);
    let sentences: Vec<Vec<u8>> =
        (40..104).map(|length| (0..length).map(|_| b'a' + (random.next() % 26) as u8).collect()).collect();
    let count = sentences.len() as u64;
    let picked = std::iter::repeat_with(|| &sentences[(random.next() % count) as usize]);
    picked.flatten().copied().take(CHUNKS * CHUNK_BYTES).collect()
}

fn noise() -> Vec<u8> {
    let mut random = Random(3);
    (0..CHUNKS * CHUNK_BYTES / 8).flat_map(|_| random.next().to_le_bytes()).collect()
}

fn both_ways(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("codecs");
    group.throughput(Throughput::Bytes((CHUNKS * CHUNK_BYTES) as u64));
    group.sample_size(20);
    for case in cases() {
        let raw_chunks: Vec<&[u8]> = case.raw.chunks(CHUNK_BYTES).collect();
        let base_chunks: Vec<Option<&[u8]>> = match &case.base {
            Some(base) => base.chunks(CHUNK_BYTES).map(Some).collect(),
            None => vec![None; CHUNKS],
        };
        let mut scratch = Scratch::default();
        let mut stored_chunks = vec![Vec::new(); CHUNKS];
        let mut encode_all = |stored_chunks: &mut [Vec<u8>]| {
            for ((raw, base), stored) in raw_chunks.iter().zip(&base_chunks).zip(stored_chunks) {
                let codec =
                    codec::encode(case.dtype, black_box(raw), *base, Effort::Fast, &mut scratch, stored);
                assert_eq!(codec, case.codec, "{}", case.name);
            }
        };
        encode_all(&mut stored_chunks);
        let stored_bytes: usize = stored_chunks.iter().map(Vec::len).sum();
        let ratio = case.raw.len() as f64 / stored_bytes.max(1) as f64;
        let name = if case.codec == Codec::Store {
            case.name.to_owned()
        } else {
            format!("{}, {ratio:.2}x smaller", case.name)
        };
        group.bench_function(format!("encode {name}"), |bencher| {
            let mut stored_chunks = vec![Vec::new(); CHUNKS];
            bencher.iter(|| encode_all(&mut stored_chunks));
        });
        if case.codec == Codec::Store {
            continue;
        }
        let mut scratch = Scratch::default();
        let mut raw = vec![0; CHUNK_BYTES];
        group.bench_function(format!("decode {name}"), |bencher| {
            bencher.iter(|| {
                for (stored, base) in stored_chunks.iter().zip(&base_chunks) {
                    codec::decode(case.codec, black_box(stored), *base, &mut raw, &mut scratch)
                        .expect("what was encoded decodes");
                }
            });
        });
        assert_eq!(raw, raw_chunks[CHUNKS - 1], "{}", case.name);
    }
    group.finish();
}

criterion_group!(codecs, both_ways);
criterion_main!(codecs);
