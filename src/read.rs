//! Runs a [`ReadPlan`]: parallel reads, each chunk verified before one of its bytes is copied out.
//!
//! Memory beyond the caller's buffers is one read buffer a thread. All packs of the plan are opened
//! before the first byte is read, so that a deletion by another process can't take them away midway.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rayon::prelude::*;

use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::model::{Body, Codec};
use crate::format::pack;
use crate::kernel;
use crate::plan::{ReadChunk, ReadGroup, ReadPlan};
use crate::store::{Folder, Key, ReadAt, Store};
use crate::threads::Threads;

/// Reads that the store is told of before it is asked for them: what keeps a cold medium busy.
const READ_AHEAD_GROUPS: usize = 16;
/// A read of one group that takes longer came from a cold medium: from then on reads are announced.
/// Announcing what is in memory already would cost a tenth of a load.
const WARM_READ_LIMIT: Duration = Duration::from_millis(1);

/// The open packs of a body, by index in its pack table.
#[derive(Debug)]
pub struct OpenPacks {
    packs: BTreeMap<u32, (String, Box<dyn ReadAt>)>,
}

impl OpenPacks {
    /// Opens the packs with these indices and checks their lengths.
    ///
    /// # Errors
    /// [`Error::Store`] where one is missing, [`Error::Corrupt`] where one has another length.
    pub fn open(store: &dyn Store, body: &Body, indices: impl IntoIterator<Item = u32>) -> Result<Self> {
        let mut packs = BTreeMap::new();
        for index in indices {
            if packs.contains_key(&index) {
                continue;
            }
            let record = body
                .packs
                .get(index as usize)
                .ok_or_else(|| Error::Internal { what: format!("pack {index} is not in the table") })?;
            let key = Key::new(Folder::Packs, &record.name)?;
            let object = store.open(&key)?;
            if object.length_bytes() != record.length_bytes {
                return Err(Error::corrupt(
                    key.to_string(),
                    0,
                    "length",
                    record.length_bytes,
                    object.length_bytes(),
                ));
            }
            packs.insert(index, (key.to_string(), object));
        }
        Ok(Self { packs })
    }

    fn get(&self, index: u32) -> Result<(&str, &dyn ReadAt)> {
        self.packs
            .get(&index)
            .map(|(name, object)| (name.as_str(), object.as_ref()))
            .ok_or_else(|| Error::Internal { what: format!("pack {index} was not opened") })
    }
}

/// Read buffers that are used again: as many as threads work at once, each as long as its longest read.
///
/// Fresh memory for each read would cost more than the read, in page faults.
#[derive(Debug, Default)]
pub struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// Lends a buffer to `work`.
    pub fn lend<T>(&self, work: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let idle = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut buffer = idle().pop().unwrap_or_default();
        let done = work(&mut buffer);
        idle().push(buffer);
        done
    }
}

/// Fills all targets of a plan; returns the raw bytes that were verified.
///
/// `targets` are what [`crate::plan::Want::target`] indexes, each as long as its region.
///
/// # Errors
/// [`Error::Corrupt`] naming pack, offset and entry where a digest differs: no byte of that chunk has
/// reached a target then. [`Error::Interrupted`] after a cancel.
pub fn run(
    store: &dyn Store,
    threads: &Threads,
    body: &Body,
    plan: &ReadPlan,
    targets: &mut [&mut [u8]],
    cancelled: &AtomicBool,
) -> Result<u64> {
    let packs = OpenPacks::open(store, body, plan.groups.iter().map(|group| group.pack))?;
    let slices = split_targets(plan, targets)?;
    let jobs = distribute(plan, slices);
    let buffers = Buffers::default();
    let verified = AtomicU64::new(0);
    let failed = AtomicBool::new(false);
    let cold = AtomicBool::new(false);
    let queue = Mutex::new(jobs.into_iter().enumerate());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    // Threads take reads in the order of the packs, so that the medium sees one forward pass.
    let work = || {
        buffers.lend(|buffer| {
            while let Some((index, (group, slices))) = next() {
                if failed.load(Ordering::Relaxed) {
                    return Ok(());
                }
                if cancelled.load(Ordering::Relaxed) {
                    return Err(Error::Interrupted);
                }
                if cold.load(Ordering::Relaxed)
                    && let Some(later) = plan.groups.get(index + READ_AHEAD_GROUPS)
                {
                    packs.get(later.pack)?.1.will_read(later.range.clone());
                }
                let started = Instant::now();
                match read_group(&packs, body, group, slices, buffer) {
                    Ok(bytes) => {
                        if started.elapsed() > WARM_READ_LIMIT {
                            cold.store(true, Ordering::Relaxed);
                        }
                        verified.fetch_add(bytes, Ordering::Relaxed)
                    }
                    Err(error) => {
                        failed.store(true, Ordering::Relaxed);
                        return Err(error);
                    }
                };
            }
            Ok(())
        })
    };
    threads.pool()?.broadcast(|_| work()).into_iter().collect::<Result<Vec<()>>>()?;
    Ok(verified.into_inner())
}

/// The slice of a target that each piece fills, by piece number.
fn split_targets<'t>(plan: &ReadPlan, targets: &'t mut [&mut [u8]]) -> Result<Vec<Option<&'t mut [u8]>>> {
    let mut by_target: Vec<Vec<(u64, u64, usize)>> = vec![Vec::new(); targets.len()];
    for piece in plan.groups.iter().flat_map(|group| &group.chunks).flat_map(|chunk| &chunk.pieces) {
        by_target[piece.target].push((piece.target_offset_bytes, piece.length_bytes, piece.id));
    }
    let mut slices: Vec<Option<&mut [u8]>> = (0..plan.piece_count).map(|_| None).collect();
    for (target, mut pieces) in targets.iter_mut().zip(by_target) {
        pieces.sort_unstable();
        let mut rest: &mut [u8] = target;
        let mut position = 0;
        for (offset, length, id) in pieces {
            // Pieces of a validated body cover a target exactly, without a gap or an overlap.
            if offset != position || length > rest.len() as u64 {
                return Err(Error::Internal {
                    what: format!("piece at {offset} of a target filled up to {position}"),
                });
            }
            let (slice, after) = rest.split_at_mut(length as usize);
            slices[id] = Some(slice);
            (rest, position) = (after, position + length);
        }
        if !rest.is_empty() {
            return Err(Error::Internal {
                what: format!("{} bytes of a target are not covered", rest.len()),
            });
        }
    }
    Ok(slices)
}

type GroupSlices<'p, 't> = (&'p ReadGroup, Vec<Vec<&'t mut [u8]>>);

/// Gives each group the slices of its chunks, in order.
fn distribute<'p, 't>(plan: &'p ReadPlan, mut slices: Vec<Option<&'t mut [u8]>>) -> Vec<GroupSlices<'p, 't>> {
    plan.groups
        .iter()
        .map(|group| {
            let of_chunks = group
                .chunks
                .iter()
                .map(|chunk| chunk.pieces.iter().filter_map(|piece| slices[piece.id].take()).collect())
                .collect();
            (group, of_chunks)
        })
        .collect()
}

fn read_group(
    packs: &OpenPacks,
    body: &Body,
    group: &ReadGroup,
    slices: Vec<Vec<&mut [u8]>>,
    buffer: &mut Vec<u8>,
) -> Result<u64> {
    let (name, object) = packs.get(group.pack)?;
    let length = (group.range.end - group.range.start) as usize;
    if buffer.len() < length {
        buffer.resize(length, 0);
    }
    object.read_at(group.range.start, &mut buffer[..length])?;
    let mut verified = 0;
    for (chunk, slices) in group.chunks.iter().zip(slices) {
        let start = (chunk.reference.offset_bytes - group.range.start) as usize;
        let stored = &buffer[start..start + chunk.reference.stored_length_bytes as usize];
        verified += chunk.raw_length_bytes;
        match chunk.reference.codec {
            Codec::Store => {
                verify(name, body, chunk, stored)?;
                scatter(chunk, stored, slices);
            }
            codec => {
                return Err(Error::Internal { what: format!("the reader met codec {}", codec.number()) });
            }
        }
    }
    Ok(verified)
}

/// Compares a chunk's raw bytes with its digest.
fn verify(pack: &str, body: &Body, chunk: &ReadChunk, raw: &[u8]) -> Result<()> {
    let found = ChunkDigest::of(raw);
    if found == chunk.reference.digest && raw.len() as u64 == chunk.raw_length_bytes {
        return Ok(());
    }
    let entry = body.entries.get(chunk.entry).map_or("?", |entry| entry.name.as_str());
    Err(Error::corrupt(
        pack,
        chunk.reference.offset_bytes,
        format!("chunk of `{entry}`"),
        format!("digest {}", chunk.reference.digest),
        format!("digest {found}"),
    ))
}

fn scatter(chunk: &ReadChunk, raw: &[u8], slices: Vec<&mut [u8]>) {
    for (piece, slice) in chunk.pieces.iter().zip(slices) {
        let start = piece.chunk_offset_bytes as usize;
        kernel::copy(slice, &raw[start..start + piece.length_bytes as usize]);
    }
}

/// Reads and verifies all chunks of a plan without keeping their bytes.
///
/// # Errors
/// As [`run`].
pub fn check(
    store: &dyn Store,
    threads: &Threads,
    body: &Body,
    plan: &ReadPlan,
    cancelled: &AtomicBool,
) -> Result<u64> {
    let packs = OpenPacks::open(store, body, plan.groups.iter().map(|group| group.pack))?;
    let buffers = Buffers::default();
    let chunks: Vec<&ReadChunk> = plan.groups.iter().flat_map(|group| &group.chunks).collect();
    threads.pool()?.install(|| {
        chunks.par_iter().try_for_each(|chunk| {
            if cancelled.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            buffers.lend(|buffer| check_chunk(&packs, body, chunk, buffer))
        })
    })?;
    Ok(chunks.iter().map(|chunk| chunk.raw_length_bytes).sum())
}

/// Reads and verifies one chunk without keeping its bytes.
///
/// # Errors
/// [`Error::Corrupt`] or [`Error::Store`], as [`run`].
pub fn check_chunk(packs: &OpenPacks, body: &Body, chunk: &ReadChunk, buffer: &mut Vec<u8>) -> Result<()> {
    let (name, object) = packs.get(chunk.reference.pack)?;
    buffer.resize(chunk.reference.stored_length_bytes as usize, 0);
    object.read_at(chunk.reference.offset_bytes, buffer)?;
    match chunk.reference.codec {
        Codec::Store => verify(name, body, chunk, buffer),
        codec => Err(Error::Internal { what: format!("the reader met codec {}", codec.number()) }),
    }
}

/// Reads and checks header, trailer and footer of a pack.
///
/// # Errors
/// [`crate::Error::Corrupt`] with the offset of what does not fit.
pub fn read_footer(object_name: &str, object: &dyn ReadAt) -> Result<pack::Footer> {
    let length_bytes = object.length_bytes();
    let mut header = vec![0; pack::HEADER_LENGTH_BYTES.min(length_bytes) as usize];
    object.read_at(0, &mut header)?;
    let header = pack::decode_header(object_name, &header)?;
    let mut last = vec![0; pack::TRAILER_LENGTH_BYTES.min(length_bytes) as usize];
    object.read_at(length_bytes - last.len() as u64, &mut last)?;
    let trailer = pack::decode_trailer(object_name, length_bytes, &last)?;
    let mut footer = vec![0; trailer.footer_length_bytes as usize];
    object.read_at(trailer.footer_offset_bytes, &mut footer)?;
    let footer = pack::decode_footer(object_name, &trailer, &footer)?;
    footer.check_origin(object_name, &header)?;
    Ok(footer)
}
