"""CPU seconds of `skyrl-engine sft` on one rank, from its launch to the first step that is saved: bar 5.5.

The model is tiny and the data eight chats, so that what counts is starting: the interpreter, imports of torch and transformers, the
configuration, checks of the model, loading it, one step and its checkpoint. CPU time of all processes, compiled once, the least of several
runs; torch alone, and transformers' base of all models, stand beside it, since machines differ. The bar is for one thread: further threads of
OpenMP compute nothing in a model so small, and count the time for which they wait for each other. Runs with this machine's threads are told
too. Run with `nox -s bench`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from first_rollout import cpu_seconds
from measuring.bars import compare_with_bar
from measuring.cpu_time import machine

from skyrl_engine.cli.demo.recipe import Exchange
from skyrl_engine.cli.demo.tiny import make_model

RUNS = 3
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
        runs: dict[str, list[float]] = {threads: [] for threads in ("1", str(os.cpu_count()))}
        imports: dict[str, list[float]] = {module: [] for module in ("torch", "torch._dynamo", "transformers.modeling_utils")}
        for run in range(RUNS):
            for threads, seconds in runs.items():
                output = folder / f"run-{threads}-{run}"
                command = ["env", f"OMP_NUM_THREADS={threads}", program, "sft", *files, "--output", str(output), *rest]
                seconds.append(cpu_seconds(command, folder))
            for module, seconds in imports.items():
                seconds.append(cpu_seconds([sys.executable, "-c", f"import {module}"], folder))
    for threads, seconds in runs.items():
        told = compare_with_bar(min(seconds), at_most=MOST_SECONDS) if threads == "1" else "(no bar)"
        print(f"launch to first saved step, threads {threads}: {min(seconds):.2f} CPU s {told}; runs", end=" ")
        print(", ".join(f"{each:.2f}" for each in seconds))
    print("importing alone:", ", ".join(f"{module} {min(seconds):.2f}" for module, seconds in imports.items()))


if __name__ == "__main__":
    main()
