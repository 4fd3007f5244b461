//! The way from a bucket into a folder: snapshots that are whole and verified, or nothing of them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::crypt::MasterKey;
use crate::encrypted;
use crate::error::{Error, Result};
use crate::format::encrypted::{is_encrypted, length_bytes};
use crate::format::marker::Marker;
use crate::format::model::{Manifest, PackRecord};
use crate::format::{limits, manifest, names};
use crate::inflight::Registry;
use crate::store::remote::{RemoteStore, Transfer};
use crate::store::{Folder, Key, PutMode, Store};
use crate::threads::{Threads, for_each_waiting};
use crate::verify;

use super::clock::{SystemClock, least_time, wait};
use super::survey::Identity;

/// Bytes of one read. Memory is this much for each pack under way.
const BLOCK_BYTES: u64 = 8 << 20;
/// Reads that the bucket is told of before they are asked for.
const AHEAD_COUNT: u64 = 8;
/// Packs at once.
const THREAD_COUNT: usize = 4;

/// What a pull did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PullReport {
    /// Snapshots that lie in the folder now and did not before, newest first.
    pub pulled: Vec<u64>,
    /// Snapshots that lay there already.
    pub known: Vec<u64>,
    /// Packs and manifests that were fetched.
    pub pulled_objects: u64,
    /// Their bytes.
    pub pulled_bytes: u64,
}

/// Fetches snapshots into a folder, newest first: the packs that are missing, then, once every chunk was verified, the
/// manifest. The folder is empty or of the same repository, and the caller holds its lock where others may write there.
///
/// # Errors
/// [`Error::SnapshotNotFound`] where the bucket has none of a number; [`Error::NotARepository`] where folder and bucket
/// are of two repositories; [`Error::Key`] where they are encrypted and this is not their key; [`Error::Corrupt`] where what was fetched is not what the manifest says; [`Error::Store`];
/// [`Error::Interrupted`] after a cancel. Snapshots that were pulled before stay.
pub fn pull(
    remote: &dyn RemoteStore,
    local: &Arc<dyn Store>,
    seqs: &[u64],
    master: Option<&MasterKey>,
    transfer: Transfer<'_>,
) -> Result<PullReport> {
    local.create_folders()?;
    let threads = Threads::new(std::thread::available_parallelism().map_or(1, Into::into));
    let marker = take_marker(remote, local.as_ref())?;
    let seen = encrypted::open(Arc::clone(local), &marker, master)?;
    let is_encrypted = marker.key_check.is_some();
    let pull =
        Pull { remote, local, seen, is_encrypted, master, transfer, threads, id: marker.repository_id };
    let mut report = PullReport::default();
    let seqs: BTreeSet<u64> = seqs.iter().copied().collect();
    for seq in seqs.into_iter().rev() {
        pull.go_on()?;
        pull.snapshot(seq, &mut report)?;
    }
    Ok(report)
}

/// The marker that folder and bucket have in common; an empty folder gets that of the bucket.
fn take_marker(remote: &dyn RemoteStore, local: &dyn Store) -> Result<Marker> {
    let key = Key::new(Folder::Root, names::MARKER_NAME)?;
    let bytes = remote.get(&key, limits::SMALL_OBJECT_LIMIT_BYTES).map_err(|error| {
        if !error.is_not_found() {
            return error;
        }
        let reason = format!("there is no `{}`", names::MARKER_NAME);
        Error::NotARepository { root: remote.root(), reason }
    })?;
    let there = Marker::decode(&bytes)?;
    match local.get(&key, limits::SMALL_OBJECT_LIMIT_BYTES).and_then(|bytes| Marker::decode(&bytes)) {
        Ok(here) if here.repository_id == there.repository_id => Ok(there),
        Ok(here) => {
            let reason =
                format!("it holds repository {}, and the bucket {}", here.repository_id, there.repository_id);
            Err(Error::NotARepository { root: local.root(), reason })
        }
        Err(error) if error.is_not_found() => {
            let others = local.list(Folder::Root)?;
            if let Some(other) = others.first() {
                let reason = format!("the folder holds other files: {}", other.name);
                return Err(Error::NotARepository { root: local.root(), reason });
            }
            local.put(&key, &bytes, PutMode::IfAbsent)?;
            Ok(there)
        }
        Err(error) => Err(error),
    }
}

struct Pull<'a> {
    remote: &'a dyn RemoteStore,
    local: &'a Arc<dyn Store>,
    /// The folder as the key shows it.
    seen: Arc<dyn Store>,
    is_encrypted: bool,
    master: Option<&'a MasterKey>,
    transfer: Transfer<'a>,
    threads: Threads,
    id: String,
}

impl Pull<'_> {
    fn go_on(&self) -> Result<()> {
        if self.transfer.cancelled.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    fn snapshot(&self, seq: u64, report: &mut PullReport) -> Result<()> {
        let key = Key::new(Folder::Snapshots, &names::manifest_name(seq))?;
        let not_found = || Error::SnapshotNotFound {
            reference: format!("seq:{seq}"),
            root: self.remote.root(),
            reason: "it is not there, or no more".to_owned(),
        };
        let got = self.remote.get(&key, limits::MANIFEST_LIMIT_BYTES);
        let bytes = got.map_err(|error| if error.is_not_found() { not_found() } else { error })?;
        let manifest = encrypted::decode_manifest(self.remote, &key, &bytes, self.master)?;
        if self.is_encrypted != is_encrypted(&bytes) {
            let expected = if self.is_encrypted { "an encrypted manifest" } else { "one in the clear" };
            return Err(Error::corrupt(key.to_string(), 0, "magic", expected, "the other"));
        }
        if manifest.header.seq != seq {
            return Err(Error::corrupt(key.to_string(), 0, "seq", seq, manifest.header.seq));
        }
        if manifest.header.repository_id != self.id {
            let found = &manifest.header.repository_id;
            return Err(Error::corrupt(key.to_string(), 0, "repository_id", &self.id, found));
        }
        if self.is_known(&key, &manifest)? {
            report.known.push(seq);
            return Ok(());
        }
        let names = manifest.body.packs.iter().map(|record| record.name.clone());
        let (_hold, gone) = Registry::of(&self.local.root()).hold(Some(seq), names);
        let fetched = self.packs(&manifest, &gone.into_iter().collect())?;
        if let Err(error) = self.verify(&manifest) {
            // IMPORTANT: what is not right must not be found by anyone, nor be taken for what was fetched by the next pull;
            // this one may have found what a pull has left that ended midway.
            self.local.delete(Folder::Packs, &self.unnamed(&manifest)?)?;
            return Err(error);
        }
        self.local.put(&key, &bytes, PutMode::IfAbsent)?;
        let lengths = manifest.body.packs.iter().filter(|record| fetched.contains(&record.name));
        report.pulled_bytes += lengths.map(|record| record.length_bytes).sum::<u64>() + bytes.len() as u64;
        report.pulled_objects += fetched.len() as u64 + 1;
        report.pulled.push(seq);
        Ok(())
    }

    /// Names of the packs of a snapshot that no manifest of the folder names.
    fn unnamed(&self, manifest: &Manifest) -> Result<Vec<String>> {
        let mut named = BTreeSet::new();
        for row in self.local.list(Folder::Snapshots)? {
            if names::parse_manifest_name(&row.name).is_some() {
                let key = Key::new(Folder::Snapshots, &row.name)?;
                let bytes = self.seen.get(&key, limits::MANIFEST_LIMIT_BYTES)?;
                let packs = manifest::decode(&key.to_string(), &bytes)?.body.packs;
                named.extend(packs.into_iter().map(|record| record.name));
            }
        }
        let packs = manifest.body.packs.iter().map(|record| record.name.clone());
        Ok(packs.filter(|name| !named.contains(name)).collect())
    }

    /// True where the folder has the snapshot.
    fn is_known(&self, key: &Key, manifest: &Manifest) -> Result<bool> {
        let here = match self.seen.get(key, limits::MANIFEST_LIMIT_BYTES) {
            Ok(bytes) => manifest::decode(&key.to_string(), &bytes)?,
            Err(error) if error.is_not_found() => return Ok(false),
            Err(error) => return Err(error),
        };
        if Identity::from(&here.header).is_same(&Identity::from(&manifest.header)) {
            return Ok(true);
        }
        let by = format!("session {} at step {}", here.header.session_id, here.header.step);
        Err(Error::Conflict { object: format!("{}/{key}", self.local.root()), by })
    }

    /// Fetches the packs that are missing, several at once; returns their names.
    fn packs(&self, manifest: &Manifest, gone: &BTreeSet<String>) -> Result<Vec<String>> {
        let mut missing = Vec::new();
        for record in &manifest.body.packs {
            if gone.contains(&record.name) {
                let name = format!("{}/packs/{}", self.local.root(), record.name);
                return Err(Error::store("fetch", name)(std::io::ErrorKind::ResourceBusy.into()));
            }
            match self.local.open(&Key::new(Folder::Packs, &record.name)?) {
                Ok(_) => {}
                Err(error) if error.is_not_found() => missing.push(record),
                Err(error) => return Err(error),
            }
        }
        for_each_waiting(&missing, THREAD_COUNT, |record| self.pack(record))?;
        Ok(missing.iter().map(|record| record.name.clone()).collect())
    }

    fn pack(&self, record: &PackRecord) -> Result<()> {
        let key = Key::new(Folder::Packs, &record.name)?;
        let object = self.remote.open(&key)?;
        if object.length_bytes() != record.length_bytes {
            let name = format!("{}/{key}", self.remote.root());
            return Err(Error::corrupt(name, 0, "length", record.length_bytes, object.length_bytes()));
        }
        let mut staged = self.local.stage(&key)?;
        let mut buffer = Vec::new();
        let (started, mut offset) = (Instant::now(), 0);
        let range = |index: u64| {
            let start = (index * BLOCK_BYTES).min(record.length_bytes);
            start..(start + BLOCK_BYTES).min(record.length_bytes)
        };
        let mut told = 0;
        while offset < record.length_bytes {
            self.go_on()?;
            let index = offset / BLOCK_BYTES;
            while told < index + AHEAD_COUNT && !range(told).is_empty() {
                object.will_read(range(told));
                told += 1;
            }
            let length = BLOCK_BYTES.min(record.length_bytes - offset);
            object.read_into(offset, length as usize, &mut buffer)?;
            staged.append(&buffer[..length as usize])?;
            offset += length;
            self.transfer.moved_bytes.fetch_add(length, Ordering::Relaxed);
            self.slow_down(started, offset)?;
        }
        staged.publish().map(drop)
    }

    /// Waits so long that what was read since then keeps to the limit.
    fn slow_down(&self, started: Instant, length_bytes: u64) -> Result<()> {
        let Some(limit) = self.transfer.limit_bytes_per_second else { return Ok(()) };
        // Packs at once share it.
        let least = least_time(length_bytes.saturating_mul(THREAD_COUNT as u64), limit);
        let left = least.saturating_sub(started.elapsed());
        wait(&SystemClock::default(), left, self.transfer.cancelled)
    }

    /// Reads everything of the snapshot back and compares it with its digests.
    fn verify(&self, manifest: &Manifest) -> Result<()> {
        let mut report = verify::Report::default();
        let mut manifest = manifest.clone();
        if self.is_encrypted {
            for record in &mut manifest.body.packs {
                // What is read through the key is shorter than what lies there.
                record.length_bytes = length_bytes(record.length_bytes).unwrap_or(0);
            }
        }
        let (manifests, cancelled) = (std::slice::from_ref(&manifest), self.transfer.cancelled);
        verify::verify(self.seen.as_ref(), &self.threads, manifests, 1.0, cancelled, &mut report)?;
        report.findings.into_iter().next().map_or(Ok(()), |finding| {
            let expected = format!("what snapshot {} says", manifest.header.seq);
            Err(Error::corrupt(finding.object, finding.offset_bytes, "fetched pack", expected, finding.what))
        })
    }
}
