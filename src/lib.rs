//! Varvite: a checkpoint engine for training runs.
//!
//! # Map
//!
//! A module uses only layers below its own; siblings don't import each other (`tests/layering.rs`).
//!
//! | layer | modules |
//! |---|---|
//! | bindings | `py` (feature `python`): the only place that names pyo3 |
//! | background of saves | [`saver`]: saves on a thread of their own |
//! | background | [`merger`], [`syncer`]: merges, and the way to the bucket, on threads of their own |
//! | facade | [`repository`]: repository, save session, snapshot; clock and randomness |
//! | act on two places | [`sync`]: a folder and its bucket |
//! | act on all | [`recover`], [`sweep`], [`verify`], [`merge`]: what concerns the whole repository |
//! | act on one | [`stage`], [`write`], [`read`], [`commit`]: what makes or reads one snapshot |
//! | know | [`inflight`], [`listing`]: who reads or writes what, and which snapshots there are |
//! | choose | [`retain`], [`compact`]: pure, as what they rest on |
//! | decide | [`plan`], [`catalog`]: pure functions |
//! | code | [`codec`]: raw bytes to stored bytes and back |
//! | bytes, encrypted | [`encrypted`]: a store whose objects only a key opens |
//! | bytes | [`format`], [`store`] |
//! | values | [`region`], [`cast`], [`statistics`] |
//! | ground | [`tensor`], [`float`], [`digest`], [`crypt`], [`threads`], [`batch`], [`kill`], [`watchdog`], [`process`] |
//! | machine | [`kernel`]: what is written for the processor, or is unsafe |
//! | errors | [`error`] |
//!
//! # Invariants
//!
//! * A snapshot exists if and only if its manifest does; publishing the manifest is the commit.
//! * Published objects are immutable, but for a manifest, which a merge replaces by one of the same snapshot.
//!   What a manifest refers to was durable before it was published.
//! * `format` does no I/O and never panics, whatever the bytes; `store` never looks inside bytes.
//! * `plan`, `catalog`, `retain` and `compact` have no clock, randomness, environment or I/O.
//! * No byte reaches a caller's buffer before the digest of its chunk was checked.
//! * Nobody deletes what somebody holds; nobody waits for a deletion.
//! * `unsafe` stands only below `kernel` and in `py/buffer.rs`, each block with its proof.

pub mod batch;
pub mod cast;
pub mod catalog;
pub mod codec;
pub mod commit;
pub mod compact;
pub mod crypt;
pub mod digest;
pub mod encrypted;
pub mod error;
pub mod float;
pub mod format;
pub mod inflight;
pub mod kernel;
pub mod kill;
pub mod listing;
pub mod merge;
pub mod merger;
pub mod plan;
pub mod process;
pub mod read;
pub mod recover;
pub mod region;
pub mod repository;
pub mod retain;
pub mod saver;
pub mod stage;
pub mod statistics;
pub mod store;
pub mod sweep;
pub mod sync;
pub mod syncer;
pub mod tensor;
pub mod threads;
pub mod verify;
pub mod watchdog;
pub mod write;

#[cfg(feature = "python")]
mod py;

pub use error::{Error, Result};
pub use repository::{Access, Options, Repository, SaveReport, SaveRequest, SaveSession, Snapshot};
