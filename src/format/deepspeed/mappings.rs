//! The addresses of parameters in the partitions of stages 1 and 2, which each optimizer file lists a second time. They show
//! files that belong to other shapes, or to parameters in another order.
//!
//! Source: `get_hp_fragment_mapping` and `fragment_address` in `deepspeed/utils/tensor_fragment.py`.

use std::collections::HashMap;

use super::experts::global_expert;
use super::fields::Fields;
use super::folder::leftover;
use super::model::ModelStates;
use super::optimizer::{FlatGroup, STATE_DICT};
use crate::catalog::Value;
use crate::error::{Error, Result};
use crate::format::torch::RankFile;

const MAPPINGS: &str = "param_slice_mappings";

/// The number of elements of a parameter in a partition, and the position of the first of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Address {
    numel: u64,
    start: u64,
}

/// Checks that the addresses in each file are those of the groups.
///
/// # Errors
/// `Malformed` that names the file, the parameter, and both addresses.
pub fn check(model: &ModelStates<'_>, files: &[RankFile], groups: &[FlatGroup<'_>]) -> Result<()> {
    // With this setting, DeepSpeed reorders the parameters, and writes the names of the old order.
    if model.zero_setting("round_robin_gradients").is_some_and(|value| matches!(value, Value::Bool(true))) {
        return Ok(());
    }
    let mut listed = Vec::with_capacity(files.len());
    for file in files {
        let Some(fields) = Fields::of_file(file)?.dict(STATE_DICT)? else { return Ok(()) };
        // Stage 3 writes no addresses.
        let Some(Value::List(own)) = fields.get(MAPPINGS) else { return Ok(()) };
        listed.push((fields, own));
    }
    // A group of experts has a vector for each expert-parallel rank, as `optimizer::read` lists them.
    let (mut index, mut rank) = (0, 0);
    for group in groups {
        let ranks = files.len() / group.files.len();
        let mut expected: Vec<HashMap<&str, Address>> = vec![HashMap::new(); group.files.len()];
        for param in &group.partitioned.params {
            for piece in group.partitioned.pieces(param) {
                let address = Address { numel: piece.elements.end - piece.elements.start, start: piece.at };
                expected[piece.partition].insert(param.fqn.as_str(), address);
            }
        }
        let at = format!("{MAPPINGS}[{index}]");
        for ((fields, own), mut expected) in listed.iter().skip(rank).step_by(ranks).zip(expected) {
            let own = own.get(index).and_then(Value::as_dict);
            let Some(own) = own else { return Err(fields.wrong(&at, "the addresses of parameters", "none")) };
            for (name, value) in &own.entries {
                let name = name.as_str().unwrap_or_default();
                let global = Some(ranks).filter(|ranks| *ranks > 1);
                let global = global.and_then(|_| global_expert(&model.experts, name, rank as u64, ranks as u64));
                let (expected, found) = (expected.remove(global.as_deref().unwrap_or(name)), address(value));
                if expected != found || found.is_none() {
                    return Err(wrong(fields, &at, name, expected, found));
                }
            }
            if let Some((name, expected)) = expected.into_iter().min_by_key(|(_, address)| address.start) {
                return Err(wrong(fields, &at, name, Some(expected), None));
            }
        }
        rank = (rank + 1) % ranks;
        index += usize::from(rank == 0);
    }
    Ok(())
}

/// Returns the address in a `fragment_address`.
fn address(value: &Value) -> Option<Address> {
    let Value::Object(object) = value else { return None };
    let state = object.state.as_ref()?.as_dict()?;
    let number = |key| u64::try_from(state.get(key)?.as_i64()?).ok();
    Some(Address { numel: number("numel")?, start: number("start")? })
}

fn wrong(fields: &Fields<'_>, at: &str, name: &str, expected: Option<Address>, found: Option<Address>) -> Error {
    let show = |address: Option<Address>| match address {
        Some(Address { numel, start }) => format!("elements {start} to {}", start.saturating_add(numel)),
        None => String::from("no elements"),
    };
    let expected = format!("{}, as param_shapes of the model file say", show(expected));
    leftover(fields.path(), &format!("{}[{name:?}]", fields.name(at)), expected, show(found))
}
