"""Compile the layers of a decoder: one program for all layers of a class and all lengths of rows, for passes with and without gradients.

Attention stays outside of the programs: it walks over the segments of a row, which differ in every batch. Embeddings, the final norm, heads and
vision towers are not compiled. A layer keeps its modules, so names of parameters, hooks and sharding are those of the model without.
"""

import logging
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch._dynamo
from attrs import define
from torch import Tensor, nn
from torch._dynamo.eval_frame import is_dynamo_supported
from torch.utils._pytree import tree_map_only

from skyrl_engine.errors import EngineError, ModelError, UnsupportedError
from skyrl_engine.modeling.causal_lm import transformer_layers
from skyrl_engine.modeling.dropout import drops_at_random
from skyrl_engine.modeling.vision import ImageDecoder

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

PROGRAMS: Final = 32
"""Most programs of one piece of code. They differ by the form of rows, dropout, adapters on or off, and the model; never by lengths of rows."""

_WITHOUT: Final = "Set model.compile = false"


def refuse_without_compiler(device: str) -> None:
    """Raises UnsupportedError where torch.compile cannot make programs for `device` ("cpu", "cuda:0") on this machine, with the remedy."""
    if not is_dynamo_supported():
        raise UnsupportedError(
            "model.compile = true, and torch.compile does not support this version of Python",
            remedy=f"Use a Python that torch {torch.__version__} compiles for, or set model.compile = false",
        )
    if device.startswith("cuda"):
        from torch.utils._triton import has_triton_package

        if not has_triton_package():
            raise UnsupportedError(
                "model.compile = true, and torch.compile needs Triton for CUDA devices, which is not installed",
                remedy="Run pip install triton, or set model.compile = false",
            )
        return
    if (cause := _find_missing_tool()) is not None:
        raise UnsupportedError(
            f"model.compile = true, and torch.compile makes programs for the CPU with a C++ compiler: {cause}",
            remedy="Install g++ and the header files of Python (on Debian and Ubuntu: apt install g++ python3-dev), "
            "or set model.compile = false",
        )


def _find_missing_tool() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # noqa: BLE001 - it searches by running what the environment names
        return f"there is none ({str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__})"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "it needs Python.h, which is not installed"
    return None


def refuse_incompilable(model: Any, decoder: nn.Module, name: str) -> None:
    """Raises UnsupportedError for models that no test shows to be the same compiled: mixtures of experts, models of images, unknown layers."""
    if isinstance(decoder, ImageDecoder):
        raise UnsupportedError(f"{name} takes images, and models that do are not compiled", remedy=_WITHOUT)
    if not transformer_layers(decoder):
        raise UnsupportedError(f"{name} ({type(model).__name__}) does not say where its layers are", remedy=_WITHOUT)
    text = model.config.get_text_config(decoder=True)
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if getattr(text, key, None):
            raise UnsupportedError(
                f"{name} is a mixture of experts, whose routers are not compiled: no test shows that they compute the same",
                remedy=_WITHOUT,
            )


def compile_layers(model: Any, decoder: nn.Module, name: str) -> None:
    """Let every layer of `decoder`, a part of a transformers `model`, run as a compiled program. Raises what `refuse_incompilable` raises."""
    refuse_incompilable(model, decoder, name)
    compile_forwards(transformer_layers(decoder), name, drops=drops_at_random(model))


def compile_forwards(
    layers: Iterable[nn.Module], name: str, *, drops: bool, forward: "type[CompiledForward] | None" = None
) -> None:
    """Let layers run as compiled programs from their first pass on, in place, by a `CompiledForward` each, or a subclass of it.

    `name` is the model's in errors. From now on this process raises an error where torch would go on without a program because it made too
    many (`PROGRAMS`).
    """
    CLOCK.start()
    torch._dynamo.config.recompile_limit = PROGRAMS  # noqa: SLF001 - torch's own name for it
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # noqa: SLF001 - as above
    for layer in layers:
        layer.forward = (forward or CompiledForward)(layer, _program(_own_forward(layer)), name, drops=drops)


def outside(function: Function) -> Function:
    """Return a function that does the same, and runs between programs, as it is."""
    called: Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call] # torch leaves it untyped
    return called


def _own_forward(layer: nn.Module) -> Callable[..., Any]:
    """Return the forward function of the layer's class without transformers' wrapper that recomputes it: `CompiledForward` does that."""
    forward: Any = type(layer).forward
    while forward.__code__.co_name == "forward_with_checkpointing":
        forward = forward.__wrapped__
    own: Callable[..., Any] = forward
    return own


@cache
def _program(forward: Callable[..., Any]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        # torch's compiler warns of its own imports
        warnings.simplefilter("ignore")
        return torch.compile(forward, dynamic=True)


@define(eq=False, slots=False)
class CompiledForward:
    """A layer's `forward`; `drops` says that the model has dropout, `name` is the model's.

    A pass without gradients runs the program of training and keeps nothing of it after the layer. The two passes have the same bits, so that
    the first importance ratio of reinforcement learning is 1. A model with dropout is the exception: its programs without and with it are two.
    """

    layer: nn.Module
    program: Callable[..., Any]
    name: str
    drops: bool

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return what the layer's own forward returns; its first input are hidden states. Raises ModelError where no program can be made."""
        hidden, *others = inputs
        learns = torch.is_grad_enabled()
        if not self.drops and not self.layer.training:
            # the layers' code reads it for dropout alone, and a program is of one mode
            self.layer.train()
        # hidden states that nothing learned comes before, such as those of a frozen embedding, would ask for a program of their own
        if not learns or not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        with self._naming_failures(), torch.enable_grad():
            run: Callable[..., Any] = partial(self.program, self.layer, **options)
            if getattr(self.layer, "gradient_checkpointing", False) and self.layer.training:
                recompute: Any = self.layer._gradient_checkpointing_func  # noqa: SLF001 - transformers sets it
                run = partial(recompute, run)
            output = run(hidden, *others)
        return output if learns else tree_map_only(Tensor, Tensor.detach, output)

    @contextmanager
    def _naming_failures(self) -> Iterator[None]:
        try:
            yield
        except EngineError:
            raise
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:  # noqa: SLF001 - torch's own name for it
            raise ModelError(
                f"the layers of {self.name} need more than {PROGRAMS} compiled programs: they depend on numbers of a batch",
                remedy=_WITHOUT,
            ) from error
        except torch._dynamo.exc.TorchDynamoException as error:  # noqa: SLF001 - as above
            lines = [line for line in str(error).splitlines() if line.strip() and not line.endswith("raised:")]
            raise ModelError(
                f"the layers of {self.name} ({type(self.layer).__name__}) cannot be compiled: {lines[0] if lines else type(error).__name__}",
                remedy=_WITHOUT,
            ) from error


class CompileClock:
    """Counts the seconds in which this process makes programs, of forward and of backward passes.

    Warnings of torch about its own code are hidden meanwhile: they say nothing of the model.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None
        self._lock = threading.Lock()
        self._runs = False
        self._hidden = warnings.catch_warnings()

    def start(self) -> None:
        """Count from now on; a second call changes nothing."""
        from torch._dynamo.callback import callback_handler

        with self._lock:
            if self._runs:
                return
            self._runs = True
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def drain(self) -> float:
        """Return the seconds since the last call. Says in the log how long it took."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        if seconds:
            logger.info("compiled the model's layers in %.1f s, as part of this pass; later passes use these programs", seconds)
        return seconds

    def _begin(self, _: object) -> None:
        with self._lock:
            self._since = time.perf_counter()
        self._hidden = warnings.catch_warnings()
        self._hidden.__enter__()
        warnings.simplefilter("ignore")

    def _end(self, _: object) -> None:
        self._hidden.__exit__(None, None, None)
        with self._lock:
            if self._since is not None:
                self._seconds += time.perf_counter() - self._since
                self._since = None


CLOCK: Final = CompileClock()
"""The clock of this process."""
