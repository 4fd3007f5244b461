//! Coded streams: a sequence of bytes as one value, as it is, or entropy-coded (FORMAT.md, "Coded streams").
//!
//! The coder is static and of order 0: one table for each stream, from its exact histogram. Streams say
//! nothing of how many symbols they have: who reads one knows.
#![expect(clippy::cast_precision_loss, reason = "lengths are far below 2^52")]

use crate::error::Result;
use crate::kernel::rans::{self, NARROW_LANES, WIDE_LANES};

use super::frequencies::{self, Counts};
use super::input::{Input, flaw};

/// A stream that codes to more than this share of its length is stored as it is: decoding it would cost
/// time and gain nothing worth it.
pub(super) const GAIN_SHARE: f64 = 0.97;
/// Shorter streams use few lanes: the states of many would outweigh their symbols.
const WIDE_FROM_SYMBOLS: usize = 32 * 1024;

const MODE_RAW: u8 = 0;
const MODE_CONSTANT: u8 = 1;
const MODE_WIDE: u8 = 2;
const MODE_NARROW: u8 = 3;

/// Tables and buffers of the coder, reused from stream to stream.
#[derive(Default)]
pub(super) struct Coder {
    encode_table: rans::EncodeTable,
    decode_table: rans::DecodeTable,
    words: Vec<u8>,
}

impl Coder {
    /// Appends the symbols as one stream.
    pub(super) fn append(&mut self, symbols: &[u8], out: &mut Vec<u8>) {
        if let Some(&first) = symbols.first()
            && symbols.iter().all(|&symbol| symbol == first)
        {
            out.extend_from_slice(&[MODE_CONSTANT, first]);
            return;
        }
        let counts = frequencies::count(symbols);
        if symbols.is_empty() || predicted_share(&counts, symbols.len()) > GAIN_SHARE {
            out.push(MODE_RAW);
            out.extend_from_slice(symbols);
            return;
        }
        let table = frequencies::normalise(&counts, symbols.len());
        self.encode_table.fill(&table);
        if symbols.len() >= WIDE_FROM_SYMBOLS {
            out.push(MODE_WIDE);
            self.append_coded::<WIDE_LANES>(&table, symbols, out);
        } else {
            out.push(MODE_NARROW);
            self.append_coded::<NARROW_LANES>(&table, symbols, out);
        }
    }

    fn append_coded<const LANES: usize>(
        &mut self,
        table: &rans::Frequencies,
        symbols: &[u8],
        out: &mut Vec<u8>,
    ) {
        let needed = rans::buffer_length_bytes(symbols.len());
        if self.words.len() < needed {
            self.words.resize(needed, 0);
        }
        let buffer = &mut self.words[..needed];
        let mut states = [0; LANES];
        let start = rans::encode(&self.encode_table, symbols, &mut states, buffer);
        let words = &buffer[start..];
        frequencies::append(table, out);
        out.extend_from_slice(&(words.len() as u32).to_le_bytes());
        out.extend(states.iter().flat_map(|state| state.to_le_bytes()));
        out.extend_from_slice(words);
    }

    /// Reads one stream of as many symbols as there is room for.
    pub(super) fn read(&mut self, input: &mut Input<'_>, symbols: &mut [u8]) -> Result<()> {
        match input.byte()? {
            MODE_RAW => {
                symbols.copy_from_slice(input.bytes(symbols.len())?);
                Ok(())
            }
            MODE_CONSTANT => {
                symbols.fill(input.byte()?);
                Ok(())
            }
            MODE_WIDE => self.read_coded::<WIDE_LANES>(input, symbols),
            MODE_NARROW => self.read_coded::<NARROW_LANES>(input, symbols),
            mode => Err(flaw(format!("has a stream of unknown mode: {mode}"))),
        }
    }

    fn read_coded<const LANES: usize>(&mut self, input: &mut Input<'_>, symbols: &mut [u8]) -> Result<()> {
        let table = frequencies::read(input)?;
        self.decode_table.fill(&table);
        let length_bytes = input.u32()? as usize;
        let mut states = [0; LANES];
        for state in &mut states {
            *state = input.u32()?;
        }
        let words = input.bytes(length_bytes)?;
        if rans::decode(&self.decode_table, &mut states, words, symbols) {
            Ok(())
        } else {
            Err(flaw(format!("has a coded stream that does not hold its symbols: {}", symbols.len())))
        }
    }
}

/// Stored bytes for each symbol, with the table and the states.
fn predicted_share(counts: &Counts, symbol_count: usize) -> f64 {
    (frequencies::entropy_bytes(counts) + fixed_bytes(counts, symbol_count)) / symbol_count as f64
}

/// Roughly what a coded stream takes beside its words.
pub(super) fn fixed_bytes(counts: &Counts, symbol_count: usize) -> f64 {
    let present = counts.iter().filter(|&&count| count > 0).count();
    let lanes = if symbol_count >= WIDE_FROM_SYMBOLS { WIDE_LANES } else { NARROW_LANES };
    if present > 1 { (size_of::<u32>() * (lanes + 1) + present) as f64 } else { 2.0 }
}
