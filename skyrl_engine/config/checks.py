"""Checks of tables against each other: combinations that each table alone allows and that cannot be meant."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import attrs

from skyrl_engine.config.foreign_keys import RL
from skyrl_engine.config.reading.origins import Origin, nearest
from skyrl_engine.config.schema import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    GeneratorTable,
    ModelTable,
    OptimizerConfig,
    PluginsConfig,
    RlConfig,
    RunConfig,
    SamplingConfig,
    TeacherConfig,
    TrainingConfig,
)
from skyrl_engine.config.schema.evaluation import list_pass_numbers
from skyrl_engine.config.schema.metadata import iterate_unread_fields
from skyrl_engine.config.wording import format_value
from skyrl_engine.errors import Problem
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.registry.kinds import KINDS

_BEST_OF_RL: Final = re.compile(r"evaluation/(.+/)?(?P<share>avg|pass|maj)@(?P<number>\d+)(_low|_high)?")


def cross_checks(sections: Mapping[str, Any], origins: Mapping[str, Origin]) -> list[Problem]:
    """Return the problems between structured tables; a table that was refused takes part in no check."""
    by_type = {type(section): section for section in sections.values()}
    run, data, training = by_type.get(RunConfig), by_type.get(DataConfig), by_type.get(TrainingConfig)
    evaluation, checkpoint, optimizer = by_type.get(EvaluationConfig), by_type.get(CheckpointConfig), by_type.get(OptimizerConfig)
    problems: list[tuple[str, str, str]] = []
    for name, section in sections.items():
        problems += _find_unread(name, section, origins)
    if run is not None:
        problems += _run(run)
    generator = by_type.get(GeneratorTable)
    if generator is not None and generator.launch == "ray" and run is not None and run.launch != "ray":
        problems.append(
            ("generator.launch", 'is "ray", but run.launch is not', 'Set run.launch = "ray", or remove generator.launch')
        )
    model = by_type.get(ModelTable)
    sampling = by_type.get(SamplingConfig)
    if sampling is not None and sampling.share == 0:
        problems += [
            (
                f"sampling.{key.name}",
                "is set, and sampling.share is 0, so that nothing is sampled",
                "Set sampling.share, or remove it",
            )
            for key in attrs.fields(SamplingConfig)
            if getattr(sampling, key.name) != key.default
        ]
    if model is not None and model.classifier and not model.value_head:
        problems.append(("model.classifier", "needs model.value_head = true", "Set it, or remove model.classifier"))
    if model is not None and model.right_label is not None and not model.classifier:
        problems.append(("model.right_label", "needs model.classifier = true", "Set it, or remove model.right_label"))
    if data is not None:
        problems += _data(data)
        if data.streaming and training is not None:
            problems += _streamed_training(training)
    if training is not None:
        problems += _training(training)
    if evaluation is not None and data is not None:
        problems += _evaluation(evaluation, data)
    if evaluation is not None:
        problems += _best(evaluation)
        if sections.get("trainer") not in (None, RL):
            problems += _of_rl(evaluation)
        elif sections.get("trainer") == RL:
            problems += _best_of_rl(evaluation)
    for name in ("reference", "teacher"):
        problems += _without_path(name, sections.get(name))
    teacher = by_type.get(TeacherConfig)
    if teacher is not None:
        problems += _teacher(teacher)
    if checkpoint is not None:
        problems += _checkpoint(checkpoint, run, training)
    if optimizer is not None:
        problems += _parameter_groups(optimizer)
        rl = by_type.get(RlConfig)
        if rl is not None:
            problems += _schedule(optimizer, rl.steps, "rl.steps")
        else:
            problems += _schedule(optimizer, None if training is None else training.steps, "training.steps")
    plugins = by_type.get(PluginsConfig)
    if plugins is not None:
        problems += _kind_names("plugins.pin", plugins.pin, KINDS)
    if checkpoint is not None:
        problems += _kind_names("checkpoint.allow_changed", checkpoint.allow_changed, [*KINDS, "trainer"])
    return [Problem(f"{nearest(origins, tuple(key.split('.')))}: {key}", cause, remedy) for key, cause, remedy in problems]


def _find_unread(name: str, section: Any, origins: Mapping[str, Origin]) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of a table that are given, and that nothing reads because of the value of another key."""
    if not attrs.has(type(section)):
        return
    for key, other, readers in iterate_unread_fields(section):
        if f"{name}.{key}" in origins:
            chosen, wanted = (format_value(value) for value in (getattr(section, other), readers[0]))
            yield f"{name}.{key}", f"is not read where {name}.{other} = {chosen}", f"Remove it, or set {name}.{other} = {wanted}"


def _run(run: RunConfig) -> Iterator[tuple[str, str, str]]:
    if run.launch == "inline" and run.ranks > 1:
        yield (
            "run.ranks",
            f'is {run.ranks}, but launch = "inline" is one rank in this process',
            'Set run.launch = "ray" or run.ranks = 1',
        )
    if run.launch == "inline" and run.ray_address is not None:
        yield "run.ray_address", 'has no meaning with launch = "inline"', 'Set run.launch = "ray" or remove run.ray_address'
    if run.profile_memory and run.profile_steps is None:
        yield "run.profile_memory", "is not read where no steps are profiled", "Set run.profile_steps, or remove run.profile_memory"
    repeated = sorted({name for name in run.observers if run.observers.count(name) > 1})
    if repeated:
        yield "run.observers", f"names {', '.join(repeated)} twice", "Name every observer once"


def _data(data: DataConfig) -> Iterator[tuple[str, str, str]]:
    if data.eval is not None and data.eval_fraction > 0:
        yield "data.eval_fraction", "data.eval is set too", "Give one of data.eval and data.eval_fraction"
    datasets = 1 if isinstance(data.train, str) else len(data.train)
    if data.weights is not None and len(data.weights) != datasets:
        yield (
            "data.weights",
            f"are {len(data.weights)}, and data.train names {datasets} dataset{'s'[: datasets != 1]}",
            "Give each dataset one weight, in the order of data.train",
        )
    if data.weights is None and data.stopping_strategy != "all_exhausted":
        yield "data.stopping_strategy", "is not read without data.weights", "Set data.weights, or remove it"
    if not data.streaming:
        return
    if data.weights is not None and data.stopping_strategy == "first_exhausted":
        yield (
            "data.stopping_strategy",
            'is "first_exhausted", and nobody knows when a stream is: each dataset begins again when it is used up',
            'Remove it, or set data.stopping_strategy = "all_exhausted"',
        )
    for key, is_set, remedy in (
        ("eval_fraction", data.eval_fraction > 0, "Name held-out data in data.eval, which is read whole"),
        ("max_samples", data.max_samples is not None, "Remove it: training.steps says how much is read"),
    ):
        if is_set:
            yield f"data.{key}", "needs to know how many rows there are, and data.streaming is on", remedy


def _streamed_training(training: TrainingConfig) -> Iterator[tuple[str, str, str]]:
    if training.steps is None:
        yield (
            "training.steps",
            "is not set, and how long a pass over a stream is (training.epochs) is not known before its end",
            "Set training.steps, or data.streaming = false",
        )
    if training.drop_last:
        yield "training.drop_last", "has no meaning with data.streaming, whose mini-batches are all full", "Remove it"


def _training(training: TrainingConfig) -> Iterator[tuple[str, str, str]]:
    if training.steps is not None and training.epochs is not None:
        yield "training.epochs", "training.steps is set too", "Give one of training.steps and training.epochs"
    if training.micro_batch_rows is not None and isinstance(training.micro_batch_tokens, int):
        yield (
            "training.micro_batch_tokens",
            "training.micro_batch_rows is set too",
            "Give one of training.micro_batch_rows and training.micro_batch_tokens",
        )


def _evaluation(evaluation: EvaluationConfig, data: DataConfig) -> Iterator[tuple[str, str, str]]:
    if data.eval is None and data.eval_fraction == 0:
        set_keys = {
            "every": evaluation.every is not None,
            "at_start": evaluation.at_start,
            "best": evaluation.best is not None,
        }
        for key, is_set in set_keys.items():
            if is_set:
                yield (
                    f"evaluation.{key}",
                    "asks for evaluation, but there is no held-out data",
                    "Set data.eval or data.eval_fraction",
                )


def _parameter_groups(optimizer: OptimizerConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the groups of parameters that say nothing."""
    for group in optimizer.groups:
        if (group.learning_rate, group.weight_decay) == (None, None):
            yield (
                "optimizer.groups",
                f"the group {group.match!r} changes nothing",
                "Set its learning_rate or weight_decay, or remove the group; model.freeze freezes parameters",
            )


def _schedule(optimizer: OptimizerConfig, steps: int | None, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield what cannot be meant among the keys of the learning rate's course; `steps` are those that `key` says, None where unknown."""
    if steps is not None and optimizer.warmup_steps > steps:
        yield (
            "optimizer.warmup_steps",
            f"warm-up takes {optimizer.warmup_steps} steps of a training of {steps}",
            f"Lower optimizer.warmup_steps or raise {key}",
        )
    if optimizer.warmup != "linear" and optimizer.warmup_steps == 0:
        yield (
            "optimizer.warmup",
            "is the form of a warm-up, and there is none",
            "Set optimizer.warmup_steps, or remove optimizer.warmup",
        )
    if optimizer.schedule != "wsd":
        return
    if optimizer.decay_steps is None:
        yield (
            "optimizer.decay_steps",
            'schedule "wsd" decays over its last steps, and nobody says how many',
            "Set optimizer.decay_steps",
        )
    elif steps is not None and optimizer.warmup_steps <= steps < optimizer.warmup_steps + optimizer.decay_steps:
        yield (
            "optimizer.decay_steps",
            f"warm-up and decay take {optimizer.warmup_steps + optimizer.decay_steps} steps of a training of {steps}",
            f"Lower optimizer.decay_steps or optimizer.warmup_steps, or raise {key}",
        )


def _best(evaluation: EvaluationConfig) -> Iterator[tuple[str, str, str]]:
    """Yield what cannot be meant among the keys of the best checkpoint and of the early end."""
    unset = EvaluationConfig()
    if evaluation.best is None:
        for key in ("best_is", "patience"):
            if getattr(evaluation, key) != getattr(unset, key):
                yield (
                    f"evaluation.{key}",
                    "is of evaluation.best, which is not set",
                    f"Set evaluation.best, or remove evaluation.{key}",
                )
    else:
        if evaluation.find_extreme() is None:
            yield (
                "evaluation.best_is",
                f"nobody says whether the lowest or the highest {evaluation.best} is best",
                'Set evaluation.best_is to "lowest" or "highest"',
            )
        if evaluation.every is None and not evaluation.at_end:
            yield "evaluation.best", "is set, and nothing is evaluated after a step", "Set evaluation.every"
        if evaluation.patience is not None and evaluation.every is None:
            yield "evaluation.patience", "counts evaluations, and evaluation.every is not set", "Set evaluation.every"
    if evaluation.min_delta != unset.min_delta and evaluation.patience is None:
        yield (
            "evaluation.min_delta",
            "is of evaluation.patience, which is not set",
            "Set evaluation.patience, or remove evaluation.min_delta",
        )


def _best_of_rl(evaluation: EvaluationConfig) -> Iterator[tuple[str, str, str]]:
    """Yield a best metric that evaluations of trainer rl cannot report, whatever the environments are."""
    if evaluation.best is None:
        return
    count = evaluation.samples
    named = _BEST_OF_RL.fullmatch(evaluation.best)
    example = f"evaluation/avg@{count}"
    if not evaluation.best.startswith("evaluation/"):
        yield (
            "evaluation.best",
            "evaluations of trainer rl report names that begin with evaluation/",
            f"Name one, such as {example}",
        )
    elif named is not None:
        possible = list_pass_numbers(count) if named["share"] == "pass" else [count]
        if int(named["number"]) not in possible:
            numbers = ", ".join(map(str, possible))
            yield (
                "evaluation.best",
                f"is of {named['number']} attempts, and with evaluation.samples = {count} {named['share']}@k is reported for k = {numbers}",
                f"Name one of these, such as {example}, or set evaluation.samples",
            )


def _of_rl(evaluation: EvaluationConfig) -> Iterator[tuple[str, str, str]]:
    for key in ("samples", "tasks", "temperature"):
        if getattr(evaluation, key) != getattr(EvaluationConfig(), key):
            yield f"evaluation.{key}", "is of trainer rl, which attempts held-out tasks", f"Remove evaluation.{key}"


def _without_path(name: str, table: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of a table that say something of a model, where it names none."""
    if table is None or table.path is not None:
        return
    if table.revision is not None:
        yield f"{name}.revision", f"is of the model of {name}.path, which is not set", f"Set {name}.path, or remove {name}.revision"


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.username and not parts.query


def _teacher(teacher: TeacherConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the keys that say something of a server, where the teacher is in none, and the other way round."""
    if teacher.url is None:
        for key in attrs.fields(TeacherConfig):
            if key.name not in ("path", "revision") and getattr(teacher, key.name) != key.default:
                remedy = f"Set teacher.url, or remove teacher.{key.name}"
                yield f"teacher.{key.name}", "is of a teacher behind teacher.url, which is not set", remedy
        return
    if not _is_url(teacher.url):
        yield (
            "teacher.url",
            "is no base URL of a server",
            "Write it as far as its routes begin, such as http://HOST:8000/v1, without a key",
        )
    if teacher.path is not None:
        yield "teacher.url", "teacher.path is set too", "Give one of them: a server that holds the teacher, or a model on the ranks"
    if teacher.model is None:
        yield (
            "teacher.model",
            "is not set, and teacher.url is asked for a model by its name",
            "Set teacher.model to the teacher's name there",
        )


def _checkpoint(
    checkpoint: CheckpointConfig, run: RunConfig | None, training: TrainingConfig | None
) -> Iterator[tuple[str, str, str]]:
    steps = None if training is None else training.steps
    if checkpoint.every is not None and steps is not None and checkpoint.every > steps and not checkpoint.at_end:
        yield (
            "checkpoint.every",
            f"is {checkpoint.every}, so a training of {steps} steps would end without a checkpoint",
            "Lower checkpoint.every or set checkpoint.at_end = true",
        )
    if checkpoint.resume and run is not None and run.directory is None:
        yield "checkpoint.resume", "a new run directory holds nothing to continue from", "Set run.directory to the run to continue"


def _kind_names(key: str, names: "Mapping[str, str] | tuple[str, ...]", kinds: Collection[str]) -> Iterator[tuple[str, str, str]]:
    if not names:
        return
    for name in names:
        kind, colon, rest = name.partition(":")
        if not colon or not rest or kind not in kinds:
            meant = did_you_mean(kind, kinds, show=format_value) if colon else None
            yield (
                key,
                f'{name!r} is not of the form "kind:name"',
                meant or f"Start with one of {', '.join(f'{kind}:' for kind in kinds)}",
            )
