//! A store whose objects are encrypted: whoever has the key sees them as they were given, everybody else sees
//! names, lengths and what stands in the heads (FORMAT.md, section "Encryption").
//!
//! It lies between the engine and the store, so nothing above knows of it, and nothing that the engine writes
//! can pass it by. IMPORTANT: each object has a key of its own, made with random bytes, and each of its pages is
//! sealed once: see [`crate::crypt::Cipher`].

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::crypt::{Cipher, MasterKey, RepositoryKeys, TAG_LENGTH_BYTES, random};
use crate::error::{Error, KeyProblem, Result};
use crate::format::encrypted::{
    self, Facts, HEAD_LENGTH_BYTES, Head, PAGE_BYTES, Pages, STORED_PAGE_BYTES, page_offset_bytes,
};
use crate::format::marker::Marker;
use crate::format::model::Manifest;
use crate::format::{manifest, names};
use crate::store::{
    Folder, Key, Listed, Published, PutMode, ReadAt, StagedWrite, Store, WriterLock, end_of_read,
};
use crate::threads::Spares;

/// Encrypted bytes that are handed over together.
const FLUSH_BYTES: usize = 1 << 20;
/// Longer buffers are not kept for the next read.
const SPARE_LIMIT_BYTES: usize = 16 << 20;

/// What a handle with this key sees of a store: the store itself where its marker says that it is not encrypted.
///
/// # Errors
/// [`Error::Key`] where it is encrypted, and the key is missing or another one.
pub fn open(store: Arc<dyn Store>, marker: &Marker, key: Option<&MasterKey>) -> Result<Arc<dyn Store>> {
    let Some(key_check) = &marker.key_check else { return Ok(store) };
    let refuse = |problem| Error::Key { root: store.root(), problem };
    let keys = RepositoryKeys::derive(key.ok_or_else(|| refuse(KeyProblem::Missing))?, &marker.repository_id);
    if keys.check() != key_check {
        return Err(refuse(KeyProblem::Wrong));
    }
    Ok(Arc::new(EncryptedStore::new(store, marker.repository_id.clone(), keys)))
}

/// A manifest as it lies in `store`, encrypted or not, for those who move a repository: the lengths of its packs are
/// those with which they lie there.
///
/// # Errors
/// [`Error::Key`] where it is encrypted, and there is no key; [`Error::Corrupt`] also where it is another key.
pub fn decode_manifest(
    store: &dyn Store,
    key: &Key,
    bytes: &[u8],
    master: Option<&MasterKey>,
) -> Result<Manifest> {
    let object = key.to_string();
    if !encrypted::is_encrypted(bytes) {
        return manifest::decode(&object, bytes);
    }
    let missing = || Error::Key { root: store.root(), problem: KeyProblem::Missing };
    let master = master.ok_or_else(missing)?;
    let repository_id = Head::decode(&object, bytes)?.repository_id;
    let keys = RepositoryKeys::derive(master, &repository_id);
    let lens = Lens { root: store.root(), repository_id, keys, buffers: Spares::default() };
    let mut decoded = manifest::decode(&object, &lens.content(&object, bytes.to_vec())?)?;
    for record in &mut decoded.body.packs {
        record.length_bytes = encrypted::stored_length_bytes(record.length_bytes);
    }
    Ok(decoded)
}

/// A [`Store`] that encrypts what goes into another one. What lies at its root, and what only synchronisation
/// knows, stays as it is.
pub struct EncryptedStore {
    inner: Arc<dyn Store>,
    lens: Arc<Lens>,
}

/// What reads and writes share.
struct Lens {
    /// As the inner store names it in messages.
    root: String,
    repository_id: String,
    keys: RepositoryKeys,
    buffers: Spares<Vec<u8>>,
}

impl EncryptedStore {
    /// The objects of this repository in `inner`, by keys that are known to be right.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>, repository_id: String, keys: RepositoryKeys) -> Self {
        let lens = Lens { root: inner.root(), repository_id, keys, buffers: Spares::default() };
        Self { inner, lens: Arc::new(lens) }
    }
}

fn is_encrypted(folder: Folder) -> bool {
    match folder {
        Folder::Packs | Folder::Snapshots | Folder::Tags | Folder::Receipts => true,
        Folder::Root | Folder::Sync | Folder::Uploads => false,
    }
}

impl Lens {
    /// Head and cipher of an object that is about to be written.
    fn begin(&self, object: &str, facts: Facts) -> Result<([u8; HEAD_LENGTH_BYTES as usize], Cipher)> {
        let head = Head { repository_id: self.repository_id.clone(), salt: random()?, facts }.encode()?;
        Ok((head, self.keys.cipher(object, &head)?))
    }

    /// The cipher of an object that is there, by its head.
    fn cipher(&self, object: &str, head: &[u8]) -> Result<Cipher> {
        let found = Head::decode(object, head)?.repository_id;
        if found != self.repository_id {
            return Err(Error::corrupt(object, 8, "repository id", &self.repository_id, found));
        }
        let head = head.get(..HEAD_LENGTH_BYTES as usize).unwrap_or(head);
        self.keys.cipher(object, head)
    }

    /// Decrypts a whole object.
    fn content(&self, object: &str, mut stored: Vec<u8>) -> Result<Vec<u8>> {
        let length_bytes = inner_length_bytes(object, stored.len() as u64)?;
        let (head, pages) = stored.split_at_mut(HEAD_LENGTH_BYTES as usize);
        let cipher = self.cipher(object, head)?;
        let last_page = encrypted::last_page(length_bytes);
        let mut bytes = Vec::with_capacity(length_bytes as usize);
        unseal(object, &cipher, 0..last_page + 1, last_page, pages, |_, page| {
            bytes.extend_from_slice(page);
        })?;
        Ok(bytes)
    }

    fn give_back(&self, buffer: Vec<u8>) {
        if buffer.capacity() <= SPARE_LIMIT_BYTES {
            self.buffers.give_back(buffer);
        }
    }
}

/// Appends the encrypted form of a page to `stored`.
fn seal(cipher: &Cipher, number: u64, is_last: bool, page: &[u8], stored: &mut Vec<u8>) -> Result<()> {
    let start = stored.len();
    stored.extend_from_slice(page);
    let tag = cipher.seal(number, is_last, &mut stored[start..])?;
    stored.extend_from_slice(&tag);
    Ok(())
}

/// Decrypts consecutive pages where they lie and gives each to `take`, with the offset of its first byte in the
/// object. Nothing of a page that is not the one that was sealed is given.
fn unseal(
    object: &str,
    cipher: &Cipher,
    numbers: Range<u64>,
    last_page: u64,
    stored: &mut [u8],
    mut take: impl FnMut(u64, &[u8]),
) -> Result<()> {
    for (number, stored) in numbers.zip(stored.chunks_mut(STORED_PAGE_BYTES as usize)) {
        let opened = stored
            .split_last_chunk_mut::<TAG_LENGTH_BYTES>()
            .and_then(|(page, tag)| cipher.open(number, number == last_page, page, *tag).then_some(&*page));
        let page = opened.ok_or_else(|| {
            let expected = "what was encrypted for this place with the key of the repository";
            Error::corrupt(object, page_offset_bytes(number), "page", expected, "other bytes")
        })?;
        take(number * PAGE_BYTES, page);
    }
    Ok(())
}

/// Length of the object in an encrypted one.
fn inner_length_bytes(object: &str, stored_length_bytes: u64) -> Result<u64> {
    encrypted::length_bytes(stored_length_bytes).ok_or_else(|| {
        let expected = "that of a head and whole pages";
        Error::corrupt(object, stored_length_bytes, "length", expected, stored_length_bytes)
    })
}

impl Store for EncryptedStore {
    fn list(&self, folder: Folder) -> Result<Vec<Listed>> {
        let mut rows = self.inner.list(folder)?;
        if is_encrypted(folder) {
            for row in &mut rows {
                row.length_bytes = row.length_bytes.and_then(encrypted::length_bytes);
            }
        }
        Ok(rows)
    }

    fn get(&self, key: &Key, limit_bytes: u64) -> Result<Vec<u8>> {
        if !is_encrypted(key.folder()) {
            return self.inner.get(key, limit_bytes);
        }
        let stored = self.inner.get(key, encrypted::stored_length_bytes(limit_bytes))?;
        self.lens.content(&key.to_string(), stored)
    }

    fn open(&self, key: &Key) -> Result<Box<dyn ReadAt>> {
        let inner = self.inner.open(key)?;
        if !is_encrypted(key.folder()) {
            return Ok(inner);
        }
        let object = key.to_string();
        let length_bytes = inner_length_bytes(&object, inner.length_bytes())?;
        let (lens, cipher) = (Arc::clone(&self.lens), OnceLock::new());
        Ok(Box::new(EncryptedObject { inner, object, length_bytes, lens, cipher }))
    }

    fn stage(&self, key: &Key) -> Result<Box<dyn StagedWrite>> {
        let inner = self.inner.stage(key)?;
        if !is_encrypted(key.folder()) {
            return Ok(inner);
        }
        let (head, cipher) = self.lens.begin(&key.to_string(), Facts::default())?;
        let (page, stored) = (Vec::with_capacity(PAGE_BYTES as usize), head.to_vec());
        Ok(Box::new(EncryptedWrite { inner, cipher, page, stored, page_number: 0, failure: None }))
    }

    fn put(&self, key: &Key, bytes: &[u8], mode: PutMode) -> Result<()> {
        if !is_encrypted(key.folder()) {
            return self.inner.put(key, bytes, mode);
        }
        let object = key.to_string();
        let (head, cipher) = self.lens.begin(&object, facts(key, bytes))?;
        let mut stored = Vec::with_capacity(encrypted::stored_length_bytes(bytes.len() as u64) as usize);
        stored.extend_from_slice(&head);
        let last_page = encrypted::last_page(bytes.len() as u64);
        let mut pages = bytes.chunks(PAGE_BYTES as usize);
        for number in 0..=last_page {
            seal(&cipher, number, number == last_page, pages.next().unwrap_or_default(), &mut stored)?;
        }
        self.inner.put(key, &stored, mode)
    }

    fn local_path(&self, key: &Key) -> Option<PathBuf> {
        // What lies there is of no use to code that maps it.
        if is_encrypted(key.folder()) { None } else { self.inner.local_path(key) }
    }

    fn root(&self) -> String {
        self.inner.root()
    }

    fn create_folders(&self) -> Result<()> {
        self.inner.create_folders()
    }

    fn delete(&self, folder: Folder, names: &[String]) -> Result<u64> {
        self.inner.delete(folder, names)
    }

    fn sync_folder(&self, folder: Folder) -> Result<()> {
        self.inner.sync_folder(folder)
    }

    fn sweep_staged(&self) -> Result<u64> {
        self.inner.sweep_staged()
    }

    fn lock(&self, holder: &str) -> Result<Box<dyn WriterLock>> {
        self.inner.lock(holder)
    }

    fn free_bytes(&self) -> Option<u64> {
        self.inner.free_bytes()
    }

    fn is_at_hand(&self, key: &Key) -> bool {
        self.inner.is_at_hand(key)
    }

    fn is_pushed(&self, key: &Key) -> bool {
        self.inner.is_pushed(key)
    }

    fn require_ours(&self) -> Result<()> {
        self.inner.require_ours()
    }
}

impl fmt::Debug for EncryptedStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "EncryptedStore({:?})", self.inner)
    }
}

/// What stands in the clear of an object: something only of a manifest.
fn facts(key: &Key, bytes: &[u8]) -> Facts {
    if key.folder() != Folder::Snapshots || names::parse_manifest_name(key.name()).is_none() {
        return Facts::default();
    }
    let line = manifest::decode_header(&key.to_string(), bytes).ok().flatten();
    line.map_or_else(Facts::default, |line| Facts::from(&line.header))
}

/// An open encrypted object.
struct EncryptedObject {
    inner: Box<dyn ReadAt>,
    object: String,
    length_bytes: u64,
    lens: Arc<Lens>,
    /// Known once the head was read.
    cipher: OnceLock<Cipher>,
}

impl EncryptedObject {
    /// The cipher, by the head in `prefix` where it was not read before.
    fn cipher(&self, prefix: Option<&[u8]>) -> Result<&Cipher> {
        if let Some(known) = self.cipher.get() {
            return Ok(known);
        }
        let cipher = if let Some(prefix) = prefix {
            self.lens.cipher(&self.object, prefix)?
        } else {
            let mut head = [0; HEAD_LENGTH_BYTES as usize];
            self.inner.read_at(0, &mut head)?;
            self.lens.cipher(&self.object, &head)?
        };
        Ok(self.cipher.get_or_init(|| cipher))
    }

    fn read_pages(
        &self,
        pages: &Pages,
        stored: &mut [u8],
        range: &Range<u64>,
        buffer: &mut [u8],
    ) -> Result<()> {
        self.inner.read_at(pages.stored.start, stored)?;
        let has_head = pages.stored.start == 0;
        let (head, stored) = stored.split_at_mut(if has_head { HEAD_LENGTH_BYTES as usize } else { 0 });
        let cipher = self.cipher(has_head.then_some(&*head))?;
        let last_page = encrypted::last_page(self.length_bytes);
        unseal(&self.object, cipher, pages.numbers.clone(), last_page, stored, |offset_bytes, page| {
            // What the page and the range have in common.
            let start = range.start.max(offset_bytes);
            let end = range.end.min(offset_bytes + page.len() as u64);
            if start < end {
                buffer[(start - range.start) as usize..(end - range.start) as usize]
                    .copy_from_slice(&page[(start - offset_bytes) as usize..(end - offset_bytes) as usize]);
            }
        })
    }
}

impl ReadAt for EncryptedObject {
    fn length_bytes(&self) -> u64 {
        self.length_bytes
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<()> {
        let object = || format!("{}/{}", self.lens.root, self.object);
        let end = end_of_read(object, offset_bytes, buffer.len(), self.length_bytes)?;
        let range = offset_bytes..end;
        let pages = Pages::holding(&range, self.length_bytes);
        let length = (pages.stored.end - pages.stored.start) as usize;
        let mut stored = self.lens.buffers.take();
        if stored.len() < length {
            stored.resize(length, 0);
        }
        let read = self.read_pages(&pages, &mut stored[..length], &range, buffer);
        self.lens.give_back(stored);
        read
    }

    fn will_read(&self, range: Range<u64>) {
        let range = range.start.min(self.length_bytes)..range.end.min(self.length_bytes);
        self.inner.will_read(Pages::holding(&range, self.length_bytes).stored);
    }
}

impl fmt::Debug for EncryptedObject {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "EncryptedObject({:?})", self.inner)
    }
}

/// An encrypted object being written.
struct EncryptedWrite {
    inner: Box<dyn StagedWrite>,
    cipher: Cipher,
    /// What is not sealed yet: a full page stays until it is known not to be the last one.
    page: Vec<u8>,
    page_number: u64,
    /// What is sealed and not handed over yet; the head at first.
    stored: Vec<u8>,
    /// Text of the first failure, after which every call fails.
    failure: Option<String>,
}

impl EncryptedWrite {
    fn seal(&mut self, is_last: bool, page: &[u8]) -> Result<()> {
        let number = self.page_number;
        // IMPORTANT: counted before anything can fail, so that no number is used again.
        self.page_number += 1;
        seal(&self.cipher, number, is_last, page, &mut self.stored)
    }

    fn seal_collected(&mut self, is_last: bool) -> Result<()> {
        let page = std::mem::take(&mut self.page);
        let sealed = self.seal(is_last, &page);
        self.page = page;
        self.page.clear();
        sealed
    }

    fn flush(&mut self) -> Result<()> {
        let appended = self.inner.append(&self.stored);
        self.stored.clear();
        if let Err(error) = &appended {
            self.failure = Some(error.chain());
        }
        appended
    }

    fn must_go_on(&self) -> Result<()> {
        self.failure.as_ref().map_or(Ok(()), |first| Err(Error::Poisoned { first: first.clone() }))
    }
}

impl StagedWrite for EncryptedWrite {
    fn position_bytes(&self) -> u64 {
        self.page_number * PAGE_BYTES + self.page.len() as u64
    }

    fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        self.must_go_on()?;
        let page_bytes = PAGE_BYTES as usize;
        while self.page.len() + bytes.len() > page_bytes {
            if self.page.is_empty() {
                let (page, rest) = bytes.split_at(page_bytes);
                self.seal(false, page)?;
                bytes = rest;
            } else {
                let (missing, rest) = bytes.split_at(page_bytes - self.page.len());
                self.page.extend_from_slice(missing);
                self.seal_collected(false)?;
                bytes = rest;
            }
            if self.stored.len() >= FLUSH_BYTES {
                self.flush()?;
            }
        }
        self.page.extend_from_slice(bytes);
        Ok(())
    }

    fn publish(mut self: Box<Self>) -> Result<Published> {
        self.must_go_on()?;
        let length_bytes = self.position_bytes();
        self.seal_collected(true)?;
        self.flush()?;
        Ok(Published { length_bytes, ..self.inner.publish()? })
    }
}

impl fmt::Debug for EncryptedWrite {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "EncryptedWrite({:?})", self.inner)
    }
}
