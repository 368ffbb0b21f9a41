"""Losses of reinforcement against TRL's GRPOTrainer, in `nox -s peers`: every row of its table in docs/reference/migration.md, and estimators
that are several parts here, with the gradient of every parameter; advantages of several rewards; the steered entropy bonus, step by step.

TRL computes its own log-probabilities and entropies of the same rollouts, and its own loss of each micro-batch; ours is the engine's objective
over the whole batch, cut where a reducer depends on it. The old policy is up to 2 nats away, so that ratios are
clipped on both sides, also by bounds far from 1. Both compute in float32: 1e-5 of the largest gradient is a few dozen roundings.
"""

import json
import re
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, field, frozen
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from skyrl_engine.config.schema import EntropyControlConfig
from skyrl_engine.contracts import AdvantageBatch, BatchStructure, offsets_of
from skyrl_engine.contracts.values.outputs import Metric
from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine.modeling.chunked_head import RequestedScores, Score
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.objective.objective import LossObjective
from skyrl_engine.objective.parts import ObjectiveParts
from skyrl_engine.registry.bound_plugin import BoundPlugin
from skyrl_engine.testing.subject import CONTEXT, select_plugin
from skyrl_engine.testing.tokens.token_batches import TokenBatch
from skyrl_engine.training.rl.entropy_control import EntropyControl
from skyrl_engine.training.rl.entropy_ranks import ENTROPY_QUANTILE, rank_among_scored

TOLERANCE = 1e-5
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "migration.md"
LENGTHS = (5, 3, 1, 4, 8, 2)
PROMPT, LONGEST = 3, 8
MICRO_BATCH = 2
DRIFTS = {"old": 4.0, "sampling": 1.2, "ref": 1.2}
"""Widths, in nats, of the ranges in which other policies lie around the present one."""

Part = tuple[str, dict[str, Any]]


@frozen
class Case:
    """TRL's arguments, and the parts that compute the same here. A term is a name, options and a coefficient."""

    theirs: dict[str, Any]
    loss: Part
    reducer: Part
    terms: tuple[tuple[str, dict[str, Any], float], ...] = ()
    corrections: tuple[Part, ...] = ()
    advantages: bool = True
    micro_batch: int = MICRO_BATCH
    steps: tuple[tuple[int, ...], ...] = field(default=(tuple(range(len(LENGTHS))),))

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.theirs.items())


def rows_of_the_page() -> list[Case]:
    """The table of TRL's losses: a row of the term `kl` is compared with advantages of 0, which leave TRL's `beta` alone."""
    (section,) = re.findall(r"^## TRL\n(.*?)^## ", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    cases = []
    for line in section.splitlines():
        if not line.startswith("| `"):
            continue
        theirs, loss, reducer, equal = (cell.strip() for cell in line.strip("|").split("|"))
        assert equal == "value, gradient", line
        arguments = {name: _read(value) for name, value in (pair.split("=") for pair in theirs.strip("`").split(", "))}
        if loss.startswith("`kl`"):
            main: Part = ("ppo", {})
            cases.append(Case(arguments, main, _choose(reducer), terms=((*_choose(loss), arguments["beta"]),), advantages=False))
        else:
            cases.append(Case(arguments, _choose(loss), _choose(reducer)))
    assert len(cases) > 10, "the page's table was not found"
    return cases


def _read(value: str) -> Any:
    try:
        return json.loads(value.lower())
    except json.JSONDecodeError:
        return value


def _choose(cell: str) -> Part:
    name, *options = re.findall(r"`([^`]+)`", cell)
    return name, tomllib.loads(f"options = {{ {', '.join(options)} }}")["options"]


PPO: Part = ("ppo", {"clip_low": 0.2, "clip_high": 0.2})
TOKENS: Part = ("token_mean", {})
SEQUENCES: Part = ("sequence_mean", {})
UNCUT = {"estimator": "k3", "corrected": True, "limit": None}
HALVES = ((0, 1, 2), (3, 4, 5))
OF_PARTS = [
    # the mean over the sequence of log q - log p is above 0.1 in some sequences, below in others
    Case(
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.1},
        PPO,
        TOKENS,
        corrections=(("off_policy_sequence_mask", {"threshold": 0.1}),),
    ),
    Case(
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05, "beta": 0.3},
        PPO,
        SEQUENCES,
        terms=(("kl", UNCUT, 0.3),),
        corrections=(("off_policy_sequence_mask", {"threshold": 0.05}),),
    ),
    # over the whole batch, which is one micro-batch there
    *(
        Case(
            {"loss_type": "dapo", "top_entropy_quantile": share},
            PPO,
            TOKENS,
            corrections=(("top_entropy", {"share": share}),),
            micro_batch=len(LENGTHS),
        )
        for share in (0.2, 0.5, 0.0)
    ),
    Case(
        {"loss_type": "grpo", "top_entropy_quantile": 0.3, "beta": 0.3, "off_policy_mask_threshold": 0.05},
        PPO,
        SEQUENCES,
        terms=(("kl", UNCUT, 0.3),),
        corrections=(("off_policy_sequence_mask", {"threshold": 0.05}), ("top_entropy", {"share": 0.3})),
        micro_batch=len(LENGTHS),
    ),
    Case({"loss_type": "dapo", "entropy_coef": 0.1}, PPO, TOKENS, terms=(("entropy", {}, 0.1),), micro_batch=len(LENGTHS)),
    # two optimizer steps per generation, of 9 and 14 tokens
    Case({"loss_type": "dapo"}, PPO, ("batch_token_mean", {}), micro_batch=3, steps=HALVES),
    Case({"loss_type": "vespo"}, ("vespo", {}), ("batch_token_mean", {}), micro_batch=3, steps=HALVES),
]
"""Estimators that are several parts here."""


class Rollouts:
    """A tiny model and six rollouts, TRL's trainers of it, and the same tokens flat."""

    def __init__(self, folder: str) -> None:
        self.folder, self.path = folder, Path(folder) / "model"
        self.tokenizer = write_tokenizer(self.path, ["1 + 1 = 2 or so"], size=120)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        write_model(self.path, tokenizer=self.tokenizer, **sizes)
        draw = torch.Generator().manual_seed(3)
        shape = (len(LENGTHS), LONGEST)
        self.mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).long()
        self.completions = torch.randint(5, len(self.tokenizer), shape, generator=draw) * self.mask
        self.prompts = torch.randint(5, len(self.tokenizer), (len(LENGTHS), PROMPT), generator=draw)
        self.drifts = {name: (torch.rand(shape, generator=draw) - 0.5) * nats for name, nats in DRIFTS.items()}
        self.advantages = torch.tensor([1.0, -0.7, -1.5, 0.4, -0.3, 0.0])

    def make_trainer(self, rewards: Sequence[Any] = (), config: Any = GRPOConfig, **options: Any) -> Any:
        arguments = config(
            self.folder,
            use_cpu=True,
            bf16=False,
            report_to=[],
            gradient_checkpointing=False,
            disable_tqdm=True,
            **{"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": LONGEST, **options},
        )
        model = AutoModelForCausalLM.from_pretrained(self.path)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        rows = Dataset.from_list([{"prompt": "1 + 1 ="}] * 6)
        functions = list(rewards) or [lambda completions, **_: [0.0] * len(completions)]
        trainer = (GRPOTrainer if config is GRPOConfig else RLOOTrainer)(
            model=model, reward_funcs=functions, args=arguments, train_dataset=rows, processing_class=self.tokenizer
        )
        trainer.model.float().train()
        return trainer

    def score(self, model: Any) -> dict[str, torch.Tensor]:
        """[n] each, differentiable: log-probabilities and entropies by this engine's head, rollout after rollout."""
        ids = torch.cat([self.prompts, self.completions], 1)
        attention = torch.cat([torch.ones_like(self.prompts), self.mask], 1)
        logits = model(input_ids=ids, attention_mask=attention).logits[:, PROMPT - 1 : -1]
        here = self.mask.bool()
        requested = RequestedScores.of(("logprobs", "entropy"), self.completions[here], {})
        return dict(requested.name_values(Score(LogitRule(), 1.0, requested.scores)(logits[here], requested.tokens)))

    def inputs(self, model: Any, chosen: Sequence[int], case: Case) -> dict[str, torch.Tensor]:
        """A micro-batch as `_generate_and_score_completions` gives it."""
        with torch.no_grad():
            flat = self.score(model)["logprobs"]
        present = torch.zeros(self.mask.shape).masked_scatter(self.mask.bool(), flat)
        others = {name: torch.minimum(present + drift, torch.tensor(-1e-3)) for name, drift in self.drifts.items()}
        given = {
            "prompt_ids": self.prompts,
            "prompt_mask": torch.ones_like(self.prompts),
            "completion_ids": self.completions,
            "completion_mask": self.mask,
            "advantages": self.advantages if case.advantages else torch.zeros_like(self.advantages),
            "old_per_token_logps": others["old"],
            "sampling_per_token_logps": others["sampling"],
            "ref_per_token_logps": others["ref"],
        }
        rows = torch.tensor(chosen)
        return {name: values[rows] for name, values in given.items()} | {"num_items_in_batch": self.mask.sum()}


def their_step(rollouts: Rollouts, trainer: Any, case: Case, step: Sequence[int]) -> torch.Tensor:
    """The loss of one optimizer step: the sum over its micro-batches of what TRL differentiates."""
    parts = [step[first : first + case.micro_batch] for first in range(0, len(step), case.micro_batch)]
    trainer.current_gradient_accumulation_steps = len(parts)
    trainer.args.steps_per_generation = len(parts) * len(case.steps)
    return sum(trainer._compute_loss(trainer.model, rollouts.inputs(trainer.model, part, case)) for part in parts)


def our_step(rollouts: Rollouts, model: Any, case: Case, step: Sequence[int], **more: Any) -> torch.Tensor:
    """The objective of one optimizer step: the engine's parts and weights over all of its rollouts."""
    everyone = range(len(LENGTHS))
    inputs = rollouts.inputs(model, everyone, case)
    here = rollouts.mask.bool()
    scores = rollouts.score(model)
    advantages = inputs["advantages"][:, None].expand(here.shape)[here]
    columns = {
        "old_logprobs": inputs["old_per_token_logps"][here],
        "rollout_logprobs": inputs["sampling_per_token_logps"][here],
        "ref_logprobs": inputs["ref_per_token_logps"][here],
        "advantages": advantages,
        ENTROPY_QUANTILE: torch.from_numpy(
            rank_among_scored(scores["entropy"].detach().numpy(), np.ones(len(advantages), dtype=np.bool_))
        ),
    }
    lengths = np.array(LENGTHS, dtype=np.int64)
    ids = np.arange(len(lengths))
    whole = TokenBatch(
        lengths, {name: values.numpy() for name, values in columns.items()}, np.zeros(len(advantages)), ids, ids, ids
    )
    batch = whole.take(step)
    structure = BatchStructure(
        loss_weight=np.ones(batch.tokens, dtype=np.uint8),
        action_offsets=offsets_of(batch.lengths),
        group_ids=batch.group_ids,
        unit_ids=batch.unit_ids,
        micro_batch=np.arange(len(batch)) // case.micro_batch,
        max_sequence_length=LONGEST,
        mean_mass=float(lengths.sum()) / len(case.steps),
    )
    weights = select_plugin("reducer", *case.reducer).make(CONTEXT).weights(structure)
    objective = LossObjective(_make_parts(case), 0, 1, per_token_outputs=False, **more)
    places = torch.from_numpy(whole.places(step))
    total, _ = objective({name: values[places] for name, values in scores.items()}, evolve(batch, weights=weights).micro_batch())
    return total


def _make_parts(case: Case) -> ObjectiveParts:
    def bind(kind: str, part: Part) -> BoundPlugin[Any]:
        return select_plugin(kind, *part).bind(part[0], CONTEXT)

    terms = tuple(evolve(bind("loss", (name, options)), coefficient=coefficient) for name, options, coefficient in case.terms)
    return ObjectiveParts(bind("loss", case.loss), terms, tuple(bind("correction", part) for part in case.corrections))


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters() if parameter.grad is not None])


def compare(name: str, model: Any, theirs: torch.Tensor, made: torch.Tensor) -> None:
    due, got = gradient(model, theirs), gradient(model, made)
    distance = float((got - due).abs().max() / due.abs().max())
    print(json.dumps({"loss": name, "trl": theirs.item(), "ours": made.item(), "gradient": distance}), flush=True)
    assert due.abs().max() > 0, name
    assert abs(made.item() - theirs.item()) <= TOLERANCE * max(1.0, abs(theirs.item())), name
    assert distance <= TOLERANCE, name


def losses(rollouts: Rollouts, cases: Sequence[Case]) -> None:
    for case in cases:
        trainer = rollouts.make_trainer(**case.theirs)
        for number, step in enumerate(case.steps):
            theirs = their_step(rollouts, trainer, case, step)
            named = f"{case}, step {number + 1} of {len(case.steps)}" if len(case.steps) > 1 else str(case)
            compare(named, trainer.model, theirs, our_step(rollouts, trainer.model, case, step))


def steered_entropy(rollouts: Rollouts) -> None:
    """The bonus of five optimizer steps, weights left alone: entropies around a target that one of two steps of a batch is below."""
    case = Case({"loss_type": "dapo"}, PPO, ("batch_token_mean", {}), terms=(("entropy", {}, 0.02),), micro_batch=3, steps=HALVES)
    probe = rollouts.score(rollouts.make_trainer(**case.theirs).model)["entropy"].detach()
    bounds = offsets_of(np.array(LENGTHS))
    means = [float(torch.cat([probe[bounds[row] : bounds[row + 1]] for row in half]).mean()) for half in HALVES]
    target = sum(means) / 2
    assert min(means) < target < max(means)
    options = {"entropy_coef": 0.02, "use_adaptive_entropy": True, "entropy_target": target, "entropy_coef_delta": 0.015}
    bounded = {"entropy_coef_min": 0.01, "entropy_coef_max": 0.03}
    trainer = rollouts.make_trainer(**case.theirs, **options, **bounded)
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    control = EntropyControl.start(EntropyControlConfig(target, 0.015, 0.01, 0.03), _make_parts(case))
    coefficients = []
    for step in (*HALVES, HALVES[0], *HALVES):
        theirs = their_step(rollouts, trainer, case, step)
        # TRL's bonus is a mean over the tokens of the step, whatever divides its policy term: `token_mean` of it
        policy = our_step(rollouts, trainer.model, evolve(case, terms=()), step)
        bonus = our_step(rollouts, trainer.model, evolve(case, reducer=TOKENS), step, coefficients=control.coefficients)
        bonus = bonus - our_step(rollouts, trainer.model, evolve(case, reducer=TOKENS, terms=()), step)
        compare(f"use_adaptive_entropy, applied {dict(control.coefficients)['entropy']:g}", trainer.model, theirs, policy + bonus)
        entropies = torch.cat([probe[bounds[row] : bounds[row + 1]] for row in step])
        control.observe({"policy/entropy": Metric.mean(float(entropies.double().sum()), len(entropies))})
        coefficients.append((trainer.entropy_coef, control.coef))
        assert abs(trainer.entropy_coef - control.coef) < 1e-12, coefficients
    print(json.dumps({"entropy_coef": coefficients}), flush=True)
    assert len({round(coefficient, 6) for coefficient, _ in coefficients}) > 1


def advantages_of_the_page() -> Iterator[tuple[Any, dict[str, Any], Part, bool]]:
    """The rows of TRL on the page of advantages: a configuration and its arguments, our estimator, and whether the two are equal."""
    page = (PAGE.parent / "advantages.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^### TRL\n(.*?)^### ", page, re.MULTILINE | re.DOTALL)
    for line in section.splitlines():
        if line.startswith("| `"):
            theirs, ours, equal = (cell.strip() for cell in line.strip("|").split("|"))
            config, *arguments = theirs.strip("`").split(", ")
            options = {name: _read(value) for name, value in (pair.split("=") for pair in arguments)}
            yield {"GRPOConfig": GRPOConfig, "RLOOConfig": RLOOConfig}[config], options, _choose(ours), equal == "yes"


def advantages(rollouts: Rollouts) -> None:
    """Two groups of three attempts at TRL's own generations: three rewards of different spread, one of which some attempts do not have."""
    tables = {"a": [1.0, 0.0, 0.5, 2.0, 2.0, 2.0], "b": [30.0, -20.0, 5.0, 100.0, 0.0, 7.0], "c": [None, 1.0, 3.0, None, None, 4.0]}
    weights = {"a": 1.0, "b": 0.5, "c": 2.0}
    functions = []
    for values in tables.values():

        def reward(completions: list[str], values: list[float | None] = values, **_: Any) -> list[float | None]:
            return values

        functions.append(reward)
    shapes = {
        "num_generations": 3,
        "per_device_train_batch_size": 6,
        "max_completion_length": 2,
        "reward_weights": [*weights.values()],
    }
    totals = [sum(weights[name] * (values[place] or 0.0) for name, values in tables.items()) for place in range(6)]
    ids, parts = (
        np.arange(6),
        {name: np.array([np.nan if value is None else value for value in values]) for name, values in tables.items()},
    )
    batch = AdvantageBatch(
        rewards=np.array(totals),
        loss_weight=np.ones(6, dtype=np.uint8),
        action_offsets=np.arange(7),
        group_ids=ids // 3,
        trajectory_ids=ids,
        turn=np.zeros(6, dtype=np.int64),
        finished=np.ones(6, dtype=np.bool_),
        parts=parts,
    )
    cases: list[tuple[Any, dict[str, Any], Part, bool]] = [
        *advantages_of_the_page(),
        (GRPOConfig, {"multi_objective_aggregation": "normalize_then_sum"}, ("gdpo", {"epsilon": 1e-4, "weights": weights}), True),
    ]
    for config, theirs, part, equal in cases:
        trainer = rollouts.make_trainer(functions, config=config, **shapes, **theirs)
        given = trainer._generate_and_score_completions([{"prompt": "1 + 1 ="}] * 6)["advantages"].numpy()
        made = np.asarray(select_plugin("advantage", *part).make(CONTEXT)(batch))
        distance = float(np.abs(made - given).max())
        named = {"advantages": config.__name__, **theirs}
        print(json.dumps({**named, "trl": given.round(4).tolist(), "ours": part[0], "distance": distance}), flush=True)
        assert np.abs(given).max() > 0.1
        assert (distance <= TOLERANCE) == equal, named


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rollouts = Rollouts(folder)
        losses(rollouts, rows_of_the_page())
        losses(rollouts, OF_PARTS)
        steered_entropy(rollouts)
        advantages(rollouts)


if __name__ == "__main__":
    main()
