//! A snapshot that is open for reading.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::format::model::{Body, Codec, Manifest};
use crate::inflight::Hold;
use crate::plan::{Want, plan_read};
use crate::read;
use crate::store::{Folder, Key};
use crate::tensor::{Region, raw_length_bytes};

use super::Shared;

/// A snapshot that is open for reading.
///
/// Its manifest may be replaced meanwhile, by a merge of another process that this one's holds don't stop.
/// What it refers to is then read through the manifest that there is now, if it is of the same snapshot.
#[derive(Debug)]
pub struct Snapshot {
    opened: Arc<Manifest>,
    latest: Mutex<Arc<Manifest>>,
    holds: Mutex<Vec<Hold>>,
    merge_count: u64,
    shared: Arc<Shared>,
}

impl Snapshot {
    pub(super) fn open(shared: Arc<Shared>, seq: u64) -> Result<Self> {
        let merge_count = shared.lock_state().merge_count;
        let mut manifest = shared.manifest(seq)?;
        loop {
            let packs = manifest.body.packs.iter().map(|record| record.name.clone());
            let (hold, gone) = shared.registry.hold(Some(seq), packs);
            if gone.is_empty() {
                // Packs are claimed for deletion only after no manifest refers to them: while it is there,
                // they are held.
                shared.require_manifest(seq)?;
                let opened = Arc::new(manifest);
                let (latest, holds) = (Mutex::new(Arc::clone(&opened)), Mutex::new(vec![hold]));
                return Ok(Self { opened, latest, holds, merge_count, shared });
            }
            let now = shared.manifest(seq)?;
            if now.body.packs == manifest.body.packs {
                return Err(shared.no_such_seq(seq));
            }
            // They go because a merge has replaced the manifest since it was read.
            manifest = now;
        }
    }

    /// The decoded, validated manifest, as it was when the snapshot was opened.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.opened
    }

    /// Merges of this handle before it was opened.
    pub(super) fn merge_count(&self) -> u64 {
        self.merge_count
    }

    /// The manifest that is read through.
    pub(super) fn latest(&self) -> Arc<Manifest> {
        Arc::clone(&self.latest.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs `work` on the manifest; where a pack is gone, once more on the one that there is now.
    fn with_packs<T>(&self, mut work: impl FnMut(&Manifest) -> Result<T>) -> Result<T> {
        loop {
            let latest = self.latest();
            match work(&latest) {
                Err(error) if error.is_not_found() => self.follow(&latest, error)?,
                done => return done,
            }
        }
    }

    /// Takes the manifest that there is now; `error` where it is the one that was tried.
    fn follow(&self, tried: &Manifest, error: Error) -> Result<()> {
        let seq = tried.header.seq;
        let now = self.shared.manifest(seq)?;
        let identity =
            |manifest: &Manifest| (manifest.header.session_id.clone(), manifest.header.state_digest.clone());
        if identity(&now) != identity(tried) {
            return Err(self.shared.no_such_seq(seq));
        }
        if now.body.packs == tried.body.packs {
            return Err(error);
        }
        let packs = now.body.packs.iter().map(|record| record.name.clone());
        let (hold, _gone) = self.shared.registry.hold(None, packs);
        self.holds.lock().unwrap_or_else(PoisonError::into_inner).push(hold);
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(now);
        Ok(())
    }

    /// Fills the caller's buffers with wanted regions; returns the verified raw bytes.
    ///
    /// # Errors
    /// As [`read::run`]; [`Error::InvalidInput`] where a want and its buffer don't fit the manifest.
    pub fn read(&self, wants: &[Want], targets: &mut [&mut [u8]], cancelled: &AtomicBool) -> Result<u64> {
        let body = &self.opened.body;
        for want in wants {
            let entry = body
                .entries
                .get(want.entry)
                .ok_or_else(|| Error::invalid("entry", "index past the manifest's entries"))?;
            let length = raw_length_bytes(&want.region.lengths, entry.dtype);
            let target = targets.get(want.target).map(|target| target.len() as u64);
            if !want.region.fits(&entry.shape) || length.is_none() || length != target {
                return Err(Error::Mismatch {
                    name: entry.name.clone(),
                    field: "size",
                    expected: format!("{target:?} bytes"),
                    found: format!("{length:?} bytes"),
                });
            }
        }
        let (store, threads) = (self.shared.store.as_ref(), &self.shared.threads);
        self.with_packs(|latest| {
            let plan = plan_read(&latest.body, wants, read::shape_of(store, &latest.body)?);
            read::run(store, threads, &latest.body, &plan, targets, cancelled)
        })
    }

    /// Reads and verifies entries without keeping their bytes; returns the raw bytes that were checked.
    ///
    /// # Errors
    /// As [`read::run`].
    pub fn check(&self, entries: &[usize], cancelled: &AtomicBool) -> Result<u64> {
        let body = &self.opened.body;
        let wants: Vec<Want> = entries
            .iter()
            .map(|&entry| {
                let found = body
                    .entries
                    .get(entry)
                    .ok_or_else(|| Error::invalid("entry", "index past the manifest's entries"))?;
                Ok(Want { entry, region: Region::whole(&found.shape), target: 0 })
            })
            .collect::<Result<_>>()?;
        let (store, threads) = (self.shared.store.as_ref(), &self.shared.threads);
        self.with_packs(|latest| {
            let plan = plan_read(&latest.body, &wants, read::shape_of(store, &latest.body)?);
            read::check(store, threads, &latest.body, &plan, cancelled)
        })
    }

    /// The whole of an entry as one stretch of a file that may be mapped: (path, offset from the file's
    /// first byte, length in bytes). `None` where its chunks are coded or cast, not consecutive, or not in a file.
    #[must_use]
    pub fn mappable(&self, entry: usize) -> Option<(PathBuf, u64, u64)> {
        let (key, range) = self
            .with_packs(|latest| {
                let stretch = stretch(&latest.body, entry);
                // What can't be opened can't be mapped.
                stretch.as_ref().map_or(Ok(()), |(key, _)| self.shared.store.open(key).map(drop))?;
                Ok(stretch)
            })
            .ok()??;
        Some((self.shared.store.local_path(&key)?, range.start, range.end - range.start))
    }
}

/// The pack and the consecutive raw bytes that an entry is, if it is.
fn stretch(body: &Body, entry: usize) -> Option<(Key, Range<u64>)> {
    let entry = body.entries.get(entry)?;
    let [shard] = entry.shards.as_slice() else { return None };
    if entry.stored_dtype != entry.dtype {
        return None;
    }
    let first = shard.chunks.first()?;
    let mut end = first.offset_bytes;
    for chunk in &shard.chunks {
        if chunk.pack != first.pack || chunk.offset_bytes != end || chunk.codec != Codec::Store {
            return None;
        }
        end += chunk.stored_length_bytes;
    }
    let key = Key::new(Folder::Packs, &body.packs.get(first.pack as usize)?.name).ok()?;
    Some((key, first.offset_bytes..end))
}
