//! Tests of waiting for other parts, also for parts that never start.

use std::thread;

use super::*;

fn in_vain(staging: &Staging, notify: &mut dyn FnMut(&[OtherPart])) -> Error {
    match staging.wait_published(&Stop::default(), notify).unwrap() {
        Waited::Without(missing) => staging.without(&missing),
        other => panic!("{other:?}"),
    }
}

#[test]
fn missing_or_stopped_parts_are_named_in_the_error() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.claim.run = Some("job".into());
    let first = env.part(0, 4).unwrap();
    first.finish().unwrap();
    let mut looks = 0;
    let error = in_vain(&first, &mut |_| looks += 1);
    says(&error, &["parts 1, 2, 3 of 4 have not started", "options::resume", "options::part 0 options::parts 1"]);
    assert!(looks > 2);
    drop(env.part(2, 4).unwrap());
    let error = in_vain(&first, &mut |_| ());
    says(&error, &["part 2 of 4 stopped: its process is gone", ".out.dtshard-partial", "options::resume"]);
    // The folder contains no records, so nothing is lost when it is deleted.
    drop(first);
    assert!(env.data().exists());
}

/// Part 1 fails with a reason before part 0 starts. Part 0 reports this reason if the launch has a name, or if the run
/// is not resumed; otherwise it reports that part 1 has not started.
#[test]
fn failed_part_reports_its_reason_to_others() {
    for (run, resume, is_final) in
        [(None, false, true), (None, true, false), (Some("job"), true, true), (Some("job"), false, true)]
    {
        let mut env = TestEnv::new(DestinationKind::Folder);
        (env.claim.run, env.claim.resume) = (run.map(str::to_owned), resume);
        let failing = env.part(1, 2).unwrap();
        failing.announce_failure(&Error::usage("no space is left", "make some"));
        failing.abandon();
        let first = env.part(0, 2).unwrap();
        first.finish().unwrap();
        let mut seen = Vec::new();
        let error = in_vain(&first, &mut |others| seen = others.to_vec());
        assert_eq!(seen[0].failure.as_deref(), Some("no space is left"));
        let words = if is_final { "part 1 of 2 failed: no space is left; " } else { "part 1 of 2 has not started" };
        says(&error, &[words, "with options::resume to continue"]);
        // The failed part may be restarted nevertheless.
        env.claim.resume = true;
        let again = env.part(1, 2).unwrap();
        let others = first.others().unwrap();
        assert_eq!((others[0].state, &others[0].failure), (OtherState::Working, &None));
        again.finish().unwrap();
        assert_eq!(first.wait_published(&Stop::default(), &mut |_| ()).unwrap(), Waited::NobodySeals);
    }
}

/// A requeued job runs the same command again, with another launch name. A failure that the earlier launch recorded
/// does not count: the part counts as not started.
#[test]
fn failure_of_an_earlier_launch_is_ignored() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    (env.claim.run, env.claim.resume) = (Some("job.0".into()), true);
    let failing = env.part(1, 2).unwrap();
    failing.announce_failure(&Error::usage("no space is left", "make some"));
    failing.abandon();
    env.claim.run = Some("job.1".into());
    let first = env.part(0, 2).unwrap();
    first.finish().unwrap();
    assert_eq!(first.others().unwrap()[0].state, OtherState::NotStarted);
    says(&in_vain(&first, &mut |_| ()), &["part 1 of 2 has not started"]);
}

/// The reason of a failure and the name of the launch are both long. The reason is cut so that the lease still has its
/// fixed length.
#[test]
fn long_failure_reason_is_cut() {
    for reason in ["\u{1}".repeat(5000), "\u{1F980}".repeat(5000), "x".repeat(5000)] {
        let mut env = TestEnv::new(DestinationKind::Folder);
        (env.claim.resume, env.claim.run) = (true, Some("\u{2}".repeat(5000)));
        let staging = env.part(1, 2).unwrap();
        staging.announce_failure(&Error::usage(reason.clone(), ""));
        staging.abandon();
        let first = env.part(0, 2).unwrap();
        let others = first.others().unwrap();
        let is_recorded = |part: &String| (100..=400).contains(&part.len()) && reason.starts_with(part);
        assert!(others[0].failure.as_ref().is_some_and(is_recorded), "{others:?}");
        assert_eq!(others[0].state, OtherState::Stopped);
        assert_eq!(fs::read(env.partial().join("part-1-of-2.0.lease")).unwrap().len(), lease::RECORD_BYTES);
    }
}

/// Tasks are restarted one after the other, so the first restarted task finds leases from before the restart. These
/// parts count as not started until their new processes start.
#[test]
fn leases_of_an_earlier_run_count_as_not_started() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.leave_behind(Part { index: 1, of: 4 });
    let left = env.part(2, 4).unwrap();
    left.finish().unwrap();
    drop(left);
    env.leave_behind(Part { index: 3, of: 4 });
    env.foreign_lease(lease_of(3, 4, 0), LeasePhase::Finished);
    env.claim.resume = true;
    let first = env.part(0, 4).unwrap();
    first.finish().unwrap();
    let states = || first.others().unwrap().iter().map(|other| other.state).collect::<Vec<_>>();
    assert_eq!(states(), [OtherState::NotStarted, OtherState::NotStarted, OtherState::Working]);
    let (second, third) = (env.part(1, 4).unwrap(), env.part(2, 4).unwrap());
    third.finish().unwrap();
    assert_eq!(states()[..2], [OtherState::Working, OtherState::Finished]);
    // A process of this run that died counts as stopped.
    drop(second);
    assert_eq!(states()[0], OtherState::Stopped);
    // It takes a while until the process on the other node is known to be dead.
    in_time(|| (states()[2] == OtherState::NotStarted).then_some(()));
    env.foreign_lease(lease_of(3, 4, 1), LeasePhase::Finished);
    assert_eq!(states()[2], OtherState::Finished);
}

/// A process on another node counts as alive only after its lease has changed. A lease that never changes is from an
/// earlier run.
#[test]
fn changing_lease_of_another_node_belongs_to_this_run() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.leave_behind(Part { index: 1, of: 4 });
    env.leave_behind(Part { index: 2, of: 4 });
    for index in [1, 2] {
        env.foreign_lease(lease_of(index, 4, 0), LeasePhase::Working);
    }
    let third = env.part(3, 4).unwrap();
    env.claim.resume = true;
    let first = env.part(0, 4).unwrap();
    let journals = || first.others().unwrap().into_iter().map(|other| (other.journal, other.done_bytes));
    let here = (Some(String::from("part-3-of-4.0.journal")), 0);
    // This run has not checked any lease yet.
    env.foreign_lease(lease_of(1, 4, 0), LeasePhase::Finished);
    let moved = (Some(String::from("part-1-of-4.0.journal")), 5);
    assert_eq!(journals().collect::<Vec<_>>(), [moved.clone(), (None, 0), here.clone()]);
    in_time(|| (first.others().unwrap()[1].state == OtherState::NotStarted).then_some(()));
    assert_eq!(journals().collect::<Vec<_>>(), [moved, (None, 0), here]);
    drop(third);
}

/// A process that was stopped may be restarted, so the other process waits for it for the time `stopped_after` before
/// it gives up.
#[test]
fn stopped_part_is_given_time_to_restart() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.claim.resume = true;
    let (first, second) = (env.part(0, 2).unwrap(), env.part(1, 2).unwrap());
    first.finish().unwrap();
    drop(second);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| first.wait_published(&Stop::default(), &mut |_| ()).unwrap());
        env.part(1, 2).unwrap().finish().unwrap();
        assert_eq!(waiting.join().unwrap(), Waited::NobodySeals);
    });
    let begun = Instant::now();
    drop(env.part(1, 2).unwrap());
    says(&in_vain(&first, &mut |_| ()), &["part 1 of 2 stopped"]);
    assert!(begun.elapsed() >= FAST.stopped_after);
    // If all work of the part is recorded, its process does not have to be restarted.
    let Waited::Without(missing) = first.wait_published(&Stop::default(), &mut |_| ()).unwrap() else { panic!() };
    first.mark_finished(missing);
    assert_eq!(first.others().unwrap()[0].state, OtherState::Finished);
    assert_eq!(first.wait_published(&Stop::default(), &mut |_| ()).unwrap(), Waited::NobodySeals);
}

/// This node caches file names, so the partial folder seems to be missing for a while. The waiting process reports the
/// wait and continues when the folder appears, and fails only if it is missing for longer than names are cached.
#[test]
fn cached_missing_partial_folder_is_waited_for() {
    let (mut env, said) = (TestEnv::new(DestinationKind::Folder), Arc::new(Mutex::new(0)));
    let count = Arc::clone(&said);
    let print = move |_: &str| *count.lock().unwrap() += 1;
    let (first, again) = (Duration::ZERO, Duration::from_mins(1));
    env.claim.reporter = WaitReporter { first, again, print: Arc::new(print) };
    env.claim.resume = true;
    let (mut first, second) = (env.part(0, 2).unwrap(), env.part(1, 2).unwrap());
    first.destination.caches = true.into();
    [&first, &second].into_iter().for_each(|part| part.finish().unwrap());
    let hidden = env.root.path().join("hidden");
    fs::rename(env.partial(), &hidden).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(FAST.dead_after * 2);
            fs::rename(&hidden, env.partial()).unwrap();
        });
        assert_eq!(first.wait_published(&Stop::default(), &mut |_| ()).unwrap(), Waited::NobodySeals);
    });
    assert_eq!(*said.lock().unwrap(), 1);
    let begun = Instant::now();
    fs::rename(env.partial(), &hidden).unwrap();
    says(&first.wait_published(&Stop::default(), &mut |_| ()).unwrap_err(), &["was removed before"]);
    assert!(begun.elapsed() >= FAST.cached_for);
    // The second check does not wait, because the result is already known.
    assert!(!first.was_published(&Stop::default()));
    assert!(begun.elapsed() < FAST.cached_for * 4);
}

#[test]
fn suspended_process_is_named_and_taken_over() {
    let env = TestEnv::new(DestinationKind::Folder);
    let plan = WorkPlan { fingerprint: env.fingerprint, version: "1", about: &PlanDescription::default() };
    let begin = |index, beat| {
        let pace = Pace { beat, stuck_after: Duration::from_millis(100), ..FAST };
        let claim = Claim { part: Part { index, of: 2 }, ..claim() };
        work(acquire::acquire(&env.out(), env.shape, &claim, &plan, pace, &Stop::default()).unwrap())
    };
    let (first, second) = (begin(0, FAST.beat), begin(1, Duration::from_hours(1)));
    first.finish().unwrap();
    let who = Process::this().to_string();
    says(&in_vain(&first, &mut |_| ()), &["part 1 of 2 has made no progress", &who, "options::resume"]);
    second.finish().unwrap();
    let _seal = second.try_seal(&Stop::default()).unwrap().unwrap();
    // Another process takes over the seal lease, as a process on another node would.
    assert_eq!(first.wait_published(&Stop::default(), &mut |_| ()).unwrap(), Waited::NobodySeals);
    assert!(first.try_seal(&Stop::default()).unwrap().is_some());
}

/// Another process has taken over the part of a suspended process, or has started with another number of parts. The
/// suspended process ends before its next heartbeat, and must not delete the folder.
#[test]
fn drop_after_a_takeover_keeps_the_lease_of_the_new_holder() {
    let env = TestEnv::new(DestinationKind::Folder);
    let plan = WorkPlan { fingerprint: env.fingerprint, version: "1", about: &PlanDescription::default() };
    let pace = Pace { beat: Duration::from_hours(1), ..FAST };
    for other in [lease_of(0, 1, 1), lease_of(0, 3, 0)] {
        let begun = acquire::acquire(&env.out(), env.shape, &claim(), &plan, pace, &Stop::default());
        let staging = work(begun.unwrap());
        env.foreign_lease(other, LeasePhase::Working);
        drop(staging);
        assert!(env.data().exists());
        fs::remove_dir_all(env.partial()).unwrap();
    }
}

/// The last element of a job array starts after the other element has published the output. It succeeds without any
/// work if its parts do not wait for each other and the output is from the same plan.
#[test]
fn late_part_after_publication_is_done() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.claim.parts_wait = false;
    publish_alone(&env.part(1, 2).unwrap());
    if !published_xattr::is(&env.out(), env.fingerprint) {
        return; // The file system has no attributes.
    }
    for overwrite in [false, true] {
        env.claim.overwrite = overwrite;
        let late = Claim { part: Part { index: 0, of: 2 }, ..env.claim.clone() };
        assert!(matches!(env.begin_as(&late), Ok(Beginning::Done)));
        assert_eq!(env.names(), ["out"]);
    }
    // A process that waits for the others, or that works alone, expects to write a new output.
    env.claim = claim();
    says(&env.part(0, 2).unwrap_err(), &["exists"]);
    env.refused(&["exists"]);
    // The existing output may be from another plan.
    env.claim.parts_wait = false;
    env.fingerprint = Fingerprint([8; 32]);
    says(&env.part(0, 2).unwrap_err(), &["exists"]);
}

fn publish_alone(staging: &Staging) {
    write(&staging.folder().path().join("a"), "1");
    staging.finish().unwrap();
    staging.try_seal(&Stop::default()).unwrap().unwrap().publish(false).unwrap();
}
