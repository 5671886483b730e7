//! Tests of the errors that occur if NCCL is missing, or if a file is not NCCL. They need neither NCCL nor a GPU.

#![allow(unsafe_code, reason = "libraries are loaded")]

use std::path::Path;

use nccl::raw::{NCCL_API_MAGIC, ncclConfig_t, ncclResult_t, ncclSystemError};
use nccl::result::Nccl;
use nccl::{DataType, Error, Library, RedOp, UniqueId, Version};

fn load(file: &str) -> Result<Library, Error> {
    // SAFETY: the files of these tests do not exist, or are the C library, whose functions have other names.
    unsafe { Library::load(Some(Path::new(file))) }
}

#[test]
fn missing_file_is_named_once_with_the_reason() {
    let error = load("/nowhere/libnccl.so.2").unwrap_err();
    let why = "/nowhere/libnccl.so.2: cannot open shared object file: No such file or directory";
    assert_eq!(error.to_string(), format!("NCCL cannot be loaded: {why}"));
}

#[test]
fn error_has_every_name_that_was_tried() {
    // SAFETY: none of the files exists.
    let error = unsafe { Nccl::load(&["libnone.so.2", "libnone.so"]) }.unwrap_err();
    let Error::Load { tried } = error else { panic!("{error}") };
    assert_eq!(tried.len(), 2);
    assert!(tried[0].starts_with("libnone.so.2: ") && tried[1].starts_with("libnone.so: "), "{tried:?}");
}

#[test]
fn invalid_library_is_an_error() {
    let error = load(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap_err();
    assert!(error.to_string().contains("Cargo.toml: "), "{error}");
}

#[test]
fn library_other_than_nccl_is_an_error() {
    let error = load("libc.so.6").unwrap_err();
    let why = "libc.so.6 has no ncclGetVersion, so it is not NCCL";
    assert_eq!(error, Error::Load { tried: vec![why.into()] });
}

#[test]
fn codes_and_sizes_equal_the_header() {
    for (place, dtype) in DataType::ALL.into_iter().enumerate() {
        assert_eq!(dtype.code() as usize, place);
        assert_eq!(DataType::from_code(dtype.code()), Some(dtype));
    }
    assert_eq!(DataType::from_code(12), None);
    assert_eq!(DataType::ALL.map(DataType::size), [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]);
    assert_eq!(RedOp::ALL.map(RedOp::code), [0, 1, 2, 3, 4]);
}

#[test]
fn unknown_code_is_shown_as_a_number() {
    assert_eq!(format!("{ncclSystemError:?}"), "ncclSystemError");
    assert_eq!(format!("{:?}", ncclResult_t(77)), "ncclResult_t 77");
}

#[test]
fn version_codes_are_decoded() {
    let shown = [2_804, 20_906, 21_805, 23_007].map(|code| Version::from_code(code).to_string());
    assert_eq!(shown, ["2.8.4", "2.9.6", "2.18.5", "2.30.7"]);
    assert!(Version::from_code(2_804) < Version::from_code(21_805));
}

#[test]
fn error_has_function_text_code_and_last_warning() {
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
fn config_has_its_size() {
    let config = ncclConfig_t::INITIALIZER;
    assert_eq!((config.size, config.magic), (48, NCCL_API_MAGIC));
}

#[test]
fn unique_id_round_trips_and_is_not_printed() {
    let bytes: [u8; UniqueId::BYTES] = std::array::from_fn(|at| u8::try_from(at).unwrap() * 2);
    let id = UniqueId::from_bytes(bytes);
    assert_eq!(id.to_bytes(), bytes);
    assert_eq!(format!("{id:?}"), "UniqueId { .. }");
}
