//! Time that passes: never a date, and never compared across machines.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// How soon a cancel is heeded.
const CANCEL_POLL: Duration = Duration::from_millis(100);

/// A clock that only goes forward.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Time since some moment that stays the same while the value lives.
    fn now(&self) -> Duration;

    /// Waits.
    fn sleep(&self, time: Duration);
}

/// The clock of the system.
#[derive(Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// Waits so long.
///
/// # Errors
/// [`Error::Interrupted`] soon after a cancel.
pub(super) fn wait(clock: &dyn Clock, time: Duration, cancelled: &AtomicBool) -> Result<()> {
    let end = clock.now() + time;
    loop {
        if cancelled.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let left = end.saturating_sub(clock.now());
        if left.is_zero() {
            return Ok(());
        }
        clock.sleep(left.min(CANCEL_POLL));
    }
}

/// Shortest time in which so many bytes keep to a limit.
pub(super) fn least_time(length_bytes: u64, limit_bytes_per_second: u64) -> Duration {
    let microseconds = u128::from(length_bytes) * 1_000_000 / u128::from(limit_bytes_per_second.max(1));
    Duration::from_micros(u64::try_from(microseconds).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_bytes_in_a_second() {
        assert_eq!(least_time(3_000_000, 2_000_000), Duration::from_millis(1_500));
        assert_eq!(least_time(1, u64::MAX), Duration::ZERO);
        assert_eq!(least_time(u64::MAX, 1), Duration::from_micros(u64::MAX));
    }
}
