//! The engine as Python classes: `Engine`, `SaveJob`, `SnapshotReader`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::value::RawValue;

use crate::compact::MergePolicy;
use crate::error::{Error, Result};
use crate::merger::Merger;
use crate::plan::Want;
use crate::repository::{Access, Options, Repository, SaveRequest, Snapshot};
use crate::retain::Rule;
use crate::saver::{Job, Outcome};
use crate::store::local::{LocalOptions, LocalStore, open_file};
use crate::tensor::{Dtype, Region, raw_length_bytes};
use crate::write::EntryInput;

use super::buffer::{MappedPack, Memory, Targets};
use super::convert;
use super::error::raise;
use super::wait::{POLL, interruptible};

/// Commit numbers of damaged snapshots, and why.
type Damaged = Vec<(u64, String)>;

/// An open repository.
#[pyclass(frozen, module = "varvite._native")]
pub(crate) struct Engine {
    repository: Repository,
    merger: Arc<Merger>,
}

#[pymethods]
#[expect(clippy::needless_pass_by_value, reason = "arguments are extracted from Python as owned values")]
impl Engine {
    #[new]
    #[pyo3(signature = (path, *, access, chunk_bytes, threads, sync, rules, merge, rank, world_size))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one Python call")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        access: &str,
        chunk_bytes: u64,
        threads: usize,
        sync: bool,
        rules: &str,
        merge: &str,
        rank: u32,
        world_size: u32,
    ) -> PyResult<Self> {
        let open = || -> Result<Repository> {
            let access = match access {
                "write" => Access::Write,
                "tag" => Access::Tag,
                "read" => Access::Read,
                other => {
                    return Err(Error::invalid(
                        format!("access `{other}`"),
                        "must be `write`, `tag` or `read`",
                    ));
                }
            };
            let rules: Vec<Rule> =
                serde_json::from_str(rules).map_err(|error| Error::invalid("keep", error.to_string()))?;
            let merge: Option<MergePolicy> =
                serde_json::from_str(merge).map_err(|error| Error::invalid("merge", error.to_string()))?;
            let store = LocalStore::open(&path, LocalOptions { sync, read_only: access == Access::Read })?;
            Repository::open(
                Arc::new(store),
                Options { access, chunk_bytes, threads, rules, merge, rank, world_size },
            )
        };
        let repository = py.detach(open).map_err(|error| raise(py, &error))?;
        Ok(Self { merger: Merger::new(repository.clone()), repository })
    }

    /// The root, for messages.
    #[getter]
    fn root(&self) -> String {
        self.repository.root()
    }

    /// Identity of the repository: 32 hex digits.
    #[getter]
    fn repository_id(&self) -> &str {
        self.repository.repository_id()
    }

    /// What recovery did at open: (staged files removed, snapshots published, orphan packs removed).
    fn recovered(&self) -> (u64, Vec<u64>, Vec<String>) {
        let recovered = self.repository.recovered();
        (recovered.swept_count, recovered.published.clone(), recovered.orphans.clone())
    }

    /// Bytes free where the objects lie.
    fn free_bytes(&self) -> Option<u64> {
        self.repository.store().free_bytes()
    }

    /// Copies all values, then writes and commits in the background.
    #[pyo3(signature = (step, names, ranks, dtypes, shapes, values, ties, *, metrics, metadata, structure, rank_structure))]
    #[expect(clippy::too_many_arguments, reason = "parallel lists: one crossing for a whole state")]
    fn save(
        &self,
        py: Python<'_>,
        step: u64,
        names: Vec<String>,
        ranks: Vec<Option<u32>>,
        dtypes: Vec<String>,
        shapes: Vec<Vec<u64>>,
        values: Vec<Option<Bound<'_, PyAny>>>,
        ties: Vec<Option<String>>,
        metrics: BTreeMap<String, f64>,
        metadata: String,
        structure: String,
        rank_structure: Option<String>,
    ) -> PyResult<SaveJob> {
        let tensors = Tensors { names, ranks, dtypes, shapes, ties };
        let (request, memories) =
            tensors.request(py, &values, step, metrics, metadata, structure, rank_structure)?;
        let started = py.detach(|| {
            let sources: Vec<&[u8]> = memories.iter().map(Memory::bytes).collect();
            Job::start(self.repository.begin_save(request, &sources)?, Arc::clone(&self.merger))
        });
        started.map(|job| SaveJob { job }).map_err(|error| raise(py, &error))
    }

    /// Writes and commits straight from the values while the caller waits; returns the report.
    #[pyo3(signature = (step, names, ranks, dtypes, shapes, values, ties, *, metrics, metadata, structure, rank_structure))]
    #[expect(clippy::too_many_arguments, reason = "parallel lists: one crossing for a whole state")]
    fn save_sync<'py>(
        &self,
        py: Python<'py>,
        step: u64,
        names: Vec<String>,
        ranks: Vec<Option<u32>>,
        dtypes: Vec<String>,
        shapes: Vec<Vec<u64>>,
        values: Vec<Option<Bound<'_, PyAny>>>,
        ties: Vec<Option<String>>,
        metrics: BTreeMap<String, f64>,
        metadata: String,
        structure: String,
        rank_structure: Option<String>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let tensors = Tensors { names, ranks, dtypes, shapes, ties };
        let (request, memories) =
            tensors.request(py, &values, step, metrics, metadata, structure, rank_structure)?;
        let cancelled = AtomicBool::new(false);
        let repository = &self.repository;
        let report = interruptible(py, &cancelled, || {
            let sources: Vec<&[u8]> = memories.iter().map(Memory::bytes).collect();
            repository.save_sync(request, &sources, &cancelled)
        })?;
        self.merger.notice(true);
        convert::report(py, &report)
    }

    /// Commit numbers, newest first.
    fn candidates(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        py.detach(|| self.repository.candidates()).map_err(|error| raise(py, &error))
    }

    /// Headers of all readable snapshots by seq, and (seq, why) of damaged ones.
    fn snapshots<'py>(&self, py: Python<'py>) -> PyResult<(Vec<Bound<'py, PyDict>>, Damaged)> {
        let listed = py.detach(|| self.repository.list()).map_err(|error| raise(py, &error))?;
        let headers =
            listed.headers.iter().map(|header| convert::header(py, header)).collect::<PyResult<_>>()?;
        Ok((headers, listed.damaged))
    }

    /// Header of one snapshot.
    fn header<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Bound<'py, PyDict>> {
        let header = py.detach(|| self.repository.header(seq)).map_err(|error| raise(py, &error))?;
        convert::header(py, &header)
    }

    /// Commit number that a reference means.
    fn resolve(&self, py: Python<'_>, reference: &str) -> PyResult<u64> {
        py.detach(|| self.repository.resolve(reference)).map_err(|error| raise(py, &error))
    }

    /// Opens a snapshot for reading.
    fn open(&self, py: Python<'_>, seq: u64) -> PyResult<SnapshotReader> {
        let snapshot = py.detach(|| self.repository.snapshot(seq)).map_err(|error| raise(py, &error))?;
        Ok(SnapshotReader { snapshot, mapped: Mutex::new(BTreeMap::new()) })
    }

    /// Notes that this run continues from a snapshot.
    fn adopt(&self, py: Python<'_>, reader: &SnapshotReader, verified: bool) {
        py.detach(|| self.repository.adopt(&reader.snapshot, verified));
    }

    /// What retention keeps and removes, with reasons; does it unless `dry_run`.
    fn prune<'py>(&self, py: Python<'py>, dry_run: bool) -> PyResult<Bound<'py, PyDict>> {
        let (plan, freed_bytes) =
            py.detach(|| self.repository.prune(dry_run)).map_err(|error| raise(py, &error))?;
        convert::plan(py, &plan, freed_bytes)
    }

    /// Deletes a snapshot; returns the bytes freed.
    fn delete(&self, py: Python<'_>, seq: u64) -> PyResult<u64> {
        py.detach(|| self.repository.delete(seq)).map_err(|error| raise(py, &error))
    }

    /// Names a snapshot.
    fn pin(&self, py: Python<'_>, seq: u64, name: &str) -> PyResult<()> {
        py.detach(|| self.repository.pin(seq, name)).map_err(|error| raise(py, &error))
    }

    /// Removes a name.
    fn unpin(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        py.detach(|| self.repository.unpin(name)).map_err(|error| raise(py, &error))
    }

    /// Names and the commit numbers they stand for.
    fn tags(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        let tags = py.detach(|| self.repository.tags()).map_err(|error| raise(py, &error))?;
        Ok(tags.into_iter().map(|(name, tag)| (name, tag.seq)).collect())
    }

    /// Waits for a merge that runs, then merges everything of which something is gained.
    fn merge_now<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let cancelled = AtomicBool::new(false);
        let report = interruptible(py, &cancelled, || self.merger.merge_now(&cancelled))?;
        convert::merge(py, &report)
    }

    /// Waits until no merge runs in the background.
    fn wait_merge(&self, py: Python<'_>) -> PyResult<()> {
        let cancelled = AtomicBool::new(false);
        interruptible(py, &cancelled, || self.merger.wait(&cancelled))
    }

    /// Ends a merge that runs in the background, and starts no more.
    fn stop_merge(&self, py: Python<'_>) -> PyResult<()> {
        let cancelled = AtomicBool::new(false);
        interruptible(py, &cancelled, || self.merger.stop(&cancelled))
    }

    /// Raises the oldest failure of a merge in the background that was not raised yet.
    fn raise_merge_failure(&self, py: Python<'_>) -> PyResult<()> {
        self.merger.take_failure().map_or(Ok(()), |error| Err(raise(py, &error)))
    }

    /// Damage that merges in the background met: (object, offset in bytes, what, steps) of each, once.
    fn take_merge_findings(&self) -> Vec<(String, u64, String, Vec<u64>)> {
        convert::findings(&self.merger.take_findings())
    }

    /// Checks one snapshot, or all.
    fn verify<'py>(&self, py: Python<'py>, seq: Option<u64>, sample: f64) -> PyResult<Bound<'py, PyDict>> {
        let cancelled = AtomicBool::new(false);
        let report = interruptible(py, &cancelled, || self.repository.verify(seq, sample, &cancelled))?;
        convert::verification(py, &report)
    }

    /// Releases the writer lock.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.repository.close());
    }

    /// In a forked child: lets go of the lock's file without releasing the parent's lock.
    fn abandon(&self) {
        self.repository.abandon();
    }
}

/// What the parallel lists of a save say of each tensor.
struct Tensors {
    names: Vec<String>,
    ranks: Vec<Option<u32>>,
    dtypes: Vec<String>,
    shapes: Vec<Vec<u64>>,
    ties: Vec<Option<String>>,
}

impl Tensors {
    #[expect(clippy::too_many_arguments, reason = "the arguments of a save")]
    fn request(
        self,
        py: Python<'_>,
        values: &[Option<Bound<'_, PyAny>>],
        step: u64,
        metrics: BTreeMap<String, f64>,
        metadata: String,
        structure: String,
        rank_structure: Option<String>,
    ) -> PyResult<(SaveRequest, Vec<Memory>)> {
        let (entries, memories) = self.entries(py, values)?;
        let json = |what: &str, text: String| {
            RawValue::from_string(text).map_err(|error| raise(py, &Error::invalid(what, error.to_string())))
        };
        let request = SaveRequest {
            step,
            metrics,
            metadata: json("metadata", metadata)?,
            entries,
            structure: json("structure", structure)?,
            rank_structure: rank_structure.map(|text| json("rank structure", text)).transpose()?,
        };
        Ok((request, memories))
    }

    fn entries(
        self,
        py: Python<'_>,
        values: &[Option<Bound<'_, PyAny>>],
    ) -> PyResult<(Vec<EntryInput>, Vec<Memory>)> {
        let count = self.names.len();
        let lengths = [self.ranks.len(), self.dtypes.len(), self.shapes.len(), values.len(), self.ties.len()];
        if lengths.iter().any(|&length| length != count) {
            return Err(raise(
                py,
                &Error::Internal { what: "the lists of a save differ in length".to_owned() },
            ));
        }
        let mut entries = Vec::with_capacity(count);
        let mut memories = Vec::with_capacity(count);
        let described = self
            .names
            .into_iter()
            .zip(self.ranks)
            .zip(self.dtypes)
            .zip(self.shapes)
            .zip(self.ties)
            .zip(values);
        for (((((name, rank), dtype), shape), tied_to), value) in described {
            let dtype = Dtype::parse(&dtype).map_err(|error| raise(py, &error))?;
            let expected = raw_length_bytes(&shape, dtype).ok_or_else(|| {
                raise(py, &Error::invalid(format!("tensor `{name}`"), "is larger than 2^63 bytes"))
            })?;
            let source = match value {
                Some(value) => {
                    memories.push(Memory::of(value, &name, expected, false)?);
                    Some(memories.len() - 1)
                }
                None => None,
            };
            entries.push(EntryInput {
                name,
                rank,
                dtype,
                region: Region::whole(&shape),
                shape,
                tied_to,
                source,
            });
        }
        Ok((entries, memories))
    }
}

/// A save that runs in the background.
#[pyclass(frozen, module = "varvite._native")]
pub(crate) struct SaveJob {
    job: Arc<Job>,
}

#[pymethods]
impl SaveJob {
    /// True when the save has ended, either way.
    #[getter]
    fn done(&self) -> bool {
        self.job.outcome().is_some()
    }

    /// True when it has ended without a snapshot.
    #[getter]
    fn failed(&self) -> bool {
        matches!(self.job.outcome(), Some(Err(_)))
    }

    /// Waits for the end; returns the report or raises the failure. A timeout in seconds that passes is
    /// a `TimeoutError`, and the save goes on.
    #[pyo3(signature = (timeout=None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let deadline = timeout
            .and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok())
            .and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let left = deadline
                .map_or(POLL, |deadline| deadline.saturating_duration_since(Instant::now()).min(POLL));
            if let Some(outcome) = py.detach(|| self.job.wait(left)) {
                return outcome_to_python(py, &outcome);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(PyTimeoutError::new_err("the save is still running"));
            }
            py.check_signals()?;
        }
    }

    /// Asks the save to end without a snapshot.
    fn cancel(&self) {
        self.job.cancel();
    }
}

fn outcome_to_python<'py>(py: Python<'py>, outcome: &Outcome) -> PyResult<Bound<'py, PyDict>> {
    match outcome {
        Ok(report) => convert::report(py, report),
        Err(error) => Err(raise(py, error)),
    }
}

/// A snapshot that is open for reading; retention keeps it while this object lives.
#[pyclass(frozen, module = "varvite._native")]
pub(crate) struct SnapshotReader {
    snapshot: Snapshot,
    mapped: Mutex<BTreeMap<PathBuf, Py<MappedPack>>>,
}

/// (name, rank, dtype, stored dtype, shape, tied to, non-finite elements, raw bytes, stored bytes)
type EntryRow =
    (String, Option<u32>, &'static str, &'static str, Vec<u64>, Option<String>, Option<u64>, u64, u64);

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
                    raw_length_bytes(&entry.shape, entry.stored_dtype).unwrap_or(0),
                    stored,
                )
            })
            .collect()
    }

    /// Digests of an entry's chunks in order, as 32 hex digits each, with their raw lengths in bytes.
    fn chunk_digests(&self, index: usize) -> Vec<(String, u64)> {
        let body = &self.snapshot.manifest().body;
        let Some(entry) = body.entries.get(index) else { return Vec::new() };
        entry
            .shards
            .iter()
            .flat_map(|shard| {
                let length = raw_length_bytes(&shard.lengths, entry.stored_dtype).unwrap_or(0);
                crate::plan::chunk_ranges(length, body.chunk_bytes).zip(&shard.chunks)
            })
            .map(|(range, chunk)| (chunk.digest.to_string(), range.end - range.start))
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

    /// Fills each value with the entry of the same position in `indices`; returns verified raw bytes.
    fn read(&self, py: Python<'_>, indices: Vec<usize>, values: Vec<Bound<'_, PyAny>>) -> PyResult<u64> {
        let entries = &self.snapshot.manifest().body.entries;
        let mut wants = Vec::with_capacity(indices.len());
        let mut memories = Vec::with_capacity(indices.len());
        let mut names = Vec::with_capacity(indices.len());
        for (target, (index, value)) in indices.into_iter().zip(&values).enumerate() {
            let entry = entries
                .get(index)
                .ok_or_else(|| raise(py, &Error::invalid("entry", "index past the manifest's entries")))?;
            let expected = raw_length_bytes(&entry.shape, entry.stored_dtype).unwrap_or(0);
            memories.push(Memory::of(value, &entry.name, expected, true)?);
            names.push(entry.name.as_str());
            wants.push(Want { entry: index, region: Region::whole(&entry.shape), target });
        }
        let mut targets = Targets::new(memories, &names).map_err(|error| raise(py, &error))?;
        let mut slices = targets.slices();
        let cancelled = AtomicBool::new(false);
        interruptible(py, &cancelled, || self.snapshot.read(&wants, &mut slices, &cancelled))
    }

    /// Verifies entries without keeping their bytes; returns verified raw bytes.
    fn check(&self, py: Python<'_>, indices: Vec<usize>) -> PyResult<u64> {
        let cancelled = AtomicBool::new(false);
        interruptible(py, &cancelled, || self.snapshot.check(&indices, &cancelled))
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
