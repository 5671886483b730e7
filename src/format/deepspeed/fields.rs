//! Typed access to the values of a file. Every error names the file, the position in it, the expected value and the value
//! found.

use std::path::Path;

use crate::catalog::{Dict, Fqn, Value};
use crate::error::{Error, Result};
use crate::format::name_of;
use crate::format::torch::{RankFile, TensorNode, View};
use crate::layout::Dims;

/// The maximum number of dims of a parameter. No real model has a parameter with more dims.
const MAX_DIMS: usize = 64;

/// A dict in a file.
#[derive(Clone, Copy)]
pub struct Fields<'a> {
    pub file: &'a RankFile,
    /// The path of the dict in the file; empty for the whole value.
    at: &'a str,
    pub dict: &'a Dict,
}

impl<'a> Fields<'a> {
    /// Returns the dict that a file contains.
    ///
    /// # Errors
    /// `Malformed` if the file contains another value.
    pub fn of_file(file: &'a RankFile) -> Result<Self> {
        match &file.contents.value {
            Value::Dict(dict) => Ok(Self { file, at: "", dict }),
            other => Err(Error::malformed(&file.path, "the pickled value", "a dict", other.type_name())),
        }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &'a Path {
        &self.file.path
    }

    /// Returns the name of the file, for messages.
    pub fn file_name(&self) -> String {
        name_of(self.path())
    }

    /// Returns whether two files have equal values of an entry, or both none.
    pub fn has_same(&self, other: &Fields<'_>, key: &str) -> bool {
        match (self.get(key), other.get(key)) {
            (Some(own), Some(other)) => own.same_but_tensors(other),
            (own, other) => own.is_none() && other.is_none(),
        }
    }

    /// Returns the name of an entry in messages.
    pub fn name(&self, key: &str) -> String {
        if self.at.is_empty() { key.to_owned() } else { format!("{}.{key}", self.at) }
    }

    /// Returns the error for an entry with another value than expected.
    pub fn wrong(&self, key: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::malformed(self.path(), self.name(key), expected, found)
    }

    /// Returns the error for an entry of another type than expected.
    fn wrong_type(&self, key: &str, expected: &str) -> Error {
        let found = self.dict.get(key).map_or_else(|| String::from("nothing"), |value| value.type_name().into_owned());
        self.wrong(key, expected, found)
    }

    /// Returns an entry; `None` if it is absent or has the value `None`.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.dict.get(key).filter(|value| !matches!(value, Value::None))
    }

    /// Returns an entry that is a dict; `None` if it is absent.
    ///
    /// # Errors
    /// `Malformed` for another type.
    pub fn dict(&self, key: &'a str) -> Result<Option<Self>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Dict(dict)) => Ok(Some(Self { file: self.file, at: key, dict })),
            Some(_) => Err(self.wrong_type(key, "a dict")),
        }
    }

    /// Returns an entry that is a list.
    ///
    /// # Errors
    /// `Malformed` if it is absent or of another type.
    pub fn list(&self, key: &str) -> Result<&'a [Value]> {
        match self.get(key) {
            Some(Value::List(items)) => Ok(items),
            _ => Err(self.wrong_type(key, "a list")),
        }
    }

    /// Returns an entry that is a number of things, so at least 0.
    ///
    /// # Errors
    /// `Malformed` for another type.
    pub fn number(&self, key: &str) -> Result<Option<u64>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_i64().and_then(|number| u64::try_from(number).ok()) {
                None => Err(self.wrong_type(key, "a number from 0 on")),
                number => Ok(number),
            },
        }
    }

    /// Returns the tensor at a value of the file; `None` if the value is not a tensor that can be read.
    pub fn view(&self, value: &Value) -> Option<&'a View> {
        let Value::Tensor(id) = value else { return None };
        match self.file.contents.tensors.get(id.0 as usize) {
            Some(TensorNode::Plain(view)) => Some(view),
            _ => None,
        }
    }

    /// Returns a tensor with one dim whose elements are next to each other. `name` is its name in messages.
    ///
    /// # Errors
    /// `Malformed` for any other value.
    pub fn vector(&self, name: &str, value: &Value) -> Result<&'a View> {
        let expected = "a tensor with one dim, without gaps";
        match self.view(value) {
            Some(view) if is_vector(view) => Ok(view),
            Some(view) => {
                let found =
                    format!("{} {:?}, strides {:?}", view.dtype, view.sizes.as_slice(), view.strides.as_slice());
                Err(self.wrong(name, expected, found))
            }
            None => Err(self.wrong(name, expected, value.type_name())),
        }
    }

    /// Returns the names and shapes of parameters that a dict `{name: torch.Size}` lists, in its order. `name` is the name of
    /// the dict in messages.
    ///
    /// # Errors
    /// `Malformed` for any other value.
    pub fn shapes(&self, name: &str, value: &Value) -> Result<Vec<(Fqn, Dims)>> {
        let Value::Dict(dict) = value else {
            return Err(self.wrong(name, "a dict of parameter names and shapes", value.type_name()));
        };
        let one = |(key, size): &(Value, Value)| match (key.as_str(), dims(size)) {
            (Some(key), Some(shape)) => Ok((Fqn::from(key), shape)),
            (None, _) => Err(self.wrong(name, "names of parameters", key.type_name())),
            (Some(key), None) => {
                let expected = format!("a shape of at most {MAX_DIMS} dims");
                Err(self.wrong(&format!("{name}[{key:?}]"), expected, size.type_name()))
            }
        };
        dict.entries.iter().map(one).collect()
    }
}

/// Returns whether a tensor has one dim, and elements that are next to each other.
pub fn is_vector(view: &View) -> bool {
    view.sizes.len() == 1 && (view.strides[0] == 1 || view.sizes[0] < 2)
}

/// Returns the numbers in a list or a tuple, if all of them are at least 0.
pub fn numbers(value: &Value) -> Option<Dims> {
    let (Value::List(items) | Value::Tuple(items)) = value else { return None };
    items.iter().map(|item| u64::try_from(item.as_i64()?).ok()).collect()
}

/// Returns the shape in a `torch.Size` or in a tuple of numbers.
fn dims(value: &Value) -> Option<Dims> {
    let items = match value {
        Value::Tuple(items) => items,
        Value::Object(object) => match (&object.class, object.args.as_slice()) {
            (Value::Symbol(symbol), [Value::Tuple(items)]) if (&*symbol.module, &*symbol.name) == ("torch", "Size") => {
                items
            }
            _ => return None,
        },
        _ => return None,
    };
    let dims: Dims = items.iter().map(|item| u64::try_from(item.as_i64()?).ok()).collect::<Option<_>>()?;
    (dims.len() <= MAX_DIMS).then_some(dims)
}
