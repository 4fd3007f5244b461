//! Whether a save codes its chunks: what the caller asked for, and what was measured so far.

#![expect(clippy::cast_precision_loss, reason = "rates need no more digits than a float has")]

use crate::codec::Effort;

/// How small chunks are made, as the caller wishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Chunks are stored as they are.
    None,
    /// As fast as memory, nearly.
    Fast,
    /// As small as it gets.
    Max,
    /// As `Fast`, where that is clearly faster than the store.
    #[default]
    Auto,
}

/// How many times faster than the store coding has to be for [`Compression::Auto`]. A save runs beside
/// training, which needs the processors too: coding at the store's own pace would keep one of them busy for
/// as long as the save takes.
const FASTER_THAN_STORE: f64 = 2.0;

/// Coding that was too slow is measured anew once in so many saves: the machine may be less busy.
const MEASURE_EVERY: u64 = 8;

/// Bytes that a save must have stored for its speed to say something about the store.
const MEASURED_FROM_BYTES: u64 = 32 << 20;

/// What earlier saves of this process measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    /// Bytes per second that the store took, at least.
    pub store_bytes_per_second: Option<f64>,
    /// Raw bytes per second that coding took in, with all threads.
    pub coding_bytes_per_second: Option<f64>,
    /// Saves that were measured.
    pub save_count: u64,
}

/// What one save measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measured {
    /// Bytes that went to the store.
    pub stored_bytes: u64,
    /// Seconds from the first byte until all were durable.
    pub seconds: f64,
    /// Those of them in which the save waited for the store.
    pub waiting_seconds: f64,
    /// Raw bytes that were coded.
    pub coded_bytes: u64,
    /// Seconds of coding them.
    pub coding_seconds: f64,
}

impl Pace {
    /// The pace after one more save.
    #[must_use]
    pub fn after(self, save: Measured) -> Self {
        let mut pace = Self { save_count: self.save_count.saturating_add(1), ..self };
        if save.stored_bytes >= MEASURED_FROM_BYTES && save.seconds > 0.0 {
            let rate = save.stored_bytes as f64 / save.seconds;
            // A save that seldom waited only shows that the store is no slower than this.
            let is_bound_by_store = save.waiting_seconds * 2.0 > save.seconds;
            let known = pace.store_bytes_per_second.filter(|_| !is_bound_by_store);
            pace.store_bytes_per_second = Some(known.map_or(rate, |known| known.max(rate)));
        }
        if save.coded_bytes >= MEASURED_FROM_BYTES / 2 && save.coding_seconds > 0.0 {
            pace.coding_bytes_per_second = Some(save.coded_bytes as f64 / save.coding_seconds);
        }
        pace
    }
}

/// How a save codes: with what effort, and how many raw bytes per second that must reach to go on.
/// `None` stores chunks as they are.
#[must_use]
pub fn effort(compression: Compression, pace: Pace) -> Option<(Effort, Option<f64>)> {
    match compression {
        Compression::None => None,
        Compression::Fast => Some((Effort::Fast, None)),
        Compression::Max => Some((Effort::Max, None)),
        Compression::Auto => {
            let least = pace.store_bytes_per_second? * FASTER_THAN_STORE;
            let is_too_slow = pace.coding_bytes_per_second.is_some_and(|known| known < least);
            let is_due = pace.save_count.is_multiple_of(MEASURE_EVERY);
            (!is_too_slow || is_due).then_some((Effort::Fast, Some(least)))
        }
    }
}

/// True where differences to the base are tried for an entry, after so many saves in a row in which they did
/// not pay. Reading the base costs as much as writing, so what never pays is seldom tried.
#[must_use]
pub fn tries_delta(failure_count: u32) -> bool {
    failure_count < 2 || failure_count.is_multiple_of(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn stored(mib: u64, seconds: f64, waiting_seconds: f64) -> Measured {
        Measured { stored_bytes: mib * MIB, seconds, waiting_seconds, ..Measured::default() }
    }

    #[test]
    fn what_the_caller_says_is_done_whatever_was_measured() {
        let slow = Pace { coding_bytes_per_second: Some(1.0), ..Pace::default() };
        assert_eq!(effort(Compression::None, slow), None);
        assert_eq!(effort(Compression::Fast, slow), Some((Effort::Fast, None)));
        assert_eq!(effort(Compression::Max, slow), Some((Effort::Max, None)));
    }

    #[test]
    fn auto_stores_until_the_store_is_known_and_codes_where_that_is_twice_as_fast() {
        assert_eq!(effort(Compression::Auto, Pace::default()), None);
        let pace = Pace::default().after(stored(100, 1.0, 0.9));
        let least = 2.0 * (100 * MIB) as f64;
        assert_eq!(effort(Compression::Auto, pace), Some((Effort::Fast, Some(least))));
        let fast = Pace { coding_bytes_per_second: Some(least), ..pace };
        assert_eq!(effort(Compression::Auto, fast), Some((Effort::Fast, Some(least))));
        let slow = Pace { coding_bytes_per_second: Some(least * 0.99), ..pace };
        assert_eq!(effort(Compression::Auto, slow), None);
        let due = Pace { save_count: 16, ..slow };
        assert_eq!(effort(Compression::Auto, due), Some((Effort::Fast, Some(least))));
    }

    #[test]
    fn a_save_that_did_not_wait_for_the_store_only_raises_what_is_known() {
        let pace = Pace::default().after(stored(100, 1.0, 0.9)).after(stored(100, 2.0, 0.1));
        assert_eq!(pace.store_bytes_per_second, Some((100 * MIB) as f64));
        let pace = pace.after(stored(300, 2.0, 0.1));
        assert_eq!(pace.store_bytes_per_second, Some((150 * MIB) as f64));
        let pace = pace.after(stored(50, 1.0, 0.9));
        assert_eq!(pace.store_bytes_per_second, Some((50 * MIB) as f64));
    }

    #[test]
    fn a_small_save_measures_nothing() {
        let pace = Pace::default().after(stored(31, 1.0, 0.9));
        assert_eq!(pace, Pace { save_count: 1, ..Pace::default() });
    }

    #[test]
    fn what_does_not_pay_is_tried_twice_and_then_seldom() {
        let tried: Vec<u32> = (0..20).filter(|&count| tries_delta(count)).collect();
        assert_eq!(tried, [0, 1, 8, 16]);
    }
}
