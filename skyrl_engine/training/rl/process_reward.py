"""Process rewards: the steps of an attempt, which a reward model values one by one, and where they end among the tokens that were sampled."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from skyrl_engine.config.schema import StepRule
from skyrl_engine.contracts.values.ragged import IntArray
from skyrl_engine.contracts.values.rollout import SEGMENT_SAMPLED, Trajectory
from skyrl_engine.data.text.reward_token import read_after_steps
from skyrl_engine.data.text.tokenization import SampleTokenizer, TokenizedSample
from skyrl_engine.model_facts.tokenizer import Decode
from skyrl_engine.rollout.chat_renderer import ChatRenderer

FloatArray = npt.NDArray[np.float64]


@frozen(eq=False)
class ProcessReader:
    """Lays out the steps of attempts as a process reward model is trained on them.

    `rule` says what is made of the steps' probabilities. `renderer` writes prompts in the model's tokens, `separator` ends every step, and
    `decode` is the sampler's, by which a step is found among the sampled tokens.
    """

    rule: StepRule
    renderer: ChatRenderer
    separator: str
    decode: Decode
    pad_token_id: int

    def lay_out(self, attempt: Trajectory, name: str) -> TokenizedSample:
        """Return the last turn's steps after its prompt; loss marks the tokens whose values are theirs. Raises DataError as a prompt does."""
        *before, said = attempt.messages
        encode = SampleTokenizer(self.renderer.tokenizer, loss_on="last", step_separator=self.separator)
        text = said["content"]
        steps = [text[start:end] for start, end in self.find_steps(text)]
        sample = encode.lay_out_steps(0, name, self.renderer.prompt(before, attempt.tools, name=name), steps, [False] * len(steps))
        return read_after_steps(sample, self.pad_token_id)

    def find_steps(self, text: str) -> list[tuple[int, int]]:
        """Return the characters [start, end) of every step that is not blank; a blank text is one step."""
        steps, start = [], 0
        for piece in text.split(self.separator):
            if piece.strip():
                steps.append((start, start + len(piece)))
            start += len(piece) + len(self.separator)
        return steps or [(0, len(text))]

    def find_last_tokens(self, attempt: Trajectory) -> IntArray:
        """int64[steps]: the number of the last token of every step, among the attempt's sampled tokens."""
        turn = np.flatnonzero(attempt.kinds == SEGMENT_SAMPLED)[-1]
        ids = attempt.token_ids[attempt.segment_offsets[turn] : attempt.segment_offsets[turn + 1]].tolist()
        first = int(attempt.sampled.sum()) - len(ids)
        text = attempt.messages[-1]["content"]
        return np.array([first + self._count_tokens(ids, end) - 1 for _, end in self.find_steps(text)], dtype=np.int64)

    def _count_tokens(self, ids: Sequence[int], characters: int) -> int:
        """Return the fewest tokens, at least one, whose text has so many characters; all where no number of them has."""
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self.decode(ids[:middle])) >= characters:
                high = middle
            else:
                low = middle + 1
        return low

    def join(self, probabilities: FloatArray) -> float:
        """Return the number that the rule makes of the steps' probabilities; of `each`, their mean."""
        match self.rule:
            case "min":
                return float(probabilities.min())
            case "last":
                return float(probabilities[-1])
            case "product":
                return float(probabilities.prod())
            case _:
                return float(probabilities.mean())


def to_probabilities(values: FloatArray) -> FloatArray:
    """float64: the probability that a step is right, of its log-odds."""
    return np.array([1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value)) for value in values.tolist()])
