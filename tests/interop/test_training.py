"""A training job is converted from one process to tensor parallelism under FSDP2 by `reshard --plan llama`, takes a
step, and is converted back.

A Llama of transformers and one with torchtitan's names, each with its AdamW, in f64: load_state_dict of rank files and
dcp.load take what dtshard wrote, and the step in 4 gloo processes has the loss, the parameters and the moments of the
unsharded one, up to the order of sums. What the job saves is consolidated again. The processes are those of `training.py`.
"""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import common
import generate
import training

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "training.py")
TARGET = ["--mesh", f"dp={training.DP},tp={training.TP}", "--plan", "llama"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """FOLDER of training.py, after its step on all ranks; the comparison is made there."""
    root = tmp_path_factory.mktemp("training") / "jobs"

    def process(verb):
        done = subprocess.run([sys.executable, SCRIPT, verb, str(root)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]

    process("save")
    for model in training.MODELS:
        common.dtshard("reshard", root / model / "whole.pt", root / model / "ranks", "--to", "torch-ranks", *TARGET)
        common.dtshard("reshard", root / model / "dcp", root / model / "placed", "--to", "dcp", *TARGET)
    process("resume")
    return root


@pytest.mark.parametrize("saved", ["ranks", "dcp"])
@pytest.mark.parametrize("model", training.MODELS)
def test_sharded_training_step_equals_one_process(trained, tmp_path, model, saved):
    folder = trained / model
    options = ["--root", "model"] if saved == "dcp" else []
    common.dtshard("consolidate", folder / "trained" / saved, tmp_path / "model.safetensors", *options)
    found, full = load_file(tmp_path / "model.safetensors"), torch.load(folder / "trained" / "full.pt")
    assert found.keys() == full.keys()
    assert all(generate.same(found[name], tensor) for name, tensor in full.items())

    # With these weights the logits equal those of the model that was never sharded.
    expected = torch.load(folder / "expected.pt")
    tokens, _ = training.data(3)
    outputs = []
    for weights in (found, expected["model"]):
        module = training.build(model, seed=3)
        module.load_state_dict(weights)
        with torch.no_grad():
            outputs.append(training.logits(module, tokens))
    torch.testing.assert_close(*outputs, **training.CLOSE)

    # Training continues equally.
    common.dtshard("unshard", folder / "trained" / saved, tmp_path / "whole.pt", "--series", "all")
    whole = torch.load(tmp_path / "whole.pt")
    steps = [training.go_on(model, tree["model"], tree["optim"]) for tree in (whole, expected)]
    torch.testing.assert_close(*steps, **training.CLOSE)
