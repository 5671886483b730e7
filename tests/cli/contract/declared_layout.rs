//! Tests of declared layouts of SRC: the plain tensors in rank files are shards (`--src-mesh` to `--reduce`).
//!
//! Tested in other modules:
//!
//! - The shape of a whole tensor from its shards, and shards that do not fit: `layout::whole`.
//! - Sums, means and their rounding: `exec::reduce`.
//! - Shards and gradients that PyTorch saved: `tests/interop/test_declared_layout.py`.

use std::fs;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;

use crate::common::env::TestEnv;
use crate::common::{Run, assert_same, below, expect, fixture, inspect, read, succeed};
use crate::contract::assert_contains;

/// A tensor of f32: a shape and its elements.
#[derive(Clone, Debug)]
struct Array(Vec<usize>, Vec<f32>);

impl Array {
    /// Returns a tensor whose values are distinct, also from the values of other tensors.
    fn new(shape: &[usize], first: u16) -> Self {
        let len = u16::try_from(shape.iter().product::<usize>()).unwrap();
        Self(shape.to_vec(), (0..len).map(|index| f32::from(first * 1000 + index)).collect())
    }

    /// Returns the part of the tensor that has `len` indices along a dim, starting at `start`.
    fn part(&self, dim: usize, start: usize, len: usize) -> Self {
        let (outer, inner) = (self.0[..dim].iter().product::<usize>(), self.0[dim + 1..].iter().product::<usize>());
        let row = |at: usize| &self.1[(at * self.0[dim] + start) * inner..][..len * inner];
        let mut shape = self.0.clone();
        shape[dim] = len;
        Self(shape, (0..outer).flat_map(row).copied().collect())
    }

    /// Returns consecutive parts of the tensor, with these sizes along a dim.
    fn cut(&self, dim: usize, sizes: &[usize]) -> Vec<Self> {
        let starts = sizes.iter().scan(0, |end, size| Some(std::mem::replace(end, *end + size)));
        starts.zip(sizes).map(|(start, size)| self.part(dim, start, *size)).collect()
    }
}

type State<'a> = Vec<(&'a str, Array)>;

fn safetensors_file(path: &Path, state: &State<'_>) {
    let bytes: Vec<Vec<u8>> =
        state.iter().map(|(_, array)| array.1.iter().flat_map(|value| value.to_le_bytes()).collect()).collect();
    let views = state.iter().zip(&bytes).map(|((name, array), bytes)| {
        (*name, TensorView::new(safetensors::Dtype::F32, array.0.clone(), bytes).unwrap())
    });
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// The format of the rank files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Files {
    Safetensors,
    Torch,
}

/// Writes one file for each rank, as a job without DTensors saves its files.
fn rank_files(env: &TestEnv, name: &str, ranks: &[State<'_>], files: Files) -> PathBuf {
    for (rank, state) in ranks.iter().enumerate() {
        let path = env.path(&format!("{name}.st/model-rank-{rank:05}-of-{:05}.safetensors", ranks.len()));
        safetensors_file(&path, state);
        if files == Files::Torch {
            // A file with the name of a rank file would be refused as one of several files.
            let alone = env.path(&format!("{name}.{rank}.safetensors"));
            fs::copy(&path, &alone).unwrap();
            succeed("unshard", &[&alone, &env.path(&format!("{name}/rank_{rank}.pt"))], "");
        }
    }
    env.path(if files == Files::Torch { name.to_owned() } else { format!("{name}.st") }.as_str())
}

/// Writes the complete model to a file, as the expected result.
fn write_whole(env: &TestEnv, state: &State<'_>) -> PathBuf {
    let path = env.path("whole.safetensors");
    safetensors_file(&path, state);
    path
}

/// Returns a model with an embedding, a column-parallel linear, a row-parallel linear, their biases, and a norm.
fn model() -> State<'static> {
    vec![
        ("embed.weight", Array::new(&[11, 4], 1)),
        ("up.weight", Array::new(&[6, 4], 2)),
        ("up.bias", Array::new(&[6], 3)),
        ("down.weight", Array::new(&[4, 6], 4)),
        ("down.bias", Array::new(&[4], 5)),
        ("norm.weight", Array::new(&[4], 6)),
        ("scale", Array::new(&[], 7)),
    ]
}

const RULES: &str = "--src-placements embed=S(0) --src-placements up=S(0) --src-placements down.weight=S(1)";

/// Returns the shards of each rank. `rows` are the sizes of the parts of the 11 rows of the embedding, and `hidden` the
/// sizes of the parts of the 6 elements of the linears.
fn tensor_parallel(rows: &[usize], hidden: &[usize]) -> Vec<State<'static>> {
    (0..rows.len())
        .map(|rank| {
            let part = |(name, array): (&'static str, Array)| {
                let own = match name {
                    "embed.weight" => array.cut(0, rows)[rank].clone(),
                    "up.weight" | "up.bias" => array.cut(0, hidden)[rank].clone(),
                    "down.weight" => array.cut(1, hidden)[rank].clone(),
                    _ => array,
                };
                (name, own)
            };
            model().into_iter().map(part).collect()
        })
        .collect()
}

/// Asserts that `inspect` exits with code 2.
#[track_caller]
fn inspect_refused(source: &Path, options: &str) -> Run {
    expect(2, "inspect", &[source], options)
}

#[test]
fn declared_tensor_parallel_shards_are_converted_by_every_verb() {
    let env = TestEnv::new();
    let truth = write_whole(&env, &model());
    for files in [Files::Safetensors, Files::Torch] {
        let source = rank_files(&env, &format!("{files:?}"), &tensor_parallel(&[4, 4, 3], &[2, 2, 2]), files);
        let options = format!("--src-mesh tp=3 {RULES}");
        succeed("verify", &[&source, &truth], &options);
        for (verb, to) in [("reshard", "dcp"), ("unshard", "pt"), ("consolidate", "safetensors")] {
            let out = env.path(&format!("{files:?}.{to}"));
            succeed(verb, &[&source, &out], &format!("{options} --verify --to {}", to.replace("pt", "torch")));
            succeed("verify", &[&out, &truth], "");
        }
        let shown = inspect(&source, &options);
        assert_eq!(shown["tensors"]["down.weight"]["placements"], "S(1)");
        assert_eq!(shown["tensors"]["down.bias"]["placements"], "R");
        assert_eq!(shown["mesh"], serde_json::json!([["tp", 3]]));
    }
}

#[test]
fn ranks_with_empty_shards_are_read() {
    let env = TestEnv::new();
    let truth = write_whole(&env, &model());
    let source = rank_files(&env, "a", &tensor_parallel(&[3, 3, 3, 2], &[2, 2, 2, 0]), Files::Torch);
    succeed("verify", &[&source, &truth], &format!("--src-mesh tp=4 {RULES}"));
}

#[test]
fn declared_splits_are_checked_against_the_shapes() {
    let env = TestEnv::new();
    let truth = write_whole(&env, &model());
    let makani = rank_files(&env, "makani", &tensor_parallel(&[2, 2, 2, 2, 3], &[1, 1, 1, 1, 2]), Files::Torch);
    let options = format!("--src-mesh model=5 {RULES}");
    succeed("verify", &[&makani, &truth], &format!("{options} --src-split makani"));
    inspect_refused(&makani, &options);

    let balanced = rank_files(&env, "balanced", &tensor_parallel(&[3, 3, 3, 2], &[2, 2, 1, 1]), Files::Safetensors);
    let options = format!("--src-mesh tp=4 {RULES}");
    succeed("verify", &[&balanced, &truth], &format!("{options} --src-split balanced"));
    inspect_refused(&balanced, &options);

    let own = rank_files(&env, "own", &tensor_parallel(&[1, 10], &[4, 2]), Files::Torch);
    inspect_refused(&own, &format!("--src-mesh tp=2 {RULES}"));
    let layout = env.write(
        "layout.toml",
        "mesh = \"tp=2\"\nplacements = \"R\"\n\
         [[rules]]\ntensors = \"embed\"\nplacements = \"S(0)\"\nsizes = { tp = [1, 10] }\n\
         [[rules]]\ntensors = \"up\"\nplacements = \"S(0)\"\nsizes = { tp = [4, 2] }\n\
         [[rules]]\ntensors = \"down.weight\"\nplacements = \"S(1)\"\nsizes = { tp = [4, 2] }\n",
    );
    let options = format!("--src-layout {}", layout.display());
    succeed("verify", &[&own, &truth], &options);
    let other = env.write("other.toml", fs::read_to_string(&layout).unwrap().replace("[1, 10]", "[1, 9]"));
    inspect_refused(&own, &format!("--src-layout {}", other.display()));
}

#[test]
fn plain_shards_are_resharded_to_other_ranks() {
    let env = TestEnv::new();
    let truth = write_whole(&env, &model());
    let source = rank_files(&env, "mp5", &tensor_parallel(&[2, 2, 2, 2, 3], &[1, 1, 1, 1, 2]), Files::Torch);
    let declared = format!("--src-mesh model=5 {RULES} --src-split makani");
    // The output has plain shards with the same split.
    let made = env.make("reshard", &source, "mp4", &format!("{declared} --mesh model=4 --verify"));
    let sizes = |path: &Path, rank: usize| inspect(&path.join(format!("rank_{rank}.pt")), "")["tensors"].clone();
    let shape = |path: &Path, rank, name: &str| sizes(path, rank)[name]["shape"].to_string();
    assert_eq!(shape(&made.path, 3, "embed.weight"), "[2,4]");
    assert_eq!(shape(&made.path, 3, "down.weight"), "[4,3]");
    assert_eq!(shape(&made.path, 3, "norm.weight"), "[4]");
    succeed("verify", &[&made.path, &truth], &declared.replace("model=5", "model=4"));
    // DTensors are split by torch.chunk.
    let classes = "--tensor-class dtensor --mesh model=4 --split chunk";
    let made = env.make("reshard", &source, "dtensors", &format!("{declared} {classes}"));
    succeed("verify", &[&made.path, &truth], "");
    assert_eq!(inspect(&made.path, "")["tensors"]["up.weight"]["placements"], "S(0)");
}

/// `--tensor-class local` writes files that do not record their layout. Read with a declared layout, they give the
/// original values.
#[test]
fn local_tensors_of_any_layout_are_read_with_a_declared_layout() {
    let env = TestEnv::new();
    for (name, layout) in [
        ("a", "mesh dp=2,tp=2 --placements S(0),S(1)"),
        ("b", "mesh dp=2,tp=3 --placements S(0),S(0)"),
        ("c", "mesh dp=2,tp=2 --placements _S(0,2),S(0)"),
        ("d", "mesh dp=2,tp=2 --placements R,S(-1) --mesh-ranks 0,2,1,3"),
        ("e", "mesh tp=5 --placements **.weight=S(0) --placements R"),
        ("f", "mesh tp=2,dp=3 --placements S(0),S(1) --split makani"),
        ("g", "mesh tp=7 --placements S(0) --split balanced"),
    ] {
        for source in ["fsdp4/ranks", "hsdp/ranks"] {
            let options = format!("--{layout} --tensor-class local");
            let made = env.make("reshard", source, &format!("{name}{}", source.len()), &options);
            let declared: Vec<String> = format!("--{layout}")
                .split_whitespace()
                .map(|word| word.replacen("--", "--src-", usize::from(word.starts_with("--"))))
                .collect();
            succeed("verify", &[&made.path, &fixture(source)], &declared.join(" "));
        }
    }
}

/// Returns parameters of several model families, with the names that transformers uses. Some are fused, transposed or
/// stacked.
fn families() -> Vec<(&'static str, State<'static>)> {
    let model = |named: &[(&'static str, &[usize])]| {
        (1..).zip(named).map(|(first, (name, shape))| (*name, Array::new(shape, first))).collect()
    };
    let llama = model(&[
        ("model.embed_tokens.weight", &[11, 4]),
        ("model.layers.0.self_attn.q_proj.weight", &[6, 4]),
        ("model.layers.0.self_attn.q_proj.bias", &[6]),
        ("model.layers.0.self_attn.o_proj.weight", &[4, 6]),
        ("model.layers.0.mlp.gate_up_proj.weight", &[14, 4]),
        ("model.layers.0.mlp.down_proj.weight", &[4, 7]),
        ("model.norm.weight", &[4]),
        ("lm_head.weight", &[11, 4]),
    ]);
    let gpt2 = model(&[
        ("transformer.wte.weight", &[11, 4]),
        ("transformer.wpe.weight", &[5, 4]),
        ("transformer.h.0.attn.c_attn.weight", &[4, 12]),
        ("transformer.h.0.attn.c_attn.bias", &[12]),
        ("transformer.h.0.attn.c_proj.weight", &[4, 4]),
        ("transformer.h.0.attn.c_proj.bias", &[4]),
        ("transformer.h.0.mlp.c_fc.weight", &[4, 7]),
        ("transformer.h.0.mlp.c_fc.bias", &[7]),
        ("transformer.h.0.mlp.c_proj.weight", &[7, 4]),
        // These tensors have no blocks and are complete on every rank.
        ("transformer.h.1.attn.c_attn.weight", &[4, 7]),
        ("lm_head.weight", &[11, 4]),
    ]);
    let mixtral = model(&[
        ("model.embed_tokens.weight", &[11, 4]),
        ("model.layers.0.self_attn.v_proj.weight", &[5, 4]),
        ("model.layers.0.mlp.gate.weight", &[3, 4]),
        ("model.layers.0.mlp.experts.gate_up_proj", &[3, 10, 4]),
        ("model.layers.0.mlp.experts.down_proj", &[3, 4, 5]),
        ("model.layers.1.block_sparse_moe.experts.0.w1.weight", &[5, 4]),
        ("model.layers.1.block_sparse_moe.experts.0.w2.weight", &[4, 5]),
    ]);
    vec![("llama", llama), ("gpt2", gpt2), ("mixtral", mixtral)]
}

/// `--src-plan` combines the plain shards that `--plan` made with the same options.
#[test]
fn src_plan_reads_the_shards_that_plan_wrote() {
    let env = TestEnv::new();
    for (family, state) in families() {
        let truth = write_whole(&env, &state);
        for (number, mesh) in ["tp=2", "tp=3", "dp=2,tp=2", "dp=1,tp=3", "dp_replicate=2,tp=2"].iter().enumerate() {
            let options = format!("--mesh {mesh} --plan {family}");
            let made = env.path(&format!("{family}{number}"));
            succeed("reshard", &[&truth, &made], &format!("{options} --tensor-class local --to torch-ranks"));
            let declared = format!("--src-mesh {mesh} --src-plan {family}");
            succeed("verify", &[&made, &truth], &declared);
            let layout = format!("{family}{number}.toml");
            let layout = env.write(&layout, format!("mesh = \"{mesh}\"\nplan = \"{family}\"\n"));
            succeed("verify", &[&made, &truth], &format!("--src-layout {}", layout.display()));
        }
    }
}

#[test]
fn styles_apply_to_parameters_and_their_optimizer_state() {
    let env = TestEnv::new();
    let styles = "[styles]\n\"blocks.*.w1\" = \"colwise\"\n\"blocks.*.w2\" = \"rowwise\"\n";
    let styles = env.write("styles.toml", styles);
    let pairs = env.write("pairs.toml", "[styles]\n\"blocks.*\" = \"pairwise(w1,w2)\"\n");
    for (plan, mesh) in [(&styles, "tp=2"), (&styles, "dp=2,tp=3"), (&pairs, "tp=3")] {
        let plan = format!("plan {}", plan.display());
        let options = format!("--mesh {mesh} --{plan} --tensor-class local --overwrite");
        let made = env.make("reshard", "tp2/ranks", "made", &options).path;
        let declared = format!("--src-mesh {mesh} --src-{plan}");
        let run = succeed("verify", &[&made, &fixture("tp2/ranks")], &declared);
        assert_eq!(run.stderr.contains("replicate = \"dp\""), mesh.starts_with("dp"), "{}", run.stderr);
        let found = inspect(&made, &declared);
        assert!(found["tensors"]["optim.state.0.exp_avg"]["placements"].is_string());
    }
    // Rules and options of the command line take precedence.
    let plan = format!("--src-mesh tp=3 --src-plan {}", pairs.display());
    let made = env.path("made");
    let placements = |options: &str| {
        let found = inspect(&made, &format!("{plan} {options}"));
        found["tensors"]["model.blocks.0.w2.weight"]["placements"].as_str().map(str::to_owned)
    };
    assert_eq!(placements("").as_deref(), Some("S(1)"));
    let run = expect(2, "inspect", &[&made], &format!("{plan} --src-placements **.w2.weight=S(0)"));
    assert_contains(&run.stderr, &["blocks.0.w2.weight", "--src-placements **.w2.weight=S(0)"]);
}

#[test]
fn plans_that_do_not_fit_a_source_are_refused() {
    let env = TestEnv::new();
    let source = rank_files(&env, "a", &tensor_parallel(&[6, 5], &[3, 3]), Files::Torch);
    let plan = |text: &str| env.write("plan.toml", text).display().to_string();
    inspect_refused(&source, "--src-mesh tp=2 --src-plan lama");
    inspect_refused(&source, "--src-mesh tp=2 --src-plan llama");
    inspect_refused(&source, "--src-mesh x=2 --src-plan llama");
    let styles = plan("[styles]\nupp = \"colwise\"\n");
    inspect_refused(&source, &format!("--src-mesh tp=2 --src-plan {styles}"));
    let styles = plan("[styles]\nup = \"rowwise\"\nembed = \"rowwise-embedding\"\ndown = \"rowwise\"\n");
    let uneven = rank_files(&env, "b", &tensor_parallel(&[6, 5], &[4, 2]), Files::Torch);
    inspect_refused(&uneven, &format!("--src-mesh tp=2 --src-plan {styles}"));
    let mesh = plan("mesh = \"tp=2\"\nplan = \"llama\"\n");
    inspect_refused(&source, &format!("--src-plan {mesh}"));
    let pairs = plan("[styles]\n\".\" = \"pairwise\"\n");
    inspect_refused(&env.path("a.st"), &format!("--src-mesh tp=2 --src-plan {pairs}"));
}

#[test]
fn reduce_and_src_plan_combine() {
    let env = TestEnv::new();
    let (_, state) = families().remove(0);
    let twice = |array: &Array| Array(array.0.clone(), array.1.iter().map(|value| value * 2.0).collect());
    let doubled = state.iter().map(|(name, array)| (*name, twice(array))).collect();
    let truth = write_whole(&env, &doubled);
    let once = env.path("once.safetensors");
    safetensors_file(&once, &state);
    for (nest, root) in [("", ""), ("--nest grads", "--root grads")] {
        let out = env.path(&format!("ranks{}", nest.len()));
        let copies = "--mesh dp=2,tp=2 --plan llama --replicate dp --tensor-class local --to torch-ranks";
        succeed("reshard", &[&once, &out], &format!("{copies} {nest}"));
        let declared = format!("--src-mesh dp=2,tp=2 --src-plan llama --reduce dp {root} --verify --overwrite");
        let sum = env.path("sum.safetensors");
        succeed("consolidate", &[&out, &sum], &declared);
        succeed("verify", &[&sum, &truth], "");
    }
}

#[test]
fn missing_shard_of_optimizer_state_is_refused() {
    let env = TestEnv::new();
    let local = "--mesh tp=3 --placements **.weight=S(0) --placements R --tensor-class local";
    let source = env.make("reshard", "fsdp4/ranks", "out", local).path;
    let is_lost =
        |path: &PathBuf| path.to_str().is_some_and(|path| path.contains("optim") && path.ends_with("rank_1.pt"));
    let lost = fs::read_dir(&source).unwrap().map(|entry| entry.unwrap().path()).find(is_lost).unwrap();
    fs::remove_file(lost).unwrap();
    let options = "--series all --src-mesh tp=3 --src-placements **.weight=S(0) --allow-missing";
    let run = expect(2, "unshard", &[&source, &env.path("whole.pt")], options);
    assert_contains(&run.stderr, &["exp_avg", "the files have no shard of rank 1"]);
}

/// On the mesh dp=2,tp=2, ranks 1 and 3 have the same shards. A missing file of one series is no loss, although rank 3 has a
/// file of the other series.
#[test]
fn missing_file_of_one_series_is_read_from_replicas() {
    let env = TestEnv::new();
    let local = "--mesh dp=2,tp=2 --placements **.weight=R,S(0) --placements R,R --tensor-class local";
    let source = env.make("reshard", "fsdp4/ranks", "out", local).path;
    let options = "--series model,optim --src-mesh dp=2,tp=2 --src-placements **.weight=R,S(0)";
    let (whole, made) = (env.path("whole.pt"), env.path("made.pt"));
    succeed("unshard", &[&source, &whole], options);
    let file = |series: &str, rank: u32| source.join(format!("{series}_world_size_4_rank_{rank}.pt"));
    let kept = env.path("kept");
    for series in ["optim", "model"] {
        fs::rename(file(series, 3), &kept).unwrap();
        let refused = expect(2, "unshard", &[&source, &made], options);
        assert_contains(&refused.stderr, &[series, "missing: rank 3", "hint: ", "--allow-missing"]);
        succeed("unshard", &[&source, &made], &format!("{options} --allow-missing --overwrite"));
        succeed("verify", &[&made, &whole], "");
        let other = env.path("other");
        fs::rename(file(series, 1), &other).unwrap();
        let refused = expect(2, "unshard", &[&source, &made], &format!("{options} --allow-missing --overwrite"));
        assert_contains(&refused.stderr, &["the files have no shard of rank 1"]);
        fs::rename(&other, file(series, 1)).unwrap();
        fs::rename(&kept, file(series, 3)).unwrap();
    }
}

#[test]
fn optimizer_state_and_gradients_get_the_layout_of_their_parameter() {
    let env = TestEnv::new();
    let weight = Array::new(&[6, 4], 1);
    let moment = Array::new(&[6, 4], 2);
    let row = Array::new(&[6], 3);
    let step = Array::new(&[1], 4);
    let state = |part: &dyn Fn(&Array) -> Array| -> State<'static> {
        vec![
            ("model.w", part(&weight)),
            ("optim.state.w.exp_avg", part(&moment)),
            ("optim.state.w.row", part(&row)),
            ("optim.state.w.step", step.clone()),
        ]
    };
    let truth = write_whole(&env, &state(&Array::clone));
    let ranks: Vec<_> = (0..2).map(|rank| state(&move |array| array.cut(0, &[3, 3])[rank].clone())).collect();
    let source = env.path("ranks");
    for (rank, own) in ranks.iter().enumerate() {
        let flat = env.path(&format!("flat{rank}.safetensors"));
        safetensors_file(&flat, own);
        // `unshard` converts names with dots to nested dicts.
        succeed("unshard", &[&flat, &env.path(&format!("ranks/rank_{rank}.pt"))], "");
    }
    let verify =
        |options: &str, code| expect(code, "verify", &[&source, &truth], &format!("--src-mesh tp=2 {options}"));
    // In a flat state dict, optimizer state whose shape differs from its parameter needs its own rule.
    verify("--src-placements model.w=S(0) --src-placements **.exp_avg=S(0) --src-placements **.row=S(0)", 0);
    let run = verify("--src-placements model.w=S(0)", 1);
    assert_contains(&run.stdout, &["optim.state.w"]);
}

#[test]
fn numbered_state_of_unknown_parameters_is_refused() {
    let env = TestEnv::new();
    let local = "--mesh tp=3 --placements **.weight=S(0) --placements R --tensor-class local";
    let source = env.make("reshard", "fsdp4/ranks", "out", local).path;
    let declared = "--src-mesh tp=3 --src-placements **.weight=S(0)";
    // With the model beside the optimizer, the parameter numbers are known. Tensors without optimizer state are
    // buffers.
    succeed("verify", &[&source, &fixture("fsdp4/ranks")], declared);
    let run = expect(0, "inspect", &[&source], "--src-mesh tp=3 --src-placements S(0) --src-placements *.freqs=R");
    assert!(!run.stderr.contains("buffers"), "{}", run.stderr);
    let rest = "--series optim,extra_state --src-mesh tp=3";
    let run = inspect_refused(&source, &format!("{rest} --src-placements **.weight=S(0)"));
    assert_contains(&run.stderr, &["--src-placements **.weight=S(0)"]);
    inspect_refused(&source, &format!("{rest} --src-placements S(0)"));
}

/// Only the tensors that are converted need a declared layout that fits.
#[test]
fn tensors_that_are_left_out_need_no_declared_layout() {
    let env = TestEnv::new();
    let local = "--mesh tp=3 --placements **.weight=S(0) --placements R --tensor-class local";
    let source = env.make("reshard", "fsdp4/ranks", "out", local).path;
    let one = "--src-mesh tp=3 --src-placements blocks.0.w1.weight=S(0) --include blocks.0.w1.weight";
    let made = env.make("consolidate", &source, "one", one);
    let mut expected = below("model.", &read(&fixture("fsdp4/ranks")));
    expected.retain(|name, _| name == "blocks.0.w1.weight");
    assert_same(&made.tensors(), &expected, "one tensor");
    // The other tensors differ in shape between ranks.
    let rule = "--src-mesh tp=3 --src-placements blocks.0.w1.weight=S(0)";
    let refused = expect(2, "consolidate", &[&source, &env.path("all")], rule).stderr;
    assert_contains(&refused, &["the local shape differs between rank", "declare --src-placements"]);
    // Without the model, the parameters of the optimizer state are unknown. This is no error if the state is excluded.
    let options = "--series optim,extra_state --src-mesh tp=3 --src-placements S(0) --to torch-ranks --mesh dp=1";
    env.make("reshard", &source, "rest", &format!("{options} --exclude optim"));
}

#[test]
fn gradients_are_reduced_over_named_dims() {
    let env = TestEnv::new();
    let weight = Array::new(&[4, 2], 1);
    let bias = Array::new(&[3], 2);
    let times = |array: &Array, by: f32| Array(array.0.clone(), array.1.iter().map(|value| value * by).collect());
    // The mesh is dp=2,cp=2,tp=2. The values of rank r are r + 1 times its part of the tensor.
    let ranks: Vec<State<'_>> = (0_u8..8)
        .map(|rank| {
            let by = f32::from(rank / 2 + 1);
            let part = weight.cut(0, &[2, 2])[usize::from(rank % 2)].clone();
            vec![("w", times(&part, by)), ("b", times(&bias, by)), ("n", Array::new(&[2], 9))]
        })
        .collect();
    let declared = "--src-mesh dp=2,cp=2,tp=2 --src-placements w=R,R,S(0)";
    for (name, reduce, by) in [
        ("mean", "--reduce dp,cp=avg", 2.5_f32),
        ("sum", "--reduce dp,cp", 10.0),
        ("both", "--reduce dp=avg --reduce cp=sum", 5.0),
    ] {
        let of_all = if name == "mean" { 1.0 } else { by / 2.5 };
        let truth = env.path(&format!("{name}.safetensors"));
        let n = times(&Array::new(&[2], 9), of_all);
        safetensors_file(&truth, &vec![("w", times(&weight, by)), ("b", times(&bias, by)), ("n", n)]);
        let source = rank_files(&env, name, &ranks, Files::Torch);
        let out = env.path(&format!("{name}.out"));
        for to in ["dcp", "torch-ranks"] {
            let run =
                succeed("reshard", &[&source, &out], &format!("--to {to} {declared} {reduce} --overwrite --verify"));
            assert_contains(&run.stderr, &["3 plain float tensors", "as partial values (", "over dp"]);
            let again = if to == "dcp" { "" } else { declared };
            succeed("verify", &[&out, &truth], again);
        }
        succeed(
            "consolidate",
            &[&source, &env.path(&format!("{name}.st.safetensors"))],
            &format!("{declared} {reduce}"),
        );
        succeed("verify", &[&env.path(&format!("{name}.st.safetensors")), &truth], "");
        succeed("verify", &[&source, &truth], &format!("{declared} {reduce}"));
    }
    let source = env.path("mean");
    let shown = inspect(&source, &format!("{declared} --reduce dp,cp=avg"));
    assert_eq!(shown["tensors"]["w"]["placements"], "P(avg),P(avg),S(0)");
    // Without `--reduce`, the partial values are treated as replicas, and replicas must not differ.
    let run = expect(2, "unshard", &[&source, &env.path("x.pt")], declared);
    assert_contains(&run.stderr, &["a plain tensor differs", "--reduce"]);
    inspect_refused(&source, &format!("{declared} --reduce db"));
    let run = inspect_refused(&source, &format!("{declared} --reduce model"));
    assert!(!run.stderr.contains("did you mean"));
    inspect_refused(&source, "--reduce dp");
    inspect_refused(&source, &format!("{declared} --reduce dp --reduce dp=avg"));
    inspect_refused(&source, &format!("{declared} --reduce dp --reduce cp=max"));
    inspect_refused(&source, &format!("{declared} --reduce dp=mean"));
    let sharded = "--src-mesh dp=2,cp=2,tp=2 --src-placements *=R,R,S(0)";
    inspect_refused(&source, &format!("{sharded} --reduce tp"));
}

#[test]
fn gradients_are_reduced_where_they_are_selected() {
    let env = TestEnv::new();
    let weight = Array::new(&[4, 2], 1);
    let part = |rank: usize| -> State<'_> { vec![("w", weight.part(0, rank, 1))] };
    // Gradients are a subtree of the rank files, or a series of their own.
    for rank in 0..2 {
        let (model, grads) = (env.path("w.safetensors"), env.path("g.safetensors"));
        safetensors_file(&model, &part(0));
        safetensors_file(&grads, &part(rank));
        succeed("unshard", &[&model, &env.path(&format!("series/model_rank_{rank}.pt"))], "");
        succeed("unshard", &[&grads, &env.path(&format!("series/grads_rank_{rank}.pt"))], "");
        succeed("unshard", &[&grads, &env.path(&format!("alone/grads_rank_{rank}.pt"))], "");
    }
    let known = fixture("flat_grads/views.flat_layout.json");
    let copies = "--mesh dp=2 --tensor-class local --placements R --to torch-ranks";
    let options = format!("{copies} --flat-layout {}", known.display());
    let both = env.make("reshard", "flat_grads/views", "both", &options).path;
    let declared = "--src-mesh dp=2 --reduce dp=avg";
    let one = "--reduce treats 1 plain float tensor as partial values (avg over dp)";
    let below_grads = "--reduce treats 20 plain tensors below grads as partial values (avg over dp)";
    let sources = [(both, "--root grads", below_grads), (env.path("series"), "--series grads", one)];
    for (source, alone, values) in sources {
        let run = expect(2, "unshard", &[&source, &env.path("out.pt")], declared);
        assert_contains(&run.stderr, &["--reduce dp=avg: the gradients are left out", "--with-grads"]);
        succeed("unshard", &[&source, &env.path("out.pt")], &format!("{declared} --with-grads --overwrite"));
        let run = expect(2, "consolidate", &[&source, &env.path("out.safetensors")], declared);
        assert_contains(&run.stderr, &["--reduce dp=avg: the gradients are left out", alone]);
        let options = format!("{declared} {alone} --overwrite");
        let run = succeed("consolidate", &[&source, &env.path("out.safetensors")], &options);
        assert_contains(&run.stderr, &[values]);
    }
    // The parameters of the model beside the gradients are never reduced.
    let options = "--src-mesh dp=2 --reduce dp --series model";
    let run = expect(2, "unshard", &[&env.path("series"), &env.path("out.pt")], options);
    assert_contains(
        &run.stderr,
        &["--reduce dp: the gradients are left out", "convert only the gradients with --series grads"],
    );
    let run = succeed("unshard", &[&env.path("alone"), &env.path("alone.pt")], declared);
    assert_contains(&run.stderr, &[" as partial values (avg over dp)"]);
}

#[test]
fn src_mesh_ranks_set_the_order_of_ranks() {
    let env = TestEnv::new();
    let truth = write_whole(&env, &model());
    let parts = tensor_parallel(&[6, 5], &[3, 3]);
    let ranks = [0, 0, 1, 1].map(|part: usize| parts[part].clone());
    let source = rank_files(&env, "a", &ranks, Files::Torch);
    let rules = RULES.replace("=S", "=R,S");
    succeed("verify", &[&source, &truth], &format!("--src-mesh dp=2,tp=2 --src-mesh-ranks 0,2,1,3 {rules}"));
    // With the ranks in their default order, ranks that are declared as replicas have different parts.
    let run = expect(2, "inspect", &[&source], &format!("--src-mesh dp=2,tp=2 {rules}"));
    assert_contains(&run.stderr, &["embed.weight", "rank 2", "expected [6, 4]", "found [5, 4]"]);
}

#[test]
fn plain_tensors_without_a_declared_layout_are_replicas() {
    let env = TestEnv::new();
    let uneven = rank_files(&env, "a", &tensor_parallel(&[6, 5], &[3, 3]), Files::Torch);
    let run = inspect_refused(&uneven, "");
    assert!(!run.stderr.contains("damaged"));
    let even =
        rank_files(&env, "b", &[vec![("w", Array::new(&[2], 1))], vec![("w", Array::new(&[2], 2))]], Files::Torch);
    let run = expect(1, "verify", &[&even], "");
    assert_contains(
        &run.stderr,
        &["1 finding in", "hint: plain tensors are treated as replicas; if they are shards", "--src-mesh"],
    );
    let run = expect(2, "unshard", &[&even, &env.path("x.pt")], "");
    assert_contains(
        &run.stderr,
        &["a plain tensor differs between rank 0 and rank 1", "--src-mesh and --src-placements"],
    );
    let run = inspect_refused(&env.path("b.st"), "");
    assert_contains(&run.stderr, &["model-rank-00001-of-00002.safetensors"]);
}

#[test]
fn contradicting_declared_layouts_are_refused() {
    let env = TestEnv::new();
    let source = rank_files(&env, "a", &tensor_parallel(&[6, 5], &[3, 3]), Files::Torch);
    for options in [
        "--src-mesh tp=2",
        "--src-split makani",
        "--src-mesh-ranks 1,0 --src-placements S(0)",
        "--src-placements S(0)",
        "--src-mesh tp=3 --src-placements S(0)",
        "--src-mesh tp=1 --src-placements S(0)",
        "--src-mesh tp=2 --src-placements up=S(0),R",
        "--src-mesh tp=2 --src-placements down=S(2)",
        "--src-mesh tp=2 --src-placements upp=S(0)",
        "--src-mesh tp=2 --src-placements S(0) --src-placements R",
        "--src-mesh tp=2 --src-placements up=S(0)",
        "--src-mesh tp=2 --src-placements embed=S(1) --src-placements R",
    ] {
        inspect_refused(&source, options);
    }
    let file = env.path("a/rank_0.pt");
    inspect_refused(&file, "--src-mesh tp=2 --src-placements S(0)");
    inspect_refused(&fixture("fsdp4/dcp"), "--src-mesh tp=2 --src-placements S(0)");
    let whole = write_whole(&env, &model());
    inspect_refused(&whole, "--src-mesh tp=2 --src-placements S(0)");
    let flat = env.write("flat.toml", "[flat]\n");
    inspect_refused(&source, &format!("--src-layout {}", flat.display()));
}

#[test]
fn declared_layout_without_effect_is_an_error_or_warning() {
    let env = TestEnv::new();
    let dtensors = fixture("fsdp_tp/ranks");
    let mesh = "--src-mesh dp=2,tp=2";
    inspect_refused(&dtensors, &format!("{mesh} --src-placements S(0),R"));
    let plan = env.write("plan.toml", "[styles]\n\"**.w1\" = \"colwise\"\n");
    inspect_refused(&dtensors, &format!("{mesh} --src-plan {}", plan.display()));
    let split = "--src-mesh dp=2 --src-split makani --src-placements";
    let copies = rank_files(&env, "c", &[self::model(), self::model()], Files::Torch);
    inspect_refused(&copies, &format!("{split} R"));
    let late = "--src-mesh dp=2 --src-placements **.weight=R --src-placements up.weight=S(0)";
    let run = succeed("inspect", &[&copies], late);
    assert_contains(&run.stderr, &["--src-placements up.weight=S(0): this rule has no effect, because earlier rules"]);
}

#[test]
fn rank_without_a_replicated_tensor_is_read_and_missing_shard_is_refused() {
    let env = TestEnv::new();
    let parts = tensor_parallel(&[6, 5], &[3, 3]);
    let without = |name: &str, rank: usize| -> State<'_> {
        parts[rank].iter().filter(|(own, _)| *own != name).cloned().collect()
    };
    let lacking = rank_files(&env, "a", &[parts[0].clone(), without("up.weight", 1)], Files::Torch);
    let options = format!("--src-mesh tp=2 {RULES}");
    inspect_refused(&lacking, &options);
    // The stages of a pipeline have different layers.
    let [first, second] = [0, 1].map(|rank| parts[rank].clone());
    let stage = |state: &State<'static>, embed: bool| -> State<'static> {
        state.iter().filter(|(name, _)| name.starts_with("embed") == embed).cloned().collect()
    };
    let stages = [stage(&first, true), stage(&second, true), stage(&first, false), stage(&second, false)];
    let source = rank_files(&env, "b", &stages, Files::Torch);
    let options = format!("--src-mesh pp=2,tp=2 {}", RULES.replace("=S", "=R,S"));
    succeed("verify", &[&source, &write_whole(&env, &model())], &options);
    // The missing file has a shard, so `--allow-missing` is not enough.
    let source = rank_files(&env, "c", &parts, Files::Torch);
    fs::remove_file(source.join("rank_0.pt")).unwrap();
    let run = expect(2, "inspect", &[&source], &format!("--src-mesh tp=2 {RULES} --allow-missing"));
    assert_contains(&run.stderr, &["the files have no shard of rank 0"]);
    let copies = rank_files(&env, "d", &[&parts[..], &parts[..]].concat(), Files::Torch);
    fs::remove_file(copies.join("rank_1.pt")).unwrap();
    let options = format!("--src-mesh dp=2,tp=2 {} --allow-missing", RULES.replace("=S", "=R,S"));
    succeed("verify", &[&copies, &write_whole(&env, &model())], &options);
}

#[test]
fn shards_of_an_overflowing_shape_are_refused() {
    let env = TestEnv::new();
    let empty = |len: usize| -> State<'static> { vec![("w", Array(vec![0, len], Vec::new()))] };
    let source = rank_files(&env, "a", &[empty(1 << 60), empty(1 << 60)], Files::Safetensors);
    let options = "--src-mesh tp=2 --src-placements S(1)";
    inspect_refused(&source, options);
}

#[test]
fn plain_shards_are_converted_to_the_local_format() {
    let env = TestEnv::new();
    let truth = write_whole(&env, &model());
    let source = rank_files(&env, "a", &tensor_parallel(&[3, 3, 3, 2], &[2, 2, 1, 1]), Files::Torch);
    let made =
        env.make("reshard", &source, "local", &format!("--src-mesh tp=4 {RULES} --src-split balanced --to local"));
    succeed("verify", &[&made.path, &truth], "");
}

#[test]
fn declared_layout_keeps_the_layout_of_dtensors() {
    let env = TestEnv::new();
    let source = fixture("fsdp4/ranks");
    // In these files, plain tensors are equal on all ranks, so the declared mesh does not change the result.
    let made = env.make("reshard", &source, "out", "--src-placements R --to dcp");
    assert_eq!(read(&made.path), read(&env.make("reshard", &source, "plain", "--to dcp").path));
}
