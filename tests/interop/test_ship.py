"""`dtshard consolidate`, without options, of trainers' checkpoints: transformers runs the model with the outputs of the trained
one."""

import json
import os
import re

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

import common
import generate


# SRC -> its case. Except for CONFIG_APART, SRC or its folder huggingface/ has a config.json.
SOURCES = {
    "verl": "verl",
    "verl/global_step_10": "verl",
    "verl/global_step_10/actor": "verl",
    "accelerate_llama": "accelerate_llama",
    "accelerate_llama/pytorch_model_fsdp_0": "accelerate_llama",
    "titan/step-1000": "titan",
    "dcp_trainer": "dcp_trainer",
}
CONFIG_APART = {"accelerate_llama/pytorch_model_fsdp_0", "titan/step-1000"}
LAYERS = {"verl": 2}
LEFT_OUT = {  # the groups of tensors that the closing line must list as left out
    "verl": ["optim", "extra_state"], "accelerate_llama": [], "titan": ["optimizer", "train_state"],
    "dcp_trainer": ["optim"],
}
EACH = pytest.mark.parametrize("source", SOURCES)
TOKENS = torch.arange(40).reshape(2, 20)


def state_of(case):
    """Returns the state dict of the model."""
    _, tensors = common.trainer_truth(case)
    if case == "titan":  # `model.` is not a prefix here, but a part of the model's names
        return {n: t for n, t in tensors.items() if not n.startswith(("optimizer.", "train_state."))}
    return {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}


def config_of(case):
    dtype = torch.bfloat16 if case == "accelerate_llama" else torch.float32
    return transformers.LlamaConfig(
        **generate.TRAINED_CONFIG, num_hidden_layers=LAYERS.get(case, 1), tie_word_embeddings=case == "dcp_trainer",
        architectures=["LlamaForCausalLM"], dtype=dtype)


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def expected_logits(case, dtype):
    """Returns the logits of the trained model, whose weights come from the ground truth, not from a checkpoint."""
    model = transformers.LlamaForCausalLM._from_config(config_of(case), dtype=dtype)
    model.load_state_dict({n: t.to(dtype) for n, t in state_of(case).items()}, strict=True)
    return logits(model)


def load(folder, source, dtype):
    """Loads with AutoModelForCausalLM, as users do; no key may be missing or unused."""
    if source in CONFIG_APART:
        assert not os.path.exists(f"{folder}/config.json")
        config_of(SOURCES[source]).save_pretrained(folder)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    assert all(p.dtype == dtype for p in model.parameters())
    return model


def same_file(a, b):
    with open(a, "rb") as x, open(b, "rb") as y:
        return x.read() == y.read()


@EACH
def test_consolidated_model_runs_as_trained(tmp_path, source):
    case = SOURCES[source]
    dtype = config_of(case).dtype
    done = common.dtshard("consolidate", f"{common.FIXTURES}/{source}", tmp_path / "x")
    assert re.search(r"^wrote \d+ files?, \d+ tensors, ", done.stderr, re.M), done.stderr
    for part in LEFT_OUT[case]:
        assert re.search(rf"^wrote .*; left out: .*\b{part}\b", done.stderr, re.M), done.stderr
    with safe_open(tmp_path / "x" / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}
    common.assert_equal(load_file(tmp_path / "x" / "model.safetensors"), state_of(case), order=False)
    found = logits(load(tmp_path / "x", source, dtype))
    assert found.isfinite().all() and found.std() > 0
    common.assert_equal(found, expected_logits(case, dtype))


@EACH
def test_consolidated_model_in_bf16_runs_as_cast_by_pytorch(tmp_path, source):
    """--dtype bf16 rounds as PyTorch does."""
    case = SOURCES[source]
    done = common.dtshard("consolidate", f"{common.FIXTURES}/{source}", tmp_path / "x", "--dtype", "bf16")
    state = {n: t.to(torch.bfloat16) for n, t in state_of(case).items()}
    common.assert_equal(load_file(tmp_path / "x" / "model.safetensors"), state, order=False)
    common.assert_equal(logits(load(tmp_path / "x", source, torch.bfloat16)), expected_logits(case, torch.bfloat16))
    if case != "accelerate_llama":  # bf16 already
        assert f"cast {len(state)} f32->bf16" in done.stderr


@EACH
def test_model_in_many_files_has_an_index_and_loads(tmp_path, source):
    """`total_size` in the index is the number of bytes of all tensors, and the model has the same outputs."""
    case = SOURCES[source]
    dtype = config_of(case).dtype
    common.dtshard("consolidate", f"{common.FIXTURES}/{source}", tmp_path / "x", "--max-shard-size", "4KB")
    with open(tmp_path / "x" / "model.safetensors.index.json") as f:
        index = json.load(f)
    state = state_of(case)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in state.values())
    assert set(index["weight_map"]) == set(state)
    for file in sorted(set(index["weight_map"].values())):
        assert re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", file)
        with safe_open(tmp_path / "x" / file, "pt") as f:
            assert f.metadata() == {"format": "pt"}
    common.assert_equal(logits(load(tmp_path / "x", source, dtype)), expected_logits(case, dtype))


@pytest.mark.parametrize("source,beside", [
    ("verl", "verl/global_step_10/actor/huggingface"),
    ("verl/global_step_10/actor", "verl/global_step_10/actor/huggingface"),
    ("accelerate_llama", "accelerate_llama"), ("dcp_trainer", "dcp_trainer")])
def test_assets_are_copied(tmp_path, source, beside):
    """Config and tokenizer files are copied unchanged; files that loaders do not need are not copied."""
    common.dtshard("consolidate", f"{common.FIXTURES}/{source}", tmp_path / "x")
    beside = f"{common.FIXTURES}/{beside}"
    assets = {n for n in os.listdir(beside) if n.endswith(".json")}
    assert set(os.listdir(tmp_path / "x")) == {"model.safetensors", *assets}
    for name in assets:
        assert same_file(f"{beside}/{name}", tmp_path / "x" / name), name
    if source.startswith("verl"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "x")
        assert tokenizer("w4 w39 w7")["input_ids"] == [4, 39, 7]


def test_parent_folder_gives_identical_bytes(tmp_path):
    """In the root folder of a trainer's run, dtshard finds the only checkpoint."""
    common.dtshard("consolidate", f"{common.FIXTURES}/verl", tmp_path / "root")
    common.dtshard("consolidate", f"{common.FIXTURES}/verl/global_step_10/actor", tmp_path / "actor")
    assert same_file(tmp_path / "root" / "model.safetensors", tmp_path / "actor" / "model.safetensors")


@pytest.mark.parametrize("source", ["verl/global_step_10/actor", "accelerate_llama/pytorch_model_fsdp_0",
                                    "accelerate_llama/optimizer_0", "titan/step-1000", "dcp_trainer"])
def test_trainer_checkpoints_pass_verify(source):
    """verify accepts that the random state differs between ranks."""
    common.dtshard("verify", f"{common.FIXTURES}/{source}")
