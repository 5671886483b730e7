//! Encodes a state dict as JSON. A value with a JSON type is written as this JSON type. Any other value is written as a
//! JSON object with a key that begins with `$`.
//!
//! ```text
//! None, True, 1, 0.5, 'a', [1]     null, true, 1, 0.5, "a", [1]
//! {'a': 1}                         {"a": 1}
//! {0: 1}                           {"$dict": [[0, 1]]}          also if a key is a text that begins with $
//! OrderedDict(a=1)                 {"$ordered": {"a": 1}}       and "$attributes", if the dict has attributes
//! (1, 2), {1}, frozenset({1})      {"$tuple": [1, 2]}, {"$set": [1]}, {"$frozenset": [1]}
//! nan, 2 ** 64, 1j                 {"$float": "nan"}, {"$int": "000000000000000001"}, {"$complex": [0.0, 1.0]}
//! b'a', bytearray(b'a')            {"$bytes": "61"}, {"$bytearray": "61"}
//! torch.float32                    {"$symbol": ["torch", "float32"]}
//! an object                        {"$object": {"how": "new", "class": ["argparse", "Namespace"], "args": [], ...}}
//! a tensor                         {"$tensor": "model.embed.weight"}
//! 1 on ranks 0 and 2, 5 on rank 1  {"$ranks": [[[0, 2], 1], [[1], 5]]}
//! ```
//!
//! Invariant: [`super::decode`] restores the original state dict.

use super::tree::Tree;
use crate::catalog::path::{key_text, rank_key};
use crate::catalog::value::{Construct, Object, Symbol};
use crate::catalog::{Dict, DictKind, Key, Path, RankValue, Value};

/// The maximum nesting of the encoded JSON. JSON readers accept at most 128 levels, and the document around the state
/// dict uses some of these levels.
const MAX_DEPTH: usize = 120;

/// Encodes a value that is at `path` in the state dict. Tensors get the names that [`crate::catalog::path::tensors`]
/// gives them.
///
/// # Errors
/// A description of the content that cannot be encoded.
pub fn encode(value: &Value, path: &Path) -> Result<Tree, String> {
    Encoder { depth: 0 }.value(value, path)
}

struct Encoder {
    depth: usize,
}

impl Encoder {
    fn value(&mut self, value: &Value, path: &Path) -> Result<Tree, String> {
        if self.depth >= MAX_DEPTH {
            return Err(format!("nested deeper than {MAX_DEPTH}"));
        }
        // An encoded value may take two levels of JSON: an object with a key such as `$tuple`, and a list in it.
        self.depth += 2;
        let tree = self.inner(value, path);
        self.depth -= 2;
        tree
    }

    fn inner(&mut self, value: &Value, path: &Path) -> Result<Tree, String> {
        Ok(match value {
            Value::None => Tree::Null,
            Value::Bool(value) => Tree::Bool(*value),
            Value::Int(value) => Tree::Int(*value),
            Value::BigInt(bytes) => Tree::tagged("$int", Tree::text(hex(bytes))),
            Value::Float(value) => float(*value),
            Value::Str(text) => Tree::text(&**text),
            Value::SurrogateStr(bytes) => Tree::tagged("$text", Tree::text(hex(bytes))),
            Value::Bytes(bytes) => Tree::tagged("$bytes", Tree::text(hex(bytes))),
            Value::ByteArray(bytes) => Tree::tagged("$bytearray", Tree::text(hex(bytes))),
            Value::Complex(re, im) => Tree::tagged("$complex", Tree::List(vec![float(*re), float(*im)])),
            Value::List(items) => self.items(items, path)?,
            Value::Ints(ints) => Tree::List(ints.iter().copied().map(Tree::Int).collect()),
            Value::Tuple(items) => Tree::tagged("$tuple", self.items(items, path)?),
            Value::Set(items) => Tree::tagged("$set", self.items(items, path)?),
            Value::FrozenSet(items) => Tree::tagged("$frozenset", self.items(items, path)?),
            Value::Dict(dict) => self.dict(dict, path)?,
            Value::Symbol(symbol) => Tree::tagged("$symbol", symbol_tree(symbol)),
            Value::Object(object) => Tree::tagged("$object", self.object(object, path)?),
            Value::Tensor(_) => Tree::tagged("$tensor", Tree::text(path.to_string())),
            Value::Other(rank_values) => {
                let rank_values = rank_values.iter().map(|RankValue { value, ranks }| {
                    let numbers = ranks.iter().map(|rank| Tree::Int(rank.0.into())).collect();
                    let path = path.child(rank_key(ranks[0]));
                    Ok(Tree::List(vec![Tree::List(numbers), self.value(value, &path)?]))
                });
                Tree::tagged("$ranks", Tree::List(rank_values.collect::<Result<_, String>>()?))
            }
        })
    }

    fn items(&mut self, items: &[Value], path: &Path) -> Result<Tree, String> {
        let items = (0..).zip(items).map(|(index, item)| self.value(item, &path.child(Key::Index(index))));
        Ok(Tree::List(items.collect::<Result<_, _>>()?))
    }

    fn dict(&mut self, dict: &Dict, path: &Path) -> Result<Tree, String> {
        let mut pairs = Vec::with_capacity(dict.entries.len());
        for (key, value) in &dict.entries {
            let own = path.child(Key::Name(key_text(key)));
            pairs.push((key, self.value(value, &own)?));
        }
        let is_plain = pairs.iter().all(|(key, _)| key.as_str().is_some_and(|key| !key.starts_with('$')));
        let entries = if is_plain {
            let named = |(key, value): (&Value, Tree)| (key.as_str().expect("it is a text").to_owned(), value);
            Tree::Map(pairs.into_iter().map(named).collect())
        } else {
            let pairs = pairs.into_iter().map(|(key, value)| Ok(Tree::List(vec![self.value(key, path)?, value])));
            Tree::tagged("$dict", Tree::List(pairs.collect::<Result<_, String>>()?))
        };
        let mut tree = match dict.kind {
            DictKind::Plain => entries,
            DictKind::Ordered => Tree::tagged("$ordered", entries),
        };
        if let (Some(attributes), Tree::Map(tagged), DictKind::Ordered) = (&dict.attributes, &mut tree, dict.kind) {
            if attributes.contains_tensor() {
                return Err(String::from("attributes of a dict that hold tensors"));
            }
            tagged.push((String::from("$attributes"), self.value(attributes, path)?));
        }
        Ok(tree)
    }

    fn object(&mut self, object: &Object, path: &Path) -> Result<Tree, String> {
        let Object { how, class: Value::Symbol(class), args, kwargs, items, entries, state } = object else {
            return Err(format!("{}, which has no class", object.class));
        };
        if !kwargs.is_empty() || object.items.iter().chain(args).any(Value::contains_tensor) {
            return Err(format!("{class} with tensors or keyword arguments"));
        }
        let how = match how {
            Construct::Call => "call",
            Construct::New => "new",
        };
        let mut fields = vec![(String::from("how"), Tree::text(how)), (String::from("class"), symbol_tree(class))];
        let mut add = |name: &str, tree| fields.push((name.to_owned(), tree));
        add("args", self.items(args, path)?);
        if !items.is_empty() {
            add("items", self.items(items, path)?);
        }
        if !entries.is_empty() {
            let pairs = entries.iter().map(|(key, value)| {
                let own = path.child(Key::Name(key_text(key)));
                Ok(Tree::List(vec![self.value(key, path)?, self.value(value, &own)?]))
            });
            add("entries", Tree::List(pairs.collect::<Result<_, String>>()?));
        }
        if let Some(state) = state {
            add("state", self.value(state, path)?);
        }
        Ok(Tree::Map(fields))
    }
}

fn symbol_tree(symbol: &Symbol) -> Tree {
    Tree::List(vec![Tree::text(&*symbol.module), Tree::text(&*symbol.name)])
}

fn float(value: f64) -> Tree {
    let special = |text: String| Tree::tagged("$float", Tree::Text(text));
    match value {
        value if value.is_finite() => Tree::Float(value),
        f64::INFINITY => special(String::from("inf")),
        f64::NEG_INFINITY => special(String::from("-inf")),
        nan if nan.to_bits() == f64::NAN.to_bits() => special(String::from("nan")),
        nan => special(format!("{:#018x}", nan.to_bits())),
    }
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        text.push_str(&format!("{byte:02x}"));
    }
    text
}
