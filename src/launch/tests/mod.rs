//! Test environments that contain the variables of each launcher.

mod contradictions;
mod launchers;
mod nesting;

use std::collections::HashMap;

use super::cpus::cpus;
use super::{Launch, Launcher, Part, launch};
use crate::error::{Error, Result, UsageError};

/// Builds an environment from strings such as `A=1 B=2`. A later value replaces an earlier one, as in nested launchers.
fn environment(variables: &[&str]) -> HashMap<String, String> {
    let words = variables.iter().flat_map(|text| text.split_whitespace());
    words.map(|word| word.split_once('=').expect("NAME=value")).map(|(k, v)| (k.into(), v.into())).collect()
}

fn start(part: Option<u32>, parts: Option<u32>, variables: &[&str]) -> Result<Launch> {
    let map = environment(variables);
    launch(part, parts, false, &|name| map.get(name).cloned())
}

fn is(launch: &Result<Launch>, index: u32, of: u32, launcher: Launcher) {
    let launch = launch.as_ref().unwrap();
    assert_eq!((launch.part, launch.launcher), (Part { index, of }, launcher), "{launch:?}");
}

/// Checks that `launch` is a usage error with a hint, and that the error and its hint together contain all `words`.
fn refused(launch: Result<Launch>, words: &[&str]) {
    let error = launch.unwrap_err();
    assert!(matches!(error, Error::Usage(UsageError { hint: Some(_), .. })), "{error:?}");
    let message = format!("{error} / {}", error.hint().unwrap());
    for word in words {
        assert!(message.contains(word), "{word}: {message}");
    }
}

/// The environment of task 2 of 4 tasks that srun started. It is the third task on the first of two nodes.
const STEP: &str = "SLURM_JOB_ID=77 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_PROCID=2 SLURM_LOCALID=2 \
                    SLURM_NODEID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=2 \
                    SLURM_STEP_TASKS_PER_NODE=3,1 SLURM_TASKS_PER_NODE=3,1 SLURMD_NODENAME=n1 SLURM_CPUS_ON_NODE=8";

/// The environment of the only task of a Slurm step.
const STEP_OF_ONE: &str = "SLURM_JOB_ID=77 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 \
                           SLURM_STEP_ID=3 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 \
                           SLURM_TASKS_PER_NODE=4 SLURMD_NODENAME=n2 SLURM_CPUS_ON_NODE=8";

/// The environment of the batch script of a job with `#SBATCH -n 4`.
const BATCH: &str = "SLURM_JOB_ID=77 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 \
                     SLURM_TASKS_PER_NODE=3,1 SLURMD_NODENAME=n1 SLURM_CPUS_ON_NODE=8";

/// The environment of the shell that `salloc -n 4` starts.
const SALLOC: &str = "SLURM_JOB_ID=77 SLURM_NTASKS=4 SLURM_NPROCS=4 SLURM_TASKS_PER_NODE=3,1 SLURM_CPUS_PER_TASK=2";

/// The environment of element 1 of `sbatch --array=0-3`.
const ELEMENT: &str = "SLURM_ARRAY_JOB_ID=70 SLURM_ARRAY_TASK_ID=1 SLURM_ARRAY_TASK_COUNT=4 SLURM_ARRAY_TASK_MIN=0 \
                       SLURM_ARRAY_TASK_MAX=3 SLURM_ARRAY_TASK_STEP=1";

const TORCHRUN: &str = "TORCHELASTIC_RUN_ID=abd6 TORCHELASTIC_RESTART_COUNT=0 MASTER_PORT=42197 RANK=5 WORLD_SIZE=8 \
                        LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2";

const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=6 OMPI_COMM_WORLD_LOCAL_RANK=1 \
                        PMIX_NAMESPACE=prterun-n1-4242@1 PMIX_RANK=3";

const HYDRA: &str = "PMI_RANK=3 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4";
