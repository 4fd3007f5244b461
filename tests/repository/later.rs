//! Sources that are copied after the caller has gone on: the snapshot has what they were, and whoever waits
//! for the copy is let go however the save ends.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use varvite::error::Error;
use varvite::merger::Merger;
use varvite::repository::{Repository, SaveSession};
use varvite::saver::Job;
use varvite::store::memory::MemoryStore;
use varvite::tensor::Dtype;

use crate::common::lent::{Lent, Log};
use crate::common::pattern;
use crate::common::training::{CHUNK_BYTES, open};
use crate::tensors::{Tensor, load_region, request_of, save_tensors};

const CHUNK: usize = CHUNK_BYTES as usize;
/// Long enough for whatever a test waits for; a test that needs it has failed.
const LONG: Duration = Duration::from_secs(30);

fn repository() -> Repository {
    open(Arc::new(MemoryStore::new()), Vec::new()).unwrap()
}

fn tensor(name: &str, seed: u64, length: usize) -> Tensor {
    Tensor::of(name, Dtype::Uint8, &[length as u64], pattern(seed, length))
}

/// Starts a save of which the tensors at the even places are taken now, the others later; of these the ones
/// at the positions in `kept` stay until the end.
fn begin(
    repository: &Repository,
    step: u64,
    tensors: &[Tensor],
    kept: &[usize],
    change: impl FnOnce(&mut Lent),
    log: &Log,
) -> SaveSession {
    let (request, sources) = request_of(step, tensors);
    let is_now = |index: usize| index.is_multiple_of(2);
    let now: Vec<Option<&[u8]>> =
        sources.iter().enumerate().map(|(index, source)| is_now(index).then_some(*source)).collect();
    let later = sources.iter().enumerate().filter(|(index, _)| !is_now(*index));
    let mut lent = Lent::new(later.map(|(_, source)| source.to_vec()).collect(), kept, log);
    change(&mut lent);
    repository.begin_save_later(request, &now, Some(Box::new(lent))).unwrap()
}

fn state(frozen: u64, trained: u64) -> [Tensor; 5] {
    [
        tensor("a", trained, 100),
        tensor("b.frozen", frozen, 4 * CHUNK + 1),
        tensor("c", trained + 50, CHUNK),
        tensor("d.trained", trained + 60, 2 * CHUNK),
        tensor("e", frozen + 70, 3),
    ]
}

fn assert_loads(repository: &Repository, seq: u64, tensors: &[Tensor]) {
    for tensor in tensors {
        let loaded = load_region(repository, seq, &tensor.name, None).unwrap();
        assert_eq!(loaded, tensor.bytes, "{} of {seq}", tensor.name);
    }
}

#[test]
fn later_sources_are_saved_as_they_were_and_let_go_of_before_the_write() {
    let (repository, log) = (repository(), Log::default());
    let tensors = state(1, 2);
    let mut session = begin(&repository, 1, &tensors, &[], |_| (), &log);
    assert!(session.awaits_copy());
    assert!(log.lines().is_empty());
    session.copy_later(&AtomicBool::new(false)).unwrap();
    assert_eq!(log.lines(), ["arrived", "let go of [0, 1]"]);
    assert!(!session.awaits_copy());
    let report = session.run(&AtomicBool::new(false)).unwrap();
    assert_eq!(log.lines(), ["arrived", "let go of [0, 1]", "dropped"]);
    assert_loads(&repository, report.header.seq, &tensors);
}

#[test]
fn what_is_kept_is_read_in_place_and_let_go_of_after_the_commit() {
    let (repository, log) = (repository(), Log::default());
    let tensors = state(1, 2);
    let mut session = begin(&repository, 1, &tensors, &[1], |_| (), &log);
    session.copy_later(&AtomicBool::new(false)).unwrap();
    assert_eq!(log.lines(), ["arrived", "let go of [0]"]);
    assert_eq!(session.staged_bytes(), 100 + CHUNK + 3 + 4 * CHUNK + 1);
    session.run(&AtomicBool::new(false)).unwrap();
    assert_loads(&repository, 1, &tensors);
}

#[test]
fn a_later_source_that_did_not_change_last_time_is_compared_last_and_copied_where_it_differs() {
    let repository = repository();
    let save = |step, frozen, trained| {
        let log = Log::default();
        let mut session = begin(&repository, step, &state(frozen, trained), &[], |_| (), &log);
        session.copy_later(&AtomicBool::new(false)).unwrap();
        let staged_bytes = session.staged_bytes();
        session.run(&AtomicBool::new(false)).unwrap();
        let lines = log.lines();
        (lines[1..lines.len() - 1].to_vec(), staged_bytes)
    };
    let all = 100 + 4 * CHUNK + 1 + CHUNK + 2 * CHUNK + 3;
    let trained = 100 + CHUNK + 2 * CHUNK;
    assert_eq!(save(1, 1, 2), (vec!["let go of [0, 1]".to_owned()], all));
    assert_eq!(save(2, 1, 3), (vec!["let go of [0, 1]".to_owned()], all));
    let apart = vec!["let go of [1]".to_owned(), "let go of [0]".to_owned()];
    assert_eq!(save(3, 1, 4), (apart.clone(), trained));
    let differs = vec!["let go of [1]".to_owned(), "let go of []".to_owned(), "let go of [0]".to_owned()];
    assert_eq!(save(4, 9, 5), (differs, all));
    for (seq, frozen, trained) in [(1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 9, 5)] {
        assert_loads(&repository, seq, &state(frozen, trained));
    }
}

#[test]
fn a_job_is_copied_before_it_is_done_and_at_once_where_nothing_is_later() {
    let repository = repository();
    let job = Job::start(
        begin(&repository, 1, &state(1, 2), &[], |_| (), &Log::default()),
        Merger::new(repository.clone()),
        None,
    )
    .unwrap();
    assert!(job.wait_copied(LONG));
    job.wait(LONG).unwrap().unwrap();
    assert!(job.is_copied());

    let tensors = state(1, 3);
    let (request, sources) = request_of(2, &tensors);
    let session = repository.begin_save(request, &sources).unwrap();
    assert!(!session.awaits_copy());
    let job = Job::start(session, Merger::new(repository.clone()), None).unwrap();
    assert!(job.is_copied());
    job.wait(LONG).unwrap().unwrap();
}

#[test]
fn a_save_that_fails_before_or_in_the_copy_lets_everyone_go_and_the_next_one_works() {
    let repository = repository();
    save_tensors(&repository, 1, &state(1, 2)).unwrap();
    let breaks: [fn(&mut Lent); 2] = [|lent| lent.fails_to_arrive = true, |lent| lent.changes = Some(1)];
    for (step, change) in (2..).zip(breaks) {
        let log = Log::default();
        let job = Job::start(
            begin(&repository, step, &state(1, step), &[], change, &log),
            Merger::new(repository.clone()),
            None,
        )
        .unwrap();
        assert!(job.wait_copied(LONG));
        let Err(error) = job.wait(LONG).unwrap() else { panic!("save {step} should fail") };
        assert!(matches!(*error, Error::Internal { .. } | Error::InvalidInput { .. }), "{error}");
        assert_eq!(log.lines().last().unwrap(), "dropped");
    }
    let log = Log::default();
    let job = Job::start(
        begin(&repository, 4, &state(1, 9), &[], |_| (), &log),
        Merger::new(repository.clone()),
        None,
    )
    .unwrap();
    let seq = job.wait(LONG).unwrap().unwrap().header.seq;
    assert_loads(&repository, seq, &state(1, 9));
    assert_eq!(repository.list().unwrap().headers.len(), 2);
}

#[test]
fn a_cancelled_copy_commits_nothing() {
    let (repository, log) = (repository(), Log::default());
    let session = begin(&repository, 1, &state(1, 2), &[], |_| (), &log);
    assert!(matches!(session.run(&AtomicBool::new(true)), Err(Error::Interrupted)));
    assert_eq!(log.lines(), ["arrived", "dropped"]);
    assert!(repository.list().unwrap().headers.is_empty());
}

#[test]
fn later_sources_that_are_not_given_are_an_error_and_not_a_hole() {
    let (repository, log) = (repository(), Log::default());
    let tensors = state(1, 2);
    let (request, sources) = request_of(1, &tensors);
    let now: Vec<Option<&[u8]>> = vec![None; sources.len()];
    let lent = Lent::new(vec![Vec::new()], &[], &log);
    let refused = repository.begin_save_later(request, &now, Some(Box::new(lent)));
    assert!(matches!(refused, Err(Error::Internal { .. })), "{refused:?}");
}
