"""`pair_loss`: use another engine's loss of preference pairs, which takes log-probabilities of whole answers, unchanged."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
from attrs import define

from skyrl_engine import LossOutput, LossTokens, Metric, loss
from skyrl_engine.contracts.values.outputs import ENGINE_METRICS
from skyrl_engine.errors import ContractError
from skyrl_engine.hooks.decorators import LossPlugin
from skyrl_engine.interop.arguments import OPTION, match_meanings
from skyrl_engine.interop.options import options_class

if TYPE_CHECKING:
    import torch

CONFIG = "config"

NAMES = {
    CONFIG: ("config", "cfg", "args"),
    "logprobs:chosen": ("policy_chosen_logps", "chosen_logps", "policy_chosen_logprobs", "chosen_logprobs"),
    "logprobs:rejected": ("policy_rejected_logps", "rejected_logps", "policy_rejected_logprobs", "rejected_logprobs"),
    "ref_logprobs:chosen": ("reference_chosen_logps", "ref_chosen_logps", "reference_chosen_logprobs", "ref_chosen_logprobs"),
    "ref_logprobs:rejected": (
        "reference_rejected_logps",
        "ref_rejected_logps",
        "reference_rejected_logprobs",
        "ref_rejected_logprobs",
    ),
}
"""Known names of arguments by their meaning, NEED:HALF, in TRL and OpenRLHF."""


def pair_loss(
    function: Callable[..., Any],
    *,
    config: type[Any] | Mapping[str, Any] | None = None,
    arguments: Mapping[str, str] | None = None,
    average: bool = False,
    metrics: tuple[str, ...] = (),
    name: str | None = None,
) -> LossPlugin:
    """Make a loss plugin of `function(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, ...) -> losses`.

    Each argument is a tensor [P]: the sum of an answer's log-probabilities in nats, or with `average` their mean, of the policy or of the
    reference. The function returns a loss per pair [P], or their mean, alone or first in a tuple; for a mean it is called pair by pair.
    `metrics` names further results, [P] or a number each, in order.

    `config` and `arguments` are as in `masked_loss`; a meaning is "logprobs:chosen", "logprobs:rejected", "ref_logprobs:chosen" or
    "ref_logprobs:rejected". Raises TypeError for arguments that cannot be matched.
    """
    called = name or str(getattr(function, "__name__", type(function).__name__))
    schema: type[Any] | None = options_class(f"{called}_options", config) if isinstance(config, Mapping) else config
    options = () if schema is None else tuple(field.name for field in attrs.fields(schema))
    matched = match_meanings(called, function, arguments or {}, options, NAMES)
    for half in ("chosen", "rejected"):
        if f"logprobs:{half}" not in matched.values():
            raise TypeError(f"{called} takes no log-probabilities of {half} answers ({', '.join(NAMES[f'logprobs:{half}'])})")
    needs = tuple(
        need for need in ("logprobs", "ref_logprobs") if any(meaning.startswith(f"{need}:") for meaning in matched.values())
    )
    adapted = PairLoss(called, function, matched, average, metrics)
    return loss(needs=needs, config=schema, unit_size=2, reducers=("sequence_mean",))(adapted)


@define(eq=False)
class PairLoss:
    """The function that `skyrl_engine.loss` decorates, made of another engine's function of pairs."""

    __name__: str
    function: Callable[..., Any]
    arguments: Mapping[str, str]
    average: bool
    metrics: tuple[str, ...]

    def __call__(self, tokens: LossTokens, config: Any) -> "LossOutput | torch.Tensor":
        """Return each token's pair's loss [n], and the further results as means over pairs."""
        pairs = tokens.pairs
        if not len(pairs):
            return tokens.logprobs * 0
        sums = {
            meaning: self._sum(tokens, *meaning.split(":"))
            for meaning in self.arguments.values()
            if not meaning.startswith((OPTION, CONFIG))
        }
        losses, others = self._losses(sums, config, len(pairs))
        return LossOutput(pairs.broadcast(losses), self._metrics(others, len(pairs)))

    def _sum(self, tokens: LossTokens, need: str, half: str) -> "torch.Tensor":
        side = getattr(tokens.pairs, half)
        values: torch.Tensor = getattr(tokens, need)
        result: torch.Tensor = side.mean(values) if self.average else side.sum(values)
        return result

    def _losses(self, sums: "Mapping[str, torch.Tensor]", config: Any, count: int) -> "tuple[torch.Tensor, list[Any]]":
        """Return the loss of every pair [P], and the further results."""
        import torch

        first, others = self._call(sums, config)
        if tuple(first.shape) == (count,):
            return first, others
        if first.numel() != 1:
            raise ContractError(
                f"{self.__name__} returns {tuple(first.shape)} for {count} pairs",
                remedy="Let it return one loss per pair, or their mean",
            )
        # a mean tells no pair's own loss: that of one pair is its loss
        alone = [self._call({name: values[pair : pair + 1] for name, values in sums.items()}, config)[0] for pair in range(count)]
        return torch.stack([value.reshape(()) for value in alone]), others

    def _call(self, sums: "Mapping[str, torch.Tensor]", config: Any) -> "tuple[torch.Tensor, list[Any]]":
        keywords = {
            argument: getattr(config, argument) if meaning.startswith(OPTION) else config if meaning == CONFIG else sums[meaning]
            for argument, meaning in self.arguments.items()
        }
        result = self.function(**keywords)
        first, *others = result if isinstance(result, tuple) else (result,)
        return first, others

    def _metrics(self, others: list[Any], count: int) -> dict[str, Metric]:
        if len(others) > len(self.metrics) > 0:
            raise ContractError(
                f"{self.__name__} returns {len(others)} further values, of which not all have names",
                remedy="Name them, in order, in metrics=(...) of pair_loss, or none of them",
            )
        named = zip(self.metrics, others, strict=False)
        return {
            f"{self.__name__}_{name}" if name in ENGINE_METRICS else name: Metric.mean(
                value.detach().float().mean().double() * count if hasattr(value, "detach") else float(value) * count, count
            )
            for name, value in named
        }
