//! Digests: XXH3-128 for chunks, BLAKE3 for the identity of a whole state.
//!
//! A chunk digest is identity *within one repository* and integrity against rot; it is not
//! cryptographic and never compared across owners (FORMAT.md, section "Digests").

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use twox_hash::{XxHash3_64, XxHash3_128};

use crate::kernel;

/// Shorter bytes gain nothing from being asked for ahead of time.
const UNCACHED_FROM_BYTES: usize = 64 << 10;

/// XXH3-64 with seed 0.
#[must_use]
pub fn xxh3_64(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// XXH3-128 with seed 0; chooses the widest vectors of the machine when it runs.
#[must_use]
pub fn xxh3_128(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}

/// XXH3-128 of a chunk's raw bytes (seed 0).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkDigest(pub u128);

impl ChunkDigest {
    /// Digest of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxh3_128(bytes))
    }

    /// The same digest, for bytes that are not in the cache: half as fast again there, slower in the cache.
    #[must_use]
    pub fn of_uncached(bytes: &[u8]) -> Self {
        if bytes.len() < UNCACHED_FROM_BYTES {
            return Self::of(bytes);
        }
        let mut hasher = XxHash3_128::new();
        kernel::fetch::walk(bytes, |piece| hasher.write(piece));
        Self(hasher.finish_128())
    }

    /// Digest of a sequence of chunks: of their digests one after the other, 16 bytes each, little-endian.
    #[must_use]
    pub fn of_digests(digests: &[Self]) -> Self {
        let bytes: Vec<u8> = digests.iter().flat_map(|digest| digest.0.to_le_bytes()).collect();
        Self::of(&bytes)
    }
}

impl fmt::Display for ChunkDigest {
    /// 32 lower-case hex digits.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

impl fmt::Debug for ChunkDigest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

impl Serialize for ChunkDigest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ChunkDigest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        parse_hex_u128(&text)
            .map(Self)
            .ok_or_else(|| D::Error::custom("a digest is 32 lower-case hex digits"))
    }
}

/// Reads exactly 32 lower-case hex digits.
#[must_use]
pub fn parse_hex_u128(text: &str) -> Option<u128> {
    let canonical = text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if canonical { u128::from_str_radix(text, 16).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::ChunkDigest;

    #[test]
    fn a_sequence_of_chunks_has_the_digest_of_their_digests_little_endian() {
        let digests = [ChunkDigest(1), ChunkDigest(0x0102 << 112)];
        let mut bytes = [0; 32];
        (bytes[0], bytes[30], bytes[31]) = (1, 2, 1);
        assert_eq!(ChunkDigest::of_digests(&digests), ChunkDigest::of(&bytes));
        assert_eq!(ChunkDigest::of_digests(&[]), ChunkDigest::of(&[]));
        assert_ne!(ChunkDigest::of_digests(&digests[..1]), digests[0]);
    }

    #[test]
    fn bytes_outside_of_the_cache_have_the_same_digest() {
        for length in [0_u32, 1, 65_535, 65_536, 100_001, 1 << 20] {
            let bytes: Vec<u8> = (0..length).map(|index| (index * 31 + (index >> 9)) as u8).collect();
            assert_eq!(ChunkDigest::of_uncached(&bytes), ChunkDigest::of(&bytes), "{length}");
        }
    }
}
