//! A Python value as data: the tree that a pickle contains.
//!
//! Invariant: a value read from a pickle is no deeper than [`Limits::max_depth`](crate::pickle::Limits), 256 by
//! default, so comparing, printing and dropping it may recurse. Code that builds a value by hand must respect this
//! limit.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;

/// A Python value as a tree. If several Python containers shared an object, the object occurs several times in the
/// tree.
///
/// `T` represents a tensor: a function of the caller recognises tensors, and returns a `T` for each tensor. `X` is a type
/// of the caller for its own kind of values, which no pickle contains.
#[derive(Clone, Debug)]
pub enum Value<T, X = Infallible> {
    /// The value `None`.
    None,
    /// The value `True` or `False`.
    Bool(bool),
    /// An int that fits 64 bits.
    Int(i64),
    /// An int beyond 64 bits, as little-endian two's complement without redundant sign bytes.
    BigInt(Box<[u8]>),
    /// A float.
    Float(f64),
    /// A text. Equal texts may share memory, because the names of tensors occur many times.
    Str(Arc<str>),
    /// A text with lone surrogates, in Python's `surrogatepass` encoding, which is not UTF-8.
    SurrogateStr(Box<[u8]>),
    /// A `bytes` object.
    Bytes(Vec<u8>),
    /// A `bytearray` object.
    ByteArray(Vec<u8>),
    /// A complex number: its real part and its imaginary part.
    Complex(f64, f64),
    /// A list.
    List(Vec<Self>),
    /// A list of at least 2^20 ints, such as the order of a sampler. As single values, the ints would take many times
    /// the memory. A shorter list of ints is a `List`.
    Ints(Arc<[i64]>),
    /// A tuple.
    Tuple(Vec<Self>),
    /// A set, in the order of the file.
    Set(Vec<Self>),
    /// A frozenset, in the order of the file.
    FrozenSet(Vec<Self>),
    /// A dict or an `OrderedDict`.
    Dict(Dict<T, X>),
    /// A class, function or dtype as a value, by its Python name, without a call.
    Symbol(Symbol),
    /// An object, represented by the call that creates it.
    Object(Box<Object<T, X>>),
    /// A tensor.
    Tensor(T),
    /// A value of the caller's own type `X`.
    Other(X),
}

/// A key of a dict and its value.
pub type DictEntry<T, X = Infallible> = (Value<T, X>, Value<T, X>);

/// The operations that a caller implements for its own kind of values.
pub trait Extension<T>: Sized {
    /// Returns the values inside this value.
    fn values(&self) -> Vec<&Value<T, Self>>;

    /// Returns the values inside this value for modification.
    fn values_mut(&mut self) -> Vec<&mut Value<T, Self>>;

    /// Returns the name of this kind of value, for [`Value::type_name`].
    fn type_name(&self) -> &'static str;

    /// Prints the value in one line. An implementation should print nested values with `{:.65535}`, so that the length
    /// limit applies only to the complete line.
    fn show(&self, out: &mut dyn fmt::Write) -> fmt::Result;
}

impl<T> Extension<T> for Infallible {
    fn values(&self) -> Vec<&Value<T, Self>> {
        match *self {}
    }

    fn values_mut(&mut self) -> Vec<&mut Value<T, Self>> {
        match *self {}
    }

    fn type_name(&self) -> &'static str {
        match *self {}
    }

    fn show(&self, _out: &mut dyn fmt::Write) -> fmt::Result {
        match *self {}
    }
}

/// A dict in insertion order.
#[derive(Clone, Debug)]
pub struct Dict<T, X = Infallible> {
    /// The class of the dict.
    pub kind: DictKind,
    /// The keys and values.
    pub entries: Vec<DictEntry<T, X>>,
    /// The attributes of an `OrderedDict`: torch stores the `_metadata` of a state dict in them.
    pub attributes: Option<Box<Value<T, X>>>,
}

/// The class of a dict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DictKind {
    /// The class `dict`.
    #[default]
    Plain,
    /// The class `collections.OrderedDict`.
    Ordered,
}

/// A Python name: a class, a function or a dtype.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Symbol {
    /// The dotted name of the module.
    pub module: Box<str>,
    /// The name within the module, with dots for a class inside a class.
    pub name: Box<str>,
}

/// An object, represented by the call that creates it.
#[derive(Clone, Debug)]
pub struct Object<T, X = Infallible> {
    /// The way in which Python makes the object: by a call or by `__new__`.
    pub how: Construct,
    /// The class of the object, or the function that makes it: a [`Symbol`], or an object (a `getattr` call) that
    /// evaluates to the class.
    pub class: Value<T, X>,
    /// The positional arguments.
    pub args: Vec<Value<T, X>>,
    /// The keyword arguments.
    pub kwargs: Vec<DictEntry<T, X>>,
    /// The items that are appended to the new object.
    pub items: Vec<Value<T, X>>,
    /// The entries that are set on the new object.
    pub entries: Vec<DictEntry<T, X>>,
    /// The argument of `__setstate__`, or the attributes of the object.
    pub state: Option<Value<T, X>>,
}

/// The Python expression that makes an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Construct {
    /// The call `class(*args)`.
    Call,
    /// The call `class.__new__(class, *args)`.
    New,
}

impl<T, X: Extension<T>> Value<T, X> {
    /// Returns the Python type: `int`, `dict`, `OrderedDict`, `torch.Size`, `argparse.Namespace`. For an object made by
    /// a function, returns the name of the function.
    pub fn type_name(&self) -> Cow<'_, str>
    where
        T: fmt::Display,
    {
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
            Self::Other(other) => other.type_name(),
        })
    }

    /// Replaces every tensor in the value by the result of `renumber`.
    pub fn map_tensors(&mut self, renumber: &mut dyn FnMut(T) -> T)
    where
        T: Copy,
    {
        self.replace_tensors(&mut |tensor| Self::Tensor(renumber(tensor)));
    }

    /// Replaces every tensor in the value by the value that `replacement` returns.
    pub fn replace_tensors(&mut self, replacement: &mut dyn FnMut(T) -> Self)
    where
        T: Copy,
    {
        let mut values: Vec<&mut Self> = Vec::new();
        match self {
            Self::Tensor(id) => *self = replacement(*id),
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
            Self::Other(other) => values.extend(other.values_mut()),
            _ => {}
        }
        for value in values {
            value.replace_tensors(replacement);
        }
    }

    /// Returns the tensors in a value, in the order in which [`Value::map_tensors`] visits tensors.
    pub fn tensor_ids(&self) -> Vec<T>
    where
        T: Copy,
        X: Clone,
    {
        let mut ids = Vec::new();
        self.clone().map_tensors(&mut |id| {
            ids.push(id);
            id
        });
        ids
    }

    /// Returns whether two values are equal if every tensor counts as equal to every other tensor.
    pub fn same_but_tensors(&self, other: &Self) -> bool
    where
        T: Copy + Default + PartialEq + fmt::Debug,
        X: Clone + PartialEq + fmt::Debug,
    {
        let unnumbered = |value: &Self| {
            let mut value = value.clone();
            value.map_tensors(&mut |_| T::default());
            value
        };
        self == other || self.contains_tensor() && unnumbered(self) == unnumbered(other)
    }

    /// Returns whether the value contains a tensor.
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
            Self::Other(other) => other.values().into_iter().any(Self::contains_tensor),
            _ => false,
        }
    }
}

impl<T, X> Value<T, X> {
    /// Returns the text, if the value is a text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the int, if the value is an int that fits 64 bits.
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Self::Int(value) => Some(*value),
            _ => None,
        }
    }

    /// Returns the dict, if the value is a dict.
    pub fn as_dict(&self) -> Option<&Dict<T, X>> {
        match self {
            Self::Dict(dict) => Some(dict),
            _ => None,
        }
    }
}

impl<T, X> From<u64> for Value<T, X> {
    fn from(value: u64) -> Self {
        match i64::try_from(value) {
            Ok(value) => Self::Int(value),
            // An int in the upper half of `u64` needs a ninth byte for the sign.
            Err(_) => Self::BigInt(u128::from(value).to_le_bytes()[..9].into()),
        }
    }
}

impl<T, X> Default for Dict<T, X> {
    fn default() -> Self {
        Self { kind: DictKind::Plain, entries: Vec::new(), attributes: None }
    }
}

impl<T, X> Dict<T, X> {
    /// Returns the value of a key that is a text.
    pub fn get(&self, key: &str) -> Option<&Value<T, X>> {
        self.entries.iter().find(|(k, _)| k.as_str() == Some(key)).map(|(_, value)| value)
    }
}

impl<T, X> Object<T, X> {
    /// Returns an object of `class` that has no arguments yet.
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
    /// Returns the symbol for a name of a module.
    pub fn new(module: &str, name: &str) -> Self {
        Self { module: module.into(), name: name.into() }
    }
}

impl fmt::Display for Symbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.module, self.name)
    }
}

/// Compares values as data, unlike Python's `==`. Floats are compared by their bits: a NaN equals itself, and 0.0
/// differs from -0.0. Values of different types differ: 1 differs from 1.0. Lists, tuples and dicts are equal only if
/// their items are in the same order; sets are compared without order.
impl<T: PartialEq + fmt::Debug, X: PartialEq + fmt::Debug> PartialEq for Value<T, X> {
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
            // Python writes a set in the order of hashes, which may differ between processes, so sets are compared
            // without order.
            (Self::Set(a), Self::Set(b)) | (Self::FrozenSet(a), Self::FrozenSet(b)) => {
                a == b || a.len() == b.len() && sorted(a) == sorted(b)
            }
            (Self::Dict(a), Self::Dict(b)) => a == b,
            (Self::Symbol(a), Self::Symbol(b)) => a == b,
            (Self::Object(a), Self::Object(b)) => a == b,
            (Self::Tensor(a), Self::Tensor(b)) => a == b,
            (Self::Other(a), Self::Other(b)) => a == b,
            _ => false,
        }
    }
}

impl<T: Eq + fmt::Debug, X: Eq + fmt::Debug> Eq for Value<T, X> {}

impl<T: PartialEq + fmt::Debug, X: PartialEq + fmt::Debug> PartialEq for Dict<T, X> {
    fn eq(&self, other: &Self) -> bool {
        let Self { kind, entries, attributes } = self;
        *kind == other.kind && *entries == other.entries && *attributes == other.attributes
    }
}

impl<T: Eq + fmt::Debug, X: Eq + fmt::Debug> Eq for Dict<T, X> {}

impl<T: PartialEq + fmt::Debug, X: PartialEq + fmt::Debug> PartialEq for Object<T, X> {
    fn eq(&self, other: &Self) -> bool {
        let Self { how, class, args, kwargs, items, entries, state } = self;
        *how == other.how
            && *class == other.class
            && *args == other.args
            && *kwargs == other.kwargs
            && *items == other.items
            && *entries == other.entries
            && *state == other.state
    }
}

impl<T: Eq + fmt::Debug, X: Eq + fmt::Debug> Eq for Object<T, X> {}

/// Returns the items of a set as texts, in an order that does not depend on the order in which they were written.
fn sorted<V: fmt::Debug>(items: &[V]) -> Vec<String> {
    let mut texts: Vec<String> = items.iter().map(|item| format!("{item:?}")).collect();
    texts.sort_unstable();
    texts
}

#[cfg(test)]
mod tests {
    type Value = super::Value<u32>;

    use super::{Construct, Dict, Object, Symbol};

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
    fn sets_in_different_order_are_equal() {
        let set = |items: [i64; 2]| Value::Set(items.map(Value::Int).into());
        assert_eq!(set([1, 2]), set([2, 1]));
        assert_ne!(set([1, 2]), set([1, 3]));
        assert_ne!(set([1, 2]), Value::FrozenSet(vec![Value::Int(1), Value::Int(2)]));
    }

    #[test]
    fn values_print_like_python() {
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
    fn objects_print_with_their_class() {
        let state = Dict { entries: vec![(Value::Str("lr".into()), Value::Float(0.5))], ..Dict::default() };
        let class = Symbol::new("argparse", "Namespace");
        let mut namespace = Object::new(Construct::New, class);
        namespace.state = Some(Value::Dict(state));
        let namespace = Value::Object(Box::new(namespace));
        assert_eq!(shown(&namespace), "argparse.Namespace(lr=0.5)");
        assert_eq!(namespace.type_name(), "argparse.Namespace");
        assert!(!namespace.contains_tensor());
        assert!(Value::List(vec![Value::Tensor(0)]).contains_tensor());
    }

    #[test]
    fn long_values_print_truncated() {
        let mut deep = Value::None;
        for _ in 0..250 {
            deep = Value::List(vec![deep]);
        }
        assert_eq!(shown(&deep).chars().count(), 121);
        assert_eq!(format!("{:.3}", Value::Str("abcdef".into())), "'ab…");
    }
}
