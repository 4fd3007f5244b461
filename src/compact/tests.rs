use proptest::prelude::*;

use super::*;
use crate::format::model::Manifest;
use crate::format::samples;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Packs of (length, live bytes), and the packs of each snapshot.
fn survey(packs: &[(u64, u64)], snapshots: &[&[usize]]) -> Survey {
    let packs = packs.iter().enumerate().map(|(index, &(length_bytes, live_bytes))| PackSize {
        name: format!("{index:04}"),
        length_bytes,
        live_bytes,
        is_fixed: false,
    });
    Survey { packs: packs.collect(), snapshots: snapshots.iter().map(|packs| (1, packs.to_vec())).collect() }
}

fn due(stride: u64, max_packs: u64, dead_ratio: f64, is_stride_over: bool) -> Demand {
    Demand::Due { policy: MergePolicy { stride, max_packs, dead_ratio }, is_stride_over }
}

/// A base, and a small pack for each save after it, each snapshot referring to all before it.
fn chain(base_bytes: u64, save_bytes: u64, saves: usize) -> Survey {
    let packs: Vec<(u64, u64)> = [(base_bytes, base_bytes)]
        .into_iter()
        .chain(std::iter::repeat_n((save_bytes, save_bytes), saves))
        .collect();
    let of_snapshots: Vec<Vec<usize>> = (0..=saves).map(|last| (0..=last).collect()).collect();
    survey(&packs, &of_snapshots.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

#[test]
fn the_smallest_packs_go_until_half_of_the_limit_is_left() {
    let packs = chain(GIB, MIB, 7);
    assert_eq!(plan(&packs, due(0, 8, 0.5, false)), [[0; 0]; 0], "8 packs are allowed");
    let packs = chain(GIB, MIB, 8);
    // 9 packs, 4 of them are to be left: 6 become one.
    assert_eq!(plan(&packs, due(0, 8, 0.5, false)), [vec![1, 2, 3, 4, 5, 6]]);
    assert_eq!(plan(&packs, due(0, 1, 0.5, false)), [vec![1, 2, 3, 4, 5, 6, 7, 8, 0]], "smallest first");
}

#[test]
fn every_rank_may_have_as_many_packs() {
    let mut packs = survey(&[(MIB, MIB); 8], &[&[0, 1, 2, 3, 4, 5, 6, 7]]);
    assert_eq!(plan(&packs, due(0, 4, 0.5, false)), [vec![0, 1, 2, 3, 4, 5, 6]]);
    packs.snapshots[0].0 = 2;
    assert_eq!(plan(&packs, due(0, 4, 0.5, false)), [[0; 0]; 0]);
}

#[test]
fn a_pack_with_more_dead_bytes_than_allowed_is_rewritten_alone() {
    let packs = survey(&[(10 * MIB, 4 * MIB), (10 * MIB, 5 * MIB)], &[&[0], &[1]]);
    assert_eq!(plan(&packs, due(0, 8, 0.5, false)), [vec![0]]);
    assert_eq!(plan(&packs, due(0, 8, 0.3, false)), [vec![0], vec![1]]);
    let small = survey(&[(MIB - 1, 1_000)], &[&[0]]);
    assert_eq!(plan(&small, due(0, 8, 0.5, false)), [[0; 0]; 0], "the syncs cost more");
    assert_eq!(plan(&small, Demand::Everything), [vec![0]]);
}

#[test]
fn nothing_is_rewritten_for_less_than_a_sixteenth() {
    let packs = survey(&[(16 * MIB, 15 * MIB + MIB / 2)], &[&[0], &[0]]);
    assert_eq!(plan(&packs, Demand::Everything), [[0; 0]; 0]);
    let packs = survey(&[(16 * MIB, 15 * MIB - FRAME_BYTES)], &[&[0]]);
    assert_eq!(plan(&packs, Demand::Everything), [vec![0]]);
}

#[test]
fn packs_that_no_snapshot_has_in_common_stay_apart() {
    let packs = survey(&[(MIB, MIB), (MIB, MIB), (MIB, MIB)], &[&[0], &[1], &[2]]);
    assert_eq!(plan(&packs, Demand::Everything), [[0; 0]; 0]);
    let packs = survey(&[(MIB, MIB), (MIB, MIB), (MIB, MIB), (MIB, MIB)], &[&[0, 1], &[2, 3]]);
    assert_eq!(plan(&packs, Demand::Everything), [vec![0, 1], vec![2, 3]]);
}

#[test]
fn a_stride_leaves_a_much_larger_pack_until_the_others_have_grown() {
    let packs = chain(100 * MIB, MIB, 10);
    let all_saves: Vec<usize> = (1..=10).collect();
    assert_eq!(plan(&packs, due(10, 100, 0.9, true)), [all_saves]);
    assert_eq!(plan(&packs, due(10, 100, 0.9, false)), [[0; 0]; 0]);
    let packs = chain(19 * MIB, MIB, 10);
    assert_eq!(plan(&packs, due(10, 100, 0.9, true))[0].len(), 11, "10 MiB are more than half of 19");
}

#[test]
fn bytes_are_rewritten_about_as_often_as_the_repository_doubles() {
    // 256 saves of 1 MiB, a merge after every 8: bytes written by merges for each byte saved.
    let (mut sizes, mut written) = (vec![64 * MIB], 0);
    for save in 1..=256 {
        sizes.push(MIB);
        let packs: Vec<(u64, u64)> = sizes.iter().map(|&size| (size, size)).collect();
        let all: Vec<usize> = (0..sizes.len()).collect();
        for group in plan(&survey(&packs, &[&all]), due(8, 1_000, 0.9, save % 8 == 0)) {
            let sum = group.iter().map(|&pack| sizes[pack]).sum::<u64>();
            written += sum;
            let kept = (0..sizes.len()).filter(|pack| !group.contains(pack)).map(|pack| sizes[pack]);
            sizes = kept.chain([sum]).collect();
        }
    }
    let factor = written / (256 * MIB);
    assert!((1..7).contains(&factor), "{factor}");
}

#[test]
fn a_merged_pack_is_never_larger_than_the_limit() {
    let packs = survey(&[(GIB, GIB); 10], &[&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]);
    let groups = plan(&packs, Demand::Everything);
    assert_eq!(groups, [vec![8, 9], vec![0, 1, 2, 3], vec![4, 5, 6, 7]]);
    let huge = survey(&[(3 * GIB, 3 * GIB), (3 * GIB, 3 * GIB)], &[&[0, 1]]);
    assert_eq!(plan(&huge, Demand::Everything), [[0; 0]; 0]);
    let wasteful = survey(&[(100 * GIB, 30 * GIB), (MIB, MIB)], &[&[0, 1]]);
    assert_eq!(plan(&wasteful, due(0, 8, 0.5, false)), [vec![0]], "alone, whatever its size");
}

#[test]
fn fixed_packs_are_left_alone() {
    let mut packs = survey(&[(10 * MIB, MIB), (MIB, MIB), (MIB, MIB)], &[&[0, 1, 2]]);
    packs.packs[0].is_fixed = true;
    assert_eq!(plan(&packs, Demand::Everything), [vec![1, 2]]);
    assert_eq!(plan(&packs, due(0, 8, 0.5, false)), [[0; 0]; 0]);
}

#[test]
fn packs_that_hold_nothing_live_become_one_and_stay_it() {
    let packs = survey(&[(3 * GIB, 3 * GIB), (500, 0), (500, 0)], &[&[0, 1, 2]]);
    assert_eq!(plan(&packs, Demand::Everything), [vec![1, 2]]);
    let packs = survey(&[(3 * GIB, 3 * GIB), (SMALLEST_PACK_LENGTH_BYTES, 0)], &[&[0, 1]]);
    assert_eq!(plan(&packs, Demand::Everything), [[0; 0]; 0]);
    let packs = survey(&[(MIB, 0)], &[&[0]]);
    assert_eq!(plan(&packs, Demand::Everything), [vec![0]]);
}

#[test]
fn what_snapshots_use_is_added_up_once_and_with_its_place_in_a_new_pack() {
    let used = |name: &str, places: &[(u64, u64)]| Used {
        record: PackRecord { name: name.to_owned(), length_bytes: 200_000 },
        places: places.to_vec(),
    };
    let one = SnapshotUse { world_size: 1, packs: vec![used("b", &[(64, 10), (128, 65)]), used("a", &[])] };
    let other = SnapshotUse { world_size: 3, packs: vec![used("b", &[(64, 10), (4_096, 65_537)])] };
    let found = Survey::of([(&one, false), (&other, true)]);
    let row = |name: &str, live_bytes, is_fixed| PackSize {
        name: name.to_owned(),
        length_bytes: 200_000,
        live_bytes,
        is_fixed,
    };
    assert_eq!(found.packs, [row("a", 0, false), row("b", 64 + 128 + 17 * 4_096 + 3 * 48, true)]);
    assert_eq!(found.snapshots, [(1, vec![1, 0]), (3, vec![1])]);
}

/// The survey after a plan was carried out, by the planner's own estimates.
fn carried_out(before: &Survey, groups: &[Vec<usize>]) -> Survey {
    let mut after = before.clone();
    for (number, group) in groups.iter().enumerate() {
        let live_bytes: u64 = group.iter().map(|&pack| before.packs[pack].live_bytes).sum();
        let new = after.packs.len();
        // They are gone.
        for &pack in group {
            after.packs[pack].is_fixed = true;
        }
        after.packs.push(PackSize {
            name: format!("merged {number}"),
            length_bytes: live_bytes + FRAME_BYTES,
            live_bytes,
            is_fixed: false,
        });
        for (_, packs) in &mut after.snapshots {
            let had = packs.len();
            packs.retain(|pack| !group.contains(pack));
            if packs.len() < had {
                packs.push(new);
            }
        }
    }
    after
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_second_merge_of_everything_finds_nothing(
        sizes in prop::collection::vec((0..40_u32, 0..=100_u64), 1..12),
        of_snapshots in prop::collection::vec(prop::collection::btree_set(0..12_usize, 0..8), 1..6),
        everything in any::<bool>(),
    ) {
        let packs: Vec<(u64, u64)> = sizes
            .iter()
            .map(|&(power, live)| {
                let length = SMALLEST_PACK_LENGTH_BYTES + (1_u64 << power.min(34));
                (length, length / 100 * live)
            })
            .collect();
        let of_snapshots: Vec<Vec<usize>> = of_snapshots
            .into_iter()
            .map(|set| set.into_iter().filter(|pack| *pack < packs.len()).collect())
            .collect();
        let mut before = survey(&packs, &of_snapshots.iter().map(Vec::as_slice).collect::<Vec<_>>());
        for (pack, size) in before.packs.iter_mut().enumerate() {
            size.is_fixed = !of_snapshots.iter().flatten().any(|used| *used == pack);
        }
        let demand = if everything { Demand::Everything } else { due(1, 3, 0.5, true) };
        let groups = plan(&before, demand);
        let mut seen = HashSet::new();
        for group in &groups {
            prop_assert!(group.iter().all(|&pack| seen.insert(pack)), "a pack in two groups: {groups:?}");
            let live: u64 = group.iter().map(|&pack| before.packs[pack].live_bytes).sum();
            prop_assert!(group.len() == 1 || live <= MERGED_LIMIT_BYTES);
        }
        let after = carried_out(&before, &groups);
        let counts = |survey: &Survey| survey.snapshots.iter().map(|row| row.1.len()).collect::<Vec<_>>();
        for (before, after) in counts(&before).into_iter().zip(counts(&after)) {
            prop_assert!(after <= before);
        }
        if everything {
            prop_assert_eq!(plan(&after, demand), Vec::<Vec<usize>>::new());
        }
    }
}

/// A snapshot of one chunk in each of these packs.
fn manifest_of(packs: &[&str]) -> Manifest {
    let record = |name: &&str| PackRecord { name: (*name).to_owned(), length_bytes: 100_000 };
    let mut body = samples::body();
    body.packs = packs.iter().map(record).collect();
    body.entries = (0..packs.len() as u32)
        .map(|pack| samples::entry(&format!("a{pack}"), &[8], vec![samples::chunk(pack, 64, 32)]))
        .collect();
    Manifest { header: samples::header(), body }
}

/// The chunk of the pack with this index, moved.
fn moves_of(index: u32, source: &str, pack: &str, from: u64, to: u64) -> Moves {
    let mut moves = Moves::new([source].into_iter(), pack);
    let digest = samples::chunk(index, 64, 32).digest;
    let target = Moved { offset_bytes: to, stored_length_bytes: 32, codec: Codec::Store, digest };
    moves.note(source, from, target);
    moves
}

fn moves(source: &str, pack: &str, from: u64, to: u64) -> Moves {
    moves_of(0, source, pack, from, to)
}

fn places(manifest: &Manifest) -> Vec<(String, u64)> {
    let chunks = manifest.body.entries.iter().flat_map(|entry| &entry.shards[0].chunks);
    chunks.map(|chunk| (manifest.body.packs[chunk.pack as usize].name.clone(), chunk.offset_bytes)).collect()
}

#[test]
fn a_snapshot_that_is_served_twice_names_the_merged_pack_once() {
    let once = moves("1-r0", "9-m0", 64, 128).repoint(&manifest_of(&["1-r0", "2-r0"])).unwrap();
    let twice = moves_of(1, "2-r0", "9-m0", 64, 192).repoint(&once).unwrap();
    assert_eq!(places(&twice), [("9-m0".to_owned(), 128), ("9-m0".to_owned(), 192)]);
    assert_eq!(twice.body.packs.len(), 1);
}

#[test]
fn a_place_with_other_bytes_than_the_manifest_says_is_not_served() {
    assert!(moves_of(1, "1-r0", "9-m0", 64, 128).repoint(&manifest_of(&["1-r0"])).is_none());
}

#[test]
fn a_snapshot_that_needs_what_was_not_copied_is_not_served() {
    assert!(moves("1-r0", "9-m0", 4_096, 128).repoint(&manifest_of(&["1-r0"])).is_none());
}

#[test]
fn moves_go_on_to_where_a_later_merge_has_moved_the_copies() {
    let mut first = moves("1-r0", "8-m0", 64, 128);
    first.go_on(&moves("8-m0", "9-m0", 128, 256));
    let served = first.repoint(&manifest_of(&["1-r0"])).unwrap();
    assert_eq!(places(&served), [("9-m0".to_owned(), 256)]);
    // What the later merge did not carry is gone.
    first.go_on(&moves("9-m0", "10-m0", 64, 256));
    assert!(first.repoint(&manifest_of(&["1-r0"])).is_none());
}
