//! Benchmarks `.metadata` of DCP for very many ranks: planning it, writing it, and reading it as `inspect` does.
//!
//! The checkpoint has tensors of the 405B model, sharded over all ranks of `fsdp=16384` with one chunk for each rank.
//! It has as many tensors as are needed for the number of chunks. The data files have their lengths but no disk blocks.
//! It prints CPU seconds, and the peak memory of the process so far, in MB.
//!
//! `cargo bench --bench metadata [-- --chunks N] [--ranks N] [--keep DIR]`

#![expect(clippy::print_stdout, reason = "a bench prints its figures")]

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use dtshard::catalog::path::Unflatten;
use dtshard::catalog::{Catalog, Dtype, Key, Path as StatePath, Reservation, TensorEntry, Value};
use dtshard::format::{Checkpoint, ReadOptions, dcp};
use support::cost::{nanos_each, peak_mb, timed};
use support::model::{Job, Tensor, tensors};

/// Returns enough tensors to have `chunks` chunks in total, with one chunk for each rank. Every rank holds at least one
/// row of each tensor.
fn choose_tensors(ranks: u64, chunks: u64) -> Vec<Tensor> {
    let even = tensors(126).filter(|tensor| tensor.shape.len() == 2 && tensor.shape[0] >= ranks);
    even.take(usize::try_from(chunks.div_ceil(ranks)).expect("a few tensors")).collect()
}

fn catalog(tensors: &[Tensor]) -> Catalog {
    let mut catalog = Catalog::empty();
    let mut state = Unflatten::default();
    for tensor in tensors {
        let entry = TensorEntry::new(tensor.fqn.as_str().into(), Dtype::F32, tensor.shape.clone());
        let path = StatePath(vec![Key::Name(tensor.fqn.as_str().into())]);
        state.insert(&path, Value::Tensor(catalog.push_tensor(entry))).expect("names of their own");
    }
    catalog.state = state.finish().expect("a dict");
    catalog
}

/// Creates the data files as sparse files, and writes `.metadata`. Returns the length of `.metadata` in bytes.
fn write(reservation: &Reservation, folder: &Path) -> u64 {
    let mut len = 0;
    for file in &reservation.files {
        let path = folder.join(&file.path);
        if file.path.as_os_str() == ".metadata" {
            let bytes = &file.header_bytes[0].bytes;
            len = bytes.len() as u64;
            std::fs::write(path, bytes.as_slice()).expect("written");
        } else {
            std::fs::File::create(path).and_then(|made| made.set_len(file.len)).expect("made");
        }
    }
    len
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let (mut ranks, mut chunks, mut keep) = (16_384, 1_000_000, None);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().expect("a value");
        match argument.as_str() {
            "--ranks" => ranks = value.parse().expect("a number of ranks"),
            "--chunks" => chunks = value.parse().expect("a number of chunks"),
            "--keep" => keep = Some(PathBuf::from(value)),
            other => panic!("{other}: expected --ranks, --chunks or --keep"),
        }
    }
    let temporary = tempfile::tempdir().expect("a folder");
    let folder = keep.unwrap_or_else(|| temporary.path().to_path_buf());
    std::fs::create_dir_all(&folder).expect("a folder");

    let job = Job::fsdp(ranks);
    let tensors = choose_tensors(ranks, chunks);
    let source = catalog(&tensors);
    println!("| step | chunks | s | ns a chunk | peak MB |");
    println!("|---|---|---|---|---|");
    let line = |step: &str, count: u64, spent: Duration| {
        let (seconds, each) = (spent.as_secs_f64(), nanos_each(spent, count));
        println!("| {step} | {count} | {seconds:.2} | {each:.0} | {} |", peak_mb());
    };

    let mut spent = Duration::ZERO;
    let reservation = timed(&mut spent, || {
        let mut each = tensors.iter();
        dcp::reserve(&source, &source.state, &mut |_, _, _| Ok(job.shards(each.next().expect("in their order"))))
            .expect("a reservation")
    });
    let count = reservation.tensors.iter().map(|tensor| tensor.entry.chunks.len() as u64).sum();
    line("reserve", count, spent);
    let mut spent = Duration::ZERO;
    let len = timed(&mut spent, || write(&reservation, &folder));
    line("write", count, spent);
    drop(reservation);

    let mut spent = Duration::ZERO;
    let read = timed(&mut spent, || Checkpoint::open(&folder, &ReadOptions::default()).expect("a checkpoint"));
    let found = read.catalog.tensors.iter().map(|entry| entry.chunks.len() as u64).sum();
    assert_eq!(count, found);
    line("read", found, spent);
    println!("\n`.metadata`: {len} bytes, {} a chunk", len / count.max(1));
}
