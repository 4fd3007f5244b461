#![expect(clippy::cast_precision_loss, reason = "lengths are far below 2^52")]

use crate::tensor::Dtype;

use super::*;

const EFFORTS: [Effort; 2] = [Effort::Fast, Effort::Max];

/// `SplitMix64` (Steele, Lea, Flood, 2014): bytes without any structure, the same on every machine.
fn noise(length: usize) -> Vec<u8> {
    let mixed = (1..=length.div_ceil(8) as u64).map(|index| {
        let state = index.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let state = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let state = (state ^ state >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        state ^ state >> 31
    });
    mixed.flat_map(u64::to_le_bytes).take(length).collect()
}

/// 32-bit floats of many exponents and of both signs: every 16-bit head with some mantissa.
fn every_head() -> Vec<u8> {
    (0..=u16::MAX)
        .flat_map(|head| (u32::from(head) << 16 | u32::from(head.wrapping_mul(40_503))).to_le_bytes())
        .collect()
}

fn weights(count: usize) -> Vec<f32> {
    let noise = noise(count * 4);
    let values = noise.chunks_exact(4).map(|four| {
        let sum: f32 = four.iter().map(|&byte| f32::from(byte)).sum();
        (sum - 510.0) * 1e-4 + f32::from(four[0]) * 1e-7
    });
    values.collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// The upper halves of 32-bit floats.
fn bfloat16_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
}

fn moved(values: &[f32], step: f32) -> Vec<f32> {
    values
        .iter()
        .zip(noise(values.len()))
        .map(|(value, byte)| value + step * (f32::from(byte) - 127.5))
        .collect()
}

/// Inputs that a codec may stumble over, with a base of the same length.
fn adversaries() -> Vec<(&'static str, Vec<u8>, Vec<u8>)> {
    let nans: Vec<u8> =
        (0..40_000_u32).flat_map(|payload| (0x7F80_0000 | payload << 31 | payload).to_le_bytes()).collect();
    let denormals: Vec<u8> =
        (0..40_000_u32).flat_map(|bits| (bits << 31 | (bits * 3)).to_le_bytes()).collect();
    let alternating: Vec<u8> =
        (0..20_000).flat_map(|index| (if index % 2 == 0 { 1.5_f32 } else { -1.5 }).to_le_bytes()).collect();
    let heads = every_head();
    let floats = weights(30_000);
    let mut few = bytes_of(&floats);
    for index in (5..few.len()).step_by(4_001) {
        few[index] ^= 0x41;
    }
    let mut last = vec![9; 70_000];
    last[69_999] = 8;
    vec![
        ("empty", vec![], vec![]),
        ("one byte", vec![3], vec![200]),
        ("a tail of every width", noise(7), vec![0; 7]),
        ("constant", vec![0x3F; 100_003], vec![0; 100_003]),
        ("zeros", vec![0; 1 << 20], vec![1; 1 << 20]),
        ("noise", noise(100_007), noise(100_008)[1..].to_vec()),
        ("NaN payloads", nans.clone(), denormals.clone()),
        ("denormals", denormals, nans),
        ("alternating signs", alternating.clone(), alternating.iter().rev().copied().collect()),
        ("every head", heads.clone(), heads.iter().rev().copied().collect()),
        ("weights", bytes_of(&moved(&floats, 1e-6)), bytes_of(&floats)),
        ("halved weights", bfloat16_of(&moved(&floats, 1e-7)), bfloat16_of(&floats)),
        ("few changes", few, bytes_of(&floats)),
        ("the last byte changed", last, vec![9; 70_000]),
        ("equal", noise(50_000), noise(50_000)),
    ]
}

/// Codes and decodes; returns the codec and the stored length.
fn round_trip(
    dtype: Dtype,
    raw: &[u8],
    base: Option<&[u8]>,
    effort: Effort,
    scratch: &mut Scratch,
) -> (Codec, usize) {
    let mut stored = vec![1, 2, 3];
    let codec = encode(dtype, raw, base, effort, scratch, &mut stored);
    if codec == Codec::Store {
        assert!(stored.is_empty(), "a stored chunk is not copied");
        return (codec, raw.len());
    }
    let mut decoded = vec![0xA5; raw.len()];
    decode(codec, &stored, base, &mut decoded, scratch).unwrap();
    assert!(decoded == raw, "{codec:?} of {dtype:?} with {effort:?} gives other bytes");
    assert!(
        stored.len() < raw.len(),
        "{codec:?} of {dtype:?} stores {} of {} bytes",
        stored.len(),
        raw.len()
    );
    (codec, stored.len())
}

#[test]
fn every_dtype_survives_every_adversary() {
    let mut scratch = Scratch::default();
    for (name, raw, base) in adversaries() {
        for dtype in Dtype::all() {
            for effort in EFFORTS {
                let (_, alone) = round_trip(dtype, &raw, None, effort, &mut scratch);
                let (_, based) = round_trip(dtype, &raw, Some(&base), effort, &mut scratch);
                let worse = effort == Effort::Max && based > alone;
                assert!(!worse, "{name}: a base makes {dtype:?} larger, {based} instead of {alone}");
            }
        }
    }
}

/// Every codec on every dtype, whether or not the chooser would take it.
#[test]
fn every_codec_survives_every_adversary() {
    let mut workspace = Workspace::default();
    for (name, raw, base) in adversaries() {
        for dtype in Dtype::all() {
            let estimate::Elements { width_bytes, rotation_bits, order, .. } = estimate::Elements::of(dtype);
            let all = ((1_u16 << width_bytes) - 1) as u8;
            for verbatim in [0, 0b0101_0101 & all, all] {
                let (mut planes, mut delta) = (Vec::new(), Vec::new());
                let rotation = words::Transform::Rotation(rotation_bits);
                planes::encode(width_bytes, rotation, verbatim, &raw, &mut workspace, &mut planes);
                let difference = words::Transform::Difference(order, &base);
                planes::encode(width_bytes, difference, verbatim, &raw, &mut workspace, &mut delta);
                assert_decodes(name, Codec::Planes, &planes, &raw, None);
                assert_decodes(name, Codec::Delta, &delta, &raw, Some(&base));
            }
            let mut changes = Vec::new();
            if sparse::encode(width_bytes, order, &base, &raw, &mut workspace, &mut changes) {
                assert_decodes(name, Codec::Sparse, &changes, &raw, Some(&base));
            } else {
                assert!(changes.is_empty());
            }
        }
    }
}

fn assert_decodes(name: &str, codec: Codec, stored: &[u8], raw: &[u8], base: Option<&[u8]>) {
    let mut decoded = vec![0xA5; raw.len()];
    decode(codec, stored, base, &mut decoded, &mut Scratch::default()).unwrap();
    assert!(decoded == raw, "{name}: {codec:?} gives other bytes");
}

#[test]
fn differences_are_those_of_the_ranks() {
    let raw = every_head();
    let base: Vec<u8> = raw.iter().rev().copied().collect();
    for order in [words::Order::Integer, words::Order::Float] {
        let count = raw.len() / 4;
        let mut planes = vec![0; raw.len()];
        let mut targets: Vec<&mut [u8]> = planes.chunks_exact_mut(count).collect();
        words::split(4, words::Transform::Difference(order, &base), &raw, &mut targets);
        let rank = |element: &[u8; 4]| {
            let bits = u32::from_le_bytes(*element);
            match order {
                words::Order::Integer => i64::from(bits.cast_signed()),
                words::Order::Float if bits >> 31 == 1 => -1 - i64::from(bits & 0x7FFF_FFFF),
                words::Order::Float => i64::from(bits),
            }
        };
        for (index, (element, base)) in raw.as_chunks().0.iter().zip(base.as_chunks().0).enumerate() {
            let difference = i64::from((rank(element) - rank(base)) as i32);
            let zigzag = if difference < 0 { -2 * difference - 1 } else { 2 * difference };
            for plane in 0..4 {
                assert_eq!(
                    planes[plane * count + index],
                    zigzag.cast_unsigned().to_le_bytes()[plane],
                    "element {index}"
                );
            }
        }
    }
}

#[test]
fn codecs_are_chosen_for_what_they_are_good_at() {
    let mut scratch = Scratch::default();
    let floats = weights(1 << 18);
    let raw = bytes_of(&floats);
    let halves = bfloat16_of(&floats);
    let near = bytes_of(&moved(&floats, 1e-9));
    let text: Vec<u8> =
        "the same words over and over, but not quite: ".bytes().cycle().take(1 << 18).collect();
    for effort in EFFORTS {
        let mut codec_of =
            |dtype, raw: &[u8], base: Option<&[u8]>| round_trip(dtype, raw, base, effort, &mut scratch).0;
        assert_eq!(codec_of(Dtype::Float32, &raw, None), Codec::Planes);
        assert_eq!(codec_of(Dtype::Float32, &near, Some(&raw)), Codec::Delta);
        let mut changed = halves.clone();
        for index in (0..changed.len()).step_by(2_002) {
            changed[index] = changed[index].wrapping_add(1);
        }
        assert_eq!(codec_of(Dtype::Bfloat16, &changed, Some(&halves)), Codec::Sparse);
        assert_eq!(codec_of(Dtype::Uint8, &text, None), Codec::Zstd);
        assert_eq!(codec_of(Dtype::Float32, &noise(4096), None), Codec::Store);
    }
}

#[test]
fn repeats_that_no_sample_sees_are_found() {
    let sentence: Vec<u8> = noise(60_000).iter().map(|&byte| u8::from(byte > 230)).collect();
    let raw: Vec<u8> = sentence.iter().copied().cycle().take(1 << 20).collect();
    for effort in EFFORTS {
        let (codec, stored) = round_trip(Dtype::Uint8, &raw, None, effort, &mut Scratch::default());
        assert!(codec == Codec::Zstd && stored < 20_000, "{codec:?}, {stored} bytes");
    }
}

/// A difference ties a chunk to its base, so a small gain is no reason for one.
#[test]
fn a_base_that_gains_little_is_not_used() {
    let mut scratch = Scratch::default();
    let floats = weights(1 << 16);
    let far: Vec<f32> = floats.iter().rev().copied().collect();
    for effort in EFFORTS {
        let (codec, _) =
            round_trip(Dtype::Float32, &bytes_of(&floats), Some(&bytes_of(&far)), effort, &mut scratch);
        assert_eq!(codec, Codec::Planes);
    }
}

#[test]
fn chunks_of_one_value_cost_a_few_bytes() {
    let mut scratch = Scratch::default();
    for dtype in Dtype::all() {
        let (codec, stored) = round_trip(dtype, &vec![0; 1 << 20], None, Effort::Fast, &mut scratch);
        assert!(stored <= 64, "{codec:?} of {dtype:?}: {stored} bytes");
    }
}

#[test]
fn the_estimate_is_near_what_is_stored() {
    let mut scratch = Scratch::default();
    let floats = weights(1 << 18);
    for (dtype, raw) in [(Dtype::Float32, bytes_of(&floats)), (Dtype::Bfloat16, bfloat16_of(&floats))] {
        let estimate = estimate_self_contained(dtype, &raw, &mut scratch);
        let (_, stored) = round_trip(dtype, &raw, None, Effort::Fast, &mut scratch);
        let share = stored as f64 / raw.len() as f64;
        assert!((estimate / share - 1.0).abs() < 0.02, "{dtype:?}: {estimate} instead of {share}");
    }
    let estimate = estimate_self_contained(Dtype::Float32, &noise(1 << 16), &mut scratch);
    assert!((estimate - 1.0).abs() < 1e-9, "{estimate}");
}

fn reason(error: &Error) -> String {
    error.to_string()
}

#[test]
fn a_missing_or_short_base_is_refused() {
    let mut scratch = Scratch::default();
    for codec in [Codec::Delta, Codec::Sparse] {
        let error = decode(codec, &[1, 0, 1, 7], None, &mut [0], &mut scratch).unwrap_err();
        assert_eq!(reason(&error), "invalid base chunk: is missing, and the stored chunk is a difference");
        let error = decode(codec, &[1, 0, 1, 7], Some(&[0, 0]), &mut [0], &mut scratch).unwrap_err();
        assert_eq!(reason(&error), "invalid base chunk: has 2 bytes, but the raw chunk has: 1");
    }
}

#[test]
fn fields_that_make_no_sense_are_refused() {
    let refusal = |codec, stored: &[u8], length: usize| {
        let base = vec![0; length];
        let mut raw = vec![0; length];
        reason(&decode(codec, stored, Some(&base), &mut raw, &mut Scratch::default()).unwrap_err())
    };
    for (codec, stored, length, expected) in [
        (Codec::Store, &[1, 2][..], 1, "has 2 bytes, but the raw chunk has: 1"),
        (Codec::Planes, &[], 4, "ends 0 bytes into a field of: 1"),
        (Codec::Planes, &[3, 0, 0], 3, "has elements of an illegal width: 3"),
        (Codec::Planes, &[2, 16, 0], 4, "rotates 2 bytes by: 16"),
        (Codec::Planes, &[2, 0, 4], 4, "has more planes than 2 in: 0b00000100"),
        (Codec::Planes, &[1, 0, 1, 9, 9], 3, "ends 2 bytes into a field of: 3"),
        (Codec::Planes, &[1, 0, 1, 9, 9], 1, "has bytes behind its end: 1"),
        (Codec::Planes, &[1, 0, 0, 4], 1, "has a stream of unknown mode: 4"),
        (Codec::Delta, &[1, 2, 0], 1, "subtracts in an unknown order: 2"),
        (
            Codec::Sparse,
            &[1, 0, 9, 0, 0, 0, 9, 0, 0, 0],
            3,
            "changes 9 of 3 elements at gaps of so many bytes: 9",
        ),
        (
            Codec::Sparse,
            &[1, 0, 1, 0, 0, 0, 3, 0, 0, 0],
            300,
            "changes 1 of 300 elements at gaps of so many bytes: 3",
        ),
        (
            Codec::Sparse,
            &[1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 3, 1, 5],
            3,
            "changes an element behind the last, at: 3",
        ),
        (Codec::Sparse, &[1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 255, 1, 5], 300, "has 0 gaps, but changes: 1"),
        (Codec::Zstd, &[1, 2, 3, 4, 5], 3, "is no frame of zstd that expands to 3 bytes"),
    ] {
        let found = refusal(codec, stored, length);
        assert!(found.starts_with(&format!("invalid stored chunk: {expected}")), "{codec:?}: {found}");
    }
}

#[test]
fn a_frame_of_another_length_is_refused() {
    let stored = zstd::bulk::compress(&[7; 100], 1).unwrap();
    for length in [99, 101] {
        let mut raw = vec![0; length];
        assert!(decode(Codec::Zstd, &stored, None, &mut raw, &mut Scratch::default()).is_err());
    }
}
