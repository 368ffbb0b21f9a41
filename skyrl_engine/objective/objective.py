"""objective = sum over tokens of weight[t] * term[t]: the one place where weights and losses meet."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import field, frozen

from skyrl_engine.contracts.backend import MicroBatch
from skyrl_engine.contracts.loss import MODEL_SCORES, Loss, LossTokens, Sequences, as_loss_output
from skyrl_engine.contracts.outputs import Metric, RankOutput
from skyrl_engine.errors import ContractError, DataError
from skyrl_engine.objective.outputs import collect
from skyrl_engine.objective.samples import ScoredSamples
from skyrl_engine.registry.host import Owner, blaming
from skyrl_engine.spans import Spans

if TYPE_CHECKING:
    from skyrl_engine.contracts.ragged import IntArray


@frozen(eq=False)
class LossObjective:
    """Weighs one loss's per-token terms and sums them; collects per-token outputs when asked. Stateless between calls.

    `label` names the loss in errors. `seed` and `step` seed the loss's generator together with the micro-batch's sample ids.
    """

    label: str
    loss: Loss
    seed: int
    step: int
    per_token_outputs: bool
    spans: Spans = field(factory=Spans)
    temperature: float = 1.0

    @property
    def needs(self) -> frozenset[str]:
        """Model scores the backend must compute; log-probabilities are always among them, they are the basic output."""
        return frozenset({"logprobs", *self.loss.needs}) & frozenset(MODEL_SCORES)

    def __call__(self, scores: Mapping[str, torch.Tensor], micro_batch: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
        """Sum of weight times term over the micro-batch's n scored tokens (a scalar to differentiate), and the outputs.

        Raises PluginBrokenError when the loss fails, ContractError when it returns other than one value per token that depends on the model.
        """
        with self.spans("objective"):
            samples: ScoredSamples = micro_batch.samples
            logprobs = scores["logprobs"]
            count = len(logprobs)
            tokens = self._tokens(scores, samples)
            with blaming(Owner(self.label, "Correct it, or choose another loss"), "its call"):
                output = as_loss_output(self.label, self.loss(tokens), count)
            _refuse_other_than_real_numbers(self.label, output.token_loss)
            if count and logprobs.requires_grad and not output.token_loss.requires_grad:
                raise ContractError(
                    f"{self.label} returned values that do not depend on the model, so nothing would be learned",
                    remedy="Compute them from tokens.logprobs, tokens.entropy or tokens.values, without detach() or no_grad()",
                )
            weights = torch.from_numpy(samples.weights).to(device=logprobs.device, dtype=logprobs.dtype)
            total = (weights * output.token_loss).sum()
            metrics = {"loss": Metric.sum(total.item()), **output.metrics}
            values = {**scores, "token_loss": output.token_loss}
            return total, collect(samples, values, metrics, per_token_outputs=self.per_token_outputs)

    def _tokens(self, scores: Mapping[str, torch.Tensor], samples: ScoredSamples) -> LossTokens:
        logprobs = scores["logprobs"]

        def moved(array: "IntArray") -> torch.Tensor:
            return torch.from_numpy(array).to(logprobs.device)

        needs = {
            name: scores[name]
            if name in MODEL_SCORES
            else self._column(name, samples).to(device=logprobs.device, dtype=logprobs.dtype)
            for name in self.loss.needs
        }
        sequences = Sequences(
            index=moved(samples.sequence_index),
            counts=moved(samples.scored.lengths),
            unit_ids=moved(samples.unit_ids),
            group_ids=moved(samples.group_ids),
        )
        return LossTokens(needs, sequences, lambda: self._generator(samples, logprobs.device))

    def _generator(self, samples: ScoredSamples, device: torch.device) -> torch.Generator:
        entropy = [self.seed, self.step, *samples.sample_ids.tolist()]
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))
        return torch.Generator(device).manual_seed(seed)

    def _column(self, name: str, samples: ScoredSamples) -> torch.Tensor:
        if name not in samples.columns:
            raise DataError(
                f"{self.label} needs the column {name!r}, the data has {', '.join(sorted(samples.columns)) or 'none'}",
                remedy="Provide the column or choose a loss that does not need it",
            )
        return torch.from_numpy(samples.columns[name])


def _refuse_other_than_real_numbers(label: str, token_loss: object) -> None:
    if not isinstance(token_loss, torch.Tensor) or not token_loss.is_floating_point():
        got = str(token_loss.dtype) if isinstance(token_loss, torch.Tensor) else f"a {type(token_loss).__qualname__}"
        raise ContractError(f"{label} returned {got}", remedy="Return a torch tensor of floating-point numbers, one per token")
