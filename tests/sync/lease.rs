//! One writer at a time: who gets the bucket, who waits, and what becomes of a writer that has lost it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use varvite::error::Error;
use varvite::format::lease::Lease;
use varvite::process::ProcessIdentity;
use varvite::repository::{Access, Repository};
use varvite::store::{Folder, Key, Store};
use varvite::sync::{Clock, Diverged, LeaseState, TierAccess};
use varvite::threads::{Interrupt, within_call};

use crate::common::key;
use crate::common::machine::{Machine, Trainer, begin, check_bucket, load_elsewhere, seconds, seqs_in};
use crate::common::memory_remote::{Fault, FaultMode, MemoryRemote};
use crate::common::training::{save, state_at};

fn lease_key() -> Key {
    key(Folder::Root, "lease.json")
}

fn lease_in(bucket: &MemoryRemote) -> Lease {
    Lease::decode("lease.json", &bucket.contents()["lease.json"]).unwrap()
}

/// A lease of a writer on a host that nobody can look at.
fn foreign() -> Lease {
    Lease {
        epoch: 7,
        nonce: "ab".repeat(16),
        since_nonce: "ab".repeat(16),
        renewal: 0,
        milliseconds: 30_000,
        released: false,
        holder: "process 1 on far-away".to_owned(),
        host: "far-away".to_owned(),
        boot_id: "another boot".to_owned(),
        process_number: 1,
        process_started: 1,
    }
}

fn refusal(machine: &Machine) -> Error {
    machine.open().map(|_| ()).unwrap_err()
}

#[test]
fn a_second_trainer_that_sees_the_lease_renewed_is_told_who_holds_it() {
    let bucket = MemoryRemote::new();
    let first_machine = Machine::new(&bucket);
    let first = first_machine.open().unwrap();
    assert_eq!(first.tiers.lease().epoch, 1);
    let second = Machine::new(&bucket);
    second.clock.on_sleep({
        let (tiers, clock) = (Arc::clone(&first.tiers), Arc::clone(&first_machine.clock));
        move || {
            // The time of both passes alike.
            clock.advance(seconds(3));
            tiers.keep_lease().unwrap();
        }
    });
    let error = refusal(&second);
    let Error::Locked { root, holder } = &error else { panic!("{error}") };
    assert_eq!(*root, bucket.root());
    assert_eq!(*holder, format!("{} (epoch 1)", lease_in(&bucket).holder));
    assert!(second.clock.now() < seconds(30), "it need not wait until the end");
    assert!(first.tiers.lease().is_ours);
}

#[test]
fn the_wait_for_a_lease_can_be_cancelled() {
    let bucket = MemoryRemote::new();
    bucket.plant(&lease_key(), &foreign().encode().unwrap());
    let (machine, interrupt) = (Machine::new(&bucket), Interrupt::default());
    machine.clock.on_sleep({
        let interrupt = Arc::clone(&interrupt);
        move || interrupt.store(true, Ordering::Relaxed)
    });
    let error = within_call(Some(interrupt), || refusal(&machine));
    assert!(matches!(error, Error::Interrupted));
    assert!(machine.clock.now() < seconds(1), "it is heeded at once");
    assert_eq!(lease_in(&bucket), foreign());
    // The folder is free for the next attempt.
    machine.restarted().open().unwrap();
}

#[test]
fn a_lease_that_nobody_renews_is_taken_over_when_its_time_is_over_and_not_before() {
    let bucket = MemoryRemote::new();
    bucket.plant(&lease_key(), &foreign().encode().unwrap());
    let machine = Machine::new(&bucket);
    let trainer = machine.open().unwrap();
    let waited = machine.clock.now();
    assert!(waited >= seconds(30) && waited < seconds(34), "{waited:?}");
    let state = trainer.tiers.lease();
    assert_eq!((state.epoch, state.is_ours), (8, true));
    assert_eq!(lease_in(&bucket).epoch, 8);
    trainer.save(1);
    trainer.sync().unwrap();
    assert_eq!(load_elsewhere(&bucket, 1).unwrap(), state_at(1));
}

#[test]
fn what_is_free_is_taken_at_once() {
    let here = ProcessIdentity::of_this_process();
    let dead = Lease {
        host: here.host.clone(),
        boot_id: here.boot_id.clone(),
        process_number: here.process,
        process_started: here.started + 1,
        ..foreign()
    };
    let forgotten = Lease { process_started: here.started, ..dead.clone() };
    let released = Lease { released: true, ..foreign() };
    for (what, lease) in
        [("released", released), ("of a dead process", dead), ("of a dropped handle", forgotten)]
    {
        let bucket = MemoryRemote::new();
        bucket.plant(&lease_key(), &lease.encode().unwrap());
        let machine = Machine::new(&bucket);
        machine.clock.on_sleep(move || panic!("nobody waits for a lease {what}"));
        assert_eq!(machine.open().unwrap().tiers.lease().epoch, 8, "{what}");
    }
}

#[test]
fn a_person_may_take_the_bucket_from_a_holder_that_lives() {
    let bucket = MemoryRemote::new();
    let first_machine = Machine::new(&bucket);
    let first = first_machine.open().unwrap();
    first.save(1);
    first.sync().unwrap();
    let mut machine = Machine::new(&bucket);
    machine.sync.takeover = true;
    machine.clock.on_sleep(|| panic!("it is taken at once"));
    let second = machine.open().unwrap();
    assert_eq!(second.tiers.lease().epoch, 2);

    // The first finds out when it renews, and from then on writes nothing.
    first_machine.clock.advance(seconds(10));
    first.syncer.work_due();
    let told = first.syncer.take_failure().unwrap();
    assert_fenced(&first, &told, &lease_in(&bucket).holder);
    first_machine.remote.forbid();
    let error = save(&first.repository, 2).unwrap_err();
    assert_fenced(&first, &error, &lease_in(&bucket).holder);
    for refused in [
        first.repository.prune(false).map(drop),
        first.repository.delete(1).map(drop),
        first.repository.pin(1, "x"),
        first.repository.write_receipt(None, "{}").map(drop),
        first.sync().map(drop),
    ] {
        assert_fenced(&first, &refused.unwrap_err(), &lease_in(&bucket).holder);
    }
    assert_eq!(first.repository.resolve("latest").unwrap(), 1, "it still reads");
    first.close();
    assert!(second.tiers.lease().is_ours, "closing takes nothing from the winner");
    second.save(2);
    second.sync().unwrap();
    assert_eq!(seqs_in(&bucket), [1, 2]);
}

/// The error names both writers.
fn assert_fenced(loser: &Trainer, error: &Error, winner: &str) {
    let Error::Conflict { object, by } = error else { panic!("{error}") };
    assert!(object.ends_with("/lease.json"), "{object}");
    let own = format!("process {} on", std::process::id());
    assert!(by.starts_with(winner) && by.contains("; this writer is ") && by.contains(&own), "{by}");
    let state = loser.tiers.lease();
    assert_eq!((state.is_ours, state.fenced_by.as_deref()), (false, Some(by.as_str())));
}

#[test]
fn a_renewal_whose_answer_was_lost_is_no_conflict_with_itself() {
    for mode in [FaultMode::LoseAnswer, FaultMode::FailOnce] {
        let bucket = MemoryRemote::new();
        let machine = Machine::new(&bucket);
        let trainer = machine.open().unwrap();
        machine.remote.arm(Fault { at: 1, mode });
        machine.clock.advance(seconds(10));
        trainer.syncer.work_due();
        assert!(trainer.syncer.state().last_error.is_some());
        machine.clock.advance(seconds(1));
        trainer.tiers.keep_lease().unwrap();
        assert_eq!(lease_in(&bucket).renewal, if mode == FaultMode::LoseAnswer { 2 } else { 1 });
        trainer.save(1);
        trainer.sync().unwrap();
        assert_eq!(trainer.syncer.state().last_error, None);
    }
}

#[test]
fn taking_the_lease_with_any_fault_ends_with_one_holder() {
    for at in 1.. {
        for mode in [FaultMode::FailOnce, FaultMode::LoseAnswer] {
            let bucket = MemoryRemote::new();
            let machine = Machine::new(&bucket);
            machine.remote.arm(Fault { at, mode });
            let opened = machine.open().map(|_| ());
            if !machine.remote.fired() {
                opened.unwrap();
                assert!(at > 5, "an open asks more than {at} times");
                return;
            }
            assert!(matches!(&opened, Err(Error::Store { .. })), "{at} {mode:?}: {opened:?}");
            // Nobody waits for the handle that is gone.
            let next = machine.restarted();
            next.clock.on_sleep(|| panic!("the holder is gone"));
            assert!(next.open().unwrap().tiers.lease().is_ours);
        }
    }
}

#[test]
fn a_lease_that_cannot_be_read_is_waited_for_and_then_replaced() {
    let bucket = MemoryRemote::new();
    bucket.plant(&lease_key(), b"nonsense");
    let machine = Machine::new(&bucket);
    let trainer = machine.open().unwrap();
    assert!(machine.clock.now() >= seconds(30));
    assert_eq!(trainer.tiers.lease().epoch, 1);
}

#[test]
fn handles_that_do_not_write_take_no_lease() {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    trainer.sync().unwrap();
    let before = bucket.contents();
    for (access, tier) in
        [(Access::Read, TierAccess::Read), (Access::Tag, TierAccess::Tag), (Access::Rank, TierAccess::Rank)]
    {
        let reader: Repository = machine.restarted().open_as(access, tier).unwrap();
        assert_eq!(reader.resolve("latest").unwrap(), 1);
    }
    assert_eq!(bucket.contents(), before);
    assert_eq!(machine.tiers(TierAccess::Read).lease(), LeaseState::default());
}

/// A writer that is paused between the check of its lease and the put of its manifest, while another one takes the
/// bucket over.
struct Zombie {
    bucket: MemoryRemote,
    first_machine: Machine,
    first: Trainer,
    second: Arc<Mutex<Option<Trainer>>>,
}

impl Zombie {
    /// `acts` runs at the moment of the put of snapshot 2, with the machine that took over.
    fn new(acts: impl Fn(&Trainer) + Send + Sync + 'static) -> Self {
        let bucket = MemoryRemote::new();
        let first_machine = Machine::new(&bucket);
        let first = first_machine.open().unwrap();
        first.save(1);
        first.sync().unwrap();
        first.save(2);
        let second: Arc<Mutex<Option<Trainer>>> = Arc::default();
        first_machine.remote.set_hook({
            let (bucket, second) = (bucket.clone(), Arc::clone(&second));
            move |line| {
                if line == "swap snapshots/2.json" && second.lock().unwrap().is_none() {
                    let trainer = Machine::new(&bucket).open().unwrap();
                    acts(&trainer);
                    *second.lock().unwrap() = Some(trainer);
                }
            }
        });
        Self { bucket, first_machine, first, second }
    }

    fn second(&self) -> Trainer {
        self.second.lock().unwrap().take().unwrap()
    }
}

#[test]
fn a_zombie_whose_manifest_comes_second_loses_and_writes_nothing_more() {
    let zombie = Zombie::new(|second| {
        assert_eq!(second.repository.resolve("latest").unwrap(), 1);
        second.save(20);
        second.sync().unwrap();
    });
    let error = zombie.first.sync().unwrap_err();
    let second = zombie.second();
    let winner = second.repository.header(2).unwrap();
    let Error::Conflict { object, by } = &error else { panic!("{error}") };
    assert_eq!(*object, format!("{}/snapshots/2.json", zombie.bucket.root()));
    let own = format!("process {} on", std::process::id());
    assert!(
        by.starts_with(&format!("session {} at step 20, by process ", winner.session_id))
            && by.contains("(epoch 2); this writer is ")
            && by.matches(&own).count() == 2,
        "{by}"
    );
    check_bucket(&zombie.bucket).unwrap();
    assert_eq!(load_elsewhere(&zombie.bucket, 2).unwrap(), state_at(20));

    zombie.first_machine.remote.no_hook();
    zombie.first_machine.remote.forbid();
    assert!(matches!(save(&zombie.first.repository, 3), Err(Error::Conflict { .. })));
    assert!(matches!(zombie.first.sync(), Err(Error::Conflict { .. })));
    zombie.first.close();
    second.save(21);
    second.sync().unwrap();
    assert_eq!(seqs_in(&zombie.bucket), [1, 2, 3]);
}

#[test]
fn a_zombie_whose_manifest_comes_first_wins_that_number_and_no_other() {
    // The second one has seen the bucket and saved, but not pushed.
    let zombie = Zombie::new(|second| {
        second.save(20);
    });
    let error = zombie.first.sync().unwrap_err();
    let Error::Conflict { object, by } = &error else { panic!("{error}") };
    assert_eq!(*object, format!("{}/lease.json", zombie.bucket.root()));
    assert!(by.contains("(epoch 2); this writer is "), "{by}");
    assert_eq!(seqs_in(&zombie.bucket), [1, 2], "its put was under way already");
    let second = zombie.second();
    let error = second.sync().unwrap_err();
    let Error::Conflict { by, .. } = &error else { panic!("{error}") };
    assert!(by.contains(": 2;") && by.contains("this writer is "), "{by}");
    check_bucket(&zombie.bucket).unwrap();
    assert_eq!(load_elsewhere(&zombie.bucket, 2).unwrap(), state_at(2));

    zombie.first_machine.remote.no_hook();
    let error = zombie.first.sync().unwrap_err();
    assert_fenced(&zombie.first, &error, &lease_in(&zombie.bucket).holder);
    assert!(
        matches!(save(&zombie.first.repository, 3), Err(Error::Conflict { .. })),
        "it has lost the lease"
    );
    assert!(
        matches!(save(&second.repository, 21), Err(Error::Conflict { .. })),
        "its branch is the losing one"
    );
    assert_eq!(seqs_in(&zombie.bucket), [1, 2]);
}

/// A folder comes back whose unpushed snapshots have numbers that another writer has used since.
fn diverged() -> (MemoryRemote, Machine) {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    trainer.sync().unwrap();
    for step in 2..=4 {
        trainer.save(step);
    }
    trainer.close();
    let other = Machine::new(&bucket).open().unwrap();
    other.save(12);
    other.save(13);
    other.sync().unwrap();
    other.close();
    (bucket, machine.restarted())
}

#[test]
fn two_branches_of_one_number_are_an_error_that_names_the_numbers() {
    let (bucket, machine) = diverged();
    let before = bucket.contents();
    let error = refusal(&machine);
    let Error::Conflict { object, by } = &error else { panic!("{error}") };
    assert_eq!(*object, format!("{}/snapshots", bucket.root()));
    assert!(by.contains("were never pushed: 2, 3; `varvite ls --remote` shows both"), "{by}");
    let changed = |contents: std::collections::BTreeMap<String, Vec<u8>>| {
        contents.into_iter().filter(|(name, _)| name != "lease.json").collect::<Vec<_>>()
    };
    assert_eq!(changed(bucket.contents()), changed(before));
    // Nothing was lost here either.
    let alone = varvite::Repository::open(
        Arc::new(machine.disk.clone()),
        varvite::Options { access: Access::Read, ..varvite::Options::default() },
    )
    .unwrap();
    assert_eq!(alone.candidates().unwrap(), [4, 3, 2, 1]);
}

#[test]
fn a_branch_that_lost_is_dropped_where_that_is_wished() {
    let (bucket, mut machine) = diverged();
    machine.sync.diverged = Diverged::Discard;
    let trainer = machine.open().unwrap();
    assert_eq!(trainer.syncer.state().discarded, [2, 3, 4]);
    let listed = trainer.repository.list().unwrap();
    let listed: Vec<(u64, u64)> = listed.headers.iter().map(|header| (header.seq, header.step)).collect();
    assert_eq!(listed, [(1, 1), (2, 12), (3, 13)]);
    assert_eq!(crate::common::training::load(&trainer.repository, 3).unwrap(), state_at(13));
    let seq = trainer.save(14);
    assert_eq!(seq, 5, "no number is used twice");
    trainer.sync().unwrap();
    assert_eq!(seqs_in(&bucket), [1, 2, 3, 5]);
    check_bucket(&bucket).unwrap();
    // What was dropped does not come back.
    trainer.close();
    let again = machine.restarted().open().unwrap();
    assert_eq!(again.repository.candidates().unwrap(), [5, 3, 2, 1]);
    let packs = crate::common::names(&machine.disk, Folder::Packs);
    let own = |seq: &str| packs.iter().any(|name| name.starts_with(seq));
    assert!(own("1-") && own("5-") && !own("2-") && !own("3-") && !own("4-"), "{packs:?}");
    assert!(machine.disk.list(Folder::Snapshots).unwrap().iter().all(|row| row.name != "3.json"));
}

/// A machine that died before its first push, and another one that began the run anew.
#[test]
fn a_run_that_was_begun_twice_is_refused_or_the_one_that_was_never_pushed_is_dropped() {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    trainer.save(2);
    trainer.repository.pin(2, "mine").unwrap();
    trainer.close();
    let other = Machine::new(&bucket).open().unwrap();
    other.save(11);
    other.sync().unwrap();
    let id = other.repository.repository_id().to_owned();
    other.close();

    let mut again = machine.restarted();
    assert!(matches!(refusal(&again), Error::NotARepository { .. }));
    // What is deleted here meanwhile has the number of a snapshot of the other run.
    again.remote.cut_off();
    again.open().unwrap().repository.delete(1).unwrap();
    again = again.restarted();
    again.sync.diverged = Diverged::Discard;
    let trainer = again.open().unwrap();
    assert_eq!(trainer.repository.repository_id(), id);
    assert_eq!(trainer.syncer.state().discarded, [2]);
    assert_eq!(trainer.repository.candidates().unwrap(), [1]);
    assert_eq!(crate::common::training::load(&trainer.repository, 1).unwrap(), state_at(11));
    assert!(trainer.repository.tags().unwrap().is_empty());
    assert_eq!(trainer.save(12), 3);
    trainer.sync().unwrap();
    assert_eq!(seqs_in(&bucket), [1, 3]);
    check_bucket(&bucket).unwrap();
}
