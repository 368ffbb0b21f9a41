"""CPU seconds of `skyrl-engine sft` on one rank, from its launch to the first step that is saved: bar 5.5.

The model is tiny and the data eight chats, so that what counts is starting: the interpreter, imports of torch and transformers, the
configuration, checks of the model, loading it, one step and its checkpoint. CPU time of all processes, compiled once, the least of several
runs; importing torch alone stands beside it, since machines differ. Run with `nox -s bench`.
"""

import json
import sys
import tempfile
from pathlib import Path

from first_rollout import cpu_seconds
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine

from skyrl_engine.cli.demo.recipe import Exchange
from skyrl_engine.cli.demo.tiny import make_model

RUNS = 5
MOST_SECONDS = 5.5


def main() -> None:
    program = str(Path(sys.executable).with_name("skyrl-engine"))
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        exchanges = [
            Exchange(f"Spell {word} backward", word[::-1])
            for word in ("one", "two", "three", "four", "five", "six", "seven", "ten")
        ]
        make_model(folder / "model", exchanges)
        (folder / "train.jsonl").write_text("".join(json.dumps({"messages": exchange.messages()}) + "\n" for exchange in exchanges))
        files = ["--model", str(folder / "model"), "--data", str(folder / "train.jsonl")]
        rest = ["--steps", "1", "--quiet", "run.device=cpu", f"data.cache={folder / 'cache'}"]
        runs = [cpu_seconds([program, "sft", *files, "--output", str(folder / f"run-{run}"), *rest], folder) for run in range(RUNS)]
        torch = min(cpu_seconds([sys.executable, "-c", "import torch"], folder) for _ in range(RUNS))
    print(f"launch to first saved step: {min(runs):.2f} CPU s {compare_with_bar(min(runs), at_most=MOST_SECONDS)}", end="; ")
    print(f"runs {', '.join(f'{seconds:.2f}' for seconds in runs)}; importing torch alone {torch:.2f}")


if __name__ == "__main__":
    main()
