//! The processes of a run that give each other what they read: those of `--source per-rank` and of `--backend nccl`.
//!
//! They meet beside DST, make a [twin](crate::twin) of SRC there if none sees all of it, and stay connected until DST is
//! published. Whoever fails says so to the others, and nobody waits for one that is gone.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::alike;
use super::bucket::Bucket;
use super::link::{Link, Linking, arithmetic};
use super::meeting_place::MeetingPlace;
use super::memory::room_before_layout;
use super::nesting::refuse_nesting;
use super::reading::input;
use super::roster::Roster;
use super::run::Run;
use super::waiting::{meet_within, patience, teller};
use crate::catalog::{Reservation, TensorEntry, TensorId};
use crate::comm::{
    Communicator, KeepGoing, Launcher, Liveness, Meeting, Mesh, Part, Patience, Place, Traffic, meet,
    process_environment,
};
use crate::convert::options::{Backend, ConvertOptions, SourceVisibility};
use crate::error::{Error, Result};
use crate::exec::Extents;
use crate::exec::compare::ReplicaDifference;
use crate::exec::copy::{Stats, Writing};
use crate::exec::division::own_files;
use crate::exec::exchange::{
    Counting, Exchange, HostShuffle, Load, Owners, Parties, Reducing, Sight, agree, differing, differing_pair,
};
use crate::exec::fingerprint::Fingerprint;
use crate::exec::together::Together;
use crate::fault;
use crate::format::{Checkpoint, ReadOptions};
use crate::gpu::{self, DeviceShuffle};
use crate::progress::{Progress, Task};
use crate::quantity::human_bytes;
use crate::twin::{self, Twin};

/// How long it takes at the most until all hear of one that is gone.
const HEARD_WITHIN: Duration = Duration::from_secs(1);

/// How long one that lacks what is asked of it stays for those who are to hear of that.
const TOLD_WITHIN: Duration = Duration::from_secs(10);
const TOLD_SOON: Duration = Duration::from_secs(3);

pub struct Peers {
    link: Link,
    /// `None` where all see SRC.
    twin: Option<Twin>,
    /// For each rank its node.
    nodes: Vec<u32>,
    roster: Roster,
    counting: Counting,
    reducing: Reducing,
    bucket: Bucket,
    // Dropped last: the twin is in it.
    place: MeetingPlace,
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
        if !is_per_rank && backend != Backend::Nccl {
            return Ok(None);
        }
        if is_per_rank && launch.part.is_alone() {
            return Err(Error::usage(
                "--source per-rank: this is the only process",
                "start one where each part of SRC lies, by srun, torchrun or mpirun, or with --part and --parts",
            ));
        }
        let option = if is_per_rank { "--source per-rank" } else { "--backend nccl" };
        if !launch.waits && !launch.part.is_alone() {
            let who =
                if launch.launcher == Launcher::SlurmArray { "elements of an array" } else { "with --no-wait they" };
            return Err(Error::usage(
                format!("{option}: processes have to run at the same time, and {who} may not"),
                "start them by srun, torchrun or mpirun",
            ));
        }
        if is_per_rank && args.execute.verify {
            return Err(Error::usage(
                "--verify reads all of SRC again, which no process sees with --source per-rank",
                "leave it out; --check-crc holds the sums that SRC has against its data",
            ));
        }
        let destination = args.dst.as_deref().ok_or_else(|| {
            Error::usage(
                format!("{option}: processes meet beside DST, which is not given"),
                "say DST with --dry-run, too",
            )
        })?;
        // What is read is never written to, not even to meet there.
        refuse_nesting("the source", &args.src, destination)?;
        let tell = teller(run);
        let patience = patience(meet_within(), &tell);
        let mut met = meet_others(destination, args, run, patience, true)?;
        let (mesh, place) = (&met.mesh, &mut met.place);
        // What keeps the first from making it is its own, and the others name it: it is not theirs to explain.
        let folder = place.of_run(mesh, patience).map_err(|error| met.roster.name(error));
        let folder = folder.inspect_err(|error| mesh.fail(&error.to_string()))?;
        let read = || -> Result<_> {
            let twin = is_per_rank.then(|| twin::make(mesh, &args.src, &folder.join("source"))).transpose()?;
            let checkpoint = match &twin {
                Some(twin) => {
                    if twin.is_blind(launch.part.index) {
                        let src = args.src.display();
                        run.progress.warning(&format!("no files at {src}: this process reads nothing"));
                    }
                    twin.open(options).map_err(|error| {
                        let error = if twin.is_whole() { error } else { cause(mesh, error) };
                        met.roster.locate(error, twin)
                    })
                }
                None => Checkpoint::open(&args.src, options).map_err(|error| error.within(&args.src)),
            };
            Ok((twin, mesh.settle(checkpoint)?))
        };
        let read = { read }().map_err(|error| {
            let error = if is_not_there(&error) { cause(mesh, error) } else { error };
            met.roster.name(error)
        });
        let (twin, checkpoint) = read.inspect_err(|error| mesh.fail(&error.to_string()))?;
        // What DST takes is not known yet. It makes rounds shorter, never longer.
        let most = Bucket::of(&args.exchange).within(room_before_layout(&args.source, &run.options));
        Ok(Some((Self::linked(args, met, twin, most, run)?, checkpoint)))
    }

    /// Meet the others between whose GPUs bytes are to go in such rounds, of a SRC that all see. `None` where one of them
    /// lacks what that takes.
    ///
    /// # Errors
    /// `Comm` where not all come within `limit`, `Usage` where they have other options, and from the devices.
    pub fn join(
        args: &ConvertOptions,
        destination: &Path,
        rounds: Bucket,
        run: &Run<'_>,
        limit: Duration,
    ) -> Result<Option<Self>> {
        let tell = teller(run);
        // All go on without each other where they do not meet, and nothing is left beside DST then.
        let met = meet_others(destination, args, run, patience(limit, &tell), false)?;
        let peers = Self::linked(args, met, None, rounds, run)?;
        if let Link::Devices(..) = peers.link {
            return Ok(Some(peers));
        }
        peers.leave(false);
        Ok(None)
    }

    /// Choose what bytes go by between processes that have met, in rounds of `most` bytes or less. Collective.
    fn linked(args: &ConvertOptions, met: Met, twin: Option<Twin>, most: Bucket, run: &Run<'_>) -> Result<Self> {
        let Met { mesh, nodes, roster, place } = met;
        let linking = Linking {
            args: &args.exchange,
            rounds: most,
            local_rank: local_rank(run, &nodes),
            roster: &roster,
            progress: run.progress,
        };
        let link = Link::choose(mesh, &linking).map_err(|error| roster.name(error))?;
        // What a user has decided on may be what differs, compared or not.
        let counting = if args.checks.on_conflict.is_some() { Counting::First } else { Counting::Any };
        let reducing = match &link {
            Link::Devices(..) if args.exchange.fast_reduce => Reducing::ByNccl,
            Link::Devices(..) | Link::Hosts(_) => Reducing::InRankOrder,
        };
        Ok(Self { link, twin, nodes, roster, counting, reducing, bucket: Bucket::of(&args.exchange), place })
    }

    /// Say of the process that an error names, or whose file is damaged, all that is known.
    #[must_use]
    pub fn name(&self, error: Error) -> Error {
        // What is in files that are there is as true when others end because of it, too.
        let is_of_files = is_not_there(&error) || error.kind() == "missing";
        let has_lost = is_of_files && self.twin.as_ref().is_some_and(|twin| !twin.is_whole());
        let error = self.roster.name(if has_lost { cause(self.mesh(), error) } else { error });
        match &self.twin {
            Some(twin) => self.roster.locate(error, twin),
            None => error,
        }
    }

    /// Who sees the files of chunks, where not all processes do: `a.pt is with process 0 of 2 (n1, pid 7), b.pt with ..`
    #[must_use]
    pub fn whereabouts(&self, checkpoint: &Checkpoint, entry: &TensorEntry, chunks: [u32; 2]) -> Option<String> {
        let files = &checkpoint.files;
        let [first, second] = chunks.map(|chunk| {
            let file = entry.chunks.place(chunk as usize).file()?;
            let name = files.path(file).file_name()?.display();
            Some(format!("{name} is with {}", self.roster.names(files.seen_by(file)?)))
        });
        Some(format!("{}, {}", first?, second?))
    }

    /// Who reduces.
    #[must_use]
    pub fn reducing(&self) -> Reducing {
        self.reducing
    }

    /// Whether each sees only its own files of SRC.
    #[must_use]
    pub fn see_apart(&self) -> bool {
        self.twin.is_some()
    }

    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        self.link.mesh()
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
        self.bucket = wanted.within(room).agree(self.mesh())?;
        if self.bucket != wanted {
            let (wanted, settled) = (human_bytes(wanted.bytes()), human_bytes(self.bucket.bytes()));
            progress.detail(&format!("--bucket-size {settled}: --max-memory has no room for six times {wanted}"));
        }
        Ok(())
    }

    /// Who can read all of a file of SRC, where not all can.
    #[must_use]
    pub fn carriers(&self, path: &Path) -> Vec<u32> {
        let apart = self.twin.as_ref().filter(|twin| !twin.holds_whole(path));
        apart.map_or_else(Vec::new, |twin| twin.seen_by(path).to_vec())
    }

    /// All make the same. `told` are the options that decide on that.
    ///
    /// # Errors
    /// `Comm` naming one that does not, and by which option.
    pub fn compare(&self, fingerprint: Fingerprint, told: &BTreeMap<String, String>) -> Result<()> {
        let own = fingerprint.to_string();
        let said = self.mesh().gather(own.as_bytes())?;
        let Some(rank) = said.iter().position(|other| *other != said[0]) else { return Ok(()) };
        let apart = alike::told_apart(self.mesh(), told, rank)?.map_or_else(String::new, |apart| format!(": {apart}"));
        // All have heard it before one goes: else some would hear no more than that.
        self.mesh().barrier()?;
        Err(Error::Comm {
            rank: u32::try_from(rank).expect("a rank").into(),
            op: "plan",
            detail: format!("it makes something else than process 0 does{apart}"),
            hint: Some(String::from("start all processes with the same options, of the same dtshard")),
        })
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
        differing(self.mesh(), &self.sight(checkpoint), input(checkpoint), tensors, progress, &run.stop)
    }

    /// How two tensors differ that should be the same and are not. Collective.
    ///
    /// # Errors
    /// As [`differing_pair`].
    pub fn difference(&self, checkpoint: &Checkpoint, pair: [TensorId; 2], run: &Run<'_>) -> Result<Option<String>> {
        let found = differing_pair(self.mesh(), &self.sight(checkpoint), input(checkpoint), pair, &run.stop)?;
        let entry = checkpoint.catalog.tensor(pair[0]);
        Ok(found.map(|(chunk, element)| {
            let index = entry.chunks.tile(chunk as usize).index(element);
            format!("first at {:?} of {}", index.as_slice(), entry.chunk_name(chunk))
        }))
    }

    /// Who sees the files of a checkpoint that SRC is in: others may be beside them.
    fn sight(&self, checkpoint: &Checkpoint) -> Sight {
        if self.see_apart() { Sight::of(&checkpoint.files, self.mesh().size()) } else { Sight::Shared }
    }

    fn parties(&self, checkpoint: &Checkpoint) -> Parties {
        let sight = self.sight(checkpoint);
        Parties { sight, nodes: self.nodes.clone(), counting: self.counting, reducing: self.reducing }
    }

    /// Fill what is to be done, with the others. Collective.
    ///
    /// # Errors
    /// As [`Exchange::run`].
    pub fn fill(
        &self,
        checkpoint: &Checkpoint,
        reservation: &Reservation,
        writing: Writing<'_>,
        progress: &dyn Progress,
    ) -> Result<Stats> {
        let files = &reservation.files;
        let owners = Owners::new(files, &agree(self.mesh(), files, writing.log.todo())?);
        let parties = self.parties(checkpoint);
        let exchange = self.exchange((checkpoint, reservation), &parties, &owners);
        let stats = match &self.link {
            Link::Hosts(mesh) => exchange.run(mesh, HostShuffle::new(mesh), writing)?,
            Link::Devices(gpu, nccl) => {
                let arithmetic = exchange.computes().then(|| arithmetic(gpu, progress)).flatten();
                // Compiled by now, where it is needed: in the rounds nobody waits for that.
                let shuffle = self.mesh().settle(DeviceShuffle::new(gpu, nccl, arithmetic))?;
                exchange.run(nccl, shuffle, writing)?
            }
        };
        let Traffic { sent, received } = stats.traffic;
        progress.detail(&format!("sent {}, received {}", human_bytes(sent), human_bytes(received)));
        // Who is done first does not go on before all are: what is recorded by then is all there is.
        let own = Together { received, folded: stats.folded_bytes };
        Ok(Stats { together: own.add_up(self.mesh())?, ..stats })
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
        let of = self.mesh().size();
        let todos: Vec<Extents> = (0..of).map(|index| own_files(files, Part { index, of })).collect();
        let (parties, owners) = (self.parties(checkpoint), Owners::new(files, &todos));
        self.exchange((checkpoint, reservation), &parties, &owners).dry_run(&run.stop)
    }

    fn exchange<'a>(
        &self,
        (checkpoint, reservation): (&'a Checkpoint, &'a Reservation),
        parties: &'a Parties,
        owners: &'a Owners,
    ) -> Exchange<'a> {
        Exchange { input: input(checkpoint), reservation, parties, owners, bucket_bytes: self.bucket.bytes() }
    }

    /// Tell the others that this one goes, because of an error.
    pub fn fail(&self, error: &Error) {
        self.mesh().fail(&error.to_string());
    }

    /// Wait until all are here. Collective.
    ///
    /// # Errors
    /// As [`Communicator::barrier`].
    pub fn barrier(&self) -> Result<()> {
        self.mesh().barrier()
    }

    /// Go, when all is done: DST is there, or was not to be written. Whoever dies now has done his work.
    pub fn leave(self, has_published: bool) {
        let Self { link, mut place, .. } = self;
        if link.leave().is_ok() {
            place.leave(has_published);
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
    if args.exchange.backend == Backend::Cpu {
        return Err(Error::usage(
            "--fast-reduce lets NCCL reduce, and with --backend cpu there is none",
            "leave one of them out, or use --backend nccl",
        ));
    }
    if args.execute.verify {
        return Err(Error::usage(
            "--verify reduces all again in the order of ranks, and with --fast-reduce other bits are right, too",
            "leave one of them out",
        ));
    }
    Ok(())
}

/// Processes that have met, with the same options.
struct Met {
    mesh: Mesh,
    nodes: Vec<u32>,
    roster: Roster,
    // Dropped last, as with peers.
    place: MeetingPlace,
}

/// Meet the others beside DST.
fn meet_others(
    destination: &Path,
    args: &ConvertOptions,
    run: &Run<'_>,
    patience: Patience<'_>,
    calls_off: bool,
) -> Result<Met> {
    let launch = &run.launch;
    let place = MeetingPlace::beside(destination, launch.part)?;
    let wants_devices = args.exchange.backend == Backend::Nccl;
    let installed = if wants_devices { gpu::look(&gpu::Settings::new(&process_environment)) } else { Ok(()) };
    if let Err(lack) = &installed {
        run.progress.outcome(&format!("{lack}; it ends as soon as the others have heard that"));
    }
    let rendezvous = args.exchange.rendezvous.clone();
    let meeting = Meeting {
        part: launch.part,
        run: launch.run.as_deref(),
        place: &Place::choose(rendezvous, launch.launcher, &process_environment, place.folder().path())?,
        shared: Some(place.folder()),
        patience,
        calls_off,
        liveness: Liveness::default(),
        going: going(run, installed.is_err()),
    };
    let mesh = meet(&meeting).and_then(|control| Mesh::connect(control, patience));
    let (mesh, installed) = match (mesh, installed) {
        (Ok(mesh), installed) => (mesh, installed),
        (Err(_), Err(lack)) if run.stop.check().is_ok() => return Err(lack),
        (Err(error), _) => return Err(Roster::unknown(launch.part).name(error)),
    };
    let roster = Roster::meet(&mesh).map_err(|error| Roster::unknown(launch.part).name(error))?;
    let agreed = alike::agree(&mesh, args).and_then(|()| {
        if wants_devices {
            mesh.settle(installed)?;
        }
        Parties::meet(&mesh)
    });
    let nodes = agreed.map_err(|error| roster.name(error))?;
    Ok(Met { mesh, nodes, roster, place })
}

/// What ends a wait for others: a signal, and before long what this process lacks, which it only stays to tell.
fn going(run: &Run<'_>, is_to_end: bool) -> KeepGoing {
    let (stop, begun) = (run.stop.clone(), Instant::now());
    let told_within = fault::patience(TOLD_WITHIN, TOLD_SOON);
    Arc::new(move || {
        stop.check()?;
        if is_to_end && begun.elapsed() >= told_within {
            gpu::look(&gpu::Settings::new(&process_environment))
        } else {
            Ok(())
        }
    })
}

/// Which of the processes of its node this one is.
fn local_rank(run: &Run<'_>, nodes: &[u32]) -> u32 {
    run.launch.local_rank.unwrap_or_else(|| Parties::local_rank(nodes, run.launch.part.index))
}

fn is_not_there(error: &Error) -> bool {
    matches!(error, Error::Io { source, .. } if source.kind() == ErrorKind::NotFound)
}

/// Why something fails that is nobody's fault here: where files of the meeting are gone, somebody is gone who took them
/// away, or was to keep them.
fn cause(mesh: &Mesh, error: Error) -> Error {
    let begun = Instant::now();
    while begun.elapsed() < HEARD_WITHIN {
        if let Err(gone) = mesh.check() {
            return gone;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    error
}
