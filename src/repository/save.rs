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
use crate::kill;
use crate::plan::{self, Base, Compression, Measured};
use crate::retain;
use crate::stage::{self, Later, Staged};
use crate::write::{Coding, EntryInput, Source, WriteJob, Written, write_pack};

use super::chance::{now_unix_ms, random_u128};
use super::foundation::Foundation;
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
    /// Seconds of copying the tensors: what the caller waited for, and the copy of later sources.
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
    pack_name: String,
    parent: Option<u64>,
    request: SaveRequest,
    /// What it builds on, where that was decided before the copy.
    foundation: Option<Foundation>,
    /// For each source, where its bytes are.
    places: Vec<Place>,
    stages: Vec<Staged>,
    later: Option<Box<dyn Later>>,
    /// Whether later sources are still to be copied.
    awaits_copy: bool,
    copy_seconds: f64,
}

/// Where the bytes of a source are.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In the base, under the name of its entry.
    Unchanged,
    /// In one of the copies of this save.
    Staged { stage: usize, index: usize },
    /// Where the caller has them: position among the later sources.
    Later(usize),
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
        let later_count = later.as_ref().map_or(0, |later| later.count());
        if sources.iter().filter(|source| source.is_none()).count() != later_count {
            return Err(Error::Internal { what: "a save has too few or too many later sources".to_owned() });
        }
        let mut session = self.session(request)?;
        let started = Instant::now();
        let shared = &self.shared;
        let at_hand = || shared.base_at_hand().filter(|base| base.trusted);
        let foundation = shared.foundation(&session.pack_name, at_hand);
        let unchanged = shared.find_unchanged(&foundation.base_packs, &session.request.entries, sources)?;
        let mut copied: Vec<&[u8]> = Vec::with_capacity(sources.len());
        let mut positions = 0..later_count;
        for (source, is_unchanged) in sources.iter().zip(unchanged) {
            session.places.push(match source {
                _ if is_unchanged => Place::Unchanged,
                Some(bytes) => {
                    copied.push(bytes);
                    Place::Staged { stage: 0, index: copied.len() - 1 }
                }
                // As many as there are positions, see above.
                None => Place::Later(positions.next().unwrap_or(later_count)),
            });
        }
        session.stages.push(stage::stage(&shared.stage_pool, &shared.threads, &copied)?);
        // Where none is at hand, the thread of the save looks at the store.
        session.foundation = foundation.base_packs.base().is_some().then_some(foundation);
        session.awaits_copy = later.is_some();
        session.later = later;
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
        let sources: Vec<Source<'_>> = sources.iter().map(|source| Source::Elements(source)).collect();
        self.session(request)?.run_with(&sources, cancelled)
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
            pack_name: names::pack_name(seq, self.shared.options.rank, random_u128() as u64),
            parent,
            request,
            foundation: None,
            places: Vec::new(),
            stages: Vec::new(),
            later: None,
            awaits_copy: false,
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

    /// True while sources of the caller are still to be copied.
    #[must_use]
    pub fn awaits_copy(&self) -> bool {
        self.awaits_copy
    }

    /// Bytes of the copies that it holds.
    #[must_use]
    pub fn staged_bytes(&self) -> usize {
        self.stages.iter().flat_map(Staged::slices).map(<[u8]>::len).sum()
    }

    /// Copies the later sources and lets go of them; those that did not change last time last, and only
    /// where they differ from the base.
    ///
    /// # Errors
    /// As [`stage::stage_later`]; the save is over then.
    pub fn copy_later(&mut self, cancelled: &AtomicBool) -> Result<()> {
        if !std::mem::take(&mut self.awaits_copy) {
            return Ok(());
        }
        let Some(mut later) = self.later.take() else { return Ok(()) };
        let started = Instant::now();
        later.arrive()?;
        let shared = Arc::clone(&self.shared);
        let compared = self.foundation.as_ref().map_or_else(HashSet::new, |foundation| {
            shared.worth_comparing(&foundation.base_packs, &self.request.entries)
        });
        let (maybe_equal, to_copy): (Vec<_>, Vec<_>) =
            self.later_places(later.as_ref()).partition(|(source, _)| compared.contains(source));
        self.stage_later(later.as_mut(), &to_copy, cancelled)?;
        if let Some(foundation) = self.foundation.as_ref().filter(|_| !maybe_equal.is_empty()) {
            let mut sources: Vec<Option<&[u8]>> = vec![None; self.places.len()];
            for &(source, position) in &maybe_equal {
                sources[source] = Some(later.bytes(position));
            }
            let unchanged = shared.find_unchanged(&foundation.base_packs, &self.request.entries, &sources)?;
            let (equal, to_copy): (Vec<_>, Vec<_>) =
                maybe_equal.into_iter().partition(|&(source, _)| unchanged[source]);
            for &(source, _) in &equal {
                self.places[source] = Place::Unchanged;
            }
            later.let_go(&equal.iter().map(|&(_, position)| position).collect::<Vec<_>>())?;
            self.stage_later(later.as_mut(), &to_copy, cancelled)?;
        }
        self.later = Some(later);
        self.copy_seconds += started.elapsed().as_secs_f64();
        kill::point("save.copied");
        Ok(())
    }

    /// Later sources that need a copy: (source, position among the later ones).
    fn later_places(&self, later: &dyn Later) -> impl Iterator<Item = (usize, usize)> {
        self.places.iter().enumerate().filter_map(|(source, place)| match place {
            Place::Later(position) if !later.is_kept(*position) => Some((source, *position)),
            _ => None,
        })
    }

    fn stage_later(
        &mut self,
        later: &mut dyn Later,
        sources: &[(usize, usize)],
        cancelled: &AtomicBool,
    ) -> Result<()> {
        let shared = &self.shared;
        let positions: Vec<usize> = sources.iter().map(|&(_, position)| position).collect();
        let staged = stage::stage_later(&shared.later_pool, &shared.threads, later, &positions, cancelled)?;
        for (index, &(source, _)) in sources.iter().enumerate() {
            self.places[source] = Place::Staged { stage: self.stages.len(), index };
        }
        self.stages.push(staged);
        Ok(())
    }

    /// Copies what is still to be copied, then writes and commits.
    ///
    /// # Errors
    /// As [`Repository::save_sync`].
    pub fn run(mut self, cancelled: &AtomicBool) -> Result<SaveReport> {
        self.copy_later(cancelled)?;
        let (stages, later) = (std::mem::take(&mut self.stages), self.later.take());
        let copies: Vec<Vec<&[u8]>> = stages.iter().map(Staged::slices).collect();
        let bytes_at = |place: &Place| match *place {
            Place::Unchanged => Some(Source::Unchanged),
            Place::Staged { stage, index } => copies.get(stage)?.get(index).copied().map(Source::Elements),
            Place::Later(position) => later.as_ref().map(|later| Source::Elements(later.bytes(position))),
        };
        let sources: Vec<Source<'_>> = self
            .places
            .iter()
            .map(bytes_at)
            .collect::<Option<_>>()
            .ok_or_else(|| Error::Internal { what: "a save staged too few tensors".to_owned() })?;
        self.run_with(&sources, cancelled)
    }

    fn run_with(self, sources: &[Source<'_>], cancelled: &AtomicBool) -> Result<SaveReport> {
        let shared = Arc::clone(&self.shared);
        let saved = self.write_and_commit(sources, cancelled);
        if saved.is_err() {
            // The pack may lie there, and even the manifest may be visible: a sweep that took the pack of
            // such a manifest for an orphan would leave half a snapshot.
            shared.lock_state().doubt();
        }
        saved
    }

    fn write_and_commit(mut self, sources: &[Source<'_>], cancelled: &AtomicBool) -> Result<SaveReport> {
        let shared = Arc::clone(&self.shared);
        let copy_seconds = self.copy_seconds;
        let pack_name = self.pack_name.clone();
        let Foundation { base_packs, hold } = match self.foundation.take() {
            Some(foundation) => foundation,
            None => shared.foundation(&pack_name, || shared.base_for_save()),
        };
        let started = Instant::now();
        let written = write_pack(self.into_job(), sources, &base_packs, cancelled)?;
        drop(base_packs);
        shared.learn(&written, started.elapsed().as_secs_f64());

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
        // Made before the lock is taken: it goes over every chunk, and loads want the lock too.
        let packs = Arc::new(manifest.body.packs.clone());
        let base = Arc::new(Base::new(header.seq, manifest.body, true));
        {
            let mut state = shared.lock_state();
            state.listing.seqs.insert(header.seq);
            state.headers.insert(header.seq, Arc::clone(&header));
            state.pack_tables.insert(header.seq, packs);
            state.base = Some(base);
            state.current = Some(header.seq);
        }
        drop(hold);
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

    fn into_job(self) -> WriteJob {
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
        let coding = self.shared.coding();
        WriteJob {
            store: Arc::clone(&self.shared.store),
            threads: Arc::clone(&self.shared.threads),
            header,
            rank,
            pack_name: self.pack_name,
            chunk_bytes: options.chunk_bytes,
            entries: self.request.entries,
            structure: self.request.structure,
            rank_structures: self
                .request
                .rank_structure
                .into_iter()
                .map(|structure| RankStructure { rank, structure })
                .collect(),
            coding,
            refer_always: options.rules.is_empty(),
        }
    }
}

impl Shared {
    /// How a save codes, by what the caller wishes and what earlier saves measured.
    fn coding(&self) -> Coding {
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
            round: self.options.compression != Compression::None,
        }
    }

    /// Notes what a save measured, for the next one.
    fn learn(&self, written: &Written, seconds: f64) {
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
