//! A bucket that can't be reached, at open and later.

use std::sync::atomic::AtomicBool;

use varvite::error::Error;
use varvite::retain::Rule;

use crate::common::machine::{Machine, begin, load_elsewhere, seconds, seqs_in};
use crate::common::memory_remote::MemoryRemote;
use crate::common::training::{load, save, state_at};

#[test]
fn without_a_snapshot_here_nobody_can_know_whether_the_run_is_new() {
    let machine = Machine::new(&MemoryRemote::new());
    machine.remote.cut_off();
    let error = machine.open().map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "{error}");
    // The folder is free for the next attempt.
    machine.remote.heal();
    machine.open().unwrap();
}

#[test]
fn with_snapshots_here_the_run_goes_on_and_the_bucket_follows_later() {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    trainer.sync().unwrap();
    trainer.close();

    let machine = Machine { rules: vec![Rule::Last { count: 1 }], ..machine.restarted() };
    machine.remote.cut_off();
    let trainer = machine.open().unwrap();
    let state = trainer.syncer.state();
    assert!(state.last_error.unwrap().contains("simulated"));
    assert!(!state.lease.is_ours && state.lease.fenced_by.is_none());
    for step in 2..=4 {
        trainer.save(step);
    }
    // What was pushed before may go without a bucket, what was not may not.
    assert_eq!(trainer.repository.candidates().unwrap(), [4, 3, 2]);
    assert_eq!(trainer.syncer.state().unpushed, [2, 3, 4]);
    assert!(matches!(trainer.sync(), Err(Error::Store { .. })));

    machine.remote.heal();
    trainer.sync().unwrap();
    assert!(trainer.tiers.lease().is_ours);
    assert_eq!(trainer.syncer.state().last_error, None);
    assert_eq!(seqs_in(&bucket), [4], "retention and its mirror came after the push");
    assert_eq!(load_elsewhere(&bucket, 4).unwrap(), state_at(4));
}

#[test]
fn the_saves_of_a_machine_that_was_cut_off_go_on_behind_what_another_one_wrote() {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    trainer.sync().unwrap();
    trainer.close();
    let other = Machine::new(&bucket).open().unwrap();
    other.save(12);
    other.sync().unwrap();
    other.close();

    let machine = machine.restarted();
    machine.remote.cut_off();
    let trainer = machine.open().unwrap();
    machine.remote.heal();
    trainer.sync().unwrap();
    assert_eq!(trainer.save(3), 3, "number 2 is taken, and known by now");
    assert_eq!(load(&trainer.repository, 2).unwrap(), state_at(12));
}

#[test]
fn a_machine_that_was_cut_off_and_used_the_numbers_of_another_loses() {
    let (bucket, machine, trainer) = begin();
    trainer.save(1);
    trainer.sync().unwrap();
    trainer.close();
    let machine = machine.restarted();
    machine.remote.cut_off();
    let trainer = machine.open().unwrap();
    trainer.save(2);
    let other = Machine::new(&bucket).open().unwrap();
    other.save(12);
    other.sync().unwrap();
    machine.remote.heal();
    // The other one lives: whether it does can't be told by looking once.
    let error = trainer.sync().unwrap_err();
    let Error::Locked { holder, .. } = &error else { panic!("{error}") };
    assert!(holder.ends_with("(epoch 2)"), "{holder}");
    assert!(save(&trainer.repository, 3).is_ok(), "that may end: saves go on");
    other.close();
    let error = trainer.sync().unwrap_err();
    assert!(matches!(&error, Error::Conflict { by, .. } if by.contains(": 2;")), "{error}");
    assert!(matches!(save(&trainer.repository, 4), Err(Error::Conflict { .. })));
    assert_eq!(seqs_in(&bucket), [1, 2]);
    assert_eq!(load_elsewhere(&bucket, 2).unwrap(), state_at(12));
}

#[test]
fn a_bucket_that_dies_later_slows_and_fails_no_save() {
    let (bucket, machine, trainer) = begin();
    machine.remote.cut_off();
    for step in 1..=3 {
        trainer.save(step);
    }
    let error = trainer.syncer.sync_now(&AtomicBool::new(false)).unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "{error}");
    machine.clock.advance(seconds(20));
    trainer.syncer.work_due();
    trainer.save(4);
    machine.remote.heal();
    trainer.sync().unwrap();
    assert_eq!(seqs_in(&bucket), [1, 2, 3, 4]);
}
