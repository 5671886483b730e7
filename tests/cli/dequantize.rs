//! Quantised weights are decoded to the values that PyTorch and transformers compute (`tests/fixtures/quantized`), from any layout
//! of the source; encodings that cannot be decoded are refused.

use std::fs;
use std::path::PathBuf;

use crate::common::corrupt::{dtshard, edit_entries};
use crate::common::env::TestEnv;
use crate::common::{assert_same, fixture, in_parallel, read_safetensors, succeed};

fn quantized(name: &str) -> PathBuf {
    fixture("quantized").join(name)
}

/// The options for a source without configuration beside it.
fn config(name: &str) -> String {
    format!("--config {}", quantized(name).join("config.json").display())
}

#[test]
fn quantised_weights_become_the_values_of_torch() {
    let env = TestEnv::new();
    in_parallel(&[("fp8", "bf16"), ("fp8", "f32"), ("mxfp4", "bf16"), ("mxfp4", "f32")], |(name, dtype)| {
        let truth = read_safetensors(&quantized(&format!("{name}.{dtype}.safetensors")));
        for io in ["mmap", "read"] {
            let options = format!("--dequantize {dtype} --io {io}");
            let made = env.make("consolidate", quantized(name), &format!("{name}-{dtype}-{io}"), &options);
            assert_same(&made.tensors(), &truth, name);
            let written = fs::read_to_string(made.path.join("config.json")).unwrap();
            assert!(written.contains("model_type") && !written.contains("quantization_config"), "{written}");
        }
        let decoded = quantized(&format!("{name}.{dtype}.safetensors"));
        succeed("verify", &[&quantized(name), &decoded], &format!("--dequantize {dtype}"));
    });
}

/// Shards that end within rows, blocks and groups.
#[test]
fn sharded_quantised_weights_become_the_same_values() {
    let env = TestEnv::new();
    let layouts = [
        ("dcp", "--mesh dp=3 --to dcp"),
        ("ranks", "--mesh dp=2,tp=3 --placements S(0),S(1) --to torch-ranks"),
        ("hf", "--mesh dp=5 --to dcp-hf"),
    ];
    in_parallel(&["fp8", "mxfp4"], |name| {
        let truth = read_safetensors(&quantized(&format!("{name}.bf16.safetensors")));
        for (layout, options) in layouts {
            let sharded = env
                .make("reshard", quantized(name).join("model.safetensors"), &format!("{name}-{layout}"), options)
                .path;
            let options = format!("--dequantize bf16 {} --assets none", config(name));
            let made = env.make("consolidate", &sharded, &format!("{name}-{layout}.safetensors"), &options);
            assert_same(&read_safetensors(&made.path), &truth, &format!("{name} {layout}"));
        }
    });
}

#[test]
fn quantised_weights_are_decoded_onto_a_mesh() {
    let env = TestEnv::new();
    in_parallel(&["fp8", "mxfp4"], |name| {
        let truth = read_safetensors(&quantized(&format!("{name}.f32.safetensors")));
        for (number, options) in
            ["--mesh dp=3 --to dcp", "--mesh dp=2,tp=2 --placements S(1),S(0) --to torch-ranks"].iter().enumerate()
        {
            let options = format!("--dequantize f32 {options} --verify");
            let made = env.make("reshard", quantized(name), &format!("{name}-{number}"), &options);
            let whole = env.make("consolidate", &made.path, &format!("{name}-{number}.safetensors"), "--assets none");
            assert_same(&read_safetensors(&whole.path), &truth, name);
        }
    });
}

#[test]
fn decoded_weights_are_cast_and_renamed_like_others() {
    let env = TestEnv::new();
    let options = "--dequantize f32 --dtype bf16 --rename ^model[.]= --assets none";
    let made = env.make("consolidate", quantized("fp8"), "made.safetensors", options);
    let made = read_safetensors(&made.path);
    let truth = read_safetensors(&quantized("fp8.bf16.safetensors"));
    assert_eq!(made.len(), truth.len());
    for (name, tensor) in truth {
        assert_eq!(made[name.strip_prefix("model.").unwrap()], tensor, "{name}");
    }
}

#[test]
fn experts_of_the_hub_become_those_of_torchtitan() {
    let env = TestEnv::new();
    let gpt_oss = fixture("maps/gpt-oss");
    for (from, to) in
        ["packed", "openai-packed"].into_iter().flat_map(|from| ["titan", "hf", "openai"].map(|to| (from, to)))
    {
        let options = format!("--dequantize bf16 --map gpt-oss:{to}");
        let made = env.make("consolidate", gpt_oss.join(from), &format!("{from}-{to}"), &options);
        assert_same(&made.tensors(), &read_safetensors(&gpt_oss.join(format!("{to}.safetensors"))), to);
        assert!(made.run.stderr.contains(&format!("SRC is read as gpt-oss:{from}")), "{}", made.run.stderr);
    }
    let sharded =
        env.make("reshard", gpt_oss.join("packed"), "sharded", "--mesh dp=2,tp=2 --placements S(1),S(0) --to dcp");
    let options = "--dequantize bf16 --map auto:titan --mesh dp=3 --to dcp --verify";
    let made = env.make("reshard", &sharded.path, "dcp", options).path;
    succeed("verify", &[&made, &gpt_oss.join("titan.safetensors")], "");
}

/// OpenAI's `Checkpoint` read the truth.
#[test]
fn packed_experts_keep_their_blocks_under_the_names_of_openai() {
    let env = TestEnv::new();
    let gpt_oss = fixture("maps/gpt-oss");
    let sides = [("hf", "packed"), ("openai", "openai-packed")];
    for ([from, to], layout) in
        [[0, 1], [1, 0]].into_iter().zip(["--mesh dp=3 --to dcp", "--mesh dp=2 --to torch-ranks"])
    {
        let (truth, map) =
            (gpt_oss.join(sides[to].1).join("model.safetensors"), format!("--map gpt-oss:{}", sides[to].0));
        let made = env.make("consolidate", gpt_oss.join(sides[from].1), sides[to].0, &map);
        assert_same(&made.tensors(), &read_safetensors(&truth), sides[to].0);
        let name = format!("sharded-{to}");
        let made = env.make("reshard", gpt_oss.join(sides[from].1), &name, &format!("{map} {layout} --verify")).path;
        succeed("verify", &[&made, &truth], "");
    }
}

#[test]
fn list_of_maps_says_that_weights_are_quantised() {
    for (name, is_quantised) in [("packed", true), ("hf.safetensors", false)] {
        let listed = dtshard(&[&"maps", &fixture("maps/gpt-oss").join(name)]);
        assert_eq!(
            listed.out.contains("the weights are quantised: after they are decoded"),
            is_quantised,
            "{}",
            listed.out
        );
    }
}

#[test]
fn sides_that_contradict_the_decoding_are_refused() {
    let env = TestEnv::new();
    let gpt_oss = fixture("maps/gpt-oss");
    for (source, options, cause) in [
        (
            "packed",
            "--dequantize bf16 --map gpt-oss:hf:titan",
            "the side hf describes stored weights, but --dequantize decodes the weights of SRC",
        ),
        (
            "hf.safetensors",
            "--map gpt-oss:packed:titan",
            "the side packed describes decoded mxfp4 weights, but the weights of SRC are not decoded",
        ),
        (
            "hf.safetensors",
            "--map gpt-oss:hf:packed",
            "the side packed describes decoded mxfp4 weights, which no format stores",
        ),
        ("packed", "--map gpt-oss:titan", "_blocks: hf stores this part of a quantised weight, and titan does not"),
        ("hf.safetensors", "--dequantize bf16", "the model has no quantised weights"),
        ("hf.safetensors", "--config config.json", "--config has no effect without --map and --dequantize"),
    ] {
        let refused = env.refuse("consolidate", gpt_oss.join(source), "out", options);
        assert!(refused.stderr.contains(cause), "{options}: {}", refused.stderr);
    }
}

#[test]
fn scales_that_do_not_fit_are_refused_by_name() {
    let env = TestEnv::new();
    let whole = |options: &str, name: &str| {
        env.make("consolidate", quantized("fp8").join("model.safetensors"), name, &format!("{options} --assets none"))
            .path
    };
    let q_proj = "model.layers.0.self_attn.q_proj.weight";
    let without_scale = whole(&format!("--exclude {q_proj}_scale_inv"), "without.safetensors");
    let other_scale = whole(&format!("--rename {q_proj}_scale_inv={q_proj}_scale"), "other.safetensors");
    let config = config("fp8");
    let blocks = env.write("config.json", r#"{"quantization_config": {"weight_block_size": [8, 6]}}"#);
    let faulty = env.write("faulty.json", r#"{"quantization_config": {"weight_block_size": [0, 6]}}"#);
    let [blocks, faulty] = [blocks, faulty].map(|path| format!("--config {}", path.display()));
    let (source, scale) =
        (quantized("fp8").join("model.safetensors"), format!("expected the scales {q_proj}_scale_inv"));
    let bare = env.path("bare");
    fs::create_dir(&bare).unwrap();
    fs::copy(&source, bare.join("model.safetensors")).unwrap();
    for (source, options, cause) in [
        (&without_scale, config.as_str(), scale.as_str()),
        (&other_scale, &config, &scale),
        (&source, &blocks, "expected the shape [2, 1, 3]"),
        (&source, &faulty, "weight_block_size: expected two numbers of at least 1, found [0,6]"),
        (&bare, "", "the size of the blocks that have one scale is unknown"),
    ] {
        let options = format!("--dequantize bf16 --assets none {options}");
        let refused = env.refuse("consolidate", source, "out.safetensors", &options);
        assert!(refused.stderr.contains(cause), "{options}: {}", refused.stderr);
    }
}

/// The first chunk of a tensor may be empty: dim 0 has fewer elements than the mesh has ranks.
#[test]
fn quantised_weight_with_an_empty_first_shard_is_decoded() {
    let env = TestEnv::new();
    let truth = read_safetensors(&quantized("fp8.bf16.safetensors"));
    for (name, options) in [
        ("ranks", "--mesh dp=5 --mesh-ranks 4,3,2,1,0 --placements S(0) --to torch-ranks"),
        ("hf", "--mesh dp=2,tp=3 --placements R,S(0) --to dcp-hf"),
    ] {
        let sharded = env.make("reshard", quantized("fp8").join("model.safetensors"), name, options).path;
        let options = format!("--dequantize bf16 {} --assets none", config("fp8"));
        let made = env.make("consolidate", &sharded, &format!("{name}.safetensors"), &options);
        assert_same(&read_safetensors(&made.path), &truth, name);
    }
}

#[test]
fn decoded_weights_keep_the_placements_of_the_source() {
    let env = TestEnv::new();
    let options = "--mesh dp=2,tp=2 --placements S(0),S(1) --to torch-ranks";
    let ranks = env.make("reshard", quantized("fp8").join("model.safetensors"), "ranks", options).path;
    let made = env.make("reshard", &ranks, "made", &format!("--dequantize bf16 {}", config("fp8"))).path;
    let shown = succeed("inspect", &[&made], "").stdout;
    let line = shown.lines().find(|line| line.starts_with("model.layers.0.self_attn.q_proj.weight")).unwrap();
    assert!(line.contains(" S(0),S(1) "), "{line}");
    succeed("verify", &[&made, &quantized("fp8.bf16.safetensors")], "");
}

#[test]
fn incomplete_pairs_and_other_methods_are_refused() {
    let env = TestEnv::new();
    let scale = "model.layers.0.mlp.experts.down_proj_scales";
    let weight = "model.layers.0.mlp.up_proj.weight";
    let make = |source: &str, options: &str, name: &str| {
        env.make("consolidate", quantized(source).join("model.safetensors"), name, options).path
    };
    let without_scales = make("mxfp4", &format!("--exclude {scale} --assets none"), "blocks.safetensors");
    let orphan = make("fp8", &format!("--exclude {weight} --assets none"), "orphan.safetensors");
    let gptq =
        env.write("gptq.json", r#"{"quantization_config": {"quant_method": "gptq", "weight_block_size": [4, 6]}}"#);
    let whole = quantized("fp8").join("model.safetensors");
    for (source, config, cause) in [
        (&without_scales, config("mxfp4"), format!("expected the scales {scale} of this tensor")),
        (&orphan, config("fp8"), format!("{weight}_scale_inv: the model has these scales, and not the weight")),
        (&whole, format!("--config {}", gptq.display()), String::from("the weights are quantised with gptq")),
    ] {
        let refused =
            env.refuse("consolidate", source, "out.safetensors", &format!("--dequantize bf16 --assets none {config}"));
        assert!(refused.stderr.contains(&cause), "{}", refused.stderr);
    }
}

#[test]
fn configuration_that_cannot_be_rewritten_is_refused() {
    let env = TestEnv::new();
    let source = env.copy("quantized/mxfp4");
    fs::write(source.join("config.json"), r#"{"limit": Infinity, "quantization_config": {"quant_method": "mxfp4"}}"#)
        .unwrap();
    let refused = env.refuse("consolidate", &source, "out", "--dequantize bf16");
    assert!(refused.stderr.contains("config.json: expected a JSON object"), "{}", refused.stderr);
    fs::write(source.join("config.json"), r#"{"dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}"#)
        .unwrap();
    let made = env.make("consolidate", &source, "f32", "--dequantize f32").path;
    assert_eq!(fs::read_to_string(made.join("config.json")).unwrap(), "{\n  \"dtype\": \"float32\"\n}\n");
}

#[test]
fn replicas_of_quantised_weights_are_compared() {
    let env = TestEnv::new();
    let options = "--mesh dp=2 --placements R --to torch-ranks";
    let ranks = env.make("reshard", quantized("mxfp4").join("model.safetensors"), "ranks", options).path;
    let rank = fs::read_dir(&ranks).unwrap().map(|entry| entry.unwrap().path()).max().unwrap();
    let model = fs::read(quantized("mxfp4").join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&model).unwrap();
    let scales = tensors.tensor("model.layers.0.mlp.experts.down_proj_scales").unwrap().data();
    edit_entries(&rank, |entries| {
        let own = entries.iter_mut().find(|entry| entry.data == scales).unwrap();
        own.data[0] ^= 1;
    });
    let options = "--dequantize bf16 --check-replicas --assets none";
    let refused = env.refuse("consolidate", &ranks, "out.safetensors", options);
    assert!(refused.stderr.contains("down_proj_scales"), "{}", refused.stderr);
}
