//! Skeletons: which stretches of a file are not tensor data.
//!
//! They are those that reading looks at, found by reading. So what a file lacks or what is wrong with it shows again when
//! only its skeleton is read, and no rule is written down twice. State of random number generators counts as none of a
//! tensor's: it may differ from rank to rank, which is decided before anything is moved.
//!
//! Counts bytes. Invariant: what is damaged has a skeleton, too, and none reaches beyond the end of its file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::foreign::first_bytes;
use super::listing::{format_of_data, is_data_file, is_metadata_file};
use super::registry::{Object, Objects, Read};
use super::{Checkpoint, Format};
use crate::error::{Error, Result};
use crate::storage::{FileId, Files, IoMode, MirroredFiles, Ranges};

/// Files that are no containers of tensors are held whole up to this length. Of a longer one only its first bytes tell
/// what it is.
const WHOLE_BYTES: u64 = 16 << 20;

/// Documents must be whole, so this is as long as they may be.
const DOCUMENT_BYTES: u64 = 4 << 30;

/// Where all processes find what is not tensor data of a folder of which each sees but some files.
#[derive(Clone, Debug)]
pub struct MirrorOf {
    pub folder: PathBuf,
    pub twin: PathBuf,
    /// What is known of its files, by where they lie in it.
    pub holdings: Arc<MirroredFiles>,
}

impl MirrorOf {
    fn place(&self, path: &Path) -> Option<PathBuf> {
        path.strip_prefix(&self.folder).ok().map(|rest| self.twin.join(rest))
    }
}

impl Checkpoint {
    /// Where to read a file of it that is no container of tensors, such as a configuration.
    #[must_use]
    pub fn place(&self, path: &Path) -> PathBuf {
        self.twin.as_ref().and_then(|twin| twin.place(path)).unwrap_or_else(|| path.to_path_buf())
    }

    /// What SRC calls a file at such a place, and when it was last changed there; `None` where that is no twin.
    #[must_use]
    pub fn original(&self, place: &Path) -> Option<(PathBuf, (i64, i64))> {
        let twin = self.twin.as_ref()?;
        let rest = place.strip_prefix(&twin.twin).ok()?;
        Some((twin.folder.join(rest), twin.holdings.get(place)?.modified))
    }
}

/// Returns the formats of which a file is a container.
fn containers<'a>(path: &'a Path, head: &'a [u8]) -> impl Iterator<Item = &'static dyn Read> + 'a {
    Format::ALL.iter().map(|format| format.entry().read).filter(|read| read.is_container(path, head))
}

/// Whether a file may be part of a checkpoint: a document, a container of tensors, or what names one.
///
/// # Errors
/// `Io`.
pub fn is_read(path: &Path) -> Result<bool> {
    // Pickles of trainers, and tokenizers.
    const OTHERS: [&str; 2] = ["pkl", "model"];
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let suffix = path.extension().and_then(|suffix| suffix.to_str()).unwrap_or_default();
    let is_known = Format::from_suffix(suffix).is_some() || is_data_file(path) || OTHERS.contains(&suffix);
    if is_document(name) || is_known || name.starts_with("latest") {
        return Ok(true);
    }
    let head = first_bytes(path)?;
    Ok(head.starts_with(b"\x80") || containers(path, &head).next().is_some())
}

/// Returns where metadata in a folder says that objects are in data files.
///
/// # Errors
/// As reading metadata.
pub fn objects(folder: &Path) -> Result<Objects> {
    let mut found = Objects::new();
    for format in Format::ALL {
        found.extend(format.entry().read.objects(folder)?);
    }
    Ok(found)
}

/// The skeleton of a file that says itself what is in it.
///
/// # Errors
/// `Io`; `Unsupported` for documents that nobody has.
pub fn metadata_ranges(path: &Path) -> Result<Ranges> {
    let mut files = Files::new(IoMode::Read).recording_reads();
    let file = files.add(path)?;
    let len = files.len_bytes(file);
    let head = first_bytes(path)?;
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if is_document(name) {
        if len > DOCUMENT_BYTES {
            return Err(Error::unsupported(
                format!("{}: a document of {len} bytes, which would be copied to all processes", path.display()),
                "move it out of SRC, if it is no part of the checkpoint",
            ));
        }
        return Ok(whole(len));
    }
    let mut is_container = false;
    for read in containers(path, &head) {
        read.read_header(&files, file);
        is_container = true;
    }
    Ok(if is_container || len > WHOLE_BYTES { with_head(&files, file) } else { whole(len) })
}

/// The skeleton of a data file, of which metadata says where objects are.
///
/// # Errors
/// `Io`.
pub fn metadata_ranges_of_items(path: &Path, objects: &[Object]) -> Result<Ranges> {
    let mut files = Files::new(IoMode::Read).recording_reads();
    let file = files.add(path)?;
    if let Some(format) = format_of_data(path) {
        format.entry().read.read_objects(&files, file, objects);
    }
    Ok(with_head(&files, file))
}

fn whole(len: u64) -> Ranges {
    std::iter::once(0..len).collect()
}

/// What was read, and the bytes by which a file's format is known.
fn with_head(files: &Files, file: FileId) -> Ranges {
    const HEAD_BYTES: u64 = 512;
    std::iter::once(0..HEAD_BYTES.min(files.len_bytes(file))).chain(files.recorded_reads(file).iter()).collect()
}

fn is_document(name: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(_, suffix)| suffix == "json") || is_metadata_file(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_container_is_held_whole_while_it_is_short() {
        let folder = tempfile::tempdir().unwrap();
        let held = |name: &str, content: &[u8], len: u64| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            std::fs::File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
            metadata_ranges(&path).map(|ranges| ranges.len_bytes())
        };
        assert_eq!(held("config.json", b"{}", 2).unwrap(), 2);
        assert_eq!(held("index.json", b"{}", WHOLE_BYTES + 1).unwrap(), WHOLE_BYTES + 1);
        assert_eq!(held("tokenizer.model", b"\n\x0e", 5000).unwrap(), 5000);
        assert_eq!(held("model.gguf", b"GGUF", WHOLE_BYTES + 1).unwrap(), 512);
        let error = held("x.json", b"{}", DOCUMENT_BYTES + 1).unwrap_err().to_string();
        assert!(error.contains("x.json"), "{error}");
    }

    #[test]
    fn damaged_containers_have_skeletons() {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in [
            ("a.pt", b"PK\x03\x04".as_slice()),
            ("b.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\xff{"),
            ("c.safetensors", b"\x03"),
            ("d.safetensors", b""),
        ] {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            assert_eq!(metadata_ranges(&path).unwrap().len_bytes(), content.len() as u64, "{name}");
        }
    }
}
