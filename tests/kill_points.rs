//! A real process on a real folder dies by SIGKILL: at every named point, and at random times.
//!
//! The test binary runs itself as the child. What the child was promised stands in a file beside the
//! repository, written before and after each call; a killed process keeps what it has written.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test that can't go on fails; files outside of a store, and the variables of a child"
)]

mod common;

use std::fs::{self, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::journal::Journal;
use common::oracle::{Case, load_all};
use common::run::Run;
use common::training::{open, open_to_read, state_at};
use varvite::kill;
use varvite::retain::Rule;
use varvite::store::Store;
use varvite::store::local::{LocalOptions, LocalStore};

const FOLDER: &str = "VARVITE_TEST_FOLDER";
const WORK: &str = "VARVITE_TEST_WORK";

const SIGKILL: i32 = 9;
const RANDOM_KILLS: u64 = 30;
/// Saves of a child that nobody kills.
const LAST_SAVE: u64 = 2_000;

/// A repository, and the promises about it, in one folder.
struct Place {
    folder: PathBuf,
}

impl Place {
    fn store(&self) -> Arc<dyn Store> {
        Arc::new(LocalStore::open(&self.root(), LocalOptions::default()).unwrap())
    }

    fn root(&self) -> PathBuf {
        self.folder.join("repository")
    }

    /// Adds a line to the promises, with a single write.
    fn tell(&self, line: &str) {
        let path = self.folder.join("promises");
        let mut file = OpenOptions::new().append(true).create(true).open(path).unwrap();
        file.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    fn lines(&self) -> Vec<String> {
        let text = fs::read_to_string(self.folder.join("promises")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn journal(&self) -> Journal {
        let mut journal = Journal::default();
        self.lines().iter().for_each(|line| journal.note(line));
        journal
    }

    fn staged_count(&self) -> usize {
        fs::read_dir(self.root().join("tmp")).unwrap().count()
    }

    /// The questions of the oracle; what turned out is then promised.
    fn check(&self, next_step: u64) -> Result<(), String> {
        let journal = self.journal();
        let case = Case {
            store: self.store(),
            journal: &journal,
            state_of: &state_at,
            staged_count: &|| self.staged_count(),
            next_step,
        };
        case.check().map_err(|message| format!("{message}\npromised: {journal:?}"))?;
        let reader = open_to_read(self.store()).unwrap();
        let found = load_all(&reader, &state_at)?;
        for step in &journal.open {
            match found.get(step) {
                Some(seq) => self.tell(&format!("saved {step} {seq}")),
                None => self.tell(&format!("deleted {step}")),
            }
        }
        self.tell(&format!("saved {next_step} {}", found[&next_step]));
        Ok(())
    }

    /// Starts this binary again to work in this folder.
    fn start(&self, work: &str) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["the_child_that_is_killed", "--exact", "--ignored", "--nocapture"])
            .env(FOLDER, &self.folder)
            .env(WORK, work)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// Opens, works and closes, telling all promises.
    fn work(&self, journal: &mut Journal, keep_last: Option<usize>, work: impl FnOnce(&mut Run<'_>)) {
        let rules = keep_last.map(|count| Rule::Last { count: count as u64 }).into_iter().collect();
        let repository = open(self.store(), rules).unwrap();
        work(&mut Run {
            repository: &repository,
            journal,
            keep_last,
            staged: true,
            state_of: &state_at,
            tell: &mut |line| self.tell(line),
        });
    }
}

#[test]
fn a_kill_at_any_named_point_loses_nothing() {
    for point in kill::POINTS {
        for passage in 1..=2 {
            let folder = tempfile::tempdir().unwrap();
            let place = Place { folder: folder.path().to_owned() };
            let status = place.start(&format!("{point} {passage}")).wait().unwrap();
            assert_eq!(
                status.signal(),
                Some(SIGKILL),
                "{point} was not passed {passage} times, or the child failed: {status}"
            );
            place
                .check(100)
                .unwrap_or_else(|message| panic!("killed at passage {passage} of {point}: {message}"));
        }
    }
}

#[test]
fn the_work_of_the_child_ends_well_where_nobody_kills_it() {
    let folder = tempfile::tempdir().unwrap();
    let place = Place { folder: folder.path().to_owned() };
    let status = place.start("no.such.point 1").wait().unwrap();
    assert!(status.success(), "{status}");
    let journal = place.journal();
    assert_eq!(journal.kept.keys().copied().collect::<Vec<_>>(), [6, 8, 9, 10]);
    assert_eq!(journal.gone.iter().copied().collect::<Vec<_>>(), [1, 2, 3, 4, 5, 7]);
    place.check(100).unwrap();
}

#[test]
fn a_kill_at_any_time_loses_nothing() {
    let seed = RandomState::new().hash_one(0);
    let mut random = seed | 1;
    let mut next = |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let folder = tempfile::tempdir().unwrap();
    let place = Place { folder: folder.path().to_owned() };
    let mut killed_in_a_call = 0;
    for kill in 1..=RANDOM_KILLS {
        let first_step = kill * 10_000;
        let before = place.lines().len();
        let mut child = place.start(&format!("saves {first_step}"));
        wait_for_lines(&place, &mut child, before + 1 + next(12) as usize);
        std::thread::sleep(Duration::from_micros(next(6_000)));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(SIGKILL), "seed {seed}: {status}");
        killed_in_a_call += u64::from(!place.journal().open.is_empty());
        place
            .check(first_step + LAST_SAVE + 1)
            .unwrap_or_else(|message| panic!("seed {seed}, kill {kill}: {message}"));
    }
    assert!(killed_in_a_call > 0, "seed {seed}: no kill hit a save");
}

fn wait_for_lines(place: &Place, child: &mut Child, count: usize) {
    while place.lines().len() < count {
        assert!(child.try_wait().unwrap().is_none(), "the child ended by itself");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Not a test by itself: what the tests above start and kill.
#[test]
#[ignore = "runs only as the child of another test"]
fn the_child_that_is_killed() {
    let (Ok(folder), Ok(work)) = (std::env::var(FOLDER), std::env::var(WORK)) else { return };
    let place = Place { folder: Path::new(&folder).to_owned() };
    let (what, number) = work.split_once(' ').unwrap();
    let number: u32 = number.parse().unwrap();
    if what == "saves" {
        save_until_killed(&place, u64::from(number));
    } else {
        kill::arm(what, number);
        pass_every_point(&place);
    }
}

fn save_until_killed(place: &Place, first_step: u64) {
    let mut journal = place.journal();
    place.work(&mut journal, Some(3), |run| {
        (first_step..first_step + LAST_SAVE).for_each(|step| run.save(step).unwrap());
    });
}

/// Passes each point at least twice.
fn pass_every_point(place: &Place) {
    let journal = &mut Journal::default();
    place.work(journal, Some(2), |run| (1..=4).for_each(|step| run.save(step).unwrap()));
    place.work(journal, None, |run| {
        (5..=6).for_each(|step| run.save(step).unwrap());
        run.merge().unwrap();
    });
    place.work(journal, Some(1), |run| run.prune().unwrap());
    place.work(journal, None, |run| {
        run.pin("best", 6).unwrap();
        run.write_receipt("\"resumed\"").unwrap();
        run.replace_receipt(1, "\"judged\"").unwrap();
        run.save(7).unwrap();
        run.delete(7).unwrap();
        run.save(8).unwrap();
        run.merge().unwrap();
        run.unpin("best").unwrap();
    });
    for step in 9..=10 {
        place.work(journal, None, |run| run.save(step).unwrap());
        // As after a crash between the pack and the manifest: the next open has to finish the save.
        fs::remove_file(place.root().join(format!("snapshots/{}.json", journal.kept[&step]))).unwrap();
        place.work(journal, None, |run| {
            assert_eq!(run.repository.recovered().published, [run.journal.kept[&step]]);
        });
    }
}
