//! Which manifest the parts of all ranks make.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::format::model::{Body, ChunkRef, Entry, Header, Manifest, PackRecord, Part};
use crate::format::state_digest::state_digest;
use crate::format::{limits, manifest, names};
use crate::tensor::raw_length_bytes;

/// A part and the pack that carries it.
#[derive(Debug)]
pub struct WrittenPart {
    /// The part, as in the pack's footer.
    pub part: Part,
    /// The pack, with its true length.
    pub pack: PackRecord,
}

/// Makes the one manifest that the parts of all ranks describe.
///
/// Entries of one name are joined over ranks; a region that several ranks wrote is a replica and must
/// be equal by digest. The result is validated as if it had been read.
///
/// # Errors
/// [`Error::Incomplete`] where ranks are missing, [`Error::Mismatch`] where parts disagree.
pub fn assemble(mut parts: Vec<WrittenPart>) -> Result<Manifest> {
    parts.sort_by_key(|written| written.part.rank);
    let Some(first) = parts.first() else {
        return Err(Error::Incomplete { seq: 0, missing_ranks: vec![0] });
    };
    let mut header: Header = first.part.header.clone();
    let present: Vec<u32> = parts.iter().map(|written| written.part.rank).collect();
    let missing_ranks: Vec<u32> = (0..header.world_size).filter(|rank| !present.contains(rank)).collect();
    if !missing_ranks.is_empty() {
        return Err(Error::Incomplete { seq: header.seq, missing_ranks });
    }
    let mut body = Body {
        chunk_bytes: first.part.body.chunk_bytes,
        packs: Vec::new(),
        entries: Vec::new(),
        structure: first.part.body.structure.clone(),
        rank_structures: Vec::new(),
    };
    header.stored_bytes = 0;
    let mut entries: BTreeMap<(String, Option<u32>), Entry> = BTreeMap::new();
    for written in parts {
        agree(&header, &body, &written.part)?;
        header.stored_bytes += written.pack.length_bytes;
        let table = join_packs(&mut body.packs, &written);
        body.rank_structures.extend(written.part.body.rank_structures);
        for mut entry in written.part.body.entries {
            for chunk in entry.shards.iter_mut().flat_map(|shard| &mut shard.chunks) {
                chunk.pack = table[chunk.pack as usize];
            }
            join_entry(&mut entries, entry)?;
        }
    }
    body.entries = entries.into_values().collect();
    header.raw_bytes = body
        .entries
        .iter()
        .filter(|entry| entry.tied_to.is_none())
        .filter_map(|entry| raw_length_bytes(&entry.shape, entry.stored_dtype))
        .sum();
    header.nonfinite = nonfinite(&body.entries);
    header.self_contained = body
        .packs
        .iter()
        .all(|pack| names::parse_pack_name(&pack.name).is_some_and(|name| name.seq == header.seq));
    header.state_digest = state_digest(&body);
    manifest::validate(&names::manifest_name(header.seq), &header, &body)?;
    Ok(Manifest { header, body })
}

/// Non-finite elements by entry, as many entries as a header holds; never empty where one has some.
fn nonfinite(entries: &[Entry]) -> BTreeMap<String, u64> {
    let mut names_bytes = 0;
    entries
        .iter()
        .filter_map(|entry| {
            entry.nonfinite.filter(|&count| count > 0).map(|count| (entry.name.clone(), count))
        })
        .take(limits::NONFINITE_COUNT_LIMIT)
        .take_while(|(name, _)| {
            let first = names_bytes == 0;
            names_bytes += name.len();
            first || names_bytes <= limits::NONFINITE_NAMES_LIMIT_BYTES
        })
        .collect()
}

/// Refuses a part that belongs to another save than the first one.
fn agree(header: &Header, body: &Body, part: &Part) -> Result<()> {
    let facts = |header: &Header, chunk_bytes: u64| {
        [
            ("session", header.session_id.clone()),
            ("seq", header.seq.to_string()),
            ("step", header.step.to_string()),
            ("world size", header.world_size.to_string()),
            ("chunk size", chunk_bytes.to_string()),
        ]
    };
    let expected = facts(header, body.chunk_bytes);
    let found = facts(&part.header, part.body.chunk_bytes);
    for ((field, expected), (_, found)) in expected.into_iter().zip(found) {
        if expected != found {
            return Err(Error::Mismatch {
                name: format!("part of rank {}", part.rank),
                field,
                expected,
                found,
            });
        }
    }
    Ok(())
}

/// Adds a part's packs to the table; returns the new index of each of the part's indices.
fn join_packs(packs: &mut Vec<PackRecord>, written: &WrittenPart) -> Vec<u32> {
    let own = std::iter::once(&written.pack);
    let others = written.part.body.packs.iter().skip(1);
    own.chain(others)
        .map(|record| {
            let index = packs.iter().position(|known| known.name == record.name).unwrap_or_else(|| {
                packs.push(record.clone());
                packs.len() - 1
            });
            index as u32
        })
        .collect()
}

/// Adds a rank's share of an entry to what other ranks gave.
fn join_entry(entries: &mut BTreeMap<(String, Option<u32>), Entry>, mut entry: Entry) -> Result<()> {
    let key = (entry.name.clone(), entry.rank);
    let Some(known) = entries.get_mut(&key) else {
        entries.insert(key, entry);
        return Ok(());
    };
    if (known.dtype, known.stored_dtype, &known.shape, &known.tied_to)
        != (entry.dtype, entry.stored_dtype, &entry.shape, &entry.tied_to)
    {
        return Err(Error::Mismatch {
            name: entry.name,
            field: "description on two ranks",
            expected: format!("{} {:?}", known.dtype.name(), known.shape),
            found: format!("{} {:?}", entry.dtype.name(), entry.shape),
        });
    }
    for shard in entry.shards {
        match known
            .shards
            .iter()
            .find(|other| other.offsets == shard.offsets && other.lengths == shard.lengths)
        {
            None => {
                // Once, however many shards of the entry this rank holds; a replica is counted already.
                let counted = entry.nonfinite.take();
                known.nonfinite = known.nonfinite.into_iter().chain(counted).reduce(u64::saturating_add);
                known.shards.push(shard);
            }
            Some(replica) => {
                let digests =
                    |chunks: &[ChunkRef]| chunks.iter().map(|chunk| chunk.digest).collect::<Vec<_>>();
                if digests(&replica.chunks) != digests(&shard.chunks) {
                    return Err(Error::Mismatch {
                        name: entry.name,
                        field: "value on two ranks that both hold it",
                        expected: format!("{:?}", replica.chunks.first().map(|chunk| chunk.digest)),
                        found: format!("{:?}", shard.chunks.first().map(|chunk| chunk.digest)),
                    });
                }
            }
        }
    }
    known.shards.sort_by(|left, right| left.offsets.cmp(&right.offsets));
    Ok(())
}
