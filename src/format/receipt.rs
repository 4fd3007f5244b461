//! Receipts: what a run was restored from, and how it went on (FORMAT.md, section "Receipt").
//!
//! The engine knows which object it is and which snapshot it is about; all else is the caller's JSON.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::Result;

use super::header::check_depth;
use super::limits::RECEIPT_LIMIT_BYTES;
use super::place::Place;
use super::sealed_line;
use super::validate::refuse_to_write;
use super::versions::FORMAT_VERSION;

const MAGIC: &str = "varvite-receipt";

/// What stands in `receipts/<number>.json`.
#[derive(Clone, Debug)]
pub struct Receipt {
    /// Number in the repository, from 1 in the order in which receipts were written.
    pub number: u64,
    /// The snapshot of this repository that it is about; `None` where the state came from elsewhere.
    pub seq: Option<u64>,
    /// Milliseconds since 1970-01-01 UTC when it was written first: a label.
    pub created_at_unix_ms: u64,
    /// JSON of the caller, on one line.
    pub content: Box<RawValue>,
}

#[derive(Serialize, Deserialize)]
struct Fields {
    magic: String,
    format_version: u32,
    reader_flags: u64,
    number: u64,
    /// Required, though it may be null: what was read is then no longer when it is written again.
    #[serde(deserialize_with = "Option::deserialize")]
    seq: Option<u64>,
    created_at_unix_ms: u64,
    content: Box<RawValue>,
}

impl Receipt {
    /// Bytes of the receipt.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] that names the field that no reader would accept.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check(Place::new("", 0)).map_err(refuse_to_write)?;
        let fields = Fields {
            magic: MAGIC.to_owned(),
            format_version: FORMAT_VERSION,
            reader_flags: 0,
            number: self.number,
            seq: self.seq,
            created_at_unix_ms: self.created_at_unix_ms,
            content: self.content.clone(),
        };
        sealed_line::seal_object_within(&fields, RECEIPT_LIMIT_BYTES, "receipt")
    }

    /// Reads the bytes of the receipt `object`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for damage; [`Error::Unsupported`] where a newer version must read it.
    pub fn decode(object: &str, bytes: &[u8]) -> Result<Self> {
        let place = Place::new(object, 0);
        let fields: Fields = sealed_line::open_object(place, bytes, RECEIPT_LIMIT_BYTES, (MAGIC, "receipt"))?;
        let receipt = Self {
            number: fields.number,
            seq: fields.seq,
            created_at_unix_ms: fields.created_at_unix_ms,
            content: fields.content,
        };
        receipt.check(place)?;
        Ok(receipt)
    }

    fn check(&self, place: Place<'_>) -> Result<()> {
        if self.number == 0 {
            return Err(place.corrupt("number of a receipt", "at least 1", self.number));
        }
        if self.seq == Some(0) {
            return Err(place.corrupt("seq of a receipt", "at least 1, or none", 0));
        }
        if self.content.get().contains(['\n', '\r']) {
            return Err(place.corrupt("content of a receipt", "JSON on one line", "a line break"));
        }
        check_depth(place, "content of a receipt", &self.content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    const OBJECT: &str = "receipts/7.json";

    fn json(text: &str) -> Box<RawValue> {
        RawValue::from_string(text.to_owned()).unwrap()
    }

    fn receipt() -> Receipt {
        Receipt {
            number: 7,
            seq: Some(42),
            created_at_unix_ms: 1_790_000_000_000,
            content: json(r#"{"verdict":null}"#),
        }
    }

    fn fields() -> serde_json::Value {
        serde_json::json!({
            "magic": MAGIC, "format_version": 1, "reader_flags": 0,
            "number": 7, "seq": null, "created_at_unix_ms": 5, "content": [1, 2.50]
        })
    }

    fn refusal(fields: &impl Serialize) -> (String, String) {
        match Receipt::decode(OBJECT, &sealed_line::seal_object(fields).unwrap()).unwrap_err() {
            Error::Corrupt { object, what, found, .. } if object == OBJECT => (what, found),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_receipt_round_trips_and_its_content_is_kept_as_it_was_written() {
        for (seq, text) in [(Some(u64::MAX), r#"{"a": 1.50e0,  "b":[null]}"#), (None, "null")] {
            let receipt = Receipt { seq, content: json(text), ..receipt() };
            let read = Receipt::decode(OBJECT, &receipt.encode().unwrap()).unwrap();
            assert_eq!((read.number, read.seq, read.created_at_unix_ms), (7, seq, 1_790_000_000_000));
            assert_eq!(read.content.get(), text);
        }
    }

    #[test]
    fn what_no_reader_would_accept_is_never_written() {
        let deep = format!("{}{}", "[".repeat(513), "]".repeat(513));
        let long = format!("\"{}\"", "a".repeat(64 << 10));
        for (receipt, field) in [
            (Receipt { number: 0, ..receipt() }, "number of a receipt"),
            (Receipt { seq: Some(0), ..receipt() }, "seq of a receipt"),
            (Receipt { content: json("[1,\n2]"), ..receipt() }, "content of a receipt"),
            (Receipt { content: json(&deep), ..receipt() }, "content of a receipt"),
            (Receipt { content: json(&long), ..receipt() }, "length of a receipt"),
        ] {
            let error = receipt.encode().unwrap_err();
            assert!(matches!(&error, Error::InvalidInput { what, .. } if what == field), "{error:?}");
        }
    }

    #[test]
    fn the_longest_receipt_is_written_and_read() {
        let empty_bytes = Receipt { content: json("\"\""), ..receipt() }.encode().unwrap().len();
        let text = format!("\"{}\"", "a".repeat((64 << 10) - empty_bytes));
        let bytes = Receipt { content: json(&text), ..receipt() }.encode().unwrap();
        assert_eq!(bytes.len(), 64 << 10);
        assert_eq!(Receipt::decode(OBJECT, &bytes).unwrap().content.get(), text);
    }

    #[test]
    fn fields_that_can_not_be_are_refused() {
        assert!(Receipt::decode(OBJECT, &sealed_line::seal_object(&fields()).unwrap()).is_ok());
        for (key, value, expected) in [
            ("number", 0.into(), ("number of a receipt", "0")),
            ("seq", 0.into(), ("seq of a receipt", "0")),
            ("magic", "varvite-tag".into(), ("magic", "varvite-tag")),
            ("content", "a".repeat(64 << 10).into(), ("length", "65702")),
        ] {
            let mut fields = fields();
            fields[key] = value;
            let (what, found) = refusal(&fields);
            assert_eq!((what.as_str(), found.as_str()), expected);
        }
        for key in ["content", "seq", "number"] {
            let mut fields = fields();
            fields.as_object_mut().unwrap().remove(key);
            let (what, found) = refusal(&fields);
            assert!(what == "receipt" && found.starts_with(&format!("missing field `{key}`")), "{found}");
        }
    }

    #[test]
    fn content_of_two_lines_is_refused() {
        let fields = Fields {
            magic: MAGIC.to_owned(),
            format_version: 1,
            reader_flags: 0,
            number: 7,
            seq: None,
            created_at_unix_ms: 5,
            content: json("[1,\n2]"),
        };
        assert_eq!(refusal(&fields), ("content of a receipt".to_owned(), "a line break".to_owned()));
    }

    #[test]
    fn a_receipt_of_the_future_is_unsupported() {
        let mut fields = fields();
        fields["format_version"] = 2.into();
        // Keys of a JSON value are sorted; the magic need not come first to be read.
        let error = Receipt::decode(OBJECT, &sealed_line::seal_object(&fields).unwrap()).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "format version", object, .. } if object == OBJECT),
            "{error:?}"
        );
    }
}
