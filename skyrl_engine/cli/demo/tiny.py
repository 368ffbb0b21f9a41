"""`demo --model tiny`: a small Qwen3-architecture model made in this process learns to spell words backward.

Questions, answers and the verifier are reasoning-gym's `spell_backward`.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from attrs import define

from skyrl_engine import DataError
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

PAD, END, START = "<|pad|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QUESTIONS = 8000
_HELD_OUT = 200
_LETTERS = (3, 10)
_SEED = 7
_LONGEST = 4096
"""Positions of the model: room for the prompts and attempts of every preset as they are."""


@define(slots=False)  # cached_property needs an instance dictionary
class TinyRecipe:
    name: str = "tiny"
    default_steps: int = 300
    score_name: str | None = "exact match"

    def prepare(self, directory: Path, steps: int) -> Preparation:
        training, held_out = self._split
        model = directory / "model"
        parameters = make_model(model, training)
        write_exchanges(directory / "data" / TRAIN_FILE, training)
        write_exchanges(directory / "data" / HELD_OUT_FILE, held_out)
        facts = [
            f"model: Qwen3 architecture, {parameters:,} parameters, random weights, tokenizer made from the training questions",
            f"task: reasoning-gym spell_backward, words of {_LETTERS[0]} to {_LETTERS[1]} letters; its own verifier scores the answers",
            f"for instance: {training[0].question}  ->  {training[0].answer}",
            f"data: {len(training):,} words to learn from, {len(held_out)} other words held out",
        ]
        return Preparation(_config(steps), model, facts)

    def examine(self, model: Path) -> Examination:
        _, held_out = self._split
        answers = answer_greedily(model, [exchange.question for exchange in held_out], max_new_tokens=16, batch_size=100)
        # The verifier pays partly for words that share letters, sums of 1/length that can round to almost 1; only equality pays 1 exactly.
        rewards = [
            float(self._dataset.score_answer(answer, {"answer": exchange.answer}))
            for answer, exchange in zip(answers, held_out, strict=True)
        ]
        return Examination(
            [exchange.question.rpartition(": ")[2] for exchange in held_out],  # the word; the rest is the same in all
            answers,
            [exchange.answer for exchange in held_out],
            sum(reward == 1.0 for reward in rewards) / len(rewards),
            rewards,
        )

    def tasks(self) -> tuple[list[Exchange], list[Exchange]]:
        return self._split

    @cached_property
    def _dataset(self) -> Any:
        try:
            with warnings.catch_warnings():
                # Its dependency cellpylib compares with `is "..."`, of which Python warns while it compiles that for the first time.
                warnings.simplefilter("ignore", SyntaxWarning)
                import reasoning_gym
        except ModuleNotFoundError as error:
            raise DataError(
                "the demo's data come from reasoning-gym, which is not installed",
                remedy='Run: python -m pip install "skyrl-engine[demo]"',
            ) from error
        return reasoning_gym.create_dataset(
            "spell_backward", size=_QUESTIONS, seed=_SEED, min_word_len=_LETTERS[0], max_word_len=_LETTERS[1]
        )

    @cached_property
    def _split(self) -> tuple[list[Exchange], list[Exchange]]:
        entries = (self._dataset[index] for index in range(_QUESTIONS))
        return split_held_out([Exchange(entry["question"], entry["answer"]) for entry in entries], _HELD_OUT, _SEED)


def make_model(directory: Path, exchanges: Sequence[Exchange]) -> int:
    """Write a randomly initialised model with its tokenizer as a Hugging Face directory; returns its number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from skyrl_engine.modeling.exporting import write_pretrained

    tokenizer = make_tokenizer(exchanges)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=_LONGEST,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model: Any = Qwen3ForCausalLM(config)
    write_pretrained(model, directory)
    tokenizer.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def make_tokenizer(exchanges: Sequence[Exchange]) -> Any:
    """Make a tokenizer: words that at least half of the questions share are one token each, all else is spelled byte by byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    counts: Counter[str] = Counter()
    for exchange in exchanges:
        counts.update({piece for piece, _ in splitter.pre_tokenize_str(exchange.question)})
    common = sorted(piece for piece, count in counts.items() if 2 * count >= len(exchanges))
    pieces = dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), "user", "assistant", "system", *common])
    vocabulary = {piece: index for index, piece in enumerate([PAD, END, START, *pieces])}
    # ignore_merges takes a whole word that is in the vocabulary; without merges, any other word falls into its bytes
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, END, START)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, model_max_length=_LONGEST)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _config(steps: int) -> dict[str, Any]:
    return {
        "model": {"path": "./model"},
        "data": {"train": f"./data/{TRAIN_FILE}", "eval": f"./data/{HELD_OUT_FILE}"},
        "training": {"steps": steps, "batch_size": 64},
        "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": min(20, steps // 10)},
        "evaluation": {"every": max(1, steps // 3), "at_start": True},
    }
