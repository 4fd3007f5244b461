//! Which manifest the parts of all ranks make.
//!
//! Linear in what the parts hold, but for sorting: names are looked up by hash, shards are sorted once.

use std::collections::{BTreeMap, HashMap};

use crate::error::{Error, Result};
use crate::format::model::{Body, Codec, Entry, Header, Manifest, PackRecord, Part, Replica};
use crate::format::state_digest::state_digest;
use crate::format::{limits, manifest, names};

use super::disagreement;
use super::joining::{JoinedEntry, explain, fill_tie};
use super::replicas::check_replicas;
use super::structures::join_structures;

/// A part and the pack that carries it.
#[derive(Clone, Debug)]
pub struct WrittenPart {
    /// The part, as in the pack's footer.
    pub part: Part,
    /// The pack, with its true length.
    pub pack: PackRecord,
}

/// Makes the one manifest that the parts of all ranks describe (FORMAT.md, section "Join").
///
/// Entries of one name are joined over ranks; a region that several ranks hold is a replica and must be equal
/// by digest; structures are joined. The result is validated as if it had been read.
///
/// # Errors
/// [`Error::Incomplete`] where ranks are missing, [`Error::Mismatch`] where parts disagree: it names the entry
/// and the ranks.
pub fn assemble(mut parts: Vec<WrittenPart>) -> Result<Manifest> {
    parts.sort_by(|left, right| (left.part.rank, &left.pack.name).cmp(&(right.part.rank, &right.pack.name)));
    parts.dedup_by(|later, first| is_the_same(&first.part, &later.part));
    check_ranks(&parts)?;
    let first = &parts[0].part;
    let structures: Vec<_> =
        parts.iter().map(|written| (written.part.rank, &*written.part.body.structure)).collect();
    let mut header: Header = first.header.clone();
    let mut body = Body {
        chunk_bytes: first.body.chunk_bytes,
        packs: Vec::new(),
        entries: Vec::new(),
        structure: join_structures(&structures)?,
        rank_structures: Vec::new(),
    };
    header.stored_bytes = parts.iter().map(|written| written.pack.length_bytes).sum();
    let tables = join_packs(&mut body.packs, &parts)?;
    let groups = group(&parts);
    let mut joined: Vec<Option<JoinedEntry>> = Vec::new();
    joined.resize_with(groups.iter().max().map_or(0, |last| last + 1), || None);
    let mut groups = groups.into_iter();
    let mut replicas: Vec<(u32, Vec<Replica>)> = Vec::new();
    for (written, table) in parts.into_iter().zip(tables) {
        let Part { rank, body: own, replicas: told, header: _ } = written.part;
        body.rank_structures.extend(own.rank_structures);
        replicas.push((rank, told));
        for (mut entry, group) in own.entries.into_iter().zip(&mut groups) {
            let chunks = entry.shards.iter_mut().flat_map(|shard| &mut shard.chunks);
            // A rounded chunk lies in no pack.
            for chunk in chunks.filter(|chunk| chunk.codec != Codec::Rounded) {
                chunk.pack = table[chunk.pack as usize];
                if let Some(base) = &mut chunk.base {
                    base.pack = table[base.pack as usize];
                }
            }
            match &mut joined[group] {
                Some(known) => known.add(rank, entry)?,
                place => *place = Some(JoinedEntry::new(rank, entry)),
            }
        }
    }
    let joined = finish(joined)?;
    check_replicas(&joined, &replicas)?;
    let ranks = take_entries(joined, &mut body.entries);
    header.nonfinite = nonfinite(&body.entries);
    match manifest::complete(&names::manifest_name(header.seq), &mut header, &body) {
        Ok(()) => Ok(Manifest { header, body }),
        Err(error) => Err(explain(&body.entries, &ranks).unwrap_or(error)),
    }
}

/// True where one rank has saved the same twice, as a restarted one may: either pack will do.
fn is_the_same(first: &Part, later: &Part) -> bool {
    first.rank == later.rank
        && first.header.session_id == later.header.session_id
        && first.replicas == later.replicas
        && state_digest(&first.body) == state_digest(&later.body)
}

/// Refuses what is no set of parts of one save, one from each rank; the parts ascend by rank.
fn check_ranks(parts: &[WrittenPart]) -> Result<()> {
    let Some(first) = parts.first() else {
        return Err(Error::Incomplete { seq: 0, missing_ranks: vec![0] });
    };
    for pair in parts.windows(2) {
        if pair[0].part.rank == pair[1].part.rank {
            return Err(Error::invalid(
                format!("part of rank {}", pair[0].part.rank),
                format!(
                    "it has saved twice for this snapshot, and not the same, to `{}` and `{}`: abandon the \
                     snapshot, and save again",
                    pair[0].pack.name, pair[1].pack.name
                ),
            ));
        }
    }
    for written in parts {
        agree(&first.part, &written.part)?;
    }
    let mut present = parts.iter().map(|written| written.part.rank).peekable();
    let missing_ranks: Vec<u32> =
        (0..first.part.header.world_size).filter(|rank| present.next_if_eq(rank).is_none()).collect();
    if !missing_ranks.is_empty() {
        return Err(Error::Incomplete { seq: first.part.header.seq, missing_ranks });
    }
    match present.next() {
        None => Ok(()),
        Some(rank) => Err(Error::Mismatch {
            name: format!("part of rank {rank}"),
            field: "rank",
            expected: format!("below the world size {}", first.part.header.world_size),
            found: rank.to_string(),
        }),
    }
}

/// Refuses a part that belongs to another save than the first one.
fn agree(first: &Part, part: &Part) -> Result<()> {
    let (left, right) = (&first.header, &part.header);
    let numbers = [
        ("seq", left.seq, right.seq),
        ("step", left.step, right.step),
        ("world size", u64::from(left.world_size), u64::from(right.world_size)),
        ("chunk size", first.body.chunk_bytes, part.body.chunk_bytes),
    ];
    let texts = [
        ("session", &left.session_id, &right.session_id),
        ("repository", &left.repository_id, &right.repository_id),
    ];
    let text = texts.into_iter().find(|(_, left, right)| left != right);
    let differing = match text {
        Some((field, left, right)) => Some((field, left.clone(), right.clone())),
        None => numbers
            .into_iter()
            .find(|(_, left, right)| left != right)
            .map(|(field, left, right)| (field, left.to_string(), right.to_string())),
    };
    match differing {
        None => Ok(()),
        Some((field, expected, found)) => {
            Err(Error::Mismatch { name: format!("part of rank {}", part.rank), field, expected, found })
        }
    }
}

/// Makes one table of the packs of all parts; returns by part the new index of each of its indices.
fn join_packs(packs: &mut Vec<PackRecord>, parts: &[WrittenPart]) -> Result<Vec<Vec<u32>>> {
    let mut known: HashMap<&str, (u32, u32)> = HashMap::new();
    let mut tables = Vec::with_capacity(parts.len());
    for WrittenPart { part, pack } in parts {
        let mut table = Vec::with_capacity(part.body.packs.len());
        for record in std::iter::once(pack).chain(part.body.packs.iter().skip(1)) {
            let (index, rank) = *known.entry(&record.name).or_insert_with(|| {
                packs.push(record.clone());
                ((packs.len() - 1) as u32, part.rank)
            });
            let length_bytes = packs[index as usize].length_bytes;
            if length_bytes != record.length_bytes {
                let (left, right) = (length_bytes.to_string(), record.length_bytes.to_string());
                let name = format!("pack {}", record.name);
                return Err(disagreement(&name, "length", (rank, &left), (part.rank, &right)));
            }
            table.push(index);
        }
        tables.push(table);
    }
    Ok(tables)
}

/// By entry of all parts, one after the other, the number of its (name, rank).
fn group(parts: &[WrittenPart]) -> Vec<usize> {
    let mut known: HashMap<(&str, Option<u32>), usize> = HashMap::new();
    let entries = parts.iter().flat_map(|written| &written.part.body.entries);
    entries
        .map(|entry| {
            let next = known.len();
            *known.entry((&entry.name, entry.rank)).or_insert(next)
        })
        .collect()
}

/// The joined entries, in order, each with its shards in order and without replicas.
fn finish(joined: Vec<Option<JoinedEntry>>) -> Result<Vec<JoinedEntry>> {
    let mut joined: Vec<JoinedEntry> = joined.into_iter().flatten().collect();
    joined.sort_unstable_by(|left, right| left.position().cmp(&right.position()));
    for one in &mut joined {
        one.finish()?;
    }
    for index in 0..joined.len() {
        let Some(target) = joined[index].entry.tied_to.clone() else { continue };
        let position = (target.as_str(), joined[index].entry.rank);
        // Whether there is a target, and one that is no tie itself, the rules of a manifest say.
        if let Ok(target) = joined.binary_search_by(|other| other.position().cmp(&position))
            && target != index
        {
            let Ok([tie, target]) = joined.get_disjoint_mut([index, target]) else { continue };
            fill_tie(tie, target)?;
        }
    }
    Ok(joined)
}

/// Moves the entries out; what is left is by entry the rank of each of its shards.
fn take_entries(joined: Vec<JoinedEntry>, entries: &mut Vec<Entry>) -> Vec<Vec<u32>> {
    entries.reserve(joined.len());
    joined
        .into_iter()
        .map(|one| {
            entries.push(one.entry);
            one.shard_ranks
        })
        .collect()
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

#[cfg(test)]
mod tests;
