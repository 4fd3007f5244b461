//! Runs a [`ReadPlan`]: parallel reads, each chunk verified before one of its bytes is copied out.
//!
//! Memory beyond the caller's buffers are the buffers of one worker a thread. All packs of the plan are opened
//! before the first byte is read, so that a deletion by another process can't take them away midway.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::format::model::{Body, PackRecord};
use crate::format::pack;
use crate::plan::{ReadChunk, ReadGroup, ReadPlan, ReadShape};
use crate::store::{Folder, Key, ReadAt, Store};
use crate::threads::{Spares, Threads, for_each_waiting, interrupt, within_call};

mod chunk;

pub use chunk::Worker;

use chunk::Source;

/// Packs that are opened at once where each is a round trip.
const OPENING_THREADS: usize = 16;
/// A read of one group that takes longer came from a cold medium: from then on reads are announced.
/// Announcing what is in memory already would cost a tenth of a load.
const WARM_READ_LIMIT: Duration = Duration::from_millis(1);

/// The open packs of a body, by index in its pack table.
#[derive(Debug)]
pub struct OpenPacks {
    packs: BTreeMap<u32, (String, Box<dyn ReadAt>)>,
}

impl OpenPacks {
    /// Opens the packs with these indices, where reads are as `shape` says, and checks their lengths.
    ///
    /// # Errors
    /// [`Error::Store`] where one is missing, [`Error::Corrupt`] where one has another length.
    pub fn open(
        store: &dyn Store,
        body: &Body,
        indices: impl IntoIterator<Item = u32>,
        shape: ReadShape,
    ) -> Result<Self> {
        Self::each(indices, shape, |index| {
            let record = body.packs.get(index as usize);
            let record = record
                .ok_or_else(|| Error::Internal { what: format!("pack {index} is not in the table") })?;
            open_pack(store, record).map(Some)
        })
    }

    /// Opens the packs of a body that can be opened and have their length.
    ///
    /// # Errors
    /// [`Error::Internal`] for a bug alone.
    pub fn open_readable(store: &dyn Store, body: &Body, shape: ReadShape) -> Result<Self> {
        let indices = (0_u32..).zip(&body.packs).map(|(index, _)| index);
        Self::each(indices, shape, |index| Ok(open_pack(store, &body.packs[index as usize]).ok()))
    }

    fn each(
        indices: impl IntoIterator<Item = u32>,
        shape: ReadShape,
        open: impl Fn(u32) -> Result<Option<(String, Box<dyn ReadAt>)>> + Sync,
    ) -> Result<Self> {
        let indices: Vec<u32> = indices.into_iter().collect::<BTreeSet<u32>>().into_iter().collect();
        let packs = Mutex::new(BTreeMap::new());
        // Across a network each is a round trip.
        for_each_waiting(&indices, if shape.is_slow { OPENING_THREADS } else { 1 }, |&index| {
            if let Some(opened) = open(index)? {
                packs.lock().unwrap_or_else(PoisonError::into_inner).insert(index, opened);
            }
            Ok(())
        })?;
        Ok(Self { packs: packs.into_inner().unwrap_or_else(PoisonError::into_inner) })
    }

    /// Whether the pack with this index is open.
    #[must_use]
    pub fn has(&self, index: u32) -> bool {
        self.packs.contains_key(&index)
    }

    /// Tells the store that the bytes of a chunk are going to be read, and those it is made from.
    ///
    /// # Errors
    /// [`Error::Internal`] where its pack was not opened.
    pub fn announce(&self, chunk: &ReadChunk) -> Result<()> {
        if chunk.rounded_from.is_none() {
            let reference = &chunk.reference;
            let end = reference.offset_bytes.saturating_add(reference.stored_length_bytes);
            self.get(reference.pack)?.1.will_read(reference.offset_bytes..end);
        }
        self.announce_base(chunk)
    }

    fn announce_group(&self, group: &ReadGroup) -> Result<()> {
        if !group.range.is_empty() {
            self.get(group.pack)?.1.will_read(group.range.clone());
        }
        group.chunks.iter().try_for_each(|chunk| self.announce_base(chunk))
    }

    fn announce_base(&self, chunk: &ReadChunk) -> Result<()> {
        if let Some(base) = &chunk.reference.base {
            let end = base.offset_bytes.saturating_add(base.stored_length_bytes);
            self.get(base.pack)?.1.will_read(base.offset_bytes..end);
        }
        Ok(())
    }

    fn get(&self, index: u32) -> Result<(&str, &dyn ReadAt)> {
        self.packs
            .get(&index)
            .map(|(name, object)| (name.as_str(), object.as_ref()))
            .ok_or_else(|| Error::Internal { what: format!("pack {index} was not opened") })
    }
}

/// Opens a pack that is as long as its record says; returns its name for messages, too.
///
/// # Errors
/// [`Error::Store`] where it is missing, [`Error::Corrupt`] where it has another length.
pub fn open_pack(store: &dyn Store, record: &PackRecord) -> Result<(String, Box<dyn ReadAt>)> {
    let key = Key::new(Folder::Packs, &record.name)?;
    let object = store.open(&key)?;
    if object.length_bytes() == record.length_bytes {
        return Ok((key.to_string(), object));
    }
    Err(Error::corrupt(key.to_string(), 0, "length", record.length_bytes, object.length_bytes()))
}

/// How the packs of a body are read best: one that lies across a network decides.
///
/// # Errors
/// [`Error::InvalidInput`] where a name in the table is none; a validated body has none such.
pub fn shape_of(store: &dyn Store, body: &Body) -> Result<ReadShape> {
    for record in &body.packs {
        if !store.is_at_hand(&Key::new(Folder::Packs, &record.name)?) {
            return Ok(ReadShape::NETWORK);
        }
    }
    Ok(ReadShape::FILE)
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
    let slices = split_targets(plan, targets)?;
    perform(store, threads, body, plan, distribute(plan, slices), cancelled)
}

/// Reads and verifies all chunks of a plan without keeping their bytes; returns how many those are.
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
    let nowhere = |group: &ReadGroup| group.chunks.iter().map(|_| Vec::new()).collect();
    let jobs = plan.groups.iter().map(|group| (group, nowhere(group))).collect();
    perform(store, threads, body, plan, jobs, cancelled)
}

/// Runs the reads of a plan on all threads.
fn perform(
    store: &dyn Store,
    threads: &Threads,
    body: &Body,
    plan: &ReadPlan,
    jobs: Vec<GroupSlices<'_, '_>>,
    cancelled: &AtomicBool,
) -> Result<u64> {
    let packs = OpenPacks::open(store, body, plan.packs(), plan.shape)?;
    let source = Source { packs: &packs, body };
    let workers = Spares::<Worker>::default();
    let verified = AtomicU64::new(0);
    let failed = AtomicBool::new(false);
    let cold = AtomicBool::new(plan.shape.is_slow);
    if plan.shape.is_slow {
        for group in plan.groups.iter().take(plan.shape.ahead_count) {
            packs.announce_group(group)?;
        }
    }
    let queue = Mutex::new(jobs.into_iter().enumerate());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    // Threads take reads in the order of the packs, so that the medium sees one forward pass.
    let work = || {
        workers.lend(|worker| {
            while let Some((index, (group, slices))) = next() {
                if failed.load(Ordering::Relaxed) {
                    return Ok(());
                }
                if cancelled.load(Ordering::Relaxed) {
                    return Err(Error::Interrupted);
                }
                if cold.load(Ordering::Relaxed)
                    && let Some(later) = plan.groups.get(index + plan.shape.ahead_count)
                {
                    packs.announce_group(later)?;
                }
                let started = Instant::now();
                match read_group(source, group, slices, worker) {
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
    let interrupt = interrupt();
    let done = threads.pool()?.broadcast(|_| within_call(interrupt.clone(), work));
    done.into_iter().collect::<Result<Vec<()>>>()?;
    Ok(verified.into_inner())
}

/// The slice of a target that each piece fills, by piece number.
fn split_targets<'t>(plan: &ReadPlan, targets: &'t mut [&mut [u8]]) -> Result<Vec<Option<&'t mut [u8]>>> {
    let mut by_target: Vec<Vec<(u64, u64, usize)>> = vec![Vec::new(); targets.len()];
    for piece in plan.groups.iter().flat_map(|group| &group.chunks).flat_map(|chunk| &chunk.pieces) {
        by_target[piece.target].push((piece.target_offset_bytes, piece.target_length_bytes, piece.id));
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
    source: Source<'_>,
    group: &ReadGroup,
    slices: Vec<Vec<&mut [u8]>>,
    worker: &mut Worker,
) -> Result<u64> {
    let length = (group.range.end - group.range.start) as usize;
    if length > 0 {
        let (_, object) = source.packs.get(group.pack)?;
        object.read_into(group.range.start, length, &mut worker.group)?;
    }
    let mut verified = 0;
    for (chunk, slices) in group.chunks.iter().zip(slices) {
        let start = chunk.reference.offset_bytes.saturating_sub(group.range.start) as usize;
        let range = start..start + chunk.reference.stored_length_bytes as usize;
        worker.fill(source, chunk, range, slices)?;
        verified += chunk.raw_length_bytes;
    }
    Ok(verified)
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
