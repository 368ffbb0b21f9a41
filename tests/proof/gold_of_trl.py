"""Teachers with other tokenizers against TRL's own `ULDLoss`, in `nox -s peers`: the losses `uld` and `gold`, value and gradient of the
student's logits, over texts that two tokenizers cut in different places.

TRL aligns by the bytes of each token's text and merges by the chain rule (`uld_token_merge_strategy = "bayesian"`); its sum over groups is
divided by their number. Both compute in float64, and both clamp probabilities at 1e-8 where TRL does: 1e-10.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers.decoders import ByteLevel
from trl.experimental.gold.gold_trainer import ULDLoss

from skyrl_engine.contracts import AlignedDivergence
from skyrl_engine.modeling.aligned_divergence import Vocabularies, aligned_divergence
from skyrl_engine.modeling.alignment import TextTokenizer, match_vocabularies, translate
from skyrl_engine.modeling.tiny import write_tokenizer

TEXTS = ["the cat sat on the hills", "a dog ran over there", "cats and dogs"]
CASES: dict[str, tuple[AlignedDivergence, dict[str, Any]]] = {
    "uld": (AlignedDivergence("uld"), {"uld_use_hybrid_loss": False}),
    "gold": (AlignedDivergence("gold", 0.5), {"uld_use_hybrid_loss": True, "beta": 0.5}),
    "gold, beta 0": (AlignedDivergence("gold", 0.0), {"uld_use_hybrid_loss": True, "beta": 0.0}),
    "gold, weights": (
        AlignedDivergence("gold", 1.0, 0.7, 0.2),
        {"uld_use_hybrid_loss": True, "beta": 1.0, "uld_hybrid_matched_weight": 0.7, "uld_hybrid_unmatched_weight": 0.2},
    ),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        student = make_tokenizer(Path(folder) / "student", ["the cat sat on the mat", "dogs over"], 60)
        teacher = make_tokenizer(Path(folder) / "teacher", ["cats and dogs sit on hills", "ran there"], 75)
        for name, (requested, options) in CASES.items():
            worst = max(compare(requested, options, student, teacher, text, seed) for seed, text in enumerate(TEXTS))
            print(f"{name}: the largest difference of loss and gradient is {worst:.1e}")
            assert worst < 1e-10, name


def make_tokenizer(folder: Path, texts: list[str], size: int) -> Any:
    tokenizer = write_tokenizer(folder, [*texts, "abcdefghijklmnopqrstuvwxyz"], size=size)
    tokenizer.backend_tokenizer.decoder = ByteLevel()
    return tokenizer


def compare(requested: AlignedDivergence, options: dict[str, Any], student: Any, teacher: Any, text: str, seed: int) -> float:
    """Return the largest difference of the loss and of the gradient, of random logits for a text after one token of prompt."""
    own, other = TextTokenizer.of(student), TextTokenizer.of(teacher)
    ids = student(text, add_special_tokens=False).input_ids
    others, groups = translate(ids, own, other)
    assert any(len(range(*group.student)) > 1 for group in groups), "some tokens are merged"
    draw = torch.Generator().manual_seed(seed)
    student_logits, teacher_logits = (
        torch.randn(1, len(tokens) + 1, len(tokenizer), generator=draw, dtype=torch.float64)
        for tokens, tokenizer in ((ids, student), (others, teacher))
    )
    values, gradients = [], []
    for loss in (of_trl, ours):
        logits = student_logits.clone().requires_grad_()
        value = loss(requested, options, (student, teacher), (ids, others), groups, logits, teacher_logits)
        value.backward()
        values.append(value.detach())
        gradients.append(logits.grad)
    return float(max((values[0] - values[1]).abs().max(), (gradients[0] - gradients[1]).abs().max()))


def of_trl(
    _requested: AlignedDivergence, options: dict[str, Any], tokenizers: Any, tokens: Any, _groups: Any, student: Any, teacher: Any
) -> torch.Tensor:
    config = SimpleNamespace(
        uld_crossentropy_weight=0.0,
        uld_distillation_weight=1.0,
        uld_student_temperature=1.0,
        uld_teacher_temperature=1.0,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        use_extended_uld=True,
        uld_token_merge_strategy="bayesian",
        **options,
    )
    loss = ULDLoss(config, *tokenizers, device=torch.device("cpu"))
    offsets, labels, inputs = [], [], []
    for tokenizer, ids in zip(tokenizers, tokens, strict=True):
        ends = [len(tokenizer.decode(ids[: count + 1]).encode()) for count in range(len(ids))]
        # one token of prompt, which carries no loss
        offsets.append(torch.tensor([[[0, 0], *([start, end] for start, end in zip([0, *ends], ends, strict=False))]]))
        labels.append(torch.tensor([[-100, *ids]]))
        inputs.append(torch.tensor([[0, *ids]]))
    total: torch.Tensor = loss(student, teacher, *labels, *inputs, student_byte_offsets=offsets[0], teacher_byte_offsets=offsets[1])
    return total


def ours(
    requested: AlignedDivergence, _options: dict[str, Any], tokenizers: Any, tokens: Any, groups: Any, student: Any, teacher: Any
) -> torch.Tensor:
    ours, theirs = (torch.from_numpy(ids) for ids in match_vocabularies(*(tokenizer.get_vocab() for tokenizer in tokenizers)))
    rows = []
    for logits, ids, side in ((student, tokens[0], "student"), (teacher, tokens[1], "teacher")):
        logprobs = logits[0].log_softmax(-1)
        ends = []
        for group in groups:
            first, *_, last = getattr(group, side)[0], getattr(group, side)[1] - 1
            before = sum((logprobs[place, ids[place]] for place in range(first, last)), torch.zeros((), dtype=torch.float64))
            ends.append((logprobs[last] + before).exp())
        rows.append(torch.stack(ends))
    return aligned_divergence(requested, *rows, Vocabularies(ours, theirs)).mean()


if __name__ == "__main__":
    main()
