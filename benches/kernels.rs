//! Throughput of the kernels, in bytes: `cargo bench`.
#![expect(clippy::expect_used, reason = "a bench has no caller to report to")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use serde_json::value::RawValue;
use varvite::digest::ChunkDigest;
use varvite::format::manifest;
use varvite::format::model::{Body, ChunkRef, Codec, Entry, Header, PackRecord, Shard};
use varvite::format::state_digest::state_digest;
use varvite::kernel;
use varvite::tensor::Dtype;

const CHUNK_BYTES: usize = 1 << 20;
/// More than the caches hold together with its copy, so that memory is what is measured.
const LARGE_BYTES: usize = 256 << 20;

fn pattern(length: usize) -> Vec<u8> {
    (0..length as u64).map(|index| (index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 & 0x3F).collect()
}

fn digest(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("digest");
    for length in [128, 64 << 10, CHUNK_BYTES] {
        let bytes = pattern(length);
        group.throughput(Throughput::Bytes(length as u64));
        group.bench_with_input(BenchmarkId::new("xxh3-128 in cache", length), &bytes, |bencher, bytes| {
            bencher.iter(|| ChunkDigest::of(black_box(bytes)));
        });
    }
    let bytes = pattern(LARGE_BYTES);
    group.throughput(Throughput::Bytes(LARGE_BYTES as u64));
    group.bench_function("xxh3-128 from memory, chunk by chunk", |bencher| {
        bencher.iter(|| {
            bytes
                .chunks(CHUNK_BYTES)
                .map(|chunk| ChunkDigest::of(black_box(chunk)).0)
                .fold(0, |sum, digest| sum ^ digest)
        });
    });
    group.finish();
}

fn copy(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("copy");
    let source = pattern(LARGE_BYTES);
    let mut target = vec![1; LARGE_BYTES];
    group.throughput(Throughput::Bytes(LARGE_BYTES as u64));
    group.bench_function("memcpy of the standard library", |bencher| {
        bencher.iter(|| target.copy_from_slice(black_box(&source)));
    });
    group.bench_function("past the cache", |bencher| {
        bencher.iter(|| kernel::copy(&mut target, black_box(&source)));
    });
    group.finish();
}

/// A snapshot of `count` small tensors with one chunk each.
fn snapshot(count: u64) -> (Header, Body) {
    let entries = (0..count)
        .map(|index| Entry {
            name: format!("model.layers.{index:06}.weight"),
            rank: None,
            dtype: Dtype::Float32,
            stored_dtype: Dtype::Float32,
            shape: vec![32],
            tied_to: None,
            rounded_from: None,
            nonfinite: None,
            abs_max: None,
            l2_norm: None,
            shards: vec![Shard {
                offsets: vec![0],
                lengths: vec![32],
                scale_log2: 0,
                chunks: vec![ChunkRef {
                    pack: 0,
                    offset_bytes: 64 + index * 128,
                    stored_length_bytes: 128,
                    codec: Codec::Store,
                    digest: ChunkDigest::of(&index.to_le_bytes()),
                    base: None,
                }],
            }],
        })
        .collect();
    let raw = |text: &str| RawValue::from_string(text.to_owned()).expect("the text is JSON");
    let body = Body {
        chunk_bytes: CHUNK_BYTES as u64,
        packs: vec![PackRecord { name: "1-r0-0123456789abcdef.pack".to_owned(), length_bytes: 1 << 40 }],
        entries,
        structure: raw("null"),
        rank_structures: Vec::new(),
    };
    let header = Header {
        repository_id: "0".repeat(32),
        session_id: "0".repeat(32),
        seq: 1,
        step: 1,
        parent: None,
        created_at_unix_ms: 0,
        world_size: 1,
        metrics: std::collections::BTreeMap::new(),
        metadata: raw("null"),
        raw_bytes: count * 128,
        stored_bytes: count * 128,
        nonfinite: std::collections::BTreeMap::new(),
        self_contained: true,
        state_digest: state_digest(&body),
    };
    (header, body)
}

fn manifests(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("manifest");
    group.sample_size(10);
    for count in [1_000, 50_000] {
        let (header, body) = snapshot(count);
        let encoded = manifest::encode(&header, &body).expect("the snapshot is legal");
        group.throughput(Throughput::Elements(count));
        group.bench_with_input(BenchmarkId::new("encode entries", count), &(), |bencher, ()| {
            bencher.iter(|| manifest::encode(black_box(&header), &body));
        });
        group.bench_with_input(BenchmarkId::new("decode entries", count), &(), |bencher, ()| {
            bencher.iter(|| manifest::decode("snapshots/1.json", black_box(&encoded)));
        });
    }
    group.finish();
}

criterion_group!(kernels, digest, copy, manifests);
criterion_main!(kernels);
