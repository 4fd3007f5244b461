//! Where a decoder stands: an object and an offset in it, for errors that point at bytes.

use crate::error::Error;

/// A position in an object. Offsets count from the object's first byte, also in a part that lies in the
/// middle of a pack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) object: &'a str,
    pub(super) offset_bytes: u64,
}

impl<'a> Place<'a> {
    pub(super) fn new(object: &'a str, offset_bytes: u64) -> Self {
        Self { object, offset_bytes }
    }

    /// The place `distance_bytes` further on.
    pub(super) fn after(self, distance_bytes: u64) -> Self {
        Self { offset_bytes: self.offset_bytes.saturating_add(distance_bytes), ..self }
    }

    /// [`Error::Corrupt`] at this place.
    pub(super) fn corrupt(
        self,
        what: impl Into<String>,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Error {
        Error::corrupt(self.object, self.offset_bytes, what, expected, found)
    }

    /// [`Error::Corrupt`] for JSON text that starts here and does not have the form of `what`.
    pub(super) fn not_json(self, what: &str, error: &serde_json::Error) -> Error {
        // A column counts from 1 and restarts on each line, so it is an offset on the first line only.
        let distance_bytes = if error.line() == 1 { error.column().saturating_sub(1) as u64 } else { 0 };
        self.after(distance_bytes).corrupt(what, "JSON as FORMAT.md describes it", error)
    }
}
