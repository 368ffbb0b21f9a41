"""Presets are tables that a configuration is laid over: every key wins, every origin is named, another plugin gets no options of theirs."""

from pathlib import Path

import pytest

from skyrl_engine.cli import app
from skyrl_engine.config import load, resolve
from skyrl_engine.config.presets import preset, preset_names
from skyrl_engine.errors import ConfigError, PluginNotFoundError

NEEDED = ("trainer=rl", "model.path=m")

CHOSEN = {
    "cispo": ("cispo", "token_mean", "grpo", ["zero_variance"]),
    "dapo": ("ppo", "token_mean", "grpo", ["zero_variance"]),
    "dr_grpo": ("ppo", "sequence_mean_token_sum_norm", "dr_grpo", []),
    "grpo": ("ppo", "sequence_mean", "grpo", []),
    "gspo": ("gspo", "sequence_mean", "grpo", []),
    "online_dpo": ("dpo", "sequence_mean", None, []),
    "on_policy_distill": ("importance_sampling", "token_mean", "reverse_kl", []),
    "ppo": ("ppo", "token_mean", "gae", []),
    "reinforce_pp": ("ppo", "token_mean", "reinforce_pp", []),
    "rloo": ("reinforce", "sequence_mean_token_sum_norm", "rloo", []),
}


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_resolves_to_its_plugins(name: str) -> None:
    resolved = resolve(load(None, [*NEEDED, f"rl.preset={name}"]))
    filters = [place for place in resolved.plugins if place.startswith("group_filters[")]
    chosen = [
        resolved.plugins[kind].loaded.record.name if kind in resolved.plugins else None for kind in ("loss", "reducer", "advantage")
    ]
    assert (*chosen, [resolved.plugins[place].loaded.record.name for place in filters]) == CHOSEN[name]
    assert resolve(load(resolved.as_dict())).as_dict() == resolved.as_dict(), "what a run writes down resolves to the same"


def test_there_is_a_row_above_for_every_preset() -> None:
    assert preset_names() == sorted(CHOSEN)


def test_a_preset_given_as_a_loss_is_told_what_it_is() -> None:
    with pytest.raises(PluginNotFoundError, match="there is no loss 'ipo'") as refused:
        resolve(load(None, ["trainer=sft", "model.path=m", "data.train=x.jsonl", "loss.use=ipo"]))
    assert refused.value.remedy == 'It is a preset, preference.preset = "ipo", whose loss is \'dpo\', form = "ipo"'


@pytest.mark.parametrize("name", preset_names())
def test_every_origin_is_the_preset(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["config", "show", *NEEDED, f"rl.preset={name}"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if f"preset {name}" in line]
    assert len(shown) == len(leaves(preset(name)))


def leaves(table: object) -> list[object]:
    if isinstance(table, dict):
        return [leaf for value in table.values() for leaf in leaves(value)]
    if isinstance(table, list):
        return [leaf for value in table for leaf in leaves(value)]
    return [table]


def test_numbers_of_a_preset_and_of_rl_itself() -> None:
    resolved = resolve(load(None, [*NEEDED, "rl.preset=dr_grpo", "rl.max_tokens=77"]))
    assert resolved.plugins["reducer"].table["max_sequence_length"] == 77
    assert resolve(load(None, [*NEEDED, "rl.preset=dr_grpo"])).plugins["reducer"].table["max_sequence_length"] == 512
    resolved = resolve(load(None, [*NEEDED, "rl.preset=ppo"]))
    assert (resolved.config.rl.group_size, resolved.config.rl.mini_batches, resolved.config.model.value_head) == (1, 4, True)
    assert resolved.config.rl.steps == 100


def test_attempts_count_once_where_rewritten_histories_cut_them(capsys: pytest.CaptureFixture[str]) -> None:
    def reducer(*overrides: str) -> str:
        return resolve(load(None, [*NEEDED, *overrides])).plugins["reducer"].loaded.record.name

    anew = 'rl.history="template"'
    assert reducer(anew) == reducer(anew, "rl.preset=gspo") == "trajectory_mean"
    assert reducer(anew, "rl.preset=dapo") == "token_mean"
    assert reducer(anew, "reducer.use=sequence_mean") == reducer() == "sequence_mean"
    assert app.main(["config", "show", *NEEDED, anew]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "trajectory_mean" in line)
    assert 'preset grpo, rl.history = "template"' in line


def test_every_key_wins_over_the_preset() -> None:
    overrides = ("rl.preset=dapo", "loss.clip_high=0.5", "rl.overlong.penalty=2.0", "group_filters=[]")
    resolved = resolve(load(None, [*NEEDED, *overrides]))
    assert resolved.plugins["loss"].table["clip_high"] == 0.5
    assert str(resolved.origins["loss.clip_high"]) == "command line"
    assert (resolved.config.rl.overlong.start, resolved.config.rl.overlong.penalty) == (0.8, 2.0)
    assert not [place for place in resolved.plugins if place.startswith("group_filters[")]


def test_another_plugin_does_not_get_the_options_of_the_presets() -> None:
    resolved = resolve(load(None, [*NEEDED, "rl.preset=dapo", "loss.use=cispo"]))
    assert resolved.plugins["loss"].loaded.record.name == "cispo"
    assert "clip_high" not in {
        key for key, origin in resolved.origins.items() if "preset" in str(origin) and key.startswith("loss")
    }


def test_a_preset_that_is_not_there_is_refused_with_what_may_have_been_meant() -> None:
    with pytest.raises(ConfigError, match=r'command line: rl.preset: there is no preset "dapp". Did you mean "dapo"\?'):
        resolve(load(None, [*NEEDED, "rl.preset=dapp"]))
    with pytest.raises(ConfigError, match=r'there is no preset "pretraining"') as caught:
        resolve(load(None, [*NEEDED, "rl.preset=pretraining"]))
    assert '"none"' in str(caught.value)


def test_without_a_preset_there_are_the_engines_own_defaults() -> None:
    resolved = resolve(load(None, [*NEEDED, "rl.preset=none"]))
    assert not [key for key, origin in resolved.origins.items() if "preset" in str(origin)]


def test_other_trainers_have_no_preset() -> None:
    resolved = resolve(load(None, ["model.path=m", "data.train=d"]))
    assert not [key for key, origin in resolved.origins.items() if "preset" in str(origin)]


def test_a_preset_in_a_file_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text('trainer = "rl"\n[model]\npath = "m"\n[rl]\npreset = "grpp"\n')
    with pytest.raises(ConfigError, match=r"rl.toml:5: rl.preset: there is no preset"):
        resolve(load(tmp_path / "rl.toml"))


@pytest.mark.parametrize("name", preset_names("preference"))
def test_every_preset_of_preferences_resolves(name: str) -> None:
    """They are named after their loss; `ipo` is a form of `dpo`."""
    resolved = resolve(load(None, ["trainer=preference", "model.path=m", "data.train=d", f"preference.preset={name}"]))
    assert resolved.plugins["loss"].loaded.record.name == {"ipo": "dpo"}.get(name, name)
    assert resolved.plugins["reducer"].loaded.record.name == "sequence_mean"
    assert resolve(load(resolved.as_dict())).as_dict() == resolved.as_dict(), "what a run writes down resolves to the same"
    assert str(resolved.origins["optimizer.learning_rate"]) == f"preset {name}"


def test_preferences_have_presets_of_their_own() -> None:
    assert preset_names("preference") == ["cpo", "dpo", "ipo", "kto", "orpo", "simpo"]
    with pytest.raises(ConfigError, match=r"preference\.preset: there is no preset \"grpo\""):
        resolve(load(None, ["trainer=preference", "model.path=m", "data.train=d", "preference.preset=grpo"]))
