//! Tensors and objects that dtshard cannot read, although the file is sound. They are leaves of the state dict like any
//! other tensor, so that filters can leave them out. The rest of the checkpoint can then be read.

use std::fmt;
use std::path::PathBuf;

use super::error::CatalogError;
use crate::error::Error;

/// The reason why a leaf of the state dict cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The path of the file with the leaf. If several ranks have the leaf, the path is that of the lowest rank's file. If
    /// the layout is unknown, the path is that of the checkpoint.
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
    /// A plain tensor whose parts do not match the layout that the user declared.
    Misfit(CatalogError),
    /// A plain tensor that is a part of a larger tensor, or may be one, and whose layout is unknown. `what` is the message
    /// of the error, and `hint` is its hint.
    UnknownLayout { what: String, hint: String },
}

impl fmt::Display for UnreadableKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor(what) => formatter.write_str(what),
            Self::Object(symbol) => write!(formatter, "an object of `{symbol}`"),
            Self::Misfit(CatalogError::Conflict { what, .. }) => {
                write!(formatter, "{what} does not match the declaration")
            }
            Self::Misfit(error) => error.fmt(formatter),
            Self::UnknownLayout { .. } => formatter.write_str("a tensor of unknown layout"),
        }
    }
}

impl Unreadable {
    /// Returns whether the dtype, shape and chunks of the catalog entry describe the stored parts of the tensor.
    pub fn has_parts(&self) -> bool {
        self.is_misfit() || self.is_of_unknown_layout()
    }

    /// Returns whether the layout of the tensor is unknown.
    pub fn is_of_unknown_layout(&self) -> bool {
        matches!(self.kind, UnreadableKind::UnknownLayout { .. })
    }

    /// Returns whether the layout that the user declared does not match the tensor.
    pub fn is_misfit(&self) -> bool {
        matches!(self.kind, UnreadableKind::Misfit(_))
    }

    /// If the declared layout does not match the tensor, replaces the error about this mismatch by the result of `map`.
    pub fn map_misfit(&mut self, map: impl Fn(Error) -> Error) {
        if let UnreadableKind::Misfit(error) = &mut self.kind
            && let Error::Catalog(mapped) = map(error.clone().into())
        {
            *error = mapped;
        }
    }

    /// Returns the error about a conversion that needs this leaf. `name` is the name of the leaf in the file.
    pub fn error(&self, name: &str) -> Error {
        let file = self.file.display();
        let quoted = if name.is_empty() { String::from("the pickled object") } else { format!("`{name}`") };
        match &self.kind {
            UnreadableKind::Tensor(what) => Error::unsupported(
                format!("{file}: cannot read {quoted}: it is {what}"),
                "leave this tensor out with options::exclude, or convert it before saving: dtshard reads dense tensors, but \
                 not quantized, sparse or nested ones",
            ),
            UnreadableKind::Object(symbol) => Error::unsupported(
                format!("{file}: {quoted} needs the Python object `{symbol}`, which is not known to be plain data"),
                "leave this object out with options::exclude, or leave out all such objects with options::drop_unknown: \
                 dtshard never runs code from a pickle",
            ),
            UnreadableKind::Misfit(error) => error.clone().into(),
            UnreadableKind::UnknownLayout { what, hint } => Error::unsupported(what, hint),
        }
    }
}
