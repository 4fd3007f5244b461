//! The one way to a server: who is trusted, how long an answer may take, what an answer that is no success
//! says, and at which pace a part goes out.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use object_store::ClientOptions;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse,
    HttpResponseBody, HttpService,
};
use rustls::crypto::ring;
use tokio::time::{Instant, sleep_until, timeout};

use super::failure::{NoCredentials, Refused, shown};
use crate::error::{Error, Result};

/// Bytes in a second below which a connection counts as dead.
const SLOWEST_BYTES_PER_SECOND: u64 = 1 << 20;

/// Seconds that a request may take beyond the time that its bytes need.
const MARGIN_SECONDS: u64 = 30;

/// Joining the parts of a large object takes some servers minutes.
const JOIN_SECONDS: u64 = 300;

/// Seconds until a connection stands.
const CONNECT_SECONDS: u64 = 5;

/// The longest answer that is held whole: lists of a thousand names are far shorter.
const ANSWER_LIMIT_BYTES: usize = 64 << 20;

/// How much of an answer that is no success is read.
const REFUSAL_LIMIT_BYTES: usize = 64 << 10;

/// How long a body may stand still while it is being sent, and how long its answer may take.
const STILL_TIME: Duration = Duration::from_secs(60);

/// Seconds after which an idle connection is not used again: servers close theirs soon.
const IDLE_CONNECTION_SECONDS: u64 = 15;

/// Length of the pieces in which a part goes out: what is counted, and slowed, at once.
const PIECE_BYTES: usize = 256 << 10;

/// How a request goes out and comes back; whoever sends one says so around the call of `object_store`.
#[derive(Clone, Debug)]
pub(super) enum Mode {
    /// The answer is handed on as it arrives; its reader watches the time.
    Streamed,
    /// The body is these bytes, counted and slowed.
    Paced(Bytes, Arc<Pace>),
}

tokio::task_local! {
    /// How the requests of this task travel; without it the answer is held whole.
    pub(super) static MODE: Mode;
}

/// Counts bytes that went out, and slows them.
#[derive(Debug)]
pub(super) struct Pace {
    moved_bytes: AtomicU64,
    limit_bytes_per_second: Option<u64>,
    free_at: Mutex<Option<Instant>>,
}

impl Pace {
    pub(super) fn new(limit_bytes_per_second: Option<u64>) -> Self {
        Self { moved_bytes: AtomicU64::new(0), limit_bytes_per_second, free_at: Mutex::new(None) }
    }

    /// Bytes since the last time it was asked.
    pub(super) fn take_moved_bytes(&self) -> u64 {
        self.moved_bytes.swap(0, Ordering::Relaxed)
    }

    /// Waits until so many bytes may go.
    async fn pass(&self, length_bytes: usize) {
        if let Some(limit) = self.limit_bytes_per_second {
            let turn = {
                let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
                let turn = free_at.map_or_else(Instant::now, |at| at.max(Instant::now()));
                *free_at = Some(turn + time_at(length_bytes, limit));
                turn
            };
            sleep_until(turn).await;
        }
        self.count(length_bytes);
    }

    /// Counts bytes that went out.
    pub(super) fn count(&self, length_bytes: usize) {
        self.moved_bytes.fetch_add(length_bytes as u64, Ordering::Relaxed);
    }
}

/// How long so many bytes take at a rate.
fn time_at(length_bytes: usize, bytes_per_second: u64) -> Duration {
    Duration::from_nanos((length_bytes as u64).saturating_mul(1_000_000_000) / bytes_per_second.max(1))
}

/// Seconds within which so many bytes have to be through.
pub(super) fn seconds_for(length_bytes: u64, override_seconds: Option<f64>) -> Duration {
    override_seconds.map_or_else(
        || Duration::from_secs(MARGIN_SECONDS + length_bytes / SLOWEST_BYTES_PER_SECOND),
        Duration::from_secs_f64,
    )
}

/// Makes clients that go this way.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    /// PEM certificates to trust instead of the system's.
    pub(super) ca_bundle: Option<Arc<Vec<u8>>>,
    /// Seconds for a whole request, instead of those by its size.
    pub(super) timeout_seconds: Option<f64>,
    /// Whether the request that joins parts may carry a condition.
    pub(super) conditional_join: bool,
}

impl Connector {
    fn builder(options: &ClientOptions) -> reqwest::ClientBuilder {
        let is_set = |key| options.get_config_value(&key).is_some_and(|value| value == "true");
        // Redirects are answers: they say that the region is another one.
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("varvite/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .https_only(!is_set(ClientConfigKey::AllowHttp))
            .danger_accept_invalid_certs(is_set(ClientConfigKey::AllowInvalidCertificates))
            .connect_timeout(Self::connect_time(options))
            .pool_idle_timeout(Duration::from_secs(IDLE_CONNECTION_SECONDS))
            .tcp_nodelay(true)
            .http1_only();
        if let Some(proxy) =
            options.get_config_value(&ClientConfigKey::ProxyUrl).and_then(|url| reqwest::Proxy::all(url).ok())
        {
            builder = builder.proxy(proxy);
        }
        builder
    }

    /// `object_store` asks for less where it looks whether the machine itself hands out credentials.
    fn connect_time(options: &ClientOptions) -> Duration {
        match options.get_config_value(&ClientConfigKey::ConnectTimeout).as_deref() {
            Some("1s" | "1 second") => Duration::from_secs(1),
            _ => Duration::from_secs(CONNECT_SECONDS),
        }
    }

    fn client(&self, options: &ClientOptions) -> Result<reqwest::Client> {
        // Ours is only the default of a process that has chosen none.
        let _chosen_before = ring::default_provider().install_default();
        let refused = |error: reqwest::Error| {
            Error::store("set up", "TLS")(io::Error::other(shown(&format!("{error:?}"))))
        };
        if let Some(bundle) = &self.ca_bundle {
            let certificates = reqwest::Certificate::from_pem_bundle(bundle).map_err(refused)?;
            if certificates.is_empty() {
                return Err(Error::invalid("option `ca_bundle`", "the file holds no certificate in PEM"));
            }
            return Self::builder(options).tls_certs_only(certificates).build().map_err(refused);
        }
        // Slim containers bring no certificates, and then even plain http would fail.
        Self::builder(options).build().or_else(|_no_certificates| {
            let certificates = webpki_root_certs::TLS_SERVER_ROOT_CERTS
                .iter()
                .filter_map(|certificate| reqwest::Certificate::from_der(certificate).ok());
            Self::builder(options).tls_certs_only(certificates).build().map_err(refused)
        })
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = self.client(options).map_err(|error| object_store::Error::Generic {
            store: "HTTP client",
            source: Box::new(HttpError::new(HttpErrorKind::Unknown, error)),
        })?;
        Ok(HttpClient::new(Service { client, connector: self.clone() }))
    }
}

/// A client that turns what is no success into [`Refused`].
struct Service {
    client: reqwest::Client,
    connector: Connector,
}

#[async_trait::async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        // `object_store` expects of every request that this can be done, and panics where it can't.
        let url = reqwest::Url::parse(&request.uri().to_string());
        let url = url.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        let mode = MODE.try_with(Mode::clone).ok();
        let host = request.uri().authority().map_or_else(String::new, ToString::to_string);
        let answer = match mode {
            Some(Mode::Paced(bytes, pace)) if request.body().content_length() == bytes.len() => {
                self.send_paced(request, url, bytes, pace).await
            }
            Some(Mode::Streamed) => {
                let time = seconds_for(0, self.connector.timeout_seconds);
                let sent = timeout(time, self.client.call(request)).await;
                match sent.unwrap_or_else(|_late| Err(late(time))) {
                    Ok(answer) if answer.status().is_success() => return Ok(answer),
                    answer => answer,
                }
            }
            _ => self.send_whole(request).await,
        };
        let of_machine = MACHINE_HOSTS.contains(&host.as_str());
        let answer =
            answer.map_err(|error| if of_machine { no_credentials() } else { at_host(&host, error) })?;
        let refused_in_body = |body: &Bytes| body.starts_with(b"<?xml") && text_of(body).contains("<Error>");
        let status = answer.status();
        let (parts, body) = answer.into_parts();
        let limit_bytes = if status.is_success() { ANSWER_LIMIT_BYTES } else { REFUSAL_LIMIT_BYTES };
        let body = read_bounded(body, limit_bytes).await?;
        if status.is_success() && !refused_in_body(&body) {
            return Ok(HttpResponse::from_parts(parts, body.into()));
        }
        if of_machine && status.is_client_error() {
            return Err(no_credentials());
        }
        let header = |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok());
        let (code, message) = code_and_message(&body, header("x-ms-error-code"));
        let region = header("x-amz-bucket-region").map(ToOwned::to_owned);
        let refused = Refused { status: status.as_u16(), code, message, host, region };
        Err(HttpError::new(HttpErrorKind::Unknown, refused))
    }
}

impl Service {
    /// Sends a request whose answer is short, and reads that within the same time.
    async fn send_whole(&self, mut request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let joins = request.method().as_str() == "POST"
            && request.uri().query().is_some_and(|query| query.contains("uploadId="));
        if joins && self.connector.conditional_join {
            // No signature covers this header, and `object_store` has no way to ask for it here.
            request.headers_mut().insert("if-none-match", object_store::HeaderValue::from_static("*"));
        }
        let length_bytes = request.body().content_length() as u64;
        let time = match self.connector.timeout_seconds {
            None if joins => Duration::from_secs(JOIN_SECONDS),
            chosen => seconds_for(length_bytes, chosen),
        };
        let whole = async {
            let (parts, body) = self.client.call(request).await?.into_parts();
            let body = read_bounded(body, ANSWER_LIMIT_BYTES).await?;
            Ok(HttpResponse::from_parts(parts, HttpResponseBody::from(body)))
        };
        timeout(time, whole).await.unwrap_or_else(|_late| Err(late(time)))
    }

    /// Sends a part piece by piece. It fails where nothing moves, however long the whole takes: parts share one
    /// line, and a slow line is no dead one.
    async fn send_paced(
        &self,
        request: HttpRequest,
        url: reqwest::Url,
        bytes: Bytes,
        pace: Arc<Pace>,
    ) -> std::result::Result<HttpResponse, HttpError> {
        let (parts, _same_bytes) = request.into_parts();
        let mut outgoing = reqwest::Request::new(parts.method, url);
        *outgoing.headers_mut() = parts.headers;
        let line = Arc::new(Line::default());
        let pieces = futures_util::stream::unfold((bytes, pace, Arc::clone(&line)), next_piece);
        *outgoing.body_mut() = Some(reqwest::Body::wrap_stream(pieces));
        let whole = std::pin::pin!(async {
            let mut answer = self.client.execute(outgoing).await.map_err(transport)?;
            let mut response = HttpResponse::new(HttpResponseBody::from(Bytes::new()));
            *response.status_mut() = answer.status();
            *response.headers_mut() = std::mem::take(answer.headers_mut());
            let mut body = Vec::new();
            while let Some(frame) = answer.chunk().await.map_err(transport)? {
                body.extend_from_slice(&frame);
                if body.len() > REFUSAL_LIMIT_BYTES {
                    break;
                }
            }
            *response.body_mut() = HttpResponseBody::from(body);
            Ok(response)
        });
        if let Some(seconds) = self.connector.timeout_seconds {
            let time = Duration::from_secs_f64(seconds);
            return timeout(time, whole).await.unwrap_or_else(|_late| Err(late(time)));
        }
        let dead = std::pin::pin!(line.dead());
        match select(whole, dead).await {
            Either::Left((answer, _)) => answer,
            Either::Right(((), _)) => Err(late(STILL_TIME)),
        }
    }
}

/// Hands out the next piece of a body when its turn has come.
async fn next_piece(
    (mut rest, pace, line): (Bytes, Arc<Pace>, Arc<Line>),
) -> Option<(io::Result<Bytes>, (Bytes, Arc<Pace>, Arc<Line>))> {
    if rest.is_empty() {
        return None;
    }
    let piece = rest.split_to(rest.len().min(PIECE_BYTES));
    line.held.store(true, Ordering::Relaxed);
    pace.pass(piece.len()).await;
    line.held.store(false, Ordering::Relaxed);
    *line.moved_at() = Some(Instant::now());
    Some((Ok(piece), (rest, pace, line)))
}

/// When a body last moved on.
#[derive(Debug, Default)]
struct Line {
    moved_at: Mutex<Option<Instant>>,
    /// It is us who hold the next piece back.
    held: AtomicBool,
}

impl Line {
    fn moved_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.moved_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends when nothing has moved for too long.
    async fn dead(&self) {
        let start = Instant::now();
        loop {
            let last = self.moved_at().unwrap_or(start);
            let is_still = last.elapsed() >= STILL_TIME && !self.held.load(Ordering::Relaxed);
            if is_still {
                return;
            }
            sleep_until(last.max(Instant::now() - STILL_TIME / 2) + STILL_TIME).await;
        }
    }
}

impl fmt::Debug for Service {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Service")
    }
}

fn late(time: Duration) -> HttpError {
    let text = format!("timed out: no answer within {:.1} s", time.as_secs_f64());
    HttpError::new(HttpErrorKind::Timeout, io::Error::new(io::ErrorKind::TimedOut, text))
}

fn transport(error: reqwest::Error) -> HttpError {
    let kind = if error.is_timeout() {
        HttpErrorKind::Timeout
    } else if error.is_connect() {
        HttpErrorKind::Connect
    } else {
        HttpErrorKind::Interrupted
    };
    HttpError::new(kind, error.without_url())
}

/// A request that had no answer, and whom it went to.
#[derive(Debug)]
struct Unanswered {
    host: String,
    error: HttpError,
}

impl fmt::Display for Unanswered {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "no answer of `{}`", self.host)
    }
}

impl std::error::Error for Unanswered {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

fn at_host(host: &str, error: HttpError) -> HttpError {
    HttpError::new(error.kind(), Unanswered { host: host.to_owned(), error })
}

/// Where a machine hands out credentials, if it does: nobody there, or nothing to give, means that nobody has
/// said who we are.
const MACHINE_HOSTS: [&str; 4] =
    ["169.254.169.254", "169.254.170.2", "169.254.170.23", "metadata.google.internal"];

fn no_credentials() -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, NoCredentials::nowhere())
}

async fn read_bounded(body: HttpResponseBody, limit_bytes: usize) -> std::result::Result<Bytes, HttpError> {
    let mut frames = body.bytes_stream();
    let mut whole = Vec::new();
    while let Some(frame) = frames.next().await {
        let frame = frame?;
        if whole.len() + frame.len() > limit_bytes {
            let error = io::Error::other(format!("the answer is longer than {limit_bytes} bytes"));
            return Err(HttpError::new(HttpErrorKind::Decode, error));
        }
        whole.extend_from_slice(&frame);
    }
    Ok(Bytes::from(whole))
}

fn text_of(body: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(&body[..body.len().min(REFUSAL_LIMIT_BYTES)])
}

/// The server's name for the cause and its text, from XML (S3, Azure, Google) or JSON (Google).
fn code_and_message(body: &[u8], header: Option<&str>) -> (String, String) {
    let text = text_of(body);
    let element = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        let (inner, _) = rest.split_once(&format!("</{name}>"))?;
        Some(shown(inner))
    };
    let json = || serde_json::from_str::<serde_json::Value>(&text).ok();
    let field = |name: &str| {
        let value = json()?;
        let error = value.get("error").unwrap_or(&value);
        error.get(name).and_then(|field| field.as_str()).map(shown)
    };
    let code = header.map(shown).or_else(|| element("Code")).or_else(|| field("status")).unwrap_or_default();
    let message = element("Message").or_else(|| field("message")).unwrap_or_default();
    (code, message)
}
