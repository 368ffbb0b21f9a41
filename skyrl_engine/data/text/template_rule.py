"""The one rule for prompts and answers that are texts: the chat template of the model's tokenizer writes them, on every command.

A tokenizer without a chat template, or `data.template = "none"`, leaves them as they stand. Rollouts and evaluations follow the same rule: a
text is what the user says.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

Kind = Literal["chat", "raw", "tokens"]


def uses_template(tokenizer: Any, template: Literal["auto", "none"]) -> bool:
    """Return True if the chat template writes texts of prompts and answers; `template` is the value of `data.template`, or `rl.template`."""
    return template == "auto" and bool(tokenizer.chat_template)


def prompt_messages(prompt: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a prompt: a text is what the user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


def answer_messages(answer: str) -> list[dict[str, Any]]:
    """Return the messages of an answer that is a text."""
    return [{"role": "assistant", "content": answer}]


@frozen
class Rendering:
    """The way in which the rows of a dataset became tokens: by a chat template ("chat"), as they stand ("raw"), or as tokens that the rows
    hold.

    `reason` says why there is no template, `template` is the digest of the one that was used.
    """

    kind: Kind
    reason: str = ""
    template: str | None = None

    @classmethod
    def of(cls, kind: Kind, tokenizer: Any, template: Literal["auto", "none"], *, key: str = "data.template") -> "Rendering":
        """Describe what a tokenizer and the value of `key` made of rows."""
        if kind == "chat":
            return cls(kind, template=digest_of_template(tokenizer))
        if kind == "tokens":
            return cls(kind)
        if template == "none":
            return cls(kind, f'{key} is "none"')
        return cls(kind, "their format is that of plain texts" if tokenizer.chat_template else "the tokenizer has no chat template")

    @classmethod
    def of_prompts(cls, tokenizer: Any, template: Literal["auto", "none"]) -> "Rendering":
        """Describe what a tokenizer and the value of `rl.template` make of prompts that are texts."""
        return cls.of("chat" if uses_template(tokenizer, template) else "raw", tokenizer, template, key="rl.template")

    def __str__(self) -> str:
        if self.kind == "raw":
            return f"as they stand, without a chat template: {self.reason}"
        return "by the chat template" if self.kind == "chat" else "as the tokens that they hold"

    def record(self) -> dict[str, Any]:
        """Return what a run's manifest says of it."""
        return {"rendering": self.kind, "chat_template": self.template, "written": str(self)}


def digest_of_template(tokenizer: Any) -> str:
    """Return sha256 of the tokenizer's chat template, or of its several ones by name."""
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()


_RAW_BEFORE = ("prompt_completion", "preference", "unpaired_preference", "text")
"""Formats that engines before 0.3 trained as they stand where their rows were texts."""


def find_difference(trained: Mapping[str, Any], evaluated: Rendering) -> str | None:
    """Say how the prompts of an evaluation differ from what a model was trained on; None where they do not, or where nobody knows.

    `trained` is what the manifest of a run says of its training data.
    """
    kind = trained.get("rendering")
    if kind is None:
        if trained.get("format") not in _RAW_BEFORE or evaluated.kind != "chat":
            return None
        return (
            "it was trained by an engine before 0.3, on prompts and answers as they stood where they were texts, and is evaluated on prompts "
            "that the chat template writes"
        )
    if "tokens" in (kind, evaluated.kind):
        return None
    if kind != evaluated.kind:
        return f"{_SAID[kind]} in training and {_SAID[evaluated.kind]} in the evaluation"
    if kind == "chat" and trained.get("chat_template") != evaluated.template:
        return "another chat template wrote the texts in training than writes the prompts of the evaluation"
    return None


_SAID: Mapping[str, str] = {
    "chat": "the chat template writes texts",
    "raw": "texts stand as they are, without the chat template,",
}
