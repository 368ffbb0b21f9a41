"""The architectures that train, pack, take adapters, divide and are sampled: what the engine answers about a tiny model of each.

    python tests/benchmarks/supported_models.py docs/reference/supported-models.md

Nothing is downloaded; it takes some minutes.
"""

import re
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import evolve, frozen

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "running"))

from architectures import FAMILIES, VISION

from skyrl_engine.config import SelectedPlugin, from_dict, resolve
from skyrl_engine.contracts import LoraConfig, ModelConfig, RowKind
from skyrl_engine.engine.capability import check_capabilities
from skyrl_engine.errors import EngineError
from skyrl_engine.model_facts.configuration import load_config
from skyrl_engine.model_facts.vision_language import takes_images
from skyrl_engine.modeling.loading import load_scorer
from skyrl_engine.modeling.lora import describe_adapters
from skyrl_engine.modeling.sampler_model import load_sampler_model
from skyrl_engine.modeling.tiny import write_model, write_vision_model
from skyrl_engine_generators.rows import UncachedDecoder
from skyrl_engine_generators.self_proof import make_proven_rows

BACKENDS: Final = ("fsdp", "deepspeed", "megatron")
SIZES: Final = {
    "tp": {"tensor_parallel": 2},
    "pp": {"pipeline_parallel": 2},
    "cp": {"context_parallel": 2},
    "ep": {"expert_parallel": 2},
}
"""Options that divide a model, each for two ranks; on megatron tensor-parallel ranks share experts."""

INTRODUCTION: Final = """\
# Supported models

The architectures that the tests know, by their `model_type` in `config.json`, and what the engine answers about each: the checks that every run
makes before a rank starts, then loading, and the proof that a generator makes at its start.
`python tests/benchmarks/supported_models.py docs/reference/supported-models.md` makes this page from a tiny model of each, with
transformers {transformers}. Other causal language models of transformers train as well, if they pass the same checks.

A checkpoint may set what the tiny model does not, such as dropout or a window: `skyrl-engine plan CONFIG` answers for yours, with a remedy.

- *fsdp*, *deepspeed*, *megatron*: "dp" says that the backend trains it, on any number of data-parallel ranks; the other words say how ranks
  can share the model: tensor (tp), pipeline (pp), context (cp) and expert (ep) parallelism. Sizes must divide its heads, layers and experts.
- *collator*: the fastest form of rows. `padded` lays one sample in a row, `packed` several without padding, and in `tree` samples with a common
  beginning, such as the completions of one prompt, compute it once. A model that takes one of them takes those before it too.
- *LoRA*: adapters on fsdp and deepspeed; "in part" where `targets = "all-linear"` leaves matrices frozen, which are named below.
- *hf*: the generator on the ranks samples text with a cache of keys and values, or "uncached", which is slow.
- *vllm*: vLLM {vllm} has a model class for it ([sampling with vLLM](../how-to/sample-with-vllm.md)). It serves further ones through
  transformers. Whichever it is, the generator compares log-probabilities with the run's model at its start; tests ran it with Qwen3.

In every column "–" is a refusal before training starts, in the column *vllm* no class.
"""

NO: Final = "–"
SERVED: Final = tomllib.loads(Path(__file__).with_name("vllm_models.toml").read_text())


@frozen
class Answers:
    """The engine's answers about one architecture: the words of a refusal, None where there is none.

    `layouts` by backend and size ("dp" on one rank), `rows` by form as fsdp and deepspeed compute them. `unadapted` are the matrices that stay
    frozen beside adapters of all linear layers, `cached` and `sampled` the answers of the generator `hf`.
    """

    name: str
    model_class: str
    layouts: dict[tuple[str, str], str | None]
    rows: dict[RowKind, str | None]
    adapters: str | None
    unadapted: tuple[str, ...]
    sampled: str | None
    cached: bool
    images: bool


def ask(name: str) -> Answers:
    """Write a tiny model of an architecture, and ask planning, loading and the generator about it."""
    with tempfile.TemporaryDirectory() as folder:
        if name in VISION:
            write_vision_model(Path(folder), windows=name == "qwen2_5_vl")
        else:
            write_model(Path(folder), name, **FAMILIES[name])
        model = ModelConfig(folder)
        model_class = load_config(model, images=True).architectures[0]
        layouts = {
            (backend, size): _refusal(folder, _plan, backend, model, size)
            for backend in BACKENDS
            for size in offered_sizes(backend)
        }
        rows: dict[RowKind, str | None] = {rows: _refusal(folder, _refuse_rows, model, rows) for rows in ("packed", "tree")}
        unadapted: list[str] = []
        # what loading finds of rows of documents is true of ranks that divide them
        layouts["fsdp", "cp"] = layouts["fsdp", "cp"] or rows["packed"]
        adapters = _refusal(folder, _adapt, model, unadapted)
        decoders: list[Any] = []
        sampled = _refusal(folder, _sample, model, decoders)
        return Answers(
            name,
            model_class,
            layouts,
            rows,
            adapters,
            tuple(unadapted),
            sampled,
            not isinstance(decoders[0], UncachedDecoder) if decoders else False,
            takes_images(load_config(model, images=True)),
        )


def _refusal(folder: str, question: Callable[..., None], *arguments: Any) -> str | None:
    """Return the words in which the engine refuses, without the folder's name; None where it does not."""
    try:
        question(*arguments)
    except EngineError as error:
        return error.cause.replace(folder, "it")
    return None


def offered_sizes(backend: str) -> list[str]:
    """Return the sizes of `SIZES` that the options of a backend have, after "dp" for one rank."""
    known = {each.name for each in attrs.fields(type(_select(backend).options))}
    return ["dp", *(size for size, options in SIZES.items() if options.keys() <= known)]


@cache
def _select(backend: str) -> SelectedPlugin:
    table = {"backend": {"use": backend}, "model": {"path": "none"}, "data": {"train": "none"}}
    return resolve(from_dict(table, "the page"), need=()).plugins["backend"]


def _plan(backend: str, model: ModelConfig, size: str, rows: RowKind = "padded") -> None:
    """Raise what planning raises for a model on one rank, or on two that share it in the way of `size`."""
    selected, divided = _select(backend), SIZES.get(size, {})
    if (backend, size) == ("megatron", "ep"):
        divided = {**divided, "tensor_parallel": 2}
    options: Any = selected.options
    description = selected.loaded.describe_backend(evolve(options, **divided), 2 if divided else 1)
    check_capabilities(backend, description.capabilities, frozenset({rows, *(("lora",) if model.lora else ())}))
    description.refuse_model(load_config(model, images="vision" in description.capabilities), model)
    description.rehearse(model, rows)


def _refuse_rows(model: ModelConfig, rows: RowKind) -> None:
    """Raise what planning raises about rows of several samples, or else a rank that has loaded the model."""
    _plan("fsdp", model, "dp", rows)
    _, scorer = load_scorer(model, images=True)
    scorer.refuse_rows_unless_supported(rows)


def _adapt(model: ModelConfig, unadapted: list[str]) -> None:
    adapted = evolve(model, lora=LoraConfig(rank=2))
    _plan("fsdp", adapted, "dp")
    _, scorer = load_scorer(adapted, images=True)
    frozen = describe_adapters(scorer.decoder).partition("; frozen stay ")[2]
    unadapted.extend(re.findall(r"(\S+) \(\d+\)", frozen))


def _sample(model: ModelConfig, decoders: list[Any]) -> None:
    loaded = load_sampler_model(model, "cpu")
    decoders.append(make_proven_rows(loaded, 4, name=model.path, limit=loaded.config.get_text_config().max_position_embeddings))


COLUMNS: Final = ("model_type", *BACKENDS, "collator", "LoRA", "hf", "vllm")


def make_row(answers: Answers) -> list[str]:
    """Return the cells of an architecture, in the order of `COLUMNS`."""
    backends = []
    for backend in BACKENDS:
        sizes = [size for (name, size), refusal in answers.layouts.items() if name == backend and refusal is None]
        backends.append(", ".join(sizes) if "dp" in sizes else NO)
    adapters = "in part" if answers.unadapted else "yes"
    return [
        f"`{answers.name}`" + (", with images" if answers.images else ""),
        *backends,
        next((rows for rows in ("tree", "packed") if answers.rows[rows] is None), "padded"),
        NO if answers.adapters else adapters,
        NO if answers.sampled else ("yes" if answers.cached else "uncached"),
        "yes" if answers.model_class in SERVED["classes"] else NO,
    ]


PACKED: Final = "The collators packed and tree"
PREFIXES: Final = "The collator tree alone"
TENSOR_PARALLEL: Final = "Tensor parallelism on fsdp"
ADAPTERS: Final = "Adapters"


def _iterate_refusals(every: Iterable[Answers]) -> Iterator[tuple[str, str, str]]:
    """Yield question, sentence and architecture of what is refused; a form of rows that is refused with a simpler one is not said twice."""
    for answers in every:
        packed, tree = answers.rows["packed"], answers.rows["tree"]
        for question, refusal in (
            (PACKED, packed),
            (PREFIXES, None if packed else tree),
            (TENSOR_PARALLEL, answers.layouts["fsdp", "tp"]),
            (ADAPTERS, answers.adapters),
        ):
            if refusal is not None:
                yield question, _generalize(refusal, answers), answers.name


def _generalize(refusal: str, answers: Answers) -> str:
    """Return the first sentence of a refusal with "it" for the model's names, so that the same reason reads the same for all."""
    sentence = re.split(r"(?<=[.])\s", refusal, maxsplit=1)[0].rstrip(".")
    sentence = re.sub(r"^\w+ cannot be trained on \w+ rows: ", "", sentence)
    sentence = sentence.replace(f"{answers.name} models such as it", "it").replace(answers.model_class, "it")
    sentence = re.sub(r"\bit divide\b", "it divides", sentence).replace("it's attention", "its attention")
    return re.sub(r"^[\w.]+\.(\w+) drops at", r"its \1 drops at", sentence)


def introduce() -> str:
    """Return what stands before the table, with the versions that the answers are of."""
    return INTRODUCTION.format(transformers=version("transformers"), vllm=SERVED["version"])


def make_page() -> str:
    """Return the page."""
    every = []
    for name in sorted((*FAMILIES, *VISION)):
        print(name, file=sys.stderr)
        every.append(ask(name))
    lines = [introduce(), f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(make_row(answers))} |" for answers in every]
    refused: dict[str, dict[str, list[str]]] = {
        question: defaultdict(list) for question in (PACKED, PREFIXES, TENSOR_PARALLEL, ADAPTERS)
    }
    for question, sentence, name in _iterate_refusals(every):
        refused[question][sentence].append(f"`{name}`")
    frozen: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for answers in every:
        if answers.unadapted:
            frozen[answers.unadapted].append(f"`{answers.name}`")
    lines += ["", "## Refused, in these words"]
    for question, sentences in refused.items():
        lines += ["", f"{question}:", "", *(f"- {', '.join(names)}: {sentence}." for sentence, names in sentences.items())]
    lines += ["", "## What adapters of all linear layers leave frozen", ""]
    lines += [f"- {', '.join(names)}: {', '.join(f'`{matrix}`' for matrix in left)}." for left, names in frozen.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_page())
