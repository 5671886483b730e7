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

use super::folder::leftover;
use super::model::{ModelStates, wrong_name};
use super::optimizer::{FlatGroup, OptimizerStates, StateValue};
use super::partitions::Placed;
use super::tensor_parallel::{INFO, Joined, Part, ShardLayouts};
use crate::catalog::Fqn;
use crate::error::{Error, Result};
use crate::format::name_of;
use crate::format::torch::View;
use crate::layout::{Dims, Region};

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

    /// Joins the shards of a parameter on the ranks of one stage. The layout is unknown if the model files do not describe it.
    fn join(&self, fqn: &Fqn, stage: usize, shards: &[Shard<'_>]) -> Result<Joined> {
        match self.stages.get(stage) {
            None => Ok(Joined::whole(&shards[0].placed.shape)),
            Some(Some(layouts)) => {
                let shapes: Vec<&Dims> = shards.iter().map(|shard| &shard.placed.shape).collect();
                layouts.join(fqn, &shapes)
            }
            Some(None) => {
                let first = &shards[0].placed.shape;
                match shards.iter().find(|shard| shard.placed.shape.len() != first.len()) {
                    None => Ok(Joined::unknown(first)),
                    Some(other) => Err(other_shape(fqn, &shards[0], other)),
                }
            }
        }
    }
}

/// Joins the parameters of all jobs, in the order of the first job that has each of them.
///
/// # Errors
/// `Malformed` for names that contradict each other, `Unsupported` for unknown layouts.
pub fn params<'a>(jobs: &'a [Job<'a>], layouts: &StageLayouts<'_>) -> Result<Vec<Param<'a>>> {
    let tensor_parallel = layouts.tensor_parallel;
    let mut by_name: IndexMap<&Fqn, Vec<(usize, Shard<'a>)>> = IndexMap::new();
    for (number, job) in jobs.iter().enumerate() {
        for group in job.optimizer.iter().flat_map(|optimizer| &optimizer.groups) {
            for placed in &group.partitioned.params {
                let shards = by_name.entry(&placed.fqn).or_default();
                if shards.last().is_some_and(|(last, _)| *last == number) {
                    return Err(wrong_name(job.model.first(), placed.fqn.as_str(), "each name once"));
                }
                shards.push((number, Shard { model: &job.model, group, placed }));
            }
        }
    }
    let one = |(fqn, shards): (&'a Fqn, Vec<(usize, Shard<'a>)>)| {
        for (place, (number, shard)) in shards.iter().enumerate() {
            // The ranks of a stage follow one another, and each of them has a shard.
            let stage = shards[place - place % tensor_parallel].0 / tensor_parallel;
            let expected = stage * tensor_parallel + place % tensor_parallel;
            if *number != expected {
                return Err(lacks(fqn, &jobs[expected].model, shard));
            }
            check_same_state(fqn, &shards[0].1, shard)?;
        }
        let ranks = shards.len() % tensor_parallel;
        if ranks > 0 {
            let last = &shards[shards.len() - 1];
            return Err(lacks(fqn, &jobs[last.0 + 1].model, &last.1));
        }
        let stage = shards[0].0 / tensor_parallel;
        let all: Vec<Shard<'a>> = shards.into_iter().map(|(_, shard)| shard).collect();
        let (first, others) = all.split_at(tensor_parallel);
        let joined = layouts.join(fqn, stage, first)?;
        let mut copies = copies_of(&joined, first);
        for (place, other) in others.iter().enumerate() {
            let own = first[place % tensor_parallel];
            check_same_shape(fqn, &own, other)?;
            let whole = Region::whole(&own.placed.shape);
            copies.push([(own, whole.clone()), (*other, whole)]);
        }
        Ok(Param { fqn, shards: first.to_vec(), joined, copies })
    };
    by_name.into_iter().map(one).collect()
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
        let joined = layouts.join(fqn, 0, &shards)?;
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

/// Returns the error for a parameter that one tensor-parallel rank has, and another rank of the stage has not.
fn lacks(fqn: &Fqn, model: &ModelStates<'_>, with: &Shard<'_>) -> Error {
    let name = with.model.first().file_name();
    leftover(model.first().path(), "param_shapes", format!("a shard of `{fqn}` as in {name}"), "none")
}

fn check_same_shape(fqn: &Fqn, first: &Shard<'_>, other: &Shard<'_>) -> Result<()> {
    if first.placed.shape == other.placed.shape { Ok(()) } else { Err(other_shape(fqn, first, other)) }
}

/// Returns the error for two shards whose shapes contradict each other.
fn other_shape(fqn: &Fqn, first: &Shard<'_>, other: &Shard<'_>) -> Error {
    let [expected, found] = [first, other].map(|shard| format!("{:?}", shard.placed.shape.as_slice()));
    let expected = format!("{expected} as in {}", first.model.first().file_name());
    leftover(other.model.first().path(), &format!("the shape of `{fqn}` in param_shapes"), expected, found)
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
