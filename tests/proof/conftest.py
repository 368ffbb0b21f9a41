"""Models of two families, pools of ranks over them, and configurations by loss and reducer."""

from collections.abc import Callable, Iterator

import pytest

from skyrl_engine.config import ResolvedConfig, from_dict, resolve
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.modeling.tiny import Family, make_parts_differ, write_model
from skyrl_engine.proof.ranks import RankPool

Configure = Callable[..., dict[str, ResolvedConfig]]
FAMILIES: tuple[Family, ...] = ("qwen3", "llama")


def configure_run(**tables: dict[str, object]) -> dict[str, ResolvedConfig]:
    """`configure_run(loss={"use": "ppo"})`: the configuration with every form of rows."""
    return {
        collator: resolve(from_dict({**tables, "collator": {"use": collator}}, "test"), need=())
        for collator in ("padded", "packed", "tree")
    }


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RankPool]]:
    """Ranks over a Qwen3 and over a Llama, with value heads and a teacher, started when asked for."""
    directory = tmp_path_factory.mktemp("models")
    made = {}
    write_model(directory / "teacher", "llama", hidden_size=48)
    make_parts_differ(directory / "teacher")
    teacher = ModelConfig(str(directory / "teacher"))
    for family in FAMILIES:
        write_model(directory / family, family, value_head=True)
        model = ModelConfig(str(directory / family), value_head=True)
        made[family] = RankPool(model, configure_run()["padded"].plugins, teacher=teacher)
    with made["qwen3"], made["llama"]:
        yield made


@pytest.fixture(scope="session")
def configure() -> Configure:
    return configure_run
