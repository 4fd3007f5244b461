//! One save from the caller's tensors to a committed snapshot.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde_json::value::RawValue;

use crate::commit;
use crate::error::{Error, Result};
use crate::format::model::{Header, RankStructure};
use crate::format::names;
use crate::inflight::Hold;
use crate::kill;
use crate::plan::Base;
use crate::retain;
use crate::stage::{self, Staged};
use crate::write::{EntryInput, WriteJob, write_pack};

use super::chance::{now_unix_ms, random_u128};
use super::{Repository, Shared};

/// What to save, beside the bytes.
#[derive(Clone, Debug)]
pub struct SaveRequest {
    /// Training step just finished.
    pub step: u64,
    /// Metrics of the snapshot.
    pub metrics: BTreeMap<String, f64>,
    /// Metadata, one JSON value.
    pub metadata: Box<RawValue>,
    /// The tensors; names are unique among entries of one rank.
    pub entries: Vec<EntryInput>,
    /// Typed tree of the state.
    pub structure: Box<RawValue>,
    /// Typed tree of this rank's own state.
    pub rank_structure: Option<Box<RawValue>>,
}

/// What a finished save did.
#[derive(Clone, Debug)]
pub struct SaveReport {
    /// The committed snapshot.
    pub header: Arc<Header>,
    /// Chunks of the state.
    pub chunk_count: u64,
    /// Chunks that were not written because the base, or this save, had their bytes already.
    pub reused_chunk_count: u64,
    /// Seconds of copying the tensors: what the caller waited for.
    pub copy_seconds: f64,
    /// Seconds of digesting and deciding.
    pub encode_seconds: f64,
    /// Seconds of handing bytes to the store.
    pub write_seconds: f64,
    /// Seconds of waiting for the medium.
    pub sync_seconds: f64,
    /// Seconds of publishing the manifest.
    pub commit_seconds: f64,
    /// What retention did after the commit, or why it could not.
    pub retention: std::result::Result<(retain::Plan, u64), Arc<Error>>,
}

/// One save in progress. Its first error ends it: it can't be run again.
#[derive(Debug)]
pub struct SaveSession {
    shared: Arc<Shared>,
    seq: u64,
    parent: Option<u64>,
    request: SaveRequest,
    staged: Option<Staged>,
    copy_seconds: f64,
}

impl Repository {
    /// Starts a save and copies all sources, so that the caller may change them at once.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where the handle may not write, or is used in a forked child.
    pub fn begin_save(&self, request: SaveRequest, sources: &[&[u8]]) -> Result<SaveSession> {
        let mut session = self.session(request)?;
        let started = Instant::now();
        session.staged = Some(stage::stage(&self.shared.stage_pool, &self.shared.threads, sources)?);
        session.copy_seconds = started.elapsed().as_secs_f64();
        kill::point("save.staged");
        Ok(session)
    }

    /// Saves straight from the sources while the caller waits: needs no memory for a copy.
    ///
    /// # Errors
    /// Whatever ended the save; nothing was committed then, except that after [`Error::Store`] while
    /// publishing the next open decides.
    pub fn save_sync(
        &self,
        request: SaveRequest,
        sources: &[&[u8]],
        cancelled: &AtomicBool,
    ) -> Result<SaveReport> {
        self.session(request)?.run_with(sources, cancelled)
    }

    fn session(&self, request: SaveRequest) -> Result<SaveSession> {
        self.shared.must_write("save")?;
        let mut state = self.shared.refreshed()?;
        let seq = state.listing.high_water().max(state.last_tried_seq) + 1;
        // A number is tried once: what a failed save may have left can't be taken for this one.
        state.last_tried_seq = seq;
        let parent = state.current;
        drop(state);
        Ok(SaveSession {
            shared: Arc::clone(&self.shared),
            seq,
            parent,
            request,
            staged: None,
            copy_seconds: 0.0,
        })
    }
}

impl SaveSession {
    /// Commit number that the snapshot will have.
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.seq
    }

    /// Writes and commits what was staged.
    ///
    /// # Errors
    /// As [`Repository::save_sync`].
    pub fn run(mut self, cancelled: &AtomicBool) -> Result<SaveReport> {
        let staged = self
            .staged
            .take()
            .ok_or_else(|| Error::Internal { what: "a save ran without staged bytes".to_owned() })?;
        let sources = staged.slices();
        self.run_with(&sources, cancelled)
    }

    fn run_with(self, sources: &[&[u8]], cancelled: &AtomicBool) -> Result<SaveReport> {
        let shared = Arc::clone(&self.shared);
        let saved = self.write_and_commit(sources, cancelled);
        if saved.is_err() {
            // The pack may lie there, and even the manifest may be visible: a sweep that took the pack of
            // such a manifest for an orphan would leave half a snapshot.
            shared.lock_state().doubt();
        }
        saved
    }

    fn write_and_commit(self, sources: &[&[u8]], cancelled: &AtomicBool) -> Result<SaveReport> {
        let shared = Arc::clone(&self.shared);
        let copy_seconds = self.copy_seconds;
        let pack_name = names::pack_name(self.seq, shared.options.rank, random_u128() as u64);
        // IMPORTANT: held until the commit is in `state`, which a sweep reads after it has claimed packs.
        let (base, guard, gone_packs) = shared.hold_base(&pack_name);
        let written = write_pack(self.into_job(pack_name.clone(), base, gone_packs), sources, cancelled)?;

        let committing = Instant::now();
        let (chunk_count, reused_chunk_count) = (written.chunk_count, written.reused_chunk_count);
        let (encode_seconds, write_seconds, sync_seconds) =
            (written.encode_seconds, written.write_seconds, written.sync_seconds);
        let manifest = match commit::commit(&shared.store, vec![written.part]) {
            Ok(manifest) => manifest,
            Err(error) => {
                shared.drop_uncommitted(&pack_name, &error);
                return Err(error);
            }
        };
        let commit_seconds = committing.elapsed().as_secs_f64();
        let header = Arc::new(manifest.header);
        {
            let mut state = shared.lock_state();
            state.listing.seqs.insert(header.seq);
            state.headers.insert(header.seq, Arc::clone(&header));
            state.pack_tables.insert(header.seq, Arc::new(manifest.body.packs.clone()));
            state.base = Some(Arc::new(Base::new(header.seq, &manifest.body, true)));
            state.current = Some(header.seq);
        }
        drop(guard);
        let retention = shared.retention_after_commit().map_err(Arc::new);
        Ok(SaveReport {
            header,
            chunk_count,
            reused_chunk_count,
            copy_seconds,
            encode_seconds,
            write_seconds,
            sync_seconds,
            commit_seconds,
            retention,
        })
    }

    fn into_job(self, pack_name: String, base: Option<Arc<Base>>, gone_packs: HashSet<String>) -> WriteJob {
        let options = &self.shared.options;
        let header = Header {
            repository_id: self.shared.repository_id.clone(),
            session_id: format!("{:032x}", random_u128()),
            seq: self.seq,
            step: self.request.step,
            parent: self.parent,
            created_at_unix_ms: now_unix_ms(),
            world_size: options.world_size,
            metrics: self.request.metrics,
            metadata: self.request.metadata,
            raw_bytes: 0,
            stored_bytes: 0,
            nonfinite: BTreeMap::new(),
            self_contained: false,
            state_digest: "0".repeat(64),
        };
        let rank = options.rank;
        WriteJob {
            store: Arc::clone(&self.shared.store),
            threads: Arc::clone(&self.shared.threads),
            header,
            rank,
            pack_name,
            chunk_bytes: options.chunk_bytes,
            entries: self.request.entries,
            structure: self.request.structure,
            rank_structures: self
                .request
                .rank_structure
                .into_iter()
                .map(|structure| RankStructure { rank, structure })
                .collect(),
            base,
            gone_packs,
            refer_always: options.rules.is_empty(),
        }
    }
}

impl Shared {
    /// The snapshot whose chunks the next save may refer to: the last one this handle committed or
    /// adopted, else the newest readable one, whose chunks are verified before they are referred to.
    fn base_for_save(&self) -> Option<Arc<Base>> {
        let (base, newest) = {
            let state = self.lock_state();
            (state.base.clone(), state.listing.seqs.last().copied())
        };
        base.or_else(|| {
            let newest = newest?;
            // A damaged newest snapshot only means that this save writes everything.
            let manifest = self.manifest(newest).ok()?;
            let base = Arc::new(Base::new(newest, &manifest.body, false));
            self.lock_state().base = Some(Arc::clone(&base));
            Some(base)
        })
    }

    /// Holds the base and its packs, and the pack that is to be written; returns the packs that are gone.
    fn hold_base(&self, pack_name: &str) -> (Option<Arc<Base>>, Hold, HashSet<String>) {
        loop {
            let base = self.base_for_save();
            let packs = base.iter().flat_map(|base| &base.packs).map(|record| record.name.clone());
            let (hold, gone_packs) =
                self.registry.hold(base.as_ref().map(|base| base.seq), packs.chain([pack_name.to_owned()]));
            let now = self.lock_state().base.clone();
            // A merge in between has made another base of it, and its packs may be gone already.
            if base.as_ref().map(Arc::as_ptr) == now.as_ref().map(Arc::as_ptr) {
                return (base, hold, gone_packs);
            }
        }
    }

    /// Removes the pack of a save whose commit failed, unless its manifest may have become visible.
    fn drop_uncommitted(&self, pack_name: &str, error: &Error) {
        use crate::store::{Folder, Key};
        let Some(seq) = names::parse_pack_name(pack_name).map(|name| name.seq) else { return };
        let lost = matches!(error, Error::Conflict { .. });
        let visible = Key::new(Folder::Snapshots, &names::manifest_name(seq))
            .is_ok_and(|key| self.store.open(&key).map_or_else(|error| !error.is_not_found(), |_| true));
        if lost || !visible {
            // The save's own error is what the caller hears; recovery finds the pack if this fails.
            let _ = self.store.delete(Folder::Packs, &[pack_name.to_owned()]);
        }
    }

    /// Retention after a durable commit; looks at no other snapshot where there is no policy.
    fn retention_after_commit(&self) -> Result<(retain::Plan, u64)> {
        if self.options.rules.is_empty() {
            return self.remove(&[]).map(|freed| (retain::Plan::default(), freed));
        }
        self.retention(false)
    }
}
