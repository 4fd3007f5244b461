//! Every limit of the format (FORMAT.md, section "Limits").
//!
//! A decoder checks them before it allocates, an encoder before it writes: what was written can be read.

use std::ops::RangeInclusive;

/// Longest first line of a manifest or part, with its line break.
pub const HEADER_LINE_LIMIT_BYTES: u64 = 1 << 20;

/// Longest body of a manifest or part before compression, and therefore also after it.
pub const BODY_LIMIT_BYTES: u64 = 4 << 30;

/// Longest manifest.
pub const MANIFEST_LIMIT_BYTES: u64 = HEADER_LINE_LIMIT_BYTES + BODY_LIMIT_BYTES;

/// Compressed bytes may grow by at most this factor, plus [`EXPANSION_ALLOWANCE_BYTES`].
pub const EXPANSION_LIMIT: u64 = 256;

/// What compressed bytes may grow to however few they are.
pub const EXPANSION_ALLOWANCE_BYTES: u64 = 64 << 10;

/// Shorter bodies and chunk tables are never compressed.
pub const COMPRESSION_THRESHOLD_BYTES: u64 = 4 << 10;

/// Longest marker, tag and lease.
pub const SMALL_OBJECT_LIMIT_BYTES: u64 = 4 << 10;

/// Longest receipt, with its line break.
pub const RECEIPT_LIMIT_BYTES: u64 = 64 << 10;

/// Longest ticket of a session, with its line break.
pub const TICKET_LIMIT_BYTES: u64 = 1 << 20;

/// Longest object of a sync journal, with its line break.
pub const JOURNAL_LIMIT_BYTES: u64 = 64 << 20;

/// Most parts of an upload.
pub const UPLOAD_PART_COUNT_LIMIT: u64 = 10_000;

/// Longest text in a lease, in bytes of UTF-8.
pub const LEASE_TEXT_LIMIT_BYTES: usize = 512;

/// Longest time that a lease holds without a renewal: a day.
pub const LEASE_MILLISECONDS_LIMIT: u64 = 86_400_000;

/// Longest name of an entry, in bytes of UTF-8.
pub const ENTRY_NAME_LIMIT_BYTES: usize = 65_536;

/// Most entries of a manifest.
pub const ENTRY_COUNT_LIMIT: usize = 4_000_000;

/// Most replicas that a part tells of.
pub const REPLICA_COUNT_LIMIT: usize = ENTRY_COUNT_LIMIT;

/// Most dimensions of a tensor.
pub const DIMENSION_COUNT_LIMIT: usize = 64;

/// Most shards of one entry.
pub const SHARD_COUNT_LIMIT: usize = 1 << 20;

/// Most dimensions of one tensor in which some shard is shorter than the tensor.
pub const CUT_DIMENSION_LIMIT: usize = 8;

/// Most packs in the pack table of a manifest.
pub const PACK_COUNT_LIMIT: usize = 1 << 20;

/// Most chunks in the chunk table of a pack.
pub const CHUNK_COUNT_LIMIT: u64 = 1 << 26;

/// Most ranks of a snapshot.
pub const WORLD_SIZE_LIMIT: u32 = 1 << 20;

/// Legal values of `chunk_bytes`, which is also a power of two.
pub const CHUNK_BYTES_RANGE: RangeInclusive<u64> = (4 << 10)..=(64 << 20);

/// Most metrics of a snapshot.
pub const METRIC_COUNT_LIMIT: usize = 10_000;

/// Longest name of a metric, in bytes of UTF-8.
pub const METRIC_NAME_LIMIT_BYTES: usize = 1 << 10;

/// Longest metadata, as JSON text.
pub const METADATA_LIMIT_BYTES: usize = 512 << 10;

/// Most names in a header's `nonfinite`; the entries hold the complete counts.
pub const NONFINITE_COUNT_LIMIT: usize = 1_000;

/// Most bytes of names in a header's `nonfinite`, so that a run that diverged can still be saved.
pub const NONFINITE_NAMES_LIMIT_BYTES: usize = 128 << 10;

/// Deepest nesting of arrays and objects in metadata and in a structure.
pub const JSON_DEPTH_LIMIT: usize = 512;

/// Largest power of two of a scale, either way: any float64 divided by any 8-bit float.
pub const SCALE_LOG2_LIMIT: i32 = 1_200;

/// Longest name of a tag.
pub const TAG_NAME_LIMIT_BYTES: usize = 100;

/// True where `chunk_bytes` is a power of two within [`CHUNK_BYTES_RANGE`].
#[must_use]
pub fn is_legal_chunk_bytes(chunk_bytes: u64) -> bool {
    chunk_bytes.is_power_of_two() && CHUNK_BYTES_RANGE.contains(&chunk_bytes)
}

/// Most raw bytes that this many compressed bytes may claim to hold.
#[must_use]
pub fn expansion_limit_bytes(stored_length_bytes: u64) -> u64 {
    stored_length_bytes.saturating_mul(EXPANSION_LIMIT).saturating_add(EXPANSION_ALLOWANCE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_bytes_is_a_power_of_two_between_4_kib_and_64_mib() {
        let legal: Vec<u64> =
            (0..40).map(|power| 1_u64 << power).filter(|&bytes| is_legal_chunk_bytes(bytes)).collect();
        assert_eq!(legal.first(), Some(&4_096));
        assert_eq!(legal.last(), Some(&67_108_864));
        assert_eq!(legal.len(), 15);
        assert!(!is_legal_chunk_bytes(0));
        assert!(!is_legal_chunk_bytes(5_000));
    }

    #[test]
    fn expansion_saturates_instead_of_overflowing() {
        assert_eq!(expansion_limit_bytes(0), 65_536);
        assert_eq!(expansion_limit_bytes(10), 65_536 + 2_560);
        assert_eq!(expansion_limit_bytes(u64::MAX), u64::MAX);
    }
}
