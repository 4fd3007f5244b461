//! A store in memory that tells what is about to happen, so that a test can do something in between.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use varvite::error::Result;
use varvite::format::names::parse_manifest_name;
use varvite::store::memory::MemoryStore;
use varvite::store::{Folder, Key, Listed, Published, PutMode, ReadAt, StagedWrite, Store, WriterLock};

/// What is about to happen to the store, or just has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A pack of this name is begun.
    Stage(String),
    /// A pack of this name has become visible.
    Published(String),
    /// A manifest of this name is replaced.
    Replace(String),
    /// Packs are deleted.
    DeletePacks,
}

type Hook = Arc<dyn Fn(&Event) -> Result<()> + Send + Sync>;

/// The store; clones of it share objects and hook.
#[derive(Clone)]
pub(crate) struct Hooked {
    inner: MemoryStore,
    /// Another than the inner one's, for a second process.
    root: Option<String>,
    hook: Arc<Mutex<Option<Hook>>>,
}

impl Hooked {
    pub(crate) fn new() -> Self {
        Self { inner: MemoryStore::new(), root: None, hook: Arc::default() }
    }

    /// The same objects as another process sees them: what is held here does not stop it.
    pub(crate) fn elsewhere(store: &MemoryStore) -> Arc<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let root = Some(format!("elsewhere:{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        Arc::new(Self { inner: store.clone(), root, hook: Arc::default() })
    }

    pub(crate) fn inner(&self) -> &MemoryStore {
        &self.inner
    }

    /// Calls this before each event, on the thread that causes it; its error is that of the store.
    pub(crate) fn set_hook(&self, hook: impl Fn(&Event) -> Result<()> + Send + Sync + 'static) {
        *self.hook.lock().unwrap() = Some(Arc::new(hook));
    }

    /// Calls this before the first event that `is_it`, and never again.
    pub(crate) fn once(
        &self,
        is_it: impl Fn(&Event) -> bool + Send + Sync + 'static,
        act: impl FnOnce() + Send + 'static,
    ) {
        let act: Mutex<Option<Box<dyn FnOnce() + Send>>> = Mutex::new(Some(Box::new(act)));
        self.set_hook(move |event| {
            if is_it(event) {
                let act = act.lock().unwrap().take();
                if let Some(act) = act {
                    act();
                }
            }
            Ok(())
        });
    }

    fn tell(&self, event: &Event) -> Result<()> {
        let hook = self.hook.lock().unwrap().clone();
        hook.map_or(Ok(()), |hook| hook(event))
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Hooked({})", self.root())
    }
}

#[derive(Debug)]
struct HookedWrite {
    inner: Box<dyn StagedWrite>,
    store: Hooked,
    name: String,
}

impl StagedWrite for HookedWrite {
    fn position_bytes(&self) -> u64 {
        self.inner.position_bytes()
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.inner.append(bytes)
    }

    fn publish(self: Box<Self>) -> Result<Published> {
        let published = self.inner.publish()?;
        self.store.tell(&Event::Published(self.name))?;
        Ok(published)
    }
}

impl Store for Hooked {
    fn root(&self) -> String {
        self.root.clone().unwrap_or_else(|| self.inner.root())
    }

    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>> {
        self.tell(&Event::Stage(key.name().to_owned()))?;
        let inner = self.inner.stage(key)?;
        Ok(Box::new(HookedWrite { inner, store: self.clone(), name: key.name().to_owned() }))
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        if key.folder() == Folder::Snapshots
            && mode == PutMode::Replace
            && parse_manifest_name(key.name()).is_some()
        {
            self.tell(&Event::Replace(key.name().to_owned()))?;
        }
        self.inner.put(key, bytes, mode)
    }

    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        if folder == Folder::Packs {
            self.tell(&Event::DeletePacks)?;
        }
        self.inner.delete(folder, names)
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

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        self.inner.sync_folder(folder)
    }

    fn sweep_staged(&self) -> Result<u64> {
        self.inner.sweep_staged()
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn WriterLock>> {
        self.inner.lock(holder)
    }

    fn free_bytes(&self) -> Option<u64> {
        self.inner.free_bytes()
    }

    fn local_path(&self, key: &Key) -> Option<PathBuf> {
        self.inner.local_path(key)
    }
}
