//! Pushes in the background, and keeps the lease: on threads of their own, beside saves and never in their way.
//!
//! One small thread lives from open to close: it renews the lease, takes one that was not to be had at open, and
//! tries again what failed. A push runs on a thread that ends with it. What went wrong is kept until a push
//! succeeds. A forked child has none of these threads, and does nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::repository::Repository;
use crate::sync::{LeaseState, PushControl, Pushed, TieredStore};
use crate::threads::{Interrupt, guarded, within_call};

/// How often a wait looks whether it was cancelled.
const POLL: Duration = Duration::from_millis(50);
/// Time from a failure to the next attempt: the first one, and the longest.
const RETRY_FROM: Duration = Duration::from_secs(5);
const RETRY_TO: Duration = Duration::from_secs(300);
/// Rounds of one push: retention after a push deletes what the next round removes.
const ROUND_LIMIT: usize = 3;

/// What a push did that somebody waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SyncReport {
    /// Objects that were sent.
    pub pushed_objects: u64,
    /// Their bytes.
    pub pushed_bytes: u64,
    /// Objects that were removed from the bucket.
    pub removed_objects: u64,
    /// Objects that the bucket still lacks.
    pub pending_objects: u64,
}

/// How the bucket stands to the folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SyncState {
    /// Address of the bucket.
    pub url: String,
    /// A push runs.
    pub is_running: bool,
    /// Objects that the push which runs, or ran last, has not sent yet.
    pub pending_objects: u64,
    /// Bytes of the packs among them.
    pub pending_bytes: u64,
    /// Bytes that went over the wire, those of attempts that failed too.
    pub moved_bytes: u64,
    /// Objects sent by this handle.
    pub pushed_objects: u64,
    /// Their bytes.
    pub pushed_bytes: u64,
    /// Objects that this handle has removed from the bucket.
    pub removed_objects: u64,
    /// Objects that were deleted here and may still lie there.
    pub pending_removals: u64,
    /// The newest snapshot that lies in the bucket, as far as is known.
    pub newest_pushed_seq: Option<u64>,
    /// Snapshots of the folder that the bucket lacks, ascending.
    pub unpushed: Vec<u64>,
    /// Snapshots that were dropped at open because another writer has used their numbers.
    pub discarded: Vec<u64>,
    /// Text of the failure that no push has made good yet.
    pub last_error: Option<String>,
    /// The lease.
    pub lease: LeaseState,
}

/// The way of one repository to its bucket.
#[derive(Debug)]
pub struct Syncer {
    repository: Repository,
    tiers: Arc<TieredStore>,
    progress: Mutex<Progress>,
    /// Rung when a push ends, when something is due, and at the end.
    changed: Condvar,
    stopping: Interrupt,
    /// The repository knows what the bucket held when the lease was taken.
    is_settled: AtomicBool,
    /// A forked child must not touch what the threads of its parent may hold.
    process: u32,
}

#[derive(Debug, Default)]
struct Progress {
    is_running: bool,
    /// A commit came while a push ran: there is to be another.
    is_wanted: bool,
    commit_count: u32,
    has_keeper: bool,
    failure: Option<Failure>,
    failure_count: u32,
    /// When what failed is tried again, by the clock of the tiers.
    retry_at: Option<Duration>,
}

/// What no push has made good yet.
#[derive(Debug)]
struct Failure {
    error: Arc<Error>,
    /// It was handed out.
    is_told: bool,
}

impl Syncer {
    /// A syncer that keeps the lease from now on, and pushes at once what an earlier process has left.
    #[must_use]
    pub fn new(repository: Repository, tiers: Arc<TieredStore>) -> Arc<Self> {
        let syncer = Self::quiet(repository, tiers);
        syncer.start_keeper();
        if syncer.has_work() {
            syncer.start_push();
        }
        syncer
    }

    /// A syncer without threads: it does what it is asked for, and [`Syncer::work_due`] is the caller's business.
    #[must_use]
    pub fn quiet(repository: Repository, tiers: Arc<TieredStore>) -> Arc<Self> {
        let syncer = Arc::new(Self {
            repository,
            is_settled: AtomicBool::new(tiers.is_ready()),
            tiers,
            progress: Mutex::default(),
            changed: Condvar::new(),
            stopping: Interrupt::default(),
            process: std::process::id(),
        });
        if let Some(failure) = syncer.tiers.take_failure() {
            syncer.keep(failure);
        }
        syncer
    }

    /// Notes that a save has ended; after every so many commits what the bucket lacks is pushed, in the background.
    pub fn notice(self: &Arc<Self>, is_committed: bool) {
        if !is_committed || self.is_stopping() || !self.is_same_process() {
            return;
        }
        {
            let mut progress = self.progress();
            progress.commit_count += 1;
            if progress.commit_count < self.tiers.options().sync_every {
                return;
            }
            progress.commit_count = 0;
        }
        self.start_push();
    }

    /// Waits for a push that runs, then pushes everything that the bucket lacks and removes what was deleted here.
    ///
    /// # Errors
    /// As [`TieredStore::push`]; [`Error::Interrupted`] after a cancel. What failed before and is not made good by this
    /// push fails again.
    pub fn sync_now(self: &Arc<Self>, cancelled: &AtomicBool) -> Result<SyncReport> {
        self.sync(cancelled, true)
    }

    /// The same, but what the push that runs fails of is not tried again: for who waits for the last time.
    ///
    /// # Errors
    /// As there.
    pub fn sync_last(self: &Arc<Self>, cancelled: &AtomicBool) -> Result<SyncReport> {
        self.sync(cancelled, false)
    }

    fn sync(self: &Arc<Self>, cancelled: &AtomicBool, tries_again: bool) -> Result<SyncReport> {
        if !self.is_same_process() {
            return Err(Error::invalid("push", "this is a fork of the process that opened the repository"));
        }
        self.take_turn(cancelled)?;
        if let Some(failure) = self.failure().filter(|_| !tries_again) {
            self.progress().is_running = false;
            self.changed.notify_all();
            return Err(failure.copied());
        }
        // Whoever waits also wants to know whether this writer still has the bucket, with nothing to push as well.
        let outcome = guarded(|| {
            self.rounds(cancelled, false).and_then(|done| self.tiers.confirm_lease().map(|()| done))
        });
        let report = self.finish(outcome);
        self.changed.notify_all();
        let done = report?;
        Ok(SyncReport {
            pushed_objects: done.objects,
            pushed_bytes: done.bytes,
            removed_objects: done.removed_objects,
            pending_objects: self.tiers.figures().pending_objects,
        })
    }

    /// True where the bucket has not been told of something that was put or removed here.
    #[must_use]
    pub fn has_changed(&self) -> bool {
        self.is_same_process() && self.tiers.has_changed()
    }

    /// How the bucket stands to the folder; of a fork only the address.
    #[must_use]
    pub fn state(&self) -> SyncState {
        if !self.is_same_process() {
            return SyncState { url: self.tiers.remote().root(), ..SyncState::default() };
        }
        let figures = self.tiers.figures();
        let (unpushed, newest_pushed_seq) = self.tiers.standing();
        let (is_running, last_error) = {
            let progress = self.progress();
            (progress.is_running, progress.failure.as_ref().map(|failure| failure.error.chain()))
        };
        SyncState {
            url: self.tiers.remote().root(),
            is_running,
            pending_objects: figures.pending_objects,
            pending_bytes: figures.pending_bytes,
            moved_bytes: self.tiers.moved_bytes(),
            pushed_objects: figures.pushed_objects,
            pushed_bytes: figures.pushed_bytes,
            removed_objects: figures.removed_objects,
            pending_removals: self.tiers.removal_count(),
            newest_pushed_seq,
            unpushed,
            discarded: self.tiers.discarded(),
            last_error,
            lease: self.tiers.lease(),
        }
    }

    /// A failure in the background that was not taken yet, once; it stays in the state until a push succeeds.
    #[must_use]
    pub fn take_failure(&self) -> Option<Arc<Error>> {
        if !self.is_same_process() {
            return None;
        }
        let mut progress = self.progress();
        let failure = progress.failure.as_mut().filter(|failure| !failure.is_told)?;
        failure.is_told = true;
        Some(Arc::clone(&failure.error))
    }

    /// What no push has made good yet.
    #[must_use]
    pub fn failure(&self) -> Option<Arc<Error>> {
        self.progress().failure.as_ref().map(|failure| Arc::clone(&failure.error))
    }

    /// Ends a push that runs, soon, starts no more, and lets go of the lease. What was sent stays sent: the next process
    /// goes on from there.
    ///
    /// # Errors
    /// [`Error::Interrupted`] after a cancel.
    pub fn stop(&self, cancelled: &AtomicBool) -> Result<()> {
        if !self.is_same_process() {
            return Ok(());
        }
        self.stopping.store(true, Ordering::Relaxed);
        self.changed.notify_all();
        self.wait_until(|progress| !progress.is_running && !progress.has_keeper, cancelled)?;
        let is_outage = |failure: &Failure| matches!(*failure.error, Error::Store { .. });
        let is_reachable = !self.progress().failure.as_ref().is_some_and(is_outage);
        if let Err(error) = self.tiers.release(is_reachable) {
            // The next writer waits until it has run out; nothing is lost.
            self.keep(Arc::new(error));
        }
        Ok(())
    }

    /// Does what is due now: renews the lease, takes one that is still wanted, tries again what failed. Returns the time
    /// until something is due again.
    pub fn work_due(self: &Arc<Self>) -> Duration {
        let clock = Arc::clone(self.tiers.clock());
        match self.tiers.keep_lease() {
            Ok(()) | Err(Error::Interrupted) => {}
            Err(error) => self.keep(Arc::new(error)),
        }
        self.note_settled();
        let now = clock.now();
        let due = {
            let mut progress = self.progress();
            let is_due = progress.retry_at.is_some_and(|at| at <= now);
            if is_due {
                progress.retry_at = None;
            }
            is_due
        };
        if due && !self.is_stopping() {
            self.start_push();
        }
        let retry = self.progress().retry_at.map(|at| at.saturating_sub(now));
        let lease = self.tiers.lease_due_in();
        [retry, lease].into_iter().flatten().min().unwrap_or(RETRY_TO)
    }

    /// Starts the thread that keeps the lease. It holds no strong reference while it waits, so that a syncer that is
    /// dropped without a stop ends it.
    fn start_keeper(self: &Arc<Self>) {
        self.progress().has_keeper = true;
        let (weak, stopping) = (Arc::downgrade(self), Arc::clone(&self.stopping));
        let started = std::thread::Builder::new()
            .name("varvite-lease".to_owned())
            .spawn(move || within_call(Some(stopping), || keep(&weak)));
        if let Err(error) = started {
            self.progress().has_keeper = false;
            self.keep(Arc::new(Error::store("start a thread for", "the lease")(error)));
        }
    }

    /// Starts a push, or notes that the one that runs is to be followed by another.
    fn start_push(self: &Arc<Self>) {
        let mut progress = self.progress();
        if progress.is_running {
            progress.is_wanted = true;
            return;
        }
        let syncer = Arc::clone(self);
        let stopping = Some(Arc::clone(&self.stopping));
        let started = std::thread::Builder::new()
            .name("varvite-push".to_owned())
            .spawn(move || within_call(stopping, || syncer.run_wanted()));
        match started {
            Ok(_) => progress.is_running = true,
            Err(error) => {
                drop(progress);
                self.keep(Arc::new(Error::store("start a thread for", "a push")(error)));
            }
        }
    }

    fn run_wanted(self: &Arc<Self>) {
        loop {
            let outcome = guarded(|| self.rounds(&self.stopping, true));
            let has_failed = outcome.is_err();
            // Kept, and told by whoever asks.
            let _ = self.note(outcome);
            let mut progress = self.progress();
            if !std::mem::take(&mut progress.is_wanted) || has_failed || self.is_stopping() {
                progress.is_running = false;
                drop(progress);
                self.changed.notify_all();
                return;
            }
        }
    }

    /// Pushes; then asks for retention, which may remove what was kept only for not being pushed; then removes that from
    /// the bucket too.
    fn rounds(&self, cancelled: &AtomicBool, may_be_outrun: bool) -> Result<Pushed> {
        let is_outrun = || may_be_outrun && self.progress().is_wanted;
        let mut sum = Pushed::default();
        for _ in 0..ROUND_LIMIT {
            let done = self.tiers.push(PushControl { cancelled, is_outrun: &is_outrun })?;
            sum.objects += done.objects;
            sum.bytes += done.bytes;
            sum.removed_objects += done.removed_objects;
            sum.is_outrun = done.is_outrun;
            if done.objects == 0 && !done.is_outrun {
                break;
            }
            if may_be_outrun && done.is_outrun {
                break;
            }
            if !self.repository.prune_again()? {
                break;
            }
        }
        Ok(sum)
    }

    /// Waits until no push runs, and takes its place.
    fn take_turn(&self, cancelled: &AtomicBool) -> Result<()> {
        let mut progress = self.progress();
        while progress.is_running {
            if cancelled.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            (progress, _) = self.changed.wait_timeout(progress, POLL).unwrap_or_else(PoisonError::into_inner);
        }
        progress.is_running = true;
        Ok(())
    }

    /// Ends the turn.
    fn finish(self: &Arc<Self>, outcome: Result<Pushed>) -> Result<Pushed> {
        let noted = self.note(outcome);
        let is_wanted = {
            let mut progress = self.progress();
            progress.is_running = false;
            std::mem::take(&mut progress.is_wanted)
        };
        if is_wanted && !self.is_stopping() {
            self.start_push();
        }
        noted
    }

    /// Notes how a push ended.
    fn note(&self, outcome: Result<Pushed>) -> Result<Pushed> {
        match outcome {
            Ok(done) => {
                let mut progress = self.progress();
                (progress.failure, progress.failure_count, progress.retry_at) = (None, 0, None);
                drop(progress);
                self.note_settled();
                Ok(done)
            }
            Err(Error::Interrupted) => Err(Error::Interrupted),
            Err(error) => Err(self.keep_and_copy(error)),
        }
    }

    /// Where lease and view were taken later than the lock: other snapshots may lie in the bucket than were known when
    /// the repository was opened.
    fn note_settled(&self) {
        if self.tiers.is_ready() && !self.is_settled.swap(true, Ordering::Relaxed) {
            self.repository.look_again();
        }
    }

    /// Keeps a failure and gives the caller one of the same text and kind.
    fn keep_and_copy(&self, error: Error) -> Error {
        let copy = error.copied();
        self.keep(Arc::new(error));
        copy
    }

    fn keep(&self, error: Arc<Error>) {
        let now = self.tiers.clock().now();
        let mut progress = self.progress();
        // One warning for what goes on failing.
        let is_same = |known: &Failure| known.error.chain() == error.chain();
        let is_told = progress.failure.as_ref().is_some_and(|known| known.is_told && is_same(known));
        // A bucket that was lost does not come back.
        let is_final = self.tiers.lease().fenced_by.is_some();
        let wait = RETRY_FROM.saturating_mul(1 << progress.failure_count.min(6)).min(RETRY_TO);
        progress.retry_at = (!is_final).then(|| now.saturating_add(wait));
        progress.failure_count = progress.failure_count.saturating_add(1);
        progress.failure = Some(Failure { error, is_told });
        drop(progress);
        self.changed.notify_all();
    }

    /// True where an earlier process has left something to push or to remove.
    fn has_work(&self) -> bool {
        self.tiers.has_work()
    }

    fn wait_until(&self, is_there: fn(&Progress) -> bool, cancelled: &AtomicBool) -> Result<()> {
        let mut progress = self.progress();
        while !is_there(&progress) {
            if cancelled.load(Ordering::Relaxed) {
                return Err(Error::Interrupted);
            }
            (progress, _) = self.changed.wait_timeout(progress, POLL).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(())
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    fn is_same_process(&self) -> bool {
        std::process::id() == self.process
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that keeps the lease.
fn keep(weak: &Weak<Syncer>) {
    loop {
        let Some(syncer) = weak.upgrade() else { return };
        let wait = guarded(|| Ok(syncer.work_due())).unwrap_or(RETRY_FROM);
        let progress = syncer.progress();
        if syncer.is_stopping() {
            let mut progress = progress;
            progress.has_keeper = false;
            drop(progress);
            syncer.changed.notify_all();
            return;
        }
        let wait = wait.clamp(Duration::from_millis(1), Duration::from_secs(1));
        drop(syncer.changed.wait_timeout(progress, wait));
    }
}
