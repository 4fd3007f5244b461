//! What the folder remembers of its bucket, in `sync/`: what was pushed, what is to be removed, and which uploads
//! are under way. Losing it costs requests, never a snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::format::journal::{Journal, Pushed, Removals, UploadNote};
use crate::format::limits::{JOURNAL_LIMIT_BYTES, SMALL_OBJECT_LIMIT_BYTES};
use crate::format::names;
use crate::store::{Folder, Key, PutMode, Store};

/// Takings of the lease that are remembered: so many in a row may die before they have seen the bucket.
const TAKING_LIMIT: usize = 64;

/// The notes of one folder about one bucket.
#[derive(Debug)]
pub(super) struct Notes {
    store: Arc<dyn Store>,
    remote: String,
    memory: Mutex<Memory>,
}

#[derive(Debug, Default)]
struct Memory {
    repository_id: String,
    pushed: BTreeMap<Key, Pushed>,
    is_journal_stale: bool,
    removed: Removed,
    uploads: BTreeMap<String, UploadNote>,
}

/// What `removals.json` says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Removed {
    /// Nonce of the lease since which nobody has written to the bucket but this folder.
    since_nonce: String,
    /// Nonces of leases that this folder has taken, or was about to take, oldest first.
    takings: Vec<String>,
    /// What was deleted here and may still lie in the bucket.
    keys: BTreeSet<Key>,
}

impl Notes {
    pub(super) fn new(store: Arc<dyn Store>, remote: String) -> Self {
        Self { store, remote, memory: Mutex::default() }
    }

    /// Reads the notes. Those about another bucket are as good as none. Returns what is damaged, and lost.
    ///
    /// # Errors
    /// [`Error::Store`] where the folder can't be read; [`Error::Unsupported`] where a newer version wrote there.
    pub(super) fn load(&self) -> Result<Vec<Error>> {
        let (mut memory, mut lost) = (Memory::default(), Vec::new());
        let journal = self.read(names::JOURNAL_NAME, Journal::decode, &mut lost)?;
        if let Some(journal) = journal.filter(|journal| journal.remote == self.remote) {
            let pushed = journal.pushed.into_iter();
            memory.pushed = pushed.filter_map(|(key, pushed)| Some((parse_key(&key)?, pushed))).collect();
            memory.repository_id = journal.repository_id;
        }
        let removals = self.read(names::REMOVALS_NAME, Removals::decode, &mut lost)?;
        if let Some(removals) = removals.filter(|removals| removals.remote == self.remote) {
            let keys = keys_of(&removals);
            memory.removed = Removed { since_nonce: removals.since_nonce, takings: removals.takings, keys };
        }
        for row in self.store.list(Folder::Sync)? {
            if names::parse_upload_name(&row.name).is_none() {
                continue;
            }
            let note = self.read(&row.name, UploadNote::decode, &mut lost)?;
            if let Some(note) = note.filter(|note| note.remote == self.remote) {
                memory.uploads.insert(note.pack.clone(), note);
            }
        }
        *self.memory() = memory;
        Ok(lost)
    }

    fn read<T>(
        &self,
        name: &str,
        decode: fn(&str, &[u8]) -> Result<T>,
        lost: &mut Vec<Error>,
    ) -> Result<Option<T>> {
        let key = Key::new(Folder::Sync, name)?;
        match self.store.get(&key, JOURNAL_LIMIT_BYTES).and_then(|bytes| decode(&key.to_string(), &bytes)) {
            Ok(read) => Ok(Some(read)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error @ Error::Corrupt { .. }) => {
                lost.push(error);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Removals as they stand in the folder now: for a handle that isn't the writer.
    pub(super) fn removals_now(&self) -> Result<BTreeSet<Key>> {
        let removals = self.read(names::REMOVALS_NAME, Removals::decode, &mut Vec::new())?;
        let ours = removals.filter(|removals| removals.remote == self.remote);
        Ok(ours.as_ref().map(keys_of).unwrap_or_default())
    }

    /// Keys that were deleted here and may still lie in the bucket.
    pub(super) fn removals(&self) -> BTreeSet<Key> {
        self.memory().removed.keys.clone()
    }

    pub(super) fn is_removed(&self, key: &Key) -> bool {
        self.memory().removed.keys.contains(key)
    }

    /// Notes durably that keys are to go from the bucket too.
    ///
    /// # Errors
    /// [`Error::Store`] where that can't be made durable.
    pub(super) fn remove(&self, keys: impl IntoIterator<Item = Key>) -> Result<()> {
        self.change_removals(|removals| removals.extend(keys))
    }

    /// Forgets removals that are done, or void.
    ///
    /// # Errors
    /// As [`Notes::remove`].
    pub(super) fn forget_removals(&self, done: &BTreeSet<Key>) -> Result<()> {
        self.change_removals(|removals| removals.retain(|key| !done.contains(key)))
    }

    fn change_removals(&self, change: impl FnOnce(&mut BTreeSet<Key>)) -> Result<()> {
        self.change_removed(|removed| change(&mut removed.keys))
    }

    /// Changes what `removals.json` says, there first: what can't be made durable is not known here either.
    fn change_removed(&self, change: impl FnOnce(&mut Removed)) -> Result<()> {
        // Under the lock: of two changes at once the later one must not be written first.
        let mut memory = self.memory();
        let mut removed = memory.removed.clone();
        change(&mut removed);
        if removed == memory.removed {
            return Ok(());
        }
        let (remote, keys) = (self.remote.clone(), removed.keys.iter().map(ToString::to_string).collect());
        let (since_nonce, takings) = (removed.since_nonce.clone(), removed.takings.clone());
        self.put(names::REMOVALS_NAME, &Removals { remote, since_nonce, takings, keys }.encode()?)?;
        memory.removed = removed;
        Ok(())
    }

    /// Notes durably that this folder is about to take the lease: it knows it by this nonce even after a crash.
    ///
    /// # Errors
    /// As [`Notes::remove`].
    pub(super) fn claim(&self, nonce: &str) -> Result<()> {
        self.change_removed(|Removed { takings, .. }| {
            if !takings.iter().any(|taking| taking == nonce) {
                let surplus = (takings.len() + 1).saturating_sub(TAKING_LIMIT);
                takings.drain(..surplus);
                takings.push(nonce.to_owned());
            }
        })
    }

    /// True where the taking with this nonce was this folder's.
    pub(super) fn has_claimed(&self, nonce: &str) -> bool {
        self.memory().removed.takings.iter().any(|taking| taking == nonce)
    }

    /// Notes which lease was taken: nobody has written to the bucket but this folder since the one with `since_nonce`.
    /// Where another folder did since what is noted here, that may be what its writer goes on from: only packs stay noted
    /// as removed, which go only where no manifest names them.
    ///
    /// # Errors
    /// As [`Notes::remove`].
    pub(super) fn enter(&self, since_nonce: &str) -> Result<()> {
        if self.memory().removed.since_nonce != since_nonce {
            let here = self.store.list(Folder::Tags)?;
            let is_here = |key: &Key| here.iter().any(|row| row.name == key.name());
            // A tag that was pushed and is gone here would be taken for one that a person has removed.
            self.keep_pushed(|key| key.folder() != Folder::Tags || is_here(key));
            // IMPORTANT: first. What follows says that this was done.
            self.save_journal()?;
        }
        self.change_removed(|removed| {
            let earlier = removed.takings.len().saturating_sub(1);
            removed.takings.drain(..earlier);
            if removed.since_nonce != since_nonce {
                removed.keys.retain(|key| key.folder() == Folder::Packs);
                since_nonce.clone_into(&mut removed.since_nonce);
            }
        })
    }

    /// Forgets durably what was about another repository that this folder held.
    ///
    /// # Errors
    /// As [`Notes::remove`].
    pub(super) fn begin_anew(&self, repository_id: &str) -> Result<()> {
        self.keep_pushed(|_| false);
        self.change_removals(BTreeSet::clear)?;
        let untagged = self.untagged()?;
        self.forget_untagged(&untagged)?;
        self.set_repository(repository_id);
        Ok(())
    }

    /// Tags of which this or another process has noted that they are to go from the bucket.
    pub(super) fn untagged(&self) -> Result<BTreeSet<String>> {
        let mut tags = BTreeSet::new();
        for row in self.store.list(Folder::Sync)? {
            let Some(tag) = names::parse_untag_name(&row.name) else { continue };
            match self.store.get(&Key::new(Folder::Sync, &row.name)?, SMALL_OBJECT_LIMIT_BYTES) {
                Ok(remote) if remote == self.remote.as_bytes() => _ = tags.insert(tag.to_owned()),
                // Of another bucket.
                Ok(_) | Err(Error::Corrupt { .. }) => {}
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(tags)
    }

    /// Notes durably that a tag is to go from the bucket; needs no lock.
    ///
    /// # Errors
    /// [`Error::Store`] where that can't be made durable.
    pub(super) fn untag(&self, tag: &str) -> Result<()> {
        self.store.create_folders()?;
        self.put(&names::untag_name(tag), self.remote.as_bytes())
    }

    /// Forgets such notes.
    ///
    /// # Errors
    /// [`Error::Store`] where the folder fails.
    pub(super) fn forget_untagged(&self, tags: &BTreeSet<String>) -> Result<()> {
        let names: Vec<String> = tags.iter().map(|tag| names::untag_name(tag)).collect();
        if names.is_empty() { Ok(()) } else { self.store.delete(Folder::Sync, &names).map(drop) }
    }

    /// What lies in the bucket under a key, as far as was noted.
    pub(super) fn pushed(&self, key: &Key) -> Option<Pushed> {
        self.memory().pushed.get(key).cloned()
    }

    /// Says whose objects the journal is about. One about another repository is as good as none.
    pub(super) fn set_repository(&self, repository_id: &str) {
        let mut memory = self.memory();
        if memory.repository_id != repository_id {
            if !memory.repository_id.is_empty() {
                (memory.pushed, memory.removed.keys) = (BTreeMap::new(), BTreeSet::new());
            }
            repository_id.clone_into(&mut memory.repository_id);
            memory.is_journal_stale = true;
        }
    }

    /// Everything of which that is known.
    pub(super) fn all_pushed(&self) -> BTreeMap<Key, Pushed> {
        self.memory().pushed.clone()
    }

    /// Notes in memory what lies in the bucket; [`Notes::save_journal`] makes it durable.
    pub(super) fn note_pushed(&self, key: Key, pushed: Pushed) {
        let mut memory = self.memory();
        if memory.pushed.get(&key) != Some(&pushed) {
            memory.pushed.insert(key, pushed);
            memory.is_journal_stale = true;
        }
    }

    /// Forgets in memory what does not lie in the bucket any more.
    pub(super) fn keep_pushed(&self, is_kept: impl Fn(&Key) -> bool) {
        let mut memory = self.memory();
        let before = memory.pushed.len();
        memory.pushed.retain(|key, _| is_kept(key));
        memory.is_journal_stale |= memory.pushed.len() != before;
    }

    /// Makes durable what was noted as pushed.
    ///
    /// # Errors
    /// [`Error::Store`] where the folder fails: the next push looks at the bucket instead.
    pub(super) fn save_journal(&self) -> Result<()> {
        let mut memory = self.memory();
        if !memory.is_journal_stale {
            return Ok(());
        }
        let pushed = memory.pushed.iter().map(|(key, pushed)| (key.to_string(), pushed.clone())).collect();
        let (remote, repository_id) = (self.remote.clone(), memory.repository_id.clone());
        let bytes = Journal { remote, repository_id, pushed }.encode()?;
        self.put(names::JOURNAL_NAME, &bytes)?;
        memory.is_journal_stale = false;
        Ok(())
    }

    /// Uploads under way, by pack.
    pub(super) fn uploads(&self) -> BTreeMap<String, UploadNote> {
        self.memory().uploads.clone()
    }

    /// Notes durably how far an upload is.
    ///
    /// # Errors
    /// [`Error::Store`] where the folder fails.
    pub(super) fn note_upload(&self, note: &UploadNote) -> Result<()> {
        self.put(&names::upload_name(&note.pack), &note.encode()?)?;
        self.memory().uploads.insert(note.pack.clone(), note.clone());
        Ok(())
    }

    /// Forgets an upload.
    ///
    /// # Errors
    /// [`Error::Store`] where the folder fails.
    pub(super) fn forget_upload(&self, pack: &str) -> Result<()> {
        self.store.delete(Folder::Sync, &[names::upload_name(pack)])?;
        self.memory().uploads.remove(pack);
        Ok(())
    }

    /// Address of the bucket.
    pub(super) fn remote(&self) -> &str {
        &self.remote
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.store.put(&Key::new(Folder::Sync, name)?, bytes, PutMode::Replace)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Folders whose objects lie in a bucket as well.
pub(super) const MIRRORED: [Folder; 4] = [Folder::Packs, Folder::Snapshots, Folder::Tags, Folder::Receipts];

fn keys_of(removals: &Removals) -> BTreeSet<Key> {
    removals.keys.iter().filter_map(|key| parse_key(key)).collect()
}

/// Reads a key of a mirrored folder, as it is displayed.
fn parse_key(text: &str) -> Option<Key> {
    let (folder, name) = text.split_once('/')?;
    let folder = MIRRORED.into_iter().find(|known| known.name() == folder)?;
    Key::new(folder, name).ok()
}

#[cfg(test)]
mod tests {
    use crate::digest::ChunkDigest;
    use crate::store::memory::MemoryStore;

    use super::*;

    fn key(text: &str) -> Key {
        parse_key(text).unwrap()
    }

    fn notes(store: &MemoryStore, remote: &str) -> Notes {
        let notes = Notes::new(Arc::new(store.clone()), remote.to_owned());
        assert!(notes.load().unwrap().is_empty());
        notes
    }

    #[test]
    fn what_is_noted_is_there_for_the_next_process_and_for_no_other_bucket() {
        let store = MemoryStore::new();
        let first = notes(&store, "s3://a");
        let pushed = Pushed { version: "v".to_owned(), digest: ChunkDigest(1), local_digest: None };
        first.note_pushed(key("snapshots/1.json"), pushed.clone());
        first.set_repository("id");
        first.save_journal().unwrap();
        first.remove([key("packs/x"), key("tags/y")]).unwrap();
        first.forget_removals(&BTreeSet::from([key("tags/y")])).unwrap();
        let note = UploadNote {
            remote: "s3://a".to_owned(),
            pack: names::pack_name(1, 0, 7),
            length_bytes: 5,
            id: "u".to_owned(),
            part_bytes: 5,
            parts: vec![None],
        };
        first.note_upload(&note).unwrap();
        first.untag("best").unwrap();

        let next = notes(&store, "s3://a");
        assert_eq!(next.pushed(&key("snapshots/1.json")), Some(pushed));
        assert_eq!(next.removals(), BTreeSet::from([key("packs/x")]));
        assert_eq!(next.uploads().into_values().collect::<Vec<_>>(), [note]);
        assert_eq!(next.untagged().unwrap(), BTreeSet::from(["best".to_owned()]));
        let other = notes(&store, "s3://b");
        assert_eq!((other.all_pushed().len(), other.removals().len(), other.uploads().len()), (0, 0, 0));

        next.forget_upload(&names::pack_name(1, 0, 7)).unwrap();
        next.forget_untagged(&BTreeSet::from(["best".to_owned()])).unwrap();
        let left = store.list(Folder::Sync).unwrap();
        assert_eq!(
            left.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(),
            ["journal.json", "removals.json"]
        );
    }

    #[test]
    fn what_was_deleted_before_another_writer_came_stays() {
        let store = MemoryStore::new();
        let first = notes(&store, "s3://a");
        first.enter("ours").unwrap();
        first.remove([key("packs/x"), key("tags/y"), key("snapshots/1.json")]).unwrap();
        let next = notes(&store, "s3://a");
        next.enter("ours").unwrap();
        assert_eq!(next.removals(), BTreeSet::from([key("packs/x"), key("tags/y"), key("snapshots/1.json")]));
        let later = notes(&store, "s3://a");
        later.enter("after another").unwrap();
        assert_eq!(later.removals(), BTreeSet::from([key("packs/x")]));
        assert_eq!(notes(&store, "s3://a").removals(), BTreeSet::from([key("packs/x")]));
    }

    #[test]
    fn takings_are_known_until_the_next_one_is_settled() {
        let store = MemoryStore::new();
        let first = notes(&store, "s3://a");
        first.claim("a").unwrap();
        first.enter("a").unwrap();
        for number in 0..TAKING_LIMIT {
            notes(&store, "s3://a").claim(&number.to_string()).unwrap();
        }
        let next = notes(&store, "s3://a");
        assert!(!next.has_claimed("a"), "so many are remembered, and no more");
        assert!(next.has_claimed("0") && next.has_claimed("63"));
        next.enter("a").unwrap();
        let later = notes(&store, "s3://a");
        assert!(!later.has_claimed("0") && later.has_claimed("63"));
        assert!(!notes(&store, "s3://b").has_claimed("63"));
    }

    #[test]
    fn a_damaged_note_is_told_of_and_is_as_good_as_none() {
        let store = MemoryStore::new();
        store.put(&Key::new(Folder::Sync, names::JOURNAL_NAME).unwrap(), b"x", PutMode::Replace).unwrap();
        let notes = Notes::new(Arc::new(store), "s3://a".to_owned());
        let lost = notes.load().unwrap();
        assert!(
            matches!(&lost[..], [Error::Corrupt { object, .. }] if object == "sync/journal.json"),
            "{lost:?}"
        );
    }

    #[test]
    fn only_keys_of_mirrored_folders_are_taken_from_a_note() {
        assert_eq!(parse_key("packs/x").map(|key| key.to_string()), Some("packs/x".to_owned()));
        for text in ["varvite.json", "sync/x", "uploads/x", "packs/", "packs/../x", "/x"] {
            assert_eq!(parse_key(text), None, "{text}");
        }
    }
}
