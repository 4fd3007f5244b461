//! What to write and what to read, decided from structs alone: no bytes are touched here.
//!
//! Four decisions: which chunks of a save the base already holds, and what a difference may be taken
//! against ([`Base`], [`Reuse`]); which byte ranges of which packs a load needs ([`plan_read`]); which
//! rank writes what several hold ([`plan_shares`]); which manifest the parts of all ranks make ([`assemble`]).

use std::ops::Range;

use crate::error::Error;

mod assembling;
mod base;
mod coding;
mod holdings;
mod joining;
mod reading;
mod replicas;
mod structures;
mod writers;

pub use assembling::{WrittenPart, assemble};
pub use base::{Base, Reuse, delta_base};
pub use coding::{Compression, Measured, Pace, effort, tries_delta};
pub use holdings::{Holding, decode_holdings, encode_holdings};
pub use reading::{CastBack, Piece, ReadChunk, ReadGroup, ReadPlan, ReadShape, RoundedFrom, Want, plan_read};
pub use writers::{Share, plan_shares};

/// Two ranks that disagree on what has to be the same: what each of them has.
fn disagreement(name: &str, field: &'static str, left: (u32, &str), right: (u32, &str)) -> Error {
    Error::Disagreement {
        name: name.to_owned(),
        field,
        ranks: (left.0, right.0),
        left: left.1.to_owned(),
        right: right.1.to_owned(),
    }
}

/// Cuts `length_bytes` raw bytes into chunks of `chunk_bytes`; only the last may be shorter.
pub fn chunk_ranges(length_bytes: u64, chunk_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..length_bytes.div_ceil(chunk_bytes)).map(move |index| {
        let start = index * chunk_bytes;
        start..(start + chunk_bytes).min(length_bytes)
    })
}
