//! The lexer, which reads one opcode with its argument at a time.
//!
//! Reason for a separate lexer: the reader walks every pickle twice. The first walk finds the memo entries that are
//! fetched (see [`super::memo`]), and the second walk runs the opcodes. Both walks use this lexer, so both walks find
//! the same opcodes.
//!
//! Positions are bytes of the input. Invariant: every returned [`Span`] is inside the input, and each opcode consumes
//! at least one byte. So the length of the input bounds the numbers of opcodes, nodes and memo entries.
//!
//! Source of the rule: CPython `Lib/pickletools.py` (argument encodings) and `Lib/pickle.py`. The text opcodes of
//! protocols 0 and 1, the extension registry and out-of-band buffers are refused by name: no checkpoint uses them.

use super::PickleError;

/// A range of the input, in bytes. The start and the end have 32 bits each, so that a node takes only 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub start: u32,
    pub len: u32,
}

impl Span {
    /// Returns the bytes of the input `bytes` in this range.
    pub fn of(self, bytes: &[u8]) -> &[u8] {
        let start = self.start as usize;
        &bytes[start..start + self.len as usize]
    }

    /// Returns the offset of the first byte after the range.
    pub fn end(self) -> usize {
        self.start as usize + self.len as usize
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Op {
    /// The opcode PROTO or FRAME, which the machine ignores.
    Nothing,
    Stop,
    Mark,
    Pop,
    PopMark,
    Dup,
    None,
    Bool(bool),
    Int(i64),
    /// An int of any size in little-endian two's complement.
    Long(Span),
    Float(f64),
    Unicode(Span),
    /// A `str` of Python 2. The value becomes a text if its bytes are valid UTF-8, otherwise a `bytes` object.
    String(Span),
    Bytes(Span),
    ByteArray(Span),
    EmptyTuple,
    /// The opcode TUPLE1, TUPLE2 or TUPLE3, with the number of items.
    TupleOf(usize),
    Tuple,
    EmptyList,
    Append,
    Appends,
    EmptyDict,
    SetItem,
    SetItems,
    EmptySet,
    AddItems,
    FrozenSet,
    Global {
        module: Span,
        name: Span,
    },
    StackGlobal,
    Reduce,
    NewObj,
    NewObjEx,
    Build,
    PersistentId,
    Put(u32),
    Memoize,
    Get(u32),
}

/// For each opcode with a fixed length that does not access the memo, its length in bytes; 0 for all other opcodes.
const WIDTHS: [u8; 256] = {
    let mut widths = [0; 256];
    let mut index = 0;
    while index < FIXED.len() {
        widths[FIXED[index].0 as usize] = FIXED[index].1;
        index += 1;
    }
    widths
};

#[rustfmt::skip]
const FIXED: [(u8, u8); 29] = [
    (b'(', 1), (b'0', 1), (b'1', 1), (b'2', 1), (b'N', 1), (0x88, 1), (0x89, 1), (b'K', 2), (b'M', 3), (b'J', 5),
    (b'G', 9), (b')', 1), (0x85, 1), (0x86, 1), (0x87, 1), (b't', 1), (b']', 1), (b'a', 1), (b'e', 1), (b'}', 1),
    (b's', 1), (b'u', 1), (0x93, 1), (b'R', 1), (0x81, 1), (0x92, 1), (b'b', 1), (b'q', 2), (0x94, 1),
];

/// The reason why a walk over the opcodes ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Stop,
    /// The walk reached the end of the input, and the last opcode is complete.
    Input,
}

/// Returns the offsets at which a frame can start: offset 2 (after PROTO), and then the end of each frame, as long as
/// the frames follow each other.
pub(super) fn frames(bytes: &[u8]) -> impl Iterator<Item = usize> {
    let behind = |at: usize| {
        let [0x95, len @ ..] = bytes.get(at..)?.first_chunk::<9>()? else { return None };
        usize::try_from(u64::from_le_bytes(*len)).ok()?.checked_add(at + 9)
    };
    std::iter::successors(Some(2), move |at| behind(*at).filter(|next| *next < bytes.len()))
}

pub(super) struct Lexer<'a> {
    bytes: &'a [u8],
    pos: usize,
}

impl<'a> Lexer<'a> {
    /// Creates a lexer. A pickle of 4 GiB or more is an error, because its positions do not fit a [`Span`]. The pickles
    /// of checkpoints contain no tensor data, so these pickles are far shorter than 4 GiB.
    pub fn new(bytes: &'a [u8]) -> Result<Self, PickleError> {
        if bytes.len() >= u32::MAX as usize {
            return Err(PickleError::limit(0, "the pickle is 4 GiB or longer"));
        }
        Ok(Self { bytes, pos: 0 })
    }

    /// Returns the position of the lexer: the number of bytes that it has read.
    pub fn pos(&self) -> usize {
        self.pos
    }

    /// Moves the lexer to the position `pos`, because other code has read the bytes before `pos`.
    pub fn seek(&mut self, pos: usize) {
        self.pos = pos;
    }

    /// Walks the opcodes up to STOP or to the end of the input. Passes the index of each memo entry that a GET fetches
    /// to `fetch`.
    pub fn gets(&mut self, mut fetch: impl FnMut(u32)) -> Result<End, PickleError> {
        while let Some(op) = self.bytes.get(self.pos) {
            match WIDTHS[usize::from(*op)] {
                // Together with the opcodes of fixed length, these three opcodes (BINGET, LONG_BINGET,
                // SHORT_BINUNICODE) make up most of a pickle.
                0 if *op == b'h' => {
                    self.pos += 1;
                    fetch(self.u8()?.into());
                }
                0 if *op == b'j' => {
                    self.pos += 1;
                    fetch(self.memo_index(self.pos - 1)?);
                }
                0 if *op == 0x8c => {
                    self.pos += 1;
                    self.counted8()?;
                }
                0 => match self.next()? {
                    Op::Get(index) => fetch(index),
                    Op::Stop => return Ok(End::Stop),
                    _ => {}
                },
                width => self.pos += usize::from(width),
            }
        }
        // A truncated opcode of fixed length moves the position beyond the end of the input.
        if self.pos == self.bytes.len() { Ok(End::Input) } else { Err(PickleError::truncated(self.bytes.len())) }
    }

    /// Reads the next opcode with its argument.
    pub fn next(&mut self) -> Result<Op, PickleError> {
        let at = self.pos;
        Ok(match self.u8()? {
            0x80 => self.proto(at)?,
            0x95 => self.frame()?,
            b'.' => Op::Stop,
            b'(' => Op::Mark,
            b'0' => Op::Pop,
            b'1' => Op::PopMark,
            b'2' => Op::Dup,

            b'N' => Op::None,
            0x88 => Op::Bool(true),
            0x89 => Op::Bool(false),
            b'K' => Op::Int(self.u8()?.into()),
            b'M' => Op::Int(u16::from_le_bytes(self.array()?).into()),
            b'J' => Op::Int(i32::from_le_bytes(self.array()?).into()),
            0x8a => Op::Long(self.counted8()?),
            0x8b => Op::Long(self.counted_i32(at, "LONG4")?),
            b'G' => Op::Float(f64::from_be_bytes(self.array()?)),

            0x8c => Op::Unicode(self.counted8()?),
            b'X' => Op::Unicode(self.counted32()?),
            0x8d => Op::Unicode(self.counted64()?),
            b'U' => Op::String(self.counted8()?),
            b'T' => Op::String(self.counted_i32(at, "BINSTRING")?),
            b'C' => Op::Bytes(self.counted8()?),
            b'B' => Op::Bytes(self.counted32()?),
            0x8e => Op::Bytes(self.counted64()?),
            0x96 => Op::ByteArray(self.counted64()?),

            b')' => Op::EmptyTuple,
            0x85 => Op::TupleOf(1),
            0x86 => Op::TupleOf(2),
            0x87 => Op::TupleOf(3),
            b't' => Op::Tuple,
            b']' => Op::EmptyList,
            b'a' => Op::Append,
            b'e' => Op::Appends,
            b'}' => Op::EmptyDict,
            b's' => Op::SetItem,
            b'u' => Op::SetItems,
            0x8f => Op::EmptySet,
            0x90 => Op::AddItems,
            0x91 => Op::FrozenSet,

            b'c' => Op::Global { module: self.line()?, name: self.line()? },
            0x93 => Op::StackGlobal,
            b'R' => Op::Reduce,
            0x81 => Op::NewObj,
            0x92 => Op::NewObjEx,
            b'b' => Op::Build,
            b'Q' => Op::PersistentId,

            b'q' => Op::Put(self.u8()?.into()),
            b'r' => Op::Put(self.memo_index(at)?),
            0x94 => Op::Memoize,
            b'h' => Op::Get(self.u8()?.into()),
            b'j' => Op::Get(self.memo_index(at)?),

            other => return Err(refused(at, other)),
        })
    }

    fn proto(&mut self, at: usize) -> Result<Op, PickleError> {
        match self.u8()? {
            0..=5 => Ok(Op::Nothing),
            n => Err(PickleError::malformed(at, format!("pickle protocol {n}, which is newer than 5"))),
        }
    }

    /// Reads the opcode FRAME. A frame is only a hint for buffering, but a frame longer than the input shows that the
    /// input is truncated.
    fn frame(&mut self) -> Result<Op, PickleError> {
        let len = u64::from_le_bytes(self.array()?);
        self.need(len)?;
        Ok(Op::Nothing)
    }

    /// Checks a memo index. CPython numbers memo entries from 0, so an index larger than the length of the input is
    /// invalid. This check keeps the memo as small as the input.
    fn memo_index(&mut self, at: usize) -> Result<u32, PickleError> {
        let index = u32::from_le_bytes(self.array()?);
        if index as usize >= self.bytes.len() {
            let what = format!("memo index {index} in a pickle of {} bytes", self.bytes.len());
            return Err(PickleError::limit(at, what));
        }
        Ok(index)
    }

    #[inline]
    fn counted8(&mut self) -> Result<Span, PickleError> {
        let len = self.u8()?;
        self.span(len.into())
    }

    #[inline]
    fn counted32(&mut self) -> Result<Span, PickleError> {
        let len = u32::from_le_bytes(self.array()?);
        self.span(len.into())
    }

    fn counted64(&mut self) -> Result<Span, PickleError> {
        let len = u64::from_le_bytes(self.array()?);
        self.span(len)
    }

    /// Reads the signed length of LONG4 and BINSTRING.
    fn counted_i32(&mut self, at: usize, op: &str) -> Result<Span, PickleError> {
        let len = i32::from_le_bytes(self.array()?);
        match u64::try_from(len) {
            Ok(len) => self.span(len),
            Err(_) => Err(PickleError::malformed(at, format!("{op} with the negative length {len}"))),
        }
    }

    /// Reads one newline-terminated argument of GLOBAL, without the newline.
    fn line(&mut self) -> Result<Span, PickleError> {
        let rest = &self.bytes[self.pos..];
        let Some(len) = rest.iter().position(|&byte| byte == b'\n') else {
            return Err(PickleError::truncated(self.bytes.len()));
        };
        let span = self.span(len as u64)?;
        self.pos += 1;
        Ok(span)
    }

    #[inline]
    fn u8(&mut self) -> Result<u8, PickleError> {
        match self.bytes.get(self.pos) {
            Some(byte) => {
                self.pos += 1;
                Ok(*byte)
            }
            None => Err(PickleError::truncated(self.bytes.len())),
        }
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        match self.bytes[self.pos..].first_chunk::<N>() {
            Some(array) => {
                self.pos += N;
                Ok(*array)
            }
            None => Err(PickleError::truncated(self.bytes.len())),
        }
    }

    #[inline]
    fn span(&mut self, len: u64) -> Result<Span, PickleError> {
        self.need(len)?;
        // Both values fit 32 bits: the input is shorter than 4 GiB and has `len` more bytes.
        let span = Span { start: self.pos as u32, len: len as u32 };
        self.pos += len as usize;
        Ok(span)
    }

    #[inline]
    fn need(&self, len: u64) -> Result<(), PickleError> {
        if len > (self.bytes.len() - self.pos) as u64 {
            return Err(PickleError::truncated(self.bytes.len()));
        }
        Ok(())
    }
}

fn refused(at: usize, op: u8) -> PickleError {
    let why = match op {
        b'F' | b'I' | b'L' | b'S' | b'V' | b'P' | b'p' | b'g' | b'd' | b'l' | b'i' | b'o' => {
            "an opcode of the old text protocols"
        }
        0x82..=0x84 => "an opcode of the extension registry",
        0x97 | 0x98 => "an opcode for out-of-band buffers",
        _ => return PickleError::malformed(at, format!("0x{op:02x}, which is not a pickle opcode")),
    };
    PickleError::malformed(at, format!("0x{op:02x}, {why}, which no checkpoint uses"))
}
