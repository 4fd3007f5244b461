//! What is coded, cast or rounded comes back; what did not change is neither copied nor written.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use varvite::cast;
use varvite::error::Error;
use varvite::format::model::{ChunkRef, Codec, Entry};
use varvite::plan::{Compression, Want};
use varvite::repository::{Options, Repository};
use varvite::retain::Rule;
use varvite::store::Folder;
use varvite::store::memory::MemoryStore;
use varvite::tensor::{Dtype, Region};

use crate::common::training::{CHUNK_BYTES, options};
use crate::common::{names, pack};
use crate::tensors::{Tensor, flip, load_region, packs_of, request_of, save_tensors};

const CHUNK: usize = CHUNK_BYTES as usize;
/// Elements of one chunk of float32.
const CHUNK_ELEMENTS: usize = CHUNK / 4;

fn repository(store: &MemoryStore, compression: Compression, rules: Vec<Rule>) -> Repository {
    let options = Options { compression, ..options(rules) };
    Repository::open(Arc::new(store.clone()), options).unwrap()
}

/// Numbers like weights: both signs, exponents close together, mantissas of noise.
#[expect(clippy::cast_precision_loss, reason = "24 bits fit")]
fn weights(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed * 2 + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 16_777_216.0 - 0.5
    };
    (0..count).map(|_| (next() + next() + next()) * 0.02).collect()
}

/// The same after a small step.
fn stepped(values: &[f32], seed: u64) -> Vec<f32> {
    values.iter().zip(weights(seed, values.len())).map(|(value, step)| value + step * 0.001).collect()
}

fn bfloat16(name: &str, values: &[f32]) -> Tensor {
    let wide = Tensor::floats(name, values);
    let mut bytes = vec![0; wide.bytes.len() / 2];
    cast::narrow(Dtype::Float32, Dtype::Bfloat16, 0, &wide.bytes, &mut bytes).unwrap();
    Tensor::of(name, Dtype::Bfloat16, &[values.len() as u64], bytes)
}

fn entry(repository: &Repository, seq: u64, name: &str) -> Entry {
    let snapshot = repository.snapshot(seq).unwrap();
    snapshot.manifest().body.entries.iter().find(|entry| entry.name == name).unwrap().clone()
}

fn chunks(repository: &Repository, seq: u64, name: &str) -> Vec<ChunkRef> {
    entry(repository, seq, name).shards[0].chunks.clone()
}

fn codecs(repository: &Repository, seq: u64, name: &str) -> Vec<Codec> {
    chunks(repository, seq, name).iter().map(|chunk| chunk.codec).collect()
}

fn assert_loads(repository: &Repository, seq: u64, tensors: &[Tensor]) {
    for tensor in tensors {
        let found = load_region(repository, seq, &tensor.name, None).unwrap();
        assert!(found == tensor.bytes, "`{}` of snapshot {seq} differs", tensor.name);
    }
    let report = repository.verify(Some(seq), 1.0, &AtomicBool::new(false)).unwrap();
    assert_eq!(report.findings, []);
}

#[test]
fn coded_chunks_are_smaller_and_come_back_in_any_region() {
    for compression in [Compression::Fast, Compression::Max] {
        let repository = repository(&MemoryStore::new(), compression, Vec::new());
        let tensors = [
            Tensor::floats("weight", &weights(1, 5 * CHUNK_ELEMENTS + 7)),
            bfloat16("half", &weights(2, 3 * CHUNK_ELEMENTS)),
            Tensor::of("zeros", Dtype::Int64, &[2 * CHUNK_BYTES / 8], vec![0; 2 * CHUNK]),
            Tensor::new("noise", Dtype::Uint8, &[CHUNK_BYTES]),
        ];
        let report = save_tensors(&repository, 1, &tensors).unwrap();
        assert!(codecs(&repository, 1, "weight")[..5].iter().all(|&codec| codec == Codec::Planes));
        assert_eq!(codecs(&repository, 1, "noise"), [Codec::Store]);
        assert!(chunks(&repository, 1, "zeros")[0].stored_length_bytes < 64);
        assert!(report.header.stored_bytes * 100 < report.header.raw_bytes * 80, "{report:?}");
        assert_loads(&repository, 1, &tensors);
        let region = Region { offsets: vec![CHUNK_ELEMENTS as u64 - 3], lengths: vec![10] };
        let start = (CHUNK_ELEMENTS - 3) * 4;
        let found = load_region(&repository, 1, "weight", Some(region)).unwrap();
        assert_eq!(found, tensors[0].bytes[start..start + 40]);
    }
}

#[test]
fn without_compression_every_chunk_is_stored_as_it_is() {
    let repository = repository(&MemoryStore::new(), Compression::None, Vec::new());
    let values = weights(1, 2 * CHUNK_ELEMENTS);
    save_tensors(&repository, 1, &[Tensor::floats("a", &values), bfloat16("b", &values)]).unwrap();
    let found = [codecs(&repository, 1, "a"), codecs(&repository, 1, "b")].concat();
    assert_eq!(found, [Codec::Store; 3]);
}

#[test]
fn differences_are_taken_against_a_whole_chunk_however_long_the_chain() {
    let store = MemoryStore::new();
    let repository = repository(&store, Compression::Fast, Vec::new());
    let mut values = weights(1, 4 * CHUNK_ELEMENTS);
    let mut saved = Vec::new();
    for step in 1..=4 {
        let tensor = Tensor::floats("weight", &values);
        let report = save_tensors(&repository, step, std::slice::from_ref(&tensor)).unwrap();
        saved.push((tensor, report.header.stored_bytes));
        values = stepped(&values, 10 + step);
    }
    assert_eq!(codecs(&repository, 1, "weight"), [Codec::Planes; 4]);
    for seq in 2..=4 {
        let base = chunks(&repository, 1, "weight");
        for (chunk, base) in chunks(&repository, seq, "weight").into_iter().zip(base) {
            assert_eq!(chunk.codec, Codec::Delta);
            let expected = chunk.base.unwrap();
            assert_eq!((expected.digest, expected.offset_bytes), (base.digest, base.offset_bytes));
        }
        assert_eq!(packs_of(&repository, seq).len(), 2, "its own and that of the first");
        assert!(saved[seq as usize - 1].1 * 10 < saved[0].1 * 9);
    }
    for (seq, (tensor, _)) in (1..).zip(&saved) {
        assert_loads(&repository, seq, std::slice::from_ref(tensor));
    }
    // Another process reads the same.
    drop(repository);
    let again = Repository::open(Arc::new(store), options(Vec::new())).unwrap();
    assert_loads(&again, 4, &[saved[3].0.clone()]);
}

#[test]
fn deleting_the_snapshot_of_a_base_leaves_its_pack() {
    let store = MemoryStore::new();
    let repository = repository(&store, Compression::Fast, vec![Rule::Last { count: 1 }]);
    let first = weights(1, 4 * CHUNK_ELEMENTS);
    save_tensors(&repository, 1, &[Tensor::floats("weight", &first)]).unwrap();
    let second = Tensor::floats("weight", &stepped(&first, 2));
    save_tensors(&repository, 2, std::slice::from_ref(&second)).unwrap();
    assert_eq!(names(&store, Folder::Snapshots), ["2.json"]);
    assert_eq!(names(&store, Folder::Packs).len(), 2);
    assert_loads(&repository, 2, &[second]);
}

#[test]
fn a_base_that_rotted_is_not_built_on_and_is_named_when_it_is_read() {
    let store = MemoryStore::new();
    let repository = repository(&store, Compression::Fast, Vec::new());
    let first = weights(1, CHUNK_ELEMENTS);
    save_tensors(&repository, 1, &[Tensor::floats("weight", &first)]).unwrap();
    let second = stepped(&first, 2);
    save_tensors(&repository, 2, &[Tensor::floats("weight", &second)]).unwrap();
    assert_eq!(codecs(&repository, 2, "weight"), [Codec::Delta]);

    let base = chunks(&repository, 1, "weight")[0];
    let base_pack = packs_of(&repository, 1)[0].clone();
    flip(&store, &pack(&base_pack), base.offset_bytes as usize + 100);
    let error = load_region(&repository, 2, "weight", None).unwrap_err();
    let Error::Corrupt { object, offset_bytes, .. } = &error else { panic!("{error:?}") };
    assert_eq!((object.as_str(), *offset_bytes), (format!("packs/{base_pack}").as_str(), base.offset_bytes));

    let third = Tensor::floats("weight", &stepped(&second, 3));
    save_tensors(&repository, 3, std::slice::from_ref(&third)).unwrap();
    assert_eq!(codecs(&repository, 3, "weight"), [Codec::Planes]);
    assert_loads(&repository, 3, &[third]);
}

#[test]
fn a_copy_of_a_wider_master_is_stored_as_nothing() {
    let repository = repository(&MemoryStore::new(), Compression::Fast, Vec::new());
    let values = weights(1, 5 * CHUNK_ELEMENTS + 100);
    let mut tensors = vec![
        bfloat16("model.weight", &values),
        Tensor::floats("optimizer.master", &values),
        bfloat16("model.other", &weights(3, 5 * CHUNK_ELEMENTS + 100)),
    ];
    save_tensors(&repository, 1, &tensors).unwrap();
    assert_eq!(codecs(&repository, 1, "model.weight"), [Codec::Rounded; 3]);
    assert_eq!(entry(&repository, 1, "model.weight").rounded_from.as_deref(), Some("optimizer.master"));
    assert_eq!(entry(&repository, 1, "model.other").rounded_from, None);
    assert_loads(&repository, 1, &tensors);
    let region = Region { offsets: vec![2 * CHUNK_ELEMENTS as u64 - 1], lengths: vec![3] };
    let start = (2 * CHUNK_ELEMENTS - 1) * 2;
    let found = load_region(&repository, 1, "model.weight", Some(region)).unwrap();
    assert_eq!(found, tensors[0].bytes[start..start + 6]);

    // One element that is not the master's, in the second chunk: that chunk is stored, the others are not.
    tensors[0].bytes[CHUNK + 10] ^= 1;
    save_tensors(&repository, 2, &tensors).unwrap();
    let found = codecs(&repository, 2, "model.weight");
    assert_eq!((found[0], found[2]), (Codec::Rounded, Codec::Rounded));
    assert_ne!(found[1], Codec::Rounded);
    assert_loads(&repository, 2, &tensors);
}

#[test]
fn a_master_that_is_a_difference_itself_still_gives_its_copy() {
    let repository = repository(&MemoryStore::new(), Compression::Fast, Vec::new());
    let first = weights(1, 2 * CHUNK_ELEMENTS);
    let second = stepped(&first, 2);
    let state = |values: &[f32]| [bfloat16("copy", values), Tensor::floats("master", values)];
    save_tensors(&repository, 1, &state(&first)).unwrap();
    save_tensors(&repository, 2, &state(&second)).unwrap();
    assert_eq!(codecs(&repository, 2, "master"), [Codec::Delta; 2]);
    assert_eq!(codecs(&repository, 2, "copy"), [Codec::Rounded; 1]);
    assert_loads(&repository, 2, &state(&second));
}

#[test]
fn a_cast_comes_back_in_its_own_dtype_rounded_once() {
    for compression in [Compression::None, Compression::Fast] {
        let repository = repository(&MemoryStore::new(), compression, Vec::new());
        let values = weights(1, 3 * CHUNK_ELEMENTS + 5);
        for (stored_dtype, largest_error) in
            [(Dtype::Bfloat16, 0.004), (Dtype::Float16, 0.0005), (Dtype::Float8E4m3fn, 0.07)]
        {
            let tensor = Tensor::floats("weight", &values).stored_as(stored_dtype);
            let seq = save_tensors(&repository, 1, &[tensor]).unwrap().header.seq;
            let found = load_region(&repository, seq, "weight", None).unwrap();
            let (words, rest) = found.as_chunks::<4>();
            assert_eq!((words.len(), rest.len()), (values.len(), 0));
            let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            for (value, word) in values.iter().zip(words) {
                let difference = (f32::from_le_bytes(*word) - value).abs();
                // Small numbers of an 8-bit float are as far apart as its smallest steps.
                let allowed = (value.abs() * largest_error).max(largest / 100_000.0);
                assert!(difference <= allowed, "{value} came back as {}", f32::from_le_bytes(*word));
            }
            let entry = entry(&repository, seq, "weight");
            assert_eq!((entry.dtype, entry.stored_dtype), (Dtype::Float32, stored_dtype));
            assert_eq!(entry.shards[0].scale_log2 != 0, stored_dtype == Dtype::Float8E4m3fn);
            let abs_max = entry.abs_max.unwrap();
            assert!((abs_max / f64::from(largest) - 1.0).abs() < 0.07, "{abs_max} {largest}");
        }
    }
}

#[test]
fn a_cast_of_the_same_values_is_not_written_again() {
    let repository = repository(&MemoryStore::new(), Compression::None, Vec::new());
    let tensor = Tensor::floats("weight", &weights(1, 4 * CHUNK_ELEMENTS)).stored_as(Dtype::Bfloat16);
    save_tensors(&repository, 1, std::slice::from_ref(&tensor)).unwrap();
    let again = save_tensors(&repository, 2, &[tensor]).unwrap();
    assert_eq!((again.figures.chunk_count, again.figures.reused_chunk_count), (2, 2));
}

#[test]
fn statistics_are_of_what_a_load_gives() {
    let repository = repository(&MemoryStore::new(), Compression::Fast, Vec::new());
    let values = [3.0, -4.0, f32::NAN, f32::INFINITY, 0.0];
    let tensors =
        [Tensor::floats("a", &values), Tensor::new("b", Dtype::Int32, &[4]), Tensor::floats("c", &[])];
    save_tensors(&repository, 1, &tensors).unwrap();
    let found = entry(&repository, 1, "a");
    assert_eq!((found.nonfinite, found.abs_max, found.l2_norm), (Some(2), Some(4.0), Some(5.0)));
    for name in ["b", "c"] {
        let found = entry(&repository, 1, name);
        assert_eq!((found.nonfinite, found.abs_max, found.l2_norm), (None, None, None));
    }
}

/// Saves through the staging memory, and says how many bytes it needed.
fn staged(repository: &Repository, step: u64, tensors: &[Tensor]) -> usize {
    let (request, sources) = request_of(step, tensors);
    let session = repository.begin_save(request, &sources).unwrap();
    let staged_bytes = session.staged_bytes();
    session.run(&AtomicBool::new(false)).unwrap();
    staged_bytes
}

#[test]
fn what_did_not_change_last_time_is_compared_in_place_and_not_copied() {
    let repository = repository(&MemoryStore::new(), Compression::None, Vec::new());
    let state = |frozen: u64, trained: u64| {
        [
            Tensor::floats("frozen", &weights(frozen, 4 * CHUNK_ELEMENTS)),
            Tensor::floats("trained", &weights(trained, CHUNK_ELEMENTS)),
        ]
    };
    assert_eq!(staged(&repository, 1, &state(1, 2)), 5 * CHUNK);
    assert_eq!(staged(&repository, 2, &state(1, 3)), 5 * CHUNK, "nobody knows yet that it is frozen");
    assert_eq!(staged(&repository, 3, &state(1, 4)), CHUNK);
    assert_eq!(staged(&repository, 4, &state(9, 5)), 5 * CHUNK, "it changed after all");
    assert_eq!(staged(&repository, 5, &state(9, 6)), 5 * CHUNK);
    assert_eq!(staged(&repository, 6, &state(9, 7)), CHUNK);
    for (seq, frozen, trained) in [(1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 9, 5), (5, 9, 6), (6, 9, 7)] {
        assert_loads(&repository, seq, &state(frozen, trained));
    }
    let found = entry(&repository, 6, "frozen");
    assert_eq!((found.abs_max, found.l2_norm), {
        let first = entry(&repository, 4, "frozen");
        (first.abs_max, first.l2_norm)
    });
}

#[test]
fn a_frozen_tensor_survives_the_pruning_of_everything_before() {
    let store = MemoryStore::new();
    let repository = repository(&store, Compression::None, vec![Rule::Last { count: 1 }]);
    let state = |trained: u64| {
        [
            Tensor::floats("frozen", &weights(1, 4 * CHUNK_ELEMENTS)),
            Tensor::floats("trained", &weights(trained, CHUNK_ELEMENTS)),
        ]
    };
    for step in 1..=5 {
        staged(&repository, step, &state(step));
        assert_loads(&repository, step, &state(step));
    }
    assert_eq!(names(&store, Folder::Snapshots), ["5.json"]);
    assert_eq!(names(&store, Folder::Packs).len(), 2);
}

#[test]
fn two_targets_may_want_a_copy_and_its_master_at_once() {
    let repository = repository(&MemoryStore::new(), Compression::Fast, Vec::new());
    let values = weights(1, 3 * CHUNK_ELEMENTS);
    let tensors = [bfloat16("copy", &values), Tensor::floats("master", &values)];
    save_tensors(&repository, 1, &tensors).unwrap();
    let snapshot = repository.snapshot(1).unwrap();
    let shape = Region::whole(&[values.len() as u64]);
    let wants: Vec<Want> = (0..2).map(|entry| Want { entry, region: shape.clone(), target: entry }).collect();
    let mut copy = vec![0; tensors[0].bytes.len()];
    let mut master = vec![0; tensors[1].bytes.len()];
    let mut targets = [copy.as_mut_slice(), master.as_mut_slice()];
    let verified = snapshot.read(&wants, &mut targets, &AtomicBool::new(false)).unwrap();
    assert_eq!(verified as usize, tensors[0].bytes.len() + tensors[1].bytes.len());
    assert!(copy == tensors[0].bytes && master == tensors[1].bytes);
}
