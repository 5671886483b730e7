//! Nested launchers: the inner launcher determines the part.

use super::*;

#[test]
fn torchrun_started_by_srun_wins() {
    // torchrun runs as a task of a step that has one task on each node.
    let started = start(None, None, &[STEP, TORCHRUN, "RANK=5 WORLD_SIZE=16"]);
    is(&started, 5, 16, Launcher::Torchrun);
    let started = started.unwrap();
    assert_eq!((started.node.as_deref(), started.run.as_deref()), (Some("n1"), Some("77.abd6.42197.0")));
    // The first case is `srun -n1 torchrun`; the second case is torchrun in the batch script.
    is(&start(None, None, &[STEP_OF_ONE, TORCHRUN]), 5, 8, Launcher::Torchrun);
    is(&start(None, None, &[BATCH, TORCHRUN]), 5, 8, Launcher::Torchrun);
    // Four processes run independently of each other.
    is(&start(None, None, &[STEP, TORCHRUN, "RANK=0 WORLD_SIZE=1"]), 0, 1, Launcher::Alone);
}

#[test]
fn torchrun_started_by_mpirun_wins() {
    is(&start(None, None, &[OPEN_MPI, TORCHRUN]), 5, 8, Launcher::Torchrun);
    is(&start(None, None, &[HYDRA, TORCHRUN]), 5, 8, Launcher::Torchrun);
}

#[test]
fn mpirun_started_in_a_job_wins() {
    // On the first node, the Slurm variables are those of the batch script. On the other nodes, they are those of the
    // mpirun daemons, which are tasks of a step.
    let daemon = "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1";
    for outer in [&[BATCH][..], &[STEP], &[STEP, daemon]] {
        is(&start(None, None, &[outer, &[OPEN_MPI]].concat()), 3, 6, Launcher::OpenMpi);
        is(&start(None, None, &[outer, &[HYDRA]].concat()), 3, 8, Launcher::Pmi);
    }
    // One process runs in a step that has more nodes than the process needs.
    is(&start(None, None, &[STEP, OPEN_MPI, "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1"]), 0, 1, Launcher::Alone);
}

#[test]
fn srun_with_mpi_plugins_is_accepted() {
    let pmi2 = "PMI_RANK=2 PMI_SIZE=4 PMI_JOBID=77.0 PMI_FD=11";
    let started = start(None, None, &[STEP, pmi2]);
    is(&started, 2, 4, Launcher::Pmi);
    assert_eq!(started.unwrap().run.as_deref(), Some("77.0"));
    let pmix = "PMIX_RANK=2 PMIX_NAMESPACE=slurm.pmix.77.0";
    is(&start(None, None, &[STEP, pmix]), 2, 4, Launcher::Slurm);
    is(&start(None, None, &[STEP_OF_ONE, "PMIX_RANK=0 PMIX_NAMESPACE=slurm.pmix.77.3"]), 0, 1, Launcher::Alone);
}

#[test]
fn srun_inside_an_array_element_is_resolved() {
    // With `srun -n1`, the array element determines the part.
    is(&start(None, Some(4), &[ELEMENT, STEP_OF_ONE]), 1, 4, Launcher::SlurmArray);
    is(&start(None, Some(4), &[ELEMENT, STEP_OF_ONE, "PMI_RANK=0 PMI_SIZE=1"]), 1, 4, Launcher::SlurmArray);
    // With `srun -n4` each element is a run of four tasks.
    let started = start(None, None, &[ELEMENT, STEP]);
    is(&started, 2, 4, Launcher::Slurm);
    assert!(started.unwrap().waits);
    // It is ambiguous what --parts counts: tasks or array elements.
    refused(start(None, Some(4), &[ELEMENT, STEP]), &["options::parts 4", "SLURM_PROCID=2", "SLURM_ARRAY_TASK_ID=1"]);
    is(&start(Some(6), Some(16), &[ELEMENT, STEP]), 6, 16, Launcher::SlurmArray);
}

#[test]
fn rank_variables_inside_a_job_are_used() {
    // `RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS`
    is(&start(None, None, &[STEP, "RANK=2 WORLD_SIZE=4"]), 2, 4, Launcher::Slurm);
    is(&start(None, None, &[STEP, "WORLD_SIZE=16"]), 2, 4, Launcher::Slurm);
    // The first case is several commands `srun -n1 &`; the second case is the script itself.
    is(&start(None, None, &[STEP_OF_ONE, "RANK=2 WORLD_SIZE=4"]), 2, 4, Launcher::Variables);
    is(&start(None, None, &[BATCH, "RANK=2 WORLD_SIZE=4"]), 2, 4, Launcher::Variables);
}

#[test]
fn parts_1_starts_its_own_run_in_any_environment() {
    for inside in [STEP, TORCHRUN, OPEN_MPI, HYDRA, ELEMENT, "RANK=1 WORLD_SIZE=3", "RANK=x WORLD_SIZE=3"] {
        is(&start(None, Some(1), &[inside]), 0, 1, Launcher::Alone);
        is(&start(Some(0), Some(1), &[inside, STEP]), 0, 1, Launcher::Alone);
    }
}
