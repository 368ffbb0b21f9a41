"""`skyrl-engine plan`: what each rank would hold, for every trainer, without weights; refused is what `run` refuses, in its words."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_engine.modeling.tiny import write_model, write_tokenizer
from skyrl_engine.training.sft import assumed_data

ROWS = [
    {"prompt": f"{n} plus {n}", "completion": f" {2 * n}", "chosen": f" {2 * n}", "rejected": f" {2 * n + 1}"} for n in range(12)
]
TABLES = {
    "sft": '[data]\ntrain = "./rows.jsonl"\nformat = "prompt_completion"\n[training]\nsteps = 2\nbatch_size = 8\n',
    "preference": '[data]\ntrain = "./pairs.jsonl"\n[training]\nsteps = 2\nbatch_size = 8\n',
    "reward_model": '[data]\ntrain = "./pairs.jsonl"\n[training]\nsteps = 2\nbatch_size = 8\n',
    "rl": "[rl]\nsteps = 1\ngroups = 4\ngroup_size = 2\nmax_tokens = 8\nmax_prompt_tokens = 24\n[generator]\ncache_tokens = 100\n"
    '[advantage]\nuse = "grpo"\n[[environments]]\nuse = "prompts"\ndata = "./rows.jsonl"\n[rl.kl]\ncoef = 0.1\n',
}

MINE = '''"""A backend that divides everything among `shards` ranks."""

from attrs import frozen

from skyrl_engine import hookimpl
from skyrl_engine.contracts import BackendDescription, Holding, StateLayout, Topology, list_divisors


@frozen
class Options:
    shards: int = 1
    flavour: str = "sweet"


class Mine:
    @hookimpl
    def skyrl_engine_config_schema(self):
        return Options

    @hookimpl
    def skyrl_engine_describe_backend(self, config, world_size):
        def describe_state(model):
            return StateLayout(tuple(Holding(part, config.shards) for part in ("weights", "gradients", "optimizer")))

        choices = {"stray" if config.flavour == "stray" else "shards": list_divisors(world_size)}
        capabilities = frozenset({"padded", "packed"})
        return BackendDescription(Topology(dp=world_size), capabilities, describe_state=describe_state, layout_choices=choices)

    @hookimpl
    def skyrl_engine_make_backend(self, config):
        raise AssertionError("a plan makes no backend")


mine = Mine()
'''

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    texts = [row["prompt"] + row["rejected"] for row in ROWS]
    write_model(folder, "llama", tokenizer=write_tokenizer(folder, texts), num_hidden_layers=4, num_attention_heads=4)
    return folder


@pytest.fixture
def config(model: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Write the configuration of a trainer, and its data, and return the file."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({key: row[key] for key in ("prompt", "completion")}) + "\n" for row in ROWS)
    )
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({key: row[key] for key in ("prompt", "chosen", "rejected")}) + "\n" for row in ROWS)
    )

    def write(trainer: str) -> Path:
        file = tmp_path / f"{trainer}.toml"
        file.write_text(f'trainer = "{trainer}"\n[model]\npath = "{model}"\n{TABLES[trainer]}')
        return file

    return write


def parts(outcome: Any, stage: int = 0) -> dict[str, int]:
    assert outcome.code == 0, outcome.err
    values: dict[str, int] = json.loads(outcome.out)["memory"]["stages"][stage]["parts"]
    return values


def test_plan_and_dry_run_are_one(command: Run, config: Callable[[str], Path]) -> None:
    file = config("sft")
    planned = command("plan", file)
    assert planned.out == command("run", file, "--dry-run").out
    assert "memory of a rank" in planned.out


def test_gpus_elsewhere_are_planned_for_without_weights(
    command: Run, config: Callable[[str], Path], model: Path, tmp_path: Path
) -> None:
    """Sixteen GPUs, on a machine that has none, of a model whose config.json and tokenizer alone are here."""
    shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors*"))
    line = ("plan", config("sft"), "model.path=./bare", "--gpu-memory", "80GiB", "--json")
    one, many = parts(command(*line)), parts(command(*line, "--ranks", "16"))
    assert many["weights"] == pytest.approx(one["weights"] / 16, abs=1)
    assert many["optimizer"] == pytest.approx(2 * many["weights"], abs=2)
    stages = ("--backend", "megatron", "backend.pipeline_parallel=4", "--ranks", "4", "training.micro_batch_tokens=16")
    outcome = command(*line, *stages)
    assert parts(outcome)["activations"] > parts(outcome, 3)["activations"] > 0
    values = json.loads(outcome.out)["memory"]
    assert values["fits"] is True
    assert values["step"]["bubble"] == pytest.approx(3 / (values["step"]["micro_batches"] + 3))


@pytest.mark.parametrize(("trainer", "further"), [("preference", "reference"), ("reward_model", None), ("rl", "caches")])
def test_every_trainer_is_planned(command: Run, config: Callable[[str], Path], trainer: str, further: str | None) -> None:
    held = parts(command("plan", config(trainer), "--json"))
    assert held["activations"] > 0
    assert further is None or held[further] > 0
    if trainer == "rl":
        assert held["reference"] == held["weights"]
    if trainer == "preference":
        adapted = parts(command("plan", config(trainer), "--json", "model.lora.rank=2"))
        assert "reference" not in adapted, "the trained model without its adapters is the reference"
        assert adapted["optimizer"] < adapted["weights"]


@pytest.mark.parametrize("trainer", ["sft", "preference", "reward_model"])
def test_lengths_stand_for_the_data(command: Run, config: Callable[[str], Path], tmp_path: Path, trainer: str) -> None:
    """No file of data is there: neither training nor held-out rows are read, nor is a checkpoint asked whether it has seen them."""
    file = config(trainer)
    (tmp_path / "rows.jsonl").unlink()
    (tmp_path / "pairs.jsonl").unlink()
    (tmp_path / "lengths.txt").write_text("50\n100\n" * 4)
    line = ("plan", file, "--lengths", tmp_path / "lengths.txt", "--collator", "padded", "training.micro_batch_rows=2")
    outcome = command(*line, "--json", "training.micro_batch_tokens=none", "data.eval=./absent.jsonl")
    assert outcome.code == 0, outcome.err
    step = json.loads(outcome.out)["memory"]["step"]
    assert (step["tokens"], step["longest"], step["micro_batches"]) == (600, 100, 4)
    assert step["padding"] == pytest.approx(1 - 600 / step["dense"])
    assert "8 samples, assumed by their lengths: 600 tokens" in " ".join(command(*line).out.split())
    assert "does not exist" in command("run", file, "--dry-run").err, "a run reads the data"


def test_ranks_that_wait_are_told(command: Run, config: Callable[[str], Path], tmp_path: Path) -> None:
    """Eight samples on three ranks, one in a micro-batch: the ninth holds none, and the fullest rank computes three of 100 tokens."""
    (tmp_path / "lengths.txt").write_text("100\n" * 8)
    line = (
        "plan",
        config("sft"),
        "--ranks",
        "3",
        "--lengths",
        tmp_path / "lengths.txt",
        "--collator",
        "padded",
        "training.micro_batch_rows=1",
    )
    step = json.loads(command(*line, "--json").out)["memory"]["step"]
    assert (step["ranks"], step["micro_batches"], step["fullest"], step["empty"]) == (3, 3, 300, 1)
    assert step["imbalance"] == pytest.approx(300 * 3 / step["dense"])
    told = " ".join(command(*line).out.split())
    assert "the fullest of 3 data-parallel ranks computes 300 tokens" in told
    assert "1 of 9 micro-batches hold no sample" in told


def test_lengths_are_those_of_samples_that_share_nothing(command: Run, config: Callable[[str], Path], tmp_path: Path) -> None:
    """The engine chooses a collator for them: nothing pays to be shared."""
    (tmp_path / "lengths.txt").write_text("40\n100\n")
    outcome = command("plan", config("sft"), "--lengths", tmp_path / "lengths.txt", "--json")
    assert outcome.code == 0, outcome.err
    values = json.loads(outcome.out)
    assert values["memory"]["step"]["tokens"] == 4 * 140, "two lengths fill a mini-batch of eight"
    assert "share 0.0% of their tokens" in "".join(values["chosen"])


def test_lengths_that_are_none_are_refused(
    command: Run, config: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assumed_data, "MOST_TOKENS", 1000)
    lengths = tmp_path / "lengths.txt"
    line = ("plan", config("preference"), "--lengths", lengths)
    for text, told in (
        ("50\nlong\n", "lengths.txt:2 is 'long', and no number of tokens"),
        ("50\n60\n70\n", "--lengths gives 3 lengths, and the answers of a pair are two"),
        ("50\n900\n", "--lengths gives a sample of 900 tokens, and samples have at most 100"),
        ("90\n" * 12, "--lengths gives 1,080 tokens in all, and a plan takes up to 1,000"),
    ):
        lengths.write_text(text)
        refused = command(*line, "data.max_length=100")
        assert refused.code in (2, 4)
        assert told in refused.last_line
    lengths.unlink()
    assert "lengths.txt cannot be read" in command(*line).last_line


def test_what_run_refuses_is_refused_in_its_words(command: Run, config: Callable[[str], Path]) -> None:
    line = (config("sft"), "run.launch=ray", "run.ranks=3", "backend.tensor_parallel=3")
    assert command("plan", *line).last_line == command("run", *line).last_line
    for size in ("80 apples", "0GiB", "9" * 400 + "GiB"):
        assert "is no size of memory" in command("plan", line[0], "--gpu-memory", size).err
    assert 'run.device = "cpu"' in command("plan", line[0], "--gpu-memory", "80GiB", "run.device=cpu").err


def test_proposed_layouts_fit_and_pass_plan(command: Run, config: Callable[[str], Path]) -> None:
    """Four ranks whose GPUs do not hold the configured layout: what is proposed instead is planned with its keys alone, and fits."""
    line = ("plan", config("sft"), "--ranks", "4", "--json", "training.micro_batch_tokens=512")
    configured = json.loads(command(*line, "--gpu-memory", "1GiB").out)["memory"]["stages"][0]
    size = f"{int(configured['total'] * 0.9)}B"
    assert json.loads(command(*line, "--gpu-memory", size).out)["memory"]["fits"] is False
    outcome = command(*line, "--gpu-memory", size, "--fit")
    assert outcome.code == 0, outcome.err
    layouts = json.loads(outcome.out)
    assert layouts
    for layout in layouts[:2]:
        keys = [f"{key}={str(value).lower()}" for key, value in layout["keys"].items()]
        again = json.loads(command(*line, "--gpu-memory", size, *keys).out)["memory"]
        assert again == layout["memory"]
        assert max(stage["total"] for stage in again["stages"]) <= 0.9 * again["device_bytes"]
    works = [layout["work"] for layout in layouts]
    assert works == sorted(works), "those that compute less come first"


def test_a_long_sample_and_experts_are_shared_by_ranks(
    command: Run, config: Callable[[str], Path], model: Path, tmp_path: Path
) -> None:
    """One sample of eight holds most tokens, and most weights are experts: what shares both comes first, and `plan` takes it."""
    shutil.copytree(model, tmp_path / "mixture", ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    write_model(tmp_path / "mixture", "mixtral", num_hidden_layers=2, num_attention_heads=4, num_local_experts=8, vocab_size=300)
    (tmp_path / "lengths.txt").write_text("100\n" + "10\n" * 7)
    line = ("plan", config("sft"), "model.path=./mixture", "--ranks", "4", "--lengths", tmp_path / "lengths.txt", "--json")
    outcome = command(*line, "--backend", "fsdp", "--gpu-memory", "1GiB", "--fit")
    assert outcome.code == 0, outcome.err
    layouts = json.loads(outcome.out)
    best = layouts[0]["keys"]
    assert any(layout["keys"]["backend.context_parallel"] > 1 for layout in layouts)
    assert any(layout["keys"]["backend.expert_parallel"] > 1 for layout in layouts)
    again = command(*line, "--gpu-memory", "1GiB", *(f"{key}={str(value).lower()}" for key, value in best.items()))
    assert json.loads(again.out)["memory"] == layouts[0]["memory"]


def test_a_backend_of_ones_own_is_fitted_by_what_it_declares(command: Run, config: Callable[[str], Path], tmp_path: Path) -> None:
    """Its options are its own words, it is named as the configuration may name it, and what the file says besides stays."""
    (tmp_path / "mine.py").write_text(MINE)
    file = config("sft")
    file.write_text(file.read_text() + '[backend]\nuse = "./mine.py:mine"\nflavour = "sour"\n')
    line = ("plan", file, "--ranks", "3", "--json", "--trust-code", "training.micro_batch_tokens=512", "--gpu-memory")
    whole = json.loads(command(*line, "1GiB").out)["memory"]["stages"][0]["total"]
    outcome = command(*line, f"{int(whole * 0.9)}B", "--fit")
    assert outcome.code == 0, outcome.err
    mine = [layout for layout in json.loads(outcome.out) if layout["keys"]["backend.use"] == f"{tmp_path / 'mine.py'}:mine"]
    assert mine[0]["keys"]["backend.shards"] == 3
    assert mine[0]["keys"]["backend.flavour"] == "sour"
    assert not any("backend.tensor_parallel" in layout["keys"] for layout in mine)
    file.write_text(file.read_text().replace("sour", "stray"))
    assert "offers layouts by the option 'stray', which it does not have" in command(*line, "1GiB", "--fit").err


def test_no_layout_is_proposed_where_none_fits(command: Run, config: Callable[[str], Path]) -> None:
    line = ("plan", config("sft"), "--ranks", "2", "--fit")
    refused = command(*line, "--gpu-memory", "100KiB")
    assert refused.code == 2
    assert "holds no layout on 2 ranks with 100.0 KiB each" in refused.err
    assert "misses least" in refused.err
    assert "--fit needs the memory of a GPU" in command(*line).err
