//! What bytes go by from process to process: TCP between hosts, or NCCL between GPUs.

use super::bucket::Bucket;
use super::roster::Roster;
use crate::comm::{Communicator, Mesh, process_environment};
use crate::convert::options::{Backend, ExchangeOptions, SourceVisibility};
use crate::error::{Error, Result};
use crate::gpu::{self, Arithmetic, Gpu, Nccl};
use crate::progress::Progress;

pub enum Link {
    Hosts(Mesh),
    Devices(Gpu, Nccl<Mesh>),
}

/// What is to be linked, and who hears of it.
pub struct Linking<'a> {
    pub args: &'a ExchangeOptions,
    /// They may be shorter yet.
    pub rounds: Bucket,
    pub local_rank: u32,
    pub roster: &'a Roster,
    pub progress: &'a dyn Progress,
}

impl Link {
    /// Between the devices of all, where that is asked for, or all have one. Collective; all come to the same.
    ///
    /// # Errors
    /// As [`gpu::open`] where GPUs are asked for; `Comm`, and from the devices.
    pub fn choose(mesh: Mesh, linking: &Linking<'_>) -> Result<Self> {
        let Linking { args, rounds, local_rank, progress, .. } = *linking;
        let local_rank = Some(local_rank);
        let settings = gpu::Settings::new(&process_environment);
        let (own, nccl) = match args.backend {
            Backend::Cpu => {
                progress.detail(&format!("bytes go by {}", linking.other_way()));
                return Ok(Self::Hosts(mesh));
            }
            Backend::Nccl => {
                let own = mesh.settle(gpu::open(&settings, local_rank))?;
                let nccl = Nccl::meet(&own, settings.sharing, mesh)?;
                (own, nccl)
            }
            Backend::Auto => {
                let own = gpu::open(&settings, local_rank).and_then(|own| own.with_room(rounds.bytes()));
                let own = match linking.all_have(&mesh, own)? {
                    Ok(own) => own,
                    Err(lack) => {
                        progress.detail(&linking.not_by_nccl(&lack));
                        return Ok(Self::Hosts(mesh));
                    }
                };
                match gpu::Meeting::new(&own, settings.sharing, mesh)? {
                    gpu::Meeting::Met(nccl) => (own, nccl),
                    gpu::Meeting::Missed(mesh, against) => {
                        let against = linking.roster.name(against);
                        let words = linking.not_by_nccl(&against.to_string());
                        match against {
                            // How processes were started.
                            Error::Usage { .. } => progress.detail(&words),
                            _ => progress.warning(&words),
                        }
                        return Ok(Self::Hosts(mesh));
                    }
                }
            }
        };
        let version = own.nccl().ok().and_then(|nccl| nccl.version().ok());
        let version = version.map_or_else(String::new, |version| format!(" {version}"));
        progress.detail(&format!("bytes go by NCCL{version}, here from {:?}", own.device));
        progress.detail(&match own.packer.lack() {
            None => String::from("a kernel packs them"),
            Some(why) => format!("no kernel packs them, the driver copies, a call a copy: {why}"),
        });
        Ok(Self::Devices(own, nccl))
    }

    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        match self {
            Self::Hosts(mesh) => mesh,
            Self::Devices(_, nccl) => nccl.control(),
        }
    }

    /// # Errors
    /// As [`Communicator::leave`].
    pub fn leave(self) -> Result<()> {
        match self {
            Self::Hosts(mesh) => mesh.leave(),
            Self::Devices(_, nccl) => nccl.leave(),
        }
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

impl Linking<'_> {
    /// What bytes go by that do not go by NCCL. Where all see SRC, nothing is exchanged between hosts.
    fn other_way(&self) -> &'static str {
        match self.args.source {
            SourceVisibility::PerRank => "TCP between hosts",
            SourceVisibility::Shared => "the file system, from which each process reads what it writes",
        }
    }

    fn not_by_nccl(&self, why: &str) -> String {
        format!("bytes go by {}, not by NCCL: {why}", self.other_way())
    }

    /// What this process has, where all have it; else what the first lacks that does not. Collective.
    fn all_have(&self, mesh: &Mesh, own: Result<Gpu>) -> Result<Result<Gpu, String>> {
        let lack = own.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let lacking = (0..).zip(mesh.gather(lack.as_bytes())?).find(|(_, why)| !why.is_empty());
        Ok(match (own, lacking) {
            (Ok(own), None) => Ok(own),
            (_, Some((index, why))) => Err(format!("{}: {}", self.roster.peer(index), String::from_utf8_lossy(&why))),
            (Err(error), None) => Err(error.to_string()),
        })
    }
}
