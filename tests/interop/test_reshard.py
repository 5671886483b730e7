"""`dtshard reshard ... --to dcp`, loaded by PyTorch's DCP in one process."""

import io
import os
import pickle
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata

import common
import generate

ALL = pytest.mark.parametrize("target", common.TARGETS)
EACH = pytest.mark.parametrize("case,kind", common.SOURCES)


@pytest.fixture(scope="session")
def scratch(tmp_path_factory):
    return str(tmp_path_factory.mktemp("expected"))


@EACH
@ALL
def test_loads_into_plain_tensors(resharded, case, kind, target):
    """dcp.load without a process group loads full tensors."""
    folder = resharded(case, kind, target)
    expected = common.expected_by_key(case, kind)
    entries = common.dcp_keys(folder)
    assert set(entries) == set(expected)
    state = {name: torch.zeros(e.size, dtype=e.properties.dtype) if hasattr(e, "size") else None
             for name, e in entries.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    common.assert_equal(state, expected, order=False)


@EACH
@ALL
def test_dcp_to_torch_save_gives_the_same_nested_tree(resharded, scratch, case, kind, target):
    """dcp_to_torch_save of the result gives the tree of the original, with the keys in their order."""
    expected = common.expected_tree(case, kind, scratch)
    found = common.load_nested(resharded(case, kind, target))
    common.assert_equal(found, expected)


def is_buffer(case, kind, name):
    """Returns whether a tensor is a buffer, which dtshard does not shard: it is plain in rank files that have DTensors, and has
    no optimizer state."""
    info, tensors = common.truth(case)
    layouts = info.get("layout", {})
    trained = name.startswith("optim.") or f"optim.state.{name.removeprefix('model.')}.exp_avg" in tensors
    named = {name, f"model.{name}"} & set(layouts)  # names have no prefix if there is one series
    return kind == "ranks" and bool(layouts) and not named and not trained


@EACH
@ALL
def test_metadata_has_the_classes_and_chunks_of_pytorch(resharded, case, kind, target):
    """.metadata unpickles to the classes of PyTorch, with the chunks of the layout."""
    folder = resharded(case, kind, target)
    with open(f"{folder}/.metadata", "rb") as f:
        found = pickle.load(f)
    assert type(found) is dcp_metadata.Metadata
    expected = common.expected_by_key(case, kind)
    files = set(os.listdir(folder))
    for name, entry in found.state_dict_metadata.items():
        if not isinstance(expected[name], torch.Tensor):
            assert type(entry) is dcp_metadata.BytesStorageMetadata, name
            continue
        assert type(entry) is dcp_metadata.TensorStorageMetadata, name
        assert type(entry.size) is torch.Size and type(entry.properties) is dcp_metadata.TensorProperties, name
        assert type(entry.properties.dtype) is torch.dtype and entry.properties.layout is torch.strided, name
        assert entry.properties.memory_format is torch.contiguous_format, name
        assert all(type(c.offsets) is torch.Size and type(c.sizes) is torch.Size for c in entry.chunks), name
        chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
        filled = {c for c in chunks if 0 not in c[1]}
        assert len(set(chunks)) == len(chunks), f"{name}: a chunk twice: {chunks}"
        laid_out = common.rectangles(tuple(entry.size), target)
        assert filled == (common.whole(entry.size) if is_buffer(case, kind, name) else laid_out), name
    items = {(i.fqn, i.offset) for i in found.storage_data}
    assert len(items) == len(found.storage_data)
    assert items == {(name, chunk and chunk.offsets) for name, entry in found.state_dict_metadata.items()
                     for chunk in getattr(entry, "chunks", [None])}
    for index, info in found.storage_data.items():
        assert type(index) is dcp_metadata.MetadataIndex and type(info).__name__ == "_StorageInfo"
        assert info.relative_path in files
    assert type(found.storage_meta) is dcp_metadata.StorageMeta
    if kind == "dcp":
        with open(f"{common.source(case, kind)}/.metadata", "rb") as f:
            original = pickle.load(f)
        assert found.planner_data == original.planner_data
        assert found.version == original.version
        for name, entry in original.state_dict_metadata.items():
            if hasattr(entry, "size"):
                other = found.state_dict_metadata[name]
                assert other.size == entry.size, name
                for key in ("dtype", "layout", "requires_grad", "memory_format", "pin_memory"):
                    assert getattr(other.properties, key) == getattr(entry.properties, key), (name, key)


@EACH
@ALL
def test_items_are_valid_zip_archives(resharded, case, kind, target):
    """Each item is a zip archive with correct CRCs that torch.load reads; items do not overlap."""
    folder = resharded(case, kind, target)
    with open(f"{folder}/.metadata", "rb") as f:
        found = pickle.load(f)
    taken = {}
    for index, info in found.storage_data.items():
        with open(f"{folder}/{info.relative_path}", "rb") as f:
            f.seek(info.offset)
            data = f.read(info.length)
        taken.setdefault(info.relative_path, []).append((info.offset, info.length))
        assert len(data) == info.length
        entry = found.state_dict_metadata[index.fqn]
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as z:
                assert z.testzip() is None, index
        else:
            assert not hasattr(entry, "size"), index
        value = torch.load(io.BytesIO(data), weights_only=True)
        if hasattr(entry, "size"):
            (sizes,) = {c.sizes for c in entry.chunks if c.offsets == index.offset}
            assert value.shape == sizes and value.dtype == entry.properties.dtype, index
    for file, spans in taken.items():
        end = 0
        for offset, length in sorted(spans):
            assert offset >= end, file
            end = offset + length
        assert end <= os.path.getsize(f"{folder}/{file}")


@pytest.mark.parametrize("case", [c for c in common.cases("dcp")])
def test_repeated_reshard_writes_identical_bytes(resharded, tmp_path, case):
    """Two runs write identical bytes."""
    first = resharded(case, "dcp", "s0x4")
    second = str(tmp_path / "again")
    common.dtshard("reshard", common.source(case, "dcp"), second, "--to", "dcp", "--mesh", "fsdp=4",
                   "--placements", "S(0)")
    names = sorted(os.listdir(second))
    assert names == sorted(os.listdir(first))
    for name in names:
        with open(f"{first}/{name}", "rb") as a, open(f"{second}/{name}", "rb") as b:
            assert a.read() == b.read(), name
