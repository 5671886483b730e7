//! The optimizer of ZeRO stage 0: whole tensors in the order of the optimizer, without names.
//!
//! With 16-bit parameters, the optimizer has master weights. A master weight belongs to the parameter of the module that has
//! its shape and its rounded values. With f32 parameters, only the shapes in the optimizer state show which parameter it
//! belongs to.
//!
//! Source: `state_dict` in `deepspeed/runtime/fp16/unfused_optimizer.py`, `split_params_into_different_moe_groups_for_optimizer`
//! in `deepspeed/moe/utils.py`.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use indexmap::IndexMap;

use super::bytes::{BLOCK, read, rounded};
use super::fields::Fields;
use super::folder::{leftover, refused};
use super::model::StoredValue;
use super::optimizer::options_without;
use crate::catalog::optimizer::{GROUPS, PARAMS, STATE};
use crate::catalog::{Dict, Dtype, Value};
use crate::error::{Error, Result};
use crate::format::torch::{RankFile, View};
use crate::layout::Dims;
use crate::layout::flat::StorageOrder;
use crate::name_list::{FEW, short_list};
use crate::quantity::count;
use crate::storage::Files;

/// The key of the master weights: for each parameter group a list of tensors.
pub const MASTERS: &str = "fp32_groups";
/// The key of the optimizer's own state dict, if there are master weights.
pub const OWN: &str = "optimizer_state_dict";
/// The key of a parameter group that has only parameters of experts.
pub const MOE: &str = "moe";
/// The key of the name of a parameter group.
pub const NAME: &str = "name";

/// The number of elements at the beginning of a tensor that are compared first.
const COMPARED: u64 = 64;

/// A parameter of the module, which the optimizer may have.
#[derive(Clone, Copy)]
pub struct Candidate<'a> {
    pub name: &'a str,
    pub stored: StoredValue<'a>,
    pub is_expert: bool,
}

/// A parameter of the optimizer.
#[derive(Clone)]
pub struct WholeMaster<'a> {
    pub name: &'a str,
    /// The file that has the master weight and the state.
    pub file: &'a RankFile,
    /// The master weight; `None` if the parameter of the module has f32 values.
    pub master: Option<&'a View>,
    /// The state of the parameter; `None` if the optimizer has not made a step yet.
    pub state: Option<&'a Value>,
    /// True if several parameters are alike, so that only their order in the module gives the name.
    pub is_named_by_order: bool,
}

/// A parameter group of the optimizer.
pub struct WholeGroup<'a> {
    pub params: Vec<WholeMaster<'a>>,
    pub options: &'a Dict,
}

/// Properties that a parameter of the module and one of the optimizer have in common.
#[derive(PartialEq, Eq, Hash)]
struct Likeness {
    /// False for all parameters if the groups do not say which of them are experts.
    is_expert: bool,
    /// `None` if the optimizer does not show the shapes.
    shape: Option<Dims>,
    /// The order of the elements in the file, which a master weight has from its parameter; `None` if there are no master
    /// weights.
    order: Option<StorageOrder>,
    /// The first elements in the dtype of the module; `None` if there are no master weights.
    values: Option<(Dtype, Vec<u64>)>,
}

/// The parameters of the module that are alike, and the positions (group, index) of parameters of the optimizer that are
/// alike.
#[derive(Default)]
struct Alike<'a> {
    params: Vec<Candidate<'a>>,
    positions: Vec<(usize, usize)>,
}

impl Alike<'_> {
    /// Divides parameters whose first elements are equal by all of their elements.
    fn divide(self, files: &Files, file: &Fields<'_>, masters: &[Vec<&View>], dtype: Dtype) -> Result<Vec<Self>> {
        if self.params.len() == 1 && self.positions.len() == 1 {
            return Ok(vec![self]);
        }
        let mut found: IndexMap<blake3::Hash, Self> = IndexMap::new();
        for param in self.params {
            let StoredValue { fields, value } = param.stored;
            let view = fields.view(value).expect("a tensor of the module");
            found.entry(digest(files, &fields, view, dtype)?).or_default().params.push(param);
        }
        for (group, index) in self.positions {
            let digest = digest(files, file, masters[group][index], dtype)?;
            found.entry(digest).or_default().positions.push((group, index));
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

/// Finds the name of each parameter of an optimizer. `params` has the parameters of the module, in order.
///
/// # Errors
/// `Unsupported` if several parameters are alike, so that the name is not known; `Malformed` if no parameter has the shape or
/// the rounded values; `Io`.
pub fn find_names<'a>(
    folder: &Path,
    files: &Files,
    optimizer: &Fields<'a>,
    params: &[Candidate<'a>],
) -> Result<Vec<WholeGroup<'a>>> {
    let masters = if optimizer.get(MASTERS).is_some() { Some(views(optimizer)?) } else { None };
    let own = if masters.is_some() {
        let own = optimizer.dict(OWN)?;
        own.ok_or_else(|| optimizer.wrong(OWN, "the state dict of the optimizer", "none"))?
    } else {
        *optimizer
    };
    let groups = own.list(GROUPS)?;
    if let Some(masters) = masters.as_ref().filter(|masters| masters.len() != groups.len()) {
        let expected = format!("{} ({MASTERS})", count(masters.len(), "group"));
        return Err(own.wrong(GROUPS, expected, count(groups.len(), "group")));
    }
    let states = own.dict(STATE)?;
    let states = states.iter().flat_map(|states| &states.dict.entries);
    let states: HashMap<i64, &Value> = states.filter_map(|(key, value)| Some((key.as_i64()?, value))).collect();
    let mut found: Vec<WholeGroup<'a>> = Vec::with_capacity(groups.len());
    for (index, group) in groups.iter().enumerate() {
        let (options, numbers) = numbers(&own, group)?;
        let views = masters.as_ref().map(|masters| &masters[index]);
        if let Some(views) = views.filter(|views| views.len() != numbers.len()) {
            let expected = format!("a parameter group with the numbers of {}", count(views.len(), "parameter"));
            return Err(own.wrong(GROUPS, expected, "another value"));
        }
        let master = |index: usize| views.map(|views| views[index]);
        let params = numbers.into_iter().enumerate().map(|(index, number)| WholeMaster {
            name: "",
            file: optimizer.file,
            master: master(index),
            state: states.get(&number).copied(),
            is_named_by_order: false,
        });
        found.push(WholeGroup { params: params.collect(), options });
    }
    let parents: Vec<usize> = (0..found.len()).map(|group| parent(&found, group)).collect();
    for alike in alike(files, optimizer, params, &found, masters.as_deref())? {
        let is_one_group = alike.positions.iter().all(|(group, _)| parents[*group] == parents[alike.positions[0].0]);
        // Parameters of one group are in the order of the module.
        if alike.params.len() != alike.positions.len() || !is_one_group {
            return Err(ambiguous(folder, &alike, masters.is_some()));
        }
        for ((group, index), param) in alike.positions.iter().zip(&alike.params) {
            let own = &mut found[*group].params[*index];
            own.name = param.name;
            own.is_named_by_order = alike.params.len() > 1;
            check_state(optimizer, own, param)?;
        }
    }
    Ok(found)
}

/// Returns the parameters of the module and of the optimizer that are alike, so that each of them belongs to one of the
/// others. Parameters of the module that the optimizer does not have are left out.
fn alike<'a>(
    files: &Files,
    optimizer: &Fields<'a>,
    params: &[Candidate<'a>],
    groups: &[WholeGroup<'a>],
    masters: Option<&[Vec<&View>]>,
) -> Result<Vec<Alike<'a>>> {
    let knows_experts = groups.iter().any(is_moe);
    let shapes = |param: &WholeMaster<'a>| Some(&param.master.or_else(|| moment(optimizer, param.state))?.sizes);
    let knows_shapes = groups.iter().flat_map(|group| &group.params).all(|param| shapes(param).is_some());
    let mut found: IndexMap<Likeness, Alike<'a>> = IndexMap::new();
    let mut seen = HashSet::new();
    for param in params {
        let StoredValue { fields, value } = param.stored;
        let Some(view) = fields.view(value).filter(|view| view.dtype.is_float()) else { continue };
        let order = masters.and_then(|_| order(view));
        let is_rounded = matches!(view.dtype, Dtype::Bf16 | Dtype::F16) && order.is_some();
        // A tied parameter is listed once, with the first of its names.
        if masters.is_some() && !is_rounded || !seen.insert(param.stored.tensor()) {
            continue;
        }
        let values = match masters {
            None => None,
            Some(_) => Some((view.dtype, values(files, &fields, view, 0..compared(view), view.dtype)?)),
        };
        let is_expert = knows_experts && param.is_expert;
        let likeness = Likeness { is_expert, shape: knows_shapes.then(|| view.sizes.clone()), order, values };
        found.entry(likeness).or_default().params.push(*param);
    }
    // In mixed precision, all parameters of the module have one of the two dtypes.
    let dtype_of = |likeness: &Likeness| likeness.values.as_ref().map(|(dtype, _)| *dtype);
    let dtypes: Vec<Dtype> = [Dtype::Bf16, Dtype::F16]
        .into_iter()
        .filter(|dtype| found.keys().any(|likeness| dtype_of(likeness) == Some(*dtype)))
        .collect();
    for (number, group) in groups.iter().enumerate() {
        for (index, param) in group.params.iter().enumerate() {
            let is_expert = knows_experts && is_moe(group);
            let shape = shapes(param).filter(|_| knows_shapes).cloned();
            let mut known = None;
            match param.master {
                None => known = Some(Likeness { is_expert, shape, order: None, values: None }),
                Some(view) => {
                    for dtype in &dtypes {
                        let values = (*dtype, values(files, optimizer, view, 0..compared(view), *dtype)?);
                        let likeness =
                            Likeness { is_expert, shape: shape.clone(), order: order(view), values: Some(values) };
                        known = known.or_else(|| found.contains_key(&likeness).then_some(likeness));
                    }
                }
            }
            let Some(alike) = known.and_then(|likeness| found.get_mut(&likeness)) else {
                let kind = if is_expert { "parameter of an expert" } else { "parameter" };
                let shape = shapes(param).map_or_else(|| String::from("none"), |shape| format!("shape {shape:?}"));
                let (at, expected, found) = if masters.is_some() {
                    let expected = format!("the shape and the values of a {kind} of the module, before rounding");
                    (format!("{MASTERS}[{number}][{index}]"), expected, format!("{shape}, and other values"))
                } else {
                    let expected = format!("the shape of a {kind} of the module");
                    (format!("{STATE} of parameter {index} of group {number}"), expected, shape)
                };
                return Err(leftover(optimizer.path(), &optimizer.name(&at), expected, found));
            };
            alike.positions.push((number, index));
        }
    }
    found.retain(|_, alike| !alike.positions.is_empty());
    let Some(masters) = masters else { return Ok(found.into_values().collect()) };
    let mut equal = Vec::new();
    for (likeness, alike) in found {
        let dtype = dtype_of(&likeness).expect("parameters with master weights have values");
        equal.extend(alike.divide(files, optimizer, masters, dtype)?);
    }
    equal.retain(|alike| !alike.positions.is_empty());
    Ok(equal)
}

/// Returns whether a group has only parameters of experts.
fn is_moe(group: &WholeGroup<'_>) -> bool {
    group.options.get(MOE) == Some(&Value::Bool(true))
}

/// Returns the parameter group of the job from which DeepSpeed has made a group. DeepSpeed moves the parameters of experts to
/// further groups with the same options, and divides large groups of experts.
fn parent(groups: &[WholeGroup<'_>], group: usize) -> usize {
    let options = |group: usize| options_without(groups[group].options, &[PARAMS, NAME, MOE]);
    if !is_moe(&groups[group]) {
        return group;
    }
    let own = options(group);
    let mut parents =
        (0..groups.len()).filter(|other| !is_moe(&groups[*other]) && options(*other).same_but_tensors(&own));
    match (parents.next(), parents.next()) {
        (Some(parent), None) => parent,
        _ => group,
    }
}

/// Returns a tensor of the state that has the shape of the parameter; `None` if the state has only numbers.
fn moment<'a>(fields: &Fields<'a>, state: Option<&Value>) -> Option<&'a View> {
    let entries = &state?.as_dict()?.entries;
    entries.iter().filter_map(|(_, value)| fields.view(value)).find(|view| !view.sizes.is_empty())
}

/// Checks that the state of a parameter has the shape of the parameter, or is factored.
fn check_state(optimizer: &Fields<'_>, own: &WholeMaster<'_>, param: &Candidate<'_>) -> Result<()> {
    let StoredValue { fields, value } = param.stored;
    let shape = &fields.view(value).expect("a tensor of the module").sizes;
    for (key, value) in own.state.and_then(Value::as_dict).into_iter().flat_map(|state| &state.entries) {
        let Some(view) = optimizer.view(value) else { continue };
        if !is_of_shape(&view.sizes, shape) {
            let at = format!("the optimizer state {key} of `{}`", own.name);
            let expected = format!("shape {:?} as the parameter, or fewer of its dims", shape.as_slice());
            return Err(Error::malformed(optimizer.path(), at, expected, format!("{:?}", view.sizes.as_slice())));
        }
    }
    Ok(())
}

/// Returns whether optimizer state of a parameter can have these sizes. A factored state, as that of Adafactor, lacks dims of the
/// parameter, or has the size 1 there.
fn is_of_shape(sizes: &[u64], shape: &[u64]) -> bool {
    let mut rest = shape.iter();
    sizes.iter().filter(|size| **size != 1).all(|size| rest.any(|of_param| of_param == size))
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
            let view = optimizer.view(value).filter(|view| view.dtype == Dtype::F32 && order(view).is_some());
            view.ok_or_else(|| optimizer.wrong(&at, "tensors of dtype f32 without gaps", value.type_name()))
        };
        found.push(group.iter().map(view).collect::<Result<_>>()?);
    }
    Ok(found)
}

fn compared(view: &View) -> u64 {
    view.sizes.iter().product::<u64>().min(COMPARED)
}

/// Returns the order of the elements in the file, or `None` if they have gaps or overlap.
fn order(view: &View) -> Option<StorageOrder> {
    if view.sizes.contains(&0) {
        return Some(StorageOrder::row_major(view.sizes.len()));
    }
    StorageOrder::of_strides(&view.sizes, &view.strides)
}

/// Returns a note if the order of the module gives names, because several parameters are alike.
pub fn note_of_order(folder: &Path, groups: &[WholeGroup<'_>]) -> Option<String> {
    let params = || groups.iter().flat_map(|group| &group.params);
    let by_order: Vec<&str> = params().filter(|param| param.is_named_by_order).map(|param| param.name).collect();
    let alike = if params().any(|param| param.master.is_some()) { "shapes and values" } else { "shapes" };
    (!by_order.is_empty()).then(|| {
        format!(
            "{}: optimizer states of ZeRO stage 0 have no names: {} of {} belong to parameters of equal {alike} ({}), and are \
             named in the order of the module: this is right only if the optimizer had the parameters in this order",
            folder.display(),
            by_order.len(),
            params().count(),
            short_list(&by_order, FEW)
        )
    })
}

fn ambiguous(folder: &Path, alike: &Alike<'_>, has_masters: bool) -> Error {
    let without_names = if has_masters {
        "with 16-bit parameters, whose master weights"
    } else {
        "with experts, whose optimizer states"
    };
    let names: Vec<&str> = alike.params.iter().map(|param| param.name).collect();
    let kind = format!(
        "of ZeRO stage 0 {without_names} have no names; {} could be those of {}",
        count(alike.positions.len(), "tensor"),
        short_list(&names, FEW)
    );
    refused(folder, &kind, "read the parameters of the module, without the optimizer, with options::weights module")
}

/// Returns a parameter group and the numbers of its parameters.
fn numbers<'a>(own: &Fields<'a>, group: &'a Value) -> Result<(&'a Dict, Vec<i64>)> {
    let params = group.as_dict().and_then(|options| Some((options, options.get(PARAMS)?)));
    if let Some((options, Value::List(params))) = params
        && let Some(numbers) = params.iter().map(Value::as_i64).collect::<Option<Vec<i64>>>()
    {
        return Ok((options, numbers));
    }
    Err(own.wrong(GROUPS, "a parameter group with the numbers of its parameters", "another value"))
}
