//! The session of one rank: its copy of the caller's tensors, and the pack that it writes of them.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::format::model::{Header, RankStructure, Replica};
use crate::format::names;
use crate::inflight::Hold;
use crate::kill;
use crate::plan::WrittenPart;
use crate::stage::{self, Later, Staged};
use crate::write::{EntryInput, Source, WriteJob, write_pack};

use super::Shared;
use super::chance::random_u128;
use super::foundation::{Foundation, Ground};

/// One save in progress. Its first error ends it: it can't be run again.
#[derive(Debug)]
pub struct SaveSession {
    pub(super) shared: Arc<Shared>,
    pack_name: String,
    pub(super) content: Content,
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

/// What one rank writes into its pack.
#[derive(Debug)]
pub(super) struct Content {
    /// Facts of the snapshot; sizes and digests are filled in by the write.
    pub(super) header: Header,
    pub(super) rank: u32,
    pub(super) ground: Ground,
    pub(super) entries: Vec<EntryInput>,
    /// What this rank holds and others write.
    pub(super) replicas: Vec<Replica>,
    pub(super) structure: Box<RawValue>,
    pub(super) rank_structure: Option<Box<RawValue>>,
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

/// What writing one rank's pack took.
#[derive(Clone, Copy, Debug)]
pub struct PackFigures {
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
}

/// A pack that was written, and what keeps it from deletion.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) part: WrittenPart,
    pub(super) figures: PackFigures,
    pub(super) pack_name: String,
    pub(super) hold: Hold,
}

impl SaveSession {
    /// A session that writes a pack of its own; nothing is staged yet.
    pub(super) fn new(shared: Arc<Shared>, content: Content) -> Self {
        Self {
            pack_name: names::pack_name(content.header.seq, content.rank, random_u128() as u64),
            shared,
            content,
            foundation: None,
            places: Vec::new(),
            stages: Vec::new(),
            later: None,
            awaits_copy: false,
            copy_seconds: 0.0,
        }
    }

    /// Copies the sources at hand. Those that did not change last time are compared with the base first, and
    /// not copied where they are equal.
    pub(super) fn stage(mut self, sources: &[Option<&[u8]>], later: Option<Box<dyn Later>>) -> Result<Self> {
        let later_count = later.as_ref().map_or(0, |later| later.count());
        if sources.iter().filter(|source| source.is_none()).count() != later_count {
            return Err(Error::Internal { what: "a save has too few or too many later sources".to_owned() });
        }
        let started = Instant::now();
        let shared = Arc::clone(&self.shared);
        let ground = &self.content.ground;
        let at_hand = || shared.base_at_hand(ground).filter(|base| base.trusted);
        let foundation = shared.foundation(&self.pack_name, at_hand);
        let unchanged = shared.find_unchanged(&foundation.base_packs, &self.content.entries, sources)?;
        let mut copied: Vec<&[u8]> = Vec::with_capacity(sources.len());
        let mut positions = 0..later_count;
        for (source, is_unchanged) in sources.iter().zip(unchanged) {
            self.places.push(match source {
                _ if is_unchanged => Place::Unchanged,
                Some(bytes) => {
                    copied.push(bytes);
                    Place::Staged { stage: 0, index: copied.len() - 1 }
                }
                // As many as there are positions, see above.
                None => Place::Later(positions.next().unwrap_or(later_count)),
            });
        }
        self.stages.push(stage::stage(&shared.stage_pool, &shared.threads, &copied)?);
        // Where none is at hand, the thread of the save looks at the store.
        self.foundation = foundation.base_packs.base().is_some().then_some(foundation);
        self.awaits_copy = later.is_some();
        self.later = later;
        self.copy_seconds = started.elapsed().as_secs_f64();
        kill::point("save.staged");
        Ok(self)
    }

    /// Commit number that the snapshot will have.
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.content.header.seq
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
            shared.worth_comparing(&foundation.base_packs, &self.content.entries)
        });
        let (maybe_equal, to_copy): (Vec<_>, Vec<_>) =
            self.later_places(later.as_ref()).partition(|(source, _)| compared.contains(source));
        self.stage_later(later.as_mut(), &to_copy, cancelled)?;
        if let Some(foundation) = self.foundation.as_ref().filter(|_| !maybe_equal.is_empty()) {
            let mut sources: Vec<Option<&[u8]>> = vec![None; self.places.len()];
            for &(source, position) in &maybe_equal {
                sources[source] = Some(later.bytes(position));
            }
            let unchanged = shared.find_unchanged(&foundation.base_packs, &self.content.entries, &sources)?;
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

    /// Copies what is still to be copied, then gives `work` the bytes of all sources.
    pub(super) fn with_sources<T>(
        mut self,
        cancelled: &AtomicBool,
        work: impl FnOnce(Self, &[Source<'_>]) -> Result<T>,
    ) -> Result<T> {
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
        work(self, &sources)
    }

    /// Writes the pack and makes it durable.
    pub(super) fn write(mut self, sources: &[Source<'_>], cancelled: &AtomicBool) -> Result<Finished> {
        let shared = Arc::clone(&self.shared);
        let (copy_seconds, pack_name) = (self.copy_seconds, self.pack_name.clone());
        let Foundation { base_packs, hold } = match self.foundation.take() {
            Some(foundation) => foundation,
            None => shared.foundation(&pack_name, || shared.base_for_save(&self.content.ground)),
        };
        let started = Instant::now();
        let written = write_pack(self.into_job(), sources, &base_packs, cancelled)?;
        drop(base_packs);
        shared.learn(&written, started.elapsed().as_secs_f64());
        let figures = PackFigures {
            chunk_count: written.chunk_count,
            reused_chunk_count: written.reused_chunk_count,
            copy_seconds,
            encode_seconds: written.encode_seconds,
            write_seconds: written.write_seconds,
            sync_seconds: written.sync_seconds,
        };
        Ok(Finished { part: written.part, figures, pack_name, hold })
    }

    fn into_job(self) -> WriteJob {
        let Content { header, rank, ground, entries, replicas, structure, rank_structure } = self.content;
        let options = &self.shared.options;
        let rank_structures =
            rank_structure.into_iter().map(|structure| RankStructure { rank, structure }).collect();
        WriteJob {
            store: Arc::clone(&self.shared.store),
            threads: Arc::clone(&self.shared.threads),
            header,
            rank,
            pack_name: self.pack_name,
            chunk_bytes: options.chunk_bytes,
            entries,
            replicas,
            structure,
            rank_structures,
            coding: self.shared.coding(&ground),
            refer_always: options.rules.is_empty(),
        }
    }
}
