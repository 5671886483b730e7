//! dtshard converts sharded PyTorch checkpoints between layouts, without Python.
//!
//! A checkpoint is a [`catalog::Catalog`]: logical tensors whose content is covered by chunks, each a box of the
//! tensor that lies somewhere in a file. Reading a format yields one; choosing what is wanted of it, under which names
//! and in which dtypes, yields another; choosing a target layout and *reserving* its files yields a third. A plan is the
//! intersection of the first and the last, tensor by tensor. Executed as *copy* it is `reshard`, `flatten`, `unshard` or
//! `consolidate`; as *compare* it is `verify`; as *print* it is `--dry-run`.
//!
//! ```text
//! SRC --format::read--> Catalog(source) -------------------------------+--> plan (elements) --lower--> runs (bytes)
//!                            | select                                  |                                 | exec
//!                            v                                         |                                 v
//!                       Catalog(wanted) --format::reserve--> Catalog(target)                          publish
//! ```
//!
//! Flat parameters of FSDP1 are no tensors of a catalog: reading puts parameters in their place, and writing puts them
//! behind each other again, as a [`catalog::flat::FlatLayout`] says.
//!
//! Several processes share the last step: each fills its [`comm::Part`] of the bytes. Where they exchange bytes, a
//! [`comm::Communicator`] moves them: NCCL between GPUs, MPI between hosts.
//!
//! Where no process sees all of SRC, they make a metadata mirror of it first ([`twin`]), from which all read the same catalog.
//! Without GPUs and MPI they [copy](exec::source_copy) the files that only some of them see to where all see them.
//!
//! The program is a crate of its own, `main.rs` with `cli` and `commands`, and sees what is public here. Who may import whom
//! in the library: `twin` sees `format`, `storage` and `comm`; `exec` sees `plan`,
//! `catalog`, `storage` and `comm` but no format and no terminal; `gpu` sees `exec` and `comm`, and what numbers are in
//! `catalog` and `layout`; `plan`, `format` and `select` see these two; `layout` is pure algebra, `comm` the environment of
//! a process and what others are to it, and both see nothing of the crate.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "a test that is wrong about a file fails"))]

pub mod catalog;
pub mod comm;
pub mod error;
pub mod exec;
pub mod fault;
pub mod format;
pub mod gpu;
pub mod layout;
pub mod name_list;
pub mod nearest;
pub mod plan;
pub mod quantity;
pub mod select;
pub mod storage;
pub mod threads;
pub mod twin;
