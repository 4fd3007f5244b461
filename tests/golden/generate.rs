//! Makes the golden files of format version 1, byte for byte, out of nothing but the public codecs.
//!
//! Included by `tests/golden_files.rs`, which compares its output with what is committed. The committed
//! files are the promise; this is how they came to be.

use std::collections::BTreeMap;

use serde_json::value::RawValue;
use varvite::digest::ChunkDigest;
use varvite::format::manifest;
use varvite::format::marker::Marker;
use varvite::format::model::{Body, ChunkRef, Codec, Entry, Header, PackRecord, Part, RankStructure, Shard};
use varvite::format::names::{manifest_name, pack_name};
use varvite::format::pack::{self, PackChunk, PackHeader, PackKind};
use varvite::format::receipt::Receipt;
use varvite::format::state_digest::state_digest;
use varvite::format::tag::Tag;
use varvite::tensor::Dtype;
use xxhash_rust::xxh3::xxh3_128;

pub(crate) const REPOSITORY_ID: &str = "00112233445566778899aabbccddeeff";
const CREATED_AT_UNIX_MS: u64 = 1_790_000_000_000;

/// Raw bytes of the three tensors.
pub(crate) fn payload(name: &str) -> Vec<u8> {
    match name {
        "model.weight" => {
            [1.0_f32, -2.5, f32::NAN, 0.0, 3.25, f32::INFINITY].iter().flat_map(|x| x.to_le_bytes()).collect()
        }
        "model.steps" => 7_i64.to_le_bytes().to_vec(),
        "rng.torch" => (0..16).collect(),
        other => panic!("no such tensor: {other}"),
    }
}

/// All golden files: path below `tests/golden/v1/`, bytes.
pub(crate) fn files() -> Vec<(String, Vec<u8>)> {
    let base = Save::base();
    let delta = Save::delta(&base);
    let delta_manifest = manifest::encode(&delta.header(), &delta.body()).unwrap();
    let compressed_body = compressed_body(&base);
    let compressed_header = Header { seq: 3, parent: Some(2), ..header_of(&compressed_body, 3, 0) };
    let marker = Marker::new(REPOSITORY_ID.to_owned());
    let tag = Tag { seq: 1, created_at_unix_ms: CREATED_AT_UNIX_MS };
    let receipt = Receipt {
        number: 1,
        seq: Some(2),
        created_at_unix_ms: CREATED_AT_UNIX_MS,
        content: json(r#"{"note":"opaque to the engine"}"#),
    };

    let mut damaged_body = delta_manifest.clone();
    *damaged_body.last_mut().unwrap() ^= 0x20;
    let cut_off = delta_manifest[..delta_manifest.len() - 10].to_vec();
    let damaged_name = replaced(&delta_manifest, "\"step\":20", "\"step\":21");
    let future = resealed(
        &delta_manifest,
        "\"format_version\":1,\"reader_flags\":0",
        "\"format_version\":2,\"reader_flags\":1,\"invented_later\":[1,2]",
    );
    vec![
        ("repository/varvite.json".to_owned(), marker.encode().unwrap()),
        ("repository/tags/first".to_owned(), tag.encode().unwrap()),
        ("repository/receipts/1.json".to_owned(), receipt.encode().unwrap()),
        (format!("repository/packs/{}", base.pack_name()), base.pack()),
        (format!("repository/packs/{}", delta.pack_name()), delta.pack()),
        (
            format!("repository/snapshots/{}", manifest_name(1)),
            manifest::encode(&base.header(), &base.body()).unwrap(),
        ),
        (format!("repository/snapshots/{}", manifest_name(2)), delta_manifest),
        ("compressed.json".to_owned(), manifest::encode(&compressed_header, &compressed_body).unwrap()),
        ("future.json".to_owned(), future),
        ("corrupt-header.json".to_owned(), damaged_name),
        ("corrupt-body.json".to_owned(), damaged_body),
        ("corrupt-length.json".to_owned(), cut_off),
    ]
}

/// One save of one rank: what lies in its own pack, and what it refers to in older ones.
struct Save {
    seq: u64,
    own: Vec<(&'static str, PackChunk)>,
    older: Vec<(&'static str, PackChunk)>,
    older_pack: Option<PackRecord>,
}

impl Save {
    fn base() -> Self {
        let chunks = [("model.steps", 64), ("model.weight", 128), ("rng.torch", 192)];
        Self {
            seq: 1,
            own: chunks.map(|(name, offset_bytes)| (name, chunk(name, offset_bytes))).to_vec(),
            older: vec![],
            older_pack: None,
        }
    }

    /// Saves the step counter again and refers to the rest.
    fn delta(base: &Self) -> Self {
        let older_pack = PackRecord { name: base.pack_name(), length_bytes: base.pack().len() as u64 };
        Self { seq: 2, own: vec![base.own[0]], older: base.own[1..].to_vec(), older_pack: Some(older_pack) }
    }

    fn pack_name(&self) -> String {
        pack_name(self.seq, 0, 0x2a)
    }

    fn pack(&self) -> Vec<u8> {
        let header = PackHeader {
            repository_id: REPOSITORY_ID.to_owned(),
            session_id: session_id(self.seq),
            seq: self.seq,
            rank: 0,
            kind: PackKind::Save,
        };
        let mut bytes = pack::encode_header(&header).unwrap().to_vec();
        for (name, chunk) in &self.own {
            bytes.resize(chunk.offset_bytes as usize, 0);
            bytes.extend_from_slice(&payload(name));
        }
        let chunks: Vec<PackChunk> = self.own.iter().map(|(_, chunk)| *chunk).collect();
        let body = self.body_with_own_length(0);
        let part = Part { rank: 0, header: header_of(&body, self.seq, 0), body, replicas: Vec::new() };
        let footer = pack::encode_footer(bytes.len() as u64, &chunks, Some(&part)).unwrap();
        bytes.extend_from_slice(&footer);
        bytes
    }

    fn header(&self) -> Header {
        header_of(&self.body(), self.seq, self.pack().len() as u64)
    }

    fn body(&self) -> Body {
        self.body_with_own_length(self.pack().len() as u64)
    }

    fn body_with_own_length(&self, length_bytes: u64) -> Body {
        let mut packs = vec![PackRecord { name: self.pack_name(), length_bytes }];
        packs.extend(self.older_pack.clone());
        let located = |name: &str| {
            let of = |chunks: &[(&str, PackChunk)], pack| {
                chunks.iter().find(|row| row.0 == name).map(|row| reference(pack, row.1))
            };
            of(&self.own, 0).or_else(|| of(&self.older, 1)).unwrap()
        };
        let weight = entry("model.weight", Dtype::Float32, &[2, 3], located("model.weight"));
        let tied = Entry {
            name: "model.tied".to_owned(),
            tied_to: Some("model.weight".to_owned()),
            ..weight.clone()
        };
        let empty =
            Entry { shards: vec![], shape: vec![0, 4], name: "model.empty".to_owned(), ..weight.clone() };
        let weight = Entry { nonfinite: Some(2), ..weight };
        let random = Entry { rank: Some(0), ..entry("rng.torch", Dtype::Uint8, &[16], located("rng.torch")) };
        Body {
            chunk_bytes: 4_096,
            packs,
            entries: vec![
                empty,
                entry("model.steps", Dtype::Int64, &[], located("model.steps")),
                tied,
                weight,
                random,
            ],
            structure: json(r#"{"note":"opaque to the engine"}"#),
            rank_structures: vec![RankStructure { rank: 0, structure: json(r#"{"cursor":640}"#) }],
        }
    }
}

fn session_id(seq: u64) -> String {
    format!("{seq:032x}")
}

fn chunk(name: &str, offset_bytes: u64) -> PackChunk {
    let raw = payload(name);
    let length_bytes = raw.len() as u64;
    PackChunk {
        offset_bytes,
        stored_length_bytes: length_bytes,
        raw_length_bytes: length_bytes,
        codec: Codec::Store,
        digest: ChunkDigest::of(&raw),
    }
}

pub(crate) fn reference(pack: u32, chunk: PackChunk) -> ChunkRef {
    let PackChunk { offset_bytes, stored_length_bytes, codec, digest, .. } = chunk;
    ChunkRef { pack, offset_bytes, stored_length_bytes, codec, digest, base: None }
}

pub(crate) fn entry(name: &str, dtype: Dtype, shape: &[u64], chunk: ChunkRef) -> Entry {
    Entry {
        name: name.to_owned(),
        rank: None,
        dtype,
        stored_dtype: dtype,
        shape: shape.to_vec(),
        tied_to: None,
        rounded_from: None,
        nonfinite: None,
        abs_max: None,
        l2_norm: None,
        shards: vec![Shard {
            offsets: vec![0; shape.len()],
            lengths: shape.to_vec(),
            scale_log2: 0,
            chunks: vec![chunk],
        }],
    }
}

/// Forty entries that all refer to one chunk: long enough to be compressed.
fn compressed_body(base: &Save) -> Body {
    let packs = vec![PackRecord { name: base.pack_name(), length_bytes: base.pack().len() as u64 }];
    let steps = reference(0, base.own[0].1);
    let entries =
        (0..40).map(|index| entry(&format!("counter.{index:02}"), Dtype::Int64, &[], steps)).collect();
    Body { chunk_bytes: 4_096, packs, entries, structure: json("null"), rank_structures: vec![] }
}

pub(crate) fn header_of(body: &Body, seq: u64, stored_bytes: u64) -> Header {
    let raw_bytes = body
        .entries
        .iter()
        .filter(|entry| entry.tied_to.is_none())
        .flat_map(|entry| &entry.shards)
        .flat_map(|shard| &shard.chunks)
        .map(|chunk| chunk.stored_length_bytes)
        .sum();
    Header {
        repository_id: REPOSITORY_ID.to_owned(),
        session_id: session_id(seq),
        seq,
        step: seq * 10,
        parent: seq.checked_sub(1).filter(|&parent| parent > 0),
        created_at_unix_ms: CREATED_AT_UNIX_MS + seq,
        world_size: 1,
        metrics: BTreeMap::from([("loss".to_owned(), 0.1), ("val_loss".to_owned(), f64::NAN)]),
        metadata: json(r#"{"run":"golden"}"#),
        raw_bytes,
        stored_bytes,
        nonfinite: BTreeMap::from([("model.weight".to_owned(), 2)]),
        self_contained: seq == 1,
        state_digest: state_digest(body),
    }
}

pub(crate) fn json(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap()
}

/// A manifest with another text in its header, whose digest is then wrong.
fn replaced(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    assert_eq!(text.matches(from).count(), 1, "{from}");
    text.replace(from, to).into_bytes()
}

/// A manifest with another text in its header and a digest that is right.
pub(crate) fn resealed(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let text = String::from_utf8(replaced(bytes, from, to)).unwrap();
    let (line, body) = text.split_once('\n').unwrap();
    let (fields, _) = line.split_once(",\"header_digest\"").unwrap();
    let digest = xxh3_128(fields.as_bytes());
    format!("{fields},\"header_digest\":\"{digest:032x}\"}}\n{body}").into_bytes()
}
