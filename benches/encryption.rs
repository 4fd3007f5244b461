//! What encryption costs: bytes into a store and out of it, beside the same in the clear.
//! `cargo bench --features encryption --bench encryption`.
//!
//! The store is memory, so that a row is a copy and what encryption adds to it.
#![expect(clippy::expect_used, reason = "a bench has no caller to report to")]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use varvite::crypt::{MasterKey, RepositoryKeys};
use varvite::encrypted::EncryptedStore;
use varvite::store::memory::MemoryStore;
use varvite::store::{Folder, Key, Store};

const OBJECT_BYTES: usize = 64 << 20;
/// A chunk.
const APPEND_BYTES: usize = 1 << 20;
const READ_BYTES: usize = 1 << 20;

fn stores() -> [(&'static str, Arc<dyn Store>); 2] {
    let master = MasterKey::new(&std::array::from_fn::<u8, 32, _>(|index| index as u8)).expect("a key");
    let id = "00112233445566778899aabbccddeeff";
    let keys = RepositoryKeys::derive(&master, id);
    let encrypted = EncryptedStore::new(Arc::new(MemoryStore::new()), id.to_owned(), keys);
    [("clear", Arc::new(MemoryStore::new())), ("encrypted", Arc::new(encrypted))]
}

fn write(store: &dyn Store, key: &Key, bytes: &[u8]) {
    let mut staged = store.stage(key).expect("a staged object");
    for piece in bytes.chunks(APPEND_BYTES) {
        staged.append(piece).expect("an append");
    }
    staged.publish().expect("a published object");
}

fn writes_and_reads(criterion: &mut Criterion) {
    let bytes: Vec<u8> = (0..OBJECT_BYTES).map(|index| (index * 7 + (index >> 11)) as u8).collect();
    let mut group = criterion.benchmark_group("encryption");
    group.throughput(Throughput::Bytes(OBJECT_BYTES as u64)).sample_size(10);
    for (name, store) in stores() {
        let key = Key::new(Folder::Packs, "a").expect("a key");
        group.bench_function(format!("write {name}"), |bencher| {
            bencher.iter(|| {
                store.delete(Folder::Packs, &["a".to_owned()]).expect("a deletion");
                write(store.as_ref(), &key, black_box(&bytes));
            });
        });
        let object = store.open(&key).expect("an object");
        let mut buffer = vec![0; READ_BYTES];
        group.bench_function(format!("read {name}"), |bencher| {
            bencher.iter(|| {
                for offset in (0..OBJECT_BYTES).step_by(READ_BYTES) {
                    object.read_at(offset as u64, black_box(&mut buffer)).expect("a read");
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, writes_and_reads);
criterion_main!(benches);
