//! Measures how fast files are written to and read from a folder: an upper limit for the speed of rounds.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use dtshard::error::Error;
use rayon::prelude::*;

use super::random::Random;
use super::{CheckResult, figure};

const LEN: usize = 2 << 30;
const BLOCK: usize = 8 << 20;
const TURNS: usize = 5;

/// Measures a folder, and deletes the test file.
pub fn all(folder: &Path) -> CheckResult {
    let path = folder.join("gpu_check.bytes");
    let done = measure(&path);
    let _ = fs::remove_file(&path);
    done
}

fn measure(path: &Path) -> CheckResult {
    let mut bytes = vec![0; LEN];
    Random::new(3).fill(&mut bytes);
    let offset = |block: usize| (block * BLOCK) as u64;
    let (mut writes, mut reads) = (Vec::new(), Vec::new());
    // The first turn does not count: the machine may first have to allocate the memory.
    for turn in 0..=TURNS {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
        let file = file.map_err(Error::io("create", path))?;
        let begun = Instant::now();
        let written =
            bytes.par_chunks(BLOCK).enumerate().try_for_each(|(nth, block)| file.write_all_at(block, offset(nth)));
        written.map_err(Error::io("write", path))?;
        writes.push(rate(begun));
        let begun = Instant::now();
        let blocks = bytes.par_chunks_mut(BLOCK).enumerate();
        let read = blocks.map(|(nth, block)| file.read_exact_at(block, offset(nth))).collect::<std::io::Result<()>>();
        read.map_err(Error::io("read", path))?;
        reads.push(rate(begun));
        if turn == 0 {
            writes.clear();
            reads.clear();
        }
    }
    for (name, mut rates) in [("write a new file", writes), ("read a file", reads)] {
        rates.sort_unstable_by(f64::total_cmp);
        figure(name, rates[TURNS / 2], None);
    }
    Ok(true)
}

#[expect(clippy::cast_precision_loss, reason = "a few digits are printed")]
fn rate(begun: Instant) -> f64 {
    LEN as f64 / begun.elapsed().as_secs_f64()
}
