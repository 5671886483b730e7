//! Tests in which a process is killed, at every point where it makes a decision.

use super::*;
use crate::fault;

/// This is not a test: [`TestEnv::in_child`] runs this code in a child process.
#[test]
fn the_child() {
    let Ok(task) = std::env::var("STAGING_TEST") else { return };
    let [what, root, shape] = task.lines().collect::<Vec<_>>().try_into().unwrap();
    let shape = if shape == "File" { DestinationKind::File } else { DestinationKind::Folder };
    let flags = |word: &str| what.split(' ').any(|flag| flag == word);
    let claim = Claim {
        overwrite: flags("overwrite"),
        replace_check: ReplaceCheck::new(|_| Ok(())),
        restart: flags("restart"),
        resume: flags("resume"),
        sync: true,
        ..claim()
    };
    let plan = WorkPlan { fingerprint: Fingerprint([7; 32]), version: "1", about: &PlanDescription::default() };
    let out = Path::new(root).join("out");
    let staging = work(acquire::acquire(&out, shape, &claim, &plan, FAST, &Stop::default()).unwrap());
    write(&staging.folder().path().join("out"), "new");
    if flags("hang") {
        loop {
            std::thread::park();
        }
    }
    publish(&staging);
}

fn content(env: &TestEnv) -> Option<String> {
    let file = if env.shape == DestinationKind::File { env.out() } else { env.out().join("out") };
    fs::read_to_string(file).ok()
}

fn put_old(env: &TestEnv) {
    if env.shape == DestinationKind::Folder {
        fs::create_dir(env.out()).unwrap();
        write(&env.out().join("out"), "old");
    } else {
        write(&env.out(), "old");
    }
}

#[test]
fn killed_process_on_this_node_is_dead_immediately() {
    let mut env = TestEnv::new(DestinationKind::Folder);
    let mut child = env.in_child("hang", "");
    in_time(|| env.data().join("out").exists().then_some(()));
    env.claim.resume = true;
    env.refused(&["another run is writing", &child.id().to_string()]);
    child.kill().unwrap();
    // The process is a zombie until its parent waits for it. A zombie counts as dead.
    std::thread::sleep(Duration::from_millis(100));
    let begun = std::time::Instant::now();
    env.begin().unwrap();
    assert!(begun.elapsed() < FAST.dead_after);
    child.wait().unwrap();
}

/// A temporary folder beside the partial folder, from a process that was killed while it created a partial folder, is
/// deleted when another process ends.
#[test]
fn late_temporary_folder_is_swept_on_exit() {
    for (part, left) in [(Part { index: 1, of: 2 }, vec![".out.dtshard-partial".to_owned()]), (Part::alone(), vec![])] {
        let mut env = TestEnv::new(DestinationKind::Folder);
        env.claim.part = part;
        let staging = env.begin().unwrap();
        fs::create_dir_all(env.out().with_file_name(".out.dtshard-new-1f0c96a2b7d4").join("work-1f0c96a2b7d4"))
            .unwrap();
        drop(staging);
        assert_eq!(env.names(), left);
    }
}

/// After any kill, the destination contains the old or the new output, or the next run restores the old output; it
/// never contains a partial output. One more run cleans up everything.
#[test]
fn kill_at_every_fault_point_leaves_old_or_new_output() {
    for shape in [DestinationKind::Folder, DestinationKind::File] {
        for (what, is_there) in [("resume", false), ("resume overwrite", true), ("restart overwrite", true)] {
            for point in fault::POINTS {
                let mut env = TestEnv::new(shape);
                env.leave_behind(Part::alone());
                if is_there {
                    put_old(&env);
                }
                let ended = env.in_child(what, point).wait_with_output().unwrap();
                let was_hit = !ended.status.success();
                let at = format!("{shape:?} {what} {point}");
                let is_of_swaps = ["commit-cleared", "commit-moved-old"].contains(&point);
                let must_be_hit = point.starts_with("commit") && (is_there || !is_of_swaps);
                assert!(was_hit || !must_be_hit, "{at} was not come by");
                let found = content(&env);
                let old = is_there.then(|| "old".to_owned());
                let is_aside = found.is_none() && is_there && point == "commit-moved-old";
                assert!(found == old || found.as_deref() == Some("new") || is_aside, "{at}: {found:?}");

                // A run that must fail restores the output that an interrupted replacement had moved aside.
                if is_there {
                    env.refused(&[]);
                    assert!(content(&env).is_some(), "{at}");
                }
                env.claim = Claim { resume: true, overwrite: is_there, ..claim() };
                match env.begin_as(&env.claim) {
                    Ok(Beginning::Done) => {}
                    Ok(Beginning::Work(staging)) => {
                        write(&staging.folder().path().join("out"), "new");
                        publish(&staging);
                    }
                    Err(error) => says(&error, &["exists"]),
                }
                assert_eq!(content(&env).as_deref(), Some("new"), "{at}");
                let left = env.names().into_iter().filter(|name| !name.contains("-aside-")).collect::<Vec<_>>();
                assert_eq!(left, ["out"], "{at}");
            }
        }
    }
}
