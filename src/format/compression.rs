//! Bodies and chunk tables, compressed where that pays (FORMAT.md, section "Compression").

use crate::error::{Error, Result};

use super::limits::{COMPRESSION_THRESHOLD_BYTES, expansion_limit_bytes};
use super::place::Place;

const ZSTD_LEVEL: i32 = 1;

/// `raw` compressed, or `None` where it is short, would not shrink, or would shrink so much that a reader
/// refused to expand it.
pub(super) fn compress(raw: &[u8]) -> Result<Option<Vec<u8>>> {
    if raw.len() as u64 <= COMPRESSION_THRESHOLD_BYTES {
        return Ok(None);
    }
    let stored = zstd::bulk::compress(raw, ZSTD_LEVEL)
        .map_err(|error| Error::Internal { what: format!("zstd did not compress: {error}") })?;
    let pays = stored.len() < raw.len() && raw.len() as u64 <= expansion_limit_bytes(stored.len() as u64);
    Ok(pays.then_some(stored))
}

/// Checks, before anything is allocated, that a claimed raw length is within what a reader expands.
pub(super) fn check_expansion(
    place: Place<'_>,
    what: &str,
    stored_length_bytes: u64,
    raw_length_bytes: u64,
) -> Result<()> {
    let limit_bytes = expansion_limit_bytes(stored_length_bytes);
    if raw_length_bytes <= limit_bytes {
        return Ok(());
    }
    Err(place.corrupt(
        format!("raw length of {what}"),
        format!("at most {limit_bytes} bytes out of {stored_length_bytes} compressed ones"),
        raw_length_bytes,
    ))
}

/// Expands to exactly `raw_length_bytes`.
pub(super) fn expand(place: Place<'_>, what: &str, stored: &[u8], raw_length_bytes: u64) -> Result<Vec<u8>> {
    check_expansion(place, what, stored.len() as u64, raw_length_bytes)?;
    let expected = || format!("{raw_length_bytes} bytes compressed with zstd");
    let capacity_bytes = usize::try_from(raw_length_bytes).map_err(|_| {
        place.corrupt(format!("raw length of {what}"), "an addressable length", raw_length_bytes)
    })?;
    let raw = zstd::bulk::decompress(stored, capacity_bytes)
        .map_err(|error| place.corrupt(what, expected(), error))?;
    if raw.len() != capacity_bytes {
        return Err(place.corrupt(what, expected(), format!("{} bytes", raw.len())));
    }
    Ok(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place<'static> = Place { object: "snapshots/1.json", offset_bytes: 700 };

    /// Text that shrinks to about half: hex digits of a counter's hash.
    fn text(length_bytes: usize) -> Vec<u8> {
        (0_u64..)
            .flat_map(|index| format!("{:016x}", index.wrapping_mul(0x9e37_79b9_7f4a_7c15)).into_bytes())
            .take(length_bytes)
            .collect()
    }

    fn corrupt_parts(error: &Error) -> (u64, &str, &str) {
        match error {
            Error::Corrupt { offset_bytes, what, found, .. } => (*offset_bytes, what, found),
            other => panic!("not damage: {other:?}"),
        }
    }

    #[test]
    fn text_is_compressed_and_comes_back() {
        let raw = text(20_000);
        let stored = compress(&raw).unwrap().unwrap();
        assert!(stored.len() < raw.len());
        assert_eq!(expand(PLACE, "body", &stored, 20_000).unwrap(), raw);
    }

    #[test]
    fn short_text_and_noise_are_left_alone() {
        assert_eq!(compress(&text(4_096)).unwrap(), None);
        let noise: Vec<u8> = (0_u64..2_000)
            .flat_map(|index| crate::digest::ChunkDigest::of(&index.to_le_bytes()).0.to_le_bytes())
            .collect();
        assert_eq!(compress(&noise).unwrap(), None);
    }

    #[test]
    fn what_shrinks_beyond_the_readers_limit_stays_raw() {
        assert_eq!(compress(&vec![b'0'; 10_000_000]).unwrap(), None);
    }

    #[test]
    fn a_bomb_is_refused_by_its_claim() {
        let bomb = zstd::bulk::compress(&vec![0; 10_000_000], 1).unwrap();
        let error = expand(PLACE, "body", &bomb, 10_000_000).unwrap_err();
        assert_eq!(corrupt_parts(&error), (700, "raw length of body", "10000000"));
    }

    #[test]
    fn a_bomb_with_a_modest_claim_is_cut_off() {
        let bomb = zstd::bulk::compress(&vec![0; 10_000_000], 1).unwrap();
        let error = expand(PLACE, "body", &bomb, 1_000).unwrap_err();
        assert_eq!(corrupt_parts(&error).1, "body");
    }

    #[test]
    fn fewer_bytes_than_claimed_are_refused() {
        let stored = zstd::bulk::compress(&text(5_000), 1).unwrap();
        let error = expand(PLACE, "body", &stored, 5_001).unwrap_err();
        assert_eq!(corrupt_parts(&error), (700, "body", "5000 bytes"));
    }

    #[test]
    fn bytes_that_are_not_zstd_are_refused() {
        let error = expand(PLACE, "body", b"not zstd at all", 100).unwrap_err();
        assert_eq!((corrupt_parts(&error).0, corrupt_parts(&error).1), (700, "body"));
    }
}
