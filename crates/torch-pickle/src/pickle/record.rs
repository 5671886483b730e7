//! Object records: objects with a few plain fields, read directly from their opcodes.
//!
//! Reason: nearly all of a large `.metadata` consists of objects of five classes, and CPython writes the objects of a
//! class always with the same opcodes. The state of such an object has numbers, texts, sizes, and other objects of
//! these classes. Creating nodes for these objects takes most of the reading time, although the nodes are freed as soon
//! as the visitor replaces the object by a row. This module creates nodes only for the values that the memo needs
//! later.
//!
//! Invariant: an object record is read completely, or the machine is left unchanged. The machine then runs or refuses
//! unusual or invalid input, so only the machine decides what a pickle may contain. Reading an object record stops at
//! the first unknown opcode, and object records are nested at most [`MAX_DEPTH`] deep. So the total work is linear in
//! the length of the pickle, even if many attempts fail. If an attempt fails, nothing refers to the rows that the
//! visitor made during this attempt.
//!
//! Source of the rule: CPython `Modules/_pickle.c`, `save_reduce` and `batch_dict` (protocol 4 and later); `torch.Size`
//! is pickled by `THPSize_reduce` as a call with one tuple.

use smallvec::SmallVec;

use super::PickleError;
use super::alike::Ahead;
use super::arena::{Global, MAX_DIMS, Node, Pickle, Role};
use super::fields::{Bottom, Field, Fields, MAX_FIELDS};
use super::long;
use super::machine::{Done, Machine};
use super::memo::Memo;
use super::opcode::Span;
use super::visitor::{Row, Visitor};

/// The maximum nesting of object records: the metadata of a tensor contains the metadata of its chunks.
const MAX_DEPTH: usize = 2;

impl Machine<'_> {
    /// Runs NEWOBJ and the opcodes after it as an object record. Returns true if the visitor made a row for the object;
    /// the row is then on the stack. Returns false if the machine must run the opcodes instead.
    pub(super) fn record<F: Visitor + ?Sized>(&mut self, visitor: &mut F) -> Done<bool> {
        let below = self.height_for(2)?;
        let (class, args) = (self.stack[below], self.stack[below + 1]);
        let (Node::Global(index), Node::Tuple(seq)) = (self.pickle.get(class), self.pickle.get(args)) else {
            return Ok(false);
        };
        let is_record = self.pickle.globals[index as usize].role == Role::Record;
        if !is_record || !self.pickle.ids(seq).is_empty() || !self.memo.is_in_turn() {
            return Ok(false);
        }
        let known = self.alike.find(index, self.pickle.bytes, self.lexer.pos(), &self.memo);
        let read = known.map_or_else(|| self.read_ahead(index, visitor), |known| Ok(Some((known, SmallVec::new()))))?;
        let Some((Ahead { span, entries, row, .. }, kept)) = read else {
            return Ok(false);
        };
        self.lexer.seek(span.end());
        self.stack.truncate(below);
        self.pickle.release(args);
        self.pickle.release(class);
        self.memo.skip(entries);
        for (entry, node) in kept {
            self.room()?;
            let id = match node {
                Kept::Text(span) => self.pickle.add(Node::Str(span)),
                Kept::Dims(dims) => self.pickle.add_dims(&dims).ok_or_else(|| self.malformed("too many sizes"))?,
            };
            self.pickle.pin(id);
            self.memo.put(entry, id);
        }
        self.push(Node::Row(row))?;
        Ok(true)
    }

    /// Reads the object record at the current position, which is after NEWOBJ. Also returns those memo entries of the
    /// object record that a GET fetches later. Returns `None` if the input is not an object record.
    fn read_ahead<F: Visitor + ?Sized>(&mut self, class: u32, visitor: &mut F) -> Done<Option<(Ahead, Entries)>> {
        let (start, first) = (self.lexer.pos(), self.memo.len());
        self.fields.truncate(Bottom::default());
        let mut reader = Reader {
            bytes: self.pickle.bytes,
            pickle: &self.pickle,
            memo: &self.memo,
            visitor: &mut *visitor,
            fields: &mut self.fields,
            pos: start,
            next: first,
            kept: Entries::new(),
            depth: 0,
            holds_others: false,
        };
        if reader.object().is_none() {
            return Ok(None);
        }
        let Reader { pos, next, kept, holds_others, .. } = reader;
        let row = visitor.record(self.pickle.globals[class as usize].symbol, &self.fields.record());
        let Some(row) = row.map_err(|what| PickleError::rejected(pos - 1, what))? else {
            return Ok(None);
        };
        let span = Span { start: start as u32, len: (pos - start) as u32 };
        let record = Ahead { class, span, entries: next - first, row };
        // An object record without other objects is not cached, because comparing it takes as long as reading it.
        if holds_others && kept.is_empty() {
            self.alike.keep(record);
        }
        Ok(Some((record, kept)))
    }
}

/// Memo entries of an object record that a GET fetches later: index and value.
type Entries = SmallVec<[(u32, Kept); 2]>;

/// A value in an object record that a GET fetches later.
enum Kept {
    Text(Span),
    Dims(SmallVec<[u64; 4]>),
}

/// Reads an object record without running the machine; this is the fast path. The opcodes of an object record have a
/// fixed form: they create one object (NEWOBJ) and set its state (the fields as a dict or a tuple, and BUILD). The
/// methods return `None` if the opcodes have another form.
struct Reader<'m, 'a, F: ?Sized> {
    bytes: &'a [u8],
    pickle: &'m Pickle<'a>,
    memo: &'m Memo,
    visitor: &'m mut F,
    fields: &'m mut Fields<'a>,
    pos: usize,
    /// The index of the memo entry that the next MEMOIZE writes.
    next: u32,
    kept: Entries,
    /// The nesting depth of the object that is being read; 0 for the outermost object.
    depth: usize,
    /// True if the object record contains other objects, such as chunks.
    holds_others: bool,
}

impl<'a, F: Visitor + ?Sized> Reader<'_, 'a, F> {
    /// Reads the opcodes of an object after NEWOBJ: the state of the object, and BUILD.
    fn object(&mut self) -> Option<()> {
        self.memo_of_none()?;
        match self.op()? {
            b'}' => self.dict()?,
            b'(' => self.tuple()?,
            _ => return None,
        }
        self.expect(b'b')
    }

    /// Reads the state of an object, if the state is a dict: MARK, the fields, and SETITEMS. EMPTY_DICT has already
    /// been read.
    fn dict(&mut self) -> Option<()> {
        self.memo_of_none()?;
        self.expect(b'(')?;
        for _ in 0..=MAX_FIELDS {
            let op = self.op()?;
            if op == b'u' {
                return Some(());
            }
            let name = self.name(op)?;
            let op = self.op()?;
            let value = self.value(op)?;
            self.fields.push(name, value);
        }
        None
    }

    /// Reads the state of an object, if the state is a tuple: the items, and TUPLE. MARK has already been read.
    fn tuple(&mut self) -> Option<()> {
        let bottom = self.fields.top();
        loop {
            match self.op()? {
                b't' => break,
                op @ 0x85..=0x87 => {
                    let field = self.inner_tuple(bottom, usize::from(op - 0x84))?;
                    self.fields.push(b"", field);
                }
                op => {
                    let value = self.value(op)?;
                    self.fields.push(b"", value);
                }
            }
            if self.fields.top().named - bottom.named > MAX_FIELDS {
                return None;
            }
        }
        self.memo_of_none()
    }

    /// Reads TUPLE1, TUPLE2 or TUPLE3 inside a tuple: replaces the last `len` items of the outer tuple by a nested
    /// tuple of these items.
    fn inner_tuple(&mut self, outer: Bottom, len: usize) -> Option<Field<'a>> {
        let bottom = self.fields.top();
        let first = bottom.named.checked_sub(len).filter(|first| *first >= outer.named)?;
        let Fields { named, numbers, .. } = &mut *self.fields;
        let mut are_numbers = true;
        for (_, field) in named.drain(first..) {
            match field {
                Field::Number(number) => numbers.push(number),
                _ => are_numbers = false,
            }
        }
        self.memo_of_none()?;
        Some(if are_numbers { self.fields.dims_from(bottom) } else { Field::Other })
    }

    fn value(&mut self, op: u8) -> Option<Field<'a>> {
        match op {
            b'N' => Some(Field::None),
            0x88 | 0x89 => Some(Field::Other),
            0x8c => self.text().map(Field::Text),
            b']' => self.rows(),
            b'h' | b'j' => match self.fetched(op)? {
                Node::None => Some(Field::None),
                Node::Int(number) => u64::try_from(number).ok().map(Field::Number),
                Node::Str(span) => std::str::from_utf8(span.of(self.bytes)).ok().map(Field::Text),
                Node::Dims(block) => {
                    let bottom = self.fields.top();
                    self.fields.numbers.extend_from_slice(self.pickle.dims(block));
                    Some(self.fields.dims_from(bottom))
                }
                Node::Global(index) => match self.pickle.globals[index as usize] {
                    Global { role: Role::Size, .. } => self.size(),
                    class if self.peek() == Some(b')') => self.nested(class).map(Field::Row),
                    global => Some(Field::Global(global.symbol)),
                },
                Node::Bool(_) => Some(Field::Other),
                Node::Call(make) if self.pickle.global(make.callee).is_none_or(|it| it.role != Role::Size) => {
                    Some(Field::Other)
                }
                _ => None,
            },
            _ => self.number(op).map(Field::Number),
        }
    }

    /// Reads an object inside the object record. The opcode for its class, a GET, has already been read.
    fn nested(&mut self, class: Global<'a>) -> Option<Row> {
        self.expect(b')')?;
        self.expect(0x81)?;
        if self.depth + 1 == MAX_DEPTH || class.role != Role::Record {
            return None;
        }
        let bottom = self.fields.top();
        self.holds_others = true;
        self.depth += 1;
        self.object()?;
        self.depth -= 1;
        // If the visitor refuses the object, the machine reads it again and reports the error.
        let row = self.visitor.record(class.symbol, &self.fields.record_from(bottom)).ok()?;
        self.fields.truncate(bottom);
        row
    }

    /// Reads a list of objects. The objects are appended one by one with APPEND, or together from MARK to APPENDS.
    fn rows(&mut self) -> Option<Field<'a>> {
        self.memo_of_none()?;
        let bottom = self.fields.top();
        loop {
            let start = self.pos;
            match self.op()? {
                b'(' => {
                    while self.peek()? != b'e' {
                        let op = self.op()?;
                        let class = self.class(op)?;
                        self.row(class)?;
                    }
                    self.expect(b'e')?;
                }
                op => {
                    let Some(class) = self.class(op) else {
                        self.pos = start;
                        return Some(self.fields.rows_from(bottom));
                    };
                    self.row(class)?;
                    self.expect(b'a')?;
                }
            }
        }
    }

    fn row(&mut self, class: Global<'a>) -> Option<()> {
        let row = self.nested(class)?;
        self.fields.rows.push(row);
        Some(())
    }

    fn class(&mut self, op: u8) -> Option<Global<'a>> {
        match self.fetched(op)? {
            Node::Global(index) => Some(self.pickle.globals[index as usize]),
            _ => None,
        }
    }

    /// Reads the name of a field, which is a text or is fetched from the memo.
    fn name(&mut self, op: u8) -> Option<&'a [u8]> {
        match op {
            0x8c => self.text().map(str::as_bytes),
            _ => match self.fetched(op)? {
                Node::Str(span) => Some(span.of(self.bytes)),
                _ => None,
            },
        }
    }

    fn text(&mut self) -> Option<&'a str> {
        let len = self.op()?;
        let span = Span { start: self.pos as u32, len: len.into() };
        let text = std::str::from_utf8(self.bytes.get(self.pos..self.pos + usize::from(len))?).ok()?;
        self.pos += usize::from(len);
        self.memo_of(|_| Kept::Text(span));
        Some(text)
    }

    fn number(&mut self, op: u8) -> Option<u64> {
        match op {
            b'K' => self.op().map(u64::from),
            b'M' => self.array().map(|bytes| u16::from_le_bytes(bytes).into()),
            b'J' => self.array().and_then(|bytes| i32::from_le_bytes(bytes).try_into().ok()),
            0x8a => {
                let len = usize::from(self.op()?);
                let bytes = self.bytes.get(self.pos..self.pos + len)?;
                self.pos += len;
                long::to_u64(bytes)
            }
            _ => None,
        }
    }

    /// Reads a call of `torch.Size`: its arguments, which are a tuple that contains one tuple, and REDUCE.
    fn size(&mut self) -> Option<Field<'a>> {
        let bottom = self.fields.top();
        let mut op = self.op()?;
        let is_marked = op == b'(';
        if is_marked {
            op = self.op()?;
        }
        let len = loop {
            let len = self.fields.numbers.len() - bottom.numbers;
            match op {
                b')' | 0x85..=0x87 | b't' => break len,
                _ if len == MAX_DIMS => return None,
                _ => {
                    let number = self.number(op)?;
                    self.fields.numbers.push(number);
                }
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
        self.memo_of(|fields| Kept::Dims(fields.numbers[bottom.numbers..].into()));
        Some(self.fields.dims_from(bottom))
    }

    /// Reads MEMOIZE if it is the next opcode. If a GET later fetches the memo entry that MEMOIZE writes, calls `value`
    /// and keeps its result as the value of the entry.
    fn memo_of(&mut self, value: impl FnOnce(&Fields<'a>) -> Kept) {
        if self.peek() == Some(0x94) {
            self.pos += 1;
            if self.memo.is_fetched(self.next) {
                self.kept.push((self.next, value(self.fields)));
            }
            self.next += 1;
        }
    }

    /// Reads MEMOIZE if it is the next opcode. Returns `None` if a GET later fetches the memo entry that MEMOIZE writes:
    /// this kind of value is not kept for the memo, so the machine must run the opcodes of the object instead.
    fn memo_of_none(&mut self) -> Option<()> {
        if self.peek() == Some(0x94) {
            self.pos += 1;
            if self.memo.is_fetched(self.next) {
                return None;
            }
            self.next += 1;
        }
        Some(())
    }

    fn fetched(&mut self, op: u8) -> Option<Node> {
        let index = match op {
            b'h' => self.op()?.into(),
            b'j' => u32::from_le_bytes(self.array()?),
            _ => return None,
        };
        self.memo.get(index).map(|id| self.pickle.get(id))
    }

    fn expect(&mut self, op: u8) -> Option<()> {
        (self.op()? == op).then_some(())
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.pos).copied()
    }

    fn op(&mut self) -> Option<u8> {
        let op = *self.bytes.get(self.pos)?;
        self.pos += 1;
        Some(op)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let array = self.bytes.get(self.pos..)?.first_chunk::<N>()?;
        self.pos += N;
        Some(*array)
    }
}
