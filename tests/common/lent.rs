//! Sources that a save copies later: what they are when they are let go of is noted, and then they change.

use std::sync::{Arc, Mutex};

use varvite::error::{Error, Result};
use varvite::stage::Later;

/// What became of later sources.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn note(&self, line: String) {
        self.0.lock().unwrap().push(line);
    }

    /// The lines so far.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

/// Bytes that a save borrows until it lets go of them.
#[derive(Debug)]
pub(crate) struct Lent {
    sources: Vec<Vec<u8>>,
    kept: Vec<usize>,
    /// What is wrong with them when they should arrive, or when this one is let go of.
    pub(crate) fails_to_arrive: bool,
    pub(crate) changes: Option<usize>,
    log: Log,
}

impl Lent {
    /// Lends these; those at the positions in `kept` until the save ends.
    pub(crate) fn new(sources: Vec<Vec<u8>>, kept: &[usize], log: &Log) -> Self {
        Self { sources, kept: kept.to_vec(), fails_to_arrive: false, changes: None, log: log.clone() }
    }
}

impl Later for Lent {
    fn count(&self) -> usize {
        self.sources.len()
    }

    fn is_kept(&self, position: usize) -> bool {
        self.kept.contains(&position)
    }

    fn arrive(&mut self) -> Result<()> {
        self.log.note("arrived".to_owned());
        if self.fails_to_arrive { Err(Error::Internal { what: "no device".to_owned() }) } else { Ok(()) }
    }

    fn bytes(&self, position: usize) -> &[u8] {
        &self.sources[position]
    }

    fn let_go(&mut self, positions: &[usize]) -> Result<()> {
        self.log.note(format!("let go of {positions:?}"));
        for &position in positions {
            // What is read after this is wrong, and shows.
            self.sources[position].fill(0xa5);
        }
        match self.changes {
            Some(position) if positions.contains(&position) => Err(Error::invalid("tensor", "was written")),
            _ => Ok(()),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.log.note("dropped".to_owned());
    }
}
