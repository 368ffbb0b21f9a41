"""Random dialogues over a chat template: what the generator is given and what it samples is what the trajectory holds (proof P7)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from skyrl_engine.contracts.kinds.environment import Message
from skyrl_engine.contracts.kinds.generator import Completion
from skyrl_engine.contracts.values.rollout import SEGMENT_PROMPT, SEGMENT_SAMPLED, FinishReason, VersionSpans
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.rollout.transcript import Transcript

QUESTION: Message = {"role": "user", "content": "how much is 1 + 1?"}
ANSWER: Message = {"role": "user", "content": "no."}


class Spy:
    """A tokenizer that remembers every text it was given to encode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encoded: list[str] = []

    def __getattr__(self, name: str) -> Any:
        assert name not in ("encode", "encode_plus", "batch_encode_plus", "tokenize"), "texts are encoded by a call"
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str, **options: Any) -> Any:
        self.encoded.append(text)
        return self._tokenizer(text, **options)


def completion(ids: Sequence[int], finish: FinishReason = "stop") -> Completion:
    tokens = np.asarray(ids, dtype=np.int32)
    return Completion(0, tokens, np.full(len(tokens), -1.0, dtype=np.float32), VersionSpans.one(0, len(tokens)), finish)


def hold_dialogue(renderer: ChatRenderer, spy: Spy, roles: Sequence[str], seed: int) -> None:
    """Hold a dialogue of four turns whose answers are of `roles`, and look at its trajectory; `spy` is the renderer's tokenizer.

    Where the history is appended to, no text that the model sampled is ever encoded. Otherwise a reply's text is a part of the next prompt, so
    that only the ids are looked at.
    """
    draw = np.random.default_rng(seed)
    messages: list[Message] = [QUESTION]
    transcript = Transcript(renderer.prompt(messages))
    sent, came = [], []
    for turn in range(4):
        secret = f"Secret{seed}q{turn}"
        reply = _sampled_turn(renderer, draw, secret)
        sent.append(transcript.prompt_ids.tolist())
        came.append(reply.token_ids.tolist())
        transcript.add_completion(reply)
        answer = _observations(roles, draw)
        if renderer.history == "append":
            transcript.add_observation(renderer.suffix(answer, int(reply.token_ids[-1])))
            assert not any(secret in text for text in spy.encoded)
        else:
            messages += [renderer.reply(renderer.action(reply, turn)), answer[0] if answer[0]["role"] == "user" else ANSWER]
            transcript.restart(renderer.prompt(messages))
    trajectory = transcript.trajectory(ticket=0, member=0, start_version=0)
    pieces = [
        trajectory.token_ids[a:b].tolist() for a, b in zip(trajectory.segment_offsets, trajectory.segment_offsets[1:], strict=False)
    ]
    before: list[int] = []
    for kind, piece in zip(trajectory.kinds.tolist(), pieces, strict=True):
        if kind == SEGMENT_PROMPT:
            before = []
        if kind == SEGMENT_SAMPLED:
            assert before == sent.pop(0)
            assert piece == came.pop(0)
        before = before + piece
    assert not sent
    assert not came


def _observations(roles: Sequence[str], draw: np.random.Generator) -> list[Message]:
    """One answer, or where the template takes them several answers of tools."""
    role = str(draw.choice(roles))
    words = ("so", "what", "7", "", " \n")
    answers = range(int(draw.integers(1, 4)) if role == "tool" else 1)
    return [{"role": role, "content": f"{draw.choice(words)} then {draw.choice(words)}x"} for _ in answers]


def _sampled_turn(renderer: ChatRenderer, draw: np.random.Generator, secret: str) -> Completion:
    """Any tokens at all, broken characters and special ones among them, around a text that nobody else says."""
    tokenizer = renderer.tokenizer
    around = [draw.integers(0, len(tokenizer), size=int(draw.integers(0, 6))).tolist() for _ in range(2)]
    ending = draw.choice([0, 1, 2])
    end = [] if ending == 0 else [renderer.end_of_turn() if ending == 1 else tokenizer.eos_token_id]
    ids = [*around[0], *tokenizer.convert_tokens_to_ids(list(secret)), *around[1], *(token for token in end if token is not None)]
    return completion(ids, "stop" if ending else "length")
