"""The lines of a chat: what a person says, commands that begin with a slash, and answers as they are sampled."""

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from skyrl_engine.cli.terminal import echo, echo_json, echo_part
from skyrl_engine.errors import EngineError
from skyrl_engine.near_words import did_you_mean
from skyrl_engine.rollout.dialogue import Called, Dialogue, Ended, append_rows

_COMMANDS: Final = {
    "/reset": "forget what was said; the system prompt stays",
    "/system TEXT": "set the system prompt; without TEXT, remove it",
    "/save FILE": "append the chat to FILE.jsonl, as a row to train on",
    "/help": "show these lines",
    "/exit": "end the chat, as Ctrl-D does",
}
_WORDS: Final = [command.partition(" ")[0] for command in _COMMANDS]
_SHOWN: Final = 200
"""Most characters of a tool's answer that are shown."""


def answer_once(dialogues: Sequence[Dialogue], text: str, *, as_json: bool) -> None:
    """Print the answers to one text. Raises EngineError where there is none."""
    with _stopped_by_ctrl_c(dialogues):
        if not as_json:
            _answer(dialogues, text)
            return
        answers = [_as_json(dialogue, _last(events)) for dialogue, events in _say_to_all(dialogues, text)]
    echo_json(answers[0] if len(answers) == 1 else answers, ensure_ascii=False)


def converse(dialogues: Sequence[Dialogue]) -> None:
    """Answer lines until /exit or their end. On a terminal an error is shown and the chat goes on; elsewhere it is raised."""
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        names = " and ".join(dialogue.speaker.name for dialogue in dialogues)
        echo(f"Chat with {names}. /help lists commands; Ctrl-C stops an answer, Ctrl-D ends the chat.", err=True)
    for line in _read_at_terminal() if at_terminal else _read_lines():
        try:
            if line.startswith("/") and not line.startswith("//"):
                if not _obey(dialogues, line):
                    return
                continue
            with _stopped_by_ctrl_c(dialogues):
                _answer(dialogues, line.removeprefix("/") if line.startswith("//") else line)
        except EngineError as error:
            if not at_terminal:
                raise
            echo(f"error: {error.summary}", err=True)
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            echo("\n(interrupted: the chat is as it was before this line)", err=True)


def _read_at_terminal() -> Iterator[str]:
    """Yield lines that are typed; Ctrl-C drops the one that is being typed."""
    with suppress(ImportError):
        import readline  # noqa: F401 - it lets `input` edit lines and recall them
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt:
            echo("\n/exit or Ctrl-D ends the chat.", err=True)
            continue
        except EOFError:
            echo()
            return
        if line:
            yield line


def _read_lines() -> Iterator[str]:
    """Yield the lines of stdin that are not empty."""
    for line in sys.stdin:
        if text := line.strip():
            yield text


def _obey(dialogues: Sequence[Dialogue], line: str) -> bool:
    """Do what a command says; return False where it ends the chat. Raises DataError for a chat that cannot be saved."""
    command, _, rest = line.partition(" ")
    argument = rest.strip()
    if argument and command in ("/reset", "/help", "/exit"):
        echo(f"{command} takes no text.", err=True)
    elif command == "/exit":
        return False
    elif command == "/reset":
        for dialogue in dialogues:
            dialogue.reset()
        echo("All that was said is forgotten.", err=True)
    elif command == "/system":
        for dialogue in dialogues:
            dialogue.system = argument or None
        earlier = any(dialogue.messages for dialogue in dialogues)
        note = " Answers that were sampled under another one carry no loss in /save." if earlier else ""
        echo(("The system prompt is set." if argument else "There is no system prompt now.") + note, err=True)
    elif command == "/save" and argument:
        append_rows(Path(argument).expanduser(), [dialogue.row() for dialogue in dialogues])
        echo(f"saved: {argument}", err=True)
    elif command == "/save":
        echo("Write /save FILE.jsonl.", err=True)
    elif command == "/help":
        for name, meaning in _COMMANDS.items():
            echo(f"{name:<14}{meaning}", err=True)
        echo("A line that begins with // is said without its first slash.", err=True)
    else:
        hint = did_you_mean(command, _WORDS) or f"There are {', '.join(_WORDS)}."
        echo(f"There is no command {command}. {hint} To say a slash, write //.", err=True)
    return True


def _answer(dialogues: Sequence[Dialogue], text: str) -> None:
    """Show the answers to a text as they are sampled: one as it comes, two in columns of a terminal or one after the other."""
    if len(dialogues) > 1 and sys.stdout.isatty():
        _answer_in_columns(dialogues, text)
        return
    for dialogue, answer in _say_to_all(dialogues, text):
        if len(dialogues) > 1:
            echo(f"--- {dialogue.speaker.name}")
        with closing(answer) as events:  # type: ignore[type-var] # a generator
            for event in events:
                if isinstance(event, str):
                    echo_part(event)
                elif isinstance(event, Called):
                    echo()
                    _show_calls(event, "")
                else:
                    echo()
                    _show_end(event, "")


def _say_to_all(dialogues: Sequence[Dialogue], text: str) -> list[tuple[Dialogue, Iterator[Any]]]:
    """Return every dialogue with its answer, none of which is begun yet: Ctrl-C during the first one stops them all."""
    return [(dialogue, dialogue.say(text)) for dialogue in dialogues]


def _answer_in_columns(dialogues: Sequence[Dialogue], text: str) -> None:
    """Sample from all dialogues in turns, a token each."""
    from skyrl_engine.cli.render import show_columns

    texts = [""] * len(dialogues)
    notes: list[tuple[Called | Ended, str]] = []
    with ExitStack() as stack:
        events: dict[int, Iterator[Any]] = {
            place: stack.enter_context(closing(answer))  # type: ignore[type-var] # a generator
            for place, (_, answer) in enumerate(_say_to_all(dialogues, text))
        }
        names = [dialogue.speaker.name for dialogue in dialogues]
        show = stack.enter_context(show_columns(names))
        while events:
            for place in tuple(events):
                event = next(events[place], None)
                if event is None:
                    del events[place]
                elif isinstance(event, str):
                    texts[place] += event
                else:
                    notes.append((event, f"{names[place]}: "))
            show(texts)
    for event, label in notes:
        if isinstance(event, Called):
            _show_calls(event, label)
        else:
            _show_end(event, label)


def _show_calls(called: Called, label: str) -> None:
    for call in called.calls:
        arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        echo(f"({label}calls {call.name}({arguments}))", err=True)
    for answer in called.answers:
        text = " ".join(str(answer["content"]).split())
        echo(f"({label}{answer['name']}: {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'})", err=True)


def _show_end(ended: Ended, label: str) -> None:
    if ended.finish == "length":
        echo(f"({label}cut off after {ended.tokens:,} tokens: --max-tokens or the context ends there)", err=True)
    elif ended.finish == "abort":
        echo(f"({label}stopped)", err=True)


def _last(events: Iterator[Any]) -> Ended:
    *_, ended = events
    assert isinstance(ended, Ended), "an answer has an end"
    return ended


def _as_json(dialogue: Dialogue, ended: Ended) -> dict[str, Any]:
    return {
        "model": dialogue.speaker.name,
        "answer": ended.text,
        "finish": ended.finish,
        "tokens": ended.tokens,
        **dialogue.row(),
    }


@contextmanager
def _stopped_by_ctrl_c(dialogues: Sequence[Dialogue]) -> Iterator[None]:
    """Let Ctrl-C end the answers under way after their next token; a second one interrupts whatever keeps them, such as a tool."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def receive(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        for dialogue in dialogues:
            dialogue.stop()

    before = signal.signal(signal.SIGINT, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
