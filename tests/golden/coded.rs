//! Makes the coded chunks and the coded manifest of format version 1.
//!
//! Raw bytes follow from a formula, so that only stored bytes are kept as files. The encoder is free to choose
//! otherwise one day: what has to stay is that these bytes decode to those.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use varvite::codec::{self, Effort, Scratch};
use varvite::digest::ChunkDigest;
use varvite::format::manifest;
use varvite::format::model::{Body, ChunkRef, Codec, Entry, Header, PackRecord, Shard};
use varvite::format::names::pack_name;
use varvite::format::state_digest::state_digest;
use varvite::tensor::Dtype;

/// A coded chunk: its file, dtype and codec.
pub(crate) const CODED: [(&str, Dtype, Codec); 6] = [
    ("planes-float32", Dtype::Float32, Codec::Planes),
    ("planes-bfloat16", Dtype::Bfloat16, Codec::Planes),
    ("delta-float32", Dtype::Float32, Codec::Delta),
    ("delta-bfloat16", Dtype::Bfloat16, Codec::Delta),
    ("sparse-bfloat16", Dtype::Bfloat16, Codec::Sparse),
    ("zstd-int64", Dtype::Int64, Codec::Zstd),
];

const ELEMENTS: u64 = 4_096;

/// Noise from a number, the same on every machine.
fn noise(seed: u64, index: u64) -> u64 {
    let mut state = (seed << 32 | index).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    state ^= state >> 29;
    state = state.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state ^ (state >> 32)
}

/// A float like a weight: sign and mantissa are noise, small exponents are rare.
fn weight(index: u64) -> u32 {
    let exponent = 122 - (noise(1, index) >> 8).trailing_zeros().min(12);
    ((noise(2, index) as u32) & 0x807F_FFFF) | (exponent << 23)
}

/// Raw bytes of a coded chunk.
pub(crate) fn raw(name: &str) -> Vec<u8> {
    let words = (0..ELEMENTS).map(|index| match name {
        "delta-float32" | "delta-bfloat16" => weight(index).wrapping_add((noise(3, index) & 0x1_FFFF) as u32),
        "sparse-bfloat16" if index % 97 == 5 => weight(index) ^ 0x1_0000,
        _ => weight(index),
    });
    match name {
        "zstd-int64" => (0..ELEMENTS).flat_map(|index| (index / 100).to_le_bytes()).collect(),
        name if name.ends_with("bfloat16") => {
            words.flat_map(|word| ((word >> 16) as u16).to_le_bytes()).collect()
        }
        _ => words.flat_map(u32::to_le_bytes).collect(),
    }
}

/// Raw bytes of the base of a coded chunk.
pub(crate) fn base(name: &str) -> Option<Vec<u8>> {
    let element_type = name.split_once('-').unwrap().1;
    (name.starts_with("delta") || name.starts_with("sparse")).then(|| raw(&format!("planes-{element_type}")))
}

/// Stored bytes of all coded chunks, as this build codes them.
pub(crate) fn chunks() -> Vec<(String, Vec<u8>)> {
    let mut scratch = Scratch::default();
    let mut code = |(name, dtype, expected): (&str, Dtype, Codec)| {
        let mut stored = Vec::new();
        let base = base(name);
        let found = codec::encode(dtype, &raw(name), base.as_deref(), Effort::Max, &mut scratch, &mut stored);
        assert_eq!(found, expected, "{name}");
        (format!("chunks/{name}.bin"), stored)
    };
    CODED.into_iter().map(&mut code).collect()
}

/// A manifest with a chunk of every codec, a cast with a scale, and statistics.
pub(crate) fn manifest() -> Vec<u8> {
    let packs: Vec<PackRecord> =
        [1, 2].map(|seq| PackRecord { name: pack_name(seq, 0, 0x2a), length_bytes: 200_000 }).to_vec();
    let body = Body {
        chunk_bytes: 32_768,
        packs,
        entries: entries(),
        structure: RawValue::from_string("{}".to_owned()).unwrap(),
        rank_structures: Vec::new(),
    };
    let raw_bytes = body
        .entries
        .iter()
        .map(|entry| entry.shape.iter().product::<u64>() * entry.stored_dtype.size_bytes())
        .sum();
    let header = Header {
        repository_id: "00112233445566778899aabbccddeeff".to_owned(),
        session_id: format!("{:032x}", 2),
        seq: 2,
        step: 20,
        parent: Some(1),
        created_at_unix_ms: 1_790_000_000_000,
        world_size: 1,
        metrics: BTreeMap::new(),
        metadata: RawValue::from_string("{}".to_owned()).unwrap(),
        raw_bytes,
        stored_bytes: 200_000,
        nonfinite: BTreeMap::new(),
        self_contained: false,
        state_digest: state_digest(&body),
    };
    manifest::encode(&header, &body).unwrap()
}

fn entries() -> Vec<Entry> {
    let mut entries: Vec<Entry> = CODED
        .iter()
        .zip(0_u64..)
        .map(|((name, dtype, codec), position)| {
            let base = base(name).and_then(|base| {
                let digest = ChunkDigest::of(&base);
                chunk(0, 4_096, 1_000, Codec::Planes, digest).as_base()
            });
            let digest = ChunkDigest::of(&raw(name));
            let reference = ChunkRef { base, ..chunk(1, 4_096 * (position + 1), 900, *codec, digest) };
            entry(name, *dtype, reference)
        })
        .collect();
    let mut scaled =
        entry("scaled", Dtype::Float32, chunk(1, 40_960, ELEMENTS, Codec::Store, ChunkDigest(7)));
    scaled.stored_dtype = Dtype::Float8E4m3fn;
    scaled.shards[0].scale_log2 = -9;
    (scaled.nonfinite, scaled.abs_max, scaled.l2_norm) = (Some(1), Some(0.875), Some(20.1));
    let mut rounded = entry("rounded", Dtype::Bfloat16, ChunkRef::rounded(ChunkDigest(8)));
    rounded.rounded_from = Some("planes-float32".to_owned());
    entries.extend([scaled, rounded]);
    entries.sort_by(|left, right| left.name.cmp(&right.name));
    entries
}

fn chunk(
    pack: u32,
    offset_bytes: u64,
    stored_length_bytes: u64,
    codec: Codec,
    digest: ChunkDigest,
) -> ChunkRef {
    ChunkRef { pack, offset_bytes, stored_length_bytes, codec, digest, base: None }
}

fn entry(name: &str, dtype: Dtype, chunk: ChunkRef) -> Entry {
    Entry {
        name: name.to_owned(),
        rank: None,
        dtype,
        stored_dtype: dtype,
        shape: vec![ELEMENTS],
        tied_to: None,
        rounded_from: None,
        nonfinite: None,
        abs_max: None,
        l2_norm: None,
        shards: vec![Shard { offsets: vec![0], lengths: vec![ELEMENTS], scale_log2: 0, chunks: vec![chunk] }],
    }
}
