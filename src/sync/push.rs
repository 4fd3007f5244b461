//! The way to the bucket: what it lacks, packs before the manifest that names them.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::journal::{self, UploadNote};
use crate::format::limits;
use crate::format::model::PackRecord;
use crate::format::names;
use crate::inflight::Registry;
use crate::read::open_pack;
use crate::store::remote::{Transfer, Upload, Version};
use crate::store::{Folder, Key, PutMode, ReadAt};

use super::Diverged;
use super::clock::{least_time, wait};
use super::head::line_digest;
use super::lease::{Look, RACE_LIMIT};
use super::plan::{self, Local, Push, missing_packs};
use super::survey::{Identity, LocalManifest, pushed};
use super::tiered::TieredStore;
use super::view::{Row, View};

/// Times that a snapshot is looked at anew because its manifest was replaced meanwhile.
const ATTEMPT_LIMIT: usize = 4;

/// How a push is ended early.
#[derive(Clone, Copy)]
pub struct PushControl<'a> {
    /// Set to end it: it fails with [`Error::Interrupted`] soon.
    pub cancelled: &'a AtomicBool,
    /// True where something more urgent waits: it ends after the snapshot that is under way.
    pub is_outrun: &'a dyn Fn() -> bool,
}

/// What a push did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Objects that were sent.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Objects that were removed from the bucket.
    pub removed_objects: u64,
    /// It ended early, for something more urgent.
    pub is_outrun: bool,
}

/// How far the way to the bucket is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Objects that the bucket lacked when the push began that runs, or ran last, less those sent since.
    pub pending_objects: u64,
    /// Their bytes, packs and manifests.
    pub pending_bytes: u64,
    /// Objects sent by this handle.
    pub pushed_objects: u64,
    /// Their bytes.
    pub pushed_bytes: u64,
    /// Objects that this handle has removed from the bucket.
    pub removed_objects: u64,
}

impl TieredStore {
    /// Brings the bucket up to the folder: pushes what it lacks, newest snapshot first, then removes what was deleted
    /// here.
    ///
    /// # Errors
    /// [`Error::Conflict`] where another writer has the bucket, for good; [`Error::Locked`] where one holds it now;
    /// [`Error::Store`] where the bucket or the folder fails; [`Error::Corrupt`] where a snapshot of the folder is
    /// damaged, after all others were pushed; [`Error::Interrupted`] after a cancel.
    pub fn push(&self, control: PushControl<'_>) -> Result<Pushed> {
        let had_changed = self.has_changed.swap(false, Ordering::Relaxed);
        let pushed = self.push_all(control);
        if had_changed && pushed.as_ref().map_or(true, |done| done.is_outrun) {
            self.has_changed.store(true, Ordering::Relaxed);
        }
        pushed
    }

    fn push_all(&self, control: PushControl<'_>) -> Result<Pushed> {
        self.require_lease()?;
        // A writer that was paused hears of it here, even where there is nothing to push.
        self.lease.renew()?;
        self.settle(Diverged::Raise).map_err(|error| match error {
            // IMPORTANT: the branch of this run and that of the bucket can't be told apart by number any more.
            Error::Conflict { by, .. } => {
                self.lease.lose(Folder::Snapshots.name(), &by, self.lease.state().epoch)
            }
            error => error,
        })?;
        let mut run = Run { tiers: self, control, done: Pushed::default(), problem: None };
        let walked = run.walk();
        let Run { done, problem, .. } = run;
        let saved = self.notes.save_journal();
        walked.and(saved)?;
        problem.map_or(Ok(done), Err)
    }

    /// Asks the bucket whether this writer still has it.
    ///
    /// # Errors
    /// As [`TieredStore::push`].
    pub fn confirm_lease(&self) -> Result<()> {
        self.lease.renew()
    }

    /// Holds the lease, or says who does.
    ///
    /// # Errors
    /// As [`TieredStore::push`].
    fn require_lease(&self) -> Result<()> {
        self.lease.require_ours()?;
        for attempt in 1.. {
            if !self.lease.is_wanted() {
                break;
            }
            match self.lease.look()? {
                Look::Held => {}
                Look::Raced if attempt < RACE_LIMIT => {}
                Look::Raced | Look::Waiting(_) | Look::Alive(_) => {
                    let holder = self.lease.state().holder;
                    return Err(Error::Locked { root: self.remote.root(), holder });
                }
            }
        }
        if self.lease.is_held() {
            return Ok(());
        }
        Err(Error::invalid("push", "the repository was not opened for writing, or is closed"))
    }

    /// Notes that an object lies in the bucket.
    fn note_there(&self, key: &Key, length_bytes: u64, version: Version) {
        let row = Row { length_bytes, version, modified_unix_ms: 0 };
        if let Some(view) = &mut self.state().view {
            view.insert(key, row);
        }
    }
}

/// One push under way.
pub(super) struct Run<'a> {
    pub(super) tiers: &'a TieredStore,
    pub(super) control: PushControl<'a>,
    pub(super) done: Pushed,
    /// What is wrong with single snapshots of the folder: the others are pushed all the same.
    pub(super) problem: Option<Error>,
}

/// What becomes of the manifest of a snapshot whose packs lie in the bucket.
#[derive(Clone, Copy)]
enum Manifest<'a> {
    /// It lies there.
    Stays,
    /// It is published, in the place of this version if there is one.
    Goes(Option<&'a Version>),
}

/// What became of one snapshot.
enum Outcome {
    Pushed,
    /// It was deleted here meanwhile.
    Gone,
    /// Its packs were merged meanwhile: there is another manifest of it.
    Replaced,
    /// It can't be pushed as it lies here.
    Damaged(Error),
}

impl Run<'_> {
    fn walk(&mut self) -> Result<()> {
        let tiers = self.tiers;
        let local = tiers.survey()?;
        self.abort_uploads(&local)?;
        let (view, known) = (tiers.view(), tiers.notes.all_pushed());
        let lacking = self.lacking(&local, &view, &known)?;
        let pushes = plan::pushes(&local, &view, &known, &lacking);
        self.tell_pending(&local, &pushes);
        for push in &pushes {
            self.go_on()?;
            match push {
                Push::Marker => self.marker()?,
                Push::Tombstone(seq) => {
                    self.small(Folder::Snapshots, &names::tombstone_name(*seq), None)?;
                }
                Push::Tag(name) => self.small(Folder::Tags, name, Some(ChunkDigest::of))?,
                Push::Receipt(number) => {
                    self.small(Folder::Receipts, &names::receipt_name(*number), Some(ChunkDigest::of))?;
                }
                Push::Packs(seq) => self.snapshot(*seq, Manifest::Stays)?,
                Push::Snapshot { seq, replaces } => {
                    self.snapshot(*seq, Manifest::Goes(replaces.as_ref()))?;
                    if (self.control.is_outrun)() {
                        self.done.is_outrun = true;
                        return Ok(());
                    }
                }
            }
        }
        self.remove()?;
        self.sweep_packs()
    }

    pub(super) fn go_on(&self) -> Result<()> {
        if self.control.cancelled.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
    }

    /// Snapshots that lie in the bucket as they lie here, but for packs that it has lost.
    fn lacking(
        &self,
        local: &Local,
        view: &View,
        known: &BTreeMap<Key, journal::Pushed>,
    ) -> Result<BTreeSet<u64>> {
        let mut lacking = BTreeSet::new();
        for (&seq, &digest) in &local.manifests {
            let key = Key::new(Folder::Snapshots, &names::manifest_name(seq))?;
            // One that stands for another one there has other packs.
            let is_same = known.get(&key).is_some_and(|pushed| pushed.local_digest.is_none());
            if !is_same || !view.has(&key) {
                continue;
            }
            match self.tiers.local_table(seq, digest) {
                Ok(table) if missing_packs(&table, view).is_empty() => {}
                Ok(_) => _ = lacking.insert(seq),
                // It is gone by now, or can't be read: the bucket has a whole one.
                Err(error) if error.is_damage() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(lacking)
    }

    /// Says how much there is to do.
    fn tell_pending(&self, local: &Local, pushes: &[Push]) {
        let (mut objects, mut bytes, mut counted) = (0, 0, HashSet::new());
        for push in pushes {
            objects += u64::from(!matches!(push, Push::Packs(_)));
            let (Push::Snapshot { seq, .. } | Push::Packs(seq)) = push else { continue };
            let Some(digest) = local.manifests.get(seq) else { continue };
            // A damaged one is told of when its turn comes.
            let Ok(table) = self.tiers.local_table(*seq, *digest) else { continue };
            let state = self.tiers.state();
            let Some(view) = &state.view else { continue };
            for record in missing_packs(&table, view) {
                if counted.insert(record.name.clone()) {
                    objects += 1;
                    bytes += record.length_bytes;
                }
            }
        }
        let figures = &mut self.tiers.state().figures;
        (figures.pending_objects, figures.pending_bytes) = (objects, bytes);
    }

    /// Notes that one object was sent.
    fn tell_sent(&mut self, length_bytes: u64) {
        self.done.objects += 1;
        self.done.bytes += length_bytes;
        let figures = &mut self.tiers.state().figures;
        figures.pushed_objects += 1;
        figures.pushed_bytes += length_bytes;
        figures.pending_objects = figures.pending_objects.saturating_sub(1);
    }

    fn marker(&mut self) -> Result<()> {
        let tiers = self.tiers;
        let key = Key::new(Folder::Root, names::MARKER_NAME)?;
        let bytes = tiers.local.get(&key, limits::SMALL_OBJECT_LIMIT_BYTES)?;
        match tiers.remote.swap(&key, &bytes, None) {
            Ok(version) => {
                tiers.note_there(&key, bytes.len() as u64, version);
                self.tell_sent(bytes.len() as u64);
                Ok(())
            }
            // Ours, by a request whose answer was lost, or that of another repository.
            Err(Error::Conflict { .. }) => tiers.compare_with_marker(&key),
            Err(error) => Err(error),
        }
    }

    /// Puts a small object in the place of the version that is there. One that changed meanwhile is left to the next
    /// push, which compares it.
    fn small(&mut self, folder: Folder, name: &str, digest: Option<fn(&[u8]) -> ChunkDigest>) -> Result<()> {
        let tiers = self.tiers;
        let key = Key::new(folder, name)?;
        let bytes = match tiers.local.get(&key, limits::RECEIPT_LIMIT_BYTES) {
            Err(error) if error.is_not_found() => return Ok(()),
            got => got?,
        };
        let expected = tiers.version_there(&key);
        match tiers.remote.swap(&key, &bytes, expected.as_ref()) {
            Ok(version) => {
                if let Some(digest) = digest {
                    tiers.notes.note_pushed(key.clone(), pushed(&version, digest(&bytes)));
                }
                tiers.note_there(&key, bytes.len() as u64, version);
                self.tell_sent(bytes.len() as u64);
                Ok(())
            }
            Err(Error::Conflict { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn snapshot(&mut self, seq: u64, then: Manifest<'_>) -> Result<()> {
        for _ in 0..ATTEMPT_LIMIT {
            match self.try_snapshot(seq, then)? {
                Outcome::Pushed | Outcome::Gone => return Ok(()),
                Outcome::Replaced => {}
                Outcome::Damaged(error) => {
                    self.problem.get_or_insert(error);
                    return Ok(());
                }
            }
        }
        let object = format!("snapshots/{}", names::manifest_name(seq));
        let why = "its packs are merged faster than they are sent";
        let busy = std::io::Error::new(std::io::ErrorKind::ResourceBusy, why);
        self.problem.get_or_insert(Error::store("push", object)(busy));
        Ok(())
    }

    fn try_snapshot(&mut self, seq: u64, then: Manifest<'_>) -> Result<Outcome> {
        let tiers = self.tiers;
        let manifest = match tiers.local_manifest(seq) {
            Ok(manifest) => manifest,
            Err(error) if error.is_not_found() => return Ok(Outcome::Gone),
            Err(error) if error.is_damage() => return Ok(Outcome::Damaged(error)),
            Err(error) => return Err(error),
        };
        let names = manifest.packs.iter().map(|record| record.name.clone());
        let (_hold, gone) = Registry::of(&tiers.local.root()).hold(None, names);
        let missing: Vec<PackRecord> = {
            let state = tiers.state();
            let view = state.view.as_ref();
            view.map(|view| missing_packs(&manifest.packs, view).into_iter().cloned().collect())
                .unwrap_or_default()
        };
        // All are open before the first is sent: an open pack can be read after it was deleted.
        let mut sources = Vec::new();
        for record in &missing {
            let opened = if gone.contains(&record.name) {
                Err(not_there(&record.name))
            } else {
                open_pack(tiers.local.as_ref(), record).map(|(_, source)| source)
            };
            match opened {
                Ok(source) => sources.push(source),
                Err(error) if error.is_damage() => return self.without_pack(seq, manifest.digest, error),
                Err(error) => return Err(error),
            }
        }
        for (record, source) in missing.iter().zip(&sources) {
            self.go_on()?;
            self.pack(record, source.as_ref())?;
        }
        if let Manifest::Goes(replaces) = then {
            self.manifest(&manifest, replaces)?;
        }
        Ok(Outcome::Pushed)
    }

    /// What it means that a pack of a snapshot can't be read here.
    fn without_pack(&self, seq: u64, tried: ChunkDigest, error: Error) -> Result<Outcome> {
        match self.tiers.local_manifest(seq) {
            Ok(now) if now.digest == tried => Ok(Outcome::Damaged(error)),
            Ok(_) => Ok(Outcome::Replaced),
            Err(error) if error.is_not_found() => Ok(Outcome::Gone),
            Err(error) if error.is_damage() => Ok(Outcome::Damaged(error)),
            Err(error) => Err(error),
        }
    }

    /// Publishes a manifest whose packs all lie in the bucket.
    ///
    /// IMPORTANT: the lease is renewed right before. Whoever has lost it finds that out here.
    fn manifest(&mut self, manifest: &LocalManifest, replaces: Option<&Version>) -> Result<()> {
        let tiers = self.tiers;
        tiers.lease.renew()?;
        let LocalManifest { key, identity, digest, bytes, .. } = manifest;
        let (version, there) = match tiers.remote.swap(key, bytes, replaces) {
            Ok(version) => (version, *digest),
            Err(Error::Conflict { .. }) => {
                let (there, version) = tiers.remote.get_versioned(key, limits::MANIFEST_LIMIT_BYTES)?;
                let other = Identity::of(key, &there);
                if !other.as_ref().is_ok_and(|other| identity.is_same(other)) {
                    let by = other.map_or_else(
                        |_| "a writer whose manifest can't be read".to_owned(),
                        |other| format!("session {} at step {}", other.session_id, other.step),
                    );
                    return Err(tiers.lease.lose_snapshot(&key.to_string(), &by));
                }
                (version, line_digest(&there))
            }
            Err(error) => return Err(error),
        };
        let local_digest = (there != *digest).then_some(*digest);
        let noted = journal::Pushed { version: version.0.clone(), digest: there, local_digest };
        tiers.notes.note_pushed(key.clone(), noted);
        tiers.note_there(key, bytes.len() as u64, version);
        self.tell_sent(bytes.len() as u64);
        tiers.notes.save_journal()
    }

    fn pack(&mut self, record: &PackRecord, source: &dyn ReadAt) -> Result<()> {
        let tiers = self.tiers;
        let key = Key::new(Folder::Packs, &record.name)?;
        let is_small = record.length_bytes <= tiers.remote.single_put_limit_bytes();
        if is_small && !tiers.notes.uploads().contains_key(&record.name) {
            let mut bytes = vec![0; record.length_bytes as usize];
            source.read_at(0, &mut bytes)?;
            match tiers.remote.put(&key, &bytes, PutMode::IfAbsent) {
                // Packs have names of their own: it was sent by a request whose answer was lost.
                Err(Error::Conflict { .. }) => self.compare_length(&key, record.length_bytes)?,
                put => put?,
            }
            tiers.moved_bytes.fetch_add(record.length_bytes, Ordering::Relaxed);
            self.slow_down(record.length_bytes)?;
        } else {
            self.upload(&key, record, source)?;
        }
        tiers.note_there(&key, record.length_bytes, Version(String::new()));
        {
            let figures = &mut tiers.state().figures;
            figures.pending_bytes = figures.pending_bytes.saturating_sub(record.length_bytes);
        }
        self.tell_sent(record.length_bytes);
        Ok(())
    }

    fn compare_length(&self, key: &Key, length_bytes: u64) -> Result<()> {
        let found = self.tiers.remote.open(key)?.length_bytes();
        if found == length_bytes {
            return Ok(());
        }
        Err(Error::corrupt(format!("{}/{key}", self.tiers.remote.root()), 0, "length", length_bytes, found))
    }

    /// Waits so long that these bytes keep to the limit.
    fn slow_down(&self, length_bytes: u64) -> Result<()> {
        let Some(limit) = self.tiers.options.limit_bytes_per_second else { return Ok(()) };
        wait(self.tiers.clock.as_ref(), least_time(length_bytes, limit), self.control.cancelled)
    }

    /// Sends a large pack in parts, and goes on with those that are missing where it was begun before.
    fn upload(&mut self, key: &Key, record: &PackRecord, source: &dyn ReadAt) -> Result<()> {
        let known = self.tiers.notes.uploads().remove(&record.name);
        let known = known.filter(|note| note.length_bytes == record.length_bytes);
        let was_known = known.is_some();
        let note = known.map_or_else(|| self.begin(key, record), Ok)?;
        match self.send(key, &note, source) {
            // The bucket has forgotten it.
            Err(error) if error.is_not_found() && was_known => {
                let note = self.begin(key, record)?;
                self.send(key, &note, source)
            }
            sent => sent,
        }
    }

    fn begin(&self, key: &Key, record: &PackRecord) -> Result<UploadNote> {
        let tiers = self.tiers;
        let upload = tiers.remote.begin_upload(key, record.length_bytes)?;
        let note = UploadNote {
            remote: tiers.notes.remote().to_owned(),
            pack: record.name.clone(),
            length_bytes: record.length_bytes,
            id: upload.id,
            part_bytes: upload.part_bytes,
            parts: upload.parts,
        };
        tiers.notes.note_upload(&note)?;
        // For whoever takes the bucket over, should this machine not come back.
        let there = UploadNote { parts: Vec::new(), ..note.clone() };
        let there_key = Key::new(Folder::Uploads, &names::upload_name(&record.name))?;
        tiers.remote.put(&there_key, &there.encode()?, PutMode::Replace)?;
        Ok(note)
    }

    fn send(&self, key: &Key, note: &UploadNote, source: &dyn ReadAt) -> Result<()> {
        let tiers = self.tiers;
        let mut upload = upload_of(note);
        let transfer = Transfer {
            cancelled: self.control.cancelled,
            moved_bytes: &tiers.moved_bytes,
            limit_bytes_per_second: tiers.options.limit_bytes_per_second,
        };
        let mut sent = |upload: &Upload| {
            tiers.notes.note_upload(&UploadNote { parts: upload.parts.clone(), ..note.clone() })?;
            match tiers.lease.renew_if_due() {
                // Whether it is still ours is asked again before the manifest.
                Err(Error::Store { .. }) => Ok(()),
                renewed => renewed,
            }
        };
        tiers.remote.send_parts(key, source, &mut upload, transfer, &mut sent)?;
        tiers.remote.complete_upload(key, &upload)?;
        self.forget_upload(&note.pack)
    }

    /// Forgets an upload that is done or was aborted: first in the bucket, so that it is found again after a crash.
    pub(super) fn forget_upload(&self, pack: &str) -> Result<()> {
        self.tiers.remote.delete(Folder::Uploads, &[names::upload_name(pack)])?;
        self.tiers.notes.forget_upload(pack)
    }
}

/// The upload that a note is of.
pub(super) fn upload_of(note: &UploadNote) -> Upload {
    Upload {
        id: note.id.clone(),
        length_bytes: note.length_bytes,
        part_bytes: note.part_bytes,
        parts: note.parts.clone(),
    }
}

fn not_there(pack: &str) -> Error {
    Error::store("open", format!("packs/{pack}"))(std::io::ErrorKind::NotFound.into())
}
