//! Connected processes of one run, as needed by `--source per-rank`, `--backend nccl` and `--backend mpi`.
//!
//! The processes connect, create a [metadata mirror](crate::metadata_mirror) of SRC if `--source per-rank` is given,
//! and stay connected until DST is published. They either [exchange](crate::exchange) the data that they read, or
//! [copy](crate::exchange::source_copy) the files that only some of them see; after that copy, all of them see SRC. A
//! process that fails informs the others, and no process waits for a process that has ended.

mod process_table;
mod same_options;
mod transport;
pub(super) mod waiting;
pub(super) mod work_folder;

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::process_table::ProcessTable;
use self::transport::{Link, LinkRequest, Meeting, Transport, arithmetic, check_mpi};
use self::waiting::{meet_within, slow_reporter, wait_notices, wait_printer};
use self::work_folder::WorkFolder;
use super::bucket::Bucket;
use super::nesting::refuse_nesting;
use super::run::Run;
use super::source_options::input;
use super::space::no_space;
use super::threads_and_blocks::room_before_layout;
use crate::catalog::{Reservation, TensorEntry, TensorId};
use crate::comm::{Communicator, Traffic};
use crate::convert::options::{Backend, ConvertOptions, SourceVisibility};
use crate::error::{CommError, Error, Result, StorageError};
#[cfg(feature = "mpi")]
use crate::exchange::HostShuffle;
use crate::exchange::records::Records;
use crate::exchange::source_copy::{Amount, SourceCopy};
use crate::exchange::{
    Exchange, FileOwners, FileVisibility, Load, ReductionMethod, ReplicaChoice, Topology, agree, differing_pair,
    differing_replicas,
};
use crate::exec::Extents;
use crate::exec::compare::ReplicaDifference;
use crate::exec::copy::{Stats, WriteContext};
use crate::exec::division::own_rank_files;
use crate::exec::fingerprint::Fingerprint;
use crate::exec::global_totals::GlobalTotals;
use crate::fault;
use crate::format::{Checkpoint, ReadOptions};
use crate::gpu::{self, DeviceShuffle};
use crate::launch::{Launcher, Part, process_environment};
use crate::metadata_mirror::{self, MetadataMirror};
use crate::progress::{Progress, Task};
use crate::publish::presence::Presence;
use crate::quantity::human_bytes;
use crate::storage::filesystem;

/// Maximum time until every process notices that another process has ended.
const DETECTED_WITHIN: Duration = Duration::from_secs(2);

/// Maximum time that a process without GPU or NCCL waits until the other processes have connected. The process then
/// sends the reason to the others and stops.
const LACKING_WITHIN: Duration = Duration::from_secs(10);
const LACKING_HURRIED: Duration = Duration::from_secs(3);

/// Connection of this process to the other processes of the run.
pub struct Peers {
    link: Link,
    /// Metadata mirror of SRC; `None` without `--source per-rank`, because every process then sees all files of SRC.
    mirror: Option<MetadataMirror>,
    /// For each process, the number of the node on which it runs.
    nodes: Vec<u32>,
    process_table: ProcessTable,
    counting: ReplicaChoice,
    reducing: ReductionMethod,
    bucket: Bucket,
    /// Lease on the copied files of SRC, which process 0 holds while processes use the copies. `None` on other
    /// processes.
    copying: Option<Presence>,
    // This field is last, so that it is dropped last: the work folder contains the mirror and the copy.
    work: WorkFolder,
}

impl Peers {
    /// Connects to the other processes and reads SRC with them. Returns `None` if the options need no connection.
    ///
    /// # Errors
    /// `Usage` if the processes do not run at the same time, `Comm` with the processes that do not connect, and errors
    /// from reading SRC.
    pub fn open(args: &ConvertOptions, options: &ReadOptions, run: &Run<'_>) -> Result<Option<(Self, Checkpoint)>> {
        refuse_senseless(args)?;
        let launch = &run.launch;
        let backend = args.exchange.backend;
        let is_per_rank = args.exchange.source == SourceVisibility::PerRank;
        if backend == Backend::Mpi {
            check_mpi(launch)?;
        }
        let option = match backend {
            _ if is_per_rank => "options::source per-rank",
            Backend::Nccl => "options::backend nccl",
            Backend::Mpi => "options::backend mpi",
            Backend::Auto | Backend::Cpu => {
                if backend == Backend::Auto && !launch.part.is_alone() {
                    run.progress.detail("backend cpu: all processes see SRC, so each reads the data that it writes");
                }
                return Ok(None);
            }
        };
        if is_per_rank && launch.part.is_alone() {
            return Err(Error::usage(
                "options::source per-rank: this is the only process",
                "start one process on each node that stores a part of SRC, with srun, torchrun or mpirun, or with \
                 options::part and options::parts",
            ));
        }
        if !launch.waits && !launch.part.is_alone() {
            let who = if launch.launcher == Launcher::SlurmArray {
                "the tasks of a Slurm array"
            } else {
                "with options::no_wait they"
            };
            return Err(Error::usage(
                format!("{option}: processes must run at the same time, but {who} may start at different times"),
                "start the processes with srun, torchrun or mpirun",
            ));
        }
        if is_per_rank && args.execute.verify {
            return Err(Error::usage(
                "options::verify cannot be used with options::source per-rank: options::verify reads all of SRC again, but no \
                 process sees all of it",
                "omit options::verify; options::check_crc checks the data of SRC against its stored checksums",
            ));
        }
        let destination = args.dst.as_deref().ok_or_else(|| {
            Error::usage(
                format!("{option}: processes connect through a folder beside DST, but no DST is given"),
                "give DST, even with options::dry_run",
            )
        })?;
        // SRC is never changed, so DST, and with it the work folder beside DST, must not be inside SRC.
        refuse_nesting("the source", &args.src, destination)?;
        let (met, work) = meet(destination, args, run)?;
        let mut link = Link::new(met);
        let process_table =
            ProcessTable::meet(&link).map_err(|error| ProcessTable::unknown(launch.part).name(error))?;
        let mut deciding = run.labels.clone();
        if args.exchange.fast_reduce {
            deciding.insert(String::from("options::fast_reduce"), String::new());
        }
        let agreed = same_options::agree(&link, args).and_then(|()| same_options::compare(&link, &deciding));
        let nodes = agreed.and_then(|()| Topology::gather_nodes(&link)).map_err(|error| process_table.name(error))?;
        // The headers of DST are not laid out yet. They can only make rounds shorter.
        let rounds = Bucket::of(&args.exchange).within(room_before_layout(&args.source, &run.options));
        let linking = LinkRequest {
            args: &args.exchange,
            rounds,
            local_rank: launch.local_rank.unwrap_or_else(|| Topology::local_rank(&nodes, launch.part.index)),
            process_table: &process_table,
            progress: run.progress,
        };
        let chosen = link.choose(&linking).map_err(|error| process_table.name(error));
        chosen.inspect_err(|error| link.fail(error))?;
        // With --on-conflict, replicas may differ, so the value of the lowest rank must always be used.
        let counting = if args.checks.on_conflict.is_some() { ReplicaChoice::LowestRank } else { ReplicaChoice::Any };
        let reducing = match link.way() {
            Transport::Nccl(..) if args.exchange.fast_reduce => ReductionMethod::Nccl,
            _ => ReductionMethod::InRankOrder,
        };
        let bucket = Bucket::of(&args.exchange);
        let mut peers =
            Self { link, mirror: None, nodes, process_table, counting, reducing, bucket, copying: None, work };
        let read = peers.read(args, options, run).map_err(|error| {
            let error = if is_not_there(&error) { cause(&peers.link, error) } else { error };
            peers.process_table.name(error)
        });
        let checkpoint = read.inspect_err(|error| peers.fail(error))?;
        Ok(Some((peers, checkpoint)))
    }

    /// Reads the metadata of SRC together with the other processes. Collective.
    fn read(&mut self, args: &ConvertOptions, options: &ReadOptions, run: &Run<'_>) -> Result<Checkpoint> {
        self.link.begin("reading the metadata of SRC");
        if args.exchange.source == SourceVisibility::Shared {
            let checkpoint = Checkpoint::open(&args.src, options).map_err(|error| error.within(&args.src));
            return self.link.all_ok(checkpoint);
        }
        let mirror = self.work.of_run().join(MIRROR);
        let mirror = self.mirror.insert(metadata_mirror::create(&self.link, &args.src, &mirror)?);
        if mirror.sees_no_files(run.launch.part.index) {
            let src = args.src.display();
            run.progress.warning(&format!("there are no files at {src}, so this process reads no data"));
        }
        let checkpoint = mirror.open(options).map_err(|error| {
            let error = if mirror.is_whole() { error } else { cause(&self.link, error) };
            self.process_table.locate(error, mirror)
        });
        self.link.all_ok(checkpoint)
    }

    /// Returns true if the processes exchange the data that they read. Otherwise each process reads the data that it
    /// writes, from SRC or from a copy of its files.
    pub fn exchange_bytes(&self) -> bool {
        !matches!(self.link.way(), Transport::Copy)
    }

    /// Lets process 0 decide for all processes whether files of SRC are copied to a folder that all processes see.
    /// Returns `None` if no files are copied. Otherwise returns the number of bytes that DST will need on the file
    /// system of this folder. Collective.
    ///
    /// # Errors
    /// The error of `decide` on process 0; on the other processes, `Comm` with that error.
    pub fn decide(&self, decide: impl FnOnce() -> Result<Option<u64>>) -> Result<Option<u64>> {
        let decided = self.link.all_ok(if self.link.rank() == 0 { decide() } else { Ok(None) })?;
        let decisions = self.link.gather(&decided.map_or_else(Vec::new, |bytes| bytes.to_le_bytes().to_vec()))?;
        Ok(decisions.first().and_then(|first| Some(u64::from_le_bytes(first.as_slice().try_into().ok()?))))
    }

    /// Copies the files of SRC that the conversion reads and that only some processes see to a folder that all
    /// processes see. `beside` is the number of bytes that DST needs on the same file system. Does nothing if all
    /// processes see all files or if the processes exchange tensor data. Collective.
    ///
    /// # Errors
    /// `Usage` if there is not enough space, and the errors of [`SourceCopy::run`].
    pub fn copy_source(
        &mut self,
        checkpoint: &mut Checkpoint,
        reservation: &Reservation,
        beside: u64,
        resumes: bool,
        run: &Run<'_>,
    ) -> Result<()> {
        let Some(mirror) = self.mirror.as_ref().filter(|_| !self.exchange_bytes()) else { return Ok(()) };
        self.work.uses_copy(resumes);
        let folder = self.work.copy();
        let source = (&checkpoint.catalog, reservation);
        let copy = SourceCopy::plan(folder, mirror.own(), &checkpoint.files, source, self.link.size());
        let begun =
            if self.link.rank() == 0 { self.begin_copy(&copy, beside, resumes, run).map(Some) } else { Ok(None) };
        self.copying = self.link.all_ok(begun)?;
        let progress = Task::start(run.progress, "copying", copy.share(self.link.rank()));
        self.link.begin("copying files of SRC");
        copy.run(&self.link, &progress, &run.stop)?;
        self.link.begin("writing DST");
        copy.turn(&mut checkpoint.files)
    }

    /// Acquires the lease on the copied files of SRC, and checks the free space for these files and for `beside` bytes
    /// of DST. Only process 0 calls this, before files are copied.
    fn begin_copy(&self, copy: &SourceCopy, beside: u64, resumes: bool, run: &Run<'_>) -> Result<Presence> {
        let lease = copy.begin(resumes, &run.stop)?;
        let Amount { files, bytes, left } = copy.amount();
        let folder = self.work.copy();
        let (needed, free) = (left.saturating_add(beside), filesystem::free_bytes(folder.path())?);
        if free < needed {
            return Err(no_space(folder.path(), needed, free));
        }
        if files > 0 {
            let (bytes, left) = (human_bytes(bytes), human_bytes(left));
            run.progress.note(&format!(
                "copying to {}: {left} of {bytes}, in {files} files that only some processes see",
                folder.display()
            ));
        }
        Ok(lease)
    }

    /// Completes an error: adds the node and the process id of the process that the error names, and the processes that
    /// see a damaged file. If a file is missing because another process has ended, returns the error about that process
    /// instead.
    pub fn name(&self, error: Error) -> Error {
        // Only an error about a missing file can be a consequence of a process that has ended.
        let is_of_files = is_not_there(&error) || error.kind() == "missing";
        let has_lost = is_of_files && self.mirror.as_ref().is_some_and(|mirror| !mirror.is_whole());
        let error = self.process_table.name(if has_lost { cause(&self.link, error) } else { error });
        match &self.mirror {
            Some(mirror) => self.process_table.locate(error, mirror),
            None => error,
        }
    }

    /// Returns a text that says which processes see the files of two chunks: `a.pt is seen by process 0 of 2 (n1, pid
    /// 7), b.pt is seen by ...`. Returns `None` if all processes see at least one of the two files.
    pub fn whereabouts(&self, checkpoint: &Checkpoint, entry: &TensorEntry, chunks: [u32; 2]) -> Option<String> {
        let files = &checkpoint.files;
        let [first, second] = chunks.map(|chunk| {
            let file = entry.chunks.location(chunk as usize).file()?;
            let name = files.path(file).file_name()?.display();
            Some(format!("{name} is seen by {}", self.process_table.names(files.seen_by(file)?)))
        });
        Some(format!("{}, {}", first?, second?))
    }

    /// Returns the method by which partial values are reduced.
    pub fn reducing(&self) -> ReductionMethod {
        self.reducing
    }

    /// Returns true if the option is `--source per-rank`: each process sees only the files of SRC on its own node.
    pub fn see_apart(&self) -> bool {
        self.mirror.is_some()
    }

    /// Returns the bucket size of the exchange rounds.
    pub fn bucket(&self) -> Bucket {
        self.bucket
    }

    /// Reduces the bucket size, if necessary, to a size that fits into the memory of every process. This process has
    /// `room` bytes. A size that the user chose stays unchanged. Collective.
    ///
    /// # Errors
    /// The errors of [`Bucket::agree`].
    pub fn agree_on_bucket(&mut self, room: u64, progress: &dyn Progress) -> Result<()> {
        let requested = self.bucket;
        self.bucket = requested.within(room).agree(&self.link)?;
        if self.bucket != requested {
            let (requested, possible) = (human_bytes(requested.bytes()), human_bytes(self.bucket.bytes()));
            progress.detail(&format!(
                "options::bucket_size is reduced to {possible}, because six buffers of {requested} do not fit into options::max_memory"
            ));
        }
        Ok(())
    }

    /// Returns the processes that see a file of SRC, if some processes see only its metadata in the mirror. Returns an
    /// empty list if all processes can read the complete file.
    pub fn carriers(&self, path: &Path) -> Vec<u32> {
        let apart = self.mirror.as_ref().filter(|mirror| !mirror.holds_all_of(path));
        apart.map_or_else(Vec::new, |mirror| mirror.seen_by(path).to_vec())
    }

    /// Checks that all processes have computed the same plan; its hash is `fingerprint`. Collective.
    ///
    /// # Errors
    /// `Comm` with the first process whose plan differs from the plan of process 0.
    pub fn compare(&self, fingerprint: Fingerprint) -> Result<()> {
        let own = fingerprint.to_string();
        let all = self.link.gather(own.as_bytes())?;
        let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(()) };
        // Without this barrier, a process could end before the others have received the plans, and they would report
        // only its end.
        self.link.barrier()?;
        Err(Error::Comm(CommError {
            rank: u32::try_from(rank).expect("a rank").into(),
            op: "plan",
            detail: String::from("it differs from the plan of process 0"),
            hint: Some(String::from("start all processes with the same options and the same version of dtshard")),
        }))
    }

    /// Returns the first difference of each of `tensors` whose replicas differ. Also compares replicas in files that no
    /// single process sees. If every process sees all files, use
    /// [`source_checks::differing`](crate::convert::source_checks::differing) instead. Collective.
    ///
    /// # Errors
    /// The errors of [`differing_replicas`].
    pub fn differing(
        &self,
        checkpoint: &Checkpoint,
        tensors: &[TensorId],
        progress: &Task<'_>,
        run: &Run<'_>,
    ) -> Result<Vec<(TensorId, ReplicaDifference)>> {
        differing_replicas(&self.link, &self.sight(checkpoint), input(checkpoint), tensors, progress, &run.stop)
    }

    /// Describes the first difference between two tensors that should be equal, or returns `None` if they are equal.
    /// Collective.
    ///
    /// # Errors
    /// The errors of [`differing_pair`].
    pub fn difference(&self, checkpoint: &Checkpoint, pair: [TensorId; 2], run: &Run<'_>) -> Result<Option<String>> {
        let found = differing_pair(&self.link, &self.sight(checkpoint), input(checkpoint), pair, &run.stop)?;
        let entry = checkpoint.catalog.tensor(pair[0]);
        Ok(found.map(|(chunk, element)| {
            let index = entry.chunks.tile(chunk as usize).global_index(element);
            format!("first difference at index {:?} of {}", index.as_slice(), entry.chunk_name(chunk))
        }))
    }

    /// Returns which processes see which files of the checkpoint. All processes see the files of the checkpoint of
    /// `--fill-from`.
    fn sight(&self, checkpoint: &Checkpoint) -> FileVisibility {
        if self.see_apart() {
            FileVisibility::from_files(&checkpoint.files, self.link.size())
        } else {
            FileVisibility::Shared
        }
    }

    /// Returns the facts that the exchange needs about the processes: their nodes, the files that each of them sees,
    /// the choice of replicas, and the method that reduces partial values.
    fn parties(&self, checkpoint: &Checkpoint) -> Topology {
        let sight = self.sight(checkpoint);
        Topology {
            visibility: sight,
            nodes: self.nodes.clone(),
            replica_choice: self.counting,
            reducing: self.reducing,
        }
    }

    /// Writes the byte ranges of DST that no journal records as done, together with the other processes. Returns
    /// statistics of this process, with the totals of all processes. Collective.
    ///
    /// # Errors
    /// The errors of [`Exchange::run`].
    pub fn fill(
        &self,
        checkpoint: &Checkpoint,
        reservation: &Reservation,
        writing: WriteContext<'_>,
        progress: &dyn Progress,
    ) -> Result<Stats> {
        let files = &reservation.files;
        let owners = FileOwners::new(files, &agree(&self.link, files, writing.log.todo())?);
        let parties = self.parties(checkpoint);
        let exchange = self.exchange((checkpoint, reservation), &parties, &owners);
        let stats = match self.link.way() {
            Transport::Copy => unreachable!("processes that copy files of SRC exchange nothing"),
            #[cfg(feature = "mpi")]
            Transport::Mpi => {
                let mpi = self.link.mpi().expect("they have met by it");
                exchange.run(mpi, HostShuffle::new(mpi), writing)?
            }
            Transport::Nccl(gpu, nccl) => {
                let arithmetic = exchange.computes().then(|| arithmetic(gpu, progress)).flatten();
                // Kernels are compiled here, so that no round waits for the compiler.
                let shuffle = self.link.all_ok(DeviceShuffle::new(gpu, nccl, arithmetic))?;
                exchange.run(nccl, shuffle, writing)?
            }
        };
        let Traffic { sent, received } = stats.traffic;
        progress.detail(&format!("sent {}, received {}", human_bytes(sent), human_bytes(received)));
        // No process continues before all are done, so the journals are complete when the totals are known.
        let own = GlobalTotals { received, nccl_reduced: stats.nccl_reduced_bytes };
        Ok(Stats { global_totals: own.sum_over_processes(&self.link)?, ..stats })
    }

    /// Computes, without sending tensor data, the statistics that the exchange would have, and the number of bytes that
    /// each process would read, send and receive.
    ///
    /// # Errors
    /// The errors of [`Exchange::dry_run`].
    pub fn dry_run(
        &self,
        checkpoint: &Checkpoint,
        reservation: &Reservation,
        run: &Run<'_>,
    ) -> Result<(Stats, Vec<Load>)> {
        let files = &reservation.files;
        let of = self.link.size();
        let todos: Vec<Extents> = (0..of).map(|index| own_rank_files(files, Part { index, of })).collect();
        let (parties, owners) = (self.parties(checkpoint), FileOwners::new(files, &todos));
        self.exchange((checkpoint, reservation), &parties, &owners).dry_run(&run.stop)
    }

    fn exchange<'a>(
        &self,
        (checkpoint, reservation): (&'a Checkpoint, &'a Reservation),
        parties: &'a Topology,
        owners: &'a FileOwners,
    ) -> Exchange<'a> {
        Exchange { input: input(checkpoint), reservation, parties, owners, bucket_bytes: self.bucket.bytes() }
    }

    /// Informs the other processes that this process ends, with `error` as the reason.
    pub fn fail(&self, error: &Error) {
        self.link.fail(error);
    }

    /// Returns the value of `mine` if every process succeeded; otherwise all processes return an error. Collective.
    ///
    /// # Errors
    /// The error of `mine`, and the errors of [`Communicator::vote`].
    pub fn all_ok<T>(&self, mine: Result<T>) -> Result<T> {
        self.link.all_ok(mine)
    }

    /// Waits until all processes have reached this call. Collective.
    ///
    /// # Errors
    /// The errors of [`Communicator::barrier`].
    pub fn barrier(&self) -> Result<()> {
        self.link.barrier()
    }

    /// Disconnects in an orderly way. `has_published` is true if DST was published, and false after a dry run.
    pub fn leave(self, has_published: bool) {
        let Self { link, copying, mut work, .. } = self;
        drop(copying);
        if link.leave().is_ok() {
            work.leave(has_published);
        }
    }
}

/// Refuses combinations of options that are never valid, independent of SRC and of the other processes.
///
/// # Errors
/// `Usage` if `--fast-reduce` is combined with an option that excludes it.
pub fn refuse_senseless(args: &ConvertOptions) -> Result<()> {
    if !args.exchange.fast_reduce {
        return Ok(());
    }
    if matches!(args.exchange.backend, Backend::Cpu | Backend::Mpi) {
        return Err(Error::usage(
            "options::fast_reduce reduces with NCCL, so it cannot be used with options::backend cpu or mpi",
            "omit options::fast_reduce, or use options::backend nccl",
        ));
    }
    if args.execute.verify {
        return Err(Error::usage(
            "options::verify cannot be used with options::fast_reduce: NCCL's summation order changes the last bits",
            "omit options::verify or options::fast_reduce",
        ));
    }
    Ok(())
}

/// Name of the metadata mirror's folder in the folder of a launch.
const MIRROR: &str = "mirror";

/// Connects to the other processes of the run: by MPI if MPI started the processes and the backend is not `cpu`,
/// otherwise by message files beside DST.
fn meet(destination: &Path, args: &ConvertOptions, run: &Run<'_>) -> Result<(Meeting, WorkFolder)> {
    let launch = &run.launch;
    let work = WorkFolder::beside(destination, launch.part, launch.run.as_deref())?;
    #[cfg(feature = "mpi")]
    if args.exchange.backend != Backend::Cpu && crate::comm::mpi::is_under_mpi(launch, &process_environment) {
        return meet_by_mpi(work, run);
    }
    let installed = match args.exchange.backend {
        Backend::Nccl => gpu::check_installed(&gpu::Settings::new(&process_environment)),
        _ => Ok(()),
    };
    let mut limit = meet_within();
    if let Err(lack) = &installed {
        run.progress.outcome(&format!("{lack}; this process stops after it has informed the other processes"));
        limit = limit.min(fault::wait_time(LACKING_WITHIN, LACKING_HURRIED));
    }
    let print = wait_printer(run);
    let met = Records::meet(work.of_run(), launch.part, wait_notices(limit, &print), &run.stop);
    match (met, installed) {
        (Ok(records), installed) => {
            let records = records.reporting(slow_reporter(run));
            records.all_ok(installed).map_err(|error| ProcessTable::unknown(launch.part).name(error))?;
            Ok((Meeting::Records(Arc::new(records)), work))
        }
        (Err(Error::Comm(_)), Err(lack)) => Err(lack),
        (Err(error), _) => Err(ProcessTable::unknown(launch.part).name(error)),
    }
}

/// Connects to the other processes by MPI, and agrees with them on a folder for the metadata mirror.
#[cfg(feature = "mpi")]
fn meet_by_mpi(mut work: WorkFolder, run: &Run<'_>) -> Result<(Meeting, WorkFolder)> {
    let stop = run.stop.clone();
    let mpi = crate::comm::mpi::Mpi::world(run.launch.part, Arc::new(move || stop.check()))?;
    work.make_for(&mpi).map_err(|error| ProcessTable::unknown(run.launch.part).name(error))?;
    Ok((Meeting::Mpi(Arc::new(mpi)), work))
}

/// Returns true if an error says that a file does not exist.
fn is_not_there(error: &Error) -> bool {
    matches!(error, Error::Storage(StorageError::Io { source, .. }) if source.kind() == ErrorKind::NotFound)
}

/// Returns the cause of an error about a missing file: another process may have ended and removed the file. Waits up to
/// two seconds for a sign that a process has ended, and then returns the error about that process. Returns `error` if
/// there is no such sign.
fn cause(link: &Link, error: Error) -> Error {
    let begun = Instant::now();
    while begun.elapsed() < DETECTED_WITHIN {
        if let Err(gone) = link.check() {
            return gone;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    error
}
