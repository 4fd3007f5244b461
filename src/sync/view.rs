//! What lies in a bucket: its listings, as of one moment.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::store::remote::{RemoteStore, Version};
use crate::store::{Folder, Key};

/// What a listing tells of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) length_bytes: u64,
    pub(super) version: Version,
    /// By the clock of the bucket.
    pub(super) modified_unix_ms: u64,
}

/// Everything that lies in a bucket, but for notes of uploads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    folders: BTreeMap<Folder, BTreeMap<String, Row>>,
}

/// Folders of a bucket that a view tells of, in the order in which they are listed.
///
/// IMPORTANT: manifests before packs. What a listed manifest refers to lies there before it, so that a pack which is
/// not listed is surely missing.
const FOLDERS: [Folder; 5] = [Folder::Root, Folder::Snapshots, Folder::Tags, Folder::Receipts, Folder::Packs];

impl View {
    /// Lists the bucket.
    pub(super) fn take(remote: &dyn RemoteStore) -> Result<Self> {
        let mut view = Self::default();
        for folder in FOLDERS {
            view.folders.insert(folder, list(remote, folder)?);
        }
        Ok(view)
    }

    pub(super) fn get(&self, key: &Key) -> Option<&Row> {
        self.folders.get(&key.folder())?.get(key.name())
    }

    pub(super) fn has(&self, key: &Key) -> bool {
        self.get(key).is_some()
    }

    /// Rows of a folder, by name.
    pub(super) fn rows(&self, folder: Folder) -> impl Iterator<Item = (&String, &Row)> {
        self.folders.get(&folder).into_iter().flatten()
    }

    pub(super) fn insert(&mut self, key: &Key, row: Row) {
        if FOLDERS.contains(&key.folder()) {
            self.folders.entry(key.folder()).or_default().insert(key.name().to_owned(), row);
        }
    }

    pub(super) fn remove(&mut self, key: &Key) {
        if let Some(folder) = self.folders.get_mut(&key.folder()) {
            folder.remove(key.name());
        }
    }
}

/// Rows of one folder of a bucket, by name.
pub(super) fn list(remote: &dyn RemoteStore, folder: Folder) -> Result<BTreeMap<String, Row>> {
    let rows = remote.list_versions(folder)?.into_iter().map(|row| {
        let (length_bytes, modified_unix_ms) = (row.length_bytes, row.modified_unix_ms);
        (row.name, Row { length_bytes, version: row.version, modified_unix_ms })
    });
    Ok(rows.collect())
}
