"""`interop.trl_environment` in TRL's GRPOTrainer, in `nox -s peers`: the trainer's own loop of tools plays episodes of an environment.

The model's turns are scripted, since a tiny model calls no tool: two calls of `answer`, then a turn without one. Everything else is
the trainer's.
"""

import importlib.resources
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rewards_of_trl import configure_grpo
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

from skyrl_engine import hookimpl
from skyrl_engine.contracts import EnvironmentClaims, StepResult, Task
from skyrl_engine.interop import trl_environment
from skyrl_engine.modeling.tiny import write_model
from skyrl_engine.testing.templates import TEMPLATES

SAID: list[tuple[str, list[str]]] = []
"""The tasks of the episodes, and what the model said in each."""


class Guess:
    """An episode: 0.5 for each turn that holds the word; it ends with the second."""

    def __init__(self, task: Task) -> None:
        self.word, self.said = str(task.data["word"]), []
        SAID.append((self.word, self.said))

    async def begin(self) -> tuple[dict[str, str], ...]:
        return ({"role": "user", "content": "Guess."},)

    async def step(self, action: Any) -> StepResult:
        self.said.append(action.text)
        done = len(self.said) == 2
        return StepResult(0.5 * (self.word in action.text), done, () if done else ({"role": "user", "content": "Again."},))

    async def close(self) -> None:
        pass


class Guesses:
    """The environment, and the plugin that makes it."""

    name = "guess"
    claims = EnvironmentClaims(max_turns=2)

    @hookimpl
    def skyrl_engine_make_environment(self) -> "Guesses":
        return self

    def tasks(self, split: str) -> list[Task]:
        return []

    def open(self, task: Task, seed: int) -> Guess:
        return Guess(task)


def call(text: str) -> str:
    return f'<tool_call>\n{{"name": "answer", "arguments": {{"text": "{text}"}}}}\n</tool_call><|im_end|>'


class Scripted(GRPOTrainer):  # type: ignore[misc] # TRL has no types
    """Its model says what is written here, by the number of turns so far."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_given: Any, **_named: Any) -> tuple[list[list[int]], None]:
        turns = [self.processing_class.decode(ids).count("<tool_response>") for ids in prompt_ids]
        said = [(call("a red fox"), call("a blue fox"), "That is all.<|im_end|>")[min(turn, 2)] for turn in turns]
        return [self.processing_class(text, add_special_tokens=False)["input_ids"] for text in said], None


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = TEMPLATES["chatml"].tokenizer()
        tokenizer.chat_template = importlib.resources.files("trl").joinpath("chat_templates/qwen3.jinja").read_text()
        write_model(folder, "llama", tokenizer=tokenizer, max_position_embeddings=4096)
        arguments = configure_grpo(folder, num_generations=2, max_completion_length=1000, max_steps=2)
        rows = [{"prompt": [{"role": "user", "content": "Which animal?"}], "word": word} for word in ("red", "fox")]
        trainer = Scripted(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            args=arguments,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            environment_factory=trl_environment(Guesses()),
        )
        trainer.train()
        rewards = sorted(log["reward"] for log in trainer.state.log_history if "reward" in log)
        print(f"rewards by step: {rewards}, episodes: {SAID}")
        assert rewards == [0.5, 1.0], "the word red is in one of the two turns, fox in both"
        assert len(SAID) == 4
        assert all(said == ["a red fox", "a blue fox"] for _, said in SAID)


if __name__ == "__main__":
    main()
