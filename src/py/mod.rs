//! The Python module `varvite._native`: the only place that names pyo3.
//!
//! Each method is one crossing into the facade, detached from the interpreter while it works. No work
//! at import: no thread, no logging, no environment.

use pyo3::prelude::*;

mod buffer;
mod convert;
mod engine;
mod error;
mod job;
mod later;
mod marking;
mod reader;
mod remote;
mod session;
mod tensors;
mod torch;
mod wait;
mod walk;
mod watchdog;

#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<job::SaveJob>()?;
    module.add_class::<reader::SnapshotReader>()?;
    module.add_class::<tensors::SaveTensors>()?;
    module.add_class::<walk::Walk>()?;
    module.add_class::<watchdog::Watchdog>()?;
    module.add_function(wrap_pyfunction!(tensors::describe_dense, module)?)?;
    module.add_function(wrap_pyfunction!(session::plan_writers, module)?)?;
    module.add_function(wrap_pyfunction!(remote::pull_snapshots, module)?)?;
    module.add_function(wrap_pyfunction!(remote::connection_of, module)?)?;
    module.add_function(wrap_pyfunction!(remote::probe_bucket, module)?)?;
    module.add_function(wrap_pyfunction!(remote::read_clear, module)?)?;
    module.add_class::<buffer::MappedPack>()?;
    // Set and not added: they are no names that the stub would have to know.
    #[cfg(feature = "kill-points")]
    {
        module.setattr("kill_at", wrap_pyfunction!(kill_at, module)?)?;
        module.setattr("KILL_POINTS", crate::kill::POINTS)?;
    }
    Ok(())
}

/// Kills this process at the `nth` passage of a named point; only in the build for tests.
#[cfg(feature = "kill-points")]
#[pyfunction]
fn kill_at(name: &str, nth: u32) {
    crate::kill::arm(name, nth);
}
