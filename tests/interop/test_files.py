"""`dtshard unshard` and `consolidate`: files that torch.load and safetensors open."""

import argparse
import collections
import json
import os
import subprocess
import sys
import zipfile

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import common
import generate

EACH = pytest.mark.parametrize("case,kind", common.SOURCES)
TORCH_FILES = ["model", "objects", "trainer"]


def load_all_ways(path):
    """Loads a torch file in every way, asserts equal results, and returns one of them."""
    with zipfile.ZipFile(path) as z:
        assert z.testzip() is None
    subprocess.run([sys.executable, "-m", "zipfile", "-t", path], check=True, capture_output=True)
    trees = [torch.load(path, weights_only=weights_only, mmap=mmap)
             for weights_only, mmap in ((False, False), (True, False), (True, True))]
    common.assert_equal(trees[1], trees[0])
    common.assert_equal(trees[2], trees[0])
    return trees[2]


def storages(tree):
    """Returns the sets of names whose tensors share a storage, without sets of a single name."""
    found = collections.defaultdict(set)
    for name, t in generate.leaves(tree):
        if t.untyped_storage().nbytes():
            found[t.untyped_storage().data_ptr()].add(name)
    return {frozenset(names) for names in found.values() if len(names) > 1}


@EACH
def test_unshard_gives_the_nested_tree(tmp_path, case, kind):
    """The file has the nested tree of a DCP folder, or of the series `model` of rank files."""
    path = str(tmp_path / "whole.pt")
    common.dtshard("unshard", common.source(case, kind), path)
    expected = common.expected_tree(case, kind, str(tmp_path)) if kind == "dcp" else common.ranks_tree(case)["model"]
    common.assert_equal(load_all_ways(path), expected)


@pytest.mark.parametrize("case", [c for c in common.cases("ranks") if c not in common.ONE_SERIES])
def test_unshard_gives_all_series(tmp_path, case):
    path = str(tmp_path / "whole.pt")
    common.dtshard("unshard", common.source(case, "ranks"), path, "--series", "all")
    common.assert_equal(load_all_ways(path), common.ranks_tree(case), order=False)


@pytest.mark.parametrize("stem", TORCH_FILES)
def test_unshard_keeps_the_objects_of_a_torch_file(tmp_path, stem):
    """A torch file that is converted keeps containers, tied tensors, Python values and the versions in `_metadata`."""
    original = os.path.join(common.FIXTURES, "torch_file", f"{stem}.pt")
    path = str(tmp_path / "again.pt")
    common.dtshard("unshard", original, path)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint
    assert set(unsafe(path)) <= set(unsafe(original))
    with torch.serialization.safe_globals([argparse.Namespace, bytes, frozenset, complex]):
        found = load_all_ways(path)
    expected = torch.load(original, weights_only=False)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):  # an nn.Parameter becomes a tensor
            expected[key] = value.detach()
    common.assert_equal(found, expected)
    tensors = common.truth("torch_file", f"{stem}.truth")[1]
    assert {n for n, _ in generate.leaves(found)} == set(tensors)
    for name, t in generate.leaves(found):
        assert generate.same(t, tensors[name]), name


@pytest.mark.xfail(strict=True, reason="requires_grad and nn.Parameter are not kept yet")
def test_parameters_stay_parameters(tmp_path):
    path = str(tmp_path / "again.pt")
    common.dtshard("unshard", os.path.join(common.FIXTURES, "torch_file", "objects.pt"), path)
    found = torch.load(path, weights_only=False)
    assert type(found["param"]) is type(found["param_frozen"]) is torch.nn.Parameter
    assert [found[k].requires_grad for k in ("param", "param_frozen", "grad")] == [True, False, True]


def test_ties_are_kept(tmp_path):
    """Tied names stay tied."""
    path = str(tmp_path / "again.pt")
    common.dtshard("unshard", os.path.join(common.FIXTURES, "torch_file", "model.pt"), path)
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        for a, b in (("embed.weight", "head.weight"), ("same.a", "same.b")):
            assert found[a].data_ptr() == found[b].data_ptr(), (a, b)
        assert {"embed.weight", "head.weight"} in storages(found)
    size = os.path.getsize(path)
    assert size < 2 * os.path.getsize(os.path.join(common.FIXTURES, "torch_file", "model.pt"))


def test_untied_tensors_have_separate_storages(tmp_path):
    """Tensors with separate storages keep them, so writing to one does not change another."""
    for stem in TORCH_FILES:
        original = os.path.join(common.FIXTURES, "torch_file", f"{stem}.pt")
        path = str(tmp_path / f"{stem}.pt")
        common.dtshard("unshard", original, path)
        before, after = storages(torch.load(original, weights_only=False)), storages(torch.load(path, weights_only=False))
        for group in after:
            assert any(group <= one for one in before), set(group)


@pytest.mark.parametrize("version", sorted(os.listdir(os.path.join(common.FIXTURES, "compat"))))
def test_unshard_reads_files_of_other_releases(tmp_path, version):
    """Files of other PyTorch releases are unsharded."""
    root = os.path.join("compat", version)
    for case in sorted(os.listdir(os.path.join(common.FIXTURES, root))):
        if case == "torch_file":
            _, tensors = common.truth(os.path.join(root, case), "model.truth")
            sources = ["model.pt"]
        else:
            _, tensors = common.truth(os.path.join(root, case))
            sources = [k for k in ("dcp", "ranks") if os.path.isdir(os.path.join(common.FIXTURES, root, case, k))]
        for kind in sources:
            path = str(tmp_path / f"{case}-{kind}.pt")
            common.dtshard("unshard", os.path.join(common.FIXTURES, root, case, kind), path)
            found = dict(generate.leaves(load_all_ways(path)))
            prefix = "model." if kind == "ranks" else ""
            wanted = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            common.assert_equal(found, wanted, order=False)


# ---------------------------------------------------------------------------------------------------
# consolidate

def read_folder(folder):
    """Returns the tensors of a safetensors folder as loaders read it: by the index, or the one file."""
    index = f"{folder}/model.safetensors.index.json"
    if not os.path.exists(index):
        return load_file(f"{folder}/model.safetensors")
    with open(index) as f:
        info = json.load(f)
    found = {}
    for name, file in info["weight_map"].items():
        with safe_open(f"{folder}/{file}", "pt") as f:
            found[name] = f.get_tensor(name)
            assert f.metadata() == {"format": "pt"}
    in_files = set()
    for file in set(info["weight_map"].values()):
        in_files |= set(load_file(f"{folder}/{file}"))
    assert in_files == set(found)
    assert info["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    return found


def model_of(case, kind):
    info, tensors = common.truth(case)
    left_out = info.get("not_in_dcp", ()) if kind == "dcp" else ()
    return {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.") and n not in left_out}


@EACH
def test_consolidate_gives_the_model_in_one_file_or_many(tmp_path, case, kind):
    """One file, or several with an index, have the model with its own names."""
    expected = model_of(case, kind)
    common.dtshard("consolidate", common.source(case, kind), tmp_path / "one")
    common.assert_equal(read_folder(tmp_path / "one"), expected, order=False)
    common.dtshard("consolidate", common.source(case, kind), tmp_path / "many", "--max-shard-size", "48B")
    files = [f for f in os.listdir(tmp_path / "many") if f.endswith(".safetensors")]
    assert len(files) > 1
    common.assert_equal(read_folder(tmp_path / "many"), expected, order=False)
    common.dtshard("consolidate", common.source(case, kind), tmp_path / "x.safetensors")
    common.assert_equal(load_file(tmp_path / "x.safetensors"), expected, order=False)
    with safe_open(tmp_path / "x.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}


@pytest.mark.parametrize("kind", ["dcp", "ranks"])
def test_consolidate_everything_gives_every_tensor(tmp_path, kind):
    """Every tensor has its full name."""
    if kind == "dcp":
        expected = dict(common.truth("fsdp4")[1])
    else:
        expected = dict(generate.leaves(common.ranks_tree("fsdp4")))
    common.dtshard("consolidate", common.source("fsdp4", kind), tmp_path / "all", "--everything", "--series", "all")
    common.assert_equal(read_folder(tmp_path / "all"), expected, order=False)


def test_consolidate_converts_a_torch_file(tmp_path):
    """Only the model of a training loop's file is written, without the prefix `model.`."""
    info, tensors = common.truth("torch_file", "trainer.truth")
    common.dtshard("consolidate", os.path.join(common.FIXTURES, "torch_file", "trainer.pt"), tmp_path / "x")
    expected = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    common.assert_equal(read_folder(tmp_path / "x"), expected, order=False)


@pytest.mark.parametrize("part,stem", [("single", "truth"), ("sharded", "sharded.truth")])
def test_consolidate_reads_safetensors(tmp_path, part, stem):
    _, tensors = common.truth("safetensors", stem)
    common.dtshard("consolidate", os.path.join(common.FIXTURES, "safetensors", part), tmp_path / "x")
    common.assert_equal(read_folder(tmp_path / "x"), dict(tensors), order=False)


def test_consolidate_copies_the_config(tmp_path):
    common.dtshard("consolidate", common.source("llama_tiny", "ranks"), tmp_path / "x")
    with open(tmp_path / "x" / "config.json") as f:
        assert json.load(f) == generate.LLAMA_CONFIG


@EACH
def test_safetensors_converted_to_torch_keeps_the_model(tmp_path, case, kind):
    """A conversion through safetensors to a torch file keeps the model."""
    common.dtshard("consolidate", common.source(case, kind), tmp_path / "x")
    common.dtshard("unshard", tmp_path / "x", tmp_path / "y.pt")
    common.assert_equal(load_all_ways(str(tmp_path / "y.pt")), model_of(case, kind), order=False)
