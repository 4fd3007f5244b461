//! Retention, deletion, pins: what goes, what stays, and what never comes back.

use std::sync::Arc;

use varvite::error::Error;
use varvite::repository::{Access, Options, Repository};
use varvite::retain::Rule;
use varvite::store::memory::MemoryStore;
use varvite::store::{Folder, PutMode, Store};

use crate::common::oracle::check_leftovers;
use crate::common::sim_store::{Mode, Plan, SimStore};
use crate::common::training::{load, open, options, save, state_at};
use crate::common::{key, names};
use crate::tensors::{flip, packs_of};

fn last(count: u64) -> Vec<Rule> {
    vec![Rule::Last { count }]
}

fn fresh(store: &MemoryStore, rules: Vec<Rule>) -> Repository {
    open(Arc::new(store.clone()), rules).unwrap()
}

fn seqs(repository: &Repository) -> Vec<u64> {
    let mut seqs = repository.candidates().unwrap();
    seqs.reverse();
    seqs
}

#[test]
fn retention_keeps_the_packs_that_kept_snapshots_refer_to() {
    let store = MemoryStore::new();
    let repository = fresh(&store, last(2));
    for step in 1..=5 {
        save(&repository, step).unwrap();
    }
    assert_eq!(seqs(&repository), [4, 5]);
    let mut needed: Vec<String> = [4, 5].iter().flat_map(|seq| packs_of(&repository, *seq)).collect();
    needed.sort();
    needed.dedup();
    assert_eq!(names(&store, Folder::Packs), needed);
    assert!(needed[0].starts_with("1-r0-"), "what never changed lies in the first pack: {needed:?}");
    for seq in [4, 5] {
        assert_eq!(load(&repository, seq).unwrap(), state_at(seq));
    }
}

#[test]
fn a_dry_run_changes_nothing_and_says_what_a_prune_does() {
    let store = MemoryStore::new();
    let repository = fresh(&store, Vec::new());
    for step in 1..=4 {
        save(&repository, step).unwrap();
    }
    drop(repository);
    let repository = fresh(&store, last(1));
    let before = names(&store, Folder::Packs);
    let (planned, would_free) = repository.prune(true).unwrap();
    assert_eq!(names(&store, Folder::Packs), before);
    assert_eq!(seqs(&repository), [1, 2, 3, 4]);
    let (done, freed) = repository.prune(false).unwrap();
    assert_eq!((&planned, would_free), (&done, freed));
    assert!(freed > 0);
    assert_eq!(done.removed.iter().map(|row| row.0).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(seqs(&repository), [4]);
}

#[test]
fn a_deleted_newest_snapshot_neither_comes_back_nor_gives_its_number_away() {
    let store = MemoryStore::new();
    let repository = fresh(&store, Vec::new());
    for step in 1..=3 {
        save(&repository, step).unwrap();
    }
    // A reader keeps the pack from deletion, so that recovery would find it whole.
    let reader = repository.snapshot(3).unwrap();
    repository.delete(3).unwrap();
    assert_eq!(names(&store, Folder::Packs).len(), 3);
    repository.close();
    drop(repository);
    let repository = fresh(&store, Vec::new());
    assert_eq!(repository.recovered().published, [0; 0]);
    assert_eq!(seqs(&repository), [1, 2]);
    drop(reader);
    assert_eq!(save(&repository, 4).unwrap().header.seq, 4);
    assert_eq!(names(&store, Folder::Snapshots), ["1.json", "2.json", "4.json"], "the tombstone is done");
    check_leftovers(&repository, 0).unwrap();
}

#[test]
fn all_snapshots_can_be_deleted_and_numbers_go_on() {
    let store = MemoryStore::new();
    let repository = fresh(&store, Vec::new());
    save(&repository, 1).unwrap();
    save(&repository, 2).unwrap();
    repository.delete(1).unwrap();
    repository.delete(2).unwrap();
    assert_eq!(names(&store, Folder::Packs), [""; 0]);
    assert!(matches!(repository.delete(2), Err(Error::SnapshotNotFound { .. })));
    drop(repository);
    let repository = fresh(&store, Vec::new());
    assert_eq!(seqs(&repository), [0; 0]);
    let report = save(&repository, 3).unwrap();
    assert_eq!((report.header.seq, report.figures.reused_chunk_count), (3, 0));
    assert_eq!(load(&repository, 3).unwrap(), state_at(3));
}

#[test]
fn what_a_reader_holds_is_read_to_the_end_and_swept_by_the_next_save() {
    let store = MemoryStore::new();
    let repository = fresh(&store, Vec::new());
    save(&repository, 1).unwrap();
    save(&repository, 2).unwrap();
    let reader = repository.snapshot(1).unwrap();
    let first_pack = reader.manifest().body.packs[0].name.clone();
    repository.delete(2).unwrap();
    repository.delete(1).unwrap();
    assert!(names(&store, Folder::Packs).contains(&first_pack));
    let entries: Vec<usize> = (0..reader.manifest().body.entries.len()).collect();
    reader.check(&entries, &false.into()).unwrap();
    drop(reader);
    save(&repository, 3).unwrap();
    check_leftovers(&repository, 0).unwrap();
}

#[test]
fn retention_leaves_what_a_reader_holds() {
    let store = MemoryStore::new();
    let repository = fresh(&store, last(1));
    save(&repository, 1).unwrap();
    let reader = repository.snapshot(1).unwrap();
    save(&repository, 2).unwrap();
    assert_eq!(seqs(&repository), [1, 2]);
    drop(reader);
    save(&repository, 3).unwrap();
    assert_eq!(seqs(&repository), [3]);
}

#[test]
fn the_snapshot_a_run_resumed_from_stays() {
    let store = MemoryStore::new();
    let repository = fresh(&store, last(1));
    save(&repository, 1).unwrap();
    let snapshot = repository.snapshot(1).unwrap();
    repository.adopt(&snapshot, true);
    drop(snapshot);
    let parents: Vec<Option<u64>> =
        (2..=4).map(|step| save(&repository, step).unwrap().header.parent).collect();
    assert_eq!(parents, [Some(1), Some(2), Some(3)]);
    assert_eq!(seqs(&repository), [1, 4]);
}

#[test]
fn a_person_pins_beside_a_running_job() {
    let store = MemoryStore::new();
    let job = fresh(&store, last(1));
    save(&job, 1).unwrap();
    let person =
        Repository::open(Arc::new(store.clone()), Options { access: Access::Tag, ..options(Vec::new()) })
            .unwrap();
    person.pin(1, "good").unwrap();
    person.pin(1, "good").unwrap();
    save(&job, 2).unwrap();
    save(&job, 3).unwrap();
    assert_eq!(seqs(&job), [1, 3]);
    assert_eq!(job.resolve("tag:good").unwrap(), 1);
    let error = job.delete(1).unwrap_err();
    assert!(matches!(&error, Error::InvalidInput { reason, .. } if reason.contains("good")), "{error:?}");
    let error = person.pin(3, "good").unwrap_err();
    assert!(
        matches!(&error, Error::InvalidInput { reason, .. } if reason.contains("names snapshot 1")),
        "{error:?}"
    );
    person.unpin("good").unwrap();
    let error = person.unpin("good").unwrap_err();
    assert!(
        matches!(&error, Error::SnapshotNotFound { reference, .. } if reference == "tag:good"),
        "{error:?}"
    );
    save(&job, 4).unwrap();
    assert_eq!(seqs(&job), [4]);
}

#[test]
fn a_handle_for_tags_can_not_save_and_a_reader_can_not_even_pin() {
    let store = MemoryStore::new();
    save(&fresh(&store, Vec::new()), 1).unwrap();
    for access in [Access::Tag, Access::Read] {
        let handle =
            Repository::open(Arc::new(store.clone()), Options { access, ..options(Vec::new()) }).unwrap();
        for error in
            [save(&handle, 2).unwrap_err(), handle.delete(1).unwrap_err(), handle.prune(false).unwrap_err()]
        {
            assert!(matches!(error, Error::InvalidInput { .. }), "{error:?}");
        }
        assert_eq!(handle.pin(1, "a").is_ok(), access == Access::Tag);
    }
}

#[test]
fn a_pin_on_a_snapshot_that_is_not_there_is_an_error_and_leaves_no_tag() {
    let store = MemoryStore::new();
    let repository = fresh(&store, Vec::new());
    save(&repository, 1).unwrap();
    let error = repository.pin(9, "nine").unwrap_err();
    assert!(matches!(&error, Error::SnapshotNotFound { reference, .. } if reference == "seq:9"), "{error:?}");
    assert_eq!(names(&store, Folder::Tags), [""; 0]);
}

#[test]
fn a_damaged_tag_stops_deletion_until_it_is_removed() {
    let store = MemoryStore::new();
    let repository = fresh(&store, last(1));
    save(&repository, 1).unwrap();
    repository.pin(1, "a").unwrap();
    flip(&store, &key(Folder::Tags, "a"), 20);
    // What it keeps is unknown, so that nothing may go; the save itself is good.
    assert!(save(&repository, 2).is_err());
    assert_eq!(seqs(&repository), [1, 2]);
    let findings = repository.verify(None, 1.0, &false.into()).unwrap().findings;
    assert_eq!(findings.len(), 1);
    assert_eq!(findings[0].object, "tags/a");
    repository.unpin("a").unwrap();
    save(&repository, 3).unwrap();
    assert_eq!(seqs(&repository), [3]);
}

#[test]
fn a_damaged_manifest_keeps_every_pack_until_it_is_deleted() {
    let store = MemoryStore::new();
    let repository = fresh(&store, Vec::new());
    for step in 1..=3 {
        save(&repository, step).unwrap();
    }
    drop(repository);
    flip(&store, &key(Folder::Snapshots, "2.json"), 300);
    let repository = fresh(&store, last(1));
    let packs = names(&store, Folder::Packs);
    let error = repository.prune(false).unwrap_err();
    assert!(matches!(&error, Error::Corrupt { object, .. } if object == "snapshots/2.json"), "{error:?}");
    assert_eq!(names(&store, Folder::Packs), packs);
    repository.delete(2).unwrap();
    repository.prune(false).unwrap();
    assert_eq!(seqs(&repository), [3]);
    check_leftovers(&repository, 0).unwrap();
}

#[test]
fn a_failed_save_does_not_give_its_number_to_the_next() {
    let disk = SimStore::new();
    let repository = open(Arc::new(disk.clone()), Vec::new()).unwrap();
    save(&repository, 1).unwrap();
    disk.arm(Plan { at_step: 1, mode: Mode::FailOnce });
    save(&repository, 2).unwrap_err();
    assert!(disk.fired());
    assert_eq!(save(&repository, 3).unwrap().header.seq, 3);
    assert_eq!(seqs(&repository), [1, 3]);
}

/// A pack whose manifest was never published may refer to packs that were deleted since.
#[test]
fn a_lost_save_that_refers_to_deleted_packs_stays_lost() {
    let disk = SimStore::new();
    let repository = open(Arc::new(disk.clone()), Vec::new()).unwrap();
    // Steps 3 to 5 change the same chunks.
    save(&repository, 3).unwrap();
    let steps_before = disk.steps_taken();
    save(&repository, 4).unwrap();
    // The sync of `packs/`, after which four steps publish the manifest.
    let at_step = disk.steps_taken() - steps_before - 4;
    disk.arm(Plan { at_step, mode: Mode::FailOnce });
    save(&repository, 5).unwrap_err();
    assert!(disk.fired() && disk.log().last().unwrap().contains("sync folder"), "{:?}", disk.log());
    repository.delete(1).unwrap();
    repository.delete(2).unwrap();
    let lost: Vec<String> = names(&disk, Folder::Packs);
    assert!(lost.len() == 1 && lost[0].starts_with("3-r0-"), "{lost:?}");

    let reopened = open(Arc::new(disk.after_power_loss(true)), Vec::new()).unwrap();
    assert_eq!(reopened.recovered().orphans, lost);
    assert_eq!(seqs(&reopened), [0; 0]);
    assert_eq!(load(&reopened, save(&reopened, 6).unwrap().header.seq).unwrap(), state_at(6));
}

/// Without a working lock two writers may leave two packs of one rank and seq; one is referred to.
#[test]
fn a_second_pack_of_one_rank_and_seq_is_swept() {
    let store = MemoryStore::new();
    let repository = fresh(&store, Vec::new());
    save(&repository, 1).unwrap();
    save(&repository, 2).unwrap();
    drop(repository);
    let twin = key(Folder::Packs, "2-r0-00000000000000aa.pack");
    store.put(&twin, b"another attempt", PutMode::IfAbsent).unwrap();
    let repository = fresh(&store, Vec::new());
    save(&repository, 3).unwrap();
    check_leftovers(&repository, 0).unwrap();
}
