//! What is left, and what is not, where a run ends with an error.

use super::*;

/// It would be in the way of who does without `--resume`.
#[test]
fn what_nothing_is_recorded_in_is_taken_away() {
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
        // Also what another one recorded.
        env.begin().unwrap().abandon();
        assert_eq!(env.names(), [".out.dtshard-partial"]);
    }
}

#[test]
fn the_last_part_that_leaves_takes_it_away() {
    for waits in [true, false] {
        let mut env = TestEnv::new(DestinationKind::Folder);
        env.claim.parts_wait = waits;
        let [first, second] = [0, 1].map(|index| env.part(index, 3).unwrap());
        first.abandon();
        assert!(env.partial().exists(), "one is at work");
        second.abandon();
        // What waits for others wants to know why they are gone.
        assert_eq!(env.partial().exists(), waits);
        env.claim.resume = true;
        env.part(2, 3).unwrap().abandon();
        // Those that have been there are to come back.
        assert_eq!(env.partial().exists(), waits);
        let all = [0, 1, 2].map(|index| env.part(index, 3).unwrap());
        all.into_iter().for_each(Staging::abandon);
        assert_eq!(env.names(), [""; 0]);
    }
}

/// What an earlier run left is no sign that they have come to this one.
#[test]
fn those_that_come_back_hear_why_a_part_is_gone() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    (0..2).for_each(|index| env.leave_behind(Part { index, of: 2 }));
    (env.claim.resume, env.claim.run) = (true, Some("job".into()));
    let failing = env.part(1, 2).unwrap();
    failing.tell(&Error::usage("no space is left", "make some"));
    failing.abandon();
    let first = env.part(0, 2).unwrap();
    let others = first.others().unwrap();
    assert_eq!((others[0].state, others[0].failure.as_deref()), (OtherState::Stopped, Some("no space is left")));
    // All of this launch have come.
    first.abandon();
    assert_eq!(env.names(), [""; 0]);
}

/// Somebody elsewhere, who does not say that he is gone.
#[test]
fn nothing_is_taken_from_who_may_live() {
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

/// Who comes is never without the folder that it has come to, and the last one leaves nothing.
#[test]
fn comings_and_goings() {
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
