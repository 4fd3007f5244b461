//! A snapshot that is open for reading.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::error::{Error, Result};
use crate::format::model::{Codec, Manifest};
use crate::inflight::Hold;
use crate::plan::{Want, plan_read};
use crate::read;
use crate::store::{Folder, Key};
use crate::tensor::{Region, raw_length_bytes};

use super::Shared;

/// A snapshot that is open for reading.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) manifest: Manifest,
    pub(super) shared: Arc<Shared>,
    pub(super) _hold: Hold,
}

impl Snapshot {
    /// The decoded, validated manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Fills the caller's buffers with wanted regions; returns the verified raw bytes.
    ///
    /// # Errors
    /// As [`read::run`]; [`Error::InvalidInput`] where a want and its buffer don't fit the manifest.
    pub fn read(&self, wants: &[Want], targets: &mut [&mut [u8]], cancelled: &AtomicBool) -> Result<u64> {
        let body = &self.manifest.body;
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
        let plan = plan_read(body, wants);
        read::run(self.shared.store.as_ref(), &self.shared.threads, body, &plan, targets, cancelled)
    }

    /// Reads and verifies entries without keeping their bytes; returns the raw bytes that were checked.
    ///
    /// # Errors
    /// As [`read::run`].
    pub fn check(&self, entries: &[usize], cancelled: &AtomicBool) -> Result<u64> {
        let body = &self.manifest.body;
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
        read::check(
            self.shared.store.as_ref(),
            &self.shared.threads,
            body,
            &plan_read(body, &wants),
            cancelled,
        )
    }

    /// The whole of an entry as one stretch of a file that may be mapped: (path, offset from the file's
    /// first byte, length in bytes). `None` where its chunks are coded or cast, not consecutive, or not in a file.
    #[must_use]
    pub fn mappable(&self, entry: usize) -> Option<(PathBuf, u64, u64)> {
        let entry = self.manifest.body.entries.get(entry)?;
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
        let key = Key::new(Folder::Packs, &self.manifest.body.packs.get(first.pack as usize)?.name).ok()?;
        Some((self.shared.store.local_path(&key)?, first.offset_bytes, end - first.offset_bytes))
    }
}
