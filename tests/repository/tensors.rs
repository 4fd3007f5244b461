//! Tensors of any dtype and shape, and what the tests do with them.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use varvite::error::{Error, Result};
use varvite::plan::Want;
use varvite::repository::{Repository, SaveReport, SaveRequest};
use varvite::store::{Key, PutMode, Store};
use varvite::tensor::{Dtype, Region, raw_length_bytes};
use varvite::write::EntryInput;

use crate::common::training::json;
use crate::common::{get, pattern};

/// A tensor to save.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    /// What it is stored as, where that is another dtype.
    pub(crate) stored_dtype: Option<Dtype>,
    pub(crate) shape: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) tied_to: Option<String>,
}

impl Tensor {
    /// A tensor with bytes that follow from its name.
    pub(crate) fn new(name: &str, dtype: Dtype, shape: &[u64]) -> Self {
        let length = raw_length_bytes(shape, dtype).unwrap() as usize;
        let seed = name.bytes().fold(1, |sum: u64, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)));
        Self::of(name, dtype, shape, pattern(seed, length))
    }

    /// A tensor with these bytes.
    pub(crate) fn of(name: &str, dtype: Dtype, shape: &[u64], bytes: Vec<u8>) -> Self {
        let name = name.to_owned();
        Self { name, dtype, stored_dtype: None, shape: shape.to_vec(), bytes, tied_to: None }
    }

    /// A float32 vector.
    pub(crate) fn floats(name: &str, values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Self::of(name, Dtype::Float32, &[values.len() as u64], bytes)
    }

    /// The same, stored as another dtype.
    pub(crate) fn stored_as(self, dtype: Dtype) -> Self {
        Self { stored_dtype: Some(dtype), ..self }
    }

    /// Another name of the same storage.
    pub(crate) fn tied(&self, name: &str) -> Self {
        Self { name: name.to_owned(), tied_to: Some(self.name.clone()), ..self.clone() }
    }
}

/// A request to save these tensors, and its sources.
pub(crate) fn request_of(step: u64, tensors: &[Tensor]) -> (SaveRequest, Vec<&[u8]>) {
    let mut sources = Vec::new();
    let mut entries = Vec::new();
    for tensor in tensors {
        let source = tensor.tied_to.is_none().then(|| {
            sources.push(tensor.bytes.as_slice());
            sources.len() - 1
        });
        entries.push(EntryInput {
            name: tensor.name.clone(),
            rank: None,
            dtype: tensor.dtype,
            stored_dtype: tensor.stored_dtype.unwrap_or(tensor.dtype),
            shape: tensor.shape.clone(),
            region: Region::whole(&tensor.shape),
            tied_to: tensor.tied_to.clone(),
            source,
        });
    }
    let request = SaveRequest {
        step,
        metrics: BTreeMap::new(),
        metadata: json(r#"{"note":"a"}"#),
        entries,
        structure: json(r#"["structure"]"#),
        rank_structure: Some(json("7")),
    };
    (request, sources)
}

/// Saves tensors while the caller waits.
pub(crate) fn save_tensors(repository: &Repository, step: u64, tensors: &[Tensor]) -> Result<SaveReport> {
    let (request, sources) = request_of(step, tensors);
    repository.save_sync(request, &sources, &AtomicBool::new(false))
}

/// Loads a region of an entry; `None` for the whole.
pub(crate) fn load_region(
    repository: &Repository,
    seq: u64,
    name: &str,
    region: Option<Region>,
) -> Result<Vec<u8>> {
    let snapshot = repository.snapshot(seq)?;
    let entries = &snapshot.manifest().body.entries;
    let entry = entries.iter().position(|entry| entry.name == name).ok_or_else(|| Error::TensorNotFound {
        name: name.to_owned(),
        seq,
        nearest: Vec::new(),
    })?;
    let region = region.unwrap_or_else(|| Region::whole(&entries[entry].shape));
    let length = raw_length_bytes(&region.lengths, entries[entry].dtype).unwrap();
    let mut bytes = vec![0x5a; length as usize];
    snapshot.read(
        &[Want { entry, region, target: 0 }],
        &mut [bytes.as_mut_slice()],
        &AtomicBool::new(false),
    )?;
    Ok(bytes)
}

/// Names of the packs that a snapshot refers to.
pub(crate) fn packs_of(repository: &Repository, seq: u64) -> Vec<String> {
    let snapshot = repository.snapshot(seq).unwrap();
    snapshot.manifest().body.packs.iter().map(|record| record.name.clone()).collect()
}

/// Changes one byte of an object, as rot does.
pub(crate) fn flip(store: &dyn Store, key: &Key, offset: usize) {
    let mut bytes = get(store, key);
    bytes[offset] ^= 1;
    store.put(key, &bytes, PutMode::Replace).unwrap();
}
