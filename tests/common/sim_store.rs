//! A simulated disk for crash tests: a [`Store`] in which any single step can fail, and the power can.
//!
//! The store keeps two images. The *live* one is what the running process sees. The *durable* one is
//! what a power loss leaves: it takes in a file's bytes at a file sync, and the names of a folder at a
//! folder sync, never before. Every verb is a sequence of numbered steps, counted from 1:
//!
//! | verb | steps |
//! |---|---|
//! | `create_folders` | make folders |
//! | `StagedWrite::append` | write |
//! | `StagedWrite::publish` | sync file, link, sync folder |
//! | `put` | write, sync file, link or replace, sync folder |
//! | `sync_folder` | sync folder |
//! | `delete` | unlink (one for each object that is there), sync folder |
//! | `sweep_staged` | unlink staged (one for each) |
//!
//! Reading, listing, `stage` and `lock` are no steps. A [`Plan`] says what happens at which step. The
//! intended use runs a deterministic piece of work once for every n until the fault no longer fires:
//!
//! ```ignore
//! for step in 1.. {
//!     let disk = prepared.after_power_loss(false);      // a copy of a prepared, wholly durable disk
//!     disk.arm(Plan { at_step: step, mode: Mode::Crash });
//!     let outcome = work(&disk);
//!     if !disk.fired() {
//!         break;                                        // the work has fewer steps than that
//!     }
//!     for keep_unsynced in [false, true] {
//!         let reopened = disk.after_power_loss(keep_unsynced);
//!         // check `reopened`, and what `outcome` promised; name `disk.log()` in every message
//!     }
//! }
//! ```
//!
//! Real file systems may keep any subset of what was not synced; the two images are the two ends.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use varvite::error::{Error, Result};
use varvite::store::{Folder, Key, Listed, Published, PutMode, ReadAt, StagedWrite, Store, WriterLock};

/// `EIO`, what every simulated failure reports.
pub(crate) const EIO: i32 = 5;

/// Start of the root of every simulated disk; a number follows.
const ROOT: &str = "sim:";

/// Which step goes wrong, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The step, counted from 1 since the plan was armed.
    pub(crate) at_step: u64,
    /// What happens there.
    pub(crate) mode: Mode,
}

/// How a step goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The step is not executed and returns `EIO`; all later ones work.
    FailOnce,
    /// This step and all later ones are not executed and return `EIO`; reading still works.
    FailForever,
    /// This step and all later ones succeed, but nothing becomes durable any more.
    Freeze,
    /// A write step leaves half of its bytes, on the medium too, then the process is dead as after
    /// [`Mode::Crash`]. A step of another kind is not executed.
    Tear,
    /// The process is dead: this step is not executed, every later call fails, reading included.
    Crash,
}

impl Mode {
    /// Every mode, to loop over.
    pub(crate) const ALL: [Self; 5] =
        [Self::FailOnce, Self::FailForever, Self::Freeze, Self::Tear, Self::Crash];
}

/// A promise that the store breaks: a harness that does not notice is worth nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// Syncs of folders confirm and do nothing.
    FolderSyncDoesNothing,
    /// Syncs of files confirm and do nothing.
    FileSyncDoesNothing,
    /// Staged files of dead processes are left lying.
    StagedStay,
}

/// The simulated disk. Clones are handles of the same disk.
#[derive(Clone, Default)]
pub(crate) struct SimStore {
    disk: Arc<Mutex<Disk>>,
}

type FileId = u64;

struct Disk {
    /// Unlike that of any other disk, as the roots of two folders are.
    root: String,
    flaw: Option<Flaw>,
    live: Image,
    durable: Image,
    next_file: FileId,
    holder: Option<String>,
    plan: Option<Plan>,
    steps: u64,
    log: Vec<String>,
}

impl Default for Disk {
    fn default() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        Self {
            root: format!("{ROOT}{}", COUNT.fetch_add(1, Ordering::Relaxed)),
            flaw: None,
            live: Image::default(),
            durable: Image::default(),
            next_file: 0,
            holder: None,
            plan: None,
            steps: 0,
            log: Vec::new(),
        }
    }
}

#[derive(Clone, Default)]
struct Image {
    objects: BTreeMap<Key, FileId>,
    staged: BTreeSet<FileId>,
    contents: BTreeMap<FileId, Arc<Vec<u8>>>,
}

/// What becomes of the step that has just begun.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Works,
    WorksInMemoryOnly,
    Tears,
    Fails,
}

impl SimStore {
    /// An empty disk without faults.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Breaks a promise from now on, also after a power loss.
    pub(crate) fn break_promise(&self, flaw: Flaw) {
        self.disk().flaw = Some(flaw);
    }

    /// Arms a plan; steps count from here, and the log starts anew.
    pub(crate) fn arm(&self, plan: Plan) {
        let mut disk = self.disk();
        disk.plan = Some(plan);
        disk.steps = 0;
        disk.log.clear();
    }

    /// Steps begun since the start, or since the plan was armed; failed ones count.
    pub(crate) fn steps_taken(&self) -> u64 {
        self.disk().steps
    }

    /// True once the planned step was reached. A test whose fault never fired has tested nothing.
    pub(crate) fn fired(&self) -> bool {
        let disk = self.disk();
        disk.plan.is_some_and(|plan| disk.steps >= plan.at_step)
    }

    /// The mode in force since the planned step.
    pub(crate) fn fired_mode(&self) -> Option<Mode> {
        self.disk().present_mode()
    }

    /// Names of the steps begun, for messages: `3: sync file packs/a`.
    pub(crate) fn log(&self) -> Vec<String> {
        self.disk().log.clone()
    }

    /// The disk as a new process finds it after a power loss, without plan and locks; with `keep_unsynced`
    /// what was not synced had reached the medium by itself.
    pub(crate) fn after_power_loss(&self, keep_unsynced: bool) -> Self {
        let disk = self.disk();
        let image = if keep_unsynced { disk.live.clone() } else { disk.durable.clone() };
        let next = Disk {
            flaw: disk.flaw,
            live: image.clone(),
            durable: image,
            next_file: disk.next_file,
            ..Disk::default()
        };
        Self { disk: Arc::new(Mutex::new(next)) }
    }

    /// The disk as the next process finds it after the mere death of the old one: what was not synced is
    /// there, and is lost by the next loss of power.
    pub(crate) fn after_kill(&self) -> Self {
        let disk = self.disk();
        let next = Disk {
            flaw: disk.flaw,
            live: disk.live.clone(),
            durable: disk.durable.clone(),
            next_file: disk.next_file,
            ..Disk::default()
        };
        Self { disk: Arc::new(Mutex::new(next)) }
    }

    /// Lengths in bytes of the files in `tmp/`, which no verb of a store shows.
    pub(crate) fn staged_lengths(&self) -> Vec<u64> {
        let disk = self.disk();
        disk.live.staged.iter().map(|file| disk.live.length_bytes(*file)).collect()
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn delete_one(&self, key: &Key) -> Result<u64> {
        let mut disk = self.disk();
        let Some(file) = disk.live.objects.get(key).copied() else { return Ok(0) };
        let name = disk.name_of(key);
        disk.step("unlink", name)?;
        disk.live.objects.remove(key);
        Ok(disk.live.length_bytes(file))
    }

    fn publish(&self, file: FileId, key: &Key, mode: PutMode) -> Result<()> {
        let outcome = self.try_publish(file, key, mode);
        if outcome.is_err() {
            self.disk().discard(file);
        }
        outcome
    }

    /// The lock is let go between the steps, so that racing writers interleave.
    fn try_publish(&self, file: FileId, key: &Key, mode: PutMode) -> Result<()> {
        self.disk().sync_file(file, key)?;
        self.disk().link(file, key, mode)?;
        self.disk().sync_folder(key.folder())
    }
}

impl Disk {
    /// The full name of an object, for errors.
    fn name_of(&self, key: &Key) -> String {
        format!("{}/{key}", self.root)
    }

    /// Begins a step that can't tear.
    ///
    /// Returns true where its effect may become durable.
    fn step(&mut self, name: &'static str, object: String) -> Result<bool> {
        match self.begin(name, &object) {
            Fate::Works => Ok(true),
            Fate::WorksInMemoryOnly => Ok(false),
            Fate::Tears | Fate::Fails => Err(io_error(name, object)),
        }
    }

    fn begin(&mut self, name: &'static str, object: &str) -> Fate {
        self.steps += 1;
        // Without the number of the disk, so that two runs have equal logs.
        self.log.push(format!("{}: {name} {}", self.steps, object.replacen(&self.root, ROOT, 1)));
        let Some(plan) = self.plan.filter(|plan| self.steps >= plan.at_step) else { return Fate::Works };
        let first = self.steps == plan.at_step;
        match plan.mode {
            Mode::FailOnce if !first => Fate::Works,
            Mode::Freeze => Fate::WorksInMemoryOnly,
            Mode::Tear if first => Fate::Tears,
            Mode::FailOnce | Mode::FailForever | Mode::Tear | Mode::Crash => Fate::Fails,
        }
    }

    /// The mode that is in force since the planned step.
    fn present_mode(&self) -> Option<Mode> {
        self.plan.filter(|plan| self.steps >= plan.at_step).map(|plan| plan.mode)
    }

    fn refuse_if_dead(&self, operation: &'static str, object: &str) -> Result<()> {
        match self.present_mode() {
            Some(Mode::Tear | Mode::Crash) => Err(io_error(operation, object.to_owned())),
            _ => Ok(()),
        }
    }

    fn create_staged(&mut self) -> FileId {
        let file = self.next_file;
        self.next_file += 1;
        self.live.staged.insert(file);
        self.live.contents.insert(file, Arc::default());
        file
    }

    fn write(&mut self, file: FileId, key: &Key, bytes: &[u8]) -> Result<()> {
        let object = self.name_of(key);
        match self.begin("write", &object) {
            Fate::Works | Fate::WorksInMemoryOnly => {
                self.live.append(file, bytes);
                Ok(())
            }
            Fate::Tears => {
                self.live.append(file, &bytes[..bytes.len() / 2]);
                self.persist_file(file);
                Err(io_error("write", object))
            }
            Fate::Fails => Err(io_error("write", object)),
        }
    }

    fn sync_file(&mut self, file: FileId, key: &Key) -> Result<()> {
        if self.step("sync file", self.name_of(key))? && self.flaw != Some(Flaw::FileSyncDoesNothing) {
            self.persist_file(file);
        }
        Ok(())
    }

    /// Copies a file's bytes to the medium, and its name in `tmp/`, as file systems with a journal do.
    fn persist_file(&mut self, file: FileId) {
        self.durable.contents.insert(file, self.live.bytes(file));
        self.durable.staged.insert(file);
    }

    fn link(&mut self, file: FileId, key: &Key, mode: PutMode) -> Result<()> {
        let name = if mode == PutMode::Replace { "replace" } else { "link" };
        self.step(name, self.name_of(key))?;
        if let (PutMode::IfAbsent, Some(present)) = (mode, self.live.objects.get(key)) {
            let by = format!("{} bytes lie there", self.live.length_bytes(*present));
            return Err(Error::Conflict { object: self.name_of(key), by });
        }
        self.live.staged.remove(&file);
        self.live.objects.insert(key.clone(), file);
        Ok(())
    }

    fn sync_folder(&mut self, folder: Folder) -> Result<()> {
        let reaches_the_medium = self.step("sync folder", format!("{}/{}", self.root, folder.name()))?;
        if !reaches_the_medium || self.flaw == Some(Flaw::FolderSyncDoesNothing) {
            return Ok(());
        }
        self.durable.objects.retain(|key, _| key.folder() != folder);
        for (key, file) in self.live.objects.iter().filter(|(key, _)| key.folder() == folder) {
            self.durable.objects.insert(key.clone(), *file);
            // A name that is durable before its bytes is an empty file.
            self.durable.contents.entry(*file).or_default();
        }
        // The same commit of the journal makes durable what has left `tmp/`.
        self.durable.staged.retain(|file| self.live.staged.contains(file));
        Ok(())
    }

    /// Removes a staged file whose writer gave up; a dead process or disk can't.
    fn discard(&mut self, file: FileId) {
        if !matches!(self.present_mode(), Some(Mode::FailForever | Mode::Tear | Mode::Crash)) {
            self.live.staged.remove(&file);
        }
    }
}

impl Image {
    fn append(&mut self, file: FileId, bytes: &[u8]) {
        Arc::make_mut(self.contents.entry(file).or_default()).extend_from_slice(bytes);
    }

    fn bytes(&self, file: FileId) -> Arc<Vec<u8>> {
        self.contents.get(&file).cloned().unwrap_or_default()
    }

    fn length_bytes(&self, file: FileId) -> u64 {
        self.contents.get(&file).map_or(0, |bytes| bytes.len() as u64)
    }
}

impl Store for SimStore {
    fn root(&self) -> String {
        self.disk().root.clone()
    }

    fn create_folders(&self) -> Result<()> {
        let mut disk = self.disk();
        let root = disk.root.clone();
        disk.step("make folders", root).map(|_durable| ())
    }

    fn list(&self, folder: Folder) -> Result<Vec<Listed>> {
        let disk = self.disk();
        disk.refuse_if_dead("list", folder.name())?;
        let rows = disk.live.objects.iter().filter(|(key, _)| key.folder() == folder);
        Ok(rows.map(|(key, _)| Listed { name: key.name().to_owned(), length_bytes: None }).collect())
    }

    fn open(&self, key: &Key) -> Result<Box<dyn ReadAt>> {
        let disk = self.disk();
        let name = disk.name_of(key);
        disk.refuse_if_dead("open", &name)?;
        let Some(file) = disk.live.objects.get(key) else {
            return Err(Error::store("open", name)(io::ErrorKind::NotFound.into()));
        };
        Ok(Box::new(SimObject { name, bytes: disk.live.bytes(*file), store: self.clone() }))
    }

    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>> {
        let mut disk = self.disk();
        if matches!(disk.present_mode(), Some(Mode::FailForever | Mode::Tear | Mode::Crash)) {
            return Err(io_error("create a staged file for", disk.name_of(key)));
        }
        let file = disk.create_staged();
        Ok(Box::new(SimStagedWrite {
            store: self.clone(),
            key: key.clone(),
            file,
            position_bytes: 0,
            first_failure: None,
        }))
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        let file = self.disk().create_staged();
        let written = self.disk().write(file, key, bytes);
        match written {
            Ok(()) => self.publish(file, key, mode),
            Err(error) => {
                self.disk().discard(file);
                Err(error)
            }
        }
    }

    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        let keys = names.iter().map(|name| Key::new(folder, name)).collect::<Result<Vec<_>>>()?;
        // Stops at the first failure, then makes durable what was deleted until then.
        let freed_bytes = keys.iter().try_fold(0, |sum, key| Ok(sum + self.delete_one(key)?));
        let synced = self.disk().sync_folder(folder);
        freed_bytes.and_then(|freed_bytes| synced.map(|()| freed_bytes))
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        self.disk().sync_folder(folder)
    }

    fn sweep_staged(&self) -> Result<u64> {
        let mut disk = self.disk();
        if disk.flaw == Some(Flaw::StagedStay) {
            return Ok(0);
        }
        let staged: Vec<FileId> = disk.live.staged.iter().copied().collect();
        for file in &staged {
            let name = format!("{}/tmp/{file}", disk.root);
            disk.step("unlink staged", name)?;
            disk.live.staged.remove(file);
        }
        Ok(staged.len() as u64)
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn WriterLock>> {
        let mut disk = self.disk();
        disk.refuse_if_dead("lock", &disk.root)?;
        if let Some(holder) = disk.holder.clone() {
            return Err(Error::Locked { root: disk.root.clone(), holder });
        }
        disk.holder = Some(holder.to_owned());
        Ok(Box::new(SimLock { store: self.clone() }))
    }

    fn free_bytes(&self) -> Option<u64> {
        None
    }

    fn local_path(&self, _key: &Key) -> Option<PathBuf> {
        None
    }
}

impl fmt::Debug for SimStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let disk = self.disk();
        write!(formatter, "SimStore({:?}, {} steps)", disk.plan, disk.steps)
    }
}

fn io_error(operation: &'static str, object: String) -> Error {
    Error::Store { operation, object, source: io::Error::from_raw_os_error(EIO) }
}

struct SimObject {
    name: String,
    bytes: Arc<Vec<u8>>,
    store: SimStore,
}

impl ReadAt for SimObject {
    fn length_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        self.store.disk().refuse_if_dead("read", &self.name)?;
        let start = usize::try_from(offset_bytes).ok();
        let range = start.and_then(|start| Some(start..start.checked_add(buffer.len())?));
        let Some(bytes) = range.and_then(|range| self.bytes.get(range)) else {
            let expected = format!("{} bytes from there on", buffer.len());
            let found = format!("the end of the object at byte {}", self.bytes.len());
            return Err(Error::corrupt(self.name.clone(), offset_bytes, "length", expected, found));
        };
        buffer.copy_from_slice(bytes);
        Ok(())
    }
}

impl fmt::Debug for SimObject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SimObject({})", self.name)
    }
}

#[derive(Debug)]
struct SimStagedWrite {
    store: SimStore,
    key: Key,
    file: FileId,
    position_bytes: u64,
    first_failure: Option<String>,
}

impl SimStagedWrite {
    fn refuse_after_failure(&self) -> Result<()> {
        self.first_failure.clone().map_or(Ok(()), |first| Err(Error::Poisoned { first }))
    }
}

impl StagedWrite for SimStagedWrite {
    fn position_bytes(&self) -> u64 {
        self.position_bytes
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.refuse_after_failure()?;
        let mut disk = self.store.disk();
        if let Err(error) = disk.write(self.file, &self.key, bytes) {
            disk.discard(self.file);
            self.first_failure = Some(error.chain());
            return Err(error);
        }
        self.position_bytes += bytes.len() as u64;
        Ok(())
    }

    fn publish(self: Box<Self>) -> Result<Published> {
        self.refuse_after_failure()?;
        self.store.publish(self.file, &self.key, PutMode::IfAbsent)?;
        Ok(Published { length_bytes: self.position_bytes, ..Published::default() })
    }
}

impl Drop for SimStagedWrite {
    fn drop(&mut self) {
        self.store.disk().discard(self.file);
    }
}

#[derive(Debug)]
struct SimLock {
    store: SimStore,
}

impl WriterLock for SimLock {
    fn abandon(self: Box<Self>) {
        std::mem::forget(self);
    }
}

impl Drop for SimLock {
    fn drop(&mut self) {
        self.store.disk().holder = None;
    }
}
