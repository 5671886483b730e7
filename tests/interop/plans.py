"""Applies the tensor-parallel plans of all model families to a mesh, in one gloo process per rank.

`python plans.py save FOLDER MESH` writes for each family FOLDER/FAMILY/model.pt, the whole state dict, and FOLDER/FAMILY/torch,
the rank files of the model after parallelize_module and fully_shard. `python plans.py compare FOLDER MESH`: each rank compares
its file in FOLDER/FAMILY/written, by dtshard, with the one in FOLDER/FAMILY/torch. It writes the differences to
FOLDER/FAMILY/differences/RANK.json, and goes on with the next family.
"""

import glob
import json
import os
import sys
import tempfile
import warnings

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "fixtures"))
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.simplefilter("ignore")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor

import generate
import generate_plans


# DDP over tensor parallelism, which the fixtures do not have. Two families are enough: DDP treats all of them alike.
DDP_MESHES = ("ddp=2,tp=2", "tp=2,ddp=2")


def is_sharded(mesh):
    """Returns whether fully_shard follows parallelize_module."""
    return "dp" in dict(generate_plans.dims(mesh))


def families(mesh):
    """Returns the families with a built-in plan of dtshard."""
    if mesh in DDP_MESHES:
        return ["llama", "gpt2"]
    return [family for family in generate_plans.FAMILIES
            if family != "styles" and (mesh, is_sharded(mesh)) in generate_plans.placings(family)]


def rank_file(folder):
    return f"{folder}/model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"


# ---------------------------------------------------------------------------------------------------
# the result of PyTorch

def save(folder, mesh):
    for family in families(mesh):
        os.makedirs(f"{folder}/{family}/torch", exist_ok=True)
        if dist.get_rank() == 0:
            torch.save(generate_plans.build(family).state_dict(), f"{folder}/{family}/model.pt")
        torch.save(generate_plans.place(family, mesh, is_sharded(mesh)).state_dict(), rank_file(f"{folder}/{family}/torch"))


# ---------------------------------------------------------------------------------------------------
# the files of dtshard

def look(t):
    """Returns a description of a tensor without its elements."""
    seen = {"class": type(t).__name__, "dtype": t.dtype, "shape": tuple(t.shape), "stride": t.stride(),
            "requires_grad": t.requires_grad}
    if isinstance(t, DTensor):
        mesh = t.device_mesh
        seen |= {"placements": [generate.placement_text(p) for p in t.placements], "mesh dims": mesh.mesh_dim_names,
                 "mesh": mesh.mesh.tolist(), "coordinate": list(mesh.get_coordinate() or ())}
    return {key: str(value) for key, value in seen.items()}


def differences(found, expected):
    """Returns one line per difference. The shapes of local tensors without elements may differ: under FSDP, such a tensor has
    neither rows nor columns."""
    if list(found) != list(expected):
        yield f"names: {list(found)}, PyTorch has {list(expected)}"
    for name in (name for name in expected if name in found):
        here, there = look(found[name]), look(expected[name])
        for key in there:
            if here.get(key) != there[key]:
                yield f"{name}: {key} is {here.get(key)}, PyTorch has {there[key]}"
        here, there = (t.to_local() if isinstance(t, DTensor) else t for t in (found[name], expected[name]))
        if here.numel() + there.numel() and not generate.same(here, there):
            show = lambda local: f"{tuple(local.shape)} {local.flatten().tolist()}"
            yield f"{name}: local {show(here)}, PyTorch has {show(there)}"


def compare(folder, mesh):
    for family in families(mesh):
        if not glob.glob(f"{folder}/{family}/written/*.pt"):
            continue
        os.makedirs(f"{folder}/{family}/differences", exist_ok=True)
        try:
            both = [torch.load(rank_file(f"{folder}/{family}/{of}"), weights_only=False) for of in ("written", "torch")]
            lines = list(differences(*both))
        except Exception as e:
            lines = [f"{type(e).__name__}: {e}"]
        with open(f"{folder}/{family}/differences/{dist.get_rank()}.json", "w") as f:
            json.dump(lines, f)


def rank_main(rank, function, folder, mesh, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=generate_plans.ranks_of(mesh))
    function(folder, mesh)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _, verb, folder, mesh = sys.argv
    with tempfile.TemporaryDirectory() as tmp:
        arguments = ({"save": save, "compare": compare}[verb], folder, mesh, os.path.join(tmp, "rendezvous"))
        mp.start_processes(rank_main, arguments, nprocs=generate_plans.ranks_of(mesh), start_method="fork")
