//! What is to be pushed and removed: pure functions of what lies here, what lies there, and what was noted.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::digest::ChunkDigest;
use crate::format::journal::Pushed;
use crate::format::model::PackRecord;
use crate::format::names;
use crate::store::remote::Version;
use crate::store::{Folder, Key};

use super::view::View;

/// What lies in the folder.
#[derive(Clone, Debug, Default)]
pub(super) struct Local {
    /// Digests of header lines.
    pub(super) manifests: BTreeMap<u64, ChunkDigest>,
    pub(super) tombstones: BTreeSet<u64>,
    pub(super) tags: BTreeMap<String, ChunkDigest>,
    pub(super) receipts: BTreeMap<u64, ChunkDigest>,
    pub(super) packs: HashSet<String>,
}

/// One object, or one snapshot with its packs, that goes to the bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Push {
    /// The marker.
    Marker,
    /// The tombstone of this number.
    Tombstone(u64),
    /// A snapshot: packs that are missing, then its manifest, in the place of this version of it if there is one.
    Snapshot { seq: u64, replaces: Option<Version> },
    /// Packs of a snapshot whose manifest lies there, and which the bucket has lost.
    Packs(u64),
    /// A tag.
    Tag(String),
    /// A receipt.
    Receipt(u64),
}

/// Everything that the bucket lacks, in the order in which it is pushed: what a fresh machine would resume from
/// first. `lacking` are snapshots whose manifest lies there, and not all of their packs.
pub(super) fn pushes(
    local: &Local,
    view: &View,
    known: &BTreeMap<Key, Pushed>,
    lacking: &BTreeSet<u64>,
) -> Vec<Push> {
    let mut pushes = Vec::new();
    let has = |folder, name: &str| Key::new(folder, name).is_ok_and(|key| view.has(&key));
    if !has(Folder::Root, names::MARKER_NAME) {
        pushes.push(Push::Marker);
    }
    let tombstones = local.tombstones.iter().copied();
    let is_new = |seq: &u64| !has(Folder::Snapshots, &names::tombstone_name(*seq));
    pushes.extend(tombstones.filter(is_new).map(Push::Tombstone));
    let mut replacements = Vec::new();
    for (&seq, &digest) in local.manifests.iter().rev() {
        match lies_there(Folder::Snapshots, &names::manifest_name(seq), digest, view, known) {
            There::Absent => pushes.push(Push::Snapshot { seq, replaces: None }),
            There::Other(version) => {
                replacements.push(Push::Snapshot { seq, replaces: Some(version.clone()) });
            }
            There::Same if lacking.contains(&seq) => pushes.push(Push::Packs(seq)),
            There::Same => {}
        }
    }
    for (name, &digest) in &local.tags {
        if lies_there(Folder::Tags, name, digest, view, known) != There::Same {
            pushes.push(Push::Tag(name.clone()));
        }
    }
    for (&number, &digest) in &local.receipts {
        if lies_there(Folder::Receipts, &names::receipt_name(number), digest, view, known) != There::Same {
            pushes.push(Push::Receipt(number));
        }
    }
    pushes.append(&mut replacements);
    pushes
}

/// What lies in the bucket in the place of a local object.
#[derive(PartialEq, Eq)]
enum There<'a> {
    Absent,
    Same,
    Other(&'a Version),
}

fn lies_there<'a>(
    folder: Folder,
    name: &str,
    digest: ChunkDigest,
    view: &'a View,
    pushed: &BTreeMap<Key, Pushed>,
) -> There<'a> {
    let Ok(key) = Key::new(folder, name) else { return There::Same };
    let Some(row) = view.get(&key) else { return There::Absent };
    let known = pushed.get(&key).filter(|known| known.version == row.version.0);
    match known {
        Some(known) if known.local_digest.unwrap_or(known.digest) == digest => There::Same,
        _ => There::Other(&row.version),
    }
}

/// Packs of a manifest that the bucket lacks, or has with another length.
pub(super) fn missing_packs<'a>(packs: &'a [PackRecord], view: &View) -> Vec<&'a PackRecord> {
    let is_there = |record: &&PackRecord| {
        let key = Key::new(Folder::Packs, &record.name);
        key.is_ok_and(|key| view.get(&key).is_some_and(|row| row.length_bytes == record.length_bytes))
    };
    packs.iter().filter(|record| !is_there(record)).collect()
}

/// What goes from the bucket, before the packs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Removals {
    pub(super) tags: Vec<String>,
    /// Manifests.
    pub(super) seqs: Vec<u64>,
    pub(super) tombstones: Vec<u64>,
    /// Notes that mean nothing any more: the object lies here again, or is not in the bucket.
    pub(super) void: BTreeSet<Key>,
}

/// What was removed here and lies in the bucket still. Nothing goes from there that was not noted as deleted, but for
/// tags: one that was pushed and is gone here was removed by a person.
pub(super) fn removals(
    local: &Local,
    view: &View,
    pushed: &BTreeMap<Key, Pushed>,
    noted: &BTreeSet<Key>,
    untagged: &BTreeSet<String>,
) -> Removals {
    let mut removals = Removals::default();
    let mut tags: BTreeSet<String> = untagged.iter().filter(|tag| in_bucket(view, tag)).cloned().collect();
    for (name, row) in view.rows(Folder::Tags) {
        let Ok(key) = Key::new(Folder::Tags, name) else { continue };
        if pushed.get(&key).is_some_and(|known| known.version == row.version.0) {
            tags.insert(name.clone());
        }
    }
    for key in noted {
        if !view.has(key) || lies_here(local, key) {
            removals.void.insert(key.clone());
            continue;
        }
        let name = key.name();
        match key.folder() {
            // They go last, once it is known which ones the manifests that stay don't name.
            Folder::Packs => {}
            Folder::Tags => {
                tags.insert(name.to_owned());
            }
            Folder::Snapshots => {
                removals.seqs.extend(names::parse_manifest_name(name));
                removals.tombstones.extend(names::parse_tombstone_name(name));
            }
            _ => {
                removals.void.insert(key.clone());
            }
        }
    }
    removals.tags = tags.into_iter().filter(|tag| !local.tags.contains_key(tag)).collect();
    removals
}

fn in_bucket(view: &View, tag: &str) -> bool {
    Key::new(Folder::Tags, tag).is_ok_and(|key| view.has(&key))
}

fn lies_here(local: &Local, key: &Key) -> bool {
    let name = key.name();
    match key.folder() {
        Folder::Packs => local.packs.contains(name),
        Folder::Tags => local.tags.contains_key(name),
        Folder::Snapshots => {
            names::parse_manifest_name(name).is_some_and(|seq| local.manifests.contains_key(&seq))
                || names::parse_tombstone_name(name).is_some_and(|seq| local.tombstones.contains(&seq))
        }
        Folder::Receipts => {
            names::parse_receipt_name(name).is_some_and(|number| local.receipts.contains_key(&number))
        }
        _ => true,
    }
}

/// Packs of which, if no manifest of the bucket names them, nobody knows whose they were: they don't lie here, and are
/// old by the clock of the bucket, whose time is now `now_unix_ms`.
pub(super) fn orphans(local: &Local, view: &View, now_unix_ms: u64, age_milliseconds: u64) -> Vec<String> {
    let is_old = |modified: u64| now_unix_ms.saturating_sub(modified) >= age_milliseconds;
    view.rows(Folder::Packs)
        .filter(|(name, row)| names::parse_pack_name(name).is_some() && is_old(row.modified_unix_ms))
        .map(|(name, _)| name)
        .filter(|name| !local.packs.contains(*name))
        .cloned()
        .collect()
}
