//! Which commit numbers a repository has, from the names of its objects alone.

use std::collections::BTreeSet;

use crate::error::Result;
use crate::format::names;
use crate::store::{Folder, Store};

/// Commit numbers in a repository, from listings alone.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// Snapshots that have a manifest.
    pub seqs: BTreeSet<u64>,
    /// Deleted snapshots whose number must not be used again.
    pub tombstones: BTreeSet<u64>,
}

impl Listing {
    /// Lists the manifests and tombstones of a store.
    ///
    /// # Errors
    /// [`crate::Error::Store`] where listing fails.
    pub fn read(store: &dyn Store) -> Result<Self> {
        let mut listing = Self::default();
        for row in store.list(Folder::Snapshots)? {
            if let Some(seq) = names::parse_manifest_name(&row.name) {
                listing.seqs.insert(seq);
            } else if let Some(seq) = names::parse_tombstone_name(&row.name) {
                listing.tombstones.insert(seq);
            }
        }
        Ok(listing)
    }

    /// The largest number that was ever committed here, 0 for none.
    #[must_use]
    pub fn high_water(&self) -> u64 {
        let newest = |set: &BTreeSet<u64>| set.last().copied().unwrap_or(0);
        newest(&self.seqs).max(newest(&self.tombstones))
    }
}
