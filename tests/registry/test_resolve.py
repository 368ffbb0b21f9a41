"""The rules of resolution, one test each, and the one action that every error ends in."""

from pathlib import Path

import pytest

from skyrl_engine.errors import (
    ConfigError,
    PluginAmbiguousError,
    PluginBlockedError,
    PluginBrokenError,
    PluginError,
    PluginNotFoundError,
)
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.known import read_first_party
from skyrl_engine.registry.record import PluginRecord
from skyrl_engine.registry.resolve import Registry
from skyrl_engine.registry.selection import Selection


def offer(reference: str, kind: str = "loss", version: str = "1.0.0", target: str = "package.plugin:thing") -> PluginRecord:
    distribution, _, name = reference.partition(":")
    return PluginRecord(kind, name, target, distribution=distribution, version=version)


def registry(*records: PluginRecord, block: tuple[str, ...] = (), pin: dict[str, str] | None = None) -> Registry:
    return Registry(records, (), Selection.of(block, pin or {}))


PPO = offer("acme-losses:ppo")
OTHER_PPO = offer("zeta-losses:ppo")
CLIPPED = offer("acme-losses:clipped_ppo")
FIRST_PARTY_LOSS = offer("skyrl-engine-losses:cross_entropy")
OUTSIDER_LOSS = offer("acme-losses:cross_entropy")


def test_an_exact_name_is_found_bare_and_qualified() -> None:
    here = registry(PPO, CLIPPED)
    assert here.resolve("loss", "ppo") is PPO
    assert here.resolve("loss", "acme-losses:ppo") is PPO
    assert here.resolve("loss", "Acme_Losses:clipped_ppo") is CLIPPED


def test_a_name_belongs_to_its_kind() -> None:
    same_name = offer("acme-losses:ppo", kind="reducer")
    here = registry(PPO, same_name)
    assert here.resolve("loss", "ppo") is PPO
    assert here.resolve("reducer", "ppo") is same_name


def test_two_claims_are_an_error_that_names_both_in_full() -> None:
    with pytest.raises(PluginAmbiguousError) as caught:
        registry(PPO, OTHER_PPO).resolve("loss", "ppo")
    assert caught.value.exit_code == 3
    assert "acme-losses:ppo and zeta-losses:ppo" in caught.value.cause
    assert 'plugins.pin = { "loss:ppo" = "acme-losses" }' in caught.value.remedy
    assert caught.value.details == ("loss 'ppo' of acme-losses 1.0.0", "loss 'ppo' of zeta-losses 1.0.0")


def test_a_collision_names_every_distribution_in_cause_remedy_and_details() -> None:
    third = offer("mid-losses:ppo")
    with pytest.raises(PluginAmbiguousError) as caught:
        registry(PPO, OTHER_PPO, third).resolve("loss", "ppo")
    assert caught.value.cause.endswith("3 distributions: acme-losses:ppo, zeta-losses:ppo and mid-losses:ppo")
    assert caught.value.remedy.startswith("Write acme-losses:ppo, zeta-losses:ppo or mid-losses:ppo, or pin one of them")
    assert len(caught.value.details) == 3


def test_the_engines_own_plugins_have_no_priority() -> None:
    with pytest.raises(PluginAmbiguousError, match="skyrl-engine-losses:cross_entropy"):
        registry(OUTSIDER_LOSS, FIRST_PARTY_LOSS).resolve("loss", "cross_entropy")


def test_a_qualified_reference_is_never_ambiguous() -> None:
    assert registry(PPO, OTHER_PPO).resolve("loss", "zeta-losses:ppo") is OTHER_PPO


def test_a_pin_decides_a_bare_name() -> None:
    here = registry(PPO, OTHER_PPO, pin={"loss:ppo": "Zeta_Losses"})
    assert here.resolve("loss", "ppo") is OTHER_PPO
    assert here.resolve("loss", "acme-losses:ppo") is PPO, "a pin is for bare names; a full name says what it wants"


def test_a_pin_of_another_kind_decides_nothing() -> None:
    with pytest.raises(PluginAmbiguousError):
        registry(PPO, OTHER_PPO, pin={"reducer:ppo": "zeta-losses"}).resolve("loss", "ppo")


def test_a_pin_to_a_distribution_without_it_is_an_error_even_if_another_has_it() -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        registry(PPO, pin={"loss:ppo": "zeta-losses"}).resolve("loss", "ppo")
    assert "pinned to zeta-losses" in caught.value.cause
    assert caught.value.remedy == 'Correct or remove "loss:ppo" in plugins.pin'


@pytest.mark.parametrize("pin", [{"ppo": "acme-losses"}, {"los:ppo": "acme-losses"}, {"loss:": "acme-losses"}])
def test_a_pin_must_name_kind_and_name(pin: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.pin.*kind:name"):
        registry(PPO, pin=pin)


def test_blocking_one_of_two_claims_leaves_the_other() -> None:
    assert registry(PPO, OTHER_PPO, block=("acme-losses:ppo",)).resolve("loss", "ppo") is OTHER_PPO


@pytest.mark.parametrize("entry", ["ppo", "acme-losses:ppo", "Acme_Losses:ppo", "acme-losses:*"])
@pytest.mark.parametrize("reference", ["ppo", "acme-losses:ppo"])
def test_a_blocked_plugin_is_refused_and_the_entry_is_named(entry: str, reference: str) -> None:
    here = registry(PPO, block=(entry,))
    with pytest.raises(PluginBlockedError) as caught:
        here.resolve("loss", reference)
    assert repr(entry) in caught.value.cause
    assert "loss 'ppo' of acme-losses 1.0.0" in caught.value.cause
    assert here.records() == ()


@pytest.mark.parametrize("entry", ["clipped_ppo", "zeta-losses:ppo", "zeta-losses:*", "*"])
def test_a_block_covers_no_more_than_it_says(entry: str) -> None:
    assert registry(PPO, block=(entry,)).resolve("loss", "ppo") is PPO


def test_a_pin_does_not_lift_a_block() -> None:
    with pytest.raises(PluginBlockedError):
        registry(PPO, OTHER_PPO, block=("acme-losses:ppo",), pin={"loss:ppo": "acme-losses"}).resolve("loss", "ppo")


def test_a_block_that_names_a_kind_would_block_nothing_and_is_a_configuration_mistake() -> None:
    with pytest.raises(ConfigError, match=r"plugins\.block: 'loss:ppo' begins with a kind.*Write 'ppo'"):
        registry(PPO, block=("loss:ppo",))


def test_a_block_that_is_no_reference_is_a_configuration_mistake() -> None:
    with pytest.raises(ConfigError, match=r"plugins\.block"):
        registry(PPO, block=("two words:ppo",))


def test_a_local_file_can_be_blocked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("ppo = 1\n")
    with pytest.raises(PluginBlockedError):
        registry(block=(f"{tmp_path}/mine.py:ppo",)).resolve("loss", "./mine.py:ppo", base=tmp_path)
    with pytest.raises(PluginBlockedError):
        registry(block=("ppo",)).resolve("loss", "./mine.py:ppo", base=tmp_path)


def test_one_distribution_offering_a_name_twice_is_broken() -> None:
    with pytest.raises(PluginBrokenError, match=r"acme-losses 1\.0\.0 offers the loss 'ppo' more than once") as caught:
        registry(PPO, offer("acme-losses:ppo", target="package.other:thing")).resolve("loss", "ppo")
    assert caught.value.details == ("loss ppo = package.plugin:thing", "loss ppo = package.other:thing")


@pytest.mark.parametrize(
    ("kind", "reference", "cause", "remedy"),
    [
        ("loss", "pppo", "there is no loss 'pppo'", "Did you mean 'ppo'?"),
        ("loss", "PPO", "there is no loss 'PPO'", None),
        ("loss", "acme-losses:pppo", "not offered by acme-losses 1.0.0", "Did you mean 'acme-losses:ppo'?"),
        ("loss", "acne-losses:ppo", "no plugin of a distribution acne-losses is installed", "Did you mean 'acme-losses:ppo'?"),
        ("loss", "unheard-of:nothing_like_it", "unheard-of is installed", "Install the distribution unheard-of, or choose"),
        ("loss", "nothing_like_it", "there is no loss", "Choose one of ppo, clipped_ppo"),
        ("merger", "nothing_like_it", "there is no merger", "Choose a merger once a distribution that offers one is installed"),
        (
            "loss",
            "mean",
            "there is no loss 'mean'",
            "'mean' is a reducer: set it as reducer, and choose one of ppo, clipped_ppo here",
        ),
        ("loss", "cross_entropy", "there is no loss", "Install it: python -m pip install skyrl-engine-losses"),
        (
            "loss",
            "cros_entropy",
            "there is no loss",
            "Did you mean 'cross_entropy'? Install it: python -m pip install skyrl-engine-losses",
        ),
        (
            "loss",
            "skyrl-engine-losses:cross_entropy",
            "skyrl-engine-losses",
            "Install it: python -m pip install skyrl-engine-losses",
        ),
    ],
)
def test_a_missing_plugin_is_answered_with_one_action(kind: str, reference: str, cause: str, remedy: str | None) -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        registry(PPO, CLIPPED, offer("acme-losses:mean", kind="reducer")).resolve(kind, reference)
    assert cause in caught.value.cause
    assert caught.value.exit_code == 3
    if remedy is not None:
        assert caught.value.remedy.startswith(remedy)


def test_nobody_is_sent_to_install_a_name_that_was_only_typed() -> None:
    """A pip command made of a misspelt name would install whatever bears it; only names this project publishes get one."""
    with pytest.raises(PluginNotFoundError) as caught:
        registry().resolve("loss", "skyrl-engine-loses:cross_entropy")
    assert "pip install skyrl-engine-loses" not in str(caught.value)


def test_unreadable_distributions_are_mentioned_where_a_plugin_is_missing(install) -> None:
    (install("acme-broken", entry_points={"loss": {"wanted": "acme:x"}}) / "METADATA").unlink()
    with pytest.raises(PluginNotFoundError) as caught:
        Registry.discover().resolve("loss", "wanted")
    assert any("cannot be read" in line for line in caught.value.details)


def test_installed_distributions_are_resolved(install) -> None:
    install("acme-losses", "2.0.0", entry_points={"loss": {"contested": "acme:x"}})
    install("zeta-losses", "3.0.0", entry_points={"loss": {"contested": "zeta:x"}})
    with pytest.raises(PluginAmbiguousError):
        Registry.discover().resolve("loss", "contested")
    assert Registry.discover(pin={"loss:contested": "zeta-losses"}).resolve("loss", "contested").version == "3.0.0"
    assert Registry.discover(block=["zeta-losses:*"]).resolve("loss", "contested").version == "2.0.0"


def test_a_missing_local_file_is_answered_with_a_neighbour(tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text("")
    with pytest.raises(PluginNotFoundError) as caught:
        registry().resolve("loss", "./my_los.py:focal", base=tmp_path)
    assert caught.value.remedy == f"Did you mean {tmp_path}/my_loss.py:focal?"
    with pytest.raises(PluginNotFoundError, match="Correct the path"):
        registry().resolve("loss", "./nowhere/at_all.py:focal", base=tmp_path)


def test_a_local_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    with pytest.raises(PluginBrokenError, match="not UTF-8"):
        registry().resolve("loss", "./mine.py:name", base=tmp_path)


def test_every_error_is_one_sentence_and_one_action() -> None:
    here = registry(PPO, OTHER_PPO, CLIPPED, block=("clipped_ppo",))
    for reference in ("ppo", "clipped_ppo", "absent", "acme-losses:absent", "absent:absent", "./absent.py:x", "x.py", ":"):
        with pytest.raises(PluginError) as caught:
            here.resolve("loss", reference)
        assert not caught.value.cause.endswith(".")
        assert "\n" not in caught.value.summary
        assert caught.value.remedy


def test_the_known_first_party_plugins_are_those_of_this_repository() -> None:
    import tomllib

    root = Path(__file__).parents[2]
    offered = {}
    for file in [root / "pyproject.toml", *root.glob("plugins/*/pyproject.toml")]:
        project = tomllib.loads(file.read_text())["project"]
        for group, points in project.get("entry-points", {}).items():
            kind = group.removeprefix("skyrl_engine.")
            offered |= {(kind, name): project["name"] for name in points if kind in KINDS}
    assert read_first_party() == offered
