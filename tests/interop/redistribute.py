"""What runs in each rank's process for test_redistribute.py, and what each rank should have by definition.

Elements are small integers, so that no order of summing rounds and equality is bit for bit.
"""

import itertools
import math
import zlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import generate

PLACES = ["R", "S(0)", "S(1)", "_S(0,2)", "P(sum)", "P(max)"]
NAMES = ("dp", "tp")
# Shapes and dtypes in turn; integers are divided by the sizes of all meshes here.
KINDS = [((7, 5), torch.float32), ((5, 4), torch.float32), ((3, 2), torch.float32), ((1, 4), torch.float32),
         ((7, 5), torch.bfloat16), ((5, 4), torch.int64)]
OTHER = "other summands than PyTorch's"


def op_of(place):
    return place[2:-1] if place.startswith("P") else None


def refused(source, target):
    """Whether there is no way from one to the other, on the same mesh."""
    mixed = lambda places: len({op_of(p) for p in places} - {None}) > 1
    differ = lambda a, b: None not in (op_of(a), op_of(b)) and a != b
    return mixed(source) or mixed(target) or any(map(differ, source, target))


def cases(ndim, kinds):
    """(name, shape, dtype, source, target); tensors of one target list have the same first component."""
    lists = list(itertools.product(PLACES, repeat=ndim))
    pairs = [(s, t) for t in lists for s in lists if not refused(s, t)]
    numbers = itertools.count()
    return [(f"to{lists.index(t)}.t{n}", *KINDS[n % len(KINDS)], s, t)
            for s, t in pairs for _, n in zip(range(kinds), numbers)]


def summand(name, shape, dtype, at):
    """The whole tensor that ranks at these coordinates of the Partial dims have a part of."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {at}".encode()))
    values = torch.randint(-8, 9, shape, generator=generator)
    return (values * 36 if dtype == torch.int64 else values).to(dtype)


def at_partial(source, coord):
    return tuple(c for place, c in zip(source, coord) if op_of(place))


def local_source(case, mesh, coord):
    name, shape, dtype, source, _ = case
    return generate.local_part(summand(name, shape, dtype, at_partial(source, coord)), mesh, coord, source)


def by_definition(case, mesh, coord):
    """docs/algebra.md, mesh dim by mesh dim."""
    name, shape, dtype, source, target = case
    ranges, divisor, alone = [], 1, ["R"] * len(mesh)
    for size, here, s, t in zip(mesh, coord, source, target):
        if op_of(s):
            ranges.append([here] if s == t else range(size))
        if t == "P(sum)" and s == "R":
            divisor *= size
        elif t == "P(sum)" and op_of(s) not in ("sum", None):
            raise AssertionError("refused")
    for dim, (s, t) in enumerate(zip(source, target)):
        if t == "P(sum)" and "S(" in s:
            alone[dim] = s
    parts = [summand(name, shape, dtype, at).double() for at in itertools.product(*ranges)]
    combine = torch.maximum if "max" in map(op_of, source) else torch.add
    value = parts[0]
    for part in parts[1:]:
        value = combine(value, part)
    value = (value / divisor).to(dtype)
    inside = torch.zeros(shape, dtype=torch.bool)
    held = [torch.tensor(indices, dtype=torch.int64) for indices in generate.index_lists(shape, mesh, coord, alone)]
    inside[torch.meshgrid(*held, indexing="ij")] = True
    return generate.local_part(torch.where(inside, value, torch.zeros_like(value)), mesh, coord, target)


def distributed(case, mesh, coord):
    name, shape, dtype, source, _ = case
    return DTensor.from_local(local_source(case, mesh.shape, coord), mesh, [generate.placement_object(p) for p in source],
                              run_check=False, shape=torch.Size(shape), stride=(shape[1], 1))


def hangs(sizes, places):
    """Strided parts over others, cut into another number of blocks than there are of those: PyTorch fails on some ranks only."""
    return any(outer == "_S(0,2)" and "S(0" in inner and size != 2
               for (outer, inner), size in zip(itertools.pairwise(places), sizes[1:]))


def scrambles(mesh, places):
    """Whether PyTorch cuts a tensor in this way, as defined here, and does not put it together again."""
    whole = torch.arange(32.0).reshape(8, 4)
    own = distribute_tensor(whole, mesh, [generate.placement_object(p) for p in places], src_data_rank=None)
    assert generate.same(own.to_local(), generate.local_part(whole, mesh.shape, mesh.get_coordinate(), places)), places
    return not torch.equal(own.full_tensor(), whole)


def save(sizes, kinds, folder):
    """One rank's file of all cases as they are at first."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[:len(sizes)])
    rank, world = dist.get_rank(), math.prod(sizes)
    state = {case[0]: distributed(case, mesh, mesh.get_coordinate()) for case in cases(len(sizes), kinds)}
    torch.save(state, f"{folder}/model_world_size_{world}_rank_{rank}.pt")


def by_pytorch(case, mesh, placements, wanted):
    """What PyTorch says to it, at once, or where that is not what should come, by way of whole tensors."""
    there = distributed(case, mesh, mesh.get_coordinate())
    try:
        same = generate.same(there.redistribute(mesh, placements).to_local(), wanted)
    except (RuntimeError, ValueError, AssertionError) as error:
        outcome, same = "PyTorch refuses: " + str(error).split("(Could")[0].split("\n")[0], True
    else:
        outcome = "as in PyTorch" if same else OTHER
    everywhere = torch.tensor(float(same))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    if everywhere or any(map(op_of, case[4])):
        return outcome
    apart = there.redistribute(mesh, [Replicate()] * mesh.ndim).redistribute(mesh, placements).to_local()
    return "as in PyTorch by way of R, at once it errs" if generate.same(apart, wanted) else OTHER


def compare(sizes, kinds, folder, report):
    """Each rank's file holds what PyTorch's redistribute gives, or what is defined where PyTorch has nothing to say."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES[:len(sizes)])
    rank, world, coord = dist.get_rank(), math.prod(sizes), mesh.get_coordinate()
    written = torch.load(f"{folder}/model_world_size_{world}_rank_{rank}.pt", weights_only=True)
    all_cases = cases(len(sizes), kinds)
    assert list(written) == [case[0] for case in all_cases]
    twice = [("_S(0,2)", "_S(0,2)")] if len(sizes) == 2 else []
    scrambled = [places for places in twice if not hangs(sizes, places) and scrambles(mesh, places)]
    told = {}
    for case in all_cases:
        name, _, _, source, target = case
        found = written[name]
        placements = tuple(generate.placement_object(p) for p in target)
        assert found.placements == placements and found.device_mesh == mesh, f"{name}: {found.placements}"
        wanted = by_definition(case, sizes, coord)
        same = generate.same(found.to_local(), wanted)
        assert same, f"{name} {source} -> {target}: by definition {wanted}, found {found.to_local()}"
        if hangs(sizes, source) or hangs(sizes, target):
            outcome = "PyTorch is not asked, it would wait for ever"
        elif source in scrambled:
            outcome = "PyTorch scrambles what it cuts so itself"
        else:
            outcome = by_pytorch(case, mesh, placements, wanted)
        told.setdefault((source, target), set()).add(outcome)
    gathered = [None] * world
    dist.all_gather_object(gathered, told)
    if rank == 0:
        torch.save({pair: set().union(*(told[pair] for told in gathered)) for pair in told}, report)
