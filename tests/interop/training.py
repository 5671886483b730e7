"""A training job that changes from one process to tensor parallelism under FSDP2 and back, on gloo, in f64.

`python training.py save FOLDER` writes for each model FOLDER/MODEL/whole.pt and FOLDER/MODEL/dcp, which both have the unsharded
model and its AdamW after one step, and FOLDER/MODEL/expected.pt, which has the result of the next step. `python training.py
resume FOLDER`: 4 ranks on the mesh dp=2,tp=2 take this next step twice, from FOLDER/MODEL/ranks (torch.load) and from
FOLDER/MODEL/placed (dcp.load). They compare with expected.pt, and save to FOLDER/MODEL/trained.
"""

import os
import sys
import tempfile
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.simplefilter("ignore")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module)

# Only the heads and the sequence length divide evenly; shards of the weights are uneven.
VOCAB, DIM, HEADS, KV_HEADS, WIDE, LAYERS, BATCH, LENGTH = 11, 24, 4, 2, 14, 2, 4, 6
DP, TP = 2, 2
WORLD = DP * TP
# Tolerance in f64: several ranks sum in another order than one process.
CLOSE = {"rtol": 1e-10, "atol": 1e-13}

# ---------------------------------------------------------------------------------------------------
# models


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = DIM // HEADS
        self.wq = nn.Linear(DIM, DIM, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * self.size, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * self.size, bias=False)
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        heads = lambda y: y.unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = (heads(weight(x)) for weight in (self.wq, self.wk, self.wv))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, WIDE, bias=False) for _ in range(2))
        self.w2 = nn.Linear(WIDE, DIM, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class TitanBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(nn.Module):
    """A Llama whose modules have the names of torchtitan."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): TitanBlock() for i in range(LAYERS)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        intermediate_size=WIDE, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0, attn_implementation="eager"))


MODELS = {"llama": llama, "titan": Titan}


def build(name, seed):
    torch.manual_seed(seed)
    return MODELS[name]().double()


def logits(model, tokens):
    if isinstance(model, Titan):
        return model(tokens)
    # The mask is passed, because the model would compute it from the length of its input, of which a rank has only a part.
    mask = torch.full((LENGTH, LENGTH), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)
    return model(tokens, attention_mask=mask.expand(len(tokens), 1, -1, -1), position_ids=torch.arange(LENGTH)[None],
                 use_cache=False).logits


def data(step):
    """Returns tokens and targets."""
    drawn = torch.randint(0, VOCAB, (2, BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return drawn[0], drawn[1]


def train(model, optimizer, tokens, wanted):
    loss = nn.functional.cross_entropy(logits(model, tokens).flatten(0, 1), wanted.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


# ---------------------------------------------------------------------------------------------------
# the plan `llama`, with the input layouts of forward

SEQUENCE = Shard(1)
NAMES = {
    "llama": {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "layers": "model.layers",
              "attention": "self_attn", "qkv": ("q_proj", "k_proj", "v_proj"), "out": "o_proj", "mlp": "mlp",
              "up": ("gate_proj", "up_proj"), "down": "down_proj", "norms": ("input_layernorm", "post_attention_layernorm")},
    "titan": {"embed": "tok_embeddings", "norm": "norm", "head": "output", "layers": "layers", "attention": "attention",
              "qkv": ("wq", "wk", "wv"), "out": "wo", "mlp": "feed_forward", "up": ("w1", "w3"), "down": "w2",
              "norms": ("attention_norm", "ffn_norm")},
}


def whole_sequence(model):
    """Makes attention gather its input, which is a keyword argument in transformers and positional in torchtitan."""
    if model == "titan":
        return PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),))
    return PrepareModuleInput(input_kwarg_layouts={"hidden_states": SEQUENCE},
                              desired_input_kwarg_layouts={"hidden_states": Replicate()})


def plan(model):
    names = NAMES[model]
    layer = f"{names['layers']}.*"
    attention, mlp = f"{layer}.{names['attention']}", f"{layer}.{names['mlp']}"
    return {
        names["embed"]: RowwiseParallel(input_layouts=Replicate(), output_layouts=SEQUENCE),
        **{f"{layer}.{norm}": SequenceParallel() for norm in names["norms"]},
        attention: whole_sequence(model),
        **{f"{attention}.{name}": ColwiseParallel() for name in names["qkv"]},
        f"{attention}.{names['out']}": RowwiseParallel(output_layouts=SEQUENCE),
        mlp: PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
        **{f"{mlp}.{name}": ColwiseParallel() for name in names["up"]},
        f"{mlp}.{names['down']}": RowwiseParallel(output_layouts=SEQUENCE),
        names["norm"]: SequenceParallel(),
        names["head"]: ColwiseParallel(input_layouts=SEQUENCE, output_layouts=Replicate()),
    }


def placed(name, seed):
    """Returns the sharded model on this rank, and a new optimizer."""
    mesh = init_device_mesh("cpu", (DP, TP), mesh_dim_names=("dp", "tp"))
    model = build(name, seed)
    parallelize_module(model, mesh["tp"], plan(name))
    for layer in model.get_submodule(NAMES[name]["layers"]).children():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, make_optimizer(model)


# ---------------------------------------------------------------------------------------------------
# one process

def save(folder):
    for name in MODELS:
        os.makedirs(f"{folder}/{name}")
        model = build(name, 0)
        optimizer = make_optimizer(model)
        train(model, optimizer, *data(1))
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, f"{folder}/{name}/whole.pt")
        both = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(both, checkpoint_id=f"{folder}/{name}/dcp", no_dist=True)
        loss = train(model, optimizer, *data(2))
        torch.save({"loss": loss, "model": model.state_dict(), "optim": optimizer.state_dict()}, f"{folder}/{name}/expected.pt")


def go_on(name, model_state, optimizer_state):
    """Takes the third step in one process, from weights and an optimizer state with numbers or names: (loss, weights)."""
    model = build(name, 3)
    optimizer = make_optimizer(model)
    model.load_state_dict(model_state)
    by_number = all(isinstance(key, int) for key in optimizer_state["state"])
    load = optimizer.load_state_dict if by_number else lambda state: set_optimizer_state_dict(model, optimizer, state)
    load(optimizer_state)
    return train(model, optimizer, *data(3)), model.state_dict()


# ---------------------------------------------------------------------------------------------------
# each rank

def from_rank_files(folder, model, optimizer):
    """Loads the files of this rank with load_state_dict of model and optimizer."""
    state = {kind: torch.load(f"{folder}/ranks/{kind}_world_size_{WORLD}_rank_{dist.get_rank()}.pt", weights_only=True)
             for kind in ("model", "optim")}
    own = model.state_dict()
    assert list(state["model"]) == list(own)
    for name, tensor in own.items():
        assert type(tensor) is DTensor and state["model"][name]._spec == tensor._spec, f"{name}: {tensor._spec}"
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])


def from_dcp(folder, model, optimizer):
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/placed")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def resume(folder):
    for name in MODELS:
        expected = torch.load(f"{folder}/{name}/expected.pt", weights_only=True)
        for number, load in enumerate((from_rank_files, from_dcp)):
            model, optimizer = placed(name, seed=10 + number)
            load(f"{folder}/{name}", model, optimizer)
            loss = train(model, optimizer, *(part.chunk(DP)[dist.get_rank() // TP] for part in data(2)))
            dist.all_reduce(loss)
            torch.testing.assert_close(loss / WORLD, expected["loss"], **CLOSE)
            for key, tensor in model.state_dict().items():
                torch.testing.assert_close(whole(tensor), expected["model"][key], **CLOSE, msg=lambda m: f"{name} {key}: {m}")
            for index, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    torch.testing.assert_close(whole(value), expected["optim"]["state"][index][key], **CLOSE,
                                               msg=lambda m: f"{name} {index} {key}: {m}")
        write_trained(f"{folder}/{name}/trained", model, optimizer)


def write_trained(folder, model, optimizer):
    """Saves rank files and a DCP directory, as the job would, and the whole weights in one file."""
    rank = dist.get_rank()
    os.makedirs(f"{folder}/ranks", exist_ok=True)
    for kind, part in (("model", model), ("optim", optimizer)):
        torch.save(part.state_dict(), f"{folder}/ranks/{kind}_world_size_{WORLD}_rank_{rank}.pt")
    dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)},
             checkpoint_id=f"{folder}/dcp")
    full = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    if rank == 0:
        torch.save(full, f"{folder}/full.pt")


def rank_main(rank, folder, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    resume(folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _, verb, folder = sys.argv
    if verb == "save":
        save(folder)
    else:
        with tempfile.TemporaryDirectory() as tmp:
            mp.start_processes(rank_main, (folder, os.path.join(tmp, "rendezvous")), nprocs=WORLD, start_method="fork")
