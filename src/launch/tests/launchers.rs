//! Tests of each launcher alone, without a second launcher.

use super::*;

#[test]
fn no_launcher_means_one_part() {
    assert_eq!(start(None, None, &[]).unwrap(), Launch::alone());
    assert!(Part::alone().is_alone() && !Part { index: 0, of: 2 }.is_alone());
    assert_eq!(Part { index: 2, of: 4 }.to_string(), "2/4");
}

#[test]
fn options_define_the_part() {
    let started = start(Some(2), Some(4), &[]);
    is(&started, 2, 4, Launcher::Options);
    let started = started.unwrap();
    assert!(started.waits && started.run.is_none());
    assert!(!launch(Some(2), Some(4), true, &|_| None).unwrap().waits);
    is(&start(None, Some(1), &[]), 0, 1, Launcher::Alone);
    refused(start(Some(2), None, &[]), &["options::part 2", "options::parts N"]);
    refused(start(None, Some(4), &[]), &["options::parts 4", "options::part K, from 0 to 3"]);
    refused(
        start(Some(4), Some(4), &[]),
        &["options::part 4 options::parts 4", "options::part to a number from 0 to 3"],
    );
    refused(start(None, Some(0), &[]), &["options::parts 0"]);
    refused(start(Some(0), Some(0), &[]), &["options::part 0 options::parts 0"]);
}

#[test]
fn slurm_step_task_defines_the_part() {
    let started = start(None, None, &[STEP]);
    is(&started, 2, 4, Launcher::Slurm);
    let started = started.unwrap();
    assert_eq!(
        (started.local_rank, started.node.as_deref(), started.run.as_deref()),
        (Some(2), Some("n1"), Some("77.0"))
    );
    assert!(started.waits);
    // Slurm has requeued the job, which runs for the second time.
    let again = start(None, None, &[STEP, "SLURM_RESTART_COUNT=1"]).unwrap();
    assert_eq!(again.run.as_deref(), Some("77.0.1"));
    // The options and the launcher agree.
    let started = start(Some(2), Some(4), &[STEP]);
    is(&started, 2, 4, Launcher::Slurm);
    assert_eq!(started.unwrap().run.as_deref(), Some("77.0"));
    is(&start(None, Some(4), &[STEP]), 2, 4, Launcher::Slurm);
}

#[test]
fn shells_of_a_job_are_ignored() {
    for shell in [BATCH, SALLOC, STEP_OF_ONE] {
        is(&start(None, None, &[shell]), 0, 1, Launcher::Alone);
        is(&start(Some(1), Some(3), &[shell]), 1, 3, Launcher::Options);
        refused(start(None, Some(4), &[shell]), &["options::parts 4"]);
    }
}

#[test]
fn array_element_defines_the_part() {
    for shell in [BATCH, STEP_OF_ONE] {
        let started = start(None, Some(4), &[shell, ELEMENT]);
        is(&started, 1, 4, Launcher::SlurmArray);
        let started = started.unwrap();
        assert!(!started.waits && started.run.is_none());
        // The batch script chooses the part numbers itself.
        let started = start(Some(5), Some(8), &[shell, ELEMENT]);
        is(&started, 5, 8, Launcher::SlurmArray);
        assert!(!started.unwrap().waits);
        // Each element converts its own checkpoint.
        is(&start(None, None, &[shell, ELEMENT]), 0, 1, Launcher::Alone);
    }
    // Two array elements failed and were submitted again.
    let again = "SLURM_ARRAY_TASK_ID=3 SLURM_ARRAY_TASK_COUNT=2 SLURM_ARRAY_TASK_MIN=1 SLURM_ARRAY_TASK_MAX=3";
    is(&start(None, Some(4), &[BATCH, again]), 3, 4, Launcher::SlurmArray);
    refused(start(None, Some(3), &[BATCH, again]), &["SLURM_ARRAY_TASK_ID=3", "--array=0-2"]);
}

#[test]
fn torchrun_worker_defines_the_part() {
    let started = start(None, None, &[TORCHRUN]);
    is(&started, 5, 8, Launcher::Torchrun);
    let started = started.unwrap();
    assert_eq!((started.local_rank, started.run.as_deref()), (Some(1), Some("abd6.42197.0")));
    assert!(started.waits);
    is(&start(None, None, &[TORCHRUN, "RANK=0 WORLD_SIZE=1"]), 0, 1, Launcher::Alone);
}

#[test]
fn mpi_process_managers_define_the_part() {
    let started = start(None, None, &[OPEN_MPI]);
    is(&started, 3, 6, Launcher::OpenMpi);
    let started = started.unwrap();
    assert_eq!((started.local_rank, started.run.as_deref()), (Some(1), Some("prterun-n1-4242@1")));
    let started = start(None, None, &[HYDRA]);
    is(&started, 3, 8, Launcher::Pmi);
    assert_eq!(started.unwrap().local_rank, Some(1));
    // A PMIx server alone does not provide the number of processes.
    let pmix = "PMIX_RANK=2 PMIX_NAMESPACE=prte-9";
    refused(start(None, None, &[pmix]), &["PMIX_RANK=2", "options::parts N"]);
    is(&start(None, Some(4), &[pmix]), 2, 4, Launcher::Pmix);
    is(&start(None, Some(1), &[pmix]), 0, 1, Launcher::Alone);
    refused(start(None, Some(2), &[pmix]), &["PMIX_RANK=2", "options::parts 2"]);
}

#[test]
fn rank_and_world_size_define_the_part() {
    let started = start(None, None, &["RANK=1 WORLD_SIZE=3 MASTER_ADDR=job-master-0"]);
    is(&started, 1, 3, Launcher::Variables);
    assert!(started.unwrap().waits);
    is(&start(None, Some(3), &["RANK=1 WORLD_SIZE=3"]), 1, 3, Launcher::Variables);
    is(&start(Some(0), Some(5), &["RANK=1 WORLD_SIZE=3"]), 0, 5, Launcher::Options);
    refused(start(None, Some(5), &["RANK=1 WORLD_SIZE=3"]), &["options::parts 5", "RANK=1", "WORLD_SIZE=3"]);
    // The variables are leftovers of another program.
    for leftover in ["RANK=3", "WORLD_SIZE=8", "RANK= WORLD_SIZE=8", "RANK=0 WORLD_SIZE=1"] {
        is(&start(None, None, &[leftover]), 0, 1, Launcher::Alone);
    }
}

#[test]
fn cpus_of_the_slurm_task_are_returned() {
    let of = |variables: &[&str]| {
        let map = environment(variables);
        cpus(&|name| map.get(name).cloned())
    };
    // Three tasks share eight CPUs.
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
