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
use crate::catalog::Fqn;
use crate::error::Result;
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

/// A box of a parameter, which one shard has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The index of the shard, which is the tensor-parallel rank.
    pub shard: usize,
    /// The box in the shard.
    pub from: Region,
    /// The position of the first element of the box in the parameter.
    pub to: Dims,
}

/// The parts of a parameter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Joined {
    pub shape: Dims,
    /// Boxes that have every element of the parameter exactly once.
    pub parts: Vec<Part>,
    /// Further copies of boxes: the box that is one of `parts`, and the copy.
    pub copies: Vec<[Part; 2]>,
}

impl Joined {
    /// Returns the parts of a parameter that one shard has as a whole.
    pub fn whole(shape: &Dims) -> Self {
        let part = Part { shard: 0, from: Region::whole(shape), to: Dims::from_elem(0, shape.len()) };
        Self { shape: shape.clone(), parts: vec![part], copies: Vec::new() }
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

/// Joins the parameters of all jobs, in the order of the first job that has each of them. `tensor_parallel` is the number of
/// tensor-parallel ranks of each stage.
///
/// # Errors
/// `Malformed` for names that contradict each other.
pub fn params<'a>(jobs: &'a [Job<'a>], tensor_parallel: usize) -> Result<Vec<Param<'a>>> {
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
        let all: Vec<Shard<'a>> = shards.into_iter().map(|(_, shard)| shard).collect();
        let (first, others) = all.split_at(tensor_parallel);
        let joined = Joined::whole(&first[0].placed.shape);
        let mut copies = Vec::new();
        for [part, copy] in &joined.copies {
            copies.push([(first[part.shard], part.from.clone()), (first[copy.shard], copy.from.clone())]);
        }
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

/// Returns the error for a parameter that one tensor-parallel rank has, and another rank of the stage has not.
fn lacks(fqn: &Fqn, model: &ModelStates<'_>, with: &Shard<'_>) -> crate::error::Error {
    let name = file_name(with.model.first());
    leftover(model.first().path(), "param_shapes", format!("a shard of `{fqn}` as in {name}"), "none")
}

fn file_name(fields: &Fields<'_>) -> String {
    fields.path().file_name().unwrap_or_default().display().to_string()
}

fn check_same_shape(fqn: &Fqn, first: &Shard<'_>, other: &Shard<'_>) -> Result<()> {
    let [expected, found] = [first, other].map(|shard| format!("{:?}", shard.placed.shape.as_slice()));
    if expected == found {
        return Ok(());
    }
    let expected = format!("{expected} as in {}", file_name(first.model.first()));
    Err(leftover(other.model.first().path(), &format!("the shape of `{fqn}` in param_shapes"), expected, found))
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
    let name = file(first).file_name().unwrap_or_default().display().to_string();
    Err(leftover(&file(other), &format!("the state of `{fqn}`"), format!("{expected} as in {name}"), found))
}
