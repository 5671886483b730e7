//! The variables that each launcher sets in the environment of the processes that it starts.
//!
//! Names and meanings are those of PyTorch (`torch/distributed/elastic/agent/server/local_elastic_agent.py`), Open MPI
//! ("Environment variables set for MPI applications"), the process managers of MPICH and Intel MPI, and srun(1).

use super::{Env, Launcher, Part};
use crate::error::{Error, Result};

/// A part of the work, as a launcher's variables define it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub launcher: Launcher,
    pub part: Part,
    /// The variables, for messages: `SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=4`.
    pub by: String,
}

/// Returns a variable that is set and not empty.
pub(super) fn text(env: Env<'_>, name: &str) -> Option<String> {
    env(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

/// Returns a variable as a number, if it is set.
pub(super) fn number(env: Env<'_>, name: &str) -> Result<Option<u32>> {
    let Some(value) = text(env, name) else { return Ok(None) };
    value.parse().map(Some).map_err(|_| {
        Error::usage(format!("{name}={value} in the environment: expected a number"), format!("unset {name}; {ALONE}"))
    })
}

/// Returns the part that two variables of one launcher define: the rank and the number of ranks.
fn pair(env: Env<'_>, launcher: Launcher, (rank, size): (&str, &str)) -> Result<Option<Told>> {
    match (number(env, rank)?, number(env, size)?) {
        (None, None) => Ok(None),
        (Some(index), Some(of)) if index < of => {
            Ok(Some(Told { launcher, part: Part { index, of }, by: format!("{rank}={index}, {size}={of}") }))
        }
        (Some(index), Some(of)) => Err(Error::usage(
            format!(
                "{rank}={index} and {size}={of} in the environment: the rank must be below the number of processes"
            ),
            format!("unset both; {ALONE}"),
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

/// The hint that works in every environment.
pub(super) const ALONE: &str = "options::parts 1 starts a run of one process";

/// Returns the part of a worker of torchrun, whose agents set all of these variables.
pub(super) fn torchrun(env: Env<'_>) -> Result<Option<Told>> {
    if text(env, "TORCHELASTIC_RUN_ID").is_none() {
        return Ok(None);
    }
    pair(env, Launcher::Torchrun, ("RANK", "WORLD_SIZE"))
}

pub(super) fn open_mpi(env: Env<'_>) -> Result<Option<Told>> {
    pair(env, Launcher::OpenMpi, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
}

/// Returns the part that MPICH, Intel MPI, Cray MPI, or Slurm with `--mpi=pmi2` defines.
pub(super) fn pmi(env: Env<'_>) -> Result<Option<Told>> {
    pair(env, Launcher::Pmi, ("PMI_RANK", "PMI_SIZE"))
}

/// Returns the part of a task that srun started. A batch script has `SLURM_PROCID` and `SLURM_NTASKS` as well, but is
/// not a task of a step: only a step has a number of tasks of the step.
pub(super) fn slurm_step(env: Env<'_>) -> Result<Option<Told>> {
    if text(env, "SLURM_STEP_NUM_TASKS").is_none() {
        return Ok(None);
    }
    pair(env, Launcher::Slurm, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
}

/// Returns the part in `RANK` and `WORLD_SIZE`, which `torch.distributed` reads without a launcher, and which a
/// PyTorchJob of Kubernetes sets. If only one of the two is set, it is a leftover and is ignored.
pub(super) fn plain(env: Env<'_>) -> Result<Option<Told>> {
    if text(env, "RANK").is_none() || text(env, "WORLD_SIZE").is_none() {
        return Ok(None);
    }
    pair(env, Launcher::Variables, ("RANK", "WORLD_SIZE"))
}

/// Returns the index of an element of a job array. The number of elements is not the number of parts: failed elements
/// are submitted again, alone.
pub(super) fn array_index(env: Env<'_>) -> Result<Option<u32>> {
    number(env, "SLURM_ARRAY_TASK_ID")
}

/// Returns the rank of this process among the processes of its node.
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

/// Returns a name that all processes of one launch share and that no other launch has.
pub(super) fn run(env: Env<'_>, launcher: Launcher) -> Option<String> {
    let joined = |names: &[&str]| {
        let values: Vec<String> = names.iter().filter_map(|name| text(env, name)).collect();
        (!values.is_empty()).then(|| values.join("."))
    };
    match launcher {
        // Run ids given by hand, and the "none" of older versions, repeat: the port is new for each launch, and the job
        // has an id. A job may have one step for each node.
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
        // Slurm sets PMI_JOBID, and it names the step.
        Launcher::Pmi => joined(&["PMI_JOBID", "SLURM_RESTART_COUNT"]).filter(|_| text(env, "PMI_JOBID").is_some()),
        Launcher::Alone | Launcher::Options | Launcher::Variables | Launcher::SlurmArray => None,
    }
}
