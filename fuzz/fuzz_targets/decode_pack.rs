//! Packs: header, trailer and footer as they come, and a footer whose digest is right, as an attacker
//! can make it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use varvite::format::pack::{self, Trailer};
use xxhash_rust::xxh3::xxh3_128;

const OBJECT: &str = "packs/1-r0-000000000000002a.pack";

fuzz_target!(|bytes: &[u8]| {
    let header = pack::decode_header(OBJECT, bytes);
    let _ = pack::decode_trailer(OBJECT, bytes.len() as u64, bytes);
    let trailer = Trailer {
        footer_offset_bytes: 1 << 20,
        footer_length_bytes: bytes.len() as u64,
        footer_digest: xxh3_128(bytes),
    };
    if let Ok(footer) = pack::decode_footer(OBJECT, &trailer, bytes) {
        pack::encode_footer(1 << 20, &footer.chunks, footer.part.as_ref())
            .expect("what was read can be written");
        if let Ok(header) = header {
            let _ = footer.check_origin(OBJECT, &header);
        }
    }
});
