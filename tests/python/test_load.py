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


def test_filter_forgives_only_the_names_that_it_leaves_out(tmp_path):
    torch.save({"model": {"a": torch.ones(2)}, "optim": {"s": torch.ones(2)}}, tmp_path / "x.pt")
    state = {"model": {"a": torch.zeros(2)}, "optim": {"s": torch.zeros(2)}}
    assert dtshard.load_into(state, tmp_path / "x.pt", exclude="optim.**").missing_keys == ["optim.s"]
    assert state["model"]["a"].sum() == 2 and state["optim"]["s"].sum() == 0
    state["model"]["new.weight"] = torch.zeros(2)
    with pytest.raises(dtshard.Error, match=r"model\.new\.weight"):
        dtshard.load_into(state, tmp_path / "x.pt", exclude="optim.**")


def test_flat_options_that_differ_within_a_group_are_an_error(tmp_path):
    flat = {"state": {}, "param_groups.a.lr": 0.1, "param_groups.b.lr": 0.2}
    torch.save({"optim": flat}, tmp_path / "x.pt")
    state = {"optim": {"state": {}, "param_groups": [{"lr": 0.0, "params": ["a", "b"]}]}}
    with pytest.raises(dtshard.Error, match=r"0\.1 in optim\.param_groups\.a\.lr, 0\.2"):
        dtshard.load_into(state, tmp_path / "x.pt")
    state["optim"]["param_groups"] = [{"lr": 0.0, "params": ["a"]}, {"lr": 0.0, "params": ["b"]}]
    dtshard.load_into(state, tmp_path / "x.pt")
    assert [group["lr"] for group in state["optim"]["param_groups"]] == [0.1, 0.2]


def test_two_keys_with_one_name_are_an_error(tmp_path):
    torch.save({"a": {"b": torch.ones(1)}}, tmp_path / "x.pt")
    with pytest.raises(dtshard.Error, match=r"a\.b: two entries"):
        dtshard.load_into({"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}}, tmp_path / "x.pt")


def test_autograd_notices_that_a_tensor_was_filled(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    y = (x * w).sum()
    dtshard.load_into({"w": w}, tmp_path / "x.pt")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_tensor_inside_a_tuple_belongs_to_the_tuple(tmp_path):
    torch.save({"t": (1, torch.ones(2))}, tmp_path / "x.pt")
    state = {"t": (0, torch.zeros(2))}
    assert dtshard.load_into(state, tmp_path / "x.pt") == ([], [])
    assert state["t"][0] == 1 and state["t"][1].sum() == 2


def test_target_that_cannot_be_filled_is_an_error_with_its_name(tmp_path):
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "x.pt")
    for target in [torch.zeros(2, 2).to_sparse(), torch.zeros(1, 2).expand(2, 2)]:
        with pytest.raises(dtshard.Error, match="^w: "):
            dtshard.load_into({"w": target}, tmp_path / "x.pt")
    with pytest.raises(TypeError, match="state dict"):
        dtshard.load_into(torch.nn.Linear(1, 1), tmp_path / "x.pt")
    with pytest.raises(dtshard.Error, match="rank"):
        dtshard.load_into({}, tmp_path / "x.pt", rank=-1)


def test_local_tensor_of_another_shape_than_its_part_is_an_error(saved):
    jobs.run(jobs.load_wrong_local_shape, 2, saved)


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
