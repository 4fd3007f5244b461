//! The lease: who may write to a bucket (FORMAT.md, section "Lease").

use serde::{Deserialize, Serialize};

use crate::error::Result;

use super::limits::{LEASE_MILLISECONDS_LIMIT, LEASE_TEXT_LIMIT_BYTES, SMALL_OBJECT_LIMIT_BYTES};
use super::names::is_id;
use super::place::Place;
use super::sealed_line;
use super::validate::refuse_to_write;
use super::versions::FORMAT_VERSION;

const MAGIC: &str = "varvite-lease";

/// What stands in `lease.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Grows by one with each writer that takes the bucket.
    pub epoch: u64,
    /// Tells this taking of the lease from all others: 32 hex digits.
    pub nonce: String,
    /// Nonce of the first taking since which each holder has gone on from the folder of the one before.
    pub since_nonce: String,
    /// Grows by one with each renewal, so that no two renewals have the same bytes.
    pub renewal: u64,
    /// Milliseconds without a renewal after which another writer may take it.
    pub milliseconds: u64,
    /// The holder has let go of it.
    pub released: bool,
    /// The holder, for people.
    pub holder: String,
    /// Name of the holder's host.
    pub host: String,
    /// One run of the holder's kernel, and its process namespace; empty where the system tells none.
    pub boot_id: String,
    /// The holder's process.
    pub process_number: u64,
    /// When that process began, in the unit of its kernel; 0 where the system doesn't tell.
    pub process_started: u64,
}

#[derive(Serialize, Deserialize)]
struct Fields {
    magic: String,
    format_version: u32,
    reader_flags: u64,
    epoch: u64,
    nonce: String,
    since_nonce: String,
    renewal: u64,
    milliseconds: u64,
    released: bool,
    holder: String,
    host: String,
    boot_id: String,
    process_number: u64,
    process_started: u64,
}

impl Lease {
    /// Bytes of the lease.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] that names the field that no reader would accept.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check(Place::new("", 0)).map_err(refuse_to_write)?;
        let fields = Fields {
            magic: MAGIC.to_owned(),
            format_version: FORMAT_VERSION,
            reader_flags: 0,
            epoch: self.epoch,
            nonce: self.nonce.clone(),
            since_nonce: self.since_nonce.clone(),
            renewal: self.renewal,
            milliseconds: self.milliseconds,
            released: self.released,
            holder: self.holder.clone(),
            host: self.host.clone(),
            boot_id: self.boot_id.clone(),
            process_number: self.process_number,
            process_started: self.process_started,
        };
        sealed_line::seal_object_within(&fields, SMALL_OBJECT_LIMIT_BYTES, "lease")
    }

    /// Reads the bytes of the lease `object`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for damage; [`Error::Unsupported`] where a newer version must read it.
    pub fn decode(object: &str, bytes: &[u8]) -> Result<Self> {
        let place = Place::new(object, 0);
        let fields: Fields =
            sealed_line::open_object(place, bytes, SMALL_OBJECT_LIMIT_BYTES, (MAGIC, "lease"))?;
        let lease = Self {
            epoch: fields.epoch,
            nonce: fields.nonce,
            since_nonce: fields.since_nonce,
            renewal: fields.renewal,
            milliseconds: fields.milliseconds,
            released: fields.released,
            holder: fields.holder,
            host: fields.host,
            boot_id: fields.boot_id,
            process_number: fields.process_number,
            process_started: fields.process_started,
        };
        lease.check(place)?;
        Ok(lease)
    }

    fn check(&self, place: Place<'_>) -> Result<()> {
        if self.epoch == 0 {
            return Err(place.corrupt("epoch", "at least 1", self.epoch));
        }
        for (what, nonce) in [("nonce", &self.nonce), ("since_nonce", &self.since_nonce)] {
            if !is_id(nonce) {
                return Err(place.corrupt(what, "32 lower-case hex digits", nonce.escape_debug()));
            }
        }
        if !(1..=LEASE_MILLISECONDS_LIMIT).contains(&self.milliseconds) {
            let expected = format!("1 to {LEASE_MILLISECONDS_LIMIT}");
            return Err(place.corrupt("milliseconds", expected, self.milliseconds));
        }
        for (what, text) in [("holder", &self.holder), ("host", &self.host), ("boot_id", &self.boot_id)] {
            if text.len() > LEASE_TEXT_LIMIT_BYTES {
                let expected = format!("at most {LEASE_TEXT_LIMIT_BYTES} bytes");
                return Err(place.corrupt(what, expected, format!("{} bytes", text.len())));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn sample() -> Lease {
        Lease {
            epoch: 3,
            nonce: "00112233445566778899aabbccddeeff".to_owned(),
            since_nonce: "ffeeddccbbaa99887766554433221100".to_owned(),
            renewal: 7,
            milliseconds: 30_000,
            released: false,
            holder: "process 42 on host-1".to_owned(),
            host: "host-1".to_owned(),
            boot_id: "boot".to_owned(),
            process_number: 42,
            process_started: 99,
        }
    }

    fn refused(lease: &Lease) -> String {
        match lease.encode().unwrap_err() {
            Error::InvalidInput { what, .. } => what,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_lease_round_trips() {
        let lease = Lease { epoch: u64::MAX, released: true, ..sample() };
        assert_eq!(Lease::decode("lease.json", &lease.encode().unwrap()).unwrap(), lease);
    }

    #[test]
    fn what_no_reader_takes_is_not_written() {
        assert_eq!(refused(&Lease { epoch: 0, ..sample() }), "epoch");
        assert_eq!(refused(&Lease { since_nonce: String::new(), ..sample() }), "since_nonce");
        assert_eq!(refused(&Lease { nonce: "x".repeat(32), ..sample() }), "nonce");
        assert_eq!(refused(&Lease { milliseconds: 0, ..sample() }), "milliseconds");
        assert_eq!(refused(&Lease { milliseconds: 86_400_001, ..sample() }), "milliseconds");
        assert_eq!(refused(&Lease { host: "h".repeat(513), ..sample() }), "host");
    }

    #[test]
    fn a_flipped_bit_is_damage() {
        let mut bytes = sample().encode().unwrap();
        let at = bytes.windows(7).position(|word| word == b"renewal").unwrap() + 9;
        bytes[at] ^= 1;
        let error = Lease::decode("lease.json", &bytes).unwrap_err();
        assert!(matches!(&error, Error::Corrupt { what, .. } if what == "digest"), "{error:?}");
    }
}
