"""Plugins selected, loaded and configured, against the real registry and distributions laid out as pip lays them out."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from skyrl_engine.config import Option, ResolvedConfig, SelectedPlugin, config_schema, from_dict, load, resolve
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.errors import ConfigError, PluginAmbiguousError, PluginBlockedError, PluginError, PluginNotFoundError

NEEDED = ("model.path=m", "data.train=d")

PLUGIN = '''
from pathlib import Path

from attrs import field, frozen
from attrs.validators import ge

from skyrl_engine import hookimpl, loss


@frozen
class Term:
    use: str
    coef: float = 1.0


@frozen
class Options:
    gamma: float = field(default=2.0, validator=ge(0))
    """Exponent of the miss."""

    parts: tuple[Term, ...] = ()
    table: Path | None = None


@loss(needs=("logprobs",), config=Options)
def sharp(tokens, config):
    return -(tokens.logprobs ** config.gamma)


@loss(needs=("logprobs",))
def bare(tokens, config):
    return -tokens.logprobs


class Watch:
    @hookimpl
    def skyrl_engine_config_schema(self):
        return Options

    @hookimpl
    def skyrl_engine_make_observer(self, config):
        return self

    @hookimpl
    def skyrl_engine_manifest_extra(self):
        return {}


watch = Watch()
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lay out a distribution as pip does: a module, METADATA and entry_points.txt in a folder on the path."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def lay_out(distribution: str, version: str, entry_points: str, source: str = PLUGIN) -> None:
        module = distribution.replace("-", "_")
        monkeypatch.delitem(sys.modules, module, raising=False)
        (site / f"{module}.py").write_text(source)
        info = site / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)

    return lay_out


ACME = "[skyrl_engine.loss]\nsharp = acme_parts:sharp\nbare = acme_parts:bare\n[skyrl_engine.observer]\nwatch = acme_parts:watch\n"


def resolve_overrides(*overrides: str) -> ResolvedConfig:
    return resolve(load(None, [*NEEDED, *overrides]))


def test_the_defaults_select_the_first_party_plugins() -> None:
    config = resolve_overrides()
    assert {kind: selected.loaded.record.reference for kind, selected in config.plugins.items()} == {
        "loss": "skyrl-engine-losses:cross_entropy",
        "reducer": "skyrl-engine-reducers:token_mean",
        "backend": "skyrl-engine-fsdp:fsdp",
        "merger": "skyrl-engine-mergers:ordered",
    }
    assert [observer.loaded.record.name for observer in config.observers] == ["metrics_jsonl"]
    assert config.config.training.epochs == 1.0


def test_resolving_imports_no_torch() -> None:
    code = (
        "import sys; from skyrl_engine.config import load, resolve; "
        "resolve(load(None, ['model.path=m', 'data.train=d'])); "
        "print(sorted({'torch', 'ray', 'transformers', 'datasets'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_options_of_a_plugin_are_structured_by_its_own_schema(install: Callable[..., None]) -> None:
    install("acme-parts", "2.0.0", ACME)
    config = resolve_overrides("loss.use=sharp", "loss.gamma=3", 'loss.parts=[{use = "kl", coef = 1e-3}]')
    loss = config.plugins["loss"]
    assert (loss.options.gamma, loss.options.parts[0].coef) == (3.0, 1e-3)  # type: ignore[union-attr] # the Options above
    assert config.as_dict()["loss"] == {"use": "sharp", "gamma": 3.0, "parts": [{"use": "kl", "coef": 1e-3}], "table": None}
    assert str(config.origins["loss.gamma"]) == "command line"
    assert str(config.origins["loss.parts[0].coef"]) == "command line"
    assert str(config.origins["loss.table"]) == "default"
    assert loss.make(FactoryContext()).needs == ("logprobs",)


def test_mistakes_in_plugin_tables_name_plugin_distribution_and_version(
    install: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme-parts", "2.0.0", ACME)
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text(
        '[loss]\nuse = "sharp"\ngama = 1\ngamma = -1\n[[loss.parts]]\nuse = 3\n[reducer]\nuse = "sum"\nx = 1\n[run]\nranks = 2\n'
    )
    with pytest.raises(ConfigError) as caught:
        resolve(load(Path("train.toml"), NEEDED))
    plugin = "loss 'sharp' of acme-parts 2.0.0"
    causes = [str(problem) for problem in caught.value.problems]
    assert causes[0].startswith("train.toml:11: run.ranks: is 2")
    assert f'train.toml:3: loss.gama: is not a known key ({plugin}). Did you mean "gamma"?' in causes
    assert f"train.toml:4: loss.gamma: must be at least 0, is -1.0 ({plugin}). Choose a larger number" in causes
    assert f"train.toml:6: loss.parts[0].use: must be text, is 3 ({plugin}). Put it in quotes" in causes
    assert any(line.startswith("train.toml:9: reducer.x: reducer 'sum' of skyrl-engine-reducers") for line in causes)
    assert len(causes) == 5


def test_an_option_of_the_plugin_that_the_command_line_replaces_is_told_as_one(
    install: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme-parts", "2.0.0", ACME)
    monkeypatch.chdir(tmp_path)
    Path("train.toml").write_text('[loss]\nuse = "ppo"\nclip_low = 0.1\ngama = 1\n')
    for chosen, label in (({"loss.use": Option("--loss", "sharp")}, "--loss"), ({}, "command line")):
        overrides = (*NEEDED, *(() if chosen else ("loss.use=sharp",)))
        with pytest.raises(ConfigError) as caught:
            resolve(load(Path("train.toml"), overrides, flags=chosen))
        remedy = f"Where it is of another loss than {label} chooses, remove it from the file"
        plugin = "loss 'sharp' of acme-parts 2.0.0"
        assert [str(problem) for problem in caught.value.problems] == [
            f"train.toml:3: loss.clip_low: is not a known key ({plugin}). {remedy}",
            f'train.toml:4: loss.gama: is not a known key ({plugin}). Did you mean "gamma"? {remedy}',
        ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train", '"s3://ada:geheim@bucket/x"'),
        ("data.eval", '["d", "https://host/x.jsonl?X-Amz-Signature=geheim"]'),
        ("checkpoint.store", '"s3://ada:geheim@bucket/x"'),
        ("loss.parts", '[{use = "kl", coef = 1, where = "https://host/x?token=geheim"}]'),
    ],
)
def test_an_address_with_a_secret_is_refused_wherever_it_stands_and_the_secret_is_not_said(key: str, value: str) -> None:
    """Before a command prints the configuration, which may be kept."""
    with pytest.raises(ConfigError, match=r"holds a secret, which a run would write") as caught:
        resolve_overrides(f"{key}={value}")
    assert f"{key}" in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_a_plugin_without_options_takes_none(install: Callable[..., None]) -> None:
    install("acme-parts", "2.0.0", ACME)
    with pytest.raises(ConfigError) as caught:
        resolve_overrides("loss.use=bare", "loss.gamma=1")
    assert str(caught.value) == "command line: loss.gamma: loss 'bare' of acme-parts 2.0.0 takes no options. Remove this key"


@pytest.mark.parametrize("loss", ["sharp", "bare"])
def test_a_misspelled_key_of_the_engine_in_a_plugins_table_is_no_option(install: Callable[..., None], loss: str) -> None:
    install("acme-parts", "2.0.0", ACME)
    with pytest.raises(ConfigError) as caught:
        resolve_overrides(f"loss.use={loss}", 'loss.correction=[{use = "tis"}]')
    plugin = f"loss '{loss}' of acme-parts 2.0.0"
    assert str(caught.value) == f'command line: loss.correction: is not a known key ({plugin}). Did you mean "corrections"?'


@pytest.mark.parametrize(("backend", "size"), [("fsdp", "pipeline_parallel"), ("deepspeed", "tensor_parallel")])
def test_a_parallel_size_that_a_backend_does_not_have_names_the_capability(backend: str, size: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(from_dict({"backend": {"use": backend, size: 2}}, "test"), need=())
    cause = f"test: backend.{size}: backend {backend!r} of skyrl-engine-{backend} 0.3.0 does not declare the capability {size!r}"
    assert str(caught.value) == f"{cause}. Remove this key, or choose another backend"


def test_a_misspelt_plugin_alone_ends_with_the_plugin_exit_code() -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        resolve_overrides("loss.use=cros_entropy")
    assert caught.value.exit_code == 3
    assert "cross_entropy" in caught.value.remedy


def test_a_misspelt_plugin_among_other_mistakes_is_listed_with_them() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_overrides("loss.use=cros_entropy", "run.seed=x")
    assert [problem.where for problem in caught.value.problems] == ["command line: run.seed", "command line: loss.use"]


def test_several_plugins_that_cannot_be_used_are_listed_together() -> None:
    with pytest.raises(PluginError) as caught:
        resolve_overrides("loss.use=cros_entropy", "merger.use=orderd", 'run.observers=["metrics_jsnl"]')
    assert caught.value.exit_code == 3
    assert caught.value.cause == "3 plugins cannot be used"
    assert [line.split(": ")[1] for line in caught.value.details] == ["loss.use", "merger.use", "run.observers"]


def test_two_claims_on_one_name_need_a_pin(install: Callable[..., None]) -> None:
    install("acme-parts", "2.0.0", ACME)
    install("other-parts", "1.0.0", "[skyrl_engine.loss]\nsharp = other_parts:sharp\n")
    with pytest.raises(PluginAmbiguousError):
        resolve_overrides("loss.use=sharp")
    config = resolve_overrides("loss.use=sharp", 'plugins.pin."loss:sharp"=other-parts')
    assert config.plugins["loss"].loaded.record.distribution == "other-parts"
    assert str(config.origins['plugins.pin."loss:sharp"']) == "command line"


def test_a_blocked_plugin_is_refused() -> None:
    with pytest.raises(PluginBlockedError):
        resolve_overrides('plugins.block=["cross_entropy"]')


def test_a_broken_plugin_that_nobody_asked_for_harms_nobody(install: Callable[..., None]) -> None:
    install("acme-broken", "1.0.0", "[skyrl_engine.loss]\nbroken = acme_broken:broken\n", "raise RuntimeError('no')\n")
    assert resolve_overrides().plugins["loss"].loaded.record.name == "cross_entropy"
    with pytest.raises(PluginError, match=r"acme-broken 1\.0\.0"):
        resolve_overrides("loss.use=broken")


def test_an_observer_s_failure_is_configured_in_its_table(install: Callable[..., None]) -> None:
    install("acme-parts", "2.0.0", ACME)
    config = resolve_overrides('run.observers=["metrics_jsonl", "watch"]', "observers.watch={gamma=5, on_error='warn'}")
    assert [observer.on_error for observer in config.observers] == [None, "warn"]
    assert config.as_dict()["observers"] == {"watch": {"on_error": "warn", "gamma": 5.0, "parts": [], "table": None}}
    assert SelectedPlugin.from_lock(config.observers[1].to_lock_entry()).on_error == "warn"
    with pytest.raises(ConfigError, match=r"observers\.metrics_jsonl\.on_error: must be one of"):
        resolve_overrides("observers.metrics_jsonl.on_error=ignore")


def test_two_observers_with_one_name_are_refused(install: Callable[..., None]) -> None:
    install("acme-parts", "2.0.0", ACME)
    with pytest.raises(ConfigError, match=r"run\.observers: names 2 observers called watch: acme-parts:watch and acme-parts:watch"):
        resolve_overrides('run.observers=["watch", "acme-parts:watch"]')


def test_observers_and_their_tables(install: Callable[..., None]) -> None:
    install("acme-parts", "2.0.0", ACME)
    config = resolve_overrides('run.observers=["metrics_jsonl", "acme-parts:watch"]', "observers.watch.gamma=5")
    assert config.observers[1].table == {"gamma": 5.0, "parts": [], "table": None}
    assert config.as_dict()["observers"] == {"watch": {"gamma": 5.0, "parts": [], "table": None}}
    assert str(config.origins["observers.watch.gamma"]) == "command line"
    with pytest.raises(ConfigError, match=r"observers\.wacth: holds options of an observer that run\.observers does not name"):
        resolve_overrides('run.observers=["watch"]', "observers.wacth.gamma=5")


def test_a_local_file_and_the_places_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "mine.py").write_text(PLUGIN)
    (folder / "train.toml").write_text('[loss]\nuse = "./mine.py:sharp"\ntable = "../table.json"\n')
    monkeypatch.chdir(tmp_path)
    config = resolve(load(Path("configs/train.toml"), NEEDED))
    loss = config.plugins["loss"]
    assert loss.options.table == folder / "../table.json"  # type: ignore[union-attr] # the Options above
    assert config.as_dict()["loss"]["use"] == f"{folder}/mine.py:sharp"
    with pytest.raises(ConfigError, match=r"gama.*mine\.py"):
        resolve(load(Path("configs/train.toml"), [*NEEDED, "loss.gama=1"]))


def test_a_lock_rebuilds_the_selection_on_another_process(tmp_path: Path) -> None:
    """Options and the code of a local file travel in the lock, as JSON: the file itself may be gone."""
    mine = tmp_path / "mine.py"
    mine.write_text(PLUGIN)
    first = resolve_overrides(f"loss.use={mine}:sharp", "loss.gamma=3", "loss.parts=[{use = 'kl'}]").plugins["loss"]
    lock = json.loads(json.dumps(first.to_lock_entry()))
    mine.unlink()
    again = SelectedPlugin.from_lock(lock)
    assert again.table == first.table
    assert again.to_lock_entry() == first.to_lock_entry()
    assert again.make(FactoryContext()).config.gamma == 3.0


def test_a_lock_with_options_the_plugin_refuses() -> None:
    lock = resolve_overrides("collator.use=padded").plugins["collator"].to_lock_entry()
    lock["options"]["paging"] = 1
    with pytest.raises(ConfigError, match=r"plugin lock: collator\.paging: is not a known key"):
        SelectedPlugin.from_lock(lock)


def test_what_is_written_out_resolves_to_the_same(install: Callable[..., None], tmp_path: Path) -> None:
    install("acme-parts", "2.0.0", ACME)
    config = resolve_overrides(
        "loss.use=sharp", "loss.parts=[{use = 'kl'}]", 'run.observers=["watch"]', "observers.watch.gamma=1", "optimizer.max_grad_norm=none",
    )  # fmt: skip
    written = tmp_path / "written.toml"
    written.write_text(config.to_toml())
    from_toml = resolve(load(written))
    saved = json.loads(json.dumps(config.as_dict()))
    from_json = resolve(from_dict(saved, "run.json"))
    for again in (from_toml, from_json):
        assert again.as_dict() == config.as_dict()
        assert {kind: plugin.options for kind, plugin in again.plugins.items()} == {
            kind: plugin.options for kind, plugin in config.plugins.items()
        }
    assert str(from_json.origins["loss.gamma"]) == "run.json"
    assert str(from_toml.origins["run.seed"]).startswith(f"{written}:")


def test_every_key_has_an_origin() -> None:
    config = resolve_overrides("run.seed=3")
    assert str(config.origins["run.seed"]) == "command line"
    assert str(config.origins["model.dtype"]) == "default"
    assert str(config.origins["backend.use"]) == "default"
    with pytest.raises(KeyError):
        config.origins["model.nothing"]


def test_a_table_that_is_absent_is_not_shown() -> None:
    config = resolve(load(None, ["run.seed=3"]), need=())
    assert not {"model", "data"} & config.as_dict().keys()
    with pytest.raises(ConfigError, match=r"model\.path"):
        resolve(load(None, []), need=("model",))


def test_the_json_schema_knows_the_options_of_installed_plugins(install: Callable[..., None]) -> None:
    install("acme-parts", "2.0.0", ACME)
    plugins = [resolve_overrides(f"loss.use={name}").plugins["loss"].loaded for name in ("sharp", "bare", "cross_entropy")]
    schema = config_schema(plugins)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)

    def valid(loss: dict[str, object]) -> bool:
        return validator.is_valid({"model": {"path": "m"}, "data": {"train": "d"}, "loss": loss})

    assert valid({"use": "sharp", "gamma": 1, "parts": [{"use": "kl"}]})
    assert valid({"use": "acme-parts:sharp"})
    assert not valid({"use": "sharp", "gama": 1})
    assert not valid({"use": "sharp", "gamma": -1})
    assert not valid({"use": "bare", "gamma": 1})
    assert not valid({"gamma": 1}), "options without `use` belong to cross_entropy, which takes none"
    assert valid({"use": "somebody-elses", "gamma": 1})


def test_one_wrong_value_does_not_hide_the_absent_files_of_its_table() -> None:
    """Every mistake is reported at once, each missing file with its key, in tables of the engine, of a plugin and of a list."""
    with pytest.raises(ConfigError) as caught:
        resolve(
            load(
                None,
                (
                    *(
                        "trainer=rl",
                        "model.path=/no/model",
                        "model.dtype=float7",
                        "model.lora.path=/no/adapters",
                        "model.lora.rank=0",
                    ),
                    *("rl.rollouts=/no/rollouts", "rl.steps=0"),
                    'environments=[{use="function", reward="/no/reward.py:score", data=["/no/tasks", "hub/name"], eval_fraction=7}]',
                ),
            )
        )
    causes = {problem.where.removeprefix("command line: "): problem.cause for problem in caught.value.problems}
    assert {key: causes[key] for key in causes if causes[key].startswith("there is nothing at")} == {
        "model.path": "there is nothing at /no/model",
        "model.lora.path": "there is nothing at /no/adapters",
        "rl.rollouts": "there is nothing at /no/rollouts",
        "environments[0].reward": "there is nothing at /no/reward.py",
        "environments[0].data": "there is nothing at /no/tasks",
    }
    assert {"model.dtype", "model.lora.rank", "rl.steps", "environments[0].eval_fraction"} <= causes.keys()
