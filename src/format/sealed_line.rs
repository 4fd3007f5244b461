//! One line of JSON that ends in a digest of itself (FORMAT.md, section "Sealed lines").
//!
//! The digest comes last and has a fixed length, so a reader checks it before it parses anything. It
//! covers the bytes as they stand: there is no canonical form to agree on.

use crate::digest::xxh3_128;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::digest::parse_hex_u128;
use crate::error::{Error, Result};

use super::place::Place;
use super::versions::require_readable_line;

/// Key of the digest of an object that is one sealed line and nothing else.
const OBJECT_DIGEST_KEY: &str = "digest";
const DIGEST_HEX_LENGTH_BYTES: usize = 32;

/// Serializes `fields`, a struct, and appends the digest as the last field `key` and a line break.
pub(super) fn seal(fields: &impl Serialize, key: &str) -> Result<Vec<u8>> {
    let mut line = serde_json::to_vec(fields)
        .map_err(|error| Error::Internal { what: format!("a line of fields is not JSON: {error}") })?;
    line.pop_if(|byte| *byte == b'}');
    let digest = xxh3_128(&line);
    line.extend_from_slice(format!(",\"{key}\":\"{digest:032x}\"}}\n").as_bytes());
    Ok(line)
}

/// Checks the digest of a line and returns its text, still with the digest, without the line break.
pub(super) fn check<'a>(place: Place<'_>, line: &'a [u8], key: &str) -> Result<&'a str> {
    let prefix = format!(",\"{key}\":\"");
    let suffix = "\"}\n";
    let seal_length_bytes = prefix.len().saturating_add(DIGEST_HEX_LENGTH_BYTES).saturating_add(suffix.len());
    let covered_length_bytes = line.len().saturating_sub(seal_length_bytes);
    let (covered, seal) = line.split_at_checked(covered_length_bytes).unwrap_or((line, &[]));
    let stored_digest = str::from_utf8(seal)
        .ok()
        .and_then(|seal| seal.strip_prefix(prefix.as_str())?.strip_suffix(suffix))
        .and_then(parse_hex_u128)
        .ok_or_else(|| {
            place.after(covered_length_bytes as u64).corrupt(
                format!("end of line with its `{key}`"),
                format!("{prefix}<32 hex digits>\"}} and a line break"),
                seal.escape_ascii(),
            )
        })?;
    let digest = xxh3_128(covered);
    if digest != stored_digest {
        return Err(place.corrupt(key, format!("{stored_digest:032x}"), format!("{digest:032x}")));
    }
    let text = line.strip_suffix(b"\n").unwrap_or(line);
    str::from_utf8(text)
        .map_err(|error| place.after(error.valid_up_to() as u64).corrupt("text of the line", "UTF-8", error))
}

/// Bytes of an object that is one sealed line and nothing else.
pub(super) fn seal_object(fields: &impl Serialize) -> Result<Vec<u8>> {
    seal(fields, OBJECT_DIGEST_KEY)
}

/// The same, of an object that no reader accepts above `limit_bytes`; `what` is its name for messages.
///
/// # Errors
/// [`Error::InvalidInput`] where it would be longer.
pub(super) fn seal_object_within(fields: &impl Serialize, limit_bytes: u64, what: &str) -> Result<Vec<u8>> {
    let line = seal_object(fields)?;
    if line.len() as u64 > limit_bytes {
        let reason = format!("expected at most {limit_bytes} bytes, found: {}", line.len());
        return Err(Error::invalid(format!("length of a {what}"), reason));
    }
    Ok(line)
}

/// Checks an object that is one sealed line of at most `limit_bytes` and nothing else, and returns its text.
pub(super) fn check_object<'a>(place: Place<'_>, bytes: &'a [u8], limit_bytes: u64) -> Result<&'a str> {
    if bytes.len() as u64 > limit_bytes {
        return Err(place.corrupt("length", format!("at most {limit_bytes} bytes"), bytes.len()));
    }
    check(place, bytes, OBJECT_DIGEST_KEY)
}

/// Checks an object that is one sealed line of a kind without flags of its own, and parses it; `what` is its name
/// for messages.
pub(super) fn open_object<T: DeserializeOwned>(
    place: Place<'_>,
    bytes: &[u8],
    limit_bytes: u64,
    (magic, what): (&str, &str),
) -> Result<T> {
    let text = check_object(place, bytes, limit_bytes)?;
    require_readable_line(place, text, magic)?;
    parse(place, text, what)
}

/// Parses the text of a checked line.
pub(super) fn parse<T: DeserializeOwned>(place: Place<'_>, text: &str, what: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| place.not_json(what, &error))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    const PLACE: Place<'static> = Place { object: "tags/best", offset_bytes: 100 };

    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    struct Fields {
        seq: u64,
    }

    fn corrupt_parts(error: &Error) -> (u64, &str, &str) {
        match error {
            Error::Corrupt { offset_bytes, what, found, .. } => (*offset_bytes, what, found),
            other => panic!("not damage: {other:?}"),
        }
    }

    #[test]
    fn a_sealed_line_opens() {
        let line = seal(&Fields { seq: 7 }, "digest").unwrap();
        let text = check(PLACE, &line, "digest").unwrap();
        assert!(text.starts_with("{\"seq\":7,\"digest\":\""), "{text}");
        assert_eq!(parse::<Fields>(PLACE, text, "tag").unwrap(), Fields { seq: 7 });
    }

    #[test]
    fn a_changed_byte_is_refused_with_both_digests() {
        let mut line = seal(&Fields { seq: 7 }, "digest").unwrap();
        line[7] = b'8';
        let error = check(PLACE, &line, "digest").unwrap_err();
        let (offset_bytes, what, found) = corrupt_parts(&error);
        assert_eq!((offset_bytes, what, found.len()), (100, "digest", 32));
    }

    #[test]
    fn a_line_without_its_line_break_is_refused_where_the_seal_should_stand() {
        let mut line = seal(&Fields { seq: 7 }, "digest").unwrap();
        line.pop();
        let error = check(PLACE, &line, "digest").unwrap_err();
        assert_eq!(corrupt_parts(&error).1, "end of line with its `digest`");
    }

    #[test]
    fn a_line_shorter_than_a_seal_is_refused() {
        let error = check(PLACE, b"{}\n", "digest").unwrap_err();
        assert_eq!(corrupt_parts(&error), (100, "end of line with its `digest`", "{}\\n"));
    }

    #[test]
    fn an_upper_case_digest_is_refused() {
        let line = seal(&Fields { seq: 7 }, "digest").unwrap();
        let upper =
            String::from_utf8(line).unwrap().replace(['a', 'b', 'c', 'd', 'e', 'f'], "A").into_bytes();
        let error = check(PLACE, &upper, "digest").unwrap_err();
        assert_eq!(corrupt_parts(&error).1, "end of line with its `digest`");
    }

    #[test]
    fn a_missing_field_is_refused_with_the_reason() {
        let error = parse::<Fields>(PLACE, "{\"step\":7}", "tag").unwrap_err();
        let (offset_bytes, what, found) = corrupt_parts(&error);
        assert_eq!((offset_bytes, what), (109, "tag"));
        assert!(found.starts_with("missing field `seq`"), "{found}");
    }

    #[test]
    fn a_duplicate_field_is_refused() {
        let error = parse::<Fields>(PLACE, "{\"seq\":7,\"seq\":8}", "tag").unwrap_err();
        assert!(corrupt_parts(&error).2.starts_with("duplicate field `seq`"), "{error}");
    }

    #[test]
    fn a_number_with_a_fraction_is_no_integer() {
        let error = parse::<Fields>(PLACE, "{\"seq\":7.0}", "tag").unwrap_err();
        assert!(corrupt_parts(&error).2.starts_with("invalid type: floating point"), "{error}");
    }
}
