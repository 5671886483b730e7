//! The optimizer of ZeRO stage 0 with experts: one file for each expert-parallel rank. The ranks have copies of all parameters
//! outside of experts, and each of them has its own experts:
//!
//! ```text
//! expp_rank_0_mp_rank_00_optim_states.pt     a  b  experts 0 and 1
//! expp_rank_1_mp_rank_00_optim_states.pt     a  b  experts 2 and 3
//! ```
//!
//! The parameters have numbers in these files. Since 0.19.7, the model file has a copy of the first of them.
//!
//! Source: `_save_moe_checkpoint` in `deepspeed/runtime/engine.py`, `deepspeed/moe/layer.py`, `MOELayer` in
//! `deepspeed/moe/sharded_moe.py`.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use indexmap::IndexMap;

use super::bytes::{BLOCK, read as read_elements};
use super::experts::split_expert;
use super::fields::Fields;
use super::folder::{FolderFiles, GATHER, leftover, refused};
use super::model::{ModelStates, StoredValue};
use super::optimizer::options_without;
use super::whole_masters::{Candidate, MASTERS, MOE, NAME, OWN, WholeGroup, WholeMaster, find_names};
use crate::catalog::Value;
use crate::catalog::optimizer::{GROUPS, PARAMS};
use crate::error::{Error, Result};
use crate::format::name_of;
use crate::format::torch::{RankFile, View};
use crate::quantity::count;
use crate::storage::Files;

/// The key of the optimizer in the files of expert-parallel ranks, and in the model file.
pub const OPTIMIZER: &str = "optimizer";

/// Reads the parameter groups of the optimizer, with the experts of all ranks. `ranks` has the file of each expert-parallel
/// rank. Copies are compared if `files` has values: a metadata mirror has none.
///
/// # Errors
/// `Unsupported` if the name of a parameter is not known; `Missing`, `Malformed`, `Io`.
pub fn read<'a>(
    folder: &Path,
    found: &FolderFiles,
    (files, has_values): (&Files, bool),
    model: &'a ModelStates<'a>,
    ranks: &'a [RankFile],
) -> Result<Vec<WholeGroup<'a>>> {
    let mut optimizers = Vec::with_capacity(ranks.len());
    for file in ranks {
        let root = Fields::of_file(file)?;
        let optimizer = root.dict(OPTIMIZER)?;
        optimizers.push(optimizer.ok_or_else(|| root.wrong(OPTIMIZER, "the state of the optimizer", "none"))?);
    }
    let number = ranks.len() as u64;
    let mut groups = Vec::new();
    let mut known: HashMap<blake3::Hash, String> = HashMap::new();
    for (rank, optimizer) in (0..).zip(&optimizers) {
        check_ranks(folder, found, optimizer)?;
        let params = candidates(folder, model, rank, number)?;
        let own = find_names(folder, files, optimizer, &params)?;
        if has_values
            && let Some(digest) = digest_of_experts(files, &own)?
            && let Some(other) = known.insert(digest, optimizer.file_name())
        {
            let expected = format!("others than in {other}, because each rank has its own experts");
            return Err(leftover(optimizer.path(), "the optimizer state of experts", expected, "equal values"));
        }
        if rank == 0 {
            groups = own;
            let copy = model.first().dict(OPTIMIZER)?.filter(|_| has_values);
            if let Some(copy) = copy {
                let copy = find_names(folder, files, &copy, &params)?;
                Comparison { files, groups: &groups, optimizer, has_values }.check(model.first(), &copy, false)?;
            }
            continue;
        }
        Comparison { files, groups: &groups, optimizer: &optimizers[0], has_values }.check(optimizer, &own, true)?;
        for (group, own) in groups.iter_mut().zip(own) {
            group.params.extend(own.params.into_iter().filter(|param| split_expert(param.name).is_some()));
        }
    }
    Ok(groups)
}

/// Checks the number of files, if a group of experts has the number of expert-parallel ranks in its name (`ep_size_2`).
fn check_ranks(folder: &Path, found: &FolderFiles, optimizer: &Fields<'_>) -> Result<()> {
    const PREFIX: &str = "ep_size_";
    let own = optimizer.dict(OWN)?.unwrap_or(*optimizer);
    let groups = own.list(GROUPS)?.iter().filter_map(Value::as_dict);
    let of_experts = groups.filter(|group| group.get(MOE) == Some(&Value::Bool(true)));
    let names: HashSet<&str> = of_experts.filter_map(|group| group.get(NAME)?.as_str()).collect();
    let sizes: HashSet<u32> = names.iter().filter_map(|name| name.strip_prefix(PREFIX)?.parse().ok()).collect();
    if sizes.len() > 1 {
        return Err(different_sizes(folder));
    }
    match sizes.into_iter().next() {
        Some(size) => {
            let name = optimizer.file_name();
            found.check_expert_ranks(folder, size, &format!("the group {PREFIX}{size} in {name}"))
        }
        None => Ok(()),
    }
}

fn different_sizes(folder: &Path) -> Error {
    refused(folder, "of ZeRO stage 0 with layers of experts of different `ep_size`", GATHER)
}

/// Returns the parameters that an expert-parallel rank has, in the order of its module: the experts of a layer follow the
/// gate of the layer.
fn candidates<'a>(folder: &Path, model: &'a ModelStates<'a>, rank: u64, ranks: u64) -> Result<Vec<Candidate<'a>>> {
    let mut dense: Vec<Candidate<'a>> = Vec::new();
    let mut experts: IndexMap<&'a str, Vec<Candidate<'a>>> = IndexMap::new();
    let mut gates: HashMap<&'a str, usize> = HashMap::new();
    let buffers: HashSet<&str> = model.buffers.iter().copied().collect();
    for (name, stored) in &model.module {
        let (name, stored): (&'a str, StoredValue<'a>) = (name, *stored);
        let parts = split_expert(name).and_then(|parts| Some((parts, *model.experts.get(parts.0)?)));
        let Some(((prefix, number, rest), total)) = parts else {
            if let Some(end) = name.find(GATE) {
                gates.insert(&name[..end], dense.len());
            }
            dense.push(Candidate { name, stored, is_expert: false });
            continue;
        };
        if !total.is_multiple_of(ranks) {
            return Err(different_sizes(folder));
        }
        let own = total / ranks;
        let of_layer = experts.entry(prefix).or_default();
        // Each rank counts its own experts from 0 on.
        let is_buffer = buffers.contains(format!("{prefix}{}.{rest}", number % own).as_str());
        if number / own == rank && !is_buffer {
            of_layer.push(Candidate { name, stored, is_expert: true });
        }
    }
    let mut after: HashMap<usize, Vec<Candidate<'a>>> = HashMap::new();
    for (prefix, own) in experts {
        let layer = prefix.strip_suffix(EXPERTS_OF_LAYER);
        let Some(gate) = layer.and_then(|layer| gates.get(layer)) else {
            let expected = format!("the gate of the layer of `{prefix}`");
            return Err(model.first().wrong("module", expected, "none"));
        };
        after.entry(*gate).or_default().extend(own);
    }
    let mut all = Vec::with_capacity(model.module.len());
    for (index, param) in dense.into_iter().enumerate() {
        if !buffers.contains(param.name) {
            all.push(param);
        }
        all.extend(after.remove(&index).into_iter().flatten());
    }
    Ok(all)
}

/// Returns a hash of the first elements of the optimizer states of experts, which differ between ranks; `None` if all of them
/// are zero, as before the first step.
fn digest_of_experts(files: &Files, groups: &[WholeGroup<'_>]) -> Result<Option<blake3::Hash>> {
    let mut hasher = blake3::Hasher::new();
    let mut is_zero = true;
    let params = groups.iter().flat_map(|group| &group.params).filter(|param| split_expert(param.name).is_some());
    for param in params {
        let fields = Fields::of_file(param.file)?;
        let views = entries(param.state).iter().filter_map(|(_, value)| fields.view(value));
        // All parameters have equal numbers of steps.
        for view in views.filter(|view| !view.sizes.is_empty() && !view.sizes.contains(&0)) {
            let bytes = read_elements(files, param.file, view, 0..end(view).min(64))?;
            is_zero &= bytes.iter().all(|byte| *byte == 0);
            hasher.update(&bytes);
        }
    }
    Ok((!is_zero).then(|| hasher.finalize()))
}

/// Returns the number of elements of the storage from the first to the last element of a tensor.
fn end(view: &View) -> u64 {
    let steps =
        view.sizes.iter().zip(&view.strides).map(|(size, stride)| size.saturating_sub(1).saturating_mul(*stride));
    if view.sizes.contains(&0) { 0 } else { steps.fold(1, u64::saturating_add) }
}

/// The part of the name of a gate after the name of its layer.
const GATE: &str = ".deepspeed_moe.gate.";
/// The part of the name of an expert between the name of its layer and its number.
const EXPERTS_OF_LAYER: &str = ".deepspeed_moe.experts.deepspeed_experts.";

/// The optimizer of the first expert-parallel rank, with which those of other files are compared.
struct Comparison<'c, 'a> {
    files: &'c Files,
    groups: &'c [WholeGroup<'a>],
    optimizer: &'c Fields<'a>,
    has_values: bool,
}

impl Comparison<'_, '_> {
    /// Checks that the optimizer in another file has equal groups, and equal states of the parameters outside of experts. A
    /// file of the same rank (`has_own_experts` is false) has equal states of experts, too.
    fn check(&self, other: &Fields<'_>, groups: &[WholeGroup<'_>], has_own_experts: bool) -> Result<()> {
        let name = self.optimizer.file_name();
        let options = |groups: &[WholeGroup<'_>]| {
            Value::List(groups.iter().map(|group| options_without(group.options, &[PARAMS])).collect())
        };
        if !options(self.groups).same_but_tensors(&options(groups)) {
            let expected = format!("{} with the options in {name}", count(self.groups.len(), "group"));
            let found = format!("{} with other options", count(groups.len(), "group"));
            return Err(leftover(other.path(), &format!("{OPTIMIZER}.{GROUPS}"), expected, found));
        }
        let is_compared = |param: &&WholeMaster<'_>| !has_own_experts || split_expert(param.name).is_none();
        for (index, (own, others)) in self.groups.iter().zip(groups).enumerate() {
            let by_name: HashMap<&str, &WholeMaster<'_>> =
                others.params.iter().filter(is_compared).map(|param| (param.name, param)).collect();
            // The group of the first rank already has experts of other ranks.
            let is_copied =
                |param: &&WholeMaster<'_>| is_compared(param) && param.file.path == self.optimizer.file.path;
            let own: Vec<&WholeMaster<'_>> = own.params.iter().filter(is_copied).collect();
            if own.len() != by_name.len() {
                let expected = format!("{}, as in {name}", count(own.len(), "parameter"));
                let at = format!("{OPTIMIZER}.{GROUPS}[{index}]");
                return Err(leftover(other.path(), &at, expected, by_name.len().to_string()));
            }
            for param in own {
                let Some(copy) = by_name.get(param.name) else {
                    let at = format!("{OPTIMIZER}.{GROUPS}[{index}]");
                    let expected = format!("`{}`, as in {name}", param.name);
                    return Err(leftover(other.path(), &at, expected, "none"));
                };
                self.compare(param, copy)?;
            }
        }
        Ok(())
    }

    /// Compares the master weight and the state of one parameter in two files.
    fn compare(&self, own: &WholeMaster<'_>, other: &WholeMaster<'_>) -> Result<()> {
        let [first, second] = [Fields::of_file(own.file)?, Fields::of_file(other.file)?];
        let differs = |what: &str| {
            let expected = format!("the values in {}, because the files have copies of it", name_of(&own.file.path));
            leftover(&other.file.path, &format!("{what} of `{}`", own.name), expected, "others")
        };
        let is_same = match (own.master, other.master) {
            (Some(a), Some(b)) => self.is_same((own.file, a), (other.file, b))?,
            (a, b) => a.is_none() && b.is_none(),
        };
        if !is_same {
            return Err(differs(&format!("the master weights ({MASTERS})")));
        }
        let (states, others) = (entries(own.state), entries(other.state));
        if states.len() != others.len() {
            return Err(differs("the optimizer state"));
        }
        for ((key, value), (other_key, copy)) in states.iter().zip(others) {
            let is_same = match (first.view(value), second.view(copy)) {
                (Some(a), Some(b)) => self.is_same((own.file, a), (other.file, b))?,
                (None, None) => value.same_but_tensors(copy),
                _ => false,
            };
            if !is_same || !key.same_but_tensors(other_key) {
                return Err(differs(key.as_str().unwrap_or("the optimizer state")));
            }
        }
        Ok(())
    }

    /// Returns whether two tensors have equal elements in equal layouts.
    fn is_same(&self, (file, view): (&RankFile, &View), (other_file, other): (&RankFile, &View)) -> Result<bool> {
        if (view.dtype, &view.sizes, &view.strides) != (other.dtype, &other.sizes, &other.strides) {
            return Ok(false);
        }
        let end = if self.has_values { end(view) } else { 0 };
        let mut start = 0;
        while start < end {
            let block = start..end.min(start + BLOCK);
            start = block.end;
            let own = read_elements(self.files, file, view, block.clone())?;
            if own != read_elements(self.files, other_file, other, block)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn entries(state: Option<&Value>) -> &[(Value, Value)] {
    state.and_then(Value::as_dict).map_or(&[], |state| &state.entries)
}
