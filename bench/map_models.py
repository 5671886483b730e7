"""Models with random weights for `maps.py`, and the conversions of its peers: `map_models.py CASE DST`, `map_models.py SRC DST --peer NAME`."""

import argparse
import json
import os

import torch
from safetensors.torch import save_file


def fill(state, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(tensor.shape, generator=generator).to(dtype) / 50 for name, tensor in state.items()}


def meta(config):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).state_dict()


def conv1d(target):
    from transformers import GPT2Config

    state = meta(GPT2Config(vocab_size=4096, n_positions=1024, n_embd=2048, n_layer=9, n_head=16))
    save_file(fill({name: tensor for name, tensor in state.items() if name != "lm_head.weight"}), target)


def mixtral(target):
    """Eight layers of eight experts, with a tensor for each expert."""
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=3584, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
        dtype="bfloat16", architectures=["MixtralForCausalLM"],
    )
    state = {}
    for name, tensor in meta(config).items():
        at, _, last = name.rpartition(".experts.")
        at = at.replace("mlp", "block_sparse_moe")
        if last == "gate_up_proj":
            halves = [tensor[:, : config.intermediate_size], tensor[:, config.intermediate_size :]]
            state |= {f"{at}.experts.{e}.{x}.weight": half[e] for x, half in zip(("w1", "w3"), halves) for e in range(len(half))}
        elif last == "down_proj":
            state |= {f"{at}.experts.{e}.w2.weight": tensor[e] for e in range(len(tensor))}
        else:
            state[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = tensor
    config.save_pretrained(target)
    save_file(fill(state), f"{target}/model.safetensors", {"format": "pt"})


def fp8(target):
    """A dense Qwen3 whose linear layers have 8-bit floats, with a scale for each block of 128 x 128."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=4,
        head_dim=128, dtype="bfloat16", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False,
    )
    state = fill(meta(config))
    for name in [name for name in state if name.endswith("_proj.weight")]:
        rows, columns = state[name].shape
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = torch.rand(rows // 128, columns // 128) + 0.5
    config.save_pretrained(target)
    path = f"{target}/config.json"
    with open(path) as file:
        document = json.load(file)
    document["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    with open(path, "w") as file:
        json.dump(document, file)
    save_file(state, f"{target}/model.safetensors", {"format": "pt"})


def titan(target):
    import torch.distributed.checkpoint as dcp
    from torchtitan.components.checkpointer import ModelWrapper
    from torchtitan.models.qwen3 import model_registry

    with torch.device("cpu"):
        state = ModelWrapper(model_registry("0.6B").model.build())._get_state_dict()
    dcp.save(fill(state, torch.float32), checkpoint_id=target)


def stack(source, target):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    os.makedirs(target)
    save_file(model.state_dict(), f"{target}/model.safetensors", {"format": "pt"})


def dequantize(source, target):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    config = FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128))
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", quantization_config=config)
    # `save_pretrained` would quantise the weights again.
    os.makedirs(target)
    save_file(model.state_dict(), f"{target}/model.safetensors", {"format": "pt"})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", metavar="SRC or CASE")
    parser.add_argument("target")
    parser.add_argument("--peer", choices=["stack", "dequantize"])
    args = parser.parse_args()
    if args.peer:
        {"stack": stack, "dequantize": dequantize}[args.peer](args.source, args.target)
    else:
        {"conv1d": conv1d, "mixtral": mixtral, "fp8": fp8, "titan": titan}[args.source](args.target)


if __name__ == "__main__":
    main()
