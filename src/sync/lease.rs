//! The lease of a bucket: one writer at a time, told by compare-and-swap of `lease.json`.
//!
//! IMPORTANT: no clocks are compared. A watcher takes a lease for expired when it saw no other version of it for
//! the holder's own time, by its own clock. A holder that was only paused finds another version at its next
//! renewal, and renews before it publishes anything that counts.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::digest::xxh3_128;
use crate::error::{Error, Result};
use crate::format::lease::Lease;
use crate::format::{limits, names};
use crate::process::ProcessIdentity;
use crate::store::remote::{RemoteStore, Version};
use crate::store::{Folder, Key};
use crate::threads::interrupt;

use super::clock::{Clock, wait};
use super::notes::Notes;

/// Writers that took the lease in between, one after the other, before a third one gives up.
pub(super) const RACE_LIMIT: usize = 16;

/// What is known of the lease of a bucket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseState {
    /// Number of the writer, counted since the bucket was new; 0 where that is not known.
    pub epoch: u64,
    /// Whoever holds it, as it says itself; empty where that is not known.
    pub holder: String,
    /// This handle holds it.
    pub is_ours: bool,
    /// The writer to which this handle has lost the bucket, for good.
    pub fenced_by: Option<String>,
}

/// This writer's part in the lease of a bucket.
#[derive(Debug)]
pub(super) struct LeaseKeeper {
    remote: Arc<dyn RemoteStore>,
    clock: Arc<dyn Clock>,
    notes: Arc<Notes>,
    key: Key,
    milliseconds: u64,
    takeover: bool,
    /// In a forked child the mutexes may be held by threads that are not there.
    process: u32,
    /// Taken for a whole request: they come one after the other.
    turn: Mutex<()>,
    standing: Mutex<Standing>,
}

#[derive(Clone, Debug)]
enum Standing {
    Unasked,
    Wanted { own: Lease, watched: Option<Watched> },
    Held(Held),
    Lost { object: String, by: String, epoch: u64 },
    Closed,
}

/// A lease of another writer that may still live.
#[derive(Clone, Debug)]
struct Watched {
    version: Version,
    /// When this version was seen first.
    since: Duration,
    time: Duration,
    holder: String,
    epoch: u64,
}

#[derive(Clone, Debug)]
struct Held {
    lease: Lease,
    version: Version,
    /// Before the request that confirmed it last.
    confirmed: Duration,
}

/// What a look at the lease has shown.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// It is ours.
    Held,
    /// Another writer was faster: look again.
    Raced,
    /// Another writer holds it, and may be dead: if it is, it is free after this time.
    Waiting(Duration),
    /// Another writer holds it and lives.
    Alive(String),
}

impl LeaseKeeper {
    pub(super) fn new(
        remote: Arc<dyn RemoteStore>,
        clock: Arc<dyn Clock>,
        notes: Arc<Notes>,
        milliseconds: u64,
        takeover: bool,
    ) -> Result<Self> {
        let key = Key::new(Folder::Root, names::LEASE_NAME)?;
        let (turn, standing) = (Mutex::default(), Mutex::new(Standing::Unasked));
        let process = std::process::id();
        Ok(Self { remote, clock, notes, key, milliseconds, takeover, process, turn, standing })
    }

    /// Takes the lease, waiting for the end of one whose holder shows no sign of life.
    ///
    /// # Errors
    /// [`Error::Locked`] where its holder lives; [`Error::Store`] where the bucket can't be reached: the lease
    /// stays wanted, see [`LeaseKeeper::look`]; [`Error::Interrupted`] after an
    /// interrupt.
    pub(super) fn take(&self, holder: &str) -> Result<()> {
        *self.standing() = Standing::Wanted { own: self.own(holder), watched: None };
        let poll = Duration::from_millis((self.milliseconds / 10).max(1));
        let (mut race_count, interrupt) = (0, interrupt().unwrap_or_default());
        loop {
            let holder = match self.look()? {
                Look::Held => return Ok(()),
                Look::Raced if race_count < RACE_LIMIT => {
                    race_count += 1;
                    continue;
                }
                Look::Waiting(left) => {
                    if let Err(error) = wait(self.clock.as_ref(), left.min(poll), &interrupt) {
                        self.close();
                        return Err(error);
                    }
                    continue;
                }
                Look::Raced => "several writers at once".to_owned(),
                Look::Alive(holder) => holder,
            };
            self.close();
            return Err(Error::Locked { root: self.remote.root(), holder });
        }
    }

    /// Looks at the lease once, and takes it where it is free.
    ///
    /// # Errors
    /// [`Error::Store`] where the bucket can't be reached; [`Error::Conflict`] after it was lost.
    pub(super) fn look(&self) -> Result<Look> {
        let _turn = self.turn();
        let (own, watched) = match self.standing().clone() {
            Standing::Wanted { own, watched } => (own, watched),
            Standing::Held(_) => return Ok(Look::Held),
            lost @ Standing::Lost { .. } => return Err(lost.conflict()),
            Standing::Unasked | Standing::Closed => {
                return Err(Error::Internal { what: "a lease is looked at that nobody wants".to_owned() });
            }
        };
        let now = self.clock.now();
        let Some((found, version)) = self.read()? else {
            self.remote.require_promises()?;
            return self.swap(own, None, None, now);
        };
        let is_own = found.as_ref().is_some_and(|lease| lease.nonce == own.nonce);
        let is_free = found.as_ref().is_some_and(|lease| lease.released || is_abandoned(lease));
        if let Some(lease) = found.clone().filter(|_| is_own) {
            // It was taken by a request whose answer was lost.
            *self.standing() = Standing::Held(Held { lease, version, confirmed: now });
            return Ok(Look::Held);
        }
        let has_ended = |watched: &Watched| now.saturating_sub(watched.since) >= watched.time;
        let is_same = |watched: &&Watched| watched.version == version;
        if is_free || self.takeover || watched.as_ref().filter(is_same).is_some_and(has_ended) {
            return self.swap(own, found.as_ref(), Some(&version), now);
        }
        if let Some(known) = watched.as_ref().filter(is_same) {
            return Ok(Look::Waiting(known.time.saturating_sub(now.saturating_sub(known.since))));
        }
        let holder = described(found.as_ref());
        let epoch = found.as_ref().map_or(0, |lease| lease.epoch);
        let time = Duration::from_millis(found.map_or(self.milliseconds, |lease| lease.milliseconds));
        let was_watched = watched.is_some();
        // After the answer: it may have been renewed while the request was under way.
        let since = self.clock.now();
        let watched = Some(Watched { version, since, time, holder: holder.clone(), epoch });
        *self.standing() = Standing::Wanted { own, watched };
        Ok(if was_watched { Look::Alive(holder) } else { Look::Waiting(time) })
    }

    fn swap(
        &self,
        own: Lease,
        before: Option<&Lease>,
        expected: Option<&Version>,
        now: Duration,
    ) -> Result<Look> {
        let epoch = before.map_or(1, |lease| lease.epoch.saturating_add(1));
        let is_next = |lease: &&Lease| self.notes.has_claimed(&lease.nonce);
        let since_nonce =
            before.filter(is_next).map_or_else(|| own.nonce.clone(), |lease| lease.since_nonce.clone());
        // IMPORTANT: before the request. Whatever becomes of this process and of the answer, the folder knows the lease
        // for its own then.
        self.notes.claim(&own.nonce)?;
        let lease = Lease { epoch, since_nonce, ..own };
        match self.remote.swap(&self.key, &lease.encode()?, expected) {
            Ok(version) => {
                *self.standing() = Standing::Held(Held { lease, version, confirmed: now });
                Ok(Look::Held)
            }
            Err(Error::Conflict { .. }) => Ok(Look::Raced),
            Err(error) if error.is_not_found() => Ok(Look::Raced),
            Err(error) => Err(error),
        }
    }

    /// Renews a lease that is held; does nothing where none was taken.
    ///
    /// # Errors
    /// [`Error::Interrupted`] where it was let go of;
    /// [`Error::Conflict`] where another writer has it by now, for good; [`Error::Store`] where the bucket can't
    /// be reached: whether it is still ours is not known then.
    pub(super) fn renew(&self) -> Result<()> {
        let _turn = self.turn();
        let mut held = match self.standing().clone() {
            Standing::Held(held) => held,
            lost @ Standing::Lost { .. } => return Err(lost.conflict()),
            // Whoever pushes still has not heard of it.
            Standing::Closed => return Err(Error::Interrupted),
            Standing::Unasked | Standing::Wanted { .. } => return Ok(()),
        };
        for _ in 0..RACE_LIMIT {
            let now = self.clock.now();
            let lease = Lease { renewal: held.lease.renewal.wrapping_add(1), ..held.lease.clone() };
            match self.remote.swap(&self.key, &lease.encode()?, Some(&held.version)) {
                Ok(version) => {
                    *self.standing() = Standing::Held(Held { lease, version, confirmed: now });
                    return Ok(());
                }
                Err(error) if matches!(error, Error::Conflict { .. }) || error.is_not_found() => {}
                Err(error) => return Err(error),
            }
            // Its version is another one: by a renewal whose answer was lost, or by another writer.
            match self.read()? {
                Some((Some(found), version)) if found.nonce == held.lease.nonce => {
                    held = Held { lease: found, version, confirmed: now };
                }
                Some((found, _)) => {
                    let epoch = found.as_ref().map_or(0, |lease| lease.epoch);
                    return Err(self.lose(names::LEASE_NAME, &described(found.as_ref()), epoch));
                }
                None => {
                    return Err(self.lose(names::LEASE_NAME, "whoever has removed it", held.lease.epoch));
                }
            }
        }
        Err(self.lose(names::LEASE_NAME, "several writers at once", held.lease.epoch))
    }

    /// Renews a lease that was not renewed for a third of its time.
    ///
    /// # Errors
    /// As [`LeaseKeeper::renew`].
    pub(super) fn renew_if_due(&self) -> Result<()> {
        if self.due_in().is_some_and(|left| left.is_zero()) { self.renew() } else { Ok(()) }
    }

    /// Time until the next renewal, where the lease is held.
    pub(super) fn due_in(&self) -> Option<Duration> {
        let third = Duration::from_millis((self.milliseconds / 3).max(1));
        match &*self.standing() {
            Standing::Held(held) => {
                Some(third.saturating_sub(self.clock.now().saturating_sub(held.confirmed)))
            }
            _ => None,
        }
    }

    /// Gives the bucket up to another writer, for good; returns the error that says so.
    pub(super) fn lose(&self, object: &str, by: &str, epoch: u64) -> Error {
        let mut standing = self.standing();
        if !matches!(*standing, Standing::Lost { .. }) {
            let own = match &*standing {
                Standing::Held(Held { lease: own, .. }) | Standing::Wanted { own, .. } => {
                    forget(&own.nonce);
                    own.holder.clone()
                }
                _ => "unknown".to_owned(),
            };
            let object = format!("{}/{object}", self.remote.root());
            *standing = Standing::Lost { object, by: format!("{by}; this writer is {own}"), epoch };
        }
        standing.conflict()
    }

    /// Gives the bucket up to the writer of another snapshot of the same number, of whom the lease may tell more.
    pub(super) fn lose_snapshot(&self, object: &str, by: &str) -> Error {
        let own = match &*self.standing() {
            Standing::Held(held) => held.lease.nonce.clone(),
            _ => String::new(),
        };
        // What can't be read now only leaves a name out.
        let found = self.read().ok().flatten().and_then(|(lease, _)| lease);
        let other = found.filter(|lease| lease.nonce != own);
        let epoch = other.as_ref().map_or_else(|| self.state().epoch, |lease| lease.epoch);
        let by = other.map_or_else(|| by.to_owned(), |lease| format!("{by}, by {}", described(Some(&lease))));
        self.lose(object, &by, epoch)
    }

    /// Refuses after the bucket was lost.
    pub(super) fn require_ours(&self) -> Result<()> {
        match &*self.standing() {
            lost @ Standing::Lost { .. } => Err(lost.conflict()),
            _ => Ok(()),
        }
    }

    /// Nonce of the lease since which nobody has held one but this folder; `None` where it holds none.
    pub(super) fn since_nonce(&self) -> Option<String> {
        match &*self.standing() {
            Standing::Held(held) => Some(held.lease.since_nonce.clone()),
            _ => None,
        }
    }

    /// Time for which nobody can have taken over a lease that is held; none where it is not.
    pub(super) fn sure_time(&self) -> Duration {
        let whole = Duration::from_millis(self.milliseconds);
        match &*self.standing() {
            Standing::Held(held) => whole.saturating_sub(self.clock.now().saturating_sub(held.confirmed)),
            _ => Duration::ZERO,
        }
    }

    /// True while the lease is held.
    pub(super) fn is_held(&self) -> bool {
        matches!(*self.standing(), Standing::Held(_))
    }

    /// True while the lease is wanted and not held.
    pub(super) fn is_wanted(&self) -> bool {
        matches!(*self.standing(), Standing::Wanted { .. })
    }

    /// Lets go of the lease, so that another writer need not wait.
    ///
    /// # Errors
    /// [`Error::Store`] where the bucket can't be reached: the lease runs out by itself.
    pub(super) fn release(&self) -> Result<()> {
        let turn = self.turn();
        let held = match self.standing().clone() {
            Standing::Held(held) => Some(held),
            _ => None,
        };
        let released = held.map_or(Ok(()), |held| {
            let renewal = held.lease.renewal.wrapping_add(1);
            let lease = Lease { renewal, released: true, ..held.lease };
            match self.remote.swap(&self.key, &lease.encode()?, Some(&held.version)) {
                // Another writer has it: then there is nothing to let go of.
                Err(Error::Conflict { .. }) => Ok(()),
                Err(error) if error.is_not_found() => Ok(()),
                swapped => swapped.map(drop),
            }
        });
        drop(turn);
        self.close();
        released
    }

    /// Renews no more, and takes no more.
    pub(super) fn close(&self) {
        if std::process::id() != self.process {
            return;
        }
        let mut standing = self.standing();
        match &*standing {
            Standing::Held(Held { lease: own, .. }) | Standing::Wanted { own, .. } => forget(&own.nonce),
            Standing::Lost { .. } => return,
            _ => {}
        }
        *standing = Standing::Closed;
    }

    pub(super) fn state(&self) -> LeaseState {
        match &*self.standing() {
            Standing::Held(held) => LeaseState {
                epoch: held.lease.epoch,
                holder: held.lease.holder.clone(),
                is_ours: true,
                fenced_by: None,
            },
            Standing::Wanted { watched: Some(watched), .. } => {
                LeaseState { epoch: watched.epoch, holder: watched.holder.clone(), ..LeaseState::default() }
            }
            Standing::Lost { by, epoch, .. } => {
                LeaseState { epoch: *epoch, holder: by.clone(), is_ours: false, fenced_by: Some(by.clone()) }
            }
            _ => LeaseState::default(),
        }
    }

    /// The lease and its version; `None` in place of a lease that can't be read.
    fn read(&self) -> Result<Option<(Option<Lease>, Version)>> {
        match self.remote.get_versioned(&self.key, limits::SMALL_OBJECT_LIMIT_BYTES) {
            Ok((bytes, version)) => match Lease::decode(&self.key.to_string(), &bytes) {
                Ok(lease) => Ok(Some((Some(lease), version))),
                Err(Error::Corrupt { .. }) => Ok(Some((None, version))),
                Err(error) => Err(error),
            },
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The lease as this writer would take it, with a nonce that no other taking has.
    fn own(&self, holder: &str) -> Lease {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let here = ProcessIdentity::of_this_process();
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let nonce = format!("{:032x}", xxh3_128(format!("{here:?} {holder} {count}").as_bytes()));
        live().insert(nonce.clone());
        let ProcessIdentity { host, boot_id, process, started } = here;
        let cut = |text: &str| {
            let is_fitting =
                |end: &usize| *end <= limits::LEASE_TEXT_LIMIT_BYTES && text.is_char_boundary(*end);
            text[..(0..=text.len()).rev().find(is_fitting).unwrap_or(0)].to_owned()
        };
        Lease {
            epoch: 1,
            since_nonce: nonce.clone(),
            nonce,
            renewal: 0,
            milliseconds: self.milliseconds,
            released: false,
            holder: cut(holder),
            host: cut(&host),
            boot_id: cut(&boot_id),
            process_number: process,
            process_started: started,
        }
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LeaseKeeper {
    fn drop(&mut self) {
        self.close();
    }
}

impl Standing {
    fn conflict(&self) -> Error {
        match self {
            Self::Lost { object, by, .. } => Error::Conflict { object: object.clone(), by: by.clone() },
            _ => Error::Internal { what: "a lease was not lost".to_owned() },
        }
    }
}

/// Nonces of the leases that this process holds or wants.
fn live() -> MutexGuard<'static, HashSet<String>> {
    static LIVE: OnceLock<Mutex<HashSet<String>>> = OnceLock::new();
    LIVE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

fn forget(nonce: &str) {
    live().remove(nonce);
}

/// True where its holder surely writes no more: it died on this host, or is a handle of this process that is no
/// more.
fn is_abandoned(lease: &Lease) -> bool {
    let holder = ProcessIdentity {
        host: lease.host.clone(),
        boot_id: lease.boot_id.clone(),
        process: lease.process_number,
        started: lease.process_started,
    };
    holder.is_surely_dead()
        || (!holder.boot_id.is_empty()
            && holder == ProcessIdentity::of_this_process()
            && !live().contains(&lease.nonce))
}

fn described(lease: Option<&Lease>) -> String {
    lease.map_or_else(
        || "a writer whose lease can't be read".to_owned(),
        |lease| format!("{} (epoch {})", lease.holder, lease.epoch),
    )
}
