//! Derives the parameter numbers that an optimizer will use.
//!
//! `optimizer.state_dict()` identifies parameters by number. With `use_orig_params` the numbers follow
//! `model.parameters()`. That order differs from the order within flat parameters, where the root's parameters come
//! first even if the root registers them after its children. A state dict that names parameters may be in either order.

use std::collections::HashSet;

use crate::catalog::flat::FlatLayout;
use crate::catalog::optimizer::named_groups;
use crate::catalog::{Fqn, Value};
use crate::error::{Error, Result};
use crate::format::fsdp_flat::order;

/// Returns the parameter groups of the optimizer for a layout with `use_orig_params`, from the parameter names in a
/// state dict and the order of the model, if known. `source` is the flat layout of SRC: without `use_orig_params`, the state
/// dict has the parameters in the order of its units. Returns `None` if the state dict has no named parameters.
///
/// # Errors
/// `Unsupported` if the order of the names is not the order of the model.
pub fn of_parameters(
    layout: &FlatLayout,
    source: Option<&FlatLayout>,
    state: &Value,
    order: Option<&[Fqn]>,
) -> Result<Option<Vec<Vec<Fqn>>>> {
    if layout.use_orig_params && layout.optimizer.is_some() {
        return Ok(layout.optimizer.clone());
    }
    let Some(mut groups) = named_groups(state) else { return Ok(None) };
    let flattened: Vec<&Fqn> = layout.params().map(|(_, param)| &param.fqn).collect();
    let in_source: Vec<&Fqn> = source.into_iter().flat_map(FlatLayout::params).map(|(_, param)| &param.fqn).collect();
    let in_units: HashSet<&Fqn> = flattened.iter().copied().collect();
    // A state dict counts as sorted if all groups are sorted, because a single group may be sorted by chance. Sorted
    // names are not known to be in the order of the model.
    let are_sorted = groups.iter().all(|group| order::is_sorted(group.iter().map(Fqn::as_str)));
    for group in &mut groups {
        let members: HashSet<&Fqn> = group.iter().collect();
        let own: Vec<&Fqn> = group.iter().filter(|fqn| in_units.contains(fqn)).collect();
        let has_order =
            |names: &[&Fqn]| names.iter().filter(|fqn| members.contains(**fqn)).copied().eq(own.iter().copied());
        let as_flattened = has_order(&flattened);
        let as_in_source = has_order(&in_source);
        let has_outside = group.iter().any(|fqn| !in_units.contains(fqn));
        let registered: Option<Vec<Fqn>> =
            order.map(|order| order.iter().filter(|fqn| members.contains(fqn)).cloned().collect());
        match registered {
            Some(registered) if registered == *group => {}
            Some(registered) if (as_flattened || as_in_source) && registered.len() == group.len() => {
                *group = registered;
            }
            // With one unit, the flat parameter has the order of the model, unless the group has parameters outside the
            // unit.
            None if as_flattened && layout.units.len() == 1 && !has_outside => {}
            None if !as_flattened && !as_in_source && !are_sorted => {}
            _ => {
                return Err(Error::unsupported(
                    "the order in which the optimizer numbers parameters is not known: its state dict has them in \
                     another order than the model",
                    "give an options::flat_layout FILE with an `optimizer`, or options::like CKPT, a torch file of \
                     the same model; or leave the optimizer out with options::series model or options::exclude optim",
                ));
            }
        }
    }
    Ok(Some(groups))
}
