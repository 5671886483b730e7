//! The first words on a connection: who calls, and whether he is let in.
//!
//! Ports are reused and files stay behind, so that a process may call another run, another version or another program.
//! Counts bytes. Invariant: nobody reads more than a few hundred of them from one who has not been let in.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::Process;
use super::fate::{Gone, Why};
use crate::error::Result;

/// What the processes of one run have in common and nobody else knows.
pub(super) type Token = [u8; 32];

const MAGIC: &[u8; 8] = b"dtshard\n";
/// Of all that goes over these connections.
const VERSION: u32 = 2;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub rank: u32,
    pub size: u32,
    pub token: Token,
    /// Tells two processes apart that take themselves for one rank.
    pub caller: u64,
    /// What people know it by: `n1, pid 4711`.
    pub who: String,
}

/// What is behind magic and version.
const BODY: usize = 4 + 4 + 32 + 8 + WHO_BYTES;
/// A name that is longer is cut, one that is shorter ends at a zero.
const WHO_BYTES: usize = 88;
pub(super) const HELLO_BYTES: usize = 12 + BODY;

impl Hello {
    pub fn new((rank, size): (u32, u32), token: Token) -> io::Result<Self> {
        Ok(Self { rank, size, token, caller: getrandom::u64()?, who: Process::this().to_string() })
    }

    pub fn bytes(&self) -> Vec<u8> {
        let words = [MAGIC.as_slice(), &VERSION.to_le_bytes(), &self.rank.to_le_bytes(), &self.size.to_le_bytes()];
        let mut who = self.who.clone().into_bytes();
        who.resize(WHO_BYTES, 0);
        [words.concat().as_slice(), &self.token, &self.caller.to_le_bytes(), &who].concat()
    }

    /// Who says this, once enough has come.
    ///
    /// # Errors
    /// Why he is not let in.
    pub fn judge(&self, said: &[u8]) -> Result<Option<Self>, Reply> {
        let number =
            |at: usize| said.get(at..at + 4).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("4 bytes")));
        if !MAGIC.starts_with(&said[..said.len().min(MAGIC.len())]) {
            return Err(Reply::refused("it is not dtshard"));
        }
        match number(8) {
            Some(VERSION) | None => {}
            Some(version) => {
                return Err(Reply::refused(format!("it speaks version {version} of the protocol, this is {VERSION}")));
            }
        }
        let (Some(rank), Some(size), Some(token)) = (number(12), number(16), said.get(20..52)) else {
            return Ok(None);
        };
        if token != self.token {
            return Err(Reply::AnotherRun(format!("process {rank} is of another run: its token differs")));
        }
        if size != self.size {
            return Err(Reply::refused(format!("process {rank} counts {size} processes, this run has {}", self.size)));
        }
        let Some((caller, who)) = said.get(52..HELLO_BYTES).and_then(<[u8]>::split_first_chunk) else {
            return Ok(None);
        };
        let who = who.split(|byte| *byte == 0).next().unwrap_or_default();
        let who = String::from_utf8_lossy(who).into_owned();
        Ok(Some(Self { rank, size, token: self.token, caller: u64::from_le_bytes(*caller), who }))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Welcome,
    /// What it called may be replaced by what it looks for.
    AnotherRun(String),
    Refused(String),
    /// To one who was let in: the others are not waited for any more.
    GaveUp(Gone),
    /// To one who was let in: whom process 0 waits for, as it says it itself.
    Waiting(String),
}

/// In bytes.
pub(super) const MOST_WORDS: usize = 500;

impl Reply {
    pub fn refused(words: impl Into<String>) -> Self {
        Self::Refused(words.into())
    }

    pub fn words(&self) -> String {
        match self {
            Self::Welcome => String::new(),
            Self::AnotherRun(words) | Self::Refused(words) | Self::Waiting(words) => words.clone(),
            Self::GaveUp(gone) => gone.error("rendezvous").to_string(),
        }
    }

    /// To one who reads, or goes without. Words that are too long are cut.
    pub fn send(&self, mut stream: &TcpStream) -> io::Result<()> {
        let (code, content) = self.bytes();
        let content = &content[..content.len().min(MOST_WORDS)];
        let length = u16::try_from(content.len()).expect("at most MOST_WORDS").to_le_bytes();
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(&[&[code], length.as_slice(), content].concat())
    }

    fn bytes(&self) -> (u8, Vec<u8>) {
        match self {
            Self::Welcome => (0, Vec::new()),
            Self::AnotherRun(words) => (1, words.clone().into_bytes()),
            Self::Refused(words) => (2, words.clone().into_bytes()),
            Self::GaveUp(Gone { rank, why: Why::Failed(words) }) => {
                (3, [rank.to_le_bytes().as_slice(), words.as_bytes()].concat())
            }
            Self::GaveUp(Gone { rank, why: Why::Stopped(which) }) => {
                (4, [rank.to_le_bytes().as_slice(), &(*which as u64).to_le_bytes()].concat())
            }
            Self::Waiting(words) => (5, words.clone().into_bytes()),
        }
    }

    /// `None` for what is no reply.
    fn of_bytes(code: u8, content: &[u8]) -> Option<Self> {
        let words = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let of_rank = || content.split_first_chunk().map(|(rank, rest)| (u32::from_le_bytes(*rank), rest));
        match code {
            0 => Some(Self::Welcome),
            1 => Some(Self::AnotherRun(words(content))),
            2 => Some(Self::Refused(words(content))),
            3 => of_rank().map(|(rank, rest)| Self::GaveUp(Gone { rank, why: Why::Failed(words(rest)) })),
            4 => {
                let (rank, rest) = of_rank()?;
                let which = u64::from_le_bytes(rest.try_into().ok()?);
                Some(Self::GaveUp(Gone { rank, why: Why::of_stop(usize::try_from(which).ok()?)? }))
            }
            5 => Some(Self::Waiting(words(content))),
            _ => None,
        }
    }

    /// Wait for one, and ask all the time whether to go on.
    pub fn receive(mut stream: &TcpStream, until: Instant, going: &dyn Fn() -> Result<()>) -> Result<io::Result<Self>> {
        let mut said = Vec::new();
        if let Err(error) = stream.set_read_timeout(Some(Duration::from_millis(50))) {
            return Ok(Err(error));
        }
        loop {
            let length = said.get(1..3).map_or(0, |bytes| u16::from_le_bytes([bytes[0], bytes[1]]).into());
            if length > MOST_WORDS {
                return Ok(Err(io::Error::other("it is not dtshard")));
            }
            let whole = 3 + length;
            if said.len() == whole {
                return Ok(Self::of_bytes(said[0], &said[3..]).ok_or_else(|| io::Error::other("it is not dtshard")));
            }
            going()?;
            let mut more = [0; MOST_WORDS + 3];
            match stream.read(&mut more[..whole - said.len()]) {
                Ok(0) => return Ok(Err(io::Error::other("it closed the connection"))),
                Ok(read) => said.extend_from_slice(&more[..read]),
                Err(error) if is_wait(&error) && Instant::now() < until => {}
                Err(error) if is_wait(&error) => return Ok(Err(io::Error::other("it does not answer"))),
                Err(error) => return Ok(Err(error)),
            }
        }
    }
}

/// Nothing has come yet.
pub(super) fn is_wait(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_let_in() {
        let mine = Hello { rank: 0, size: 4, token: [7; 32], caller: 0, who: "n1, pid 1".into() };
        let caller = Hello { rank: 2, caller: 99, ..mine.clone() };
        let said = caller.bytes();
        assert_eq!(said.len(), HELLO_BYTES);
        assert_eq!(mine.judge(&said), Ok(Some(caller.clone())));
        for length in 0..HELLO_BYTES {
            assert_eq!(mine.judge(&said[..length]), Ok(None), "{length}");
        }
        let refused = |said: &[u8]| mine.judge(said).unwrap_err();
        let other = Hello { token: [8; 32], ..caller.clone() };
        assert!(matches!(refused(&other.bytes()), Reply::AnotherRun(words) if words.contains("process 2")));
        let fewer = Hello { size: 3, ..caller };
        assert_eq!(refused(&fewer.bytes()).words(), "process 2 counts 3 processes, this run has 4");
        let newer = [&MAGIC[..], &[9, 0, 0, 0]].concat();
        assert_eq!(refused(&newer).words(), "it speaks version 9 of the protocol, this is 2");
        assert_eq!(refused(b"GET / HT").words(), "it is not dtshard");
    }

    #[test]
    fn replies_come_back() {
        let gone = |rank, why| Reply::GaveUp(Gone { rank, why });
        for reply in [
            Reply::Welcome,
            Reply::AnotherRun("its token differs".into()),
            Reply::refused(""),
            gone(7, "its process ended".into()),
            gone(u32::MAX, Why::Stopped(1)),
            Reply::Waiting("waiting for process 2 of 4".into()),
        ] {
            let (code, content) = reply.bytes();
            assert_eq!(Reply::of_bytes(code, &content), Some(reply));
        }
        for (code, content) in [(3, &[1, 0, 0][..]), (4, &[0; 11]), (4, &[9; 12]), (4, &[0; 13]), (6, &[])] {
            assert_eq!(Reply::of_bytes(code, content), None, "{code} {content:?}");
        }
    }
}
