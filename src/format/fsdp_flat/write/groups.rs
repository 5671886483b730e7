//! Maps the parameter groups of the source's optimizer to the parameter groups of the target's optimizer.
//!
//! The source identifies parameters by name or by number, as `optimizer.state_dict()` does. The target's optimizer
//! updates parameters (with `use_orig_params`) or flat parameters. Each updated parameter or flat parameter is in
//! exactly one group.

use std::collections::{HashMap, HashSet};

use super::params::ParameterNames;
use super::plan::{FlatPlan, ParameterIndex, TrainedParameter};
use crate::catalog::optimizer::{GROUPS, PARAM_NAMES, PARAMS, STATE};
use crate::catalog::owner::numbered_parameters;
use crate::catalog::path::key_text;
use crate::catalog::{Dict, Fqn, Path, Value};
use crate::error::{Error, Result};

/// A parameter or flat parameter that the target's optimizer updates and numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupMember {
    Parameter(ParameterIndex),
    /// The flat parameter of a unit.
    Unit(usize),
    /// A parameter outside all units, as an index of [`FlatPlan::outside`].
    Outside(usize),
}

impl GroupMember {
    /// Returns the name of the parameter, or the key of the flat parameter.
    pub fn name(self, plan: &FlatPlan<'_>) -> Fqn {
        match self {
            Self::Parameter(at) => plan.param(at).fqn.clone(),
            Self::Unit(unit) => plan.layout.units[unit].key(),
            Self::Outside(index) => plan.outside[index].clone(),
        }
    }
}

impl From<TrainedParameter> for GroupMember {
    fn from(at: TrainedParameter) -> Self {
        match at {
            TrainedParameter::InUnit(at) => Self::Parameter(at),
            TrainedParameter::Outside(index) => Self::Outside(index),
        }
    }
}

/// The optimizer in the source: its parameter groups, and its state for each parameter.
pub struct SourceOptimizer<'v> {
    /// Path of the optimizer, for messages.
    path: &'v Path,
    groups: Vec<(&'v Dict, Vec<TrainedParameter>)>,
    group_of: HashMap<TrainedParameter, usize>,
    pub states: HashMap<TrainedParameter, &'v Dict>,
}

impl<'v> SourceOptimizer<'v> {
    /// Reads optimizer state and resolves its names or numbers to parameters.
    pub fn read(dict: &'v Dict, path: &'v Path, names: &ParameterNames<'_>, plan: &FlatPlan<'_>) -> Result<Self> {
        let stored = match dict.get(STATE) {
            Some(Value::Dict(stored)) => stored.entries.as_slice(),
            _ => &[],
        };
        let listed = match dict.get(GROUPS) {
            Some(Value::List(listed)) => listed.as_slice(),
            _ => &[],
        };
        let by_number = OptimizerNumbers::new(dict, stored, listed, names, plan);
        let parameter = |key: &Value| match key {
            Value::Int(number) => by_number.get(path, *number),
            key => names
                .find_trained(&key_text(key))
                .ok_or_else(|| unknown_parameter_error(path, &format!("`{}`", key_text(key)))),
        };
        let mut groups = Vec::with_capacity(listed.len());
        let mut group_of = HashMap::new();
        for (index, group) in listed.iter().enumerate() {
            let members = group.as_dict().and_then(|options| Some((options, options.get(PARAMS)?)));
            let Some((options, Value::List(members))) = members else {
                return Err(unreadable_error(path, "a parameter group that has no list of params"));
            };
            let members = members.iter().map(parameter).collect::<Result<Vec<TrainedParameter>>>()?;
            for at in &members {
                if group_of.insert(*at, index).is_some() {
                    return Err(unreadable_error(
                        path,
                        &format!("`{}` listed twice in its parameter groups", plan.trained_name(*at)),
                    ));
                }
            }
            groups.push((options, members));
        }
        let mut states = HashMap::new();
        for (key, value) in stored {
            let at = parameter(key)?;
            let fqn = plan.trained_name(at);
            let Value::Dict(state) = value else {
                return Err(unreadable_error(path, &format!("state of `{fqn}` that is not a dict")));
            };
            if !group_of.contains_key(&at) {
                return Err(unreadable_error(path, &format!("state of `{fqn}`, which is in no parameter group")));
            }
            if states.insert(at, state).is_some() {
                return Err(unreadable_error(path, &format!("state of `{fqn}` under two of its names")));
            }
        }
        Ok(Self { path, groups, group_of, states })
    }

    /// Returns the parameter groups of the target's optimizer: the groups in the layout, or the groups of the source's
    /// optimizer if the layout has no groups.
    pub fn target_groups(
        &self,
        names: &ParameterNames<'_>,
        plan: &FlatPlan<'_>,
    ) -> Result<Vec<(&'v Dict, Vec<GroupMember>)>> {
        let layout = plan.layout;
        let Some(listed) = &layout.optimizer else {
            return if layout.use_orig_params {
                let members = |params: &Vec<TrainedParameter>| params.iter().copied().map(GroupMember::from).collect();
                Ok(self.groups.iter().map(|(options, params)| (*options, members(params))).collect())
            } else {
                self.unit_groups(names, plan)
            };
        };
        let mut seen = HashSet::new();
        let mut groups = Vec::with_capacity(listed.len());
        for (index, list) in listed.iter().enumerate() {
            let mut members = Vec::with_capacity(list.len());
            let mut params = Vec::new();
            for fqn in list {
                let member = if layout.use_orig_params {
                    names.find(fqn.as_str()).map(GroupMember::Parameter)
                } else {
                    names.find_unit(fqn.as_str()).map(GroupMember::Unit)
                };
                let member = member.or_else(|| names.find_outside(fqn.as_str()).map(GroupMember::Outside));
                let Some(member) = member.filter(|member| seen.insert(*member)) else {
                    let kind = if layout.use_orig_params { "a parameter" } else { "a flat parameter" };
                    return Err(Error::unsupported(
                        format!(
                            "the optimizer of the flat layout: expected every entry to be {kind} that is listed once, \
                             found `{fqn}`"
                        ),
                        "list names of parameters if use_orig_params is true, otherwise keys of flat parameters",
                    ));
                };
                params.extend(member_parameters(member, plan));
                members.push(member);
            }
            groups.push((self.common_options(index, &params, plan)?, members));
        }
        let listed: HashSet<TrainedParameter> =
            seen.into_iter().flat_map(|member| member_parameters(member, plan)).collect();
        let all = self.groups.iter().flat_map(|(_, params)| params);
        match all.copied().find(|at| !listed.contains(at)) {
            None => Ok(groups),
            Some(at) => Err(self.unsupported_error(
                format!("`{}` is not in `optimizer` of the flat layout", plan.trained_name(at)),
                "list everything that the optimizer updates, or remove `optimizer` from the layout",
            )),
        }
    }

    /// Returns, for each parameter group of the source, a group for the target: the flat parameters of the units whose
    /// parameters are in the source's group, and the parameters of the source's group that are outside all units. The
    /// members of a group are in the order in which
    /// [`group_of_units`](crate::catalog::flat::FlatLayout::group_of_units) returns them.
    fn unit_groups(
        &self,
        names: &ParameterNames<'_>,
        plan: &FlatPlan<'_>,
    ) -> Result<Vec<(&'v Dict, Vec<GroupMember>)>> {
        for (unit, known) in plan.layout.units.iter().enumerate() {
            let params: Vec<ParameterIndex> = unit_parameters(unit, plan);
            let group = |at: &ParameterIndex| self.group_of.get(&TrainedParameter::InUnit(*at)).copied();
            let Some(first) = params.first() else { continue };
            if let Some(other) = params.iter().find(|at| group(at) != group(first)) {
                let place = |at: &ParameterIndex| {
                    group(at).map_or(String::from("in none"), |group| format!("in group {group}"))
                };
                return Err(self.unsupported_error(
                    format!(
                        "{}: `{}` is {}, `{}` {}, but a flat parameter belongs to one parameter group",
                        known.describe(),
                        plan.param(*first).fqn,
                        place(first),
                        plan.param(*other).fqn,
                        place(other)
                    ),
                    "leave the optimizer out with options::exclude; `flatten` can keep the state of each parameter (options::use_orig_params)",
                ));
            }
        }
        let member = |name: &Fqn| {
            let unit = names.find_unit(name.as_str()).map(GroupMember::Unit);
            unit.or_else(|| names.find_outside(name.as_str()).map(GroupMember::Outside))
        };
        let members = |params: &Vec<TrainedParameter>| {
            let own: Vec<Fqn> = params.iter().map(|at| plan.trained_name(*at).clone()).collect();
            plan.layout.group_of_units(&own).iter().filter_map(member).collect()
        };
        Ok(self.groups.iter().map(|(options, params)| (*options, members(params))).collect())
    }

    /// Returns the options for a parameter group of the layout. All parameters of the group must have equal options in
    /// the source. An empty group gets the options of the source's group with the same index.
    fn common_options(&self, index: usize, params: &[TrainedParameter], plan: &FlatPlan<'_>) -> Result<&'v Dict> {
        let Some(first) = params.first() else {
            let options = self.groups.get(index).map(|(options, _)| *options);
            return options.ok_or_else(|| {
                self.unsupported_error(
                    format!("the flat layout has an empty parameter group {index}"),
                    "remove this group from `optimizer` of the flat layout",
                )
            });
        };
        let group = |at: &TrainedParameter| {
            self.group_of.get(at).copied().ok_or_else(|| {
                self.unsupported_error(
                    format!("`{}` is in no parameter group", plan.trained_name(*at)),
                    "in the flat layout, list only parameters that the optimizer of SRC updates, or remove `optimizer` from the layout",
                )
            })
        };
        let own = group(first)?;
        for at in params {
            let other = group(at)?;
            if other != own && !same_options(self.groups[own].0, self.groups[other].0) {
                return Err(self.unsupported_error(
                    format!(
                        "`{}` and `{}` are in one parameter group of the flat layout, but have different options in SRC",
                        plan.trained_name(*first),
                        plan.trained_name(*at)
                    ),
                    "list the groups of the job in `optimizer` of the flat layout",
                ));
            }
        }
        Ok(self.groups[own].0)
    }

    /// Returns the error for an optimizer that cannot be converted; the message begins with the path of the optimizer.
    pub fn unsupported_error(&self, what: String, hint: &str) -> Error {
        Error::unsupported(format!("{}{what}", message_prefix(self.path)), hint)
    }
}

/// Maps each parameter id (the number of a parameter in a plain `optimizer.state_dict()`) to its parameter. The map is
/// empty if the state dict identifies parameters by name.
struct OptimizerNumbers(HashMap<i64, TrainedParameter>);

impl OptimizerNumbers {
    fn new(
        dict: &Dict,
        stored: &[(Value, Value)],
        listed: &[Value],
        names: &ParameterNames<'_>,
        plan: &FlatPlan<'_>,
    ) -> Self {
        let is_number = |key: &Value| matches!(key, Value::Int(_));
        let groups: Vec<(&Dict, &[Value])> = (listed.iter())
            .filter_map(|group| match (group.as_dict()?, group.as_dict()?.get(PARAMS)?) {
                (options, Value::List(params)) => Some((options, params.as_slice())),
                _ => None,
            })
            .collect();
        let numbered = stored.iter().any(|(key, _)| is_number(key))
            || groups.iter().any(|(_, params)| params.iter().any(is_number));
        if !numbered {
            return Self(HashMap::new());
        }
        // A name counts only if the layout lists it as a parameter, or in its field `optimizer`; all other tensors are
        // buffers.
        let outside: HashSet<&Fqn> = plan.layout.optimizer.iter().flatten().flatten().collect();
        let is_parameter = |fqn: &Fqn| match names.find_trained(fqn.as_str()) {
            Some(TrainedParameter::InUnit(at)) => plan.param(at).fqn == *fqn,
            Some(TrainedParameter::Outside(_)) => outside.contains(fqn),
            None => false,
        };
        let in_order = || {
            let known = numbered_parameters(plan.source, &Value::Dict(dict.clone()), &is_parameter)?;
            let known = (0..).zip(known);
            Some(known.filter_map(|(number, (fqn, _))| Some((number, names.find_trained(fqn.as_str())?))).collect())
        };
        Self(
            from_param_names(&groups, names)
                .or_else(|| from_layout_groups(&groups, names, plan))
                .or_else(in_order)
                .unwrap_or_default(),
        )
    }

    fn get(&self, path: &Path, number: i64) -> Result<TrainedParameter> {
        self.0.get(&number).copied().ok_or_else(|| unknown_parameter_error(path, &format!("number {number}")))
    }
}

/// Maps parameter ids to parameters by the lists `param_names` of the groups. An optimizer stores these lists if it was
/// created with named parameters. Returns `None` if a list is missing or does not match its group.
fn from_param_names(
    groups: &[(&Dict, &[Value])],
    names: &ParameterNames<'_>,
) -> Option<HashMap<i64, TrainedParameter>> {
    let mut known = HashMap::new();
    for (options, params) in groups {
        let Some(Value::List(own)) = options.get(PARAM_NAMES) else { return None };
        if own.len() != params.len() {
            return None;
        }
        for (number, name) in params.iter().zip(own) {
            known.insert(number.as_i64()?, names.find_trained(name.as_str()?)?);
        }
    }
    Some(known)
}

/// Maps parameter ids to parameters by the parameter groups of a layout with `use_orig_params`. Each group of the
/// layout must have as many parameters as the group of the source with the same index; otherwise returns `None`. Also
/// returns `None` for a single group: this group holds all parameters, and the caller can confirm their order by their
/// shapes.
fn from_layout_groups(
    groups: &[(&Dict, &[Value])],
    names: &ParameterNames<'_>,
    plan: &FlatPlan<'_>,
) -> Option<HashMap<i64, TrainedParameter>> {
    let listed = plan.layout.optimizer.as_ref().filter(|_| plan.layout.use_orig_params && groups.len() > 1)?;
    let sizes = groups.iter().map(|(_, params)| params.len());
    if !sizes.eq(listed.iter().map(Vec::len)) {
        return None;
    }
    let pairs = groups.iter().flat_map(|(_, params)| *params).zip(listed.iter().flatten());
    pairs.map(|(number, fqn)| Some((number.as_i64()?, names.find_trained(fqn.as_str())?))).collect()
}

/// Returns the parameters of a group member: the member itself, or all parameters in it if it is a flat parameter.
pub fn member_parameters(member: GroupMember, plan: &FlatPlan<'_>) -> Vec<TrainedParameter> {
    match member {
        GroupMember::Parameter(at) => vec![TrainedParameter::InUnit(at)],
        GroupMember::Unit(unit) => unit_parameters(unit, plan).into_iter().map(TrainedParameter::InUnit).collect(),
        GroupMember::Outside(index) => vec![TrainedParameter::Outside(index)],
    }
}

/// Returns the parameters in the flat parameter of a unit.
pub fn unit_parameters(unit: usize, plan: &FlatPlan<'_>) -> Vec<ParameterIndex> {
    (0..plan.layout.units[unit].params.len()).map(|param| ParameterIndex { unit, param }).collect()
}

/// Returns whether two parameter groups have equal options, such as the learning rate. The lists of parameters are
/// ignored.
pub fn same_options(left: &Dict, right: &Dict) -> bool {
    let options = |dict: &Dict| {
        let is_option = |key: &Value| !matches!(key.as_str(), Some(PARAMS | PARAM_NAMES));
        let mut options = dict.clone();
        options.entries.retain(|(key, _)| is_option(key));
        options
    };
    options(left) == options(right)
}

/// Returns the beginning of a message: the path and a colon, or an empty string if the path is empty.
pub fn message_prefix(path: &Path) -> String {
    if path.0.is_empty() { String::new() } else { format!("{path}: ") }
}

/// Returns the error for state of a parameter that is not in the flat layout.
pub fn unknown_parameter_error(path: &Path, name: &str) -> Error {
    Error::unsupported(
        format!(
            "{}the optimizer has state of {name}, which is not a parameter of the flat layout",
            message_prefix(path)
        ),
        "give the flat layout of this model; if optimizer.state_dict() has numbers, name the buffers with \
         options::buffers PATTERN, and list several parameter groups in the `optimizer` of a flat layout with \
         use_orig_params",
    )
}

fn unreadable_error(path: &Path, what: &str) -> Error {
    Error::unsupported(
        format!("{}cannot flatten an optimizer with {what}", message_prefix(path)),
        "leave the optimizer out with options::exclude",
    )
}
