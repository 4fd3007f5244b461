//! Rates of a bucket on the server that `VARVITE_TEST_BUCKET_URL` names: 1 GiB sent and read again.
//!
//! What the server gives at all is told by another client in the same minute, such as `s5cmd cp`.

#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark prints, and one that can't go on fails"
)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use varvite::store::local::{LocalOptions, LocalStore};
use varvite::store::object::{BucketOptions, BucketStore};
use varvite::store::remote::{RemoteStore, Transfer};
use varvite::store::{Folder, Key, PutMode, ReadAt, Store};

const LENGTH_BYTES: usize = 1 << 30;

const LENGTH_MEGABYTES: f64 = 1_073.741_824;

const READERS: usize = 8;

fn main() {
    let set = |name| std::env::vars().find(|(key, _)| key == name).map(|(_, value)| value);
    let Some(url) = set("VARVITE_TEST_BUCKET_URL") else {
        println!("bucket: no `VARVITE_TEST_BUCKET_URL`, nothing to measure");
        return;
    };
    let options: BTreeMap<String, String> = set("VARVITE_TEST_BUCKET_OPTIONS")
        .map(|text| serde_json::from_str(&text).unwrap())
        .unwrap_or_default();
    let store = BucketStore::open(BucketOptions { url, options, credentials: None }).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let local = LocalStore::open(folder.path(), LocalOptions { sync: false, read_only: false }).unwrap();
    local.create_folders().unwrap();
    let key = Key::new(Folder::Packs, "bench.pack").unwrap();
    local.put(&key, &noise(LENGTH_BYTES), PutMode::Replace).unwrap();
    for round in 0..3 {
        store.delete(Folder::Packs, &[key.name().to_owned()]).unwrap();
        let source = local.open(&key).unwrap();
        let seconds = send(&store, &key, &*source);
        println!("send {round}: {:.0} MB/s", LENGTH_MEGABYTES / seconds);
    }
    for range_bytes in [8 << 20, 16 << 20] {
        for round in 0..3 {
            let seconds = read(&store, &key, range_bytes);
            println!("read by {} MiB {round}: {:.0} MB/s", range_bytes >> 20, LENGTH_MEGABYTES / seconds);
        }
    }
    store.delete(Folder::Packs, &[key.name().to_owned()]).unwrap();
}

fn noise(length_bytes: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let words = (0..length_bytes / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

fn send(store: &BucketStore, key: &Key, source: &dyn ReadAt) -> f64 {
    let (cancelled, moved_bytes) = (AtomicBool::new(false), AtomicU64::new(0));
    let transfer =
        Transfer { cancelled: &cancelled, moved_bytes: &moved_bytes, limit_bytes_per_second: None };
    let start = Instant::now();
    let mut upload = store.begin_upload(key, source.length_bytes()).unwrap();
    store.send_parts(key, source, &mut upload, transfer, &mut |_| Ok(())).unwrap();
    store.complete_upload(key, &upload).unwrap();
    start.elapsed().as_secs_f64()
}

fn read(store: &BucketStore, key: &Key, range_bytes: usize) -> f64 {
    let start = Instant::now();
    let object = store.open(key).unwrap();
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                let mut buffer = vec![0; range_bytes];
                loop {
                    let offset = next.fetch_add(range_bytes, Ordering::Relaxed);
                    if offset >= LENGTH_BYTES {
                        return;
                    }
                    object.read_at(offset as u64, &mut buffer).unwrap();
                }
            });
        }
    });
    start.elapsed().as_secs_f64()
}
