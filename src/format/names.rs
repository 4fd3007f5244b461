//! Names of objects, and the numbers in them (FORMAT.md, section "Repository").
//!
//! Every name has one spelling: a name that is parsed and built again is the same text. What does not
//! parse is not ours and is left alone.

use super::tag::validate_tag_name;

/// Name of the marker in the root.
pub const MARKER_NAME: &str = "varvite.json";

/// Name of the lease in the root of a bucket.
pub const LEASE_NAME: &str = "lease.json";

/// Name in `sync/` of the journal of what was pushed.
pub const JOURNAL_NAME: &str = "journal.json";

/// Name in `sync/` of the removals that are still to be mirrored.
pub const REMOVALS_NAME: &str = "removals.json";

/// What stands in a tombstone; it has no meaning.
pub const TOMBSTONE_CONTENT: &[u8] = b"deleted\n";

const MANIFEST_SUFFIX: &str = ".json";
const PACK_SUFFIX: &str = ".pack";
const TOMBSTONE_SUFFIX: &str = ".deleted";
const RECEIPT_SUFFIX: &str = ".json";
const UPLOAD_SUFFIX: &str = ".json";
const UNTAG_PREFIX: &str = "untag-";

/// What the name of a pack says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackName {
    /// Commit number of the save that wrote it; of a merge, that of the newest snapshot it served.
    pub seq: u64,
    /// Rank that wrote it.
    pub rank: u32,
    /// True where a merge wrote it, not a save.
    pub is_merged: bool,
    /// Random number that tells two attempts at one save apart.
    pub random: u64,
}

/// Name of a pack that a save writes: `<seq>-r<rank>-<16 hex>.pack`.
#[must_use]
pub fn pack_name(seq: u64, rank: u32, random: u64) -> String {
    format!("{seq}-r{rank}-{random:016x}{PACK_SUFFIX}")
}

/// Name of a pack that a merge writes: `<seq>-m<rank>-<16 hex>.pack`.
#[must_use]
pub fn merged_pack_name(seq: u64, rank: u32, random: u64) -> String {
    format!("{seq}-m{rank}-{random:016x}{PACK_SUFFIX}")
}

/// Reads a name that [`pack_name`] or [`merged_pack_name`] can have built, and no other.
#[must_use]
pub fn parse_pack_name(name: &str) -> Option<PackName> {
    let (seq, rest) = name.strip_suffix(PACK_SUFFIX)?.split_once('-')?;
    let (writer, random) = rest.split_once('-')?;
    let (is_merged, rank) = match writer.strip_prefix('m') {
        Some(rank) => (true, rank),
        None => (false, writer.strip_prefix('r')?),
    };
    if random.len() != 16 || !random.bytes().all(is_lower_hex) {
        return None;
    }
    Some(PackName {
        seq: parse_number(seq)?,
        rank: u32::try_from(parse_decimal(rank)?).ok()?,
        is_merged,
        random: u64::from_str_radix(random, 16).ok()?,
    })
}

/// Name of a manifest: `<seq>.json`.
#[must_use]
pub fn manifest_name(seq: u64) -> String {
    format!("{seq}{MANIFEST_SUFFIX}")
}

/// Reads a name that [`manifest_name`] can have built, and no other.
#[must_use]
pub fn parse_manifest_name(name: &str) -> Option<u64> {
    parse_number(name.strip_suffix(MANIFEST_SUFFIX)?)
}

/// Name of a tombstone: `<seq>.deleted`.
#[must_use]
pub fn tombstone_name(seq: u64) -> String {
    format!("{seq}{TOMBSTONE_SUFFIX}")
}

/// Reads a name that [`tombstone_name`] can have built, and no other.
#[must_use]
pub fn parse_tombstone_name(name: &str) -> Option<u64> {
    parse_number(name.strip_suffix(TOMBSTONE_SUFFIX)?)
}

/// Name of a receipt: `<number>.json`.
#[must_use]
pub fn receipt_name(number: u64) -> String {
    format!("{number}{RECEIPT_SUFFIX}")
}

/// Reads a name that [`receipt_name`] can have built, and no other.
#[must_use]
pub fn parse_receipt_name(name: &str) -> Option<u64> {
    parse_number(name.strip_suffix(RECEIPT_SUFFIX)?)
}

/// Name of the note of an upload under way: `<pack>.json`.
#[must_use]
pub fn upload_name(pack: &str) -> String {
    format!("{pack}{UPLOAD_SUFFIX}")
}

/// The pack in a name that [`upload_name`] can have built, and no other.
#[must_use]
pub fn parse_upload_name(name: &str) -> Option<&str> {
    name.strip_suffix(UPLOAD_SUFFIX).filter(|pack| parse_pack_name(pack).is_some())
}

/// Name in `sync/` of the note that a tag is to go from the bucket: `untag-<tag>`.
#[must_use]
pub fn untag_name(tag: &str) -> String {
    format!("{UNTAG_PREFIX}{tag}")
}

/// The tag in a name that [`untag_name`] can have built, and no other.
#[must_use]
pub fn parse_untag_name(name: &str) -> Option<&str> {
    name.strip_prefix(UNTAG_PREFIX).filter(|tag| validate_tag_name(tag).is_ok())
}

/// True for an identity: 32 lower-case hex digits.
#[must_use]
pub fn is_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(is_lower_hex)
}

pub(super) fn is_lower_hex(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

/// Reads a number that counts from 1.
fn parse_number(text: &str) -> Option<u64> {
    parse_decimal(text).filter(|&number| number > 0)
}

/// Digits only, no sign, no leading zero.
fn parse_decimal(text: &str) -> Option<u64> {
    let canonical = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if canonical { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pack_names_round_trip() {
        for (seq, rank, random) in [(1, 0, 0), (42, 7, 0x9f3c), (u64::MAX, u32::MAX, u64::MAX)] {
            let parsed = |is_merged| Some(PackName { seq, rank, is_merged, random });
            assert_eq!(parse_pack_name(&pack_name(seq, rank, random)), parsed(false));
            assert_eq!(parse_pack_name(&merged_pack_name(seq, rank, random)), parsed(true));
        }
        assert_eq!(merged_pack_name(42, 7, 0x9f3c), "42-m7-0000000000009f3c.pack");
        assert_eq!(pack_name(42, 7, 0x9f3c), "42-r7-0000000000009f3c.pack");
    }

    #[test]
    fn pack_names_of_another_spelling_are_refused() {
        for name in [
            "",
            ".pack",
            "42-r7-0000000000009f3c",
            "42-r7-0000000000009F3C.pack",
            "042-r7-0000000000009f3c.pack",
            "42-r07-0000000000009f3c.pack",
            "42-r7-9f3c.pack",
            "42-r7-00000000000009f3c.pack",
            "0-r7-0000000000009f3c.pack",
            "+42-r7-0000000000009f3c.pack",
            "42-r-0000000000009f3c.pack",
            "42-m-0000000000009f3c.pack",
            "42-7-0000000000009f3c.pack",
            "42-rm7-0000000000009f3c.pack",
            "42-M7-0000000000009f3c.pack",
            "42-r4294967296-0000000000009f3c.pack",
            "18446744073709551616-r0-0000000000009f3c.pack",
            "../42-r7-0000000000009f3c.pack",
            "42-r7-0000000000009f3c.pack.pack",
        ] {
            assert_eq!(parse_pack_name(name), None, "{name}");
        }
    }

    #[test]
    fn names_of_small_objects_round_trip_and_do_not_mix() {
        assert_eq!(manifest_name(7), "7.json");
        assert_eq!(tombstone_name(7), "7.deleted");
        assert_eq!(parse_manifest_name("7.json"), Some(7));
        assert_eq!(parse_tombstone_name("7.deleted"), Some(7));
        assert_eq!(parse_manifest_name("7.deleted"), None);
        assert_eq!(parse_tombstone_name("7.json"), None);
        assert_eq!((receipt_name(7), parse_receipt_name("7.json")), ("7.json".to_owned(), Some(7)));
    }

    #[test]
    fn names_of_notes_round_trip_and_do_not_mix() {
        let pack = pack_name(42, 7, 0x9f3c);
        assert_eq!(parse_upload_name(&upload_name(&pack)), Some(pack.as_str()));
        assert_eq!(parse_untag_name(&untag_name("best")), Some("best"));
        for name in [JOURNAL_NAME, REMOVALS_NAME, "untag-", "untag-.x", "x.pack.json"] {
            assert_eq!((parse_upload_name(name), parse_untag_name(name)), (None, None), "{name}");
        }
    }

    #[test]
    fn names_of_another_spelling_are_refused() {
        for name in [
            "0.json",
            "07.json",
            "-7.json",
            "+7.json",
            " 7.json",
            "7.JSON",
            ".json",
            "7",
            "7.json.json",
            "x.json",
        ] {
            assert_eq!(parse_manifest_name(name), None, "{name}");
            assert_eq!(parse_receipt_name(name), None, "{name}");
        }
    }

    #[test]
    fn an_id_is_32_lower_case_hex_digits() {
        assert!(is_id("0123456789abcdef0123456789abcdef"));
        assert!(!is_id("0123456789ABCDEF0123456789abcdef"));
        assert!(!is_id("0123456789abcdef0123456789abcde"));
    }
}
