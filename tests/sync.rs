//! A folder that follows its bucket, two machines that want one bucket, and what each of them may rely on.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panic")]

mod common;

#[path = "sync/lease.rs"]
mod lease;
#[path = "sync/model.rs"]
mod model;
#[path = "sync/outage.rs"]
mod outage;
#[path = "sync/pushing.rs"]
mod pushing;
#[path = "sync/reading.rs"]
mod reading;
#[path = "sync/removing.rs"]
mod removing;
