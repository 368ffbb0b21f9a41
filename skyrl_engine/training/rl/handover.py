"""Weights on their way from the trainer to generators that sample beside it, and the check that they arrived."""

import logging

import numpy as np
from attrs import define

from skyrl_engine.contracts.kinds.generator import GeneratorDescription
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.sampler import Sampler
from skyrl_engine.rollout.canary import LONGEST, Canary
from skyrl_engine.rollout.request_queue import CompletionSource
from skyrl_engine.training.rl.prepared import LiveRolloutSpec

logger = logging.getLogger(__name__)


@define(eq=False)
class WeightHandover:
    """Gathers weights on the ranks, and gives them to the generators, with what a fixed row should be worth to them."""

    engine: Engine
    sampler: Sampler
    canary: Canary | None

    def write(self, version: int) -> None:
        """Gather the present weights as those of `version`, and what they say of the canary's row. In the trainer's thread."""
        self.sampler.write(version)
        self.prepare_check(version)

    def prepare_check(self, version: int) -> None:
        """Score the canary's row with the present weights, those of `version`. Also with those that generators start with: so one that takes no
        update is known from the first on. In the trainer's thread.
        """
        if self.canary is not None:
            row = self.canary.row.tolist()
            copies = self.engine.group.topology.dp
            columns = SampleColumns.from_lists(input_ids=[row] * copies, num_actions=[len(row) - 1] * copies)
            scores = self.engine.score(self.engine.plan(columns)).result().on_actions("logprobs").values
            self.canary.expect(version, np.asarray(scores[: len(row) - 1], dtype=np.float32))

    def take(self, version: int) -> None:
        """Give the weights to the generators. Raises RolloutError where they sample from others afterwards. In the sampling thread."""
        self.sampler.take(version)
        if self.canary is not None:
            self.canary.look(version)


def make_canary(
    rollouts: LiveRolloutSpec, sampler: CompletionSource, description: GeneratorDescription, limit: float
) -> Canary | None:
    """Return a canary over the beginning of the run's first prompt; None where the generator tells no log-probabilities of prompts."""
    if "prompt_logprobs" not in description.capabilities:
        logger.warning(
            "the generator does not declare the capability 'prompt_logprobs': whether an update has reached it shows only in tokens that the "
            "trained weights sampled, and older groups have none"
        )
        return None
    _, task = rollouts.tasks.of(0)
    ids = np.asarray(task.prompt_ids, dtype=np.int32) if task.prompt_ids else rollouts.renderer.prompt(task.messages, task.tools)
    row = np.asarray(ids[:LONGEST], dtype=np.int32)
    return Canary(row, sampler, limit) if len(row) > 1 else None
