use super::*;

/// Frequencies with a peak at `peak` that falls off by half, and at least one other symbol.
fn peaked(peak: u8) -> Frequencies {
    let mut table = [0; 256];
    let mut left = PROBABILITY_SUM as u16;
    let mut symbol = peak;
    while left > 1 {
        table[usize::from(symbol)] = left / 2;
        left -= left / 2;
        symbol = symbol.wrapping_add(1);
    }
    table[usize::from(symbol)] = left;
    table
}

/// As lopsided as a table can be.
fn lopsided() -> Frequencies {
    let mut table = [0; 256];
    table[7] = PROBABILITY_SUM as u16 - 1;
    table[200] = 1;
    table
}

/// Symbols that follow the table, in an order that repeats nothing.
fn symbols_of(table: &Frequencies, count: usize) -> Vec<u8> {
    let slots: Vec<u8> = (0..=255_u8)
        .flat_map(|symbol| std::iter::repeat_n(symbol, usize::from(table[usize::from(symbol)])))
        .collect();
    (0..count as u64).map(|index| slots[(index.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 52) as usize]).collect()
}

struct Coded<const LANES: usize> {
    states: [u32; LANES],
    words: Vec<u8>,
}

fn encoded<const LANES: usize>(table: &Frequencies, symbols: &[u8]) -> Coded<LANES> {
    let mut encode_table = EncodeTable::default();
    encode_table.fill(table);
    let mut buffer = vec![0xEE; buffer_length_bytes(symbols.len())];
    let mut states = [0; LANES];
    let start = encode(&encode_table, symbols, &mut states, &mut buffer);
    Coded { states, words: buffer[start..].to_vec() }
}

fn decoded<const LANES: usize>(table: &Frequencies, coded: &Coded<LANES>, count: usize) -> Option<Vec<u8>> {
    let mut decode_table = DecodeTable::default();
    decode_table.fill(table);
    let mut symbols = vec![0; count];
    let mut states = coded.states;
    decode(&decode_table, &mut states, &coded.words, &mut symbols).then_some(symbols)
}

const COUNTS: [usize; 9] = [0, 1, 3, 63, 64, 65, 640, 5_000, 70_001];

#[test]
fn symbols_come_back_at_every_length_and_width() {
    for table in [peaked(120), peaked(250), [16; 256], lopsided()] {
        for count in COUNTS {
            let symbols = symbols_of(&table, count);
            assert_eq!(decoded(&table, &encoded::<WIDE_LANES>(&table, &symbols), count).unwrap(), symbols);
            assert_eq!(decoded(&table, &encoded::<NARROW_LANES>(&table, &symbols), count).unwrap(), symbols);
        }
    }
}

#[test]
fn every_path_writes_the_same_words() {
    for table in [peaked(120), [16; 256], lopsided()] {
        let mut encode_table = EncodeTable::default();
        encode_table.fill(&table);
        for count in COUNTS {
            let symbols = symbols_of(&table, count);
            let of = |path: Path| {
                let (mut states, mut buffer) = ([0; WIDE_LANES], vec![0; buffer_length_bytes(count)]);
                let start = path.encode(&encode_table, &symbols, &mut states, &mut buffer);
                (states, buffer.split_off(start))
            };
            for path in Path::all() {
                assert!(of(path) == of(Path::Portable), "{path:?} with {count} symbols");
            }
        }
    }
}

/// On damaged input too: a reader with vectors and one without must agree on what a snapshot holds.
#[test]
fn every_path_reads_the_same_symbols_from_any_words() {
    for table in [peaked(120), [16; 256], lopsided()] {
        let mut decode_table = DecodeTable::default();
        decode_table.fill(&table);
        for (count, missing) in COUNTS.into_iter().zip([0, 2, 40].into_iter().cycle()) {
            let mut coded = encoded::<WIDE_LANES>(&table, &symbols_of(&table, count));
            for (index, word) in coded.words.iter_mut().enumerate().skip(7).step_by(13) {
                *word ^= index as u8 | 1;
            }
            coded.words.resize((coded.words.len() + 200).saturating_sub(200 * missing), 0x55);
            let of = |path: Path| {
                let (mut symbols, mut states) = (vec![0; count], coded.states);
                let rest = path.decode(&decode_table, &mut states, &coded.words, &mut symbols);
                rest.map(|rest| (rest.len(), symbols, states))
            };
            for path in Path::all() {
                assert!(of(path) == of(Path::Portable), "{path:?} with {count} symbols");
            }
        }
    }
}

#[test]
fn the_code_is_as_short_as_the_entropy_says() {
    let table = peaked(120);
    let symbols = symbols_of(&table, 1 << 18);
    // Halving frequencies cost 2 bits a symbol.
    let coded = encoded::<WIDE_LANES>(&table, &symbols);
    let length_bytes = coded.words.len() + size_of_val(&coded.states);
    assert!(length_bytes.abs_diff(1 << 16) < 650, "{length_bytes}");
}

#[test]
fn too_few_and_too_many_words_are_refused() {
    let table = peaked(120);
    let symbols = symbols_of(&table, 5_000);
    for removed in [2, 4, 64, 128, 1_000] {
        let mut coded = encoded::<WIDE_LANES>(&table, &symbols);
        coded.words.truncate(coded.words.len() - removed);
        assert_eq!(decoded(&table, &coded, 5_000), None);
    }
    let mut coded = encoded::<WIDE_LANES>(&table, &symbols);
    coded.words.extend([0, 0]);
    assert_eq!(decoded(&table, &coded, 5_000), None);
}

#[test]
fn states_out_of_range_are_refused() {
    let table = peaked(120);
    for state in [0, STATE_MIN - 1, 1 << 31, u32::MAX] {
        let mut coded = encoded::<NARROW_LANES>(&table, &[120; 40]);
        coded.states[3] = state;
        assert_eq!(decoded(&table, &coded, 40), None);
    }
}

#[test]
fn quotients_are_exact_for_every_frequency() {
    for frequency in 1..PROBABILITY_SUM {
        let mut table = [0; 256];
        table[0] = (PROBABILITY_SUM - frequency) as u16;
        table[1] = frequency as u16;
        let mut encode_table = EncodeTable::default();
        encode_table.fill(&table);
        for state in [STATE_MIN, STATE_MIN + 1, frequency << 15, (frequency << LIMIT_SHIFT) - 1] {
            if !(STATE_MIN..frequency << LIMIT_SHIFT).contains(&state) {
                continue;
            }
            let mut states = [state];
            let start = scalar::encode(&encode_table, &[1], &mut states, &mut [0; 8]);
            let expected =
                ((state / frequency) << PROBABILITY_BITS) + state % frequency + PROBABILITY_SUM - frequency;
            assert_eq!((start, states), (8, [expected]), "state {state}, frequency {frequency}");
        }
    }
}
