//! What a crash left behind, at open: publish a snapshot whose packs are all there, forget the rest.
//!
//! Only the holder of the writer lock runs this. The rules stand in FORMAT.md, "Recovery": packs newer
//! than every manifest and tombstone belong to a save that never committed. Older packs without a
//! manifest are left to the sweep, which knows what is referred to.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::commit;
use crate::error::Result;
use crate::format::model::PackRecord;
use crate::format::names;
use crate::kill;
use crate::listing::Listing;
use crate::plan::{WrittenPart, assemble};
use crate::read::read_footer;
use crate::store::{Folder, Key, Store};

/// What recovery did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Staged files that were removed.
    pub swept_count: u64,
    /// Snapshots that were published because all their packs were there.
    pub published: Vec<u64>,
    /// Packs that were removed because their save never finished.
    pub orphans: Vec<String>,
    /// True where older packs have no manifest, a rank has two of one seq, or a merge was here: the next sweep
    /// looks at them.
    pub stale_packs: bool,
}

/// Recovers a repository whose writer lock this process holds, and brings `listing` up to date, which is
/// that of [`Listing::settled`].
///
/// # Errors
/// [`crate::Error::Store`] where the store fails; what was done so far is consistent.
pub fn recover(store: &Arc<dyn Store>, listing: &mut Listing) -> Result<Recovered> {
    let mut recovered = Recovered { swept_count: store.sweep_staged()?, ..Recovered::default() };
    kill::point("recover.swept");
    let high_water = listing.high_water();
    let mut unfinished: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    let mut writers = BTreeSet::new();
    for row in store.list(Folder::Packs)? {
        let Some(name) = names::parse_pack_name(&row.name) else { continue };
        if name.seq > high_water {
            unfinished.entry(name.seq).or_default().push(row.name);
        } else if name.is_merged
            || !listing.seqs.contains(&name.seq)
            || !writers.insert((name.seq, name.rank))
        {
            // After a merge the packs of snapshots that are there may be what nobody refers to.
            recovered.stale_packs = true;
        }
    }
    for (seq, mut packs) in unfinished {
        packs.sort();
        if let Some(published) = finish(store, &packs)? {
            listing.seqs.insert(seq);
            recovered.published.push(seq);
            packs.retain(|name| !published.contains(name));
            kill::point("recover.published");
        }
        recovered.orphans.append(&mut packs);
    }
    if !recovered.orphans.is_empty() {
        store.delete(Folder::Packs, &recovered.orphans)?;
    }
    Ok(recovered)
}

/// Publishes the snapshot of these packs of one seq, if one session's packs make it whole; returns the
/// packs it took.
fn finish(store: &Arc<dyn Store>, packs: &[String]) -> Result<Option<BTreeSet<String>>> {
    let mut sessions: BTreeMap<String, Vec<WrittenPart>> = BTreeMap::new();
    for name in packs {
        match read_part(store.as_ref(), name) {
            Ok(Some(written)) => {
                sessions.entry(written.part.header.session_id.clone()).or_default().push(written);
            }
            Ok(None) => {}
            Err(error) if error.is_damage() => {}
            Err(error) => return Err(error),
        }
    }
    for parts in sessions.into_values() {
        let names: BTreeSet<String> = parts.iter().map(|written| written.pack.name.clone()).collect();
        let Ok(manifest) = assemble(parts) else { continue };
        if manifest.body.packs.iter().all(|record| is_there(store.as_ref(), record)) {
            commit::publish(store, &manifest)?;
            return Ok(Some(names));
        }
    }
    Ok(None)
}

fn is_there(store: &dyn Store, record: &PackRecord) -> bool {
    let Ok(key) = Key::new(Folder::Packs, &record.name) else { return false };
    store.is_at_hand(&key)
        && store.open(&key).is_ok_and(|object| object.length_bytes() == record.length_bytes)
}

/// Reads the part in a pack's footer; `None` where the pack was written by a merge.
///
/// # Errors
/// [`crate::Error::Corrupt`] where the pack is not whole.
pub fn read_part(store: &dyn Store, name: &str) -> Result<Option<WrittenPart>> {
    let key = Key::new(Folder::Packs, name)?;
    let object = store.open(&key)?;
    let footer = read_footer(&key.to_string(), object.as_ref())?;
    let pack = PackRecord { name: name.to_owned(), length_bytes: object.length_bytes() };
    Ok(footer.part.map(|part| WrittenPart { part, pack }))
}
