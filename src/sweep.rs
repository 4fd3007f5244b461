//! Deletes snapshots and then the packs that no manifest refers to any more.
//!
//! IMPORTANT: manifests go first and durably, packs after them: a crash in between leaves packs that
//! nobody refers to, which the next sweep takes; the other order would leave a snapshot without bytes.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use crate::error::Result;
use crate::format::names;
use crate::inflight::Registry;
use crate::kill;
use crate::listing::Listing;
use crate::store::{Folder, Key, PutMode, Store};

/// Deletes the manifests of `seqs`, durably. If the newest of all is among them, its number is kept
/// from reuse by a tombstone first.
///
/// # Errors
/// [`crate::Error::Store`]; then some of them may be gone.
pub fn delete_manifests(store: &Arc<dyn Store>, listing: &mut Listing, seqs: &[u64]) -> Result<()> {
    if seqs.is_empty() {
        return Ok(());
    }
    let high_water = listing.high_water();
    if seqs.contains(&high_water) {
        let key = Key::new(Folder::Snapshots, &names::tombstone_name(high_water))?;
        store.put(&key, names::TOMBSTONE_CONTENT, PutMode::Replace)?;
        listing.tombstones.insert(high_water);
    }
    let manifests: Vec<String> = seqs.iter().map(|&seq| names::manifest_name(seq)).collect();
    store.delete(Folder::Snapshots, &manifests)?;
    for seq in seqs {
        listing.seqs.remove(seq);
    }
    kill::point("sweep.manifests_deleted");
    Ok(())
}

/// What a sweep did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swept {
    /// Bytes of the packs that were deleted.
    pub freed_bytes: u64,
    /// Packs that nothing refers to, but that somebody holds: left for the next sweep.
    pub held_count: usize,
}

/// Deletes the packs that `referenced` does not name and that nobody holds.
///
/// `referenced` is asked twice: before packs are claimed, so that a load never finds a pack claimed that its
/// snapshot needs, and *after*, so that a save that committed in between is seen. Packs newer than every
/// commit belong to a running save or to recovery and stay, and so do those of the numbers in `open`, which
/// belong to sessions of several ranks.
///
/// # Errors
/// [`crate::Error::Store`]; whatever is left is found again by the next sweep.
pub fn delete_packs(
    store: &Arc<dyn Store>,
    registry: &Arc<Registry>,
    listing: &mut Listing,
    open: &BTreeSet<u64>,
    referenced: impl Fn() -> Result<HashSet<String>>,
) -> Result<Swept> {
    let high_water = listing.high_water();
    let needed = referenced()?;
    let stale: Vec<String> = store
        .list(Folder::Packs)?
        .into_iter()
        .map(|row| row.name)
        .filter(|name| {
            names::parse_pack_name(name)
                .is_some_and(|name| name.seq <= high_water && !open.contains(&name.seq))
        })
        .filter(|name| !needed.contains(name))
        .collect();
    let claim = registry.claim(stale.iter().cloned());
    let needed = referenced()?;
    let (doomed, held): (Vec<String>, Vec<String>) = stale
        .into_iter()
        .filter(|name| !needed.contains(name))
        .partition(|name| claim.packs().contains(name));
    let freed_bytes = if doomed.is_empty() { 0 } else { store.delete(Folder::Packs, &doomed)? };
    drop(claim);
    drop_tombstones(store, listing)?;
    Ok(Swept { freed_bytes, held_count: held.len() })
}

/// Removes tombstones that no longer protect anything: a larger number is committed, and no pack of
/// theirs is left to be taken for an unfinished save.
fn drop_tombstones(store: &Arc<dyn Store>, listing: &mut Listing) -> Result<()> {
    let newest = listing.seqs.last().copied().unwrap_or(0);
    let done: BTreeSet<u64> = listing.tombstones.iter().copied().filter(|&seq| seq < newest).collect();
    if done.is_empty() {
        return Ok(());
    }
    store
        .delete(Folder::Snapshots, &done.iter().map(|&seq| names::tombstone_name(seq)).collect::<Vec<_>>())?;
    listing.tombstones.retain(|seq| !done.contains(seq));
    Ok(())
}
