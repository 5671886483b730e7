//! Journals and leases that somebody damaged, or forged: what they say is refused or true, and never ends in a wrong
//! result.

use std::fs;

use crate::job::{CAST, DCP, FILE, Job};

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
    fn new(kind: crate::job::Kind) -> Self {
        let job = Job::new(kind);
        for _ in 0..2 {
            assert_eq!(job.run("--resume", Some("record-after")).signal, Some(9));
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
        line(r#"{"r":{"e":[[7,0,4096,[]]]}}"#),
        line(&format!(r#"{{"r":{{"e":[[0,{max},{max},[]]]}}}}"#)),
        line(&format!(r#"{{"r":{{"e":[[0,0,{max},[]]]}}}}"#)),
        line(r#"{"r":{"e":[[0,4096,0,[]]]}}"#),
        line(&format!(r#"{{"r":{{"e":[[0,0,4096,[[{max},{max},1]]]]}}}}"#)),
        line(&format!(r#"{{"r":{{"e":[[0,0,4096,[[0,{max},1]]]]}}}}"#)),
        line(r#"{"r":{"e":[[0,0,4096,[[100,0,1]]]]}}"#),
        line(r#"{"r":{"c":[4294967295]}}"#),
        line(r#"{"r":{"c":[0]}}"#),
        line(r#"{"r":{"l":[["f32","nothing",1,1]]}}"#),
        line(&format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000))),
        line(&format!(r#"{{"r":{{"l":[["f32","f16",{max},{max}]]}}}}"#)),
        vec![b'x'; 1 << 20],
        vec![0; 4096],
        b"\n\n\n".to_vec(),
    ];
    for (nth, content) in hostile.into_iter().enumerate() {
        left.put_back();
        fs::write(left.job.partial().join("part-9-of-9.0.journal"), &content).unwrap();
        assert!(goes_on(&left.job, &nth.to_string()), "{nth}");
    }
    // A journal that is no file is not read.
    left.put_back();
    fs::create_dir(left.job.partial().join("part-9-of-9.0.journal")).unwrap();
    assert!(!goes_on(&left.job, "a folder"));
}

/// Counts that no run can have met.
#[test]
fn counts_do_not_overflow() {
    let left = Left::new(CAST);
    let max = u64::MAX;
    let path = &left.job.of_partial(".journal")[0];
    let more = line(&format!(r#"{{"r":{{"l":[["f32","f16",{max},{max}]]}}}}"#));
    fs::write(path, [fs::read(path).unwrap(), more.clone(), more].concat()).unwrap();
    goes_on(&left.job, "counts");
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
