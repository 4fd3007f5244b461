//! What the methods of `Engine` for saves of several ranks share.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::Result;
use crate::format::model::Replica;
use crate::format::ticket::Ticket;
use crate::plan::{self, Share};
use crate::repository::{PartRequest, Repository};

use super::engine::json;
use super::error::raise;
use super::tensors::{Described, SaveTensors};

/// What a rank writes, and the tensors it is made of.
pub(super) struct Part<'py> {
    pub(super) ticket: &'py str,
    pub(super) rank: u32,
    pub(super) structure: String,
    pub(super) rank_structure: Option<String>,
}

impl Part<'_> {
    /// The request of a part; takes the entries of what was described.
    pub(super) fn request(
        self,
        py: Python<'_>,
        repository: &Repository,
        tensors: &SaveTensors,
        described: &mut Described,
    ) -> PyResult<PartRequest> {
        let replicas = tell(py, repository, tensors, described)?;
        let entries = std::mem::take(&mut described.entries);
        let make = || -> Result<PartRequest> {
            let structure = json("structure", self.structure)?;
            let rank_structure = self.rank_structure.map(|text| json("rank structure", text)).transpose()?;
            let ticket = Ticket::decode(self.ticket)?;
            Ok(PartRequest { ticket, rank: self.rank, entries, replicas, structure, rank_structure })
        };
        make().map_err(|error| raise(py, &error))
    }
}

/// The digests of what other ranks hold too.
fn tell(
    py: Python<'_>,
    repository: &Repository,
    tensors: &SaveTensors,
    described: &Described,
) -> PyResult<Vec<Replica>> {
    if described.tells_kept()
        && let Some(arrival) = tensors.arrival(py)
    {
        arrival.call0(py)?;
    }
    let to_tell = described.to_tell();
    py.detach(|| repository.tell(&to_tell)).map_err(|error| raise(py, &error))
}

/// Who writes what of the state that several ranks hold, from what `SaveTensors.holdings` gives on each: one
/// byte for each tensor of a rank, as `SaveTensors.write_only` takes it.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "arguments are extracted from Python as owned values")]
pub(crate) fn plan_writers(py: Python<'_>, holdings: Vec<Vec<u8>>) -> PyResult<Vec<Bound<'_, PyBytes>>> {
    let decide = || -> Result<Vec<Vec<u8>>> {
        let holdings =
            holdings.iter().map(|bytes| plan::decode_holdings(bytes)).collect::<Result<Vec<_>>>()?;
        let byte = |share| match share {
            Share::Tell => 0,
            Share::Write => 1,
            Share::WriteAndTell => 2,
        };
        let shares = plan::plan_shares(&holdings)?;
        Ok(shares.into_iter().map(|own| own.into_iter().map(byte).collect()).collect())
    };
    let masks = py.detach(decide).map_err(|error| raise(py, &error))?;
    Ok(masks.iter().map(|mask| PyBytes::new(py, mask)).collect())
}
