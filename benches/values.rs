//! Throughput of what reads every value: casts and statistics, beside a copy of the same bytes.
//!
//! Bytes are those of the source. One chunk is in the cache; a large tensor comes from memory, and there the
//! copy of the source is the measure.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

use varvite::cast::{narrow, widen};
use varvite::statistics;
use varvite::tensor::Dtype;

const CHUNK_BYTES: usize = 1 << 20;
/// More than the caches hold together with its copy, so that memory is what is measured.
const LARGE_BYTES: usize = 256 << 20;

const CASTS: [(Dtype, Dtype); 10] = [
    (Dtype::Float32, Dtype::Bfloat16),
    (Dtype::Float32, Dtype::Float16),
    (Dtype::Float32, Dtype::Float8E4m3fn),
    (Dtype::Float64, Dtype::Float32),
    (Dtype::Float64, Dtype::Bfloat16),
    (Dtype::Bfloat16, Dtype::Float8E4m3fn),
    (Dtype::Bfloat16, Dtype::Float32),
    (Dtype::Float16, Dtype::Float32),
    (Dtype::Float8E4m3fn, Dtype::Float32),
    (Dtype::Float32, Dtype::Float64),
];

fn pattern(length: usize) -> Vec<u8> {
    (0..length as u64).map(|index| (index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 & 0x3F).collect()
}

fn size(dtype: Dtype) -> usize {
    dtype.size_bytes() as usize
}

fn casts(criterion: &mut Criterion) {
    for (place, length) in [("in cache", CHUNK_BYTES), ("from memory", LARGE_BYTES)] {
        let mut group = criterion.benchmark_group(format!("cast {place}"));
        group.throughput(Throughput::Bytes(length as u64)).sample_size(20);
        let source = pattern(length);
        let mut target = vec![1; length * 4];
        group.bench_function("memcpy", |bencher| {
            bencher.iter(|| target[..length].copy_from_slice(black_box(&source)));
        });
        for (from, to) in CASTS {
            let target = &mut target[..length / size(from) * size(to)];
            group.bench_function(BenchmarkId::new(from.name(), to.name()), |bencher| {
                bencher.iter(|| {
                    if from.narrows_to(to) {
                        narrow(from, to, 0, black_box(&source), target)
                    } else {
                        widen(from, to, 0, black_box(&source), target)
                    }
                });
            });
        }
        group.finish();
    }
}

fn statistics_of(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("statistics in cache");
    group.throughput(Throughput::Bytes(CHUNK_BYTES as u64)).sample_size(20);
    let bytes = pattern(CHUNK_BYTES);
    for dtype in [
        Dtype::Float64,
        Dtype::Float32,
        Dtype::Bfloat16,
        Dtype::Float16,
        Dtype::Float8E4m3fn,
        Dtype::Complex64,
    ] {
        group.bench_function(dtype.name(), |bencher| {
            bencher.iter(|| statistics::of(dtype, black_box(&bytes)));
        });
    }
    group.finish();
}

criterion_group!(values, casts, statistics_of);
criterion_main!(values);
