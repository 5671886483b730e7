"""Rank files of `reshard --plan` and of Partial tensors load as DTensors in this PyTorch, and with `-m compat` in older
releases.

Each gloo process loads the file of its rank: mesh, placements and local tensors equal those of DTensors that PyTorch makes, and
full_tensor() and redistribute() give the truth, if the PyTorch release supports the placements.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import common
import generate
import redistribute
from test_ranks_written import PYTHONS, version_of

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "layouts.py")
MESH = [("dp", 2), ("tp", 2)]
RELEASES = [sys.executable, *(pytest.param(python, marks=pytest.mark.compat) for python in PYTHONS)]


def written_for(python):
    """Returns the options for the release that loads the files; skips the test if dtshard writes no DTensors for it."""
    version = version_of(python)
    if tuple(map(int, version.split(".")[:2])) < (2, 5):
        pytest.skip(f"DTensors of {version} are not written")
    return [] if python == sys.executable else ["--torch-version", version]


def load(python, tmp_path, tensors, **more):
    """Returns the outcome of full_tensor() by name, which is equal on all ranks."""
    job = {"folder": str(tmp_path / "written"), "mesh": MESH, "tensors": tensors, "truth": str(tmp_path / "whole.pt"),
           "rendezvous": str(tmp_path / "rendezvous"), "report": str(tmp_path / "report.json"), **more}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    done = subprocess.run([python, SCRIPT, str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((tmp_path / "report.json").read_text())


def noted(family):
    """Returns shapes and placements of the family with PyTorch's own plan and fully_shard on MESH."""
    with open(os.path.join(common.FIXTURES, "plans", f"{family}.json")) as f:
        note = json.load(f)
    placing = next(p for p in note["placings"] if [tuple(dim) for dim in p["mesh"]] == MESH)
    shapes = {name: tensor["shape"] for name, tensor in note["whole"].items()}
    placements = {name: tensor["placements"] for name, tensor in placing["tensors"].items()}
    for name, tensor in placing["tensors"].items():
        if tensor.get("as_placed") is False:  # docs/reference/parallelize.md
            placements[name] = ["R", placements[name][1]]
    return shapes, placements


@pytest.mark.parametrize("family,even", [("llama", False), ("llama", True), ("mixtral", False), ("gpt2", False)])
@pytest.mark.parametrize("python", RELEASES)
def test_full_tensor_of_planned_rank_files_equals_the_truth(tmp_path, python, family, even):
    options = written_for(python)
    shapes, placements = noted(family)
    if even:
        shapes = {name: [-(-size // 4) * 4 for size in shape] for name, shape in shapes.items()}
    torch.save({name: generate.values(name, shape) for name, shape in shapes.items()}, tmp_path / "whole.pt")
    common.dtshard("reshard", tmp_path / "whole.pt", tmp_path / "written", "--to", "torch-ranks", "--mesh", "dp=2,tp=2",
                   "--plan", family, *options)
    outcomes = load(python, tmp_path, placements)
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome != ["the truth"]}
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} tensors whole again; not", wrong)
    if python != sys.executable:
        check_locals(tmp_path, placements)
        # Before 2.15, full_tensor() does not support the strided shards of fused weights.
        wrong = {name: outcome for name, outcome in wrong.items() if not placements[name][-1].startswith("_S")}
    assert not wrong, wrong


def check_locals(tmp_path, placements):
    """Checks files for an older release in this PyTorch: placements and local tensors are correct. They have no mesh that this
    PyTorch can read (docs/reference/formats/torch-ranks.md)."""
    whole = torch.load(tmp_path / "whole.pt")
    for rank in range(4):
        state = torch.load(tmp_path / "written" / f"model_world_size_4_rank_{rank}.pt", weights_only=False)
        for name, tensor in state.items():
            assert [generate.placement_text(p) for p in tensor.placements] == placements[name], name
            part = generate.local_part(whole[name], (2, 2), divmod(rank, 2), placements[name])
            assert tensor.shape == whole[name].shape and generate.same(tensor._local_tensor, part), name


OPS = {"sum": torch.add, "avg": lambda a, b: (a + b) / 2, "max": torch.maximum, "min": torch.minimum}
# pairs of source and target; both have P at the same mesh dim
PARTIALS = [(["P", "R"], ["P", "S(0)"]), (["P", "S(1)"], ["P", "S(0)"]), (["R", "P"], ["S(1)", "P"]),
            (["P", "S(0)"], ["P", "R"])]


@pytest.mark.parametrize("python", RELEASES)
def test_partial_dtensors_reduce_to_the_truth(tmp_path, python):
    options = written_for(python)
    cases = {f"{op}.{n}": ([p.replace("P", f"P({op})") for p in source], [p.replace("P", f"P({op})") for p in target])
             for op in OPS for n, (source, target) in enumerate(PARTIALS)}
    partial_values = {name: [redistribute.partial_value(name, (7, 5), torch.float32, at) for at in range(2)] for name in cases}
    torch.save(partial_values, tmp_path / "partial_values.pt")
    torch.save({name: OPS[name.split(".")[0]](*parts) for name, parts in partial_values.items()}, tmp_path / "whole.pt")
    (tmp_path / "source").mkdir()
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            names, sizes = zip(*MESH)
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
            state = {name: partial(partial_values[name], mesh, source) for name, (source, _) in cases.items()}
            torch.save(state, tmp_path / "source" / f"model_world_size_4_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    rules = [f"--placements={name}={','.join(target)}" for name, (_, target) in cases.items()]
    common.dtshard("reshard", tmp_path / "source", tmp_path / "written", *rules, *options)
    outcomes = load(python, tmp_path, {name: target for name, (_, target) in cases.items()}, partial_values=str(tmp_path / "partial_values.pt"))
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome != ["the truth"]}
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} tensors reduced; not", wrong)
    # Gloo does not support this reduction.
    assert all(name.startswith("avg.") and outcome[0].startswith("refused") for name, outcome in wrong.items()), wrong


def partial(partial_values, mesh, placements):
    """Returns this rank's DTensor: its shard of the partial value at its coordinate."""
    coordinate = mesh.get_coordinate()
    at = coordinate[next(i for i, p in enumerate(placements) if p.startswith("P"))]
    local = generate.local_part(partial_values[at], tuple(mesh.shape), coordinate, placements)
    return DTensor.from_local(local, mesh, [generate.placement_object(p) for p in placements], run_check=False,
                              shape=partial_values[at].shape, stride=partial_values[at].stride())
