//! The store of a repository with a remote: the folder first, the bucket behind it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::model::PackRecord;
use crate::format::names;
use crate::store::remote::{RemoteStore, Version};
use crate::store::{Folder, Key, Listed, PutMode, ReadAt, StagedWrite, Store, WriterLock};

use super::SyncOptions;
use super::clock::{Clock, SystemClock};
use super::head::{Heads, Lazy};
use super::lease::{LeaseKeeper, LeaseState};
use super::notes::{MIRRORED, Notes};
use super::push::Figures;
use super::view::{self, View};

/// What a handle does with the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierAccess {
    /// Holds the lease and pushes.
    Write,
    /// Writes packs of sessions into the folder, and reads from both.
    Rank,
    /// Writes tags into the folder, and reads from both.
    Tag,
    /// Reads from both.
    Read,
}

/// A folder and its bucket as one store.
///
/// What is written goes to the folder. What is read comes from there, and else from the bucket. Packs are listed from
/// the folder alone; manifests, tags and receipts from both, less what was deleted here and is still to go from the
/// bucket. The writer knows the bucket by the view that was taken with the lease; others look each time they list.
#[derive(Debug)]
pub struct TieredStore {
    pub(super) local: Arc<dyn Store>,
    pub(super) remote: Arc<dyn RemoteStore>,
    pub(super) access: TierAccess,
    pub(super) options: SyncOptions,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) lease: Arc<LeaseKeeper>,
    pub(super) notes: Arc<Notes>,
    pub(super) heads: Heads,
    pub(super) moved_bytes: AtomicU64,
    /// Something was put or removed here since the last push began that has succeeded.
    pub(super) has_changed: AtomicBool,
    /// Held while objects are noted as removed and then deleted here: in between a note looks void.
    pub(super) removing: Mutex<()>,
    state: Mutex<State>,
}

/// What the writer knows.
#[derive(Debug, Default)]
pub(super) struct State {
    /// `None` until the bucket was seen, with the lease in hand.
    pub(super) view: Option<View>,
    /// Digests of local manifests and receipts, until they are replaced.
    pub(super) digests: HashMap<Key, ChunkDigest>,
    /// Pack tables of local manifests, by seq, with the digest of the header line.
    pub(super) tables: HashMap<u64, (ChunkDigest, Arc<Vec<PackRecord>>)>,
    /// Pack tables of manifests in the bucket that no local one tells, by seq, with their version.
    pub(super) remote_tables: HashMap<u64, (Version, Arc<Vec<PackRecord>>)>,
    /// Leftovers of other writers were looked for since the lease was taken.
    pub(super) is_swept: bool,
    /// Snapshots of the folder that were dropped because another writer has used their numbers.
    pub(super) discarded: Vec<u64>,
    /// What went wrong beside a call that went on without the bucket, until somebody takes it.
    pub(super) failure: Option<Arc<Error>>,
    pub(super) figures: Figures,
}

impl TieredStore {
    /// Puts a folder before a bucket. Nothing is asked of either before [`Store::lock`], or the first read.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for options that mean nothing.
    pub fn open(
        local: Arc<dyn Store>,
        remote: Arc<dyn RemoteStore>,
        access: TierAccess,
        options: SyncOptions,
    ) -> Result<Arc<Self>> {
        Self::with_clock(local, remote, access, options, Arc::new(SystemClock::default()))
    }

    /// As [`TieredStore::open`], with another clock.
    ///
    /// # Errors
    /// As there.
    pub fn with_clock(
        local: Arc<dyn Store>,
        remote: Arc<dyn RemoteStore>,
        access: TierAccess,
        options: SyncOptions,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>> {
        options.check()?;
        let (milliseconds, takeover) = (options.lease_milliseconds(), options.takeover);
        let notes = Arc::new(Notes::new(Arc::clone(&local), remote.root()));
        let lease = LeaseKeeper::new(
            Arc::clone(&remote),
            Arc::clone(&clock),
            Arc::clone(&notes),
            milliseconds,
            takeover,
        )?;
        Ok(Arc::new(Self {
            local,
            remote,
            access,
            options,
            clock,
            lease: Arc::new(lease),
            notes,
            heads: Heads::default(),
            moved_bytes: AtomicU64::new(0),
            has_changed: AtomicBool::new(false),
            removing: Mutex::default(),
            state: Mutex::default(),
        }))
    }

    /// The options it was opened with.
    #[must_use]
    pub fn options(&self) -> &SyncOptions {
        &self.options
    }

    /// The clock it was opened with.
    #[must_use]
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// The bucket.
    #[must_use]
    pub fn remote(&self) -> &Arc<dyn RemoteStore> {
        &self.remote
    }

    /// What is known of the lease.
    #[must_use]
    pub fn lease(&self) -> LeaseState {
        self.lease.state()
    }

    /// Snapshots of the folder that were dropped at open because another writer has used their numbers.
    #[must_use]
    pub fn discarded(&self) -> Vec<u64> {
        self.state().discarded.clone()
    }

    /// What went wrong with the bucket beside a call that went on without it, once.
    #[must_use]
    pub fn take_failure(&self) -> Option<Arc<Error>> {
        self.state().failure.take()
    }

    /// How far the way to the bucket is.
    #[must_use]
    pub fn figures(&self) -> Figures {
        self.state().figures.clone()
    }

    /// Bytes that went over the wire, those of attempts that failed too.
    #[must_use]
    pub fn moved_bytes(&self) -> u64 {
        self.moved_bytes.load(Ordering::Relaxed)
    }

    /// Snapshots of the folder that the bucket lacks, ascending, and the newest that it has, as far as is known.
    #[must_use]
    pub fn standing(&self) -> (Vec<u64>, Option<u64>) {
        let there: BTreeSet<u64> = {
            let state = self.state();
            let pushed = self.notes.all_pushed();
            let noted = pushed.keys().filter(|key| key.folder() == Folder::Snapshots).map(Key::name);
            let name = |name: &str| names::parse_manifest_name(name);
            match &state.view {
                Some(view) => view.rows(Folder::Snapshots).filter_map(|(known, _)| name(known)).collect(),
                None => noted.filter_map(name).collect(),
            }
        };
        // A folder that can't be listed fails whoever needs it.
        let local = self.local_seqs().unwrap_or_default();
        (local.difference(&there).copied().collect(), there.last().copied())
    }

    /// Objects that were deleted here and may still lie in the bucket.
    #[must_use]
    pub fn removal_count(&self) -> u64 {
        self.notes.removals().len() as u64
    }

    /// True where an earlier process has left something to do.
    #[must_use]
    pub fn has_work(&self) -> bool {
        let lacks_marker = {
            let key = Key::new(Folder::Root, names::MARKER_NAME);
            let state = self.state();
            state.view.as_ref().is_some_and(|view| key.is_ok_and(|key| !view.has(&key)))
        };
        lacks_marker
            || self.lease.is_wanted()
            || !self.standing().0.is_empty()
            || !self.notes.removals().is_empty()
            || !self.notes.uploads().is_empty()
    }

    /// True where this handle has put or removed what the bucket has not been told of: a snapshot, a tag, a receipt.
    #[must_use]
    pub fn has_changed(&self) -> bool {
        self.has_changed.load(Ordering::Relaxed)
    }

    /// True where the bucket was seen with the lease in hand.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.state().view.is_some() && self.lease.is_held()
    }

    /// Renews the lease where it is time for that.
    ///
    /// # Errors
    /// [`Error::Conflict`] where another writer has it, for good; [`Error::Store`] where the bucket can't be reached.
    pub fn keep_lease(&self) -> Result<()> {
        self.lease.renew_if_due()
    }

    /// Time until the lease is to be renewed, where it is held.
    #[must_use]
    pub fn lease_due_in(&self) -> Option<Duration> {
        self.lease.due_in()
    }

    /// Lets go of the lease: nothing is pushed any more. A bucket that could not be reached just now is not asked: there
    /// the lease runs out by itself.
    ///
    /// # Errors
    /// [`Error::Store`] where the bucket can't be reached.
    pub fn release(&self, is_reachable: bool) -> Result<()> {
        if is_reachable {
            return self.lease.release();
        }
        self.lease.close();
        Ok(())
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What lies in the bucket, as far as is known.
    pub(super) fn view(&self) -> View {
        self.state().view.clone().unwrap_or_default()
    }

    /// The version of an object of the bucket, as far as is known.
    pub(super) fn version_there(&self, key: &Key) -> Option<Version> {
        self.state().view.as_ref().and_then(|view| view.get(key).map(|row| row.version.clone()))
    }

    pub(super) fn is_writer(&self) -> bool {
        self.access == TierAccess::Write
    }

    /// Commit numbers that have a manifest in the folder.
    pub(super) fn local_seqs(&self) -> Result<BTreeSet<u64>> {
        let rows = self.local.list(Folder::Snapshots)?;
        Ok(rows.iter().filter_map(|row| names::parse_manifest_name(&row.name)).collect())
    }

    /// Runs what needs the bucket; where that can't be reached and the folder holds snapshots, notes the failure and
    /// goes on without.
    fn or_go_on<T>(&self, asked: Result<T>) -> Result<Option<T>> {
        match asked {
            Ok(done) => Ok(Some(done)),
            Err(error @ Error::Store { .. }) if !self.local_seqs()?.is_empty() => {
                self.state().failure = Some(Arc::new(error));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Rows of the bucket that a listing shows beside the local ones.
    fn remote_rows(&self, folder: Folder) -> Result<Vec<Listed>> {
        let (rows, removed) = if self.is_writer() {
            let state = self.state();
            let Some(view) = &state.view else { return Ok(Vec::new()) };
            let rows = view.rows(folder).map(|(name, row)| (name.clone(), row.clone())).collect();
            (rows, self.notes.removals())
        } else {
            let removed = self.notes.removals_now()?;
            let Some(rows) = self.or_go_on(view::list(self.remote.as_ref(), folder))? else {
                return Ok(Vec::new());
            };
            if folder == Folder::Snapshots {
                self.fetch_heads(rows.iter().map(|(name, row)| (folder, name.clone(), row.clone())))?;
            }
            (rows, removed)
        };
        let untagged = if folder == Folder::Tags { self.notes.untagged()? } else { BTreeSet::new() };
        let is_shown = |name: &str| {
            let is_removed = Key::new(folder, name).is_ok_and(|key| removed.contains(&key));
            !is_removed && !untagged.contains(name)
        };
        let shown = rows.into_iter().filter(|(name, _)| is_shown(name));
        Ok(shown.map(|(name, row)| Listed { name, length_bytes: Some(row.length_bytes) }).collect())
    }

    /// Reads the heads of manifests and tags that don't lie in the folder.
    pub(super) fn fetch_heads(&self, rows: impl Iterator<Item = (Folder, String, view::Row)>) -> Result<()> {
        let mut wanted = Vec::new();
        for (folder, name, row) in rows {
            let key = Key::new(folder, &name)?;
            let is_headed = folder == Folder::Tags || names::parse_manifest_name(&name).is_some();
            if is_headed && !self.is_at_hand(&key) {
                wanted.push((key, row));
            }
        }
        self.heads.fetch(self.remote.as_ref(), &wanted)
    }

    /// Opens what does not lie in the folder; `error` says so.
    fn open_remote(&self, key: &Key, error: Error) -> Result<Box<dyn ReadAt>> {
        if key.folder() != Folder::Root && !MIRRORED.contains(&key.folder()) {
            return Err(error);
        }
        if !self.is_writer() {
            return self.remote.open(key);
        }
        let row = self.state().view.as_ref().and_then(|view| view.get(key).cloned());
        let is_deleted = key.folder() != Folder::Packs && self.notes.is_removed(key);
        let Some(row) = row.filter(|_| !is_deleted) else { return Err(error) };
        if key.folder() == Folder::Packs {
            return self.remote.open(key);
        }
        let head = self.heads.get(key, &row.version);
        Ok(Box::new(Lazy::new(Arc::clone(&self.remote), key.clone(), row.length_bytes, head)))
    }

    /// What a second object of this key collides with.
    fn collision(&self, key: &Key) -> Result<Option<Error>> {
        let lies_there = if self.is_writer() {
            let is_known = self.state().view.as_ref().is_some_and(|view| view.has(key));
            is_known && !self.notes.is_removed(key)
        } else if key.folder() == Folder::Tags {
            let rows = self.or_go_on(self.remote_rows(Folder::Tags))?;
            rows.into_iter().flatten().any(|row| row.name == key.name())
        } else {
            false
        };
        let object = || format!("{}/{key}", self.remote.root());
        let by = || "it lies in the bucket already".to_owned();
        Ok((lies_there && !self.is_at_hand(key)).then(|| Error::Conflict { object: object(), by: by() }))
    }
}

impl Store for TieredStore {
    fn root(&self) -> String {
        self.local.root()
    }

    fn create_folders(&self) -> Result<()> {
        self.local.create_folders()
    }

    fn list(&self, folder: Folder) -> Result<Vec<Listed>> {
        // IMPORTANT: the bucket first. What a push moves in between is then listed at least once.
        let remote = match folder {
            Folder::Snapshots | Folder::Tags | Folder::Receipts => self.remote_rows(folder)?,
            _ => Vec::new(),
        };
        let mut rows = self.local.list(folder)?;
        let known: HashSet<String> = rows.iter().map(|row| row.name.clone()).collect();
        rows.extend(remote.into_iter().filter(|row| !known.contains(&row.name)));
        Ok(rows)
    }

    fn get(&self, key: &Key, limit_bytes: u64) -> Result<Vec<u8>> {
        match self.local.get(key, limit_bytes) {
            Err(error) if error.is_not_found() => {}
            got => return got,
        }
        if !self.is_writer() {
            return self.remote.get(key, limit_bytes);
        }
        let object = self.open(key)?;
        if object.length_bytes() > limit_bytes {
            let expected = format!("at most {limit_bytes} bytes");
            let name = format!("{}/{key}", self.remote.root());
            return Err(Error::corrupt(name, 0, "length", expected, object.length_bytes()));
        }
        let mut bytes = vec![0; object.length_bytes() as usize];
        object.read_at(0, &mut bytes)?;
        Ok(bytes)
    }

    fn open(&self, key: &Key) -> Result<Box<dyn ReadAt>> {
        match self.local.open(key) {
            Err(error) if error.is_not_found() => self.open_remote(key, error),
            opened => opened,
        }
    }

    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>> {
        self.local.stage(key)
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        if mode == PutMode::IfAbsent
            && let Some(collision) = self.collision(key)?
        {
            return Err(collision);
        }
        if MIRRORED.contains(&key.folder()) {
            self.has_changed.store(true, Ordering::Relaxed);
        }
        let done = self.local.put(key, bytes, mode);
        // Also after a failure: either object may lie there now.
        let mut state = self.state();
        state.digests.remove(key);
        if let Some(seq) =
            names::parse_manifest_name(key.name()).filter(|_| key.folder() == Folder::Snapshots)
        {
            state.tables.remove(&seq);
        }
        done
    }

    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        let is_mirrored = MIRRORED.contains(&folder);
        // IMPORTANT: noted durably first. A crash in between leaves a note about what still lies here, which is void.
        if is_mirrored && self.is_writer() {
            let keys = names.iter().map(|name| Key::new(folder, name)).collect::<Result<Vec<_>>>()?;
            let _removing = self.removing.lock().unwrap_or_else(PoisonError::into_inner);
            self.has_changed.store(true, Ordering::Relaxed);
            self.notes.remove(keys)?;
            return self.local.delete(folder, names);
        }
        if folder == Folder::Tags && self.access == TierAccess::Tag {
            names.iter().try_for_each(|name| self.notes.untag(name))?;
        }
        self.local.delete(folder, names)
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        self.local.sync_folder(folder)
    }

    fn sweep_staged(&self) -> Result<u64> {
        self.local.sweep_staged()
    }

    /// Takes the lock of the folder, then the lease of the bucket, then the view of it. Where the bucket can't be
    /// reached and the folder holds snapshots, lease and view stay wanted, and saves go on.
    fn lock(&self, holder: &str) -> Result<Box<dyn WriterLock>> {
        let lock = self.local.lock(holder)?;
        if !self.is_writer() {
            return Ok(lock);
        }
        let lost = self.notes.load()?;
        self.state().failure = lost.into_iter().next().map(Arc::new);
        let guard = TieredLock { lock: Some(lock), lease: Arc::clone(&self.lease) };
        let taken = self.lease.take(holder).and_then(|()| self.settle(self.options.diverged));
        if let Err(error) = self.or_go_on(taken) {
            if !matches!(error, Error::Store { .. }) {
                // The caller hears why there is no lock; a lease that stays runs out by itself.
                let _ = self.lease.release();
            }
            return Err(error);
        }
        Ok(Box::new(guard))
    }

    fn free_bytes(&self) -> Option<u64> {
        self.local.free_bytes()
    }

    fn local_path(&self, key: &Key) -> Option<PathBuf> {
        self.local.local_path(key).filter(|_| self.is_at_hand(key))
    }

    fn is_at_hand(&self, key: &Key) -> bool {
        self.local.open(key).is_ok()
    }

    fn is_pushed(&self, key: &Key) -> bool {
        if self.options.prune_unpushed || !self.is_writer() {
            return true;
        }
        let state = self.state();
        let pushed = self.notes.pushed(key);
        match &state.view {
            // Without a view there is only what was noted: the bucket had it.
            None => pushed.is_some(),
            Some(view) => view.get(key).is_some_and(|row| {
                pushed.map_or_else(|| !self.is_at_hand(key), |pushed| pushed.version == row.version.0)
            }),
        }
    }

    fn require_ours(&self) -> Result<()> {
        self.lease.require_ours()
    }
}

/// The lock of the folder. The lease is let go of by whoever pushes; here it is only no longer renewed, because a
/// drop must not wait for a network.
#[derive(Debug)]
struct TieredLock {
    lock: Option<Box<dyn WriterLock>>,
    lease: Arc<LeaseKeeper>,
}

impl WriterLock for TieredLock {
    fn abandon(mut self: Box<Self>) {
        if let Some(lock) = self.lock.take() {
            lock.abandon();
        }
        // The mutex of the lease may have been held during the fork and must not be touched.
        std::mem::forget(self);
    }
}

impl Drop for TieredLock {
    fn drop(&mut self) {
        self.lease.close();
    }
}
