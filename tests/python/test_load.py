"""`load_into` and `StorageReader`: equal bit for bit to `dcp.load`, also in three further training steps, and its errors."""

import math

import pytest
import torch

import dtshard
import jobs


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saved"))
    jobs.run(jobs.save, 4, folder, {"dp": 2, "tp": 2})
    return folder


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 3}], ids=str)
def test_each_rank_loads_what_dcp_load_gives(saved, mesh):
    jobs.run(jobs.load, math.prod(mesh.values()), saved, mesh)


def test_flat_optimizer_loads_from_nested_groups(saved):
    jobs.run(jobs.load_flat_optimizer, 4, saved)


def whole(saved):
    return torch.load(f"{saved}/whole.pt")


def test_tensor_of_another_dtype_or_with_gaps_is_filled(saved):
    expected = whole(saved)
    state = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in expected.items()}
    state["out.weight"] = torch.zeros(expected["out.weight"].shape[::-1]).T
    assert not state["out.weight"].is_contiguous()
    assert dtshard.load_into(state, f"{saved}/ranks", root="model") == ([], [])
    assert all(torch.equal(state[name].double(), value.double()) for name, value in expected.items())


def test_tensor_larger_than_the_buffer_is_filled_in_pieces(tmp_path, monkeypatch):
    from dtshard import _load

    expected = torch.arange(5 * 7 * 3, dtype=torch.float32).reshape(5, 7, 3)
    torch.save({"w": expected}, tmp_path / "w.pt")
    for staged in (4, 3 * 4, 50 * 4):
        monkeypatch.setattr(_load, "STAGED_BYTES", staged)
        state = {"w": torch.zeros(3, 7, 5, dtype=torch.bfloat16).permute(2, 1, 0)}
        dtshard.load_into(state, tmp_path / "w.pt")
        assert torch.equal(state["w"], expected.bfloat16())


def test_tied_parameters_are_filled_once_under_both_names(tmp_path):
    weight = torch.randn(300, 40)
    torch.save({"embed": weight, "out": weight}, tmp_path / "tied.pt")
    own = torch.zeros(300, 40)
    assert dtshard.load_into({"embed": own, "out": own}, tmp_path / "tied.pt") == ([], [])
    assert torch.equal(own, weight)


def test_optimizer_with_ids_loads_by_ids(tmp_path):
    def trained(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(1)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "job.pt")
    _, other = trained(2)
    state = {"optimizer": other.state_dict()}
    assert dtshard.load_into(state, tmp_path / "job.pt").unexpected_keys == ["model.weight", "model.bias"]
    other.load_state_dict(state["optimizer"])
    assert jobs.differences(optimizer.state_dict(), other.state_dict()) == []


def test_stateful_object_is_loaded(tmp_path):
    class Counter:
        def __init__(self, number):
            self.number, self.weight = number, torch.full((2,), float(number))

        def state_dict(self):
            return {"number": self.number, "weight": self.weight}

        def load_state_dict(self, state):
            self.number = state["number"]

    torch.save({"counter": Counter(7).state_dict()}, tmp_path / "counter.pt")
    counter = Counter(1)
    dtshard.load_into({"counter": counter}, tmp_path / "counter.pt")
    assert counter.number == 7 and counter.weight.tolist() == [7, 7]


def test_names_that_do_not_match_are_an_error_or_a_list(saved):
    state = {**whole(saved), "extra.weight": torch.ones(2)}
    with pytest.raises(dtshard.Error, match=r'Missing key\(s\) in state_dict: "extra.weight"\.') as raised:
        dtshard.load_into(state, f"{saved}/model.safetensors")
    assert raised.value.kind == "missing" and raised.value.names == ["extra.weight"]
    del state["layers.1.up.bias"]
    found = dtshard.load_into(state, f"{saved}/model.safetensors", strict=False)
    assert found.missing_keys == ["extra.weight"] and found.unexpected_keys == ["layers.1.up.bias"]
    assert state["extra.weight"].tolist() == [1, 1]
    del state["extra.weight"]
    with pytest.raises(dtshard.Error, match=r'Unexpected key\(s\) in state_dict: "layers.1.up.bias"'):
        dtshard.load_into(state, f"{saved}/model.safetensors")


def test_root_of_the_checkpoint_is_in_the_hint(saved):
    with pytest.raises(dtshard.Error) as raised:
        dtshard.load_into(whole(saved), f"{saved}/ranks")
    assert raised.value.hint == "the checkpoint has these names below 'model': use root='model'"


def test_tensor_of_another_shape_is_an_error_and_nothing_is_filled(saved):
    state = {name: torch.zeros_like(value) for name, value in whole(saved).items()}
    state["out.weight"] = torch.zeros(23, 11)
    with pytest.raises(dtshard.Error) as raised:
        dtshard.load_into(state, f"{saved}/model.safetensors")
    assert raised.value.tensor == "out.weight"
    assert (raised.value.expected, raised.value.found) == ("[23, 11]", "[23, 10]")
    assert not any(value.any() for value in state.values())


def test_tensor_on_the_meta_device_is_an_error(saved):
    state = {name: value.to("meta") for name, value in whole(saved).items()}
    with pytest.raises(dtshard.Error, match="meta") as raised:
        dtshard.load_into(state, f"{saved}/model.safetensors")
    assert "to_empty" in raised.value.hint


def test_weight_map_applies_while_loading(fixtures):
    from safetensors.torch import load_file

    expected = load_file(fixtures / "maps/llama/hf.safetensors")
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    found = dtshard.load_into(state, fixtures / "maps/llama/titan.safetensors", map="llama:titan:hf")
    assert found == ([], [])
    assert jobs.differences(state, expected) == []
