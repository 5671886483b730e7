//! The table of files that checkpoint folders have: what `--overwrite` may replace without a look at who wrote it.
//!
//! A name decides where it says enough. Where it does not (`.pt`, `layout.json`), the first bytes have to fit, too. No
//! more than those is read of any file. `docs/reference/folders.md` shows the same table; a test compares the two.

use std::path::{Component, Path};
use std::sync::LazyLock;

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

use super::foreign::{first_bytes, refuse_folder};
use crate::error::{Error, Result};

/// The part that a file has in a checkpoint folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRole {
    /// Tensors, or what says how they are laid out.
    Checkpoint,
    /// Loaders need it beside the weights, and consolidate copies it.
    Asset,
    /// Trainers and loaders keep it beside the weights.
    Beside,
}

/// The first bytes that a file of a name must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileSignature {
    Any,
    /// An archive of `torch.save`, in which the pickle comes first.
    Torch,
    /// The length of a header that fits the file, and a JSON object.
    Safetensors,
    Pickle,
    /// A layout document of dtshard.
    Layout,
    /// A name that people give to files of their own, too, and content that tells nothing. consolidate copies such a
    /// file; `--overwrite` replaces it only where it is such a copy.
    Unknown,
}

use FileRole::{Asset, Beside, Checkpoint};

/// Names, relative to the checkpoint's folder or to one of [`FOLDERS`] in it.
const FILES: [(&str, FileRole, FileSignature); 35] = [
    (".metadata", Checkpoint, FileSignature::Pickle),
    ("__[0-9]*.metadata", Checkpoint, FileSignature::Pickle),
    ("__[0-9]*_[0-9]*.distcp", Checkpoint, FileSignature::Any),
    ("*.safetensors", Checkpoint, FileSignature::Safetensors),
    ("*.{pt,pth,bin,ckpt}", Checkpoint, FileSignature::Torch),
    ("*.{safetensors,bin}.index{,.*}.json", Beside, FileSignature::Any),
    ("layout.json", Beside, FileSignature::Layout),
    ("flat_layout.json", Beside, FileSignature::Layout),
    ("config.json", Asset, FileSignature::Any),
    ("generation_config.json", Asset, FileSignature::Any),
    ("tokenizer.{json,model}", Asset, FileSignature::Any),
    ("tokenizer_config.json", Asset, FileSignature::Any),
    ("special_tokens_map.json", Asset, FileSignature::Any),
    ("added_tokens.json", Asset, FileSignature::Any),
    ("vocab.{json,txt}", Asset, FileSignature::Any),
    ("merges.txt", Asset, FileSignature::Any),
    ("spiece.model", Asset, FileSignature::Any),
    ("sentencepiece.bpe.model", Asset, FileSignature::Any),
    ("chat_template.{json,jinja}", Asset, FileSignature::Any),
    ("{,video_,image_}preprocessor_config.json", Asset, FileSignature::Any),
    ("{,image_}processor_config.json", Asset, FileSignature::Any),
    ("tokenizer*", Asset, FileSignature::Unknown),
    ("*.tiktoken", Asset, FileSignature::Unknown),
    ("sentencepiece*.model", Asset, FileSignature::Unknown),
    ("chat_template*", Asset, FileSignature::Unknown),
    ("additional_chat_templates/*.jinja", Asset, FileSignature::Unknown),
    ("configuration_*.py", Asset, FileSignature::Unknown),
    ("modeling_*.py", Asset, FileSignature::Unknown),
    ("modular_*.py", Asset, FileSignature::Unknown),
    ("{tokenization,processing,image_processing}_*.py", Asset, FileSignature::Unknown),
    ("LICENSE*", Asset, FileSignature::Unknown),
    ("adapter_config.json", Beside, FileSignature::Any),
    ("fsdp_config.json", Beside, FileSignature::Any),
    ("trainer_state.json", Beside, FileSignature::Any),
    ("{random_states,custom_checkpoint}_*.pkl", Beside, FileSignature::Torch),
];

/// Folders in a checkpoint's folder that have files of the table in them.
const FOLDERS: [&str; 4] =
    ["huggingface", "lora_adapter", "pytorch_model_fsdp_{[0-9],[0-9][0-9]}", "optimizer_{[0-9],[0-9][0-9]}"];

static FILE_NAMES: LazyLock<GlobSet> = LazyLock::new(|| glob_set(FILES.iter().map(|(pattern, ..)| *pattern)));
static FOLDER_NAMES: LazyLock<GlobSet> = LazyLock::new(|| glob_set(FOLDERS));
static ASSET_NAMES: LazyLock<GlobSet> =
    LazyLock::new(|| glob_set(FILES.iter().filter(|(_, role, _)| *role == Asset).map(|(pattern, ..)| *pattern)));

fn glob_set(patterns: impl IntoIterator<Item = &'static str>) -> GlobSet {
    let glob = |pattern| GlobBuilder::new(pattern).literal_separator(true).empty_alternates(true).build();
    let mut names = GlobSetBuilder::new();
    for pattern in patterns {
        names.add(glob(pattern).expect("a pattern that a test has parsed"));
    }
    names.build().expect("a set that a test has built")
}

/// Returns whether loaders want a file of this name, relative to the model's folder, beside the weights.
#[must_use]
pub fn is_asset(name: &Path) -> bool {
    ASSET_NAMES.is_match(name)
}

/// Returns whether a folder, relative to the checkpoint's folder, has files of the table in it.
#[must_use]
pub fn is_known_folder(name: &Path) -> bool {
    below_known_folder(name).as_os_str().is_empty()
}

/// The rest of a path behind a folder of [`FOLDERS`] that it begins with.
fn below_known_folder(name: &Path) -> &Path {
    let mut parts = name.components();
    match parts.next() {
        Some(Component::Normal(first)) if FOLDER_NAMES.is_match(first) => parts.as_path(),
        _ => name,
    }
}

/// The part of a file in a checkpoint folder, by its name relative to that folder and its first bytes; `None` for a file
/// that is not in the table. `path` is where it lies; links are followed.
#[must_use]
pub fn role_of(name: &Path, path: &Path) -> Option<FileRole> {
    let name = below_known_folder(name);
    let is_hidden = name.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    let rows = FILE_NAMES.matches(name).into_iter().map(|row| &FILES[row]);
    let mut rows = rows.filter(|(pattern, ..)| !is_hidden || pattern.starts_with('.'));
    rows.find(|(.., start)| starts_with(path, *start)).map(|(_, role, _)| *role)
}

/// Returns whether a file alone is a checkpoint, whatever its name.
///
/// # Errors
/// `Io` where it cannot be read.
pub fn is_checkpoint_file(path: &Path) -> Result<bool> {
    let (head, len) = (first_bytes(path)?, std::fs::metadata(path).map_err(Error::io("look at", path))?.len());
    Ok(is_torch(&head) || is_safetensors(&head, len))
}

/// Checkpoints of other frameworks have torch files, too: refuse a folder of one.
///
/// # Errors
/// `Unsupported` naming the format.
pub fn refuse_foreign_folder(folder: &Path, names: &[String]) -> Result<()> {
    refuse_folder(folder, names, None)
}

/// Torch files that trainers leave beside a model, by the beginnings of their names.
const NO_MODEL: [&str; 11] = [
    "scheduler",
    "optimizer",
    "rng_state",
    "random_states",
    "training_args",
    "sampler",
    "scaler",
    "dataloader",
    "dl_state_dict",
    // What Lightning and Megatron leave in DCP directories.
    "meta.pt",
    "common.pt",
];

/// Returns whether trainers leave a torch file of this name beside a model.
pub fn is_no_model(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    NO_MODEL.iter().any(|beginning| name.starts_with(beginning))
}

fn starts_with(path: &Path, start: FileSignature) -> bool {
    if start == FileSignature::Any {
        return true;
    }
    let (Ok(head), Ok(metadata)) = (first_bytes(path), std::fs::metadata(path)) else { return false };
    match start {
        FileSignature::Any => true,
        FileSignature::Unknown => false,
        FileSignature::Torch => is_torch(&head),
        FileSignature::Safetensors => is_safetensors(&head, metadata.len()),
        FileSignature::Pickle => head.first() == Some(&0x80),
        FileSignature::Layout => ["\"version\"", "\"world_size\""].iter().all(|key| contains(&head, key.as_bytes())),
    }
}

/// `torch.save` writes `NAME/data.pkl` first, which tells its archives from every other ZIP file.
fn is_torch(head: &[u8]) -> bool {
    const NAME_LEN: usize = 26;
    const NAME: usize = 30;
    if !head.starts_with(b"PK\x03\x04") {
        return false;
    }
    let Some(&[low, high]) = head.get(NAME_LEN..NAME_LEN + 2) else { return false };
    let end = NAME + usize::from(u16::from_le_bytes([low, high]));
    // A name that goes on behind the first bytes is a long one.
    let name = head.get(NAME..end.min(head.len())).unwrap_or_default();
    name.ends_with(b"/data.pkl")
}

fn is_safetensors(head: &[u8], len: u64) -> bool {
    let Some(Ok(header)) = head.get(..8).map(<[u8; 8]>::try_from) else { return false };
    head.get(8) == Some(&b'{') && u64::from_le_bytes(header) <= len.saturating_sub(8)
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}

#[cfg(test)]
mod tests {
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
    fn names_that_say_too_little_need_the_right_first_bytes() {
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

    #[test]
    fn the_documented_table_is_this_one() {
        let page = include_str!("../../docs/reference/folders.md");
        let names: Vec<&str> = FILES.iter().map(|(pattern, ..)| *pattern).chain(FOLDERS).collect();
        let missing: Vec<_> = names.iter().filter(|name| !page.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
