//! The arena: a parsed pickle as flat tables of small nodes.
//!
//! Reason for flat tables: pickles describe graphs. In flat tables, shared and even cyclic references are plain ids,
//! and neither walking nor dropping the graph recurses. A node is 16 bytes, because text and bytes stay in the input
//! and children are in side tables.
//!
//! Invariants: each node comes from at least one byte of the input, so the length of the input bounds the number of
//! nodes. A node is *pinned* if it is the empty tuple, is duplicated, or is in a memo entry that a GET fetches. A
//! pinned node is never freed. Any other node has exactly one owner, and is freed together with its owner.

use smallvec::SmallVec;

use super::bit_set::BitSet;
use super::opcode::Span;
use super::slab::Slab;
use super::visitor::Row;
use super::{Limits, Ref};

/// The id of a node in a pickle. If two references have equal ids, both refer to one Python object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(super) u32);

/// The minimum number of items of a list of ints that is stored without a node for each int. Lists of sizes, ranks and
/// parameters are always shorter.
pub(super) const LONG_LIST: usize = 1 << 20;

/// The ids of the children of one node. Up to four ids need no allocation, and most nodes have no more.
pub(super) type Ids = SmallVec<[NodeId; 4]>;

/// Refers to the list of the children of a node: it is the slot of the list in a table. An empty list has no slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seq(Option<SeqSlot>);

/// The number of a slot in a table, plus one. The value is never zero, so an `Option` of this type takes only four
/// bytes.
type SeqSlot = std::num::NonZeroU32;

impl Seq {
    pub const EMPTY: Self = Self(None);

    fn slot(self) -> Option<u32> {
        self.0.map(|slot| slot.get() - 1)
    }
}

/// The call that made an object: `callee(*args)`, or `callee.__new__(callee, *args)`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Make {
    pub callee: NodeId,
    pub args: NodeId,
    /// The slot of the object's [`More`], plus one; `None` if the object has no keyword arguments, items,
    /// entries or state.
    more: Option<std::num::NonZeroU32>,
}

/// Keyword arguments, items, entries and state of an object made by a call. Only few objects have any of them, so they
/// are stored separately.
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

/// The sizes of one `torch.Size`, as a range of [`Dims`], which has the sizes of all `torch.Size` nodes.
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
    /// An int beyond 64 bits in two's complement. It may have redundant sign bytes.
    BigInt(Span),
    Float(f64),
    /// A text whose bytes are valid UTF-8.
    Str(Span),
    /// A text whose bytes are valid UTF-8 except for lone surrogates.
    Surrogates(Span),
    Bytes(Span),
    ByteArray(Span),
    Tuple(Seq),
    List(Seq),
    /// A list that contains only ints, and so many that a node for each would take too much memory. The number is its
    /// slot in the table of such lists.
    Ints(u32),
    /// A dict. The children of this node are the keys and values, alternating: key, value, key, value.
    Dict(Seq),
    Set(Seq),
    FrozenSet(Seq),
    /// A class, function or dtype by name: the index of a [`struct@Global`]. Each name is stored once.
    Global(u32),
    /// An object made by REDUCE.
    Call(Make),
    /// An object made by NEWOBJ or NEWOBJ_EX.
    New(Make),
    PersistentId(NodeId),
    /// A `torch.Size`. Its sizes are a range of [`Dims`].
    Dims(Block),
    Row(Row),
}

const _: () = assert!(size_of::<Node>() == 16);

impl Node {
    /// Returns the call that made the object; `None` if no call made this node.
    pub fn made(self) -> Option<Make> {
        match self {
            Self::Call(make) | Self::New(make) => Some(make),
            _ => None,
        }
    }

    /// Returns a copy of the node with `make` in place of the call that made the object.
    pub fn remade(self, make: Make) -> Self {
        match self {
            Self::Call(_) => Self::Call(make),
            Self::New(_) => Self::New(make),
            other => other,
        }
    }
}

/// A class, function or dtype that the pickle names with GLOBAL.
#[derive(Clone, Copy, Debug)]
pub(super) struct Global<'a> {
    /// The module and the name.
    pub symbol: (&'a str, &'a str),
    pub role: Role,
}

/// How the machine, which runs the opcodes, treats a class or function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The global `torch.Size`, whose calls become a list of sizes.
    Size,
    /// A class whose objects the visitor receives as object records (flat lists of fields, without nodes).
    Record,
    Other,
}

/// A parsed pickle. The pickle borrows the input, because texts and bytes are not copied.
pub struct Pickle<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) limits: Limits,
    pub(super) root: NodeId,
    pub(super) globals: Vec<Global<'a>>,
    nodes: Slab<Node>,
    /// The node of the empty tuple; `None` until the pickle creates an empty tuple. As in Python, there is at most one
    /// empty tuple.
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

    /// Returns the object that the pickle contains.
    pub fn root(&self) -> Ref<'_> {
        self.node(self.root)
    }

    /// Returns a reference to the node with this id. The id must come from this pickle.
    pub fn node(&self, id: NodeId) -> Ref<'_> {
        Ref::new(self, id)
    }

    /// Returns the number of nodes that are in use. An object that a visitor replaced by a row counts as one node.
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

    /// Appends items to a list, and returns its new node; `None` if `list` is not a list. When a list becomes long and
    /// has only ints, the ints are stored without nodes. If another value is appended later, the ints become nodes
    /// again.
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

    /// Adds the sizes of a `torch.Size` to the pool. Returns `None` for more than [`MAX_DIMS`] sizes, because the pool
    /// is only for the short shapes of tensors.
    pub(super) fn add_dims(&mut self, values: &[u64]) -> Option<NodeId> {
        let block = self.dims.insert(values)?;
        Some(self.add(Node::Dims(block)))
    }

    pub(super) fn dims(&self, block: Block) -> &[u64] {
        self.dims.get(block)
    }

    /// Frees the node `id`, and all nodes that only this node owns. This terminates, because every cycle contains a
    /// pinned node, which is never freed.
    pub(super) fn release(&mut self, id: NodeId) {
        // Most nodes are shared, or have no children.
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

    /// Replaces the object `id`, which `make` made, by a row, and frees the nodes that only the object owned.
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

/// The maximum number of sizes of a `torch.Size` that are stored in [`Dims`]. The limit is needed because each such
/// `torch.Size` is a copy of its tuple, and five bytes of a pickle can make a `torch.Size` from a shared tuple of any
/// length.
pub(super) const MAX_DIMS: usize = 16;

/// The sizes of all `torch.Size` nodes. The range of a freed node is reused for a node with as many sizes.
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
