"""Detection of collectives in code that must not call any: ranks have other numbers of tokens, and some have none, so ranks would wait."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed
from torch.utils._python_dispatch import TorchDispatchMode


class CollectiveCalled(RuntimeError):  # noqa: N818 - named after what was done
    """Code called a collective where it must not."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would import torch's compiler, which takes six seconds, to keep it out of the method below."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise CollectiveCalled(f"calls the collective {func._opname}")  # noqa: SLF001 - the only short name that there is
        call: Callable[..., Any] = func
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - modes saw the function that called this operator
            return call(*args, **(kwargs or {}))


@contextmanager
def no_collectives() -> Iterator[None]:
    """Raise CollectiveCalled at a collective. Where no process group is there, one of two ranks that does nothing stands in for it."""
    alone = torch.distributed.is_available() and not torch.distributed.is_initialized()
    if alone:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with _Watch():  # type: ignore[no-untyped-call]  # of torch
            yield
    finally:
        if alone:
            torch.distributed.destroy_process_group()
