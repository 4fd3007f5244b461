//! What several integration tests share: the simulated disk, and small helpers.

#![cfg_attr(test, allow(dead_code, reason = "every test file uses its own part of this module"))]
#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[cfg(feature = "cloud")]
pub(crate) mod bucket;
pub(crate) mod hooked;
#[cfg(feature = "cloud")]
pub(crate) mod http_server;
pub(crate) mod journal;
pub(crate) mod lent;
pub(crate) mod machine;
pub(crate) mod memory_remote;
pub(crate) mod oracle;
pub(crate) mod run;
pub(crate) mod sim_store;
pub(crate) mod training;

use std::sync::Arc;

use varvite::crypt::{MasterKey, RepositoryKeys};
use varvite::encrypted::EncryptedStore;
use varvite::error::Error;
use varvite::store::{Folder, Key, PutMode, Store};

/// A key that is known to be legal.
pub(crate) fn key(folder: Folder, name: &str) -> Key {
    Key::new(folder, name).unwrap()
}

/// `length_bytes` bytes that differ by position and seed, so that a shifted, swapped or stale block
/// does not compare equal.
pub(crate) fn pattern(seed: u64, length_bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length_bytes + 8);
    while bytes.len() < length_bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length_bytes);
    bytes
}

/// Names in a folder, ascending.
pub(crate) fn names(store: &dyn Store, folder: Folder) -> Vec<String> {
    let mut names: Vec<String> = store.list(folder).unwrap().into_iter().map(|row| row.name).collect();
    names.sort();
    names
}

/// A key in `packs/`.
pub(crate) fn pack(name: &str) -> Key {
    key(Folder::Packs, name)
}

/// Puts an object that must not be there yet.
pub(crate) fn put(store: &dyn Store, key: &Key, bytes: &[u8]) {
    store.put(key, bytes, PutMode::IfAbsent).unwrap();
}

/// All bytes of an object that must be there.
pub(crate) fn get(store: &dyn Store, key: &Key) -> Vec<u8> {
    store.get(key, u64::MAX).unwrap()
}

/// Stages `bytes` in one append and publishes them.
pub(crate) fn publish(store: &dyn Store, key: &Key, bytes: &[u8]) -> Result<(), Error> {
    let mut staged = store.stage(key)?;
    staged.append(bytes)?;
    staged.publish().map(|_published| ())
}

/// The key of encrypted repositories in tests.
pub(crate) fn master_key() -> MasterKey {
    MasterKey::new(&std::array::from_fn::<u8, 32, _>(|index| index as u8)).unwrap()
}

/// A store that encrypts what goes into `store`.
pub(crate) fn encrypted(store: Arc<dyn Store>) -> EncryptedStore {
    let repository_id = "00112233445566778899aabbccddeeff";
    let keys = RepositoryKeys::derive(&master_key(), repository_id);
    EncryptedStore::new(store, repository_id.to_owned(), keys)
}
