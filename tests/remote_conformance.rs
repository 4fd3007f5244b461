//! What every [`RemoteStore`] promises beyond [`Store`], one function a promise.

#![cfg(feature = "cloud")]
#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod common;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use common::{get, key, names, pack, pattern, put};
use varvite::error::{Error, Result};
use varvite::store::memory::MemoryStore;
use varvite::store::object::BucketStore;
use varvite::store::remote::{RemoteStore, Transfer, Upload};
use varvite::store::{Folder, Key, PutMode, ReadAt, Store};

/// Three parts of the shortest length that servers take, and a bit.
const LARGE_BYTES: usize = 3 * (5 << 20) + 12_345;

/// Runs each promise in memory and, where one is named, on a server.
macro_rules! conformance {
    ($($promise:ident)*) => {
        $(mod $promise {
            use super::*;

            #[test]
            fn bucket_in_memory() {
                super::$promise(&BucketStore::in_memory());
            }

            #[test]
            #[ignore = "needs a server: VARVITE_TEST_BUCKET_URL"]
            fn bucket_on_a_server() {
                super::$promise(&common::bucket::on_server());
            }
        })*
    };
}

conformance! {
    the_probe_finds_what_is_needed_and_leaves_nothing
    versions_are_the_same_wherever_they_are_told_and_change_with_the_bytes
    a_swap_has_exactly_one_winner
    a_swap_of_what_is_absent_is_a_conflict
    a_listing_tells_length_and_time
    an_upload_becomes_visible_when_it_is_completed
    an_upload_goes_on_where_it_was_dropped
    an_upload_of_one_part_meets_what_lies_there
    an_upload_that_was_ended_goes_on
    completing_twice_is_no_error
    an_aborted_upload_leaves_nothing
    an_upload_that_the_store_has_forgotten_is_not_found
    an_upload_of_one_part_that_has_gone_is_not_found
    a_deletion_in_time_forgives_absent_names
    an_upload_of_another_object_is_refused
    progress_is_told
    a_handle_gives_no_bytes_of_another_object
    ranges_read_ahead_are_the_same_bytes
    a_writer_needs_a_local_folder
}

/// An object in memory to send.
fn source(bytes: &[u8]) -> Box<dyn ReadAt> {
    let store = MemoryStore::new();
    put(&store, &pack("source"), bytes);
    store.open(&pack("source")).unwrap()
}

static NEVER: AtomicBool = AtomicBool::new(false);

fn transfer<'a>(cancelled: &'a AtomicBool, moved_bytes: &'a AtomicU64) -> Transfer<'a> {
    Transfer { cancelled, moved_bytes, limit_bytes_per_second: None }
}

/// Sends all parts; `after` is told of each.
fn send(
    store: &BucketStore,
    key: &Key,
    bytes: &[u8],
    upload: &mut Upload,
    after: &mut dyn FnMut(&Upload) -> Result<()>,
) -> Result<()> {
    let moved_bytes = AtomicU64::new(0);
    store.send_parts(key, &*source(bytes), upload, transfer(&NEVER, &moved_bytes), after)
}

/// Fails after the first part, as a process that is killed then.
fn send_one_part(store: &BucketStore, key: &Key, bytes: &[u8], upload: &mut Upload) {
    let mut kept = None;
    let error = send(store, key, bytes, upload, &mut |now| {
        kept = Some(now.clone());
        Err(Error::Interrupted)
    });
    assert!(matches!(error, Err(Error::Interrupted)));
    *upload = kept.unwrap();
    assert_eq!(sent_count(upload), 1);
}

fn sent_count(upload: &Upload) -> usize {
    upload.parts.iter().flatten().count()
}

fn the_probe_finds_what_is_needed_and_leaves_nothing(store: &BucketStore) {
    let found = store.probe().unwrap();
    assert!(found.put_if_absent && found.swap);
    for folder in
        [Folder::Root, Folder::Packs, Folder::Snapshots, Folder::Tags, Folder::Receipts, Folder::Uploads]
    {
        assert_eq!(store.list(folder).unwrap(), []);
    }
}

fn versions_are_the_same_wherever_they_are_told_and_change_with_the_bytes(store: &BucketStore) {
    let lease = key(Folder::Root, "lease.json");
    let first = store.swap(&lease, b"one", None).unwrap();
    assert_eq!(store.get_versioned(&lease, 100).unwrap(), (b"one".to_vec(), first.clone()));
    assert_eq!(store.list_versions(Folder::Root).unwrap()[0].version, first);
    let second = store.swap(&lease, b"two", Some(&first)).unwrap();
    assert_ne!(first, second);
    assert_eq!(store.get_versioned(&lease, 3).unwrap(), (b"two".to_vec(), second.clone()));
    assert_eq!(store.list_versions(Folder::Root).unwrap()[0].version, second);
    store.put(&lease, b"three", PutMode::Replace).unwrap();
    assert_ne!(store.list_versions(Folder::Root).unwrap()[0].version, second);
    assert!(matches!(store.get_versioned(&lease, 4), Err(Error::Corrupt { .. })));
}

fn a_swap_has_exactly_one_winner(store: &BucketStore) {
    const WRITERS: u8 = 8;
    let lease = key(Folder::Root, "lease.json");
    let mut version = store.swap(&lease, b"start", None).unwrap();
    for round in 0..10_u8 {
        let start = Barrier::new(usize::from(WRITERS));
        let winners: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..WRITERS)
                .map(|writer| {
                    let (start, lease, version) = (&start, &lease, &version);
                    scope.spawn(move || {
                        start.wait();
                        match store.swap(lease, &[round, writer], Some(version)) {
                            Ok(version) => Some((writer, version)),
                            Err(Error::Conflict { object, .. }) => {
                                assert_eq!(object, format!("{}/lease.json", store.root()));
                                None
                            }
                            Err(error) => panic!("{}", error.chain()),
                        }
                    })
                })
                .collect();
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(winners.len(), 1, "winners of round {round}");
        let (writer, won) = &winners[0];
        assert_eq!(store.get_versioned(&lease, 2).unwrap(), (vec![round, *writer], won.clone()));
        version = won.clone();
    }
}

fn a_swap_of_what_is_absent_is_a_conflict(store: &BucketStore) {
    let lease = key(Folder::Root, "lease.json");
    let version = store.swap(&lease, b"one", None).unwrap();
    assert!(matches!(store.swap(&lease, b"two", None), Err(Error::Conflict { .. })));
    store.delete(Folder::Root, &["lease.json".to_owned()]).unwrap();
    assert!(matches!(store.swap(&lease, b"two", Some(&version)), Err(Error::Conflict { .. })));
    assert_eq!(names(store, Folder::Root), [""; 0]);
}

fn a_listing_tells_length_and_time(store: &BucketStore) {
    for (name, length_bytes) in [("a", 0), ("b", 1), ("c", 1_000)] {
        put(store, &pack(name), &pattern(1, length_bytes));
    }
    let mut rows = store.list_versions(Folder::Packs).unwrap();
    rows.sort_by(|left, right| left.name.cmp(&right.name));
    let told: Vec<_> = rows.iter().map(|row| (row.name.as_str(), row.length_bytes)).collect();
    assert_eq!(told, [("a", 0), ("b", 1), ("c", 1_000)]);
    // After 2020: a moment, and in milliseconds.
    assert!(rows.iter().all(|row| row.modified_unix_ms > 1_577_836_800_000));
}

fn an_upload_becomes_visible_when_it_is_completed(store: &BucketStore) {
    for (name, length_bytes) in [("empty", 0), ("small", 1_000), ("large", LARGE_BYTES)] {
        let bytes = pattern(length_bytes as u64, length_bytes);
        let mut upload = store.begin_upload(&pack(name), length_bytes as u64).unwrap();
        send(store, &pack(name), &bytes, &mut upload, &mut |_| Ok(())).unwrap();
        if upload.parts.len() > 1 {
            assert!(store.open(&pack(name)).unwrap_err().is_not_found());
        }
        let version = store.complete_upload(&pack(name), &upload).unwrap();
        let rows = store.list_versions(Folder::Packs).unwrap();
        let row = rows.iter().find(|row| row.name == name).unwrap();
        assert_eq!((row.length_bytes, &row.version), (length_bytes as u64, &version));
        assert!(get(store, &pack(name)) == bytes, "{name} reads back differently");
    }
}

fn an_upload_goes_on_where_it_was_dropped(store: &BucketStore) {
    let bytes = pattern(5, LARGE_BYTES);
    let mut upload = store.begin_upload(&pack("a"), LARGE_BYTES as u64).unwrap();
    let count = upload.parts.len();
    assert!(count >= 4);
    send_one_part(store, &pack("a"), &bytes, &mut upload);
    // Through the disk, as the journal keeps it.
    let text = serde_json::to_string(&upload).unwrap();
    let mut upload: Upload = serde_json::from_str(&text).unwrap();
    let mut told = 0;
    send(store, &pack("a"), &bytes, &mut upload, &mut |_| {
        told += 1;
        Ok(())
    })
    .unwrap();
    assert_eq!(told, count - 1, "what was sent is not sent again");
    store.complete_upload(&pack("a"), &upload).unwrap();
    assert!(get(store, &pack("a")) == bytes);
}

fn an_upload_of_one_part_meets_what_lies_there(store: &BucketStore) {
    put(store, &pack("a"), b"bytes");
    let mut upload = store.begin_upload(&pack("a"), 5).unwrap();
    send(store, &pack("a"), b"bytes", &mut upload, &mut |_| Ok(())).unwrap();
    store.complete_upload(&pack("a"), &upload).unwrap();
    let mut upload = store.begin_upload(&pack("a"), 5).unwrap();
    let error = send(store, &pack("a"), b"other", &mut upload, &mut |_| Ok(())).unwrap_err();
    assert!(matches!(error, Error::Conflict { by, .. } if by == "5 bytes lie there"));
    assert_eq!(get(store, &pack("a")), b"bytes");
}

fn an_upload_that_was_ended_goes_on(store: &BucketStore) {
    let bytes = pattern(6, LARGE_BYTES);
    let (ended, moved_bytes) = (AtomicBool::new(true), AtomicU64::new(0));
    let mut upload = store.begin_upload(&pack("a"), LARGE_BYTES as u64).unwrap();
    let outcome = store.send_parts(
        &pack("a"),
        &*source(&bytes),
        &mut upload,
        transfer(&ended, &moved_bytes),
        &mut |_| Ok(()),
    );
    assert!(matches!(outcome, Err(Error::Interrupted)));
    assert!(matches!(store.complete_upload(&pack("a"), &upload), Err(Error::InvalidInput { .. })));
    send(store, &pack("a"), &bytes, &mut upload, &mut |_| Ok(())).unwrap();
    store.complete_upload(&pack("a"), &upload).unwrap();
    assert!(get(store, &pack("a")) == bytes);
}

fn completing_twice_is_no_error(store: &BucketStore) {
    for length_bytes in [10, LARGE_BYTES] {
        let name = pack(&format!("of-{length_bytes}"));
        let mut upload = store.begin_upload(&name, length_bytes as u64).unwrap();
        send(store, &name, &pattern(1, length_bytes), &mut upload, &mut |_| Ok(())).unwrap();
        let version = store.complete_upload(&name, &upload).unwrap();
        assert_eq!(store.complete_upload(&name, &upload).unwrap(), version);
    }
    let other = pack("other");
    let mut upload = store.begin_upload(&other, LARGE_BYTES as u64).unwrap();
    send(store, &other, &pattern(2, LARGE_BYTES), &mut upload, &mut |_| Ok(())).unwrap();
    put(store, &other, b"another object");
    let error = store.complete_upload(&other, &upload).unwrap_err();
    assert!(matches!(error, Error::Conflict { by, .. } if by == "14 bytes lie there"));
    assert_eq!(get(store, &other), b"another object");
    store.abort_upload(&other, &upload).unwrap();
}

fn an_aborted_upload_leaves_nothing(store: &BucketStore) {
    for length_bytes in [10, LARGE_BYTES] {
        let mut upload = store.begin_upload(&pack("a"), length_bytes as u64).unwrap();
        if length_bytes == LARGE_BYTES {
            send_one_part(store, &pack("a"), &pattern(1, length_bytes), &mut upload);
        }
        store.abort_upload(&pack("a"), &upload).unwrap();
        store.abort_upload(&pack("a"), &upload).unwrap();
        for folder in [Folder::Packs, Folder::Uploads] {
            assert_eq!(names(store, folder), [""; 0]);
        }
    }
}

fn an_upload_that_the_store_has_forgotten_is_not_found(store: &BucketStore) {
    let bytes = pattern(1, LARGE_BYTES);
    let mut upload = store.begin_upload(&pack("a"), LARGE_BYTES as u64).unwrap();
    store.abort_upload(&pack("a"), &upload).unwrap();
    let error = send(store, &pack("a"), &bytes, &mut upload, &mut |_| Ok(())).unwrap_err();
    assert!(error.is_not_found(), "{}", error.chain());
    upload.parts.fill(Some("\"0123456789abcdef0123456789abcdef\"".to_owned()));
    let error = store.complete_upload(&pack("a"), &upload).unwrap_err();
    assert!(error.is_not_found(), "{}", error.chain());
}

fn an_upload_of_one_part_that_has_gone_is_not_found(store: &BucketStore) {
    let bytes = pattern(1, 1_000);
    let mut upload = store.begin_upload(&pack("a"), 1_000).unwrap();
    send(store, &pack("a"), &bytes, &mut upload, &mut |_| Ok(())).unwrap();
    // Once more, after a crash: nothing is to be sent.
    send(store, &pack("a"), &bytes, &mut upload, &mut |_| Ok(())).unwrap();
    store.delete(Folder::Packs, &["a".to_owned()]).unwrap();
    let error = send(store, &pack("a"), &bytes, &mut upload, &mut |_| Ok(())).unwrap_err();
    assert!(error.is_not_found(), "{}", error.chain());
}

fn a_deletion_in_time_forgives_absent_names(store: &BucketStore) {
    put(store, &pack("a"), b"1");
    put(store, &pack("b"), b"2");
    let doomed = ["a".to_owned(), "absent".to_owned()];
    store.delete_within(Folder::Packs, &doomed, Duration::from_secs(30)).unwrap();
    assert_eq!(names(store, Folder::Packs), ["b"]);
}

fn an_upload_of_another_object_is_refused(store: &BucketStore) {
    let mut upload = store.begin_upload(&pack("a"), 10).unwrap();
    let error = send(store, &pack("a"), b"eleven byte", &mut upload, &mut |_| Ok(())).unwrap_err();
    assert!(
        matches!(error, Error::InvalidInput { reason, .. } if reason == "is of 10 bytes, but there are 11")
    );
    assert_eq!(names(store, Folder::Packs), [""; 0]);
}

fn progress_is_told(store: &BucketStore) {
    let (moved_bytes, bytes) = (AtomicU64::new(7), pattern(1, LARGE_BYTES));
    let mut upload = store.begin_upload(&pack("a"), LARGE_BYTES as u64).unwrap();
    let told = transfer(&NEVER, &moved_bytes);
    store.send_parts(&pack("a"), &*source(&bytes), &mut upload, told, &mut |_| Ok(())).unwrap();
    // At least once each; more where a server made us send one again.
    assert!(moved_bytes.load(Ordering::Relaxed) >= 7 + LARGE_BYTES as u64);
    store.abort_upload(&pack("a"), &upload).unwrap();
}

fn a_handle_gives_no_bytes_of_another_object(store: &BucketStore) {
    for another in [None, Some(pattern(4, 200_000))] {
        put(store, &pack("a"), &pattern(3, 200_000));
        let object = store.open(&pack("a")).unwrap();
        store.delete(Folder::Packs, &["a".into()]).unwrap();
        if let Some(bytes) = &another {
            put(store, &pack("a"), bytes);
        }
        let error = object.read_at(0, &mut [0; 1_000]).unwrap_err();
        assert!(error.is_not_found(), "{}", error.chain());
        store.delete(Folder::Packs, &["a".into()]).unwrap();
    }
}

fn ranges_read_ahead_are_the_same_bytes(store: &BucketStore) {
    let bytes = pattern(9, 2_000_000);
    put(store, &pack("a"), &bytes);
    let object = store.open(&pack("a")).unwrap();
    for start in (0..2_000_000_u64).step_by(250_000) {
        object.will_read(start..start + 250_000);
    }
    object.will_read(1_999_000..u64::MAX);
    for start in (0..2_000_000_usize).step_by(125_000) {
        let mut part = vec![0; 125_000];
        object.read_at(start as u64, &mut part).unwrap();
        assert!(part == bytes[start..start + 125_000], "at {start}");
    }
    // Hints that nobody follows are let go.
    object.will_read(0..500_000);
    drop(object);
    let object = store.open(&pack("a")).unwrap();
    let mut part = vec![0; 600_000];
    object.read_at(300_000, &mut part).unwrap();
    assert!(part == bytes[300_000..900_000]);
}

fn a_writer_needs_a_local_folder(store: &BucketStore) {
    let error = store.lock("me").unwrap_err();
    assert!(
        matches!(error, Error::InvalidInput { reason, .. } if reason.starts_with("a bucket has no lock"))
    );
}
