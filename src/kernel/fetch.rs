//! Reading what is not in the cache, at the speed of memory.
//!
//! A loop that asks for one line after the other waits for memory most of the time. Here the lines of the
//! next pages are asked for while the caller has the current ones, four pages in turn.

/// Bytes that the caller gets at a time.
const PIECE_BYTES: usize = 4096;
/// Pages asked for in turn while pieces of the group before are taken.
const GROUP_PAGES: usize = 4;
const GROUP_BYTES: usize = GROUP_PAGES * PIECE_BYTES;
const LINE_BYTES: usize = 64;

/// Gives all of `bytes` to `take`, in order and in pieces of a page, the last one shorter.
pub fn walk(bytes: &[u8], mut take: impl FnMut(&[u8])) {
    for (number, piece) in bytes.chunks(PIECE_BYTES).enumerate() {
        let next_group = (number / GROUP_PAGES + 1) * GROUP_BYTES;
        if let Some(group) = bytes.get(next_group..next_group + GROUP_BYTES) {
            ask_for_quarter(group, number % GROUP_PAGES);
        }
        take(piece);
    }
}

/// Asks for a quarter of the lines of each page of a group.
#[inline]
fn ask_for_quarter(group: &[u8], quarter: usize) {
    const QUARTER_BYTES: usize = PIECE_BYTES / GROUP_PAGES;
    #[cfg(target_arch = "x86_64")]
    for line in (quarter * QUARTER_BYTES..(quarter + 1) * QUARTER_BYTES).step_by(LINE_BYTES) {
        for page in (0..GROUP_BYTES).step_by(PIECE_BYTES) {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let address = group.as_ptr().wrapping_add(page + line).cast::<i8>();
            // SAFETY: every x86-64 processor has it, and a prefetch never faults, wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(address) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (group, quarter, QUARTER_BYTES, LINE_BYTES);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_taken_once_and_in_order() {
        for length in [0, 1, 4095, 4096, 4097, GROUP_BYTES, 3 * GROUP_BYTES - 1, 3 * GROUP_BYTES + 5000] {
            let bytes: Vec<u8> = (0..length).map(|index| (index * 31 + (index >> 8)) as u8).collect();
            let mut taken = Vec::new();
            walk(&bytes, |piece| taken.extend_from_slice(piece));
            assert_eq!(taken, bytes);
        }
    }
}
