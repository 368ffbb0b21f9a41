"""fsdp, deepspeed (ZeRO 0 to 3) and megatron side by side: how fast, with how much memory, and how far from float32.

    python tests/benchmarks/backends_side_by_side.py [--device cuda] [--size 0.6b] [--ranks 2] [--page docs/reference/backends-side-by-side.md]

Every backend has the same Qwen3, made here, and the same packed batch, and takes the steps that a run takes: the engine and
workers, on ranks that are plain processes. All are data parallel, with their default options. Unless `--one-at-a-time` says otherwise their
processes live side by side and take turns, so that a busy or throttled machine slows all alike; of the rounds the least counts.

- Time: forward, backward and optimizer step on the ranks. On CUDA by the clock, with synchronization, of the slowest rank; on CPU the CPU
  time of all ranks, one thread each.
- Peak memory: of the rank that takes most, while it steps. On CUDA what torch has allocated; on CPU what is resident beyond what the same
  process had before it loaded the model, after the backend had trained a tiny one there.
- Parity: loss, log-probabilities and gradients of the first step against one float32 process (fsdp) on the same device. Steps before that
  are of a learning rate that changes no weight.

`nox -s sidebyside` runs it; ends with an error where a backend is outside of the tolerances below.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from attrs import evolve, frozen
from measuring import ranks as on_rank
from measuring.cpu_time import machine
from measuring.ranks import ClockedTransport

from skyrl_engine.config import SelectedPlugin, from_dict, resolve
from skyrl_engine.config.schema import OptimizerConfig
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ComputeDtype, ModelConfig
from skyrl_engine.contracts.values.outputs import BatchOutput
from skyrl_engine.engine.assembly import Assembly
from skyrl_engine.engine.engine import Engine
from skyrl_engine.engine.model_files import ModelFiles
from skyrl_engine.errors import PluginNotFoundError, UnsupportedError
from skyrl_engine.modeling.exporting import write_pretrained
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.testing.ranks.world import World
from skyrl_engine.workers.launch import WorkerGroup

BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "fsdp": {"use": "fsdp"},
    **{f"deepspeed z{stage}": {"use": "deepspeed", "zero_stage": stage} for stage in range(4)},
    "megatron": {"use": "megatron"},
}
Device = Literal["cpu", "cuda"]
PATIENCE_SECONDS = 1800.0


@frozen
class Size:
    """A tied Qwen3, and a batch for it: `samples` of `shortest` to `longest` tokens in micro-batches of at most `micro_batch_tokens`."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    samples: int
    shortest: int
    longest: int
    micro_batch_tokens: int


SIZES: Mapping[str, Size] = {
    "tiny": Size(2, 64, 128, 4, 2, 16, 128, 6, 8, 40, 96),
    "10m": Size(8, 256, 768, 8, 4, 64, 8192, 8, 64, 512, 1024),
    "0.6b": Size(28, 1024, 3072, 16, 8, 128, 151936, 32, 256, 2048, 4096),
}
DEFAULT_SIZE: Mapping[Device, str] = {"cpu": "10m", "cuda": "0.6b"}


@frozen
class Parity:
    """Differences from float32. `loss` and gradients are relative, log-probabilities in nats.

    `gradient` is ||g - g'|| / ||g'|| over all parameters together, `worst` that of the worst one, `parameter`.
    """

    loss: float
    mean_logprob: float
    largest_logprob: float
    gradient: float
    worst: float
    parameter: str = ""

    def within(self, limit: "Parity") -> bool:
        return all(
            getattr(self, name) <= getattr(limit, name)  # false for NaN
            for name in ("loss", "mean_logprob", "largest_logprob", "gradient", "worst")
        )


TOLERANCES: Mapping[ComputeDtype, Parity] = {
    "bfloat16": Parity(loss=2e-3, mean_logprob=0.05, largest_logprob=0.5, gradient=0.1, worst=0.2),
    "float32": Parity(loss=1e-5, mean_logprob=1e-5, largest_logprob=2e-4, gradient=1e-4, worst=1e-3),
}
"""bfloat16: a few times what rounding to 8 bits was found to make of 8 and of 28 layers on CPU, where transformers' own model and
megatron-core's came out alike; what is summed twice, or not over all ranks, is off by half and more. float32: kernels of another order.
"""


@frozen
class Measured:
    """A backend's cost and distance from float32, or the sentence it is refused with. Seconds of the fastest step; peak in bytes."""

    backend: str
    refused: str = ""
    seconds: float = math.inf
    peak: int | None = None
    parity: Parity | None = None


@frozen
class Setting:
    """Settings that all backends share."""

    device: Device
    dtype: ComputeDtype
    ranks: int
    rounds: int
    steps: int
    logits_per_chunk: int
    directory: Path

    def engine(self, backend: Mapping[str, Any], size: Size, model: Path, world: World) -> tuple[Engine, ClockedTransport]:
        """The backend with the model on the ranks of `world`, ready to step. Raises what setting it up raises."""
        tables = {"loss": {"use": "cross_entropy"}, "collator": {"use": "packed"}, "backend": dict(backend)}
        plugins: Mapping[str, SelectedPlugin] = resolve(from_dict(tables, "benchmark"), need=()).plugins
        context = FactoryContext(seed=0, pad_token_id=0, max_sequence_length=size.longest)
        assembly = Assembly.of(plugins, context, self.ranks)
        model_spec = ModelConfig(str(model), dtype=self.dtype, logits_per_chunk=self.logits_per_chunk)
        spec = assembly.worker_spec(model_spec, STEPPING.settings(), device=self.device)
        transport = ClockedTransport(world, spec)
        group = WorkerGroup(transport, spec.topology)
        layout = assembly.layout(micro_batch_tokens=size.micro_batch_tokens)
        engine = Engine(
            assembly,
            group,
            layout=layout,
            optimizer=STEPPING,
            total_steps=None,
            files=ModelFiles.of(model_spec),
            registry=Registry.discover(),
            generator=None,
        )
        return engine, transport


STEPPING = OptimizerConfig(learning_rate=1e-300)
"""AdamW as it is used, clipping included, with a learning rate below what float32 can add: every step has the same weights to start from."""


class Subject:
    """A backend with the model on ranks of its own."""

    def __init__(self, backend: str, setting: Setting, size: Size, world: World) -> None:
        """Raises UnsupportedError for what the backend does not do."""
        self.name, self._setting, self._world = backend, setting, world
        self._columns = batch(size)
        if setting.device == "cpu":  # what is imported and kept for good is resident too, and belongs to no model
            tiny = SIZES["tiny"]
            engine, _ = setting.engine(BACKENDS[backend], tiny, model_of(tiny, setting.directory), world)
            engine.train(engine.plan(batch(tiny)))
            engine.close()
        self._level = world.run(on_rank.memory)
        self.engine, self._transport = setting.engine(BACKENDS[backend], size, model_of(size, setting.directory), world)
        # Kernels are made, and AdamW's moments.
        self._train()
        world.run(on_rank.give_back_memory)
        world.run(on_rank.forget_peak)

    def turn(self) -> float:
        """Seconds of the fastest of some steps, after one that is not counted where memory must be taken again."""
        fastest = math.inf
        counted = range(self._setting.steps)
        for step in (-1, *counted) if self._setting.device == "cuda" else counted:
            self._transport.wall = self._transport.cpu = 0.0
            self._train()
            if step >= 0:
                fastest = min(fastest, self._transport.wall if self._setting.device == "cuda" else self._transport.cpu)
        if self._setting.device == "cuda":
            self._world.run(on_rank.give_back_memory)  # others have their turn
        return fastest

    def _train(self) -> None:
        self.engine.train(self.engine.plan(self._columns), per_token_outputs=False)

    def peak(self) -> int | None:
        """Bytes of the rank that has taken most, since it was loaded."""
        peaks, levels = self._world.run(on_rank.peak_memory), self._level
        taken = [peak - level for peak, level in zip(peaks, levels, strict=True) if peak is not None and level is not None]
        return max(taken, default=None)

    def score_batch(self) -> BatchOutput:
        """Outputs of a pass whose gradient is kept."""
        return self.engine.forward_backward(self.engine.plan(self._columns)).result().output

    def parity(self, expected: BatchOutput, gradients: Path) -> Parity:
        """Distance from another subject, which scored `expected` and whose gradients are in that file."""
        output = self.score_batch()
        squares = self._world.run(on_rank.gradient_differences, gradients)[0]
        got, wanted = (side.fields["logprobs"].values.astype(np.float64) for side in (output, expected))
        apart = np.abs(got - wanted)
        loss = expected.metrics["loss"].result
        worst, parameter = max((math.sqrt(off / all_of_it), name) for name, (off, all_of_it) in squares.items())
        total, whole = (sum(side) for side in zip(*squares.values(), strict=True))
        return Parity(
            loss=abs(output.metrics["loss"].result - loss) / abs(loss),
            mean_logprob=float(apart.mean()),
            largest_logprob=float(apart.max()),
            gradient=math.sqrt(total / whole),
            worst=worst,
            parameter=parameter,
        )


def batch(size: Size) -> SampleColumns:
    """Samples of lognormal lengths, of which the last half is learned."""
    numbers = np.random.default_rng(1)
    middle = math.sqrt(size.shortest * size.longest)
    lengths = np.clip(numbers.lognormal(np.log(middle), 0.6, size.samples), size.shortest, size.longest).astype(int)
    return SampleColumns.from_lists(
        input_ids=[numbers.integers(1, size.vocabulary, length) for length in lengths],
        num_actions=[int(length) // 2 for length in lengths],
    )


def model_of(size: Size, directory: Path) -> Path:
    """The model as a Hugging Face directory, written once: random weights of the size that keeps hidden states as large as they are, and
    norms that are not 1, because losing one would not show.
    """
    name = directory / f"{size.layers}x{size.hidden}"
    if name.exists():
        return name
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.feed_forward,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.key_heads,
            head_dim=size.head_size,
            max_position_embeddings=size.longest,
            initializer_range=size.hidden**-0.5,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
    write_pretrained(model, name)
    return name


def measure(setting: Setting, size: Size, backends: Sequence[str], *, one_at_a_time: bool = False) -> list[Measured]:
    """Every backend, in the order given."""
    model_of(size, setting.directory)
    say("the reference: fsdp on one rank in float32")
    gradients = setting.directory / "gradients.safetensors"
    with World(1, timeout=PATIENCE_SECONDS, device=setting.device, measured=True) as world:
        alone = evolve(setting, dtype="float32", ranks=1)
        subject = Subject("fsdp", alone, size, world)
        expected = subject.score_batch()
        world.run(on_rank.keep_gradients, gradients)
    measurements: list[Measured] = []
    for together in [[backend] for backend in backends] if one_at_a_time else [list(backends)]:
        with ExitStack() as stack:
            subjects: dict[str, Subject] = {}
            for backend in together:
                refusal = ""
                world = stack.enter_context(World(setting.ranks, timeout=PATIENCE_SECONDS, device=setting.device, measured=True))
                started = time.monotonic()
                try:
                    subjects[backend] = Subject(backend, setting, size, world)
                except (UnsupportedError, PluginNotFoundError) as error:
                    refusal = f"{error.cause}. {error.remedy}."
                    measurements.append(Measured(backend, refusal))
                say(f"{backend}: {refusal or f'ready after {time.monotonic() - started:.0f} s'}")
            seconds = dict.fromkeys(subjects, math.inf)
            for number in range(1, setting.rounds + 1):
                for backend, subject in subjects.items():
                    seconds[backend] = min(seconds[backend], subject.turn())
                say(f"round {number} of {setting.rounds}: " + ", ".join(f"{name} {taken:.2f} s" for name, taken in seconds.items()))
            for backend, subject in subjects.items():
                peak = subject.peak()
                measurements.append(Measured(backend, "", seconds[backend], peak, subject.parity(expected, gradients)))
                say(f"{backend}: {measurements[-1].parity}")
    return sorted(measurements, key=lambda measurement: list(backends).index(measurement.backend))


def say(line: str) -> None:
    """Progress, next to the table and not in it."""
    print(line, file=sys.stderr, flush=True)


def table(found: Sequence[Measured], setting: Setting, tokens: int) -> str:
    """Markdown, a row per backend. Speeds are those of real tokens, as a ratio to the first backend's and on CUDA as they are."""
    cuda = setting.device == "cuda"
    heads = ["backend", *(["tokens/s"] if cuda else []), "speed", "peak memory, MiB", "loss", "log-probability, mean", "largest"]
    heads += ["gradient", "worst parameter's", "within"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    limit = TOLERANCES[setting.dtype]
    first = next((measurement.seconds for measurement in found if not measurement.refused), math.nan)
    for measurement in found:
        if measurement.parity is None:
            continue
        cells = [
            measurement.backend,
            *([f"{tokens / measurement.seconds:.0f}"] if cuda else []),
            f"{first / measurement.seconds:.2f}",
        ]
        cells.append("not told here" if measurement.peak is None else f"{measurement.peak / 2**20:.0f}")
        cells += _cells(measurement.parity)
        lines.append(f"| {' | '.join([*cells, 'yes' if measurement.parity.within(limit) else '**no**'])} |")
    blank = [""] * (2 + cuda)
    lines.append(f"| {' | '.join(['tolerance', *blank, *_cells(limit), ''])} |")
    refused = [f"- {measurement.backend}: {measurement.refused}" for measurement in found if measurement.refused]
    return "\n".join([*lines, *(["", "Refused, in these words:", "", *refused] if refused else [])])


def _cells(parity: Parity) -> list[str]:
    return [f"{value:.1e}" for value in (parity.loss, parity.mean_logprob, parity.largest_logprob, parity.gradient, parity.worst)]


def describe(setting: Setting, size: Size, names: Sequence[str]) -> str:
    """Machine, versions, model and batch. `names` are the ranks' CUDA devices, empty ones on CPU."""
    devices = f"{len(names)} x {names[0]} (CUDA {torch.version.cuda}), beside " if setting.device == "cuda" else ""
    versions = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "deepspeed", "megatron-core"))
    model = model_of(size, setting.directory) / "model.safetensors"
    columns = batch(size)
    return (
        f"Machine: {devices}{machine()}; {setting.ranks} rank{'s' if setting.ranks > 1 else ''}"
        f"{'' if setting.device == 'cuda' else ', one thread each'}. Versions: {versions}.\n\n"
        f"Model: a tied Qwen3 of {model.stat().st_size / 4e6:.1f}M parameters ({size.layers} layers of {size.hidden}, vocabulary "
        f"{size.vocabulary}), computing in {setting.dtype}. Batch: {len(columns)} samples, {len(columns.input_ids)} tokens of which "
        f"{np.count_nonzero(columns.loss_weight)} are scored, packed into micro-batches of {size.micro_batch_tokens} tokens. "
        f"{setting.rounds} rounds of {setting.steps} steps."
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def put_into(page: str, device: Device, text: str) -> str:
    """The page with `text` as what was generated for this kind of device. Raises ValueError where it has no place for it."""
    begin, end = f"<!-- generated for {device} -->\n", f"<!-- end of {device} -->\n"
    head, middle, rest = page.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (middle and closed):
        raise ValueError(f"the page has no lines {begin.strip()} and {end.strip()}")
    return head + begin + "\n" + text.strip() + "\n\n" + end + tail


@contextmanager
def temporary_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="skyrl-engine-side-by-side-") as name:
        yield Path(name)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: CUDA where torch sees a device")
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="bfloat16", help="precision that computes")
    parser.add_argument(
        "--size", choices=list(SIZES), help=f"of model and batch; on CPU {DEFAULT_SIZE['cpu']}, on CUDA {DEFAULT_SIZE['cuda']}"
    )
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of each backend; on CUDA a device each")
    parser.add_argument("--rounds", type=int, default=5, help="how often each backend has its turn")
    parser.add_argument("--steps", type=int, default=2, help="counted steps of a turn")
    parser.add_argument(
        "--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS), help="speeds are ratios to the first"
    )
    parser.add_argument(
        "--logits-per-chunk", type=int, default=ModelConfig("unused").logits_per_chunk, help="as model.logits_per_chunk of a run"
    )
    parser.add_argument(
        "--one-at-a-time", action="store_true", help="end each backend before the next, where memory does not hold all"
    )
    parser.add_argument("--page", type=Path, help="documentation page whose generated part for the device is rewritten")
    options = parser.parse_args(arguments)
    count = torch.cuda.device_count()
    device: Device = options.device if options.device != "auto" else ("cuda" if count else "cpu")
    if device == "cuda" and count < options.ranks:
        parser.error(f"{options.ranks} ranks need as many CUDA devices, torch sees {count}: lower --ranks, or say --device cpu")
    if min(options.ranks, options.rounds, options.steps) < 1:
        parser.error("--ranks, --rounds and --steps are at least 1")
    size = SIZES[options.size or DEFAULT_SIZE[device]]
    with temporary_directory() as directory:
        setting = Setting(device, options.dtype, options.ranks, options.rounds, options.steps, options.logits_per_chunk, directory)
        names = [""] * options.ranks
        if device == "cuda":  # asked there, so that no context of this process takes memory of the device
            with World(options.ranks, timeout=PATIENCE_SECONDS, device=device) as world:
                names = world.run(on_rank.device_name)
        results = measure(setting, size, options.backends, one_at_a_time=options.one_at_a_time)
        text = f"{describe(setting, size, names)}\n\n{table(results, setting, len(batch(size).input_ids))}"
    print(text)
    wrong = [
        result.backend for result in results if result.parity is not None and not result.parity.within(TOLERANCES[setting.dtype])
    ]
    if wrong:
        sys.exit(f"outside of the tolerance{', not written' if options.page else ''}: {', '.join(wrong)}")
    if options.page:
        options.page.write_text(put_into(options.page.read_text(), device, text))


if __name__ == "__main__":
    main()
