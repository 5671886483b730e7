//! Kernels: their CUDA C++ source, which NVRTC compiles to PTX for the device at run time. The source includes no
//! headers. Invariant: kernels compute the same bits as the host. Therefore multiply-add operations are not fused, and
//! subnormals are kept.

use std::borrow::Cow;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaModule};
use cudarc::nvrtc::{self, CompileError, CompileOptions, Ptx};

use super::device::{Device, failed};
use super::settings::Kernels;

/// Compute capabilities that are tried if NVRTC does not support the compute capability of the device, newest first.
/// PTX for one of them also runs on all newer devices.
const FALLBACK_ARCHS: [(i32, i32); 5] = [(10, 0), (9, 0), (8, 0), (7, 5), (7, 0)];

/// CUDA source text that is compiled as one program.
pub(super) struct Program {
    /// The name of the program, which error messages use.
    pub name: &'static str,
    /// The CUDA C++ source text of the program.
    pub source: &'static str,
}

/// The program with the kernel that copies bytes.
pub(super) const COPIES: Program = Program {
    name: "copy_runs",
    source: concat!(include_str!("kernels/blocks.cuh"), include_str!("kernels/copy_runs.cu")),
};

/// The program with the kernels that reduce and cast. Compiling it takes long, so it is compiled only when it is
/// needed.
pub(super) const ARITHMETIC: Program = Program {
    name: "arithmetic",
    source: concat!(
        include_str!("kernels/blocks.cuh"),
        include_str!("kernels/elements.cuh"),
        include_str!("kernels/integers.cuh"),
        include_str!("kernels/floats.cuh"),
        include_str!("kernels/reduce.cu"),
        include_str!("kernels/cast.cu"),
    ),
};

impl Program {
    /// Loads the program on a device. Compiles it first, unless `kernels` contains PTX.
    ///
    /// # Errors
    /// Returns the reason why the program cannot be loaded.
    pub fn load(&self, device: &Device, kernels: &Kernels) -> Result<LoadedKernels, String> {
        let ptx = match kernels {
            Kernels::Compiled => self.compile_for(device),
            Kernels::Ptx(text) => Ok(Ptx::from_src(text.clone())),
            Kernels::Off => Err("GPU kernels are switched off".into()),
        };
        let module = device.context().load_module(ptx?);
        module.map(LoadedKernels).map_err(|error| failed("load kernels")(error).to_string())
    }

    /// Compiles the program to PTX for the device. If NVRTC does not support the device's compute capability, compiles
    /// for the newest older compute capability that NVRTC supports.
    fn compile_for(&self, device: &Device) -> Result<Ptx, String> {
        // SAFETY: the library that the system provides under the name of NVRTC is NVRTC.
        if !unsafe { nvrtc::sys::is_culib_present() } {
            return Err("no NVRTC: neither libnvrtc.so nor libnvrtc.so.13 nor libnvrtc.so.12 can be loaded".into());
        }
        let own = device
            .context()
            .compute_capability()
            .map_err(|error| failed("get the compute capability")(error).to_string())?;
        let mut last = String::new();
        for arch in std::iter::once(own).chain(FALLBACK_ARCHS.into_iter().filter(|older| *older < own)) {
            match self.compile(arch) {
                Ok(ptx) => return Ok(ptx),
                Err(why) => last = why,
            }
        }
        Err(last)
    }

    /// Compiles the program to PTX for a compute capability. The caller has checked that NVRTC exists.
    pub fn compile(&self, (major, minor): (i32, i32)) -> Result<Ptx, String> {
        let arch = format!("--gpu-architecture=compute_{major}{minor}");
        let exact = ["--fmad=false", "--ftz=false", "--prec-div=true"];
        let options = [&arch, "--std=c++17", "--device-int128"].into_iter().chain(exact).map(String::from).collect();
        let options = CompileOptions { options, name: Some(format!("{}.cu", self.name)), ..CompileOptions::default() };
        nvrtc::compile_ptx_with_opts(self.source, options).map_err(|error| match error {
            CompileError::CompileError { nvrtc, log, .. } => {
                let log: Cow<'_, str> = log.to_string_lossy();
                format!("NVRTC cannot compile {}: {nvrtc}: {}", self.name, log.trim())
            }
            other => format!("NVRTC cannot compile {}: {other}", self.name),
        })
    }
}

/// A compiled program that is loaded on a device.
pub(super) struct LoadedKernels(Arc<CudaModule>);

impl LoadedKernels {
    /// Returns a kernel of the program by its name.
    pub fn kernel(&self, name: &str) -> Result<CudaFunction, String> {
        self.0.load_function(name).map_err(|error| failed("load a kernel")(error).to_string())
    }
}
