//! Tests of the files of SRC that are mirrored, of the size of the mirror, and of results that must not depend on the
//! mirror.

use std::os::unix::fs::{MetadataExt, symlink};

use super::*;
use dtshard::exchange;
use dtshard::exec::compare::replica_difference;

fn one_rank(own: PathBuf) -> Spread {
    Spread { folder: tempfile::tempdir().unwrap(), own: vec![own] }
}

#[test]
fn single_files_open_like_without_a_mirror() {
    for path in [
        fixture("torch_file/model.pt"),
        fixture("safetensors/single/model.safetensors"),
        fixture("safetensors/sharded/model.safetensors.index.json"),
        fixture("fsdp4/ranks/model_world_size_4_rank_1.pt"),
        fixture("fsdp4/dcp/.metadata"),
        fixture("README.md"),
    ] {
        let whole = Checkpoint::open(&path, &ReadOptions::default());
        let expected = opened_text(whole, path.parent().unwrap());
        let spread = one_rank(path.clone());
        let opened =
            spread.run_each(|_, mirror| Ok(opened_text(mirror.open(&ReadOptions::default()), path.parent().unwrap())));
        assert_eq!(*opened[0].as_ref().unwrap(), expected);
    }
}

#[test]
fn local_format_opens_like_without_a_mirror() {
    let folder = tempfile::tempdir().unwrap();
    let local = folder.path().join("local");
    succeed("reshard", &[&fixture("fsdp4/dcp"), &local], "--to local --mesh dp=2,tp=2 --placements S(0),S(1)");
    let expected = opened_text(Checkpoint::open(&local, &ReadOptions::default()), &local);
    let spread = Spread::new(&local, 3);
    let opened = spread.run_each(|rank, mirror| {
        Ok(opened_text(mirror.open(&ReadOptions::default()), &spread.own[rank.rank() as usize]))
    });
    opened.into_iter().for_each(|opened| assert!(opened.unwrap() == expected));
    assert!(expected.unwrap().starts_with("local"));
    check_conversion(&local, 3, &in_safetensors);
    check_conversion(&local, 2, &in_dcp);
}

#[test]
fn links_to_files_are_mirrored_and_links_to_folders_only_for_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for below in ["blobs", "src/step-3", "elsewhere/step-9"] {
        fs::create_dir_all(at(below)).unwrap();
    }
    let (blob, linked) = (at("blobs/0a"), at("elsewhere/step-9/model.safetensors"));
    fs::copy(fixture("safetensors/single/model.safetensors"), &blob).unwrap();
    symlink("../../blobs/0a", &linked).unwrap();
    fs::write(at("elsewhere/secret.json"), "{}").unwrap();
    symlink("../elsewhere/step-9", at("src/latest")).unwrap();
    symlink("../elsewhere", at("src/other")).unwrap();
    symlink("..", at("src/step-3/step-4")).unwrap();
    symlink("nowhere", at("src/dangling.json")).unwrap();
    let spread = one_rank(at("src"));
    let done = spread.run_each(|_, mirror| {
        let checkpoint = mirror.open(&ReadOptions::default())?;
        assert_eq!(checkpoint.root, at("src/latest"));
        assert_eq!(checkpoint.resolved_from, Some(at("src")));
        assert_eq!(checkpoint.place(&at("src/latest/config.json")), spread.mirror().join("latest/config.json"));
        Ok(())
    });
    done.into_iter().for_each(|done| done.unwrap());
    assert_eq!(files_of(&spread.mirror()), ["dangling.json", "latest/model.safetensors"].map(PathBuf::from));
    assert!(!spread.mirror().join("dangling.json").exists());
}

/// A sidecar file is mirrored for all processes. Only the metadata of a file with tensors is mirrored, but every
/// process knows which processes see the file.
#[test]
fn sidecar_files_can_be_copied_by_every_rank() {
    let spread = Spread::new(&fixture("verl"), 3);
    let actor = Path::new("global_step_10/actor");
    let beside = actor.join("huggingface/tokenizer.json");
    let tensors = files_of(&fixture("verl")).into_iter().find(|path| path.extension() == Some("pt".as_ref())).unwrap();
    let done = spread.run_each(|rank, mirror| {
        let own = &spread.own[rank.rank() as usize];
        let checkpoint = mirror.open(&ReadOptions::default())?;
        let (in_mirror, at_home) = (spread.mirror().join(&beside), own.join(&beside));
        assert!(mirror.holds_all_of(&at_home) && mirror.holds_all_of(&in_mirror));
        assert_eq!(checkpoint.place(&at_home), in_mirror);
        assert_eq!(fs::read(&in_mirror).unwrap(), fs::read(fixture("verl").join(&beside)).unwrap());
        for path in [own.join(&tensors), spread.mirror().join(&tensors)] {
            assert!(!mirror.holds_all_of(&path));
            let seen_by = (0..).zip(&spread.own).filter(|(_, own)| own.join(&tensors).exists()).map(|(rank, _)| rank);
            assert_eq!(mirror.seen_by(&path), seen_by.collect::<Vec<u32>>());
        }
        // A file that no rank sees is not in the mirror.
        let elsewhere = Path::new("/elsewhere/tokenizer.json");
        assert!(mirror.holds_all_of(elsewhere) && mirror.seen_by(elsewhere).is_empty());
        assert_eq!(checkpoint.place(elsewhere), elsewhere);
        Ok(())
    });
    done.into_iter().for_each(|done| done.unwrap());
}

#[test]
fn gigabyte_of_tensor_data_is_mirrored_by_its_header() {
    let folder = tempfile::tempdir().unwrap();
    let len = 1_u64 << 30;
    let mut header = format!(r#"{{"w":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#).into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let path = folder.path().join("model.safetensors");
    fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_slice()].concat()).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(8 + header.len() as u64 + len).unwrap();
    let spread = one_rank(folder.path().to_path_buf());
    let written = spread.run_each(|_, mirror| mirror.open(&ReadOptions::default()).map(|_| mirror.written()));
    assert_eq!(*written[0].as_ref().unwrap(), 512);
    let mirror = fs::metadata(spread.mirror().join("model.safetensors")).unwrap();
    assert_eq!(mirror.len(), 8 + header.len() as u64 + len);
    assert!(mirror.blocks() * 512 < 1 << 16);
}

#[test]
fn fingerprint_does_not_depend_on_mirror_path_or_ranks() {
    let source = fixture("fsdp4/ranks");
    let print = |ranks: usize| {
        let spread = Spread::new(&source, ranks);
        // Copies of a file may have different modification times. The latest time counts, so all copies get the same.
        for own in &spread.own {
            for file in fs::read_dir(own).into_iter().flatten() {
                set_modified(&file.unwrap().path(), 9_000_000);
            }
        }
        let done = spread.run_each(|rank, mirror| {
            let checkpoint = mirror.open(&ReadOptions::default())?;
            let reservation = in_safetensors(&checkpoint.catalog);
            let own: &Path = &spread.own[rank.rank() as usize];
            Ok(fingerprint("1", input(&checkpoint), &reservation, &[], &[own], ReductionMethod::InRankOrder))
        });
        let mut prints: Vec<_> = done.into_iter().map(|print| print.unwrap()).collect();
        prints.dedup();
        assert_eq!(prints.len(), 1);
        prints[0]
    };
    assert_eq!(print(2), print(4));
}

#[test]
fn random_state_is_compared_without_a_transfer() {
    let spread = Spread::new(&fixture("verl"), 4);
    let done = spread.run_each(|_, mirror| {
        let mut compared = 0;
        for io in [IoMode::Mmap, IoMode::Read, IoMode::Direct] {
            let checkpoint = mirror.open(&ReadOptions { io: Some(io), ..ReadOptions::default() })?;
            for (fqn, id) in state_dict::all_tensors(&checkpoint.catalog.state) {
                let entry = checkpoint.catalog.tensor(id);
                if state_dict::is_random_state(fqn.as_str()) {
                    replica_difference(input(&checkpoint), entry, &options(), &Silent, &Stop::default())?;
                    compared += 1;
                }
            }
        }
        Ok(compared)
    });
    assert!(done.into_iter().all(|compared| compared.unwrap() > 0));
}

/// Replicas that differ are found in every case: whichever processes see them, the result is the same as in one
/// process.
#[test]
fn replicas_on_several_ranks_are_compared_like_on_one() {
    let mut differing = 0;
    for source in ["conflict/replica", "conflict/tensor", "replicated_plain/ranks", "hsdp/ranks", "verl", "fsdp4/dcp"] {
        let source = fixture(source);
        let options = options();
        let whole = Checkpoint::open(&source, &ReadOptions::default()).unwrap();
        let ids: Vec<_> = state_dict::all_tensors(&whole.catalog.state).into_iter().map(|(_, id)| id).collect();
        let expected: Vec<_> = (ids.iter())
            .filter_map(|id| {
                let entry = whole.catalog.tensor(*id);
                let found = replica_difference(input(&whole), entry, &options, &Silent, &Stop::default()).unwrap();
                found.map(|found| (*id, found))
            })
            .collect();
        differing += expected.len();
        for ranks in [1, 2, 4] {
            let spread = Spread::new(&source, ranks);
            let found = spread.run_each(|rank, mirror| {
                let checkpoint = mirror.open(&ReadOptions::default())?;
                let visibility = FileVisibility::from_files(&checkpoint.files, rank.size());
                exchange::differing_replicas(rank, &visibility, input(&checkpoint), &ids, &Silent, &Stop::default())
            });
            for found in found {
                assert_eq!(found.unwrap(), expected, "{} by {ranks}", source.display());
            }
        }
    }
    assert!(differing > 1);
}
