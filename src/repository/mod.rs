//! The facade: a repository, saves into it, snapshots out of it.
//!
//! The only place of the engine with a clock and with randomness. A [`Repository`] is cheap to clone and
//! safe to use from many threads; one process at a time holds it for writing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::catalog::{self, Mode, Reference};
use crate::error::{Error, Result};
use crate::format::limits;
use crate::format::manifest;
use crate::format::marker::Marker;
use crate::format::model::{Header, Manifest, PackRecord};
use crate::format::names;
use crate::format::tag::{self, Tag};
use crate::inflight::{Hold, Registry};
use crate::plan::{Base, Want, plan_read};
use crate::read;
use crate::recover::{self, Listing, Recovered};
use crate::retain::{self, Protected, Rule};
use crate::stage::StagePool;
use crate::store::{Folder, Key, PutMode, Store, WriterLock};
use crate::sweep;
use crate::threads::Threads;
use crate::verify;

mod save;
pub use save::{SaveReport, SaveRequest, SaveSession};

/// Bytes of a manifest that are read to get its header; enough for nearly all.
const HEADER_READ_BYTES: u64 = 16 * 1024;

/// What a handle may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Save, prune, delete; takes the writer lock.
    Write,
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
    /// Rank of this process.
    pub rank: u32,
    /// Ranks that save together.
    pub world_size: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            access: Access::Write,
            chunk_bytes: 1 << 20,
            threads: 1,
            rules: Vec::new(),
            rank: 0,
            world_size: 1,
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
    repository_id: String,
    recovered: Recovered,
    lock: Mutex<Option<Box<dyn WriterLock>>>,
    state: Mutex<State>,
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
    /// The snapshot this run is at: parent of the next save.
    current: Option<u64>,
    resumed_from: Option<u64>,
    last_tried_seq: u64,
    stale_packs: bool,
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
    /// [`Error::Locked`] where another process writes; [`Error::Unsupported`] for a newer format.
    pub fn open(store: Arc<dyn Store>, options: Options) -> Result<Self> {
        check_options(&options)?;
        let root = store.root();
        let mut lock = None;
        if options.access == Access::Write {
            refuse_foreign(store.as_ref())?;
            store.create_folders()?;
            lock = Some(store.lock(&holder())?);
        }
        let mut listing = Listing::read(store.as_ref())?;
        let marker = open_marker(&store, &listing, options.access == Access::Write)?;
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
                repository_id: marker.repository_id,
                recovered,
                lock: Mutex::new(lock),
                state: Mutex::new(state),
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
        let manifest = self.shared.manifest(seq)?;
        let packs = manifest.body.packs.iter().map(|record| record.name.clone());
        let (hold, gone) = self.shared.registry.hold(Some(seq), packs);
        if !gone.is_empty() {
            return Err(self.shared.no_such_seq(seq));
        }
        Ok(Snapshot { manifest, shared: Arc::clone(&self.shared), _hold: hold })
    }

    /// Notes that this run continues from a snapshot: it is the parent of the next save and is kept.
    /// `verified` says that every chunk of it was read and verified by this handle.
    pub fn adopt(&self, snapshot: &Snapshot, verified: bool) {
        let seq = snapshot.manifest.header.seq;
        let mut state = self.shared.lock_state();
        state.current = Some(seq);
        state.resumed_from = Some(seq);
        state.base = Some(Arc::new(Base::new(seq, &snapshot.manifest.body, verified)));
    }

    /// What retention would do now, and the bytes it would free; does it unless `dry_run`.
    pub fn prune(&self, dry_run: bool) -> Result<(retain::Plan, u64)> {
        if !dry_run {
            self.shared.must_write("prune")?;
        }
        self.shared.retention(dry_run)
    }

    /// Deletes one snapshot and the packs that only it referred to. A reader that holds it finishes.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where it has a tag.
    pub fn delete(&self, seq: u64) -> Result<u64> {
        self.shared.must_write("delete a snapshot")?;
        let tags: Vec<String> =
            self.tags()?.into_iter().filter(|(_, tag)| tag.seq == seq).map(|(name, _)| name).collect();
        if !tags.is_empty() {
            return Err(Error::invalid(
                format!("deletion of snapshot {seq}"),
                format!("it is pinned; unpin first: {}", tags.join(", ")),
            ));
        }
        if !self.shared.lock_state().listing.seqs.contains(&seq) {
            return Err(self.shared.no_such_seq(seq));
        }
        self.shared.remove(&[seq])
    }

    /// Names a snapshot; retention keeps it until the name is removed.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where the name is no legal one or names another snapshot already.
    pub fn pin(&self, seq: u64, name: &str) -> Result<()> {
        tag::validate_tag_name(name)?;
        self.shared.may_tag("pin a snapshot")?;
        let key = Key::new(Folder::Tags, name)?;
        self.shared.store.create_folders()?;
        let bytes = Tag { seq, created_at_unix_ms: now_unix_ms() }.encode()?;
        match self.shared.store.put(&key, &bytes, PutMode::IfAbsent) {
            Err(Error::Conflict { .. }) => match self.tags()?.get(name) {
                Some(known) if known.seq == seq => Ok(()),
                Some(known) => Err(Error::invalid(
                    format!("tag `{name}`"),
                    format!("names snapshot {} already; unpin it first", known.seq),
                )),
                None => self.shared.store.put(&key, &bytes, PutMode::Replace),
            },
            other => other,
        }
    }

    /// Removes a name.
    ///
    /// # Errors
    /// [`Error::SnapshotNotFound`] where there is no such name.
    pub fn unpin(&self, name: &str) -> Result<()> {
        self.shared.may_tag("unpin a snapshot")?;
        let tags = self.tags()?;
        if !tags.contains_key(name) {
            let known: Vec<&str> = tags.keys().map(String::as_str).collect();
            return Err(Error::SnapshotNotFound {
                reference: format!("tag:{name}"),
                root: self.root(),
                reason: if known.is_empty() {
                    "there are no tags".to_owned()
                } else {
                    format!("tags: {}", known.join(", "))
                },
            });
        }
        self.shared.store.delete(Folder::Tags, &[name.to_owned()]).map(|_| ())
    }

    /// All readable tags by name; read from the store each time, since other processes may pin.
    pub fn tags(&self) -> Result<BTreeMap<String, Tag>> {
        self.shared.tags()
    }

    /// Checks packs and chunks of one snapshot, or of all of them.
    ///
    /// # Errors
    /// [`Error::Interrupted`] after a cancel. Damage is a finding, not an error.
    pub fn verify(&self, seq: Option<u64>, sample: f64, cancelled: &AtomicBool) -> Result<verify::Report> {
        let mut report = verify::Report::default();
        let seqs: Vec<u64> = match seq {
            Some(seq) => vec![seq],
            None => self.candidates()?.into_iter().rev().collect(),
        };
        let mut manifests = Vec::new();
        for seq in seqs {
            match self.shared.manifest(seq) {
                Ok(manifest) => manifests.push(manifest),
                Err(error @ Error::SnapshotNotFound { .. }) => return Err(error),
                Err(error) => {
                    report.add_error(&error, &format!("snapshots/{}", names::manifest_name(seq)), None)
                }
            }
        }
        verify::verify(
            self.shared.store.as_ref(),
            &self.shared.threads,
            &manifests,
            sample,
            cancelled,
            &mut report,
        )?;
        if let Err(error) = open_marker(&self.shared.store, &Listing::default(), false) {
            report.add_error(&error, names::MARKER_NAME, None);
        }
        if let Err(error) = self.tags() {
            report.add_error(&error, "tags", None);
        }
        Ok(report)
    }

    /// Releases the writer lock. Saves that are running keep the repository usable until they end, so
    /// callers wait for them first.
    pub fn close(&self) {
        *self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// In a forked child: lets go of the lock's file without releasing the parent's lock.
    pub fn abandon(&self) {
        if let Some(lock) = self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner).take() {
            lock.abandon();
        }
    }
}

/// A snapshot that is open for reading.
#[derive(Debug)]
pub struct Snapshot {
    manifest: Manifest,
    shared: Arc<Shared>,
    _hold: Hold,
}

impl Snapshot {
    /// The decoded, validated manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Fills the caller's buffers with wanted regions; returns the verified raw bytes.
    ///
    /// # Errors
    /// As [`read::run`]; [`Error::InvalidInput`] where a want and its buffer don't fit the manifest.
    pub fn read(&self, wants: &[Want], targets: &mut [&mut [u8]], cancelled: &AtomicBool) -> Result<u64> {
        let body = &self.manifest.body;
        for want in wants {
            let entry = body
                .entries
                .get(want.entry)
                .ok_or_else(|| Error::invalid("entry", "index past the manifest's entries"))?;
            let length = crate::tensor::raw_length_bytes(&want.region.lengths, entry.stored_dtype);
            let target = targets.get(want.target).map(|target| target.len() as u64);
            if !want.region.fits(&entry.shape) || length.is_none() || length != target {
                return Err(Error::Mismatch {
                    name: entry.name.clone(),
                    field: "size",
                    expected: format!("{target:?} bytes"),
                    found: format!("{length:?} bytes"),
                });
            }
        }
        let plan = plan_read(body, wants);
        read::run(self.shared.store.as_ref(), &self.shared.threads, body, &plan, targets, cancelled)
    }

    /// Reads and verifies entries without keeping their bytes; returns the raw bytes that were checked.
    ///
    /// # Errors
    /// As [`read::run`].
    pub fn check(&self, entries: &[usize], cancelled: &AtomicBool) -> Result<u64> {
        let body = &self.manifest.body;
        let wants: Vec<Want> = entries
            .iter()
            .map(|&entry| {
                let found = body
                    .entries
                    .get(entry)
                    .ok_or_else(|| Error::invalid("entry", "index past the manifest's entries"))?;
                Ok(Want { entry, region: crate::tensor::Region::whole(&found.shape), target: 0 })
            })
            .collect::<Result<_>>()?;
        read::check(
            self.shared.store.as_ref(),
            &self.shared.threads,
            body,
            &plan_read(body, &wants),
            cancelled,
        )
    }

    /// The whole of an entry as one stretch of a file that may be mapped: (path, offset from the file's
    /// first byte, length in bytes). `None` where its chunks are coded, not consecutive, or not in a file.
    #[must_use]
    pub fn mappable(&self, entry: usize) -> Option<(std::path::PathBuf, u64, u64)> {
        let entry = self.manifest.body.entries.get(entry)?;
        let [shard] = entry.shards.as_slice() else { return None };
        let first = shard.chunks.first()?;
        let mut end = first.offset_bytes;
        for chunk in &shard.chunks {
            if chunk.pack != first.pack
                || chunk.offset_bytes != end
                || chunk.codec != crate::format::model::Codec::Store
            {
                return None;
            }
            end += chunk.stored_length_bytes;
        }
        let key = Key::new(Folder::Packs, &self.manifest.body.packs.get(first.pack as usize)?.name).ok()?;
        Some((self.shared.store.local_path(&key)?, first.offset_bytes, end - first.offset_bytes))
    }
}

impl Shared {
    fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state; a handle that does not hold the lock first looks at the store again.
    fn refreshed(&self) -> Result<MutexGuard<'_, State>> {
        let mut state = self.lock_state();
        if self.options.access != Access::Write {
            state.listing = Listing::read(self.store.as_ref())?;
            let State { listing, headers, pack_tables, .. } = &mut *state;
            headers.retain(|seq, _| listing.seqs.contains(seq));
            pack_tables.retain(|seq, _| listing.seqs.contains(seq));
        }
        Ok(state)
    }

    fn must_write(&self, what: &str) -> Result<()> {
        self.same_process(what)?;
        if self.options.access != Access::Write {
            return Err(Error::invalid(what, "the repository was opened read-only"));
        }
        if self.lock.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            return Err(Error::invalid(what, "the repository is closed"));
        }
        Ok(())
    }

    fn may_tag(&self, what: &str) -> Result<()> {
        self.same_process(what)?;
        if self.options.access == Access::Read {
            return Err(Error::invalid(what, "the repository was opened read-only"));
        }
        Ok(())
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

    fn tags(&self) -> Result<BTreeMap<String, Tag>> {
        let mut tags = BTreeMap::new();
        for row in self.store.list(Folder::Tags)? {
            let key = Key::new(Folder::Tags, &row.name)?;
            match self
                .store
                .get(&key, limits::SMALL_OBJECT_LIMIT_BYTES)
                .and_then(|bytes| Tag::decode(&key.to_string(), &bytes))
            {
                Ok(tag) => {
                    tags.insert(row.name, tag);
                }
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(tags)
    }

    /// Plans retention and, unless `dry_run`, carries it out.
    fn retention(&self, dry_run: bool) -> Result<(retain::Plan, u64)> {
        let listed = self.list()?;
        let mut protected = Protected { held: self.registry.held_snapshots(), ..Protected::default() };
        for (name, tag) in self.tags()? {
            protected.tags.entry(tag.seq).or_default().push(name);
        }
        protected.resumed_from = self.lock_state().resumed_from;
        let plan = retain::plan(&listed.headers, &self.options.rules, &protected);
        let removed: Vec<u64> = plan.removed.iter().map(|row| row.0).collect();
        let freed_bytes = if dry_run { self.would_free(&removed)? } else { self.remove(&removed)? };
        Ok((plan, freed_bytes))
    }

    /// Bytes of the packs that only these snapshots refer to.
    fn would_free(&self, removed: &[u64]) -> Result<u64> {
        let removed: HashSet<u64> = removed.iter().copied().collect();
        let (mut doomed, mut kept) = (HashMap::new(), HashSet::new());
        for (seq, table) in self.load_pack_tables()? {
            for record in table.iter() {
                if removed.contains(&seq) {
                    doomed.insert(record.name.clone(), record.length_bytes);
                } else {
                    kept.insert(record.name.clone());
                }
            }
        }
        Ok(doomed.iter().filter(|(name, _)| !kept.contains(*name)).map(|(_, length)| length).sum())
    }

    /// Deletes manifests, then the packs that no manifest refers to; returns the bytes freed.
    fn remove(&self, seqs: &[u64]) -> Result<u64> {
        let mut listing = {
            let state = self.lock_state();
            if seqs.is_empty() && !state.stale_packs {
                return Ok(0);
            }
            state.listing.clone()
        };
        sweep::delete_manifests(&self.store, &mut listing, seqs)?;
        {
            let mut state = self.lock_state();
            for seq in seqs {
                state.listing.seqs.remove(seq);
                state.headers.remove(seq);
                state.pack_tables.remove(seq);
            }
            state.listing.tombstones.extend(&listing.tombstones);
            if state.base.as_ref().is_some_and(|base| seqs.contains(&base.seq)) {
                state.base = None;
            }
            state.stale_packs = true;
        }
        let freed = sweep::delete_packs(&self.store, &self.registry, &mut listing, || {
            Ok(self
                .load_pack_tables()?
                .values()
                .flat_map(|table| table.iter().map(|record| record.name.clone()))
                .collect())
        })?;
        self.lock_state().stale_packs = false;
        Ok(freed)
    }

    /// Pack tables of every snapshot; each manifest is read at most once by this handle.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where a manifest is damaged: what it refers to is unknown, so nothing may be
    /// deleted.
    fn load_pack_tables(&self) -> Result<HashMap<u64, Arc<Vec<PackRecord>>>> {
        let (seqs, mut tables) = {
            let state = self.lock_state();
            (state.listing.seqs.clone(), state.pack_tables.clone())
        };
        tables.retain(|seq, _| seqs.contains(seq));
        for seq in seqs {
            if let std::collections::hash_map::Entry::Vacant(slot) = tables.entry(seq) {
                let table = Arc::new(self.manifest(seq)?.body.packs);
                self.lock_state().pack_tables.insert(seq, Arc::clone(&table));
                slot.insert(table);
            }
        }
        Ok(tables)
    }
}

fn check_options(options: &Options) -> Result<()> {
    let legal = limits::CHUNK_BYTES_RANGE;
    if !options.chunk_bytes.is_power_of_two() || !legal.contains(&options.chunk_bytes) {
        return Err(Error::invalid(
            format!("chunk_bytes {}", options.chunk_bytes),
            format!("must be a power of two from {} to {}", legal.start(), legal.end()),
        ));
    }
    if options.rank >= options.world_size {
        return Err(Error::invalid(
            format!("rank {}", options.rank),
            format!("must be below the world size: {}", options.world_size),
        ));
    }
    Ok(())
}

/// Refuses to turn a folder that holds other things into a repository.
fn refuse_foreign(store: &dyn Store) -> Result<()> {
    let names: Vec<String> = store.list(Folder::Root)?.into_iter().map(|row| row.name).collect();
    if names.is_empty() || names.iter().any(|name| name == names::MARKER_NAME) {
        return Ok(());
    }
    let foreign = names.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
    Err(Error::NotARepository {
        root: store.root(),
        reason: format!("the folder holds other files: {foreign}"),
    })
}

/// Reads the marker; a writer makes it where there is none, and makes it anew where it is damaged but a
/// manifest still tells the identity.
fn open_marker(store: &Arc<dyn Store>, listing: &Listing, writable: bool) -> Result<Marker> {
    let key = Key::new(Folder::Root, names::MARKER_NAME)?;
    let found = store.get(&key, limits::SMALL_OBJECT_LIMIT_BYTES).and_then(|bytes| Marker::decode(&bytes));
    let error = match found {
        Ok(marker) => {
            if writable {
                marker.require_writable()?;
            }
            return Ok(marker);
        }
        Err(error) if error.is_not_found() || matches!(error, Error::Corrupt { .. }) => error,
        Err(error) => return Err(error),
    };
    let known_id = listing
        .seqs
        .iter()
        .rev()
        .find_map(|&seq| read_header(store.as_ref(), seq).ok())
        .map(|header| header.repository_id);
    let absent = error.is_not_found();
    match known_id {
        Some(repository_id) => {
            let marker = Marker::new(repository_id);
            if writable {
                store.put(&key, &marker.encode()?, PutMode::Replace)?;
            }
            Ok(marker)
        }
        None if absent && writable => {
            let marker = Marker::new(format!("{:032x}", random_u128()));
            store.put(&key, &marker.encode()?, PutMode::IfAbsent)?;
            Ok(marker)
        }
        None if absent => Err(Error::NotARepository {
            root: store.root(),
            reason: format!("there is no `{}`", names::MARKER_NAME),
        }),
        None => Err(error),
    }
}

/// Reads the first line of a manifest.
fn read_header(store: &dyn Store, seq: u64) -> Result<Header> {
    let key = Key::new(Folder::Snapshots, &names::manifest_name(seq))?;
    let object = store.open(&key)?;
    let mut length = HEADER_READ_BYTES.min(object.length_bytes());
    loop {
        let mut prefix = vec![0; length as usize];
        object.read_at(0, &mut prefix)?;
        if let Some(line) = manifest::decode_header(&key.to_string(), &prefix)? {
            check_seq(&key, seq, &line.header)?;
            return Ok(line.header);
        }
        if length == object.length_bytes() {
            return Err(Error::corrupt(
                key.to_string(),
                length,
                "header line",
                "a line end",
                "the end of the object",
            ));
        }
        length = (length * 8).min(object.length_bytes());
    }
}

/// A manifest that lies under another number than its own was copied or renamed.
fn check_seq(key: &Key, seq: u64, header: &Header) -> Result<()> {
    if header.seq == seq {
        return Ok(());
    }
    Err(Error::corrupt(key.to_string(), 0, "seq", seq, header.seq))
}

/// Who holds the lock, for the one who finds it held.
fn holder() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("process {} on {host} since {} (unix milliseconds)", std::process::id(), now_unix_ms())
}

#[expect(clippy::disallowed_methods, reason = "the facade is the one place with a clock")]
fn now_unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Random bits from the system; identities, not secrets.
fn random_u128() -> u128 {
    use std::hash::{BuildHasher, Hasher};
    let half = || {
        let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        hasher.write_u64(now_unix_ms());
        u128::from(hasher.finish())
    };
    half() << 64 | half()
}
