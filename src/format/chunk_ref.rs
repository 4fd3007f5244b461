//! A chunk ref as JSON: `[pack, offset, stored_length, codec, "digest"]`, and a sixth item, the same five
//! of its base, where it has one (FORMAT.md, "Chunk ref").
//!
//! An array, because a manifest holds one for each chunk: names would be most of its bytes.

use std::fmt;

use serde::de::{Error as _, SeqAccess, Unexpected, Visitor};
use serde::ser::SerializeTuple;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::digest::{ChunkDigest, parse_hex_u128};

use super::model::{BaseRef, ChunkRef, Codec};

const FIELD_COUNT: usize = 5;
const FIELD_COUNT_WITH_BASE: usize = 6;

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
        let field_count = if self.base.is_some() { FIELD_COUNT_WITH_BASE } else { FIELD_COUNT };
        let mut array = serializer.serialize_tuple(field_count)?;
        serialize_fields(&mut array, self)?;
        if let Some(base) = self.base {
            array.serialize_element(&base)?;
        }
        array.end()
    }
}

impl Serialize for BaseRef {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut array = serializer.serialize_tuple(FIELD_COUNT)?;
        serialize_fields(&mut array, &ChunkRef::from(*self))?;
        array.end()
    }
}

fn serialize_fields<A: SerializeTuple>(array: &mut A, chunk: &ChunkRef) -> Result<(), A::Error> {
    array.serialize_element(&chunk.pack)?;
    array.serialize_element(&chunk.offset_bytes)?;
    array.serialize_element(&chunk.stored_length_bytes)?;
    array.serialize_element(&chunk.codec.number())?;
    array.serialize_element(&chunk.digest)
}

impl<'de> Deserialize<'de> for ChunkRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ChunkRefVisitor)
    }
}

impl<'de> Deserialize<'de> for BaseRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_tuple(FIELD_COUNT, BaseRefVisitor)
    }
}

struct ChunkRefVisitor;

impl<'de> Visitor<'de> for ChunkRefVisitor {
    type Value = ChunkRef;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a chunk ref: [pack, offset, stored length, codec, digest], and its base")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<ChunkRef, A::Error> {
        let chunk = read_fields(&mut fields, &self)?;
        let base = fields.next_element::<BaseRef>()?;
        if base.is_some() != chunk.codec.needs_base() {
            let expected = if base.is_some() { "no base with this codec" } else { "a base with this codec" };
            return Err(A::Error::invalid_value(Unexpected::Unsigned(chunk.codec.number()), &expected));
        }
        Ok(ChunkRef { base, ..chunk.into() })
    }
}

struct BaseRefVisitor;

impl<'de> Visitor<'de> for BaseRefVisitor {
    type Value = BaseRef;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("the base of a chunk: [pack, offset, stored length, codec, digest]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<BaseRef, A::Error> {
        let base = read_fields(&mut fields, &self)?;
        if !base.codec.is_self_contained() {
            let found = Unexpected::Unsigned(base.codec.number());
            return Err(A::Error::invalid_value(found, &"the codec of a base, which needs none itself"));
        }
        Ok(base)
    }
}

/// Reads the five fields that a chunk ref and a base have in common.
fn read_fields<'de, A: SeqAccess<'de>, V: Visitor<'de>>(
    fields: &mut A,
    visitor: &V,
) -> Result<BaseRef, A::Error> {
    let missing = |index: usize| A::Error::invalid_length(index, visitor);
    let pack = fields.next_element()?.ok_or_else(|| missing(0))?;
    let offset_bytes = fields.next_element()?.ok_or_else(|| missing(1))?;
    let stored_length_bytes = fields.next_element()?.ok_or_else(|| missing(2))?;
    let codec_number: u64 = fields.next_element()?.ok_or_else(|| missing(3))?;
    let HexDigest(digest) = fields.next_element()?.ok_or_else(|| missing(4))?;
    let codec = Codec::from_number(codec_number).ok_or_else(|| {
        A::Error::invalid_value(Unexpected::Unsigned(codec_number), &"the number of a codec")
    })?;
    Ok(BaseRef { pack, offset_bytes, stored_length_bytes, codec, digest })
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
    const DELTA_TEXT: &str =
        r#"[0,4096,10,2,"000000000000000000000000000000ff",[1,64,9,1,"000000000000000000000000000000ee"]]"#;

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
            base: None,
        };
        assert_eq!(serde_json::to_string(&chunk).unwrap(), TEXT);
        assert_eq!(serde_json::from_str::<ChunkRef>(TEXT).unwrap(), chunk);
    }

    #[test]
    fn a_sixth_field_is_refused() {
        let text = TEXT.replace(']', ",0]");
        assert!(refusal(&text).starts_with("invalid type: integer `0`"), "{}", refusal(&text));
        let text = DELTA_TEXT.replace("]]", "],0]");
        assert!(refusal(&text).starts_with("trailing characters"), "{}", refusal(&text));
    }

    #[test]
    fn a_delta_has_its_base_behind_it() {
        let chunk: ChunkRef = serde_json::from_str(DELTA_TEXT).unwrap();
        assert_eq!(chunk.codec, Codec::Delta);
        let base = chunk.base.unwrap();
        assert_eq!((base.pack, base.offset_bytes, base.codec), (1, 64, Codec::Planes));
        assert_eq!(base.digest, ChunkDigest(0xEE));
        assert_eq!(serde_json::to_string(&chunk).unwrap(), DELTA_TEXT);
        assert_eq!((chunk.as_base(), ChunkRef::from(base).as_base()), (None, Some(base)));
    }

    #[test]
    fn only_a_difference_has_a_base_and_a_base_has_none() {
        let without = DELTA_TEXT.replace("ff\"", "ff\"]").split_once(']').unwrap().0.to_owned() + "]";
        assert!(refusal(&without).contains("a base with this codec"), "{}", refusal(&without));
        let stored = DELTA_TEXT.replacen(",2,", ",0,", 1);
        assert!(refusal(&stored).contains("no base with this codec"), "{}", refusal(&stored));
        for codec in [2, 3, 5] {
            let chained = DELTA_TEXT.replace("64,9,1,", &format!("64,9,{codec},"));
            assert!(refusal(&chained).contains("the codec of a base"), "{}", refusal(&chained));
        }
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
