//! Tests of `--backend auto`: which backend is chosen, and with which messages. The `gpu-stand-in` library replaces the
//! CUDA driver and NCCL.

use std::os::unix::fs::symlink;

use crate::nodes::{Nodes, Spread, wait_all};
use crate::outcome::{command, fixture};

fn libraries() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let stand_in = std::env::current_exe().unwrap().with_file_name("libgpu_stand_in.so");
    for name in ["libcuda.so", "libnccl.so.2"] {
        symlink(&stand_in, folder.path().join(name)).unwrap();
    }
    folder
}

#[test]
fn source_that_all_processes_see_is_not_exchanged() {
    let libraries = libraries();
    let nodes = Nodes::new("partial2/ranks", 2, Spread::One);
    let (expected, _) = nodes.run_alone("consolidate out");
    let processes = [0, 1].map(|part: u32| {
        let mut process = command(&[&"consolidate", &fixture("partial2/ranks"), &nodes.dst_folder().join("out")]);
        process.args(["-v", "--parts", "2", "--part", &part.to_string()]).env("DTSHARD_FAULT", "none");
        process.env("LD_LIBRARY_PATH", libraries.path()).env("GPU_STAND_IN_DEVICES", "2");
        process.spawn().unwrap()
    });
    for outcome in wait_all(processes) {
        let stderr = &outcome.assert_succeeded().err;
        assert!(
            stderr.contains("backend cpu: all processes see SRC, so each reads the data that it writes"),
            "{stderr}"
        );
        assert!(!stderr.contains("NCCL"), "{stderr}");
    }
    nodes.assert_made(&expected, "consolidate out");
}

#[test]
fn source_divided_among_processes_with_gpus_is_exchanged_by_nccl() {
    let libraries = libraries();
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let (expected, _) = nodes.run_alone("consolidate out");
    for devices in ["2", "1"] {
        nodes.clear();
        let processes = [0, 1].map(|rank| {
            let mut process = nodes.command(rank, "consolidate out -v");
            process.env("LD_LIBRARY_PATH", libraries.path()).env("GPU_STAND_IN_DEVICES", devices);
            process.spawn().unwrap()
        });
        for outcome in wait_all(processes) {
            let stderr = &outcome.assert_succeeded().err;
            assert_eq!(stderr.contains("backend nccl: tensors are sent by NCCL"), devices == "2", "{stderr}");
            let copied = "backend cpu: files that only some processes see are copied first, not nccl: processes 0 and 1 \
                          use the same GPU";
            assert_eq!(stderr.contains(copied), devices == "1", "{stderr}");
        }
        nodes.assert_made(&expected, "consolidate out");
    }
}

#[test]
fn copy_of_files_that_some_processes_see_is_announced() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let outcomes = nodes.run_together("consolidate out --backend cpu");
    let stderr = &outcomes[0].assert_succeeded().err;
    let copying = stderr.lines().find(|line| line.contains("] note: copying ")).unwrap_or_default();
    assert!(
        copying.starts_with("[0/2] note: copying to ") && copying.contains(" files that only some processes see"),
        "{stderr}"
    );
    assert!(copying.contains(".out.dtshard-work/copy: 46.32 kB of 46.32 kB, in 4 files"), "{stderr}");
    // There are two nodes and two copies of each file, so both processes see all files.
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::Two);
    let outcomes = nodes.run_together("consolidate out --backend cpu");
    assert!(!outcomes[0].assert_succeeded().err.contains("copying "), "{outcomes:?}");
}

#[cfg(not(feature = "mpi"))]
#[test]
fn backend_mpi_without_the_feature_names_the_feature() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let outcome: crate::outcome::Outcome = nodes.command(0, "consolidate out --backend mpi").output().unwrap().into();
    outcome.assert_refused(&[
        "--backend mpi: this dtshard was built without MPI",
        "hint: build it with",
        "--features mpi",
    ]);
}
