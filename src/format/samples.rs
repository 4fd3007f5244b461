//! One small snapshot of everything, for the tests of this folder.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use crate::digest::ChunkDigest;
use crate::tensor::Dtype;

use super::model::{Body, ChunkRef, Codec, Entry, Header, PackRecord, RankStructure, Shard};
use super::names::pack_name;
use super::state_digest::state_digest;

pub(super) const PACK_LENGTH_BYTES: u64 = 16_384;

pub(crate) fn chunk(pack: u32, offset_bytes: u64, stored_length_bytes: u64) -> ChunkRef {
    let digest = ChunkDigest::of(&[pack.to_le_bytes(), (offset_bytes as u32).to_le_bytes()].concat());
    ChunkRef { pack, offset_bytes, stored_length_bytes, codec: Codec::Store, digest, base: None }
}

fn json(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap()
}

/// An entry of float32 in one shard that is the whole.
pub(crate) fn entry(name: &str, shape: &[u64], chunks: Vec<ChunkRef>) -> Entry {
    Entry {
        name: name.to_owned(),
        rank: None,
        dtype: Dtype::Float32,
        stored_dtype: Dtype::Float32,
        shape: shape.to_vec(),
        tied_to: None,
        rounded_from: None,
        nonfinite: None,
        abs_max: None,
        l2_norm: None,
        shards: vec![Shard { offsets: vec![0; shape.len()], lengths: shape.to_vec(), scale_log2: 0, chunks }],
    }
}

/// Snapshot 2 of two ranks: a reused bias, a sharded weight, state of both ranks, a tie.
pub(crate) fn body() -> Body {
    let bias = entry("model.bias", &[8], vec![chunk(0, 64, 32)]);
    let rows = |first, pack| Shard {
        offsets: vec![first, 0],
        lengths: vec![32, 64],
        scale_log2: 0,
        chunks: vec![chunk(pack, 128, 4_096), chunk(pack, 4_224, 4_096)],
    };
    let weight = Entry { shards: vec![rows(0, 1), rows(32, 2)], ..entry("model.weight", &[64, 64], vec![]) };
    let random = |rank| Entry {
        rank: Some(rank),
        dtype: Dtype::Uint8,
        stored_dtype: Dtype::Uint8,
        ..entry("rng.torch", &[16], vec![chunk(rank + 1, 64, 16)])
    };
    let tied = Entry { name: "tied.bias".to_owned(), tied_to: Some("model.bias".to_owned()), ..bias.clone() };
    Body {
        chunk_bytes: 4_096,
        packs: [(1, 0), (2, 0), (2, 1)]
            .map(|(seq, rank)| PackRecord { name: pack_name(seq, rank, 7), length_bytes: PACK_LENGTH_BYTES })
            .to_vec(),
        entries: vec![bias, weight, random(0), random(1), tied],
        structure: json(r#"{"model":{"bias":"$0"}}"#),
        rank_structures: (0..2)
            .map(|rank| RankStructure { rank, structure: json(r#"{"seed":7}"#) })
            .collect(),
    }
}

/// Header of [`body`].
pub(crate) fn header() -> Header {
    header_of(&body())
}

/// Header whose claims are those of a body of snapshot 2.
pub(super) fn header_of(body: &Body) -> Header {
    let own_packs: Vec<u32> = (0..body.packs.len() as u32)
        .filter(|&index| body.packs[index as usize].name.starts_with("2-"))
        .collect();
    let shards = |entry: &Entry| entry.shards.clone();
    let raw_bytes = body
        .entries
        .iter()
        .filter(|entry| entry.tied_to.is_none())
        .flat_map(|entry| shards(entry).into_iter().map(|shard| (shard, entry.stored_dtype.size_bytes())))
        .map(|(shard, size_bytes)| shard.lengths.iter().product::<u64>() * size_bytes)
        .sum();
    Header {
        repository_id: "00112233445566778899aabbccddeeff".to_owned(),
        session_id: "ffeeddccbbaa99887766554433221100".to_owned(),
        seq: 2,
        step: 40,
        parent: Some(1),
        created_at_unix_ms: 1_790_000_000_000,
        world_size: 2,
        metrics: BTreeMap::from([("loss".to_owned(), 0.1), ("perplexity".to_owned(), f64::INFINITY)]),
        metadata: json(r#"{"note":"sample"}"#),
        raw_bytes,
        stored_bytes: 2 * PACK_LENGTH_BYTES,
        nonfinite: BTreeMap::from([("model.bias".to_owned(), 3)]),
        self_contained: body
            .entries
            .iter()
            .flat_map(shards)
            .flat_map(|shard| shard.chunks)
            .all(|chunk| own_packs.contains(&chunk.pack)),
        state_digest: state_digest(body),
    }
}
