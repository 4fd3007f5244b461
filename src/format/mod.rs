//! Bytes to structs and back: packs, parts, manifests, the marker, tags, receipts, tickets, and what goes with a bucket.
//!
//! No I/O, no clock, no panic whatever the bytes; what is allocated is bounded by a constant times the
//! input (FORMAT.md, section "Limits"). The layout stands in FORMAT.md and nowhere else.
//!
//! `manifest`, `pack`, `marker`, `tag`, `receipt` and `lease` are one object each, `journal` three; a `ticket` is a text. What two of them share lies in
//! `two_line` (manifest and part), `sealed_line` (every JSON line with a digest of itself), `header`,
//! `chunk_ref`, `validate` with `cover`, `versions`, and `place`, which knows where in an object a
//! decoder stands.

#![cfg_attr(not(test), deny(clippy::indexing_slicing, clippy::arithmetic_side_effects))]

mod chunk_ref;
mod chunk_table;
mod compression;
pub mod cover;
pub mod encrypted;
mod fields;
mod footer;
mod header;
pub mod journal;
pub mod lease;
pub mod limits;
pub mod manifest;
pub mod marker;
pub mod model;
pub mod names;
pub mod pack;
mod place;
pub mod receipt;
mod sealed_line;
pub mod state_digest;
pub mod tag;
pub mod ticket;
mod two_line;
mod validate;
pub mod versions;

#[cfg(test)]
pub(crate) mod samples;

#[doc = include_str!("FORMAT.md")]
pub mod specification {}
