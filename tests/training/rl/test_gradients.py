"""Gradients of published recipes equal their definitions, written in float64, one attempt at a time, from what the journal holds.

The attempts have several turns, some are truncated, one failed. Nothing of the trainer is used but the tokens, rewards and log-probabilities
that were sampled: advantages, penalties, losses and means are computed again from the papers' formulas.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen
from rl_runs import Rl, Seen, StopHereError, write_world
from transformers import AutoModelForCausalLM

from skyrl_engine.contracts.values.rollout import Group, Trajectory
from skyrl_engine.engine.plan import Plan
from skyrl_engine.training.rl.run import run_rl
from skyrl_engine.training.rl.trainer import RlTrainer

TEMPERATURE, COEF, CLIP, EPSILON, LAM = 0.8, 0.3, 0.2, 1e-6, 0.95
PACKED = ("collator.use=packed", "rl.micro_batch_tokens=128")
TREE = ("collator.use=tree", "collator.least_shared=2", "rl.micro_batch_tokens=128")
ROWS = {"padded": ("rl.micro_batch_rows=4",), "packed": PACKED, "tree": TREE}


@frozen
class Attempt:
    """One attempt: the places of its sampled tokens, and of each the old log-probability, the reward, the reference's and the old value."""

    trajectory: Trajectory
    places: list[int]
    old: list[float]
    rewards: list[float]
    reference: list[float]
    values: list[float]


def score_tokens(model: Any, attempt: Trajectory, places: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and values of the sampled tokens, from whole logits of one row."""
    ids = torch.from_numpy(attempt.token_ids.astype("int64"))[None]
    output = model.model(input_ids=ids).last_hidden_state[0]
    logits = model.lm_head(output) / TEMPERATURE
    logprobs = torch.stack([logits[place - 1].log_softmax(-1)[int(ids[0, place])] for place in places])
    head = getattr(model, "score", None)
    values = logprobs.detach() * 0 if head is None else head(output)[[place - 1 for place in places], 0]
    return logprobs, values


def grpo(groups: Sequence[Sequence[Attempt]]) -> list[list[float]]:
    worth = []
    for group in groups:
        rewards = [sum(each.rewards) for each in group]
        mean = sum(rewards) / len(rewards)
        deviation = math.sqrt(sum((each - mean) ** 2 for each in rewards) / (len(rewards) - 1))
        worth += [[(each - mean) / (deviation + EPSILON)] * len(own.places) for each, own in zip(rewards, group, strict=True)]
    return worth


def dr_grpo(groups: Sequence[Sequence[Attempt]]) -> list[list[float]]:
    worth = []
    for group in groups:
        rewards = [sum(each.rewards) for each in group]
        worth += [[own - sum(rewards) / len(rewards)] * len(each.places) for own, each in zip(rewards, group, strict=True)]
    return worth


def rloo(groups: Sequence[Sequence[Attempt]]) -> list[list[float]]:
    """Against the mean of the others."""
    worth = []
    for group in groups:
        rewards = [sum(each.rewards) for each in group]
        for own, each in zip(rewards, group, strict=True):
            worth.append([own - (sum(rewards) - own) / (len(rewards) - 1)] * len(each.places))
    return worth


def normalize(worth: list[list[float]]) -> list[list[float]]:
    every = [each for own in worth for each in own]
    mean = sum(every) / len(every)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in every) / len(every))
    return [[(each - mean) / (deviation + EPSILON) for each in own] for own in worth]


def reinforce_pp(groups: Sequence[Sequence[Attempt]]) -> list[list[float]]:
    """The penalty of every token comes off its reward; a token is worth what follows it."""
    worth = []
    for each in (attempt for group in groups for attempt in group):
        shaped = [
            reward - COEF * (old - reference) for reward, old, reference in zip(each.rewards, each.old, each.reference, strict=True)
        ]
        worth.append([sum(shaped[place:]) for place in range(len(shaped))])
    return normalize(worth)


def estimate_advantages(attempt: Attempt) -> list[float]:
    """Generalized advantage estimates by their sum over all later differences, gamma 1."""
    values = [*attempt.values, 0.0]
    deltas = [reward + values[place + 1] - values[place] for place, reward in enumerate(attempt.rewards)]
    return [sum(LAM ** (later - place) * deltas[later] for later in range(place, len(deltas))) for place in range(len(deltas))]


def gae(groups: Sequence[Sequence[Attempt]]) -> list[list[float]]:
    return normalize([estimate_advantages(attempt) for group in groups for attempt in group])


def reverse_kl(groups: Sequence[Sequence[Attempt]]) -> list[list[float]]:
    """The teacher takes the reference's place."""
    return [
        [theirs - own for theirs, own in zip(each.reference, each.old, strict=True)]
        for each in (attempt for group in groups for attempt in group)
    ]


def clip(logprobs: torch.Tensor, old: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * worth, ratio.clamp(1 - CLIP, 1 + CLIP) * worth)


def reinforce(logprobs: torch.Tensor, _old: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
    return -worth * logprobs


def importance(logprobs: torch.Tensor, old: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
    return -(logprobs - old).exp() * worth


Mean = Callable[[list[torch.Tensor]], torch.Tensor]


def sequence_mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.mean() for loss in losses]).mean()


def token_mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(losses).mean()


def sums_over(length: int) -> Mean:
    return lambda losses: torch.stack([loss.sum() / length for loss in losses]).mean()


@frozen
class Recipe:
    advantage: Callable[[Sequence[Sequence[Attempt]]], list[list[float]]]
    loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    mean: Mean
    critic: bool = False


RECIPES = {
    "grpo": Recipe(grpo, clip, sequence_mean),
    "dr_grpo": Recipe(dr_grpo, clip, sums_over(44)),
    "rloo": Recipe(rloo, reinforce, sums_over(1)),
    "reinforce_pp": Recipe(reinforce_pp, clip, token_mean),
    "ppo": Recipe(gae, clip, token_mean, critic=True),
    "on_policy_distill": Recipe(reverse_kl, importance, token_mean),
}


def load_double(folder: Path, weights: dict[str, Any] | None = None) -> Any:
    """A model of its own in float64, with these weights; `score` is the critic's head, where there is one."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    if weights is not None:
        values = {name: torch.as_tensor(weight) for name, weight in weights.items()}
        if "score.weight" in values:
            model.score = torch.nn.Linear(values["score.weight"].shape[1], 1, dtype=torch.float64)
        missing, unexpected = model.load_state_dict(values, strict=False)
        assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    return model.eval()


def attempts_of(groups: Sequence[Group], before: Any, reference: Any) -> list[list[Attempt]]:
    attempts = []
    for group in groups:
        own = []
        for trajectory in group.finished:
            places = [place for place in range(len(trajectory.token_ids)) if trajectory.sampled[place]]
            with torch.no_grad():
                old, values = score_tokens(before, trajectory, places)
                frozen_scores, _ = score_tokens(reference, trajectory, places)
            rewards = trajectory.rewards.astype("float64").tolist()
            assert trajectory.unplaced_reward == 0
            own.append(Attempt(trajectory, places, old.tolist(), rewards, frozen_scores.tolist(), values.tolist()))
        attempts.append(own)
    return attempts


def compute_gradients(recipe: Recipe, groups: list[list[Attempt]], model: Any) -> dict[str, torch.Tensor]:
    worth = recipe.advantage(groups)
    losses = []
    for each, values in zip((attempt for group in groups for attempt in group), worth, strict=True):
        logprobs, critic = score_tokens(model, each.trajectory, each.places)
        loss = recipe.loss(logprobs, torch.tensor(each.old, dtype=torch.float64), torch.tensor(values, dtype=torch.float64))
        if recipe.critic:
            old = torch.tensor(each.values, dtype=torch.float64)
            returns = old + torch.tensor(estimate_advantages(each), dtype=torch.float64)
            near = torch.minimum(torch.maximum(critic, old - 0.2), old + 0.2)
            loss = loss + 0.5 * torch.maximum((critic - returns) ** 2, (near - returns) ** 2) / 2
        losses.append(loss)
    recipe.mean(losses).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model: a reference that is not the policy."""
    return write_world(tmp_path_factory.mktemp("other"), intermediate_size=48)


BREADTH = [
    ("padded", "grpo"),
    ("packed", "grpo"),
    ("padded", "dr_grpo"),
    ("packed", "rloo"),
    ("packed", "reinforce_pp"),
    ("padded", "reinforce_pp"),
    ("packed", "ppo"),
    ("padded", "ppo"),
    ("packed", "dr_grpo"),
    ("padded", "rloo"),
    ("packed", "on_policy_distill"),
    ("padded", "on_policy_distill"),
    *(("tree", name) for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp", "ppo", "on_policy_distill")),
]
QUICK = {
    ("padded", "grpo"),
    ("packed", "ppo"),
    ("packed", "on_policy_distill"),
    ("tree", "grpo"),
}


@pytest.mark.parametrize(
    ("collator", "name"), [pytest.param(*each, marks=() if each in QUICK else pytest.mark.nightly) for each in BREADTH]
)
def test_gradients_are_those_of_the_definitions(rl: Rl, seen: Seen, world: Path, other: Path, collator: str, name: str) -> None:
    """At the first update, and after it, where ratios are not 1 and some are clipped."""
    check(rl, seen, world, other, name, ROWS[collator])


BACKENDS = {
    "fsdp": {},
    "fsdp-cp2": {"context_parallel": 2},
    "deepspeed": {},
    "megatron": {},
    "megatron-pp2": {"pipeline_parallel": 2},
    "megatron-cp2": {"context_parallel": 2},
}
"""Options of each on two ranks. Tensor parallelism does not divide the one key head of this model."""


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("name", [pytest.param(each, marks=() if each == "grpo" else pytest.mark.nightly) for each in RECIPES])
@pytest.mark.parametrize(
    "backend",
    [pytest.param(each, marks=() if each == "fsdp" else pytest.mark.nightly) for each in BACKENDS],
)
def test_gradients_on_two_ranks_are_those_of_the_definitions(
    rl: Rl, seen: Seen, world: Path, other: Path, backend: str, name: str
) -> None:
    library = backend.partition("-")[0]
    options = (f"backend.{key}={value}" for key, value in BACKENDS[backend].items())
    tables = ("run.ranks=2", "run.launch=ray", f"backend.use={library}", *options)
    # DeepSpeed sums gradients in float32 at most
    rounded: dict[str, Any] = {"dtype": "float32", "bound": 1e-4} if backend == "deepspeed" else {}
    check(rl, seen, world, other, name, tables, **rounded)


def check(
    rl: Rl, seen: Seen, world: Path, other: Path, name: str, tables: Sequence[str], *, dtype: str = "float64", bound: float = 1e-5
) -> None:
    recipe = RECIPES[name]
    gathered: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def gather(trainer: RlTrainer, plan: Plan, _number: int) -> None:
        engine = trainer.engine
        for _ in range(2):
            weights = engine.weights()
            engine.forward_backward(plan, temperature=TEMPERATURE).result()
            gathered.append((weights, engine.gradients()))
            engine.optim_step().result()
        raise StopHereError

    seen.also = gather
    settings = [
        f"model.dtype={dtype}",
        f"rl.temperature={TEMPERATURE}",
        "rl.mini_batches=1",
        "rl.old=score",
        "rl.groups=4",
    ]
    settings += tables
    if name == "reinforce_pp":
        settings += [f"rl.kl.coef={COEF}", f"reference.path={other / 'model'}"]
    if name == "on_policy_distill":
        settings += [f"teacher.path={other / 'model'}"]
    if name == "ppo":
        settings += ["rl.group_size=3"]
    with pytest.raises(StopHereError):
        run_rl(rl("run", *settings, "optimizer.learning_rate=0.03", preset=name, environment={"failing": True}))
    groups = seen.groups[1]
    everything = [trajectory for group in groups for trajectory in group.trajectories]
    assert {trajectory.status for trajectory in everything} == {"finished", "truncated", "failed"}, "every kind of attempt"
    assert max(trajectory.turns for trajectory in everything) == 2
    start = {key: value.copy() for key, value in gathered[0][0].items()}
    attempts = attempts_of(groups, load_double(world, start), load_double(other))
    for moment, (weights, gradients) in enumerate(gathered):
        model = load_double(world, dict(weights))
        wanted = compute_gradients(recipe, attempts, model)
        assert gradients.keys() >= {key for key in wanted if key != "lm_head.weight"}
        for key, value in wanted.items():
            got = torch.as_tensor(gradients[key]).double().reshape(value.shape)
            distance = float((got - value).norm() / value.norm())
            assert distance < bound, (moment, key, distance)
    clipped_away = clip_share(attempts, load_double(world, dict(gathered[1][0])))
    assert 0 < clipped_away < 1, "some ratios are outside of the range after the first update"


def clip_share(groups: list[list[Attempt]], model: Any) -> float:
    outside = []
    for each in (attempt for group in groups for attempt in group):
        with torch.no_grad():
            ratio = (score_tokens(model, each.trajectory, each.places)[0] - torch.tensor(each.old, dtype=torch.float64)).exp()
        outside += ((ratio - 1).abs() > CLIP).tolist()
    return sum(outside) / len(outside)
