"""A tied model of transformers, which is saved without its output layer, is converted to DCP."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint import DefaultLoadPlanner

import common

TOKENS = torch.arange(20).reshape(2, 10)
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(intermediate_size=32, tie_word_embeddings=True, **SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, tie_word_embeddings=True)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(ffn_dim=32, word_embed_proj_dim=16, tie_word_embeddings=True, **SIZES)),
}


def model(name, seed):
    torch.manual_seed(seed)
    return MODELS[name]().eval()


@pytest.mark.parametrize("name", MODELS)
def test_tied_model_loads_from_dcp(name, tmp_path):
    trained = model(name, 1)
    trained.save_pretrained(tmp_path / "saved")
    expected = trained(TOKENS).logits
    common.dtshard("reshard", tmp_path / "saved", tmp_path / "plain", "--to", "dcp", "--mesh", "dp=2")
    common.dtshard("reshard", tmp_path / "saved", tmp_path / "written", "--to", "dcp", "--mesh", "dp=2", "--tied", "write")

    state = model(name, 2).state_dict()
    with pytest.raises(BaseException, match="Missing key"):
        dcp.load(state, checkpoint_id=tmp_path / "plain")
    for folder, planner in [("plain", DefaultLoadPlanner(allow_partial_load=True)), ("written", None)]:
        other = model(name, 2)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / folder, planner=planner)
        other.load_state_dict(state)
        assert torch.equal(other(TOKENS).logits, expected), folder
