//! From the footers of all ranks to the bytes of one manifest: `cargo bench --bench join`.
//!
//! Elements are what the ranks hold: entries times ranks. The throughput of a row is the slope.
#![expect(clippy::expect_used, reason = "a bench has no caller to report to")]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use serde_json::value::RawValue;
use varvite::digest::ChunkDigest;
use varvite::format::model::{
    Body, ChunkRef, Codec, Entry, Header, Manifest, PackRecord, Part, Replica, Shard,
};
use varvite::format::names::pack_name;
use varvite::format::pack::{PackChunk, decode_footer, decode_trailer, encode_footer};
use varvite::format::{manifest, state_digest::state_digest};
use varvite::plan::{WrittenPart, assemble};
use varvite::tensor::Dtype;

const ENTRY_COUNT: u64 = 10_000;
/// Every so manieth entry is held whole by all ranks.
const REPLICATED_EVERY: u64 = 10;
const RANK_COUNTS: [u64; 4] = [1, 4, 16, 64];
const ROWS_EACH: u64 = 4;
const COLUMNS: u64 = 64;
/// Bytes that a shard of float32 takes, and the place of each in the pack.
const SHARD_BYTES: u64 = ROWS_EACH * COLUMNS * 4;
const FIRST_OFFSET_BYTES: u64 = 64;

fn json(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).expect("JSON")
}

fn name_of(index: u64) -> String {
    format!("optimizer.state.layers.{}.attention.weight_{:02}.exp_avg", index / 100, index % 100)
}

fn structure() -> Box<RawValue> {
    let leaves: Vec<String> =
        (0..ENTRY_COUNT).map(|index| format!(r#"["{index}",{{"tensor":"{}"}}]"#, name_of(index))).collect();
    json(&format!(r#"{{"state":{{"dict":[{}]}},"objects":[]}}"#, leaves.join(",")))
}

/// What rank `rank` has in its pack: a shard of most entries, and its share of the replicated ones.
fn footer(rank: u64, rank_count: u64) -> (String, Vec<u8>, u64) {
    let mut entries = Vec::new();
    let mut chunks = Vec::new();
    let mut replicas = Vec::new();
    for index in 0..ENTRY_COUNT {
        let is_replicated = index % REPLICATED_EVERY == 0;
        let owner = index / REPLICATED_EVERY % rank_count;
        let digest =
            ChunkDigest::of(&[index, if is_replicated { 0 } else { rank }].map(u64::to_le_bytes).concat());
        let shape = vec![if is_replicated { ROWS_EACH } else { ROWS_EACH * rank_count }, COLUMNS];
        let offsets = vec![if is_replicated { 0 } else { ROWS_EACH * rank }, 0];
        let lengths = vec![ROWS_EACH, COLUMNS];
        if is_replicated && owner != rank {
            let digest = ChunkDigest::of_digests(&[digest]);
            replicas.push(Replica {
                name: name_of(index),
                dtype: Dtype::Float32,
                shape,
                offsets,
                lengths,
                digest,
            });
            continue;
        }
        let offset_bytes = FIRST_OFFSET_BYTES + chunks.len() as u64 * SHARD_BYTES;
        let row = PackChunk {
            offset_bytes,
            stored_length_bytes: SHARD_BYTES,
            raw_length_bytes: SHARD_BYTES,
            codec: Codec::Store,
            digest,
        };
        chunks.push(row);
        let chunk = ChunkRef {
            pack: 0,
            offset_bytes,
            stored_length_bytes: SHARD_BYTES,
            codec: Codec::Store,
            digest,
            base: None,
        };
        entries.push(Entry {
            name: name_of(index),
            rank: None,
            dtype: Dtype::Float32,
            stored_dtype: Dtype::Float32,
            shape,
            tied_to: None,
            rounded_from: None,
            nonfinite: None,
            abs_max: Some(1.0 / f64::from((index + rank + 1) as u32)),
            l2_norm: Some(f64::from((index + rank) as u32) / 3.0),
            shards: vec![Shard { offsets, lengths, scale_log2: 0, chunks: vec![chunk] }],
        });
    }
    entries.sort_by(|left, right| left.name.cmp(&right.name));
    replicas.sort_by(|left, right| left.name.cmp(&right.name));
    let position_bytes = FIRST_OFFSET_BYTES + chunks.len() as u64 * SHARD_BYTES;
    let name = pack_name(1, rank as u32, rank);
    let body = Body {
        chunk_bytes: 1 << 20,
        packs: vec![PackRecord { name: name.clone(), length_bytes: 0 }],
        entries,
        structure: structure(),
        rank_structures: Vec::new(),
    };
    let part = Part { rank: rank as u32, header: header(rank_count as u32, &body), body, replicas };
    let bytes = encode_footer(position_bytes, &chunks, Some(&part)).expect("a footer");
    (name, bytes, position_bytes)
}

fn header(world_size: u32, body: &Body) -> Header {
    Header {
        repository_id: "a".repeat(32),
        session_id: "b".repeat(32),
        seq: 1,
        step: 10,
        parent: None,
        created_at_unix_ms: 0,
        world_size,
        metrics: BTreeMap::new(),
        metadata: json("{}"),
        raw_bytes: 0,
        stored_bytes: 0,
        nonfinite: BTreeMap::new(),
        self_contained: true,
        state_digest: state_digest(body),
    }
}

fn decoded(footers: &[(String, Vec<u8>, u64)]) -> Vec<WrittenPart> {
    let read = |(name, bytes, position_bytes): &(String, Vec<u8>, u64)| {
        let object = format!("packs/{name}");
        let length_bytes = position_bytes + bytes.len() as u64;
        let trailer = decode_trailer(&object, length_bytes, bytes).expect("a trailer");
        let start = (trailer.footer_offset_bytes - position_bytes) as usize;
        let footer = &bytes[start..start + trailer.footer_length_bytes as usize];
        let part = decode_footer(&object, &trailer, footer).expect("a footer").part.expect("a part");
        WrittenPart { part, pack: PackRecord { name: name.clone(), length_bytes } }
    };
    footers.iter().map(read).collect()
}

fn encoded(made: &Manifest) -> Vec<u8> {
    manifest::encode(&made.header, &made.body).expect("a manifest")
}

fn join(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("join");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    for rank_count in RANK_COUNTS {
        let footers: Vec<_> = (0..rank_count).map(|rank| footer(rank, rank_count)).collect();
        let made = assemble(decoded(&footers)).expect("a manifest");
        group.throughput(Throughput::Elements(ENTRY_COUNT * rank_count));
        group.bench_function(BenchmarkId::new("decode footers", rank_count), |bencher| {
            bencher.iter_with_large_drop(|| decoded(black_box(&footers)));
        });
        group.bench_function(BenchmarkId::new("assemble", rank_count), |bencher| {
            bencher.iter_batched(
                || decoded(&footers),
                |parts| assemble(parts).expect("a manifest"),
                criterion::BatchSize::PerIteration,
            );
        });
        group.bench_function(BenchmarkId::new("encode manifest", rank_count), |bencher| {
            bencher.iter(|| encoded(black_box(&made)));
        });
        group.bench_function(BenchmarkId::new("all", rank_count), |bencher| {
            bencher.iter(|| encoded(&assemble(decoded(black_box(&footers))).expect("a manifest")));
        });
    }
    group.finish();
}

criterion_group!(benches, join);
criterion_main!(benches);
