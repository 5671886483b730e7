//! How fast a folder takes and gives files, from memory and into it: what rounds cannot be faster than.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use dtshard::error::Error;
use rayon::prelude::*;

use super::random::Random;
use super::{Verdict, figure};

const LEN: usize = 2 << 30;
const STRIP: usize = 8 << 20;
const TURNS: usize = 5;

pub fn all(folder: &Path) -> Verdict {
    let path = folder.join("gpu_check.bytes");
    let done = measured(&path);
    let _ = fs::remove_file(&path);
    done
}

fn measured(path: &Path) -> Verdict {
    let mut bytes = vec![0; LEN];
    Random::new(3).fill(&mut bytes);
    let offset = |strip: usize| (strip * STRIP) as u64;
    let (mut writes, mut reads) = (Vec::new(), Vec::new());
    // The first time is not counted: a machine may have to find the memory.
    for turn in 0..=TURNS {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
        let file = file.map_err(Error::io("create", path))?;
        let begun = Instant::now();
        let written =
            bytes.par_chunks(STRIP).enumerate().try_for_each(|(nth, strip)| file.write_all_at(strip, offset(nth)));
        written.map_err(Error::io("write", path))?;
        writes.push(rate(begun));
        let begun = Instant::now();
        let strips = bytes.par_chunks_mut(STRIP).enumerate();
        let read = strips.map(|(nth, strip)| file.read_exact_at(strip, offset(nth))).collect::<std::io::Result<()>>();
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
