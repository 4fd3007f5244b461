//! Options of a bucket, checked: what is ours, and what goes to `object_store` under its own names.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// Length of a part of a large object, unless the object is so long that it needs longer ones.
const PART_BYTES: u64 = 16 << 20;

/// What S3 takes: parts but the last are at least this long.
const SHORTEST_PART_BYTES: u64 = 5 << 20;

/// The longest part that every provider takes.
const LONGEST_PART_BYTES: u64 = 1 << 30;

/// Parts that every provider takes of one object.
const PART_COUNT_LIMIT: u64 = 10_000;

/// Parts under way at once.
const PARALLEL: usize = 8;

/// The most that makes sense.
const PARALLEL_LIMIT: usize = 256;

/// Seconds for which a request is sent again.
const RETRY_SECONDS: f64 = 30.0;

/// How requests are sent.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// Length of a part.
    pub(super) part_bytes: u64,
    /// Parts under way at once; memory is this times the length of a part.
    pub(super) parallel: usize,
    /// Seconds for which a request is sent again.
    pub(super) retry_seconds: f64,
    /// Seconds for one request, instead of those by its size.
    pub(super) timeout_seconds: Option<f64>,
    /// The user says that nobody else ever writes: conditions are looked at before a put, as far as that goes.
    pub(super) single_writer: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            part_bytes: PART_BYTES,
            parallel: PARALLEL,
            retry_seconds: RETRY_SECONDS,
            timeout_seconds: None,
            single_writer: false,
        }
    }
}

impl Settings {
    /// Takes what is ours out of `options`.
    pub(super) fn take(options: &mut BTreeMap<String, String>) -> Result<Self> {
        let mut settings = Self::default();
        if let Some(bytes) = take_number::<u64>(options, "part_bytes")? {
            if !(SHORTEST_PART_BYTES..=LONGEST_PART_BYTES).contains(&bytes) {
                let reason = format!("must be {SHORTEST_PART_BYTES} to {LONGEST_PART_BYTES}, not: {bytes}");
                return Err(Error::invalid("option `part_bytes`", reason));
            }
            settings.part_bytes = bytes;
        }
        if let Some(count) = take_number::<usize>(options, "parallel")? {
            if !(1..=PARALLEL_LIMIT).contains(&count) {
                let reason = format!("must be 1 to {PARALLEL_LIMIT}, not: {count}");
                return Err(Error::invalid("option `parallel`", reason));
            }
            settings.parallel = count;
        }
        settings.timeout_seconds = take_seconds(options, "timeout_seconds")?;
        settings.retry_seconds = take_seconds(options, "retry_seconds")?.unwrap_or(RETRY_SECONDS);
        settings.single_writer = take_flag(options, "single_writer")?.unwrap_or(false);
        Ok(settings)
    }

    /// Length of the parts of an object: equal ones, as few as needed.
    pub(super) fn part_bytes_for(&self, length_bytes: u64) -> u64 {
        let needed = length_bytes.div_ceil(PART_COUNT_LIMIT);
        self.part_bytes.max(needed.div_ceil(1 << 20) << 20)
    }
}

/// Takes a number out of the options.
fn take_number<T: std::str::FromStr>(
    options: &mut BTreeMap<String, String>,
    name: &str,
) -> Result<Option<T>> {
    let Some(text) = options.remove(name) else { return Ok(None) };
    let invalid =
        || Error::invalid(format!("option `{name}`"), format!("must be a whole number, not: `{text}`"));
    text.parse().map(Some).map_err(|_not_a_number| invalid())
}

fn take_seconds(options: &mut BTreeMap<String, String>, name: &str) -> Result<Option<f64>> {
    let Some(text) = options.remove(name) else { return Ok(None) };
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.0..=86_400.0).contains(seconds));
    let invalid =
        || Error::invalid(format!("option `{name}`"), format!("must be 0 to 86400 seconds, not: `{text}`"));
    seconds.map(Some).ok_or_else(invalid)
}

/// Takes a truth value out of the options.
pub(super) fn take_flag(options: &mut BTreeMap<String, String>, name: &str) -> Result<Option<bool>> {
    let Some(text) = options.remove(name) else { return Ok(None) };
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" => Ok(Some(true)),
        "false" | "0" => Ok(Some(false)),
        _ => Err(Error::invalid(
            format!("option `{name}`"),
            format!("must be `true` or `false`, not: `{text}`"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_grow_with_objects_that_would_need_too_many() {
        const MIB: u64 = 1 << 20;
        let settings = Settings::default();
        for (length_bytes, part_bytes) in [
            (0, 16 * MIB),
            (1 << 30, 16 * MIB),
            (160_000 * MIB, 16 * MIB),
            (160_000 * MIB + 1, 17 * MIB),
            (640_000 * MIB, 64 * MIB),
            (5 << 40, 525 * MIB),
        ] {
            assert_eq!(settings.part_bytes_for(length_bytes), part_bytes, "{length_bytes}");
            assert!(length_bytes.div_ceil(part_bytes) <= PART_COUNT_LIMIT);
        }
    }

    #[test]
    fn ours_are_taken_and_the_others_left() {
        let text = [("parallel", "3"), ("part_bytes", "6291456"), ("retry_seconds", "1.5"), ("region", "x")];
        let mut options = text.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let settings = Settings::take(&mut options).unwrap();
        assert_eq!((settings.parallel, settings.part_bytes), (3, 6 << 20));
        assert_eq!(
            (settings.retry_seconds, settings.timeout_seconds, settings.single_writer),
            (1.5, None, false)
        );
        assert_eq!(options.into_keys().collect::<Vec<_>>(), ["region"]);
    }
}
