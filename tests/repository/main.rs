//! What the facade promises, with values: each file one group of promises.

#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "../common/mod.rs"]
mod common;

mod coding;
mod keeping;
mod later;
mod merging;
mod opening;
mod parts;
mod races;
mod ranks;
mod receipts;
mod reuse;
mod round_trip;
mod tensors;
