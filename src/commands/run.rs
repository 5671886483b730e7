//! What a verb has from its first step on: who to talk to, how to work, when to stop, and which part is its own.

use std::collections::BTreeMap;
use std::time::Instant;

use super::bucket::Bucket;
use super::memory::{Pace, work_options};
use super::printer::Printer;
use super::told_options::told_options;
use crate::cli::{Command, ConvertArgs, SourceArgs};
use dtshard::comm::{self, Launch, process_environment};
use dtshard::error::Result;
use dtshard::exec::{Options, Stop};
use dtshard::storage::filesystem::raise_open_file_limit;
use dtshard::storage::memory::give_back_large_blocks;

pub struct Run<'a> {
    pub printer: &'a Printer,
    pub options: Options,
    pub stop: Stop,
    pub started: Instant,
    pub launch: Launch,
    /// What the command line says of the result.
    pub options_told: BTreeMap<String, String>,
}

impl<'a> Run<'a> {
    /// A verb that only reads, which one process does.
    ///
    /// # Errors
    /// `Usage` where threads and memory do not go together, `Io`.
    pub fn reading(args: &SourceArgs, printer: &'a Printer) -> Result<Self> {
        Self::begin(args, (false, Pace::Processor), None, Launch::alone(), printer)
    }

    /// A verb that writes, of which several processes may do a part each.
    ///
    /// # Errors
    /// As [`Self::reading`].
    pub fn writing(args: &ConvertArgs, launch: Launch, printer: &'a Printer) -> Result<Self> {
        // What a node has not written yet is nothing that another one could rely on.
        let sync = !args.destination.no_sync || !launch.part.is_alone();
        let is_synced_alone = sync && launch.part.is_alone();
        let pace = if is_synced_alone { Pace::of_synced(args.dst.as_deref()) } else { Pace::Processor };
        let run = Self::begin(&args.source, (sync, pace), Bucket::wanted(&args.exchange), launch, printer)?;
        run.introduce();
        Ok(run)
    }

    fn introduce(&self) {
        let Launch { part, launcher, node, .. } = &self.launch;
        if !part.is_alone() {
            let node = node.as_ref().map(|node| format!(" on {node}")).unwrap_or_default();
            self.printer.detail(&format!(
                "part {} of {}, counted from 0, by {}{node}",
                part.index,
                part.of,
                launcher.name()
            ));
        }
    }

    fn begin(
        args: &SourceArgs,
        (sync, pace): (bool, Pace),
        rounds: Option<Bucket>,
        launch: Launch,
        printer: &'a Printer,
    ) -> Result<Self> {
        let started = Instant::now();
        raise_open_file_limit();
        give_back_large_blocks();
        let options_told = told_options(std::env::args_os());
        Ok(Self {
            printer,
            options: work_options(args, sync, pace, rounds)?,
            stop: Stop::on_signals()?,
            started,
            launch,
            options_told,
        })
    }
}

/// How this process was started, where that is anything to the verb.
///
/// # Errors
/// `Usage` where the command line and the environment make no sense together.
pub fn launch_of(command: &Command) -> Result<Launch> {
    command.convert().map_or_else(
        || Ok(Launch::alone()),
        |args| comm::launch(args.share.part, args.share.parts, args.share.no_wait, &process_environment),
    )
}
