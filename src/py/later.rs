//! Sources of a save that its own thread copies: tensors that stay as they are for a while.
//!
//! The thread holds the interpreter only to let go of tensors, never while bytes are copied.

use std::fmt;

use pyo3::intern;
use pyo3::prelude::*;

use crate::error::{Error, Result};
use crate::stage::Later;

use super::buffer::Memory;
use super::tensors::SaveTensors;

/// Memory of a source, and when its bytes are taken.
pub(crate) struct SourceMemory {
    pub(crate) memory: Memory,
    pub(crate) when: When,
}

/// When the bytes of a source are taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum When {
    /// Before the call returns, from a tensor of the caller.
    Now,
    /// Before the call returns, from an array or from a copy.
    NowApart,
    /// By the thread of the save, from a clone whose memory nobody writes.
    Cloned,
    /// By the thread of the save, from the caller's tensor, which must not have been written meanwhile:
    /// the name of its entry, and the version torch counts for it.
    Promised { name: String, version: u64 },
    /// While the save writes: nobody else uses this memory until then.
    Kept,
}

/// Later sources with their owners, as the save's thread takes them over.
pub(crate) struct LaterMemories {
    /// `None` for what was let go of.
    sources: Vec<Option<SourceMemory>>,
    /// Waits until the kept sources hold their bytes.
    arrival: Option<Py<PyAny>>,
}

impl LaterMemories {
    fn new(sources: Vec<SourceMemory>, arrival: Option<Py<PyAny>>) -> Self {
        Self { sources: sources.into_iter().map(Some).collect(), arrival }
    }

    fn source(&self, position: usize) -> Option<&SourceMemory> {
        self.sources.get(position)?.as_ref()
    }
}

impl Later for LaterMemories {
    fn count(&self) -> usize {
        self.sources.len()
    }

    fn is_kept(&self, position: usize) -> bool {
        self.source(position).is_some_and(|source| source.when == When::Kept)
    }

    fn arrive(&mut self) -> Result<()> {
        let Some(arrival) = self.arrival.take() else { return Ok(()) };
        let failure =
            |text: String| Error::store("copy tensors from", "the device")(std::io::Error::other(text));
        Python::try_attach(|py| arrival.call0(py).map(drop).map_err(|error| failure(error.to_string())))
            .unwrap_or_else(|| Err(failure("the interpreter has ended".to_owned())))
    }

    fn bytes(&self, position: usize) -> &[u8] {
        self.source(position).map_or(&[], |source| source.memory.bytes())
    }

    fn let_go(&mut self, positions: &[usize]) -> Result<()> {
        let sources: Vec<SourceMemory> =
            positions.iter().filter_map(|&position| self.sources.get_mut(position)?.take()).collect();
        let is_promised = |source: &SourceMemory| matches!(source.when, When::Promised { .. });
        if sources.is_empty() {
            return Ok(());
        }
        // After the end of the interpreter nobody reads or writes tensors, and their memory goes with it.
        let checked = Python::try_attach(move |py| {
            let broken = sources.iter().filter(|source| is_promised(source)).find_map(|source| {
                let When::Promised { name, version } = &source.when else { return None };
                (version_of(source.memory.owner(py)) != Some(*version)).then(|| name.clone())
            });
            drop(sources);
            broken
        });
        match checked.flatten() {
            Some(name) => Err(Error::invalid(
                format!("state while it was copied: tensor `{name}`"),
                "was written between the save and the next step of its optimizer",
            )),
            None => Ok(()),
        }
    }
}

/// How often torch saw a tensor being written; `None` for one that it doesn't count for.
pub(crate) fn version_of(tensor: &Bound<'_, PyAny>) -> Option<u64> {
    tensor.getattr(intern!(tensor.py(), "_version")).ok()?.extract().ok()
}

impl Drop for LaterMemories {
    fn drop(&mut self) {
        let (sources, arrival) = (std::mem::take(&mut self.sources), self.arrival.take());
        if arrival.is_some() || sources.iter().any(Option::is_some) {
            // An object dropped by a thread that is not attached would live until some other call.
            let _ = Python::try_attach(move |_| drop((sources, arrival)));
        }
    }
}

impl fmt::Debug for LaterMemories {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("LaterMemories").field("count", &self.sources.len()).finish_non_exhaustive()
    }
}

/// Parts the memory of a save: what its call takes, by source, and what its thread takes.
pub(crate) fn split_later(
    py: Python<'_>,
    memories: Vec<SourceMemory>,
    tensors: &Bound<'_, SaveTensors>,
) -> (Vec<Option<SourceMemory>>, Option<Box<dyn Later>>) {
    let is_now = |source: &SourceMemory| matches!(source.when, When::Now | When::NowApart);
    let mut later = Vec::new();
    let now = memories
        .into_iter()
        .map(|source| {
            if is_now(&source) {
                Some(source)
            } else {
                later.push(source);
                None
            }
        })
        .collect();
    let keeps_any = later.iter().any(|source| source.when == When::Kept);
    let arrival = if keeps_any { tensors.get().arrival(py) } else { None };
    let later = LaterMemories::new(later, arrival);
    (now, (later.count() > 0).then(|| Box::new(later) as _))
}

/// The bytes of what the call of a save takes.
pub(crate) fn bytes_of(now: &[Option<SourceMemory>]) -> Vec<Option<&[u8]>> {
    now.iter().map(|source| source.as_ref().map(|source| source.memory.bytes())).collect()
}
