//! The table of files that checkpoint folders contain. `--overwrite` may replace a file that matches a row of the
//! table, whichever program wrote the file. Each format has rows for its own files; this source file has the rows of
//! files that belong to no single format.
//!
//! If a name is distinctive, the name alone must match the row. For other names (`.pt`, `layout.json`), the first bytes
//! must match as well. A row with [`FileSignature::Unknown`] never matches, and only lists names that `consolidate`
//! copies. Only the first bytes of a file are ever read. `docs/reference/folders.md` shows this table; a test compares
//! that page with the table.

use std::path::{Component, Path};
use std::sync::LazyLock;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::foreign::{first_bytes, refuse_folder};
use super::torch::is_archive;
use super::{Format, deepspeed};
use crate::error::{Error, Result};

/// The purpose of a file in a checkpoint folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRole {
    /// A file with tensors, or with metadata about the layout of tensors.
    Checkpoint,
    /// A file that loaders need beside the weights, and that consolidate copies.
    Asset,
    /// A file that trainers or loaders keep in the folder of the weights, although loaders do not need the file.
    Beside,
}

/// The requirement on the first bytes of a file with a matching name.
#[derive(Clone, Copy)]
pub enum FileSignature {
    Any,
    /// This function must return true for the first bytes and the length of the file.
    Like(fn(&[u8], u64) -> bool),
    /// No file matches, because users may give this name to their own files, and the content cannot be recognised. The
    /// verb `consolidate` copies files with this name. `--overwrite` replaces such a file only if it is still the copy
    /// that `consolidate` wrote.
    Unknown,
}

/// A row of the table: a kind of file that checkpoint folders contain.
pub struct KnownFile {
    /// A glob of file names, relative to the checkpoint's folder or to one of its [`FOLDERS`].
    pub pattern: &'static str,
    /// The purpose of the files.
    pub role: FileRole,
    /// The requirement that the first bytes of a file must fulfil.
    pub start: FileSignature,
}

impl KnownFile {
    /// Returns a row of the table of known files.
    pub const fn new(pattern: &'static str, role: FileRole, start: FileSignature) -> Self {
        Self { pattern, role, start }
    }

    /// Returns a row for configuration and tokenizer files, which loaders need.
    const fn asset(pattern: &'static str) -> Self {
        Self::new(pattern, FileRole::Asset, FileSignature::Any)
    }

    /// Returns a row for assets whose names users may also give to their own files.
    const fn likely_asset(pattern: &'static str) -> Self {
        Self::new(pattern, FileRole::Asset, FileSignature::Unknown)
    }

    /// Returns a row for files that trainers and loaders keep beside the weights.
    pub const fn beside(pattern: &'static str) -> Self {
        Self::new(pattern, FileRole::Beside, FileSignature::Any)
    }
}

/// The known files that belong to no single format.
static OTHERS: [KnownFile; 27] = [
    KnownFile::asset("config.json"),
    KnownFile::asset("generation_config.json"),
    KnownFile::asset("tokenizer.{json,model}"),
    KnownFile::asset("tokenizer_config.json"),
    KnownFile::asset("special_tokens_map.json"),
    KnownFile::asset("added_tokens.json"),
    KnownFile::asset("vocab.{json,txt}"),
    KnownFile::asset("merges.txt"),
    KnownFile::asset("spiece.model"),
    KnownFile::asset("sentencepiece.bpe.model"),
    KnownFile::asset("chat_template.{json,jinja}"),
    KnownFile::asset("{,video_,image_}preprocessor_config.json"),
    KnownFile::asset("{,image_}processor_config.json"),
    KnownFile::likely_asset("tokenizer*"),
    KnownFile::likely_asset("*.tiktoken"),
    KnownFile::likely_asset("sentencepiece*.model"),
    KnownFile::likely_asset("chat_template*"),
    KnownFile::likely_asset("additional_chat_templates/*.jinja"),
    KnownFile::likely_asset("configuration_*.py"),
    KnownFile::likely_asset("modeling_*.py"),
    KnownFile::likely_asset("modular_*.py"),
    KnownFile::likely_asset("{tokenization,processing,image_processing}_*.py"),
    KnownFile::likely_asset("LICENSE*"),
    KnownFile::beside("adapter_config.json"),
    KnownFile::beside("fsdp_config.json"),
    KnownFile::beside("trainer_state.json"),
    // accelerate writes these files with torch.save.
    KnownFile::new("{random_states,custom_checkpoint}_*.pkl", FileRole::Beside, FileSignature::Like(is_archive)),
];

/// The known files of all formats, followed by `OTHERS`.
static ROWS: LazyLock<Vec<&'static KnownFile>> = LazyLock::new(|| {
    let of_formats = Format::ALL.iter().flat_map(|format| format.entry().known_files);
    of_formats.chain(&OTHERS).collect()
});

/// Globs of the subfolders of a checkpoint folder that may contain known files.
const FOLDERS: [&str; 4] =
    ["huggingface", "lora_adapter", "pytorch_model_fsdp_{[0-9],[0-9][0-9]}", "optimizer_{[0-9],[0-9][0-9]}"];

static FILE_NAMES: LazyLock<GlobSet> = LazyLock::new(|| glob_set(ROWS.iter().map(|row| row.pattern)));
static FOLDER_NAMES: LazyLock<GlobSet> = LazyLock::new(|| glob_set(FOLDERS));
static ASSET_NAMES: LazyLock<GlobSet> =
    LazyLock::new(|| glob_set(ROWS.iter().filter(|row| row.role == FileRole::Asset).map(|row| row.pattern)));

fn glob_set(patterns: impl IntoIterator<Item = &'static str>) -> GlobSet {
    let glob = |pattern| GlobBuilder::new(pattern).literal_separator(true).empty_alternates(true).build();
    let mut names = GlobSetBuilder::new();
    for pattern in patterns {
        names.add(glob(pattern).expect("a pattern that a test has parsed"));
    }
    names.build().expect("a set that a test has built")
}

/// Returns whether loaders need a file of this name beside the weights. The name is relative to the model's folder.
pub fn is_asset(name: &Path) -> bool {
    ASSET_NAMES.is_match(name)
}

/// Returns whether a folder may contain known files, as shown by its name relative to the checkpoint's folder.
pub fn is_known_folder(name: &Path) -> bool {
    below_known_folder(name).as_os_str().is_empty()
}

/// Returns the path without its first component, if that component is one of [`FOLDERS`].
fn below_known_folder(name: &Path) -> &Path {
    let mut parts = name.components();
    match parts.next() {
        Some(Component::Normal(first)) if FOLDER_NAMES.is_match(first) => parts.as_path(),
        _ => name,
    }
}

/// Returns the purpose of a file in a checkpoint folder, as shown by its name relative to that folder and by its first
/// bytes. Returns `None` for a file that is not in the table. `path` is the location of the file; links are followed.
pub fn role_of(name: &Path, path: &Path) -> Option<FileRole> {
    let name = below_known_folder(name);
    let is_hidden = name.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    let rows = FILE_NAMES.matches(name).into_iter().map(|row| ROWS[row]);
    let mut rows = rows.filter(|row| !is_hidden || row.pattern.starts_with('.'));
    rows.find(|row| starts_with(path, row.start)).map(|row| row.role)
}

/// Returns whether a single file is a checkpoint, regardless of its name.
///
/// # Errors
/// `Io` if the file cannot be read.
pub fn is_checkpoint_file(path: &Path) -> Result<bool> {
    let (head, len) = (first_bytes(path)?, std::fs::metadata(path).map_err(Error::io("stat", path))?.len());
    let mut tests = Format::ALL.iter().filter_map(|format| format.entry().is_checkpoint_file);
    Ok(tests.any(|test| test(&head, len)))
}

/// Refuses a folder that is a checkpoint of another framework, or of DeepSpeed. Such folders contain torch files as well,
/// and dtshard cannot write them again.
///
/// # Errors
/// `Unsupported` with the name of the format.
pub fn refuse_foreign_folder(folder: &Path, names: &[String]) -> Result<()> {
    if names.iter().any(|name| deepspeed::is_states(name)) {
        return Err(Error::unsupported(
            format!(
                "{} is a DeepSpeed checkpoint, which dtshard does not write, so it does not replace it",
                folder.display()
            ),
            "choose another destination, or remove the folder yourself",
        ));
    }
    refuse_folder(folder, names, None)
}

fn starts_with(path: &Path, start: FileSignature) -> bool {
    let test = match start {
        FileSignature::Any => return true,
        FileSignature::Unknown => return false,
        FileSignature::Like(test) => test,
    };
    let (Ok(head), Ok(metadata)) = (first_bytes(path), std::fs::metadata(path)) else { return false };
    test(&head, metadata.len())
}

#[cfg(test)]
mod tests {
    use super::FileRole::{Asset, Beside, Checkpoint};
    use super::*;

    #[test]
    fn assets_are_known_by_name() {
        let known = [
            "config.json",
            "tokenizer.json",
            "tokenizer.model",
            "vocab.txt",
            "preprocessor_config.json",
            "video_preprocessor_config.json",
            "chat_template.jinja",
            "additional_chat_templates/rag.jinja",
            "modeling_mine.py",
        ];
        assert!(known.iter().all(|name| is_asset(Path::new(name))));
        let unknown = ["optimizer.pt", "model.safetensors", "trainer_state.json", "sub/config.json", "train.py"];
        assert!(!unknown.iter().any(|name| is_asset(Path::new(name))));
    }

    fn role(name: &str, content: &[u8]) -> Option<FileRole> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, content).unwrap();
        role_of(Path::new(name), &path)
    }

    #[test]
    fn ambiguous_names_need_matching_first_bytes() {
        let mut torch = b"PK\x03\x04".to_vec();
        torch.resize(30, 0);
        torch[26] = 14;
        torch.extend(b"model/data.pkl");
        let mut other_zip = torch.clone();
        other_zip[30..44].copy_from_slice(b"word/style.xml");
        let mut safetensors = 2_u64.to_le_bytes().to_vec();
        safetensors.extend(b"{}");
        let layout = br#"{"version": 1, "world_size": 2}"#;
        for (name, content, expected) in [
            ("model.pt", &torch[..], Some(Checkpoint)),
            ("model.pt", b"mine", None),
            ("model.pt", &other_zip, None),
            ("model.pt", b"", None),
            ("model.pt.bak", &torch, None),
            (".model.pt", &torch, None),
            ("sub/model.pt", &torch, None),
            ("pytorch_model_fsdp_0/model.pt", &torch, Some(Checkpoint)),
            ("huggingface/pytorch_model_fsdp_0/model.pt", &torch, None),
            ("random_states_0.pkl", &torch, Some(Beside)),
            ("results.pkl", &torch, None),
            ("model.safetensors", &safetensors, Some(Checkpoint)),
            ("model.safetensors", b"mine, of 9 bytes", None),
            (".metadata", b"\x80\x04", Some(Checkpoint)),
            (".metadata", b"mine", None),
            ("__0_0.distcp", b"", Some(Checkpoint)),
            ("notes.distcp", b"", None),
            ("tokenizer.json", b"{}", Some(Asset)),
            ("tokenizer-notes.txt", b"mine", None),
            ("LICENSE-of-my-thesis", b"mine", None),
            ("modeling_mine.py", b"mine", None),
            ("latest", b"mine", None),
            ("optimizer_0/optim.pt", &torch, Some(Checkpoint)),
            ("optimizer_results/optim.pt", &torch, None),
            ("layout.json", layout, Some(Beside)),
            ("layout.json", b"{\"mesh\": []}", None),
            ("config.json", b"{}", Some(Asset)),
            ("huggingface/config.json", b"{}", Some(Asset)),
            ("notes/config.json", b"{}", None),
            ("README.md", b"---\n", None),
            (".gitattributes", b"", None),
            (".DS_Store", b"", None),
            ("thesis.tex", b"", None),
        ] {
            assert_eq!(role(name, content), expected, "{name}");
        }
    }

    /// Asserts that `docs/reference/folders.md` lists every pattern of the table. A pattern of one format may instead
    /// be in the page of this format.
    #[test]
    fn documentation_lists_every_pattern() {
        let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
        let read = |page: &str| std::fs::read_to_string(docs.join(page)).unwrap();
        let table = read("reference/folders.md");
        let is_in = |page: &str, name: &str| page.contains(&format!("`{name}`"));
        let mut missing: Vec<&str> = OTHERS.iter().map(|row| row.pattern).chain(FOLDERS).collect();
        missing.retain(|name| !is_in(&table, name));
        for format in Format::ALL {
            let page = read(&format!("reference/formats/{format}.md"));
            let patterns = format.entry().known_files.iter().map(|row| row.pattern);
            missing.extend(patterns.filter(|name| !is_in(&table, name) && !is_in(&page, name)));
        }
        assert!(missing.is_empty(), "{missing:?}");
    }
}
