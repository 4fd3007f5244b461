//! Engine errors as Python exceptions: one exception per failed call, its facts as attributes.
//!
//! The classes and the hints stand in `varvite/errors.py`; this file only names the variant and its facts.

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::Error;

/// The exception for an engine error.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    build(py, error).unwrap_or_else(|failure| failure)
}

fn build(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let facts = PyDict::new(py);
    let kind = match error {
        Error::InvalidInput { what, reason } => {
            facts.set_item("what", what)?;
            facts.set_item("reason", reason)?;
            "InvalidInput"
        }
        Error::Mismatch { name, field, expected, found } => {
            facts.set_item("name", name)?;
            facts.set_item("field", field)?;
            facts.set_item("expected", expected)?;
            facts.set_item("found", found)?;
            "Mismatch"
        }
        Error::Disagreement { name, field, ranks, left, right } => {
            facts.set_item("name", name)?;
            facts.set_item("field", field)?;
            facts.set_item("ranks", [ranks.0, ranks.1])?;
            facts.set_item("expected", left)?;
            facts.set_item("found", right)?;
            "Disagreement"
        }
        Error::NotARepository { root, reason } => {
            facts.set_item("root", root)?;
            facts.set_item("reason", reason)?;
            "NotARepository"
        }
        Error::SnapshotNotFound { reference, root, reason } => {
            facts.set_item("reference", reference)?;
            facts.set_item("root", root)?;
            facts.set_item("reason", reason)?;
            "SnapshotNotFound"
        }
        Error::TensorNotFound { name, seq, nearest } => {
            facts.set_item("name", name)?;
            facts.set_item("seq", seq)?;
            facts.set_item("nearest", nearest)?;
            "TensorNotFound"
        }
        Error::Conflict { object, by } => {
            facts.set_item("object", object)?;
            facts.set_item("by", by)?;
            "Conflict"
        }
        Error::Locked { root, holder } => {
            facts.set_item("root", root)?;
            facts.set_item("holder", holder)?;
            "Locked"
        }
        Error::Key { root, problem } => {
            facts.set_item("root", root)?;
            facts.set_item("problem", problem.name())?;
            "Key"
        }
        Error::Unsupported { what, object, found, supported } => {
            facts.set_item("what", what)?;
            facts.set_item("object", object)?;
            facts.set_item("found", found)?;
            facts.set_item("supported", supported)?;
            "Unsupported"
        }
        Error::Corrupt { object, offset_bytes, what, expected, found } => {
            facts.set_item("object", object)?;
            facts.set_item("offset_bytes", offset_bytes)?;
            facts.set_item("what", what)?;
            facts.set_item("expected", expected)?;
            facts.set_item("found", found)?;
            "Corrupt"
        }
        Error::Incomplete { seq, missing_ranks } => {
            facts.set_item("seq", seq)?;
            facts.set_item("missing_ranks", missing_ranks)?;
            "Incomplete"
        }
        Error::Store { operation, object, source } => {
            facts.set_item("operation", operation)?;
            facts.set_item("object", object)?;
            facts.set_item("errno", source.raw_os_error())?;
            facts.set_item("strerror", source.to_string())?;
            facts.set_item("filename", object)?;
            "Store"
        }
        Error::Poisoned { first } => {
            facts.set_item("first", first)?;
            "Poisoned"
        }
        Error::Interrupted => return Ok(PyKeyboardInterrupt::new_err(())),
        Error::Internal { what } => {
            facts.set_item("what", what)?;
            "Internal"
        }
    };
    let module = py.import("varvite.errors")?;
    let exception = module.getattr("build")?.call1((kind, error.chain(), facts))?;
    Ok(PyErr::from_value(exception))
}
