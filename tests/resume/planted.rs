//! Tests of files that another user plants beside a destination, or in a work folder that a group can write to. Planted
//! links, pipes and hard links are not followed, and the files of the other user are not used and not deleted.
//!
//! The tests run as root and start processes of other users. Otherwise they are skipped, except for a test of links of
//! the same user.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::job::{FILE, FOLDER, Job, Kind, RANKS, Tree, names, skip, tree};
use crate::outcome::Outcome;

/// The id of the user who plants files. Every system has a name for this id.
const ATTACKER: u32 = 65534;
const USER: u32 = 21002;
const GROUP: u32 = 21000;

/// The options of the runs that are started after files were planted.
const RUNS: [&str; 5] = ["", "--overwrite", "--resume", "--restart", "--parts 2 --part 0 --no-wait"];

/// A conversion whose destination is in a folder that two users can write to. The folder `victim` has files of the
/// first user; runs must not change them.
struct Shared {
    job: Job,
    victim: PathBuf,
    before: Tree,
    mode: u32,
}

impl Shared {
    /// Creates the folders. Prints the reason and returns `None` if the test cannot start processes of other users.
    fn new(kind: Kind, mode: u32) -> Option<Self> {
        let job = Job::new(kind);
        let root = job.dst_folder().parent().unwrap().to_path_buf();
        let victim = root.join("victim");
        fs::create_dir_all(victim.join("0123456789abcdef/results")).unwrap();
        for name in ["thesis.tex", "0123456789abcdef/results/table", "0123456789abcdef.json"] {
            fs::write(victim.join(name), format!("{name} is of great value")).unwrap();
        }
        let before = tree(&victim);
        let shared = Self { job, victim, before, mode };
        if !rustix::process::geteuid().is_root() {
            skip("needs to be root, to be two users");
            return None;
        }
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
        give(&shared.victim);
        shared.clear();
        let plain = shared.job.command("", None);
        let version = as_user(USER, plain.get_program(), &["--version".as_ref()]).output();
        if !version.is_ok_and(|output| output.status.success()) {
            skip("no setpriv here, or other users cannot reach what was built");
            return None;
        }
        Some(shared)
    }

    fn clear(&self) {
        self.job.clear();
        chown(self.job.dst_folder(), Some(0), Some(GROUP)).unwrap();
        fs::set_permissions(self.job.dst_folder(), fs::Permissions::from_mode(self.mode)).unwrap();
    }

    fn command(&self, user: u32, more: &str, fault: &str) -> Command {
        let plain = self.job.command(more, None);
        let mut command = as_user(user, plain.get_program(), &plain.get_args().collect::<Vec<_>>());
        command.env("DTSHARD_FAULT", fault);
        command
    }

    fn run(&self, user: u32, more: &str) -> Outcome {
        self.command(user, more, "none").output().unwrap().into()
    }

    /// Runs the conversion as a user. The run is killed after its first record, so its files remain.
    fn interrupt(&self, user: u32) {
        self.clear();
        let killed: Outcome = self.command(user, "", "record-after").output().unwrap().into();
        assert!(killed.signal == Some(9) || killed.code == Some(137), "{killed:?}");
    }

    fn beside(&self, what: &str) -> PathBuf {
        self.job.dst_folder().join(format!(".{}.dtshard-{what}", self.job.target().file_name().unwrap().display()))
    }

    /// Asserts that a run writes the expected bytes or is refused, and that the files in `victim` are unchanged.
    #[track_caller]
    fn assert_victim_unchanged(&self, more: &str, what: &str) -> Outcome {
        let outcome = self.run(USER, more);
        assert!(tree(&self.victim) == self.before, "{what} {more}: {outcome:?}");
        assert_eq!(names(&self.victim).len(), 3, "{what} {more}: {outcome:?}");
        match outcome.code {
            Some(0) if !more.contains("--parts") => assert!(self.has_expected_result(), "{what} {more}: {outcome:?}"),
            Some(0) => {}
            _ => {
                outcome.assert_refused(&[]);
            }
        }
        outcome
    }

    fn has_expected_result(&self) -> bool {
        tree(&self.job.target()) == self.job.expected
    }
}

/// Makes `USER` the owner of a path and of everything below it, and makes all of it writable for the group.
fn give(path: &Path) {
    let metadata = path.symlink_metadata().unwrap();
    chown(path, Some(USER), Some(GROUP)).unwrap();
    let mode = if metadata.is_dir() { 0o775 } else { 0o664 };
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    if metadata.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| give(&entry.unwrap().path()));
    }
}

/// Returns a command that runs `program` as a user. Files that the program creates are writable for the group. The
/// program is killed after 100 seconds, because it might wait for a pipe.
fn as_user(user: u32, program: &OsStr, args: &[&OsStr]) -> Command {
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={user}"), format!("--regid={GROUP}"), "--clear-groups".into()]);
    command.args(["sh", "-c", "umask 002; exec timeout -s KILL 100 \"$0\" \"$@\""]).arg(program).args(args);
    command.current_dir("/").env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a command as the attacker, and asserts that it succeeds, so that the attack needs no further rights.
fn attack(program: &str, args: &[&dyn AsRef<OsStr>]) {
    let args: Vec<&OsStr> = args.iter().map(|arg| (*arg).as_ref()).collect();
    let done = as_user(ATTACKER, program.as_ref(), &args).output().unwrap();
    assert!(done.status.success(), "{program} {args:?}: {done:?}");
}

fn link(target: &Path, at: &Path) {
    attack("ln", &[&"-s", &target, &at]);
}

/// A function that plants a file, link or pipe at the first path. The second path is the victim's file or folder: a
/// planted link leads to it, and a planted file is a copy of it.
type Plant = fn(&Path, &Path);

const PLANTS: [(&str, Plant); 4] = [
    ("a link", |at, victim| link(victim, at)),
    ("a second name", |at, victim| attack("ln", &[&victim, &at])),
    ("a pipe", |at, _| attack("mkfifo", &[&"-m", &"666", &at])),
    ("a file of another user", |at, victim| attack("cp", &[&victim, &at])),
];

#[test]
fn own_link_beside_the_destination_is_refused() {
    let job = Job::new(FILE);
    let victim = job.dst_folder().join("victim");
    for what in ["partial", "work"] {
        job.clear();
        fs::create_dir(&victim).unwrap();
        fs::write(victim.join("thesis.tex"), "of great value").unwrap();
        let at = job.dst_folder().join(format!(".out.pt.dtshard-{what}"));
        symlink(&victim, &at).unwrap();
        let more = if what == "work" { " --source per-rank --part 0 --parts 2" } else { "" };
        for run in ["", "--resume", "--restart", "--overwrite"] {
            let outcome = job.run(&format!("{run}{more}"), None);
            outcome.assert_refused(&[at.to_str().unwrap(), victim.to_str().unwrap()]);
            assert_eq!(names(&victim), ["thesis.tex"], "{what} {run}");
        }
        assert!(at.is_symlink() && names(&job.dst_folder()).len() == 2);
    }
}

#[test]
fn links_of_another_user_beside_the_destination_are_not_followed() {
    for (kind, mode) in [(FOLDER, 0o775), (FILE, 0o1777)] {
        let Some(shared) = Shared::new(kind, mode) else { return };
        for what in ["partial", "old", "work", "new-0123456789ab", "gone-0123456789ab", "aside-0123456789ab"] {
            let [file, nowhere] = [shared.victim.join("thesis.tex"), PathBuf::from("/nowhere")];
            let most: [(PathBuf, &[&str]); 3] =
                [(shared.victim.clone(), &RUNS), (file, &["--restart"]), (nowhere, &["--restart"])];
            for (target, runs) in most {
                for run in runs {
                    shared.clear();
                    let at = shared.beside(what);
                    link(&target, &at);
                    let outcome = shared.assert_victim_unchanged(run, what);
                    let is_refused = matches!(what, "partial" | "old");
                    assert_eq!(outcome.code, Some(if is_refused { 2 } else { 0 }), "{what} {run}: {outcome:?}");
                    if is_refused {
                        outcome.assert_refused(&[at.to_str().unwrap(), target.to_str().unwrap()]);
                    }
                    assert_eq!(fs::read_link(&at).unwrap(), target, "{what} {run}");
                }
            }
        }
    }
}

/// The destination exists, so that `--overwrite` must replace it while there are planted links.
#[test]
fn links_of_another_user_are_not_followed_by_overwrite() {
    let Some(shared) = Shared::new(FOLDER, 0o775) else { return };
    for what in ["old", "gone-0123456789ab"] {
        shared.clear();
        shared.run(USER, "--exclude layers.00.weight").assert_succeeded();
        link(&shared.victim, &shared.beside(what));
        let outcome = shared.assert_victim_unchanged("--overwrite", what);
        assert_eq!(outcome.code, Some(if what == "old" { 2 } else { 0 }), "{outcome:?}");
    }
}

#[test]
fn planted_files_in_the_rendezvous_folder_are_refused() {
    let Some(shared) = Shared::new(RANKS, 0o775) else { return };
    let together = |what: &str| {
        let start = |part: u32| {
            let more = format!("--source per-rank --part {part} --parts 2");
            shared.command(USER, &more, "none").spawn().unwrap()
        };
        let outcomes: Vec<Outcome> = [start(0), start(1)].map(|child| child.wait_with_output().unwrap().into()).into();
        assert!(tree(&shared.victim) == shared.before && names(&shared.victim).len() == 3, "{what}: {outcomes:?}");
        outcomes
    };
    let place = shared.beside("work");
    for mode in [0o775, 0o1777] {
        shared.clear();
        fs::set_permissions(shared.job.dst_folder(), fs::Permissions::from_mode(mode)).unwrap();
        link(&shared.victim, &place);
        for outcome in together("a link") {
            outcome.assert_refused(&[place.to_str().unwrap(), shared.victim.to_str().unwrap()]);
        }
        attack("rm", &[&place]);
        attack("mkdir", &[&"-m", &"777", &place]);
        for outcome in together("a folder") {
            outcome.assert_refused(&[place.to_str().unwrap(), "nobody"]);
        }
        assert!(names(&place).is_empty());
    }
    // Here the work folder belongs to the user, and the group can write to it.
    shared.clear();
    fs::create_dir(&place).unwrap();
    give(&place);
    for name in ["0123456789abcdef", "run-0123456789abcdef"] {
        link(&shared.victim.join("0123456789abcdef"), &place.join(name));
    }
    for outcome in together("links within") {
        outcome.assert_succeeded();
    }
    assert!(shared.has_expected_result() && place.join("0123456789abcdef").is_symlink());
    // The links have names that the run itself uses in the work folder.
    let run = format!("run-{}", &blake3::hash(b"2 ").to_hex()[..16]);
    for name in ["copy", run.as_str()] {
        shared.clear();
        fs::create_dir(&place).unwrap();
        give(&place);
        link(&shared.victim, &place.join(name));
        for outcome in together(name) {
            outcome.assert_refused(&[place.join(name).to_str().unwrap(), shared.victim.to_str().unwrap()]);
        }
    }
}

#[test]
fn planted_files_in_a_work_folder_are_refused() {
    let all = ["--resume", "--resume --verify", "--overwrite", "--restart"];
    for (kind, runs) in [(FILE, &all[..]), (FOLDER, &all[..1])] {
        let Some(shared) = Shared::new(kind, 0o775) else { return };
        let file = shared.victim.join("thesis.tex");
        let folder = shared.victim.join("0123456789abcdef");
        let places = |job: &Job| {
            let work = job.work();
            let data = work.join("data");
            let first = files_in(&data).remove(0);
            let files = [job.partial().join("plan.json"), first, job.partial().join("about.json")];
            let recorded = [job.files_in_partial(".lease").remove(0), job.files_in_partial(".journal").remove(0)];
            (files.into_iter().chain(recorded).collect::<Vec<_>>(), [data, work])
        };
        shared.interrupt(USER);
        let count = places(&shared.job).0.len();
        for number in 0..count {
            for (what, plant) in PLANTS {
                for run in runs {
                    shared.interrupt(USER);
                    let at = places(&shared.job).0.swap_remove(number);
                    attack("rm", &[&at]);
                    plant(&at, &file);
                    shared.assert_victim_unchanged(run, &format!("{what} at {}", at.display()));
                }
            }
        }
        for number in 0..2 {
            for run in RUNS {
                shared.interrupt(USER);
                let at = places(&shared.job).1[number].clone();
                attack("mv", &[&at, &at.with_file_name("taken")]);
                link(&folder, &at);
                shared.assert_victim_unchanged(run, &format!("a link at {}", at.display()));
            }
        }
    }
}

/// Files of another user and hard links are not published: neither as additional files nor in place of a file of the
/// result.
#[test]
fn planted_files_in_a_result_are_not_published() {
    for (kind, finished) in [(FOLDER, true), (FOLDER, false), (FILE, true)] {
        let Some(shared) = Shared::new(kind, 0o775) else { return };
        for (what, plant) in PLANTS {
            for run in ["--resume", "--resume --verify"] {
                shared.interrupt(USER);
                let data = shared.job.work().join("data");
                // The planted file has a name that the result does not have, or the name of a file that is recorded as
                // done.
                let at = if finished { data.join("planted") } else { files_in(&data).remove(0) };
                attack("rm", &[&"-f", &at]);
                plant(&at, &shared.victim.join("thesis.tex"));
                let outcome = shared.assert_victim_unchanged(run, what);
                if finished {
                    outcome.assert_refused(&["planted"]);
                    assert!(!shared.job.target().exists(), "{what} {run}");
                }
            }
        }
    }
}

/// Returns every file below a folder.
fn files_in(folder: &Path) -> Vec<PathBuf> {
    tree(folder).into_keys().map(|name| folder.join(name)).collect()
}

/// A run does not resume or discard work of another user, and does not wait for it. The error names the owner.
#[test]
fn interrupted_work_of_another_user_is_refused() {
    for (kind, mode) in [(FOLDER, 0o775), (FILE, 0o1777)] {
        let Some(shared) = Shared::new(kind, mode) else { return };
        shared.interrupt(ATTACKER);
        let left = tree(&shared.job.partial());
        for run in RUNS {
            shared
                .assert_victim_unchanged(run, "dead")
                .assert_refused(&[shared.job.partial().to_str().unwrap(), "nobody"]);
            assert!(tree(&shared.job.partial()) == left, "{run}");
        }
        shared.run(ATTACKER, "--resume").assert_succeeded();
        assert!(shared.has_expected_result());
        // The partial folder belongs to this user, but a lease in it belongs to another user.
        shared.interrupt(USER);
        let lease = shared.job.partial().join("part-0-of-1.1.lease");
        fs::copy(&shared.job.files_in_partial(".lease")[0], &lease).unwrap();
        chown(&lease, Some(ATTACKER), Some(GROUP)).unwrap();
        for run in RUNS {
            shared.assert_victim_unchanged(run, "a lease").assert_refused(&[lease.to_str().unwrap(), "nobody"]);
        }
    }
}

#[test]
fn active_work_of_another_user_is_refused() {
    let Some(shared) = Shared::new(FOLDER, 0o775) else { return };
    // The run waits for part 1, which has not started.
    let live = shared.command(ATTACKER, "--parts 2 --part 0", "none").spawn().unwrap();
    while !shared.job.partial().exists() || shared.job.files_in_partial(".lease").is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    for run in RUNS.into_iter().chain(["--parts 2 --part 1"]) {
        shared
            .assert_victim_unchanged(run, "alive")
            .assert_refused(&[shared.job.partial().to_str().unwrap(), "nobody"]);
    }
    shared.run(ATTACKER, "--parts 2 --part 1").assert_succeeded();
    assert!(live.wait_with_output().unwrap().status.success());
    assert!(shared.has_expected_result());
}

/// A mount shows the same owner for all files, and this owner is not the user of the process. The run still resumes its
/// own work.
#[test]
fn mount_that_maps_owners_resumes_own_work() {
    struct Mount(PathBuf);
    impl Drop for Mount {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(&self.0).status();
        }
    }
    let Some(shared) = Shared::new(FOLDER, 0o775) else { return };
    let back = shared.job.dst_folder().with_file_name("back");
    fs::create_dir(&back).unwrap();
    let options = ["--force-user=nobody", "--force-group=21000", "--perms=ug+rwX", "--multithreaded"];
    let mounted = Command::new("bindfs").args(options).arg(&back).arg(shared.job.dst_folder()).output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        return skip("no bindfs here");
    }
    let _mount = Mount(shared.job.dst_folder());
    let clear = || {
        for name in names(&back) {
            let _ = fs::remove_dir_all(back.join(&name)).or_else(|_| fs::remove_file(back.join(&name)));
        }
    };
    let leave = || {
        clear();
        let killed: Outcome = shared.command(USER, "", "record-after").output().unwrap().into();
        assert!(shared.job.partial().exists(), "{killed:?}");
    };
    for run in ["--resume", "--restart"] {
        leave();
        shared.run(USER, run).assert_succeeded();
        assert!(shared.has_expected_result() && names(&back) == ["out"], "{run}");
        shared.run(USER, "--overwrite").assert_succeeded();
    }
    for what in ["partial", "old", "work", "gone-0123456789ab"] {
        for run in RUNS {
            clear();
            symlink(&shared.victim, back.join(format!(".out.dtshard-{what}"))).unwrap();
            shared.assert_victim_unchanged(run, what);
        }
    }
    for (what, plant) in PLANTS {
        leave();
        let at = files_in(&shared.job.work().join("data")).remove(0);
        let behind = back.join(at.strip_prefix(shared.job.dst_folder()).unwrap());
        fs::remove_file(&behind).unwrap();
        // On this mount all files have the same owner, so a copy that another user made cannot be distinguished from
        // the original.
        if what != "a file of another user" {
            plant(&behind, &shared.victim.join("thesis.tex"));
        }
        shared.assert_victim_unchanged("--resume", what);
    }
}
