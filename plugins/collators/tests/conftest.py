"""Tests that run once on each engine."""

import pytest

from skyrl_engine_collators import kernels


@pytest.fixture(scope="module", params=["numpy", "native"])
def engine(request):
    """Builds of the module's tests run on this engine. Without compiled kernels those tests are skipped, and listed."""
    if request.param == "native":
        try:
            kernels.load()
        except ImportError as problem:
            pytest.skip(f"no compiled kernels ({problem}); install plugins/collators where there is a C compiler")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(kernels.VARIABLE, request.param)
        yield request.param
