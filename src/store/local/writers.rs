//! Two threads that write the full blocks of one staged object behind the caller's back.
//!
//! They know neither files nor paths: a block goes to a sink, a function of offset and bytes. The
//! number of blocks bounds the memory and makes the caller wait for the medium. The first failure, a
//! panic included, stops everything and is handed out once. The threads end with [`Writers::stop`].

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::blocks::{BLOCKS_PER_WRITE, Block, BlockPool};

/// Threads of one staged write. Two keep a local disk busy while one of them is between two blocks.
const THREAD_COUNT: usize = 2;

/// Writes bytes at an offset of the object.
pub(super) type Sink = Box<dyn Fn(u64, &[u8]) -> io::Result<()> + Send + Sync>;

/// Why the writers stopped.
#[derive(Debug)]
pub(super) enum Failure {
    /// A write failed.
    Io(io::Error),
    /// The sink panicked, with this message.
    Panic(String),
    /// The failure was handed out before.
    Reported,
}

/// The running threads.
pub(super) struct Writers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    sink: Sink,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    queue: VecDeque<(u64, Block)>,
    empty: Vec<Block>,
    /// Blocks that this write has taken from the pool, wherever they are now.
    taken_count: usize,
    closed: bool,
    failure: Option<Failure>,
}

impl Writers {
    /// Starts the threads; the caller already holds one block.
    pub(super) fn start(sink: Sink) -> io::Result<Self> {
        let state =
            State { queue: VecDeque::new(), empty: Vec::new(), taken_count: 1, closed: false, failure: None };
        let shared = Arc::new(Shared { sink, state: Mutex::new(state), changed: Condvar::new() });
        let mut writers = Self { shared, threads: Vec::with_capacity(THREAD_COUNT) };
        for _ in 0..THREAD_COUNT {
            let shared = Arc::clone(&writers.shared);
            let started =
                thread::Builder::new().name("varvite-write".to_owned()).spawn(move || shared.work());
            match started {
                Ok(thread) => writers.threads.push(thread),
                Err(error) => {
                    writers.join();
                    return Err(error);
                }
            }
        }
        Ok(writers)
    }

    /// Queues a block for `offset_bytes`.
    pub(super) fn write(&self, offset_bytes: u64, block: Block) -> Result<(), Failure> {
        let mut state = self.shared.lock();
        state.refuse_after_failure()?;
        state.queue.push_back((offset_bytes, block));
        self.shared.changed.notify_all();
        Ok(())
    }

    /// An empty block, waiting for a written one where all are in use.
    pub(super) fn empty_block(&self, pool: &BlockPool) -> Result<Block, Failure> {
        let mut state = self.shared.lock();
        loop {
            state.refuse_after_failure()?;
            if let Some(block) = state.empty.pop() {
                return Ok(block);
            }
            if state.taken_count < BLOCKS_PER_WRITE {
                state.taken_count += 1;
                return Ok(pool.take());
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until every queued block is written, ends the threads and gives the blocks back.
    pub(super) fn stop(mut self, pool: &BlockPool) -> Result<(), Failure> {
        self.join();
        let mut state = self.shared.lock();
        for block in state.empty.drain(..) {
            pool.give_back(block);
        }
        state.refuse_after_failure()
    }

    /// Ends the threads without writing what is still queued.
    pub(super) fn cancel(self, pool: &BlockPool) {
        let queued = std::mem::take(&mut self.shared.lock().queue);
        self.shared.lock().empty.extend(queued.into_iter().map(|(_, block)| block));
        // The object is thrown away, so how its last writes ended tells the caller nothing.
        let _ = self.stop(pool);
    }

    fn join(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // A thread catches the panics of its sink itself.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Writers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Writers({} threads)", self.threads.len())
    }
}

impl State {
    fn refuse_after_failure(&mut self) -> Result<(), Failure> {
        let failure = self.failure.take();
        if failure.is_some() {
            self.failure = Some(Failure::Reported);
        }
        failure.map_or(Ok(()), Err)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next queued block; `None` ends the thread.
    fn next(&self) -> Option<(u64, Block)> {
        let mut state = self.lock();
        loop {
            if state.failure.is_some() {
                return None;
            }
            if let Some(queued) = state.queue.pop_front() {
                return Some(queued);
            }
            if state.closed {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self) {
        while let Some((offset_bytes, mut block)) = self.next() {
            let written = panic::catch_unwind(AssertUnwindSafe(|| (self.sink)(offset_bytes, block.filled())));
            let failure = match written {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(Failure::Io(error)),
                Err(payload) => Some(Failure::Panic(panic_text(payload.as_ref()))),
            };
            block.clear();
            let mut state = self.lock();
            state.empty.push(block);
            if state.failure.is_none() {
                state.failure = failure;
            }
            self.changed.notify_all();
        }
    }
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn block_of(pool: &BlockPool, bytes: &[u8]) -> Block {
        let mut block = pool.take();
        block.fill(bytes);
        block
    }

    #[test]
    fn every_queued_block_is_written_at_its_offset_before_stop_returns() {
        let pool = BlockPool::default();
        let sum = Arc::new(AtomicU64::new(0));
        let total = Arc::clone(&sum);
        let writers = Writers::start(Box::new(move |offset_bytes, bytes| {
            total.fetch_add(offset_bytes * u64::from(bytes[0]), Ordering::Relaxed);
            Ok(())
        }))
        .unwrap();
        let mut block = pool.take();
        for offset_bytes in 1..=20 {
            block.clear();
            block.fill(&[3]);
            writers.write(offset_bytes, block).unwrap();
            block = writers.empty_block(&pool).unwrap();
        }
        writers.stop(&pool).unwrap();
        assert_eq!(sum.load(Ordering::Relaxed), 3 * (20 * 21 / 2));
    }

    #[test]
    fn the_caller_waits_for_the_medium_once_all_blocks_are_in_use() {
        let pool = BlockPool::default();
        let gate = Arc::new(Mutex::new(()));
        let sink_gate = Arc::clone(&gate);
        let closed = gate.lock().unwrap();
        let writers = Writers::start(Box::new(move |_, _| {
            drop(sink_gate.lock());
            Ok(())
        }))
        .unwrap();
        let shared = Arc::clone(&writers.shared);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut block = pool.take();
                for offset_bytes in 0..20 {
                    block.fill(&[1]);
                    writers.write(offset_bytes, block).unwrap();
                    block = writers.empty_block(&pool).unwrap();
                }
            });
            while shared.lock().taken_count < BLOCKS_PER_WRITE {
                thread::yield_now();
            }
            drop(closed);
        });
        assert_eq!(shared.lock().taken_count, BLOCKS_PER_WRITE);
    }

    #[test]
    fn a_failed_write_is_handed_out_once_and_stops_the_rest() {
        let pool = BlockPool::default();
        let writers = Writers::start(Box::new(|_, _| Err(io::Error::from_raw_os_error(28)))).unwrap();
        writers.write(0, block_of(&pool, &[1])).unwrap();
        // Waits until all blocks are in use, so the failure has surfaced by then.
        let failure = loop {
            match writers.empty_block(&pool) {
                Ok(block) => {
                    if let Err(failure) = writers.write(1, block) {
                        break failure;
                    }
                }
                Err(failure) => break failure,
            }
        };
        assert!(matches!(failure, Failure::Io(error) if error.raw_os_error() == Some(28)));
        assert!(matches!(writers.empty_block(&pool), Err(Failure::Reported)));
        assert!(matches!(writers.stop(&pool), Err(Failure::Reported)));
    }

    #[test]
    fn a_panic_is_a_failure_and_does_not_leave_the_caller_waiting() {
        let pool = BlockPool::default();
        let writers = Writers::start(Box::new(|_, _| panic!("sink broke"))).unwrap();
        writers.write(0, block_of(&pool, &[1])).unwrap();
        assert!(matches!(writers.stop(&pool), Err(Failure::Panic(text)) if text == "sink broke"));
    }

    #[test]
    fn cancel_drops_what_is_queued() {
        let pool = BlockPool::default();
        let gate = Arc::new(Mutex::new(()));
        let (sink_gate, written) = (Arc::clone(&gate), Arc::new(AtomicU64::new(0)));
        let count = Arc::clone(&written);
        let writers = Writers::start(Box::new(move |_, _| {
            count.fetch_add(1, Ordering::SeqCst);
            drop(sink_gate.lock());
            Ok(())
        }))
        .unwrap();
        let closed = gate.lock().unwrap();
        for offset_bytes in 0..4 {
            writers.write(offset_bytes, block_of(&pool, &[1])).unwrap();
        }
        let shared = Arc::clone(&writers.shared);
        let cancelling = thread::spawn(move || writers.cancel(&pool));
        while !shared.lock().closed {
            thread::yield_now();
        }
        drop(closed);
        cancelling.join().unwrap();
        assert!(written.load(Ordering::SeqCst) <= THREAD_COUNT as u64, "only blocks already being written");
    }
}
