//! What goes over a connection between a rank and rank 0: a header of fixed length, and bytes of as many as that says.
//!
//! Counts bytes. Invariant: what a header says is not believed: memory grows with what has come.

use std::io::{self, Read};

use super::fate::{Gone, Why};
use super::operation::Operation;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// Alive, and in this operation.
    Beat(Operation),
    /// What a rank says in the operation of this number.
    Said {
        number: u64,
        rank: u32,
        bytes: Vec<u8>,
    },
    Gone(Gone),
    Left,
}

/// Of what one rank may say at a time.
pub(super) const MOST: usize = 64 << 20;
/// Of why a rank is gone.
const MOST_WORDS: usize = 16 << 10;

/// Kind, rank, operation and length.
const HEADER: usize = 1 + 4 + Operation::BYTES + 4;

impl Frame {
    /// Behind what is in `bytes`. Words that are too long are cut.
    pub fn write(&self, bytes: &mut Vec<u8>) {
        let gather = |number| Operation { name: "gather", number };
        let (kind, rank, operation, payload): (u8, u32, Operation, &[u8]) = match self {
            Self::Beat(operation) => (0, 0, *operation, &[]),
            Self::Said { number, rank, bytes } => (1, *rank, gather(*number), bytes),
            Self::Gone(Gone { rank, why: Why::Failed(why) }) => {
                (2, *rank, Operation::START, &why.as_bytes()[..why.len().min(MOST_WORDS)])
            }
            Self::Gone(Gone { rank, why: Why::Stopped(which) }) => {
                (4, *rank, Operation { number: *which as u64, ..Operation::START }, &[])
            }
            Self::Left => (3, 0, Operation::START, &[]),
        };
        let length = u32::try_from(payload.len()).expect("at most MOST");
        bytes.push(kind);
        bytes.extend_from_slice(&rank.to_le_bytes());
        bytes.extend_from_slice(&operation.bytes());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(payload);
    }

    /// # Errors
    /// Those of the reader; `UnexpectedEof` at the end, and `InvalidData` for what is no frame.
    pub fn read(reader: &mut impl Read) -> io::Result<Self> {
        let mut header = [0; HEADER];
        reader.read_exact(&mut header)?;
        let rank = u32::from_le_bytes(header[1..5].try_into().expect("4 bytes"));
        let operation = Operation::of_bytes(header[5..14].try_into().expect("9 bytes"));
        let operation = operation.ok_or(io::ErrorKind::InvalidData)?;
        let length = u32::from_le_bytes(header[14..].try_into().expect("4 bytes"));
        let most = match header[0] {
            1 => MOST,
            2 => MOST_WORDS,
            _ => 0,
        };
        if length as usize > most {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut bytes = Vec::new();
        if reader.take(length.into()).read_to_end(&mut bytes)? < length as usize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match header[0] {
            0 => Ok(Self::Beat(operation)),
            1 => Ok(Self::Said { number: operation.number, rank, bytes }),
            2 => Ok(Self::Gone(Gone { rank, why: String::from_utf8_lossy(&bytes).into_owned().into() })),
            3 => Ok(Self::Left),
            4 => {
                let which = usize::try_from(operation.number).ok().and_then(Why::of_stop);
                Ok(Self::Gone(Gone { rank, why: which.ok_or(io::ErrorKind::InvalidData)? }))
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back() {
        let frames = [
            Frame::Beat(Operation { name: "exchange", number: 1 << 33 }),
            Frame::Said { number: 1 << 40, rank: 3, bytes: vec![1, 2, 3] },
            Frame::Said { number: 0, rank: 0, bytes: Vec::new() },
            Frame::Gone(Gone { rank: 7, why: "no space".into() }),
            Frame::Gone(Gone { rank: 1, why: Why::Stopped(3) }),
            Frame::Left,
        ];
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| frame.write(&mut bytes));
        let mut reader = bytes.as_slice();
        for frame in &frames {
            assert_eq!(&Frame::read(&mut reader).unwrap(), frame);
        }
        assert_eq!(Frame::read(&mut reader).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let kind_of = |bytes: &[u8]| Frame::read(&mut &*bytes).unwrap_err().kind();
        assert_eq!(kind_of(&[9; HEADER]), io::ErrorKind::InvalidData);
        let mut said = Vec::new();
        Frame::Said { number: 1, rank: 1, bytes: vec![5; 100] }.write(&mut said);
        assert_eq!(kind_of(&said[..said.len() - 1]), io::ErrorKind::UnexpectedEof);
        said[14..18].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(kind_of(&said), io::ErrorKind::InvalidData);
        let mut beat = Vec::new();
        Frame::Beat(Operation::START).write(&mut beat);
        beat[14] = 1;
        assert_eq!(kind_of(&beat), io::ErrorKind::InvalidData);
        // A little that says it is much.
        said[14..18].copy_from_slice(&u32::try_from(MOST).unwrap().to_le_bytes());
        assert_eq!(kind_of(&said), io::ErrorKind::UnexpectedEof);
        let mut long = Vec::new();
        Frame::Gone(Gone { rank: 0, why: "x".repeat(MOST_WORDS + 5).into() }).write(&mut long);
        assert!(Frame::read(&mut long.as_slice()).is_ok());
    }
}
