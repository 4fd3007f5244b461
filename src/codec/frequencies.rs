//! Histograms of bytes, and the tables of frequencies that the entropy coder takes from them.

use crate::error::Result;
use crate::kernel::rans::{Frequencies, PROBABILITY_SUM};

use super::input::{Input, flaw};

/// How often each byte occurs.
pub(super) type Counts = [u32; 256];

/// Tables that are counted into in turn, so that runs of one symbol don't wait for one counter.
const COUNT_TABLES: usize = 8;

/// A frequency from here on takes two bytes in a stored table: 7 bits, then the rest.
const LONG_FREQUENCY: u16 = 128;

/// The histogram of at most 2^32 - 1 bytes.
pub(super) fn count(symbols: &[u8]) -> Counts {
    let mut tables = [[0_u32; 256]; COUNT_TABLES];
    let (words, rest) = symbols.as_chunks::<COUNT_TABLES>();
    for word in words {
        let mut symbols = u64::from_le_bytes(*word);
        for table in &mut tables {
            table[(symbols & 0xFF) as usize] += 1;
            symbols >>= 8;
        }
    }
    for &symbol in rest {
        tables[0][usize::from(symbol)] += 1;
    }
    std::array::from_fn(|symbol| tables.iter().map(|table| table[symbol]).sum())
}

/// Length of an ideal code of order 0 without its table, in bytes.
pub(super) fn entropy_bytes(counts: &Counts) -> f64 {
    let total: f64 = counts.iter().map(|&count| f64::from(count)).sum();
    let weighted: f64 = counts
        .iter()
        .filter(|&&count| count > 0)
        .map(|&count| f64::from(count) * f64::from(count).log2())
        .sum();
    if total > 0.0 { ((total * total.log2() - weighted) / 8.0).max(0.0) } else { 0.0 }
}

/// Frequencies for the coder: at least 1 for each symbol that occurs, [`PROBABILITY_SUM`] in all.
///
/// At least two symbols occur.
pub(super) fn normalise(counts: &Counts, total: usize) -> Frequencies {
    let total = total as u64;
    let mut table: Frequencies = counts.map(|count| {
        let rounded = (u64::from(count) * u64::from(PROBABILITY_SUM) + total / 2) / total;
        if count > 0 { rounded.max(1) as u16 } else { 0 }
    });
    let mut sum: u32 = table.iter().map(|&frequency| u32::from(frequency)).sum();
    while sum > PROBABILITY_SUM {
        let Some(symbol) = cheapest_to_shrink(counts, &table) else { break };
        table[symbol] -= 1;
        sum -= 1;
    }
    while sum < PROBABILITY_SUM {
        let Some(symbol) = best_to_grow(counts, &table) else { break };
        table[symbol] += 1;
        sum += 1;
    }
    table
}

/// The symbol that loses least by one less: the one with the fewest occurrences for its frequency.
fn cheapest_to_shrink(counts: &Counts, table: &Frequencies) -> Option<usize> {
    let loss = |symbol: usize| f64::from(counts[symbol]) / (f64::from(table[symbol]) - 0.5);
    let candidates = (0..table.len()).filter(|&symbol| table[symbol] > 1);
    candidates.min_by(|&left, &right| loss(left).total_cmp(&loss(right)))
}

fn best_to_grow(counts: &Counts, table: &Frequencies) -> Option<usize> {
    let gain = |symbol: usize| f64::from(counts[symbol]) / (f64::from(table[symbol]) + 0.5);
    let candidates = (0..table.len()).filter(|&symbol| table[symbol] > 0);
    candidates.max_by(|&left, &right| gain(left).total_cmp(&gain(right)))
}

/// Appends the table: first and last symbol, then each frequency between them; absent ones as runs.
pub(super) fn append(table: &Frequencies, out: &mut Vec<u8>) {
    let present = |&symbol: &usize| table[symbol] > 0;
    let first = (0..table.len()).find(present).unwrap_or(0);
    let last = (0..table.len()).rfind(present).unwrap_or(0);
    out.extend_from_slice(&[first as u8, last as u8]);
    let mut symbol = first;
    while symbol <= last {
        let frequency = table[symbol];
        if frequency == 0 {
            let absent = table[symbol..].iter().take_while(|&&frequency| frequency == 0).count();
            out.extend_from_slice(&[0, absent as u8]);
            symbol += absent;
            continue;
        }
        if frequency < LONG_FREQUENCY {
            out.push(frequency as u8);
        } else {
            out.extend_from_slice(&[(frequency | LONG_FREQUENCY) as u8, (frequency >> 7) as u8]);
        }
        symbol += 1;
    }
}

/// Reads a table and checks that a coder can use it.
pub(super) fn read(input: &mut Input<'_>) -> Result<Frequencies> {
    let mut table = [0; 256];
    let mut symbol = usize::from(input.byte()?);
    let end = usize::from(input.byte()?) + 1;
    let mut sum = 0;
    while symbol < end {
        let low = u16::from(input.byte()?);
        if low == 0 {
            symbol += usize::from(input.byte()?).max(1);
            continue;
        }
        let frequency =
            if low < LONG_FREQUENCY { low } else { (low - LONG_FREQUENCY) | u16::from(input.byte()?) << 7 };
        table[symbol] = frequency;
        sum += u32::from(frequency);
        symbol += 1;
    }
    let is_one_symbol = table.iter().any(|&frequency| u32::from(frequency) >= PROBABILITY_SUM);
    if sum != PROBABILITY_SUM || is_one_symbol {
        return Err(flaw(format!(
            "has a table whose frequencies don't share {PROBABILITY_SUM} but sum to: {sum}"
        )));
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts_of(pairs: &[(usize, u32)]) -> Counts {
        let mut counts = [0; 256];
        for &(symbol, count) in pairs {
            counts[symbol] = count;
        }
        counts
    }

    fn total_of(counts: &Counts) -> usize {
        counts.iter().map(|&count| count as usize).sum()
    }

    fn sum_of(table: &Frequencies) -> u32 {
        table.iter().map(|&frequency| u32::from(frequency)).sum()
    }

    #[test]
    fn counts_are_exact_for_every_tail() {
        for length in 0..40_usize {
            let symbols: Vec<u8> = (0..length).map(|index| (index * index % 7) as u8).collect();
            let counts = count(&symbols);
            for symbol in 0..=255_u8 {
                let expected = symbols.iter().filter(|found| **found == symbol).collect::<Vec<_>>().len();
                assert_eq!(counts[usize::from(symbol)] as usize, expected);
            }
        }
    }

    #[test]
    fn tables_are_full_and_forget_no_symbol() {
        let uniform = [1_u32; 256];
        let skewed = counts_of(&[(0, u32::MAX - 300), (7, 1), (255, 1)]);
        let mut rare = [1_u32; 256];
        rare[3] = 100_000_000;
        let two = counts_of(&[(10, 1), (11, 1)]);
        let odd: Counts = std::array::from_fn(|symbol| (symbol as u32 * 7919) % 1009);
        for counts in [uniform, skewed, rare, two, odd] {
            let table = normalise(&counts, total_of(&counts));
            assert_eq!(sum_of(&table), PROBABILITY_SUM);
            for symbol in 0..256 {
                assert_eq!(table[symbol] > 0, counts[symbol] > 0, "symbol {symbol}");
            }
            let mut stored = Vec::new();
            append(&table, &mut stored);
            let mut input = Input::new(&stored);
            assert_eq!(read(&mut input).unwrap(), table);
            input.finish().unwrap();
        }
    }

    #[test]
    fn a_table_that_is_not_full_is_refused() {
        for stored in [&[5, 6, 1, 1][..], &[5, 5, 128, 32], &[9, 5], &[0, 0, 255, 255], &[0, 255, 0, 255, 9]]
        {
            let error = read(&mut Input::new(stored)).unwrap_err().to_string();
            assert!(error.starts_with("invalid stored chunk: has a table"), "{error}");
        }
    }

    #[test]
    fn a_table_that_ends_early_is_refused() {
        let error = read(&mut Input::new(&[0, 3, 9])).unwrap_err().to_string();
        assert_eq!(error, "invalid stored chunk: ends 0 bytes into a field of: 1");
    }

    #[test]
    fn entropy_is_that_of_known_distributions() {
        assert!((entropy_bytes(&[16; 256]) - 4096.0).abs() < 1e-6);
        assert!((entropy_bytes(&counts_of(&[(1, 8), (2, 8)])) - 2.0).abs() < 1e-9);
        assert!(entropy_bytes(&counts_of(&[(1, 8)])).abs() < 1e-9);
    }
}
