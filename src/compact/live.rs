//! What is live in the packs of a group, where it went, and the manifests that point there.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::digest::ChunkDigest;
use crate::format::model::{BaseRef, Body, ChunkRef, Codec, Manifest, PackRecord};
use crate::format::names;
use crate::plan::chunk_ranges;
use crate::tensor::raw_length_bytes;

use super::stored_chunks;

/// A chunk that has to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveChunk {
    /// Index into [`Live::packs`], and the rest as in a ref; a base has its index there too.
    pub reference: ChunkRef,
    /// Length of its raw bytes.
    pub raw_length_bytes: u64,
}

/// What is live in the packs of a group.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// The packs of the group, then others that bases lie in.
    pub packs: Vec<PackRecord>,
    source_count: usize,
    index: HashMap<String, u32>,
    chunks: BTreeMap<(u32, u64), LiveChunk>,
}

impl Live {
    /// Starts with the packs of a group and nothing live in them.
    #[must_use]
    pub fn new(sources: &[String]) -> Self {
        let mut live = Self::default();
        for name in sources {
            live.index_of(&PackRecord { name: name.clone(), length_bytes: 0 });
        }
        live.source_count = live.packs.len();
        live
    }

    /// Adds the chunks that a snapshot has in the packs of the group, and the bases that it has there.
    pub fn add(&mut self, body: &Body) {
        let indices: Vec<u32> = body.packs.iter().map(|record| self.index_of(record)).collect();
        let place = |mut base: BaseRef| {
            base.pack = indices[base.pack as usize];
            base
        };
        for entry in &body.entries {
            for shard in &entry.shards {
                let length_bytes = raw_length_bytes(&shard.lengths, entry.stored_dtype).unwrap_or(0);
                for (range, chunk) in chunk_ranges(length_bytes, body.chunk_bytes).zip(&shard.chunks) {
                    for mut reference in stored_chunks(chunk) {
                        reference.pack = indices[reference.pack as usize];
                        reference.base = reference.base.map(place);
                        if (reference.pack as usize) < self.source_count {
                            let raw_length_bytes = range.end - range.start;
                            self.chunks
                                .entry((reference.pack, reference.offset_bytes))
                                .or_insert(LiveChunk { reference, raw_length_bytes });
                        }
                    }
                }
            }
        }
    }

    fn index_of(&mut self, record: &PackRecord) -> u32 {
        let next = self.packs.len() as u32;
        let index = *self.index.entry(record.name.clone()).or_insert(next);
        if index == next {
            self.packs.push(record.clone());
        } else if record.length_bytes > 0 {
            self.packs[index as usize].length_bytes = record.length_bytes;
        }
        index
    }

    /// Names of the packs of the group.
    pub fn sources(&self) -> impl Iterator<Item = &str> {
        self.packs[..self.source_count].iter().map(|record| record.name.as_str())
    }

    /// Indices of the packs that have to be read.
    #[must_use]
    pub fn needed_packs(&self) -> HashSet<u32> {
        let chunks = self.chunks.values().map(|chunk| &chunk.reference);
        chunks.flat_map(|chunk| [Some(chunk.pack), chunk.base.map(|base| base.pack)]).flatten().collect()
    }

    /// Everything to copy as it lies in the packs, which is the order in which it is written: what is
    /// consecutive stays so, and can be mapped.
    pub fn in_order(&self) -> impl Iterator<Item = &LiveChunk> {
        self.chunks.values()
    }
}

/// Where a chunk lies in the merged pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Offset of the stored bytes from the merged pack's first byte.
    pub offset_bytes: u64,
    /// Number of stored bytes.
    pub stored_length_bytes: u64,
    /// How they become raw bytes; another one than before where two chunks of the same bytes became one.
    pub codec: Codec,
    /// Digest of the raw bytes.
    pub digest: ChunkDigest,
}

/// What a merge has copied: from which place in which packs to where in the merged one.
#[derive(Clone, Debug)]
pub struct Moves {
    /// Name of the merged pack.
    pub pack: PackRecord,
    places: HashMap<String, HashMap<u64, Moved>>,
}

impl Moves {
    /// Nothing moved yet out of these packs into that one, whose length is known later.
    pub fn new<'a>(sources: impl Iterator<Item = &'a str>, pack: &str) -> Self {
        Self {
            pack: PackRecord { name: pack.to_owned(), length_bytes: 0 },
            places: sources.map(|name| (name.to_owned(), HashMap::new())).collect(),
        }
    }

    /// Notes where a chunk of a source went.
    pub fn note(&mut self, source: &str, offset_bytes: u64, moved: Moved) {
        if let Some(places) = self.places.get_mut(source) {
            places.insert(offset_bytes, moved);
        }
    }

    fn is_empty(&self) -> bool {
        self.places.values().all(HashMap::is_empty)
    }

    /// Goes on to where a later merge has moved what this one had copied; what that left behind is no longer
    /// to be had.
    pub fn go_on(&mut self, later: &Self) {
        let Some(further) = later.places.get(&self.pack.name) else { return };
        for places in self.places.values_mut() {
            places.retain(|_, moved| {
                let next = further.get(&moved.offset_bytes);
                next.map(|next| *moved = *next).is_some()
            });
        }
        self.pack = later.pack.clone();
    }

    /// Names of the packs that were merged.
    pub fn sources(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// True where a snapshot with this pack table refers to a pack that was merged.
    pub fn concern<'a>(&self, mut packs: impl Iterator<Item = &'a PackRecord>) -> bool {
        packs.any(|record| self.places.contains_key(&record.name))
    }

    /// The manifest of the same snapshot that refers to the merged pack instead of the old ones; `None`
    /// where it needs a chunk that was not copied.
    ///
    /// Nothing but the pack table and the refs changes, and `self_contained` where it is no longer so.
    #[must_use]
    pub fn repoint(&self, manifest: &Manifest) -> Option<Manifest> {
        let mut made = manifest.clone();
        let body = &mut made.body;
        let old = std::mem::take(&mut body.packs);
        let mut indices = Vec::with_capacity(old.len());
        for record in &old {
            indices.push(body.packs.len() as u32);
            if !self.places.contains_key(&record.name) {
                body.packs.push(record.clone());
            }
        }
        // A snapshot that is served for the second time may refer to the merged pack already.
        let known = body.packs.iter().position(|record| record.name == self.pack.name);
        let merged = known.unwrap_or(body.packs.len()) as u32;
        let mut is_used = false;
        let mut go = |base: BaseRef| -> Option<BaseRef> {
            let Some(places) = self.places.get(&old.get(base.pack as usize)?.name) else {
                return Some(BaseRef { pack: indices[base.pack as usize], ..base });
            };
            let Moved { offset_bytes, stored_length_bytes, codec, digest } =
                *places.get(&base.offset_bytes)?;
            is_used = true;
            let moved = BaseRef { pack: merged, offset_bytes, stored_length_bytes, codec, digest };
            // Two manifests that say different things of one place: this one is not served.
            (digest == base.digest).then_some(moved)
        };
        for chunk in
            body.entries.iter_mut().flat_map(|entry| &mut entry.shards).flat_map(|shard| &mut shard.chunks)
        {
            if chunk.codec == Codec::Rounded {
                continue;
            }
            let ChunkRef { pack, offset_bytes, stored_length_bytes, codec, digest, base } = *chunk;
            let own = go(BaseRef { pack, offset_bytes, stored_length_bytes, codec, digest })?;
            let base = match base {
                Some(base) => Some(go(base)?),
                None => None,
            };
            *chunk = ChunkRef { base, ..own.into() };
        }
        // A merge leaves a pack of its own in any case: by its name the next one who opens knows that packs may
        // lie around.
        if known.is_none() && (is_used || self.is_empty()) {
            body.packs.push(self.pack.clone());
        }
        let own_seq = |index: usize| {
            names::parse_pack_name(&body.packs[index].name).is_some_and(|name| name.seq == made.header.seq)
        };
        made.header.self_contained &= (0..body.packs.len()).all(own_seq);
        Some(made)
    }
}
