//! A small training state whose every byte follows from the step, and its way in and out of a repository.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde_json::value::RawValue;
use varvite::cast;
use varvite::error::{Error, Result};
use varvite::plan::{Compression, Want};
use varvite::repository::{Access, Options, Repository, SaveReport, SaveRequest};
use varvite::retain::Rule;
use varvite::store::Store;
use varvite::tensor::{Dtype, Region};
use varvite::write::EntryInput;

use super::pattern;

/// The smallest legal chunk, so that small tensors have several.
pub(crate) const CHUNK_BYTES: u64 = 4_096;

/// Tensors of bytes by name.
pub(crate) type State = BTreeMap<String, Vec<u8>>;

/// The same bytes after a step that moves few of them: what a difference is taken of.
pub(crate) fn nudged(bytes: &[u8], step: u64) -> Vec<u8> {
    let moved = pattern(step, bytes.len());
    let is_moved = |index: usize| (index as u64 + step).is_multiple_of(61);
    let nudge = |index: usize| if is_moved(index) { moved[index] & 3 } else { 0 };
    bytes.iter().enumerate().map(|(index, byte)| byte.wrapping_add(nudge(index))).collect()
}

/// Floats like weights, a little further at each step, and the same rounded to bfloat16.
fn weights(step: u64, count: usize) -> (Vec<u8>, Vec<u8>) {
    let words = pattern(11, 4 * count);
    let (words, _) = words.as_chunks::<4>();
    let word = |word: &[u8; 4]| (u32::from_le_bytes(*word) & 0x80FF_FFFF) | 0x3C00_0000;
    let master: Vec<u8> =
        words.iter().flat_map(|noise| (word(noise) + step as u32 * 77).to_le_bytes()).collect();
    let mut copy = vec![0; 2 * count];
    cast::narrow(Dtype::Float32, Dtype::Bfloat16, 0, &master, &mut copy).unwrap();
    (master, copy)
}

/// The state of a step with what codecs are for: also a part that changes little, and weights with their copy.
pub(crate) fn coded_state_at(step: u64) -> State {
    let chunk = CHUNK_BYTES as usize;
    let (master, copy) = weights(step, chunk / 4 + 100);
    let mut state = state_at(step);
    state.insert("table".to_owned(), nudged(&pattern(5, chunk), step));
    state.insert("master.float32".to_owned(), master);
    state.insert("model.bfloat16".to_owned(), copy);
    state
}

/// The state of a step: a part that never changes, one that changes now and then, one that always does.
pub(crate) fn state_at(step: u64) -> State {
    let chunk = CHUNK_BYTES as usize;
    let mut weight = pattern(1_000 + step, chunk);
    weight.extend(pattern(2_000 + step / 3, chunk + 17));
    BTreeMap::from([
        ("frozen".to_owned(), pattern(7, 3 * chunk + 100)),
        ("weight".to_owned(), weight),
        ("bias".to_owned(), pattern(3_000 + step, 10)),
        ("step".to_owned(), step.to_le_bytes().to_vec()),
    ])
}

/// One thread, small chunks, and these rules.
pub(crate) fn options(rules: Vec<Rule>) -> Options {
    Options { chunk_bytes: CHUNK_BYTES, rules, ..Options::default() }
}

/// Opens for writing, and codes every chunk.
pub(crate) fn open_coded(store: Arc<dyn Store>, rules: Vec<Rule>) -> Result<Repository> {
    Repository::open(store, Options { compression: Compression::Fast, ..options(rules) })
}

/// Opens for writing.
pub(crate) fn open(store: Arc<dyn Store>, rules: Vec<Rule>) -> Result<Repository> {
    Repository::open(store, options(rules))
}

/// Opens for reading.
pub(crate) fn open_to_read(store: Arc<dyn Store>) -> Result<Repository> {
    Repository::open(store, Options { access: Access::Read, ..options(Vec::new()) })
}

/// JSON that means nothing to the engine.
pub(crate) fn json(text: &str) -> Box<RawValue> {
    serde_json::from_str(text).unwrap()
}

/// A request to save tensors in the order of their names; what is behind a dot is the dtype, else bytes.
pub(crate) fn request(step: u64, state: &State) -> SaveRequest {
    let entries = state.iter().enumerate().map(|(source, (name, bytes))| {
        let dtype = match name.split_once('.') {
            Some((_, "float32")) => Dtype::Float32,
            Some((_, "bfloat16")) => Dtype::Bfloat16,
            _ => Dtype::Uint8,
        };
        let shape = vec![bytes.len() as u64 / dtype.size_bytes()];
        EntryInput {
            name: name.clone(),
            rank: None,
            dtype,
            stored_dtype: dtype,
            region: Region::whole(&shape),
            shape,
            tied_to: None,
            source: Some(source),
        }
    });
    SaveRequest {
        step,
        metrics: BTreeMap::new(),
        metadata: json("{}"),
        entries: entries.collect(),
        structure: json("{}"),
        rank_structure: None,
    }
}

/// Saves a state; a retention that failed after the commit is an error too.
pub(crate) fn save_state(repository: &Repository, step: u64, state: &State) -> Result<SaveReport> {
    let sources: Vec<&[u8]> = state.values().map(Vec::as_slice).collect();
    refuse_failed_retention(repository.save_sync(request(step, state), &sources, &AtomicBool::new(false))?)
}

/// Saves the state of a step.
pub(crate) fn save(repository: &Repository, step: u64) -> Result<SaveReport> {
    save_state(repository, step, &state_at(step))
}

/// The report of a save, or the error of the retention that followed it.
pub(crate) fn refuse_failed_retention(report: SaveReport) -> Result<SaveReport> {
    match &report.retention {
        Ok(_) => Ok(report),
        Err(error) => Err(Error::Poisoned { first: error.chain() }),
    }
}

/// Every tensor of a snapshot.
pub(crate) fn load(repository: &Repository, seq: u64) -> Result<State> {
    let snapshot = repository.snapshot(seq)?;
    let entries = &snapshot.manifest().body.entries;
    let wants: Vec<Want> = entries
        .iter()
        .enumerate()
        .map(|(entry, found)| Want { entry, region: Region::whole(&found.shape), target: entry })
        .collect();
    let mut values: Vec<Vec<u8>> = entries
        .iter()
        .map(|entry| {
            let length = varvite::tensor::raw_length_bytes(&entry.shape, entry.stored_dtype).unwrap();
            vec![0xa5; length as usize]
        })
        .collect();
    let mut targets: Vec<&mut [u8]> = values.iter_mut().map(Vec::as_mut_slice).collect();
    snapshot.read(&wants, &mut targets, &AtomicBool::new(false))?;
    Ok(entries.iter().map(|entry| entry.name.clone()).zip(values).collect())
}
