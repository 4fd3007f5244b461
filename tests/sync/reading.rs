//! What is read from the bucket, by those who write and those who don't.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use varvite::error::Error;
use varvite::plan::Want;
use varvite::repository::{Access, Options, Repository};
use varvite::store::memory::MemoryStore;
use varvite::store::remote::Transfer;
use varvite::store::{Folder, PutMode, Store};
use varvite::sync::{TierAccess, pull};
use varvite::tensor::Region;

use crate::common::machine::{Machine, load_elsewhere};
use crate::common::memory_remote::MemoryRemote;
use crate::common::training::{load, options, state_at};
use crate::common::{key, names};

/// A bucket with snapshots 1 to 3.
fn bucket() -> MemoryRemote {
    let bucket = MemoryRemote::new();
    let trainer = Machine::new(&bucket).open().unwrap();
    for step in 1..=3 {
        trainer.save(step);
    }
    trainer.repository.pin(2, "release").unwrap();
    trainer.repository.write_receipt(Some(1), r#"{"a":1}"#).unwrap();
    trainer.sync().unwrap();
    trainer.close();
    bucket
}

#[test]
fn a_listing_reads_the_head_of_each_manifest_once() {
    let machine = Machine::new(&bucket());
    let reader = machine.open_as(Access::Read, TierAccess::Read).unwrap();
    assert_eq!(reader.list().unwrap().headers.len(), 3);
    assert_eq!(reader.resolve("step:2").unwrap(), 2);
    assert_eq!(reader.resolve("tag:release").unwrap(), 2);
    assert_eq!(reader.receipts(None).unwrap().read[0].content.get(), r#"{"a":1}"#);
    machine.remote.heal();
    reader.list().unwrap();
    assert_eq!(machine.remote.log(), ["list snapshots"], "what was read once is known");
}

#[test]
fn one_tensor_is_read_without_the_others() {
    let machine = Machine::new(&bucket());
    let reader = machine.open_as(Access::Read, TierAccess::Read).unwrap();
    let snapshot = reader.snapshot(3).unwrap();
    let entries = &snapshot.manifest().body.entries;
    let entry = entries.iter().position(|entry| entry.name == "bias").unwrap();
    let shape = entries[entry].shape.clone();
    let mut bytes = vec![0; 10];
    machine.remote.heal();
    let want = Want { entry, region: Region::whole(&shape), target: 0 };
    snapshot.read(&[want], &mut [&mut bytes], &AtomicBool::new(false)).unwrap();
    assert_eq!(bytes, state_at(3)["bias"]);
    assert_eq!((machine.remote.count("open"), machine.remote.count("read")), (1, 1));
}

#[test]
fn a_reader_goes_on_with_the_folder_where_the_bucket_is_dead() {
    let machine = Machine::new(&bucket());
    let trainer = machine.open().unwrap();
    trainer.save(4);
    let reading = machine.restarted();
    reading.remote.cut_off();
    let reader = reading.open_as(Access::Read, TierAccess::Read).unwrap();
    assert_eq!(reader.candidates().unwrap(), [4]);
    assert_eq!(load(&reader, 4).unwrap(), state_at(4));
    let empty = Machine::new(&machine.remote);
    empty.remote.cut_off();
    let error = empty.open_as(Access::Read, TierAccess::Read).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "{error}");
}

#[test]
fn the_writer_resumes_verifies_and_merges_around_what_lies_only_there() {
    let bucket = bucket();
    let machine = Machine::new(&bucket);
    let trainer = machine.open().unwrap();
    let report = trainer.repository.verify(None, 1.0, &AtomicBool::new(false)).unwrap();
    assert!(report.findings.is_empty(), "{:?}", report.findings);
    trainer.save(4);
    trainer.save(5);
    let merged = trainer.repository.merge(true, &AtomicBool::new(false)).unwrap();
    assert!(merged.stood_down.is_none(), "{merged:?}");
    for seq in 1..=5 {
        assert_eq!(load(&trainer.repository, seq).unwrap(), state_at(seq));
    }
    trainer.sync().unwrap();
    for seq in 1..=5 {
        assert_eq!(load_elsewhere(&bucket, seq).unwrap(), state_at(seq));
    }
}

fn pulled(
    remote: &MemoryRemote,
    local: &Arc<dyn Store>,
    seqs: &[u64],
) -> Result<varvite::sync::PullReport, Error> {
    let (cancelled, moved_bytes) = (AtomicBool::new(false), AtomicU64::new(0));
    let transfer =
        Transfer { cancelled: &cancelled, moved_bytes: &moved_bytes, limit_bytes_per_second: None };
    pull(remote, local, seqs, None, transfer)
}

#[test]
fn a_pull_brings_snapshots_that_need_the_bucket_no_more() {
    let remote = bucket();
    let disk = MemoryStore::new();
    let local: Arc<dyn Store> = Arc::new(disk.clone());
    let report = pulled(&remote, &local, &[2, 3]).unwrap();
    assert_eq!(
        (report.pulled.as_slice(), report.known.as_slice()),
        ([3, 2].as_slice(), [0_u64; 0].as_slice())
    );
    assert_eq!(names(&disk, Folder::Snapshots), ["2.json", "3.json"]);
    assert_eq!(report.pulled_objects as usize, names(&disk, Folder::Packs).len() + 2);
    let repository = Repository::open(local, options(Vec::new())).unwrap();
    for seq in [2, 3] {
        assert_eq!(load(&repository, seq).unwrap(), state_at(seq));
    }
    drop(repository);
    let local: Arc<dyn Store> = Arc::new(disk.clone());
    remote.heal();
    let report = pulled(&remote, &local, &[3, 1]).unwrap();
    assert_eq!((report.pulled, report.known), (vec![1], vec![3]));
    assert!(!remote.log().iter().any(|line| line.contains("packs/")), "its packs lie here already");
}

#[test]
fn a_pull_that_ended_midway_leaves_nothing_that_the_next_one_trusts() {
    let remote = bucket();
    let disk = MemoryStore::new();
    let local: Arc<dyn Store> = Arc::new(disk.clone());
    pulled(&remote, &local, &[2]).unwrap();
    // Damaged on the way, and the pull died before it had looked at it.
    let before = names(&disk, Folder::Packs);
    let there = remote.names(Folder::Packs);
    let missing = there.iter().find(|name| !before.contains(name)).unwrap();
    let mut bytes = remote.contents()[&format!("packs/{missing}")].clone();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    disk.put(&key(Folder::Packs, missing), &bytes, PutMode::IfAbsent).unwrap();
    let error = pulled(&remote, &local, &[3]).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert_eq!(names(&disk, Folder::Packs), before, "what snapshot 2 needs stays");
    assert_eq!(pulled(&remote, &local, &[3]).unwrap().pulled, [3]);
}

#[test]
fn a_pull_refuses_what_is_not_there_not_whole_or_not_of_this_repository() {
    let remote = bucket();
    let local: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let error = pulled(&remote, &local, &[7]).unwrap_err();
    assert!(matches!(&error, Error::SnapshotNotFound { reference, .. } if reference == "seq:7"), "{error}");

    let other: Arc<dyn Store> = Arc::new(MemoryStore::new());
    Repository::open(Arc::clone(&other), Options::default()).unwrap();
    let error = pulled(&remote, &other, &[1]).unwrap_err();
    assert!(matches!(&error, Error::NotARepository { .. }), "{error}");

    for pack in remote.names(Folder::Packs).into_iter().filter(|name| name.starts_with("3-")) {
        let mut bytes = remote.contents()[&format!("packs/{pack}")].clone();
        bytes[200] ^= 1;
        remote.plant(&key(Folder::Packs, &pack), &bytes);
    }
    let disk = MemoryStore::new();
    let local: Arc<dyn Store> = Arc::new(disk.clone());
    let error = pulled(&remote, &local, &[3, 2]).unwrap_err();
    assert!(matches!(&error, Error::Corrupt { what, .. } if what == "fetched pack"), "{error}");
    assert_eq!(names(&disk, Folder::Snapshots), [""; 0]);
    assert!(names(&disk, Folder::Packs).iter().all(|name| !name.starts_with("3-")));
}
