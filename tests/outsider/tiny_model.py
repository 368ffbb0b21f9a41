"""Writes a tiny Qwen3 model with its tokenizer and a small data set into a directory: `python tiny_model.py DIRECTORY`. No download."""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

directory = Path(sys.argv[1])
rows = [{"prompt": f"{first} + {second} = ", "completion": f"{first + second}"} for first in range(8) for second in range(8)]
(directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.train_from_iterator(
    [row["prompt"] + row["completion"] for row in rows],
    trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<unk>", "<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
)
wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<end>")
end_of_turn = "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}" + end_of_turn + "{% endfor %}"
wrapped.save_pretrained(directory / "model")

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=len(wrapped),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=256,
    pad_token_id=wrapped.pad_token_id,
    eos_token_id=wrapped.eos_token_id,
)
Qwen3ForCausalLM(config).save_pretrained(directory / "model")
