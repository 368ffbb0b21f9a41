"""Rows of the migration pages about installed engines, in `nox -s peers`, with verl on the path of modules: every argument is there, under the
default that the row states, and our key in its place is one of the configuration.

verl's losses, reductions and KL terms are computed by verl's own functions, from the actor's configuration as verl composes it: loss, and the
gradient of every token, in float64. TRL's are in `reinforcement_of_trl.py` and `preferences_of_trl.py`, which compute them with its trainers.
"""

import dataclasses
import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from trl import DPOConfig, GRPOConfig, GRPOTrainer, KTOConfig, RewardConfig, RLOOConfig
from trl.experimental.cpo import CPOConfig
from trl.experimental.gkd import GKDConfig
from trl.experimental.gold import GOLDConfig
from trl.experimental.online_dpo import OnlineDPOConfig
from trl.experimental.orpo import ORPOConfig
from verl.trainer.ppo import core_algos
from verl.utils.config import omega_conf_to_dataclass

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "migration"))
published_formulas = importlib.import_module("published_formulas")
table = importlib.import_module("test_migration_table")

PAGES = ROOT / "docs" / "reference"
TOLERANCE = 1e-7
CONFIGS: dict[str, tuple[type, ...]] = {
    "DPO": (DPOConfig,),
    "KTO": (KTOConfig,),
    "CPO": (CPOConfig,),
    "ORPO": (ORPOConfig,),
    "reward": (RewardConfig,),
    "GKD": (GKDConfig,),
    "GOLD": (GOLDConfig,),
    "OnlineDPO": (OnlineDPOConfig,),
    "all": (DPOConfig, KTOConfig, CPOConfig, ORPOConfig),
}
"""Configurations of TRL that a row names at its beginning. An argument is in at least one of them."""

NO_ARGUMENTS = {"<\\|im_end\\|>", "AutoModelForSequenceClassification", "margin", "sft", "rpo_alpha", "judge"}
"""Words of TRL's cells that are no argument: a column, a class, a token, a value, and what TRL had once."""


def rows(page: str, section: str) -> Iterator[list[str]]:
    """The cells of a section's rows."""
    text = (PAGES / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = [line for line in found.splitlines() if line.startswith("|") and not line.startswith("|---")]
    for line in lines[1:]:
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


# ---------------------------------------------------------------- names and defaults


def options_of_trl() -> None:
    for name, default, *_ in rows("migration-rl.md", "TRL"):
        word = name.strip("`")
        if default == "an argument of the trainer":
            assert word in inspect.signature(GRPOTrainer).parameters, word
            continue
        config = RLOOConfig if default.endswith("of `RLOOConfig`") else GRPOConfig
        stated = default.split("`")[1]
        assert stated == write(default_of(config, word)), (word, stated, write(default_of(config, word)))
        print(f"TRL {word} = {stated}", flush=True)


def options_of_verl(composed: DictConfig) -> None:
    plain = OmegaConf.to_container(composed, resolve=False)
    for name, default, *_ in rows("migration-rl.md", "verl"):
        value: Any = plain
        for part in name.strip("`").split("."):
            assert isinstance(value, dict), name
            assert part in value, name
            value = value[part]
        refers = isinstance(value, str) and value.startswith("${")
        due = "computed" if refers else "required" if value == "???" else f"`{write(value)}`"
        assert default == due, (name, default, due)
        print(f"verl {name.strip('`')} = {due.strip('`')}", flush=True)


def default_of(config: type, name: str) -> Any:
    (field,) = (field for field in dataclasses.fields(config) if field.name == name)
    return field.default_factory() if callable(field.default_factory) else field.default


def write(value: Any) -> str:
    return "none" if value is None else repr(value) if isinstance(value, float) else json.dumps(value)


# ---------------------------------------------------------------- preferences, reward models, distillation


def arguments_of_trl() -> None:
    """Words of TRL's cells: an argument of a configuration that the row names, or a metric that its trainer writes."""
    checked = 0
    for section in ("TRL, preferences", "TRL, online preferences", "TRL, reward models", "TRL, distillation"):
        for theirs, ours in rows("migration.md", section):
            if theirs.startswith("PRM "):
                # TRL 1.16 has no PRMTrainer any more
                continue
            around = re.sub(r"`[^`]+`", "", theirs)
            named = ["all"] if theirs.startswith("all ") else [word for word in CONFIGS if re.search(rf"\b{word}\b", around)]
            configs = [config for word in named for config in CONFIGS[word]]
            for word in re.findall(r"`([^`]+)`", theirs):
                checked += check_word(word, theirs, configs)
            for key in re.findall(r"`((?:\w+\.)+\w+)", ours):
                check_key(key, ours)
    assert checked > 60, checked
    print(f"TRL: {checked} words of preferences, reward models and distillation", flush=True)
    assert "rpo_alpha" not in {field.name for field in dataclasses.fields(DPOConfig)}, "the page says that it is gone"


def check_word(word: str, cell: str, configs: list[type]) -> int:
    if word in NO_ARGUMENTS or "margin" in cell.split("`")[:1]:
        return 0
    pairs = dict(pair.partition("=")[::2] for pair in re.findall(r"\w+=(?:\[[^\]]*\]|[^,]+)", word)) or {word: ""}
    for name, value in pairs.items():
        having = [config for config in configs if name in {field.name for field in dataclasses.fields(config)}]
        if not value and any(name in inspect.signature(trainer_of(config)).parameters for config in configs):
            continue
        if having:
            check_value(name, value.strip(), cell, having)
            assert cell.startswith("all ") or len(having) == len(configs), f"{cell}: not all of {configs} have {name}"
            continue
        assert not value, f"{cell}: TRL has no argument {name!r}"
        # a value, or a metric, before which some trainers write "eval_"
        written = re.compile(rf'["}}]{re.escape(word)}"')
        assert any(written.search(source_of(config)) for config in configs), f"{cell}: TRL knows no {word!r}"
    return 1


def check_value(name: str, value: str, cell: str, configs: list[type]) -> None:
    """A value is the default where the row says so, and a word that the trainer knows otherwise."""
    if "the default" in cell:
        for config in configs:
            if config in (DPOConfig, KTOConfig, RewardConfig):
                assert str(default_of(config, name)) == value, (name, config, default_of(config, name))
    for word in re.findall(r"[a-z]+_?[a-z_]+", value) if name in ("loss_type", "truncation_mode") else ():
        assert any(f'"{word}"' in source_of(config) for config in configs), f"{cell}: no {name} {word!r}"


def trainer_of(config: type) -> Any:
    module = importlib.import_module(config.__module__.replace("_config", "_trainer"))
    return getattr(module, config.__name__.replace("Config", "Trainer"))


def source_of(config: type) -> str:
    """The text of the configuration's module and of its trainer's."""
    trainer = importlib.import_module(config.__module__.replace("_config", "_trainer"))
    return inspect.getsource(trainer) + inspect.getsource(importlib.import_module(config.__module__))


def check_key(key: str, cell: str) -> None:
    """A key of ours: of a table of the configuration, or an option of one of the losses that rows are about."""
    from skyrl_engine.config.sections import sections
    from skyrl_engine_losses import plugin as losses

    section, _, rest = key.partition(".")
    if section == "loss":
        options = {field.name for name in losses.__all__ for field in dataclasses_of(getattr(losses, name))}
        assert rest in options | {"use", "terms", "corrections"}, f"{cell}: no option {rest!r} of a loss"
        return
    known = sections()
    assert section in known, f"{cell}: no table [{section}]"
    fields = {field.name for field in known[section].schema.__attrs_attrs__}
    assert rest.partition(".")[0] in fields, f"{cell}: [{section}] has no {rest!r}"


def dataclasses_of(plugin: Any) -> tuple[Any, ...]:
    schema = plugin.skyrl_engine_config_schema()
    return () if schema is None else schema.__attrs_attrs__


# ---------------------------------------------------------------- verl's functions


def losses_of_verl(composed: DictConfig) -> None:
    for row in table.rows():
        if row.engine != "verl":
            continue
        batch, masks = published_formulas.make_batch(one_advantage=row.theirs == "loss_mode=geo_mean")
        leaf, due = Padded(batch).their_loss(row.theirs, composed)
        (gradient,) = torch.autograd.grad(due, leaf)
        here = Padded(batch).mask.bool()
        ours, of_ours = table.objective(table.evolve(row, loss=own_loss(row)), batch, masks)
        distance = float(np.abs(gradient[here].numpy() - of_ours).max() / np.abs(of_ours).max())
        print(json.dumps({"verl": row.theirs, "theirs": due.item(), "ours": ours, "gradient": distance}), flush=True)
        assert distance <= TOLERANCE, row.theirs
        assert row.gradient_only or abs(ours - due.item()) <= TOLERANCE * max(1.0, abs(ours)), row.theirs


def own_loss(row: Any) -> tuple[str, dict[str, Any]]:
    """A reduction is compared under verl's vanilla loss."""
    return ("ppo_dual_clip", {}) if row.theirs.startswith("loss_agg_mode") else row.loss


class Padded:
    """The batch of the quick tests as verl has it: [B, T] with a mask."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        counts = [len(values) for values in batch.p]
        self.mask = (torch.arange(max(counts)) < torch.tensor(counts)[:, None]).double()

    def pad(self, name: str) -> torch.Tensor:
        values = torch.from_numpy(np.concatenate(getattr(self.batch, name)))
        return torch.zeros_like(self.mask).masked_scatter(self.mask.bool(), values)

    def their_loss(self, row: str, composed: DictConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the leaf that is differentiated, and verl's loss of it."""
        given = dict(pair.split("=") for pair in row.split(", "))
        leaf = self.pad("p").requires_grad_()
        reduction = {"loss_mask": self.mask, "loss_agg_mode": "token-mean"}
        if "kl_loss_type" in given:
            return leaf, core_algos.agg_loss(core_algos.kl_penalty(leaf, self.pad("ref"), given["kl_loss_type"]), **reduction)
        if "cliprange_value" in given:
            values = {"vpreds": leaf, "returns": self.pad("returns"), "values": self.pad("old_values"), "response_mask": self.mask}
            return leaf, core_algos.compute_value_loss(**values, cliprange_value=float(given["cliprange_value"]))[0]
        mode = given.get("loss_mode", "vanilla")
        options = OmegaConf.create(OmegaConf.to_container(composed.actor_rollout_ref.actor, resolve=True))
        # what a trainer sets, and no loss reads
        options.use_dynamic_bsz = True
        for name in given.keys() - {"loss_mode", "loss_agg_mode", "loss_scale_factor"}:
            options[name] = float(given[name])
        actor = omega_conf_to_dataclass(options)
        actor.global_batch_info.update({"dp_size": 1})
        if "loss_scale_factor" in given:
            actor.global_batch_info["loss_scale_factor"] = int(given["loss_scale_factor"])
        means = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}
        function: Callable[..., tuple[torch.Tensor, Mapping[str, Any]]] = core_algos.get_policy_loss_fn(mode)
        loss, _ = function(
            old_log_prob=self.pad("old"),
            log_prob=leaf,
            advantages=self.pad("a"),
            response_mask=self.mask,
            loss_agg_mode=given.get("loss_agg_mode", means.get(mode, "token-mean")),
            config=actor,
        )
        return leaf, loss


def main() -> None:
    warnings.filterwarnings("ignore")
    configs = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(configs), version_base=None):
        composed = compose("ppo_trainer")
    options_of_trl()
    options_of_verl(composed)
    arguments_of_trl()
    losses_of_verl(composed)


if __name__ == "__main__":
    main()
