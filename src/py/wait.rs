//! Waiting without holding the interpreter, and stopping on Ctrl-C.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use pyo3::prelude::*;

use crate::error::{Error, Result};
use crate::threads::{Interrupt, guarded, within_call};

use super::error::raise;

/// How often a wait looks for signals: Python handlers run only when they are polled.
pub(crate) const POLL: Duration = Duration::from_millis(50);

/// Runs `work` on a thread of its own, detached, and polls for signals meanwhile.
///
/// A signal whose handler raises (Ctrl-C) sets the flag that `work` is given, which also ends its waits for a server;
/// waits for the work to end, and is raised.
pub(crate) fn interruptible<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&AtomicBool) -> Result<T> + Send,
) -> PyResult<T> {
    let (mut interrupted, interrupt) = (None, Interrupt::default());
    let outcome = std::thread::scope(|scope| {
        let (sender, mut receiver) = mpsc::sync_channel(1);
        let cancelled = Arc::clone(&interrupt);
        let started =
            std::thread::Builder::new().name("varvite-call".to_owned()).spawn_scoped(scope, move || {
                // The receiver only goes away with this scope.
                let given = Some(Arc::clone(&cancelled));
                let _ = sender.send(guarded(|| within_call(given, || work(&cancelled))));
            });
        if let Err(error) = started {
            return Err(Error::store("start a thread for", "the call")(error));
        }
        loop {
            let message;
            (receiver, message) = py.detach(move || {
                let message = receiver.recv_timeout(POLL);
                (receiver, message)
            });
            match message {
                Ok(outcome) => return outcome,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Error::Internal { what: "a call ended without an outcome".to_owned() });
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if let Err(signal) = py.check_signals() {
                        interrupt.store(true, Ordering::Relaxed);
                        interrupted.get_or_insert(signal);
                    }
                }
            }
        }
    });
    match interrupted {
        Some(signal) => Err(signal),
        None => outcome.map_err(|error| raise(py, &error)),
    }
}
