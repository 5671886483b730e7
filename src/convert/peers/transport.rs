//! Transports between connected processes, for control messages and for tensor data.
//!
//! Control messages use message files in the [work folder](super::work_folder), NCCL or MPI. Tensor data uses NCCL
//! between GPUs or MPI between hosts. Without a transport for tensor data, files of SRC are copied to a folder that all
//! processes see.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;

use super::super::bucket::Bucket;
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

/// The connection by which the processes found each other: message files or MPI. It carries the control messages,
/// unless NCCL carries them.
pub enum Meeting {
    Records(Arc<Records>),
    #[cfg(feature = "mpi")]
    Mpi(Arc<Mpi>),
}

/// Method by which processes send tensor data to each other.
pub enum Transport {
    /// Processes send no tensor data. Each process reads the data that it writes, from SRC or from a copy of the SRC
    /// files that this process does not see.
    Copy,
    #[cfg(feature = "mpi")]
    Mpi,
    Nccl(Box<Gpu>, Nccl),
}

/// Connection between the processes of a run, for control messages and for tensor data.
pub struct Link {
    way: Transport,
    met: Meeting,
}

/// Inputs for choosing how the processes send tensor data to each other.
pub struct LinkRequest<'a> {
    pub args: &'a ExchangeOptions,
    /// The largest bucket size that the exchange rounds can have. The bucket size limits the bytes of a process in a
    /// round.
    pub rounds: Bucket,
    pub local_rank: u32,
    pub process_table: &'a ProcessTable,
    pub progress: &'a dyn Progress,
}

/// Evaluates an expression with the communicator of a [`Meeting`], for each kind of communicator.
macro_rules! of_met {
    ($met:expr, $control:ident => $body:expr) => {
        match $met {
            Meeting::Records($control) => $body,
            #[cfg(feature = "mpi")]
            Meeting::Mpi($control) => $body,
        }
    };
}

/// Returns an error, because this program was built without MPI.
///
/// # Errors
/// `Usage`, because this program was built without MPI.
#[cfg(not(feature = "mpi"))]
pub fn check_mpi(_launch: &crate::launch::Launch) -> Result<()> {
    Err(Error::usage(
        "options::backend mpi: this dtshard was built without MPI",
        "build it with `cargo build --release --features mpi`, or leave options::backend out",
    ))
}

/// Checks that MPI started this program, as `--backend mpi` needs.
///
/// # Errors
/// `Usage` if MPI did not start this program.
#[cfg(feature = "mpi")]
pub fn check_mpi(launch: &crate::launch::Launch) -> Result<()> {
    if crate::comm::mpi::is_under_mpi(launch, &process_environment) {
        return Ok(());
    }
    Err(Error::usage(
        "options::backend mpi: this process was not started under MPI",
        "start it with mpirun, or with srun and --mpi=pmix or --mpi=pmi2; or leave options::backend out",
    ))
}

impl Meeting {
    /// Chooses how the processes send tensor data to each other. Collective.
    fn way<C>(&self, control: &Arc<C>, linking: &LinkRequest<'_>) -> Result<Transport>
    where
        C: Communicator + crate::comm::FailureNotes + 'static,
    {
        let LinkRequest { args, rounds, local_rank, progress, .. } = *linking;
        let local_rank = Some(local_rank);
        let settings = gpu::Settings::new(&process_environment);
        let (own, nccl) = match args.backend {
            Backend::Cpu => {
                progress.detail("backend cpu, as chosen by options::backend");
                return Ok(Transport::Copy);
            }
            Backend::Mpi => return Ok(self.without_devices("as chosen by options::backend", progress)),
            Backend::Nccl => {
                let own = control.all_ok(gpu::open(&settings, local_rank))?;
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
                        let against = linking.process_table.name(against);
                        // Errors other than `Usage` may be faults of the machine, so they are warnings.
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
        progress
            .detail(&format!("backend nccl: tensors are sent by NCCL{version}, on this process from {:?}", own.device));
        progress.detail(&match own.packer.missing_kernel() {
            None => String::from("a kernel packs the data to send"),
            Some(why) => {
                format!("no kernel can pack the data to send, so the driver copies each range with its own call: {why}")
            }
        });
        Ok(Transport::Nccl(Box::new(own), nccl))
    }

    /// Returns the transport for processes that do not use NCCL: MPI if it connects them, otherwise copied files.
    /// Reports the transport with `why`, the reason against NCCL.
    fn without_devices(&self, why: &str, progress: &dyn Progress) -> Transport {
        match self {
            Self::Records(_) => {
                progress.detail(&format!("backend cpu: files that only some processes see are copied first, {why}"));
                Transport::Copy
            }
            #[cfg(feature = "mpi")]
            Self::Mpi(_) => {
                progress.detail(&format!("backend mpi: tensors are sent by {}, {why}", Mpi::library()));
                Transport::Mpi
            }
        }
    }
}

impl Link {
    /// Returns a connection for which no transport of tensor data has been chosen yet.
    #[must_use]
    pub fn new(met: Meeting) -> Self {
        Self { way: Transport::Copy, met }
    }

    /// Chooses how the processes send tensor data to each other. The result is the same on all processes. Collective.
    ///
    /// # Errors
    /// The errors of [`gpu::open`] if the options require GPUs, `Comm`, and errors from the devices.
    pub fn choose(&mut self, linking: &LinkRequest<'_>) -> Result<()> {
        self.way = of_met!(&self.met, control => self.met.way(control, linking))?;
        Ok(())
    }

    /// Sets the name of the next collective step for reports of long waits. Processes that MPI connects report no
    /// waits.
    pub fn begin(&self, doing: &'static str) {
        match &self.met {
            Meeting::Records(records) => records.begin(doing),
            #[cfg(feature = "mpi")]
            Meeting::Mpi(_) => {}
        }
    }

    /// Returns the method by which processes send tensor data to each other.
    pub fn way(&self) -> &Transport {
        &self.way
    }

    /// Returns the MPI communicator if the processes connected by MPI.
    #[cfg(feature = "mpi")]
    pub fn mpi(&self) -> Option<&Mpi> {
        match &self.met {
            Meeting::Mpi(mpi) => Some(mpi),
            Meeting::Records(_) => None,
        }
    }
}

impl Communicator for Link {
    /// Uninhabited, because this communicator sends no tensor data, only control messages. Tensor data is sent by
    /// [`Link::way`].
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

/// Returns the kernels that reduce and cast on the GPU, or `None` if the CPU reduces and casts. Reports whether the GPU
/// or the CPU is used.
pub fn arithmetic<'g>(gpu: &'g Gpu, progress: &dyn Progress) -> Option<&'g Arithmetic> {
    let opened = gpu.arithmetic();
    progress.detail(&match opened {
        Ok(_) => String::from("kernels reduce and cast"),
        Err(why) => format!("no kernel can reduce or cast, so the CPU does it: {why}"),
    });
    opened.ok()
}

impl LinkRequest<'_> {
    /// Returns the GPU of this process if every process has a GPU. Otherwise returns the reason why a process cannot
    /// use a GPU, from the first process without one. Collective.
    fn all_have(&self, control: &impl Communicator, own: Result<Gpu>) -> Result<Result<Gpu, String>> {
        let lack = own.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let lacking = (0..).zip(control.gather(lack.as_bytes())?).find(|(_, why)| !why.is_empty());
        Ok(match (own, lacking) {
            (Ok(own), None) => Ok(own),
            (_, Some((index, why))) => {
                Err(format!("{}: {}", self.process_table.peer(index), String::from_utf8_lossy(&why)))
            }
            (Err(error), None) => Err(error.to_string()),
        })
    }
}
