//! Recognises torch.save files by their first bytes, and torch files without a model by their names. Also reads those
//! bytes of an archive that are not tensor data.

use std::path::Path;

use super::reader;
use super::tensor::TensorNode;
use crate::catalog::{FileLocation, state_dict};
use crate::format::{MAX_RANDOM_STATE_BYTES, archive};
use crate::storage::{FileId, Files};
use torch_pickle::pickle::Unknown;

/// The beginnings of the names of torch files that trainers save beside a model.
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
    // Lightning and Megatron save these two files in DCP directories.
    "meta.pt",
    "common.pt",
];

/// Returns whether the name of a torch file shows that the file contains no model, because trainers save files with
/// this name beside a model.
pub fn is_no_model(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    NO_MODEL.iter().any(|beginning| name.starts_with(beginning))
}

/// Returns whether a file starts like an archive of `torch.save`. The first zip record of such an archive is
/// `NAME/data.pkl`, which no other ZIP file has.
pub fn is_archive(head: &[u8], _len: u64) -> bool {
    const NAME_LEN: usize = 26;
    const NAME: usize = 30;
    if !head.starts_with(b"PK\x03\x04") {
        return false;
    }
    let Some(&[low, high]) = head.get(NAME_LEN..NAME_LEN + 2) else { return false };
    let end = NAME + usize::from(u16::from_le_bytes([low, high]));
    // A very long name may continue after the first bytes of the file. Only its beginning is compared.
    let name = head.get(NAME..end.min(head.len())).unwrap_or_default();
    name.ends_with(b"/data.pkl")
}

/// Reads the metadata of an archive, and the states of random number generators in the archive. `files` records the
/// byte ranges that are read, and the metadata mirror (a sparse copy of the metadata of all files) copies these ranges.
/// Damage is ignored.
pub fn look_at(files: &Files, file: FileId) {
    let Ok(contents) = reader::read(files, files.whole(file), "", Unknown::Drop) else { return };
    for (fqn, id) in state_dict::all_tensors(&contents.value) {
        let TensorNode::Plain(view) = &contents.tensors[id.0 as usize] else { continue };
        if let FileLocation::Record { record, .. } = contents.record_location(view)
            && state_dict::is_random_state(fqn.as_str())
            && record.len <= MAX_RANDOM_STATE_BYTES
        {
            let _ = archive::data_offset(files, file, record).and_then(|data| files.read(file, data, record.len));
        }
    }
}
