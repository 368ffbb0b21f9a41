"""Tiny byte-level tokenizers, trained in-process, with chat templates of the kinds in use."""

import json
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.data.dataset import TokenizedDataset, load_columns
from skyrl_engine.data.images.processor import NoVision, Vision, VisionInputs

CHATML = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# trims content, begins with the beginning-of-text token, closes turns with a token of its own
HEADERS = """\
{{- bos_token -}}
{%- for m in messages -%}
{{ '<|head|>' + m.role + '<|/head|>\n\n' + (m.content | trim) + '<|eot|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|head|>assistant<|/head|>\n\n' }}{%- endif -%}"""

# after the last user message: a think block, empty in the final turn where there is no reasoning; before it: reasoning removed
THINKING = """\
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif -%}
{%- for m in messages -%}
  {%- set text = m.content -%}
  {%- set thought = m.reasoning_content or '' -%}
  {%- if '</think>' in text -%}
    {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
    {%- set text = text.split('</think>')[-1].lstrip('\n') -%}
  {%- endif -%}
  {%- if m.role == 'tool' -%}
    {{ '<|im_start|>user\n[result]' + text + '[/result]<|im_end|>\n' }}
  {%- else -%}
    {{ '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > last.user and (loop.last or thought) -%}
      {{ '<think>\n' + thought + '\n</think>\n\n' }}
    {%- endif -%}
    {{ text }}
    {%- for call in m.tool_calls or [] -%}
      {%- if text -%}{{ '\n' }}{%- endif -%}
      {{ '[call]' + call.function.name + ' ' + (call.function.arguments | tojson) + '[/call]' }}
    {%- endfor -%}
    {{ '<|im_end|>\n' }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# the generation prompt opens a think block that finished turns do not have
OPENS_THINKING = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{ '<|head|>A<|/head|>' + m.content.split('</think>')[-1] + '<|eot|>' }}
{%- else -%}{{ '<|head|>U<|/head|>' + m.content }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|head|>A<|/head|><think>\n' }}{%- endif -%}"""

# no token of its own ends a turn
UNMARKED = """\
{%- for m in messages -%}{{ m.role + ': ' + m.content + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""

# the generation prompt is empty: what ends the user's message starts the reply
INSTRUCTIONS = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
{{ '[I] ' + m.content + ' [/I]' if m.role == 'user' else ' ' + m.content + '<|eot|>' }}
{%- endfor -%}"""

TAGGED = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{ '<|im_start|>assistant\n' }}{%- generation -%}{{ m.content + '<|im_end|>' }}{%- endgeneration -%}{{ '\n' }}
{%- else -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

# THINKING with the assistant's part in generation tags: the same text, and an independent account of what the assistant says
THINKING_TAGGED = (
    THINKING.replace(
        "  {%- else -%}\n    {{ '<|im_start|>' + m.role + '\\n' }}\n", "  {%- elif m.role == 'assistant' -%}\n" + "HEAD"
    )
    .replace("HEAD", "    {{ '<|im_start|>assistant\\n' }}{%- generation -%}\n")
    .replace(
        "    {{ '<|im_end|>\\n' }}\n  {%- endif -%}",
        "    {{ '<|im_end|>' }}{%- endgeneration -%}{{ '\\n' }}\n  {%- else -%}\n"
        "    {{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' }}\n  {%- endif -%}",
    )
)

# the conversation is summed up, so that nothing of a turn can be found
OPAQUE = """{{- messages | length -}}{%- if add_generation_prompt -%}{{ 'A' }}{%- endif -%}"""

# a part of type image becomes one token between two others, as in the Qwen-VL models
PICTURES = """\
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.content is string -%}{{ m.content }}{%- else -%}
{%- for part in m.content -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor -%}{%- endif -%}
{{ '<|im_end|>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

TEMPLATES: Mapping[str, str] = {
    "chatml": CHATML,
    "headers": HEADERS,
    "thinking": THINKING,
    "opens_thinking": OPENS_THINKING,
    "unmarked": UNMARKED,
    "instructions": INSTRUCTIONS,
    "tagged": TAGGED,
    "thinking_tagged": THINKING_TAGGED,
    "opaque": OPAQUE,
    "pictures": PICTURES,
}

_CORPUS = ["hello there, how are you today", "the answer is 42\n\nthank you", "user assistant system tool"] * 3
_SPECIAL = ["<|bos|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"]
_VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]


def _make_tokenizer(
    template: str | None = "chatml", *, adds_bos: bool = False, pad: bool = True, metaspace: bool = False
) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if metaspace:  # as SentencePiece: a space is put before every text
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
        alphabet = [*string.printable, "\u2581"]
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|end|>" if pad else None
    )
    if template == "pictures":
        tokenizer.add_tokens(_VISION, special_tokens=True)
    if template is not None:
        tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def _mark(dataset: TokenizedDataset, tokenizer: Any, position: int = 0) -> str:
    """The sample as text, with what carries loss in double brackets."""
    columns = dataset.columns
    ids = columns.input_ids[columns.token_offsets[position] : columns.token_offsets[position + 1]]
    weights = columns.loss_weight[columns.action_offsets[position] : columns.action_offsets[position + 1]]
    loss = np.concatenate([np.zeros(len(ids) - len(weights), dtype=bool), weights != 0])
    text, start = "", 0
    while start < len(ids):
        stop = start
        while stop < len(ids) and loss[stop] == loss[start]:
            stop += 1
        piece = tokenizer.decode(ids[start:stop].tolist(), clean_up_tokenization_spaces=False)
        text += f"[[{piece}]]" if loss[start] else piece
        start = stop
    return text


def _chat(*turns: str) -> dict[str, Any]:
    """user, assistant, user, ... in turn."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]}


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., TokenizedDataset]:
    """Tokenize rows, given as values, through a JSONL file."""

    def load_rows(
        rows: Sequence[Any], tokenizer: Any, *, split: Any = "train", seed: int = 0, vision: Vision | None = None, **settings: Any
    ) -> TokenizedDataset:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        data = DataConfig(train=str(path), cache=str(tmp_path / "cache"), **settings)
        return load_columns(data, tokenizer, split=split, seed=seed, vision=vision or NoVision())

    return load_rows


@pytest.fixture(name="make_tokenizer", scope="session")
def make_tokenizer_fixture() -> Callable[..., PreTrainedTokenizerFast]:
    """A tokenizer by the name of its template (None: without)."""
    return _make_tokenizer


@pytest.fixture(name="marked")
def marked_fixture() -> Callable[..., str]:
    return _mark


@pytest.fixture(name="chat")
def chat_fixture() -> Callable[..., dict[str, Any]]:
    return _chat


@pytest.fixture
def make_vision() -> Callable[..., VisionInputs]:
    """A model's inputs from images whose tokens are those of `tokenizer`: patches of 16 x 16 pixels, 2 x 2 of them one token."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    def make(tokenizer: Any, *, longest_edge: int = 256 * 256, max_pixels: int = 2**20) -> VisionInputs:
        size = {"shortest_edge": 32 * 32, "longest_edge": longest_edge}
        processor = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, temporal_patch_size=2, size=size)
        return VisionInputs(processor, tokenizer.convert_tokens_to_ids("<|image_pad|>"), max_pixels)

    return make
