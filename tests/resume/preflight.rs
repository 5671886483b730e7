//! Tests that `--dry-run` warns of the state of DST that a run would find, and changes no files.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value as Json;

use crate::job::{FILE, FOLDER, Job, names, skip, tree};

/// Asserts that a dry run prints a warning with all of `words`, that its JSON document has the warning, and that no
/// files change.
#[track_caller]
fn assert_warns(job: &Job, more: &str, words: &[&str]) {
    let before = (names(&job.dst_folder()), tree(&job.dst_folder()));
    let ended = job.run(&format!("{more} --dry-run"), None);
    ended.assert_succeeded();
    let document: Json =
        serde_json::from_str(&job.run(&format!("{more} --dry-run --json"), None).assert_succeeded().out).unwrap();
    let listed: Vec<&str> = document["warnings"].as_array().unwrap().iter().filter_map(Json::as_str).collect();
    if words.is_empty() {
        assert!(!ended.err.contains("warning: a run would"), "{more}: {ended:?}");
    }
    for word in words {
        assert!(ended.err.contains(&format!("warning: {}", words[0])) && ended.err.contains(word), "{word}: {ended:?}");
        assert!(listed.iter().any(|warning| warning.contains(word)), "{word}: {listed:?}");
    }
    assert!(before == (names(&job.dst_folder()), tree(&job.dst_folder())), "{more}: something has changed");
}

const REFUSED: &str = "a run would be refused: ";

#[test]
fn dry_run_warns_of_an_existing_destination() {
    for kind in [FILE, FOLDER] {
        let job = Job::new(kind);
        assert_warns(&job, "", &[]);
        assert!(names(&job.dst_folder()).is_empty());
        job.run("", None).assert_succeeded();
        assert_warns(&job, "", &[REFUSED, "exists; choose another destination, or replace it with --overwrite"]);
        assert_warns(&job, "--restart", &[REFUSED, "exists"]);
        assert_warns(&job, "--overwrite", &[]);
        assert_warns(&job, "--resume --exclude layers.01.weight", &[REFUSED, "exists"]);
        let is_marked = rustix::fs::lgetxattr(job.target(), "user.dtshard.plan", &mut [0_u8; 64][..]).is_ok();
        if is_marked {
            let target = job.target();
            let is_there = [target.to_str().unwrap(), "exists already, made from the same SRC"];
            assert_warns(&job, "--resume", &is_there);
            // A process that is killed just after it has published leaves the partial folder.
            job.clear();
            assert_eq!(job.run("--resume", Some("commit-renamed")).signal, Some(9));
            assert!(job.partial().exists());
            assert_warns(&job, "--resume", &is_there);
        }
        job.clear();
        if kind == FILE {
            fs::create_dir(job.target()).unwrap();
            assert_warns(&job, "", &[REFUSED, "is a folder, but the output is one file"]);
        } else {
            fs::write(job.target(), "mine").unwrap();
            assert_warns(&job, "--overwrite", &[REFUSED, "is not a checkpoint, so --overwrite does not replace it"]);
        }
    }
}

#[test]
fn dry_run_warns_of_an_interrupted_run() {
    let job = Job::new(FOLDER);
    for left in ["--resume", "--parts 3 --part 1 --no-wait"] {
        job.clear();
        assert_eq!(job.run(left, Some("record-after")).signal, Some(9));
        let hint = "use --resume to continue it, or use --restart to delete it and start again";
        assert_warns(&job, "", &[REFUSED, "an earlier run did not finish: ", hint]);
        assert_warns(&job, "--resume --dtype bf16", &[REFUSED, "--dtype was not given, now bf16"]);
        assert_warns(&job, "--resume", &["a run would continue the unfinished work on "]);
        assert_warns(&job, "--restart", &[]);
        // Another part of the same run joins the work. With another number of parts, only `--resume` continues the
        // work.
        let sibling = if left == "--resume" { REFUSED } else { "a run would continue the unfinished work on " };
        assert_warns(&job, "--parts 3 --part 0", &[sibling]);
    }
    job.clear();
    fs::write(job.partial(), "mine").unwrap();
    assert_warns(&job, "--resume", &[REFUSED, "has no valid plan"]);
    assert_warns(&job, "--restart", &[]);
}

#[test]
fn dry_run_warns_of_an_active_run() {
    let job = Job::new(FILE);
    let mut command = job.command("--parts 2 --part 0", Some("none"));
    let mut first = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    while !job.partial().exists() || job.files_in_partial(".lease").is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    for more in ["", "--resume", "--restart", "--dtype bf16"] {
        let ended = job.run(&format!("{more} --dry-run"), None);
        ended.assert_succeeded().assert_mentions(&[
            REFUSED,
            "another run is writing ",
            &format!(", pid {}, part 0 of 2)", first.id()),
        ]);
    }
    job.run("--parts 2 --part 1 --dry-run -v", None)
        .assert_succeeded()
        .assert_mentions(&["a run would continue the unfinished work"]);
    job.run("--parts 2 --part 1", Some("none")).assert_succeeded();
    assert!(first.wait().unwrap().success());
    job.assert_done("undisturbed");
}

/// A dry run cannot find out immediately whether a process on another node is alive.
#[test]
fn dry_run_warns_of_a_run_on_another_node() {
    let job = Job::new(FILE);
    assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
    let lease = &job.files_in_partial(".lease")[0];
    let mut record: Json = serde_json::from_slice(&fs::read(lease).unwrap()).unwrap();
    record["host"] = "n2".into();
    record["boot"] = "another".into();
    fs::write(lease, serde_json::to_vec(&record).unwrap()).unwrap();
    for more in ["", "--resume", "--restart"] {
        assert_warns(
            &job,
            more,
            &[
                REFUSED,
                "a run on another node may be working in it",
                "use --resume to continue it if no process works in it",
            ],
        );
    }
}

#[test]
fn dry_run_warns_of_a_folder_without_permission() {
    const NOBODY: u32 = 65534;
    let job = Job::new(FILE);
    // If parent folders of DST are missing, the nearest existing parent folder is checked.
    let (source, file) = (job.source(), job.dst_folder().join("file"));
    let dry = |target: &Path| {
        let args: [&dyn AsRef<std::ffi::OsStr>; 4] = [&"unshard", &source, &target, &"--dry-run"];
        crate::outcome::command(&args)
    };
    let run = |mut command: std::process::Command| crate::outcome::Outcome::from(command.output().unwrap());
    let deep = run(dry(&job.dst_folder().join("deep/er/out.pt")));
    assert!(!deep.assert_succeeded().err.contains("refused"), "{deep:?}");
    fs::write(&file, "mine").unwrap();
    run(dry(&file.join("out.pt"))).assert_succeeded().assert_mentions(&[REFUSED, "Not a directory"]);
    run(dry(&source.join("out.pt"))).assert_succeeded().assert_mentions(&[REFUSED, "is inside the source"]);
    if !rustix::process::getuid().is_root() {
        return skip("another user cannot be had");
    }
    let above = job.dst_folder().parent().unwrap().to_path_buf();
    fs::set_permissions(above, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = dry(&job.target());
    std::os::unix::process::CommandExt::uid(&mut command, NOBODY);
    run(command).assert_succeeded().assert_mentions(&[REFUSED, "cannot write in ", "Permission denied"]);
}
