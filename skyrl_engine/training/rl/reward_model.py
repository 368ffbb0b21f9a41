"""The reward models of a run: frozen classifiers on the ranks, whose values at the end of an attempt are parts of its reward."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.automatic import budget_of, find_attempt_limit
from skyrl_engine.config.schema import RewardModelConfig, RewardModelTable
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import RightLabel
from skyrl_engine.contracts.values.ragged import AnyArray, offsets_of
from skyrl_engine.contracts.values.rollout import SEGMENT_PROMPT, Group, Trajectory
from skyrl_engine.contracts.values.source_names import make_distinct
from skyrl_engine.data.text.reward_token import read_at_end
from skyrl_engine.data.text.template_rule import uses_template
from skyrl_engine.data.text.tokenization import TokenizedSample
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.frozen_model import FrozenModel
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import ContractError, DataError, ModelError, UnsupportedError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.training.frozen_model_compat import find_other_tokens, refuse_unreadable
from skyrl_engine.training.rl.process_reward import FloatArray, ProcessReader, to_probabilities

REWARD_MODEL: Final = "reward_model"
"""Name of a reward model that is not given one: its part of the reward, and its value among an attempt's metrics, are called so."""

_STEPS: Final = "reward_steps/"
"""Beginning of the names under which an attempt's info holds where a process reward model put its rewards, and these."""

_VALUES: Final = f"{REWARD_MODEL}/"
"""Beginning of the names under which values of other reward models are among an attempt's metrics."""


def plan_reward_models(resolved: ResolvedConfig, assembly: Assembly, files: ModelFiles) -> "tuple[RewardModel, ...]":
    """Choose the reward models that `[[rl.reward_models]]` asks for, in that order; none where there are none.

    Raises UnsupportedError for what the backend, the trained model or the run does not allow, ModelError for a model that cannot be used.
    """
    tables = resolved.config.rl.reward_models
    if not tables:
        return ()
    if resolved.config.group_filters and resolved.config.rl.rollouts is not None:
        raise UnsupportedError(
            "[[group_filters]] choose among recorded rollouts before a model is loaded, and so without the values of [[rl.reward_models]]",
            remedy="Remove group_filters, or rl.reward_models: rollouts of a run that had reward models hold their values",
        )
    if "value_head" not in assembly.description.capabilities:
        raise UnsupportedError(
            "a reward model is asked for, and the backend does not declare 'value_head'",
            remedy="Remove rl.reward_models, or choose a backend that has it, such as fsdp",
        )
    names = make_distinct([table.name for table in tables])
    return tuple(
        RewardModel.plan(f"rl.reward_models[{place}]", name, table, resolved, assembly, files)
        for place, (name, table) in enumerate(zip(names, tables, strict=True))
    )


@frozen(eq=False)
class RewardModel:
    """A reward model. Its values times `weight` are added to rewards, as the part `name`.

    `path` names it in errors. `closing` is the token that ends a turn, and those that the chat template writes after it at the end of a
    dialogue, which no model samples. `renderer` makes its tokens of an attempt's messages; None where the attempt's own tokens are its.
    `positions` are the most tokens that it reads; None: nobody knows. `steps` reads attempts step by step; None: it values whole attempts.
    """

    frozen: FrozenModel
    name: str
    path: str
    weight: float
    pad_token_id: int
    closing: tuple[int, AnyArray] | None
    renderer: ChatRenderer | None
    positions: int | None
    micro_batch_tokens: int | None
    steps: ProcessReader | None = None

    @classmethod
    def plan(
        cls, key: str, name: str, table: RewardModelTable, resolved: ResolvedConfig, assembly: Assembly, files: ModelFiles
    ) -> "RewardModel":
        """Choose the reward model of `table`, which stands at `key` of the configuration; `files` are the trained model's.

        Raises UnsupportedError for what the backend or the trained model does not allow, ModelError for a model that cannot be used.
        """
        config = resolved.config
        frozen = FrozenModel.choose(
            f"{REWARD_MODEL}:{name}",
            config.model,
            assembly.description,
            table=key,
            path=table.path,
            revision=table.revision,
            adapters_off=False,
            classifier=True,
        )
        assert frozen.model is not None, "a path names a model of its own"
        model = evolve(frozen.model, tokenizer=table.tokenizer, chat_template=table.chat_template)
        refuse_unreadable("the reward model", key, model, assembly.description)
        model = evolve(model, right_label=find_right_label(key, table, load_config(model)))
        model_files = ModelFiles.of(model)
        pad = _pad_of_classifier(key, model_files)
        raw = not uses_template(files.tokenizer, config.rl.template)
        renderer = _plan_renderer(key, model_files, files, resolved, raw=raw)
        steps = None
        if table.steps is not None:
            renderer = renderer or ChatRenderer(files.tokenizer, raw=raw)
            separator = RewardModelConfig().step_separator if table.step_separator is None else table.step_separator
            steps = ProcessReader(table.steps, renderer, separator, partial(_decode, files.tokenizer), pad)
        closing = ChatRenderer(files.tokenizer, raw=raw).closing()
        positions = model_files.facts.extended_length
        if renderer is None:
            longest = find_attempt_limit(config.rl) + 1 + (0 if closing is None else len(closing[1]))
            if positions is not None and longest > positions:
                raise UnsupportedError(
                    f"the reward model reads attempts of up to {longest:,} tokens, with the tokens that end a turn, and {table.path} has "
                    f"{positions:,} positions",
                    remedy="Lower rl.max_prompt_tokens or rl.max_tokens",
                )
        return cls(
            evolve(frozen, model=model),
            name,
            table.path,
            table.weight,
            pad,
            closing,
            renderer,
            positions,
            budget_of(config.rl),
            steps,
        )

    @property
    def metric(self) -> str:
        """The name of its value among an attempt's metrics."""
        return REWARD_MODEL if self.name == REWARD_MODEL else f"{_VALUES}{self.name}"

    def add_rewards(self, engine: Engine, groups: Sequence[Group]) -> tuple[Group, ...]:
        """Return the groups with the model's part in the rewards of attempts that did not fail; its values are in their metrics.

        All are scored over one plan. Raises ContractError for an environment that gives a part or a metric of the same name, DataError for an
        attempt that the model cannot read, and ModelError for a value that is not finite.
        """
        attempts = [attempt for group in groups for attempt in group.finished]
        if not attempts:
            return tuple(groups)
        for group in groups:
            self._refuse_taken_name(group)
        values = iter(self._values(engine, attempts))
        return tuple(
            evolve(
                group,
                trajectories=tuple(
                    trajectory if trajectory.status == "failed" else self._add_values(trajectory, next(values))
                    for trajectory in group.trajectories
                ),
            )
            for group in groups
        )

    def _add_values(self, attempt: Trajectory, values: FloatArray) -> Trajectory:
        """Return an attempt with a further part of its reward: at its last token, or of each step at that step's."""
        if self.steps is None:
            return self._add_value(attempt, float(values[0]))
        probabilities = to_probabilities(values)
        value = self.steps.join(probabilities)
        if self.steps.rule != "each":
            return self._add_value(attempt, value)
        shares, places = self.weight * probabilities, self.steps.find_last_tokens(attempt)
        rewards = attempt.rewards.copy()
        np.add.at(rewards, places, shares)
        return evolve(
            attempt,
            rewards=rewards,
            parts={**attempt.parts, self.name: float(shares.sum())},
            metrics={**attempt.metrics, self.metric: value},
            info={**attempt.info, f"{_STEPS}{self.name}": [places.tolist(), shares.tolist()]},
        )

    def _add_value(self, attempt: Trajectory, value: float) -> Trajectory:
        """Return an attempt with a further part of its reward, put at its last token."""
        share = self.weight * value
        return evolve(
            attempt,
            unplaced_reward=attempt.unplaced_reward + share,
            parts={**attempt.parts, self.name: share},
            metrics={**attempt.metrics, self.metric: value},
        )

    def _values(self, engine: Engine, attempts: Sequence[Trajectory]) -> list[FloatArray]:
        """Return for each attempt float64[1], the value at its end, or float64[steps], over a plan of their own: rows have one token more."""
        texts = [self._read(attempt) for attempt in attempts]
        lengths = [len(text.input_ids) for text in texts]
        scored = [text.loss[int(np.argmax(text.loss)) :] for text in texts]
        columns = SampleColumns.create(
            input_ids=np.concatenate([text.input_ids for text in texts]),
            token_offsets=offsets_of(lengths),
            action_offsets=offsets_of([len(loss) for loss in scored]),
            loss_weight=np.concatenate(scored).astype(np.uint8),
        )
        bound = self.micro_batch_tokens
        plan = engine.plan(columns, micro_batch_tokens=None if bound is None else max(bound, *lengths), model=self.frozen.name)
        output = engine.score(plan, scores=("values",), tokens="loss", model=self.frozen.name).result()
        values = output.on_actions("values").values[columns.loss_weight != 0].astype(np.float64)
        found = np.split(values, np.cumsum([int(loss.sum()) for loss in scored])[:-1])
        for attempt, own in zip(attempts, found, strict=True):
            if not np.isfinite(own).all():
                raise ModelError(
                    f"the reward model {self.path} values {_name_of(attempt)} at {own[~np.isfinite(own)][0]}",
                    remedy='Name one in rl.reward_models whose values are finite, or set model.dtype = "float32"',
                )
        return found

    def _read(self, attempt: Trajectory) -> TokenizedSample:
        """Return the tokens of an attempt that the model reads; loss marks those whose values count."""
        if self.steps is None:
            ids = read_at_end(self._text(attempt), self.pad_token_id)
            return TokenizedSample(0, _name_of(attempt), ids, np.arange(len(ids)) == len(ids) - 1)
        self._refuse_no_messages(attempt)
        sample = self.steps.lay_out(attempt, _name_of(attempt))
        self._refuse_too_long(attempt, len(sample.input_ids))
        return sample

    def _text(self, attempt: Trajectory) -> AnyArray:
        """int32: the tokens of an attempt that the model reads."""
        return self._own_text(attempt) if self.renderer is None else self._rendered_text(attempt, self.renderer)

    def _own_text(self, attempt: Trajectory) -> AnyArray:
        """int32: what stood before the model at the end of an attempt, and what it sampled last, closed as the chat template closes it."""
        start = int(attempt.segment_offsets[:-1][attempt.kinds == SEGMENT_PROMPT][-1])
        ids = attempt.token_ids[start:]
        if self.closing is None or not len(ids) or ids[-1] != self.closing[0]:
            return ids
        return np.concatenate([ids, self.closing[1]])

    def _rendered_text(self, attempt: Trajectory, renderer: ChatRenderer) -> AnyArray:
        """int32: an attempt's messages in the tokens of this model; its template closes attempts that were cut, too."""
        self._refuse_no_messages(attempt)
        ids = renderer.dialogue(attempt.messages, attempt.tools, name=_name_of(attempt))
        if renderer.raw and attempt.stops and attempt.stops[-1] == "eos" and renderer.tokenizer.eos_token_id is not None:
            ids = np.append(ids, np.int32(renderer.tokenizer.eos_token_id))
        self._refuse_too_long(attempt, len(ids) + 1)
        return ids

    def _refuse_no_messages(self, attempt: Trajectory) -> None:
        if not attempt.messages:
            raise DataError(
                f"{_name_of(attempt)} holds no messages, by which the reward model {self.path} reads it",
                remedy="Choose environments whose tasks are messages, record rollouts with this reward model, or name one in rl.reward_models "
                "that values whole attempts, with the tokenizer and the chat template of the trained model",
            )

    def _refuse_too_long(self, attempt: Trajectory, tokens: int) -> None:
        if self.positions is not None and tokens > self.positions:
            raise DataError(
                f"{_name_of(attempt)} has {tokens:,} tokens of the reward model {self.path}, one of them for its value, and that has "
                f"{self.positions:,} positions",
                remedy="Lower rl.max_prompt_tokens or rl.max_tokens",
            )

    def _refuse_taken_name(self, group: Group) -> None:
        for attempt in group.finished:
            if self.name in attempt.parts or self.metric in attempt.metrics:
                raise ContractError(
                    f"environment {group.environment} gives a part {self.name!r} or a metric {self.metric!r} to task {group.task_key!r}, and "
                    "these are names of what a reward model gives",
                    remedy="Set rl.reward_models.name to another name",
                )


def add_rewards(models: Sequence[RewardModel], engine: Engine, groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups with the parts of all reward models in the rewards of their attempts, as `RewardModel.add_rewards`."""
    for model in models:
        groups = model.add_rewards(engine, groups)
    return tuple(groups)


def replace_rewards(models: Sequence[RewardModel], engine: Engine, groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return recorded groups with these models' parts in the place of those that reward models gave when they were recorded."""
    bare = [evolve(group, trajectories=tuple(map(_remove_values, group.trajectories))) for group in groups]
    return add_rewards(models, engine, bare)


def is_value(metric: str) -> bool:
    """Say whether a metric of an attempt is the value that a reward model gave it."""
    return metric == REWARD_MODEL or metric.startswith(_VALUES)


def value_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of every reward model's values of attempts that did not fail; none where there was no such model."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for attempt in group.finished:
            for metric in filter(is_value, attempt.metrics):
                values.setdefault(metric.removeprefix(_VALUES), []).append(attempt.metrics[metric])
    return {metric: number for name, found in values.items() for metric, number in _describe_values(name, found)}


def _describe_values(name: str, values: Sequence[float]) -> Iterator[tuple[str, float]]:
    yield f"reward/model/{name}/mean", float(np.mean(values))
    yield f"reward/model/{name}/std", float(np.std(values))
    yield f"reward/model/{name}/min", min(values)
    yield f"reward/model/{name}/max", max(values)


def _remove_values(attempt: Trajectory) -> Trajectory:
    """Return a recorded attempt without what reward models gave it."""
    metrics, parts, info = dict(attempt.metrics), dict(attempt.parts), dict(attempt.info)
    rewards, unplaced = attempt.rewards.copy(), attempt.unplaced_reward
    for metric in [metric for metric in metrics if is_value(metric)]:
        del metrics[metric]
        name = metric.removeprefix(_VALUES)
        share = parts.pop(name)
        placed = info.pop(f"{_STEPS}{name}", None)
        if placed is None:
            unplaced -= share
        else:
            places, shares = placed
            np.subtract.at(rewards, np.array(places, dtype=np.int64), np.array(shares))
    return evolve(attempt, rewards=rewards, unplaced_reward=unplaced, parts=parts, metrics=metrics, info=info)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return a text as environments see it: without special tokens."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _name_of(attempt: Trajectory) -> str:
    return f"attempt {attempt.member} of group {attempt.ticket}"


def _plan_renderer(
    key: str, model_files: ModelFiles, trained: ModelFiles, resolved: ResolvedConfig, *, raw: bool
) -> ChatRenderer | None:
    """Return what makes a reward model's tokens of messages; None where the attempts' own tokens and template are the model's too.

    `raw` says that no template writes what the trained model reads. Raises UnsupportedError for one that has no template for chats,
    ModelError for a tokenizer that cannot be read.
    """
    path = model_files.facts.model.path
    try:
        difference, tokenizer = find_other_tokens(model_files, trained), model_files.tokenizer
    except ModelError as error:
        raise ModelError(
            f"the tokenizer of the reward model {path} cannot be used: {error.cause}",
            remedy=f"Put its files beside the weights, or correct {key}.tokenizer and {key}.chat_template",
        ) from error
    own = uses_template(tokenizer, resolved.config.rl.template)
    if difference is None and (not own or (not raw and tokenizer.chat_template == trained.tokenizer.chat_template)):
        return None
    if not own and not raw:
        raise UnsupportedError(
            f"the reward model {path} {difference}, and its tokenizer has no chat template to write attempts with",
            remedy=f"Set {key}.chat_template to a Jinja template file",
        )
    return ChatRenderer(tokenizer, raw=not own, name=f"the chat template of the reward model {path}")


_RIGHT: Final = frozenset(("right", "correct", "good", "positive", "true", "yes", "+", "1"))
_WRONG: Final = frozenset(("wrong", "incorrect", "bad", "negative", "false", "no", "-", "0"))
"""Names of the two labels of steps, in small letters."""


def find_right_label(key: str, table: RewardModelTable, config: Any) -> RightLabel | None:
    """Return the number of the label of right steps, of a token classifier with two labels; None for another model.

    `table` stands at `key`. Raises ModelError for one whose labels do not say, and for one that is to value whole attempts; UnsupportedError
    for `right_label` of another model.
    """
    two = config.num_labels == 2 and any("ForTokenClassification" in name for name in config.architectures or ())
    if not two:
        if table.right_label is not None:
            raise UnsupportedError(
                f"{key}.right_label is set, and {table.path} is no token classifier with two labels",
                remedy=f"Remove {key}.right_label",
            )
        return None
    if table.steps is None:
        raise ModelError(
            f"the reward model {table.path} is a token classifier with two labels, which values steps",
            remedy=f'Set {key}.steps, such as "min"',
        )
    if table.right_label is not None:
        return table.right_label
    names = [str(config.id2label[number]).lower() for number in (0, 1)]
    if names == ["label_0", "label_1"]:
        return 1
    if names[0] in _RIGHT and names[1] in _WRONG:
        return 0
    if names[0] in _WRONG and names[1] in _RIGHT:
        return 1
    raise ModelError(
        f"the labels of {table.path} are {config.id2label[0]!r} and {config.id2label[1]!r}, which do not say what a right step has",
        remedy=f"Set {key}.right_label to 0 or 1",
    )


def _pad_of_classifier(key: str, model_files: ModelFiles) -> int:
    """Return the padding token of a classifier. Raises ModelError for what is none."""
    model = model_files.facts.model
    config: Any = load_config(model)
    if model.right_label is not None:
        pad = config.get_text_config().pad_token_id
        return model_files.pad_token_id if pad is None else int(pad)
    if not any("ForSequenceClassification" in name for name in config.architectures or ()):
        raise ModelError(
            f"the reward model {model.path} is no sequence classifier, by the architectures in its config.json: it would value all texts alike",
            remedy=f"Set {key}.path to one, such as trainer reward_model writes",
        )
    if config.num_labels != 1:
        raise ModelError(
            f"the reward model {model.path} is a sequence classifier with {config.num_labels} labels, and a reward is one number",
            remedy=f"Set {key}.path to one with a single label, such as trainer reward_model writes",
        )
    pad = config.get_text_config().pad_token_id
    return model_files.pad_token_id if pad is None else int(pad)
