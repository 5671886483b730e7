//! Reads the files of all ranks in parallel.
//!
//! Every ShardedTensor in every file lists the shards of all ranks, so the lists grow with the square of the number of
//! ranks: 1,024 ranks with 40 flat parameters list 42 million shards. Therefore equal lists are in memory only once.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use rayon::prelude::*;

use super::rank_file::RankFile;
use super::reader::{ArchiveContents, read};
use super::tensor::TensorNode;
use crate::error::Result;
use crate::layout::{Rank, Region};
use crate::storage::{FileId, Files};
use torch_pickle::pickle::Unknown;

/// Reads the rank files `ranks` in parallel.
///
/// # Errors
/// The errors of reading one file. If several files have errors, returns the error of the lowest rank.
pub fn load(files: &mut Files, ranks: &BTreeMap<u32, PathBuf>, unknown: Unknown) -> Result<Vec<RankFile>> {
    let own: Vec<(Rank, &PathBuf, FileId)> =
        ranks.iter().map(|(rank, path)| Ok((Rank(*rank), path, files.add(path)?))).collect::<Result<_>>()?;
    let files = &*files;
    let lists = SharedShardLists::default();
    let loaded: Vec<Result<RankFile>> = own
        .into_par_iter()
        .map(|(rank, path, file)| {
            let mut contents = read(files, files.whole(file), "", unknown)?;
            lists.share(&mut contents);
            Ok(RankFile { rank: Some(rank), path: path.clone(), contents })
        })
        .collect();
    loaded.into_iter().collect()
}

/// The lists of shards that ShardedTensors refer to. Equal lists are in memory only once.
#[derive(Default)]
struct SharedShardLists(Mutex<HashSet<Arc<[Region]>>>);

impl SharedShardLists {
    fn share(&self, contents: &mut ArchiveContents) {
        let mut known = self.0.lock().expect("no panic while the lock is held");
        for tensor in &mut contents.tensors {
            let TensorNode::Sharded { all, .. } = tensor else { continue };
            match known.get(all) {
                Some(shared) => *all = Arc::clone(shared),
                None => _ = known.insert(Arc::clone(all)),
            }
        }
    }
}
