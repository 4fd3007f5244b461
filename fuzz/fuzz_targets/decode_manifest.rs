//! Manifests: as they come, and with the body replaced and all digests made right, as an attacker can.
#![no_main]

use libfuzzer_sys::fuzz_target;
use varvite::format::manifest;
use xxhash_rust::xxh3::xxh3_128;

const OBJECT: &str = "snapshots/1.json";

/// A manifest around this body, compressed or not, whose digests are right.
fn sealed_around(is_zstd: bool, raw_length_bytes: u64, body: &[u8]) -> Vec<u8> {
    let id = "0".repeat(32);
    let fields = format!(
        "{{\"magic\":\"varvite-manifest\",\"format_version\":1,\"reader_flags\":0,\"writer_flags\":0,\
         \"repository_id\":\"{id}\",\"session_id\":\"{id}\",\"seq\":1,\"step\":1,\"parent\":null,\
         \"created_at_unix_ms\":0,\"world_size\":2,\"metrics\":{{}},\"metadata\":null,\"raw_bytes\":0,\
         \"stored_bytes\":0,\"nonfinite\":{{}},\"self_contained\":false,\"state_digest\":\"{id}{id}\",\
         \"body\":{{\"encoding\":\"{}\",\"length_bytes\":{},\"raw_length_bytes\":{raw_length_bytes},\"digest\":\"{:032x}\"}}",
        if is_zstd { "zstd" } else { "json" },
        body.len(),
        xxh3_128(body),
    );
    let mut bytes =
        format!("{fields},\"header_digest\":\"{:032x}\"}}\n", xxh3_128(fields.as_bytes())).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

fuzz_target!(|bytes: &[u8]| {
    let _ = manifest::decode_header(OBJECT, bytes);
    if let Ok(decoded) = manifest::decode(OBJECT, bytes) {
        manifest::encode(&decoded.header, &decoded.body).expect("what was read can be written");
    }
    let _ = manifest::decode(OBJECT, &sealed_around(false, bytes.len() as u64, bytes));
    if let Some((claim, body)) = bytes.split_first_chunk::<4>() {
        let raw_length_bytes = u64::from(u32::from_le_bytes(*claim));
        let _ = manifest::decode(OBJECT, &sealed_around(true, raw_length_bytes, body));
    }
});
