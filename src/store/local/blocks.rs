//! Aligned buffers through which staged bytes reach the medium, and the pool that keeps them.
//!
//! Fresh memory costs a page fault every 4 KiB, several times the copy itself, so a store keeps the
//! blocks of one staged write for the next. A block is a slice of an over-allocated vector: aligned
//! without `unsafe`.

use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Length of a block in bytes: long enough that the device, not the system call, is the limit.
pub(super) const BLOCK_BYTES: usize = 4 << 20;

/// Alignment in bytes of memory, offset and length that every device accepts for direct writes.
pub(super) const ALIGNMENT_BYTES: usize = 4096;

/// Blocks that one staged write uses: two being written, one waiting, one being filled.
pub(super) const BLOCKS_PER_WRITE: usize = 4;

/// A buffer of [`BLOCK_BYTES`] that starts at a multiple of [`ALIGNMENT_BYTES`] in memory.
pub(super) struct Block {
    memory: Vec<u8>,
    /// Index of the first aligned byte of `memory`.
    start: usize,
    filled_bytes: usize,
}

impl Block {
    fn new() -> Self {
        let memory = vec![0; BLOCK_BYTES + ALIGNMENT_BYTES];
        // `align_offset` may give up with `usize::MAX`; an unaligned block is still written, through
        // the page cache.
        let offset = memory.as_ptr().align_offset(ALIGNMENT_BYTES);
        let start = if offset < ALIGNMENT_BYTES { offset } else { 0 };
        Self { memory, start, filled_bytes: 0 }
    }

    /// Copies as much of `bytes` as fits; returns how many bytes that was.
    pub(super) fn fill(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(BLOCK_BYTES - self.filled_bytes);
        let at = self.start + self.filled_bytes;
        self.memory[at..at + count].copy_from_slice(&bytes[..count]);
        self.filled_bytes += count;
        count
    }

    pub(super) fn is_full(&self) -> bool {
        self.filled_bytes == BLOCK_BYTES
    }

    /// The bytes filled in so far.
    pub(super) fn filled(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.filled_bytes]
    }

    /// Makes the block empty again.
    pub(super) fn clear(&mut self) {
        self.filled_bytes = 0;
    }

    /// Appends zeros up to the next multiple of [`ALIGNMENT_BYTES`].
    pub(super) fn pad(&mut self) {
        let end = self.filled_bytes.next_multiple_of(ALIGNMENT_BYTES);
        self.memory[self.start + self.filled_bytes..self.start + end].fill(0);
        self.filled_bytes = end;
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Block({} of {BLOCK_BYTES} bytes)", self.filled_bytes)
    }
}

/// Empty blocks of one store, at most [`BLOCKS_PER_WRITE`]; what comes back beyond that is freed.
#[derive(Debug, Default)]
pub(super) struct BlockPool {
    empty: Mutex<Vec<Block>>,
}

impl BlockPool {
    /// An empty block: a used one where there is one, so that its pages are already there.
    pub(super) fn take(&self) -> Block {
        let used = self.empty.lock().unwrap_or_else(PoisonError::into_inner).pop();
        used.unwrap_or_else(Block::new)
    }

    pub(super) fn give_back(&self, mut block: Block) {
        block.clear();
        let mut empty = self.empty.lock().unwrap_or_else(PoisonError::into_inner);
        if empty.len() < BLOCKS_PER_WRITE {
            empty.push(block);
        }
    }

    #[cfg(test)]
    pub(super) fn empty_count(&self) -> usize {
        self.empty.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_aligned_and_padded_with_zeros_whatever_it_held_before() {
        let pool = BlockPool::default();
        let mut block = pool.take();
        assert_eq!(block.fill(&vec![7; BLOCK_BYTES + 1]), BLOCK_BYTES);
        assert!(block.is_full());
        pool.give_back(block);

        let mut block = pool.take();
        assert_eq!(block.fill(&[1, 2, 3]), 3);
        block.pad();
        assert_eq!(block.filled().len(), ALIGNMENT_BYTES);
        assert_eq!(block.filled().as_ptr().align_offset(ALIGNMENT_BYTES), 0);
        assert_eq!(&block.filled()[..4], [1, 2, 3, 0]);
        assert!(block.filled()[3..].iter().all(|byte| *byte == 0), "old bytes must not be written again");
    }

    #[test]
    fn padding_a_full_or_empty_block_adds_nothing() {
        let mut block = Block::new();
        block.pad();
        assert_eq!(block.filled().len(), 0);
        block.fill(&vec![1; BLOCK_BYTES]);
        block.pad();
        assert_eq!(block.filled().len(), BLOCK_BYTES);
    }

    #[test]
    fn the_pool_reuses_blocks_and_keeps_only_as_many_as_one_write_uses() {
        let pool = BlockPool::default();
        let first = pool.take();
        let address = first.memory.as_ptr();
        pool.give_back(first);
        assert_eq!(pool.take().memory.as_ptr(), address);

        for block in (0..=BLOCKS_PER_WRITE).map(|_| Block::new()).collect::<Vec<_>>() {
            pool.give_back(block);
        }
        assert_eq!(pool.empty_count(), BLOCKS_PER_WRITE);
    }
}
