//! The processes of a run that need each other: those of `--source per-rank`, of `--backend nccl` and of `--backend mpi`.
//!
//! They meet, make a [metadata mirror](crate::metadata_mirror) of SRC if no process sees all of it, and stay connected until DST is
//! published. Then they [exchange](crate::exchange) what they read, or [copy](crate::exchange::source_copy) the files that
//! only some of them see, and go on as processes that all see SRC. A process that fails says so to the others, and nobody waits
//! for one that is gone.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::bucket::Bucket;
use super::link::{Link, LinkRequest, Meeting, Transport, arithmetic, check_mpi};
use super::memory::room_before_layout;
use super::nesting::refuse_nesting;
use super::option_consistency;
use super::process_table::ProcessTable;
use super::reading::input;
use super::run::Run;
use super::space::no_space;
use super::waiting::{meet_within, patience, slow_reporter, teller};
use super::work_folder::WorkFolder;
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

/// The longest time until all hear of a process that is gone.
const HEARD_WITHIN: Duration = Duration::from_secs(2);

/// How long a process that lacks what is asked of it waits for those who are to hear of that.
const LACKING_WITHIN: Duration = Duration::from_secs(10);
const LACKING_HURRIED: Duration = Duration::from_secs(3);

pub struct Peers {
    link: Link,
    /// `None` where all see SRC.
    mirror: Option<MetadataMirror>,
    /// For each rank its node.
    nodes: Vec<u32>,
    roster: ProcessTable,
    counting: ReplicaChoice,
    reducing: ReductionMethod,
    bucket: Bucket,
    /// Process 0 holds it while the copy of SRC is in use.
    copying: Option<Presence>,
    // Dropped last: mirror and copy are in it.
    work: WorkFolder,
}

impl Peers {
    /// Meet the others and read SRC with them, where this is to be done.
    ///
    /// # Errors
    /// `Usage` where they do not run at the same time, `Comm` naming those that do not come, and as reading SRC.
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
                    run.progress.detail("backend cpu: all processes see SRC, and each reads what it writes");
                }
                return Ok(None);
            }
        };
        if is_per_rank && launch.part.is_alone() {
            return Err(Error::usage(
                "options::source per-rank: this is the only process",
                "start one where each part of SRC lies, by srun, torchrun or mpirun, or with options::part and options::parts",
            ));
        }
        if !launch.waits && !launch.part.is_alone() {
            let who = if launch.launcher == Launcher::SlurmArray {
                "elements of an array"
            } else {
                "with options::no_wait they"
            };
            return Err(Error::usage(
                format!("{option}: processes have to run at the same time, and {who} may not"),
                "start them by srun, torchrun or mpirun",
            ));
        }
        if is_per_rank && args.execute.verify {
            return Err(Error::usage(
                "options::verify reads all of SRC again, which no process sees with options::source per-rank",
                "leave it out; options::check_crc holds the sums that SRC has against its data",
            ));
        }
        let destination = args.dst.as_deref().ok_or_else(|| {
            Error::usage(
                format!("{option}: processes meet beside DST, which is not given"),
                "say DST with options::dry_run, too",
            )
        })?;
        // What is read is never written to, not even to meet there.
        refuse_nesting("the source", &args.src, destination)?;
        let (met, work) = meet(destination, args, run)?;
        let mut link = Link::new(met);
        let roster = ProcessTable::meet(&link).map_err(|error| ProcessTable::unknown(launch.part).name(error))?;
        let mut deciding = run.labels.clone();
        if args.exchange.fast_reduce {
            deciding.insert(String::from("options::fast_reduce"), String::new());
        }
        let agreed =
            option_consistency::agree(&link, args).and_then(|()| option_consistency::compare(&link, &deciding));
        let nodes = agreed.and_then(|()| Topology::gather_nodes(&link)).map_err(|error| roster.name(error))?;
        // What DST takes is not known yet. It makes rounds shorter, never longer.
        let rounds = Bucket::of(&args.exchange).within(room_before_layout(&args.source, &run.options));
        let linking = LinkRequest {
            args: &args.exchange,
            rounds,
            local_rank: launch.local_rank.unwrap_or_else(|| Topology::local_rank(&nodes, launch.part.index)),
            roster: &roster,
            progress: run.progress,
        };
        let chosen = link.choose(&linking).map_err(|error| roster.name(error));
        chosen.inspect_err(|error| link.fail(error))?;
        // What a user has decided on may be what differs, compared or not.
        let counting = if args.checks.on_conflict.is_some() { ReplicaChoice::LowestRank } else { ReplicaChoice::Any };
        let reducing = match link.way() {
            Transport::Nccl(..) if args.exchange.fast_reduce => ReductionMethod::Nccl,
            _ => ReductionMethod::InRankOrder,
        };
        let bucket = Bucket::of(&args.exchange);
        let mut peers = Self { link, mirror: None, nodes, roster, counting, reducing, bucket, copying: None, work };
        let read = peers.read(args, options, run).map_err(|error| {
            let error = if is_not_there(&error) { cause(&peers.link, error) } else { error };
            peers.roster.name(error)
        });
        let checkpoint = read.inspect_err(|error| peers.fail(error))?;
        Ok(Some((peers, checkpoint)))
    }

    /// Reads the metadata of SRC with the others. Collective.
    fn read(&mut self, args: &ConvertOptions, options: &ReadOptions, run: &Run<'_>) -> Result<Checkpoint> {
        self.link.begin("reading the metadata of SRC");
        if args.exchange.source == SourceVisibility::Shared {
            let checkpoint = Checkpoint::open(&args.src, options).map_err(|error| error.within(&args.src));
            return self.link.settle(checkpoint);
        }
        let mirror = self.work.of_run().join(MIRROR);
        let twin = self.mirror.insert(metadata_mirror::create(&self.link, &args.src, &mirror)?);
        if twin.sees_no_files(run.launch.part.index) {
            let src = args.src.display();
            run.progress.warning(&format!("no files at {src}: this process reads nothing"));
        }
        let checkpoint = twin.open(options).map_err(|error| {
            let error = if twin.is_whole() { error } else { cause(&self.link, error) };
            self.roster.locate(error, twin)
        });
        self.link.settle(checkpoint)
    }

    /// Whether processes exchange what they read. Else each reads what it writes, files of SRC from a copy where need be.
    #[must_use]
    pub fn exchange_bytes(&self) -> bool {
        !matches!(self.link.way(), Transport::Copy)
    }

    /// Lets process 0 decide for all whether files of SRC are copied: `None` if not, else the bytes of DST that are written
    /// beside the copy. Collective.
    ///
    /// # Errors
    /// `Comm` with the error of process 0, which has its own.
    pub fn decide(&self, decide: impl FnOnce() -> Result<Option<u64>>) -> Result<Option<u64>> {
        let decided = self.link.settle(if self.link.rank() == 0 { decide() } else { Ok(None) })?;
        let said = self.link.gather(&decided.map_or_else(Vec::new, |bytes| bytes.to_le_bytes().to_vec()))?;
        Ok(said.first().and_then(|first| Some(u64::from_le_bytes(first.as_slice().try_into().ok()?))))
    }

    /// Copies the files of SRC that hold what is reserved and that only some processes see. `beside` is the space that DST
    /// takes on the same file system. Nothing where processes exchange. Collective.
    ///
    /// # Errors
    /// `Usage` where there is no space; as [`SourceCopy::run`].
    pub fn copy_source(
        &mut self,
        checkpoint: &mut Checkpoint,
        reservation: &Reservation,
        beside: u64,
        resumes: bool,
        run: &Run<'_>,
    ) -> Result<()> {
        let Some(twin) = self.mirror.as_ref().filter(|_| !self.exchange_bytes()) else { return Ok(()) };
        self.work.uses_copy(resumes);
        let folder = self.work.copy();
        let source = (&checkpoint.catalog, reservation);
        let copy = SourceCopy::plan(folder, twin.own(), &checkpoint.files, source, self.link.size());
        let begun =
            if self.link.rank() == 0 { self.begin_copy(&copy, beside, resumes, run).map(Some) } else { Ok(None) };
        self.copying = self.link.settle(begun)?;
        let progress = Task::start(run.progress, "copying", copy.share(self.link.rank()));
        self.link.begin("copying files of SRC");
        copy.run(&self.link, &progress, &run.stop)?;
        self.link.begin("writing DST");
        copy.turn(&mut checkpoint.files)
    }

    /// What process 0 does before files are copied.
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
                "copying {left} of {bytes} in {files} files that only some processes see to {}",
                folder.display()
            ));
        }
        Ok(lease)
    }

    /// Say of the process that an error names, or whose file is damaged, all that is known.
    #[must_use]
    pub fn name(&self, error: Error) -> Error {
        // What is in files that are there is as true when others end because of it, too.
        let is_of_files = is_not_there(&error) || error.kind() == "missing";
        let has_lost = is_of_files && self.mirror.as_ref().is_some_and(|twin| !twin.is_whole());
        let error = self.roster.name(if has_lost { cause(&self.link, error) } else { error });
        match &self.mirror {
            Some(twin) => self.roster.locate(error, twin),
            None => error,
        }
    }

    /// Who sees the files of chunks, where not all processes do: `a.pt is with process 0 of 2 (n1, pid 7), b.pt with ..`
    #[must_use]
    pub fn whereabouts(&self, checkpoint: &Checkpoint, entry: &TensorEntry, chunks: [u32; 2]) -> Option<String> {
        let files = &checkpoint.files;
        let [first, second] = chunks.map(|chunk| {
            let file = entry.chunks.location(chunk as usize).file()?;
            let name = files.path(file).file_name()?.display();
            Some(format!("{name} is with {}", self.roster.names(files.seen_by(file)?)))
        });
        Some(format!("{}, {}", first?, second?))
    }

    /// Who reduces.
    #[must_use]
    pub fn reducing(&self) -> ReductionMethod {
        self.reducing
    }

    /// Whether each sees only its own files of SRC.
    #[must_use]
    pub fn see_apart(&self) -> bool {
        self.mirror.is_some()
    }

    /// How long rounds are.
    #[must_use]
    pub fn bucket(&self) -> Bucket {
        self.bucket
    }

    /// Makes rounds as long as all processes have memory for; this process has `room` bytes. Collective.
    ///
    /// # Errors
    /// As [`Bucket::agree`].
    pub fn settle_bucket(&mut self, room: u64, progress: &dyn Progress) -> Result<()> {
        let wanted = self.bucket;
        self.bucket = wanted.within(room).agree(&self.link)?;
        if self.bucket != wanted {
            let (wanted, settled) = (human_bytes(wanted.bytes()), human_bytes(self.bucket.bytes()));
            progress.detail(&format!(
                "options::bucket_size {settled}: options::max_memory has no room for six times {wanted}"
            ));
        }
        Ok(())
    }

    /// Who can read all of a file of SRC, where not all can.
    #[must_use]
    pub fn carriers(&self, path: &Path) -> Vec<u32> {
        let apart = self.mirror.as_ref().filter(|twin| !twin.holds_all_of(path));
        apart.map_or_else(Vec::new, |twin| twin.seen_by(path).to_vec())
    }

    /// Checks that all processes make the same.
    ///
    /// # Errors
    /// `Comm` naming one that does not.
    pub fn compare(&self, fingerprint: Fingerprint) -> Result<()> {
        let own = fingerprint.to_string();
        let said = self.link.gather(own.as_bytes())?;
        let Some(rank) = said.iter().position(|other| *other != said[0]) else { return Ok(()) };
        // All have heard it before one goes: else some would hear no more than that.
        self.link.barrier()?;
        Err(Error::Comm(CommError {
            rank: u32::try_from(rank).expect("a rank").into(),
            op: "plan",
            detail: String::from("it makes something else than process 0 does"),
            hint: Some(String::from("start all processes with the same options, of the same dtshard")),
        }))
    }

    /// As [`checks::differing`](super::checks::differing), of replicas that no process sees all of. Collective.
    ///
    /// # Errors
    /// As [`differing`].
    pub fn differing(
        &self,
        checkpoint: &Checkpoint,
        tensors: &[TensorId],
        progress: &Task<'_>,
        run: &Run<'_>,
    ) -> Result<Vec<(TensorId, ReplicaDifference)>> {
        differing_replicas(&self.link, &self.sight(checkpoint), input(checkpoint), tensors, progress, &run.stop)
    }

    /// How two tensors differ that should be the same and are not. Collective.
    ///
    /// # Errors
    /// As [`differing_pair`].
    pub fn difference(&self, checkpoint: &Checkpoint, pair: [TensorId; 2], run: &Run<'_>) -> Result<Option<String>> {
        let found = differing_pair(&self.link, &self.sight(checkpoint), input(checkpoint), pair, &run.stop)?;
        let entry = checkpoint.catalog.tensor(pair[0]);
        Ok(found.map(|(chunk, element)| {
            let index = entry.chunks.tile(chunk as usize).global_index(element);
            format!("first at {:?} of {}", index.as_slice(), entry.chunk_name(chunk))
        }))
    }

    /// Who sees the files of a checkpoint that SRC is in: others may be beside them.
    fn sight(&self, checkpoint: &Checkpoint) -> FileVisibility {
        if self.see_apart() {
            FileVisibility::from_files(&checkpoint.files, self.link.size())
        } else {
            FileVisibility::Shared
        }
    }

    fn parties(&self, checkpoint: &Checkpoint) -> Topology {
        let sight = self.sight(checkpoint);
        Topology {
            visibility: sight,
            nodes: self.nodes.clone(),
            replica_choice: self.counting,
            reducing: self.reducing,
        }
    }

    /// Fill what is to be done, with the others. Collective.
    ///
    /// # Errors
    /// As [`Exchange::run`].
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
                // Compiled by now, where it is needed: in the rounds nobody waits for that.
                let shuffle = self.link.settle(DeviceShuffle::new(gpu, nccl, arithmetic))?;
                exchange.run(nccl, shuffle, writing)?
            }
        };
        let Traffic { sent, received } = stats.traffic;
        progress.detail(&format!("sent {}, received {}", human_bytes(sent), human_bytes(received)));
        // Who is done first does not go on before all are: what is recorded by then is all there is.
        let own = GlobalTotals { received, nccl_reduced: stats.nccl_reduced_bytes };
        Ok(Stats { global_totals: own.sum_over_processes(&self.link)?, ..stats })
    }

    /// What it takes to write all, and what each of them would read, send and receive.
    ///
    /// # Errors
    /// As [`Exchange::dry_run`].
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

    /// Tell the others that this one goes, because of an error.
    pub fn fail(&self, error: &Error) {
        self.link.fail(error);
    }

    /// Goes on where all are well. Collective.
    ///
    /// # Errors
    /// `mine`, and as [`Communicator::settle`].
    pub fn settle<T>(&self, mine: Result<T>) -> Result<T> {
        self.link.settle(mine)
    }

    /// Wait until all are here. Collective.
    ///
    /// # Errors
    /// As [`Communicator::barrier`].
    pub fn barrier(&self) -> Result<()> {
        self.link.barrier()
    }

    /// Leaves when all is done: DST is there, or was not to be written.
    pub fn leave(self, has_published: bool) {
        let Self { link, copying, mut work, .. } = self;
        drop(copying);
        if link.leave().is_ok() {
            work.leave(has_published);
        }
    }
}

/// Refuses options that contradict each other, whatever the run.
///
/// # Errors
/// `Usage` where --fast-reduce would have no effect, or a wrong one.
pub fn refuse_senseless(args: &ConvertOptions) -> Result<()> {
    if !args.exchange.fast_reduce {
        return Ok(());
    }
    if matches!(args.exchange.backend, Backend::Cpu | Backend::Mpi) {
        return Err(Error::usage(
            "options::fast_reduce lets NCCL reduce, and with options::backend cpu or mpi there is none",
            "leave one of them out, or use options::backend nccl",
        ));
    }
    if args.execute.verify {
        return Err(Error::usage(
            "options::verify reduces all again in the order of ranks, and with options::fast_reduce other bits are right, too",
            "leave one of them out",
        ));
    }
    Ok(())
}

/// The name of the metadata mirror in the folder of a run.
const MIRROR: &str = "mirror";

/// Meets the others, by MPI where that started them, else by records beside DST.
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
        run.progress.outcome(&format!("{lack}; it ends as soon as the others have heard that"));
        limit = limit.min(fault::wait_time(LACKING_WITHIN, LACKING_HURRIED));
    }
    let tell = teller(run);
    let met = Records::meet(work.of_run(), launch.part, patience(limit, &tell), &run.stop);
    match (met, installed) {
        (Ok(records), installed) => {
            let records = records.reporting(slow_reporter(run));
            records.settle(installed).map_err(|error| ProcessTable::unknown(launch.part).name(error))?;
            Ok((Meeting::Records(Arc::new(records)), work))
        }
        (Err(Error::Comm(_)), Err(lack)) => Err(lack),
        (Err(error), _) => Err(ProcessTable::unknown(launch.part).name(error)),
    }
}

/// Meets the others by MPI, and agrees on a folder for the metadata mirror.
#[cfg(feature = "mpi")]
fn meet_by_mpi(mut work: WorkFolder, run: &Run<'_>) -> Result<(Meeting, WorkFolder)> {
    let stop = run.stop.clone();
    let mpi = crate::comm::mpi::Mpi::world(run.launch.part, Arc::new(move || stop.check()))?;
    work.make_for(&mpi).map_err(|error| ProcessTable::unknown(run.launch.part).name(error))?;
    Ok((Meeting::Mpi(Arc::new(mpi)), work))
}

fn is_not_there(error: &Error) -> bool {
    matches!(error, Error::Storage(StorageError::Io { source, .. }) if source.kind() == ErrorKind::NotFound)
}

/// Why something fails that is nobody's fault here: where files of the meeting are gone, somebody is gone who took them
/// away, or was to keep them.
fn cause(link: &Link, error: Error) -> Error {
    let begun = Instant::now();
    while begun.elapsed() < HEARD_WITHIN {
        if let Err(gone) = link.check() {
            return gone;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    error
}
