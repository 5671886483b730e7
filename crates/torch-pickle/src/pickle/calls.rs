//! The opcodes that look up names, call functions and create objects. CPython runs code for these opcodes; this module
//! only records nodes.
//!
//! A name is stored once and never looked up. A call is a node with a callee and its arguments. BUILD attaches a state
//! to the node of an object. Objects that a [`Visitor`] recognises become rows, and each call of `torch.Size` becomes a
//! list of numbers.
//!
//! Invariant: the arguments of a call are a tuple node, for every callee.
//!
//! Source of the rule: CPython `Lib/pickle.py`, `load_global` to `load_build`.

use smallvec::SmallVec;

use super::arena::{Global, MAX_DIMS, Node, NodeId, Role};
use super::machine::{Done, Machine};
use super::opcode::Span;
use super::symbols;
use super::visitor::Visitor;
use super::{PickleError, Ref};

impl<'a> Machine<'a> {
    pub(super) fn global<F: Visitor + ?Sized>(&mut self, module: Span, name: Span, visitor: &F) -> Done {
        let symbol = symbols::modern(self.text(module)?, self.text(name)?);
        let next = self.pickle.globals.len() as u32;
        let index = *self.interned.entry(symbol).or_insert(next);
        if index == next {
            let role = match symbol {
                ("torch", "Size") => Role::Size,
                _ if visitor.keeps(symbol) => Role::Record,
                _ => Role::Other,
            };
            self.pickle.globals.push(Global { symbol, role });
        }
        self.push(Node::Global(index))
    }

    pub(super) fn stack_global<F: Visitor + ?Sized>(&mut self, visitor: &F) -> Done {
        let name = self.pop()?;
        let module = self.pop()?;
        let (Node::Str(n), Node::Str(m)) = (self.pickle.get(name), self.pickle.get(module)) else {
            return Err(self.malformed("STACK_GLOBAL with names that are not text"));
        };
        self.pickle.release(name);
        self.pickle.release(module);
        self.global(m, n, visitor)
    }

    pub(super) fn reduce<F: Visitor + ?Sized>(&mut self, visitor: &mut F) -> Done {
        let args = self.pop_tuple("REDUCE")?;
        let callee = self.pop()?;
        self.room()?;
        if let Some(dims) = self.dims_of(callee, args)
            && let Some(id) = self.pickle.add_dims(&dims)
        {
            self.pickle.release(callee);
            self.pickle.release(args);
            self.stack.push(id);
            return Ok(());
        }
        let make = self.pickle.make(callee, args, None);
        let Some(name) = self.pickle.node(callee).global() else {
            return self.push(Node::Call(make));
        };
        let row = visitor.reduce(name, self.pickle.node(args));
        let row = row.map_err(|what| self.rejected(what))?;
        self.push(Node::Call(make))?;
        if let Some(row) = row {
            let id = self.top()?;
            self.pickle.put_row(id, make, row);
        }
        Ok(())
    }

    /// Returns the sizes in a call such as `torch.Size((2, 3))`; `None` for any other call.
    fn dims_of(&self, callee: NodeId, args: NodeId) -> Option<SmallVec<[u64; 4]>> {
        self.pickle.global(callee).filter(|callee| callee.role == Role::Size)?;
        let args = self.pickle.node(args).as_tuple()?;
        let sizes = args.get(0).filter(|_| args.len() == 1)?.as_tuple()?;
        if sizes.len() > MAX_DIMS {
            return None;
        }
        sizes.map(Ref::as_u64).collect()
    }

    pub(super) fn new_object(&mut self, args: NodeId, kwargs: Option<NodeId>) -> Done {
        let class = self.pop()?;
        let make = self.pickle.make(class, args, kwargs);
        self.push(Node::New(make))
    }

    pub(super) fn build<F: Visitor + ?Sized>(&mut self, visitor: &mut F) -> Done {
        let state = self.pop()?;
        let target = self.top()?;
        let node = self.pickle.get(target);
        let Some(mut make) = node.made() else {
            return Err(self.malformed("BUILD on something that has no state"));
        };
        let row = match self.pickle.more(make) {
            Some(more) if more.state.is_some() => {
                return Err(self.malformed("a second BUILD on one object"));
            }
            // The object must not become a row, because a row would lose its items, entries and keywords.
            Some(_) => None,
            None => match self.pickle.node(make.callee).global() {
                Some(class) => visitor
                    .build(class, self.pickle.node(make.args), self.pickle.node(state))
                    .map_err(|what| self.rejected(what))?,
                None => None,
            },
        };
        self.pickle.more_mut(&mut make).state = Some(state);
        match row {
            Some(row) => {
                if self.pickle.is_pinned(target) {
                    self.alike.forget();
                }
                self.pickle.put_row(target, make, row);
            }
            None => self.pickle.set(target, node.remade(make)),
        }
        Ok(())
    }

    fn text(&self, span: Span) -> Done<&'a str> {
        std::str::from_utf8(span.of(self.pickle.bytes)).map_err(|_| self.malformed("a global's name that is not UTF-8"))
    }

    fn rejected(&self, what: String) -> PickleError {
        PickleError::rejected(self.at, what)
    }
}
