//! The files of one checkpoint, found by their names. Names show most kinds of checkpoints that dtshard does not read,
//! and files that another run left in the folder.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::names::{ExpertName, ExpertRankName, LayerName, Role, StatesName, is_expert, is_universal};
use crate::error::{Error, FormatError, Result};
use crate::format::name_of;
use crate::format::shortfall::list_missing_names;
use crate::name_list::{FEW, short_list};
use crate::quantity::count;

/// The files of one model-parallel rank, by the number of the partition. They form a ZeRO job of their own, which knows
/// nothing of other model-parallel ranks.
#[derive(Debug, Default)]
pub struct StatesFiles {
    /// The model-parallel rank: the number of the stage of the pipeline, times the number of tensor-parallel ranks, plus
    /// the tensor-parallel rank.
    pub rank: u32,
    /// The model files: one for ZeRO stages 0 to 2, and one for each partition for stage 3.
    pub model: BTreeMap<u32, PathBuf>,
    pub optimizer: BTreeMap<u32, PathBuf>,
    /// True if each partition has a model file, as ZeRO stage 3 writes them.
    pub is_stage3: bool,
}

/// Returns the error for a kind of DeepSpeed checkpoint that dtshard does not read.
pub fn refused(path: &Path, kind: &str, hint: &str) -> Error {
    Error::unsupported(
        format!("{} is a DeepSpeed checkpoint {kind}, which dtshard does not read", path.display()),
        hint,
    )
}

/// The hint for checkpoints that only the job that saved them can gather.
pub const GATHER: &str = "load it in a job like the one that saved it, and save the whole model there, for example with \
                          save_16bit_model or state_dict()";

const LEFTOVERS: &str = "move the files of one of the two runs to another folder";

/// The files of a checkpoint.
#[derive(Debug)]
pub struct FolderFiles {
    /// The files of each model-parallel rank, from rank 0 on.
    pub jobs: Vec<StatesFiles>,
    /// The files of the layers of a pipeline, in ascending order; empty without pipeline parallelism.
    pub layers: BTreeMap<LayerName, PathBuf>,
    /// The files of experts, in ascending order; empty without experts.
    pub experts: BTreeMap<ExpertName, PathBuf>,
    /// The optimizer file of each expert-parallel rank; empty without experts, and at other stages than 0.
    pub expert_ranks: BTreeMap<u32, PathBuf>,
}

impl FolderFiles {
    /// Groups the names in a folder by model-parallel ranks, and by their roles.
    ///
    /// # Errors
    /// `Unsupported` for kinds of checkpoints that dtshard does not read, `Malformed` for files of several runs,
    /// `Missing` if a partition or a model-parallel rank has no file.
    pub fn find(folder: &Path, names: &[String]) -> Result<Self> {
        refuse_by_names(folder, names)?;
        let mut by_rank: BTreeMap<u32, Vec<(StatesName, &String)>> = BTreeMap::new();
        for name in names {
            let Some(parsed) = StatesName::parse(name) else { continue };
            by_rank.entry(parsed.model_parallel).or_default().push((parsed, name));
        }
        if by_rank.is_empty() {
            by_rank.insert(0, Vec::new());
        }
        let ranks = by_rank.keys().next_back().map_or(0, |last| last.saturating_add(1));
        if by_rank.len() as u64 != u64::from(ranks) {
            let example = by_rank.values().flatten().next().expect("a rank has a file").0;
            let name = |model_parallel| StatesName { model_parallel, partition: 0, ..example }.of_partition(0);
            let absent = (0..ranks).filter(|rank| !by_rank.contains_key(rank)).map(name);
            let missing = list_missing_names(u64::from(ranks) - by_rank.len() as u64, absent);
            let expected = format!("files of {} (the highest number in the names, plus one)", model_parallel(ranks));
            return Err(missing_files(folder, "files of model-parallel ranks", expected, &missing));
        }
        let jobs: Vec<StatesFiles> = by_rank
            .into_iter()
            .map(|(rank, names)| StatesFiles::of_rank(folder, rank, names))
            .collect::<Result<_>>()?;
        check_alike(folder, &jobs)?;
        let mut experts: BTreeMap<ExpertName, PathBuf> = BTreeMap::new();
        let mut expert_ranks: BTreeMap<u32, PathBuf> = BTreeMap::new();
        for name in names {
            let path = folder.join(name);
            let (rank, other) = match (ExpertName::parse(name), ExpertRankName::parse(name)) {
                (Some(expert), _) => (expert.model_parallel, experts.insert(expert, path)),
                (None, Some(parsed)) => (parsed.model_parallel, expert_ranks.insert(parsed.rank, path)),
                (None, None) => continue,
            };
            if jobs.len() > 1 || jobs[0].is_stage3 || rank > 0 {
                let kind = format!("with experts ({name}) and tensor or pipeline parallelism, or ZeRO stage 3");
                return Err(refused(folder, &kind, GATHER));
            }
            if let Some(other) = other {
                return Err(mixed(folder, &name_of(&other), name));
            }
        }
        if let (Some(path), false) = (expert_ranks.values().next(), jobs[0].optimizer.is_empty()) {
            // Before 0.19.7, all stages write these files. The model file of these releases has no `param_shapes`.
            let kind = format!("with experts ({}) and optimizer files of ZeRO", name_of(path));
            return Err(refused(folder, &kind, GATHER));
        }
        let found = Self { jobs, layers: find_layers(folder, names)?, experts, expert_ranks };
        let ranks = found.expert_ranks.keys().next_back().map_or(0, |last| last.saturating_add(1));
        found.check_expert_ranks(folder, ranks, "the highest number in the names, plus one")?;
        Ok(found)
    }

    /// Checks that every expert-parallel rank has its optimizer file. `why` says where the number of ranks comes from.
    ///
    /// # Errors
    /// `Missing` with the names of missing files, `Malformed` for surplus files.
    pub fn check_expert_ranks(&self, folder: &Path, ranks: u32, why: &str) -> Result<()> {
        if let Some((surplus, path)) = self.expert_ranks.range(ranks..).next() {
            let expected = format!("expert-parallel ranks 0 to {} ({why})", ranks.saturating_sub(1));
            return Err(leftover(path, "the name of the file", expected, format!("rank {surplus}")));
        }
        let lacking = u64::from(ranks) - self.expert_ranks.len() as u64;
        if lacking == 0 {
            return Ok(());
        }
        let absent = (0..ranks).filter(|rank| !self.expert_ranks.contains_key(rank));
        let names = absent.map(|rank| ExpertRankName { rank, model_parallel: 0 }.file_name());
        let missing = list_missing_names(lacking, names);
        let expected = format!("files of {} ({why})", count(ranks as usize, "expert-parallel rank"));
        Err(missing_files(folder, "optimizer files", expected, &missing))
    }

    /// Checks that there is a file of every expert. `counts` has the number of experts of each layer.
    ///
    /// # Errors
    /// `Missing` with the names of missing files, `Malformed` for surplus files.
    pub fn check_experts(&self, folder: &Path, counts: &[u32]) -> Result<()> {
        let count_of = |layer: u32| counts.get(layer as usize).copied().unwrap_or(0);
        if let Some((name, path)) = self.experts.iter().find(|(name, _)| name.expert >= count_of(name.layer)) {
            let expected =
                format!("{} (num_experts in the model file)", count(count_of(name.layer) as usize, "expert"));
            return Err(leftover(path, "the name of the file", expected, format!("expert {}", name.expert)));
        }
        let total: u64 = counts.iter().map(|count| u64::from(*count)).sum();
        if self.experts.len() as u64 == total {
            return Ok(());
        }
        let needed = (0..).zip(counts).flat_map(|(layer, count)| (0..*count).map(move |expert| (layer, expert)));
        let names = needed.map(|(layer, expert)| ExpertName { layer, expert, model_parallel: 0 });
        let absent = names.filter(|name| !self.experts.contains_key(name)).map(ExpertName::file_name);
        let missing = list_missing_names(total - self.experts.len() as u64, absent);
        let expected = format!("files of {total} experts (num_experts in the model file)");
        Err(missing_files(folder, "files of experts", expected, &missing))
    }

    /// Checks that there are files of `ranks` model-parallel ranks. `why` says where this number comes from.
    ///
    /// # Errors
    /// `Missing` with the names of missing files, `Malformed` for surplus files.
    pub fn check_ranks(&self, folder: &Path, ranks: u64, why: &str) -> Result<()> {
        let found = self.jobs.len() as u64;
        if found > ranks {
            let path = self.jobs.last().and_then(|job| job.model.values().next()).expect("each rank has a model file");
            let expected = format!("model-parallel ranks 0 to {} ({why})", ranks.saturating_sub(1));
            return Err(leftover(path, "the name of the file", expected, format!("rank {}", found - 1)));
        }
        if found == ranks {
            return Ok(());
        }
        let example =
            self.jobs[0].model.values().next().and_then(|path| StatesName::parse(path.file_name()?.to_str()?));
        let example = example.expect("files are found by their names");
        let absent = (found..ranks).map_while(|rank| u32::try_from(rank).ok());
        let names = absent.map(|model_parallel| StatesName { model_parallel, ..example }.of_partition(0));
        let missing = list_missing_names(ranks - found, names);
        Err(missing_files(folder, "files of model-parallel ranks", format!("{ranks} ranks ({why})"), &missing))
    }

    /// Returns the number of tensor-parallel ranks of each stage of the pipeline. Without pipeline parallelism, all
    /// model-parallel ranks are tensor-parallel ranks.
    ///
    /// # Errors
    /// `Malformed` if the number of model-parallel ranks is not a multiple of it.
    pub fn tensor_parallel(&self, folder: &Path) -> Result<usize> {
        let Some((last, path)) = self.layers.last_key_value() else { return Ok(self.jobs.len()) };
        let ranks = last.tensor_parallel.map_or(1, |rank| rank as usize + 1);
        if self.jobs.len().is_multiple_of(ranks) {
            return Ok(ranks);
        }
        let name = name_of(path);
        let expected = format!("a multiple of {ranks}, because {name} is of tensor-parallel rank {}", ranks - 1);
        Err(leftover(folder, "the number of model-parallel ranks", expected, self.jobs.len().to_string()))
    }
}

fn model_parallel(ranks: u32) -> String {
    count(ranks as usize, "model-parallel rank")
}

/// Checks that the files of all model-parallel ranks have the same roles, and the same number of partitions.
fn check_alike(folder: &Path, jobs: &[StatesFiles]) -> Result<()> {
    let partitions = jobs.iter().map(|job| job.optimizer.len().max(job.model.len())).max().unwrap_or_default();
    let name =
        |path: Option<&PathBuf>| path.and_then(|path| path.file_name()).unwrap_or_default().display().to_string();
    let first = &jobs[0];
    for job in jobs {
        let with = jobs.iter().find_map(|job| job.optimizer.values().next());
        if let (true, Some(with)) = (job.optimizer.is_empty(), with) {
            let name = with.file_name().and_then(|name| StatesName::parse(name.to_str()?));
            let name = name.expect("files are found by their names");
            let missing = [StatesName { model_parallel: job.rank, ..name }.of_partition(0)];
            let expected = String::from("the files of every model-parallel rank");
            return Err(missing_files(folder, "optimizer files", expected, &missing));
        }
        let is_bf16 = |job: &StatesFiles| name(job.optimizer.values().next()).starts_with("bf16_");
        if (first.is_stage3, is_bf16(first)) != (job.is_stage3, is_bf16(job)) {
            let [own, other] = if first.is_stage3 == job.is_stage3 {
                [first, job].map(|job| name(job.optimizer.values().next()))
            } else {
                [first, job].map(|job| name(job.model.values().next()))
            };
            return Err(mixed(folder, &own, &other));
        }
        let partitions = u32::try_from(partitions).unwrap_or(u32::MAX);
        job.check_partitions(folder, partitions, "as many as of the other model-parallel ranks")?;
    }
    Ok(())
}

/// Returns the files of the layers of a pipeline.
fn find_layers(folder: &Path, names: &[String]) -> Result<BTreeMap<LayerName, PathBuf>> {
    let mut layers: BTreeMap<LayerName, PathBuf> = BTreeMap::new();
    for name in names {
        let Some(parsed) = LayerName::parse(name) else { continue };
        if let Some(other) = layers.insert(parsed, folder.join(name)) {
            return Err(mixed(folder, &name_of(&other), name));
        }
    }
    let of = |is_parallel: bool| layers.keys().find(move |name| name.tensor_parallel.is_some() == is_parallel);
    if let (Some(one), Some(other)) = (of(false), of(true)) {
        return Err(mixed(folder, &one.file_name(), &other.file_name()));
    }
    // Each tensor-parallel rank has a file of each layer. Layers without a state dict have no files at all.
    let ranks = layers.keys().filter_map(|name| name.tensor_parallel).max().map_or(0, |last| u64::from(last) + 1);
    let numbers: BTreeSet<u32> = layers.keys().map(|name| name.layer).collect();
    let lacking = (numbers.len() as u64).saturating_mul(ranks).saturating_sub(layers.len() as u64);
    if lacking > 0 {
        let ranks = || (0..=u32::MAX).take_while(|rank| u64::from(*rank) < ranks);
        let needed = numbers.iter().flat_map(|layer| ranks().map(|rank| (*layer, Some(rank))));
        let absent = needed.map(|(layer, tensor_parallel)| LayerName { layer, tensor_parallel });
        let absent = absent.filter(|name| !layers.contains_key(name)).map(LayerName::file_name);
        let expected = String::from("a file of each layer for every tensor-parallel rank");
        return Err(missing_files(folder, "files of layers", expected, &list_missing_names(lacking, absent)));
    }
    Ok(layers)
}

impl StatesFiles {
    /// Groups the names of the files of one model-parallel rank.
    fn of_rank(folder: &Path, rank: u32, names: Vec<(StatesName, &String)>) -> Result<Self> {
        let mut known: BTreeMap<(u8, u32), (StatesName, &String)> = BTreeMap::new();
        for (parsed, name) in names {
            if let Some((_, other)) = known.insert((parsed.role as u8, parsed.partition), (parsed, name)) {
                return Err(mixed(folder, other, name));
            }
        }
        let of = |role: Role| known.values().filter(move |(parsed, _)| parsed.role == role);
        if let (Some((_, whole)), Some((_, partitioned))) = (of(Role::Model).next(), of(Role::PartitionedModel).next())
        {
            return Err(mixed(folder, whole, partitioned));
        }
        let is_stage3 = of(Role::PartitionedModel).next().is_some();
        let role = if is_stage3 { Role::PartitionedModel } else { Role::Model };
        let paths = |role: Role| {
            of(role).map(|(parsed, name)| (parsed.partition, folder.join(name))).collect::<BTreeMap<_, _>>()
        };
        let files = Self { rank, model: paths(role), optimizer: paths(Role::Optimizer), is_stage3 };
        if files.model.is_empty() {
            let name = StatesName { role: Role::Model, partition: 0, model_parallel: rank, is_bf16: false };
            let missing = vec![format!("{} (or the model files of ZeRO stage 3)", name.of_partition(0))];
            return Err(missing_files(folder, "model files", String::from("the file of the model"), &missing));
        }
        let optimizer = || of(Role::Optimizer);
        if let (Some((_, bf16)), Some((_, other))) =
            (optimizer().find(|(name, _)| name.is_bf16), optimizer().find(|(name, _)| !name.is_bf16))
        {
            return Err(mixed(folder, bf16, other));
        }
        let last = [&files.optimizer, &files.model].into_iter().filter_map(|set| set.keys().next_back()).max();
        let partitions = last.map_or(0, |last| last.saturating_add(1));
        files.check_partitions(folder, partitions, "the highest number in the names, plus one")?;
        Ok(files)
    }

    /// Checks that every partition from 0 to `partitions - 1` has its files, and that there are no other files. `why` says
    /// where the number of partitions comes from.
    ///
    /// # Errors
    /// `Missing` with the names of the missing files, `Malformed` for surplus files.
    pub fn check_partitions(&self, folder: &Path, partitions: u32, why: &str) -> Result<()> {
        let mut sets = vec![("optimizer files", &self.optimizer)];
        if self.is_stage3 {
            sets.push(("model files", &self.model));
        }
        // Without any optimizer file the model may be complete: ZeRO stage 0 stores the optimizer in the model file.
        for (at, set) in sets.into_iter().filter(|(_, set)| !set.is_empty()) {
            if let Some((surplus, path)) = set.range(partitions..).next() {
                let expected = format!("partitions 0 to {} ({why})", partitions.saturating_sub(1));
                return Err(leftover(path, "the name of the file", expected, format!("partition {surplus}")));
            }
            if set.len() as u64 == u64::from(partitions) {
                continue;
            }
            let name = set.values().next().and_then(|path| StatesName::parse(path.file_name()?.to_str()?));
            let name = name.expect("files are found by their names");
            let absent = (0..partitions).filter(|number| !set.contains_key(number));
            let missing = list_missing_names(
                u64::from(partitions) - set.len() as u64,
                absent.map(|number| name.of_partition(number)),
            );
            let expected = format!("{} ({why})", count(partitions as usize, "file"));
            return Err(missing_files(folder, at, expected, &missing));
        }
        Ok(())
    }
}

/// Returns the error for a layer of a pipeline whose file is missing, although the layer has a trained parameter.
pub fn missing_layer(folder: &Path, layer: u32, param: &str) -> Error {
    let missing = [LayerName { layer, tensor_parallel: None }.file_name()];
    let expected = format!("the file of the layer that has the trained parameter `{param}`");
    missing_files(folder, "files of layers", expected, &missing)
}

fn missing_files(folder: &Path, at: &str, expected: String, missing: &[String]) -> Error {
    Error::missing(folder, at, expected, short_list(missing, FEW))
        .missing_hint("copy the files of all ranks into the folder")
        .naming(missing)
}

/// Returns the error for a file that does not belong to the checkpoint of the other files.
pub fn leftover(path: &Path, at: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
    Error::Format(FormatError::Malformed {
        path: path.to_path_buf(),
        at: at.to_owned(),
        expected: expected.into(),
        found: found.into(),
        hint: Some("all files of the folder must come from one save of one job; move files of other saves away".into()),
    })
}

fn mixed(folder: &Path, first: &str, second: &str) -> Error {
    Error::Format(FormatError::Malformed {
        path: folder.to_path_buf(),
        at: String::from("the names of the files"),
        expected: String::from("the files of one run"),
        found: format!("{first} and {second}"),
        hint: Some(LEFTOVERS.into()),
    })
}

/// Returns the error for a kind of checkpoint that the names in its folder show, and that dtshard does not read.
fn refuse_by_names(folder: &Path, names: &[String]) -> Result<()> {
    let find = |test: &dyn Fn(&str) -> bool| names.iter().find(|name| test(name));
    let is_known = |name: &str| ExpertName::parse(name).is_some() || ExpertRankName::parse(name).is_some();
    if let Some(name) = find(&|name| is_expert(name) && !is_known(name)) {
        return Err(refused(folder, &format!("with experts ({name})"), GATHER));
    }
    if is_universal(names) {
        let hint = "read it with options::from deepspeed-universal";
        return Err(Error::usage(format!("{} is a Universal checkpoint (folder zero)", folder.display()), hint));
    }
    if find(&|name| name == "offloaded_tensors").is_some() {
        return Err(refused(folder, "with an optimizer that was offloaded to NVMe (offloaded_tensors)", OFFLOAD));
    }
    Ok(())
}

/// The hint for optimizers that were offloaded to NVMe.
pub const OFFLOAD: &str = "load it in a job with offload_optimizer.device set to cpu or none, and save it again";
