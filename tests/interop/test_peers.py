"""Defects of other converters, including PyTorch's own (measured with 2.15), that dtshard does not have.

Each test names the defect. If data is missing or wrong, dtshard returns an error code and writes no output; it never writes
shorter tensors or zeros.
"""

import json
import os
import pickle
import re
import shutil
import zipfile

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file

import common
import generate
import ranks

VERBS = {
    "consolidate": ["consolidate"], "unshard": ["unshard"],
    "reshard": ["reshard", "--to", "dcp", "--mesh", "fsdp=2", "--placements", "S(0)"],
}
VERB = pytest.mark.parametrize("verb", VERBS)


def convert(verb, source, target):
    first, *options = VERBS[verb]
    return common.run(first, source, target, *options)


def refuse(verb, source, tmp_path, *words):
    """Asserts exit code 2, a message with these words, and nothing left behind."""
    before = set(os.listdir(tmp_path))
    done = convert(verb, source, tmp_path / "refused")
    assert done.returncode == 2, done.stderr
    assert re.search("^error: ", done.stderr, re.M) and not done.stdout
    for text in words:
        assert text in done.stderr, done.stderr
    assert set(os.listdir(tmp_path)) == before


def consolidated(source, tmp_path, *options):
    common.dtshard("consolidate", source, tmp_path / "x.safetensors", *options)
    return load_file(tmp_path / "x.safetensors")


def copy(source, tmp_path):
    return shutil.copytree(source, tmp_path / "copy")


# ---------------------------------------------------------------------------------------------------
# a missing source: format_utils prints "Skipping conversion." and exits 0

@VERB
def test_missing_source_is_refused(tmp_path, verb):
    refuse(verb, tmp_path / "nowhere", tmp_path, "nowhere")


def test_missing_source_of_verify_is_refused(tmp_path):
    assert common.run("verify", tmp_path / "nowhere").returncode == 2


# ---------------------------------------------------------------------------------------------------
# a missing shard: others write zeros for the first shard and a shorter tensor for the last, and exit 0

@VERB
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("kind", ["dcp", "ranks"])
def test_missing_shard_is_refused(tmp_path, verb, kind, rank):
    folder = copy(common.source("fsdp4", kind), tmp_path)
    name = f"__{rank}_0.distcp" if kind == "dcp" else f"model_world_size_4_rank_{rank}.pt"
    os.remove(folder / name)
    refuse(verb, folder, tmp_path, name if kind == "dcp" else f"rank {rank}")


@VERB
@pytest.mark.parametrize("number", [1, 2, 3])
def test_missing_file_of_an_index_is_refused(tmp_path, verb, number):
    folder = copy(f"{common.FIXTURES}/safetensors/sharded", tmp_path)
    name = f"model-{number:05}-of-00003.safetensors"
    os.remove(folder / name)
    refuse(verb, folder, tmp_path, name)


@pytest.fixture(scope="session")
def hf_shards(tmp_path_factory):
    """Returns a folder that HuggingFaceStorageWriter wrote on three ranks, and consolidate_safetensors_files reads."""
    folder = tmp_path_factory.mktemp("hf")
    common.run_ranks(ranks.save_hf, 3, folder, str(folder / "shards"))
    return folder / "shards"


def test_hugging_face_shards_keep_0d_and_integers(hf_shards, tmp_path):
    """consolidate_safetensors_files writes 0-d tensors as 0.0, and raises TypeError for integers; dtshard keeps both."""
    expected = {name: generate.values(name, *spec) for name, spec in ranks.HF_SHAPES.items()}
    common.assert_equal(consolidated(hf_shards, tmp_path), expected, order=False)


@pytest.mark.parametrize("rank", [1, 2])
def test_missing_hugging_face_shard_is_refused(hf_shards, tmp_path, rank):
    """The other files show that the first or the middle one is missing. A missing last file cannot be noticed, because no file
    records the number of files."""
    folder = copy(hf_shards, tmp_path)
    (name,) = (n for n in os.listdir(folder) if n.startswith(f"shard-{rank:05}"))
    os.remove(folder / name)
    refuse("consolidate", folder, tmp_path)


# ---------------------------------------------------------------------------------------------------
# tensors, keys and dtypes that are kept

@pytest.mark.parametrize("kind", ["dcp", "ranks"])
def test_0d_and_integer_tensors_are_kept(tmp_path, kind):
    """Another converter wrote a 0-d tensor as zero, and raised TypeError for an integer tensor."""
    _, tensors = common.truth("odd4")
    found = consolidated(common.source("odd4", kind), tmp_path)
    for name in ("scalar.f32", "scalar.bf16", *(f"dtype.{d}" for d in ("i8", "u8", "i32", "i64", "bool"))):
        common.assert_equal(found[name], tensors[f"model.{name}"])
    assert found["scalar.f32"].item() != 0
    seen = consolidated(common.source("fsdp4", kind), tmp_path / "2")["seen"]
    common.assert_equal(seen, common.truth("fsdp4")[1]["model.seen"])


def test_keys_missing_from_the_index_are_refused(tmp_path):
    """Another converter silently dropped a key that the index does not have."""
    folder = copy(f"{common.FIXTURES}/safetensors/sharded", tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["lm_head.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse("consolidate", folder, tmp_path, "lm_head.weight")


def test_keys_of_the_index_without_a_tensor_are_refused(tmp_path):
    """Another converter wrote an unreadable file for a key of the index that no file has."""
    folder = copy(f"{common.FIXTURES}/safetensors/sharded", tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra"] = "model-00001-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse("consolidate", folder, tmp_path, "model.extra")


@pytest.mark.parametrize("rows", [3, 5, 8, 10])
def test_every_key_is_in_the_indexed_file(tmp_path, rows):
    """Whatever the size of the tensors, each key is in the index once, and in the file that the index names."""
    state = {f"layers.{i}.w": generate.values(f"w{i}", (rows, 4)) for i in range(12)} | {"n": torch.tensor(7)}
    torch.save(state, tmp_path / "x.pt")
    common.dtshard("consolidate", tmp_path / "x.pt", tmp_path / "x", "--max-shard-size", "100B")
    weight_map = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(state)
    for name, file in weight_map.items():
        with safe_open(tmp_path / "x" / file, "pt") as f:
            common.assert_equal(f.get_tensor(name), state[name])


def test_interleaved_rows_of_strided_shards_are_kept(tmp_path):
    """[Shard(0), _StridedShard(0, sf=2)] on 2x2: rank (0, 1) has rows 1 and 3; PyTorch records one box, 2 rows from 1."""
    info, tensors = common.truth("odd4")
    assert info["layout"]["model.interleaved.s0_s2"]["placements"] == "S(0),_S(0,2)"
    found = consolidated(common.source("odd4", "ranks"), tmp_path)
    names = [n for n in tensors if "interleaved" in n or "strided" in n]
    assert len(names) >= 8
    for name in names:
        common.assert_equal(found[name.removeprefix("model.")], tensors[name])


def test_replicated_plain_tensors_are_not_concatenated(tmp_path):
    """Another converter concatenated the equal norms of the ranks."""
    _, tensors = common.truth("tp2")
    found = consolidated(common.source("tp2", "ranks"), tmp_path)
    common.assert_equal(found["norm.weight"], tensors["model.norm.weight"])


def test_dtypes_are_kept_without_dtype_option(tmp_path):
    """Another converter cast all tensors to bf16."""
    found = consolidated(common.source("replicated_plain", "ranks"), tmp_path)
    assert {found[n].dtype for n in ("w", "b", "ids", "mask", "scalar")} == {
        torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64}


@pytest.fixture
def tied(tmp_path):
    """Writes a torch file of a module with one weight under two names: (path, its tensors)."""
    state = generate.fill(generate.TiedModel(), generate.Truth()).state_dict()
    torch.save(state, tmp_path / "tied.pt")
    return tmp_path / "tied.pt", state


def test_tied_weights_are_written_under_every_name(tmp_path, tied):
    """Tied tensors are written under every name, so that loaders find all names; in a torch file, they share a storage."""
    path, state = tied
    common.assert_equal(consolidated(path, tmp_path), dict(state), order=False)
    common.dtshard("unshard", path, tmp_path / "y.pt")
    found = torch.load(tmp_path / "y.pt")
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()


def test_tied_drop_writes_one_name(tmp_path, tied):
    """--tied drop writes one name, and records the other one as safetensors' save_model does; verify reads this record."""
    path, state = tied
    found = consolidated(path, tmp_path, "--tied", "drop")
    (alias,) = set(state) - set(found)
    (kept,) = {"embed.weight", "head.weight"} - {alias}
    with safe_open(tmp_path / "x.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt", alias: kept}
    module = generate.TiedModel()
    assert load_model(module, tmp_path / "x.safetensors") == (set(), [])
    common.assert_equal(dict(module.state_dict()), dict(state))
    common.dtshard("verify", path, tmp_path / "x.safetensors")


# ---------------------------------------------------------------------------------------------------
# damage: other converters do not notice one flipped byte in a .distcp file

def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def damaged(kind, tmp_path):
    """Returns a copy with one byte of a weight changed, in the middle of its record."""
    folder = copy(common.source("fsdp4", kind), tmp_path)
    if kind == "ranks":
        path = folder / "model_world_size_4_rank_1.pt"
        start, data = 0, path.read_bytes()
    else:
        with open(folder / ".metadata", "rb") as f:
            found = pickle.load(f)
        info = next(i for key, i in found.storage_data.items() if key.fqn == "model.blocks.0.wq.weight" and i.length)
        path, start = folder / info.relative_path, info.offset
        data = path.read_bytes()[start:start + info.length]
    part = tmp_path / "part.zip"
    part.write_bytes(data)
    with zipfile.ZipFile(part) as z:
        record = max((i for i in z.infolist() if "/data/" in i.filename), key=lambda i: i.file_size)
        header = data[record.header_offset:]
        begin = record.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    os.remove(part)
    flip(path, start + begin + record.file_size // 2)
    return folder, path.name


@pytest.mark.parametrize("kind", ["dcp", "ranks"])
def test_flipped_byte_is_found_by_verify(tmp_path, kind):
    folder, name = damaged(kind, tmp_path)
    done = common.run("verify", folder)
    assert done.returncode == 1
    assert name in done.stdout + done.stderr


@VERB
@pytest.mark.parametrize("kind", ["dcp", "ranks"])
def test_flipped_byte_is_found_by_conversions(tmp_path, verb, kind):
    """The record is copied whole, so its checksum is checked; DST is not written."""
    folder, name = damaged(kind, tmp_path)
    refuse(verb, folder, tmp_path, name)


@VERB
@pytest.mark.parametrize("kind", ["dcp", "ranks"])
def test_truncated_file_is_refused(tmp_path, verb, kind):
    folder = copy(common.source("fsdp4", kind), tmp_path)
    name = "__1_0.distcp" if kind == "dcp" else "model_world_size_4_rank_1.pt"
    with open(folder / name, "r+b") as f:
        f.truncate(os.path.getsize(folder / name) - 700)
    refuse(verb, folder, tmp_path, name)


def test_flipped_byte_is_found_against_another_checkpoint(tmp_path):
    """Safetensors files have no checksums, but a comparison with another checkpoint finds the element."""
    path = tmp_path / "x.safetensors"
    state = {"w": generate.values("w", (64, 8))}
    save_file(state, tmp_path / "good.safetensors")
    state["w"][5, 3] += 1
    save_file(state, path)
    done = common.run("verify", path, tmp_path / "good.safetensors")
    assert done.returncode == 1
    assert re.search(r"\bw: .*(\b43\b|\b5, 3\b)", done.stdout + done.stderr), done.stdout
