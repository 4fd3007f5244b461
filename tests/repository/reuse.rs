//! What did not change is not written again, and what is referred to is right and worth its space.

use std::sync::Arc;

use varvite::repository::{Options, Repository};
use varvite::retain::Rule;
use varvite::store::memory::MemoryStore;
use varvite::store::{Folder, Store};
use varvite::tensor::Dtype;

use crate::common::training::{CHUNK_BYTES, open, options, state_at};
use crate::common::{get, names, pack, pattern};
use crate::tensors::{Tensor, flip, load_region, packs_of, save_tensors};

const CHUNK: usize = CHUNK_BYTES as usize;

fn bytes(name: &str, seed: u64, length: usize) -> Tensor {
    Tensor::of(name, Dtype::Uint8, &[length as u64], pattern(seed, length))
}

fn fresh(store: &MemoryStore, rules: Vec<Rule>) -> Repository {
    open(Arc::new(store.clone()), rules).unwrap()
}

fn keep_all() -> Vec<Rule> {
    vec![Rule::Last { count: 1_000 }]
}

#[test]
fn only_changed_chunks_are_written() {
    let repository = fresh(&MemoryStore::new(), Vec::new());
    let mut weight = bytes("weight", 1, 10 * CHUNK + 5);
    let first = save_tensors(&repository, 1, &[bytes("frozen", 2, 20 * CHUNK), weight.clone()]).unwrap();
    assert_eq!((first.figures.chunk_count, first.figures.reused_chunk_count), (31, 0));
    assert!(first.header.self_contained);

    weight.bytes[4 * CHUNK] ^= 1;
    let second = save_tensors(&repository, 2, &[bytes("frozen", 2, 20 * CHUNK), weight.clone()]).unwrap();
    assert_eq!((second.figures.chunk_count, second.figures.reused_chunk_count), (31, 30));
    assert!(!second.header.self_contained);
    assert!(second.header.stored_bytes < 3 * CHUNK_BYTES, "{}", second.header.stored_bytes);
    let packs = packs_of(&repository, 2);
    assert!(packs[0].starts_with("2-r0-") && packs[1].starts_with("1-r0-"), "{packs:?}");
    let own_length = get(repository.store().as_ref(), &pack(&packs[0])).len() as u64;
    assert_eq!(second.header.stored_bytes, own_length);
    assert_eq!(load_region(&repository, 2, "weight", None).unwrap(), weight.bytes);

    // A chain of deltas still points to where the bytes are, not to the snapshot before.
    let third = save_tensors(&repository, 3, &[bytes("frozen", 2, 20 * CHUNK), weight]).unwrap();
    assert_eq!((third.figures.chunk_count, third.figures.reused_chunk_count), (31, 31));
    assert_eq!(packs_of(&repository, 3).len(), 3, "its own, with no chunk, and the two others");
}

#[test]
fn a_chunk_that_moves_to_another_tensor_or_comes_twice_is_found() {
    let repository = fresh(&MemoryStore::new(), Vec::new());
    save_tensors(&repository, 1, &[bytes("a", 1, CHUNK), bytes("b", 2, 100)]).unwrap();
    let moved = [bytes("c", 2, 100), bytes("d", 1, CHUNK), bytes("e", 3, 50), bytes("f", 3, 50)];
    let report = save_tensors(&repository, 2, &moved).unwrap();
    assert_eq!((report.figures.chunk_count, report.figures.reused_chunk_count), (4, 3));
    for tensor in &moved {
        assert_eq!(load_region(&repository, 2, &tensor.name, None).unwrap(), tensor.bytes);
    }
}

#[test]
fn another_chunk_size_reuses_nothing_wrong() {
    let store = MemoryStore::new();
    let tensor = bytes("a", 1, 5 * CHUNK);
    save_tensors(&fresh(&store, Vec::new()), 1, std::slice::from_ref(&tensor)).unwrap();
    let larger = Options { chunk_bytes: 2 * CHUNK_BYTES, ..options(Vec::new()) };
    let repository = Repository::open(Arc::new(store), larger).unwrap();
    let report = save_tensors(&repository, 2, std::slice::from_ref(&tensor)).unwrap();
    // Two chunks of 8 KiB are new; the last one, of 4 KiB, exists.
    assert_eq!((report.figures.chunk_count, report.figures.reused_chunk_count), (3, 1));
    assert_eq!(load_region(&repository, 2, "a", None).unwrap(), tensor.bytes);
}

/// The pack of the first save has 32 chunks; the second save still has `kept` of them.
fn second_save_refers(kept: usize, copies: usize, rules: Vec<Rule>) -> bool {
    let repository = fresh(&MemoryStore::new(), rules);
    let chunk = |index: usize| bytes(&format!("t{index:02}"), index as u64, CHUNK);
    save_tensors(&repository, 1, &(0..32).map(chunk).collect::<Vec<_>>()).unwrap();
    let mut state: Vec<Tensor> = (0..kept).map(chunk).collect();
    for copy in 1..copies {
        state.push(Tensor { name: format!("copy{copy}"), ..chunk(0) });
    }
    state.extend((100..110).map(chunk));
    save_tensors(&repository, 2, &state).unwrap();
    for tensor in &state {
        assert_eq!(load_region(&repository, 2, &tensor.name, None).unwrap(), tensor.bytes);
    }
    packs_of(&repository, 2).len() == 2
}

#[test]
fn a_few_bytes_never_keep_an_old_pack_alive_where_packs_are_deleted() {
    assert!(!second_save_refers(1, 1, keep_all()), "one chunk of 32 is less than one part in 16");
    assert!(second_save_refers(4, 1, keep_all()));
    assert!(second_save_refers(1, 1, Vec::new()), "where nothing is deleted, nothing is written twice");
}

#[test]
fn a_chunk_that_many_tensors_have_counts_once() {
    assert!(!second_save_refers(1, 20, keep_all()));
}

#[test]
fn a_rotten_chunk_of_the_base_does_not_spread() {
    let store = MemoryStore::new();
    let state = [bytes("a", 1, 3 * CHUNK)];
    save_tensors(&fresh(&store, Vec::new()), 1, &state).unwrap();
    let first_pack = names(&store, Folder::Packs).remove(0);
    let offset = {
        let repository = fresh(&store, Vec::new());
        let snapshot = repository.snapshot(1).unwrap();
        snapshot.manifest().body.entries[0].shards[0].chunks[1].offset_bytes as usize
    };
    flip(&store, &pack(&first_pack), offset + 17);

    let repository = fresh(&store, Vec::new());
    let report = save_tensors(&repository, 2, &state).unwrap();
    assert_eq!(
        (report.figures.chunk_count, report.figures.reused_chunk_count),
        (3, 2),
        "the rotten one is written again"
    );
    assert_eq!(load_region(&repository, 2, "a", None).unwrap(), state[0].bytes);
    assert!(load_region(&repository, 1, "a", None).is_err());
    let findings = repository.verify(None, 1.0, &false.into()).unwrap().findings;
    let places: Vec<(&str, u64)> =
        findings.iter().map(|finding| (finding.object.as_str(), finding.offset_bytes)).collect();
    assert_eq!(places, [(format!("packs/{first_pack}").as_str(), offset as u64)]);
    assert_eq!(findings[0].steps.iter().copied().collect::<Vec<_>>(), [1]);
}

#[test]
fn an_adopted_snapshot_is_verified_unless_it_was_already() {
    for verified in [false, true] {
        let store = MemoryStore::new();
        let state = [bytes("a", 1, 2 * CHUNK)];
        save_tensors(&fresh(&store, Vec::new()), 1, &state).unwrap();
        let repository = fresh(&store, Vec::new());
        let snapshot = repository.snapshot(1).unwrap();
        repository.adopt(&snapshot, verified);
        let name = names(&store, Folder::Packs).remove(0);
        let offset = snapshot.manifest().body.entries[0].shards[0].chunks[0].offset_bytes as usize;
        flip(&store, &pack(&name), offset);
        let report = save_tensors(&repository, 2, &state).unwrap();
        assert_eq!(report.figures.reused_chunk_count, if verified { 2 } else { 1 });
        assert_eq!(report.header.parent, Some(1));
    }
}

#[test]
fn a_base_whose_pack_is_missing_or_shorter_is_written_again() {
    for shorter in [false, true] {
        let store = MemoryStore::new();
        let state = [bytes("a", 1, 2 * CHUNK)];
        save_tensors(&fresh(&store, Vec::new()), 1, &state).unwrap();
        let name = names(&store, Folder::Packs).remove(0);
        let whole = get(&store, &pack(&name));
        store.delete(Folder::Packs, std::slice::from_ref(&name)).unwrap();
        if shorter {
            crate::common::put(&store, &pack(&name), &whole[..whole.len() - 1]);
        }
        let repository = fresh(&store, Vec::new());
        let report = save_tensors(&repository, 2, &state).unwrap();
        assert_eq!(report.figures.reused_chunk_count, 0);
        assert_eq!(load_region(&repository, 2, "a", None).unwrap(), state[0].bytes);
    }
}

#[test]
fn a_damaged_newest_manifest_only_costs_a_full_save() {
    let store = MemoryStore::new();
    let repository = fresh(&store, Vec::new());
    crate::common::training::save(&repository, 1).unwrap();
    drop(repository);
    flip(&store, &crate::common::key(Folder::Snapshots, "1.json"), 300);
    let repository = fresh(&store, Vec::new());
    let report = crate::common::training::save(&repository, 2).unwrap();
    assert_eq!((report.header.seq, report.figures.reused_chunk_count), (2, 0));
    assert_eq!(crate::common::training::load(&repository, 2).unwrap(), state_at(2));
}
