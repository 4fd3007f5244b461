//! The clock and the randomness of the engine: nothing below the facade has either.

use std::time::{SystemTime, UNIX_EPOCH};

/// Who holds the lock, for the one who finds it held.
pub(crate) fn holder() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("process {} on {host} since {} (unix milliseconds)", std::process::id(), now_unix_ms())
}

#[expect(clippy::disallowed_methods, reason = "the facade is the one place with a clock")]
pub(super) fn now_unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Random bits from the system; identities, not secrets.
pub(super) fn random_u128() -> u128 {
    use std::hash::{BuildHasher, Hasher};
    let half = || {
        let mut hasher = std::collections::hash_map::RandomState::new().build_hasher();
        hasher.write_u32(std::process::id());
        hasher.write_u64(now_unix_ms());
        u128::from(hasher.finish())
    };
    half() << 64 | half()
}
