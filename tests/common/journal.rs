//! What was promised: the acknowledgements of a run, kept outside the repository.

use std::collections::{BTreeMap, BTreeSet};

/// What a crash may leave and what it must not. A snapshot is named by its step, which no test uses twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Journal {
    /// Acknowledged, and nobody has begun to delete them: seq by step.
    pub(crate) kept: BTreeMap<u64, u64>,
    /// Begun and not acknowledged, or being deleted: may be there, and is whole then.
    pub(crate) open: BTreeSet<u64>,
    /// Acknowledged as deleted.
    pub(crate) gone: BTreeSet<u64>,
    /// Acknowledged names, and the steps they stand for.
    pub(crate) pins: BTreeMap<String, u64>,
    /// Names that may be there or not, and the steps they stand for then.
    pub(crate) open_pins: BTreeMap<String, u64>,
    /// Receipts that are there, by number, and what each may hold: one content where all was acknowledged, or
    /// those before and after a replacement.
    pub(crate) receipts: BTreeMap<u64, BTreeSet<String>>,
    /// Contents of receipts that may be there too.
    pub(crate) open_receipts: BTreeSet<String>,
    /// Everything that a receipt was ever to hold.
    pub(crate) contents: BTreeSet<String>,
    /// The largest acknowledged seq: none up to it is given again.
    pub(crate) high_water: u64,
}

impl Journal {
    /// Takes a line that [`Journal::line`] made.
    pub(crate) fn note(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let step = |index: usize| -> u64 { words[index].parse().unwrap() };
        match words[0] {
            "saving" => {
                self.open.insert(step(1));
            }
            "saved" => {
                self.open.remove(&step(1));
                self.kept.insert(step(1), step(2));
                self.high_water = self.high_water.max(step(2));
            }
            "deleting" => {
                self.kept.remove(&step(1));
                self.open.insert(step(1));
            }
            "deleted" => {
                self.open.remove(&step(1));
                self.gone.insert(step(1));
            }
            "pinning" | "unpinning" => {
                self.pins.remove(words[1]);
                self.open_pins.insert(words[1].to_owned(), step(2));
            }
            "pinned" => {
                self.open_pins.remove(words[1]);
                self.pins.insert(words[1].to_owned(), step(2));
            }
            "unpinned" => {
                self.open_pins.remove(words[1]);
            }
            "receipting" => {
                self.open_receipts.insert(words[1].to_owned());
                self.contents.insert(words[1].to_owned());
            }
            "receipted" => {
                self.open_receipts.remove(words[2]);
                self.receipts.insert(step(1), BTreeSet::from([words[2].to_owned()]));
            }
            "replacing" => {
                self.receipts.entry(step(1)).or_default().insert(words[2].to_owned());
                self.contents.insert(words[2].to_owned());
            }
            other => panic!("no such event: {other}"),
        }
    }

    /// True where a name stands for this step, or may.
    pub(crate) fn is_named(&self, step: u64) -> bool {
        self.pins.values().chain(self.open_pins.values()).any(|pinned| *pinned == step)
    }

    /// Steps that a rule `last(count)` may remove once `saved` is there too, and those that it does remove:
    /// what is open takes a place or not.
    pub(crate) fn beyond_last(&self, saved: Option<u64>, count: usize) -> (Vec<u64>, Vec<u64>) {
        let is_pinned = |step: &u64| self.pins.values().any(|pinned| pinned == step);
        let beyond = |steps: BTreeSet<u64>| -> Vec<u64> {
            let old = steps.into_iter().rev().skip(count);
            old.filter(|step| self.kept.contains_key(step) && !is_pinned(step)).collect()
        };
        let known = || self.kept.keys().copied().chain(saved);
        let mut doomed = beyond(known().collect());
        doomed.retain(|step| !self.open_pins.values().any(|pinned| pinned == step));
        (beyond(known().chain(self.open.iter().copied()).collect()), doomed)
    }

    /// What can be asked for if nothing since `before` has surely reached the medium.
    pub(crate) fn doubted_since(&self, before: &Self) -> Self {
        let kept: BTreeMap<u64, u64> = before
            .kept
            .iter()
            .filter(|(step, _)| self.kept.contains_key(step))
            .map(|(step, seq)| (*step, *seq))
            .collect();
        let known = [before, self].into_iter().flat_map(|journal| {
            journal.kept.keys().chain(&journal.open).chain(&journal.gone).copied().collect::<Vec<_>>()
        });
        let open = known.filter(|step| !kept.contains_key(step) && !before.gone.contains(step)).collect();
        let mut open_pins = before.open_pins.clone();
        for pins in [&self.open_pins, &self.pins, &before.pins] {
            open_pins.extend(pins.iter().map(|(name, step)| (name.clone(), *step)));
        }
        let pins: BTreeMap<String, u64> = before
            .pins
            .iter()
            .filter(|(name, step)| self.pins.get(*name) == Some(step))
            .map(|(name, step)| (name.clone(), *step))
            .collect();
        open_pins.retain(|name, _| !pins.contains_key(name));
        let news = &self.contents - &before.contents;
        let open_receipts = &before.open_receipts | &news;
        let receipts = before.receipts.iter().map(|(number, known)| (*number, known | &news)).collect();
        Self {
            kept,
            open,
            gone: before.gone.clone(),
            pins,
            open_pins,
            receipts,
            open_receipts,
            contents: self.contents.clone(),
            high_water: before.high_water,
        }
    }
}
