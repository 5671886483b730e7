//! If variables and options contradict each other, an error names them.

use super::*;

#[test]
fn options_that_contradict_a_launcher_are_an_error() {
    let (procid, tasks) = ("SLURM_PROCID=2", "SLURM_STEP_NUM_TASKS=4");
    refused(
        start(Some(0), Some(4), &[STEP]),
        &["options::part 0 options::parts 4", "srun", procid, tasks, "omit options::part and options::parts"],
    );
    refused(start(Some(2), Some(8), &[STEP]), &["options::part 2 options::parts 8", procid, tasks]);
    refused(
        start(None, Some(8), &[STEP]),
        &["options::parts 8", procid, tasks, "omit options::parts", "options::parts 1"],
    );
    refused(start(Some(0), Some(8), &[TORCHRUN]), &["torchrun", "RANK=5", "WORLD_SIZE=8"]);
    refused(start(None, Some(2), &[OPEN_MPI]), &["Open MPI", "OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=6"]);
    refused(start(None, Some(2), &[HYDRA]), &["PMI_RANK=3", "PMI_SIZE=8"]);
}

#[test]
fn rank_variables_that_contradict_a_launcher_are_an_error() {
    let by_hand = "RANK=0 WORLD_SIZE=8";
    let words = ["RANK=0", "WORLD_SIZE=8", "unset RANK and WORLD_SIZE"];
    refused(start(None, None, &[STEP, by_hand]), &[&words[..], &["SLURM_PROCID=2", "SLURM_STEP_NUM_TASKS=4"]].concat());
    refused(start(None, None, &[OPEN_MPI, by_hand]), &[&words[..], &["OMPI_COMM_WORLD_RANK=3"]].concat());
    refused(start(None, None, &[HYDRA, by_hand]), &[&words[..], &["PMI_RANK=3"]].concat());
    refused(
        start(None, Some(4), &[ELEMENT, by_hand]),
        &[&words[..], &["SLURM_ARRAY_TASK_ID=1", "options::parts 4"]].concat(),
    );
}

/// The test imitates a user who runs `srun --mpi=none` in a shell that PMI started.
#[test]
fn fewer_processes_than_step_tasks_is_an_error() {
    let leftover = "PMI_RANK=0 PMI_SIZE=1";
    refused(start(None, None, &[STEP, leftover]), &["SLURM_PROCID=2", "PMI_RANK=0", "PMI_SIZE=1", "unset PMI_RANK"]);
}

#[test]
fn missing_or_invalid_numbers_are_an_error() {
    refused(start(None, None, &["OMPI_COMM_WORLD_RANK=3"]), &["OMPI_COMM_WORLD_RANK=3", "no OMPI_COMM_WORLD_SIZE"]);
    refused(start(None, None, &["PMI_SIZE=3"]), &["PMI_SIZE=3", "no PMI_RANK"]);
    refused(start(None, None, &["SLURM_STEP_NUM_TASKS=4"]), &["SLURM_STEP_NUM_TASKS=4", "no SLURM_PROCID"]);
    refused(start(None, None, &["TORCHELASTIC_RUN_ID=a RANK=1"]), &["RANK=1", "no WORLD_SIZE"]);
    refused(start(None, None, &["RANK=4 WORLD_SIZE=4"]), &["RANK=4", "WORLD_SIZE=4", "below"]);
    refused(start(None, None, &["RANK=0 WORLD_SIZE=0"]), &["WORLD_SIZE=0"]);
    for value in ["-1", "1.5", "two", "4294967296", "0x1"] {
        let size = format!("WORLD_SIZE={value}");
        refused(start(None, None, &["RANK=0", &size]), &[&size, "expected a number"]);
        let rank = format!("SLURM_PROCID={value}");
        refused(start(None, None, &[STEP, &rank]), &[&rank, "expected a number", "unset SLURM_PROCID"]);
    }
    refused(start(None, Some(4), &[BATCH, "SLURM_ARRAY_TASK_ID=one"]), &["SLURM_ARRAY_TASK_ID=one"]);
}
