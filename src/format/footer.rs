//! The footer of a pack: its chunk table, and the part that recovery rebuilds a manifest from
//! (FORMAT.md, section "Pack footer").

use std::borrow::Cow;

use crate::digest::xxh3_128;

use crate::error::Result;

use super::chunk_table::{PackChunk, ROW_LENGTH_BYTES, check_chunks, decode_rows, encode_rows};
use super::compression::{check_expansion, compress, expand};
use super::fields::Fields;
use super::header::check_header;
use super::limits::CHUNK_COUNT_LIMIT;
use super::model::{Body, ChunkRef, Codec, Header, Part};
use super::names::parse_pack_name;
use super::pack::{
    FOOTER_START_LENGTH_BYTES, PackHeader, SMALL_ALIGNMENT_BYTES, Trailer, encode_trailer, padding_to,
};
use super::place::Place;
use super::two_line::{self, Kind};
use super::validate::{self, Scope};
use super::versions::{CODING_FLAG, FORMAT_VERSION, require_readable, unsupported};

const FOOTER_MAGIC: &[u8; 4] = b"VVFT";
const ENCODING_PLAIN: u32 = 0;
const ENCODING_ZSTD: u32 = 1;

/// What the footer of a pack says.
#[derive(Clone, Debug)]
pub struct Footer {
    /// The chunks of the pack, ascending by offset.
    pub chunks: Vec<PackChunk>,
    /// The rank's fragment of the manifest; only a merge writes packs without one.
    pub part: Option<Part>,
}

impl Footer {
    /// Checks that the part was written by the session that wrote the header of the same pack.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::error::Error::Corrupt) that names the field in which they differ.
    pub fn check_origin(&self, object: &str, pack_header: &PackHeader) -> Result<()> {
        let Some(part) = &self.part else { return Ok(()) };
        let place = Place::new(object, 0);
        for (what, expected, found) in [
            ("repository id", &part.header.repository_id, &pack_header.repository_id),
            ("session id", &part.header.session_id, &pack_header.session_id),
        ] {
            if expected != found {
                return Err(place.corrupt(what, format!("{expected}, as in the part"), found));
            }
        }
        if part.header.seq != pack_header.seq {
            return Err(place.corrupt(
                "seq",
                format!("{}, as in the part", part.header.seq),
                pack_header.seq,
            ));
        }
        if part.rank != pack_header.rank {
            return Err(place.corrupt("rank", format!("{}, as in the part", part.rank), pack_header.rank));
        }
        Ok(())
    }
}

/// Everything to append at `position_bytes`, behind the last chunk: padding, footer, trailer.
///
/// The first pack of a part's body is the pack itself, with a length of 0: it isn't known before the
/// footer is.
///
/// # Errors
/// [`Error::InvalidInput`](crate::error::Error::InvalidInput) that names the field, entry or chunk no reader would accept.
pub fn encode_footer(position_bytes: u64, chunks: &[PackChunk], part: Option<&Part>) -> Result<Vec<u8>> {
    let padding_bytes = padding_to(position_bytes, SMALL_ALIGNMENT_BYTES);
    let footer_offset_bytes = position_bytes.saturating_add(padding_bytes);
    let place = Place::new("", footer_offset_bytes);
    check_table(place, chunks, footer_offset_bytes).map_err(validate::refuse_to_write)?;
    let part_bytes = match part {
        None => Vec::new(),
        Some(part) => {
            let pack_name = part.body.packs.first().map_or("", |pack| pack.name.as_str());
            check_header(place, &part.header)
                .and_then(|()| check_part(place, place, part, chunks, pack_name, footer_offset_bytes))
                .map_err(validate::refuse_to_write)?;
            two_line::encode(Kind::Part, Some(part.rank), &part.header, &part.body, &part.replicas)?
        }
    };
    let is_coded = chunks.iter().any(|chunk| chunk.codec != Codec::Store);
    let reader_flags = if is_coded { CODING_FLAG } else { 0 };
    let rows = encode_rows(chunks);
    let (encoding, table) = match compress(&rows)? {
        Some(stored) => (ENCODING_ZSTD, stored),
        None => (ENCODING_PLAIN, rows),
    };
    let mut footer = Vec::with_capacity(table.len().saturating_add(part_bytes.len()));
    footer.extend_from_slice(FOOTER_MAGIC);
    footer.extend_from_slice(&(FORMAT_VERSION as u16).to_le_bytes());
    footer.extend_from_slice(&(reader_flags as u16).to_le_bytes());
    footer.extend_from_slice(&(chunks.len() as u64).to_le_bytes());
    footer.extend_from_slice(&(table.len() as u64).to_le_bytes());
    footer.extend_from_slice(&encoding.to_le_bytes());
    footer.extend_from_slice(&[0; 4]);
    footer.extend_from_slice(&(part_bytes.len() as u64).to_le_bytes());
    footer.extend_from_slice(&[0; 24]);
    footer.extend_from_slice(&table);
    footer.extend_from_slice(&part_bytes);
    let trailer = encode_trailer(footer_offset_bytes, &footer);
    let mut bytes = vec![0; padding_bytes as usize];
    bytes.extend_from_slice(&footer);
    bytes.extend_from_slice(&trailer);
    Ok(bytes)
}

/// Reads the footer of the pack `object`, whose key ends in its name; `footer` is what `trailer` points at.
///
/// # Errors
/// [`Error::Corrupt`](crate::error::Error::Corrupt) for damage; [`Error::Unsupported`](crate::error::Error::Unsupported) where a newer version must read it.
pub fn decode_footer(object: &str, trailer: &Trailer, footer: &[u8]) -> Result<Footer> {
    let place = Place::new(object, trailer.footer_offset_bytes);
    if footer.len() as u64 != trailer.footer_length_bytes {
        return Err(place.corrupt("length of the footer", trailer.footer_length_bytes, footer.len()));
    }
    let digest = xxh3_128(footer);
    if digest != trailer.footer_digest {
        let expected = format!("{:032x}", trailer.footer_digest);
        return Err(place.corrupt("digest of the footer", expected, format!("{digest:032x}")));
    }
    let start = FooterStart::decode(place, footer)?;
    let table_place = place.after(FOOTER_START_LENGTH_BYTES);
    let part_place = table_place.after(start.table_length_bytes);
    // `FooterStart::decode` has checked that the lengths add up.
    let sections = footer.get(FOOTER_START_LENGTH_BYTES as usize..).unwrap_or_default();
    let (table, part) =
        sections.split_at_checked(start.table_length_bytes as usize).unwrap_or((sections, &[]));
    let rows = match start.encoding {
        ENCODING_PLAIN => Cow::Borrowed(table),
        _ => Cow::Owned(expand(table_place, "chunk table", table, start.rows_length_bytes)?),
    };
    let chunks = decode_rows(table_place, &rows)?;
    check_table(table_place, &chunks, trailer.footer_offset_bytes)?;
    if part.is_empty() {
        return Ok(Footer { chunks, part: None });
    }
    let part = decode_part(part_place, part, &chunks, trailer.footer_offset_bytes)?;
    Ok(Footer { chunks, part: Some(part) })
}

/// The fixed part of a footer.
struct FooterStart {
    rows_length_bytes: u64,
    table_length_bytes: u64,
    encoding: u32,
}

impl FooterStart {
    fn decode(place: Place<'_>, footer: &[u8]) -> Result<Self> {
        let mut fields = Fields::new(place, footer);
        fields.constant("magic of the footer", FOOTER_MAGIC)?;
        let version = fields.u16("format version")?;
        let reader_flags = fields.u16("reader flags")?;
        require_readable(place, u32::from(version), u64::from(reader_flags))?;
        let count_place = fields.place();
        let chunk_count = fields.u64("chunk count")?;
        if chunk_count > CHUNK_COUNT_LIMIT {
            return Err(count_place.corrupt(
                "chunk count",
                format!("at most {CHUNK_COUNT_LIMIT}"),
                chunk_count,
            ));
        }
        let rows_length_bytes = chunk_count.saturating_mul(ROW_LENGTH_BYTES);
        let table_length_bytes = fields.u64("length of the chunk table")?;
        let encoding = fields.u32("encoding of the chunk table")?;
        fields.constant("reserved bytes", &[0; 4])?;
        let part_length_bytes = fields.u64("length of the part")?;
        fields.constant("reserved bytes", &[0; 24])?;
        match encoding {
            ENCODING_PLAIN if table_length_bytes != rows_length_bytes => {
                let expected = format!("{rows_length_bytes} for {chunk_count} chunks");
                return Err(place.corrupt("length of the chunk table", expected, table_length_bytes));
            }
            ENCODING_PLAIN => {}
            ENCODING_ZSTD => {
                check_expansion(place, "the chunk table", table_length_bytes, rows_length_bytes)?;
            }
            other => return Err(unsupported("encoding of the chunk table", place.object, other.to_string())),
        }
        let sum_bytes = FOOTER_START_LENGTH_BYTES
            .checked_add(table_length_bytes)
            .and_then(|sum_bytes| sum_bytes.checked_add(part_length_bytes));
        if sum_bytes != Some(footer.len() as u64) {
            let expected = format!("{} in all", footer.len());
            let found = format!("{FOOTER_START_LENGTH_BYTES} + {table_length_bytes} + {part_length_bytes}");
            return Err(place.corrupt("lengths in the footer", expected, found));
        }
        Ok(Self { rows_length_bytes, table_length_bytes, encoding })
    }
}

fn check_table(place: Place<'_>, chunks: &[PackChunk], footer_offset_bytes: u64) -> Result<()> {
    if chunks.len() as u64 > CHUNK_COUNT_LIMIT {
        return Err(place.corrupt("chunk count", format!("at most {CHUNK_COUNT_LIMIT}"), chunks.len()));
    }
    check_chunks(place, chunks, footer_offset_bytes)
}

fn decode_part(
    place: Place<'_>,
    bytes: &[u8],
    chunks: &[PackChunk],
    footer_offset_bytes: u64,
) -> Result<Part> {
    let line = two_line::decode_line(place, Kind::Part, bytes)?.ok_or_else(|| {
        place.corrupt("header of the part", "a line break at its end", "the end of the footer")
    })?;
    let rank = line.rank.ok_or_else(|| place.corrupt("header of the part", "a rank", "none"))?;
    let body_place = place.after(line.length_bytes);
    let stored = bytes.get(line.length_bytes as usize..).unwrap_or_default();
    let (body, replicas) = two_line::decode_body(body_place, Kind::Part, &line.body, stored)?;
    let part = Part { rank, header: line.header, body, replicas };
    let pack_name = place.object.rsplit('/').next().unwrap_or(place.object);
    check_part(place, body_place, &part, chunks, pack_name, footer_offset_bytes)?;
    Ok(part)
}

/// Checks a part whose header by itself has been checked, and that it fits the pack it lies in.
fn check_part(
    header_place: Place<'_>,
    body_place: Place<'_>,
    part: &Part,
    chunks: &[PackChunk],
    pack_name: &str,
    footer_offset_bytes: u64,
) -> Result<()> {
    let Part { rank, header, body, replicas } = part;
    check_own_name(header_place, *rank, header, pack_name)?;
    let scope = Scope::Part { rank: *rank, pack_name, footer_offset_bytes };
    validate::check(header_place, body_place, header, body, scope)?;
    validate::check_replicas(body_place, replicas)?;
    check_own_chunks(body_place, body, chunks)
}

fn check_own_name(place: Place<'_>, rank: u32, header: &Header, pack_name: &str) -> Result<()> {
    if rank >= header.world_size {
        return Err(place.corrupt(
            "rank of the part",
            format!("below the world size {}", header.world_size),
            rank,
        ));
    }
    let parsed = parse_pack_name(pack_name)
        .ok_or_else(|| place.corrupt("name of the pack", "<seq>-r<rank>-<16 hex digits>.pack", pack_name))?;
    if (parsed.seq, parsed.rank) != (header.seq, rank) {
        let expected = format!("seq {} and rank {} as in its name", parsed.seq, parsed.rank);
        return Err(place.corrupt("part", expected, format!("seq {} and rank {rank}", header.seq)));
    }
    Ok(())
}

/// Every chunk that the part claims to lie in its own pack must be in the chunk table, with the same facts.
fn check_own_chunks(place: Place<'_>, body: &Body, chunks: &[PackChunk]) -> Result<()> {
    for entry in &body.entries {
        let refs = entry.shards.iter().flat_map(|shard| &shard.chunks);
        let stored = refs.filter(|chunk| chunk.codec != Codec::Rounded);
        let stored = stored.flat_map(|chunk| [Some(*chunk), chunk.base.map(ChunkRef::from)]).flatten();
        for chunk in stored.filter(|chunk| chunk.pack == 0) {
            let row = chunks.binary_search_by_key(&chunk.offset_bytes, |row| row.offset_bytes).ok();
            let is_same = row.and_then(|index| chunks.get(index)).is_some_and(|row| {
                (row.stored_length_bytes, row.codec, row.digest)
                    == (chunk.stored_length_bytes, chunk.codec, chunk.digest)
            });
            if !is_same {
                let found = format!(
                    "{} bytes at {}, {}",
                    chunk.stored_length_bytes, chunk.offset_bytes, chunk.digest
                );
                return Err(place.corrupt(
                    format!("chunk of `{}`", entry.name.escape_debug()),
                    "a row of the chunk table",
                    found,
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
