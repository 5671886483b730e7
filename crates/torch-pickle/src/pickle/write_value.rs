//! Writes values as opcodes of protocol 2.
//!
//! Invariant: a name is written only if it is on a list in [`super::symbols`] and the list allows its use. This is
//! checked for every value, even for values that the caller built, because the program that loads the pickle calls the
//! names.
//!
//! Source of the rule: CPython `Lib/pickle.py`, class `_Pickler`, under protocol 2.

use std::convert::Infallible;
use std::fmt;

use thiserror::Error;

use super::symbols::{self, Use};
use super::write::Writer;
use crate::value::{Construct, Dict, DictEntry, DictKind, Extension, Object, Symbol, Value};

/// The maximum nesting of a written value. The limit is higher than the depth of any decoded value, even if a format
/// adds a few levels, and low enough for the stack of any thread.
const MAX_DEPTH: usize = 300;

/// Writes the opcodes for the leaves that only the caller can write: tensors, and the caller's own values. A closure
/// that writes tensors implements this trait for values without [`Value::Other`].
pub trait WriteLeaves<T, X> {
    /// Writes a tensor as one value.
    fn tensor(&mut self, writer: &mut Writer, tensor: T) -> Result<(), WriteError>;

    /// Writes one of the caller's own values as one value.
    fn other(&mut self, writer: &mut Writer, other: &X) -> Result<(), WriteError>;
}

impl<T, F: FnMut(&mut Writer, T) -> Result<(), WriteError>> WriteLeaves<T, Infallible> for F {
    fn tensor(&mut self, writer: &mut Writer, tensor: T) -> Result<(), WriteError> {
        self(writer, tensor)
    }

    fn other(&mut self, _writer: &mut Writer, other: &Infallible) -> Result<(), WriteError> {
        match *other {}
    }
}

/// An error of writing a value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The name of a class or function is not on any list, or the list does not allow the use of the name in this
    /// value.
    #[error("`{symbol}` is not among the Python objects that are known to be plain data")]
    Forbidden {
        /// The name: `os.system`.
        symbol: String,
    },
    /// An object has keyword arguments, which protocol 2 cannot store.
    #[error("`{symbol}` has keyword arguments, which protocol 2 cannot store")]
    Keywords {
        /// The class of the object.
        symbol: String,
    },
    /// A text, bytes or an int is too long for the opcodes of protocol 2.
    #[error("a {what} of {len} bytes is too long for pickle protocol 2")]
    TooLong {
        /// The type of the value.
        what: &'static str,
        /// The length in bytes.
        len: usize,
    },
    /// The value is nested deeper than readers accept.
    #[error("a value nested deeper than {MAX_DEPTH}")]
    TooDeep,
    /// The caller cannot write a tensor or a value of its own; the text is the reason.
    #[error("{0}")]
    Leaf(String),
}

impl Writer {
    /// Writes a value. `leaves` writes tensors and the caller's own values.
    pub fn value<T: Copy + fmt::Display, X: Extension<T>>(
        &mut self,
        value: &Value<T, X>,
        leaves: &mut dyn WriteLeaves<T, X>,
    ) -> Result<(), WriteError> {
        if self.depth == MAX_DEPTH {
            return Err(WriteError::TooDeep);
        }
        self.depth += 1;
        let written = self.value_inner(value, leaves);
        self.depth -= 1;
        written
    }

    fn value_inner<T: Copy + fmt::Display, X: Extension<T>>(
        &mut self,
        value: &Value<T, X>,
        leaves: &mut dyn WriteLeaves<T, X>,
    ) -> Result<(), WriteError> {
        match value {
            Value::None => self.none(),
            Value::Bool(value) => self.boolean(*value),
            Value::Int(value) => self.int(*value),
            Value::BigInt(bytes) => self.big_int(fits(bytes, "int", i32::MAX as usize)?),
            Value::Float(value) => self.float(*value),
            Value::Str(text) => self.unicode(fits(text.as_bytes(), "str", u32::MAX as usize)?),
            Value::SurrogateStr(text) => self.unicode(fits(text, "str", u32::MAX as usize)?),
            // Bytes are written as a text in which a byte may take two bytes.
            Value::Bytes(bytes) => self.bytes(fits(bytes, "bytes", i32::MAX as usize)?),
            Value::ByteArray(bytes) if bytes.is_empty() => self.global("builtins", "bytearray").empty_tuple().reduce(),
            Value::ByteArray(bytes) => {
                let bytes = fits(bytes, "bytearray", i32::MAX as usize)?;
                self.global("builtins", "bytearray").bytes(bytes).tuple(1).reduce()
            }
            Value::Complex(re, im) => self.global("builtins", "complex").float(*re).float(*im).tuple(2).reduce(),
            Value::List(items) => {
                self.empty_list();
                return self.list_items(items, leaves);
            }
            Value::Ints(ints) => {
                self.empty_list();
                return self.extend_list(ints.iter(), |w, int| {
                    w.int(*int);
                    Ok(())
                });
            }
            Value::Tuple(items) => return self.tuple_of(items, leaves),
            Value::Set(items) => return self.set("set", items, leaves),
            Value::FrozenSet(items) => return self.set("frozenset", items, leaves),
            Value::Dict(dict) => return self.dict(dict, leaves),
            Value::Symbol(symbol) => return self.symbol(symbol, Use::bare),
            Value::Object(object) => return self.object(object, leaves),
            Value::Tensor(tensor) => return leaves.tensor(self, *tensor),
            Value::Other(other) => return leaves.other(self, other),
        };
        Ok(())
    }

    fn tuple_of<T: Copy + fmt::Display, X: Extension<T>>(
        &mut self,
        items: &[Value<T, X>],
        leaves: &mut dyn WriteLeaves<T, X>,
    ) -> Result<(), WriteError> {
        if items.len() > 3 {
            self.mark();
        }
        for item in items {
            self.value(item, leaves)?;
        }
        self.tuple(items.len());
        Ok(())
    }

    fn list_items<T: Copy + fmt::Display, X: Extension<T>>(
        &mut self,
        items: &[Value<T, X>],
        leaves: &mut dyn WriteLeaves<T, X>,
    ) -> Result<(), WriteError> {
        self.extend_list(items.iter(), |w, item| w.value(item, leaves))
    }

    fn dict_entries<T: Copy + fmt::Display, X: Extension<T>>(
        &mut self,
        entries: &[DictEntry<T, X>],
        leaves: &mut dyn WriteLeaves<T, X>,
    ) -> Result<(), WriteError> {
        self.extend_dict(entries.iter(), |w, (key, value)| {
            w.value(key, leaves)?;
            w.value(value, leaves)
        })
    }

    fn set<T: Copy + fmt::Display, X: Extension<T>>(
        &mut self,
        class: &str,
        items: &[Value<T, X>],
        leaves: &mut dyn WriteLeaves<T, X>,
    ) -> Result<(), WriteError> {
        self.global("builtins", class).empty_list();
        self.list_items(items, leaves)?;
        self.tuple(1).reduce();
        Ok(())
    }

    fn dict<T: Copy + fmt::Display, X: Extension<T>>(
        &mut self,
        dict: &Dict<T, X>,
        leaves: &mut dyn WriteLeaves<T, X>,
    ) -> Result<(), WriteError> {
        match dict.kind {
            DictKind::Plain => self.empty_dict(),
            DictKind::Ordered => self.global("collections", "OrderedDict").empty_tuple().reduce(),
        };
        self.dict_entries(&dict.entries, leaves)?;
        match (&dict.attributes, dict.kind) {
            (Some(attributes), DictKind::Ordered) => {
                self.value(attributes, leaves)?;
                self.build();
            }
            // A plain dict has no attributes in Python, and BUILD on one is an error.
            (Some(_), DictKind::Plain) | (None, _) => {}
        }
        Ok(())
    }

    fn object<T: Copy + fmt::Display, X: Extension<T>>(
        &mut self,
        object: &Object<T, X>,
        leaves: &mut dyn WriteLeaves<T, X>,
    ) -> Result<(), WriteError> {
        let Value::Symbol(class) = &object.class else {
            return Err(WriteError::Forbidden { symbol: object.class.to_string() });
        };
        if !object.kwargs.is_empty() {
            return Err(WriteError::Keywords { symbol: class.to_string() });
        }
        self.symbol(class, |usage| match object.how {
            Construct::Call => usage.made(),
            Construct::New => usage == Use::Class,
        })?;
        self.tuple_of(&object.args, leaves)?;
        match object.how {
            Construct::Call => self.reduce(),
            Construct::New => self.newobj(),
        };
        self.list_items(&object.items, leaves)?;
        self.dict_entries(&object.entries, leaves)?;
        if let Some(state) = &object.state {
            self.value(state, leaves)?;
            self.build();
        }
        Ok(())
    }

    fn symbol(&mut self, symbol: &Symbol, allowed: impl Fn(Use) -> bool) -> Result<(), WriteError> {
        match symbols::inert(&symbol.module, &symbol.name) {
            Some(usage) if allowed(usage) => self.global(&symbol.module, &symbol.name),
            _ => {
                return Err(WriteError::Forbidden { symbol: symbol.to_string() });
            }
        };
        Ok(())
    }
}

fn fits<'b>(bytes: &'b [u8], what: &'static str, max: usize) -> Result<&'b [u8], WriteError> {
    if bytes.len() > max {
        return Err(WriteError::TooLong { what, len: bytes.len() });
    }
    Ok(bytes)
}
