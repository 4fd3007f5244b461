//! Marker, tag, receipt, what goes with a bucket, and the names of objects.
#![no_main]

use libfuzzer_sys::fuzz_target;
use varvite::format::journal::{Journal, Removals, UploadNote};
use varvite::format::lease::Lease;
use varvite::format::marker::Marker;
use varvite::format::names;
use varvite::format::receipt::Receipt;
use varvite::format::tag::{Tag, validate_tag_name};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(marker) = Marker::decode(bytes) {
        assert_eq!(
            Marker::decode(&marker.encode().expect("what was read can be written")).expect("so it is read"),
            marker
        );
    }
    if let Ok(tag) = Tag::decode("tags/x", bytes) {
        assert_eq!(
            Tag::decode("tags/x", &tag.encode().expect("what was read can be written"))
                .expect("so it is read"),
            tag
        );
    }
    if let Ok(receipt) = Receipt::decode("receipts/1.json", bytes) {
        let again = receipt.encode().expect("what was read can be written");
        let again = Receipt::decode("receipts/1.json", &again).expect("so it is read");
        assert_eq!(again.content.get(), receipt.content.get());
        assert_eq!((again.number, again.seq), (receipt.number, receipt.seq));
    }
    if let Ok(lease) = Lease::decode("lease.json", bytes) {
        let again = lease.encode().expect("what was read can be written");
        assert_eq!(Lease::decode("lease.json", &again).expect("so it is read"), lease);
    }
    if let Ok(note) = UploadNote::decode("uploads/x", bytes) {
        let again = note.encode().expect("what was read can be written");
        assert_eq!(UploadNote::decode("uploads/x", &again).expect("so it is read"), note);
    }
    let _ = Journal::decode("sync/journal.json", bytes);
    let _ = Removals::decode("sync/removals.json", bytes);
    let Ok(name) = std::str::from_utf8(bytes) else { return };
    let _ = validate_tag_name(name);
    if let Some(parsed) = names::parse_pack_name(name) {
        assert_eq!(names::pack_name(parsed.seq, parsed.rank, parsed.random), name);
    }
    if let Some(seq) = names::parse_manifest_name(name) {
        assert_eq!(names::manifest_name(seq), name);
    }
    if let Some(seq) = names::parse_tombstone_name(name) {
        assert_eq!(names::tombstone_name(seq), name);
    }
    if let Some(pack) = names::parse_upload_name(name) {
        assert_eq!(names::upload_name(pack), name);
    }
    if let Some(tag) = names::parse_untag_name(name) {
        assert_eq!(names::untag_name(tag), name);
    }
    if let Some(number) = names::parse_receipt_name(name) {
        assert_eq!(names::receipt_name(number), name);
    }
});
