//! Packer: does many strided copies within a device's memory.
//!
//! A kernel does all of a list in one launch, and as fast as memory is where runs are short. NVRTC compiles it for the
//! device at hand; where there is no NVRTC, or its PTX is too new for the driver, the driver's own copies do the same, a
//! call a copy.

use std::borrow::Cow;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUDA_MEMCPY3D_st, CUmemorytype, cuMemcpy3DAsync_v2};
use cudarc::driver::{CudaFunction, LaunchConfig, PushKernelArg, result};
use cudarc::nvrtc::{self, CompileError, CompileOptions, Ptx};
use nccl::DeviceBuffer;

use super::copies::{BLOCK_UNITS, Nest, Table};
use super::device::{Device, failed};
use super::memory::DeviceBytes;
use super::settings::Kernels;
use super::stream::Stream;
use crate::error::Result;

const NAME: &str = "copy_runs";
const TEXT: &str = include_str!("kernels/copy_runs.cu");
const THREADS: u32 = 256;
/// Compute capabilities that PTX is made for, where NVRTC does not know the device's: newer devices take older PTX.
const OLDER: [(i32, i32); 5] = [(10, 0), (9, 0), (8, 0), (7, 5), (7, 0)];

#[derive(Clone, Debug)]
pub enum Packer {
    Kernel(CudaFunction),
    /// Why there is no kernel.
    Copies(String),
}

impl Packer {
    /// One with the kernel, if it can be had.
    #[must_use]
    pub fn open(device: &Arc<Device>, kernels: &Kernels) -> Self {
        let ptx = match kernels {
            Kernels::Compiled => compiled(device),
            Kernels::Ptx(text) => Ok(Ptx::from_src(text.clone())),
            Kernels::Off => Err("they are switched off".into()),
        };
        let loaded = ptx.and_then(|ptx| {
            let module = device.context().load_module(ptx);
            let kernel = module.and_then(|module| module.load_function(NAME));
            kernel.map_err(|error| failed("load kernels")(error).to_string())
        });
        loaded.map_or_else(Self::Copies, Self::Kernel)
    }

    /// Why there is no kernel, where there is none.
    #[must_use]
    pub fn lack(&self) -> Option<&str> {
        match self {
            Self::Kernel(_) => None,
            Self::Copies(why) => Some(why),
        }
    }

    /// Lists of copies, ready to be done, and what is to be in their table on the device.
    pub(super) fn prepare<const N: usize>(&self, lists: [Vec<Nest>; N]) -> ([Copies; N], Vec<u8>) {
        let mut bytes = Vec::new();
        let copies = lists.map(|nests| match self {
            Self::Kernel(kernel) => {
                let Table { bytes: records, copies, blocks } = Table::new(nests);
                let offset = bytes.len() as u64;
                bytes.extend(records);
                Copies::Launch { kernel: kernel.clone(), offset, copies, blocks }
            }
            Self::Copies(_) => Copies::Calls(nests),
        });
        (copies, bytes)
    }
}

/// Copies that are ready to be done.
pub(super) enum Copies {
    /// Of so many records in the table from there on.
    Launch {
        kernel: CudaFunction,
        offset: u64,
        copies: u32,
        blocks: u32,
    },
    Calls(Vec<Nest>),
}

impl Copies {
    /// Do them on a stream.
    ///
    /// # Safety
    /// Until the stream has done it, the memory of the copies and the table stay where they are, and nothing else writes
    /// what they read or uses what they write.
    pub(super) unsafe fn run(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        match self {
            Self::Launch { blocks: 0, .. } => Ok(()),
            Self::Launch { kernel, offset, copies, blocks } => {
                let records = table.address() + offset;
                let shape = LaunchConfig { grid_dim: (*blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
                let mut launch = stream.cuda().launch_builder(kernel);
                launch.arg(&records).arg(copies).arg(&BLOCK_UNITS);
                // SAFETY: the arguments are those of the kernel; of memory it uses what the table says.
                unsafe { launch.launch(shape) }.map(drop).map_err(failed("launch a kernel"))
            }
            Self::Calls(nests) => {
                stream.device().bind()?;
                // SAFETY: promised by the caller.
                nests.iter().try_for_each(|nest| unsafe { copy_nest(stream, nest) })
            }
        }
    }
}

/// PTX for the device, or the newest that NVRTC can make below.
fn compiled(device: &Device) -> Result<Ptx, String> {
    // SAFETY: what the system has under the name of NVRTC is NVRTC.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        return Err("there is no NVRTC: neither libnvrtc.so nor libnvrtc.so.13 or .12".into());
    }
    let own = device.context().compute_capability().map_err(|error| failed("ask the device")(error).to_string())?;
    let mut last = String::new();
    for arch in std::iter::once(own).chain(OLDER.into_iter().filter(|older| *older < own)) {
        match compile(arch) {
            Ok(ptx) => return Ok(ptx),
            Err(why) => last = why,
        }
    }
    Err(last)
}

/// PTX for a compute capability. NVRTC is there.
pub(super) fn compile((major, minor): (i32, i32)) -> Result<Ptx, String> {
    let options = vec![format!("--gpu-architecture=compute_{major}{minor}")];
    let options = CompileOptions { options, name: Some(format!("{NAME}.cu")), ..CompileOptions::default() };
    nvrtc::compile_ptx_with_opts(TEXT, options).map_err(|error| match error {
        CompileError::CompileError { nvrtc, log, .. } => {
            let log: Cow<'_, str> = log.to_string_lossy();
            format!("NVRTC does not compile {NAME}: {nvrtc}: {}", log.trim())
        }
        other => format!("NVRTC does not compile {NAME}: {other}"),
    })
}

/// Copy a nest, in as few calls as boxes of rows allow.
///
/// # Safety
/// As [`Copies::run`]; a context is current.
unsafe fn copy_nest(stream: &Stream, nest: &Nest) -> Result<()> {
    let handle = stream.cuda().cu_stream();
    if let Some(copy) = as_box(nest) {
        // SAFETY: promised by the caller.
        return unsafe { cuMemcpy3DAsync_v2(&raw const copy, handle) }.result().map_err(failed(COPY));
    }
    let Some(inner) = nest.loops.len().checked_sub(1) else {
        let run = usize::try_from(nest.run).expect("a run in memory");
        // SAFETY: promised by the caller.
        return unsafe { result::memcpy_dtod_async(nest.target, nest.source, run, handle) }.map_err(failed(COPY));
    };
    let mut done = Ok(());
    nest.clone().cut(inner, u64::MAX, &mut |nest| {
        if done.is_ok() {
            // SAFETY: promised by the caller.
            done = unsafe { copy_nest(stream, &nest) };
        }
    });
    done
}

const COPY: &str = "copy within the device";
/// Bytes between rows, at most: `CU_DEVICE_ATTRIBUTE_MAX_PITCH` of all devices.
const MOST_PITCH: u64 = i32::MAX as u64;

/// A nest of rows, or of slices of rows, if the driver can copy it in one call.
fn as_box(nest: &Nest) -> Option<CUDA_MEMCPY3D_st> {
    let (slices, rows) = match nest.loops[..] {
        [rows] => (None, rows),
        [slices, rows] => (Some(slices), rows),
        _ => return None,
    };
    // Slices are whole numbers of rows apart.
    let height = |step: u64, slice: Option<u64>| {
        let fits = (nest.run..=MOST_PITCH).contains(&step);
        let Some(slice) = slice else { return fits.then_some(rows.count) };
        let height = slice / step.max(1);
        (fits && height >= rows.count && height * step == slice).then_some(height)
    };
    let size = |value: u64| usize::try_from(value).ok();
    Some(CUDA_MEMCPY3D_st {
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        srcDevice: nest.source,
        srcPitch: size(rows.source_step)?,
        srcHeight: size(height(rows.source_step, slices.map(|slices| slices.source_step))?)?,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstDevice: nest.target,
        dstPitch: size(rows.target_step)?,
        dstHeight: size(height(rows.target_step, slices.map(|slices| slices.target_step))?)?,
        WidthInBytes: size(nest.run)?,
        Height: size(rows.count)?,
        Depth: size(slices.map_or(1, |slices| slices.count))?,
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcHost: ptr::null(),
        srcArray: ptr::null_mut(),
        reserved0: ptr::null_mut(),
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstHost: ptr::null_mut(),
        dstArray: ptr::null_mut(),
        reserved1: ptr::null_mut(),
    })
}
