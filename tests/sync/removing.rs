//! What goes from the bucket, and what never does.

use std::sync::atomic::AtomicBool;

use varvite::format::journal::UploadNote;
use varvite::format::names::{pack_name, upload_name};
use varvite::repository::Access;
use varvite::retain::Rule;
use varvite::store::remote::RemoteStore;
use varvite::store::{Folder, Store};
use varvite::sync::TierAccess;
use varvite::syncer::SyncReport;

use crate::common::machine::{Machine, begin, check_bucket, load_elsewhere, orphans_in, seconds, seqs_in};
use crate::common::memory_remote::{Fault, FaultMode, MemoryRemote};
use crate::common::training::{load, state_at};
use crate::common::{key, names};

#[test]
fn retention_keeps_what_was_not_pushed_and_the_bucket_follows_it() {
    let bucket = MemoryRemote::new();
    let machine = Machine { rules: vec![Rule::Last { count: 2 }], ..Machine::new(&bucket) };
    let trainer = machine.open().unwrap();
    for step in 1..=5 {
        trainer.save(step);
    }
    let (plan, _) = trainer.repository.prune(true).unwrap();
    let reasons: Vec<_> = plan.kept.iter().map(|(seq, _, reasons)| (*seq, reasons.join(", "))).collect();
    assert_eq!(reasons[0], (1, "not pushed yet".to_owned()));
    assert_eq!(reasons[4], (5, "newest, newest healthy, not pushed yet, last(2)".to_owned()));
    let report = trainer.sync().unwrap();
    // The pushes of all five, then the three oldest and what only they referred to.
    assert!(report.removed_objects >= 3, "{report:?}");
    assert_eq!(trainer.repository.candidates().unwrap(), [5, 4]);
    assert_eq!(seqs_in(&bucket), [4, 5]);
    assert!(orphans_in(&bucket).is_empty());
    check_bucket(&bucket).unwrap();
    assert_eq!(bucket.names(Folder::Packs), names(&machine.disk, Folder::Packs));
    assert_eq!(trainer.sync().unwrap(), SyncReport::default());
    trainer.save(6);
    assert_eq!(trainer.repository.candidates().unwrap(), [6, 5], "what was pushed goes at once");
}

#[test]
fn who_says_so_prunes_what_was_not_pushed() {
    let mut machine = Machine::new(&MemoryRemote::new());
    machine.rules = vec![Rule::Last { count: 2 }];
    machine.sync.prune_unpushed = true;
    let trainer = machine.open().unwrap();
    for step in 1..=5 {
        trainer.save(step);
    }
    assert_eq!(trainer.repository.candidates().unwrap(), [5, 4]);
}

#[test]
fn a_snapshot_that_lies_only_in_the_bucket_can_be_deleted_with_its_packs() {
    let bucket = MemoryRemote::new();
    let first = Machine::new(&bucket).open().unwrap();
    for step in 1..=3 {
        first.save(step);
    }
    first.sync().unwrap();
    first.close();
    let machine = Machine::new(&bucket);
    let trainer = machine.open().unwrap();
    let reader = trainer.repository.snapshot(2).unwrap();
    trainer.repository.delete(2).unwrap();
    trainer.repository.delete(3).unwrap();
    assert_eq!(trainer.repository.candidates().unwrap(), [1]);
    assert!(load(&trainer.repository, 3).is_err(), "it is gone for this handle already");
    let other = machine.restarted().open_as(Access::Read, TierAccess::Read).unwrap();
    assert_eq!(other.candidates().unwrap(), [1], "and for others beside it");

    trainer.sync().unwrap();
    assert_eq!(seqs_in(&bucket), [1]);
    assert_eq!(load_elsewhere(&bucket, 1).unwrap(), state_at(1));
    let held: Vec<String> = orphans_in(&bucket).into_iter().collect();
    assert!(matches!(&held[..], [pack] if pack.starts_with("2-")), "a reader holds it: {held:?}");
    let checked =
        reader.check(&(0..reader.manifest().body.entries.len()).collect::<Vec<_>>(), &AtomicBool::new(false));
    checked.unwrap();
    drop(reader);
    trainer.sync().unwrap();
    assert!(orphans_in(&bucket).is_empty());
    // The number of the newest is not given again, here or elsewhere.
    assert_eq!(bucket.names(Folder::Snapshots), ["1.json", "3.deleted"]);
    assert_eq!(trainer.save(9), 4);
}

#[test]
fn a_tag_goes_from_the_bucket_however_it_went_here() {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    for name in ["by-writer", "by-person", "by-hand", "stays"] {
        trainer.repository.pin(1, name).unwrap();
    }
    trainer.sync().unwrap();
    assert_eq!(bucket.names(Folder::Tags), ["by-hand", "by-person", "by-writer", "stays"]);

    trainer.repository.unpin("by-writer").unwrap();
    machine.open_as(Access::Tag, TierAccess::Tag).unwrap().unpin("by-person").unwrap();
    machine.disk.delete(Folder::Tags, &["by-hand".to_owned()]).unwrap();
    let seen = || trainer.repository.tags().unwrap().into_keys().collect::<Vec<_>>();
    assert_eq!(seen(), ["by-hand", "stays"], "the file of one is gone: the bucket still has it");
    trainer.sync().unwrap();
    assert_eq!(bucket.names(Folder::Tags), ["stays"]);
    assert_eq!(seen(), ["stays"]);

    // Pinned anew before the bucket was told: it names the new one there too.
    trainer.save(2);
    trainer.repository.unpin("stays").unwrap();
    trainer.repository.pin(2, "stays").unwrap();
    trainer.sync().unwrap();
    let fresh = Machine::new(&bucket).open_as(Access::Read, TierAccess::Read).unwrap();
    assert_eq!(fresh.tags().unwrap()["stays"].seq, 2);
}

#[test]
fn a_person_unpins_beside_a_run_what_lies_only_in_the_bucket() {
    let bucket = MemoryRemote::new();
    let first = Machine::new(&bucket).open().unwrap();
    first.save(1);
    first.repository.pin(1, "old").unwrap();
    first.sync().unwrap();
    first.close();
    let machine = Machine::new(&bucket);
    let trainer = machine.open().unwrap();
    let person = machine.restarted().open_as(Access::Tag, TierAccess::Tag).unwrap();
    person.unpin("old").unwrap();
    assert!(person.tags().unwrap().is_empty() && trainer.repository.tags().unwrap().is_empty());
    trainer.sync().unwrap();
    assert!(bucket.names(Folder::Tags).is_empty());
    assert!(!names(&machine.disk, Folder::Sync).iter().any(|name| name.starts_with("untag")));
}

#[test]
fn files_that_somebody_lost_here_are_never_removed_there() {
    let (bucket, machine, trainer) = begin();
    for step in 1..=3 {
        trainer.save(step);
    }
    trainer.sync().unwrap();
    let before = bucket.contents();
    machine.disk.delete(Folder::Snapshots, &["1.json".to_owned()]).unwrap();
    let packs = names(&machine.disk, Folder::Packs);
    machine.disk.delete(Folder::Packs, &packs[1..2]).unwrap();
    assert_eq!(trainer.sync().unwrap(), SyncReport::default());
    let mut now = bucket.contents();
    now.insert("lease.json".to_owned(), before["lease.json"].clone());
    assert_eq!(now, before);
    for step in 1..=3 {
        assert_eq!(load(&trainer.repository, step).unwrap(), state_at(step), "it is read from the bucket");
    }
}

#[test]
fn a_note_about_what_lies_here_again_is_void() {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    trainer.save(2);
    trainer.sync().unwrap();
    // As a crash leaves it between the note and the deletion.
    let kept = machine.disk.get(&key(Folder::Snapshots, "1.json"), u64::MAX).unwrap();
    trainer.tiers.delete(Folder::Snapshots, &["1.json".to_owned()]).unwrap();
    machine.disk.put(&key(Folder::Snapshots, "1.json"), &kept, varvite::store::PutMode::IfAbsent).unwrap();
    trainer.sync().unwrap();
    assert_eq!(seqs_in(&bucket), [1, 2]);
    machine.disk.delete(Folder::Snapshots, &["1.json".to_owned()]).unwrap();
    trainer.sync().unwrap();
    assert_eq!(seqs_in(&bucket), [1, 2], "the note is gone for good");
}

#[test]
fn leftovers_of_dead_writers_go_when_they_are_surely_leftovers() {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    trainer.sync().unwrap();
    trainer.close();
    let (old, young) = (pack_name(1, 3, 1), pack_name(1, 3, 2));
    bucket.plant(&key(Folder::Packs, &old), b"somebody died here");
    bucket.plant(&key(Folder::Packs, "notes.txt"), b"not a pack");
    let upload = bucket.begin_upload(&key(Folder::Packs, &young), 5_000).unwrap();
    let note = UploadNote {
        remote: bucket.root(),
        pack: young.clone(),
        length_bytes: 5_000,
        id: upload.id,
        part_bytes: upload.part_bytes,
        parts: Vec::new(),
    };
    bucket.plant(&key(Folder::Uploads, &upload_name(&young)), &note.encode().unwrap());
    bucket.plant(&key(Folder::Uploads, &upload_name(&old)), b"damaged");
    bucket.advance(seconds(23 * 3_600));
    bucket.plant(&key(Folder::Packs, &young), b"somebody may still be at it");
    bucket.advance(seconds(3_600));

    let trainer = machine.restarted().open().unwrap();
    assert_eq!(trainer.sync().unwrap().removed_objects, 1);
    assert_eq!((bucket.upload_count(), bucket.names(Folder::Uploads).len()), (0, 0));
    let packs = bucket.names(Folder::Packs);
    assert!(
        !packs.contains(&old) && packs.contains(&young) && packs.contains(&"notes.txt".to_owned()),
        "{packs:?}"
    );
    check_bucket(&bucket).unwrap();
}

#[test]
fn a_manifest_that_cannot_be_read_keeps_all_packs() {
    let bucket = MemoryRemote::new();
    let first = Machine::new(&bucket).open().unwrap();
    first.save(1);
    first.save(2);
    first.sync().unwrap();
    first.close();
    let machine = Machine::new(&bucket);
    let trainer = machine.open().unwrap();
    let mut damaged = bucket.contents()["snapshots/1.json"].clone();
    *damaged.last_mut().unwrap() ^= 1;
    bucket.plant(&key(Folder::Snapshots, "1.json"), &damaged);
    let packs = bucket.names(Folder::Packs);
    trainer.repository.delete(2).unwrap();
    let error = trainer.sync().unwrap_err();
    assert!(error.is_damage(), "{error}");
    assert_eq!((seqs_in(&bucket), bucket.names(Folder::Packs)), (vec![1], packs));
}

#[test]
fn a_manifest_that_is_damaged_there_and_whole_here_is_put_right() {
    let (bucket, _machine, trainer) = begin();
    trainer.save(1);
    trainer.sync().unwrap();
    bucket.plant(&key(Folder::Snapshots, "1.json"), b"rot");
    trainer.sync().unwrap();
    assert_eq!(load_elsewhere(&bucket, 1).unwrap(), state_at(1));
}

#[test]
fn what_the_bucket_lost_is_pushed_again() {
    let (bucket, _machine, trainer) = begin();
    trainer.save(1);
    trainer.save(2);
    trainer.repository.pin(1, "first").unwrap();
    trainer.sync().unwrap();
    for name in bucket.names(Folder::Snapshots) {
        bucket.lose(&key(Folder::Snapshots, &name));
    }
    bucket.lose(&key(Folder::Tags, "first"));
    bucket.lose(&key(Folder::Packs, &bucket.names(Folder::Packs)[0]));
    let report = trainer.sync().unwrap();
    assert_eq!(report.pushed_objects, 4);
    check_bucket(&bucket).unwrap();
    assert_eq!(load_elsewhere(&bucket, 2).unwrap(), state_at(2));
}

#[test]
fn what_was_deleted_before_another_machine_took_over_is_that_machines_to_keep() {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    trainer.save(2);
    trainer.sync().unwrap();
    trainer.repository.delete(1).unwrap();
    drop(trainer);
    // The next process of this machine knows of the deletion.
    let trainer = machine.restarted().open().unwrap();
    assert_eq!(trainer.repository.candidates().unwrap(), [2]);
    trainer.close();

    let other = Machine::new(&bucket).open().unwrap();
    assert_eq!(other.repository.candidates().unwrap(), [2, 1]);
    other.repository.pin(1, "kept").unwrap();
    other.save(3);
    other.sync().unwrap();
    other.close();

    let trainer = machine.restarted().open().unwrap();
    assert_eq!(trainer.repository.candidates().unwrap(), [3, 2, 1]);
    trainer.sync().unwrap();
    assert_eq!(seqs_in(&bucket), [1, 2, 3]);
    assert_eq!(load_elsewhere(&bucket, 1).unwrap(), state_at(1));
}

#[test]
fn what_was_deleted_here_goes_whatever_becomes_of_the_processes_after() {
    for at in 1.. {
        let mut is_reached = false;
        for mode in FaultMode::ALL {
            let bucket = MemoryRemote::new();
            let machine = Machine::new(&bucket);
            let trainer = machine.open().unwrap();
            trainer.save(1);
            trainer.save(2);
            trainer.sync().unwrap();
            trainer.repository.delete(1).unwrap();
            drop(trainer);

            // Two in a row die of the same: neither may take the other for another machine.
            let mut machine = machine;
            for _ in 0..2 {
                machine = machine.restarted();
                machine.remote.arm(Fault { at, mode });
                drop(machine.open());
                is_reached |= machine.remote.fired();
            }
            let trainer = machine.restarted().open().unwrap();
            assert_eq!(trainer.repository.candidates().unwrap(), [2], "{mode:?} at request {at}");
            trainer.sync().unwrap();
            assert_eq!(seqs_in(&bucket), [2], "{mode:?} at request {at}");
        }
        if !is_reached {
            assert!(at > 5, "an open makes more requests than {at}");
            return;
        }
    }
}

/// A machine that has deleted snapshot 1 of 1 and 2, and died before the bucket was told.
fn deleted_and_died(bucket: &MemoryRemote) -> Machine {
    let machine = Machine::new(bucket);
    let trainer = machine.open().unwrap();
    trainer.save(1);
    trainer.save(2);
    trainer.repository.pin(1, "best").unwrap();
    trainer.sync().unwrap();
    trainer.repository.unpin("best").unwrap();
    trainer.repository.delete(1).unwrap();
    machine
}

/// Another machine takes the bucket over and goes on from what it finds.
fn taken_over(bucket: &MemoryRemote) {
    let other = Machine::new(bucket).open().unwrap();
    assert_eq!(other.repository.candidates().unwrap(), [2, 1]);
    assert_eq!(other.repository.tags().unwrap()["best"].seq, 1);
    other.close();
}

fn assert_both_stay(bucket: &MemoryRemote, machine: &Machine) {
    let trainer = machine.open().unwrap();
    trainer.sync().unwrap();
    assert_eq!((seqs_in(bucket), bucket.names(Folder::Tags)), (vec![1, 2], vec!["best".to_owned()]));
    assert_eq!(load_elsewhere(bucket, 1).unwrap(), state_at(1));
}

#[test]
fn a_tag_that_another_machine_goes_on_with_stays_too() {
    let bucket = MemoryRemote::new();
    let machine = deleted_and_died(&bucket);
    taken_over(&bucket);
    assert_both_stay(&bucket, &machine.restarted());
}

#[test]
fn what_is_void_is_void_also_where_that_could_not_be_noted_at_first() {
    let bucket = MemoryRemote::new();
    let machine = deleted_and_died(&bucket);
    taken_over(&bucket);
    let again = machine.restarted();
    // The lease is taken once; then its folder is full for a while.
    again.remote.set_hook({
        let remote = again.remote.clone();
        move |request| {
            if request.starts_with("list snapshots") {
                remote.refuse_put(Some("sync/removals.json"));
            }
        }
    });
    let trainer = again.open().unwrap();
    assert!(trainer.sync().is_err());
    again.remote.no_hook();
    again.remote.refuse_put(None);
    trainer.sync().unwrap();
    assert_eq!(seqs_in(&bucket), [1, 2]);
    drop(trainer);
    assert_both_stay(&bucket, &again.restarted());
}

#[test]
fn a_lease_that_somebody_has_removed_makes_no_other_machine_unseen() {
    let bucket = MemoryRemote::new();
    let machine = deleted_and_died(&bucket);
    bucket.lose(&key(Folder::Root, "lease.json"));
    taken_over(&bucket);
    assert_both_stay(&bucket, &machine.restarted());
}

#[test]
fn nothing_is_deleted_so_late_that_another_writer_may_rely_on_it() {
    let (_bucket, machine, trainer) = begin();
    for step in 1..=3 {
        trainer.save(step);
        trainer.repository.pin(step, &format!("at-{step}")).unwrap();
    }
    trainer.sync().unwrap();
    for step in 1..=2 {
        trainer.repository.unpin(&format!("at-{step}")).unwrap();
        trainer.repository.delete(step).unwrap();
    }
    trainer.sync().unwrap();
    let times = machine.remote.deletion_times();
    assert!(times.len() >= 3, "tags, manifests, packs: {times:?}");
    assert!(times.iter().all(|time| *time == seconds(15)), "half of the lease: {times:?}");
}

#[test]
fn a_pack_that_the_bucket_lost_is_pushed_again_although_its_manifest_is_there() {
    let (bucket, _machine, trainer) = begin();
    trainer.save(1);
    trainer.save(2);
    trainer.sync().unwrap();
    for name in bucket.names(Folder::Packs) {
        bucket.lose(&key(Folder::Packs, &name));
    }
    let report = trainer.sync().unwrap();
    assert_eq!(report.pushed_objects, 2);
    check_bucket(&bucket).unwrap();
    assert_eq!(load_elsewhere(&bucket, 2).unwrap(), state_at(2));
    assert_eq!(trainer.sync().unwrap().pushed_objects, 0);
}
