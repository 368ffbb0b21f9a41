"""A trajectory while it grows: nothing that it holds ever changes."""

import numpy as np
import pytest

from skyrl_engine.contracts.kinds.generator import Completion
from skyrl_engine.contracts.values.rollout import (
    SEGMENT_OBSERVED,
    SEGMENT_PROMPT,
    SEGMENT_SAMPLED,
    FinishReason,
    Trajectory,
    VersionSpans,
)
from skyrl_engine.errors import ContractError
from skyrl_engine.rollout.transcript import Transcript


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def completion(
    *tokens: int, spans: VersionSpans | None = None, finish: FinishReason = "stop", stop: int | str | None = None
) -> Completion:
    logprobs = np.array([-token / 10 for token in tokens], dtype=np.float32)
    return Completion(0, ids(*tokens), logprobs, spans or VersionSpans.one(3, len(tokens)), finish, stop)


def make_trajectory(transcript: Transcript) -> Trajectory:
    return transcript.trajectory(ticket=5, member=2, start_version=3)


def test_segments_follow_one_another() -> None:
    transcript = Transcript(ids(1, 2))
    transcript.add_completion(completion(3, 4, spans=VersionSpans(ids(0, 1), np.array([3, 4])), stop="s"))
    transcript.add_reward(0.5)
    transcript.add_observation(ids(5))
    assert transcript.prompt_ids.tolist() == [1, 2, 3, 4, 5]
    transcript.add_completion(completion(6, 7, 8, spans=VersionSpans.one(4, 3), finish="length"))
    transcript.add_reward(0.0, [0.25, 0.0, 1.0])
    trajectory = make_trajectory(transcript)
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert trajectory.kinds.tolist() == [SEGMENT_PROMPT, SEGMENT_SAMPLED, SEGMENT_OBSERVED, SEGMENT_SAMPLED]
    assert trajectory.segment_offsets.tolist() == [0, 2, 4, 5, 8]
    assert trajectory.logprobs.tolist() == pytest.approx([-0.3, -0.4, -0.6, -0.7, -0.8])
    assert trajectory.rewards.tolist() == [0, 0.5, 0.25, 0, 1]
    assert trajectory.versions.starts.tolist() == [0, 1]
    assert trajectory.versions.versions.tolist() == [3, 4]
    assert trajectory.stops == ("stop_string", "length")
    assert (transcript.length, transcript.turns) == (6, 2)
    assert (transcript.room(10), transcript.room(6), transcript.room(5)) == (4, 0, 0)


def test_a_generator_that_reuses_its_memory_changes_nothing() -> None:
    """Every array is copied, and what was sent can be changed by nobody."""
    prompt, turn = ids(1, 2), completion(3, 4)
    transcript = Transcript(prompt)
    transcript.add_completion(turn)
    observed = ids(5)
    transcript.add_observation(observed)
    for array in (prompt, turn.token_ids, turn.logprobs, observed):
        array[:] = 9
    assert make_trajectory(transcript).token_ids.tolist() == [1, 2, 3, 4, 5]
    assert make_trajectory(transcript).logprobs.tolist() == pytest.approx([-0.3, -0.4])


def test_a_rewritten_history_begins_a_stretch_and_an_extension_does_not() -> None:
    transcript = Transcript(ids(1, 2))
    transcript.add_completion(completion(3))
    transcript.restart(ids(1, 2, 3, 4, 5))
    transcript.add_completion(completion(6))
    transcript.restart(ids(1, 3, 7))
    assert transcript.prompt_ids.tolist() == [1, 3, 7]
    transcript.add_completion(completion(8))
    trajectory = make_trajectory(transcript)
    assert trajectory.kinds.tolist() == [
        SEGMENT_PROMPT,
        SEGMENT_SAMPLED,
        SEGMENT_OBSERVED,
        SEGMENT_SAMPLED,
        SEGMENT_PROMPT,
        SEGMENT_SAMPLED,
    ]
    assert trajectory.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 1, 3, 7, 8]
    # the new prompt counts as no answer of the environment
    assert transcript.length == 5


def test_a_shorter_prompt_is_a_rewritten_one() -> None:
    transcript = Transcript(ids(1, 2))
    transcript.add_completion(completion(3))
    transcript.restart(ids(1, 2))
    assert make_trajectory(transcript).kinds.tolist() == [SEGMENT_PROMPT, SEGMENT_SAMPLED, SEGMENT_PROMPT]


def test_the_reward_of_an_empty_turn_is_kept() -> None:
    transcript = Transcript(ids(1))
    transcript.add_completion(completion())
    transcript.add_reward(0.75)
    transcript.add_completion(completion(2))
    transcript.add_reward(0.5)
    trajectory = make_trajectory(transcript)
    assert trajectory.unplaced_reward == 0.75
    assert trajectory.reward == 1.25
    assert trajectory.versions.starts.tolist() == [0]


def test_a_trajectory_of_which_nothing_was_sampled_is_whole() -> None:
    trajectory = make_trajectory(Transcript(ids()))
    assert trajectory.turns == 0
    assert trajectory.versions.starts.tolist() == []
    assert (trajectory.logprobs.dtype, trajectory.rewards.dtype) == (np.float32, np.float64)


def test_what_does_not_fit_the_tokens_is_refused() -> None:
    transcript = Transcript(ids(1))
    for spans in (VersionSpans(ids(), np.zeros(0, dtype=np.int64)), VersionSpans(ids(1), np.array([3]))):
        with pytest.raises(ContractError, match=r"the generator says of [01] of 2 tokens which weights made them"):
            transcript.add_completion(completion(2, 3, spans=spans))
    short = Completion(0, ids(2, 3), np.zeros(1, dtype=np.float32), VersionSpans.one(0, 2), "stop")
    with pytest.raises(ContractError, match="1 log-probabilities for 2 tokens"):
        transcript.add_completion(short)
    assert transcript.turns == 0
    transcript.add_completion(completion(2, 3))
    with pytest.raises(ContractError, match="1 token_rewards for a turn of 2 tokens"):
        transcript.add_reward(0.0, [1.0])
