//! A large object that is written piece by piece straight into a bucket, for tools: a repository stages in its
//! local folder.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use object_store::PutMode as Put;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::super::remote::Upload;
use super::super::{Key, Published, StagedWrite};
use super::attempt::{finish, runtime};
use super::client::{Client, Outcome};
use super::http::Pace;
use super::upload::send_part;
use crate::error::{Error, Result};

/// A staged write. It holds one part, and up to `parallel` that are under way.
pub(super) struct BucketStagedWrite {
    client: Arc<Client>,
    key: Key,
    position_bytes: u64,
    /// What was appended since the last part was sent.
    rest: Vec<u8>,
    /// The upload, once there is more than a part.
    upload: Option<Upload>,
    under_way: JoinSet<(usize, Outcome<String>)>,
    first_error: Option<String>,
}

impl BucketStagedWrite {
    pub(super) fn new(client: &Arc<Client>, key: &Key) -> Self {
        Self {
            client: Arc::clone(client),
            key: key.clone(),
            position_bytes: 0,
            rest: Vec::new(),
            upload: None,
            under_way: JoinSet::new(),
            first_error: None,
        }
    }

    fn part_bytes(&self) -> usize {
        self.client.settings.part_bytes as usize
    }

    /// Sends what lies in `rest` as the next part.
    fn send_rest(&mut self) -> Result<()> {
        let backend = self.client.backend()?;
        let path = self.client.key_path(&self.key)?;
        if self.upload.is_none() {
            let part_bytes = self.client.settings.part_bytes;
            let id = self.client.begin_parts(&self.key)?;
            self.upload = Some(Upload { id, length_bytes: 0, part_bytes, parts: Vec::new() });
        }
        while self.under_way.len() >= self.client.settings.parallel {
            self.land()?;
        }
        let Some(upload) = &mut self.upload else { return Ok(()) };
        let (index, id) = (upload.parts.len(), upload.id.clone());
        upload.parts.push(None);
        let bytes = Bytes::from(std::mem::take(&mut self.rest));
        let client = Arc::clone(&self.client);
        let send = async move {
            let pace = Arc::new(Pace::new(None));
            (index, send_part(&client, &backend, &path, &id, index, bytes, pace).await)
        };
        self.under_way.spawn_on(send, runtime()?.handle());
        Ok(())
    }

    /// Waits for one part.
    fn land(&mut self) -> Result<()> {
        let Some(landed) = finish(self.under_way.join_next())? else { return Ok(()) };
        let (index, answer) = self.client.arrived(&self.key, landed)?;
        if let Some(upload) = &mut self.upload {
            upload.parts[index] = Some(answer);
        }
        Ok(())
    }

    fn append_parts(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            if self.rest.len() == self.part_bytes() {
                self.send_rest()?;
            }
            let (now, later) = bytes.split_at(bytes.len().min(self.part_bytes() - self.rest.len()));
            self.rest.extend_from_slice(now);
            self.position_bytes += now.len() as u64;
            bytes = later;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        if self.upload.is_none() {
            return self.client.put(&self.key, &self.rest, &Put::Create).map(|_version| ());
        }
        self.send_rest()?;
        while !self.under_way.is_empty() {
            self.land()?;
        }
        if self.client.head("publish", &self.key)?.is_some() {
            return self.client.conflict(&self.key, &Put::Create).and_then(Err);
        }
        let Some(mut upload) = self.upload.take() else { return Ok(()) };
        upload.length_bytes = self.position_bytes;
        let completed = self.client.complete_upload(&self.key, &upload);
        if completed.is_err() {
            self.upload = Some(upload);
        }
        completed.map(|_version| ())
    }
}

impl StagedWrite for BucketStagedWrite {
    fn position_bytes(&self) -> u64 {
        self.position_bytes
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        if let Some(first) = &self.first_error {
            return Err(Error::Poisoned { first: first.clone() });
        }
        let appended = self.append_parts(bytes);
        self.first_error = appended.as_ref().err().map(Error::chain);
        appended
    }

    fn publish(mut self: Box<Self>) -> Result<Published> {
        if let Some(first) = self.first_error.take() {
            return Err(Error::Poisoned { first });
        }
        let start = Instant::now();
        self.finish()?;
        let sync_seconds = start.elapsed().as_secs_f64();
        Ok(Published { length_bytes: self.position_bytes, drain_seconds: 0.0, sync_seconds })
    }
}

impl Drop for BucketStagedWrite {
    fn drop(&mut self) {
        let Some(upload) = self.upload.take() else { return };
        if let Ok(runtime) = runtime() {
            runtime.block_on(self.under_way.shutdown());
        }
        // Where this fails the server keeps the parts until a rule of the bucket removes them.
        let _tried = self.client.abort_upload(&self.key, &upload.id);
    }
}

impl fmt::Debug for BucketStagedWrite {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.client.name(&self.key);
        write!(formatter, "BucketStagedWrite({name}, {} bytes)", self.position_bytes)
    }
}
