"""What the tests train on: tiny models, rows of random tokens, objectives, and the plain one-process definition of their gradients."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from skyrl_engine.contracts import Metric, MicroBatch, Ragged, RankOutput

VOCABULARY, ROWS, WIDTH = 256, 8, 16
Arrays = dict[str, np.ndarray]


def save_tiny(directory: Path, family: str, *, tied: bool, **options: Any) -> str:
    """A random two-layer model of the family, saved as a Hugging Face directory."""
    transformers_logging.disable_progress_bar()
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    everyone = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if family != "gpt2":
        everyone |= {**sizes, "head_dim": 16}
    config = AutoConfig.for_model(family, **{**everyone, **options})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return str(directory)


def add_head(directory: str, target: Path) -> str:
    """A copy of the model with a value head of random weights."""
    shutil.copytree(directory, target)
    draw = torch.Generator().manual_seed(2)
    hidden = AutoConfig.from_pretrained(directory).hidden_size
    head = {"score.weight": torch.randn(1, hidden, generator=draw), "score.bias": torch.randn(1, generator=draw)}
    save_file({**load_file(target / "model.safetensors"), **head}, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


@frozen(eq=False)
class Row:
    """One sequence, left-padded to WIDTH; `weights` float32[length], 0 where the token is not scored. Length 0: an empty row."""

    ids: torch.Tensor
    weights: torch.Tensor


def rows(*, unscored: tuple[int, ...] = ()) -> list[Row]:
    """Eight sequences of different length; number 5 is empty; those in `unscored` carry no loss."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for number in range(ROWS):
        length = 0 if number == 5 else WIDTH - number
        ids = torch.randint(0, VOCABULARY, (length,), generator=draw)
        weights = (torch.rand(length, generator=draw) < 0.6) * torch.rand(length, generator=draw)
        weights[:1] = 0  # nothing comes before a first token
        made.append(Row(ids, weights if number not in unscored else torch.zeros_like(weights)))
    return made


def micro_batch(chosen: list[Row]) -> MicroBatch:
    """Left-padded rows with attention mask and position ids, as the padded collator builds them."""
    ids, mask = (torch.zeros(len(chosen), WIDTH, dtype=torch.int64) for _ in range(2))
    positions, labels, weights = [], [], []
    for number, row in enumerate(chosen):
        start = WIDTH - len(row.ids)
        ids[number, start:], mask[number, start:] = row.ids, 1
        scored = row.weights.nonzero()[:, 0]
        positions.append(number * WIDTH + start + scored - 1)
        labels.append(row.ids[scored])
        weights.append(row.weights[scored])
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    lengths = Ragged.from_list([[len(row.ids)] for row in chosen], np.int64)
    return MicroBatch(inputs, torch.cat(positions), torch.cat(labels), lengths, torch.cat(weights))


def cut(chosen: list[Row], size: int) -> list[MicroBatch]:
    """Micro-batches of `size` rows."""
    return [micro_batch(chosen[start : start + size]) for start in range(0, len(chosen), size)]


def packed(bins: list[list[Row]], *, align: int = 4, padding: int = 3) -> MicroBatch:
    """Every list of sequences a row, each sequence rounded up to `align`, as the packed collator builds them."""
    occupied = [[-(-len(row.ids) // align) * align for row in one] for one in bins]
    width = max(sum(spaces) for spaces in occupied) + padding
    ids, mask, places = (torch.zeros(len(bins), width, dtype=torch.int64) for _ in range(3))
    positions, labels, weights = [], [], []
    for number, one in enumerate(bins):
        starts = np.cumsum([0, *occupied[number]]).tolist()
        for start, row in zip(starts[:-1], one, strict=True):
            here = slice(start, start + len(row.ids))
            ids[number, here], mask[number, here], places[number, here] = row.ids, 1, torch.arange(len(row.ids))
            scored = row.weights.nonzero()[:, 0]
            positions.append(number * width + start + scored - 1)
            labels.append(row.ids[scored])
            weights.append(row.weights[scored])
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
    lengths = Ragged.from_list([[len(row.ids) for row in one] for one in bins], np.int64)
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        inputs, torch.cat([nothing, *positions]), torch.cat([nothing, *labels]), lengths, torch.cat([torch.zeros(0), *weights])
    )


def pack(chosen: list[Row], size: int) -> list[MicroBatch]:
    """Micro-batches of `size` rows: two sequences in the first row, an empty row, then three sequences a row."""
    bins = [chosen[:2], [], *(chosen[start : start + 3] for start in range(2, len(chosen), 3))]
    return [packed(bins[start : start + size]) for start in range(0, len(bins), size)]


class Weighted:
    """-sum w logprob - 0.1 sum w entropy; the sum and the log-probabilities come back as metrics. `scale` spoils or scales it."""

    needs = frozenset({"logprobs", "entropy"})

    def __init__(self, scale: float = 1.0, temperature: float = 1.0) -> None:
        self.scale = scale
        self.temperature = temperature

    def __call__(self, scores: Mapping[str, torch.Tensor], micro: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
        weights = micro.samples.to(scores["logprobs"].dtype)
        total = self.scale * -(weights * (scores["logprobs"] + 0.1 * scores["entropy"])).sum()
        empty = RankOutput.empty()
        return total, RankOutput(empty.sample_ids, empty.action_lengths, empty.scored, {}, {"loss": Metric.sum(total.item())})


class Critic(Weighted):
    """sum w (value - 0.3)^2, and -sum w logprob where `needs` has it."""

    def __init__(self, *needs: str) -> None:
        super().__init__()
        self.needs = frozenset(needs)

    def __call__(self, scores: Mapping[str, torch.Tensor], micro: MicroBatch) -> tuple[torch.Tensor, RankOutput]:
        assert scores.keys() == self.needs
        weights = micro.samples.to(scores["values"].dtype)
        total = (weights * (scores["values"] - 0.3) ** 2).sum()
        if "logprobs" in scores:
            total = total - (weights * scores["logprobs"]).sum()
        empty = RankOutput.empty()
        return total, RankOutput(empty.sample_ids, empty.action_lengths, empty.scored, {}, {"loss": Metric.sum(total.item())})


def critic_definition(directory: str, chosen: list[Row], *needs: str, dtype: torch.dtype = torch.float32) -> tuple[float, Arrays]:
    """What `Critic` computes the plain way: one process, one sequence at a time, whole logits, a linear layer on the hidden states."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    stored = load_file(Path(directory) / "model.safetensors")
    head = torch.nn.Linear(model.config.hidden_size, 1, dtype=dtype)
    head.load_state_dict({kind: stored[f"score.{kind}"] for kind in ("weight", "bias")})
    total = torch.zeros((), dtype=dtype)
    for row in chosen:
        if len(row.ids) < 2:
            continue
        hidden = model.model(input_ids=row.ids[None], use_cache=False)[0][0, :-1]
        weights = row.weights[1:].to(dtype)
        total = total + (weights * (head(hidden)[:, 0] - 0.3) ** 2).sum()
        if "logprobs" in needs:
            logprobs = model.lm_head(hidden).log_softmax(-1)
            total = total - (weights * logprobs.gather(-1, row.ids[1:, None])[:, 0]).sum()
    total.backward()
    named = [*model.named_parameters(), *((f"score.{name}", parameter) for name, parameter in head.named_parameters())]
    return total.item(), {name: parameter.grad.numpy() for name, parameter in named if parameter.grad is not None}


def definition(
    directory: str, chosen: list[Row], *, dtype: torch.dtype = torch.float32, temperature: float = 1.0
) -> tuple[float, Arrays]:
    """The same objective the plain way: one process, one sequence at a time without padding, whole logits, log_softmax."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    total = torch.zeros((), dtype=dtype)
    for row in chosen:
        if len(row.ids) < 2:
            continue
        logprobs = (model(input_ids=row.ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        own = logprobs.gather(-1, row.ids[1:, None])[:, 0]
        total = total - (row.weights[1:].to(dtype) * (own + 0.1 * entropy)).sum()
    total.backward()
    return total.item(), {
        name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
