//! What goes from the bucket: what was deleted here, and what dead writers have left there.
//!
//! IMPORTANT: manifests go before the packs they name, and a pack goes only where no manifest of the bucket names
//! it. The lease is renewed right before each deletion.

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, PoisonError};

use crate::error::{Error, Result};
use crate::format::journal::UploadNote;
use crate::format::limits;
use crate::format::model::PackRecord;
use crate::format::names::{self, parse_manifest_name};
use crate::inflight::Registry;
use crate::store::{Folder, Key};

use super::plan::{self, Local};
use super::push::{Run, upload_of};
use super::view;

/// Objects that are deleted under one renewal of the lease.
const BATCH_LENGTH: usize = 256;

impl Run<'_> {
    /// Ends uploads that nobody goes on with: those of other writers, and those of packs that are gone here or have
    /// arrived.
    pub(super) fn abort_uploads(&mut self, local: &Local) -> Result<()> {
        let tiers = self.tiers;
        for (pack, note) in tiers.notes.uploads() {
            let key = Key::new(Folder::Packs, &pack)?;
            let is_there = tiers.state().view.as_ref().is_some_and(|view| view.has(&key));
            if !is_there && !local.packs.contains(&pack) {
                tiers.remote.abort_upload(&key, &upload_of(&note))?;
            }
            if is_there || !local.packs.contains(&pack) {
                self.forget_upload(&pack)?;
            }
        }
        if tiers.state().is_swept {
            return Ok(());
        }
        for name in view::list(tiers.remote.as_ref(), Folder::Uploads)?.into_keys() {
            let Some(pack) = names::parse_upload_name(&name) else { continue };
            self.abort_foreign_upload(&name, pack)?;
        }
        Ok(())
    }

    fn abort_foreign_upload(&self, name: &str, pack: &str) -> Result<()> {
        let tiers = self.tiers;
        let key = Key::new(Folder::Uploads, name)?;
        let read = tiers.remote.get(&key, limits::SMALL_OBJECT_LIMIT_BYTES);
        match read.and_then(|bytes| UploadNote::decode(&key.to_string(), &bytes)) {
            Ok(note) => {
                if tiers.notes.uploads().get(pack).is_some_and(|own| own.id == note.id) {
                    return Ok(());
                }
                if note.pack == pack {
                    tiers.remote.abort_upload(&Key::new(Folder::Packs, pack)?, &upload_of(&note))?;
                }
            }
            Err(error) if error.is_not_found() => return Ok(()),
            // It says nothing that could be ended.
            Err(Error::Corrupt { .. }) => {}
            Err(error) => return Err(error),
        }
        tiers.remote.delete(Folder::Uploads, &[name.to_owned()]).map(drop)
    }

    /// Removes from the bucket what was deleted here.
    pub(super) fn remove(&mut self) -> Result<()> {
        let tiers = self.tiers;
        let (local, removals, untagged) = {
            let _removing = tiers.removing.lock().unwrap_or_else(PoisonError::into_inner);
            let (local, untagged) = (tiers.survey()?, tiers.notes.untagged()?);
            let (pushed, noted) = (tiers.notes.all_pushed(), tiers.notes.removals());
            let removals = plan::removals(&local, &tiers.view(), &pushed, &noted, &untagged);
            tiers.notes.forget_removals(&removals.void)?;
            (local, removals, untagged)
        };
        self.delete(Folder::Tags, &removals.tags)?;
        tiers.notes.forget_untagged(&untagged)?;
        if !removals.seqs.is_empty() {
            // IMPORTANT: noted before the manifests go: then nobody knows any more whose these packs were.
            tiers.notes.remove(self.packs_of(&removals.seqs, &local)?)?;
        }
        let manifests = removals.seqs.iter().map(|seq| names::manifest_name(*seq));
        let tombstones = removals.tombstones.iter().map(|seq| names::tombstone_name(*seq));
        self.delete(Folder::Snapshots, &manifests.chain(tombstones).collect::<Vec<_>>())?;
        self.remove_packs(&local)
    }

    /// Packs of snapshots of the bucket that don't lie here.
    fn packs_of(&self, seqs: &[u64], local: &Local) -> Result<Vec<Key>> {
        let mut keys = Vec::new();
        for &seq in seqs {
            match self.table_there(seq) {
                Ok(table) => {
                    let foreign = table.iter().filter(|record| !local.packs.contains(&record.name));
                    keys.extend(foreign.filter_map(|record| Key::new(Folder::Packs, &record.name).ok()));
                }
                // Its packs are found as those that no manifest names.
                Err(error) if error.is_damage() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(keys)
    }

    fn remove_packs(&mut self, local: &Local) -> Result<()> {
        let tiers = self.tiers;
        let noted: Vec<Key> =
            tiers.notes.removals().into_iter().filter(|key| key.folder() == Folder::Packs).collect();
        let doomed: Vec<String> = {
            let state = tiers.state();
            let is_there = |key: &&Key| state.view.as_ref().is_some_and(|view| view.has(key));
            let names = noted.iter().filter(is_there).map(|key| key.name().to_owned());
            names.filter(|name| !local.packs.contains(name)).collect()
        };
        self.delete_unnamed(doomed)
    }

    /// Removes packs of which nobody knows whose they were, once after the lease was taken.
    pub(super) fn sweep_packs(&mut self) -> Result<()> {
        let tiers = self.tiers;
        if tiers.state().is_swept {
            return Ok(());
        }
        let local = tiers.survey()?;
        let orphans = {
            let view = tiers.view();
            let lease = Key::new(Folder::Root, names::LEASE_NAME)?;
            let now_unix_ms = view.get(&lease).map_or(0, |row| row.modified_unix_ms);
            let age = tiers.options.orphan_milliseconds();
            plan::orphans(&local, &view, now_unix_ms, age)
        };
        self.delete_unnamed(orphans)?;
        tiers.state().is_swept = true;
        Ok(())
    }

    /// Deletes those of these packs that no manifest of the bucket names, and that nobody reads. Where a manifest can't
    /// be read, what it names is unknown, and nothing goes.
    fn delete_unnamed(&mut self, packs: Vec<String>) -> Result<()> {
        if packs.is_empty() {
            return Ok(());
        }
        let tiers = self.tiers;
        // Anew: a writer that lost the lease may have published since the view was taken.
        let rows = view::list(tiers.remote.as_ref(), Folder::Snapshots)?;
        let mut named = HashSet::new();
        for (name, row) in rows {
            let Some(seq) = names::parse_manifest_name(&name) else { continue };
            let key = Key::new(Folder::Snapshots, &name)?;
            if let Some(view) = &mut tiers.state().view {
                view.insert(&key, row);
            }
            match self.table_there(seq) {
                Ok(table) => named.extend(table.iter().map(|record| record.name.clone())),
                Err(error) if error.is_damage() => {
                    self.problem.get_or_insert(error);
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        let unnamed = packs.into_iter().filter(|pack| !named.contains(pack));
        let claim = Registry::of(&tiers.local.root()).claim(unnamed);
        self.delete(Folder::Packs, claim.packs())
    }

    /// Deletes from the bucket, and then forgets that it was to be done.
    fn delete(&mut self, folder: Folder, names: &[String]) -> Result<()> {
        names.chunks(BATCH_LENGTH).try_for_each(|batch| self.delete_batch(folder, batch))
    }

    fn delete_batch(&mut self, folder: Folder, names: &[String]) -> Result<()> {
        self.go_on()?;
        let tiers = self.tiers;
        tiers.lease.renew()?;
        // IMPORTANT: not for as long as other requests are sent again. By the end of the lease another writer may have
        // taken over, and go on from what is deleted here.
        tiers.remote.delete_within(folder, names, tiers.lease.sure_time() / 2)?;
        let keys = names.iter().map(|name| Key::new(folder, name)).collect::<Result<BTreeSet<_>>>()?;
        tiers.notes.keep_pushed(|key| !keys.contains(key));
        tiers.notes.forget_removals(&keys)?;
        self.done.removed_objects += keys.len() as u64;
        let mut state = tiers.state();
        state.figures.removed_objects += keys.len() as u64;
        for seq in names.iter().filter_map(|name| parse_manifest_name(name)) {
            if folder == Folder::Snapshots {
                state.tables.remove(&seq);
                state.remote_tables.remove(&seq);
            }
        }
        if let Some(view) = &mut state.view {
            for key in &keys {
                view.remove(key);
            }
        }
        Ok(())
    }

    /// Pack table of a manifest of the bucket: from the folder where the same bytes lie there, else read once.
    fn table_there(&self, seq: u64) -> Result<Arc<Vec<PackRecord>>> {
        let tiers = self.tiers;
        let key = Key::new(Folder::Snapshots, &names::manifest_name(seq))?;
        let Some(version) = tiers.version_there(&key) else { return Ok(Arc::default()) };
        if let Some((of, table)) = tiers.state().remote_tables.get(&seq)
            && *of == version
        {
            return Ok(Arc::clone(table));
        }
        let pushed = tiers.notes.pushed(&key).filter(|pushed| pushed.version == version.0);
        if let Some(table) = pushed.and_then(|pushed| tiers.own_table(seq, &key, pushed.digest)) {
            return Ok(table);
        }
        let bytes = match tiers.remote.get(&key, limits::MANIFEST_LIMIT_BYTES) {
            Err(error) if error.is_not_found() => return Ok(Arc::default()),
            got => got?,
        };
        let table = Arc::new(tiers.decode_manifest(tiers.remote.as_ref(), &key, &bytes)?.body.packs);
        tiers.state().remote_tables.insert(seq, (version, Arc::clone(&table)));
        Ok(table)
    }
}
