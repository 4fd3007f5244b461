//! Stored chunks, as every codec decodes them: the first bytes choose codec, raw length and base.
#![no_main]

use libfuzzer_sys::fuzz_target;
use varvite::codec::{self, Effort, Scratch};
use varvite::format::model::Codec;
use varvite::tensor::Dtype;

const RAW_LENGTH_LIMIT_BYTES: usize = 1 << 18;

fuzz_target!(|bytes: &[u8]| {
    let Some((&[number, low, middle, high, seed], stored)) = bytes.split_first_chunk() else { return };
    let Some(codec) = Codec::from_number(u64::from(number % 5)) else { return };
    let length = u32::from_le_bytes([low, middle, high, 0]) as usize % RAW_LENGTH_LIMIT_BYTES;
    let base: Vec<u8> = (0..length).map(|index| (index as u8).wrapping_mul(seed)).collect();
    let mut raw = vec![0; length];
    let mut scratch = Scratch::default();
    if codec::decode(codec, stored, Some(&base), &mut raw, &mut scratch).is_err() {
        return;
    }
    let dtype = [Dtype::Uint8, Dtype::Bfloat16, Dtype::Float32, Dtype::Float64][usize::from(seed % 4)];
    let mut again = Vec::new();
    let codec = codec::encode(dtype, &raw, Some(&base), Effort::Fast, &mut scratch, &mut again);
    if codec != Codec::Store {
        let mut decoded = vec![0; length];
        codec::decode(codec, &again, Some(&base), &mut decoded, &mut scratch).expect("what was encoded decodes");
        assert!(decoded == raw);
    }
});
