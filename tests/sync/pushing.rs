//! What goes to the bucket, in which order, and what a save may not wait for.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use varvite::compact::MergePolicy;
use varvite::error::Error;
use varvite::format::journal::UploadNote;
use varvite::repository::{Access, Options, Repository};
use varvite::retain::Rule;
use varvite::saver::Job;
use varvite::store::{Folder, PutMode, Store};
use varvite::sync::TierAccess;
use varvite::syncer::{SyncReport, Syncer};

use crate::common::machine::{Machine, begin, check_bucket, load_elsewhere, orphans_in, seqs_in};
use crate::common::memory_remote::{Fault, FaultMode, MemoryRemote};
use crate::common::training::{load, options, request, state_at};
use crate::common::{get, key, names};

#[test]
fn a_fresh_machine_resumes_from_the_bucket_alone() {
    let (bucket, machine, trainer) = begin();
    for step in 1..=3 {
        trainer.save(step);
    }
    let report = trainer.sync().unwrap();
    // The marker, three packs and three manifests.
    assert_eq!((report.pushed_objects, report.removed_objects, report.pending_objects), (7, 0, 0));
    let here: u64 =
        bucket.contents().iter().filter(|(name, _)| !is_note(name)).map(|row| row.1.len() as u64).sum();
    assert_eq!(report.pushed_bytes, here);
    assert_eq!(trainer.sync().unwrap(), SyncReport::default(), "the bucket lacks nothing any more");

    for step in 1..=3 {
        assert_eq!(load_elsewhere(&bucket, step).unwrap(), state_at(step));
    }
    trainer.close();
    let fresh = Machine::new(&bucket);
    let next = fresh.open().unwrap();
    assert_eq!(
        next.repository.repository_id(),
        machine.open_as(Access::Read, TierAccess::Read).unwrap().repository_id()
    );
    assert_eq!(next.repository.resolve("latest").unwrap(), 3);
    let snapshot = next.repository.snapshot(3).unwrap();
    next.repository.adopt(&snapshot, true);
    assert_eq!(load(&next.repository, 3).unwrap(), state_at(3));
    assert_eq!(next.save(4), 4, "numbers go on where the bucket ends");
    assert_eq!(next.repository.header(4).unwrap().parent, Some(3));
    next.sync().unwrap();
    assert_eq!(load_elsewhere(&bucket, 4).unwrap(), state_at(4));
    assert_eq!(names(&fresh.disk, Folder::Snapshots), ["4.json"], "only what was saved here lies here");
    // What a machine saves is whole on this machine: it refers to no pack that lies only in the bucket.
    let table = &next.repository.snapshot(4).unwrap().manifest().body.packs.clone();
    assert_eq!(
        table.iter().map(|record| record.name.clone()).collect::<Vec<_>>(),
        names(&fresh.disk, Folder::Packs)
    );
}

fn is_note(name: &str) -> bool {
    name == "lease.json"
}

#[test]
fn the_newest_snapshot_goes_first_and_packs_before_their_manifest() {
    let (_bucket, machine, trainer) = begin();
    for step in 1..=3 {
        trainer.save(step);
    }
    trainer.repository.pin(1, "first").unwrap();
    trainer.repository.write_receipt(Some(1), "{}").unwrap();
    machine.remote.heal();
    trainer.sync().unwrap();
    let log = machine.remote.log();
    let published: Vec<&str> = log
        .iter()
        .filter_map(|line| {
            let (kind, object) = line.split_once(' ').unwrap();
            match kind {
                "swap" => Some(object),
                "complete" => Some(&object[..7]),
                _ => None,
            }
        })
        .filter(|object| *object != "lease.json")
        .collect();
    // The newest refers to the pack of the first for what never changes, and to its own.
    assert_eq!(
        published,
        [
            "varvite.json",
            "packs/3",
            "packs/1",
            "snapshots/3.json",
            "packs/2",
            "snapshots/2.json",
            "snapshots/1.json",
            "tags/first",
            "receipts/1.json"
        ]
    );
    // The lease is renewed right before each manifest.
    let at = |line: &str| log.iter().position(|logged| logged == line).unwrap();
    for manifest in ["swap snapshots/3.json", "swap snapshots/2.json", "swap snapshots/1.json"] {
        assert_eq!(log[at(manifest) - 1], "swap lease.json");
    }
}

/// Saves, retention, merges, pins, receipts and deletions of a machine whose bucket holds snapshots of another one.
#[test]
fn no_call_of_a_running_job_asks_the_bucket() {
    let bucket = MemoryRemote::new();
    let before = Machine::new(&bucket);
    let trainer = before.open().unwrap();
    for step in 1..=4 {
        trainer.save(step);
    }
    trainer.repository.pin(2, "release").unwrap();
    trainer.sync().unwrap();
    trainer.close();

    let machine = Machine { rules: vec![Rule::Last { count: 2 }], ..Machine::new(&bucket) };
    let tiers = machine.tiers(TierAccess::Write);
    let merge = Some(MergePolicy { stride: 1, max_packs: 1, dead_ratio: 0.1 });
    let repository = Repository::open(
        Arc::clone(&tiers) as Arc<dyn Store>,
        Options { merge, ..options(machine.rules.clone()) },
    )
    .unwrap();
    let syncer = Syncer::quiet(repository.clone(), Arc::clone(&tiers));
    // As after a resume: the base of the next save lies in the bucket.
    repository.follow(&repository.snapshot(4).unwrap());
    machine.remote.forbid();

    let save = |step| {
        let state = state_at(step);
        let sources: Vec<&[u8]> = state.values().map(Vec::as_slice).collect();
        let session = repository.begin_save(request(step, &state), &sources).unwrap();
        let report = session.run(&AtomicBool::new(false)).unwrap();
        report.retention.as_ref().unwrap().0.clone()
    };
    for step in 5..=9 {
        let plan = save(step);
        assert_eq!(plan.kept.last().unwrap().0, step);
        repository.merge(step == 7, &AtomicBool::new(false)).unwrap();
    }
    repository.pin(9, "best").unwrap();
    repository.unpin("best").unwrap();
    assert!(matches!(repository.pin(9, "release"), Err(Error::InvalidInput { .. })), "it names snapshot 2");
    repository.write_receipt(Some(9), "{}").unwrap();
    repository.delete(8).unwrap();
    repository.delete(3).unwrap_err();
    repository.prune(false).unwrap();
    let listed: Vec<u64> = repository.list().unwrap().headers.iter().map(|header| header.seq).collect();
    // Of the bucket's only the tagged one is left; of the own ones none that was not pushed may go by itself.
    assert_eq!(listed, [2, 5, 6, 7, 9]);
    assert_eq!(syncer.state().unpushed, [5, 6, 7, 9]);

    machine.remote.heal();
    syncer.sync_now(&AtomicBool::new(false)).unwrap();
    check_bucket(&bucket).unwrap();
    // Retention after the push keeps the last two, and the pinned one.
    assert_eq!(seqs_in(&bucket), [2, 7, 9]);
    assert_eq!(load_elsewhere(&bucket, 9).unwrap(), state_at(9));
}

#[test]
fn a_manifest_that_a_merge_replaced_is_swapped_after_its_packs() {
    let (bucket, machine, trainer) = begin();
    for step in 1..=4 {
        trainer.save(step);
    }
    trainer.sync().unwrap();
    let digests = check_bucket(&bucket).unwrap();
    let before = bucket.contents();
    let report = trainer.repository.merge(true, &AtomicBool::new(false)).unwrap();
    assert!(report.merged_pack_count > 0, "{report:?}");
    let report = trainer.sync().unwrap();
    assert!(report.pushed_objects > 0 && report.removed_objects > 0, "{report:?}");

    assert_eq!(check_bucket(&bucket).unwrap(), digests, "they are the same snapshots");
    assert!(orphans_in(&bucket).is_empty());
    let after = bucket.contents();
    for seq in 1..=4 {
        let name = format!("snapshots/{seq}.json");
        assert_eq!(after[&name], get(&machine.disk, &key(Folder::Snapshots, &format!("{seq}.json"))));
    }
    assert_ne!(before["snapshots/4.json"], after["snapshots/4.json"]);
    assert_eq!(bucket.names(Folder::Packs), names(&machine.disk, Folder::Packs));
    assert_eq!(trainer.sync().unwrap(), SyncReport::default());
    assert_eq!(load_elsewhere(&bucket, 2).unwrap(), state_at(2));
}

#[test]
fn a_lost_journal_is_rebuilt_from_listings_and_nothing_is_sent_again() {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    trainer.save(2);
    trainer.repository.pin(1, "first").unwrap();
    trainer.repository.write_receipt(Some(1), "{}").unwrap();
    trainer.sync().unwrap();
    trainer.close();
    let held = bucket.contents();
    machine.disk.delete(Folder::Sync, &names(&machine.disk, Folder::Sync)).unwrap();

    let again = machine.restarted().open().unwrap();
    assert_eq!(again.syncer.state().unpushed, [0_u64; 0]);
    assert_eq!(again.syncer.state().newest_pushed_seq, Some(2));
    assert_eq!(again.sync().unwrap(), SyncReport::default());
    let mut now = bucket.contents();
    now.insert("lease.json".to_owned(), held["lease.json"].clone());
    assert_eq!(now, held);
    assert!(names(&machine.disk, Folder::Sync).contains(&"journal.json".to_owned()));
}

#[test]
fn an_upload_goes_on_where_it_was_and_a_forgotten_one_begins_anew() {
    for is_forgotten in [false, true] {
        let bucket = MemoryRemote::new();
        let machine = Machine::new(&bucket);
        let trainer = machine.open().unwrap();
        trainer.save(1);
        machine.remote.heal();
        machine.remote.set_hook({
            let remote = machine.remote.clone();
            move |line| {
                if line.starts_with("part ") && line.ends_with(" 3") {
                    remote.cut_off();
                }
            }
        });
        let error = trainer.sync().unwrap_err();
        assert!(matches!(error, Error::Store { .. }), "{error}");
        machine.remote.no_hook();
        let noted =
            names(&machine.disk, Folder::Sync).into_iter().find(|name| name.contains(".pack")).unwrap();
        let note = get(&machine.disk, &key(Folder::Sync, &noted));
        let note = UploadNote::decode(&noted, &note).unwrap();
        let sent_count = note.parts.iter().flatten().count();
        assert_eq!(sent_count, 3);
        assert_eq!(bucket.names(Folder::Uploads), [noted.as_str()]);
        drop(trainer);

        if is_forgotten {
            bucket.forget_uploads();
        }
        let again = machine.restarted();
        let trainer = again.open().unwrap();
        again.remote.heal();
        trainer.sync().unwrap();
        let expected = if is_forgotten { note.parts.len() + 1 } else { note.parts.len() - sent_count };
        assert_eq!(again.remote.count("part"), expected, "forgotten: {is_forgotten}");
        assert_eq!((bucket.upload_count(), bucket.names(Folder::Uploads).len()), (0, 0));
        assert!(!names(&machine.disk, Folder::Sync).iter().any(|name| name.contains(".pack")));
        assert_eq!(load_elsewhere(&bucket, 1).unwrap(), state_at(1));
    }
}

#[test]
fn packs_below_the_limit_go_in_one_request() {
    let bucket = MemoryRemote::new();
    let machine = Machine::new(&bucket.with_single_puts(1 << 20));
    let trainer = machine.open().unwrap();
    trainer.save(1);
    machine.remote.heal();
    trainer.sync().unwrap();
    assert_eq!((machine.remote.count("begin"), machine.remote.count("part")), (0, 0));
    assert_eq!(load_elsewhere(&bucket, 1).unwrap(), state_at(1));
}

#[test]
fn a_limit_of_bytes_per_second_is_kept_by_the_clock() {
    let bucket = MemoryRemote::new();
    let mut machine = Machine::new(&bucket.with_single_puts(1 << 20));
    machine.sync.limit_bytes_per_second = Some(1_000);
    let trainer = machine.open().unwrap();
    trainer.save(1);
    let clock: &dyn varvite::sync::Clock = machine.clock.as_ref();
    let begun = clock.now();
    trainer.sync().unwrap();
    let moved = trainer.syncer.state().moved_bytes;
    assert_eq!(clock.now(), begun + Duration::from_millis(moved));
}

#[test]
fn a_damaged_snapshot_does_not_keep_the_others_from_the_bucket() {
    let (bucket, machine, trainer) = begin();
    for step in 1..=3 {
        trainer.save(step);
    }
    let own = names(&machine.disk, Folder::Packs).into_iter().find(|name| name.starts_with("2-")).unwrap();
    machine.disk.delete(Folder::Packs, std::slice::from_ref(&own)).unwrap();
    let error = trainer.sync().unwrap_err();
    assert!(error.is_not_found() && error.to_string().contains(&own), "{error}");
    assert_eq!(seqs_in(&bucket), [1, 3]);
    check_bucket(&bucket).unwrap();
    assert_eq!(trainer.syncer.state().unpushed, [2]);
}

#[test]
fn a_background_push_follows_commits_and_keeps_its_failure_until_one_succeeds() {
    let bucket = MemoryRemote::new();
    let mut machine = Machine::new(&bucket);
    machine.sync.sync_every = 2;
    let tiers = machine.tiers(TierAccess::Write);
    let repository = Repository::open(Arc::clone(&tiers) as Arc<dyn Store>, options(Vec::new())).unwrap();
    let syncer = Syncer::new(repository.clone(), Arc::clone(&tiers));
    let merger = varvite::merger::Merger::new(repository.clone());
    let minute = Duration::from_secs(60);
    let save = |step| {
        let state = state_at(step);
        let sources: Vec<&[u8]> = state.values().map(Vec::as_slice).collect();
        let session = repository.begin_save(request(step, &state), &sources).unwrap();
        let job = Job::start(session, Arc::clone(&merger), Some(Arc::clone(&syncer))).unwrap();
        job.wait(minute).unwrap().unwrap();
    };
    let settled = || {
        while syncer.state().is_running {
            std::thread::yield_now();
        }
    };
    save(1);
    settled();
    assert_eq!(seqs_in(&bucket), [0_u64; 0], "one commit of two");
    save(2);
    settled();
    assert_eq!(seqs_in(&bucket), [1, 2]);

    machine.remote.cut_off();
    save(3);
    save(4);
    settled();
    let state = syncer.state();
    assert!(state.last_error.as_ref().unwrap().contains("simulated"), "{state:?}");
    assert_eq!(state.unpushed, [3, 4]);
    let told = syncer.take_failure().unwrap();
    assert!(matches!(*told, Error::Store { .. }), "{told}");
    assert!(syncer.take_failure().is_none(), "it is told once");
    let error = syncer.sync_now(&AtomicBool::new(false)).unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "{error}");
    assert!(syncer.take_failure().is_none(), "the same failure is no news");

    machine.remote.heal();
    syncer.sync_now(&AtomicBool::new(false)).unwrap();
    assert_eq!((syncer.state().last_error, seqs_in(&bucket)), (None, vec![1, 2, 3, 4]));
    syncer.stop(&AtomicBool::new(false)).unwrap();
    repository.close();
    // The lease was let go of: the next one need not wait.
    let next = machine.restarted();
    next.clock.on_sleep(|| panic!("nobody waits for a lease that was let go of"));
    next.open().unwrap();
}

#[test]
fn what_failed_is_tried_again_when_its_time_has_come() {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    machine.remote.arm(Fault { at: 1, mode: FaultMode::FailForever });
    trainer.sync().unwrap_err();
    let wait = trainer.syncer.work_due();
    assert!(wait <= Duration::from_secs(5), "{wait:?}");
    machine.remote.heal();
    assert_eq!(machine.remote.count("list"), 0, "not before its time");
    machine.clock.advance(Duration::from_secs(6));
    trainer.syncer.work_due();
    while trainer.syncer.state().is_running {
        std::thread::yield_now();
    }
    assert_eq!(seqs_in(&bucket), [1]);
    assert_eq!(trainer.syncer.state().last_error, None);
}

#[test]
fn the_bucket_of_another_repository_is_refused() {
    let bucket = MemoryRemote::new();
    let first = Machine::new(&bucket).open().unwrap();
    first.save(1);
    first.sync().unwrap();
    first.close();
    let other = Machine::new(&MemoryRemote::new());
    let trainer = other.open().unwrap();
    trainer.save(1);
    trainer.close();

    let moved = Machine::with_disk(other.disk.clone(), &bucket);
    let error = moved.open().map(|_| ()).unwrap_err();
    assert!(
        matches!(&error, Error::NotARepository { root, reason } if *root == bucket.root() && reason.contains("another one")),
        "{error}"
    );
}

#[test]
fn an_empty_bucket_at_another_address_gets_everything() {
    let first = MemoryRemote::new();
    let machine = Machine::new(&first);
    let trainer = machine.open().unwrap();
    trainer.save(1);
    trainer.save(2);
    trainer.sync().unwrap();
    trainer.close();
    let second = MemoryRemote::new();
    let trainer = Machine::with_disk(machine.disk.clone(), &second).open().unwrap();
    assert_eq!(trainer.syncer.state().unpushed, [1, 2]);
    trainer.sync().unwrap();
    assert_eq!(load_elsewhere(&second, 2).unwrap(), state_at(2));
}

#[test]
fn a_file_that_lies_in_the_bucket_under_a_new_name_collides() {
    let bucket = MemoryRemote::new();
    let machine = Machine::new(&bucket);
    bucket.plant(&key(Folder::Tags, "taken"), b"somebody's");
    let trainer = machine.open().unwrap();
    let error = trainer.tiers.put(&key(Folder::Tags, "taken"), b"ours", PutMode::IfAbsent).unwrap_err();
    assert!(matches!(error, Error::Conflict { .. }), "{error}");
}

#[test]
fn what_the_bucket_has_not_been_told_of_is_known() {
    let machine = Machine::new(&MemoryRemote::new());
    let trainer = machine.open().unwrap();
    trainer.save(1);
    assert!(trainer.syncer.has_changed());
    trainer.sync().unwrap();
    assert!(!trainer.syncer.has_changed());
    // Tags and receipts come without a commit, and nothing else would push them.
    trainer.repository.pin(1, "kept").unwrap();
    assert!(trainer.syncer.has_changed());
    machine.remote.cut_off();
    assert!(trainer.sync().is_err());
    assert!(trainer.syncer.has_changed(), "the push failed");
    machine.remote.heal();
    trainer.sync().unwrap();
    assert!(!trainer.syncer.has_changed());
    trainer.repository.unpin("kept").unwrap();
    assert!(trainer.syncer.has_changed());
}
