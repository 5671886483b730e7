"""Functions that run in the process of each rank."""

import itertools
import json
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from safetensors.torch import load_file

import common
import generate
import rank_files

# modules of the fixtures by case: sizes of generate.SmallModel
MODELS = {
    "fsdp3": {"blocks": 2}, "fsdp4": {"blocks": 2}, "hsdp": {}, "fsdp1_sharded": {},
    "fsdp_tp": {"vocab": 10, "dim": 5, "q": 7, "k": 3, "hidden": 9},
    "fsdp_tp6": {"vocab": 11, "dim": 7, "q": 8, "k": 4, "hidden": 10},
    "tp2": {"dim": 5, "q": 7, "k": 3}, "llama_tiny": None,
}


def local_truth(tensor, like):
    """Returns the part of a whole tensor that this rank's DTensor should hold."""
    placements = [generate.placement_text(p) for p in like.placements]
    return generate.local_part(tensor, like.device_mesh.shape, like.device_mesh.get_coordinate(), placements)


def check(found, whole, name):
    if isinstance(found, DTensor):
        assert found.shape == whole.shape, name
        found, whole = found.to_local(), local_truth(whole, found)
    assert generate.same(found.detach(), whole), f"{name}: other values on rank {dist.get_rank()}"


def load_hf_shards(expected, folders):
    """Loads DTensors from DCP's Hugging Face storage, like `load_dtensors`."""
    load_dtensors(expected, folders, HuggingFaceStorageReader)


def load_dtensors(expected, folders, reader=dcp.FileSystemReader):
    """Loads every tensor into a DTensor, once sharded on the last dim and once on the first; objects are loaded unchanged."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("other",))
    world = dist.get_world_size()
    expected = torch.load(expected, weights_only=False)
    for folder, last in itertools.product(folders, (True, False)):
        entries = reader(folder).read_metadata().state_dict_metadata
        assert set(entries) == set(expected)
        state = {}
        for name, entry in entries.items():
            if not hasattr(entry, "size"):
                state[name] = None
                continue
            dim = len(entry.size) - 1 if last else 0
            placement = generate.placement_object(f"S({dim})" if entry.size else "R")
            size = list(entry.size)
            if size:
                size[dim] = len(generate.cut(range(size[dim]), world, dist.get_rank()))
            local = torch.zeros(size, dtype=entry.properties.dtype)
            state[name] = DTensor.from_local(local, mesh, [placement], run_check=False, shape=entry.size,
                                             stride=torch.empty(entry.size, device="meta").stride())
        dcp.load(state, storage_reader=reader(folder))
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                check(state[name], value, name)
            else:
                common.assert_equal(state[name], value, name)


def load_training(case, kind, folders):
    """Resumes a model under FSDP2 with its optimizer, as a trainer does."""
    for folder in folders:
        resume(case, kind, folder)


def resume(case, kind, folder):
    _, tensors = common.truth(case)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    if case == "llama_tiny":
        module = generate.Llama(generate.LLAMA_CONFIG).to(torch.bfloat16)
        blocks = module.model["layers"]
        make = lambda: torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    else:
        module = generate.SmallModel(**MODELS[case])
        blocks = module.blocks
        make = lambda: torch.optim.AdamW(module.parameters(), lr=0.5)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = make()
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()

    state = {"model": get_model_state_dict(module)}
    if kind == "dcp" or case != "llama_tiny":
        state["optim"] = get_optimizer_state_dict(module, optimizer)
    if kind == "ranks":
        state["extra_state"] = {"lr_scheduler": {"base_lrs": None, "last_epoch": None, "_step_count": None}, "step": None}
    elif case != "llama_tiny":
        state["step"] = None
    dcp.load(state, checkpoint_id=folder)
    if kind == "ranks":
        assert state["extra_state"] == generate.EXTRA_STATE
    elif case != "llama_tiny":
        assert state["step"] == 1000

    set_model_state_dict(module, state["model"])
    for name, found in module.state_dict().items():
        check(found, tensors[f"model.{name}"], name)
    if "optim" not in state:
        return
    set_optimizer_state_dict(module, optimizer, optim_state_dict=state["optim"])
    count = 0
    for name, p in module.named_parameters():
        for key, found in optimizer.state[p].items():
            check(found, tensors[f"optim.state.{name}.{key}"], f"{name} {key}")
            count += 1
    assert count == sum(name.startswith("optim.state.") for name in tensors)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0.1)
    optimizer.step()  # the next step


# ---------------------------------------------------------------------------------------------------
# files in the form of verl

def resume_verl(folder, sources):
    """Loads this rank's three files like verl's FSDPCheckpointManager.load_checkpoint, and takes one step.

    `sources` is the number of ranks of the original: the random state may be that of any of them.
    """
    info, tensors = common.trainer_truth("verl")
    world, rank = dist.get_world_size(), dist.get_rank()
    state = {kind: torch.load(f"{folder}/{kind}_world_size_{world}_rank_{rank}.pt", weights_only=False)
             for kind in ("model", "optim", "extra_state")}
    for name, t in generate.leaves({k: state[k] for k in ("model", "optim")}):
        if name.endswith(".step"):
            assert type(t) is torch.Tensor, name
            continue
        assert type(t) is DTensor and t.device_mesh.mesh_dim_names == ("fsdp",), name
        assert t.device_mesh.mesh.tolist() == list(range(world)), name
        assert [generate.placement_text(p) for p in t.placements] == ["S(0)"], name

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    module = generate.llama(generate.Truth(), layers=2)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    generate.shard_llama(module, mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, generate.warm_up)

    module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    scheduler.load_state_dict(state["extra_state"]["lr_scheduler"])
    assert set(state["model"]) == set(module.state_dict())
    for name, t in module.state_dict().items():
        check(t, tensors[f"model.{name}"], name)
        assert generate.same(t.full_tensor(), tensors[f"model.{name}"]), name
    names = [name for name, _ in module.named_parameters()]
    assert names == info["optim_params"]
    for name, p in module.named_parameters():
        assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
        for key, t in optimizer.state[p].items():
            check(t, tensors[f"optim.state.{name}.{key}"], f"{name} {key}")
    groups = common.decode(info["ranks_objects"]["optim"]["param_groups"])
    common.assert_equal(state["optim"]["param_groups"], groups)
    common.assert_equal(state["extra_state"]["lr_scheduler"],
                        common.decode(info["ranks_objects"]["extra_state"]["lr_scheduler"]))
    if "rng" in state["extra_state"]:  # verl accepts a missing key, but not a part of the state
        assert any(generate.same_rng(state["extra_state"]["rng"], generate.rng_state(r)) for r in range(sources))

    # one step, compared with a step on whole tensors in one process
    whole = [torch.nn.Parameter(tensors[f"model.{n}"].clone()) for n in names]
    reference = torch.optim.AdamW(whole)
    state_of = lambda n: {k: tensors[f"optim.state.{n}.{k}"].clone() for k in ("step", "exp_avg", "exp_avg_sq")}
    reference.load_state_dict({"state": {i: state_of(n) for i, n in enumerate(names)}, "param_groups": groups})
    for name, p, w in zip(names, module.parameters(), whole):
        w.grad = generate.weights(f"grad.{name}", tuple(w.shape))
        p.grad = DTensor.from_local(local_truth(w.grad, p), mesh, p.placements, run_check=False,
                                    shape=p.shape, stride=p.stride())
    optimizer.step()
    reference.step()
    for name, p, w in zip(names, module.parameters(), whole):
        check(p, w.detach(), f"{name} after a step")
        assert not generate.same(w.detach(), tensors[f"model.{name}"]), name


# ---------------------------------------------------------------------------------------------------
# PyTorch's Hugging Face storage: one file per rank, which are merged later

HF_SHAPES = {"w": ((7, 3), "f32"), "odd": ((5,), "bf16"), "ids": ((9,), "i64"), "flags": ((4, 2), "u8"),
             "scale": ((), "f32"), "count": ((), "i64"), "alone": ((2, 2), "f32")}


def save_hf(folder):
    """Saves tensors sharded by rows over all ranks; 0-d tensors and `alone` are plain."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    state = {}
    for name, (shape, dtype) in HF_SHAPES.items():
        full = generate.values(name, shape, dtype)
        if not shape or name == "alone":
            state[name] = full
            continue
        placement = [generate.placement_object("S(0)")]
        part = generate.local_part(full, mesh.shape, mesh.get_coordinate(), ["S(0)"])
        state[name] = DTensor.from_local(part, mesh, placement, run_check=False, shape=full.shape, stride=full.stride())
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))


def load_local_files(folder, case):
    """Loads the rank's file of the `local` format as DTensors, with safetensors and json only."""
    with open(f"{folder}/layout.json") as f:
        layout = json.load(f)
    found = load_file(f"{folder}/rank-{dist.get_rank():05}.safetensors")
    names, sizes = zip(*layout["meshes"][0]["dims"])
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    info, tensors = common.truth(case)
    assert set(found) == set(layout["tensors"])
    for name, entry in layout["tensors"].items():
        kind, rest = name.split(".", 1)
        whole = tensors[rank_files.truth_name(kind, rest, info)]
        assert list(whole.shape) == entry["shape"], name
        if "placements" not in entry:
            assert generate.same(found[name], whole), name
            continue
        placements = [generate.placement_object(p) for p in re.findall(r"_?[A-Z](?:\([^)]*\))?", entry["placements"])]
        tensor = DTensor.from_local(found[name], mesh, placements, run_check=False, shape=whole.shape,
                                    stride=whole.stride())
        assert generate.same(tensor.full_tensor(), whole), f"{name} on rank {dist.get_rank()}"
