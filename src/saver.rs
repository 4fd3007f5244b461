//! Runs saves in the background: one thread a save, and a job that callers can wait for.
//!
//! A panic in that thread is an error of the save, never a silent death. The thread ends with its save,
//! so that an idle process has none and a fork finds none.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::merger::Merger;
use crate::repository::{PartReport, PartSession, SaveReport, SaveSession};
use crate::syncer::Syncer;
use crate::threads::guarded;

/// What became of a save; shared, because it is raised at more than one call.
pub type Outcome<R> = std::result::Result<Arc<R>, Arc<Error>>;

/// A save that runs in the background: of a snapshot, or of a rank's part of one.
#[derive(Debug)]
pub struct Job<R = SaveReport> {
    progress: Mutex<Progress<R>>,
    advanced: Condvar,
    cancelled: AtomicBool,
}

/// How far a save is.
#[derive(Debug)]
struct Progress<R> {
    /// Everything is copied and let go of, or never will be: nobody reads the caller's memory.
    is_copied: bool,
    outcome: Option<Outcome<R>>,
}

impl Job {
    /// Starts the thread that copies what the session has not, writes and commits it, and then tells the
    /// merger, and the syncer if there is one.
    ///
    /// # Errors
    /// [`Error::Store`] where the system refuses a thread; nothing was saved then.
    pub fn start(
        session: SaveSession,
        merger: Arc<Merger>,
        syncer: Option<Arc<Syncer>>,
    ) -> Result<Arc<Self>> {
        let (seq, is_copied) = (session.seq(), !session.awaits_copy());
        let steps = (SaveSession::copy_later as CopyStep<_>, SaveSession::run as RunStep<_, _>);
        Self::spawn(seq, is_copied, session, steps, move |is_saved| {
            merger.notice(is_saved);
            if let Some(syncer) = &syncer {
                syncer.notice(is_saved);
            }
        })
    }
}

impl Job<PartReport> {
    /// Starts the thread that copies what the session of a rank has not, and writes its pack.
    ///
    /// # Errors
    /// As [`Job::start`].
    pub fn start_part(session: PartSession) -> Result<Arc<Self>> {
        let (seq, is_copied) = (session.seq(), !session.awaits_copy());
        let steps = (PartSession::copy_later as CopyStep<_>, PartSession::run as RunStep<_, _>);
        Self::spawn(seq, is_copied, session, steps, |_| ())
    }
}

type CopyStep<S> = fn(&mut S, &AtomicBool) -> Result<()>;
type RunStep<S, R> = fn(S, &AtomicBool) -> Result<R>;

impl<R: Send + Sync + 'static> Job<R> {
    fn spawn<S: Send + 'static>(
        seq: u64,
        is_copied: bool,
        mut session: S,
        (copy, run): (CopyStep<S>, RunStep<S, R>),
        ended: impl FnOnce(bool) + Send + 'static,
    ) -> Result<Arc<Self>> {
        let job = Arc::new(Self {
            progress: Mutex::new(Progress { is_copied, outcome: None }),
            advanced: Condvar::new(),
            cancelled: AtomicBool::new(false),
        });
        let running = Arc::clone(&job);
        std::thread::Builder::new()
            .name(format!("varvite-save-{seq}"))
            .spawn(move || {
                let outcome = guarded(|| {
                    copy(&mut session, &running.cancelled)?;
                    running.advance(|progress| progress.is_copied = true);
                    run(session, &running.cancelled)
                });
                // Before the end is told: whoever has waited for the save finds the merge it caused.
                ended(outcome.is_ok());
                running.finish(outcome);
            })
            .map_err(Error::store("start a thread for", "the save"))?;
        Ok(job)
    }

    /// What became of it, or `None` while it runs.
    #[must_use]
    pub fn outcome(&self) -> Option<Outcome<R>> {
        self.progress().outcome.clone()
    }

    /// Waits at most this long for its end.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<Outcome<R>> {
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

    fn finish(&self, result: Result<R>) {
        // A save that failed has dropped what it did not copy; whoever waits for the copy goes on.
        self.advance(|progress| {
            progress.is_copied = true;
            progress.outcome = Some(result.map(Arc::new).map_err(Arc::new));
        });
    }

    fn progress(&self) -> MutexGuard<'_, Progress<R>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn advance(&self, step: impl FnOnce(&mut Progress<R>)) {
        step(&mut self.progress());
        self.advanced.notify_all();
    }

    fn wait_until(
        &self,
        timeout: Duration,
        is_there: fn(&Progress<R>) -> bool,
    ) -> MutexGuard<'_, Progress<R>> {
        let waited =
            self.advanced.wait_timeout_while(self.progress(), timeout, |progress| !is_there(progress));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
