//! What a repository knows of its bucket (FORMAT.md, section "Sync journal").
//!
//! Three kinds of objects, each one sealed line: the journal of what was pushed, the removals that are still
//! to be mirrored, and the notes of uploads under way.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::digest::ChunkDigest;
use crate::error::Result;

use super::limits::{JOURNAL_LIMIT_BYTES, UPLOAD_PART_COUNT_LIMIT};
use super::place::Place;
use super::sealed_line;
use super::validate::refuse_to_write;
use super::versions::FORMAT_VERSION;

/// What was pushed to where: `sync/journal.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Journal {
    /// Address of the bucket that this is about.
    pub remote: String,
    /// Repository that was pushed: 32 hex digits.
    pub repository_id: String,
    /// By key: what of it lies in the bucket. Packs are not told of: they never change.
    pub pushed: BTreeMap<String, Pushed>,
}

/// What lies in the bucket under a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pushed {
    /// What the bucket called it.
    pub version: String,
    /// Digest of what lies there: of all bytes, or of a manifest's header line.
    pub digest: ChunkDigest,
    /// Digest of the local object that it stands for, where that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub local_digest: Option<ChunkDigest>,
}

/// Keys that were deleted here and may still lie in the bucket: `sync/removals.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removals {
    /// Address of the bucket that this is about.
    pub remote: String,
    /// Nonce of the lease since which nobody has written to the bucket but this folder; empty before the first.
    pub since_nonce: String,
    /// Nonces of leases that this folder has taken, or was about to take: the last ones, oldest first.
    pub takings: Vec<String>,
    /// The keys.
    pub keys: BTreeSet<String>,
}

/// A large object that is being sent: `sync/<pack>.json` with the parts, `uploads/<pack>.json` in the bucket
/// without them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadNote {
    /// Address of the bucket that this is about.
    pub remote: String,
    /// Name of the pack.
    pub pack: String,
    /// Length of the pack.
    pub length_bytes: u64,
    /// The bucket's name for the upload.
    pub id: String,
    /// Length of every part but the last.
    pub part_bytes: u64,
    /// What the bucket answered for each part; null for one that was not sent.
    pub parts: Vec<Option<String>>,
}

#[derive(Serialize, Deserialize)]
struct Preamble {
    magic: String,
    format_version: u32,
    reader_flags: u64,
    remote: String,
}

impl Preamble {
    fn new(magic: &str, remote: &str) -> Self {
        Self {
            magic: magic.to_owned(),
            format_version: FORMAT_VERSION,
            reader_flags: 0,
            remote: remote.to_owned(),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct JournalFields {
    #[serde(flatten)]
    preamble: Preamble,
    repository_id: String,
    pushed: BTreeMap<String, Pushed>,
}

#[derive(Serialize, Deserialize)]
struct RemovalFields {
    #[serde(flatten)]
    preamble: Preamble,
    since_nonce: String,
    takings: Vec<String>,
    keys: BTreeSet<String>,
}

#[derive(Serialize, Deserialize)]
struct UploadFields {
    #[serde(flatten)]
    preamble: Preamble,
    pack: String,
    length_bytes: u64,
    id: String,
    part_bytes: u64,
    parts: Vec<Option<String>>,
}

/// What all three are called in messages.
const WHAT: &str = "sync journal";
const JOURNAL_MAGIC: &str = "varvite-journal";
const REMOVALS_MAGIC: &str = "varvite-removals";
const UPLOAD_MAGIC: &str = "varvite-upload";

impl Journal {
    /// Bytes of the journal.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where it is longer than a reader accepts.
    pub fn encode(&self) -> Result<Vec<u8>> {
        seal(&JournalFields {
            preamble: Preamble::new(JOURNAL_MAGIC, &self.remote),
            repository_id: self.repository_id.clone(),
            pushed: self.pushed.clone(),
        })
    }

    /// Reads the bytes of the journal `object`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for damage; [`Error::Unsupported`] where a newer version must read it.
    pub fn decode(object: &str, bytes: &[u8]) -> Result<Self> {
        let fields: JournalFields = open(object, bytes, JOURNAL_MAGIC)?;
        Ok(Self {
            remote: fields.preamble.remote,
            repository_id: fields.repository_id,
            pushed: fields.pushed,
        })
    }
}

impl Removals {
    /// Bytes of the removals.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where they are longer than a reader accepts.
    pub fn encode(&self) -> Result<Vec<u8>> {
        seal(&RemovalFields {
            preamble: Preamble::new(REMOVALS_MAGIC, &self.remote),
            since_nonce: self.since_nonce.clone(),
            takings: self.takings.clone(),
            keys: self.keys.clone(),
        })
    }

    /// Reads the bytes of the removals `object`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for damage; [`Error::Unsupported`] where a newer version must read it.
    pub fn decode(object: &str, bytes: &[u8]) -> Result<Self> {
        let fields: RemovalFields = open(object, bytes, REMOVALS_MAGIC)?;
        let RemovalFields { preamble, since_nonce, takings, keys } = fields;
        Ok(Self { remote: preamble.remote, since_nonce, takings, keys })
    }
}

impl UploadNote {
    /// Bytes of the note.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] that names the field that no reader would accept.
    pub fn encode(&self) -> Result<Vec<u8>> {
        self.check(Place::new("", 0)).map_err(refuse_to_write)?;
        seal(&UploadFields {
            preamble: Preamble::new(UPLOAD_MAGIC, &self.remote),
            pack: self.pack.clone(),
            length_bytes: self.length_bytes,
            id: self.id.clone(),
            part_bytes: self.part_bytes,
            parts: self.parts.clone(),
        })
    }

    /// Reads the bytes of the note `object`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for damage; [`Error::Unsupported`] where a newer version must read it.
    pub fn decode(object: &str, bytes: &[u8]) -> Result<Self> {
        let fields: UploadFields = open(object, bytes, UPLOAD_MAGIC)?;
        let note = Self {
            remote: fields.preamble.remote,
            pack: fields.pack,
            length_bytes: fields.length_bytes,
            id: fields.id,
            part_bytes: fields.part_bytes,
            parts: fields.parts,
        };
        note.check(Place::new(object, 0))?;
        Ok(note)
    }

    /// The parts are those of the pack, or none is told of.
    fn check(&self, place: Place<'_>) -> Result<()> {
        if self.part_bytes == 0 {
            return Err(place.corrupt("part_bytes", "at least 1", self.part_bytes));
        }
        let count = self.length_bytes.div_ceil(self.part_bytes);
        if count > UPLOAD_PART_COUNT_LIMIT {
            let expected = format!("at most {UPLOAD_PART_COUNT_LIMIT}");
            return Err(place.corrupt("number of parts", expected, count));
        }
        if !self.parts.is_empty() && self.parts.len() as u64 != count {
            return Err(place.corrupt("number of parts", count, self.parts.len()));
        }
        Ok(())
    }
}

fn seal(fields: &impl Serialize) -> Result<Vec<u8>> {
    sealed_line::seal_object_within(fields, JOURNAL_LIMIT_BYTES, WHAT)
}

fn open<T: DeserializeOwned>(object: &str, bytes: &[u8], magic: &str) -> Result<T> {
    sealed_line::open_object(Place::new(object, 0), bytes, JOURNAL_LIMIT_BYTES, (magic, WHAT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    const REMOTE: &str = "s3://bucket/run";

    #[test]
    fn a_journal_round_trips() {
        let pushed = |version: &str, local_digest| Pushed {
            version: version.to_owned(),
            digest: ChunkDigest(7),
            local_digest,
        };
        let journal = Journal {
            remote: REMOTE.to_owned(),
            repository_id: "00112233445566778899aabbccddeeff".to_owned(),
            pushed: BTreeMap::from([
                ("snapshots/1.json".to_owned(), pushed("\"a-1\"", None)),
                ("snapshots/2.json".to_owned(), pushed("b", Some(ChunkDigest(8)))),
            ]),
        };
        assert_eq!(Journal::decode("sync/journal.json", &journal.encode().unwrap()).unwrap(), journal);
    }

    #[test]
    fn removals_round_trip() {
        let keys = BTreeSet::from(["packs/x".to_owned(), "snapshots/1.json".to_owned()]);
        let takings = vec!["00112233445566778899aabbccddeeff".to_owned()];
        let removals = Removals { remote: REMOTE.to_owned(), since_nonce: "ab".repeat(16), takings, keys };
        assert_eq!(Removals::decode("sync/removals.json", &removals.encode().unwrap()).unwrap(), removals);
    }

    fn note() -> UploadNote {
        UploadNote {
            remote: REMOTE.to_owned(),
            pack: "1-r0-000000000000002a.pack".to_owned(),
            length_bytes: 25,
            id: "upload".to_owned(),
            part_bytes: 10,
            parts: vec![Some("etag".to_owned()), None, None],
        }
    }

    #[test]
    fn an_upload_round_trips_with_and_without_parts() {
        for parts in [note().parts, Vec::new()] {
            let note = UploadNote { parts, ..note() };
            assert_eq!(UploadNote::decode("uploads/x", &note.encode().unwrap()).unwrap(), note);
        }
    }

    #[test]
    fn parts_that_are_not_those_of_the_pack_are_refused() {
        let refused = |note: UploadNote| match note.encode().unwrap_err() {
            Error::InvalidInput { what, .. } => what,
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(UploadNote { part_bytes: 0, ..note() }), "part_bytes");
        assert_eq!(refused(UploadNote { length_bytes: 31, ..note() }), "number of parts");
        assert_eq!(refused(UploadNote { length_bytes: u64::MAX, ..note() }), "number of parts");
    }

    #[test]
    fn one_kind_is_not_read_as_another() {
        let bytes = Removals::default().encode().unwrap();
        let error = Journal::decode("sync/journal.json", &bytes).unwrap_err();
        assert!(
            matches!(&error, Error::Corrupt { what, found, .. } if what == "magic" && found == "varvite-removals"),
            "{error:?}"
        );
    }
}
