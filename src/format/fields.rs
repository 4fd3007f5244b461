//! Reads fixed-width little-endian fields one after another.

use crate::error::Result;

use super::place::Place;

/// The bytes not yet read, and where they lie.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    place: Place<'a>,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(super) fn new(place: Place<'a>, bytes: &'a [u8]) -> Self {
        Self { place, rest: bytes }
    }

    /// Where the next field lies.
    pub(super) fn place(&self) -> Place<'a> {
        self.place
    }

    pub(super) fn array<const LENGTH: usize>(&mut self, what: &str) -> Result<[u8; LENGTH]> {
        let Some((bytes, rest)) = self.rest.split_first_chunk::<LENGTH>() else {
            return Err(self.place.corrupt(
                what,
                format!("{LENGTH} bytes"),
                format!("{} bytes", self.rest.len()),
            ));
        };
        self.place = self.place.after(LENGTH as u64);
        self.rest = rest;
        Ok(*bytes)
    }

    /// Reads a constant.
    pub(super) fn constant<const LENGTH: usize>(
        &mut self,
        what: &str,
        expected: &[u8; LENGTH],
    ) -> Result<()> {
        let place = self.place;
        let found: [u8; LENGTH] = self.array(what)?;
        if found == *expected {
            return Ok(());
        }
        Err(place.corrupt(what, expected.escape_ascii(), found.escape_ascii()))
    }

    pub(super) fn u8(&mut self, what: &str) -> Result<u8> {
        self.array(what).map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self, what: &str) -> Result<u16> {
        self.array(what).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64> {
        self.array(what).map(u64::from_le_bytes)
    }

    pub(super) fn u128(&mut self, what: &str) -> Result<u128> {
        self.array(what).map(u128::from_le_bytes)
    }
}
