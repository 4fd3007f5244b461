//! A snapshot that is open for reading as a Python class: `SnapshotReader`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::Error;
use crate::plan::Want;
use crate::repository::Snapshot;
use crate::store::local::open_file;
use crate::tensor::{Region, raw_length_bytes};

use super::buffer::{MappedPack, Memory, Targets};
use super::convert;
use super::error::raise;
use super::wait::interruptible;

/// A snapshot that is open for reading; retention keeps it while this object lives.
#[pyclass(frozen, module = "varvite._native")]
pub(crate) struct SnapshotReader {
    pub(crate) snapshot: Snapshot,
    mapped: Mutex<BTreeMap<PathBuf, Py<MappedPack>>>,
}

/// (name, rank, dtype, stored dtype, shape, tied to, non-finite elements, largest magnitude, Euclidean
/// norm, raw bytes, stored bytes)
type EntryRow = (
    String,
    Option<u32>,
    &'static str,
    &'static str,
    Vec<u64>,
    Option<String>,
    Option<u64>,
    Option<f64>,
    Option<f64>,
    u64,
    u64,
);

/// (offsets, lengths) of a region, in elements.
type RegionPair = (Vec<u64>, Vec<u64>);

impl SnapshotReader {
    pub(crate) fn new(snapshot: Snapshot) -> Self {
        Self { snapshot, mapped: Mutex::new(BTreeMap::new()) }
    }
}

#[pymethods]
#[expect(clippy::needless_pass_by_value, reason = "arguments are extracted from Python as owned values")]
impl SnapshotReader {
    /// Header of the snapshot.
    fn header<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        convert::header(py, &self.snapshot.manifest().header)
    }

    /// Rows of all entries, in the order that `read` counts them by.
    fn entries(&self) -> Vec<EntryRow> {
        self.snapshot
            .manifest()
            .body
            .entries
            .iter()
            .map(|entry| {
                let stored = entry
                    .shards
                    .iter()
                    .flat_map(|shard| &shard.chunks)
                    .map(|chunk| chunk.stored_length_bytes)
                    .sum();
                (
                    entry.name.clone(),
                    entry.rank,
                    entry.dtype.name(),
                    entry.stored_dtype.name(),
                    entry.shape.clone(),
                    entry.tied_to.clone(),
                    entry.nonfinite,
                    entry.abs_max,
                    entry.l2_norm,
                    raw_length_bytes(&entry.shape, entry.stored_dtype).unwrap_or(0),
                    stored,
                )
            })
            .collect()
    }

    /// Digests of an entry's chunks in order, as 32 hex digits each (and the scale of 8-bit floats), with their raw
    /// lengths in bytes.
    fn chunk_digests(&self, index: usize) -> Vec<(String, u64)> {
        let body = &self.snapshot.manifest().body;
        let Some(entry) = body.entries.get(index) else { return Vec::new() };
        entry
            .shards
            .iter()
            .flat_map(|shard| {
                let length = raw_length_bytes(&shard.lengths, entry.stored_dtype).unwrap_or(0);
                let chunks = crate::plan::chunk_ranges(length, body.chunk_bytes).zip(&shard.chunks);
                chunks.map(|chunk| (shard.scale_log2, chunk))
            })
            .map(|(scale_log2, (range, chunk))| {
                // Equal bytes are equal values only with equal scales.
                let scale = if scale_log2 == 0 { String::new() } else { format!("*2^{scale_log2}") };
                (format!("{}{scale}", chunk.digest), range.end - range.start)
            })
            .collect()
    }

    /// Names and lengths of the packs that the snapshot refers to.
    fn packs(&self) -> Vec<(String, u64)> {
        self.snapshot
            .manifest()
            .body
            .packs
            .iter()
            .map(|record| (record.name.clone(), record.length_bytes))
            .collect()
    }

    /// Typed tree of the state, as JSON text.
    fn structure(&self) -> &str {
        self.snapshot.manifest().body.structure.get()
    }

    /// Typed trees of rank-local state, as JSON text by rank.
    fn rank_structures(&self) -> BTreeMap<u32, &str> {
        self.snapshot
            .manifest()
            .body
            .rank_structures
            .iter()
            .map(|found| (found.rank, found.structure.get()))
            .collect()
    }

    /// Regions of an entry's shards: (offsets, lengths), in elements.
    fn shards(&self, index: usize) -> Vec<(Vec<u64>, Vec<u64>)> {
        let shards = self.snapshot.manifest().body.entries.get(index).map_or(&[][..], |entry| &entry.shards);
        shards.iter().map(|shard| (shard.offsets.clone(), shard.lengths.clone())).collect()
    }

    /// Fills each value with the entry of the same position in `indices`, or with a region of it: (offsets,
    /// lengths), in elements; returns verified raw bytes.
    #[pyo3(signature = (indices, values, regions=None))]
    fn read(
        &self,
        py: Python<'_>,
        indices: Vec<usize>,
        values: Vec<Bound<'_, PyAny>>,
        regions: Option<Vec<Option<RegionPair>>>,
    ) -> PyResult<u64> {
        let entries = &self.snapshot.manifest().body.entries;
        let mut wants = Vec::with_capacity(indices.len());
        let mut memories = Vec::with_capacity(indices.len());
        let mut names = Vec::with_capacity(indices.len());
        for (target, (index, value)) in indices.into_iter().zip(&values).enumerate() {
            let entry = entries
                .get(index)
                .ok_or_else(|| raise(py, &Error::invalid("entry", "index past the manifest's entries")))?;
            let region = match regions.as_ref().and_then(|regions| regions.get(target)) {
                Some(Some((offsets, lengths))) => {
                    Region { offsets: offsets.clone(), lengths: lengths.clone() }
                }
                _ => Region::whole(&entry.shape),
            };
            let expected = raw_length_bytes(&region.lengths, entry.dtype).unwrap_or(0);
            memories.push(Memory::of(value, &entry.name, expected, true)?);
            names.push(entry.name.as_str());
            wants.push(Want { entry: index, region, target });
        }
        let mut targets = Targets::new(memories, &names).map_err(|error| raise(py, &error))?;
        let mut slices = targets.slices();
        interruptible(py, |cancelled| self.snapshot.read(&wants, &mut slices, cancelled))
    }

    /// Verifies entries without keeping their bytes; returns verified raw bytes.
    fn check(&self, py: Python<'_>, indices: Vec<usize>) -> PyResult<u64> {
        interruptible(py, |cancelled| self.snapshot.check(&indices, cancelled))
    }

    /// An entry inside a mapped pack: (pack, offset in bytes from its start, length in bytes), or `None`
    /// where it has to be read.
    fn mapped(&self, py: Python<'_>, index: usize) -> PyResult<Option<(Py<MappedPack>, u64, u64)>> {
        let Some((path, offset_bytes, length_bytes)) = self.snapshot.mappable(index) else { return Ok(None) };
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pack) = mapped.get(&path) {
            return Ok(Some((pack.clone_ref(py), offset_bytes, length_bytes)));
        }
        let opened = open_file(&path).and_then(|file| MappedPack::open(&path, &file));
        let pack = Py::new(py, opened.map_err(|error| raise(py, &error))?)?;
        mapped.insert(path, pack.clone_ref(py));
        Ok(Some((pack, offset_bytes, length_bytes)))
    }
}
