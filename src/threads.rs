//! One private thread pool, built when first needed, never shared with a forked child.
//!
//! The global rayon pool is not used: it does not survive `fork`, and data-loader workers fork. A child
//! that finds itself in another process builds a pool of its own.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// Values that workers lend to each other: as many as are in use at once, kept for the next user.
///
/// Fresh memory for each piece of work would cost more than the work, in page faults.
#[derive(Debug, Default)]
pub struct Spares<T>(Mutex<Vec<T>>);

impl<T> Spares<T> {
    /// Keeps none yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }
}

impl<T: Default> Spares<T> {
    /// A spare value, or a new one.
    pub fn take(&self) -> T {
        self.idle().pop().unwrap_or_default()
    }

    /// Keeps a value for the next user.
    pub fn give_back(&self, value: T) {
        self.idle().push(value);
    }

    /// Lends a value to `work`.
    pub fn lend<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let mut value = self.take();
        let done = work(&mut value);
        self.give_back(value);
        done
    }

    fn idle(&self) -> MutexGuard<'_, Vec<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A value that is built when first needed, and again in a forked child: for what owns threads or sockets.
#[derive(Debug)]
pub struct PerProcess<T>(Mutex<Option<(u32, Arc<T>)>>);

impl<T> PerProcess<T> {
    /// Holds nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// The value of this process.
    ///
    /// # Errors
    /// Those of `build`.
    pub fn get(&self, build: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        if let Some((owner, value)) = kept.as_ref()
            && *owner == process
        {
            return Ok(Arc::clone(value));
        }
        let value = Arc::new(build()?);
        // The threads and sockets of a parent's value are not ours: dropping it would signal to nobody.
        std::mem::forget(kept.replace((process, Arc::clone(&value))));
        Ok(value)
    }
}

impl<T> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// What ends the waiting of a call when it is set.
pub type Interrupt = Arc<AtomicBool>;

thread_local! {
    static INTERRUPT: RefCell<Option<Interrupt>> = const { RefCell::new(None) };
}

/// Runs `work` as a part of the call that `interrupt` ends. Threads that a call hands work to are given it too; those
/// that serve nobody's call, such as the one that pushes, have none.
pub fn within_call<R>(interrupt: Option<Interrupt>, work: impl FnOnce() -> R) -> R {
    struct Back(Option<Interrupt>);
    impl Drop for Back {
        fn drop(&mut self) {
            INTERRUPT.with_borrow_mut(|current| *current = self.0.take());
        }
    }
    let _back = Back(INTERRUPT.with_borrow_mut(|current| std::mem::replace(current, interrupt)));
    work()
}

/// What ends the call that this thread works for.
#[must_use]
pub fn interrupt() -> Option<Interrupt> {
    INTERRUPT.with_borrow(Clone::clone)
}

/// Does the same with each item on up to so many threads, this one among them: for what waits for a network, not
/// for what computes.
///
/// # Errors
/// The first that an item gave; those that were not begun by then are left out.
pub fn for_each_waiting<T: Sync>(
    items: &[T],
    thread_count: usize,
    work: impl Fn(&T) -> Result<()> + Sync,
) -> Result<()> {
    let next = Mutex::new(items.iter());
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let lock_failure = || failure.lock().unwrap_or_else(PoisonError::into_inner);
    let run = || {
        loop {
            let taken = next.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(item) = taken.filter(|_| lock_failure().is_none()) else { return };
            if let Err(error) = guarded(|| work(item)) {
                lock_failure().get_or_insert(error);
            }
        }
    };
    let interrupt = interrupt();
    std::thread::scope(|scope| {
        for _ in 1..thread_count.min(items.len()) {
            // Where the system refuses a thread there is one less.
            let _ = std::thread::Builder::new().spawn_scoped(scope, || within_call(interrupt.clone(), run));
        }
        run();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// A lazily built pool of a fixed number of threads.
#[derive(Debug)]
pub struct Threads {
    count: usize,
    built: PerProcess<ThreadPool>,
}

impl Threads {
    /// A pool of `count` threads (at least one); starts nothing.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self { count: count.max(1), built: PerProcess::new() }
    }

    /// Number of threads the pool has once it is built.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// The pool of this process.
    ///
    /// # Errors
    /// [`Error::Store`] where the system refuses threads.
    pub fn pool(&self) -> Result<Arc<ThreadPool>> {
        self.built.get(|| {
            ThreadPoolBuilder::new()
                .num_threads(self.count)
                .thread_name(|index| format!("varvite-{index}"))
                .build()
                .map_err(|error| Error::store("start threads of", "the pool")(std::io::Error::other(error)))
        })
    }
}

/// Runs a closure; a panic in it becomes [`Error::Internal`] with the panic's text.
pub fn guarded<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        Err(Error::Internal { what: format!("a background thread panicked: {}", panic_text(panic.as_ref())) })
    })
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_works_for_a_call_knows_what_ends_it() {
        let ours = || interrupt().map(|flag| Arc::as_ptr(&flag).addr());
        let (outer, inner) = (Interrupt::default(), Interrupt::default());
        let address = |flag: &Interrupt| Some(Arc::as_ptr(flag).addr());
        assert_eq!(ours(), None);
        within_call(Some(Arc::clone(&outer)), || {
            assert_eq!(ours(), address(&outer));
            within_call(Some(Arc::clone(&inner)), || assert_eq!(ours(), address(&inner)));
            assert_eq!(ours(), address(&outer));
            let all = Mutex::new(Vec::new());
            for_each_waiting(&[1, 2, 3], 3, |_| {
                all.lock().unwrap().push(ours());
                Ok(())
            })
            .unwrap();
            assert_eq!(all.into_inner().unwrap(), [address(&outer); 3]);
            assert_eq!(std::thread::spawn(move || ours().is_none()).join().ok(), Some(true));
        });
        assert_eq!(ours(), None);
    }

    #[test]
    fn a_panic_becomes_an_error_with_its_text() {
        let Err(Error::Internal { what }) = guarded::<()>(|| panic!("chunk {} is odd", 7)) else {
            panic!("no error")
        };
        assert_eq!(what, "a background thread panicked: chunk 7 is odd");
    }
}
