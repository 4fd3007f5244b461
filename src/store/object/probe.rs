//! Whether a server does what the promises of a bucket rest on, found out with an object of our own.

use std::time::Duration;

use object_store::PutMode as Put;

use super::super::{Folder, Key};
use super::Capabilities;
use super::attempt::random_u32;
use super::client::{Client, version_of};
use crate::error::{Error, Result};

/// How a probe's object begins; what is left of a dead one is removed by a later one.
pub const PROBE_START: &str = "probe-";

/// Age at which the object of a probe belongs to nobody.
const DEAD_MS: u64 = 3_600_000;

impl Client {
    /// One round of requests: is it reached, does it know us and the bucket, and does it keep conditions?
    pub(super) fn probe(&self) -> Result<Capabilities> {
        let name = format!("{PROBE_START}{:08x}{:08x}", random_u32(), random_u32());
        let key = Key::new(Folder::Uploads, &name)?;
        let found = self.probe_with(&key);
        if found.is_err() {
            // Whoever can't be reached is not waited for again; what is left is removed by a later probe.
            let _ = self.delete_within(Folder::Uploads, &[name], Duration::ZERO);
            return found;
        }
        self.delete(Folder::Uploads, &[name])?;
        let found = found?;
        let is_whole = found.put_if_absent && found.swap;
        if !is_whole && !self.settings.single_writer {
            return Err(self.refuse(found));
        }
        Ok(found)
    }

    fn probe_with(&self, key: &Key) -> Result<Capabilities> {
        let first = self.put_plainly(key, b"one", &Put::Create)?;
        let Some(first) = first else {
            let what = format!("`{}` is there before it was put", self.name(key));
            return Err(Error::Internal { what });
        };
        let put_if_absent = self.put_plainly(key, b"two", &Put::Create)?.is_none();
        let expected = if put_if_absent { first.clone() } else { self.get(key, 3)?.1.0 };
        let update = |version: &str| {
            Put::Update(object_store::UpdateVersion { e_tag: Some(version.to_owned()), version: None })
        };
        let swap = if self.backend()?.has_generations {
            // Generations are kept by the one provider that has them.
            true
        } else {
            let swapped = self.put_plainly(key, b"six", &update(&expected))?.is_some();
            swapped
                && self.put_plainly(key, b"ten", &update("\"00000000000000000000000000000000\""))?.is_none()
        };
        let rows = self.list(Folder::Uploads)?;
        let own = rows.iter().find(|row| row.name == key.name());
        let Some(own) = own else {
            let what = "a listing without what was just put: the store must list at once";
            return Err(Error::store("list", self.name(key))(std::io::Error::other(what)));
        };
        let is_dead = |modified: u64| modified.saturating_add(DEAD_MS) < own.modified_unix_ms;
        let dead =
            rows.iter().filter(|row| row.name.starts_with(PROBE_START) && is_dead(row.modified_unix_ms));
        let dead: Vec<String> = dead.map(|row| row.name.clone()).collect();
        self.delete(Folder::Uploads, &dead)?;
        Ok(Capabilities { put_if_absent, swap })
    }

    /// A put without any help of ours; `None` where its condition did not hold.
    fn put_plainly(&self, key: &Key, bytes: &[u8], mode: &Put) -> Result<Option<String>> {
        let path = self.key_path(key)?;
        let sent = self.send(async |backend| {
            let options =
                object_store::PutOptions { mode: mode.clone(), ..object_store::PutOptions::default() };
            backend.objects.put_opts(&path, bytes.to_vec().into(), options).await
        })?;
        match sent {
            Ok(put) => Ok(Some(put.e_tag.as_deref().map(|tag| version_of(tag).0).unwrap_or_default())),
            Err(failure) if failure.kind == super::failure::Kind::Changed && failure.may_be_done => {
                // It may be our own, sent twice.
                let (present, version) = self.get(key, 16)?;
                Ok((present == bytes).then_some(version.0))
            }
            Err(failure) if failure.kind == super::failure::Kind::Changed => Ok(None),
            Err(failure) => Err(failure.error("write", self.name(key))),
        }
    }

    fn refuse(&self, found: Capabilities) -> Error {
        let lacks = match (found.put_if_absent, found.swap) {
            (false, false) => "overwrites objects in spite of `If-None-Match: *` and `If-Match`",
            (false, true) => "overwrites objects in spite of `If-None-Match: *`",
            (true, _) => "replaces objects in spite of `If-Match`",
        };
        let advice = "two writers could both win there: use a store that keeps conditional writes, or, if nobody \
                      else will ever write here, say so with option `single_writer`";
        let text = format!("the server {lacks}; {advice}");
        Error::store("use", self.root.clone())(std::io::Error::new(std::io::ErrorKind::Unsupported, text))
    }
}
