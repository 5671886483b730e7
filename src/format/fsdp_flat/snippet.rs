//! What to do where nothing tells how a model was laid into flat parameters.

use crate::error::Error;

/// The hint of every error about a flat layout that is not known.
const HINT: &str = "give options::flat_layout FILE, or options::like CKPT: a torch file of the same model tells shapes and order, other \
                    formats tell shapes, and values are ignored\n    docs/how-to/fsdp1.md has the Python snippet that writes FILE from \
                    a live model";

/// Refuse to guess.
#[must_use]
pub fn refuse(what: impl Into<String>) -> Error {
    Error::unsupported(what, HINT)
}
