//! Writes one rank's pack in the background: digest, skip what the base holds, append, make durable.
//!
//! Memory beyond the sources is bounded: one batch of digests, and the blocks of the staged object. The
//! pack has its footer always, also when nothing changed, because the footer is what recovery rebuilds
//! from. The first error ends the write and drops what was staged; nothing is retried.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rayon::prelude::*;

use crate::codec;
use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::finite::count_nonfinite;
use crate::format::model::{Body, ChunkRef, Codec, Entry, Header, PackRecord, Part, RankStructure, Shard};
use crate::format::pack::{self, PackChunk, PackHeader, PackKind};
use crate::kill;
use crate::plan::{Base, Decision, Reuse, WrittenPart, chunk_ranges};
use crate::store::{Folder, Key, ReadAt, StagedWrite, Store};
use crate::tensor::{Dtype, Region};
use crate::threads::Threads;

/// Raw bytes that are digested together before they are appended in order.
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
    /// Global shape.
    pub shape: Vec<u64>,
    /// The region this rank holds; its row-major raw bytes are the source.
    pub region: Region,
    /// Name of an earlier entry with the same storage; such an entry has no source.
    pub tied_to: Option<String>,
    /// Index of the source; `None` only for ties.
    pub source: Option<usize>,
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
    /// Typed tree of the state.
    pub structure: Box<serde_json::value::RawValue>,
    /// Typed trees of rank-local state.
    pub rank_structures: Vec<RankStructure>,
    /// Snapshot whose chunks may be referred to.
    pub base: Option<Arc<Base>>,
    /// Packs of the base that are being deleted.
    pub gone_packs: HashSet<String>,
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
    /// Seconds spent digesting and deciding.
    pub encode_seconds: f64,
    /// Seconds spent handing bytes to the store.
    pub write_seconds: f64,
    /// Seconds spent waiting for the medium.
    pub sync_seconds: f64,
}

/// One chunk of the save before it has a place.
struct Pending<'a> {
    entry: usize,
    bytes: &'a [u8],
}

/// What the parallel pass found out about a chunk.
struct Digested {
    digest: ChunkDigest,
    nonfinite: Option<u64>,
    base_usable: bool,
}

/// Writes the pack of a save and makes it durable under its name.
///
/// `sources` are the raw bytes that [`EntryInput::source`] indexes. `cancelled` is looked at between
/// batches.
///
/// # Errors
/// [`Error::Interrupted`] after a cancel; [`Error::Store`] where the store fails.
pub fn write_pack(job: WriteJob, sources: &[&[u8]], cancelled: &AtomicBool) -> Result<Written> {
    let key = Key::new(Folder::Packs, &job.pack_name)?;
    let mut staged = job.store.stage(&key)?;
    staged.append(&pack::encode_header(&PackHeader {
        repository_id: job.header.repository_id.clone(),
        session_id: job.header.session_id.clone(),
        seq: job.header.seq,
        rank: job.rank,
        kind: PackKind::Save,
    })?)?;

    let base = job.base.clone();
    let base_packs = BasePacks::open(&job);
    let mut appender = Appender {
        reuse: Reuse::new(&job.pack_name, base.as_deref()),
        table: Vec::new(),
        padding: Vec::new(),
    };
    let pending = pending_chunks(&job, sources)?;
    let mut references: Vec<Option<ChunkRef>> = vec![None; pending.len()];
    let mut nonfinite: Vec<Option<u64>> = vec![None; job.entries.len()];
    let mut deferred: Vec<(usize, Digested)> = Vec::new();
    let (mut encode_seconds, mut write_seconds) = (0.0, 0.0);
    let mut position = 0;
    for batch in batches(&pending) {
        if cancelled.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let started = Instant::now();
        let digested = digest_batch(&job, batch, &base_packs)?;
        let digested_at = Instant::now();
        for (chunk, found) in batch.iter().zip(digested) {
            if let Some(count) = found.nonfinite {
                *nonfinite[chunk.entry].get_or_insert(0) += count;
            }
            if found.base_usable {
                deferred.push((position, found));
            } else {
                references[position] =
                    Some(appender.place(staged.as_mut(), chunk.bytes, &found, &|_| false)?);
            }
            position += 1;
            kill::point("save.first_chunk");
        }
        encode_seconds += (digested_at - started).as_secs_f64();
        write_seconds += digested_at.elapsed().as_secs_f64();
    }
    // Which packs of the base are worth their space is known only now that all chunks are.
    let started = Instant::now();
    let worth = appender.reuse.packs_worth_keeping(
        deferred.iter().map(|(position, found)| (found.digest, pending[*position].bytes.len() as u64)),
        job.refer_always,
    );
    for (position, found) in deferred {
        let usable = |reference: &ChunkRef| worth.contains(&reference.pack);
        references[position] =
            Some(appender.place(staged.as_mut(), pending[position].bytes, &found, &usable)?);
    }
    write_seconds += started.elapsed().as_secs_f64();
    let references = by_entry(&job, &pending, references)?;

    let started = Instant::now();
    let chunk_count = pending.len() as u64;
    drop((pending, base_packs));
    let (packs, reused_chunk_count) = appender.reuse.finish();
    let part = make_part(job, packs, references, &nonfinite)?;
    kill::point("save.footer");
    let footer = pack::encode_footer(staged.position_bytes(), &appender.table, Some(&part))?;
    encode_seconds += started.elapsed().as_secs_f64();
    staged.append(&footer)?;
    let published = staged.publish()?;
    let own = PackRecord { name: part.body.packs[0].name.clone(), length_bytes: published.length_bytes };
    Ok(Written {
        part: WrittenPart { part, pack: own },
        reused_chunk_count,
        chunk_count,
        encode_seconds,
        write_seconds: write_seconds + published.drain_seconds,
        sync_seconds: published.sync_seconds,
    })
}

/// Cuts all sources into chunks, in the order of the entries.
fn pending_chunks<'a>(job: &WriteJob, sources: &[&'a [u8]]) -> Result<Vec<Pending<'a>>> {
    let mut pending = Vec::with_capacity(job.entries.len());
    for (index, entry) in job.entries.iter().enumerate() {
        let Some(source) = entry.source else { continue };
        let bytes = *sources
            .get(source)
            .ok_or_else(|| Error::Internal { what: format!("entry `{}` has no source", entry.name) })?;
        let expected = crate::tensor::raw_length_bytes(&entry.region.lengths, entry.dtype);
        if expected != Some(bytes.len() as u64) {
            return Err(Error::invalid(
                format!("source of `{}`", entry.name),
                format!("has {} bytes, but its region needs {expected:?}", bytes.len()),
            ));
        }
        pending.extend(
            chunk_ranges(bytes.len() as u64, job.chunk_bytes).map(|range| Pending {
                entry: index,
                bytes: &bytes[range.start as usize..range.end as usize],
            }),
        );
    }
    Ok(pending)
}

/// Consecutive runs of chunks that are digested together.
fn batches<'a, 'b>(pending: &'b [Pending<'a>]) -> impl Iterator<Item = &'b [Pending<'a>]> {
    let mut rest = pending;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let count = rest
            .iter()
            .take(BATCH_CHUNKS)
            .take_while(|chunk| {
                let fits = bytes < BATCH_BYTES;
                bytes += chunk.bytes.len() as u64;
                fits
            })
            .count();
        let (batch, after) = rest.split_at(count);
        rest = after;
        (count > 0).then_some(batch)
    })
}

fn digest_batch(job: &WriteJob, batch: &[Pending<'_>], base_packs: &BasePacks<'_>) -> Result<Vec<Digested>> {
    Ok(job.threads.pool()?.install(|| {
        batch
            .par_iter()
            .with_min_len(if batch.len() > 256 { 64 } else { 1 })
            .map(|chunk| {
                let digest = ChunkDigest::of(chunk.bytes);
                Digested {
                    digest,
                    nonfinite: count_nonfinite(job.entries[chunk.entry].dtype, chunk.bytes),
                    base_usable: base_packs.may_refer(digest, chunk.bytes.len() as u64),
                }
            })
            .collect()
    }))
}

/// The open packs of the base: only chunks that can be read now are referred to.
struct BasePacks<'a> {
    base: Option<&'a Base>,
    packs: Vec<Option<Box<dyn ReadAt>>>,
}

impl<'a> BasePacks<'a> {
    /// Opens the packs; one that is missing or has another length counts as gone, and what it held is
    /// written again.
    fn open(job: &'a WriteJob) -> Self {
        let base = job.base.as_deref();
        let packs = base.map_or_else(Vec::new, |base| {
            base.packs
                .iter()
                .map(|record| {
                    if job.gone_packs.contains(&record.name) {
                        return None;
                    }
                    let key = Key::new(Folder::Packs, &record.name).ok()?;
                    job.store.open(&key).ok().filter(|object| object.length_bytes() == record.length_bytes)
                })
                .collect()
        });
        Self { base, packs }
    }

    /// True where the base has these bytes in a pack that is there, verified by reading them unless
    /// this process wrote or verified them before.
    fn may_refer(&self, digest: ChunkDigest, raw_length_bytes: u64) -> bool {
        let Some((base, reference)) =
            self.base.and_then(|base| Some((base, base.find(digest, raw_length_bytes)?)))
        else {
            return false;
        };
        let Some(Some(object)) = self.packs.get(reference.pack as usize) else { return false };
        if base.trusted {
            return true;
        }
        let mut stored = vec![0; reference.stored_length_bytes as usize];
        let mut raw = vec![0; raw_length_bytes as usize];
        object.read_at(reference.offset_bytes, &mut stored).is_ok()
            && codec::decode(reference.codec, &stored, None, &mut raw, &mut codec::Scratch::default()).is_ok()
            && ChunkDigest::of(&raw) == digest
    }
}

/// Appends chunks in order and keeps the chunk table.
struct Appender<'a> {
    reuse: Reuse<'a>,
    table: Vec<PackChunk>,
    padding: Vec<u8>,
}

impl Appender<'_> {
    /// Refers to the chunk where its bytes exist, else appends it at its alignment.
    fn place(
        &mut self,
        staged: &mut dyn StagedWrite,
        raw: &[u8],
        found: &Digested,
        usable: &dyn Fn(&ChunkRef) -> bool,
    ) -> Result<ChunkRef> {
        let raw_length_bytes = raw.len() as u64;
        if let Decision::Refer(reference) = self.reuse.decide(found.digest, raw_length_bytes, usable) {
            return Ok(reference);
        }
        let padding = pack::padding_before(staged.position_bytes(), raw_length_bytes) as usize;
        if padding > 0 {
            self.padding.resize(padding, 0);
            staged.append(&self.padding[..padding])?;
        }
        let offset_bytes = staged.position_bytes();
        staged.append(raw)?;
        self.table.push(PackChunk {
            offset_bytes,
            stored_length_bytes: raw_length_bytes,
            raw_length_bytes,
            codec: Codec::Store,
            digest: found.digest,
        });
        Ok(self.reuse.note_written(
            found.digest,
            raw_length_bytes,
            offset_bytes,
            raw_length_bytes,
            Codec::Store,
        ))
    }
}

/// The references of each entry, in order.
fn by_entry(
    job: &WriteJob,
    pending: &[Pending<'_>],
    references: Vec<Option<ChunkRef>>,
) -> Result<Vec<Vec<ChunkRef>>> {
    let mut by_entry: Vec<Vec<ChunkRef>> = vec![Vec::new(); job.entries.len()];
    for (chunk, reference) in pending.iter().zip(references) {
        let reference =
            reference.ok_or_else(|| Error::Internal { what: "a chunk of a save has no place".to_owned() })?;
        by_entry[chunk.entry].push(reference);
    }
    Ok(by_entry)
}

/// Builds the part: entries sorted by name, ties with the chunks of what they are tied to.
fn make_part(
    job: WriteJob,
    packs: Vec<PackRecord>,
    references: Vec<Vec<ChunkRef>>,
    nonfinite: &[Option<u64>],
) -> Result<Part> {
    let mut entries: Vec<Entry> = Vec::with_capacity(job.entries.len());
    for ((input, chunks), nonfinite) in job.entries.iter().zip(references).zip(nonfinite) {
        let shard =
            Shard { offsets: input.region.offsets.clone(), lengths: input.region.lengths.clone(), chunks };
        entries.push(Entry {
            name: input.name.clone(),
            rank: input.rank,
            dtype: input.dtype,
            stored_dtype: input.dtype,
            shape: input.shape.clone(),
            tied_to: input.tied_to.clone(),
            nonfinite: nonfinite.filter(|&count| count > 0),
            shards: if input.region.lengths.contains(&0) { Vec::new() } else { vec![shard] },
        });
    }
    let targets: std::collections::HashMap<&str, usize> =
        job.entries.iter().enumerate().map(|(index, input)| (input.name.as_str(), index)).collect();
    for (index, input) in job.entries.iter().enumerate() {
        let Some(target) = &input.tied_to else { continue };
        let target = targets
            .get(target.as_str())
            .copied()
            .filter(|&target| job.entries[target].tied_to.is_none())
            .ok_or_else(|| {
                Error::invalid(
                    format!("tie of `{}`", input.name),
                    format!("`{target}` is no entry of this save, or a tie itself"),
                )
            })?;
        let shards = entries[target].shards.clone();
        entries[index].shards = shards;
        entries[index].nonfinite = entries[target].nonfinite;
    }
    entries.sort_by(|left, right| (&left.name, left.rank).cmp(&(&right.name, right.rank)));
    let body = Body {
        chunk_bytes: job.chunk_bytes,
        packs,
        entries,
        structure: job.structure,
        rank_structures: job.rank_structures,
    };
    Ok(Part { rank: job.rank, header: job.header, body })
}
