//! A launcher started by another: the inner one says which part this is.

use super::*;

#[test]
fn torchrun_by_srun() {
    // A task a node.
    let told = start(None, None, &[STEP, TORCHRUN, "RANK=5 WORLD_SIZE=16"]);
    is(&told, 5, 16, Launcher::Torchrun);
    let told = told.unwrap();
    assert_eq!((told.node.as_deref(), told.run.as_deref()), (Some("n1"), Some("77.abd6.42197.0")));
    // `srun -n1 torchrun`, and torchrun in the batch script.
    is(&start(None, None, &[STEP_OF_ONE, TORCHRUN]), 5, 8, Launcher::Torchrun);
    is(&start(None, None, &[BATCH, TORCHRUN]), 5, 8, Launcher::Torchrun);
    // Four that know nothing of each other.
    is(&start(None, None, &[STEP, TORCHRUN, "RANK=0 WORLD_SIZE=1"]), 0, 1, Launcher::Alone);
}

#[test]
fn torchrun_by_mpirun() {
    is(&start(None, None, &[OPEN_MPI, TORCHRUN]), 5, 8, Launcher::Torchrun);
    is(&start(None, None, &[HYDRA, TORCHRUN]), 5, 8, Launcher::Torchrun);
}

#[test]
fn mpirun_in_a_job() {
    // On the first node in the environment of the script, on others in that of its daemons, which are a step.
    let daemon = "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1";
    for outer in [&[BATCH][..], &[STEP], &[STEP, daemon]] {
        is(&start(None, None, &[outer, &[OPEN_MPI]].concat()), 3, 6, Launcher::OpenMpi);
        is(&start(None, None, &[outer, &[HYDRA]].concat()), 3, 8, Launcher::Pmi);
    }
    // One process, on more nodes than it needs.
    is(&start(None, None, &[STEP, OPEN_MPI, "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1"]), 0, 1, Launcher::Alone);
}

#[test]
fn srun_with_plugins_of_mpi() {
    let pmi2 = "PMI_RANK=2 PMI_SIZE=4 PMI_JOBID=77.0 PMI_FD=11";
    let told = start(None, None, &[STEP, pmi2]);
    is(&told, 2, 4, Launcher::Pmi);
    assert_eq!(told.unwrap().run.as_deref(), Some("77.0"));
    let pmix = "PMIX_RANK=2 PMIX_NAMESPACE=slurm.pmix.77.0";
    is(&start(None, None, &[STEP, pmix]), 2, 4, Launcher::Slurm);
    is(&start(None, None, &[STEP_OF_ONE, "PMIX_RANK=0 PMIX_NAMESPACE=slurm.pmix.77.3"]), 0, 1, Launcher::Alone);
}

#[test]
fn srun_in_an_array_element() {
    // `srun -n1`: the element is the part.
    is(&start(None, Some(4), &[ELEMENT, STEP_OF_ONE]), 1, 4, Launcher::SlurmArray);
    is(&start(None, Some(4), &[ELEMENT, STEP_OF_ONE, "PMI_RANK=0 PMI_SIZE=1"]), 1, 4, Launcher::SlurmArray);
    // `srun -n4`: each element is a run of four tasks.
    let told = start(None, None, &[ELEMENT, STEP]);
    is(&told, 2, 4, Launcher::Slurm);
    assert!(told.unwrap().waits);
    // Of which is --parts the number?
    refused(start(None, Some(4), &[ELEMENT, STEP]), &["options::parts 4", "SLURM_PROCID=2", "SLURM_ARRAY_TASK_ID=1"]);
    is(&start(Some(6), Some(16), &[ELEMENT, STEP]), 6, 16, Launcher::SlurmArray);
}

#[test]
fn ranks_by_hand_in_a_job() {
    // `RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS`
    is(&start(None, None, &[STEP, "RANK=2 WORLD_SIZE=4"]), 2, 4, Launcher::Slurm);
    is(&start(None, None, &[STEP, "WORLD_SIZE=16"]), 2, 4, Launcher::Slurm);
    // Several `srun -n1 &`, and in the script itself.
    is(&start(None, None, &[STEP_OF_ONE, "RANK=2 WORLD_SIZE=4"]), 2, 4, Launcher::Variables);
    is(&start(None, None, &[BATCH, "RANK=2 WORLD_SIZE=4"]), 2, 4, Launcher::Variables);
}

#[test]
fn a_run_of_its_own_anywhere() {
    for inside in [STEP, TORCHRUN, OPEN_MPI, HYDRA, ELEMENT, "RANK=1 WORLD_SIZE=3", "RANK=x WORLD_SIZE=3"] {
        is(&start(None, Some(1), &[inside]), 0, 1, Launcher::Alone);
        is(&start(Some(0), Some(1), &[inside, STEP]), 0, 1, Launcher::Alone);
    }
}
