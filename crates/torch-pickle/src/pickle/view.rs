//! Typed, cheap views of a node. No view recurses, allocates for borrowed data, or panics. If the node has another type
//! than a view expects, the view returns `None`, and the caller decides whether this is an error.

use std::borrow::Cow;
use std::fmt;

use smallvec::SmallVec;

use super::arena::{Make, Node, NodeId, Pickle, Seq};
use super::items::{Entries, Items};
use super::long;
use super::visitor::Row;

/// A reference to a node of a [`Pickle`].
#[derive(Clone, Copy)]
pub struct Ref<'a> {
    pickle: &'a Pickle<'a>,
    id: NodeId,
}

/// A global called by REDUCE: `module.name(*args)`.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The module of the called class or function.
    pub module: &'a str,
    /// The name of the called class or function within the module.
    pub name: &'a str,
    /// The positional arguments.
    pub args: Items<'a>,
}

/// An object made by NEWOBJ of a global: `module.name.__new__(*args)`, possibly followed by BUILD with `state`.
#[derive(Clone, Copy, Debug)]
pub struct Instance<'a> {
    /// The module of the class.
    pub module: &'a str,
    /// The name of the class within the module.
    pub name: &'a str,
    /// The positional arguments.
    pub args: Items<'a>,
    /// The state that BUILD set.
    pub state: Option<Ref<'a>>,
}

impl<'a> Ref<'a> {
    pub(super) fn new(pickle: &'a Pickle<'a>, id: NodeId) -> Self {
        Self { pickle, id }
    }

    /// Returns the id of the node. References with equal ids refer to one Python object. While the pickle is being
    /// read, an id stays valid only if the node [is shared](Self::is_shared).
    pub fn id(self) -> NodeId {
        self.id
    }

    /// Returns the pickle that contains the node.
    pub fn pickle(self) -> &'a Pickle<'a> {
        self.pickle
    }

    /// Returns whether the node may have more than one reference. A shared node is never freed.
    pub fn is_shared(self) -> bool {
        self.pickle.is_pinned(self.id)
    }

    /// Returns whether the node is `None`.
    pub fn is_none(self) -> bool {
        matches!(self.node(), Node::None)
    }

    /// Returns the value of a bool.
    pub fn as_bool(self) -> Option<bool> {
        match self.node() {
            Node::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the value of an int that fits 64 bits.
    pub fn as_i64(self) -> Option<i64> {
        match self.node() {
            Node::Int(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the value of an int that fits 64 bits and is not negative.
    pub fn as_u64(self) -> Option<u64> {
        match self.node() {
            Node::Int(value) => u64::try_from(value).ok(),
            Node::BigInt(span) => long::to_u64(span.of(self.pickle.bytes)),
            _ => None,
        }
    }

    /// Returns the value of an int of any size, as little-endian two's complement without unnecessary sign bytes.
    pub fn as_int_bytes(self) -> Option<SmallVec<[u8; 8]>> {
        match self.node() {
            Node::Int(value) => Some(SmallVec::from_slice(long::minimal(&value.to_le_bytes()))),
            Node::BigInt(span) => Some(SmallVec::from_slice(long::minimal(span.of(self.pickle.bytes)))),
            _ => None,
        }
    }

    /// Returns the value of a float. Ints are not converted.
    pub fn as_f64(self) -> Option<f64> {
        match self.node() {
            Node::Float(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the text of a string.
    pub fn as_str(self) -> Option<&'a str> {
        match self.node() {
            Node::Str(span) => std::str::from_utf8(span.of(self.pickle.bytes)).ok(),
            _ => None,
        }
    }

    /// Returns the bytes of a string with lone surrogates, in Python's `surrogatepass` form.
    pub fn as_surrogates(self) -> Option<&'a [u8]> {
        match self.node() {
            Node::Surrogates(span) => Some(span.of(self.pickle.bytes)),
            _ => None,
        }
    }

    /// Returns the content of `bytes` that an opcode for bytes wrote. In protocol 2, `bytes` are a call of
    /// `_codecs.encode` instead.
    pub fn as_bytes(self) -> Option<&'a [u8]> {
        match self.node() {
            Node::Bytes(span) => Some(span.of(self.pickle.bytes)),
            _ => None,
        }
    }

    /// Returns the bytes of a `bytearray`.
    pub fn as_bytearray(self) -> Option<&'a [u8]> {
        match self.node() {
            Node::ByteArray(span) => Some(span.of(self.pickle.bytes)),
            _ => None,
        }
    }

    /// Returns the items of a tuple.
    pub fn as_tuple(self) -> Option<Items<'a>> {
        match self.node() {
            Node::Tuple(seq) => Some(self.items_of(seq)),
            _ => None,
        }
    }

    /// Returns the items of a list.
    pub fn as_list(self) -> Option<Items<'a>> {
        match self.node() {
            Node::List(seq) => Some(self.items_of(seq)),
            _ => None,
        }
    }

    /// Returns the items of a set.
    pub fn as_set(self) -> Option<Items<'a>> {
        match self.node() {
            Node::Set(seq) => Some(self.items_of(seq)),
            _ => None,
        }
    }

    /// Returns the items of a frozenset.
    pub fn as_frozenset(self) -> Option<Items<'a>> {
        match self.node() {
            Node::FrozenSet(seq) => Some(self.items_of(seq)),
            _ => None,
        }
    }

    /// Returns the entries of a dict or an `OrderedDict` as written, including duplicate keys.
    pub fn as_dict(self) -> Option<Entries<'a>> {
        match self.node() {
            Node::Dict(seq) => Some(Entries::new(self.items_of(seq))),
            Node::Call(_) if self.global_callee() == Some(("collections", "OrderedDict")) => Some(self.entries()),
            _ => None,
        }
    }

    /// Returns the value of a text key of a dict. If the key occurs several times, the last value counts, as in Python.
    /// Searches the whole dict.
    pub fn get(self, key: &str) -> Option<Ref<'a>> {
        let mut entries = self.as_dict()?.rev();
        entries.find(|(k, _)| k.as_str() == Some(key)).map(|(_, value)| value)
    }

    /// Returns the sizes of a `torch.Size` with up to 16 dims.
    pub fn as_dims(self) -> Option<&'a [u64]> {
        match self.node() {
            Node::Dims(block) => Some(self.pickle.dims(block)),
            _ => None,
        }
    }

    /// Returns the sizes in a `torch.Size`, or in a tuple or list of non-negative ints.
    pub fn to_dims(self) -> Option<SmallVec<[u64; 4]>> {
        self.to_dims_up_to(usize::MAX)
    }

    /// Returns sizes like [`to_dims`](Self::to_dims), but `None` for a tuple or list of more than `max_ndim` sizes,
    /// because a long shared tuple may be converted very often.
    pub fn to_dims_up_to(self, max_ndim: usize) -> Option<SmallVec<[u64; 4]>> {
        if let Some(dims) = self.as_dims() {
            return Some(SmallVec::from_slice(dims));
        }
        let items = match self.call() {
            Some(Call { module: "torch", name: "Size", args }) => args.get(0)?.as_tuple()?,
            _ => self.as_tuple().or_else(|| self.as_list())?,
        };
        (items.len() <= max_ndim).then(|| items.map(Ref::as_u64).collect())?
    }

    /// Returns the module and the name of a global that is not called: a class, a function or a dtype.
    pub fn global(self) -> Option<(&'a str, &'a str)> {
        self.pickle.global(self.id).map(|global| global.symbol)
    }

    /// Returns the module and the name of a global that is not called, or of a `getattr` of such a global. Protocol 2
    /// has no other spelling for a class inside a class, such as `ShardedTensor.ProcessGroupState`.
    pub fn symbol(self) -> Option<(&'a str, Cow<'a, str>)> {
        if let Some((module, name)) = self.global() {
            return Some((module, name.into()));
        }
        let Call { module: "builtins", name: "getattr", args } = self.call()? else {
            return None;
        };
        let [of, attribute] = [args.get(0)?, args.get(1)?];
        let (module, name) = of.global()?;
        Some((module, format!("{name}.{}", attribute.as_str()?).into()))
    }

    /// Returns the call of a global by REDUCE.
    pub fn call(self) -> Option<Call<'a>> {
        let Node::Call(make) = self.node() else {
            return None;
        };
        let (module, name) = self.at(make.callee).global()?;
        Some(Call { module, name, args: self.at(make.args).as_tuple()? })
    }

    /// Returns an object that NEWOBJ made from a named class.
    pub fn object(self) -> Option<Instance<'a>> {
        let Node::New(make) = self.node() else {
            return None;
        };
        let (module, name) = self.at(make.callee).global()?;
        let args = self.at(make.args).as_tuple()?;
        Some(Instance { module, name, args, state: self.state() })
    }

    /// Returns whether NEWOBJ or NEWOBJ_EX made the object.
    pub fn is_new(self) -> bool {
        matches!(self.node(), Node::New(_))
    }

    /// Returns the function that REDUCE called, or the class of NEWOBJ. The result is usually a global name.
    pub fn callee(self) -> Option<Ref<'a>> {
        Some(self.at(self.make()?.callee))
    }

    /// Returns the arguments of REDUCE or NEWOBJ.
    pub fn args(self) -> Option<Items<'a>> {
        self.at(self.make()?.args).as_tuple()
    }

    /// Returns the keyword arguments of NEWOBJ_EX.
    pub fn kwargs(self) -> Option<Entries<'a>> {
        self.at(self.pickle.more(self.make()?)?.kwargs?).as_dict()
    }

    /// Returns the state that BUILD set on an object.
    pub fn state(self) -> Option<Ref<'a>> {
        Some(self.at(self.pickle.more(self.make()?)?.state?))
    }

    /// Returns the items that were appended to an object made by a call, such as a deque or an object of a subclass of
    /// list.
    pub fn items(self) -> Items<'a> {
        let more = self.make().and_then(|make| self.pickle.more(make));
        self.items_of(more.map_or(Seq::EMPTY, |more| more.items))
    }

    /// Returns the entries that were set on an object made by a call, such as an `OrderedDict` or a `defaultdict`.
    pub fn entries(self) -> Entries<'a> {
        let more = self.make().and_then(|make| self.pickle.more(make));
        Entries::new(self.items_of(more.map_or(Seq::EMPTY, |more| more.entries)))
    }

    /// Returns the argument of BINPERSID. In torch files, the argument is a tuple that names a storage.
    pub fn persistent_id(self) -> Option<Ref<'a>> {
        match self.node() {
            Node::PersistentId(id) => Some(self.at(id)),
            _ => None,
        }
    }

    /// Returns the row that replaced an object.
    pub fn row(self) -> Option<Row> {
        match self.node() {
            Node::Row(row) => Some(row),
            _ => None,
        }
    }

    /// Returns a description of the node for messages: `dict`, `int 3`, `call of torch.Size`.
    pub fn describe(self) -> String {
        let kind = match self.node() {
            Node::None => "None",
            Node::Bool(_) => "bool",
            Node::Int(value) => return format!("int {value}"),
            Node::BigInt(_) => "int that takes more than 8 bytes",
            Node::Float(_) => "float",
            Node::Str(_) | Node::Surrogates(_) => "str",
            Node::Bytes(_) => "bytes",
            Node::ByteArray(_) => "bytearray",
            Node::Tuple(_) => "tuple",
            Node::List(_) | Node::Ints(_) => "list",
            Node::Dict(_) => "dict",
            Node::Set(_) => "set",
            Node::FrozenSet(_) => "frozenset",
            Node::PersistentId(_) => "persistent id",
            Node::Dims(_) => "torch.Size",
            Node::Row(_) => "folded row",
            Node::Global(_) => return self.name_or("?"),
            Node::Call(make) => {
                return format!("call of {}", self.at(make.callee).name_or("a call"));
            }
            Node::New(make) => {
                return format!("object of {}", self.at(make.callee).name_or("a call"));
            }
        };
        kind.to_owned()
    }

    fn name_or(self, other: &str) -> String {
        self.global().map_or_else(|| other.to_owned(), |(module, name)| format!("{module}.{name}"))
    }

    fn global_callee(self) -> Option<(&'a str, &'a str)> {
        self.callee()?.global()
    }

    fn make(self) -> Option<Make> {
        self.node().made()
    }

    pub(super) fn items_of(self, seq: Seq) -> Items<'a> {
        Items::new(self.pickle, self.pickle.ids(seq))
    }

    pub(super) fn node(self) -> Node {
        self.pickle.get(self.id)
    }

    fn at(self, id: NodeId) -> Self {
        Self { id, ..self }
    }
}

impl fmt::Debug for Ref<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {}", self.id.0, self.describe())
    }
}
