"""Parts of a model that drop numbers at random while it trains."""

from collections.abc import Iterator

from torch import nn

from skyrl_engine.errors import UnsupportedError

_RATES = ("attention_dropout", "dropout_p", "dropout")
"""Attributes of modules by which transformers' attention functions are told a rate."""


def refuse_dropout(model: nn.Module) -> None:
    """Raises UnsupportedError for a model that drops numbers: samples that share a prefix would all drop the same ones of it."""
    for name, rate in _iterate_rates(model):
        raise UnsupportedError(
            f"{name} drops at the rate {rate:g} while the model trains, and samples that share a prefix would drop the same of it",
            remedy='Set model.dropout = "off" and model.lora.dropout = 0, or choose the collator packed',
        )


def switch_off_modules(model: nn.Module) -> None:
    """Set to 0 every share that a module drops: those in its code, which no configuration states, too."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # noqa: SLF001 - the base of all of torch's
            module.p = 0.0
        for attribute in _RATES:
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)


def drops_at_random(model: nn.Module) -> bool:
    """Return True for a model that drops numbers while it trains."""
    return any(True for _ in _iterate_rates(model))


def _iterate_rates(model: nn.Module) -> Iterator[tuple[str, float]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:  # noqa: SLF001 - the base of all of torch's
            yield name, module.p
        for attribute in _RATES:
            rate = getattr(module, attribute, None)
            if isinstance(rate, float) and rate:
                yield f"{name}.{attribute}".lstrip("."), rate
