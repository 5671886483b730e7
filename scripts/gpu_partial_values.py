"""Rank files of partial values, and the tolerance for sums of them."""

import json
import math
import random
import struct

# Name of the dtype in safetensors files and in layouts, code of `struct`, bits of the significand with the implicit bit.
DTYPES = [("F64", "f64", "d", 53), ("F32", "f32", "f", 24), ("F16", "f16", "e", 11), ("BF16", "bf16", None, 8)]
OPS = ("sum", "avg")
SHAPE = [61, 17]


def encoded(code, numbers):
    if code:
        return struct.pack(f"<{len(numbers)}{code}", *numbers)
    # bf16 is the upper half of an f32.
    words = struct.unpack(f"<{2 * len(numbers)}H", struct.pack(f"<{len(numbers)}f", *numbers))
    return struct.pack(f"<{len(numbers)}H", *words[1::2])


def decoded(code, data):
    if code:
        return struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    return struct.unpack(f"<{len(halves)}f", struct.pack(f"<{2 * len(halves)}H", *(word for half in halves for word in (0, half))))


def write(path, tensors):
    """Writes a safetensors file from (name, dtype, bytes)."""
    header, data = {}, b""
    for name, dtype, part in tensors:
        header[name] = {"dtype": dtype, "shape": SHAPE, "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read(path):
    """Returns the bytes of each tensor of a safetensors file, by name."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    spans = {name: entry["data_offsets"] for name, entry in json.loads(data[8:begin]).items() if name != "__metadata__"}
    return {name: data[begin + span[0]:begin + span[1]] for name, span in spans.items()}


class PartialValues:
    """Random partial values in all float dtypes that NCCL can add, in rank files of the format `local`."""

    def __init__(self, folder, ranks, seed):
        draw = random.Random(seed)
        self.ranks, self.parts = ranks, {}
        folder.mkdir(parents=True)
        described, tree, files = {}, {}, [[] for _ in range(ranks)]
        for stored, dtype, code, _ in DTYPES:
            for op in OPS:
                name = f"{op}.{dtype}"
                described[name] = {"dtype": dtype, "shape": SHAPE, "class": "dtensor", "mesh": 0, "placements": f"P({op})"}
                tree[name] = {"$tensor": name}
                self.parts[name] = []
                for tensors in files:
                    numbers = [draw.choice((-1, 1)) * draw.uniform(0.5, 2) for _ in range(math.prod(SHAPE))]
                    data = encoded(code, numbers)
                    tensors.append((name, stored, data))
                    self.parts[name].append(decoded(code, data))
        for rank, tensors in enumerate(files):
            write(folder / f"rank-{rank:05}.safetensors", tensors)
        document = {"version": 1, "world_size": ranks, "meshes": [{"dims": [["dp", ranks]]}], "tensors": described, "state": tree}
        (folder / "layout.json").write_text(json.dumps(document))

    def difference(self, path):
        """Describes an element whose error is larger than that of any order of additions, or returns None."""
        got = read(path)
        for _, dtype, code, bits in DTYPES:
            for op in OPS:
                name = f"{op}.{dtype}"
                divisor = self.ranks if op == "avg" else 1
                values = decoded(code, got[name])
                for nth, (value, *parts) in enumerate(zip(values, *self.parts[name])):
                    wanted, most = math.fsum(parts) / divisor, self.tolerance(bits, parts) / divisor
                    if not abs(value - wanted) <= most:
                        return f"element {nth} of {name} is {value}, and not {wanted} (+-{most:.3g})"
        return None

    def tolerance(self, bits, parts):
        """Returns the largest possible error. Each addition rounds once, and an average rounds the factor and the product; each
        rounding is at most half a unit in the last place of the sum of all magnitudes. One more is for the expected value."""
        return (self.ranks + 2) * 2.0 ** -bits * math.fsum(map(abs, parts))
