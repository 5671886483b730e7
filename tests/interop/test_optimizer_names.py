"""`dtshard reshard ... --to dcp` of a torch.save file whose optimizer numbers its parameters: PyTorch loads the state by name,
and the next steps equal those of the original job."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import common


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def groups_of_names(module):
    """Two groups, in another order than that of the model. The optimizer gets named parameters, so PyTorch saves the names."""
    named = list(module.named_parameters())
    decayed, other = [n for n in named if n[1].ndim > 1], [n for n in named if n[1].ndim == 1]
    return torch.optim.AdamW([{"params": other, "weight_decay": 0.0}, {"params": decayed}], lr=1e-2)


def momentum(module):
    return torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)


def steps(module, optimizer, count):
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = module(torch.randn(5, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [adamw, groups_of_names, momentum])
def test_numbered_state_loads_by_name(tmp_path, make):
    module = model()
    optimizer = make(module)
    steps(module, optimizer, 3)
    saved, folder = str(tmp_path / "saved.pt"), str(tmp_path / "dcp")
    torch.save({"model": module.state_dict(), "optim": optimizer.state_dict()}, saved)
    common.dtshard("reshard", saved, folder, "--to", "dcp", "--mesh", "dp=2")

    other = model()
    again = make(other)
    steps(other, again, 1)
    state = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, again)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other, again, state["optim"])
    common.assert_equal(get_optimizer_state_dict(other, again), get_optimizer_state_dict(module, optimizer))
    assert steps(other, again, 3) == steps(module, optimizer, 3)
    common.dtshard("verify", saved, folder)


def numbered(groups, names, first, count):
    """Returns a state dict of an optimizer: the moment of number i has the value `first + i`."""
    state = {i: {"step": torch.tensor(1.0), "exp_avg": torch.full((4,), float(first + i))} for i in range(count)}
    more = [{"param_names": listed} if listed else {} for listed in names]
    return {"state": state, "param_groups": [{"lr": 0.1, "params": group, **m} for group, m in zip(groups, more)]}


def moments(path):
    state = torch.load(path, weights_only=False)["optimizer"]["state"]
    return {key: value["exp_avg"][0].item() for key, value in state.items()}


@pytest.mark.parametrize("names", [["b"], None], ids=["listed", "not-listed"])
def test_fill_from_maps_numbers_by_parameter(tmp_path, names):
    """Number 0 is the parameter b in the source, and the parameter a in the filler."""
    one, zero = torch.ones(4), torch.zeros(4)
    filler_names = ["a", "b"] if names else None
    torch.save({"model": {"b": one}, "optimizer": numbered([[0]], [names], 5, 1)}, tmp_path / "source.pt")
    torch.save({"model": {"a": zero, "b": zero.clone()}, "optimizer": numbered([[0, 1]], [filler_names], 100, 2)},
               tmp_path / "filler.pt")
    for target, expected in [("dcp", {"a": 100.0, "b": 5.0}), ("torch-ranks", {0: 100.0, 1: 5.0})]:
        common.dtshard("reshard", tmp_path / "source.pt", tmp_path / target, "--mesh", "x=1", "--placements", "R", "--to", target,
                       "--fill-from", tmp_path / "filler.pt", "--verify")
        common.dtshard("unshard", tmp_path / target, tmp_path / f"{target}.pt", "--series", "all")
        assert moments(tmp_path / f"{target}.pt") == expected


def test_fill_from_refuses_other_parameter_groups(tmp_path):
    def save(name, groups, first):
        tensors = {"a": torch.full((4,), float(first)), "b": torch.full((4,), float(first))}
        torch.save({"model": tensors, "optimizer": numbered([[0], [1]], groups, first, 2)}, tmp_path / name)

    save("source.pt", [["a"], ["b"]], 5)
    save("filler.pt", [["b"], ["a"]], 100)
    arguments = ["reshard", tmp_path / "source.pt", tmp_path / "made", "--mesh", "x=1", "--to", "torch-ranks", "--fill-from",
                 tmp_path / "filler.pt"]
    refused = common.run(*arguments)
    assert refused.returncode == 2 and "is not in this parameter group" in refused.stderr
    common.dtshard(*arguments, "--exclude", "optimizer.param_groups.**")
    common.dtshard("unshard", tmp_path / "made", tmp_path / "made.pt", "--series", "all")
    assert moments(tmp_path / "made.pt") == {0: 6.0, 1: 5.0}


@pytest.mark.parametrize("change", ["nested", "renamed", "left out"])
def test_fill_from_maps_numbers_of_a_selection(tmp_path, change):
    """The optimizer's path differs between source and filler, or the parameter's name differs, or the source's optimizer is not
    selected."""
    zero = torch.zeros(4)
    own = "old" if change == "renamed" else "b"
    # This source has no `param_names`, so its numbers could not be mapped to those of the filler.
    names = None if change == "left out" else [own]
    model = {own: torch.ones(4), **({"c": zero} if change == "left out" else {})}
    torch.save({"model": model, "optimizer": numbered([[0]], [names], 5, 1)}, tmp_path / "source.pt")
    filler = {"model": {"a": zero, "b": zero.clone(), "c": zero.clone()}, "optimizer": numbered([[0, 1]], [["a", "b"]], 100, 2)}
    torch.save({"app": filler} if change == "nested" else filler, tmp_path / "filler.pt")
    options = {"nested": ["--nest", "app", "--exclude", "**.param_groups.**"],
               "renamed": ["--rename", r"\bold$=b", "--exclude", "optimizer.param_groups.**"],
               "left out": ["--exclude", "optimizer.**"]}
    common.dtshard("reshard", tmp_path / "source.pt", tmp_path / "made", "--mesh", "x=1", "--to", "torch-ranks", "--fill-from",
                   tmp_path / "filler.pt", *options[change])
    take = ["--root", "app"] if change == "nested" else []
    common.dtshard("unshard", tmp_path / "made", tmp_path / "made.pt", "--series", "all", *take)
    assert moments(tmp_path / "made.pt") == {0: 100.0, 1: 101.0 if change == "left out" else 5.0}


def test_verify_pairs_numbers_and_names_of_several_optimizers(tmp_path):
    """Two optimizers are in a list; each has the number 0 for another tensor of the model."""
    tensors = {name: torch.zeros(4) for name in ("g", "d")}
    optimizers = [numbered([[0]], [[name]], first, 1) for name, first in (("g", 5), ("d", 7))]
    torch.save({"model": tensors, "trainer": {"optimizers": optimizers}}, tmp_path / "source.pt")
    common.dtshard("reshard", tmp_path / "source.pt", tmp_path / "named", "--mesh", "x=1", "--to", "dcp")
    common.dtshard("verify", tmp_path / "source.pt", tmp_path / "named")
    common.dtshard("verify", tmp_path / "named", tmp_path / "source.pt")
