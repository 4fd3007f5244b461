//! The rules that tie a header and a body together (FORMAT.md, section "Rules of a manifest").
//!
//! Linear in the size of the body, up to a sort: hostile bytes cost no more than honest ones.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::tensor::{element_count, raw_length_bytes};

use super::cover::{Cover, check_cover};
use super::header::check_depth;
use super::limits;
use super::model::{Body, ChunkRef, Codec, Entry, Header, Shard, find_entry};
use super::names::parse_pack_name;
use super::pack::{HEADER_LENGTH_BYTES, SMALLEST_PACK_LENGTH_BYTES};
use super::place::Place;
use super::state_digest::state_digest;

mod replicas;

pub(super) use replicas::check_replicas;

/// Longest name shown whole in a message.
const SHOWN_NAME_LENGTH: usize = 200;

/// What a body has to be complete for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scope<'a> {
    /// A manifest: shards cover every entry, ties lead to entries.
    Snapshot,
    /// A part: what one rank holds. Shards of other ranks, and targets of ties, are elsewhere.
    Part { rank: u32, pack_name: &'a str, footer_offset_bytes: u64 },
}

/// Checks all rules that need the body. The header by itself must have been checked.
pub(super) fn check(
    header_place: Place<'_>,
    body_place: Place<'_>,
    header: &Header,
    body: &Body,
    scope: Scope<'_>,
) -> Result<()> {
    let found = check_body(body_place, header, body, scope)?;
    // A part is one rank's share: what the snapshot adds up to is known when all parts are.
    match scope {
        Scope::Part { .. } => Ok(()),
        Scope::Snapshot => check_claims(header_place, header, body, found.raw_bytes, found.self_contained),
    }
}

/// What the entries of a body add up to.
pub(super) struct Sums {
    /// Raw bytes of all shards but those of ties.
    pub(super) raw_bytes: u64,
    /// True where every chunk lies in a pack of the header's seq.
    pub(super) self_contained: bool,
}

/// Checks all rules that need the body, but for what the header claims of it.
pub(super) fn check_body(place: Place<'_>, header: &Header, body: &Body, scope: Scope<'_>) -> Result<Sums> {
    if !limits::is_legal_chunk_bytes(body.chunk_bytes) {
        let range = limits::CHUNK_BYTES_RANGE;
        let expected = format!("a power of two from {} to {}", range.start(), range.end());
        return Err(place.corrupt("chunk_bytes", expected, body.chunk_bytes));
    }
    check_structures(place, header, body, scope)?;
    let packs = check_packs(place, body, scope)?;
    let mut rules = EntryRules { place, header, body, scope, packs, raw_bytes: 0, self_contained: true };
    rules.check_entries()?;
    Ok(Sums { raw_bytes: rules.raw_bytes, self_contained: rules.self_contained })
}

/// Checks what the header says of the body.
fn check_claims(
    place: Place<'_>,
    header: &Header,
    body: &Body,
    raw_bytes: u64,
    self_contained: bool,
) -> Result<()> {
    if header.raw_bytes != raw_bytes {
        return Err(place.corrupt(
            "raw_bytes",
            format!("{raw_bytes}, the sum of the entries"),
            header.raw_bytes,
        ));
    }
    if header.self_contained && !self_contained {
        return Err(place.corrupt("self_contained", "false, as chunks lie in older packs", true));
    }
    let digest = state_digest(body);
    if header.state_digest != digest {
        return Err(place.corrupt("state digest", digest, &header.state_digest));
    }
    Ok(())
}

/// Turns damage found in what is about to be written into a refusal to write it.
pub(super) fn refuse_to_write(error: Error) -> Error {
    match error {
        Error::Corrupt { what, expected, found, .. } => {
            Error::invalid(what, format!("expected {expected}, found: {found}"))
        }
        other => other,
    }
}

fn check_structures(place: Place<'_>, header: &Header, body: &Body, scope: Scope<'_>) -> Result<()> {
    check_depth(place, "structure", &body.structure)?;
    let mut previous = None;
    for rank_structure in &body.rank_structures {
        let rank = rank_structure.rank;
        if previous.is_some_and(|previous| previous >= rank) {
            return Err(place.corrupt("rank structures", "ascending ranks", rank));
        }
        previous = Some(rank);
        check_rank(place, "rank of a structure", rank, header, scope)?;
        check_depth(place, "rank structure", &rank_structure.structure)?;
    }
    Ok(())
}

fn check_rank(place: Place<'_>, what: &str, rank: u32, header: &Header, scope: Scope<'_>) -> Result<()> {
    if rank >= header.world_size {
        return Err(place.corrupt(what, format!("below the world size {}", header.world_size), rank));
    }
    match scope {
        Scope::Part { rank: own_rank, .. } if rank != own_rank => {
            Err(place.corrupt(what, format!("the rank of the part, {own_rank}"), rank))
        }
        _ => Ok(()),
    }
}

/// What chunk refs are checked against.
struct PackBounds {
    seq: u64,
    end_bytes: u64,
}

fn check_packs(place: Place<'_>, body: &Body, scope: Scope<'_>) -> Result<Vec<PackBounds>> {
    if body.packs.len() > limits::PACK_COUNT_LIMIT {
        return Err(place.corrupt(
            "packs",
            format!("at most {}", limits::PACK_COUNT_LIMIT),
            body.packs.len(),
        ));
    }
    let mut names = HashSet::with_capacity(body.packs.len());
    let mut bounds = Vec::with_capacity(body.packs.len());
    for pack in &body.packs {
        let parsed = parse_pack_name(&pack.name).ok_or_else(|| {
            place.corrupt(
                "name of a pack",
                "<seq>-r<rank>-<16 hex digits>.pack, or with `m` for `r`",
                shown(&pack.name),
            )
        })?;
        if !names.insert(pack.name.as_str()) {
            return Err(place.corrupt("packs", "each pack once", &pack.name));
        }
        bounds.push(PackBounds { seq: parsed.seq, end_bytes: pack.length_bytes });
    }
    let mut other_packs = body.packs.as_slice();
    if let Scope::Part { pack_name, footer_offset_bytes, .. } = scope {
        let Some((own, others)) = body.packs.split_first() else {
            return Err(place.corrupt("packs of a part", "its own pack first", "no packs"));
        };
        if own.name != pack_name || own.length_bytes != 0 {
            let found = format!("`{}` of {} bytes", own.name, own.length_bytes);
            return Err(place.corrupt("first pack of a part", format!("`{pack_name}` of 0 bytes"), found));
        }
        if let Some(own_bounds) = bounds.first_mut() {
            own_bounds.end_bytes = footer_offset_bytes;
        }
        other_packs = others;
    }
    match other_packs.iter().find(|pack| pack.length_bytes < SMALLEST_PACK_LENGTH_BYTES) {
        None => Ok(bounds),
        Some(pack) => {
            let expected = format!("at least {SMALLEST_PACK_LENGTH_BYTES}");
            Err(place.corrupt(format!("length of pack `{}`", pack.name), expected, pack.length_bytes))
        }
    }
}

/// The rules of entries, and what they add up to.
struct EntryRules<'a> {
    place: Place<'a>,
    header: &'a Header,
    body: &'a Body,
    scope: Scope<'a>,
    packs: Vec<PackBounds>,
    raw_bytes: u64,
    self_contained: bool,
}

impl EntryRules<'_> {
    fn check_entries(&mut self) -> Result<()> {
        let entries = &self.body.entries;
        if entries.len() > limits::ENTRY_COUNT_LIMIT {
            return Err(self.place.corrupt(
                "entries",
                format!("at most {}", limits::ENTRY_COUNT_LIMIT),
                entries.len(),
            ));
        }
        let mut previous = None;
        for entry in entries {
            let position = (entry.name.as_str(), entry.rank);
            if previous.is_some_and(|previous| previous >= position) {
                let expected = "ascending by name and rank, each once";
                return Err(self.place.corrupt("entries", expected, shown(&entry.name)));
            }
            previous = Some(position);
            self.check_entry(entry)?;
        }
        Ok(())
    }

    fn check_entry(&mut self, entry: &Entry) -> Result<()> {
        let place = self.place;
        if entry.name.len() > limits::ENTRY_NAME_LIMIT_BYTES {
            let expected = format!("at most {} bytes", limits::ENTRY_NAME_LIMIT_BYTES);
            return Err(place.corrupt("name of an entry", expected, entry.name.len()));
        }
        if let Some(rank) = entry.rank {
            check_rank(place, &of("rank", entry), rank, self.header, self.scope)?;
        }
        if entry.shape.len() > limits::DIMENSION_COUNT_LIMIT {
            let expected = format!("at most {} dimensions", limits::DIMENSION_COUNT_LIMIT);
            return Err(place.corrupt(of("shape", entry), expected, entry.shape.len()));
        }
        // The caller's dtype counts too: a load allocates by it.
        let is_addressable = [entry.dtype, entry.stored_dtype]
            .into_iter()
            .all(|dtype| raw_length_bytes(&entry.shape, dtype).is_some());
        let Some(element_count) = element_count(&entry.shape).filter(|_| is_addressable) else {
            return Err(place.corrupt(
                of("shape", entry),
                "a length below 2^63 bytes",
                format!("{:?}", entry.shape),
            ));
        };
        if let Some(count) = entry.nonfinite
            && count > element_count
        {
            return Err(place.corrupt(of("nonfinite", entry), format!("at most {element_count}"), count));
        }
        for (what, value) in [("abs_max", entry.abs_max), ("l2_norm", entry.l2_norm)] {
            if value.is_some_and(|value| !value.is_finite() || value.is_sign_negative()) {
                return Err(place.corrupt(
                    of(what, entry),
                    "a finite number of at least 0",
                    format!("{value:?}"),
                ));
            }
        }
        self.check_casting(entry)?;
        self.check_shards(entry, element_count)?;
        self.check_rounding(entry)?;
        self.check_tie(entry)
    }

    /// What is stored is the caller's dtype, or a narrower float; only 8-bit floats are scaled.
    fn check_casting(&self, entry: &Entry) -> Result<()> {
        let Entry { dtype, stored_dtype, .. } = entry;
        if dtype != stored_dtype && !dtype.narrows_to(*stored_dtype) {
            let expected = format!("`{}`, or a float narrower than that", dtype.name());
            return Err(self.place.corrupt(of("stored dtype", entry), expected, stored_dtype.name()));
        }
        let may_scale = dtype != stored_dtype && stored_dtype.size_bytes() == 1;
        let range = -limits::SCALE_LOG2_LIMIT..=limits::SCALE_LOG2_LIMIT;
        for shard in &entry.shards {
            if shard.scale_log2 != 0 && !(may_scale && range.contains(&shard.scale_log2)) {
                let expected = format!("0, or for an 8-bit float {} to {}", range.start(), range.end());
                return Err(self.place.corrupt(of("scale_log2", entry), expected, shard.scale_log2));
            }
        }
        Ok(())
    }

    /// The entry that one is rounded from holds the same regions in a wider float, and stands by itself.
    fn check_rounding(&self, entry: &Entry) -> Result<()> {
        let Some(source_name) = &entry.rounded_from else { return Ok(()) };
        let refuse = |expected: &str| {
            Err(self.place.corrupt(of("entry rounded from", entry), expected, shown(source_name)))
        };
        let Some(source) = self.find(source_name, entry.rank) else {
            return refuse("an entry of the same rank and part");
        };
        if source.rounded_from.is_some() || source.tied_to.is_some() {
            return refuse("an entry with chunks of its own");
        }
        if !source.stored_dtype.narrows_to(entry.stored_dtype) {
            return refuse("an entry of a wider float");
        }
        let is_same_region = |one: &Shard, other: &Shard| {
            one.offsets == other.offsets
                && one.lengths == other.lengths
                && one.scale_log2 == 0
                && other.scale_log2 == 0
        };
        let has_rounded = |shard: &Shard| shard.chunks.iter().any(|chunk| chunk.codec == Codec::Rounded);
        let is_covered = source.shape == entry.shape
            && entry.shards.iter().filter(|shard| has_rounded(shard)).all(|shard| {
                source
                    .shard_at(&shard.offsets)
                    .is_some_and(|source| is_same_region(shard, source) && !has_rounded(source))
            });
        if is_covered { Ok(()) } else { refuse("an entry of the same shape and shards, without a scale") }
    }

    /// The entry of this name and rank in this body.
    fn find(&self, name: &str, rank: Option<u32>) -> Option<&Entry> {
        let entries = &self.body.entries;
        find_entry(entries, name, rank).and_then(|index| entries.get(index))
    }

    fn check_shards(&mut self, entry: &Entry, element_count: u64) -> Result<()> {
        let place = self.place;
        if element_count == 0 {
            return match entry.shards.len() {
                0 => Ok(()),
                count => Err(place.corrupt(of("shards", entry), "none, as it has no elements", count)),
            };
        }
        if entry.shards.len() > limits::SHARD_COUNT_LIMIT {
            let expected = format!("at most {}", limits::SHARD_COUNT_LIMIT);
            return Err(place.corrupt(of("shards", entry), expected, entry.shards.len()));
        }
        if entry.rank.is_some() && entry.shards.len() != 1 {
            return Err(place.corrupt(of("shards", entry), "one, as it is rank-local", entry.shards.len()));
        }
        let mut previous: Option<&Shard> = None;
        for shard in &entry.shards {
            if previous.is_some_and(|previous| previous.offsets >= shard.offsets) {
                let expected = "ascending by offsets, each once";
                return Err(place.corrupt(of("shards", entry), expected, format!("{:?}", shard.offsets)));
            }
            previous = Some(shard);
            let shard_bytes = self.check_region(entry, shard)?;
            self.check_chunks(entry, shard, shard_bytes)?;
            if entry.tied_to.is_none() {
                self.raw_bytes = self
                    .raw_bytes
                    .checked_add(shard_bytes)
                    .ok_or_else(|| place.corrupt("entries", "a sum below 2^64 bytes", "more"))?;
            }
        }
        self.check_cover(entry)
    }

    /// Length of a shard's raw bytes.
    fn check_region(&self, entry: &Entry, shard: &Shard) -> Result<u64> {
        let fits = region_fits(&entry.shape, &shard.offsets, &shard.lengths);
        // A region inside an addressable shape is addressable.
        raw_length_bytes(&shard.lengths, entry.stored_dtype).filter(|_| fits).ok_or_else(|| {
            let expected = format!("a region with elements inside the shape {:?}", entry.shape);
            let found = format!("offsets {:?}, lengths {:?}", shard.offsets, shard.lengths);
            self.place.corrupt(of("shard", entry), expected, found)
        })
    }

    fn check_chunks(&mut self, entry: &Entry, shard: &Shard, shard_bytes: u64) -> Result<()> {
        let chunk_bytes = self.body.chunk_bytes;
        let chunk_count = shard_bytes.div_ceil(chunk_bytes);
        if shard.chunks.len() as u64 != chunk_count {
            let expected = format!("{chunk_count} for {shard_bytes} bytes");
            return Err(self.place.corrupt(of("chunks of a shard", entry), expected, shard.chunks.len()));
        }
        let mut rest_bytes = shard_bytes;
        for chunk in &shard.chunks {
            let chunk_raw_bytes = rest_bytes.min(chunk_bytes);
            rest_bytes = rest_bytes.saturating_sub(chunk_raw_bytes);
            self.check_chunk(entry, chunk, chunk_raw_bytes)?;
        }
        Ok(())
    }

    fn check_chunk(&mut self, entry: &Entry, chunk: &ChunkRef, chunk_raw_bytes: u64) -> Result<()> {
        if chunk.codec == Codec::Rounded {
            return self.check_rounded_chunk(entry, chunk);
        }
        if chunk.base.is_some() != chunk.codec.needs_base() {
            let expected = if chunk.base.is_some() { "none" } else { "one" };
            return Err(self.place.corrupt(
                of("base of a chunk", entry),
                format!("{expected} with codec {}", chunk.codec.number()),
                if chunk.base.is_some() { "one" } else { "none" },
            ));
        }
        self.check_stored(entry, chunk, chunk_raw_bytes)?;
        match chunk.base {
            Some(base) if !base.codec.is_self_contained() => Err(self.place.corrupt(
                of("base of a chunk", entry),
                "a codec that needs no base",
                base.codec.number(),
            )),
            Some(base) => self.check_stored(entry, &base.into(), chunk_raw_bytes),
            None => Ok(()),
        }
    }

    /// Checks where the stored bytes of a chunk, or of its base, lie.
    fn check_stored(&mut self, entry: &Entry, chunk: &ChunkRef, chunk_raw_bytes: u64) -> Result<()> {
        let place = self.place;
        let Some(pack) = self.packs.get(chunk.pack as usize) else {
            return Err(place.corrupt(
                of("pack of a chunk", entry),
                format!("below {}", self.packs.len()),
                chunk.pack,
            ));
        };
        if !chunk.codec.allows_length(chunk.stored_length_bytes, chunk_raw_bytes) {
            let expected = format!("{}, with {chunk_raw_bytes} raw bytes", chunk.codec.legal_lengths());
            return Err(place.corrupt(
                of("stored length of a chunk", entry),
                expected,
                chunk.stored_length_bytes,
            ));
        }
        let end_bytes = chunk.offset_bytes.checked_add(chunk.stored_length_bytes);
        if chunk.offset_bytes < HEADER_LENGTH_BYTES
            || end_bytes.is_none_or(|end_bytes| end_bytes > pack.end_bytes)
        {
            let expected = format!("bytes within {HEADER_LENGTH_BYTES}..{}", pack.end_bytes);
            let found = format!("{} bytes at {}", chunk.stored_length_bytes, chunk.offset_bytes);
            return Err(place.corrupt(of("chunk", entry), expected, found));
        }
        self.self_contained &= pack.seq == self.header.seq;
        Ok(())
    }

    /// A chunk that is computed from another entry has no place.
    fn check_rounded_chunk(&self, entry: &Entry, chunk: &ChunkRef) -> Result<()> {
        let place = self.place;
        if entry.rounded_from.is_none() {
            return Err(place.corrupt(of("rounded chunk", entry), "an entry it is rounded from", "none"));
        }
        let facts = (chunk.pack, chunk.offset_bytes, chunk.stored_length_bytes, chunk.base);
        if facts == (0, 0, 0, None) {
            return Ok(());
        }
        Err(place.corrupt(of("rounded chunk", entry), "pack, offset and length 0", format!("{facts:?}")))
    }

    fn check_cover(&self, entry: &Entry) -> Result<()> {
        if entry.shards.first().is_some_and(|shard| shard.lengths == entry.shape) && entry.shards.len() == 1 {
            return Ok(());
        }
        // A rank-local tensor is whole on its rank, also in a part.
        if entry.rank.is_none() && matches!(self.scope, Scope::Part { .. }) {
            return Ok(());
        }
        match check_cover(&entry.shape, &entry.shards) {
            Cover::Exact => Ok(()),
            Cover::Wrong { element, shard_count } => {
                let found = format!("element {element:?} in {shard_count} shards");
                Err(self.place.corrupt(of("shards", entry), "each element in exactly one shard", found))
            }
            Cover::TooManyCutDimensions { cut_dimension_count } => {
                let expected = format!("at most {} cut dimensions", limits::CUT_DIMENSION_LIMIT);
                Err(self.place.corrupt(of("shards", entry), expected, cut_dimension_count))
            }
        }
    }

    fn check_tie(&self, entry: &Entry) -> Result<()> {
        let Some(target_name) = &entry.tied_to else { return Ok(()) };
        let Some(target) = self.find(target_name, entry.rank) else {
            return match self.scope {
                Scope::Part { .. } => Ok(()),
                Scope::Snapshot => {
                    Err(self.place.corrupt(of("tie", entry), "an entry of the same rank", shown(target_name)))
                }
            };
        };
        if target.tied_to.is_some() {
            return Err(self.place.corrupt(
                of("tie", entry),
                "an entry that is no tie itself",
                shown(target_name),
            ));
        }
        let is_same = target.dtype == entry.dtype
            && target.stored_dtype == entry.stored_dtype
            && target.shape == entry.shape
            && target.rounded_from == entry.rounded_from
            && target.shards == entry.shards;
        if is_same {
            return Ok(());
        }
        let expected = "an entry of the same dtype, shape and shards";
        Err(self.place.corrupt(of("tie", entry), expected, shown(target_name)))
    }
}

/// True for a region with elements that lies inside of a shape.
fn region_fits(shape: &[u64], offsets: &[u64], lengths: &[u64]) -> bool {
    offsets.len() == shape.len()
        && lengths.len() == shape.len()
        && shape.iter().zip(offsets).zip(lengths).all(|((&size, &offset), &length)| {
            length > 0 && offset.checked_add(length).is_some_and(|end| end <= size)
        })
}

/// `what` of an entry, for messages.
fn of(what: &str, entry: &Entry) -> String {
    format!("{what} of `{}`", shown(&entry.name))
}

/// A name for messages: without control characters, and cut where it is long.
fn shown(name: &str) -> String {
    let mut text = name.escape_debug().take(SHOWN_NAME_LENGTH).collect::<String>();
    if text.len() < name.len() {
        text.push_str("...");
    }
    text
}

#[cfg(test)]
mod tests;
