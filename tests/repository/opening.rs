//! Who may open what, what a handle sees of others, and damage found at open.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use varvite::error::{Error, Result};
use varvite::format::marker::Marker;
use varvite::repository::{Access, Options, Repository};
use varvite::retain::Rule;
use varvite::store::local::{LocalOptions, LocalStore};
use varvite::store::memory::MemoryStore;
use varvite::store::{Folder, Key, Listed, PutMode, ReadAt, StagedWrite, Store, WriterLock};

use crate::common::oracle::check_leftovers;
use crate::common::training::{load, open, open_to_read, options, save, state_at};
use crate::common::{get, key, names};
use crate::tensors::flip;

fn marker() -> Key {
    key(Folder::Root, "varvite.json")
}

fn saved(steps: std::ops::RangeInclusive<u64>) -> MemoryStore {
    let store = MemoryStore::new();
    let repository = open(Arc::new(store.clone()), Vec::new()).unwrap();
    for step in steps {
        save(&repository, step).unwrap();
    }
    store
}

#[test]
fn a_second_writer_is_told_who_holds_the_lock_until_the_first_closes() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let first = open(Arc::clone(&store), Vec::new()).unwrap();
    let error = open(Arc::clone(&store), Vec::new()).unwrap_err();
    let process = format!("process {}", std::process::id());
    assert!(matches!(&error, Error::Locked { holder, .. } if holder.starts_with(&process)), "{error:?}");
    first.close();
    let second = open(Arc::clone(&store), Vec::new()).unwrap();
    save(&second, 1).unwrap();
    let error = save(&first, 2).unwrap_err();
    assert!(matches!(&error, Error::InvalidInput { reason, .. } if reason.contains("closed")), "{error:?}");
    drop(second);
    open(store, Vec::new()).unwrap();
}

/// A store whose lock does not exclude, as on some network file systems.
#[derive(Debug)]
struct Lockless {
    inner: MemoryStore,
}

#[derive(Debug)]
struct NoLock;

impl WriterLock for NoLock {
    fn abandon(self: Box<Self>) {}
}

impl Store for Lockless {
    fn lock(&self, _holder: &str) -> Result<Box<dyn WriterLock>> {
        Ok(Box::new(NoLock))
    }

    fn root(&self) -> String {
        self.inner.root()
    }

    fn create_folders(&self) -> Result<()> {
        self.inner.create_folders()
    }

    fn list(&self, folder: Folder) -> Result<Vec<Listed>> {
        self.inner.list(folder)
    }

    fn open(&self, key: &Key) -> Result<Box<dyn ReadAt>> {
        self.inner.open(key)
    }

    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>> {
        self.inner.stage(key)
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.inner.put(key, bytes, mode)
    }

    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        self.inner.delete(folder, names)
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        self.inner.sync_folder(folder)
    }

    fn sweep_staged(&self) -> Result<u64> {
        self.inner.sweep_staged()
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn local_path(&self, _key: &Key) -> Option<std::path::PathBuf> {
        None
    }
}

#[test]
fn of_two_writers_without_a_lock_one_wins_each_number_and_nothing_is_lost() {
    let store = MemoryStore::new();
    let writer = || {
        let lockless = Arc::new(Lockless { inner: store.clone() });
        open(lockless, vec![Rule::Last { count: 10 }]).unwrap()
    };
    let (first, second) = (writer(), writer());
    for step in 1..=3 {
        save(&first, step).unwrap();
    }
    let error = save(&second, 20).unwrap_err();
    assert!(
        matches!(&error, Error::Conflict { by, .. } if by.starts_with("session ") && by.ends_with(" at step 1")),
        "{error:?}"
    );
    assert_eq!(names(&store, Folder::Packs).len(), 3, "the loser's pack is gone");
    // It has learned of the others, and takes the next free number.
    let report = save(&second, 21).unwrap();
    assert_eq!(report.header.seq, 4);
    save(&first, 22).unwrap_err();
    let report = save(&first, 23).unwrap();
    assert_eq!(report.header.seq, 5);
    let steps: BTreeMap<u64, u64> =
        first.list().unwrap().headers.iter().map(|header| (header.seq, header.step)).collect();
    assert_eq!(steps, BTreeMap::from([(1, 1), (2, 2), (3, 3), (4, 21), (5, 23)]));
    for (seq, step) in steps {
        assert_eq!(load(&first, seq).unwrap(), state_at(step));
    }
    check_leftovers(&first, 0).unwrap();
}

#[test]
fn a_damaged_newest_manifest_is_named_and_skipped_only_by_who_chooses_to() {
    let store = saved(1..=3);
    flip(&store, &key(Folder::Snapshots, "3.json"), 200);
    let repository = open_to_read(Arc::new(store)).unwrap();
    let listed = repository.list().unwrap();
    assert_eq!(listed.headers.iter().map(|header| header.seq).collect::<Vec<_>>(), [1, 2]);
    assert!(
        matches!(&listed.damaged[..], [(3, why)] if why.contains("snapshots/3.json")),
        "{:?}",
        listed.damaged
    );
    assert_eq!(repository.candidates().unwrap(), [3, 2, 1]);
    for reference in ["latest", "seq:3"] {
        assert_eq!(repository.resolve(reference).unwrap(), 3);
    }
    assert!(matches!(repository.snapshot(3), Err(Error::Corrupt { .. })));
    assert_eq!(load(&repository, 2).unwrap(), state_at(2));
    let findings = repository.verify(None, 1.0, &false.into()).unwrap().findings;
    assert_eq!(findings.iter().map(|found| found.object.as_str()).collect::<Vec<_>>(), ["snapshots/3.json"]);
}

#[test]
fn a_manifest_under_another_number_is_damage() {
    let store = saved(1..=2);
    let bytes = get(&store, &key(Folder::Snapshots, "1.json"));
    store.put(&key(Folder::Snapshots, "7.json"), &bytes, PutMode::IfAbsent).unwrap();
    let repository = open_to_read(Arc::new(store)).unwrap();
    assert_eq!(repository.list().unwrap().damaged.len(), 1);
    for error in [repository.snapshot(7).unwrap_err(), repository.header(7).unwrap_err()] {
        assert!(
            matches!(&error, Error::Corrupt { what, expected, found, .. } if what == "seq" && expected == "7" && found == "1"),
            "{error:?}"
        );
    }
}

#[test]
fn a_damaged_or_missing_marker_is_rebuilt_by_a_writer_and_left_by_a_reader() {
    for missing in [false, true] {
        let store = saved(1..=2);
        let whole = get(&store, &marker());
        if missing {
            store.delete(Folder::Root, &["varvite.json".to_owned()]).unwrap();
        } else {
            flip(&store, &marker(), 10);
        }
        let damaged = store.get(&marker(), 1_000).ok();
        let reader = open_to_read(Arc::new(store.clone())).unwrap();
        assert_eq!(load(&reader, 2).unwrap(), state_at(2));
        assert_eq!(store.get(&marker(), 1_000).ok(), damaged);
        let opened = open(Arc::new(store.clone()), Vec::new());
        if missing {
            // The folder has packs and manifests, but no file in its root: it is still ours.
            assert_eq!(opened.unwrap().repository_id(), reader.repository_id());
        } else {
            opened.unwrap();
        }
        assert_eq!(get(&store, &marker()), whole);
    }
}

#[test]
fn a_damaged_marker_without_any_manifest_is_an_error() {
    let store = MemoryStore::new();
    drop(open(Arc::new(store.clone()), Vec::new()).unwrap());
    flip(&store, &marker(), 10);
    let error = open(Arc::new(store), Vec::new()).unwrap_err();
    assert!(matches!(&error, Error::Corrupt { object, .. } if object == "varvite.json"), "{error:?}");
}

#[test]
fn a_marker_of_a_newer_version_is_refused_and_stays() {
    let store = saved(1..=1);
    let mine = Marker::decode(&get(&store, &marker())).unwrap();
    for (newer, reader_too) in [
        (Marker { format_version: 2, ..mine.clone() }, true),
        (Marker { reader_flags: 1 << 9, ..mine.clone() }, true),
        (Marker { writer_flags: 1 << 9, ..mine.clone() }, false),
    ] {
        let bytes = newer.encode().unwrap();
        store.put(&marker(), &bytes, PutMode::Replace).unwrap();
        let error = open(Arc::new(store.clone()), Vec::new()).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { object, .. } if object == "varvite.json"), "{error:?}");
        let read = open_to_read(Arc::new(store.clone()));
        assert_eq!(matches!(read, Err(Error::Unsupported { .. })), reader_too);
        assert_eq!(get(&store, &marker()), bytes);
    }
    // The refusal let go of the lock.
    store.put(&marker(), &mine.encode().unwrap(), PutMode::Replace).unwrap();
    open(Arc::new(store), Vec::new()).unwrap();
}

#[test]
fn a_folder_of_another_program_is_refused_and_left_alone() {
    let store = MemoryStore::new();
    store.put(&key(Folder::Root, "notes.txt"), b"mine", PutMode::IfAbsent).unwrap();
    let error = open(Arc::new(store.clone()), Vec::new()).unwrap_err();
    assert!(
        matches!(&error, Error::NotARepository { reason, .. } if reason.contains("notes.txt")),
        "{error:?}"
    );
    assert_eq!(names(&store, Folder::Root), ["notes.txt"]);
}

#[test]
fn a_place_without_a_repository_is_none_for_a_reader() {
    let error = open_to_read(Arc::new(MemoryStore::new())).unwrap_err();
    assert!(
        matches!(&error, Error::NotARepository { reason, .. } if reason.contains("varvite.json")),
        "{error:?}"
    );
}

/// Path, length, inode and time of change of everything below a folder.
#[expect(clippy::disallowed_methods, reason = "looks at files as another program would")]
fn photograph(folder: &Path) -> BTreeMap<String, (u64, u64, i64, i64)> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let facts = std::fs::metadata(&path).unwrap();
        let row = (facts.len(), facts.ino(), facts.mtime(), facts.mtime_nsec());
        found.insert(path.to_str().unwrap().to_owned(), row);
        if path.is_dir() {
            found.extend(photograph(&path));
        }
    }
    found
}

#[test]
fn a_reader_changes_no_file_and_sees_what_the_writer_adds_and_removes() {
    let folder = tempfile::tempdir().unwrap();
    let store = |read_only| -> Arc<dyn Store> {
        Arc::new(LocalStore::open(folder.path(), LocalOptions { sync: false, read_only }).unwrap())
    };
    let writer = open(store(false), Vec::new()).unwrap();
    save(&writer, 1).unwrap();
    // Leftovers of a crash: not a reader's business.
    #[expect(clippy::disallowed_methods, reason = "lays a file by hand")]
    std::fs::write(folder.path().join("tmp/1-0-left"), b"left").unwrap();

    let before = photograph(folder.path());
    let reader = open_to_read(store(true)).unwrap();
    assert_eq!(load(&reader, 1).unwrap(), state_at(1));
    assert_eq!(reader.resolve("latest").unwrap(), 1);
    assert_eq!(reader.verify(None, 1.0, &false.into()).unwrap().findings, []);
    assert_eq!(reader.prune(true).unwrap().1, 0);
    assert_eq!(photograph(folder.path()), before);

    save(&writer, 2).unwrap();
    save(&writer, 3).unwrap();
    writer.delete(1).unwrap();
    assert_eq!(reader.candidates().unwrap(), [3, 2]);
    assert_eq!(reader.list().unwrap().headers.len(), 2);
    assert_eq!(reader.resolve("latest").unwrap(), 3);
    assert_eq!(load(&reader, 3).unwrap(), state_at(3));
    assert!(matches!(load(&reader, 1), Err(Error::SnapshotNotFound { .. })));
    assert!(matches!(reader.header(1), Err(Error::SnapshotNotFound { .. })));
}

#[test]
fn options_that_make_no_sense_are_refused_by_name() {
    let refused = |options: Options| {
        let error = Repository::open(Arc::new(MemoryStore::new()), options).unwrap_err();
        let Error::InvalidInput { what, .. } = error else { panic!("{error:?}") };
        what
    };
    for chunk_bytes in [0, 1, 5_000, 2_048, 128 << 20] {
        assert_eq!(
            refused(Options { chunk_bytes, ..Options::default() }),
            format!("chunk_bytes {chunk_bytes}")
        );
    }
    assert_eq!(refused(Options { rank: 2, world_size: 2, ..Options::default() }), "rank 2");
    assert_eq!(refused(Options { world_size: 0, ..Options::default() }), "rank 0");
}

#[test]
fn every_access_but_writing_leaves_the_lock_to_others() {
    let store = saved(1..=1);
    let readers: Vec<Repository> = [Access::Read, Access::Tag]
        .into_iter()
        .map(|access| {
            Repository::open(Arc::new(store.clone()), Options { access, ..options(Vec::new()) }).unwrap()
        })
        .collect();
    let writer = open(Arc::new(store), Vec::new()).unwrap();
    save(&writer, 2).unwrap();
    for reader in readers {
        assert_eq!(reader.candidates().unwrap(), [2, 1]);
    }
}

#[test]
fn threads_that_save_and_read_one_repository_see_whole_snapshots() {
    let store = MemoryStore::new();
    let repository = open(Arc::new(store), vec![Rule::Last { count: 2 }]).unwrap();
    save(&repository, 0).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let saved: Result<Vec<_>> = (1..=40).map(|step| save(&repository, step)).collect();
            done.store(true, Ordering::Relaxed);
            saved.unwrap();
        });
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let newest = repository.resolve("latest").unwrap();
                    match load(&repository, newest) {
                        Ok(state) => assert_eq!(state, state_at(newest - 1)),
                        // Deleted between the two calls: the reader asks again.
                        Err(Error::SnapshotNotFound { .. }) => {}
                        Err(error) => panic!("{error:?}"),
                    }
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
    });
    save(&repository, 41).unwrap();
    check_leftovers(&repository, 0).unwrap();
}
