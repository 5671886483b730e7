//! Decodes nodes to a [`Value`]. This module gives a meaning to the names in a pickle, or refuses them.
//!
//! A name on the lists in [`super::symbols`] is decoded, or kept with its arguments. Any other name is refused, and the
//! error has the path of the object. The caller recognises tensors: the closure of the caller receives every call,
//! object and persistent id before this module decodes it.
//!
//! Invariants: a decoded value is a tree no deeper than [`Limits::max_depth`](super::Limits), so code may walk and drop
//! the value recursively. [`Limits::max_visits`](super::Limits) bounds the work of one decode, however many nodes the
//! graph shares. A graph with a cycle is not a tree and is refused.
//!
//! Source of the rule: `torch/_weights_only_unpickler.py`; CPython `Lib/pickle.py`, `save_bytes` and the
//! `__reduce_ex__` of the built-in types.

use std::collections::HashMap;
use std::convert::Infallible;
use std::marker::PhantomData;

use super::arena::{Node, NodeId, Pickle};
use super::decode_error::DecodeError;
use super::items::{Entries, Items};
use super::known;
use super::long;
use super::path::{self, Step};
use super::verdict::{self, ClassDecision};
use super::view::Ref;
use crate::value::{Construct, Dict, DictEntry, DictKind, Object, Symbol};

/// A function that recognises a tensor and returns its representation. It returns `Ok(None)` if the node is not a
/// tensor.
pub type Tensors<'t, T> = dyn FnMut(Ref<'_>) -> Result<Option<T>, DecodeError> + 't;

/// A function that returns the representation of an object whose class or function is not on a list of allowed names.
/// The argument is that name.
pub type Unknowns<'t, T> = dyn FnMut(String) -> T + 't;

/// The handling of an object whose class or function is not on a list of allowed names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unknown {
    /// Decoding fails.
    #[default]
    Refuse,
    /// The object is left out and reported. If it is a key or value of a dict, the entry is removed; if it is an
    /// element of a set, the element is removed. In a list or a tuple, or as the complete value, it is replaced by
    /// `None`. An object that has a left-out object as an argument is left out, too.
    Drop,
}

/// A decoded value, and a report of the objects that were left out.
#[derive(Clone, Debug)]
pub struct Decoded<T, X = Infallible> {
    /// The decoded value.
    pub value: Value<T, X>,
    /// The objects that were left out, because the name of their class or function is not on a list of allowed names.
    pub dropped: Vec<Dropped>,
}

/// An object that was left out of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dropped {
    /// The path of the object, relative to the decoded node.
    pub path: String,
    /// The name of the object's class or function, which is not on a list.
    pub symbol: String,
}

/// Decodes a node. An object whose class or function is not on a list of allowed names is an error.
pub fn decode<T, X>(r: Ref<'_>, tensors: &mut Tensors<'_, T>) -> Result<Value<T, X>, DecodeError> {
    Ok(decode_with(r, Unknown::Refuse, tensors)?.value)
}

/// Decodes a node. `unknown` selects the handling of objects whose class or function is not on a list of allowed names.
pub fn decode_with<T, X>(
    r: Ref<'_>,
    unknown: Unknown,
    tensors: &mut Tensors<'_, T>,
) -> Result<Decoded<T, X>, DecodeError> {
    let policy = match unknown {
        Unknown::Refuse => Policy::Refuse,
        Unknown::Drop => Policy::Drop,
    };
    decode_by(r, policy, tensors)
}

/// Decodes a node. An object whose class or function is not on a list of allowed names is replaced by the result of
/// `unknowns`, like a tensor. The smallest dict value, list item or tuple item that contains the name is replaced. So a
/// dict that has the name in a key is replaced as a whole, and so is a set that contains the name.
pub fn decode_replacing<T, X>(
    r: Ref<'_>,
    tensors: &mut Tensors<'_, T>,
    unknowns: &mut Unknowns<'_, T>,
) -> Result<Value<T, X>, DecodeError> {
    Ok(decode_by(r, Policy::Replace(unknowns), tensors)?.value)
}

fn decode_by<T, X>(
    r: Ref<'_>,
    policy: Policy<'_, T>,
    tensors: &mut Tensors<'_, T>,
) -> Result<Decoded<T, X>, DecodeError> {
    let pickle = r.pickle();
    let limits = pickle.limits;
    let mut decoder = Decoder {
        pickle,
        tensors,
        made: PhantomData,
        policy,
        max_depth: limits.max_depth,
        depth: 0,
        visits_left: limits.max_visits,
        open: Vec::new(),
        steps: Vec::new(),
        located: false,
        dropped: Vec::new(),
    };
    let value = decoder.element(None, r)?.unwrap_or(Value::None);
    Ok(Decoded { value, dropped: decoder.dropped })
}

/// The handling of objects whose class or function is not on a list of allowed names.
enum Policy<'u, T> {
    Refuse,
    Drop,
    Replace(&'u mut Unknowns<'u, T>),
}

struct Decoder<'a, 't, 'f, 'u, T, X> {
    pickle: &'a Pickle<'a>,
    tensors: &'t mut Tensors<'f, T>,
    made: PhantomData<X>,
    policy: Policy<'u, T>,
    max_depth: usize,
    depth: usize,
    visits_left: u64,
    /// The shared nodes that are being decoded now, from the outermost to the innermost. If a shared node occurs inside
    /// itself, the graph has a cycle.
    open: Vec<NodeId>,
    steps: Vec<Step<'a>>,
    /// True if an error is being returned and already has its path.
    located: bool,
    dropped: Vec<Dropped>,
}

type Decode<L> = Result<L, DecodeError>;

type Value<T, X> = crate::value::Value<T, X>;

impl<'a, T, X> Decoder<'a, '_, '_, '_, T, X> {
    /// Decodes a child that may be left out or replaced if a name in it is not on a list of allowed names. Returns
    /// `None` if it was left out.
    fn element(&mut self, step: Option<Step<'a>>, r: Ref<'a>) -> Decode<Option<Value<T, X>>> {
        match (self.child(step, r), &mut self.policy) {
            (Err(DecodeError::Forbidden { symbol, path }), Policy::Drop) => {
                self.located = false;
                self.charge(path.len() + symbol.len())?;
                self.dropped.push(Dropped { path, symbol });
                Ok(None)
            }
            (Err(DecodeError::Forbidden { symbol, .. }), Policy::Replace(unknowns)) => {
                self.located = false;
                let copied = symbol.len();
                let replaced = unknowns(symbol);
                self.charge(copied)?;
                Ok(Some(Value::Tensor(replaced)))
            }
            (result, _) => result.map(Some),
        }
    }

    /// Decodes a dict key or a set element. Such a child may be left out, but not replaced: the dict or set is then
    /// replaced as a whole.
    fn hashed(&mut self, step: Step<'a>, r: Ref<'a>) -> Decode<Option<Value<T, X>>> {
        match self.policy {
            Policy::Replace(_) => self.child(Some(step), r).map(Some),
            Policy::Refuse | Policy::Drop => self.element(Some(step), r),
        }
    }

    /// Decodes a child that may be neither left out nor replaced. If decoding the child fails, the innermost call of
    /// this function adds the path of the child to the error.
    fn child(&mut self, step: Option<Step<'a>>, r: Ref<'a>) -> Decode<Value<T, X>> {
        self.steps.extend(step);
        let mut value = self.descend(r);
        if let Err(error) = value {
            let inner = std::mem::replace(&mut self.located, true);
            value = Err(if inner { error } else { error.under(&path::render(&self.steps)) });
        }
        if step.is_some() {
            self.steps.pop();
        }
        value
    }

    fn descend(&mut self, r: Ref<'a>) -> Decode<Value<T, X>> {
        if self.depth == self.max_depth {
            return Err(DecodeError::limit(format!("values nested deeper than {}", self.max_depth)));
        }
        if r.is_shared() {
            if self.open.contains(&r.id()) {
                return Err(DecodeError::malformed("an object that contains itself"));
            }
            self.open.push(r.id());
        }
        self.depth += 1;
        let value = self.value(r);
        self.depth -= 1;
        if r.is_shared() {
            self.open.pop();
        }
        value
    }

    fn value(&mut self, r: Ref<'a>) -> Decode<Value<T, X>> {
        self.charge(0)?;
        match r.node() {
            Node::Tuple(seq) => self.sequence(r.items_of(seq)).map(Value::Tuple),
            Node::List(seq) => self.sequence(r.items_of(seq)).map(Value::List),
            Node::Set(seq) => self.set(r.items_of(seq)).map(Value::Set),
            Node::FrozenSet(seq) => self.set(r.items_of(seq)).map(Value::FrozenSet),
            Node::Dict(_) => self.entries(r.as_dict()).map(plain),
            Node::Call(_) | Node::New(_) | Node::PersistentId(_) => self.call(r),
            _ => self.leaf(r),
        }
    }

    /// Decodes a node without children. This function is separate from [`value`](Self::value), because `value` is
    /// recursive: the many temporaries of this function would be on the stack once per level of nesting.
    fn leaf(&mut self, r: Ref<'a>) -> Decode<Value<T, X>> {
        let bytes = self.pickle.bytes;
        Ok(match r.node() {
            Node::None => Value::None,
            Node::Bool(value) => Value::Bool(value),
            Node::Int(value) => Value::Int(value),
            Node::Float(value) => Value::Float(value),
            Node::BigInt(span) => Value::BigInt(self.copy(long::minimal(span.of(bytes)))?.into()),
            Node::Str(_) => self.text(r.as_str().unwrap_or_default())?,
            Node::Surrogates(span) => Value::SurrogateStr(self.copy(span.of(bytes))?.into()),
            Node::Bytes(span) => Value::Bytes(self.copy(span.of(bytes))?),
            Node::ByteArray(span) => Value::ByteArray(self.copy(span.of(bytes))?),
            Node::Dims(_) => self.size(r.as_dims().unwrap_or_default())?,
            Node::Ints(slot) => {
                let ints = self.pickle.ints(slot);
                self.charge(size_of_val(ints))?;
                Value::Ints(ints.into())
            }
            Node::Global(_) => Value::Symbol(verdict::of_bare(r)?),
            Node::Row(_) => return Err(DecodeError::malformed("an object that a visitor replaced by a row")),
            _ => return Err(DecodeError::malformed(r.describe())),
        })
    }

    fn call(&mut self, r: Ref<'a>) -> Decode<Value<T, X>> {
        if let Some(id) = (self.tensors)(r)? {
            return Ok(Value::Tensor(id));
        }
        match verdict::of_made(r)? {
            ClassDecision::Bare(symbol) => Ok(Value::Symbol(symbol)),
            ClassDecision::OrderedDict => self.ordered_dict(r),
            ClassDecision::Known(symbol) => self.known(r, symbol),
            ClassDecision::Inert(symbol) => self.object(r, symbol),
        }
    }

    fn object(&mut self, r: Ref<'a>, class: Symbol) -> Decode<Value<T, X>> {
        let how = if r.is_new() { Construct::New } else { Construct::Call };
        let mut object = Box::new(Object::new(how, class));
        object.args = self.arguments(r)?;
        object.kwargs = self.entries(r.kwargs())?;
        object.items = self.sequence(r.items())?;
        object.entries = self.entries(Some(r.entries()))?;
        if let Some(state) = r.state() {
            // In the path of an error, entries of a state that is a dict look like attributes of the object.
            let step = if state.as_dict().is_some() { None } else { Some(Step::Part("state")) };
            object.state = Some(self.child(step, state)?);
        }
        Ok(Value::Object(object))
    }

    fn ordered_dict(&mut self, r: Ref<'a>) -> Decode<Value<T, X>> {
        if r.args().is_none_or(|args| !args.is_empty()) || !r.items().is_empty() {
            return Err(DecodeError::malformed("an OrderedDict made in an unknown way"));
        }
        let mut dict = Dict { kind: DictKind::Ordered, ..Dict::default() };
        dict.entries = self.entries(Some(r.entries()))?;
        if let Some(state) = r.state() {
            dict.attributes = Some(Box::new(self.child(None, state)?));
        }
        Ok(Value::Dict(dict))
    }

    fn known(&mut self, r: Ref<'a>, symbol: Symbol) -> Decode<Value<T, X>> {
        let mut args = self.arguments(r)?;
        let untouched = r.state().is_none() && r.items().is_empty() && r.entries().len() == 0;
        let value = if untouched { known::value(&symbol.name, &mut args) } else { None };
        value.ok_or_else(|| DecodeError::malformed(format!("{symbol} made in an unknown way")))
    }

    // The loops below use no iterator adapters, because adapters would add stack frames to each level of the recursion.

    fn arguments(&mut self, r: Ref<'a>) -> Decode<Vec<Value<T, X>>> {
        let args = r.args().into_iter().flatten();
        let mut decoded = Vec::with_capacity(args.size_hint().0);
        for (i, arg) in args.enumerate() {
            decoded.push(self.child(Some(Step::Argument(i)), arg)?);
        }
        Ok(decoded)
    }

    fn sequence(&mut self, items: Items<'a>) -> Decode<Vec<Value<T, X>>> {
        let mut decoded = Vec::with_capacity(items.len());
        for (i, item) in items.enumerate() {
            let item = self.element(Some(Step::Index(i)), item)?;
            decoded.push(item.unwrap_or(Value::None));
        }
        Ok(decoded)
    }

    fn set(&mut self, items: Items<'a>) -> Decode<Vec<Value<T, X>>> {
        let mut decoded = Vec::with_capacity(items.len());
        for (i, item) in items.enumerate() {
            decoded.extend(self.hashed(Step::Index(i), item)?);
        }
        Ok(decoded)
    }

    /// Decodes the entries of a dict. If a text, int or bool occurs again as a key, the later value replaces the
    /// earlier value, at the earlier position, as in Python. CPython never writes a key twice, but a hostile pickle
    /// may.
    fn entries(&mut self, entries: Option<Entries<'a>>) -> Decode<Vec<DictEntry<T, X>>> {
        let Some(entries) = entries else {
            return Ok(Vec::new());
        };
        let mut decoded = Vec::with_capacity(entries.len());
        let mut places = HashMap::new();
        for (key, value) in entries {
            let Some(k) = self.hashed(Step::Part("keys()"), key)? else {
                continue;
            };
            let Some(v) = self.element(Some(Step::Key(key)), value)? else {
                continue;
            };
            let place = match Key::of(key) {
                Some(key) => *places.entry(key).or_insert(decoded.len()),
                None => decoded.len(),
            };
            match decoded.get_mut(place) {
                Some((_, old)) => *old = v,
                None => decoded.push((k, v)),
            }
        }
        Ok(decoded)
    }

    fn size(&mut self, dims: &[u64]) -> Decode<Value<T, X>> {
        self.charge(8 * dims.len())?;
        let dims = dims.iter().map(|&dim| Value::from(dim)).collect();
        let mut size = Object::new(Construct::Call, Symbol::new("torch", "Size"));
        size.args.push(Value::Tuple(dims));
        Ok(Value::Object(Box::new(size)))
    }

    fn text(&mut self, text: &str) -> Decode<Value<T, X>> {
        self.charge(text.len())?;
        Ok(Value::Str(text.into()))
    }

    fn copy(&mut self, bytes: &[u8]) -> Decode<Vec<u8>> {
        self.charge(bytes.len())?;
        Ok(bytes.to_vec())
    }

    /// Adds one visit, and the cost of copying `bytes` bytes, to the work of this decode. It is an error if the work
    /// exceeds [`Limits::max_visits`](super::Limits).
    fn charge(&mut self, bytes: usize) -> Decode<()> {
        let left = self.visits_left.checked_sub(1 + bytes as u64 / 8);
        self.visits_left = left.ok_or_else(|| {
            DecodeError::limit("so many references to the same objects that the value would exceed the limits")
        })?;
        Ok(())
    }
}

/// A dict key of a type that can be compared cheaply. A bool is an int here, because in Python `True == 1`.
#[derive(PartialEq, Eq, Hash)]
enum Key<'a> {
    Str(&'a str),
    Int(i64),
}

impl<'a> Key<'a> {
    fn of(r: Ref<'a>) -> Option<Self> {
        let int = r.as_i64().or_else(|| r.as_bool().map(i64::from));
        r.as_str().map(Key::Str).or(int.map(Key::Int))
    }
}

fn plain<T, X>(entries: Vec<DictEntry<T, X>>) -> Value<T, X> {
    Value::Dict(Dict { entries, ..Dict::default() })
}
