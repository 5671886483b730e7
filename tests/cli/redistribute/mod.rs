//! Tests of every ordered pair of placement lists, from rank files to rank files. The results are compared element by
//! element with index lists and sums.
//!
//! The reference model shares no code with the library: shards are lists of indices, and each value is computed again from
//! the index of its element. Ranks along a Partial dim hold unrelated values.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use dtshard::catalog::{Catalog, Dtype, Fqn, OutputFile, TensorEntry, TensorId, state_dict};
use dtshard::exec::{Input, PreparedTile, Scratch};
use dtshard::format::torch::{DTensorStyle, RankLayout, RankTarget, reserve_ranks};
use dtshard::format::{Checkpoint, ReadOptions, resolve};
use dtshard::layout::{DeviceMesh, parse_placements};

mod model_of;

use model_of::{Case, ModelPlacement, coordinates, refusal_reason, text};

fn placements() -> [ModelPlacement; 6] {
    use ModelPlacement::{Partial, Shard, Strided, Whole};
    [Whole, Shard(0), Shard(1), Strided(0, 2), Partial("sum"), Partial("max")]
}

/// Returns all lists of `ndim` placements, one placement for each mesh dim.
fn lists(ndim: usize) -> Vec<Vec<ModelPlacement>> {
    let numbers = model_of::elements(&vec![(0..6).collect(); ndim]);
    numbers.iter().map(|list| list.iter().map(|number| placements()[*number]).collect()).collect()
}

const NAMES: [&str; 2] = ["dp", "tp"];

fn mesh_text(mesh: &[usize]) -> String {
    mesh.iter().zip(NAMES).map(|(size, name)| format!("{name}={size}")).collect::<Vec<_>>().join(",")
}

fn mesh_of(mesh: &[usize]) -> DeviceMesh {
    DeviceMesh::parse(&mesh_text(mesh)).unwrap()
}

/// Tensors to convert, each with its name. The first component of the name stands for the list of target placements, so
/// one rule for each list is enough.
type Cases = Vec<(String, Case)>;

/// Writes rank files with the source shards of all cases. The library lays out the files, and the test fills them.
fn write(mesh: &[usize], cases: &Cases, folder: &Path) {
    let mut catalog = Catalog::empty();
    let mut tensors: Vec<(Fqn, TensorId)> = Vec::new();
    for (name, case) in cases {
        let shape = case.shape.iter().map(|&size| size as u64).collect();
        let dtype = Dtype::from_name(case.dtype).unwrap();
        let id = catalog.push_tensor(TensorEntry::new(name.as_str().into(), dtype, shape));
        tensors.push((name.as_str().into(), id));
    }
    catalog.state = state_dict::flat_state(&tensors);
    let by_name: HashMap<&str, &Case> = cases.iter().map(|(name, case)| (name.as_str(), case)).collect();
    let target = RankTarget {
        mesh: &mesh_of(mesh),
        world_size: mesh_of(mesh).job_size(),
        style: &DTensorStyle::default(),
        name: &|rank| PathBuf::from(format!("model_world_size_{}_rank_{rank}.pt", mesh.iter().product::<usize>())),
        layout: &mut |fqn, _, _| {
            let list = parse_placements(&text(&by_name[fqn.as_str()].from)).unwrap();
            let placements = list.into_iter().map(|spec| spec.resolve(2).unwrap()).collect();
            Ok(RankLayout::Distributed { placements, slice: None })
        },
    };
    let reservation = reserve_ranks(&catalog, &catalog.state, target).unwrap();
    let mut contents: Vec<Vec<u8>> = reservation.files.iter().map(bytes_with_literals).collect();
    for tensor in &reservation.tensors {
        for (chunk, at) in coordinates(mesh).iter().enumerate() {
            let Some((file, offset)) = tensor.file_offset(chunk) else { continue };
            let bytes = by_name[tensor.entry.fqn.as_str()].source(mesh, at);
            let start = usize::try_from(offset).unwrap();
            contents[file as usize][start..start + bytes.len()].copy_from_slice(&bytes);
        }
    }
    std::fs::create_dir_all(folder).unwrap();
    for (file, mut content) in reservation.files.iter().zip(contents) {
        for sum in &file.checksums {
            let range = usize::try_from(sum.range.start).unwrap()..usize::try_from(sum.range.end).unwrap();
            let crc = crc32fast::hash(&content[range]).to_le_bytes();
            for site in &sum.crc_offsets {
                let site = usize::try_from(*site).unwrap();
                content[site..site + 4].copy_from_slice(&crc);
            }
        }
        std::fs::write(folder.join(&file.path), content).unwrap();
    }
}

fn bytes_with_literals(file: &OutputFile) -> Vec<u8> {
    let mut content = vec![0; usize::try_from(file.len).unwrap()];
    for literal in &file.header_bytes {
        let start = usize::try_from(literal.offset).unwrap();
        content[start..start + literal.bytes.len()].copy_from_slice(&literal.bytes);
    }
    content
}

/// Runs the program, and returns its message if it exits with code 2.
fn dtshard(arguments: &[&str]) -> Result<(), String> {
    let run = Command::new(env!("CARGO_BIN_EXE_dtshard")).args(arguments).arg("--quiet").output().unwrap();
    let stderr = String::from_utf8(run.stderr).unwrap();
    match run.status.code() {
        Some(0) => Ok(()),
        Some(2) => Err(stderr),
        code => panic!("{arguments:?}: exit code {code:?}: {stderr}"),
    }
}

fn reshard(from: &Path, to: &Path, options: &[String]) -> Result<(), String> {
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let paths = ["reshard", from.to_str().unwrap(), to.to_str().unwrap(), "--no-sync", "--threads=2"];
    dtshard(&[&paths, options.as_slice()].concat())
}

/// Returns the options `--placements` that give each case its target placements.
fn rules(cases: &Cases) -> Vec<String> {
    let mut rules: Vec<String> = Vec::new();
    for (name, case) in cases {
        let rule = format!("--placements={}.**={}", name.split('.').next().unwrap(), text(&case.to));
        if !rules.contains(&rule) {
            rules.push(rule);
        }
    }
    rules
}

/// Asserts that in `folder` every rank has the expected elements of every case, with the target placements.
fn assert_target(folder: &Path, meshes: (&[usize], &[usize]), ranks: &[u32], cases: &Cases) {
    let written = Checkpoint::open(folder, &ReadOptions::default()).unwrap();
    let (files, catalog) = (&written.files, &written.catalog);
    let input = Input { files, catalog, resolve: &resolve };
    let found: HashMap<&str, &TensorEntry> = catalog.tensors.iter().map(|entry| (entry.fqn.as_str(), entry)).collect();
    assert_eq!(found.len(), cases.len());
    let same = meshes.0 == meshes.1 && ranks.is_empty();
    for (name, case) in cases {
        let entry = found[name.as_str()];
        let what = format!(
            "{name} {:?} {} on {:?} to {} on {:?}",
            case.shape,
            text(&case.from),
            meshes.0,
            text(&case.to),
            meshes.1
        );
        assert_eq!(entry.sharding.as_ref().unwrap().display_placements(), text(&case.to), "{what}");
        for (cell, at) in coordinates(meshes.1).iter().enumerate() {
            let rank = ranks.get(cell).copied().unwrap_or(u32::try_from(cell).unwrap());
            let chunk = (0..entry.chunks.len()).find(|chunk| entry.chunks.rank(*chunk).unwrap().0 == rank).unwrap();
            let wanted = case.target(meshes, same, at);
            let mut bytes = vec![0; wanted.len()];
            if !bytes.is_empty() {
                let prepared = PreparedTile::chunk(input, entry, u32::try_from(chunk).unwrap()).unwrap();
                prepared.read(input, 0, &mut bytes, &mut Scratch::default()).unwrap();
            }
            assert!(bytes == wanted, "{what}: rank {rank}\n{bytes:x?}\n{wanted:x?}");
        }
    }
}

const KINDS: [(&str, [usize; 2]); 6] =
    [("f32", [7, 5]), ("f32", [5, 4]), ("f32", [3, 2]), ("f32", [1, 4]), ("bf16", [7, 5]), ("i64", [5, 4])];

/// Returns the cases for all pairs of placement lists whose redistribution is defined. Each pair gets `kinds` tensors,
/// whose dtypes and shapes are taken from [`KINDS`] in turn.
fn cases(ndim: usize, kinds: usize, same: bool) -> Cases {
    let mut cases = Cases::new();
    for (number, to) in lists(ndim).iter().enumerate() {
        for from in lists(ndim).iter().filter(|from| refusal_reason(from, to, same).is_none()) {
            for _ in 0..kinds {
                let seed = cases.len() as u64;
                let (dtype, shape) = KINDS[cases.len() % KINDS.len()];
                let case = Case { dtype, shape: shape.to_vec(), from: from.clone(), to: to.clone(), seed };
                cases.push((format!("to{number}.t{seed}"), case));
            }
        }
    }
    cases
}

fn redistribute(meshes: (&[usize], &[usize]), ranks: &[u32], cases: &Cases) {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    write(meshes.0, cases, &source);
    let mut options = rules(cases);
    if meshes.0 != meshes.1 || !ranks.is_empty() {
        options.push(format!("--mesh={}", mesh_text(meshes.1)));
    }
    if !ranks.is_empty() {
        options.push(format!("--mesh-ranks={}", ranks.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")));
    }
    reshard(&source, &target, &options).unwrap();
    assert_target(&target, meshes, ranks, cases);
}

#[test]
fn every_placement_pair_on_one_mesh_dim_gives_the_model_values() {
    let cases = cases(1, KINDS.len(), true);
    for size in 1..=4 {
        redistribute((&[size], &[size]), &[], &cases);
    }
}

#[test]
fn every_placement_pair_on_two_by_two_gives_the_model_values() {
    redistribute((&[2, 2], &[2, 2]), &[], &cases(2, 2, true));
}

#[test]
fn every_placement_pair_on_two_by_three_gives_the_model_values() {
    redistribute((&[2, 3], &[2, 3]), &[], &cases(2, 2, true));
}

/// On another mesh, a coordinate belongs to another rank. So partial values that would stay unchanged on the same mesh
/// are reduced and split again.
#[test]
fn placement_pairs_on_other_meshes_give_the_model_values() {
    let mut cases = cases(2, 1, false);
    redistribute((&[2, 2], &[3, 2]), &[], &cases);
    redistribute((&[2, 2], &[2, 2]), &[0, 2, 1, 3], &cases);
    for (_, case) in &mut cases {
        case.to.truncate(1);
    }
    cases.retain(|(_, case)| refusal_reason(&case.from, &case.to, false).is_none());
    redistribute((&[2, 3], &[4]), &[], &cases);
}

#[test]
fn other_reduce_ops_give_the_model_values() {
    let partial = |op| vec![ModelPlacement::Partial(op)];
    let mut cases = Cases::new();
    for (number, op) in ["sum", "avg", "product", "max", "min"].into_iter().enumerate() {
        for (to, list) in
            [vec![ModelPlacement::Whole], vec![ModelPlacement::Shard(1)], partial(op)].into_iter().enumerate()
        {
            let case = |from| Case { dtype: "f32", shape: vec![7, 5], from, to: list.clone(), seed: number as u64 };
            cases.push((format!("from{number}to{to}.t"), case(partial(op))));
        }
    }
    for (to, op) in ["avg", "min"].into_iter().enumerate() {
        let case =
            Case { dtype: "i64", shape: vec![3, 2], from: vec![ModelPlacement::Shard(0)], to: partial(op), seed: 1 };
        cases.push((format!("into{to}.t"), case));
    }
    redistribute((&[3], &[3]), &[], &cases);
}

/// The source has one tensor for each list of placements. Each conversion to a list for which the redistribution is
/// undefined is refused.
#[test]
fn undefined_redistributions_are_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    let case =
        |from: &Vec<ModelPlacement>| Case { dtype: "f32", shape: vec![3, 2], from: from.clone(), to: vec![], seed: 0 };
    let sound: Vec<Vec<ModelPlacement>> =
        lists(2).into_iter().filter(|list| refusal_reason(list, &[], true).is_none()).collect();
    let cases: Cases = sound.iter().enumerate().map(|(number, from)| (format!("t{number}"), case(from))).collect();
    write(&[2, 2], &cases, &source);
    let assert_error_mentions = |options: &[&str], words: &[&str]| {
        let options: Vec<String> = options.iter().map(ToString::to_string).collect();
        let text = reshard(&source, &target, &options).expect_err(&options.join(" "));
        assert!(text.contains("hint: "), "{text}");
        assert!(words.iter().all(|word| text.contains(word)), "{options:?}: {text}");
        assert!(!target.exists());
    };
    let mut number = 0;
    for to in lists(2) {
        for ((name, _), from) in cases.iter().zip(&sound) {
            let Some(why) = refusal_reason(from, &to, true) else { continue };
            assert_error_mentions(&["--include", name, &format!("--placements={}", text(&to))], &[name, why]);
            number += 1;
        }
    }
    assert!(number > 150, "{number}");
    let whole = "t0";
    for op in ["product", "band", "bor", "bxor"] {
        let list = format!("--placements=P({op}),R");
        assert_error_mentions(
            &["--include", whole, &list],
            &[whole, &format!("a value that is not Partial cannot be converted to P({op})")],
        );
    }
    assert_error_mentions(
        &["--to=dcp", "--placements=P(sum),R"],
        &["P(sum) cannot be written to a DCP directory", "--to torch-ranks"],
    );
    assert_error_mentions(
        &["--tensor-class=sharded-tensor", "--placements=P(sum),R"],
        &["a ShardedTensor cannot have the placements P(sum),R"],
    );
    for from in lists(2).iter().filter(|list| refusal_reason(list, &[], true).is_some()) {
        let mixed = folder.path().join("mixed");
        write(&[2, 2], &vec![("w".into(), case(from))], &mixed);
        let error = dtshard(&["inspect", mixed.to_str().unwrap()]).unwrap_err();
        assert!(["rank_0.pt", "w", "do not commute"].iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn integers_that_do_not_divide_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    // The value is 36 times an odd number, so it is not divisible by 8, the number of ranks.
    let case = Case { dtype: "i64", shape: vec![7, 5], from: vec![ModelPlacement::Whole], to: vec![], seed: 3 };
    write(&[2], &vec![("w".into(), case)], &source);
    let error = reshard(&source, &target, &["--mesh=dp=8".into(), "--placements=P(sum)".into()]).unwrap_err();
    assert!(error.contains("w: ") && error.contains("divided by 8 is not an integer"), "{error}");
    assert!(!target.exists());
}

/// If the file of a rank is missing, replicas can replace its values, but the partial values of other ranks cannot.
#[test]
fn missing_partial_value_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let whole = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    for (list, covered) in [("R,P(sum)", true), ("P(sum),P(sum)", false), ("P(sum),S(0)", false)] {
        let from = lists(2).into_iter().find(|from| text(from) == list).unwrap();
        let case = Case { dtype: "f32", shape: vec![5, 4], from, to: vec![ModelPlacement::Whole; 2], seed: 0 };
        let source = folder.path().join(list);
        write(&[2, 2], &vec![("w".into(), case)], &source);
        dtshard(&["unshard", source.to_str().unwrap(), &whole("all.pt"), "--overwrite"]).unwrap();
        std::fs::remove_file(source.join("model_world_size_4_rank_2.pt")).unwrap();
        let arguments = ["unshard", source.to_str().unwrap(), &whole("rest.pt"), "--allow-missing", "--overwrite"];
        match dtshard(&arguments) {
            Ok(()) => dtshard(&["verify", &whole("all.pt"), &whole("rest.pt")]).unwrap(),
            Err(error) => {
                let text = error;
                assert!(!covered && text.contains("w: gap at") && text.contains("partial value (1,"), "{text}");
            }
        }
    }
}

/// Partial values that are kept are copied bit by bit. The sum of new partial values is the value.
#[test]
fn default_layout_keeps_partial_values() {
    let folder = tempfile::tempdir().unwrap();
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    let mut cases = cases(2, 1, true);
    cases.retain(|(name, _)| name.starts_with("to0."));
    for (_, case) in &mut cases {
        case.to = case.from.clone();
    }
    write(&[2, 2], &cases, &source);
    reshard(&source, &target, &["--verify".into()]).unwrap();
    assert_target(&target, (&[2, 2], &[2, 2]), &[], &cases);
    let (source, dcp) = (source.to_str().unwrap(), folder.path().join("dcp"));
    reshard(Path::new(source), &dcp, &["--to=dcp".into(), "--verify".into(), "--check-replicas".into()]).unwrap();
    dtshard(&["verify", source, dcp.to_str().unwrap()]).unwrap();
    dtshard(&["verify", source, target.to_str().unwrap()]).unwrap();
    let split = folder.path().join("split");
    reshard(
        &dcp,
        &split,
        &["--mesh=dp=2,tp=2", "--to=torch-ranks", "--placements=P(sum),P(sum)", "--verify"].map(String::from),
    )
    .unwrap();
    dtshard(&["verify", split.to_str().unwrap(), dcp.to_str().unwrap()]).unwrap();
}
