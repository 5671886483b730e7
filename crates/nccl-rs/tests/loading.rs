//! What is said where NCCL is not, or is something else. Needs neither NCCL nor a device.

#![allow(unsafe_code, reason = "libraries are loaded")]

use std::path::Path;

use nccl::raw::{NCCL_API_MAGIC, ncclConfig_t, ncclResult_t, ncclSystemError};
use nccl::result::Nccl;
use nccl::{DataType, Error, Library, RedOp, UniqueId, Version};

fn load(file: &str) -> Result<Library, Error> {
    // SAFETY: the files of these tests are not there, or are the C library's, whose functions have other names.
    unsafe { Library::load(Some(Path::new(file))) }
}

#[test]
fn a_file_that_is_not_there_is_named_once_with_the_reason() {
    let error = load("/nowhere/libnccl.so.2").unwrap_err();
    let why = "/nowhere/libnccl.so.2: cannot open shared object file: No such file or directory";
    assert_eq!(error.to_string(), format!("NCCL cannot be loaded: {why}"));
}

#[test]
fn every_name_that_was_tried_is_told() {
    // SAFETY: none of them is there.
    let error = unsafe { Nccl::load(&["libnone.so.2", "libnone.so"]) }.unwrap_err();
    let Error::Load { tried } = error else { panic!("{error}") };
    assert_eq!(tried.len(), 2);
    assert!(tried[0].starts_with("libnone.so.2: ") && tried[1].starts_with("libnone.so: "), "{tried:?}");
}

#[test]
fn a_file_that_is_no_library_is_refused() {
    let error = load(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap_err();
    assert!(error.to_string().contains("Cargo.toml: "), "{error}");
}

#[test]
fn a_library_that_is_not_nccl_is_refused() {
    let error = load("libc.so.6").unwrap_err();
    let why = "libc.so.6 has no ncclGetVersion, so it is not NCCL";
    assert_eq!(error, Error::Load { tried: vec![why.into()] });
}

#[test]
fn codes_and_sizes_are_those_of_the_header() {
    for (place, dtype) in DataType::ALL.into_iter().enumerate() {
        assert_eq!(dtype.code() as usize, place);
        assert_eq!(DataType::from_code(dtype.code()), Some(dtype));
    }
    assert_eq!(DataType::from_code(12), None);
    assert_eq!(DataType::ALL.map(DataType::size), [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]);
    assert_eq!(RedOp::ALL.map(RedOp::code), [0, 1, 2, 3, 4]);
}

#[test]
fn results_without_a_name_stay_numbers() {
    assert_eq!(format!("{ncclSystemError:?}"), "ncclSystemError");
    assert_eq!(format!("{:?}", ncclResult_t(77)), "ncclResult_t 77");
}

#[test]
fn versions_are_read_as_they_are_packed() {
    let shown = [2_804, 20_906, 21_805, 23_007].map(|code| Version::from_code(code).to_string());
    assert_eq!(shown, ["2.8.4", "2.9.6", "2.18.5", "2.30.7"]);
    assert!(Version::from_code(2_804) < Version::from_code(21_805));
}

#[test]
fn an_error_tells_function_meaning_code_and_the_last_warning() {
    let error = |last: Option<&str>| Error::Call {
        function: "ncclCommInitRankConfig",
        code: ncclSystemError,
        text: "unhandled system error".into(),
        last: last.map(Into::into),
    };
    assert_eq!(error(None).to_string(), "ncclCommInitRankConfig: unhandled system error (ncclSystemError)");
    let detailed = error(Some("socketStartConnect: Connect to 10.0.0.1 failed")).to_string();
    assert!(detailed.ends_with("(ncclSystemError); its last warning: socketStartConnect: Connect to 10.0.0.1 failed"));
}

#[test]
fn the_config_says_how_large_it_is() {
    let config = ncclConfig_t::INITIALIZER;
    assert_eq!((config.size, config.magic), (48, NCCL_API_MAGIC));
}

#[test]
fn ids_survive_the_way_to_other_ranks_and_are_not_printed() {
    let bytes: [u8; UniqueId::BYTES] = std::array::from_fn(|at| u8::try_from(at).unwrap() * 2);
    let id = UniqueId::from_bytes(bytes);
    assert_eq!(id.to_bytes(), bytes);
    assert_eq!(format!("{id:?}"), "UniqueId { .. }");
}
