//! Packer: does many strided copies within a device's memory.
//!
//! A kernel does all of a list in one launch, and as fast as memory is where runs are short. NVRTC compiles it for the
//! device at hand; where there is no NVRTC, or its PTX is too new for the driver, the driver's own copies do the same, a
//! call a copy.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{CUDA_MEMCPY3D_st, CUmemorytype, cuMemcpy3DAsync_v2};
use cudarc::driver::{CudaFunction, result};

use super::copies::{Nest, tabulate};
use super::device::{Device, failed};
use super::kernels::COPIES;
use super::memory::DeviceBytes;
use super::settings::Kernels;
use super::stream::Stream;
use super::table::KernelLaunch;
use crate::error::Result;

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
        let loaded = COPIES.load(device, kernels).and_then(|program| program.kernel("copy_runs"));
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
                Copies::Launch(KernelLaunch { kernel: kernel.clone(), jobs: tabulate(nests, &mut bytes) })
            }
            Self::Copies(_) => Copies::Calls(nests),
        });
        (copies, bytes)
    }
}

/// Copies that are ready to be done.
pub(super) enum Copies {
    Launch(KernelLaunch),
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
            // SAFETY: promised by the caller.
            Self::Launch(launch) => unsafe { launch.run(stream, table) },
            Self::Calls(nests) => {
                stream.device().bind()?;
                // SAFETY: promised by the caller.
                nests.iter().try_for_each(|nest| unsafe { copy_nest(stream, nest) })
            }
        }
    }
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
