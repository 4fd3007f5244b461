//! Saves of several ranks: a session is begun and committed by the coordinator; each rank writes its part.
//!
//! The ranks share no lock and no memory. What they have in common is the ticket of the session; what each
//! has written the coordinator reads from the footers of the packs, in the folder as it sees it.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use rayon::prelude::*;
use serde_json::value::RawValue;

use crate::commit;
use crate::digest::ChunkDigest;
use crate::error::{Error, Result};
use crate::format::model::{Header, Replica};
use crate::format::names;
use crate::format::ticket::{Ticket, TicketBase};
use crate::inflight::Hold;
use crate::plan::{Base, WrittenPart};
use crate::recover::read_part;
use crate::retain;
use crate::stage::Later;
use crate::store::{Folder, Key, PutMode};
use crate::write::{EntryInput, Source};

use super::foundation::{Ground, PartBase, pack_table_digest};
use super::session::{Content, Finished, PackFigures, SaveSession};
use super::{Access, Repository, Shared};

/// What a rank writes of a snapshot.
#[derive(Clone, Debug)]
pub struct PartRequest {
    /// The session.
    pub ticket: Ticket,
    /// The rank that writes.
    pub rank: u32,
    /// The tensors; names are unique among entries of one rank.
    pub entries: Vec<EntryInput>,
    /// Regions that this rank holds too, with their digests.
    pub replicas: Vec<Replica>,
    /// Typed tree of the state, as this rank has it.
    pub structure: Box<RawValue>,
    /// Typed tree of this rank's own state.
    pub rank_structure: Option<Box<RawValue>>,
}

/// A pack that a rank has written, durable but not committed.
#[derive(Clone, Debug)]
pub struct PartReport {
    /// The rank.
    pub rank: u32,
    /// Name of its pack.
    pub pack: String,
    /// Length of the pack.
    pub length_bytes: u64,
    /// What it took.
    pub figures: PackFigures,
}

/// What the coordinator did with all parts.
#[derive(Clone, Debug)]
pub struct CommitReport {
    /// The committed snapshot.
    pub header: Arc<Header>,
    /// Seconds of reading and joining the parts and publishing the manifest.
    pub commit_seconds: f64,
    /// What retention did after the commit, or why it could not.
    pub retention: std::result::Result<(retain::Plan, u64), Arc<Error>>,
}

/// The part of one rank in progress.
#[derive(Debug)]
pub struct PartSession(SaveSession);

/// A session that the coordinator has begun.
#[derive(Debug)]
pub(super) struct OpenSession {
    seq: u64,
    /// Packs that parts may refer to.
    base_packs: HashSet<String>,
    /// Keeps them, and the snapshot they belong to, from deletion.
    _hold: Hold,
}

/// A part that this handle has written, until it is known what became of its session.
#[derive(Debug)]
pub(super) struct KeptPart {
    base: Arc<Base>,
    /// As in its ticket.
    generation: String,
    /// For the commit, where this handle may do that.
    written: Option<WrittenPart>,
    /// Until the commit.
    hold: Option<Hold>,
}

impl KeptPart {
    /// What the next part of its rank may refer to, once it is committed.
    fn into_base(self) -> PartBase {
        PartBase { generation: self.generation, base: self.base }
    }
}

impl OpenSession {
    pub(super) fn seq(&self) -> u64 {
        self.seq
    }
}

impl Repository {
    /// Begins a snapshot of several ranks and takes its number. What its parts may refer to is kept until the
    /// session is committed or aborted. For the coordinator.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where the handle may not write, or metrics or metadata are beyond the limits.
    pub fn begin_session(
        &self,
        step: u64,
        world_size: u32,
        metrics: BTreeMap<String, f64>,
        metadata: Box<RawValue>,
    ) -> Result<Ticket> {
        self.shared.must_write("begin a snapshot of several ranks")?;
        let header = self.shared.new_header(step, world_size, metrics, metadata)?;
        let (generation, base, base_packs, hold) = self.shared.ground_for_session()?;
        let ticket = Ticket { header, chunk_bytes: self.shared.options.chunk_bytes, generation, base };
        ticket.encode()?;
        let session = OpenSession { seq: ticket.header.seq, base_packs, _hold: hold };
        self.shared.lock_state().sessions.insert(ticket.header.session_id.clone(), session);
        Ok(ticket)
    }

    /// Digests regions that other ranks hold too, with all threads: what the part of a rank that does not write
    /// them says of them.
    ///
    /// # Errors
    /// [`Error::Store`] where the system refuses threads.
    pub fn tell(&self, held: &[(&EntryInput, &[u8])]) -> Result<Vec<Replica>> {
        let chunk_bytes = self.shared.options.chunk_bytes as usize;
        let tell = |(entry, bytes): &(&EntryInput, &[u8])| {
            let chunks: Vec<ChunkDigest> =
                bytes.par_chunks(chunk_bytes).map(ChunkDigest::of_uncached).collect();
            Replica {
                name: entry.name.clone(),
                dtype: entry.dtype,
                shape: entry.shape.clone(),
                offsets: entry.region.offsets.clone(),
                lengths: entry.region.lengths.clone(),
                digest: ChunkDigest::of_digests(&chunks),
            }
        };
        let held: Vec<_> = held.iter().filter(|(_, bytes)| !bytes.is_empty()).copied().collect();
        let mut replicas: Vec<Replica> =
            self.shared.threads.pool()?.install(|| held.par_iter().map(tell).collect());
        replicas.sort_by(|left, right| (&left.name, &left.offsets).cmp(&(&right.name, &right.offsets)));
        Ok(replicas)
    }

    /// Starts the part of a rank and copies the sources at hand, as [`Repository::begin_save_later`].
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where the ticket is of another repository or has no such rank.
    pub fn begin_part(
        &self,
        request: PartRequest,
        sources: &[Option<&[u8]>],
        later: Option<Box<dyn Later>>,
    ) -> Result<PartSession> {
        self.shared.part_session(request)?.stage(sources, later).map(PartSession)
    }

    /// Writes the part of a rank straight from the sources while the caller waits.
    ///
    /// # Errors
    /// As [`Repository::begin_part`]; [`Error::Store`]. Nothing was committed.
    pub fn write_part(
        &self,
        request: PartRequest,
        sources: &[&[u8]],
        cancelled: &AtomicBool,
    ) -> Result<PartReport> {
        let sources: Vec<Source<'_>> = sources.iter().map(|source| Source::Elements(source)).collect();
        write(self.shared.part_session(request)?, &sources, cancelled)
    }

    /// Joins the parts of all ranks and publishes the snapshot. For the coordinator that began the session.
    ///
    /// `packs` are those that the ranks have reported; without them the parts are looked for in the store.
    ///
    /// # Errors
    /// [`Error::Incomplete`] names the ranks whose part is missing, and the session goes on;
    /// [`Error::Disagreement`] where ranks disagree; [`Error::Conflict`] where another writer took the number.
    pub fn commit_session(&self, ticket: &Ticket, packs: Option<&[String]>) -> Result<CommitReport> {
        self.shared.must_write("commit a snapshot of several ranks")?;
        let committed = self.shared.commit_session(ticket, packs);
        if committed.is_err() {
            self.shared.lock_state().doubt();
        }
        committed
    }

    /// Ends a session without a snapshot: whatever its ranks have written, or still write, is never published.
    /// Ending it again does nothing.
    ///
    /// # Errors
    /// [`Error::Store`] where that can't be made durable: the next open may find all parts, and publish them.
    pub fn abort_session(&self, ticket: &Ticket) -> Result<()> {
        self.shared.must_write("abort a snapshot of several ranks")?;
        let aborted = self.shared.abort_session(ticket);
        self.shared.lock_state().doubt();
        aborted
    }

    /// Tells a rank what became of its part: a committed one is what its next part may refer to.
    pub fn settle_part(&self, ticket: &Ticket, rank: u32, committed: bool) {
        let key = (ticket.header.session_id.clone(), rank);
        let mut state = self.shared.lock_state();
        let Some(kept) = state.parts.remove(&key).filter(|_| committed) else { return };
        state.part_bases.insert(rank, kept.into_base());
        if self.shared.options.access != Access::Write {
            state.current = Some(ticket.header.seq);
        }
    }
}

impl PartSession {
    /// True while sources of the caller are still to be copied.
    #[must_use]
    pub fn awaits_copy(&self) -> bool {
        self.0.awaits_copy()
    }

    /// Commit number that the snapshot will have.
    #[must_use]
    pub fn seq(&self) -> u64 {
        self.0.seq()
    }

    /// Copies the later sources, as [`SaveSession::copy_later`].
    ///
    /// # Errors
    /// As there.
    pub fn copy_later(&mut self, cancelled: &AtomicBool) -> Result<()> {
        self.0.copy_later(cancelled)
    }

    /// Copies what is still to be copied, then writes the pack.
    ///
    /// # Errors
    /// As [`Repository::write_part`].
    pub fn run(self, cancelled: &AtomicBool) -> Result<PartReport> {
        self.0.with_sources(cancelled, |session, sources| write(session, sources, cancelled))
    }
}

/// Writes the pack of a part, and keeps what a commit and the next part need of it.
fn write(session: SaveSession, sources: &[Source<'_>], cancelled: &AtomicBool) -> Result<PartReport> {
    let shared = Arc::clone(&session.shared);
    let (session_id, seq) = (session.content.header.session_id.clone(), session.seq());
    let generation = session.content.ground.generation();
    let Finished { part, figures, pack_name, hold } = session.write(sources, cancelled)?;
    let rank = part.part.rank;
    let report = PartReport { rank, pack: pack_name, length_bytes: part.pack.length_bytes, figures };
    let mut body = part.part.body.clone();
    if let Some(own) = body.packs.first_mut() {
        *own = part.pack.clone();
    }
    let base = Arc::new(Base::new(seq, body, true));
    let is_coordinator = shared.options.access == Access::Write;
    // Another process keeps what the parts of other ranks refer to.
    let (written, hold) = (is_coordinator.then_some(part), is_coordinator.then_some(hold));
    let kept = KeptPart { base, generation, written, hold };
    shared.lock_state().parts.insert((session_id, rank), kept);
    Ok(report)
}

impl Shared {
    fn part_session(self: &Arc<Self>, request: PartRequest) -> Result<SaveSession> {
        self.may_write_parts()?;
        let PartRequest { ticket, rank, entries, replicas, structure, rank_structure } = request;
        let refuse = |reason: String| Err(Error::invalid("part of a snapshot", reason));
        if ticket.header.repository_id != self.repository_id {
            return refuse(format!("the session is of another repository than `{}`", self.store.root()));
        }
        if rank >= ticket.header.world_size {
            return refuse(format!("the session has {} ranks, and no rank {rank}", ticket.header.world_size));
        }
        if ticket.chunk_bytes != self.options.chunk_bytes {
            return refuse(format!(
                "the session has chunks of {} bytes, and rank {rank} of {}",
                ticket.chunk_bytes, self.options.chunk_bytes
            ));
        }
        self.settle_older_parts(&ticket, rank)?;
        let ground = Ground::Ticket { rank, generation: ticket.generation, base: ticket.base };
        let content =
            Content { header: ticket.header, rank, ground, entries, replicas, structure, rank_structure };
        Ok(SaveSession::new(Arc::clone(self), content))
    }

    /// Refuses a second part of one rank for a session, and lets go of those of older sessions: a rank that
    /// nobody tells what became of them learns it from the base of the next ticket.
    fn settle_older_parts(&self, ticket: &Ticket, rank: u32) -> Result<()> {
        let session_id = &ticket.header.session_id;
        let mut state = self.lock_state();
        if state.parts.contains_key(&(session_id.clone(), rank)) {
            return Err(Error::invalid(
                format!("part of rank {rank}"),
                format!("it has saved for this snapshot of step {} already", ticket.header.step),
            ));
        }
        let is_older = |(id, of): &(String, u32)| *of == rank && id != session_id;
        let is_open = |id: &String| state.sessions.contains_key(id);
        let older: Vec<_> =
            state.parts.keys().filter(|key| is_older(key) && !is_open(&key.0)).cloned().collect();
        for key in older {
            let Some(kept) = state.parts.remove(&key) else { continue };
            if ticket.base.as_ref().is_some_and(|base| base.seq == kept.base.seq) {
                state.part_bases.insert(rank, kept.into_base());
            }
        }
        Ok(())
    }

    /// What the parts of a new session may refer to, and what keeps that.
    fn ground_for_session(&self) -> Result<(String, Option<TicketBase>, HashSet<String>, Hold)> {
        loop {
            let (newest, merge_count) = {
                let state = self.lock_state();
                let own = state.current.filter(|seq| state.listing.seqs.contains(seq));
                (own.or_else(|| state.listing.seqs.last().copied()), state.merge_count)
            };
            // A damaged one, or one that lies elsewhere, only means that this save writes everything.
            let newest = newest.filter(|seq| self.has_manifest_at_hand(*seq));
            let table = newest.and_then(|seq| Some((seq, self.pack_table(seq).ok()?)));
            let packs = || table.iter().flat_map(|(_, table)| table.iter()).map(|record| record.name.clone());
            let (hold, gone) = self.registry.hold(table.as_ref().map(|(seq, _)| *seq), packs());
            let state = self.lock_state();
            let is_there = table.as_ref().is_none_or(|(seq, _)| state.listing.seqs.contains(seq));
            if gone.is_empty() && is_there && state.merge_count == merge_count {
                let base = table
                    .as_ref()
                    .map(|(seq, table)| TicketBase { seq: *seq, pack_table: pack_table_digest(table) });
                let generation = format!("{:016x}.{merge_count}", self.nonce);
                return Ok((generation, base, packs().collect(), hold));
            }
        }
    }

    fn commit_session(&self, ticket: &Ticket, packs: Option<&[String]>) -> Result<CommitReport> {
        let committing = Instant::now();
        let session_id = &ticket.header.session_id;
        let base_packs = {
            let state = self.lock_state();
            let session = state.sessions.get(session_id).ok_or_else(|| {
                let reason = "this manager has not begun it, or it was committed or aborted already";
                Error::invalid(format!("session of step {}", ticket.header.step), reason)
            })?;
            session.base_packs.clone()
        };
        let parts = self.collect_parts(ticket, packs)?;
        check_references(&parts, &base_packs)?;
        let manifest = commit::commit(&self.store, parts)?;
        let header = self.committed(manifest, None);
        {
            let mut state = self.lock_state();
            state.sessions.remove(session_id);
            for (_, kept) in state.parts.iter_mut().filter(|((id, _), _)| id == session_id) {
                kept.hold = None;
            }
        }
        let commit_seconds = committing.elapsed().as_secs_f64();
        let retention = self.retention_after_commit().map_err(Arc::new);
        Ok(CommitReport { header, commit_seconds, retention })
    }

    /// The parts of a session: this handle's from memory, the others' from the footers of their packs.
    fn collect_parts(&self, ticket: &Ticket, packs: Option<&[String]>) -> Result<Vec<WrittenPart>> {
        let session_id = &ticket.header.session_id;
        let names = match packs {
            Some(packs) => packs.to_vec(),
            None => self.packs_of(ticket.header.seq)?,
        };
        let own: Vec<WrittenPart> = {
            let state = self.lock_state();
            let of_session = state.parts.iter().filter(|((id, _), _)| id == session_id);
            let written = of_session.filter_map(|(_, kept)| kept.written.as_ref());
            written.filter(|part| names.contains(&part.pack.name)).cloned().collect()
        };
        let known: HashSet<&str> = own.iter().map(|written| written.pack.name.as_str()).collect();
        let others: Vec<&String> = names.iter().filter(|name| !known.contains(name.as_str())).collect();
        let read = |name: &&String| match read_part(self.store.as_ref(), name) {
            // Another session, or one of its ranks that was killed midway: no part of this one.
            Err(error) if packs.is_none() && error.is_damage() => Ok(None),
            read => read,
        };
        let read: Vec<Option<WrittenPart>> =
            self.threads.pool()?.install(|| others.par_iter().map(read).collect::<Result<_>>())?;
        let is_of_session = |written: &WrittenPart| written.part.header.session_id == *session_id;
        let parts: Vec<WrittenPart> =
            own.into_iter().chain(read.into_iter().flatten()).filter(is_of_session).collect();
        if parts.is_empty() {
            let missing_ranks = (0..ticket.header.world_size).collect();
            return Err(Error::Incomplete { seq: ticket.header.seq, missing_ranks });
        }
        Ok(parts)
    }

    fn abort_session(&self, ticket: &Ticket) -> Result<()> {
        let Header { session_id, seq, .. } = &ticket.header;
        {
            let mut state = self.lock_state();
            state.parts.retain(|(id, _), _| id != session_id);
            if state.sessions.remove(session_id).is_none() {
                return Ok(());
            }
        }
        let manifest = Key::new(Folder::Snapshots, &names::manifest_name(*seq))?;
        match self.store.open(&manifest) {
            // It was published after all, by this session or by another writer: its packs stay.
            Ok(_) => return Ok(()),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        // Else the next open would find the parts of all ranks, and publish what was said to have failed.
        let tombstone = Key::new(Folder::Snapshots, &names::tombstone_name(*seq))?;
        self.store.put(&tombstone, names::TOMBSTONE_CONTENT, PutMode::Replace)?;
        self.lock_state().listing.tombstones.insert(*seq);
        let packs = self.packs_of(*seq)?;
        if !packs.is_empty() {
            self.store.delete(Folder::Packs, &packs)?;
        }
        Ok(())
    }

    /// Names of all packs of one number.
    fn packs_of(&self, seq: u64) -> Result<Vec<String>> {
        let rows = self.store.list(Folder::Packs)?;
        let is_of = |name: &String| {
            names::parse_pack_name(name).is_some_and(|name| name.seq == seq && !name.is_merged)
        };
        Ok(rows.into_iter().map(|row| row.name).filter(is_of).collect())
    }

    fn may_write_parts(&self) -> Result<()> {
        match self.options.access {
            Access::Rank => self.same_process("save"),
            _ => self.must_write("save"),
        }
    }
}

/// Refuses parts that refer to what may be deleted: to other packs than those of the base and their own.
fn check_references(parts: &[WrittenPart], base_packs: &HashSet<String>) -> Result<()> {
    let own: HashSet<&str> = parts.iter().map(|written| written.pack.name.as_str()).collect();
    for written in parts {
        let foreign = written
            .part
            .body
            .packs
            .iter()
            .map(|record| record.name.as_str())
            .find(|name| !own.contains(name) && !base_packs.contains(*name));
        if let Some(name) = foreign {
            return Err(Error::Internal {
                what: format!(
                    "part of rank {} refers to `{name}`, which its session does not keep",
                    written.part.rank
                ),
            });
        }
    }
    Ok(())
}
