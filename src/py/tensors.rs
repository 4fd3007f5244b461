//! The tensors of a save as the engine takes them: described once, tied by memory, kept alive.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{Error, Result};
use crate::plan::{Holding, encode_holdings};
use crate::tensor::{Dtype, Region, raw_length_bytes};
use crate::write::EntryInput;

use super::buffer::{DenseTensor, Memory};
use super::error::raise;
use super::later::{SourceMemory, When};
use super::torch::Torch;
use super::walk::{Leaf, Walk};

/// What the engine takes of a save: its entries, and the memory that their sources index.
#[derive(Default)]
pub(crate) struct Described {
    pub(crate) entries: Vec<EntryInput>,
    pub(crate) memories: Vec<SourceMemory>,
    /// What other ranks write: only its digests are told.
    pub(crate) told: Vec<(EntryInput, SourceMemory)>,
    /// Names of entries that are written here, cast, and held by other ranks too: their digests are told as well.
    pub(crate) also_told: HashSet<String>,
    /// The caller's tensors whose bytes were copied. While they live, nothing else gets their memory.
    pub(crate) sources: Vec<Py<PyAny>>,
}

/// The tensors of one save, in the order of its walks.
///
/// The tensors themselves are referenced until the save has taken their bytes.
#[pyclass(frozen, module = "varvite._native")]
pub(crate) struct SaveTensors {
    described: Mutex<Option<Described>>,
    /// Describes what is no plain, dense tensor in CPU memory.
    describe_other: Py<PyAny>,
    /// Waits until the memory that it keeps holds its bytes.
    arrival: Option<Py<PyAny>>,
}

/// (name, rank, dtype, shape, name it is tied to)
type Row = (String, Option<u32>, &'static str, Vec<u64>, Option<String>);

#[pymethods]
#[expect(clippy::needless_pass_by_value, reason = "arguments are extracted from Python as owned values")]
impl SaveTensors {
    /// Others than plain, dense tensors in CPU memory are described by `describe_other`, by default the
    /// one of `varvite.tensors`; the save's thread calls `arrival` before it reads what that keeps.
    #[new]
    #[pyo3(signature = (describe_other=None, arrival=None))]
    fn new(py: Python<'_>, describe_other: Option<Py<PyAny>>, arrival: Option<Py<PyAny>>) -> PyResult<Self> {
        let describe_other = describe_other.map_or_else(|| default_describer(py), Ok)?;
        Ok(Self { described: Mutex::new(Some(Described::default())), describe_other, arrival })
    }

    /// Describes the leaves that a walk has found and takes them from it.
    ///
    /// Leaves of one call that are the same memory are tied, unless they belong to a rank.
    #[pyo3(signature = (walk, rank=None))]
    fn add(&self, py: Python<'_>, walk: &Bound<'_, Walk>, rank: Option<u32>) -> PyResult<()> {
        let leaves = walk.get().take();
        // Python code runs in here, so nothing is locked.
        let rows = describe(py, leaves, self.describe_other.bind(py))?;
        self.with(py, |described| described.extend(rows, rank))
    }

    /// Names of what was described, in order.
    fn names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, |described| described.entries.iter().map(|entry| entry.name.clone()).collect())
    }

    /// Has tensors stored in other dtypes: one wish for each, in the order of `names`. Only floats that are
    /// narrowed by it, of at least one dimension, are cast; a wish for any other tensor changes nothing.
    fn store_as(&self, py: Python<'_>, wishes: Vec<Option<String>>) -> PyResult<()> {
        let parse = |wish: &String| Dtype::parse(wish).map_err(|error| raise(py, &error));
        let wishes: Vec<Option<Dtype>> =
            wishes.iter().map(|wish| wish.as_ref().map(parse).transpose()).collect::<PyResult<_>>()?;
        self.with(py, |described| {
            for (entry, wish) in described.entries.iter_mut().zip(wishes) {
                let narrower = wish.filter(|wish| entry.dtype.narrows_to(*wish) && !entry.shape.is_empty());
                entry.stored_dtype = narrower.unwrap_or(entry.dtype);
            }
        })
    }

    /// Replaces the plain, dense tensors of at least so many bytes by clones that share their memory until
    /// the caller writes; the save's thread copies these. Returns how many they are; a tensor whose storage
    /// knows no such clones stays as it is. To be called without gradients.
    fn clone_lazily(&self, py: Python<'_>, least_bytes: usize) -> PyResult<usize> {
        let Some(torch) = Torch::loaded(py)? else { return Ok(0) };
        self.marking(py, |described| described.clone_lazily(py, torch, least_bytes))
    }

    /// Has the save's thread copy the tensors of at least so many bytes whose memory starts where that of
    /// one of these does, and ends with it or before: who calls promises that nobody writes them until the
    /// copy is done. Returns how many they are.
    fn promise(&self, py: Python<'_>, tensors: Vec<Bound<'_, PyAny>>, least_bytes: usize) -> PyResult<usize> {
        let Some(torch) = Torch::loaded(py)? else { return Ok(0) };
        self.marking(py, |described| described.promise(py, torch, &tensors, least_bytes))
    }

    /// What this rank holds of state that is no rank's own, in the order of the masks of `write_only`.
    fn holdings<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = self.with(py, |described| encode_holdings(&described.holdings()))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Has this rank write some of what `holdings` has described, and only tell the digests of the rest.
    ///
    /// One byte for each: 0 tells, 1 writes, 2 writes what others hold too.
    fn write_only(&self, py: Python<'_>, mask: Vec<u8>) -> PyResult<()> {
        self.with(py, |described| described.write_only(&mask))?.map_err(|error| raise(py, &error))
    }

    /// Bytes that the save's thread takes, after the call of `save` has returned.
    fn later_bytes(&self, py: Python<'_>) -> PyResult<usize> {
        let is_later = |source: &&SourceMemory| !matches!(source.when, When::Now | When::NowApart);
        self.with(py, |described| {
            described.memories.iter().filter(is_later).map(|source| source.memory.length_bytes()).sum()
        })
    }

    /// What was described: name, rank, dtype, shape, and the name it is tied to, of each.
    fn rows(&self, py: Python<'_>) -> PyResult<Vec<Row>> {
        self.with(py, |described| {
            let row = |entry: &EntryInput| {
                let tied_to = entry.tied_to.clone();
                (entry.name.clone(), entry.rank, entry.dtype.name(), entry.shape.clone(), tied_to)
            };
            described.entries.iter().map(row).collect()
        })
    }
}

impl SaveTensors {
    /// What the save's thread calls before it reads kept memory.
    pub(crate) fn arrival(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.arrival.as_ref().map(|arrival| arrival.clone_ref(py))
    }

    /// Hands everything to the save, which is the only one.
    pub(crate) fn take(&self, py: Python<'_>) -> PyResult<Described> {
        let taken = self.described.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.ok_or_else(|| spent(py))
    }

    /// As `with`, for what runs Python code: nothing is locked meanwhile.
    fn marking<T>(&self, py: Python<'_>, mark: impl FnOnce(&mut Described) -> PyResult<T>) -> PyResult<T> {
        let mut described = self.take(py)?;
        let marked = mark(&mut described);
        *self.described.lock().unwrap_or_else(PoisonError::into_inner) = Some(described);
        marked
    }

    fn with<T>(&self, py: Python<'_>, act: impl FnOnce(&mut Described) -> T) -> PyResult<T> {
        let mut described = self.described.lock().unwrap_or_else(PoisonError::into_inner);
        described.as_mut().map(act).ok_or_else(|| spent(py))
    }
}

fn spent(py: Python<'_>) -> PyErr {
    raise(py, &Error::Internal { what: "the tensors of a save were taken by another".to_owned() })
}

/// One leaf before it is known what it is tied to.
struct Found {
    name: String,
    dtype: Dtype,
    /// Of the whole tensor.
    shape: Vec<u64>,
    region: Region,
    memory: SourceMemory,
    identity: Option<Identity>,
    /// The caller's own, where the memory is that of a copy.
    source: Option<Py<PyAny>>,
}

/// With dtype and shape: equal for two leaves that are the same elements of memory in the same order.
#[derive(PartialEq, Eq)]
struct Identity {
    address: usize,
    /// How the elements are reached from there; empty for a dense tensor of the CPU.
    way: String,
}

/// What `varvite.tensors.Described` is: name, dtype, shape, value, identity, source, whether the value is
/// kept, and the region that it is of the shape.
type Other<'py> = (
    String,
    String,
    Vec<u64>,
    Bound<'py, PyAny>,
    Option<(usize, String)>,
    Bound<'py, PyAny>,
    bool,
    Option<(Vec<u64>, Vec<u64>)>,
);

fn default_describer(py: Python<'_>) -> PyResult<Py<PyAny>> {
    let tensors = py.import(intern!(py, "varvite.tensors"))?;
    Ok(tensors.getattr(intern!(py, "describe_other"))?.unbind())
}

fn describe(py: Python<'_>, leaves: Vec<Leaf>, describe_other: &Bound<'_, PyAny>) -> PyResult<Vec<Found>> {
    let torch = Torch::loaded(py)?;
    let knows_parts = knows_parts(py)?;
    let mut found = Vec::with_capacity(leaves.len());
    for Leaf { name, value } in leaves {
        let value = value.into_bound(py);
        // Torch's `CheckpointableTensor` is a plain tensor with attributes: a part of another one.
        let is_part = knows_parts && value.hasattr(intern!(py, "global_shape"))?;
        found.push(match if is_part { None } else { dense(torch, &value)? } {
            Some(tensor) => Found::dense(name, tensor),
            None => Found::other(&name, &value, describe_other)?,
        });
    }
    Ok(found)
}

/// True where tensors may say of themselves that they are parts: the module that defines how was imported.
fn knows_parts(py: Python<'_>) -> PyResult<bool> {
    let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
    modules.contains(intern!(py, "torch.distributed.checkpoint"))
}

fn dense(torch: Option<&Torch>, value: &Bound<'_, PyAny>) -> PyResult<Option<DenseTensor>> {
    match torch {
        Some(torch) if torch.is_plain(value) => DenseTensor::of(torch, value, false),
        _ => Ok(None),
    }
}

/// Tells of a tensor that is a plain one, dense and row-major in CPU memory, its dtype, its shape and the
/// address of its first element; `None` for any other value.
#[pyfunction]
pub(crate) fn describe_dense(value: &Bound<'_, PyAny>) -> PyResult<Option<(&'static str, Vec<u64>, usize)>> {
    let found = dense(Torch::loaded(value.py())?, value)?;
    Ok(found.map(|tensor| (tensor.dtype.name(), tensor.shape, tensor.memory.address())))
}

impl Found {
    fn dense(name: String, tensor: DenseTensor) -> Self {
        let DenseTensor { dtype, shape, memory } = tensor;
        let identity =
            (!shape.contains(&0)).then(|| Identity { address: memory.address(), way: String::new() });
        let memory = SourceMemory { memory, when: When::Now };
        Self { name, dtype, region: Region::whole(&shape), shape, memory, identity, source: None }
    }

    /// Has Python copy or refuse what is no dense tensor.
    fn other(name: &str, value: &Bound<'_, PyAny>, describe: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = value.py();
        let (name, dtype, shape, copy, identity, source, is_kept, region): Other<'_> =
            describe.call1((name, value))?.extract()?;
        let dtype = Dtype::parse(&dtype).map_err(|error| raise(py, &error))?;
        let refuse = |reason: &str| raise(py, &Error::invalid(format!("tensor `{name}`"), reason));
        let is_part = region.is_some();
        let region =
            region.map_or_else(|| Region::whole(&shape), |(offsets, lengths)| Region { offsets, lengths });
        if !region.fits(&shape) {
            return Err(refuse("has a shard that does not fit into its shape"));
        }
        let too_large = || refuse("is larger than 2^63 bytes");
        raw_length_bytes(&shape, dtype).ok_or_else(too_large)?;
        let expected = raw_length_bytes(&region.lengths, dtype).ok_or_else(too_large)?;
        let memory = Memory::of(&copy, &name, expected, false)?;
        let identity = identity.map(|(address, way)| Identity { address, way });
        // The value of a shard is the caller's own memory where that is dense.
        let when = match (is_kept, is_part) {
            (true, _) => When::Kept,
            (false, true) => When::Now,
            (false, false) => When::NowApart,
        };
        let memory = SourceMemory { memory, when };
        Ok(Self { name, dtype, shape, region, memory, identity, source: Some(source.unbind()) })
    }

    fn is_tied_to(&self, first: &Self) -> bool {
        self.identity == first.identity
            && self.dtype == first.dtype
            && self.shape == first.shape
            && self.region == first.region
    }
}

/// For each leaf the first one that it is the same memory as, if that is another.
fn first_of_ties(found: &[Found]) -> Vec<Option<usize>> {
    let mut order: Vec<(usize, usize)> = found
        .iter()
        .enumerate()
        .filter_map(|(index, one)| Some((one.identity.as_ref()?.address, index)))
        .collect();
    order.sort_unstable();
    let mut ties = vec![None; found.len()];
    for same_address in order.chunk_by(|left, right| left.0 == right.0) {
        let mut firsts: Vec<usize> = Vec::new();
        for &(_, index) in same_address {
            match firsts.iter().find(|&&first| found[index].is_tied_to(&found[first])) {
                Some(&first) => ties[index] = Some(first),
                None => firsts.push(index),
            }
        }
    }
    ties
}

impl Described {
    fn extend(&mut self, found: Vec<Found>, rank: Option<u32>) {
        let ties = if rank.is_none() { first_of_ties(&found) } else { vec![None; found.len()] };
        let tied_to: Vec<Option<String>> =
            ties.into_iter().map(|first| first.map(|first| found[first].name.clone())).collect();
        for (one, tied_to) in found.into_iter().zip(tied_to) {
            self.sources.extend(one.source);
            let source = tied_to.is_none().then(|| {
                self.memories.push(one.memory);
                self.memories.len() - 1
            });
            self.entries.push(EntryInput {
                name: one.name,
                rank,
                dtype: one.dtype,
                stored_dtype: one.dtype,
                region: one.region,
                shape: one.shape,
                tied_to,
                source,
            });
        }
    }
}

impl Described {
    /// What is no rank's own.
    fn holdings(&self) -> Vec<Holding> {
        self.entries
            .iter()
            .filter(|entry| entry.rank.is_none())
            .map(|entry| Holding {
                name: entry.name.clone(),
                dtype: entry.dtype,
                stored_dtype: entry.stored_dtype,
                shape: entry.shape.clone(),
                region: entry.region.clone(),
                tied_to: entry.tied_to.clone(),
            })
            .collect()
    }

    fn write_only(&mut self, mask: &[u8]) -> Result<()> {
        let shared_count = self.entries.iter().filter(|entry| entry.rank.is_none()).count();
        if mask.len() != shared_count {
            let what = format!("a mask of {} for {shared_count} tensors", mask.len());
            return Err(Error::Internal { what });
        }
        let mut shares = mask.iter();
        let entries = std::mem::take(&mut self.entries);
        let mut memories: Vec<Option<SourceMemory>> =
            std::mem::take(&mut self.memories).into_iter().map(Some).collect();
        for mut entry in entries {
            let share = if entry.rank.is_none() { shares.next().copied().unwrap_or(1) } else { 1 };
            let memory = entry.source.take().and_then(|source| memories.get_mut(source)?.take());
            if share == 0 {
                // A tie is told by what it is tied to.
                self.told.extend(memory.map(|memory| (entry, memory)));
                continue;
            }
            if share == 2 && entry.stored_dtype != entry.dtype && entry.tied_to.is_none() {
                self.also_told.insert(entry.name.clone());
            }
            if let Some(memory) = memory {
                entry.source = Some(self.memories.len());
                self.memories.push(memory);
            }
            self.entries.push(entry);
        }
        Ok(())
    }

    /// What is told of tensors that other ranks hold too: with the bytes, row-major in the caller's dtype.
    pub(crate) fn to_tell(&self) -> Vec<(&EntryInput, &[u8])> {
        let told = self.told.iter().map(|(entry, source)| (entry, source.memory.bytes()));
        let also = self.entries.iter().filter(|entry| self.also_told.contains(&entry.name));
        let bytes = |entry: &EntryInput| Some(self.memories.get(entry.source?)?.memory.bytes());
        told.chain(also.filter_map(|entry| Some((entry, bytes(entry)?)))).collect()
    }

    /// True where bytes that are to be told may not have arrived.
    pub(crate) fn tells_kept(&self) -> bool {
        let is_kept = |source: &SourceMemory| source.when == When::Kept;
        let also = self.entries.iter().filter(|entry| self.also_told.contains(&entry.name));
        self.told.iter().any(|(_, source)| is_kept(source))
            || also.filter_map(|entry| self.memories.get(entry.source?)).any(is_kept)
    }
}
