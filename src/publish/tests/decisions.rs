//! Tests of decisions that depend on neither files nor waiting.

use std::time::Instant;

use super::super::acquire::{Admission, admission};
use super::super::lease::{LeaseState, SeenLease};
use super::super::wait::{Decision, decide};
use super::*;

const ME: Part = Part { index: 1, of: 4 };

#[test]
fn admission_depends_on_lease_states() {
    use LeaseState::{Alive, Dead, Unsure};
    let verdict = |leases: &[(LeaseName, LeaseState)]| admission(leases, ME, true);
    assert_eq!(verdict(&[]), Admission::Join { generation: 0 });
    // Processes of other parts of the same run, in any state.
    for life in [Alive, Dead, Unsure] {
        assert_eq!(verdict(&[(lease_of(0, 4, 0), life)]), Admission::Join { generation: 0 });
    }
    // Another process works on the same part.
    assert_eq!(verdict(&[(lease_of(1, 4, 2), Alive)]), Admission::Conflict(lease_of(1, 4, 2)));
    assert_eq!(verdict(&[(lease_of(1, 4, 2), Unsure)]), Admission::Watch);
    assert_eq!(verdict(&[(lease_of(1, 4, 2), Dead)]), Admission::Resume { generation: 3 });
    // The lease belongs to a process that divides the work into another number of parts.
    assert_eq!(verdict(&[(lease_of(0, 2, 0), Alive)]), Admission::Conflict(lease_of(0, 2, 0)));
    assert_eq!(verdict(&[(lease_of(0, 2, 0), Dead)]), Admission::Resume { generation: 0 });
    assert_eq!(verdict(&[(lease_of(0, 2, 0), Dead), (lease_of(1, 2, 0), Unsure)]), Admission::Watch);
    // Another process of the same run has resumed already.
    assert_eq!(verdict(&[(lease_of(0, 2, 0), Dead), (lease_of(3, 4, 0), Alive)]), Admission::Join { generation: 0 });
    let seal = LeaseName { role: LeaseRole::Seal, generation: 0 };
    assert_eq!(verdict(&[(seal, Dead)]), Admission::Join { generation: 0 });
}

#[test]
fn wait_decision_depends_on_other_parts() {
    use OtherState::{Finished, NotStarted, Stopped, Working};
    let decided = |sealer, states: &[OtherState]| {
        let other = |(index, state): (u32, &OtherState)| OtherPart {
            part: Part { index, of: 4 },
            state: *state,
            done_bytes: 0,
            journal: None,
            failure: None,
        };
        let others: Vec<OtherPart> = (0..).zip(states).map(other).collect();
        match decide(sealer, &others) {
            Decision::GiveUp(missing) => Err(missing.parts),
            decision => Ok(decision),
        }
    };
    assert_eq!(decided(false, &[]), Ok(Decision::Seal));
    assert_eq!(decided(false, &[Finished, Finished]), Ok(Decision::Seal));
    assert_eq!(decided(true, &[Finished, Stopped]), Ok(Decision::Wait));
    assert_eq!(decided(true, &[Finished]), Ok(Decision::Wait));
    assert_eq!(decided(false, &[Finished, Working]), Ok(Decision::Wait));
    assert_eq!(decided(false, &[NotStarted, Working, NotStarted]), Err(vec![0, 2]));
    assert_eq!(decided(false, &[NotStarted, Working, Stopped]), Err(vec![2]));
}

#[test]
fn remote_lease_is_watched_and_local_process_is_looked_up() {
    let here = Process::this();
    let record = |process: &Process, beat, phase| {
        let record = LeaseRecord { process: process.clone(), beat, phase, done_bytes: 0, failure: None, gone: None };
        SeenLease { name: lease_of(0, 1, 0), bytes: record.to_bytes(), record: Some(record) }
    };
    let incomplete = SeenLease { name: lease_of(0, 1, 0), bytes: b"{".to_vec(), record: None };
    let (begun, second) = (Instant::now(), Duration::from_secs(1));
    let mut watch = LeaseWatch::new(Pace { dead_after: 20 * second, ..PACE });
    let mut life = |seen: &SeenLease, at: u32| watch.state(seen, begun + at * second);

    assert_eq!(life(&record(&here, 0, LeasePhase::Working), 0), LeaseState::Alive);
    assert_eq!(life(&record(&here, 0, LeasePhase::Finished), 0), LeaseState::Alive);
    assert_eq!(life(&record(&here, 0, LeasePhase::Stopped), 0), LeaseState::Dead);
    let later_with_that_number = Process { start: here.start + 1, ..here.clone() };
    assert_eq!(life(&record(&later_with_that_number, 0, LeasePhase::Working), 0), LeaseState::Dead);
    let no_such = Process { pid: 0x7FFF_FFF0, ..here.clone() };
    assert_eq!(life(&record(&no_such, 0, LeasePhase::Working), 0), LeaseState::Dead);

    let mut watch = LeaseWatch::new(Pace { dead_after: 20 * second, ..PACE });
    // The lease is read every second.
    let mut looked = 0;
    let mut life = |seen: &SeenLease, at: u32| {
        (looked + 1..at).for_each(|between| _ = watch.state(seen, begun + between * second));
        looked = at;
        watch.state(seen, begun + at * second)
    };
    let container = Process { pid_namespace: "pid:[1]".into(), ..here.clone() };
    assert_eq!(life(&record(&container, 1, LeasePhase::Working), 0), LeaseState::Unsure);
    assert_eq!(life(&record(&container, 1, LeasePhase::Working), 19), LeaseState::Unsure);
    assert_eq!(life(&record(&container, 1, LeasePhase::Working), 20), LeaseState::Dead);
    assert_eq!(life(&record(&container, 2, LeasePhase::Working), 21), LeaseState::Alive);
    assert_eq!(life(&record(&container, 2, LeasePhase::Working), 40), LeaseState::Alive);
    assert_eq!(life(&record(&container, 2, LeasePhase::Working), 41), LeaseState::Dead);
    assert_eq!(life(&record(&container, 2, LeasePhase::Left), 42), LeaseState::Dead);
    assert_eq!(life(&incomplete, 50), LeaseState::Alive, "somebody is writing it");
    assert_eq!(life(&incomplete, 70), LeaseState::Dead);

    // A system without a boot id differs from every system, even from itself.
    let nameless = Process { boot: String::new(), ..here };
    assert_eq!(life(&record(&nameless, 9, LeasePhase::Working), 71), LeaseState::Alive);
    assert_eq!(life(&record(&nameless, 9, LeasePhase::Working), 91), LeaseState::Dead);
}

/// The time between two checks counts only up to a limit, so a check that takes long or comes late proves nothing more.
#[test]
fn unwatched_time_does_not_count() {
    let second = Duration::from_secs(1);
    let process = Process { boot: "another".into(), ..Process::this() };
    let record = LeaseRecord { process, beat: 1, phase: LeasePhase::Working, done_bytes: 0, failure: None, gone: None };
    let seen = SeenLease { name: lease_of(0, 1, 0), bytes: record.to_bytes(), record: Some(record) };
    let (begun, mut watch) = (Instant::now(), LeaseWatch::new(Pace { dead_after: 20 * second, ..PACE }));
    for at in [0, 25, 1000, 5000] {
        assert_eq!(watch.state(&seen, begun + at * second), LeaseState::Unsure, "{at}");
    }
    // Between two checks, at most three seconds count.
    for more in 1..=10 {
        assert_eq!(watch.state(&seen, begun + (5000 + more) * second), LeaseState::Unsure, "{more}");
    }
    assert_eq!(watch.state(&seen, begun + 5011 * second), LeaseState::Dead);
}

#[test]
fn lease_names_round_trip_and_invalid_names_are_refused() {
    for name in ["part-2-of-4.0.lease", "part-0-of-1.17.lease", "seal.3.lease"] {
        let parsed: LeaseName = name.parse().unwrap();
        assert_eq!(format!("{parsed}.lease"), name);
    }
    for name in [
        "part-2-of-4.0.journal",
        "part-2-of-4.lease",
        "part--of-.0.lease",
        "seal.-1.lease",
        "seal.+1.lease",
        "x.0.lease",
    ] {
        assert!(name.parse::<LeaseName>().is_err(), "{name}");
    }
    assert_eq!(lease_of(2, 4, 1).journal(), "part-2-of-4.1.journal");
}
