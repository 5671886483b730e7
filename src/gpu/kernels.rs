//! Kernels: their texts, and how NVRTC makes PTX of them for the device at hand.
//!
//! Texts are C++ without headers. Numbers are to be those of the host: nothing is fused, and subnormals are kept.

use std::borrow::Cow;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaModule};
use cudarc::nvrtc::{self, CompileError, CompileOptions, Ptx};

use super::device::{Device, failed};
use super::settings::Kernels;

/// Compute capabilities that PTX is made for, where NVRTC does not know the device's: newer devices take older PTX.
const OLDER: [(i32, i32); 5] = [(10, 0), (9, 0), (8, 0), (7, 5), (7, 0)];

/// Texts that are compiled together.
pub(super) struct Program {
    pub name: &'static str,
    pub text: &'static str,
}

/// Moves bytes.
pub(super) const COPIES: Program = Program {
    name: "copy_runs",
    text: concat!(include_str!("kernels/blocks.cuh"), include_str!("kernels/copy_runs.cu")),
};

/// Computes. It is long, and so compiled only where it is needed.
pub(super) const ARITHMETIC: Program = Program {
    name: "arithmetic",
    text: concat!(
        include_str!("kernels/blocks.cuh"),
        include_str!("kernels/elements.cuh"),
        include_str!("kernels/integers.cuh"),
        include_str!("kernels/floats.cuh"),
        include_str!("kernels/reduce.cu"),
        include_str!("kernels/cast.cu"),
    ),
};

impl Program {
    /// On the device, or why not.
    pub fn load(&self, device: &Device, kernels: &Kernels) -> Result<LoadedKernels, String> {
        let ptx = match kernels {
            Kernels::Compiled => self.compiled(device),
            Kernels::Ptx(text) => Ok(Ptx::from_src(text.clone())),
            Kernels::Off => Err("they are switched off".into()),
        };
        let module = device.context().load_module(ptx?);
        module.map(LoadedKernels).map_err(|error| failed("load kernels")(error).to_string())
    }

    /// PTX for the device, or the newest that NVRTC can make below.
    fn compiled(&self, device: &Device) -> Result<Ptx, String> {
        // SAFETY: what the system has under the name of NVRTC is NVRTC.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            return Err("there is no NVRTC: neither libnvrtc.so nor libnvrtc.so.13 or .12".into());
        }
        let own = device.context().compute_capability().map_err(|error| failed("ask the device")(error).to_string())?;
        let mut last = String::new();
        for arch in std::iter::once(own).chain(OLDER.into_iter().filter(|older| *older < own)) {
            match self.compile(arch) {
                Ok(ptx) => return Ok(ptx),
                Err(why) => last = why,
            }
        }
        Err(last)
    }

    /// PTX for a compute capability. NVRTC is there.
    pub fn compile(&self, (major, minor): (i32, i32)) -> Result<Ptx, String> {
        let arch = format!("--gpu-architecture=compute_{major}{minor}");
        let exact = ["--fmad=false", "--ftz=false", "--prec-div=true"];
        let options = [&arch, "--std=c++17", "--device-int128"].into_iter().chain(exact).map(String::from).collect();
        let options = CompileOptions { options, name: Some(format!("{}.cu", self.name)), ..CompileOptions::default() };
        nvrtc::compile_ptx_with_opts(self.text, options).map_err(|error| match error {
            CompileError::CompileError { nvrtc, log, .. } => {
                let log: Cow<'_, str> = log.to_string_lossy();
                format!("NVRTC does not compile {}: {nvrtc}: {}", self.name, log.trim())
            }
            other => format!("NVRTC does not compile {}: {other}", self.name),
        })
    }
}

/// A program that a device has.
pub(super) struct LoadedKernels(Arc<CudaModule>);

impl LoadedKernels {
    pub fn kernel(&self, name: &str) -> Result<CudaFunction, String> {
        self.0.load_function(name).map_err(|error| failed("load a kernel")(error).to_string())
    }
}
