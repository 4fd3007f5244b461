//! A repository in memory: for tests, and for whoever wants snapshots that end with the process.
//!
//! A real implementation with every guarantee of [`Store`] that memory can give; only a loss of power
//! takes it all.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Folder, Key, Listed, Published, PutMode, ReadAt, StagedWrite, Store, WriterLock, end_of_read};
use crate::error::{Error, Result};

/// A [`Store`] in memory. Clones share their objects, as two openings of one folder do.
#[derive(Clone)]
pub struct MemoryStore {
    /// Unlike that of any other store: holds and claims are kept by root.
    root: Arc<str>,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Default)]
struct Shared {
    objects: BTreeMap<Key, Arc<Vec<u8>>>,
    holder: Option<String>,
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn object_name(&self, key: &Key) -> String {
        format!("{}/{key}", self.root)
    }

    fn lock_shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn publish(&self, key: &Key, bytes: Vec<u8>, mode: PutMode) -> Result<()> {
        let mut shared = self.lock_shared();
        if let (PutMode::IfAbsent, Some(present)) = (mode, shared.objects.get(key)) {
            let by = format!("{} bytes lie there", present.len());
            return Err(Error::Conflict { object: self.object_name(key), by });
        }
        shared.objects.insert(key.clone(), Arc::new(bytes));
        Ok(())
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(1);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        Self { root: format!("memory:{number}").into(), shared: Arc::default() }
    }
}

impl Store for MemoryStore {
    fn root(&self) -> String {
        self.root.to_string()
    }

    fn create_folders(&self) -> Result<()> {
        Ok(())
    }

    fn list(&self, folder: Folder) -> Result<Vec<Listed>> {
        let shared = self.lock_shared();
        let rows = shared.objects.iter().filter(|(key, _)| key.folder() == folder);
        Ok(rows
            .map(|(key, bytes)| Listed {
                name: key.name().to_owned(),
                length_bytes: Some(bytes.len() as u64),
            })
            .collect())
    }

    fn open(&self, key: &Key) -> Result<Box<dyn ReadAt>> {
        let bytes = self.lock_shared().objects.get(key).cloned();
        let missing = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let bytes = bytes.ok_or_else(|| Error::store("open", self.object_name(key))(missing()))?;
        Ok(Box::new(MemoryObject { name: self.object_name(key), bytes }))
    }

    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>> {
        Ok(Box::new(MemoryStagedWrite { store: self.clone(), key: key.clone(), bytes: Vec::new() }))
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        self.publish(key, bytes.to_vec(), mode)
    }

    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        let keys = names.iter().map(|name| Key::new(folder, name)).collect::<Result<Vec<_>>>()?;
        let mut shared = self.lock_shared();
        Ok(keys.iter().filter_map(|key| shared.objects.remove(key)).map(|bytes| bytes.len() as u64).sum())
    }

    fn sync_folder(&self, _folder: Folder) -> Result<()> {
        Ok(())
    }

    fn sweep_staged(&self) -> Result<u64> {
        Ok(0)
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn WriterLock>> {
        let mut shared = self.lock_shared();
        if let Some(present) = &shared.holder {
            return Err(Error::Locked { root: self.root(), holder: present.clone() });
        }
        shared.holder = Some(holder.to_owned());
        Ok(Box::new(MemoryLock { store: self.clone() }))
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn local_path(&self, _key: &Key) -> Option<PathBuf> {
        None
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "MemoryStore({} objects)", self.lock_shared().objects.len())
    }
}

struct MemoryObject {
    name: String,
    bytes: Arc<Vec<u8>>,
}

impl ReadAt for MemoryObject {
    fn length_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        let end = end_of_read(|| self.name.clone(), offset_bytes, buffer.len(), self.length_bytes())?;
        buffer.copy_from_slice(&self.bytes[offset_bytes as usize..end as usize]);
        Ok(())
    }
}

impl fmt::Debug for MemoryObject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "MemoryObject({}, {} bytes)", self.name, self.bytes.len())
    }
}

struct MemoryStagedWrite {
    store: MemoryStore,
    key: Key,
    bytes: Vec<u8>,
}

impl StagedWrite for MemoryStagedWrite {
    fn position_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn publish(self: Box<Self>) -> Result<Published> {
        let length_bytes = self.position_bytes();
        self.store.publish(&self.key, self.bytes, PutMode::IfAbsent)?;
        Ok(Published { length_bytes, drain_seconds: 0.0, sync_seconds: 0.0 })
    }
}

impl fmt::Debug for MemoryStagedWrite {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "MemoryStagedWrite({}, {} bytes)",
            self.store.object_name(&self.key),
            self.bytes.len()
        )
    }
}

#[derive(Debug)]
struct MemoryLock {
    store: MemoryStore,
}

impl WriterLock for MemoryLock {
    fn abandon(self: Box<Self>) {
        // A forked child has its own copy of everything, so there is nothing to hold on to. The mutex
        // may have been held during the fork and must not be touched.
        std::mem::forget(self);
    }
}

impl Drop for MemoryLock {
    fn drop(&mut self) {
        self.store.lock_shared().holder = None;
    }
}
