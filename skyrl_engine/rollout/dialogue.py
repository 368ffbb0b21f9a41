"""A dialogue of a person with a model: turns, calls of tools between them, and the chat as a row to train on."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen

from skyrl_engine.contracts.kinds.environment import Action, Message, ToolCall
from skyrl_engine.contracts.values.rollout import FinishReason
from skyrl_engine.data.text.turn_weights import WEIGHT
from skyrl_engine.environments.tools import Tool, answer_calls
from skyrl_engine.errors import DataError
from skyrl_engine.rollout.seeds import derive_seeds
from skyrl_engine.rollout.speaker import Speaker

MOST_CALLS: Final = 8
"""Turns with calls of tools in a row, after which the model's next turn is taken as its answer."""


@frozen
class Called:
    """Calls of tools that the model wrote, and the answers to them."""

    calls: tuple[ToolCall, ...]
    answers: tuple[Message, ...]


@frozen
class Ended:
    """The end of an answer: its text, its number of tokens over all its turns, and why its last one ended."""

    text: str
    tokens: int
    finish: FinishReason


Event = str | Called | Ended


@define(eq=False)
class Dialogue:
    """The messages so far between a person and a speaker.

    The n-th answer after a beginning is drawn from the n-th seed that follows from `seed`, so the same words have the same answers.
    """

    speaker: Speaker
    tools: Sequence[Tool] = ()
    seed: int = 0
    system: str | None = None
    messages: list[Message] = field(factory=list, init=False)
    """All but the system prompt."""
    _cut: set[int] = field(factory=set, init=False)
    """Places of answers that a limit or the person ended."""
    _sampled_under: dict[int, str | None] = field(factory=dict, init=False)
    """The system prompt of every turn of the model, by its place."""
    _drawn: int = field(default=0, init=False)
    _stopped: bool = field(default=False, init=False)

    def say(self, text: str) -> Iterator[Event]:
        """Yield the answer to a text as it is sampled: pieces of text, calls of tools, and its end.

        Where it fails or nobody waits for its end, the dialogue is as it was before. `stop` counts from this call on, also before the first
        event is asked for. Raises as `Speaker.answer` does.
        """
        self._stopped = False
        return self._say(text)

    def _say(self, text: str) -> Iterator[Event]:
        if self.speaker.renderer.raw:
            self.reset()
        before, cut, drawn, sampled_under = len(self.messages), set(self._cut), self._drawn, dict(self._sampled_under)
        self.messages.append({"role": "user", "content": text})
        complete = False
        try:
            yield from self._answer()
            complete = True
        finally:
            if not complete:
                del self.messages[before:]
                self._cut, self._drawn, self._sampled_under = cut, drawn, sampled_under

    def _answer(self) -> Iterator[Event]:
        schemas, tokens = [tool.schema for tool in self.tools], 0
        for turn in range(MOST_CALLS + 1):
            [seed] = derive_seeds(self.seed, [(self._drawn,)])
            self._drawn += 1
            action: Action | None = None
            for piece in self.speaker.answer(self._with_system(), schemas, turn=turn, seed=seed, is_stopped=lambda: self._stopped):
                if isinstance(piece, Action):
                    action = piece
                elif piece:
                    yield piece
            assert action is not None, "an answer ends with its action"
            tokens += len(action.token_ids)
            self._sampled_under[len(self.messages)] = self.system
            answers = asyncio.run(answer_calls(self.tools, action)) if turn < MOST_CALLS and action.finish == "stop" else ()
            if not answers:
                # a call that nothing answers is a text, in every template
                self.messages.append({"role": "assistant", "content": action.text})
                if action.finish != "stop":
                    self._cut.add(len(self.messages) - 1)
                yield Ended(action.text, tokens, action.finish)
                return
            self.messages += [self.speaker.renderer.reply(action, schemas), *answers]
            yield Called(action.tool_calls, answers)

    def stop(self) -> None:
        """Let the answer under way end with what was sampled of it."""
        self._stopped = True

    def reset(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.messages.clear()
        self._cut.clear()
        self._sampled_under.clear()
        self._drawn = 0
        self.speaker.forget()

    def row(self) -> dict[str, Any]:
        """Return the chat as a row of training data, with the present system prompt. Raises DataError for an empty chat.

        Answers that were cut off, or that were sampled under another system prompt than the row has, carry no loss.
        """
        if not self.messages:
            raise DataError("there is nothing to save: nobody has said anything", remedy="Say something first")
        other = {place for place, system in self._sampled_under.items() if system != self.system}
        unlearned = self._cut | other
        messages = [{**message, WEIGHT: 0} if place in unlearned else dict(message) for place, message in enumerate(self.messages)]
        tools = {"tools": [dict(tool.schema) for tool in self.tools]} if self.tools else {}
        return {"messages": [*self._system_messages(), *messages], **tools}

    def _system_messages(self) -> list[dict[str, Any]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _with_system(self) -> list[Message]:
        return [*self._system_messages(), *self.messages]


def append_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a file of JSON lines. Raises DataError for one of another name, or that cannot be written."""
    if file.suffix != ".jsonl":
        raise DataError(f"{file} does not end in .jsonl", remedy="Name a .jsonl file: each chat is a line of it")
    try:
        with file.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as error:
        raise DataError(f"{file} cannot be written ({error.strerror})", remedy="Name another file") from error
