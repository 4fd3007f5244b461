//! Opening: whose folder this is, the marker, and the identity of a new repository.

use std::sync::Arc;

use crate::crypt::{self, RepositoryKeys};
use crate::encrypted;
use crate::error::{Error, KeyProblem, Result};
use crate::format::encrypted::{HEAD_LENGTH_BYTES, Head};
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
    if options.encrypt && options.key.is_none() {
        return Err(Error::invalid("encryption", "needs a key"));
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

/// The marker of the repository.
///
/// # Errors
/// [`Error::NotARepository`] where there is none.
pub(super) fn require_marker(store: &dyn Store) -> Result<Marker> {
    read_marker(store).map_err(|error| if error.is_not_found() { no_marker(store) } else { error })
}

fn read_marker(store: &dyn Store) -> Result<Marker> {
    let bytes = store.get(&marker_key()?, limits::SMALL_OBJECT_LIMIT_BYTES)?;
    Marker::decode(&bytes)
}

fn marker_key() -> Result<Key> {
    Key::new(Folder::Root, names::MARKER_NAME)
}

fn no_marker(store: &dyn Store) -> Error {
    Error::NotARepository { root: store.root(), reason: format!("there is no `{}`", names::MARKER_NAME) }
}

/// Reads the marker; a writer makes it where there is none, and makes it anew where it is damaged but a
/// manifest still tells the identity. With it comes the store as the options' key shows it.
pub(super) fn open_marker(
    store: Arc<dyn Store>,
    listing: &Listing,
    writable: bool,
    options: &Options,
) -> Result<(Marker, Arc<dyn Store>)> {
    let error = match read_marker(store.as_ref()) {
        Ok(marker) => {
            if writable {
                marker.require_writable()?;
            }
            let entered = enter(store, &marker, options)?;
            return Ok((marker, entered));
        }
        Err(error) if error.is_not_found() || matches!(error, Error::Corrupt { .. }) => error,
        Err(error) => return Err(error),
    };
    let absent = error.is_not_found();
    let (marker, mode) = match known_marker(&store, listing, options)? {
        Some(marker) => (marker, PutMode::Replace),
        None if absent && writable => (new_marker(options)?, PutMode::IfAbsent),
        None if absent => return Err(no_marker(store.as_ref())),
        None => return Err(error),
    };
    let entered = enter(store, &marker, options)?;
    if writable {
        entered.put(&marker_key()?, &marker.encode()?, mode)?;
    }
    Ok((marker, entered))
}

/// The store as the options' key shows it.
fn enter(store: Arc<dyn Store>, marker: &Marker, options: &Options) -> Result<Arc<dyn Store>> {
    if options.encrypt && marker.key_check.is_none() {
        return Err(Error::Key { root: store.root(), problem: KeyProblem::Plain });
    }
    encrypted::open(store, marker, options.key.as_ref())
}

fn new_marker(options: &Options) -> Result<Marker> {
    match &options.key {
        Some(key) if options.encrypt => {
            // Its keys follow from the identity, so nobody may foresee that.
            let repository_id = format!("{:032x}", u128::from_le_bytes(crypt::random()?));
            let key_check = RepositoryKeys::derive(key, &repository_id).check().to_owned();
            Ok(Marker::encrypted(repository_id, key_check))
        }
        _ => Ok(Marker::new(format!("{:032x}", random_u128()))),
    }
}

/// The marker that the snapshots tell of. Where one of them is encrypted the repository is, whatever lies beside
/// it.
///
/// # Errors
/// [`Error::Key`] where the key opens none of them.
fn known_marker(store: &Arc<dyn Store>, listing: &Listing, options: &Options) -> Result<Option<Marker>> {
    let mut is_encrypted = false;
    for &seq in listing.seqs.iter().rev() {
        let Ok(head) = read_head(store.as_ref(), seq) else { continue };
        is_encrypted = true;
        let Some(key) = &options.key else { break };
        let keys = RepositoryKeys::derive(key, &head.repository_id);
        let marker = Marker::encrypted(head.repository_id, keys.check().to_owned());
        let entered = encrypted::open(Arc::clone(store), &marker, Some(key))?;
        if read_header(entered.as_ref(), seq).is_ok() {
            return Ok(Some(marker));
        }
    }
    if is_encrypted {
        let problem = if options.key.is_some() { KeyProblem::Wrong } else { KeyProblem::Missing };
        return Err(Error::Key { root: store.root(), problem });
    }
    let header = listing.seqs.iter().rev().find_map(|&seq| read_header(store.as_ref(), seq).ok());
    Ok(header.map(|header| Marker::new(header.repository_id)))
}

/// What an encrypted manifest says in the clear; of one that is not encrypted, that it is damaged.
pub(super) fn read_head(store: &dyn Store, seq: u64) -> Result<Head> {
    let key = Key::new(Folder::Snapshots, &names::manifest_name(seq))?;
    let object = store.open(&key)?;
    let mut bytes = vec![0; HEAD_LENGTH_BYTES.min(object.length_bytes()) as usize];
    object.read_at(0, &mut bytes)?;
    Head::decode(&key.to_string(), &bytes)
}
