"""The distribution as the engine sees it: entry points, light imports, declarations, and options with their bounds."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest

from skyrl_engine.config.converter import refusals, strict_converter
from skyrl_engine.registry.known import read_first_party
from skyrl_engine.registry.loader import load
from skyrl_engine.registry.resolve import Registry
from skyrl_engine_losses import plugin

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENTRY_POINTS = [(kind, name) for kind in ("loss", "correction") for name in PROJECT["entry-points"][f"skyrl_engine.{kind}"]]
OLD = ("logprobs", "old_logprobs", "advantages")

NEEDS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("logprobs",),
    "ppo": OLD,
    "ppo_dual_clip": OLD,
    "gspo": OLD,
    "gmpo": OLD,
    "cispo": OLD,
    "vespo": OLD,
    "rollout_is": ("logprobs", "rollout_logprobs", "advantages"),
    "dppo": OLD,
    "clip_cov": OLD,
    "kl_cov": OLD,
    "sapo": OLD,
    "importance_sampling": OLD,
    "dro": OLD,
    "reinforce": ("logprobs", "advantages"),
    "value_clip": ("values", "old_values", "returns"),
    "kl": ("logprobs", "ref_logprobs"),
    "entropy": ("entropy",),
    "label_smoothing": ("logprobs", "mean_logprob"),
    "z_loss": ("logsumexp",),
    "dpo": ("logprobs", "ref_logprobs", "sample:role"),
    "simpo": ("logprobs", "sample:role"),
    "cpo": ("logprobs", "sample:role"),
    "orpo": ("logprobs", "sample:role"),
    "kto": ("logprobs", "ref_logprobs", "kl_baseline", "sample:role"),
    "bradley_terry": ("values", "sample:role"),
    "step_cross_entropy": ("values", "step_label"),
    "top_k_divergence": ("logprobs_at:teacher_ids", "teacher_logprobs[k]"),
    "teacher_kl": ("logprobs", "teacher_logprobs"),
    "divergence": ("divergence:forward:0.5:1.0", "top_1_agreement"),
    "uld": ("divergence:uld:0.5:None:None",),
    "gold": ("divergence:gold:0.5:None:None",),
}
PREFERENCES = {"dpo", "simpo", "cpo", "orpo", "kto", "bradley_terry"}
NOT_HOMOGENEOUS = PREFERENCES | {
    *("cross_entropy", "clip_cov", "kl_cov", "dro", "value_clip", "kl", "entropy", "label_smoothing", "z_loss"),
    *("top_k_divergence", "teacher_kl", "divergence", "uld", "gold", "step_cross_entropy"),
}


def default(name: str) -> Any:
    schema = getattr(plugin, name).skyrl_engine_config_schema()
    return None if schema is None else schema()


def test_every_object_of_the_module_is_an_entry_point_under_its_own_name() -> None:
    assert sorted(name for _, name in ENTRY_POINTS) == sorted(plugin.__all__)
    for kind, name in ENTRY_POINTS:
        assert PROJECT["entry-points"][f"skyrl_engine.{kind}"][name] == f"skyrl_engine_losses.plugin:{name}"
        assert getattr(plugin, name).name == name


def test_the_engine_knows_which_distribution_to_name() -> None:
    ours = {kind_and_name for kind_and_name, distribution in read_first_party().items() if distribution == "skyrl-engine-losses"}
    assert ours == set(ENTRY_POINTS)


@pytest.mark.parametrize(("kind", "name"), ENTRY_POINTS)
def test_the_engine_loads_it(kind: str, name: str) -> None:
    loaded = load(Registry.discover().resolve(kind, f"skyrl-engine-losses:{name}"))
    assert (loaded.record.name, loaded.record.version) == (name, PROJECT["version"])


def test_importing_every_module_takes_no_torch() -> None:
    modules = [f"skyrl_engine_losses.{file.stem}" for file in (ROOT / "src/skyrl_engine_losses").glob("[!_]*.py")]
    assert len(modules) > 8
    code = f"import {', '.join(modules)}, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("file", sorted((ROOT / "src/skyrl_engine_losses").glob("*.py")), ids=lambda file: file.name)
def test_only_attrs_and_the_engine_are_imported_at_run_time(file: Path) -> None:
    names = set()
    for node in ast.parse(file.read_text()).body:  # what stands under `if TYPE_CHECKING` is no statement of the module's body
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    heads = {str(name).partition(".")[0] for name in names}
    assert heads <= {"attrs", "skyrl_engine", "skyrl_engine_losses", "typing", "collections", "math"}


@pytest.mark.parametrize("name", NEEDS)
def test_what_a_loss_declares(name: str) -> None:
    loss = getattr(plugin, name).skyrl_engine_make_loss(default(name))
    assert loss.needs == NEEDS[name]
    assert loss.reducers == (("sequence_mean",) if name in PREFERENCES else None)
    assert loss.advised_reducers == (("sequence_mean",) if name in ("gspo", "gmpo") else None)
    assert loss.batch_local is (name in ("clip_cov", "kl_cov"))
    assert loss.homogeneous is (name not in NOT_HOMOGENEOUS)


def test_what_all_losses_are() -> None:
    assert set(NEEDS) == {name for kind, name in ENTRY_POINTS if kind == "loss"}


@pytest.mark.parametrize("name", ["cispo", "dppo"])
def test_the_anchor_decides_which_column_is_read(name: str) -> None:
    config = getattr(plugin, name).skyrl_engine_config_schema()(anchor="rollout")
    assert getattr(plugin, name).skyrl_engine_make_loss(config).needs == ("logprobs", "rollout_logprobs", "advantages")


REFUSED = [
    ("ppo", {"clip_low": -0.1}, "at least 0"),
    ("ppo", {"clip_low": 1.1}, "at most 1"),
    ("ppo", {"clip_high": -0.1}, "at least 0"),
    ("ppo_dual_clip", {"dual_clip": 1.0}, "more than 1"),
    ("gmpo", {"clip_low": -0.1}, "at least 0"),
    ("cispo", {"anchor": "ref"}, "one of"),
    ("dppo", {"kind": "js"}, "one of"),
    ("dppo", {"delta_low": -1.0}, "at least 0"),
    ("sapo", {"tau_pos": 0.0}, "more than 0"),
    ("clip_cov", {"fraction": 1.5}, "at most 1"),
    ("clip_cov", {"lower": 6.0}, "more than lower = 6.0, is 5.0"),
    ("kl_cov", {"fraction": 0.0}, "more than 0"),
    ("kl_cov", {"coef": -1.0}, "at least 0"),
    ("dro", {"beta": -1.0}, "at least 0"),
    ("value_clip", {"clip": 0.0}, "more than 0"),
    ("kl", {"estimator": "k4"}, "one of"),
    ("teacher_kl", {"estimator": "k4"}, "one of"),
    ("gold", {"beta": 1.5}, "at most 1"),
    ("gold", {"matched_weight": 1.0}, "must be given together"),
    ("top_k_divergence", {"divergence": "total"}, "one of"),
    ("top_k_divergence", {"rest": "two"}, "one of"),
    ("top_k_divergence", {"beta": 1.0}, "less than 1"),
    ("divergence", {"divergence": "total"}, "one of"),
    ("divergence", {"beta": 0.0}, "more than 0"),
    ("divergence", {"temperature": 0.0}, "more than 0"),
    ("outlier_sequence", {"low": 101.0}, "at least low = 101.0, is 100.0"),
    ("token_mask", {"high": 0.1}, "at least low = 0.5, is 0.1"),
    ("tis", {"high": 0.0}, "more than 0"),
    ("tis", {"ratio": "words"}, "one of"),
    ("sequence_mask", {"low": 1.02}, "at least low = 1.02, is 1.01"),
    ("sequence_mask", {"mean": "median"}, "one of"),
]


@pytest.mark.parametrize(("name", "options", "cause"), REFUSED)
def test_what_an_option_may_not_be_is_refused_as_a_configuration(name: str, options: dict[str, Any], cause: str) -> None:
    schema = getattr(plugin, name).skyrl_engine_config_schema()
    with pytest.raises(Exception) as caught:
        strict_converter().structure(options, schema)
    ((_, refusal),) = refusals(caught.value)
    assert cause in str(refusal)


@pytest.mark.parametrize("name", [name for _, name in ENTRY_POINTS])
def test_options_survive_a_round_trip(name: str) -> None:
    config = default(name)
    if config is not None:
        assert strict_converter().structure(attrs.asdict(config), type(config)) == config
