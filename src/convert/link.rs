//! What tensors and words go by between processes that have met.
//!
//! Words go by records in the [work folder](super::work_folder), by NCCL or by MPI. Tensors go from GPU to GPU by NCCL, from
//! host to host by MPI, or through files of SRC that are copied to where all processes see them.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use super::bucket::Bucket;
use super::process_table::ProcessTable;
#[cfg(feature = "mpi")]
use crate::comm::mpi::Mpi;
use crate::comm::{Communicator, Traffic};
use crate::convert::options::{Backend, ExchangeOptions};
use crate::error::{Error, Result};
use crate::exchange::records::Records;
use crate::gpu::{self, Arithmetic, Gpu, Nccl};
use crate::launch::process_environment;
use crate::progress::Progress;

/// What processes have met by.
pub enum Meeting {
    Records(Arc<Records>),
    #[cfg(feature = "mpi")]
    Mpi(Arc<Mpi>),
}

/// The way that tensors go between processes.
pub enum Transport {
    /// Each process reads what it writes: SRC, or a copy of files that it does not see.
    Copy,
    #[cfg(feature = "mpi")]
    Mpi,
    Nccl(Box<Gpu>, Nccl),
}

pub struct Link {
    way: Transport,
    met: Meeting,
}

/// What is to be linked, and who hears of it.
pub struct LinkRequest<'a> {
    pub args: &'a ExchangeOptions,
    /// They may be shorter yet.
    pub rounds: Bucket,
    pub local_rank: u32,
    pub roster: &'a ProcessTable,
    pub progress: &'a dyn Progress,
}

/// Asks what processes have met by, whatever that is.
macro_rules! of_met {
    ($met:expr, $control:ident => $body:expr) => {
        match $met {
            Meeting::Records($control) => $body,
            #[cfg(feature = "mpi")]
            Meeting::Mpi($control) => $body,
        }
    };
}

/// The error for `--backend mpi` where there is no MPI.
///
/// # Errors
/// `Usage` where this program was built without MPI, or was not started by it.
#[cfg(not(feature = "mpi"))]
pub fn check_mpi(_launch: &crate::launch::Launch) -> Result<()> {
    Err(Error::usage(
        "options::backend mpi: this dtshard was built without MPI",
        "build it with `cargo build --release --features mpi`, or leave options::backend out",
    ))
}

/// The error for `--backend mpi` where there is no MPI.
///
/// # Errors
/// `Usage` where this program was not started by MPI.
#[cfg(feature = "mpi")]
pub fn check_mpi(launch: &crate::launch::Launch) -> Result<()> {
    if crate::comm::mpi::is_under_mpi(launch, &process_environment) {
        return Ok(());
    }
    Err(Error::usage(
        "options::backend mpi: this process was not started under MPI",
        "start it by mpirun, or by srun with --mpi=pmix or --mpi=pmi2; or leave options::backend out",
    ))
}

impl Meeting {
    fn way<C>(&self, control: &Arc<C>, linking: &LinkRequest<'_>) -> Result<Transport>
    where
        C: Communicator + crate::comm::FailureNotes + 'static,
    {
        let LinkRequest { args, rounds, local_rank, progress, .. } = *linking;
        let local_rank = Some(local_rank);
        let settings = gpu::Settings::new(&process_environment);
        let (own, nccl) = match args.backend {
            Backend::Cpu => {
                progress.detail("backend cpu, as options::backend says");
                return Ok(Transport::Copy);
            }
            Backend::Mpi => return Ok(self.without_devices("as options::backend says", progress)),
            Backend::Nccl => {
                let own = control.settle(gpu::open(&settings, local_rank))?;
                let nccl = Nccl::meet(&own, settings.sharing, control)?;
                (own, nccl)
            }
            Backend::Auto => {
                let own = gpu::open(&settings, local_rank).and_then(|own| own.with_memory_for(rounds.bytes()));
                let own = match linking.all_have(&**control, own)? {
                    Ok(own) => own,
                    Err(lack) => return Ok(self.without_devices(&format!("not nccl: {lack}"), progress)),
                };
                match gpu::NcclSetup::new(&own, settings.sharing, control)? {
                    gpu::NcclSetup::Met(nccl) => (own, nccl),
                    gpu::NcclSetup::Missed(against) => {
                        let against = linking.roster.name(against);
                        // Other errors than of how processes were started deserve a look.
                        if !matches!(against, Error::Usage(_)) {
                            progress.warning(&format!("NCCL does not connect the GPUs: {against}"));
                        }
                        return Ok(self.without_devices(&format!("not nccl: {against}"), progress));
                    }
                }
            }
        };
        let version = own.nccl().ok().and_then(|nccl| nccl.version().ok());
        let version = version.map_or_else(String::new, |version| format!(" {version}"));
        progress.detail(&format!("backend nccl: bytes go by NCCL{version}, here from {:?}", own.device));
        progress.detail(&match own.packer.missing_kernel() {
            None => String::from("a kernel packs them"),
            Some(why) => format!("no kernel packs them, the driver copies, a call a copy: {why}"),
        });
        Ok(Transport::Nccl(Box::new(own), nccl))
    }

    /// The way that is left where NCCL is not taken, for this reason.
    fn without_devices(&self, why: &str, progress: &dyn Progress) -> Transport {
        match self {
            Self::Records(_) => {
                progress.detail(&format!("backend cpu: files that only some processes see are copied first, {why}"));
                Transport::Copy
            }
            #[cfg(feature = "mpi")]
            Self::Mpi(_) => {
                progress.detail(&format!("backend mpi: bytes go by {}, {why}", Mpi::library()));
                Transport::Mpi
            }
        }
    }
}

impl Link {
    /// Processes that have met, and have not chosen a way.
    #[must_use]
    pub fn new(met: Meeting) -> Self {
        Self { way: Transport::Copy, met }
    }

    /// Chooses the way that tensors go. Collective; all come to the same.
    ///
    /// # Errors
    /// As [`gpu::open`] where GPUs are asked for; `Comm`, and from the devices.
    pub fn choose(&mut self, linking: &LinkRequest<'_>) -> Result<()> {
        self.way = of_met!(&self.met, control => self.met.way(control, linking))?;
        Ok(())
    }

    /// Names what all processes do next, for reports of long waits. Waits for NCCL and MPI are not reported.
    pub fn begin(&self, doing: &'static str) {
        match &self.met {
            Meeting::Records(records) => records.begin(doing),
            #[cfg(feature = "mpi")]
            Meeting::Mpi(_) => {}
        }
    }

    #[must_use]
    pub fn way(&self) -> &Transport {
        &self.way
    }

    #[cfg(feature = "mpi")]
    #[must_use]
    pub fn mpi(&self) -> Option<&Mpi> {
        match &self.met {
            Meeting::Mpi(mpi) => Some(mpi),
            Meeting::Records(_) => None,
        }
    }
}

impl Communicator for Link {
    /// None: tensors go by the [way](Link::way).
    type Memory = Infallible;

    fn rank(&self) -> u32 {
        of_met!(&self.met, control => control.rank())
    }

    fn size(&self) -> u32 {
        of_met!(&self.met, control => control.size())
    }

    fn exchange(&self, none: &Infallible, _: &[Range<usize>], _: &mut Infallible, _: &[Range<usize>]) -> Result<()> {
        match *none {}
    }

    fn all_gather(&self, none: &mut Infallible, _: &[Range<usize>]) -> Result<()> {
        match *none {}
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }

    fn gather(&self, said: &[u8]) -> Result<Vec<Vec<u8>>> {
        if let Transport::Nccl(_, nccl) = &self.way {
            return nccl.gather(said);
        }
        of_met!(&self.met, control => control.gather(said))
    }

    fn check(&self) -> Result<()> {
        of_met!(&self.met, control => Communicator::check(&**control))
    }

    fn fail(&self, error: &Error) {
        of_met!(&self.met, control => Communicator::fail(&**control, error));
    }

    fn leave(self) -> Result<()> {
        let Self { way, met } = self;
        let done = if let Transport::Nccl(_, nccl) = way { nccl.leave() } else { Ok(()) };
        let left = of_met!(met, control => Arc::into_inner(control).map_or(Ok(()), Communicator::leave));
        done.and(left)
    }
}

/// What computes on the device; `None` where the host does, which is said.
pub fn arithmetic<'g>(gpu: &'g Gpu, progress: &dyn Progress) -> Option<&'g Arithmetic> {
    let opened = gpu.arithmetic();
    progress.detail(&match opened {
        Ok(_) => String::from("kernels reduce and cast"),
        Err(why) => format!("no kernel reduces or casts, the host does: {why}"),
    });
    opened.ok()
}

impl LinkRequest<'_> {
    /// What this process has, where all have it; else what the first lacks that does not. Collective.
    fn all_have(&self, control: &impl Communicator, own: Result<Gpu>) -> Result<Result<Gpu, String>> {
        let lack = own.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let lacking = (0..).zip(control.gather(lack.as_bytes())?).find(|(_, why)| !why.is_empty());
        Ok(match (own, lacking) {
            (Ok(own), None) => Ok(own),
            (_, Some((index, why))) => Err(format!("{}: {}", self.roster.peer(index), String::from_utf8_lossy(&why))),
            (Err(error), None) => Err(error.to_string()),
        })
    }
}
