"""Flat parameters of FSDP1: PyTorch loads the files that dtshard wrote, rank by rank, and continues training."""

import itertools
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.testing._internal.distributed.fake_pg import FakeStore

import common
import fsdp1
import generate
import generate_fsdp1

# how FSDP1 wraps the model of a case; without an entry: FULL_SHARD in f32
MODELS = {"flat_mixed": {"mixed": True}, "flat_bf16": {"dtype": "bf16"}, "flat_hybrid": {"strategy": "hybrid"},
          "flat_none": {"strategy": "none"}}
RANKS = {"flat2": 2, "flat3": 3, "flat4": 4, "flat_mixed": 2, "flat_bf16": 2, "flat_hybrid": 4, "flat_none": 2}
FOLDERS = [*((case, folder) for case in RANKS for folder in ("views", "flat")), ("flat2", "groups"), ("flat2", "one_file")]
LOCAL = FOLDERS[:12] + FOLDERS[14:]


def resume(tmp_path, folder, case, ranks, views, **more):
    job = {"folder": str(folder), "truth": case, "views": views, **MODELS.get(case, {}), **more}
    common.run_ranks(fsdp1.resume, ranks, tmp_path, job)


# ---------------------------------------------------------------------------------------------------
# the harness itself, without dtshard

@pytest.mark.parametrize("case,folder", FOLDERS)
def test_pytorch_loads_its_own_flat_files(tmp_path, case, folder):
    resume(tmp_path, common.source(case, folder), case, RANKS[case], folder != "flat",
           groups=folder in ("groups", "one_file"), again=str(tmp_path / "again"))
    group = 2 if case == "flat_hybrid" else RANKS[case]
    load = lambda path: fsdp1.load_all(path, RANKS[case], group)
    for again, own in zip(load(tmp_path / "again"), load(common.source(case, folder))):
        fsdp1.assert_same_files(again, own)


@pytest.mark.parametrize("case,folder,ranks", [("flat2", "sharded", 2), ("fsdp1_sharded", "ranks", 4)])
def test_pytorch_loads_its_own_sharded_files(tmp_path, case, folder, ranks):
    common.run_ranks(fsdp1.resume_sharded, ranks, tmp_path, {
        "folder": common.source(case, folder), "truth": case, "views": True, "by_rows": True})


# ---------------------------------------------------------------------------------------------------
# dtshard

def flat_layout(case, folder):
    """Returns the path of the layout that `flat_layout(model, optimizer)` of the live model wrote."""
    return common.source(case, f"{folder}.flat_layout.json")


def flatten(source, out, ranks, views, layout, *more):
    common.dtshard("flatten", source, out, "--world-size", ranks, "--flat-layout", layout,
                   f"--use-orig-params={str(views).lower()}", *more)
    return out


def whole_model(case):
    return {name.removeprefix("model."): t for name, t in common.truth(case)[1].items() if name.startswith("model.")}


def assert_model(found, case):
    expected = whole_model(case)
    assert set(found) == set(expected), set(found) ^ set(expected)
    assert all(generate.same(found[name], t) for name, t in expected.items())


@pytest.mark.parametrize("source,ranks,views_from,views_to", [
    (*move, *views) for move in (("flat2", 3), ("flat4", 2), ("flat3", 4))
    for views in itertools.product((True, False), repeat=2)])
def test_flatten_to_other_ranks_equals_files_of_pytorch(tmp_path, source, ranks, views_from, views_to):
    """The files equal those that PyTorch saves on this number of ranks, and training resumes from them."""
    folder, target = ("views" if views else "flat" for views in (views_from, views_to))
    # Without use_orig_params, files do not record in which order the optimizer would number the parameters of a unit.
    order = ["--like", common.source("flat2", "full/model.pt")] if views_to and not views_from else []
    out = flatten(common.source(source, folder), tmp_path / "out", ranks, views_to, flat_layout(source, folder), *order)
    for found, own in zip(fsdp1.load_all(out, ranks), fsdp1.load_all(common.source(f"flat{ranks}", target), ranks)):
        fsdp1.assert_same_files(found, own, order=False)
    resume(tmp_path, out, source, ranks, views_to, order=False)


@pytest.mark.parametrize("case,folder,ranks", [
    ("flat_mixed", "views", 3), ("flat_mixed", "flat", 3), ("flat_bf16", "views", 3), ("flat_bf16", "flat", 4),
    ("flat2", "groups", 3), ("flat2", "one_file", 4)])
def test_flatten_keeps_alignment_and_parameter_groups(tmp_path, case, folder, ranks):
    """The alignment in flat parameters stays that of the dtype of forward; parameter groups stay separate."""
    views = folder != "flat"
    out = flatten(common.source(case, folder), tmp_path / "out", ranks, views, flat_layout(case, folder))
    resume(tmp_path, out, case, ranks, views, order=False, groups=folder in ("groups", "one_file"))


@pytest.mark.parametrize("folder", ["views", "flat"])
def test_hybrid_sharding_and_back_resumes(tmp_path, folder):
    """Converts from full to hybrid sharding, and back to full sharding on another number of ranks."""
    views = folder == "views"
    hybrid = flatten(common.source("flat2", folder), tmp_path / "hybrid", 4, views, flat_layout("flat2", folder),
                     "--strategy", "hybrid-shard", "--shard-group-size", "2")
    for found, own in zip(fsdp1.load_all(hybrid, 4, 2), fsdp1.load_all(common.source("flat_hybrid", folder), 4, 2)):
        fsdp1.assert_same_files(found, own, order=False)
    resume(tmp_path, hybrid, "flat_hybrid", 4, views, order=False)
    full = flatten(hybrid, tmp_path / "full", 3, views, flat_layout("flat_hybrid", folder), "--strategy", "full-shard")
    (tmp_path / "rendezvous").unlink(missing_ok=True)
    resume(tmp_path, full, "flat2", 3, views, order=False)


OUTSIDE = {"flat_ignored": {"ignored": ["proj", "layers.1.norm"]}, "flat_roots": {"root": False}}


@pytest.mark.parametrize("case", OUTSIDE)
@pytest.mark.parametrize("views_from,views_to", itertools.product((True, False), repeat=2))
def test_parameters_outside_units_keep_their_state(tmp_path, case, views_from, views_to):
    """`ignored_modules`, or several FSDP roots: to 3 ranks and back, with unshard and flatten, or with one flatten."""
    source, target = ("views" if views else "flat" for views in (views_from, views_to))
    own = common.source(case, source)
    if views_from == views_to:
        three = flatten(own, tmp_path / "three", 3, views_to, flat_layout(case, source))
        whole = tmp_path / "whole.pt"
        common.dtshard("unshard", own, whole, "--series", "all", "--flat-layout", flat_layout(case, source))
        common.dtshard("flatten", whole, tmp_path / "back", "--layout", flat_layout(case, target), "--world-size", 2)
        folders = [flatten(three, tmp_path / "two", 2, views_to, tmp_path / "three/flat_layout.json"), tmp_path / "back"]
    else:
        folders = [flatten(own, tmp_path / "out", 2, views_to, flat_layout(case, source))]
    for out in folders:
        for found, expected in zip(fsdp1.load_all(out, 2), fsdp1.load_all(common.source(case, target), 2)):
            fsdp1.assert_same_files(found, expected, order=False)
        common.run_ranks(fsdp1.load_outside, 2, tmp_path, {
            "folder": str(out), "truth": case, "views": views_to, **OUTSIDE[case]})
        (tmp_path / "rendezvous").unlink(missing_ok=True)


@pytest.mark.parametrize("case", OUTSIDE)
@pytest.mark.parametrize("mesh", [["--mesh", "fsdp=2"], []])
def test_plain_parameters_beside_sharded_tensors_stay_plain(tmp_path, case, mesh):
    """SHARDED_STATE_DICT has parameters outside all units as plain tensors: FSDP1 loads model and optimizer."""
    common.dtshard("reshard", common.source(case, "sharded"), tmp_path / "three", "--mesh", "fsdp=3")
    common.dtshard("reshard", tmp_path / "three" if mesh else common.source(case, "sharded"), tmp_path / "out", *mesh)
    common.run_ranks(fsdp1.resume_sharded, 2, tmp_path, {
        "folder": str(tmp_path / "out"), "truth": case, "views": True, "by_rows": True, **OUTSIDE[case]})


@pytest.mark.parametrize("folder", ["views", "flat"])
@pytest.mark.parametrize("way", ["like", "flat_layout", "fill", "itself", "flatten"])
def test_files_of_no_shard_are_written_back(tmp_path, folder, way):
    """Whole tensors, or the files themselves, are written as files that a job with NO_SHARD loads and resumes from."""
    bare, layout = common.source("flat_none", folder), flat_layout("flat_none", folder)
    own = tmp_path / "own"
    shutil.copytree(bare, own)
    shutil.copy(layout, own / "flat_layout.json")
    whole, out = tmp_path / "whole.pt", tmp_path / "out"
    common.dtshard("unshard", own, whole, "--series", "all")
    common.dtshard(*{
        "like": ["reshard", whole, out, "--like", own],
        "flat_layout": ["reshard", whole, out, "--like", bare, "--flat-layout", layout],
        "fill": ["reshard", whole, out, "--fill-from", own],
        "itself": ["reshard", own, out],
        "flatten": ["flatten", whole, out, "--layout", layout, "--strategy", "no-shard"],
    }[way])
    resume(tmp_path, out, "flat_none", 2, folder == "views", order=False)
    for found, own in zip(fsdp1.load_all(out, 2), fsdp1.load_all(bare, 2)):
        fsdp1.assert_same_files(found, own, order=False)


@pytest.mark.parametrize("folder", ["views", "flat"])
@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_flatten_of_whole_tensors_resumes(tmp_path, kind, folder):
    """A model, or model and optimizer, saved without FSDP1; the flat layout gives the order, not the names."""
    info, tensors = common.truth("flat2")
    if kind == "safetensors":
        source = tmp_path / "model.safetensors"
        save_file(whole_model("flat2"), source)
    else:
        state = {fqn: {key: tensors[f"optim.state.{fqn}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
                 for fqn in generate_fsdp1.read_layout(common.source("flat2", "views"))["optimizer"][0]}
        groups = [{**common.decode(info["param_groups"]["views"])[0], "params": list(state)}]
        source = tmp_path / "dcp"
        tree = {"model": whole_model("flat2"), "optim": {"state": state, "param_groups": groups}}
        dcp.save(tree, checkpoint_id=source, no_dist=True)
    out = flatten(source, tmp_path / "out", 3, folder == "views", flat_layout("flat2", folder))
    resume(tmp_path, out, "flat2", 3, folder == "views", order=False)
    assert ("optim" in fsdp1.load_all(out, 3)[0]) == (kind == "dcp")


@pytest.mark.parametrize("case,folder", LOCAL)
def test_unshard_and_consolidate_give_the_whole_model(tmp_path, case, folder):
    """unshard and consolidate give the whole model, and verify accepts the result of flatten."""
    source, layout = common.source(case, folder), ("--flat-layout", flat_layout(case, folder))
    common.dtshard("unshard", source, tmp_path / "whole.pt", *layout)
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert_model(found["model"] if folder == "one_file" else found, case)
    common.dtshard("consolidate", source, tmp_path / "whole.safetensors", *layout)
    assert_model(load_file(tmp_path / "whole.safetensors"), case)
    out = flatten(source, tmp_path / "out", 3, folder != "flat", layout[1], "--strategy", "full-shard")
    common.dtshard("verify", source, out, *layout)


@pytest.mark.parametrize("case,folder", LOCAL[:8])
def test_flat_parameters_become_dtensors(tmp_path, case, folder):
    """Flat parameters are converted to DCP and to rank files of DTensors."""
    source, layout = common.source(case, folder), ("--flat-layout", flat_layout(case, folder))
    common.dtshard("reshard", source, tmp_path / "dcp", "--mesh", "fsdp=2", "--to", "dcp", *layout)
    found = dict(generate.leaves(common.load_nested(str(tmp_path / "dcp"))))
    assert_model({name.removeprefix("model."): t for name, t in found.items() if name.startswith("model.")}, case)
    state = {name: t for name, t in found.items() if name.startswith("optim.state.")}
    tensors = common.truth(case)[1]
    assert set(state) == {name for name in tensors if name.startswith("optim.state.")}
    assert all(generate.same(t, tensors[name]) for name, t in state.items())

    common.dtshard("reshard", source, tmp_path / "ranks", "--mesh", "fsdp=2", "--to", "torch-ranks", *layout)
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            model = torch.load(tmp_path / f"ranks/model_world_size_2_rank_{rank}.pt", weights_only=False)
            assert set(model) == set(whole_model(case))
            for name, t in whole_model(case).items():
                if name.endswith(("weight", "bias")):
                    part = generate.local_part(t, (2,), (rank,), ["S(0)"])
                    assert generate.same(model[name].to_local(), part), name
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("folder", ["views", "flat"])
def test_edited_weights_are_flattened_and_resumed(tmp_path, folder):
    """Edited whole weights are flattened with the layout of their checkpoint; the optimizer state is kept."""
    info, tensors = common.truth("flat2")
    edited = {**tensors, "model.conv.weight": tensors["model.conv.weight"] + 1, "model.tiny.bias": torch.tensor([5.0])}
    save_file({name: edited[f"model.{name}"] for name in ("conv.weight", "tiny.bias")}, tmp_path / "edited.safetensors")
    source, out = common.source("flat2", folder), tmp_path / "out"
    common.dtshard("reshard", tmp_path / "edited.safetensors", out, "--like", source, "--fill-from", source,
                   "--flat-layout", flat_layout("flat2", folder))
    for rank, files in enumerate(fsdp1.load_all(out, 2)):
        generate_fsdp1.verify_flat_rank(files["model"], files["optim"], rank, generate_fsdp1.read_layout(source), edited,
                                        info["param_groups"][folder])


@pytest.mark.parametrize("case,folder", [("flat2", "sharded"), ("fsdp1_sharded", "ranks")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_tensors_are_resharded_and_loaded_by_fsdp1(tmp_path, case, folder, ranks):
    """SHARDED_STATE_DICT: ShardedTensors stay ShardedTensors, and FSDP1 loads model and optimizer."""
    common.dtshard("reshard", common.source(case, folder), tmp_path / "out", "--mesh", f"fsdp={ranks}")
    common.run_ranks(fsdp1.resume_sharded, ranks, tmp_path, {
        "folder": str(tmp_path / "out"), "truth": case, "views": True, "by_rows": True})
