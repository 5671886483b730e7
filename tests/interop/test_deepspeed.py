"""`reshard` of DeepSpeed checkpoints: FSDP2 loads masters, moments, steps and param groups with `dcp.load` and `set_state_dict`, in
2 and 3 gloo processes, and they equal the tensors of DeepSpeed's live engines.
"""

import json
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import common
import generate
import generate_deepspeed

CASES = ["zero1_fp32", "zero1_bf16", "zero2_fp16", "zero2_round_robin", "zero3_fp32", "zero3_bf16"]
FOLDER = os.path.join(common.FIXTURES, "trainers", "deepspeed")


def load(case, folder):
    """Loads the checkpoint into an FSDP2 model and AdamW with other values, and compares all values with the truth."""
    model = generate_deepspeed.model(False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [trained]
    if generate_deepspeed.CASES[case][1].get("groups") == 2:
        groups = [[p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]]
    optimizer = torch.optim.AdamW([{"params": group, "lr": 9.0, "weight_decay": 9.0} for group in groups])
    state = dict(zip(["model", "optimizer"], get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    weights, moments = get_state_dict(model, optimizer)
    found = {f"model.{name}": value for name, value in weights.items()}
    found |= {f"optimizer.state.{name}.{key}": value for name, own in moments["state"].items() for key, value in own.items()}
    expected = load_file(os.path.join(FOLDER, f"{case}.truth.safetensors"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        whole = found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name]
        # Frozen parameters have the dtype of the job that saved them.
        assert generate.same(whole.to(value.dtype), value), name
    with open(os.path.join(FOLDER, f"{case}.truth.json")) as f:
        noted = json.load(f)["param_groups"]
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(g["lr"], g["weight_decay"]) for g in noted]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_fsdp2_resumes_from_deepspeed(tmp_path, case, world):
    common.dtshard("reshard", os.path.join(FOLDER, case), tmp_path / "dcp", "--mesh", f"dp={world}")
    common.run_ranks(load, world, tmp_path, case, str(tmp_path / "dcp"))
