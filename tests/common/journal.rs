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
    /// Names that may be there or not.
    pub(crate) open_pins: BTreeSet<String>,
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
                self.open_pins.insert(words[1].to_owned());
            }
            "pinned" => {
                self.open_pins.remove(words[1]);
                self.pins.insert(words[1].to_owned(), step(2));
            }
            "unpinned" => {
                self.open_pins.remove(words[1]);
            }
            other => panic!("no such event: {other}"),
        }
    }

    /// Steps that a rule `last(count)` may remove once `saved` is there too, and those that it does remove:
    /// what is open takes a place or not.
    pub(crate) fn beyond_last(&self, saved: Option<u64>, count: usize) -> (Vec<u64>, Vec<u64>) {
        let pinned: BTreeSet<u64> = self.pins.values().copied().collect();
        let beyond = |steps: BTreeSet<u64>| -> Vec<u64> {
            let old = steps.into_iter().rev().skip(count);
            old.filter(|step| self.kept.contains_key(step) && !pinned.contains(step)).collect()
        };
        let known = || self.kept.keys().copied().chain(saved);
        (beyond(known().chain(self.open.iter().copied()).collect()), beyond(known().collect()))
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
        let mut open_pins: BTreeSet<String> = before.open_pins.union(&self.open_pins).cloned().collect();
        open_pins.extend(self.pins.keys().chain(before.pins.keys()).cloned());
        let pins: BTreeMap<String, u64> = before
            .pins
            .iter()
            .filter(|(name, step)| self.pins.get(*name) == Some(step))
            .map(|(name, step)| (name.clone(), *step))
            .collect();
        open_pins.retain(|name| !pins.contains_key(name));
        Self { kept, open, gone: before.gone.clone(), pins, open_pins, high_water: before.high_water }
    }
}
