//! Joins the shards of tensor-parallel ranks by the layout that the user declares, because the model files do not describe it.
//!
//! The ranks of the declared mesh are the tensor-parallel ranks of a stage. All stages of a pipeline have the same mesh, and the
//! data-parallel ranks are not part of it. The rules and the plan are those for plain tensors in rank files
//! ([`declared_layout`]): they see each parameter as a plain tensor, of which every rank has a shard. Optimizer state has the
//! layout of its parameter.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use indexmap::IndexMap;

use super::assemble::{dict, master_entry};
use super::folder::{GATHER, leftover, refused};
use super::join::{Param, copies_of};
use super::model::Module;
use super::tensor_parallel::Joined;
use crate::catalog::optimizer::STATE;
use crate::catalog::{Catalog, DictKind, Fqn, TensorEntry, Value};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::format::declared_layout::{self, DeclaredLayout};
use crate::format::reading::{RanksWithFiles, ReadFindings};
use crate::layout::{Dims, Rank, Region};

/// The parts of each parameter by the declared layout.
pub struct DeclaredShards {
    by_name: IndexMap<Fqn, DeclaredShard>,
    /// The tied layers of a pipeline, with the names of their ties, which have the layout.
    ties: HashMap<String, Fqn>,
    /// Notes for the user about the declared layout.
    pub notes: Vec<String>,
}

/// The parts of one parameter.
struct DeclaredShard {
    /// The shapes of the shards to which the layout was applied.
    shapes: Vec<Dims>,
    joined: Joined,
}

impl DeclaredShards {
    /// Applies the declared layout to the parameters whose layout is unknown. `module` has the names in the order in which the
    /// modules registered them. `ties` has the tied layers among the frozen parameters, with the names of their ties.
    ///
    /// # Errors
    /// `Usage` for a declaration that does not fit the ranks or that has no effect, `Conflict` for shards that do not match
    /// it, `Unsupported` for partial values.
    pub fn new(
        reading: &ReadFindings<'_>,
        declared: &DeclaredLayout,
        folder: &Path,
        module: &Module<'_>,
        (trained, frozen): (&[Param<'_>], &[Param<'_>]),
        mut ties: HashMap<String, Fqn>,
    ) -> Result<Self> {
        let is_trained: HashSet<&str> = trained.iter().map(|param| param.fqn.as_str()).collect();
        // With weights of the module, the trained parameters are among the frozen ones, too.
        let mut by_name: IndexMap<&Fqn, &Param<'_>> = IndexMap::new();
        for param in trained.iter().chain(frozen).filter(|param| param.joined.is_unknown) {
            by_name.entry(param.fqn).or_insert(param);
        }
        ties.retain(|_, tie| by_name.contains_key(tie));
        by_name.retain(|fqn, _| !ties.contains_key(fqn.as_str()));
        let mut params: Vec<&Param<'_>> = by_name.into_values().collect();
        params.sort_by_key(|param| module.get_index_of(param.fqn.as_str()).unwrap_or(usize::MAX));
        let ranks = params.iter().map(|param| param.shards.len()).max().unwrap_or(0);
        let all = (0..).map(Rank).take(ranks).collect();
        let ranks = RanksWithFiles { all, ..RanksWithFiles::default() };
        let mut catalog = state_dict(&params, &is_trained)?;
        let order = Format::Deepspeed.order();
        declared_layout::apply(declared, &mut catalog, folder, (&reading.files, &ranks), order)?;
        let declared = |(param, entry): (&&Param<'_>, &TensorEntry)| {
            Ok((param.fqn.clone(), DeclaredShard { shapes: shapes(param), joined: joined(folder, entry)? }))
        };
        let by_name: IndexMap<Fqn, DeclaredShard> =
            params.iter().zip(&catalog.tensors).map(declared).collect::<Result<_>>()?;
        let with_state = params.iter().filter(|param| is_trained.contains(param.fqn.as_str()));
        for (param, state) in with_state.zip(&catalog.tensors[params.len()..]) {
            if joined(folder, state)? != by_name[param.fqn].joined {
                return Err(Error::usage(
                    format!("the declared layout of the optimizer state of {} is not that of the parameter", param.fqn),
                    "in checkpoints of DeepSpeed, optimizer state has the layout of its parameter: declare only parameters",
                ));
            }
        }
        Ok(Self { by_name, ties, notes: catalog.notes })
    }

    /// Gives parameters their parts.
    ///
    /// # Errors
    /// `Malformed` if a parameter has other shapes than the shards to which the layout was applied.
    pub fn join(&self, params: &mut [Param<'_>]) -> Result<()> {
        for param in params.iter_mut().filter(|param| param.joined.is_unknown) {
            let name = self.ties.get(param.fqn.as_str()).unwrap_or(param.fqn);
            let DeclaredShard { shapes: expected, joined } = &self.by_name[name];
            let found = shapes(param);
            if found != *expected {
                let file = param.shards[0].model.first();
                let at = format!("the shapes of `{}` in `module`", param.fqn);
                return Err(leftover(file.path(), &at, format!("{expected:?} (param_shapes)"), format!("{found:?}")));
            }
            param.copies.extend(copies_of(joined, &param.shards));
            param.joined = joined.clone();
        }
        Ok(())
    }
}

/// Returns the shapes of the shards of a parameter.
fn shapes(param: &Param<'_>) -> Vec<Dims> {
    param.shards.iter().map(|shard| shard.placed.shape.clone()).collect()
}

/// Returns a parameter as a plain tensor of the tensor-parallel ranks.
fn plain(param: &Param<'_>) -> Result<TensorEntry> {
    Ok(TensorEntry { unreadable: None, ..master_entry(param)? })
}

/// Makes a catalog in which each parameter is a plain tensor of the tensor-parallel ranks. Its first tensors are those of
/// `params`. Trained parameters have optimizer state of the same shapes, so that a plan knows them.
fn state_dict(params: &[&Param<'_>], is_trained: &HashSet<&str>) -> Result<Catalog> {
    let mut catalog = Catalog::empty();
    let (mut model, mut state) = (Vec::new(), Vec::new());
    for param in params {
        let id = catalog.push_tensor(plain(param)?);
        model.push((Value::Str(param.fqn.into()), Value::Tensor(id)));
    }
    for (param, (name, _)) in params.iter().zip(&model).filter(|(param, _)| is_trained.contains(param.fqn.as_str())) {
        let id = catalog.push_tensor(plain(param)?);
        let own = vec![(Value::Str("exp_avg".into()), Value::Tensor(id))];
        state.push((name.clone(), dict(DictKind::Plain, own)));
    }
    let optimizer = dict(DictKind::Plain, vec![(Value::Str(STATE.into()), dict(DictKind::Plain, state))]);
    let entries =
        vec![(Value::Str("model".into()), dict(DictKind::Ordered, model)), (Value::Str("optimizer".into()), optimizer)];
    catalog.state = dict(DictKind::Plain, entries);
    Ok(catalog)
}

/// Returns the parts of a parameter from its entry with the declared layout.
fn joined(folder: &Path, entry: &TensorEntry) -> Result<Joined> {
    if let Some(why) = &entry.unreadable {
        return Err(why.error(entry.fqn.as_str()));
    }
    if entry.partial_values.is_some() {
        return Err(refused(folder, &format!("with partial values of `{}`", entry.fqn), GATHER));
    }
    let mut joined = Joined { shape: entry.shape.clone(), is_declared: true, ..Joined::default() };
    let mut known = HashMap::new();
    for chunk in entry.chunks.iter() {
        let shard = chunk.rank.map_or(0, |rank| rank.0 as usize);
        for (to, start) in chunk.tile.regions() {
            let from = Region { offsets: start, sizes: to.sizes.clone() };
            joined.add(&mut known, shard, from, to);
        }
    }
    Ok(joined)
}
