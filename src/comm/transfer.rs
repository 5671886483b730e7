//! Bytes to many peers, or from many, as fast as each goes.
//!
//! Sockets do not block: who is ready is served, by one thread for all that is sent and one for all that is received.
//! Before the bytes of a message there is a header with the operation and how many bytes are to come, so that
//! ranks that do not agree get an error and no message in place of another. A message may come in several stretches.
//! Counts bytes.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::ops::Range;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::fate::other_length;
use super::hello::is_wait;
use super::operation::Operation;
use super::patience::TICK;
use crate::error::{Error, Result};

/// Operation and length.
const HEADER: usize = Operation::BYTES + 8;

fn header(operation: Operation, length: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..Operation::BYTES].copy_from_slice(&operation.bytes());
    header[Operation::BYTES..].copy_from_slice(&(length as u64).to_le_bytes());
    header
}

/// Whether this is what `rank` is to send.
fn check_header(operation: Operation, header: &[u8; HEADER], rank: u32, expected: usize) -> Result<()> {
    let (there, length) = header.split_at(Operation::BYTES);
    operation.check_same(rank, Operation::of_bytes(there.try_into().expect("split there")))?;
    let length = u64::from_le_bytes(length.try_into().expect("8 bytes"));
    if length == expected as u64 { Ok(()) } else { Err(other_length(rank, operation.name, expected as u64, length)) }
}

/// What goes wrong on the way.
#[derive(Debug)]
pub(super) enum Fault {
    /// The connection with that rank.
    Link(u32, io::Error),
    Other(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

/// Bytes to a peer, or from one.
pub(super) struct Stretch<'a, T> {
    pub rank: u32,
    pub stream: &'a TcpStream,
    /// How long the message is that begins here; `None` where one goes on.
    pub of: Option<usize>,
    pub body: T,
}

/// The same under way.
struct Message<'a, T> {
    rank: u32,
    stream: &'a TcpStream,
    of: usize,
    header: [u8; HEADER],
    body: T,
    /// Of header and body.
    done: usize,
}

impl<'a, T> Message<'a, T> {
    fn new(operation: Operation, Stretch { rank, stream, of, body }: Stretch<'a, T>) -> Self {
        let length = of.unwrap_or_default();
        let done = if of.is_some() { 0 } else { HEADER };
        Self { rank, stream, of: length, header: header(operation, length), body, done }
    }

    /// So much of it has gone. Gives how much of that was of the body.
    fn advance(&mut self, went: usize) -> u64 {
        let before = self.done.max(HEADER);
        self.done += went;
        (self.done.max(HEADER) - before) as u64
    }
}

/// Send to each of these ranks its bytes. Gives how many they were.
pub(super) fn send<'a>(
    operation: Operation,
    stretches: impl Iterator<Item = Stretch<'a, &'a [u8]>>,
    going: &dyn Fn() -> Result<()>,
) -> Result<u64, Fault> {
    let messages = stretches.map(|stretch| Message::new(operation, stretch));
    let mut bytes = 0;
    let served = serve(messages.collect(), PollFlags::OUT, going, |message| {
        let body = &message.body[message.done.saturating_sub(HEADER)..];
        let header = &message.header[message.done.min(HEADER)..];
        if header.len() + body.len() == 0 {
            return Ok(true);
        }
        let mut stream = message.stream;
        let sent = stream.write_vectored(&[IoSlice::new(header), IoSlice::new(body)]);
        bytes += message.advance(some(sent).map_err(|error| Fault::Link(message.rank, error))?);
        Ok(message.done == HEADER + message.body.len())
    });
    served.map(|()| bytes)
}

/// Receive from each of these ranks what goes into its range. Gives how many bytes that was.
pub(super) fn receive<'a>(
    operation: Operation,
    stretches: impl Iterator<Item = Stretch<'a, Range<usize>>>,
    memory: &mut [u8],
    going: &dyn Fn() -> Result<()>,
) -> Result<u64, Fault> {
    let messages = stretches.map(|stretch| Message::new(operation, stretch));
    let mut bytes = 0;
    let served = serve(messages.collect(), PollFlags::IN, going, |message| {
        let mut stream = message.stream;
        let rank = message.rank;
        let link = |error| Fault::Link(rank, error);
        if let Some(header) = message.header.get_mut(message.done..).filter(|header| !header.is_empty()) {
            let read = some(stream.read(header)).map_err(link)?;
            message.advance(read);
            if message.done < HEADER {
                return Ok(false);
            }
            check_header(operation, &message.header, message.rank, message.of)?;
        }
        let body = &mut memory[message.body.clone()][message.done - HEADER..];
        if !body.is_empty() {
            let read = some(stream.read(body)).map_err(link)?;
            bytes += message.advance(read);
        }
        Ok(message.done == HEADER + message.body.len())
    });
    served.map(|()| bytes)
}

/// How many bytes went; none is the end of a connection.
fn some(went: io::Result<usize>) -> io::Result<usize> {
    match went {
        Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
        went => went,
    }
}

/// `step` each message that its stream is ready for until it says that it is done.
fn serve<T>(
    mut messages: Vec<Message<'_, T>>,
    ready: PollFlags,
    going: &dyn Fn() -> Result<()>,
    mut step: impl FnMut(&mut Message<'_, T>) -> Result<bool, Fault>,
) -> Result<(), Fault> {
    let tick = Timespec { tv_sec: 0, tv_nsec: i64::from(TICK.subsec_nanos()) };
    let mut is_ready = vec![true; messages.len()];
    loop {
        let mut fault = None;
        let mut ready_now = is_ready.iter();
        messages.retain_mut(|message| {
            if !ready_now.next().expect("one a message") || fault.is_some() {
                return true;
            }
            match advance(message, &mut step) {
                Ok(is_done) => !is_done,
                Err(why) => {
                    fault = Some(why);
                    true
                }
            }
        });
        if let Some(fault) = fault {
            return Err(fault);
        }
        if messages.is_empty() {
            return Ok(());
        }
        going()?;
        let mut polled: Vec<PollFd<'_>> = messages.iter().map(|one| PollFd::new(one.stream, ready)).collect();
        match poll(&mut polled, Some(&tick)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::comm(0, "poll", error.to_string()).into()),
        }
        is_ready = polled.iter().map(|one| !one.revents().is_empty()).collect();
    }
}

/// As long as the stream takes or gives, and not so long that the others wait for it.
fn advance<T>(
    message: &mut Message<'_, T>,
    step: &mut impl FnMut(&mut Message<'_, T>) -> Result<bool, Fault>,
) -> Result<bool, Fault> {
    for _ in 0..16 {
        match step(message) {
            Ok(false) => {}
            Err(Fault::Link(_, error)) if is_wait(&error) => return Ok(false),
            other => return other,
        }
    }
    Ok(false)
}
