//! The marker `varvite.json`: says that a folder is a repository, and which one (FORMAT.md, "Marker").

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

use super::limits::SMALL_OBJECT_LIMIT_BYTES;
use super::names::{MARKER_NAME, is_id};
use super::place::Place;
use super::sealed_line;
use super::versions::{
    ENCRYPTION_FLAG, ENCRYPTION_WRITER_FLAG, FORMAT_VERSION, KNOWN_READER_FLAGS, require_line,
    require_writable, unsupported,
};

const MAGIC: &str = "varvite-repository";
/// The one cipher of version 1.
const ALGORITHM: &str = "aes-256-gcm";

/// What stands in `varvite.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marker {
    /// Newest format version that objects of the repository may have.
    pub format_version: u32,
    /// Features that a reader must know.
    pub reader_flags: u64,
    /// Features that a writer must know.
    pub writer_flags: u64,
    /// Identity of the repository: 32 lower-case hex digits, drawn when it was made.
    pub repository_id: String,
    /// What only the right key gives, where the repository is encrypted: 32 lower-case hex digits.
    pub key_check: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Fields {
    magic: String,
    format_version: u32,
    reader_flags: u64,
    writer_flags: u64,
    repository_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    encryption: Option<EncryptionFields>,
}

#[derive(Serialize, Deserialize)]
struct EncryptionFields {
    algorithm: String,
    key_check: String,
}

impl Marker {
    /// Marker of a new repository of the current version.
    #[must_use]
    pub fn new(repository_id: String) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            reader_flags: 0,
            writer_flags: 0,
            repository_id,
            key_check: None,
        }
    }

    /// Marker of a new encrypted repository of the current version.
    #[must_use]
    pub fn encrypted(repository_id: String, key_check: String) -> Self {
        Self {
            reader_flags: ENCRYPTION_FLAG,
            writer_flags: ENCRYPTION_WRITER_FLAG,
            key_check: Some(key_check),
            ..Self::new(repository_id)
        }
    }

    /// Bytes of the marker.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where the identity is not 32 lower-case hex digits.
    pub fn encode(&self) -> Result<Vec<u8>> {
        if !is_id(&self.repository_id) {
            return Err(Error::invalid("repository id", "must be 32 lower-case hex digits"));
        }
        let fields = Fields {
            magic: MAGIC.to_owned(),
            format_version: self.format_version,
            reader_flags: self.reader_flags,
            writer_flags: self.writer_flags,
            repository_id: self.repository_id.clone(),
            encryption: self
                .key_check
                .clone()
                .map(|key_check| EncryptionFields { algorithm: ALGORITHM.to_owned(), key_check }),
        };
        sealed_line::seal_object(&fields)
    }

    /// Reads the bytes of a marker.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for damage; [`Error::Unsupported`] where a newer version must read it.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let place = Place::new(MARKER_NAME, 0);
        let text = sealed_line::check_object(place, bytes, SMALL_OBJECT_LIMIT_BYTES)?;
        require_line(place, text, MAGIC, KNOWN_READER_FLAGS | ENCRYPTION_FLAG)?;
        let fields: Fields = sealed_line::parse(place, text, "marker")?;
        if !is_id(&fields.repository_id) {
            return Err(place.corrupt("repository id", "32 lower-case hex digits", fields.repository_id));
        }
        let is_encrypted = fields.reader_flags & ENCRYPTION_FLAG != 0;
        let key_check = fields.encryption.map(|found| found.key_check_at(place)).transpose()?;
        if is_encrypted != key_check.is_some() {
            let expected = if is_encrypted { "what its reader flags announce" } else { "none" };
            return Err(place.corrupt("encryption", expected, if is_encrypted { "none" } else { "some" }));
        }
        Ok(Self {
            format_version: fields.format_version,
            reader_flags: fields.reader_flags,
            writer_flags: fields.writer_flags,
            repository_id: fields.repository_id,
            key_check,
        })
    }

    /// Says whether this build may write to the repository.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the marker has a writer flag that this build does not know.
    pub fn require_writable(&self) -> Result<()> {
        require_writable(MARKER_NAME, self.writer_flags)
    }
}

impl EncryptionFields {
    fn key_check_at(self, place: Place<'_>) -> Result<String> {
        if self.algorithm != ALGORITHM {
            let found = format!("`{}`", self.algorithm.escape_debug());
            return Err(unsupported("algorithm of encryption", place.object, found));
        }
        if !is_id(&self.key_check) {
            return Err(place.corrupt("key check", "32 lower-case hex digits", self.key_check));
        }
        Ok(self.key_check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPOSITORY_ID: &str = "00112233445566778899aabbccddeeff";

    fn sealed(json_fields: &serde_json::Value) -> Vec<u8> {
        sealed_line::seal_object(json_fields).unwrap()
    }

    #[test]
    fn a_marker_round_trips() {
        let marker = Marker { writer_flags: 4, ..Marker::new(REPOSITORY_ID.to_owned()) };
        assert_eq!(Marker::decode(&marker.encode().unwrap()).unwrap(), marker);
    }

    #[test]
    fn the_marker_of_an_encrypted_repository_round_trips_and_stops_who_does_not_know_of_that() {
        let marker = Marker::encrypted(REPOSITORY_ID.to_owned(), "f".repeat(32));
        assert_eq!(Marker::decode(&marker.encode().unwrap()).unwrap(), marker);
        let text = String::from_utf8(marker.encode().unwrap()).unwrap();
        let fields = format!(
            r#""reader_flags":4,"writer_flags":1,"repository_id":"{REPOSITORY_ID}","encryption":{{"algorithm":"aes-256-gcm","key_check":"{}"}},"#,
            "f".repeat(32)
        );
        assert!(text.contains(&fields), "{text}");
    }

    #[test]
    fn encryption_that_can_not_be_is_refused() {
        let check = "f".repeat(32);
        let line = |flags: u64, algorithm: &str, check: &str| {
            sealed(&serde_json::json!({
                "magic": MAGIC, "format_version": 1, "reader_flags": flags, "writer_flags": flags / 4,
                "repository_id": REPOSITORY_ID,
                "encryption": {"algorithm": algorithm, "key_check": check}
            }))
        };
        let refused = |bytes: &[u8]| match Marker::decode(bytes).unwrap_err() {
            Error::Corrupt { what, found, .. } => (what, found),
            Error::Unsupported { what, found, .. } => (what.to_owned(), found),
            other => panic!("{other:?}"),
        };
        assert_eq!(Marker::decode(&line(4, ALGORITHM, &check)).unwrap().key_check, Some(check.clone()));
        assert_eq!(refused(&line(0, ALGORITHM, &check)), ("encryption".to_owned(), "some".to_owned()));
        assert_eq!(refused(&line(4, ALGORITHM, "x")), ("key check".to_owned(), "x".to_owned()));
        let newer = ("algorithm of encryption".to_owned(), "`rot13`".to_owned());
        assert_eq!(refused(&line(4, "rot13", &check)), newer);
        let none = sealed(&serde_json::json!({
            "magic": MAGIC, "format_version": 1, "reader_flags": 4, "writer_flags": 1,
            "repository_id": REPOSITORY_ID
        }));
        assert_eq!(refused(&none), ("encryption".to_owned(), "none".to_owned()));
    }

    #[test]
    fn a_wrong_id_is_never_written() {
        let error = Marker::new("x".to_owned()).encode().unwrap_err();
        assert!(matches!(&error, Error::InvalidInput { what, .. } if what == "repository id"), "{error:?}");
    }

    #[test]
    fn a_wrong_id_is_refused() {
        let bytes = sealed(&serde_json::json!({
            "magic": MAGIC, "format_version": 1, "reader_flags": 0, "writer_flags": 0, "repository_id": "ABC"
        }));
        let error = Marker::decode(&bytes).unwrap_err();
        assert!(
            matches!(&error, Error::Corrupt { what, found, .. } if what == "repository id" && found == "ABC"),
            "{error:?}"
        );
    }

    #[test]
    fn json_of_another_program_is_refused() {
        let error =
            Marker::decode(b"{\"name\":\"somebody else's file\",\"length\":1234567890123456789012345}\n")
                .unwrap_err();
        assert!(
            matches!(&error, Error::Corrupt { object, what, .. }
            if object == MARKER_NAME && what == "end of line with its `digest`"),
            "{error:?}"
        );
    }

    #[test]
    fn another_magic_is_refused() {
        let bytes = sealed(&serde_json::json!({
            "magic": "varvite-tag", "format_version": 1, "reader_flags": 0, "writer_flags": 0, "repository_id": REPOSITORY_ID
        }));
        let error = Marker::decode(&bytes).unwrap_err();
        assert!(
            matches!(&error, Error::Corrupt { what, found, .. } if what == "magic" && found == "varvite-tag"),
            "{error:?}"
        );
    }

    #[test]
    fn a_newer_version_is_unsupported_whatever_its_other_fields() {
        let bytes = sealed(&serde_json::json!({
            "magic": MAGIC, "format_version": 3, "reader_flags": 0, "repository_id": {"algorithm": "new"}
        }));
        let error = Marker::decode(&bytes).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "format version", found, .. } if found == "3"),
            "{error:?}"
        );
    }

    #[test]
    fn an_unknown_reader_flag_is_unsupported() {
        let marker = Marker { reader_flags: 8, ..Marker::new(REPOSITORY_ID.to_owned()) };
        let error = Marker::decode(&marker.encode().unwrap()).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "reader flag", found, .. }
            if found == "0x8 of format version 1"),
            "{error:?}"
        );
    }

    #[test]
    fn an_unknown_writer_flag_lets_readers_in_and_keeps_writers_out() {
        let marker = Marker { writer_flags: 2, ..Marker::new(REPOSITORY_ID.to_owned()) };
        let error = Marker::decode(&marker.encode().unwrap()).unwrap().require_writable().unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "writer flag", found, .. } if found == "0x2"),
            "{error:?}"
        );
    }

    #[test]
    fn a_long_file_is_refused_by_its_length() {
        let error = Marker::decode(&[b' '; 5_000]).unwrap_err();
        assert!(
            matches!(&error, Error::Corrupt { what, found, .. } if what == "length" && found == "5000"),
            "{error:?}"
        );
    }
}
