//! Which tensors of a save its own thread copies, after the caller has gone on.

use std::collections::HashMap;

use pyo3::intern;
use pyo3::prelude::*;

use super::buffer::DenseTensor;
use super::later::{SourceMemory, When, version_of};
use super::tensors::Described;
use super::torch::Torch;

impl Described {
    /// Replaces the plain, dense tensors of at least so many bytes by lazy clones; returns how many.
    pub(super) fn clone_lazily(
        &mut self,
        py: Python<'_>,
        torch: &Torch,
        least_bytes: usize,
    ) -> PyResult<usize> {
        let mut count = 0;
        for source in &mut self.memories {
            let SourceMemory { memory, when } = source;
            if *when != When::Now || memory.length_bytes() < least_bytes {
                continue;
            }
            let Some(clone) = torch.lazy_clone(memory.owner(py))? else { continue };
            let Some(dense) = DenseTensor::of(torch, &clone, false)? else { continue };
            // Elsewhere it would be no clone, but a copy made on this thread.
            if dense.memory.address() == memory.address() {
                *source = SourceMemory { memory: dense.memory, when: When::Cloned };
                count += 1;
            }
        }
        Ok(count)
    }

    /// Marks the tensors of at least so many bytes that lie in the memory of one of these, from its start;
    /// returns how many.
    pub(super) fn promise(
        &mut self,
        py: Python<'_>,
        torch: &Torch,
        tensors: &[Bound<'_, PyAny>],
        least_bytes: usize,
    ) -> PyResult<usize> {
        let mut promised = HashMap::with_capacity(tensors.len());
        for tensor in tensors {
            if let Some(dense) = DenseTensor::of(torch, tensor, false)? {
                promised.insert(dense.memory.address(), dense.memory.length_bytes());
            }
        }
        let mut count = 0;
        for entry in &self.entries {
            let Some(source) = entry.source.and_then(|source| self.memories.get_mut(source)) else {
                continue;
            };
            let memory = &source.memory;
            let length_bytes = memory.length_bytes();
            let is_inside = promised.get(&memory.address()).is_some_and(|length| length_bytes <= *length);
            if source.when == When::Now && length_bytes >= least_bytes && is_inside {
                // It holds the memory also where the caller gives the tensor itself another one.
                let alias = memory.owner(py).call_method0(intern!(py, "detach"))?;
                let held = DenseTensor::of(torch, &alias, false)?
                    .filter(|dense| dense.memory.address() == memory.address());
                // A tensor without a version, such as one made for inference, can't be seen to change.
                if let (Some(held), Some(version)) = (held, version_of(&alias)) {
                    let when = When::Promised { name: entry.name.clone(), version };
                    *source = SourceMemory { memory: held.memory, when };
                    count += 1;
                }
            }
        }
        Ok(count)
    }
}
