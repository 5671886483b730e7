//! Tensors and objects that dtshard cannot read, although the file is sound. They are leaves of the state dict like any
//! other tensor, so that filters can leave them out. The rest of the file can then be read.

use std::fmt;
use std::path::PathBuf;

use crate::error::Error;

/// The reason why a leaf of the state dict cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The file with the leaf. If several ranks have the leaf, this is the file of the lowest rank.
    pub file: PathBuf,
    pub kind: UnreadableKind,
}

/// The kind of a leaf that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnreadableKind {
    /// A tensor of a kind that dtshard does not support. The text describes the tensor: `a sparse tensor`.
    Tensor(String),
    /// An object whose Python class is not known to be plain data. The text is the name of the class.
    Object(String),
}

impl fmt::Display for UnreadableKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor(what) => formatter.write_str(what),
            Self::Object(symbol) => write!(formatter, "an object of `{symbol}`"),
        }
    }
}

impl Unreadable {
    /// Returns the error about a conversion that needs this leaf. `name` is the name of the leaf in the file.
    #[must_use]
    pub fn error(&self, name: &str) -> Error {
        let file = self.file.display();
        let name = if name.is_empty() { String::from("the pickled object") } else { format!("`{name}`") };
        match &self.kind {
            UnreadableKind::Tensor(what) => Error::unsupported(
                format!("{file}: {name} is {what}"),
                "leave this tensor out with options::exclude, or save it again as a dense tensor",
            ),
            UnreadableKind::Object(symbol) => Error::unsupported(
                format!("{file}: {name} needs the Python object `{symbol}`, which is not known to be plain data"),
                "leave this object out with options::exclude, or leave out all such objects with options::drop_unknown: \
                 dtshard never runs code from a pickle",
            ),
        }
    }
}
