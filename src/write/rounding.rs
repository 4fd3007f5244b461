//! Finds entries that are other entries of the same state, rounded: a bf16 model beside its fp32 master.
//!
//! By content, not by name: the first elements of every wide float, rounded, are looked up among the first
//! elements of the narrow ones. Whether a chunk really is the other one rounded is decided chunk by chunk,
//! from all of its bytes.

use std::collections::{HashMap, HashSet};

use crate::cast;
use crate::tensor::Dtype;

use super::EntryInput;

/// Elements that are compared to find a candidate.
const SAMPLE_ELEMENTS: usize = 64;

/// By entry, the entry that it may be rounded from.
#[derive(Debug, Default)]
pub(super) struct Rounding<'a> {
    sources: HashMap<usize, Wide<'a>>,
}

#[derive(Clone, Copy, Debug)]
struct Wide<'a> {
    entry: usize,
    dtype: Dtype,
    elements: &'a [u8],
}

impl<'a> Rounding<'a> {
    /// Looks for pairs among the entries whose bytes are at hand and are stored without a cast.
    pub(super) fn find(entries: &[EntryInput], sources: &[Option<&'a [u8]>]) -> Self {
        let bytes_of = |entry: &EntryInput| {
            entry
                .source
                .and_then(|source| sources[source])
                .filter(|bytes| !bytes.is_empty() && entry.stored_dtype == entry.dtype)
        };
        let is_narrow = |entry: &EntryInput| entry.rank.is_none() && Dtype::Float64.narrows_to(entry.dtype);
        let narrow: Vec<(usize, &EntryInput, &[u8])> = entries
            .iter()
            .enumerate()
            .filter(|(_, entry)| is_narrow(entry))
            .filter_map(|(index, entry)| Some((index, entry, bytes_of(entry)?)))
            .collect();
        let mut dtypes: Vec<Dtype> = Vec::new();
        for (_, entry, _) in &narrow {
            if !dtypes.contains(&entry.dtype) {
                dtypes.push(entry.dtype);
            }
        }
        let mut wide = HashMap::new();
        for (index, entry) in entries.iter().enumerate().filter(|(_, entry)| entry.rank.is_none()) {
            for dtype in dtypes.iter().filter(|dtype| entry.dtype.narrows_to(**dtype)) {
                let Some(elements) = bytes_of(entry) else { continue };
                let Some(sample) = rounded_sample(entry.dtype, *dtype, elements) else { continue };
                let found = Wide { entry: index, dtype: entry.dtype, elements };
                wide.entry((*dtype, &entry.region, sample)).or_insert(found);
            }
        }
        let mut sources: HashMap<usize, Wide<'_>> = narrow
            .into_iter()
            .filter_map(|(index, entry, bytes)| {
                let length = bytes.len().min(SAMPLE_ELEMENTS * entry.dtype.size_bytes() as usize);
                let key = (entry.dtype, &entry.region, bytes[..length].to_vec());
                let same_shape = |found: &&Wide<'_>| entries[found.entry].shape == entry.shape;
                wide.get(&key).filter(same_shape).map(|found| (index, *found))
            })
            .collect();
        // What an entry is rounded from has chunks of its own.
        let rounded: HashSet<usize> = sources.keys().copied().collect();
        sources.retain(|_, wide| !rounded.contains(&wide.entry));
        Self { sources }
    }

    /// The entry that this one may be rounded from.
    pub(super) fn source_of(&self, entry: usize) -> Option<usize> {
        self.sources.get(&entry).map(|wide| wide.entry)
    }

    /// The elements that `count` elements of an entry, from `first`, may be rounded from, and their dtype.
    pub(super) fn wide_elements(&self, entry: usize, first: u64, count: u64) -> Option<(Dtype, &'a [u8])> {
        let wide = self.sources.get(&entry)?;
        let size = wide.dtype.size_bytes();
        let elements = wide.elements.get((first * size) as usize..((first + count) * size) as usize)?;
        Some((wide.dtype, elements))
    }
}

/// The first elements of a wide float, rounded.
fn rounded_sample(from: Dtype, to: Dtype, elements: &[u8]) -> Option<Vec<u8>> {
    let size = from.size_bytes() as usize;
    let count = (elements.len() / size).min(SAMPLE_ELEMENTS);
    let mut sample = vec![0; count * to.size_bytes() as usize];
    cast::narrow(from, to, 0, &elements[..count * size], &mut sample).ok()?;
    Some(sample)
}
