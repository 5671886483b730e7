//! A stand-in for `libcuda.so.1`, `libnccl.so.2` and `libnvrtc.so`, which tests load on machines without a GPU.
//!
//! The stand-in does not emulate a GPU: it has no parallel threads and no realistic speed, and it does not add in
//! NCCL's order. The stand-in checks that a program calls the libraries correctly: counts and offsets, sends with
//! matching receives, the order of streams and events, the lifetime of memory, the choice of the device, and the
//! handling of full memory and dead peers. The stand-in is stricter than a GPU:
//!
//! - the host cannot read an address of device memory, and every range must be in one allocation of its device, both
//!   when the call is made and when the stream runs the work of the call;
//! - new memory and freed memory are filled with 0xA5;
//! - a stream is a thread that delays its work on purpose, so a program that does not wait reads wrong bytes;
//! - pageable host memory is copied before the call returns, and pinned memory when the stream runs the copy;
//! - every NCCL message has a header; a receiver that expects another message fails, where NCCL would wait forever or
//!   accept the message;
//! - a send is done only after its message was received, so circular waits block, as they could with NCCL;
//! - after an NCCL error, the stream blocks until the communicator is aborted.
//!
//! All libraries are this one file under different names, because they share streams and memory. Ranks are processes on
//! one machine. [`settings`] reads the environment variables, such as the number of devices.

#![allow(unsafe_code, non_snake_case, reason = "these are C libraries")]
#![allow(clippy::print_stderr, reason = "a program that breaks a rule sees which one")]

mod driver;
mod entry;
mod fault;
mod kernels;
mod machine;
mod memory;
mod nccl;
mod nvrtc;
pub mod settings;
mod stream;
mod wire;

/// True if the kernels were compiled into the stand-in. Without a C++ compiler, the kernels are missing, and no kernel
/// can be launched.
pub const HAS_KERNELS: bool = cfg!(not(no_kernels));
