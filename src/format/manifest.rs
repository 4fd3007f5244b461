//! The manifest: the list of all entries of a snapshot (FORMAT.md, section "Manifest").
//!
//! Publishing it is the commit, so a decoded manifest is checked whole: whoever holds a [`Manifest`] may
//! trust every index, offset and length in it, but not that the packs exist or hold what it says.

use crate::error::Result;

use super::model::{Body, Header, Manifest};
use super::place::Place;
use super::state_digest::state_digest;
use super::two_line::{self, Kind};
use super::validate::{self, Scope};

pub use super::two_line::{BodyEncoding, BodyLocation};

/// What the first line of a manifest says.
#[derive(Clone, Debug, PartialEq)]
pub struct HeaderLine {
    /// The snapshot in short.
    pub header: Header,
    /// Length of the line with its line break: offset of the body in the object.
    pub line_length_bytes: u64,
    /// The body behind the line.
    pub body: BodyLocation,
}

/// Bytes of a manifest. Equal arguments give equal bytes as long as the body is too short to be
/// compressed; a compressed one depends on the version of zstd.
///
/// # Errors
/// [`Error::InvalidInput`](crate::error::Error::InvalidInput) that names the field or entry that no reader would accept.
pub fn encode(header: &Header, body: &Body) -> Result<Vec<u8>> {
    validate("", header, body).map_err(validate::refuse_to_write)?;
    encode_completed(header, body)
}

/// As [`encode`], of what [`complete`] has checked already: of many ranks a second look takes as long as all else.
///
/// # Errors
/// As [`encode`], where it does not fit into an object.
pub fn encode_completed(header: &Header, body: &Body) -> Result<Vec<u8>> {
    two_line::encode(Kind::Manifest, None, header, body, &[])
}

/// Reads the first line of the manifest `object` from its first bytes; `None` where they end before the
/// line does: read more, or, if that was the whole object, take it for cut off, as [`decode`] does.
///
/// Without the body the claims about it stay claims: sizes, `self_contained`, the state digest.
///
/// # Errors
/// [`Error::Corrupt`](crate::error::Error::Corrupt) for damage; [`Error::Unsupported`](crate::error::Error::Unsupported) where a newer version must read it.
pub fn decode_header(object: &str, prefix: &[u8]) -> Result<Option<HeaderLine>> {
    let line = two_line::decode_line(Place::new(object, 0), Kind::Manifest, prefix)?;
    Ok(line.map(|line| HeaderLine {
        header: line.header,
        line_length_bytes: line.length_bytes,
        body: line.body,
    }))
}

/// Reads the whole manifest `object`.
///
/// # Errors
/// [`Error::Corrupt`](crate::error::Error::Corrupt) for damage; [`Error::Unsupported`](crate::error::Error::Unsupported) where a newer version must read it.
pub fn decode(object: &str, bytes: &[u8]) -> Result<Manifest> {
    let place = Place::new(object, 0);
    let line = decode_header(object, bytes)?.ok_or_else(|| {
        place.after(bytes.len() as u64).corrupt("header", "a line break at its end", "the end of the object")
    })?;
    let body_place = place.after(line.line_length_bytes);
    let stored = bytes.get(line.line_length_bytes as usize..).unwrap_or_default();
    let (body, _) = two_line::decode_body(body_place, Kind::Manifest, &line.body, stored)?;
    validate::check(place, body_place, &line.header, &body, Scope::Snapshot)?;
    Ok(Manifest { header: line.header, body })
}

/// Completes the header of a body that was made here: `raw_bytes`, `self_contained` and the state digest; and
/// checks both against all other rules.
///
/// # Errors
/// As [`validate`].
pub fn complete(object: &str, header: &mut Header, body: &Body) -> Result<()> {
    let place = Place::new(object, 0);
    let sums = validate::check_body(place, header, body, Scope::Snapshot)?;
    (header.raw_bytes, header.self_contained) = (sums.raw_bytes, sums.self_contained);
    header.state_digest = state_digest(body);
    super::header::check_header(place, header)
}

/// Checks a header and a body against all rules of a manifest (FORMAT.md, section "Rules of a manifest").
///
/// # Errors
/// [`Error::Corrupt`](crate::error::Error::Corrupt) at offset 0 of `object`, which names the entry or field.
pub fn validate(object: &str, header: &Header, body: &Body) -> Result<()> {
    let place = Place::new(object, 0);
    super::header::check_header(place, header)?;
    validate::check(place, place, header, body, Scope::Snapshot)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use crate::digest::xxh3_128;

    use super::super::header::EncodedHeader;
    use super::super::{limits, samples, sealed_line};
    use super::*;
    use crate::error::Error;

    const OBJECT: &str = "snapshots/2.json";

    fn sample() -> Vec<u8> {
        encode(&samples::header(), &samples::body()).unwrap()
    }

    /// A sample whose body has so many entries that it is compressed.
    fn large_body() -> Body {
        let mut body = samples::body();
        let entries = (0..200)
            .map(|index| samples::entry(&format!("a{index:03}"), &[8], vec![samples::chunk(0, 64, 32)]));
        body.entries.splice(0..0, entries);
        body
    }

    /// A manifest with a right header digest whatever stands in it.
    fn forged(header: &Header, location: &BodyLocation, body: &[u8]) -> Vec<u8> {
        let fields = EncodedHeader::new(Kind::Manifest, None, header, 0, location);
        [&sealed_line::seal(&fields, "header_digest").unwrap(), body].concat()
    }

    fn location_of(body: &[u8]) -> BodyLocation {
        BodyLocation {
            encoding: BodyEncoding::Json,
            length_bytes: body.len() as u64,
            raw_length_bytes: body.len() as u64,
            digest: xxh3_128(body),
        }
    }

    /// A sample with another text in its header and a digest that is right.
    fn resealed(from: &str, to: &str) -> Vec<u8> {
        let bytes = sample();
        let (line, body) = bytes.split_at(bytes.iter().position(|&byte| byte == b'\n').unwrap() + 1);
        let text = String::from_utf8(line.to_vec()).unwrap();
        let fields = text.split_once(",\"header_digest\"").unwrap().0;
        assert!(fields.contains(from), "{fields}");
        let fields = fields.replace(from, to);
        let digest = xxh3_128(fields.as_bytes());
        [format!("{fields},\"header_digest\":\"{digest:032x}\"}}\n").as_bytes(), body].concat()
    }

    fn corrupt_parts(error: &Error) -> (u64, &str, &str) {
        match error {
            Error::Corrupt { object, offset_bytes, what, found, .. } => {
                assert_eq!(object, OBJECT);
                (*offset_bytes, what, found)
            }
            other => panic!("not damage: {other:?}"),
        }
    }

    #[test]
    fn a_manifest_round_trips() {
        let manifest = decode(OBJECT, &sample()).unwrap();
        assert_eq!(manifest.header, samples::header());
        assert_eq!(
            serde_json::to_string(&manifest.body).unwrap(),
            serde_json::to_string(&samples::body()).unwrap()
        );
        assert_eq!(encode(&manifest.header, &manifest.body).unwrap(), sample());
    }

    #[test]
    fn a_large_body_is_compressed_and_comes_back() {
        let body = large_body();
        let bytes = encode(&samples::header_of(&body), &body).unwrap();
        let line = decode_header(OBJECT, &bytes).unwrap().unwrap();
        assert_eq!(line.body.encoding, BodyEncoding::Zstd);
        assert!(line.body.length_bytes < line.body.raw_length_bytes);
        assert_eq!(decode(OBJECT, &bytes).unwrap().body.entries, body.entries);
    }

    #[test]
    fn the_header_is_read_from_a_prefix_that_holds_the_line() {
        let bytes = sample();
        let line = decode_header(OBJECT, &bytes).unwrap().unwrap();
        let length = line.line_length_bytes as usize;
        assert_eq!(line.header, samples::header());
        assert_eq!(bytes[length - 1], b'\n');
        assert_eq!(decode_header(OBJECT, &bytes[..length]).unwrap(), Some(line));
        for shorter in 0..length {
            assert_eq!(decode_header(OBJECT, &bytes[..shorter]).unwrap(), None, "{shorter}");
        }
    }

    #[test]
    fn a_line_that_never_ends_is_refused() {
        let mut bytes = sample();
        bytes.retain(|&byte| byte != b'\n');
        bytes.resize(limits::HEADER_LINE_LIMIT_BYTES as usize - 1, b' ');
        assert_eq!(decode_header(OBJECT, &bytes).unwrap(), None);
        bytes.push(b' ');
        let error = decode_header(OBJECT, &bytes).unwrap_err();
        assert_eq!(corrupt_parts(&error), (0, "header", "none"));
    }

    #[test]
    fn another_magic_is_refused_at_its_first_bytes() {
        let error = decode_header(OBJECT, b"PK\x03\x04").unwrap_err();
        assert_eq!(corrupt_parts(&error), (0, "magic", "PK\\x03\\x04"));
    }

    #[test]
    fn a_manifest_cut_in_its_header_is_refused_at_its_end() {
        let error = decode(OBJECT, &sample()[..100]).unwrap_err();
        assert_eq!(corrupt_parts(&error), (100, "header", "the end of the object"));
        let error = decode(OBJECT, b"").unwrap_err();
        assert_eq!(corrupt_parts(&error), (0, "header", "the end of the object"));
    }

    #[test]
    fn a_manifest_of_another_length_is_refused_at_its_body() {
        let line_length_bytes = decode_header(OBJECT, &sample()).unwrap().unwrap().line_length_bytes;
        let mut bytes = sample();
        bytes.push(b' ');
        let error = decode(OBJECT, &bytes).unwrap_err();
        assert_eq!(
            (corrupt_parts(&error).0, corrupt_parts(&error).1),
            (line_length_bytes, "length of the body")
        );
        bytes.truncate(bytes.len() - 2);
        let error = decode(OBJECT, &bytes).unwrap_err();
        assert_eq!(
            (corrupt_parts(&error).0, corrupt_parts(&error).1),
            (line_length_bytes, "length of the body")
        );
    }

    #[test]
    fn a_changed_header_is_refused() {
        let mut bytes = sample();
        bytes[200] ^= 1;
        let error = decode(OBJECT, &bytes).unwrap_err();
        assert_eq!((corrupt_parts(&error).0, corrupt_parts(&error).1), (0, "header_digest"));
    }

    #[test]
    fn a_changed_body_is_refused() {
        let mut bytes = sample();
        let line_length_bytes = decode_header(OBJECT, &bytes).unwrap().unwrap().line_length_bytes;
        *bytes.last_mut().unwrap() ^= 1;
        let error = decode(OBJECT, &bytes).unwrap_err();
        assert_eq!(
            (corrupt_parts(&error).0, corrupt_parts(&error).1),
            (line_length_bytes, "digest of the body")
        );
    }

    #[test]
    fn a_manifest_of_the_future_is_unsupported() {
        let bytes = resealed("\"format_version\":1", "\"format_version\":2");
        let error = decode_header(OBJECT, &bytes).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "format version", object, found, .. }
            if object == OBJECT && found == "2"),
            "{error:?}"
        );
        let bytes = resealed("\"reader_flags\":0", "\"reader_flags\":16");
        let error = decode_header(OBJECT, &bytes).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "reader flag", found, .. }
            if found == "0x10 of format version 1"),
            "{error:?}"
        );
        let bytes = resealed("\"encoding\":\"json\"", "\"encoding\":\"lz9\"");
        let error = decode_header(OBJECT, &bytes).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "body encoding", found, .. } if found == "`lz9`"),
            "{error:?}"
        );
    }

    #[test]
    fn unknown_fields_and_writer_flags_are_ignored() {
        let bytes = resealed("\"writer_flags\":0", "\"writer_flags\":255,\"mood\":[\"good\"]");
        assert_eq!(decode(OBJECT, &bytes).unwrap().header, samples::header());
    }

    #[test]
    fn a_field_given_twice_is_refused() {
        let bytes = resealed("\"step\":40", "\"step\":40,\"step\":41");
        let error = decode_header(OBJECT, &bytes).unwrap_err();
        assert!(corrupt_parts(&error).2.starts_with("duplicate field `step`"), "{error}");
    }

    #[test]
    fn a_body_digest_that_is_no_digest_is_refused() {
        let digest = format!("{:032x}", decode_header(OBJECT, &sample()).unwrap().unwrap().body.digest);
        let error = decode_header(OBJECT, &resealed(&digest, "short")).unwrap_err();
        assert_eq!(corrupt_parts(&error), (0, "digest of the body", "short"));
    }

    #[test]
    fn impossible_lengths_of_the_body_are_refused_before_it_is_read() {
        let location = location_of(b"{}");
        let cases = [
            (
                "raw length of the body",
                BodyLocation { raw_length_bytes: limits::BODY_LIMIT_BYTES + 1, ..location.clone() },
            ),
            ("length of the body", BodyLocation { length_bytes: 3, ..location.clone() }),
            ("length of the body", BodyLocation { length_bytes: 1, ..location.clone() }),
            (
                "raw length of the body",
                BodyLocation {
                    raw_length_bytes: 10_000_000,
                    encoding: BodyEncoding::Zstd,
                    ..location.clone()
                },
            ),
        ];
        for (what, location) in cases {
            let error = decode_header(OBJECT, &forged(&samples::header(), &location, b"")).unwrap_err();
            assert!(corrupt_parts(&error).1.starts_with(what), "{error}");
        }
    }

    #[test]
    fn a_body_that_is_not_json_is_refused_at_the_byte() {
        let body = b"{\"chunk_bytes\":4096,]";
        let bytes = forged(&samples::header(), &location_of(body), body);
        let line_length_bytes = (bytes.len() - body.len()) as u64;
        let error = decode(OBJECT, &bytes).unwrap_err();
        assert_eq!((corrupt_parts(&error).0, corrupt_parts(&error).1), (line_length_bytes + 20, "body"));
    }

    #[test]
    fn a_body_that_is_not_utf8_is_refused() {
        let body = b"{\"\xff\":0}";
        let error = decode(OBJECT, &forged(&samples::header(), &location_of(body), body)).unwrap_err();
        assert_eq!(corrupt_parts(&error).1, "text of the body");
    }

    #[test]
    fn a_body_that_breaks_a_rule_is_refused_at_the_body() {
        let mut body = samples::body();
        body.entries.swap(0, 1);
        let header = samples::header_of(&body);
        let text = serde_json::to_vec(&body).unwrap();
        let bytes = forged(&header, &location_of(&text), &text);
        let error = decode(OBJECT, &bytes).unwrap_err();
        assert_eq!(corrupt_parts(&error), ((bytes.len() - text.len()) as u64, "entries", "model.bias"));
    }

    #[test]
    fn what_breaks_a_rule_is_never_written() {
        let mut body = samples::body();
        body.entries.swap(0, 1);
        let error = encode(&samples::header_of(&body), &body).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidInput { what, reason } if what == "entries"
            && reason == "expected ascending by name and rank, each once, found: model.bias"),
            "{error:?}"
        );
    }

    #[test]
    fn a_header_beyond_the_limit_is_never_written() {
        let metrics: BTreeMap<String, f64> = (0..9_000).map(|index| (format!("{index:0120}"), 0.5)).collect();
        let error = encode(&Header { metrics, ..samples::header() }, &samples::body()).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidInput { what, .. } if what == "metrics and metadata"),
            "{error:?}"
        );
    }
}
