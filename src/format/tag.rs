//! Tags: names that keep a snapshot (FORMAT.md, section "Tag").

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

use super::limits::{SMALL_OBJECT_LIMIT_BYTES, TAG_NAME_LIMIT_BYTES};
use super::place::Place;
use super::sealed_line;
use super::versions::FORMAT_VERSION;

const MAGIC: &str = "varvite-tag";

/// What stands in `tags/<name>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The snapshot that it names.
    pub seq: u64,
    /// Milliseconds since 1970-01-01 UTC when it was set: a label.
    pub created_at_unix_ms: u64,
}

#[derive(Serialize, Deserialize)]
struct Fields {
    magic: String,
    format_version: u32,
    reader_flags: u64,
    seq: u64,
    created_at_unix_ms: u64,
}

impl Tag {
    /// Bytes of the tag.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for seq 0, which no snapshot has.
    pub fn encode(&self) -> Result<Vec<u8>> {
        if self.seq == 0 {
            return Err(Error::invalid("seq of a tag", "must be at least 1"));
        }
        let fields = Fields {
            magic: MAGIC.to_owned(),
            format_version: FORMAT_VERSION,
            reader_flags: 0,
            seq: self.seq,
            created_at_unix_ms: self.created_at_unix_ms,
        };
        sealed_line::seal_object(&fields)
    }

    /// Reads the bytes of the tag `object`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for damage; [`Error::Unsupported`] where a newer version must read it.
    pub fn decode(object: &str, bytes: &[u8]) -> Result<Self> {
        let place = Place::new(object, 0);
        let fields: Fields =
            sealed_line::open_object(place, bytes, SMALL_OBJECT_LIMIT_BYTES, (MAGIC, "tag"))?;
        if fields.seq == 0 {
            return Err(place.corrupt("seq", "at least 1", fields.seq));
        }
        Ok(Self { seq: fields.seq, created_at_unix_ms: fields.created_at_unix_ms })
    }
}

/// Checks a name before it becomes the name of an object.
///
/// # Errors
/// [`Error::InvalidInput`] that says what is legal.
pub fn validate_tag_name(name: &str) -> Result<()> {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    let is_legal = !name.is_empty()
        && name.len() <= TAG_NAME_LIMIT_BYTES
        && !name.starts_with('.')
        && name.bytes().all(legal);
    if is_legal {
        return Ok(());
    }
    Err(Error::invalid(
        format!("tag name `{}`", name.escape_debug()),
        format!(
            "must be 1 to {TAG_NAME_LIMIT_BYTES} characters of A-Z a-z 0-9 . _ - and not start with a dot"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_round_trips() {
        let tag = Tag { seq: u64::MAX, created_at_unix_ms: 1_790_000_000_000 };
        assert_eq!(Tag::decode("tags/best", &tag.encode().unwrap()).unwrap(), tag);
    }

    #[test]
    fn seq_zero_is_neither_written_nor_read() {
        let error = Tag { seq: 0, created_at_unix_ms: 0 }.encode().unwrap_err();
        assert!(matches!(&error, Error::InvalidInput { what, .. } if what == "seq of a tag"), "{error:?}");
        let fields = Fields {
            magic: MAGIC.to_owned(),
            format_version: 1,
            reader_flags: 0,
            seq: 0,
            created_at_unix_ms: 0,
        };
        let error = Tag::decode("tags/best", &sealed_line::seal_object(&fields).unwrap()).unwrap_err();
        assert!(
            matches!(&error, Error::Corrupt { object, what, .. } if object == "tags/best" && what == "seq"),
            "{error:?}"
        );
    }

    #[test]
    fn a_tag_of_the_future_is_unsupported() {
        let fields = Fields {
            magic: MAGIC.to_owned(),
            format_version: 2,
            reader_flags: 0,
            seq: 1,
            created_at_unix_ms: 0,
        };
        let error = Tag::decode("tags/best", &sealed_line::seal_object(&fields).unwrap()).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "format version", object, .. } if object == "tags/best"),
            "{error:?}"
        );
    }

    #[test]
    fn another_magic_is_refused() {
        let fields = Fields {
            magic: "varvite-part".to_owned(),
            format_version: 1,
            reader_flags: 0,
            seq: 1,
            created_at_unix_ms: 0,
        };
        let error = Tag::decode("tags/best", &sealed_line::seal_object(&fields).unwrap()).unwrap_err();
        assert!(
            matches!(&error, Error::Corrupt { what, found, .. } if what == "magic" && found == "varvite-part"),
            "{error:?}"
        );
    }

    #[test]
    fn bytes_after_the_line_are_refused() {
        let mut bytes = Tag { seq: 1, created_at_unix_ms: 0 }.encode().unwrap();
        bytes.extend_from_slice(b"{}\n");
        let error = Tag::decode("tags/best", &bytes).unwrap_err();
        assert!(matches!(&error, Error::Corrupt { .. }), "{error:?}");
    }

    #[test]
    fn tag_names_can_not_leave_the_folder() {
        validate_tag_name("best-2.val_loss").unwrap();
        validate_tag_name(&"a".repeat(100)).unwrap();
        for name in ["", ".", "..", ".hidden", "a/b", "a\\b", "a b", "a\n", "\u{e9}", "a\0", &"a".repeat(101)]
        {
            let error = validate_tag_name(name).unwrap_err();
            assert!(
                matches!(&error, Error::InvalidInput { what, .. } if what.starts_with("tag name `")),
                "{error:?}"
            );
        }
    }
}
