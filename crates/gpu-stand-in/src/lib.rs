//! What tests load in place of `libcuda.so.1`, `libnccl.so.2` and `libnvrtc.so` on machines without a GPU.
//!
//! It is no GPU and says nothing of one: not of threads that do things at once, of speed, of the order in which NCCL adds
//! floats. What it can say is whether a program calls the libraries as they want to be called: counts and offsets, sends
//! that pair with receives, what waits for what, what is freed when, which device, what happens when memory runs out or a
//! peer dies. So it is stricter than a GPU:
//!
//! - an address of device memory cannot be read by the host, and every range lies in one allocation of that device,
//!   when it is asked for and when it is used;
//! - memory begins, and ends, filled with 0xA5;
//! - a stream is a thread that is late on purpose, so what is not waited for is not there;
//! - memory of the host that is not pinned is copied before the call returns, pinned memory when the stream gets there;
//! - every message of NCCL tells what it is; a receiver that expects another one fails, where NCCL would wait for ever or
//!   take it;
//! - a send is done when it was received, so that what would wait in a circle does;
//! - after an error of NCCL its stream stands still until the communicator is aborted.
//!
//! All libraries are this one file under their names, since streams and memory are common to them. Ranks are processes
//! on one machine. [`settings`] has the variables that say how many devices there are.

#![allow(unsafe_code, non_snake_case, reason = "these are C libraries")]
#![allow(clippy::print_stderr, reason = "whoever breaks a rule is told which one")]

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

/// Whether there was a compiler of C++ for the kernels, without which nothing can launch one.
pub const HAS_KERNELS: bool = cfg!(not(no_kernels));
