//! One runtime, and one loop that sends a request until it is answered.
//!
//! `object_store` has retries of its own, which are off here: it does not sign again, keeps using credentials
//! that have ended, and does not tell whether a publish it sent twice was done the first time.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::{Either, select};
use rustls::crypto::ring;
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

use super::credentials::CachedCredentials;
use super::failure::{Failure, Kind};
use crate::error::{Error, Result};
use crate::threads::{PerProcess, interrupt};

/// Threads that move bytes; callers wait on threads of their own.
const WORKER_COUNT: usize = 2;

/// The pause before the second attempt; it doubles from attempt to attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// How soon an interrupt is heeded.
const INTERRUPT_POLL: Duration = Duration::from_millis(50);

/// The longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

/// The runtime of this process: a forked child has none of its parent's threads.
pub(super) fn runtime() -> Result<std::sync::Arc<Runtime>> {
    static RUNTIME: PerProcess<Runtime> = PerProcess::new();
    RUNTIME.get(|| {
        Builder::new_multi_thread()
            .worker_threads(WORKER_COUNT)
            .thread_name("varvite-bucket")
            .enable_all()
            .build()
            .map_err(Error::store("start threads of", "the bucket"))
    })
}

/// Runs what asks the server to its end.
///
/// # Errors
/// [`Error::Interrupted`] soon after the call was interrupted that this thread works for.
pub(super) fn finish<F: Future>(asking: F) -> Result<F::Output> {
    let runtime = runtime()?;
    let Some(interrupt) = interrupt() else { return Ok(runtime.block_on(asking)) };
    runtime.block_on(async {
        match select(pin!(asking), pin!(raised(&interrupt))).await {
            Either::Left((output, _)) => Ok(output),
            Either::Right(_) => Err(Error::Interrupted),
        }
    })
}

async fn raised(interrupt: &AtomicBool) {
    while !interrupt.load(Ordering::Relaxed) {
        tokio::time::sleep(INTERRUPT_POLL).await;
    }
}

/// Sends of one request: when there is another one, and what is in doubt.
///
/// A loop around a request calls [`Attempts::after`] with each error; that waits, or ends the loop.
pub(super) struct Attempts<'a> {
    seconds: f64,
    credentials: Option<&'a CachedCredentials>,
    start: Instant,
    count: u32,
    may_be_done: bool,
    renewed: bool,
}

impl<'a> Attempts<'a> {
    /// Begins a request that is sent again for so many seconds. `credentials` can be fetched anew, once, where
    /// the server says that they have ended.
    pub(super) fn new(seconds: f64, credentials: Option<&'a CachedCredentials>) -> Self {
        Self { seconds, credentials, start: Instant::now(), count: 0, may_be_done: false, renewed: false }
    }

    /// Waits until the request may be sent again.
    ///
    /// # Errors
    /// The failure, where it is for good or time is up.
    pub(super) async fn after(&mut self, error: &object_store::Error) -> Result<(), Failure> {
        self.count += 1;
        let mut failure = Failure::of(error);
        failure.may_be_done = self.may_be_done || failure.leaves_doubt();
        self.may_be_done = failure.may_be_done;
        if failure.kind == Kind::Expired
            && !self.renewed
            && let Some(credentials) = self.credentials
        {
            credentials.forget();
            self.renewed = true;
            return Ok(());
        }
        if !failure.is_transient() {
            return Err(failure);
        }
        let pause = pause(self.count);
        if (self.start.elapsed() + pause).as_secs_f64() > self.seconds {
            if self.count > 1 {
                let (count, seconds) = (self.count, self.start.elapsed().as_secs_f64());
                failure.text = format!("{} ({count} attempts in {seconds:.0} s)", failure.text);
            }
            return Err(failure);
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }
}

/// Doubles from attempt to attempt, and is cut by up to a half, so that many clients do not come back at once.
fn pause(attempt: u32) -> Duration {
    let whole = FIRST_PAUSE.saturating_mul(1 << (attempt - 1).min(16)).min(LONGEST_PAUSE);
    whole.mul_f64(0.5 + 0.5 * f64::from(random_u32()) / f64::from(u32::MAX))
}

/// Random bits of the system; zero where it has none.
pub(super) fn random_u32() -> u32 {
    let mut bytes = [0; 4];
    let filled = ring::default_provider().secure_random.fill(&mut bytes);
    if filled.is_ok() { u32::from_le_bytes(bytes) } else { 0 }
}
