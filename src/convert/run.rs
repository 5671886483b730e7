//! A run is one operation of a process, with the resources and settings that each step needs, from opening the source
//! to publishing the destination.
//!
//! A run has its own pool of worker threads, so it does not use the global pool of the program that calls the library.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::bucket::Bucket;
use super::options::{ExchangeOptions, SourceOptions};
use super::threads_and_blocks::{Bottleneck, Workers, work_options};
use crate::error::Result;
use crate::exec::{Options, Stop};
use crate::launch::Launch;
use crate::progress::Progress;

/// Settings of an operation: the number of this process in the run, the stop flag, and the options for messages.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The number of this process, the number of all processes, and the launcher that started them.
    pub launch: Launch,
    /// Flag that another thread sets to stop the operation.
    pub stop: Stop,
    /// Options that determine the result, as text: the option names that the user knows, with their values. They are
    /// recorded beside an unfinished destination, so that a later run with other options can report the difference.
    pub labels: BTreeMap<String, String>,
}

impl Default for Setup {
    fn default() -> Self {
        Self { launch: Launch::alone(), stop: Stop::default(), labels: BTreeMap::new() }
    }
}

/// Worker threads, buffer sizes and settings of one operation of this process.
#[derive(Debug)]
pub struct Engine {
    pub options: Options,
    pub setup: Setup,
    pub workers: Workers,
    pub started: Instant,
}

impl Engine {
    /// Returns the engine for an operation that only reads.
    ///
    /// # Errors
    /// `Usage` if the memory limit is too low for the threads.
    pub fn reading(source: &SourceOptions, setup: &Setup) -> Result<Self> {
        Self::new(source, (false, Bottleneck::Processor), None, setup)
    }

    /// Returns the engine for an operation that writes to `destination`. With `sync`, or if several processes share the
    /// operation, all data must be on disk at the end.
    ///
    /// # Errors
    /// The errors of [`Self::reading`].
    pub fn writing(
        source: &SourceOptions,
        exchange: &ExchangeOptions,
        (destination, sync): (Option<&Path>, bool),
        setup: &Setup,
    ) -> Result<Self> {
        let is_alone = setup.launch.part.is_alone();
        let sync = sync || !is_alone;
        let pace = if sync && is_alone { Bottleneck::of_synced(destination) } else { Bottleneck::Processor };
        Self::new(source, (sync, pace), Bucket::of_exchange(exchange), setup)
    }

    fn new(
        source: &SourceOptions,
        (sync, pace): (bool, Bottleneck),
        rounds: Option<Bucket>,
        setup: &Setup,
    ) -> Result<Self> {
        let started = Instant::now();
        let (options, workers) = work_options(source, sync, pace, rounds)?;
        Ok(Self { options, setup: setup.clone(), workers, started })
    }

    /// Runs `work` on the worker threads.
    pub fn work<'a, T: Send>(&'a self, progress: &'a Arc<dyn Progress>, work: impl FnOnce(&Run<'a>) -> T + Send) -> T {
        self.work_synced(self.options.sync, progress, work)
    }

    /// Runs `work` on the worker threads. With `sync`, or if the run has several processes, `work` waits until all data
    /// is on disk.
    pub fn work_synced<'a, T: Send>(
        &'a self,
        sync: bool,
        progress: &'a Arc<dyn Progress>,
        work: impl FnOnce(&Run<'a>) -> T + Send,
    ) -> T {
        let Setup { launch, stop, labels } = &self.setup;
        // Another node may publish the output, so all data of this node must be on disk.
        let sync = sync || !launch.part.is_alone();
        let (options, started) = (Options { sync, ..self.options }, self.started);
        let run = Run { progress, options, stop: stop.clone(), started, launch: launch.clone(), labels };
        self.workers.install(move || work(&run))
    }
}

/// Resources and settings of an operation, which each of its steps gets as an argument.
pub struct Run<'a> {
    pub progress: &'a Arc<dyn Progress>,
    pub options: Options,
    pub stop: Stop,
    pub started: Instant,
    pub launch: Launch,
    /// Options that determine the result, as text; see [`Setup::labels`].
    pub labels: &'a BTreeMap<String, String>,
}

impl Run<'_> {
    /// Reports, in verbose output, the part number of this process and its launcher, if the run has several processes.
    pub fn introduce(&self) {
        let Launch { part, launcher, node, .. } = &self.launch;
        if !part.is_alone() {
            let node = node.as_ref().map(|node| format!(" on {node}")).unwrap_or_default();
            self.progress.detail(&format!(
                "part {} of {} (counted from 0), started by {}{node}",
                part.index,
                part.of,
                launcher.name()
            ));
        }
    }
}
