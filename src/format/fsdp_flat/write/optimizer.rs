//! Optimizer state as `optimizer.state_dict()` of an FSDP1 job has it on each rank.
//!
//! Parameters are known by numbers, in the order of the parameter groups. With `use_orig_params` each has state of its
//! own, of as many elements as the rank holds of it, and none where that is nothing. Without, the optimizer knows flat
//! parameters only: what is as long as a parameter is laid out as the flat parameter is, and everything else must be
//! the same for all parameters in it.
//!
//! Source: `Optimizer.state_dict` in `torch/optim/optimizer.py`, `_flatten_optim_state` in
//! `torch/distributed/fsdp/_optim_utils.py`.

use std::collections::{HashMap, HashSet};

use super::params::Names;
use super::plan::{At, Content, Padding, Plan, Role};
use crate::catalog::path::key_text;
use crate::catalog::{Dict, Path, TensorId, Value, model};
use crate::error::{Error, Result};

const STATE: &str = "state";
const GROUPS: &str = "param_groups";
const PARAMS: &str = "params";
/// The names of parameters, which optimizers of named ones have since 2.6.
const PARAM_NAMES: &str = "param_names";

/// Whether a dict is the state dict of an optimizer. DCP does not keep that it has a state without entries.
pub fn is_optimizer(dict: &Dict) -> bool {
    let Some(Value::List(groups)) = dict.get(GROUPS) else { return false };
    let is_group = |group: &Value| group.as_dict().is_some_and(|options| options.get(PARAMS).is_some());
    groups.iter().all(is_group) && matches!(dict.get(STATE), None | Some(Value::Dict(_)))
}

/// Where each parameter's options are keys of their own, groups and their order are not known any more.
pub fn refuse_flattened(dict: &Dict, path: &Path) -> Result<()> {
    let has =
        |prefix: &str| dict.entries.iter().any(|(key, _)| key.as_str().is_some_and(|key| key.starts_with(prefix)));
    if !(has("state.") && has("param_groups.")) {
        return Ok(());
    }
    Err(Error::unsupported(
        format!(
            "{path}: optimizer state saved with flatten_optimizer_state_dict, which does not tell parameter groups"
        ),
        "leave it out (--exclude), or save it without that option",
    ))
}

/// The state dict, with numbers of items for tensors.
pub fn plan(dict: &Dict, path: &Path, names: &Names<'_>, plan: &mut Plan<'_>) -> Result<Value> {
    let source = SourceOptimizer::read(dict, path, names, plan)?;
    let groups = source.target_groups(names, plan)?;
    let mut states = Vec::new();
    let mut written = Vec::new();
    let mut next = 0;
    for (options, members) in groups {
        let first = next;
        for member in &members {
            let state = match member {
                Member::Parameter(at) => source.parameter_state(*at, plan)?,
                Member::Unit(unit) => source.unit_state(*unit, plan)?,
            };
            let state = state.map(|entries| Value::Dict(Dict { entries, ..Dict::default() }));
            states.extend(state.map(|state| (Value::Int(next), state)));
            next += 1;
        }
        written.push(write_group(options, first..next, &members, plan));
    }
    // As PyTorch orders them.
    let states = Value::Dict(Dict { entries: states, ..Dict::default() });
    let mut entries = vec![(Value::Str(STATE.into()), states), (Value::Str(GROUPS.into()), Value::List(written))];
    let others = dict.entries.iter().filter(|(key, _)| !matches!(key.as_str(), Some(STATE | GROUPS)));
    entries.extend(others.map(|(key, value)| (key.clone(), plan.whole_value(value))));
    Ok(Value::Dict(Dict { kind: dict.kind, entries, attributes: None }))
}

fn write_group(options: &Dict, numbers: std::ops::Range<i64>, members: &[Member], plan: &mut Plan<'_>) -> Value {
    let name = |member: &Member| match member {
        Member::Parameter(at) => plan.param(*at).fqn.to_string(),
        Member::Unit(unit) => plan.layout.units[*unit].key().to_string(),
    };
    let names: Vec<Value> = members.iter().map(|member| Value::Str(name(member))).collect();
    let entries = options.entries.iter().map(|(key, value)| {
        let value = match key.as_str() {
            Some(PARAMS) => Value::List(numbers.clone().map(Value::Int).collect()),
            Some(PARAM_NAMES) => Value::List(names.clone()),
            _ => plan.whole_value(value),
        };
        (key.clone(), value)
    });
    Value::Dict(Dict { kind: options.kind, entries: entries.collect(), attributes: None })
}

/// What the optimizer of the target updates: one number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Member {
    Parameter(At),
    /// The flat parameter of a unit.
    Unit(usize),
}

struct SourceOptimizer<'v> {
    /// For messages.
    path: &'v Path,
    groups: Vec<(&'v Dict, Vec<At>)>,
    group_of: HashMap<At, usize>,
    states: HashMap<At, &'v Dict>,
}

impl<'v> SourceOptimizer<'v> {
    fn read(dict: &'v Dict, path: &'v Path, names: &Names<'_>, plan: &Plan<'_>) -> Result<Self> {
        let stored = match dict.get(STATE) {
            Some(Value::Dict(stored)) => stored.entries.as_slice(),
            _ => &[],
        };
        let listed = match dict.get(GROUPS) {
            Some(Value::List(listed)) => listed.as_slice(),
            _ => &[],
        };
        let by_number = Numbers::new(dict, stored, listed, names, plan);
        let parameter = |key: &Value| match key {
            Value::Int(number) => by_number.get(path, *number),
            key => names.find(&key_text(key)).ok_or_else(|| unknown(path, &key_text(key))),
        };
        let mut groups = Vec::with_capacity(listed.len());
        let mut group_of = HashMap::new();
        for (index, group) in listed.iter().enumerate() {
            let members = group.as_dict().and_then(|options| Some((options, options.get(PARAMS)?)));
            let Some((options, Value::List(members))) = members else {
                return Err(unreadable(path, "a parameter group without a list of params"));
            };
            let members = members.iter().map(parameter).collect::<Result<Vec<At>>>()?;
            for at in &members {
                if group_of.insert(*at, index).is_some() {
                    return Err(unreadable(path, &format!("{} twice in parameter groups", plan.param(*at).fqn)));
                }
            }
            groups.push((options, members));
        }
        let mut states = HashMap::new();
        for (key, value) in stored {
            let at = parameter(key)?;
            let fqn = &plan.param(at).fqn;
            let Value::Dict(state) = value else {
                return Err(unreadable(path, &format!("state of {fqn} that is no dict")));
            };
            if !group_of.contains_key(&at) {
                return Err(unreadable(path, &format!("state of {fqn}, which is in no parameter group")));
            }
            if states.insert(at, state).is_some() {
                return Err(unreadable(path, &format!("state of {fqn} under two of its names")));
            }
        }
        Ok(Self { path, groups, group_of, states })
    }

    /// The groups of the target: as the layout has them, else as the source has.
    fn target_groups(&self, names: &Names<'_>, plan: &Plan<'_>) -> Result<Vec<(&'v Dict, Vec<Member>)>> {
        let layout = plan.layout;
        let Some(listed) = &layout.optimizer else {
            return if layout.use_orig_params {
                let members = |params: &Vec<At>| params.iter().copied().map(Member::Parameter).collect();
                Ok(self.groups.iter().map(|(options, params)| (*options, members(params))).collect())
            } else {
                self.groups_of_units(plan)
            };
        };
        let mut seen = HashSet::new();
        let mut groups = Vec::with_capacity(listed.len());
        for (index, list) in listed.iter().enumerate() {
            let mut members = Vec::with_capacity(list.len());
            let mut params = Vec::new();
            for fqn in list {
                let member = if layout.use_orig_params {
                    names.find(fqn.as_str()).map(Member::Parameter)
                } else {
                    names.find_unit(fqn.as_str()).map(Member::Unit)
                };
                let Some(member) = member.filter(|member| seen.insert(*member)) else {
                    let kind = if layout.use_orig_params { "a parameter" } else { "a flat parameter" };
                    return Err(Error::unsupported(
                        format!("the optimizer of the flat layout: expected {kind} each once, found {fqn}"),
                        "list parameters with use_orig_params, else keys of flat parameters",
                    ));
                };
                params.extend(of_member(member, plan));
                members.push(member);
            }
            groups.push((self.common_options(index, &params, plan)?, members));
        }
        let listed: HashSet<At> = seen.into_iter().flat_map(|member| of_member(member, plan)).collect();
        let all = self.groups.iter().flat_map(|(_, params)| params);
        match all.copied().find(|at| !listed.contains(at)) {
            None => Ok(groups),
            Some(at) => Err(self.unfit(
                format!("{} is not in the optimizer of the flat layout", plan.param(at).fqn),
                "list all that the optimizer updates, or leave `optimizer` out of the layout",
            )),
        }
    }

    /// Units in the order of the layout, in the groups that their parameters are in.
    fn groups_of_units(&self, plan: &Plan<'_>) -> Result<Vec<(&'v Dict, Vec<Member>)>> {
        let mut groups: Vec<(&Dict, Vec<Member>)> =
            self.groups.iter().map(|(options, _)| (*options, Vec::new())).collect();
        for (unit, known) in plan.layout.units.iter().enumerate() {
            let params: Vec<At> = of_member(Member::Unit(unit), plan);
            let group = |at: &At| self.group_of.get(at).copied();
            let Some(first) = params.first() else { continue };
            if let Some(other) = params.iter().find(|at| group(at) != group(first)) {
                let place = |at: &At| group(at).map_or(String::from("in none"), |group| format!("in group {group}"));
                return Err(self.unfit(
                    format!(
                        "{}: {} is {}, {} {}: a flat parameter is in one parameter group",
                        known.describe(),
                        plan.param(*first).fqn,
                        place(first),
                        plan.param(*other).fqn,
                        place(other)
                    ),
                    "write with use_orig_params, or leave the optimizer out",
                ));
            }
            if let Some(group) = group(first) {
                groups[group].1.push(Member::Unit(unit));
            }
        }
        Ok(groups)
    }

    /// The options of a group of the layout: those its parameters have in the source.
    fn common_options(&self, index: usize, params: &[At], plan: &Plan<'_>) -> Result<&'v Dict> {
        let Some(first) = params.first() else {
            let options = self.groups.get(index).map(|(options, _)| *options);
            return options.ok_or_else(|| {
                self.unfit(format!("the flat layout has an empty parameter group {index}"), "leave that group out")
            });
        };
        let group = |at: &At| {
            self.group_of.get(at).copied().ok_or_else(|| {
                self.unfit(
                    format!("{} is in no parameter group", plan.param(*at).fqn),
                    "list in the layout what the optimizer of SRC updates, or leave `optimizer` out of it",
                )
            })
        };
        let own = group(first)?;
        for at in params {
            let other = group(at)?;
            if other != own && !same_options(self.groups[own].0, self.groups[other].0) {
                return Err(self.unfit(
                    format!(
                        "{} and {} are one parameter group of the flat layout, and have different options",
                        plan.param(*first).fqn,
                        plan.param(*at).fqn
                    ),
                    "give the groups of the job in `optimizer` of the flat layout",
                ));
            }
        }
        Ok(self.groups[own].0)
    }

    fn parameter_state(&self, at: At, plan: &mut Plan<'_>) -> Result<Option<Vec<(Value, Value)>>> {
        let Some(state) = self.states.get(&at) else { return Ok(None) };
        let entries = state.entries.iter().map(|(key, value)| {
            let value = match self.kind(at, key, value, plan)? {
                Kind::Object => value.clone(),
                Kind::Like(id) if plan.is_sharded() => {
                    let dtype = plan.source.tensor(id).dtype;
                    let storage = plan.storage(dtype, Content::Slice { at, tensor: id });
                    plan.item(storage, Role::Slice(at))
                }
                Kind::Like(id) => whole(id, Role::Whole, plan),
                Kind::Scalar(id) if plan.is_sharded() => whole(id, Role::WithParameter(at), plan),
                Kind::Scalar(id) => whole(id, Role::Whole, plan),
            };
            Ok((key.clone(), value))
        });
        Ok(Some(entries.collect::<Result<_>>()?))
    }

    fn unit_state(&self, unit: usize, plan: &mut Plan<'_>) -> Result<Option<Vec<(Value, Value)>>> {
        let params = of_member(Member::Unit(unit), plan);
        let stored: Vec<(At, &Dict)> = params.iter().filter_map(|at| Some((*at, *self.states.get(at)?))).collect();
        let Some((first, state)) = stored.first().copied() else { return Ok(None) };
        let differ = |plan: &Plan<'_>, other: At, what: &str| {
            let (own, other) = (&plan.param(first).fqn, &plan.param(other).fqn);
            self.unfit(
                format!("{own} and {other} are in one flat parameter, and differ in {what}"),
                "write with use_orig_params, or leave the optimizer out",
            )
        };
        if let Some(other) = params.iter().find(|at| !self.states.contains_key(at)) {
            return Err(differ(plan, *other, "having state"));
        }
        if let Some((other, _)) = stored.iter().find(|(_, other)| !same_keys(state, other)) {
            return Err(differ(plan, *other, "what state they have"));
        }
        let mut entries = Vec::with_capacity(state.entries.len());
        for (key, value) in &state.entries {
            let name = key_text(key);
            let kind = self.kind(first, key, value, plan)?;
            let mut tensors = Vec::with_capacity(stored.len());
            for (at, other) in &stored {
                let other = other.entries.iter().find(|(own, _)| own == key).map_or(&Value::None, |(_, value)| value);
                match (kind, self.kind(*at, key, other, plan)?) {
                    (Kind::Object, Kind::Object) if value == other => {}
                    (Kind::Scalar(kept), Kind::Scalar(id)) if same_dtype(plan, kept, id) => {
                        if kept != id {
                            plan.same_steps.push((kept, id));
                        }
                    }
                    (Kind::Like(kept), Kind::Like(id)) if same_dtype(plan, kept, id) => tensors.push(id),
                    _ => return Err(differ(plan, *at, &format!("`{name}`"))),
                }
            }
            let value = match kind {
                Kind::Object => value.clone(),
                Kind::Scalar(id) => whole(id, Role::Whole, plan),
                Kind::Like(id) => {
                    let dtype = plan.source.tensor(id).dtype;
                    let storage = plan.storage(dtype, Content::Shard { unit, tensors, padding: Padding::Zero });
                    plan.item(storage, Role::State)
                }
            };
            entries.push((key.clone(), value));
        }
        Ok(Some(entries))
    }

    fn kind(&self, at: At, key: &Value, value: &Value, plan: &Plan<'_>) -> Result<Kind> {
        let shape = match value {
            Value::Tensor(id) => {
                let entry = plan.source.tensor(*id);
                if entry.shape == plan.param(at).shape {
                    return Ok(Kind::Like(*id));
                }
                if entry.shape.is_empty() {
                    return Ok(Kind::Scalar(*id));
                }
                format!("a tensor of shape {:?}", entry.shape.as_slice())
            }
            value if value.contains_tensor() => format!("a {} of tensors", value.type_name()),
            _ => return Ok(Kind::Object),
        };
        let param = plan.param(at);
        Err(self.unfit(
            format!(
                "`{}` of {}: {shape}, and the parameter has {:?}",
                key_text(key),
                param.fqn,
                param.shape.as_slice()
            ),
            "FSDP1 flattens state of the shape of its parameter; leave this optimizer out",
        ))
    }

    fn unfit(&self, what: String, hint: &str) -> Error {
        Error::unsupported(format!("{}{what}", prefix(self.path)), hint)
    }
}

/// What a piece of state is.
#[derive(Clone, Copy)]
enum Kind {
    /// Of the shape of its parameter.
    Like(TensorId),
    Scalar(TensorId),
    Object,
}

/// The parameters behind the numbers of a plain `optimizer.state_dict()`, where it has numbers.
struct Numbers(Option<Vec<Option<At>>>);

impl Numbers {
    fn new(dict: &Dict, stored: &[(Value, Value)], listed: &[Value], names: &Names<'_>, plan: &Plan<'_>) -> Self {
        let is_number = |key: &Value| matches!(key, Value::Int(_));
        let mut params = listed.iter().filter_map(|group| match group.as_dict()?.get(PARAMS)? {
            Value::List(params) => Some(params),
            _ => None,
        });
        let numbered =
            stored.iter().any(|(key, _)| is_number(key)) || params.any(|params| params.iter().any(is_number));
        if !numbered {
            return Self(None);
        }
        let known = model::numbered_parameters(plan.source, &Value::Dict(dict.clone()));
        Self(known.map(|known| known.iter().map(|(fqn, _)| names.find(fqn.as_str())).collect()))
    }

    fn get(&self, path: &Path, number: i64) -> Result<At> {
        let known = self.0.as_ref().and_then(|known| *known.get(usize::try_from(number).ok()?)?);
        known.ok_or_else(|| unknown(path, &format!("number {number}")))
    }
}

fn of_member(member: Member, plan: &Plan<'_>) -> Vec<At> {
    match member {
        Member::Parameter(at) => vec![at],
        Member::Unit(unit) => (0..plan.layout.units[unit].params.len()).map(|param| At { unit, param }).collect(),
    }
}

fn whole(id: TensorId, role: Role, plan: &mut Plan<'_>) -> Value {
    let storage = plan.whole_storage(id);
    plan.item(storage, role)
}

fn same_dtype(plan: &Plan<'_>, left: TensorId, right: TensorId) -> bool {
    plan.source.tensor(left).dtype == plan.source.tensor(right).dtype
}

fn same_keys(left: &Dict, right: &Dict) -> bool {
    let has = |key: &Value| right.entries.iter().any(|(other, _)| other == key);
    left.entries.len() == right.entries.len() && left.entries.iter().all(|(key, _)| has(key))
}

fn same_options(left: &Dict, right: &Dict) -> bool {
    let options = |dict: &Dict| {
        let is_option = |key: &Value| !matches!(key.as_str(), Some(PARAMS | PARAM_NAMES));
        let mut options = dict.clone();
        options.entries.retain(|(key, _)| is_option(key));
        options
    };
    options(left) == options(right)
}

fn prefix(path: &Path) -> String {
    if path.0.is_empty() { String::new() } else { format!("{path}: ") }
}

fn unknown(path: &Path, name: &str) -> Error {
    Error::unsupported(
        format!("{}optimizer state of {name}, which is not known to be a parameter of the flat layout", prefix(path)),
        "the flat layout must be that of this very model; optimizer.state_dict() without names tells parameters only \
         where there is one reading",
    )
}

fn unreadable(path: &Path, what: &str) -> Error {
    Error::unsupported(format!("{}an optimizer with {what}", prefix(path)), "leave it out (--exclude)")
}
