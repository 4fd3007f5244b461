//! Merges: what is rewritten, what is left alone, and how readers of other processes go on.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use varvite::error::Error;
use varvite::repository::{MergeReport, Repository};
use varvite::retain::Rule;
use varvite::store::memory::MemoryStore;
use varvite::store::{Folder, PutMode, Store};

use crate::common::hooked::Hooked;
use crate::common::oracle::{check_leftovers, load_all};
use crate::common::training::{load, open, open_to_read, save, save_state, state_at};
use crate::common::{get, key, names};
use crate::tensors::{flip, packs_of};

fn fresh(store: &MemoryStore) -> Repository {
    open(Arc::new(store.clone()), Vec::new()).unwrap()
}

/// A repository with the snapshots of these steps.
fn filled(steps: std::ops::RangeInclusive<u64>) -> (MemoryStore, Repository) {
    let store = MemoryStore::new();
    let repository = fresh(&store);
    for step in steps {
        save(&repository, step).unwrap();
    }
    (store, repository)
}

fn merge(repository: &Repository) -> MergeReport {
    repository.merge(true, &AtomicBool::new(false)).unwrap()
}

fn length(store: &dyn Store, folder: Folder, name: &str) -> u64 {
    get(store, &key(folder, name)).len() as u64
}

fn lengths(store: &dyn Store) -> u64 {
    names(store, Folder::Packs).iter().map(|name| length(store, Folder::Packs, name)).sum()
}

#[test]
fn a_merge_leaves_one_pack_and_every_snapshot_as_it_was() {
    let (store, repository) = filled(1..=5);
    let before = lengths(&store);
    let headers = repository.list().unwrap().headers;
    let report = merge(&repository);
    let packs = names(&store, Folder::Packs);
    assert!(packs.len() == 1 && packs[0].starts_with("5-m0-"), "{packs:?}");
    let written = length(&store, Folder::Packs, &packs[0]);
    let expected = MergeReport {
        merged_pack_count: 5,
        written_bytes: written,
        freed_bytes: before,
        ..MergeReport::default()
    };
    assert_eq!(report, expected);
    assert!(written < before);
    // Nothing of the headers changes but where it would be wrong.
    for (old, new) in headers.iter().zip(&fresh_reader(&store).list().unwrap().headers) {
        let mut expected = old.as_ref().clone();
        expected.self_contained = false;
        assert_eq!(new.as_ref(), &expected);
    }
    assert!(headers[0].self_contained);
    assert_eq!(load_all(&repository, &state_at).unwrap().len(), 5);
    assert_eq!(load_all(&fresh_reader(&store), &state_at).unwrap().len(), 5);
    assert_eq!(merge(&repository), MergeReport::default(), "a second merge finds nothing");
    check_leftovers(&repository, 0).unwrap();
    assert_eq!(repository.verify(None, 1.0, &AtomicBool::new(false)).unwrap().findings, []);
}

fn fresh_reader(store: &MemoryStore) -> Repository {
    open_to_read(Arc::new(store.clone())).unwrap()
}

#[test]
fn a_snapshot_whose_chunks_lie_in_the_pack_of_its_own_seq_stays_self_contained() {
    let store = MemoryStore::new();
    let repository = fresh(&store);
    save(&repository, 1).unwrap();
    save(&repository, 2).unwrap();
    repository.delete(2).unwrap();
    // Its own pack alone, rewritten for what is dead in it.
    let other = save_state(&repository, 3, &state_at(500)).unwrap().header.seq;
    repository.delete(1).unwrap();
    assert!(packs_of(&repository, other).len() > 1);
    merge(&repository);
    assert!(packs_of(&repository, other)[0].starts_with(&format!("{other}-m0-")));
    assert_eq!(load(&repository, other).unwrap(), state_at(500));
}

#[test]
fn saves_after_a_merge_refer_to_the_new_pack_and_bring_no_old_one_back() {
    let (store, repository) = filled(1..=4);
    merge(&repository);
    let merged = names(&store, Folder::Packs);
    let report = save(&repository, 5).unwrap();
    assert!(report.figures.reused_chunk_count > 0);
    assert_eq!(packs_of(&repository, 5)[1..], merged);
    check_leftovers(&repository, 0).unwrap();
    // The new pack goes when nobody needs it.
    for seq in 1..=5 {
        repository.delete(seq).unwrap();
    }
    assert_eq!(names(&store, Folder::Packs), [""; 0]);
}

#[test]
fn the_base_stays_trusted_so_that_the_next_save_reads_nothing_back() {
    let (store, repository) = filled(1..=3);
    merge(&repository);
    let merged = &names(&store, Folder::Packs)[0];
    // A trusted chunk is referred to without a look: this damage is not found, and nothing is written again.
    flip(&store, &key(Folder::Packs, merged), 4_096 + 5);
    let report = save_state(&repository, 9, &state_at(3)).unwrap();
    assert_eq!(report.figures.chunk_count, report.figures.reused_chunk_count);
}

#[test]
fn adopting_a_snapshot_that_was_opened_before_a_merge_brings_no_old_pack_back() {
    let (store, repository) = filled(1..=4);
    let snapshot = repository.snapshot(2).unwrap();
    merge(&repository);
    assert_eq!(names(&store, Folder::Packs).len(), 1 + packs_held_by_2(), "what the reader holds stays");
    repository.adopt(&snapshot, true);
    save(&repository, 5).unwrap();
    let packs = packs_of(&repository, 5);
    assert!(packs[1..].iter().all(|name| name.starts_with("4-m0-")), "{packs:?}");
    drop(snapshot);
    merge(&repository);
    save(&repository, 6).unwrap();
    check_leftovers(&repository, 0).unwrap();
}

fn packs_held_by_2() -> usize {
    let (_store, repository) = filled(1..=4);
    packs_of(&repository, 2).len()
}

#[test]
fn a_reader_that_holds_old_packs_reads_to_the_end_and_they_go_afterwards() {
    let (store, repository) = filled(1..=3);
    let snapshot = repository.snapshot(3).unwrap();
    let old = packs_of(&repository, 3);
    let report = merge(&repository);
    assert_eq!(report.merged_pack_count, 3);
    assert!(old.iter().all(|name| names(&store, Folder::Packs).contains(name)));
    assert!(snapshot.check(&[0, 1, 2, 3], &AtomicBool::new(false)).unwrap() > 0);
    drop(snapshot);
    save(&repository, 4).unwrap();
    check_leftovers(&repository, 0).unwrap();
}

#[test]
fn a_reader_of_another_process_follows_a_snapshot_whose_packs_are_gone() {
    let (store, repository) = filled(1..=4);
    let reader = open_to_read(Hooked::elsewhere(&store)).unwrap();
    let snapshot = reader.snapshot(4).unwrap();
    let opened = snapshot.manifest().body.packs.clone();
    merge(&repository);
    assert!(opened.iter().all(|record| !names(&store, Folder::Packs).contains(&record.name)));
    assert!(snapshot.check(&[0, 1, 2, 3], &AtomicBool::new(false)).unwrap() > 0);
    // And again, when what it follows to is merged too.
    save(&repository, 5).unwrap();
    merge(&repository);
    assert!(snapshot.check(&[0, 1, 2, 3], &AtomicBool::new(false)).unwrap() > 0);
    repository.delete(4).unwrap();
    merge(&repository);
    for seq in [1, 2, 3, 5] {
        repository.delete(seq).unwrap();
    }
    let gone = snapshot.check(&[0], &AtomicBool::new(false));
    assert!(matches!(gone, Err(Error::SnapshotNotFound { .. })), "{gone:?}");
}

#[test]
fn a_pack_that_is_missing_without_a_merge_is_damage_not_an_endless_search() {
    let (store, repository) = filled(1..=2);
    let reader = open_to_read(Hooked::elsewhere(&store)).unwrap();
    let snapshot = reader.snapshot(2).unwrap();
    store.delete(Folder::Packs, &packs_of(&repository, 2)).unwrap();
    let error = snapshot.check(&[0], &AtomicBool::new(false)).unwrap_err();
    assert!(error.is_not_found(), "{error:?}");
}

#[test]
fn a_damaged_chunk_keeps_its_snapshots_as_they_are_and_others_are_merged() {
    let store = MemoryStore::new();
    let repository = fresh(&store);
    for step in [1, 2] {
        save(&repository, step).unwrap();
    }
    // Another family, which shares nothing with the first.
    let strange = |step: u64| {
        let mut state = state_at(step);
        for byte in state.values_mut().flatten() {
            *byte ^= 0xff;
        }
        state
    };
    repository.adopt(&repository.snapshot(1).unwrap(), false);
    for step in [13, 14] {
        save_state(&repository, step, &strange(step)).unwrap();
    }
    let old = packs_of(&repository, 2);
    flip(&store, &key(Folder::Packs, &old[0]), 64 + 3);
    let before = (get(&store, &key(Folder::Snapshots, "2.json")), get(&store, &key(Folder::Packs, &old[0])));
    let report = merge(&repository);
    assert_eq!(report.stood_down, None);
    let [finding] = report.findings.as_slice() else { panic!("{:?}", report.findings) };
    assert_eq!((finding.object.clone(), finding.offset_bytes), (format!("packs/{}", old[0]), 64));
    assert!(finding.what.starts_with("corrupt chunk: expected digest "), "{finding:?}");
    assert_eq!(finding.steps.iter().copied().collect::<Vec<_>>(), [2]);
    assert_eq!(before.0, get(&store, &key(Folder::Snapshots, "2.json")));
    assert_eq!(before.1, get(&store, &key(Folder::Packs, &old[0])));
    for (seq, state) in [(1, state_at(1)), (3, strange(13)), (4, strange(14))] {
        assert_eq!(load(&repository, seq).unwrap(), state);
    }
    let packs = packs_of(&repository, 4);
    assert!(packs.len() == 1 && packs[0].contains("-m0-"), "{packs:?}");
    check_leftovers(&repository, 0).unwrap();
}

#[test]
fn a_pack_that_is_cut_off_is_a_finding_too() {
    let (store, repository) = filled(1..=3);
    let victim = packs_of(&repository, 1)[0].clone();
    let bytes = get(&store, &key(Folder::Packs, &victim));
    store.put(&key(Folder::Packs, &victim), &bytes[..bytes.len() - 1], PutMode::Replace).unwrap();
    let report = merge(&repository);
    assert!(report.findings.iter().all(|finding| finding.what.contains("expected a whole pack")));
    assert!(!report.findings.is_empty());
    assert_eq!(report.written_bytes, 0, "every snapshot needs a chunk of it");
    assert_eq!(names(&store, Folder::Packs).len(), 3);
}

#[test]
fn a_damaged_manifest_stops_every_merge() {
    let (store, repository) = filled(1..=3);
    let repository = {
        drop(repository);
        fresh(&store)
    };
    flip(&store, &key(Folder::Snapshots, "2.json"), 700);
    let before = names(&store, Folder::Packs);
    let report = merge(&repository);
    assert_eq!(report.merged_pack_count, 0);
    let why = report.stood_down.unwrap();
    assert_eq!(why, "snapshot 2 is damaged, and what it refers to is unknown");
    assert_eq!(report.findings[0].object, "snapshots/2.json");
    assert_eq!(names(&store, Folder::Packs), before);
}

#[test]
fn a_cancelled_merge_leaves_everything_whole() {
    let (store, repository) = filled(1..=3);
    let outcome = repository.merge(true, &AtomicBool::new(true));
    assert!(matches!(outcome, Err(Error::Interrupted)), "{outcome:?}");
    assert_eq!(load_all(&repository, &state_at).unwrap().len(), 3);
    assert_eq!(merge(&repository).merged_pack_count, 3);
    assert_eq!(names(&store, Folder::Packs).len(), 1);
}

#[test]
fn what_may_not_write_may_not_merge() {
    let (store, repository) = filled(1..=2);
    let outcome = fresh_reader(&store).merge(true, &AtomicBool::new(false));
    assert!(matches!(outcome, Err(Error::InvalidInput { .. })), "{outcome:?}");
    repository.close();
    let outcome = repository.merge(true, &AtomicBool::new(false));
    assert!(matches!(outcome, Err(Error::InvalidInput { .. })), "{outcome:?}");
}

#[test]
fn retention_and_merges_leave_exactly_what_kept_snapshots_need() {
    let store = MemoryStore::new();
    let repository = open(Arc::new(store.clone()), vec![Rule::Last { count: 3 }]).unwrap();
    for step in 1..=12 {
        save(&repository, step).unwrap();
        if step % 4 == 0 {
            merge(&repository);
        }
        check_leftovers(&repository, 0).unwrap();
    }
    let kept: Vec<u64> = load_all(&repository, &state_at).unwrap().into_keys().collect();
    assert_eq!(kept, [10, 11, 12]);
    assert_eq!(names(&store, Folder::Packs).len(), 1);
}
