//! Derives the parameter ids that an optimizer will use.
//!
//! `optimizer.state_dict()` identifies parameters by their ids, which are numbers. With `use_orig_params`, the ids
//! follow `model.parameters()`. That order differs from the order of the flat parameters: there, the parameters of the
//! root module come first, even if the root module registers them after its children. In a state dict with parameter
//! names, the names may be in either order.

use std::collections::HashSet;

use crate::catalog::flat::FlatLayout;
use crate::catalog::optimizer::named_groups;
use crate::catalog::{Fqn, Value};
use crate::error::{Error, Result};
use crate::format::fsdp_flat::order;

/// Returns the parameter groups of the optimizer for a layout with `use_orig_params`: the parameters of each group, in
/// the order of their parameter ids. The names come from `state`; `order` is the order of the model, if known. `source`
/// is the flat layout of SRC, because names may also be in the order of its units. Returns `None` if `state` has no
/// parameter names.
///
/// # Errors
/// `Unsupported` if it is not certain which order the optimizer uses.
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
