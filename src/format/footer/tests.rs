//! One test for each refusal of a footer.

use super::*;
use crate::digest::ChunkDigest;
use crate::error::Error;
use crate::format::model::{Codec, PackRecord, Replica};
use crate::format::names::pack_name;
use crate::format::pack::PackKind;
use crate::format::pack::{HEADER_LENGTH_BYTES, TRAILER_LENGTH_BYTES, decode_trailer};
use crate::format::samples;
use crate::format::state_digest::state_digest;
use crate::tensor::Dtype;

const POSITION_BYTES: u64 = 8_328;

fn own_name() -> String {
    pack_name(2, 1, 7)
}

fn object() -> String {
    format!("packs/{}", own_name())
}

/// The share of rank 1 in the sample: half of the weight, its random state, a reused bias.
fn part() -> Part {
    let mut body = samples::body();
    let reused = body.packs[0].clone();
    body.packs = vec![PackRecord { name: own_name(), length_bytes: 0 }, reused];
    body.entries.retain(|entry| entry.rank != Some(0));
    body.rank_structures.remove(0);
    for entry in &mut body.entries {
        entry.shards.retain(|shard| shard.chunks[0].pack != 1);
        for chunk in entry.shards.iter_mut().flat_map(|shard| &mut shard.chunks) {
            chunk.pack = u32::from(chunk.pack == 0);
        }
    }
    let header = Header { self_contained: false, ..samples::header_of(&body) };
    Part { rank: 1, header, body, replicas: Vec::new() }
}

/// Rows for the chunks of [`part`] that lie in its own pack.
fn chunks() -> Vec<PackChunk> {
    let mut rows: Vec<PackChunk> = part()
        .body
        .entries
        .iter()
        .flat_map(|entry| &entry.shards)
        .flat_map(|shard| &shard.chunks)
        .filter(|chunk| chunk.pack == 0)
        .map(|chunk| PackChunk {
            offset_bytes: chunk.offset_bytes,
            stored_length_bytes: chunk.stored_length_bytes,
            raw_length_bytes: chunk.stored_length_bytes,
            codec: Codec::Store,
            digest: chunk.digest,
        })
        .collect();
    rows.sort_by_key(|row| row.offset_bytes);
    rows
}

fn decode(bytes: &[u8]) -> Result<Footer> {
    let object_length_bytes = POSITION_BYTES + bytes.len() as u64;
    let trailer = decode_trailer(&object(), object_length_bytes, bytes)?;
    let start = (trailer.footer_offset_bytes - POSITION_BYTES) as usize;
    decode_footer(&object(), &trailer, &bytes[start..start + trailer.footer_length_bytes as usize])
}

/// A footer whose bytes after `change` have a right digest.
fn decode_resealed(
    chunks: &[PackChunk],
    part: Option<&Part>,
    change: impl FnOnce(&mut Vec<u8>),
) -> Result<Footer> {
    let bytes = encode_footer(POSITION_BYTES, chunks, part).unwrap();
    let mut footer = bytes[56..bytes.len() - TRAILER_LENGTH_BYTES as usize].to_vec();
    change(&mut footer);
    let trailer = Trailer {
        footer_offset_bytes: POSITION_BYTES + 56,
        footer_length_bytes: footer.len() as u64,
        footer_digest: xxh3_128(&footer),
    };
    decode_footer(&object(), &trailer, &footer)
}

fn corrupt_parts(error: &Error) -> (u64, &str, &str) {
    match error {
        Error::Corrupt { offset_bytes, what, found, .. } => (*offset_bytes, what, found),
        other => panic!("not damage: {other:?}"),
    }
}

/// What [`encode_footer`] refuses to write, in a part after `change`.
fn unwritable(change: impl FnOnce(&mut Part)) -> String {
    let mut part = part();
    change(&mut part);
    part.header.state_digest = state_digest(&part.body);
    match encode_footer(POSITION_BYTES, &chunks(), Some(&part)).unwrap_err() {
        Error::InvalidInput { what, .. } => what,
        other => panic!("not a refusal: {other:?}"),
    }
}

#[test]
fn a_footer_round_trips_behind_its_padding() {
    let bytes = encode_footer(POSITION_BYTES, &chunks(), Some(&part())).unwrap();
    assert!(bytes[..56].iter().all(|&byte| byte == 0));
    assert_eq!(&bytes[56..60], FOOTER_MAGIC);
    let footer = decode(&bytes).unwrap();
    assert_eq!(footer.chunks, chunks());
    let found = footer.part.unwrap();
    assert_eq!((found.rank, &found.header), (1, &part().header));
    assert_eq!(found.body.entries, part().body.entries);
    assert_eq!(found.body.packs, part().body.packs);
}

#[test]
fn a_merge_has_no_part_and_may_be_empty() {
    let footer = decode(&encode_footer(POSITION_BYTES, &[], None).unwrap()).unwrap();
    assert!(footer.chunks.is_empty() && footer.part.is_none());
}

#[test]
fn a_long_chunk_table_is_compressed_and_comes_back() {
    let chunks: Vec<PackChunk> = (1..=1_000_u64)
        .map(|index| PackChunk {
            offset_bytes: index * 64,
            stored_length_bytes: 8,
            raw_length_bytes: 8,
            ..chunks()[0]
        })
        .collect();
    let bytes = encode_footer(100_000, &chunks, None).unwrap();
    assert!((bytes.len() as u64) < 1_000 * ROW_LENGTH_BYTES);
    let object_length_bytes = 100_000 + bytes.len() as u64;
    let trailer = decode_trailer("packs/x", object_length_bytes, &bytes).unwrap();
    let start = (trailer.footer_offset_bytes - 100_000) as usize;
    let footer =
        decode_footer("packs/x", &trailer, &bytes[start..start + trailer.footer_length_bytes as usize])
            .unwrap();
    assert_eq!(footer.chunks, chunks);
}

#[test]
fn a_footer_of_another_length_or_digest_is_refused() {
    let trailer = Trailer { footer_offset_bytes: 128, footer_length_bytes: 64, footer_digest: 0 };
    let error = decode_footer(&object(), &trailer, &[0; 63]).unwrap_err();
    assert_eq!(corrupt_parts(&error), (128, "length of the footer", "63"));
    let error = decode_footer(&object(), &trailer, &[0; 64]).unwrap_err();
    assert_eq!((corrupt_parts(&error).0, corrupt_parts(&error).1), (128, "digest of the footer"));
}

#[test]
fn a_footer_with_another_magic_is_refused() {
    let error = decode_resealed(&[], None, |footer| footer[0] = b'X').unwrap_err();
    assert_eq!(corrupt_parts(&error), (POSITION_BYTES + 56, "magic of the footer", "XVFT"));
}

#[test]
fn a_footer_of_the_future_is_unsupported() {
    let error = decode_resealed(&[], None, |footer| footer[4] = 2).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what: "format version", .. }), "{error:?}");
    let error = decode_resealed(&[], None, |footer| footer[6] = 4).unwrap_err();
    assert!(matches!(&error, Error::Unsupported { what: "reader flag", .. }), "{error:?}");
    let error = decode_resealed(&[], None, |footer| footer[24] = 9).unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported { what: "encoding of the chunk table", found, .. } if found == "9"),
        "{error:?}"
    );
}

#[test]
fn reserved_bytes_must_be_zero() {
    for offset in [28, 31, 40, 63] {
        let error = decode_resealed(&[], None, |footer| footer[offset] = 1).unwrap_err();
        assert_eq!(corrupt_parts(&error).1, "reserved bytes");
    }
}

#[test]
fn lengths_that_do_not_add_up_are_refused() {
    let error = decode_resealed(&[], None, |footer| footer.push(0)).unwrap_err();
    assert_eq!(corrupt_parts(&error).1, "lengths in the footer");
    let error = decode_resealed(&[], None, |footer| footer[32..40].fill(0xff)).unwrap_err();
    assert_eq!(corrupt_parts(&error).1, "lengths in the footer");
}

#[test]
fn more_chunks_than_rows_are_refused() {
    let error = decode_resealed(&chunks(), None, |footer| footer[8] += 1).unwrap_err();
    assert_eq!(corrupt_parts(&error).1, "length of the chunk table");
    let error = decode_resealed(&chunks(), None, |footer| footer[15] = 1).unwrap_err();
    assert_eq!((corrupt_parts(&error).0, corrupt_parts(&error).1), (POSITION_BYTES + 56 + 8, "chunk count"));
    let error = decode_resealed(&chunks(), None, |footer| footer[24] = 1).unwrap_err();
    assert_eq!(corrupt_parts(&error).1, "chunk table");
}

#[test]
fn a_table_that_claims_to_expand_a_lot_is_refused() {
    let error = decode_resealed(&[], None, |footer| {
        footer[11] = 1;
        footer[24] = 1;
    })
    .unwrap_err();
    assert_eq!(corrupt_parts(&error).1, "raw length of the chunk table");
}

#[test]
fn a_part_that_never_ends_its_header_is_refused() {
    let error = decode_resealed(&[], None, |footer| {
        footer.extend_from_slice(b"{\"magic\":\"varvite-part\",");
        footer[32] = 24;
    })
    .unwrap_err();
    assert_eq!(
        (corrupt_parts(&error).0, corrupt_parts(&error).1),
        (POSITION_BYTES + 56 + 64, "header of the part")
    );
}

#[test]
fn a_manifest_in_place_of_a_part_is_refused() {
    let body = samples::body();
    let manifest = two_line::encode(Kind::Manifest, None, &samples::header_of(&body), &body, &[]).unwrap();
    let error = decode_resealed(&[], None, |footer| {
        footer.extend_from_slice(&manifest);
        footer[32..40].copy_from_slice(&(manifest.len() as u64).to_le_bytes());
    })
    .unwrap_err();
    assert_eq!(corrupt_parts(&error).1, "magic");
}

#[test]
fn a_part_that_is_moved_to_another_pack_is_refused() {
    let bytes = encode_footer(POSITION_BYTES, &chunks(), Some(&part())).unwrap();
    let trailer = decode_trailer("packs/x", POSITION_BYTES + bytes.len() as u64, &bytes).unwrap();
    let footer = &bytes[56..bytes.len() - 64];
    let error = decode_footer(&format!("packs/{}", pack_name(3, 1, 7)), &trailer, footer).unwrap_err();
    assert_eq!((corrupt_parts(&error).1, corrupt_parts(&error).2), ("part", "seq 2 and rank 1"));
    let error = decode_footer(&format!("packs/{}", pack_name(2, 1, 8)), &trailer, footer).unwrap_err();
    assert_eq!(corrupt_parts(&error).1, "first pack of a part");
    let error = decode_footer("packs/x", &trailer, footer).unwrap_err();
    assert_eq!((corrupt_parts(&error).1, corrupt_parts(&error).2), ("name of the pack", "x"));
}

#[test]
fn parts_that_no_reader_accepts_are_never_written() {
    assert_eq!(unwritable(|part| part.rank = 0), "part");
    assert_eq!(unwritable(|part| part.rank = 2), "rank of the part");
    assert_eq!(unwritable(|part| part.header.seq = 0), "seq");
    assert_eq!(unwritable(|part| part.body.packs.clear()), "name of the pack");
    assert_eq!(unwritable(|part| part.body.packs[0].length_bytes = 9), "first pack of a part");
    assert_eq!(unwritable(|part| part.body.rank_structures[0].rank = 0), "rank of a structure");
    assert_eq!(unwritable(|part| part.body.entries[2].rank = Some(0)), "rank of `rng.torch`");
}

#[test]
fn a_chunk_ref_that_is_not_in_the_table_is_never_written() {
    assert_eq!(
        unwritable(|part| part.body.entries[1].shards[0].chunks[0].digest.0 ^= 1),
        "chunk of `model.weight`"
    );
    assert_eq!(
        unwritable(|part| part.body.entries[2].shards[0].chunks[0].offset_bytes += 1),
        "chunk of `rng.torch`"
    );
}

#[test]
fn chunks_in_the_wrong_order_are_never_written() {
    let mut reversed = chunks();
    reversed.reverse();
    let error = encode_footer(POSITION_BYTES, &reversed, None).unwrap_err();
    assert!(matches!(&error, Error::InvalidInput { what, .. } if what == "chunk"), "{error:?}");
}

#[test]
fn a_part_and_a_pack_header_of_different_sessions_are_refused() {
    let part = part();
    let header = PackHeader {
        repository_id: part.header.repository_id.clone(),
        session_id: part.header.session_id.clone(),
        seq: 2,
        rank: 1,
        kind: PackKind::Save,
    };
    let footer = Footer { chunks: Vec::new(), part: Some(part) };
    footer.check_origin("packs/x", &header).unwrap();
    let others = [
        ("repository id", PackHeader { repository_id: "0".repeat(32), ..header.clone() }),
        ("session id", PackHeader { session_id: "0".repeat(32), ..header.clone() }),
        ("seq", PackHeader { seq: 3, ..header.clone() }),
        ("rank", PackHeader { rank: 0, ..header.clone() }),
    ];
    for (field, header) in others {
        let error = footer.check_origin("packs/x", &header).unwrap_err();
        assert_eq!(corrupt_parts(&error).1, field);
    }
}

#[test]
fn the_smallest_pack_has_the_documented_length() {
    let bytes = encode_footer(HEADER_LENGTH_BYTES, &[], None).unwrap();
    assert_eq!(HEADER_LENGTH_BYTES + bytes.len() as u64, crate::format::pack::SMALLEST_PACK_LENGTH_BYTES);
}

/// What the part of rank 1 tells of the bias, which rank 0 writes.
fn replica() -> Replica {
    Replica {
        name: "model.bias".to_owned(),
        dtype: Dtype::Float32,
        shape: vec![8, 2],
        offsets: vec![2, 0],
        lengths: vec![4, 2],
        digest: ChunkDigest(7),
    }
}

#[test]
fn replicas_round_trip_and_are_absent_where_there_are_none() {
    let part = Part { replicas: vec![replica(), Replica { name: "z".to_owned(), ..replica() }], ..part() };
    let bytes = encode_footer(POSITION_BYTES, &chunks(), Some(&part)).unwrap();
    assert_eq!(decode(&bytes).unwrap().part.unwrap().replicas, part.replicas);
    let text = |part: &Part| {
        let bytes = two_line::encode(Kind::Part, Some(1), &part.header, &part.body, &part.replicas).unwrap();
        String::from_utf8(bytes).unwrap()
    };
    assert!(text(&part).contains(
        r#""replicas":[{"name":"model.bias","dtype":"float32","shape":[8,2],"offsets":[2,0],"lengths":[4,2],"digest":"00000000000000000000000000000007"}"#
    ));
    assert!(!text(&Part { replicas: Vec::new(), ..part }).contains("replicas"));
}

#[test]
fn replicas_that_break_a_rule_are_never_written() {
    let what = |replicas: Vec<Replica>| unwritable(|part| part.replicas = replicas);
    let changed = |change: fn(&mut Replica)| {
        let mut replica = replica();
        change(&mut replica);
        what(vec![replica])
    };
    assert_eq!(what(vec![replica(), replica()]), "replicas");
    let moved = Replica { offsets: vec![1, 0], ..replica() };
    assert_eq!(what(vec![replica(), moved]), "replicas");
    assert_eq!(changed(|replica| replica.name = "x".repeat(65_537)), "name of a replica");
    for change in [
        (|replica| replica.lengths[0] = 0) as fn(&mut Replica),
        |replica| replica.lengths[0] = 7,
        |replica| replica.offsets[0] = u64::MAX,
        |replica| replica.offsets.truncate(1),
        |replica| replica.lengths.push(1),
    ] {
        assert_eq!(changed(change), "region of a replica of `model.bias`");
    }
    assert_eq!(
        changed(|replica| replica.shape = vec![1 << 40, 1 << 40]),
        "shape of a replica of `model.bias`"
    );
    assert_eq!(changed(|replica| replica.shape = vec![1; 65]), "shape of a replica of `model.bias`");
}

#[test]
fn replicas_in_a_manifest_are_refused() {
    let body = samples::body();
    let header = samples::header_of(&body);
    let bytes = two_line::encode(Kind::Manifest, None, &header, &body, &[replica()]).unwrap();
    let error = crate::format::manifest::decode("snapshots/2.json", &bytes).unwrap_err();
    assert_eq!(corrupt_parts(&error).1, "replicas");
}
