//! What ranks say of their tensors before anybody writes, and the bytes in which they say it.
//!
//! The bytes go from rank to rank of one save and are never stored: both ends are of one release.

use crate::error::{Error, Result};
use crate::tensor::{Dtype, Region, raw_length_bytes};

/// What a rank says of one of its tensors with a global meaning, before anybody writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Name of the entry.
    pub name: String,
    /// Element type of the caller's tensor.
    pub dtype: Dtype,
    /// Element type it is to be stored in.
    pub stored_dtype: Dtype,
    /// Global shape, in elements.
    pub shape: Vec<u64>,
    /// The region of it that the rank holds.
    pub region: Region,
    /// Name of the tensor of the same rank whose storage it shares.
    pub tied_to: Option<String>,
}

impl Holding {
    /// True where the rank holds no element.
    pub(super) fn is_empty(&self) -> bool {
        self.region.lengths.contains(&0)
    }

    /// Bytes of the region in what it is stored in.
    pub(super) fn stored_bytes(&self) -> u64 {
        raw_length_bytes(&self.region.lengths, self.stored_dtype).unwrap_or(u64::MAX)
    }
}

/// Longest number in its 7-bit groups.
const NUMBER_LIMIT_BYTES: u32 = 10;

/// Bytes of holdings, for [`decode_holdings`] on another rank.
#[must_use]
pub fn encode_holdings(holdings: &[Holding]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(holdings.len() * 64);
    put_number(&mut bytes, holdings.len() as u64);
    for holding in holdings {
        let Holding { name, dtype, stored_dtype, shape, region, tied_to } = holding;
        put_text(&mut bytes, name);
        bytes.extend([dtype_number(*dtype), dtype_number(*stored_dtype)]);
        put_numbers(&mut bytes, shape);
        put_numbers(&mut bytes, &region.offsets);
        put_numbers(&mut bytes, &region.lengths);
        bytes.push(u8::from(tied_to.is_some()));
        if let Some(target) = tied_to {
            put_text(&mut bytes, target);
        }
    }
    bytes
}

/// Reads what [`encode_holdings`] wrote.
///
/// # Errors
/// [`Error::InvalidInput`] where it has not, or where a region lies outside of its shape.
pub fn decode_holdings(bytes: &[u8]) -> Result<Vec<Holding>> {
    let mut input = Input { rest: bytes };
    let count = input.number()?;
    let mut holdings = Vec::new();
    for _ in 0..count {
        let holding = Holding {
            name: input.text()?,
            dtype: input.dtype()?,
            stored_dtype: input.dtype()?,
            shape: input.numbers()?,
            region: Region { offsets: input.numbers()?, lengths: input.numbers()? },
            tied_to: if input.byte()? == 0 { None } else { Some(input.text()?) },
        };
        if !holding.region.fits(&holding.shape) || raw_length_bytes(&holding.shape, holding.dtype).is_none() {
            return Err(Error::invalid(
                format!("tensor `{}`", holding.name),
                format!("{:?} is no region of the shape {:?}", holding.region, holding.shape),
            ));
        }
        holdings.push(holding);
    }
    if input.rest.is_empty() { Ok(holdings) } else { Err(no_holdings("bytes after the last one")) }
}

fn no_holdings(reason: &str) -> Error {
    Error::invalid("holdings", reason)
}

fn dtype_number(dtype: Dtype) -> u8 {
    Dtype::all().position(|other| other == dtype).unwrap_or(usize::MAX) as u8
}

fn put_number(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn put_numbers(bytes: &mut Vec<u8>, numbers: &[u64]) {
    put_number(bytes, numbers.len() as u64);
    for &number in numbers {
        put_number(bytes, number);
    }
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    put_number(bytes, text.len() as u64);
    bytes.extend_from_slice(text.as_bytes());
}

/// What is left to read.
struct Input<'a> {
    rest: &'a [u8],
}

impl Input<'_> {
    fn byte(&mut self) -> Result<u8> {
        let (&byte, rest) = self.rest.split_first().ok_or_else(|| no_holdings("they end early"))?;
        self.rest = rest;
        Ok(byte)
    }

    fn number(&mut self) -> Result<u64> {
        let mut number = 0;
        for group in 0..NUMBER_LIMIT_BYTES {
            let byte = self.byte()?;
            let low = u64::from(byte & 0x7F);
            if (low << (7 * group)) >> (7 * group) != low {
                break;
            }
            number |= low << (7 * group);
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(no_holdings("a number has more than 64 bits"))
    }

    fn numbers(&mut self) -> Result<Vec<u64>> {
        let count = self.number()?;
        (0..count).map(|_| self.number()).collect()
    }

    fn text(&mut self) -> Result<String> {
        let length = self.number()?;
        let split = usize::try_from(length).ok().and_then(|length| self.rest.split_at_checked(length));
        let (text, rest) = split.ok_or_else(|| no_holdings("they end early"))?;
        self.rest = rest;
        String::from_utf8(text.to_vec()).map_err(|_| no_holdings("a name is not UTF-8"))
    }

    fn dtype(&mut self) -> Result<Dtype> {
        let number = self.byte()?;
        Dtype::all().nth(usize::from(number)).ok_or_else(|| no_holdings("a dtype is not known"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holdings() -> Vec<Holding> {
        let weight = Holding {
            name: "model.weight".to_owned(),
            dtype: Dtype::Float32,
            stored_dtype: Dtype::Float8E5m2,
            shape: vec![u64::from(u32::MAX), 300],
            region: Region { offsets: vec![128, 0], lengths: vec![127, 300] },
            tied_to: None,
        };
        let tie =
            Holding { name: "é".to_owned(), tied_to: Some("model.weight".to_owned()), ..weight.clone() };
        let scalar = Holding {
            name: String::new(),
            dtype: Dtype::Float4E2m1fnX2,
            stored_dtype: Dtype::Float4E2m1fnX2,
            shape: Vec::new(),
            region: Region::whole(&[]),
            tied_to: None,
        };
        vec![weight, tie, scalar]
    }

    #[test]
    fn holdings_round_trip() {
        assert_eq!(decode_holdings(&encode_holdings(&holdings())).unwrap(), holdings());
        assert_eq!(encode_holdings(&[]), [0]);
        assert_eq!(decode_holdings(&[0]).unwrap(), []);
        for dtype in Dtype::all() {
            let one = vec![Holding { dtype, stored_dtype: dtype, ..holdings().remove(2) }];
            assert_eq!(decode_holdings(&encode_holdings(&one)).unwrap(), one);
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        let bytes = encode_holdings(&holdings());
        for length in 0..bytes.len() {
            decode_holdings(&bytes[..length]).unwrap_err();
        }
        decode_holdings(&[&bytes[..], &[0]].concat()).unwrap_err();
        // A count and a length that no memory holds, a number of too many bits, a dtype of the future.
        for bytes in [[0xFF; 9].as_slice(), &[1, 0xFF, 0xFF, 0xFF, 0x7F], &[0xFF; 20], &[1, 0, 99, 0]] {
            decode_holdings(bytes).unwrap_err();
        }
    }

    #[test]
    fn a_region_outside_of_its_shape_is_refused() {
        let mut outside = holdings();
        outside[0].region.offsets[1] = 1;
        let error = decode_holdings(&encode_holdings(&outside)).unwrap_err();
        assert!(
            matches!(&error, Error::InvalidInput { what, .. } if what == "tensor `model.weight`"),
            "{error:?}"
        );
    }
}
