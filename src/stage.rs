//! Staging: copies tensors into memory that training will not touch. The only thing callers wait for.
//!
//! The memory is one arena, kept between saves: copying into fresh memory costs several times more than
//! into pages that are there already. An arena grows when a state grows and is never shared by two saves.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::MmapMut;
use rayon::prelude::*;

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
            *self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner) = Some(arena);
        }
    }
}

/// Copies all sources with all threads of the pool.
///
/// # Errors
/// [`Error::Store`] where the system has no memory for the copy.
pub fn stage(pool: &Arc<StagePool>, threads: &Threads, sources: &[&[u8]]) -> Result<Staged> {
    let mut spans = Vec::with_capacity(sources.len());
    let mut length = 0;
    for source in sources {
        spans.push(length..length + source.len());
        length = (length + source.len()).next_multiple_of(ALIGNMENT_BYTES);
    }
    let mut arena = pool.take(length, threads)?;
    if let Some(arena) = arena.as_mut() {
        copy_all(&mut arena[..length], sources, threads)?;
    }
    Ok(Staged { arena, spans, pool: Arc::clone(pool) })
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
    threads.pool()?.install(|| {
        pieces.into_par_iter().with_max_len(1).for_each(|piece| {
            for (offset, source) in piece.sources {
                kernel::copy(&mut piece.target[offset..offset + source.len()], source);
            }
        });
    });
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

    #[test]
    fn a_state_without_bytes_needs_no_memory() {
        let pool = Arc::new(StagePool::default());
        let staged = stage(&pool, &Threads::new(1), &[&[], &[]]).unwrap();
        assert_eq!(staged.slices(), [b"".as_slice(), b"".as_slice()]);
    }
}
