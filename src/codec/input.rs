//! Stored bytes as a decoder walks them: every read is checked, nothing is trusted.

use crate::error::{Error, Result};

/// What is wrong with the stored bytes; the caller of the codec knows object and offset.
pub(super) fn flaw(reason: impl Into<String>) -> Error {
    Error::invalid("stored chunk", reason)
}

/// What is left of the stored bytes.
pub(super) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(super) fn new(stored: &'a [u8]) -> Self {
        Self(stored)
    }

    /// The next `count` bytes.
    pub(super) fn bytes(&mut self, count: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self
            .0
            .split_at_checked(count)
            .ok_or_else(|| flaw(format!("ends {} bytes into a field of: {count}", self.0.len())))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const COUNT: usize>(&mut self) -> Result<[u8; COUNT]> {
        let mut array = [0; COUNT];
        array.copy_from_slice(self.bytes(COUNT)?);
        Ok(array)
    }

    pub(super) fn byte(&mut self) -> Result<u8> {
        self.array().map(|[byte]| byte)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Refuses bytes that nobody asked for.
    pub(super) fn finish(self) -> Result<()> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(flaw(format!("has bytes behind its end: {}", self.0.len())))
        }
    }
}
