//! A background save as a Python class: `SaveJob`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::repository::PartReport;
use crate::saver::Job;

use super::convert;
use super::error::raise;
use super::wait::POLL;

/// A save that runs in the background.
#[pyclass(frozen, module = "varvite._native")]
pub(crate) struct SaveJob {
    pub(crate) job: Running,
}

/// What runs.
pub(crate) enum Running {
    /// The save of a snapshot.
    Save(Arc<Job>),
    /// The save of a rank's part of one.
    Part(Arc<Job<PartReport>>),
}

#[pymethods]
impl SaveJob {
    /// True when the save has ended, either way.
    #[getter]
    fn done(&self) -> bool {
        match &self.job {
            Running::Save(job) => job.outcome().is_some(),
            Running::Part(job) => job.outcome().is_some(),
        }
    }

    /// True when it has ended without a snapshot.
    #[getter]
    fn failed(&self) -> bool {
        match &self.job {
            Running::Save(job) => matches!(job.outcome(), Some(Err(_))),
            Running::Part(job) => matches!(job.outcome(), Some(Err(_))),
        }
    }

    /// Waits for the end; returns the report or raises the failure. A timeout in seconds that passes is
    /// a `TimeoutError`, and the save goes on.
    #[pyo3(signature = (timeout=None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyDict>> {
        let ended = match &self.job {
            Running::Save(job) => wait_for(py, timeout, |limit| job.wait(limit))?.map(|outcome| {
                outcome.map_or_else(|error| Err(raise(py, &error)), |report| convert::report(py, &report))
            }),
            Running::Part(job) => wait_for(py, timeout, |limit| job.wait(limit))?.map(|outcome| {
                outcome.map_or_else(|error| Err(raise(py, &error)), |report| convert::part(py, &report))
            }),
        };
        ended.unwrap_or_else(|| Err(PyTimeoutError::new_err("the save is still running")))
    }

    /// True when the save reads no memory of the caller any more: all is copied, or the save failed.
    #[getter]
    fn copied(&self) -> bool {
        match &self.job {
            Running::Save(job) => job.is_copied(),
            Running::Part(job) => job.is_copied(),
        }
    }

    /// Waits until all is copied, or the save has failed, which is not raised here. A timeout in seconds
    /// that passes is a `TimeoutError`.
    #[pyo3(signature = (timeout=None))]
    fn wait_copied(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let copied = |limit| match &self.job {
            Running::Save(job) => job.wait_copied(limit),
            Running::Part(job) => job.wait_copied(limit),
        };
        match wait_for(py, timeout, |limit| copied(limit).then_some(()))? {
            Some(()) => Ok(()),
            None => Err(PyTimeoutError::new_err("the save is still copying")),
        }
    }

    /// Asks the save to end without a snapshot.
    fn cancel(&self) {
        match &self.job {
            Running::Save(job) => job.cancel(),
            Running::Part(job) => job.cancel(),
        }
    }
}

/// Waits detached, in spells after which signals are looked for; `None` where the time was too short.
fn wait_for<T: Send>(
    py: Python<'_>,
    timeout: Option<f64>,
    wait: impl Fn(Duration) -> Option<T> + Sync,
) -> PyResult<Option<T>> {
    let deadline = timeout
        .and_then(|seconds| Duration::try_from_secs_f64(seconds.max(0.0)).ok())
        .and_then(|limit| Instant::now().checked_add(limit));
    loop {
        let left =
            deadline.map_or(POLL, |deadline| deadline.saturating_duration_since(Instant::now()).min(POLL));
        if let Some(there) = py.detach(|| wait(left)) {
            return Ok(Some(there));
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(None);
        }
        py.check_signals()?;
    }
}
