//! Records: objects of a few plain fields, read straight from their opcodes.
//!
//! Why: nearly all of a large `.metadata` are three classes whose state is a dict of numbers, texts and sizes, written
//! by the same twenty-odd opcodes each time. Making nodes of these only to free them when the object is folded takes
//! most of the time of reading; here nothing is made but what the memo is asked for later.
//!
//! Invariant: a record is read whole, or the machine is left where it was: whatever is unusual or wrong is for the
//! machine to run or to refuse, so there is one judge of what a pickle may be. An attempt reads no further than the
//! first thing it does not know, so both together stay linear.
//!
//! Source of the rule: CPython `Modules/_pickle.c`, `save_reduce` and `batch_dict` (protocol 4 and later); `torch.Size`
//! is pickled by `THPSize_reduce` as a call with one tuple.

use smallvec::SmallVec;

use super::arena::{MAX_DIMS, Node};
use super::fold::Fold;
use super::long;
use super::machine::{Done, Machine};
use super::memo::Memo;
use super::opcode::Span;
use super::{PickleError, Ref};

/// More fields than this make no record.
const MAX_FIELDS: usize = 16;

/// No tensor has more dims.
const MAX_NDIM: usize = 255;

/// The state of an object: its fields by name.
#[derive(Debug, Default)]
pub struct Record<'a> {
    fields: SmallVec<[(&'a [u8], Field<'a>); 4]>,
}

#[derive(Debug, Default)]
pub enum Field<'a> {
    None,
    Number(u64),
    Text(&'a str),
    /// A `torch.Size`; in a record made of nodes also a tuple or list of numbers.
    Dims(SmallVec<[u64; 4]>),
    /// Something else.
    #[default]
    Other,
}

impl<'a> Record<'a> {
    /// The record of a state that is a dict.
    pub fn of(state: Ref<'a>) -> Option<Self> {
        let entries = state.as_dict().filter(|entries| entries.len() <= MAX_FIELDS)?;
        let fields = entries.filter_map(|(key, value)| Some((key.as_str()?.as_bytes(), Field::of(value))));
        Some(Self { fields: fields.collect() })
    }

    /// The field of this name; of several, the last, as Python has it.
    pub fn get(&self, name: &str) -> Option<&Field<'a>> {
        self.fields.iter().rev().find(|(key, _)| *key == name.as_bytes()).map(|(_, field)| field)
    }

    pub fn number(&self, name: &str) -> Option<u64> {
        match self.get(name)? {
            Field::Number(number) => Some(*number),
            _ => None,
        }
    }

    pub fn text(&self, name: &str) -> Option<&'a str> {
        match self.get(name)? {
            Field::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn dims(&self, name: &str) -> Option<&[u64]> {
        match self.get(name)? {
            Field::Dims(dims) => Some(dims),
            _ => None,
        }
    }
}

impl<'a> Field<'a> {
    fn of(node: Ref<'a>) -> Self {
        if node.is_none() {
            return Self::None;
        }
        let number = || node.as_u64().map(Self::Number);
        let text = || node.as_str().map(Self::Text);
        number().or_else(text).or_else(|| node.to_dims_up_to(MAX_NDIM).map(Self::Dims)).unwrap_or_default()
    }
}

impl Machine<'_> {
    /// NEWOBJ: whether the object was one that the fold keeps as a record, and lies folded on the stack.
    pub(super) fn record<F: Fold + ?Sized>(&mut self, fold: &mut F) -> Done<bool> {
        let below = self.height_for(2)?;
        let (class, args) = (self.stack[below], self.stack[below + 1]);
        let (Some(name), Node::Tuple(seq)) = (self.pickle.node(class).global(), self.pickle.get(args)) else {
            return Ok(false);
        };
        if !self.pickle.ids(seq).is_empty() || !fold.keeps(name) {
            return Ok(false);
        }
        let mut reader = Reader { machine: self, pos: self.lexer.pos(), memoized: 0, kept: SmallVec::new() };
        let mut record = Record::default();
        if reader.read(&mut record).is_none() {
            return Ok(false);
        }
        let Reader { pos, memoized, kept, .. } = reader;
        let Some(folded) = fold.record(name, &record).map_err(|what| PickleError::rejected(pos - 1, what))? else {
            return Ok(false);
        };
        self.lexer.seek(pos);
        self.stack.truncate(below);
        self.pickle.release(args);
        self.pickle.release(class);
        let first = self.memo.len();
        self.memo.skip(memoized);
        for (nth, node) in kept {
            self.room()?;
            let id = match node {
                Kept::Text(span) => self.pickle.add(Node::Str(span)),
                Kept::Dims(dims) => self.pickle.add_dims(&dims).ok_or_else(|| self.malformed("too many sizes"))?,
            };
            self.pickle.pin(id);
            self.memo.put(first + nth, id);
        }
        self.push(Node::Folded(folded))?;
        Ok(true)
    }
}

/// What the memo is asked for later.
enum Kept {
    Text(Span),
    Dims(SmallVec<[u64; 4]>),
}

/// Looks ahead of the machine. `None` is whatever a record does not have.
struct Reader<'m, 'a> {
    machine: &'m Machine<'a>,
    pos: usize,
    /// Entries for the memo so far, and those of them that are kept.
    memoized: u32,
    kept: SmallVec<[(u32, Kept); 2]>,
}

impl<'a> Reader<'_, 'a> {
    /// What follows NEWOBJ: an empty dict, MARK, fields, SETITEMS and BUILD.
    fn read(&mut self, record: &mut Record<'a>) -> Option<()> {
        self.memo_of_none()?;
        self.expect(b'}')?;
        self.memo_of_none()?;
        self.expect(b'(')?;
        loop {
            let op = self.op()?;
            if op == b'u' {
                break;
            }
            let name = self.text(op)?.of(self.bytes());
            let op = self.op()?;
            let value = self.value(op)?;
            record.fields.push((name, value));
            if record.fields.len() > MAX_FIELDS {
                return None;
            }
        }
        self.expect(b'b')
    }

    fn value(&mut self, op: u8) -> Option<Field<'a>> {
        match op {
            b'N' => Some(Field::None),
            0x8c => self.field_of_text(op),
            b'h' | b'j' => match self.fetched(op)? {
                Node::None => Some(Field::None),
                Node::Int(number) => u64::try_from(number).ok().map(Field::Number),
                Node::Str(span) => Some(Field::Text(std::str::from_utf8(span.of(self.bytes())).ok()?)),
                Node::Dims(block) => Some(Field::Dims(SmallVec::from_slice(self.machine.pickle.dims(block)))),
                Node::Global(index) if self.machine.pickle.globals[index as usize] == ("torch", "Size") => self.size(),
                _ => None,
            },
            _ => self.number(op).map(Field::Number),
        }
    }

    fn field_of_text(&mut self, op: u8) -> Option<Field<'a>> {
        let span = self.text(op)?;
        std::str::from_utf8(span.of(self.bytes())).ok().map(Field::Text)
    }

    /// A text, or a text fetched.
    fn text(&mut self, op: u8) -> Option<Span> {
        if op != 0x8c {
            return match self.fetched(op)? {
                Node::Str(span) => Some(span),
                _ => None,
            };
        }
        let len = self.op()?;
        let span = Span { start: self.pos as u32, len: len.into() };
        let bytes = self.bytes().get(self.pos..self.pos + usize::from(len))?;
        std::str::from_utf8(bytes).ok()?;
        self.pos += usize::from(len);
        self.memo_of(|| Kept::Text(span))?;
        Some(span)
    }

    fn number(&mut self, op: u8) -> Option<u64> {
        match op {
            b'K' => self.op().map(u64::from),
            b'M' => self.array().map(|bytes| u16::from_le_bytes(bytes).into()),
            b'J' => self.array().and_then(|bytes| i32::from_le_bytes(bytes).try_into().ok()),
            0x8a => {
                let len = usize::from(self.op()?);
                let bytes = self.bytes().get(self.pos..self.pos + len)?;
                self.pos += len;
                long::to_u64(bytes)
            }
            _ => None,
        }
    }

    /// The arguments of `torch.Size`, a tuple of one tuple, and the call.
    fn size(&mut self) -> Option<Field<'a>> {
        let mut dims = SmallVec::new();
        let mut op = self.op()?;
        let is_marked = op == b'(';
        if is_marked {
            op = self.op()?;
        }
        let len = loop {
            match op {
                b')' | 0x85..=0x87 | b't' => break dims.len(),
                _ if dims.len() == MAX_DIMS => return None,
                _ => dims.push(self.number(op)?),
            }
            op = self.op()?;
        };
        let is_whole = match op {
            b't' => is_marked,
            b')' => !is_marked && len == 0,
            _ => !is_marked && len == usize::from(op - 0x84),
        };
        if !is_whole {
            return None;
        }
        self.memo_of_none()?;
        self.expect(0x85)?;
        self.memo_of_none()?;
        self.expect(b'R')?;
        self.memo_of(|| Kept::Dims(dims.clone()))?;
        Some(Field::Dims(dims))
    }

    /// MEMOIZE, where it follows.
    fn memo_of(&mut self, value: impl FnOnce() -> Kept) -> Option<()> {
        if self.bytes().get(self.pos) == Some(&0x94) {
            self.pos += 1;
            if self.memo().fetches_next(self.memoized)? {
                self.kept.push((self.memoized, value()));
            }
            self.memoized += 1;
        }
        Some(())
    }

    /// MEMOIZE of something that makes no field, and is not fetched.
    fn memo_of_none(&mut self) -> Option<()> {
        if self.bytes().get(self.pos) == Some(&0x94) {
            self.pos += 1;
            if self.memo().fetches_next(self.memoized)? {
                return None;
            }
            self.memoized += 1;
        }
        Some(())
    }

    fn fetched(&mut self, op: u8) -> Option<Node> {
        let index = match op {
            b'h' => self.op()?.into(),
            b'j' => u32::from_le_bytes(self.array()?),
            _ => return None,
        };
        self.memo().get(index).map(|id| self.machine.pickle.get(id))
    }

    fn expect(&mut self, op: u8) -> Option<()> {
        (self.op()? == op).then_some(())
    }

    fn op(&mut self) -> Option<u8> {
        let op = *self.bytes().get(self.pos)?;
        self.pos += 1;
        Some(op)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let array = self.bytes().get(self.pos..)?.first_chunk::<N>()?;
        self.pos += N;
        Some(*array)
    }

    fn bytes(&self) -> &'a [u8] {
        self.machine.pickle.bytes
    }

    fn memo(&self) -> &Memo {
        &self.machine.memo
    }
}
