//! Runs saves in the background: one thread a save, and a job that callers can wait for.
//!
//! A panic in that thread is an error of the save, never a silent death. The thread ends with its save,
//! so that an idle process has none and a fork finds none.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::merger::Merger;
use crate::repository::{SaveReport, SaveSession};
use crate::threads::guarded;

/// What became of a save; shared, because it is raised at more than one call.
pub type Outcome = std::result::Result<Arc<SaveReport>, Arc<Error>>;

/// A save that runs in the background.
#[derive(Debug, Default)]
pub struct Job {
    outcome: Mutex<Option<Outcome>>,
    done: Condvar,
    cancelled: AtomicBool,
}

impl Job {
    /// Starts the thread that writes and commits what the session staged, and then tells the merger.
    ///
    /// # Errors
    /// [`Error::Store`] where the system refuses a thread; nothing was saved then.
    pub fn start(session: SaveSession, merger: Arc<Merger>) -> Result<Arc<Self>> {
        let job = Arc::new(Self::default());
        let running = Arc::clone(&job);
        std::thread::Builder::new()
            .name(format!("varvite-save-{}", session.seq()))
            .spawn(move || {
                let outcome = guarded(|| session.run(&running.cancelled));
                // Before the end is told: whoever has waited for the save finds the merge it caused.
                merger.notice(outcome.is_ok());
                running.finish(outcome);
            })
            .map_err(Error::store("start a thread for", "the save"))?;
        Ok(job)
    }

    /// What became of it, or `None` while it runs.
    #[must_use]
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits at most this long for its end.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<Outcome> {
        let outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        let (outcome, _) = self
            .done
            .wait_timeout_while(outcome, timeout, |outcome| outcome.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        outcome.clone()
    }

    /// Asks it to end without a snapshot; it still may commit if it was nearly done.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    fn finish(&self, result: Result<SaveReport>) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(result.map(Arc::new).map_err(Arc::new));
        self.done.notify_all();
    }
}
