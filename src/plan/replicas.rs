//! Do ranks that hold the same region hold the same bytes?

use std::collections::HashMap;

use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::model::Replica;

use super::disagreement;
use super::joining::{JoinedEntry, shown_region};

/// Compares what each rank tells of regions that others write with what they wrote.
///
/// Where a save casts, what was written has other bytes than the caller's; then the replicas are compared with
/// each other, and the writer tells one too.
pub(super) fn check_replicas(joined: &[JoinedEntry], told: &[(u32, Vec<Replica>)]) -> Result<()> {
    if told.iter().all(|(_, replicas)| replicas.is_empty()) {
        return Ok(());
    }
    let mut positions: HashMap<&str, usize> = HashMap::with_capacity(joined.len());
    let mut first_shards = Vec::with_capacity(joined.len());
    let mut shard_count = 0;
    for (index, one) in joined.iter().enumerate() {
        if one.entry.rank.is_none() {
            positions.insert(&one.entry.name, index);
        }
        first_shards.push(shard_count);
        shard_count += one.entry.shards.len();
    }
    // By shard, who has said first what its bytes are.
    let mut known: Vec<Option<(u32, ChunkDigest)>> = vec![None; shard_count];
    for (rank, replicas) in told {
        for replica in replicas {
            let index = positions.get(replica.name.as_str()).copied();
            let index = index.ok_or_else(|| unwritten(*rank, replica))?;
            let one = &joined[index];
            compare(one, *rank, replica)?;
            let shard = one.entry.shards.binary_search_by(|shard| shard.offsets.cmp(&replica.offsets)).ok();
            let shard = shard.filter(|&shard| one.entry.shards[shard].lengths == replica.lengths);
            let shard = shard.ok_or_else(|| unwritten(*rank, replica))?;
            let place = &mut known[first_shards[index] + shard];
            let (first, digest) =
                *place.get_or_insert_with(|| written(one, shard).unwrap_or((*rank, replica.digest)));
            if digest != replica.digest {
                let (left, right) =
                    (format!("bytes of digest {digest}"), format!("bytes of digest {}", replica.digest));
                return Err(disagreement(&replica.name, "value", (first, &left), (*rank, &right)));
            }
        }
    }
    Ok(())
}

/// Who wrote a shard, and the digest of the caller's bytes, where they are what was written.
fn written(one: &JoinedEntry, shard: usize) -> Option<(u32, ChunkDigest)> {
    if one.entry.dtype != one.entry.stored_dtype {
        return None;
    }
    let digests: Vec<ChunkDigest> = one.entry.shards[shard].chunks.iter().map(|chunk| chunk.digest).collect();
    Some((one.shard_ranks[shard], ChunkDigest::of_digests(&digests)))
}

/// Refuses a replica of another dtype or shape than the entry's.
fn compare(one: &JoinedEntry, rank: u32, replica: &Replica) -> Result<()> {
    let entry = &one.entry;
    if entry.dtype != replica.dtype {
        let (left, right) = (entry.dtype.name(), replica.dtype.name());
        return Err(disagreement(&entry.name, "dtype", (one.rank, left), (rank, right)));
    }
    if entry.shape != replica.shape {
        let (left, right) = (format!("{:?}", entry.shape), format!("{:?}", replica.shape));
        return Err(disagreement(&entry.name, "shape", (one.rank, &left), (rank, &right)));
    }
    Ok(())
}

fn unwritten(rank: u32, replica: &Replica) -> Error {
    Error::Mismatch {
        name: replica.name.clone(),
        field: "region",
        expected: "one that some rank wrote".to_owned(),
        found: format!(
            "{} on rank {rank}, which nobody wrote",
            shown_region(&replica.offsets, &replica.lengths)
        ),
    }
}
