//! The commit: one manifest, published if absent, after everything it refers to is durable.
//!
//! IMPORTANT: packs are durable before their parts count, parts before the manifest, the manifest before
//! anything is told to the caller or deleted. No other object makes a snapshot visible (FORMAT.md,
//! "Commit protocol").

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::model::Manifest;
use crate::format::{manifest, names};
use crate::kill;
use crate::plan::{WrittenPart, assemble};
use crate::store::{Folder, Key, PutMode, Store};

/// Publishes the snapshot that the parts of all ranks describe.
///
/// # Errors
/// [`Error::Conflict`] where another writer published this seq first; [`Error::Incomplete`] where ranks
/// are missing. Where the store failed, the snapshot may exist or not: the next open decides.
pub fn commit(store: &Arc<dyn Store>, parts: Vec<WrittenPart>) -> Result<Manifest> {
    kill::point("commit.pack_durable");
    let made = assemble(parts)?;
    publish(store, &made)?;
    kill::point("commit.published");
    Ok(made)
}

/// Publishes one manifest, which [`assemble`] has made, under its seq.
///
/// # Errors
/// As [`commit`].
pub fn publish(store: &Arc<dyn Store>, made: &Manifest) -> Result<()> {
    let key = Key::new(Folder::Snapshots, &names::manifest_name(made.header.seq))?;
    let bytes = manifest::encode_completed(&made.header, &made.body)?;
    match store.put(&key, &bytes, PutMode::IfAbsent) {
        Err(Error::Conflict { object, .. }) => {
            let by = store
                .get(&key, crate::format::limits::MANIFEST_LIMIT_BYTES)
                .and_then(|bytes| manifest::decode(&key.to_string(), &bytes))
                .map_or_else(
                    |_| "its manifest can't be read".to_owned(),
                    |other| format!("session {} at step {}", other.header.session_id, other.header.step),
                );
            Err(Error::Conflict { object, by })
        }
        other => other,
    }
}
