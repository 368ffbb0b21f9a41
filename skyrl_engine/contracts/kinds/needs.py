"""The names that losses, corrections and reducers write in `needs`: scores of the model, columns of the data, and values of samples.

    needs=("logprobs", "advantages")                        a score and a column, one number per token each
    needs=("logprobs_at:teacher_ids", "teacher_logprobs[k]")  k numbers per token: a score at the ids of a column, and a column

The second loss reads `tokens.logprobs_at("teacher_ids")` and `tokens.teacher_logprobs`, both [n, k]. A reducer may read columns, and values
of which every sample has one:

    needs=("advantages", "sample:domain")                   `structure.columns["advantages"]`, `structure.sample_values["domain"]`

Of values of samples a loss may need `sample:role`, which half of a preference a sample is: `tokens.sequences.roles`, int64[S].
"""

from collections.abc import Iterable
from typing import Literal

from skyrl_engine.contracts.values.roles import ROLE

MODEL_SCORES = ("logprobs", "entropy", "values", "logits", "logsumexp", "mean_logprob")
"""A backend computes these per token, and `logprobs_at:COLUMN`; every other need is a column of the data.

With y the logits of a position divided by the temperature: `logits` is y of the label, `logsumexp` that of all y, `logprobs` their difference,
`mean_logprob` the mean of log softmax(y) over the vocabulary.
"""

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
    return LOGPROBS_AT if need.startswith(f"{LOGPROBS_AT}:") else None


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
    asked = tuple(needs)
    forms: dict[str, ColumnForm] = {}
    for need in asked:
        if model_score(need) is None and sample_value(need) is None:
            forms[column_of(need)] = "numbers" if need.endswith(_WIDE) else forms.get(need, "number")
    return forms | dict.fromkeys(candidate_columns(asked).values(), "token ids")
