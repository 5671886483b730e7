"""`reshard --plan llama` converts a training job from one process to tensor parallelism under FSDP2. The job takes a step, and
is converted back.

The models are a Llama of transformers and one with torchtitan's names, each with AdamW, in f64. The job loads the files of
dtshard with load_state_dict (rank files) and with dcp.load. The step in 4 gloo processes has the loss, the parameters and the
moments of the unsharded step, up to rounding. The checkpoints that the job then saves are consolidated. The processes run
`training.py`.
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
    """Returns FOLDER of training.py after the step on all ranks; training.py has compared the step with the unsharded one."""
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

    # The logits equal those of the model that was never sharded.
    expected = torch.load(folder / "expected.pt")
    tokens, _ = training.data(3)
    outputs = []
    for weights in (found, expected["model"]):
        module = training.build(model, seed=3)
        module.load_state_dict(weights)
        with torch.no_grad():
            outputs.append(training.logits(module, tokens))
    torch.testing.assert_close(*outputs, **training.CLOSE)

    # The next step equals that of the model that was never sharded.
    common.dtshard("unshard", folder / "trained" / saved, tmp_path / "whole.pt", "--series", "all")
    whole = torch.load(tmp_path / "whole.pt")
    steps = [training.go_on(model, tree["model"], tree["optim"]) for tree in (whole, expected)]
    torch.testing.assert_close(*steps, **training.CLOSE)
