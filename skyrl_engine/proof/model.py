"""The model that proofs run on: the architecture is real, the size is not, and nothing is downloaded."""

from pathlib import Path
from typing import Literal

from skyrl_engine.proof.rollouts import LONGEST, PAD_TOKEN_ID, VOCABULARY

Family = Literal["qwen3", "llama"]


def write_model(directory: Path, family: Family = "qwen3", *, value_head: bool = False) -> None:
    """Write a two-layer model with random weights as a Hugging Face directory: a tied Qwen3 or an untied Llama, or a critic of either."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

    from skyrl_engine.modeling.exporting import write_pretrained
    from skyrl_engine.modeling.value_head import add_value_head

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 4 * LONGEST,
        "pad_token_id": PAD_TOKEN_ID,
    }
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model: PreTrainedModel
        if family == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True))
        else:
            model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
        if value_head:
            head = add_value_head(model, sizes["hidden_size"], name=family)
            torch.nn.init.normal_(head.weight, std=0.5)
        write_pretrained(model, directory)
