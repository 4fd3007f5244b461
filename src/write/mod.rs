//! Writes one rank's pack in the background: cast, digest, skip what the base holds, code, append, make
//! durable.
//!
//! Memory beyond the sources is bounded: two batches of coded chunks, and the blocks of the staged object.
//! While one batch is appended, the next one is prepared. The pack has its footer always, also when nothing changed, because the footer is what recovery rebuilds
//! from. The first error ends the write and drops what was staged; nothing is retried.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::batch::split_batch;
use crate::codec::Effort;
use crate::error::{Error, Result};
use crate::format::model::{ChunkRef, Header, PackRecord, RankStructure, Replica};
use crate::format::pack::{self, PackHeader, PackKind};
use crate::kill;
use crate::plan::{Base, WrittenPart, chunk_ranges};
use crate::statistics::Statistics;
use crate::store::{Folder, Key, StagedWrite, Store};
use crate::tensor::{Dtype, Region};
use crate::threads::Threads;

mod append;
mod part;
mod prepare;
mod rounding;

pub use prepare::BasePacks;

use append::Appender;
use prepare::{Content, Form, Mode, Pending, Prepared, Preparer, beside};

/// Raw bytes that are prepared together before they are appended in order.
const BATCH_BYTES: u64 = 16 << 20;
/// Chunks of a batch, for states of many small tensors.
const BATCH_CHUNKS: usize = 8192;

/// A tensor of a save: what it is, and which of the sources holds its bytes.
#[derive(Clone, Debug)]
pub struct EntryInput {
    /// Name of the entry.
    pub name: String,
    /// The rank it is local to, if it is.
    pub rank: Option<u32>,
    /// Element type of the caller's tensor.
    pub dtype: Dtype,
    /// Element type to store: the same, or a narrower float.
    pub stored_dtype: Dtype,
    /// Global shape.
    pub shape: Vec<u64>,
    /// The region this rank holds; its row-major raw bytes are the source.
    pub region: Region,
    /// Name of an earlier entry with the same storage; such an entry has no source.
    pub tied_to: Option<String>,
    /// Index of the source; `None` only for ties.
    pub source: Option<usize>,
}

/// How the chunks of a save are coded.
#[derive(Clone, Debug, Default)]
pub struct Coding {
    /// How much time coding may take; `None` stores chunks as they are.
    pub effort: Option<Effort>,
    /// Bytes per second that coding must reach to go on after its first batch; `None` for no such limit.
    pub least_bytes_per_second: Option<f64>,
    /// Whether differences to the base may be stored.
    pub delta: bool,
    /// Names of entries for which differences are not tried.
    pub no_delta_for: HashSet<String>,
    /// Whether entries that are others, rounded, are stored as nothing.
    pub round: bool,
}

/// What is at hand of the tensor behind [`EntryInput::source`].
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Its elements, in row-major order, in the caller's dtype.
    Elements(&'a [u8]),
    /// Nothing: its raw bytes are those that the base has under the same name, verified by digest. The
    /// packs of the base are open, and worth keeping.
    Unchanged,
}

/// Everything a write needs beside the bytes.
#[derive(Debug)]
pub struct WriteJob {
    /// Where the pack goes.
    pub store: Arc<dyn Store>,
    /// Threads that digest.
    pub threads: Arc<Threads>,
    /// Facts of the snapshot; sizes and digests are filled in here.
    pub header: Header,
    /// Rank that writes.
    pub rank: u32,
    /// Name of the pack.
    pub pack_name: String,
    /// Raw bytes of a chunk.
    pub chunk_bytes: u64,
    /// The tensors.
    pub entries: Vec<EntryInput>,
    /// Regions that this rank holds and others write.
    pub replicas: Vec<Replica>,
    /// Typed tree of the state.
    pub structure: Box<serde_json::value::RawValue>,
    /// Typed trees of rank-local state.
    pub rank_structures: Vec<RankStructure>,
    /// How chunks are coded.
    pub coding: Coding,
    /// Refer to the base wherever it has a chunk, however little of a pack that keeps alive: right where
    /// nothing is ever deleted.
    pub refer_always: bool,
}

/// What a write did.
#[derive(Debug)]
pub struct Written {
    /// The part and its pack, durable.
    pub part: WrittenPart,
    /// Chunks that were referred to instead of written.
    pub reused_chunk_count: u64,
    /// All chunks.
    pub chunk_count: u64,
    /// Seconds spent preparing: casting, digesting, coding and deciding.
    pub encode_seconds: f64,
    /// Seconds spent handing bytes to the store.
    pub write_seconds: f64,
    /// Seconds spent waiting for the medium.
    pub sync_seconds: f64,
    /// Raw bytes that went through the coder, and the seconds that took.
    pub coded_bytes: u64,
    /// Seconds of the batches that were coded.
    pub coding_seconds: f64,
    /// Entries for which differences were tried, and whether one paid.
    pub delta_outcomes: Vec<(String, bool)>,
}

/// Writes the pack of a save and makes it durable under its name.
///
/// `sources` are what [`EntryInput::source`] indexes; `base_packs` are those of the snapshot whose chunks
/// may be referred to.
/// `cancelled` is looked at between batches.
///
/// # Errors
/// [`Error::Interrupted`] after a cancel; [`Error::Store`] where the store fails.
pub fn write_pack(
    job: WriteJob,
    sources: &[Source<'_>],
    base_packs: &BasePacks,
    cancelled: &AtomicBool,
) -> Result<Written> {
    let key = Key::new(Folder::Packs, &job.pack_name)?;
    let mut staged = job.store.stage(&key)?;
    staged.append(&pack::encode_header(&PackHeader {
        repository_id: job.header.repository_id.clone(),
        session_id: job.header.session_id.clone(),
        seq: job.header.seq,
        rank: job.rank,
        kind: PackKind::Save,
    })?)?;

    let elements: Vec<Option<&[u8]>> = sources
        .iter()
        .map(|source| match source {
            Source::Elements(bytes) => Some(*bytes),
            Source::Unchanged => None,
        })
        .collect();
    let base = base_packs.base().cloned();
    let pending = pending_chunks(&job, sources, base.as_deref())?;
    let preparer = Preparer::new(&job, &elements, base_packs)?;
    let mut walk = Walk {
        job: &job,
        preparer: &preparer,
        appender: Appender::new(&job.pack_name, base.as_deref()),
        staged: staged.as_mut(),
        cancelled,
        found: Found { references: vec![None; pending.len()], statistics: vec![None; job.entries.len()] },
        effort: job.coding.effort,
        seconds: Seconds::default(),
    };
    let all: Vec<usize> = (0..pending.len()).collect();
    let deferred = walk.pass(&pending, &all, true)?;
    // Which packs of the base are worth their space is known only now that all chunks are.
    let worth = base.as_deref().map_or_else(HashSet::new, |base| {
        base.packs_worth_keeping(deferred.iter().map(|(_, reference)| *reference), job.refer_always)
    });
    let again = walk.refer(&pending, deferred, &worth);
    walk.pass(&pending, &again, false)?;
    let Walk { appender, found, seconds, .. } = walk;

    let started = Instant::now();
    let chunk_count = pending.len() as u64;
    let facts = part::Facts {
        references: part::by_entry(&job, pending.iter().map(|chunk| chunk.entry), found.references)?,
        statistics: found.statistics,
        scales: (0..job.entries.len()).map(|entry| preparer.scale_log2(entry)).collect(),
        rounded_from: (0..job.entries.len())
            .map(|entry| preparer.rounded_from(entry).map(str::to_owned))
            .collect(),
    };
    let delta_outcomes = preparer.delta_outcomes();
    let (table, packs, reused_chunk_count) = appender.finish();
    let part = part::make_part(job, packs, facts, base.as_deref())?;
    kill::point("save.footer");
    let footer = pack::encode_footer(staged.position_bytes(), &table, Some(&part))?;
    let encode_seconds = seconds.encode + started.elapsed().as_secs_f64();
    staged.append(&footer)?;
    let published = staged.publish()?;
    let own = PackRecord { name: part.body.packs[0].name.clone(), length_bytes: published.length_bytes };
    Ok(Written {
        part: WrittenPart { part, pack: own },
        reused_chunk_count,
        chunk_count,
        encode_seconds,
        write_seconds: seconds.write + published.drain_seconds,
        sync_seconds: published.sync_seconds,
        coded_bytes: seconds.coded_bytes,
        coding_seconds: seconds.coding,
        delta_outcomes,
    })
}

/// What is known of chunks and entries so far.
struct Found {
    references: Vec<Option<ChunkRef>>,
    statistics: Vec<Option<Statistics>>,
}

#[derive(Default)]
struct Seconds {
    encode: f64,
    write: f64,
    coding: f64,
    coded_bytes: u64,
}

/// The walk over all chunks.
struct Walk<'a, 'b> {
    job: &'b WriteJob,
    preparer: &'b Preparer<'a>,
    appender: Appender<'b>,
    staged: &'b mut dyn StagedWrite,
    cancelled: &'b AtomicBool,
    found: Found,
    effort: Option<Effort>,
    seconds: Seconds,
}

/// Chunks that the base has: position among all, and where they lie.
type Deferred = Vec<(usize, ChunkRef)>;

impl<'a> Walk<'a, '_> {
    /// Prepares the chunks at these positions batch by batch and appends what is new; returns what the
    /// base has.
    fn pass(&mut self, pending: &[Pending<'a>], positions: &[usize], may_refer: bool) -> Result<Deferred> {
        let mut deferred = Vec::new();
        let mut ready: Option<(&[usize], Vec<Prepared<'a>>)> = None;
        for batch in batches(pending, positions) {
            if self.cancelled.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            let chunks: Vec<Pending<'a>> = batch.iter().map(|&position| pending[position]).collect();
            let mode = Mode { effort: self.effort, may_refer };
            let preparer = self.preparer;
            let threads = Arc::clone(&self.job.threads);
            let work = || {
                let started = Instant::now();
                preparer.prepare(&chunks, mode).map(|prepared| (prepared, started.elapsed().as_secs_f64()))
            };
            let (chunks_made, seconds) = beside(&threads, work, || match ready.take() {
                Some((positions, before)) => {
                    self.append(pending, positions, before, may_refer, &mut deferred)
                }
                None => Ok(()),
            })??;
            self.note_speed(&chunks_made, &chunks, seconds);
            ready = Some((batch, chunks_made));
        }
        if let Some((positions, prepared)) = ready {
            self.append(pending, positions, prepared, may_refer, &mut deferred)?;
        }
        Ok(deferred)
    }

    /// Appends a batch in order.
    fn append(
        &mut self,
        pending: &[Pending<'a>],
        positions: &[usize],
        prepared: Vec<Prepared<'a>>,
        is_first_pass: bool,
        deferred: &mut Deferred,
    ) -> Result<()> {
        let started = Instant::now();
        for (&position, chunk) in positions.iter().zip(prepared) {
            let Pending { entry, raw_length_bytes, .. } = pending[position];
            if let Some(counted) = chunk.statistics.filter(|_| is_first_pass) {
                let known = self.found.statistics[entry].unwrap_or_default();
                self.found.statistics[entry] = Some(known.join(counted));
            }
            if let Form::InBase(reference) = chunk.form {
                deferred.push((position, reference));
                continue;
            }
            let reference = self.appender.place(self.staged, chunk.digest, raw_length_bytes, &chunk.form)?;
            self.found.references[position] = Some(reference);
            self.preparer.recycle(chunk.form);
            kill::point("save.first_chunk");
        }
        self.seconds.write += started.elapsed().as_secs_f64();
        Ok(())
    }

    /// Refers to the chunks of the base whose packs are worth keeping; returns the positions of others.
    fn refer(&mut self, pending: &[Pending<'a>], deferred: Deferred, worth: &HashSet<u32>) -> Vec<usize> {
        let mut again = Vec::new();
        for (position, reference) in deferred {
            let usable = worth.contains(&reference.pack)
                && reference.base.is_none_or(|base| worth.contains(&base.pack));
            let is_known = matches!(pending[position].content, Content::Known(_));
            let raw_length_bytes = pending[position].raw_length_bytes;
            match self.appender.refer(reference, raw_length_bytes, usable || is_known) {
                Some(reference) => self.found.references[position] = Some(reference),
                None => again.push(position),
            }
        }
        again
    }

    /// Gives up coding where it turns out slower than it has to be.
    #[expect(clippy::cast_precision_loss, reason = "a rate needs no more digits than a float has")]
    fn note_speed(&mut self, prepared: &[Prepared<'_>], chunks: &[Pending<'_>], seconds: f64) {
        self.seconds.encode += seconds;
        if self.effort.is_none() {
            return;
        }
        let is_coded = |chunk: &Prepared<'_>| matches!(chunk.form, Form::Raw(_) | Form::Coded { .. });
        let bytes: u64 = prepared
            .iter()
            .zip(chunks)
            .filter(|(chunk, _)| is_coded(chunk))
            .map(|(_, pending)| pending.raw_length_bytes)
            .sum();
        self.seconds.coded_bytes += bytes;
        self.seconds.coding += seconds;
        let is_full = bytes >= BATCH_BYTES / 2;
        if let Some(least) = self.job.coding.least_bytes_per_second
            && is_full
            && (bytes as f64) < least * seconds
        {
            self.effort = None;
        }
    }
}

/// Cuts all sources into chunks, in the order of the entries.
fn pending_chunks<'a>(
    job: &WriteJob,
    sources: &[Source<'a>],
    base: Option<&Base>,
) -> Result<Vec<Pending<'a>>> {
    let mut pending = Vec::with_capacity(job.entries.len());
    for (index, entry) in job.entries.iter().enumerate() {
        let Some(source) = entry.source else { continue };
        let source = *sources
            .get(source)
            .ok_or_else(|| Error::Internal { what: format!("entry `{}` has no source", entry.name) })?;
        match source {
            Source::Elements(bytes) => push_elements(job, index, bytes, &mut pending)?,
            Source::Unchanged => push_unchanged(job, index, base, &mut pending)?,
        }
    }
    Ok(pending)
}

fn push_elements<'a>(
    job: &WriteJob,
    index: usize,
    bytes: &'a [u8],
    pending: &mut Vec<Pending<'a>>,
) -> Result<()> {
    let entry = &job.entries[index];
    let expected = crate::tensor::raw_length_bytes(&entry.region.lengths, entry.dtype);
    if expected != Some(bytes.len() as u64) {
        return Err(Error::invalid(
            format!("source of `{}`", entry.name),
            format!("has {} bytes, but its region needs {expected:?}", bytes.len()),
        ));
    }
    let (size, stored_size) = (entry.dtype.size_bytes(), entry.stored_dtype.size_bytes());
    let in_source = |raw_bytes: u64| (raw_bytes / stored_size * size) as usize;
    let raw_length_bytes = bytes.len() as u64 / size * stored_size;
    pending.extend(chunk_ranges(raw_length_bytes, job.chunk_bytes).enumerate().map(|(number, range)| {
        Pending {
            entry: index,
            index: number,
            raw_length_bytes: range.end - range.start,
            content: Content::Elements(&bytes[in_source(range.start)..in_source(range.end)]),
        }
    }));
    Ok(())
}

fn push_unchanged(
    job: &WriteJob,
    index: usize,
    base: Option<&Base>,
    pending: &mut Vec<Pending<'_>>,
) -> Result<()> {
    let entry = &job.entries[index];
    let key = (entry.name.as_str(), entry.rank);
    let shard = base
        .and_then(|base| base.shard(key, &entry.region, entry.stored_dtype, job.chunk_bytes))
        .ok_or_else(|| Error::Internal {
            what: format!("entry `{}` is said to be unchanged, but the base has none", entry.name),
        })?;
    let raw_length_bytes =
        crate::tensor::raw_length_bytes(&entry.region.lengths, entry.stored_dtype).unwrap_or(0);
    let ranges = chunk_ranges(raw_length_bytes, job.chunk_bytes);
    pending.extend(ranges.zip(&shard.chunks).enumerate().map(|(number, (range, chunk))| Pending {
        entry: index,
        index: number,
        raw_length_bytes: range.end - range.start,
        content: Content::Known(*chunk),
    }));
    Ok(())
}

/// Consecutive runs of positions whose chunks are prepared together.
fn batches<'p>(pending: &[Pending<'_>], positions: &'p [usize]) -> Vec<&'p [usize]> {
    let mut batches = Vec::new();
    let mut rest = positions;
    while !rest.is_empty() {
        let (batch, after) =
            split_batch(rest, BATCH_CHUNKS, BATCH_BYTES, |&position| pending[position].raw_length_bytes);
        batches.push(batch);
        rest = after;
    }
    batches
}
