//! The simulated disk keeps and loses what its documentation says: the crash tests rest on it.

#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod common;

use common::sim_store::{EIO, Mode, Plan, SimStore};
use common::{get, key, names, pack, pattern, publish, put};
use varvite::error::Error;
use varvite::store::{Folder, PutMode, Store};

fn armed(at_step: u64, mode: Mode) -> SimStore {
    let store = SimStore::new();
    store.arm(Plan { at_step, mode });
    store
}

fn is_eio(error: &Error) -> bool {
    matches!(error, Error::Store { source, .. } if source.raw_os_error() == Some(EIO))
}

/// Does `work` for every step and mode at which it can go wrong, and hands disk and outcome to
/// `check`.
fn for_every_fault(
    prepare: impl Fn() -> SimStore,
    work: impl Fn(&SimStore) -> Result<(), Error>,
    check: impl Fn(&SimStore, Plan, Result<(), Error>),
) {
    for mode in Mode::ALL {
        for at_step in 1.. {
            let disk = prepare();
            disk.arm(Plan { at_step, mode });
            let outcome = work(&disk);
            if !disk.fired() {
                outcome.unwrap();
                assert!(at_step > 2, "the work has fewer steps than it must have: {:?}", disk.log());
                break;
            }
            check(&disk, Plan { at_step, mode }, outcome);
        }
    }
}

#[test]
fn steps_have_the_names_and_the_order_of_the_documentation() {
    let store = SimStore::new();
    store.create_folders().unwrap();
    publish(&store, &pack("a"), b"a").unwrap();
    store.put(&key(Folder::Tags, "t"), b"t", PutMode::Replace).unwrap();
    store.delete(Folder::Packs, &["a".into(), "absent".into()]).unwrap();
    std::mem::forget(store.stage(&pack("b")).unwrap());
    assert_eq!(store.sweep_staged().unwrap(), 1);
    let expected = [
        "1: make folders sim:",
        "2: write sim:/packs/a",
        "3: sync file sim:/packs/a",
        "4: link sim:/packs/a",
        "5: sync folder sim:/packs",
        "6: write sim:/tags/t",
        "7: sync file sim:/tags/t",
        "8: replace sim:/tags/t",
        "9: sync folder sim:/tags",
        "10: unlink sim:/packs/a",
        "11: sync folder sim:/packs",
        "12: unlink staged sim:/tmp/2",
    ];
    assert_eq!(store.log(), expected);
    assert_eq!(store.steps_taken(), 12);
    assert!(!store.fired());
}

#[test]
fn a_published_object_is_whole_or_absent_and_durable_when_confirmed() {
    let bytes = pattern(1, 1_000);
    let work = |disk: &SimStore| publish(disk, &pack("a"), &bytes);
    for_every_fault(SimStore::new, work, |disk, plan, outcome| {
        assert_eq!(outcome.is_ok(), plan.mode == Mode::Freeze, "{plan:?} {:?}", disk.log());
        for keep_unsynced in [false, true] {
            let reopened = disk.after_power_loss(keep_unsynced);
            for name in names(&reopened, Folder::Packs) {
                assert_eq!(get(&reopened, &pack(&name)), bytes, "{plan:?} {:?}", disk.log());
            }
            reopened.sweep_staged().unwrap();
            assert_eq!(reopened.sweep_staged().unwrap(), 0);
        }
        // Nothing that was not confirmed by the disk is there after a power loss.
        assert_eq!(names(&disk.after_power_loss(false), Folder::Packs).len(), 0, "{plan:?}");
        // What a process sees after the death of another ends with the link.
        let linked = plan.at_step > 3 || plan.mode == Mode::Freeze;
        assert_eq!(names(&disk.after_power_loss(true), Folder::Packs).len(), usize::from(linked), "{plan:?}");
    });
    let disk = SimStore::new();
    work(&disk).unwrap();
    assert_eq!(get(&disk.after_power_loss(false), &pack("a")), bytes);
}

#[test]
fn a_replaced_object_is_the_old_one_or_the_new_one() {
    let tag = key(Folder::Tags, "best");
    let prepare = || {
        let disk = SimStore::new();
        put(&disk, &tag, b"old");
        disk
    };
    let work = |disk: &SimStore| disk.put(&tag, b"new", PutMode::Replace);
    for_every_fault(prepare, work, |disk, plan, _| {
        assert_eq!(get(&disk.after_power_loss(false), &tag), b"old", "{plan:?}");
        let seen = get(&disk.after_power_loss(true), &tag);
        let replaced = plan.at_step > 3 || plan.mode == Mode::Freeze;
        assert_eq!(seen, if replaced { b"new" } else { b"old" }, "{plan:?}");
    });
}

#[test]
fn deletions_are_lost_until_the_folder_is_synced() {
    let all = ["a".to_owned(), "b".to_owned(), "c".to_owned()];
    let prepare = || {
        let disk = SimStore::new();
        for name in &all {
            put(&disk, &pack(name), b"bytes");
        }
        disk
    };
    let work = |disk: &SimStore| disk.delete(Folder::Packs, &all).map(|_freed_bytes| ());
    for_every_fault(prepare, work, |disk, plan, outcome| {
        assert_eq!(outcome.is_ok(), plan.mode == Mode::Freeze);
        let durable = names(&disk.after_power_loss(false), Folder::Packs);
        // The deletion before a single failed one is made durable all the same.
        let first_left = match plan.mode {
            Mode::FailOnce if plan.at_step <= 3 => plan.at_step as usize - 1,
            _ => 0,
        };
        assert_eq!(durable, all[first_left..], "{plan:?}");
    });
    let disk = prepare();
    assert_eq!(disk.delete(Folder::Packs, &all).unwrap(), 15);
    assert_eq!(disk.after_power_loss(false).list(Folder::Packs).unwrap(), []);
}

#[test]
fn a_staged_write_is_poisoned_by_its_first_failure() {
    let store = armed(2, Mode::FailOnce);
    let mut staged = store.stage(&pack("a")).unwrap();
    staged.append(b"one").unwrap();
    let error = staged.append(b"two").unwrap_err();
    assert!(is_eio(&error));
    let first = error.chain();
    assert!(matches!(staged.append(b"three"), Err(Error::Poisoned { first: text }) if text == first));
    assert!(matches!(staged.publish(), Err(Error::Poisoned { first: text }) if text == first));
    assert_eq!(store.sweep_staged().unwrap(), 0);
    publish(&store, &pack("a"), b"again").unwrap();
    assert_eq!(get(&store.after_power_loss(false), &pack("a")), b"again");
}

#[test]
fn a_torn_write_stays_in_tmp_until_it_is_swept() {
    let store = armed(2, Mode::Tear);
    let mut staged = store.stage(&pack("a")).unwrap();
    staged.append(b"whole").unwrap();
    assert!(is_eio(&staged.append(b"torn").unwrap_err()));
    drop(staged);
    for keep_unsynced in [false, true] {
        let reopened = store.after_power_loss(keep_unsynced);
        assert_eq!(reopened.staged_lengths(), ["whole".len() as u64 + "to".len() as u64]);
        assert_eq!(reopened.list(Folder::Packs).unwrap(), []);
        assert_eq!(reopened.sweep_staged().unwrap(), 1);
    }
}

#[test]
fn a_dead_process_reads_nothing_and_a_failing_disk_still_reads() {
    for (mode, reads) in [(Mode::Crash, false), (Mode::Tear, false), (Mode::FailForever, true)] {
        let store = SimStore::new();
        put(&store, &pack("a"), b"a");
        let object = store.open(&pack("a")).unwrap();
        store.arm(Plan { at_step: 1, mode });
        assert!(is_eio(&store.create_folders().unwrap_err()));
        assert!(is_eio(&store.stage(&pack("b")).unwrap_err()));
        assert!(is_eio(&store.put(&pack("b"), b"", PutMode::IfAbsent).unwrap_err()));
        assert_eq!(object.read_at(0, &mut [0]).is_ok(), reads, "{mode:?}");
        assert_eq!(store.open(&pack("a")).is_ok(), reads, "{mode:?}");
        assert_eq!(store.list(Folder::Packs).is_ok(), reads, "{mode:?}");
    }
}

#[test]
fn a_frozen_disk_shows_changes_and_keeps_none() {
    let store = SimStore::new();
    put(&store, &pack("a"), b"a");
    store.arm(Plan { at_step: 1, mode: Mode::Freeze });
    put(&store, &pack("b"), b"b");
    store.delete(Folder::Packs, &["a".into()]).unwrap();
    assert_eq!(names(&store, Folder::Packs), ["b"]);
    assert_eq!(names(&store.after_power_loss(true), Folder::Packs), ["b"]);
    assert_eq!(names(&store.after_power_loss(false), Folder::Packs), ["a"]);
}

#[test]
fn locks_vanish_with_the_process() {
    let store = SimStore::new();
    let held = store.lock("before").unwrap();
    let reopened = store.after_power_loss(true);
    let _held_after = reopened.lock("after").unwrap();
    drop(held);
    let error = reopened.lock("third").unwrap_err();
    assert!(matches!(error, Error::Locked { holder, .. } if holder == "after"));
}
