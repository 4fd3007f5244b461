//! Large objects, sent in parts: several at once, from wherever an earlier attempt stopped.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{PutMode as Put, PutPayload};
use tokio::task::JoinSet;

use super::super::remote::{Transfer, Upload, Version};
use super::super::{Key, ReadAt};
use super::attempt::finish;
use super::client::{Backend, Client, Outcome, part_ids, version};
use super::failure::{Failure, Kind};
use super::http::{MODE, Mode, Pace};
use crate::error::{Error, Result};
use crate::threads::Spares;

/// How often a transfer looks whether it is to end, and tells how far it is.
const LOOK: Duration = Duration::from_millis(100);

/// Buffers of parts, kept for the next part: fresh memory costs more than filling it.
static BUFFERS: Spares<Vec<u8>> = Spares::new();

/// A buffer that goes back when the last request has let go of it.
struct Lent(Vec<u8>);

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        BUFFERS.give_back(std::mem::take(&mut self.0));
    }
}

/// How many parts an object has; an empty one has one empty part.
fn part_count(length_bytes: u64, part_bytes: u64) -> usize {
    length_bytes.div_ceil(part_bytes.max(1)).max(1) as usize
}

impl Client {
    /// Starts an object of so many bytes; one of a single part needs no start.
    pub(super) fn begin_upload(&self, key: &Key, length_bytes: u64) -> Result<Upload> {
        let part_bytes = self.settings.part_bytes_for(length_bytes);
        let parts = vec![None; part_count(length_bytes, part_bytes)];
        let id = if parts.len() == 1 { String::new() } else { self.begin_parts(key)? };
        Ok(Upload { id, length_bytes, part_bytes, parts })
    }

    /// Starts an object in parts and returns the server's name for that.
    pub(super) fn begin_parts(&self, key: &Key) -> Result<String> {
        let path = self.key_path(key)?;
        let begun = self.send(async |backend| backend.parts.create_multipart(&path).await)?;
        begun.map_err(|failure| failure.error("begin the upload of", self.name(key)))
    }

    /// Sends what was not sent yet.
    pub(super) fn send_parts(
        self: &Arc<Self>,
        key: &Key,
        source: &dyn ReadAt,
        upload: &mut Upload,
        transfer: Transfer<'_>,
        sent: &mut dyn FnMut(&Upload) -> Result<()>,
    ) -> Result<()> {
        self.check(key, source, upload)?;
        if upload.id.is_empty() {
            return self.send_single(key, source, upload, transfer, sent);
        }
        let mut sender = Sender::new(self, key, upload, transfer)?;
        finish(sender.run(source, sent))?
    }

    /// Sends an object of one part: a put under the condition that nothing lies there but the same bytes.
    fn send_single(
        &self,
        key: &Key,
        source: &dyn ReadAt,
        upload: &mut Upload,
        transfer: Transfer<'_>,
        sent: &mut dyn FnMut(&Upload) -> Result<()>,
    ) -> Result<()> {
        if upload.parts.iter().all(Option::is_some) {
            // It was sent before, which doesn't say that it is there still.
            let gone = || Failure::new(Kind::Missing, "it is gone since it was sent");
            let there = self.completed(key, upload.length_bytes)?;
            return there.map(drop).ok_or_else(|| gone().error("send", self.name(key)));
        }
        let bytes = read_part(source, upload, 0)?;
        let pace = Arc::new(Pace::new(transfer.limit_bytes_per_second));
        let backend = self.backend()?;
        let put = finish(async {
            let mode = Mode::Paced(bytes.clone(), Arc::clone(&pace));
            let put = MODE.scope(mode, self.attempt_put(&backend, key, &bytes, &Put::Create));
            watch(put, &pace, transfer).await
        })??;
        if backend.is_memory {
            transfer.moved_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        }
        let version = self.settle_put(key, &bytes, &Put::Create, put, true)?;
        upload.parts = vec![Some(version.0)];
        sent(upload)
    }

    /// An upload comes from a file, and a file can be of another object.
    fn check(&self, key: &Key, source: &dyn ReadAt, upload: &Upload) -> Result<()> {
        let fits = upload.part_bytes > 0
            && upload.length_bytes == source.length_bytes()
            && upload.parts.len() == part_count(upload.length_bytes, upload.part_bytes)
            && upload.id.is_empty() == (upload.parts.len() == 1);
        if fits {
            return Ok(());
        }
        let reason = format!("is of {} bytes, but there are {}", upload.length_bytes, source.length_bytes());
        Err(Error::invalid(format!("upload of `{}`", self.name(key)), reason))
    }

    /// Makes the object visible, if nothing lies under its key.
    pub(super) fn complete_upload(&self, key: &Key, upload: &Upload) -> Result<Version> {
        let Some(parts) = part_ids(&upload.parts) else {
            return Err(Error::invalid(
                format!("upload of `{}`", self.name(key)),
                "has parts that were not sent",
            ));
        };
        if upload.id.is_empty() {
            let version = upload.parts.first().cloned().flatten();
            return Ok(Version(version.unwrap_or_default()));
        }
        if let Some(version) = self.completed(key, upload.length_bytes)? {
            return Ok(version);
        }
        let path = self.key_path(key)?;
        let joined = self
            .send(async |backend| backend.parts.complete_multipart(&path, &upload.id, parts.clone()).await)?;
        let Err(failure) = joined else {
            let version = self.completed(key, upload.length_bytes)?;
            let gone =
                || Error::Internal { what: format!("`{}` is not there after it was sent", self.name(key)) };
            return version.ok_or_else(gone);
        };
        // What an earlier attempt has completed is not known any more as an upload.
        match self.completed(key, upload.length_bytes) {
            Ok(Some(version)) => Ok(version),
            Err(conflict @ Error::Conflict { .. }) => Err(conflict),
            _ => Err(failure.error("complete", self.name(key))),
        }
    }

    /// The version of the object, if it lies there whole.
    fn completed(&self, key: &Key, length_bytes: u64) -> Result<Option<Version>> {
        let Some(meta) = self.head("complete", key)? else { return Ok(None) };
        if meta.size != length_bytes {
            let by = format!("{} bytes lie there", meta.size);
            return Err(Error::Conflict { object: self.name(key), by });
        }
        Ok(Some(version(&meta)))
    }

    /// Number of a part, and what the server answered, where it has arrived.
    pub(super) fn arrived(&self, key: &Key, landed: Landed) -> Result<(usize, String)> {
        let (index, outcome) = landed.map_err(|error| Error::Internal { what: error.to_string() })?;
        let answer = outcome.map_err(|failure| failure.error("send a part of", self.name(key)))?;
        Ok((index, answer))
    }

    /// Throws away what was sent.
    pub(super) fn abort_upload(&self, key: &Key, id: &str) -> Result<()> {
        if id.is_empty() {
            return Ok(());
        }
        let (path, id) = (self.key_path(key)?, id.to_owned());
        match self.send(async |backend| backend.parts.abort_multipart(&path, &id).await)? {
            Err(failure) if failure.kind != Kind::Missing => {
                Err(failure.error("abort the upload of", self.name(key)))
            }
            _ => Ok(()),
        }
    }
}

/// A part whose task has ended, and what the server answered.
pub(super) type Landed = std::result::Result<(usize, Outcome<String>), tokio::task::JoinError>;

/// One run of [`Client::send_parts`].
struct Sender<'a> {
    client: &'a Arc<Client>,
    key: &'a Key,
    path: Path,
    backend: Arc<Backend>,
    upload: &'a mut Upload,
    transfer: Transfer<'a>,
    pace: Arc<Pace>,
    /// Parts under way, and what the server answered.
    under_way: JoinSet<(usize, Outcome<String>)>,
}

impl<'a> Sender<'a> {
    fn new(
        client: &'a Arc<Client>,
        key: &'a Key,
        upload: &'a mut Upload,
        transfer: Transfer<'a>,
    ) -> Result<Self> {
        Ok(Self {
            client,
            key,
            path: client.key_path(key)?,
            backend: client.backend()?,
            upload,
            transfer,
            pace: Arc::new(Pace::new(transfer.limit_bytes_per_second)),
            under_way: JoinSet::new(),
        })
    }

    async fn run(&mut self, source: &dyn ReadAt, sent: &mut dyn FnMut(&Upload) -> Result<()>) -> Result<()> {
        let missing: Vec<usize> =
            (0..self.upload.parts.len()).filter(|index| self.upload.parts[*index].is_none()).collect();
        let mut missing = missing.into_iter();
        let mut first_error = None;
        loop {
            while first_error.is_none()
                && self.under_way.len() < self.client.settings.parallel
                && let Some(index) = missing.next()
            {
                match read_part(source, self.upload, index) {
                    Ok(bytes) => self.start(index, bytes),
                    Err(error) => first_error = Some(error),
                }
            }
            let landed = tokio::time::timeout(LOOK, self.under_way.join_next()).await;
            self.transfer.moved_bytes.fetch_add(self.pace.take_moved_bytes(), Ordering::Relaxed);
            if self.transfer.cancelled.load(Ordering::Relaxed) {
                self.under_way.shutdown().await;
                return Err(Error::Interrupted);
            }
            match landed {
                Err(_not_yet) => {}
                Ok(None) => return first_error.map_or(Ok(()), Err),
                Ok(Some(landed)) => {
                    if let Err(error) = self.land(landed, sent) {
                        // Parts under way are let go: what they send is asked for again or thrown away.
                        self.under_way.shutdown().await;
                        return Err(first_error.unwrap_or(error));
                    }
                }
            }
        }
    }

    fn start(&mut self, index: usize, bytes: Bytes) {
        let (client, backend, path) = (Arc::clone(self.client), Arc::clone(&self.backend), self.path.clone());
        let (id, pace) = (self.upload.id.clone(), Arc::clone(&self.pace));
        self.under_way.spawn(async move {
            let sent = send_part(&client, &backend, &path, &id, index, bytes, pace).await;
            (index, sent)
        });
    }

    /// Notes a part that has arrived.
    fn land(&mut self, landed: Landed, sent: &mut dyn FnMut(&Upload) -> Result<()>) -> Result<()> {
        let (index, answer) = self.client.arrived(self.key, landed)?;
        self.upload.parts[index] = Some(answer);
        // What is told may make requests of its own, as the renewal of a lease, and waits for their answers.
        tokio::task::block_in_place(|| sent(self.upload))
    }
}

/// Sends one part until it is answered.
pub(super) async fn send_part(
    client: &Client,
    backend: &Backend,
    path: &Path,
    id: &str,
    index: usize,
    bytes: Bytes,
    pace: Arc<Pace>,
) -> Outcome<String> {
    let id = id.to_owned();
    let mut attempts = client.attempts(backend);
    let answer = loop {
        let mode = Mode::Paced(bytes.clone(), Arc::clone(&pace));
        let payload = PutPayload::from(bytes.clone());
        match MODE.scope(mode, backend.parts.put_part(path, &id, index, payload)).await {
            Ok(answer) => break answer,
            Err(error) => attempts.after(&error).await?,
        }
    };
    if backend.is_memory {
        pace.count(bytes.len());
    }
    Ok(answer.content_id)
}

/// Reads a part into a buffer of its own.
fn read_part(source: &dyn ReadAt, upload: &Upload, index: usize) -> Result<Bytes> {
    let start = index as u64 * upload.part_bytes;
    let length_bytes = upload.part_bytes.min(upload.length_bytes - start);
    let mut lent = Lent(BUFFERS.take());
    lent.0.resize(length_bytes as usize, 0);
    source.read_at(start, &mut lent.0)?;
    Ok(Bytes::from_owner(lent))
}

/// Waits for a request, counts what it moves, and ends it when it is to end.
async fn watch<T>(request: impl Future<Output = T>, pace: &Pace, transfer: Transfer<'_>) -> Result<T> {
    let mut request = std::pin::pin!(request);
    loop {
        let answer = tokio::time::timeout(LOOK, request.as_mut()).await;
        transfer.moved_bytes.fetch_add(pace.take_moved_bytes(), Ordering::Relaxed);
        match answer {
            Ok(answer) => return Ok(answer),
            Err(_not_yet) if transfer.cancelled.load(Ordering::Relaxed) => return Err(Error::Interrupted),
            Err(_not_yet) => {}
        }
    }
}
