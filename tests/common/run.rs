//! Operations on a repository, each announced before it begins and acknowledged when it has returned.

use std::sync::atomic::AtomicBool;

use varvite::error::Result;
use varvite::repository::Repository;

use super::journal::Journal;
use super::lent::{Lent, Log};
use super::training::{State, refuse_failed_retention, request};

/// A handle, the journal of what it was asked for, and whoever else wants to know.
pub(crate) struct Run<'a> {
    pub(crate) repository: &'a Repository,
    pub(crate) journal: &'a mut Journal,
    /// The count of the rule `last` that the handle was opened with, if it was.
    pub(crate) keep_last: Option<usize>,
    /// Stage a copy first, as a background save does; else save while waiting.
    pub(crate) staged: bool,
    pub(crate) state_of: &'a dyn Fn(u64) -> State,
    /// Gets every line of the journal as it is noted.
    pub(crate) tell: &'a mut dyn FnMut(&str),
}

impl Run<'_> {
    fn note(&mut self, line: &str) {
        self.journal.note(line);
        (self.tell)(line);
    }

    /// Saves the state of a step; retention follows.
    pub(crate) fn save(&mut self, step: u64) -> Result<()> {
        let (doubtful, doomed) = self.beyond_last(Some(step));
        self.note(&format!("saving {step}"));
        for old in &doubtful {
            self.note(&format!("deleting {old}"));
        }
        let state = (self.state_of)(step);
        let sources: Vec<&[u8]> = state.values().map(Vec::as_slice).collect();
        let (request, cancelled) = (request(step, &state), AtomicBool::new(false));
        let report = if self.staged {
            // Some are taken now, others later, of which some stay until the end.
            let is_now = |index: usize| index.is_multiple_of(2);
            let now: Vec<Option<&[u8]>> =
                sources.iter().enumerate().map(|(index, source)| is_now(index).then_some(*source)).collect();
            let later = sources.iter().enumerate().filter(|(index, _)| !is_now(*index));
            let lent = Lent::new(later.map(|(_, source)| source.to_vec()).collect(), &[1], &Log::default());
            self.repository.begin_save_later(request, &now, Some(Box::new(lent)))?.run(&cancelled)?
        } else {
            self.repository.save_sync(request, &sources, &cancelled)?
        };
        self.note(&format!("saved {step} {}", report.header.seq));
        refuse_failed_retention(report)?;
        self.note_deleted(&doomed);
        Ok(())
    }

    /// Carries out retention.
    pub(crate) fn prune(&mut self) -> Result<()> {
        let (doubtful, doomed) = self.beyond_last(None);
        for old in &doubtful {
            self.note(&format!("deleting {old}"));
        }
        self.repository.prune(false)?;
        self.note_deleted(&doomed);
        Ok(())
    }

    /// Merges everything of which something is gained; no snapshot comes or goes.
    pub(crate) fn merge(&mut self) -> Result<()> {
        self.repository.merge(true, &AtomicBool::new(false)).map(|_report| ())
    }

    /// Deletes an acknowledged snapshot.
    pub(crate) fn delete(&mut self, step: u64) -> Result<()> {
        let seq = self.journal.kept[&step];
        self.note(&format!("deleting {step}"));
        self.repository.delete(seq)?;
        self.note_deleted(&[step]);
        Ok(())
    }

    /// Names an acknowledged snapshot.
    pub(crate) fn pin(&mut self, name: &str, step: u64) -> Result<()> {
        self.note(&format!("pinning {name} {step}"));
        self.repository.pin(self.journal.kept[&step], name)?;
        self.note(&format!("pinned {name} {step}"));
        Ok(())
    }

    /// Removes a name.
    pub(crate) fn unpin(&mut self, name: &str) -> Result<()> {
        self.note(&format!("unpinning {name} {}", self.journal.pins[name]));
        self.repository.unpin(name)?;
        self.note(&format!("unpinned {name}"));
        Ok(())
    }

    /// Writes a receipt about an acknowledged snapshot, if there is one.
    pub(crate) fn write_receipt(&mut self, content: &str) -> Result<()> {
        self.note(&format!("receipting {content}"));
        let seq = self.journal.kept.values().last().copied();
        let receipt = self.repository.write_receipt(seq, content)?;
        self.note(&format!("receipted {} {content}", receipt.number));
        Ok(())
    }

    /// Puts other content in an acknowledged receipt.
    pub(crate) fn replace_receipt(&mut self, number: u64, content: &str) -> Result<()> {
        self.note(&format!("replacing {number} {content}"));
        self.repository.replace_receipt(number, content)?;
        self.note(&format!("receipted {number} {content}"));
        Ok(())
    }

    fn beyond_last(&self, saved: Option<u64>) -> (Vec<u64>, Vec<u64>) {
        self.keep_last.map_or_else(Default::default, |count| self.journal.beyond_last(saved, count))
    }

    fn note_deleted(&mut self, steps: &[u64]) {
        for step in steps {
            self.note(&format!("deleted {step}"));
        }
    }
}
