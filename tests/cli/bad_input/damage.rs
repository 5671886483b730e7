//! Truncated files and files with flipped bytes: the program reports an error or reads the saved values.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use dtshard::catalog::state_dict;
use dtshard::error::{Error, FormatError, Result};
use dtshard::exec::{Input, Options, Silent, Stop, compare, copy};
use dtshard::format::{Checkpoint, ReadOptions, resolve, torch};

use crate::common::env::TestEnv;
use crate::corrupt::{dtshard, edit, files_of, find};

/// Makes a dry run of a conversion with the library, and returns the digest of every tensor by name.
fn digests(source: &Path) -> Result<BTreeMap<String, String>> {
    let checkpoint = Checkpoint::open(source, &ReadOptions::default())?;
    let catalog = &checkpoint.catalog;
    let input = Input { files: &checkpoint.files, catalog, resolve: &resolve };
    let reservation = torch::reserve(catalog, &catalog.state, "out.pt".into())?;
    copy::dry_run(input, &reservation, &Stop::default())?;
    let options = Options { threads: 1, write_block_bytes: 1 << 20, transposed_block_bytes: 1 << 20, sync: false };
    let mut found = BTreeMap::new();
    for (fqn, id) in state_dict::all_tensors(&catalog.state) {
        let entry = catalog.tensor(id);
        let digest = compare::digest(input, entry, entry.dtype, &options, &Silent, &Stop::default())?;
        found.insert(fqn.to_string(), digest);
    }
    Ok(found)
}

/// Returns [`digests`] of a source. If the library panics, the test fails with `what`, which describes the change of
/// the file.
fn digests_without_panic(source: &Path, what: &str) -> Result<BTreeMap<String, String>> {
    catch_unwind(AssertUnwindSafe(|| digests(source))).unwrap_or_else(|_| panic!("panicked on {what}"))
}

/// Returns one source for each kind of file, with the path of the file in it that the test damages.
fn cases(env: &TestEnv) -> Vec<(PathBuf, PathBuf)> {
    let cases = [
        ("replicated_plain/dcp", ".metadata"),
        ("replicated_plain/dcp", "__0_0.distcp"),
        ("replicated_plain/ranks", "model_world_size_2_rank_1.pt"),
        ("conflict/replica", "model_world_size_2_rank_0.pt"),
        ("torch_file/trainer.pt", ""),
        ("torch_file/model.pt", ""),
        ("safetensors/single", "model.safetensors"),
        ("safetensors/sharded", "model-00002-of-00003.safetensors"),
        ("safetensors/sharded", "model.safetensors.index.json"),
    ];
    let place = |(source, file): (&str, &str)| {
        let source = env.copy(source);
        let file = if file.is_empty() { source.clone() } else { source.join(file) };
        (source, file)
    };
    cases.into_iter().map(place).collect()
}

#[test]
fn truncated_file_of_every_kind_is_an_error() {
    let env = TestEnv::new();
    for (source, file) in cases(&env) {
        let whole = fs::read(&file).unwrap();
        digests(&source).unwrap();
        for part in 0..16 {
            let len = whole.len() * part / 16;
            fs::write(&file, &whole[..len]).unwrap();
            let what = format!("{} cut to {len} of {}", file.display(), whole.len());
            let error = digests_without_panic(&source, &what).expect_err(&what).to_string();
            assert!(error.contains(source.to_str().unwrap()), "{what}: {error}");
        }
        fs::write(&file, &whole).unwrap();
        digests(&source).unwrap();
    }
}

#[test]
fn truncated_file_is_an_error_of_every_verb() {
    let env = TestEnv::new();
    for (source, file) in cases(&env) {
        let whole = fs::read(&file).unwrap();
        fs::write(&file, &whole[..whole.len() / 2]).unwrap();
        env.assert_bad_input(&source);
        fs::write(&file, &whole).unwrap();
    }
}

fn set_byte(file: &Path, at: usize, byte: u8) {
    File::options().write(true).open(file).unwrap().write_all_at(&[byte], at as u64).unwrap();
}

/// Returns whether checksums protect the header of the file. Without checksums, a changed name, shape or dtype cannot
/// be detected.
fn has_sums(file: &Path) -> bool {
    file.extension().is_some_and(|suffix| suffix == "pt" || suffix == "distcp")
}

#[test]
fn flipped_header_byte_is_an_error_or_harmless() {
    let env = TestEnv::new();
    for (source, file) in cases(&env) {
        let whole = fs::read(&file).unwrap();
        let truth = digests(&source).unwrap();
        let small = whole.len() < 3000 && !has_sums(&file);
        let ends = (0..whole.len()).filter(|at| small || *at < 64 || at + 256 >= whole.len());
        for at in ends {
            for flip in [0x01, 0x80] {
                set_byte(&file, at, whole[at] ^ flip);
                let what = format!("{} with byte {at} ^ {flip:#x}", file.display());
                match digests_without_panic(&source, &what) {
                    Ok(found) => assert!(!has_sums(&file) || found == truth, "{what} gives other values in silence"),
                    Err(error) => assert!(!error.to_string().is_empty(), "{what}"),
                }
            }
            set_byte(&file, at, whole[at]);
        }
    }
}

/// Flips bits of single bytes, in headers and in tensor data.
#[test]
fn flipped_byte_anywhere_does_not_panic() {
    let env = TestEnv::new();
    for (source, file) in cases(&env) {
        let whole = fs::read(&file).unwrap();
        for at in (0..whole.len()).step_by(if whole.len() > 8_000 { 41 } else { 7 }) {
            set_byte(&file, at, whole[at] ^ 0x81);
            let _ = digests_without_panic(&source, &format!("{} with byte {at} changed", file.display()));
            set_byte(&file, at, whole[at]);
        }
    }
}

/// Changes the first byte of the first stored tensor.
fn flip_tensor_data(file: &Path) {
    edit(file, |bytes| {
        let key = find(bytes, b"/data/0").expect("a record");
        let start = bytes[..key].windows(4).rposition(|window| window == b"PK\x03\x04").unwrap();
        let name = usize::from(u16::from_le_bytes(bytes[start + 26..start + 28].try_into().unwrap()));
        let extra = usize::from(u16::from_le_bytes(bytes[start + 28..start + 30].try_into().unwrap()));
        bytes[start + 30 + name + extra] ^= 0x10;
    });
}

#[test]
fn verify_finds_a_flipped_byte_of_data() {
    for (case, file) in [
        ("fsdp3/dcp", "__1_0.distcp"),
        ("fsdp3/ranks", "model_world_size_3_rank_1.pt"),
        ("torch_file/trainer.pt", ""),
        ("torch_file/model.pt", ""),
    ] {
        let env = TestEnv::new();
        let source = env.copy(case);
        dtshard(&[&"verify", &source]).assert_succeeded();
        let file = if file.is_empty() { source.clone() } else { source.join(file) };
        flip_tensor_data(&file);
        let found = dtshard(&[&"verify", &source]);
        assert_eq!(found.code, Some(1), "{case}: {found:?}");
        found.assert_mentions(&[file.file_name().unwrap().to_str().unwrap(), "CRC-32", "data/0"]);
    }
}

#[test]
fn verify_finds_a_flipped_byte_against_another_copy() {
    let env = TestEnv::new();
    let source = env.copy("safetensors/single");
    edit(&source.join("model.safetensors"), |bytes| *bytes.last_mut().unwrap() ^= 1);
    let found = dtshard(&[&"verify", &source, &crate::corrupt::fixture("safetensors/single")]);
    assert_eq!(found.code, Some(1), "{found:?}");
    found.assert_mentions(&["differing", "first difference at index ["]);
}

#[test]
fn missing_files_are_all_listed() {
    let env = TestEnv::new();
    let source = env.copy("fsdp4/ranks");
    for rank in [1, 3] {
        fs::remove_file(source.join(format!("model_world_size_4_rank_{rank}.pt"))).unwrap();
    }
    env.assert_bad_input(&source);

    let env = TestEnv::new();
    let source = env.copy("fsdp4/dcp");
    fs::remove_file(source.join("__0_0.distcp")).unwrap();
    fs::remove_file(source.join("__2_0.distcp")).unwrap();
    env.assert_bad_input(&source);

    let env = TestEnv::new();
    let source = env.copy("fsdp4/dcp");
    fs::remove_file(source.join(".metadata")).unwrap();
    env.assert_bad_input(&source);

    let env = TestEnv::new();
    let source = env.copy("safetensors/sharded");
    fs::remove_file(source.join("model-00002-of-00003.safetensors")).unwrap();
    dtshard(&[&"unshard", &source, &env.path("out.pt")]).assert_refused(&["model-00002-of-00003.safetensors"]);
    assert!(files_of(env.path("src").parent().unwrap()).iter().all(|path| !path.ends_with("out.pt")));
}

#[test]
fn malformed_file_error_names_the_file_and_has_a_hint() {
    let env = TestEnv::new();
    let source = env.copy("safetensors/single");
    edit(&source.join("model.safetensors"), |bytes| bytes.truncate(100));
    let error = digests(&source).unwrap_err();
    assert!(
        matches!(&error, Error::Format(FormatError::Malformed { path, .. }) if path.ends_with("model.safetensors")),
        "{error}"
    );
    assert!(error.hint().is_some());
    let failed = dtshard(&[&"inspect", &source, &"--json"]);
    assert_eq!(failed.code, Some(2));
    let document: serde_json::Value = serde_json::from_str(&failed.out).unwrap();
    for key in ["kind", "message", "file", "expected", "found", "hint"] {
        assert!(document["error"][key].is_string(), "{key} of {document}");
    }
}
