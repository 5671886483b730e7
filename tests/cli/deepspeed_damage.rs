//! Damaged copies of the checkpoints that DeepSpeed wrote (`tests/fixtures/trainers/deepspeed`): every kind of damage, in every
//! case and every file that it can happen to, is refused with the name of the file and of the value.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use dtshard::format::{Checkpoint, ReadOptions};

use crate::common::corrupt::{ZipEntry, dtshard, edit_entries, edit_pickle, find, unzip};
use crate::common::env::TestEnv;
use crate::common::outcome::{copy_all, files_of};
use crate::common::{Tensors, expect, in_parallel, tensors_of};
use crate::deepspeed::{self, Damaged, TAG, case, set_element, set_number, truth};
use crate::{deepspeed_parallel, deepspeed_universal};

/// The files of a case, by their kinds.
struct CaseFiles {
    name: &'static str,
    /// For each model-parallel rank, the files of the model: one for each partition at stage 3, otherwise one.
    model: Vec<Vec<String>>,
    /// For each model-parallel rank, the file of each partition.
    optimizer: Vec<Vec<String>>,
    /// The files of layers and of experts.
    parts: Vec<String>,
}

impl CaseFiles {
    fn list(name: &'static str) -> Self {
        let mut names: Vec<String> = fs::read_dir(case(name).join(TAG))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort_unstable();
        let (parts, names): (Vec<String>, Vec<String>) = names.into_iter().partition(|name| name.starts_with("layer_"));
        let (optimizer, model): (Vec<String>, Vec<String>) =
            names.into_iter().partition(|name| name.ends_with("optim_states.pt"));
        // There are fewer than ten partitions, so the order of the names is that of the partitions.
        let by_rank = |names: Vec<String>| {
            let mut ranks: BTreeMap<String, Vec<String>> = BTreeMap::new();
            for name in names {
                let at = name.find("mp_rank_").unwrap() + "mp_rank_".len();
                ranks.entry(name[at..at + 2].to_owned()).or_default().push(name);
            }
            ranks.into_values().collect()
        };
        Self { name, model: by_rank(model), optimizer: by_rank(optimizer), parts }
    }

    fn is_stage3(&self) -> bool {
        self.model[0][0].starts_with("zero_pp_rank_")
    }

    /// Returns whether the optimizer files have the addresses of parameters, and they are right.
    fn has_addresses(&self) -> bool {
        !self.is_stage3() && self.name != "zero2_round_robin"
    }

    /// Returns whether the optimizer has made steps, and counts them.
    fn has_steps(&self) -> bool {
        !["zero2_sgd", "zero2_skipped"].contains(&self.name)
    }

    /// Returns the release of DeepSpeed that wrote the files.
    fn release(&self) -> &'static str {
        self.name.strip_prefix('v').and_then(|name| Some(name.split_once('/')?.0)).unwrap_or("0.19.8")
    }

    fn optimizer_files(&self) -> impl Iterator<Item = &String> {
        self.optimizer.iter().flatten()
    }
}

/// Returns the files of every case that has optimizer files of ZeRO.
fn cases() -> Vec<CaseFiles> {
    let names = deepspeed::CASES.into_iter().chain(deepspeed::RELEASES).chain(deepspeed_parallel::CASES);
    let has_partitions = |files: &CaseFiles| files.optimizer_files().any(|file| !file.starts_with("expp_"));
    names.map(CaseFiles::list).filter(has_partitions).collect()
}

/// Changes the last byte of the last occurrence of a text in the pickle of a file.
fn change_last(path: &Path, text: &[u8]) {
    edit_pickle(path, |pickle| {
        let at = pickle.windows(text.len()).rposition(|window| window == text).unwrap();
        pickle[at + text.len() - 1] ^= 1;
    });
}

/// Copies a file of the folder over another one.
fn copy<'a>(from: &'a str, to: &'a str) -> impl FnOnce(&Path) + 'a {
    move |folder| _ = fs::copy(folder.join(from), folder.join(to)).unwrap()
}

#[test]
fn missing_file_of_each_kind_is_an_error() {
    for files in cases() {
        let damaged = Damaged::new(files.name);
        for file in files.optimizer_files().chain(files.model.iter().flatten()).chain(&files.parts) {
            // No file lists the layers without trained parameters, and the file of a tied layer has a copy of it.
            let is_unlisted = !file.contains("expert") && files.name != "pipe_tp";
            if is_unlisted && ["layer_00", "layer_02", "layer_04"].iter().any(|layer| file.starts_with(layer)) {
                continue;
            }
            damaged.refuse(&["missing", file], |folder| fs::remove_file(folder.join(file)).unwrap());
        }
    }
}

#[test]
fn surplus_partition_is_an_error() {
    for files in cases() {
        let damaged = Damaged::new(files.name);
        for own in &files.optimizer {
            let partitions = own.len();
            let surplus = own[0].replace("pp_rank_0", &format!("pp_rank_{partitions}"));
            let is_named = files.is_stage3() || files.optimizer.len() > 1;
            let number = if is_named { format!("pp_rank_{partitions}") } else { format!("partition {partitions}") };
            damaged.refuse(&[&number], copy(&own[0], &surplus));
        }
    }
}

/// The addresses of parameters, or the lengths, differ between the partitions.
#[test]
fn partition_of_another_rank_is_an_error() {
    for files in cases() {
        let damaged = Damaged::new(files.name);
        for own in files.optimizer.iter().filter(|own| own.len() > 1 && files.has_addresses()) {
            for (from, to) in own.iter().zip(own.iter().cycle().skip(1)) {
                damaged.refuse(&[to], copy(from, to));
            }
        }
        // The ranks of `tp_zero2` have shards of equal shapes.
        for (own, other) in files.optimizer.iter().zip(files.optimizer.iter().skip(1)) {
            if files.name != "tp_zero2" {
                damaged.refuse(&[&other[0]], copy(&own[0], &other[0]));
            }
        }
    }
}

#[test]
fn values_that_differ_between_files_are_errors() {
    for files in cases() {
        let damaged = Damaged::new(files.name);
        let first = &files.model[0][0];
        for file in files.optimizer_files() {
            damaged.refuse(&[file, "ds_version"], |folder| change_last(&folder.join(file), files.release().as_bytes()));
            damaged.refuse(&[file, "ds_config"], |folder| change_last(&folder.join(file), b"stage"));
            // `partition_count` is a list of numbers at stages 1 and 2.
            damaged.refuse(&[file, "partition_count"], |folder| {
                edit_pickle(&folder.join(file), |pickle| set_number(pickle, b"partition_count", 9));
            });
        }
        // With MiCS, there are fewer partitions than ranks.
        let size = if files.name.ends_with("mics") { "mics_shard_size" } else { "dp_world_size" };
        damaged.refuse(&[size, "9"], |folder| {
            edit_pickle(&folder.join(first), |pickle| set_number(pickle, size.as_bytes(), 9));
        });
        for other in files.model.iter().flatten().skip(1) {
            damaged
                .refuse(&[other, "ds_version"], |folder| change_last(&folder.join(other), files.release().as_bytes()));
            damaged
                .refuse(&[other, "ds_config"], |folder| change_last(&folder.join(other), b"micro_batch_size_per_gpu"));
            for key in ["global_steps", "global_samples", "skipped_steps", "dp_world_size"] {
                damaged.refuse(&[other, key, "77"], |folder| {
                    edit_pickle(&folder.join(other), |pickle| set_number(pickle, key.as_bytes(), 77));
                });
            }
        }
        for own in files.model.iter().skip(1) {
            for key in ["mp_world_size", "tp_degree", "pp_degree"] {
                let named = if key == "mp_world_size" { key } else { "checkpoint_parallel_dimensions" };
                damaged.refuse(&[&own[0], named, "77"], |folder| {
                    edit_pickle(&folder.join(&own[0]), |pickle| set_number(pickle, key.as_bytes(), 77));
                });
            }
        }
    }
}

/// The files of two saves have counters that differ.
#[test]
fn counter_of_another_step_is_an_error() {
    for files in cases().iter().filter(|files| files.has_steps()) {
        let damaged = Damaged::new(files.name);
        for file in files.optimizer_files().skip(1) {
            damaged.refuse(&[file, "step", "expected 2", "found 3"], |folder| {
                let is_step = |data: &[u8]| (data.len() == 4 && data == 2_f32.to_le_bytes()).then_some(0);
                set_element(&folder.join(file), is_step, 3.0);
            });
        }
    }
}

#[test]
fn address_that_contradicts_the_shapes_is_an_error() {
    for files in cases().iter().filter(|files| files.has_addresses()) {
        let damaged = Damaged::new(files.name);
        for file in files.optimizer_files() {
            for key in [&b"start"[..], b"numel"] {
                damaged.refuse(&[file, "param_slice_mappings[0]", "elements", "param_shapes"], |folder| {
                    edit_pickle(&folder.join(file), |pickle| {
                        let mappings = find(pickle, b"param_slice_mappings").unwrap();
                        let at = mappings + find(&pickle[mappings..], key).unwrap();
                        set_number(&mut pickle[at..], key, 250);
                    });
                });
            }
        }
    }
}

/// Changes the first number of the first shape in `param_shapes`.
fn change_shape(path: &Path) {
    edit_pickle(path, |pickle| {
        let key = find(pickle, b"param_shapes").unwrap();
        let size = key + find(&pickle[key..], b"torch\nSize").or_else(|| find(&pickle[key..], b"K")).unwrap();
        let number = size + find(&pickle[size..], b"K").unwrap();
        pickle[number + 1] += 1;
    });
}

#[test]
fn other_shapes_are_errors() {
    for files in cases() {
        let damaged = Damaged::new(files.name);
        for (own, optimizer) in files.model.iter().zip(&files.optimizer) {
            if files.is_stage3() {
                for (index, file) in own.iter().enumerate() {
                    // The other files are compared with the first one.
                    damaged.refuse(&[&own[index.max(1)], "param_shapes"], |folder| change_shape(&folder.join(file)));
                }
            } else {
                // The addresses, or the lengths, show it first.
                let start = optimizer[0].split("zero_pp").next().unwrap();
                damaged.refuse(
                    &[start, "optim_states.pt", "elements", "param_shapes of the model file say"],
                    |folder| {
                        change_shape(&folder.join(&own[0]));
                    },
                );
            }
        }
    }
}

#[test]
fn latest_that_names_a_missing_folder_is_an_error() {
    let env = TestEnv::new();
    for files in cases() {
        let folder = env.copy(&format!("trainers/deepspeed/{}", files.name));
        fs::write(folder.join("latest"), "global_step9").unwrap();
        dtshard(&[&"inspect", &folder]).assert_refused(&["latest", "global_step9"]);
        fs::remove_dir_all(folder).unwrap();
    }
}

// --------------------------------------------------------------------------------------------- every vector, every element

/// A copy of a case in a folder of its own. Many copies are read, so it is the library that reads them.
struct Copy {
    _folder: tempfile::TempDir,
    root: PathBuf,
    /// The folder of the checkpoint in the copy.
    tag: PathBuf,
}

impl Copy {
    fn of(name: &str, tag: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("copy");
        copy_all(&case(name), &root);
        Self { _folder: folder, tag: root.join(tag), root }
    }

    /// Changes a file, opens the checkpoint, and restores the file. Returns the tensors, or the message.
    fn open_changed(&self, file: &str, change: impl FnOnce(&Path)) -> Result<Tensors, String> {
        let path = self.tag.join(file);
        let original = fs::read(&path).unwrap();
        change(&path);
        let opened = Checkpoint::open(&self.root, &ReadOptions::default());
        let result = opened.map_err(|error| error.to_string()).map(|checkpoint| {
            let mut found = tensors_of(&checkpoint);
            found.retain(|name, _| !name.starts_with("nested."));
            found
        });
        fs::write(path, original).unwrap();
        result
    }
}

/// Returns the positions of the sizes of vectors in a pickle: `K size \x85 q memo K 1 \x85`.
fn sizes_of_vectors(pickle: &[u8]) -> Vec<usize> {
    let is_size = |at: &usize| {
        matches!(
            pickle[*at..],
            [b'K', 2..=254, 0x85, b'q', _, b'K', 1, 0x85, ..]
                | [b'K', 2..=254, 0x85, b'r', _, _, _, _, b'K', 1, 0x85, ..]
        )
    };
    (0..pickle.len()).filter(is_size).collect()
}

#[test]
fn vector_of_another_length_is_an_error() {
    in_parallel(&cases(), |files| {
        let (copy, expected) = (Copy::of(files.name, TAG), truth(files.name));
        for file in files.optimizer_files() {
            let entries = unzip(&fs::read(case(files.name).join(TAG).join(file)).unwrap());
            let pickle = entries.into_iter().find(|entry| entry.name.ends_with("/data.pkl")).unwrap().data;
            let sizes = sizes_of_vectors(&pickle);
            assert!(sizes.len() >= if files.name == "zero2_skipped" { 1 } else { 2 }, "{} {file}", files.name);
            for (at, is_longer) in sizes.into_iter().flat_map(|at| [(at, false), (at, true)]) {
                let change = |pickle: &mut Vec<u8>| {
                    pickle[at + 1] = if is_longer { pickle[at + 1] + 1 } else { pickle[at + 1] - 1 };
                };
                match copy.open_changed(file, |path| edit_pickle(path, change)) {
                    // A vector without its padding, or with all of it, is complete.
                    Ok(found) => assert_eq!(found, expected, "{} {file} {at} {is_longer}", files.name),
                    Err(message) => assert!(message.contains(file.as_str()), "{message}"),
                }
            }
        }
    });
}

/// Changes an element of an f32 tensor. `number` counts the storages in the file.
fn change_element(path: &Path, number: usize, element: usize) {
    edit_entries(path, |entries| {
        let entry = entries.iter_mut().filter(|entry| entry.name.contains("/data/")).nth(number).unwrap();
        entry.data[element * 4..element * 4 + 4].copy_from_slice(&7.5_f32.to_le_bytes());
        entry.crc = crc32fast::hash(&entry.data);
    });
}

/// An element of a vector is that of a parameter, and so changes a tensor; or it is padding, or an element of a copy, and a
/// change of it is refused. Only the padding of master weights at stage 3 is arbitrary, and of moments to which the optimizer adds
/// them, and the padding of `sum` of Adagrad, which has the value that the job chose.
#[test]
fn every_element_is_read_or_checked() {
    let refused: Vec<[usize; 2]> = in_parallel(&cases(), |files| {
        let (copy, expected) = (Copy::of(files.name, TAG), truth(files.name));
        let mut refused = [0, 0];
        for file in files.optimizer_files() {
            let lens: Vec<usize> = unzip(&fs::read(case(files.name).join(TAG).join(file)).unwrap())
                .iter()
                .filter(|entry| entry.name.contains("/data/"))
                .map(|entry| entry.data.len() / 4)
                .collect();
            let (mut vectors, mut unread) = (0, 0);
            for (number, len) in lens.into_iter().enumerate().filter(|(_, len)| *len > 1) {
                vectors += 1;
                let elements = (0..len).step_by(13).chain([len - 1]);
                let found = elements.map(|element| {
                    match copy.open_changed(file, |path| change_element(path, number, element)) {
                        Ok(found) => found == expected,
                        Err(message) => {
                            let kinds = ["zeros as padding", "copies", "tensor-parallel ranks"]
                                .map(|kind| message.contains(kind));
                            assert!(message.contains(file.as_str()) && kinds.contains(&true), "{message}");
                            (0..2).for_each(|kind| refused[kind] += usize::from(kinds[kind]));
                            false
                        }
                    }
                });
                unread += usize::from(found.filter(|is_unread| *is_unread).count() > 0);
            }
            // The last tensor-parallel rank has rows of the embedding that are padding, which the files do not mark.
            let is_cut =
                ["tp_zero2", "pipe_tp"].contains(&files.name) && (file.contains("rank_01") || file.contains("rank_03"));
            let has_sum = usize::from(files.name == "zero2_adagrad");
            let arbitrary = if files.is_stage3() || is_cut { vectors } else { has_sum };
            assert!(unread <= arbitrary, "{} {file}: elements of {unread} vectors have no effect", files.name);
        }
        refused
    });
    let total = |kind: usize| refused.iter().map(|counts| counts[kind]).sum::<usize>();
    assert!(total(0) > 50 && total(1) > 50, "{refused:?}");
}

/// Only values show the optimizer file of another rank with equal shapes, or of another save without counters.
#[test]
fn verify_finds_other_master_weights_in_each_file() {
    for files in cases().iter().filter(|files| !files.is_stage3()) {
        let env = TestEnv::new();
        for file in files.optimizer_files() {
            let root = env.copy(&format!("trainers/deepspeed/{}", files.name));
            let path = root.join(TAG).join(file);
            // The master weights are the last vectors in the file.
            edit_entries(&path, |entries| {
                let is_vector = |entry: &&mut ZipEntry| entry.name.contains("/data/") && entry.data.len() > 4;
                let last = entries.iter_mut().rfind(is_vector).unwrap();
                last.data[..4].copy_from_slice(&0.5_f32.to_le_bytes());
                last.crc = crc32fast::hash(&last.data);
            });
            let run = expect(1, "verify", &[&root], "");
            let is_found = ["not the parameters of the module", "copies", "tensor-parallel ranks"]
                .map(|kind| run.stdout.contains(kind));
            assert!(is_found.contains(&true), "{} {file}: {}", files.name, run.stdout);
            fs::remove_dir_all(root).unwrap();
        }
    }
}

// ------------------------------------------------------------------------------------------------ Universal checkpoints

/// Each trained parameter has a file of each value. Folders of other names are not read.
#[test]
fn every_file_of_a_universal_checkpoint_is_read() {
    for name in deepspeed_universal::CASES {
        let (copy, expected) = (Copy::of(name, deepspeed_universal::TAG), truth(name));
        for path in files_of(&copy.tag).into_iter().filter(|path| path.is_file()) {
            let file = path.strip_prefix(&copy.tag).unwrap().to_str().unwrap();
            let param = file.strip_prefix("zero/").and_then(|file| file.split_once('/')).map(|(param, _)| param);
            let is_trained = |param: &str| expected.contains_key(&format!("optimizer.state.{param}.exp_avg"));
            match copy.open_changed(file, |path| fs::remove_file(path).unwrap()) {
                Ok(found) => assert!(!param.is_some_and(is_trained) && found == expected, "{name} {file}"),
                Err(message) => {
                    let named = file.strip_prefix("zero/").unwrap_or(file);
                    assert!(param.is_none_or(is_trained), "{name} {file}");
                    assert!(message.contains("missing") && message.contains(named), "{message}");
                }
            }
            if !param.is_some_and(is_trained) {
                continue;
            }
            match copy.open_changed(file, |path| change_element(path, 0, 0)) {
                Ok(found) => assert!(found != expected && !file.ends_with("step.pt"), "{name} {file}"),
                Err(message) => {
                    // The other counters are compared with the first one. The file of a tied layer has one shard of its values.
                    let is_step = message.contains("the number of steps") && message.contains("7.5");
                    assert!(is_step || message.contains("as on the other tensor-parallel ranks"), "{message}");
                    assert!(message.contains(file) || message.contains(param.unwrap()), "{message}");
                }
            }
        }
    }
}

#[test]
fn universal_model_files_of_two_saves_are_errors() {
    let damaged = Damaged::in_folder("universal3_fp32", deepspeed_universal::TAG);
    let second = "zero_pp_rank_1_mp_rank_00_model_states.pt";
    damaged.refuse(&[second, "ds_version"], |folder| change_last(&folder.join(second), b"0.19.8"));
    damaged.refuse(&[second, "ds_config"], |folder| change_last(&folder.join(second), b"micro_batch_size_per_gpu"));
    damaged.refuse(&[second, "param_shapes"], |folder| change_shape(&folder.join(second)));
    for key in ["global_steps", "global_samples", "skipped_steps", "dp_world_size"] {
        damaged.refuse(&[second, key, "77"], |folder| {
            edit_pickle(&folder.join(second), |pickle| set_number(pickle, key.as_bytes(), 77));
        });
    }
    let env = TestEnv::new();
    let root = env.copy("trainers/deepspeed/universal1_bf16");
    change_element(&root.join(deepspeed_universal::TAG).join("zero/layers.0.up.weight/fp32.pt"), 0, 3);
    let run = expect(1, "verify", &[&root], "");
    assert!(run.stdout.contains("not the parameters of the module"), "{}", run.stdout);
}
