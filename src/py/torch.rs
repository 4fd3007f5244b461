//! What the bindings know of torch, once the program has imported it: types, dtypes, and how to ask for an
//! address.

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use crate::tensor::Dtype;

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

/// Objects of torch that are asked for again and again.
pub(crate) struct Torch {
    tensor: Py<PyType>,
    parameter: Py<PyType>,
    /// Where the storage starts, without a copy-on-write clone copying itself as `data_ptr` makes it.
    storage_address: Option<Py<PyAny>>,
    /// Makes a clone that shares memory until one of the two is written.
    lazy_clone: Option<Py<PyAny>>,
    dtypes: Vec<(Py<PyAny>, Dtype)>,
}

impl Torch {
    /// Torch if the program has imported it; nothing is imported here.
    pub(crate) fn loaded(py: Python<'_>) -> PyResult<Option<&'static Self>> {
        if let Some(known) = TORCH.get(py) {
            return Ok(Some(known));
        }
        let modules = py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?;
        let torch = modules.call_method1(intern!(py, "get"), (intern!(py, "torch"),))?;
        if torch.is_none() {
            return Ok(None);
        }
        TORCH.get_or_try_init(py, || Self::of_module(&torch)).map(Some)
    }

    fn of_module(torch: &Bound<'_, PyAny>) -> PyResult<Self> {
        let dtypes = Dtype::all()
            // An older torch lacks some of them; then no tensor has them either.
            .filter_map(|dtype| Some((torch.getattr(dtype.name()).ok()?.unbind(), dtype)))
            .collect();
        Ok(Self {
            tensor: torch.getattr("Tensor")?.cast_into::<PyType>()?.unbind(),
            parameter: torch.getattr("nn")?.getattr("Parameter")?.cast_into::<PyType>()?.unbind(),
            storage_address: torch.getattr("_C")?.getattr("_data_address").ok().map(Bound::unbind),
            lazy_clone: torch.getattr("_lazy_clone").ok().map(Bound::unbind),
            dtypes,
        })
    }

    /// True for a tensor of whatever class.
    pub(crate) fn is_tensor(&self, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.is_plain(value) || value.is_instance(self.tensor.bind(value.py()))?)
    }

    /// True for a tensor or a parameter itself: an object of another class may be more than its bytes.
    pub(crate) fn is_plain(&self, value: &Bound<'_, PyAny>) -> bool {
        let kind = value.get_type();
        kind.is(&self.tensor) || kind.is(&self.parameter)
    }

    /// The dtype, if it can be saved.
    pub(crate) fn dtype(&self, dtype: &Bound<'_, PyAny>) -> Option<Dtype> {
        self.dtypes.iter().find(|(known, _)| dtype.is(known)).map(|&(_, known)| known)
    }

    /// Address of the first element of a tensor; 0 for one without memory.
    pub(crate) fn address(&self, tensor: &Bound<'_, PyAny>, dtype: Dtype) -> PyResult<usize> {
        let py = tensor.py();
        let Some(storage_address) = &self.storage_address else {
            return tensor.call_method0(intern!(py, "data_ptr"))?.extract();
        };
        let start: usize = storage_address.bind(py).call1((tensor,))?.extract()?;
        if start == 0 {
            return Ok(0);
        }
        let offset: usize = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
        let offset_bytes = offset.checked_mul(dtype.size_bytes() as usize);
        Ok(offset_bytes.and_then(|offset_bytes| start.checked_add(offset_bytes)).unwrap_or(0))
    }

    /// A clone that shares memory until one of the two is written; `None` where this torch, or the storage
    /// of this tensor, knows no such thing. To be called without gradients.
    pub(crate) fn lazy_clone<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = tensor.py();
        // Without an address that is read without a write, the clone would be a copy.
        let (Some(lazy_clone), Some(_)) = (&self.lazy_clone, &self.storage_address) else { return Ok(None) };
        match lazy_clone.bind(py).call1((tensor,)) {
            Err(error) if error.is_instance_of::<PyRuntimeError>(py) => Ok(None),
            other => other.map(Some),
        }
    }
}
