//! A process is killed: before there is anything of NCCL, where ranks meet by it, in a round, and before the commit. The
//! others hear of it by their control connections, whether NCCL tells them or not.

use crate::job::{Job, SIGHTS, Settings, Sight, others_name};
use crate::nodes::{names, succeeds, tree};

const STAND_IN: &str = "GPU_STAND_IN_FAULT";
const PROGRAM: &str = "DTSHARD_FAULT";
/// As over NVLink and shared memory.
const SILENT: Settings<'static> = &[("GPU_STAND_IN_LOST_PEERS", "silent")];

/// Each of these ranks in turn is killed there.
#[track_caller]
fn killed(job: &Job, fault: (&str, &str), ranks: &[u32], leaves: &[&str]) {
    for &gone in ranks {
        let outcomes = job.but(gone, "", &[fault]);
        assert_eq!(outcomes[gone as usize].signal, Some(9), "{fault:?} {outcomes:?}");
        others_name(&outcomes, gone, &["its process ended"]);
        assert_eq!(names(&job.nodes.desk()), leaves, "{fault:?}");
        job.is_done_by(if leaves.is_empty() { "" } else { "--resume" });
    }
}

#[test]
fn before_it_opens_nccl_stand_in() {
    SIGHTS.iter().for_each(|sight| killed(&Job::new(*sight), (STAND_IN, "dies-loading"), &[0, 2], &[]));
}

#[test]
fn while_it_meets_the_others_by_nccl_stand_in() {
    SIGHTS.iter().for_each(|sight| killed(&Job::new(*sight), (STAND_IN, "dies-meeting"), &[0, 1], &[]));
}

#[test]
fn in_the_middle_of_a_round_stand_in() {
    for settings in [&[], SILENT] {
        for sight in SIGHTS {
            let job = Job::with(sight, settings);
            for group in ["dies-in-group", "dies-in-group:4"] {
                killed(&job, (STAND_IN, group), &[0, 1], &[".out.dtshard-partial"]);
            }
        }
    }
}

#[test]
fn after_something_was_recorded_stand_in() {
    SIGHTS
        .iter()
        .for_each(|sight| killed(&Job::new(*sight), (PROGRAM, "record-after"), &[0, 2], &[".out.dtshard-partial"]));
}

/// Rank 0 publishes for all.
#[test]
fn before_the_commit_stand_in() {
    for sight in SIGHTS {
        let job = Job::new(sight);
        for point in ["seal-leased", "seal-summed", "commit-marked", "commit-synced"] {
            killed(&job, (PROGRAM, point), &[0], &[".out.dtshard-partial"]);
        }
    }
}

/// What was at DST is what is there.
#[test]
fn while_something_is_at_dst_stand_in() {
    let job = Job::new(Sight::Apart);
    for (fault, gone) in
        [((STAND_IN, "dies-meeting"), 1), ((STAND_IN, "dies-in-group:2"), 2), ((PROGRAM, "seal-summed"), 0)]
    {
        let old = job.put_old();
        let outcomes = job.but(gone, "--overwrite", &[fault]);
        others_name(&outcomes, gone, &["its process ended"]);
        assert!(tree(&job.nodes.desk().join("out")) == old, "{fault:?}");
        job.each(|_| ("--overwrite --resume".to_owned(), &[])).iter().for_each(succeeds);
        job.has_made();
    }
}
