"""Functions that run in the process of each rank with FSDP1: load rank files, compare, train one step, save again."""

import contextlib
import copy
import itertools
import os

import torch
import torch.distributed as dist
from torch.distributed._shard.api import load_with_process_group
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import common
import generate
import generate_fsdp1 as flat

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


# ---------------------------------------------------------------------------------------------------
# rank files

def load_rank(folder, ranks, rank, series=("model", "optim")):
    """Returns {series: tree} for the series that exist, in a file each or in one file. Needs a group of this size."""
    one = f"{folder}/checkpoint_world_size_{ranks}_rank_{rank}.pt"
    if os.path.exists(one):
        tree = torch.load(one, weights_only=False)
        return {name: tree[name] for name in series}
    paths = {name: f"{folder}/{name}_world_size_{ranks}_rank_{rank}.pt" for name in series}
    return {name: torch.load(path, weights_only=False) for name, path in paths.items() if os.path.exists(path)}


def load_all(folder, ranks, group_size=None):
    """Loads the files of every rank in one process."""
    trees = []
    for r in range(ranks):
        with flat.fake_rank(r, ranks, group_size or ranks):
            trees.append(load_rank(folder, ranks, r))
    return trees


def assert_same_files(found, expected, name="", order=True):
    """Asserts equal bits, including the offsets of shards and the padding in their storages."""
    if isinstance(found, dict) and isinstance(expected, dict):
        assert set(found) == set(expected), f"{name}: {set(found) ^ set(expected)}"
        assert not order or list(found) == list(expected), f"{name}: {list(found)} for {list(expected)}"
        for key in expected:
            assert_same_files(found[key], expected[key], f"{name}.{key}", order)
        if order:
            assert getattr(found, "_metadata", None) == getattr(expected, "_metadata", None), f"{name}._metadata"
    elif isinstance(expected, ShardedTensor):
        assert isinstance(found, ShardedTensor), name
        assert found.metadata() == expected.metadata(), f"{name}: {found.metadata()} for {expected.metadata()}"
        assert found.sharding_spec() == expected.sharding_spec(), name
        assert len(found.local_shards()) == len(expected.local_shards()), name
        for a, b in zip(found.local_shards(), expected.local_shards()):
            assert a.metadata == b.metadata and generate.same(a.tensor, b.tensor), name
            assert a.tensor.requires_grad == b.tensor.requires_grad, name
            assert generate.same(in_storage(a.tensor), in_storage(b.tensor)), f"{name}: beyond the shard"
    else:
        common.assert_equal(found, expected, name, order)


def in_storage(t):
    return torch.empty(0, dtype=t.dtype).set_(t.detach().untyped_storage())


def assert_views(model):
    """Asserts that parameters are views of their unit's flat parameter, so nothing is stored twice."""
    flats = [s.tensor for t in model.values() if isinstance(t, ShardedTensor) for s in t.local_shards()]
    at = {t.untyped_storage().data_ptr() for t in flats}
    for name, t in model.items():
        if not isinstance(t, ShardedTensor) and t.dim() == 1 and t.numel() and name.endswith(("weight", "bias")):
            assert t.untyped_storage().data_ptr() in at, f"{name} has a storage of its own"


# ---------------------------------------------------------------------------------------------------
# the model

def options(job):
    found = {"use_orig_params": job["views"]}
    if job.get("strategy") == "hybrid":
        found.update(flat.hybrid())
    elif job.get("strategy") == "none":
        found["sharding_strategy"] = ShardingStrategy.NO_SHARD
    found.update({key: job[key] for key in ("ignored", "root") if key in job})
    if job.get("mixed"):
        found["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return found


def blank(job):
    """Returns the model with values other than the ground truth, and its optimizer."""
    module = flat.FlatModel().to(DTYPES[job.get("dtype", "f32")])
    with torch.no_grad():
        for t in module.state_dict().values():
            t.fill_(7)
    if job.get("by_rows"):
        module.conv.to(memory_format=torch.contiguous_format)
    module = flat.wrapped(module, **options(job))
    return module, flat.adamw(module, job.get("groups", False))


def shard_group(module):
    handle = module._handle
    return handle.process_group if handle.uses_sharded_strategy else dist.group.WORLD


def parts(module, optimizer):
    """Yields what this rank holds of each parameter (key is None) and of its optimizer state: (fqn, key, tensor, a function
    that cuts this part from the whole tensor)."""
    names = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in module.named_parameters()}
    for unit, handle, held in flat.pieces(module):
        views, sharded = handle._use_orig_params, handle.uses_sharded_strategy
        for fqn, stride, position, start, numel in held:
            def part(whole, stride=stride, start=start, numel=numel):
                return flat.in_memory_order(whole, stride)[start:start + numel]

            def of_unit(t, position=position, numel=numel):
                return t.detach()[position:position + numel]

            yield fqn, None, of_unit(handle.flat_param), part
            for key, t in optimizer.state[names[fqn if views else f"{unit}._flat_param".lstrip(".")]].items():
                if key == "step":
                    yield fqn, key, t, lambda whole: whole
                elif not views:
                    yield fqn, key, of_unit(t), part
                else:
                    yield fqn, key, flat.in_memory_order(t, None if sharded else stride), part


def outside_parts(module, optimizer):
    """Yields the same as `parts`, for parameters outside all units."""
    for fqn, p in flat.outside(module):
        yield fqn, None, p.detach(), lambda whole: whole
        yield from ((fqn, key, t, lambda whole: whole) for key, t in optimizer.state[p].items())


def check_loaded(module, optimizer, tensors):
    """Asserts that every element and buffer equals the ground truth bit by bit."""
    for fqn, key, t, part in itertools.chain(parts(module, optimizer), outside_parts(module, optimizer)):
        name = f"optim.state.{fqn}.{key}" if key else f"model.{fqn}"
        assert generate.same(t, part(tensors[name])), f"{name}: other values on rank {dist.get_rank()}"
    for name, t in module.named_buffers():
        assert generate.same(t, tensors["model." + name.replace("_fsdp_wrapped_module.", "")]), name


def one_step(module, optimizer):
    loss = flat.loss_of(module)
    loss.backward()
    optimizer.step()
    return loss.detach()


def reference_step(job, tensors, groups):
    """Takes the step with the whole model in one process: (loss, {fqn: parameter}, {fqn: its optimizer state})."""
    module = flat.FlatModel().to(DTYPES[job.get("dtype", "f32")])
    with torch.no_grad():
        for name, t in module.state_dict().items():
            t.copy_(tensors[f"model.{name}"])
    named = dict(module.named_parameters())
    optimizer = flat.adamw(module, job.get("groups", False))
    for group, values in zip(optimizer.param_groups, groups):
        group.update({k: v for k, v in values.items() if k in ("lr", "weight_decay")})
    for fqn, p in named.items():
        optimizer.state[p] = {k: tensors[f"optim.state.{fqn}.{k}"].clone() for k in ("step", "exp_avg", "exp_avg_sq")}
    if job.get("mixed"):
        low = copy.deepcopy(module)
        for p in low.parameters():
            p.data = p.data.bfloat16()
        loss = flat.loss_of(low)
        loss.backward()
        for p, q in zip(named.values(), low.parameters()):
            p.grad = q.grad.float()
        optimizer.step()
    else:
        loss = one_step(module, optimizer)
    return loss.detach(), named, {fqn: optimizer.state[p] for fqn, p in named.items()}


# ---------------------------------------------------------------------------------------------------
# functions of the ranks

def resume(job):
    """Loads `folder` as a trainer does, compares values and saved files, and takes a step like the unsharded model."""
    torch.manual_seed(dist.get_rank())
    _, tensors = common.truth(job["truth"])
    module, optimizer = blank(job)
    with load_with_process_group(shard_group(module)):
        files = load_rank(job["folder"], dist.get_world_size(), dist.get_rank())
    untouched = copy.copy(files["model"])  # loading renames keys
    with FSDP.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        # With use_orig_params PyTorch requires `_flat_param`, and then ignores it.
        left = module.load_state_dict(copy.copy(files["model"]), strict=False)
        extra = [unit for unit, _ in flat.units(module)] if job["views"] and job.get("strategy") != "none" else []
        assert not left.missing_keys, left
        assert sorted(left.unexpected_keys) == sorted(f"{unit}._flat_param".lstrip(".") for unit in extra), left
    if "optim" in files:
        optimizer.load_state_dict(files["optim"])
    check_loaded(module, optimizer, tensors)

    again = {"model": flat.local(module), "optim": optimizer.state_dict()}
    again = {series: tree for series, tree in again.items() if series in files}
    assert_same_files({**files, "model": untouched}, again, order=job.get("order", True))
    if job["views"] and job.get("strategy") != "none":
        assert_views(untouched)
    if "again" in job:
        for series, tree in again.items():
            generate.save_rank_file(series, tree, job["again"])
    if "optim" not in files:
        return

    loss = one_step(module, optimizer)
    expected, whole, state = reference_step(job, tensors, files["optim"]["param_groups"])
    close = {"rtol": 1e-2, "atol": 1e-3} if job.get("dtype") == "bf16" else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(loss, expected, **close)
    moved = 0
    for fqn, key, t, part in parts(module, optimizer):
        if fqn == "conv.weight" and job["views"] and job.get("strategy") == "none":
            continue  # with NO_SHARD, PyTorch reads this gradient row by row although it is channels_last
        wanted = state[fqn][key] if key else whole[fqn].detach()
        torch.testing.assert_close(t, part(wanted), **close, msg=lambda m: f"{fqn} {key} after a step: {m}")
        moved += not key and not torch.equal(t, part(tensors[f"model.{fqn}"]))
    assert moved, "a step changes parameters"


def load_outside(job):
    """Loads `folder` into a model with parameters outside all units, compares values, saves again, and takes a step."""
    _, tensors = common.truth(job["truth"])
    module, optimizer = blank(job)
    files = load_rank(job["folder"], dist.get_world_size(), dist.get_rank())
    untouched = copy.copy(files["model"])
    with FSDP.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        left = module.load_state_dict(copy.copy(files["model"]), strict=False)
        assert not left.missing_keys, left
    optimizer.load_state_dict(files["optim"])
    check_loaded(module, optimizer, tensors)
    assert_same_files({**files, "model": untouched}, {"model": flat.local(module), "optim": optimizer.state_dict()},
                      order=False)
    one_step(module, optimizer)


def resume_sharded(job):
    """Loads model and FSDP.optim_state_dict from this rank's files of ShardedTensors (SHARDED_STATE_DICT)."""
    _, tensors = common.truth(job["truth"])
    if job["truth"] == "fsdp1_sharded":
        module = FSDP(generate.SmallModel(), auto_wrap_policy=ModuleWrapPolicy({generate.Block}), use_orig_params=True,
                      device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW(module.parameters())
    else:
        module, optimizer = blank(job)
    files = load_rank(job["folder"], dist.get_world_size(), dist.get_rank())
    for t in (t for tree in files.values() for _, t in generate.leaves(tree)):
        assert isinstance(t, ShardedTensor) or t.dim() == 0 or type(t) is torch.Tensor
    with FSDP.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
        again = module.state_dict()
        assert [(n, type(t)) for n, t in again.items()] == [(n, type(t)) for n, t in files["model"].items()]
        for name, t in again.items():
            if isinstance(t, ShardedTensor):
                assert t.metadata() == files["model"][name].metadata(), name
        module.load_state_dict(files["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(module, optimizer, files["optim"]))
    check_loaded(module, optimizer, tensors)
