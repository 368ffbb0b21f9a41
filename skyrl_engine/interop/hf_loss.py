"""A loss and a reducer of this engine as `compute_loss_func` of Hugging Face's Trainer, or in a training loop of one's own."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from attrs import define, field

from skyrl_engine.errors import DataError, UnsupportedError
from skyrl_engine.interop.hf_rows import IGNORED
from skyrl_engine.interop.selection import NO_OPTIONS, Options, select_plugin

if TYPE_CHECKING:
    import torch

    from skyrl_engine.contracts.kinds.loss import Loss
    from skyrl_engine.contracts.kinds.reducer import Reducer
    from skyrl_engine.contracts.values.outputs import Metric
    from skyrl_engine.registry.bound_plugin import BoundPlugin


def hf_loss(
    loss: object = "cross_entropy",
    reducer: object = "token_mean",
    *,
    loss_options: Options = NO_OPTIONS,
    reducer_options: Options = NO_OPTIONS,
) -> "HfLoss":
    """Return a `compute_loss_func` of transformers' Trainer and TRL's SFTTrainer that computes this loss, averaged by this reducer.

    Each of the two is a name as in a configuration ("focal", "./mine.py:focal") or the plugin itself. The loss may read scores of a position's
    logits (`logprobs`, `entropy`, `logits`, `logsumexp`, `mean_logprob`, `log_sum_squares`); the reducer must be exact from one micro-batch
    and the number of tokens of the step, as `token_mean` and `sum` are.

    Raises UnsupportedError for another loss or reducer, ConfigError for options, and what selecting a plugin raises.
    """
    from skyrl_engine.contracts.kinds.context import FactoryContext
    from skyrl_engine.engine.capability import check_reducer
    from skyrl_engine.interop.step_weights import refuse_reducer_of_whole_steps
    from skyrl_engine.registry.resolve import Registry

    registry, context = Registry.discover(), FactoryContext()
    of_loss = select_plugin(registry, "loss", loss, loss_options).bind("loss", context)
    of_reducer = select_plugin(registry, "reducer", reducer, reducer_options).bind("reducer", context)
    _refuse_loss_beyond_logits(of_loss)
    refuse_reducer_of_whole_steps(of_reducer)
    check_reducer(of_loss.label, of_loss.product, of_reducer.name)
    return HfLoss(of_loss, of_reducer)


@define
class HfLoss:
    """The product of `hf_loss`. `metrics` are those that the loss reported of the last micro-batch, on this rank."""

    loss: "BoundPlugin[Loss]"
    reducer: "BoundPlugin[Reducer]"
    metrics: "Mapping[str, Metric]" = field(factory=dict, init=False)

    def __call__(
        self, outputs: Any, labels: "torch.Tensor | None", num_items_in_batch: "torch.Tensor | int | None" = None
    ) -> "torch.Tensor":
        """Return this micro-batch's part of the step's loss, a scalar to differentiate; the parts of a step add up to its loss.

        `outputs` hold `logits` [rows, width, vocabulary], or are these logits; `labels` int64[rows, width] are not shifted: column t is
        predicted at column t - 1. Each row is one sequence. `num_items_in_batch` counts the labels of the whole step, over all micro-batches
        and ranks, that are not -100, without column 0.

        Raises DataError where these do not fit together, UnsupportedError for a loss that draws random numbers, PluginBrokenError where the
        loss fails, ResultError for a result other than one number per token.
        """
        from skyrl_engine.contracts.kinds.loss import as_loss_output
        from skyrl_engine.interop.step_weights import weigh_tokens
        from skyrl_engine.objective.objective import refuse_other_than_real_numbers
        from skyrl_engine.registry.owner import blame

        logits_BTV = _read_logits(outputs, labels)
        assert labels is not None
        targets_BT = labels[:, 1:].to(logits_BTV.device)
        carrying_BT = targets_BT != IGNORED
        scores = _score(logits_BTV[:, :-1][carrying_BT], targets_BT[carrying_BT], self.loss.product.needs)
        counts_B = carrying_BT.sum(1)
        weights_N = weigh_tokens(self.reducer, counts_B.cpu().numpy(), num_items_in_batch)
        with blame(self.loss.owner, "its call"):
            tokens = _make_tokens(self.loss, scores, counts_B)
            output = as_loss_output(self.loss.label, self.loss.product(tokens), len(weights_N))
        refuse_other_than_real_numbers(self.loss.label, output.token_loss)
        self.metrics = output.metrics
        like = scores["logprobs"]
        total = (_to_tensor(weights_N, like) * output.token_loss).sum()
        # a micro-batch without loss takes part in the backward pass of its ranks all the same
        return total if len(weights_N) else total + like.sum()


def _refuse_loss_beyond_logits(loss: "BoundPlugin[Loss]") -> None:
    from skyrl_engine.contracts.kinds.loss import compares_pairs
    from skyrl_engine.modeling.chunked_head import VOCABULARY_SCORES

    if compares_pairs(loss.product):
        raise UnsupportedError(
            f"{loss.label} compares chosen with rejected answers, and compute_loss_func is not told which rows are which",
            remedy='Train with it by this engine (trainer = "preference"), or choose a loss of single sequences',
        )
    missing = [need for need in loss.product.needs if need not in VOCABULARY_SCORES]
    if missing:
        raise UnsupportedError(
            f"{loss.label} needs {', '.join(missing)}, and compute_loss_func is given logits and labels alone",
            remedy=f"Choose a loss of {', '.join(VOCABULARY_SCORES)}, or train with it by this engine",
        )


def _read_logits(outputs: Any, labels: "torch.Tensor | None") -> "torch.Tensor":
    """Return the logits [rows, width, vocabulary] of a model's outputs. Raises DataError where labels do not fit, or either is missing."""
    import torch

    logits: Any = outputs
    if not isinstance(outputs, torch.Tensor):
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if labels is None or logits is None:
        raise DataError(
            f"hf_loss was called without {'labels' if labels is None else 'logits'}",
            remedy="Let the collator make labels"
            if labels is None
            else "Set use_liger_kernel = False, so that the model returns logits",
        )
    if logits.ndim != 3 or labels.shape != logits.shape[:2]:
        raise DataError(
            f"hf_loss was called with logits {list(logits.shape)} and labels {list(labels.shape)}",
            remedy="Give it logits [rows, width, vocabulary] of every position, and labels [rows, width]",
        )
    return cast("torch.Tensor", logits)


def _score(logits_NV: "torch.Tensor", targets_N: "torch.Tensor", needs: tuple[str, ...]) -> dict[str, "torch.Tensor"]:
    """Return `logprobs` and what else `needs` name, each [n]: float32, or float64 of such logits."""
    from skyrl_engine.modeling.causal_lm import LogitRule
    from skyrl_engine.modeling.chunked_head import RequestedScores, Score

    requested = RequestedScores.of(needs, targets_N, {})
    return requested.name_values(Score(LogitRule(), 1.0, requested.scores)(logits_NV, requested.tokens))


def _make_tokens(loss: "BoundPlugin[Loss]", scores: Mapping[str, "torch.Tensor"], counts_B: "torch.Tensor") -> Any:
    import torch

    from skyrl_engine.contracts.kinds.loss import LossTokens, Sequences

    def refuse_random_numbers() -> "torch.Generator":
        raise UnsupportedError(
            f"{loss.label} draws random numbers by step and sample, and compute_loss_func is told neither",
            remedy="Choose a loss that draws none, or train with it by this engine",
        )

    ids_B = torch.arange(len(counts_B), device=counts_B.device)
    sequences = Sequences(torch.repeat_interleave(ids_B, counts_B), counts_B, ids_B, ids_B)
    return LossTokens({need: scores[need] for need in loss.product.needs}, sequences, refuse_random_numbers)


def _to_tensor(weights: Any, like: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.from_numpy(weights).to(like)
