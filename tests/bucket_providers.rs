//! How the conditions of a put and the versions of objects are said to each provider: no emulator of Google's or
//! Azure's can be had everywhere, so a server of our own looks at what arrives.

#![cfg(feature = "cloud")]
#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod common;

use std::sync::Mutex;

use common::http_server::{Reply, Request, Server, object, refusal};
use common::{key, pack};
use varvite::error::Error;
use varvite::store::object::{BucketOptions, BucketStore};
use varvite::store::remote::RemoteStore;
use varvite::store::{Folder, PutMode, Store};

/// The credentials that `object_store` takes for an emulator of Google's.
const NO_GOOGLE: &str =
    r#"{"private_key":"none","private_key_id":"none","client_email":"none","disable_oauth":true}"#;

fn open(url: &str, endpoint: &str, options: &[(&str, &str)]) -> BucketStore {
    let common = [("endpoint", endpoint), ("retry_seconds", "0")];
    let options = common.iter().chain(options);
    let options = options.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    BucketStore::open(BucketOptions { url: url.to_owned(), options, credentials: None }).unwrap()
}

/// Puts, swaps and reads with one object on a server that keeps the conditions it understands.
fn walk(store: &BucketStore) {
    store.put(&pack("a"), b"one", PutMode::IfAbsent).unwrap();
    let error = store.put(&pack("a"), b"two", PutMode::IfAbsent).unwrap_err();
    assert!(matches!(&error, Error::Conflict { by, .. } if by == "3 bytes lie there"), "{}", error.chain());
    let (bytes, first) = store.get_versioned(&pack("a"), 10).unwrap();
    assert_eq!(bytes, b"one");
    let second = store.swap(&pack("a"), b"six", Some(&first)).unwrap();
    let error = store.swap(&pack("a"), b"ten", Some(&first)).unwrap_err();
    assert!(matches!(error, Error::Conflict { .. }), "{}", error.chain());
    assert_eq!(store.get_versioned(&pack("a"), 10).unwrap(), (b"six".to_vec(), second));
    store.put(&key(Folder::Packs, "a"), b"four", PutMode::Replace).unwrap();
    assert_eq!(store.get(&pack("a"), 10).unwrap(), b"four");
}

/// One object, and which version it is.
type Kept = Mutex<(u64, Vec<u8>)>;

/// Answers with the object, as the version that it is, with `more` headers.
fn tagged(request: &Request, version: u64, bytes: &[u8], more: &[(&'static str, String)]) -> Reply {
    match object(request, bytes) {
        Reply::Answer(status, mut headers, body) => {
            headers[0].1 = format!("\"tag-{version}\"");
            headers.extend_from_slice(more);
            Reply::Answer(status, headers, body)
        }
        reply => reply,
    }
}

#[test]
fn google_keeps_generations() {
    let kept = Kept::default();
    let server = Server::start(move |request, _| {
        assert!(request.target.starts_with("/bkt/run%2Fpacks%2Fa"), "{}", request.target);
        let mut kept = kept.lock().unwrap();
        let generation = |version: u64| vec![("x-goog-generation", version.to_string())];
        if request.method == "PUT" {
            let wanted = request.header("x-goog-if-generation-match");
            if !wanted.is_empty() && wanted != kept.0.to_string() {
                return refusal(412, "PreconditionFailed");
            }
            *kept = (kept.0 + 1, request.body.clone());
            let mut headers = generation(kept.0);
            headers.push(("etag", format!("\"tag-{}\"", kept.0)));
            return Reply::Answer(200, headers, Vec::new());
        }
        tagged(request, kept.0, &kept.1, &generation(kept.0))
    });
    walk(&open("gs://bkt/run", &server.endpoint, &[("google_service_account_key", NO_GOOGLE)]));
}

#[test]
fn azure_keeps_entity_tags() {
    let kept = Kept::default();
    let server = Server::start(move |request, _| {
        assert_eq!(request.target, "/bkt/run/packs/a");
        assert!(request.header("authorization").starts_with("SharedKey acc:"));
        let mut kept = kept.lock().unwrap();
        if request.method == "PUT" {
            if request.header("if-none-match") == "*" && kept.0 > 0 {
                return refusal(409, "BlobAlreadyExists");
            }
            if !["", &format!("\"tag-{}\"", kept.0)].contains(&request.header("if-match")) {
                return refusal(412, "ConditionNotMet");
            }
            *kept = (kept.0 + 1, request.body.clone());
            return Reply::Answer(201, vec![("etag", format!("\"tag-{}\"", kept.0))], Vec::new());
        }
        tagged(request, kept.0, &kept.1, &[])
    });
    let account = [("azure_storage_account_name", "acc"), ("azure_storage_account_key", "c2VjcmV0")];
    walk(&open("az://bkt/run", &server.endpoint, &account));
}

#[test]
fn amazon_names_the_bucket_in_the_path_and_on_request_in_the_host() {
    let server = Server::start(|request, _| object(request, request.header("host").as_bytes()));
    let port = server.endpoint.rsplit(':').next().unwrap().to_owned();
    let keys = [("access_key_id", "AK1"), ("secret_access_key", "s")];
    let in_path = open("s3://bkt/run", &server.endpoint, &keys);
    assert_eq!(in_path.get(&pack("a"), 100).unwrap(), format!("127.0.0.1:{port}").into_bytes());
    assert_eq!(server.requests()[0].target, "/bkt/run/packs/a");
    // Nothing can stand before the numbers of an address.
    let options = [&keys[..], &[("virtual_hosted", "true"), ("endpoint", &server.endpoint)]].concat();
    let options = options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let opened =
        BucketStore::open(BucketOptions { url: "s3://bkt/run".to_owned(), options, credentials: None });
    let Err(Error::InvalidInput { what, reason }) = opened else { panic!() };
    assert_eq!(what, "option `endpoint`");
    assert!(reason.starts_with(&format!("`http://bkt.127.0.0.1:{port}` is no url")), "{reason}");
}

#[test]
fn keys_of_any_characters_arrive_as_they_are() {
    let server = Server::start(|request, _| object(request, b"object"));
    let keys = [("access_key_id", "AK1"), ("secret_access_key", "s")];
    let store = open("s3://bkt/a b/%20/\u{e4}#?&=+~", &server.endpoint, &keys);
    store.get(&pack("a"), 100).unwrap();
    assert_eq!(server.requests()[0].target, "/bkt/a%20b/%2520/%C3%A4%23%3F%26%3D%2B~/packs/a");
}
