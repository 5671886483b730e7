//! Reads the variables that each launcher sets in the environment of the processes that it starts.
//!
//! The names and meanings are documented by PyTorch (`torch/distributed/elastic/agent/server/local_elastic_agent.py`),
//! Open MPI ("Environment variables set for MPI applications"), the process managers of MPICH and Intel MPI, and
//! srun(1).

use super::{Env, Launcher, Part};
use crate::error::{Error, Result};

/// The part of the work that variables of a launcher, or options, assign to this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AssignedPart {
    pub launcher: Launcher,
    pub part: Part,
    /// The text with which messages name these variables or options, for example `SLURM_PROCID=2,
    /// SLURM_STEP_NUM_TASKS=4`.
    pub by: String,
}

/// Returns the value of an environment variable, if the variable is set and not empty.
pub(super) fn text(env: Env<'_>, name: &str) -> Option<String> {
    env(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

/// Returns the value of an environment variable as a number, if the variable is set.
pub(super) fn number(env: Env<'_>, name: &str) -> Result<Option<u32>> {
    let Some(value) = text(env, name) else { return Ok(None) };
    value.parse().map(Some).map_err(|_| {
        Error::usage(format!("{name}={value} in the environment: expected a number"), format!("unset {name}; {ALONE}"))
    })
}

/// Returns the part that two variables of a launcher define; `None` if neither is set. The variable named `rank` has
/// the index of this process, and the variable named `size` has the number of processes.
fn pair(env: Env<'_>, launcher: Launcher, (rank, size): (&str, &str)) -> Result<Option<AssignedPart>> {
    match (number(env, rank)?, number(env, size)?) {
        (None, None) => Ok(None),
        (Some(index), Some(of)) if index < of => {
            Ok(Some(AssignedPart { launcher, part: Part { index, of }, by: format!("{rank}={index}, {size}={of}") }))
        }
        (Some(index), Some(of)) => Err(Error::usage(
            format!(
                "{rank}={index} and {size}={of} in the environment: the rank must be below the number of processes"
            ),
            format!("unset {rank} and {size}; {ALONE}"),
        )),
        (one, _) => {
            let (set, lacking) = if one.is_some() { (rank, size) } else { (size, rank) };
            Err(Error::usage(
                format!("{set}={} is set in the environment, but no {lacking}", text(env, set).unwrap_or_default()),
                format!("unset {set}; {ALONE}"),
            ))
        }
    }
}

/// A hint that is correct for every launcher, because `--parts 1` always starts a run of one process.
pub(super) const ALONE: &str = "or use options::parts 1 to start a run of one process";

/// Returns the part of a process that torchrun started. The agents of torchrun set `TORCHELASTIC_RUN_ID`, `RANK` and
/// `WORLD_SIZE`.
pub(super) fn torchrun(env: Env<'_>) -> Result<Option<AssignedPart>> {
    if text(env, "TORCHELASTIC_RUN_ID").is_none() {
        return Ok(None);
    }
    pair(env, Launcher::Torchrun, ("RANK", "WORLD_SIZE"))
}

pub(super) fn open_mpi(env: Env<'_>) -> Result<Option<AssignedPart>> {
    pair(env, Launcher::OpenMpi, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
}

/// Returns the part that a launcher with the PMI protocol assigns: MPICH, Intel MPI, Cray MPI, or Slurm with
/// `--mpi=pmi2`.
pub(super) fn pmi(env: Env<'_>) -> Result<Option<AssignedPart>> {
    pair(env, Launcher::Pmi, ("PMI_RANK", "PMI_SIZE"))
}

/// Returns the part of a task that srun started. A batch script has `SLURM_PROCID` and `SLURM_NTASKS` as well, but it
/// is not a task of a step. Only a step has `SLURM_STEP_NUM_TASKS`.
pub(super) fn slurm_step(env: Env<'_>) -> Result<Option<AssignedPart>> {
    if text(env, "SLURM_STEP_NUM_TASKS").is_none() {
        return Ok(None);
    }
    pair(env, Launcher::Slurm, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
}

/// Returns the part that `RANK` and `WORLD_SIZE` assign. `torch.distributed` reads these variables if there is no
/// launcher, and a PyTorchJob of Kubernetes sets them. If only one of the two variables is set, it is a leftover of
/// another program and is ignored.
pub(super) fn rank_variables(env: Env<'_>) -> Result<Option<AssignedPart>> {
    if text(env, "RANK").is_none() || text(env, "WORLD_SIZE").is_none() {
        return Ok(None);
    }
    pair(env, Launcher::Variables, ("RANK", "WORLD_SIZE"))
}

/// Returns the index of this process's element in a Slurm job array. The number of elements is not used as the number
/// of parts, because failed elements are submitted again without the other elements.
pub(super) fn array_index(env: Env<'_>) -> Result<Option<u32>> {
    number(env, "SLURM_ARRAY_TASK_ID")
}

/// Returns the index of this process among the processes of its node. `None` if the launcher does not set the index, so
/// that it is unknown.
pub(super) fn local_rank(env: Env<'_>, launcher: Launcher) -> Option<u32> {
    let names: &[&str] = match launcher {
        Launcher::Torchrun | Launcher::Variables => &["LOCAL_RANK"],
        Launcher::OpenMpi => &["OMPI_COMM_WORLD_LOCAL_RANK"],
        Launcher::Pmi => &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        Launcher::Slurm => &["SLURM_LOCALID"],
        Launcher::Alone | Launcher::Options | Launcher::Pmix | Launcher::SlurmArray => &[],
    };
    names.iter().find_map(|name| text(env, name)?.parse().ok())
}

/// Returns the name of this launch; `None` if the launcher sets none. All processes of a launch have the same name, and
/// no other launch has it.
pub(super) fn run(env: Env<'_>, launcher: Launcher) -> Option<String> {
    let joined = |names: &[&str]| {
        let values: Vec<String> = names.iter().filter_map(|name| text(env, name)).collect();
        (!values.is_empty()).then(|| values.join("."))
    };
    match launcher {
        // Users choose run ids, and older versions use the id "none", so run ids repeat. The port is new for each
        // launch, and the id of the job distinguishes jobs. A job may have one step for each node.
        Launcher::Torchrun => joined(&[
            "SLURM_JOB_ID",
            "SLURM_RESTART_COUNT",
            "TORCHELASTIC_RUN_ID",
            "MASTER_PORT",
            "TORCHELASTIC_RESTART_COUNT",
        ]),
        Launcher::OpenMpi | Launcher::Pmix => joined(&["PMIX_NAMESPACE"]),
        // A requeued job keeps its ids, so the restart count distinguishes the launches.
        Launcher::Slurm => joined(&["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]),
        // Slurm sets `PMI_JOBID`, which identifies the step.
        Launcher::Pmi => joined(&["PMI_JOBID", "SLURM_RESTART_COUNT"]).filter(|_| text(env, "PMI_JOBID").is_some()),
        Launcher::Alone | Launcher::Options | Launcher::Variables | Launcher::SlurmArray => None,
    }
}
