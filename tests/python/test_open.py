"""`open`, handles of tensors, and objects: equal to what torch and safetensors read, and no byte more than needed."""

import concurrent.futures
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import dtshard


def read_bytes():
    """Returns the number of bytes that this process has read from files."""
    return int(pathlib.Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize("name", ["titan"])
def test_every_tensor_equals_its_truth(fixtures, name):
    truth = load_file(fixtures / f"{name}.truth.safetensors")
    checkpoint = dtshard.open(fixtures / name)
    assert set(checkpoint) == set(truth)
    for key, value in truth.items():
        tensor = checkpoint[key]
        assert tensor.shape == tuple(value.shape)
        assert torch.equal(tensor.torch(), value)
        as_numpy = tensor.numpy().astype(np.float64)
        assert np.array_equal(as_numpy, value.double().numpy())
        if value.ndim == 2:
            part = tensor[1:3, ..., 1:-1]
            assert part.shape == tuple(value[1:3, 1:-1].shape)
            assert torch.equal(part.torch(), value[1:3, 1:-1])


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_in_numpy_and_torch(tmp_path, dtype):
    value = torch.arange(1, 13).reshape(3, 4).to(dtype)
    torch.save({"x": value}, tmp_path / "x.pt")
    tensor = dtshard.open(tmp_path / "x.pt")["x"]
    assert tensor.torch().dtype == dtype
    assert tensor.torch().view(torch.uint8).equal(value.view(torch.uint8))
    array = tensor.numpy()
    assert array.tobytes() == value.view(torch.uint8).numpy().tobytes()
    if dtype == torch.bfloat16:
        assert array.dtype == ml_dtypes.bfloat16


def test_bf16_without_ml_dtypes_is_an_error_that_names_it(tmp_path):
    torch.save({"w": torch.ones(1, dtype=torch.bfloat16)}, tmp_path / "x.pt")
    code = """
import sys
sys.modules["ml_dtypes"] = None
import dtshard
try:
    dtshard.open(sys.argv[1])["w"].numpy()
except dtshard.Error as error:
    print(error, "|", error.hint)
"""
    shown = subprocess.run([sys.executable, "-c", code, tmp_path / "x.pt"], capture_output=True, text=True, check=True).stdout
    assert shown == "numpy has no dtype bfloat16 | install the package ml_dtypes, or read with .torch()\n"


def test_slices_are_those_of_numpy(tmp_path):
    value = torch.arange(4 * 5 * 6).reshape(4, 5, 6)
    torch.save({"x": value}, tmp_path / "x.pt")
    tensor, array = dtshard.open(tmp_path / "x.pt")["x"], value.numpy()
    for index in [0, -1, slice(1, 3), (slice(None), 2), (..., -2), (1, 2, 3), (slice(5, 9),), (slice(-2, None), ..., slice(0, 0))]:
        assert np.array_equal(tensor[index].numpy(), array[index]), index
        assert tensor[index].shape == array[index].shape
    assert np.array_equal(tensor[1:][1][2:, 3].numpy(), array[1:][1][2:, 3])
    assert np.array_equal(np.asarray(tensor[3]), array[3])
    assert len(tensor) == 4 and tensor.size == 120
    for wrong in [4, -5, (0, 0, 0, 0), slice(None, None, 2), (..., ...)]:
        with pytest.raises(IndexError, match="x: "):
            tensor[wrong]
    with pytest.raises(TypeError):
        tensor[0.5]


def test_slice_reads_only_its_bytes(tmp_path):
    save_file({f"w{i}": torch.full((2000, 2000), float(i)) for i in range(8)}, tmp_path / "big.safetensors")
    checkpoint = dtshard.open(tmp_path / "big.safetensors")
    before = read_bytes()
    part = checkpoint["w3"][1000:1100]
    assert read_bytes() - before < 10_000
    assert part.numpy().mean() == 3
    assert 100 * 2000 * 4 <= read_bytes() - before < 100 * 2000 * 4 + 50_000
    before = read_bytes()
    checkpoint["w5"].numpy()
    assert 2000 * 2000 * 4 <= read_bytes() - before < 2000 * 2000 * 4 + 50_000


def test_mapped_array_is_a_read_only_view(tmp_path):
    value = torch.randn(300, 40)
    save_file({"x": value, "y": value[:10].clone()}, tmp_path / "x.safetensors")
    checkpoint = dtshard.open(tmp_path / "x.safetensors")
    for name, part in [("x", checkpoint["x"]), ("x", checkpoint["x"][5:200]), ("y", checkpoint["y"])]:
        before = read_bytes()
        array = part.numpy(mmap=True)
        assert read_bytes() - before < 5000, name
        assert isinstance(array, np.memmap) and not array.flags.writeable
        assert np.array_equal(array, part.numpy())
    assert not isinstance(checkpoint["x"][:, 1:3].numpy(mmap=True), np.memmap)


def test_mesh_placements_and_chunks_are_shown(fixtures):
    checkpoint = dtshard.open(fixtures / "fsdp4/ranks")
    tensor = next(tensor for tensor in checkpoint.values() if tensor.placements == "S(0)")
    assert checkpoint.format == "torch-ranks" and tensor.mesh == checkpoint.mesh
    assert tensor.chunks == 4 and len(tensor.boxes) == 4
    assert repr(tensor).startswith("<dtshard.Tensor ") and "S(0)" in repr(tensor)
    assert "tensors" in repr(checkpoint) and str(checkpoint).startswith("format")


def test_notebook_shows_the_report(fixtures):
    shown = dtshard.open(fixtures / "fsdp4/ranks")._repr_html_()
    assert shown.startswith("<iframe") and "sandbox" in shown and "S(0)" in shown


def test_objects_are_python_values(tmp_path):
    value = {
        "lr": 0.1, "big": 1 << 80, "text": "ä", "none": None, "tuple": (1, [2.5, "x"]), "set": {1, 2}, "bytes": b"ab",
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "array": np.arange(3), "in_tuple": (torch.ones(2), 1),
        "nested": {"deep": {"flag": True}},
    }  # fmt: skip
    torch.save({**value, "w": torch.ones(3)}, tmp_path / "x.pt")
    objects = dtshard.open(tmp_path / "x.pt").objects
    for name in ["lr", "big", "text", "none", "tuple", "set", "bytes", "size", "dtype"]:
        assert objects[name] == value[name] and type(objects[name]) is type(value[name]), name
    assert np.array_equal(objects["array"], value["array"])
    assert torch.equal(objects["in_tuple"][0], torch.ones(2)) and objects["in_tuple"][1] == 1
    assert objects["nested.deep.flag"] is True


class Custom:
    def __init__(self):
        self.number = 3


def test_object_of_an_unknown_class_is_an_error_only_where_it_is_needed(tmp_path):
    torch.save({"w": torch.ones(1), "custom": Custom()}, tmp_path / "x.pt")
    checkpoint = dtshard.open(tmp_path / "x.pt")
    assert list(checkpoint) == ["w"] and list(checkpoint.objects) == ["custom"]
    with pytest.raises(dtshard.Error, match=r"test_open\.Custom"):
        checkpoint.objects["custom"]
    state = {"w": torch.zeros(1)}
    dtshard.load_into(state, tmp_path / "x.pt")
    assert state["w"].item() == 1
    with pytest.raises(dtshard.Error, match=r"test_open\.Custom"):
        dtshard.load_into({**state, "custom": None}, tmp_path / "x.pt")


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('was run')",))


def test_hostile_pickle_is_not_run(tmp_path):
    torch.save({"w": torch.ones(1), "evil": Evil()}, tmp_path / "x.pt", pickle_protocol=pickle.DEFAULT_PROTOCOL)
    with pytest.raises(dtshard.Error, match="exec"):
        dtshard.open(tmp_path / "x.pt").objects["evil"]


def test_value_of_each_rank_is_its_own(tmp_path):
    for rank in range(2):
        state = {"w": torch.ones(1), "seed": 10 + rank, "rng": torch.tensor([20 + rank])}
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    for rank, stored in [(0, 0), (1, 1), (2, 0)]:
        checkpoint = dtshard.open(tmp_path, rank=rank)
        assert checkpoint.objects["seed"] == 10 + stored
        assert checkpoint["rng"].torch().tolist() == [20 + stored]


def test_mapped_array_is_of_the_file_that_was_opened(tmp_path, monkeypatch):
    value = torch.arange(1000, dtype=torch.float32)
    save_file({"x": value}, tmp_path / "x.safetensors")
    monkeypatch.chdir(tmp_path)
    checkpoint = dtshard.open("x.safetensors")
    (tmp_path / "other").mkdir()
    save_file({"x": value + 1}, tmp_path / "other" / "x.safetensors")
    monkeypatch.chdir(tmp_path / "other")
    assert np.array_equal(checkpoint["x"].numpy(mmap=True), value.numpy())
    os.replace(tmp_path / "other" / "x.safetensors", tmp_path / "x.safetensors")
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(checkpoint["x"].numpy(mmap=True), value.numpy())


def test_mapped_copies_are_compared_and_chosen_by_rank(tmp_path):
    for rank in range(2):
        state = {"b": torch.tensor([1.0, rank]), "rng": torch.tensor([20 + rank])}
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    checkpoint = dtshard.open(tmp_path, rank=1)
    assert checkpoint["rng"].numpy(mmap=True).tolist() == [21]
    with pytest.raises(dtshard.Error, match="differs between"):
        checkpoint["b"].numpy(mmap=True)


def test_forked_process_opens_a_checkpoint_of_its_own(fixtures):
    dtshard.open(fixtures / "titan")
    child = os.fork()
    if child == 0:
        tensor = next(iter(dtshard.open(fixtures / "titan").values()))
        os._exit(7 if tensor.numpy().shape == tensor.shape else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_object_of_an_unknown_class_inside_a_tuple_is_an_error(tmp_path):
    torch.save({"w": torch.ones(1), "e": (1, (Evil(),))}, tmp_path / "x.pt")
    with pytest.raises(dtshard.Error, match="exec"):
        dtshard.open(tmp_path / "x.pt").objects["e"]


def test_threads_may_read_one_checkpoint_at_once(tmp_path):
    weights = {f"w{i}": torch.full((64, 64), float(i)) for i in range(40)}
    for rank in range(3):
        torch.save(weights, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    for _ in range(5):
        checkpoint = dtshard.open(tmp_path, threads=2)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = pool.map(lambda name: checkpoint[name].numpy().mean(), weights)
            assert list(found) == list(range(40))


def test_weight_that_differs_between_ranks_is_an_error(tmp_path):
    for rank in range(2):
        torch.save({"w": torch.ones(3), "b": torch.tensor([1.0, rank])}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    checkpoint = dtshard.open(tmp_path)
    assert checkpoint["w"].numpy().tolist() == [1, 1, 1]
    with pytest.raises(dtshard.Error, match=r"b: .*differs between") as raised:
        checkpoint["b"][:1].numpy()
    assert raised.value.tensor == "b"


def test_errors_have_fields(fixtures, tmp_path):
    with pytest.raises(dtshard.Error, match="cannot open") as raised:
        dtshard.open(tmp_path / "absent")
    assert raised.value.kind == "io" and raised.value.file == str(tmp_path / "absent")
    assert raised.value.__notes__ == [f"hint: {raised.value.hint}"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
        dtshard.open(fixtures / "titan", bogus=1)
    with pytest.raises(dtshard.Error, match="threads"):
        dtshard.open(fixtures / "titan", threads="many")
    with pytest.raises(dtshard.Error, match="dtype has no effect on reading"):
        dtshard.open(fixtures / "titan", dtype="bf16")
    with pytest.raises(dtshard.Error, match="matches"):
        dtshard.open(fixtures / "titan", include="no.such.name")
    with pytest.raises(KeyError, match=r"the nearest are .*model\.norm\.weight"):
        dtshard.open(fixtures / "titan")["model.norm.weigth"]


def test_truncated_file_is_an_error(tmp_path):
    save_file({"x": torch.ones(1000, 1000)}, tmp_path / "x.safetensors")
    checkpoint = dtshard.open(tmp_path / "x.safetensors")
    with open(tmp_path / "x.safetensors", "r+b") as file:
        file.truncate(1_000_000)
    with pytest.raises(dtshard.Error) as raised:
        checkpoint["x"].numpy()
    assert raised.value.file == str(tmp_path / "x.safetensors")


def test_reading_in_a_forked_process_is_an_error_and_does_not_hang(fixtures):
    checkpoint = dtshard.open(fixtures / "titan")
    tensor = next(iter(checkpoint.values()))
    child = os.fork()
    if child == 0:
        try:
            tensor.numpy()
        except dtshard.Error as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


INTERRUPTED = """
import signal, sys, dtshard
# A background process of a shell without job control starts with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
def progress(done, total):
    print(done, flush=True)
try:
    # Part 0 of 2 waits for part 1, which never comes.
    dtshard.convert("consolidate", sys.argv[1], sys.argv[2], part=0, parts=2, progress=progress)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_interrupt_stops_a_conversion_and_python_goes_on(fixtures, tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, fixtures / "llama_tiny/ranks", tmp_path / "out"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate()
    assert process.returncode == 0 and rest.splitlines()[-1] == "interrupted"
    assert not (tmp_path / "out").exists()
