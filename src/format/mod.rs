//! Bytes to structs and back: packs, parts, manifests, the marker and tags.
//!
//! No I/O, no clock, no panic whatever the bytes; what is allocated is bounded by a constant times the
//! input (FORMAT.md, section "Limits"). The layout stands in FORMAT.md and nowhere else.

#![deny(clippy::indexing_slicing, clippy::arithmetic_side_effects)]

pub mod limits;
pub mod manifest;
pub mod marker;
pub mod model;
pub mod names;
pub mod pack;
pub mod tag;

#[doc = include_str!("FORMAT.md")]
pub mod specification {}
