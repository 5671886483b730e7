//! Tests with one process and one destination.

use super::*;

#[test]
fn folder_is_published_complete_or_not_at_all() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("deep/out");
    let plan = WorkPlan { fingerprint: Fingerprint([7; 32]), version: "1", about: &PlanDescription::default() };
    let begin = || work(Staging::begin(&out, DestinationKind::Folder, &claim(), &plan, &Stop::default()).unwrap());
    let staging = begin();
    write(&staging.folder().path().join("a"), "1");
    assert!(!out.exists());
    drop(staging);
    assert_eq!(names(&root.path().join("deep")), Vec::<String>::new());

    let staging = begin();
    write(&staging.folder().path().join("a"), "1");
    publish(&staging);
    assert_eq!(names(&out), ["a"]);
    drop(staging);
    assert_eq!(names(&root.path().join("deep")), ["out"]);
}

#[test]
fn drop_does_not_wait_for_the_next_beat() {
    let env = TestEnv::new(DestinationKind::Folder);
    let plan = WorkPlan { fingerprint: env.fingerprint, version: "1", about: &PlanDescription::default() };
    let staging = Staging::begin(&env.out(), DestinationKind::Folder, &env.claim, &plan, &Stop::default());
    let begun = std::time::Instant::now();
    drop(staging);
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
}

#[test]
fn existing_destination_without_overwrite_is_an_error() {
    let mut env = TestEnv::new(DestinationKind::File);
    write(&env.out(), "old");
    env.refused(&["out exists", "options::overwrite"]);
    env.claim.overwrite = true;
    let staging = env.begin().unwrap();
    write(&staging.folder().path().join("out"), "new");
    assert_eq!(read(&env.out()), "old");
    publish(&staging);
    drop(staging);
    assert_eq!(read(&env.out()), "new");
    assert_eq!(env.names(), ["out"]);
}

/// Another user puts a file into the destination during a run with `--overwrite`. The replace check rejects the file,
/// so publishing fails and the destination is unchanged.
#[test]
fn destination_that_fails_the_replace_check_is_kept() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.claim.overwrite = true;
    env.claim.replace_check = ReplaceCheck::new(|destination| {
        let is_foreign = destination.join("thesis.tex").exists();
        if is_foreign { Err(Error::usage("thesis.tex", "move it away")) } else { Ok(()) }
    });
    fs::create_dir(env.out()).unwrap();
    write(&env.out().join("old"), "old");
    let staging = env.begin().unwrap();
    write(staging.folder().join("new").path(), "new");
    write(&env.out().join("thesis.tex"), "mine");
    staging.finish().unwrap();
    let seal = staging.try_seal(&Stop::default()).unwrap().unwrap();
    assert_eq!(seal.publish(true).unwrap_err().kind(), "usage");
    drop(staging);
    assert_eq!((names(&env.out()), env.names()), (vec!["old".into(), "thesis.tex".into()], vec!["out".into()]));
}

#[test]
fn overwrite_replaces_a_file_and_a_full_folder() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.claim.overwrite = true;
    write(&env.out(), "old");
    for content in ["1", "2"] {
        let staging = env.begin().unwrap();
        write(&staging.folder().path().join(content), content);
        publish(&staging);
        drop(staging);
        assert_eq!((names(&env.out()), env.names()), (vec![content.into()], vec!["out".into()]));
    }
}

#[test]
fn empty_folder_accepts_a_folder_but_not_a_file() {
    let mut env = TestEnv::new(DestinationKind::File);
    fs::create_dir(env.out()).unwrap();
    env.claim.overwrite = true;
    env.refused(&["is a folder", "out/model.pt"]);
    env.shape = DestinationKind::Folder;
    env.claim.overwrite = false;
    let staging = env.begin().unwrap();
    write(&staging.folder().path().join("x"), "1");
    publish(&staging);
    assert_eq!(names(&env.out()), ["x"]);
}

#[test]
fn file_that_appears_during_the_run_is_kept() {
    let env = TestEnv::new(DestinationKind::File);
    let staging = env.begin().unwrap();
    write(&staging.folder().path().join("out"), "new");
    write(&env.out(), "of somebody");
    staging.finish().unwrap();
    let error = staging.try_seal(&Stop::default()).unwrap().unwrap().publish(true).unwrap_err();
    says(&error, &["out appeared while", "another destination"]);
    assert_eq!(read(&env.out()), "of somebody");
}

#[test]
fn interrupted_swap_is_finished_or_rolled_back() {
    let env = TestEnv::new(DestinationKind::Folder);
    let old = env.root.path().join(".out.dtshard-old");
    // The process was killed between the renames. The old output is restored, and then rejected like any existing
    // destination.
    fs::create_dir(&old).unwrap();
    write(&old.join("a"), "old");
    env.refused(&["exists"]);
    assert_eq!(names(&env.out()), ["a"]);
    // The process was killed before it deleted the old output. The old output is deleted now.
    fs::create_dir(&old).unwrap();
    env.refused(&["exists"]);
    assert_eq!(env.names(), ["out"]);
}

#[test]
fn live_partial_is_refused_and_dead_partial_is_resumable() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    let live = env.begin().unwrap();
    for (restart, resume) in [(false, false), (true, false), (false, true)] {
        env.claim = Claim { restart, resume, ..claim() };
        env.refused(&["another run is writing", &std::process::id().to_string()]);
    }
    assert!(live.folder().exists());
    drop(live);

    env.claim = claim();
    env.leave_behind(Part::alone());
    env.refused(&["did not finish", "options::resume", "options::restart"]);
    env.claim.restart = true;
    let fresh = env.begin().unwrap();
    assert_eq!(names(fresh.folder().path()), [""; 0]);
    assert_eq!(env.names(), [".out.dtshard-partial"]);
}

#[test]
fn invalid_partial_folder_can_only_be_restarted() {
    let old_version = |path: &Path| {
        fs::create_dir(path).unwrap();
        write(&path.join(".lock"), "");
        write(&path.join("out"), "half");
    };
    let file = |path: &Path| write(path, "junk");
    let damaged = |path: &Path| {
        fs::create_dir(path).unwrap();
        write(&path.join("plan.json"), "{");
    };
    // A plan must not name a folder outside the partial folder.
    let straying = |path: &Path| {
        fs::create_dir_all(path.join("work-/x/data")).unwrap();
        let plan = r#"{"version":"1","fingerprint":"07","run":null,"parts":1,"id":"/x"}"#;
        write(&path.join("plan.json"), plan);
    };
    for make in [&old_version as &dyn Fn(&Path), &file, &damaged, &straying] {
        let mut env = TestEnv::new(DestinationKind::Folder);
        make(&env.partial());
        env.refused(&["did not finish", ".out.dtshard-partial", "options::restart"]);
        env.claim.resume = true;
        env.refused(&["no valid plan", "options::restart"]);
        env.claim = Claim { restart: true, ..claim() };
        publish(&env.begin().unwrap());
        assert_eq!(env.names(), ["out"]);
    }
    // An empty folder can be replaced without losing data.
    let env = TestEnv::new(DestinationKind::Folder);
    fs::create_dir(env.partial()).unwrap();
    publish(&env.begin().unwrap());
    assert_eq!(env.names(), ["out"]);
}

#[test]
fn resume_of_another_plan_is_an_error() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.leave_behind(Part::alone());
    env.claim.resume = true;
    env.version = "2";
    env.refused(&["dtshard 1 wrote it, but this is 2", "options::restart"]);
    env.version = "1";
    env.fingerprint = Fingerprint([8; 32]);
    env.refused(&["cannot be resumed: it has another source or other options", "options::restart"]);
    env.about.options.insert("options::dtype".into(), "bf16".into());
    env.refused(&["cannot be resumed: options::dtype was not given, now bf16", "options::restart"]);
    assert_eq!(names(&env.data()), ["a"]);
    env.claim = Claim { restart: true, ..claim() };
    publish(&env.begin().unwrap());
    assert_eq!(env.names(), ["out"]);
}

#[test]
fn resume_continues_or_starts_fresh_or_is_done() {
    let mut env = TestEnv::new(DestinationKind::File);
    env.claim.resume = true;
    let first = env.begin().unwrap();
    assert!(first.is_kept());
    write(&first.folder().path().join("out"), "half");
    let journal = first.journal().path().to_owned();
    drop(first);

    let second = env.begin().unwrap();
    assert_eq!(read(&second.folder().path().join("out")), "half");
    assert!(second.journal().path() != journal && second.journal().path().parent() == Some(second.journals().path()));
    publish(&second);
    drop(second);
    assert_eq!(env.names(), ["out"]);
    if !published_xattr::is(&env.out(), env.fingerprint) {
        return; // The file system has no attributes.
    }
    assert!(matches!(env.begin_as(&env.claim), Ok(Beginning::Done)));
    env.fingerprint = Fingerprint([8; 32]);
    env.refused(&[
        "out exists and is complete, but was made from another source or with other options",
        "options::overwrite",
    ]);
    env.claim.resume = false;
    env.refused(&["out exists\n"]);
}

#[test]
fn removed_partial_folder_is_an_error() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    env.claim.resume = true;
    let staging = env.begin().unwrap();
    staging.check().unwrap();
    fs::remove_dir_all(env.partial()).unwrap();
    says(&in_time(|| staging.check().err()), &[".out.dtshard-partial was removed", "start again"]);
    says(&staging.wait_published(&Stop::default(), &mut |_| ()).unwrap_err(), &["was removed"]);
}
