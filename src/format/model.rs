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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// Name of the entry of the same rank that chunks of codec [`Codec::Rounded`] are computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rounded_from: Option<String>,
    /// Elements that are NaN or infinite, where counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nonfinite: Option<u64>,
    /// Largest magnitude of its finite elements, where counted: finite, at least 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abs_max: Option<f64>,
    /// Square root of the sum of the squares of its finite elements, where counted: finite, at least 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l2_norm: Option<f64>,
    /// Regions that cover the shape exactly, sorted by offsets. Empty regions own no shard.
    pub shards: Vec<Shard>,
}

/// Index of the entry of this name and rank among entries that ascend by both, as those of a body do.
#[must_use]
pub fn find_entry(entries: &[Entry], name: &str, rank: Option<u32>) -> Option<usize> {
    entries.binary_search_by(|probe| (probe.name.as_str(), probe.rank).cmp(&(name, rank))).ok()
}

impl Entry {
    /// The shard that begins at these offsets; shards ascend by them.
    #[must_use]
    pub fn shard_at(&self, offsets: &[u64]) -> Option<&Shard> {
        let found = self.shards.binary_search_by(|probe| probe.offsets.as_slice().cmp(offsets));
        self.shards.get(found.ok()?)
    }
}

/// What one rank holds of an entry: a region, in row-major order, cut into chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// First index in each dimension.
    pub offsets: Vec<u64>,
    /// Number of indices in each dimension.
    pub lengths: Vec<u64>,
    /// The caller's values are the stored ones times two to this power; 0 but for 8-bit floats.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub scale_log2: i32,
    /// Consecutive chunks of the region's raw bytes.
    pub chunks: Vec<ChunkRef>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(number: &i32) -> bool {
    *number == 0
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
    /// The chunk that a difference was taken against; only codecs with [`Codec::needs_base`] have one.
    pub base: Option<BaseRef>,
}

/// A chunk whose raw bytes follow from its stored bytes alone. As [`ChunkRef`], without a base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BaseRef {
    /// Index into the pack table of the same body.
    pub pack: u32,
    /// Offset of the stored bytes from the pack's first byte.
    pub offset_bytes: u64,
    /// Number of stored bytes.
    pub stored_length_bytes: u64,
    /// How the stored bytes become raw bytes; one that needs no base.
    pub codec: Codec,
    /// Digest of the raw bytes, which are as many as those of the chunk it is the base of.
    pub digest: ChunkDigest,
}

impl ChunkRef {
    /// A chunk that is computed from another entry, and lies nowhere.
    #[must_use]
    pub fn rounded(digest: ChunkDigest) -> Self {
        let codec = Codec::Rounded;
        Self { pack: 0, offset_bytes: 0, stored_length_bytes: 0, codec, digest, base: None }
    }

    /// The chunk as the base of another, where it needs none itself and lies in a pack.
    #[must_use]
    pub fn as_base(&self) -> Option<BaseRef> {
        let Self { pack, offset_bytes, stored_length_bytes, codec, digest, base } = *self;
        (base.is_none() && codec.is_self_contained()).then_some(BaseRef {
            pack,
            offset_bytes,
            stored_length_bytes,
            codec,
            digest,
        })
    }
}

impl From<BaseRef> for ChunkRef {
    fn from(base: BaseRef) -> Self {
        let BaseRef { pack, offset_bytes, stored_length_bytes, codec, digest } = base;
        Self { pack, offset_bytes, stored_length_bytes, codec, digest, base: None }
    }
}

/// How stored bytes become raw bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Stored bytes are the raw bytes.
    Store,
    /// Byte planes of floats, each as it is or entropy-coded.
    Planes,
    /// Byte planes of the differences to a base.
    Delta,
    /// The few elements that differ from a base: gaps and differences.
    Sparse,
    /// One frame of zstd.
    Zstd,
    /// Nothing is stored: the raw bytes are those of another entry of the state, rounded.
    Rounded,
}

impl Codec {
    /// True where the raw bytes are a difference to those of a base.
    #[must_use]
    pub fn needs_base(self) -> bool {
        matches!(self, Self::Delta | Self::Sparse)
    }

    /// True where a chunk may have these lengths. Coded chunks are shorter than what they hold.
    #[must_use]
    pub fn allows_length(self, stored_length_bytes: u64, raw_length_bytes: u64) -> bool {
        match self {
            Self::Store => stored_length_bytes == raw_length_bytes,
            Self::Planes | Self::Delta | Self::Sparse | Self::Zstd => {
                (1..raw_length_bytes).contains(&stored_length_bytes)
            }
            Self::Rounded => stored_length_bytes == 0,
        }
    }

    /// What [`Codec::allows_length`] allows, for messages.
    pub(super) fn legal_lengths(self) -> &'static str {
        match self {
            Self::Store => "as many as the raw bytes",
            Self::Planes | Self::Delta | Self::Sparse | Self::Zstd => {
                "at least 1 and fewer than the raw bytes"
            }
            Self::Rounded => "0",
        }
    }

    /// True where the stored bytes are all it takes.
    #[must_use]
    pub fn is_self_contained(self) -> bool {
        matches!(self, Self::Store | Self::Planes | Self::Zstd)
    }
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
    /// What this rank holds, another one may write, and all must agree on: ascending by (name, offsets).
    pub replicas: Vec<Replica>,
}

/// A region of an entry with a global meaning that a rank holds, and what its bytes are. Stands in parts only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    /// Name of the entry.
    pub name: String,
    /// Element type of the caller's tensor.
    pub dtype: Dtype,
    /// Global shape, in elements.
    pub shape: Vec<u64>,
    /// First index in each dimension.
    pub offsets: Vec<u64>,
    /// Number of indices in each dimension; none is 0.
    pub lengths: Vec<u64>,
    /// [`ChunkDigest::of_digests`] of the region's row-major bytes in `dtype`, cut every `chunk_bytes`.
    pub digest: ChunkDigest,
}
