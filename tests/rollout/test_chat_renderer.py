"""Turns as tokens: the suffix after a sampled turn, for a template of every family, and what the renderer refuses."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from dialogues import ANSWER, QUESTION, Spy, completion, hold_dialogue

from skyrl_engine.contracts.kinds.environment import ToolCall
from skyrl_engine.errors import DataError, ModelError, UnsupportedError
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.testing.templates import END, TEMPLATES

APPENDING = [name for name, case in TEMPLATES.items() if case.appends]
REFUSED = [name for name, case in TEMPLATES.items() if not case.appends]
LOOKUP: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "most": {"type": "integer"}}},
    },
}


def renderer_of(name: str, **settings: Any) -> ChatRenderer:
    return ChatRenderer(TEMPLATES[name].tokenizer(), **settings)


def text_of(renderer: ChatRenderer, ids: Any) -> str:
    text = renderer.tokenizer.decode(np.asarray(ids).tolist(), clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("history", ["append", "template"])
@pytest.mark.parametrize("name", APPENDING)
def test_segments_are_what_was_sent_and_what_came_back(name: str, history: Any) -> None:
    """P7: what the generator was given, turn by turn, is what the trajectory holds before that turn, and no sampled id is encoded again.

    With history "template" a reply's text is encoded as part of a new prompt, so there only the ids are looked at.
    """
    spy = Spy(TEMPLATES[name].tokenizer())
    renderer = ChatRenderer(spy, history=history)
    renderer.validate_template(TEMPLATES[name].appends)
    for seed in range(6):
        hold_dialogue(renderer, spy, TEMPLATES[name].appends, seed)


@pytest.mark.parametrize("name", APPENDING)
def test_appended_turns_read_as_the_template_writes_them(name: str) -> None:
    """A finished turn and its suffix are the template's own rendering of the dialogue, where that keeps earlier turns as they were."""
    renderer = renderer_of(name)
    prompt = renderer.prompt([QUESTION])
    sampled = renderer.tokenizer("two", add_special_tokens=False)["input_ids"]
    end = renderer.end_of_turn([ANSWER])
    turn = sampled if end is None else [*sampled, end]
    appended = text_of(renderer, [*prompt, *turn, *renderer.suffix([ANSWER], turn[-1])])
    whole = text_of(renderer, renderer.prompt([QUESTION, {"role": "assistant", "content": "two"}, ANSWER]))
    # headers of thoughts and channels, and the space before an end, are the model's to write
    headers = {
        "opens_thinking": lambda text: text.replace("<think>\n", "", 1),
        "spaced_end": lambda text: text.replace("[/INST]two", "[/INST] two ", 1),
        "channels": lambda text: text.replace("assistanttwo", "assistant<|channel|>final<|message|>two"),
        "no_generation_prompt": lambda text: text.replace("two", "<|im_start|>assistant\ntwo", 1),
    }
    assert headers.get(name, str)(appended) == whole


ENDS = ("exact", "other end token", "length", "stop string")
TABLE = ("chatml", "headers", "instructions", "spaced_end", "model_role", "next_role_ends", "plain")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", TABLE)
def test_the_end_of_a_turn_stands_once(name: str, end: str) -> None:
    """P10: only where the model sampled the template's own end token is it not written again."""
    renderer = renderer_of(name)
    tokenizer = renderer.tokenizer
    own = renderer.end_of_turn([ANSWER])
    expected = TEMPLATES[name].ends
    assert own == (None if expected is None else tokenizer.convert_tokens_to_ids(expected))
    sampled = tokenizer("a stop.", add_special_tokens=False)["input_ids"]
    others = [token for token in (tokenizer.eos_token_id, tokenizer.bos_token_id) if token != own]
    last = {"exact": own, "other end token": others[0]}.get(end)
    turn = sampled if last is None else [*sampled, last]
    suffix = renderer.suffix([ANSWER], int(turn[-1]))
    whole = renderer.suffix([ANSWER], None)
    if end == "exact" and own is not None:
        place = whole.tolist().index(own)
        assert suffix.tolist() == whole.tolist()[place + 1 :]
        assert tokenizer.decode(whole[:place].tolist()).strip() == ""
        assert text_of(renderer, turn).count(str(expected)) == 1
    else:
        assert suffix.tolist() == whole.tolist()
    assert suffix.dtype == np.int32
    assert "no." in text_of(renderer, suffix)


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_cannot_go_on_is_refused(name: str) -> None:
    """P9: a number per turn, one round alone, and observations that are not written."""
    renderer = renderer_of(name)
    with pytest.raises(UnsupportedError, match=rf"the chat template of {name} ") as caught:
        renderer.validate_template()
    assert re.search(r"rl.history = \"template\"|model.chat_template", caught.value.remedy)
    with pytest.raises(UnsupportedError):
        renderer.suffix([ANSWER], None)


def test_a_counter_needs_its_histories_rendered_anew() -> None:
    with pytest.raises(UnsupportedError, match="after 3 messages") as caught:
        renderer_of("counter").validate_template()
    assert 'rl.history = "template"' in caught.value.remedy
    assert renderer_of("counter", history="template").validate_template() == ()


def test_a_template_that_ends_after_two_rounds_is_refused() -> None:
    """Nothing shows there that what follows a turn is the same after another history."""
    tokenizer = TEMPLATES["one_round"].tokenizer()
    tokenizer.chat_template = TEMPLATES["one_round"].text.replace("> 2", "> 3")
    with pytest.raises(UnsupportedError, match="refuses a second round"):
        ChatRenderer(tokenizer).validate_template()


def test_one_round_is_refused_whatever_the_history() -> None:
    with pytest.raises(UnsupportedError, match="refuses a message of role 'user'"):
        renderer_of("one_round", history="template").validate_template()


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_of_tools_go_where_the_template_takes_them(name: str) -> None:
    renderer = renderer_of(name)
    if "tool" in TEMPLATES[name].appends:
        renderer.validate_template(["tool"])
        suffix = text_of(
            renderer, renderer.suffix([{"role": "tool", "content": "found"}, {"role": "tool", "content": "more"}], None)
        )
        assert suffix.index("found") < suffix.index("more")
    else:
        with pytest.raises(UnsupportedError, match=r"role 'tool'|after 3 messages"):
            renderer.validate_template(["tool"])


def test_a_call_may_end_with_a_token_of_its_own() -> None:
    """The token is left out where the model sampled it, and only there."""
    renderer = renderer_of("channels")
    answer = [{"role": "tool", "content": "found", "name": "lookup"}]
    call = renderer.tokenizer.convert_tokens_to_ids("<|call|>")
    assert renderer.end_of_turn(answer) == call
    assert renderer.end_of_turn() == renderer.tokenizer.convert_tokens_to_ids("<|end|>")
    assert text_of(renderer, renderer.suffix(answer, call)).startswith("<|start|>lookup to=assistant")


@pytest.mark.parametrize("name", ["parts", "silent_parts"])
def test_texts_become_parts_where_the_template_takes_nothing_else(name: str) -> None:
    renderer = renderer_of(name)
    assert "how much is 1 + 1?" in text_of(renderer, renderer.prompt([QUESTION]))
    assert (
        renderer.prompt([{"role": "user", "content": [{"type": "text", "text": QUESTION["content"]}]}]).tolist()
        == renderer.prompt([QUESTION]).tolist()
    )


@pytest.mark.parametrize("name", APPENDING)
def test_removed_thoughts_are_told(name: str) -> None:
    warned = [warning for warning in renderer_of(name).validate_template() if "thought" in warning]
    assert len(warned) == TEMPLATES[name].forgets
    assert not [warning for warning in renderer_of(name, history="template").validate_template() if "thought" in warning]


def test_a_missing_generation_prompt_is_told() -> None:
    (warning,) = renderer_of("no_generation_prompt").validate_template()
    assert "'<|im_start|>assistant'" in warning
    assert [
        name for name in APPENDING if any("generation prompt" in problem for problem in renderer_of(name).validate_template())
    ] == ["no_generation_prompt"]


def test_special_tokens_that_the_tokenizer_breaks_are_refused() -> None:
    """Next to a letter, a token that stands for whole words alone is no token any more."""
    from tokenizers import AddedToken

    tokenizer = TEMPLATES["plain"].tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("END", single_word=True, normalized=False, special=True)]}
    )
    tokenizer.chat_template = TEMPLATES["plain"].text.replace("'\\n'", "(' ' if message.role == 'user' else '') + 'END\\n'")
    with pytest.raises(UnsupportedError, match=r"after 'a reply', makes \['END'\]"):
        ChatRenderer(tokenizer).validate_template()
    broken = TEMPLATES["chatml"].tokenizer(split_special_tokens=True)
    with pytest.raises(UnsupportedError, match=r"given them alone, makes \[\]"):
        ChatRenderer(broken).validate_template()


def test_texts_are_encoded_once_and_nobody_can_change_them() -> None:
    spy = Spy(TEMPLATES["chatml"].tokenizer())
    renderer = ChatRenderer(spy)
    renderer.validate_template()
    spy.encoded.clear()
    first, second = renderer.suffix([ANSWER], None), renderer.suffix([ANSWER], None)
    assert first.tolist() == second.tolist()
    renderer.prompt([QUESTION])
    renderer.prompt([QUESTION])
    assert len(spy.encoded) == 2
    for ids in (first, renderer.prompt([QUESTION]), renderer.suffix([ANSWER], renderer.end_of_turn())):
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 1


def test_messages_that_cannot_be_rendered_name_their_task() -> None:
    with pytest.raises(DataError, match=r"task 7: the chat template refuses the conversation: roles must alternate"):
        renderer_of("model_role").prompt([QUESTION, QUESTION], name="task 7")
    with pytest.raises(DataError, match=r"task 7: .*refuses the environment's answer \(messages of roles user, user\)"):
        renderer_of("model_role").suffix([ANSWER, ANSWER], None, name="task 7")
    with pytest.raises(DataError, match=r"task 7, column 'messages': message 0 has no role"):
        renderer_of("chatml").prompt([{"content": "hm"}], name="task 7")
    with pytest.raises(DataError, match=r"task 7, message 0 holds images"):
        renderer_of("chatml").prompt([{"role": "user", "content": [{"type": "image"}]}], name="task 7")
    with pytest.raises(DataError, match=r"leaves out the declared tool 'lookup'"):
        renderer_of("role_tokens").prompt([QUESTION], [LOOKUP])
    tokenizer = TEMPLATES["chatml"].tokenizer()
    tokenizer.chat_template = None
    for call in (lambda: ChatRenderer(tokenizer).prompt([QUESTION]), ChatRenderer(tokenizer).validate_template):
        with pytest.raises(ModelError, match="has no chat template"):
            call()


def test_an_action_is_what_was_sampled() -> None:
    renderer = renderer_of("chatml")
    text = 'Well.\n<tool_call>\n{"name": "lookup", "arguments": {"word": "tree"}}\n</tool_call><|im_end|>'
    ids = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    action = renderer.action(completion(ids), 2, [LOOKUP])
    assert action.text == text.removesuffix("<|im_end|>")
    assert action.token_ids == tuple(ids)
    assert (action.turn, action.finish, action.tool_problem) == (2, "stop", None)
    assert action.tool_calls == (ToolCall("lookup", {"word": "tree"}),)
    assert renderer.action(completion(ids), 0).tool_calls == (), "a task without tools has no calls"
    unclosed = renderer.action(completion(ids[:-15]), 0, [LOOKUP])
    assert unclosed.tool_problem is not None
    assert "not closed" in unclosed.tool_problem


def test_a_marked_call_is_read_although_its_mark_is_no_text() -> None:
    renderer = renderer_of("headers")
    text = '<|python_tag|>lookup.call(word="tree")<|eot|>'
    action = renderer.action(completion(renderer.tokenizer(text, add_special_tokens=False)["input_ids"]), 0, [LOOKUP])
    assert action.text == 'lookup.call(word="tree")'
    assert action.tool_calls == (ToolCall("lookup", {"word": "tree"}),)


@pytest.mark.parametrize("name", [name for name, case in TEMPLATES.items() if case.family])
def test_a_rewritten_history_holds_calls_as_the_template_writes_them(name: str) -> None:
    """A call as the template writes it is read back as the same call, and occurs there once."""
    renderer = renderer_of(name, history="template")
    assert renderer.family([LOOKUP]) == TEMPLATES[name].family
    turn = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "lookup", "arguments": {"word": "tree"}}}]}
    answer = {"role": "tool", "content": "a plant"}
    history = renderer.prompt([QUESTION, turn, answer], [LOOKUP])
    before = text_of(renderer, renderer.prompt([QUESTION], [LOOKUP]))
    written = text_of(renderer, history).removeprefix(before).partition("a plant")[0]
    ids = renderer.tokenizer(written, add_special_tokens=False)["input_ids"]
    action = renderer.action(completion(ids), 0, [LOOKUP])
    assert action.tool_calls == (ToolCall("lookup", {"word": "tree"}),)
    if name != "next_role_ends":
        # there the answer's own role is in what was cut out
        message = {"role": "assistant", "content": renderer.reply(action, [LOOKUP])["content"]}
        assert "lookup" not in message["content"]
    again = renderer.prompt([QUESTION, {**renderer.reply(action, [LOOKUP]), "content": ""}, answer], [LOOKUP])
    assert again.tolist() == history.tolist()


def test_calls_and_answers_get_the_ids_that_templates_ask_for() -> None:
    renderer = renderer_of("instructions")
    calls = [{"function": {"name": "lookup", "arguments": {}}, "id": None}] * 2
    messages = [
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    assert "[RESULT]one[TOOL]call00001[/RESULT][RESULT]two[TOOL]call00002[/RESULT]" in text_of(renderer, renderer.prompt(messages))


def test_another_end_token_is_the_tokenizers_own() -> None:
    """The end of a text is not the end of a turn here, so the template's token follows it."""
    renderer = renderer_of("chatml")
    end = renderer.tokenizer.convert_tokens_to_ids(END)
    assert text_of(renderer, renderer.suffix([ANSWER], end)).startswith("<|im_end|>\n<|im_start|>user\n")
