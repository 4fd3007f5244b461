//! What was saved is what is loaded, whatever its dtype, shape and name.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use varvite::error::Error;
use varvite::plan::Want;
use varvite::repository::Repository;
use varvite::store::Folder;
use varvite::store::memory::MemoryStore;
use varvite::tensor::{Dtype, Region};

use crate::common::names;
use crate::common::training::open;
use crate::tensors::{Tensor, load_region, request_of, save_tensors};

fn repository() -> Repository {
    open(Arc::new(MemoryStore::new()), Vec::new()).unwrap()
}

#[test]
fn every_dtype_and_shape_round_trips_in_both_ways_of_saving() {
    let mut tensors = Vec::new();
    for dtype in Dtype::all() {
        for shape in [&[][..], &[0], &[3, 0, 2], &[1], &[5, 7], &[2, 1, 3, 2], &[4_099]] {
            tensors.push(Tensor::new(&format!("{}.{shape:?}", dtype.name()), dtype, shape));
        }
    }
    let repository = repository();
    let waited = save_tensors(&repository, 1, &tensors).unwrap();
    let (request, sources) = request_of(2, &tensors);
    let session = repository.begin_save(request, &sources).unwrap();
    let staged = session.run(&AtomicBool::new(false)).unwrap();
    assert_eq!(waited.header.state_digest, staged.header.state_digest);
    for seq in [waited.header.seq, staged.header.seq] {
        let snapshot = repository.snapshot(seq).unwrap();
        assert_eq!(snapshot.manifest().body.entries.len(), tensors.len());
        for tensor in &tensors {
            assert_eq!(
                load_region(&repository, seq, &tensor.name, None).unwrap(),
                tensor.bytes,
                "{tensor:?}"
            );
            let entries = &snapshot.manifest().body.entries;
            let entry = entries.iter().find(|entry| entry.name == tensor.name).unwrap();
            assert_eq!((entry.dtype, &entry.shape), (tensor.dtype, &tensor.shape));
        }
    }
    assert_eq!(staged.header.raw_bytes, tensors.iter().map(|tensor| tensor.bytes.len() as u64).sum::<u64>());
}

#[test]
fn what_training_changes_after_the_copy_does_not_reach_the_snapshot() {
    let repository = repository();
    let mut tensor = Tensor::new("weight", Dtype::Float32, &[3_000]);
    let saved = tensor.bytes.clone();
    let (request, sources) = request_of(1, std::slice::from_ref(&tensor));
    let session = repository.begin_save(request, &sources).unwrap();
    tensor.bytes.fill(0xff);
    let report = session.run(&AtomicBool::new(false)).unwrap();
    assert_eq!(load_region(&repository, report.header.seq, "weight", None).unwrap(), saved);
}

#[test]
fn a_tie_is_stored_once_and_equal_tensors_are_not_tied() {
    let first = Tensor::new("a", Dtype::Float32, &[2_000]);
    let equal = Tensor { name: "c".to_owned(), ..first.clone() };
    let tensors = [first.tied("z"), first.clone(), equal];
    let repository = repository();
    let report = save_tensors(&repository, 1, &tensors).unwrap();
    let snapshot = repository.snapshot(1).unwrap();
    let ties: Vec<(&str, Option<&str>)> = snapshot
        .manifest()
        .body
        .entries
        .iter()
        .map(|entry| (entry.name.as_str(), entry.tied_to.as_deref()))
        .collect();
    assert_eq!(ties, [("a", None), ("c", None), ("z", Some("a"))]);
    for name in ["a", "c", "z"] {
        assert_eq!(load_region(&repository, 1, name, None).unwrap(), first.bytes);
    }
    assert_eq!(report.header.raw_bytes, 2 * 8_000);
    // 8,000 bytes are two chunks; those of `c` are the same bytes again.
    assert_eq!((report.figures.chunk_count, report.figures.reused_chunk_count), (4, 2));
}

#[test]
fn a_tie_to_nothing_or_to_another_tie_is_refused_and_nothing_is_saved() {
    let first = Tensor::new("a", Dtype::Uint8, &[3]);
    let second = first.tied("b");
    for tensors in [vec![second.clone()], vec![first.clone(), second.clone(), second.tied("c")]] {
        let repository = repository();
        let error = save_tensors(&repository, 1, &tensors).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidInput { what, .. } if what.starts_with("tie of `")),
            "{error:?}"
        );
        assert_eq!(repository.candidates().unwrap(), [0; 0]);
        assert_eq!(names(repository.store().as_ref(), Folder::Packs), [""; 0]);
    }
}

#[test]
fn structures_metadata_and_metrics_come_back_as_given() {
    let repository = repository();
    let (mut request, sources) = request_of(41, &[]);
    request.metrics = BTreeMap::from([("loss".to_owned(), 0.25), ("bad".to_owned(), f64::NAN)]);
    let report = repository.save_sync(request, &sources, &AtomicBool::new(false)).unwrap();
    let snapshot = repository.snapshot(report.header.seq).unwrap();
    let manifest = snapshot.manifest();
    assert_eq!(manifest.header.step, 41);
    assert_eq!(manifest.header.metadata.get(), r#"{"note":"a"}"#);
    assert_eq!(manifest.header.metrics["loss"].to_bits(), 0.25_f64.to_bits());
    assert!(manifest.header.metrics["bad"].is_nan());
    assert_eq!(manifest.body.structure.get(), r#"["structure"]"#);
    let ranks: Vec<(u32, &str)> =
        manifest.body.rank_structures.iter().map(|found| (found.rank, found.structure.get())).collect();
    assert_eq!(ranks, [(0, "7")]);
}

#[test]
fn names_of_any_text_are_kept_apart() {
    let long = "x".repeat(60_000);
    let texts =
        ["", ".", "..", "a.b", "a/b", "../../etc/passwd", "\n", "\"quoted\"", "7", "é", "e\u{301}", &long];
    let tensors: Vec<Tensor> = texts
        .iter()
        .enumerate()
        .map(|(index, name)| Tensor::of(name, Dtype::Uint8, &[1], vec![index as u8]))
        .collect();
    let repository = repository();
    save_tensors(&repository, 1, &tensors).unwrap();
    for tensor in &tensors {
        assert_eq!(
            load_region(&repository, 1, &tensor.name, None).unwrap(),
            tensor.bytes,
            "{:?}",
            tensor.name
        );
    }
}

#[test]
fn two_tensors_of_one_name_are_refused() {
    let repository = repository();
    let tensors = [Tensor::new("a", Dtype::Uint8, &[3]), Tensor::new("a", Dtype::Uint8, &[4])];
    assert!(save_tensors(&repository, 1, &tensors).is_err());
    assert_eq!(repository.candidates().unwrap(), [0; 0]);
    save_tensors(&repository, 2, &tensors[..1]).unwrap();
    assert_eq!(names(repository.store().as_ref(), Folder::Packs).len(), 1, "the failed one left nothing");
}

#[test]
fn a_region_is_the_slice_of_the_whole() {
    const ROWS: u64 = 50;
    const COLUMNS: u64 = 70;
    let tensor = Tensor::new("matrix", Dtype::Float64, &[ROWS, COLUMNS]);
    let repository = repository();
    save_tensors(&repository, 1, std::slice::from_ref(&tensor)).unwrap();
    for (offsets, lengths) in [
        ([0, 0], [ROWS, COLUMNS]),
        ([3, 0], [1, COLUMNS]),
        ([10, 0], [30, COLUMNS]),
        ([0, 69], [ROWS, 1]),
        ([7, 11], [13, 29]),
        ([49, 69], [1, 1]),
        ([5, 5], [0, 3]),
    ] {
        let mut expected = Vec::new();
        for row in offsets[0]..offsets[0] + lengths[0] {
            for column in offsets[1]..offsets[1] + lengths[1] {
                let at = ((row * COLUMNS + column) * 8) as usize;
                expected.extend_from_slice(&tensor.bytes[at..at + 8]);
            }
        }
        let region = Region { offsets: offsets.to_vec(), lengths: lengths.to_vec() };
        let found = load_region(&repository, 1, "matrix", Some(region)).unwrap();
        assert_eq!(found, expected, "{offsets:?} {lengths:?}");
    }
}

#[test]
fn a_target_of_another_size_or_a_region_outside_is_refused_before_anything_is_read() {
    let repository = repository();
    save_tensors(&repository, 1, &[Tensor::new("a", Dtype::Int32, &[4, 4])]).unwrap();
    let snapshot = repository.snapshot(1).unwrap();
    for (offsets, lengths, length) in [([0, 0], [4, 4], 63), ([0, 0], [4, 4], 65), ([1, 0], [4, 4], 64)] {
        let region = Region { offsets: offsets.to_vec(), lengths: lengths.to_vec() };
        let mut target = vec![9; length];
        let want = Want { entry: 0, region, target: 0 };
        let error =
            snapshot.read(&[want], &mut [target.as_mut_slice()], &AtomicBool::new(false)).unwrap_err();
        assert!(matches!(&error, Error::Mismatch { name, field: "size", .. } if name == "a"), "{error:?}");
        assert!(target.iter().all(|byte| *byte == 9));
    }
}

#[test]
fn non_finite_values_are_counted_by_name_and_healthy_means_none() {
    let repository = repository();
    save_tensors(&repository, 1, &[Tensor::floats("a", &[1.0, 2.0])]).unwrap();
    let nan = [1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    let sick = [Tensor::floats("a", &[1.0, 2.0]), Tensor::floats("b", &nan)];
    let report = save_tensors(&repository, 2, &sick).unwrap();
    assert_eq!(report.header.nonfinite, BTreeMap::from([("b".to_owned(), 3)]));
    assert_eq!(repository.header(1).unwrap().nonfinite, BTreeMap::new());
    assert_eq!(repository.resolve("healthy").unwrap(), 1);
    assert_eq!(repository.resolve("latest").unwrap(), 2);
    let loaded = load_region(&repository, 2, "b", None).unwrap();
    assert_eq!(loaded, sick[1].bytes, "a NaN keeps its payload");
}

#[test]
fn a_state_of_ten_thousand_entries_round_trips_in_one_pack() {
    let tensors: Vec<Tensor> = (0..10_000)
        .map(|index| {
            Tensor::of(
                &format!("layer.{index}"),
                Dtype::Uint64,
                &[4],
                (0..4_u64).flat_map(|at| (index * 4 + at).to_le_bytes()).collect(),
            )
        })
        .collect();
    let repository = repository();
    let report = save_tensors(&repository, 1, &tensors).unwrap();
    assert_eq!(report.figures.chunk_count, 10_000);
    assert_eq!(names(repository.store().as_ref(), Folder::Packs).len(), 1);
    let snapshot = repository.snapshot(1).unwrap();
    let entries = &snapshot.manifest().body.entries;
    let wants: Vec<Want> =
        (0..entries.len()).map(|entry| Want { entry, region: Region::whole(&[4]), target: entry }).collect();
    let mut values = vec![[0_u8; 32]; entries.len()];
    let mut targets: Vec<&mut [u8]> = values.iter_mut().map(<[u8; 32]>::as_mut_slice).collect();
    assert_eq!(snapshot.read(&wants, &mut targets, &AtomicBool::new(false)).unwrap(), 320_000);
    let by_name: BTreeMap<&str, &[u8]> = entries
        .iter()
        .map(|entry| entry.name.as_str())
        .zip(values.iter().map(<[u8; 32]>::as_slice))
        .collect();
    for tensor in &tensors {
        assert_eq!(by_name[tensor.name.as_str()], tensor.bytes);
    }
}

#[test]
fn a_cancelled_save_leaves_nothing() {
    let repository = repository();
    let tensor = Tensor::new("a", Dtype::Uint8, &[10_000]);
    let (request, sources) = request_of(1, std::slice::from_ref(&tensor));
    let error = repository.save_sync(request, &sources, &AtomicBool::new(true)).unwrap_err();
    assert!(matches!(error, Error::Interrupted), "{error:?}");
    assert_eq!(repository.candidates().unwrap(), [0; 0]);
    assert_eq!(names(repository.store().as_ref(), Folder::Packs), [""; 0]);
    // Its number is not given again.
    assert_eq!(save_tensors(&repository, 2, &[tensor]).unwrap().header.seq, 2);
}
