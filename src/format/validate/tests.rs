//! One test for each rule of a manifest.

use super::*;
use crate::digest::ChunkDigest;
use crate::format::manifest::validate;
use crate::format::model::{BaseRef, PackRecord};
use crate::format::samples;
use crate::tensor::Dtype;
use serde_json::value::RawValue;

/// What is refused in the sample manifest after `change`: the field and what was found.
fn refusal(change: impl FnOnce(&mut Body)) -> (String, String) {
    let mut body = samples::body();
    change(&mut body);
    let header = samples::header_of(&body);
    match validate("snapshots/2.json", &header, &body).unwrap_err() {
        Error::Corrupt { object, offset_bytes, what, found, .. } => {
            assert_eq!((object.as_str(), offset_bytes), ("snapshots/2.json", 0));
            (what, found)
        }
        other => panic!("not damage: {other:?}"),
    }
}

fn owned(what: &str, found: &str) -> (String, String) {
    (what.to_owned(), found.to_owned())
}

#[test]
fn the_sample_is_legal() {
    let body = samples::body();
    validate("snapshots/2.json", &samples::header_of(&body), &body).unwrap();
}

#[test]
fn illegal_chunk_bytes_are_refused() {
    assert_eq!(refusal(|body| body.chunk_bytes = 0), owned("chunk_bytes", "0"));
    assert_eq!(refusal(|body| body.chunk_bytes = 6_000), owned("chunk_bytes", "6000"));
}

#[test]
fn deep_structures_are_refused() {
    let deep = RawValue::from_string(format!("{}{}", "[".repeat(513), "]".repeat(513))).unwrap();
    assert_eq!(refusal(|body| body.structure = deep.clone()), owned("structure", "513"));
    assert_eq!(refusal(|body| body.rank_structures[1].structure = deep), owned("rank structure", "513"));
}

#[test]
fn rank_structures_out_of_order_are_refused() {
    assert_eq!(refusal(|body| body.rank_structures.swap(0, 1)), owned("rank structures", "0"));
    assert_eq!(refusal(|body| body.rank_structures[1].rank = 0), owned("rank structures", "0"));
}

#[test]
fn ranks_outside_the_world_are_refused() {
    assert_eq!(refusal(|body| body.rank_structures[1].rank = 2), owned("rank of a structure", "2"));
    assert_eq!(refusal(|body| body.entries[2].rank = Some(2)), owned("rank of `rng.torch`", "2"));
}

#[test]
fn packs_of_an_illegal_name_are_refused() {
    let found = refusal(|body| body.packs[0].name = "../../etc/passwd".to_owned());
    assert_eq!(found, owned("name of a pack", "../../etc/passwd"));
}

#[test]
fn a_pack_listed_twice_is_refused() {
    let name = samples::body().packs[0].name.clone();
    assert_eq!(refusal(|body| body.packs[1].name.clone_from(&name)), owned("packs", &name));
}

#[test]
fn a_pack_too_short_to_be_one_is_refused() {
    let name = samples::body().packs[1].name.clone();
    assert_eq!(
        refusal(|body| body.packs[1].length_bytes = 0),
        owned(&format!("length of pack `{name}`"), "0")
    );
}

#[test]
fn entries_out_of_order_or_twice_are_refused() {
    assert_eq!(refusal(|body| body.entries.swap(0, 1)), owned("entries", "model.bias"));
    assert_eq!(refusal(|body| body.entries[1] = body.entries[0].clone()), owned("entries", "model.bias"));
}

#[test]
fn a_name_that_is_too_long_is_refused() {
    let found = refusal(|body| body.entries[3].name = "z".repeat(65_537));
    assert_eq!(found, owned("name of an entry", "65537"));
}

#[test]
fn too_many_dimensions_are_refused() {
    assert_eq!(refusal(|body| body.entries[0].shape = vec![1; 65]), owned("shape of `model.bias`", "65"));
}

#[test]
fn a_shape_that_overflows_is_refused() {
    let found = refusal(|body| body.entries[0].shape = vec![1 << 32, 1 << 32]);
    assert_eq!(found, owned("shape of `model.bias`", "[4294967296, 4294967296]"));
    let found = refusal(|body| {
        body.entries[0].stored_dtype = Dtype::Uint8;
        body.entries[0].shape = vec![1 << 62];
    });
    assert_eq!(found, owned("shape of `model.bias`", "[4611686018427387904]"));
}

#[test]
fn more_nonfinite_elements_than_elements_are_refused() {
    assert_eq!(refusal(|body| body.entries[0].nonfinite = Some(9)), owned("nonfinite of `model.bias`", "9"));
}

#[test]
fn shards_of_an_empty_tensor_are_refused() {
    assert_eq!(refusal(|body| body.entries[0].shape = vec![0]), owned("shards of `model.bias`", "1"));
}

#[test]
fn a_rank_local_tensor_in_two_shards_is_refused() {
    assert_eq!(refusal(|body| body.entries[1].rank = Some(0)), owned("shards of `model.weight`", "2"));
}

#[test]
fn a_rank_local_tensor_that_is_not_whole_is_refused() {
    let found = refusal(|body| body.entries[2].shape = vec![17]);
    assert_eq!(found, owned("shards of `rng.torch`", "element [16] in 0 shards"));
}

#[test]
fn shards_out_of_order_are_refused() {
    assert_eq!(
        refusal(|body| body.entries[1].shards.swap(0, 1)),
        owned("shards of `model.weight`", "[0, 0]")
    );
}

#[test]
fn a_shard_outside_the_shape_is_refused() {
    let found = refusal(|body| body.entries[0].shards[0].offsets[0] = 1);
    assert_eq!(found, owned("shard of `model.bias`", "offsets [1], lengths [8]"));
    let found = refusal(|body| body.entries[0].shards[0].offsets[0] = u64::MAX);
    assert_eq!(found, owned("shard of `model.bias`", "offsets [18446744073709551615], lengths [8]"));
}

#[test]
fn a_shard_without_elements_or_of_other_dimensions_is_refused() {
    let found = refusal(|body| body.entries[0].shards[0].lengths[0] = 0);
    assert_eq!(found, owned("shard of `model.bias`", "offsets [0], lengths [0]"));
    let found = refusal(|body| body.entries[0].shards[0].lengths.push(1));
    assert_eq!(found, owned("shard of `model.bias`", "offsets [0], lengths [8, 1]"));
}

#[test]
fn a_gap_is_refused_and_located() {
    let found = refusal(|body| {
        body.entries[1].shards.pop();
    });
    assert_eq!(found, owned("shards of `model.weight`", "element [32, 0] in 0 shards"));
}

#[test]
fn an_overlap_is_refused_and_located() {
    let found = refusal(|body| body.entries[1].shards[1].offsets[0] = 31);
    assert_eq!(found, owned("shards of `model.weight`", "element [31, 0] in 2 shards"));
}

#[test]
fn a_missing_or_surplus_chunk_is_refused() {
    let found = refusal(|body| {
        body.entries[1].shards[0].chunks.pop();
    });
    assert_eq!(found, owned("chunks of a shard of `model.weight`", "1"));
    let found = refusal(|body| {
        let chunk = body.entries[0].shards[0].chunks[0];
        body.entries[0].shards[0].chunks.push(chunk);
    });
    assert_eq!(found, owned("chunks of a shard of `model.bias`", "2"));
}

#[test]
fn a_pack_index_without_pack_is_refused() {
    let found = refusal(|body| body.entries[0].shards[0].chunks[0].pack = 3);
    assert_eq!(found, owned("pack of a chunk of `model.bias`", "3"));
}

#[test]
fn a_stored_chunk_of_another_length_is_refused() {
    let found = refusal(|body| body.entries[0].shards[0].chunks[0].stored_length_bytes = 31);
    assert_eq!(found, owned("stored length of a chunk of `model.bias`", "31"));
}

#[test]
fn a_chunk_outside_its_pack_is_refused() {
    let found = refusal(|body| body.entries[0].shards[0].chunks[0].offset_bytes = 16_384);
    assert_eq!(found, owned("chunk of `model.bias`", "32 bytes at 16384"));
    let found = refusal(|body| body.entries[0].shards[0].chunks[0].offset_bytes = u64::MAX);
    assert_eq!(found, owned("chunk of `model.bias`", "32 bytes at 18446744073709551615"));
    let found = refusal(|body| body.entries[0].shards[0].chunks[0].offset_bytes = 0);
    assert_eq!(found, owned("chunk of `model.bias`", "32 bytes at 0"));
}

#[test]
fn a_tie_to_nothing_is_refused() {
    let found = refusal(|body| body.entries[4].tied_to = Some("gone".to_owned()));
    assert_eq!(found, owned("tie of `tied.bias`", "gone"));
}

#[test]
fn a_tie_to_a_tie_is_refused() {
    let found = refusal(|body| body.entries[4].tied_to = Some("tied.bias".to_owned()));
    assert_eq!(found, owned("tie of `tied.bias`", "tied.bias"));
}

#[test]
fn a_tie_to_another_tensor_is_refused() {
    for change in [
        |entry: &mut Entry| entry.dtype = Dtype::Float64,
        |entry: &mut Entry| entry.shards[0].chunks[0].digest = ChunkDigest(0),
    ] {
        let found = refusal(|body| change(&mut body.entries[4]));
        assert_eq!(found, owned("tie of `tied.bias`", "model.bias"));
    }
}

#[test]
fn a_tie_to_an_entry_of_another_rank_is_refused() {
    let found = refusal(|body| body.entries[4].rank = Some(1));
    assert_eq!(found, owned("tie of `tied.bias`", "model.bias"));
}

#[test]
fn false_claims_of_the_header_are_refused() {
    let body = samples::body();
    let header = samples::header_of(&body);
    let claims = [
        ("raw_bytes", Header { raw_bytes: 1, ..header.clone() }),
        ("self_contained", Header { self_contained: true, ..header.clone() }),
        ("state digest", Header { state_digest: "0".repeat(64), ..header.clone() }),
    ];
    for (claim, header) in claims {
        let error = validate("snapshots/2.json", &header, &body).unwrap_err();
        assert!(matches!(&error, Error::Corrupt { what, .. } if what == claim), "{error:?}");
    }
}

#[test]
fn a_snapshot_that_could_be_self_contained_need_not_claim_it() {
    let mut body = samples::body();
    body.packs[0].name = crate::format::names::pack_name(2, 2, 7);
    let header = samples::header_of(&body);
    assert!(header.self_contained);
    validate("snapshots/2.json", &Header { self_contained: false, ..header }, &body).unwrap();
}

#[test]
fn a_part_must_begin_with_its_own_pack() {
    let pack_name = samples::body().packs[1].name.clone();
    let scope = Scope::Part { rank: 0, pack_name: &pack_name, footer_offset_bytes: 4_096 };
    let place = Place::new("packs/x", 0);
    let mut body = samples::body();
    let error = check_packs(place, &body, scope).err().unwrap();
    assert!(matches!(&error, Error::Corrupt { what, .. } if what == "first pack of a part"), "{error:?}");
    body.packs = vec![PackRecord { name: pack_name.clone(), length_bytes: 0 }];
    assert_eq!(check_packs(place, &body, scope).unwrap()[0].end_bytes, 4_096);
    body.packs.clear();
    let error = check_packs(place, &body, scope).err().unwrap();
    assert!(matches!(&error, Error::Corrupt { found, .. } if found == "no packs"), "{error:?}");
}

#[test]
fn long_names_are_cut_in_messages() {
    assert_eq!(shown("a\nb"), "a\\nb");
    assert_eq!(shown(&"n".repeat(1_000)).len(), 203);
}

/// The second chunk of `model.weight` on rank 0, as a difference to the first.
fn make_delta(body: &mut Body) -> &mut ChunkRef {
    let chunks = &mut body.entries[1].shards[0].chunks;
    let base = chunks[0].as_base();
    chunks[1] = ChunkRef { codec: Codec::Delta, stored_length_bytes: 100, base, ..chunks[1] };
    &mut chunks[1]
}

#[test]
fn a_difference_to_a_whole_chunk_is_legal() {
    let mut body = samples::body();
    make_delta(&mut body);
    validate("snapshots/2.json", &samples::header_of(&body), &body).unwrap();
}

#[test]
fn a_base_outside_its_pack_or_of_another_length_is_refused() {
    let with_base =
        |change: fn(&mut BaseRef)| refusal(|body| change(make_delta(body).base.as_mut().unwrap()));
    assert_eq!(with_base(|base| base.pack = 3), owned("pack of a chunk of `model.weight`", "3"));
    assert_eq!(with_base(|base| base.offset_bytes = 16_384).1, "4096 bytes at 16384");
    let found = with_base(|base| base.stored_length_bytes = 4_095);
    assert_eq!(found, owned("stored length of a chunk of `model.weight`", "4095"));
    let found = with_base(|base| base.codec = Codec::Sparse);
    assert_eq!(found, owned("base of a chunk of `model.weight`", "3"));
}

#[test]
fn a_base_stands_beside_differences_only() {
    let found = refusal(|body| make_delta(body).base = None);
    assert_eq!(found, owned("base of a chunk of `model.weight`", "none"));
    let found = refusal(|body| {
        let chunk = make_delta(body);
        (chunk.codec, chunk.stored_length_bytes) = (Codec::Store, 4_096);
    });
    assert_eq!(found, owned("base of a chunk of `model.weight`", "one"));
}

#[test]
fn a_coded_chunk_is_shorter_than_what_it_holds() {
    for codec in [Codec::Planes, Codec::Zstd] {
        for stored_length_bytes in [0, 4_096] {
            let found = refusal(|body| {
                let chunk = &mut body.entries[1].shards[0].chunks[0];
                *chunk = ChunkRef { stored_length_bytes, codec, ..*chunk };
            });
            let what = "stored length of a chunk of `model.weight`";
            assert_eq!(found, owned(what, &stored_length_bytes.to_string()));
        }
    }
}

/// The tied bias as an entry of its own, rounded from the bias.
fn make_rounded(body: &mut Body) -> &mut Entry {
    let entry = &mut body.entries[4];
    entry.tied_to = None;
    entry.rounded_from = Some("model.bias".to_owned());
    (entry.dtype, entry.stored_dtype) = (Dtype::Bfloat16, Dtype::Bfloat16);
    let digest = ChunkDigest(7);
    entry.shards[0].chunks[0] = ChunkRef {
        pack: 0,
        offset_bytes: 0,
        stored_length_bytes: 0,
        codec: Codec::Rounded,
        digest,
        base: None,
    };
    entry
}

#[test]
fn an_entry_rounded_from_a_wider_one_is_legal() {
    let mut body = samples::body();
    make_rounded(&mut body);
    validate("snapshots/2.json", &samples::header_of(&body), &body).unwrap();
}

#[test]
fn a_rounded_entry_needs_a_wider_one_of_its_regions() {
    let source = |name: &str| refusal(|body| make_rounded(body).rounded_from = Some(name.to_owned()));
    let what = "entry rounded from of `tied.bias`";
    assert_eq!(source("gone"), owned(what, "gone"));
    assert_eq!(source("tied.bias"), owned(what, "tied.bias"));
    assert_eq!(source("model.weight"), owned(what, "model.weight"));
    let found = refusal(|body| {
        let entry = make_rounded(body);
        (entry.dtype, entry.stored_dtype) = (Dtype::Float32, Dtype::Float32);
    });
    assert_eq!(found, owned(what, "model.bias"));
}

#[test]
fn a_rounded_chunk_has_no_place_and_an_entry_it_comes_from() {
    let found = refusal(|body| make_rounded(body).rounded_from = None);
    assert_eq!(found, owned("rounded chunk of `tied.bias`", "none"));
    let found = refusal(|body| make_rounded(body).shards[0].chunks[0].stored_length_bytes = 1);
    assert_eq!(found, owned("rounded chunk of `tied.bias`", "(0, 0, 1, None)"));
}

#[test]
fn only_a_narrower_float_stands_for_a_float() {
    let cast = |dtype, stored_dtype| {
        refusal(|body| (body.entries[0].dtype, body.entries[0].stored_dtype) = (dtype, stored_dtype))
    };
    let what = "stored dtype of `model.bias`";
    assert_eq!(cast(Dtype::Float32, Dtype::Float64), owned(what, "float64"));
    assert_eq!(cast(Dtype::Bfloat16, Dtype::Float16), owned(what, "float16"));
    assert_eq!(cast(Dtype::Int64, Dtype::Float32), owned(what, "float32"));
    assert_eq!(cast(Dtype::Float32, Dtype::Int16), owned(what, "int16"));
}

#[test]
fn only_a_cast_to_an_8_bit_float_has_a_scale() {
    let what = "scale_log2 of `model.bias`";
    assert_eq!(refusal(|body| body.entries[0].shards[0].scale_log2 = 1), owned(what, "1"));
    let scaled = |scale_log2| {
        let mut body = samples::body();
        let entry = &mut body.entries[0];
        entry.stored_dtype = Dtype::Float8E5m2;
        entry.shards[0].scale_log2 = scale_log2;
        entry.shards[0].chunks[0].stored_length_bytes = 8;
        body.entries.truncate(4);
        validate("snapshots/2.json", &samples::header_of(&body), &body)
    };
    scaled(-1_200).unwrap();
    assert!(matches!(scaled(1_201), Err(Error::InvalidInput { .. } | Error::Corrupt { .. })));
}

#[test]
fn statistics_are_finite_and_no_less_than_zero() {
    for value in [-1.0, f64::INFINITY, f64::NAN] {
        let found = refusal(|body| body.entries[0].abs_max = Some(value));
        assert_eq!(found, owned("abs_max of `model.bias`", &format!("Some({value:?})")));
        assert_eq!(refusal(|body| body.entries[0].l2_norm = Some(value)).0, "l2_norm of `model.bias`");
    }
}
