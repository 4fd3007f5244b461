//! Sessions of several ranks: tickets, parts by handles of their own, commit, abort, and what is kept meanwhile.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use varvite::error::{Error, Result};
use varvite::format::ticket::Ticket;
use varvite::plan::Want;
use varvite::repository::{Access, Options, PartReport, PartRequest, Repository};
use varvite::retain::Rule;
use varvite::store::memory::MemoryStore;
use varvite::store::{Folder, Store};
use varvite::tensor::{Dtype, Region};
use varvite::write::EntryInput;

use crate::common::training::{json, options, save};
use crate::common::{names, pattern};

const ROWS: u64 = 8;
const COLUMNS: u64 = 5_000;

/// Ranks that share nothing but the store.
struct Ranks {
    store: Arc<dyn Store>,
    handles: Vec<Repository>,
}

impl Ranks {
    fn new(count: u32) -> Self {
        Self::over(Arc::new(MemoryStore::default()), count, &[])
    }

    fn over(store: Arc<dyn Store>, count: u32, rules: &[Rule]) -> Self {
        let open = |rank| {
            let access = if rank == 0 { Access::Write } else { Access::Rank };
            let options = Options { access, rank, world_size: count, ..options(rules.to_vec()) };
            Repository::open(Arc::clone(&store), options).unwrap()
        };
        Self { handles: (0..count).map(open).collect(), store }
    }

    fn coordinator(&self) -> &Repository {
        &self.handles[0]
    }

    fn begin(&self, step: u64) -> Ticket {
        let metrics = BTreeMap::from([("loss".to_owned(), f64::from(step as u32))]);
        let count = self.handles.len() as u32;
        let ticket = self.coordinator().begin_session(step, count, metrics, json("{}")).unwrap();
        // As it comes to another process.
        Ticket::decode(&ticket.encode().unwrap()).unwrap()
    }

    fn rows(&self, rank: u32) -> Range<u64> {
        let count = self.handles.len() as u64;
        let rank = u64::from(rank);
        rank * ROWS / count..(rank + 1) * ROWS / count
    }

    /// Writes the part of a rank: its rows of a matrix that a step changes, and of one that none does.
    fn write(&self, ticket: &Ticket, rank: u32) -> Result<PartReport> {
        let rows = self.rows(rank);
        let region = Region { offsets: vec![rows.start, 0], lengths: vec![rows.end - rows.start, COLUMNS] };
        let moving = matrix(ticket.header.step);
        let bytes =
            |matrix: &[u8]| matrix[(rows.start * COLUMNS) as usize..(rows.end * COLUMNS) as usize].to_vec();
        let sources = [bytes(&frozen()), bytes(&moving)];
        let entry = |name: &str, source| EntryInput {
            name: name.to_owned(),
            rank: None,
            dtype: Dtype::Uint8,
            stored_dtype: Dtype::Uint8,
            shape: vec![ROWS, COLUMNS],
            region: region.clone(),
            tied_to: None,
            source: Some(source),
        };
        let request = PartRequest {
            ticket: ticket.clone(),
            rank,
            entries: vec![entry("frozen", 0), entry("moving", 1)],
            replicas: Vec::new(),
            structure: json("{}"),
            rank_structure: Some(json("{}")),
        };
        let sources: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
        self.handles[rank as usize].write_part(request, &sources, &AtomicBool::new(false))
    }

    /// A save of all ranks; returns what each has written.
    fn save(&self, step: u64) -> Vec<PartReport> {
        let ticket = self.begin(step);
        let reports: Vec<PartReport> =
            (0..self.handles.len() as u32).map(|rank| self.write(&ticket, rank).unwrap()).collect();
        let packs: Vec<String> = reports.iter().map(|report| report.pack.clone()).collect();
        self.coordinator().commit_session(&ticket, Some(&packs)).unwrap();
        for (rank, handle) in self.handles.iter().enumerate() {
            handle.settle_part(&ticket, rank as u32, true);
        }
        reports
    }

    fn seqs(&self) -> Vec<u64> {
        let mut seqs = self.coordinator().candidates().unwrap();
        seqs.reverse();
        seqs
    }
}

fn matrix(step: u64) -> Vec<u8> {
    pattern(100 + step, (ROWS * COLUMNS) as usize)
}

fn frozen() -> Vec<u8> {
    pattern(7, (ROWS * COLUMNS) as usize)
}

/// A region of an entry, as another process reads it.
fn read(store: &Arc<dyn Store>, seq: u64, name: &str, region: Region) -> Vec<u8> {
    let reader =
        Repository::open(Arc::clone(store), Options { access: Access::Read, ..options(Vec::new()) }).unwrap();
    let snapshot = reader.snapshot(seq).unwrap();
    let entry = snapshot.manifest().body.entries.iter().position(|entry| entry.name == name).unwrap();
    let mut bytes = vec![0; region.lengths.iter().product::<u64>() as usize];
    let want = Want { entry, region, target: 0 };
    snapshot.read(&[want], &mut [&mut bytes], &AtomicBool::new(false)).unwrap();
    bytes
}

fn whole() -> Region {
    Region::whole(&[ROWS, COLUMNS])
}

#[test]
fn what_any_number_of_ranks_wrote_is_read_whole_and_by_any_other_sharding() {
    for count in [1, 2, 3, 5, 8] {
        let ranks = Ranks::new(count);
        ranks.save(4);
        assert_eq!(read(&ranks.store, 1, "moving", whole()), matrix(4), "{count} ranks");
        let header = ranks.coordinator().header(1).unwrap();
        assert_eq!((header.world_size, header.step), (count, 4));
        assert_eq!(header.metrics, BTreeMap::from([("loss".to_owned(), 4.0)]));
        for rows in [0..3_u64, 2..7, 7..8] {
            let region =
                Region { offsets: vec![rows.start, 0], lengths: vec![rows.end - rows.start, COLUMNS] };
            let expected = &matrix(4)[(rows.start * COLUMNS) as usize..(rows.end * COLUMNS) as usize];
            assert_eq!(read(&ranks.store, 1, "moving", region), expected);
        }
    }
}

#[test]
fn each_rank_writes_only_what_changed_since_its_last_part() {
    let ranks = Ranks::new(3);
    let first = ranks.save(1);
    let second = ranks.save(2);
    for (first, second) in first.iter().zip(&second) {
        assert_eq!(first.figures.reused_chunk_count, 0);
        assert_eq!(second.figures.reused_chunk_count * 2, second.figures.chunk_count);
        assert!(second.length_bytes < first.length_bytes * 2 / 3, "{second:?}");
    }
    assert_eq!(read(&ranks.store, 2, "frozen", whole()), frozen());
    assert_eq!(read(&ranks.store, 2, "moving", whole()), matrix(2));
}

#[test]
fn a_missing_rank_is_named_and_may_still_come() {
    let ranks = Ranks::new(3);
    let ticket = ranks.begin(1);
    let missing = |ranks: &Ranks| match ranks.coordinator().commit_session(&ticket, None).unwrap_err() {
        Error::Incomplete { missing_ranks, .. } => missing_ranks,
        other => panic!("{other:?}"),
    };
    assert_eq!(missing(&ranks), [0, 1, 2]);
    ranks.write(&ticket, 1).unwrap();
    assert_eq!(missing(&ranks), [0, 2]);
    ranks.write(&ticket, 0).unwrap();
    ranks.write(&ticket, 2).unwrap();
    ranks.coordinator().commit_session(&ticket, None).unwrap();
    assert_eq!(ranks.seqs(), [1]);
    let error = ranks.coordinator().commit_session(&ticket, None).unwrap_err();
    assert!(matches!(&error, Error::InvalidInput { what, .. } if what == "session of step 1"), "{error:?}");
}

#[test]
fn an_aborted_session_is_never_published_however_late_its_ranks_write() {
    let ranks = Ranks::new(2);
    ranks.save(1);
    let ticket = ranks.begin(2);
    ranks.write(&ticket, 0).unwrap();
    ranks.coordinator().abort_session(&ticket).unwrap();
    ranks.coordinator().abort_session(&ticket).unwrap();
    // This rank did not know, and now all parts would be there.
    ranks.write(&ticket, 1).unwrap();
    let store = Arc::clone(&ranks.store);
    drop(ranks);
    let ranks = Ranks::over(store, 2, &[]);
    assert_eq!(ranks.coordinator().recovered().published, [0; 0]);
    assert_eq!(ranks.seqs(), [1]);
    ranks.save(3);
    assert_eq!(ranks.seqs(), [1, 3]);
    assert_eq!(read(&ranks.store, 3, "moving", whole()), matrix(3));
}

#[test]
fn parts_that_no_coordinator_committed_are_published_by_the_next_open_only_if_all_are_there() {
    for (written, expected) in [(vec![0, 1], vec![1, 2]), (vec![1], vec![1])] {
        let ranks = Ranks::new(2);
        ranks.save(1);
        let ticket = ranks.begin(2);
        for rank in written {
            ranks.write(&ticket, rank).unwrap();
        }
        let store = Arc::clone(&ranks.store);
        drop(ranks);
        let ranks = Ranks::over(store, 2, &[]);
        assert_eq!(ranks.seqs(), expected);
        if expected.len() == 2 {
            assert_eq!(
                ranks.coordinator().header(2).unwrap().metrics,
                BTreeMap::from([("loss".to_owned(), 2.0)])
            );
            assert_eq!(read(&ranks.store, 2, "frozen", whole()), frozen());
        }
    }
}

#[test]
fn an_open_session_keeps_what_its_parts_refer_to() {
    let ranks = Ranks::over(Arc::new(MemoryStore::default()), 2, &[Rule::Last { count: 1 }]);
    ranks.save(1);
    ranks.save(2);
    // All ranks are in one process here, so that one that has not settled yet held it at the commit.
    ranks.coordinator().prune(false).unwrap();
    assert_eq!(ranks.seqs(), [2]);
    let ticket = ranks.begin(3);
    // By all rules this one goes now; what the session builds on stays.
    ranks.coordinator().delete(2).unwrap();
    for rank in 0..2 {
        ranks.write(&ticket, rank).unwrap();
    }
    ranks.coordinator().commit_session(&ticket, None).unwrap();
    assert_eq!(ranks.seqs(), [3]);
    assert_eq!(read(&ranks.store, 3, "frozen", whole()), frozen());
    assert_eq!(read(&ranks.store, 3, "moving", whole()), matrix(3));
}

#[test]
fn the_packs_of_an_open_session_are_not_swept_beside_it() {
    let ranks = Ranks::new(2);
    let first = ranks.begin(1);
    ranks.write(&first, 1).unwrap();
    ranks.save(2);
    ranks.coordinator().delete(2).unwrap();
    ranks.write(&first, 0).unwrap();
    ranks.coordinator().commit_session(&first, None).unwrap();
    assert_eq!(read(&ranks.store, 1, "moving", whole()), matrix(1));
}

#[test]
fn after_a_merge_parts_refer_to_what_is_there_now() {
    let ranks = Ranks::new(2);
    for step in 1..=3 {
        ranks.save(step);
    }
    let report = ranks.coordinator().merge(true, &AtomicBool::new(false)).unwrap();
    assert!(report.merged_pack_count > 0, "{report:?}");
    ranks.save(4);
    ranks.save(5);
    for step in 1..=5 {
        assert_eq!(read(&ranks.store, step, "frozen", whole()), frozen());
        assert_eq!(read(&ranks.store, step, "moving", whole()), matrix(step));
    }
    let found = ranks.coordinator().verify(None, 1.0, &AtomicBool::new(false)).unwrap();
    assert!(found.findings.is_empty(), "{found:?}");
}

#[test]
fn a_rank_saves_once_for_a_snapshot_on_one_handle() {
    let ranks = Ranks::new(2);
    let ticket = ranks.begin(1);
    ranks.write(&ticket, 1).unwrap();
    let error = ranks.write(&ticket, 1).unwrap_err();
    assert!(matches!(&error, Error::InvalidInput { reason, .. } if reason.contains("already")), "{error:?}");
}

#[test]
fn a_rank_that_nobody_tells_learns_from_the_next_ticket() {
    let ranks = Ranks::over(Arc::new(MemoryStore::default()), 2, &[Rule::Last { count: 1 }]);
    let mut second = Vec::new();
    for step in 1..=3 {
        let ticket = ranks.begin(step);
        for rank in 0..2 {
            second.push(ranks.write(&ticket, rank).unwrap());
        }
        ranks.coordinator().commit_session(&ticket, None).unwrap();
        ranks.coordinator().settle_part(&ticket, 0, true);
    }
    assert_eq!(ranks.seqs(), [3]);
    assert_eq!(names(ranks.store.as_ref(), Folder::Packs).len(), 4, "two of the base, two of the newest");
    for report in &second[2..] {
        assert_eq!(report.figures.reused_chunk_count * 2, report.figures.chunk_count, "{report:?}");
    }
}

#[test]
fn a_rank_takes_no_ticket_of_another_repository_no_rank_beyond_the_world_and_no_other_chunk_size() {
    let (ranks, others) = (Ranks::new(2), Ranks::new(2));
    let refused = |ranks: &Ranks, ticket: &Ticket, rank| match ranks.write(ticket, rank).unwrap_err() {
        Error::InvalidInput { reason, .. } => reason,
        other => panic!("{other:?}"),
    };
    let ticket = ranks.begin(1);
    assert!(refused(&others, &ticket, 1).contains("another repository"));
    let odd = Ticket { chunk_bytes: 8_192, ..ticket.clone() };
    assert!(refused(&ranks, &odd, 1).contains("8192"));
    let mut small = ticket;
    small.header.world_size = 1;
    assert!(refused(&ranks, &small, 1).contains("no rank 1"));
}

#[test]
fn a_rank_that_does_not_coordinate_writes_its_packs_and_nothing_else() {
    let ranks = Ranks::new(2);
    ranks.save(1);
    let rank = &ranks.handles[1];
    let before = names(ranks.store.as_ref(), Folder::Snapshots);
    assert!(matches!(rank.delete(1), Err(Error::InvalidInput { .. })));
    assert!(matches!(rank.prune(false), Err(Error::InvalidInput { .. })));
    assert!(matches!(rank.begin_session(2, 2, BTreeMap::new(), json("{}")), Err(Error::InvalidInput { .. })));
    assert!(matches!(save(rank, 2), Err(Error::InvalidInput { .. })));
    assert_eq!(names(ranks.store.as_ref(), Folder::Snapshots), before);
    assert_eq!(rank.candidates().unwrap(), [1]);
}
