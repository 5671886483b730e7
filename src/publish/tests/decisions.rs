//! What is decided, without files and waiting.

use std::time::Instant;

use super::super::admission::{Verdict, judge};
use super::super::lease::Seen;
use super::super::liveness::{Life, Watch};
use super::super::wait::{Decision, decide};
use super::*;

const ME: Part = Part { index: 1, of: 4 };

#[test]
fn who_may_join() {
    use Life::{Alive, Dead, Unsure};
    let verdict = |leases: &[(LeaseName, Life)]| judge(leases, ME);
    assert_eq!(verdict(&[]), Verdict::Join { generation: 0 });
    // Siblings, however they are.
    for life in [Alive, Dead, Unsure] {
        assert_eq!(verdict(&[(lease_of(0, 4, 0), life)]), Verdict::Join { generation: 0 });
    }
    // My own part.
    assert_eq!(verdict(&[(lease_of(1, 4, 2), Alive)]), Verdict::Rival(lease_of(1, 4, 2)));
    assert_eq!(verdict(&[(lease_of(1, 4, 2), Unsure)]), Verdict::Watch);
    assert_eq!(verdict(&[(lease_of(1, 4, 2), Dead)]), Verdict::Resume { generation: 3 });
    // Another division of the work.
    assert_eq!(verdict(&[(lease_of(0, 2, 0), Alive)]), Verdict::Rival(lease_of(0, 2, 0)));
    assert_eq!(verdict(&[(lease_of(0, 2, 0), Dead)]), Verdict::Resume { generation: 0 });
    assert_eq!(verdict(&[(lease_of(0, 2, 0), Dead), (lease_of(1, 2, 0), Unsure)]), Verdict::Watch);
    // A sibling has resumed already.
    assert_eq!(verdict(&[(lease_of(0, 2, 0), Dead), (lease_of(3, 4, 0), Alive)]), Verdict::Join { generation: 0 });
    let seal = LeaseName { role: Role::Seal, generation: 0 };
    assert_eq!(verdict(&[(seal, Dead)]), Verdict::Join { generation: 0 });
}

#[test]
fn what_to_do_while_waiting() {
    use OtherState::{Finished, NotStarted, Stopped, Stuck, Working};
    let decided = |sealer, states: &[OtherState]| {
        let other = |(index, state): (u32, &OtherState)| Other {
            part: Part { index, of: 4 },
            state: *state,
            done_bytes: 0,
            journal: None,
            failure: None,
        };
        let others: Vec<Other> = (0..).zip(states).map(other).collect();
        match decide(sealer, &others, &PACE) {
            Decision::Without(missing, after) => Err((missing.parts, after.as_secs())),
            decision => Ok(decision),
        }
    };
    assert_eq!(decided(false, &[]), Ok(Decision::Seal));
    assert_eq!(decided(false, &[Finished, Finished]), Ok(Decision::Seal));
    assert_eq!(decided(true, &[Finished, Stopped]), Ok(Decision::Wait));
    assert_eq!(decided(true, &[Finished]), Ok(Decision::Wait));
    assert_eq!(decided(false, &[Finished, Working]), Ok(Decision::Wait));
    assert_eq!(decided(false, &[NotStarted, Working, NotStarted]), Err((vec![0, 2], 300)));
    assert_eq!(decided(false, &[NotStarted, Stuck, Working]), Err((vec![1], 0)));
    assert_eq!(decided(false, &[NotStarted, Stuck, Stopped]), Err((vec![2], 2)));
}

#[test]
fn a_process_elsewhere_is_watched_and_one_here_is_looked_up() {
    let here = Process::this();
    let record = |process: &Process, beat, phase| {
        let record = Record { process: process.clone(), beat, phase, done_bytes: 0, failure: None };
        Seen { name: lease_of(0, 1, 0), bytes: record.to_bytes(), record: Some(record) }
    };
    let torn = Seen { name: lease_of(0, 1, 0), bytes: b"{".to_vec(), record: None };
    let (begun, second) = (Instant::now(), Duration::from_secs(1));
    let mut watch = Watch::new(20 * second);
    let mut life = |seen: &Seen, at: u32| watch.life(seen, begun + at * second);

    assert_eq!(life(&record(&here, 0, Phase::Working), 0), Life::Alive);
    assert_eq!(life(&record(&here, 0, Phase::Finished), 0), Life::Alive);
    assert_eq!(life(&record(&here, 0, Phase::Stopped), 0), Life::Dead);
    let later_with_that_number = Process { start: here.start + 1, ..here.clone() };
    assert_eq!(life(&record(&later_with_that_number, 0, Phase::Working), 0), Life::Dead);
    let no_such = Process { pid: 0x7FFF_FFF0, ..here.clone() };
    assert_eq!(life(&record(&no_such, 0, Phase::Working), 0), Life::Dead);

    let mut watch = Watch::new(20 * second);
    // Somebody looks every second.
    let mut looked = 0;
    let mut life = |seen: &Seen, at: u32| {
        (looked + 1..at).for_each(|between| _ = watch.life(seen, begun + between * second));
        looked = at;
        watch.life(seen, begun + at * second)
    };
    let container = Process { pid_namespace: "pid:[1]".into(), ..here.clone() };
    assert_eq!(life(&record(&container, 1, Phase::Working), 0), Life::Unsure);
    assert_eq!(life(&record(&container, 1, Phase::Working), 19), Life::Unsure);
    assert_eq!(life(&record(&container, 1, Phase::Working), 20), Life::Dead);
    assert_eq!(life(&record(&container, 2, Phase::Working), 21), Life::Alive);
    assert_eq!(life(&record(&container, 2, Phase::Working), 40), Life::Alive);
    assert_eq!(life(&record(&container, 2, Phase::Working), 41), Life::Dead);
    assert_eq!(life(&record(&container, 2, Phase::Left), 42), Life::Dead);
    assert_eq!(life(&torn, 50), Life::Alive, "somebody is writing it");
    assert_eq!(life(&torn, 70), Life::Dead);

    // A system that does not tell its boot is like no other, not even like itself.
    let nameless = Process { boot: String::new(), ..here };
    assert_eq!(life(&record(&nameless, 9, Phase::Working), 71), Life::Alive);
    assert_eq!(life(&record(&nameless, 9, Phase::Working), 91), Life::Dead);
}

/// A look that takes long, or comes late, shows no more than another one.
#[test]
fn time_without_a_look_says_nothing() {
    let second = Duration::from_secs(1);
    let process = Process { boot: "another".into(), ..Process::this() };
    let record = Record { process, beat: 1, phase: Phase::Working, done_bytes: 0, failure: None };
    let seen = Seen { name: lease_of(0, 1, 0), bytes: record.to_bytes(), record: Some(record) };
    let (begun, mut watch) = (Instant::now(), Watch::new(20 * second));
    for at in [0, 25, 1000, 5000] {
        assert_eq!(watch.life(&seen, begun + at * second), Life::Unsure, "{at}");
    }
    assert_eq!(watch.still(seen.name), 9 * second);
    (1..=11).for_each(|more| _ = watch.life(&seen, begun + (5000 + more) * second));
    assert_eq!(watch.life(&seen, begun + 5012 * second), Life::Dead);
}

#[test]
fn names_of_leases() {
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
