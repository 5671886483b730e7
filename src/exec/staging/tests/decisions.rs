//! What is decided, without files and waiting.

use std::time::Instant;

use super::super::judge::{Verdict, judge};
use super::super::lease::Seen;
use super::super::life::{Life, Watch};
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
    use OtherState::{Finished, NotStarted, Stopped, Working};
    let decided = |sealer, states: &[OtherState], waited: u64| {
        let other =
            |(index, state): (u32, &OtherState)| Other { part: Part { index, of: 4 }, state: *state, done_bytes: 0 };
        let others: Vec<Other> = (0..).zip(states).map(other).collect();
        decide(sealer, &others, Duration::from_secs(waited), PACE.start_within)
    };
    assert_eq!(decided(None, &[], 0), Decision::Seal);
    assert_eq!(decided(None, &[Finished, Finished], 0), Decision::Seal);
    assert_eq!(decided(Some(Life::Dead), &[Finished, Finished], 0), Decision::Seal);
    assert_eq!(decided(Some(Life::Alive), &[Finished, Stopped], 9999), Decision::Wait);
    assert_eq!(decided(Some(Life::Unsure), &[Finished], 0), Decision::Wait);
    assert_eq!(decided(None, &[Finished, Working], 9999), Decision::Wait);
    assert_eq!(decided(None, &[NotStarted, Working, NotStarted], 299), Decision::Wait);
    assert_eq!(decided(None, &[NotStarted, Working, NotStarted], 300), Decision::NeverStarted(vec![0, 2]));
    assert_eq!(decided(None, &[NotStarted, Working, Stopped], 0), Decision::Died(vec![2]));
}

#[test]
fn a_process_elsewhere_is_watched_and_one_here_is_looked_up() {
    let here = Process::this();
    let record = |process: &Process, beat, phase| {
        let record = Record { process: process.clone(), beat, phase, done_bytes: 0 };
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
    assert_eq!(life(&record(&nameless, 9, Phase::Working), 100), Life::Alive);
    assert_eq!(life(&record(&nameless, 9, Phase::Working), 120), Life::Dead);
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
