"""Functions that run in the process of each rank for test_redistribute.py, and the expected result by definition.

Elements are small integers, so sums are exact in every order, and results are equal bit for bit.
"""

import itertools
import math
import zlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import generate

PLACES = ["R", "S(0)", "S(1)", "_S(0,2)", "P(sum)", "P(max)"]
NAMES = ("dp", "tp")
OTHER = "not as in PyTorch"
# Shapes and dtypes, used in turn.
KINDS = [((7, 5), torch.float32), ((5, 4), torch.float32), ((3, 2), torch.float32), ((1, 4), torch.float32),
         ((7, 5), torch.bfloat16), ((5, 4), torch.int64)]


def op_of(place):
    return place[2:-1] if place.startswith("P") else None


def refused(source, target):
    """Returns whether the redistribution is undefined on the same mesh."""
    mixed = lambda places: len({op_of(p) for p in places} - {None}) > 1
    differ = lambda a, b: None not in (op_of(a), op_of(b)) and a != b
    return mixed(source) or mixed(target) or any(map(differ, source, target))


def cases(ndim, kinds):
    """Returns (name, shape, dtype, source, target). Names of tensors with one target list begin with the same part."""
    lists = list(itertools.product(PLACES, repeat=ndim))
    pairs = [(s, t) for t in lists for s in lists if not refused(s, t)]
    numbers = itertools.count()
    return [(f"to{lists.index(t)}.t{n}", *KINDS[n % len(KINDS)], s, t)
            for s, t in pairs for _, n in zip(range(kinds), numbers)]


def partial_value(name, shape, dtype, at):
    """Returns the partial value, as a whole tensor, of the ranks at these coordinates of the Partial dims. Integers are
    multiples of 36, so that they can be divided by all mesh sizes."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {at}".encode()))
    values = torch.randint(-8, 9, shape, generator=generator)
    return (values * 36 if dtype == torch.int64 else values).to(dtype)


def at_partial(source, coord):
    return tuple(c for place, c in zip(source, coord) if op_of(place))


def local_source(case, mesh, coord):
    name, shape, dtype, source, _ = case
    return generate.local_part(partial_value(name, shape, dtype, at_partial(source, coord)), mesh, coord, source)


def by_definition(case, mesh, coord):
    """Computes the redistribution by docs/explanation/algebra.md, mesh dim by mesh dim."""
    name, shape, dtype, source, target = case
    ranges, divisor = [], 1
    for size, here, s, t in zip(mesh, coord, source, target):
        if op_of(s):
            ranges.append([here] if s == t else range(size))
        if t == "P(sum)" and s == "R":
            divisor *= size
        elif t == "P(sum)" and op_of(s) not in ("sum", None):
            raise AssertionError("refused")
    stay = [dim for dim, (s, t) in enumerate(zip(source, target)) if t == "P(sum)" and "S(" in s]
    parts = [partial_value(name, shape, dtype, at).double() for at in itertools.product(*ranges)]
    combine = torch.maximum if "max" in map(op_of, source) else torch.add
    value = parts[0]
    for part in parts[1:]:
        value = combine(value, part)
    value = (value / divisor).to(dtype)
    # Each element stays at its coordinate along the mesh dims that change from shard to partial.
    inside = torch.zeros(shape, dtype=torch.bool)
    for other in itertools.product(*map(range, mesh)):
        if all(other[dim] == coord[dim] for dim in stay):
            held = [torch.tensor(i, dtype=torch.int64) for i in generate.index_lists(shape, mesh, other, source)]
            inside[torch.meshgrid(*held, indexing="ij")] = True
    return generate.local_part(torch.where(inside, value, torch.zeros_like(value)), mesh, coord, target)


def distributed(case, mesh, coord):
    name, shape, dtype, source, _ = case
    return DTensor.from_local(local_source(case, mesh.shape, coord), mesh, [generate.placement_object(p) for p in source],
                              run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def save(sizes, kinds, folder):
    """Saves one rank's file with the sources of all cases."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[:len(sizes)])
    rank, world = dist.get_rank(), math.prod(sizes)
    state = {case[0]: distributed(case, mesh, mesh.get_coordinate()) for case in cases(len(sizes), kinds)}
    torch.save(state, f"{folder}/model_world_size_{world}_rank_{rank}.pt")


def refusals(sizes, kinds):
    """Returns, by name, why PyTorch does not redistribute a tensor. Runs each rank alone in a fake process group: if only one
    of several real processes refused, the others would wait for it forever."""
    world, found = math.prod(sizes), {}
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[:len(sizes)])
            for case in cases(len(sizes), kinds):
                try:
                    wanted = [generate.placement_object(p) for p in case[-1]]
                    distributed(case, mesh, mesh.get_coordinate()).redistribute(mesh, wanted)
                except (RuntimeError, ValueError, AssertionError) as error:
                    found[case[0]] = str(error).split("(Could")[0].split("\n")[0]
        finally:
            dist.destroy_process_group()
    return found


def compare(sizes, kinds, folder, refused_by_torch, report):
    """Asserts that each rank's file equals PyTorch's redistribute, or the definition where PyTorch refuses."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[:len(sizes)])
    rank, world, coord = dist.get_rank(), math.prod(sizes), mesh.get_coordinate()
    written = torch.load(f"{folder}/model_world_size_{world}_rank_{rank}.pt", weights_only=True)
    all_cases = cases(len(sizes), kinds)
    assert list(written) == [case[0] for case in all_cases]
    outcomes = {}
    for case in all_cases:
        name, _, _, source, target = case
        found = written[name]
        placements = tuple(generate.placement_object(p) for p in target)
        assert found.placements == placements and found.device_mesh == mesh, f"{name}: {found.placements}"
        wanted = by_definition(case, sizes, coord)
        same = generate.same(found.to_local(), wanted)
        assert same, f"{name} {source} -> {target}: by definition {wanted}, found {found.to_local()}"
        if name in refused_by_torch:
            outcome = f"PyTorch refuses: {refused_by_torch[name]}"
        else:
            real = distributed(case, mesh, coord).redistribute(mesh, placements).to_local()
            outcome = "as in PyTorch" if generate.same(real, wanted) else OTHER
        outcomes.setdefault((source, target), set()).add(outcome)
    gathered = [None] * world
    dist.all_gather_object(gathered, outcomes)
    if rank == 0:
        torch.save({pair: set().union(*(outcomes[pair] for outcomes in gathered)) for pair in outcomes}, report)
