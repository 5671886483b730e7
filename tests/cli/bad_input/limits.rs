//! Tests of limits on threads, open files and address space, and of records that declare more bytes than there are.

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use dtshard::{Checkpoint, Conversion, Dtype, ExecuteOptions, Format, NoProgress, Setup, VerifyOptions, verify};

use crate::common::env::TestEnv;
use crate::corrupt::{Outcome, dict_of, dtshard, fixture};

const BINARY: &str = env!("CARGO_BIN_EXE_dtshard");

/// The size in bytes of a hole in a sparse file: 1 TiB.
const HUGE: u64 = 1 << 40;

/// Writes a torch.save file in which the zip record named `hole` is a hole of [`HUGE`] bytes.
fn write_with_hole(path: &Path, hole: &str, pickle: &[u8]) {
    let mut file = fs::File::create(path).unwrap();
    let mut directory = Vec::new();
    let records = [("archive/data.pkl", pickle), ("archive/byteorder", b"little")];
    for (name, data) in records {
        let at = file.stream_position().unwrap();
        let size = if name == hole { HUGE } else { data.len() as u64 };
        let name_len = u16::try_from(name.len()).unwrap().to_le_bytes();
        file.write_all(b"PK\x03\x04\x2d\0\0\0\0\0\0\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff").unwrap();
        file.write_all(&[name_len, [0; 2]].concat()).unwrap();
        file.write_all(name.as_bytes()).unwrap();
        if name == hole {
            file.seek(SeekFrom::Current(i64::try_from(HUGE).unwrap())).unwrap();
        } else {
            file.write_all(data).unwrap();
        }
        directory.extend(b"PK\x01\x02\x2d\0\x2d\0\0\0\0\0\0\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff");
        directory.extend([name_len, 28_u16.to_le_bytes(), [0; 2], [0; 2], [0; 2]].concat());
        directory.extend([0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
        directory.extend(name.as_bytes());
        directory.extend([1_u16.to_le_bytes(), 24_u16.to_le_bytes()].concat());
        directory.extend([size, size, at].map(u64::to_le_bytes).concat());
    }
    let at = file.stream_position().unwrap();
    file.write_all(&directory).unwrap();
    let end = file.stream_position().unwrap();
    file.write_all(b"PK\x06\x06\x2c\0\0\0\0\0\0\0\x2d\0\x2d\0\0\0\0\0\0\0\0\0").unwrap();
    file.write_all(&[2, 2, directory.len() as u64, at].map(u64::to_le_bytes).concat()).unwrap();
    file.write_all(b"PK\x06\x07\0\0\0\0").unwrap();
    file.write_all(&end.to_le_bytes()).unwrap();
    file.write_all(b"\x01\0\0\0PK\x05\x06\0\0\0\0\x02\0\x02\0\xff\xff\xff\xff\xff\xff\xff\xff\0\0").unwrap();
}

#[test]
fn record_of_a_tebibyte_is_malformed() {
    let env = TestEnv::new();
    let path = env.path("w.pt");
    let pickle = dict_of("step", |writer| _ = writer.int(1));
    write_with_hole(&path, "", &pickle);
    dtshard(&[&"inspect", &path]).assert_succeeded();
    for hole in ["archive/byteorder", "archive/data.pkl"] {
        write_with_hole(&path, hole, &pickle);
        env.assert_bad_input(&path);
    }
}

#[test]
fn metadata_of_a_tebibyte_is_malformed() {
    let env = TestEnv::new();
    let source = env.copy("fsdp4/dcp");
    fs::File::options().write(true).open(source.join(".metadata")).unwrap().set_len(HUGE).unwrap();
    env.assert_bad_input(&source);
}

/// A file that is larger than the address space cannot be mapped, so it is read.
#[test]
fn file_larger_than_address_space_is_read() {
    let env = TestEnv::new();
    let (small, large) = (r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#, 4_u64 << 30);
    let mut header = format!(r#"{{{small},"b":{{"dtype":"U8","shape":[{large}],"data_offsets":[8,{}]}}}}"#, 8 + large);
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let head = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), b"contents"].concat();
    let source = env.write("w.safetensors", &head);
    let len = head.len() as u64 + large;
    fs::File::options().write(true).open(&source).unwrap().set_len(len).unwrap();
    let target = env.path("out.safetensors");
    let limit = format!("--as={}", 1_u64 << 30);
    let outcome: Outcome = Command::new("prlimit")
        .args([&limit, BINARY, "consolidate"])
        .args([&source, &target])
        .args(["--include", "a", "--io", "mmap", "--threads", "2", "--no-sync"])
        .output()
        .unwrap()
        .into();
    outcome.assert_succeeded();
    assert!(fs::read(&target).unwrap().ends_with(b"contents"));
}

/// For any limit on open files, a run succeeds or leaves nothing behind.
#[test]
fn run_with_few_open_files_leaves_nothing() {
    let env = TestEnv::new();
    let (mut refused, mut succeeded) = (0, 0);
    for files in 5..40 {
        let limit = format!("--nofile={files}");
        let outcome: Outcome = Command::new("prlimit")
            .args([&limit, BINARY, "consolidate", "--no-sync"])
            .args([&fixture("verl"), &env.path("out")])
            .output()
            .unwrap()
            .into();
        if outcome.code == Some(0) {
            succeeded += 1;
            fs::remove_dir_all(env.path("out")).unwrap();
        } else {
            outcome.assert_refused(&["Too many open files"]);
            refused += 1;
        }
        assert!(env.names().is_empty(), "{files}: {outcome:?}");
    }
    assert!(refused > 5 && succeeded > 5, "{refused} {succeeded}");
}

/// The thread limit counts the processes of a user and does not apply to root, so the test needs another user.
#[test]
fn thread_limit_reduces_threads() {
    let env = TestEnv::new();
    let out = env.path("out");
    fs::create_dir(&out).unwrap();
    for folder in [out.parent().unwrap(), &out] {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let source = env.copy("fsdp4/dcp");
    let user = ["--reuid=54321", "--regid=54321", "--clear-groups"];
    let may_run = Command::new("setpriv").args(user).args([BINARY, "--version"]).output();
    if !may_run.is_ok_and(|output| output.status.success()) {
        writeln!(std::io::stderr(), "skipped: not root, or the program is in a folder that others cannot enter")
            .unwrap();
        return;
    }
    let expected = env.path("expected.safetensors");
    dtshard(&[&"consolidate", &fixture("fsdp4/dcp"), &expected]).assert_succeeded();
    let mut succeeded = 0;
    for processes in [1, 2, 3, 4, 6, 10] {
        let limited = |arguments: &[&std::ffi::OsStr]| -> Outcome {
            let limit = format!("--nproc={processes}");
            let mut run = Command::new("setpriv");
            run.args(user).args(["prlimit", &limit, BINARY]).args(arguments);
            run.output().unwrap().into()
        };
        let target = out.join(format!("{processes}.safetensors"));
        let outcome = limited(&["consolidate".as_ref(), source.as_os_str(), target.as_os_str()]);
        outcome.assert_no_crash();
        if outcome.code == Some(0) {
            assert_eq!(fs::read(&target).unwrap(), fs::read(&expected).unwrap());
            succeeded += 1;
        } else {
            assert_eq!(outcome.code, Some(2), "{outcome:?}");
        }
        limited(&["inspect".as_ref(), source.as_os_str()]).assert_succeeded();
    }
    assert!(succeeded > 0);
}

/// A library must not start the global thread pool of rayon, because all code of a program shares this pool and the
/// program chooses its size.
#[test]
fn library_leaves_the_global_pool_to_the_program() {
    const CHILD: &str = "DTSHARD_TEST_GLOBAL_POOL";
    const NAME: &str = "bad_input::limits::library_leaves_the_global_pool_to_the_program";
    let Some(folder) = std::env::var_os(CHILD) else {
        // The test runs again in a separate process, in which no other test uses the global pool.
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap());
        let child = child.args(["--exact", NAME]).env(CHILD, folder.path()).output().unwrap();
        assert!(child.status.success() && String::from_utf8_lossy(&child.stdout).contains("1 passed"), "{child:?}");
        return;
    };
    let destination = Path::new(&folder).join("out");
    let source = Checkpoint::open(fixture("fsdp4/dcp")).unwrap();
    let mut tensors = source.tensors();
    let tensor = tensors.find(|tensor| tensor.shape().len() == 2).unwrap();
    let mut bytes = vec![0; usize::try_from(tensor.len_bytes()).unwrap()];
    source.read(tensor.name(), &mut bytes).unwrap();
    let plan = Conversion::of(&source).include("model").unwrap().cast(Dtype::Bf16).to(Format::Dcp);
    let mut plan = plan.mesh("dp=2").unwrap().place_all("S(0)").unwrap().plan().unwrap();
    plan.execute(&destination, &ExecuteOptions::default(), NoProgress).unwrap();
    let options = VerifyOptions { src: destination, ..VerifyOptions::default() };
    assert!(verify(&options, &Setup::default(), NoProgress).unwrap().is_same());
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().expect("nothing has started the global pool");
}
