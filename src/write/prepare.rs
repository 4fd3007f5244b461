//! What becomes of each chunk, found out in parallel: cast, statistics, digest, comparison, coding.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rayon::prelude::*;

use crate::cast;
use crate::codec::{self, Decoder, Effort, Scratch};
use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::model::{BaseRef, ChunkRef, Codec};
use crate::plan::{Base, delta_base};
use crate::statistics::{self, Statistics};
use crate::store::{Folder, Key, ReadAt, Store};
use crate::threads::{Spares, Threads};

use super::rounding::Rounding;
use super::{EntryInput, WriteJob};

/// One chunk of the save before it has a place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pending<'a> {
    /// Index of the entry.
    pub(super) entry: usize,
    /// Number of the chunk among those of the entry.
    pub(super) index: usize,
    /// Length of its raw bytes.
    pub(super) raw_length_bytes: u64,
    pub(super) content: Content<'a>,
}

/// What is known of a chunk's raw bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content<'a> {
    /// Elements in the caller's dtype; the raw bytes follow by the entry's cast.
    Elements(&'a [u8]),
    /// The base has them, verified.
    Known(ChunkRef),
}

/// A chunk that is ready to be referred to or appended.
#[derive(Debug)]
pub(super) struct Prepared<'a> {
    pub(super) digest: ChunkDigest,
    /// `None` for dtypes that are no floats, and where the base has counted.
    pub(super) statistics: Option<Statistics>,
    pub(super) form: Form<'a>,
}

/// How the raw bytes of a chunk are kept.
#[derive(Debug)]
pub(super) enum Form<'a> {
    /// The base has them, in packs that are there.
    InBase(ChunkRef),
    /// They are those of another entry, rounded.
    Rounded,
    /// As they are.
    Raw(Cow<'a, [u8]>),
    /// Coded, perhaps as a difference to a chunk of the base.
    Coded { codec: Codec, stored: Vec<u8>, base: Option<BaseRef> },
}

/// Prepares the chunks of one save.
pub(super) struct Preparer<'a> {
    job: &'a WriteJob,
    base_packs: &'a BasePacks,
    rounding: Rounding<'a>,
    /// By entry: how its 8-bit floats are scaled.
    scales: Vec<i32>,
    /// By entry: chunks of the base that differences may be taken against.
    delta_bases: Vec<Vec<Option<BaseRef>>>,
    /// By entry: chunks for which a difference was tried, and those for which it was taken.
    delta_tried: Vec<AtomicU32>,
    delta_taken: Vec<AtomicU32>,
    workers: Spares<Worker>,
    stored_buffers: Spares<Vec<u8>>,
}

/// Buffers of one thread.
#[derive(Debug, Default)]
struct Worker {
    base: BaseBuffers,
    rounded: Vec<u8>,
    scratch: Scratch,
}

/// Buffers between the stored and the raw bytes of a chunk of the base.
#[derive(Debug, Default)]
struct BaseBuffers {
    stored: Vec<u8>,
    decoder: Decoder,
}

/// How a batch is prepared.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mode {
    /// `None` stores chunks as they are.
    pub(super) effort: Option<Effort>,
    /// Whether chunks of the base may be referred to.
    pub(super) may_refer: bool,
}

impl<'a> Preparer<'a> {
    pub(super) fn new(
        job: &'a WriteJob,
        sources: &[Option<&'a [u8]>],
        base_packs: &'a BasePacks,
    ) -> Result<Self> {
        let scales = scales(job, sources)?;
        let rounding =
            if job.coding.round { Rounding::find(&job.entries, sources) } else { Rounding::default() };
        let delta_bases = delta_bases(job, base_packs);
        let counters = || job.entries.iter().map(|_| AtomicU32::new(0)).collect();
        Ok(Self {
            job,
            base_packs,
            rounding,
            scales,
            delta_bases,
            delta_tried: counters(),
            delta_taken: counters(),
            workers: Spares::default(),
            stored_buffers: Spares::default(),
        })
    }

    /// Prepares consecutive chunks with all threads of the pool that it is called in.
    pub(super) fn prepare(&self, batch: &[Pending<'a>], mode: Mode) -> Result<Vec<Prepared<'a>>> {
        batch
            .par_iter()
            .with_min_len(if batch.len() > 256 { 64 } else { 1 })
            .map(|pending| self.workers.lend(|worker| self.prepare_chunk(pending, mode, worker)))
            .collect()
    }

    /// Takes the buffer of a chunk that was appended back.
    pub(super) fn recycle(&self, form: Form<'_>) {
        match form {
            Form::Coded { stored, .. } | Form::Raw(Cow::Owned(stored)) => {
                self.stored_buffers.give_back(stored);
            }
            _ => {}
        }
    }

    /// How the 8-bit floats of an entry are scaled.
    pub(super) fn scale_log2(&self, entry: usize) -> i32 {
        self.scales[entry]
    }

    /// Name of the entry that an entry's rounded chunks come from.
    pub(super) fn rounded_from(&self, entry: usize) -> Option<&str> {
        self.rounding.source_of(entry).map(|source| self.job.entries[source].name.as_str())
    }

    /// Names of entries for which differences were tried, and whether one of them paid.
    pub(super) fn delta_outcomes(&self) -> Vec<(String, bool)> {
        self.job
            .entries
            .iter()
            .enumerate()
            .filter(|(entry, _)| self.delta_tried[*entry].load(Ordering::Relaxed) > 0)
            .map(|(entry, input)| (input.name.clone(), self.delta_taken[entry].load(Ordering::Relaxed) > 0))
            .collect()
    }

    fn prepare_chunk(&self, pending: &Pending<'a>, mode: Mode, worker: &mut Worker) -> Result<Prepared<'a>> {
        let entry = &self.job.entries[pending.entry];
        let elements = match pending.content {
            Content::Known(reference) => {
                return Ok(Prepared {
                    digest: reference.digest,
                    statistics: None,
                    form: Form::InBase(reference),
                });
            }
            Content::Elements(elements) => elements,
        };
        let raw = if entry.stored_dtype == entry.dtype {
            Cow::Borrowed(elements)
        } else {
            let mut narrowed = self.stored_buffers.take();
            narrowed.resize(pending.raw_length_bytes as usize, 0);
            let scale_log2 = self.scales[pending.entry];
            cast::narrow(entry.dtype, entry.stored_dtype, scale_log2, elements, &mut narrowed)?;
            Cow::Owned(narrowed)
        };
        let digest = match &raw {
            Cow::Borrowed(elements) => ChunkDigest::of_uncached(elements),
            Cow::Owned(narrowed) => ChunkDigest::of(narrowed),
        };
        let statistics =
            statistics::of(entry.stored_dtype, &raw).map(|found| found.scaled(self.scales[pending.entry]));
        let found = if mode.may_refer { self.base_packs.find(digest, &raw, &mut worker.base) } else { None };
        let form = match found {
            Some(reference) => {
                self.recycle(Form::Raw(raw));
                Form::InBase(reference)
            }
            None if self.is_rounded(pending, &raw, worker)? => {
                self.recycle(Form::Raw(raw));
                Form::Rounded
            }
            None => self.code(pending, entry, raw, mode, worker),
        };
        Ok(Prepared { digest, statistics, form })
    }

    /// True where the raw bytes are those of the entry it may be rounded from.
    fn is_rounded(&self, pending: &Pending<'_>, raw: &[u8], worker: &mut Worker) -> Result<bool> {
        let start_bytes = pending.index as u64 * self.job.chunk_bytes;
        let entry = &self.job.entries[pending.entry];
        let Some((dtype, wide)) = self.rounding.wide_elements(
            pending.entry,
            start_bytes / entry.stored_dtype.size_bytes(),
            raw.len() as u64 / entry.stored_dtype.size_bytes(),
        ) else {
            return Ok(false);
        };
        worker.rounded.resize(raw.len(), 0);
        cast::narrow(dtype, entry.stored_dtype, 0, wide, &mut worker.rounded)?;
        Ok(worker.rounded == raw)
    }

    fn code(
        &self,
        pending: &Pending<'_>,
        entry: &EntryInput,
        raw: Cow<'a, [u8]>,
        mode: Mode,
        worker: &mut Worker,
    ) -> Form<'a> {
        let Some(effort) = mode.effort else { return Form::Raw(raw) };
        // What the base has but is not worth keeping for must not be kept as the base of a difference either.
        let base = if mode.may_refer { self.delta_base(pending) } else { None };
        let Worker { base: buffers, scratch, .. } = worker;
        let base_raw =
            base.and_then(|base| self.base_packs.raw(&base.into(), pending.raw_length_bytes, buffers));
        let base = base.filter(|_| base_raw.is_some());
        let mut stored = self.stored_buffers.take();
        let codec = codec::encode(entry.stored_dtype, &raw, base_raw, effort, scratch, &mut stored);
        if base.is_some() {
            self.delta_tried[pending.entry].fetch_add(1, Ordering::Relaxed);
            if codec.needs_base() {
                self.delta_taken[pending.entry].fetch_add(1, Ordering::Relaxed);
            }
        }
        if codec == Codec::Store {
            self.stored_buffers.give_back(stored);
            return Form::Raw(raw);
        }
        self.recycle(Form::Raw(raw));
        Form::Coded { codec, stored, base: base.filter(|_| codec.needs_base()) }
    }

    /// What a chunk may be a difference to. The chunks of one tensor behave alike: after three of them for
    /// which it did not pay, the others are not tried.
    fn delta_base(&self, pending: &Pending<'_>) -> Option<BaseRef> {
        let base = *self.delta_bases[pending.entry].get(pending.index)?;
        let tried = self.delta_tried[pending.entry].load(Ordering::Relaxed);
        let taken = self.delta_taken[pending.entry].load(Ordering::Relaxed);
        base.filter(|_| tried < 3 || taken > 0)
    }
}

/// Scales of all entries that are stored as 8-bit floats; they need the largest magnitude beforehand.
fn scales(job: &WriteJob, sources: &[Option<&[u8]>]) -> Result<Vec<i32>> {
    let scale = |entry: &EntryInput| {
        let small = entry.dtype != entry.stored_dtype && entry.stored_dtype.size_bytes() == 1;
        let bytes = entry.source.and_then(|source| sources[source]).filter(|_| small)?;
        let found = bytes
            .par_chunks(1 << 20)
            .filter_map(|piece| statistics::of(entry.dtype, piece))
            .map(|found| found.abs_max)
            .reduce(|| 0.0, f64::max);
        Some(cast::scale_log2(entry.dtype, entry.stored_dtype, found))
    };
    Ok(job.threads.pool()?.install(|| job.entries.iter().map(|entry| scale(entry).unwrap_or(0)).collect()))
}

/// For each entry the chunks of the base that hold the same region, where differences are allowed.
fn delta_bases(job: &WriteJob, base_packs: &BasePacks) -> Vec<Vec<Option<BaseRef>>> {
    let none = || vec![Vec::new(); job.entries.len()];
    let Some(base) = base_packs.base().filter(|_| job.coding.delta && job.coding.effort.is_some()) else {
        return none();
    };
    let candidates: Vec<Vec<Option<BaseRef>>> = job
        .entries
        .iter()
        .map(|entry| {
            let key = (entry.name.as_str(), entry.rank);
            if entry.source.is_none() || job.coding.no_delta_for.contains(&entry.name) {
                return Vec::new();
            }
            base.shard(key, &entry.region, entry.stored_dtype, job.chunk_bytes).map_or_else(
                Vec::new,
                |shard| {
                    shard
                        .chunks
                        .iter()
                        .map(|chunk| delta_base(chunk).filter(|base| base_packs.has(base.pack)))
                        .collect()
                },
            )
        })
        .collect();
    // A difference keeps the pack of its base alive, so it must be worth that.
    let all = candidates.iter().flatten().flatten().map(|base| ChunkRef::from(*base));
    let worth = base.packs_worth_keeping(all, job.refer_always);
    candidates
        .into_iter()
        .map(|chunks| chunks.into_iter().map(|base| base.filter(|base| worth.contains(&base.pack))).collect())
        .collect()
}

/// The open packs of the base: only chunks that can be read now are referred to.
#[derive(Debug, Default)]
pub struct BasePacks {
    base: Option<Arc<Base>>,
    packs: Vec<Option<Box<dyn ReadAt>>>,
}

impl BasePacks {
    /// Opens the packs; one that is missing or not at hand, has another length or is in `gone_packs` counts as gone,
    /// and what it held is written again.
    pub fn open(store: &dyn Store, base: Option<Arc<Base>>, gone_packs: &HashSet<String>) -> Self {
        let packs = base.as_ref().map_or_else(Vec::new, |base| {
            base.packs
                .iter()
                .map(|record| {
                    if gone_packs.contains(&record.name) {
                        return None;
                    }
                    let key =
                        Key::new(Folder::Packs, &record.name).ok().filter(|key| store.is_at_hand(key))?;
                    store.open(&key).ok().filter(|object| object.length_bytes() == record.length_bytes)
                })
                .collect()
        });
        Self { base, packs }
    }

    /// The snapshot whose packs these are.
    #[must_use]
    pub fn base(&self) -> Option<&Arc<Base>> {
        self.base.as_ref()
    }

    /// True where a pack is there.
    #[must_use]
    pub fn has(&self, pack: u32) -> bool {
        matches!(self.packs.get(pack as usize), Some(Some(_)))
    }

    /// The chunk of the base with these raw bytes, in packs that are there, verified by reading it
    /// unless this process wrote or verified it before.
    fn find(&self, digest: ChunkDigest, raw: &[u8], buffers: &mut BaseBuffers) -> Option<ChunkRef> {
        let base = self.base.as_ref()?;
        let raw_length_bytes = raw.len() as u64;
        let reference = base.find(digest, raw_length_bytes)?;
        if !self.has(reference.pack) || reference.base.is_some_and(|base| !self.has(base.pack)) {
            return None;
        }
        let is_right = |found: &[u8]| found == raw;
        let is_usable = base.trusted || self.raw(&reference, raw_length_bytes, buffers).is_some_and(is_right);
        is_usable.then_some(reference)
    }

    /// Raw bytes of a chunk of the base; `None` where they can't be read, or are not right.
    fn raw<'b>(
        &self,
        chunk: &ChunkRef,
        raw_length_bytes: u64,
        buffers: &'b mut BaseBuffers,
    ) -> Option<&'b [u8]> {
        let BaseBuffers { stored, decoder } = buffers;
        stored.resize(chunk.stored_length_bytes as usize, 0);
        self.read_at(chunk.pack, chunk.offset_bytes, stored).ok()?;
        let read_base = |base: &BaseRef, bytes: &mut [u8]| self.read_at(base.pack, base.offset_bytes, bytes);
        decoder.raw(chunk, raw_length_bytes, stored, read_base).ok()
    }

    fn read_at(&self, pack: u32, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        match self.packs.get(pack as usize) {
            Some(Some(object)) => object.read_at(offset_bytes, bytes),
            _ => Err(Error::Internal { what: format!("pack {pack} of the base is not there") }),
        }
    }
}

/// Runs `work` with the pool's threads behind the caller, who meanwhile does `front`.
pub(super) fn beside<R: Send>(
    threads: &Threads,
    work: impl FnOnce() -> R + Send,
    front: impl FnOnce() -> Result<()>,
) -> Result<R> {
    let mut done = None;
    let fronted = threads.pool()?.in_place_scope(|scope| {
        scope.spawn(|_| done = Some(work()));
        front()
    });
    fronted?;
    done.ok_or_else(|| Error::Internal { what: "a batch of chunks was not prepared".to_owned() })
}
