//! The optimizer files: the master weights and the optimizer state of each partition, checked against each other and
//! against the shapes in the model file.

use std::collections::HashMap;
use std::path::Path;

use super::experts::global_expert;
use super::fields::{Fields, is_vector};
use super::folder::{GATHER, OFFLOAD, StatesFiles, leftover, refused};
use super::partitions::Partitioned;
use crate::catalog::optimizer::{GROUPS, PARAMS, STATE};
use crate::catalog::{Dict, Fqn, Value, contiguous_strides};
use crate::error::{Error, Result};
use crate::format::torch::{RankFile, View};
use crate::layout::Dims;
use crate::quantity::count;

/// The key of the masters at stages 1 and 2: for each group a vector.
const MASTERS: &str = "single_partition_of_fp32_groups";
/// The key of the masters at stage 3: for each sub-group a vector.
const MASTERS_STAGE3: &str = "fp32_flat_groups";
/// The key of the optimizer's own state dict at stages 1 and 2.
const BASE_STATE: &str = "base_optimizer_state";
/// The key of the whole content of an optimizer file, and, at stage 3, of the optimizer's own state dict inside it.
pub const STATE_DICT: &str = "optimizer_state_dict";

/// The names and shapes of the parameters of one group, in the order in which they are flattened.
pub type Shapes = Vec<(Fqn, Dims)>;

/// The optimizer files of all partitions.
#[derive(Debug)]
pub struct OptimizerStates<'a> {
    /// The file of the first partition, which has the options of `param_groups`.
    pub first: &'a RankFile,
    /// The groups whose parameters are flattened together: the parameter groups at stages 1 and 2, the sub-groups at
    /// stage 3.
    pub groups: Vec<FlatGroup<'a>>,
    /// The parameter groups of the optimizer: the names of the parameters, and the options, which are `None` if the job has
    /// `elastic_checkpoint`.
    pub param_groups: Vec<(Vec<Fqn>, Option<&'a Dict>)>,
}

/// The masters and the state of the parameters that are flattened together.
#[derive(Debug)]
pub struct FlatGroup<'a> {
    /// The file of each partition.
    pub files: Vec<&'a RankFile>,
    pub partitioned: Partitioned,
    /// For each partition, its vector of masters.
    pub masters: Vec<&'a View>,
    /// The state by its name, such as `exp_avg`.
    pub state: Vec<(&'a str, StateValue<'a>)>,
}

impl<'a> FlatGroup<'a> {
    /// Returns a tensor as a group with one parameter and one partition; `None` if its elements are not in row-major order
    /// without gaps.
    pub fn of_tensor(fqn: Fqn, file: &'a RankFile, view: &'a View) -> Option<Self> {
        let expected = contiguous_strides(&view.sizes);
        // The stride of a dim of size 1 has no effect.
        let is_row_major = view.sizes.contains(&0)
            || (0..expected.len()).all(|dim| view.sizes[dim] == 1 || view.strides[dim] == expected[dim]);
        let partitioned = Partitioned::together(vec![(fqn, view.sizes.clone())], &[0], 1).filter(|_| is_row_major)?;
        Some(Self { files: vec![file], partitioned, masters: vec![view], state: Vec::new() })
    }
}

/// Returns the options of a parameter group without those of some keys, as a dict to compare.
pub fn options_without(group: &Dict, keys: &[&str]) -> Value {
    let entries = group.entries.iter().filter(|(key, _)| key.as_str().is_none_or(|key| !keys.contains(&key)));
    Value::Dict(Dict { entries: entries.cloned().collect(), ..Dict::default() })
}

/// A value of the optimizer state of a group.
#[derive(Debug)]
pub enum StateValue<'a> {
    /// For each partition a vector, which has elements for the same parameters as the masters.
    Vectors(Vec<&'a View>),
    /// For each partition a tensor without dims, which applies to all parameters of the group.
    Scalars(Vec<&'a View>),
    /// A value that is not a tensor.
    Plain(&'a Value),
    /// A tensor of another length, so it is not known which elements belong to which parameter.
    Unknown(String),
}

/// The content of one optimizer file.
struct PartitionFile<'a> {
    fields: Fields<'a>,
    own: OwnState<'a>,
}

/// The state of the optimizer that ZeRO wraps.
#[derive(Clone, Copy)]
enum OwnState<'a> {
    /// The optimizer's own state dict: `{state, param_groups}`.
    Dict(Fields<'a>),
    /// With `elastic_checkpoint`, the state of each group, without the options.
    Elastic(&'a [Value]),
}

/// Reads the optimizer files. `files` has one file for each partition, and `shapes` is `param_shapes` of the model file.
///
/// # Errors
/// `Unsupported` for kinds of checkpoints that dtshard does not read, `Malformed` and `Missing` for files that contradict
/// each other.
pub fn read<'a>(
    folder: &Path,
    found: &StatesFiles,
    files: &'a [RankFile],
    shapes: Vec<Shapes>,
    experts: &HashMap<&str, u64>,
) -> Result<OptimizerStates<'a>> {
    let is_stage3 = found.is_stage3;
    let mut counts: Option<Vec<u32>> = None;
    let mut partitions = Vec::with_capacity(files.len());
    for file in files {
        let part = PartitionFile::open(folder, file, is_stage3)?;
        let own = partition_counts(folder, found, &part.fields, files.len(), !experts.is_empty())?;
        if let Some(counts) = counts.replace(own.clone()).filter(|counts| *counts != own) {
            let expected = format!("{counts:?} as in partition 0");
            return Err(leftover(&file.path, &part.fields.name(PARTITION_COUNT), expected, format!("{own:?}")));
        }
        partitions.push(part);
    }
    let first = &partitions[0];
    let numbers = first.group_numbers()?;
    let groups_in_state = if is_stage3 { numbers.iter().map(Vec::len).sum() } else { numbers.len() };
    if groups_in_state != shapes.len() {
        let expected = format!("{} (param_shapes of the model file)", count(shapes.len(), "group"));
        return Err(first.at().wrong(GROUPS, expected, count(groups_in_state, "group")));
    }
    let options = first.options()?;
    for other in &partitions[1..] {
        other.check_options(&options, &first.fields)?;
    }
    let state_numbers: Vec<i64> =
        if is_stage3 { numbers.iter().flatten().copied().collect() } else { (0..).take(shapes.len()).collect() };
    let mut groups = Vec::with_capacity(shapes.len());
    let mut names: Vec<Vec<Fqn>> = Vec::with_capacity(shapes.len());
    for (index, (shapes, number)) in shapes.into_iter().zip(state_numbers).enumerate() {
        // A group of experts has a vector for each expert-parallel rank. The ranks of one vector have a distance of `ranks`.
        let count = counts.iter().flatten().nth(index).map_or(files.len(), |count| *count as usize);
        let ranks = if is_stage3 { 1 } else { files.len() / count };
        names.push(Vec::new());
        for rank in 0..ranks {
            let own: Vec<&PartitionFile<'a>> = partitions.iter().skip(rank).step_by(ranks).collect();
            let mut shapes = shapes.clone();
            for (name, _) in shapes.iter_mut().filter(|_| ranks > 1) {
                let global = global_expert(experts, name.as_str(), rank as u64, ranks as u64);
                let expected = format!("the name of an expert on one of {ranks} ranks, because of {PARTITION_COUNT}");
                let global = global.ok_or_else(|| own[0].fields.wrong("param_shapes", expected, name.as_str()))?;
                *name = global.into();
            }
            names[index].extend(shapes.iter().map(|(name, _)| name.clone()));
            let partitioned = place(&own[0].fields, shapes, index, own.len() as u64, is_stage3)?;
            let masters = masters(folder, &own, index, &partitioned, is_stage3)?;
            let state = state(&own, number, &partitioned)?;
            groups.push(FlatGroup {
                files: own.iter().map(|part| part.fields.file).collect(),
                partitioned,
                masters,
                state,
            });
        }
    }
    let mut rest = names.into_iter();
    let mut param_groups = Vec::with_capacity(options.len());
    for (own, options) in numbers.iter().zip(options) {
        param_groups.push((rest.by_ref().take(if is_stage3 { own.len() } else { 1 }).flatten().collect(), options));
    }
    Ok(OptimizerStates { first: &files[0], groups, param_groups })
}

impl<'a> PartitionFile<'a> {
    fn open(folder: &Path, file: &'a RankFile, is_stage3: bool) -> Result<Self> {
        let root = Fields::of_file(file)?;
        let Some(fields) = root.dict(STATE_DICT)? else {
            return Err(root.wrong(STATE_DICT, "the optimizer state of ZeRO", "none"));
        };
        if fields.get("ds_zero_partition_groups").is_some() {
            return Err(refused(folder, "with experts (ds_zero_partition_groups)", GATHER));
        }
        let (expected, other) = if is_stage3 { (MASTERS_STAGE3, MASTERS) } else { (MASTERS, MASTERS_STAGE3) };
        if fields.get(expected).is_none() {
            let stage = |key| if key == MASTERS { "stage 1 or 2" } else { "stage 3" };
            let found =
                if fields.get(other).is_some() { format!("`{other}` of {}", stage(other)) } else { "none".into() };
            let expected = format!("the masters of ZeRO {}, as the names of the model files say", stage(expected));
            return Err(leftover(&file.path, STATE_DICT, expected, found));
        }
        let own_key = if is_stage3 { STATE_DICT } else { BASE_STATE };
        let own = match fields.get(own_key) {
            Some(Value::List(groups)) if !is_stage3 => OwnState::Elastic(groups),
            _ => match fields.dict(own_key)? {
                Some(own) => OwnState::Dict(own),
                None => return Err(fields.wrong(own_key, "the state dict of the optimizer", "none")),
            },
        };
        Ok(Self { fields, own })
    }

    /// Returns the numbers that each parameter group lists.
    fn group_numbers(&self) -> Result<Vec<Vec<i64>>> {
        let own = match self.own {
            OwnState::Dict(own) => own,
            OwnState::Elastic(groups) => return Ok((0..).take(groups.len()).map(|number| vec![number]).collect()),
        };
        let wrong = || own.wrong(GROUPS, "parameter groups with numbers of parameters", "others");
        let numbers = |group: &Value| match group.as_dict()?.get(PARAMS)? {
            Value::List(params) => params.iter().map(Value::as_i64).collect::<Option<Vec<i64>>>(),
            _ => None,
        };
        own.list(GROUPS)?.iter().map(|group| numbers(group).ok_or_else(wrong)).collect()
    }

    /// Returns the options of each parameter group; `None` if the file does not have them.
    fn options(&self) -> Result<Vec<Option<&'a Dict>>> {
        let own = match self.own {
            OwnState::Dict(own) => own,
            OwnState::Elastic(groups) => return Ok(vec![None; groups.len()]),
        };
        let wrong = || own.wrong(GROUPS, "a list of dicts", "another value");
        own.list(GROUPS)?.iter().map(|group| Ok(Some(group.as_dict().ok_or_else(wrong)?))).collect()
    }

    /// Checks that the parameter groups have the same options as in the file of the first partition.
    fn check_options(&self, first: &[Option<&Dict>], file: &Fields<'_>) -> Result<()> {
        let own = self.options()?;
        let is_same = |own: Option<&Dict>, first: Option<&Dict>| match (own, first) {
            (Some(own), Some(first)) => {
                own.entries.len() == first.entries.len()
                    && own.entries.iter().zip(&first.entries).all(|((own_key, own), (key, first))| {
                        own_key.same_but_tensors(key) && own.same_but_tensors(first)
                    })
            }
            (own, first) => own.is_none() && first.is_none(),
        };
        if own.len() == first.len() && own.iter().zip(first).all(|(own, first)| is_same(*own, *first)) {
            return Ok(());
        }
        let name = file.file_name();
        Err(leftover(self.fields.path(), &self.at().name(GROUPS), format!("the parameter groups of {name}"), "others"))
    }

    /// Returns the state of a group; an empty list if the optimizer has not made a step yet.
    fn state_of(&self, number: i64) -> Result<&'a [(Value, Value)]> {
        let state = match self.own {
            OwnState::Dict(own) => {
                let Some(states) = own.dict(STATE)? else {
                    return Err(own.wrong(STATE, "the state of the optimizer", "none"));
                };
                states.dict.entries.iter().find(|(key, _)| key.as_i64() == Some(number)).map(|(_, state)| state)
            }
            OwnState::Elastic(groups) => usize::try_from(number).ok().and_then(|number| groups.get(number)),
        };
        match state {
            None => Ok(&[]),
            Some(Value::Dict(dict)) => Ok(&dict.entries),
            Some(other) => Err(self.at().wrong(&self.state_name(number), "a dict", other.type_name())),
        }
    }

    /// Returns the dict that has the state.
    fn at(&self) -> Fields<'a> {
        match self.own {
            OwnState::Dict(own) => own,
            OwnState::Elastic(_) => self.fields,
        }
    }

    /// Returns the key of the state of a group, for messages.
    fn state_name(&self, number: i64) -> String {
        match self.own {
            OwnState::Dict(_) => format!("{STATE}[{number}]"),
            OwnState::Elastic(_) => format!("{BASE_STATE}[{number}]"),
        }
    }
}

/// The key of the number of partitions.
const PARTITION_COUNT: &str = "partition_count";

/// Returns the numbers of partitions of the groups that a file records, checked against the number of files. Only groups of
/// experts have fewer partitions than there are files.
fn partition_counts(
    folder: &Path,
    found: &StatesFiles,
    fields: &Fields<'_>,
    files: usize,
    has_experts: bool,
) -> Result<Vec<u32>> {
    const KEY: &str = PARTITION_COUNT;
    let wrong = |found: String| fields.wrong(KEY, "the number of partitions", found);
    let number = |value: &Value| {
        let number = value.as_i64().and_then(|number| u32::try_from(number).ok());
        number.filter(|number| *number > 0).ok_or_else(|| wrong(value.type_name().into_owned()))
    };
    let counts: Vec<u32> = match fields.get(KEY) {
        Some(Value::List(items)) => items.iter().map(number).collect::<Result<_>>()?,
        Some(value) => vec![number(value)?],
        None => return Err(wrong(String::from("nothing"))),
    };
    let most = counts.iter().copied().max().unwrap_or_default();
    let name = fields.file_name();
    if most as usize != files {
        found.check_partitions(folder, most, &format!("partition_count in {name}"))?;
        return Err(wrong(format!("{most}, beside {}", count(files, "optimizer file"))));
    }
    if let Some(other) = counts.iter().find(|count| **count != most && (!has_experts || most % **count != 0)) {
        let expected = if has_experts {
            format!("{most} partitions, or a divisor of {most}")
        } else {
            format!("{most} partitions in all groups, because there are no files of experts")
        };
        return Err(leftover(fields.path(), &fields.name(KEY), expected, format!("{other} in {counts:?}")));
    }
    Ok(counts)
}

fn place(fields: &Fields<'_>, shapes: Shapes, index: usize, partitions: u64, is_stage3: bool) -> Result<Partitioned> {
    const PADDINGS: &str = "param_alignment_paddings";
    let wrong = |expected: &str, found: String| fields.wrong(&format!("{PADDINGS}[{index}]"), expected, found);
    let number = shapes.len();
    let placed = if is_stage3 {
        Partitioned::by_parameter(shapes, partitions)
    } else {
        let paddings = match fields.get(PADDINGS) {
            None => vec![0; number],
            Some(_) => {
                let Some(Value::List(own)) = fields.list(PADDINGS)?.get(index) else {
                    return Err(wrong("a list of numbers for each group", String::from("none for this group")));
                };
                let paddings =
                    own.iter().map(|value| u64::try_from(value.as_i64()?).ok()).collect::<Option<Vec<u64>>>();
                paddings.ok_or_else(|| wrong("numbers from 0 on", String::from("others")))?
            }
        };
        if paddings.len() != number {
            return Err(wrong(
                &format!("{} (one for each parameter)", count(number, "number")),
                paddings.len().to_string(),
            ));
        }
        Partitioned::together(shapes, &paddings, partitions)
    };
    placed.ok_or_else(|| {
        fields.wrong("the vectors", "fewer than 2^64 elements in `param_shapes` of the model file", "more")
    })
}

fn masters<'a>(
    folder: &Path,
    partitions: &[&PartitionFile<'a>],
    index: usize,
    partitioned: &Partitioned,
    is_stage3: bool,
) -> Result<Vec<&'a View>> {
    let key = if is_stage3 { MASTERS_STAGE3 } else { MASTERS };
    let mut found: Vec<&View> = Vec::with_capacity(partitions.len());
    for (partition, part) in partitions.iter().enumerate() {
        let list = part.fields.list(key)?;
        let name = format!("{key}[{index}]");
        let Some(value) = list.get(index) else {
            let expected = format!("at least {}", count(index + 1, "group"));
            return Err(part.fields.wrong(key, expected, list.len().to_string()));
        };
        let view = part.fields.vector(&name, value)?;
        if is_stage3 && view.sizes[0] == 0 && partitioned.len() > 0 {
            return Err(refused(
                folder,
                &format!("with an optimizer that was offloaded to NVMe (empty {key})"),
                OFFLOAD,
            ));
        }
        check_vector(&part.fields, &name, view, partitioned, partition, found.first().copied())?;
        if !view.dtype.is_float() {
            return Err(part.fields.wrong(&name, "floating-point numbers", view.dtype.to_string()));
        }
        found.push(view);
    }
    Ok(found)
}

/// Checks the length of a partition's vector, and that it has the dtype of the vector of the first partition.
fn check_vector(
    fields: &Fields<'_>,
    name: &str,
    view: &View,
    partitioned: &Partitioned,
    partition: usize,
    first: Option<&View>,
) -> Result<()> {
    if !fits(view, partitioned, partition) {
        let (len, filled) = (partitioned.len(), partitioned.filled(partition as u64));
        let or_filled = if filled < len { format!(" or {filled}") } else { String::new() };
        let expected =
            format!("{len}{or_filled} elements in partition {partition}, as param_shapes of the model file say");
        return Err(leftover(fields.path(), &fields.name(name), expected, view.sizes[0].to_string()));
    }
    let Some(other) = first.filter(|first| first.dtype != view.dtype) else { return Ok(()) };
    let expected = format!("dtype {} as in partition 0", other.dtype);
    Err(leftover(fields.path(), &fields.name(name), expected, view.dtype.to_string()))
}

/// Returns whether a vector has the length of a partition, with or without the padding at its end.
fn fits(view: &View, partitioned: &Partitioned, partition: usize) -> bool {
    is_vector(view) && [partitioned.len(), partitioned.filled(partition as u64)].contains(&view.sizes[0])
}

/// Reads the optimizer state of a group.
fn state<'a>(
    partitions: &[&PartitionFile<'a>],
    number: i64,
    partitioned: &Partitioned,
) -> Result<Vec<(&'a str, StateValue<'a>)>> {
    let mut all = Vec::with_capacity(partitions.len());
    for part in partitions {
        all.push((part.at(), part.state_of(number)?));
    }
    let of_group = partitions[0].state_name(number);
    let name_of = |key: &str| format!("{of_group}[{key:?}]");
    let find = |entries: &'a [(Value, Value)], key: &str| {
        entries.iter().find(|(own, _)| own.as_str() == Some(key)).map(|(_, value)| value)
    };
    let (first, entries) = &all[0];
    for (own, others) in &all[1..] {
        if others.len() != entries.len() {
            let expected = format!("{} as in partition 0", count(entries.len(), "value"));
            return Err(leftover(own.path(), &own.name(&of_group), expected, others.len().to_string()));
        }
    }
    let mut found = Vec::with_capacity(entries.len());
    for (key, value) in *entries {
        let Some(key) = key.as_str() else {
            return Err(first.wrong(&of_group, "names of values", key.type_name()));
        };
        let mut values = vec![value];
        for (own, others) in &all[1..] {
            values.push(
                find(others, key).ok_or_else(|| {
                    leftover(own.path(), &own.name(&name_of(key)), "a value as in partition 0", "none")
                })?,
            );
        }
        let Value::Tensor(_) = value else {
            let differing = values.iter().zip(&all).find(|(other, _)| !other.same_but_tensors(value));
            if let Some((other, (own, _))) = differing {
                let expected = format!("{value:.60} as in partition 0");
                return Err(leftover(own.path(), &own.name(&name_of(key)), expected, format!("{other:.60}")));
            }
            found.push((key, StateValue::Plain(value)));
            continue;
        };
        let mut views = Vec::with_capacity(values.len());
        for (value, (own, _)) in values.iter().zip(&all) {
            let Some(view) = own.view(value) else {
                return Err(own.wrong(&name_of(key), "a dense tensor as in partition 0", value.type_name()));
            };
            views.push(view);
        }
        found.push((key, kind_of(views, &all, &name_of(key), partitioned)?));
    }
    Ok(found)
}

/// Returns what the tensors of one name are: the vectors of all partitions, tensors without dims, or others.
fn kind_of<'a>(
    views: Vec<&'a View>,
    all: &[(Fields<'a>, &[(Value, Value)])],
    name: &str,
    partitioned: &Partitioned,
) -> Result<StateValue<'a>> {
    if views.iter().all(|view| view.sizes.is_empty()) {
        return Ok(StateValue::Scalars(views));
    }
    // A vector that no partition could have is state of another kind, such as the errors of 1-bit Adam.
    if !views.iter().enumerate().any(|(partition, view)| fits(view, partitioned, partition)) {
        return Ok(StateValue::Unknown(format!(
            "a tensor of the shape {:?}, which belongs to a partition and not to parameters",
            views[0].sizes.as_slice()
        )));
    }
    for (partition, (view, (own, _))) in views.iter().zip(all).enumerate() {
        if !is_vector(view) {
            let found = format!("a tensor of the shape {:?}", view.sizes.as_slice());
            return Err(own.wrong(name, "a tensor with one dim, without gaps", found));
        }
        check_vector(own, name, view, partitioned, partition, views.first().copied())?;
    }
    Ok(StateValue::Vectors(views))
}

/// Returns the error for a checkpoint of ZeRO without optimizer files.
pub fn missing(folder: &Path, first: &str) -> Error {
    Error::missing(
        folder,
        "optimizer files",
        "one file for each rank, with the master weights and the optimizer state",
        format!("{first} and the files of other ranks"),
    )
    .missing_hint(
        "copy the files of all ranks into the folder, or read only the parameters of the module with options::weights \
             module",
    )
}
