"""Jobs of several ranks over gloo: they save a model with PyTorch, and load it with dtshard and with PyTorch."""

import os
import socket
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import LocalStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def run(job, ranks, *args):
    """Runs `job(rank, *args)` on this number of ranks, and raises the error of a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    errors = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (job, ranks, port, args, errors), ranks, join=False)
    results = [errors.get() for _ in range(ranks)]
    failed = [text for text in results if text is not None]
    assert not failed, failed[0]


def _rank(rank, job, ranks, port, args, errors):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        job(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        errors.put(None)
    except BaseException:
        errors.put(traceback.format_exc())


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 2)
        self.down = nn.Linear(3 * width + 2, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Sizes that no number of ranks divides: every way of cutting is uneven."""

    def __init__(self, width=10):
        super().__init__()
        self.embed = nn.Embedding(23, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.out = nn.Linear(width, 23, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def sharded(mesh, seed):
    """Returns a model that is sharded by FSDP2 over `dp`, and by tensor parallelism over `tp` if the mesh has it."""
    torch.manual_seed(seed)
    model = Model()
    mesh = dist.device_mesh.init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    if "tp" in mesh.mesh_dim_names:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in [*model.layers, model]:
        fully_shard(module, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps, seed):
    losses = []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, 23, (4, 6), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(rank, folder, mesh):
    """Trains two steps, and saves model and optimizer as a DCP directory, as rank files and, of the model, whole."""
    model, optimizer = sharded(mesh, 1)
    train(model, optimizer, 2, 5)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    rng = torch.tensor([rank, 7])
    state = {"model": model_state, "optim": optimizer_state, "epoch": 3, "note": {"tags": ("a", 1.5)}}
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    os.makedirs(f"{folder}/ranks", exist_ok=True)
    torch.save({**state, "rng": rng}, f"{folder}/ranks/model_world_size_{dist.get_world_size()}_rank_{rank}.pt")
    whole = {name: value.full_tensor() for name, value in model_state.items()}
    if rank == 0:
        from safetensors.torch import save_file

        save_file(whole, f"{folder}/model.safetensors")
        torch.save(whole, f"{folder}/whole.pt")
    torch.manual_seed(2)
    flat = Model()
    flat.load_state_dict(whole)
    flat = FSDP1(flat, auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
                 device_id=torch.device("cpu"))
    with FSDP1.state_dict_type(flat, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig()):
        os.makedirs(f"{folder}/flat", exist_ok=True)
        torch.save(flat.state_dict(), f"{folder}/flat/model_world_size_{dist.get_world_size()}_rank_{rank}.pt")


def differences(one, other, path=""):
    """Returns the paths at which two state dicts differ, bit for bit."""
    if isinstance(one, dict):
        if list(map(str, one)) != list(map(str, other)):
            return [f"{path}: {list(one)} {list(other)}"]
        return [item for key in one for item in differences(one[key], other[key], f"{path}.{key}")]
    if isinstance(one, (list, tuple)):
        return [item for index, pair in enumerate(zip(one, other, strict=True))
                for item in differences(*pair, f"{path}.{index}")]
    if isinstance(one, torch.Tensor):
        pair = [value.to_local() if isinstance(value, DTensor) else value for value in (one, other)]
        is_same = pair[0].dtype == pair[1].dtype and torch.equal(pair[0], pair[1])
        return [] if is_same else [path]
    return [] if one == other else [f"{path}: {one!r} {other!r}"]


def load(rank, folder, mesh):
    """Loads every source on this mesh."""
    for source in ["dcp", "ranks", "model.safetensors", "flat"]:
        options = {"like": f"{folder}/whole.pt"} if source == "flat" else {}
        compare(rank, folder, mesh, source, options)


def load_flat_optimizer(rank, folder):
    """Loads the nested parameter groups of a checkpoint into the flat form of `get_optimizer_state_dict`."""
    compare(rank, folder, {"dp": 4}, "dcp", {}, flat_optimizer=True)


def load_wrong_local_shape(rank, folder):
    """Loads a tensor that is not cut as PyTorch cuts it."""
    import dtshard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    local = torch.zeros(23, 4 if rank == 0 else 6)
    value = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=(23, 10), stride=(10, 1))
    try:
        dtshard.load_into({"out.weight": value}, f"{folder}/model.safetensors", include="out.weight")
    except dtshard.Error as error:
        assert error.tensor == "out.weight" and not local.any(), error
    else:
        raise AssertionError("no error")


def compare(rank, folder, mesh, source, options, flat_optimizer=False):
    """Loads the DCP directory with PyTorch, and a source of the same job with dtshard; both then train alike."""
    import dtshard

    has_optimizer = source in ("dcp", "ranks")
    ways = StateDictOptions(flatten_optimizer_state_dict=flat_optimizer)

    def with_pytorch(state):
        dcp.load(state, checkpoint_id=f"{folder}/dcp")

    def with_dtshard(state):
        state = state if has_optimizer else state["model"]
        if source == "ranks":
            state["rng"] = None
        assert dtshard.load_into(state, f"{folder}/{source}", **options) == ([], [])
        if source == "ranks":
            assert state.pop("rng").tolist() == [rank % 4, 7]

    def with_reader(state):
        reader = dtshard.torch.StorageReader(f"{folder}/{source}", **options)
        dcp.load(state if has_optimizer else state["model"], storage_reader=reader)

    def outcome(seed, load, ways):
        model, optimizer = sharded(mesh, seed)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=ways)
        state = {"model": model_state}
        if has_optimizer:
            state.update(optim=optimizer_state, epoch=0, note={"tags": None})
        load(state)
        set_state_dict(model, optimizer, model_state_dict=state["model"], options=ways,
                       optim_state_dict=state.get("optim", optimizer_state))
        # The state after loading, in one form whatever the form in which it was loaded.
        loaded = get_state_dict(model, optimizer)
        losses = train(model, optimizer, 3, 6)
        objects = {key: value for key, value in state.items() if key not in ("model", "optim")}
        return {"loaded": loaded, "objects": objects, "losses": losses, "trained": get_state_dict(model, optimizer)}

    expected = outcome(3, with_pytorch, StateDictOptions())
    assert differences(expected, outcome(4, with_dtshard, ways)) == []
    if not flat_optimizer:
        assert differences(expected, outcome(5, with_reader, ways)) == []
