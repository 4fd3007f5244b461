//! A server that answers as a test tells it, on loopback.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// Path and query.
    pub(crate) target: String,
    /// By names in lower case.
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

/// What the server does with a request.
pub(crate) enum Reply {
    Answer(u16, Vec<(&'static str, String)>, Vec<u8>),
    /// Promises the whole body and breaks off after so many bytes.
    CutOff(u16, Vec<(&'static str, String)>, Vec<u8>, usize),
    /// Closes the connection without an answer.
    Nothing,
    /// Keeps the connection and never answers.
    Silence,
}

/// An answer without headers of its own.
pub(crate) fn answer(status: u16, body: &str) -> Reply {
    Reply::Answer(status, Vec::new(), body.as_bytes().to_vec())
}

/// An error as S3 writes it.
pub(crate) fn refusal(status: u16, code: &str) -> Reply {
    let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>told so</Message></Error>");
    answer(status, &body)
}

/// The version of every object, unless a test says otherwise.
pub(crate) const TAG: &str = "\"0123456789abcdef0123456789abcdef\"";

/// The headers of an object.
pub(crate) fn object_headers() -> Vec<(&'static str, String)> {
    vec![("etag", TAG.to_owned()), ("last-modified", "Mon, 30 Nov 2026 07:00:00 GMT".to_owned())]
}

/// An object, or the range of it that is asked for.
pub(crate) fn object(request: &Request, bytes: &[u8]) -> Reply {
    let mut headers = object_headers();
    let Some((start, end)) = range(request) else { return Reply::Answer(200, headers, bytes.to_vec()) };
    let end = end.min(bytes.len());
    headers.push(("content-range", format!("bytes {start}-{}/{}", end - 1, bytes.len())));
    Reply::Answer(206, headers, bytes[start..end].to_vec())
}

/// The range that a request asks for, half-open.
pub(crate) fn range(request: &Request) -> Option<(usize, usize)> {
    let (start, last) = request.header("range").strip_prefix("bytes=")?.split_once('-')?;
    Some((start.parse().unwrap(), last.parse::<usize>().unwrap() + 1))
}

/// A running server; it ends with the process.
pub(crate) struct Server {
    pub(crate) endpoint: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    /// Starts a server; `reply` gets each request and how many there were before it.
    pub(crate) fn start(reply: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (kept, reply) = (Arc::clone(&requests), Arc::new(reply));
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (kept, reply) = (Arc::clone(&kept), Arc::clone(&reply));
                thread::spawn(move || serve(&connection.unwrap(), &kept, &*reply));
            }
        });
        Self { endpoint, requests }
    }

    /// All requests so far.
    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn serve(connection: &TcpStream, kept: &Mutex<Vec<Request>>, reply: &dyn Fn(&Request, usize) -> Reply) {
    let mut reader = BufReader::new(connection.try_clone().unwrap());
    while let Some(request) = read_request(&mut reader) {
        let before = {
            let mut kept = kept.lock().unwrap();
            kept.push(request.clone());
            kept.len() - 1
        };
        let mut connection = connection;
        let is_head = request.method == "HEAD";
        match reply(&request, before) {
            Reply::Answer(status, headers, body) => {
                let sent = if is_head { &[][..] } else { &body[..] };
                let head = head(status, &headers, body.len());
                if connection.write_all(head.as_bytes()).and_then(|()| connection.write_all(sent)).is_err() {
                    return;
                }
            }
            Reply::CutOff(status, headers, body, length) => {
                let head = head(status, &headers, body.len());
                let _gone = connection
                    .write_all(head.as_bytes())
                    .and_then(|()| connection.write_all(&body[..length]));
                return;
            }
            Reply::Nothing => return,
            Reply::Silence => loop {
                thread::park();
            },
        }
    }
}

fn head(status: u16, headers: &[(&str, String)], length_bytes: usize) -> String {
    let mut head = format!("HTTP/1.1 {status} told\r\n");
    for (name, value) in headers {
        write!(head, "{name}: {value}\r\n").unwrap();
    }
    write!(head, "content-length: {length_bytes}\r\n\r\n").unwrap();
    head
}

fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut line = String::new();
    if reader.read_line(&mut line).ok()? == 0 {
        return None;
    }
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Request { method, target, headers, body })
}
