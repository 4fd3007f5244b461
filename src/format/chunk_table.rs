//! The chunk table of a pack: what lies where, without any manifest (FORMAT.md, section "Pack footer").

use crate::digest::ChunkDigest;
use crate::error::Result;

use super::fields::Fields;
use super::limits::CHUNK_BYTES_RANGE;
use super::model::Codec;
use super::pack::{HEADER_LENGTH_BYTES, alignment_of};
use super::place::Place;
use super::versions::unsupported;

/// Length of one row of the table before compression.
pub(super) const ROW_LENGTH_BYTES: u64 = 48;

/// A chunk of a pack, as its chunk table describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackChunk {
    /// Offset of the stored bytes from the pack's first byte.
    pub offset_bytes: u64,
    /// Number of stored bytes.
    pub stored_length_bytes: u64,
    /// Number of raw bytes.
    pub raw_length_bytes: u64,
    /// How stored bytes become raw bytes.
    pub codec: Codec,
    /// Digest of the raw bytes.
    pub digest: ChunkDigest,
}

pub(super) fn encode_rows(chunks: &[PackChunk]) -> Vec<u8> {
    let mut rows = Vec::with_capacity(chunks.len().saturating_mul(ROW_LENGTH_BYTES as usize));
    for chunk in chunks {
        let ChunkDigest(digest) = chunk.digest;
        rows.extend_from_slice(&chunk.offset_bytes.to_le_bytes());
        rows.extend_from_slice(&chunk.stored_length_bytes.to_le_bytes());
        rows.extend_from_slice(&chunk.raw_length_bytes.to_le_bytes());
        rows.extend_from_slice(&chunk.codec.number().to_le_bytes());
        rows.extend_from_slice(&digest.to_le_bytes());
    }
    rows
}

/// Reads rows whose total length has been checked.
pub(super) fn decode_rows(place: Place<'_>, rows: &[u8]) -> Result<Vec<PackChunk>> {
    let (rows, rest) = rows.as_chunks::<{ ROW_LENGTH_BYTES as usize }>();
    if !rest.is_empty() {
        return Err(place.corrupt(
            "chunk table",
            format!("rows of {ROW_LENGTH_BYTES} bytes"),
            "a part of a row",
        ));
    }
    rows.iter().map(|row| decode_row(place, row)).collect()
}

fn decode_row(place: Place<'_>, row: &[u8]) -> Result<PackChunk> {
    let mut fields = Fields::new(place, row);
    let offset_bytes = fields.u64("offset of a chunk")?;
    let stored_length_bytes = fields.u64("stored length of a chunk")?;
    let raw_length_bytes = fields.u64("raw length of a chunk")?;
    let codec_number = fields.u64("codec of a chunk")?;
    let digest = ChunkDigest(fields.u128("digest of a chunk")?);
    let codec = Codec::from_number(codec_number)
        .ok_or_else(|| unsupported("codec", place.object, codec_number.to_string()))?;
    Ok(PackChunk { offset_bytes, stored_length_bytes, raw_length_bytes, codec, digest })
}

/// Checks that chunks are aligned, in order, disjoint, and between the header and the footer.
pub(super) fn check_chunks(place: Place<'_>, chunks: &[PackChunk], footer_offset_bytes: u64) -> Result<()> {
    let mut free_from_bytes = HEADER_LENGTH_BYTES;
    for chunk in chunks {
        let PackChunk { offset_bytes, stored_length_bytes, raw_length_bytes, codec, .. } = *chunk;
        if !(1..=*CHUNK_BYTES_RANGE.end()).contains(&raw_length_bytes) {
            let expected = format!("1 to {}", CHUNK_BYTES_RANGE.end());
            return Err(place.corrupt("raw length of a chunk", expected, raw_length_bytes));
        }
        let is_legal_length = match codec {
            Codec::Store => stored_length_bytes == raw_length_bytes,
            _ => stored_length_bytes < raw_length_bytes,
        };
        if !is_legal_length {
            let expected = format!("{raw_length_bytes} bytes");
            return Err(place.corrupt("stored length of a chunk", expected, stored_length_bytes));
        }
        let alignment_bytes = alignment_of(stored_length_bytes);
        if !offset_bytes.is_multiple_of(alignment_bytes) {
            let expected = format!("a multiple of {alignment_bytes}");
            return Err(place.corrupt("offset of a chunk", expected, offset_bytes));
        }
        let end_bytes = offset_bytes.checked_add(stored_length_bytes);
        let Some(end_bytes) =
            end_bytes.filter(|&end| offset_bytes >= free_from_bytes && end <= footer_offset_bytes)
        else {
            let expected = format!("bytes within {free_from_bytes}..{footer_offset_bytes}");
            return Err(place.corrupt(
                "chunk",
                expected,
                format!("{stored_length_bytes} bytes at {offset_bytes}"),
            ));
        };
        free_from_bytes = end_bytes;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    const PLACE: Place<'static> = Place { object: "packs/x", offset_bytes: 8_192 };

    fn chunk(offset_bytes: u64, length_bytes: u64) -> PackChunk {
        PackChunk {
            offset_bytes,
            stored_length_bytes: length_bytes,
            raw_length_bytes: length_bytes,
            codec: Codec::Store,
            digest: ChunkDigest(u128::from(offset_bytes)),
        }
    }

    fn refusal(chunks: &[PackChunk]) -> (String, String) {
        match check_chunks(PLACE, chunks, 1_000_000).unwrap_err() {
            Error::Corrupt { object, offset_bytes, what, found, .. } => {
                assert_eq!((object.as_str(), offset_bytes), ("packs/x", 8_192));
                (what, found)
            }
            other => panic!("not damage: {other:?}"),
        }
    }

    fn owned(what: &str, found: &str) -> (String, String) {
        (what.to_owned(), found.to_owned())
    }

    #[test]
    fn rows_round_trip() {
        let chunks = [chunk(64, 10), chunk(128, 100), chunk(4_096, 70_000)];
        check_chunks(PLACE, &chunks, 1_000_000).unwrap();
        let rows = encode_rows(&chunks);
        assert_eq!(rows.len() as u64, 3 * ROW_LENGTH_BYTES);
        assert_eq!(decode_rows(PLACE, &rows).unwrap(), chunks);
    }

    #[test]
    fn a_part_of_a_row_is_refused() {
        let error = decode_rows(PLACE, &[0; 47]).unwrap_err();
        assert!(matches!(&error, Error::Corrupt { what, .. } if what == "chunk table"), "{error:?}");
    }

    #[test]
    fn an_unknown_codec_is_unsupported() {
        let mut rows = encode_rows(&[chunk(64, 10)]);
        rows[24] = 9;
        let error = decode_rows(PLACE, &rows).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "codec", object, found, .. }
            if object == "packs/x" && found == "9"),
            "{error:?}"
        );
    }

    #[test]
    fn a_chunk_in_the_header_is_refused() {
        assert_eq!(refusal(&[chunk(0, 10)]), owned("chunk", "10 bytes at 0"));
    }

    #[test]
    fn a_chunk_in_the_footer_is_refused() {
        assert_eq!(refusal(&[chunk(999_936, 128)]), owned("chunk", "128 bytes at 999936"));
    }

    #[test]
    fn an_offset_that_overflows_is_refused() {
        assert_eq!(
            refusal(&[chunk(u64::MAX - 63, 128)]),
            owned("chunk", "128 bytes at 18446744073709551552")
        );
    }

    #[test]
    fn overlapping_chunks_are_refused() {
        assert_eq!(refusal(&[chunk(64, 65), chunk(128, 10)]), owned("chunk", "10 bytes at 128"));
    }

    #[test]
    fn chunks_out_of_order_are_refused() {
        assert_eq!(refusal(&[chunk(128, 10), chunk(64, 10)]), owned("chunk", "10 bytes at 64"));
    }

    #[test]
    fn unaligned_chunks_are_refused() {
        assert_eq!(refusal(&[chunk(65, 10)]), owned("offset of a chunk", "65"));
        assert_eq!(refusal(&[chunk(4_160, 65_536)]), owned("offset of a chunk", "4160"));
    }

    #[test]
    fn empty_and_huge_chunks_are_refused() {
        assert_eq!(refusal(&[chunk(64, 0)]), owned("raw length of a chunk", "0"));
        assert_eq!(refusal(&[chunk(4_096, 67_108_865)]), owned("raw length of a chunk", "67108865"));
    }

    #[test]
    fn a_stored_chunk_of_another_length_is_refused() {
        let found = refusal(&[PackChunk { stored_length_bytes: 9, ..chunk(64, 10) }]);
        assert_eq!(found, owned("stored length of a chunk", "9"));
    }
}
