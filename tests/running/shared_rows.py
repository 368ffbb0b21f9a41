"""Samples that share prefixes, and what a scorer makes of them: for tests of rows of trees."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_engine.contracts.kinds.collator import measure_lengths
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.tiny import VOCABULARY


def make_columns(seed: int, *, depth: int = 3) -> SampleColumns:
    """Two trees of so many levels and some samples that stand alone; branches of 1 to 9 tokens behind a trunk of 16."""
    numbers = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for _ in range(2):
        paths = [numbers.integers(1, VOCABULARY, 16).tolist()]
        for _ in range(depth):
            paths = [[*path, *numbers.integers(1, VOCABULARY, numbers.integers(1, 9)).tolist()] for path in paths for _ in range(2)]
        rows += [*paths, paths[0], paths[-1][:-1]]
    rows += [numbers.integers(1, VOCABULARY, numbers.integers(2, 30)).tolist() for _ in range(3)]
    actions = [int(numbers.integers(1, min(len(row), 15))) for row in rows]
    return SampleColumns.from_lists(input_ids=rows, num_actions=actions, loss_mask=[numbers.random(count) for count in actions])


def losses_and_gradients(
    scorer: Scorer, columns: SampleColumns, collator: Any, layout: Layout
) -> tuple[dict[int, Any], dict[str, Tensor]]:
    """Log-probabilities by sample, and the gradient of their sum weighted by the samples' loss weights."""
    from skyrl_engine.modeling.model_inputs import model_inputs
    from skyrl_engine.spans import Spans
    from skyrl_engine.testing.subject import part_of
    from skyrl_engine.workers.batch import ShardBatch
    from skyrl_engine.workers.dispatch import cut

    plan = collator.plan(measure_lengths(collator, columns), layout)
    (mini_batch,) = plan.mini_batches
    weights = columns.take(mini_batch.samples).loss_weight.astype(np.float64)
    scores: dict[int, Any] = {}
    scorer.zero_grad()
    for shard in cut(columns, mini_batch, weights, ()):
        for micro_batch in ShardBatch(shard, part_of(collator, "it", "collator"), "actions", Spans()):
            arguments = model_inputs(micro_batch)
            logprobs = scorer(
                arguments.inputs,
                arguments.positions,
                micro_batch.labels,
                segments=arguments.segments,
                needs=("logprobs", "entropy"),
            )["logprobs"]
            samples = micro_batch.samples
            own = torch.from_numpy(samples.weights).to(logprobs)
            (own * logprobs).sum().backward()
            by_sample = torch.split(logprobs.detach(), samples.scored.lengths.tolist())
            scores |= dict(zip(samples.sample_ids.tolist(), by_sample, strict=True))
    return scores, {name: parameter.grad.clone() for name, parameter in scorer.named_parameters() if parameter.grad is not None}
