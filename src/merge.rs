//! Copies what is live in old packs into one new pack, and puts manifests that point there in place.
//!
//! Stored bytes are copied as they are, and every chunk is decoded and compared with its digest on the
//! way: damage is found here, not carried on. Memory is one batch of stored bytes and a chunk or two for
//! each thread.
//!
//! IMPORTANT: the new pack is durable before a manifest points to it, and every manifest is durable before
//! an old pack goes (FORMAT.md, "Merge"). Deleting is not done here: old packs go through the sweep.

use std::collections::HashMap;
use std::sync::Arc;

use rayon::prelude::*;

use crate::batch::split_batch;
use crate::codec::{Decoder, Refusal};
use crate::compact::{Live, LiveChunk, Moved, Moves};
use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::model::{BaseRef, Manifest};
use crate::format::pack::{self, PackChunk, PackHeader};
use crate::format::{manifest, names};
use crate::kill;
use crate::store::{Folder, Key, PutMode, ReadAt, StagedWrite, Store};
use crate::threads::Threads;

/// Stored bytes that are read and verified together before they are appended in order. Few, because a save
/// or a load that wants the same threads begins when a batch is done.
const BATCH_BYTES: u64 = 4 << 20;
/// Chunks of a batch.
const BATCH_CHUNKS: usize = 8192;

/// What a copy needs.
pub struct Copy<'a> {
    /// Where the packs lie.
    pub store: &'a Arc<dyn Store>,
    /// Threads that read and verify.
    pub threads: &'a Threads,
    /// First bytes of the new pack.
    pub header: PackHeader,
    /// Name of the new pack.
    pub pack_name: String,
    /// Asked between batches; true ends the copy with [`Error::Interrupted`].
    pub is_cancelled: &'a dyn Fn() -> bool,
}

/// A copy that is not visible yet. Dropping it removes what was staged.
#[derive(Debug)]
pub struct Copied {
    staged: Box<dyn StagedWrite>,
    table: Vec<PackChunk>,
    /// Where each chunk went.
    pub moves: Moves,
    /// The damage that was met: these chunks were not copied.
    pub damage: Vec<Error>,
}

impl Copied {
    /// Makes the new pack durable under its name. Returns where each chunk went, and the bytes written.
    ///
    /// # Errors
    /// [`Error::Store`] where the store fails.
    pub fn publish(mut self) -> Result<(Moves, u64)> {
        let footer = pack::encode_footer(self.staged.position_bytes(), &self.table, None)?;
        self.staged.append(&footer)?;
        let published = self.staged.publish()?;
        self.moves.pack.length_bytes = published.length_bytes;
        kill::point("merge.pack_durable");
        Ok((self.moves, published.length_bytes))
    }
}

impl Copy<'_> {
    /// Copies everything that is live, and verifies it.
    ///
    /// # Errors
    /// [`Error::Store`] where the store fails, [`Error::Interrupted`] after a cancel. Damage is no error.
    pub fn run(self, live: &Live) -> Result<Copied> {
        let mut staged = self.store.stage(&Key::new(Folder::Packs, &self.pack_name)?)?;
        staged.append(&pack::encode_header(&self.header)?)?;
        let sources = Sources::open(self.store.as_ref(), live)?;
        let moves = Moves::new(live.sources(), &self.pack_name);
        let mut writer = Writer { staged, table: Vec::new(), moves, twins: HashMap::new() };
        let mut damage = Vec::new();
        let chunks: Vec<LiveChunk> = live.in_order().copied().collect();
        let mut buffer = Vec::new();
        for batch in batches(&chunks) {
            if (self.is_cancelled)() {
                return Err(Error::Interrupted);
            }
            let slices = cut(&mut buffer, batch);
            let verified: Vec<Result<&[u8]>> = self.threads.pool()?.install(|| {
                let work = batch.par_iter().zip(slices);
                work.map_init(Decoder::default, |decoder, (chunk, stored)| {
                    sources.read(chunk, stored, decoder).map(|()| &*stored)
                })
                .collect()
            });
            for (chunk, stored) in batch.iter().zip(verified) {
                let source = &live.packs[chunk.reference.pack as usize].name;
                match stored {
                    Ok(stored) => writer.append(source, chunk, stored)?,
                    Err(error) if error.is_damage() => damage.push(error),
                    Err(error) => return Err(error),
                }
                kill::point("merge.first_chunk");
            }
        }
        Ok(Copied { staged: writer.staged, table: writer.table, moves: writer.moves, damage })
    }
}

/// Consecutive runs of chunks that are read together.
fn batches(mut rest: &[LiveChunk]) -> impl Iterator<Item = &[LiveChunk]> {
    std::iter::from_fn(move || {
        let length_bytes = |chunk: &LiveChunk| chunk.reference.stored_length_bytes;
        let (batch, after) = split_batch(rest, BATCH_CHUNKS, BATCH_BYTES, length_bytes);
        rest = after;
        (!batch.is_empty()).then_some(batch)
    })
}

/// A slice for the stored bytes of each chunk, out of memory that is used again.
fn cut<'b>(buffer: &'b mut Vec<u8>, batch: &[LiveChunk]) -> Vec<&'b mut [u8]> {
    let stored_length = |chunk: &LiveChunk| chunk.reference.stored_length_bytes as usize;
    let length = batch.iter().map(stored_length).sum();
    if buffer.len() < length {
        buffer.resize(length, 0);
    }
    let mut rest = buffer.as_mut_slice();
    batch
        .iter()
        .map(|chunk| {
            let (slice, after) = std::mem::take(&mut rest).split_at_mut(stored_length(chunk));
            rest = after;
            slice
        })
        .collect()
}

/// The open packs, or the damage that makes one of them useless.
struct Sources {
    packs: HashMap<u32, std::result::Result<Box<dyn ReadAt>, Arc<str>>>,
    names: Vec<String>,
}

impl Sources {
    fn open(store: &dyn Store, live: &Live) -> Result<Self> {
        let mut sources = Self { packs: HashMap::new(), names: Vec::new() };
        for record in &live.packs {
            sources.names.push(Key::new(Folder::Packs, &record.name)?.to_string());
        }
        for index in live.needed_packs() {
            let record = &live.packs[index as usize];
            let opened = match store.open(&Key::new(Folder::Packs, &record.name)?) {
                Ok(object) if object.length_bytes() == record.length_bytes => Ok(object),
                Ok(object) => Err(format!("a pack of {} bytes", object.length_bytes()).into()),
                Err(error) if error.is_damage() => Err(error.chain().into()),
                Err(error) => return Err(error),
            };
            sources.packs.insert(index, opened);
        }
        Ok(sources)
    }

    /// Reads the stored bytes of a chunk, and compares what they hold with its digest.
    fn read(&self, chunk: &LiveChunk, stored: &mut [u8], decoder: &mut Decoder) -> Result<()> {
        let LiveChunk { reference, raw_length_bytes } = chunk;
        self.read_at(reference.pack, reference.offset_bytes, stored)?;
        let read_base = |base: &BaseRef, bytes: &mut [u8]| self.read_at(base.pack, base.offset_bytes, bytes);
        let verified = decoder.raw(reference, *raw_length_bytes, stored, read_base);
        verified.map(|_raw| ()).map_err(|refusal| match refusal {
            Refusal::Unread(error) => error,
            Refusal::Damaged { pack, offset_bytes, expected, found } => {
                self.corrupt(pack, offset_bytes, expected, found)
            }
        })
    }

    fn read_at(&self, pack: u32, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
        match self.packs.get(&pack) {
            Some(Ok(object)) => object.read_at(offset_bytes, bytes),
            Some(Err(found)) => {
                Err(self.corrupt(pack, offset_bytes, "a whole pack".to_owned(), found.to_string()))
            }
            None => {
                let name = &self.names[pack as usize];
                Err(Error::Internal { what: format!("{name} was not opened for a merge") })
            }
        }
    }

    fn corrupt(&self, pack: u32, offset_bytes: u64, expected: String, found: String) -> Error {
        Error::corrupt(self.names[pack as usize].clone(), offset_bytes, "chunk", expected, found)
    }
}

/// The new pack as it grows.
struct Writer {
    staged: Box<dyn StagedWrite>,
    table: Vec<PackChunk>,
    moves: Moves,
    /// Chunks by what they hold: the same bytes out of two packs are written once.
    twins: HashMap<(ChunkDigest, u64), Moved>,
}

impl Writer {
    fn append(&mut self, source: &str, chunk: &LiveChunk, stored: &[u8]) -> Result<()> {
        let LiveChunk { reference, raw_length_bytes } = *chunk;
        let content = (reference.digest, raw_length_bytes);
        let twin = self.twins.get(&content).filter(|_| reference.codec.is_self_contained());
        if let Some(twin) = twin {
            self.moves.note(source, reference.offset_bytes, *twin);
            return Ok(());
        }
        let padding = pack::padding_before(self.staged.position_bytes(), reference.stored_length_bytes);
        if padding > 0 {
            self.staged.append(&vec![0; padding as usize])?;
        }
        let moved = Moved {
            offset_bytes: self.staged.position_bytes(),
            stored_length_bytes: reference.stored_length_bytes,
            codec: reference.codec,
            digest: reference.digest,
        };
        self.staged.append(stored)?;
        self.table.push(PackChunk {
            offset_bytes: moved.offset_bytes,
            stored_length_bytes: moved.stored_length_bytes,
            raw_length_bytes,
            codec: moved.codec,
            digest: moved.digest,
        });
        self.moves.note(source, reference.offset_bytes, moved);
        if reference.codec.is_self_contained() {
            self.twins.insert(content, moved);
        }
        Ok(())
    }
}

/// Puts a manifest in the place of an older one of the same snapshot, in one durable step.
///
/// # Errors
/// [`Error::Store`] where the store fails: the old one or the new one is there then.
pub fn replace_manifest(store: &Arc<dyn Store>, made: &Manifest) -> Result<()> {
    let key = Key::new(Folder::Snapshots, &names::manifest_name(made.header.seq))?;
    store.put(&key, &manifest::encode(&made.header, &made.body)?, PutMode::Replace)?;
    kill::point("merge.manifest_replaced");
    Ok(())
}
