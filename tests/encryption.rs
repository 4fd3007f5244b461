//! What an encrypted repository promises: with the key everything is as without encryption, and without it
//! nobody learns or changes anything unseen.

#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod common;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use common::training::{
    CHUNK_BYTES, State, coded_state_at, json, load, open_coded, options, request, save_state, state_at,
};
use common::{get, key, master_key, names, pattern};
use varvite::crypt::MasterKey;
use varvite::error::{Error, KeyProblem, Result};
use varvite::format::encrypted::{HEAD_LENGTH_BYTES, Head, STORED_PAGE_BYTES};
use varvite::format::marker::Marker;
use varvite::plan::Compression;
use varvite::repository::{Access, Clear, Options, Repository, SaveRequest};
use varvite::store::memory::MemoryStore;
use varvite::store::{Folder, Key, PutMode, Store};

/// Folders that hold objects of a repository.
const FOLDERS: [Folder; 5] = [Folder::Root, Folder::Packs, Folder::Snapshots, Folder::Tags, Folder::Receipts];

fn with_key(access: Access) -> Options {
    Options {
        access,
        key: Some(master_key()),
        encrypt: access == Access::Write,
        compression: Compression::Fast,
        ..options(Vec::new())
    }
}

fn other_key() -> MasterKey {
    MasterKey::new(&pattern(99, 32)).unwrap()
}

fn writer(store: &MemoryStore) -> Repository {
    Repository::open(Arc::new(store.clone()), with_key(Access::Write)).unwrap()
}

fn reader(store: &MemoryStore) -> Result<Repository> {
    Repository::open(Arc::new(store.clone()), with_key(Access::Read))
}

/// A repository with snapshots of steps 1 to 3, a tag and a receipt.
fn saved() -> MemoryStore {
    let store = MemoryStore::new();
    let repository = writer(&store);
    for step in 1..=3 {
        save_state(&repository, step, &coded_state_at(step)).unwrap();
    }
    repository.pin(2, "kept").unwrap();
    repository.write_receipt(Some(2), "\"judged\"").unwrap();
    store
}

/// Every object with its bytes.
fn objects(store: &MemoryStore) -> BTreeMap<Key, Vec<u8>> {
    let keys = FOLDERS
        .into_iter()
        .flat_map(|folder| names(store, folder).into_iter().map(move |name| key(folder, &name)));
    keys.map(|key| (key.clone(), get(store, &key))).collect()
}

/// A store of these objects.
fn store_of(objects: &BTreeMap<Key, Vec<u8>>) -> MemoryStore {
    let store = MemoryStore::new();
    for (key, bytes) in objects {
        store.put(key, bytes, PutMode::IfAbsent).unwrap();
    }
    store
}

/// What a reader makes of a store: everything that there is, or why not.
fn look(store: &MemoryStore) -> Result<BTreeMap<u64, State>> {
    let repository = reader(store)?;
    let listed = repository.list()?;
    if let Some((_, why)) = listed.damaged.first() {
        return Err(Error::Poisoned { first: why.clone() });
    }
    let states = listed.headers.iter().map(|header| Ok((header.step, load(&repository, header.seq)?)));
    let states = states.collect::<Result<_>>()?;
    assert_eq!(
        repository.tags()?.iter().map(|(name, tag)| (name.as_str(), tag.seq)).collect::<Vec<_>>(),
        [("kept", 2)]
    );
    let receipts = repository.receipts(None)?;
    if let Some((_, error)) = receipts.damaged.into_iter().next() {
        return Err(error);
    }
    assert_eq!(receipts.read[0].content.get(), "\"judged\"");
    Ok(states)
}

fn expected(steps: std::ops::RangeInclusive<u64>) -> BTreeMap<u64, State> {
    steps.map(|step| (step, coded_state_at(step))).collect()
}

fn problem(opened: Result<Repository>) -> KeyProblem {
    match opened.unwrap_err() {
        Error::Key { root, problem } if root.starts_with("memory:") => problem,
        other => panic!("{other:?}"),
    }
}

#[test]
fn with_the_key_everything_is_as_without_encryption() {
    let store = saved();
    assert_eq!(look(&store).unwrap(), expected(1..=3));
    let repository = writer(&store);
    assert_eq!(repository.recovered().orphans, [""; 0]);
    assert!(save_state(&repository, 4, &coded_state_at(4)).unwrap().figures.reused_chunk_count > 0);
    let merged = repository.merge(true, &false.into()).unwrap();
    assert!(merged.merged_pack_count >= 3, "{merged:?}");
    assert_eq!(repository.verify(None, 1.0, &false.into()).unwrap().findings, []);
    drop(repository);
    assert_eq!(look(&store).unwrap(), expected(1..=4));
    // The key alone is enough: what is asked for concerns only what is new or plain.
    let calm = Options { encrypt: false, ..with_key(Access::Write) };
    let repository = Repository::open(Arc::new(store.clone()), calm).unwrap();
    save_state(&repository, 5, &coded_state_at(5)).unwrap();
    drop(repository);
    assert_eq!(look(&store).unwrap(), expected(1..=5));
}

#[test]
fn a_snapshot_whose_manifest_was_never_published_is_found_again() {
    let store = saved();
    store.delete(Folder::Snapshots, &["3.json".to_owned()]).unwrap();
    let repository = writer(&store);
    assert_eq!(repository.recovered().published, [3]);
    drop(repository);
    assert_eq!(look(&store).unwrap(), expected(1..=3));
}

#[test]
fn an_object_that_may_be_mapped_as_it_lies_is_no_encrypted_one() {
    let folder = tempfile::tempdir().unwrap();
    let open = |encrypt: bool| {
        let options = varvite::store::local::LocalOptions { sync: false, read_only: false };
        let path = folder.path().join(encrypt.to_string());
        let store = Arc::new(varvite::store::local::LocalStore::open(&path, options).unwrap());
        let options = Options { encrypt, compression: Compression::None, ..with_key(Access::Write) };
        let repository = Repository::open(store, options).unwrap();
        save_state(&repository, 1, &state_at(1)).unwrap();
        repository.snapshot(1).unwrap().mappable(1).is_some()
    };
    assert_eq!([open(false), open(true)], [true, false]);
}

#[test]
fn without_the_right_key_it_says_so_and_nothing_is_touched() {
    let store = saved();
    let before = objects(&store);
    for access in [Access::Write, Access::Rank, Access::Tag, Access::Read] {
        let open = |key| Repository::open(Arc::new(store.clone()), Options { key, ..options_of(access) });
        assert_eq!(problem(open(None)), KeyProblem::Missing);
        assert_eq!(problem(open(Some(other_key()))), KeyProblem::Wrong);
    }
    assert_eq!(objects(&store), before);
    let error = reader_with(&store, None).unwrap_err().to_string();
    assert!(error.ends_with("it is encrypted, and no key is given"), "{error}");
    assert_eq!(look(&store).unwrap(), expected(1..=3), "and the lock is free");
}

fn options_of(access: Access) -> Options {
    Options { access, ..options(Vec::new()) }
}

fn reader_with(store: &MemoryStore, key: Option<MasterKey>) -> Result<Repository> {
    Repository::open(Arc::new(store.clone()), Options { key, ..options_of(Access::Read) })
}

#[test]
fn whoever_asks_for_encryption_never_writes_in_the_clear() {
    let store = MemoryStore::new();
    drop(open_coded(Arc::new(store.clone()), Vec::new()).unwrap());
    let open = || Repository::open(Arc::new(store.clone()), with_key(Access::Write));
    assert_eq!(problem(open()), KeyProblem::Plain);
    // Also where somebody has taken the marker away, or put another one there.
    let plain = open_coded(Arc::new(store.clone()), Vec::new()).unwrap();
    save_state(&plain, 1, &state_at(1)).unwrap();
    drop(plain);
    store.delete(Folder::Root, &["varvite.json".to_owned()]).unwrap();
    assert_eq!(problem(open()), KeyProblem::Plain);
    let store = saved();
    let id = Marker::decode(&get(&store, &marker())).unwrap().repository_id;
    store.put(&marker(), &Marker::new(id).encode().unwrap(), PutMode::Replace).unwrap();
    let opened = Repository::open(Arc::new(store), with_key(Access::Write));
    assert_eq!(problem(opened), KeyProblem::Plain);
    let without_key = Options { key: None, ..with_key(Access::Write) };
    let error = Repository::open(Arc::new(MemoryStore::new()), without_key).unwrap_err();
    assert!(matches!(&error, Error::InvalidInput { what, .. } if what == "encryption"), "{error:?}");
}

#[test]
fn a_key_that_is_only_at_hand_leaves_a_plain_repository_plain() {
    let store = MemoryStore::new();
    let at_hand = || Options { encrypt: false, ..with_key(Access::Write) };
    let repository = Repository::open(Arc::new(store.clone()), at_hand()).unwrap();
    save_state(&repository, 1, &state_at(1)).unwrap();
    drop(repository);
    assert_eq!(load(&reader_with(&store, None).unwrap(), 1).unwrap(), state_at(1));
}

fn marker() -> Key {
    key(Folder::Root, "varvite.json")
}

#[test]
fn a_lost_marker_is_made_again_by_whoever_has_the_key_alone() {
    let store = saved();
    let whole = get(&store, &marker());
    for damaged in [None, Some(&whole[..whole.len() - 2])] {
        store.delete(Folder::Root, &["varvite.json".to_owned()]).unwrap();
        if let Some(damaged) = damaged {
            store.put(&marker(), damaged, PutMode::IfAbsent).unwrap();
        }
        assert_eq!(problem(reader_with(&store, None)), KeyProblem::Missing);
        let wrong = Options { key: Some(other_key()), ..options_of(Access::Write) };
        assert_eq!(problem(Repository::open(Arc::new(store.clone()), wrong)), KeyProblem::Wrong);
        let missing = Repository::open(Arc::new(store.clone()), options_of(Access::Write));
        assert_eq!(problem(missing), KeyProblem::Missing);
        assert_eq!(look(&store).unwrap(), expected(1..=3));
        assert_eq!(store.get(&marker(), 1_000).ok().as_deref(), damaged);
        drop(writer(&store));
        assert_eq!(get(&store, &marker()), whole);
    }
}

#[test]
fn the_clear_shows_steps_and_sizes_and_nothing_else() {
    let store = MemoryStore::new();
    let repository = writer(&store);
    let state = state_at(1);
    let told = SaveRequest {
        metrics: BTreeMap::from([("validation_loss".to_owned(), 0.125)]),
        metadata: json("{\"note\":\"a secret note\"}"),
        structure: json("{\"tree\":\"a secret tree\"}"),
        ..request(1, &state)
    };
    let sources: Vec<&[u8]> = state.values().map(Vec::as_slice).collect();
    let header = repository.save_sync(told, &sources, &false.into()).unwrap().header;
    repository.write_receipt(Some(1), "\"a secret receipt\"").unwrap();

    let clear = Clear::read(&store).unwrap().unwrap();
    let [facts] = clear.snapshots[..] else { panic!("{clear:?}") };
    assert_eq!((facts.seq, facts.step, facts.world_size), (1, 1, 1));
    assert_eq!((facts.raw_bytes, facts.stored_bytes), (header.raw_bytes, header.stored_bytes));
    assert_eq!(facts.created_at_unix_ms, header.created_at_unix_ms);
    assert!(Clear::read(&MemoryStore::new()).is_err());

    let mut secrets: Vec<Vec<u8>> =
        ["secret", "validation_loss", "frozen", "weight", "varvite-manifest", "session"]
            .map(Into::into)
            .into();
    secrets.push(header.session_id.clone().into_bytes());
    secrets.push(header.state_digest[..16].to_owned().into_bytes());
    secrets.extend(state.values().filter(|bytes| bytes.len() >= 16).map(|bytes| bytes[..16].to_vec()));
    let (mut hidden_count, plain) = (0, objects_of_plain(&state));
    for secret in &secrets {
        let holds = |bytes: &Vec<u8>| bytes.windows(secret.len()).any(|window| window == secret);
        // What is in a plain repository is found by this search.
        hidden_count += u32::from(plain.values().any(holds));
        let found = objects(&store).into_iter().find(|(_, bytes)| holds(bytes));
        assert_eq!(found.map(|(key, _)| key), None, "{}", secret.escape_ascii());
    }
    assert!(hidden_count >= 6, "{hidden_count}");
}

/// Objects of a repository with the same state in the clear.
fn objects_of_plain(state: &State) -> BTreeMap<Key, Vec<u8>> {
    let store = MemoryStore::new();
    let repository = Repository::open(Arc::new(store.clone()), options(Vec::new())).unwrap();
    save_state(&repository, 1, state).unwrap();
    objects(&store)
}

/// All runs of 16 bytes behind the heads, wherever they begin.
fn blocks(store: &MemoryStore) -> HashSet<[u8; 16]> {
    let behind_heads = objects(store).into_iter().filter(|(key, _)| key.folder() != Folder::Root);
    behind_heads
        .flat_map(|(_, bytes)| {
            let bytes = &bytes[HEAD_LENGTH_BYTES as usize..];
            bytes.windows(16).map(|window| window.try_into().unwrap()).collect::<Vec<[u8; 16]>>()
        })
        .collect()
}

#[test]
fn equal_chunks_show_in_no_two_repositories_of_one_key_and_in_no_two_snapshots_of_one() {
    let (left, right) = (saved(), saved());
    assert_eq!(look(&left).unwrap(), look(&right).unwrap());
    let (left_blocks, right_blocks) = (blocks(&left), blocks(&right));
    assert!(left_blocks.len() > 50_000);
    assert_eq!(left_blocks.intersection(&right_blocks).count(), 0);
    // Within one: packs of nothing but zeros.
    let store = MemoryStore::new();
    let encrypted = common::encrypted(Arc::new(store.clone()));
    for name in ["first", "second"] {
        common::publish(&encrypted, &common::pack(name), &vec![0; 40_000]).unwrap();
    }
    let run_count: usize =
        objects(&store).values().map(|bytes| bytes.len() - HEAD_LENGTH_BYTES as usize - 15).sum();
    assert_eq!(blocks(&store).len(), run_count, "a run of 16 bytes occurs twice");
}

/// Whatever one bit is changed: an error, or a finding; and never another state.
#[test]
fn no_byte_of_any_object_can_change_unseen() {
    let whole = objects(&small());
    for (key, bytes) in &whole {
        for at in 0..bytes.len() {
            let mut objects = whole.clone();
            objects.get_mut(key).unwrap()[at] ^= 1 << (at % 8);
            require_seen(&store_of(&objects), &format!("byte {at} of {key}"));
        }
    }
}

/// A small repository, with a difference, a tag and a receipt.
fn small() -> MemoryStore {
    let store = MemoryStore::new();
    let repository = writer(&store);
    for step in 1..=2 {
        save_state(&repository, step, &small_state_at(step)).unwrap();
    }
    repository.pin(2, "kept").unwrap();
    repository.write_receipt(Some(2), "\"judged\"").unwrap();
    drop(repository);
    assert_eq!(look(&store).unwrap(), BTreeMap::from([1, 2].map(|step| (step, small_state_at(step)))));
    store
}

fn small_state_at(step: u64) -> State {
    BTreeMap::from([("table".to_owned(), common::training::nudged(&pattern(5, 2_000), step))])
}

/// The damage is an error of a look or a finding of a scrub; a look gives no other state.
fn require_seen(store: &MemoryStore, what: &str) {
    let repository = match reader(store) {
        Ok(repository) => repository,
        Err(Error::Corrupt { .. } | Error::Unsupported { .. } | Error::Key { .. }) => return,
        Err(other) => panic!("{what}: {other:?}"),
    };
    let report = repository.verify(None, 1.0, &false.into()).unwrap();
    assert!(!report.findings.is_empty(), "{what} changed unseen");
    match look(store) {
        // The marker is made up for.
        Ok(states) => assert_eq!(states, BTreeMap::from([1, 2].map(|step| (step, small_state_at(step))))),
        Err(Error::Corrupt { .. } | Error::Poisoned { .. }) => {}
        Err(other) => panic!("{what}: {other:?}"),
    }
}

#[test]
fn objects_and_pages_belong_where_they_were_written() {
    let whole = objects(&small());
    let stranger = objects(&small());
    let in_folder = |objects: &BTreeMap<Key, Vec<u8>>, folder| -> Vec<(Key, Vec<u8>)> {
        let found = objects.iter().filter(|(key, _)| key.folder() == folder);
        found.map(|(key, bytes)| (key.clone(), bytes.clone())).collect()
    };
    for folder in [Folder::Packs, Folder::Snapshots, Folder::Tags, Folder::Receipts] {
        // The object of the same kind of another repository with the same key.
        for (own, foreign) in in_folder(&whole, folder).iter().zip(in_folder(&stranger, folder)) {
            let mut objects = whole.clone();
            objects.insert(own.0.clone(), foreign.1);
            require_seen(&store_of(&objects), &format!("{} of another repository", own.0));
        }
    }
    for folder in [Folder::Packs, Folder::Snapshots] {
        let [(first, left), (second, right)] = &in_folder(&whole, folder)[..] else { panic!() };
        let mut objects = whole.clone();
        objects.insert(first.clone(), right.clone());
        objects.insert(second.clone(), left.clone());
        require_seen(&store_of(&objects), &format!("{first} and {second} in each other's place"));
    }
    for (key, bytes) in whole.iter().filter(|(key, _)| key.folder() != Folder::Root) {
        for shorter in [0, 1, 127, 128, 143, 144, bytes.len() - 17, bytes.len() - 16, bytes.len() - 1] {
            let mut objects = whole.clone();
            objects.insert(key.clone(), bytes[..shorter].to_vec());
            require_seen(&store_of(&objects), &format!("{key} cut to {shorter} bytes"));
        }
    }
}

#[test]
fn pages_can_not_be_cut_off_swapped_or_taken_from_an_older_object_of_the_same_name() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let encrypted = common::encrypted(Arc::clone(&store));
    let (page, name) = (STORED_PAGE_BYTES as usize, key(Folder::Tags, "long"));
    let bytes = pattern(1, 3 * (page - 16));
    let stored_after = |bytes: &[u8]| {
        encrypted.put(&name, bytes, PutMode::Replace).unwrap();
        get(&*store, &name)
    };
    let older = stored_after(&bytes);
    let whole = stored_after(&bytes);
    assert_eq!(whole.len(), 128 + 3 * page);
    assert!(
        older.iter().zip(&whole).skip(128).filter(|(left, right)| left == right).count() < whole.len() / 100
    );
    let read = |stored: &[u8]| {
        store.put(&name, stored, PutMode::Replace).unwrap();
        let got = encrypted.get(&name, u64::MAX);
        let object = encrypted.open(&name).unwrap();
        let mut in_parts = vec![0; object.length_bytes() as usize];
        let parts = in_parts.chunks_mut(10_000).enumerate();
        let read = parts
            .map(|(index, part)| object.read_at(10_000 * index as u64, part))
            .collect::<Result<Vec<_>>>();
        assert_eq!(read.is_ok(), got.is_ok());
        got.map(|got| assert!(got == bytes && in_parts == bytes))
    };
    read(&whole).unwrap();
    let place = |number: usize| 128 + number * page..128 + (number + 1) * page;
    let with = |number: usize, stored: &[u8]| {
        let mut changed = whole.clone();
        changed[place(number)].copy_from_slice(stored);
        changed
    };
    let mut swapped = with(0, &whole[place(1)]);
    swapped[place(1)].copy_from_slice(&whole[place(0)]);
    for (changed, at) in [
        (whole[..128 + 2 * page].to_vec(), 128 + page),
        (whole[..128 + page].to_vec(), 128),
        (swapped, 128),
        (with(1, &older[place(1)]), 128 + page),
        (with(2, &whole[place(1)]), 128 + 2 * page),
        ([&older[..128], &whole[128..]].concat(), 128),
        ([&whole[..], &whole[place(2)]].concat(), 128 + 2 * page),
    ] {
        let error = read(&changed).unwrap_err();
        assert!(
            matches!(&error, Error::Corrupt { object, offset_bytes, what, .. }
            if object == "tags/long" && *offset_bytes == at as u64 && what == "page"),
            "{error:?}"
        );
    }
    assert_ne!(Head::decode("", &older).unwrap().salt, Head::decode("", &whole).unwrap().salt);
}

#[test]
fn a_part_of_an_object_is_read_through_the_pages_that_hold_it_alone() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let encrypted = common::encrypted(Arc::clone(&store));
    let (page, name) = (STORED_PAGE_BYTES as usize, key(Folder::Packs, "long"));
    let bytes = pattern(1, 3 * (page - 16));
    common::publish(&encrypted, &name, &bytes).unwrap();
    let mut stored = get(&*store, &name);
    stored[128 + page + 5] ^= 1;
    store.put(&name, &stored, PutMode::Replace).unwrap();
    let object = encrypted.open(&name).unwrap();
    let mut part = vec![0; page - 16];
    for number in [0, 2] {
        object.read_at((number * (page - 16)) as u64, &mut part).unwrap();
        assert_eq!(part, bytes[number * (page - 16)..][..page - 16]);
    }
    part.fill(7);
    assert!(object.read_at(CHUNK_BYTES, &mut part).is_err());
    // Of a page that was changed no byte gets out.
    assert_eq!(part[page - 16 - CHUNK_BYTES as usize..], vec![7; CHUNK_BYTES as usize]);
}

/// What lies in a bucket is what lies in the folder: moved as it is, and never seen in the clear.
#[cfg(feature = "cloud")]
mod in_a_bucket {
    use std::sync::atomic::{AtomicBool, AtomicU64};

    use varvite::store::object::BucketStore;
    use varvite::store::remote::{RemoteStore, Transfer};
    use varvite::sync::{SyncOptions, TierAccess, TieredStore, pull};
    use varvite::syncer::Syncer;

    use super::*;

    fn tiers(folder: &MemoryStore, bucket: &BucketStore, access: TierAccess) -> Arc<TieredStore> {
        let options = SyncOptions { key: Some(master_key()), ..SyncOptions::default() };
        let remote: Arc<dyn RemoteStore> = Arc::new(bucket.clone());
        TieredStore::open(Arc::new(folder.clone()), remote, access, options).unwrap()
    }

    /// Opens folder and bucket, works, pushes everything and closes.
    fn work(folder: &MemoryStore, bucket: &BucketStore, work: impl FnOnce(&Repository)) {
        let tiers = tiers(folder, bucket, TierAccess::Write);
        let repository = Repository::open(tiers.clone(), with_key(Access::Write)).unwrap();
        let syncer = Syncer::quiet(repository.clone(), tiers);
        work(&repository);
        syncer.sync_now(&AtomicBool::new(false)).unwrap();
        syncer.stop(&AtomicBool::new(false)).unwrap();
        repository.close();
    }

    fn pulled(bucket: &BucketStore, seqs: &[u64], key: Option<&MasterKey>) -> Result<MemoryStore> {
        let folder = MemoryStore::new();
        let (cancelled, moved_bytes) = (AtomicBool::new(false), AtomicU64::new(0));
        let transfer =
            Transfer { cancelled: &cancelled, moved_bytes: &moved_bytes, limit_bytes_per_second: None };
        let local: Arc<dyn Store> = Arc::new(folder.clone());
        pull(bucket, &local, seqs, key, transfer).map(|_report| folder)
    }

    fn states(repository: &Repository) -> BTreeMap<u64, State> {
        let headers = repository.list().unwrap().headers;
        headers.iter().map(|header| (header.step, load(repository, header.seq).unwrap())).collect()
    }

    #[test]
    fn what_is_pushed_merged_and_removed_there_is_read_from_there() {
        let (folder, bucket) = (MemoryStore::new(), BucketStore::in_memory());
        work(&folder, &bucket, |repository| {
            for step in 1..=3 {
                save_state(repository, step, &coded_state_at(step)).unwrap();
            }
            repository.pin(2, "kept").unwrap();
        });
        work(&folder, &bucket, |repository| {
            assert!(repository.merge(true, &false.into()).unwrap().merged_pack_count >= 2);
            repository.delete(1).unwrap();
            save_state(repository, 4, &coded_state_at(4)).unwrap();
        });
        for place in FOLDERS.into_iter().filter(|place| *place != Folder::Root) {
            assert_eq!(names(&bucket, place), names(&folder, place), "{place:?}");
            for name in names(&folder, place) {
                let key = key(place, &name);
                assert_eq!(get(&bucket, &key), get(&folder, &key), "{key}");
            }
        }
        // A machine that has nothing but the key.
        let reader = tiers(&MemoryStore::new(), &bucket, TierAccess::Read);
        let reader = Repository::open(reader, with_key(Access::Read)).unwrap();
        assert_eq!(states(&reader), expected(2..=4));
        let alone = Repository::open(Arc::new(bucket.clone()), with_key(Access::Read)).unwrap();
        assert_eq!(states(&alone), expected(2..=4));
        let clear = Clear::read(&bucket).unwrap().unwrap();
        assert_eq!(clear.snapshots.iter().map(|facts| facts.step).collect::<Vec<_>>(), [2, 3, 4]);
        work(&MemoryStore::new(), &bucket, |repository| {
            assert_eq!(states(repository), expected(2..=4));
            save_state(repository, 5, &coded_state_at(5)).unwrap();
        });
        let alone = Repository::open(Arc::new(bucket), with_key(Access::Read)).unwrap();
        assert_eq!(states(&alone), expected(2..=5));
    }

    #[test]
    fn a_pull_needs_the_key_and_verifies_what_it_fetched() {
        let (folder, bucket) = (MemoryStore::new(), BucketStore::in_memory());
        work(&folder, &bucket, |repository| {
            for step in 1..=2 {
                save_state(repository, step, &coded_state_at(step)).unwrap();
            }
        });
        let problem = |key| problem(pulled(&bucket, &[1, 2], key).map(|_| unreachable!()));
        assert_eq!(problem(None), KeyProblem::Missing);
        assert_eq!(problem(Some(&other_key())), KeyProblem::Wrong);
        let copy = pulled(&bucket, &[1, 2], Some(&master_key())).unwrap();
        assert_eq!(states(&reader(&copy).unwrap()), expected(1..=2));
        let name = names(&bucket, Folder::Packs)[0].clone();
        let pack = key(Folder::Packs, &name);
        let mut bytes = get(&bucket, &pack);
        bytes[5_000] ^= 1;
        bucket.put(&pack, &bytes, PutMode::Replace).unwrap();
        let error = pulled(&bucket, &[1, 2], Some(&master_key())).unwrap_err();
        assert!(matches!(&error, Error::Corrupt { object, .. } if *object == pack.to_string()), "{error:?}");
    }
}

macro_rules! golden {
    ($($folder:ident / $name:literal in $below:literal),* $(,)?) => {
        [$((Folder::$folder, $name, include_bytes!(concat!("golden/v1/encrypted/", $below, $name)).as_slice())),*]
    };
}

/// Objects are never the same twice, so the writer can't be held to these; readers are.
#[test]
fn the_golden_repository_is_read() {
    let store = MemoryStore::new();
    for (folder, name, bytes) in golden![
        Root / "varvite.json" in "",
        Packs / "1-r0-2a3cff3de238c2ad.pack" in "packs/",
        Packs / "2-r0-ec75250bf36a88f6.pack" in "packs/",
        Snapshots / "1.json" in "snapshots/",
        Snapshots / "2.json" in "snapshots/",
        Tags / "kept" in "tags/",
        Receipts / "1.json" in "receipts/",
    ] {
        store.put(&key(folder, name), bytes, PutMode::IfAbsent).unwrap();
    }
    assert_eq!(look(&store).unwrap(), BTreeMap::from([1, 2].map(|step| (step, small_state_at(step)))));
    let marker = Marker::decode(&get(&store, &marker())).unwrap();
    assert_eq!((marker.reader_flags, marker.writer_flags), (4, 1));
    assert_eq!(Clear::read(&store).unwrap().unwrap().snapshots[1].step, 2);
    assert_eq!(problem(reader_with(&store, Some(other_key()))), KeyProblem::Wrong);
}

#[test]
#[ignore = "makes the golden files, which are never made anew"]
#[expect(clippy::disallowed_methods, reason = "files for a person, outside of any repository")]
fn make_the_golden_repository() {
    let root = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("golden-v1-encrypted");
    for (key, bytes) in objects(&small()) {
        let path = root.join(key.to_string());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}
