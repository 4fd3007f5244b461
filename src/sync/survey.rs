//! Looks at both sides: takes the view of the bucket, compares what both have, finds what has diverged.

use std::sync::Arc;

use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::journal::Pushed;
use crate::format::marker::Marker;
use crate::format::model::{Header, Manifest, PackRecord};
use crate::format::{encrypted, limits, manifest, names};
use crate::store::remote::Version;
use crate::store::{Folder, Key, PutMode, Store};

use super::Diverged;
use super::head::{first_line, line_digest, read_head};
use super::plan::Local;
use super::tiered::TieredStore;
use super::view::{Row, View};

impl TieredStore {
    /// Takes the view of the bucket, with the lease in hand: from here on both are known.
    ///
    /// # Errors
    /// [`Error::Conflict`] where both have diverged and `diverged` says so; [`Error::NotARepository`] where the
    /// bucket is that of another repository; [`Error::Store`] where the bucket can't be reached.
    pub(super) fn settle(&self, diverged: Diverged) -> Result<()> {
        let mut view = View::take(self.remote.as_ref())?;
        if let Some(since_nonce) = self.lease.since_nonce() {
            self.notes.enter(&since_nonce)?;
        }
        self.compare_markers(&view, diverged)?;
        let colliding = self.compare_manifests(&view)?;
        if !colliding.is_empty() {
            if diverged == Diverged::Raise {
                return Err(self.divergence(&colliding));
            }
            self.discard(&colliding, &view)?;
        }
        self.compare_tags(&mut view)?;
        self.compare_receipts(&view)?;
        let headed = [Folder::Snapshots, Folder::Tags]
            .into_iter()
            .flat_map(|folder| view.rows(folder).map(move |(name, row)| (folder, name.clone(), row.clone())));
        self.fetch_heads(headed)?;
        self.heads.keep_only(|key| view.has(key));
        self.notes.keep_pushed(|key| view.has(key));
        self.state().view = Some(view);
        Ok(())
    }

    /// One repository lies in the folder and in the bucket, or one of the two is new. An empty folder gets the marker
    /// of the bucket; so does one whose own repository is to be dropped, of which nothing was ever pushed here.
    fn compare_markers(&self, view: &View, diverged: Diverged) -> Result<()> {
        let key = Key::new(Folder::Root, names::MARKER_NAME)?;
        let limit = limits::SMALL_OBJECT_LIMIT_BYTES;
        let read = |bytes: Result<Vec<u8>>| match bytes.and_then(|bytes| Ok((Marker::decode(&bytes)?, bytes)))
        {
            Ok(read) => Ok(Some(read)),
            Err(error) if error.is_not_found() || matches!(error, Error::Corrupt { .. }) => Ok(None),
            Err(error) => Err(error),
        };
        let there = if view.has(&key) { read(self.remote.get(&key, limit))? } else { None };
        let here = read(self.local.get(&key, limit))?;
        match (&here, &there) {
            (Some((here, _)), Some((there, bytes))) if here.repository_id != there.repository_id => {
                if diverged == Diverged::Discard && self.notes.all_pushed().is_empty() {
                    there.require_writable()?;
                    self.drop_here(self.local_seqs()?.into_iter().collect())?;
                    for folder in [Folder::Tags, Folder::Receipts] {
                        let names: Vec<String> =
                            self.local.list(folder)?.into_iter().map(|row| row.name).collect();
                        self.local.delete(folder, &names)?;
                    }
                    self.notes.begin_anew(&there.repository_id)?;
                    return self.local.put(&key, bytes, PutMode::Replace);
                }
                Err(Error::NotARepository {
                    root: self.remote.root(),
                    reason: format!(
                        "it is the bucket of another one: repository {} lies there, and {} in `{}`",
                        there.repository_id,
                        here.repository_id,
                        self.local.root()
                    ),
                })
            }
            (None, Some((there, bytes))) => {
                there.require_writable()?;
                self.local.put(&key, bytes, PutMode::Replace)?;
                self.notes.set_repository(&there.repository_id);
                Ok(())
            }
            (Some((here, _)), _) => {
                self.notes.set_repository(&here.repository_id);
                Ok(())
            }
            (None, None) => Ok(()),
        }
    }

    /// The same for a marker that was not there when the view was taken.
    pub(super) fn compare_with_marker(&self, key: &Key) -> Result<()> {
        let mut view = View::default();
        let row = Row { length_bytes: 0, version: Version(String::new()), modified_unix_ms: 0 };
        view.insert(key, row);
        self.compare_markers(&view, Diverged::Raise)
    }

    /// Notes for every snapshot that lies on both sides which object of the bucket is which of the folder; returns those
    /// that are two snapshots of one number.
    fn compare_manifests(&self, view: &View) -> Result<Vec<u64>> {
        let mut colliding = Vec::new();
        let mut unknown = Vec::new();
        for seq in self.local_seqs()? {
            let key = Key::new(Folder::Snapshots, &names::manifest_name(seq))?;
            let Some(row) = view.get(&key) else { continue };
            if self.notes.pushed(&key).is_none_or(|pushed| pushed.version != row.version.0) {
                unknown.push((seq, key, row.clone()));
            }
        }
        let rows: Vec<(Key, Row)> = unknown.iter().map(|(_, key, row)| (key.clone(), row.clone())).collect();
        self.heads.fetch(self.remote.as_ref(), &rows)?;
        for (seq, key, row) in unknown {
            let Some(there) = self.heads.get(&key, &row.version) else { continue };
            let here = self.local.open(&key).and_then(|object| read_head(object.as_ref()))?;
            match (Identity::of(&key, &here), Identity::of(&key, &there)) {
                (Ok(here), Ok(there)) if !here.is_same(&there) => colliding.push(seq),
                // A manifest that can't be read is replaced by the one that can.
                (Ok(_), Err(Error::Corrupt { .. })) => {}
                (_, Err(error @ Error::Unsupported { .. })) => return Err(error),
                _ => {
                    let (digest, local) = (line_digest(&there), line_digest(&here));
                    let local_digest = (local != digest).then_some(local);
                    self.notes.note_pushed(key, Pushed { version: row.version.0, digest, local_digest });
                }
            }
        }
        Ok(colliding)
    }

    /// A tag that changed in the bucket and not here since it was pushed is taken over. Of all others this folder's is
    /// the newer one.
    fn compare_tags(&self, view: &mut View) -> Result<()> {
        for row in self.local.list(Folder::Tags)? {
            let key = Key::new(Folder::Tags, &row.name)?;
            let Some(there) = view.get(&key).cloned() else { continue };
            let known = self.notes.pushed(&key);
            if known.as_ref().is_some_and(|known| known.version == there.version.0) {
                continue;
            }
            let here = self.local.get(&key, limits::SMALL_OBJECT_LIMIT_BYTES)?;
            let (bytes, version) = self.remote.get_versioned(&key, limits::SMALL_OBJECT_LIMIT_BYTES)?;
            let digest = ChunkDigest::of(&bytes);
            let is_unchanged_here = known.is_some_and(|known| known.digest == ChunkDigest::of(&here));
            if here != bytes && is_unchanged_here {
                self.local.put(&key, &bytes, PutMode::Replace)?;
            }
            if here == bytes || is_unchanged_here {
                self.notes.note_pushed(key.clone(), pushed(&version, digest));
                view.insert(&key, Row { version, ..there });
            }
        }
        Ok(())
    }

    /// Receipts are taken for those of the bucket where nothing says otherwise: none is worth a conflict.
    fn compare_receipts(&self, view: &View) -> Result<()> {
        for row in self.local.list(Folder::Receipts)? {
            let key = Key::new(Folder::Receipts, &row.name)?;
            let Some(there) = view.get(&key) else { continue };
            let known = self.notes.pushed(&key);
            if known.is_none_or(|known| known.version != there.version.0) {
                let digest = self.small_digest(&key)?;
                self.notes.note_pushed(key, pushed(&there.version, digest));
            }
        }
        Ok(())
    }

    /// The error of two branches with the same numbers.
    pub(super) fn divergence(&self, colliding: &[u64]) -> Error {
        let numbers: Vec<String> = colliding.iter().map(u64::to_string).collect();
        Error::Conflict {
            object: format!("{}/snapshots", self.remote.root()),
            by: format!(
                "another run has used numbers there that snapshots in `{}` have as well and were never pushed: {}; \
                 `varvite ls --remote` shows both, `diverged=\"discard\"` drops those of the folder",
                self.local.root(),
                numbers.join(", ")
            ),
        }
    }

    /// Drops the branch of the folder that another writer's has taken the place of: the colliding snapshots and all
    /// newer ones that the bucket hasn't.
    fn discard(&self, colliding: &[u64], view: &View) -> Result<()> {
        let Some(&first) = colliding.iter().min() else { return Ok(()) };
        let mut dropped = Vec::new();
        for seq in self.local_seqs()?.into_iter().filter(|seq| *seq >= first) {
            let key = Key::new(Folder::Snapshots, &names::manifest_name(seq))?;
            if colliding.contains(&seq) || !view.has(&key) {
                dropped.push(seq);
            }
        }
        self.drop_here(dropped)
    }

    /// Drops snapshots of the folder, which ascend. Their packs go with the next sweep.
    fn drop_here(&self, dropped: Vec<u64>) -> Result<()> {
        // IMPORTANT: first. Without it the packs would be taken for those of an unfinished save at the next open.
        if let Some(newest) = dropped.last() {
            let tombstone = Key::new(Folder::Snapshots, &names::tombstone_name(*newest))?;
            self.local.put(&tombstone, names::TOMBSTONE_CONTENT, PutMode::Replace)?;
        }
        let manifests: Vec<String> = dropped.iter().map(|seq| names::manifest_name(*seq)).collect();
        self.local.delete(Folder::Snapshots, &manifests)?;
        self.state().discarded = dropped;
        Ok(())
    }

    /// What lies in the folder, with digests.
    pub(super) fn survey(&self) -> Result<Local> {
        let mut local = Local::default();
        for row in self.local.list(Folder::Snapshots)? {
            if let Some(seq) = names::parse_tombstone_name(&row.name) {
                local.tombstones.insert(seq);
            } else if let Some(seq) = names::parse_manifest_name(&row.name) {
                let key = Key::new(Folder::Snapshots, &row.name)?;
                if let Some(digest) = or_gone(self.manifest_digest(&key))? {
                    local.manifests.insert(seq, digest);
                }
            }
        }
        for row in self.local.list(Folder::Tags)? {
            let key = Key::new(Folder::Tags, &row.name)?;
            let bytes = or_gone(self.local.get(&key, limits::SMALL_OBJECT_LIMIT_BYTES))?;
            local.tags.extend(bytes.map(|bytes| (row.name, ChunkDigest::of(&bytes))));
        }
        for row in self.local.list(Folder::Receipts)? {
            if let Some(number) = names::parse_receipt_name(&row.name) {
                let key = Key::new(Folder::Receipts, &row.name)?;
                local.receipts.extend(or_gone(self.small_digest(&key))?.map(|digest| (number, digest)));
            }
        }
        local.packs = self.local.list(Folder::Packs)?.into_iter().map(|row| row.name).collect();
        Ok(local)
    }

    fn manifest_digest(&self, key: &Key) -> Result<ChunkDigest> {
        self.digest_by(key, line_digest, |tiers| {
            tiers.local.open(key).and_then(|object| read_head(object.as_ref()))
        })
    }

    fn small_digest(&self, key: &Key) -> Result<ChunkDigest> {
        self.digest_by(key, ChunkDigest::of, |tiers| tiers.local.get(key, limits::RECEIPT_LIMIT_BYTES))
    }

    fn digest_by(
        &self,
        key: &Key,
        digest: impl Fn(&[u8]) -> ChunkDigest,
        read: impl Fn(&Self) -> Result<Vec<u8>>,
    ) -> Result<ChunkDigest> {
        if let Some(known) = self.state().digests.get(key) {
            return Ok(*known);
        }
        let digest = digest(&read(self)?);
        self.state().digests.insert(key.clone(), digest);
        Ok(digest)
    }

    /// A local manifest with the digest of its header line, its pack table and its bytes.
    pub(super) fn local_manifest(&self, seq: u64) -> Result<LocalManifest> {
        let key = Key::new(Folder::Snapshots, &names::manifest_name(seq))?;
        let bytes = self.local.get(&key, limits::MANIFEST_LIMIT_BYTES)?;
        let decoded = self.decode_manifest(self.local.as_ref(), &key, &bytes)?;
        let digest = line_digest(&bytes);
        let packs = Arc::new(decoded.body.packs);
        self.state().tables.insert(seq, (digest, Arc::clone(&packs)));
        Ok(LocalManifest { key, identity: Identity::from(&decoded.header), packs, digest, bytes })
    }

    /// A manifest as it lies in the folder or in the bucket.
    pub(super) fn decode_manifest(&self, store: &dyn Store, key: &Key, bytes: &[u8]) -> Result<Manifest> {
        crate::encrypted::decode_manifest(store, key, bytes, self.options.key.as_ref())
    }

    /// Pack table of a local manifest with this digest.
    pub(super) fn local_table(&self, seq: u64, digest: ChunkDigest) -> Result<Arc<Vec<PackRecord>>> {
        self.known_table(seq, digest).map_or_else(|| Ok(self.local_manifest(seq)?.packs), Ok)
    }

    fn known_table(&self, seq: u64, digest: ChunkDigest) -> Option<Arc<Vec<PackRecord>>> {
        let state = self.state();
        state.tables.get(&seq).filter(|(of, _)| *of == digest).map(|(_, table)| Arc::clone(table))
    }

    /// Pack table of a manifest of this digest, as this handle or the folder has it.
    pub(super) fn own_table(&self, seq: u64, key: &Key, digest: ChunkDigest) -> Option<Arc<Vec<PackRecord>>> {
        // What can't be read here is asked for there.
        self.known_table(seq, digest).or_else(|| {
            let is_same = self.manifest_digest(key).is_ok_and(|local| local == digest);
            if is_same { self.local_table(seq, digest).ok() } else { None }
        })
    }
}

/// A manifest of the folder.
#[derive(Debug)]
pub(super) struct LocalManifest {
    pub(super) key: Key,
    pub(super) identity: Identity,
    pub(super) packs: Arc<Vec<PackRecord>>,
    pub(super) digest: ChunkDigest,
    pub(super) bytes: Vec<u8>,
}

pub(super) fn pushed(version: &Version, digest: ChunkDigest) -> Pushed {
    Pushed { version: version.0.clone(), digest, local_digest: None }
}

/// What was listed may be gone by the time it is read.
fn or_gone<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Which snapshot a manifest is of.
#[derive(Debug)]
pub(super) struct Identity {
    pub(super) session_id: String,
    pub(super) step: u64,
    /// `None` where only a key shows it.
    state_digest: Option<String>,
}

impl Identity {
    /// That of the manifest with these first bytes.
    pub(super) fn of(key: &Key, head: &[u8]) -> Result<Self> {
        let object = key.to_string();
        if encrypted::is_encrypted(head) {
            let facts = encrypted::Head::decode(&object, head)?.facts;
            return Ok(Self {
                session_id: format!("{:032x}", facts.session),
                step: facts.step,
                state_digest: None,
            });
        }
        let line = manifest::decode_header(&object, first_line(head))?;
        let cut_off = || Error::corrupt(object, head.len() as u64, "header line", "a line end", "none");
        line.map(|line| Self::from(&line.header)).ok_or_else(cut_off)
    }

    /// True for two manifests of one snapshot.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let digests = self.state_digest.as_ref().zip(other.state_digest.as_ref());
        self.session_id == other.session_id && digests.is_none_or(|(left, right)| left == right)
    }
}

impl From<&Header> for Identity {
    fn from(header: &Header) -> Self {
        let (session_id, state_digest) = (header.session_id.clone(), Some(header.state_digest.clone()));
        Self { session_id, step: header.step, state_digest }
    }
}
