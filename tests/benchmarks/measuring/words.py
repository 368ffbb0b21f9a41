"""A small Qwen3 of random weights, and a tokenizer of whole words, that the engine and other projects load alike."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from skyrl_engine.modeling.tiny import write_model

VOCABULARY = 8192
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_words_model(directory: Path, *, positions: int = 512) -> int:
    """Write a model proportioned like the published small ones, whose words are w2 to w8191; return the number of its parameters."""
    words = {"<pad>": 0, "<end>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": positions,
    }
    write_model(directory, tokenizer=tokenizer, **sizes)
    return sum(parameter.numel() for parameter in load_model(directory).parameters())


def load_model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
