"""A world in which a question can only be answered with a tool, for training over several turns.

    python open_the_box.py --output boxes

writes `boxes/model`, random weights with a chat template that declares tools, and `boxes/habits.jsonl`, conversations for a warm start.
`skyrl-engine rl --env ./open_the_box.py:boxes` uses the environment of this file: a task is a question such as "Which number is in the red
box?", the tool `look` opens a box, and the reward is 1 for the number in the box that was asked about.
"""

import argparse
import json
import random
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import define, frozen
from tokenizers import decoders

from skyrl_engine import hookimpl
from skyrl_engine.contracts import Action, EnvironmentClaims, Message, StepResult, Task
from skyrl_engine.environments import Tool, tool_message
from skyrl_engine.modeling.tiny import write_model, write_tokenizer

COLOURS = ("red", "blue", "green", "white")
MOST_TURNS = 3

TEMPLATE = """\
{%- if tools -%}{{ 'system\\n' }}
{%- for tool in tools -%}{{ tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}{%- endfor -%}
{{ '<end>\\n' }}{%- endif -%}
{%- for message in messages -%}{{ message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor -%}{{ '<end>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant\\n' }}{%- endif -%}"""
"""Short declarations of tools, and their calls as Qwen models write them."""


def look(box: str) -> int:
    """Look into a box."""
    raise NotImplementedError(box)


LOOK = Tool.of(look)  # its schema: name, docstring, types; the episode answers the calls from the task


@frozen
class BoxTasks:
    """Numbers and questions are drawn from the split and the number of the task, so held-out tasks are others."""

    split: str
    size: int = 1000

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Task:
        draw = random.Random(f"{self.split}/{index}")  # noqa: S311 - a reproducible draw, no secret
        numbers = {colour: draw_number(draw) for colour in COLOURS}
        asked = draw.choice(COLOURS)
        return Task(f"{self.split}/{index}", (ask(asked),), data={"numbers": numbers, "asked": asked}, tools=(LOOK.schema,))


@define
class BoxEpisode:
    """Opens boxes until the model answers without a call."""

    task: Task

    def begin(self) -> Sequence[Message]:
        return ()

    def step(self, action: Action) -> StepResult:
        numbers = self.task.data["numbers"]
        answers = [tool_message(call, numbers.get(str(call.arguments.get("box")), "no such box")) for call in action.tool_calls]
        if action.tool_problem is not None:
            answers.append({"role": "tool", "name": "look", "content": "error"})
        if answers and action.turn + 1 < MOST_TURNS:
            return StepResult(0.0, done=False, messages=tuple(answers))
        right = action.text.strip() == numbers[self.task.data["asked"]]
        return StepResult(float(right), success=right)

    def close(self) -> None:
        pass


class BoxEnvironment:
    """Makes tasks and episodes."""

    claims = EnvironmentClaims(max_turns=MOST_TURNS, version="1")

    def tasks(self, split: str) -> BoxTasks:
        return BoxTasks(split)

    def open(self, task: Task, seed: int) -> BoxEpisode:  # noqa: ARG002 - nothing in an episode is random
        return BoxEpisode(task)


class BoxPlugin:
    @hookimpl
    def skyrl_engine_make_environment(self) -> BoxEnvironment:
        return BoxEnvironment()


boxes = BoxPlugin()


def draw_number(draw: random.Random) -> str:
    """Three digits, so that a guess is right once in a thousand times."""
    return f"{draw.randrange(1000):03}"


def ask(colour: str) -> dict[str, Any]:
    return {"role": "user", "content": f"Which number is in the {colour} box?"}


def write_chat(draw: random.Random) -> list[dict[str, Any]]:
    """Half of the conversations give up. The others look into a box, every second time into a wrong one, and repeat its number."""
    asked, number = draw.choice(COLOURS), draw_number(draw)
    if draw.random() < 0.5:
        return [ask(asked), {"role": "assistant", "content": "I do not know"}]
    opened = asked if draw.random() < 0.5 else draw.choice([colour for colour in COLOURS if colour != asked])
    call: Mapping[str, Any] = {"type": "function", "function": {"name": "look", "arguments": {"box": opened}}}
    return [
        ask(asked),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": number},
        {"role": "assistant", "content": number},
    ]


def write_world(folder: Path, chats: int = 8000) -> None:
    """Write the model and the conversations of the warm start."""
    draw = random.Random(0)  # noqa: S311 - as above
    rows = [{"messages": write_chat(draw), "tools": [LOOK.schema]} for _ in range(chats)]
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "habits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    # every word of this text becomes a token, and each character that stands alone, such as a digit
    call = '<tool_call>{"name": "look", "arguments": {"box": "red"}}</tool_call>'
    chat = [
        "system\nlook(box)\nuser\nassistant\ntool\nerror\nno such box\nI do not know",
        call,
        *(f'"{colour}"' for colour in COLOURS),
    ]
    text = "\n".join([*chat, *(ask(colour)["content"] for colour in COLOURS), *string.printable])
    tokenizer = write_tokenizer(folder / "model", [text], size=400, template=TEMPLATE)
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save_pretrained(folder / "model")
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "max_position_embeddings": 1024}
    write_model(folder / "model", tokenizer=tokenizer, **sizes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a model and conversations for a world of boxes.")
    parser.add_argument("--output", type=Path, required=True, help="Folder of the world.")
    write_world(parser.parse_args().output)
