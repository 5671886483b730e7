//! Journals and leases that somebody damaged, or forged: what they say is refused or true, and never ends in a wrong
//! result.

use std::fs;

use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::job::{CAST, DCP, FILE, FOLDER, Job, KINDS, Kind};

/// Go on with what is there: done and right, or refused.
#[track_caller]
fn goes_on(job: &Job, at: &str) -> bool {
    let ended = job.run("--resume", Some("none"));
    ended.did_not_crash();
    match ended.code {
        Some(0) => job.is_done(at),
        _ => assert!(ended.code == Some(2) && !job.target().exists(), "{at}: {ended:?}"),
    }
    ended.code == Some(0)
}

/// A partial folder with two windows recorded, to be damaged again and again.
struct Left {
    job: Job,
    kept: std::path::PathBuf,
}

impl Left {
    fn new(kind: Kind) -> Self {
        let job = Job::new(kind);
        for _ in 0..2 {
            assert_eq!(job.run("--resume --threads 1", Some("record-after")).signal, Some(9));
        }
        let kept = job.source().with_file_name("kept");
        crate::outcome::copy_all(&job.partial(), &kept);
        Self { job, kept }
    }

    fn put_back(&self) {
        self.job.clear();
        crate::outcome::copy_all(&self.kept, &self.job.partial());
    }
}

#[test]
fn bits_and_ends_of_journals() {
    for kind in [FILE, DCP] {
        let left = Left::new(kind);
        let lens: Vec<usize> =
            left.job.of_partial(".journal").iter().map(|path| fs::read(path).unwrap().len()).collect();
        assert_eq!(lens.len(), 2);
        for (nth, len) in lens.into_iter().enumerate() {
            for step in 0..12 {
                left.put_back();
                let path = &left.job.of_partial(".journal")[nth];
                let mut content = fs::read(path).unwrap();
                let at = len * step / 12;
                if step % 3 == 0 {
                    content.truncate(at);
                } else {
                    content[at] ^= 1 << (step % 8);
                }
                fs::write(path, content).unwrap();
                assert!(goes_on(&left.job, &format!("{kind} {nth} {step}")), "a damaged record says less");
            }
        }
    }
}

/// A line as it would be written.
fn line(json: &str) -> Vec<u8> {
    format!("{json} {:08x}\n", crc32fast::hash(json.as_bytes())).into_bytes()
}

#[test]
fn journals_that_lie_about_what_can_be() {
    let left = Left::new(FILE);
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
        left.put_back();
        fs::write(left.job.work().join("part-9-of-9.0.journal"), &content).unwrap();
        assert!(goes_on(&left.job, &nth.to_string()), "{nth}");
    }
    // A journal that is no file is not read.
    left.put_back();
    fs::create_dir(left.job.work().join("part-9-of-9.0.journal")).unwrap();
    assert!(!goes_on(&left.job, "a folder"));
}

/// Counts that no run can have met.
#[test]
fn counts_do_not_overflow() {
    let left = Left::new(CAST);
    let max = u64::MAX;
    let first = &left.job.of_partial(".journal")[0];
    let len = fs::metadata(left.job.work().join("data/model.safetensors")).unwrap().len();
    let of = |at: u64| format!(r#"[0,{},{},0,[],[["f32","f16",{max},{max}]]]"#, len - at, len - at + 1);
    let more = line(&format!(r#"{{"r":{{"e":[{},{}]}}}}"#, of(2), of(1)));
    fs::write(first, [fs::read(first).unwrap(), more].concat()).unwrap();
    let ended = left.job.run("--resume", Some("none"));
    ended.succeeded().says(&["18446744073709551615 values overflowed"]);
}

#[test]
fn leases_that_say_nothing() {
    let left = Left::new(FILE);
    let contents: [&[u8]; 4] = [b"", b"{}", b"{\"pid\": -1", &[0xff; 5000]];
    for (nth, content) in contents.into_iter().enumerate() {
        for name in ["part-0-of-1.7.lease", "part-0-of-2.0.lease", "seal.0.lease", "part-99999999999-of-1.0.lease"] {
            left.put_back();
            fs::write(left.job.partial().join(name), content).unwrap();
            assert!(goes_on(&left.job, &format!("{name} {nth}")));
        }
        // One that could have no next is none.
        left.put_back();
        fs::write(left.job.partial().join("part-0-of-1.4294967295.lease"), content).unwrap();
        assert!(goes_on(&left.job, "the last generation"));
    }
}

/// The entries that the journals of a partial folder have: file, start and end of each.
fn entries(job: &Job) -> Vec<(usize, u64, u64)> {
    let text: String = job.of_partial(".journal").iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let records = text.lines().map(|line| serde_json::from_str(&line[..line.len() - 9]).unwrap());
    let entries = records.flat_map(|record: Json| record["r"]["e"].as_array().cloned().unwrap_or_default());
    let number = |entry: &Json, field: usize| entry[field].as_u64().unwrap();
    entries.map(|entry| (usize::try_from(number(&entry, 0)).unwrap(), number(&entry, 1), number(&entry, 2))).collect()
}

/// An output file of a partial folder, and the middle of the longest entry of it.
fn recorded(job: &Job) -> (PathBuf, u64) {
    let (file, start, end) = entries(job).into_iter().max_by_key(|(_, start, end)| end - start).unwrap();
    let name = job.said["files"][file]["path"].as_str().unwrap();
    (job.work().join("data").join(name), start.midpoint(end))
}

fn flip(file: &Path, at: u64) {
    let mut content = fs::read(file).unwrap();
    content[usize::try_from(at).unwrap()] ^= 0x20;
    fs::write(file, content).unwrap();
}

/// A byte that is not what was written, of what is recorded: with --verify that is done again, and little else.
#[test]
fn a_flipped_byte() {
    for kind in KINDS {
        let left = Left::new(kind);
        let (file, at) = recorded(&left.job);
        let read = |more: &str| {
            let ended = left.job.run(&format!("--resume --json --threads 1 {more}"), Some("none"));
            let said: Json = serde_json::from_str(&ended.succeeded().out).unwrap();
            (said["bytes_read"].as_u64().unwrap(), said["cast"].clone(), ended)
        };
        left.put_back();
        let (untouched, ..) = read("--verify");
        left.job.is_done(&kind.to_string());
        left.put_back();
        let file = left.job.work().join("data").join(file.file_name().unwrap());
        flip(&file, at);
        let (again, cast, ended) = read("--verify");
        ended.says(&[file.to_str().unwrap(), "recorded as done: expected CRC-32 ", ", found ", "written again"]);
        assert!(
            untouched < again && again < left.job.said["bytes_read"].as_u64().unwrap(),
            "{kind}: {untouched} {again}"
        );
        assert_eq!(cast, left.job.said["cast"], "{kind}");
        left.job.is_done(&kind.to_string());
        // By parts, each of which looks at its own.
        left.put_back();
        let file = left.job.work().join("data").join(file.file_name().unwrap());
        flip(&file, at);
        left.job.run_parts(3, "--resume --verify", Some("none"));
        left.job.is_done(&format!("{kind} in parts"));
    }
}

/// Doubts last: what is not believed any more is not believed by a run that does not look.
#[test]
fn a_flipped_byte_and_a_kill() {
    let left = Left::new(FOLDER);
    let (file, at) = recorded(&left.job);
    flip(&file, at);
    assert_eq!(left.job.run("--resume --verify", Some("doubted")).signal, Some(9));
    left.job.run("--resume", Some("none")).succeeded();
    left.job.is_done("without a look");
}

/// What is found in the end is said, and is not found again.
#[test]
fn a_flipped_byte_that_is_found_in_the_end() {
    for kind in [FILE, FOLDER, DCP] {
        let job = Job::new(kind);
        // All is done, and nothing published.
        assert_eq!(job.run("--resume --verify", Some("seal-summed")).signal, Some(9));
        let (file, at) = recorded(&job);
        let name = file.file_name().unwrap().to_owned();
        flip(&file, at);
        // One of so many parts has nothing to do, looks at nothing, and seals.
        let ended = job.run("--resume --verify --parts 64 --part 0 --no-wait", Some("none"));
        ended.refused(&["memory or disk is at fault; nothing was published", "--resume writes this again"]);
        assert!(job.work().join("data").join(name).exists());
        job.run("--resume", Some("none")).succeeded();
        job.is_done(&kind.to_string());
    }
}

/// Two tensors that are wrong are told of, and written again, at once.
#[test]
fn all_that_is_found_in_the_end() {
    let job = Job::new(FOLDER);
    assert_eq!(job.run("--resume", Some("seal-summed")).signal, Some(9));
    let (file, _) = recorded(&job);
    let len = fs::metadata(&file).unwrap().len();
    [len / 3, len / 3 * 2].into_iter().for_each(|at| flip(&file, at));
    let look = "--resume --verify --parts 64 --part 0 --no-wait";
    job.run(look, Some("none")).refused(&["--resume writes this again"]);
    job.run_parts(64, "--resume", Some("none"));
    job.is_done("both");
}

/// A sum that is not that of what it is of, put there after it was written.
#[test]
fn a_sum_that_is_wrong() {
    let job = Job::new(DCP);
    assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
    let (file, _) = recorded(&job);
    let content = fs::read(&file).unwrap();
    // Descriptors tell CRC-32 and length: the first one that is of data.
    let number = |at: usize| u32::from_le_bytes(content[at..at + 4].try_into().unwrap());
    let is_of_data = |at: &usize| content[*at..].starts_with(b"PK\x07\x08") && number(at + 8) > 10_000;
    let at = (0..content.len() - 12).find(is_of_data).unwrap() + 4;
    flip(&file, at as u64);
    let words = ["CRC-32 of bytes ", &format!("at byte {at}: expected "), ", found ", "--resume writes this again"];
    job.run("--resume --verify", Some("none")).refused(&words).says(&[file.to_str().unwrap()]);
    job.run("--resume --verify", Some("none")).succeeded();
    job.is_done("again");
}

/// A file that was copied and is another one.
#[test]
fn a_carried_file() {
    let job = Job::new(FOLDER);
    assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
    let copy = job.work().join("data/config.json");
    for (content, more) in [(r#"{"model_type": "nine"}"#, "--verify"), ("{}", "")] {
        fs::write(&copy, content).unwrap();
        let ended = job.run(&format!("--resume {more}"), Some("record-after"));
        ended.says(&["data/config.json is not what was copied; it is copied again"]);
    }
    job.run("--resume", Some("none")).succeeded();
    job.is_done("copied again");
}

/// A file that is not as long as it should be: nothing that is recorded of it counts, and all else does.
#[test]
fn files_of_another_length() {
    let set_len = |file: &Path, len: u64| fs::File::options().write(true).open(file).unwrap().set_len(len).unwrap();
    for kind in [FILE, DCP, CAST] {
        let left = Left::new(kind);
        let (file, _) = recorded(&left.job);
        let len = fs::metadata(&file).unwrap().len();
        let expected = format!("{}: expected {len} bytes, found ", file.display());
        for found in [None, Some(1000), Some(0), Some(len + 1)] {
            let change = || found.map_or_else(|| fs::remove_file(&file).unwrap(), |len| set_len(&file, len));
            let found = found.map_or("no file".into(), |len| format!("{len} bytes"));
            for parts in [1, 3] {
                left.put_back();
                change();
                if parts == 1 {
                    let warning = format!("{expected}{found}");
                    let ended = left.job.run("--resume", Some("none"));
                    ended.says(&[&warning, "recorded as done are written again"]);
                } else {
                    left.job.run_parts(parts, "--resume", Some("none"));
                }
                left.job.is_done(&format!("{kind} {found} {parts}"));
            }
        }
    }
}

/// What two processes have recorded, as one of them was taken for dead, and is not so.
#[test]
fn bytes_that_two_have_recorded() {
    let left = Left::new(FOLDER);
    for more in ["--resume", "--resume --verify"] {
        left.put_back();
        let (file, at) = recorded(&left.job);
        for (nth, journal) in left.job.of_partial(".journal").iter().enumerate() {
            fs::copy(journal, journal.with_file_name(format!("part-{nth}-of-9.0.journal"))).unwrap();
        }
        if more == "--resume" {
            fs::remove_file(&file).unwrap();
        } else {
            flip(&file, at);
        }
        left.job.run(more, Some("none")).succeeded();
        left.job.is_done(more);
    }
}
