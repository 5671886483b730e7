//! The error for flat parameters whose layout is unknown. dtshard never guesses a layout.

use crate::error::Error;

/// The hint of every error about an unknown flat layout.
const HINT: &str = "give options::flat_layout FILE, or options::like CKPT with a checkpoint of the same model: a \
                    torch file has the shapes and the order of parameters, other formats have only the shapes\n    docs/how-to/fsdp1.md has the Python snippet that writes FILE from a live model";

/// Returns the error for an unknown flat layout, with a hint about the options that provide one.
pub fn unknown_layout_error(what: impl Into<String>) -> Error {
    Error::unsupported(what, HINT)
}
