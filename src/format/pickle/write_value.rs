//! Values as opcodes of protocol 2.
//!
//! Invariant: no name is written that is not listed in [`super::symbols`], nor in another use than the one
//! listed. Whoever loads the result runs what it names, so this holds for values of any origin.
//!
//! Source of the rule: CPython `Lib/pickle.py`, class `_Pickler`, under protocol 2.

use thiserror::Error;

use super::symbols::{self, Use};
use super::write::Writer;
use crate::catalog::value::{Construct, Dict, DictKind, Holding, Object, Symbol, TensorId, Value};

/// More than any lifted value has, even within a few levels of a format's own; little enough for any stack.
const MAX_DEPTH: usize = 300;

/// Writes the opcodes for a tensor.
pub type WriteTensor<'t> = dyn FnMut(&mut Writer, TensorId) -> Result<(), WriteError> + 't;

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WriteError {
    #[error("`{symbol}` is not among the Python objects that are known to be plain data")]
    Forbidden { symbol: String },
    #[error("`{symbol}` has keyword arguments, which protocol 2 cannot hold")]
    Keywords { symbol: String },
    #[error("a {what} of {len} bytes is too long for pickle protocol 2")]
    TooLong { what: &'static str, len: usize },
    #[error("a value nested deeper than {MAX_DEPTH}")]
    TooDeep,
    #[error("{ranks} store different values")]
    PerRank { ranks: String },
    /// A tensor's own trouble, in the words of who writes it.
    #[error("{0}")]
    Tensor(String),
}

impl Writer {
    /// A value, with `tensors` for the tensors in it.
    pub fn value(&mut self, value: &Value, tensors: &mut WriteTensor<'_>) -> Result<(), WriteError> {
        if self.depth == MAX_DEPTH {
            return Err(WriteError::TooDeep);
        }
        self.depth += 1;
        let written = self.value_inner(value, tensors);
        self.depth -= 1;
        written
    }

    fn value_inner(&mut self, value: &Value, tensors: &mut WriteTensor<'_>) -> Result<(), WriteError> {
        match value {
            Value::None => self.none(),
            Value::Bool(value) => self.boolean(*value),
            Value::Int(value) => self.int(*value),
            Value::BigInt(bytes) => self.big_int(fits(bytes, "int", i32::MAX as usize)?),
            Value::Float(value) => self.float(*value),
            Value::Str(text) => self.unicode(fits(text.as_bytes(), "str", u32::MAX as usize)?),
            Value::SurrogateStr(text) => self.unicode(fits(text, "str", u32::MAX as usize)?),
            // As text a byte may take two.
            Value::Bytes(bytes) => self.bytes(fits(bytes, "bytes", i32::MAX as usize)?),
            Value::ByteArray(bytes) if bytes.is_empty() => self.global("builtins", "bytearray").empty_tuple().reduce(),
            Value::ByteArray(bytes) => {
                let bytes = fits(bytes, "bytearray", i32::MAX as usize)?;
                self.global("builtins", "bytearray").bytes(bytes).tuple(1).reduce()
            }
            Value::Complex(re, im) => self.global("builtins", "complex").float(*re).float(*im).tuple(2).reduce(),
            Value::List(items) => {
                self.empty_list();
                return self.list_items(items, tensors);
            }
            Value::Ints(ints) => {
                self.empty_list();
                return self.extend_list(ints.iter(), |w, int| {
                    w.int(*int);
                    Ok(())
                });
            }
            Value::Tuple(items) => return self.tuple_of(items, tensors),
            Value::Set(items) => return self.set("set", items, tensors),
            Value::FrozenSet(items) => return self.set("frozenset", items, tensors),
            Value::Dict(dict) => return self.dict(dict, tensors),
            Value::Symbol(symbol) => return self.symbol(symbol, Use::bare),
            Value::Object(object) => return self.object(object, tensors),
            Value::Tensor(id) => return tensors(self, *id),
            Value::PerRank(holdings) => {
                if let Some(value) = self.rank.and_then(|rank| Holding::value_for(holdings, rank)) {
                    return self.value(value, tensors);
                }
                let ranks: Vec<_> = holdings.iter().flat_map(|holding| holding.ranks.iter().copied()).collect();
                return Err(WriteError::PerRank { ranks: crate::catalog::list_ranks(&ranks) });
            }
        };
        Ok(())
    }

    fn tuple_of(&mut self, items: &[Value], tensors: &mut WriteTensor<'_>) -> Result<(), WriteError> {
        if items.len() > 3 {
            self.mark();
        }
        for item in items {
            self.value(item, tensors)?;
        }
        self.tuple(items.len());
        Ok(())
    }

    fn list_items(&mut self, items: &[Value], tensors: &mut WriteTensor<'_>) -> Result<(), WriteError> {
        self.extend_list(items.iter(), |w, item| w.value(item, tensors))
    }

    fn dict_entries(&mut self, entries: &[(Value, Value)], tensors: &mut WriteTensor<'_>) -> Result<(), WriteError> {
        self.extend_dict(entries.iter(), |w, (key, value)| {
            w.value(key, tensors)?;
            w.value(value, tensors)
        })
    }

    fn set(&mut self, class: &str, items: &[Value], tensors: &mut WriteTensor<'_>) -> Result<(), WriteError> {
        self.global("builtins", class).empty_list();
        self.list_items(items, tensors)?;
        self.tuple(1).reduce();
        Ok(())
    }

    fn dict(&mut self, dict: &Dict, tensors: &mut WriteTensor<'_>) -> Result<(), WriteError> {
        match dict.kind {
            DictKind::Plain => self.empty_dict(),
            DictKind::Ordered => self.global("collections", "OrderedDict").empty_tuple().reduce(),
        };
        self.dict_entries(&dict.entries, tensors)?;
        match (&dict.attributes, dict.kind) {
            (Some(attributes), DictKind::Ordered) => {
                self.value(attributes, tensors)?;
                self.build();
            }
            // A plain dict has no attributes in Python, and BUILD on one is an error.
            (Some(_), DictKind::Plain) | (None, _) => {}
        }
        Ok(())
    }

    fn object(&mut self, object: &Object, tensors: &mut WriteTensor<'_>) -> Result<(), WriteError> {
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
        self.tuple_of(&object.args, tensors)?;
        match object.how {
            Construct::Call => self.reduce(),
            Construct::New => self.newobj(),
        };
        self.list_items(&object.items, tensors)?;
        self.dict_entries(&object.entries, tensors)?;
        if let Some(state) = &object.state {
            self.value(state, tensors)?;
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
