"""The names that losses, corrections and reducers write in `needs`: scores of the model, columns of the data, and values of samples.

    needs=("logprobs", "advantages")                        a score and a column, one number per token each
    needs=("logprobs_at:teacher_ids", "teacher_logprobs[k]")  k numbers per token: a score at the ids of a column, and a column

The second loss reads `tokens.logprobs_at("teacher_ids")` and `tokens.teacher_logprobs`, both [n, k]. `Divergence(...).need` asks for a
divergence from a frozen teacher over the whole vocabulary: `tokens.divergence`. A reducer may read columns, and values
of which every sample has one:

    needs=("advantages", "sample:domain")                   `structure.columns["advantages"]`, `structure.sample_values["domain"]`

Of values of samples a loss may need `sample:role`, which half of a preference a sample is: `tokens.sequences.roles`, int64[S].
"""

from collections.abc import Iterable
from typing import Final, Literal, Self, cast, get_args

from attrs import field, frozen
from attrs.validators import ge, gt, in_, le, lt, optional

from skyrl_engine.contracts.values.roles import ROLE

TOP_1_AGREEMENT: Final = "top_1_agreement"
"""1 where the frozen teacher's likeliest token is the model's, else 0: without a gradient."""

MODEL_SCORES = ("logprobs", "entropy", "values", "logits", "logsumexp", "mean_logprob", "log_sum_squares", TOP_1_AGREEMENT)
"""A backend computes these per token, and `logprobs_at:COLUMN` and `divergence:...`; every other need is a column of the data.

With y the logits of a position divided by the temperature: `logits` is y of the label, `logsumexp` that of all y, `logprobs` their difference,
`mean_logprob` the mean of log softmax(y) over the vocabulary, `log_sum_squares` the logarithm of the sum of softmax(y)^2, of the probability
that two tokens, both drawn from softmax(y), are the same.
"""

DIVERGENCE: Final = "divergence"
"""Beginning of the need of a `Divergence`, the name that a loss finds the score under, and the capability of backends."""

TEACHER_MODEL: Final = "teacher"
"""The name on the ranks of the frozen model that `divergence` and `top_1_agreement` compare the trained one with."""

DivergenceKind = Literal["forward", "reverse", "jensen_shannon"]


@frozen
class Divergence:
    """A divergence [n], in nats, between p of a teacher and q of the trained model at each position, over the whole vocabulary.

    With y the logits divided by the pass's temperature, p and q are softmax(y / `temperature`) of teacher and model. `forward` is
    KL(p || q), `reverse` KL(q || p), `jensen_shannon` beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q (Agarwal et al.
    2023, arXiv:2306.13649, equation 1). Nothing is multiplied by a square of the temperature.
    """

    kind: DivergenceKind = field(default="forward", validator=in_(get_args(DivergenceKind)))
    beta: float = field(default=0.5, validator=[gt(0.0), lt(1.0)])
    temperature: float = field(default=1.0, validator=[gt(0.0), lt(float("inf"))])

    @property
    def need(self) -> str:
        """The need that asks for it: `divergence:KIND:BETA:TEMPERATURE`."""
        return f"{DIVERGENCE}:{self.kind}:{self.beta!r}:{self.temperature!r}"

    @classmethod
    def of(cls, need: str) -> Self:
        """Read a need that `need` made."""
        _, kind, beta, temperature = need.split(":")
        return cls(cast("DivergenceKind", kind), float(beta), float(temperature))


AlignedKind = Literal["uld", "gold"]


@frozen
class AlignedDivergence:
    """A distance [n] from a teacher of another tokenizer, at the last token of each group that stands for the same text in both; 0 elsewhere.

    `uld` compares sorted probabilities, `gold` those of equally written tokens by the divergence of GKD with `beta`, and the others sorted
    (`modeling/aligned_divergence.py` defines both). `matched_weight` and `unmatched_weight` are the weights of `gold`'s two parts; None: the
    share of the teacher's vocabulary that is written equally, and the rest.
    """

    kind: AlignedKind = field(default="uld", validator=in_(get_args(AlignedKind)))
    beta: float = field(default=0.5, validator=[ge(0.0), le(1.0)])
    matched_weight: float | None = field(default=None, validator=optional([ge(0.0), lt(float("inf"))]))
    unmatched_weight: float | None = field(default=None, validator=optional([ge(0.0), lt(float("inf"))]))

    @property
    def need(self) -> str:
        """The need that asks for it: `divergence:KIND:BETA:MATCHED:UNMATCHED`."""
        return f"{DIVERGENCE}:{self.kind}:{self.beta!r}:{self.matched_weight!r}:{self.unmatched_weight!r}"

    @classmethod
    def of(cls, need: str) -> Self:
        """Read a need that `need` made."""
        _, kind, beta, *weights = need.split(":")
        matched, unmatched = (None if weight == "None" else float(weight) for weight in weights)
        return cls(cast("AlignedKind", kind), float(beta), matched, unmatched)


def is_aligned(need: str) -> bool:
    """Return True for the need of an `AlignedDivergence`."""
    return need.startswith(tuple(f"{DIVERGENCE}:{kind}:" for kind in get_args(AlignedKind)))


LOGPROBS_AT = "logprobs_at"
"""`logprobs_at:COLUMN` is log softmax(y), [n, k], at the k token ids that the column of integers [A, k] holds for each token."""

ColumnForm = Literal["number", "numbers", "token ids"]
"""The entry of a column per response token: one number, k numbers (`COLUMN[k]`), or k token ids (`logprobs_at:COLUMN`)."""

ROLE_NEED = f"sample:{ROLE}"
"""Asks for the role of every sample: 0 chosen, 1 rejected."""

_WIDE = "[k]"
_SAMPLE = "sample:"


def model_score(need: str) -> str | None:
    """Return the name of the model score that `need` asks for, without a column; None where it asks for a column of the data."""
    if need in MODEL_SCORES:
        return need
    return next((name for name in (LOGPROBS_AT, DIVERGENCE) if need.startswith(f"{name}:")), None)


def asks_a_teacher(needs: Iterable[str]) -> bool:
    """Return True where a need compares the model with a frozen teacher, on the ranks."""
    return any(model_score(need) in (DIVERGENCE, TOP_1_AGREEMENT) for need in needs)


def candidate_columns(needs: Iterable[str]) -> dict[str, str]:
    """Return the columns of token ids that the needs `logprobs_at:COLUMN` name, by need, in the order of needs."""
    return {need: need.partition(":")[2] for need in needs if model_score(need) == LOGPROBS_AT}


def sample_value(need: str) -> str | None:
    """Return the name of the value per sample that `need` asks for (`sample:NAME`); None where it asks for something else."""
    return need.removeprefix(_SAMPLE) if need.startswith(_SAMPLE) else None


def column_of(need: str) -> str:
    """Return the name of the column that `need`, which is no score, asks for."""
    return need.removesuffix(_WIDE)


def column_forms(needs: Iterable[str]) -> dict[str, ColumnForm]:
    """Return what each column that the needs name holds, in the order of needs; one that scores are asked at holds token ids."""
    names = tuple(needs)
    forms: dict[str, ColumnForm] = {}
    for need in names:
        if model_score(need) is None and sample_value(need) is None:
            forms[column_of(need)] = "numbers" if need.endswith(_WIDE) else forms.get(need, "number")
    return forms | dict.fromkeys(candidate_columns(names).values(), "token ids")
