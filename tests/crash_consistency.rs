//! Every step of every operation fails, freezes, tears and crashes once; then the repository is opened
//! anew, with and without what was never synced, and must answer the questions of `common::oracle`.

#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod common;

use std::sync::{Arc, Mutex};

use common::journal::Journal;
use common::oracle::{Case, check_leftovers, load_all};
use common::run::Run;
use common::sim_store::{Flaw, Mode, Plan, SimStore};
use common::training::{coded_state_at as state_at, open_coded as open};
use varvite::error::{Error, Result};
use varvite::repository::Repository;
use varvite::retain::Rule;
use varvite::store::{Folder, Key, Listed, Published, PutMode, ReadAt, StagedWrite, Store, WriterLock};

/// Steps that the harness saves by itself, after all others.
const SAVE_AFTER_FAILURE: u64 = 90;
const NEXT_STEP: u64 = 100;

const RECEIPTS: &str = "receipts: the first, another, and one replaced";

type Work = fn(&mut Run<'_>) -> Result<()>;

/// An operation to be hit, and what was there before.
struct Scenario {
    name: &'static str,
    prepare: Work,
    /// Retention of the handle that works: `last`, or none.
    keep_last: Option<usize>,
    work: Work,
    /// Steps of the simulated disk that opening and working surely take.
    least_steps: u64,
}

static SCENARIOS: [Scenario; 11] = [
    Scenario {
        name: "first save",
        prepare: |_| Ok(()),
        keep_last: None,
        work: |run| run.save(1),
        least_steps: 15,
    },
    Scenario {
        name: "delta save",
        prepare: |run| (1..=2).try_for_each(|step| run.save(step)),
        keep_last: None,
        work: |run| run.save(3),
        least_steps: 12,
    },
    Scenario {
        name: "save with retention that deletes",
        prepare: |run| {
            (1..=4).try_for_each(|step| run.save(step))?;
            run.pin("kept", 2)
        },
        keep_last: Some(2),
        work: |run| run.save(5),
        least_steps: 18,
    },
    Scenario {
        name: "prune",
        prepare: |run| (1..=5).try_for_each(|step| run.save(step)),
        keep_last: Some(1),
        work: |run| run.prune(),
        least_steps: 8,
    },
    Scenario {
        name: "delete of the newest, and a save after it",
        prepare: |run| (1..=3).try_for_each(|step| run.save(step)),
        keep_last: None,
        work: |run| {
            run.delete(3)?;
            run.save(4)
        },
        least_steps: 20,
    },
    Scenario {
        name: "delete of all, newest first",
        prepare: |run| (1..=3).try_for_each(|step| run.save(step)),
        keep_last: None,
        work: |run| [3, 2, 1].into_iter().try_for_each(|step| run.delete(step)),
        least_steps: 12,
    },
    Scenario {
        name: "pin and unpin",
        prepare: |run| {
            (1..=2).try_for_each(|step| run.save(step))?;
            run.pin("old", 1)
        },
        keep_last: None,
        work: |run| {
            run.pin("new", 2)?;
            run.unpin("old")
        },
        least_steps: 7,
    },
    Scenario {
        name: RECEIPTS,
        prepare: |run| {
            run.save(1)?;
            run.write_receipt("\"old\"")
        },
        keep_last: None,
        work: |run| {
            run.write_receipt("\"new\"")?;
            run.replace_receipt(1, "\"old,judged\"")?;
            run.save(2)?;
            run.replace_receipt(2, "\"new,judged\"")
        },
        least_steps: 24,
    },
    Scenario {
        name: "merge",
        prepare: |run| (1..=4).try_for_each(|step| run.save(step)),
        keep_last: None,
        work: |run| run.merge(),
        least_steps: 30,
    },
    Scenario {
        name: "merge of what a merge and a deletion have left, and a save after it",
        prepare: |run| {
            (1..=3).try_for_each(|step| run.save(step))?;
            run.merge()?;
            (4..=5).try_for_each(|step| run.save(step))?;
            run.delete(3)
        },
        keep_last: None,
        work: |run| {
            run.merge()?;
            run.save(6)
        },
        least_steps: 40,
    },
    Scenario {
        name: "merge and delete of the newest, and another merge",
        prepare: |run| (1..=4).try_for_each(|step| run.save(step)),
        keep_last: None,
        work: |run| {
            run.merge()?;
            run.delete(4)?;
            run.merge()
        },
        least_steps: 40,
    },
];

/// A disk before the work, and what was promised on it.
struct Prepared {
    disk: SimStore,
    journal: Journal,
}

impl Prepared {
    fn of(scenario: &Scenario) -> Self {
        Self::dressed(scenario, PLAIN)
    }

    fn dressed(scenario: &Scenario, dress: Dress) -> Self {
        let disk = SimStore::new();
        let mut journal = Journal::default();
        let repository = open(dress(disk.clone()), Vec::new()).unwrap();
        do_work(&repository, &mut journal, None, scenario.prepare).unwrap();
        Self { disk, journal }
    }
}

fn do_work(
    repository: &Repository,
    journal: &mut Journal,
    keep_last: Option<usize>,
    work: Work,
) -> Result<()> {
    work(&mut Run { repository, journal, keep_last, staged: false, state_of: &state_at, tell: &mut |_| {} })
}

fn rules(keep_last: Option<usize>) -> Vec<Rule> {
    keep_last.map(|count| Rule::Last { count: count as u64 }).into_iter().collect()
}

/// How the disk is dressed for the engine.
type Dress = fn(SimStore) -> Arc<dyn Store>;

const PLAIN: Dress = |disk| Arc::new(disk);

/// What the work came to: the handle where it opened, and the first error.
struct Worked {
    repository: Option<Repository>,
    error: Option<Error>,
}

/// Opens and works on a disk that may fail at any step.
fn hit(scenario: &Scenario, disk: &SimStore, journal: &mut Journal, dress: Dress) -> Worked {
    match open(dress(disk.clone()), rules(scenario.keep_last)) {
        Err(error) => Worked { repository: None, error: Some(error) },
        Ok(repository) => {
            let error = do_work(&repository, journal, scenario.keep_last, scenario.work).err();
            Worked { repository: Some(repository), error }
        }
    }
}

/// Hits every step of opening and working in every mode; returns the number of crash states that were
/// looked at, or the first thing that does not hold.
fn hit_every_step(scenario: &Scenario, prepared: &Prepared, dress: Dress) -> Result<u64, String> {
    Mode::ALL.into_iter().map(|mode| hit_every_step_in(mode, scenario, prepared, dress)).sum()
}

fn hit_every_step_in(
    mode: Mode,
    scenario: &Scenario,
    prepared: &Prepared,
    dress: Dress,
) -> Result<u64, String> {
    let mut state_count = 0;
    for at_step in 1.. {
        let disk = prepared.disk.after_power_loss(false);
        disk.arm(Plan { at_step, mode });
        let checked = hit_one_step(scenario, prepared, &disk, mode, dress);
        state_count += checked.map_err(|message| {
            format!("{}, {mode:?} at step {at_step}: {message}\n{:#?}", scenario.name, disk.log())
        })?;
        if !disk.fired() {
            assert!(at_step > scenario.least_steps, "{}: {:#?}", scenario.name, disk.log());
            break;
        }
    }
    Ok(state_count)
}

fn hit_one_step(
    scenario: &Scenario,
    prepared: &Prepared,
    disk: &SimStore,
    mode: Mode,
    dress: Dress,
) -> Result<u64, String> {
    let mut journal = prepared.journal.clone();
    let worked = hit(scenario, disk, &mut journal, dress);
    match (&worked.error, disk.fired() && mode != Mode::Freeze) {
        (None, false) | (Some(Error::Store { .. } | Error::Poisoned { .. }), true) => {}
        (None, true) => return Err("the fault was swallowed: the call returned Ok".to_owned()),
        (Some(error), _) => return Err(format!("the call returned {error:?}")),
    }
    if worked.error.is_some() && mode == Mode::FailOnce {
        go_on(scenario, disk, worked.repository, &mut journal, dress)
            .map_err(|message| format!("the same process can't go on: {message}"))?;
    } else {
        drop(worked);
    }
    for keep_unsynced in [false, true] {
        let lied = disk.fired() && mode == Mode::Freeze && !keep_unsynced;
        let promised = if lied { journal.doubted_since(&prepared.journal) } else { journal.clone() };
        check(&disk.after_power_loss(keep_unsynced), &promised, dress).map_err(|message| {
            format!("{message}\nwith what was not synced: {keep_unsynced}, promised: {promised:?}")
        })?;
    }
    check_after_kill(disk, &journal, dress).map_err(|message| {
        format!("{message}\nkilled, opened and pruned, then without power: {journal:?}")
    })?;
    Ok(3)
}

/// A killed process leaves what it had not synced to the next one, which must not build on it before it is
/// durable: the power fails after that one has recovered and swept.
fn check_after_kill(disk: &SimStore, journal: &Journal, dress: Dress) -> Result<(), String> {
    if disk.fired_mode() == Some(Mode::Freeze) {
        return Ok(());
    }
    let killed = disk.after_kill();
    let repository = open(dress(killed.clone()), Vec::new()).map_err(|error| error.chain())?;
    let settled = load_all(&repository, &state_at)?;
    repository.prune(false).map_err(|error| error.chain())?;
    drop(repository);
    // What was there after the recovery is promised from now on.
    let mut journal = journal.clone();
    for step in std::mem::take(&mut journal.open) {
        if let Some(seq) = settled.get(&step) {
            journal.note(&format!("saved {step} {seq}"));
        }
    }
    check(&killed.after_power_loss(false), &journal, dress)
}

/// After a single failure the same process saves again, with the handle it has or with a new one, and
/// nothing of the failure is left then.
fn go_on(
    scenario: &Scenario,
    disk: &SimStore,
    repository: Option<Repository>,
    journal: &mut Journal,
    dress: Dress,
) -> Result<(), String> {
    let repository = match repository {
        Some(repository) => repository,
        None => open(dress(disk.clone()), rules(scenario.keep_last)).map_err(|error| error.chain())?,
    };
    do_work(&repository, journal, scenario.keep_last, |run| run.save(SAVE_AFTER_FAILURE))
        .map_err(|error| error.chain())?;
    check_leftovers(&repository, disk.staged_lengths().len())
}

/// Asks the questions of the oracle about a disk that nobody holds.
fn check(disk: &SimStore, journal: &Journal, dress: Dress) -> Result<(), String> {
    let case = Case {
        store: dress(disk.clone()),
        journal,
        state_of: &state_at,
        staged_count: &|| disk.staged_lengths().len(),
        next_step: NEXT_STEP,
    };
    case.check().map(|_report| ())
}

fn scenario(name: &str) -> &'static Scenario {
    SCENARIOS.iter().find(|scenario| scenario.name == name).unwrap()
}

#[test]
fn no_fault_at_any_step_loses_or_tears_a_snapshot() {
    for scenario in &SCENARIOS {
        let state_count = hit_every_step(scenario, &Prepared::of(scenario), PLAIN).unwrap();
        // Each step in each mode, looked at three times, and the runs without a fault.
        assert!(state_count >= (scenario.least_steps + 1) * 3 * Mode::ALL.len() as u64);
    }
}

/// Each kind of object in each way in which it is written; that of a pack are fewer and longer writes.
#[cfg(feature = "encryption")]
#[test]
fn no_fault_at_any_step_loses_or_tears_an_encrypted_snapshot() {
    let dress: Dress = |disk| Arc::new(common::encrypted(Arc::new(disk)));
    for name in ["save with retention that deletes", "pin and unpin", "merge", RECEIPTS] {
        let scenario = scenario(name);
        let scenario = Scenario { least_steps: scenario.least_steps / 2, ..*scenario };
        let state_count = hit_every_step(&scenario, &Prepared::dressed(&scenario, dress), dress).unwrap();
        assert!(state_count >= (scenario.least_steps + 1) * 3 * Mode::ALL.len() as u64);
    }
}

/// The disk after each crash of some work is the start of a recovery, which is hit at every step too.
#[test]
fn no_fault_during_a_recovery_loses_or_tears_a_snapshot() {
    const RECOVERY: Scenario =
        Scenario { name: "recovery", prepare: |_| Ok(()), keep_last: None, work: |_| Ok(()), least_steps: 1 };
    let mut published_count = 0;
    let mut removed_count = 0;
    let names = ["save with retention that deletes", "delete of the newest, and a save after it", "merge"];
    for name in names {
        let scenario = scenario(name);
        let prepared = Prepared::of(scenario);
        for keep_unsynced in [false, true] {
            for at_step in 1.. {
                let disk = prepared.disk.after_power_loss(false);
                disk.arm(Plan { at_step, mode: Mode::Crash });
                let mut journal = prepared.journal.clone();
                drop(hit(scenario, &disk, &mut journal, PLAIN));
                if !disk.fired() {
                    assert!(at_step > scenario.least_steps);
                    break;
                }
                let crashed = Prepared { disk: disk.after_power_loss(keep_unsynced), journal };
                // A copy is recovered undisturbed, to see that there was something to do.
                let copy = open(PLAIN(crashed.disk.after_power_loss(true)), Vec::new()).unwrap();
                published_count += copy.recovered().published.len();
                removed_count += copy.recovered().orphans.len();
                hit_every_step(&RECOVERY, &crashed, PLAIN)
                    .unwrap_or_else(|message| panic!("{name}, crash at step {at_step}, then {message}"));
            }
        }
    }
    assert!(published_count > 3, "recovery had nothing to publish");
    assert!(removed_count == 0, "a pack is whole or it is in `tmp/`: {removed_count}");
}

/// The controls: a store that breaks one promise must be caught, or the tests above prove nothing.
#[test]
fn a_store_without_folder_syncs_is_caught() {
    let message = caught(Flaw::FolderSyncDoesNothing);
    assert!(message.contains("was acknowledged and is lost"), "{message}");
}

#[test]
fn a_store_without_file_syncs_is_caught() {
    let message = caught(Flaw::FileSyncDoesNothing);
    assert!(message.contains("damaged") || message.contains("corrupt"), "{message}");
}

#[test]
fn a_store_that_leaves_staged_files_is_caught() {
    let message = caught(Flaw::StagedStay);
    assert!(message.contains("staged files are left"), "{message}");
}

fn caught(flaw: Flaw) -> String {
    let scenario = scenario("delta save");
    let prepared = Prepared::of(scenario);
    prepared.disk.break_promise(flaw);
    hit_every_step(scenario, &prepared, PLAIN).unwrap_err()
}

#[test]
fn a_manifest_that_is_published_before_its_pack_is_caught() {
    for (name, mode) in [("delta save", PutMode::IfAbsent), ("merge", PutMode::Replace)] {
        let scenario = scenario(name);
        let dress: Dress = match mode {
            PutMode::IfAbsent => |disk| Arc::new(Disordered::new(disk, Some(PutMode::IfAbsent))),
            PutMode::Replace => |disk| Arc::new(Disordered::new(disk, Some(PutMode::Replace))),
        };
        let prepared = Prepared::of(scenario);
        let message = hit_every_step_in(Mode::Crash, scenario, &prepared, dress).unwrap_err();
        assert!(message.contains("missing packs") || message.contains("does not load"), "{message}");
    }
}

#[test]
fn old_packs_that_go_before_the_manifests_are_replaced_are_caught() {
    let scenario = scenario("merge");
    let dress: Dress = |disk| Arc::new(Disordered::new(disk, None));
    let message = hit_every_step_in(Mode::Crash, scenario, &Prepared::of(scenario), dress).unwrap_err();
    assert!(message.contains("missing packs") || message.contains("does not load"), "{message}");
}

/// Confirms at once what it does only later: packs, which it publishes after the next manifest of a kind, or
/// replacements of manifests, which it does after the next deletion.
#[derive(Debug)]
struct Disordered {
    inner: SimStore,
    /// Manifests that come before their packs; `None` where packs are not held back.
    before_packs: Option<PutMode>,
    held: Arc<Mutex<Vec<Box<dyn StagedWrite>>>>,
    replacements: Mutex<Vec<(Key, Vec<u8>)>>,
}

impl Disordered {
    fn new(inner: SimStore, before_packs: Option<PutMode>) -> Self {
        Self { inner, before_packs, held: Arc::default(), replacements: Mutex::default() }
    }
}

#[derive(Debug)]
struct HeldBack {
    inner: Box<dyn StagedWrite>,
    held: Arc<Mutex<Vec<Box<dyn StagedWrite>>>>,
}

impl StagedWrite for HeldBack {
    fn position_bytes(&self) -> u64 {
        self.inner.position_bytes()
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.inner.append(bytes)
    }

    fn publish(self: Box<Self>) -> Result<Published> {
        let length_bytes = self.inner.position_bytes();
        self.held.lock().unwrap().push(self.inner);
        Ok(Published { length_bytes, ..Published::default() })
    }
}

impl Store for Disordered {
    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>> {
        let inner = self.inner.stage(key)?;
        let is_merged = key.name().contains("-m");
        if self.before_packs != Some(if is_merged { PutMode::Replace } else { PutMode::IfAbsent }) {
            return Ok(inner);
        }
        Ok(Box::new(HeldBack { inner, held: Arc::clone(&self.held) }))
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        if self.before_packs.is_none() && mode == PutMode::Replace {
            self.replacements.lock().unwrap().push((key.clone(), bytes.to_vec()));
            return Ok(());
        }
        self.inner.put(key, bytes, mode)?;
        if self.before_packs != Some(mode) {
            return Ok(());
        }
        let held = std::mem::take(&mut *self.held.lock().unwrap());
        held.into_iter().try_for_each(|staged| staged.publish().map(|_published| ()))
    }

    fn root(&self) -> String {
        self.inner.root()
    }

    fn create_folders(&self) -> Result<()> {
        self.inner.create_folders()
    }

    fn list(&self, folder: Folder) -> Result<Vec<Listed>> {
        self.inner.list(folder)
    }

    fn open(&self, key: &Key) -> Result<Box<dyn ReadAt>> {
        self.inner.open(key)
    }

    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        let freed_bytes = self.inner.delete(folder, names)?;
        let replacements = std::mem::take(&mut *self.replacements.lock().unwrap());
        replacements.iter().try_for_each(|(key, bytes)| self.inner.put(key, bytes, PutMode::Replace))?;
        Ok(freed_bytes)
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        self.inner.sync_folder(folder)
    }

    fn sweep_staged(&self) -> Result<u64> {
        self.inner.sweep_staged()
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn WriterLock>> {
        self.inner.lock(holder)
    }

    fn free_bytes(&self) -> Option<u64> {
        self.inner.free_bytes()
    }

    fn local_path(&self, key: &Key) -> Option<std::path::PathBuf> {
        self.inner.local_path(key)
    }
}
