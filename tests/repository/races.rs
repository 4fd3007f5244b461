//! What runs beside a merge: saves, loads, deletions, the end of the handle, and the policy in the background.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use varvite::compact::MergePolicy;
use varvite::error::Error;
use varvite::merger::Merger;
use varvite::repository::{MergeReport, Options, Repository, Snapshot};
use varvite::saver::Job;
use varvite::store::Folder;

use crate::common::hooked::{Event, Hooked};
use crate::common::oracle::{check_leftovers, load_all};
use crate::common::training::{State, load, open_to_read, options, request, save, save_state, state_at};
use crate::common::{names, pattern};
use crate::tensors::packs_of;

/// Long enough for another thread to do what nothing keeps it from.
const A_WHILE: Duration = Duration::from_millis(100);
const MINUTE: Duration = Duration::from_secs(20);

const POLICY: MergePolicy = MergePolicy { stride: 0, max_packs: 2, dead_ratio: 1.0 };

fn filled(count: u64, merge: Option<MergePolicy>) -> (Hooked, Repository) {
    let store = Hooked::new();
    let repository =
        Repository::open(Arc::new(store.clone()), Options { merge, ..options(Vec::new()) }).unwrap();
    for step in 1..=count {
        save(&repository, step).unwrap();
    }
    (store, repository)
}

fn merge(repository: &Repository) -> MergeReport {
    repository.merge(true, &AtomicBool::new(false)).unwrap()
}

fn is_merged_pack(event: &Event) -> bool {
    matches!(event, Event::Stage(name) if name.contains("-m0-"))
}

fn is_replaced(event: &Event) -> bool {
    matches!(event, Event::Replace(_))
}

/// All snapshots are there and whole, and nothing else lies around.
fn check(repository: &Repository, count: usize) {
    assert_eq!(load_all(repository, &state_at).unwrap().len(), count);
    check_leftovers(repository, 0).unwrap();
}

#[test]
fn a_save_that_commits_during_the_copy_is_served_too() {
    let (store, repository) = filled(4, None);
    let saver = repository.clone();
    store.once(is_merged_pack, move || drop(save(&saver, 5).unwrap()));
    let report = merge(&repository);
    assert_eq!(report.merged_pack_count, 4);
    let packs = packs_of(&repository, 5);
    assert!(packs.len() == 2 && packs[0].starts_with("5-r0-") && packs[1].starts_with("4-m0-"), "{packs:?}");
    check(&repository, 5);
}

#[test]
fn a_save_that_commits_after_the_merge_with_old_refs_is_served_by_the_next_without_a_copy() {
    let (store, repository) = filled(4, Some(POLICY));
    let merger = repository.clone();
    // The save has chosen its base and holds its packs when its own pack is begun.
    store.once(
        |event| matches!(event, Event::Stage(name) if name.starts_with("5-r0-")),
        move || {
            let report = merger.merge(false, &AtomicBool::new(false)).unwrap();
            assert_eq!((report.merged_pack_count, report.freed_bytes), (3, 0), "all is held by the save");
        },
    );
    save(&repository, 5).unwrap();
    assert!(packs_of(&repository, 5).iter().all(|name| name.contains("-r0-")));
    let report = repository.merge(false, &AtomicBool::new(false)).unwrap();
    assert_eq!(report.written_bytes, 0, "{report:?}");
    assert!(report.freed_bytes > 0);
    assert!(packs_of(&repository, 5).iter().any(|name| name.starts_with("4-m0-")));
    check(&repository, 5);
    // Saves from now on know the new places.
    save(&repository, 6).unwrap();
    check(&repository, 6);
}

#[test]
fn closing_serves_a_save_that_committed_after_the_merge() {
    let (store, repository) = filled(4, None);
    let merger = repository.clone();
    store.once(
        |event| matches!(event, Event::Stage(name) if name.starts_with("5-r0-")),
        move || assert_eq!(merge(&merger).merged_pack_count, 4),
    );
    save(&repository, 5).unwrap();
    assert!(packs_of(&repository, 5).iter().all(|name| name.contains("-r0-")));
    repository.close();
    drop(repository);
    let repository = Repository::open(Arc::new(store), options(Vec::new())).unwrap();
    assert!(packs_of(&repository, 5).iter().any(|name| name.starts_with("4-m0-")));
    check(&repository, 5);
}

#[test]
fn a_save_that_lasts_longer_than_two_merges_is_served_all_the_same() {
    let (store, repository) = filled(4, None);
    let merger = repository.clone();
    store.once(
        |event| matches!(event, Event::Stage(name) if name.starts_with("5-r0-")),
        move || {
            assert_eq!(merge(&merger).merged_pack_count, 4);
            // What the first merge has written is rewritten by the second, which has less to carry.
            merger.delete(1).unwrap();
            merger.delete(2).unwrap();
            assert_eq!(merge(&merger).merged_pack_count, 1);
        },
    );
    save(&repository, 5).unwrap();
    let report = repository.merge(true, &AtomicBool::new(false)).unwrap();
    assert!(report.freed_bytes > 0);
    check(&repository, 3);
    assert_eq!(names(store.inner(), Folder::Packs).len(), 1);
}

#[test]
fn a_snapshot_deleted_during_the_copy_stays_deleted() {
    let (store, repository) = filled(4, None);
    let other = repository.clone();
    store.once(is_merged_pack, move || {
        other.delete(2).unwrap();
        other.delete(4).unwrap();
    });
    merge(&repository);
    assert_eq!(names(store.inner(), Folder::Snapshots), ["1.json", "3.json", "4.deleted"]);
    check(&repository, 2);
    assert_eq!(save(&repository, 5).unwrap().header.seq, 5);
    check(&repository, 3);
}

#[test]
fn a_snapshot_deleted_while_its_manifest_is_replaced_does_not_come_back() {
    let (store, repository) = filled(3, None);
    let (sender, deleted) = mpsc::channel();
    let deleted = Arc::new(Mutex::new(deleted));
    let (other, waited) = (repository.clone(), Arc::clone(&deleted));
    store.once(is_replaced, move || {
        std::thread::spawn(move || {
            other.delete(1).unwrap();
            sender.send(()).unwrap();
        });
        // It must not be able to: the replacement would make the manifest anew.
        let _ = waited.lock().unwrap().recv_timeout(A_WHILE);
    });
    merge(&repository);
    let _ = deleted.lock().unwrap().recv_timeout(MINUTE);
    assert_eq!(names(store.inner(), Folder::Snapshots), ["2.json", "3.json"]);
    merge(&repository);
    check(&repository, 2);
}

#[test]
fn a_sweep_before_the_first_manifest_is_replaced_leaves_the_new_pack() {
    let (store, repository) = filled(4, None);
    let other = repository.clone();
    store.once(
        |event| matches!(event, Event::Published(name) if name.contains("-m0-")),
        move || assert!(other.delete(1).is_ok()),
    );
    merge(&repository);
    check(&repository, 3);
}

#[test]
fn all_snapshots_deleted_during_the_copy_leave_nothing() {
    let (store, repository) = filled(3, None);
    let other = repository.clone();
    store.once(is_merged_pack, move || [1, 2, 3].iter().for_each(|seq| assert!(other.delete(*seq).is_ok())));
    assert_eq!(merge(&repository).merged_pack_count, 0);
    assert_eq!(names(store.inner(), Folder::Packs), [""; 0]);
}

#[test]
fn a_load_that_begins_at_any_moment_of_a_merge_ends_well() {
    for moment in [is_merged_pack, is_replaced, |event: &Event| *event == Event::DeletePacks] {
        let (store, repository) = filled(4, None);
        let opened: Arc<Mutex<Vec<Snapshot>>> = Arc::default();
        let second = open_to_read(Arc::new(store.clone())).unwrap();
        let (first, into) = (repository.clone(), Arc::clone(&opened));
        store.once(moment, move || {
            let readers = [&first, &second].into_iter();
            into.lock().unwrap().extend(readers.map(|reader| reader.snapshot(2).unwrap()));
        });
        merge(&repository);
        assert_eq!(opened.lock().unwrap().len(), 2);
        for snapshot in opened.lock().unwrap().drain(..) {
            assert!(snapshot.check(&[0, 1, 2, 3], &AtomicBool::new(false)).unwrap() > 0);
        }
        save(&repository, 5).unwrap();
        check(&repository, 5);
    }
}

#[test]
fn a_pin_during_a_merge_holds() {
    let (store, repository) = filled(3, None);
    let other = repository.clone();
    store.once(is_replaced, move || other.pin(2, "release").unwrap());
    merge(&repository);
    assert!(matches!(repository.delete(2), Err(Error::InvalidInput { .. })));
    check(&repository, 3);
}

/// Closes the handle at a moment of a merge; returns what the merge came to.
fn close_at(moment: fn(&Event) -> bool) -> (Hooked, Result<MergeReport, Error>) {
    let (store, repository) = filled(3, None);
    let (other, thread) = (repository.clone(), Arc::new(Mutex::new(None)));
    let slot = Arc::clone(&thread);
    store.once(moment, move || {
        let (sender, ended) = mpsc::channel();
        let spawned = std::thread::spawn(move || {
            other.close();
            let _ = sender.send(());
        });
        assert!(ended.recv_timeout(A_WHILE).is_err(), "closed while a merge is at work");
        *slot.lock().unwrap() = Some(spawned);
    });
    let outcome = repository.merge(true, &AtomicBool::new(false));
    thread.lock().unwrap().take().unwrap().join().unwrap();
    (store, outcome)
}

#[test]
fn closing_ends_a_merge_that_copies() {
    let (store, outcome) = close_at(is_merged_pack);
    assert!(matches!(outcome, Err(Error::Interrupted)), "{outcome:?}");
    let repository = Repository::open(Arc::new(store), options(Vec::new())).unwrap();
    save(&repository, 4).unwrap();
    check(&repository, 4);
}

#[test]
fn closing_waits_for_a_merge_that_replaces_manifests() {
    let (store, outcome) = close_at(is_replaced);
    assert_eq!(outcome.unwrap().merged_pack_count, 3);
    assert_eq!(names(store.inner(), Folder::Packs).len(), 1, "no snapshot was left behind");
    let repository = Repository::open(Arc::new(store), options(Vec::new())).unwrap();
    save(&repository, 4).unwrap();
    check(&repository, 4);
}

/// Saves in the background and waits for the save, not for a merge.
fn save_behind(repository: &Repository, merger: &Arc<Merger>, step: u64) {
    let state = state_at(step);
    let sources: Vec<&[u8]> = state.values().map(Vec::as_slice).collect();
    let session = repository.begin_save(request(step, &state), &sources).unwrap();
    Job::start(session, Arc::clone(merger), None).unwrap().wait(MINUTE).unwrap().unwrap();
}

/// Has the next merge say when it begins to copy, and wait until the sender is dropped.
fn hold_next_merge(store: &Hooked) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (begun, is_begun) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let may_go_on = Mutex::new(may_go_on);
    store.once(is_merged_pack, move || {
        begun.send(()).unwrap();
        let _ = may_go_on.lock().unwrap().recv_timeout(MINUTE);
    });
    (is_begun, go_on)
}

#[test]
fn the_policy_is_asked_after_each_commit() {
    let (store, repository) = filled(0, Some(POLICY));
    let merger = Merger::new(repository.clone());
    for step in 1..=3 {
        save_behind(&repository, &merger, step);
    }
    merger.wait(&AtomicBool::new(false)).unwrap();
    assert_eq!(names(store.inner(), Folder::Packs).len(), 3, "each snapshot has 2 at most");
    save_behind(&repository, &merger, 4);
    merger.wait(&AtomicBool::new(false)).unwrap();
    assert_eq!(names(store.inner(), Folder::Packs).len(), 2);
    assert!(merger.take_failure().is_none());
    check(&repository, 4);
}

#[test]
fn a_stride_counts_saves_also_over_a_new_opening() {
    let policy = MergePolicy { stride: 3, max_packs: 100, dead_ratio: 1.0 };
    let (store, repository) = filled(0, Some(policy));
    // Each save changes one of eight tensors and refers to what the saves before it have changed.
    let one_changes = |step: u64| -> State {
        let changed_at = |tensor: u64| if tensor <= step { tensor } else { 0 };
        (1..=8)
            .map(|tensor| (format!("{tensor}"), pattern(100 * changed_at(tensor) + tensor, 4_096)))
            .collect()
    };
    let merged_after = |repository: &Repository, step: u64| {
        save_state(repository, step, &one_changes(step)).unwrap();
        repository.merge(false, &AtomicBool::new(false)).unwrap().merged_pack_count
    };
    let merged: Vec<u64> = (1..=4).map(|step| merged_after(&repository, step)).collect();
    assert_eq!(merged, [0, 0, 2, 0], "the first pack is much larger than the other two");
    drop(repository);
    let again =
        Repository::open(Arc::new(store), Options { merge: Some(policy), ..options(Vec::new()) }).unwrap();
    let merged: Vec<u64> = (5..=6).map(|step| merged_after(&again, step)).collect();
    assert_eq!(merged, [0, 5], "what was merged, the three since, and now the first");
    assert_eq!(load_all(&again, &one_changes).unwrap().len(), 6);
    check_leftovers(&again, 0).unwrap();
}

#[test]
fn a_failure_in_the_background_is_kept_until_somebody_takes_it_and_the_next_merge_goes_on() {
    let (store, repository) = filled(0, Some(POLICY));
    let merger = Merger::new(repository.clone());
    let failures = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&failures);
    store.set_hook(move |event| {
        if is_replaced(event) && count.fetch_add(1, Ordering::Relaxed) == 1 {
            return Err(Error::store("replace", "a manifest")(io::Error::from_raw_os_error(28)));
        }
        Ok(())
    });
    for step in 1..=4 {
        save_behind(&repository, &merger, step);
    }
    merger.wait(&AtomicBool::new(false)).unwrap();
    let failure = merger.take_failure().unwrap();
    assert!(failure.chain().starts_with("cannot replace `a manifest`: "), "{}", failure.chain());
    assert!(merger.take_failure().is_none());
    for seq in 1..=4 {
        assert_eq!(load(&repository, seq).unwrap(), state_at(seq));
    }
    save_behind(&repository, &merger, 5);
    merger.wait(&AtomicBool::new(false)).unwrap();
    assert!(merger.take_failure().is_none());
    merge(&repository);
    check(&repository, 5);
}

#[test]
fn stopping_ends_a_merge_in_the_background_without_a_failure() {
    let (store, repository) = filled(3, Some(POLICY));
    let merger = Merger::new(repository.clone());
    let (is_begun, go_on) = hold_next_merge(&store);
    save_behind(&repository, &merger, 4);
    is_begun.recv_timeout(MINUTE).unwrap();
    // A save and a load go on while the merge can't.
    assert_eq!(load(&repository, 4).unwrap(), state_at(4));
    save_behind(&repository, &merger, 5);
    let stopping = Arc::clone(&merger);
    let cancelled = AtomicBool::new(true);
    assert!(matches!(stopping.stop(&cancelled), Err(Error::Interrupted)), "it still runs");
    drop(go_on);
    merger.stop(&AtomicBool::new(false)).unwrap();
    assert!(merger.take_failure().is_none());
    assert_eq!(load_all(&repository, &state_at).unwrap().len(), 5);
    assert!(names(store.inner(), Folder::Packs).iter().all(|name| !name.contains("-m0-")));
}

#[test]
fn merge_now_waits_for_the_merge_that_runs() {
    let (store, repository) = filled(3, Some(POLICY));
    let merger = Merger::new(repository.clone());
    let (is_begun, go_on) = hold_next_merge(&store);
    save_behind(&repository, &merger, 4);
    is_begun.recv_timeout(MINUTE).unwrap();
    let cancelled = AtomicBool::new(true);
    assert!(matches!(merger.merge_now(&cancelled), Err(Error::Interrupted)));
    drop(go_on);
    let report = merger.merge_now(&AtomicBool::new(false)).unwrap();
    assert_eq!(report.merged_pack_count, 2, "what the one in the background has left");
    assert_eq!(names(store.inner(), Folder::Packs).len(), 1);
    check(&repository, 4);
}
