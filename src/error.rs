//! The one error type of the crate: a variant for each reaction of the caller.
//!
//! Facts are fields, `Display` names them all and never repeats the text of the source; the boundary
//! prints the chain once. There is no catch-all and no `From<io::Error>`: every place that does I/O
//! says which operation on which object failed.

use std::{fmt, io};

/// Result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, by what the caller can do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The call was wrong: fix the call.
    #[error("invalid {what}: {reason}")]
    InvalidInput {
        /// The argument, key or name that was refused.
        what: String,
        /// Why, and what is legal.
        reason: String,
    },
    /// What is saved and what was asked for disagree: fix the model or the request.
    #[error("`{name}` has another {field}: expected {expected}, but the snapshot has: {found}")]
    Mismatch {
        /// Name of the entry.
        name: String,
        /// `dtype`, `shape`, ...
        field: &'static str,
        /// What the caller's tensor has.
        expected: String,
        /// What the snapshot has.
        found: String,
    },
    /// Ranks that save together have different values of what has to be one: fix the program.
    #[error("ranks {} and {} disagree on the {field} of `{name}`: {left} and {right}", ranks.0, ranks.1)]
    Disagreement {
        /// Name of the entry, or path in the structure.
        name: String,
        /// `value`, `dtype`, `shape`, ...
        field: &'static str,
        /// Two of the ranks that disagree, the lower one first.
        ranks: (u32, u32),
        /// What the first has.
        left: String,
        /// What the second has.
        right: String,
    },
    /// No repository lies at this root.
    #[error("no repository in `{root}`: {reason}")]
    NotARepository {
        /// The root that was opened.
        root: String,
        /// What was found instead.
        reason: String,
    },
    /// The reference names no snapshot: choose another.
    #[error("no snapshot `{reference}` in `{root}`: {reason}")]
    SnapshotNotFound {
        /// The reference as given.
        reference: String,
        /// Root of the repository.
        root: String,
        /// What there is instead.
        reason: String,
    },
    /// The name is not in the snapshot: choose another.
    #[error("no tensor `{name}` in snapshot {seq}")]
    TensorNotFound {
        /// The name or glob that matched nothing.
        name: String,
        /// Commit number of the snapshot that was searched.
        seq: u64,
        /// Names that look alike, best first.
        nearest: Vec<String>,
    },
    /// Another writer published this object first: reopen the repository.
    #[error("another writer has published `{object}`: {by}")]
    Conflict {
        /// Key of the object that exists already.
        object: String,
        /// What is known of the other writer.
        by: String,
    },
    /// Another process writes here: wait, or open read-only.
    #[error("repository `{root}` is locked by another writer: {holder}")]
    Locked {
        /// Root of the repository.
        root: String,
        /// Process, host and start time of the holder, as it wrote them.
        holder: String,
    },
    /// What is said of a key does not fit the repository: give the right one.
    #[error("cannot open `{root}`: {problem}")]
    Key {
        /// Root of the repository.
        root: String,
        /// What is wrong.
        problem: KeyProblem,
    },
    /// The bytes need another version of Varvite: upgrade.
    #[error("unsupported {what} in `{object}`: found {found}, supported: {supported}")]
    Unsupported {
        /// Format version, flag or codec.
        what: &'static str,
        /// Key of the object.
        object: String,
        /// Value in the bytes.
        found: String,
        /// What this build reads.
        supported: String,
    },
    /// The bytes are not those that were written: use another snapshot.
    #[error("corrupt {what} in `{object}` at byte {offset_bytes}: expected {expected}, found: {found}")]
    Corrupt {
        /// Key of the object.
        object: String,
        /// Offset from the first byte of the object.
        offset_bytes: u64,
        /// The field, chunk or name concerned.
        what: String,
        /// What should stand there.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// A snapshot of several ranks lacks parts: it was never committed.
    #[error("snapshot {seq} is incomplete: no part of ranks: {missing_ranks:?}")]
    Incomplete {
        /// Commit number that was to be published.
        seq: u64,
        /// Ranks whose part is missing, ascending.
        missing_ranks: Vec<u32>,
    },
    /// The store failed: disk, permissions, network.
    #[error("cannot {operation} `{object}`")]
    Store {
        /// What was tried, as a verb.
        operation: &'static str,
        /// Path or key.
        object: String,
        /// The cause, with its errno.
        #[source]
        source: io::Error,
    },
    /// This save already failed: drop it and save again.
    #[error("this save has failed before: {first}")]
    Poisoned {
        /// Text of the first failure.
        first: String,
    },
    /// A caller asked to stop (Ctrl-C).
    #[error("interrupted")]
    Interrupted,
    /// A bug of Varvite: report it.
    #[error("internal error: {what}")]
    Internal {
        /// Which invariant did not hold.
        what: String,
    },
}

/// What is wrong with the key of a repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyProblem {
    /// The repository is encrypted, and there is no key.
    Missing,
    /// The repository was encrypted with another key.
    Wrong,
    /// The repository is not encrypted, and was to be.
    Plain,
}

impl KeyProblem {
    /// Its name in other languages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Wrong => "wrong",
            Self::Plain => "plain",
        }
    }
}

impl fmt::Display for KeyProblem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Missing => "it is encrypted, and no key is given",
            Self::Wrong => "it is encrypted with another key than the one given",
            Self::Plain => "it is not encrypted, and encryption is asked for",
        })
    }
}

impl Error {
    /// Builds [`Error::InvalidInput`].
    pub fn invalid(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::InvalidInput { what: what.into(), reason: reason.into() }
    }

    /// Builds [`Error::Store`]; meant for `map_err(Error::store("write", key))`.
    pub fn store(operation: &'static str, object: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let object = object.into();
        move |source| Self::Store { operation, object, source }
    }

    /// Builds [`Error::Corrupt`].
    pub fn corrupt(
        object: impl Into<String>,
        offset_bytes: u64,
        what: impl Into<String>,
        expected: impl std::fmt::Display,
        found: impl std::fmt::Display,
    ) -> Self {
        Self::Corrupt {
            object: object.into(),
            offset_bytes,
            what: what.into(),
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }

    /// An error of the same kind and facts: for a failure that is kept and raised as well.
    #[must_use]
    pub fn copied(&self) -> Self {
        match self {
            Self::InvalidInput { what, reason } => {
                Self::InvalidInput { what: what.clone(), reason: reason.clone() }
            }
            Self::Mismatch { name, field, expected, found } => {
                let (name, expected, found) = (name.clone(), expected.clone(), found.clone());
                Self::Mismatch { name, field, expected, found }
            }
            Self::Disagreement { name, field, ranks, left, right } => {
                let (name, left, right) = (name.clone(), left.clone(), right.clone());
                Self::Disagreement { name, field, ranks: *ranks, left, right }
            }
            Self::NotARepository { root, reason } => {
                Self::NotARepository { root: root.clone(), reason: reason.clone() }
            }
            Self::SnapshotNotFound { reference, root, reason } => {
                let (reference, root, reason) = (reference.clone(), root.clone(), reason.clone());
                Self::SnapshotNotFound { reference, root, reason }
            }
            Self::TensorNotFound { name, seq, nearest } => {
                Self::TensorNotFound { name: name.clone(), seq: *seq, nearest: nearest.clone() }
            }
            Self::Conflict { object, by } => Self::Conflict { object: object.clone(), by: by.clone() },
            Self::Locked { root, holder } => Self::Locked { root: root.clone(), holder: holder.clone() },
            Self::Key { root, problem } => Self::Key { root: root.clone(), problem: *problem },
            Self::Unsupported { what, object, found, supported } => {
                let (object, found, supported) = (object.clone(), found.clone(), supported.clone());
                Self::Unsupported { what, object, found, supported }
            }
            Self::Corrupt { object, offset_bytes, what, expected, found } => {
                Self::corrupt(object, *offset_bytes, what, expected, found)
            }
            Self::Incomplete { seq, missing_ranks } => {
                Self::Incomplete { seq: *seq, missing_ranks: missing_ranks.clone() }
            }
            Self::Store { operation, object, source } => {
                let copy = || io::Error::new(source.kind(), source.to_string());
                let source = source.raw_os_error().map_or_else(copy, io::Error::from_raw_os_error);
                Self::Store { operation, object: object.clone(), source }
            }
            Self::Poisoned { first } => Self::Poisoned { first: first.clone() },
            Self::Interrupted => Self::Interrupted,
            Self::Internal { what } => Self::Internal { what: what.clone() },
        }
    }

    /// True where the store says that the object does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Store { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    /// True for errors that mean "this snapshot can't be used", so that a search for the newest usable
    /// one goes on with the one before.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Corrupt { .. } | Self::Unsupported { .. }) || self.is_not_found()
    }

    /// The text of this error and of its causes, joined by `: `, each once.
    #[must_use]
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }
}
