//! Runs merges in the background: after a commit, on a thread of its own, never two at once.
//!
//! Neither a save nor a load waits for it. What it did wrong is kept until somebody hears of it. The thread
//! ends with its merge, so that an idle process has none and a fork finds none.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::repository::{MergeReport, Repository};
use crate::threads::guarded;
use crate::verify::Finding;

/// Failures and findings that are kept for whoever asks; of more, the oldest are forgotten.
const KEPT_COUNT: usize = 16;
/// How often a wait looks whether it was cancelled.
const POLL: Duration = Duration::from_millis(50);

/// The merges of one repository.
#[derive(Debug)]
pub struct Merger {
    repository: Repository,
    progress: Mutex<Progress>,
    idle: Condvar,
    stopping: AtomicBool,
}

#[derive(Debug, Default)]
struct Progress {
    is_running: bool,
    /// A commit came while a merge ran: there is to be another.
    is_wanted: bool,
    failures: VecDeque<Arc<Error>>,
    findings: VecDeque<Finding>,
}

impl Merger {
    /// A merger that does nothing yet.
    #[must_use]
    pub fn new(repository: Repository) -> Arc<Self> {
        Arc::new(Self {
            repository,
            progress: Mutex::default(),
            idle: Condvar::new(),
            stopping: AtomicBool::new(false),
        })
    }

    /// Notes that a save has ended; after a commit the policy is asked, in the background.
    pub fn notice(self: &Arc<Self>, is_committed: bool) {
        if !is_committed || !self.repository.has_merge_policy() || self.is_stopping() {
            return;
        }
        let mut progress = self.progress();
        if progress.is_running {
            progress.is_wanted = true;
            return;
        }
        let merger = Arc::clone(self);
        let started =
            std::thread::Builder::new().name("varvite-merge".to_owned()).spawn(move || merger.run_due());
        match started {
            Ok(_) => progress.is_running = true,
            Err(error) => progress.keep(Error::store("start a thread for", "a merge")(error)),
        }
    }

    fn run_due(&self) {
        loop {
            let outcome = guarded(|| self.repository.merge(false, &self.stopping));
            let mut progress = self.progress();
            match outcome {
                Ok(report) => progress.findings.extend(report.findings),
                Err(Error::Interrupted) if self.is_stopping() => {}
                Err(error) => progress.keep(error),
            }
            let surplus = progress.findings.len().saturating_sub(KEPT_COUNT);
            progress.findings.drain(..surplus);
            if !std::mem::take(&mut progress.is_wanted) || self.is_stopping() {
                progress.is_running = false;
                self.idle.notify_all();
                return;
            }
        }
    }

    /// Waits for a merge that runs, then merges everything of which something is gained.
    ///
    /// # Errors
    /// As [`Repository::merge`]; [`Error::Interrupted`] after a cancel.
    pub fn merge_now(self: &Arc<Self>, cancelled: &AtomicBool) -> Result<MergeReport> {
        let mut progress = self.wait_until_idle(|| cancelled.load(Ordering::Relaxed))?;
        progress.is_running = true;
        drop(progress);
        let outcome = guarded(|| self.repository.merge(true, cancelled));
        let mut progress = self.progress();
        progress.is_running = false;
        let is_wanted = std::mem::take(&mut progress.is_wanted);
        drop(progress);
        self.idle.notify_all();
        self.notice(is_wanted);
        outcome
    }

    /// Waits until no merge runs.
    ///
    /// # Errors
    /// [`Error::Interrupted`] after a cancel.
    pub fn wait(&self, cancelled: &AtomicBool) -> Result<()> {
        self.wait_until_idle(|| cancelled.load(Ordering::Relaxed)).map(drop)
    }

    /// Ends a merge that runs, waits for its end, and starts no more. What it has done stays done, and what
    /// it left lying goes with the next sweep.
    ///
    /// # Errors
    /// [`Error::Interrupted`] after a cancel.
    pub fn stop(&self, cancelled: &AtomicBool) -> Result<()> {
        self.stopping.store(true, Ordering::Relaxed);
        self.wait(cancelled)
    }

    /// The oldest failure of a merge in the background that nobody has taken yet.
    #[must_use]
    pub fn take_failure(&self) -> Option<Arc<Error>> {
        self.progress().failures.pop_front()
    }

    /// The damage that merges in the background met and nobody has taken yet.
    #[must_use]
    pub fn take_findings(&self) -> Vec<Finding> {
        self.progress().findings.drain(..).collect()
    }

    fn wait_until_idle(&self, is_cancelled: impl Fn() -> bool) -> Result<MutexGuard<'_, Progress>> {
        let mut progress = self.progress();
        while progress.is_running {
            if is_cancelled() {
                return Err(Error::Interrupted);
            }
            (progress, _) = self.idle.wait_timeout(progress, POLL).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(progress)
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress {
    fn keep(&mut self, error: Error) {
        if self.failures.len() == KEPT_COUNT {
            self.failures.pop_front();
        }
        self.failures.push_back(Arc::new(error));
    }
}
