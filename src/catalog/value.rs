//! A Python value as data: what a checkpoint holds beside its tensors.
//!
//! Format-independent: pickle readers make it, writers of any format take it. A tensor in it is a
//! reference to an entry of the catalog. A value is a tree: objects that Python shared are repeated.
//!
//! Invariant: a value read from a pickle is at most 256 deep (the reader's limit), so that comparing,
//! printing and dropping it may recurse. Whoever builds one by hand keeps to that.

mod repr;

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use super::path::{Key, Path, key_text};
use crate::layout::Rank;

/// A tensor of the catalog, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(pub u32);

#[derive(Clone, Debug)]
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// Beyond `i64`: little-endian two's complement, minimal.
    BigInt(Box<[u8]>),
    Float(f64),
    /// Names are keys of state dicts, of tensors and of what is written: whoever has one shares it.
    Str(Arc<str>),
    /// Text with lone surrogates, in Python's `surrogatepass` encoding, which is not UTF-8.
    SurrogateStr(Box<[u8]>),
    Bytes(Vec<u8>),
    ByteArray(Vec<u8>),
    Complex(f64, f64),
    List(Vec<Value>),
    /// A list of a million ints and more, such as a sampler's order, which as single values would take many times the
    /// memory. Shorter ones are a `List`.
    Ints(Arc<[i64]>),
    Tuple(Vec<Value>),
    /// In the order of the file.
    Set(Vec<Value>),
    FrozenSet(Vec<Value>),
    Dict(Dict),
    Symbol(Symbol),
    Object(Box<Object>),
    Tensor(TensorId),
    /// What ranks store different values of. Only in the state of files of several ranks; no pickle holds it.
    PerRank(Vec<Holding>),
}

/// One of several values, and the ranks that store it, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    pub value: Value,
    pub ranks: Vec<Rank>,
}

impl Holding {
    /// The value a rank gets of those that ranks store differently: its own where a rank of its number stored one; else
    /// the stored values are dealt out in turn, rank `r` getting that of the `r mod n`-th of the `n` ranks that stored one.
    #[must_use]
    pub fn value_for(holdings: &[Self], rank: Rank) -> Option<&Value> {
        if let Some(own) = holdings.iter().find(|holding| holding.ranks.contains(&rank)) {
            return Some(&own.value);
        }
        let mut stored: Vec<(Rank, &Value)> =
            holdings.iter().flat_map(|holding| holding.ranks.iter().map(|rank| (*rank, &holding.value))).collect();
        stored.sort_unstable_by_key(|(rank, _)| *rank);
        let turn = (rank.0 as usize).checked_rem(stored.len())?;
        Some(stored[turn].1)
    }
}

/// A dict in insertion order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Dict {
    pub kind: DictKind,
    pub entries: Vec<(Value, Value)>,
    /// Attributes of an `OrderedDict` itself: torch keeps a state dict's `_metadata` there.
    pub attributes: Option<Box<Value>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DictKind {
    #[default]
    Plain,
    /// `collections.OrderedDict`
    Ordered,
}

/// A Python name that is a value itself: a type, a dtype.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Symbol {
    pub module: Box<str>,
    pub name: Box<str>,
}

/// An object that is carried by the recipe for making it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    pub how: Construct,
    /// A [`Symbol`], or what makes the class.
    pub class: Value,
    pub args: Vec<Value>,
    pub kwargs: Vec<(Value, Value)>,
    /// What is appended once it is made.
    pub items: Vec<Value>,
    /// What is set by key once it is made.
    pub entries: Vec<(Value, Value)>,
    /// What `__setstate__` gets, or the attributes.
    pub state: Option<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Construct {
    /// `class(*args)`
    Call,
    /// `class.__new__(class, *args)`
    New,
}

impl Value {
    /// The Python type: `int`, `dict`, `OrderedDict`, `torch.Size`, `argparse.Namespace`. An object made by
    /// a function is called by that function.
    pub fn type_name(&self) -> Cow<'_, str> {
        Cow::Borrowed(match self {
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) | Self::BigInt(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) | Self::SurrogateStr(_) => "str",
            Self::Bytes(_) => "bytes",
            Self::ByteArray(_) => "bytearray",
            Self::Complex(..) => "complex",
            Self::List(_) | Self::Ints(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Set(_) => "set",
            Self::FrozenSet(_) => "frozenset",
            Self::Dict(Dict { kind: DictKind::Plain, .. }) => "dict",
            Self::Dict(Dict { kind: DictKind::Ordered, .. }) => "OrderedDict",
            Self::Symbol(symbol) if &*symbol.module == "torch" => "torch.dtype",
            Self::Symbol(_) => "type",
            Self::Object(object) => return Cow::Owned(object.class.to_string()),
            Self::Tensor(_) => "torch.Tensor",
            Self::PerRank(_) => "per rank",
        })
    }

    /// Give every tensor another number.
    pub fn map_tensors(&mut self, renumber: &mut dyn FnMut(TensorId) -> TensorId) {
        let mut values: Vec<&mut Self> = Vec::new();
        match self {
            Self::Tensor(id) => *id = renumber(*id),
            Self::List(items) | Self::Tuple(items) | Self::Set(items) | Self::FrozenSet(items) => {
                values.extend(items);
            }
            Self::Dict(dict) => {
                values.extend(dict.entries.iter_mut().flat_map(|(key, value)| [key, value]));
                values.extend(dict.attributes.as_deref_mut());
            }
            Self::Object(object) => {
                values.push(&mut object.class);
                values.extend(object.args.iter_mut().chain(&mut object.items));
                let pairs = object.kwargs.iter_mut().chain(&mut object.entries);
                values.extend(pairs.flat_map(|(key, value)| [key, value]));
                values.extend(&mut object.state);
            }
            Self::PerRank(holdings) => values.extend(holdings.iter_mut().map(|holding| &mut holding.value)),
            _ => {}
        }
        for value in values {
            value.map_tensors(renumber);
        }
    }

    /// Add to the number of every tensor: the tensors of a file become part of a longer list.
    pub fn shift_tensors(&mut self, by: u32) {
        self.map_tensors(&mut |id| TensorId(id.0 + by));
    }

    /// The tensors of a value, in the order of [`Value::map_tensors`].
    pub fn tensor_ids(&self) -> Vec<TensorId> {
        let mut ids = Vec::new();
        self.clone().map_tensors(&mut |id| {
            ids.push(id);
            id
        });
        ids
    }

    /// Whether two values are equal but for which tensors stand in them.
    pub fn same_but_tensors(&self, other: &Self) -> bool {
        let unnumbered = |value: &Self| {
            let mut value = value.clone();
            value.map_tensors(&mut |_| TensorId(0));
            value
        };
        self == other || self.contains_tensor() && unnumbered(self) == unnumbered(other)
    }

    pub fn contains_tensor(&self) -> bool {
        let any = |values: &[Self]| values.iter().any(Self::contains_tensor);
        let either = |entries: &[(Self, Self)]| {
            entries.iter().any(|(key, value)| key.contains_tensor() || value.contains_tensor())
        };
        match self {
            Self::Tensor(_) => true,
            Self::List(items) | Self::Tuple(items) | Self::Set(items) | Self::FrozenSet(items) => any(items),
            Self::Dict(dict) => either(&dict.entries) || dict.attributes.as_ref().is_some_and(|v| v.contains_tensor()),
            Self::Object(object) => {
                any(&object.args)
                    || any(&object.items)
                    || either(&object.kwargs)
                    || either(&object.entries)
                    || object.class.contains_tensor()
                    || object.state.as_ref().is_some_and(Self::contains_tensor)
            }
            Self::PerRank(holdings) => holdings.iter().any(|holding| holding.value.contains_tensor()),
            _ => false,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Self::Int(value) => Some(*value),
            _ => None,
        }
    }

    pub fn as_dict(&self) -> Option<&Dict> {
        match self {
            Self::Dict(dict) => Some(dict),
            _ => None,
        }
    }

    /// The value at a path.
    #[must_use]
    pub fn at(&self, path: &Path) -> Option<&Self> {
        path.0.iter().try_fold(self, |value, key| match (value, key) {
            (Self::Dict(dict), Key::Name(name)) => {
                dict.entries.iter().find(|(own, _)| key_text(own) == *name).map(|(_, value)| value)
            }
            (Self::List(items), Key::Index(index)) => items.get(usize::try_from(*index).ok()?),
            _ => None,
        })
    }

    /// The value at a path, to be changed.
    pub fn at_mut(&mut self, path: &Path) -> Option<&mut Self> {
        path.0.iter().try_fold(self, |value, key| match (value, key) {
            (Self::Dict(dict), Key::Name(name)) => {
                dict.entries.iter_mut().find(|(own, _)| key_text(own) == *name).map(|(_, value)| value)
            }
            (Self::List(items), Key::Index(index)) => items.get_mut(usize::try_from(*index).ok()?),
            _ => None,
        })
    }
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        match i64::try_from(value) {
            Ok(value) => Self::Int(value),
            // The upper half takes a ninth byte for the sign.
            Err(_) => Self::BigInt(u128::from(value).to_le_bytes()[..9].into()),
        }
    }
}

impl Dict {
    /// The value of a text key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.iter().find(|(k, _)| k.as_str() == Some(key)).map(|(_, value)| value)
    }
}

impl Object {
    /// An object of `class`, made from nothing so far.
    pub fn new(how: Construct, class: Symbol) -> Self {
        Self {
            how,
            class: Value::Symbol(class),
            args: Vec::new(),
            kwargs: Vec::new(),
            items: Vec::new(),
            entries: Vec::new(),
            state: None,
        }
    }
}

impl Symbol {
    pub fn new(module: &str, name: &str) -> Self {
        Self { module: module.into(), name: name.into() }
    }
}

impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.module, self.name)
    }
}

/// Sameness of data, not Python's `==`: floats by their bits (a NaN is itself, 0.0 is not -0.0), types by
/// kind (1 is not 1.0), containers in order.
impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        let same = |a: &f64, b: &f64| a.to_bits() == b.to_bits();
        match (self, other) {
            (Self::None, Self::None) => true,
            (Self::Bool(a), Self::Bool(b)) => a == b,
            (Self::Int(a), Self::Int(b)) => a == b,
            (Self::BigInt(a), Self::BigInt(b)) | (Self::SurrogateStr(a), Self::SurrogateStr(b)) => a == b,
            (Self::Float(a), Self::Float(b)) => same(a, b),
            (Self::Complex(a, b), Self::Complex(c, d)) => same(a, c) && same(b, d),
            (Self::Str(a), Self::Str(b)) => a == b,
            (Self::Bytes(a), Self::Bytes(b)) | (Self::ByteArray(a), Self::ByteArray(b)) => a == b,
            (Self::List(a), Self::List(b)) | (Self::Tuple(a), Self::Tuple(b)) => a == b,
            (Self::Ints(a), Self::Ints(b)) => a == b,
            (Self::List(items), Self::Ints(ints)) | (Self::Ints(ints), Self::List(items)) => {
                items.len() == ints.len()
                    && items.iter().zip(ints.iter()).all(|(item, int)| item.as_i64() == Some(*int))
            }
            // Python writes a set in the order of its hashes, which may differ from process to process.
            (Self::Set(a), Self::Set(b)) | (Self::FrozenSet(a), Self::FrozenSet(b)) => {
                a == b || a.len() == b.len() && sorted(a) == sorted(b)
            }
            (Self::Dict(a), Self::Dict(b)) => a == b,
            (Self::Symbol(a), Self::Symbol(b)) => a == b,
            (Self::Object(a), Self::Object(b)) => a == b,
            (Self::Tensor(a), Self::Tensor(b)) => a == b,
            (Self::PerRank(a), Self::PerRank(b)) => a == b,
            _ => false,
        }
    }
}

impl Eq for Value {}

/// The items of a set in an order that does not depend on how they were written.
fn sorted(items: &[Value]) -> Vec<String> {
    let mut texts: Vec<String> = items.iter().map(|item| format!("{item:?}")).collect();
    texts.sort_unstable();
    texts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(value: &Value) -> String {
        value.to_string()
    }

    #[test]
    fn floats_are_compared_by_their_bits() {
        assert_eq!(Value::Float(f64::NAN), Value::Float(f64::NAN));
        assert_ne!(Value::Float(0.0), Value::Float(-0.0));
        assert_ne!(Value::Int(1), Value::Float(1.0));
    }

    #[test]
    fn sets_have_no_order() {
        let set = |items: [i64; 2]| Value::Set(items.map(Value::Int).into());
        assert_eq!(set([1, 2]), set([2, 1]));
        assert_ne!(set([1, 2]), set([1, 3]));
        assert_ne!(set([1, 2]), Value::FrozenSet(vec![Value::Int(1), Value::Int(2)]));
    }

    #[test]
    fn prints_like_python() {
        let dict = Dict {
            entries: vec![(Value::Str("it's".into()), Value::Tuple(vec![Value::Float(1.0)]))],
            ..Dict::default()
        };
        assert_eq!(shown(&Value::Dict(dict)), r#"{"it's": (1.0,)}"#);
        assert_eq!(shown(&Value::from(u64::MAX)), "18446744073709551615");
        let min = [0, 0, 0, 0, 0, 0, 0, 0, 0x80];
        assert_eq!(shown(&Value::BigInt(min.into())), "-2361183241434822606848");
        assert_eq!(shown(&Value::Symbol(Symbol::new("torch", "float32"))), "torch.float32");
    }

    #[test]
    fn objects_are_named_and_shown_by_their_class() {
        let state = Dict { entries: vec![(Value::Str("lr".into()), Value::Float(0.5))], ..Dict::default() };
        let class = Symbol::new("argparse", "Namespace");
        let mut namespace = Object::new(Construct::New, class);
        namespace.state = Some(Value::Dict(state));
        let namespace = Value::Object(Box::new(namespace));
        assert_eq!(shown(&namespace), "argparse.Namespace(lr=0.5)");
        assert_eq!(namespace.type_name(), "argparse.Namespace");
        assert!(!namespace.contains_tensor());
        assert!(Value::List(vec![Value::Tensor(TensorId(0))]).contains_tensor());
    }

    #[test]
    fn printing_is_bounded() {
        let mut deep = Value::None;
        for _ in 0..250 {
            deep = Value::List(vec![deep]);
        }
        assert_eq!(shown(&deep).chars().count(), 121);
        assert_eq!(format!("{:.3}", Value::Str("abcdef".into())), "'ab…");
    }
}
