//! The first words on a connection: who calls, and whether he is let in.
//!
//! Ports are reused and files stay behind, so that a process may call another run, another version or another program.
//! Counts bytes. Invariant: nobody reads more than a few hundred of them from one who has not been let in.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::error::Result;

/// What the processes of one run have in common and nobody else knows.
pub(super) type Token = [u8; 32];

const MAGIC: &[u8; 8] = b"dtshard\n";
/// Of all that goes over these connections.
const VERSION: u32 = 1;

#[derive(Clone, Debug)]
pub(super) struct Hello {
    pub rank: u32,
    pub size: u32,
    pub token: Token,
    /// Tells two processes apart that take themselves for one rank.
    pub caller: u64,
}

/// What is behind magic and version.
const BODY: usize = 4 + 4 + 32 + 8;
pub(super) const HELLO_BYTES: usize = 12 + BODY;

impl Hello {
    pub fn new((rank, size): (u32, u32), token: Token) -> io::Result<Self> {
        Ok(Self { rank, size, token, caller: getrandom::u64()? })
    }

    pub fn bytes(&self) -> Vec<u8> {
        let words = [MAGIC.as_slice(), &VERSION.to_le_bytes(), &self.rank.to_le_bytes(), &self.size.to_le_bytes()];
        [words.concat().as_slice(), &self.token, &self.caller.to_le_bytes()].concat()
    }

    /// Who says this, once enough has come: rank and caller.
    ///
    /// # Errors
    /// Why he is not let in.
    pub fn judge(&self, said: &[u8]) -> Result<Option<(u32, u64)>, Reply> {
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
            return Err(Reply::AnotherRun(format!("rank {rank} is of another run: its token differs")));
        }
        if size != self.size {
            return Err(Reply::refused(format!("rank {rank} counts {size} ranks, this run has {}", self.size)));
        }
        let caller = said.get(52..HELLO_BYTES).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
        Ok(caller.map(|caller| (rank, caller)))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Welcome,
    /// What it called may be replaced by what it looks for.
    AnotherRun(String),
    Refused(String),
}

const MOST_WORDS: usize = 500;

impl Reply {
    pub fn refused(words: impl Into<String>) -> Self {
        Self::Refused(words.into())
    }

    pub fn words(&self) -> &str {
        match self {
            Self::Welcome => "",
            Self::AnotherRun(words) | Self::Refused(words) => words,
        }
    }

    /// To one who reads, or goes without.
    pub fn send(&self, mut stream: &TcpStream) -> io::Result<()> {
        let code = match self {
            Self::Welcome => 0,
            Self::AnotherRun(_) => 1,
            Self::Refused(_) => 2,
        };
        let words = self.words().as_bytes();
        let words = &words[..words.len().min(MOST_WORDS)];
        let length = u16::try_from(words.len()).expect("at most MOST_WORDS").to_le_bytes();
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(&[&[code], length.as_slice(), words].concat())
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
                let words = String::from_utf8_lossy(&said[3..]).into_owned();
                return Ok(match said[0] {
                    0 => Ok(Self::Welcome),
                    1 => Ok(Self::AnotherRun(words)),
                    2 => Ok(Self::Refused(words)),
                    _ => Err(io::Error::other("it is not dtshard")),
                });
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
        let mine = Hello { rank: 0, size: 4, token: [7; 32], caller: 0 };
        let caller = Hello { rank: 2, caller: 99, ..mine.clone() };
        let said = caller.bytes();
        assert_eq!(said.len(), HELLO_BYTES);
        assert_eq!(mine.judge(&said), Ok(Some((2, 99))));
        for length in 0..HELLO_BYTES {
            assert_eq!(mine.judge(&said[..length]), Ok(None), "{length}");
        }
        let refused = |said: &[u8]| mine.judge(said).unwrap_err();
        let other = Hello { token: [8; 32], ..caller.clone() };
        assert!(matches!(refused(&other.bytes()), Reply::AnotherRun(words) if words.contains("rank 2")));
        let fewer = Hello { size: 3, ..caller };
        assert_eq!(refused(&fewer.bytes()).words(), "rank 2 counts 3 ranks, this run has 4");
        let newer = [&MAGIC[..], &[9, 0, 0, 0]].concat();
        assert_eq!(refused(&newer).words(), "it speaks version 9 of the protocol, this is 1");
        assert_eq!(refused(b"GET / HT").words(), "it is not dtshard");
    }
}
