//! Elements as unsigned words: what makes their bytes cheap to code, and the planes of those bytes.
//!
//! A transform maps each element to a word of the same width, one to one: rotated, so that an exponent
//! fills one byte; or the difference from the element of a base chunk, in an order that floats of nearby
//! value share. Plane `p` holds byte `p` of every word, from the least significant one.
#![expect(clippy::inline_always, reason = "only what is inlined is compiled for wide vectors")]

use crate::error::Result;
use crate::kernel::with_wide_vectors;

use super::input::flaw;

/// Words that are transformed at once: they stay in the nearest cache between two passes.
pub(super) const BLOCK_WORDS: usize = 512;

/// In which order the words of a dtype are subtracted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// As two's complement integers; unsigned ones too, since differences wrap.
    Integer,
    /// As floats of sign and magnitude: neighbours in value are neighbours in order.
    Float,
}

impl Order {
    /// Its number in stored bytes.
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Integer => 0,
            Self::Float => 1,
        }
    }

    /// The order of this number.
    pub(super) fn from_number(number: u8) -> Result<Self> {
        match number {
            0 => Ok(Self::Integer),
            1 => Ok(Self::Float),
            _ => Err(flaw(format!("subtracts in an unknown order: {number}"))),
        }
    }
}

/// How an element becomes a word.
#[derive(Clone, Copy)]
pub(super) enum Transform<'a> {
    /// Rotated left by so many bits, fewer than the word has.
    Rotation(u32),
    /// Difference from the element at the same place of these bytes, zigzag: 0, -1, 1, -2, ...
    Difference(Order, &'a [u8]),
}

/// An unsigned integer as wide as an element.
pub(super) trait Word: Copy + Default + 'static {
    /// Width in bytes.
    const BYTES: usize;
    /// Fills the words with the little-endian elements of `raw`, one for each.
    fn read(raw: &[u8], words: &mut [Self]);
    /// Writes the words as little-endian elements, one for each.
    fn write(words: &[Self], raw: &mut [u8]);
    /// Rotated left; `bits` is below the width.
    fn rotated(self, bits: u32) -> Self;
    /// Rotated right; `bits` is below the width.
    fn unrotated(self, bits: u32) -> Self;
    /// The bits that are flipped in negative words to bring them into this order.
    fn flip_mask(order: Order) -> Self;
    /// All ones for a word with the top bit set, else 0.
    fn sign_fill(self) -> Self;
    /// Flipped where negative. The sign stays, so that this is its own inverse.
    fn ordered(self, flip_mask: Self) -> Self;
    /// The zigzag difference of two elements.
    fn difference(self, base: Self, flip_mask: Self) -> Self;
    /// The element at this zigzag difference from `self`.
    fn moved(self, difference: Self, flip_mask: Self) -> Self;
    /// Byte `plane`.
    fn byte(self, plane: usize) -> u8;
    /// With byte `plane` set, which was 0.
    fn with_byte(self, plane: usize, byte: u8) -> Self;
    /// Widened to 64 bits.
    fn widened(self) -> u64;
}

macro_rules! implement_word {
    ($($word:ty),*) => {$(
        impl Word for $word {
            const BYTES: usize = size_of::<Self>();

            #[inline(always)]
            fn read(raw: &[u8], words: &mut [Self]) {
                for (word, element) in words.iter_mut().zip(raw.as_chunks().0) {
                    *word = Self::from_le_bytes(*element);
                }
            }

            #[inline(always)]
            fn write(words: &[Self], raw: &mut [u8]) {
                for (word, element) in words.iter().zip(raw.as_chunks_mut().0) {
                    *element = word.to_le_bytes();
                }
            }

            #[inline(always)]
            fn rotated(self, bits: u32) -> Self {
                self.rotate_left(bits)
            }

            #[inline(always)]
            fn unrotated(self, bits: u32) -> Self {
                self.rotate_right(bits)
            }

            #[inline(always)]
            fn flip_mask(order: Order) -> Self {
                match order {
                    Order::Integer => 0,
                    Order::Float => Self::MAX >> 1,
                }
            }

            #[inline(always)]
            fn sign_fill(self) -> Self {
                (self.cast_signed() >> (Self::BITS - 1)).cast_unsigned()
            }

            #[inline(always)]
            fn difference(self, base: Self, flip_mask: Self) -> Self {
                let difference = self.ordered(flip_mask).wrapping_sub(base.ordered(flip_mask));
                difference << 1 ^ difference.sign_fill()
            }

            #[inline(always)]
            fn moved(self, difference: Self, flip_mask: Self) -> Self {
                let difference = difference >> 1 ^ (difference & 1).wrapping_neg();
                self.ordered(flip_mask).wrapping_add(difference).ordered(flip_mask)
            }

            #[inline(always)]
            fn ordered(self, flip_mask: Self) -> Self {
                self ^ (self.sign_fill() & flip_mask)
            }

            #[inline(always)]
            fn byte(self, plane: usize) -> u8 {
                (self >> (8 * plane)) as u8
            }

            #[inline(always)]
            fn with_byte(self, plane: usize, byte: u8) -> Self {
                self | Self::from(byte) << (8 * plane)
            }

            #[inline(always)]
            fn widened(self) -> u64 {
                u64::from(self)
            }
        }
    )*};
}

implement_word!(u8, u16, u32, u64);

/// Runs `$call::<word>` for the word of so many bytes: 1, 2, 4 or 8.
macro_rules! by_width {
    ($width:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $width {
            1 => $function::<u8>($($argument),*),
            2 => $function::<u16>($($argument),*),
            4 => $function::<u32>($($argument),*),
            _ => $function::<u64>($($argument),*),
        }
    };
}
pub(super) use by_width;

/// Transforms at most [`BLOCK_WORDS`] elements, the first of which is element `first` of the chunk.
#[inline(always)]
pub(super) fn load_block<W: Word>(transform: Transform<'_>, raw: &[u8], first: usize, words: &mut [W]) {
    let range = first * W::BYTES..(first + words.len()) * W::BYTES;
    W::read(&raw[range.clone()], words);
    match transform {
        Transform::Rotation(bits) => {
            for word in words {
                *word = word.rotated(bits);
            }
        }
        Transform::Difference(order, base) => {
            let mut base_words = [W::default(); BLOCK_WORDS];
            W::read(&base[range], &mut base_words[..words.len()]);
            let flip_mask = W::flip_mask(order);
            for (word, base) in words.iter_mut().zip(&base_words) {
                *word = word.difference(*base, flip_mask);
            }
        }
    }
}

/// The inverse of [`load_block`]; uses up the words.
#[inline(always)]
fn store_block<W: Word>(transform: Transform<'_>, words: &mut [W], first: usize, raw: &mut [u8]) {
    let range = first * W::BYTES..(first + words.len()) * W::BYTES;
    match transform {
        Transform::Rotation(bits) => {
            for word in &mut *words {
                *word = word.unrotated(bits);
            }
        }
        Transform::Difference(order, base) => {
            let mut base_words = [W::default(); BLOCK_WORDS];
            W::read(&base[range.clone()], &mut base_words[..words.len()]);
            let flip_mask = W::flip_mask(order);
            for (word, base) in words.iter_mut().zip(&base_words) {
                *word = base.moved(*word, flip_mask);
            }
        }
    }
    W::write(words, &mut raw[range]);
}

/// Transforms the elements of `raw` and spreads their bytes over `width_bytes` planes of equal length.
pub(super) fn split(width_bytes: usize, transform: Transform<'_>, raw: &[u8], planes: &mut [&mut [u8]]) {
    with_wide_vectors(
        #[inline(always)]
        || by_width!(width_bytes, split_words(transform, raw, planes)),
    );
}

#[inline(always)]
fn split_words<W: Word>(transform: Transform<'_>, raw: &[u8], planes: &mut [&mut [u8]]) {
    let count = raw.len() / W::BYTES;
    let mut block = [W::default(); BLOCK_WORDS];
    for first in (0..count).step_by(BLOCK_WORDS) {
        let words = &mut block[..BLOCK_WORDS.min(count - first)];
        load_block(transform, raw, first, words);
        for (index, plane) in planes.iter_mut().enumerate() {
            for (byte, word) in plane[first..first + words.len()].iter_mut().zip(&*words) {
                *byte = word.byte(index);
            }
        }
    }
}

/// The inverse of [`split`]; bytes of `raw` behind the last whole element stay.
pub(super) fn join(width_bytes: usize, transform: Transform<'_>, planes: &[&[u8]], raw: &mut [u8]) {
    with_wide_vectors(
        #[inline(always)]
        || by_width!(width_bytes, join_words(transform, planes, raw)),
    );
}

#[inline(always)]
fn join_words<W: Word>(transform: Transform<'_>, planes: &[&[u8]], raw: &mut [u8]) {
    let count = raw.len() / W::BYTES;
    let mut block = [W::default(); BLOCK_WORDS];
    for first in (0..count).step_by(BLOCK_WORDS) {
        let end = count.min(first + BLOCK_WORDS);
        let words = &mut block[..end - first];
        words.fill(W::default());
        for (index, plane) in planes.iter().enumerate() {
            for (word, &byte) in words.iter_mut().zip(&plane[first..end]) {
                *word = word.with_byte(index, byte);
            }
        }
        store_block(transform, words, first, raw);
    }
}
