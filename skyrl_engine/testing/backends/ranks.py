"""A backend on all ranks of a layout, driven through its contract alone: one rank in this process, several on the ranks of a world.

Nothing of the engine is in between: batches and objective are the kit's. The engine's own workers run on the same ranks by
`testing.ranks.world_transport`; docs/adr/0019 says why there are both.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from attrs import evolve

from skyrl_engine.contracts.kinds.backend import OptimStep
from skyrl_engine.contracts.kinds.optimizer_settings import OptimizerSettings
from skyrl_engine.contracts.values.model import LoraConfig, ModelConfig
from skyrl_engine.contracts.values.outputs import RankOutput
from skyrl_engine.contracts.values.topology import RankCoords
from skyrl_engine.testing.backends.held_backend import Answer, Arrays, Opening, PassOrder


class RankFailed(Exception):  # noqa: N818 - a finding about the backend, reported by the promise that met it
    """A rank raised an error other than EngineError, died, or did not answer."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class RankMixesDevices(RankFailed):
    """A rank failed because it mixed tensors of the CPU with those of another device; `operation` says what did, and where."""

    def __init__(self, cause: str, operation: str) -> None:
        super().__init__(cause)
        self.operation = operation


class BackendRanks:
    """A backend set up on every rank; leaving the context closes it. Methods return a list by rank.

    They raise the EngineError that a rank raised, and RankFailed for any other failure.
    """

    def __init__(self, call: Callable[..., Sequence[Answer]], opening: Opening) -> None:
        self._call, self._opening = call, opening
        self._further = 0
        self.topology = opening.topology
        self._ask("open", opening)

    def adapter_set(self, lora: LoraConfig, seed: int) -> "BackendRanks":
        """Set up a further set of adapters on the same ranks; leaving its context frees it."""
        return self._with("adapter set", evolve(self._opening, model=evolve(self._opening.model, lora=lora), seed=seed))

    def second_model(self, path: str) -> "BackendRanks":
        """Set up a further product of the plugin on the same ranks, which does not learn; leaving its context frees it."""
        return self._with("second model", evolve(self._opening, model=ModelConfig(path), optimizer=None))

    def _with(self, kind: str, opening: Opening) -> "BackendRanks":
        number = self._further
        self._further += 1
        return BackendRanks(lambda *call: self._call("call_further_product", kind, number, *call), opening)

    def coords(self) -> list[RankCoords]:
        return self._ask("coords")

    def forward(self, work: PassOrder) -> list[RankOutput]:
        return [output for output, _ in self._ask("run", "forward", work)]

    def forward_backward(self, work: PassOrder) -> list[RankOutput]:
        return [output for output, _ in self._ask("run", "forward_backward", work)]

    def forward_without_adapters(self, work: PassOrder) -> list[RankOutput]:
        return self._ask("without_adapters", work)

    def collect_requested_scores(self, work: PassOrder) -> list[tuple[str, ...]]:
        """Return the names of the scores that objectives got in a forward_backward, by rank."""
        return [names for _, names in self._ask("run", "forward_backward", work)]

    def count_bytes(self) -> list[int]:
        """Count the bytes of tensors of every rank that came since before setup, of ranks that were opened with `counts_bytes`."""
        return self._ask("count_bytes")

    def elsewhere(self, passes: Sequence[tuple[str, PassOrder]]) -> list[list[list[str]]]:
        """Run these passes and a step on a device that is not the CPU; return what the host waited for, by rank and pass."""
        return self._ask("elsewhere", passes)

    def optim_step(self, settings: OptimizerSettings | None = None) -> list[OptimStep]:
        return self._ask("optim_step", settings)

    def zero_grad(self) -> None:
        self._ask("zero_grad")

    def offload(self) -> None:
        """Let every rank leave its device and return."""
        self._ask("offload")

    def gradients(self) -> list[Arrays]:
        return self._ask("gradients")

    def weights(self) -> list[Arrays]:
        return self._ask("weights")

    def weights_in_bfloat16(self) -> list[Arrays | None]:
        return self._ask("weights_in_bfloat16")

    def storage(self, *, again: bool = False) -> list[Arrays | None]:
        return self._ask("storage_again" if again else "storage_first")

    def save(self, directory: Path) -> None:
        self._ask("save", directory)

    def stage_save(self, directory: Path, *, begins: bool) -> None:
        """Stage a save on every rank; threads begin to write it at once where it `begins`, and else when it is collected."""
        self._ask("stage_save", directory, begins)

    def collect_save(self) -> list[list[str]]:
        """Wait for what was staged; return the names of the files by rank."""
        return self._ask("collect_save")

    def load(self, directory: Path) -> None:
        self._ask("load", directory)

    def load_averages(self, directory: Path) -> None:
        self._ask("load_averages", directory)

    def export(self, directory: Path) -> None:
        self._ask("export", directory)

    def loss(self, outputs: Sequence[RankOutput]) -> float:
        """Return the objective over all ranks: the sum of the metric "loss" over collected outputs, so that no replica counts twice."""
        coords = (self.topology.coords(rank) for rank in range(self.topology.world_size))
        collected = (output for output, rank_coords in zip(outputs, coords, strict=True) if rank_coords.collects)
        return sum(output.metrics["loss"].value for output in collected if "loss" in output.metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._ask("close")
        elif not issubclass(kind, RankFailed):  # ranks that hang would not hear it; `open` clears what is left
            self._call("close")

    def _ask(self, method: str, *arguments: Any) -> list[Any]:
        what = arguments[0] if method == "run" else "setup" if method == "open" else method
        answers = self._call(method, *arguments)
        for rank, answer in enumerate(answers):
            if answer.failure is not None:
                cause = f"rank {rank} fails in {what}: {answer.failure}"
                raise RankFailed(cause) if answer.wrong_device is None else RankMixesDevices(cause, answer.wrong_device)
        refused = [rank for rank, answer in enumerate(answers) if answer.error is not None]
        if refused and len(refused) < len(answers):
            raise RankFailed(
                f"rank {refused[0]} raises an error in {what} that others do not: {answers[refused[0]].error.cause}"  # type: ignore[union-attr] # it did
            )
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return [answer.value for answer in answers]
