//! Tests of damaged and forged journals and leases: a run refuses them or resumes correctly, and never publishes wrong
//! bytes.

use std::fs;

use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::job::{CAST, DCP, FILE, FOLDER, Job, KINDS, Kind};

/// Runs the job with `--resume`. Asserts that the run writes the expected bytes, or is refused and writes no DST.
/// Returns true if it succeeded.
#[track_caller]
fn resumes_correctly(job: &Job, at: &str) -> bool {
    let ended = job.run("--resume", Some("none"));
    ended.assert_no_crash();
    match ended.code {
        Some(0) => job.assert_done(at),
        _ => assert!(ended.code == Some(2) && !job.target().exists(), "{at}: {ended:?}"),
    }
    ended.code == Some(0)
}

/// The partial folder of an interrupted run that has recorded two windows. Tests damage the folder and restore it.
struct InterruptedRun {
    job: Job,
    kept: std::path::PathBuf,
}

impl InterruptedRun {
    fn new(kind: Kind) -> Self {
        let job = Job::new(kind);
        for _ in 0..2 {
            assert_eq!(job.run("--resume --threads 1", Some("record-after")).signal, Some(9));
        }
        let kept = job.source().with_file_name("kept");
        crate::outcome::copy_all(&job.partial(), &kept);
        Self { job, kept }
    }

    fn restore(&self) {
        self.job.clear();
        crate::outcome::copy_all(&self.kept, &self.job.partial());
    }
}

#[test]
fn journals_with_flipped_bits_or_truncated_ends_are_refused_or_resumed() {
    for kind in [FILE, DCP] {
        let interrupted = InterruptedRun::new(kind);
        let lens: Vec<usize> =
            interrupted.job.files_in_partial(".journal").iter().map(|path| fs::read(path).unwrap().len()).collect();
        assert_eq!(lens.len(), 2);
        for (nth, len) in lens.into_iter().enumerate() {
            for step in 0..12 {
                interrupted.restore();
                let path = &interrupted.job.files_in_partial(".journal")[nth];
                let mut content = fs::read(path).unwrap();
                let at = len * step / 12;
                if step % 3 == 0 {
                    content.truncate(at);
                } else {
                    content[at] ^= 1 << (step % 8);
                }
                fs::write(path, content).unwrap();
                assert!(
                    resumes_correctly(&interrupted.job, &format!("{kind} {nth} {step}")),
                    "a damaged record says less"
                );
            }
        }
    }
}

/// Returns a line of a journal: a JSON text with its checksum.
fn line(json: &str) -> Vec<u8> {
    format!("{json} {:08x}\n", crc32fast::hash(json.as_bytes())).into_bytes()
}

#[test]
fn journals_with_impossible_records_are_refused_or_ignored() {
    let interrupted = InterruptedRun::new(FILE);
    let max = u64::MAX;
    let hostile = [
        line(r#"{"r":{"e":[[7,0,4096,0,[],[]]]}}"#),
        line(&format!(r#"{{"r":{{"e":[[0,{max},{max},0,[],[]]]}}}}"#)),
        line(&format!(r#"{{"r":{{"e":[[0,0,{max},0,[],[]]]}}}}"#)),
        line(r#"{"r":{"e":[[0,4096,0,0,[],[]]]}}"#),
        line(&format!(r#"{{"r":{{"e":[[0,0,4096,0,[[{max},{max},1]],[]]]}}}}"#)),
        line(&format!(r#"{{"r":{{"e":[[0,0,4096,0,[[0,{max},1]],[]]]}}}}"#)),
        line(r#"{"r":{"e":[[0,0,4096,0,[[100,0,1]],[]]]}}"#),
        line(r#"{"r":{"c":[4294967295]}}"#),
        line(r#"{"r":{"c":[0]}}"#),
        line(r#"{"r":{"e":[[0,0,4096,0,[],[["f32","nothing",1,1]]]]}}"#),
        line(&format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000))),
        line(r#"{"r":{"d":[["part-0-of-1.0.journal",9,0]]}}"#),
        vec![b'x'; 1 << 20],
        vec![0; 4096],
        b"\n\n\n".to_vec(),
    ];
    for (nth, content) in hostile.into_iter().enumerate() {
        interrupted.restore();
        fs::write(interrupted.job.work().join("part-9-of-9.0.journal"), &content).unwrap();
        assert!(resumes_correctly(&interrupted.job, &nth.to_string()), "{nth}");
    }
    // If the path of a journal is a folder, the run is refused.
    interrupted.restore();
    fs::create_dir(interrupted.job.work().join("part-9-of-9.0.journal")).unwrap();
    assert!(!resumes_correctly(&interrupted.job, "a folder"));
}

/// The journal has counts of overflowed values that are larger than any run can produce.
#[test]
fn overflow_counts_of_journals_saturate() {
    let interrupted = InterruptedRun::new(CAST);
    let max = u64::MAX;
    let first = &interrupted.job.files_in_partial(".journal")[0];
    let len = fs::metadata(interrupted.job.work().join("data/model.safetensors")).unwrap().len();
    let of = |at: u64| format!(r#"[0,{},{},0,[],[["f32","f16",{max},{max}]]]"#, len - at, len - at + 1);
    let more = line(&format!(r#"{{"r":{{"e":[{},{}]}}}}"#, of(2), of(1)));
    fs::write(first, [fs::read(first).unwrap(), more].concat()).unwrap();
    let ended = interrupted.job.run("--resume", Some("none"));
    ended.assert_succeeded().assert_mentions(&["18446744073709551615 values overflowed"]);
}

#[test]
fn malformed_leases_do_not_block_resume() {
    let interrupted = InterruptedRun::new(FILE);
    let contents: [&[u8]; 4] = [b"", b"{}", b"{\"pid\": -1", &[0xff; 5000]];
    for (nth, content) in contents.into_iter().enumerate() {
        for name in ["part-0-of-1.7.lease", "part-0-of-2.0.lease", "seal.0.lease", "part-99999999999-of-1.0.lease"] {
            interrupted.restore();
            fs::write(interrupted.job.partial().join(name), content).unwrap();
            assert!(resumes_correctly(&interrupted.job, &format!("{name} {nth}")));
        }
        // A lease with the highest possible number is ignored, because no later lease could have a higher number.
        interrupted.restore();
        fs::write(interrupted.job.partial().join("part-0-of-1.4294967295.lease"), content).unwrap();
        assert!(resumes_correctly(&interrupted.job, "the last generation"));
    }
}

/// Returns the recorded ranges in the journals of a partial folder: for each range the file, the start and the end.
fn entries(job: &Job) -> Vec<(usize, u64, u64)> {
    let text: String = job.files_in_partial(".journal").iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let records = text.lines().map(|line| serde_json::from_str(&line[..line.len() - 9]).unwrap());
    let entries = records.flat_map(|record: Json| record["r"]["e"].as_array().cloned().unwrap_or_default());
    let number = |entry: &Json, field: usize| entry[field].as_u64().unwrap();
    entries.map(|entry| (usize::try_from(number(&entry, 0)).unwrap(), number(&entry, 1), number(&entry, 2))).collect()
}

/// Returns the path of the output file with the longest recorded range, and the offset of the middle of this range.
fn recorded(job: &Job) -> (PathBuf, u64) {
    let (file, start, end) = entries(job).into_iter().max_by_key(|(_, start, end)| end - start).unwrap();
    let name = job.document["files"][file]["path"].as_str().unwrap();
    (job.work().join("data").join(name), start.midpoint(end))
}

fn flip(file: &Path, at: u64) {
    let mut content = fs::read(file).unwrap();
    content[usize::try_from(at).unwrap()] ^= 0x20;
    fs::write(file, content).unwrap();
}

/// With `--verify`, the recorded range that has the changed byte is written again, and almost nothing else.
#[test]
fn flipped_byte_of_recorded_output_is_written_again_with_verify() {
    for kind in KINDS {
        let interrupted = InterruptedRun::new(kind);
        let (file, at) = recorded(&interrupted.job);
        let read = |more: &str| {
            let ended = interrupted.job.run(&format!("--resume --json --threads 1 {more}"), Some("none"));
            let document: Json = serde_json::from_str(&ended.assert_succeeded().out).unwrap();
            (document["bytes_read"].as_u64().unwrap(), document["cast"].clone(), ended)
        };
        interrupted.restore();
        let (untouched, ..) = read("--verify");
        interrupted.job.assert_done(&kind.to_string());
        interrupted.restore();
        let file = interrupted.job.work().join("data").join(file.file_name().unwrap());
        flip(&file, at);
        let (again, cast, ended) = read("--verify");
        ended.assert_mentions(&[
            file.to_str().unwrap(),
            "are recorded as done, but have another CRC-32 (expected ",
            ", found ",
            "so they are written again",
        ]);
        assert!(
            untouched < again && again < interrupted.job.document["bytes_read"].as_u64().unwrap(),
            "{kind}: {untouched} {again}"
        );
        assert_eq!(cast, interrupted.job.document["cast"], "{kind}");
        interrupted.job.assert_done(&kind.to_string());
        // If there are several parts, each part checks its own ranges.
        interrupted.restore();
        let file = interrupted.job.work().join("data").join(file.file_name().unwrap());
        flip(&file, at);
        interrupted.job.run_parts(3, "--resume --verify", Some("none"));
        interrupted.job.assert_done(&format!("{kind} in parts"));
    }
}

/// Invalidated ranges stay invalidated: a later run without `--verify` writes them again as well.
#[test]
fn invalidated_output_stays_invalidated_after_a_kill() {
    let interrupted = InterruptedRun::new(FOLDER);
    let (file, at) = recorded(&interrupted.job);
    flip(&file, at);
    assert_eq!(interrupted.job.run("--resume --verify", Some("invalidated")).signal, Some(9));
    interrupted.job.run("--resume", Some("none")).assert_succeeded();
    interrupted.job.assert_done("without a look");
}

/// A flipped byte is found after all output was written. The run that finds it is refused, and the next run succeeds.
#[test]
fn flipped_byte_found_before_publishing_is_refused_and_written_again() {
    for kind in [FILE, FOLDER, DCP] {
        let job = Job::new(kind);
        // All output was written, and nothing was published, because the run was killed between these two steps.
        assert_eq!(job.run("--resume --verify", Some("seal-summed")).signal, Some(9));
        let (file, at) = recorded(&job);
        let name = file.file_name().unwrap().to_owned();
        flip(&file, at);
        // Part 0 of 64 parts has no work, so it verifies no ranges, and then seals the output.
        let ended = job.run("--resume --verify --parts 64 --part 0 --no-wait", Some("none"));
        ended.assert_refused(&[
            "memory or disk is faulty; nothing was published",
            "--resume to write these bytes again",
        ]);
        assert!(job.work().join("data").join(name).exists());
        job.run("--resume", Some("none")).assert_succeeded();
        job.assert_done(&kind.to_string());
    }
}

/// Two tensors have a flipped byte. One run reports both, and the next run writes both again.
#[test]
fn two_flipped_bytes_are_reported_and_written_again() {
    let job = Job::new(FOLDER);
    assert_eq!(job.run("--resume", Some("seal-summed")).signal, Some(9));
    let (file, _) = recorded(&job);
    let len = fs::metadata(&file).unwrap().len();
    [len / 3, len / 3 * 2].into_iter().for_each(|at| flip(&file, at));
    let look = "--resume --verify --parts 64 --part 0 --no-wait";
    job.run(look, Some("none")).assert_refused(&["--resume to write these bytes again"]);
    job.run_parts(64, "--resume", Some("none"));
    job.assert_done("both");
}

/// A checksum in the output was changed after it was written.
#[test]
fn wrong_checksum_in_the_output_is_refused_and_written_again() {
    let job = Job::new(DCP);
    assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
    let (file, _) = recorded(&job);
    let content = fs::read(&file).unwrap();
    // A zip descriptor contains the CRC-32 and the length of the data. This expression finds the first descriptor of
    // tensor data.
    let number = |at: usize| u32::from_le_bytes(content[at..at + 4].try_into().unwrap());
    let is_of_data = |at: &usize| content[*at..].starts_with(b"PK\x07\x08") && number(at + 8) > 10_000;
    let at = (0..content.len() - 12).find(is_of_data).unwrap() + 4;
    flip(&file, at as u64);
    let words =
        ["CRC-32 of bytes ", &format!("at byte {at}: expected "), ", found ", "--resume to write these bytes again"];
    job.run("--resume --verify", Some("none")).assert_refused(&words).assert_mentions(&[file.to_str().unwrap()]);
    job.run("--resume --verify", Some("none")).assert_succeeded();
    job.assert_done("again");
}

/// A sidecar file was changed after it was copied.
#[test]
fn changed_sidecar_file_is_copied_again() {
    let job = Job::new(FOLDER);
    assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
    let copy = job.work().join("data/config.json");
    for (content, more) in [(r#"{"model_type": "nine"}"#, "--verify"), ("{}", "")] {
        fs::write(&copy, content).unwrap();
        let ended = job.run(&format!("--resume {more}"), Some("record-after"));
        ended.assert_mentions(&["data/config.json differs from the file that was copied; it is copied again"]);
    }
    job.run("--resume", Some("none")).assert_succeeded();
    job.assert_done("copied again");
}

/// If an output file has a wrong length, its recorded ranges do not count. The ranges of all other files count.
#[test]
fn output_file_of_another_length_is_written_again() {
    let set_len = |file: &Path, len: u64| fs::File::options().write(true).open(file).unwrap().set_len(len).unwrap();
    for kind in [FILE, DCP, CAST] {
        let interrupted = InterruptedRun::new(kind);
        let (file, _) = recorded(&interrupted.job);
        let len = fs::metadata(&file).unwrap().len();
        let expected = format!("{}: expected {len} bytes, found ", file.display());
        for found in [None, Some(1000), Some(0), Some(len + 1)] {
            let change = || found.map_or_else(|| fs::remove_file(&file).unwrap(), |len| set_len(&file, len));
            let found = found.map_or("no file".into(), |len| format!("{len} bytes"));
            for parts in [1, 3] {
                interrupted.restore();
                change();
                if parts == 1 {
                    let warning = format!("{expected}{found}");
                    let ended = interrupted.job.run("--resume", Some("none"));
                    ended.assert_mentions(&[&warning, "that the journal records as finished are written again"]);
                } else {
                    interrupted.job.run_parts(parts, "--resume", Some("none"));
                }
                interrupted.job.assert_done(&format!("{kind} {found} {parts}"));
            }
        }
    }
}

/// Two journals record the same ranges, because one process was wrongly considered dead. The bytes in these ranges are
/// damaged.
#[test]
fn damaged_bytes_recorded_by_two_processes_are_written_again() {
    let interrupted = InterruptedRun::new(FOLDER);
    for more in ["--resume", "--resume --verify"] {
        interrupted.restore();
        let (file, at) = recorded(&interrupted.job);
        for (nth, journal) in interrupted.job.files_in_partial(".journal").iter().enumerate() {
            fs::copy(journal, journal.with_file_name(format!("part-{nth}-of-9.0.journal"))).unwrap();
        }
        if more == "--resume" {
            fs::remove_file(&file).unwrap();
        } else {
            flip(&file, at);
        }
        interrupted.job.run(more, Some("none")).assert_succeeded();
        interrupted.job.assert_done(more);
    }
}
