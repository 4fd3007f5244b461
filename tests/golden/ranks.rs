//! The packs of two ranks: each has one row of a matrix, both hold a counter that only the first writes.

use varvite::digest::ChunkDigest;
use varvite::format::model::{Body, Entry, Header, PackRecord, Part, RankStructure, Replica, Shard};
use varvite::format::names::pack_name;
use varvite::format::pack::{self, PackChunk, PackHeader, PackKind};
use varvite::format::ticket::{Ticket, TicketBase};
use varvite::tensor::Dtype;

use super::generate::{self, REPOSITORY_ID, payload};

/// Commit number of their session.
const SEQ: u64 = 4;

/// Path and bytes of each file.
pub(crate) fn files() -> Vec<(String, Vec<u8>)> {
    let packs = (0..2).map(|rank| (format!("ranks/{}", name_of(rank)), pack_of(rank)));
    let ticket = ("ranks/ticket.json".to_owned(), ticket().encode().unwrap().into_bytes());
    packs.chain([ticket]).collect()
}

/// The ticket that both got.
pub(crate) fn ticket() -> Ticket {
    let base = TicketBase { seq: 2, pack_table: "0123456789abcdef".to_owned() };
    Ticket { header: header(), chunk_bytes: 4_096, generation: "golden.0".to_owned(), base: Some(base) }
}

/// Name of the pack of a rank.
pub(crate) fn name_of(rank: u32) -> String {
    pack_name(SEQ, rank, 0x2a)
}

/// Bytes of a row of the matrix.
pub(crate) fn row(rank: u32) -> Vec<u8> {
    let rows = payload("model.weight");
    rows[12 * rank as usize..][..12].to_vec()
}

fn header() -> Header {
    let empty = Body {
        chunk_bytes: 4_096,
        packs: vec![],
        entries: vec![],
        structure: generate::json("null"),
        rank_structures: vec![],
    };
    Header {
        world_size: 2,
        nonfinite: [].into(),
        self_contained: false,
        state_digest: "0".repeat(64),
        ..generate::header_of(&empty, SEQ, 0)
    }
}

fn pack_of(rank: u32) -> Vec<u8> {
    let header = header();
    let pack_header = PackHeader {
        repository_id: REPOSITORY_ID.to_owned(),
        session_id: header.session_id.clone(),
        seq: SEQ,
        rank,
        kind: PackKind::Save,
    };
    let steps = payload("model.steps");
    let mut entries = Vec::new();
    let mut bytes = pack::encode_header(&pack_header).unwrap().to_vec();
    let mut chunks = Vec::new();
    let mut put = |raw: &[u8]| {
        let chunk = PackChunk {
            offset_bytes: bytes.len() as u64,
            stored_length_bytes: raw.len() as u64,
            raw_length_bytes: raw.len() as u64,
            codec: varvite::format::model::Codec::Store,
            digest: ChunkDigest::of(raw),
        };
        bytes.extend_from_slice(raw);
        bytes.resize(bytes.len().next_multiple_of(64), 0);
        chunks.push(chunk);
        generate::reference(0, chunk)
    };
    if rank == 0 {
        entries.push(generate::entry("model.steps", Dtype::Int64, &[], put(&steps)));
    }
    let shard = Shard {
        offsets: vec![u64::from(rank), 0],
        lengths: vec![1, 3],
        scale_log2: 0,
        chunks: vec![put(&row(rank))],
    };
    let whole = generate::entry("model.weight", Dtype::Float32, &[2, 3], shard.chunks[0]);
    entries.push(Entry { shards: vec![shard], nonfinite: Some(1), ..whole });
    let told = Replica {
        name: "model.steps".to_owned(),
        dtype: Dtype::Int64,
        shape: vec![],
        offsets: vec![],
        lengths: vec![],
        digest: ChunkDigest::of_digests(&[ChunkDigest::of(&steps)]),
    };
    let stage = format!(r#"{{"state":{{"dict":[["stage{rank}",{rank}]]}},"objects":[]}}"#);
    let body = Body {
        chunk_bytes: 4_096,
        packs: vec![PackRecord { name: name_of(rank), length_bytes: 0 }],
        entries,
        structure: generate::json(&stage),
        rank_structures: vec![RankStructure { rank, structure: generate::json(r#"{"cursor":640}"#) }],
    };
    let replicas = if rank == 1 { vec![told] } else { vec![] };
    let part = Part { rank, header, body, replicas };
    let footer = pack::encode_footer(bytes.len() as u64, &chunks, Some(&part)).unwrap();
    bytes.extend_from_slice(&footer);
    bytes
}
