//! Keys of encrypted repositories, and the cipher of their pages (FORMAT.md, section "Encryption").
//!
//! The only place that names an algorithm. Without the feature `encryption` there are keys and no cipher: what
//! needs one is refused by name.

#[cfg(feature = "encryption")]
#[path = "ring.rs"]
mod cipher;
#[cfg(not(feature = "encryption"))]
#[path = "absent.rs"]
mod cipher;

use std::fmt;

use crate::error::{Error, Result};

pub use cipher::{Cipher, random};

/// Length of every key.
pub const KEY_LENGTH_BYTES: usize = 32;

/// Length of what proves that a page is the one that was written.
pub const TAG_LENGTH_BYTES: usize = 16;

const OBJECTS_CONTEXT: &str = "varvite 2026 keys of encrypted objects v1";
const CHECK_CONTEXT: &str = "varvite 2026 key check v1";
const CHECK_DIGITS: usize = 32;

/// The secret of whoever may read a repository: 32 random bytes. It is never stored, and never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct MasterKey([u8; KEY_LENGTH_BYTES]);

impl MasterKey {
    /// A key of these bytes.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where there are not 32 of them, or all are the same: a placeholder.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        let key: [u8; KEY_LENGTH_BYTES] = bytes.try_into().map_err(|_| {
            Error::invalid("encryption key", format!("must be 32 bytes, but has: {}", bytes.len()))
        })?;
        if key.iter().all(|byte| *byte == key[0]) {
            let reason = "must be 32 random bytes, but all of its bytes are the same";
            return Err(Error::invalid("encryption key", reason));
        }
        Ok(Self(key))
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("MasterKey")
    }
}

/// What follows from a master key for one repository.
#[derive(Clone)]
pub struct RepositoryKeys {
    objects: [u8; KEY_LENGTH_BYTES],
    check: String,
}

impl RepositoryKeys {
    /// Keys of the repository with this identity, 32 hex digits.
    #[must_use]
    pub fn derive(master: &MasterKey, repository_id: &str) -> Self {
        let derive = |context| {
            let mut hasher = blake3::Hasher::new_derive_key(context);
            hasher.update(&master.0).update(repository_id.as_bytes()).finalize()
        };
        let check = derive(CHECK_CONTEXT).to_hex()[..CHECK_DIGITS].to_owned();
        Self { objects: *derive(OBJECTS_CONTEXT).as_bytes(), check }
    }

    /// 32 hex digits that only the right key gives; they tell nothing of it.
    #[must_use]
    pub fn check(&self) -> &str {
        &self.check
    }

    /// The cipher of one object: of this name, with this head, and of no other.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where this build has none.
    pub fn cipher(&self, object: &str, head: &[u8]) -> Result<Cipher> {
        let mut hasher = blake3::Hasher::new_keyed(&self.objects);
        hasher.update(&(object.len() as u64).to_le_bytes()).update(object.as_bytes()).update(head);
        Cipher::new(hasher.finalize().as_bytes())
    }
}

impl fmt::Debug for RepositoryKeys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("RepositoryKeys")
    }
}

#[cfg(test)]
mod tests;
