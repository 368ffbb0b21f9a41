"""A backend on one rank, held between calls and driven through its contract alone; `testing.backends.ranks` calls it on all ranks."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy.typing as npt
from attrs import evolve, frozen

from skyrl_engine.config import SelectedPlugin
from skyrl_engine.contracts.kinds.backend import (
    Backend,
    HasAdapterSets,
    KeepsAverages,
    Offloads,
    OptimStep,
    RankEnvironment,
    RoundsWeights,
    SharesStorage,
    StagesSaves,
    SwitchesAdapters,
    as_optim_step,
    iterate_named_tensors,
)
from skyrl_engine.contracts.kinds.optimizer_settings import OptimizerSettings
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.outputs import PADDING_SAMPLE, RankOutput, as_rank_output
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.contracts.values.topology import RankCoords, Topology
from skyrl_engine.errors import ContractError, EngineError
from skyrl_engine.modeling.tiny import VOCABULARY
from skyrl_engine.testing.ranks.held import call_held, hold, let_go
from skyrl_engine.testing.subject import CONTEXT
from skyrl_engine.workers.staged_save import StagedSave

Arrays = dict[str, npt.NDArray[Any]]
Cut = tuple[tuple[tuple[int, ...], ...], ...]
"""Document numbers by data-parallel rank and micro-batch; every rank has equally many micro-batches, some of them perhaps without any."""

SEED = CONTEXT.seed


@frozen
class Opening:
    """The arguments of a backend's setup. `lock` is the plugin's, so that another process loads the same plugin; `teacher` is a second model
    that the same plugin loads, for scores that compare with one. `seed` is the run's. With `counts_bytes`, ranks count tensors before setup.
    """

    lock: Mapping[str, Any]
    topology: Topology
    model: ModelConfig
    optimizer: OptimizerSettings | None
    device: str
    announced_rows: RowKind = "padded"
    teacher: ModelConfig | None = None
    seed: int = SEED
    counts_bytes: bool = False


@frozen
class PassOrder:
    """One call of forward or forward_backward. Documents in `unscored` carry no loss; `pictures` are theirs, None for text.

    With `many` the documents are those of `many_documents`, with `branching` those of `branching_documents`. With `other_labels` other ids than
    the tokens that follow are scored, those of the candidates `other`. With `noise` input embeddings get noise.

    The other fields are those of WeightedObjective.
    """

    cut: Cut
    rows: RowKind = "padded"
    unscored: tuple[int, ...] = ()
    scale: float = 1.0
    temperature: float = 1.0
    needs: tuple[str, ...] = ("logprobs", "entropy")
    per_token_outputs: bool = True
    pictures: Literal["own", "negated", "swapped", "missing"] | None = None
    many: bool = False
    branching: bool = False
    other_labels: bool = False
    noise: bool = False


@frozen
class Answer:
    """The answer of a rank: a value, an EngineError, or the last line and traceback of any other error.

    `wrong_device` says what mixed devices, where that is why it failed.
    """

    value: Any = None
    error: EngineError | None = None
    failure: str | None = None
    trace: str = ""
    wrong_device: str | None = None


class HeldBackend:
    """The backend of one rank; arguments and results can be sent between processes."""

    label = "the backend"
    """The name in errors."""

    def __init__(self, opening: Opening, rank: int) -> None:
        from skyrl_engine.workers.process_group import join
        from skyrl_engine.workers.worker import seed_everything

        size = opening.topology.world_size
        self._owns_group = join(rank, size, opening.device, None)
        seed_everything(opening.seed + rank)
        self._coords = opening.topology.coords(rank)
        self._backend: Backend | None = None
        self._shown: Mapping[str, Any] | None = None
        self._teacher: Any = None
        self._further: dict[int, HeldBackend] = {}
        self._bytes_before = _count_live_bytes() if opening.counts_bytes else 0
        environment = self.environment = RankEnvironment(rank, size, opening.device, opening.seed, opening.announced_rows)
        try:
            plugin = SelectedPlugin.from_lock(opening.lock)
            self.label = str(plugin.loaded.record)
            self._backend = plugin.make(CONTEXT)
            self._backend.setup(opening.model, opening.optimizer, environment)
            if opening.teacher is not None:
                self._teacher = plugin.make(CONTEXT)
                self._teacher.setup(opening.teacher, None, environment)
        except BaseException:
            self.close()
            raise

    @property
    def backend(self) -> Backend:
        assert self._backend is not None, "closed"
        return self._backend

    def coords(self) -> RankCoords:
        return self.backend.coords

    def count_bytes(self) -> int:
        """Count the bytes of tensors that are there since before setup."""
        return _count_live_bytes() - self._bytes_before

    def call_further_product(self, kind: str, number: int, method: str, *arguments: Any) -> Any:
        """Do with a further product on this rank what `method` does; `open` sets it up, and `close` frees it."""
        if method == "open":
            self._further[number] = {"adapter set": HeldAdapterSet, "second model": HeldSecondModel}[kind](self, *arguments)
            return None
        held = self._further.pop(number) if method == "close" else self._further[number]
        return getattr(held, method)(*arguments)

    def elsewhere(self, passes: Sequence[tuple[str, PassOrder]]) -> list[list[str]]:
        """Run passes and a step as if everything that is not made on the CPU were on another device.

        Returns by pass what the host waited for, as "what at file:line", but for outputs that were read when all micro-batches had been
        launched. Raises WrongDevice where a tensor of the CPU meets one of the device.
        """
        from skyrl_engine.testing.other_device import SENT_AHEAD, OtherDevice

        waits = []
        with OtherDevice() as device:
            for mode, work in passes:
                device.reads.clear()
                device.note_launch()
                self.run(mode, work, device.note_launch)
                waits.append(
                    [
                        f"{read.what} at {read.where}"
                        for place, read in enumerate(device.reads)
                        if place < device.launched or read.what != SENT_AHEAD
                    ]
                )
            self.backend.optim_step()
        return waits

    def run(
        self, mode: str, work: PassOrder, after_objective: Callable[[], None] = lambda: None
    ) -> tuple[RankOutput, tuple[str, ...]]:
        """Run a pass; return its output, and the names of the scores that the objective was given."""
        from skyrl_engine.testing.backends.batches import (
            EMPTY,
            TERMS,
            WeightedObjective,
            add_noise,
            branching_documents,
            build_packed,
            build_padded,
            build_trees,
            documents,
            drop_pixels,
            many_documents,
            picture_documents,
        )
        from skyrl_engine.workers.teaching import TaughtBatch

        variant, unscored = work.pictures, work.unscored
        sequences = documents(VOCABULARY, unscored=unscored) if variant is None else picture_documents(VOCABULARY, variant)
        if work.many:
            sequences = many_documents()
        if work.branching:
            sequences = branching_documents()
        known = {each.number: each for each in sequences}
        known[PADDING_SAMPLE] = evolve(known[EMPTY], number=PADDING_SAMPLE)
        rows = {"padded": build_padded, "packed": build_packed, "tree": build_trees}[work.rows]
        groups = [[known[number] for number in numbers or (PADDING_SAMPLE,)] for numbers in work.cut[self._coords.dp]]
        batch: Any = [rows(group, len(known))[0] for group in groups]
        if work.other_labels:
            batch = [evolve(each, labels=each.candidates["other"][:, 0]) for each in batch]
        if work.noise:
            batch = [add_noise(each) for each in batch]
        if self._coords.pp > 0:
            batch = [drop_pixels(each) for each in batch]
        if self._teacher is not None:
            batch = TaughtBatch(batch, self._teacher)
        seen: set[str] = set()

        class Objective(WeightedObjective):
            def __call__(self, scores: Any, micro_batch: Any) -> Any:
                seen.update(scores)
                self.needs &= TERMS.keys()  # what no model computes was to be refused before this call
                result = super().__call__(scores, micro_batch)
                after_objective()
                return result

        objective = Objective(
            scale=work.scale, temperature=work.temperature, needs=work.needs, per_token_outputs=work.per_token_outputs
        )
        output = as_rank_output(self.label, mode, getattr(self.backend, mode)(batch, objective))
        return output, tuple(sorted(seen))

    def without_adapters(self, work: PassOrder) -> RankOutput:
        """Score as the base model alone does."""
        with cast("SwitchesAdapters", self.backend).without_adapters():
            return self.run("forward", work)[0]

    def optim_step(self, settings: OptimizerSettings | None) -> OptimStep:
        return as_optim_step(self.label, self.backend.optim_step(settings))

    def zero_grad(self) -> None:
        self.backend.zero_grad()

    def offload(self) -> None:
        if not isinstance(self.backend, Offloads):
            raise ContractError(
                f"{self.label} declares 'offload' and has no methods offload and reload", remedy="Implement contracts.Offloads"
            )
        self.backend.offload()
        self.backend.reload()

    def gradients(self) -> Arrays:
        return {
            name: tensor.numpy().copy() for name, tensor in iterate_named_tensors(self.label, "gradients", self.backend.gradients())
        }

    def weights(self) -> Arrays:
        return {
            name: tensor.detach().numpy().copy()
            for name, tensor in iterate_named_tensors(self.label, "weights", self.backend.weights())
        }

    def weights_in_bfloat16(self) -> Arrays | None:
        """Collect what the backend gives rounded to bfloat16, in float32; None where it gives nothing rounded. Other dtypes are broken."""
        if not isinstance(self.backend, RoundsWeights):
            return None
        import torch

        given = dict(iterate_named_tensors(self.label, "weights_in", self.backend.weights_in(torch.bfloat16)))
        if strange := sorted(name for name, tensor in given.items() if tensor.dtype != torch.bfloat16):
            raise ContractError(
                f"{self.label} gives {strange[0]} in {given[strange[0]].dtype} where weights_in was asked for bfloat16",
                remedy="Round every floating-point tensor to the dtype that weights_in is given",
            )
        return {name: tensor.detach().float().numpy().copy() for name, tensor in given.items()}

    def storage_first(self) -> Arrays | None:
        """Copy what the backend shows as the memory of its weights; None where it shows nothing."""
        self._shown = self.backend.storage() if isinstance(self.backend, SharesStorage) else None
        return self.storage_again()

    def storage_again(self) -> Arrays | None:
        """Copy what is now in the memory that was shown."""
        return None if self._shown is None else {name: tensor.detach().cpu().numpy().copy() for name, tensor in self._shown.items()}

    def save(self, directory: Path) -> None:
        self.backend.save(directory)

    def stage_save(self, directory: Path, begins: bool) -> None:
        """Stage a save, and let a thread begin to write it at once where it `begins`, and else when it is collected."""
        if not isinstance(self.backend, StagesSaves):
            raise ContractError(
                f"{self.label} declares 'asynchronous_saves' and has no method stage_save", remedy="Implement contracts.StagesSaves"
            )
        write = self.backend.stage_save(directory)
        self._begin = partial(StagedSave, self.label, write, directory)
        self._staged = self._begin() if begins else None

    def collect_save(self) -> list[str]:
        """Wait for what was staged; return the names of the files."""
        written = (self._staged or self._begin()).collect(wait=True)
        assert written is not None
        return list(written.files)

    def load(self, directory: Path) -> None:
        self.backend.load(directory)

    def load_averages(self, directory: Path) -> None:
        if not isinstance(self.backend, KeepsAverages):
            raise ContractError(
                f"{self.label} declares 'ema' and has no method load_averages", remedy="Implement contracts.KeepsAverages"
            )
        self.backend.load_averages(directory)

    def export(self, directory: Path) -> None:
        self.backend.export(directory)

    def close(self) -> None:
        from skyrl_engine.workers.process_group import leave

        while self._further:
            self._further.popitem()[1].close()
        if self._teacher is not None:
            self._teacher.close()
            self._teacher = None
        if self._backend is not None:
            self._backend.close()
            self._backend = None
        if self._owns_group:
            self._owns_group = False
            leave()


def _count_live_bytes() -> int:
    from skyrl_engine.testing.backends.live_bytes import count_live_bytes

    return count_live_bytes()


class HeldAdapterSet(HeldBackend):
    """A further set of adapters of one rank."""

    def __init__(self, first: HeldBackend, opening: Opening) -> None:
        assert opening.model.lora is not None, "a set of adapters without adapters"
        assert opening.optimizer is not None, "a set of adapters that does not learn"
        self._owns_group, self._teacher, self._shown = False, None, None
        self._further, self._coords = {}, first.coords()
        self._backend = cast("HasAdapterSets", first.backend).adapter_set(opening.model.lora, opening.optimizer, opening.seed)


class HeldSecondModel(HeldBackend):
    """A further model of one rank, which does not learn."""

    def __init__(self, first: HeldBackend, opening: Opening) -> None:
        self._owns_group, self._teacher, self._shown = False, None, None
        self._further, self._coords = {}, first.coords()
        self._backend = SelectedPlugin.from_lock(opening.lock).make(CONTEXT)
        self._backend.setup(opening.model, None, first.environment)


def on_rank(method: str, *arguments: Any) -> Answer:
    """Call a method of this process' backend; `open` makes it, after closing one that an earlier failure left behind."""
    try:
        if method == "open":
            hold("backend", _open_backend, *arguments)
            return Answer()
        if method == "close":
            let_go("backend")
            return Answer()
        return Answer(call_held("backend", method, *arguments))
    except EngineError as error:
        return Answer(error=error)
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is a finding about it
        lines = f"{type(error).__name__}: {error}".splitlines()
        return Answer(failure=lines[0].rstrip("."), trace=traceback.format_exc(), wrong_device=_find_wrong_device(error))


def _find_wrong_device(error: BaseException | None) -> str | None:
    """Return the message of the `WrongDevice` that an error is, or was raised from or during; None without one."""
    from skyrl_engine.testing.other_device import WrongDevice

    while error is not None:
        if isinstance(error, WrongDevice):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _open_backend(opening: Opening) -> HeldBackend:
    import torch.distributed as dist

    return HeldBackend(opening, dist.get_rank() if dist.is_initialized() else 0)
