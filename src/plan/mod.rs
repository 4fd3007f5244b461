//! What to write and what to read, decided from structs alone: no bytes are touched here.
//!
//! Three decisions: which chunks of a save the base already holds, and what a difference may be taken
//! against ([`Base`], [`Reuse`]); which byte ranges of which packs a load needs ([`plan_read`]); which
//! manifest the parts of all ranks make ([`assemble`]).

use std::ops::Range;

mod assembling;
mod base;
mod coding;
mod reading;

pub use assembling::{WrittenPart, assemble};
pub use base::{Base, Reuse, delta_base};
pub use coding::{Compression, Measured, Pace, effort, tries_delta};
pub use reading::{CastBack, Piece, ReadChunk, ReadGroup, ReadPlan, RoundedFrom, Want, plan_read};

/// Cuts `length_bytes` raw bytes into chunks of `chunk_bytes`; only the last may be shorter.
pub fn chunk_ranges(length_bytes: u64, chunk_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..length_bytes.div_ceil(chunk_bytes)).map(move |index| {
        let start = index * chunk_bytes;
        start..(start + chunk_bytes).min(length_bytes)
    })
}
