"""objective = sum over tokens of weight[t] * term[t]: the one place where weights and losses meet."""

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import add

import numpy as np
import torch
from attrs import Factory, field, frozen

from skyrl_engine.contracts.kinds.backend import MicroBatch
from skyrl_engine.contracts.kinds.loss import Loss, LossOutput, as_loss_output, compares_pairs
from skyrl_engine.contracts.values.outputs import Metric, RankOutput
from skyrl_engine.contracts.values.source_names import BY_SOURCE
from skyrl_engine.errors import ContractError, DetachedLossError, ResultError
from skyrl_engine.objective.behind import Later, to_device
from skyrl_engine.objective.by_source import losses_of_sources
from skyrl_engine.objective.corrections import correct
from skyrl_engine.objective.outputs import collect, numbers_per_token
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.objective.policy_metrics import Watched, policy_metrics, scores_for
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine.objective.tokens import MicroBatchTokens
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.registry.owner import blame
from skyrl_engine.spans import Spans


@frozen(eq=False)
class LossObjective:
    """Weighs the per-token values of the main loss and its terms and sums them; collects per-token outputs when asked.

    Stateless between calls. `seed` and `step` seed the generators of losses together with the micro-batch's sample ids. Of a pass that scores
    tokens without loss too, the parts are given those with loss alone, and outputs hold the scores of all. `shown` are model scores that
    per-token outputs hold in addition to those that the parts read. `bound` are columns that this pass's own scores stand for, detached:
    `{"old_logprobs": "logprobs"}` makes the policy its own old one. `watch` adds metrics of the policy (`objective/policy_metrics.py`).
    `coefficients` by the name of a term are in the place of the configured ones.
    """

    parts: ObjectiveParts
    seed: int
    step: int
    per_token_outputs: bool
    spans: Spans = field(factory=Spans)
    temperature: float = 1.0
    shown: frozenset[str] = frozenset()
    bound: Mapping[str, str] = Factory(dict)
    watch: frozenset[Watched] = frozenset()
    coefficients: Mapping[str, float] = Factory(dict)

    @property
    def needs(self) -> frozenset[str]:
        """Model scores the backend must compute: those that the parts read, and log-probabilities where there are per-token outputs.

        A critic's pass reads values alone; it is spared everything of the vocabulary's size.
        """
        read = (
            self.parts.scores
            | scores_for(self.watch)
            | {score for column, score in self.bound.items() if column in self.parts.columns}
        )
        return read if read and not self.per_token_outputs else read | self.shown | {"logprobs"}

    def __call__(self, scores: Mapping[str, torch.Tensor], micro_batch: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
        """Sum of weight times value over the n scored tokens that carry loss (a scalar to differentiate), and the outputs of all.

        The value of a token is factor * main + sum of coefficient * term; in the outputs it is 0 of a token without loss.
        Raises PluginBrokenError when a loss fails, ResultError when it returns other than one value per token that depends on the model.
        """
        with self.spans("objective"):
            scored: ScoredSamples = micro_batch.samples
            samples = scored.of_loss
            tokens = MicroBatchTokens(_of_loss(scores, scored), samples, self.seed, self.step, self.bound)
            metrics: dict[str, Metric] = {}
            later = Later(tokens.like.device)
            values = list(self._values(tokens, metrics, later))
            token_loss = reduce(add, values)
            weights = to_device(torch.from_numpy(samples.weights), tokens.like.device, tokens.like.dtype)
            total = (weights * token_loss).sum()
            if not len(weights):
                # Take part in the backward pass, and in the collectives of its ranks, through all that others take part through.
                total = sum((tokens.scores[name].sum() for name in sorted(self.parts.scores)), start=total)
            metrics |= self._sums(weights, total, values, token_loss, samples)
            metrics |= self._metrics_by_source(tokens)
            if self.watch:
                metrics |= policy_metrics(tokens, self.watch)
            shown = {**numbers_per_token(scores), "token_loss": _scatter_to_scored(token_loss, scored)}
            return total, collect(scored, shown, metrics, later, per_token_outputs=self.per_token_outputs)

    def _values(self, tokens: MicroBatchTokens, metrics: dict[str, Metric], later: Later) -> Iterator[torch.Tensor]:
        """[n] per part, in their order, coefficient and factor included; what the parts measured goes into `metrics`."""
        for part, term in enumerate(self.parts.losses):
            output = _evaluate_loss(term, tokens, part)
            _add(metrics, output.metrics, "" if term is self.parts.main else f"{term.name}/", term.label)
            value = output.token_loss
            if term is self.parts.main and self.parts.corrections:
                factors, measured = correct(self.parts.corrections, tokens, later, first_index=len(self.parts.losses))
                metrics |= measured
                # A dropped token counts for nothing even if it is not finite.
                value = torch.where(factors == 0, 0.0, factors * value)
            coefficient = self.coefficients.get(term.name, term.coefficient)
            yield value if coefficient == 1.0 else coefficient * value

    def _metrics_by_source(self, tokens: MicroBatchTokens) -> dict[str, Metric]:
        """Metrics of the main loss over the samples of each source, `by_source/NUMBER/NAME`, of preferences from several: the loss is asked
        again about the samples of one source at a time. None of other samples, about which `loss/NUMBER` says enough.
        """
        samples = tokens.samples
        if samples.sources is None or samples.roles is None:
            return {}
        metrics: dict[str, Metric] = {}
        for source in np.unique(samples.sources).tolist():
            with torch.no_grad():
                output = _evaluate_loss(self.parts.main, tokens.of_samples(np.flatnonzero(samples.sources == source)), 0)
            metrics |= {f"{BY_SOURCE}{source}/{name}": metric for name, metric in output.metrics.items()}
        return metrics

    def _sums(
        self,
        weights: torch.Tensor,
        total: torch.Tensor,
        values: list[torch.Tensor],
        token_loss: torch.Tensor,
        samples: ScoredSamples,
    ) -> dict[str, Metric]:
        """`loss`, what each part contributes to it where there are several, and the loss of each source where there are several."""
        metrics = {"loss": Metric.sum(total)}
        if len(values) > 1:
            parts = zip(self.parts.losses, values, strict=True)
            metrics |= {f"objective/{term.name}": Metric.sum((weights * value.detach()).sum()) for term, value in parts}
        return metrics | losses_of_sources(weights, token_loss, samples)


def _evaluate_loss(term: BoundPlugin[Loss], tokens: MicroBatchTokens, index: int) -> LossOutput:
    """Values of a part for the tokens: where it is on one role alone, tokens of the other have the value 0."""
    loss_tokens = tokens.for_loss(term.label, term.product.needs, index, pairs=compares_pairs(term.product), on=term.on)
    count = len(loss_tokens.sequences.index)
    with blame(term.owner, "its call"):
        output = as_loss_output(term.label, term.product(loss_tokens), count)
    refuse_other_than_real_numbers(term.label, output.token_loss)
    if count and _is_learning(tokens.scores) and not output.token_loss.requires_grad:
        raise DetachedLossError(
            f"{term.label} returned values that do not depend on the model, so nothing would be learned",
            remedy="Compute them from tokens.logprobs, tokens.entropy or tokens.values, without detach() or no_grad()",
        )
    if term.on is None:
        return output
    places = tokens.places_in_role(term.label, term.on)
    return LossOutput(output.token_loss.new_zeros(len(tokens.like)).index_copy(0, places, output.token_loss), output.metrics)


def _of_loss(scores: Mapping[str, torch.Tensor], scored: ScoredSamples) -> Mapping[str, torch.Tensor]:
    """The scores of those tokens that carry loss, by name."""
    if scored.carrying is None:
        return scores
    # places and no mask: their number is known on the host
    places = torch.from_numpy(np.flatnonzero(scored.carrying))
    return {name: score.index_select(0, to_device(places, score.device)) for name, score in scores.items()}


def _scatter_to_scored(values: torch.Tensor, scored: ScoredSamples) -> torch.Tensor:
    """[n]: `values` of the tokens that carry loss, and 0 for each other token."""
    if scored.carrying is None:
        return values
    places = to_device(torch.from_numpy(np.flatnonzero(scored.carrying)), values.device)
    return values.new_zeros(len(scored.carrying)).index_copy(0, places, values.detach())


def _is_learning(scores: Mapping[str, torch.Tensor]) -> bool:
    return any(score.requires_grad for score in scores.values())


def _add(metrics: dict[str, Metric], measured: Mapping[str, Metric], prefix: str, label: str) -> None:
    for name, metric in measured.items():
        if prefix + name in metrics:
            raise ContractError(
                f"{label} reports the metric {prefix + name!r}, which another part of the objective reports too",
                remedy="Rename it in one of them",
            )
        metrics[prefix + name] = metric


def refuse_other_than_real_numbers(label: str, token_loss: object) -> None:
    if not isinstance(token_loss, torch.Tensor) or not token_loss.is_floating_point():
        got = str(token_loss.dtype) if isinstance(token_loss, torch.Tensor) else f"a {type(token_loss).__qualname__}"
        raise ResultError(f"{label} returned {got}", remedy="Return a torch tensor of floating-point numbers, one per token")
