//! Anything in any order: two machines that come, go and die, and a job whose threads all run at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use varvite::compact::MergePolicy;
use varvite::merger::Merger;
use varvite::repository::{Options, Repository};
use varvite::retain::Rule;
use varvite::saver::Job;
use varvite::store::Store;
use varvite::store::memory::MemoryStore;
use varvite::sync::{Diverged, TierAccess};
use varvite::syncer::Syncer;

use crate::common::machine::{Machine, Trainer, check_bucket, load_elsewhere, orphans_in, seqs_in};
use crate::common::memory_remote::{Fault, FaultMode, MemoryRemote};
use crate::common::pattern;
use crate::common::training::{load, options, request, state_at};

/// Numbers that follow from a seed.
struct Dice {
    bytes: Vec<u8>,
    at: usize,
}

impl Dice {
    fn new(seed: u64) -> Self {
        Self { bytes: pattern(seed, 10_000), at: 0 }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.at += 2;
        (usize::from(self.bytes[self.at]) * 256 + usize::from(self.bytes[self.at + 1])) % limit
    }
}

/// Two folders, one bucket, at most one process.
struct World {
    bucket: MemoryRemote,
    disks: [MemoryStore; 2],
    on: usize,
    /// The machine that held the lease before.
    before: usize,
    machine: Machine,
    trainer: Option<Trainer>,
    next_step: u64,
    /// What a push has confirmed and nobody has deleted since: step by seq.
    promised: BTreeMap<u64, u64>,
    /// By disk: what was deleted there and may still lie in the bucket.
    deleted: [BTreeSet<u64>; 2],
    log: Vec<String>,
}

impl World {
    fn new(dice: &mut Dice) -> Self {
        let bucket = MemoryRemote::new();
        let disks = [MemoryStore::new(), MemoryStore::new()];
        let machine = Machine::with_disk(disks[0].clone(), &bucket);
        let mut world = Self {
            bucket,
            disks,
            on: 0,
            before: 0,
            machine,
            trainer: None,
            next_step: 1,
            promised: BTreeMap::new(),
            deleted: Default::default(),
            log: Vec::new(),
        };
        world.start(0, dice);
        world
    }

    fn trainer(&self) -> &Trainer {
        self.trainer.as_ref().unwrap()
    }

    /// Starts a process on one of the machines; the one before is dead, or was closed.
    fn start(&mut self, disk: usize, dice: &mut Dice) {
        self.trainer = None;
        let mut machine = Machine::with_disk(self.disks[disk].clone(), &self.bucket);
        machine.sync.diverged = Diverged::Discard;
        machine.sync.orphan_hours = 0.0;
        if dice.below(2) == 0 {
            machine.rules = vec![Rule::Last { count: 3 }];
        }
        self.trainer = Some(machine.open().unwrap_or_else(|error| panic!("{:?}: {error}", self.log)));
        self.before = self.on;
        (self.machine, self.on) = (machine, disk);
        // What was deleted here goes, unless another one has held the lease in between.
        if self.before != disk {
            self.deleted[disk].clear();
        }
        let deleted = &self.deleted[disk];
        self.promised.retain(|seq, _| !deleted.contains(seq));
        self.check_promises();
    }

    fn listed(&self) -> BTreeMap<u64, u64> {
        let listed = self.trainer().repository.list().unwrap();
        assert!(listed.damaged.is_empty(), "{:?}: {:?}", self.log, listed.damaged);
        listed.headers.iter().map(|header| (header.seq, header.step)).collect()
    }

    fn check_promises(&self) {
        let listed = self.listed();
        for promise in &self.promised {
            let is_kept = listed.get(promise.0) == Some(promise.1);
            assert!(is_kept, "{:?}: {promise:?} of {listed:?}", self.log);
        }
    }

    /// Everything that is listed loads; the bucket is whole; what was promised loads from there alone.
    fn check(&self) {
        for (seq, step) in self.listed() {
            let found = load(&self.trainer().repository, seq);
            let found = found.unwrap_or_else(|error| panic!("{:?}: {seq}: {}", self.log, error.chain()));
            assert!(found == state_at(step), "{:?}: {seq}", self.log);
        }
        check_bucket(&self.bucket).unwrap_or_else(|why| panic!("{:?}: {why}", self.log));
    }

    /// Takes what retention or a person has deleted out of the promises.
    fn forget_deleted(&mut self, before: &BTreeMap<u64, u64>) {
        let listed = self.listed();
        let gone = before.keys().filter(|seq| !listed.contains_key(seq));
        self.deleted[self.on].extend(gone);
        let deleted = &self.deleted[self.on];
        self.promised.retain(|seq, _| !deleted.contains(seq));
    }

    fn sync(&mut self) {
        self.trainer().sync().unwrap_or_else(|error| panic!("{:?}: {}", self.log, error.chain()));
        self.promised = self.listed();
        self.deleted[self.on].clear();
        let there = seqs_in(&self.bucket);
        assert_eq!(there, self.promised.keys().copied().collect::<Vec<_>>(), "{:?}", self.log);
        assert!(orphans_in(&self.bucket).is_empty(), "{:?}: {:?}", self.log, orphans_in(&self.bucket));
        assert_eq!(self.trainer().syncer.state().unpushed, [0_u64; 0]);
        for (seq, step) in &self.promised {
            assert!(load_elsewhere(&self.bucket, *seq).unwrap() == state_at(*step), "{:?}: {seq}", self.log);
        }
    }

    /// A push that goes wrong at some request, with the process or without.
    fn sync_badly(&mut self, dice: &mut Dice) {
        let before = self.listed();
        let mode = FaultMode::ALL[dice.below(FaultMode::ALL.len())];
        self.machine.remote.arm(Fault { at: 1 + dice.below(60) as u64, mode });
        let is_ok = self.trainer().sync().is_ok();
        self.log.push(format!("{mode:?} {is_ok}"));
        let is_dead = self.machine.remote.is_dead();
        self.machine.remote.heal();
        if is_dead {
            // What retention has deleted before is seen after the restart.
            let (promised, disk) = (std::mem::take(&mut self.promised), self.on);
            self.start(disk, dice);
            self.promised = promised;
        }
        self.forget_deleted(&before);
        self.check_promises();
    }

    fn act(&mut self, dice: &mut Dice) {
        let before = self.listed();
        let some = |dice: &mut Dice| before.keys().nth(dice.below(before.len().max(1))).copied();
        match dice.below(20) {
            0..=6 => {
                let step = self.next_step;
                self.next_step += 1;
                let seq = self.trainer().save(step);
                self.log.push(format!("saved {seq}"));
                assert!(seq > before.keys().last().copied().unwrap_or(0), "{:?}", self.log);
                self.forget_deleted(&before);
                self.check_promises();
            }
            7..=9 => {
                self.log.push("sync".to_owned());
                self.sync();
            }
            10 | 11 => self.sync_badly(dice),
            12 => {
                if let Some(seq) = some(dice) {
                    self.log.push(format!("delete {seq}"));
                    self.trainer().repository.delete(seq).unwrap();
                    self.forget_deleted(&before);
                    assert!(!self.listed().contains_key(&seq));
                }
            }
            13 | 14 => {
                self.log.push("merge".to_owned());
                self.trainer().repository.merge(true, &AtomicBool::new(false)).unwrap();
                self.check_promises();
            }
            15 => {
                if let Some(seq) = some(dice) {
                    self.log.push(format!("resume {seq}"));
                    let snapshot = self.trainer().repository.snapshot(seq).unwrap();
                    self.trainer().repository.adopt(&snapshot, dice.below(2) == 0);
                }
            }
            16 | 17 => {
                let disk = dice.below(2);
                self.log.push(format!("close, open {disk}"));
                self.trainer.take().unwrap().close();
                self.start(disk, dice);
            }
            18 => {
                let disk = dice.below(2);
                self.log.push(format!("die, open {disk}"));
                self.start(disk, dice);
            }
            _ => {
                let disk = dice.below(2);
                self.log.push(format!("lose {}, open {disk}", self.on));
                self.trainer = None;
                self.disks[self.on] = MemoryStore::new();
                self.deleted[self.on].clear();
                self.start(disk, dice);
            }
        }
    }
}

#[test]
fn two_machines_in_any_order_keep_every_promise() {
    for seed in 0..60 {
        let mut dice = Dice::new(seed);
        let mut world = World::new(&mut dice);
        world.log.push(format!("seed {seed}"));
        for _ in 0..60 {
            world.act(&mut dice);
            world.check();
        }
        world.log.push("end".to_owned());
        world.sync();
    }
}

/// Saves, retention, merges, pushes and a reader on another machine, all at once; the bucket is looked at before every
/// request.
#[test]
fn a_bucket_is_whole_at_every_moment_of_a_job() {
    let bucket = MemoryRemote::new();
    let machine = Machine { rules: vec![Rule::Last { count: 3 }], ..Machine::new(&bucket) };
    let tiers = machine.tiers(TierAccess::Write);
    let merge = Some(MergePolicy { stride: 3, max_packs: 2, dead_ratio: 0.3 });
    let repository = Repository::open(
        Arc::clone(&tiers) as Arc<dyn Store>,
        Options { merge, ..options(machine.rules.clone()) },
    )
    .unwrap();
    let merger = Merger::new(repository.clone());
    let syncer = Syncer::new(repository.clone(), Arc::clone(&tiers));
    machine.remote.set_hook({
        let bucket = bucket.clone();
        move |line| {
            check_bucket(&bucket).unwrap_or_else(|why| panic!("before {line}: {why}"));
        }
    });
    for step in 1..=40 {
        let state = state_at(step);
        let sources: Vec<&[u8]> = state.values().map(Vec::as_slice).collect();
        let session = repository.begin_save(request(step, &state), &sources).unwrap();
        let job = Job::start(session, Arc::clone(&merger), Some(Arc::clone(&syncer))).unwrap();
        let report = job.wait(Duration::from_secs(60)).unwrap().unwrap();
        report.retention.as_ref().unwrap();
    }
    merger.stop(&AtomicBool::new(false)).unwrap();
    assert!(merger.take_failure().is_none());
    syncer.sync_now(&AtomicBool::new(false)).unwrap();
    assert_eq!(seqs_in(&bucket), [38, 39, 40]);
    assert!(orphans_in(&bucket).is_empty(), "{:?}", orphans_in(&bucket));
    for seq in 38..=40 {
        assert_eq!(load_elsewhere(&bucket, seq).unwrap(), state_at(seq));
    }
    syncer.stop(&AtomicBool::new(false)).unwrap();
    repository.close();
}
