//! One private thread pool, built when first needed, never shared with a forked child.
//!
//! The global rayon pool is not used: it does not survive `fork`, and data-loader workers fork. A child
//! that finds itself in another process builds a pool of its own.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

/// Values that workers lend to each other: as many as are in use at once, kept for the next user.
///
/// Fresh memory for each piece of work would cost more than the work, in page faults.
#[derive(Debug, Default)]
pub struct Spares<T>(Mutex<Vec<T>>);

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

/// A lazily built pool of a fixed number of threads.
#[derive(Debug)]
pub struct Threads {
    count: usize,
    built: Mutex<Option<(u32, Arc<ThreadPool>)>>,
}

impl Threads {
    /// A pool of `count` threads (at least one); starts nothing.
    #[must_use]
    pub fn new(count: usize) -> Self {
        Self { count: count.max(1), built: Mutex::new(None) }
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
        let mut built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        let process = std::process::id();
        if let Some((owner, pool)) = built.as_ref()
            && *owner == process
        {
            return Ok(Arc::clone(pool));
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(self.count)
            .thread_name(|index| format!("varvite-{index}"))
            .build()
            .map_err(|error| Error::store("start threads of", "the pool")(std::io::Error::other(error)))?;
        let pool = Arc::new(pool);
        // The threads of a parent's pool don't exist here: dropping it would signal to nobody.
        std::mem::forget(built.replace((process, Arc::clone(&pool))));
        Ok(pool)
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
    fn a_panic_becomes_an_error_with_its_text() {
        let Err(Error::Internal { what }) = guarded::<()>(|| panic!("chunk {} is odd", 7)) else {
            panic!("no error")
        };
        assert_eq!(what, "a background thread panicked: chunk 7 is odd");
    }
}
