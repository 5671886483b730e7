//! `--backend auto`: what is chosen, and what is said of it. A stand-in takes the place of driver and NCCL.

use std::os::unix::fs::symlink;

use crate::nodes::{Nodes, Spread, ended};
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
fn source_that_all_see_is_not_exchanged_stand_in() {
    let libraries = libraries();
    let nodes = Nodes::new("partial2/ranks", 2, Spread::One);
    let (wanted, _) = nodes.alone("consolidate out");
    let processes = [0, 1].map(|part: u32| {
        let mut process = command(&[&"consolidate", &fixture("partial2/ranks"), &nodes.desk().join("out")]);
        process.args(["-v", "--parts", "2", "--part", &part.to_string()]).env("DTSHARD_FAULT", "none");
        process.env("LD_LIBRARY_PATH", libraries.path()).env("GPU_STAND_IN_DEVICES", "2");
        process.spawn().unwrap()
    });
    for outcome in ended(processes) {
        let said = &outcome.succeeded().err;
        assert!(said.contains("backend cpu: all processes see SRC, and each reads what it writes"), "{said}");
        assert!(!said.contains("NCCL"), "{said}");
    }
    nodes.has_made(&wanted, "consolidate out");
}

#[test]
fn source_that_each_sees_apart_goes_by_nccl_where_each_has_a_gpu_stand_in() {
    let libraries = libraries();
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let (wanted, _) = nodes.alone("consolidate out");
    for devices in ["2", "1"] {
        nodes.clear();
        let processes = [0, 1].map(|rank| {
            let mut process = nodes.command(rank, "consolidate out -v");
            process.env("LD_LIBRARY_PATH", libraries.path()).env("GPU_STAND_IN_DEVICES", devices);
            process.spawn().unwrap()
        });
        for outcome in ended(processes) {
            let said = &outcome.succeeded().err;
            assert_eq!(said.contains("backend nccl: bytes go by NCCL"), devices == "2", "{said}");
            let copied = "backend cpu: files that only some processes see are copied first, not nccl: processes 0 and 1 \
                          have one GPU";
            assert_eq!(said.contains(copied), devices == "1", "{said}");
        }
        nodes.has_made(&wanted, "consolidate out");
    }
}

#[test]
fn files_that_only_some_see_are_announced_before_they_are_copied() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let outcomes = nodes.together("consolidate out --backend cpu");
    let said = &outcomes[0].succeeded().err;
    let copying = said.lines().find(|line| line.contains("] copying ")).unwrap_or_default();
    assert!(copying.starts_with("[0/2] copying ") && copying.contains(" that only some processes see to "), "{said}");
    assert!(copying.ends_with(".out.dtshard-work/copy"), "{said}");
    // Two copies of each on two nodes are seen by both.
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::Two);
    let outcomes = nodes.together("consolidate out --backend cpu");
    assert!(!outcomes[0].succeeded().err.contains("copying "), "{outcomes:?}");
}

#[cfg(not(feature = "mpi"))]
#[test]
fn backend_mpi_names_the_feature_that_lacks() {
    let nodes = Nodes::new("fsdp4/ranks", 2, Spread::One);
    let outcome: crate::outcome::Outcome = nodes.command(0, "consolidate out --backend mpi").output().unwrap().into();
    outcome.refused(&["--backend mpi: this dtshard was built without MPI", "hint: build it with", "--features mpi"]);
}
