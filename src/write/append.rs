//! Appends chunks in order and keeps the chunk table.

use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::model::{BaseRef, ChunkRef, Codec, PackRecord};
use crate::format::pack::{self, PackChunk};
use crate::plan::{Base, Reuse};
use crate::store::StagedWrite;

use super::prepare::Form;

/// The pack that is being written.
pub(super) struct Appender<'a> {
    reuse: Reuse<'a>,
    table: Vec<PackChunk>,
    padding: Vec<u8>,
}

impl<'a> Appender<'a> {
    pub(super) fn new(pack_name: &str, base: Option<&'a Base>) -> Self {
        Self { reuse: Reuse::new(pack_name, base), table: Vec::new(), padding: Vec::new() }
    }

    /// Refers to an equal chunk of this pack, else appends what is to be stored at its alignment.
    pub(super) fn place(
        &mut self,
        staged: &mut dyn StagedWrite,
        digest: ChunkDigest,
        raw_length_bytes: u64,
        form: &Form<'_>,
    ) -> Result<ChunkRef> {
        let (codec, stored, base): (Codec, &[u8], Option<BaseRef>) = match form {
            Form::Raw(raw) => (Codec::Store, raw, None),
            Form::Coded { codec, stored, base } => (*codec, stored, *base),
            Form::Rounded => return Ok(ChunkRef::rounded(digest)),
            Form::InBase(_) => {
                return Err(Error::Internal { what: "a chunk of the base was to be written".to_owned() });
            }
        };
        if let Some(twin) = self.reuse.twin(digest, raw_length_bytes) {
            return Ok(twin);
        }
        let stored_length_bytes = stored.len() as u64;
        let padding = pack::padding_before(staged.position_bytes(), stored_length_bytes) as usize;
        if padding > 0 {
            self.padding.resize(padding, 0);
            staged.append(&self.padding[..padding])?;
        }
        let offset_bytes = staged.position_bytes();
        staged.append(stored)?;
        self.table.push(PackChunk { offset_bytes, stored_length_bytes, raw_length_bytes, codec, digest });
        let written = ChunkRef { pack: 0, offset_bytes, stored_length_bytes, codec, digest, base };
        Ok(self.reuse.note_written(raw_length_bytes, written))
    }

    /// Refers to a chunk of this pack, or of the base where it is usable; `None` where it has to be
    /// written.
    pub(super) fn refer(
        &mut self,
        reference: ChunkRef,
        raw_length_bytes: u64,
        is_usable: bool,
    ) -> Option<ChunkRef> {
        let twin = self.reuse.twin(reference.digest, raw_length_bytes);
        twin.or_else(|| is_usable.then(|| self.reuse.refer(reference)))
    }

    /// The chunk table, the pack table of the part, and how many chunks were not written again.
    pub(super) fn finish(self) -> (Vec<PackChunk>, Vec<PackRecord>, u64) {
        let (packs, reused_count) = self.reuse.finish();
        (self.table, packs, reused_count)
    }
}
