//! Connection setup: the process that created the unique id sends the ports of all ranks to every rank. Then the ranks
//! connect to each other.

use std::collections::HashSet;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;
use std::{env, fs};

use super::{Answer, Code, refused};
use crate::fault::Fault;
use crate::wire::{read_u32, read_u64};

/// The interval at which a waiting rank checks whether it was aborted.
const PAUSE: Duration = Duration::from_millis(2);

/// The number of this rank, the number of all ranks, and the index of this rank's device among the visible devices.
#[derive(Clone, Copy, Debug)]
pub struct RankPosition {
    pub rank: usize,
    pub ranks: usize,
    pub device: usize,
}

/// The unique id of a communicator, `ncclUniqueId`: the port of the process that created it, and a token.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u8; 128]);

/// The data about a rank that the rank sends to the process that created the unique id.
#[derive(Clone, Copy)]
struct Card {
    rank: u32,
    ranks: u32,
    port: u32,
    /// The index of the rank's device in the machine.
    device: u32,
    host: u64,
}

impl UniqueId {
    pub fn listen() -> Answer<Self> {
        let opened = || {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            let port = listener.local_addr()?.port();
            let mut token = [0; 8];
            fs::File::open("/dev/urandom")?.read_exact(&mut token)?;
            io::Result::Ok((listener, port, u64::from_le_bytes(token)))
        };
        let (listener, port, token) = opened().map_err(|error| refused(Code::SYSTEM_ERROR, &error.to_string()))?;
        thread::spawn(move || {
            if let Err(error) = introduce(&listener, token) {
                eprintln!("gpu-stand-in: NCCL: ranks could not be introduced: {error}");
            }
        });
        let mut bytes = [0; 128];
        bytes[0..2].copy_from_slice(&port.to_le_bytes());
        bytes[2..10].copy_from_slice(&token.to_le_bytes());
        Ok(Self(bytes))
    }

    fn parts(self) -> (u16, u64) {
        let (port, rest) = self.0.split_at(2);
        (u16::from_le_bytes([port[0], port[1]]), u64::from_le_bytes(std::array::from_fn(|at| rest[at])))
    }
}

/// Receives a [`Card`] from each rank, and then sends the cards of all ranks to each of them.
fn introduce(listener: &TcpListener, token: u64) -> io::Result<()> {
    let mut guests: Vec<(Card, TcpStream)> = Vec::new();
    while guests.first().is_none_or(|(card, _)| guests.len() < card.ranks as usize) {
        let (mut stream, _) = listener.accept()?;
        if read_u64(&mut stream)? != token {
            continue;
        }
        let card = Card::read(&mut stream)?;
        let first = guests.first().map_or(card, |(first, _)| *first);
        if card.ranks != first.ranks || guests.iter().any(|(other, _)| other.rank == card.rank) {
            eprintln!("gpu-stand-in: NCCL: rank {} of {} does not fit the others", card.rank, card.ranks);
            continue;
        }
        guests.push((card, stream));
    }
    guests.sort_by_key(|(card, _)| card.rank);
    let cards: Vec<Card> = guests.iter().map(|(card, _)| *card).collect();
    for (_, mut stream) in guests {
        cards.iter().try_for_each(|card| card.write(&mut stream))?;
    }
    Ok(())
}

/// Connects to all other ranks. Returns the sockets in rank order, with `None` for this rank. Returns an error if two
/// ranks use the same device.
///
/// Calls `aborted` repeatedly while it waits, and stops when `aborted` returns true.
pub fn meet(
    place: RankPosition,
    id: UniqueId,
    device: usize,
    aborted: &dyn Fn() -> bool,
) -> Answer<Vec<Option<TcpStream>>> {
    let (root, token) = id.parts();
    let met = || -> io::Result<(Vec<Card>, TcpListener)> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, root))?;
        let number = |value: usize| u32::try_from(value).map_err(io::Error::other);
        let card = Card {
            rank: number(place.rank)?,
            ranks: number(place.ranks)?,
            port: u32::from(listener.local_addr()?.port()),
            device: number(device)?,
            host: host(),
        };
        stream.write_all(&token.to_le_bytes())?;
        card.write(&mut stream)?;
        Fault::DiesMeeting.strikes();
        if Fault::FailsMeeting.happens() {
            return Err(io::Error::other("injected network failure"));
        }
        stream.set_nonblocking(true)?;
        let mut bytes = vec![0; place.ranks * Card::BYTES];
        let mut filled = 0;
        while filled < bytes.len() {
            match stream.read(&mut bytes[filled..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => filled += read,
                Err(error) => wait(error, aborted)?,
            }
        }
        let mut bytes = bytes.as_slice();
        Ok(((0..place.ranks).map(|_| Card::read(&mut bytes)).collect::<io::Result<_>>()?, listener))
    };
    let (cards, listener) = met().map_err(|error| refused(code(&error), &format!("not all ranks came: {error}")))?;
    let mut devices = HashSet::new();
    let doubled = cards.iter().any(|card| !devices.insert((card.host, card.device)));
    if doubled && env::var("NCCL_MULTI_RANK_GPU_ENABLE").as_deref() != Ok("1") {
        return Err(refused(Code::INVALID_USAGE, "Duplicate GPU detected: two ranks have one device"));
    }
    connect(place, &cards, &listener, aborted).map_err(|error| refused(code(&error), &error.to_string()))
}

/// Returns the NCCL code for a socket error. If a peer has closed the connection, the code differs from the code for an
/// error of this rank.
fn code(error: &io::Error) -> Code {
    match error.kind() {
        ErrorKind::UnexpectedEof
        | ErrorKind::ConnectionRefused
        | ErrorKind::ConnectionReset
        | ErrorKind::BrokenPipe => Code::REMOTE_ERROR,
        _ => Code::SYSTEM_ERROR,
    }
}

/// Connects to the lower ranks, and accepts the connections of the higher ranks.
fn connect(
    place: RankPosition,
    cards: &[Card],
    listener: &TcpListener,
    aborted: &dyn Fn() -> bool,
) -> io::Result<Vec<Option<TcpStream>>> {
    let mut sockets: Vec<Option<TcpStream>> = (0..place.ranks).map(|_| None).collect();
    for (rank, card) in cards.iter().enumerate().take(place.rank) {
        let port = u16::try_from(card.port).map_err(io::Error::other)?;
        let mut socket = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port)))?;
        socket.write_all(&cards[place.rank].rank.to_le_bytes())?;
        sockets[rank] = Some(socket);
    }
    let mut missing = place.ranks - place.rank - 1;
    while missing > 0 {
        match listener.accept() {
            Ok((mut socket, _)) => {
                socket.set_nonblocking(false)?;
                let rank = read_u32(&mut socket)? as usize;
                *sockets.get_mut(rank).ok_or(ErrorKind::InvalidData)? = Some(socket);
                missing -= 1;
            }
            Err(error) => wait(error, aborted)?,
        }
    }
    Ok(sockets)
}

fn wait(error: io::Error, aborted: &dyn Fn() -> bool) -> io::Result<()> {
    if error.kind() != ErrorKind::WouldBlock {
        return Err(error);
    }
    if aborted() {
        return Err(io::Error::other("aborted"));
    }
    thread::sleep(PAUSE);
    Ok(())
}

/// Returns a hash of `NCCL_HOSTID`, which stands for the machine. Two ranks with equal hashes must use different
/// devices.
fn host() -> u64 {
    let name = env::var("NCCL_HOSTID").unwrap_or_default();
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

impl Card {
    const BYTES: usize = 24;

    fn write(self, to: &mut impl Write) -> io::Result<()> {
        let numbers = [self.rank, self.ranks, self.port, self.device];
        numbers.iter().try_for_each(|number| to.write_all(&number.to_le_bytes()))?;
        to.write_all(&self.host.to_le_bytes())
    }

    fn read(from: &mut impl Read) -> io::Result<Self> {
        Ok(Self {
            rank: read_u32(from)?,
            ranks: read_u32(from)?,
            port: read_u32(from)?,
            device: read_u32(from)?,
            host: read_u64(from)?,
        })
    }
}
