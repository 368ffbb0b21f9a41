"""`[[loss.terms]]` and `[[loss.corrections]]` select plugins of their own, wherever the configuration comes from."""

import json
import textwrap
from pathlib import Path

import jsonschema
import pytest

from skyrl_engine.config import ResolvedConfig, SelectedPlugin, config_schema, load, resolve
from skyrl_engine.config.reading.sources import from_dict
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.errors import ConfigError, ContractError, PluginNotFoundError

SOURCE = '''
from attrs import field, frozen
from attrs.validators import gt
from skyrl_engine import correction, loss

@frozen
class Scale:
    scale: float = field(default=1.0, validator=gt(0))
    """Factor."""

@frozen
class Clash:
    coef: float = 1.0

@loss(needs=("logprobs",), config=Scale)
def scaled(tokens, config):
    return -config.scale * tokens.logprobs

@loss(needs=("logprobs",), config=Clash)
def clash(tokens, config):
    return -config.coef * tokens.logprobs

@correction(needs=("rollout_logprobs",), config=Scale)
def halved(tokens, config):
    return 0.5 * config.scale + 0.0 * tokens.rollout_logprobs
'''

TABLES = """
    [model]
    path = "m"
    [data]
    train = "d"
    [loss]
    use = "./parts.py:scaled"
    scale = 2.0
    [[loss.terms]]
    use = "./parts.py:scaled"
    coef = 0.25
    scale = 3.0
    [[loss.terms]]
    use = "./parts.py:clash"
    coef = -1
    [[loss.corrections]]
    use = "./parts.py:halved"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parts.py").write_text(SOURCE)
    return tmp_path


def resolve_tables(folder: Path, tables: str = TABLES) -> ResolvedConfig:
    (folder / "train.toml").write_text(textwrap.dedent(tables))
    return resolve(load(folder / "train.toml"))


def selections(config: ResolvedConfig) -> dict[str, object]:
    return {
        place: (selected.options, selected.coefficient) for place, selected in config.plugins.items() if place.startswith("loss")
    }


def test_each_is_selected_with_its_own_options(folder: Path) -> None:
    config = resolve_tables(folder, TABLES.replace('use = "./parts.py:clash"', 'use = "./parts.py:scaled"'))
    assert [*config.plugins] == [
        "loss", "loss.terms[0]", "loss.terms[1]", "loss.corrections[0]", "reducer", "backend", "merger",
    ]  # fmt: skip
    assert [config.plugins[f"loss{place}"].options.scale for place in ("", ".terms[0]", ".terms[1]", ".corrections[0]")] == [  # type: ignore[union-attr] # Scale
        2.0, 3.0, 1.0, 1.0,
    ]  # fmt: skip
    assert [config.plugins[f"loss.terms[{index}]"].coefficient for index in (0, 1)] == [0.25, -1]
    assert config.plugins["loss"].coefficient is None
    assert config.plugins["loss.corrections[0]"].make(FactoryContext()).needs == ("rollout_logprobs",)


def test_what_is_written_out_resolves_to_the_same(folder: Path) -> None:
    config = resolve_tables(folder, TABLES.replace('use = "./parts.py:clash"', 'use = "./parts.py:scaled"'))
    written = folder / "elsewhere" / "written.toml"
    written.parent.mkdir()
    written.write_text(config.to_toml())
    for again in (resolve(load(written)), resolve(from_dict(json.loads(json.dumps(config.as_dict())), "run.json"))):
        assert again.as_dict() == config.as_dict()
        assert {place: (str(options), coef) for place, (options, coef) in selections(again).items()} == {
            place: (str(options), coef) for place, (options, coef) in selections(config).items()
        }
    assert str(config.origins["loss.terms[0].coef"]).endswith("train.toml:11")
    assert str(config.origins["loss.terms[1].scale"]) == "default"


def test_the_lock_of_a_term_carries_its_coefficient(folder: Path) -> None:
    config = resolve_tables(folder, TABLES.replace('use = "./parts.py:clash"', 'use = "./parts.py:scaled"'))
    (folder / "parts.py").unlink()
    for place, coefficient in (("loss.terms[0]", 0.25), ("loss.corrections[0]", None), ("loss", None)):
        lock = json.loads(json.dumps(config.plugins[place].to_lock_entry()))
        again = SelectedPlugin.from_lock(lock)
        assert (again.coefficient, again.table) == (coefficient, config.plugins[place].table)
        assert again.to_lock_entry() == lock


def test_mistakes_name_the_entry(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_tables(
            folder, TABLES.replace("scale = 3.0", "scale = -3.0").replace("coef = -1", 'coef = "x"').replace("halved", "halfed")
        )
    text = str(caught.value)
    assert "train.toml:12: loss.terms[0].scale: must be more than 0, is -3.0 (loss 'scaled' of" in text
    assert 'train.toml:15: loss.terms[1].coef: must be a number, is "x"' in text
    assert "train.toml:17: loss.corrections[0].use:" in text


def test_an_option_cannot_share_the_name_of_the_engines_key(folder: Path) -> None:
    """`coef` is an option of clash as the main loss, and the engine's own key in a term."""
    config = resolve_tables(
        folder, TABLES.replace("scaled", "clash").replace("scale = 2.0", "coef = 2.0").partition("[[loss.terms]]")[0]
    )
    assert config.plugins["loss"].table == {"coef": 2.0}
    with pytest.raises(ContractError, match=r"option named `coef`, and loss\.terms\[1\]\.coef is the engine's own key"):
        resolve_tables(folder)


def test_a_term_that_is_not_there(folder: Path) -> None:
    with pytest.raises(PluginNotFoundError, match="there is no loss 'klx'"):
        resolve_tables(folder, TABLES.partition("[[loss.terms]]")[0] + '\n    [[loss.terms]]\n    use = "klx"\n    coef = 1\n')


def test_the_json_schema_checks_terms_too(folder: Path) -> None:
    config = resolve_tables(folder, TABLES.partition("[[loss.terms]]")[0])
    validator = jsonschema.Draft202012Validator(config_schema([config.plugins["loss"].loaded]))

    def valid(term: dict[str, object]) -> bool:
        return validator.is_valid({"model": {"path": "m"}, "data": {"train": "d"}, "loss": {"terms": [term]}})

    assert valid({"use": "scaled", "coef": 1, "scale": 2})
    assert not valid({"use": "scaled", "coef": 1, "scale": -2})
    assert not valid({"use": "scaled", "scale": 2})
    assert valid({"use": "another", "coef": 1, "scale": -2})
