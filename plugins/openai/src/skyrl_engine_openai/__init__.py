"""A generator over OpenAI-compatible endpoints, and judges for rewards: of one attempt, or of the attempts of a group two by two."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_engine_openai.judge import Judge, Judgement
    from skyrl_engine_openai.pairwise import PairwiseJudge

__all__ = ["Judge", "Judgement", "PairwiseJudge"]


def __getattr__(name: str) -> Any:
    # planning imports the package for its entry point, and needs no HTTP client
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skyrl_engine_openai import judge, pairwise

    return getattr(pairwise if name == "PairwiseJudge" else judge, name)
