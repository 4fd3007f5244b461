//! Format version and feature flags: who may read and who may write (FORMAT.md, section "Versions").

use serde::Deserialize;

use crate::error::{Error, Result};

use super::model::{Body, Codec};
use super::place::Place;
use super::sealed_line;

/// Newest format version that this build reads, and the one it writes.
pub const FORMAT_VERSION: u32 = 1;

/// Reader flag: chunks are coded, by other codecs than `store`.
pub const CODING_FLAG: u64 = 1;

/// Reader flag: what is stored are casts of the caller's values, in another dtype or scaled.
pub const CASTING_FLAG: u64 = 1 << 1;

/// Reader flag of markers and of the heads of encrypted objects: the repository is encrypted.
pub const ENCRYPTION_FLAG: u64 = 1 << 2;

/// Reader flags that this build understands, one bit each, in what lies in the clear or was decrypted.
pub const KNOWN_READER_FLAGS: u64 = CODING_FLAG | CASTING_FLAG;

/// Writer flag: what is written has to be encrypted.
pub const ENCRYPTION_WRITER_FLAG: u64 = 1;

/// Writer flags that this build understands, one bit each.
pub const KNOWN_WRITER_FLAGS: u64 = ENCRYPTION_WRITER_FLAG;

/// The flags of what an object with this body asks of its readers.
pub(super) fn reader_flags_of(body: &Body) -> u64 {
    let is_coded = body
        .entries
        .iter()
        .flat_map(|entry| &entry.shards)
        .flat_map(|shard| &shard.chunks)
        .any(|chunk| chunk.codec != Codec::Store);
    let is_cast = body.entries.iter().any(|entry| {
        entry.stored_dtype != entry.dtype || entry.shards.iter().any(|shard| shard.scale_log2 != 0)
    });
    let flag = |is_used: bool, flag: u64| if is_used { flag } else { 0 };
    flag(is_coded, CODING_FLAG) | flag(is_cast, CASTING_FLAG)
}

/// Refuses bytes that only a newer build understands.
///
/// Call it once the checksum is known to be right: only then does a foreign number mean the future and
/// not damage.
///
/// # Errors
/// [`Error::Unsupported`] for a newer version or an unknown reader flag; [`Error::Corrupt`] for
/// version 0, which never was.
pub(super) fn require_readable(place: Place<'_>, version: u32, reader_flags: u64) -> Result<()> {
    require_flags(place, version, reader_flags, KNOWN_READER_FLAGS)
}

/// As [`require_readable`], for an object that may have other flags.
pub(super) fn require_flags(
    place: Place<'_>,
    version: u32,
    reader_flags: u64,
    known_flags: u64,
) -> Result<()> {
    if version == 0 {
        return Err(place.corrupt("format version", "at least 1", version));
    }
    if version > FORMAT_VERSION {
        return Err(unsupported("format version", place.object, version.to_string()));
    }
    let unknown_flags = reader_flags & !known_flags;
    if unknown_flags != 0 {
        return Err(unsupported(
            "reader flag",
            place.object,
            format!("{unknown_flags:#x} of format version {version}"),
        ));
    }
    Ok(())
}

/// The fields of a sealed line that keep their name and meaning in every version.
#[derive(Deserialize)]
struct Preamble {
    magic: String,
    format_version: u32,
    reader_flags: u64,
}

/// Refuses a checked line of another kind of object, or one that only a newer build understands.
pub(super) fn require_readable_line(place: Place<'_>, text: &str, magic: &str) -> Result<()> {
    require_line(place, text, magic, KNOWN_READER_FLAGS)
}

/// As [`require_readable_line`], for a line that may have other flags.
pub(super) fn require_line(place: Place<'_>, text: &str, magic: &str, known_flags: u64) -> Result<()> {
    let preamble: Preamble = sealed_line::parse(place, text, "first fields of the line")?;
    if preamble.magic != magic {
        return Err(place.corrupt("magic", magic, preamble.magic));
    }
    require_flags(place, preamble.format_version, preamble.reader_flags, known_flags)
}

/// Refuses to write where a newer build has said that only writers who know its flags may.
///
/// # Errors
/// [`Error::Unsupported`] for an unknown writer flag.
pub(super) fn require_writable(object: &str, writer_flags: u64) -> Result<()> {
    let unknown_flags = writer_flags & !KNOWN_WRITER_FLAGS;
    if unknown_flags == 0 {
        return Ok(());
    }
    Err(unsupported("writer flag", object, format!("{unknown_flags:#x}")))
}

/// [`Error::Unsupported`] that names what this build understands.
pub(super) fn unsupported(what: &'static str, object: &str, found: String) -> Error {
    Error::Unsupported {
        what,
        object: object.to_owned(),
        found,
        supported: format!("format version {FORMAT_VERSION} and what it defines"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place<'static> = Place { object: "snapshots/1.json", offset_bytes: 0 };

    #[test]
    fn the_current_version_without_flags_is_readable_and_writable() {
        require_readable(PLACE, FORMAT_VERSION, 0).unwrap();
        require_writable("varvite.json", 0).unwrap();
    }

    #[test]
    fn a_newer_version_is_unsupported_and_named() {
        let error = require_readable(PLACE, 2, 0).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "format version", found, .. } if found == "2"),
            "{error:?}"
        );
    }

    #[test]
    fn version_zero_is_damage() {
        let error = require_readable(PLACE, 0, 0).unwrap_err();
        assert!(matches!(&error, Error::Corrupt { what, .. } if what == "format version"), "{error:?}");
    }

    #[test]
    fn an_unknown_reader_flag_is_unsupported_and_named() {
        require_readable(PLACE, 1, CODING_FLAG | CASTING_FLAG).unwrap();
        let error = require_readable(PLACE, 1, 0b111).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "reader flag", found, .. } if found == "0x4 of format version 1"),
            "{error:?}"
        );
    }

    #[test]
    fn an_unknown_writer_flag_stops_writers_only() {
        let error = require_writable("varvite.json", 2).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported { what: "writer flag", object, found, .. } if object == "varvite.json" && found == "0x2"),
            "{error:?}"
        );
    }
}
