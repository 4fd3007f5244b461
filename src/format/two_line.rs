//! The form that manifests and parts share: a sealed header line, then the body it describes
//! (FORMAT.md, section "Manifest").
//!
//! Nothing is parsed before its digest is right, and nothing is expanded before its length is within
//! limits. What the fields mean to each other is the business of `validate`.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::digest::xxh3_128;

use crate::error::{Error, Result};

use super::compression::{check_expansion, compress, expand};
use super::header::{DecodedHeader, EncodedHeader};
use super::limits::{BODY_LIMIT_BYTES, HEADER_LINE_LIMIT_BYTES};
use super::model::{Body, Entry, Header, PackRecord, RankStructure, Replica};
use super::place::Place;
use super::sealed_line;
use super::versions::{reader_flags_of, require_readable_line};

const HEADER_DIGEST_KEY: &str = "header_digest";

/// Which object has this form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Manifest,
    Part,
}

impl Kind {
    pub(super) fn magic(self) -> &'static str {
        match self {
            Self::Manifest => "varvite-manifest",
            Self::Part => "varvite-part",
        }
    }
}

/// How the body is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyEncoding {
    /// As JSON text.
    Json,
    /// As JSON text compressed with zstd.
    Zstd,
}

impl BodyEncoding {
    /// Name in the header.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Zstd => "zstd",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        [Self::Json, Self::Zstd].into_iter().find(|encoding| encoding.name() == name)
    }
}

/// What a header line says of the body behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyLocation {
    /// How it is stored.
    pub encoding: BodyEncoding,
    /// Length as stored. The body starts right behind the header line.
    pub length_bytes: u64,
    /// Length of the JSON text.
    pub raw_length_bytes: u64,
    /// XXH3-128 of the stored bytes.
    pub digest: u128,
}

/// A decoded header line.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) rank: Option<u32>,
    pub(super) header: Header,
    pub(super) length_bytes: u64,
    pub(super) body: BodyLocation,
}

/// A body as it is written: a part's has a field more.
#[derive(Serialize)]
struct EncodedBody<'a> {
    chunk_bytes: u64,
    packs: &'a [PackRecord],
    entries: &'a [Entry],
    structure: &'a RawValue,
    rank_structures: &'a [RankStructure],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    replicas: &'a [Replica],
}

/// A body as it is read.
#[derive(Deserialize)]
struct DecodedBody {
    chunk_bytes: u64,
    packs: Vec<PackRecord>,
    entries: Vec<Entry>,
    structure: Box<RawValue>,
    rank_structures: Vec<RankStructure>,
    #[serde(default)]
    replicas: Vec<Replica>,
}

/// Bytes of a manifest, or of a part, which alone has a rank and replicas.
pub(super) fn encode(
    kind: Kind,
    rank: Option<u32>,
    header: &Header,
    body: &Body,
    replicas: &[Replica],
) -> Result<Vec<u8>> {
    let fields = EncodedBody {
        chunk_bytes: body.chunk_bytes,
        packs: &body.packs,
        entries: &body.entries,
        structure: &body.structure,
        rank_structures: &body.rank_structures,
        replicas,
    };
    let raw = serde_json::to_vec(&fields)
        .map_err(|error| Error::Internal { what: format!("a body is not JSON: {error}") })?;
    let raw_length_bytes = raw.len() as u64;
    if raw_length_bytes > BODY_LIMIT_BYTES {
        return Err(Error::invalid(
            "snapshot",
            format!(
                "its list of entries is {raw_length_bytes} bytes of JSON; at most {BODY_LIMIT_BYTES} are possible"
            ),
        ));
    }
    let (encoding, stored) = match compress(&raw)? {
        Some(stored) => (BodyEncoding::Zstd, stored),
        None => (BodyEncoding::Json, raw),
    };
    let location = BodyLocation {
        encoding,
        length_bytes: stored.len() as u64,
        raw_length_bytes,
        digest: xxh3_128(&stored),
    };
    let fields = EncodedHeader::new(kind, rank, header, reader_flags_of(body), &location);
    let mut bytes = sealed_line::seal(&fields, HEADER_DIGEST_KEY)?;
    if bytes.len() as u64 > HEADER_LINE_LIMIT_BYTES {
        return Err(Error::invalid(
            "metrics and metadata",
            format!(
                "with them the header is {} bytes of JSON; at most {HEADER_LINE_LIMIT_BYTES} are possible",
                bytes.len()
            ),
        ));
    }
    bytes.extend_from_slice(&stored);
    Ok(bytes)
}

/// Reads the header line at the front of `prefix`; `None` where the line may end behind it.
pub(super) fn decode_line(place: Place<'_>, kind: Kind, prefix: &[u8]) -> Result<Option<Line>> {
    let window = prefix.get(..HEADER_LINE_LIMIT_BYTES as usize).unwrap_or(prefix);
    check_opening(place, kind, window)?;
    let Some(line) =
        window.split_inclusive(|&byte| byte == b'\n').next().filter(|line| line.ends_with(b"\n"))
    else {
        if window.len() as u64 == HEADER_LINE_LIMIT_BYTES {
            let expected = format!("a line break within {HEADER_LINE_LIMIT_BYTES} bytes");
            return Err(place.corrupt("header", expected, "none"));
        }
        return Ok(None);
    };
    let text = sealed_line::check(place, line, HEADER_DIGEST_KEY)?;
    require_readable_line(place, text, kind.magic())?;
    let decoded: DecodedHeader = sealed_line::parse(place, text, "header")?;
    let (rank, header, body) = decoded.into_parts(place)?;
    check_location(place, &body)?;
    Ok(Some(Line { rank, header, length_bytes: line.len() as u64, body }))
}

/// Says at once that an object is no manifest, also where its first line never ends.
fn check_opening(place: Place<'_>, kind: Kind, window: &[u8]) -> Result<()> {
    let opening = format!("{{\"magic\":\"{}\",", kind.magic());
    let compared_length_bytes = opening.len().min(window.len());
    let found = window.get(..compared_length_bytes).unwrap_or(window);
    if opening.as_bytes().starts_with(found) {
        return Ok(());
    }
    Err(place.corrupt("magic", opening, found.escape_ascii()))
}

fn check_location(place: Place<'_>, body: &BodyLocation) -> Result<()> {
    if body.raw_length_bytes > BODY_LIMIT_BYTES {
        let expected = format!("at most {BODY_LIMIT_BYTES} bytes");
        return Err(place.corrupt("raw length of the body", expected, body.raw_length_bytes));
    }
    if body.length_bytes > body.raw_length_bytes {
        let expected = format!("at most its raw length of {} bytes", body.raw_length_bytes);
        return Err(place.corrupt("length of the body", expected, body.length_bytes));
    }
    match body.encoding {
        BodyEncoding::Json if body.length_bytes != body.raw_length_bytes => Err(place.corrupt(
            "length of the body",
            format!("its raw length of {} bytes", body.raw_length_bytes),
            body.length_bytes,
        )),
        BodyEncoding::Json => Ok(()),
        BodyEncoding::Zstd => check_expansion(place, "the body", body.length_bytes, body.raw_length_bytes),
    }
}

/// Reads the body, which is all of `stored`, and the replicas of a part; `place` is where it starts.
pub(super) fn decode_body(
    place: Place<'_>,
    kind: Kind,
    location: &BodyLocation,
    stored: &[u8],
) -> Result<(Body, Vec<Replica>)> {
    if stored.len() as u64 != location.length_bytes {
        let expected = format!("{} bytes to the end", location.length_bytes);
        return Err(place.corrupt("length of the body", expected, format!("{} bytes", stored.len())));
    }
    let digest = xxh3_128(stored);
    if digest != location.digest {
        return Err(place.corrupt(
            "digest of the body",
            format!("{:032x}", location.digest),
            format!("{digest:032x}"),
        ));
    }
    let raw = match location.encoding {
        BodyEncoding::Json => Cow::Borrowed(stored),
        BodyEncoding::Zstd => Cow::Owned(expand(place, "body", stored, location.raw_length_bytes)?),
    };
    let text = str::from_utf8(&raw).map_err(|error| place.corrupt("text of the body", "UTF-8", error))?;
    let decoded: DecodedBody = serde_json::from_str(text).map_err(|error| match location.encoding {
        BodyEncoding::Json => place.not_json("body", &error),
        // A column of the expanded text is no offset in the object.
        BodyEncoding::Zstd => place.corrupt("body", "JSON as FORMAT.md describes it", error),
    })?;
    let DecodedBody { chunk_bytes, packs, entries, structure, rank_structures, replicas } = decoded;
    if kind == Kind::Manifest && !replicas.is_empty() {
        return Err(place.corrupt("replicas", "none, as only parts have some", replicas.len()));
    }
    Ok((Body { chunk_bytes, packs, entries, structure, rank_structures }, replicas))
}
