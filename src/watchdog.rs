//! Ends the process at a deadline, whatever holds it up: a lock, a library, the interpreter.
//!
//! A thread of its own waits and needs nothing of the others. A forked child has no such thread, so nothing
//! ends it.

use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::kernel;

/// What the message may take: stderr may be a pipe that nobody reads.
const MESSAGE_TIME: Duration = Duration::from_secs(1);

/// A deadline of this process. It holds until it is cancelled; dropping the value changes nothing.
#[derive(Debug)]
pub struct Watchdog {
    state: Arc<State>,
    process: u32,
}

#[derive(Debug, Default)]
struct State {
    is_cancelled: Mutex<bool>,
    cancelled: Condvar,
}

impl Watchdog {
    /// Starts to wait. At the deadline `message` is written to stderr as a line, and the process ends with
    /// `exit_code`, without a handler or destructor being run.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for a deadline that no clock reaches, or an exit code that means success;
    /// [`Error::Store`] where the system refuses a thread.
    pub fn start(after: Duration, exit_code: u8, message: &str) -> Result<Self> {
        if exit_code == 0 {
            return Err(Error::invalid("exit code 0", "must be 1 to 255: the process did not end well"));
        }
        let deadline = Instant::now()
            .checked_add(after)
            .ok_or_else(|| Error::invalid("seconds", "the deadline is too far away"))?;
        let state: Arc<State> = Arc::default();
        let (watched, line) = (Arc::clone(&state), format!("{}\n", message.trim_end()));
        std::thread::Builder::new()
            .name("varvite-watchdog".to_owned())
            .spawn(move || watched.wait_until(deadline, exit_code, line))
            .map_err(Error::store("start a thread for", "a watchdog"))?;
        Ok(Self { state, process: std::process::id() })
    }

    /// Lets the process live: once this has returned the deadline has no effect.
    pub fn cancel(&self) {
        // In a forked child nobody waits, and the lock may be held by a thread that is not there.
        if std::process::id() == self.process {
            *self.state.lock() = true;
            self.state.cancelled.notify_all();
        }
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_cancelled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until(&self, deadline: Instant, exit_code: u8, line: String) {
        let mut is_cancelled = self.lock();
        while !*is_cancelled {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                // The lock is kept: a cancel that comes now must not return.
                say(line);
                kernel::exit_at_once(exit_code);
            }
            is_cancelled =
                self.cancelled.wait_timeout(is_cancelled, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Writes a line to stderr, or gives up on it.
fn say(line: String) {
    let (sender, receiver) = mpsc::channel();
    let started = std::thread::Builder::new().spawn(move || {
        let _ = std::io::stderr().write_all(line.as_bytes());
        let _ = sender.send(());
    });
    if started.is_ok() {
        let _ = receiver.recv_timeout(MESSAGE_TIME);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cancelled_watchdog_ends_its_thread() {
        let watchdog = Watchdog::start(Duration::from_secs(3_600), 1, "never").unwrap();
        watchdog.cancel();
        watchdog.cancel();
        let deadline = Instant::now() + Duration::from_secs(60);
        while Arc::strong_count(&watchdog.state) > 1 {
            assert!(Instant::now() < deadline, "the thread still waits");
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_means_success_or_no_deadline_is_refused() {
        for (after, exit_code, refused) in
            [(Duration::from_secs(3_600), 0, "exit code 0"), (Duration::MAX, 1, "seconds")]
        {
            let error = Watchdog::start(after, exit_code, "never").unwrap_err();
            assert!(matches!(&error, Error::InvalidInput { what, .. } if what == refused), "{error:?}");
        }
    }
}
