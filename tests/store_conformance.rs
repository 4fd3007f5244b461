//! What every [`Store`] promises, one function a promise, run on every store.
//!
//! A store that a later feature adds gets one line in `conformance!` and has to pass the same list.
//! What only one store can promise is tested beside it, in `local_store.rs` and `sim_store.rs`.

#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod common;

use std::sync::{Arc, Barrier};
use std::thread;

use common::memory_remote::MemoryRemote;
use common::sim_store::SimStore;
use common::{get, key, names, pack, pattern, publish, put};
use tempfile::TempDir;
use varvite::error::Error;
use varvite::format::encrypted;
use varvite::store::local::{LocalOptions, LocalStore};
use varvite::store::memory::MemoryStore;
use varvite::store::{Folder, Key, PutMode, ReadAt, Store};
use varvite::sync::{SyncOptions, TierAccess, TieredStore};

/// Longer than the blocks in which the local store writes: three of them and one byte.
const LARGE_BYTES: usize = 3 * (4 << 20) + 1;

/// A fresh store, and the folder that has to outlive it.
struct Fixture {
    store: Arc<dyn Store>,
    _folder: Option<TempDir>,
}

fn fixture(store: impl Store + 'static, folder: Option<TempDir>) -> Fixture {
    let store: Arc<dyn Store> = Arc::new(store);
    store.create_folders().unwrap();
    Fixture { store, _folder: folder }
}

/// A folder with a bucket behind it, both in memory; it holds the lease once it was locked.
fn tiered_fixture() -> Fixture {
    let remote = Arc::new(MemoryRemote::new());
    let options = SyncOptions::default();
    let store = TieredStore::open(Arc::new(MemoryStore::new()), remote, TierAccess::Write, options).unwrap();
    store.create_folders().unwrap();
    Fixture { store, _folder: None }
}

fn local_fixture(sync: bool) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let store = LocalStore::open(folder.path(), LocalOptions { sync, read_only: false }).unwrap();
    fixture(store, Some(folder))
}

/// Runs each promise on each store: the first list everywhere, the second where files or their like are.
macro_rules! conformance {
    (everywhere { $($promise:ident)* } not_in_a_bucket { $($local_promise:ident)* }) => {
        $(mod $promise {
            use super::*;

            local_stores!($promise);

            #[cfg(feature = "cloud")]
            #[test]
            fn bucket_in_memory() {
                super::$promise(&fixture(varvite::store::object::BucketStore::in_memory(), None).store);
            }

            #[cfg(feature = "cloud")]
            #[test]
            #[ignore = "needs a server: VARVITE_TEST_BUCKET_URL"]
            fn bucket_on_a_server() {
                super::$promise(&fixture(common::bucket::on_server(), None).store);
            }
        })*
        $(mod $local_promise {
            use super::*;

            local_stores!($local_promise);
        })*
    };
}

/// Runs a promise on the stores of one machine.
macro_rules! local_stores {
    ($promise:ident) => {
        #[test]
        fn memory() {
            super::$promise(&fixture(MemoryStore::new(), None).store);
        }

        #[test]
        fn local() {
            super::$promise(&local_fixture(true).store);
        }

        #[test]
        fn local_without_sync() {
            super::$promise(&local_fixture(false).store);
        }

        #[test]
        fn simulated() {
            super::$promise(&fixture(SimStore::new(), None).store);
        }

        #[test]
        fn tiered() {
            super::$promise(&tiered_fixture().store);
        }

        #[cfg(feature = "encryption")]
        #[test]
        fn encrypted() {
            super::$promise(&fixture(common::encrypted(Arc::new(MemoryStore::new())), None).store);
        }

        #[cfg(feature = "encryption")]
        #[test]
        fn encrypted_local() {
            let Fixture { store, _folder } = local_fixture(false);
            super::$promise(&fixture(common::encrypted(store), _folder).store);
        }
    };
}

conformance! {
    everywhere {
        an_empty_store_lists_nothing_and_misses_everything
        a_put_object_reads_back_whole_and_in_parts
        a_staged_object_equals_its_appends
        appends_of_odd_lengths_are_joined_without_a_gap
        an_empty_staged_write_publishes_an_empty_object
        staged_bytes_are_invisible_until_published
        a_dropped_staged_write_leaves_nothing
        a_staged_write_left_behind_is_swept_and_published_objects_are_not
        publish_keeps_an_existing_object
        put_if_absent_keeps_an_existing_object
        put_replace_swaps_the_object_and_open_handles_keep_the_old_bytes
        racing_puts_have_exactly_one_winner
        racing_publishes_have_exactly_one_winner
        a_reader_never_sees_a_mixture_while_an_object_is_replaced
        delete_removes_frees_and_forgives_absent_names
        delete_takes_no_name_that_leaves_the_folder
        reading_past_the_end_is_corrupt_and_says_where
        get_refuses_an_object_over_the_limit
        folders_are_apart
        folders_can_be_created_again
    }
    // A bucket gives a deleted object no longer (`remote_conformance.rs`), and has no lock.
    not_in_a_bucket {
        an_open_handle_outlives_the_deletion
        a_second_writer_is_told_who_holds_the_lock
    }
}

fn read(object: &dyn ReadAt) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(object.length_bytes()).unwrap()];
    object.read_at(0, &mut bytes).unwrap();
    bytes
}

/// The full name under which a store speaks of an object.
fn full_name(store: &dyn Store, key: &Key) -> String {
    format!("{}/{key}", store.root())
}

fn assert_conflict(error: &Error, store: &dyn Store, key: &Key, present_bytes: usize) {
    let Error::Conflict { object, by } = error else { panic!("{error}") };
    assert_eq!(*object, full_name(store, key));
    assert_eq!(*by, format!("{} bytes lie there", stored_bytes(store, present_bytes)));
}

/// What an object of this length takes.
fn stored_bytes(store: &dyn Store, length_bytes: usize) -> u64 {
    let is_encrypted = format!("{store:?}").starts_with("EncryptedStore");
    let length_bytes = length_bytes as u64;
    if is_encrypted { encrypted::stored_length_bytes(length_bytes) } else { length_bytes }
}

fn an_empty_store_lists_nothing_and_misses_everything(store: &Arc<dyn Store>) {
    for folder in [Folder::Root, Folder::Packs, Folder::Snapshots, Folder::Tags, Folder::Receipts] {
        assert_eq!(store.list(folder).unwrap(), []);
        let error = store.open(&key(folder, "absent")).unwrap_err();
        assert!(error.is_not_found(), "{error}");
    }
    assert!(store.get(&pack("absent"), 10).unwrap_err().is_not_found());
}

fn a_put_object_reads_back_whole_and_in_parts(store: &Arc<dyn Store>) {
    let bytes = pattern(1, 10_000);
    put(&**store, &pack("a"), &bytes);
    assert_eq!(names(&**store, Folder::Packs), ["a"]);
    assert_eq!(get(&**store, &pack("a")), bytes);

    let object = store.open(&pack("a")).unwrap();
    assert_eq!(object.length_bytes(), 10_000);
    object.will_read(100..9_000);
    let mut part = [0; 77];
    object.read_at(4_090, &mut part).unwrap();
    assert_eq!(part, bytes[4_090..4_167]);
    object.read_at(10_000, &mut []).unwrap();
}

fn a_staged_object_equals_its_appends(store: &Arc<dyn Store>) {
    for (name, length_bytes) in [("small", 5_000), ("block", 4 << 20), ("large", LARGE_BYTES)] {
        let bytes = pattern(length_bytes as u64, length_bytes);
        let mut staged = store.stage(&pack(name)).unwrap();
        assert_eq!(staged.position_bytes(), 0);
        staged.append(&bytes).unwrap();
        assert_eq!(staged.position_bytes(), length_bytes as u64);
        let published = staged.publish().unwrap();
        assert_eq!(published.length_bytes, length_bytes as u64);
        assert!(published.drain_seconds >= 0.0 && published.sync_seconds >= 0.0);
        assert_eq!(store.open(&pack(name)).unwrap().length_bytes(), length_bytes as u64);
        assert!(get(&**store, &pack(name)) == bytes, "{name} reads back differently");
    }
}

fn appends_of_odd_lengths_are_joined_without_a_gap(store: &Arc<dyn Store>) {
    let bytes = pattern(7, LARGE_BYTES);
    let mut staged = store.stage(&pack("odd")).unwrap();
    let mut rest = &bytes[..];
    for length_bytes in [0, 1, 4_095, 4_096, 4_097, 65_537, 1_048_583, (4 << 20) + 3].into_iter().cycle() {
        let (now, later) = rest.split_at(length_bytes.min(rest.len()));
        staged.append(now).unwrap();
        rest = later;
        assert_eq!(staged.position_bytes(), (bytes.len() - rest.len()) as u64);
        if rest.is_empty() {
            break;
        }
    }
    staged.publish().unwrap();
    assert!(get(&**store, &pack("odd")) == bytes);
}

fn an_empty_staged_write_publishes_an_empty_object(store: &Arc<dyn Store>) {
    let published = store.stage(&pack("empty")).unwrap().publish().unwrap();
    assert_eq!(published.length_bytes, 0);
    assert_eq!(get(&**store, &pack("empty")), b"");
}

fn staged_bytes_are_invisible_until_published(store: &Arc<dyn Store>) {
    let mut staged = store.stage(&pack("a")).unwrap();
    staged.append(&pattern(1, LARGE_BYTES)).unwrap();
    for folder in [Folder::Root, Folder::Packs, Folder::Snapshots, Folder::Tags, Folder::Receipts] {
        assert_eq!(store.list(folder).unwrap(), []);
    }
    assert!(store.open(&pack("a")).unwrap_err().is_not_found());
    staged.publish().unwrap();
    assert_eq!(names(&**store, Folder::Packs), ["a"]);
}

fn a_dropped_staged_write_leaves_nothing(store: &Arc<dyn Store>) {
    for length_bytes in [0, 10, LARGE_BYTES] {
        let mut staged = store.stage(&pack("a")).unwrap();
        staged.append(&pattern(1, length_bytes)).unwrap();
        drop(staged);
        assert_eq!(store.list(Folder::Packs).unwrap(), []);
        assert_eq!(store.sweep_staged().unwrap(), 0);
    }
}

fn a_staged_write_left_behind_is_swept_and_published_objects_are_not(store: &Arc<dyn Store>) {
    put(&**store, &pack("kept"), b"kept");
    let mut staged = store.stage(&pack("a")).unwrap();
    staged.append(b"left behind").unwrap();
    // As by a process that was killed.
    std::mem::forget(staged);
    assert!(store.sweep_staged().unwrap() <= 1);
    assert_eq!(store.sweep_staged().unwrap(), 0);
    assert_eq!(names(&**store, Folder::Packs), ["kept"]);
    publish(&**store, &pack("a"), b"again").unwrap();
    assert_eq!(get(&**store, &pack("a")), b"again");
}

fn publish_keeps_an_existing_object(store: &Arc<dyn Store>) {
    put(&**store, &pack("a"), b"first");
    let error = publish(&**store, &pack("a"), b"second one").unwrap_err();
    assert_conflict(&error, &**store, &pack("a"), 5);
    assert_eq!(get(&**store, &pack("a")), b"first");
    assert_eq!(store.sweep_staged().unwrap(), 0, "the loser's bytes are gone");
}

fn put_if_absent_keeps_an_existing_object(store: &Arc<dyn Store>) {
    let manifest = key(Folder::Snapshots, "7.json");
    put(&**store, &manifest, b"first");
    let error = store.put(&manifest, b"second one", PutMode::IfAbsent).unwrap_err();
    assert_conflict(&error, &**store, &manifest, 5);
    assert_eq!(get(&**store, &manifest), b"first");
    assert_eq!(store.sweep_staged().unwrap(), 0, "the loser's bytes are gone");
}

fn put_replace_swaps_the_object_and_open_handles_keep_the_old_bytes(store: &Arc<dyn Store>) {
    let tag = key(Folder::Tags, "best");
    store.put(&tag, b"old", PutMode::Replace).unwrap();
    let old = store.open(&tag).unwrap();
    store.put(&tag, b"newer", PutMode::Replace).unwrap();
    assert_eq!(get(&**store, &tag), b"newer");
    assert_eq!(names(&**store, Folder::Tags), ["best"]);
    assert_eq!(read(&*old), b"old");
}

/// Lets eight threads write the same key at the same moment; exactly one may win, and its bytes stay.
fn race(store: &Arc<dyn Store>, write: fn(&dyn Store, &Key, &[u8]) -> Result<(), Error>) {
    const WRITERS: u8 = 8;
    for round in 0..20 {
        let contested = pack(&format!("contested-{round}"));
        let start = Barrier::new(usize::from(WRITERS));
        let winners: Vec<u8> = thread::scope(|scope| {
            let threads: Vec<_> = (0..WRITERS)
                .map(|writer| {
                    let (start, contested) = (&start, &contested);
                    scope.spawn(move || {
                        start.wait();
                        let outcome = write(&**store, contested, &[writer; 100]);
                        if let Err(error) = &outcome {
                            assert_conflict(error, &**store, contested, 100);
                        }
                        outcome.is_ok().then_some(writer)
                    })
                })
                .collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(winners.len(), 1, "winners of round {round}: {winners:?}");
        assert_eq!(get(&**store, &contested), [winners[0]; 100]);
    }
    assert_eq!(store.sweep_staged().unwrap(), 0);
}

fn racing_puts_have_exactly_one_winner(store: &Arc<dyn Store>) {
    race(store, |store, key, bytes| store.put(key, bytes, PutMode::IfAbsent));
}

fn racing_publishes_have_exactly_one_winner(store: &Arc<dyn Store>) {
    race(store, publish);
}

fn a_reader_never_sees_a_mixture_while_an_object_is_replaced(store: &Arc<dyn Store>) {
    let tag = key(Folder::Tags, "latest");
    let value = |round: u8| vec![round; 1_000 + usize::from(round)];
    store.put(&tag, &value(0), PutMode::Replace).unwrap();
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for round in 1..=100 {
                store.put(&tag, &value(round), PutMode::Replace).unwrap();
            }
        });
        let mut newest = 0;
        while !writer.is_finished() {
            let bytes = get(&**store, &tag);
            assert_eq!(bytes, value(bytes[0]));
            assert!(bytes[0] >= newest, "an older object came back");
            newest = bytes[0];
        }
        writer.join().unwrap();
    });
    assert_eq!(get(&**store, &tag), value(100));
}

fn delete_removes_frees_and_forgives_absent_names(store: &Arc<dyn Store>) {
    for (name, length_bytes) in [("a", 100), ("b", 20), ("c", 3)] {
        put(&**store, &pack(name), &pattern(1, length_bytes));
    }
    let freed_bytes = store.delete(Folder::Packs, &["a".into(), "absent".into(), "b".into()]).unwrap();
    assert_eq!(freed_bytes, stored_bytes(&**store, 100) + stored_bytes(&**store, 20));
    assert_eq!(names(&**store, Folder::Packs), ["c"]);
    assert!(store.open(&pack("a")).unwrap_err().is_not_found());
    assert_eq!(store.delete(Folder::Packs, &["a".into()]).unwrap(), 0);
    assert_eq!(store.delete(Folder::Packs, &[]).unwrap(), 0);
    put(&**store, &pack("a"), b"the name is free again");
}

fn delete_takes_no_name_that_leaves_the_folder(store: &Arc<dyn Store>) {
    let marker = key(Folder::Root, "varvite.json");
    put(&**store, &marker, b"marker");
    put(&**store, &pack("a"), b"a");
    let error = store.delete(Folder::Packs, &["a".into(), "../varvite.json".into()]).unwrap_err();
    assert!(matches!(error, Error::InvalidInput { what, .. } if what == "object name `../varvite.json`"));
    assert_eq!(get(&**store, &marker), b"marker");
    assert_eq!(get(&**store, &pack("a")), b"a", "names are checked before anything is deleted");
}

fn an_open_handle_outlives_the_deletion(store: &Arc<dyn Store>) {
    let bytes = pattern(3, 100_000);
    put(&**store, &pack("a"), &bytes);
    let object = store.open(&pack("a")).unwrap();
    store.delete(Folder::Packs, &["a".into()]).unwrap();
    put(&**store, &pack("a"), b"another object under the same name");
    assert_eq!(read(&*object), bytes);
}

fn reading_past_the_end_is_corrupt_and_says_where(store: &Arc<dyn Store>) {
    put(&**store, &pack("a"), &[1; 10]);
    let object = store.open(&pack("a")).unwrap();
    for (offset_bytes, length_bytes) in [(0, 11), (10, 1), (5, 6), (u64::MAX, 1), (u64::MAX - 3, 8)] {
        let error = object.read_at(offset_bytes, &mut vec![0; length_bytes]).unwrap_err();
        let Error::Corrupt { object, offset_bytes: at, what, expected, found } = error else {
            panic!("{error}")
        };
        assert_eq!(object, full_name(&**store, &pack("a")));
        assert_eq!((at, what.as_str()), (offset_bytes, "length"));
        assert_eq!(expected, format!("{length_bytes} bytes from there on"));
        assert_eq!(found, "the end of the object at byte 10");
    }
}

fn get_refuses_an_object_over_the_limit(store: &Arc<dyn Store>) {
    put(&**store, &pack("a"), &[1; 10]);
    assert_eq!(store.get(&pack("a"), 10).unwrap(), [1; 10]);
    let error = store.get(&pack("a"), 9).unwrap_err();
    let Error::Corrupt { object, what, expected, found, .. } = error else { panic!("{error}") };
    assert_eq!(object, full_name(&**store, &pack("a")));
    let (limit, length) = (stored_bytes(&**store, 9), stored_bytes(&**store, 10));
    assert_eq!(
        [what, expected, found],
        ["length".to_owned(), format!("at most {limit} bytes"), length.to_string()]
    );
}

fn folders_are_apart(store: &Arc<dyn Store>) {
    for folder in [Folder::Root, Folder::Packs, Folder::Snapshots, Folder::Tags, Folder::Receipts] {
        put(&**store, &key(folder, "same"), folder.name().as_bytes());
    }
    store.delete(Folder::Snapshots, &["same".into()]).unwrap();
    for folder in [Folder::Root, Folder::Packs, Folder::Tags, Folder::Receipts] {
        assert_eq!(names(&**store, folder), ["same"]);
        assert_eq!(get(&**store, &key(folder, "same")), folder.name().as_bytes());
    }
    assert_eq!(store.list(Folder::Snapshots).unwrap(), []);
}

fn folders_can_be_created_again(store: &Arc<dyn Store>) {
    put(&**store, &pack("a"), b"a");
    store.create_folders().unwrap();
    assert_eq!(get(&**store, &pack("a")), b"a");
}

fn a_second_writer_is_told_who_holds_the_lock(store: &Arc<dyn Store>) {
    let held = store.lock("process 7 on host a").unwrap();
    let error = store.lock("process 8").unwrap_err();
    let Error::Locked { root, holder } = error else { panic!("{error}") };
    assert_eq!([root, holder], [store.root(), "process 7 on host a".to_owned()]);
    assert_eq!(store.list(Folder::Root).unwrap(), [], "the lock is no object");

    drop(held);
    let held = store.lock("me").unwrap();
    let error = store.lock("process 9").unwrap_err();
    assert!(
        matches!(error, Error::Locked { holder, .. } if holder == "me"),
        "nothing of a longer text is left"
    );
    drop(held);
}
