//! File systems that run full: the error names the file, nothing is published, and with space there again `--resume`
//! goes on. Needs to mount, so elsewhere than as root it is skipped.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use dtshard::storage::filesystem::write_back;

use crate::job::{FILE, FOLDER, Job, Kind, names, skip};

/// A file system of its own over a folder, as long as it lives.
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

/// As many bytes as there are.
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
fn too_small_from_the_start() {
    let job = Job::new(FOLDER);
    let desk = job.desk();
    let Some(_mount) = Mount::new(&desk, &["-t", "tmpfs", "-o", "size=1m", "none"]) else {
        return skip("cannot mount a tmpfs here");
    };
    let planned = job.run("--dry-run", None);
    planned.succeeded().says(&["a run would be refused: ", "needed on the file system of"]);
    for more in ["", "--resume", "--parts 2 --part 0 --no-wait"] {
        job.run(more, None).refused(&["needed on the file system of", "free", "hint: free space there, or choose"]);
        assert!(!job.target().exists());
        // Nothing is recorded, so there is nothing to be resumed.
        assert_eq!(names(&desk), [""; 0], "{more}");
    }
}

/// Room for what files hold is only found to be missing when they are written: ext2 cannot reserve it.
fn full_in_the_middle(kind: Kind) {
    let job = Job::new(kind);
    let desk = job.desk();
    let image = job.source().with_file_name("image");
    fs::File::create(&image).unwrap().set_len(24 << 20).unwrap();
    let made = succeeds(Command::new("mkfs.ext2").arg("-q").arg("-F").arg(&image));
    let mounted = made.then(|| Mount::new(&desk, &["-t", "ext2", "-o", "loop", image.to_str().unwrap()])).flatten();
    let Some(mount) = mounted else {
        return skip("cannot mount an ext2 image here");
    };
    assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
    let filler = fill(&desk);
    for more in ["--resume", "--resume --threads 1", "--resume --parts 2 --part 1 --no-wait"] {
        let ended = job.run(more, Some("none"));
        ended.refused(&[".dtshard-partial/", "No space left on device", "hint: free space on the file system"]);
        assert!(!job.target().exists() && job.partial().exists(), "{more}");
        job.source_is_whole(more);
    }
    fs::remove_file(filler).unwrap();
    job.run("--resume", Some("none")).succeeded();
    let left: Vec<String> = names(&desk).into_iter().filter(|name| name != "lost+found").collect();
    assert_eq!(left, [job.target().file_name().unwrap().to_str().unwrap()]);
    job.is_right("with space again");
    drop(mount);
}

#[test]
fn a_file_in_the_middle() {
    full_in_the_middle(FILE);
}

#[test]
fn a_folder_in_the_middle() {
    full_in_the_middle(FOLDER);
}

/// A disk that fails behind the page cache tells so once, to whoever waits first: fsync says that all is well afterwards.
#[test]
fn what_does_not_get_to_the_disk_is_told_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (room, at) = (folder.path().join("room"), folder.path().join("at"));
    fs::create_dir(&room).unwrap();
    fs::create_dir(&at).unwrap();
    let room_mount = Mount::new(&room, &["-t", "tmpfs", "-o", "size=8m", "none"]);
    let image = room.join("image");
    fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let made = succeeds(Command::new("mkfs.ext2").arg("-q").arg("-F").arg(&image));
    let args = ["-t", "ext2", "-o", "loop,errors=continue", image.to_str().unwrap()];
    let Some(_at) = room_mount.as_ref().filter(|_| made).and_then(|_| Mount::new(&at, &args)) else {
        return skip("cannot mount an ext2 image in a tmpfs here");
    };
    let file = fs::File::create(at.join("file")).unwrap();
    file.write_all_at(&vec![1; 20 << 20], 0).unwrap();
    let told = (0..20).find_map(|block| write_back(&file, block << 20, 1 << 20).err());
    assert!(told.is_some(), "8 MB hold no 20 MB");
}
