//! The watchdog as a Python class: its thread never asks for the interpreter.

use std::time::Duration;

use pyo3::prelude::*;

use crate::error::Error;
use crate::watchdog;

use super::error::raise;

/// A deadline at which the process ends.
#[pyclass(frozen, module = "varvite._native")]
pub(crate) struct Watchdog {
    watchdog: watchdog::Watchdog,
}

#[pymethods]
impl Watchdog {
    #[new]
    fn new(py: Python<'_>, seconds: f64, exit_code: u8, message: &str) -> PyResult<Self> {
        let after = Duration::try_from_secs_f64(seconds)
            .map_err(|error| Error::invalid("seconds", format!("{error}: {seconds}")));
        let watchdog = after.and_then(|after| watchdog::Watchdog::start(after, exit_code, message));
        watchdog.map(|watchdog| Self { watchdog }).map_err(|error| raise(py, &error))
    }

    /// Lets the process live.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.watchdog.cancel());
    }
}
