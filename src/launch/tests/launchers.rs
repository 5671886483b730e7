//! Each launcher alone.

use super::*;

#[test]
fn nobody_says_anything() {
    assert_eq!(start(None, None, &[]).unwrap(), Launch::alone());
    assert!(Part::alone().is_alone() && !Part { index: 0, of: 2 }.is_alone());
    assert_eq!(Part { index: 2, of: 4 }.to_string(), "2/4");
}

#[test]
fn the_command_line() {
    let told = start(Some(2), Some(4), &[]);
    is(&told, 2, 4, Launcher::Options);
    let told = told.unwrap();
    assert!(told.waits && told.run.is_none());
    assert!(!launch(Some(2), Some(4), true, &|_| None).unwrap().waits);
    is(&start(None, Some(1), &[]), 0, 1, Launcher::Alone);
    refused(start(Some(2), None, &[]), &["options::part 2", "options::parts N"]);
    refused(start(None, Some(4), &[]), &["options::parts 4", "options::part K, from 0 to 3"]);
    refused(start(Some(4), Some(4), &[]), &["options::part 4 options::parts 4", "up to options::part 3"]);
    refused(start(None, Some(0), &[]), &["options::parts 0"]);
    refused(start(Some(0), Some(0), &[]), &["options::part 0 options::parts 0"]);
}

#[test]
fn a_task_of_a_step() {
    let told = start(None, None, &[STEP]);
    is(&told, 2, 4, Launcher::Slurm);
    let told = told.unwrap();
    assert_eq!((told.local_rank, told.node.as_deref(), told.run.as_deref()), (Some(2), Some("n1"), Some("77.0")));
    assert!(told.waits);
    // Queued again.
    let again = start(None, None, &[STEP, "SLURM_RESTART_COUNT=1"]).unwrap();
    assert_eq!(again.run.as_deref(), Some("77.0.1"));
    // The same said twice.
    let told = start(Some(2), Some(4), &[STEP]);
    is(&told, 2, 4, Launcher::Slurm);
    assert_eq!(told.unwrap().run.as_deref(), Some("77.0"));
    is(&start(None, Some(4), &[STEP]), 2, 4, Launcher::Slurm);
}

#[test]
fn the_shells_of_a_job_are_no_tasks() {
    for shell in [BATCH, SALLOC, STEP_OF_ONE] {
        is(&start(None, None, &[shell]), 0, 1, Launcher::Alone);
        is(&start(Some(1), Some(3), &[shell]), 1, 3, Launcher::Options);
        refused(start(None, Some(4), &[shell]), &["options::parts 4"]);
    }
}

#[test]
fn an_element_of_an_array() {
    for shell in [BATCH, STEP_OF_ONE] {
        let told = start(None, Some(4), &[shell, ELEMENT]);
        is(&told, 1, 4, Launcher::SlurmArray);
        let told = told.unwrap();
        assert!(!told.waits && told.run.is_none());
        // Numbered by the script.
        let told = start(Some(5), Some(8), &[shell, ELEMENT]);
        is(&told, 5, 8, Launcher::SlurmArray);
        assert!(!told.unwrap().waits);
        // Each converts a checkpoint of its own.
        is(&start(None, None, &[shell, ELEMENT]), 0, 1, Launcher::Alone);
    }
    // Two that failed, submitted again.
    let again = "SLURM_ARRAY_TASK_ID=3 SLURM_ARRAY_TASK_COUNT=2 SLURM_ARRAY_TASK_MIN=1 SLURM_ARRAY_TASK_MAX=3";
    is(&start(None, Some(4), &[BATCH, again]), 3, 4, Launcher::SlurmArray);
    refused(start(None, Some(3), &[BATCH, again]), &["SLURM_ARRAY_TASK_ID=3", "--array=0-2"]);
}

#[test]
fn torchrun() {
    let told = start(None, None, &[TORCHRUN]);
    is(&told, 5, 8, Launcher::Torchrun);
    let told = told.unwrap();
    assert_eq!((told.local_rank, told.run.as_deref()), (Some(1), Some("abd6.42197.0")));
    assert!(told.waits);
    is(&start(None, None, &[TORCHRUN, "RANK=0 WORLD_SIZE=1"]), 0, 1, Launcher::Alone);
}

#[test]
fn managers_of_mpi() {
    let told = start(None, None, &[OPEN_MPI]);
    is(&told, 3, 6, Launcher::OpenMpi);
    let told = told.unwrap();
    assert_eq!((told.local_rank, told.run.as_deref()), (Some(1), Some("prterun-n1-4242@1")));
    let told = start(None, None, &[HYDRA]);
    is(&told, 3, 8, Launcher::Pmi);
    assert_eq!(told.unwrap().local_rank, Some(1));
    // A PMIx server alone does not say of how many.
    let pmix = "PMIX_RANK=2 PMIX_NAMESPACE=prte-9";
    refused(start(None, None, &[pmix]), &["PMIX_RANK=2", "options::parts N"]);
    is(&start(None, Some(4), &[pmix]), 2, 4, Launcher::Pmix);
    is(&start(None, Some(1), &[pmix]), 0, 1, Launcher::Alone);
    refused(start(None, Some(2), &[pmix]), &["PMIX_RANK=2", "options::parts 2"]);
}

#[test]
fn variables_of_a_pytorch_job() {
    let told = start(None, None, &["RANK=1 WORLD_SIZE=3 MASTER_ADDR=job-master-0"]);
    is(&told, 1, 3, Launcher::Variables);
    assert!(told.unwrap().waits);
    is(&start(None, Some(3), &["RANK=1 WORLD_SIZE=3"]), 1, 3, Launcher::Variables);
    is(&start(Some(0), Some(5), &["RANK=1 WORLD_SIZE=3"]), 0, 5, Launcher::Options);
    refused(start(None, Some(5), &["RANK=1 WORLD_SIZE=3"]), &["options::parts 5", "RANK=1", "WORLD_SIZE=3"]);
    // Left over from something.
    for leftover in ["RANK=3", "WORLD_SIZE=8", "RANK= WORLD_SIZE=8", "RANK=0 WORLD_SIZE=1"] {
        is(&start(None, None, &[leftover]), 0, 1, Launcher::Alone);
    }
}

#[test]
fn cpus_are_those_of_the_task() {
    let of = |variables: &[&str]| {
        let map = environment(variables);
        cpus(&|name| map.get(name).cloned())
    };
    // Three tasks share eight.
    assert_eq!(of(&[STEP]), Some(2));
    assert_eq!(of(&[STEP, "SLURM_NODEID=1"]), Some(8));
    assert_eq!(of(&[STEP, "SLURM_CPUS_PER_TASK=3"]), Some(3));
    assert_eq!(of(&[STEP_OF_ONE]), Some(8));
    assert_eq!(of(&[BATCH]), Some(8));
    assert_eq!(of(&[STEP, "SLURM_CPUS_ON_NODE=1"]), Some(1));
    for elsewhere in [SALLOC, "", "SLURM_CPUS_PER_TASK=4"] {
        assert_eq!(of(&[elsewhere]), None, "{elsewhere}");
    }
    assert_eq!(of(&[STEP, TORCHRUN]), None);
    assert_eq!(of(&[STEP, OPEN_MPI]), None);
    assert_eq!(of(&[STEP, HYDRA]), None);
    assert_eq!(of(&[STEP, "PMI_RANK=2 PMI_SIZE=4"]), Some(2));
    assert_eq!(of(&[STEP, "SLURM_CPUS_ON_NODE=many"]), None);
}
