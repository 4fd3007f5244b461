//! The structs that the codecs of this folder read and write. Field by field: FORMAT.md, "Manifest".

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::digest::ChunkDigest;
use crate::tensor::Dtype;

/// What is known of a snapshot from one small read: the first line of its manifest.
#[derive(Clone, Debug)]
pub struct Header {
    /// Repository the snapshot was made in: 32 hex digits.
    pub repository_id: String,
    /// Save session that made it: 32 hex digits; tells two writers of the same seq apart.
    pub session_id: String,
    /// Commit number, 1, 2, ...
    pub seq: u64,
    /// Training step the caller gave: a label, may repeat or go back.
    pub step: u64,
    /// Seq of the snapshot the run was at when it saved.
    pub parent: Option<u64>,
    /// Milliseconds since 1970-01-01 UTC by the coordinator's clock: a label, never an order.
    pub created_at_unix_ms: u64,
    /// Number of ranks that wrote it.
    pub world_size: u32,
    /// Caller's metrics; NaN and infinities allowed.
    pub metrics: BTreeMap<String, f64>,
    /// Caller's metadata: one JSON value as Python's `state.py` encodes it.
    pub metadata: Box<RawValue>,
    /// Raw bytes of all entries (ties counted once).
    pub raw_bytes: u64,
    /// Bytes this save added to the repository: its packs.
    pub stored_bytes: u64,
    /// Non-finite elements by entry name, only entries that have some.
    pub nonfinite: BTreeMap<String, u64>,
    /// True where every chunk lies in a pack of this snapshot's own seq.
    pub self_contained: bool,
    /// BLAKE3 over the canonical entry list: 64 hex digits (FORMAT.md, "State digest").
    pub state_digest: String,
}

/// Metadata is compared as text, metrics as floats: NaN differs from NaN.
impl PartialEq for Header {
    fn eq(&self, other: &Self) -> bool {
        let Self {
            repository_id,
            session_id,
            seq,
            step,
            parent,
            created_at_unix_ms,
            world_size,
            metrics,
            metadata,
            raw_bytes,
            stored_bytes,
            nonfinite,
            self_contained,
            state_digest,
        } = self;
        repository_id == &other.repository_id
            && session_id == &other.session_id
            && seq == &other.seq
            && step == &other.step
            && parent == &other.parent
            && created_at_unix_ms == &other.created_at_unix_ms
            && world_size == &other.world_size
            && metrics == &other.metrics
            && metadata.get() == other.metadata.get()
            && raw_bytes == &other.raw_bytes
            && stored_bytes == &other.stored_bytes
            && nonfinite == &other.nonfinite
            && self_contained == &other.self_contained
            && state_digest == &other.state_digest
    }
}

/// Everything else of a snapshot: the second line of its manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Body {
    /// Raw bytes of every chunk but a shard's last one.
    pub chunk_bytes: u64,
    /// Packs that chunk refs point into, by index.
    pub packs: Vec<PackRecord>,
    /// Entries, sorted by (name, rank).
    pub entries: Vec<Entry>,
    /// Typed tree of the state, encoded by the Python layer; opaque here.
    pub structure: Box<RawValue>,
    /// Typed trees of rank-local state, ascending by rank.
    pub rank_structures: Vec<RankStructure>,
}

/// A pack that a manifest refers to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackRecord {
    /// Name in `packs/`.
    pub name: String,
    /// Length of the pack; 0 in a part, for the pack that carries this very part.
    pub length_bytes: u64,
}

/// A saved tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Name: the path in the saved nest, shown as api.md says.
    pub name: String,
    /// The rank it is local to; absent for state with a global meaning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Element type of the caller's tensor, and of what a load gives back.
    pub dtype: Dtype,
    /// Element type of the raw bytes; differs from `dtype` after a cast.
    pub stored_dtype: Dtype,
    /// Global shape, in elements.
    pub shape: Vec<u64>,
    /// Name of the entry whose storage this one shared when it was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tied_to: Option<String>,
    /// Elements that are NaN or infinite, where counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nonfinite: Option<u64>,
    /// Regions that cover the shape exactly, sorted by offsets. Empty regions own no shard.
    pub shards: Vec<Shard>,
}

/// What one rank holds of an entry: a region, in row-major order, cut into chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// First index in each dimension.
    pub offsets: Vec<u64>,
    /// Number of indices in each dimension.
    pub lengths: Vec<u64>,
    /// Consecutive chunks of the region's raw bytes.
    pub chunks: Vec<ChunkRef>,
}

/// All that a reader needs to find and check one chunk. Written as a JSON array in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkRef {
    /// Index into the pack table of the same body.
    pub pack: u32,
    /// Offset of the stored bytes from the pack's first byte.
    pub offset_bytes: u64,
    /// Number of stored bytes.
    pub stored_length_bytes: u64,
    /// How the stored bytes become raw bytes (FORMAT.md, "Codecs").
    pub codec: Codec,
    /// Digest of the raw bytes.
    pub digest: ChunkDigest,
}

/// How stored bytes become raw bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Stored bytes are the raw bytes.
    Store,
    /// Byte planes of the elements, entropy-coded where that gains.
    Planes,
    /// Byte planes of the differences from a base chunk.
    Delta,
    /// The elements that differ from a base chunk: where, and by how much.
    Sparse,
    /// One frame of zstd.
    Zstd,
    /// Elements of another chunk, rounded: nothing is stored.
    Rounded,
}

/// Rank-local state of one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankStructure {
    /// The rank that saved it.
    pub rank: u32,
    /// Typed tree, opaque here.
    pub structure: Box<RawValue>,
}

/// A decoded manifest.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// First line.
    pub header: Header,
    /// Second line.
    pub body: Body,
}

/// One rank's fragment of a manifest: travels in the footer of that rank's pack.
#[derive(Clone, Debug)]
pub struct Part {
    /// Rank that wrote it.
    pub rank: u32,
    /// Facts of the snapshot as this rank knows them; sizes and digests are this rank's own share.
    pub header: Header,
    /// This rank's entries. Pack 0 is the pack that carries the part.
    pub body: Body,
}
