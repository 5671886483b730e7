"""Fills the tensors of a live state dict from a checkpoint of any format: each rank reads its own boxes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import _dtshard
from ._checkpoint import Checkpoint, Progress, torch_dtype
from ._error import Error, usage

STAGED_BYTES = 16 << 20
"""The size of the buffer through which tensors are filled that cannot be read into directly: on a GPU, of another dtype,
or with gaps in memory."""

Part = tuple[list[int], list[int]] | tuple[list[int], list[int], str] | None
"""The part of a tensor that a rank holds: a box, a shard (mesh, coordinate, placements), or the whole tensor."""

Job = tuple[str, Part, torch.Tensor]
"""The name of a tensor of the checkpoint, a part of it, and the local tensor that the part is read into."""


class Loaded(NamedTuple):
    """The names that did not match, as ``torch.nn.Module.load_state_dict`` returns them."""

    missing_keys: list[str]
    """The names of the state dict that the checkpoint does not have; their values are unchanged."""
    unexpected_keys: list[str]
    """The names of the checkpoint that the state dict does not have."""


def load_into(
    state_dict: MutableMapping[str, Any],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    rank: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Loaded:
    """See ``dtshard.load_into``. Checks names and shapes first; a failed read may leave tensors partly filled."""
    if rank is None:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if not isinstance(state_dict, MutableMapping):
        raise TypeError(f"load_into needs a state dict, found {type(state_dict).__name__}; give model.state_dict()")
    plain = {key: value.state_dict() if _is_stateful(value) else value for key, value in state_dict.items()}
    leaves: dict[str, tuple[tuple[Any, ...], Any]] = {}
    for keys, value in _leaves(plain, ()):
        name = ".".join(map(str, keys))
        if name in leaves:
            raise usage(f"{name}: two entries of the state dict have this name", "rename one of the keys")
        leaves[name] = (keys, value)
    native = _dtshard.open(path, options, rank, not _has_parameter_ids(leaves))
    checkpoint = Checkpoint(native)
    plan = _Plan(leaves, checkpoint)
    unexpected = [name for name in [*checkpoint, *checkpoint.objects] if name not in plan.used]
    if strict:
        missing = _not_left_out(plan.missing, native.left_out(), options)
        entries = {name.split(".", 1)[0] for name in leaves}
        _check(native, missing, [name for name in unexpected if name.split(".", 1)[0] in entries])
    fill(native, plan.jobs, progress)
    for name, tensor, number in plan.numbers:
        with _naming(name):
            tensor.fill_(number)
    for keys, value in plan.values:
        _set(plain, keys, value)
    for key, value in state_dict.items():
        if _is_stateful(value):
            value.load_state_dict(plain[key])
        else:
            state_dict[key] = plain[key]
    return Loaded(plan.missing, unexpected)


def _has_parameter_ids(leaves: Mapping[str, Any]) -> bool:
    """Return whether an optimizer has parameter ids as keys, as ``optimizer.state_dict()`` gives them, instead of names."""
    paths = [keys for keys, _ in leaves.values()]
    optimizers = {keys[: keys.index("param_groups")] for keys in paths if "param_groups" in keys}
    beside = {(*keys, "state") for keys in optimizers}
    return any(isinstance(keys[at], int) and keys[:at] in beside for keys in paths for at in range(1, len(keys)))


def _not_left_out(missing: list[str], left_out: list[str], options: Mapping[str, Any]) -> list[str]:
    """Return the names that are not missing because ``include`` or ``exclude`` leaves them out of the checkpoint."""
    if any(options.get(option) for option in ("map", "rename", "rename_file")):
        # These names differ from those in the files.
        return missing if not left_out else []
    prefixes = options.get("strip_prefix") or []
    prefixes = [prefixes] if isinstance(prefixes, str) else list(prefixes)
    root = options.get("root")
    heads = ["", *prefixes, *([f"{root}."] if root else [])]
    known = set(left_out)
    return [name for name in missing if not any(head + name in known for head in heads)]


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Convert an error of torch about a tensor of the state dict to an error that names the tensor."""
    try:
        with torch.no_grad():
            yield
    except (RuntimeError, TypeError, OverflowError, NotImplementedError) as error:
        raise usage(f"{name}: torch cannot fill this tensor: {error}", "give a dense tensor that can be written") from error


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _leaves(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the leaves of a state dict with their paths, as ``torch.distributed.checkpoint`` divides it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*keys, key))
    elif isinstance(value, list) and any(_is_descended(inner) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*keys, index))
    else:
        yield keys, value


def _is_descended(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_descended, value))
    return isinstance(value, (Mapping, torch.Tensor))


def _set(state_dict: Any, keys: tuple[Any, ...], value: Any) -> None:
    for key in keys[:-1]:
        state_dict = state_dict[key]
    state_dict[keys[-1]] = value


class _Plan:
    """What is loaded: for each leaf of the state dict its source in the checkpoint."""

    def __init__(self, leaves: dict[str, tuple[tuple[Any, ...], Any]], checkpoint: Checkpoint) -> None:
        objects = checkpoint.objects
        self.jobs: list[Job] = []
        self.values: list[tuple[tuple[Any, ...], Any]] = []
        # Old optimizers store the step as a number.
        self.numbers: list[tuple[str, torch.Tensor, float]] = []
        self.missing: list[str] = []
        self.used: set[str] = set()
        groups = _Groups(leaves, objects)
        for name, (keys, value) in leaves.items():
            if name in checkpoint:
                self.used.add(name)
                if isinstance(value, torch.Tensor):
                    _check_shape(name, tuple(value.shape), checkpoint[name].shape)
                    for part, local in _parts(name, value):
                        _check_shape(name, tuple(local.shape), tuple(checkpoint._native.part_sizes(name, part)))
                        self.jobs.append((name, part, local))
                else:
                    self.values.append((keys, checkpoint[name].torch()))
                continue
            sources = [name] if name in objects else groups.find(name)
            found = groups.value(name, sources) if sources else None
            if not sources:
                self.missing.append(name)
            elif not isinstance(value, torch.Tensor):
                self.values.append((keys, value if groups.keeps(name) else found))
            elif isinstance(found, (int, float)) and value.numel() == 1:
                self.numbers.append((name, value, found))
            else:
                self.missing.append(name)
                continue
            self.used.update(sources)
        # A tensor inside a value, such as in a tuple, belongs to the value.
        for name in checkpoint:
            above = (name[:at] for at, letter in enumerate(name) if letter == ".")
            if name not in self.used and any(path in self.used and path in objects for path in above):
                self.used.add(name)


def _check_shape(name: str, own: tuple[int, ...], stored: tuple[int, ...]) -> None:
    if own != stored:
        raise Error(
            {
                "kind": "usage",
                "message": f"{name}: the checkpoint has shape {list(stored)}, the state dict {list(own)}",
                "fqn": name,
                "expected": str(list(own)),
                "found": str(list(stored)),
                "hint": "load into a model of the same configuration, or leave the name out with exclude=",
            }
        )


class _Groups:
    """The options of parameter groups: by group (``param_groups.0.lr``, with a list ``params``), or flat, by parameter
    (``param_groups.layers.0.weight.lr``), as ``get_optimizer_state_dict`` gives them. Finds one form in the other."""

    def __init__(self, leaves: dict[str, tuple[tuple[Any, ...], Any]], objects: Mapping[str, Any]) -> None:
        self._objects = objects
        # For each group of the state dict: its parameters. For each parameter in the checkpoint: its group.
        self._parameters: dict[tuple[str, str], list[str]] = {}
        self._group: dict[tuple[str, str], str] = {}
        for name, (_, value) in leaves.items():
            head, group, option = _split(name)
            if option == "params" and isinstance(value, list):
                self._parameters[head, group] = [str(parameter) for parameter in value]
        for name in objects:
            head, group, option = _split(name)
            if option == "params":
                for parameter in objects[name]:
                    self._group[head, str(parameter)] = group

    def find(self, name: str) -> list[str]:
        """Return the names in the checkpoint of an option that the state dict has under ``name``, in the other form."""
        head, group, option = _split(name)
        if (head, group) in self._group:
            # The list of parameters has no counterpart in the flat form.
            names = [_join(head, self._group[head, group], option) for option in (option, "params")]
            names = names if names[0] in self._objects else []
        elif option == "params":
            of = {(head, parameter) for parameter in self._parameters.get((head, group), [])}
            names = [name for name in self._objects if _split(name)[:2] in of]
        else:
            names = [_join(head, parameter, option) for parameter in self._parameters.get((head, group), [])]
        return [name for name in names if name in self._objects]

    def value(self, name: str, sources: list[str]) -> Any:
        """Return the value of an option, which is equal for all parameters of a group."""
        option = _split(name)[2]
        if option == "params" or _split(sources[0])[2] != option:
            return self._objects[sources[0]]
        values = [self._objects[source] for source in sources if _split(source)[2] == option]
        different = next((index for index, value in enumerate(values) if value != values[0]), None)
        if different is not None:
            raise usage(
                f"{name}: the parameters of this group have different values in the checkpoint: {values[0]!r} in {sources[0]}, "
                f"{values[different]!r} in {sources[different]}",
                "make parameter groups as in the job that saved the checkpoint",
            )
        return values[0]

    def keeps(self, name: str) -> bool:
        """Return whether the state dict keeps its value: the parameters of a group, if the checkpoint is flat."""
        return _split(name)[2] == "params" and name not in self._objects


_GROUPS = "param_groups."


def _split(name: str) -> tuple[str, str, str]:
    """Return what is before ``param_groups``, the group or parameter, and the option; empty texts if it is no option."""
    head, is_option, rest = name.partition(_GROUPS)
    group, _, option = rest.rpartition(".")
    return (head, group, option) if is_option and (not head or head.endswith(".")) else ("", "", "")


def _join(head: str, group: str, option: str) -> str:
    return f"{head}{_GROUPS}{group}.{option}"


def _parts(name: str, value: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
    """Yield the parts of a tensor that this rank holds, each with its local tensor."""
    if dist.is_available():
        from torch.distributed._shard.sharded_tensor.api import ShardedTensor
        from torch.distributed.tensor import DTensor

        if isinstance(value, DTensor):
            coordinate = value.device_mesh.get_coordinate()
            if coordinate is not None:
                placements = ",".join(_placement(name, placement) for placement in value.placements)
                with torch.no_grad():
                    yield (list(value.device_mesh.shape), list(coordinate), placements), value.to_local()
            return
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                yield (list(shard.metadata.shard_offsets), list(shard.metadata.shard_sizes)), shard.tensor
            return
    yield None, value


def _placement(name: str, placement: Any) -> str:
    from torch.distributed.tensor import Shard

    if placement.is_replicate():
        return "R"
    if hasattr(placement, "split_factor"):
        return f"_S({placement.dim},{placement.split_factor})"
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    raise usage(f"{name}: a tensor of placement {placement} cannot be loaded", "use Shard or Replicate placements")


def _check(native: _dtshard.Checkpoint, missing: list[str], unexpected: list[str]) -> None:
    """Raise an error that lists the names as ``Module.load_state_dict`` does."""
    kinds = [(names, kind) for names, kind in [(missing, "Missing"), (unexpected, "Unexpected")] if names]
    if not kinds:
        return

    def shown(names: list[str]) -> str:
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        return ", ".join(f'"{name}"' for name in names[:10]) + more

    text = " ".join(f"{kind} key(s) in state_dict: {shown(names)}." for names, kind in kinds)
    hint = (
        "dtshard.open(path) has the names of the tensors in the checkpoint, and .objects those of other values; missing are "
        "names that only the state dict has, unexpected are names that only the checkpoint has; strict=False loads what matches"
    )
    stored = [row[0] for row in native.tensors()]
    prefixes = {name[: -len(missing[0])] for name in stored if missing and name.endswith(f".{missing[0]}")}
    if len(prefixes) == 1:
        root = prefixes.pop().removesuffix(".")
        hint = f"the checkpoint has these names below {root!r}: use root={root!r}"
    fields = {"kind": "missing", "message": f"{native.path}: {text}", "file": str(native.path), "hint": hint}
    raise Error({**fields, "names": missing + unexpected})


def fill(native: _dtshard.Checkpoint, jobs: Sequence[Job], progress: Progress | None = None) -> None:
    """Read parts of tensors into local tensors, directly where their memory allows it."""
    dtypes = {name: torch_dtype(long_dtype) for name, _, long_dtype, *_ in native.tensors()}
    direct, direct_locals, staged = [], [], []
    for name, part, local in jobs:
        local = local.detach()
        if local.layout != torch.strided or local.is_quantized or local.is_nested:
            raise usage(f"{name}: the tensor of the state dict is not dense", "load into a dense tensor")
        if local.device.type == "meta":
            raise usage(f"{name}: the tensor is on the meta device and has no memory", "call model.to_empty(device=...) first")
        is_plain = local.device.type == "cpu" and local.dtype == dtypes[name] and local.is_contiguous()
        is_plain &= type(local) in (torch.Tensor, torch.nn.Parameter)
        if is_plain and not local.is_conj() and not local.is_neg():
            direct.append((name, part, 0, _bytes(local)))
            direct_locals.append(local)
        else:
            staged.append((name, part, local))
    native.read(direct, progress)
    for local in direct_locals:
        # As any operation in place does, so that autograd notices it.
        if not local.is_inference():
            torch.autograd.graph.increment_version(local)
    for name, part, local in staged:
        with _naming(name):
            _fill_staged(native, (name, part, local), dtypes[name])


def _bytes(tensor: torch.Tensor) -> Any:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _fill_staged(native: _dtshard.Checkpoint, job: Job, dtype: torch.dtype) -> None:
    """Read a part through a buffer, from which torch copies and casts."""
    name, part, local = job
    most = max(1, min(STAGED_BYTES // dtype.itemsize, local.numel()))
    buffer = torch.empty(most, dtype=dtype, pin_memory=local.device.type == "cuda")
    for piece, first in _pieces(local, 0, most):
        elements = buffer[: piece.numel()]
        native.read([(name, part, first, _bytes(elements))], None)
        piece.copy_(elements.view(piece.shape))


def _pieces(tensor: torch.Tensor, first: int, most: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Cut a tensor into views of at most ``most`` elements, each with the row-major index of its first element."""
    if tensor.numel() <= most:
        yield tensor, first
        return
    row = tensor[0].numel()
    step = max(1, most // row)
    for start in range(0, tensor.shape[0], step):
        yield from _pieces(tensor[start : start + step] if row <= most else tensor[start], first + start * row, most)
