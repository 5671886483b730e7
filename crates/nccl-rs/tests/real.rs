//! Tests of the declarations with a real NCCL library, on a machine without a GPU. The variable `DTSHARD_TEST_NCCL` has
//! the path of the library.

#![allow(unsafe_code, reason = "libraries are loaded")]

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nccl::raw::{ncclInvalidArgument, ncclResult_t};
use nccl::{Communicator, Config, Error, Library, RankPosition, UniqueId, Version, Wait};

fn library() -> Library {
    let file = PathBuf::from(std::env::var_os("DTSHARD_TEST_NCCL").expect("DTSHARD_TEST_NCCL names a libnccl.so.2"));
    // SAFETY: the environment variable has the path of NCCL.
    unsafe { Library::load(Some(&file)) }.unwrap()
}

fn alone(library: &Library) -> Result<Communicator, Error> {
    let id = UniqueId::new(library)?;
    let wait = Wait::up_to(Duration::from_secs(30));
    Communicator::new(library, RankPosition { rank: 0, ranks: 1 }, &id, &Config::default().max_ctas(2), wait)
}

#[test]
#[ignore = "needs a real NCCL"]
fn library_has_a_version_and_all_functions() {
    let library = library();
    assert!(library.version().unwrap() >= Version::from_code(21_800));
    let table = format!("{:?}", library.nccl().table());
    assert!(!table.contains("None"), "{table}");
}

#[test]
#[ignore = "needs a real NCCL"]
fn unique_ids_differ() {
    let library = library();
    assert_ne!(UniqueId::new(&library).unwrap(), UniqueId::new(&library).unwrap());
}

#[test]
#[ignore = "needs a real NCCL"]
fn error_text_comes_from_nccl() {
    let library = library();
    assert!(library.nccl().error_string(ncclInvalidArgument).starts_with("invalid argument"));
    assert!(library.nccl().error_string(ncclResult_t(77)).starts_with("unknown result code"));
}

#[test]
#[ignore = "needs a real NCCL, and no device"]
fn missing_device_is_an_error() {
    let library = library();
    let begin = Instant::now();
    let error = alone(&library).unwrap_err();
    assert!(matches!(error, Error::Call { function: "ncclCommInitRankConfig", .. }), "{error:?}");
    assert!(error.to_string().contains("unhandled cuda error"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(20));
}

#[test]
#[ignore = "needs a real NCCL"]
fn invalid_rank_is_an_error() {
    let library = library();
    let wait = Wait::up_to(Duration::from_secs(30));
    let id = UniqueId::from_bytes([0; UniqueId::BYTES]);
    let refused =
        Communicator::new(&library, RankPosition { rank: 2, ranks: 2 }, &id, &Config::default(), wait).unwrap_err();
    assert_eq!(refused.to_string(), "ncclCommInitRankConfig: there is no rank 2 of 2");
}
