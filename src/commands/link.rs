//! What bytes go by from process to process: TCP between hosts, or NCCL between GPUs.

use super::printer::Printer;
use crate::cli::Backend;
use crate::comm::{Communicator, Mesh, process_environment};
use crate::error::Result;
use crate::gpu::{self, Gpu, Nccl};

pub enum Link {
    Hosts(Mesh),
    Devices(Gpu, Nccl<Mesh>),
}

impl Link {
    /// Between the devices of all, where that is asked for, or all have one. Collective.
    ///
    /// # Errors
    /// As [`gpu::open`] where GPUs are asked for; `Comm`, and from the devices.
    pub fn choose(mesh: Mesh, backend: Backend, local_rank: u32, printer: &Printer) -> Result<Self> {
        let local_rank = Some(local_rank);
        let settings = gpu::Settings::new(&process_environment);
        let own = match backend {
            Backend::Cpu => return Ok(Self::Hosts(mesh)),
            Backend::Nccl => mesh.settle(gpu::open(&settings, local_rank))?,
            Backend::Auto => {
                let own = gpu::open(&settings, local_rank);
                let said = own.as_ref().map_or_else(ToString::to_string, |_| String::new());
                let lacking = mesh.gather(said.as_bytes())?.into_iter().enumerate().find(|(_, why)| !why.is_empty());
                match (own, lacking) {
                    (Ok(own), None) => own,
                    (_, lacking) => {
                        let why = lacking.map(|(rank, why)| format!("rank {rank}: {}", String::from_utf8_lossy(&why)));
                        printer.detail(&format!("bytes do not go by NCCL; {}", why.unwrap_or_default()));
                        return Ok(Self::Hosts(mesh));
                    }
                }
            }
        };
        let version = own.nccl.version().map(|version| format!(" {version}")).unwrap_or_default();
        printer.detail(&format!("bytes go by NCCL{version}, here from {:?}", own.device));
        printer.detail(&match own.packer.lack() {
            None => String::from("a kernel packs them"),
            Some(why) => format!("no kernel packs them, the driver copies, a call a copy: {why}"),
        });
        let nccl = Nccl::meet(&own, settings.sharing, mesh)?;
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
