//! Varvite: a checkpoint engine for training runs.
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

pub mod digest;
pub mod error;
pub mod format;
pub mod store;
pub mod tensor;
