//! Random sequences of operations, with faults and losses of power, against a model of what was promised.
//!
//! The seed is drawn anew each time and stands in the message of a failure, with the shortest sequence that
//! fails. `PROPTEST_CASES` and `PROPTEST_RNG_SEED` in the environment run more, or the same again.

#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use common::journal::Journal;
use common::oracle::{Case, check_leftovers, load_all, receipts_of};
use common::pattern;
use common::run::Run;
use common::sim_store::{Flaw, Mode, Plan, SimStore};
use common::training::{CHUNK_BYTES, State, nudged, open_coded as open, open_to_read};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestRunner};
use varvite::error::Result;
use varvite::repository::{MergeReport, Repository};
use varvite::retain::Rule;

const NAMES: [&str; 2] = ["first", "second"];

#[derive(Clone, Debug)]
enum Operation {
    /// Changes the tensors whose bits are set, then saves.
    Save {
        changes: u8,
    },
    /// Saves the state of an older step again.
    SaveOld {
        which: usize,
    },
    Prune,
    /// Merges everything of which something is gained.
    Merge,
    Pin {
        name: usize,
        which: usize,
    },
    Unpin {
        name: usize,
    },
    Delete {
        which: usize,
    },
    /// Writes a receipt.
    Receipt,
    /// Puts other content in a receipt.
    Judge {
        which: usize,
    },
    /// Closes and opens with another rule.
    Reopen {
        keep_last: Option<usize>,
    },
    /// Reads with a handle of its own.
    Look,
    /// Lets one of the next steps of the disk go wrong; a loss of power follows where that ends the
    /// process.
    Fault {
        mode: usize,
        in_steps: u64,
        keep_unsynced: bool,
    },
}

fn operation() -> impl Strategy<Value = Operation> {
    let keep_last = proptest::option::of(1..4_usize);
    prop_oneof![
        8 => (0..16_u8).prop_map(|changes| Operation::Save { changes }),
        1 => any::<usize>().prop_map(|which| Operation::SaveOld { which }),
        1 => Just(Operation::Prune),
        3 => Just(Operation::Merge),
        1 => (0..NAMES.len(), any::<usize>()).prop_map(|(name, which)| Operation::Pin { name, which }),
        1 => (0..NAMES.len()).prop_map(|name| Operation::Unpin { name }),
        2 => any::<usize>().prop_map(|which| Operation::Delete { which }),
        2 => Just(Operation::Receipt),
        2 => any::<usize>().prop_map(|which| Operation::Judge { which }),
        2 => keep_last.prop_map(|keep_last| Operation::Reopen { keep_last }),
        1 => Just(Operation::Look),
        4 => (0..Mode::ALL.len(), 1..40_u64, any::<bool>()).prop_map(|(mode, in_steps, keep_unsynced)| {
            Operation::Fault { mode, in_steps, keep_unsynced }
        }),
    ]
}

/// A fault that is armed.
#[derive(Clone, Copy)]
struct Fault {
    mode: Mode,
    keep_unsynced: bool,
}

/// The repository under test, and all that is known of it.
struct World {
    disk: SimStore,
    repository: Option<Repository>,
    keep_last: Option<usize>,
    journal: Journal,
    states: BTreeMap<u64, State>,
    /// Contents of receipts that were written; each is another.
    content_count: u64,
    fault: Option<Fault>,
}

impl World {
    fn new(flaw: Option<Flaw>) -> Self {
        let disk = SimStore::new();
        if let Some(flaw) = flaw {
            disk.break_promise(flaw);
        }
        Self {
            disk,
            repository: None,
            keep_last: None,
            journal: Journal::default(),
            states: BTreeMap::new(),
            content_count: 0,
            fault: None,
        }
    }

    fn apply(&mut self, operation: &Operation) -> Result<(), String> {
        match *operation {
            Operation::Fault { mode, in_steps, keep_unsynced } => {
                let mode = Mode::ALL[mode];
                self.fault = Some(Fault { mode, keep_unsynced });
                self.disk.arm(Plan { at_step: in_steps, mode });
                Ok(())
            }
            Operation::Look => self.look(),
            _ => {
                let before = self.journal.clone();
                let outcome = self.operate(operation);
                self.judge(&before, outcome.err().map(|error| error.chain()))?;
                match operation {
                    Operation::Merge => self.look_at_packs(),
                    _ => Ok(()),
                }
            }
        }
    }

    fn operate(&mut self, operation: &Operation) -> Result<()> {
        if let Operation::Reopen { keep_last } = *operation {
            self.repository = None;
            self.keep_last = keep_last;
        }
        if self.repository.is_none() {
            let rules = self.keep_last.map(|count| Rule::Last { count: count as u64 });
            self.repository = Some(open(Arc::new(self.disk.clone()), rules.into_iter().collect())?);
        }
        let step = self.prepare_state(operation);
        let Some(repository) = &self.repository else { return Ok(()) };
        let states = &self.states;
        let mut run = Run {
            repository,
            journal: &mut self.journal,
            keep_last: self.keep_last,
            staged: false,
            state_of: &|step| states[&step].clone(),
            tell: &mut |_| {},
        };
        let pick = |journal: &Journal, which: usize| {
            let count = journal.kept.len();
            (count > 0).then(|| *journal.kept.keys().nth(which % count).unwrap())
        };
        match *operation {
            Operation::Save { .. } | Operation::SaveOld { .. } => run.save(step),
            Operation::Prune => run.prune(),
            Operation::Merge => run.merge(),
            Operation::Pin { name, which } => match pick(run.journal, which) {
                Some(step)
                    if !run.journal.pins.contains_key(NAMES[name]) && run.journal.open_pins.is_empty() =>
                {
                    run.pin(NAMES[name], step)
                }
                _ => Ok(()),
            },
            Operation::Unpin { name } if run.journal.pins.contains_key(NAMES[name]) => run.unpin(NAMES[name]),
            Operation::Delete { which } => match pick(run.journal, which) {
                Some(step) if !run.journal.is_named(step) => run.delete(step),
                _ => Ok(()),
            },
            Operation::Receipt => {
                self.content_count += 1;
                run.write_receipt(&self.content_count.to_string())
            }
            Operation::Judge { which } if !run.journal.receipts.is_empty() => {
                self.content_count += 1;
                let count = run.journal.receipts.len();
                let number = *run.journal.receipts.keys().nth(which % count).unwrap();
                run.replace_receipt(number, &self.content_count.to_string())
            }
            _ => Ok(()),
        }
    }

    /// Makes the state that an operation saves; returns its step.
    fn prepare_state(&mut self, operation: &Operation) -> u64 {
        let step = self.states.keys().last().map_or(1, |step| step + 1);
        let state = match *operation {
            Operation::Save { changes } => {
                let mut state = self.states.values().last().cloned().unwrap_or_default();
                let lengths = [2 * CHUNK_BYTES + 9, CHUNK_BYTES, 100, 0];
                for (index, length) in lengths.into_iter().enumerate() {
                    let name = format!("tensor {index}");
                    let seed = step * 8 + index as u64;
                    match state.get(&name) {
                        Some(_) if changes & 1 << index == 0 => {}
                        // Every other change is a small one, of which a difference is stored.
                        Some(before) if step.is_multiple_of(2) => {
                            state.insert(name, nudged(before, seed));
                        }
                        _ => {
                            state.insert(name, pattern(seed, length as usize));
                        }
                    }
                }
                state
            }
            Operation::SaveOld { which } if !self.states.is_empty() => {
                self.states.values().nth(which % self.states.len()).unwrap().clone()
            }
            Operation::SaveOld { .. } => State::new(),
            _ => return step,
        };
        self.states.insert(step, state);
        step
    }

    /// Decides whether an outcome was right, and what the fault did to the process.
    fn judge(&mut self, before: &Journal, error: Option<String>) -> Result<(), String> {
        let Some(fault) = self.fault.filter(|_| self.disk.fired()) else {
            return match error {
                Some(error) => Err(format!("failed without a fault: {error}")),
                None => self.look(),
            };
        };
        self.fault = None;
        if (fault.mode == Mode::Freeze) != error.is_none() {
            return Err(format!("{:?} fired, and the call returned {error:?}", fault.mode));
        }
        if fault.mode == Mode::FailOnce {
            return self.look();
        }
        if fault.mode == Mode::Freeze && !fault.keep_unsynced {
            self.journal = self.journal.doubted_since(before);
        }
        self.repository = None;
        self.disk = self.disk.after_power_loss(fault.keep_unsynced);
        self.settle()
    }

    fn case<T>(&self, ask: impl FnOnce(&Case<'_>) -> T) -> T {
        let next_step = self.states.keys().last().map_or(1, |step| step + 1);
        let next_state = RefCell::new(self.states.clone());
        next_state.borrow_mut().insert(next_step, State::from([("last".to_owned(), pattern(99, 5_000))]));
        ask(&Case {
            store: Arc::new(self.disk.clone()),
            journal: &self.journal,
            state_of: &|step| next_state.borrow()[&step].clone(),
            staged_count: &|| self.disk.staged_lengths().len(),
            next_step,
        })
    }

    /// The handle and a reader see every promised snapshot and no other.
    fn look(&self) -> Result<(), String> {
        if let Some(repository) = &self.repository {
            self.case(|case| {
                case.check_pins(repository)?;
                case.check_receipts(repository)?;
                case.check_snapshots(repository)
            })?;
        }
        if self.journal.high_water > 0 {
            let reader = open_to_read(Arc::new(self.disk.clone())).map_err(|error| error.chain())?;
            self.case(|case| case.check_snapshots(&reader))?;
        }
        Ok(())
    }

    /// After a merge and a prune each pack that lies there is referred to, and a second merge has nothing to do.
    fn look_at_packs(&mut self) -> Result<(), String> {
        if self.fault.is_some() {
            return Ok(());
        }
        self.apply(&Operation::Prune)?;
        let Some(repository) = &self.repository else { return Ok(()) };
        repository.merge(true, &AtomicBool::new(false)).map_err(|error| error.chain())?;
        // The pack of a save that failed lies there until the next commit or open.
        if self.journal.open.is_empty() {
            check_leftovers(repository, self.disk.staged_lengths().len())?;
        }
        match repository.merge(true, &AtomicBool::new(false)) {
            Ok(report) if report == MergeReport::default() => Ok(()),
            other => Err(format!("a second merge: {other:?}")),
        }
    }

    /// After a crash: opens, looks, and takes what it finds for promised from now on.
    fn settle(&mut self) -> Result<(), String> {
        self.operate(&Operation::Reopen { keep_last: self.keep_last }).map_err(|error| error.chain())?;
        self.look()?;
        let Some(repository) = &self.repository else { return Ok(()) };
        let found = load_all(repository, &|step| self.states[&step].clone())?;
        for step in std::mem::take(&mut self.journal.open) {
            match found.get(&step) {
                Some(seq) => self.journal.note(&format!("saved {step} {seq}")),
                None => self.journal.note(&format!("deleted {step}")),
            }
        }
        let tags = repository.tags().map_err(|error| error.chain())?;
        for (name, step) in std::mem::take(&mut self.journal.open_pins) {
            if tags.contains_key(&name) {
                self.journal.note(&format!("pinned {name} {step}"));
            }
        }
        let receipts = receipts_of(repository)?;
        self.journal.open_receipts.clear();
        self.journal.receipts.clear();
        for (number, content) in receipts {
            self.journal.note(&format!("receipted {number} {content}"));
        }
        Ok(())
    }

    /// The questions of the oracle at the end, after a loss of power.
    fn end(&mut self) -> Result<(), String> {
        self.repository = None;
        self.disk = self.disk.after_power_loss(false);
        self.case(|case| case.check().map(|_report| ()))
    }
}

/// Runs random sequences; returns the seed and the shortest sequence that fails.
fn run(mut config: Config, flaw: Option<Flaw>) -> Result<(), String> {
    if config.rng_seed == RngSeed::Random {
        config.rng_seed = RngSeed::Fixed(RandomState::new().hash_one(0));
    }
    config.failure_persistence = None;
    let seed = config.rng_seed;
    let sequences = vec(operation(), 1..30);
    let outcome = TestRunner::new(config).run(&sequences, |operations| {
        let mut world = World::new(flaw);
        let done = operations.iter().try_for_each(|operation| world.apply(operation));
        done.and_then(|()| world.end())
            .map_err(|message| TestCaseError::fail(format!("{message}\n{:#?}", world.disk.log())))
    });
    outcome.map_err(|error| format!("PROPTEST_RNG_SEED={seed}: {error}"))
}

#[test]
fn random_sequences_with_faults_keep_every_promise() {
    // 256 sequences, or as many as the environment says.
    run(Config::default(), None).unwrap();
}

#[test]
fn the_model_catches_a_store_without_folder_syncs() {
    let message = run(Config::default(), Some(Flaw::FolderSyncDoesNothing)).unwrap_err();
    // A snapshot, or a receipt: whichever comes first in the sequence.
    let is_loss = message.contains("is lost") || message.contains("was acknowledged as");
    assert!(is_loss, "{message}");
}
