//! The engine as a Python class: `Engine`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::value::RawValue;

use crate::compact::MergePolicy;
use crate::crypt::MasterKey;
use crate::error::{Error, Result};
use crate::format::receipt::Receipt;
use crate::format::ticket::Ticket;
use crate::merger::Merger;
use crate::plan::Compression;
use crate::repository::{Access, Options, Repository, SaveRequest};
use crate::retain::Rule;
use crate::saver::Job;
use crate::store::local::LocalOptions;
use crate::syncer::Syncer;
use crate::write::EntryInput;

use super::convert;
use super::error::raise;
use super::job::{Running, SaveJob};
use super::later::{bytes_of, split_later};
use super::reader::SnapshotReader;
use super::remote::{Places, Remote};
use super::session::Part;
use super::tensors::{Described, SaveTensors};
use super::wait::interruptible;

/// Numbers of damaged snapshots or receipts, and why.
type Damaged = Vec<(u64, String)>;

/// Number, seq, time and content of a receipt.
type ReceiptRow = (u64, Option<u64>, u64, String);

/// An open repository.
#[pyclass(frozen, module = "varvite._native")]
pub(crate) struct Engine {
    pub(super) repository: Repository,
    pub(super) merger: Arc<Merger>,
    /// Where there is a bucket and this is the engine that writes.
    pub(super) syncer: Option<Arc<Syncer>>,
    /// A call may have to wait for a server.
    asks_a_bucket: bool,
}

#[pymethods]
#[expect(clippy::needless_pass_by_value, reason = "arguments are extracted from Python as owned values")]
impl Engine {
    #[new]
    #[pyo3(signature = (path, *, access, chunk_bytes, threads, sync, rules, merge, rank, world_size, compression, delta, remote=None, credentials=None, key=None, encrypt=false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one Python call")]
    fn new(
        py: Python<'_>,
        path: Option<PathBuf>,
        access: &str,
        chunk_bytes: u64,
        threads: usize,
        sync: bool,
        rules: &str,
        merge: &str,
        rank: u32,
        world_size: u32,
        compression: &str,
        delta: bool,
        remote: Option<&str>,
        credentials: Option<Py<PyAny>>,
        key: Option<Vec<u8>>,
        encrypt: bool,
    ) -> PyResult<Self> {
        let open = |_: &AtomicBool| -> Result<Self> {
            let access = match access {
                "write" => Access::Write,
                "rank" => Access::Rank,
                "tag" => Access::Tag,
                "read" => Access::Read,
                other => {
                    return Err(Error::invalid(
                        format!("access `{other}`"),
                        "must be `write`, `rank`, `tag` or `read`",
                    ));
                }
            };
            let compression = match compression {
                "none" => Compression::None,
                "fast" => Compression::Fast,
                "max" => Compression::Max,
                "auto" => Compression::Auto,
                other => {
                    return Err(Error::invalid(
                        format!("compression `{other}`"),
                        "must be `none`, `fast`, `max` or `auto`",
                    ));
                }
            };
            let rules: Vec<Rule> =
                serde_json::from_str(rules).map_err(|error| Error::invalid("keep", error.to_string()))?;
            let merge: Option<MergePolicy> =
                serde_json::from_str(merge).map_err(|error| Error::invalid("merge", error.to_string()))?;
            let remote = remote.map(|text| Remote::read(text, credentials)).transpose()?;
            let asks_a_bucket = remote.is_some();
            let local = LocalOptions { sync, read_only: access == Access::Read };
            let key = key.map(|bytes| MasterKey::new(&bytes)).transpose()?;
            let places = Places::open(path.as_deref(), local, remote, access, key.clone())?;
            let options = Options {
                access,
                chunk_bytes,
                threads,
                rules,
                merge,
                rank,
                world_size,
                compression,
                delta,
                key,
                encrypt,
            };
            let repository = Repository::open(Arc::clone(&places.store), options)?;
            let writes = access == Access::Write;
            let syncer = places.tiers.filter(|_| writes).map(|tiers| Syncer::new(repository.clone(), tiers));
            Ok(Self { merger: Merger::new(repository.clone()), repository, syncer, asks_a_bucket })
        };
        // Where a lease has to run out first, somebody may not want to wait.
        interruptible(py, open)
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

    /// Copies all tensors but those that are marked to be copied later, then copies these, writes and
    /// commits in the background.
    #[pyo3(signature = (step, tensors, *, metrics, metadata, structure, rank_structure))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one Python call")]
    fn save(
        &self,
        py: Python<'_>,
        step: u64,
        tensors: &Bound<'_, SaveTensors>,
        metrics: BTreeMap<String, f64>,
        metadata: String,
        structure: String,
        rank_structure: Option<String>,
    ) -> PyResult<SaveJob> {
        let Described { entries, memories, sources, .. } = tensors.get().take(py)?;
        let texts = Texts { metadata, structure, rank_structure };
        let request = texts.request(step, metrics, entries).map_err(|error| raise(py, &error))?;
        let (now, later) = split_later(py, memories, tensors);
        let started = py.detach(|| {
            let session = self.repository.begin_save_later(request, &bytes_of(&now), later)?;
            Job::start(session, Arc::clone(&self.merger), self.syncer.clone())
        });
        drop(sources);
        started.map(|job| SaveJob { job: Running::Save(job) }).map_err(|error| raise(py, &error))
    }

    /// Writes and commits straight from the tensors while the caller waits; returns the report.
    #[pyo3(signature = (step, tensors, *, metrics, metadata, structure, rank_structure))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of one Python call")]
    fn save_sync<'py>(
        &self,
        py: Python<'py>,
        step: u64,
        tensors: &Bound<'_, SaveTensors>,
        metrics: BTreeMap<String, f64>,
        metadata: String,
        structure: String,
        rank_structure: Option<String>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let Described { entries, memories, sources, .. } = tensors.get().take(py)?;
        let texts = Texts { metadata, structure, rank_structure };
        let request = texts.request(step, metrics, entries).map_err(|error| raise(py, &error))?;
        let repository = &self.repository;
        let report = interruptible(py, |cancelled| {
            let bytes: Vec<&[u8]> = memories.iter().map(|source| source.memory.bytes()).collect();
            repository.save_sync(request, &bytes, cancelled)
        });
        drop(sources);
        let report = report?;
        self.notice_commit();
        convert::report(py, &report)
    }

    /// Begins a snapshot of several ranks; returns its ticket, to be handed to each rank.
    #[pyo3(signature = (step, *, world_size, metrics, metadata))]
    fn begin_session(
        &self,
        py: Python<'_>,
        step: u64,
        world_size: u32,
        metrics: BTreeMap<String, f64>,
        metadata: String,
    ) -> PyResult<String> {
        let begin = || {
            let metadata = json("metadata", metadata)?;
            self.repository.begin_session(step, world_size, metrics, metadata)?.encode()
        };
        py.detach(begin).map_err(|error| raise(py, &error))
    }

    /// Copies the tensors of a rank but those marked to be copied later, then writes its pack in the background.
    #[pyo3(signature = (ticket, rank, tensors, *, structure, rank_structure))]
    fn save_part(
        &self,
        py: Python<'_>,
        ticket: &str,
        rank: u32,
        tensors: &Bound<'_, SaveTensors>,
        structure: String,
        rank_structure: Option<String>,
    ) -> PyResult<SaveJob> {
        let mut described = tensors.get().take(py)?;
        let part = Part { ticket, rank, structure, rank_structure };
        let request = part.request(py, &self.repository, tensors.get(), &mut described)?;
        let Described { memories, sources, .. } = described;
        let (now, later) = split_later(py, memories, tensors);
        let started =
            py.detach(|| Job::start_part(self.repository.begin_part(request, &bytes_of(&now), later)?));
        drop(sources);
        started.map(|job| SaveJob { job: Running::Part(job) }).map_err(|error| raise(py, &error))
    }

    /// Writes the pack of a rank straight from the tensors while the caller waits; returns the report.
    #[pyo3(signature = (ticket, rank, tensors, *, structure, rank_structure))]
    fn write_part<'py>(
        &self,
        py: Python<'py>,
        ticket: &str,
        rank: u32,
        tensors: &Bound<'_, SaveTensors>,
        structure: String,
        rank_structure: Option<String>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let mut described = tensors.get().take(py)?;
        let part = Part { ticket, rank, structure, rank_structure };
        let request = part.request(py, &self.repository, tensors.get(), &mut described)?;
        let Described { memories, sources, .. } = described;
        let repository = &self.repository;
        let report = interruptible(py, |cancelled| {
            let bytes: Vec<&[u8]> = memories.iter().map(|source| source.memory.bytes()).collect();
            repository.write_part(request, &bytes, cancelled)
        });
        drop(sources);
        convert::part(py, &report?)
    }

    /// Joins the parts of all ranks and publishes the snapshot; without names of packs it looks for them.
    #[pyo3(signature = (ticket, packs=None))]
    fn commit_session<'py>(
        &self,
        py: Python<'py>,
        ticket: &str,
        packs: Option<Vec<String>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let commit = || self.repository.commit_session(&Ticket::decode(ticket)?, packs.as_deref());
        let report = py.detach(commit).map_err(|error| raise(py, &error))?;
        self.notice_commit();
        convert::commit(py, &report)
    }

    /// Ends a session without a snapshot: nothing of it is ever published.
    fn abort_session(&self, py: Python<'_>, ticket: &str) -> PyResult<()> {
        let abort = || self.repository.abort_session(&Ticket::decode(ticket)?);
        py.detach(abort).map_err(|error| raise(py, &error))
    }

    /// Tells a rank what became of its part.
    fn settle_part(&self, py: Python<'_>, ticket: &str, rank: u32, committed: bool) -> PyResult<()> {
        let settle =
            || Ticket::decode(ticket).map(|ticket| self.repository.settle_part(&ticket, rank, committed));
        py.detach(settle).map_err(|error| raise(py, &error))
    }

    /// Commit numbers, newest first.
    fn candidates(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.ask(py, || self.repository.candidates())
    }

    /// Headers of all readable snapshots by seq, and (seq, why) of damaged ones.
    fn snapshots<'py>(&self, py: Python<'py>) -> PyResult<(Vec<Bound<'py, PyDict>>, Damaged)> {
        let listed = self.ask(py, || self.repository.list())?;
        let headers =
            listed.headers.iter().map(|header| convert::header(py, header)).collect::<PyResult<_>>()?;
        Ok((headers, listed.damaged))
    }

    /// Header of one snapshot.
    fn header<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Bound<'py, PyDict>> {
        let header = self.ask(py, || self.repository.header(seq))?;
        convert::header(py, &header)
    }

    /// Commit number that a reference means.
    fn resolve(&self, py: Python<'_>, reference: &str) -> PyResult<u64> {
        self.ask(py, || self.repository.resolve(reference))
    }

    /// Opens a snapshot for reading.
    fn open(&self, py: Python<'_>, seq: u64) -> PyResult<SnapshotReader> {
        let snapshot = self.ask(py, || self.repository.snapshot(seq))?;
        Ok(SnapshotReader::new(snapshot))
    }

    /// Notes that this run has saved a snapshot by another engine.
    fn follow(&self, py: Python<'_>, reader: &SnapshotReader) {
        py.detach(|| self.repository.follow(&reader.snapshot));
    }

    /// Notes that this run continues from a snapshot.
    fn adopt(&self, py: Python<'_>, reader: &SnapshotReader, verified: bool) {
        py.detach(|| self.repository.adopt(&reader.snapshot, verified));
    }

    /// What retention keeps and removes, with reasons; does it unless `dry_run`.
    fn prune<'py>(&self, py: Python<'py>, dry_run: bool) -> PyResult<Bound<'py, PyDict>> {
        let (plan, freed_bytes) = self.ask(py, || self.repository.prune(dry_run))?;
        convert::plan(py, &plan, freed_bytes)
    }

    /// Deletes a snapshot; returns the bytes freed.
    fn delete(&self, py: Python<'_>, seq: u64) -> PyResult<u64> {
        self.ask(py, || self.repository.delete(seq))
    }

    /// Names a snapshot.
    fn pin(&self, py: Python<'_>, seq: u64, name: &str) -> PyResult<()> {
        self.ask(py, || self.repository.pin(seq, name))
    }

    /// Removes a name.
    fn unpin(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.ask(py, || self.repository.unpin(name))
    }

    /// Names and the commit numbers they stand for.
    fn tags(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        let tags = self.ask(py, || self.repository.tags())?;
        Ok(tags.into_iter().map(|(name, tag)| (name, tag.seq)).collect())
    }

    /// Writes a receipt under the next number; returns (number, milliseconds since 1970 UTC).
    fn write_receipt(&self, py: Python<'_>, seq: Option<u64>, content: &str) -> PyResult<(u64, u64)> {
        let written = py.detach(|| self.repository.write_receipt(seq, content));
        let receipt = written.map_err(|error| raise(py, &error))?;
        Ok((receipt.number, receipt.created_at_unix_ms))
    }

    /// Puts other content in a receipt, in one step.
    fn replace_receipt(&self, py: Python<'_>, number: u64, content: &str) -> PyResult<()> {
        let replaced = py.detach(|| self.repository.replace_receipt(number, content));
        replaced.map(|_receipt| ()).map_err(|error| raise(py, &error))
    }

    /// (number, seq, milliseconds since 1970 UTC, content) of the newest receipts or of all, ascending, and
    /// (number, why) of those that can't be read.
    #[pyo3(signature = (newest=None))]
    fn receipts(&self, py: Python<'_>, newest: Option<usize>) -> PyResult<(Vec<ReceiptRow>, Damaged)> {
        let receipts = self.ask(py, || self.repository.receipts(newest))?;
        let row = |receipt: Receipt| {
            (receipt.number, receipt.seq, receipt.created_at_unix_ms, receipt.content.get().to_owned())
        };
        let damaged = receipts.damaged.into_iter().map(|(number, error)| (number, error.chain())).collect();
        Ok((receipts.read.into_iter().map(row).collect(), damaged))
    }

    /// Waits for a merge that runs, then merges everything of which something is gained.
    fn merge_now<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = interruptible(py, |cancelled| self.merger.merge_now(cancelled))?;
        convert::merge(py, &report)
    }

    /// Waits until no merge runs in the background.
    fn wait_merge(&self, py: Python<'_>) -> PyResult<()> {
        interruptible(py, |cancelled| self.merger.wait(cancelled))
    }

    /// Ends a merge that runs in the background, and starts no more.
    fn stop_merge(&self, py: Python<'_>) -> PyResult<()> {
        interruptible(py, |cancelled| self.merger.stop(cancelled))
    }

    /// Raises the oldest failure of a merge in the background that was not raised yet.
    fn raise_merge_failure(&self, py: Python<'_>) -> PyResult<()> {
        self.merger.take_failure().map_or(Ok(()), |error| Err(raise(py, &error)))
    }

    /// Damage that merges in the background met: (object, offset in bytes, what, steps) of each, once.
    fn take_merge_findings(&self) -> Vec<(String, u64, String, Vec<u64>)> {
        convert::findings(&self.merger.take_findings())
    }

    /// Waits for a push that runs, then pushes everything that the bucket lacks.
    fn sync_now<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = interruptible(py, |cancelled| self.required_syncer()?.sync_now(cancelled))?;
        convert::synced(py, &report)
    }

    /// Whether the bucket has not been told of something that was put or removed here.
    fn has_unsent(&self) -> bool {
        self.syncer.as_ref().is_some_and(|syncer| syncer.has_changed())
    }

    /// Waits for a push that runs, then pushes; what the one that runs fails of is not tried again.
    fn sync_last<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = interruptible(py, |cancelled| self.required_syncer()?.sync_last(cancelled))?;
        convert::synced(py, &report)
    }

    /// What is known of the bucket; `None` where there is none, or this engine doesn't write.
    fn sync_state<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let state = py.detach(|| self.syncer.as_ref().map(|syncer| syncer.state()));
        state.map(|state| convert::sync_state(py, &state)).transpose()
    }

    /// Text of what a push in the background failed of, once for each cause.
    fn take_sync_failure(&self, py: Python<'_>) -> Option<String> {
        py.detach(|| self.syncer.as_ref()?.take_failure().map(|failure| failure.chain()))
    }

    /// Raises what the last push failed of, if it failed.
    fn raise_sync_failure(&self, py: Python<'_>) -> PyResult<()> {
        let failure = py.detach(|| self.syncer.as_ref().and_then(|syncer| syncer.failure()));
        failure.map_or(Ok(()), |error| Err(raise(py, &error)))
    }

    /// Ends the push that runs, starts no more, and lets go of the place in the bucket.
    fn stop_sync(&self, py: Python<'_>) -> PyResult<()> {
        let Some(syncer) = &self.syncer else { return Ok(()) };
        interruptible(py, |cancelled| syncer.stop(cancelled))
    }

    /// Checks one snapshot, or all.
    fn verify<'py>(&self, py: Python<'py>, seq: Option<u64>, sample: f64) -> PyResult<Bound<'py, PyDict>> {
        let report = interruptible(py, |cancelled| self.repository.verify(seq, sample, cancelled))?;
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

impl Engine {
    /// Tells those who work in the background that there is a snapshot more.
    fn notice_commit(&self) {
        self.merger.notice(true);
        if let Some(syncer) = &self.syncer {
            syncer.notice(true);
        }
    }

    /// Runs what a folder answers at once, and a bucket after a while that Ctrl-C ends.
    fn ask<T: Send>(&self, py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
        if self.asks_a_bucket {
            return interruptible(py, |_| work());
        }
        py.detach(work).map_err(|error| raise(py, &error))
    }

    fn required_syncer(&self) -> Result<&Arc<Syncer>> {
        self.syncer.as_ref().ok_or_else(|| Error::invalid("push", "this engine has no bucket, or only reads"))
    }
}

/// The JSON texts of a save.
struct Texts {
    metadata: String,
    structure: String,
    rank_structure: Option<String>,
}

impl Texts {
    fn request(
        self,
        step: u64,
        metrics: BTreeMap<String, f64>,
        entries: Vec<EntryInput>,
    ) -> Result<SaveRequest> {
        Ok(SaveRequest {
            step,
            metrics,
            metadata: json("metadata", self.metadata)?,
            entries,
            structure: json("structure", self.structure)?,
            rank_structure: self.rank_structure.map(|text| json("rank structure", text)).transpose()?,
        })
    }
}

/// Reads the JSON text of an argument.
pub(super) fn json(what: &str, text: String) -> Result<Box<RawValue>> {
    RawValue::from_string(text).map_err(|error| Error::invalid(what, error.to_string()))
}
