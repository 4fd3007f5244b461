//! What a request ran into, in the words of a person and in kinds that the engine can decide on.
//!
//! Every answer that is no success arrives here as [`Refused`] (see `http`), whatever the provider; a request
//! without an answer arrives as an error of the transport.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use object_store::client::{HttpError, HttpErrorKind};

use crate::error::Error;

/// Longest text of a server that is shown, in characters.
const TEXT_LIMIT: usize = 300;

/// An answer that is no success.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) status: u16,
    /// The server's own name for the cause, such as `NoSuchBucket`.
    pub(super) code: String,
    pub(super) message: String,
    /// Whom the request went to.
    pub(super) host: String,
    /// Where the bucket lies, as the server says.
    pub(super) region: Option<String>,
}

impl fmt::Display for Refused {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "`{}` answered {}", self.host, self.status)?;
        if !self.code.is_empty() {
            write!(formatter, " {}", self.code)?;
        }
        if !self.message.is_empty() {
            write!(formatter, ": {}", self.message)?;
        }
        Ok(())
    }
}

impl StdError for Refused {}

impl Refused {
    fn speaks_of(&self, word: &str) -> bool {
        [&self.code, &self.message].iter().any(|text| text.to_ascii_lowercase().contains(word))
    }
}

/// No credential could be had.
#[derive(Debug)]
pub(super) struct NoCredentials(String);

impl NoCredentials {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Nobody has said who we are, neither the program nor the machine.
    pub(super) fn nowhere() -> Self {
        Self::new(
            "no option, variable of the environment or profile has any, and this machine hands out none: \
             set `access_key_id` and `secret_access_key`, or `profile`, or `credentials`, or `anonymous`",
        )
    }

    pub(super) fn into_error(self) -> object_store::Error {
        object_store::Error::Unauthenticated { path: String::new(), source: Box::new(self) }
    }
}

impl fmt::Display for NoCredentials {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl StdError for NoCredentials {}

/// What the engine does about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// No such object, or no such upload.
    Missing,
    /// No such bucket.
    NoBucket,
    /// A condition did not hold: the object is there, or has another version.
    Changed,
    /// The range begins behind the end of the object.
    OutOfRange,
    /// Credentials are missing, wrong, or not enough.
    Denied,
    /// Credentials have ended.
    Expired,
    /// The server does not do this.
    Unsupported,
    /// The server is busy or broken: worth another attempt.
    Busy,
    /// Nobody answered in time, and the request may have been done.
    TimedOut,
    /// The connection broke, and the request may have been done.
    Broken,
    /// There was no connection.
    Unreachable(io::ErrorKind),
    /// All else.
    Other,
}

/// Why a request failed.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) kind: Kind,
    pub(super) text: String,
    /// Whether an earlier attempt may have done what was asked.
    pub(super) may_be_done: bool,
}

impl Failure {
    pub(super) fn new(kind: Kind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into(), may_be_done: false }
    }

    /// Reads what a request of `object_store` ended with.
    pub(super) fn of(error: &object_store::Error) -> Self {
        let mut cause: Option<&(dyn StdError + 'static)> = Some(error);
        while let Some(present) = cause {
            if let Some(refused) = present.downcast_ref::<Refused>() {
                return Self::of_refused(refused);
            }
            if let Some(missing) = present.downcast_ref::<NoCredentials>() {
                return Self::new(Kind::Denied, format!("no credentials: {missing}"));
            }
            if let Some(transport) = present.downcast_ref::<HttpError>()
                && !has_refused(transport)
            {
                return Self::of_transport(transport);
            }
            cause = present.source();
        }
        let kind = match error {
            object_store::Error::NotFound { .. } => Kind::Missing,
            object_store::Error::AlreadyExists { .. }
            | object_store::Error::Precondition { .. }
            | object_store::Error::NotModified { .. } => Kind::Changed,
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
                Kind::Denied
            }
            object_store::Error::NotSupported { .. } | object_store::Error::NotImplemented { .. } => {
                Kind::Unsupported
            }
            // The store in memory has no kinds for these two.
            error if error.to_string().contains("MultipartUpload not found") => Kind::Missing,
            error if error.to_string().contains("Invalid range") => Kind::OutOfRange,
            _ => Kind::Other,
        };
        Self::new(kind, shown(&chain(error)))
    }

    fn of_refused(refused: &Refused) -> Self {
        let code = refused.code.as_str();
        let (kind, advice) = match (refused.status, code) {
            (_, "NoSuchBucket" | "ContainerNotFound" | "InvalidBucketName") => {
                (Kind::NoBucket, "there is no such bucket: make it, or correct the url")
            }
            (_, "ExpiredToken" | "TokenRefreshRequired" | "ExpiredTokenException") => {
                (Kind::Expired, "the credentials have ended: renew them, or pass `credentials`, a callable")
            }
            (_, "SignatureDoesNotMatch" | "InvalidAccessKeyId" | "InvalidToken" | "InvalidClientTokenId") => {
                (Kind::Denied, "check `access_key_id`, `secret_access_key` and `session_token`")
            }
            (_, "RequestTimeTooSkewed") => (Kind::Denied, "the clock of this machine is wrong: set it"),
            (301 | 307 | 308, _)
            | (400, "AuthorizationHeaderMalformed" | "IllegalLocationConstraintException") => {
                return Self::of_wrong_region(refused);
            }
            (
                _,
                "RequestTimeout"
                | "BadDigest"
                | "XAmzContentChecksumMismatch"
                | "InvalidDigest"
                | "Md5Mismatch",
            )
            | (408 | 429 | 500 | 502..=599, _) => (Kind::Busy, ""),
            (409, "BlobAlreadyExists") | (304 | 412, _) => (Kind::Changed, ""),
            // Two conditional writes at once: the other one may fail yet.
            (409, _) | (200, "InternalError" | "SlowDown") => (Kind::Busy, ""),
            (400 | 501, _) if refused.speaks_of("checksum") => (
                Kind::Unsupported,
                "for a server without these checksums set `aws_checksum_algorithm` to `none`",
            ),
            (404, _) => (Kind::Missing, ""),
            (416, _) => (Kind::OutOfRange, ""),
            (401 | 403, _) => (Kind::Denied, "these credentials may not do this here"),
            (501 | 405, _) | (_, "NotImplemented") => (Kind::Unsupported, "this server lacks that request"),
            _ => (Kind::Other, ""),
        };
        let advice = if advice.is_empty() { String::new() } else { format!(" ({advice})") };
        Self::new(kind, format!("{refused}{advice}"))
    }

    fn of_wrong_region(refused: &Refused) -> Self {
        let advice = refused.region.as_ref().map_or_else(
            || "set `region`, or `endpoint`, to where the bucket lies".to_owned(),
            |region| format!("the bucket lies in another region: set `region` to `{}`", shown(region)),
        );
        Self::new(Kind::Other, format!("{refused} ({advice})"))
    }

    fn of_transport(error: &HttpError) -> Self {
        let text = shown(&chain(error));
        // What each request says of itself, whatever it ran into.
        let text = text.replace("HTTP error: ", "").replace("error sending request: ", "");
        let lower = text.to_ascii_lowercase();
        if lower.contains("certificate") || lower.contains("tls") && lower.contains("alert") {
            let advice = "to trust another authority set `ca_bundle` to a PEM file";
            return Self::new(Kind::Other, format!("no trusted connection: {text} ({advice})"));
        }
        if lower.contains("url scheme is not allowed") {
            let advice = "an `endpoint` of http:// is needed for a server without TLS";
            return Self::new(Kind::Other, format!("{text} ({advice})"));
        }
        let kind = match error.kind() {
            _ if lower.contains("dns error") || lower.contains("lookup address") => {
                Kind::Unreachable(io::ErrorKind::HostUnreachable)
            }
            HttpErrorKind::Connect if lower.contains("deadline") || lower.contains("timed out") => {
                Kind::Unreachable(io::ErrorKind::TimedOut)
            }
            HttpErrorKind::Connect => {
                Kind::Unreachable(io_kind(error).unwrap_or(io::ErrorKind::NotConnected))
            }
            HttpErrorKind::Timeout => Kind::TimedOut,
            HttpErrorKind::Request | HttpErrorKind::Interrupted | HttpErrorKind::Unknown => Kind::Broken,
            _ => Kind::Other,
        };
        let text = match kind {
            Kind::Unreachable(io::ErrorKind::HostUnreachable) => {
                format!("the host is not known: {text} (check `endpoint`, and the network)")
            }
            Kind::Unreachable(io::ErrorKind::ConnectionRefused) => {
                format!("nobody answers there: {text} (check `endpoint`, and whether the server runs)")
            }
            _ => text,
        };
        Self::new(kind, text)
    }

    /// Whether another attempt can end otherwise.
    pub(super) fn is_transient(&self) -> bool {
        matches!(self.kind, Kind::Busy | Kind::TimedOut | Kind::Broken | Kind::Unreachable(_))
    }

    /// Whether the server may have done what was asked, in spite of this.
    pub(super) fn leaves_doubt(&self) -> bool {
        matches!(self.kind, Kind::Busy | Kind::TimedOut | Kind::Broken)
    }

    /// The error of the crate.
    pub(super) fn error(self, operation: &'static str, object: impl Into<String>) -> Error {
        let kind = match self.kind {
            Kind::Missing => io::ErrorKind::NotFound,
            Kind::Changed => io::ErrorKind::AlreadyExists,
            Kind::OutOfRange => io::ErrorKind::UnexpectedEof,
            Kind::Denied | Kind::Expired => io::ErrorKind::PermissionDenied,
            Kind::Unsupported => io::ErrorKind::Unsupported,
            Kind::Busy => io::ErrorKind::ResourceBusy,
            Kind::TimedOut => io::ErrorKind::TimedOut,
            Kind::Broken => io::ErrorKind::ConnectionReset,
            Kind::Unreachable(kind) => kind,
            Kind::NoBucket | Kind::Other => io::ErrorKind::Other,
        };
        Error::store(operation, object)(io::Error::new(kind, self.text))
    }
}

fn has_refused(error: &HttpError) -> bool {
    let mut cause = error.source();
    while let Some(present) = cause {
        if present.is::<Refused>() || present.is::<NoCredentials>() {
            return true;
        }
        cause = present.source();
    }
    false
}

fn io_kind(error: &HttpError) -> Option<io::ErrorKind> {
    let mut cause = error.source();
    while let Some(present) = cause {
        if let Some(error) = present.downcast_ref::<io::Error>() {
            return Some(error.kind());
        }
        cause = present.source();
    }
    None
}

/// The texts of an error and its causes, without those that the one before holds already.
fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(present) = cause {
        let next = present.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = present.source();
    }
    text
}

/// A foreign text made fit for a message: one line, of bounded length.
pub(super) fn shown(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().filter(|character| !character.is_control()).take(TEXT_LIMIT).collect()
}
