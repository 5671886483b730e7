//! A communicator, with its state and the messages that its peers have sent.
//!
//! The communicator is in progress while it connects to its peers, while a group is being queued, and while it is
//! finalized. After a failure it stays failed, and its stream blocks, until the communicator is aborted.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use super::bootstrap::{self, RankPosition, UniqueId};
use super::{Answer, Code, refused};
use crate::machine::Machine;
use crate::settings::LostPeers;
use crate::wire::{Head, Kind};

pub struct Communicator {
    place: RankPosition,
    blocking: bool,
    /// The sockets to the other ranks, by rank; the entry of this rank is `None`. The cell is empty until the
    /// communicator is connected.
    peers: OnceLock<Vec<Option<Peer>>>,
    state: Mutex<State>,
    changed: Condvar,
}

struct Peer {
    socket: TcpStream,
    /// A lock that a thread holds while it writes a message.
    writing: Mutex<()>,
}

struct State {
    failed: Option<Code>,
    /// The number of calls that are in progress: connecting, queueing a group, or finalizing.
    starting: usize,
    /// The number of groups that are queued on a stream but are not done.
    running: usize,
    aborted: bool,
    finalized: bool,
    /// The number of collectives that were called on this communicator.
    collectives: u64,
    from: Vec<From>,
}

/// The state of the connection to one peer.
#[derive(Default)]
struct From {
    messages: VecDeque<(Head, Vec<u8>)>,
    /// The number of messages to the peer that the peer has not taken yet.
    untaken: usize,
    lost: bool,
}

/// The error of a group that cannot continue, because a peer is lost, or the communicator has failed or was aborted.
#[derive(Clone, Copy, Debug)]
pub struct Broken;

impl Communicator {
    /// Creates a communicator, and returns while a thread connects it to its peers.
    pub fn begin(place: RankPosition, id: UniqueId, blocking: bool) -> Arc<Self> {
        let state = State {
            failed: None,
            starting: 1,
            running: 0,
            aborted: false,
            finalized: false,
            collectives: 0,
            from: (0..place.ranks).map(|_| From::default()).collect(),
        };
        let new = Arc::new(Self {
            place,
            blocking,
            peers: OnceLock::new(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        let this = Arc::clone(&new);
        thread::spawn(move || {
            let device = Machine::start().devices[place.device].number;
            match bootstrap::meet(place, id, device, &|| this.state().aborted) {
                Ok(sockets) => this.listen(sockets),
                Err(code) => this.fail(code),
            }
            this.change(|state| state.starting -= 1);
        });
        new
    }

    pub fn place(&self) -> RankPosition {
        self.place
    }

    pub fn is_blocking(&self) -> bool {
        self.blocking
    }

    /// Returns the result that `ncclCommGetAsyncError` reports.
    pub fn result(&self) -> Code {
        let state = self.state();
        match state.failed {
            Some(code) => code,
            None if state.starting > 0 => Code::IN_PROGRESS,
            None => Code::SUCCESS,
        }
    }

    /// Waits until no call on the communicator is in progress.
    pub fn settled(&self) {
        drop(self.wait_while(|state| state.starting > 0));
    }

    /// Waits until all groups are done or the communicator has failed.
    pub fn drained(&self) {
        drop(self.wait_while(|state| state.starting + state.running > 0 && state.failed.is_none()));
    }

    /// Returns an error if the communicator must not be used, for example because it was finalized.
    pub fn ready(&self) -> Answer {
        match self.result() {
            Code::IN_PROGRESS => {
                Err(refused(Code::INVALID_ARGUMENT, "the communicator is used while it is in progress"))
            }
            Code::SUCCESS if self.state().finalized => {
                Err(refused(Code::INVALID_ARGUMENT, "the communicator is used after it was finalized"))
            }
            Code::SUCCESS => Ok(()),
            code => Err(code),
        }
    }

    /// Returns the number of a new collective, counted from 1.
    pub fn next_collective(&self) -> u64 {
        let mut state = self.state();
        state.collectives += 1;
        state.collectives
    }

    /// Runs work in another thread. The communicator is in progress until this work ends.
    pub fn start(self: &Arc<Self>, work: impl FnOnce(&Arc<Self>) + Send + 'static) {
        self.change(|state| state.starting += 1);
        let this = Arc::clone(self);
        thread::spawn(move || {
            work(&this);
            this.change(|state| state.starting -= 1);
        });
    }

    pub fn enter(&self) {
        self.change(|state| state.running += 1);
    }

    pub fn leave(&self) {
        self.change(|state| state.running -= 1);
    }

    /// Finalizes the communicator. The communicator is in progress until all groups are done.
    pub fn finalize(self: &Arc<Self>) -> Answer {
        self.ready()?;
        self.change(|state| state.finalized = true);
        self.start(|this| drop(this.wait_while(|state| state.running > 0 && !state.aborted)));
        Ok(())
    }

    /// Aborts the communicator. Returns when no thread of it is waiting for a message any more.
    pub fn abort(&self) {
        self.change(|state| state.aborted = true);
        self.close();
        drop(self.wait_while(|state| state.starting > 0 || state.running > 0));
    }

    /// Closes the sockets, so that reads and writes of peers fail.
    pub fn close(&self) {
        for peer in self.peers.get().into_iter().flatten().flatten() {
            let _ = peer.socket.shutdown(Shutdown::Both);
        }
    }

    /// Records `code` as the error of the communicator, unless it already has an error. Closes the sockets, so that
    /// peers notice.
    pub fn fail(&self, code: Code) {
        self.change(|state| state.failed = state.failed.or(Some(code)));
        self.close();
    }

    /// Blocks until the communicator is aborted, like a kernel whose peer never answers.
    pub fn stand_still(&self) {
        drop(self.wait_while(|state| !state.aborted));
    }

    /// Sends a message. Does not wait until the peer takes it.
    pub fn put(&self, peer: usize, head: Head, data: &[u8]) -> Result<(), Broken> {
        self.change(|state| state.from[peer].untaken += 1);
        if peer == self.place.rank {
            self.change(|state| state.from[peer].messages.push_back((head, data.to_vec())));
            return Ok(());
        }
        self.write(peer, head, data)
    }

    /// Waits for the next message of a peer, and takes it. If its header is not `expected`, the communicator fails.
    pub fn take(&self, peer: usize, expected: Head) -> Result<Vec<u8>, Broken> {
        let mut state = self.wait_while(|state| state.waits(peer) && state.from[peer].messages.is_empty());
        let Some((head, data)) = state.from[peer].messages.pop_front() else {
            drop(state);
            return Err(self.without(peer));
        };
        if peer == self.place.rank {
            state.from[peer].untaken -= 1;
        }
        drop(state);
        if head != expected {
            let rank = self.place.rank;
            let why = format!("rank {rank} expected {expected:?} from rank {peer}, found {head:?}");
            self.fail(refused(Code::INVALID_USAGE, &why));
            return Err(Broken);
        }
        if peer != self.place.rank {
            self.write(peer, Head::TAKEN, &[])?;
        }
        Ok(data)
    }

    /// Waits until a peer has taken all messages that this rank sent to it.
    pub fn wait_taken(&self, peer: usize) -> Result<(), Broken> {
        let taken = self.wait_while(|state| state.waits(peer) && state.from[peer].untaken > 0).from[peer].untaken == 0;
        if taken { Ok(()) } else { Err(self.without(peer)) }
    }

    /// Returns the error for a peer that is lost. The communicator also fails, unless the settings say that NCCL does
    /// not report the loss of a peer.
    fn without(&self, peer: usize) -> Broken {
        let state = self.state();
        let reports_error = Machine::start().settings.lost_peers == LostPeers::Error;
        if reports_error && !state.aborted && state.failed.is_none() {
            drop(state);
            self.fail(refused(Code::REMOTE_ERROR, &format!("rank {}: rank {peer} is lost", self.place.rank)));
        }
        Broken
    }

    fn write(&self, peer: usize, head: Head, data: &[u8]) -> Result<(), Broken> {
        let to = self.peers.get().and_then(|peers| peers[peer].as_ref()).ok_or(Broken)?;
        let written = {
            let _writing = to.writing.lock().unwrap_or_else(PoisonError::into_inner);
            let mut socket = &to.socket;
            head.write(&mut socket).and_then(|()| socket.write_all(data))
        };
        written.map_err(|_| self.without(peer))
    }

    /// Starts a thread for each peer, which receives the messages of the peer.
    fn listen(self: &Arc<Self>, sockets: Vec<Option<TcpStream>>) {
        for (peer, socket) in sockets.iter().enumerate() {
            let Some(Ok(mut socket)) = socket.as_ref().map(TcpStream::try_clone) else { continue };
            let _ = socket.set_nodelay(true);
            let this = Arc::clone(self);
            thread::spawn(move || {
                while let Ok(head) = Head::read(&mut socket) {
                    let Ok(bytes) = usize::try_from(head.bytes) else { break };
                    let mut data = vec![0; bytes];
                    if socket.read_exact(&mut data).is_err() {
                        break;
                    }
                    this.change(|state| match head.kind {
                        Kind::Taken => state.from[peer].untaken -= 1,
                        _ => state.from[peer].messages.push_back((head, data)),
                    });
                }
                this.change(|state| state.from[peer].lost = true);
            });
        }
        let _ = self.peers.set(sockets.into_iter().map(|socket| socket.map(Peer::new)).collect());
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    fn wait_while(&self, condition: impl FnMut(&mut State) -> bool) -> MutexGuard<'_, State> {
        self.changed.wait_while(self.state(), condition).unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Peer {
    fn new(socket: TcpStream) -> Self {
        Self { socket, writing: Mutex::new(()) }
    }
}

impl State {
    /// Returns true if a message of the peer may still arrive.
    fn waits(&self, peer: usize) -> bool {
        !self.aborted && self.failed.is_none() && !self.from[peer].lost
    }
}
