"""The sequence lengths at which a model's function changes, by its transformers configuration; no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_engine.errors import UnsupportedError

_BY_LENGTH = ("longrope", "dynamic")
"""Types of rotary positions whose frequencies transformers chooses by the longest position of a forward pass."""

_EXTENDING = ("linear", "dynamic", "yarn")
"""Types of rotary positions that stretch a model's positions by a factor, which `max_position_embeddings` need not hold already."""


def thresholds(config: Any) -> dict[str, int]:
    """Return every length in tokens that the decoder's configuration names as a threshold, by the name of its key.

    A comparison of two computations says nothing about a model beyond a threshold that none of its rows is longer than.
    """
    text = config.get_text_config(decoder=True)
    lengths = {name: getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size") if _slides(text, name)}
    lengths["rotary positions"] = rotary_threshold(config)
    return {name: value for name, value in lengths.items() if isinstance(value, int) and value > 0}


def find_untested_thresholds(config: Any, shortest: int, longest: int) -> dict[str, int]:
    """Return the thresholds that rows of `shortest` to `longest` tokens do not lie on both sides of."""
    return {name: length for name, length in thresholds(config).items() if not shortest <= length < longest}


def rotary_threshold(config: Any) -> int | None:
    """Return the longest row in tokens for which the rotary frequencies are those of short rows; None: they do not depend on lengths.

    LongRoPE (arXiv 2402.13753), the type "longrope" of Phi-3 and Phi-4-mini, has one set of frequencies up to
    `original_max_position_embeddings` and another beyond; "dynamic" (NTK-aware scaling) another base for every length beyond
    `max_position_embeddings`.
    """
    text = config.get_text_config(decoder=True)
    return min(_rotary_thresholds(text), default=None)


def find_longest_row(config: Any, positions: int) -> int:
    """Return the longest row in tokens of a model with so many positions (`max_position_embeddings`), stretched by its rotary positions.

    YaRN (arXiv 2309.00071), position interpolation ("linear", arXiv 2306.15595) and NTK-aware scaling ("dynamic") stretch the positions of
    the pretrained model, `original_max_position_embeddings` where the configuration names them, by a factor.
    """
    reach = positions
    for kind, table in _rotary_tables(config.get_text_config(decoder=True)):
        factor, original = table.get("factor"), table.get("original_max_position_embeddings") or positions
        if any(name in kind for name in _EXTENDING) and isinstance(factor, int | float) and isinstance(original, int):
            reach = max(reach, int(factor * original))
    return reach


def choose_rotary_length(config: Any, wanted: int | None) -> int | None:
    """Return the length in tokens for which a run fixes its rotary frequencies, so that they do not depend on how a batch is cut.

    That is `wanted`, the longest row of the run, or the threshold if rows are shorter or nobody says; rows may not be longer. Beyond its
    threshold "longrope" has one set of frequencies for all lengths, so the length is the model's longest. None: nothing is to be fixed.
    """
    threshold = rotary_threshold(config)
    if threshold is None or wanted is None or wanted <= threshold:
        return threshold
    text = config.get_text_config(decoder=True)
    if any("dynamic" in kind for kind, _ in _rotary_tables_by_length(text)):
        return wanted
    return max(wanted, int(text.max_position_embeddings))


def explain_serving(config: Any, wanted: int | None) -> str | None:
    """Say what a server of a model must do to compute what a run did that fixed rotary frequencies for rows of `wanted` tokens; None: nothing.

    vLLM (0.32) takes LongRoPE's long set where its longest sequence is beyond the threshold, and dynamic NTK's base at that threshold.
    """
    fixed, threshold = choose_rotary_length(config, wanted), rotary_threshold(config)
    if fixed is None or threshold is None:
        return None
    begin = f"its rotary frequencies are those of rows of {fixed:,} tokens (model.rotary_length), which config.json does not say: "
    if any("dynamic" in kind for kind, _ in _rotary_tables_by_length(config.get_text_config(decoder=True))):
        same = (
            "as this run" if fixed <= threshold else "which are other ones: train with rows of no more, or serve it by transformers"
        )
        return f"{begin}vLLM fixes dynamic NTK at {threshold:,} tokens, {same}"
    bound = f"of at most {threshold:,} tokens" if fixed <= threshold else f"of more than {threshold:,} tokens"
    return f"{begin}serve it with a longest sequence {bound} (vLLM: --max-model-len), or it computes with the other set"


def refuse_longer_rows(name: str, fixed: int, longest: int) -> None:
    """Raise UnsupportedError if a row is longer than the length for which the rotary frequencies of the model `name` are fixed."""
    if longest > fixed:
        raise UnsupportedError(
            f"a row has {longest:,} tokens, and {name} chooses its rotary frequencies by length: this run fixed them for rows of at most "
            f"{fixed:,} tokens",
            remedy=f"Set model.rotary_length = {longest}, or the longest row of all that is to be trained or scored",
        )


def _slides(text: Any, name: str) -> bool:
    """Return False for a window that the configuration names and switches off, as Qwen2's does."""
    return name != "sliding_window" or getattr(text, "use_sliding_window", True) is not False


def _rotary_thresholds(text: Any) -> Iterator[int]:
    for kind, table in _rotary_tables_by_length(text):
        length = None
        if kind == "longrope":
            length = table.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        if not isinstance(length, int):
            length = getattr(text, "max_position_embeddings", None)
        if isinstance(length, int):
            yield length


def _rotary_tables_by_length(text: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield type and numbers of the rotary positions that depend on lengths."""
    return ((kind, table) for kind, table in _rotary_tables(text) if any(name in kind for name in _BY_LENGTH))


def _rotary_tables(text: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield type and numbers of the rotary positions; some models have a table per type of layer."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(parameters, Mapping):
        return
    nested = [table for table in parameters.values() if isinstance(table, Mapping)]
    for table in nested or [parameters]:
        yield str(table.get("rope_type") or table.get("type") or ""), table
