"""A tiny vision-language model, pictures, and rows about them, made in this process."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from skyrl_engine.modeling.tiny import write_vision_model

TEMPLATE = """\
{%- for message in messages -%}{{ '<|im_start|>' + message.role + ' ' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}
{{ ' <|vision_start|><|image_pad|><|vision_end|> ' if part.type == 'image' else part.text }}
{%- endfor -%}{%- endif -%}{{ '<|im_end|> ' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant ' }}{%- endif -%}"""

PICTURES = {"a.png": (24, 16), "b.png": (8, 8), "c.png": (16, 16)}
"""Width and height; 8 x 8 pixels become one token."""

ROWS = [(), ("a.png",), ("b.png", "c.png"), ("c.png",)] * 3


def row_of(images: Sequence[str], reply: str = "a cat") -> dict[str, Any]:
    """A question about these images, and the reply to learn."""
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "what is it"}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": reply}]}


def write_seeing_model(folder: Path) -> None:
    """Write `model/` (a tiny Qwen3-VL, tokenizer and image processor), three pictures and, about them, `train.jsonl` of 12 rows."""
    write_vision_model(folder / "model")
    config = json.loads((folder / "model" / "config.json").read_text())
    special = {
        "<|pad|>": config["text_config"]["pad_token_id"],
        "<|im_start|>": 1,
        "<|im_end|>": 2,
        "<|image_pad|>": config["image_token_id"],
    }
    special |= {f"<|vision_{end}|>": config[f"vision_{end}_token_id"] for end in ("start", "end")}
    words = dict(zip(("user", "assistant", "what", "is", "it", "a", "cat", "dog", "tree"), range(3, 20), strict=False))
    backend = Tokenizer(models.WordLevel({**special, **words}, unk_token="<|pad|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    size = {"shortest_edge": 8 * 8, "longest_edge": 64 * 64}
    patches = {name: config["vision_config"][name] for name in ("patch_size", "temporal_patch_size")}
    merge = config["vision_config"]["spatial_merge_size"]
    Qwen2VLImageProcessorPil(merge_size=merge, size=size, **patches).save_pretrained(folder / "model")
    draw = np.random.default_rng(3)
    for name, (width, height) in PICTURES.items():
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / name)
    replies = ("a cat", "a dog", "it is a tree")
    rows = [row_of(images, replies[number % 3]) for number, images in enumerate(ROWS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
