"""Tokenize examples into token ids and a loss mask. Text is tokenized once, in batches."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.config.schema.data import LossOn
from skyrl_engine.contracts.values.ragged import AnyArray
from skyrl_engine.data.images.processor import MeasuredImage
from skyrl_engine.data.sources.formats import Example
from skyrl_engine.data.sources.ready_tokens import Tokens
from skyrl_engine.data.sources.steps import Steps
from skyrl_engine.data.text.chat import ChatTemplate
from skyrl_engine.data.text.messages import Conversation
from skyrl_engine.data.text.plain import PlainText
from skyrl_engine.errors import DataError, ModelError

Span = tuple[int, int]


@frozen(eq=False)
class TokenizedSample:
    """`input_ids` int32[T], `loss` bool[T]; `boundary_tokens` tokens that hold characters on both sides of a span's start.

    `weights` float32[T] are those of the loss, 0 where there is none; None where all are 1.
    `response` is the number of tokens at the end that are the response, where the row holds tokens and says so. `images` have their
    tokens in the text already, `image_tokens` in all. `removed_reasoning` says that the chat template left out reasoning of earlier turns.
    `prompt` is the text before the first span that carries loss, empty where the row holds tokens. `step_labels` float32[T] are 1 at the last
    token after a right step and 0 elsewhere, where the row holds steps; its loss is at the last token after each step.
    """

    number: int
    name: str
    input_ids: AnyArray
    loss: AnyArray
    boundary_tokens: int = 0
    images: tuple[MeasuredImage, ...] = ()
    image_tokens: int = 0
    response: int | None = None
    removed_reasoning: bool = False
    weights: AnyArray | None = None
    prompt: str = ""
    step_labels: AnyArray | None = None

    def with_weights(self, weights: AnyArray) -> "TokenizedSample":
        """Return the sample with these weights, float32[T]."""
        loss = weights != 0
        return evolve(self, loss=loss, weights=None if (weights[loss] == 1).all() else weights)


@frozen
class _Text:
    """Text with the character spans that carry loss, each with its weight; `plain` says that the end-of-text token follows."""

    text: str
    spans: Sequence[Span]
    weights: Sequence[float]
    plain: bool
    removed_reasoning: bool = False

    @property
    def prompt(self) -> str:
        """Return the text before the first span."""
        return self.text[: self.spans[0][0]] if self.spans else ""


class SampleTokenizer:
    """Tokenizes examples with one tokenizer.

    A token carries loss if any of its characters is in a span. A token across a span's start counts too: it is the only one that can teach
    its part of the response; such boundary tokens are counted, since at generation time the prompt would have ended inside them.
    Conversations get no special tokens but those of their template, so none is doubled. Plain text gets the tokenizer's own leading
    ones unless it already begins with them, and ends with the end-of-text token.

    `preferences` lets answers begin where TRL does: at the first token in which the text differs from its prompt tokenized alone, and in
    both halves of a pair, which are consecutive examples with one number and one prompt, at the smaller of the two places. So both halves
    have the same prompt where only one answer merges with the prompt's end.
    """

    def __init__(self, tokenizer: Any, *, loss_on: LossOn, preferences: bool = False, step_separator: str = "\n") -> None:
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self._preferences = preferences
        self._step_separator = step_separator
        self._template = ChatTemplate(tokenizer)
        self._leading: AnyArray = leading_special_tokens(tokenizer)

    def __call__(self, examples: Iterable[tuple[int, str, Example]]) -> list[TokenizedSample]:
        """Return one sample per (number, name, example), in order. Raises DataError naming it, ModelError for a missing chat template."""
        items = list(examples)
        texts = [None if isinstance(example, Tokens | Steps) else self._text(example, name) for _, name, example in items]
        rendered = [(number, text) for (number, *_), text in zip(items, texts, strict=True) if text is not None]
        tokenized = self._encode([text for _, text in rendered])
        encoded = iter(self._with_shared_prompts(rendered, tokenized) if self._preferences else tokenized)
        samples = []
        for (number, name, example), text in zip(items, texts, strict=True):
            if isinstance(example, Tokens):
                samples.append(TokenizedSample(number, name, example.input_ids, example.loss, response=example.response))
                continue
            if isinstance(example, Steps):
                samples.append(self._encode_steps(number, name, example))
                continue
            assert text is not None
            ids, weights, boundary = next(encoded)
            if text.plain:
                ids, weights = self._with_ends(ids, weights)
            sample = TokenizedSample(
                number, name, ids, weights != 0, boundary, removed_reasoning=text.removed_reasoning, prompt=text.prompt
            )
            samples.append(sample.with_weights(weights))
        return samples

    def _text(self, example: Conversation | PlainText, name: str) -> _Text:
        if isinstance(example, PlainText):
            spans = ((example.response_start, len(example.text)),) if example.spans is None else example.spans
            return _Text(encodable(example.text, name), spans, [1.0] * len(spans), plain=example.spans is None)
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"{name} is a conversation, and the tokenizer {self._tokenizer.name_or_path or 'given'} has no chat template",
                remedy="Set model.chat_template to a Jinja template file, or use an instruction-tuned model's tokenizer",
            )
        chat = self._template.render(example, name=name, loss_on=self._loss_on)
        return _Text(encodable(chat.text, name), chat.spans, chat.weights, plain=False, removed_reasoning=chat.removed_reasoning)

    def _encode(self, texts: Sequence[_Text]) -> list[tuple[AnyArray, AnyArray, int]]:
        """Return ids int32[T], weights float32[T] and the number of boundary tokens of each text."""
        if not texts:
            return []
        if not self._tokenizer.is_fast:
            return [self._encode_without_offsets(text) for text in texts]
        batch = self._tokenizer(
            [text.text for text in texts],
            add_special_tokens=False,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,  # no warning about lengths: the over-long policy decides
        )
        encoded = []
        for text, ids, offsets in zip(texts, batch["input_ids"], batch["offset_mapping"], strict=True):
            places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
            weights, boundary = _tokens_in(text, places[:, 0], places[:, 1])
            encoded.append((np.asarray(ids, dtype=np.int32), weights, boundary))
        return encoded

    def _with_shared_prompts(
        self, texts: Sequence[tuple[int, _Text]], encoded: Sequence[tuple[AnyArray, AnyArray, int]]
    ) -> list[tuple[AnyArray, AnyArray, int]]:
        """Return the encoded texts of numbered rows with answers that begin where the prompt's own tokens end in all texts of a row."""
        if not texts:
            return []
        prompts = [text.prompt for _, text in texts]
        distinct = list(dict.fromkeys(prompts))
        alone = dict(zip(distinct, self._tokenizer(distinct, add_special_tokens=False, verbose=False)["input_ids"], strict=True))
        starts: dict[tuple[int, str], int] = {}
        for (number, _), prompt, (ids, weights, _) in zip(texts, prompts, encoded, strict=True):
            shared = min(_common_prefix(np.asarray(alone[prompt], dtype=np.int32), ids), _first_weighted(weights))
            starts[number, prompt] = min(shared, starts.get((number, prompt), shared))
        together = []
        for (number, text), prompt, (ids, weights, boundary) in zip(texts, prompts, encoded, strict=True):
            start, first = starts[number, prompt], _first_weighted(weights)
            if start < first < len(weights):
                weights[start:first] = text.weights[0]
            together.append((ids, weights, boundary))
        return together

    def _encode_steps(self, number: int, name: str, example: Steps) -> TokenizedSample:
        before = example.prompt
        if isinstance(before, Conversation):
            prompt = self._ids_of(self._template.prompt(before, name=name), name)
        else:
            prompt = np.concatenate([self._leading, self._ids_of(before.text, name)])
        return self.lay_out_steps(number, name, prompt, example.steps, example.labels)

    def lay_out_steps(
        self, number: int, name: str, prompt: AnyArray, steps: Sequence[str], labels: Sequence[bool]
    ) -> TokenizedSample:
        """Return a sample of a prompt's tokens and of steps with a separator after each; loss is at the last token of every separator.

        Steps and separators are tokenized each by itself, as in TRL, so that a separator has the same tokens after every step.
        """
        separator = self._ids_of(self._step_separator, name)
        pieces = [prompt, *(np.concatenate([self._ids_of(step, name), separator]) for step in steps)]
        lasts = np.cumsum([len(piece) for piece in pieces])[1:] - 1
        ids = np.concatenate(pieces).astype(np.int32)
        loss = np.zeros(len(ids), dtype=np.bool_)
        step_labels = np.zeros(len(ids), dtype=np.float32)
        loss[lasts] = True
        step_labels[lasts] = np.asarray(labels, dtype=np.float32)
        return TokenizedSample(number, name, ids, loss, step_labels=step_labels)

    def _ids_of(self, text: str, name: str) -> AnyArray:
        return self._ids_within(encodable(text, name))

    def _encode_without_offsets(self, text: _Text) -> tuple[AnyArray, AnyArray, int]:
        """Tokenize a text with a tokenizer that reports no character offsets.

        A span's tokens are those after the ones that the text up to its start shares with the whole, up to those that the text up to its
        end shares, and at least one. So the tokens are the whole text's, as a fast tokenizer gives them: tokenized by itself, a piece can
        get a space in front that the text does not have (SentencePiece), or miss a merge.
        """
        ids = self._ids_within(text.text)
        weights = np.zeros(len(ids), dtype=np.float32)
        boundary = 0
        for (start, end), weight in zip(text.spans, text.weights, strict=True):
            if start == end:
                continue
            before, until = self._ids_within(text.text[:start]), self._ids_within(text.text[:end])
            first, last = _common_prefix(before, ids), _common_prefix(until, ids)
            across_start, across_end = first < len(before), last < len(until)
            last = min(max(last + across_end, first + 1), len(ids))
            np.maximum(weights[first:last], np.float32(weight), out=weights[first:last])
            boundary += int(across_start)
        return ids, weights, boundary

    def _ids_within(self, text: str) -> AnyArray:
        """Return int32[T], the text's tokens without the tokenizer's own special ones."""
        if not text:
            return np.zeros(0, dtype=np.int32)
        ids = self._tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int32)

    def _with_ends(self, ids: AnyArray, weights: AnyArray) -> tuple[AnyArray, AnyArray]:
        lead = self._leading
        if len(lead) and not np.array_equal(ids[: len(lead)], lead):
            ids, weights = np.concatenate([lead, ids]), np.concatenate([np.zeros(len(lead), dtype=np.float32), weights])
        end = self._tokenizer.eos_token_id
        if end is not None and (len(ids) == 0 or ids[-1] != end):
            ids, weights = np.append(ids, np.int32(end)), np.append(weights, np.float32(1))
        return ids, weights


def encodable(text: str, name: str) -> str:
    """Return the text, or refuse it: JSON can spell half a character (one surrogate without the other), which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} holds half a character ({text[error.start]!a} at place {error.start} of its text)",
            remedy="Correct or remove the sample; texts are often cut in the middle of an emoji",
        ) from error
    return text


def _common_prefix(left: AnyArray, right: AnyArray) -> int:
    """Return the number of leading tokens that are equal."""
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter


def _first_weighted(weights: AnyArray) -> int:
    """Return the place of the first token with a weight, the number of tokens where none has one."""
    weighted = np.flatnonzero(weights)
    return int(weighted[0]) if len(weighted) else len(weights)


def _tokens_in(text: _Text, starts: AnyArray, ends: AnyArray) -> tuple[AnyArray, int]:
    """Return float32[T], the weight of the span of which a token has a character (the largest of several), 0 for others; and the number
    of tokens across a span's start.
    """
    weights = np.zeros(len(starts), dtype=np.float32)
    boundary = 0
    for (start, end), weight in zip(text.spans, text.weights, strict=True):
        if start == end:  # the token around an empty span has no character in it
            continue
        np.maximum(weights, np.float32(weight), out=weights, where=(starts < end) & (ends > start))
        boundary += int(np.count_nonzero((starts < start) & (ends > start)))
    return weights, boundary


def leading_special_tokens(tokenizer: Any) -> AnyArray:
    """Return int32: the tokens that the tokenizer itself puts before a text (a beginning-of-text token, or none)."""
    with_special = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    special = set(tokenizer.all_special_ids)
    count = next((place for place, token in enumerate(with_special) if token not in special or token in plain), len(with_special))
    return np.asarray(with_special[:count], dtype=np.int32)
