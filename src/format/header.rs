//! The first line of a manifest or part: its JSON form and its rules (FORMAT.md, "Header").

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::digest::parse_hex_u128;
use crate::error::Result;

use super::limits;
use super::model::Header;
use super::names::{is_id, is_lower_hex};
use super::place::Place;
use super::two_line::{BodyEncoding, BodyLocation, Kind};
use super::versions::{FORMAT_VERSION, unsupported};

/// The fields as they are written, in this order.
#[derive(Serialize)]
pub(super) struct EncodedHeader<'a> {
    magic: &'static str,
    format_version: u32,
    reader_flags: u64,
    writer_flags: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
    repository_id: &'a str,
    session_id: &'a str,
    seq: u64,
    step: u64,
    parent: Option<u64>,
    created_at_unix_ms: u64,
    world_size: u32,
    metrics: BTreeMap<&'a str, Metric>,
    metadata: &'a RawValue,
    raw_bytes: u64,
    stored_bytes: u64,
    nonfinite: &'a BTreeMap<String, u64>,
    self_contained: bool,
    state_digest: &'a str,
    body: BodyFields,
}

#[derive(Deserialize)]
pub(super) struct DecodedHeader {
    rank: Option<u32>,
    repository_id: String,
    session_id: String,
    seq: u64,
    step: u64,
    parent: Option<u64>,
    created_at_unix_ms: u64,
    world_size: u32,
    metrics: UniqueMap<Metric>,
    metadata: Box<RawValue>,
    raw_bytes: u64,
    stored_bytes: u64,
    nonfinite: UniqueMap<u64>,
    self_contained: bool,
    state_digest: String,
    body: BodyFields,
}

#[derive(Serialize, Deserialize)]
struct BodyFields {
    encoding: String,
    length_bytes: u64,
    raw_length_bytes: u64,
    digest: String,
}

impl<'a> EncodedHeader<'a> {
    /// `reader_flags` are what the body asks of its readers.
    pub(super) fn new(
        kind: Kind,
        rank: Option<u32>,
        header: &'a Header,
        reader_flags: u64,
        body: &BodyLocation,
    ) -> Self {
        Self {
            magic: kind.magic(),
            format_version: FORMAT_VERSION,
            reader_flags,
            writer_flags: 0,
            rank,
            repository_id: &header.repository_id,
            session_id: &header.session_id,
            seq: header.seq,
            step: header.step,
            parent: header.parent,
            created_at_unix_ms: header.created_at_unix_ms,
            world_size: header.world_size,
            metrics: header.metrics.iter().map(|(name, &value)| (name.as_str(), Metric(value))).collect(),
            metadata: &header.metadata,
            raw_bytes: header.raw_bytes,
            stored_bytes: header.stored_bytes,
            nonfinite: &header.nonfinite,
            self_contained: header.self_contained,
            state_digest: &header.state_digest,
            body: BodyFields {
                encoding: body.encoding.name().to_owned(),
                length_bytes: body.length_bytes,
                raw_length_bytes: body.raw_length_bytes,
                digest: format!("{:032x}", body.digest),
            },
        }
    }
}

impl DecodedHeader {
    /// Checks the fields and takes them apart: rank of the part, header, location of the body.
    pub(super) fn into_parts(self, place: Place<'_>) -> Result<(Option<u32>, Header, BodyLocation)> {
        let body = self.body.into_location(place)?;
        let header = Header {
            repository_id: self.repository_id,
            session_id: self.session_id,
            seq: self.seq,
            step: self.step,
            parent: self.parent,
            created_at_unix_ms: self.created_at_unix_ms,
            world_size: self.world_size,
            metrics: self.metrics.0.into_iter().map(|(name, Metric(value))| (name, value)).collect(),
            metadata: self.metadata,
            raw_bytes: self.raw_bytes,
            stored_bytes: self.stored_bytes,
            nonfinite: self.nonfinite.0,
            self_contained: self.self_contained,
            state_digest: self.state_digest,
        };
        check_header(place, &header)?;
        Ok((self.rank, header, body))
    }
}

impl BodyFields {
    fn into_location(self, place: Place<'_>) -> Result<BodyLocation> {
        let encoding = BodyEncoding::from_name(&self.encoding).ok_or_else(|| {
            unsupported("body encoding", place.object, format!("`{}`", self.encoding.escape_debug()))
        })?;
        let digest = parse_hex_u128(&self.digest)
            .ok_or_else(|| place.corrupt("digest of the body", "32 lower-case hex digits", &self.digest))?;
        Ok(BodyLocation {
            encoding,
            length_bytes: self.length_bytes,
            raw_length_bytes: self.raw_length_bytes,
            digest,
        })
    }
}

/// Checks what a header says by itself, without its body.
pub(super) fn check_header(place: Place<'_>, header: &Header) -> Result<()> {
    for (what, id) in [("repository id", &header.repository_id), ("session id", &header.session_id)] {
        if !is_id(id) {
            return Err(place.corrupt(what, "32 lower-case hex digits", id));
        }
    }
    if header.seq == 0 {
        return Err(place.corrupt("seq", "at least 1", header.seq));
    }
    if let Some(parent) = header.parent
        && !(1..header.seq).contains(&parent)
    {
        return Err(place.corrupt("parent", format!("at least 1 and below seq {}", header.seq), parent));
    }
    if !(1..=limits::WORLD_SIZE_LIMIT).contains(&header.world_size) {
        return Err(place.corrupt(
            "world size",
            format!("1 to {}", limits::WORLD_SIZE_LIMIT),
            header.world_size,
        ));
    }
    if header.state_digest.len() != 64 || !header.state_digest.bytes().all(is_lower_hex) {
        return Err(place.corrupt("state digest", "64 lower-case hex digits", &header.state_digest));
    }
    check_metrics(place, &header.metrics)?;
    check_nonfinite(place, &header.nonfinite)?;
    check_metadata(place, &header.metadata)
}

fn check_metrics(place: Place<'_>, metrics: &BTreeMap<String, f64>) -> Result<()> {
    if metrics.len() > limits::METRIC_COUNT_LIMIT {
        return Err(place.corrupt(
            "metrics",
            format!("at most {}", limits::METRIC_COUNT_LIMIT),
            metrics.len(),
        ));
    }
    match metrics.keys().map(String::len).max() {
        Some(length_bytes) if length_bytes > limits::METRIC_NAME_LIMIT_BYTES => Err(place.corrupt(
            "name of a metric",
            format!("at most {} bytes", limits::METRIC_NAME_LIMIT_BYTES),
            length_bytes,
        )),
        _ => Ok(()),
    }
}

fn check_nonfinite(place: Place<'_>, nonfinite: &BTreeMap<String, u64>) -> Result<()> {
    if nonfinite.len() > limits::NONFINITE_COUNT_LIMIT {
        let expected = format!("at most {} names", limits::NONFINITE_COUNT_LIMIT);
        return Err(place.corrupt("nonfinite", expected, nonfinite.len()));
    }
    let names_bytes = nonfinite.keys().fold(0_usize, |sum, name| sum.saturating_add(name.len()));
    if names_bytes > limits::NONFINITE_NAMES_LIMIT_BYTES {
        let expected = format!("at most {} bytes of names", limits::NONFINITE_NAMES_LIMIT_BYTES);
        return Err(place.corrupt("nonfinite", expected, names_bytes));
    }
    if nonfinite.values().any(|&count| count == 0) {
        return Err(place.corrupt("nonfinite", "counts of at least 1", 0));
    }
    Ok(())
}

fn check_metadata(place: Place<'_>, metadata: &RawValue) -> Result<()> {
    let text = metadata.get();
    if text.len() > limits::METADATA_LIMIT_BYTES {
        let expected = format!("at most {} bytes of JSON", limits::METADATA_LIMIT_BYTES);
        return Err(place.corrupt("metadata", expected, text.len()));
    }
    if text.contains(['\n', '\r']) {
        return Err(place.corrupt("metadata", "JSON on one line", "a line break"));
    }
    check_depth(place, "metadata", metadata)
}

/// Refuses JSON nested deeper than a recursive reader can follow.
pub(super) fn check_depth(place: Place<'_>, what: &str, value: &RawValue) -> Result<()> {
    let depth = json_depth(value.get());
    if depth <= limits::JSON_DEPTH_LIMIT {
        return Ok(());
    }
    Err(place.corrupt(what, format!("nested at most {} deep", limits::JSON_DEPTH_LIMIT), depth))
}

/// Greatest number of arrays and objects around any place of a JSON text.
fn json_depth(text: &str) -> usize {
    let mut depth = 0_usize;
    let mut greatest = 0;
    let mut is_string = false;
    let mut is_escaped = false;
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_string => is_escaped = true,
            b'"' => is_string = !is_string,
            b'[' | b'{' if !is_string => {
                depth = depth.saturating_add(1);
                greatest = greatest.max(depth);
            }
            b']' | b'}' if !is_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    greatest
}

/// A float as JSON: a number, or one of the strings `nan`, `inf`, `-inf`.
pub(super) struct Metric(pub(super) f64);

impl Serialize for Metric {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_nan() {
            serializer.serialize_str("nan")
        } else if self.0.is_infinite() {
            serializer.serialize_str(if self.0 > 0.0 { "inf" } else { "-inf" })
        } else {
            serializer.serialize_f64(self.0)
        }
    }
}

impl<'de> Deserialize<'de> for Metric {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <&RawValue>::deserialize(deserializer)?.get();
        match text {
            "\"nan\"" => return Ok(Self(f64::NAN)),
            "\"inf\"" => return Ok(Self(f64::INFINITY)),
            "\"-inf\"" => return Ok(Self(f64::NEG_INFINITY)),
            _ => {}
        }
        // The parser of the standard library rounds correctly, so every float comes back bit for bit.
        match text.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(Self(value)),
            _ => Err(D::Error::custom("a metric is a number, `nan`, `inf` or `-inf`")),
        }
    }
}

/// A map that refuses a key given twice.
#[derive(Serialize)]
pub(super) struct UniqueMap<V>(pub(super) BTreeMap<String, V>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueMapVisitor(PhantomData))
    }
}

struct UniqueMapVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<V> {
    type Value = UniqueMap<V>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<UniqueMap<V>, A::Error> {
        let mut map = BTreeMap::new();
        while let Some((key, value)) = fields.next_entry::<String, V>()? {
            if map.insert(key, value).is_some() {
                return Err(A::Error::custom("duplicate key"));
            }
        }
        Ok(UniqueMap(map))
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;
    use crate::error::Error;

    const PLACE: Place<'static> = Place { object: "snapshots/2.json", offset_bytes: 0 };

    /// What [`check_header`] refuses in a sample header after `change`: the field and what was found.
    fn refusal(change: impl FnOnce(&mut Header)) -> (String, String) {
        let mut header = samples::header();
        change(&mut header);
        match check_header(PLACE, &header).unwrap_err() {
            Error::Corrupt { object, what, found, .. } => {
                assert_eq!(object, "snapshots/2.json");
                (what, found)
            }
            other => panic!("not damage: {other:?}"),
        }
    }

    fn json(text: String) -> Box<RawValue> {
        RawValue::from_string(text).unwrap()
    }

    fn owned(what: &str, found: &str) -> (String, String) {
        (what.to_owned(), found.to_owned())
    }

    #[test]
    fn the_sample_is_legal() {
        check_header(PLACE, &samples::header()).unwrap();
    }

    #[test]
    fn ids_that_are_not_hex_are_refused() {
        assert_eq!(refusal(|header| header.repository_id = "x".to_owned()), owned("repository id", "x"));
        assert_eq!(
            refusal(|header| header.session_id = "A".repeat(32)),
            owned("session id", &"A".repeat(32))
        );
    }

    #[test]
    fn seq_zero_is_refused() {
        assert_eq!(refusal(|header| header.seq = 0), owned("seq", "0"));
    }

    #[test]
    fn a_parent_that_is_not_older_is_refused() {
        assert_eq!(refusal(|header| header.parent = Some(2)), owned("parent", "2"));
        assert_eq!(refusal(|header| header.parent = Some(0)), owned("parent", "0"));
    }

    #[test]
    fn a_world_of_no_ranks_or_too_many_is_refused() {
        assert_eq!(refusal(|header| header.world_size = 0), owned("world size", "0"));
        assert_eq!(refusal(|header| header.world_size = u32::MAX), owned("world size", "4294967295"));
    }

    #[test]
    fn a_short_state_digest_is_refused() {
        assert_eq!(refusal(|header| header.state_digest = "ab".to_owned()), owned("state digest", "ab"));
    }

    #[test]
    fn too_many_metrics_are_refused() {
        let found =
            refusal(|header| header.metrics = (0..10_001).map(|index| (index.to_string(), 0.0)).collect());
        assert_eq!(found, owned("metrics", "10001"));
    }

    #[test]
    fn a_metric_with_a_long_name_is_refused() {
        let found = refusal(|header| header.metrics = BTreeMap::from([("m".repeat(1_025), 0.0)]));
        assert_eq!(found, owned("name of a metric", "1025"));
    }

    #[test]
    fn long_metadata_is_refused() {
        let found = refusal(|header| header.metadata = json(format!("\"{}\"", "a".repeat(512 << 10))));
        assert_eq!(found, owned("metadata", "524290"));
    }

    #[test]
    fn metadata_of_two_lines_is_refused() {
        assert_eq!(
            refusal(|header| header.metadata = json("[1,\n2]".to_owned())),
            owned("metadata", "a line break")
        );
    }

    #[test]
    fn deep_metadata_is_refused() {
        let found =
            refusal(|header| header.metadata = json(format!("{}{}", "[".repeat(513), "]".repeat(513))));
        assert_eq!(found, owned("metadata", "513"));
    }

    #[test]
    fn depth_counts_brackets_outside_of_strings_only() {
        assert_eq!(json_depth("7"), 0);
        assert_eq!(json_depth(r#"{"a":[1,[2],{}],"b":"[[[[\"[["}"#), 3);
    }

    #[test]
    fn too_much_nonfinite_is_refused() {
        let found =
            refusal(|header| header.nonfinite = (0..1_001).map(|index| (index.to_string(), 1)).collect());
        assert_eq!(found, owned("nonfinite", "1001"));
        let found = refusal(|header| {
            header.nonfinite = (0..3).map(|index| (format!("{index}{}", "n".repeat(65_535)), 1)).collect();
        });
        assert_eq!(found, owned("nonfinite", "196608"));
        assert_eq!(
            refusal(|header| header.nonfinite = BTreeMap::from([("a".to_owned(), 0)])),
            owned("nonfinite", "0")
        );
    }

    #[test]
    fn metrics_of_every_kind_round_trip_bit_for_bit() {
        for value in [
            0.0,
            -0.0,
            1.0,
            0.1,
            1.0 / 3.0,
            f64::MIN_POSITIVE,
            5e-324,
            f64::MAX,
            f64::INFINITY,
            f64::NEG_INFINITY,
        ] {
            let text = serde_json::to_string(&Metric(value)).unwrap();
            let Metric(found) = serde_json::from_str(&text).unwrap();
            assert_eq!(found.to_bits(), value.to_bits(), "{text}");
        }
        assert_eq!(serde_json::to_string(&Metric(f64::NAN)).unwrap(), "\"nan\"");
        let Metric(found) = serde_json::from_str("\"nan\"").unwrap();
        assert!(found.is_nan());
    }

    #[test]
    fn what_is_no_metric_is_refused() {
        for text in ["null", "true", "\"NaN\"", "\"1.0\"", "[]", "1e999"] {
            assert!(serde_json::from_str::<Metric>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_metric_given_twice_is_refused() {
        let error = serde_json::from_str::<UniqueMap<u64>>(r#"{"a":1,"b":2,"a":3}"#).err().unwrap();
        assert!(error.to_string().starts_with("duplicate key"), "{error}");
    }
}
