//! Opening: whose folder this is, the marker, and the identity of a new repository.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::limits;
use crate::format::marker::Marker;
use crate::format::names;
use crate::listing::Listing;
use crate::store::{Folder, Key, PutMode, Store};

use super::Options;
use super::chance::random_u128;
use super::header::read_header;

pub(super) fn check_options(options: &Options) -> Result<()> {
    let legal = limits::CHUNK_BYTES_RANGE;
    if !options.chunk_bytes.is_power_of_two() || !legal.contains(&options.chunk_bytes) {
        return Err(Error::invalid(
            format!("chunk_bytes {}", options.chunk_bytes),
            format!("must be a power of two from {} to {}", legal.start(), legal.end()),
        ));
    }
    if options.rank >= options.world_size {
        return Err(Error::invalid(
            format!("rank {}", options.rank),
            format!("must be below the world size: {}", options.world_size),
        ));
    }
    Ok(())
}

/// Refuses to turn a folder that holds other things into a repository.
pub(super) fn refuse_foreign(store: &dyn Store) -> Result<()> {
    let names: Vec<String> = store.list(Folder::Root)?.into_iter().map(|row| row.name).collect();
    if names.is_empty() || names.iter().any(|name| name == names::MARKER_NAME) {
        return Ok(());
    }
    let foreign = names.iter().take(3).cloned().collect::<Vec<_>>().join(", ");
    Err(Error::NotARepository {
        root: store.root(),
        reason: format!("the folder holds other files: {foreign}"),
    })
}

/// Reads the marker; a writer makes it where there is none, and makes it anew where it is damaged but a
/// manifest still tells the identity.
pub(super) fn open_marker(store: &Arc<dyn Store>, listing: &Listing, writable: bool) -> Result<Marker> {
    let key = Key::new(Folder::Root, names::MARKER_NAME)?;
    let found = store.get(&key, limits::SMALL_OBJECT_LIMIT_BYTES).and_then(|bytes| Marker::decode(&bytes));
    let error = match found {
        Ok(marker) => {
            if writable {
                marker.require_writable()?;
            }
            return Ok(marker);
        }
        Err(error) if error.is_not_found() || matches!(error, Error::Corrupt { .. }) => error,
        Err(error) => return Err(error),
    };
    let known_id = listing
        .seqs
        .iter()
        .rev()
        .find_map(|&seq| read_header(store.as_ref(), seq).ok())
        .map(|header| header.repository_id);
    let absent = error.is_not_found();
    match known_id {
        Some(repository_id) => {
            let marker = Marker::new(repository_id);
            if writable {
                store.put(&key, &marker.encode()?, PutMode::Replace)?;
            }
            Ok(marker)
        }
        None if absent && writable => {
            let marker = Marker::new(format!("{:032x}", random_u128()));
            store.put(&key, &marker.encode()?, PutMode::IfAbsent)?;
            Ok(marker)
        }
        None if absent => Err(Error::NotARepository {
            root: store.root(),
            reason: format!("there is no `{}`", names::MARKER_NAME),
        }),
        None => Err(error),
    }
}
