//! The stack machine: it runs the opcodes of a pickle and creates nodes in the arena. The machine imports no module and
//! calls no function.
//!
//! GLOBAL makes a node for a name, and REDUCE a node for a call. BUILD stores the state of an object in the node of the
//! object. [`super::decode()`] and the formats give these nodes a meaning.
//!
//! Invariants: no mark is above the top of the stack, and nothing is popped through a mark. The argument tuple of a
//! call is a tuple node. The depth of nesting is not limited here, because neither this module nor the arena recurses.
//!
//! Source of the rule: CPython `Lib/pickle.py`, class `_Unpickler`. If `_Unpickler` would raise a TypeError during a
//! call, this machine reports an error at the opcode of the call.

use std::collections::HashMap;

use smallvec::SmallVec;

use super::alike::Alike;
use super::arena::{Ids, Node, NodeId, Pickle, Seq};
use super::fields::Fields;
use super::long;
use super::memo::Memo;
use super::opcode::{Lexer, Op, Span};
use super::visitor::Visitor;
use super::{Limits, PickleError};

pub(super) struct Machine<'a> {
    pub(super) lexer: Lexer<'a>,
    /// The offset in bytes of the current opcode, for errors.
    pub(super) at: usize,
    pub(super) pickle: Pickle<'a>,
    pub(super) stack: Vec<NodeId>,
    /// The height of the stack at each MARK that is still open.
    marks: Vec<usize>,
    pub(super) memo: Memo,
    pub(super) interned: HashMap<(&'a str, &'a str), u32>,
    /// Reused memory for the fields of the object record that is being read.
    pub(super) fields: Fields<'a>,
    pub(super) alike: Alike,
}

pub(super) type Done<T = ()> = Result<T, PickleError>;

impl<'a> Machine<'a> {
    /// Creates a machine. This function walks the opcodes of the input once, to find the memo entries that a GET
    /// fetches.
    pub fn new(bytes: &'a [u8], limits: Limits) -> Done<Self> {
        Ok(Self {
            memo: Memo::survey(bytes)?,
            lexer: Lexer::new(bytes)?,
            at: 0,
            pickle: Pickle::new(bytes, limits),
            stack: Vec::new(),
            marks: Vec::new(),
            interned: HashMap::new(),
            fields: Fields::default(),
            alike: Alike::default(),
        })
    }

    /// Runs the opcodes up to STOP. Returns the parsed pickle, and the length of the pickle in bytes.
    pub fn run<F: Visitor + ?Sized>(mut self, visitor: &mut F) -> Done<(Pickle<'a>, usize)> {
        loop {
            self.at = self.lexer.pos();
            match self.lexer.next()? {
                Op::Stop => break,
                op => self.step(op, visitor)?,
            }
        }
        self.pickle.root = self.pop()?;
        if !self.stack.is_empty() || !self.marks.is_empty() {
            return Err(self.malformed("STOP with values left on the stack"));
        }
        Ok((self.pickle, self.lexer.pos()))
    }

    fn step<F: Visitor + ?Sized>(&mut self, op: Op, visitor: &mut F) -> Done {
        match op {
            Op::Nothing | Op::Stop => Ok(()),
            Op::Mark => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            Op::Pop => self.discard(),
            Op::PopMark => {
                for id in self.pop_to_mark()? {
                    self.pickle.release(id);
                }
                Ok(())
            }
            Op::Dup => {
                let id = self.top()?;
                self.pickle.pin(id);
                self.stack.push(id);
                Ok(())
            }

            Op::None => self.push(Node::None),
            Op::Bool(value) => self.push(Node::Bool(value)),
            Op::Int(value) => self.push(Node::Int(value)),
            Op::Long(span) => self.push(self.long(span)),
            Op::Float(value) => self.push(Node::Float(value)),
            Op::Unicode(span) => self.unicode(span),
            Op::String(span) => self.push(match std::str::from_utf8(span.of(self.pickle.bytes)) {
                Ok(_) => Node::Str(span),
                Err(_) => Node::Bytes(span),
            }),
            Op::Bytes(span) => self.push(Node::Bytes(span)),
            Op::ByteArray(span) => self.push(Node::ByteArray(span)),

            Op::EmptyTuple => {
                let id = self.pickle.empty_tuple();
                self.stack.push(id);
                Ok(())
            }
            Op::TupleOf(len) => {
                let start = self.height_for(len)?;
                let ids: Ids = self.stack.drain(start..).collect();
                self.push_seq(Node::Tuple, &ids)
            }
            Op::Tuple => {
                let ids = self.pop_to_mark()?;
                self.push_seq(Node::Tuple, &ids)
            }
            Op::EmptyList => self.push_seq(Node::List, &[]),
            Op::EmptyDict => self.push_seq(Node::Dict, &[]),
            Op::EmptySet => self.push_seq(Node::Set, &[]),
            Op::FrozenSet => {
                let ids = self.pop_to_mark()?;
                self.push_seq(Node::FrozenSet, &ids)
            }
            Op::Append => {
                let item = self.pop()?;
                self.append(&[item])
            }
            Op::Appends => {
                let items = self.pop_to_mark()?;
                self.append(&items)
            }
            Op::SetItem => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set_items(&[key, value])
            }
            Op::SetItems => {
                let pairs = self.pop_to_mark()?;
                self.set_items(&pairs)
            }
            Op::AddItems => {
                let items = self.pop_to_mark()?;
                self.add_items(&items)
            }

            Op::Global { module, name } => self.global(module, name, visitor),
            Op::StackGlobal => self.stack_global(visitor),
            Op::Reduce => self.reduce(visitor),
            Op::NewObj => {
                if self.record(visitor)? {
                    return Ok(());
                }
                let args = self.pop_tuple("NEWOBJ")?;
                self.new_object(args, None)
            }
            Op::NewObjEx => {
                let kwargs = self.pop()?;
                if !matches!(self.pickle.get(kwargs), Node::Dict(_)) {
                    return Err(self.malformed("NEWOBJ_EX with keywords that are not a dict"));
                }
                let args = self.pop_tuple("NEWOBJ_EX")?;
                self.new_object(args, Some(kwargs))
            }
            Op::Build => self.build(visitor),
            Op::PersistentId => {
                let id = self.pop()?;
                self.push(Node::PersistentId(id))
            }

            Op::Put(index) => self.put(Some(index)),
            Op::Memoize => self.put(None),
            Op::Get(index) => match self.memo.get(index) {
                Some(id) => {
                    self.stack.push(id);
                    Ok(())
                }
                None => Err(self.malformed(format!("memo entry {index} read before it is written"))),
            },
        }
    }

    // Values

    pub(super) fn room(&self) -> Done {
        let max = self.pickle.limits.max_nodes;
        if self.pickle.live_nodes() < max as usize {
            return Ok(());
        }
        Err(PickleError::limit(self.at, format!("more than {max} objects at once")))
    }

    pub(super) fn push(&mut self, node: Node) -> Done {
        self.room()?;
        let id = self.pickle.add(node);
        self.stack.push(id);
        Ok(())
    }

    fn push_seq(&mut self, kind: fn(Seq) -> Node, ids: &[NodeId]) -> Done {
        let seq = self.pickle.seq(ids);
        self.push(kind(seq))
    }

    /// Converts the bytes of LONG1 to a node. Usually the int fits 64 bits and becomes a small int.
    fn long(&self, span: Span) -> Node {
        long::to_i64(span.of(self.pickle.bytes)).map_or(Node::BigInt(span), Node::Int)
    }

    fn unicode(&mut self, span: Span) -> Done {
        let bytes = span.of(self.pickle.bytes);
        if std::str::from_utf8(bytes).is_ok() {
            self.push(Node::Str(span))
        } else if is_surrogatepass(bytes) {
            self.push(Node::Surrogates(span))
        } else {
            Err(self.malformed("a string that is not UTF-8"))
        }
    }

    // Containers

    fn append(&mut self, items: &[NodeId]) -> Done {
        let target = self.top()?;
        let node = self.pickle.get(target);
        let node = match (node, node.made()) {
            (list @ (Node::List(_) | Node::Ints(_)), _) => self.pickle.extend_list(list, items).expect("it is a list"),
            (_, Some(mut make)) => {
                let mut seq = self.pickle.more_mut(&mut make).items;
                self.pickle.extend(&mut seq, items);
                self.pickle.more_mut(&mut make).items = seq;
                node.remade(make)
            }
            _ => return Err(self.malformed("APPENDS to something that is not a list")),
        };
        self.pickle.set(target, node);
        Ok(())
    }

    fn set_items(&mut self, pairs: &[NodeId]) -> Done {
        if !pairs.len().is_multiple_of(2) {
            return Err(self.malformed("SETITEMS with a key that has no value"));
        }
        let target = self.top()?;
        let node = self.pickle.get(target);
        let node = match (node, node.made()) {
            (Node::Dict(mut seq), _) => {
                self.pickle.extend(&mut seq, pairs);
                Node::Dict(seq)
            }
            (_, Some(mut make)) => {
                let mut seq = self.pickle.more_mut(&mut make).entries;
                self.pickle.extend(&mut seq, pairs);
                self.pickle.more_mut(&mut make).entries = seq;
                node.remade(make)
            }
            _ => return Err(self.malformed("SETITEMS on something that is not a dict")),
        };
        self.pickle.set(target, node);
        Ok(())
    }

    fn add_items(&mut self, items: &[NodeId]) -> Done {
        let target = self.top()?;
        let Node::Set(mut seq) = self.pickle.get(target) else {
            return Err(self.malformed("ADDITEMS to something that is not a set"));
        };
        self.pickle.extend(&mut seq, items);
        self.pickle.set(target, Node::Set(seq));
        Ok(())
    }

    // Stack and memo

    /// Returns the height of the stack without its topmost `len` values. It is an error if a mark is above one of these
    /// values.
    pub(super) fn height_for(&self, len: usize) -> Done<usize> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(len) {
            Some(height) if height >= floor => Ok(height),
            _ => Err(self.malformed("an opcode that takes a value from the empty stack")),
        }
    }

    pub(super) fn top(&self) -> Done<NodeId> {
        Ok(self.stack[self.height_for(1)?])
    }

    pub(super) fn pop(&mut self) -> Done<NodeId> {
        let id = self.top()?;
        self.stack.pop();
        Ok(id)
    }

    pub(super) fn pop_tuple(&mut self, op: &str) -> Done<NodeId> {
        let id = self.pop()?;
        match self.pickle.get(id) {
            Node::Tuple(_) => Ok(id),
            _ => Err(self.malformed(format!("{op} with arguments that are not a tuple"))),
        }
    }

    fn pop_to_mark(&mut self) -> Done<SmallVec<[NodeId; 16]>> {
        match self.marks.pop() {
            Some(height) => Ok(self.stack.drain(height..).collect()),
            None => Err(self.malformed("an opcode that needs a MARK, but no MARK before it")),
        }
    }

    /// Runs POP. If a MARK is on top, POP removes the MARK; CPython writes this for recursive tuples.
    fn discard(&mut self) -> Done {
        if self.marks.last() == Some(&self.stack.len()) {
            self.marks.pop();
            return Ok(());
        }
        let id = self.pop()?;
        self.pickle.release(id);
        Ok(())
    }

    /// Stores the value on top of the stack in the memo. If a GET fetches the entry, the value will have more than one
    /// owner, so its node is pinned (never freed).
    fn put(&mut self, index: Option<u32>) -> Done {
        let id = self.top()?;
        let kept = match index {
            Some(index) => {
                self.alike.forget();
                self.memo.put(index, id)
            }
            None => self.memo.push(id),
        };
        if kept {
            self.pickle.pin(id);
        }
        Ok(())
    }

    pub(super) fn malformed(&self, what: impl Into<String>) -> PickleError {
        PickleError::malformed(self.at, what)
    }
}

/// Returns whether bytes are UTF-8 in which lone surrogates are allowed. Python's `surrogatepass` writes a lone
/// surrogate as three bytes.
fn is_surrogatepass(mut bytes: &[u8]) -> bool {
    while let Err(error) = std::str::from_utf8(bytes) {
        match bytes[error.valid_up_to()..] {
            [0xed, 0xa0..=0xbf, 0x80..=0xbf, ..] => bytes = &bytes[error.valid_up_to() + 3..],
            _ => return false,
        }
    }
    true
}
