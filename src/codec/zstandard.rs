//! One frame of zstd: for integers, bytes and flags, whose repeats a coder of single bytes can't see.

use crate::error::Result;

use super::input::flaw;

/// Level for [`super::Effort::Fast`], and for estimates.
pub(super) const FAST_LEVEL: i32 = 1;
/// Level for [`super::Effort::Max`].
pub(super) const MAX_LEVEL: i32 = 9;

/// Contexts of the library: some hundred kilobytes that are worth keeping.
#[derive(Default)]
pub(super) struct Contexts {
    compressor: Option<zstd::bulk::Compressor<'static>>,
    decompressor: Option<zstd::bulk::Decompressor<'static>>,
}

impl Contexts {
    /// Replaces `out` by one frame; false where that takes more than `limit_bytes` or the library fails,
    /// which only lack of memory makes it do.
    pub(super) fn compress(&mut self, raw: &[u8], level: i32, limit_bytes: usize, out: &mut Vec<u8>) -> bool {
        out.clear();
        out.reserve_exact(limit_bytes);
        if self.compressor.is_none() {
            self.compressor = zstd::bulk::Compressor::new(level).ok();
        }
        let Some(compressor) = &mut self.compressor else { return false };
        compressor.set_compression_level(level).is_ok()
            && compressor.compress_to_buffer(raw, out).is_ok_and(|length| length <= limit_bytes)
    }

    /// Expands a frame into exactly `raw`.
    pub(super) fn decompress(&mut self, stored: &[u8], raw: &mut [u8]) -> Result<()> {
        if self.decompressor.is_none() {
            self.decompressor = zstd::bulk::Decompressor::new().ok();
        }
        let Some(decompressor) = &mut self.decompressor else {
            return Err(flaw("needs a decompressor, and there is no memory for one"));
        };
        let expected = raw.len();
        match decompressor.decompress_to_buffer(stored, raw) {
            Ok(length) if length == expected => Ok(()),
            Ok(length) => Err(flaw(format!("expands to {length} bytes instead of: {expected}"))),
            Err(error) => Err(flaw(format!("is no frame of zstd that expands to {expected} bytes: {error}"))),
        }
    }
}
