"""Plain tensors of rank files, whose layout is declared with `--src-mesh`, `--src-placements`, `--src-split` and `--reduce`,
are converted to DCP, which PyTorch loads."""

import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import common
import generate  # noqa: F401  (the path of the fixtures)
import parts


class Block(nn.Module):
    """An embedding, a column-parallel and a row-parallel linear, and a norm, with sizes that no number of ranks
    divides."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(11, 6, dtype=dtype)
        self.up = nn.Linear(6, 13, dtype=dtype)
        self.down = nn.Linear(13, 6, dtype=dtype)
        self.norm = nn.LayerNorm(6, dtype=dtype)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.norm(hidden + self.down(torch.nn.functional.gelu(self.up(hidden))))


# The sharded tensors, and the dim that is sharded.
DIMS = {"embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}
RULES = [("embed", "S(0)"), ("up", "S(0)"), ("down.weight", "S(1)")]


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return Block(dtype)


def rules(*before):
    """Returns the options for RULES; `before` are the placements on the mesh dims before the last one."""
    return [word for name, last in RULES for word in ("--src-placements", f"{name}={','.join([*before, last])}")]


def makani_sizes(size, parts):
    """Returns the sizes of `compute_split_shapes` of makani and torch-harmonics."""
    if parts == 1:
        return [size]
    chunk = (size + parts - 1) // parts
    last = max(0, size - chunk * (parts - 1))
    if last == 0:
        chunk = size // parts
        last = size - chunk * (parts - 1)
    return [chunk] * (parts - 1) + [last]


def cut(tensor, dim, parts, split):
    if split == "makani":
        return tensor.split(makani_sizes(tensor.size(dim), parts), dim)
    if split == "balanced":
        return torch.tensor_split(tensor, parts, dim)
    shards = list(tensor.chunk(parts, dim))
    return shards + [tensor.narrow(dim, tensor.size(dim), 0)] * (parts - len(shards))


def part(name, tensor, rank, parts, split="chunk"):
    dim = DIMS.get(name)
    return tensor.clone() if dim is None else cut(tensor, dim, parts, split)[rank].clone()


def load_dcp(folder, like):
    state = {name: torch.full_like(tensor, float("nan")) for name, tensor in like.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.parametrize("split,parts", [("chunk", 2), ("chunk", 5), ("balanced", 4), ("makani", 4), ("makani", 5)])
def test_declared_tensor_parallel_shards_load_as_dcp(tmp_path, split, parts):
    """Every rank saves plain shards by torch.save; after reshard to DCP, dcp.load gives the whole weights."""
    whole = model().state_dict()
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in range(parts):
        own = {name: part(name, tensor, rank, parts, split) for name, tensor in whole.items()}
        torch.save(own, folder / f"model_rank_{rank}.pt")
    declared = ["--src-mesh", f"tp={parts}", *rules(), "--src-split", split]
    common.dtshard("reshard", folder, tmp_path / "dcp", "--to", "dcp", "--mesh", "fsdp=3", *declared)
    found = load_dcp(tmp_path / "dcp", whole)
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    common.dtshard("unshard", folder, tmp_path / "whole.pt", *declared)
    found = torch.load(tmp_path / "whole.pt")
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)
    # reshard to another mesh gives plain shards, too.
    common.dtshard("reshard", folder, tmp_path / "other", "--mesh", "tp=3", *declared)
    for rank in range(3):
        own = torch.load(tmp_path / "other" / f"model_rank_{rank}.pt")
        assert {type(tensor) for tensor in own.values()} == {torch.Tensor}
        expected = {name: part(name, tensor, rank, 3, split) for name, tensor in whole.items()}
        assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())


def test_optimizer_state_of_declared_shards_loads_as_dcp(tmp_path):
    """Adam numbers its parameters, which are plain shards; its state is sharded like them."""
    whole = model()
    parts = 3
    moments = {name: torch.randn_like(tensor) for name, tensor in whole.named_parameters()}
    for rank in range(parts):
        own = {name: nn.Parameter(part(name, tensor.data, rank, parts)) for name, tensor in whole.named_parameters()}
        optimizer = torch.optim.Adam(own.values())
        for name, tensor in own.items():
            tensor.grad = part(name, moments[name], rank, parts)
        optimizer.step()
        state = {"model": {name: tensor.data for name, tensor in own.items()}, "optimizer": optimizer.state_dict()}
        (tmp_path / "ranks").mkdir(exist_ok=True)
        torch.save(state, tmp_path / "ranks" / f"rank_{rank}.pt")
    common.dtshard("unshard", tmp_path / "ranks", tmp_path / "whole.pt", "--src-mesh", f"tp={parts}", *rules())
    found = torch.load(tmp_path / "whole.pt")
    reference = torch.optim.Adam(whole.parameters())
    for name, tensor in whole.named_parameters():
        tensor.grad = moments[name]
    reference.step()
    for index, (name, tensor) in enumerate(whole.named_parameters()):
        assert torch.equal(found["model"][name], tensor.data), name
        for key, value in reference.state_dict()["state"][index].items():
            assert torch.equal(found["optimizer"]["state"][index][key], value), (name, key)


def own_gradients(ranks, dtype):
    """Returns the gradients of each rank after backward on its own data."""
    gradients = []
    for rank in range(ranks):
        own = model(dtype)
        torch.manual_seed(rank + 1)
        own(torch.randint(0, 11, (4, 5))).square().sum().backward()
        gradients.append({name: tensor.grad for name, tensor in own.named_parameters()})
    return gradients


def reduced(values, op):
    """Returns the sum (or average) in rank order, with one rounding at the end: f32 and f64 are added in f64, others in f32."""
    wide = torch.float32 if values[0].dtype in (torch.bfloat16, torch.float16) else torch.float64
    total = values[0].to(wide)
    for value in values[1:]:
        total = total + value.to(wide)
    return (total / len(values) if op == "avg" else total).to(values[0].dtype)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("nested", [False, True])
def test_gradients_are_reduced_over_mesh_dims(tmp_path, dtype, op, nested):
    """dp=2, cp=3, tp=2: gradients are summed over the first two dims, and sharded along the last."""
    gradients = own_gradients(6, dtype)
    expected = {name: reduced([own[name] for own in gradients], op) for name in gradients[0]}
    weights = model(dtype).state_dict()
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank, (data, tp) in enumerate(itertools.product(range(6), range(2))):
        own = {name: part(name, tensor, tp, 2) for name, tensor in gradients[data].items()}
        whole = {name: part(name, tensor, tp, 2) for name, tensor in weights.items()}
        torch.save({"model": whole, "grads": own} if nested else own, folder / f"rank_{rank}.pt")
    declared = ["--src-mesh", "dp=2,cp=3,tp=2", *rules("R", "R"), "--reduce", f"dp,cp={op}"]
    done = common.dtshard("reshard", folder, tmp_path / "dcp", "--to", "dcp", "--mesh", "fsdp=2", "--verify", *declared)
    assert f"{op} over dp, cp" in done.stderr
    like = {f"grads.{name}": tensor for name, tensor in expected.items()} if nested else expected
    found = load_dcp(tmp_path / "dcp", like)
    for name, tensor in like.items():
        assert torch.equal(found[name], tensor), name
    if nested:  # weights are replicated along dp and cp
        found = load_dcp(tmp_path / "dcp", {f"model.{name}": tensor for name, tensor in weights.items()})
        assert all(torch.equal(found[f"model.{name}"], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("source,target", [((2, 3), (3, 2)), ((2, 2), (4, 1)), ((1, 4), (2, 5))])
def test_regions_split_in_two_dims_are_resharded(tmp_path, source, target):
    """Fields and filters that makani's compute_split_shapes splits in height and width are converted to another mesh and to
    whole tensors."""
    torch.manual_seed(0)
    whole = {"bias": torch.randn(1, 3, 9, 10), "filter": torch.randn(2, 9, 10), "norm.weight": torch.randn(3)}

    def own(name, mesh, coordinate):
        tensor = whole[name]
        for dim, parts, at in zip((-2, -1), mesh, coordinate):
            if name != "norm.weight":
                tensor = cut(tensor, dim, parts, "makani")[at]
        return tensor.clone()

    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank, coordinate in enumerate(itertools.product(*map(range, source))):
        torch.save({name: own(name, source, coordinate) for name in whole}, folder / f"rank_{rank}.pt")
    declared = ["--src-mesh", f"h={source[0]},w={source[1]}", "--src-placements", "bias=S(-2),S(-1)", "--src-placements",
            "filter=S(-2),S(-1)", "--src-split", "makani"]
    common.dtshard("unshard", folder, tmp_path / "whole.pt", *declared)
    found = torch.load(tmp_path / "whole.pt")
    assert found.keys() == whole.keys() and all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    # From the shards, and from the whole file.
    mesh = ["--mesh", f"h={target[0]},w={target[1]}", "--split", "makani"]
    rules = [word.replace("src-", "") for word in declared[2:6]]
    common.dtshard("reshard", folder, tmp_path / "parts", *mesh, *declared)
    common.dtshard("reshard", tmp_path / "whole.pt", tmp_path / "back", "--to", "torch-ranks", "--tensor-class", "local", *mesh,
                   *rules, "--placements", "R,R")
    for rank, coordinate in enumerate(itertools.product(*map(range, target))):
        for path in (tmp_path / "parts" / f"rank_{rank}.pt", *tmp_path.glob(f"back/*_rank_{rank}.pt")):
            found = torch.load(path)
            assert all(torch.equal(found[name], own(name, target, coordinate)) for name in whole), path
    assert len(list(tmp_path.glob("back/*.pt"))) == target[0] * target[1]


def test_reduced_gradients_equal_those_of_ddp(tmp_path):
    """The mean of the gradients of 4 gloo processes equals that of DDP up to the rounding of DDP, and exactly that computed in
    f64."""
    (tmp_path / "ranks").mkdir()
    common.run_ranks(parts.backward, 4, tmp_path, str(tmp_path))
    common.dtshard("unshard", tmp_path / "ranks", tmp_path / "mean.pt", "--src-mesh", "dp=2,cp=2", "--reduce", "dp,cp=avg")
    found = torch.load(tmp_path / "mean.pt")
    gradients = [torch.load(tmp_path / "ranks" / f"rank_{rank}.pt") for rank in range(4)]
    for name, tensor in found.items():
        assert torch.equal(tensor, reduced([own[name] for own in gradients], "avg")), name
        # DDP rounds 3 sums and a division, each by at most half a unit in the last place
        bound = 2 * torch.finfo(torch.float32).eps * torch.stack([own[name].abs() for own in gradients]).sum(0)
        for rank in range(4):
            assert ((torch.load(tmp_path / f"ddp_{rank}.pt")[name] - tensor).abs() <= bound).all(), name
    assert found.keys() == gradients[0].keys()
