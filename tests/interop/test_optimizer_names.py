"""`dtshard reshard ... --to dcp` of a torch.save file whose optimizer numbers its parameters: PyTorch loads the state by
name, and the next steps equal those of the job that was not converted."""

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
    """Two groups, in another order than that of the model. PyTorch saves the names, because it got them."""
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
