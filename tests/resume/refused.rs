//! What is not gone on with: each is refused with what is the matter and what can be done, and nothing is lost.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::job::{CAST, DCP, FILE, FOLDER, Job, RANKS, names, skip};
use crate::outcome::Outcome;

type Change = fn(&Path);

/// What a run leaves that was killed behind its first record.
fn leave(job: &Job, more: &str) {
    job.clear();
    assert_eq!(job.run(more, Some("record-after")).signal, Some(9));
}

/// A refusal says this and changes nothing.
#[track_caller]
fn refuses(job: &Job, more: &str, words: &[&str]) {
    let before = names(&job.desk());
    job.run(more, Some("none")).refused(words);
    assert_eq!(names(&job.desk()), before, "{more}");
    job.source_is_whole(more);
}

#[test]
fn without_being_asked_to() {
    let job = Job::new(FOLDER);
    let words = [
        "an earlier run did not finish: ",
        "desk/.out.dtshard-partial is in the way",
        "hint: --resume goes on with what it has done, --restart throws it away and starts again",
    ];
    for left in ["", "--parts 3 --part 1 --no-wait"] {
        leave(&job, left);
        refuses(&job, "", &words);
        refuses(&job, "--overwrite", &words);
    }
    refuses(&job, "--resume --restart", &["cannot be used with"]);
    job.run("--resume", None).succeeded();
    job.is_done("went on");
}

#[test]
fn another_source_or_other_options() {
    let job = Job::new(FOLDER);
    leave(&job, "");
    let refuses_as = |job: &Job, more: &str, what: &str| {
        let message = format!("an earlier run did not finish: {}", job.partial().display());
        let what = format!("is in the way, and cannot be gone on with: {what}\n");
        let hint = "hint: --restart throws it away and starts again; --resume needs the same dtshard, SRC and options";
        refuses(job, more, &[&message, &what, hint]);
    };
    refuses_as(&job, "--resume --dtype bf16 --threads 1", "--dtype was not given, now bf16");
    refuses_as(&job, "--resume --exclude layers.03.weight", "--exclude was not given, now layers.03.weight");
    refuses_as(&job, "--resume --add-prefix model.", "--add-prefix was not given, now model.");
    refuses_as(&job, "--dtype bf16", "--dtype was not given, now bf16");
    let ranks = Job::new(RANKS);
    leave(&ranks, "");
    let placements = "--placements was R,S(1), now R,S(1) layers.03.weight=S(0),S(1)";
    refuses_as(&ranks, "--resume --placements layers.03.weight=S(0),S(1)", placements);

    // As it was, it goes on; changed in name only, it does not.
    let file = job.source().join("__1_0.distcp");
    let modified = fs::metadata(&file).unwrap().modified().unwrap();
    fs::File::open(&file).unwrap().set_modified(modified + Duration::from_secs(1)).unwrap();
    refuses_as(&job, "--resume", "__1_0.distcp has changed: same length, newer modification time");
    let mut content = fs::read(&file).unwrap();
    let middle = content.len() / 2;
    content[middle] ^= 1;
    fs::write(&file, &content).unwrap();
    job.run("--resume", None).refused(&["cannot be gone on with: __1_0.distcp has changed: same length, newer"]);
    fs::write(&file, [&content[..], &[0]].concat()).unwrap();
    job.run("--resume", None).refused(&["cannot be gone on with: __1_0.distcp was ", " bytes, now "]);
    content[middle] ^= 1;
    fs::write(&file, &content).unwrap();
    fs::File::open(&file).unwrap().set_modified(modified).unwrap();
    job.run("--resume", None).succeeded();
    job.is_done("as it was");
}

#[test]
fn another_version() {
    let job = Job::new(FILE);
    leave(&job, "");
    let plan = job.partial().join("plan.json");
    let text = fs::read_to_string(&plan).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    fs::write(&plan, text.replace(&format!("\"{version}\""), "\"0.0.7\"")).unwrap();
    refuses(&job, "--resume", &["cannot be gone on with: dtshard 0.0.7 made it, and this is ", version, "--restart"]);
    fs::write(&plan, &text).unwrap();
    job.run("--resume", None).succeeded();
    job.is_done("the same version");
}

/// Whatever stands where the partial folder would be: nothing but --restart takes it away.
#[test]
fn junk_in_the_place() {
    let job = Job::new(FILE);
    let words = ["is in the way, and has no plan to go on with", "hint: --restart throws it away"];
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
        refuses(&job, "--resume", &words);
        refuses(&job, "", &words);
        refuses(&job, "--parts 2 --part 0 --no-wait", &[words[0], "all parts start again"]);
        job.run("--restart", None).succeeded();
        job.is_done(what);
    }
    // A folder with nothing in it is nobody's work.
    job.clear();
    fs::create_dir(job.partial()).unwrap();
    job.run("", None).succeeded();
    job.is_done("an empty folder");
}

/// A run that has its lease, and goes no further.
fn start(job: &Job, more: &str) -> Child {
    let mut command = job.command(more, Some("none"));
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let begun = Instant::now();
    while !job.partial().exists() || job.of_partial(".lease").is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    child
}

#[test]
fn a_run_that_lives() {
    let job = Job::new(DCP);
    // It waits for part 1, which is not there.
    let mut first = start(&job, "--parts 2 --part 0");
    sleep(Duration::from_millis(200));
    let who = format!(", pid {}, part 0 of 2)", first.id());
    let words = ["another run is writing ", &who, "wait for it, or stop it first"];
    for resume in ["", "--resume", "--overwrite"] {
        refuses(&job, &format!("--parts 2 --part 0 {resume}"), &words);
        refuses(&job, &format!("--parts 3 --part 1 {resume}"), &words);
        refuses(&job, resume, &words);
        refuses(&job, &format!("--parts 2 --part 1 --dtype bf16 {resume}"), &words);
    }
    refuses(&job, "--restart", &words);
    // And none of that has disturbed it.
    job.run("--parts 2 --part 1", None).succeeded();
    assert!(first.wait().unwrap().success());
    job.is_done("two parts");
}

#[test]
fn restart_of_parts() {
    let job = Job::new(FILE);
    leave(&job, "--parts 2 --part 0 --no-wait");
    let words = ["--restart is for one process", "not for --parts", "hint: remove "];
    refuses(&job, "--parts 2 --part 0 --no-wait --restart", &words);
}

/// Without its mark nobody can tell what the destination was made from.
#[test]
fn a_destination_without_a_mark() {
    let job = Job::new(FILE);
    job.run("", None).succeeded();
    let removed = rustix::fs::removexattr(job.target(), "user.dtshard.plan");
    if removed.is_err() {
        skip("no attributes on this file system");
        return;
    }
    let words = [
        "out.pt exists, and nothing tells what it was made from",
        "`dtshard verify` says whether it is sound",
        "--overwrite",
    ];
    refuses(&job, "--resume", &words);
    refuses(&job, "--parts 2 --part 0 --no-wait", &words);
    job.run("--resume --overwrite", None).succeeded();
    job.is_done("again");
    job.run("--resume", None).succeeded().says(&["is there already"]);
    // Nor is it what another plan has made.
    job.run("--overwrite --exclude layers.01.weight", None).succeeded();
    let words = ["out.pt exists: it is finished, and of another source, or made with other options", "--overwrite"];
    refuses(&job, "--resume", &words);
}

#[test]
fn a_folder_that_cannot_be_written() {
    const NOBODY: u32 = 65534;
    let job = Job::new(FILE);
    let desk = job.desk();
    let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    set_mode(desk.parent().unwrap(), 0o755);
    set_mode(&desk, 0o555);
    // Root may write everywhere.
    let is_root = rustix::process::getuid().is_root();
    for more in ["", "--resume", "--parts 2 --part 1"] {
        let mut command = job.command(more, Some("none"));
        if is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        let Ok(ended) = command.output() else {
            return skip("another user cannot run the program");
        };
        Outcome::from(ended).refused(&["desk/.out.pt.dtshard-partial: Permission denied"]);
        assert!(names(&desk).is_empty());
        job.source_is_whole(more);
    }
    set_mode(&desk, 0o755);
}

/// A source that changes while it is read: what was read of it is no work to go on with, even where the change is undone.
#[test]
fn a_source_that_changes_meanwhile() {
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
                ended.refused(&["model.safetensors"]);
                assert!(!job.target().exists());
            }
        }
        job.run("--resume", Some("none")).succeeded();
        job.is_done(&format!("changed after {delay} half milliseconds"));
    }
    assert!(refused > 0, "{refused} refused, {done} done");
}
