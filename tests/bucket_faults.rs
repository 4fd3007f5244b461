//! What a bucket makes of servers that refuse, break off, lose answers or keep no conditions.

#![cfg(feature = "cloud")]
#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod common;

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::http_server::{Reply, Server, TAG, answer, object, object_headers, range, refusal};
use common::{key, pack, pattern};
use varvite::error::{Error, Result};
use varvite::store::object::{BucketOptions, BucketStore, CredentialSource, Credentials, Secret};
use varvite::store::remote::RemoteStore;
use varvite::store::{Folder, PutMode, Store};

const SECRET: &str = "the-secret-that-nobody-sees";

fn options(endpoint: &str, more: &[(&str, &str)]) -> BucketOptions {
    let mut options: BTreeMap<String, String> = [
        ("endpoint", endpoint),
        ("access_key_id", "AK1"),
        ("secret_access_key", SECRET),
        ("retry_seconds", "0"),
    ]
    .into_iter()
    .chain(more.iter().copied())
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .collect();
    options.retain(|_, value| !value.is_empty());
    BucketOptions { url: "s3://bkt/run".to_owned(), options, credentials: None }
}

fn open(server: &Server, more: &[(&str, &str)]) -> BucketStore {
    BucketStore::open(options(&server.endpoint, more)).unwrap()
}

/// Enough time for several attempts.
const PATIENT: (&str, &str) = ("retry_seconds", "30");

fn kind_and_text(error: &Error) -> (ErrorKind, String) {
    let Error::Store { source, .. } = error else { panic!("{error}") };
    (source.kind(), error.chain())
}

fn put_answer() -> Reply {
    Reply::Answer(200, vec![("etag", TAG.to_owned())], Vec::new())
}

#[test]
fn a_refusal_is_named_and_not_sent_again() {
    for (status, code, kind, told) in [
        (403, "AccessDenied", ErrorKind::PermissionDenied, "403 AccessDenied: told so (these credentials"),
        (403, "InvalidAccessKeyId", ErrorKind::PermissionDenied, "check `access_key_id`"),
        (403, "SignatureDoesNotMatch", ErrorKind::PermissionDenied, "check `access_key_id`"),
        (403, "RequestTimeTooSkewed", ErrorKind::PermissionDenied, "the clock of this machine is wrong"),
        (400, "ExpiredToken", ErrorKind::PermissionDenied, "the credentials have ended"),
        (404, "NoSuchBucket", ErrorKind::Other, "there is no such bucket"),
        (404, "NoSuchKey", ErrorKind::NotFound, "404 NoSuchKey"),
        (400, "AuthorizationHeaderMalformed", ErrorKind::Other, "set `region`"),
        (400, "InvalidArgument", ErrorKind::Other, "400 InvalidArgument: told so"),
        (501, "NotImplemented", ErrorKind::Unsupported, "lacks that request"),
    ] {
        let server = Server::start(move |_, _| refusal(status, code));
        let error = open(&server, &[PATIENT]).get(&pack("a"), 10).unwrap_err();
        let (found, text) = kind_and_text(&error);
        assert_eq!(found, kind, "{text}");
        assert!(text.starts_with("cannot read `s3://bkt/run/packs/a`: `127.0.0.1:"), "{text}");
        assert!(text.contains(told), "{text}");
        assert!(!text.contains(SECRET), "{text}");
        assert_eq!(server.requests().len(), 1, "{code}");
    }
}

#[test]
fn another_region_is_named() {
    let server = Server::start(|_, _| {
        Reply::Answer(301, vec![("x-amz-bucket-region", "eu-west-3".to_owned())], b"<Error/>".to_vec())
    });
    let error = open(&server, &[]).list(Folder::Packs).unwrap_err();
    assert!(error.chain().contains("set `region` to `eu-west-3`"), "{}", error.chain());
}

#[test]
fn what_passes_is_sent_again() {
    for first in [
        (|| refusal(503, "SlowDown")) as fn() -> Reply,
        || refusal(429, "TooManyRequests"),
        || refusal(500, "InternalError"),
        || refusal(400, "RequestTimeout"),
        || Reply::Nothing,
        || Reply::CutOff(200, object_headers(), b"object".to_vec(), 3),
    ] {
        let server = Server::start(
            move |request, before| if before < 2 { first() } else { object(request, b"object") },
        );
        assert_eq!(open(&server, &[PATIENT]).get(&pack("a"), 10).unwrap(), b"object");
        assert_eq!(server.requests().len(), 3);
    }
}

#[test]
fn attempts_end_and_say_so() {
    let server = Server::start(|_, _| refusal(503, "SlowDown"));
    let (kind, text) =
        kind_and_text(&open(&server, &[("retry_seconds", "0.5")]).get(&pack("a"), 10).unwrap_err());
    assert_eq!(kind, ErrorKind::ResourceBusy);
    assert!(text.contains("503 SlowDown") && text.contains("attempts in"), "{text}");
    assert!((2..=5).contains(&server.requests().len()));
}

#[test]
fn a_deletion_is_not_sent_again_when_its_time_is_over() {
    let server = Server::start(move |_, _| refusal(503, "SlowDown"));
    let store = open(&server, &[PATIENT]);
    let doomed = ["a".to_owned()];
    let error = store.delete_within(Folder::Packs, &doomed, Duration::from_millis(350)).unwrap_err();
    assert_eq!(kind_and_text(&error).0, ErrorKind::ResourceBusy);
    // After 0.05 to 0.1, 0.1 to 0.2 and 0.2 to 0.4 seconds; the last one would be too late, or is just in time.
    assert!((2..=4).contains(&server.requests().len()), "{:?}", server.requests());
}

#[test]
fn silence_is_a_time_out() {
    let server = Server::start(|_, _| Reply::Silence);
    let store = open(&server, &[("timeout_seconds", "0.3")]);
    for error in [store.get(&pack("a"), 10).unwrap_err(), store.list(Folder::Packs).unwrap_err()] {
        let (kind, text) = kind_and_text(&error);
        assert_eq!(kind, ErrorKind::TimedOut, "{text}");
        assert!(text.contains("no answer within 0.3 s"), "{text}");
    }
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let store = BucketStore::open(options(&format!("http://{free}"), &[])).unwrap();
    let (kind, text) = kind_and_text(&store.list(Folder::Packs).unwrap_err());
    assert_eq!(kind, ErrorKind::ConnectionRefused, "{text}");
    let store = BucketStore::open(options("http://nowhere.invalid", &[])).unwrap();
    let (kind, text) = kind_and_text(&store.list(Folder::Packs).unwrap_err());
    assert_eq!(kind, ErrorKind::HostUnreachable, "{text}");
    assert!(text.contains("check `endpoint`"), "{text}");
}

/// The bytes that a put brought, kept as a server keeps them.
#[derive(Default)]
struct Kept(Mutex<Option<Vec<u8>>>);

#[test]
fn a_put_whose_answer_was_lost_is_no_conflict_with_itself() {
    for (others, wins) in [(None, true), (Some(b"theirs".to_vec()), false)] {
        let kept = Arc::new(Kept(Mutex::new(others)));
        let server = Server::start(move |request, before| {
            let mut kept = kept.0.lock().unwrap();
            match (request.method.as_str(), kept.as_ref()) {
                ("PUT", None) => {
                    *kept = Some(request.body.clone());
                    Reply::Nothing
                }
                ("PUT", Some(_)) if before == 0 => Reply::Nothing,
                ("PUT", Some(_)) => refusal(412, "PreconditionFailed"),
                (_, Some(bytes)) => object(request, bytes),
                (_, None) => refusal(404, "NoSuchKey"),
            }
        });
        let outcome = open(&server, &[PATIENT]).put(&pack("a"), b"mine", PutMode::IfAbsent);
        match outcome {
            Ok(()) => assert!(wins),
            Err(Error::Conflict { by, .. }) => assert!(!wins && by == "6 bytes lie there", "{by}"),
            Err(error) => panic!("{}", error.chain()),
        }
        let puts = server.requests().into_iter().filter(|request| request.method == "PUT");
        assert!(puts.clone().all(|put| put.header("if-none-match") == "*"));
        assert_eq!(puts.count(), 2);
    }
}

#[test]
fn two_conditional_puts_at_once_are_sorted_out_by_another_attempt() {
    let server =
        Server::start(
            |_, before| {
                if before == 0 { refusal(409, "ConditionalRequestConflict") } else { put_answer() }
            },
        );
    let store = open(&server, &[PATIENT]);
    let version = store.swap(&key(Folder::Root, "lease.json"), b"x", None).unwrap();
    assert_eq!((version.0.as_str(), server.requests().len()), (TAG, 2));
}

#[test]
fn a_read_that_breaks_off_goes_on_from_there_and_of_the_same_version() {
    let bytes = pattern(1, 300_000);
    let whole = bytes.clone();
    let server = Server::start(move |request, _| match (request.method.as_str(), range(request)) {
        ("HEAD", _) => object(request, &whole),
        (_, Some((start, _))) => match object(request, &whole) {
            Reply::Answer(status, headers, body) if body.len() > 100_000 => {
                Reply::CutOff(status, headers, body, 90_000 + start % 7)
            }
            reply => reply,
        },
        _ => refusal(400, "NoRange"),
    });
    let object = open(&server, &[PATIENT]).open(&pack("a")).unwrap();
    let mut read = vec![0; 299_000];
    object.read_at(1_000, &mut read).unwrap();
    assert!(read == bytes[1_000..]);
    let requests = server.requests();
    let starts: Vec<usize> = requests.iter().filter_map(range).map(|(start, _)| start).collect();
    assert_eq!(starts, [1_000, 91_006, 181_012, 271_018]);
    assert!(requests[1..].iter().all(|request| request.header("if-match") == TAG));
}

#[test]
fn another_version_is_not_mixed_in_where_a_server_ignores_the_condition() {
    let server = Server::start(|request, before| match object(request, &pattern(before as u64, 200_000)) {
        Reply::Answer(status, mut headers, body) => {
            headers[0].1 = format!("\"version-{before}\"");
            Reply::Answer(status, headers, body)
        }
        reply => reply,
    });
    let object = open(&server, &[]).open(&pack("a")).unwrap();
    let error = object.read_at(0, &mut [0; 100]).unwrap_err();
    assert!(error.is_not_found(), "{}", error.chain());
}

#[test]
fn an_answer_that_is_too_long_or_of_another_range_is_an_error() {
    for (told, sent) in [("bytes 0-99/200000", 100), ("bytes 5-104/200000", 100), ("bytes 0-9/200000", 10)] {
        let server = Server::start(move |request, _| {
            if request.method == "HEAD" {
                return object(request, &pattern(1, 200_000));
            }
            let mut headers = object_headers();
            headers.push(("content-range", told.to_owned()));
            Reply::Answer(206, headers, vec![7; sent + usize::from(sent == 100)])
        });
        let object = open(&server, &[]).open(&pack("a")).unwrap();
        assert!(object.read_at(0, &mut [0; 100]).is_err(), "{told}");
    }
}

/// Hands out the next key at each call.
struct Turning {
    calls: AtomicUsize,
    expires_at_unix_seconds: Option<f64>,
}

impl CredentialSource for Turning {
    fn fetch(&self) -> Result<Credentials> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        Ok(Credentials {
            access_key_id: format!("AK{call}"),
            secret_access_key: Secret::new(SECRET),
            session_token: Some(Secret::new("token")),
            expires_at_unix_seconds: self.expires_at_unix_seconds,
        })
    }
}

fn open_turning(server: &Server, expires_at_unix_seconds: Option<f64>) -> (BucketStore, Arc<Turning>) {
    let source = Arc::new(Turning { calls: AtomicUsize::new(0), expires_at_unix_seconds });
    let mut options = options(&server.endpoint, &[("access_key_id", ""), ("secret_access_key", "")]);
    options.credentials = Some(Arc::clone(&source) as _);
    (BucketStore::open(options).unwrap(), source)
}

#[test]
fn credentials_that_have_ended_are_fetched_once_more() {
    let server = Server::start(|request, _| {
        assert_eq!(request.header("x-amz-security-token"), "token");
        let is_new = request.header("authorization").contains("Credential=AK2/");
        if is_new { object(request, b"object") } else { refusal(400, "ExpiredToken") }
    });
    let (store, source) = open_turning(&server, None);
    assert_eq!(source.calls.load(Ordering::Relaxed), 0, "opening asks for nothing");
    for _ in 0..3 {
        assert_eq!(store.get(&pack("a"), 10).unwrap(), b"object");
    }
    assert_eq!((source.calls.load(Ordering::Relaxed), server.requests().len()), (2, 4));

    let server = Server::start(|_, _| refusal(400, "ExpiredToken"));
    let (store, source) = open_turning(&server, None);
    let (kind, text) = kind_and_text(&store.get(&pack("a"), 10).unwrap_err());
    assert_eq!((kind, source.calls.load(Ordering::Relaxed)), (ErrorKind::PermissionDenied, 2), "{text}");
}

#[test]
fn credentials_are_fetched_anew_before_they_end() {
    let server = Server::start(|request, _| object(request, b"object"));
    // In 1970, and in 2096.
    for (end, calls) in [(100.0, 3), (4_000_000_000.0, 1)] {
        let (store, source) = open_turning(&server, Some(end));
        for _ in 0..3 {
            store.get(&pack("a"), 10).unwrap();
        }
        assert_eq!(source.calls.load(Ordering::Relaxed), calls);
    }
}

/// Fails always.
struct Broken;

impl CredentialSource for Broken {
    fn fetch(&self) -> Result<Credentials> {
        Err(Error::invalid("`credentials`", "raised `KeyError`"))
    }
}

#[test]
fn credentials_that_can_not_be_had_are_named() {
    let server = Server::start(|_, _| answer(200, ""));
    let mut options = options(&server.endpoint, &[("access_key_id", ""), ("secret_access_key", ""), PATIENT]);
    options.credentials = Some(Arc::new(Broken));
    let (kind, text) = kind_and_text(&BucketStore::open(options).unwrap().list(Folder::Tags).unwrap_err());
    assert_eq!(kind, ErrorKind::PermissionDenied);
    assert!(text.ends_with("no credentials: invalid `credentials`: raised `KeyError`"), "{text}");
    assert_eq!(server.requests().len(), 0);
}

#[test]
fn nobody_signs_for_who_is_anonymous() {
    let server = Server::start(|request, _| object(request, b"object"));
    let anonymous = [("access_key_id", ""), ("secret_access_key", ""), ("anonymous", "true")];
    assert_eq!(open(&server, &anonymous).get(&pack("a"), 10).unwrap(), b"object");
    assert_eq!(server.requests()[0].header("authorization"), "");
}

#[test]
fn a_listing_leaves_out_what_is_none_of_ours_and_goes_on_over_pages() {
    let server = Server::start(|request, _| {
        let row = |key: &str| {
            format!(
                "<Contents><Key>{key}</Key><Size>3</Size><LastModified>2026-11-30T07:00:00.000Z</LastModified>\
                 <ETag>&quot;x&quot;</ETag></Contents>"
            )
        };
        let (keys, more) = if request.target.contains("continuation-token=2") {
            (["run/packs/b", "run/packs/sub/c", "run/packs/.d"], "")
        } else {
            (
                ["run/packs/a", "run/packs/a%20b", "run/packs"],
                "<NextContinuationToken>2</NextContinuationToken>",
            )
        };
        let rows: String = keys.into_iter().map(row).collect();
        answer(200, &format!("<?xml version=\"1.0\"?><ListBucketResult>{rows}{more}</ListBucketResult>"))
    });
    let rows = open(&server, &[]).list(Folder::Packs).unwrap();
    let told: Vec<_> = rows.iter().map(|row| (row.name.as_str(), row.length_bytes)).collect();
    assert_eq!(told, [("a", Some(3)), ("b", Some(3))]);
    assert!(server.requests()[0].target.contains("prefix=run%2Fpacks%2F"));
}

/// An object and its key.
type Named = (String, Vec<u8>);

/// A server that keeps one object, and conditions only where it is told to.
fn careless(keeps_absent: bool, keeps_match: bool) -> Server {
    let kept: Mutex<(usize, Option<Named>)> = Mutex::default();
    Server::start(move |request, _| {
        let mut kept = kept.lock().unwrap();
        let tag = format!("\"tag-{}\"", kept.0);
        match (request.method.as_str(), &kept.1) {
            ("PUT", Some(_)) if keeps_absent && request.header("if-none-match") == "*" => refusal(412, "No"),
            ("PUT", _) if keeps_match && !["", &tag].contains(&request.header("if-match")) => {
                refusal(412, "No")
            }
            ("PUT", _) => {
                let name = request.target.strip_prefix("/bkt/").unwrap().to_owned();
                *kept = (kept.0 + 1, Some((name, request.body.clone())));
                Reply::Answer(200, vec![("etag", format!("\"tag-{}\"", kept.0))], Vec::new())
            }
            ("GET", Some((name, bytes))) if request.target.contains("list-type") => {
                let length = bytes.len();
                answer(
                    200,
                    &format!(
                        "<?xml version=\"1.0\"?><ListBucketResult><Contents><Key>{name}</Key><Size>{length}</Size>\
                         <LastModified>2026-11-30T07:00:00.000Z</LastModified></Contents></ListBucketResult>"
                    ),
                )
            }
            ("GET" | "HEAD", Some((_, bytes))) => match object(request, bytes) {
                Reply::Answer(status, mut headers, body) => {
                    headers[0].1 = tag;
                    Reply::Answer(status, headers, body)
                }
                reply => reply,
            },
            ("POST", _) => {
                kept.1 = None;
                answer(
                    200,
                    "<?xml version=\"1.0\"?><DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>",
                )
            }
            _ => refusal(404, "NoSuchKey"),
        }
    })
}

#[test]
fn a_server_that_keeps_no_conditions_is_found_and_named() {
    for (keeps_absent, keeps_match, told) in [
        (false, false, "in spite of `If-None-Match: *` and `If-Match`"),
        (false, true, "overwrites objects in spite of `If-None-Match: *`"),
        (true, false, "replaces objects in spite of `If-Match`"),
        (true, true, ""),
    ] {
        let server = careless(keeps_absent, keeps_match);
        match open(&server, &[]).probe() {
            Ok(found) => assert!(keeps_absent && keeps_match && found.put_if_absent && found.swap),
            Err(error) => {
                let (kind, text) = kind_and_text(&error);
                assert_eq!(kind, ErrorKind::Unsupported);
                assert!(
                    !told.is_empty() && text.contains(told) && text.contains("`single_writer`"),
                    "{text}"
                );
            }
        }
        let found = open(&server, &[("single_writer", "true")]).probe().unwrap();
        assert_eq!((found.put_if_absent, found.swap), (keeps_absent, keeps_match));
    }
}

#[test]
fn a_single_writer_looks_before_it_puts() {
    let server = careless(false, false);
    let store = open(&server, &[("single_writer", "true")]);
    store.put(&pack("a"), b"one", PutMode::IfAbsent).unwrap();
    let error = store.put(&pack("a"), b"two", PutMode::IfAbsent).unwrap_err();
    assert!(matches!(error, Error::Conflict { by, .. } if by == "3 bytes lie there"));
    let (bytes, version) = store.get_versioned(&pack("a"), 10).unwrap();
    assert_eq!(bytes, b"one");
    let second = store.swap(&pack("a"), b"two", Some(&version)).unwrap();
    assert!(matches!(store.swap(&pack("a"), b"six", Some(&version)), Err(Error::Conflict { .. })));
    assert_eq!(store.get_versioned(&pack("a"), 10).unwrap(), (b"two".to_vec(), second));
}

#[test]
fn nothing_that_is_printed_holds_a_secret() {
    let mut options = options("http://127.0.0.1:1", &[("session_token", "the-token")]);
    options.credentials = Some(Arc::new(Broken));
    let text = format!("{options:?}");
    let text = format!("{text} {:?}", BucketStore::open(options).unwrap());
    assert!(!text.contains(SECRET) && !text.contains("the-token"), "{text}");
    let credentials = Credentials {
        access_key_id: "AK1".to_owned(),
        secret_access_key: Secret::new(SECRET),
        session_token: Some(Secret::new("the-token")),
        expires_at_unix_seconds: None,
    };
    let text = format!("{credentials:?}");
    assert!(text.contains("AK1") && !text.contains(SECRET) && !text.contains("the-token"), "{text}");
}

#[test]
fn an_option_that_is_wrong_is_refused_with_what_is_legal() {
    for (name, value, told) in [
        ("retries", "3", "is not known; there are: `endpoint`, `anonymous`"),
        ("aws_nonsense", "3", "is not known"),
        ("aws_timeout", "3 seconds", "is not known"),
        ("google_bearer_token", "x", "is not known"),
        ("part_bytes", "1000", "must be 5242880 to 1073741824, not: 1000"),
        ("part_bytes", "16MB", "must be a whole number, not: `16MB`"),
        ("parallel", "0", "must be 1 to 256, not: 0"),
        ("timeout_seconds", "-1", "must be 0 to 86400 seconds, not: `-1`"),
        ("retry_seconds", "NaN", "must be 0 to 86400 seconds, not: `NaN`"),
        ("anonymous", "perhaps", "must be `true` or `false`, not: `perhaps`"),
        ("endpoint", "127.0.0.1:9000", "must be like `https://host`"),
        ("endpoint", "http://user:secret@host", "must be like `https://host`"),
    ] {
        let Err(Error::InvalidInput { what, reason }) =
            BucketStore::open(options("http://x", &[(name, value)]))
        else {
            panic!("{name}={value}")
        };
        assert_eq!(what, format!("option `{name}`"));
        assert!(reason.contains(told), "{reason}");
    }
    let error = BucketStore::open(options("http://x", &[("ca_bundle", "/nowhere/ca.pem")])).unwrap_err();
    assert!(error.chain().starts_with("cannot open `/nowhere/ca.pem`"), "{}", error.chain());
}

/// Set in the process that has no certificates of a system.
const BARE: &str = "VARVITE_TEST_WITHOUT_CERTIFICATES";

#[test]
fn plain_http_and_https_need_no_certificates_of_the_system() {
    if std::env::vars().all(|(name, _)| name != BARE) {
        let this = "plain_http_and_https_need_no_certificates_of_the_system";
        let bare = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", this])
            .envs([(BARE, "1"), ("SSL_CERT_FILE", "/nowhere/ca.pem"), ("SSL_CERT_DIR", "/nowhere")])
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&bare.stdout).into_owned();
        assert!(bare.status.success() && told.contains("1 passed"), "{told}");
    }
    let server = Server::start(|request, _| object(request, b"object"));
    assert_eq!(open(&server, &[]).get(&pack("a"), 10).unwrap(), b"object");
    BucketStore::open(options("https://127.0.0.1:1", &[])).unwrap();
}
