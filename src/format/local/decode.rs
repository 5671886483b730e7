//! Decodes the state dict in a `layout.json`. The file is not trusted, because anyone may have written it.
//!
//! Invariants: tensors do not occur in dict keys and attributes. Values that differ between ranks occur only inside
//! dicts and lists. The file may name only classes in `torch_pickle::pickle::symbols`. A decoded value is nested at
//! most as deep as the JSON text, and the JSON reader limits this depth.

use std::collections::{HashMap, HashSet};

use super::tree::Tree;
use crate::catalog::path::{key_text, rank_key};
use crate::catalog::value::{Construct, Object, Symbol};
use crate::catalog::{Dict, DictKind, Key, Path, RankValue, TensorId, Value};
use crate::error::Wrong;
use crate::layout::Rank;
use torch_pickle::pickle::symbols::{self, Use};

/// Decodes the state dict of a document. `names` maps names to tensors; ranks must be below `world_size`.
///
/// # Errors
/// `Wrong` for an invalid value, or for a value that is not allowed at its position.
pub fn decode(tree: &Tree, names: &HashMap<&str, TensorId>, world_size: u32) -> Result<Value, Wrong> {
    let mut decoder = Decoder { names, world_size, path: Path::default() };
    match decoder.value(tree, Position::Leaf)? {
        state @ Value::Dict(_) => Ok(state),
        other => Err(decoder.wrong("a dict", other.type_name())),
    }
}

/// The position of a value in the state dict. The position determines which values are allowed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Position {
    /// All containers around the value are dicts or lists. The value may differ between ranks.
    Leaf,
    /// A position inside a tuple, a set, an object or the value of one rank. A value at this position must not differ
    /// between ranks.
    Within,
    /// The position of a dict key or of an attribute. A value at this position must not contain tensors.
    KeyOrAttribute,
}

struct Decoder<'a> {
    names: &'a HashMap<&'a str, TensorId>,
    world_size: u32,
    path: Path,
}

type Decode<T = Value> = Result<T, Wrong>;

impl Decoder<'_> {
    fn wrong(&self, expected: impl Into<String>, found: impl Into<String>) -> Wrong {
        let at = if self.path.0.is_empty() { String::from("state") } else { format!("state {}", self.path) };
        Wrong::new(at, expected, found)
    }

    fn child(&mut self, key: Key, tree: &Tree, position: Position) -> Decode {
        self.path.0.push(key);
        let value = self.value(tree, position)?;
        self.path.0.pop();
        Ok(value)
    }

    fn value(&mut self, tree: &Tree, position: Position) -> Decode {
        Ok(match tree {
            Tree::Null => Value::None,
            Tree::Bool(value) => Value::Bool(*value),
            Tree::Int(value) => Value::Int(*value),
            Tree::Float(value) => Value::Float(*value),
            Tree::Text(text) => Value::Str(text.as_str().into()),
            Tree::List(_) => Value::List(self.items(tree, position)?),
            Tree::Map(entries) => match entries.as_slice() {
                [(tag, inner), ..] if tag.starts_with('$') => self.tagged(tag, inner, &entries[1..], position)?,
                _ => Value::Dict(Dict { entries: self.entries(tree, position)?, ..Dict::default() }),
            },
        })
    }

    fn tagged(&mut self, tag: &str, inner: &Tree, more: &[(String, Tree)], position: Position) -> Decode {
        let within = if position == Position::KeyOrAttribute { Position::KeyOrAttribute } else { Position::Within };
        let attributes = match more {
            [] => None,
            [(key, attributes)] if tag == "$ordered" && key == "$attributes" => {
                Some(Box::new(self.value(attributes, Position::KeyOrAttribute)?))
            }
            [(key, _), ..] => return Err(self.wrong(format!("no key next to {tag}"), format!("`{key}`"))),
        };
        Ok(match tag {
            "$dict" => Value::Dict(Dict { entries: self.pairs(inner, position)?, ..Dict::default() }),
            "$ordered" => {
                let entries = match inner {
                    Tree::Map(entries) if matches!(entries.as_slice(), [(tag, _)] if tag == "$dict") => {
                        self.pairs(&entries[0].1, position)?
                    }
                    plain => self.entries(plain, position)?,
                };
                Value::Dict(Dict { kind: DictKind::Ordered, entries, attributes })
            }
            "$tuple" => Value::Tuple(self.items(inner, within)?),
            "$set" => Value::Set(self.items(inner, within)?),
            "$frozenset" => Value::FrozenSet(self.items(inner, within)?),
            "$int" => Value::BigInt(self.bytes(inner)?.into()),
            "$text" => Value::SurrogateStr(self.bytes(inner)?.into()),
            "$bytes" => Value::Bytes(self.bytes(inner)?),
            "$bytearray" => Value::ByteArray(self.bytes(inner)?),
            "$float" => Value::Float(self.float(&Tree::tagged(tag, inner.clone()))?),
            "$complex" => match inner {
                Tree::List(parts) if parts.len() == 2 => Value::Complex(self.float(&parts[0])?, self.float(&parts[1])?),
                other => return Err(self.wrong("two numbers in $complex", other.kind())),
            },
            "$symbol" => Value::Symbol(self.symbol(inner, Use::bare)?),
            "$object" => self.object(inner, within)?,
            "$tensor" if position != Position::KeyOrAttribute => match inner {
                Tree::Text(name) => match self.names.get(name.as_str()) {
                    Some(id) => Value::Tensor(*id),
                    None => return Err(self.wrong("the name of an entry in `tensors`", format!("`{name}`"))),
                },
                other => return Err(self.wrong("the name of a tensor", other.kind())),
            },
            "$ranks" if position == Position::Leaf => self.per_rank(inner)?,
            other => return Err(self.wrong("a tag that is allowed at this place", format!("`{other}`"))),
        })
    }

    fn list<'t>(&self, tree: &'t Tree) -> Decode<&'t [Tree]> {
        match tree {
            Tree::List(items) => Ok(items),
            other => Err(self.wrong("a list", other.kind())),
        }
    }

    fn items(&mut self, tree: &Tree, position: Position) -> Decode<Vec<Value>> {
        let items = self.list(tree)?;
        (0..).zip(items).map(|(index, item)| self.child(Key::Index(index), item, position)).collect()
    }

    fn entries(&mut self, tree: &Tree, position: Position) -> Decode<Vec<(Value, Value)>> {
        let Tree::Map(entries) = tree else { return Err(self.wrong("an object", tree.kind())) };
        let entry = |(key, value): &(String, Tree)| {
            if key.starts_with('$') {
                return Err(self.wrong("no key that begins with $ next to other keys", format!("`{key}`")));
            }
            Ok((Value::Str(key.as_str().into()), self.child(Key::Name(key.as_str().into()), value, position)?))
        };
        entries.iter().map(entry).collect()
    }

    /// Decodes the entries of a dict whose keys may be of any type, stored as a list of pairs `[key, value]`.
    fn pairs(&mut self, tree: &Tree, position: Position) -> Decode<Vec<(Value, Value)>> {
        let mut seen = HashSet::new();
        let mut entries = Vec::new();
        for pair in self.list(tree)? {
            let [key, value] = self.list(pair)? else {
                return Err(self.wrong("pairs of a key and a value", "something else"));
            };
            let key = self.value(key, Position::KeyOrAttribute)?;
            let text = key_text(&key);
            if !seen.insert((text.clone(), key.as_str().is_some())) {
                return Err(self.wrong("distinct keys", format!("{key} twice")));
            }
            entries.push((key, self.child(Key::Name(text), value, position)?));
        }
        Ok(entries)
    }

    fn bytes(&self, tree: &Tree) -> Decode<Vec<u8>> {
        let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        let bytes = match tree {
            Tree::Text(text) if text.len() % 2 == 0 => {
                text.as_bytes().chunks(2).map(|pair| Some(digit(&pair[0])? * 16 + digit(&pair[1])?)).collect()
            }
            _ => None,
        };
        bytes.ok_or_else(|| self.wrong("bytes, two hexadecimal digits each", tree.kind()))
    }

    fn float(&self, tree: &Tree) -> Decode<f64> {
        let special = |text: &str| match text {
            "nan" => Some(f64::NAN),
            "inf" => Some(f64::INFINITY),
            "-inf" => Some(f64::NEG_INFINITY),
            bits => Some(f64::from_bits(u64::from_str_radix(bits.strip_prefix("0x")?, 16).ok()?)),
        };
        let found = match tree {
            Tree::Float(value) => Some(*value),
            Tree::Map(entries) => match entries.as_slice() {
                [(tag, Tree::Text(text))] if tag == "$float" => special(text),
                _ => None,
            },
            _ => None,
        };
        found.ok_or_else(|| {
            self.wrong("a float: a number with a dot, or nan, inf, -inf or 0x... in $float", tree.kind())
        })
    }

    fn symbol(&self, tree: &Tree, allowed: impl Fn(Use) -> bool) -> Decode<Symbol> {
        match tree {
            Tree::List(parts) => match parts.as_slice() {
                [Tree::Text(module), Tree::Text(name)] if symbols::inert(module, name).is_some_and(allowed) => {
                    Ok(Symbol::new(module, name))
                }
                [Tree::Text(module), Tree::Text(name)] => {
                    Err(self.wrong("a Python object that is known to be plain data", format!("`{module}.{name}`")))
                }
                _ => Err(self.wrong("a module and a name", "something else")),
            },
            other => Err(self.wrong("a module and a name", other.kind())),
        }
    }

    fn object(&mut self, tree: &Tree, position: Position) -> Decode {
        let Tree::Map(fields) = tree else { return Err(self.wrong("an object in $object", tree.kind())) };
        let field = |name: &str| fields.iter().find(|(key, _)| key == name).map(|(_, value)| value);
        if let Some((key, _)) = fields.iter().find(|(key, _)| !FIELDS.contains(&key.as_str())) {
            return Err(self.wrong(format!("{} in $object", FIELDS.join(", ")), format!("`{key}`")));
        }
        let how = match field("how") {
            Some(Tree::Text(how)) if how == "call" => Construct::Call,
            Some(Tree::Text(how)) if how == "new" => Construct::New,
            _ => return Err(self.wrong("how an object is made: call or new", "neither")),
        };
        let class = self.symbol(field("class").unwrap_or(&Tree::Null), |usage| match how {
            Construct::Call => usage.made(),
            Construct::New => usage == Use::Class,
        })?;
        let mut object = Object::new(how, class);
        let empty = Tree::List(Vec::new());
        object.args = self.items(field("args").unwrap_or(&empty), position)?;
        object.items = self.items(field("items").unwrap_or(&empty), position)?;
        object.entries = self.pairs(field("entries").unwrap_or(&empty), position)?;
        object.state = field("state").map(|state| self.value(state, position)).transpose()?;
        Ok(Value::Object(Box::new(object)))
    }

    fn per_rank(&mut self, tree: &Tree) -> Decode {
        let mut seen = HashSet::new();
        let mut rank_values = Vec::new();
        for rank_value in self.list(tree)? {
            let [numbers, value] = self.list(rank_value)? else {
                return Err(self.wrong("pairs of ranks and a value", "something else"));
            };
            let mut ranks = Vec::new();
            for number in self.list(numbers)? {
                let rank = match number {
                    Tree::Int(number) => u32::try_from(*number).ok().filter(|rank| *rank < self.world_size),
                    _ => None,
                };
                let rank =
                    rank.filter(|rank| seen.insert(*rank) && ranks.last().is_none_or(|last: &Rank| last.0 < *rank));
                let Some(rank) = rank else {
                    let expected = format!("ascending ranks below {}, each once", self.world_size);
                    return Err(self.wrong(expected, number.render(0)));
                };
                ranks.push(Rank(rank));
            }
            let Some(first) = ranks.first() else { return Err(self.wrong("ranks that have a value", "none")) };
            let value = self.child(rank_key(*first), value, Position::Within)?;
            rank_values.push(RankValue { value, ranks });
        }
        if rank_values.is_empty() {
            return Err(self.wrong("values of ranks", "none"));
        }
        Ok(Value::Other(rank_values))
    }
}

const FIELDS: [&str; 6] = ["how", "class", "args", "items", "entries", "state"];
