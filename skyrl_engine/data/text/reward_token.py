"""The token at which a reward model values a text: one that is appended to it.

The value of a token is that of the state before it, so the one after a text has the state at the text's last token: what transformers'
sequence classifiers read. Which token it is makes no difference, as nothing before it sees it.
"""

import numpy as np
from attrs import evolve

from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.data.text.tokenization import TokenizedSample


def read_at_end(token_ids: AnyArray, pad_token_id: int) -> AnyArray:
    """int32[T + 1]: the tokens of a text and one after them.

    Padding tokens at its end are left out first: transformers reads the score at the last token that is none, also where a text ends with one,
    as those do whose end-of-text token pads. One token stays in any case.
    """
    real = np.flatnonzero(token_ids != pad_token_id)
    length = int(real[-1]) + 1 if len(real) else 1
    return np.append(token_ids[:length], np.int32(pad_token_id)).astype(np.int32)


def append_reward_token(sample: TokenizedSample, pad_token_id: int) -> TokenizedSample:
    """Return the sample with a token after its text as the only one that carries loss, of the weight of the last one that did."""
    ids = read_at_end(sample.input_ids, pad_token_id)
    loss = np.zeros(len(ids), dtype=np.bool_)
    loss[-1] = True
    extended = evolve(sample, input_ids=ids, loss=loss, weights=None, response=None if sample.response is None else 1)
    if sample.weights is None:
        return extended
    weights = np.zeros(len(ids), dtype=np.float32)
    weights[-1] = sample.weights[np.flatnonzero(sample.weights)[-1]]
    return extended.with_weights(weights)


def read_after_steps(sample: TokenizedSample, pad_token_id: int) -> TokenizedSample:
    """Return the sample with one more token, and with its loss and labels at the token after each that had them: where their values are."""
    assert sample.step_labels is not None, "the sample has steps"
    loss = np.concatenate([np.zeros(1, dtype=np.bool_), sample.loss])
    labels = np.concatenate([np.zeros(1, dtype=np.float32), sample.step_labels[: len(sample.loss)]])
    ids = np.append(sample.input_ids, np.int32(pad_token_id)).astype(np.int32)
    return evolve(sample, input_ids=ids, loss=loss, weights=None, step_labels=labels)
