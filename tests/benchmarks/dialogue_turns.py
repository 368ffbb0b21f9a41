"""CPU time of dialogues whose keys and values the generator `hf` keeps between turns, against reading every history again. One thread.

A Qwen3 of 10 million random weights in float32, sampled by the engine in this process: 16 dialogues of 12 turns. A turn samples 16 tokens and
observes 32; the first prompts have 64 tokens. `last_turn` of every request says that nothing need be kept, so that the next turn reads it all.
Both say the same to the last bit, which is checked first. Rounds are interleaved, and the least of each counts. Run with `nox -s bench`.
"""

import logging
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from measuring.bars import compare_with_bar
from measuring.cpu_time import interleave, machine
from measuring.words import VOCABULARY, write_words_model

from skyrl_engine import Engine
from skyrl_engine.contracts import GenerationRequest, Sampling

ROUNDS = 2
DIALOGUES, TURNS = 16, 12
PROMPT, SAMPLED, OBSERVED = 64, 16, 32
BAR = 0.40
"""Share of the CPU time of reading every history again."""


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        parameters = write_words_model(Path(name), positions=1024)
        print(f"{machine()}, one thread, torch {torch.__version__}; Qwen3 of {parameters / 1e6:.1f}M parameters, float32")
        tables = {"model": {"path": name}, "generator": {"use": "hf", "slots": DIALOGUES}, "run": {"launch": "inline"}}
        with Engine.open(tables) as engine:
            works = {"kept": partial(converse, engine, keep=True), "read again": partial(converse, engine, keep=False)}
            kept, again = (work() for work in works.values())
            print(f"bits are {'the same' if kept == again else 'DIFFERENT'}")
            least = interleave(works, ROUNDS)
    ratio = least["kept"] / least["read again"]
    print(
        f"{DIALOGUES} dialogues of {TURNS} turns: {ratio:.3f} of reading again {compare_with_bar(ratio, at_most=BAR)}; "
        f"{least['kept']:.2f} and {least['read again']:.2f} s"
    )


def converse(engine: Engine, *, keep: bool) -> list[bytes]:
    """Take all turns of all dialogues; the bytes of what was sampled."""
    numbers = np.random.default_rng(0)
    histories = [numbers.integers(2, VOCABULARY, PROMPT) for _ in range(DIALOGUES)]
    sampling, said = Sampling(max_tokens=SAMPLED, ignore_eos=True), []
    for turn in range(TURNS):
        requests = [
            GenerationRequest(
                number,
                history.astype(np.int32),
                sampling,
                seed=TURNS * number + turn,
                session=number,
                last_turn=not keep or turn == TURNS - 1,
            )
            for number, history in enumerate(histories)
        ]
        done = engine.generate(requests).result()
        said += [part.tobytes() for completion in done for part in (completion.token_ids, completion.logprobs)]
        observed = [numbers.integers(2, VOCABULARY, OBSERVED) for _ in range(DIALOGUES)]
        parts = zip(histories, done, observed, strict=True)
        histories = [np.concatenate([history, completion.token_ids, new]) for history, completion, new in parts]
    return said


if __name__ == "__main__":
    main()
