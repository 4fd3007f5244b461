//! Tickets: what the ranks of one save must agree on, as a text that goes from the coordinator to each
//! (FORMAT.md, section "Ticket").
//!
//! A ticket is no object: it is handed over by whatever connects the ranks, and may be cut short there.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::{Error, Result};

use super::header::{Metric, UniqueMap, check_header};
use super::limits::{CHUNK_BYTES_RANGE, TICKET_LIMIT_BYTES};
use super::model::Header;
use super::place::Place;
use super::sealed_line;
use super::validate::refuse_to_write;
use super::versions::FORMAT_VERSION;

const MAGIC: &str = "varvite-ticket";
/// Where the text is said to lie, in messages.
const OBJECT: &str = "ticket of a session";

/// One session, as the coordinator that began it describes it to the ranks.
#[derive(Clone, Debug)]
pub struct Ticket {
    /// Facts of the snapshot to be; sizes and digests are not known yet.
    pub header: Header,
    /// Raw bytes of a chunk, the same on all ranks.
    pub chunk_bytes: u64,
    /// Changes with each manifest that the coordinator replaces, and with each coordinator: a rank that knows
    /// the base from its own part of it relies on that as long as this is the same.
    pub generation: String,
    /// The snapshot whose chunks may be referred to.
    pub base: Option<TicketBase>,
}

/// The snapshot that the parts of a session build on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TicketBase {
    /// Its commit number.
    pub seq: u64,
    /// XXH3-64 of the names in its pack table, each followed by a line break, as 16 hex digits: a manifest
    /// that a merge has replaced since, or that is not visible yet, has another.
    pub pack_table: String,
}

#[derive(Serialize, Deserialize)]
struct Fields {
    magic: String,
    format_version: u32,
    reader_flags: u64,
    repository_id: String,
    session_id: String,
    seq: u64,
    step: u64,
    #[serde(deserialize_with = "Option::deserialize")]
    parent: Option<u64>,
    created_at_unix_ms: u64,
    world_size: u32,
    metrics: UniqueMap<Metric>,
    metadata: Box<RawValue>,
    chunk_bytes: u64,
    generation: String,
    #[serde(deserialize_with = "Option::deserialize")]
    base: Option<TicketBase>,
}

impl Ticket {
    /// The text, on one line without a line break.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] that names the field that no reader would accept.
    pub fn encode(&self) -> Result<String> {
        self.check(Place::new("", 0)).map_err(refuse_to_write)?;
        let header = &self.header;
        let metrics = header.metrics.iter().map(|(name, &value)| (name.clone(), Metric(value))).collect();
        let line = sealed_line::seal_object(&Fields {
            magic: MAGIC.to_owned(),
            format_version: FORMAT_VERSION,
            reader_flags: 0,
            repository_id: header.repository_id.clone(),
            session_id: header.session_id.clone(),
            seq: header.seq,
            step: header.step,
            parent: header.parent,
            created_at_unix_ms: header.created_at_unix_ms,
            world_size: header.world_size,
            metrics: UniqueMap(metrics),
            metadata: header.metadata.clone(),
            chunk_bytes: self.chunk_bytes,
            generation: self.generation.clone(),
            base: self.base.clone(),
        })?;
        let text = String::from_utf8(line)
            .map_err(|error| Error::Internal { what: format!("a ticket is not UTF-8: {error}") })?;
        Ok(text.trim_end_matches('\n').to_owned())
    }

    /// Reads the text of a ticket.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where it is none, or not whole; [`Error::Unsupported`] where a newer version
    /// wrote it.
    pub fn decode(text: &str) -> Result<Self> {
        Self::read(text).map_err(|error| match error {
            Error::Corrupt { what, expected, found, .. } => Error::invalid(
                "session id",
                format!("it is no whole ticket of a session: {what}: expected {expected}, found: {found}"),
            ),
            other => other,
        })
    }

    fn read(text: &str) -> Result<Self> {
        let place = Place::new(OBJECT, 0);
        let line = format!("{text}\n");
        let fields: Fields =
            sealed_line::open_object(place, line.as_bytes(), TICKET_LIMIT_BYTES, (MAGIC, "ticket"))?;
        let metrics: BTreeMap<String, f64> =
            fields.metrics.0.into_iter().map(|(name, Metric(value))| (name, value)).collect();
        let ticket = Self {
            header: Header {
                repository_id: fields.repository_id,
                session_id: fields.session_id,
                seq: fields.seq,
                step: fields.step,
                parent: fields.parent,
                created_at_unix_ms: fields.created_at_unix_ms,
                world_size: fields.world_size,
                metrics,
                metadata: fields.metadata,
                raw_bytes: 0,
                stored_bytes: 0,
                nonfinite: BTreeMap::new(),
                self_contained: false,
                state_digest: "0".repeat(64),
            },
            chunk_bytes: fields.chunk_bytes,
            generation: fields.generation,
            base: fields.base,
        };
        ticket.check(place)?;
        Ok(ticket)
    }

    fn check(&self, place: Place<'_>) -> Result<()> {
        check_header(place, &self.header)?;
        if !self.chunk_bytes.is_power_of_two() || !CHUNK_BYTES_RANGE.contains(&self.chunk_bytes) {
            let (least, most) = (CHUNK_BYTES_RANGE.start(), CHUNK_BYTES_RANGE.end());
            let expected = format!("a power of two from {least} to {most}");
            return Err(place.corrupt("chunk size", expected, self.chunk_bytes));
        }
        match &self.base {
            Some(base) if !(1..self.header.seq).contains(&base.seq) => {
                Err(place.corrupt("base", format!("at least 1 and below seq {}", self.header.seq), base.seq))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket() -> Ticket {
        let header = Header {
            repository_id: "a".repeat(32),
            session_id: "b".repeat(32),
            seq: 7,
            step: 100,
            parent: Some(5),
            created_at_unix_ms: 1_790_000_000_000,
            world_size: 4,
            metrics: BTreeMap::from([("loss".to_owned(), f64::INFINITY)]),
            metadata: RawValue::from_string(r#"{"dict":[]}"#.to_owned()).unwrap(),
            raw_bytes: 0,
            stored_bytes: 0,
            nonfinite: BTreeMap::new(),
            self_contained: false,
            state_digest: "0".repeat(64),
        };
        let base = TicketBase { seq: 6, pack_table: "0123456789abcdef".to_owned() };
        Ticket { header, chunk_bytes: 1 << 20, generation: "c.0".to_owned(), base: Some(base) }
    }

    #[test]
    fn a_ticket_comes_back_as_it_was() {
        let text = ticket().encode().unwrap();
        assert!(!text.contains('\n'));
        let read = Ticket::decode(&text).unwrap();
        assert_eq!(read.header.metrics, BTreeMap::from([("loss".to_owned(), f64::INFINITY)]));
        assert_eq!((read.header.seq, read.header.parent, read.header.world_size), (7, Some(5), 4));
        assert_eq!((read.chunk_bytes, &read.base), (1 << 20, &ticket().base));
        assert_eq!(read.encode().unwrap(), text);
    }

    #[test]
    fn what_is_no_whole_ticket_is_an_invalid_session_id() {
        let text = ticket().encode().unwrap();
        for cut in [0, 1, text.len() / 2, text.len() - 1] {
            let error = Ticket::decode(&text[..cut]).unwrap_err();
            assert!(matches!(&error, Error::InvalidInput { what, .. } if what == "session id"), "{error}");
        }
        for damaged in
            [text.replace("\"seq\":7", "\"seq\":8"), format!("{text}\n{text}"), "step-7".to_owned()]
        {
            assert!(matches!(Ticket::decode(&damaged), Err(Error::InvalidInput { .. })), "{damaged}");
        }
    }

    #[test]
    fn a_ticket_that_no_reader_would_take_is_not_written() {
        let mut newer = ticket();
        newer.base.as_mut().unwrap().seq = 7;
        assert!(matches!(newer.encode(), Err(Error::InvalidInput { .. })));
        let odd = Ticket { chunk_bytes: 5000, ..ticket() };
        assert!(matches!(odd.encode(), Err(Error::InvalidInput { .. })));
    }
}
