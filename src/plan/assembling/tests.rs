//! Parts of several ranks, made by hand: what they make, and every refusal.

use serde_json::value::RawValue;

use super::*;
use crate::digest::ChunkDigest;
use crate::format::model::{BaseRef, ChunkRef, RankStructure, Shard};
use crate::format::names::pack_name;
use crate::format::samples;
use crate::tensor::Dtype;

const PACK_LENGTH_BYTES: u64 = 8_192;

fn json(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap()
}

/// A part of rank `rank` of `world_size` without entries.
fn part(rank: u32, world_size: u32) -> WrittenPart {
    let name = pack_name(2, rank, u64::from(rank));
    let header = Header {
        repository_id: "a".repeat(32),
        session_id: "5".repeat(32),
        seq: 2,
        step: 10,
        parent: None,
        created_at_unix_ms: 0,
        world_size,
        metrics: BTreeMap::new(),
        metadata: json("{}"),
        raw_bytes: 0,
        stored_bytes: 0,
        nonfinite: BTreeMap::new(),
        self_contained: false,
        state_digest: "0".repeat(64),
    };
    let body = Body {
        chunk_bytes: 4_096,
        packs: vec![PackRecord { name: name.clone(), length_bytes: 0 }],
        entries: Vec::new(),
        structure: json("{}"),
        rank_structures: Vec::new(),
    };
    let part = Part { rank, header, body, replicas: Vec::new() };
    WrittenPart { part, pack: PackRecord { name, length_bytes: PACK_LENGTH_BYTES } }
}

fn parts<const COUNT: usize>() -> [WrittenPart; COUNT] {
    std::array::from_fn(|rank| part(rank as u32, COUNT as u32))
}

/// The chunk of these bytes, in the part's own pack.
fn chunk(value: u8, length_bytes: u64) -> ChunkRef {
    let digest = ChunkDigest::of(&vec![value; length_bytes as usize]);
    ChunkRef {
        pack: 0,
        offset_bytes: 64,
        stored_length_bytes: length_bytes,
        codec: Codec::Store,
        digest,
        base: None,
    }
}

/// Rows of a tensor of 4-byte elements, all of whose bytes are `value`; in one chunk.
fn rows(name: &str, shape: &[u64], rows: std::ops::Range<u64>, value: u8) -> Entry {
    let mut offsets = vec![0; shape.len()];
    let mut lengths = shape.to_vec();
    (offsets[0], lengths[0]) = (rows.start, rows.end - rows.start);
    let length_bytes = 4 * lengths.iter().product::<u64>();
    let shards = if length_bytes == 0 {
        Vec::new()
    } else {
        vec![Shard { offsets, lengths, scale_log2: 0, chunks: vec![chunk(value, length_bytes)] }]
    };
    Entry { shards, ..samples::entry(name, shape, Vec::new()) }
}

fn whole(name: &str, size: u64, value: u8) -> Entry {
    rows(name, &[size], 0..size, value)
}

/// What a rank tells of an entry that it holds and doesn't write.
fn replica(entry: &Entry) -> Replica {
    let shard = &entry.shards[0];
    let digests: Vec<ChunkDigest> = shard.chunks.iter().map(|chunk| chunk.digest).collect();
    Replica {
        name: entry.name.clone(),
        dtype: entry.dtype,
        shape: entry.shape.clone(),
        offsets: shard.offsets.clone(),
        lengths: shard.lengths.clone(),
        digest: ChunkDigest::of_digests(&digests),
    }
}

/// Parts of as many ranks as there are lists of entries.
fn with_entries<const COUNT: usize>(entries: [Vec<Entry>; COUNT]) -> Vec<WrittenPart> {
    let mut parts = Vec::from(parts::<COUNT>());
    for (written, mut own) in parts.iter_mut().zip(entries) {
        own.sort_by(|left, right| (&left.name, left.rank).cmp(&(&right.name, right.rank)));
        written.part.body.entries = own;
    }
    parts
}

/// All fields of a mismatch.
fn mismatch(parts: Vec<WrittenPart>) -> [String; 4] {
    match assemble(parts).unwrap_err() {
        Error::Mismatch { name, field, expected, found } => [name, field.to_owned(), expected, found],
        Error::Disagreement { name, field, ranks: (first, second), left, right } => {
            let ranks = format!("the same on ranks {first} and {second}");
            [name, field.to_owned(), ranks, format!("{left} and {right}")]
        }
        other => panic!("no mismatch: {other:?}"),
    }
}

#[test]
fn shards_of_four_ranks_in_any_order_make_one_entry() {
    let share = |rank: u64| vec![rows("w", &[8, 2], 2 * rank..2 * rank + 2, rank as u8)];
    let mut parts = with_entries([share(0), share(3), share(1), share(2)]);
    parts.swap(0, 2);
    let manifest = assemble(parts).unwrap();
    let [entry] = &manifest.body.entries[..] else { panic!("{:?}", manifest.body.entries) };
    let offsets: Vec<u64> = entry.shards.iter().map(|shard| shard.offsets[0]).collect();
    assert_eq!(offsets, [0, 2, 4, 6]);
    let packs: Vec<&str> = entry
        .shards
        .iter()
        .map(|shard| manifest.body.packs[shard.chunks[0].pack as usize].name.as_str())
        .collect();
    assert_eq!(packs, [0, 2, 3, 1].map(|rank| pack_name(2, rank, rank.into())));
    assert_eq!(manifest.header.raw_bytes, 64);
    assert_eq!(manifest.header.stored_bytes, 4 * PACK_LENGTH_BYTES);
}

#[test]
fn local_entries_and_structures_keep_their_rank() {
    let local = |rank| Entry { rank: Some(rank), ..whole("rng", 1, rank as u8) };
    let mut parts = with_entries([vec![local(0)], vec![local(1)]]);
    for written in &mut parts {
        let rank = written.part.rank;
        written.part.body.rank_structures = vec![RankStructure { rank, structure: json(&rank.to_string()) }];
    }
    let Manifest { body, .. } = assemble(parts).unwrap();
    assert_eq!(body.entries.iter().map(|entry| entry.rank).collect::<Vec<_>>(), [Some(0), Some(1)]);
    let structures: Vec<(u32, &str)> =
        body.rank_structures.iter().map(|found| (found.rank, found.structure.get())).collect();
    assert_eq!(structures, [(0, "0"), (1, "1")]);
}

#[test]
fn packs_of_all_parts_make_one_table_and_bases_follow() {
    let old = PackRecord { name: pack_name(1, 0, 9), length_bytes: PACK_LENGTH_BYTES };
    let mut parts = with_entries([vec![whole("a", 4, 1)], vec![whole("b", 4, 2)]]);
    for written in &mut parts {
        if written.part.rank == 1 {
            let unused = PackRecord { name: pack_name(1, 0, 8), length_bytes: PACK_LENGTH_BYTES };
            written.part.body.packs.push(unused);
        }
        written.part.body.packs.push(old.clone());
        let index = written.part.body.packs.len() as u32 - 1;
        let reference = &mut written.part.body.entries[0].shards[0].chunks[0];
        let base = BaseRef {
            pack: index,
            offset_bytes: 128,
            stored_length_bytes: 16,
            codec: Codec::Store,
            digest: reference.digest,
        };
        (reference.codec, reference.stored_length_bytes, reference.base) = (Codec::Delta, 5, Some(base));
    }
    let Manifest { body, header } = assemble(parts).unwrap();
    let found: Vec<(&str, &str)> = body
        .entries
        .iter()
        .map(|entry| {
            let chunk = &entry.shards[0].chunks[0];
            let name = |pack: u32| body.packs[pack as usize].name.as_str();
            (name(chunk.pack), name(chunk.base.unwrap().pack))
        })
        .collect();
    let own = [0, 1].map(|rank| pack_name(2, rank, rank.into()));
    assert_eq!(found, [(own[0].as_str(), old.name.as_str()), (&own[1], &old.name)]);
    assert_eq!(body.packs.len(), 4);
    assert!(!header.self_contained);
}

#[test]
fn a_pack_of_two_lengths_is_refused() {
    let mut parts = parts::<2>();
    for (written, length_bytes) in parts.iter_mut().zip([8_192, 8_256]) {
        written.part.body.packs.push(PackRecord { name: pack_name(1, 0, 9), length_bytes });
    }
    let [name, field, expected, found] = mismatch(parts.into());
    assert_eq!((name, field.as_str()), (format!("pack {}", pack_name(1, 0, 9)), "length"));
    assert_eq!((expected.as_str(), found.as_str()), ("the same on ranks 0 and 1", "8192 and 8256"));
}

#[test]
fn the_first_of_two_equal_shards_is_kept() {
    let manifest = assemble(with_entries([vec![], vec![whole("w", 4, 7)], vec![whole("w", 4, 7)]])).unwrap();
    let [entry] = &manifest.body.entries[..] else { panic!("{:?}", manifest.body.entries) };
    assert_eq!(manifest.body.packs[entry.shards[0].chunks[0].pack as usize].name, pack_name(2, 1, 1));
    assert_eq!(entry.shards.len(), 1);
}

#[test]
fn shards_of_one_region_that_differ_name_both_ranks() {
    let [name, field, expected, found] = mismatch(with_entries([
        vec![],
        vec![whole("w", 4, 7)],
        vec![whole("w", 4, 7)],
        vec![whole("w", 4, 8)],
    ]));
    assert_eq!((name.as_str(), field.as_str()), ("w", "value"));
    assert_eq!(expected, "the same on ranks 1 and 3");
    let digest = |value| ChunkDigest::of_digests(&[chunk(value, 16).digest]);
    assert_eq!(found, format!("bytes of digest {} and bytes of digest {}", digest(7), digest(8)));
    // The same bytes under another scale are other values.
    let cast = |scale_log2| {
        let mut entry = Entry { stored_dtype: Dtype::Float8E5m2, ..whole("w", 4, 7) };
        entry.shards[0].scale_log2 = scale_log2;
        entry.shards[0].chunks = vec![chunk(7, 4)];
        entry
    };
    let found = mismatch(with_entries([vec![cast(0)], vec![cast(1)]]))[3].clone();
    assert!(found.ends_with(" x 2^1"), "{found}");
}

#[test]
fn a_replica_is_compared_with_what_was_written() {
    let share = |value| rows("w", &[4], 2..4, value);
    let parts = |value| {
        let mut parts = with_entries([vec![rows("w", &[4], 0..2, 1)], vec![share(7)], vec![]]);
        parts[2].part.replicas = vec![replica(&share(value))];
        parts
    };
    assert_eq!(assemble(parts(7)).unwrap().body.entries[0].shards.len(), 2);
    let [name, field, expected, _] = mismatch(parts(8));
    assert_eq!([name.as_str(), &field, &expected], ["w", "value", "the same on ranks 1 and 2"]);
}

#[test]
fn replicas_of_a_cast_entry_are_compared_with_each_other() {
    // The stored bytes are others than the caller's.
    let mut cast = Entry { stored_dtype: Dtype::Bfloat16, ..whole("w", 4, 9) };
    cast.shards[0].chunks = vec![chunk(9, 8)];
    let parts = |values: [u8; 3]| {
        let mut parts = with_entries([vec![], vec![cast.clone()], vec![]]);
        for (written, value) in parts.iter_mut().zip(values) {
            written.part.replicas = vec![replica(&whole("w", 4, value))];
        }
        parts
    };
    assert_eq!(assemble(parts([3, 3, 3])).unwrap().body.entries.len(), 1);
    assert_eq!(mismatch(parts([3, 3, 4]))[2], "the same on ranks 0 and 2");
}

#[test]
fn a_replica_of_what_nobody_wrote_or_of_another_description_is_refused() {
    let told = |told: Replica| {
        let mut parts = with_entries([vec![whole("w", 4, 1)], vec![]]);
        parts[1].part.replicas = vec![told];
        mismatch(parts)
    };
    let known = replica(&whole("w", 4, 1));
    for (told, field, text) in [
        (
            told(Replica { name: "v".to_owned(), ..known.clone() }),
            "region",
            "[0..4] on rank 1, which nobody wrote",
        ),
        (
            told(Replica { lengths: vec![3], ..known.clone() }),
            "region",
            "[0..3] on rank 1, which nobody wrote",
        ),
        (
            told(Replica { offsets: vec![1], lengths: vec![3], ..known.clone() }),
            "region",
            "[1..4] on rank 1, which nobody wrote",
        ),
        (told(Replica { dtype: Dtype::Int32, ..known.clone() }), "dtype", "float32 and int32"),
        (told(Replica { shape: vec![2, 2], ..known }), "shape", "[4] and [2, 2]"),
    ] {
        assert_eq!((told[1].as_str(), told[3].as_str()), (field, text));
    }
}

#[test]
fn descriptions_that_differ_name_both_ranks() {
    let known = || vec![whole("v", 4, 1), whole("w", 4, 1)];
    for (other, field, text) in [
        (Entry { dtype: Dtype::Int32, ..whole("w", 4, 1) }, "dtype", "float32 and int32"),
        (Entry { stored_dtype: Dtype::Float16, ..whole("w", 4, 1) }, "stored dtype", "float32 and float16"),
        (rows("w", &[2, 2], 0..2, 1), "shape", "[4] and [2, 2]"),
        (Entry { tied_to: Some("v".to_owned()), ..whole("w", 4, 1) }, "tie", "none and to `v`"),
    ] {
        let [name, found, expected, values] = mismatch(with_entries([known(), known(), vec![other]]));
        assert_eq!(
            [name.as_str(), &found, &expected, &values],
            ["w", field, "the same on ranks 0 and 2", text]
        );
    }
}

#[test]
fn gaps_and_overlaps_name_the_entry_and_the_ranks_around() {
    let of = |ranges: [std::ops::Range<u64>; 3]| {
        let [name, field, _, found] =
            mismatch(with_entries(ranges.map(|range| vec![rows("w", &[9, 2], range, 1)])));
        assert_eq!([name.as_str(), &field], ["w", "set of regions"]);
        found
    };
    let text = "element [2, 0] on no rank, between [0..2, 0..2] of rank 0 and [3..5, 0..2] of rank 1";
    assert_eq!(of([0..2, 3..5, 5..9]), text);
    assert_eq!(of([1..2, 2..5, 5..9]), "element [0, 0] on no rank, next to [1..2, 0..2] of rank 0");
    assert_eq!(of([0..2, 5..8, 2..5]), "element [8, 0] on no rank, next to [5..8, 0..2] of rank 1");
    assert_eq!(
        of([0..3, 5..9, 2..5]),
        "element [2, 0] in [0..3, 0..2] of rank 0 and in [2..5, 0..2] of rank 2"
    );
    assert_eq!(of([0..0, 0..0, 0..0]), "element [0, 0] on no rank");
}

#[test]
fn statistics_of_distinct_shards_are_joined_and_unknown_where_one_is() {
    let share = |range, nonfinite, abs_max, l2_norm| Entry {
        nonfinite,
        abs_max,
        l2_norm,
        ..rows("w", &[6], range, 1)
    };
    let join = |entries: [Entry; 3]| {
        let entry = assemble(with_entries(entries.map(|entry| vec![entry]))).unwrap().body.entries.remove(0);
        (entry.nonfinite, entry.abs_max, entry.l2_norm)
    };
    let first = || share(0..3, Some(2), Some(1.5), Some(3.0));
    let second = || share(3..6, None, Some(2.5), Some(4.0));
    // The replica of the last rank is counted once; no share without elements counts.
    assert_eq!(join([first(), second(), second()]), (Some(2), Some(2.5), Some(5.0)));
    assert_eq!(join([first(), second(), share(3..3, None, None, None)]), (Some(2), Some(2.5), Some(5.0)));
    assert_eq!(
        join([first(), share(3..5, None, None, Some(4.0)), share(5..6, Some(1), Some(9.0), None)]),
        (Some(3), None, None)
    );
    let huge = |range| share(range, None, Some(f64::MAX), Some(f64::MAX));
    assert_eq!(join([huge(0..2), huge(2..4), huge(4..6)]), (None, Some(f64::MAX), None));
}

#[test]
fn a_tie_has_the_shards_of_its_target_whoever_wrote_them() {
    let tie = |name: &str, target: Entry| Entry {
        name: name.to_owned(),
        tied_to: Some(target.name.clone()),
        ..target
    };
    let share = |rank: u64, value| rows("embed", &[4], 2 * rank..2 * rank + 2, value);
    let both = |rank| vec![share(rank, 1), tie("head", share(rank, 1))];
    let manifest = assemble(with_entries([both(0), both(1)])).unwrap();
    let [embed, head] = &manifest.body.entries[..] else { panic!("{:?}", manifest.body.entries) };
    assert_eq!((&head.shards, head.shards.len()), (&embed.shards, 2));
    // Two ranks write the target, and one tie each.
    let first = vec![whole("embed", 4, 1), tie("left", whole("embed", 4, 1))];
    let second = vec![whole("embed", 4, 1), tie("right", whole("embed", 4, 1))];
    let manifest = assemble(with_entries([first, second])).unwrap();
    assert!(manifest.body.entries.iter().all(|entry| entry.shards == manifest.body.entries[0].shards));
    // A tie whose bytes are others, or whose region nobody wrote of the target.
    let odd = vec![share(1, 1), tie("head", share(1, 2))];
    assert_eq!(mismatch(with_entries([both(0), odd]))[..3], ["head", "value", "the same on ranks 1 and 1"]);
    let odd = vec![share(1, 1), tie("head", rows("embed", &[4], 1..4, 1))];
    assert_eq!(mismatch(with_entries([both(0), odd]))[3], "[1..4] on rank 1");
    // A target that is nowhere is found by the rules of a manifest.
    let error = assemble(with_entries([vec![tie("head", whole("embed", 4, 1))]])).unwrap_err();
    assert!(matches!(&error, Error::Corrupt { what, .. } if what == "tie of `head`"), "{error:?}");
}

#[test]
fn rounded_entries_keep_the_master_that_their_shards_were_computed_from() {
    let narrow = |range: std::ops::Range<u64>, master: Option<&str>| {
        let mut entry = rows("narrow", &[4], range, 1);
        (entry.dtype, entry.stored_dtype) = (Dtype::Bfloat16, Dtype::Bfloat16);
        let digest = chunk(1, 4).digest;
        entry.shards[0].chunks = vec![if master.is_some() { ChunkRef::rounded(digest) } else { chunk(1, 4) }];
        entry.rounded_from = master.map(str::to_owned);
        entry
    };
    let share = |rank: u64, master| {
        let range = 2 * rank..2 * rank + 2;
        vec![rows("m", &[4], range.clone(), 1), rows("n", &[4], range.clone(), 1), narrow(range, master)]
    };
    for masters in [[None, Some("m")], [Some("m"), None], [Some("m"), Some("m")]] {
        let ranks = with_entries([share(0, masters[0]), share(1, masters[1])]);
        let entry = assemble(ranks).unwrap().body.entries.pop().unwrap();
        assert_eq!(entry.rounded_from.as_deref(), Some("m"));
        // Such a chunk lies in no pack, also on a rank whose pack is not the first.
        let rounded = entry.shards.iter().filter(|shard| shard.chunks[0].codec == Codec::Rounded);
        assert!(rounded.clone().count() > 0 && rounded.clone().all(|shard| shard.chunks[0].pack == 0));
    }
    let found = mismatch(with_entries([share(0, Some("m")), share(1, Some("n"))]));
    assert_eq!(found, ["narrow", "entry it is rounded from", "the same on ranks 0 and 1", "m and n"]);
    // A replica that is dropped has no say.
    let replicas = with_entries([share(0, Some("m")), share(1, Some("m")), share(1, Some("n"))]);
    assert_eq!(assemble(replicas).unwrap().body.entries[2].rounded_from.as_deref(), Some("m"));
}

#[test]
fn structures_are_joined() {
    let mut parts = parts::<2>();
    for (written, stage) in parts.iter_mut().zip(["a", "b"]) {
        let text = format!(r#"{{"state":{{"dict":[["{stage}",1]]}},"objects":[]}}"#);
        written.part.body.structure = json(&text);
    }
    let manifest = assemble(parts.into()).unwrap();
    assert_eq!(manifest.body.structure.get(), r#"{"state":{"dict":[["a",1],["b",1]]},"objects":[]}"#);
}

#[test]
fn missing_ranks_are_named_and_others_than_expected_are_refused() {
    for (ranks, missing) in [(vec![1, 3], vec![0, 2, 4]), (vec![0, 1, 2, 3], vec![4])] {
        let parts = ranks.into_iter().map(|rank| part(rank, 5)).collect();
        let error = assemble(parts).unwrap_err();
        assert!(
            matches!(&error, Error::Incomplete { seq: 2, missing_ranks } if *missing_ranks == missing),
            "{error:?}"
        );
    }
    let mut twin = part(1, 2);
    twin.pack.name = pack_name(2, 1, 77);
    // A rank that was started again has saved the same: one of both will do.
    let joined = assemble(vec![part(0, 2), part(1, 2), twin.clone()]).unwrap();
    let packs: Vec<&str> = joined.body.packs.iter().map(|record| record.name.as_str()).collect();
    assert_eq!(packs, [pack_name(2, 0, 0), pack_name(2, 1, 1)]);
    twin.part.body.entries = vec![whole("w", 4, 1)];
    let error = assemble(vec![part(0, 2), part(1, 2), twin]).unwrap_err();
    let names = format!("`{}` and `{}`", pack_name(2, 1, 1), pack_name(2, 1, 77));
    assert!(
        matches!(&error, Error::InvalidInput { what, reason }
            if what == "part of rank 1" && reason.contains(&names) && reason.contains("abandon")),
        "{error:?}"
    );
    let found = mismatch(vec![part(0, 1), part(4, 1)]);
    assert_eq!(found, ["part of rank 4", "rank", "below the world size 1", "4"]);
    assert!(matches!(assemble(Vec::new()), Err(Error::Incomplete { .. })));
}

#[test]
fn a_part_of_another_save_is_named_with_the_fact_that_differs() {
    for (field, change) in [
        ("session", (|part| part.header.session_id = "6".repeat(32)) as fn(&mut Part)),
        ("repository", |part| part.header.repository_id = "b".repeat(32)),
        ("seq", |part| part.header.seq = 3),
        ("step", |part| part.header.step = 11),
        ("world size", |part| part.header.world_size = 3),
        ("chunk size", |part| part.body.chunk_bytes = 8_192),
    ] {
        let mut parts = parts::<2>();
        change(&mut parts[1].part);
        let [name, found, expected, other] = mismatch(parts.into());
        assert_eq!((name.as_str(), found.as_str()), ("part of rank 1", field));
        assert_ne!(expected, other);
    }
}
