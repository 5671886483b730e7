"""`dtshard reshard --plan`: shards, placements and meshes equal those of PyTorch's parallelize_module and fully_shard.

Each gloo process compares two rank files of its rank: dtshard made one from the whole state dict, PyTorch saved the other.
"""

import json
import os
import subprocess
import sys

import pytest

import common
import generate_plans
import plans

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "plans.py")
MESHES = [*plans.DDP_MESHES, *sorted({mesh for family in generate_plans.FAMILIES if family != "styles" for mesh, _ in generate_plans.placings(family)})]
# the name of a family's plan, if it differs from the name of the family
PLANS = {"titan": "llama", "mixtral_hub": "mixtral", "qwen2_moe_hub": "qwen2_moe", "qwen3_moe_hub": "qwen3_moe", "gpt_neox_hub": "gpt_neox"}
# The elements of this tensor in PyTorch contradict its placements, so dtshard replicates it over dp
# (docs/reference/parallelize.md).
MISPLACED = {("gpt2", "dp=2,tp=2"): "transformer.h.0.attn.c_attn.bias: "}


def in_ranks(verb, folder, mesh):
    done = subprocess.run([sys.executable, SCRIPT, verb, str(folder), mesh], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    """Returns a function (family, mesh) -> lines, one per difference; it compares all families of a mesh at once."""
    found = {}

    def get(family, mesh):
        if mesh not in found:
            found[mesh] = compared(tmp_path_factory.mktemp("plans"), mesh)
        return found[mesh][family]

    return get


def compared(folder, mesh):
    in_ranks("save", folder, mesh)
    found = {}
    for family in plans.families(mesh):
        plan = ["--plan", PLANS.get(family, family)] if "tp" in mesh else []
        done = common.run("reshard", folder / family / "model.pt", folder / family / "written", "--to", "torch-ranks",
                          "--mesh", mesh, *plan)
        found[family] = [] if done.returncode == 0 else [done.stderr]
    in_ranks("compare", folder, mesh)
    for family, lines in found.items():
        for rank in range(0 if lines else generate_plans.ranks_of(mesh)):
            path = folder / family / "differences" / f"{rank}.json"
            lines += [f"rank {rank}: {line}" for line in json.loads(path.read_text())]
    return found


@pytest.mark.parametrize("family,mesh", [(family, mesh) for mesh in MESHES for family in plans.families(mesh)])
def test_each_rank_has_the_local_tensors_of_pytorch(differences, family, mesh):
    misplaced = MISPLACED.get((family, mesh))
    lines = [line for line in differences(family, mesh) if misplaced is None or misplaced not in line]
    assert not lines, "\n".join(lines[:20])
