//! Tests with several parts, and with several processes for the same part.

use std::sync::Barrier;
use std::thread;

use super::*;

/// Calls `act` in `count` threads at the same time. Each call gets the index of its thread.
fn at_once<T: Send>(count: u32, act: impl Fn(u32) -> T + Sync) -> Vec<T> {
    let barrier = Barrier::new(count as usize);
    thread::scope(|scope| {
        let start = |index| {
            let (barrier, act) = (&barrier, &act);
            scope.spawn(move || {
                barrier.wait();
                act(index)
            })
        };
        let threads: Vec<_> = (0..count).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs a process from beginning to end. It waits up to 30 seconds for other parts, because these may start late on a
/// busy machine.
fn whole_run(env: &TestEnv, claim: &Claim) -> Result<()> {
    let plan = WorkPlan { fingerprint: env.fingerprint, version: env.version, about: &env.about };
    let patient = Pace { start_within: Duration::from_secs(30), ..FAST };
    let staging = work(acquire::acquire(&env.out(), env.shape, claim, &plan, patient, &Stop::default())?);
    write(&staging.folder().path().join(format!("{}", claim.part.index)), "1");
    staging.finish()?;
    loop {
        // Another process may have published between the check and the acquisition of the lease.
        let is_all_there =
            || fs::read_dir(staging.folder().path()).is_ok_and(|entries| entries.count() == claim.part.of as usize);
        match staging.try_seal(&Stop::default())? {
            Some(seal) if is_all_there() => return seal.publish(false),
            _ => {}
        }
        match staging.wait_published(&Stop::default(), &mut |_| ())? {
            Waited::Published => return Ok(()),
            Waited::NobodySeals => {}
            Waited::Without(missing) => return Err(staging.without(&missing)),
        }
    }
}

#[test]
fn concurrent_parts_publish_one_result() {
    for _ in 0..20 {
        let env = TestEnv::new(DestinationKind::Folder);
        let run = |index| whole_run(&env, &Claim { part: Part { index, of: 4 }, ..claim() });
        for ended in at_once(4, run) {
            ended.unwrap();
        }
        assert_eq!(
            (names(&env.out()), env.names()),
            (["0", "1", "2", "3"].map(String::from).to_vec(), vec!["out".into()])
        );
    }
}

#[test]
fn two_processes_for_one_part_admit_one() {
    for _ in 0..50 {
        let env = TestEnv::new(DestinationKind::Folder);
        let begun = at_once(2, |_| env.part(1, 2));
        let (won, lost): (Vec<_>, Vec<_>) = begun.into_iter().partition(Result::is_ok);
        assert_eq!((won.len(), lost.len()), (1, 1));
        says(lost[0].as_ref().unwrap_err(), &["another run is writing"]);
    }
}

#[test]
fn two_takeovers_of_one_part_admit_one() {
    for _ in 0..20 {
        let mut env = TestEnv::new(DestinationKind::Folder);
        env.leave_behind(Part { index: 1, of: 2 });
        env.claim.resume = true;
        let begun = at_once(2, |_| env.part(1, 2));
        let won: Vec<_> = begun.into_iter().filter_map(Result::ok).collect();
        assert_eq!(won.len(), 1);
        assert!(won[0].journal().path().ends_with("part-1-of-2.1.journal"));
    }
}

/// If two processes divide the work differently, at least one of them fails. They never work at the same time.
#[test]
fn two_divisions_of_the_work_exclude_each_other() {
    for _ in 0..50 {
        let env = TestEnv::new(DestinationKind::Folder);
        let begun = at_once(2, |index| env.part(0, index + 1));
        assert!(begun.iter().any(Result::is_err), "both work");
        for lost in begun.iter().filter_map(|begun| begun.as_ref().err()) {
            says(lost, &["another run is writing"]);
        }
        thread::sleep(FAST.beat * 2);
        begun.iter().flatten().for_each(|won| won.check().unwrap());
    }
}

#[test]
fn matching_part_joins_and_conflicting_part_is_refused() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    let first = env.part(0, 2).unwrap();
    let second = env.part(1, 2).unwrap();
    assert_eq!(first.folder().path(), second.folder().path());
    assert_ne!(first.journal().path(), second.journal().path());
    says(&env.part(1, 2).unwrap_err(), &["another run", "part 1 of 2"]);
    says(&env.part(0, 3).unwrap_err(), &["another run"]);
    env.fingerprint = Fingerprint([8; 32]);
    says(&env.part(1, 2).unwrap_err(), &["another run"]);
    env.fingerprint = Fingerprint([7; 32]);
    drop(second);
    says(&env.part(1, 2).unwrap_err(), &["did not finish", "options::resume"]);
    env.claim.resume = true;
    env.part(1, 2).unwrap().check().unwrap();
    first.check().unwrap();
}

#[test]
fn different_part_count_resumes_a_dead_run() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.leave_behind(Part { index: 0, of: 2 });
    says(&env.part(0, 3).unwrap_err(), &["did not finish", "options::resume"]);
    env.claim.resume = true;
    let staging = env.part(2, 3).unwrap();
    assert_eq!(names(staging.folder().path()), ["a"]);
    // A process of another part joins the run without `--resume`.
    env.claim.resume = false;
    env.part(1, 3).unwrap();
}

#[test]
fn progress_of_other_parts_is_visible() {
    let env = TestEnv::new(DestinationKind::Folder);
    let first = env.part(0, 3).unwrap();
    let second = env.part(1, 3).unwrap();
    second.done_bytes().store(77, Ordering::Relaxed);
    second.finish().unwrap();
    let other = |index, state, done_bytes| {
        let journal = (state != OtherState::NotStarted).then(|| format!("part-{index}-of-3.0.journal"));
        OtherPart { part: Part { index, of: 3 }, state, done_bytes, journal, failure: None }
    };
    let third = other(2, OtherState::NotStarted, 0);
    assert_eq!(first.others().unwrap(), [other(1, OtherState::Finished, 77), third.clone()]);
    drop(second);
    assert_eq!(first.others().unwrap(), [other(1, OtherState::Finished, 77), third]);
    drop(env.part(2, 3).unwrap());
    assert_eq!(first.others().unwrap()[1], other(2, OtherState::Stopped, 0));
}

#[test]
fn process_that_was_taken_over_gets_an_error() {
    let env = TestEnv::new(DestinationKind::Folder);
    for other in [lease_of(1, 2, 1), lease_of(0, 3, 0)] {
        let stop = Stop::default();
        let staging = env.part_that_stops(1, 2, &stop).unwrap();
        stop.check().unwrap();
        staging.check().unwrap();
        env.foreign_lease(other, LeasePhase::Working);
        let words = ["taken over part 1 of 2", ".out.dtshard-partial"];
        // Workers make this check between two write blocks.
        says(&in_time(|| stop.check().err()), &words);
        says(&staging.check().unwrap_err(), &words);
        assert!(staging.finish().is_err());
        drop(staging);
        assert!(env.partial().exists());
        fs::remove_dir_all(env.partial()).unwrap();
    }
}

#[test]
fn unsure_lease_of_another_node_is_watched_before_takeover() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.leave_behind(Part { index: 1, of: 2 });
    env.foreign_lease(lease_of(1, 2, 1), LeasePhase::Working);
    env.claim.resume = true;
    let begun = std::time::Instant::now();
    let staging = env.part(1, 2).unwrap();
    assert!(begun.elapsed() >= FAST.dead_after);
    assert!(staging.journal().path().ends_with("part-1-of-2.2.journal"));
    drop(staging);
    // A released lease is not watched.
    env.foreign_lease(lease_of(1, 2, 3), LeasePhase::Stopped);
    let begun = std::time::Instant::now();
    env.part(1, 2).unwrap();
    assert!(begun.elapsed() < FAST.dead_after);
    // A lease that changes is alive.
    env.foreign_lease(lease_of(1, 2, 5), LeasePhase::Working);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(FAST.look.1 * 3);
            env.foreign_lease(lease_of(1, 2, 5), LeasePhase::Finished);
        });
        says(&env.part(1, 2).unwrap_err(), &["another run", "n9"]);
    });
}

#[test]
fn watching_continues_until_the_lease_state_is_known() {
    let env = TestEnv::new(DestinationKind::Folder);
    env.leave_behind(Part::alone());
    env.foreign_lease(lease_of(0, 1, 1), LeasePhase::Working);
    let stop = Stop::default();
    let plan = WorkPlan { fingerprint: env.fingerprint, version: "1", about: &PlanDescription::default() };
    let patient = Pace { dead_after: Duration::from_hours(1), ..FAST };
    let (shape, out, claim) = (env.shape, env.out(), claim());
    thread::scope(|scope| {
        let waiting = scope.spawn(|| acquire::acquire(&out, shape, &claim, &plan, patient, &stop));
        thread::sleep(Duration::from_millis(100));
        assert!(!waiting.is_finished());
        env.foreign_lease(lease_of(0, 1, 1), LeasePhase::Stopped);
        says(&waiting.join().unwrap().unwrap_err(), &["did not finish"]);
    });
}

#[test]
fn restart_of_a_launch_deletes_earlier_output() {
    for _ in 0..10 {
        let env = TestEnv::new(DestinationKind::Folder);
        for index in 0..4 {
            env.leave_behind(Part { index, of: 4 });
        }
        write(&env.data().join("junk"), "x");
        let run = |index| {
            let part = Part { index, of: 3 };
            whole_run(&env, &Claim { part, restart: true, run: Some("job.2".into()), ..claim() })
        };
        for ended in at_once(3, run) {
            ended.unwrap();
        }
        assert_eq!((names(&env.out()), env.names()), (["0", "1", "2"].map(String::from).to_vec(), vec!["out".into()]));
    }
}

#[test]
fn restart_without_a_launch_or_part_0_is_an_error() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.leave_behind(Part { index: 1, of: 2 });
    env.claim.restart = true;
    says(&env.part(0, 2).unwrap_err(), &["options::restart", "remove", ".out.dtshard-partial"]);
    env.claim = Claim { run: Some("job".into()), parts_wait: false, ..env.claim };
    says(&env.part(0, 2).unwrap_err(), &["options::restart"]);
    env.claim.parts_wait = true;
    says(&env.part(1, 2).unwrap_err(), &["part 0 of 2 has not started"]);
    assert_eq!(names(&env.data()), ["a"]);
}

/// Four processes start with `--restart` at the same time. At most one of them works, and its folder is not deleted.
#[test]
fn concurrent_restarts_never_delete_live_work() {
    for _ in 0..20 {
        let mut env = TestEnv::new(DestinationKind::Folder);
        env.leave_behind(Part::alone());
        env.claim.restart = true;
        let begun = at_once(4, |_| env.begin());
        let won: Vec<_> = begun.iter().flatten().collect();
        assert!(won.len() <= 1);
        for staging in won {
            assert_eq!(names(staging.folder().path()), [""; 0]);
            thread::sleep(FAST.beat * 2);
            staging.check().unwrap();
        }
    }
}

/// The folder of a process is moved away, and another process creates a new partial folder. The paths of the first
/// process then no longer exist, so it cannot write into the new folder.
#[test]
fn resumed_sleeper_cannot_write_into_the_new_folder() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.claim.resume = true;
    let sleeper = env.begin().unwrap();
    fs::rename(env.partial(), env.root.path().join("elsewhere")).unwrap();
    env.fingerprint = Fingerprint([8; 32]);
    let successor = env.begin().unwrap();
    for path in [sleeper.folder().path().join("out"), sleeper.journal().path().to_owned()] {
        assert_eq!(fs::write(&path, "late").unwrap_err().kind(), std::io::ErrorKind::NotFound);
    }
    assert!(partial_folder::output(&sleeper.work, DestinationKind::Folder).unwrap().is_none());
    assert_eq!((names(successor.journals().path()), names(successor.folder().path())), (vec!["data".into()], vec![]));
}

/// If processes start with two different numbers of parts, only one of the numbers applies, and all parts of that
/// number work.
#[test]
fn concurrent_part_counts_admit_only_one() {
    let parts = [(0, 3), (1, 3), (2, 3), (0, 4), (1, 4)];
    for round in 0..40 {
        let env = TestEnv::new(DestinationKind::Folder);
        let start = std::sync::Barrier::new(parts.len());
        let begun: Vec<Result<Staging>> = std::thread::scope(|scope| {
            let run = |(index, of)| {
                let (env, start) = (&env, &start);
                scope.spawn(move || {
                    start.wait();
                    env.part(index, of)
                })
            };
            let running: Vec<_> = parts.into_iter().map(run).collect();
            running.into_iter().map(|running| running.join().unwrap()).collect()
        });
        let works: Vec<bool> = begun.iter().map(Result::is_ok).collect();
        let (three, four) = ([true, true, true, false, false], [false, false, false, true, true]);
        assert!(works == three || works == four, "{round}: {works:?}");
        for error in begun.iter().filter_map(|begun| begun.as_ref().err()) {
            says(error, &["another run is writing"]);
        }
    }
}
