//! The few elements that differ from a base chunk: gaps between them, and differences (FORMAT.md, "Sparse").
#![expect(clippy::inline_always, reason = "only what is inlined is compiled for wide vectors")]

use crate::error::Result;
use crate::kernel::with_wide_vectors;

use super::Workspace;
use super::input::{Input, flaw};
use super::planes::{WIDTH_LIMIT_BYTES, grow, read_width};
use super::words::{self, BLOCK_WORDS, Order, Transform, Word, by_width};

/// A gap byte that means: so many unchanged elements, and the gap goes on.
const ESCAPE: u8 = u8::MAX;
/// Elements that are looked at together before one is looked at alone.
const RUN_WORDS: usize = 16;

/// Changed elements of a chunk, reused from chunk to chunk.
#[derive(Default)]
pub(super) struct Changes {
    /// Indices of changed elements, ascending.
    positions: Vec<u32>,
    /// Their zigzag differences, never 0.
    differences: Vec<u64>,
    /// Gaps as bytes.
    gaps: Vec<u8>,
}

impl Changes {
    /// Finds all changed elements; false, and nothing of use, where there are more than `limit`.
    fn find(&mut self, width_bytes: usize, transform: Transform<'_>, raw: &[u8], limit: usize) -> bool {
        self.positions.clear();
        self.differences.clear();
        with_wide_vectors(
            #[inline(always)]
            || by_width!(width_bytes, find_words(self, transform, raw, limit)),
        )
    }

    fn write_gaps(&mut self) {
        self.gaps.clear();
        let mut next = 0;
        for &position in &self.positions {
            let mut gap = position - next;
            while gap >= u32::from(ESCAPE) {
                self.gaps.push(ESCAPE);
                gap -= u32::from(ESCAPE);
            }
            self.gaps.push(gap as u8);
            next = position + 1;
        }
    }
}

#[inline(always)]
fn find_words<W: Word>(changes: &mut Changes, transform: Transform<'_>, raw: &[u8], limit: usize) -> bool {
    let count = raw.len() / W::BYTES;
    let mut block = [W::default(); BLOCK_WORDS];
    let mut positions = [0_u32; BLOCK_WORDS + 1];
    let mut differences = [0_u64; BLOCK_WORDS + 1];
    for first in (0..count).step_by(BLOCK_WORDS) {
        let words = &mut block[..BLOCK_WORDS.min(count - first)];
        words::load_block(transform, raw, first, words);
        let mut found = 0;
        for (run, start) in words.chunks(RUN_WORDS).zip((first..).step_by(RUN_WORDS)) {
            if run.iter().fold(0, |any, word| any | word.widened()) == 0 {
                continue;
            }
            for (word, position) in run.iter().zip(start..) {
                positions[found] = position as u32;
                differences[found] = word.widened();
                found += usize::from(word.widened() != 0);
            }
        }
        changes.positions.extend_from_slice(&positions[..found]);
        changes.differences.extend_from_slice(&differences[..found]);
        if changes.positions.len() > limit {
            return false;
        }
    }
    true
}

/// Appends header, gaps, planes of differences and tail; false, with `out` as it was, where more than half
/// of the elements changed.
pub(super) fn encode(
    width_bytes: usize,
    order: Order,
    base: &[u8],
    raw: &[u8],
    workspace: &mut Workspace,
    out: &mut Vec<u8>,
) -> bool {
    let Workspace { coder, planes, changes } = workspace;
    let element_count = raw.len() / width_bytes;
    if !changes.find(width_bytes, Transform::Difference(order, base), raw, element_count / 2) {
        return false;
    }
    changes.write_gaps();
    let count = changes.positions.len();
    out.extend_from_slice(&[width_bytes as u8, order.number()]);
    out.extend_from_slice(&(count as u32).to_le_bytes());
    out.extend_from_slice(&(changes.gaps.len() as u32).to_le_bytes());
    coder.append(&changes.gaps, out);
    grow(planes, count);
    let plane_count = if count > 0 { width_bytes } else { 0 };
    for plane in 0..plane_count {
        let bytes = &mut planes[..count];
        for (byte, difference) in bytes.iter_mut().zip(&changes.differences) {
            *byte = difference.byte(plane);
        }
        coder.append(bytes, out);
    }
    out.extend_from_slice(&raw[element_count * width_bytes..]);
    true
}

/// Decodes what [`encode`] wrote: the base, and the changes on top.
pub(super) fn decode(
    mut input: Input<'_>,
    base: &[u8],
    raw: &mut [u8],
    workspace: &mut Workspace,
) -> Result<()> {
    let Workspace { coder, planes, .. } = workspace;
    let width_bytes = read_width(&mut input)?;
    let order = Order::from_number(input.byte()?)?;
    let element_count = raw.len() / width_bytes;
    let count = input.u32()? as usize;
    let gap_count = input.u32()? as usize;
    let escape_count = gap_count.checked_sub(count);
    if escape_count
        .is_none_or(|escapes| count > element_count || escapes > element_count / usize::from(ESCAPE))
    {
        return Err(flaw(format!(
            "changes {count} of {element_count} elements at gaps of so many bytes: {gap_count}"
        )));
    }
    grow(planes, gap_count + count * width_bytes);
    let (gaps, rest) = planes.split_at_mut(gap_count);
    coder.read(&mut input, gaps)?;
    let rest = &mut rest[..count * width_bytes];
    let mut sources: [&[u8]; WIDTH_LIMIT_BYTES] = Default::default();
    for (source, plane) in sources[..width_bytes].iter_mut().zip(rest.chunks_exact_mut(count.max(1))) {
        coder.read(&mut input, plane)?;
        *source = plane;
    }
    raw.copy_from_slice(base);
    let tail = &mut raw[element_count * width_bytes..];
    tail.copy_from_slice(input.bytes(tail.len())?);
    input.finish()?;
    by_width!(width_bytes, apply(order, gaps, &sources[..width_bytes], raw))
}

/// Moves the element behind each gap by its difference.
fn apply<W: Word>(order: Order, gaps: &[u8], planes: &[&[u8]], raw: &mut [u8]) -> Result<()> {
    let flip_mask = W::flip_mask(order);
    let count = planes.first().map_or(0, |plane| plane.len());
    let mut change = 0;
    let mut position = 0;
    for &gap in gaps {
        position += usize::from(gap);
        if gap == ESCAPE {
            continue;
        }
        let start = position * W::BYTES;
        let Some(element) = raw.get_mut(start..start + W::BYTES).filter(|_| change < count) else {
            return Err(flaw(format!("changes an element behind the last, at: {position}")));
        };
        let mut word = [W::default()];
        W::read(element, &mut word);
        let difference = planes
            .iter()
            .enumerate()
            .fold(W::default(), |word, (plane, bytes)| word.with_byte(plane, bytes[change]));
        W::write(&[word[0].moved(difference, flip_mask)], element);
        change += 1;
        position += 1;
    }
    if change == count { Ok(()) } else { Err(flaw(format!("has {change} gaps, but changes: {count}"))) }
}
