//! A run: what every step of an operation needs, from opening the source to publishing the destination.
//!
//! Worker threads belong to a pool of the run, so that a program which uses this library keeps its own.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::bucket::Bucket;
use super::memory::{Bottleneck, Workers, work_options};
use super::options::{ExchangeOptions, SourceOptions};
use crate::error::Result;
use crate::exec::{Options, Stop};
use crate::launch::Launch;
use crate::progress::Progress;

/// Where an operation stands among processes, when it stops, and what it is called.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Which of the processes of a run this one is.
    pub launch: Launch,
    /// Flag that ends the operation.
    pub stop: Stop,
    /// Options that decide on the result, by the names under which the caller's user knows them, with their values as text.
    /// They are recorded beside an unfinished destination, and say what differs if another run finds it.
    pub labels: BTreeMap<String, String>,
}

impl Default for Setup {
    fn default() -> Self {
        Self { launch: Launch::alone(), stop: Stop::default(), labels: BTreeMap::new() }
    }
}

/// Threads, buffers and the setup of one operation.
#[derive(Debug)]
pub struct Engine {
    pub options: Options,
    pub setup: Setup,
    pub workers: Workers,
    pub started: Instant,
}

impl Engine {
    /// For an operation that only reads.
    ///
    /// # Errors
    /// `Usage` if threads and memory do not go together.
    pub fn reading(source: &SourceOptions, setup: &Setup) -> Result<Self> {
        Self::new(source, (false, Bottleneck::Processor), None, setup)
    }

    /// For an operation that writes to `destination`, alone or as one of several processes.
    ///
    /// # Errors
    /// As [`Self::reading`].
    pub fn writing(
        source: &SourceOptions,
        exchange: &ExchangeOptions,
        (destination, sync): (Option<&Path>, bool),
        setup: &Setup,
    ) -> Result<Self> {
        let is_alone = setup.launch.part.is_alone();
        let sync = sync || !is_alone;
        let pace = if sync && is_alone { Bottleneck::of_synced(destination) } else { Bottleneck::Processor };
        Self::new(source, (sync, pace), Bucket::wanted(exchange), setup)
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

    /// Runs `work` on the worker threads, and with `sync` has it wait until all data is on disk.
    pub fn work_synced<'a, T: Send>(
        &'a self,
        sync: bool,
        progress: &'a Arc<dyn Progress>,
        work: impl FnOnce(&Run<'a>) -> T + Send,
    ) -> T {
        let Setup { launch, stop, labels } = &self.setup;
        // Another node cannot rely on what this one has not written yet.
        let sync = sync || !launch.part.is_alone();
        let (options, started) = (Options { sync, ..self.options }, self.started);
        let run = Run { progress, options, stop: stop.clone(), started, launch: launch.clone(), labels };
        self.workers.install(move || work(&run))
    }
}

/// The operation that a step is part of.
pub struct Run<'a> {
    pub progress: &'a Arc<dyn Progress>,
    pub options: Options,
    pub stop: Stop,
    pub started: Instant,
    pub launch: Launch,
    /// See [`Setup::labels`].
    pub labels: &'a BTreeMap<String, String>,
}

impl Run<'_> {
    /// Says which part of the work is this process's.
    pub fn introduce(&self) {
        let Launch { part, launcher, node, .. } = &self.launch;
        if !part.is_alone() {
            let node = node.as_ref().map(|node| format!(" on {node}")).unwrap_or_default();
            self.progress.detail(&format!(
                "part {} of {}, counted from 0, by {}{node}",
                part.index,
                part.of,
                launcher.name()
            ));
        }
    }
}
