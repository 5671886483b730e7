//! Decides whether the name in a node is allowed, and for which use. No other module makes this decision.
//!
//! Invariant: every returned name is on a list in [`super::symbols`], and the list allows this use of the name.

use super::Ref;
use super::decode_error::DecodeError;
use super::known;
use super::symbols::{self, Use};
use crate::value::Symbol;

pub(super) enum ClassDecision {
    /// The name of a class inside another class, as a value. Protocol 2 writes it as a call of `getattr`.
    Bare(Symbol),
    OrderedDict,
    /// A known call, which is decoded to a separate variant of `Value`.
    Known(Symbol),
    /// A call or an object of a name on the inert list, which is kept as its name, arguments and state.
    Inert(Symbol),
}

/// Decides whether a call, an object or a persistent id is allowed.
pub(super) fn of_made(r: Ref<'_>) -> Result<ClassDecision, DecodeError> {
    let Some(callee) = r.callee() else {
        return Err(DecodeError::malformed("a storage outside of a tensor"));
    };
    if r.symbol().is_some() {
        return of_bare(r).map(ClassDecision::Bare);
    }
    let Some((module, name)) = callee.symbol() else {
        return Err(DecodeError::forbidden(blame(callee)));
    };
    let symbol = Symbol::new(module, &name);
    match symbols::inert(module, &name) {
        _ if !r.is_new() && (module, &*name) == ("collections", "OrderedDict") => Ok(ClassDecision::OrderedDict),
        _ if !r.is_new() && known::is_known(module, &name) => Ok(ClassDecision::Known(symbol)),
        Some(Use::Class) => Ok(ClassDecision::Inert(symbol)),
        Some(Use::Function) if !r.is_new() => Ok(ClassDecision::Inert(symbol)),
        _ => Err(DecodeError::forbidden(symbol.to_string())),
    }
}

/// Decides whether a name may be a value without a call.
pub(super) fn of_bare(r: Ref<'_>) -> Result<Symbol, DecodeError> {
    match r.symbol() {
        Some((module, name)) if symbols::inert(module, &name).is_some_and(Use::bare) => Ok(Symbol::new(module, &name)),
        _ => Err(DecodeError::forbidden(blame(r))),
    }
}

/// Returns the name to show in an error about a call. If the callee is itself a call, the callee of that call is used,
/// for a few levels.
fn blame(mut r: Ref<'_>) -> String {
    for _ in 0..8 {
        match (r.symbol(), r.callee()) {
            (Some((module, name)), _) => return format!("{module}.{name}"),
            (None, Some(callee)) => r = callee,
            (None, None) => break,
        }
    }
    format!("a call of a {}", r.describe())
}
