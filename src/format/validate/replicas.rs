//! The rules of what a part tells of replicas (FORMAT.md, section "Part").

use crate::error::Result;
use crate::tensor::raw_length_bytes;

use super::super::limits;
use super::super::model::Replica;
use super::super::place::Place;
use super::{region_fits, shown};

/// Checks replicas by themselves: which entries they belong to is known when all parts are.
pub(in super::super) fn check_replicas(place: Place<'_>, replicas: &[Replica]) -> Result<()> {
    if replicas.len() > limits::REPLICA_COUNT_LIMIT {
        return Err(place.corrupt(
            "replicas",
            format!("at most {}", limits::REPLICA_COUNT_LIMIT),
            replicas.len(),
        ));
    }
    let mut previous = None;
    for replica in replicas {
        let position = (replica.name.as_str(), &replica.offsets);
        if previous.is_some_and(|previous| previous >= position) {
            let expected = "ascending by name and offsets, each once";
            return Err(place.corrupt("replicas", expected, shown(&replica.name)));
        }
        previous = Some(position);
        check_replica(place, replica)?;
    }
    Ok(())
}

fn check_replica(place: Place<'_>, replica: &Replica) -> Result<()> {
    let Replica { name, dtype, shape, offsets, lengths, digest: _ } = replica;
    if name.len() > limits::ENTRY_NAME_LIMIT_BYTES {
        let expected = format!("at most {} bytes", limits::ENTRY_NAME_LIMIT_BYTES);
        return Err(place.corrupt("name of a replica", expected, name.len()));
    }
    let of = |what: &str| format!("{what} of a replica of `{}`", shown(name));
    if shape.len() > limits::DIMENSION_COUNT_LIMIT {
        let expected = format!("at most {} dimensions", limits::DIMENSION_COUNT_LIMIT);
        return Err(place.corrupt(of("shape"), expected, shape.len()));
    }
    if raw_length_bytes(shape, *dtype).is_none() {
        return Err(place.corrupt(of("shape"), "a length below 2^63 bytes", format!("{shape:?}")));
    }
    if !region_fits(shape, offsets, lengths) {
        let expected = format!("with elements, inside the shape {shape:?}");
        let found = format!("offsets {offsets:?}, lengths {lengths:?}");
        return Err(place.corrupt(of("region"), expected, found));
    }
    Ok(())
}
