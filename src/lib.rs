//! Converts sharded PyTorch checkpoints between layouts and formats.
//!
//! A checkpoint is a set of named tensors. Each tensor is cut into chunks, and each chunk is a box of the tensor that
//! is stored in a file. A conversion writes the tensors of a checkpoint again, cut into other chunks or in another
//! format.
//!
//! 1. [`Checkpoint::open`] reads names, shapes and chunk positions. It never reads tensor data.
//! 2. [`Conversion`] describes the result: which tensors, under which names, in which dtypes, on which mesh.
//! 3. [`Conversion::plan`] checks the description against the source, proves that the chunks of each source tensor hold
//!    every element exactly once, and lays out every file of the result. Nothing is written before a [`Plan`] exists.
//! 4. [`Plan::execute`] moves the bytes and publishes the result with one rename. It returns a [`Report`].
//!
//! ```
//! use dtshard::{Checkpoint, Conversion, Dtype, ExecuteOptions, Format, NoProgress};
//! # let folder = tempfile::tempdir().unwrap();
//! # let destination = folder.path().join("resharded");
//!
//! let source = Checkpoint::open("tests/fixtures/fsdp4/dcp")?;
//! let mut plan = Conversion::of(&source)
//!     .include("model")?
//!     .cast(Dtype::Bf16)
//!     .mesh("dp=2,tp=4")?
//!     .place("**.wq.weight", "S(0),S(1)")?
//!     .place_all("S(0),R")?
//!     .to(Format::Dcp)
//!     .plan()?;
//! println!("{plan}");
//! let report = plan.execute(&destination, &ExecuteOptions::default(), NoProgress)?;
//! assert_eq!(report.tensors, Checkpoint::open(&destination)?.tensors().count());
//! # Ok::<(), dtshard::Error>(())
//! ```
//!
//! # Look at a checkpoint
//!
//! ```
//! use dtshard::Checkpoint;
//!
//! let checkpoint = Checkpoint::open("tests/fixtures/fsdp4/ranks")?;
//! for tensor in checkpoint.tensors().take(3) {
//!     println!("{} {:?} {} {:?}", tensor.name(), tensor.shape(), tensor.dtype(), tensor.placements());
//! }
//! # assert!(checkpoint.tensors().any(|tensor| tensor.placements().as_deref() == Some("S(0)")));
//! # Ok::<(), dtshard::Error>(())
//! ```
//!
//! # Read a tensor
//!
//! [`Checkpoint::read`] reads one tensor into a buffer of the caller, and [`Checkpoint::read_box`] reads one box of a
//! tensor. Only the bytes of the box are read, even if the box spans several chunks. [`Checkpoint::read_all`] reads many
//! parts at once, such as the shards of one rank.
//!
//! ```
//! use dtshard::Checkpoint;
//!
//! let checkpoint = Checkpoint::open("tests/fixtures/fsdp4/dcp")?;
//! let tensor = checkpoint.tensors().find(|tensor| tensor.shape().len() == 2).expect("a matrix");
//! let mut all = vec![0; tensor.len_bytes() as usize];
//! checkpoint.read(tensor.name(), &mut all)?;
//!
//! let columns = tensor.shape()[1];
//! let mut first_row = vec![0; (columns * tensor.dtype().itemsize()) as usize];
//! checkpoint.read_box(tensor.name(), &[0, 0], &[1, columns], &mut first_row)?;
//! assert_eq!(first_row, all[..first_row.len()]);
//! # Ok::<(), dtshard::Error>(())
//! ```
//!
//! # Follow a run
//!
//! A [`Progress`] receives counts of bytes and messages while a plan is executed. The library prints nothing itself.
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU64, Ordering};
//!
//! use dtshard::{Checkpoint, Conversion, ExecuteOptions, Progress};
//! # let folder = tempfile::tempdir().unwrap();
//! # let destination = folder.path().join("model.safetensors");
//!
//! #[derive(Default)]
//! struct Written(AtomicU64);
//!
//! impl Progress for Written {
//!     fn advance(&self, bytes: u64) {
//!         self.0.fetch_add(bytes, Ordering::Relaxed);
//!     }
//! }
//!
//! let written = Arc::new(Written::default());
//! let source = Checkpoint::open("tests/fixtures/titan")?;
//! let mut plan = Conversion::from(source).model().destination(&destination).plan()?;
//! println!("{}", plan.preview()?);
//! let report = plan.execute(&destination, &ExecuteOptions::default(), Arc::clone(&written))?;
//! assert_eq!(written.0.load(Ordering::Relaxed), report.bytes_written);
//! # Ok::<(), dtshard::Error>(())
//! ```
//!
//! # Verify
//!
//! [`verify()`] checks that a checkpoint is sound, or that two checkpoints have equal values. The layouts and formats
//! of the two may differ.
//!
//! ```
//! use dtshard::{NoProgress, Setup, VerifyOptions, verify};
//!
//! let options = VerifyOptions {
//!     src: "tests/fixtures/titan".into(),
//!     other: Some("tests/fixtures/titan.truth.safetensors".into()),
//!     ..VerifyOptions::default()
//! };
//! let verification = verify(&options, &Setup::default(), NoProgress)?;
//! assert!(verification.is_same(), "{}", verification.lines(true));
//! # Ok::<(), dtshard::Error>(())
//! ```
//!
//! # Guarantees
//!
//! - **Exact.** Without a cast or a reduction no bit of a tensor changes.
//! - **Atomic.** The destination appears complete or not at all. See [`Plan::execute`].
//! - **Bounded memory.** Memory grows with the number of chunks, not with their bytes. See
//!   [`SourceOptions::max_memory`](options::SourceOptions::max_memory).
//! - **Safe.** Pickles are decoded as data. No class or function named in a file is ever imported.
//! - **Quiet.** The library prints nothing, installs no signal handler, and never ends the process. A program that
//!   wants signals to stop a conversion connects the signals to a [`Stop`].

#![warn(missing_docs)]
#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails"))]
#![cfg_attr(
    not(feature = "internals"),
    allow(dead_code, unused_imports, reason = "tests, benches and examples use more of the interior")
)]

// The way of a conversion through the modules. An arrow leads to the next module.
//
// program   main -> cli::parse (cli declares the arguments) -> commands::launch_of -> launch (the number of this process in
//           its run) -> commands::convert (cli::arguments makes options of the arguments; then it opens, plans and
//           executes, and prints through commands::printer)
//           Most options stay text, such as meshes, placements and name patterns: the step that uses an option parses it.
//
// open      checkpoint -> convert::run (an Engine: worker threads and buffer sizes for opening, planning and executing)
//           -> convert::source::open -> format::Checkpoint::open (format/mod.rs) -> format::find_checkpoint (the folder)
//           -> format::detect (the format) -> format::reading -> the entry of the format reads -> catalog
//           The catalog has the file and length of every chunk, and its offset if the metadata records the offset. For a
//           record of a zip archive and for an item of a DCP file, format::resolve reads the offset when exec::window
//           prepares the window (a group of tensors) that has the tensor of this chunk.
//
// plan      conversion -> convert::source::choose -> convert::weight_map (`--dequantize`, then `--map`: each makes a new catalog)
//           -> select (names and dtypes)
//           -> convert::reshard (or unshard, flatten, consolidate), which drives the next steps in this order:
//              convert::fill (opens the checkpoints of `--like` and `--fill-from`) -> convert::target_format
//              -> convert::source::resolve_conflicts -> convert::differing_values (values that differ between ranks)
//              -> convert::target_parts (divides the destination into series and folders)
//              -> reshard::mesh_and_rules (parses `--mesh`; convert::placements parses `--placements`)
//              -> the format's writer, which lays out the files. It asks for the distinct tiles of each tensor and for the
//              ranks of each tile (reshard::placement_resolver: a rule, the plan, `--like` or the fallback; then
//              layout::distinct_tiles), and chooses the rank that writes a tile.
//           The result is convert::prepared with a catalog::Reservation: each output file with its length, its header bytes
//           and the offsets of its tensor data. Execution fills the reservation, and knows no format.
//           -> convert::complete_plan checks the result: catalog::tiling proves that chunks cover each source tensor
//           exactly once.
//
// execute   conversion -> convert::execute -> prepared::check_destination (format::known_files: what `--overwrite` may replace)
//           -> convert::source_checks (checksums and replicas of the source) -> convert::write
//           -> exec::fingerprint (identifies the plan)
//           -> publish::acquire (claims the destination: finds or creates publish::partial_folder, compares the fingerprint in
//              its plan.json, and takes a publish::lease: a file that the process keeps rewriting, not a file lock)
//           -> convert::check_journals (validates publish::completed_work of earlier runs: nothing in a first run)
//           -> exec::copy, for one window of tensors after another:
//              exec::window (plan::intersect finds the chunks) -> exec::cut_blocks (write blocks)
//              -> exec::gather (plan::lower: byte runs of a block), exec::runs (read; exec::computed computes the bytes of
//              computed tensors) -> exec::cast -> exec::checksums
//              -> exec::output (writes)
//              -> publish::work_log (implements exec::finished_ranges::WorkLog) -> publish::journal (records finished ranges)
//           -> publish::wait (for other processes) -> publish::commit (renames `data` in the partial folder to the destination)
//           -> convert::report (text of the closing line)
//           A run that writes all bytes itself completes the checksums while it copies. With `--resume`, and if several
//           processes write, publish::seal completes the checksums that are left. After an error or a signal, a run keeps
//           its partial folder only with `--resume`, or if it is one of several processes.
//
// memory    convert::threads_and_blocks divides `--max-memory` when the Engine is made. convert::estimate checks the estimated
//           peak when execution begins, because the headers of the destination are then known. convert::space checks the
//           free space of the destination in convert::write.
//
// verify    verify -> format (opens, without convert::source::open) -> select -> verify::soundness -> verify::comparison
//           Both compare through exec::compare. verify::findings collects the differences.
//
// Several processes. Each writes its own share, which convert::write takes from exec::division; publish waits for the others.
// With `--source per-rank`, `--backend nccl` or `--backend mpi`, convert::peers also connects the processes when they open the
// source. They exchange tensor data: convert::peers -> exchange (drives rounds; exchange::shuffle or gpu::shuffle sends)
// -> exec::copy::write, as for data from files.
//
// "Per-rank" has three meanings. Rank files: each rank of a job saved a file (format::{rank_names, series, torch, fsdp_flat}).
// `--source per-rank`: each process sees only some files of the source. metadata_mirror gives all processes one catalog, and
// without NCCL and MPI, convert::execute first copies files to a folder that all processes see (exchange::source_copy).
// `--on-conflict per-rank`: each rank keeps its own value (convert::differing_values).

mod checkpoint; // facade: opens and reads checkpoints
#[cfg(feature = "cli")]
#[doc(hidden)]
pub mod cli; // the arguments of the program, and the options they stand for
mod conversion; // facade: plans and executes conversions
mod convert; // the steps of a conversion, and its options
mod describe; // contents and layout of one checkpoint, for `inspect`
pub mod error;
pub mod options; // the option types, from their modules
mod progress;
pub mod text; // escapes, option spellings
mod verify; // soundness of one checkpoint, comparison of two

/// Declares the internal modules of the library. They are private, except in builds for the tests, benches and examples
/// of this repository.
macro_rules! interior {
    ($($module:ident)*) => {
        $(
            #[cfg(feature = "internals")]
            #[doc(hidden)]
            pub mod $module;
            #[cfg(not(feature = "internals"))]
            mod $module;
        )*
    };
}

// What a checkpoint contains.
interior! { layout catalog select format maps }
// Moving bytes: overlaps of chunks, copies, publishing.
interior! { storage plan exec publish }
// Several processes: identity, messages, metadata of other nodes, rounds of bytes, GPUs.
interior! { launch comm metadata_mirror exchange gpu }
// Small tools.
interior! { document fault html json_text name_list nearest quantity threads }

pub use catalog::Dtype;
pub use checkpoint::{Checkpoint, OpenOptions, TensorInfo, TensorPart, TensorRead};
#[cfg(feature = "mpi")]
pub use comm::mpi::Finalize as MpiFinalize;
pub use conversion::{Conversion, Plan};
pub use convert::options::{ExecuteOptions, VerifyOptions};
pub use convert::{Outcome, Preview, Report, Setup};
pub use describe::{Inspection, MapListing, Span, is_map_file, map_file};
pub use error::{Error, Result};
pub use exec::Stop;
pub use format::Format;
pub use html::{html_frame, write_html};
pub use progress::{Level, NoProgress, Phase, Progress};
pub use storage::catch_lost_pages;
pub use verify::{Verification, verify};

// Tests of the library share files with those of the program.
#[cfg(test)]
extern crate self as dtshard;
#[cfg(test)]
mod tests;
