"""The table `[serve]`, and the engine's configuration of a model that a client asks for."""

import logging
import tomllib
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, instance_of

from skyrl_engine import UnsupportedError
from skyrl_engine.contracts import ModelConfig
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine_tinker import losses
from skyrl_engine_tinker.adapted import EVERYWHERE, AdaptedLayers
from skyrl_engine_tinker.checkpoints import Address, Facts, SavedWeights
from skyrl_engine_tinker.errors import RequestError

logger = logging.getLogger(__name__)

ALPHA = 32
"""Alpha of new adapters; clients give a rank alone."""


def _to_tuple(value: object) -> tuple[object, ...]:
    """One text is a list of one, and not of its letters."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _require_installed(_table: object, _field: object, reference: str) -> None:
    """Refuse what is no `distribution:name` of an installed loss: a client's loss never comes out of a file."""
    names = {
        f"{entry_point.dist.name}:{entry_point.name}"
        for entry_point in entry_points(group="skyrl_engine.loss")
        if entry_point.dist is not None
    }
    if reference not in names:
        raise ValueError(f"losses has {reference!r}, and the losses that are installed are {', '.join(sorted(names))}")


def _read_models(path: Path, given: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str], frozenset[str]]:
    """Return the paths of models and, where the table names them, their tokenizers, by name; and the names of those that are not trained.

    Raises UnsupportedError.
    """
    paths, tokenizers, frozen_names = {}, {}, set()
    for name, value in given.items():
        table = value if isinstance(value, dict) else {"path": value}
        if not isinstance(table.get("path"), str):
            raise UnsupportedError(f"{path}: serve.models.{name} is no text", remedy="Write a directory or a hub id")
        if unknown := sorted(table.keys() - {"path", "tokenizer", "trainable"}):
            raise UnsupportedError(
                f"{path}: serve.models.{name} has no key {unknown[0]!r}", remedy="Use path, tokenizer and trainable"
            )
        if not isinstance(trainable := table.get("trainable", True), bool):
            raise UnsupportedError(f"{path}: serve.models.{name}.trainable is neither true nor false", remedy="Write true or false")
        if not trainable:
            frozen_names.add(name)
        paths[name] = table["path"]
        if "tokenizer" in table:
            if not isinstance(table["tokenizer"], str) or not table["tokenizer"]:
                raise UnsupportedError(
                    f"{path}: serve.models.{name}.tokenizer is no text", remedy="Write a hub id that clients can load"
                )
            tokenizers[name] = table["tokenizer"]
    return paths, tokenizers, frozenset(frozen_names)


@frozen(kw_only=True)
class ServeTable:
    """The table `[serve]`. `models` are directories or hub ids by the names that clients may ask for."""

    models: Mapping[str, str]
    losses: tuple[str, ...] = field(
        default=(), converter=_to_tuple, validator=deep_iterable(and_(instance_of(str), _require_installed))
    )
    """Losses of installed plugins that clients may ask for, as `distribution:name`."""
    directory: str = field(default="served", validator=instance_of(str))
    longest: int = field(default=32_768, validator=[instance_of(int), ge(1)])
    """The most tokens of a datum, and of a prompt together with its sample, where the model does not take fewer."""
    body_bytes: int = field(default=64 * 2**20, validator=[instance_of(int), ge(1)])
    """Bytes of a request, also when it is decompressed."""
    samples: int = field(default=1_024, validator=[instance_of(int), ge(1)])
    """Samples under way at once."""
    top_logprobs: int = field(default=100, validator=[instance_of(int), ge(0)])
    """The most likely tokens at a place of a prompt or of a sample, at most."""
    max_models: int = field(default=4, validator=[instance_of(int), ge(1)])
    """Models that are trained at once: sets of adapters over one base model. Of full weights there is one alone."""
    max_rank: int = field(default=512, validator=[instance_of(int), ge(1)])
    """Rank of a model's adapters, at most."""
    weight_sets: int = field(default=8, validator=[instance_of(int), ge(0)])
    """Copies of weights that samplers of earlier steps and of checkpoints keep, at most, for each model; in-flight samplers have one more. A
    copy is the whole model in the precision of `model.dtype`."""
    gap_timeout_s: float = field(default=60.0, validator=[instance_of((int, float)), ge(0)])
    """Seconds that requests wait for a missing one with a smaller number."""
    session_seconds: float = field(default=120.0, validator=[instance_of((int, float)), gt(0)])
    """Seconds that a session lives without a sign of life; clients send a heartbeat every 10."""


_OLD_KEYS: Final = {"hole_seconds": "gap_timeout_s"}
"""Keys of `[serve]` in version 0.2 by their new names; read, with a warning, in 0.3."""


def _replace_old_keys(path: Path, serve: dict[str, Any]) -> None:
    """Give keys of the version before their new names. Raises UnsupportedError where both are set."""
    for old, new in _OLD_KEYS.items():
        if old not in serve:
            continue
        if new in serve:
            raise UnsupportedError(f"{path}: serve has {old} and {new}, which are one key", remedy=f"Remove serve.{old}")
        logger.warning("%s: serve.%s is called serve.%s from 0.3 on; 0.4 will not read the old name", path, old, new)
        serve[new] = serve.pop(old)


@frozen
class Settings:
    """A configuration file as the server reads it: the table `[serve]`, and the tables that every model's engine is opened with."""

    serve: ServeTable
    tables: Mapping[str, Any]
    directory: Path
    tokenizers: Mapping[str, str] = field(factory=dict)
    """Hub ids from which clients load tokenizers, by the names of models; never a place of this machine."""
    sampling_only: frozenset[str] = frozenset()
    """Names of models that are sampled from and score, and are never trained."""
    _lengths: dict[str, int | None] = field(factory=dict, init=False, eq=False)
    """Tokens that models take, by name, of those whose configuration was read."""

    @classmethod
    def read(cls, path: Path) -> "Settings":
        """Read a TOML file. Raises UnsupportedError for one that cannot be served from."""
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
            serve = dict(tables.pop("serve", {}))
        except (OSError, ValueError, TypeError) as error:
            raise UnsupportedError(f"{path} cannot be read: {error}", remedy="Give a TOML file with the table [serve]") from error
        known_keys = {attribute.name for attribute in attrs.fields(ServeTable)}
        _replace_old_keys(path, serve)
        if unknown := sorted(serve.keys() - known_keys):
            raise UnsupportedError(f"{path}: serve has no key {unknown[0]!r}", remedy=f"Use {', '.join(sorted(known_keys))}")
        if not isinstance(serve.get("models"), dict) or not serve["models"]:
            raise UnsupportedError(
                f"{path}: serve.models names no model", remedy='Write [serve.models] with lines "NAME" = "DIRECTORY"'
            )
        if reserved := sorted({"loss", "reducer", "corrections"} & tables.keys()):
            raise UnsupportedError(f"{path}: [{reserved[0]}] is the client's to choose", remedy="Remove it")
        if "path" in tables.get("model", {}) or "lora" in tables.get("model", {}):
            raise UnsupportedError(
                f"{path}: model.path and model.lora are the client's to choose", remedy="Name models in [serve.models]"
            )
        if isinstance(optimizer := tables.get("optimizer"), dict) and optimizer.get("use", "adamw") != "adamw":
            raise UnsupportedError(
                f"{path}: optimizer.use is the client's to choose, and all that the protocol has is AdamW", remedy="Remove it"
            )
        base = path.resolve().parent
        paths, tokenizers, sampling_only = _read_models(path, serve["models"])
        resolved_paths = {name: str(base / where) if (base / where).exists() else where for name, where in paths.items()}
        # a client has none of this machine's folders: what lies here goes by its name
        tokenizers = {name: where if where == resolved_paths[name] else name for name, where in paths.items()} | tokenizers
        try:
            table = ServeTable(**{**serve, "models": resolved_paths})
        except (TypeError, ValueError) as error:
            raise UnsupportedError(f"{path}: serve: {error.args[0]}", remedy="Give a value of this type and range") from error
        return cls(table, tables, base / table.directory, tokenizers, sampling_only)

    def require(self, base_model: str) -> None:
        """Raise RequestError for a model that the table does not name."""
        if base_model not in self.serve.models:
            raise RequestError(f"there is no model {base_model!r} here; there are {', '.join(self.serve.models)}")

    def require_trainable(self, base_model: str) -> None:
        """Raise RequestError for a model that the table does not name, or for sampling alone."""
        self.require(base_model)
        if base_model in self.sampling_only:
            trained = [name for name in self.serve.models if name not in self.sampling_only]
            raise RequestError(
                f"{base_model} is for sampling alone here (trainable = false in serve.models); models that can be trained: "
                f"{', '.join(trained) or 'none'}"
            )

    def longest_of(self, base_model: str) -> int:
        """Return the most tokens of a datum, or of a prompt with its sample: `serve.longest`, or fewer where the model takes fewer.

        Reads the model's configuration the first time.
        """
        if base_model not in self._lengths:
            table = self.tables.get("model", {})
            keys = ("revision", "trust_remote_code", "rotary_length")
            facts = ModelFacts(ModelConfig(path=self.serve.models[base_model], **{key: table[key] for key in keys if key in table}))
            if facts.config is None:
                # it is not here yet; the next request reads it
                return self.serve.longest
            self._lengths[base_model] = facts.longest_row
        length = self._lengths[base_model]
        return self.serve.longest if length is None else min(self.serve.longest, length)

    def tokenizer_of(self, base_model: str) -> str:
        """Return what a client loads a model's tokenizer from."""
        return self.tokenizers.get(base_model, base_model)

    def require_rank(self, rank: int) -> None:
        """Raise RequestError for a rank of adapters that is none, or too large."""
        if not 0 <= rank <= self.serve.max_rank:
            raise RequestError(f"rank is {rank}; it is 1 to {self.serve.max_rank} (serve.max_rank), or 0 for full weights")

    def engine(
        self, base_model: str, rank: int, seed: int | None, start: Path | None, layers: AdaptedLayers = EVERYWHERE
    ) -> dict[str, Any]:
        """Return the configuration of an engine. `start` are exported weights in the place of the base model's. Raises RequestError."""
        self.require(base_model)
        model = {**self.tables.get("model", {}), "path": self.serve.models[base_model]}
        if rank > 0:
            model["lora"] = {"rank": rank, "alpha": ALPHA, "targets": layers.targets} if start is None else {"path": str(start)}
        elif start is not None:
            model["path"] = str(start)
        run = {**self.tables.get("run", {}), **({} if seed is None else {"seed": seed})}
        return {
            "generator": {"use": "hf"},
            **self.tables,
            "model": model,
            "run": run,
            "loss": {"use": f"{losses.__file__}:cross_entropy"},
            "reducer": {"use": "sum"},
        }

    def find_weights(self, base_model: str, address: Address | None = None) -> SavedWeights:
        """Return a base model's weights as they lie on the disk, or those of a checkpoint. Raises RequestError."""
        self.require(base_model)
        base = self.serve.models[base_model]
        if address is None:
            return SavedWeights(base)
        facts, folder = Facts.of(self.directory, address), address.folder(self.directory) / "model"
        model, adapter = (base, folder) if facts.lora_rank else (str(folder), None)
        return SavedWeights(model, adapter, address.path, facts.time)
