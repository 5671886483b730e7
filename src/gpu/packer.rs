//! A packer makes many strided copies inside device memory. Its kernel makes all copies of a list in one launch, at the
//! full speed of the memory even if runs are short. NVRTC compiles the kernel at run time. If there is no NVRTC, or its
//! PTX is too new for the driver, the packer calls the driver for each copy. All sizes and offsets are in bytes.
//! Invariant: both methods copy the same bytes.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUDA_MEMCPY3D_st, CUmemorytype, cuMemcpy3DAsync_v2};
use cudarc::driver::{CudaFunction, result};

use super::copies::{LoopNest, append_jobs};
use super::device::{Device, failed};
use super::kernels::COPIES;
use super::memory::DeviceBytes;
use super::settings::Kernels;
use super::stream::Stream;
use super::table::KernelLaunch;
use crate::error::Result;

/// The method with which strided copies are made inside device memory.
#[derive(Clone, Debug)]
pub enum Packer {
    /// A kernel makes all copies of a list in one launch.
    Kernel(CudaFunction),
    /// Each copy is made by calls of the driver. The text is the reason why the kernel cannot be used.
    Driver(String),
}

impl Packer {
    /// Loads the kernel. If the kernel cannot be loaded, the packer will call the driver instead.
    #[must_use]
    pub fn open(device: &Arc<Device>, kernels: &Kernels) -> Self {
        let loaded = COPIES.load(device, kernels).and_then(|program| program.kernel("copy_runs"));
        loaded.map_or_else(Self::Driver, Self::Kernel)
    }

    /// Returns the reason why the kernel cannot be used. Returns `None` if the kernel is loaded.
    pub fn missing_kernel(&self) -> Option<&str> {
        match self {
            Self::Kernel(_) => None,
            Self::Driver(why) => Some(why),
        }
    }

    /// Prepares `N` lists of copies. Returns the prepared lists, and the bytes of the job table that the kernel reads;
    /// the table is empty if the driver makes the copies.
    pub(super) fn prepare<const N: usize>(&self, lists: [Vec<LoopNest>; N]) -> ([PreparedCopies; N], Vec<u8>) {
        let mut bytes = Vec::new();
        let copies = lists.map(|nests| match self {
            Self::Kernel(kernel) => {
                PreparedCopies::Launch(KernelLaunch { kernel: kernel.clone(), jobs: append_jobs(nests, &mut bytes) })
            }
            Self::Driver(_) => PreparedCopies::DriverCalls(nests),
        });
        (copies, bytes)
    }
}

/// A list of copies that can be queued on a stream.
pub(super) enum PreparedCopies {
    Launch(KernelLaunch),
    DriverCalls(Vec<LoopNest>),
}

impl PreparedCopies {
    /// Queues the copies on a stream.
    ///
    /// # Safety
    /// Until the stream has made the copies, their buffers and the table stay allocated. Until then, nothing else
    /// writes the bytes that the copies read, and nothing else accesses the bytes that the copies write.
    pub(super) unsafe fn run(&self, stream: &Stream, table: &DeviceBytes) -> Result<()> {
        match self {
            // SAFETY: guaranteed by the caller.
            Self::Launch(launch) => unsafe { launch.run(stream, table) },
            Self::DriverCalls(nests) => {
                stream.device().bind()?;
                // SAFETY: guaranteed by the caller.
                nests.iter().try_for_each(|nest| unsafe { copy_nest(stream, nest) })
            }
        }
    }
}

/// Queues the copy of a loop nest by calls of the driver, as few as possible.
///
/// # Safety
/// The conditions of [`PreparedCopies::run`] hold, and a CUDA context is current.
unsafe fn copy_nest(stream: &Stream, nest: &LoopNest) -> Result<()> {
    let handle = stream.cuda().cu_stream();
    if let Some(copy) = as_3d_copy(nest) {
        // SAFETY: guaranteed by the caller.
        return unsafe { cuMemcpy3DAsync_v2(&raw const copy, handle) }.result().map_err(failed(COPY));
    }
    let Some(inner) = nest.loops.len().checked_sub(1) else {
        let run = usize::try_from(nest.run_bytes).expect("a run in memory");
        // SAFETY: guaranteed by the caller.
        return unsafe { result::memcpy_dtod_async(nest.target, nest.source, run, handle) }.map_err(failed(COPY));
    };
    let mut done = Ok(());
    nest.clone().split(inner, u64::MAX, &mut |nest| {
        if done.is_ok() {
            // SAFETY: guaranteed by the caller.
            done = unsafe { copy_nest(stream, &nest) };
        }
    });
    done
}

const COPY: &str = "copy within the device";
/// The maximum distance in bytes between the beginnings of two rows in one copy by the driver. All devices report this
/// value for `CU_DEVICE_ATTRIBUTE_MAX_PITCH`.
const MAX_PITCH: u64 = i32::MAX as u64;

/// Converts a loop nest with one or two loops to a 3-D copy of the driver. Returns `None` if the driver cannot make the
/// copy in one call.
fn as_3d_copy(nest: &LoopNest) -> Option<CUDA_MEMCPY3D_st> {
    let (slices, rows) = match nest.loops[..] {
        [rows] => (None, rows),
        [slices, rows] => (Some(slices), rows),
        _ => return None,
    };
    // The distance between slices must be a whole number of rows.
    let height = |step: u64, slice: Option<u64>| {
        let fits = (nest.run_bytes..=MAX_PITCH).contains(&step);
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
        WidthInBytes: size(nest.run_bytes)?,
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
