//! What stays and what goes: retention, deletion, pins and tags.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, PoisonError};

use crate::error::{Error, Result};
use crate::format::limits;
use crate::format::model::PackRecord;
use crate::format::names;
use crate::format::tag::{self, Tag};
use crate::retain::{self, Protected};
use crate::store::{Folder, Key, PutMode};
use crate::sweep;

use super::chance::now_unix_ms;
use super::{Repository, Shared};

impl Repository {
    /// What retention would do now, and the bytes it would free; does it unless `dry_run`.
    pub fn prune(&self, dry_run: bool) -> Result<(retain::Plan, u64)> {
        if !dry_run {
            self.shared.must_write("prune")?;
        }
        self.shared.retention(dry_run)
    }

    /// Carries out retention once more because what was kept only for not being pushed may go now; returns whether
    /// anything went. Without a policy, or where the handle can't write any more, there is nothing to do.
    ///
    /// # Errors
    /// As [`Repository::prune`].
    pub fn prune_again(&self) -> Result<bool> {
        if self.shared.options.rules.is_empty() || self.shared.must_write("prune").is_err() {
            return Ok(false);
        }
        self.shared.retention(false).map(|(plan, _)| !plan.removed.is_empty())
    }

    /// Deletes one snapshot and the packs that only it referred to. A reader that holds it finishes.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where it has a tag.
    pub fn delete(&self, seq: u64) -> Result<u64> {
        self.shared.must_write("delete a snapshot")?;
        let tags: Vec<String> =
            self.tags()?.into_iter().filter(|(_, tag)| tag.seq == seq).map(|(name, _)| name).collect();
        if !tags.is_empty() {
            return Err(Error::invalid(
                format!("deletion of snapshot {seq}"),
                format!("it is pinned; unpin first: {}", tags.join(", ")),
            ));
        }
        if !self.shared.refreshed()?.listing.seqs.contains(&seq) {
            return Err(self.shared.no_such_seq(seq));
        }
        self.shared.remove(&[seq])
    }

    /// Names a snapshot; retention keeps it until the name is removed.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where the name is no legal one or names another snapshot already;
    /// [`Error::SnapshotNotFound`] where there is no such snapshot, or no more.
    pub fn pin(&self, seq: u64, name: &str) -> Result<()> {
        tag::validate_tag_name(name)?;
        self.shared.may_tag("pin a snapshot")?;
        self.shared.require_manifest(seq)?;
        let key = Key::new(Folder::Tags, name)?;
        self.shared.store.create_folders()?;
        let bytes = Tag { seq, created_at_unix_ms: now_unix_ms() }.encode()?;
        match self.shared.store.put(&key, &bytes, PutMode::IfAbsent) {
            Err(Error::Conflict { .. }) => match self.tags()?.get(name) {
                Some(known) if known.seq == seq => return Ok(()),
                Some(known) => {
                    return Err(Error::invalid(
                        format!("tag `{name}`"),
                        format!("names snapshot {} already; unpin it first", known.seq),
                    ));
                }
                None => self.shared.store.put(&key, &bytes, PutMode::Replace)?,
            },
            other => other?,
        }
        // The writer may have deleted it since, not knowing of the tag.
        let there = self.shared.require_manifest(seq);
        if there.is_err() {
            self.shared.store.delete(Folder::Tags, &[name.to_owned()])?;
        }
        there
    }

    /// Removes a name, also one whose tag is damaged.
    ///
    /// # Errors
    /// [`Error::SnapshotNotFound`] where there is no such name.
    pub fn unpin(&self, name: &str) -> Result<()> {
        self.shared.may_tag("unpin a snapshot")?;
        let known: Vec<String> =
            self.shared.store.list(Folder::Tags)?.into_iter().map(|row| row.name).collect();
        if !known.iter().any(|known| known == name) {
            return Err(Error::SnapshotNotFound {
                reference: format!("tag:{name}"),
                root: self.root(),
                reason: if known.is_empty() {
                    "there are no tags".to_owned()
                } else {
                    format!("tags: {}", known.join(", "))
                },
            });
        }
        self.shared.store.delete(Folder::Tags, &[name.to_owned()]).map(|_| ())
    }

    /// All readable tags by name; read from the store each time, since other processes may pin.
    pub fn tags(&self) -> Result<BTreeMap<String, Tag>> {
        self.shared.tags()
    }
}

impl Shared {
    fn tags(&self) -> Result<BTreeMap<String, Tag>> {
        let mut tags = BTreeMap::new();
        for row in self.store.list(Folder::Tags)? {
            let key = Key::new(Folder::Tags, &row.name)?;
            match self
                .store
                .get(&key, limits::SMALL_OBJECT_LIMIT_BYTES)
                .and_then(|bytes| Tag::decode(&key.to_string(), &bytes))
            {
                Ok(tag) => {
                    tags.insert(row.name, tag);
                }
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(tags)
    }

    /// Plans retention and, unless `dry_run`, carries it out.
    pub(super) fn retention(&self, dry_run: bool) -> Result<(retain::Plan, u64)> {
        let listed = self.list()?;
        let mut protected = Protected { held: self.registry.held_snapshots(), ..Protected::default() };
        for (name, tag) in self.tags()? {
            protected.tags.entry(tag.seq).or_default().push(name);
        }
        protected.resumed_from = self.lock_state().resumed_from;
        for header in &listed.headers {
            let key = Key::new(Folder::Snapshots, &names::manifest_name(header.seq))?;
            if !self.store.is_pushed(&key) {
                protected.unpushed.insert(header.seq);
            }
        }
        let plan = retain::plan(&listed.headers, &self.options.rules, &protected);
        let removed: Vec<u64> = plan.removed.iter().map(|row| row.0).collect();
        let freed_bytes = if dry_run { self.would_free(&removed)? } else { self.remove(&removed)? };
        Ok((plan, freed_bytes))
    }

    /// Bytes of the packs that only these snapshots refer to.
    fn would_free(&self, removed: &[u64]) -> Result<u64> {
        let removed: HashSet<u64> = removed.iter().copied().collect();
        let (mut doomed, mut kept) = (HashMap::new(), HashSet::new());
        for (seq, table) in self.load_pack_tables()? {
            for record in table.iter() {
                if removed.contains(&seq) {
                    doomed.insert(record.name.clone(), record.length_bytes);
                } else {
                    kept.insert(record.name.clone());
                }
            }
        }
        Ok(doomed.iter().filter(|(name, _)| !kept.contains(*name)).map(|(_, length)| length).sum())
    }

    /// Deletes manifests, then the packs that no manifest refers to; returns the bytes freed.
    pub(super) fn remove(&self, seqs: &[u64]) -> Result<u64> {
        let removed = self.try_remove(seqs);
        if removed.is_err() {
            self.lock_state().doubt();
        }
        removed
    }

    fn try_remove(&self, seqs: &[u64]) -> Result<u64> {
        let (mut listing, open) = {
            let state = self.refreshed()?;
            if seqs.is_empty() && !state.stale_packs {
                return Ok(0);
            }
            (state.listing.clone(), state.open_seqs())
        };
        {
            // IMPORTANT: a merge that replaced one of these manifests meanwhile would bring it back.
            let _replacing = self.replacing.lock().unwrap_or_else(PoisonError::into_inner);
            sweep::delete_manifests(&self.store, &mut listing, seqs)?;
            let mut state = self.lock_state();
            for seq in seqs {
                state.listing.seqs.remove(seq);
                state.headers.remove(seq);
                state.pack_tables.remove(seq);
            }
            state.listing.tombstones.extend(&listing.tombstones);
            if state.base.as_ref().is_some_and(|base| seqs.contains(&base.seq)) {
                state.base = None;
            }
            // Before the sweep: what becomes stale while it runs is for the next one.
            state.stale_packs = false;
        }
        let before = listing.tombstones.clone();
        let swept = sweep::delete_packs(&self.store, &self.registry, &mut listing, &open, || {
            // A manifest that a merge could not replace surely is made durable first, whichever it is.
            drop(self.refreshed()?);
            Ok(self
                .load_pack_tables()?
                .values()
                .flat_map(|table| table.iter().map(|record| record.name.clone()))
                .collect())
        })?;
        let mut state = self.lock_state();
        state.stale_packs |= swept.held_count > 0;
        // Others may have been added meanwhile: a merge sweeps beside a retention.
        state.listing.tombstones.retain(|seq| !before.contains(seq) || listing.tombstones.contains(seq));
        Ok(swept.freed_bytes)
    }

    /// Pack table of one snapshot.
    ///
    /// # Errors
    /// As [`Shared::load_pack_tables`].
    pub(super) fn pack_table(&self, seq: u64) -> Result<Arc<Vec<PackRecord>>> {
        if let Some(known) = self.lock_state().pack_tables.get(&seq) {
            return Ok(Arc::clone(known));
        }
        let table = Arc::new(self.manifest(seq)?.body.packs);
        // What is known by now is newer: the table of a manifest that a merge has replaced since.
        Ok(Arc::clone(self.lock_state().pack_tables.entry(seq).or_insert(table)))
    }

    /// Pack tables of every snapshot whose manifest is at hand, each read at most once by this handle: what others
    /// refer to lies elsewhere.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where a manifest is damaged: what it refers to is unknown, so nothing may be
    /// deleted.
    fn load_pack_tables(&self) -> Result<HashMap<u64, Arc<Vec<PackRecord>>>> {
        let (seqs, mut tables) = {
            let state = self.lock_state();
            (state.listing.seqs.clone(), state.pack_tables.clone())
        };
        tables.retain(|seq, _| seqs.contains(seq));
        for seq in seqs {
            if let Entry::Vacant(slot) = tables.entry(seq)
                && self.has_manifest_at_hand(seq)
            {
                slot.insert(self.pack_table(seq)?);
            }
        }
        Ok(tables)
    }
}
