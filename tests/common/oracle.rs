//! What must hold after every crash, whatever it hit: the same questions for all harnesses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use varvite::recover::Recovered;
use varvite::repository::{Repository, SaveReport};
use varvite::store::{Folder, Store};

use super::journal::Journal;
use super::names;
use super::training::{State, load, open, open_to_read, save_state};

/// A repository after a crash, and what is known about it.
pub(crate) struct Case<'a> {
    /// Where it lies; nobody holds it.
    pub(crate) store: Arc<dyn Store>,
    /// What was promised.
    pub(crate) journal: &'a Journal,
    /// The state that belongs to a step.
    pub(crate) state_of: &'a dyn Fn(u64) -> State,
    /// Number of files in `tmp/`.
    pub(crate) staged_count: &'a dyn Fn() -> usize,
    /// A step that was never used.
    pub(crate) next_step: u64,
}

impl Case<'_> {
    /// Opens, looks at everything, saves once more, and looks again; says what does not hold. Returns
    /// the report of that save.
    pub(crate) fn check(&self) -> Result<SaveReport, String> {
        let repository = open(Arc::clone(&self.store), Vec::new())
            .map_err(|error| format!("it does not open: {}", error.chain()))?;
        let before = self.check_snapshots(&repository)?;
        self.check_pins(&repository)?;
        self.check_receipts(&repository)?;

        let report = save_state(&repository, self.next_step, &(self.state_of)(self.next_step))
            .map_err(|error| format!("the next save fails: {}", error.chain()))?;
        let seq = report.header.seq;
        if seq <= self.journal.high_water {
            return Err(format!("seq {seq} is given again: {} was acknowledged", self.journal.high_water));
        }
        let mut expected = before;
        expected.insert(self.next_step, seq);
        let after = load_all(&repository, self.state_of)?;
        if after != expected {
            return Err(format!("the next save changed the snapshots: {expected:?} to {after:?}"));
        }
        check_leftovers(&repository, (self.staged_count)())?;

        drop(repository);
        let again = open(Arc::clone(&self.store), Vec::new())
            .map_err(|error| format!("it does not open a second time: {}", error.chain()))?;
        // `stale_packs` is no work: the packs of a deleted snapshot may still be referred to.
        let nothing = Recovered { stale_packs: again.recovered().stale_packs, ..Recovered::default() };
        if again.recovered() != &nothing {
            return Err(format!("the second open finds work: {:?}", again.recovered()));
        }
        drop(again);
        let reader = open_to_read(Arc::clone(&self.store)).map_err(|error| error.chain())?;
        if load_all(&reader, self.state_of)? != expected {
            return Err("a reader sees other snapshots than the writer".to_owned());
        }
        self.check_receipts(&reader)?;
        Ok(report)
    }

    /// Every promised snapshot is there and bit-exact, nothing else is but what was under way.
    pub(crate) fn check_snapshots(&self, repository: &Repository) -> Result<BTreeMap<u64, u64>, String> {
        let found = load_all(repository, self.state_of)?;
        let Journal { kept, open, .. } = self.journal;
        for (step, seq) in kept {
            match found.get(step) {
                Some(there) if there == seq => {}
                Some(there) => return Err(format!("step {step} was acknowledged as {seq}, but is {there}")),
                None => return Err(format!("step {step} was acknowledged and is lost; there are {found:?}")),
            }
        }
        if let Some(step) = found.keys().find(|step| !kept.contains_key(step) && !open.contains(step)) {
            return Err(format!("step {step} is there, but was deleted or never saved"));
        }
        if found.values().zip(found.values().skip(1)).any(|(left, right)| left >= right) {
            return Err(format!("the order of commits is not that of the saves: {found:?}"));
        }
        let newest = repository.resolve("latest").ok();
        if newest != found.values().last().copied() {
            return Err(format!("`latest` is {newest:?} of {found:?}"));
        }
        let report = repository.verify(None, 1.0, &AtomicBool::new(false)).map_err(|error| error.chain())?;
        if !report.findings.is_empty() {
            return Err(format!("verify finds: {:?}", report.findings));
        }
        Ok(found)
    }

    /// Every promised name is there, and no other but what was under way.
    pub(crate) fn check_pins(&self, repository: &Repository) -> Result<(), String> {
        let found = repository.tags().map_err(|error| error.chain())?;
        for (name, step) in &self.journal.pins {
            let seq = found.get(name).map(|tag| tag.seq);
            if seq != self.journal.kept.get(step).copied() {
                return Err(format!("tag {name} was acknowledged for step {step}, but names {seq:?}"));
            }
        }
        let known =
            |name: &String| self.journal.pins.contains_key(name) || self.journal.open_pins.contains_key(name);
        match found.keys().find(|name| !known(name)) {
            Some(name) => Err(format!("tag {name} was removed or never made")),
            None => Ok(()),
        }
    }

    /// Every promised receipt is there with one of its contents, and no other but what was under way.
    pub(crate) fn check_receipts(&self, repository: &Repository) -> Result<(), String> {
        let found = receipts_of(repository)?;
        let Journal { receipts, open_receipts, .. } = self.journal;
        for (number, contents) in receipts {
            if !found.get(number).is_some_and(|content| contents.contains(content)) {
                return Err(format!(
                    "receipt {number} was acknowledged as {contents:?}; there are {found:?}"
                ));
            }
        }
        match found
            .iter()
            .find(|(number, content)| !receipts.contains_key(number) && !open_receipts.contains(*content))
        {
            Some(stranger) => Err(format!("receipt {stranger:?} was never written")),
            None => Ok(()),
        }
    }
}

/// Contents of all receipts by number.
pub(crate) fn receipts_of(repository: &Repository) -> Result<BTreeMap<u64, String>, String> {
    let receipts = repository.receipts(None).map_err(|error| error.chain())?;
    if !receipts.damaged.is_empty() {
        return Err(format!("damaged receipts: {:?}", receipts.damaged));
    }
    Ok(receipts.read.iter().map(|receipt| (receipt.number, receipt.content.get().to_owned())).collect())
}

/// After a save nothing lies around that no manifest refers to.
pub(crate) fn check_leftovers(repository: &Repository, staged_count: usize) -> Result<(), String> {
    if staged_count > 0 {
        return Err(format!("{staged_count} staged files are left"));
    }
    let mut referenced = BTreeSet::new();
    for seq in repository.candidates().map_err(|error| error.chain())? {
        let snapshot = repository.snapshot(seq).map_err(|error| error.chain())?;
        referenced.extend(snapshot.manifest().body.packs.iter().map(|record| record.name.clone()));
    }
    let present: BTreeSet<String> = names(repository.store().as_ref(), Folder::Packs).into_iter().collect();
    if present == referenced {
        return Ok(());
    }
    let orphans: Vec<_> = present.difference(&referenced).collect();
    let missing: Vec<_> = referenced.difference(&present).collect();
    Err(format!("orphans {orphans:?}, missing packs {missing:?}"))
}

/// Loads every snapshot and compares it with the state of its step; returns seqs by step.
pub(crate) fn load_all(
    repository: &Repository,
    state_of: &dyn Fn(u64) -> State,
) -> Result<BTreeMap<u64, u64>, String> {
    let listed = repository.list().map_err(|error| format!("it does not list: {}", error.chain()))?;
    if !listed.damaged.is_empty() {
        return Err(format!("damaged manifests: {:?}", listed.damaged));
    }
    let mut found = BTreeMap::new();
    for header in listed.headers {
        let loaded = load(repository, header.seq)
            .map_err(|error| format!("snapshot {} does not load: {}", header.seq, error.chain()))?;
        if loaded != state_of(header.step) {
            return Err(format!("snapshot {} of step {} has other bytes", header.seq, header.step));
        }
        if let Some(twin) = found.insert(header.step, header.seq) {
            return Err(format!("step {} is there twice: {twin} and {}", header.step, header.seq));
        }
    }
    Ok(found)
}
