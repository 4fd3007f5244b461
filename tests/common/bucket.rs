//! Buckets for tests: one in memory, and one on a server that the environment names.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use varvite::store::object::{BucketOptions, BucketStore};

/// Url of a bucket on a server, below which each test takes a prefix of its own.
const URL: &str = "VARVITE_TEST_BUCKET_URL";

/// Options of that bucket, as a JSON object of strings.
const OPTIONS: &str = "VARVITE_TEST_BUCKET_OPTIONS";

/// A fresh prefix of the bucket on the server.
pub(crate) fn on_server() -> BucketStore {
    BucketStore::open(server_options()).unwrap()
}

/// How a fresh prefix of the bucket on the server is opened.
pub(crate) fn server_options() -> BucketOptions {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let set = |name| std::env::vars().find(|(key, _)| key == name).map(|(_, value)| value);
    let url = set(URL).unwrap_or_else(|| panic!("`{URL}` is not set: this test needs a server"));
    let mut options: BTreeMap<String, String> =
        set(OPTIONS).map(|text| serde_json::from_str(&text).unwrap()).unwrap_or_default();
    // Short parts, so that small objects have several.
    options.entry("part_bytes".to_owned()).or_insert_with(|| (5 << 20).to_string());
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let url = format!("{}/test-{}-{count}", url.trim_end_matches('/'), unique());
    BucketOptions { url, options, credentials: None }
}

/// A number that no other run of the tests has.
fn unique() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
