//! The part of a save: what its footer, and by that the manifest, says of the entries.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::format::model::{Body, ChunkRef, Codec, Entry, PackRecord, Part, Shard};
use crate::plan::Base;
use crate::statistics::Statistics;

use super::{EntryInput, WriteJob};

/// What was found out about the entries, in their order.
pub(super) struct Facts {
    pub(super) references: Vec<Vec<ChunkRef>>,
    pub(super) statistics: Vec<Option<Statistics>>,
    pub(super) scales: Vec<i32>,
    pub(super) rounded_from: Vec<Option<String>>,
}

/// The references of each entry, in order; `entries` says whose chunk each is.
pub(super) fn by_entry(
    job: &WriteJob,
    entries: impl Iterator<Item = usize>,
    references: Vec<Option<ChunkRef>>,
) -> Result<Vec<Vec<ChunkRef>>> {
    let mut by_entry: Vec<Vec<ChunkRef>> = vec![Vec::new(); job.entries.len()];
    for (entry, reference) in entries.zip(references) {
        let reference =
            reference.ok_or_else(|| Error::Internal { what: "a chunk of a save has no place".to_owned() })?;
        by_entry[entry].push(reference);
    }
    Ok(by_entry)
}

/// Builds the part: entries sorted by name, ties with the chunks of what they are tied to.
pub(super) fn make_part(
    job: WriteJob,
    packs: Vec<PackRecord>,
    facts: Facts,
    base: Option<&Base>,
) -> Result<Part> {
    let Facts { references, statistics, scales, rounded_from } = facts;
    let mut entries: Vec<Entry> = Vec::with_capacity(job.entries.len());
    let facts = references.into_iter().zip(statistics).zip(scales).zip(rounded_from);
    for (input, (((chunks, statistics), scale_log2), rounded_from)) in job.entries.iter().zip(facts) {
        let is_rounded = chunks.iter().any(|chunk| chunk.codec == Codec::Rounded);
        let is_empty = input.region.lengths.contains(&0);
        let (offsets, lengths) = (input.region.offsets.clone(), input.region.lengths.clone());
        let shard = Shard { offsets, lengths, scale_log2, chunks };
        let mut entry = Entry {
            name: input.name.clone(),
            rank: input.rank,
            dtype: input.dtype,
            stored_dtype: input.stored_dtype,
            shape: input.shape.clone(),
            tied_to: input.tied_to.clone(),
            rounded_from: rounded_from.filter(|_| is_rounded),
            nonfinite: None,
            abs_max: None,
            l2_norm: None,
            shards: if is_empty { Vec::new() } else { vec![shard] },
        };
        match statistics {
            Some(found) => count(&mut entry, found),
            None => count_as(&mut entry, base.and_then(|base| base.entry(&input.name, input.rank))),
        }
        entries.push(entry);
    }
    fill_ties(&job.entries, &mut entries)?;
    entries.sort_by(|left, right| (&left.name, left.rank).cmp(&(&right.name, right.rank)));
    let body = Body {
        chunk_bytes: job.chunk_bytes,
        packs,
        entries,
        structure: job.structure,
        rank_structures: job.rank_structures,
    };
    Ok(Part { rank: job.rank, header: job.header, body, replicas: job.replicas })
}

fn count(entry: &mut Entry, found: Statistics) {
    let finite = |value: f64| Some(value).filter(|value| value.is_finite());
    entry.nonfinite = Some(found.nonfinite).filter(|&count| count > 0);
    entry.abs_max = finite(found.abs_max);
    entry.l2_norm = finite(found.l2_norm());
}

/// An entry of which no chunk was counted has the bytes of the base's, or no float.
fn count_as(entry: &mut Entry, same: Option<&Entry>) {
    if let Some(same) = same.filter(|same| same.stored_dtype == entry.stored_dtype) {
        (entry.nonfinite, entry.abs_max, entry.l2_norm) = (same.nonfinite, same.abs_max, same.l2_norm);
    }
}

/// Gives ties everything that follows from the bytes of what they are tied to.
fn fill_ties(inputs: &[EntryInput], entries: &mut [Entry]) -> Result<()> {
    let positions: HashMap<&str, usize> =
        inputs.iter().enumerate().map(|(index, input)| (input.name.as_str(), index)).collect();
    for (index, input) in inputs.iter().enumerate() {
        let Some(target) = &input.tied_to else { continue };
        let target = positions
            .get(target.as_str())
            .filter(|&&target| inputs[target].tied_to.is_none())
            .map(|&target| entries[target].clone())
            .ok_or_else(|| {
                Error::invalid(
                    format!("tie of `{}`", input.name),
                    format!("`{target}` is no entry of this save, or a tie itself"),
                )
            })?;
        entries[index] = Entry { name: input.name.clone(), tied_to: input.tied_to.clone(), ..target };
    }
    Ok(())
}
