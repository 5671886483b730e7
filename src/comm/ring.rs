//! An all-gather round a ring: each rank sends to the next one and receives from the one before.
//!
//! What a rank has goes to the next one, which passes it on, until all have it: every byte goes once into each rank and
//! at most once out of it, however many there are. It goes in pieces, each passed on as soon as it is there. Counts
//! bytes. Invariant: each range is as long as the rank before says, so all ranks agree on all of them.

use std::iter::once;
use std::net::TcpStream;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};

use super::operation::Operation;
use super::patience::TICK;
use super::transfer::{Fault, Stretch, receive, send};
use crate::error::Result;

/// Long beside what it costs to wait for one, short beside a range.
const PIECE: usize = 1 << 20;

/// A piece to be sent, of a range of how many bytes if it is the first of it.
pub(super) struct Piece<'m>(Option<usize>, &'m [u8]);

/// Hand out this rank's own range, which is the first to be sent.
pub(super) fn begin<'m>(own: &'m [u8], passed: &Sender<Piece<'m>>) {
    for (of, piece) in pieces(own.len()) {
        pass(passed, Piece(of, &own[piece]));
    }
}

/// Receive ranges from the rank before, in the order in which they come, and hand out all but the last. Gives how many
/// bytes they were.
pub(super) fn take<'m>(
    operation: Operation,
    (rank, stream): (u32, &TcpStream),
    ranges: impl DoubleEndedIterator<Item = &'m mut [u8]>,
    passed: &Sender<Piece<'m>>,
    going: &dyn Fn() -> Result<()>,
) -> Result<u64, Fault> {
    let mut bytes = 0;
    let mut ranges = ranges.peekable();
    while let Some(mut range) = ranges.next() {
        for (of, Range { start, end }) in pieces(range.len()) {
            let (piece, behind) = range.split_at_mut(end - start);
            bytes += receive(operation, once(Stretch { rank, stream, of, body: 0..piece.len() }), piece, going)?;
            if ranges.peek().is_some() {
                pass(passed, Piece(of, piece));
            }
            range = behind;
        }
    }
    Ok(bytes)
}

/// Send to the next rank what is handed out, until no more is. Gives how many bytes that was.
pub(super) fn pass_on(
    operation: Operation,
    (rank, stream): (u32, &TcpStream),
    pieces: &Receiver<Piece<'_>>,
    going: &dyn Fn() -> Result<()>,
) -> Result<u64, Fault> {
    let mut bytes = 0;
    loop {
        match pieces.recv_timeout(TICK) {
            Ok(Piece(of, body)) => bytes += send(operation, once(Stretch { rank, stream, of, body }), going)?,
            Err(RecvTimeoutError::Timeout) => going()?,
            Err(RecvTimeoutError::Disconnected) => return Ok(bytes),
        }
    }
}

fn pass<'m>(passed: &Sender<Piece<'m>>, piece: Piece<'m>) {
    // Who does not listen any more has failed, and says so itself.
    let _ = passed.send(piece);
}

/// Where the pieces of a range are, with its length before the first. One that is empty has one, too.
fn pieces(length: usize) -> impl Iterator<Item = (Option<usize>, Range<usize>)> {
    let starts = (0..length.max(1)).step_by(PIECE);
    starts.map(move |start| ((start == 0).then_some(length), start..length.min(start + PIECE)))
}
