//! The files of one checkpoint, found by their names. Names show most kinds of checkpoints that dtshard does not read,
//! and files that another run left in the folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::names::{Role, StatesName, is_expert, is_layer};
use crate::error::{Error, FormatError, Result};
use crate::format::shortfall::list_missing_names;
use crate::name_list::{FEW, short_list};
use crate::quantity::count;

/// The files of a checkpoint, by the number of the partition.
#[derive(Debug, Default)]
pub struct StatesFiles {
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

impl StatesFiles {
    /// Groups the names in a folder by their roles.
    ///
    /// # Errors
    /// `Unsupported` for kinds of checkpoints that dtshard does not read, `Malformed` for files of several runs,
    /// `Missing` if a partition has no file.
    pub fn find(folder: &Path, names: &[String]) -> Result<Self> {
        refuse_by_names(folder, names)?;
        let mut known: BTreeMap<(u8, u32), (StatesName, &String)> = BTreeMap::new();
        for name in names {
            let Some(parsed) = StatesName::parse(name) else { continue };
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
        let files = Self { model: paths(role), optimizer: paths(Role::Optimizer), is_stage3 };
        if files.model.is_empty() {
            let first = of(Role::Optimizer).next().map(|(parsed, _)| parsed.model_parallel).unwrap_or_default();
            let name = StatesName { role: Role::Model, partition: 0, model_parallel: first, is_bf16: false };
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

fn missing_files(folder: &Path, at: &str, expected: String, missing: &[String]) -> Error {
    Error::Format(FormatError::Missing {
        path: folder.to_path_buf(),
        at: at.to_owned(),
        expected,
        missing: short_list(missing, FEW),
        hint: Some(String::from("copy the files of all ranks into the folder")),
    })
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
    if let Some(name) = find(&is_expert) {
        return Err(refused(folder, &format!("with experts ({name})"), GATHER));
    }
    if let Some(name) = find(&is_layer) {
        return Err(refused(folder, &format!("of pipeline parallelism ({name})"), GATHER));
    }
    if let Some(name) = find(&|name| StatesName::parse(name).is_some_and(|parsed| parsed.model_parallel > 0)) {
        return Err(refused(folder, &format!("of tensor or pipeline parallelism ({name})"), GATHER));
    }
    let has_optimizer = || find(&|name| StatesName::parse(name).is_some_and(|name| name.role == Role::Optimizer));
    if find(&|name| name == "zero").is_some() && has_optimizer().is_none() {
        let hint = "give the checkpoint from which ds_to_universal.py made it";
        return Err(refused(folder, "in Universal form (folder zero)", hint));
    }
    if find(&|name| name == "offloaded_tensors").is_some() {
        return Err(refused(folder, "with an optimizer that was offloaded to NVMe (offloaded_tensors)", OFFLOAD));
    }
    Ok(())
}

/// The hint for optimizers that were offloaded to NVMe.
pub const OFFLOAD: &str = "load it in a job with offload_optimizer.device set to cpu or none, and save it again";
