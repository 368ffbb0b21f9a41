"""A generator over OpenAI-compatible endpoints, and a judge for rewards."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_engine_openai.judge import Judge, Judgement

__all__ = ["Judge", "Judgement"]


def __getattr__(name: str) -> Any:
    # planning imports the package for its entry point, and needs no HTTP client
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skyrl_engine_openai import judge

    return getattr(judge, name)
