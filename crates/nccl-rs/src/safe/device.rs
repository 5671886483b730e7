//! Memory and streams of a device, which belong to others.
//!
//! NCCL only queues: a call returns before data moves, so a borrow that ends with the call cannot prove that the memory
//! is still there when it is used. That is promised instead, once for each type that owns such memory. A view lends
//! some of it for one call, with the rules of borrowing: what is written is lent to nobody else.
//!
//! What lies on a device is no Rust value. Reading it before the stream has come so far gives wrong bytes, never
//! undefined behaviour, and is the caller's to avoid.

use std::ffi::c_void;
use std::marker::PhantomData;

use crate::{DataType, Error, Result};

/// Memory on a device.
///
/// # Safety
///
/// The bytes from [`Self::address`] on, as many as [`Self::bytes`] says, are memory of the device of each communicator
/// to which they are lent, or memory that it can access. They stay so until all work is done that was queued on streams
/// before the value is dropped: whoever frees them does it in the order of those streams (`cuMemFreeAsync`), or waits for
/// them before.
pub unsafe trait DeviceBuffer {
    /// Where it begins: a `CUdeviceptr`.
    fn address(&self) -> u64;

    /// How many bytes it has.
    fn bytes(&self) -> usize;
}

/// A stream of a device.
///
/// # Safety
///
/// [`Self::handle`] is a `CUstream` of the device of each communicator with which it is used, and not destroyed before
/// the value is dropped.
pub unsafe trait DeviceStream {
    /// The `CUstream`, which is the `cudaStream_t` of the runtime.
    fn handle(&self) -> *mut c_void;
}

/// Some bytes of a [`DeviceBuffer`], to be read.
#[derive(Clone, Copy, Debug)]
pub struct DeviceView<'a> {
    bytes: Extent,
    lent: PhantomData<&'a ()>,
}

/// Some bytes of a [`DeviceBuffer`], to be written.
#[derive(Debug)]
pub struct DeviceViewMut<'a> {
    bytes: Extent,
    lent: PhantomData<&'a mut ()>,
}

/// Bytes on a device: where, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub address: u64,
    pub bytes: usize,
}

impl<'a> DeviceView<'a> {
    /// All bytes of a buffer.
    #[must_use]
    pub fn of(buffer: &'a impl DeviceBuffer) -> Self {
        Self { bytes: Extent { address: buffer.address(), bytes: buffer.bytes() }, lent: PhantomData }
    }

    /// How many bytes it has.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.bytes
    }

    /// The first `at` bytes and the others; `None` if there are not so many.
    #[must_use]
    pub fn split_at(self, at: usize) -> Option<(Self, Self)> {
        let (front, back) = self.bytes.split_at(at)?;
        Some((Self { bytes: front, lent: PhantomData }, Self { bytes: back, lent: PhantomData }))
    }

    pub(super) fn extent(&self) -> Extent {
        self.bytes
    }
}

impl<'a> DeviceViewMut<'a> {
    /// All bytes of a buffer.
    #[must_use]
    pub fn of(buffer: &'a mut impl DeviceBuffer) -> Self {
        Self { bytes: Extent { address: buffer.address(), bytes: buffer.bytes() }, lent: PhantomData }
    }

    /// How many bytes it has.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.bytes
    }

    /// The first `at` bytes and the others; `None` if there are not so many.
    #[must_use]
    pub fn split_at(self, at: usize) -> Option<(Self, Self)> {
        let (front, back) = self.bytes.split_at(at)?;
        Some((Self { bytes: front, lent: PhantomData }, Self { bytes: back, lent: PhantomData }))
    }

    pub(super) fn extent(&self) -> Extent {
        self.bytes
    }
}

impl Extent {
    fn split_at(self, at: usize) -> Option<(Self, Self)> {
        let rest = self.bytes.checked_sub(at)?;
        let behind = self.address.checked_add(at as u64)?;
        Some((Self { bytes: at, ..self }, Self { address: behind, bytes: rest }))
    }

    /// How many elements they are; an error unless they are whole elements where such elements may be.
    pub(super) fn elements(self, dtype: DataType, function: &'static str) -> Result<usize> {
        let size = dtype.size();
        if !self.bytes.is_multiple_of(size) {
            let why = format!("{} B are no whole number of {dtype:?} ({size} B each)", self.bytes);
            return Err(Error::Argument { function, why });
        }
        if self.bytes > 0 && !self.address.is_multiple_of(size as u64) {
            let why = format!("{dtype:?} cannot lie at {:#x}, which is not a multiple of {size}", self.address);
            return Err(Error::Argument { function, why });
        }
        Ok(self.bytes / size)
    }

    pub(super) fn pointer(self) -> *const c_void {
        std::ptr::without_provenance(usize::try_from(self.address).unwrap_or(0))
    }

    pub(super) fn pointer_mut(self) -> *mut c_void {
        self.pointer().cast_mut()
    }
}
