"""The student's own answers to the prompts of a mini-batch: steps that train on what the student would say (GKD).

Generalized knowledge distillation (Agarwal et al. 2023, arXiv:2306.13649, algorithm 1) trains each step either on the data's answers or, with
probability lambda, on answers that the student samples at the same prompts. Everything about such a step follows from the seed, its number and
the weights, so a resumed run samples what an uninterrupted one does:

    step t:   is_sampled(t)? ── no ──► the rows as they are
                   │ yes
                   ▼
              prompts of the rows ─► generator, with the weights of t - 1 steps ─► the prompts with other answers
"""

from typing import Final

import numpy as np
from attrs import define, evolve, field, frozen

from skyrl_engine.config import ResolvedConfig
from skyrl_engine.config.schema import SamplingConfig
from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest, Sampling
from skyrl_engine.contracts.kinds.needs import asks_a_teacher, column_forms
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.ragged import AnyArray, IntArray, offsets_of
from skyrl_engine.data.dataset import TokenizedDataset
from skyrl_engine.data.table.teacher_rows import TEACHER_IDS
from skyrl_engine.engine.engine import Engine
from skyrl_engine.errors import ConfigError, Problem, RolloutError, UnsupportedError
from skyrl_engine.objective.policy_metrics import ROLLOUT_LOGPROBS, WEIGHTS, Watched
from skyrl_engine.rollout.guard import SamplerGuard
from skyrl_engine.rollout.seeds import derive_seeds
from skyrl_engine.training.generator_compat import refuse_generator_of_other_weights, refuse_misplaced_generator
from skyrl_engine.training.reference import refuse_dropout
from skyrl_engine.training.sft.checks import DataDraft
from skyrl_engine.training.teacher import TEACHER

_DRAWS: Final = 2
"""Place of the draws of steps among the seeds of a run."""


def is_sampled(seed: int, step: int, share: float) -> bool:
    """Say whether step `step`, counted from 1, trains on the student's own answers: a draw of probability `share`.

    The draw is one raw word of PCG64, whose stream NumPy never changes (NEP 19).
    """
    word = int(np.random.PCG64(np.random.SeedSequence([seed, step, _DRAWS])).random_raw())
    return word < share * 2.0**64


def measure_prompts(columns: SampleColumns) -> IntArray:
    """int64[N]: the tokens in front of each sample's last stretch of tokens that carry loss; -1 where none carries loss."""
    lengths, actions = np.diff(columns.token_offsets), np.diff(columns.action_offsets)
    prompts = np.full(len(columns), -1, dtype=np.int64)
    carries = columns.loss_weight != 0
    for sample in range(len(columns)):
        places = np.flatnonzero(carries[columns.action_offsets[sample] : columns.action_offsets[sample + 1]])
        if len(places):
            gaps = np.flatnonzero(np.diff(places) > 1)
            first = places[gaps[-1] + 1] if len(gaps) else places[0]
            prompts[sample] = lengths[sample] - actions[sample] + first
    return prompts


def replace_answers(columns: SampleColumns, prompts: IntArray, answers: list[AnyArray], logprobs: list[AnyArray]) -> SampleColumns:
    """Return the samples with other answers after their first `prompts` tokens, int64[N]; those of -1 stay as they are.

    `answers` int[n] and `logprobs` float32[n] are per sample. Every token of an answer carries loss. Of columns there is `rollout_logprobs`,
    0 where nothing was sampled; ids, groups and values of samples stay.
    """
    tokens: list[AnyArray] = []
    weights, sampled = [], []
    lengths, actions = [], []
    for sample, prompt in enumerate(prompts.tolist()):
        start, end = int(columns.token_offsets[sample]), int(columns.token_offsets[sample + 1])
        if prompt < 0:
            own = int(columns.action_offsets[sample + 1] - columns.action_offsets[sample])
            pieces, answer = [columns.input_ids[start:end]], np.zeros(own, dtype=np.float32)
            weights.append(np.zeros(own, dtype=np.uint8))
        else:
            pieces, answer = [columns.input_ids[start : start + prompt], answers[sample]], logprobs[sample]
            weights.append(np.ones(len(answer), dtype=np.uint8))
        tokens += pieces
        sampled.append(answer)
        lengths.append(sum(len(piece) for piece in pieces))
        actions.append(len(answer))
    replaced = SampleColumns.create(
        input_ids=np.concatenate(tokens).astype(columns.input_ids.dtype, copy=False),
        token_offsets=offsets_of(lengths),
        action_offsets=offsets_of(actions),
        loss_weight=np.concatenate(weights),
        columns={ROLLOUT_LOGPROBS: np.concatenate(sampled).astype(np.float32, copy=False)},
        sample_values=columns.sample_values,
        sample_ids=columns.sample_ids,
        group_ids=columns.group_ids,
        unit_ids=columns.unit_ids,
        trajectory_ids=columns.trajectory_ids,
    )
    return evolve(replaced, grouped=columns.grouped)


@frozen(eq=False)
class SampledAnswers:
    """A mini-batch with the student's answers, how many they are, and how many of them ended at `sampling.max_tokens`."""

    columns: SampleColumns
    count: int
    truncated: int


@define(eq=False)
class StudentSampler:
    """Samples the student's answers in the steps that are drawn for it. `steps` counts those up to the last one that `is_due` was asked for."""

    settings: SamplingConfig
    seed: int
    engine: Engine
    guard: SamplerGuard
    steps: int = 0
    _counted: int = field(default=0, init=False)

    def is_due(self, step: int) -> bool:
        """Say whether step `step` trains on the student's own answers."""
        return is_sampled(self.seed, step, self.settings.share)

    def count_steps(self, step: int) -> int:
        """Return how many of the steps 1 to `step` train on the student's own answers; `step` only rises."""
        self.steps += sum(self.is_due(number) for number in range(self._counted + 1, step + 1))
        self._counted = max(step, self._counted)
        return self.steps

    def answer(self, columns: SampleColumns, step: int) -> SampledAnswers:
        """Return a mini-batch with the student's answers, sampled from the engine's present weights. Raises RolloutError where that fails."""
        prompts = measure_prompts(columns)
        asked = np.flatnonzero(prompts >= 0).tolist()
        seeds = derive_seeds(self.seed, [(step, _DRAWS, sample) for sample in asked])
        sampling = Sampling(self.settings.max_tokens, temperature=self.settings.temperature)
        requests = [
            GenerationRequest(
                request_id=sample,
                prompt_ids=_prompt_of(columns, sample, int(prompts[sample])),
                sampling=sampling,
                seed=seed,
                session=sample,
                last_turn=True,
            )
            for sample, seed in zip(asked, seeds, strict=True)
        ]
        completions = self.engine.generate(requests).result()
        _refuse_failures(completions)
        answers: list[AnyArray] = [np.zeros(0, dtype=np.int32)] * len(columns)
        logprobs: list[AnyArray] = [np.zeros(0, dtype=np.float32)] * len(columns)
        for sample, completion in zip(asked, completions, strict=True):
            answers[sample], logprobs[sample] = completion.token_ids, completion.logprobs
        cut = sum(completion.finish == "length" for completion in completions)
        return SampledAnswers(replace_answers(columns, prompts, answers, logprobs), len(asked), cut)

    @property
    def watch(self) -> tuple[Watched, ...]:
        """Return the metrics of the sampler's distance from the model, which mean nothing where it samples at a temperature of its own."""
        return ("policy",) if self.settings.temperature == 1 else ()

    def check(self, step: int, metrics: dict[str, float]) -> None:
        """Take sums out of the metrics that mean something over several batches only, and hold the sampler against the model.

        Raises RolloutError as the guard does.
        """
        for name in WEIGHTS:
            metrics.pop(name, None)
        if (gap := metrics.get("policy/gap_mean")) is not None:
            self.guard.look(gap, step - 1)


def _prompt_of(columns: SampleColumns, sample: int, length: int) -> AnyArray:
    start = int(columns.token_offsets[sample])
    return columns.input_ids[start : start + length].astype(np.int32)


def _refuse_failures(completions: list[Completion]) -> None:
    failed = [completion for completion in completions if completion.finish not in ("stop", "length")]
    if failed:
        raise RolloutError(
            f"{len(failed)} of {len(completions)} answers of the student were not sampled to their end: "
            f"{failed[0].error or failed[0].finish}",
            remedy="See what the generator logged, and resume",
        )


def samples_answers(resolved: ResolvedConfig) -> bool:
    """Say whether some steps of a run train on the student's own answers."""
    return resolved.config.has("sampling") and resolved.config.sampling.share > 0


def refuse_unteachable_samples(draft: DataDraft) -> None:
    """Raise UnsupportedError for parts that would learn the student's own answers as if they were right, or that read what they lack."""
    if not samples_answers(draft.resolved):
        return
    teacher = draft.resolved.config.teacher
    given = {TEACHER: "numbers", TEACHER_IDS: "token ids"} if teacher.top_k is not None else {TEACHER: "number"}
    for label, needs in draft.assembly.needs.items():
        for name, form in column_forms(needs).items():
            if given.get(name) != form:
                raise UnsupportedError(
                    f"sampling.share is above 0, and {label} reads the column {name!r} of the rows, which the student's own answers lack",
                    remedy="Choose a part that does without, or set sampling.share = 0",
                )
    for part in draft.assembly.objective.losses:
        if not asks_a_teacher(part.product.needs) and TEACHER not in column_forms(part.product.needs):
            raise UnsupportedError(
                f"sampling.share is above 0, and {part.label} does not compare with a teacher: it would teach the student its own answers",
                remedy='Use losses that compare with a teacher alone, such as loss.use = "divergence" or "teacher_kl", or set '
                "sampling.share = 0",
            )
    refuse_dropout(draft.files.facts, "sampled without it: the sampler would seem to hold other weights")
    refuse_generator_of_other_weights(*refuse_misplaced_generator(draft.resolved, 0, ""))


def lengthen_samples(resolved: ResolvedConfig, dataset: TokenizedDataset, most: int | None) -> SampleColumns:
    """Return as many samples as a mini-batch has, those with the longest prompts, with answers as long as they may be sampled.

    A layout that holds them holds every step that samples. `most` bounds a sample, by `data.max_length` or by the model. Raises ConfigError for
    prompts that leave no room for `sampling.max_tokens`, UnsupportedError for images and for a generator that holds fewer tokens.
    """
    settings = resolved.config.sampling
    if dataset.images is not None or dataset.columns.extras:
        raise UnsupportedError(
            f"{dataset.name} has more than tokens, such as images, and generators are asked with tokens alone",
            remedy="Set sampling.share = 0, or train on rows of text",
        )
    prompts = measure_prompts(dataset.columns)
    prompt = int(prompts.max(initial=0))
    longest = prompt + settings.max_tokens
    if most is not None and longest > most:
        raise ConfigError(
            [
                Problem(
                    "sampling.max_tokens",
                    f"is {settings.max_tokens}, and after the longest prompt of {prompt} tokens a sample has room for {most - prompt}",
                    f"Set sampling.max_tokens = {max(1, most - prompt)} or less, or drop long prompts: data.max_length",
                )
            ]
        )
    refuse_misplaced_generator(resolved, longest, f"prompts and sampling.max_tokens make samples of up to {longest:,}")
    chosen = np.sort(np.argsort(-prompts, kind="stable")[: resolved.config.training.batch_size])
    columns = dataset.columns.take(chosen)
    answer, logprobs = np.zeros(settings.max_tokens, dtype=np.int32), np.zeros(settings.max_tokens, dtype=np.float32)
    return replace_answers(columns, prompts[chosen], [answer] * len(columns), [logprobs] * len(columns))
