//! Files of every format version stay readable, and what must be refused stays refused.
//!
//! `tests/golden/README.md` says why each file exists. They are never made anew: a change of the writer
//! that breaks the first test needs a new format version and a new folder.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panic")]

#[path = "golden/bucket.rs"]
mod bucket;
#[path = "golden/coded.rs"]
mod coded;
#[path = "golden/generate.rs"]
mod generate;
#[path = "golden/ranks.rs"]
mod ranks;

use generate::{REPOSITORY_ID, payload};
use varvite::codec::{self, Scratch};
use varvite::digest::ChunkDigest;
use varvite::error::Error;
use varvite::format::journal::{Journal, Removals, UploadNote};
use varvite::format::lease::Lease;
use varvite::format::manifest;
use varvite::format::marker::Marker;
use varvite::format::model::{Codec, Manifest, PackRecord};
use varvite::format::pack::{self, Footer, HEADER_LENGTH_BYTES, PackKind};
use varvite::format::receipt::Receipt;
use varvite::format::tag::Tag;
use varvite::format::ticket::Ticket;
use varvite::plan::{WrittenPart, assemble};
use varvite::tensor::Dtype;

macro_rules! golden {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_bytes!(concat!("golden/v1/", $path)).as_slice())),*]
    };
}

const GOLDEN: &[(&str, &[u8])] = golden![
    "repository/varvite.json",
    "repository/tags/first",
    "repository/receipts/1.json",
    "repository/packs/1-r0-000000000000002a.pack",
    "repository/packs/2-r0-000000000000002a.pack",
    "repository/snapshots/1.json",
    "repository/snapshots/2.json",
    "compressed.json",
    "future.json",
    "corrupt-header.json",
    "corrupt-body.json",
    "corrupt-length.json",
    "coded.json",
    "chunks/planes-float32.bin",
    "chunks/planes-bfloat16.bin",
    "chunks/delta-float32.bin",
    "chunks/delta-bfloat16.bin",
    "chunks/sparse-bfloat16.bin",
    "chunks/zstd-int64.bin",
    "ranks/4-r0-000000000000002a.pack",
    "ranks/4-r1-000000000000002a.pack",
    "ranks/ticket.json",
    "bucket/lease.json",
    "bucket/journal.json",
    "bucket/removals.json",
    "bucket/upload.json",
];

/// Compressed bytes depend on the release of zstd, so only what they hold is compared.
const COMPRESSED: [&str; 2] = ["compressed.json", "chunks/zstd-int64.bin"];

fn golden(path: &str) -> &'static [u8] {
    GOLDEN.iter().find(|row| row.0 == path).unwrap_or_else(|| panic!("no golden file {path}")).1
}

fn manifest_of(path: &str) -> Manifest {
    manifest::decode(path, golden(path)).unwrap()
}

fn read_pack(path: &str) -> (pack::PackHeader, Footer) {
    let bytes = golden(path);
    let header = pack::decode_header(path, bytes).unwrap();
    let trailer = pack::decode_trailer(path, bytes.len() as u64, bytes).unwrap();
    let start = trailer.footer_offset_bytes as usize;
    let footer =
        pack::decode_footer(path, &trailer, &bytes[start..][..trailer.footer_length_bytes as usize]).unwrap();
    footer.check_origin(path, &header).unwrap();
    (header, footer)
}

/// Everything the generators make, in the order of [`GOLDEN`].
fn made() -> Vec<(String, Vec<u8>)> {
    let mut made = generate::files();
    made.push(("coded.json".to_owned(), coded::manifest()));
    made.extend(coded::chunks());
    made.extend(ranks::files());
    for (name, bytes) in [
        ("lease", bucket::lease().encode()),
        ("journal", bucket::journal().encode()),
        ("removals", bucket::removals().encode()),
        ("upload", bucket::upload().encode()),
    ] {
        made.push((format!("bucket/{name}.json"), bytes.unwrap()));
    }
    made
}

#[test]
fn the_writer_still_writes_version_1_byte_for_byte() {
    let made = made();
    let names: Vec<&str> = made.iter().map(|file| file.0.as_str()).collect();
    assert_eq!(names, GOLDEN.iter().map(|row| row.0).collect::<Vec<_>>());
    let changed: Vec<&str> = made
        .iter()
        .filter(|(path, bytes)| !COMPRESSED.contains(&path.as_str()) && golden(path) != bytes.as_slice())
        .map(|file| file.0.as_str())
        .collect();
    if !changed.is_empty() {
        let folder = keep_for_review(&made);
        panic!("the writer has changed: {changed:?}; what it writes now is in {folder}");
    }
}

/// Writes the generator's output where a person can compare it; returns the folder.
#[expect(clippy::disallowed_methods, reason = "a report for a person, outside of any repository")]
fn keep_for_review(made: &[(String, Vec<u8>)]) -> String {
    let root = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("golden-v1");
    for (path, bytes) in made {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    root.display().to_string()
}

#[test]
fn the_compressed_manifest_holds_what_the_generator_put_in() {
    let path = COMPRESSED[0];
    let made = generate::files().into_iter().find(|file| file.0 == path).unwrap().1;
    let (old, new) = (manifest_of(path), manifest::decode(path, &made).unwrap());
    let line = manifest::decode_header(path, golden(path)).unwrap().unwrap();
    assert_eq!(line.body.encoding, manifest::BodyEncoding::Zstd);
    assert_eq!(old.body.entries.len(), 40);
    assert_eq!(old.body.entries, new.body.entries);
    assert_eq!(old.header.state_digest, new.header.state_digest);
}

#[test]
fn the_small_objects_are_read() {
    let marker = Marker::decode(golden("repository/varvite.json")).unwrap();
    assert_eq!(
        marker,
        Marker {
            format_version: 1,
            reader_flags: 0,
            writer_flags: 0,
            key_check: None,
            repository_id: REPOSITORY_ID.to_owned()
        }
    );
    let tag = Tag::decode("tags/first", golden("repository/tags/first")).unwrap();
    assert_eq!(tag, Tag { seq: 1, created_at_unix_ms: 1_790_000_000_000 });
    let receipt = Receipt::decode("receipts/1.json", golden("repository/receipts/1.json")).unwrap();
    assert_eq!((receipt.number, receipt.seq, receipt.created_at_unix_ms), (1, Some(2), 1_790_000_000_000));
    assert_eq!(receipt.content.get(), r#"{"note":"opaque to the engine"}"#);
}

#[test]
fn the_delta_refers_to_the_base() {
    let base = manifest_of("repository/snapshots/1.json");
    let delta = manifest_of("repository/snapshots/2.json");
    assert_eq!((base.header.seq, base.header.step, base.header.parent), (1, 10, None));
    assert_eq!((delta.header.seq, delta.header.step, delta.header.parent), (2, 20, Some(1)));
    assert!(base.header.self_contained && !delta.header.self_contained);
    assert_eq!(base.header.state_digest, delta.header.state_digest);
    assert!(delta.header.metrics["val_loss"].is_nan());
    assert_eq!(delta.header.metadata.get(), r#"{"run":"golden"}"#);
    let names: Vec<&str> = delta.body.entries.iter().map(|entry| entry.name.as_str()).collect();
    assert_eq!(names, ["model.empty", "model.steps", "model.tied", "model.weight", "rng.torch"]);
    let weight = &delta.body.entries[3];
    assert_eq!((weight.shape.as_slice(), weight.nonfinite), ([2, 3].as_slice(), Some(2)));
    assert_eq!(weight.shards[0].chunks[0].pack, 1);
    assert_eq!(delta.body.packs[1].name, base.body.packs[0].name);
}

#[test]
fn every_chunk_ref_leads_to_the_bytes_that_were_saved() {
    for path in ["repository/snapshots/1.json", "repository/snapshots/2.json"] {
        let body = manifest_of(path).body;
        for entry in body.entries.iter().filter(|entry| entry.tied_to.is_none()) {
            for chunk in entry.shards.iter().flat_map(|shard| &shard.chunks) {
                let record = &body.packs[chunk.pack as usize];
                let bytes = golden(&format!("repository/packs/{}", record.name));
                assert_eq!(bytes.len() as u64, record.length_bytes);
                let stored = &bytes[chunk.offset_bytes as usize..][..chunk.stored_length_bytes as usize];
                assert_eq!(stored, payload(&entry.name));
                assert_eq!(ChunkDigest::of(stored), chunk.digest);
            }
        }
    }
}

#[test]
fn a_manifest_can_be_rebuilt_from_the_part_in_its_pack() {
    for (path, seq) in [
        ("repository/packs/1-r0-000000000000002a.pack", 1),
        ("repository/packs/2-r0-000000000000002a.pack", 2),
    ] {
        let (header, footer) = read_pack(path);
        assert_eq!((header.kind, header.seq, header.rank), (PackKind::Save, seq, 0));
        assert_eq!(footer.chunks[0].offset_bytes, HEADER_LENGTH_BYTES);
        let part = footer.part.unwrap();
        let committed = manifest_of(&format!("repository/snapshots/{seq}.json"));
        assert_eq!(part.body.entries, committed.body.entries);
        assert_eq!(part.header.state_digest, committed.header.state_digest);
        assert_eq!(part.body.packs[0].length_bytes, 0);
    }
}

#[test]
fn the_parts_of_two_ranks_are_one_manifest() {
    let written = |rank: u32| {
        let path = format!("ranks/{}", ranks::name_of(rank));
        let (header, footer) = read_pack(&path);
        assert_eq!((header.kind, header.seq, header.rank), (PackKind::Save, 4, rank));
        let pack = PackRecord { name: ranks::name_of(rank), length_bytes: golden(&path).len() as u64 };
        WrittenPart { part: footer.part.unwrap(), pack }
    };
    assert_eq!(written(1).part.replicas[0].name, "model.steps");
    let joined = assemble(vec![written(1), written(0)]).unwrap();
    assert_eq!((joined.header.world_size, joined.header.nonfinite["model.weight"]), (2, 2));
    assert_eq!(joined.body.structure.get(), r#"{"state":{"dict":[["stage0",0],["stage1",1]]},"objects":[]}"#);
    for entry in &joined.body.entries {
        let mut found = Vec::new();
        for chunk in entry.shards.iter().flat_map(|shard| &shard.chunks) {
            let pack = golden(&format!("ranks/{}", joined.body.packs[chunk.pack as usize].name));
            let start = chunk.offset_bytes as usize;
            found.extend_from_slice(&pack[start..start + chunk.stored_length_bytes as usize]);
        }
        assert_eq!(found, payload(&entry.name), "{}", entry.name);
    }
    let mut torn = written(1);
    torn.part.replicas[0].digest = ChunkDigest::of(b"another value");
    let error = assemble(vec![written(0), torn]).unwrap_err();
    assert!(
        matches!(&error, Error::Disagreement { name, ranks: (0, 1), .. } if name == "model.steps"),
        "{error}"
    );
}

#[test]
fn a_ticket_is_read() {
    let text = str::from_utf8(golden("ranks/ticket.json")).unwrap();
    let ticket = Ticket::decode(text).unwrap();
    assert_eq!((ticket.header.seq, ticket.header.step, ticket.header.world_size), (4, 40, 2));
    assert_eq!((ticket.chunk_bytes, ticket.generation.as_str()), (4_096, "golden.0"));
    assert_eq!(ticket.base.unwrap().seq, 2);
}

#[test]
fn what_goes_with_a_bucket_is_read() {
    let lease = Lease::decode("lease.json", golden("bucket/lease.json")).unwrap();
    assert_eq!(lease, bucket::lease());
    let journal = Journal::decode("sync/journal.json", golden("bucket/journal.json")).unwrap();
    assert_eq!(journal, bucket::journal());
    let removals = Removals::decode("sync/removals.json", golden("bucket/removals.json")).unwrap();
    assert_eq!(removals, bucket::removals());
    let upload = UploadNote::decode("sync/upload.json", golden("bucket/upload.json")).unwrap();
    assert_eq!(upload, bucket::upload());
}

#[test]
fn every_coded_chunk_decodes_to_what_was_saved() {
    let mut scratch = Scratch::default();
    for (name, _, codec) in coded::CODED {
        let expected = coded::raw(name);
        let base = coded::base(name);
        let mut found = vec![0x5a; expected.len()];
        let stored = golden(&format!("chunks/{name}.bin"));
        codec::decode(codec, stored, base.as_deref(), &mut found, &mut scratch).unwrap();
        assert!(found == expected, "{name}");
    }
}

#[test]
fn a_manifest_of_coded_chunks_says_all_that_a_reader_needs() {
    let text = String::from_utf8_lossy(golden("coded.json"));
    assert!(text.starts_with(r#"{"magic":"varvite-manifest","format_version":1,"reader_flags":3,"#));
    let body = manifest_of("coded.json").body;
    let entry = |name: &str| body.entries.iter().find(|entry| entry.name == name).unwrap();
    for (name, dtype, codec) in coded::CODED {
        let chunk = entry(name).shards[0].chunks[0];
        assert_eq!((entry(name).dtype, chunk.codec), (dtype, codec));
        assert_eq!(chunk.digest, ChunkDigest::of(&coded::raw(name)));
        assert_eq!(chunk.base.map(|base| base.digest), coded::base(name).map(|base| ChunkDigest::of(&base)));
    }
    let scaled = entry("scaled");
    assert_eq!((scaled.stored_dtype, scaled.shards[0].scale_log2), (Dtype::Float8E4m3fn, -9));
    assert_eq!((scaled.nonfinite, scaled.abs_max, scaled.l2_norm), (Some(1), Some(0.875), Some(20.1)));
    assert_eq!(entry("rounded").rounded_from.as_deref(), Some("planes-float32"));
    assert_eq!(entry("rounded").shards[0].chunks[0].codec, Codec::Rounded);
}

#[test]
fn a_manifest_of_the_future_is_refused_by_its_version() {
    let error = manifest::decode("future.json", golden("future.json")).unwrap_err();
    assert!(
        matches!(&error, Error::Unsupported { what: "format version", object, found, .. }
            if object == "future.json" && found == "2"),
        "{error:?}"
    );
}

#[test]
fn corrupt_manifests_are_refused_where_they_are_corrupt() {
    let line_length_bytes =
        golden("corrupt-body.json").iter().position(|&byte| byte == b'\n').unwrap() as u64 + 1;
    for (path, what, offset_bytes) in [
        ("corrupt-header.json", "header_digest", 0),
        ("corrupt-body.json", "digest of the body", line_length_bytes),
        ("corrupt-length.json", "length of the body", line_length_bytes),
    ] {
        match manifest::decode(path, golden(path)).unwrap_err() {
            Error::Corrupt { object, offset_bytes: found_offset_bytes, what: found_what, .. } => {
                assert_eq!(
                    (object.as_str(), found_what.as_str(), found_offset_bytes),
                    (path, what, offset_bytes)
                );
            }
            other => panic!("{path}: {other:?}"),
        }
    }
}
