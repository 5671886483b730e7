//! Records: objects of a few plain fields, read straight from their opcodes.
//!
//! Why: nearly all of a large `.metadata` are five classes whose state is numbers, texts, sizes and each other, written
//! by the same opcodes each time. Making nodes of these only to free them when the object is folded takes
//! most of the time of reading; here nothing is made but what the memo is asked for later.
//!
//! Invariant: a record is read whole, or the machine is left where it was: whatever is unusual or wrong is for the
//! machine to run or to refuse, so there is one judge of what a pickle may be. An attempt reads no further than the
//! first thing it does not know, and records are nested [`MAX_DEPTH`] deep, so both together stay linear. What was folded
//! of an attempt that failed is a row that nothing refers to.
//!
//! Source of the rule: CPython `Modules/_pickle.c`, `save_reduce` and `batch_dict` (protocol 4 and later); `torch.Size`
//! is pickled by `THPSize_reduce` as a call with one tuple.

use smallvec::SmallVec;

use super::arena::{MAX_DIMS, Node};
use super::fold::{Fold, Folded};
use super::long;
use super::machine::{Done, Machine};
use super::memo::Memo;
use super::opcode::Span;
use super::{PickleError, Ref};

/// More fields than this make no record.
const MAX_FIELDS: usize = 16;

/// No tensor has more dims.
const MAX_NDIM: usize = 255;

/// A tensor's metadata, and its chunks.
const MAX_DEPTH: usize = 2;

/// The state of an object: its fields by name; those of a tuple have none.
#[derive(Debug, Default)]
pub struct Record<'a> {
    pub(super) fields: SmallVec<[(&'a [u8], Field<'a>); 4]>,
}

#[derive(Debug, Default)]
pub enum Field<'a> {
    None,
    Number(u64),
    Text(&'a str),
    /// A `torch.Size`; in a record made of nodes also a tuple or list of numbers.
    Dims(SmallVec<[u64; 4]>),
    /// A class, a function, a dtype.
    Global((&'a str, &'a str)),
    /// An object that was folded.
    Row(Folded),
    /// A list of those.
    Rows(SmallVec<[Folded; 1]>),
    /// Something else.
    #[default]
    Other,
}

impl<'a> Record<'a> {
    /// The record of a state that is a dict or a tuple.
    pub fn of(state: Ref<'a>) -> Option<Self> {
        if let Some(items) = state.as_tuple().filter(|items| items.len() <= MAX_FIELDS) {
            return Some(Self { fields: items.map(|item| (&b""[..], Field::of(item))).collect() });
        }
        let entries = state.as_dict().filter(|entries| entries.len() <= MAX_FIELDS)?;
        let fields = entries.filter_map(|(key, value)| Some((key.as_str()?.as_bytes(), Field::of(value))));
        Some(Self { fields: fields.collect() })
    }

    /// The first item of a state that is a tuple.
    pub fn first(&self) -> Option<&Field<'a>> {
        self.fields.first().filter(|(name, _)| name.is_empty()).map(|(_, field)| field)
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

    pub fn row(&self, name: &str) -> Option<Folded> {
        match self.get(name)? {
            Field::Row(row) => Some(*row),
            _ => None,
        }
    }

    pub fn rows(&self, name: &str) -> Option<&[Folded]> {
        match self.get(name)? {
            Field::Rows(rows) => Some(rows),
            // An empty list is one of anything.
            Field::Dims(none) if none.is_empty() => Some(&[]),
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
        let dims = || node.to_dims_up_to(MAX_NDIM).map(Self::Dims);
        let global = || node.global().map(Self::Global);
        let row = || node.folded().map(Self::Row);
        let rows = || node.as_list()?.map(Ref::folded).collect::<Option<_>>().map(Self::Rows);
        number().or_else(text).or_else(dims).or_else(global).or_else(row).or_else(rows).unwrap_or_default()
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
        let pos = self.lexer.pos();
        let mut reader = Reader { machine: self, fold: &mut *fold, pos, memoized: 0, kept: SmallVec::new(), depth: 0 };
        let mut record = Record::default();
        if reader.object(&mut record).is_none() {
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
struct Reader<'m, 'a, F: ?Sized> {
    machine: &'m Machine<'a>,
    fold: &'m mut F,
    pos: usize,
    /// Entries for the memo so far, and those of them that are kept.
    memoized: u32,
    kept: SmallVec<[(u32, Kept); 2]>,
    /// Objects around the one that is read.
    depth: usize,
}

impl<'a, F: Fold + ?Sized> Reader<'_, 'a, F> {
    /// What follows NEWOBJ: the state, and BUILD.
    fn object(&mut self, record: &mut Record<'a>) -> Option<()> {
        self.memo_of_none()?;
        match self.op()? {
            b'}' => self.dict(record)?,
            b'(' => self.tuple(record)?,
            _ => return None,
        }
        self.expect(b'b')
    }

    /// What follows an empty dict: MARK, fields and SETITEMS.
    fn dict(&mut self, record: &mut Record<'a>) -> Option<()> {
        self.memo_of_none()?;
        self.expect(b'(')?;
        loop {
            let op = self.op()?;
            if op == b'u' {
                return Some(());
            }
            let name = self.name(op)?;
            let op = self.op()?;
            let value = self.value(op)?;
            record.fields.push((name, value));
            if record.fields.len() > MAX_FIELDS {
                return None;
            }
        }
    }

    /// What follows MARK: items and TUPLE.
    fn tuple(&mut self, record: &mut Record<'a>) -> Option<()> {
        loop {
            match self.op()? {
                b't' => break,
                op @ 0x85..=0x87 => {
                    // A tuple within the tuple.
                    let above = record.fields.len().checked_sub(usize::from(op - 0x84))?;
                    let number = |(_, field): (&[u8], Field<'_>)| match field {
                        Field::Number(number) => Some(number),
                        _ => None,
                    };
                    let dims: Option<SmallVec<[u64; 4]>> = record.fields.drain(above..).map(number).collect();
                    self.memo_of_none()?;
                    record.fields.push((b"", dims.map_or(Field::Other, Field::Dims)));
                }
                op => {
                    let value = self.value(op)?;
                    record.fields.push((b"", value));
                }
            }
            if record.fields.len() > MAX_FIELDS {
                return None;
            }
        }
        self.memo_of_none()
    }

    fn value(&mut self, op: u8) -> Option<Field<'a>> {
        match op {
            b'N' => Some(Field::None),
            0x88 | 0x89 => Some(Field::Other),
            0x8c => self.text().map(Field::Text),
            b']' => self.rows().map(Field::Rows),
            b'h' | b'j' => match self.fetched(op)? {
                Node::None => Some(Field::None),
                Node::Int(number) => u64::try_from(number).ok().map(Field::Number),
                Node::Str(span) => Some(Field::Text(std::str::from_utf8(span.of(self.bytes())).ok()?)),
                Node::Dims(block) => Some(Field::Dims(SmallVec::from_slice(self.machine.pickle.dims(block)))),
                Node::Global(index) => match self.machine.pickle.globals[index as usize] {
                    ("torch", "Size") => self.size(),
                    class if self.peek() == Some(b')') => self.nested(class).map(Field::Row),
                    global => Some(Field::Global(global)),
                },
                Node::Bool(_) => Some(Field::Other),
                Node::Call(make) if self.machine.pickle.node(make.callee).global() != Some(("torch", "Size")) => {
                    Some(Field::Other)
                }
                _ => None,
            },
            _ => self.number(op).map(Field::Number),
        }
    }

    /// An object of a class that the fold keeps, which was fetched.
    fn nested(&mut self, class: (&'a str, &'a str)) -> Option<Folded> {
        self.expect(b')')?;
        self.expect(0x81)?;
        if self.depth + 1 == MAX_DEPTH || !self.fold.keeps(class) {
            return None;
        }
        self.depth += 1;
        let mut record = Record::default();
        self.object(&mut record)?;
        self.depth -= 1;
        // What the fold will not have is for the machine to tell.
        self.fold.record(class, &record).ok()?
    }

    /// The objects of a list, appended one by one or from MARK to APPENDS.
    fn rows(&mut self) -> Option<SmallVec<[Folded; 1]>> {
        self.memo_of_none()?;
        let mut rows = SmallVec::new();
        loop {
            let start = self.pos;
            match self.op()? {
                b'(' => {
                    while self.peek()? != b'e' {
                        let op = self.op()?;
                        let class = self.class(op)?;
                        rows.push(self.nested(class)?);
                    }
                    self.expect(b'e')?;
                }
                op => {
                    let Some(class) = self.class(op) else {
                        self.pos = start;
                        return Some(rows);
                    };
                    rows.push(self.nested(class)?);
                    self.expect(b'a')?;
                }
            }
        }
    }

    fn class(&mut self, op: u8) -> Option<(&'a str, &'a str)> {
        match self.fetched(op)? {
            Node::Global(index) => Some(self.machine.pickle.globals[index as usize]),
            _ => None,
        }
    }

    /// The name of a field: a text, or a text fetched.
    fn name(&mut self, op: u8) -> Option<&'a [u8]> {
        match op {
            0x8c => self.text().map(str::as_bytes),
            _ => match self.fetched(op)? {
                Node::Str(span) => Some(span.of(self.bytes())),
                _ => None,
            },
        }
    }

    fn text(&mut self) -> Option<&'a str> {
        let len = self.op()?;
        let span = Span { start: self.pos as u32, len: len.into() };
        let text = std::str::from_utf8(self.bytes().get(self.pos..self.pos + usize::from(len))?).ok()?;
        self.pos += usize::from(len);
        self.memo_of(|| Kept::Text(span))?;
        Some(text)
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

    fn peek(&self) -> Option<u8> {
        self.bytes().get(self.pos).copied()
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
