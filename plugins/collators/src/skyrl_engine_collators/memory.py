"""Memory for builds that were given none."""

import numpy as np

from skyrl_engine.contracts import AnyArray


class FreshMemory:
    """Buffers that are new each time."""

    def empty(self, name: str, shape: tuple[int, ...], dtype: str) -> AnyArray:  # noqa: ARG002 the protocol's name
        return np.empty(shape, dtype=dtype)
