"""CPU time of a whole step of reinforcement learning, against TRL's GRPOTrainer: bar B1, and from the same runs bar B3. One thread.

The same Qwen3 of 10 million random weights in float32 attempts the same four tasks four times each in every step, 48 tokens an attempt, with
temperature 1, and learns from them with the same loss and the same optimizer, by
- the engine's `run_rl`: backend `fsdp` in the run's process, generator `hf`, rewards in a process of the environment's own, journal, metrics
  and all; with `rl.old = "current"`, once with and once without the metric of entropy, and with `rl.old = "score"`, a pass that TRL leaves out;
- GRPOTrainer with its defaults, one update per batch (`beta` 0, `num_iterations` 1), and transformers' `generate`, but in float32 and without
  recomputed activations, as the engine; all attempts in one micro-batch, and four at a time. The faster of the two counts. It reports the
  entropy in every step, which cannot be turned off.

That both do the same work is checked first: a batch of rollouts that the engine sampled has the same prompts and the same gradient norm in
both.

Every run has a process of its own, and only one of them works at a time: a round is one step of each, one after the other, so that a busy
machine slows all alike. A step's figure is the CPU time of the run's process and of those that it started. A round in which some attempt of
some run ended early does not count, so that all sample as many tokens. A ratio is of one round; the median of all rounds is held against the
bar.

Then the same with prompts of 512 tokens and eight answers of 64 each to sixteen of them, as the engine runs by default, which computes a
common prompt once. There GRPOTrainer is given answers that the engine sampled and the engine's span of sampling is taken off, so that the
figures are of a step without sampling. Run with `nox -s peers`; about fifteen minutes.
"""

import importlib.util
import itertools
import json
import logging
import multiprocessing
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import transformers
import trl
from attrs import Factory, define, frozen
from datasets import Dataset
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine, of_process
from measuring.trainer_options import PLAIN
from measuring.words import VOCABULARY, load_model, write_words_model
from transformers import PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from skyrl_engine import hookimpl
from skyrl_engine.config import from_dict, resolve
from skyrl_engine.contracts import StepFinished
from skyrl_engine.contracts.kinds.observer import RolloutsFinished
from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.training.rl.run import run_rl


@frozen
class Shape:
    """The work of a step: `groups` prompts of `shortest` to `longest` tokens with `group_size` answers of `new` tokens."""

    groups: int
    group_size: int
    shortest: int
    longest: int
    new: int
    warm_up: int
    rounds: int

    @property
    def attempts(self) -> int:
        return self.groups * self.group_size

    @property
    def steps(self) -> int:
        return self.warm_up + self.rounds


SHORT = Shape(groups=4, group_size=4, shortest=12, longest=24, new=48, warm_up=3, rounds=24)
LONG = Shape(groups=16, group_size=8, shortest=512, longest=512, new=64, warm_up=1, rounds=3)
"""Long prompts, which attempts share."""

LEARNING_RATE, MAX_NORM = 1e-5, 1.0
EPSILON = 1e-4
"""GRPOTrainer adds this to the deviation of a group's rewards."""

AGREEMENT = 1e-4
"""Gradient norms over the same rollouts."""

CURRENT, ENTROPY, SCORE = "old = current", "old = current, entropy metric", "old = score"
BARS = {CURRENT: 0.80, ENTROPY: 0.82, SCORE: 0.92}
"""B1: share of GRPOTrainer's CPU time."""

SHARED_BAR = 0.25
"""Share of GRPOTrainer's CPU time without sampling, prompts of 512 tokens."""

OVERHEAD = 0.02
"""B3: share of a step that is neither sampling nor forward, backward or optimizer."""

WORK = ("generate", "model", "objective", "optimizer")
"""Spans of what any program does: sampling, forward and backward, the loss and its metrics, the optimizer."""

REWARD = '''"""The reward of both."""


def share_of_even(prompts, completions, **columns):
    """The share of words of an answer that end in an even digit."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [sum(word[-1] in "02468" for word in text.split()) / max(1, len(text.split())) for text in texts]
'''

Answers = dict[tuple[int, ...], list[list[int]]]
"""Token ids of the answers to a prompt, by the prompt's."""

Told = Callable[[int, Mapping[str, float]], None]
"""Takes the end of every step: how many tokens it sampled, and CPU seconds by span."""


@frozen
class Step:
    """One step of a run: CPU seconds of its processes, tokens that were sampled, and CPU seconds by span, where the run tells them."""

    seconds: float
    tokens: int
    spans: Mapping[str, float]


def main() -> None:
    quiet()
    print(f"{machine()}, one thread, torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}")
    with tempfile.TemporaryDirectory() as name:
        compare_short(Path(name))
    with tempfile.TemporaryDirectory() as name:
        compare_long(Path(name))


def compare_short(directory: Path) -> None:
    """Bars B1 and B3: a whole step, sampling included."""
    prepare(directory, SHORT)
    check_same_work(directory, SHORT, SHORT.attempts, SHORT.group_size)
    works: dict[str, Callable[[Told], None]] = {
        "GRPOTrainer, 16 rows at once": partial(run_trl, directory, SHORT, 16, None),
        CURRENT: partial(run_engine, directory, SHORT, "current", False),
        ENTROPY: partial(run_engine, directory, SHORT, "current", True),
        "GRPOTrainer, 4 rows at once": partial(run_trl, directory, SHORT, 4, None),
        SCORE: partial(run_engine, directory, SHORT, "score", False),
    }
    rounds = take_rounds(works, SHORT)
    report([steps for steps in rounds if all(step.tokens == SHORT.attempts * SHORT.new for step in steps.values())])


def compare_long(directory: Path) -> None:
    """The bar of shared prompts: a step without sampling, by default."""
    prepare(directory, LONG)
    answers = check_same_work(directory, LONG, LONG.group_size)
    works: dict[str, Callable[[Told], None]] = {"engine": partial(run_engine, directory, LONG, "auto", True)}
    works |= {f"GRPOTrainer, {rows} rows at once": partial(run_trl, directory, LONG, rows, answers) for rows in (4, 8, 32)}
    rounds = [
        {run: step.seconds - step.spans.get("generate", 0.0) for run, step in steps.items()} for steps in take_rounds(works, LONG)
    ]
    medians = {run: median(seconds[run] for seconds in rounds) for run in works}
    for run, seconds in medians.items():
        print(f"prompts of {LONG.longest} tokens, {run}: {seconds:.2f} CPU s a step without sampling")
    fastest = min((run for run in medians if run != "engine"), key=lambda run: medians[run])
    ratio = median(seconds["engine"] / seconds[fastest] for seconds in rounds)
    print(f"prompts of {LONG.longest} tokens: {ratio:.3f} of {fastest} {compare_with_bar(ratio, at_most=SHARED_BAR)}")


def take_rounds(works: Mapping[str, Callable[[Told], None]], shape: Shape) -> list[dict[str, Step]]:
    """One step of each run after the other, as often as the shape says; those of the warm-up are left out."""
    runs = {run: Paced.started(work) for run, work in works.items()}
    rounds = [{run: paced.step() for run, paced in runs.items()} for _ in range(shape.steps)]
    for paced in runs.values():
        paced.end()
    return rounds[shape.warm_up :]


def quiet() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*rollout_func", category=UserWarning)


def prepare(directory: Path, shape: Shape) -> None:
    """Write model, tasks and reward, and say what they are."""
    parameters = write_words_model(directory / "model", positions=1024)
    print(
        f"Qwen3 of {parameters / 1e6:.1f}M parameters, float32; {shape.groups} x {shape.group_size} attempts of {shape.new} tokens a step, "
        f"prompts of {shape.shortest} to {shape.longest}"
    )
    draw = np.random.default_rng(0)
    lengths = draw.integers(shape.shortest, shape.longest + 1, shape.groups)
    tasks = [{"prompt": " ".join(f"w{word}" for word in draw.integers(2, VOCABULARY, length))} for length in lengths]
    (directory / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (directory / "reward.py").write_text(REWARD)


@define(eq=False)
class Paced:
    """A run in a process of its own, which works only while a step is asked for."""

    process: Any
    pipe: Connection

    @classmethod
    def started(cls, work: Callable[[Told], None]) -> "Paced":
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=pace, args=(work, theirs))
        process.start()
        theirs.close()
        return cls(process, ours)

    def step(self) -> Step:
        self.pipe.send(None)
        try:
            step: Step = self.pipe.recv()
        except EOFError:
            raise SystemExit("a run ended before its last step; see above") from None
        return step

    def end(self) -> None:
        """Let the run end after its last step."""
        self.pipe.send(None)
        self.process.join()


def pace(work: Callable[[Told], None], pipe: Connection) -> None:
    """Do the work of a run, waiting to be asked before every step."""
    quiet()
    began = 0.0

    def tell_span(tokens: int, spans: Mapping[str, float]) -> None:
        nonlocal began
        pipe.send(Step(cpu_seconds() - began, tokens, dict(spans)))
        pipe.recv()
        began = cpu_seconds()

    pipe.recv()
    try:
        work(tell_span)
    except BaseException:
        traceback.print_exc()
        raise


def cpu_seconds() -> float:
    """CPU time of this process and of those that it started and that are alive, in seconds."""
    return time.process_time() + sum(of_process(child.pid) for child in psutil.Process().children(recursive=True))


def check_same_work(directory: Path, shape: Shape, *rows_at_once: int) -> Answers:
    """Say how far gradient norms of both are apart over the same rollouts, and that the prompts are the same; the answers by prompt."""
    ours = Keeper()
    run_engine(directory, shape, "current", False, steps=1, observers=[ours])
    answers: Answers = {}
    for attempt in (attempt for group in ours.groups for attempt in group.finished):
        prompt = int(attempt.segment_offsets[1])
        answers.setdefault(tuple(attempt.token_ids[:prompt].tolist()), []).append(attempt.token_ids[prompt:].tolist())
    for rows in rows_at_once:
        left = {prompt: iter(given) for prompt, given in answers.items()}
        theirs = Reports()
        trainer = make_trl(directory, shape, rows, steps=1, replay=left, logging_steps=1)
        trainer.add_callback(theirs)
        trainer.train()
        assert all(next(given, None) is None for given in left.values()), "GRPOTrainer asked for other prompts"
        due, got = ours.metrics["grad_norm"], theirs.logs["grad_norm"]
        print(
            f"the same rollouts, GRPOTrainer, {rows} rows at once, beside the engine: gradient norms {got:.6f} and {due:.6f}, apart by "
            f"{abs(got / due - 1):.1e} {compare_with_bar(abs(got / due - 1), at_most=AGREEMENT)}"
        )
    return answers


@define(eq=False)
class Keeper:
    """An observer that keeps the first batch, and what the step on it reported."""

    groups: tuple[Group, ...] = ()
    metrics: Mapping[str, float] = Factory(dict)

    @hookimpl
    def skyrl_engine_rollouts_finished(self, event: RolloutsFinished) -> None:
        self.groups = self.groups or event.groups

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self.metrics = self.metrics or event.metrics


@define(eq=False)
class Pacer:
    """An observer that tells the end of every step."""

    told: Told
    tokens: int = 0

    @hookimpl
    def skyrl_engine_rollouts_finished(self, event: RolloutsFinished) -> None:
        self.tokens = sum(len(attempt.logprobs) for group in event.groups for attempt in group.finished)

    @hookimpl
    def skyrl_engine_step_finished(self, event: StepFinished) -> None:
        self.told(self.tokens, event.cpu_seconds)


def run_engine(
    directory: Path,
    shape: Shape,
    old: str,
    entropy: bool,
    told: Told | None = None,
    *,
    steps: int | None = None,
    observers: Sequence[object] = (),
) -> None:
    with tempfile.TemporaryDirectory() as run:
        reward, data = f"{directory}/reward.py:share_of_even", str(directory / "tasks.jsonl")
        table = {
            "trainer": "rl",
            "model": {"path": str(directory / "model")},
            "environments": [{"use": "function", "reward": reward, "data": data}],
            "rl": {
                "steps": steps or shape.steps,
                "groups": shape.groups,
                "group_size": shape.group_size,
                "max_tokens": shape.new,
                "max_prompt_tokens": shape.longest,
                "old": old,
                "entropy_metric": entropy,
            },
            "advantage": {"epsilon": EPSILON},
            "run": {"directory": f"{run}/run", "device": "cpu"},
            "optimizer": {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_NORM},
            "checkpoint": {"at_end": False},
            "evaluation": {"at_end": False},
        }
        pacers = [] if told is None else [Pacer(told)]
        run_rl(resolve(from_dict(table, "benchmark")), observers=[*observers, *pacers])


class CountingTrainer(GRPOTrainer):  # type: ignore[misc] # trl is not typed
    """Keeps how many tokens the last batch sampled."""

    def _generate(self, prompts: Any) -> Any:
        generated = super()._generate(prompts)
        self.sampled = sum(map(len, generated[1]))
        return generated


class StepEnds(TrainerCallback):
    def __init__(self, told: Told, trainer: CountingTrainer) -> None:
        self.told, self.trainer = told, trainer

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self.told(self.trainer.sampled, {})


class Reports(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.logs: dict[str, float] = {}

    def on_log(self, *arguments: Any, logs: Mapping[str, float], **options: Any) -> None:
        self.logs.update(logs)


def make_trl(
    directory: Path,
    shape: Shape,
    micro_batch: int,
    *,
    steps: int,
    replay: Mapping[tuple[int, ...], Iterator[list[int]]] | None = None,
    **settings: Any,
) -> Any:
    """A GRPOTrainer over the tasks; with `replay`, answers by the tokens of their prompts, it takes those instead of sampling."""
    spec = importlib.util.spec_from_file_location("benchmark_reward", directory / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "model")
    tasks = [json.loads(line) for line in (directory / "tasks.jsonl").read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": task["prompt"]}]} for task in tasks]

    def replay_prompts(prompts: Any, trainer: Any) -> dict[str, Any]:
        assert replay is not None
        encoded = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]
        return {"prompt_ids": encoded, "completion_ids": [next(replay[tuple(prompt)]) for prompt in encoded], "logprobs": None}

    arguments = GRPOConfig(
        output_dir=str(directory / "trl"),
        max_steps=steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=shape.attempts // micro_batch,
        num_generations=shape.group_size,
        max_completion_length=shape.new,
        loss_type="grpo",
        shuffle_dataset=False,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_NORM,
        **PLAIN,
        **settings,
    )
    trainer = CountingTrainer(
        model=load_model(directory / "model"),
        reward_funcs=module.share_of_even,
        args=arguments,
        # the same tasks in every step, and no epoch ends between two
        train_dataset=Dataset.from_list(rows * steps),
        processing_class=tokenizer,
        rollout_func=None if replay is None else replay_prompts,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def run_trl(directory: Path, shape: Shape, micro_batch: int, answers: Answers | None, told: Told) -> None:
    """Train; where `answers` are given, every step takes them instead of sampling."""
    replay = None if answers is None else {prompt: itertools.cycle(texts) for prompt, texts in answers.items()}
    trainer = make_trl(directory, shape, micro_batch, steps=shape.steps, replay=replay)
    trainer.add_callback(StepEnds(told, trainer))
    trainer.train()


def report(rounds: Sequence[Mapping[str, Step]]) -> None:
    """Print every run's figure, and the bars."""
    print(f"{len(rounds)} rounds of {SHORT.rounds} count: all attempts had their whole length; medians, and quartiles in brackets")
    for run in rounds[0]:
        print(f"{run}: {spread([steps[run].seconds for steps in rounds])} CPU s a step")
    peers = [run for run in rounds[0] if run.startswith("GRPOTrainer")]
    fastest = min(peers, key=lambda run: median(steps[run].seconds for steps in rounds))
    for run, bar in BARS.items():
        ratios = [steps[run].seconds / steps[fastest].seconds for steps in rounds]
        print(f"B1, {run}: {spread(ratios)} of {fastest} {compare_with_bar(median(ratios), at_most=bar)}")
    for run in BARS:
        shares = [1 - sum(steps[run].spans[span] for span in WORK) / steps[run].seconds for steps in rounds]
        verdict = compare_with_bar(median(shares), at_most=OVERHEAD) if run == CURRENT else ""
        print(f"B3, {run}: {spread(shares)} of a step is neither {', '.join(WORK[:-1])} nor {WORK[-1]} {verdict}")


def spread(values: Sequence[float]) -> str:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
