//! Engine structs as plain Python dicts; `manager.py` makes the public dataclasses of them.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::catalog;
use crate::format::encrypted::Facts;
use crate::format::model::Header;
use crate::repository::{Clear, CommitReport, MergeReport, PackFigures, PartReport, SaveReport};
use crate::retain::Plan;
use crate::sync::PullReport;
use crate::syncer::{SyncReport, SyncState};
use crate::verify::{Finding, Report};

/// Facts of a snapshot.
pub(crate) fn header<'py>(py: Python<'py>, header: &Header) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("seq", header.seq)?;
    dict.set_item("step", header.step)?;
    dict.set_item("parent", header.parent)?;
    dict.set_item("created_at_unix_ms", header.created_at_unix_ms)?;
    dict.set_item("world_size", header.world_size)?;
    dict.set_item("metrics", &header.metrics)?;
    dict.set_item("metadata", header.metadata.get())?;
    dict.set_item("kind", if header.self_contained { "base" } else { "delta" })?;
    dict.set_item("raw_bytes", header.raw_bytes)?;
    dict.set_item("stored_bytes", header.stored_bytes)?;
    dict.set_item("healthy", catalog::is_healthy(header))?;
    dict.set_item("nonfinite", &header.nonfinite)?;
    dict.set_item("digest", &header.state_digest)?;
    Ok(dict)
}

/// Facts of a finished save.
pub(crate) fn report<'py>(py: Python<'py>, report: &SaveReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("header", header(py, &report.header)?)?;
    add_figures(&dict, &report.figures)?;
    dict.set_item("commit_seconds", report.commit_seconds)?;
    dict.set_item("retention_error", report.retention.as_ref().err().map(|error| error.chain()))?;
    Ok(dict)
}

fn add_figures(dict: &Bound<'_, PyDict>, figures: &PackFigures) -> PyResult<()> {
    dict.set_item("chunk_count", figures.chunk_count)?;
    dict.set_item("reused_chunk_count", figures.reused_chunk_count)?;
    dict.set_item("copy_seconds", figures.copy_seconds)?;
    dict.set_item("encode_seconds", figures.encode_seconds)?;
    dict.set_item("write_seconds", figures.write_seconds)?;
    dict.set_item("sync_seconds", figures.sync_seconds)
}

/// Facts of a pack that a rank has written.
pub(crate) fn part<'py>(py: Python<'py>, report: &PartReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("rank", report.rank)?;
    dict.set_item("pack", &report.pack)?;
    dict.set_item("length_bytes", report.length_bytes)?;
    add_figures(&dict, &report.figures)?;
    Ok(dict)
}

/// Facts of a snapshot of several ranks that was committed.
pub(crate) fn commit<'py>(py: Python<'py>, report: &CommitReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("header", header(py, &report.header)?)?;
    dict.set_item("commit_seconds", report.commit_seconds)?;
    dict.set_item("retention_error", report.retention.as_ref().err().map(|error| error.chain()))?;
    Ok(dict)
}

/// A retention plan with the bytes it frees.
pub(crate) fn plan<'py>(py: Python<'py>, plan: &Plan, freed_bytes: u64) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("kept", plan.kept.clone())?;
    dict.set_item("removed", plan.removed.clone())?;
    dict.set_item("freed_bytes", freed_bytes)?;
    Ok(dict)
}

/// What a scrub found.
pub(crate) fn verification<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("checked_bytes", report.checked_bytes)?;
    dict.set_item("findings", findings(&report.findings))?;
    Ok(dict)
}

/// What a merge did.
pub(crate) fn merge<'py>(py: Python<'py>, report: &MergeReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("merged_packs", report.merged_pack_count)?;
    dict.set_item("written_bytes", report.written_bytes)?;
    dict.set_item("freed_bytes", report.freed_bytes)?;
    dict.set_item("stood_down", report.stood_down.as_deref())?;
    dict.set_item("findings", findings(&report.findings))?;
    Ok(dict)
}

/// (object, offset in bytes, what, steps) of each.
pub(crate) fn findings(findings: &[Finding]) -> Vec<(String, u64, String, Vec<u64>)> {
    let row = |finding: &Finding| {
        let steps = finding.steps.iter().copied().collect();
        (finding.object.clone(), finding.offset_bytes, finding.what.clone(), steps)
    };
    findings.iter().map(row).collect()
}

/// What an encrypted repository shows to everybody, as `varvite.native_types.Clear`.
pub(super) fn clear<'py>(py: Python<'py>, clear: &Clear) -> PyResult<Bound<'py, PyDict>> {
    let snapshot = |facts: &Facts| {
        let dict = PyDict::new(py);
        dict.set_item("seq", facts.seq)?;
        dict.set_item("step", facts.step)?;
        dict.set_item("created_at_unix_ms", facts.created_at_unix_ms)?;
        dict.set_item("world_size", facts.world_size)?;
        dict.set_item("raw_bytes", facts.raw_bytes)?;
        dict.set_item("stored_bytes", facts.stored_bytes)?;
        Ok(dict)
    };
    let dict = PyDict::new(py);
    dict.set_item("snapshots", clear.snapshots.iter().map(snapshot).collect::<PyResult<Vec<_>>>()?)?;
    dict.set_item("damaged", &clear.damaged)?;
    Ok(dict)
}

/// What a push did, as `varvite.native_types.Synced`.
pub(super) fn synced<'py>(py: Python<'py>, report: &SyncReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("pushed_objects", report.pushed_objects)?;
    dict.set_item("pushed_bytes", report.pushed_bytes)?;
    dict.set_item("removed_objects", report.removed_objects)?;
    dict.set_item("pending_objects", report.pending_objects)?;
    Ok(dict)
}

/// What is known of a bucket, as `varvite.native_types.SyncFigures`.
pub(super) fn sync_state<'py>(py: Python<'py>, state: &SyncState) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("url", &state.url)?;
    dict.set_item("is_running", state.is_running)?;
    dict.set_item("newest_pushed_seq", state.newest_pushed_seq)?;
    dict.set_item("unpushed", &state.unpushed)?;
    dict.set_item("discarded", &state.discarded)?;
    dict.set_item("pending_objects", state.pending_objects)?;
    dict.set_item("pending_bytes", state.pending_bytes)?;
    dict.set_item("moved_bytes", state.moved_bytes)?;
    dict.set_item("pushed_objects", state.pushed_objects)?;
    dict.set_item("pushed_bytes", state.pushed_bytes)?;
    dict.set_item("removed_objects", state.removed_objects)?;
    dict.set_item("pending_removals", state.pending_removals)?;
    dict.set_item("last_error", &state.last_error)?;
    dict.set_item("lease_epoch", state.lease.is_ours.then_some(state.lease.epoch))?;
    dict.set_item("fenced_by", &state.lease.fenced_by)?;
    Ok(dict)
}

/// What a pull did, as `varvite.native_types.Pulled`.
pub(super) fn pulled<'py>(py: Python<'py>, report: &PullReport) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("pulled", &report.pulled)?;
    dict.set_item("known", &report.known)?;
    dict.set_item("pulled_objects", report.pulled_objects)?;
    dict.set_item("pulled_bytes", report.pulled_bytes)?;
    Ok(dict)
}
