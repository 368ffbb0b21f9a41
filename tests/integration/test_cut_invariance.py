"""The heart: the gradient does not depend on how the batch was cut into micro-batches and ranks.

With the reducer's weights fixed before the cut, objective = sum of weight x term over all tokens; a sum does not care about its
parentheses, so any cut gives the same gradient but for rounding: <= 1e-5 relative per parameter in float32. What this does not cover:
packed rows (test_packed_rows.py), and layouts beyond data parallelism, which have no implementation here yet.
"""

import numpy as np
import pytest
import torch
from by_day import now, rarely
from transformers import AutoModelForCausalLM

from skyrl_engine.contracts.values.plan import Layout
from skyrl_engine.testing.subject import part_of
from skyrl_engine.workers.dispatch import batch_structure, cut, token_weights
from skyrl_engine.workers.launch import WorkerGroup, launch_workers
from skyrl_engine.workers.messages import GatherGradients
from skyrl_engine.workers.worker import Pass
from skyrl_engine_collators.padded.collator import PaddedCollator
from skyrl_engine_mergers.ordered import OrderedMerger
from skyrl_engine_reducers.plugin import MeanConfig, token_mean

REDUCER = token_mean.skyrl_engine_make_reducer(MeanConfig())


def gradients_of(group: WorkerGroup, columns, layout: Layout):
    """Loss, merged token losses in sample order, and full gradients of one mini-batch; the accumulated gradient is then consumed."""
    plan = PaddedCollator().plan(columns.lengths, layout)
    (mini_batch,) = plan.mini_batches
    weights = token_weights(part_of(REDUCER, "token_mean", "reducer"), batch_structure(columns, mini_batch, None))
    shards = group.put(cut(columns, mini_batch, weights, ()))
    replies = group.run(Pass("forward_backward", step=1), shards).result()
    merged = OrderedMerger().merge([reply.output for reply in replies], plan)
    return merged.metrics["loss"].result, merged, group.ask(GatherGradients())[0]


def reference(model_directory, columns):
    """The definition, in float64 and one sample at a time: mean over all loss-carrying tokens of -log p, straight from transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), int(columns.loss_weight.sum())
    for i in range(len(columns)):
        ids = torch.from_numpy(columns.input_ids[columns.token_offsets[i] : columns.token_offsets[i + 1]]).long()[None]
        actions = int(columns.action_offsets[i + 1] - columns.action_offsets[i])
        weight = torch.from_numpy(columns.loss_weight[columns.action_offsets[i] : columns.action_offsets[i + 1]]).double()
        logprobs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        for j in range(actions):
            position = ids.shape[1] - actions + j
            if weight[j]:
                total = total - weight[j] * logprobs[0, position - 1, ids[0, position]]
    loss = total / count
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def worst(gradients, expected) -> float:
    assert gradients.keys() == expected.keys()
    return max(
        float(np.linalg.norm(gradients[name].astype(np.float64) - wanted.numpy()) / np.linalg.norm(wanted.numpy()))
        for name, wanted in expected.items()
    )


@pytest.fixture(params=now(["qwen3", "llama"], "llama"))
def family(request) -> str:
    return request.param


@pytest.mark.parametrize(("dtype", "tolerance"), [rarely("float32", 1e-5), ("float64", 1e-10)])
def test_one_rank_any_micro_batch_size(family, models, columns, worker_spec, dtype, tolerance):
    loss, expected = reference(models[family], columns)
    for layout in [
        Layout(),
        *(Layout(micro_batch_rows=rows) for rows in range(1, len(columns) + 1)),
        Layout(micro_batch_tokens=45),
    ]:
        with launch_workers(worker_spec(models[family], 1, dtype), launch="inline") as group:
            got, _, gradients = gradients_of(group, columns, layout)
        assert got == pytest.approx(loss, rel=tolerance), layout
        assert worst(gradients, expected) <= tolerance, layout


def test_two_ranks(family, models, columns, worker_spec, without_ray):
    """Two processes with gloo between them, micro-batches of 1 and 8 rows, against the float64 definition and against one rank."""
    loss, expected = reference(models[family], columns)
    with launch_workers(worker_spec(models[family], 1), launch="inline") as group:
        _, alone, _ = gradients_of(group, columns, Layout(micro_batch_rows=8))
    for rows in (1, 8):
        with launch_workers(worker_spec(models[family], 2), launch="ray") as group:
            got, merged, gradients = gradients_of(group, columns, Layout(dp=2, micro_batch_rows=rows))
        assert got == pytest.approx(loss, rel=1e-5)
        assert worst(gradients, expected) <= 1e-5
        assert merged.sample_ids.tolist() == alone.sample_ids.tolist() == list(range(len(columns)))
        np.testing.assert_array_equal(merged.scored.values, alone.scored.values)
        np.testing.assert_allclose(merged.fields["token_loss"].values, alone.fields["token_loss"].values, atol=1e-5)


def test_a_wrong_scale_is_caught(family, models, columns, worker_spec):
    """The comparison itself can fail: a gradient scaled by 2, as from averaging over two ranks, is off by 1.0 in its terms."""
    _, expected = reference(models[family], columns)
    with launch_workers(worker_spec(models[family], 1), launch="inline") as group:
        _, _, gradients = gradients_of(group, columns, Layout(micro_batch_rows=4))
    assert worst({name: 2 * gradient for name, gradient in gradients.items()}, expected) == pytest.approx(1.0, rel=1e-3)
