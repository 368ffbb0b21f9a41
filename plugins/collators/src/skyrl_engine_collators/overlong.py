"""Samples above the maximum length: an error or a warning, never a silent cut."""

import logging
from typing import Literal

import numpy as np

from skyrl_engine import DataError
from skyrl_engine.contracts import SampleLengths

LOG = logging.getLogger(__name__)
NAMED = 5
"""The most samples that a message lists."""


def check_maximum_length(lengths: SampleLengths, maximum: int | None, overlong: Literal["error", "warn"]) -> None:
    """Raises DataError naming the samples longer than `maximum` tokens, or logs one warning where `overlong` says so."""
    if maximum is None:
        return
    over = np.flatnonzero(lengths.tokens > maximum)
    if not len(over):
        return
    named = ", ".join(f"{lengths.sample_ids[i]} ({lengths.tokens[i]} tokens)" for i in over[:NAMED])
    more = f" and {len(over) - NAMED} more" if len(over) > NAMED else ""
    cause = f"{len(over)} of {len(lengths)} samples are longer than max_sequence_length = {maximum}: {named}{more}"
    if overlong == "error":
        raise DataError(cause, remedy='Drop or shorten them when loading the data, or set the collator\'s overlong = "warn"')
    LOG.warning("%s", cause)
