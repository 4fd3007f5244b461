//! A folder and its bucket: what is where, who may write there, and how one follows the other.
//!
//! * [`TieredStore`] is the store of a repository with a remote: the folder first, the bucket behind it.
//! * `lease` decides who writes to the bucket; `notes` remembers in the folder what lies there.
//! * `plan` decides what is pushed and removed, a pure function; `push` does it, `pull` goes the other way.
//!
//! IMPORTANT: no call that a save makes touches the network. What a save or a retention needs to know of the
//! bucket is the *view*, taken when the lease is, and kept up by whoever pushes. FORMAT.md, "In a bucket".

use serde::Deserialize;

use crate::crypt::MasterKey;
use crate::error::{Error, Result};
use crate::format::limits::LEASE_MILLISECONDS_LIMIT;

mod clock;
mod head;
mod lease;
mod notes;
mod plan;
mod pull;
mod push;
mod removal;
mod survey;
mod tiered;
mod view;

pub use clock::{Clock, SystemClock};
pub use lease::LeaseState;
pub use pull::{PullReport, pull};
pub use push::{Figures, PushControl, Pushed};
pub use tiered::{TierAccess, TieredStore};

/// How a repository follows its bucket.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct SyncOptions {
    /// Commits from one push to the next.
    pub sync_every: u32,
    /// Seconds without a sign of life after which another writer may take the bucket.
    pub lease_seconds: f64,
    /// Bytes that may go over the wire in a second, on average.
    pub limit_bytes_per_second: Option<u64>,
    /// Whether retention may remove what was not pushed yet.
    pub prune_unpushed: bool,
    /// What becomes of snapshots of this folder whose numbers another writer has used in the bucket.
    pub diverged: Diverged,
    /// Age in hours from which packs in the bucket that no manifest names are removed.
    pub orphan_hours: f64,
    /// Take the bucket at once, whoever holds it.
    pub takeover: bool,
    /// Key of an encrypted repository: what is pushed and what may go stands in manifests.
    #[serde(skip)]
    pub key: Option<MasterKey>,
}

/// What becomes of snapshots whose numbers another writer has used in the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Diverged {
    /// The repository doesn't open.
    Raise,
    /// They are dropped here.
    Discard,
}

impl Default for SyncOptions {
    fn default() -> Self {
        Self {
            sync_every: 1,
            lease_seconds: 30.0,
            limit_bytes_per_second: None,
            prune_unpushed: false,
            diverged: Diverged::Raise,
            orphan_hours: 24.0,
            takeover: false,
            key: None,
        }
    }
}

impl SyncOptions {
    /// Refuses values that mean nothing.
    fn check(&self) -> Result<()> {
        if self.sync_every == 0 {
            return Err(Error::invalid("sync_every 0", "must be at least 1"));
        }
        let is_lease = (0.001..=86_400.0).contains(&self.lease_seconds);
        if !is_lease || !(1..=LEASE_MILLISECONDS_LIMIT).contains(&self.lease_milliseconds()) {
            let what = format!("lease_seconds {}", self.lease_seconds);
            return Err(Error::invalid(what, "must be from 0.001 to 86400"));
        }
        if self.limit_bytes_per_second == Some(0) {
            return Err(Error::invalid("bandwidth 0", "must be at least 1 byte per second"));
        }
        if !(0.0..=1e6).contains(&self.orphan_hours) {
            let what = format!("orphan_hours {}", self.orphan_hours);
            return Err(Error::invalid(what, "must be from 0 to 1000000"));
        }
        Ok(())
    }

    #[expect(clippy::cast_sign_loss, reason = "negative ones are refused, and become 0 until then")]
    fn lease_milliseconds(&self) -> u64 {
        (self.lease_seconds * 1000.0) as u64
    }

    #[expect(clippy::cast_sign_loss, reason = "checked to be positive")]
    fn orphan_milliseconds(&self) -> u64 {
        (self.orphan_hours * 3_600_000.0) as u64
    }
}
