//! The frame of a pack: fixed header, alignment of chunks, fixed trailer (FORMAT.md, section "Pack").
//!
//! What stands between them is in `footer` (chunk table and part) or is the chunks themselves, which are
//! not the business of this folder.

use crate::digest::{xxh3_64, xxh3_128};

use crate::digest::parse_hex_u128;
use crate::error::{Error, Result};

use super::fields::Fields;
use super::limits;
use super::names::is_id;
use super::place::Place;
use super::versions::{FORMAT_VERSION, require_readable, unsupported};

pub use super::chunk_table::PackChunk;
pub use super::footer::{Footer, decode_footer, encode_footer};

/// Length of the header, at offset 0.
pub const HEADER_LENGTH_BYTES: u64 = 64;

/// Length of the trailer, at the very end.
pub const TRAILER_LENGTH_BYTES: u64 = 64;

/// Length of the fixed part of the footer.
pub(super) const FOOTER_START_LENGTH_BYTES: u64 = 64;

/// Length of a pack without chunks and part.
pub const SMALLEST_PACK_LENGTH_BYTES: u64 =
    HEADER_LENGTH_BYTES + FOOTER_START_LENGTH_BYTES + TRAILER_LENGTH_BYTES;

/// Longest footer.
pub const FOOTER_LIMIT_BYTES: u64 = FOOTER_START_LENGTH_BYTES
    + limits::CHUNK_COUNT_LIMIT * super::chunk_table::ROW_LENGTH_BYTES
    + limits::MANIFEST_LIMIT_BYTES;

/// Offsets of chunks of at least [`LARGE_CHUNK_BYTES`] are multiples of this: pages can be mapped.
pub const LARGE_ALIGNMENT_BYTES: u64 = 4_096;

/// Offsets of all other chunks, and of the footer, are multiples of this: cache lines.
pub const SMALL_ALIGNMENT_BYTES: u64 = 64;

/// Stored length from which a chunk counts as large.
pub const LARGE_CHUNK_BYTES: u64 = 65_536;

const HEADER_MAGIC: &[u8; 4] = b"VVPK";
const TRAILER_MAGIC: &[u8; 8] = b"VVPKTAIL";

/// Alignment of a chunk of this stored length.
#[must_use]
pub fn alignment_of(stored_length_bytes: u64) -> u64 {
    if stored_length_bytes >= LARGE_CHUNK_BYTES { LARGE_ALIGNMENT_BYTES } else { SMALL_ALIGNMENT_BYTES }
}

/// Zero bytes to write at `position_bytes` before a chunk of this stored length.
#[must_use]
pub fn padding_before(position_bytes: u64, stored_length_bytes: u64) -> u64 {
    padding_to(position_bytes, alignment_of(stored_length_bytes))
}

pub(super) fn padding_to(position_bytes: u64, alignment_bytes: u64) -> u64 {
    match position_bytes.checked_rem(alignment_bytes) {
        None | Some(0) => 0,
        Some(excess_bytes) => alignment_bytes.saturating_sub(excess_bytes),
    }
}

/// Why a pack was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PackKind {
    /// By a save: its footer has a part.
    Save,
    /// By a merge: live chunks of older packs.
    Merge,
}

impl PackKind {
    fn number(self) -> u8 {
        match self {
            Self::Save => 0,
            Self::Merge => 1,
        }
    }
}

/// What the first bytes of a pack say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackHeader {
    /// Repository it was written for: 32 lower-case hex digits.
    pub repository_id: String,
    /// Save session, or merge, that wrote it: 32 lower-case hex digits.
    pub session_id: String,
    /// Commit number of that session.
    pub seq: u64,
    /// Rank that wrote it.
    pub rank: u32,
    /// Why it was written.
    pub kind: PackKind,
}

/// Bytes of a header.
///
/// # Errors
/// [`Error::InvalidInput`] where an identity is not 32 lower-case hex digits or the seq is 0.
pub fn encode_header(header: &PackHeader) -> Result<[u8; HEADER_LENGTH_BYTES as usize]> {
    if header.seq == 0 {
        return Err(Error::invalid("seq of a pack", "must be at least 1"));
    }
    let mut bytes = Vec::with_capacity(HEADER_LENGTH_BYTES as usize);
    bytes.extend_from_slice(HEADER_MAGIC);
    bytes.extend_from_slice(&(FORMAT_VERSION as u16).to_le_bytes());
    bytes.extend_from_slice(&0_u16.to_le_bytes());
    bytes.extend_from_slice(&id_bytes("repository id", &header.repository_id)?);
    bytes.extend_from_slice(&id_bytes("session id", &header.session_id)?);
    bytes.extend_from_slice(&header.seq.to_le_bytes());
    bytes.extend_from_slice(&header.rank.to_le_bytes());
    bytes.extend_from_slice(&[header.kind.number(), 0, 0, 0]);
    let checksum = xxh3_64(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes.try_into().map_err(|_| Error::Internal { what: "a pack header has another length".to_owned() })
}

/// Reads the header at the front of the pack `object`; bytes after it are ignored.
///
/// # Errors
/// [`Error::Corrupt`] for damage; [`Error::Unsupported`] where a newer version must read it.
pub fn decode_header(object: &str, bytes: &[u8]) -> Result<PackHeader> {
    let place = Place::new(object, 0);
    let mut fields = Fields::new(place, bytes);
    fields.constant("magic", HEADER_MAGIC)?;
    check_frame(place, "pack header", bytes, HEADER_LENGTH_BYTES.saturating_sub(8))?;
    let version = fields.u16("format version")?;
    let reader_flags = fields.u16("reader flags")?;
    require_readable(place, u32::from(version), u64::from(reader_flags))?;
    let repository_id = hex(fields.array("repository id")?);
    let session_id = hex(fields.array("session id")?);
    let seq_place = fields.place();
    let seq = fields.u64("seq")?;
    if seq == 0 {
        return Err(seq_place.corrupt("seq", "at least 1", seq));
    }
    let rank = fields.u32("rank")?;
    let kind = match fields.u8("kind")? {
        0 => PackKind::Save,
        1 => PackKind::Merge,
        number => return Err(unsupported("pack kind", object, number.to_string())),
    };
    fields.constant("reserved bytes", &[0; 3])?;
    Ok(PackHeader { repository_id, session_id, seq, rank, kind })
}

/// Where the footer of a pack lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// Offset of the footer from the pack's first byte.
    pub footer_offset_bytes: u64,
    /// Length of the footer, which ends where the trailer begins.
    pub footer_length_bytes: u64,
    /// XXH3-128 of the footer.
    pub footer_digest: u128,
}

pub(super) fn encode_trailer(footer_offset_bytes: u64, footer: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(TRAILER_LENGTH_BYTES as usize);
    bytes.extend_from_slice(&footer_offset_bytes.to_le_bytes());
    bytes.extend_from_slice(&(footer.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&xxh3_128(footer).to_le_bytes());
    bytes.extend_from_slice(&[0; 16]);
    let checksum = xxh3_64(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes.extend_from_slice(TRAILER_MAGIC);
    bytes
}

/// Reads the trailer of the pack `object` from its last bytes; earlier bytes than those of the trailer
/// are ignored.
///
/// # Errors
/// [`Error::Corrupt`] where the pack was cut off or is damaged.
pub fn decode_trailer(object: &str, object_length_bytes: u64, last_bytes: &[u8]) -> Result<Trailer> {
    let Some(bytes) = last_bytes.last_chunk::<{ TRAILER_LENGTH_BYTES as usize }>() else {
        let expected = format!("at least {SMALLEST_PACK_LENGTH_BYTES} bytes");
        return Err(Place::new(object, 0).corrupt("length", expected, object_length_bytes));
    };
    if object_length_bytes < SMALLEST_PACK_LENGTH_BYTES {
        let expected = format!("at least {SMALLEST_PACK_LENGTH_BYTES} bytes");
        return Err(Place::new(object, 0).corrupt("length", expected, object_length_bytes));
    }
    let trailer_offset_bytes = object_length_bytes.saturating_sub(TRAILER_LENGTH_BYTES);
    let place = Place::new(object, trailer_offset_bytes);
    let checksum_offset_bytes = TRAILER_LENGTH_BYTES.saturating_sub(16);
    let magic = bytes.last_chunk::<8>().unwrap_or(TRAILER_MAGIC);
    Fields::new(place.after(TRAILER_LENGTH_BYTES.saturating_sub(8)), magic)
        .constant("magic at the end", TRAILER_MAGIC)?;
    check_frame(place, "trailer", bytes, checksum_offset_bytes)?;
    let mut fields = Fields::new(place, bytes);
    let footer_offset_bytes = fields.u64("footer offset")?;
    let footer_length_bytes = fields.u64("footer length")?;
    let footer_digest = fields.u128("footer digest")?;
    fields.constant("reserved bytes", &[0; 16])?;
    if !(FOOTER_START_LENGTH_BYTES..=FOOTER_LIMIT_BYTES).contains(&footer_length_bytes) {
        let expected = format!("{FOOTER_START_LENGTH_BYTES} to {FOOTER_LIMIT_BYTES}");
        return Err(place.after(8).corrupt("footer length", expected, footer_length_bytes));
    }
    let ends_at_trailer = footer_offset_bytes.checked_add(footer_length_bytes) == Some(trailer_offset_bytes);
    let is_aligned = footer_offset_bytes.is_multiple_of(SMALL_ALIGNMENT_BYTES);
    if footer_offset_bytes < HEADER_LENGTH_BYTES || !is_aligned || !ends_at_trailer {
        let expected = format!(
            "a multiple of {SMALL_ALIGNMENT_BYTES} that is {footer_length_bytes} before the trailer at {trailer_offset_bytes}"
        );
        return Err(place.corrupt("footer offset", expected, footer_offset_bytes));
    }
    Ok(Trailer { footer_offset_bytes, footer_length_bytes, footer_digest })
}

/// Checks the XXH3-64 that stands at `checksum_offset_bytes` and covers what is before it.
pub(super) fn check_frame(
    place: Place<'_>,
    what: &str,
    bytes: &[u8],
    checksum_offset_bytes: u64,
) -> Result<()> {
    let (covered, rest) = bytes
        .split_at_checked(checksum_offset_bytes as usize)
        .ok_or_else(|| place.corrupt(format!("length of the {what}"), "64 bytes", bytes.len()))?;
    let checksum_place = place.after(checksum_offset_bytes);
    let expected = Fields::new(checksum_place, rest).u64(what)?;
    let found = xxh3_64(covered);
    if found == expected {
        return Ok(());
    }
    Err(checksum_place.corrupt(
        format!("checksum of the {what}"),
        format!("{expected:016x}"),
        format!("{found:016x}"),
    ))
}

/// Bytes of an identity, in the order of its text.
pub(super) fn id_bytes(what: &'static str, id: &str) -> Result<[u8; 16]> {
    let number = parse_hex_u128(id).filter(|_| is_id(id));
    let mut bytes =
        number.ok_or_else(|| Error::invalid(what, "must be 32 lower-case hex digits"))?.to_le_bytes();
    bytes.reverse();
    Ok(bytes)
}

pub(super) fn hex(mut bytes: [u8; 16]) -> String {
    bytes.reverse();
    format!("{:032x}", u128::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> PackHeader {
        PackHeader {
            repository_id: "00112233445566778899aabbccddeeff".to_owned(),
            session_id: "ffeeddccbbaa99887766554433221100".to_owned(),
            seq: 42,
            rank: 7,
            kind: PackKind::Save,
        }
    }

    /// A header with other bytes and a checksum that is right.
    fn resealed(offset: usize, replacement: &[u8]) -> Vec<u8> {
        let mut bytes = encode_header(&header()).unwrap().to_vec();
        bytes[offset..offset + replacement.len()].copy_from_slice(replacement);
        let checksum = xxh3_64(&bytes[..56]);
        bytes[56..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    fn corrupt_parts(error: &Error) -> (u64, &str, &str) {
        match error {
            Error::Corrupt { object, offset_bytes, what, found, .. } => {
                assert_eq!(object, "packs/x");
                (*offset_bytes, what, found)
            }
            other => panic!("not damage: {other:?}"),
        }
    }

    #[test]
    fn headers_round_trip_and_show_ids_in_reading_order() {
        for kind in [PackKind::Save, PackKind::Merge] {
            let header = PackHeader { kind, ..header() };
            let bytes = encode_header(&header).unwrap();
            assert_eq!(bytes[8..12], [0x00, 0x11, 0x22, 0x33]);
            assert_eq!(decode_header("packs/x", &bytes).unwrap(), header);
        }
    }

    #[test]
    fn a_header_without_identity_or_seq_is_never_written() {
        let error = encode_header(&PackHeader { session_id: "x".to_owned(), ..header() }).unwrap_err();
        assert!(matches!(&error, Error::InvalidInput { what, .. } if what == "session id"), "{error:?}");
        let error = encode_header(&PackHeader { seq: 0, ..header() }).unwrap_err();
        assert!(matches!(&error, Error::InvalidInput { what, .. } if what == "seq of a pack"), "{error:?}");
    }

    #[test]
    fn a_header_with_another_magic_is_refused() {
        let error = decode_header("packs/x", &resealed(0, b"VVPQ")).unwrap_err();
        assert_eq!(corrupt_parts(&error), (0, "magic", "VVPQ"));
    }

    #[test]
    fn a_header_with_a_wrong_checksum_is_refused() {
        let mut bytes = encode_header(&header()).unwrap();
        bytes[40] ^= 1;
        let error = decode_header("packs/x", &bytes).unwrap_err();
        assert_eq!((corrupt_parts(&error).0, corrupt_parts(&error).1), (56, "checksum of the pack header"));
    }

    #[test]
    fn a_short_header_is_refused() {
        let bytes = encode_header(&header()).unwrap();
        let error = decode_header("packs/x", &bytes[..40]).unwrap_err();
        assert_eq!(corrupt_parts(&error), (0, "length of the pack header", "40"));
        let error = decode_header("packs/x", &bytes[..60]).unwrap_err();
        assert_eq!(corrupt_parts(&error), (56, "pack header", "4 bytes"));
    }

    #[test]
    fn a_header_of_the_future_is_unsupported() {
        let error = decode_header("packs/x", &resealed(4, &[2, 0])).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "format version", found, .. } if found == "2"),
            "{error:?}"
        );
        let error = decode_header("packs/x", &resealed(6, &[4, 0])).unwrap_err();
        assert!(matches!(&error, Error::Unsupported { what: "reader flag", .. }), "{error:?}");
        let error = decode_header("packs/x", &resealed(52, &[9])).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "pack kind", found, .. } if found == "9"),
            "{error:?}"
        );
    }

    #[test]
    fn a_header_with_seq_zero_or_reserved_bytes_is_refused() {
        let error = decode_header("packs/x", &resealed(40, &[0; 8])).unwrap_err();
        assert_eq!(corrupt_parts(&error), (40, "seq", "0"));
        let error = decode_header("packs/x", &resealed(53, &[0, 1, 0])).unwrap_err();
        assert_eq!(corrupt_parts(&error), (53, "reserved bytes", "\\x00\\x01\\x00"));
    }

    #[test]
    fn padding_leads_to_the_next_multiple() {
        assert_eq!(padding_before(64, 10), 0);
        assert_eq!(padding_before(65, 10), 63);
        assert_eq!(padding_before(4_096, LARGE_CHUNK_BYTES), 0);
        assert_eq!(padding_before(4_160, LARGE_CHUNK_BYTES), 4_032);
        assert_eq!(padding_before(4_160, LARGE_CHUNK_BYTES - 1), 0);
    }

    fn trailer_of(footer_offset_bytes: u64, footer_length_bytes: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&footer_offset_bytes.to_le_bytes());
        bytes.extend_from_slice(&footer_length_bytes.to_le_bytes());
        bytes.extend_from_slice(&[0; 32]);
        let checksum = xxh3_64(&bytes);
        bytes.extend_from_slice(&checksum.to_le_bytes());
        bytes.extend_from_slice(TRAILER_MAGIC);
        bytes
    }

    #[test]
    fn a_trailer_says_where_the_footer_is() {
        let bytes = encode_trailer(128, &[7; 100]);
        let trailer = decode_trailer("packs/x", 128 + 100 + 64, &bytes).unwrap();
        assert_eq!(
            trailer,
            Trailer {
                footer_offset_bytes: 128,
                footer_length_bytes: 100,
                footer_digest: xxh3_128(&[7; 100])
            }
        );
        let mut longer = vec![1, 2, 3];
        longer.extend_from_slice(&bytes);
        assert_eq!(decode_trailer("packs/x", 128 + 100 + 64, &longer).unwrap(), trailer);
    }

    #[test]
    fn a_pack_that_was_cut_off_is_refused() {
        let bytes = encode_trailer(128, &[7; 100]);
        let error = decode_trailer("packs/x", 291, &bytes).unwrap_err();
        assert_eq!(corrupt_parts(&error), (227, "footer offset", "128"));
        let error = decode_trailer("packs/x", 63, &bytes[..63]).unwrap_err();
        assert_eq!(corrupt_parts(&error), (0, "length", "63"));
        let error = decode_trailer("packs/x", 191, &bytes).unwrap_err();
        assert_eq!(corrupt_parts(&error), (0, "length", "191"));
        let error = decode_trailer("packs/x", 292, &[0; 64]).unwrap_err();
        assert_eq!((corrupt_parts(&error).0, corrupt_parts(&error).1), (284, "magic at the end"));
    }

    #[test]
    fn a_trailer_with_a_wrong_checksum_is_refused() {
        let mut bytes = encode_trailer(128, &[7; 100]);
        bytes[20] ^= 1;
        let error = decode_trailer("packs/x", 292, &bytes).unwrap_err();
        assert_eq!((corrupt_parts(&error).0, corrupt_parts(&error).1), (276, "checksum of the trailer"));
    }

    #[test]
    fn a_footer_outside_the_pack_is_refused() {
        for (offset, length) in [(0, 228), (100, 128), (192, 100), (u64::MAX - 63, 292)] {
            let error = decode_trailer("packs/x", 292, &trailer_of(offset, length)).unwrap_err();
            assert_eq!(corrupt_parts(&error), (228, "footer offset", offset.to_string().as_str()));
        }
    }

    #[test]
    fn a_footer_of_impossible_length_is_refused() {
        for length in [0, 63, FOOTER_LIMIT_BYTES + 1, u64::MAX] {
            let error = decode_trailer("packs/x", 292, &trailer_of(128, length)).unwrap_err();
            assert_eq!(corrupt_parts(&error), (236, "footer length", length.to_string().as_str()));
        }
    }
}
