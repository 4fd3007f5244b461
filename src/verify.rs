//! The scrub: reads everything a snapshot refers to and says what is wrong, where, and for which steps.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::format::model::{Manifest, PackRecord};
use crate::plan::{ReadChunk, ReadShape, Want, plan_read};
use crate::read::{OpenPacks, Worker, open_pack, read_footer, shape_of};
use crate::store::Store;
use crate::tensor::Region;
use crate::threads::{Spares, Threads, interrupt, within_call};

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Key of the object.
    pub object: String,
    /// Offset from the object's first byte.
    pub offset_bytes: u64,
    /// What is wrong there.
    pub what: String,
    /// Steps of the snapshots that need these bytes, ascending.
    pub steps: BTreeSet<u64>,
}

/// What a scrub found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Raw bytes that were read and compared with their digests.
    pub checked_bytes: u64,
    /// Everything that is wrong, by object and offset.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Adds a finding, or the step to one that is known.
    pub fn add(&mut self, object: &str, offset_bytes: u64, what: String, step: Option<u64>) {
        let known = self
            .findings
            .iter_mut()
            .find(|known| known.object == object && known.offset_bytes == offset_bytes && known.what == what);
        if let Some(known) = known {
            known.steps.extend(step);
            return;
        }
        self.findings.push(Finding {
            object: object.to_owned(),
            offset_bytes,
            what,
            steps: step.into_iter().collect(),
        });
    }

    /// Adds an error, with the place it names.
    pub fn add_error(&mut self, error: &Error, fallback_object: &str, step: Option<u64>) {
        match error {
            Error::Corrupt { object, offset_bytes, what, expected, found } => {
                self.add(
                    object,
                    *offset_bytes,
                    format!("corrupt {what}: expected {expected}, found: {found}"),
                    step,
                );
            }
            other => self.add(fallback_object, 0, other.chain(), step),
        }
    }
}

/// Checks packs and chunks of these snapshots; each chunk is read once, however many refer to it.
///
/// `sample` in (0, 1] is the share of chunks that are read; which ones follows from their place, so
/// that two runs check the same. Headers, footers and lengths of packs are always checked.
///
/// # Errors
/// [`Error::Interrupted`] after a cancel, [`Error::Store`] where threads can't start. Damage is a
/// finding, not an error.
pub fn verify(
    store: &dyn Store,
    threads: &Threads,
    manifests: &[Manifest],
    sample: f64,
    cancelled: &AtomicBool,
    report: &mut Report,
) -> Result<()> {
    let mut users = Users::default();
    for manifest in manifests {
        for record in &manifest.body.packs {
            let steps = users.packs.entry(format!("packs/{}", record.name)).or_default();
            if steps.is_empty() {
                check_pack(store, record, report);
            }
            steps.insert(manifest.header.step);
        }
        // A damaged header or footer does not make the chunks unreadable: they are checked all the same.
        let shape = shape_of(store, &manifest.body)?;
        let packs = OpenPacks::open_readable(store, &manifest.body, shape)?;
        let chunks = new_chunks(manifest, &packs, sample, &mut users);
        check_chunks(threads, (manifest, &packs), &chunks, shape, cancelled, report)?;
    }
    for finding in &mut report.findings {
        let place = (finding.object.clone(), finding.offset_bytes);
        let steps = users.chunks.get(&place).or_else(|| users.packs.get(&finding.object));
        finding.steps.extend(steps.into_iter().flatten());
    }
    report
        .findings
        .sort_by(|left, right| (&left.object, left.offset_bytes).cmp(&(&right.object, right.offset_bytes)));
    Ok(())
}

/// Steps of the snapshots that need a pack, or a chunk at an offset of a pack; keys are object names.
#[derive(Default)]
struct Users {
    packs: BTreeMap<String, BTreeSet<u64>>,
    chunks: BTreeMap<(String, u64), BTreeSet<u64>>,
}

/// Checks length, header, trailer and footer of a pack.
fn check_pack(store: &dyn Store, record: &PackRecord, report: &mut Report) {
    let checked = open_pack(store, record).and_then(|(name, object)| read_footer(&name, object.as_ref()));
    if let Err(error) = checked {
        report.add_error(&error, &format!("packs/{}", record.name), None);
    }
}

/// The sampled chunks of a snapshot that were not checked for another one.
fn new_chunks(manifest: &Manifest, readable: &OpenPacks, sample: f64, users: &mut Users) -> Vec<ReadChunk> {
    let wants: Vec<Want> = manifest
        .body
        .entries
        .iter()
        .enumerate()
        .map(|(entry, found)| Want { entry, region: Region::whole(&found.shape), target: entry })
        .collect();
    plan_read(&manifest.body, &wants, ReadShape::FILE)
        .groups
        .into_iter()
        .flat_map(|group| group.chunks)
        .filter(|chunk| chunk.packs().iter().all(|pack| readable.has(*pack)) && is_sampled(chunk, sample))
        .filter(|chunk| {
            // A rounded chunk has no place of its own to know it by.
            if chunk.rounded_from.is_some() {
                return true;
            }
            let pack = &manifest.body.packs[chunk.reference.pack as usize].name;
            let steps =
                users.chunks.entry((format!("packs/{pack}"), chunk.reference.offset_bytes)).or_default();
            let first = steps.is_empty();
            steps.insert(manifest.header.step);
            first
        })
        .collect()
}

/// Picks a fixed share of all chunks by their digest, which is evenly spread.
fn is_sampled(chunk: &ReadChunk, sample: f64) -> bool {
    let position = (chunk.reference.digest.0 >> 96) as u32;
    f64::from(position) < sample * 4_294_967_296.0
}

/// Checks chunks; where reads are slow, each is announced before its turn.
fn check_chunks(
    threads: &Threads,
    (manifest, packs): (&Manifest, &OpenPacks),
    chunks: &[ReadChunk],
    shape: ReadShape,
    cancelled: &AtomicBool,
    report: &mut Report,
) -> Result<()> {
    let workers = Spares::<Worker>::default();
    let checked_bytes = AtomicU64::new(0);
    let errors = Mutex::new(Vec::new());
    let interrupt = interrupt();
    threads.pool()?.install(|| {
        chunks.par_iter().enumerate().try_for_each(|(index, chunk)| {
            if cancelled.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            if shape.is_slow
                && let Some(later) = chunks.get(index + shape.ahead_count)
            {
                packs.announce(later)?;
            }
            let check = || workers.lend(|worker| worker.check(packs, &manifest.body, chunk));
            match within_call(interrupt.clone(), check) {
                Err(Error::Interrupted) => return Err(Error::Interrupted),
                Ok(()) => {
                    checked_bytes.fetch_add(chunk.raw_length_bytes, Ordering::Relaxed);
                }
                Err(error) => errors.lock().unwrap_or_else(PoisonError::into_inner).push(error),
            }
            Ok(())
        })
    })?;
    report.checked_bytes += checked_bytes.into_inner();
    for error in errors.into_inner().unwrap_or_else(PoisonError::into_inner) {
        report.add_error(&error, "packs", None);
    }
    Ok(())
}
