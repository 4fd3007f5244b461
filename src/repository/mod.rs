//! The facade: a repository, saves into it, snapshots out of it.
//!
//! The only place of the engine with a clock and with randomness. A [`Repository`] is cheap to clone and
//! safe to use from many threads; one process at a time holds it for writing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::catalog::{self, Mode, Reference};
use crate::compact::MergePolicy;
use crate::crypt::MasterKey;
use crate::error::{Error, Result};
use crate::format::model::{Header, Manifest, PackRecord};
use crate::format::{limits, manifest, names};
use crate::inflight::Registry;
use crate::listing::Listing;
use crate::plan::{Base, Compression, Pace};
use crate::recover::{self, Recovered};
use crate::retain::Rule;
use crate::stage::StagePool;
use crate::store::{Folder, Key, Store, WriterLock};
use crate::threads::Threads;

mod chance;
mod clear;
mod foundation;
mod header;
mod keeping;
mod merging;
mod open;
mod parts;
mod receipts;
mod save;
mod scrub;
mod session;
mod snapshot;

pub use clear::Clear;
pub use merging::MergeReport;
pub use parts::{CommitReport, PartReport, PartRequest, PartSession};
pub use receipts::Receipts;
pub use save::{SaveReport, SaveRequest};
pub use session::{PackFigures, SaveSession};
pub use snapshot::Snapshot;

pub(crate) use chance::holder;
use chance::random_u128;
use foundation::PartBase;
use header::{check_seq, read_header};
use merging::Merging;
use open::{check_options, open_marker, refuse_foreign};
use parts::{KeptPart, OpenSession};

/// What a handle may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Save, prune, delete; takes the writer lock.
    Write,
    /// Write packs of sessions that a coordinator has begun, and read. Needs no lock: a pack is nobody else's.
    Rank,
    /// Only add and remove tags: needs no lock, so that a person can pin beside a running job.
    Tag,
    /// Change nothing, not even leftovers of a crash.
    Read,
}

/// Settings of a handle.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the handle may do.
    pub access: Access,
    /// Raw bytes of a chunk: a power of two, 4 KiB to 64 MiB.
    pub chunk_bytes: u64,
    /// Threads that copy, digest and read.
    pub threads: usize,
    /// Retention; empty keeps everything.
    pub rules: Vec<Rule>,
    /// When old packs are rewritten; `None` for never by itself.
    pub merge: Option<MergePolicy>,
    /// Rank of this process.
    pub rank: u32,
    /// Ranks that save together.
    pub world_size: u32,
    /// How small chunks are made.
    pub compression: Compression,
    /// Whether a chunk may be stored as a difference to an older one.
    pub delta: bool,
    /// Key of an encrypted repository.
    pub key: Option<MasterKey>,
    /// Makes a new repository an encrypted one, and refuses one that is not.
    pub encrypt: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            access: Access::Write,
            chunk_bytes: 1 << 20,
            threads: 1,
            rules: Vec::new(),
            merge: None,
            rank: 0,
            world_size: 1,
            compression: Compression::default(),
            delta: true,
            key: None,
            encrypt: false,
        }
    }
}

/// A repository that is open in this process.
#[derive(Clone, Debug)]
pub struct Repository {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: Arc<dyn Store>,
    options: Options,
    threads: Arc<Threads>,
    registry: Arc<Registry>,
    stage_pool: Arc<StagePool>,
    /// Memory for what is copied after the caller has gone on.
    later_pool: Arc<StagePool>,
    repository_id: String,
    recovered: Recovered,
    lock: Mutex<Option<Box<dyn WriterLock>>>,
    state: Mutex<State>,
    experience: Mutex<Experience>,
    /// Taken for a whole merge: they run one after the other.
    merging: Mutex<Merging>,
    /// Taken to replace a manifest or to delete some: what is deleted is not replaced.
    replacing: Mutex<()>,
    /// The handle is being closed: a merge that runs ends.
    closing: AtomicBool,
    /// Tells this handle from others that have the repository open, now or later.
    nonce: u64,
    /// Process that opened it: a forked child must not write.
    process: u32,
}

/// What is known of the repository; refreshed from the store by readers, kept up to date by the writer.
#[derive(Debug, Default)]
struct State {
    listing: Listing,
    headers: HashMap<u64, Arc<Header>>,
    pack_tables: HashMap<u64, Arc<Vec<PackRecord>>>,
    base: Option<Arc<Base>>,
    /// By rank: its own part of the snapshot of several ranks that was committed last.
    part_bases: HashMap<u32, PartBase>,
    /// Parts written by this handle whose session goes on, by session id and rank.
    parts: HashMap<(String, u32), KeptPart>,
    /// Sessions of several ranks that this handle has begun, by id.
    sessions: HashMap<String, OpenSession>,
    /// The snapshot this run is at: parent of the next save.
    current: Option<u64>,
    resumed_from: Option<u64>,
    last_tried_seq: u64,
    /// Manifests that merges of this handle have replaced.
    merge_count: u64,
    /// Packs may lie around that no manifest refers to: the next sweep looks.
    stale_packs: bool,
    /// Something failed midway, so that the store may have other snapshots than `listing` says.
    stale_listing: bool,
}

/// What the saves of this handle taught; only how fast later ones are depends on it.
#[derive(Debug, Default)]
struct Experience {
    pace: Pace,
    /// By entry name: saves in a row in which a difference to the base did not pay, or was not tried.
    delta_failures: HashMap<String, u32>,
}

impl State {
    /// Numbers of the sessions of several ranks that go on.
    fn open_seqs(&self) -> BTreeSet<u64> {
        self.sessions.values().map(OpenSession::seq).collect()
    }

    /// Notes a failure after which only the store knows what there is.
    fn doubt(&mut self) {
        self.stale_packs = true;
        self.stale_listing = true;
    }
}

/// Headers of all readable snapshots, and why others can't be read.
#[derive(Clone, Debug, Default)]
pub struct Listed {
    /// Ascending by seq, superseded ones included.
    pub headers: Vec<Arc<Header>>,
    /// Snapshots whose manifest is damaged: (seq, why).
    pub damaged: Vec<(u64, String)>,
}

impl Repository {
    /// Opens the repository of this store; a writer makes it where the place is empty, and recovers what
    /// a crash left.
    ///
    /// # Errors
    /// [`Error::NotARepository`] where there is none to read, or the place belongs to something else;
    /// [`Error::Locked`] where another process writes; [`Error::Key`] where it is encrypted with another key, or
    /// is not and has to be; [`Error::Unsupported`] for a newer format.
    pub fn open(store: Arc<dyn Store>, options: Options) -> Result<Self> {
        check_options(&options)?;
        let root = store.root();
        let mut lock = None;
        let makes_it = matches!(options.access, Access::Write | Access::Rank);
        if makes_it {
            refuse_foreign(store.as_ref())?;
            store.create_folders()?;
        }
        if options.access == Access::Write {
            lock = Some(store.lock(&holder())?);
        }
        let mut listing = match options.access {
            Access::Write => Listing::settled(store.as_ref())?,
            Access::Rank | Access::Tag | Access::Read => Listing::read(store.as_ref())?,
        };
        let (marker, store) = open_marker(store, &listing, makes_it, &options)?;
        let recovered = if options.access == Access::Write {
            recover::recover(&store, &mut listing)?
        } else {
            Recovered::default()
        };
        let state = State { listing, stale_packs: recovered.stale_packs, ..State::default() };
        Ok(Self {
            shared: Arc::new(Shared {
                registry: Registry::of(&root),
                threads: Arc::new(Threads::new(options.threads)),
                store,
                options,
                stage_pool: Arc::new(StagePool::default()),
                later_pool: Arc::new(StagePool::default()),
                repository_id: marker.repository_id,
                recovered,
                lock: Mutex::new(lock),
                state: Mutex::new(state),
                experience: Mutex::default(),
                merging: Mutex::default(),
                replacing: Mutex::default(),
                closing: AtomicBool::new(false),
                nonce: random_u128() as u64,
                process: std::process::id(),
            }),
        })
    }

    /// The root, for messages.
    #[must_use]
    pub fn root(&self) -> String {
        self.shared.store.root()
    }

    /// Identity of the repository: 32 hex digits.
    #[must_use]
    pub fn repository_id(&self) -> &str {
        &self.shared.repository_id
    }

    /// What recovery did when this handle was opened.
    #[must_use]
    pub fn recovered(&self) -> &Recovered {
        &self.shared.recovered
    }

    /// The store, for callers that look at objects (the command line, tests).
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.shared.store
    }

    /// Commit numbers, newest first: the order in which an automatic resume tries them.
    pub fn candidates(&self) -> Result<Vec<u64>> {
        Ok(self.shared.refreshed()?.listing.seqs.iter().rev().copied().collect())
    }

    /// All snapshots with their headers. The first call reads each manifest's first line; later calls
    /// read only new ones.
    pub fn list(&self) -> Result<Listed> {
        self.shared.list()
    }

    /// Header of one snapshot.
    ///
    /// # Errors
    /// [`Error::SnapshotNotFound`], [`Error::Corrupt`], [`Error::Unsupported`].
    pub fn header(&self, seq: u64) -> Result<Arc<Header>> {
        self.shared.header(seq)
    }

    /// Commit number that a reference means. For `latest` no header is read.
    ///
    /// # Errors
    /// [`Error::SnapshotNotFound`] that says what there is instead.
    pub fn resolve(&self, text: &str) -> Result<u64> {
        let reference = Reference::parse(text)?;
        if reference.may_fall_back()
            && let Some(newest) = self.shared.refreshed()?.listing.seqs.last()
        {
            return Ok(*newest);
        }
        let listed = self.list()?;
        if let Reference::Seq(seq) = reference
            && listed.damaged.iter().any(|(damaged, _)| *damaged == seq)
        {
            return Ok(seq);
        }
        let tags = match reference {
            Reference::Tag(_) => self.tags()?.into_iter().map(|(name, tag)| (name, tag.seq)).collect(),
            _ => BTreeMap::new(),
        };
        let mode = match &reference {
            Reference::Best(metric, _) => self.policy_mode(metric),
            _ => Mode::Min,
        };
        catalog::resolve(&self.root(), &reference, text, &listed.headers, &tags, mode)
    }

    /// Direction that the retention policy gives a metric, `Min` where it says nothing.
    fn policy_mode(&self, metric: &str) -> Mode {
        self.shared
            .options
            .rules
            .iter()
            .find_map(|rule| match rule {
                Rule::Best { metric: known, mode, .. } if known == metric => Some((*mode).into()),
                _ => None,
            })
            .unwrap_or(Mode::Min)
    }

    /// Opens a snapshot for reading; it is kept from retention while the value lives.
    ///
    /// # Errors
    /// [`Error::SnapshotNotFound`], [`Error::Corrupt`], [`Error::Unsupported`].
    pub fn snapshot(&self, seq: u64) -> Result<Snapshot> {
        Snapshot::open(Arc::clone(&self.shared), seq)
    }

    /// Notes that this run continues from a snapshot: it is the parent of the next save and is kept.
    /// `verified` says that every chunk of it was read and verified by this handle.
    pub fn adopt(&self, snapshot: &Snapshot, verified: bool) {
        self.go_on(snapshot, verified);
        self.shared.lock_state().resumed_from = Some(snapshot.manifest().header.seq);
    }

    /// Notes that this run saved a snapshot by another handle: it is the parent of the next save, and retention
    /// may take it like any other.
    pub fn follow(&self, snapshot: &Snapshot) {
        self.go_on(snapshot, false);
    }

    fn go_on(&self, snapshot: &Snapshot, verified: bool) {
        let seq = snapshot.manifest().header.seq;
        loop {
            let merge_count = self.shared.lock_state().merge_count;
            // A merge may have replaced its manifest: the next save must not bring the old packs back.
            let now = if merge_count == snapshot.merge_count() {
                Some(snapshot.latest())
            } else {
                self.shared.manifest(seq).ok().map(Arc::new)
            };
            let base = now.map(|now| Arc::new(Base::new(seq, now.body.clone(), verified)));
            let mut state = self.shared.lock_state();
            if state.merge_count == merge_count {
                state.current = Some(seq);
                state.base = base;
                return;
            }
        }
    }

    /// Notes that the store may list other snapshots than before: the next verb looks.
    pub fn look_again(&self) {
        self.shared.lock_state().stale_listing = true;
    }

    /// Releases the writer lock. Saves that are running keep the repository usable until they end, so
    /// callers wait for them first; a merge that runs is ended.
    pub fn close(&self) {
        self.shared.closing.store(true, Ordering::Relaxed);
        self.shared.finish_merges();
        *self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// In a forked child: lets go of the lock's file without releasing the parent's lock.
    pub fn abandon(&self) {
        if let Some(lock) = self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner).take() {
            lock.abandon();
        }
    }
}

impl Shared {
    fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_experience(&self) -> MutexGuard<'_, Experience> {
        self.experience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state; a handle that does not hold the lock, or that met a failure, first looks at the store
    /// again.
    fn refreshed(&self) -> Result<MutexGuard<'_, State>> {
        let mut state = self.lock_state();
        let is_writer = self.options.access == Access::Write;
        if !is_writer || state.stale_listing {
            let list = if is_writer { Listing::settled } else { Listing::read };
            state.listing = list(self.store.as_ref())?;
            state.stale_listing = false;
            let State { listing, headers, pack_tables, .. } = &mut *state;
            headers.retain(|seq, _| listing.seqs.contains(seq));
            pack_tables.retain(|seq, _| listing.seqs.contains(seq));
        }
        Ok(state)
    }

    fn must_write(&self, what: &str) -> Result<()> {
        self.same_process(what)?;
        match self.options.access {
            Access::Write => {}
            Access::Rank => {
                let reason = format!("this is rank {}; only the coordinator does that", self.options.rank);
                return Err(Error::invalid(what, reason));
            }
            Access::Tag | Access::Read => {
                return Err(Error::invalid(what, "the repository was opened read-only"));
            }
        }
        if self.lock.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            return Err(Error::invalid(what, "the repository is closed"));
        }
        self.store.require_ours()
    }

    fn may_tag(&self, what: &str) -> Result<()> {
        self.same_process(what)?;
        if self.options.access == Access::Read {
            return Err(Error::invalid(what, "the repository was opened read-only"));
        }
        self.store.require_ours()
    }

    fn same_process(&self, what: &str) -> Result<()> {
        if std::process::id() == self.process {
            return Ok(());
        }
        Err(Error::invalid(
            what,
            format!(
                "the repository was opened by process {}, and this is a fork of it: open it anew here",
                self.process
            ),
        ))
    }

    fn no_such_seq(&self, seq: u64) -> Error {
        Error::SnapshotNotFound {
            reference: format!("seq:{seq}"),
            root: self.store.root(),
            reason: "it is not there, or no more".to_owned(),
        }
    }

    /// Says whether the store has the manifest now.
    fn require_manifest(&self, seq: u64) -> Result<()> {
        let key = Key::new(Folder::Snapshots, &names::manifest_name(seq))?;
        match self.store.open(&key) {
            Err(error) if error.is_not_found() => Err(self.no_such_seq(seq)),
            opened => opened.map(|_| ()),
        }
    }

    fn header(&self, seq: u64) -> Result<Arc<Header>> {
        if let Some(header) = self.lock_state().headers.get(&seq) {
            return Ok(Arc::clone(header));
        }
        let header = Arc::new(
            read_header(self.store.as_ref(), seq)
                .map_err(|error| if error.is_not_found() { self.no_such_seq(seq) } else { error })?,
        );
        self.lock_state().headers.insert(seq, Arc::clone(&header));
        Ok(header)
    }

    /// Whether the manifest can be read without a network: only then do saves, merges and sweeps look into it.
    fn has_manifest_at_hand(&self, seq: u64) -> bool {
        Key::new(Folder::Snapshots, &names::manifest_name(seq)).is_ok_and(|key| self.store.is_at_hand(&key))
    }

    fn manifest(&self, seq: u64) -> Result<Manifest> {
        let key = Key::new(Folder::Snapshots, &names::manifest_name(seq))?;
        let bytes = self
            .store
            .get(&key, limits::MANIFEST_LIMIT_BYTES)
            .map_err(|error| if error.is_not_found() { self.no_such_seq(seq) } else { error })?;
        let manifest = manifest::decode(&key.to_string(), &bytes)?;
        check_seq(&key, seq, &manifest.header)?;
        Ok(manifest)
    }

    fn list(&self) -> Result<Listed> {
        let seqs = self.refreshed()?.listing.seqs.clone();
        let mut listed = Listed::default();
        for seq in seqs {
            match self.header(seq) {
                Ok(header) => listed.headers.push(header),
                // Deleted by another process since the listing.
                Err(Error::SnapshotNotFound { .. }) => {}
                Err(error) if error.is_damage() => listed.damaged.push((seq, error.chain())),
                Err(error) => return Err(error),
            }
        }
        Ok(listed)
    }
}
