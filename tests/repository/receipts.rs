//! Receipts: who writes them, in which order they stand, and that damage of one stops nothing.

use std::sync::Arc;

use varvite::error::Error;
use varvite::repository::{Access, Options, Repository};
use varvite::store::Folder;
use varvite::store::memory::MemoryStore;

use crate::common::oracle::receipts_of;
use crate::common::sim_store::{Mode, Plan, SimStore};
use crate::common::training::{open, options, save};
use crate::common::{get, key, names, put};
use crate::tensors::flip;

fn fresh(store: &MemoryStore) -> Repository {
    open(Arc::new(store.clone()), Vec::new()).unwrap()
}

fn opened_for(store: &MemoryStore, access: Access) -> Repository {
    Repository::open(Arc::new(store.clone()), Options { access, ..options(Vec::new()) }).unwrap()
}

fn pairs(repository: &Repository) -> Vec<(u64, String)> {
    receipts_of(repository).unwrap().into_iter().collect()
}

fn owned(pairs: &[(u64, &str)]) -> Vec<(u64, String)> {
    pairs.iter().map(|(number, content)| (*number, (*content).to_owned())).collect()
}

#[test]
fn receipts_are_numbered_in_the_order_in_which_they_were_written() {
    let store = MemoryStore::new();
    let repository = fresh(&store);
    save(&repository, 1).unwrap();
    for number in 1..=11 {
        let written = repository.write_receipt(Some(1), &number.to_string()).unwrap();
        assert_eq!(
            (written.number, written.seq, written.content.get()),
            (number, Some(1), &*number.to_string())
        );
    }
    drop(repository);
    let repository = fresh(&store);
    assert_eq!(repository.write_receipt(None, "{\"a\": 1}").unwrap().number, 12);
    let numbers: Vec<u64> = pairs(&repository).into_iter().map(|pair| pair.0).collect();
    assert_eq!(numbers, (1..=12).collect::<Vec<_>>(), "by number, not by the text of the name");
    let newest = repository.receipts(Some(2)).unwrap().read;
    assert_eq!(newest.iter().map(|receipt| receipt.number).collect::<Vec<_>>(), [11, 12]);
    assert_eq!((newest[1].seq, newest[1].content.get()), (None, "{\"a\": 1}"));
}

#[test]
fn a_replacement_changes_the_content_and_nothing_else() {
    let store = MemoryStore::new();
    let repository = fresh(&store);
    let written = repository.write_receipt(Some(7), "\"open\"").unwrap();
    repository.write_receipt(None, "\"other\"").unwrap();
    let replaced = repository.replace_receipt(1, "\"judged\"").unwrap();
    assert_eq!((replaced.seq, replaced.created_at_unix_ms), (Some(7), written.created_at_unix_ms));
    assert_eq!(pairs(&repository), owned(&[(1, "\"judged\""), (2, "\"other\"")]));

    let error = repository.replace_receipt(3, "null").unwrap_err();
    assert!(matches!(&error, Error::InvalidInput { what, .. } if what == "receipt 3"), "{error:?}");
    assert_eq!(names(&store, Folder::Receipts), ["1.json", "2.json"]);
}

#[test]
fn content_that_is_no_json_or_too_long_is_refused_and_writes_nothing() {
    let store = MemoryStore::new();
    let repository = fresh(&store);
    for content in ["", "{", "[1,\n2]", "NaN", &format!("\"{}\"", "a".repeat(64 << 10))] {
        let error = repository.write_receipt(None, content).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidInput { what, .. } if what.ends_with("of a receipt")),
            "{error:?}"
        );
    }
    assert_eq!(names(&store, Folder::Receipts), [""; 0]);
}

#[test]
fn only_a_writer_writes_receipts_and_anyone_reads_them() {
    let store = MemoryStore::new();
    let writer = fresh(&store);
    writer.write_receipt(None, "1").unwrap();
    for access in [Access::Read, Access::Tag] {
        let handle = opened_for(&store, access);
        for refused in [handle.write_receipt(None, "2"), handle.replace_receipt(1, "2")] {
            assert!(matches!(refused, Err(Error::InvalidInput { .. })), "{refused:?}");
        }
        assert_eq!(pairs(&handle), owned(&[(1, "1")]));
    }
    writer.close();
    let closed = writer.write_receipt(None, "2").unwrap_err();
    assert!(matches!(&closed, Error::InvalidInput { what, .. } if what == "write a receipt"), "{closed:?}");
}

#[test]
fn a_damaged_receipt_is_left_out_and_found_and_stops_nothing() {
    let store = MemoryStore::new();
    let repository = fresh(&store);
    save(&repository, 1).unwrap();
    for content in ["1", "2", "3"] {
        repository.write_receipt(Some(1), content).unwrap();
    }
    flip(&store, &key(Folder::Receipts, "2.json"), 30);
    let bytes = get(&store, &key(Folder::Receipts, "3.json"));
    put(&store, &key(Folder::Receipts, "9.json"), &bytes);

    drop(repository);
    let repository = fresh(&store);
    let receipts = repository.receipts(None).unwrap();
    assert_eq!(receipts.read.iter().map(|receipt| receipt.number).collect::<Vec<_>>(), [1, 3]);
    let damaged: Vec<(u64, String)> =
        receipts.damaged.iter().map(|(number, error)| (*number, error.to_string())).collect();
    assert_eq!(damaged.len(), 2);
    assert!(
        damaged[0].0 == 2 && damaged[0].1.starts_with("corrupt digest in `receipts/2.json`"),
        "{damaged:?}"
    );
    assert!(damaged[1].1.ends_with("expected 9, found: 3"), "one under another's name: {damaged:?}");
    assert!(matches!(repository.replace_receipt(2, "null"), Err(Error::Corrupt { .. })));

    let findings = repository.verify(None, 1.0, &false.into()).unwrap().findings;
    let objects: Vec<&str> = findings.iter().map(|finding| finding.object.as_str()).collect();
    assert_eq!(objects, ["receipts/2.json", "receipts/9.json"]);
    save(&repository, 2).unwrap();
    repository.prune(false).unwrap();
    assert_eq!(repository.write_receipt(Some(2), "10").unwrap().number, 10, "no number is used twice");
}

#[test]
fn a_repository_without_the_folder_is_legal_and_strangers_in_it_are_left_alone() {
    let store = MemoryStore::new();
    let repository = fresh(&store);
    save(&repository, 1).unwrap();
    assert_eq!(pairs(&opened_for(&store, Access::Read)), []);
    for stranger in ["notes.txt", "01.json", "0.json", "1.json.bak"] {
        put(&store, &key(Folder::Receipts, stranger), b"not ours");
    }
    assert_eq!(pairs(&repository), []);
    assert_eq!(repository.write_receipt(Some(1), "1").unwrap().number, 1);
    repository.prune(false).unwrap();
    assert_eq!(repository.verify(None, 1.0, &false.into()).unwrap().findings, []);
    assert_eq!(names(&store, Folder::Receipts), ["0.json", "01.json", "1.json", "1.json.bak", "notes.txt"]);
}

#[test]
fn a_receipt_whose_name_was_not_synced_keeps_its_number() {
    let disk = SimStore::new();
    let repository = open(Arc::new(disk.clone()), Vec::new()).unwrap();
    repository.write_receipt(None, "1").unwrap();
    // Without its sync the name is there, and a loss of power may still take it.
    disk.arm(Plan { at_step: 4, mode: Mode::FailOnce });
    let error = repository.write_receipt(None, "2").unwrap_err();
    assert!(disk.fired() && matches!(error, Error::Store { .. }), "{error:?}");
    assert_eq!(repository.write_receipt(None, "3").unwrap().number, 3);
    let again = open(Arc::new(disk.after_power_loss(false)), Vec::new()).unwrap();
    assert_eq!(pairs(&again), owned(&[(1, "1"), (2, "2"), (3, "3")]));
}
