//! Messages on the socket between two ranks: a header, followed by the number of bytes that the header states.

use std::io::{self, Read, Write};

/// The header of a message. The receiver knows which message it expects, so a different header means that the program
/// has an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub kind: Kind,
    /// The code of the dtype: `ncclDataType_t`.
    pub dtype: u32,
    /// The code of the reduction operation: `ncclRedOp_t`. The value is 0 if nothing is reduced.
    pub op: u32,
    /// The number of the collective in the communicator, counted from 1. The value is 0 for a send.
    pub collective: u64,
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The message acknowledges that the receiver has taken a message.
    Taken,
    Send,
    Broadcast,
    Reduce,
    AllGather,
    AllReduce,
    ReduceScatter,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Taken, Self::Send, Self::Broadcast, Self::Reduce, Self::AllGather, Self::AllReduce, Self::ReduceScatter];
}

impl Head {
    pub const TAKEN: Self = Self { kind: Kind::Taken, dtype: 0, op: 0, collective: 0, bytes: 0 };

    pub fn write(self, to: &mut impl Write) -> io::Result<()> {
        let mut bytes = [0; 28];
        bytes[0..4].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.dtype.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.op.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.collective.to_le_bytes());
        bytes[20..28].copy_from_slice(&self.bytes.to_le_bytes());
        to.write_all(&bytes)
    }

    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let kind = read_u32(from)?;
        let known = Kind::ALL.into_iter().find(|known| *known as u32 == kind);
        Ok(Self {
            kind: known.ok_or(io::ErrorKind::InvalidData)?,
            dtype: read_u32(from)?,
            op: read_u32(from)?,
            collective: read_u64(from)?,
            bytes: read_u64(from)?,
        })
    }
}

pub fn read_u32(from: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

pub fn read_u64(from: &mut impl Read) -> io::Result<u64> {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip() {
        let head = Head { kind: Kind::ReduceScatter, dtype: 9, op: 4, collective: 7, bytes: 1 << 40 };
        let mut bytes = Vec::new();
        head.write(&mut bytes).unwrap();
        assert_eq!(Head::read(&mut bytes.as_slice()).unwrap(), head);
        assert!(Head::read(&mut [9_u8; 28].as_slice()).is_err());
    }
}
