//! A machine with a folder and a way to a bucket, and what must hold for both.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use varvite::error::Result;
use varvite::format::{manifest, names};
use varvite::repository::{Access, Options, Repository};
use varvite::retain::Rule;
use varvite::store::memory::MemoryStore;
use varvite::store::remote::RemoteStore;
use varvite::store::{Folder, Store};
use varvite::sync::{SyncOptions, TierAccess, TieredStore};
use varvite::syncer::{SyncReport, Syncer};

use super::memory_remote::{Disk, MemoryRemote, TestClock};
use super::training::{State, load, options, save_state};

/// A machine; its processes come and go.
pub(crate) struct Machine {
    pub(crate) disk: MemoryStore,
    pub(crate) remote: MemoryRemote,
    pub(crate) clock: Arc<TestClock>,
    pub(crate) sync: SyncOptions,
    pub(crate) rules: Vec<Rule>,
}

/// A process that has the repository open for writing.
pub(crate) struct Trainer {
    pub(crate) repository: Repository,
    pub(crate) tiers: Arc<TieredStore>,
    pub(crate) syncer: Arc<Syncer>,
}

impl Machine {
    /// A new machine with an empty folder.
    pub(crate) fn new(remote: &MemoryRemote) -> Self {
        Self::with_disk(MemoryStore::new(), remote)
    }

    /// The machine of a folder, with a process that nothing has happened to yet.
    pub(crate) fn with_disk(disk: MemoryStore, remote: &MemoryRemote) -> Self {
        let (remote, clock) = (remote.elsewhere(), Arc::default());
        Self { disk, remote, clock, sync: SyncOptions::default(), rules: Vec::new() }
    }

    /// Another process on the same machine.
    pub(crate) fn restarted(&self) -> Self {
        let again = Self::with_disk(self.disk.clone(), &self.remote);
        Self { sync: self.sync.clone(), rules: self.rules.clone(), ..again }
    }

    pub(crate) fn tiers(&self, access: TierAccess) -> Arc<TieredStore> {
        let disk: Arc<dyn Store> = Disk::beside(&self.disk, &self.remote);
        let remote: Arc<dyn RemoteStore> = Arc::new(self.remote.clone());
        let clock: Arc<TestClock> = Arc::clone(&self.clock);
        TieredStore::with_clock(disk, remote, access, self.sync.clone(), clock).unwrap()
    }

    /// Opens for writing, with a syncer that does only what it is told.
    pub(crate) fn open(&self) -> Result<Trainer> {
        let tiers = self.tiers(TierAccess::Write);
        let repository = Repository::open(Arc::clone(&tiers) as Arc<dyn Store>, options(self.rules.clone()))?;
        let syncer = Syncer::quiet(repository.clone(), Arc::clone(&tiers));
        Ok(Trainer { repository, tiers, syncer })
    }

    /// Opens with another access.
    pub(crate) fn open_as(&self, access: Access, tier: TierAccess) -> Result<Repository> {
        let tiers: Arc<dyn Store> = self.tiers(tier);
        Repository::open(tiers, Options { access, ..options(Vec::new()) })
    }
}

/// An empty bucket, a new machine before it, and a process there that has it open for writing.
pub(crate) fn begin() -> (MemoryRemote, Machine, Trainer) {
    let bucket = MemoryRemote::new();
    let machine = Machine::new(&bucket);
    let trainer = machine.open().unwrap();
    (bucket, machine, trainer)
}

impl Trainer {
    pub(crate) fn save(&self, step: u64) -> u64 {
        self.save_state(step, &super::training::state_at(step))
    }

    pub(crate) fn save_state(&self, step: u64, state: &State) -> u64 {
        save_state(&self.repository, step, state).unwrap().header.seq
    }

    pub(crate) fn sync(&self) -> Result<SyncReport> {
        self.syncer.sync_now(&AtomicBool::new(false))
    }

    pub(crate) fn close(self) {
        self.syncer.stop(&AtomicBool::new(false)).unwrap();
        self.repository.close();
    }
}

/// Seqs of the manifests in a bucket, ascending.
pub(crate) fn seqs_in(remote: &MemoryRemote) -> Vec<u64> {
    let names = remote.names(Folder::Snapshots);
    let mut seqs: Vec<u64> = names.iter().filter_map(|name| names::parse_manifest_name(name)).collect();
    seqs.sort_unstable();
    seqs
}

/// What must hold of a bucket at any moment: every manifest has all its packs, whole. Returns state digests by seq.
pub(crate) fn check_bucket(remote: &MemoryRemote) -> std::result::Result<BTreeMap<u64, String>, String> {
    let contents = remote.contents();
    let mut digests = BTreeMap::new();
    for (name, bytes) in contents.iter().filter(|(name, _)| name.starts_with("snapshots/")) {
        if name.ends_with(".deleted") {
            continue;
        }
        let manifest = manifest::decode(name, bytes).map_err(|error| error.chain())?;
        for record in &manifest.body.packs {
            let length = contents.get(&format!("packs/{}", record.name)).map(|pack| pack.len() as u64);
            if length != Some(record.length_bytes) {
                return Err(format!("{name} needs {record:?}, and the bucket has {length:?}"));
            }
        }
        digests.insert(manifest.header.seq, manifest.header.state_digest);
    }
    Ok(digests)
}

/// Packs of a bucket that no manifest of it names.
pub(crate) fn orphans_in(remote: &MemoryRemote) -> BTreeSet<String> {
    let contents = remote.contents();
    let mut packs: BTreeSet<String> = remote.names(Folder::Packs).into_iter().collect();
    for (name, bytes) in contents.iter().filter(|(name, _)| name.starts_with("snapshots/")) {
        if let Ok(manifest) = manifest::decode(name, bytes) {
            manifest.body.packs.iter().for_each(|record| {
                packs.remove(&record.name);
            });
        }
    }
    packs
}

/// Loads snapshots by seq as a machine with an empty folder would.
pub(crate) fn load_elsewhere(remote: &MemoryRemote, seq: u64) -> Result<State> {
    let reader = Machine::new(remote).open_as(Access::Read, TierAccess::Read)?;
    load(&reader, seq)
}

/// The clock of the tests in seconds.
pub(crate) fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}
