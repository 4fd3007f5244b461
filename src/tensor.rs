//! What a tensor is to the engine: a dtype, a shape and a region of it held by one rank.
//!
//! The dtype list is closed; names are those of PyTorch. The engine never interprets values here.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Element type of a tensor, named as in PyTorch (`torch.float32` is `float32`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "each name is the PyTorch name of the dtype")]
pub enum Dtype {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Float16,
    Bfloat16,
    Float32,
    Float64,
    Complex32,
    Complex64,
    Complex128,
    #[serde(rename = "float8_e4m3fn")]
    Float8E4m3fn,
    #[serde(rename = "float8_e4m3fnuz")]
    Float8E4m3fnuz,
    #[serde(rename = "float8_e5m2")]
    Float8E5m2,
    #[serde(rename = "float8_e5m2fnuz")]
    Float8E5m2fnuz,
    #[serde(rename = "float8_e8m0fnu")]
    Float8E8m0fnu,
    /// Two 4-bit floats in each byte; one element here is one byte, as PyTorch counts them.
    #[serde(rename = "float4_e2m1fn_x2")]
    Float4E2m1fnX2,
}

/// Every dtype with its PyTorch name and its element size in bytes.
const DTYPES: [(Dtype, &str, u64); 22] = [
    (Dtype::Bool, "bool", 1),
    (Dtype::Uint8, "uint8", 1),
    (Dtype::Uint16, "uint16", 2),
    (Dtype::Uint32, "uint32", 4),
    (Dtype::Uint64, "uint64", 8),
    (Dtype::Int8, "int8", 1),
    (Dtype::Int16, "int16", 2),
    (Dtype::Int32, "int32", 4),
    (Dtype::Int64, "int64", 8),
    (Dtype::Float16, "float16", 2),
    (Dtype::Bfloat16, "bfloat16", 2),
    (Dtype::Float32, "float32", 4),
    (Dtype::Float64, "float64", 8),
    (Dtype::Complex32, "complex32", 4),
    (Dtype::Complex64, "complex64", 8),
    (Dtype::Complex128, "complex128", 16),
    (Dtype::Float8E4m3fn, "float8_e4m3fn", 1),
    (Dtype::Float8E4m3fnuz, "float8_e4m3fnuz", 1),
    (Dtype::Float8E5m2, "float8_e5m2", 1),
    (Dtype::Float8E5m2fnuz, "float8_e5m2fnuz", 1),
    (Dtype::Float8E8m0fnu, "float8_e8m0fnu", 1),
    (Dtype::Float4E2m1fnX2, "float4_e2m1fn_x2", 1),
];

impl Dtype {
    /// Every dtype.
    pub fn all() -> impl Iterator<Item = Self> {
        DTYPES.iter().map(|row| row.0)
    }

    /// True where an element has an imaginary part.
    #[must_use]
    pub fn is_complex(self) -> bool {
        matches!(self, Self::Complex32 | Self::Complex64 | Self::Complex128)
    }

    /// The PyTorch name, without `torch.`.
    #[must_use]
    pub fn name(self) -> &'static str {
        DTYPES.iter().find(|row| row.0 == self).map_or("", |row| row.1)
    }

    /// Bytes of one element.
    #[must_use]
    pub fn size_bytes(self) -> u64 {
        DTYPES.iter().find(|row| row.0 == self).map_or(1, |row| row.2)
    }

    /// True where a save may store this dtype as the other: both are real floats, the other has fewer
    /// bytes, and arithmetic on it is defined (of the 8-bit ones `float8_e4m3fn` and `float8_e5m2`).
    #[must_use]
    pub fn narrows_to(self, other: Self) -> bool {
        let is_real =
            |dtype: Self| matches!(dtype, Self::Float64 | Self::Float32 | Self::Float16 | Self::Bfloat16);
        let is_small = matches!(other, Self::Float8E4m3fn | Self::Float8E5m2);
        is_real(self) && (is_real(other) || is_small) && other.size_bytes() < self.size_bytes()
    }

    /// The dtype of this PyTorch name.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] that lists the legal names.
    pub fn parse(name: &str) -> Result<Self> {
        DTYPES.iter().find(|row| row.1 == name).map(|row| row.0).ok_or_else(|| {
            let legal: Vec<&str> = DTYPES.iter().map(|row| row.1).collect();
            Error::invalid(format!("dtype `{name}`"), format!("must be one of {}", legal.join(", ")))
        })
    }
}

/// Number of elements of a shape, or `None` where it overflows 64 bits.
#[must_use]
pub fn element_count(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1_u64, |count, &length| count.checked_mul(length))
}

/// Bytes of a dense row-major tensor, or `None` where they overflow 63 bits.
#[must_use]
pub fn raw_length_bytes(shape: &[u64], dtype: Dtype) -> Option<u64> {
    element_count(shape)?.checked_mul(dtype.size_bytes()).filter(|&length| i64::try_from(length).is_ok())
}

/// A hyper-rectangle of a tensor, in elements: in each dimension `offsets[i] .. offsets[i] + lengths[i]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Region {
    /// First index in each dimension.
    pub offsets: Vec<u64>,
    /// Number of indices in each dimension.
    pub lengths: Vec<u64>,
}

impl Region {
    /// The whole of a tensor of this shape.
    #[must_use]
    pub fn whole(shape: &[u64]) -> Self {
        Self { offsets: vec![0; shape.len()], lengths: shape.to_vec() }
    }

    /// True where it lies inside a tensor of this shape.
    #[must_use]
    pub fn fits(&self, shape: &[u64]) -> bool {
        self.offsets.len() == shape.len()
            && self.lengths.len() == shape.len()
            && self
                .offsets
                .iter()
                .zip(&self.lengths)
                .zip(shape)
                .all(|((&offset, &length), &size)| offset.checked_add(length).is_some_and(|end| end <= size))
    }
}
