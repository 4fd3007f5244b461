//! Whatever the bytes: decoders give back what was written, or an error; never a panic, never another
//! value.
//!
//! The fuzz targets in `fuzz/` look for the same with more time; this is the part that runs always.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panic")]

#[path = "golden/bucket.rs"]
mod bucket;

use std::collections::BTreeMap;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use serde_json::value::RawValue;
use varvite::digest::ChunkDigest;
use varvite::error::{Error, Result};
use varvite::format::journal::{Journal, Removals, UploadNote};
use varvite::format::lease::Lease;
use varvite::format::manifest;
use varvite::format::marker::Marker;
use varvite::format::model::{Body, ChunkRef, Codec, Entry, Header, PackRecord, Part, RankStructure, Shard};
use varvite::format::names::pack_name;
use varvite::format::pack::{self, Footer, PackChunk, PackHeader, PackKind};
use varvite::format::receipt::Receipt;
use varvite::format::state_digest::state_digest;
use varvite::format::tag::Tag;
use varvite::tensor::{Dtype, raw_length_bytes};
use xxhash_rust::xxh3::xxh3_128;

const OBJECT: &str = "snapshots/5.json";
const CHUNK_BYTES: u64 = 4_096;
const SEQ: u64 = 5;
const DTYPES: [Dtype; 4] = [Dtype::Uint8, Dtype::Bfloat16, Dtype::Float32, Dtype::Complex128];

/// What a random entry is made of; turned into a legal one by [`Builder`].
#[derive(Clone, Debug)]
struct Sketch {
    dtype: Dtype,
    stored_dtype: Dtype,
    shape: Vec<u64>,
    /// Where to cut each dimension in two; no cut where it is outside.
    cuts: Vec<u64>,
    is_rank_local: bool,
    is_tied: bool,
}

fn sketches() -> impl Strategy<Value = BTreeMap<String, Sketch>> {
    let dtype = || prop::sample::select(DTYPES.as_slice());
    let sketch = (dtype(), dtype(), vec(0_u64..40, 0..4), vec(0_u64..40, 4), any::<bool>(), any::<bool>())
        .prop_map(|(dtype, stored_dtype, shape, cuts, is_rank_local, is_tied)| Sketch {
            dtype,
            // A float may be stored as a narrower one, nothing else as anything else.
            stored_dtype: if dtype.narrows_to(stored_dtype) { stored_dtype } else { dtype },
            shape,
            cuts,
            is_rank_local,
            is_tied,
        });
    btree_map(any::<String>(), sketch, 0..12)
}

/// Lays chunks of random entries into one pack, each at the next legal offset.
struct Builder {
    position_bytes: u64,
    table: Vec<PackChunk>,
}

impl Builder {
    fn body(sketches: &BTreeMap<String, Sketch>) -> (Body, Vec<PackChunk>) {
        let mut builder = Self { position_bytes: pack::HEADER_LENGTH_BYTES, table: Vec::new() };
        let mut entries: Vec<Entry> =
            sketches.iter().map(|(name, sketch)| builder.entry(name, sketch)).collect();
        let ties: Vec<Entry> = entries
            .iter()
            .filter(|entry| sketches[&entry.name].is_tied)
            .map(|entry| Entry {
                name: format!("{}, tied", entry.name),
                tied_to: Some(entry.name.clone()),
                ..entry.clone()
            })
            .filter(|tie| !sketches.contains_key(&tie.name))
            .collect();
        entries.extend(ties);
        entries.sort_by(|left, right| (&left.name, left.rank).cmp(&(&right.name, right.rank)));
        let body = Body {
            chunk_bytes: CHUNK_BYTES,
            packs: vec![PackRecord {
                name: pack_name(SEQ, 0, 1),
                length_bytes: builder.position_bytes + 10_000,
            }],
            entries,
            structure: json("{\"tree\":[1,\"two\",null]}"),
            rank_structures: vec![RankStructure { rank: 0, structure: json("7") }],
        };
        (body, builder.table)
    }

    fn entry(&mut self, name: &str, sketch: &Sketch) -> Entry {
        let Sketch { dtype, stored_dtype, shape, cuts, is_rank_local, .. } = sketch;
        let mut regions = vec![(vec![], vec![])];
        for (&size, &cut) in shape.iter().zip(cuts) {
            let is_cut = !is_rank_local && (1..size).contains(&cut);
            let ranges = if is_cut { vec![(0, cut), (cut, size - cut)] } else { vec![(0, size)] };
            regions = regions
                .into_iter()
                .flat_map(|(offsets, lengths)| {
                    ranges.iter().map(move |&(offset, length)| {
                        ([offsets.clone(), vec![offset]].concat(), [lengths.clone(), vec![length]].concat())
                    })
                })
                .collect();
        }
        regions.retain(|region: &(Vec<u64>, Vec<u64>)| !region.1.contains(&0));
        let shards = regions
            .into_iter()
            .map(|(offsets, lengths)| {
                let chunks = self.chunks(raw_length_bytes(&lengths, *stored_dtype).unwrap());
                Shard { offsets, lengths, scale_log2: 0, chunks }
            })
            .collect();
        Entry {
            name: name.to_owned(),
            rank: is_rank_local.then_some(0),
            dtype: *dtype,
            stored_dtype: *stored_dtype,
            shape: shape.clone(),
            tied_to: None,
            rounded_from: None,
            nonfinite: None,
            abs_max: None,
            l2_norm: None,
            shards,
        }
    }

    fn chunks(&mut self, region_bytes: u64) -> Vec<ChunkRef> {
        (0..region_bytes.div_ceil(CHUNK_BYTES))
            .map(|index| {
                let length_bytes = CHUNK_BYTES.min(region_bytes - index * CHUNK_BYTES);
                let offset_bytes =
                    self.position_bytes + pack::padding_before(self.position_bytes, length_bytes);
                self.position_bytes = offset_bytes + length_bytes;
                let digest = ChunkDigest::of(&offset_bytes.to_le_bytes());
                self.table.push(PackChunk {
                    offset_bytes,
                    stored_length_bytes: length_bytes,
                    raw_length_bytes: length_bytes,
                    codec: Codec::Store,
                    digest,
                });
                ChunkRef {
                    pack: 0,
                    offset_bytes,
                    stored_length_bytes: length_bytes,
                    codec: Codec::Store,
                    digest,
                    base: None,
                }
            })
            .collect()
    }
}

fn json(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap()
}

fn header_of(body: &Body, metrics: BTreeMap<String, f64>) -> Header {
    let raw_bytes = body
        .entries
        .iter()
        .filter(|entry| entry.tied_to.is_none())
        .map(|entry| raw_length_bytes(&entry.shape, entry.stored_dtype).unwrap())
        .sum();
    Header {
        repository_id: "0123456789abcdef".repeat(2),
        session_id: "fedcba9876543210".repeat(2),
        seq: SEQ,
        step: 1_000,
        parent: Some(4),
        created_at_unix_ms: 1_790_000_000_000,
        world_size: 1,
        metrics,
        metadata: json("{\"note\":\"\\\"quoted\\\" \\n\"}"),
        raw_bytes,
        stored_bytes: 99,
        nonfinite: BTreeMap::new(),
        self_contained: true,
        state_digest: state_digest(body),
    }
}

fn metrics() -> impl Strategy<Value = BTreeMap<String, f64>> {
    let value = any::<u64>()
        .prop_map(f64::from_bits)
        .prop_filter("NaN is not equal to itself", |value| !value.is_nan());
    btree_map(any::<String>(), value, 0..5)
}

fn body_text(body: &Body) -> String {
    serde_json::to_string(body).unwrap()
}

/// A pack of random entries: object, all its bytes, the chunk table, the part.
fn pack_of(sketches: &BTreeMap<String, Sketch>) -> (String, Vec<u8>, Vec<PackChunk>, Part) {
    let (mut body, table) = Builder::body(sketches);
    body.packs[0].length_bytes = 0;
    let part = Part { rank: 0, header: header_of(&body, BTreeMap::new()), body, replicas: Vec::new() };
    let header = PackHeader {
        repository_id: part.header.repository_id.clone(),
        session_id: part.header.session_id.clone(),
        seq: SEQ,
        rank: 0,
        kind: PackKind::Save,
    };
    let mut bytes = pack::encode_header(&header).unwrap().to_vec();
    let end_bytes = table
        .last()
        .map_or(pack::HEADER_LENGTH_BYTES, |chunk| chunk.offset_bytes + chunk.stored_length_bytes);
    bytes.resize(end_bytes as usize, 0xee);
    bytes.extend(pack::encode_footer(end_bytes, &table, Some(&part)).unwrap());
    (format!("packs/{}", pack_name(SEQ, 0, 1)), bytes, table, part)
}

/// Reads all of a pack but its chunks.
fn read_pack(object: &str, bytes: &[u8]) -> Result<Footer> {
    let header = pack::decode_header(object, bytes)?;
    let trailer = pack::decode_trailer(object, bytes.len() as u64, bytes)?;
    let start = trailer.footer_offset_bytes as usize;
    let footer =
        pack::decode_footer(object, &trailer, &bytes[start..][..trailer.footer_length_bytes as usize])?;
    footer.check_origin(object, &header)?;
    Ok(footer)
}

/// A fixed body: of one row of entries, or of so many that it is compressed.
fn fixed_sketches(entry_count: u64) -> BTreeMap<String, Sketch> {
    let sketch = |index: u64| Sketch {
        dtype: Dtype::Float32,
        stored_dtype: Dtype::Bfloat16,
        shape: vec![index + 1, 30],
        cuts: vec![0, index % 3 * 7],
        is_rank_local: index % 5 == 4,
        is_tied: index == 1,
    };
    (0..entry_count).map(|index| (format!("layer.{index}.weight"), sketch(index))).collect()
}

fn fixed_manifest(entry_count: u64) -> Vec<u8> {
    let (body, _) = Builder::body(&fixed_sketches(entry_count));
    manifest::encode(&header_of(&body, BTreeMap::from([("loss".to_owned(), 0.25)])), &body).unwrap()
}

/// Flips each bit of `range` in turn, and asserts that `decode` calls it damage.
fn each_flip_is_refused<T: std::fmt::Debug>(
    bytes: &[u8],
    range: std::ops::Range<usize>,
    decode: impl Fn(&[u8]) -> Result<T>,
) {
    decode(bytes).unwrap();
    let mut flipped = bytes.to_vec();
    for offset in range {
        for bit in 0..8 {
            flipped[offset] ^= 1 << bit;
            let error =
                decode(&flipped).map(|value| panic!("byte {offset} bit {bit} gave {value:?}")).unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "byte {offset} bit {bit}: {error:?}");
            flipped[offset] ^= 1 << bit;
        }
    }
}

/// Cuts the bytes at each length, and asserts that `decode` calls it damage.
fn each_truncation_is_refused<T: std::fmt::Debug>(bytes: &[u8], decode: impl Fn(&[u8]) -> Result<T>) {
    for length in 0..bytes.len() {
        let error =
            decode(&bytes[..length]).map(|value| panic!("{length} bytes gave {value:?}")).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{length} bytes: {error:?}");
    }
}

#[test]
fn each_flipped_bit_of_a_manifest_is_refused() {
    let bytes = fixed_manifest(3);
    each_flip_is_refused(&bytes, 0..bytes.len(), |bytes| manifest::decode(OBJECT, bytes));
}

#[test]
fn each_flipped_bit_of_a_compressed_manifest_is_refused() {
    let bytes = fixed_manifest(30);
    let line = manifest::decode_header(OBJECT, &bytes).unwrap().unwrap();
    assert_eq!(line.body.encoding, manifest::BodyEncoding::Zstd);
    each_flip_is_refused(&bytes, 0..bytes.len(), |bytes| manifest::decode(OBJECT, bytes));
}

#[test]
fn each_flipped_bit_of_a_header_line_is_refused_without_the_body() {
    let bytes = fixed_manifest(3);
    let line_length = manifest::decode_header(OBJECT, &bytes).unwrap().unwrap().line_length_bytes as usize;
    let decode = |bytes: &[u8]| {
        manifest::decode_header(OBJECT, bytes)?
            .ok_or_else(|| Error::corrupt(OBJECT, 0, "line", "an end", "none"))
    };
    each_flip_is_refused(&bytes[..line_length], 0..line_length, decode);
}

fn receipt() -> Receipt {
    let content = RawValue::from_string(r#"{"verb":"resume","verdict":null}"#.to_owned()).unwrap();
    Receipt { number: 3, seq: Some(2), created_at_unix_ms: 1_790_000_000_000, content }
}

#[test]
fn each_flipped_bit_of_a_small_object_is_refused() {
    let marker = Marker::new("0123456789abcdef".repeat(2)).encode().unwrap();
    each_flip_is_refused(&marker, 0..marker.len(), Marker::decode);
    let tag = Tag { seq: 3, created_at_unix_ms: 1_790_000_000_000 }.encode().unwrap();
    each_flip_is_refused(&tag, 0..tag.len(), |bytes| Tag::decode("tags/best", bytes));
    let receipt = receipt().encode().unwrap();
    each_flip_is_refused(&receipt, 0..receipt.len(), |bytes| Receipt::decode("receipts/3.json", bytes));
}

/// A decoder, for whether it takes the bytes.
type Takes = fn(&[u8]) -> Result<()>;

/// A lease and the objects of a sync journal, with their decoders.
fn of_a_bucket() -> [(Vec<u8>, Takes); 4] {
    [
        (bucket::lease().encode().unwrap(), |bytes| Lease::decode("lease.json", bytes).map(drop)),
        (bucket::journal().encode().unwrap(), |bytes| Journal::decode("sync/journal.json", bytes).map(drop)),
        (bucket::removals().encode().unwrap(), |bytes| {
            Removals::decode("sync/removals.json", bytes).map(drop)
        }),
        (bucket::upload().encode().unwrap(), |bytes| UploadNote::decode("uploads/x", bytes).map(drop)),
    ]
}

#[test]
fn each_flipped_bit_and_each_truncation_of_what_goes_with_a_bucket_is_refused() {
    for (bytes, takes) in of_a_bucket() {
        takes(&bytes).unwrap();
        each_flip_is_refused(&bytes, 0..bytes.len(), takes);
        each_truncation_is_refused(&bytes, takes);
    }
}

#[test]
fn each_flipped_bit_of_a_pack_outside_its_chunks_is_refused() {
    for entry_count in [2, 30] {
        let (object, bytes, table, _) = pack_of(&fixed_sketches(entry_count));
        let footer_start = table
            .last()
            .map(|chunk| chunk.offset_bytes + chunk.stored_length_bytes)
            .unwrap()
            .next_multiple_of(64);
        each_flip_is_refused(&bytes, 0..pack::HEADER_LENGTH_BYTES as usize, |bytes| {
            read_pack(&object, bytes)
        });
        each_flip_is_refused(&bytes, footer_start as usize..bytes.len(), |bytes| read_pack(&object, bytes));
    }
}

#[test]
fn every_truncation_is_refused() {
    for entry_count in [3, 30] {
        each_truncation_is_refused(&fixed_manifest(entry_count), |bytes| manifest::decode(OBJECT, bytes));
    }
    each_truncation_is_refused(&Marker::new("0123456789abcdef".repeat(2)).encode().unwrap(), Marker::decode);
    let tag = Tag { seq: 3, created_at_unix_ms: 5 }.encode().unwrap();
    each_truncation_is_refused(&tag, |bytes| Tag::decode("tags/best", bytes));
    let receipt = receipt().encode().unwrap();
    each_truncation_is_refused(&receipt, |bytes| Receipt::decode("receipts/3.json", bytes));
    let (object, bytes, ..) = pack_of(&fixed_sketches(2));
    each_truncation_is_refused(&bytes, |bytes| read_pack(&object, bytes));
}

/// A manifest whose body is this text and whose digests are right.
fn sealed_around(body: &str) -> Vec<u8> {
    let bytes = fixed_manifest(3);
    let line = manifest::decode_header(OBJECT, &bytes).unwrap().unwrap();
    let text = str::from_utf8(&bytes[..line.line_length_bytes as usize]).unwrap();
    let (fields, _) = text.split_once(",\"body\":").unwrap();
    let fields = format!(
        "{fields},\"body\":{{\"encoding\":\"json\",\"length_bytes\":{length},\"raw_length_bytes\":{length},\"digest\":\"{:032x}\"}}",
        xxh3_128(body.as_bytes()),
        length = body.len(),
    );
    let digest = xxh3_128(fields.as_bytes());
    format!("{fields},\"header_digest\":\"{digest:032x}\"}}\n{body}").into_bytes()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_manifest_comes_back_as_it_was_written(sketches in sketches(), metrics in metrics()) {
        let (body, _) = Builder::body(&sketches);
        let header = header_of(&body, metrics);
        let bytes = manifest::encode(&header, &body).unwrap();
        let decoded = manifest::decode(OBJECT, &bytes).unwrap();
        prop_assert_eq!(&decoded.header, &header);
        prop_assert_eq!(body_text(&decoded.body), body_text(&body));
        prop_assert_eq!(manifest::encode(&decoded.header, &decoded.body).unwrap(), bytes);
    }

    #[test]
    fn a_pack_footer_comes_back_as_it_was_written(sketches in sketches()) {
        let (object, bytes, table, part) = pack_of(&sketches);
        let footer = read_pack(&object, &bytes).unwrap();
        prop_assert_eq!(footer.chunks, table);
        let decoded = footer.part.unwrap();
        prop_assert_eq!(&decoded.header, &part.header);
        prop_assert_eq!(body_text(&decoded.body), body_text(&part.body));
    }

    #[test]
    fn a_flipped_bit_of_any_manifest_is_refused(sketches in sketches(), at in any::<prop::sample::Index>(), bit in 0..8) {
        let (body, _) = Builder::body(&sketches);
        let mut bytes = manifest::encode(&header_of(&body, BTreeMap::new()), &body).unwrap();
        let offset = at.index(bytes.len());
        bytes[offset] ^= 1_u8 << bit;
        let is_damage = matches!(manifest::decode(OBJECT, &bytes), Err(Error::Corrupt { .. }));
        prop_assert!(is_damage);
    }

    #[test]
    fn any_bytes_are_refused_without_a_panic(bytes in vec(any::<u8>(), 0..400), object_length_bytes in any::<u64>()) {
        prop_assert!(manifest::decode(OBJECT, &bytes).is_err());
        prop_assert!(Marker::decode(&bytes).is_err());
        prop_assert!(Tag::decode("tags/best", &bytes).is_err());
        prop_assert!(Receipt::decode("receipts/3.json", &bytes).is_err());
        prop_assert!(of_a_bucket().iter().all(|(_, takes)| takes(&bytes).is_err()));
        prop_assert!(pack::decode_header("packs/x", &bytes).is_err());
        prop_assert!(pack::decode_trailer("packs/x", object_length_bytes, &bytes).is_err());
        let trailer =
            pack::Trailer { footer_offset_bytes: 64, footer_length_bytes: bytes.len() as u64, footer_digest: xxh3_128(&bytes) };
        prop_assert!(pack::decode_footer("packs/x", &trailer, &bytes).is_err());
    }

    /// An attacker can make digests right. What then gets through must still keep every rule.
    #[test]
    fn a_body_changed_by_an_attacker_is_refused_or_legal(
        at in any::<prop::sample::Index>(),
        replacement in "[0-9a-z\\[\\]{},:\"]{0,4}",
        removed in 0_usize..4,
    ) {
        let (body, _) = Builder::body(&fixed_sketches(3));
        let mut text = body_text(&body);
        let start = at.index(text.len());
        text.replace_range(start..(start + removed).min(text.len()), &replacement);
        if let Ok(manifest) = manifest::decode(OBJECT, &sealed_around(&text)) {
            manifest::validate(OBJECT, &manifest.header, &manifest.body).unwrap();
            prop_assert_eq!(state_digest(&manifest.body), state_digest(&body));
        }
    }
}

#[test]
fn an_attackers_manifest_with_the_true_body_is_accepted() {
    let (body, _) = Builder::body(&fixed_sketches(3));
    manifest::decode(OBJECT, &sealed_around(&body_text(&body))).unwrap();
}
