"""The tokens that end what a model says."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.model_facts.facts import ModelFacts, find_file
from skyrl_engine.model_facts.json_file import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def end_tokens(model: ModelConfig, tokenizer: "PreTrainedTokenizerBase | None" = None) -> tuple[int, ...]:
    """Return every end token, each once: of the model's generation configuration, of its configuration, and of its tokenizer.

    A chat model names several: that of a turn and that of a text. Taking one of them alone lets it talk past its end. Raises ModelError for
    a generation configuration that cannot be read.
    """
    file = find_file(model, "generation_config.json")
    stated = [] if file is None else [*_numbers(read_object(Path(file)).get("eos_token_id"))]
    config = ModelFacts(model).config
    if config is not None:
        stated += _numbers(getattr(config.get_text_config(decoder=True), "eos_token_id", None))
    if tokenizer is not None:
        stated += _numbers(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(stated))


def _numbers(value: Any) -> Iterator[int]:
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, int) and not isinstance(number, bool):
            yield number
