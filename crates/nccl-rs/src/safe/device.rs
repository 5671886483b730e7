//! Memory and streams of a device, which the caller owns.
//!
//! NCCL only queues work: a call returns before data is moved. Therefore a borrow that ends with the call cannot
//! guarantee that the memory still exists when the data is moved. Instead, each type that owns such memory guarantees
//! this by an `unsafe` trait. A view borrows a byte range of the memory for one call, with Rust's rules of borrowing:
//! no two views overlap if NCCL writes one of them.
//!
//! Device memory contains no Rust values. Reading the memory before the stream has run gives wrong bytes, but is not
//! undefined behaviour. The caller has to avoid such reads.

use std::ffi::c_void;
use std::marker::PhantomData;

use crate::{DataType, Error, Result};

/// A buffer of device memory that the caller owns.
///
/// # Safety
///
/// The [`Self::bytes`] bytes at [`Self::address`] can be accessed by the device of each communicator that gets a view
/// of this buffer. The memory stays allocated until all work is done that was queued before the buffer is dropped. The
/// memory may be freed in the order of the streams (`cuMemFreeAsync`), or after waiting for the streams.
pub unsafe trait DeviceBuffer {
    /// Returns the device address of the first byte: a `CUdeviceptr`.
    fn address(&self) -> u64;

    /// Returns the length of the buffer in bytes.
    fn bytes(&self) -> usize;
}

/// A stream of a device.
///
/// # Safety
///
/// [`Self::handle`] is a `CUstream` of the device of each communicator that uses this stream. The `CUstream` is not
/// destroyed before this value is dropped.
pub unsafe trait DeviceStream {
    /// Returns the `CUstream`, which is identical to the `cudaStream_t` of the runtime API.
    fn handle(&self) -> *mut c_void;
}

/// A byte range of a [`DeviceBuffer`] that NCCL reads.
#[derive(Clone, Copy, Debug)]
pub struct DeviceView<'a> {
    bytes: Extent,
    lent: PhantomData<&'a ()>,
}

/// A byte range of a [`DeviceBuffer`] that NCCL writes.
#[derive(Debug)]
pub struct DeviceViewMut<'a> {
    bytes: Extent,
    lent: PhantomData<&'a mut ()>,
}

/// The address and the length of a range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub address: u64,
    pub bytes: usize,
}

impl<'a> DeviceView<'a> {
    /// Returns a view of the entire buffer.
    #[must_use]
    pub fn of(buffer: &'a impl DeviceBuffer) -> Self {
        Self { bytes: Extent { address: buffer.address(), bytes: buffer.bytes() }, lent: PhantomData }
    }

    /// Returns the length of the view in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.bytes
    }

    /// Splits the view after its first `at` bytes. Returns `None` if the view has fewer bytes.
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
    /// Returns a view of the entire buffer.
    #[must_use]
    pub fn of(buffer: &'a mut impl DeviceBuffer) -> Self {
        Self { bytes: Extent { address: buffer.address(), bytes: buffer.bytes() }, lent: PhantomData }
    }

    /// Returns the length of the view in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes.bytes
    }

    /// Splits the view after its first `at` bytes. Returns `None` if the view has fewer bytes.
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

    /// Returns the number of elements in the range. Returns an error if the range is not aligned, or if its length is
    /// not a multiple of the element size.
    pub(super) fn elements(self, dtype: DataType, function: &'static str) -> Result<usize> {
        let size = dtype.size();
        if !self.bytes.is_multiple_of(size) {
            let why = format!("{} B are not a whole number of {dtype:?} elements ({size} B each)", self.bytes);
            return Err(Error::Argument { function, why });
        }
        if self.bytes > 0 && !self.address.is_multiple_of(size as u64) {
            let why =
                format!("{dtype:?} elements cannot start at {:#x}, which is not a multiple of {size}", self.address);
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
