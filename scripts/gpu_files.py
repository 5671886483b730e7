"""Checkpoints that `gpu-check` makes, spreads and compares."""

import filecmp
import json
import os
import random
import shutil
import tempfile
from pathlib import Path


def first_difference(expected, got):
    """Returns the first difference of two files or folders, or None."""
    if expected.is_file():
        return None if filecmp.cmp(expected, got, shallow=False) else str(got)
    names = [sorted(str(path.relative_to(top)) for path in top.rglob("*")) for top in (expected, got)]
    if names[0] != names[1]:
        return f"names of files: {', '.join(set(names[0]) ^ set(names[1]))}"
    pairs = ((expected / name, got / name) for name in names[0])
    return next((str(b) for a, b in pairs if a.is_file() and not filecmp.cmp(a, b, shallow=False)), None)


def remove(path):
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def spread(source, folders):
    """Copies each file of SRC into one of these folders."""
    for folder in folders:
        remove(folder)
        folder.mkdir(parents=True)
    for nth, file in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        copy = folders[nth % len(folders)] / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def write_safetensors(path, tensors):
    """Writes tensors of random bytes, which differ between tensors."""
    sizes = {"BF16": 2, "F32": 4, "F64": 8, "U8": 1}
    header, offset = {}, 0
    for name, dtype, shape in tensors:
        numel = 1
        for side in shape:
            numel *= side
        end = offset + numel * sizes[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    longest = max(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
    block = memoryview(random.Random(5).randbytes(longest) * 2)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for nth, entry in enumerate(header.values()):
            begin = nth * 4099 % longest
            file.write(block[begin:begin + entry["data_offsets"][1] - entry["data_offsets"][0]])


def roomy(wanted):
    """Returns a folder with room for `wanted` bytes: in memory, if there is enough, so that no disk is measured."""
    places = [Path("/dev/shm"), Path(tempfile.gettempdir()), Path.cwd()]
    return next((place for place in places if free(place) > wanted), max(places, key=free))


def free(place):
    """Returns the number of bytes that can be written to this folder."""
    try:
        return shutil.disk_usage(place).free if os.access(place, os.W_OK) else 0
    except OSError:
        return 0


def kind(place):
    """Returns the type of the file system of a folder."""
    try:
        with open("/proc/mounts") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return "unknown"
    under = [mount for mount in mounts if Path(mount[1]) == place or Path(mount[1]) in place.parents]
    return max(under, key=lambda mount: len(mount[1]))[2] if under else "unknown"
