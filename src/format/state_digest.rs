//! The state digest: what a training state is, whatever its packing (FORMAT.md, section "Digests").
//!
//! Two snapshots of one state have one state digest, also where one of them is a base and the other a
//! delta: packs, offsets and codecs do not count. How the state is cut into shards and chunks does.

use crate::digest::ChunkDigest;

use super::model::{Body, Entry};

/// Context of BLAKE3's key derivation: no other use of BLAKE3 gives the same digests.
const CONTEXT: &str = "varvite 2026 state digest v1";

const FLUSH_LENGTH_BYTES: usize = 64 << 10;

/// BLAKE3 of the canonical form of a body: 64 lower-case hex digits.
#[must_use]
pub fn state_digest(body: &Body) -> String {
    let mut canonical = Canonical { hasher: blake3::Hasher::new_derive_key(CONTEXT), pending: Vec::new() };
    canonical.count(body.entries.len());
    for entry in &body.entries {
        canonical.entry(entry);
    }
    canonical.text(body.structure.get());
    canonical.count(body.rank_structures.len());
    for rank_structure in &body.rank_structures {
        canonical.number(u64::from(rank_structure.rank));
        canonical.text(rank_structure.structure.get());
    }
    canonical.scales(&body.entries);
    canonical.hasher.update(&canonical.pending);
    canonical.hasher.finalize().to_hex().to_string()
}

/// Feeds fields to the hasher, each with its length where it has one. Small fields are collected first:
/// BLAKE3 is fast on long inputs only.
struct Canonical {
    hasher: blake3::Hasher,
    pending: Vec<u8>,
}

impl Canonical {
    fn entry(&mut self, entry: &Entry) {
        self.text(&entry.name);
        self.optional_number(entry.rank.map(u64::from));
        self.text(entry.dtype.name());
        self.text(entry.stored_dtype.name());
        self.numbers(&entry.shape);
        match &entry.tied_to {
            None => self.bytes(&[0]),
            Some(target) => {
                self.bytes(&[1]);
                self.text(target);
            }
        }
        self.count(entry.shards.len());
        for shard in &entry.shards {
            self.numbers(&shard.offsets);
            self.numbers(&shard.lengths);
            self.count(shard.chunks.len());
            for chunk in &shard.chunks {
                let ChunkDigest(digest) = chunk.digest;
                self.bytes(&digest.to_le_bytes());
            }
        }
    }

    /// Scales change values; where there are none the form is that of a body without them.
    fn scales(&mut self, entries: &[Entry]) {
        let scales = || {
            entries
                .iter()
                .flat_map(|entry| &entry.shards)
                .zip(0_u64..)
                .filter(|(shard, _)| shard.scale_log2 != 0)
                .map(|(shard, position)| (position, shard.scale_log2))
        };
        let count = scales().count();
        if count > 0 {
            self.count(count);
            for (position, scale_log2) in scales() {
                self.number(position);
                self.bytes(&scale_log2.to_le_bytes());
            }
        }
    }

    fn optional_number(&mut self, number: Option<u64>) {
        match number {
            None => self.bytes(&[0]),
            Some(number) => {
                self.bytes(&[1]);
                self.number(number);
            }
        }
    }

    fn numbers(&mut self, numbers: &[u64]) {
        self.count(numbers.len());
        for &number in numbers {
            self.number(number);
        }
    }

    fn text(&mut self, text: &str) {
        self.count(text.len());
        self.bytes(text.as_bytes());
    }

    fn count(&mut self, count: usize) {
        self.number(count as u64);
    }

    fn number(&mut self, number: u64) {
        self.bytes(&number.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= FLUSH_LENGTH_BYTES {
            self.hasher.update(&self.pending);
            self.pending.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::super::model::Codec;
    use super::super::samples;
    use super::*;
    use crate::tensor::Dtype;

    fn digest_after(change: impl FnOnce(&mut Body)) -> String {
        let mut body = samples::body();
        change(&mut body);
        state_digest(&body)
    }

    #[test]
    fn packing_does_not_count() {
        let digest = state_digest(&samples::body());
        assert_eq!(digest.len(), 64);
        assert_eq!(digest, digest_after(|body| body.packs[0].length_bytes += 64));
        assert_eq!(digest, digest_after(|body| body.entries[1].shards[0].chunks[0].offset_bytes += 64));
        assert_eq!(digest, digest_after(|body| body.entries[1].shards[0].chunks[0].pack += 1));
        assert_eq!(digest, digest_after(|body| body.entries[0].nonfinite = Some(1)));
        assert_eq!(digest, digest_after(|body| body.entries[0].abs_max = Some(1.0)));
        assert_eq!(digest, digest_after(|body| body.entries[1].shards[0].chunks[0].codec = Codec::Planes));
    }

    #[test]
    fn everything_that_changes_the_state_counts() {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).unwrap();
        let digests = [
            state_digest(&samples::body()),
            digest_after(|body| body.entries[0].name.push('x')),
            digest_after(|body| body.entries[0].rank = Some(0)),
            digest_after(|body| body.entries[0].dtype = Dtype::Int32),
            digest_after(|body| body.entries[0].stored_dtype = Dtype::Int32),
            digest_after(|body| body.entries[0].shape.push(1)),
            digest_after(|body| body.entries[0].tied_to = Some(String::new())),
            digest_after(|body| body.entries[0].shards[0].offsets[0] += 1),
            digest_after(|body| body.entries[0].shards[0].lengths[0] -= 1),
            digest_after(|body| body.entries[0].shards[0].chunks[0].digest.0 ^= 1),
            digest_after(|body| body.entries[0].shards[0].chunks.clear()),
            digest_after(|body| body.entries[0].shards[0].scale_log2 = 1),
            digest_after(|body| body.entries[0].shards[0].scale_log2 = -1),
            digest_after(|body| body.entries[1].shards[0].scale_log2 = 1),
            digest_after(|body| body.structure = raw("{}")),
            digest_after(|body| body.rank_structures[0].rank += 1),
            digest_after(|body| body.rank_structures[0].structure = raw("0")),
            digest_after(|body| body.rank_structures.clear()),
            digest_after(|body| body.entries.truncate(1)),
        ];
        let distinct: std::collections::BTreeSet<&String> = digests.iter().collect();
        assert_eq!(distinct.len(), digests.len());
    }
}
