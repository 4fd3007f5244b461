//! In place of a cipher, where this build has none.

use super::{KEY_LENGTH_BYTES, TAG_LENGTH_BYTES};
use crate::error::{Error, Result};

/// No value of this type exists.
#[derive(Debug)]
pub enum Cipher {}

impl Cipher {
    pub(super) fn new(_key: &[u8; KEY_LENGTH_BYTES]) -> Result<Self> {
        Err(absent())
    }

    /// Never called.
    ///
    /// # Errors
    /// None.
    pub fn seal(&self, _number: u64, _is_last: bool, _page: &mut [u8]) -> Result<[u8; TAG_LENGTH_BYTES]> {
        match *self {}
    }

    /// Never called.
    #[must_use]
    pub fn open(&self, _number: u64, _is_last: bool, _page: &mut [u8], _tag: [u8; TAG_LENGTH_BYTES]) -> bool {
        match *self {}
    }
}

/// Refuses: randomness is wanted for encryption alone.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn random<const LENGTH: usize>() -> Result<[u8; LENGTH]> {
    Err(absent())
}

fn absent() -> Error {
    Error::Unsupported {
        what: "encryption",
        object: "this build".to_owned(),
        found: "AES-256-GCM".to_owned(),
        supported: "builds with the feature `encryption`".to_owned(),
    }
}
