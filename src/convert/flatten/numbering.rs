//! The numbers under which an optimizer will know what it updates.
//!
//! `optimizer.state_dict()` has numbers for names. With `use_orig_params` they count parameters in the order of
//! `model.parameters()`, which is not the order in which they lie in flat parameters: the root's come first there, be
//! they registered behind its children or not. A state dict that names parameters may have them in either order.

use std::collections::HashSet;

use crate::catalog::flat::FlatLayout;
use crate::catalog::optimizer::named_groups;
use crate::catalog::{Fqn, Value};
use crate::error::{Error, Result};
use crate::format::fsdp_flat::order;

/// The optimizer of a layout whose `use_orig_params` is to be true, from the names in a state dict and the order of
/// the model, where one is known.
///
/// # Errors
/// `Unsupported` where the order of the names is not that of the model.
pub fn of_parameters(layout: &FlatLayout, state: &Value, order: Option<&[Fqn]>) -> Result<Option<Vec<Vec<Fqn>>>> {
    if layout.use_orig_params && layout.optimizer.is_some() {
        return Ok(layout.optimizer.clone());
    }
    let Some(mut groups) = named_groups(state) else { return Ok(None) };
    let flattened: Vec<&Fqn> = layout.params().map(|(_, param)| &param.fqn).collect();
    // One alone may be so by chance.
    let are_sorted = groups.iter().all(|group| order::is_sorted(group.iter().map(Fqn::as_str)));
    for group in &mut groups {
        let members: HashSet<&Fqn> = group.iter().collect();
        let as_flattened = flattened.iter().filter(|fqn| members.contains(**fqn)).copied().eq(&*group);
        let registered: Option<Vec<Fqn>> =
            order.map(|order| order.iter().filter(|fqn| members.contains(fqn)).cloned().collect());
        match registered {
            Some(registered) if registered == *group => {}
            Some(registered) if as_flattened && registered.len() == group.len() => *group = registered,
            // One unit has one order.
            None if as_flattened && layout.units.len() == 1 => {}
            None if !as_flattened && !are_sorted => {}
            _ => {
                return Err(Error::unsupported(
                    "the order in which the optimizer numbers parameters is not known: its state dict has them in \
                     another order than the model",
                    "options::flat_layout FILE with an `optimizer` tells it, options::like CKPT a torch file of the same model; or \
                     leave the optimizer out with options::series model or options::exclude optim",
                ));
            }
        }
    }
    Ok(Some(groups))
}
