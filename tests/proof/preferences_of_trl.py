"""Preferences against TRL's own trainers, in `nox -s peers`: the tokens of rows of every shape that TRL reads, losses of preferences and reward
models on one model and batch, with the gradient of every parameter, and the choice of pairs of online DPO.

TRL computes a whole step by itself, from its collator's batch to its loss; ours is given log-probabilities of the same tokens. Either the
policy or its reference has noise on every weight, so that no ratio is 0. Both compute in float32: 1e-5 of the largest gradient is a few dozen
roundings.
"""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from skyrl_engine.config.schema import DataConfig
from skyrl_engine.contracts import LossOutput, LossTokens, Pairs, Sequences
from skyrl_engine.contracts.values.rollout import SEGMENT_PROMPT, SEGMENT_SAMPLED, Group, Trajectory, VersionSpans
from skyrl_engine.data.dataset import load_columns
from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine.modeling.chunked_head import RequestedScores, Score
from skyrl_engine.modeling.mixing import mix_weights
from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.rollout.columns import to_columns
from skyrl_engine.training.rl.pairs import PairedAttempts, choose_pairs
from skyrl_engine.training.rl.trainer import advantage_batch
from skyrl_engine_losses import plugin
from skyrl_engine_losses.preference import CpoConfig, DpoConfig, KtoConfig, OrpoConfig, SimpoConfig
from skyrl_engine_losses.reward_model import BradleyTerryConfig

BETA, SMOOTHING, TOLERANCE = 0.3, 0.2, 1e-5
FORMS: dict[str, DpoConfig] = {
    "sigmoid": DpoConfig(beta=BETA),
    "hinge": DpoConfig(form="hinge", beta=BETA),
    "ipo": DpoConfig(form="ipo", beta=BETA, length_normalized=True),
    "robust": DpoConfig(form="robust", beta=BETA, label_smoothing=SMOOTHING),
    "apo_zero": DpoConfig(form="apo_zero", beta=BETA),
    "apo_down": DpoConfig(form="apo_down", beta=BETA),
    "sigmoid_norm": DpoConfig(beta=BETA, length_normalized=True),
    "exo_pair": DpoConfig(form="exo_pair", beta=BETA, label_smoothing=SMOOTHING),
    "nca_pair": DpoConfig(form="nca_pair", beta=BETA),
    "bco_pair": DpoConfig(form="bco_pair", beta=BETA),
    "sppo_hard": DpoConfig(form="sppo_hard", beta=BETA),
    "aot": DpoConfig(form="aot", beta=BETA, label_smoothing=SMOOTHING),
    "aot_unpaired": DpoConfig(form="aot_unpaired", beta=BETA),
    "discopop": DpoConfig(form="discopop", beta=BETA),
}
"""TRL's `loss_type`, and what it is called here."""

OPTIONS: list[tuple[str, dict[str, Any], DpoConfig]] = [
    *((kind, {"f_divergence_type": kind}, DpoConfig(beta=BETA, f_divergence=kind)) for kind in ("forward_kl", "js_divergence")),
    (
        "alpha_divergence",
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.25},
        DpoConfig(beta=BETA, f_divergence="alpha_divergence", f_alpha=0.25),
    ),
    (
        "ipo, js_divergence",
        {"loss_type": ["ipo"], "f_divergence_type": "js_divergence"},
        DpoConfig(form="ipo", beta=BETA, f_divergence="js_divergence", length_normalized=True),
    ),
    ("ld_alpha", {"ld_alpha": 0.5}, DpoConfig(beta=BETA, ld_alpha=0.5)),
    ("ld_alpha, nca_pair", {"loss_type": ["nca_pair"], "ld_alpha": 0.0}, DpoConfig(form="nca_pair", beta=BETA, ld_alpha=0.0)),
    ("use_weighting", {"use_weighting": True}, DpoConfig(beta=BETA, weighted=True)),
]
"""Options of TRL next to `loss_type`, and what they are called here."""

ROWS = [{"prompt": f"{a} + {a} =", "chosen": f" {2 * a}", "rejected": f" {2 * a + 1} or so"} for a in range(4)]
JUDGED = [
    {"prompt": row["prompt"], "completion": row[half], "label": half == "chosen"} for row in ROWS for half in ("chosen", "rejected")
]

USER = [{"role": "user", "content": "2 + 2 ="}]
SHAPES: dict[str, dict[str, Any]] = {
    "explicit texts": {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5 or so"},
    "an explicit prompt that ends in a space": {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "ö"},
    "an explicit prompt within a word": {"prompt": "2 + 2 = 4 o", "chosen": "r so", "rejected": "x"},
    "implicit texts": {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5 or so"},
    "an implicit prompt that ends in a newline": {"chosen": "2 + 2 =\n4", "rejected": "2 + 2 =\n5 or so"},
    "an implicit prompt without spaces": {"chosen": "今天天气很好", "rejected": "今天天气很坏"},
    "Japanese": {"chosen": "今日は天気がいいです。", "rejected": "今日は雨が降ります。"},
    "Thai": {"chosen": "วันนี้อากาศดีมาก", "rejected": "วันนี้ฝนจะตก"},
    "one text begins the other": {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 4 or so"},
    "explicit messages": {"prompt": USER, **{half: [{"role": "assistant", "content": half}] for half in ("chosen", "rejected")}},
    "implicit messages": {half: [*USER, {"role": "assistant", "content": half}] for half in ("chosen", "rejected")},
    "several turns": {
        "prompt": USER,
        "chosen": [{"role": "assistant", "content": "4"}, *USER, {"role": "assistant", "content": "4"}],
        "rejected": [{"role": "assistant", "content": "5"}, *USER, {"role": "assistant", "content": "4"}],
    },
}
"""Rows of every shape of pairs that TRL's page on dataset formats names, with prompts that end in every way."""

TEMPLATE = """\
{%- for m in messages -%}{{ m.role + ': ' + m.content }}{% if m.role == 'user' %}{{ '\\n' }}{% else %}{{ eos_token }}{% endif %}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"""
"""A template whose generation prompt ends in a space, with which answers merge."""

CHATML = """\
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

Batch = dict[str, torch.Tensor]


class Trainers:
    """TRL's trainers of one model, which is in `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder, self.path = folder, Path(folder) / "model"
        texts = [row["prompt"] + row[half] for row in ROWS for half in ("chosen", "rejected")]
        texts += [json.dumps(row, ensure_ascii=False) for row in SHAPES.values()] + ["ö"]
        self.tokenizer = write_tokenizer(self.path, texts, size=220)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
        write_model(self.path, tokenizer=self.tokenizer, **sizes)

    def make(
        self,
        kind: Any,
        config: Any,
        rows: list[dict[str, Any]] = ROWS,
        *,
        moved: str = "model",
        size: int | None = None,
        **options: Any,
    ) -> Any:
        """TRL's trainer of these rows in one batch (or batches of `size`), its policy or its reference moved away from the other."""
        arguments = config(
            self.folder,
            per_device_train_batch_size=size or len(rows),
            use_cpu=True,
            bf16=False,
            report_to=[],
            gradient_checkpointing=False,
            disable_tqdm=True,
            **options,
        )
        if kind is RewardTrainer:
            model = AutoModelForSequenceClassification.from_pretrained(self.path, num_labels=1)
        else:
            model = AutoModelForCausalLM.from_pretrained(self.path)
        trainer = kind(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=self.tokenizer)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in getattr(trainer, moved).float().parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        return trainer


def logprobs_of(model: Any, batch: Batch, of: str = "") -> torch.Tensor:
    """[n]: log-probabilities of the completions' tokens, sample after sample; `of` is "KL_" for TRL's mismatched rows."""
    ids, completion = batch[f"{of}input_ids"], batch[f"{of}completion_mask"]
    logits = model(input_ids=ids, attention_mask=batch[f"{of}attention_mask"]).logits[:, :-1]
    scores = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return scores[completion[:, 1:].bool()]


@torch.no_grad()
def scores_of(model: Any, batch: Batch, *names: str) -> dict[str, torch.Tensor]:
    """[n] each: scores of this engine's head at the completions' tokens, sample after sample, of the model's logits."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    here = batch["completion_mask"][:, 1:].bool()
    requested = RequestedScores.of(names, batch["input_ids"][:, 1:][here], {})
    return requested.name_values(Score(LogitRule(), 1.0, requested.scores)(logits[here], requested.tokens))


def ours(loss: Callable[[LossTokens], LossOutput], model: Any, batch: Batch, **columns: torch.Tensor) -> torch.Tensor:
    """The objective: every token's value, weighted as `sequence_mean` does. Rows have a `label`, or chosen halves come first."""
    counts = batch["completion_mask"][:, 1:].sum(1)
    samples = len(counts)
    paired = "label" not in batch
    units = torch.arange(samples) % (samples // 2) if paired else torch.arange(samples)
    roles = (torch.arange(samples) >= samples // 2 if paired else ~batch["label"].bool()).long()
    sequences = Sequences(torch.repeat_interleave(torch.arange(samples), counts), counts, units, units, roles)
    needs = {"logprobs": logprobs_of(model, batch), **columns}
    output = loss(LossTokens(needs, sequences, torch.Generator, Pairs.of(sequences) if paired else None))
    values = output.token_loss / counts[sequences.index]
    return values.sum() / samples


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters() if parameter.grad is not None])


def compare(name: str, model: Any, theirs: torch.Tensor, made: torch.Tensor) -> None:
    due, got = gradient(model, theirs), gradient(model, made)
    distance = float((got - due).abs().max() / due.abs().max())
    print(json.dumps({"loss": name, "trl": theirs.item(), "ours": made.item(), "gradient": distance}), flush=True)
    assert abs(made.item() - theirs.item()) <= TOLERANCE * max(1.0, abs(theirs.item())), name
    assert distance <= TOLERANCE, name


def rows_of_every_shape(trainers: Trainers) -> None:
    """Prompt and answers of both halves, in tokens, all of which carry loss after the prompt."""
    shapes = [(name, row, None if isinstance(row["chosen"], str) else TEMPLATE) for name, row in SHAPES.items()]
    for name, row, template in [*shapes, ("several turns in ChatML", SHAPES["several turns"], CHATML)]:
        trainers.tokenizer.chat_template = template
        trained = trainers.make(DPOTrainer, DPOConfig, [row, row]).train_dataset[0]
        path = trainers.path / "shape.jsonl"
        path.write_text(json.dumps(row) + "\n")
        data = DataConfig(train=str(path), cache=str(trainers.path / "cache"), loss_on="completion")
        columns = load_columns(data, trainers.tokenizer, split="train", reading="preferences").columns
        for sample, half in enumerate(("chosen", "rejected")):
            ids = columns.input_ids[columns.token_offsets[sample] : columns.token_offsets[sample + 1]].tolist()
            answer = int(columns.action_offsets[sample + 1] - columns.action_offsets[sample])
            assert ids == trained["prompt_ids"] + trained[f"{half}_ids"], (name, half)
            # the first token of all is never scored, neither here nor there
            assert len(ids) - answer == max(1, len(trained["prompt_ids"])), (name, half)
            weights = columns.loss_weight[columns.action_offsets[sample] : columns.action_offsets[sample + 1]]
            assert (weights == 1).all(), (name, half)
        print(json.dumps({"rows": name, "prompt": len(trained["prompt_ids"])}), flush=True)
    trainers.tokenizer.chat_template = None


def direct(trainers: Trainers) -> None:
    """Loss, gradient and rewards of every form, and of every option."""
    of_forms = [(form, {"loss_type": [form], "label_smoothing": config.label_smoothing}, config) for form, config in FORMS.items()]
    for name, options, config in of_forms + OPTIONS:
        trainer = trainers.make(DPOTrainer, DPOConfig, beta=BETA, **options)
        model, batch = trainer.model, next(iter(trainer.get_train_dataloader()))
        with torch.no_grad():
            columns = {"ref_logprobs": logprobs_of(trainer.ref_model.float(), batch)}
            if config.weighted:
                columns["log_sum_squares"] = scores_of(model, batch, "log_sum_squares")["log_sum_squares"]
        outputs: list[LossOutput] = []

        def loss(tokens: LossTokens, config: DpoConfig = config, outputs: list[LossOutput] = outputs) -> LossOutput:
            outputs.append(plugin.dpo(tokens, config))
            return outputs[-1]

        losses = ours(loss, model, batch, **columns)
        compare(f"dpo {name}", model, trainer.compute_loss(model, dict(batch)), losses)
        reported = trainer._metrics["train" if model.training else "eval"]
        for metric in (
            "rewards/chosen",
            "rewards/rejected",
            "rewards/margins",
            "rewards/accuracies",
            "logps/chosen",
            "logps/rejected",
        ):
            got, (due,) = outputs[0].metrics[metric].result, reported[metric]
            assert abs(got - due) <= TOLERANCE * max(1.0, abs(due)), (name, metric, got, due)
    scores = scores_of(model, batch, "entropy", "logsumexp", "mean_logprob")
    logits = scores["logsumexp"] + scores["mean_logprob"]
    chosen = int(batch["completion_mask"][: len(ROWS), 1:].sum())
    means = {"entropy": scores["entropy"], "logits/chosen": logits[:chosen], "logits/rejected": logits[chosen:]}
    for metric, values in means.items():
        assert abs(float(values.mean()) - reported[metric][0]) <= TOLERANCE * max(1.0, abs(reported[metric][0])), metric
        print(json.dumps({"metric": metric, "trl": reported[metric][0], "ours": float(values.mean())}), flush=True)


def halves(trainer: Any, batch: Batch) -> Batch:
    """A batch of TRL's older trainers in the names of its newer ones."""
    joined = trainer.concatenated_inputs(batch, padding_value=trainer.processing_class.pad_token_id)
    return {
        "input_ids": joined["concatenated_input_ids"],
        "attention_mask": joined["concatenated_attention_mask"],
        "completion_mask": (joined["concatenated_labels"] != -100).long(),
    }


def contrastive(trainers: Trainers) -> None:
    """CPO without its likelihood, which TRL averages over the tokens of a batch and the paper sums over an answer; SimPO; AlphaPO of both."""
    cpo = {"beta": BETA, "alpha": 0.0}
    smoothed = {"label_smoothing": SMOOTHING}
    alpha = {"reward_alpha": 0.1}
    cases: list[tuple[str, dict[str, Any], CpoConfig | SimpoConfig]] = [
        ("sigmoid", {}, CpoConfig(**cpo)),
        ("sigmoid", smoothed, CpoConfig(**cpo, **smoothed)),
        # within the margin, beyond which there is no gradient
        ("hinge", {}, CpoConfig(form="hinge", beta=0.02, alpha=0.0)),
        ("ipo", {}, CpoConfig(form="ipo", length_normalized=True, **cpo)),
        ("sigmoid", {"alpha": 0.1}, CpoConfig(**cpo, **alpha)),
        ("simpo", {}, SimpoConfig(beta=BETA, gamma=0.5)),
        ("simpo", {"alpha": 0.1, **smoothed}, SimpoConfig(beta=BETA, gamma=0.5, **alpha, **smoothed)),
    ]
    for loss_type, options, config in cases:
        trainer = trainers.make(
            CPOTrainer, CPOConfig, loss_type=loss_type, beta=config.beta, cpo_alpha=0.0, simpo_gamma=0.5, **options
        )
        batch = next(iter(trainer.get_train_dataloader()))
        theirs = trainer.compute_loss(trainer.model, dict(batch))
        run = plugin.simpo if isinstance(config, SimpoConfig) else plugin.cpo
        losses = ours(lambda tokens, run=run, config=config: run(tokens, config), trainer.model, halves(trainer, batch))
        compare(f"cpo {loss_type} {options}", trainer.model, theirs, losses)


def odds_ratio(trainers: Trainers) -> None:
    """ORPO with the paper's likelihood of the answer in the place of TRL's, which holds the prompt's tokens too."""
    trainer = trainers.make(ORPOTrainer, ORPOConfig, beta=BETA)
    batch = next(iter(trainer.get_train_dataloader()))
    chosen, rejected = trainer.concatenated_forward(trainer.model, batch)[:2]
    theirs = -chosen.mean() - trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    losses = ours(lambda tokens: plugin.orpo(tokens, OrpoConfig(lam=BETA)), trainer.model, halves(trainer, batch))
    compare("orpo", trainer.model, theirs, losses)


def judge_without_baseline(trainers: Trainers) -> None:
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
    trainer = trainers.make(KTOTrainer, KTOConfig, JUDGED, loss_type="apo_zero_unpaired", beta=BETA, **weights)
    model, batch = trainer.model, next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        known = logprobs_of(trainer.ref_model.float(), batch)
    config = KtoConfig(form="apo_zero_unpaired", beta=BETA, **weights)
    losses = ours(lambda tokens: plugin.kto(tokens, config), model, batch, ref_logprobs=known)
    compare("kto apo_zero_unpaired", model, trainer.compute_loss(model, dict(batch)), losses)


def judge_kto(trainers: Trainers) -> None:
    """KTO in one micro-batch, with the baseline of TRL's own mismatched rows; noise on the reference makes it positive."""
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
    trainer = trainers.make(KTOTrainer, KTOConfig, JUDGED, moved="ref_model", beta=BETA, **weights)
    model, batch = trainer.model, next(iter(trainer.get_train_dataloader()))
    reference = trainer.ref_model.float()
    with torch.no_grad():
        known = logprobs_of(reference, batch)
        gaps = logprobs_of(model, batch, "KL_") - logprobs_of(reference, batch, "KL_")
    baseline = (gaps.sum() / len(JUDGED)).clamp(min=0.0).expand(len(known))
    assert float(baseline[0]) > 0, "a baseline of 0 would compare nothing"
    config = KtoConfig(beta=BETA, **weights)
    losses = ours(lambda tokens: plugin.kto(tokens, config), model, batch, ref_logprobs=known, kl_baseline=baseline)
    compare("kto", model, trainer.compute_loss(model, dict(batch)), losses)


def mismatch_in_chunks(trainers: Trainers) -> None:
    """TRL's mismatched answer of a row is that of the row before it, in chunks of a batch that it cuts the data set into."""
    rows = trainers.make(KTOTrainer, KTOConfig, JUDGED, size=4).train_dataset
    answers = [row["completion_ids"] for row in rows]
    assert len({tuple(answer) for answer in answers}) > 4
    due = [answers[first + (place - 1) % 4] for first in (0, 4) for place in range(4)]
    assert [row["KL_completion_ids"] for row in rows] == due
    print(json.dumps({"kto": "mismatched answers are cycled in chunks of a batch"}), flush=True)


def rewards(trainers: Trainers) -> None:
    """Margins and centring, on values that transformers' classifier gives the last tokens; chosen halves come first."""
    rows = [{**row, "margin": 0.25 * place} for place, row in enumerate(ROWS)]
    for name, options in {"plain": {}, "centred": {"center_rewards_coefficient": 0.1}}.items():
        trainer = trainers.make(RewardTrainer, RewardConfig, rows, max_length=None, **options)
        model, batch = trainer.model, next(iter(trainer.get_train_dataloader()))
        model.config.pad_token_id = trainer.processing_class.pad_token_id
        config = BradleyTerryConfig(margins=True, center_coefficient=options.get("center_rewards_coefficient", 0.0))
        values = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
        samples = torch.arange(len(values))
        pairs = samples % len(rows)
        sequences = Sequences(samples, torch.ones_like(samples), pairs, pairs, (samples >= len(rows)).long())
        needs = {"values": values, "margin": batch["margin"].repeat(2)}
        output = plugin.bradley_terry(LossTokens(needs, sequences, torch.Generator, Pairs.of(sequences)), config)
        compare(f"bradley_terry {name}", model, trainer.compute_loss(model, dict(batch)), output.token_loss.mean())


def mixed_reference(trainers: Trainers) -> None:
    """TR-DPO: the reference after TRL's callback mixed the policy into it, and after ours did, from files."""
    options = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 1}
    trainer = trainers.make(DPOTrainer, DPOConfig, **options)
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "before", Path(folder) / "after"
        trainer.ref_model.float().save_pretrained(before)
        trainer.model.save_pretrained(after)
        mix_weights(after, before, share=0.6)
        got = load_file(after / "model.safetensors")
    (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, SyncRefModelCallback))
    trainer.state.global_step = 1
    callback.on_step_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    due = trainer.ref_model.state_dict()
    distance = max(float((weight - due[name]).abs().max()) for name, weight in got.items())
    print(json.dumps({"reference": "mixed", "distance": distance}), flush=True)
    assert float((trainer.model.state_dict()[next(iter(got))] - got[next(iter(got))]).abs().max()) > 0
    assert distance <= 1e-6


def reward_of(text: str) -> float:
    return (sum(map(ord, text)) % 7) / 4


def reward_completions(prompts: list[str], completions: list[str], **_columns: Any) -> list[float]:
    assert len(prompts) == len(completions)
    return list(map(reward_of, completions))


def online(trainers: Trainers) -> None:
    """Online DPO: a step of TRL's trainer on completions of ours, of which some have no end token, which costs more than rewards differ.

    It chooses the same pairs as `choose_pairs` of the attempts, and its gradient is that of `dpo` on them.
    """
    penalty, tokenizer = 0.6, trainers.tokenizer
    prompts = [row["prompt"] for row in ROWS]
    numbers = np.random.Generator(np.random.PCG64(3))
    answers = [numbers.integers(10, 200, size=length).tolist() for length in (3, 5, 4, 5, 5, 2, 5, 4)]
    answers = [ids + [tokenizer.eos_token_id] * (place % 3 != 0) for place, ids in enumerate(answers)]
    for form in ("sigmoid", "ipo"):
        options = {"beta": BETA, "missing_eos_penalty": penalty, "loss_type": form, "max_length": 1024}
        kind = partial(OnlineDPOTrainer, reward_funcs=reward_completions)
        trainer = trainers.make(kind, OnlineDPOConfig, [{"prompt": prompt} for prompt in prompts], **options)
        model = trainer.model
        texts = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
        trainer._generate = lambda *_given, texts=texts: (*_pad(texts * 2, left=True), *_pad(answers), None)
        model.zero_grad()
        theirs = trainer.training_step(model, {"prompt": prompts})
        due = torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])
        paired = _pair_attempts(texts, answers, penalty, tokenizer)
        batch = _batch_of(paired)
        with torch.no_grad():
            known = logprobs_of(trainer.ref_model.float(), batch)
        config = DpoConfig(form=form, beta=BETA)
        made = ours(lambda tokens, config=config: plugin.dpo(tokens, config), model, batch, ref_logprobs=known)
        got = gradient(model, made)
        distance = float((got - due).abs().max() / due.abs().max())
        margin = trainer.stats["objective/scores_margin"][-1]
        line = {"loss": f"online dpo {form}", "trl": theirs.item(), "ours": made.item(), "gradient": distance, "margin": margin}
        print(json.dumps(line), flush=True)
        assert distance <= TOLERANCE
        assert abs(made.item() - theirs.item()) <= TOLERANCE * max(1.0, abs(theirs.item()))
        assert abs(margin - paired.margins.mean()) <= 1e-6


def _pair_attempts(prompts: list[list[int]], answers: list[list[int]], penalty: float, tokenizer: Any) -> PairedAttempts:
    """Attempts at every prompt, its answer in each half of `answers`, as a run has them, and their pairs."""
    groups = []
    for ticket, prompt in enumerate(prompts):
        attempts = []
        for member, ids in enumerate((answers[ticket], answers[ticket + len(prompts)])):
            earned = np.zeros(len(ids))
            earned[-1] = reward_of(tokenizer.decode(ids, skip_special_tokens=True))
            ends = ids[-1] == tokenizer.eos_token_id
            attempts.append(
                Trajectory(
                    ticket=ticket,
                    member=member,
                    token_ids=np.array(prompt + ids, dtype=np.int32),
                    kinds=np.array([SEGMENT_PROMPT, SEGMENT_SAMPLED], dtype=np.uint8),
                    segment_offsets=np.array([0, len(prompt), len(prompt) + len(ids)]),
                    logprobs=np.zeros(len(ids), dtype=np.float32),
                    versions=VersionSpans.one(0, len(ids)),
                    rewards=earned,
                    stops=("eos" if ends else "length",),
                )
            )
        groups.append(Group(ticket, "prompts", str(ticket), 0, tuple(attempts)))
    columns = to_columns(groups, environments=("prompts",), missing_eos_penalty=penalty)
    return choose_pairs(columns, advantage_batch(columns, ()).trajectory_rewards(), 1)


def _batch_of(paired: PairedAttempts) -> Batch:
    """Pairs as TRL's batches have them: chosen halves first, padded on the right."""
    columns = paired.columns
    order = np.lexsort((columns.unit_ids, columns.sample_values["role"]))
    rows = [columns.input_ids[columns.token_offsets[place] : columns.token_offsets[place + 1]].tolist() for place in order]
    actions = np.diff(columns.action_offsets)[order]
    ids, mask = _pad(rows)
    completion = [[0] * (len(row) - count) + [1] * count for row, count in zip(rows, actions.tolist(), strict=True)]
    return {"input_ids": ids, "attention_mask": mask, "completion_mask": _pad(completion)[0]}


def _pad(rows: list[list[int]], *, left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[n, longest]: the rows with zeros around them, and where they are."""
    longest = max(map(len, rows))
    around = [[0] * (longest - len(row)) for row in rows]
    ids = [zeros + row if left else row + zeros for row, zeros in zip(rows, around, strict=True)]
    mask = [zeros + [1] * len(row) if left else [1] * len(row) + zeros for row, zeros in zip(rows, around, strict=True)]
    return torch.tensor(ids), torch.tensor(mask)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainers = Trainers(folder)
        for comparison in (
            rows_of_every_shape,
            direct,
            online,
            contrastive,
            odds_ratio,
            judge_kto,
            mismatch_in_chunks,
            judge_without_baseline,
            rewards,
            mixed_reference,
        ):
            comparison(trainers)


if __name__ == "__main__":
    main()
