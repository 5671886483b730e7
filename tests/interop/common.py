"""Shared code of the interop tests: the binary, the fixtures with their ground truth, comparison, and processes."""

import functools
import glob
import itertools
import os
import re
import subprocess

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import generate

FIXTURES = os.path.dirname(os.path.abspath(generate.__file__))
REPOSITORY = os.path.dirname(os.path.dirname(FIXTURES))

# target layouts: mesh, placements for every tensor
TARGETS = {
    "s0x4": ([("fsdp", 4)], ["S(0)"]),
    "s0x3": ([("fsdp", 3)], ["S(0)"]),
    "s0s1": ([("dp", 2), ("tp", 2)], ["S(0)", "S(1)"]),
    "rs0": ([("rep", 2), ("fsdp", 3)], ["R", "S(0)"]),
    "strided": ([("dp", 2), ("tp", 2)], ["_S(0,2)", "S(0)"]),
}

# cases with rank files of one series; their names do not begin with "model."
ONE_SERIES = {"odd4", "outside4"}


def cases(source):
    """Returns the names of fixtures that have a ground truth and a `dcp` or `ranks` folder that reshard accepts."""
    found = [os.path.basename(os.path.dirname(p)) for p in glob.glob(f"{FIXTURES}/*/{source}")]
    return sorted(set(found) - {"partial2", "foreign_objects"})


SOURCES = [(case, source) for source in ("dcp", "ranks") for case in cases(source)]


def whole(size):
    """Returns the chunks of an unsharded tensor: one, or none for a tensor without elements."""
    return set() if 0 in size else {((0,) * len(size), tuple(size))}


def source(case, kind):
    return os.path.join(FIXTURES, case, kind)


@functools.cache
def binary():
    candidates = [os.environ.get("DTSHARD")]
    candidates += [os.path.join(REPOSITORY, "target", kind, "dtshard") for kind in ("release", "debug")]
    for path in filter(None, candidates):
        if os.access(path, os.X_OK):
            return os.path.abspath(path)
    raise FileNotFoundError("no dtshard: set DTSHARD, or run `cargo build --release`")


def run(*arguments):
    return subprocess.run([binary(), *map(str, arguments)], capture_output=True, text=True, timeout=120)


def dtshard(*arguments):
    done = run(*arguments)
    assert done.returncode == 0, f"dtshard {' '.join(map(str, arguments))}\n{done.stderr[:4000]}"
    return done


# ---------------------------------------------------------------------------------------------------
# expected content of a checkpoint

@functools.cache
def truth(case, stem="truth"):
    """Returns (the JSON, whole tensors by name); tests never modify the tensors."""
    return generate.read_truth(os.path.join(FIXTURES, case), stem)


def trainer_truth(case):
    """Returns the ground truth of a trainer's folder, which is beside it."""
    return truth(".", f"{case}.truth")


def plain_tree(tree, whole, name=""):
    """Returns the tree with each DTensor and ShardedTensor replaced by whole(its dotted path)."""
    if isinstance(tree, torch.Tensor):
        tensor = whole(name)
        if not isinstance(tree, DTensor) and type(tree).__name__ != "ShardedTensor":
            assert generate.same(tree, tensor), name
        return tensor
    join = lambda k: f"{name}.{k}" if name else str(k)
    if isinstance(tree, dict):
        made = type(tree)()
        made.update((k, plain_tree(v, whole, join(k))) for k, v in tree.items())
        if hasattr(tree, "_metadata"):
            made._metadata = tree._metadata
        return made
    if isinstance(tree, (list, tuple)):
        return type(tree)(plain_tree(v, whole, join(i)) for i, v in enumerate(tree))
    return tree


@functools.cache
def ranks_tree(case):
    """Returns series -> whole state dict, the model first. The structure is that of rank 0's files; the tensors come from the
    ground truth."""
    info, tensors = truth(case)
    series = {}
    paths = glob.glob(f"{FIXTURES}/{case}/ranks/*_rank_0.pt")
    for path in sorted(paths, key=lambda p: (not os.path.basename(p).startswith("model_"), p)):
        kind, ranks = re.fullmatch(r"(.*)_world_size_(\d+)_rank_0\.pt", os.path.basename(path)).groups()

        def whole(name):
            if kind == "optim" and "optim_params" in info:
                _, i, key = name.split(".")
                return tensors[f"optim.state.{info['optim_params'][int(i)]}.{key}"]
            return tensors[f"{kind}.{name}"]

        dist.init_process_group("fake", rank=0, world_size=int(ranks), store=FakeStore())
        try:
            series[kind] = plain_tree(torch.load(path, weights_only=False), whole)
        finally:
            dist.destroy_process_group()
    return series


@functools.cache
def expected_by_key(case, kind):
    """Returns DCP key -> whole tensor or object."""
    if kind == "dcp":
        info, tensors = truth(case)
        items = {k: v for k, v in tensors.items() if k not in info.get("not_in_dcp", ())}
        items.update({k: decode(v) for k, v in info["objects"].items()})
        return items
    return dict(generate.dcp_items(tree_in_dcp(case)))


def tree_in_dcp(case):
    """Returns the state dict of all rank files as a job saves it in a DCP directory: optimizers have parameter names, as
    get_optimizer_state_dict gives them."""
    tree = ranks_tree(case)
    if case in ONE_SERIES:
        return tree["model"]
    names = truth(case)[0].get("optim_params", ())
    return {**tree, "optim": named(tree["optim"], names)} if "optim" in tree else tree


def named(optimizer, names):
    """Returns an optimizer's state dict with parameter names instead of numbers."""
    def name(key):
        return names[key] if isinstance(key, int) else key
    groups = [{**group, "params": [name(key) for key in group["params"]]} for group in optimizer["param_groups"]]
    return {**optimizer, "state": {name(key): value for key, value in optimizer["state"].items()}, "param_groups": groups}


def decode(value):
    """Returns the objects of DCP fixtures from the JSON of the ground truth."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if isinstance(value, dict):
        if set(value) == {"$tuple"}:
            return tuple(map(decode, value["$tuple"]))
        if set(value) == {"$bytes"}:
            return bytes.fromhex(value["$bytes"])
        assert not any(k.startswith("$") for k in value), value
        return {k: decode(v) for k, v in value.items()}
    return value


def dcp_keys(folder):
    return dcp.FileSystemReader(folder).read_metadata().state_dict_metadata


def load_nested(folder):
    """Returns the nested state dict of a DCP folder, converted to a torch.save file by PyTorch."""
    path = f"{folder}.as_torch.pt"
    if not os.path.exists(path):
        dcp_to_torch_save(folder, path)
    return torch.load(path, weights_only=False)


@functools.cache
def expected_tree(case, kind, scratch):
    """Returns the result of dcp_to_torch_save for the DCP folder of the case, or for a folder that PyTorch saves from the tree
    of the rank files."""
    _, tensors = truth(case)
    if kind == "dcp":
        path = f"{scratch}/{case}.pt"
        dcp_to_torch_save(source(case, "dcp"), path)
        tree = torch.load(path, weights_only=False)
        for name, tensor in generate.leaves(tree):
            assert generate.same(tensor, tensors[name]), name
        return tree
    folder = f"{scratch}/{case}-ranks"
    dcp.save(tree_in_dcp(case), checkpoint_id=folder, no_dist=True)
    return load_nested(folder)


# ---------------------------------------------------------------------------------------------------
# comparison

def assert_equal(found, expected, name="", order=True):
    """Asserts equal bits and equal types, in all containers."""
    assert type(found) is type(expected), f"{name}: {type(found)} for {type(expected)}"
    if isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, (
            f"{name}: {found.dtype} {tuple(found.shape)} for {expected.dtype} {tuple(expected.shape)}")
        assert found.requires_grad == expected.requires_grad, name
        assert generate.same(found, expected), f"{name}: other values"
    elif isinstance(found, dict):
        keys, wanted = list(found), list(expected)
        assert set(keys) == set(wanted), f"{name}: {set(keys) ^ set(wanted)}"
        assert [type(k) for k in sorted(keys, key=repr)] == [type(k) for k in sorted(wanted, key=repr)], name
        assert not order or keys == wanted, f"{name}: keys in other order: {keys} for {wanted}"
        for key in keys:
            assert_equal(found[key], expected[key], f"{name}.{key}", order)
        assert getattr(found, "_metadata", None) == getattr(expected, "_metadata", None), f"{name}._metadata"
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected), name
        for i, (a, b) in enumerate(zip(found, expected)):
            assert_equal(a, b, f"{name}.{i}", order)
    else:
        assert generate.encode(found) == generate.encode(expected), f"{name}: {found!r} for {expected!r}"
        if isinstance(found, float):
            assert str(found) == str(expected), name  # -0.0


# ---------------------------------------------------------------------------------------------------
# layout

def rectangles(shape, target):
    """Computes the chunks of a tensor in a target layout from the definition of the placements: {(offsets, sizes)}, without
    empty chunks."""
    mesh, placements = TARGETS[target]
    sizes = [s for _, s in mesh]
    fits = lambda p: p == "R" or int(re.search(r"\d+", p)[0]) < len(shape)
    placements = [p if fits(p) else "R" for p in placements]
    found = set()
    for coord in itertools.product(*map(range, sizes)):
        held = generate.index_lists(shape, sizes, coord, placements)
        if all(held):
            for indices in held:
                assert indices == list(range(indices[0], indices[0] + len(indices)))
            found.add((tuple(i[0] for i in held), tuple(map(len, held))))
    return found


# ---------------------------------------------------------------------------------------------------
# processes

def _rank_main(rank, function, world, rendezvous, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    try:
        function(*arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(function, world, tmp_path, *arguments):
    """Runs a function, which must be at the top of a module, in `world` processes with a gloo group."""
    import torch.multiprocessing as mp

    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["ranks"])
    mp.start_processes(_rank_main, (function, world, str(tmp_path / "rendezvous"), arguments), nprocs=world,
                       start_method="forkserver")
