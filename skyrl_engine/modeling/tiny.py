"""Tiny models of real architectures, and tokenizers, for proofs, tests and benchmarks; nothing is downloaded."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Family = Literal["qwen3", "llama"]

VOCABULARY = 128
PAD_TOKEN_ID = 0
IMAGE_TOKEN = VOCABULARY - 1
UNKNOWN, PADDING, END = "<unk>", "<pad>", "<end>"
"""Special tokens of `write_tokenizer`."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 160,
    "pad_token_id": PAD_TOKEN_ID,
}
PATCH, MERGE, CHANNELS, FRAMES = 4, 2, 3, 2
"""Sizes of the vision model: a patch's side in pixels, a token's side in patches, colour channels, and frames per patch."""


def write_model(
    directory: Path,
    family: str = "qwen3",
    *,
    value_head: bool = False,
    tokenizer: "PreTrainedTokenizerFast | None" = None,
    **settings: Any,
) -> None:
    """Write a causal language model with random weights as a Hugging Face directory; with `value_head` a critic.

    `family` is a model type of transformers; embedding and head of "qwen3" are tied by default, those of others are not. `settings` override
    `SIZES` in its configuration; with a tokenizer, the vocabulary and the special tokens are the tokenizer's.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from skyrl_engine.modeling.exporting import write_pretrained
    from skyrl_engine.modeling.value_head import add_value_head

    words: dict[str, Any] = {}
    if tokenizer is not None:
        words = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(family, **{**SIZES, "tie_word_embeddings": family == "qwen3", **words, **settings})
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)
        if value_head:
            head = add_value_head(model, config.hidden_size, name=family)
            torch.nn.init.normal_(head.weight, std=0.5)
        write_pretrained(model, directory)


def make_parts_differ(directory: Path) -> None:
    """Set norms away from 1, biases from 0 and matrices away from 0: a fresh model would not show a lost norm or exchanged layers."""
    import torch
    from safetensors.torch import load_file, save_file

    draw = torch.Generator().manual_seed(3)
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 1:
            weight.add_(0.2 * torch.randn(weight.shape, generator=draw))
        elif "embed" not in name:
            weight.mul_(4)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def write_vision_model(
    directory: Path,
    *,
    tied: bool = True,
    levels: Sequence[int] = (0, 2),
    experts: Mapping[str, Any] | None = None,
    windows: bool = False,
) -> None:
    """Write a random Qwen3-VL as a Hugging Face directory: four text layers, of which the first get the features of the vision layers `levels`.

    There are three vision layers; with two levels each stage of a pipeline of two can hold what it must. With `experts`, keys of its text
    configuration, it is a Qwen3-VL-MoE. With `windows` it is a Qwen2.5-VL, of whose vision layers the second alone attends beyond windows of
    two by two tokens.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from skyrl_engine.modeling.exporting import write_pretrained

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 2, 1], "mrope_interleaved": True}
    text: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "max_position_embeddings"}
    text |= {"num_hidden_layers": 4, "rope_parameters": rope, **(experts or {})}
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "in_channels": CHANNELS,
        "spatial_merge_size": MERGE,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": list(levels),
    }
    special = ("image", "video", "vision_start", "vision_end")
    tokens = {f"{name}_token_id": IMAGE_TOKEN - place for place, name in enumerate(special)}
    family = "qwen3_vl" if experts is None else "qwen3_vl_moe"
    if windows:
        family = "qwen2_5_vl"
        vision = {
            name: size for name, size in vision.items() if name not in ("num_position_embeddings", "deepstack_visual_indexes")
        }
        vision |= {"window_size": 2 * MERGE * PATCH, "fullatt_block_indexes": [1]}
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, tie_word_embeddings=tied, **tokens)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        # so that norms are not 1, biases not 0 and matrices not near 0
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    write_pretrained(model, directory)


def write_tokenizer(
    directory: Path, texts: Iterable[str], *, size: int = 64, template: str | None = None, padding: str | None = PADDING
) -> "PreTrainedTokenizerFast":
    """Write a byte-level tokenizer of at most `size` tokens, trained on the texts; `END` ends a reply. `padding` None: no padding token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE(unk_token=UNKNOWN))
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[UNKNOWN, PADDING, END], show_progress=False)
    trained.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, unk_token=UNKNOWN, pad_token=padding, eos_token=END)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return tokenizer
