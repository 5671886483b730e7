//! Tests of errors of the metadata mirror: processes do not see the files that they should see.

use super::*;

/// Returns a checkpoint of four rank files for four processes, each of which sees only one rank file.
fn four_ranks() -> Spread {
    let folder = tempfile::tempdir().unwrap();
    let own: Vec<PathBuf> = (0..4).map(|rank| folder.path().join(format!("node{rank}/ckpt"))).collect();
    for (rank, own) in own.iter().enumerate() {
        fs::create_dir_all(own).unwrap();
        let name = format!("model_world_size_4_rank_{rank}.pt");
        fs::copy(fixture("fsdp4/ranks").join(&name), own.join(&name)).unwrap();
    }
    Spread { folder, own }
}

fn all() -> ReadOptions {
    ReadOptions::default()
}

#[test]
fn differing_files_of_one_name_are_refused_with_both_ranks() {
    let spread = four_ranks();
    let name = "model_world_size_4_rank_2.pt";
    let own = spread.own[2].join(name);
    let copy = spread.own[3].join(name);
    let bytes = fs::read(&own).unwrap();
    fs::write(&copy, &bytes[..bytes.len() - 1]).unwrap();
    let len = bytes.len();
    assert_eq!(
        spread.error_text(&all()),
        format!("SRC/{name}: the length differs between processes 2 and 3: {len} and {} bytes", len - 1)
    );
    let mut other = bytes.clone();
    other[len - 30] ^= 1;
    fs::write(&copy, &other).unwrap();
    let text = spread.error_text(&all());
    assert!(
        text.starts_with(&format!("SRC/{name}: the file differs between processes 2 and 3: the bytes from ")),
        "{text}"
    );
    // Two copies are equal if their bytes are equal, even if their modification times differ.
    fs::write(&copy, &bytes).unwrap();
    set_modified(&copy, 77);
    spread.run_each(|_, mirror| mirror.open(&all()).map(drop)).into_iter().for_each(|opened| opened.unwrap());
}

#[test]
fn files_outside_the_checkpoint_may_differ() {
    let spread = four_ranks();
    let logs = [(0, "first"), (1, "other"), (2, "first"), (3, "longer")];
    for (rank, text) in logs {
        fs::write(spread.own[rank].join("train.log"), text).unwrap();
    }
    let found = spread.run_each(|rank, mirror| {
        let own = &spread.own[rank.rank() as usize];
        let log = own.join("train.log");
        let checkpoint = mirror.open(&all())?;
        assert!(mirror.holds_all_of(&log));
        let text = fs::read_to_string(checkpoint.place(&log)).unwrap();
        let notes = checkpoint.catalog.notes;
        Ok((text, mirror.seen_by(&log).to_vec(), relative(&notes.join("\n"), own)))
    });
    for found in found {
        let (text, seen_by, notes) = found.unwrap();
        assert_eq!((text.as_str(), seen_by), ("first", vec![0, 2]));
        assert!(notes.ends_with("SRC/train.log differs at processes 1, 3; the file of process 0 is used"), "{notes}");
    }
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &fs::metadata(spread.mirror().join("train.log")).unwrap().permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
    for rank in [1, 2] {
        fs::write(spread.own[rank].join("config.json"), logs[rank].1).unwrap();
    }
    assert!(spread.error_text(&all()).starts_with("SRC/config.json: the file differs between processes 1 and 2"));
}

#[test]
fn file_that_no_rank_sees_is_refused_with_a_hint() {
    let spread = four_ranks();
    // The node keeps another file, so that the missing rank file does not look like a wrong path.
    fs::rename(spread.own[1].join("model_world_size_4_rank_1.pt"), spread.own[1].join("train.log")).unwrap();
    let hints = spread.run_each(|_, mirror| {
        let error = mirror.open(&all()).map(drop).unwrap_err();
        Ok(error.hint().map(str::to_owned))
    });
    assert_eq!(hints[0].as_ref().unwrap().as_deref(), Some("start a process on the node that has the file"));
    let text = spread.error_text(&all());
    assert!(text.starts_with("SRC: ") && text.contains("missing: "), "{text}");

    fs::remove_dir_all(&spread.own[3]).unwrap();
    for error in spread.run_each(|_, mirror| mirror.open(&all()).map(drop)) {
        let error = error.unwrap_err();
        let hint = error.hint().unwrap();
        let expected = format!("; process 3 sees nothing at {}", spread.own[3].display());
        assert!(hint.ends_with(&expected), "{hint}");
    }
    fs::remove_dir_all(&spread.own[1]).unwrap();
    fs::remove_dir_all(&spread.own[2]).unwrap();
    let hint = spread.run_each(|_, mirror| mirror.open(&all()).map(drop)).swap_remove(0).unwrap_err();
    assert_eq!(hint.hint().unwrap().matches("; process ").count(), 3);

    let spread = Spread::new(&fixture("fsdp4/dcp"), 2);
    for own in &spread.own {
        let _ = fs::remove_file(own.join("__2_0.distcp"));
    }
    let expected = "SRC/.metadata: storage_data: expected 4 files beside it, missing: __2_0.distcp";
    assert_eq!(spread.error_text(&all()), expected);
    for own in &spread.own {
        let _ = fs::remove_file(own.join(".metadata"));
    }
    assert!(spread.error_text(&all()).ends_with("missing: .metadata"));
}

#[test]
fn truncated_file_gives_the_error_of_its_owner() {
    let spread = four_ranks();
    let path = spread.own[0].join("model_world_size_4_rank_0.pt");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let text = spread.error_text(&all());
    assert!(text.starts_with("SRC/model_world_size_4_rank_0.pt: zip directory: "), "{text}");

    let spread = Spread::new(&fixture("fsdp4/dcp"), 3);
    for own in &spread.own {
        let path = own.join("__3_0.distcp");
        if let Ok(bytes) = fs::read(&path) {
            fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        }
    }
    let text = spread.error_text(&all());
    assert!(text.starts_with("SRC/__3_0.distcp: ") && text.contains("expected a file of at least "), "{text}");
}

#[test]
fn source_that_no_rank_sees_is_refused() {
    let spread = four_ranks();
    fs::rename(&spread.own[3], spread.own[3].with_extension("gone")).unwrap();
    let text = spread.error_text(&ReadOptions { allow_missing: false, ..all() });
    assert!(text.contains("missing"), "{text}");
    let name = "model_world_size_4_rank_3.pt";
    fs::copy(spread.own[3].with_extension("gone").join(name), spread.own[0].join(name)).unwrap();
    let seen = spread.run_each(|_, mirror| {
        let checkpoint = mirror.open(&all())?;
        Ok((FileVisibility::from_files(&checkpoint.files, 4), mirror.written()))
    });
    let seen: Vec<_> = seen.into_iter().map(|seen| seen.unwrap()).collect();
    let of = |ranks: [u32; 4]| FileVisibility::PerRank(ranks.map(|rank| [rank].into_iter().collect()).to_vec());
    assert!(seen.iter().all(|(visibility, _)| *visibility == of([0, 1, 2, 0])), "{seen:?}");
    assert_eq!(seen[3].1, 0);

    for own in &spread.own {
        let _ = fs::remove_dir_all(own);
    }
    let expected =
        "SRC: files: expected files that at least one process sees, missing: every file, at processes 0, 1, 2, 3";
    assert_eq!(spread.error_text(&all()), expected);
    fs::create_dir(&spread.own[1]).unwrap();
    assert_eq!(spread.error_text(&all()), expected);
    fs::create_dir_all(&spread.own[2]).unwrap();
    fs::write(spread.own[2].join("a.json"), "{}").unwrap();
    fs::write(&spread.own[0], "").unwrap();
    let text = spread.error_text(&all());
    assert_eq!(text, "SRC: the kind of entry differs between processes 0 and 2: the file ckpt and a folder");
}

#[test]
fn failed_rank_is_named_by_all() {
    let spread = four_ranks();
    let large = spread.own[2].join("notes.json");
    File::create(&large).unwrap().set_len(5 << 30).unwrap();
    let errors: Vec<Error> = spread.run_each(|_, _| Ok(())).into_iter().map(|done| done.unwrap_err()).collect();
    let text = format!("{}: a document of {} bytes", large.display(), 5_u64 << 30);
    assert!(errors[2].to_string().starts_with(&text), "{}", errors[2]);
    for rank in [0, 1, 3] {
        assert!(errors[rank].to_string().starts_with(&format!("process 2: vote: {text}")), "{}", errors[rank]);
    }
}

/// If files of the mirror are missing, opening it fails with an error that is not about SRC.
#[test]
fn mirror_that_is_being_removed_is_detected() {
    let spread = four_ranks();
    let done = spread.run_each(|rank, mirror| {
        assert!(mirror.is_whole());
        rank.barrier()?;
        if rank.rank() == 0 {
            fs::remove_file(spread.mirror().join("model_world_size_4_rank_2.pt")).unwrap();
        }
        rank.barrier()?;
        assert!(!mirror.is_whole() && mirror.open(&all()).is_err_and(|error| error.kind() == "missing"));
        Ok(())
    });
    done.into_iter().for_each(|done| done.unwrap());
}

#[test]
fn reading_tensor_data_of_another_rank_is_an_error() {
    let spread = four_ranks();
    let errors = spread.run_each(|rank, mirror| {
        let mut checkpoint = mirror.open(&all())?;
        let own = &spread.own[rank.rank() as usize];
        let read = |checkpoint: &Checkpoint, file| {
            let whole = checkpoint.files.whole(file);
            checkpoint.files.read(file, 0, whole.len)
        };
        for (number, file) in (0..).zip(checkpoint.files.ids()) {
            let name = format!("model_world_size_4_rank_{number}.pt");
            assert_eq!(mirror.seen_by(&own.join(&name)), [number]);
            assert!(!mirror.holds_all_of(&own.join(&name)));
            match read(&checkpoint, file) {
                Ok(bytes) => assert!(number == rank.rank() && bytes == fs::read(own.join(&name)).unwrap()),
                Err(error) => {
                    let text = relative(&error.to_string(), own);
                    assert!(text.starts_with(&format!("SRC/{name}: byte 0: expected ")), "{text}");
                    assert!(text.ends_with(&format!("the file, which only process {number} can see")), "{text}");
                }
            }
        }
        // If a file that this rank sees changes, the change is still detected.
        checkpoint.files.check_unchanged()?;
        set_modified(&own.join(format!("model_world_size_4_rank_{}.pt", rank.rank())), 5);
        assert!(checkpoint.files.check_unchanged().is_err());
        assert!(mirror.open(&all()).map(|again| checkpoint = again).is_err());
        Ok(())
    });
    errors.into_iter().for_each(|done| done.unwrap());
}
