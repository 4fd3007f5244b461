//! One save of one rank, from the caller's tensors to a committed snapshot.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde_json::value::RawValue;

use crate::commit;
use crate::error::{Error, Result};
use crate::format::model::{Header, Manifest};
use crate::format::names;
use crate::plan::{self, Base, Compression, Measured};
use crate::retain;
use crate::stage::Later;
use crate::store::{Folder, Key};
use crate::write::{Coding, EntryInput, Source, Written};

use super::chance::{now_unix_ms, random_u128};
use super::foundation::Ground;
use super::session::{Content, Finished, PackFigures, SaveSession};
use super::{Options, Repository, Shared};

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
    /// What its pack took.
    pub figures: PackFigures,
    /// Seconds of publishing the manifest.
    pub commit_seconds: f64,
    /// What retention did after the commit, or why it could not.
    pub retention: std::result::Result<(retain::Plan, u64), Arc<Error>>,
}

impl Repository {
    /// Starts a save and copies all sources, so that the caller may change them at once. A tensor that did
    /// not change last time is compared with the base first, and not copied where it is equal.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where the handle may not write, or is used in a forked child.
    pub fn begin_save(&self, request: SaveRequest, sources: &[&[u8]]) -> Result<SaveSession> {
        let sources: Vec<Option<&[u8]>> = sources.iter().map(|source| Some(*source)).collect();
        self.begin_save_later(request, &sources, None)
    }

    /// Starts a save as [`Repository::begin_save`], except that the sources that are `None` here are those
    /// of `later`, in order: they are copied by [`SaveSession::copy_later`].
    ///
    /// # Errors
    /// As [`Repository::begin_save`].
    pub fn begin_save_later(
        &self,
        request: SaveRequest,
        sources: &[Option<&[u8]>],
        later: Option<Box<dyn Later>>,
    ) -> Result<SaveSession> {
        let session = self.session(request)?;
        session.stage(sources, later)
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
        let sources: Vec<Source<'_>> = sources.iter().map(|source| Source::Elements(source)).collect();
        self.session(request)?.run_with(&sources, cancelled)
    }

    fn session(&self, request: SaveRequest) -> Result<SaveSession> {
        self.shared.must_write("save")?;
        let SaveRequest { step, metrics, metadata, entries, structure, rank_structure } = request;
        let Options { rank, world_size, .. } = self.shared.options;
        if world_size > 1 {
            return Err(Error::invalid(
                "save",
                "several ranks save together: each needs the ticket of a session",
            ));
        }
        let header = self.shared.new_header(step, world_size, metrics, metadata)?;
        let (ground, replicas) = (Ground::Newest, Vec::new());
        let content = Content { header, rank, ground, entries, replicas, structure, rank_structure };
        Ok(SaveSession::new(Arc::clone(&self.shared), content))
    }
}

impl SaveSession {
    /// Copies what is still to be copied, then writes and commits.
    ///
    /// # Errors
    /// As [`Repository::save_sync`].
    pub fn run(self, cancelled: &AtomicBool) -> Result<SaveReport> {
        self.with_sources(cancelled, |session, sources| session.run_with(sources, cancelled))
    }

    fn run_with(self, sources: &[Source<'_>], cancelled: &AtomicBool) -> Result<SaveReport> {
        let shared = Arc::clone(&self.shared);
        let saved = self.write(sources, cancelled).and_then(|finished| shared.commit_alone(finished));
        if saved.is_err() {
            // The pack may lie there, and even the manifest may be visible: a sweep that took the pack of
            // such a manifest for an orphan would leave half a snapshot.
            shared.lock_state().doubt();
        }
        saved
    }
}

impl Shared {
    /// What a new snapshot says of itself before anything of it is written; takes its number.
    pub(super) fn new_header(
        &self,
        step: u64,
        world_size: u32,
        metrics: BTreeMap<String, f64>,
        metadata: Box<RawValue>,
    ) -> Result<Header> {
        let mut state = self.refreshed()?;
        let seq = state.listing.high_water().max(state.last_tried_seq) + 1;
        // A number is tried once: what a failed save may have left can't be taken for this one.
        state.last_tried_seq = seq;
        let parent = state.current;
        drop(state);
        Ok(Header {
            repository_id: self.repository_id.clone(),
            session_id: format!("{:032x}", random_u128()),
            seq,
            step,
            parent,
            created_at_unix_ms: now_unix_ms(),
            world_size,
            metrics,
            metadata,
            raw_bytes: 0,
            stored_bytes: 0,
            nonfinite: BTreeMap::new(),
            self_contained: false,
            state_digest: "0".repeat(64),
        })
    }

    /// Commits the snapshot of a single rank.
    fn commit_alone(&self, finished: Finished) -> Result<SaveReport> {
        let Finished { part, figures, pack_name, hold } = finished;
        let committing = Instant::now();
        let manifest = match commit::commit(&self.store, vec![part]) {
            Ok(manifest) => manifest,
            Err(error) => {
                self.drop_uncommitted(pack_name, &error);
                return Err(error);
            }
        };
        let commit_seconds = committing.elapsed().as_secs_f64();
        // Made before the lock is taken: it goes over every chunk, and loads want the lock too.
        let base = Arc::new(Base::new(manifest.header.seq, manifest.body.clone(), true));
        let header = self.committed(manifest, Some(base));
        drop(hold);
        Ok(SaveReport {
            header,
            figures,
            commit_seconds,
            retention: self.retention_after_commit().map_err(Arc::new),
        })
    }

    /// Notes a snapshot that was published; `base` is what the next save of this rank alone may refer to.
    pub(super) fn committed(&self, manifest: Manifest, base: Option<Arc<Base>>) -> Arc<Header> {
        let header = Arc::new(manifest.header);
        let packs = Arc::new(manifest.body.packs);
        let mut state = self.lock_state();
        state.listing.seqs.insert(header.seq);
        state.headers.insert(header.seq, Arc::clone(&header));
        state.pack_tables.insert(header.seq, packs);
        state.base = base;
        state.current = Some(header.seq);
        header
    }

    /// How a save codes, by what the caller wishes and what earlier saves measured.
    pub(super) fn coding(&self, ground: &Ground) -> Coding {
        let experience = self.lock_experience();
        let chosen = plan::effort(self.options.compression, experience.pace);
        let failures = &experience.delta_failures;
        Coding {
            effort: chosen.map(|(effort, _)| effort),
            least_bytes_per_second: chosen.and_then(|(_, least)| least),
            delta: self.options.delta,
            no_delta_for: failures
                .iter()
                .filter(|(_, count)| !plan::tries_delta(**count))
                .map(|(name, _)| name.clone())
                .collect(),
            // Ranks might find one tensor rounded from different ones, and a manifest names one for all shards.
            round: self.options.compression != Compression::None && matches!(ground, Ground::Newest),
        }
    }

    /// Notes what a save measured, for the next one.
    pub(super) fn learn(&self, written: &Written, seconds: f64) {
        let mut experience = self.lock_experience();
        experience.pace = experience.pace.after(Measured {
            stored_bytes: written.part.pack.length_bytes,
            seconds,
            waiting_seconds: written.write_seconds + written.sync_seconds,
            coded_bytes: written.coded_bytes,
            coding_seconds: written.coding_seconds,
        });
        let failures = &mut experience.delta_failures;
        // What was not tried counts as well, so that it is tried again at some time.
        failures.values_mut().filter(|count| !plan::tries_delta(**count)).for_each(|count| *count += 1);
        for (name, has_paid) in &written.delta_outcomes {
            if *has_paid {
                failures.remove(name);
            } else {
                *failures.entry(name.clone()).or_insert(0) += 1;
            }
        }
    }

    /// Removes the pack of a save whose commit failed, unless its manifest may have become visible.
    fn drop_uncommitted(&self, pack_name: String, error: &Error) {
        let Some(seq) = names::parse_pack_name(&pack_name).map(|name| name.seq) else { return };
        let lost = matches!(error, Error::Conflict { .. });
        let visible = Key::new(Folder::Snapshots, &names::manifest_name(seq))
            .is_ok_and(|key| self.store.open(&key).map_or_else(|error| !error.is_not_found(), |_| true));
        if lost || !visible {
            // The save's own error is what the caller hears; recovery finds the pack if this fails.
            let _ = self.store.delete(Folder::Packs, &[pack_name]);
        }
    }

    /// Retention after a durable commit; looks at no other snapshot where there is no policy.
    pub(super) fn retention_after_commit(&self) -> Result<(retain::Plan, u64)> {
        if self.options.rules.is_empty() {
            return self.remove(&[]).map(|freed| (retain::Plan::default(), freed));
        }
        self.retention(false)
    }
}
