//! What a verb has from its first step on: who to talk to, how to work, when to stop.

use std::time::Instant;

use super::memory::work_options;
use super::printer::Printer;
use crate::cli::SourceArgs;
use crate::error::Result;
use crate::exec::{Options, Stop};
use crate::storage::filesystem::raise_open_file_limit;

pub struct Run<'a> {
    pub printer: &'a Printer,
    pub options: Options,
    pub stop: Stop,
    pub started: Instant,
}

impl<'a> Run<'a> {
    /// # Errors
    /// `Usage` where threads and memory do not go together, `Io`.
    pub fn begin(args: &SourceArgs, sync: bool, printer: &'a Printer) -> Result<Self> {
        let started = Instant::now();
        raise_open_file_limit();
        Ok(Self { printer, options: work_options(args, sync)?, stop: Stop::on_signals()?, started })
    }
}
