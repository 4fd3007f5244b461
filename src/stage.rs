//! Staging: copies tensors into memory that training will not touch. The only thing callers wait for.
//!
//! The memory is one arena, kept between saves: copying into fresh memory costs several times more than
//! into pages that are there already. An arena grows when a state grows and is never shared by two saves.
//!
//! A source that stays as it is for a while ([`Later`]) is copied after the caller has gone on.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::MmapMut;
use rayon::prelude::*;

use crate::batch::split_batch;
use crate::error::{Error, Result};
use crate::kernel;
use crate::threads::Threads;

/// Bytes that one thread copies at a time.
const PIECE_BYTES: usize = 4 << 20;
/// Alignment of each tensor in the arena: a cache line, which also suits non-temporal stores.
const ALIGNMENT_BYTES: usize = 64;
/// Bytes of an arena that are made present by one call of one thread.
#[cfg(target_os = "linux")]
const POPULATE_BYTES: usize = 32 << 20;
/// Arenas grow in these steps, so that a state that changes a little keeps its arena.
const GROWTH_BYTES: usize = 16 << 20;

/// Bytes of later sources that are copied before they are let go of together.
const GROUP_BYTES: usize = 64 << 20;

/// Sources that a save copies on its own thread, after the caller has gone on.
///
/// The bytes of each stay what they were when the save began until it is let go of. All that were not are
/// let go of by a drop.
pub trait Later: Debug + Send {
    /// Number of sources.
    fn count(&self) -> usize;

    /// True for a source that stays as it is until the end of the save, and so needs no copy.
    fn is_kept(&self, position: usize) -> bool;

    /// Waits until the bytes are there; called once, before any are read.
    ///
    /// # Errors
    /// Whatever kept them from arriving.
    fn arrive(&mut self) -> Result<()>;

    /// The bytes of one source.
    fn bytes(&self, position: usize) -> &[u8];

    /// Lets go of sources: nobody reads them again.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where one did not stay as it was.
    fn let_go(&mut self, positions: &[usize]) -> Result<()>;
}

/// Keeps the arena of the last save for the next one.
#[derive(Debug, Default)]
pub struct StagePool {
    idle: Mutex<Option<MmapMut>>,
}

/// Copies of all tensors of a save; gives its memory back when dropped.
#[derive(Debug)]
pub struct Staged {
    arena: Option<MmapMut>,
    spans: Vec<Range<usize>>,
    pool: Arc<StagePool>,
}

impl Staged {
    /// The copies, in the order of the sources.
    #[must_use]
    pub fn slices(&self) -> Vec<&[u8]> {
        let arena: &[u8] = self.arena.as_deref().unwrap_or(&[]);
        self.spans.iter().map(|span| &arena[span.clone()]).collect()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(arena) = self.arena.take() {
            let mut idle = self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner);
            // Of the arenas of one save the largest is worth keeping.
            if idle.as_ref().is_none_or(|kept| kept.len() < arena.len()) {
                *idle = Some(arena);
            }
        }
    }
}

/// Copies all sources with all threads of the pool.
///
/// # Errors
/// [`Error::Store`] where the system has no memory for the copy.
pub fn stage(pool: &Arc<StagePool>, threads: &Threads, sources: &[&[u8]]) -> Result<Staged> {
    let (spans, length) = lay_out(sources.iter().map(|source| source.len()));
    let arena = pool.take(length, threads)?;
    let mut staged = Staged { arena, spans, pool: Arc::clone(pool) };
    if let Some(arena) = staged.arena.as_mut() {
        copy_all(&mut arena[..length], sources, threads)?;
    }
    Ok(staged)
}

/// Copies later sources group by group, and lets go of each group at once.
///
/// # Errors
/// [`Error::Interrupted`] after a cancel; [`Error::Store`] as [`stage`]; whatever [`Later`] reports.
pub fn stage_later(
    pool: &Arc<StagePool>,
    threads: &Threads,
    later: &mut dyn Later,
    positions: &[usize],
    cancelled: &AtomicBool,
) -> Result<Staged> {
    let (spans, length) = lay_out(positions.iter().map(|&position| later.bytes(position).len()));
    let arena = pool.take(length, threads)?;
    let mut staged = Staged { arena, spans, pool: Arc::clone(pool) };
    let mut arena = staged.arena.as_deref_mut().unwrap_or(&mut []);
    let mut rest = positions;
    while !rest.is_empty() {
        if cancelled.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        let length = |&position: &usize| later.bytes(position).len().next_multiple_of(ALIGNMENT_BYTES);
        let (group, after) =
            split_batch(rest, usize::MAX, GROUP_BYTES as u64, |position| length(position) as u64);
        let group_length = group.iter().map(length).sum();
        let (target, beyond) = arena.split_at_mut(group_length);
        let sources: Vec<&[u8]> = group.iter().map(|&position| later.bytes(position)).collect();
        copy_all(target, &sources, threads)?;
        later.let_go(group)?;
        (rest, arena) = (after, beyond);
    }
    Ok(staged)
}

/// Where sources of these lengths lie in an arena, each aligned, and the length of it all.
fn lay_out(lengths: impl Iterator<Item = usize>) -> (Vec<Range<usize>>, usize) {
    let mut end = 0;
    let spans = lengths
        .map(|length| {
            let start = end;
            end = (start + length).next_multiple_of(ALIGNMENT_BYTES);
            start..start + length
        })
        .collect();
    (spans, end)
}

impl StagePool {
    /// The kept arena if it is large enough, else a new one with every page present.
    fn take(&self, length: usize, threads: &Threads) -> Result<Option<MmapMut>> {
        if length == 0 {
            return Ok(None);
        }
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(arena) = idle.filter(|arena| arena.len() >= length) {
            return Ok(Some(arena));
        }
        let mut arena = MmapMut::map_anon(length.next_multiple_of(GROWTH_BYTES))
            .map_err(Error::store("reserve staging memory for", format!("{length} bytes")))?;
        #[cfg(target_os = "linux")]
        {
            // Only a hint: without huge pages everything works, with more page faults.
            let _ = arena.advise(memmap2::Advice::HugePage);
        }
        threads.pool()?.install(|| make_present(&mut arena));
        Ok(Some(arena))
    }
}

/// Makes every page of an arena present, in parallel.
fn make_present(arena: &mut MmapMut) {
    #[cfg(target_os = "linux")]
    {
        let starts: Vec<usize> = (0..arena.len()).step_by(POPULATE_BYTES).collect();
        let populated = starts.par_iter().with_max_len(1).all(|&start| {
            let length = POPULATE_BYTES.min(arena.len() - start);
            arena.advise_range(memmap2::Advice::PopulateWrite, start, length).is_ok()
        });
        if populated {
            return;
        }
    }
    // An older kernel: touch each page instead, at several times the cost.
    arena
        .par_chunks_mut(PIECE_BYTES)
        .for_each(|piece| piece.iter_mut().step_by(4096).for_each(|byte| *byte = 0));
}

/// A stretch of the arena and the sources that fill it, with their offsets in the stretch.
struct Piece<'arena, 'source> {
    target: &'arena mut [u8],
    sources: Vec<(usize, &'source [u8])>,
}

impl Piece<'_, '_> {
    fn copy(self) {
        for (offset, source) in self.sources {
            kernel::copy(&mut self.target[offset..offset + source.len()], source);
        }
    }
}

fn copy_all(arena: &mut [u8], sources: &[&[u8]], threads: &Threads) -> Result<()> {
    let mut pieces: Vec<Piece<'_, '_>> = Vec::new();
    let mut rest = arena;
    let mut small: Vec<(usize, &[u8])> = Vec::new();
    let mut small_length = 0;
    for source in sources {
        if source.len() >= PIECE_BYTES && small_length > 0 {
            let (target, after) = rest.split_at_mut(small_length);
            pieces.push(Piece { target, sources: std::mem::take(&mut small) });
            (rest, small_length) = (after, 0);
        }
        if source.len() >= PIECE_BYTES {
            for part in source.chunks(PIECE_BYTES) {
                let (target, after) =
                    rest.split_at_mut(part.len().next_multiple_of(ALIGNMENT_BYTES).min(rest.len()));
                pieces.push(Piece { target, sources: vec![(0, part)] });
                rest = after;
            }
            continue;
        }
        small.push((small_length, source));
        small_length = (small_length + source.len()).next_multiple_of(ALIGNMENT_BYTES).min(rest.len());
        if small_length >= PIECE_BYTES {
            let (target, after) = rest.split_at_mut(small_length);
            pieces.push(Piece { target, sources: std::mem::take(&mut small) });
            (rest, small_length) = (after, 0);
        }
    }
    pieces.push(Piece { target: rest, sources: small });
    if pieces.len() == 1 {
        // To wake another thread would take longer.
        pieces.into_iter().for_each(Piece::copy);
        return Ok(());
    }
    threads.pool()?.install(|| pieces.into_par_iter().with_max_len(1).for_each(Piece::copy));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(length: usize, seed: usize) -> Vec<u8> {
        (0..length).map(|index| (index * 31 + seed * 7 + (index >> 9)) as u8).collect()
    }

    #[test]
    fn copies_equal_their_sources_for_all_mixes_of_sizes() {
        let pool = Arc::new(StagePool::default());
        let threads = Threads::new(2);
        let sizes = [
            0,
            1,
            63,
            64,
            65,
            PIECE_BYTES - 1,
            5,
            PIECE_BYTES,
            7,
            PIECE_BYTES + 1,
            2 * PIECE_BYTES + 65,
            0,
            9,
            PIECE_BYTES / 2,
            PIECE_BYTES / 2,
            3,
        ];
        let data: Vec<Vec<u8>> = sizes.iter().enumerate().map(|(seed, &size)| pattern(size, seed)).collect();
        let sources: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        for _ in 0..2 {
            let staged = stage(&pool, &threads, &sources).unwrap();
            assert_eq!(staged.slices(), sources);
        }
    }

    #[test]
    fn the_arena_is_used_again_and_grows_only_when_it_must() {
        let pool = Arc::new(StagePool::default());
        let threads = Threads::new(1);
        let large = pattern(GROWTH_BYTES + 1, 1);
        let address = |pool: &StagePool| {
            pool.idle.lock().unwrap().as_ref().map(|arena| (arena.as_ptr().addr(), arena.len()))
        };
        drop(stage(&pool, &threads, &[&large]).unwrap());
        let first = address(&pool).unwrap();
        assert_eq!(first.1, 2 * GROWTH_BYTES);
        drop(stage(&pool, &threads, &[&large[..100]]).unwrap());
        assert_eq!(address(&pool).unwrap(), first);
    }

    /// Sources that note how they are let go of.
    #[derive(Debug, Default)]
    struct Lent {
        sources: Vec<Vec<u8>>,
        groups: Vec<Vec<usize>>,
        changed: Option<usize>,
    }

    impl Later for Lent {
        fn count(&self) -> usize {
            self.sources.len()
        }

        fn is_kept(&self, _position: usize) -> bool {
            false
        }

        fn arrive(&mut self) -> Result<()> {
            Ok(())
        }

        fn bytes(&self, position: usize) -> &[u8] {
            assert!(
                self.groups.iter().all(|group| !group.contains(&position)),
                "read after it was let go of"
            );
            &self.sources[position]
        }

        fn let_go(&mut self, positions: &[usize]) -> Result<()> {
            self.groups.push(positions.to_vec());
            match self.changed {
                Some(changed) if positions.contains(&changed) => Err(Error::invalid("tensor", "changed")),
                _ => Ok(()),
            }
        }
    }

    #[test]
    fn later_sources_are_copied_and_let_go_of_in_groups() {
        let sizes = [3, GROUP_BYTES - 64, 7, GROUP_BYTES + 1, 0, 64, 65];
        let sources: Vec<Vec<u8>> =
            sizes.iter().enumerate().map(|(seed, &size)| pattern(size, seed)).collect();
        let mut later = Lent { sources: sources.clone(), ..Lent::default() };
        let pool = Arc::new(StagePool::default());
        let order = [0, 1, 3, 2, 6, 5, 4];
        let cancelled = AtomicBool::new(false);
        let staged = stage_later(&pool, &Threads::new(2), &mut later, &order, &cancelled).unwrap();
        let expected: Vec<&[u8]> = order.iter().map(|&position| sources[position].as_slice()).collect();
        assert_eq!(staged.slices(), expected);
        assert_eq!(later.groups, [vec![0, 1], vec![3], vec![2, 6, 5, 4]]);
    }

    #[test]
    fn a_copy_of_later_sources_ends_with_a_cancel_or_a_change_and_gives_its_memory_back() {
        let pool = Arc::new(StagePool::default());
        let threads = Threads::new(1);
        let mut later =
            Lent { sources: vec![pattern(100, 1), pattern(100, 2)], changed: Some(1), ..Lent::default() };
        let failed = stage_later(&pool, &threads, &mut later, &[0, 1], &AtomicBool::new(false));
        assert!(matches!(failed, Err(Error::InvalidInput { .. })), "{failed:?}");
        assert!(pool.idle.lock().unwrap().is_some());
        let mut later = Lent { sources: vec![pattern(100, 1)], ..Lent::default() };
        let cancelled = stage_later(&pool, &threads, &mut later, &[0], &AtomicBool::new(true));
        assert!(matches!(cancelled, Err(Error::Interrupted)), "{cancelled:?}");
        assert!(later.groups.is_empty());
    }

    #[test]
    fn a_state_without_bytes_needs_no_memory() {
        let pool = Arc::new(StagePool::default());
        let staged = stage(&pool, &Threads::new(1), &[&[], &[]]).unwrap();
        assert_eq!(staged.slices(), [b"".as_slice(), b"".as_slice()]);
    }
}
