//! Merges: who is served by which new pack, under the eyes of saves, loads and deletions.
//!
//! IMPORTANT: three things keep a merge from harming what runs beside it. Sources and the new pack are held
//! in the registry until every manifest that will point to the new pack does, and `State` says so. A
//! manifest is replaced only under the lock that a deletion takes, so that none comes back. And a snapshot
//! that commits meanwhile with refs to old packs is served afterwards from what was copied, or keeps them.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use crate::compact::{self, Demand, Live, Moves, SnapshotUse, Survey};
use crate::error::{Error, Result};
use crate::format::model::Manifest;
use crate::format::names;
use crate::format::pack::{PackHeader, PackKind};
use crate::merge::{self, Copied};
use crate::plan::Base;
use crate::store::{Folder, Key, ReadAt};
use crate::verify::{self, Finding};

use super::chance::random_u128;
use super::{Repository, Shared};

/// What a merge did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MergeReport {
    /// Old packs that were rewritten, or held nothing that anybody needs.
    pub merged_pack_count: u64,
    /// Bytes of the new packs.
    pub written_bytes: u64,
    /// Bytes of the packs that went.
    pub freed_bytes: u64,
    /// Why the merge, or a part of it, was not done.
    pub stood_down: Option<String>,
    /// Damage that was met. The snapshots concerned are left as they are.
    pub findings: Vec<Finding>,
}

/// What merges know from one to the next; whoever has it locked is the only one that merges.
#[derive(Debug, Default)]
pub(super) struct Merging {
    uses: HashMap<u64, Arc<SnapshotUse>>,
    /// What was copied out of packs that somebody still held at the end: a save among them may commit refs
    /// to the old places.
    moves: Vec<Moves>,
    /// Snapshots with chunks that could not be copied: nothing is gained by trying again.
    damaged: HashSet<u64>,
    /// Newest commit when the stride was last over.
    stride_seq: Option<u64>,
}

impl Repository {
    /// True where the policy has something to say after a commit.
    #[must_use]
    pub fn has_merge_policy(&self) -> bool {
        self.shared.options.merge.is_some()
    }

    /// Merges what the policy says, or everything of which something is gained.
    ///
    /// Merges run one after the other. A second one of everything finds nothing to do.
    ///
    /// # Errors
    /// [`Error::Store`] where the store fails; [`Error::Interrupted`] after a cancel, or where the handle is
    /// being closed, while it copies. Every snapshot is whole then, and what was left lying goes with the next sweep. Damage
    /// is no error but a finding.
    pub fn merge(&self, everything: bool, cancelled: &AtomicBool) -> Result<MergeReport> {
        let shared = &self.shared;
        shared.must_write("merge")?;
        let mut merging = shared.merging.lock().unwrap_or_else(PoisonError::into_inner);
        let is_cancelled = || cancelled.load(Ordering::Relaxed) || shared.closing.load(Ordering::Relaxed);
        let mut merge = Merge::new(shared, &mut merging, &is_cancelled);
        let merged = merge.run(everything);
        let Merge { found, mut report, .. } = merge;
        if let Err(error) = merged {
            shared.lock_state().doubt();
            return Err(error);
        }
        report.findings = found.findings;
        Ok(report)
    }
}

/// One merge under way.
struct Merge<'a> {
    shared: &'a Shared,
    merging: &'a mut Merging,
    is_cancelled: &'a dyn Fn() -> bool,
    found: verify::Report,
    report: MergeReport,
}

impl<'a> Merge<'a> {
    fn new(shared: &'a Shared, merging: &'a mut Merging, is_cancelled: &'a dyn Fn() -> bool) -> Self {
        let (found, report) = (verify::Report::default(), MergeReport::default());
        Self { shared, merging, is_cancelled, found, report }
    }

    fn run(&mut self, everything: bool) -> Result<()> {
        // Whoever closed the handle while this one waited for another merge has let go of the lock.
        self.go_on()?;
        if everything {
            self.merging.damaged.clear();
        }
        self.serve_latecomers()?;
        if !self.read_uses()? {
            return Ok(());
        }
        let Some(demand) = self.demand(everything) else { return Ok(()) };
        let uses = &self.merging.uses;
        let damaged = &self.merging.damaged;
        let survey =
            Survey::of(uses.iter().map(|(seq, snapshot)| (snapshot.as_ref(), damaged.contains(seq))));
        for group in compact::plan(&survey, demand) {
            self.go_on()?;
            let sources: Vec<String> =
                group.into_iter().map(|pack| survey.packs[pack].name.clone()).collect();
            self.merge_group(&sources)?;
        }
        Ok(())
    }

    fn go_on(&self) -> Result<()> {
        if (self.is_cancelled)() { Err(Error::Interrupted) } else { Ok(()) }
    }

    fn stand_down(&mut self, why: String) {
        self.report.stood_down.get_or_insert(why);
    }

    fn demand(&mut self, everything: bool) -> Option<Demand> {
        let newest = self.shared.lock_state().listing.high_water();
        if everything {
            self.merging.stride_seq = Some(newest);
            return Some(Demand::Everything);
        }
        let policy = self.shared.options.merge?;
        let last = self.merging.stride_seq.unwrap_or_else(|| {
            let packs = self.merging.uses.values().flat_map(|snapshot| &snapshot.packs);
            let merged = packs.filter_map(|used| names::parse_pack_name(&used.record.name));
            merged.filter(|name| name.is_merged).map(|name| name.seq).max().unwrap_or(0)
        });
        let is_stride_over = policy.stride > 0 && newest.saturating_sub(last) >= policy.stride;
        if is_stride_over || self.merging.stride_seq.is_none() {
            self.merging.stride_seq = Some(if is_stride_over { newest } else { last });
        }
        Some(Demand::Due { policy, is_stride_over })
    }

    /// Learns what every snapshot uses; each manifest is read once. False where one is damaged: what it
    /// refers to is unknown, so nothing may go.
    fn read_uses(&mut self) -> Result<bool> {
        let seqs = self.shared.refreshed()?.listing.seqs.clone();
        self.merging.uses.retain(|seq, _| seqs.contains(seq));
        for seq in seqs {
            if self.merging.uses.contains_key(&seq) {
                continue;
            }
            self.go_on()?;
            if !self.shared.has_manifest_at_hand(seq) {
                continue;
            }
            if let Some(manifest) = self.manifest(seq)? {
                if !self.has_packs_at_hand(&manifest) {
                    continue;
                }
                let snapshot = SnapshotUse::of(manifest.header.world_size, &manifest.body);
                self.merging.uses.insert(seq, Arc::new(snapshot));
            } else if self.report.stood_down.is_some() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A merge reads only what needs no network.
    fn has_packs_at_hand(&self, manifest: &Manifest) -> bool {
        let is_at_hand =
            |name: &str| Key::new(Folder::Packs, name).is_ok_and(|key| self.shared.store.is_at_hand(&key));
        manifest.body.packs.iter().all(|record| is_at_hand(&record.name))
    }

    /// The manifest of a snapshot; `None` where it was deleted meanwhile, or is damaged, which is noted.
    fn manifest(&mut self, seq: u64) -> Result<Option<Manifest>> {
        match self.shared.manifest(seq) {
            Ok(manifest) => Ok(Some(manifest)),
            Err(Error::SnapshotNotFound { .. }) => Ok(None),
            Err(error) if error.is_damage() => {
                self.found.add_error(&error, &format!("snapshots/{}", names::manifest_name(seq)), None);
                self.stand_down(format!("snapshot {seq} is damaged, and what it refers to is unknown"));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Rewrites what is live in these packs, serves the snapshots that refer to them, and lets them go.
    fn merge_group(&mut self, sources: &[String]) -> Result<()> {
        let (registry, source_count) = (&self.shared.registry, sources.len() as u64);
        let (held_sources, gone) = registry.hold(None, sources.iter().cloned());
        if !gone.is_empty() {
            self.stand_down(format!("packs are being deleted: {}", gone.len()));
            return Ok(());
        }
        let mut live = Live::new(sources);
        let concerned = self.collect(&mut live)?;
        let (Some(&newest), None) = (concerned.last(), &self.report.stood_down) else { return Ok(()) };
        let pack_name = names::merged_pack_name(newest, self.shared.options.rank, random_u128() as u64);
        // IMPORTANT: the new pack too: until a manifest names it, a sweep would take it.
        let others = live.packs.iter().map(|record| record.name.clone()).chain([pack_name.clone()]);
        let (held_others, gone) = registry.hold(None, others);
        if !gone.is_empty() {
            self.stand_down(format!("packs that differences refer to are being deleted: {}", gone.len()));
            return Ok(());
        }
        let copied = self.copy(&live, pack_name, newest)?;
        if !copied.damage.is_empty() && !self.note_damage(&copied, &concerned)? {
            return Ok(());
        }
        let (moves, written_bytes) = copied.publish()?;
        self.report.written_bytes += written_bytes;
        let served_count = self.serve(&moves)?;
        drop((held_sources, held_others));
        if served_count > 0 {
            self.report.merged_pack_count += source_count;
        }
        for earlier in &mut self.merging.moves {
            earlier.go_on(&moves);
        }
        if moves.sources().any(|source| self.shared.registry.is_held(source)) {
            self.merging.moves.push(moves);
        }
        self.shared.lock_state().stale_packs = true;
        self.report.freed_bytes += self.shared.remove(&[])?;
        Ok(())
    }

    /// Adds up what is live in the sources; returns the snapshots that refer to them, ascending.
    fn collect(&mut self, live: &mut Live) -> Result<Vec<u64>> {
        let sources: HashSet<String> = live.sources().map(str::to_owned).collect();
        let uses = self.merging.uses.iter();
        let mut seqs: Vec<u64> = uses
            .filter(|(_, snapshot)| snapshot.packs.iter().any(|used| sources.contains(&used.record.name)))
            .map(|(seq, _)| *seq)
            .collect();
        seqs.sort_unstable();
        let mut concerned = Vec::new();
        for seq in seqs {
            if let Some(manifest) = self.manifest(seq)? {
                live.add(&manifest.body);
                concerned.push(seq);
            }
        }
        Ok(concerned)
    }

    fn copy(&self, live: &Live, pack_name: String, seq: u64) -> Result<Copied> {
        let header = PackHeader {
            repository_id: self.shared.repository_id.clone(),
            session_id: format!("{:032x}", random_u128()),
            seq,
            rank: self.shared.options.rank,
            kind: PackKind::Merge,
        };
        let (store, threads) = (&self.shared.store, self.shared.threads.as_ref());
        merge::Copy { store, threads, header, pack_name, is_cancelled: self.is_cancelled }.run(live)
    }

    /// Notes damage and the snapshots that can't be served for it; returns whether others can.
    fn note_damage(&mut self, copied: &Copied, concerned: &[u64]) -> Result<bool> {
        let mut steps: Vec<BTreeSet<u64>> = vec![BTreeSet::new(); copied.damage.len()];
        let mut can_serve = false;
        for &seq in concerned {
            let Some(manifest) = self.manifest(seq)? else { continue };
            if copied.moves.repoint(&manifest).is_some() {
                can_serve = true;
                continue;
            }
            self.merging.damaged.insert(seq);
            let snapshot = SnapshotUse::of(manifest.header.world_size, &manifest.body);
            for (error, steps) in copied.damage.iter().zip(&mut steps) {
                if needs(&snapshot, error) {
                    steps.insert(manifest.header.step);
                }
            }
        }
        for (error, steps) in copied.damage.iter().zip(steps) {
            self.found.add_error(error, "packs", None);
            for step in steps {
                self.found.add_error(error, "packs", Some(step));
            }
        }
        Ok(can_serve)
    }

    /// Serves snapshots that committed during an earlier merge, with refs to packs it had copied.
    fn serve_latecomers(&mut self) -> Result<()> {
        for moves in std::mem::take(&mut self.merging.moves) {
            let (held, gone) = self.shared.registry.hold(None, [moves.pack.name.clone()]);
            let key = Key::new(Folder::Packs, &moves.pack.name)?;
            let store = &self.shared.store;
            let has_length = |object: Box<dyn ReadAt>| object.length_bytes() == moves.pack.length_bytes;
            let is_whole = store.is_at_hand(&key) && store.open(&key).is_ok_and(has_length);
            if !gone.is_empty() || !is_whole {
                continue;
            }
            let served_count = self.serve(&moves)?;
            drop(held);
            if moves.sources().any(|source| self.shared.registry.is_held(source)) {
                self.merging.moves.push(moves);
            }
            if served_count > 0 {
                self.shared.lock_state().stale_packs = true;
                self.report.freed_bytes += self.shared.remove(&[])?;
            }
        }
        Ok(())
    }

    /// Points the manifests of all snapshots that refer to merged packs to the new one, also of those that
    /// commit meanwhile; returns how many were replaced. One that needs a chunk that was not copied stays.
    ///
    /// It is not cut short by a cancel: the chunks that served and unserved snapshots share would lie there
    /// twice from then on.
    fn serve(&mut self, moves: &Moves) -> Result<u64> {
        let mut looked_at = BTreeSet::new();
        let mut served_count = 0;
        loop {
            let seqs = self.referring(moves, &looked_at);
            if seqs.is_empty() {
                return Ok(served_count);
            }
            for seq in seqs {
                looked_at.insert(seq);
                served_count += u64::from(self.replace(seq, moves)?);
            }
        }
    }

    /// Snapshots that may refer to merged packs and were not looked at.
    fn referring(&self, moves: &Moves, looked_at: &BTreeSet<u64>) -> Vec<u64> {
        let state = self.shared.lock_state();
        let may_refer = |seq: &u64| {
            let table = state.pack_tables.get(seq).map(|table| moves.concern(table.iter()));
            let known = self.merging.uses.get(seq);
            let used = known.map(|known| moves.concern(known.packs.iter().map(|used| &used.record)));
            table.or(used).unwrap_or(true)
        };
        state.listing.seqs.difference(looked_at).copied().filter(may_refer).collect()
    }

    /// Replaces one manifest, unless its snapshot is gone or can't be served; returns whether it did.
    fn replace(&mut self, seq: u64, moves: &Moves) -> Result<bool> {
        let shared = self.shared;
        // IMPORTANT: a snapshot that is deleted between the look and the replacement would come back.
        let _replacing = shared.replacing.lock().unwrap_or_else(PoisonError::into_inner);
        if !shared.lock_state().listing.seqs.contains(&seq) || !shared.has_manifest_at_hand(seq) {
            return Ok(false);
        }
        let Some(manifest) = self.manifest(seq)? else { return Ok(false) };
        if !moves.concern(manifest.body.packs.iter()) {
            return Ok(false);
        }
        let Some(made) = moves.repoint(&manifest) else { return Ok(false) };
        let replaced = merge::replace_manifest(&shared.store, &made);
        shared.note_replaced(made, replaced.is_ok());
        self.merging.uses.remove(&seq);
        replaced.map(|()| true)
    }
}

/// True where a snapshot uses the place that an error names.
fn needs(snapshot: &SnapshotUse, error: &Error) -> bool {
    let Error::Corrupt { object, offset_bytes, .. } = error else { return false };
    snapshot.packs.iter().any(|used| {
        object.strip_prefix("packs/") == Some(used.record.name.as_str())
            && used.places.iter().any(|(offset, _)| offset == offset_bytes)
    })
}

impl Shared {
    /// Waits for the merge that runs, and serves whom it left behind: with this handle goes the knowledge of
    /// where their chunks are, and they would keep a second copy of them.
    pub(super) fn finish_merges(&self) {
        let mut merging = self.merging.lock().unwrap_or_else(PoisonError::into_inner);
        if merging.moves.is_empty() || self.must_write("merge").is_err() {
            return;
        }
        // Where this fails every snapshot is whole, and the next sweep or merge finds what lies around.
        if Merge::new(self, &mut merging, &|| false).serve_latecomers().is_err() {
            self.lock_state().doubt();
        }
    }

    /// Makes what this handle knows of a snapshot that of its new manifest. Where replacing it failed, only
    /// the store knows which one is there.
    fn note_replaced(&self, made: Manifest, is_done: bool) {
        let Manifest { header, body } = made;
        let seq = header.seq;
        let is_base = |base: &Option<Arc<Base>>| base.as_ref().is_some_and(|base| base.seq == seq);
        let known = self.lock_state().base.clone().filter(|_| is_done).filter(|base| base.seq == seq);
        let packs = Arc::new(body.packs.clone());
        let base = known.map(|known| Arc::new(Base::new(seq, body, known.trusted)));
        let mut state = self.lock_state();
        if is_done {
            state.headers.insert(seq, Arc::new(header));
            state.pack_tables.insert(seq, packs);
            state.merge_count += 1;
        } else {
            state.pack_tables.remove(&seq);
            state.doubt();
        }
        if is_base(&state.base) {
            // Without one the next save reads the manifest, and verifies what it refers to.
            state.base = base;
        }
    }
}
