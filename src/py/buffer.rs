//! Memory of tensors and arrays, as slices that travel with their owner.
//!
//! A pointer is never taken without asking its object what it is: contiguous, on the CPU, of the length
//! that dtype and shape need. While a slice lives, its owner is referenced, so that the memory stays;
//! that nobody resizes or writes it from another thread meanwhile is the caller's duty, which the
//! docstrings of `save` and `load` state.
#![expect(unsafe_code, reason = "tensor memory is a foreign pointer; each block has its proof")]

use std::ffi::c_int;
use std::path::Path;

use memmap2::{MmapAsRawDesc, MmapMut, MmapOptions};
use pyo3::exceptions::{PyBufferError, PyRuntimeError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::error::{Error, Result};
use crate::tensor::{Dtype, raw_length_bytes};

use super::error::raise;
use super::torch::Torch;

/// Memory of one Python object, alive as long as this value.
pub(crate) struct Memory {
    address: usize,
    length_bytes: usize,
    owner: Py<PyAny>,
}

/// A tensor whose memory is its bytes.
pub(crate) struct DenseTensor {
    /// Element type.
    pub(crate) dtype: Dtype,
    /// Length of each dimension, in elements.
    pub(crate) shape: Vec<u64>,
    /// Its bytes.
    pub(crate) memory: Memory,
}

impl DenseTensor {
    /// Asks a tensor what it is; `None` for one that lies anywhere but row-major in CPU memory as it is.
    ///
    /// A copy-on-write clone stays one, unless it is to be written to.
    pub(crate) fn of(torch: &Torch, tensor: &Bound<'_, PyAny>, writable: bool) -> PyResult<Option<Self>> {
        match ask(torch, tensor, writable) {
            // The answer of a tensor without memory of its own, such as one inside of a transform.
            Err(error) if error.is_instance_of::<PyRuntimeError>(tensor.py()) => Ok(None),
            other => other,
        }
    }
}

fn ask(torch: &Torch, tensor: &Bound<'_, PyAny>, writable: bool) -> PyResult<Option<DenseTensor>> {
    let py = tensor.py();
    let is = |attribute: &Bound<'_, PyString>| tensor.getattr(attribute)?.is_truthy();
    let says = |method: &Bound<'_, PyString>| tensor.call_method0(method)?.is_truthy();
    // Nobody need ask for the layout: a sparse tensor has no address, and a nested one no shape.
    if !is(intern!(py, "is_cpu"))? || !says(intern!(py, "is_contiguous"))? || says(intern!(py, "is_neg"))? {
        return Ok(None);
    }
    let Some(dtype) = torch.dtype(&tensor.getattr(intern!(py, "dtype"))?) else { return Ok(None) };
    // Torch lets only complex tensors have the bit of a conjugate.
    if dtype.is_complex() && says(intern!(py, "is_conj"))? {
        return Ok(None);
    }
    let size = tensor.getattr(intern!(py, "shape"))?.cast_into::<PyTuple>()?;
    let shape = size.iter().map(|length| length.extract()).collect::<PyResult<Vec<u64>>>()?;
    let Some(length_bytes) = raw_length_bytes(&shape, dtype) else { return Ok(None) };
    let address = if writable {
        tensor.call_method0(intern!(py, "data_ptr"))?.extract()?
    } else {
        torch.address(tensor, dtype)?
    };
    if length_bytes > 0 && address == 0 {
        return Ok(None);
    }
    let memory = Memory { address, length_bytes: length_bytes as usize, owner: tensor.clone().unbind() };
    Ok(Some(DenseTensor { dtype, shape, memory }))
}

impl Memory {
    /// Describes the memory of a `torch.Tensor` or of a NumPy array (anything with
    /// `__array_interface__`), which must be contiguous in C order, on the CPU, and exactly
    /// `expected_bytes` long.
    pub(crate) fn of(
        value: &Bound<'_, PyAny>,
        name: &str,
        expected_bytes: u64,
        writable: bool,
    ) -> PyResult<Self> {
        let py = value.py();
        let memory = match Torch::loaded(py)? {
            Some(torch) if torch.is_tensor(value)? => {
                DenseTensor::of(torch, value, writable)?
                    .ok_or_else(|| refuse(py, name, "the tensor is not dense, row-major memory of the CPU"))?
                    .memory
            }
            _ => array_memory(value, name, writable)?,
        };
        if memory.length_bytes as u64 != expected_bytes {
            let found = memory.length_bytes;
            return Err(refuse(
                py,
                name,
                &format!("it has {found} bytes, but its dtype and shape need {expected_bytes}"),
            ));
        }
        Ok(memory)
    }

    /// Where the bytes start; any number where there are none.
    pub(crate) fn address(&self) -> usize {
        self.address
    }

    /// Number of the bytes.
    pub(crate) fn length_bytes(&self) -> usize {
        self.length_bytes
    }

    /// The object whose memory it is.
    pub(crate) fn owner<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.owner.bind(py)
    }

    /// The bytes, for reading.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.length_bytes == 0 {
            return &[];
        }
        // SAFETY: the object said, in `ask` or in `array_memory`, that `length_bytes` bytes lie at
        // `address`, and it is kept alive by `owner` for as long as `self` is borrowed. Nobody frees
        // or resizes it meanwhile (the caller's duty, see the module's text). Any bit pattern is a
        // valid `u8`.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.length_bytes) }
    }
}

/// Writable memory of several Python objects that do not overlap.
pub(crate) struct Targets(Vec<Memory>);

impl Targets {
    /// Takes targets whose memory is disjoint.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where two overlap.
    pub(crate) fn new(memories: Vec<Memory>, names: &[&str]) -> Result<Self> {
        let mut order: Vec<usize> =
            (0..memories.len()).filter(|&index| memories[index].length_bytes > 0).collect();
        order.sort_by_key(|&index| memories[index].address);
        for pair in order.windows(2) {
            let (left, right) = (&memories[pair[0]], &memories[pair[1]]);
            if left.address + left.length_bytes > right.address {
                let name = |index: usize| names.get(index).copied().unwrap_or("?");
                return Err(Error::invalid(
                    format!("target `{}`", name(pair[1])),
                    format!("shares memory with `{}`: load a tie through one of its names", name(pair[0])),
                ));
            }
        }
        Ok(Self(memories))
    }

    /// The bytes of each target, for writing.
    pub(crate) fn slices(&mut self) -> Vec<&mut [u8]> {
        self.0
            .iter_mut()
            .map(|memory| {
                if memory.length_bytes == 0 {
                    return &mut [] as &mut [u8];
                }
                // SAFETY: as in `Memory::bytes`; moreover the stretches are pairwise disjoint (checked
                // in `new`), `self` is borrowed mutably, and the object said that it is writable.
                unsafe { std::slice::from_raw_parts_mut(memory.address as *mut u8, memory.length_bytes) }
            })
            .collect()
    }
}

fn array_memory(array: &Bound<'_, PyAny>, name: &str, writable: bool) -> PyResult<Memory> {
    let py = array.py();
    let interface = array
        .getattr(intern!(py, "__array_interface__"))
        .map_err(|_| refuse(py, name, "it is neither a torch.Tensor nor a NumPy array"))?;
    let (address, read_only): (usize, bool) = interface.get_item(intern!(py, "data"))?.extract()?;
    let contiguous: bool = array.getattr(intern!(py, "flags"))?.get_item("C_CONTIGUOUS")?.extract()?;
    if !contiguous {
        return Err(refuse(py, name, "it is not contiguous"));
    }
    if writable && read_only {
        return Err(refuse(py, name, "it is read-only"));
    }
    let length_bytes = array.getattr(intern!(py, "nbytes"))?.extract()?;
    if length_bytes > 0 && address == 0 {
        return Err(refuse(py, name, "it has no memory"));
    }
    Ok(Memory { address, length_bytes, owner: array.clone().unbind() })
}

fn refuse(py: Python<'_>, name: &str, reason: &str) -> PyErr {
    raise(py, &Error::invalid(format!("memory of `{name}`"), reason))
}

/// A pack mapped into memory, private to this process: writing to it never changes the file.
///
/// Exposes its bytes through the buffer protocol (`torch.frombuffer`). The mapping lives as long as any
/// tensor made from it.
#[pyclass(frozen, module = "varvite._native")]
pub(crate) struct MappedPack {
    map: MmapMut,
}

impl MappedPack {
    /// Maps a whole file copy-on-write.
    pub(crate) fn open(path: &Path, file: impl MmapAsRawDesc) -> Result<Self> {
        // SAFETY: a published pack is immutable: Varvite never writes or truncates one, and a deletion
        // leaves the mapping intact. Another program that truncates it makes later reads raise SIGBUS;
        // the docstring of `load(mmap=True)` says so, and the default mode never maps.
        let map = unsafe { MmapOptions::new().no_reserve_swap().map_copy(file) };
        map.map(|map| Self { map }).map_err(Error::store("map", path.display().to_string()))
    }
}

#[pymethods]
impl MappedPack {
    fn __len__(&self) -> usize {
        self.map.len()
    }

    /// Fills a buffer view.
    ///
    /// # Safety
    /// Called by the interpreter with a valid `view`, as the buffer protocol demands.
    #[expect(clippy::needless_pass_by_value, reason = "the signature that pyo3 asks for")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        let map = &slf.get().map;
        // SAFETY: `view` is valid (checked not null; the protocol promises the rest). The address and
        // length are those of the mapping, which `slf` owns; PyBuffer_FillInfo takes a reference to
        // `slf` that the view holds until it is released, so the memory outlives the view. The mapping
        // is private and writable, hence `readonly` 0; who writes through two views at once is the
        // caller's business, as for any bytearray.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(
                view,
                slf.as_ptr(),
                map.as_ptr().cast_mut().cast(),
                map.len().cast_signed(),
                0,
                flags,
            )
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
