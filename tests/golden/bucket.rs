//! Makes the golden files of what goes with a bucket: a lease, and the objects of a sync journal.

use std::collections::{BTreeMap, BTreeSet};

use varvite::digest::ChunkDigest;
use varvite::format::journal::{Journal, Pushed, Removals, UploadNote};
use varvite::format::lease::Lease;
use varvite::format::names::pack_name;

const REPOSITORY_ID: &str = "00112233445566778899aabbccddeeff";
const REMOTE: &str = "s3://bucket/run";

pub(crate) fn lease() -> Lease {
    Lease {
        epoch: 3,
        nonce: "ffeeddccbbaa99887766554433221100".to_owned(),
        since_nonce: "eeddccbbaa998877665544332211ffff".to_owned(),
        renewal: 17,
        milliseconds: 30_000,
        released: false,
        holder: "process 42 on host-1 since 1790000000000 (unix milliseconds)".to_owned(),
        host: "host-1".to_owned(),
        boot_id: "11111111-2222-3333-4444-555555555555 pid:[4026531836]".to_owned(),
        process_number: 42,
        process_started: 123_456,
    }
}

pub(crate) fn journal() -> Journal {
    let pushed = |version: &str, local_digest| Pushed {
        version: version.to_owned(),
        digest: ChunkDigest(0x2a),
        local_digest,
    };
    Journal {
        remote: REMOTE.to_owned(),
        repository_id: REPOSITORY_ID.to_owned(),
        pushed: BTreeMap::from([
            ("snapshots/1.json".to_owned(), pushed("\"5d41402abc4b2a76b9719d911017c592\"", None)),
            ("snapshots/2.json".to_owned(), pushed("v2", Some(ChunkDigest(0x2b)))),
            ("tags/first".to_owned(), pushed("v3", None)),
        ]),
    }
}

pub(crate) fn removals() -> Removals {
    let keys = [format!("packs/{}", pack_name(1, 0, 0x2a)), "snapshots/1.json".to_owned()];
    let takings = vec!["ffeeddccbbaa99887766554433221100".to_owned()];
    let (remote, since_nonce) = (REMOTE.to_owned(), "eeddccbbaa998877665544332211ffff".to_owned());
    Removals { remote, since_nonce, takings, keys: BTreeSet::from(keys) }
}

pub(crate) fn upload() -> UploadNote {
    UploadNote {
        remote: REMOTE.to_owned(),
        pack: pack_name(2, 0, 0x2a),
        length_bytes: 40 << 20,
        id: "upload-1".to_owned(),
        part_bytes: 16 << 20,
        parts: vec![Some("etag-1".to_owned()), None, Some("etag-3".to_owned())],
    }
}
