//! Runs saves in the background: one thread a save, and a job that callers can wait for.
//!
//! A panic in that thread is an error of the save, never a silent death. The thread ends with its save,
//! so that an idle process has none and a fork finds none.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
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
    progress: Mutex<Progress>,
    advanced: Condvar,
    cancelled: AtomicBool,
}

/// How far a save is.
#[derive(Debug, Default)]
struct Progress {
    /// Everything is copied and let go of, or never will be: nobody reads the caller's memory.
    is_copied: bool,
    outcome: Option<Outcome>,
}

impl Job {
    /// Starts the thread that copies what the session has not, writes and commits it, and then tells the
    /// merger.
    ///
    /// # Errors
    /// [`Error::Store`] where the system refuses a thread; nothing was saved then.
    pub fn start(session: SaveSession, merger: Arc<Merger>) -> Result<Arc<Self>> {
        let is_copied = !session.awaits_copy();
        let progress = Mutex::new(Progress { is_copied, outcome: None });
        let job = Arc::new(Self { progress, ..Self::default() });
        let running = Arc::clone(&job);
        std::thread::Builder::new()
            .name(format!("varvite-save-{}", session.seq()))
            .spawn(move || {
                let outcome = guarded(|| running.run(session));
                // Before the end is told: whoever has waited for the save finds the merge it caused.
                merger.notice(outcome.is_ok());
                running.finish(outcome);
            })
            .map_err(Error::store("start a thread for", "the save"))?;
        Ok(job)
    }

    fn run(&self, mut session: SaveSession) -> Result<SaveReport> {
        session.copy_later(&self.cancelled)?;
        self.advance(|progress| progress.is_copied = true);
        session.run(&self.cancelled)
    }

    /// What became of it, or `None` while it runs.
    #[must_use]
    pub fn outcome(&self) -> Option<Outcome> {
        self.progress().outcome.clone()
    }

    /// Waits at most this long for its end.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<Outcome> {
        self.wait_until(timeout, |progress| progress.outcome.is_some()).outcome.clone()
    }

    /// True when the save reads no memory of the caller any more: all is copied, or the save failed.
    #[must_use]
    pub fn is_copied(&self) -> bool {
        self.progress().is_copied
    }

    /// Waits at most this long until it is copied; false where the time was too short.
    #[must_use]
    pub fn wait_copied(&self, timeout: Duration) -> bool {
        self.wait_until(timeout, |progress| progress.is_copied).is_copied
    }

    /// Asks it to end without a snapshot; it still may commit if it was nearly done.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    fn finish(&self, result: Result<SaveReport>) {
        // A save that failed has dropped what it did not copy; whoever waits for the copy goes on.
        self.advance(|progress| {
            progress.is_copied = true;
            progress.outcome = Some(result.map(Arc::new).map_err(Arc::new));
        });
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn advance(&self, step: impl FnOnce(&mut Progress)) {
        step(&mut self.progress());
        self.advanced.notify_all();
    }

    fn wait_until(&self, timeout: Duration, is_there: fn(&Progress) -> bool) -> MutexGuard<'_, Progress> {
        let waited =
            self.advanced.wait_timeout_while(self.progress(), timeout, |progress| !is_there(progress));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
