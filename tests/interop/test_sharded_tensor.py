"""FSDP1 loads ShardedTensors that dtshard wrote for other numbers of ranks and for hybrid sharding; each process loads the file
of its rank."""

import contextlib
import glob
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import load_with_process_group
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP, ShardedOptimStateDictConfig, ShardedStateDictConfig, ShardingStrategy,
    StateDictType)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import common
import generate

SHARDED = (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


def same_objects(found, expected, name):
    """Asserts that two ShardedTensors have the same metadata and data."""
    assert type(found) is type(expected), name
    if isinstance(found, ShardedTensor):
        shards, metadata, *rest = found.__getstate__()
        wanted_shards, wanted_metadata, *wanted_rest = expected.__getstate__()
        assert (metadata, rest) == (wanted_metadata, wanted_rest), name
        assert [s.metadata.shard_offsets for s in shards] == [s.metadata.shard_offsets for s in wanted_shards], name
        for shard, wanted in zip(shards, wanted_shards):
            assert shard.metadata.shard_sizes == wanted.metadata.shard_sizes, name
            assert generate.same(shard.tensor, wanted.tensor), name
    elif isinstance(found, torch.Tensor):
        assert generate.same(found, expected), name
    elif isinstance(found, dict):
        assert found.keys() == expected.keys(), name
        for key in found:
            same_objects(found[key], expected[key], f"{name}.{key}")
    else:
        assert found == expected, name


def check_rows(found, tensors, name):
    """Compares every tensor, or its shards of rows, with the whole tensors of the ground truth."""
    if isinstance(found, dict):
        for key, value in found.items():
            check_rows(value, tensors, f"{name}{key}" if name.endswith(".") else f"{name}.{key}")
    elif isinstance(found, ShardedTensor):
        for shard in found.local_shards():
            assert shard.metadata in found.metadata().shards_metadata and shard.tensor.is_contiguous(), name
            (first, *_), (rows, *_) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            assert generate.same(shard.tensor, tensors[name][first:first + rows]), name
    else:
        assert generate.same(found, tensors[name]), name


def under_fsdp1(module, replicas):
    """Returns the module under FSDP1, and the group of ranks over which it is sharded."""
    world, rank = dist.get_world_size(), dist.get_rank()
    policy, inner = ModuleWrapPolicy({generate.Block}), world // replicas
    options = {"auto_wrap_policy": policy, "use_orig_params": True, "device_id": torch.device("cpu")}
    if replicas == 1:
        return FSDP(module, **options), dist.group.WORLD
    rows = [dist.new_group(range(i * inner, (i + 1) * inner)) for i in range(replicas)]
    columns = [dist.new_group(range(i, world, inner)) for i in range(inner)]
    groups = rows[rank // inner], columns[rank % inner]
    strategy = ShardingStrategy.HYBRID_SHARD
    return FSDP(module, process_group=groups, sharding_strategy=strategy, **options), groups[0]


def resume(folder, replicas):
    warnings.simplefilter("ignore")
    world, rank = dist.get_world_size(), dist.get_rank()
    _, tensors = common.truth("fsdp1_sharded")
    module, group = under_fsdp1(generate.SmallModel(), replicas)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()

    def load(series):
        with load_with_process_group(group) if replicas > 1 else contextlib.nullcontext():
            return torch.load(f"{folder}/{series}_world_size_{world}_rank_{rank}.pt", weights_only=False)

    # If the source was a DCP directory, one series has model and optimizer.
    model = load("model")
    model, optim = (model["model"], model["optim"]) if "optim" in model else (model, load("optim"))
    if world > 1:
        assert isinstance(model["embed.weight"], ShardedTensor) and type(model["freqs"]) is torch.Tensor
    with FSDP.state_dict_type(module, *SHARDED):
        module.load_state_dict(dict(model))
        flat = FSDP.optim_state_dict_to_load(module, optimizer, dict(optim))
    optimizer.load_state_dict(flat)
    with FSDP.state_dict_type(module, *SHARDED):
        same_objects(dict(module.state_dict()), dict(model), "model")
        again = FSDP.optim_state_dict(module, optimizer)
        for name, state in again["state"].items():
            same_objects(state, optim["state"][name], name)
    check_rows(model, tensors, "model.")
    check_rows(optim["state"], tensors, "optim.state.")


@pytest.mark.parametrize("world, replicas", [(1, 1), (2, 1), (3, 1), (6, 1), (4, 2)])
def test_fsdp1_resumes_from_sharded_tensors(tmp_path, world, replicas):
    layout = ["--mesh", f"fsdp={world}"]
    if replicas > 1:
        layout = ["--mesh", f"rep={replicas},fsdp={world // replicas}", "--placements", "R,S(0)"]
    common.dtshard("reshard", common.source("fsdp1_sharded", "ranks"), tmp_path / "out", *layout)
    common.run_ranks(resume, world, tmp_path, str(tmp_path / "out"), replicas)


def test_fsdp1_resumes_from_a_dcp_directory(tmp_path):
    common.dtshard("reshard", common.source("fsdp1_sharded", "dcp"), tmp_path / "out", "--mesh", "fsdp=3",
                   "--to", "torch-ranks", "--tensor-class", "sharded-tensor")
    common.run_ranks(resume, 3, tmp_path, str(tmp_path / "out"), 1)


def compare_files(ours, original):
    world, rank = dist.get_world_size(), dist.get_rank()
    for series in ("model", "optim", "extra_state"):
        name = f"{series}_world_size_{world}_rank_{rank}.pt"
        found, expected = (torch.load(os.path.join(f, name), weights_only=False) for f in (ours, original))
        same_objects(found, expected, name)


def test_sharded_tensors_resharded_and_back_equal_pytorch(tmp_path):
    original = common.source("fsdp1_sharded", "ranks")
    common.dtshard("reshard", original, tmp_path / "six", "--mesh", "fsdp=6")
    common.dtshard("reshard", tmp_path / "six", tmp_path / "four", "--mesh", "fsdp=4")
    assert len(glob.glob(f"{tmp_path}/four/*")) == len(os.listdir(original))
    common.run_ranks(compare_files, 4, tmp_path, str(tmp_path / "four"), original)
