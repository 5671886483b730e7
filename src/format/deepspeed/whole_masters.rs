//! The master weights of ZeRO stage 0 with 16-bit parameters: whole tensors in the order of the optimizer, without names. A
//! master weight belongs to the parameter of the module that has its shape and its rounded values.
//!
//! Source: `state_dict` in `deepspeed/runtime/fp16/unfused_optimizer.py`.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use indexmap::IndexMap;

use super::bytes::{BLOCK, read, rounded};
use super::fields::Fields;
use super::folder::{leftover, refused};
use super::model::{ModelStates, StoredValue};
use crate::catalog::optimizer::{GROUPS, PARAMS, STATE};
use crate::catalog::{Dict, Dtype, Value, contiguous_strides};
use crate::error::{Error, Result};
use crate::format::torch::View;
use crate::layout::Dims;
use crate::name_list::{FEW, short_list};
use crate::quantity::count;
use crate::storage::Files;

/// The key of the master weights: for each parameter group a list of tensors.
const MASTERS: &str = "fp32_groups";
/// The key of the optimizer's own state dict.
const OWN: &str = "optimizer_state_dict";

/// The number of elements at the beginning of a tensor that are compared first.
const COMPARED: u64 = 64;

/// A parameter of the optimizer.
pub struct WholeMaster<'a> {
    pub name: &'a str,
    pub master: &'a View,
    /// The state of the parameter; `None` if the optimizer has not made a step yet.
    pub state: Option<&'a Value>,
}

/// A parameter group of the optimizer.
pub struct WholeGroup<'a> {
    pub params: Vec<WholeMaster<'a>>,
    pub options: &'a Dict,
}

/// The shape of a tensor, with the first elements in the dtype of the module.
type Likeness = (Dims, Dtype, Vec<u64>);

/// The names of parameters that are alike, and the positions (group, index) of master weights that are alike.
#[derive(Default)]
struct Alike<'a> {
    names: Vec<&'a str>,
    masters: Vec<(usize, usize)>,
}

impl<'a> Alike<'a> {
    /// Divides parameters whose first elements are equal by all of their elements.
    fn divide(
        self,
        files: &Files,
        model: &'a ModelStates<'a>,
        masters: &[Vec<&View>],
        dtype: Dtype,
    ) -> Result<Vec<Self>> {
        if self.names.len() == 1 && self.masters.len() == 1 {
            return Ok(vec![self]);
        }
        let mut found: IndexMap<blake3::Hash, Self> = IndexMap::new();
        for name in self.names {
            let StoredValue { fields, value } = model.module[name];
            let view = fields.view(value).expect("a tensor of the module");
            found.entry(digest(files, &fields, view, dtype)?).or_default().names.push(name);
        }
        for (group, index) in self.masters {
            let digest = digest(files, model.first(), masters[group][index], dtype)?;
            found.entry(digest).or_default().masters.push((group, index));
        }
        Ok(found.into_values().collect())
    }
}

/// Returns the BLAKE3 hash of the values of a tensor, rounded to a dtype.
fn digest(files: &Files, fields: &Fields<'_>, view: &View, dtype: Dtype) -> Result<blake3::Hash> {
    let numel: u64 = view.sizes.iter().product();
    let mut hasher = blake3::Hasher::new();
    let mut first = 0;
    while first < numel {
        let end = numel.min(first + BLOCK);
        for bits in values(files, fields, view, first..end, dtype)? {
            hasher.update(&bits.to_le_bytes());
        }
        first = end;
    }
    Ok(hasher.finalize())
}

/// Reads elements of a tensor, and rounds them to a dtype.
fn values(files: &Files, fields: &Fields<'_>, view: &View, elements: Range<u64>, dtype: Dtype) -> Result<Vec<u64>> {
    Ok(rounded(&read(files, fields.file, view, elements)?, view.dtype, dtype))
}

/// Finds the name of each master weight.
///
/// # Errors
/// `Unsupported` if several parameters are alike, so that the name is not known; `Malformed` if no parameter has the rounded
/// values; `Io`.
pub fn find_names<'a>(folder: &Path, files: &Files, model: &'a ModelStates<'a>) -> Result<Vec<WholeGroup<'a>>> {
    let first = model.first();
    let optimizer = first.dict("optimizer")?.expect("the optimizer is a dict");
    let Some(own) = optimizer.dict(OWN)? else {
        return Err(optimizer.wrong(OWN, "the state dict of the optimizer", "none"));
    };
    let masters = views(&optimizer)?;
    let mut alike = parameters(files, model)?;
    // In mixed precision, all parameters of the module have one of the two dtypes.
    let dtypes: Vec<Dtype> =
        [Dtype::Bf16, Dtype::F16].into_iter().filter(|dtype| alike.keys().any(|key| key.1 == *dtype)).collect();
    for (group, views) in masters.iter().enumerate() {
        for (index, view) in views.iter().enumerate() {
            let mut known = None;
            for dtype in &dtypes {
                let key = (view.sizes.clone(), *dtype, values(files, first, view, 0..compared(view), *dtype)?);
                known = known.or_else(|| alike.contains_key(&key).then_some(key));
            }
            let Some(known) = known else {
                let at = format!("optimizer.{MASTERS}[{group}][{index}]");
                let expected = "the shape and the values of a parameter of the module, before rounding";
                let found = format!("shape {:?}, and other values", view.sizes.as_slice());
                return Err(leftover(first.path(), &at, expected, found));
            };
            alike[&known].masters.push((group, index));
        }
    }
    let mut names: Vec<Vec<&str>> = masters.iter().map(|views| vec![""; views.len()]).collect();
    let mut equal = Vec::new();
    for ((_, dtype, _), alike) in alike.into_iter().filter(|(_, alike)| !alike.masters.is_empty()) {
        equal.extend(alike.divide(files, model, &masters, dtype)?);
    }
    for alike in equal.into_iter().filter(|alike| !alike.masters.is_empty()) {
        // Parameters of one group are in the order of the module.
        let is_one_group = alike.masters.iter().all(|(group, _)| *group == alike.masters[0].0);
        if alike.names.len() != alike.masters.len() || !is_one_group {
            return Err(ambiguous(folder, &alike));
        }
        for ((group, index), name) in alike.masters.iter().zip(&alike.names) {
            names[*group][*index] = name;
        }
    }
    let groups = own.list(GROUPS)?;
    if groups.len() != masters.len() {
        let expected = format!("{} ({MASTERS})", count(masters.len(), "group"));
        return Err(own.wrong(GROUPS, expected, count(groups.len(), "group")));
    }
    let state = own.dict(STATE)?;
    let state_of = |number: i64| {
        let found = state.as_ref()?.dict.entries.iter().find(|(key, _)| key.as_i64() == Some(number));
        found.map(|(_, value)| value)
    };
    let mut found = Vec::with_capacity(groups.len());
    for (options, (names, masters)) in groups.iter().zip(names.into_iter().zip(masters)) {
        let (options, numbers) = numbers(&own, options, masters.len())?;
        let params = names.into_iter().zip(masters).zip(numbers);
        let params = params.map(|((name, master), number)| WholeMaster { name, master, state: state_of(number) });
        let params: Vec<WholeMaster<'_>> = params.collect();
        params.iter().try_for_each(|param| check_state(first, param))?;
        found.push(WholeGroup { params, options });
    }
    Ok(found)
}

/// Checks that the state of a parameter has the shape of the parameter, or no dims.
fn check_state(first: &Fields<'_>, param: &WholeMaster<'_>) -> Result<()> {
    for (key, value) in param.state.and_then(Value::as_dict).into_iter().flat_map(|state| &state.entries) {
        let Some(view) = first.view(value) else { continue };
        if !view.sizes.is_empty() && view.sizes != param.master.sizes {
            let at = format!("the optimizer state {key} of `{}`", param.name);
            let expected = format!("shape {:?}, as the parameter", param.master.sizes.as_slice());
            return Err(Error::malformed(first.path(), at, expected, format!("{:?}", view.sizes.as_slice())));
        }
    }
    Ok(())
}

/// Returns the master weights of each group.
fn views<'a>(optimizer: &Fields<'a>) -> Result<Vec<Vec<&'a View>>> {
    let mut found = Vec::new();
    for (index, group) in optimizer.list(MASTERS)?.iter().enumerate() {
        let at = format!("{MASTERS}[{index}]");
        let Value::List(group) = group else {
            return Err(optimizer.wrong(&at, "a list of tensors", group.type_name()));
        };
        let view = |value: &Value| {
            let view = optimizer.view(value).filter(|view| view.dtype == Dtype::F32 && is_dense(view));
            view.ok_or_else(|| optimizer.wrong(&at, "dense tensors of dtype f32", value.type_name()))
        };
        found.push(group.iter().map(view).collect::<Result<_>>()?);
    }
    Ok(found)
}

/// Returns the parameters of the module by their likeness. A tied parameter is listed once, with the first of its names.
fn parameters<'a>(files: &Files, model: &'a ModelStates<'a>) -> Result<IndexMap<Likeness, Alike<'a>>> {
    let mut found: IndexMap<Likeness, Alike<'a>> = IndexMap::new();
    let mut seen = HashSet::new();
    for (name, StoredValue { fields, value }) in &model.module {
        let (Value::Tensor(id), Some(view)) = (value, fields.view(value)) else { continue };
        let is_16_bit = matches!(view.dtype, Dtype::Bf16 | Dtype::F16);
        if !is_16_bit || model.buffers.contains(&&**name) || !is_dense(view) || !seen.insert(*id) {
            continue;
        }
        let bits = values(files, fields, view, 0..compared(view), view.dtype)?;
        found.entry((view.sizes.clone(), view.dtype, bits)).or_default().names.push(name);
    }
    Ok(found)
}

fn compared(view: &View) -> u64 {
    view.sizes.iter().product::<u64>().min(COMPARED)
}

fn is_dense(view: &View) -> bool {
    view.strides == contiguous_strides(&view.sizes)
}

fn ambiguous(folder: &Path, alike: &Alike<'_>) -> Error {
    let kind = format!(
        "of ZeRO stage 0 with 16-bit parameters, whose master weights have no names; {} could be those of {}",
        count(alike.masters.len(), "tensor"),
        short_list(&alike.names, FEW)
    );
    refused(folder, &kind, "read the parameters of the module, without the optimizer, with options::weights module")
}

/// Returns a parameter group and the numbers of its parameters.
fn numbers<'a>(own: &Fields<'a>, group: &'a Value, len: usize) -> Result<(&'a Dict, Vec<i64>)> {
    let params = group.as_dict().and_then(|options| Some((options, options.get(PARAMS)?)));
    if let Some((options, Value::List(params))) = params
        && let Some(numbers) = params.iter().map(Value::as_i64).collect::<Option<Vec<i64>>>()
        && numbers.len() == len
    {
        return Ok((options, numbers));
    }
    Err(own.wrong(
        GROUPS,
        format!("a parameter group with the numbers of {}", count(len, "parameter")),
        "another value",
    ))
}
