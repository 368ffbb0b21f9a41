"""A run's generator: refused while planning where it cannot live as the configuration says, or would sample from other weights."""

from typing import cast

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import GeneratorTable
from skyrl_engine.contracts.kinds.generator import GeneratorDescription
from skyrl_engine.engine.automatic import find_device
from skyrl_engine.engine.generator_placement import choose_placement
from skyrl_engine.errors import UnsupportedError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.model_facts.tensor_parallel_plan import refuse_indivisible


def refuse_misplaced_generator(
    resolved: ResolvedConfig, longest: int, makes: str, *, beside: bool = False
) -> tuple[str, GeneratorDescription]:
    """Return the label and description of the run's generator, once it is known that it can live where the run says.

    `longest` counts the tokens of the longest prompt and answer together, and `makes` says what makes them so long, for the error; `beside`
    says that the generator must sample while the ranks train. Raises UnsupportedError.
    """
    plugin = resolved.plugins["generator"]
    label, description = str(plugin.loaded.record), plugin.loaded.describe_generator(plugin.options)
    table = cast("GeneratorTable | None", resolved.config.selected.get("generator"))
    placement = choose_placement(label, description, table, beside=beside)
    is_local = table is None or (table.launch == "local" and not table.devices)
    if placement == "process" and is_local and find_device(resolved) == "cuda":
        raise UnsupportedError(
            f"{label} lives in processes of its own, generator.devices names none, and the ranks compute on GPUs: it would sample on the CPU",
            remedy='Set generator.devices to GPUs that the ranks do not use, such as ["cuda:1"], or to ["cpu"] where that is meant',
        )
    if isinstance(description.cache_tokens, int) and description.cache_tokens < longest:
        raise UnsupportedError(
            f"{label} holds keys and values of {description.cache_tokens:,} tokens, and {makes}",
            remedy="Raise generator.cache_tokens, or lower one of those",
        )
    if placement == "rank" and "tensor_parallel" in description.capabilities:
        backend, model = resolved.plugins["backend"], resolved.config.model
        topology = backend.loaded.describe_backend(backend.options, resolved.config.run.ranks).topology
        if topology.tp > 1 and (config := ModelFacts(model).config) is not None:
            refuse_indivisible(config, model.path, topology.tp)
    return label, description


def refuse_generator_of_other_weights(label: str, description: GeneratorDescription) -> None:
    """Raise UnsupportedError for a generator that takes no weights, or does not say how likely its samples were to it."""
    if not description.accepts and "recorded" not in description.capabilities:
        raise UnsupportedError(
            f"{label} takes no weights: it would go on sampling from a model that is not the trained one",
            remedy="Choose a generator that takes weights, such as hf",
        )
    if "logprobs" not in description.capabilities:
        raise UnsupportedError(
            f"{label} does not declare the capability 'logprobs': nobody could tell whether it samples from the trained model",
            remedy="Choose a generator that gives the log-probabilities of what it samples, such as hf",
        )
