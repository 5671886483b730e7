//! Tests of full file systems: the error names the file, nothing is published, and `--resume` completes the run when
//! there is space again. The tests mount file systems, so they run only as root and are skipped otherwise.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use dtshard::storage::filesystem::write_back;

use crate::job::{FILE, FOLDER, Job, Kind, names, skip};

/// The folder on which a file system is mounted. The file system is unmounted when the value is dropped.
struct Mount(PathBuf);

impl Mount {
    fn new(at: &Path, args: &[&str]) -> Option<Self> {
        succeeds(Command::new("mount").args(args).arg(at)).then(|| Self(at.to_path_buf()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        succeeds(Command::new("umount").arg(&self.0));
    }
}

fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// Fills the file system of a folder, and returns the path of the file that fills it.
fn fill(folder: &Path) -> PathBuf {
    let path = folder.join("filler");
    let mut file = fs::File::create(&path).unwrap();
    let mut len = 1 << 20;
    while len > 0 {
        match std::io::Write::write_all(&mut file, &vec![1; len]) {
            Ok(()) => {}
            Err(_) => len /= 2,
        }
    }
    path
}

#[test]
fn too_small_file_system_is_refused_before_writing() {
    let job = Job::new(FOLDER);
    let dst_folder = job.dst_folder();
    let Some(_mount) = Mount::new(&dst_folder, &["-t", "tmpfs", "-o", "size=1m", "none"]) else {
        return skip("cannot mount a tmpfs here");
    };
    let planned = job.run("--dry-run", None);
    planned.assert_succeeded().assert_mentions(&["a run would be refused: ", "are needed on the file system of"]);
    for more in ["", "--resume", "--parts 2 --part 0 --no-wait"] {
        job.run(more, None).assert_refused(&[
            "are needed on the file system of",
            "free",
            "hint: free space on that file system, or choose",
        ]);
        assert!(!job.target().exists());
        // No work was recorded, so no files remain for a later run.
        assert_eq!(names(&dst_folder), [""; 0], "{more}");
    }
}

/// Asserts that a run on a full file system fails and can be resumed. The file system is ext2, which cannot reserve
/// space, so the run finds that it is full only when it writes.
fn assert_resumes_after_full(kind: Kind) {
    let job = Job::new(kind);
    let dst_folder = job.dst_folder();
    let image = job.source().with_file_name("image");
    fs::File::create(&image).unwrap().set_len(24 << 20).unwrap();
    let made = succeeds(Command::new("mkfs.ext2").arg("-q").arg("-F").arg(&image));
    let mounted =
        made.then(|| Mount::new(&dst_folder, &["-t", "ext2", "-o", "loop", image.to_str().unwrap()])).flatten();
    let Some(mount) = mounted else {
        return skip("cannot mount an ext2 image here");
    };
    assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
    let filler = fill(&dst_folder);
    for more in ["--resume", "--resume --threads 1", "--resume --parts 2 --part 1 --no-wait"] {
        let ended = job.run(more, Some("none"));
        ended.assert_refused(&[".dtshard-partial/", "No space left on device", "hint: free space on that file system"]);
        assert!(!job.target().exists() && job.partial().exists(), "{more}");
        job.assert_source_unchanged(more);
    }
    fs::remove_file(filler).unwrap();
    job.run("--resume", Some("none")).assert_succeeded();
    let left: Vec<String> = names(&dst_folder).into_iter().filter(|name| name != "lost+found").collect();
    assert_eq!(left, [job.target().file_name().unwrap().to_str().unwrap()]);
    job.assert_result("with space again");
    drop(mount);
}

#[test]
fn file_system_full_during_a_file_is_resumed() {
    assert_resumes_after_full(FILE);
}

#[test]
fn file_system_full_during_a_folder_is_resumed() {
    assert_resumes_after_full(FOLDER);
}

/// If a disk error occurs after the page cache has taken the data, the kernel reports it only to the first fsync. Later
/// calls of fsync succeed.
#[test]
fn failed_write_back_is_an_error_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let (backing, at) = (folder.path().join("room"), folder.path().join("at"));
    fs::create_dir(&backing).unwrap();
    fs::create_dir(&at).unwrap();
    let backing_mount = Mount::new(&backing, &["-t", "tmpfs", "-o", "size=8m", "none"]);
    let image = backing.join("image");
    fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let made = succeeds(Command::new("mkfs.ext2").arg("-q").arg("-F").arg(&image));
    let args = ["-t", "ext2", "-o", "loop,errors=continue", image.to_str().unwrap()];
    let Some(_at) = backing_mount.as_ref().filter(|_| made).and_then(|_| Mount::new(&at, &args)) else {
        return skip("cannot mount an ext2 image in a tmpfs here");
    };
    let file = fs::File::create(at.join("file")).unwrap();
    file.write_all_at(&vec![1; 20 << 20], 0).unwrap();
    let error = (0..20).find_map(|block| write_back(&file, block << 20, 1 << 20).err());
    assert!(error.is_some(), "8 MB hold no 20 MB");
}
