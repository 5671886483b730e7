//! The arena: a decoded pickle as flat tables of small nodes.
//!
//! Why flat: pickles describe graphs. Shared and even cyclic references are plain ids here, no walk and
//! no drop recurses, and a node is 16 bytes because text and bytes stay in the input and children lie
//! in side tables.
//!
//! Invariants: a node costs at least one input byte. A node that is not *pinned* (fetched from the memo,
//! or duplicated) has exactly one owner, so freeing its owner frees it too; a pinned one is never freed.

use smallvec::SmallVec;

use super::bit_set::BitSet;
use super::opcode::Span;
use super::slab::Slab;
use super::visitor::Row;
use super::{Limits, Ref};

/// Identity of a node: equal ids are the same Python object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(super) u32);

/// From so many items on, lists of ints are kept without nodes. Lists of sizes, ranks and parameters are shorter.
pub(super) const LONG_LIST: usize = 1 << 20;

/// Children of one node, kept aside; most nodes have at most four and need no allocation for them.
pub(super) type Ids = SmallVec<[NodeId; 4]>;

/// A list of children; empty ones take no slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seq(Option<SeqSlot>);

/// A slot number plus one: with zero as a niche, `Seq` stays four bytes.
type SeqSlot = std::num::NonZeroU32;

impl Seq {
    pub const EMPTY: Self = Self(None);

    fn slot(self) -> Option<u32> {
        self.0.map(|slot| slot.get() - 1)
    }
}

/// Something made by calling: `callee(*args)`, or `callee.__new__(callee, *args)`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Make {
    pub callee: NodeId,
    pub args: NodeId,
    /// Slot of [`More`] plus one.
    more: Option<std::num::NonZeroU32>,
}

/// What few made objects have.
#[derive(Clone, Debug)]
pub(super) struct More {
    pub kwargs: Option<NodeId>,
    pub items: Seq,
    pub entries: Seq,
    pub state: Option<NodeId>,
}

impl Default for More {
    fn default() -> Self {
        Self { kwargs: None, items: Seq::EMPTY, entries: Seq::EMPTY, state: None }
    }
}

/// A run of numbers in the pool of dims.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    start: u32,
    len: u32,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Node {
    #[default]
    None,
    Bool(bool),
    Int(i64),
    /// Two's complement beyond 64 bits, perhaps with redundant sign bytes.
    BigInt(Span),
    Float(f64),
    /// Checked to be UTF-8.
    Str(Span),
    /// Checked to be UTF-8 but for surrogates.
    Surrogates(Span),
    Bytes(Span),
    ByteArray(Span),
    Tuple(Seq),
    List(Seq),
    /// Slot of a list of nothing but ints, which is so long that a node for each would take too much memory.
    Ints(u32),
    /// Keys and values in turn.
    Dict(Seq),
    Set(Seq),
    FrozenSet(Seq),
    /// Index of an interned [`struct@Global`].
    Global(u32),
    /// REDUCE.
    Call(Make),
    /// NEWOBJ and NEWOBJ_EX.
    New(Make),
    PersistentId(NodeId),
    /// `torch.Size` of sizes.
    Dims(Block),
    Row(Row),
}

const _: () = assert!(size_of::<Node>() == 16);

impl Node {
    pub fn made(self) -> Option<Make> {
        match self {
            Self::Call(make) | Self::New(make) => Some(make),
            _ => None,
        }
    }

    /// This node, had it been made like so.
    pub fn remade(self, make: Make) -> Self {
        match self {
            Self::Call(_) => Self::Call(make),
            Self::New(_) => Self::New(make),
            other => other,
        }
    }
}

/// A class, a function, a dtype.
#[derive(Clone, Copy, Debug)]
pub(super) struct Global<'a> {
    /// Module and name.
    pub symbol: (&'a str, &'a str),
    pub role: Role,
}

/// What a global is to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// `torch.Size`.
    Size,
    /// A class whose objects the visitor sees as records.
    Record,
    Other,
}

/// A decoded pickle. It borrows the input, where text and bytes stay.
pub struct Pickle<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) limits: Limits,
    pub(super) root: NodeId,
    pub(super) globals: Vec<Global<'a>>,
    nodes: Slab<Node>,
    /// As in Python there is one.
    empty_tuple: Option<NodeId>,
    pinned: BitSet,
    seqs: Slab<Ids>,
    ints: Slab<Vec<i64>>,
    mores: Slab<More>,
    dims: Dims,
}

impl<'a> Pickle<'a> {
    pub(super) fn new(bytes: &'a [u8], limits: Limits) -> Self {
        Self {
            bytes,
            limits,
            root: NodeId(0),
            globals: Vec::new(),
            nodes: Slab::new(),
            empty_tuple: None,
            pinned: BitSet::default(),
            seqs: Slab::new(),
            ints: Slab::new(),
            mores: Slab::new(),
            dims: Dims::default(),
        }
    }

    /// The object that the pickle is of.
    pub fn root(&self) -> Ref<'_> {
        self.node(self.root)
    }

    /// The node of an id taken from this pickle.
    pub fn node(&self, id: NodeId) -> Ref<'_> {
        Ref::new(self, id)
    }

    /// Nodes in use, rows included.
    pub fn live_nodes(&self) -> usize {
        self.nodes.live()
    }

    pub(super) fn get(&self, id: NodeId) -> Node {
        *self.nodes.get(id.0)
    }

    pub(super) fn set(&mut self, id: NodeId, node: Node) {
        *self.nodes.get_mut(id.0) = node;
    }

    pub(super) fn add(&mut self, node: Node) -> NodeId {
        NodeId(self.nodes.insert(node))
    }

    pub(super) fn pin(&mut self, id: NodeId) {
        self.pinned.insert(id.0);
    }

    pub(super) fn is_pinned(&self, id: NodeId) -> bool {
        self.pinned.contains(id.0)
    }

    pub(super) fn empty_tuple(&mut self) -> NodeId {
        if let Some(id) = self.empty_tuple {
            return id;
        }
        let id = self.add(Node::Tuple(Seq::EMPTY));
        self.pin(id);
        *self.empty_tuple.insert(id)
    }

    pub(super) fn global(&self, id: NodeId) -> Option<Global<'a>> {
        match self.get(id) {
            Node::Global(index) => Some(self.globals[index as usize]),
            _ => None,
        }
    }

    pub(super) fn seq(&mut self, ids: &[NodeId]) -> Seq {
        let mut seq = Seq::EMPTY;
        self.extend(&mut seq, ids);
        seq
    }

    pub(super) fn extend(&mut self, seq: &mut Seq, ids: &[NodeId]) {
        match seq.slot() {
            Some(slot) => self.seqs.get_mut(slot).extend_from_slice(ids),
            None if ids.is_empty() => {}
            None => seq.0 = SeqSlot::new(self.seqs.insert(ids.into()) + 1),
        }
    }

    pub(super) fn ids(&self, seq: Seq) -> &[NodeId] {
        seq.slot().map_or(&[], |slot| self.seqs.get(slot))
    }

    pub(super) fn ints(&self, slot: u32) -> &[i64] {
        self.ints.get(slot)
    }

    /// Appends to a list, and gives what it is then. A list that has just become long is kept as bare ints, if that is
    /// what it holds, for as long as ints follow.
    pub(super) fn extend_list(&mut self, list: Node, ids: &[NodeId]) -> Option<Node> {
        match list {
            Node::List(mut seq) => {
                let was_long = self.ids(seq).len() >= LONG_LIST;
                self.extend(&mut seq, ids);
                let is_long = !was_long && self.ids(seq).len() >= LONG_LIST;
                let ints = if is_long { self.as_ints(self.ids(seq)) } else { None };
                let Some(ints) = ints else { return Some(Node::List(seq)) };
                for id in self.seqs.remove(seq.slot().expect("it is not empty")) {
                    self.release(id);
                }
                Some(Node::Ints(self.ints.insert(ints)))
            }
            Node::Ints(slot) => {
                if let Some(more) = self.as_ints(ids) {
                    self.ints.get_mut(slot).extend(more);
                    ids.iter().for_each(|id| self.release(*id));
                    return Some(list);
                }
                let mut all: Ids = self.ints.remove(slot).into_iter().map(|value| self.add(Node::Int(value))).collect();
                all.extend_from_slice(ids);
                Some(Node::List(self.seq(&all)))
            }
            _ => None,
        }
    }

    fn as_ints(&self, ids: &[NodeId]) -> Option<Vec<i64>> {
        let int = |id: &NodeId| match self.get(*id) {
            Node::Int(value) => Some(value),
            _ => None,
        };
        ids.iter().map(int).collect()
    }

    pub(super) fn make(&mut self, callee: NodeId, args: NodeId, kwargs: Option<NodeId>) -> Make {
        let mut make = Make { callee, args, more: None };
        if kwargs.is_some() {
            self.more_mut(&mut make).kwargs = kwargs;
        }
        make
    }

    pub(super) fn more(&self, make: Make) -> Option<&More> {
        make.more.map(|slot| self.mores.get(slot.get() - 1))
    }

    pub(super) fn more_mut(&mut self, make: &mut Make) -> &mut More {
        let slot = match make.more {
            Some(slot) => slot.get() - 1,
            None => {
                let slot = self.mores.insert(More::default());
                make.more = std::num::NonZeroU32::new(slot + 1);
                slot
            }
        };
        self.mores.get_mut(slot)
    }

    /// None for what the pool will not take: it is for shapes, and shapes are short.
    pub(super) fn add_dims(&mut self, values: &[u64]) -> Option<NodeId> {
        let block = self.dims.insert(values)?;
        Some(self.add(Node::Dims(block)))
    }

    pub(super) fn dims(&self, block: Block) -> &[u64] {
        self.dims.get(block)
    }

    /// Frees `id` and everything that it alone owns. Terminates, because cycles lead through pinned nodes.
    pub(super) fn release(&mut self, id: NodeId) {
        // Most nodes are shared or own nothing.
        if self.is_pinned(id) {
            return;
        }
        if matches!(self.get(id), Node::None | Node::Bool(_) | Node::Int(_) | Node::Str(_) | Node::Global(_)) {
            self.nodes.remove(id.0);
            return;
        }
        let mut doomed: SmallVec<[NodeId; 16]> = SmallVec::from_slice(&[id]);
        while let Some(id) = doomed.pop() {
            if self.is_pinned(id) {
                continue;
            }
            match self.nodes.remove(id.0) {
                Node::Tuple(seq) | Node::List(seq) | Node::Dict(seq) | Node::Set(seq) | Node::FrozenSet(seq) => {
                    self.take_seq(seq, &mut doomed);
                }
                Node::Call(make) | Node::New(make) => self.take_make(make, &mut doomed),
                Node::PersistentId(id) => doomed.push(id),
                Node::Ints(slot) => drop(self.ints.remove(slot)),
                Node::Dims(block) => self.dims.remove(block),
                _ => {}
            }
        }
    }

    /// Puts a row in the place of a made object and frees what the object alone owned.
    pub(super) fn put_row(&mut self, id: NodeId, make: Make, row: Row) {
        self.set(id, Node::Row(row));
        let mut parts = SmallVec::<[NodeId; 16]>::new();
        self.take_make(make, &mut parts);
        for part in parts {
            self.release(part);
        }
    }

    fn take_make(&mut self, make: Make, parts: &mut SmallVec<[NodeId; 16]>) {
        parts.extend([make.callee, make.args]);
        if let Some(slot) = make.more {
            let more = self.mores.remove(slot.get() - 1);
            parts.extend(more.kwargs);
            parts.extend(more.state);
            self.take_seq(more.items, parts);
            self.take_seq(more.entries, parts);
        }
    }

    fn take_seq(&mut self, seq: Seq, parts: &mut SmallVec<[NodeId; 16]>) {
        if let Some(slot) = seq.slot() {
            parts.extend(self.seqs.remove(slot));
        }
    }
}

/// One tuple can be made a `torch.Size` many times for five bytes each; this bounds the copies.
pub(super) const MAX_DIMS: usize = 16;

/// The pool of dims: freed blocks are kept by length and used again.
#[derive(Default)]
struct Dims {
    values: Vec<u64>,
    free: [Vec<u32>; MAX_DIMS + 1],
}

impl Dims {
    fn insert(&mut self, values: &[u64]) -> Option<Block> {
        let len = values.len() as u32;
        if let Some(start) = self.free.get_mut(values.len())?.pop() {
            let block = Block { start, len };
            self.values[block.range()].copy_from_slice(values);
            return Some(block);
        }
        let start = u32::try_from(self.values.len()).ok()?;
        start.checked_add(len)?;
        self.values.extend_from_slice(values);
        Some(Block { start, len })
    }

    fn remove(&mut self, block: Block) {
        self.free[block.len as usize].push(block.start);
    }

    fn get(&self, block: Block) -> &[u64] {
        &self.values[block.range()]
    }
}

impl Block {
    fn range(self) -> std::ops::Range<usize> {
        self.start as usize..(self.start + self.len) as usize
    }
}
