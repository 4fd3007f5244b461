//! The scrub of a repository in which merges and retention go on.

use std::sync::atomic::AtomicBool;

use crate::error::{Error, Result};
use crate::format::model::Manifest;
use crate::format::names;
use crate::verify::{self, Report};

use super::Repository;
use super::open::require_marker;

/// Times that a scrub is begun anew because what it looked for was merged meanwhile.
const ATTEMPT_LIMIT: usize = 4;

impl Repository {
    /// Checks packs and chunks of one snapshot, or of all of them; in any case marker, tags and receipts.
    ///
    /// # Errors
    /// [`Error::Interrupted`] after a cancel. Damage is a finding, not an error.
    pub fn verify(&self, seq: Option<u64>, sample: f64, cancelled: &AtomicBool) -> Result<Report> {
        let mut report = self.scrub(seq, sample, cancelled)?;
        if let Err(error) = require_marker(self.shared.store.as_ref()) {
            report.add_error(&error, names::MARKER_NAME, None);
        }
        if let Err(error) = self.tags() {
            report.add_error(&error, "tags", None);
        }
        match self.receipts(None) {
            Ok(receipts) => {
                for (number, error) in &receipts.damaged {
                    report.add_error(error, &format!("receipts/{}", names::receipt_name(*number)), None);
                }
            }
            Err(error) => report.add_error(&error, "receipts", None),
        }
        Ok(report)
    }

    fn scrub(&self, seq: Option<u64>, sample: f64, cancelled: &AtomicBool) -> Result<Report> {
        let store = self.shared.store.as_ref();
        let mut attempt = 1;
        loop {
            let seqs: Vec<u64> = match seq {
                Some(seq) => vec![seq],
                None => self.candidates()?.into_iter().rev().collect(),
            };
            let mut report = Report::default();
            let mut manifests = Vec::new();
            for &listed in &seqs {
                match self.shared.manifest(listed) {
                    Ok(manifest) => manifests.push(manifest),
                    // Deleted since the listing.
                    Err(Error::SnapshotNotFound { .. }) if seq.is_none() => {}
                    Err(error @ Error::SnapshotNotFound { .. }) => return Err(error),
                    Err(error) => {
                        let object = format!("snapshots/{}", names::manifest_name(listed));
                        report.add_error(&error, &object, None);
                    }
                }
            }
            verify::verify(store, &self.shared.threads, &manifests, sample, cancelled, &mut report)?;
            if report.findings.is_empty() || attempt == ATTEMPT_LIMIT || !self.have_moved(&manifests) {
                return Ok(report);
            }
            attempt += 1;
        }
    }

    /// True where one of these is no longer what the store has under its number.
    fn have_moved(&self, manifests: &[Manifest]) -> bool {
        manifests.iter().any(|manifest| match self.shared.manifest(manifest.header.seq) {
            Ok(now) => now.body.packs != manifest.body.packs,
            Err(error) => matches!(error, Error::SnapshotNotFound { .. }),
        })
    }
}
