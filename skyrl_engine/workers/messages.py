"""Messages from the controller to ranks: a message is one class, which holds the arguments and runs on the rank.

    group.ask(Save(directory))              # on every rank, waiting for all
    group.send(StepOptimizer(settings))     # a future of the replies, by rank

A transport carries messages and nothing else (`workers.launch.Transport`), so a message that does not exist, or with other fields, is an
error of the type checker. Messages and replies travel between processes by pickle.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from attrs import evolve, frozen

from skyrl_engine.contracts.kinds.backend import iterate_named_tensors
from skyrl_engine.contracts.kinds.generator import Completion, GenerationRequest
from skyrl_engine.contracts.kinds.optimizer_settings import OptimizerSettings
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.workers.listing import FileFacts, sum_files

if TYPE_CHECKING:
    from skyrl_engine.workers.dispatch import Shard
    from skyrl_engine.workers.sampler_facts import SamplerFacts
    from skyrl_engine.workers.spec import WorkerSpec
    from skyrl_engine.workers.staged_save import WrittenFiles
    from skyrl_engine.workers.worker import Pass, RankReply, StepReply, Worker

Reply = TypeVar("Reply")


class Message(ABC, Generic[Reply]):
    """An order to a rank. `verb` names it where a rank fails or dies in it: "rank 1 failed in save"."""

    verb: ClassVar[str]

    @abstractmethod
    def answer(self, rank: "Worker") -> Reply:
        """Do what the message says, on a rank, and return its reply. Raises what the rank raises."""

    @property
    def shard(self) -> Any:
        """The transport's reference to a shard, which it may send apart; None of a message without one."""
        return None

    def with_shard(self, shard: Any) -> Self:  # noqa: ARG002 - for messages that have one
        """Return the message with `shard` in the place of its own; a message without one stays as it is."""
        return self


@frozen
class RunPass(Message["RankReply"]):
    """Run a pass over a shard: a reference to it under way, the shard itself on the rank."""

    work: "Pass"
    shard: "Shard | Any"
    verb = "run"

    def with_shard(self, shard: "Shard | Any") -> Self:
        return evolve(self, shard=shard)

    def answer(self, rank: "Worker") -> "RankReply":
        return rank.run(self.work, self.shard)


@frozen
class StepOptimizer(Message["StepReply"]):
    """Apply the accumulated gradient with these numbers; None: those the ranks were started with."""

    settings: OptimizerSettings | None = None
    verb = "optim_step"

    def answer(self, rank: "Worker") -> "StepReply":
        return rank.step_optimizer(self.settings)


@frozen
class DropGradient(Message[None]):
    """Drop the accumulated gradient."""

    verb = "zero_grad"

    def answer(self, rank: "Worker") -> None:
        rank.backend.zero_grad()


@frozen
class GatherGradients(Message[dict[str, np.ndarray]]):
    """Gather the accumulated gradient by parameter name, float32 or float64, summed over ranks; nothing on ranks other than 0.

    Every rank takes part in gathering it, and it is as large as the model: only one copy is kept and sent. It is a copy: the backend goes on
    with the memory that it showed.
    """

    verb = "gradients"

    def answer(self, rank: "Worker") -> dict[str, np.ndarray]:
        gathered = iterate_named_tensors(rank.backend_label, "gradients", rank.backend.gradients())
        return {name: tensor.numpy().copy() for name, tensor in gathered if rank.number == 0}


@frozen
class GatherWeights(Message[dict[str, np.ndarray]]):
    """Gather the weights by parameter name, float32 or float64, as copies; nothing on ranks other than 0. Every rank takes part."""

    verb = "weights"

    def answer(self, rank: "Worker") -> dict[str, np.ndarray]:
        import torch

        gathered = iterate_named_tensors(rank.backend_label, "weights", rank.backend.weights())
        return {
            # NumPy has no bfloat16
            name: tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).numpy().copy()
            for name, tensor in gathered
            if rank.number == 0
        }


@frozen
class UsePlugins(Message[None]):
    """Use the collator and the objective of these locks from now on; the model stays loaded."""

    plugins: Mapping[str, Mapping[str, Any]]
    verb = "use"

    def answer(self, rank: "Worker") -> None:
        rank.use_plugins(self.plugins)


@frozen
class AddFrozenModel(Message[None]):
    """Load a further model that scores and is never trained; None: the trained one without its adapters."""

    name: str
    model: ModelConfig | None
    verb = "add_frozen"

    def answer(self, rank: "Worker") -> None:
        rank.frozen.add(self.name, self.model)


@frozen
class AddAdapterSet(Message[None]):
    """Train a further adapter set, `spec.model.lora`, over the frozen weights; `ForAdapterSet` reaches it by its number."""

    number: int
    spec: "WorkerSpec"
    verb = "add_adapter_set"

    def answer(self, rank: "Worker") -> None:
        rank.open_adapter_set(self.number, self.spec)


@frozen
class DropAdapterSet(Message[None]):
    """Free a further adapter set."""

    number: int
    verb = "drop_adapter_set"

    def answer(self, rank: "Worker") -> None:
        rank.drop_adapter_set(self.number)


@frozen
class ForAdapterSet(Message[Reply]):
    """A message for a further adapter set of the rank."""

    number: int
    message: Message[Reply]

    @property
    def verb(self) -> str:  # type: ignore[override] # that of what is sent
        return self.message.verb

    @property
    def shard(self) -> Any:
        return self.message.shard

    def with_shard(self, shard: Any) -> Self:
        return evolve(self, message=self.message.with_shard(shard))

    def answer(self, rank: "Worker") -> Reply:
        return self.message.answer(rank.adapter_sets[self.number])


@frozen
class StartGenerator(Message[None]):
    """Make the generator of a lock with the weights as they are, those of `version`, after closing the one before."""

    lock: Mapping[str, Any]
    facts: "SamplerFacts"
    version: int
    verb = "start_generator"

    def answer(self, rank: "Worker") -> None:
        rank.make_generator(self.lock, self.facts, self.version)


@frozen
class SubmitRequests(Message[None]):
    """Hand requests to the rank's generator."""

    requests: Sequence[GenerationRequest]
    verb = "submit"

    def answer(self, rank: "Worker") -> None:
        if self.requests:
            rank.generator.submit(self.requests)


@frozen
class PollCompletions(Message[list[Completion]]):
    """Sample for `timeout` seconds at most; `eager` as in `RankGenerator.poll`."""

    timeout: float
    eager: bool
    verb = "poll"

    def answer(self, rank: "Worker") -> list[Completion]:
        with rank.spans("generate"):
            return rank.generator.poll(self.timeout, eager=self.eager)


@frozen
class EndSessions(Message[None]):
    """Let generators free what they keep of sessions, on whatever rank they are."""

    sessions: Sequence[int]
    verb = "end_sessions"

    def answer(self, rank: "Worker") -> None:
        rank.generator.end_sessions(self.sessions)


@frozen
class AbortRequests(Message[None]):
    """End requests (None: all) on whatever rank they are."""

    request_ids: Sequence[int] | None = None
    verb = "abort"

    def answer(self, rank: "Worker") -> None:
        rank.generator.abort(self.request_ids)


@frozen
class PublishWeights(Message[None]):
    """Give the generators the present weights, as those of `target`; every rank takes part."""

    version: int
    target: str
    verb = "update_generator"

    def answer(self, rank: "Worker") -> None:
        with rank.spans("publish"):
            rank.generator.update(self.version, self.target)


@frozen
class LoadTarget(Message[None]):
    """Give the generators weights in files, as those of `target`."""

    model: ModelConfig
    version: int
    target: str
    verb = "load_target"

    def answer(self, rank: "Worker") -> None:
        with rank.spans("publish"):
            rank.generator.load(self.model, self.version, self.target)


@frozen
class ReleaseTarget(Message[None]):
    """Drop a weight set of the generators."""

    target: str
    verb = "release_target"

    def answer(self, rank: "Worker") -> None:
        rank.generator.release(self.target)


@frozen
class CloseGenerator(Message[None]):
    """End the generators; the model stays."""

    verb = "close_generator"

    def answer(self, rank: "Worker") -> None:
        rank.end_generator()


@frozen
class WriteWeights(Message[None]):
    """Write full weights, adapters merged and in the precision of the run, as safetensors files into an existing directory.

    Every rank takes part, rank 0 writes.
    """

    directory: Path
    verb = "write_weights"

    def answer(self, rank: "Worker") -> None:
        from skyrl_engine.workers.weight_files import write_weights
        from skyrl_engine.workers.wire_weights import iterate_wire_weights

        with rank.spans("publish"):
            weights = iterate_wire_weights(rank.backend_label, rank.backend, rank.dtype)
            write_weights(self.directory, weights, writes=rank.number == 0)


@frozen
class LeaveDevice(Message[None]):
    """Move what lies on the device to host memory, until `ReturnToDevice`."""

    verb = "offload"

    def answer(self, rank: "Worker") -> None:
        rank.leave_device()


@frozen
class ReturnToDevice(Message[None]):
    """Move it back."""

    verb = "reload"

    def answer(self, rank: "Worker") -> None:
        rank.return_to_device()


@frozen
class BeginProfile(Message[None]):
    """Record with torch's profiler what every rank does, until `EndProfile`; `path` begins the names of the files, the rank follows."""

    path: Path
    memory: bool
    verb = "begin_profile"

    def answer(self, rank: "Worker") -> None:
        rank.begin_profile(self.path, memory=self.memory)


@frozen
class EndProfile(Message[None]):
    """Write what was recorded."""

    verb = "end_profile"

    def answer(self, rank: "Worker") -> None:
        rank.end_profile()


@frozen
class Save(Message[None]):
    """Write the training state of every rank into an existing directory."""

    directory: Path
    verb = "save"

    def answer(self, rank: "Worker") -> None:
        rank.backend.save(self.directory)


@frozen
class StageSave(Message[None]):
    """Copy the training state of every rank, and begin to write the copy into an existing directory."""

    directory: Path
    verb = "save"

    def answer(self, rank: "Worker") -> None:
        rank.stage_save(self.directory)


@frozen
class CollectSave(Message["WrittenFiles | None"]):
    """Return the files that a rank wrote of what it staged; None while it writes, unless it is to `wait`."""

    wait: bool
    verb = "save"

    def answer(self, rank: "Worker") -> "WrittenFiles | None":
        return rank.collect_save(wait=self.wait)


@frozen
class SumFiles(Message[dict[str, FileFacts]]):
    """Return sizes and SHA-256 sums of some of the files that ranks wrote."""

    directory: Path
    names: tuple[str, ...]
    verb = "list_files"

    def answer(self, rank: "Worker") -> dict[str, FileFacts]:  # noqa: ARG002 - files are the same for every rank
        return sum_files(self.directory, self.names)


@frozen
class Load(Message[None]):
    """Restore what `Save` wrote."""

    directory: Path
    verb = "load"

    def answer(self, rank: "Worker") -> None:
        rank.backend.load(self.directory)


@frozen
class LoadAverages(Message[None]):
    """Restore what `Save` wrote, with the averages of weights in the place of these."""

    directory: Path
    verb = "load_averages"

    def answer(self, rank: "Worker") -> None:
        rank.load_averages(self.directory)


@frozen
class Export(Message[None]):
    """Write the weights as a Hugging Face directory."""

    directory: Path
    verb = "export"

    def answer(self, rank: "Worker") -> None:
        rank.backend.export(self.directory)
