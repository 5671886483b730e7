//! Metadata ranges: the byte ranges of a file that are not tensor data. The metadata mirror copies these ranges.
//!
//! To find the ranges, dtshard runs the reader of each format and records which bytes the reader reads. So reading the
//! mirror reports the same missing files and the same damage as reading the original files, and only the reader of a
//! format needs to know the rules of the format. The state of random number generators counts as metadata: such state
//! may differ between ranks, and dtshard must know these differences before it copies data.
//!
//! All sizes and offsets are in bytes. Invariant: a damaged file has metadata ranges, too, and no range reaches beyond
//! the end of the file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::foreign::first_bytes;
use super::listing::{format_of_data, is_data_file, is_metadata_file};
use super::traits::{Object, Objects, Read};
use super::{Checkpoint, Format};
use crate::error::{Error, Result};
use crate::storage::{FileId, Files, IoMode, MirroredFiles, Ranges};

/// The maximum length, in bytes, of a file without tensors that is copied completely into the metadata mirror. If such
/// a file is longer, only its first bytes are copied, which show its format.
const WHOLE_BYTES: u64 = 16 << 20;

/// The maximum length of a document, such as a JSON file, in bytes. A longer document is an error, because documents
/// are always copied completely into the metadata mirror.
const DOCUMENT_BYTES: u64 = 4 << 30;

/// A checkpoint folder of which each process sees only some files, and its metadata mirror: a sparse copy of the
/// metadata of all files.
#[derive(Clone, Debug)]
pub struct MirrorOf {
    /// The original folder.
    pub folder: PathBuf,
    /// The path of the mirror, which is a folder.
    pub mirror: PathBuf,
    /// For each file, the byte ranges that the mirror contains. The key is the path of the file in the mirror.
    pub holdings: Arc<MirroredFiles>,
}

impl MirrorOf {
    fn place(&self, path: &Path) -> Option<PathBuf> {
        path.strip_prefix(&self.folder).ok().map(|rest| self.mirror.join(rest))
    }
}

impl Checkpoint {
    /// Returns the path at which this process can read a file without tensors, such as a configuration file. If the
    /// checkpoint was read from a mirror, and `path` is in the checkpoint folder, this is the path of the copy in the
    /// mirror; otherwise `path`.
    pub fn place(&self, path: &Path) -> PathBuf {
        self.mirror.as_ref().and_then(|mirror| mirror.place(path)).unwrap_or_else(|| path.to_path_buf())
    }

    /// Returns the original path of the file that has the path `place` in the mirror, and the modification time of the
    /// original file, in seconds and nanoseconds since 1970. Returns `None` if the mirror has no file at `place`, or if
    /// the checkpoint was not read from a mirror.
    pub fn original(&self, place: &Path) -> Option<(PathBuf, (i64, i64))> {
        let mirror = self.mirror.as_ref()?;
        let rest = place.strip_prefix(&mirror.mirror).ok()?;
        Some((mirror.folder.join(rest), mirror.holdings.get(place)?.modified))
    }
}

/// Returns the readers that recognise a file as a container of tensors.
fn containers<'a>(path: &'a Path, head: &'a [u8]) -> impl Iterator<Item = &'static dyn Read> + 'a {
    Format::ALL.iter().map(|format| format.entry().read).filter(|read| read.is_container(path, head))
}

/// Returns whether readers may read a file. They may read documents, files with tensors or objects, pickles, tokenizer
/// files (`.model`), and files that name another file, such as `latest`.
///
/// # Errors
/// `Io`.
pub fn is_read(path: &Path) -> Result<bool> {
    // Pickles that trainers save, and tokenizer files.
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

/// Returns the locations of objects in data files, according to the metadata in a folder.
///
/// # Errors
/// The errors of reading metadata.
pub fn objects(folder: &Path) -> Result<Objects> {
    let mut found = Objects::new();
    for format in Format::ALL {
        found.extend(format.entry().read.objects(folder)?);
    }
    Ok(found)
}

/// Returns the byte ranges of a file that are not tensor data. The file itself must show which of its bytes are tensor
/// data. A data file (such as a `.distcp` file) does not show this, see [`metadata_ranges_of_items`].
///
/// # Errors
/// `Io`; `Unsupported` for a document longer than any real document.
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
                "move it out of SRC if it is not part of the checkpoint",
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

/// Returns the byte ranges of a data file (such as a `.distcp` file) that are not tensor data: the ranges of its
/// `objects`, which a metadata file in the folder lists, and the first bytes of the file.
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

/// Returns the ranges that readers have read from the file, together with the first bytes of the file, which show its
/// format.
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
    fn short_files_without_tensors_are_mirrored_whole() {
        let folder = tempfile::tempdir().unwrap();
        let mirrored_bytes = |name: &str, content: &[u8], len: u64| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            std::fs::File::options().write(true).open(&path).unwrap().set_len(len).unwrap();
            metadata_ranges(&path).map(|ranges| ranges.len_bytes())
        };
        assert_eq!(mirrored_bytes("config.json", b"{}", 2).unwrap(), 2);
        assert_eq!(mirrored_bytes("index.json", b"{}", WHOLE_BYTES + 1).unwrap(), WHOLE_BYTES + 1);
        assert_eq!(mirrored_bytes("tokenizer.model", b"\n\x0e", 5000).unwrap(), 5000);
        assert_eq!(mirrored_bytes("model.gguf", b"GGUF", WHOLE_BYTES + 1).unwrap(), 512);
        let error = mirrored_bytes("x.json", b"{}", DOCUMENT_BYTES + 1).unwrap_err().to_string();
        assert!(error.contains("x.json"), "{error}");
    }

    #[test]
    fn damaged_containers_have_metadata_ranges() {
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
