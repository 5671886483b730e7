//! Joins the parameters of the jobs of all model-parallel ranks.
//!
//! A stage of a pipeline has parameters that other stages do not have. A parameter that several stages use is in each of
//! them, and the copies must be equal. The tensor-parallel ranks of a stage have shards of the parameters:
//!
//! ```text
//! stage 0   job 0: a[0:2]  b   t       tensor-parallel rank 0
//!           job 1: a[2:4]  b   t       tensor-parallel rank 1
//! stage 1   job 2: c[0:3]  t
//!           job 3: c[3:5]  t           b and t are copies
//! ```
//!
//! ZeRO has partitioned each shard by itself. No tensor data is read here.

use indexmap::IndexMap;

use super::fields::Fields;
use super::folder::leftover;
use super::model::{ModelStates, wrong_name};
use super::optimizer::{FlatGroup, OptimizerStates, StateValue};
use super::partitions::Placed;
use super::tensor_parallel::{INFO, Joined, Part, ShardLayouts};
use crate::catalog::Fqn;
use crate::error::Result;
use crate::format::name_of;
use crate::format::torch::View;
use crate::layout::{Dims, Region};
use crate::name_list::{FEW, short_list};

/// The content of the files of one model-parallel rank.
pub struct Job<'a> {
    pub model: ModelStates<'a>,
    /// `None` at stage 0, which has no optimizer files.
    pub optimizer: Option<OptimizerStates<'a>>,
}

/// A parameter of one job: the complete parameter, or a shard of it.
#[derive(Clone, Copy)]
pub struct Shard<'a> {
    pub model: &'a ModelStates<'a>,
    pub group: &'a FlatGroup<'a>,
    pub placed: &'a Placed,
}

impl<'a> Shard<'a> {
    /// Returns the vectors of a value of the optimizer state.
    pub fn vectors(&self, key: &str) -> Option<&'a [&'a View]> {
        self.group.state.iter().find_map(|(own, value)| match value {
            StateValue::Vectors(views) if *own == key => Some(views.as_slice()),
            _ => None,
        })
    }
}

/// A trained parameter.
pub struct Param<'a> {
    pub fqn: &'a Fqn,
    /// The shards of the tensor-parallel ranks of the first stage that has the parameter.
    pub shards: Vec<Shard<'a>>,
    pub joined: Joined,
    /// Boxes that must have equal elements.
    pub copies: Vec<[(Shard<'a>, Region); 2]>,
}

/// The layouts of the stages of a pipeline on their tensor-parallel ranks.
pub struct StageLayouts<'a> {
    /// The number of tensor-parallel ranks of each stage.
    pub tensor_parallel: usize,
    /// The layouts of each stage; `None` if its model files do not describe them. Empty if there is one rank.
    stages: Vec<Option<ShardLayouts<'a>>>,
}

impl<'a> StageLayouts<'a> {
    /// Reads the layouts in the model files of all jobs.
    ///
    /// # Errors
    /// `Malformed` for damaged descriptions, and if the ranks of a stage have different ones.
    pub fn read(jobs: &[Job<'a>], tensor_parallel: usize) -> Result<Self> {
        let mut stages = Vec::new();
        for stage in jobs.chunks(tensor_parallel).filter(|_| tensor_parallel > 1) {
            let first = stage[0].model.first();
            for other in stage[1..].iter().map(|job| job.model.first()) {
                if !first.has_same(other, INFO) {
                    return Err(leftover(
                        other.path(),
                        INFO,
                        format!("the layout in {}", first.file_name()),
                        "another one",
                    ));
                }
            }
            stages.push(ShardLayouts::read(first)?);
        }
        Ok(Self { tensor_parallel, stages })
    }

    /// Joins the shards of a parameter on the ranks of one stage. `shapes` has the shape of each shard, and `model` is the
    /// first model file of the stage. The layout is unknown if the model files do not describe it.
    ///
    /// # Errors
    /// `Malformed` for shapes that contradict the layout, or each other.
    pub fn join(&self, fqn: &Fqn, stage: usize, shapes: &[&Dims], model: &Fields<'_>) -> Result<Joined> {
        match self.stages.get(stage) {
            None => Ok(Joined::whole(shapes[0])),
            Some(Some(layouts)) => layouts.join(fqn, shapes),
            Some(None) if shapes.iter().all(|shape| shape.len() == shapes[0].len()) => Ok(Joined::unknown(shapes[0])),
            Some(None) => {
                let found: Vec<String> = shapes.iter().map(|shape| format!("{:?}", shape.as_slice())).collect();
                let at = format!("the shapes of `{fqn}` in param_shapes of all tensor-parallel ranks");
                Err(leftover(model.path(), &at, "one number of dims", short_list(&found, FEW)))
            }
        }
    }
}

/// The shards of a parameter in all stages that have it.
pub struct Shards<T> {
    /// The first stage that has the parameter.
    pub stage: usize,
    /// The shards of the tensor-parallel ranks of the first stage, then those of the next stage, and so on.
    pub all: Vec<T>,
}

/// Groups shards by their parameters, in the order of the first job that has each of them. `shards` has the number of the job
/// of each shard, in ascending order.
///
/// # Errors
/// `Malformed` if a job has two parameters of one name, or if a tensor-parallel rank of a stage has no shard.
pub fn by_parameter<'a, T>(
    jobs: &[Job<'_>],
    tensor_parallel: usize,
    shards: impl Iterator<Item = (usize, &'a Fqn, T)>,
) -> Result<IndexMap<&'a Fqn, Shards<T>>> {
    let mut by_name: IndexMap<&Fqn, Vec<(usize, T)>> = IndexMap::new();
    for (number, fqn, shard) in shards {
        let own = by_name.entry(fqn).or_default();
        if own.last().is_some_and(|(last, _)| *last == number) {
            return Err(wrong_name(jobs[number].model.first(), fqn.as_str(), "each name once"));
        }
        own.push((number, shard));
    }
    let one = |(fqn, shards): (&'a Fqn, Vec<(usize, T)>)| {
        let lacks = |number: usize, with: usize| {
            let name = jobs[with].model.first().file_name();
            let expected = format!("a shard of `{fqn}` as in {name}");
            leftover(jobs[number].model.first().path(), "param_shapes", expected, "none")
        };
        for (place, (number, _)) in shards.iter().enumerate() {
            // The ranks of a stage follow one another, and each of them has a shard.
            let stage = shards[place - place % tensor_parallel].0 / tensor_parallel;
            let expected = stage * tensor_parallel + place % tensor_parallel;
            if *number != expected {
                return Err(lacks(expected, *number));
            }
        }
        if !shards.len().is_multiple_of(tensor_parallel) {
            let last = shards[shards.len() - 1].0;
            return Err(lacks(last + 1, last));
        }
        let stage = shards[0].0 / tensor_parallel;
        Ok((fqn, Shards { stage, all: shards.into_iter().map(|(_, shard)| shard).collect() }))
    };
    by_name.into_iter().map(one).collect()
}

/// Joins the parameters of all jobs, in the order of the first job that has each of them.
///
/// # Errors
/// `Malformed` for names that contradict each other, `Unsupported` for unknown layouts.
pub fn params<'a>(jobs: &'a [Job<'a>], layouts: &StageLayouts<'_>) -> Result<Vec<Param<'a>>> {
    let tensor_parallel = layouts.tensor_parallel;
    let groups = jobs.iter().enumerate().flat_map(|(number, job)| {
        job.optimizer.iter().flat_map(|optimizer| &optimizer.groups).map(move |group| (number, job, group))
    });
    let shards = groups.flat_map(|(number, job, group)| {
        let shard = move |placed| Shard { model: &job.model, group, placed };
        group.partitioned.params.iter().map(move |placed| (number, &placed.fqn, shard(placed)))
    });
    let one = |(fqn, Shards { stage, all }): (&'a Fqn, Shards<Shard<'a>>)| {
        for shard in &all[1..] {
            check_same_state(fqn, &all[0], shard)?;
        }
        let (first, others) = all.split_at(tensor_parallel);
        let joined = join(layouts, fqn, stage, first)?;
        let mut copies = copies_of(&joined, first);
        for (place, other) in others.iter().enumerate() {
            let own = first[place % tensor_parallel];
            let [shape, other_shape] = [own, *other].map(|shard| (shard.model.first(), &shard.placed.shape));
            check_same_shape(fqn, shape, other_shape)?;
            let whole = Region::whole(&own.placed.shape);
            copies.push([(own, whole.clone()), (*other, whole)]);
        }
        Ok(Param { fqn, shards: first.to_vec(), joined, copies })
    };
    by_parameter(jobs, tensor_parallel, shards)?.into_iter().map(one).collect()
}

/// Joins the shards of a parameter on the ranks of one stage.
fn join(layouts: &StageLayouts<'_>, fqn: &Fqn, stage: usize, shards: &[Shard<'_>]) -> Result<Joined> {
    let shapes: Vec<&Dims> = shards.iter().map(|shard| &shard.placed.shape).collect();
    layouts.join(fqn, stage, &shapes, shards[0].model.first())
}

/// Joins the frozen parameters of a job with several tensor-parallel ranks. Each of `frozen` has the shards of all ranks.
///
/// # Errors
/// `Unsupported` for unknown layouts, `Malformed` for shapes and dtypes that contradict each other.
pub fn frozen<'a>(
    jobs: &'a [Job<'a>],
    frozen: &'a [Vec<FlatGroup<'a>>],
    layouts: &StageLayouts<'_>,
) -> Result<Vec<Param<'a>>> {
    let one = |groups: &'a Vec<FlatGroup<'a>>| {
        let ranks = groups.iter().zip(jobs);
        let shard = |(group, job): (&'a FlatGroup<'a>, &'a Job<'a>)| Shard {
            model: &job.model,
            group,
            placed: &group.partitioned.params[0],
        };
        let shards: Vec<Shard<'a>> = ranks.map(shard).collect();
        let fqn = &shards[0].placed.fqn;
        for other in &shards[1..] {
            check_same_state(fqn, &shards[0], other)?;
        }
        let joined = join(layouts, fqn, 0, &shards)?;
        let copies = copies_of(&joined, &shards);
        Ok(Param { fqn, shards, joined, copies })
    };
    frozen.iter().map(one).collect()
}

/// Returns the boxes of the shards that must have equal elements.
pub fn copies_of<'a>(joined: &Joined, shards: &[Shard<'a>]) -> Vec<[(Shard<'a>, Region); 2]> {
    let own = |part: &Part| (shards[part.shard], part.from.clone());
    joined.copies.iter().map(|[part, copy]| [own(part), own(copy)]).collect()
}

/// Checks that two jobs have shards of the same shape. Each shard has the model file that lists it.
///
/// # Errors
/// `Malformed` that names the file and both shapes.
pub fn check_same_shape(fqn: &Fqn, first: (&Fields<'_>, &Dims), other: (&Fields<'_>, &Dims)) -> Result<()> {
    if first.1 == other.1 {
        return Ok(());
    }
    let [expected, found] = [first.1, other.1].map(|shape| format!("{:?}", shape.as_slice()));
    let expected = format!("{expected} as in {}", first.0.file_name());
    Err(leftover(other.0.path(), &format!("the shape of `{fqn}` in param_shapes"), expected, found))
}

/// Checks that two jobs have the same optimizer state for a parameter, with the same dtypes.
fn check_same_state(fqn: &Fqn, first: &Shard<'_>, other: &Shard<'_>) -> Result<()> {
    let describe = |shard: &Shard<'_>| {
        let mut all = vec![format!("masters {}", shard.group.masters[0].dtype)];
        all.extend(shard.group.state.iter().map(|(key, value)| match value {
            StateValue::Vectors(views) => format!("{key} {}", views[0].dtype),
            StateValue::Scalars(views) => format!("{key} 0-d {}", views[0].dtype),
            StateValue::Plain(value) => format!("{key} {value:.60}"),
            StateValue::Unknown(_) => format!("{key} of another shape"),
        }));
        all.join(", ")
    };
    let (expected, found) = (describe(first), describe(other));
    if expected == found {
        return Ok(());
    }
    let file = |shard: &Shard<'_>| shard.group.files[0].path.clone();
    let name = name_of(&file(first));
    Err(leftover(&file(other), &format!("the state of `{fqn}`"), format!("{expected} as in {name}"), found))
}
