//! Tests of the files that remain after a run ends with an error.

use super::*;

/// A run that fails before it records work deletes its partial folder, because an empty folder would block later runs
/// without `--resume`. With a journal, the folder is kept.
#[test]
fn failed_run_without_records_leaves_nothing() {
    for shape in [DestinationKind::File, DestinationKind::Folder] {
        let mut env = TestEnv::new(shape);
        env.claim.resume = true;
        let staging = env.begin().unwrap();
        write(&staging.folder().path().join("out"), "half");
        staging.abandon();
        assert_eq!(env.names(), [""; 0]);
        let staging = env.begin().unwrap();
        write(staging.journal().path(), "something");
        staging.abandon();
        assert_eq!(env.names(), [".out.dtshard-partial"]);
        // Records of another process are kept as well.
        env.begin().unwrap().abandon();
        assert_eq!(env.names(), [".out.dtshard-partial"]);
    }
}

#[test]
fn last_part_to_leave_removes_the_partial_folder() {
    for waits in [true, false] {
        let mut env = TestEnv::new(DestinationKind::Folder);
        env.claim.parts_wait = waits;
        let [first, second] = [0, 1].map(|index| env.part(index, 3).unwrap());
        first.abandon();
        assert!(env.partial().exists(), "one is at work");
        second.abandon();
        // A part that waits for other parts needs the reason why they ended.
        assert_eq!(env.partial().exists(), waits);
        env.claim.resume = true;
        env.part(2, 3).unwrap().abandon();
        // Parts that have started before are expected to start again.
        assert_eq!(env.partial().exists(), waits);
        let all = [0, 1, 2].map(|index| env.part(index, 3).unwrap());
        all.into_iter().for_each(Staging::abandon);
        assert_eq!(env.names(), [""; 0]);
    }
}

/// Part 1 of a resumed run fails and leaves. The partial folder is kept until part 0 has read the reason, although part
/// 0 has a lease from an earlier run.
#[test]
fn resumed_parts_get_the_reason_of_a_failed_part() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    (0..2).for_each(|index| env.leave_behind(Part { index, of: 2 }));
    (env.claim.resume, env.claim.run) = (true, Some("job".into()));
    let failing = env.part(1, 2).unwrap();
    failing.announce_failure(&Error::usage("no space is left", "make some"));
    failing.abandon();
    let first = env.part(0, 2).unwrap();
    let others = first.others().unwrap();
    assert_eq!((others[0].state, others[0].failure.as_deref()), (OtherState::Stopped, Some("no space is left")));
    // The processes of all parts of this launch have started.
    first.abandon();
    assert_eq!(env.names(), [""; 0]);
}

/// The lease of a process on another node shows that this process has not left. The partial folder is then kept, and is
/// deleted only if the lease records that the process stopped.
#[test]
fn folder_of_a_possibly_live_process_is_kept() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.claim.parts_wait = false;
    for phase in [LeasePhase::Working, LeasePhase::Finished] {
        let staging = env.part(0, 2).unwrap();
        env.foreign_lease(lease_of(1, 2, 0), phase);
        staging.abandon();
        assert!(env.partial().exists(), "{phase:?}");
        env.claim.resume = true;
    }
    let staging = env.part(0, 2).unwrap();
    env.foreign_lease(lease_of(1, 2, 0), LeasePhase::Stopped);
    staging.abandon();
    assert_eq!(env.names(), [""; 0]);
}

/// Four processes join and leave again and again. No process loses its folder while it works, and the last process to
/// leave deletes the folder.
#[test]
fn concurrent_joins_and_exits_leave_nothing() {
    const OF: u32 = 4;
    let mut env = TestEnv::new(DestinationKind::Folder);
    (env.claim.resume, env.claim.parts_wait) = (true, false);
    let come_and_go = |index| {
        for _ in 0..50 {
            let staging = env.part(index, OF).unwrap();
            write(&staging.folder().path().join(index.to_string()), "half");
            staging.check().unwrap();
            staging.abandon();
        }
    };
    std::thread::scope(|scope| (0..OF).for_each(|index| _ = scope.spawn(move || come_and_go(index))));
    assert_eq!(env.names(), [""; 0]);
}
