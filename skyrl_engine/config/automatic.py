"""Keys that may say "auto": which of a configuration still do, and the same configuration once the engine has chosen.

A choice is made while a run is planned, from its backend, its model, its data and its machine (`skyrl_engine.engine.automatic`). The run
records the configuration with what was chosen, and goes on with it after an interruption, wherever that is.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import attrs

from skyrl_engine.config.resolution import ResolvedConfig, SelectedPlugin
from skyrl_engine.config.schema import PluginTable, RlConfig, TrainingConfig
from skyrl_engine.config.structure import plain
from skyrl_engine.contracts.values.model import NEW_ADAPTERS, ComputeDtype
from skyrl_engine.registry.kinds import AUTO, KINDS

DTYPE: Final = "model.dtype"
COLLATOR: Final = "collator.use"
PROMPT: Final = "rl.max_prompt_tokens"


def find_sizes(resolved: ResolvedConfig) -> tuple[str, TrainingConfig | RlConfig]:
    """Return the table that holds the sizes of micro-batches, `[rl]` or `[training]`, and its name."""
    config = resolved.config
    return ("rl", config.rl) if config.has("rl") else ("training", config.training)


def list_automatic_keys(resolved: ResolvedConfig) -> tuple[str, ...]:
    """Return the keys whose value the engine has still to choose, dotted."""
    return tuple(_iterate_keys(resolved))


def _iterate_keys(resolved: ResolvedConfig) -> Iterator[str]:
    if resolved.config.has("model") and resolved.config.model.dtype == AUTO:
        yield DTYPE
    table = resolved.config.selected.get("collator")
    if table is not None and table.use == AUTO:
        yield COLLATOR
    name, sizes = find_sizes(resolved)
    if isinstance(sizes, RlConfig) and sizes.max_prompt_tokens == AUTO:
        yield PROMPT
    if sizes.micro_batch_tokens == AUTO:
        yield f"{name}.micro_batch_tokens"


def budget_of(sizes: TrainingConfig | RlConfig) -> int | None:
    """Return the token budget of a micro-batch, which is chosen; None for none."""
    assert sizes.micro_batch_tokens != AUTO, "it is chosen while a run is prepared"
    return cast("int | None", sizes.micro_batch_tokens)


def find_prompt_limit(rl: RlConfig) -> int:
    """Return the most tokens of a prompt, which is chosen."""
    assert rl.max_prompt_tokens != AUTO, "it is chosen first of all while a run is prepared"
    return cast("int", rl.max_prompt_tokens)


def find_attempt_limit(rl: RlConfig) -> int:
    """Return the most tokens of an attempt, its prompt included."""
    return find_prompt_limit(rl) + rl.max_tokens


def with_dtype(resolved: ResolvedConfig, dtype: ComputeDtype) -> ResolvedConfig:
    """Return the configuration with this precision."""
    model = attrs.evolve(resolved.config.model, dtype=dtype)
    return attrs.evolve(resolved, config=attrs.evolve(resolved.config, model=model))


def with_rotary_length(resolved: ResolvedConfig, length: int) -> ResolvedConfig:
    """Return the configuration with rotary frequencies fixed for rows of so many tokens."""
    model = attrs.evolve(resolved.config.model, rotary_length=length)
    return attrs.evolve(resolved, config=attrs.evolve(resolved.config, model=model))


def with_micro_batch_tokens(resolved: ResolvedConfig, tokens: int | None) -> ResolvedConfig:
    """Return the configuration with this budget of a micro-batch; None: no budget."""
    name, sizes = find_sizes(resolved)
    changed: dict[str, Any] = {name: attrs.evolve(sizes, micro_batch_tokens=tokens)}
    return attrs.evolve(resolved, config=attrs.evolve(resolved.config, **changed))


def with_max_prompt_tokens(resolved: ResolvedConfig, tokens: int) -> ResolvedConfig:
    """Return the configuration with this limit of a prompt."""
    rl = attrs.evolve(resolved.config.rl, max_prompt_tokens=tokens)
    return attrs.evolve(resolved, config=attrs.evolve(resolved.config, rl=rl))


def with_collator(resolved: ResolvedConfig, collator: SelectedPlugin, use: str | None = None) -> ResolvedConfig:
    """Return the configuration with this collator, which it calls `use`; None: by its full name."""
    selected = {**resolved.config.selected, "collator": PluginTable(use or collator.loaded.record.reference, collator.table)}
    chosen = {**resolved.plugins, "collator": collator}
    of_kinds = {place: chosen.pop(place) for place in KINDS if place in chosen}
    return attrs.evolve(resolved, config=attrs.evolve(resolved.config, selected=selected), plugins={**of_kinds, **chosen})


def with_recorded_choices(resolved: ResolvedConfig, recorded: Mapping[str, Any]) -> ResolvedConfig:
    """Return the configuration with what the engine chose before, of which `recorded` is the whole, for every key that leaves it open.

    Those are the keys that say "auto", and `model.rotary_length` where it says "none". Adapters that training started from go on with their own
    numbers: runs of engines before 0.3 recorded defaults that nothing had asked for.

    Raises PluginError for a recorded collator that is not there, and ConfigError for options that it refuses.
    """
    for key in list_automatic_keys(resolved):
        name, _, last = key.partition(".")
        table = recorded.get(name, {})
        if table.get(last, AUTO) == AUTO:
            continue
        if key == DTYPE:
            resolved = with_dtype(resolved, cast("ComputeDtype", table[last]))
        elif key == COLLATOR:
            options = {option: value for option, value in table.items() if option != "use"}
            record = resolved.registry.resolve("collator", table["use"])
            collator = SelectedPlugin.of(record, options, "the checkpoint's configuration")
            resolved = with_collator(resolved, collator, table["use"])
        elif key == PROMPT:
            resolved = with_max_prompt_tokens(resolved, table[last])
        else:
            resolved = with_micro_batch_tokens(resolved, table[last])
    length = recorded.get("model", {}).get("rotary_length")
    if length is not None and resolved.config.has("model") and resolved.config.model.rotary_length is None:
        resolved = with_rotary_length(resolved, length)
    return _without_recorded_adapter_keys(resolved, recorded.get("model", {}).get("lora"))


def _without_recorded_adapter_keys(resolved: ResolvedConfig, recorded: Mapping[str, Any] | None) -> ResolvedConfig:
    """Leave to existing adapters those of their keys that are as recorded, which the run was begun with."""
    lora = resolved.config.model.lora if resolved.config.has("model") else None
    if recorded is None or recorded.get("path") is None or lora is None or lora.path is None:
        return resolved
    own: dict[str, Any] = {name: None for name in NEW_ADAPTERS if plain(getattr(lora, name)) == recorded.get(name)}
    model = attrs.evolve(resolved.config.model, lora=attrs.evolve(lora, **own))
    return attrs.evolve(resolved, config=attrs.evolve(resolved.config, model=model))
