//! Every request of a push, a pull and a read goes wrong once, for ever, after it was carried out, and with the
//! process: whatever happens, the bucket holds only whole snapshots, the folder is as it was, and the next run
//! completes.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panic")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use common::machine::{Machine, Trainer, check_bucket, load_elsewhere, orphans_in, seqs_in};
use common::memory_remote::{Disk, Fault, FaultMode, MemoryRemote};
use common::training::{load, open_to_read, state_at};
use common::{get, key, names};
use varvite::error::{Error, Result};
use varvite::format::journal::UploadNote;
use varvite::repository::{Access, Repository};
use varvite::retain::Rule;
use varvite::store::memory::MemoryStore;
use varvite::store::remote::Transfer;
use varvite::store::{Folder, Store};
use varvite::sync::{TierAccess, pull};

/// State digests of the snapshots of a folder, read without a bucket.
fn digests_here(disk: &MemoryStore) -> BTreeMap<u64, String> {
    let reader = open_to_read(Arc::new(disk.clone())).unwrap();
    let listed = reader.list().unwrap();
    assert!(listed.damaged.is_empty(), "{:?}", listed.damaged);
    for header in &listed.headers {
        assert_eq!(load(&reader, header.seq).unwrap(), state_at(header.step));
    }
    listed.headers.iter().map(|header| (header.seq, header.state_digest.clone())).collect()
}

/// Prepares a machine and returns it with the bucket as it is before the work.
type Prepare = fn() -> (MemoryRemote, Machine);
/// What is done after the open, with faults; the first part is local.
type Work = fn(&Trainer) -> Result<()>;

/// A push of a new repository: packs in parts, manifests, a tag, a receipt.
fn fresh() -> (MemoryRemote, Machine) {
    let bucket = MemoryRemote::new();
    let machine = Machine::new(&bucket);
    (bucket, machine)
}

fn first_push(trainer: &Trainer) -> Result<()> {
    for step in 1..=2 {
        trainer.save(step);
    }
    trainer.repository.pin(1, "first").unwrap();
    trainer.repository.write_receipt(Some(1), "{}").unwrap();
    trainer.sync().map(drop)
}

/// A machine whose bucket is up to date.
fn pushed() -> (MemoryRemote, Machine) {
    let (bucket, machine) = fresh();
    let trainer = machine.open().unwrap();
    for step in 1..=3 {
        trainer.save(step);
    }
    trainer.repository.pin(1, "first").unwrap();
    trainer.sync().unwrap();
    trainer.close();
    let restarted = machine.restarted();
    (bucket, restarted)
}

fn pushed_with_retention() -> (MemoryRemote, Machine) {
    let (bucket, machine) = pushed();
    (bucket, Machine { rules: vec![Rule::Last { count: 1 }], ..machine })
}

/// Swaps of merged manifests, and the removal of what the merge has left.
fn merge_and_push(trainer: &Trainer) -> Result<()> {
    trainer.repository.merge(true, &AtomicBool::new(false)).unwrap();
    trainer.sync().map(drop)
}

/// Removals of manifests, tombstones, packs and a tag.
fn delete_and_push(trainer: &Trainer) -> Result<()> {
    trainer.repository.unpin("first").unwrap();
    trainer.repository.delete(3).unwrap();
    trainer.repository.delete(1).unwrap();
    trainer.sync().map(drop)
}

/// A push, retention after it, and its mirror.
fn retain_and_push(trainer: &Trainer) -> Result<()> {
    trainer.repository.unpin("first").unwrap();
    trainer.save(4);
    trainer.save(5);
    trainer.sync().map(drop)
}

/// Bytes of parts sent from each machine, by pack.
fn parts_of(machine: &Machine) -> BTreeMap<String, usize> {
    let mut parts = BTreeMap::new();
    for line in machine.remote.log().iter().filter(|line| line.starts_with("part ")) {
        *parts.entry(line.split(' ').nth(1).unwrap().to_owned()).or_insert(0) += 1;
    }
    parts
}

fn enumerate(what: &str, prepare: Prepare, work: Work) -> u64 {
    let mut fired_count = 0;
    for mode in FaultMode::ALL {
        for at in 1.. {
            let (bucket, machine) = prepare();
            let trainer = machine.open().unwrap();
            machine.remote.arm(Fault { at, mode });
            let outcome = work(&trainer);
            let case = format!("{what}, {mode:?} at {at}: {:?}", machine.remote.log().last());
            if !machine.remote.fired() {
                outcome.unwrap();
                break;
            }
            fired_count += 1;
            if mode == FaultMode::FailForever || mode == FaultMode::KillBefore {
                assert!(outcome.is_err(), "{case}");
            }
            check_bucket(&bucket).unwrap_or_else(|why| panic!("{case}: {why}"));
            let here = digests_here(&machine.disk);
            let sent = parts_of(&machine);
            drop(trainer);

            complete(&case, &bucket, &machine, &here, &sent);
        }
    }
    fired_count
}

/// The next run, after whatever happened.
fn complete(
    case: &str,
    bucket: &MemoryRemote,
    machine: &Machine,
    here: &BTreeMap<u64, String>,
    sent: &BTreeMap<String, usize>,
) {
    let uploads: BTreeMap<String, UploadNote> = names(&machine.disk, Folder::Sync)
        .into_iter()
        .filter(|name| name.contains(".pack"))
        .map(|name| {
            let note = UploadNote::decode(&name, &get(&machine.disk, &key(Folder::Sync, &name))).unwrap();
            (format!("packs/{}", note.pack), note)
        })
        .collect();
    let again = machine.restarted();
    let next = again.open().unwrap_or_else(|error| panic!("{case}: {}", error.chain()));
    assert_eq!(&digests_here(&machine.disk), here, "{case}: the folder is untouched");
    again.remote.heal();
    next.sync().unwrap_or_else(|error| panic!("{case}: {}", error.chain()));
    // What was noted as sent is not sent again.
    for (pack, count) in parts_of(&again) {
        let noted = uploads.get(&pack).map_or(0, |note| note.parts.iter().flatten().count());
        if let Some(note) = uploads.get(&pack) {
            assert_eq!(count, note.parts.len() - noted, "{case}: {pack}");
            assert!(sent.get(&pack).copied().unwrap_or(0) <= noted + 1, "{case}: {pack}");
        }
    }
    let there = check_bucket(bucket).unwrap_or_else(|why| panic!("{case}: {why}"));
    assert_eq!(there, digests_here(&machine.disk), "{case}");
    assert!(orphans_in(bucket).is_empty(), "{case}: {:?}", orphans_in(bucket));
    assert_eq!(bucket.names(Folder::Packs), names(&machine.disk, Folder::Packs), "{case}");
    assert_eq!(bucket.names(Folder::Tags), names(&machine.disk, Folder::Tags), "{case}");
    assert_eq!(bucket.names(Folder::Receipts), names(&machine.disk, Folder::Receipts), "{case}");
    // The one upload that nobody can know of is one that was begun and never got a name.
    let is_nameless =
        case.contains("\"begin ") && (case.contains("LoseAnswer") || case.contains("KillAfter"));
    let expected = (usize::from(is_nameless), 0);
    assert_eq!((bucket.upload_count(), bucket.names(Folder::Uploads).len()), expected, "{case}");
    let newest = *there.keys().last().unwrap();
    let step = next.repository.header(newest).unwrap().step;
    assert_eq!(load_elsewhere(bucket, newest).unwrap(), state_at(step), "{case}");
    assert_eq!(seqs_in(bucket).last(), Some(&newest));
    next.close();
}

#[test]
fn a_first_push_survives_every_fault_of_every_request() {
    assert!(enumerate("first push", fresh, first_push) > 100);
}

#[test]
fn a_push_after_a_merge_survives_every_fault_of_every_request() {
    assert!(enumerate("merge", pushed, merge_and_push) > 100);
}

#[test]
fn removals_survive_every_fault_of_every_request() {
    assert!(enumerate("delete", pushed, delete_and_push) > 50);
}

#[test]
fn retention_after_a_push_survives_every_fault_of_every_request() {
    assert!(enumerate("retention", pushed_with_retention, retain_and_push) > 100);
}

/// A pull into an empty folder.
fn pull_all(remote: &MemoryRemote, local: &Arc<dyn Store>) -> Result<()> {
    let (cancelled, moved_bytes) = (AtomicBool::new(false), AtomicU64::new(0));
    let transfer =
        Transfer { cancelled: &cancelled, moved_bytes: &moved_bytes, limit_bytes_per_second: None };
    pull(remote, local, &[2, 3], None, transfer).map(drop)
}

#[test]
fn a_pull_survives_every_fault_of_every_request() {
    let (bucket, _) = pushed();
    for mode in FaultMode::ALL {
        for at in 1.. {
            let remote = bucket.elsewhere();
            let disk = MemoryStore::new();
            remote.arm(Fault { at, mode });
            let local: Arc<dyn Store> = Disk::beside(&disk, &remote);
            let outcome = pull_all(&remote, &local);
            let case = format!("{mode:?} at {at}: {:?}", remote.log().last());
            if !remote.fired() {
                outcome.unwrap();
                assert!(at > 10);
                break;
            }
            assert!(matches!(outcome, Err(Error::Store { .. })), "{case}: {outcome:?}");
            // What is there is whole; what is half is no snapshot.
            if names(&disk, Folder::Root).is_empty() {
                assert!(names(&disk, Folder::Snapshots).is_empty(), "{case}");
            } else {
                digests_here(&disk);
            }
            let again: Arc<dyn Store> = Arc::new(disk.clone());
            pull_all(&bucket.elsewhere(), &again).unwrap_or_else(|error| panic!("{case}: {}", error.chain()));
            assert_eq!(digests_here(&disk).into_keys().collect::<Vec<_>>(), [2, 3], "{case}");
        }
    }
}

#[test]
fn a_resume_from_the_bucket_gives_the_right_bytes_or_an_error() {
    let (bucket, _) = pushed();
    for mode in [FaultMode::FailOnce, FaultMode::FailForever, FaultMode::LoseAnswer] {
        for at in 1.. {
            let machine = Machine::new(&bucket);
            machine.remote.arm(Fault { at, mode });
            let resume = || -> Result<()> {
                let reader: Repository = machine.open_as(Access::Read, TierAccess::Read)?;
                let newest = reader.resolve("latest")?;
                let (found, steps) = (load(&reader, newest)?, reader.header(newest)?.step);
                assert_eq!((newest, found), (3, state_at(steps)));
                Ok(())
            };
            let outcome = resume();
            if !machine.remote.fired() {
                outcome.unwrap();
                assert!(at > 5);
                break;
            }
            if let Err(error) = outcome {
                assert!(matches!(error, Error::Store { .. }), "{mode:?} at {at}: {error}");
            }
            machine.remote.heal();
            resume().unwrap();
        }
    }
}
