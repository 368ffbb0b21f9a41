"""The reward model of a run: a frozen classifier on the ranks, whose value at the end of an attempt is a part of its reward."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.automatic import budget_of
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import AnyArray, offsets_of
from skyrl_engine.contracts.values.rollout import SEGMENT_PROMPT, Group, Trajectory
from skyrl_engine.data.text.reward_token import read_at_end
from skyrl_engine.data.text.template_rule import uses_template
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import ConfigError, ContractError, ModelError, Problem, UnsupportedError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.training.frozen_model_compat import plan_frozen_model

REWARD_MODEL: Final = "reward_model"
"""The frozen model's name on the ranks, and in attempts that of its part of the reward and of its value among their metrics."""


@frozen(eq=False)
class RewardModel:
    """The reward model that `[reward_model]` asks for. Its values times `weight` are added to rewards.

    `path` names it in errors. `closing` is the token that ends a turn, and those that the chat template writes after it at the end of a
    dialogue, which no model samples.
    """

    frozen: FrozenModel
    path: str
    weight: float
    pad_token_id: int
    closing: tuple[int, AnyArray] | None
    micro_batch_tokens: int | None

    @classmethod
    def plan(cls, resolved: ResolvedConfig, assembly: Assembly, files: ModelFiles) -> "RewardModel | None":
        """Choose the reward model; None where no path is given.

        Raises UnsupportedError for what the backend, the trained model or the run does not allow, ModelError for a model that cannot be used.
        """
        table = resolved.config.reward_model
        if table.preset != type(table)().preset:
            raise ConfigError([Problem("reward_model.preset", "is of trainer reward_model", "Remove it")])
        if table.path is None:
            return None
        if resolved.config.group_filters and resolved.config.rl.rollouts is not None:
            raise UnsupportedError(
                "[[group_filters]] choose among recorded rollouts before a model is loaded, and so without the values of [reward_model]",
                remedy="Remove group_filters, or reward_model.path: rollouts of a run that had a reward model hold its values",
            )
        if "value_head" not in assembly.description.capabilities:
            raise UnsupportedError(
                "a reward model is asked for, and the backend does not declare 'value_head'",
                remedy="Remove reward_model.path, or choose a backend that has it, such as fsdp",
            )
        frozen, model_files = plan_frozen_model(
            "the reward model", REWARD_MODEL, resolved, assembly, files, path=table.path, revision=table.revision, classifier=True
        )
        pad = _pad_of_classifier(model_files)
        raw = not uses_template(files.tokenizer, resolved.config.rl.template)
        closing = ChatRenderer(files.tokenizer, raw=raw).closing()
        longest = (
            resolved.config.rl.max_prompt_tokens + resolved.config.rl.max_tokens + 1 + (0 if closing is None else len(closing[1]))
        )
        for facts in (model_files.facts, files.facts):
            positions = facts.extended_length
            if positions is not None and longest > positions:
                raise UnsupportedError(
                    f"the reward model reads attempts of up to {longest:,} tokens, with the tokens that end a turn, and {facts.model.path} has "
                    f"{positions:,} positions",
                    remedy="Lower rl.max_prompt_tokens or rl.max_tokens",
                )
        return cls(frozen, table.path, table.weight, pad, closing, budget_of(resolved.config.rl))

    def add_rewards(self, engine: Engine, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Return the groups with the model's part in the rewards of attempts that did not fail; its values are in their metrics.

        All are scored over one plan. Raises ContractError for an environment that gives a part or a metric of the same name.
        """
        attempts = [attempt for group in groups for attempt in group.finished]
        if not attempts:
            return tuple(groups)
        for group in groups:
            _refuse_taken_name(group)
        values = iter(self._values(engine, attempts).tolist())
        return tuple(
            evolve(
                group,
                trajectories=tuple(
                    trajectory if trajectory.status == "failed" else self._add_value(trajectory, next(values))
                    for trajectory in group.trajectories
                ),
            )
            for group in groups
        )

    def replace_rewards(self, engine: Engine, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Return recorded groups with this model's part in the place of the one that a reward model gave when they were recorded."""
        bare = [evolve(group, trajectories=tuple(map(_remove_value, group.trajectories))) for group in groups]
        return self.add_rewards(engine, bare)

    def _add_value(self, attempt: Trajectory, value: float) -> Trajectory:
        """Return an attempt with a further part of its reward, put at its last token."""
        share = self.weight * value
        return evolve(
            attempt,
            unplaced_reward=attempt.unplaced_reward + share,
            parts={**attempt.parts, REWARD_MODEL: share},
            metrics={**attempt.metrics, REWARD_MODEL: value},
        )

    def _values(self, engine: Engine, attempts: Sequence[Trajectory]) -> AnyArray:
        """float64[N]: the value at the end of every attempt, over a plan of its own: its rows have one token more than those trained on.

        Raises ModelError for a value that is not finite.
        """
        texts = [read_at_end(self._text(attempt), self.pad_token_id) for attempt in attempts]
        lengths = [len(text) for text in texts]
        columns = SampleColumns.create(
            input_ids=np.concatenate(texts),
            token_offsets=offsets_of(lengths),
            action_offsets=np.arange(len(texts) + 1, dtype=np.int64),
            loss_weight=np.ones(len(texts), dtype=np.uint8),
        )
        bound = self.micro_batch_tokens
        plan = engine.plan(columns, micro_batch_tokens=None if bound is None else max(bound, *lengths))
        output = engine.score(plan, scores=("values",), tokens="loss", model=REWARD_MODEL).result()
        values = output.on_actions("values").values.astype(np.float64)
        if not np.isfinite(values).all():
            first = int(np.argmin(np.isfinite(values)))
            raise ModelError(
                f"the reward model {self.path} values attempt {attempts[first].member} of group {attempts[first].ticket} at {values[first]}",
                remedy='Set reward_model.path to a model whose values are finite, or model.dtype = "float32"',
            )
        return values

    def _text(self, attempt: Trajectory) -> AnyArray:
        """int32: what stood before the model at the end of an attempt, and what it sampled last, closed as the chat template closes it."""
        start = int(attempt.segment_offsets[:-1][attempt.kinds == SEGMENT_PROMPT][-1])
        ids = attempt.token_ids[start:]
        if self.closing is None or not len(ids) or ids[-1] != self.closing[0]:
            return ids
        return np.concatenate([ids, self.closing[1]])


def value_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a reward model's values of attempts that did not fail; none where there was no such model."""
    values = [attempt.metrics[REWARD_MODEL] for group in groups for attempt in group.finished if REWARD_MODEL in attempt.metrics]
    if not values:
        return {}
    return {
        "reward/model_mean": float(np.mean(values)),
        "reward/model_std": float(np.std(values)),
        "reward/model_min": min(values),
        "reward/model_max": max(values),
    }


def _remove_value(attempt: Trajectory) -> Trajectory:
    """Return a recorded attempt without what a reward model gave it."""
    if REWARD_MODEL not in attempt.metrics:
        return attempt
    parts, metrics = dict(attempt.parts), dict(attempt.metrics)
    del metrics[REWARD_MODEL]
    return evolve(attempt, unplaced_reward=attempt.unplaced_reward - parts.pop(REWARD_MODEL), parts=parts, metrics=metrics)


def _refuse_taken_name(group: Group) -> None:
    for attempt in group.finished:
        if REWARD_MODEL in attempt.parts or REWARD_MODEL in attempt.metrics:
            raise ContractError(
                f"environment {group.environment} gives a part or metric {REWARD_MODEL!r} to task {group.task_key!r}, and that is the name of "
                "what [reward_model] gives",
                remedy="Give it another name, or remove reward_model.path",
            )


def _pad_of_classifier(model_files: ModelFiles) -> int:
    """Return the padding token of a classifier. Raises ModelError for what is none."""
    model = model_files.facts.model
    config: Any = load_config(model)
    if not any("ForSequenceClassification" in name for name in config.architectures or ()):
        raise ModelError(
            f"the reward model {model.path} is no sequence classifier, by the architectures in its config.json: it would value all texts alike",
            remedy="Set reward_model.path to one, such as trainer reward_model writes",
        )
    if config.num_labels != 1:
        raise ModelError(
            f"the reward model {model.path} is a sequence classifier with {config.num_labels} labels, and a reward is one number",
            remedy="Set reward_model.path to one with a single label, such as trainer reward_model writes",
        )
    pad = config.get_text_config().pad_token_id
    return model_files.pad_token_id if pad is None else int(pad)
