//! A background save as a Python class: `SaveJob`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyTimeoutError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::saver::{Job, Outcome};

use super::convert;
use super::error::raise;
use super::wait::POLL;

/// A save that runs in the background.
#[pyclass(frozen, module = "varvite._native")]
pub(crate) struct SaveJob {
    pub(crate) job: Arc<Job>,
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
