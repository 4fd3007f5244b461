//! The form of encrypted objects: a head in the clear, then pages (FORMAT.md, section "Encryption").
//!
//! Only the layout stands here. What the bytes of a page are is the business of `crypt`, which has the key.

use std::ops::Range;

use crate::crypt::TAG_LENGTH_BYTES;
use crate::digest::{parse_hex_u128, xxh3_64};
use crate::error::{Error, Result};

use super::fields::Fields;
use super::model::Header;
use super::pack::{check_frame, hex, id_bytes};
use super::place::Place;
use super::versions::{ENCRYPTION_FLAG, FORMAT_VERSION, require_flags};

/// Length of the head, at offset 0.
pub const HEAD_LENGTH_BYTES: u64 = 128;

/// Bytes of the object that one page holds; the last one may hold fewer.
pub const PAGE_BYTES: u64 = 16 << 10;

/// Bytes of a page as they are stored, but for the last one.
pub const STORED_PAGE_BYTES: u64 = PAGE_BYTES + TAG_BYTES;

const TAG_BYTES: u64 = TAG_LENGTH_BYTES as u64;
const MAGIC: &[u8; 4] = b"VVEO";
const SALT_LENGTH_BYTES: usize = 32;
const CHECKSUM_OFFSET_BYTES: u64 = HEAD_LENGTH_BYTES - 8;

/// What stands in the clear before the pages of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Repository it was written for: 32 lower-case hex digits.
    pub repository_id: String,
    /// Random bytes that no other object has: they make its key its own.
    pub salt: [u8; SALT_LENGTH_BYTES],
    /// What anybody may know of a snapshot; zeros for what is no manifest.
    pub facts: Facts,
}

/// What anybody may know of a snapshot. Only a reader with the key can tell whether it is true.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Commit number.
    pub seq: u64,
    /// Training step.
    pub step: u64,
    /// Milliseconds since 1970-01-01 UTC: a label.
    pub created_at_unix_ms: u64,
    /// Raw bytes of the state.
    pub raw_bytes: u64,
    /// Bytes of the packs that the save wrote.
    pub stored_bytes: u64,
    /// Ranks that saved it.
    pub world_size: u32,
    /// The number that is the session which made it, in hex.
    pub session: u128,
}

impl From<&Header> for Facts {
    fn from(header: &Header) -> Self {
        Self {
            seq: header.seq,
            step: header.step,
            created_at_unix_ms: header.created_at_unix_ms,
            raw_bytes: header.raw_bytes,
            stored_bytes: header.stored_bytes,
            world_size: header.world_size,
            session: parse_hex_u128(&header.session_id).unwrap_or(0),
        }
    }
}

impl Head {
    /// Bytes of the head.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where the identity is not 32 lower-case hex digits.
    pub fn encode(&self) -> Result<[u8; HEAD_LENGTH_BYTES as usize]> {
        let Self { repository_id, salt, facts } = self;
        let mut bytes = Vec::with_capacity(HEAD_LENGTH_BYTES as usize);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&(FORMAT_VERSION as u16).to_le_bytes());
        bytes.extend_from_slice(&(ENCRYPTION_FLAG as u16).to_le_bytes());
        bytes.extend_from_slice(&id_bytes("repository id", repository_id)?);
        bytes.extend_from_slice(salt);
        for number in [facts.seq, facts.step, facts.created_at_unix_ms, facts.raw_bytes, facts.stored_bytes] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(&facts.world_size.to_le_bytes());
        bytes.extend_from_slice(&facts.session.swap_bytes().to_le_bytes());
        bytes.resize(CHECKSUM_OFFSET_BYTES as usize, 0);
        let checksum = xxh3_64(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes.try_into().map_err(|_| Error::Internal { what: "a head has another length".to_owned() })
    }

    /// Reads the head at the front of the object; bytes after it are ignored.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for damage; [`Error::Unsupported`] where a newer version must read it.
    pub fn decode(object: &str, bytes: &[u8]) -> Result<Self> {
        let place = Place::new(object, 0);
        let mut fields = Fields::new(place, bytes);
        fields.constant("magic of an encrypted object", MAGIC)?;
        check_frame(place, "head", bytes, CHECKSUM_OFFSET_BYTES)?;
        let version = fields.u16("format version")?;
        let flags_place = fields.place();
        let reader_flags = u64::from(fields.u16("reader flags")?);
        require_flags(place, u32::from(version), reader_flags, ENCRYPTION_FLAG)?;
        if reader_flags != ENCRYPTION_FLAG {
            return Err(flags_place.corrupt("reader flags", ENCRYPTION_FLAG, reader_flags));
        }
        let repository_id = hex(fields.array("repository id")?);
        let salt = fields.array("salt")?;
        let facts = Facts {
            seq: fields.u64("seq")?,
            step: fields.u64("step")?,
            created_at_unix_ms: fields.u64("time")?,
            raw_bytes: fields.u64("raw bytes")?,
            stored_bytes: fields.u64("stored bytes")?,
            world_size: fields.u32("world size")?,
            session: fields.u128("session id")?.swap_bytes(),
        };
        fields.constant("reserved bytes", &[0; 4])?;
        Ok(Self { repository_id, salt, facts })
    }
}

/// True where an object begins as an encrypted one does.
#[must_use]
pub fn is_encrypted(prefix: &[u8]) -> bool {
    prefix.starts_with(MAGIC)
}

/// Length of the encrypted object that holds an object of this length.
#[must_use]
pub fn stored_length_bytes(length_bytes: u64) -> u64 {
    let page_count = length_bytes.div_ceil(PAGE_BYTES).max(1);
    HEAD_LENGTH_BYTES.saturating_add(length_bytes).saturating_add(page_count.saturating_mul(TAG_BYTES))
}

/// Length of the object in an encrypted one of this length; `None` where no object gives that.
#[must_use]
pub fn length_bytes(stored_length_bytes: u64) -> Option<u64> {
    let pages_bytes = stored_length_bytes.checked_sub(HEAD_LENGTH_BYTES)?;
    let page_count = pages_bytes.div_ceil(STORED_PAGE_BYTES);
    let length_bytes = pages_bytes.checked_sub(page_count.checked_mul(TAG_BYTES)?)?;
    (self::stored_length_bytes(length_bytes) == stored_length_bytes).then_some(length_bytes)
}

/// Pages of an encrypted object that hold some bytes, and where they lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Their numbers.
    pub numbers: Range<u64>,
    /// Their bytes, from the first one of the encrypted object. With the first page comes the head.
    pub stored: Range<u64>,
}

impl Pages {
    /// The pages that hold `range` of an object of `length_bytes`, which it lies within. At least one.
    #[must_use]
    pub fn holding(range: &Range<u64>, length_bytes: u64) -> Self {
        let page_of = |offset_bytes: u64| offset_bytes.div_euclid(PAGE_BYTES);
        let last = page_of(range.end.saturating_sub(1).max(range.start)).min(last_page(length_bytes));
        let numbers = page_of(range.start).min(last)..last.saturating_add(1);
        let start = if numbers.start == 0 { 0 } else { page_offset_bytes(numbers.start) };
        let end = page_offset_bytes(numbers.end).min(stored_length_bytes(length_bytes));
        Self { numbers, stored: start..end }
    }
}

/// Number of the last page of an object.
#[must_use]
pub fn last_page(length_bytes: u64) -> u64 {
    length_bytes.div_ceil(PAGE_BYTES).saturating_sub(1)
}

/// Where a page lies in the encrypted object.
#[must_use]
pub fn page_offset_bytes(number: u64) -> u64 {
    HEAD_LENGTH_BYTES.saturating_add(number.saturating_mul(STORED_PAGE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJECT: &str = "snapshots/5.json";

    fn head() -> Head {
        let facts = Facts {
            seq: 5,
            step: 1_000,
            created_at_unix_ms: 1_790_000_000_000,
            raw_bytes: 1 << 40,
            stored_bytes: 77,
            world_size: 8,
            session: 0x0011_2233_4455_6677_8899_aabb_ccdd_eeff,
        };
        Head { repository_id: "00112233445566778899aabbccddeeff".to_owned(), salt: [9; 32], facts }
    }

    fn resealed(change: impl Fn(&mut [u8])) -> Result<Head> {
        let mut bytes = head().encode().unwrap();
        change(&mut bytes);
        let checksum = xxh3_64(&bytes[..120]);
        bytes[120..].copy_from_slice(&checksum.to_le_bytes());
        Head::decode(OBJECT, &bytes)
    }

    #[test]
    fn a_head_round_trips_and_no_bit_of_it_can_change() {
        let bytes = head().encode().unwrap();
        assert!(is_encrypted(&bytes) && !is_encrypted(b"{\"magic\""));
        assert_eq!(Head::decode(OBJECT, &bytes).unwrap(), head());
        // Identities stand in the order of their digits.
        assert_eq!(
            (&bytes[100..116], &bytes[8..24]),
            (
                &[
                    0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee,
                    0xff
                ][..],
                &bytes[100..116]
            )
        );
        for bit in 0..8 * bytes.len() {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            let error = Head::decode(OBJECT, &changed).unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "bit {bit}: {error}");
        }
        for length in 0..bytes.len() {
            assert!(matches!(Head::decode(OBJECT, &bytes[..length]), Err(Error::Corrupt { .. })), "{length}");
        }
    }

    #[test]
    fn a_head_of_the_future_is_unsupported_and_one_that_says_it_is_plain_is_damage() {
        let unsupported =
            |found| move |error| matches!(&error, Error::Unsupported { what, .. } if *what == found);
        assert!(unsupported("format version")(resealed(|bytes| bytes[4] = 2).unwrap_err()));
        assert!(unsupported("reader flag")(resealed(|bytes| bytes[6] |= 1).unwrap_err()));
        assert!(matches!(resealed(|bytes| bytes[6] = 0), Err(Error::Corrupt { .. })));
        assert!(matches!(resealed(|bytes| bytes[119] = 1), Err(Error::Corrupt { .. })));
        assert_eq!(resealed(|_| ()).unwrap(), head());
    }

    #[test]
    fn lengths_go_there_and_back_and_no_other_length_is_possible() {
        let mut possible = std::collections::HashSet::new();
        for length in 0..3 * PAGE_BYTES + 10 {
            let stored = stored_length_bytes(length);
            assert_eq!(length_bytes(stored), Some(length));
            possible.insert(stored);
        }
        assert_eq!(stored_length_bytes(0), 128 + 16);
        assert_eq!(stored_length_bytes(PAGE_BYTES), 128 + PAGE_BYTES + 16);
        assert_eq!(stored_length_bytes(PAGE_BYTES + 1), 128 + PAGE_BYTES + 1 + 32);
        for stored in 0..stored_length_bytes(3 * PAGE_BYTES) {
            assert_eq!(length_bytes(stored).is_some(), possible.contains(&stored), "{stored}");
        }
        assert_eq!(stored_length_bytes(u64::MAX), u64::MAX);
    }

    #[test]
    fn a_range_lies_in_the_pages_that_hold_it() {
        let length = 2 * PAGE_BYTES + 100;
        let end = stored_length_bytes(length);
        let pages = |range: Range<u64>| {
            let Pages { numbers, stored } = Pages::holding(&range, length);
            (numbers, stored)
        };
        let (second, third) = (page_offset_bytes(1), page_offset_bytes(2));
        assert_eq!((second, third), (128 + 16_400, 128 + 32_800));
        assert_eq!(pages(0..1), (0..1, 0..second));
        assert_eq!(pages(5..5), (0..1, 0..second));
        assert_eq!(pages(PAGE_BYTES - 1..PAGE_BYTES + 1), (0..2, 0..third));
        assert_eq!(pages(PAGE_BYTES..2 * PAGE_BYTES), (1..2, second..third));
        assert_eq!(pages(2 * PAGE_BYTES..length), (2..3, third..end));
        assert_eq!(pages(length..length), (2..3, third..end));
        assert_eq!(Pages::holding(&(0..0), 0).stored, 0..stored_length_bytes(0));
        let whole = Pages::holding(&(PAGE_BYTES..PAGE_BYTES), PAGE_BYTES);
        assert_eq!((whole.numbers, whole.stored), (0..1, 0..second));
    }
}
