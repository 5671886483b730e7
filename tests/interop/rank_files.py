"""Loads the rank files that dtshard wrote in one gloo process per rank, with any PyTorch from 2.5 on.

`python rank_files.py JOB.json`: the job has the folder of the files, the fixture with the truth, the mesh and the placements.
This is a script, so that other PyTorch releases than that of the tests can run it.
"""

import glob
import json
import os
import re
import sys
import warnings

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "fixtures"))
warnings.simplefilter("ignore")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import generate

RELEASE = tuple(int(n) for n in re.match(r"(\d+)\.(\d+)", torch.__version__).groups())


def truth_name(kind, name, info):
    if kind == "optim" and "optim_params" in info and name.split(".")[1].isdigit():
        _, index, key = name.split(".")
        return f"optim.state.{info['optim_params'][int(index)]}.{key}"
    return f"{kind}.{name}"


def loads_with_weights_only(placements):
    """Returns whether weights_only can load these placements: DTensors need PyTorch 2.6, _StridedShard needs 2.11."""
    return RELEASE >= ((2, 11) if any(p.startswith("_S") for p in placements) else (2, 6))


def check(found, whole, mesh, placements, own, name, full):
    fits = lambda p: p == "R" or int(re.search(r"\d+", p)[0]) < whole.dim()
    placements = [p if fits(p) else "R" for p in placements]
    # A tensor on a slice of its mesh stays on the mesh dims `own`. Files before 2.10 cannot record a slice.
    names = mesh.mesh_dim_names
    outside = [p for n, p in zip(names, placements) if n not in own]
    if set(own) < set(names) and set(outside) == {"R"} and RELEASE >= (2, 10):
        placements = [p for n, p in zip(names, placements) if n in own]
        mesh = mesh[tuple(own)]
    assert type(found) is DTensor, name
    assert found.shape == whole.shape and found.dtype == whole.dtype and found.stride() == whole.stride(), name
    assert [generate.placement_text(p) for p in found.placements] == placements, name
    assert found.device_mesh == mesh and found.device_mesh.mesh_dim_names == mesh.mesh_dim_names, name
    assert hash(found.device_mesh) == hash(mesh), name
    assert found.device_mesh.mesh.tolist() == mesh.mesh.tolist(), name
    assert list(found.device_mesh.get_coordinate()) == list(mesh.get_coordinate()), name
    assert not found.requires_grad, name
    local = generate.local_part(whole, tuple(mesh.shape), mesh.get_coordinate(), placements)
    assert generate.same(found.to_local(), local), f"{name}: other values on rank {dist.get_rank()}"
    # A DTensor that PyTorch makes from the same shards has the same spec, so both can be combined.
    other = DTensor.from_local(local, mesh, [generate.placement_object(p) for p in placements], run_check=False,
                               shape=whole.shape, stride=whole.stride())
    assert found._spec == other._spec, f"{name}: {found._spec} is not {other._spec}"
    if full:
        assert generate.same(found.full_tensor(), whole), f"{name}: full_tensor() on rank {dist.get_rank()}"


def rank_main(rank, job):
    world = job["world"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{job['rendezvous']}", rank=rank, world_size=world)
    names, sizes = zip(*job["mesh"])
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))
    info, tensors = generate.read_truth(job["truth"])
    paths = sorted(glob.glob(f"{job['folder']}/*_world_size_{world}_rank_{rank}.pt"))
    assert paths, job["folder"]
    count = 0
    for path in paths:
        kind = re.fullmatch(r"(.*)_world_size_\d+_rank_\d+\.pt", os.path.basename(path))[1]
        for weights_only in (False, True)[:1 + loads_with_weights_only(job["placements"])]:
            tree = torch.load(path, weights_only=weights_only, map_location="cpu")
            meshes = set()
            for name, found in generate.leaves(tree):
                name = truth_name(kind, name, info)
                if name in info["layout"] or isinstance(found, DTensor):
                    # A parameter that is plain in the source has no noted layout; dtshard shards it like the others.
                    dims = info["layout"].get(name, {"mesh": ()})["mesh"]
                    is_slice = 0 < len(dims) < max(len(layout["mesh"]) for layout in info["layout"].values())
                    own = [n for n, _ in dims] if is_slice else mesh.mesh_dim_names
                    check(found, tensors[name], mesh, job["placements"], own, name, job["full"])
                    meshes.add(id(found.device_mesh))
                else:
                    assert type(found) is torch.Tensor and generate.same(found, tensors[name]), name
                count += 1
            assert len(meshes) <= 2, "DTensors of a file share their mesh, and that its slice"
            if "objects" in job:
                assert generate.encode(plain(tree)) == job["objects"][kind], kind
    assert count, "no tensors"
    dist.barrier()
    dist.destroy_process_group()


def plain(tree):
    """Returns the tree with None for each tensor."""
    if isinstance(tree, torch.Tensor):
        return None
    if isinstance(tree, dict):
        return type(tree)((k, plain(v)) for k, v in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(plain(v) for v in tree)
    return tree


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(sys.argv[1]) as f:
        job = json.load(f)
    mp.start_processes(rank_main, (job,), nprocs=job["world"], start_method="fork")
