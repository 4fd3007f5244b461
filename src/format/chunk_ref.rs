//! A chunk ref as JSON: `[pack, offset, stored_length, codec, "digest"]` (FORMAT.md, "Chunk ref").
//!
//! An array, because a manifest holds one for each chunk: names would be most of its bytes.

use std::fmt;

use serde::de::{Error as _, SeqAccess, Unexpected, Visitor};
use serde::ser::SerializeTuple;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::digest::{ChunkDigest, parse_hex_u128};

use super::model::{ChunkRef, Codec};

const FIELD_COUNT: usize = 5;

impl Codec {
    /// Number of this codec in manifests and packs.
    #[must_use]
    pub fn number(self) -> u64 {
        match self {
            Self::Store => 0,
            Self::Planes => 1,
            Self::Delta => 2,
            Self::Sparse => 3,
            Self::Zstd => 4,
            Self::Rounded => 5,
        }
    }

    /// The codec of this number, where this build knows it.
    #[must_use]
    pub fn from_number(number: u64) -> Option<Self> {
        match number {
            0 => Some(Self::Store),
            1 => Some(Self::Planes),
            2 => Some(Self::Delta),
            3 => Some(Self::Sparse),
            4 => Some(Self::Zstd),
            5 => Some(Self::Rounded),
            _ => None,
        }
    }
}

impl Serialize for ChunkRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut array = serializer.serialize_tuple(FIELD_COUNT)?;
        array.serialize_element(&self.pack)?;
        array.serialize_element(&self.offset_bytes)?;
        array.serialize_element(&self.stored_length_bytes)?;
        array.serialize_element(&self.codec.number())?;
        array.serialize_element(&self.digest)?;
        array.end()
    }
}

impl<'de> Deserialize<'de> for ChunkRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_tuple(FIELD_COUNT, ChunkRefVisitor)
    }
}

struct ChunkRefVisitor;

impl<'de> Visitor<'de> for ChunkRefVisitor {
    type Value = ChunkRef;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a chunk ref: [pack, offset, stored length, codec, digest]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<ChunkRef, A::Error> {
        let missing = |index: usize| A::Error::invalid_length(index, &ChunkRefVisitor);
        let pack = fields.next_element()?.ok_or_else(|| missing(0))?;
        let offset_bytes = fields.next_element()?.ok_or_else(|| missing(1))?;
        let stored_length_bytes = fields.next_element()?.ok_or_else(|| missing(2))?;
        let codec_number: u64 = fields.next_element()?.ok_or_else(|| missing(3))?;
        let HexDigest(digest) = fields.next_element()?.ok_or_else(|| missing(4))?;
        let codec = Codec::from_number(codec_number).ok_or_else(|| {
            A::Error::invalid_value(Unexpected::Unsigned(codec_number), &"the number of a codec")
        })?;
        Ok(ChunkRef { pack, offset_bytes, stored_length_bytes, codec, digest })
    }
}

/// A digest read without a string of its own: there are as many as chunks.
struct HexDigest(ChunkDigest);

impl<'de> Deserialize<'de> for HexDigest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(HexDigestVisitor)
    }
}

struct HexDigestVisitor;

impl Visitor<'_> for HexDigestVisitor {
    type Value = HexDigest;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("32 lower-case hex digits")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<HexDigest, E> {
        parse_hex_u128(text)
            .map(|digest| HexDigest(ChunkDigest(digest)))
            .ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"[3,4096,1000,0,"000000000000000000000000000000ff"]"#;

    fn refusal(text: &str) -> String {
        serde_json::from_str::<ChunkRef>(text).unwrap_err().to_string()
    }

    #[test]
    fn a_chunk_ref_is_an_array_of_five() {
        let chunk = ChunkRef {
            pack: 3,
            offset_bytes: 4_096,
            stored_length_bytes: 1_000,
            codec: Codec::Store,
            digest: ChunkDigest(255),
        };
        assert_eq!(serde_json::to_string(&chunk).unwrap(), TEXT);
        assert_eq!(serde_json::from_str::<ChunkRef>(TEXT).unwrap(), chunk);
    }

    #[test]
    fn a_sixth_field_is_refused() {
        let text = TEXT.replace(']', ",0]");
        assert!(refusal(&text).starts_with("trailing characters"), "{}", refusal(&text));
    }

    #[test]
    fn a_missing_field_is_refused() {
        assert!(refusal("[3,4096,1000,0]").starts_with("invalid length 4"), "{}", refusal("[3,4096,1000,0]"));
    }

    #[test]
    fn an_unknown_codec_is_refused() {
        let text = TEXT.replace(",0,", ",9,");
        assert!(refusal(&text).starts_with("invalid value: integer `9`, expected the number of a codec"));
    }

    #[test]
    fn an_upper_case_digest_is_refused() {
        assert!(refusal(&TEXT.replace("ff", "FF")).contains("expected 32 lower-case hex digits"));
    }

    #[test]
    fn negative_and_fractional_offsets_are_refused() {
        assert!(refusal(&TEXT.replace("4096", "-4096")).starts_with("invalid value: integer `-4096`"));
        assert!(refusal(&TEXT.replace("4096", "4096.0")).starts_with("invalid type: floating point"));
    }

    #[test]
    fn a_pack_index_beyond_32_bits_is_refused() {
        assert!(
            refusal(&TEXT.replace("[3", "[4294967296")).starts_with("invalid value: integer `4294967296`")
        );
    }
}
