//! Parts of several ranks become one snapshot, or none.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use varvite::commit::commit;
use varvite::error::{Error, Result};
use varvite::format::model::{Header, Manifest, RankStructure};
use varvite::format::names::pack_name;
use varvite::plan::{WrittenPart, assemble};
use varvite::store::memory::MemoryStore;
use varvite::store::{Folder, Store};
use varvite::tensor::{Dtype, Region};
use varvite::threads::Threads;
use varvite::write::{BasePacks, Coding, EntryInput, Source, WriteJob, write_pack};

use crate::common::names;
use crate::common::training::{CHUNK_BYTES, json, open, save, state_at};
use crate::tensors::load_region;

const ROWS: u64 = 6;
const COLUMNS: u64 = 1_000;

/// The value of every element of the matrix that the ranks share.
fn matrix() -> Vec<f32> {
    (0_u16..6_000).map(f32::from).collect()
}

/// What one rank does in a save of two.
#[derive(Clone)]
struct Rank {
    number: u32,
    session_id: String,
    seq: u64,
    world_size: u32,
    /// Rows that it holds.
    rows: std::ops::Range<u64>,
    /// Its copy of a tensor that every rank has.
    replica: Vec<f32>,
    /// Its elements of the matrix.
    matrix: Vec<f32>,
}

impl Rank {
    fn new(rank: u32, rows: std::ops::Range<u64>) -> Self {
        Self {
            number: rank,
            session_id: "5".repeat(32),
            seq: 1,
            world_size: 2,
            rows,
            replica: vec![1.0, 2.0, 3.0],
            matrix: matrix(),
        }
    }

    /// Writes the pack of this rank.
    fn write(&self, store: &Arc<dyn Store>) -> Result<WrittenPart> {
        let shape = vec![ROWS, COLUMNS];
        let region = Region {
            offsets: vec![self.rows.start, 0],
            lengths: vec![self.rows.end - self.rows.start, COLUMNS],
        };
        let rows = (self.rows.start * COLUMNS) as usize..(self.rows.end * COLUMNS) as usize;
        let to_bytes =
            |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let own = self.number.to_le_bytes();
        let sources = [to_bytes(&self.matrix[rows]), to_bytes(&self.replica), own.to_vec()];
        let entry = |name: &str, rank, dtype, shape: Vec<u64>, region, source| EntryInput {
            name: name.to_owned(),
            rank,
            dtype,
            stored_dtype: dtype,
            shape,
            region,
            tied_to: None,
            source: Some(source),
        };
        let entries = vec![
            entry("matrix", None, Dtype::Float32, shape, region, 0),
            entry("replica", None, Dtype::Float32, vec![3], Region::whole(&[3]), 1),
            entry("rng", Some(self.number), Dtype::Uint32, vec![1], Region::whole(&[1]), 2),
        ];
        let job = WriteJob {
            store: Arc::clone(store),
            threads: Arc::new(Threads::new(1)),
            header: self.header(),
            rank: self.number,
            pack_name: pack_name(self.seq, self.number, u64::from(self.number)),
            chunk_bytes: CHUNK_BYTES,
            entries,
            replicas: Vec::new(),
            structure: json("{}"),
            rank_structures: vec![RankStructure { rank: self.number, structure: json("{}") }],
            coding: Coding::default(),
            refer_always: true,
        };
        let sources: Vec<Source<'_>> = sources.iter().map(|bytes| Source::Elements(bytes)).collect();
        write_pack(job, &sources, &BasePacks::default(), &AtomicBool::new(false)).map(|written| written.part)
    }

    fn header(&self) -> Header {
        Header {
            repository_id: "a".repeat(32),
            session_id: self.session_id.clone(),
            seq: self.seq,
            step: 10,
            parent: None,
            created_at_unix_ms: 0,
            world_size: self.world_size,
            metrics: BTreeMap::new(),
            metadata: json("{}"),
            raw_bytes: 0,
            stored_bytes: 0,
            nonfinite: BTreeMap::new(),
            self_contained: false,
            state_digest: "0".repeat(64),
        }
    }
}

fn store() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

fn joined(ranks: &[Rank]) -> Result<Manifest> {
    assemble(ranks.iter().map(|rank| rank.write(&store()).unwrap()).collect())
}

/// Two ranks that hold two and four rows.
fn two() -> [Rank; 2] {
    [Rank::new(0, 0..2), Rank::new(1, 2..6)]
}

#[test]
fn parts_of_two_ranks_make_one_snapshot_in_any_order() {
    let store = store();
    drop(open(Arc::clone(&store), Vec::new()).unwrap());
    let [first, second] = two();
    let parts = vec![second.write(&store).unwrap(), first.write(&store).unwrap()];
    let manifest = commit(&store, parts).unwrap();
    assert_eq!(manifest.header.raw_bytes, 4 * ROWS * COLUMNS + 3 * 4 + 2 * 4);
    assert!(manifest.header.self_contained);
    let repository = open(Arc::clone(&store), Vec::new()).unwrap();
    let found = load_region(&repository, 1, "matrix", None).unwrap();
    let expected: Vec<u8> = matrix().iter().flat_map(|value| value.to_le_bytes()).collect();
    assert_eq!(found, expected);
    // Across the border of the two shards, by columns.
    let region = Region { offsets: vec![1, 10], lengths: vec![3, 2] };
    let slice = load_region(&repository, 1, "matrix", Some(region)).unwrap();
    let values: Vec<f32> =
        slice.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    assert_eq!(values.map_bits(), [1_010.0, 1_011.0, 2_010.0, 2_011.0, 3_010.0, 3_011.0].to_vec().map_bits());
    assert_eq!(repository.verify(None, 1.0, &false.into()).unwrap().findings, []);
    let snapshot = repository.snapshot(1).unwrap();
    let entries = &snapshot.manifest().body.entries;
    let keys: Vec<(&str, Option<u32>)> =
        entries.iter().map(|entry| (entry.name.as_str(), entry.rank)).collect();
    assert_eq!(keys, [("matrix", None), ("replica", None), ("rng", Some(0)), ("rng", Some(1))]);
}

/// Floats compared by their bits.
trait Bits {
    fn map_bits(&self) -> Vec<u32>;
}

impl Bits for Vec<f32> {
    fn map_bits(&self) -> Vec<u32> {
        self.iter().map(|value| value.to_bits()).collect()
    }
}

#[test]
fn missing_ranks_are_named() {
    let [first, second] = two().map(|rank| Rank { world_size: 4, ..rank });
    let error = joined(&[first, second]).unwrap_err();
    assert!(
        matches!(&error, Error::Incomplete { seq: 1, missing_ranks } if missing_ranks == &[2, 3]),
        "{error:?}"
    );
    assert!(matches!(assemble(Vec::new()), Err(Error::Incomplete { .. })));
}

#[test]
fn replicas_that_differ_are_an_error_that_names_the_tensor() {
    let [first, second] = two();
    let second = Rank { replica: vec![1.0, 2.0, 3.5], ..second };
    let error = joined(&[first, second]).unwrap_err();
    assert!(
        matches!(&error, Error::Disagreement { name, ranks: (0, 1), .. } if name == "replica"),
        "{error:?}"
    );
}

#[test]
fn a_part_of_another_save_is_never_joined() {
    let [first, second] = two();
    for (other, field) in [
        (Rank { session_id: "6".repeat(32), ..second.clone() }, "session"),
        (Rank { seq: 2, ..second.clone() }, "seq"),
        (Rank { world_size: 3, ..second }, "world size"),
    ] {
        let error = joined(&[first.clone(), other]).unwrap_err();
        assert!(
            matches!(&error, Error::Mismatch { name, field: found, .. } if name == "part of rank 1" && *found == field),
            "{error:?}"
        );
    }
}

#[test]
fn a_rank_that_comes_twice_or_shards_that_overlap_or_leave_a_gap_are_refused() {
    let rank = Rank::new;
    for ranks in [
        vec![rank(0, 0..2), rank(1, 2..6), rank(1, 1..6)],
        vec![rank(0, 0..3), rank(1, 2..6)],
        vec![rank(0, 0..2), rank(1, 3..6)],
    ] {
        assert!(joined(&ranks).is_err());
    }
}

#[test]
fn non_finite_values_of_all_ranks_add_up() {
    let sick = |rank: u32, rows: std::ops::Range<u64>, count: usize| {
        let mut found = Rank::new(rank, rows.clone());
        let start = (rows.start * COLUMNS) as usize;
        found.matrix[start..start + count].fill(f32::NAN);
        found
    };
    for (first, second) in [(0, 3), (3, 0), (2, 5)] {
        let manifest = joined(&[sick(0, 0..2, first), sick(1, 2..6, second)]).unwrap();
        let expected = BTreeMap::from([("matrix".to_owned(), (first + second) as u64)]);
        assert_eq!(manifest.header.nonfinite, expected);
    }
    // A replica is counted once.
    let replicas = two().map(|rank| Rank { replica: vec![f32::NAN, 0.0, f32::NAN], ..rank });
    let manifest = joined(&replicas).unwrap();
    assert_eq!(manifest.header.nonfinite, BTreeMap::from([("replica".to_owned(), 2)]));
}

#[test]
fn recovery_publishes_a_save_of_all_ranks_and_removes_one_that_lacks_a_rank() {
    let store = store();
    let repository = open(Arc::clone(&store), Vec::new()).unwrap();
    save(&repository, 1).unwrap();
    drop(repository);
    for rank in two() {
        Rank { seq: 2, ..rank }.write(&store).unwrap();
    }
    let lonely = Rank { seq: 3, session_id: "7".repeat(32), ..Rank::new(0, 0..2) };
    lonely.write(&store).unwrap();

    let repository = open(Arc::clone(&store), Vec::new()).unwrap();
    assert_eq!(repository.recovered().published, [2]);
    assert_eq!(repository.recovered().orphans, [pack_name(3, 0, 0)]);
    assert_eq!(names(store.as_ref(), Folder::Packs).len(), 3);
    let found = load_region(&repository, 2, "matrix", None).unwrap();
    assert_eq!(found.len() as u64, 4 * ROWS * COLUMNS);
    assert_eq!(repository.header(2).unwrap().world_size, 2);
    assert_eq!(save(&repository, 5).unwrap().header.seq, 3);
    assert_eq!(crate::common::training::load(&repository, 3).unwrap(), state_at(5));
}

#[test]
fn packs_of_two_sessions_are_not_mixed_by_recovery() {
    let store = store();
    drop(open(Arc::clone(&store), Vec::new()).unwrap());
    let [first, second] = two();
    first.write(&store).unwrap();
    Rank { session_id: "6".repeat(32), ..second }.write(&store).unwrap();
    let repository = open(Arc::clone(&store), Vec::new()).unwrap();
    assert_eq!(repository.recovered().published, [0; 0]);
    assert_eq!(repository.recovered().orphans.len(), 2);
    assert_eq!(names(store.as_ref(), Folder::Packs), [""; 0]);
}
