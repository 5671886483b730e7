//! Tests of publishing by more than one process.

use super::*;

/// Returns two processes that have finished their work and both believe that they should seal, because the first one
/// seemed dead.
fn two_seals(env: &TestEnv) -> (Staging, Staging) {
    let (first, second) = (env.part(0, 2).unwrap(), env.part(1, 2).unwrap());
    write(&first.folder().path().join("out"), "new");
    first.finish().unwrap();
    second.finish().unwrap();
    (first, second)
}

/// Takes the seal lease for the process of `staging`. With generation 0, it is the first lease; with generation 1, it
/// takes over from the holder of generation 0.
fn take_seal(staging: &Staging, generation: u32) -> Seal<'_> {
    let name = LeaseName { role: LeaseRole::Seal, generation };
    let lease = lease::Lease::take(&staging.partial, name).unwrap().unwrap();
    Seal { staging, lease }
}

#[test]
fn second_process_waits_while_the_first_seals() {
    let env = TestEnv::new(DestinationKind::Folder);
    let (first, second) = two_seals(&env);
    assert_eq!(second.wait_published(&Stop::default(), &mut |_| ()).unwrap(), Waited::NobodySeals);
    let seal = first.try_seal(&Stop::default()).unwrap().unwrap();
    assert!(second.try_seal(&Stop::default()).unwrap().is_none());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| second.wait_published(&Stop::default(), &mut |_| ()).unwrap());
        std::thread::sleep(FAST.beat * 3);
        assert!(!waiting.is_finished());
        seal.publish(true).unwrap();
        assert_eq!(waiting.join().unwrap(), Waited::Published);
    });
    drop((first, second));
    assert_eq!(env.names(), ["out"]);
}

#[test]
fn dropped_seal_is_taken_by_another_process() {
    let env = TestEnv::new(DestinationKind::Folder);
    let (first, second) = two_seals(&env);
    drop(first.try_seal(&Stop::default()).unwrap().unwrap());
    assert_eq!(second.wait_published(&Stop::default(), &mut |_| ()).unwrap(), Waited::NobodySeals);
    second.try_seal(&Stop::default()).unwrap().unwrap().publish(true).unwrap();
    assert_eq!(first.wait_published(&Stop::default(), &mut |_| ()).unwrap(), Waited::Published);
}

/// The lease of the sealing process shows another node, so it is unknown whether this process is alive. `try_seal`
/// watches the lease: it returns `None` when the lease changes, and takes over when the lease has not changed for
/// `dead_after`.
#[test]
fn seal_lease_of_another_node_is_watched() {
    let env = TestEnv::new(DestinationKind::Folder);
    let (first, second) = two_seals(&env);
    let name = LeaseName { role: LeaseRole::Seal, generation: 0 };
    env.foreign_lease(name, LeasePhase::Working);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(FAST.look.1 * 3);
            let process = Process { boot: "another".into(), ..Process::this() };
            let record =
                LeaseRecord { process, beat: 4, phase: LeasePhase::Working, done_bytes: 5, failure: None, gone: None };
            fs::write(env.partial().join(format!("{name}.lease")), record.to_bytes()).unwrap();
        });
        assert!(second.try_seal(&Stop::default()).unwrap().is_none(), "it beats");
    });
    let begun = std::time::Instant::now();
    let seal = first.try_seal(&Stop::default()).unwrap().unwrap();
    assert!(begun.elapsed() >= FAST.dead_after);
    seal.publish(true).unwrap();
    assert!(second.was_published(&Stop::default()));
}

#[test]
fn concurrent_publishers_both_succeed() {
    for round in 0..60 {
        let overwrite = round % 2 == 0;
        let shape = if round % 3 == 0 { DestinationKind::Folder } else { DestinationKind::File };
        let mut env = TestEnv::new(shape);
        env.claim.overwrite = overwrite;
        if overwrite && shape == DestinationKind::File {
            write(&env.out(), "old");
        } else if overwrite {
            fs::create_dir(env.out()).unwrap();
            write(&env.out().join("old"), "old");
        }
        let (first, second) = two_seals(&env);
        let seals = [take_seal(&first, 0), take_seal(&second, 1)];
        std::thread::scope(|scope| {
            for seal in seals {
                scope.spawn(|| seal.publish(round % 4 == 0).unwrap());
            }
        });
        let file = if shape == DestinationKind::File { env.out() } else { env.out().join("out") };
        assert_eq!(read(&file), "new", "round {round}");
        drop((first, second));
        assert_eq!(env.names(), ["out"], "round {round}");
    }
}

/// If another user put a second file into the output folder, publishing fails and nothing appears at the destination.
#[test]
fn file_beside_the_one_output_is_not_published() {
    let env = TestEnv::new(DestinationKind::File);
    let (first, _second) = two_seals(&env);
    let seal = first.try_seal(&Stop::default()).unwrap().unwrap();
    fs::write(first.folder().path().join("a-planted-file"), "planted").unwrap();
    assert!(seal.publish(false).is_err());
    assert!(!env.out().exists());
}

/// A process dies after its commit. The waiting process, or the next run, removes the leftover partial folder, and does
/// not mistake this folder for unfinished work.
#[test]
fn leftover_of_a_published_run_is_removed() {
    for shape in [DestinationKind::Folder, DestinationKind::File] {
        let mut env = TestEnv::new(shape);
        env.claim.resume = true;
        let (first, second) = two_seals(&env);
        let seal = first.try_seal(&Stop::default()).unwrap().unwrap();
        let output = partial_folder::output(&AnchoredPath::new(&env.work()), shape).unwrap().unwrap();
        fs::rename(output.path(), env.out()).unwrap();
        // The sealing process is alive, so the other process waits for it.
        assert!(second.try_seal(&Stop::default()).unwrap().is_none());
        drop(seal);
        assert_eq!(second.wait_published(&Stop::default(), &mut |_| ()).unwrap(), Waited::Published);
        drop((first, second));
        assert_eq!(env.names(), ["out"]);
    }
    for shape in [DestinationKind::Folder, DestinationKind::File] {
        let mut env = TestEnv::new(shape);
        env.claim.resume = true;
        let (first, second) = two_seals(&env);
        drop(first.try_seal(&Stop::default()).unwrap().unwrap());
        let output = partial_folder::output(&AnchoredPath::new(&env.work()), shape).unwrap().unwrap();
        published_xattr::write(fs::File::open(output.path()).unwrap(), env.fingerprint);
        let has_mark = published_xattr::is(output.path(), env.fingerprint);
        fs::rename(output.path(), env.out()).unwrap();
        drop((first, second));
        let begun = env.begin_as(&Claim { part: Part { index: 1, of: 2 }, ..env.claim.clone() });
        match begun {
            Ok(Beginning::Done) => assert!(has_mark),
            Ok(Beginning::Work(_)) => panic!("it is done"),
            Err(error) => assert!(!has_mark, "{error}"),
        }
        assert_eq!(env.names(), ["out"]);
    }
}

#[test]
fn result_of_another_program_is_not_counted_as_published() {
    let env = TestEnv::new(DestinationKind::Folder);
    let (first, _second) = two_seals(&env);
    fs::remove_dir_all(env.partial()).unwrap();
    fs::create_dir(env.out()).unwrap();
    says(&first.wait_published(&Stop::default(), &mut |_| ()).unwrap_err(), &["was removed before"]);
}
