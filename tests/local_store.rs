//! The promises of the local store alone: odd files, foreign names, read-only, what lies in `tmp/`.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test that can't go on fails; files are laid by hand"
)]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode as FileMode};

use common::{get, key, names, pack, pattern, publish, put};
use tempfile::TempDir;
use varvite::error::Error;
use varvite::store::local::{LocalOptions, LocalStore};
use varvite::store::{Folder, PutMode, Store};

/// Long enough that threads write it.
const LARGE_BYTES: usize = 3 * (4 << 20) + 1;

fn open(root: &Path, read_only: bool) -> LocalStore {
    LocalStore::open(root, LocalOptions { sync: true, read_only }).unwrap()
}

/// A store whose folders are there, and its root.
fn created() -> (TempDir, LocalStore) {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path(), false);
    store.create_folders().unwrap();
    (folder, store)
}

fn staged_count(root: &TempDir) -> usize {
    fs::read_dir(root.path().join("tmp")).unwrap().count()
}

#[test]
fn a_missing_root_is_an_empty_store_until_its_folders_are_made() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("not/yet/there");
    let store = open(&root, false);
    for folder in [Folder::Root, Folder::Packs] {
        assert_eq!(store.list(folder).unwrap(), []);
        assert!(store.get(&key(folder, "a"), 1).unwrap_err().is_not_found());
    }
    assert_eq!(store.delete(Folder::Packs, &["a".into()]).unwrap(), 0);
    assert_eq!(store.sweep_staged().unwrap(), 0);
    store.sync_folder(Folder::Packs).unwrap();
    assert_eq!(store.free_bytes(), None);
    assert!(!root.exists(), "reading makes nothing");

    store.create_folders().unwrap();
    for name in ["packs", "snapshots", "tags", "receipts", "tmp"] {
        assert!(root.join(name).is_dir());
    }
    assert!(store.free_bytes().unwrap() > 0);
}

#[test]
fn a_root_that_is_a_file_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("file");
    fs::write(&root, b"").unwrap();
    let error = open(&root, false).create_folders().unwrap_err();
    let Error::Store { operation, object, .. } = error else { panic!("{error}") };
    assert_eq!([operation, object.as_str()], ["make folder", root.to_str().unwrap()]);
    assert!(matches!(open(&root, true).list(Folder::Packs), Err(Error::Store { operation: "list", .. })));
}

#[test]
fn a_relative_root_becomes_absolute_when_opened() {
    let store = open(Path::new("some/root"), true);
    let root = std::env::current_dir().unwrap().join("some/root");
    assert_eq!(store.root(), root.to_str().unwrap());
    assert_eq!(store.local_path(&pack("a")).unwrap(), root.join("packs/a"));
}

#[test]
fn foreign_names_are_not_listed() {
    let (root, store) = created();
    put(&store, &key(Folder::Root, "varvite.json"), b"{}");
    put(&store, &key(Folder::Snapshots, "1.json"), b"{}");
    drop(store.lock("me").unwrap());
    for folder in [root.path().to_owned(), root.path().join("snapshots")] {
        fs::create_dir(folder.join("subfolder")).unwrap();
        for name in [".hidden", "a b", "n\u{e4}me", "new\nline", &"x".repeat(201)] {
            fs::write(folder.join(name), b"").unwrap();
        }
    }
    symlink("elsewhere", root.path().join("link")).unwrap();
    symlink("elsewhere", root.path().join("snapshots/2.json")).unwrap();
    assert_eq!(names(&store, Folder::Root), ["varvite.json"]);
    // A link under an object's name is shown, so that it is refused and not overlooked.
    assert_eq!(names(&store, Folder::Snapshots), ["1.json", "2.json"]);
}

#[test]
fn what_is_no_regular_file_is_refused_by_its_kind() {
    let (root, store) = created();
    let path = |name: &str| root.path().join("packs").join(name);
    fs::write(root.path().join("secret"), b"secret").unwrap();
    symlink(root.path().join("secret"), path("link")).unwrap();
    symlink("nowhere", path("dangling")).unwrap();
    fs::create_dir(path("folder")).unwrap();
    rustix::fs::mknodat(CWD, path("pipe"), FileType::Fifo, FileMode::RUSR, 0).unwrap();
    let _socket = UnixListener::bind(path("socket")).unwrap();
    for (name, kind) in [
        ("link", "a symbolic link"),
        ("dangling", "a symbolic link"),
        ("folder", "a folder"),
        ("pipe", "a named pipe"),
        ("socket", "a socket"),
    ] {
        let error = store.open(&pack(name)).unwrap_err();
        let Error::Corrupt { object, what, expected, found, .. } = error else { panic!("{error}") };
        assert_eq!(object, path(name).to_str().unwrap());
        assert_eq!([what, expected, found], ["object", "a regular file", kind]);
        let error = store.put(&pack(name), b"", PutMode::IfAbsent).unwrap_err();
        assert!(matches!(error, Error::Conflict { by, .. } if by == format!("{kind} lies there")));
    }
    assert_eq!(staged_count(&root), 0);
}

#[test]
fn replacing_or_deleting_a_link_leaves_its_target_alone() {
    let (root, store) = created();
    let secret = root.path().join("secret");
    fs::write(&secret, b"secret").unwrap();
    for name in ["a", "b"] {
        symlink(&secret, root.path().join("tags").join(name)).unwrap();
    }
    store.put(&key(Folder::Tags, "a"), b"tag", PutMode::Replace).unwrap();
    assert_eq!(get(&store, &key(Folder::Tags, "a")), b"tag");
    assert_eq!(store.delete(Folder::Tags, &["b".into()]).unwrap(), 0);
    assert_eq!(fs::read(&secret).unwrap(), b"secret");
}

#[test]
fn staged_files_lie_in_tmp_only_while_they_are_written() {
    let (root, store) = created();
    let mut staged = store.stage(&pack("a")).unwrap();
    staged.append(&pattern(1, LARGE_BYTES)).unwrap();
    let entry = fs::read_dir(root.path().join("tmp")).unwrap().next().unwrap().unwrap();
    let name = entry.file_name().into_string().unwrap();
    assert!(name.starts_with(&format!("{}-", std::process::id())) && name.ends_with("-a"), "{name}");
    staged.publish().unwrap();
    assert_eq!(staged_count(&root), 0);

    std::mem::forget(store.stage(&pack("b")).unwrap());
    fs::write(root.path().join("tmp/of another process"), b"").unwrap();
    assert_eq!(store.sweep_staged().unwrap(), 2);
    assert_eq!(staged_count(&root), 0);
}

#[test]
fn objects_have_the_mode_that_the_umask_leaves() {
    let (root, store) = created();
    fs::write(root.path().join("plain"), b"").unwrap();
    let plain = fs::metadata(root.path().join("plain")).unwrap().mode();
    put(&store, &pack("put"), b"");
    publish(&store, &pack("staged"), b"").unwrap();
    for name in ["put", "staged"] {
        assert_eq!(fs::metadata(store.local_path(&pack(name)).unwrap()).unwrap().mode(), plain);
    }
}

#[test]
fn a_read_only_store_reads_and_refuses_every_verb_that_writes() {
    let (root, store) = created();
    put(&store, &pack("a"), b"a");
    fs::write(root.path().join("tmp/litter"), b"").unwrap();
    let reader = open(root.path(), true);
    assert_eq!(get(&reader, &pack("a")), b"a");
    assert_eq!(names(&reader, Folder::Packs), ["a"]);
    let refusals = [
        reader.create_folders().unwrap_err(),
        reader.put(&pack("b"), b"", PutMode::Replace).unwrap_err(),
        reader.stage(&pack("b")).unwrap_err(),
        reader.delete(Folder::Packs, &["a".into()]).unwrap_err(),
        reader.sweep_staged().unwrap_err(),
        reader.lock("me").unwrap_err(),
    ];
    for error in refusals {
        let Error::InvalidInput { what, .. } = error else { panic!("{error}") };
        assert!(what.ends_with("to a repository opened read-only"), "{what}");
    }
    assert_eq!(names(&store, Folder::Packs), ["a"]);
    assert_eq!(staged_count(&root), 1);
    assert!(!root.path().join("writer.lock").exists());
}

#[test]
fn the_lock_file_stays_and_two_openings_exclude_each_other() {
    let (root, store) = created();
    let held = store.lock("first").unwrap();
    let error = open(root.path(), false).lock("second").unwrap_err();
    assert!(matches!(error, Error::Locked { holder, .. } if holder == "first"));
    drop(held);
    assert!(root.path().join("writer.lock").is_file());
    drop(open(root.path(), false).lock("second").unwrap());
}
