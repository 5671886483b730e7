//! Finds the parameters of a flat layout among the tensors of a model.

use std::collections::HashMap;

use super::plan::{Padding, ParameterIndex, TrainedParameter};
use crate::catalog::flat::{FLAT_PARAM, FlatLayout};
use crate::catalog::{Catalog, Dtype, Fqn, TensorEntry, TensorId};
use crate::error::{Error, Result};
use crate::name_list::{FEW, short_list_of_counted};

/// Finds the parameters of a flat layout by name.
pub struct ParameterNames<'a> {
    /// The parameter with each name. A tied parameter has several names in this map.
    params: HashMap<&'a str, ParameterIndex>,
    /// The additional names of each tied parameter: all names except the one in the unit's list of parameters.
    aliases: HashMap<ParameterIndex, Vec<&'a str>>,
    units: HashMap<Box<str>, usize>,
    /// The index of each name in [`FlatPlan::outside`](super::plan::FlatPlan::outside).
    outside: HashMap<Fqn, usize>,
}

impl<'a> ParameterNames<'a> {
    /// Returns the table of all parameter names of a layout, and of the names `outside` all units.
    pub fn new(layout: &'a FlatLayout, outside: &[Fqn]) -> Self {
        let mut params = HashMap::new();
        for (unit, flat) in layout.units.iter().enumerate() {
            for (param, known) in flat.params.iter().enumerate() {
                params.insert(known.fqn.as_str(), ParameterIndex { unit, param });
            }
        }
        let mut aliases: HashMap<ParameterIndex, Vec<&str>> = HashMap::new();
        for shared in layout.units.iter().flat_map(|unit| &unit.shared) {
            if let Some(at) = params.get(shared.with.as_str()).copied() {
                params.insert(shared.fqn.as_str(), at);
                aliases.entry(at).or_default().push(shared.fqn.as_str());
            }
        }
        let units = layout.units.iter().enumerate().map(|(unit, flat)| (flat.key().as_str().into(), unit)).collect();
        let outside = outside.iter().cloned().zip(0..).collect();
        Self { params, aliases, units, outside }
    }

    /// Returns the parameter with this name. A tied parameter is returned for each of its names.
    pub fn find(&self, fqn: &str) -> Option<ParameterIndex> {
        self.params.get(fqn).copied()
    }

    /// Returns the parameter with this name, in a unit or outside all units.
    pub fn find_trained(&self, fqn: &str) -> Option<TrainedParameter> {
        let in_unit = self.find(fqn).map(TrainedParameter::InUnit);
        in_unit.or_else(|| self.find_outside(fqn).map(TrainedParameter::Outside))
    }

    /// Returns the index of a parameter outside all units.
    pub fn find_outside(&self, fqn: &str) -> Option<usize> {
        self.outside.get(&Fqn::from(fqn)).copied()
    }

    /// Returns the index of the unit whose flat parameter has this name in the state dict, such as
    /// `layers.0._flat_param`.
    pub fn find_unit(&self, key: &str) -> Option<usize> {
        self.units.get(key).copied()
    }

    fn aliases(&self, at: ParameterIndex) -> &[&'a str] {
        self.aliases.get(&at).map_or(&[], Vec::as_slice)
    }
}

/// The source tensors of a unit's parameters, in the order of the layout, and their common dtype.
pub struct UnitTensors {
    pub dtype: Dtype,
    pub tensors: Vec<TensorId>,
}

/// The source tensors of all parameters of a layout.
pub struct FoundParameters {
    pub units: Vec<UnitTensors>,
    /// Pairs of tied tensors. The first is written; the second is not, so its values must equal those of the first.
    pub ties: Vec<(TensorId, TensorId)>,
}

/// Finds the parameters of each unit among the tensors of a model.
///
/// # Errors
/// `Unsupported` if parameters are missing or have other shapes, if dtypes differ within a unit, or if FSDP1 does not
/// flatten the dtype.
pub fn find(
    source: &Catalog,
    layout: &FlatLayout,
    names: &ParameterNames<'_>,
    model: &HashMap<String, TensorId>,
) -> Result<FoundParameters> {
    let mut units = Vec::with_capacity(layout.units.len());
    let mut ties = Vec::new();
    let mut missing = Vec::new();
    for (index, unit) in layout.units.iter().enumerate() {
        let mut tensors = Vec::with_capacity(unit.params.len());
        for (param, known) in unit.params.iter().enumerate() {
            let at = ParameterIndex { unit: index, param };
            let found = std::iter::once(known.fqn.as_str())
                .chain(names.aliases(at).iter().copied())
                .filter_map(|fqn| Some((fqn, *model.get(fqn)?)));
            let found: Vec<(&str, TensorId)> = found.collect();
            let Some(&(_, kept)) = found.first() else {
                missing.push(known.fqn.as_str());
                continue;
            };
            for &(fqn, id) in &found {
                let entry = source.tensor(id);
                if entry.shape != known.shape {
                    return Err(Error::unsupported(
                        format!(
                            "{fqn}: expected the shape {:?} of the flat layout, found {:?}",
                            known.shape.as_slice(),
                            entry.shape.as_slice()
                        ),
                        "give the flat layout of this model",
                    ));
                }
                if id != kept {
                    ties.push((kept, id));
                }
            }
            tensors.push(kept);
        }
        units.push(tensors);
    }
    if !missing.is_empty() {
        return Err(not_in_model(&missing, model));
    }
    let dtyped = units.into_iter().enumerate().map(|(index, tensors)| {
        let entries = tensors.iter().map(|id| source.tensor(*id)).collect::<Vec<_>>();
        let dtype = unit_dtype(layout, index, &entries)?;
        Ok(UnitTensors { dtype, tensors })
    });
    Ok(FoundParameters { units: dtyped.collect::<Result<_>>()?, ties })
}

fn not_in_model(missing: &[&str], model: &HashMap<String, TensorId>) -> Error {
    let what = if missing.len() == 1 { "parameter" } else { "parameters" };
    let wrapped = format!(".{}", missing[0]);
    let hint = if model.keys().any(|name| name.ends_with(FLAT_PARAM)) {
        String::from("SRC has flat parameters; give the flat layout of the job that saved them")
    } else if let Some(found) = model.keys().filter(|name| name.ends_with(&wrapped)).min_by_key(|name| name.len()) {
        let before = found[..=found.len() - wrapped.len()].replace('.', r"\.");
        format!(r"SRC has `{found}`: remove the prefix with options::rename '\b{before}='")
    } else {
        String::from("give the flat layout of this model, with the names in its state dict")
    };
    Error::unsupported(
        format!("the model lacks {} {what} of the flat layout: {}", missing.len(), short_list_of_counted(missing, FEW)),
        hint,
    )
    .naming(missing)
}

/// Returns the common dtype of a unit's parameters.
fn unit_dtype(layout: &FlatLayout, unit: usize, entries: &[&TensorEntry]) -> Result<Dtype> {
    let known = &layout.units[unit];
    // The dtype of a unit without parameters has no effect, because such a unit has no flat parameter.
    let Some(first) = entries.first() else { return Ok(known.dtype.unwrap_or(Dtype::F32)) };
    if let Some((param, other)) = entries.iter().enumerate().find(|(_, entry)| entry.dtype != first.dtype) {
        return Err(Error::unsupported(
            format!(
                "{}: `{}` is {}, `{}` is {}, but a flat parameter has one dtype",
                known.describe(),
                known.params[0].fqn,
                first.dtype,
                known.params[param].fqn,
                other.dtype
            ),
            "cast all parameters to one dtype with options::dtype, or some of them with options::dtype PATTERN=DTYPE",
        ));
    }
    let padded = layout.use_orig_params && Padding::Parameter.element(first.dtype).is_none();
    if !first.dtype.is_float() || padded {
        return Err(Error::unsupported(
            format!(
                "{}: `{}` is {}, but FSDP1 flattens only f64, f32, f16 and bf16 parameters",
                known.describe(),
                known.params[0].fqn,
                first.dtype
            ),
            "cast the parameters with options::dtype; if this tensor is a buffer, remove it from the flat layout",
        ));
    }
    Ok(first.dtype)
}
