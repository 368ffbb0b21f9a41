"""Messages as the tokens that a model is given, turn by turn, without ever encoding again what it sampled.

A first prompt is rendered whole. What follows a sampled turn is the *suffix* that the chat template writes after an assistant's text:

    render: [a question, an assistant saying MARK, observations] with generation prompt
    text:   <|im_start|>user ... <|im_start|>assistant MARK<|im_end|> <|im_start|>user an observation<|im_end|> <|im_start|>assistant
    suffix:                                                ^ from here on, tokenized alone

A tokenizer that puts a space in front of every text (SentencePiece's, such as Llama 2's) would put one there, where no template writes it. With
such a one the suffix is tokenized after a character, whose own tokens are then taken off.

Where the model sampled exactly the token with which the suffix begins, that token is there already and is left out. The renderer proves
for a run's template that the suffix does not depend on what comes before.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from attrs import Factory, define, field, frozen

from skyrl_engine.contracts.kinds.environment import Action, Message
from skyrl_engine.contracts.kinds.generator import Completion
from skyrl_engine.data.sources.questions import Prompt
from skyrl_engine.data.sources.rows import Row
from skyrl_engine.data.text.chat import ChatTemplate
from skyrl_engine.data.text.messages import Conversation, prompt_messages_of
from skyrl_engine.errors import DataError, ModelError, UnsupportedError
from skyrl_engine.rollout.tool_calls import Family, read_tool_calls, template_family, text_before_calls
from skyrl_engine.rollout.turn_tokens import APPEND_REMEDY, Ids, TurnTokens

History = Literal["append", "template"]
Tools = Sequence[Mapping[str, Any]]

_log = logging.getLogger(__name__)

_ROUNDS: Final = "Set model.chat_template to a template that takes several rounds"
_WITH_TEMPLATE: Final = (
    'Choose tasks of one turn whose prompt is one text, or set rl.template = "auto" and a tokenizer with a chat template, or '
    "model.chat_template"
)

_QUESTION: Final[Message] = {"role": "user", "content": "a question"}


@define(eq=False)
class ChatRenderer:
    """Renders and tokenizes with the tokenizer of a run; `name` is that of its chat template, for messages.

    `history` says how a later turn's prompt is made: "append" puts the suffix after the existing tokens, "template" renders all messages
    again with `prompt`. `options` go to the template. Where no template writes anything (`raw`), a prompt is one text as it is, with the
    tokens that the tokenizer puts before a text, and there is one turn. Arrays that it returns are read-only.
    """

    tokenizer: Any
    history: History = "append"
    raw: bool = False
    name: str = field()
    options: Mapping[str, Any] = Factory(dict)
    _template: ChatTemplate = field(init=False)
    _tokens: TurnTokens = field(init=False)
    _proofs: dict[tuple[str, bool], dict[bool, UnsupportedError | None]] = field(factory=dict, init=False)

    @name.default
    def _name_of_template(self) -> str:
        return f"the chat template of {self.tokenizer.name_or_path or 'the tokenizer'}"

    @_template.default
    def _own_template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    @_tokens.default
    def _own_tokens(self) -> TurnTokens:
        return TurnTokens(self.tokenizer, self.name, self._template.added_tokens)

    def prompt(self, messages: Sequence[Message], tools: Tools = (), *, name: str = "the task") -> Ids:
        """int32[P]: the tokens of messages, with the template's generation prompt; `name` is the task's, for errors.

        Raises DataError where the template refuses the messages or leaves out what they say.
        """
        if self.raw:
            return self._raw_prompt(messages, tools, name)
        self._require_template()
        chat = self._conversation(self._readable(messages, name), tools)
        return self._tokens.encode(self._template.prompt(chat, name=name), name)

    def dialogue(self, messages: Sequence[Message], tools: Tools = (), *, name: str = "the task") -> Ids:
        """int32[T]: the tokens of a whole dialogue, up to the end of what the template writes after its last message.

        Without a template it is a prompt of one text and its answer, as they stand. Raises DataError as `prompt` does, and UnsupportedError for
        a dialogue that needs a template where there is none.
        """
        if self.raw:
            *before, last = self._readable(messages, name)
            if not before or last["role"] != "assistant" or last.get("tool_calls"):
                raise UnsupportedError(f"{name} does not end with an answer that is a text", remedy=_WITH_TEMPLATE)
            return self._tokens.encode_with_leading(self._raw_text(before, tools, name) + last["content"], name)
        self._require_template()
        return self._tokens.encode(self._template.whole(self._conversation(self._readable(messages, name), tools), name=name), name)

    def suffix(self, messages: Sequence[Message], last_token: int | None, tools: Tools = (), *, name: str = "the task") -> Ids:
        """int32[n]: the observed tokens between a sampled turn and the next one, with the template's end of that turn and generation prompt.

        `messages` are what the environment answered, `last_token` is the turn's last one (None: it has none). Where that is `end_of_turn`, it
        is there already and is left out; another end token, a cut at the length limit or a stop string count as not sampled, and the
        template's own follows. Raises DataError where the template refuses the messages, and UnsupportedError where such ones cannot be
        appended.
        """
        text = self._suffix(messages, tools, name)
        ids = self._tokens.encode_after_turn(text, name)
        ending = self._tokens.find_ending(text)
        if ending is None or last_token != ending:
            return ids
        # white space may come before the token; the model ended its turn without it
        return ids[int(np.argmax(ids == ending)) + 1 :]

    def end_of_turn(self, messages: Sequence[Message] = (_QUESTION,), tools: Tools = (), *, name: str = "the task") -> int | None:
        """Return the special token with which the template ends a turn that these messages follow; None where it has none."""
        return self._tokens.find_ending(self._suffix(messages, tools, name))

    def closing(self) -> tuple[int, Ids] | None:
        """Return the special token that ends a dialogue's last turn, and the int32 tokens written after it; None without one."""
        mark = _mark("")
        reply = {"role": "assistant", "content": mark}
        text = self._attempt([_QUESTION, reply], ()) if self.tokenizer.chat_template and not self.raw else None
        if text is None or text.count(mark) != 1:
            return None
        suffix = text.partition(mark)[2]
        ending = self._tokens.find_ending(suffix)
        if ending is None:
            return None
        ids = self._tokens.encode_after_turn(suffix, self.name)
        return ending, ids[int(np.argmax(ids == ending)) + 1 :]

    def action(self, completion: Completion, turn: int, tools: Tools = ()) -> Action:
        """Return a sampled turn as an environment sees it; where the task has tools, calls are read as its template writes them."""
        ids = completion.token_ids.tolist()
        calls, problem = read_tool_calls(self._tokens.decode_with_special(ids), self.family(tools), tools) if tools else ((), None)
        return Action(self._tokens.decode(ids, without_special=True), tuple(ids), turn, completion.finish, calls, problem)

    def reply(self, action: Action, tools: Tools = ()) -> Message:
        """Return a sampled turn as the message that a rewritten history holds of it: calls that could be read are no text there."""
        if not action.tool_calls:
            return {"role": "assistant", "content": action.text}
        calls = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in action.tool_calls
        ]
        return {"role": "assistant", "content": text_before_calls(action.text, self.family(tools)), "tool_calls": calls}

    def family(self, tools: Tools = ()) -> Family | None:
        """Return how the model writes calls of tools, as far as the template's text tells."""
        return (
            template_family(self.tokenizer.get_chat_template(None, list(tools) or None)) if self.tokenizer.chat_template else None
        )

    def validate_template(self, roles: Sequence[str] = ("user",), tools: Tools = ()) -> tuple[str, ...]:
        """Check that a run's turns can be rendered; return warnings.

        With history "template" the template must take observations of each of `roles` after a turn of the assistant.
        With history "append": what observations of each of `roles` (and of "tool" where there are tools) make of a suffix must not depend on
        the turns before, and its special tokens must come out of the tokenizer whole. Raises UnsupportedError naming the template. Other roles
        are looked at when they come.
        """
        self._require_template()
        self._require_prompt(())
        self.require_tools(tools)
        warnings = [*self._warn_of_generation_prompt(tools), *self._warn_of_calls(tools)]
        roles_needed = {*roles, *(("tool",) if tools else ())}
        if self.history == "template":
            self._require_rounds(roles_needed, tools)
        else:
            for role in sorted(roles_needed):
                self._supported_modes(role, tools)
            warnings += self._warn_of_thoughts(tools)
        return tuple(warnings)

    # renderings

    def _readable(self, messages: Sequence[Message], name: str) -> list[dict[str, Any]]:
        """Return messages in the one shape that templates take. Raises DataError."""
        readable = prompt_messages_of(_Messages(0, name, {"messages": list(messages)}), "messages")
        waiting: list[str] = []
        for number, message in enumerate(readable):
            if not isinstance(message["content"], str):
                raise DataError(
                    f"{name}, message {number} holds images, which rollouts do not take yet", remedy="Choose tasks of text"
                )
            # calls and their answers are matched by ids, which neither the model nor every environment writes
            if message["role"] == "tool":
                if waiting and message.get("tool_call_id") is None:
                    message["tool_call_id"] = waiting.pop(0)
                continue
            waiting = []
            if message.get("tool_calls"):
                calls = [{**call, "id": call.get("id") or _call_id(place)} for place, call in enumerate(message["tool_calls"])]
                message["tool_calls"] = calls
                waiting = [call["id"] for call in calls]
        return readable

    def _conversation(self, messages: Sequence[Message], tools: Tools) -> Conversation:
        shaped = [_in_parts(message) if self._takes_parts else dict(message) for message in messages]
        return Conversation(shaped, list(tools) or None, self.options)

    @cached_property
    def _takes_parts(self) -> bool:
        """Say that the template takes a text only as a list of parts."""
        message = {"role": "user", "content": _mark("")}
        for shaped in (message, _in_parts(message)):
            text = self._template.attempt(Conversation([shaped], None, self.options), [shaped])
            if text is not None and message["content"] in text:
                return shaped is not message
        return False

    def _attempt(self, messages: Sequence[Message], tools: Tools, *, generation_prompt: bool = False) -> str | None:
        chat = self._conversation(messages, tools)
        return self._template.attempt(chat, chat.messages, generation_prompt=generation_prompt)

    def _suffix(self, observations: Sequence[Message], tools: Tools, name: str) -> str:
        self._require_template()
        readable = self._readable(observations, name)
        ways = [self._supported_modes(message["role"], tools) for message in readable]
        texts = (self._text_after([_QUESTION], readable, tools, calling=calling) for calling in ways[0])
        text = next((text for text in texts if text is not None), None)
        if text is None:
            roles = ", ".join(message["role"] for message in readable)
            raise DataError(
                f"{name}: {self.name} refuses the environment's answer (messages of roles {roles}) after a turn of the assistant",
                remedy="Let the environment answer in roles that the template takes, or set model.chat_template to another template",
            )
        return text

    def _text_after(
        self, history: Sequence[Message], observations: Sequence[Message], tools: Tools, *, calling: bool
    ) -> str | None:
        """Return what the template writes after an assistant's turn, which calls tools or not, after `history`; None where it refuses."""
        if calling:
            return self._behind_call(history, observations, tools)
        mark = _mark(str(observations))
        text = self._attempt([*history, {"role": "assistant", "content": mark}, *observations], tools, generation_prompt=True)
        return text.partition(mark)[2] if text is not None and text.count(mark) == 1 else None

    def _behind_call(self, history: Sequence[Message], observations: Sequence[Message], tools: Tools) -> str | None:
        """Return what the template writes after a turn that calls tools: its end, found in the rendering without answers, and the answers."""
        mark = _mark("")
        calls, answers = _calls(observations)
        reply = self._attempt([*history, {"role": "assistant", "content": mark}], tools)
        called = self._attempt([*history, calls], tools)
        whole = self._attempt([*history, calls, *answers], tools, generation_prompt=True)
        if reply is None or called is None or whole is None or reply.count(mark) != 1 or not whole.startswith(called):
            return None
        ending = reply.partition(mark)[2]
        if not called.endswith(ending):
            # calls end with a token of their own
            last = next((match for match in self._tokens.special.finditer(called) if not called[match.end() :].strip()), None)
            if last is None:
                return None
            ending = called[last.start() :]
        return ending + whole[len(called) :]

    def _raw_prompt(self, messages: Sequence[Message], tools: Tools, name: str) -> Ids:
        """int32[P]: the tokens of a prompt that is one text, after a system message if there is one."""
        return self._tokens.encode_with_leading(self._raw_text(messages, tools, name), name)

    def _raw_text(self, messages: Sequence[Message], tools: Tools, name: str) -> str:
        *before, last = self._readable(messages, name)
        if tools or last["role"] != "user" or [message["role"] for message in before] not in ([], ["system"]):
            refused_part = "tools" if tools else "messages"
            raise UnsupportedError(
                f"{name} has {refused_part}, which a chat template writes, and there is none: prompts stand as they are",
                remedy=_WITH_TEMPLATE,
            )
        return Prompt("prompt", last["content"], system=before[0]["content"] if before else None).text()

    # proofs

    def _require_template(self) -> None:
        if self.raw:
            raise UnsupportedError(
                "the answers of an environment of several turns are written by a chat template, and there is none: prompts stand as they are",
                remedy=_WITH_TEMPLATE,
            )
        if not self.tokenizer.chat_template:
            raise ModelError(
                f"tasks hold messages, and the tokenizer {self.tokenizer.name_or_path or 'given'} has no chat template",
                remedy="Set model.chat_template to a Jinja template file, or use an instruction-tuned model's tokenizer",
            )

    def _require_prompt(self, tools: Tools) -> None:
        text = self._attempt([_QUESTION], tools, generation_prompt=True)
        if text is None or _QUESTION["content"] not in text:
            raise UnsupportedError(
                f"{self.name} does not write a user's question, neither as a text nor as a list of parts",
                remedy="Set model.chat_template to a template that does",
            )

    def require_tools(self, tools: Tools) -> None:
        """Refuse a template that does not tell the model of the tools that it may call. Raises UnsupportedError."""
        if self.raw and not tools:
            return
        try:
            self.prompt([_QUESTION], tools)
        except DataError as error:
            names = ", ".join(repr(tool.get("function", tool).get("name")) for tool in tools)
            raise UnsupportedError(
                f"{self.name} does not tell the model of the tools that the task has ({names})",
                remedy="Set model.chat_template to a template that writes tools, or train on tasks without them",
            ) from error

    def _warn_of_calls(self, tools: Tools) -> Iterator[str]:
        if tools and self.family(tools) is None:
            yield (
                f"{self.name} writes calls of tools in a way that is not read: no action has tool_calls, and only an environment that reads "
                "them out of the text sees one"
            )

    def _require_rounds(self, roles: set[str], tools: Tools) -> None:
        for role in sorted(roles):
            observation = _observation(role)
            turn, answers = (
                _calls([observation]) if role == "tool" else ({"role": "assistant", "content": "a reply"}, [observation])
            )
            if self._attempt([_QUESTION, turn, *answers], tools, generation_prompt=True) is None:
                raise UnsupportedError(
                    f"{self.name} refuses a message of role {role!r} after a turn of the assistant",
                    remedy=_ROUNDS,
                )

    def _supported_modes(self, role: str, tools: Tools) -> Sequence[bool]:
        """Return after which turns of the assistant observations of this role can be rendered: one that calls tools (True), one that does not.

        Some templates write answers of tools after calls alone, some write no calls, and some take one call a turn. Found out when it is first
        asked. Raises UnsupportedError where there is none.
        """
        key = (role, bool(tools))
        if key not in self._proofs:
            modes = (True, False) if role == "tool" else (False,)
            self._proofs[key] = {calling: self._refusal(role, tools, calling=calling) for calling in modes}
        ways = [calling for calling, refused in self._proofs[key].items() if refused is None]
        first = next(iter(self._proofs[key].values()))
        if not ways and first is not None:
            raise first
        return ways

    def _refusal(self, role: str, tools: Tools, *, calling: bool) -> UnsupportedError | None:
        """Return why observations of this role cannot be put after a turn that calls tools, or that does not; None where they can."""
        observation = _observation(role)
        short, *longer = _histories(observation)
        wanted = self._text_after(short, [observation], tools, calling=calling)
        if wanted is None:
            return self._cannot(
                f"refuses a message of role {role!r} after a turn of the assistant", APPEND_REMEDY if role == "tool" else _ROUNDS
            )
        if observation["content"] not in wanted:
            return self._cannot(f"leaves out what a message of role {role!r} says after a turn of the assistant", _ROUNDS)
        accepted = 0
        for history in longer:
            suffix = self._text_after(history, [observation], tools, calling=calling)
            accepted += suffix is not None
            if suffix is not None and suffix != wanted:
                return self._cannot(
                    f"writes {suffix!r} for the assistant's turn after {len(history)} messages and {wanted!r} after {len(short)}, so no "
                    "observation can be put after sampled tokens"
                )
        if not accepted:
            return self._cannot("refuses a second round of messages", _ROUNDS)
        return self._proof_of_tokens(wanted) or self._proof_of_whole(wanted)

    def _proof_of_tokens(self, suffix: str) -> UnsupportedError | None:
        written = self._tokens.list_special_ids(suffix)
        known = set(self.tokenizer.get_added_vocab().values()) | set(self.tokenizer.all_special_ids)
        for before in ("", "a reply", "4", "\n", "."):
            ids = [int(token) for token in self._tokens.encode_anew(before + suffix) if int(token) in known]
            if ids != written:
                where = f"after {before!r}" if before else "alone"
                return self._cannot(
                    f"writes the special tokens {self._tokens.special.findall(suffix)} after a turn, and its tokenizer, given them {where}, "
                    f"makes {self.tokenizer.convert_ids_to_tokens(ids)} of them"
                )
        return None

    def _proof_of_whole(self, suffix: str) -> UnsupportedError | None:
        """Return a refusal unless the suffix has its tokens in a whole dialogue too, after some replies: others join its beginning."""
        try:
            ids = self._tokens.encode_after_turn(suffix, self.name)
        except UnsupportedError as error:
            return error
        replies = ("a reply", "4", ".", "ja", "(b)")
        found = (self._tokens.encode_behind(f"A question: {reply}", suffix) for reply in replies)
        if any(tokens is not None and np.array_equal(tokens, ids) for tokens in found):
            return None
        return self._cannot(
            f"writes {suffix[:40]!r} after a turn, and its tokenizer makes other tokens of it there than alone, after each of {replies}"
        )

    def _cannot(self, why: str, remedy: str = APPEND_REMEDY) -> UnsupportedError:
        return UnsupportedError(f"{self.name} {why}", remedy=remedy)

    def _warn_of_generation_prompt(self, tools: Tools) -> Iterator[str]:
        mark = _mark("")
        question = self._attempt([_QUESTION], tools)
        prompt = self._attempt([_QUESTION], tools, generation_prompt=True)
        answered = self._attempt([_QUESTION, {"role": "assistant", "content": mark}], tools)
        if question is None or answered is None or prompt != question or not answered.startswith(question):
            return
        header = answered[len(question) :].partition(mark)[0].strip()
        if header:
            yield f"{self.name} has no generation prompt: the model must write {header!r} itself before every answer"

    def _warn_of_thoughts(self, tools: Tools) -> Iterator[str]:
        thought = _mark("")
        reply = {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nan answer"}
        text = self._attempt([_QUESTION, reply, _QUESTION], tools, generation_prompt=True)
        if text is not None and thought not in text:
            yield (
                f'{self.name} removes what an assistant thought in earlier turns; the model still sees it, since rl.history is "append". '
                'Set rl.history = "template" to train on the histories that the template writes'
            )


@frozen
class _Messages(Row):
    """Messages under the name of their task."""

    @property
    def name(self) -> str:
        return self.where


def _mark(text: str) -> str:
    """Return a word that is nowhere in `text`."""
    return next(mark for number in range(1000) if (mark := f"qZturn{number}Zq") not in text)


def _observation(role: str) -> Message:
    answer: Message = {"role": role, "content": _mark("")}
    return {**answer, "name": "lookup", "tool_call_id": _call_id(0)} if role == "tool" else answer


def _call_id(number: int) -> str:
    """Name a call in nine letters and digits, as the strictest templates ask for."""
    return f"call{number + 1:05d}"


def _in_parts(message: Message) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _calls(observations: Sequence[Message]) -> tuple[Message, list[Message]]:
    """Return a turn of the assistant that calls the tools whose answers come first, and the observations with the calls' ids."""
    calls, answers = [], []
    calling = True
    for number, message in enumerate(observations):
        calling = calling and message["role"] == "tool"
        if not calling:
            answers.append(message)
            continue
        template_options = {
            "tool_call_id": f"call{number + 1:05d}",
            "name": "tool",
            **{key: value for key, value in message.items() if value is not None},
        }
        calls.append(
            {
                "type": "function",
                "id": template_options["tool_call_id"],
                "function": {"name": template_options["name"], "arguments": {}},
            }
        )
        answers.append(template_options)
    return {"role": "assistant", "content": "", "tool_calls": calls}, answers


def _histories(observation: Message) -> Iterator[list[Message]]:
    """Yield what may come before an assistant's turn: the shortest first, then others that templates may refuse."""
    yield [_QUESTION]
    again: list[Message] = [
        {"role": "assistant", "content": "a reply"},
        {"role": "user", "content": "Another question,\nand a longer one."},
    ]
    yield [{"role": "user", "content": "Something else"}, *again]
    yield [_QUESTION, *again, *again]
    yield [{"role": "system", "content": "Be brief."}, _QUESTION]
    yield [_QUESTION, {"role": "assistant", "content": "a reply"}, observation]
    calls, answers = _calls([{"role": "tool", "content": "an answer", "name": "lookup"}])
    yield [_QUESTION, calls, *answers]
