//! Tests of work that cannot be resumed: each case is refused with the reason and a hint, and no work is lost.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::job::{CAST, DCP, FILE, FOLDER, Job, RANKS, names, skip};
use crate::outcome::{Outcome, fixture};

type Change = fn(&Path);

/// Starts a run that is killed after its first record, so that its files remain.
fn interrupt(job: &Job, more: &str) {
    job.clear();
    assert_eq!(job.run(more, Some("record-after")).signal, Some(9));
}

/// Asserts that a run is refused with an error that contains all of `words`, and that no files change.
#[track_caller]
fn assert_refused(job: &Job, more: &str, words: &[&str]) {
    let before = names(&job.dst_folder());
    job.run(more, Some("none")).assert_refused(words);
    assert_eq!(names(&job.dst_folder()), before, "{more}");
    job.assert_source_unchanged(more);
}

#[test]
fn interrupted_run_is_refused_without_resume() {
    let job = Job::new(FOLDER);
    let words = [
        "an earlier run did not finish: ",
        "results/.out.dtshard-partial exists",
        "hint: use --resume to continue it, or use --restart to delete it and start again",
    ];
    for left in ["", "--parts 3 --part 1 --no-wait"] {
        interrupt(&job, left);
        assert_refused(&job, "", &words);
        assert_refused(&job, "--overwrite", &words);
    }
    assert_refused(&job, "--resume --restart", &["cannot be used with"]);
    job.run("--resume", None).assert_succeeded();
    job.assert_done("went on");
}

/// Computed files, such as those of decoded weights, are no files of the source.
#[test]
fn resume_of_a_run_that_decodes_weights_to_another_dtype_is_refused() {
    let job = Job::new(FOLDER);
    fs::remove_dir_all(job.source()).unwrap();
    fs::create_dir(job.source()).unwrap();
    for name in ["model.safetensors", "config.json"] {
        fs::copy(fixture(&format!("quantized/fp8/{name}")), job.source().join(name)).unwrap();
    }
    interrupt(&job, "--dequantize bf16");
    let refused = job.run("--resume --dequantize f32", None);
    refused.assert_refused(&["exists, and cannot be resumed: --dequantize was bf16, now f32\n"]);
    job.run("--resume --dequantize bf16", None).assert_succeeded();
}

#[test]
fn resume_with_another_source_or_options_is_refused() {
    let job = Job::new(FOLDER);
    interrupt(&job, "");
    let assert_resume_refused = |job: &Job, more: &str, what: &str| {
        let message = format!("an earlier run did not finish: {}", job.partial().display());
        let what = format!("exists, and cannot be resumed: {what}\n");
        let hint = "hint: use --restart to delete it and start again; --resume needs the same dtshard, SRC and options";
        assert_refused(job, more, &[&message, &what, hint]);
    };
    assert_resume_refused(&job, "--resume --dtype bf16 --threads 1", "--dtype was not given, now bf16");
    assert_resume_refused(&job, "--resume --exclude layers.03.weight", "--exclude was not given, now layers.03.weight");
    assert_resume_refused(&job, "--resume --add-prefix model.", "--add-prefix was not given, now model.");
    assert_resume_refused(&job, "--dtype bf16", "--dtype was not given, now bf16");
    let ranks = Job::new(RANKS);
    interrupt(&ranks, "");
    let placements = "--placements was R,S(1), now R,S(1) layers.03.weight=S(0),S(1)";
    assert_resume_refused(&ranks, "--resume --placements layers.03.weight=S(0),S(1)", placements);

    // The run is refused if a file of the source has changed, and is resumed if the file is the original one again.
    let file = job.source().join("__1_0.distcp");
    let modified = fs::metadata(&file).unwrap().modified().unwrap();
    fs::File::open(&file).unwrap().set_modified(modified + Duration::from_secs(1)).unwrap();
    assert_resume_refused(&job, "--resume", "__1_0.distcp has changed: same length, newer modification time");
    let mut content = fs::read(&file).unwrap();
    let middle = content.len() / 2;
    content[middle] ^= 1;
    fs::write(&file, &content).unwrap();
    job.run("--resume", None).assert_refused(&["cannot be resumed: __1_0.distcp has changed: same length, newer"]);
    fs::write(&file, [&content[..], &[0]].concat()).unwrap();
    job.run("--resume", None).assert_refused(&["cannot be resumed: __1_0.distcp was ", " bytes, now "]);
    content[middle] ^= 1;
    fs::write(&file, &content).unwrap();
    fs::File::open(&file).unwrap().set_modified(modified).unwrap();
    job.run("--resume", None).assert_succeeded();
    job.assert_done("as it was");
}

#[test]
fn resume_of_another_version_is_refused() {
    let job = Job::new(FILE);
    interrupt(&job, "");
    let plan = job.partial().join("plan.json");
    let text = fs::read_to_string(&plan).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    fs::write(&plan, text.replace(&format!("\"{version}\""), "\"0.0.7\"")).unwrap();
    assert_refused(
        &job,
        "--resume",
        &["cannot be resumed: dtshard 0.0.7 wrote it, but this is ", version, "--restart"],
    );
    fs::write(&plan, &text).unwrap();
    job.run("--resume", None).assert_succeeded();
    job.assert_done("the same version");
}

/// If a file or folder of another origin is at the path of the partial folder, only `--restart` removes it.
#[test]
fn foreign_partial_folder_is_refused_without_restart() {
    let job = Job::new(FILE);
    let words = ["exists, and cannot be resumed: it has no valid plan", "hint: use --restart to delete it"];
    let cases: [(&str, Change); 4] = [
        ("a file", |partial| fs::write(partial, "mine").unwrap()),
        ("a folder", |partial| {
            fs::create_dir(partial).unwrap();
            fs::write(partial.join("notes"), "mine").unwrap();
        }),
        ("no plan", |partial| {
            fs::create_dir_all(partial.join("data")).unwrap();
            fs::write(partial.join("plan.json"), "{").unwrap();
        }),
        ("a flat one", |partial| {
            fs::create_dir(partial).unwrap();
            fs::write(partial.join(".lock"), "").unwrap();
            fs::write(partial.join("out.pt"), "half").unwrap();
        }),
    ];
    for (what, make) in cases {
        job.clear();
        make(&job.partial());
        assert_refused(&job, "--resume", &words);
        assert_refused(&job, "", &words);
        assert_refused(&job, "--parts 2 --part 0 --no-wait", &[words[0], "start all parts again"]);
        job.run("--restart", None).assert_succeeded();
        job.assert_done(what);
    }
    // An empty folder does not count as the work of a run, so it needs no `--restart`.
    job.clear();
    fs::create_dir(job.partial()).unwrap();
    job.run("", None).assert_succeeded();
    job.assert_done("an empty folder");
}

/// Starts a run, and waits until its lease exists.
fn start(job: &Job, more: &str) -> Child {
    let mut command = job.command(more, Some("none"));
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    while !job.partial().exists() || job.files_in_partial(".lease").is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    child
}

#[test]
fn active_run_is_refused() {
    let job = Job::new(DCP);
    // The first run waits for part 1, which has not started.
    let mut first = start(&job, "--parts 2 --part 0");
    sleep(Duration::from_millis(200));
    let who = format!(", pid {}, part 0 of 2)", first.id());
    let words = ["another run is writing ", &who, "wait until that run ends, or stop it"];
    for resume in ["", "--resume", "--overwrite"] {
        assert_refused(&job, &format!("--parts 2 --part 0 {resume}"), &words);
        assert_refused(&job, &format!("--parts 3 --part 1 {resume}"), &words);
        assert_refused(&job, resume, &words);
        assert_refused(&job, &format!("--parts 2 --part 1 --dtype bf16 {resume}"), &words);
    }
    assert_refused(&job, "--restart", &words);
    // The first run was not disturbed by the runs that were refused.
    job.run("--parts 2 --part 1", None).assert_succeeded();
    assert!(first.wait().unwrap().success());
    job.assert_done("two parts");
}

#[test]
fn restart_of_parts_is_refused() {
    let job = Job::new(FILE);
    interrupt(&job, "--parts 2 --part 0 --no-wait");
    let words = ["--restart cannot be used with --parts", "unless a launcher starts all processes", "hint: remove "];
    assert_refused(&job, "--parts 2 --part 0 --no-wait --restart", &words);
}

/// An extended attribute of DST records its source and options (the plan mark). Here it is missing.
#[test]
fn destination_without_a_plan_mark_is_refused() {
    let job = Job::new(FILE);
    job.run("", None).assert_succeeded();
    let removed = rustix::fs::removexattr(job.target(), "user.dtshard.plan");
    if removed.is_err() {
        skip("no attributes on this file system");
        return;
    }
    let words =
        ["out.pt exists, but does not record what it was made from", "check it with `dtshard verify`", "--overwrite"];
    assert_refused(&job, "--resume", &words);
    assert_refused(&job, "--parts 2 --part 0 --no-wait", &words);
    job.run("--resume --overwrite", None).assert_succeeded();
    job.assert_done("again");
    job.run("--resume", None).assert_succeeded().assert_mentions(&["exists already"]);
    // A destination whose mark records other options is refused as well.
    job.run("--overwrite --exclude layers.01.weight", None).assert_succeeded();
    let words =
        ["out.pt exists and is complete, but was made from another source or with other options", "--overwrite"];
    assert_refused(&job, "--resume", &words);
}

#[test]
fn folder_without_permission_is_refused() {
    const NOBODY: u32 = 65534;
    let job = Job::new(FILE);
    let dst_folder = job.dst_folder();
    let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    set_mode(dst_folder.parent().unwrap(), 0o755);
    set_mode(&dst_folder, 0o555);
    // Root can write despite permissions, so the test runs the program as another user.
    let is_root = rustix::process::getuid().is_root();
    for more in ["", "--resume", "--parts 2 --part 1"] {
        let mut command = job.command(more, Some("none"));
        if is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        let Ok(ended) = command.output() else {
            return skip("another user cannot run the program");
        };
        Outcome::from(ended).assert_refused(&["results/.out.pt.dtshard-partial: Permission denied"]);
        assert!(names(&dst_folder).is_empty());
        job.assert_source_unchanged(more);
    }
    set_mode(&dst_folder, 0o755);
}

/// If the source changes during a run, the output of that run is not resumed, even if the change is undone.
#[test]
fn work_from_a_source_that_changes_is_not_resumed() {
    let job = Job::new(CAST);
    let file = job.source().join("model.safetensors");
    let modified = fs::metadata(&file).unwrap().modified().unwrap();
    let content = fs::read(&file).unwrap();
    let mut other = content.clone();
    other.iter_mut().skip(4096).for_each(|byte| *byte ^= 0x11);
    let (mut refused, mut done) = (0, 0);
    for delay in 0..24 {
        job.clear();
        let child = job.command("--resume --threads 1 --io read", Some("none")).spawn().unwrap();
        let begun = Instant::now();
        while !job.partial().exists() && begun.elapsed() < Duration::from_secs(5) {}
        sleep(Duration::from_micros(500 * delay));
        fs::write(&file, &other).unwrap();
        let ended: Outcome = child.wait_with_output().unwrap().into();
        fs::write(&file, &content).unwrap();
        fs::File::open(&file).unwrap().set_modified(modified).unwrap();
        match ended.code {
            Some(0) => done += 1,
            _ => {
                refused += 1;
                ended.assert_refused(&["model.safetensors"]);
                assert!(!job.target().exists());
            }
        }
        job.run("--resume", Some("none")).assert_succeeded();
        job.assert_done(&format!("changed after {delay} half milliseconds"));
    }
    assert!(refused > 0, "{refused} refused, {done} done");
}
