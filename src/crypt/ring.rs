//! AES-256-GCM of `ring`, and the randomness of the system.
//!
//! `ring` is in the tree with `cloud` already, and is six times as fast here as what pure Rust has.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use super::{KEY_LENGTH_BYTES, TAG_LENGTH_BYTES};
use crate::error::{Error, Result};

/// The cipher of one object, whose key no other object has.
///
/// IMPORTANT: two different pages that are sealed under one key and number reveal both, and let others forge
/// more. So a key belongs to one object that is written once, and [`Cipher::seal`] is called once a number.
#[derive(Debug)]
pub struct Cipher(LessSafeKey);

impl Cipher {
    pub(super) fn new(key: &[u8; KEY_LENGTH_BYTES]) -> Result<Self> {
        let key = UnboundKey::new(&AES_256_GCM, key)
            .map_err(|_| Error::Internal { what: "AES-256-GCM refuses a key of 32 bytes".to_owned() })?;
        Ok(Self(LessSafeKey::new(key)))
    }

    /// Encrypts a page where it lies and returns its tag.
    ///
    /// # Errors
    /// [`Error::Internal`] where the page is longer than the cipher takes, 64 GiB.
    pub fn seal(&self, number: u64, is_last: bool, page: &mut [u8]) -> Result<[u8; TAG_LENGTH_BYTES]> {
        let sealed = self.0.seal_in_place_separate_tag(nonce(number, is_last), Aad::empty(), page);
        sealed
            .ok()
            .and_then(|tag| tag.as_ref().try_into().ok())
            .ok_or_else(|| Error::Internal { what: format!("a page of {} bytes is not sealed", page.len()) })
    }

    /// Decrypts a page where it lies; false where it is not the one that was sealed, and nothing of it may be
    /// used then.
    #[must_use]
    pub fn open(&self, number: u64, is_last: bool, page: &mut [u8], tag: [u8; TAG_LENGTH_BYTES]) -> bool {
        let nonce = nonce(number, is_last);
        self.0.open_in_place_separate_tag(nonce, Aad::empty(), Tag::from(tag), page, 0..).is_ok()
    }
}

/// Never the same for two pages of one object: each has its own number.
fn nonce(number: u64, is_last: bool) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8] = u8::from(is_last);
    Nonce::assume_unique_for_key(bytes)
}

/// Bytes that nobody can guess.
///
/// # Errors
/// [`Error::Store`] where the system has none.
pub fn random<const LENGTH: usize>() -> Result<[u8; LENGTH]> {
    let mut bytes = [0; LENGTH];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| Error::store("read random bytes of", "the system")(std::io::ErrorKind::Other.into()))?;
    Ok(bytes)
}
