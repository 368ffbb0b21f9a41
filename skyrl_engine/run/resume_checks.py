"""Compare the session that wrote a checkpoint with the one that resumes from it, and refuse what must not differ."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from skyrl_engine.config.schema import ModelConfig
from skyrl_engine.contracts.values.model import NEW_ADAPTERS
from skyrl_engine.errors import CheckpointError
from skyrl_engine.model_facts.identity import weights_fingerprint

_IDENTITY = ("distribution", "name", "version", "sha256")
_OF_THE_MACHINE = ("run.directory", "run.observers", "run.ray_address", "run.oversubscribe", "run.profile_")
_WITHOUT_EFFECT = (*_OF_THE_MACHINE, "observers.", "checkpoint.", "evaluation.", "plugins.")
"""Configuration that no step's numbers depend on (which plugins were chosen is compared by itself)."""
_OF_ADAPTERS = tuple(f"model.lora.{key}" for key in NEW_ADAPTERS)
"""Keys that adapters at `model.lora.path` say themselves where the configuration does not."""

_ROUNDING = ("nf4", "nf4_double")
"""Keys of a checkpoint's base whose weights are held in 4 bits, without and with double quantization; none where they are not."""
_HOW_TO_ROUND = {
    None: "Remove model.lora.load_in_4bit",
    "nf4": "Set model.lora.load_in_4bit = true, without double_quantization",
    "nf4_double": "Set model.lora.load_in_4bit = true and model.lora.double_quantization = true",
}

OLDER_RULE = (
    "the run was begun by an engine before 0.3, which trained prompts and answers that are texts as they stood. This engine has the "
    'chat template of the model write them; data.template = "none" trains on them as they stand'
)
"""Said of runs whose rows of texts were read before `data.template` was a key."""

Lock = Mapping[str, Any]


@frozen
class Change:
    """One configuration key that differs; None stands for a key that is absent on one side."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.after!r}"


def has_older_rule(data: Any) -> bool:
    """Return True for the table `[data]` of a run that was begun before `data.template` was a key."""
    return isinstance(data, Mapping) and "template" not in data


def refuse_changed_plugins(before: Mapping[str, Lock], after: Mapping[str, Lock], *, allow_changed: Sequence[str]) -> list[str]:
    """Compare plugin locks by their place in the configuration. Differences that `allow_changed` ("kind:name") permits come back as sentences.

    Raises CheckpointError listing every other difference. That another backend may be allowed is not said: each has its own files, and one that
    reads those of another is for its author to name.
    """
    allowed: list[str] = []
    wrote: str | None = None
    refused: list[tuple[str, str]] = []
    for kind in dict.fromkeys([*before, *after]):
        old, new = _record(before, kind), _record(after, kind)
        if [old.get(key) for key in _IDENTITY] == [new.get(key) for key in _IDENTITY]:
            continue
        difference = f"{kind}: {_describe(old)} -> {_describe(new)}"
        names = {_permission(record, kind) for record in (old, new) if record}
        if names & set(allow_changed):
            allowed.append(difference)
        else:
            refused.append((_permission(new or old, kind), difference))
            wrote = old["name"] if kind == "backend" and _maker(old) != _maker(new) else wrote
    if wrote is not None:
        raise CheckpointError(
            "the checkpoint was made with another backend, whose files this one does not read",
            remedy=f'Set backend.use = "{wrote}", or start a new run from an exported model',
            details=[difference for _, difference in refused],
        )
    if refused:
        names_to_allow = ", ".join(f'"{name}"' for name, _ in refused)
        raise CheckpointError(
            "the checkpoint was made with other plugins",
            remedy=f"Install the versions it was made with, or set checkpoint.allow_changed = [{names_to_allow}] to resume inexactly",
            details=[difference for _, difference in refused],
        )
    return allowed


def refuse_other_trainer(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Compare the trainers of two configurations. Raises CheckpointError: what one trainer saves, another cannot go on from."""
    if before["trainer"] != after["trainer"]:
        raise CheckpointError(
            f"the checkpoint is one of trainer {before['trainer']}, and this run's trainer is {after['trainer']}",
            remedy=f'Set trainer = "{before["trainer"]}", or start a new run from an exported model',
        )


def base_of(model: ModelConfig) -> dict[str, Any]:
    """Identify the weights that a run of adapters leaves as they are, as a document of its checkpoints; empty for a run of all weights."""
    if model.lora is None:
        return {}
    rounded = {_ROUNDING[model.lora.double_quantization]: True} if model.lora.load_in_4bit else {}
    return {"weights_sha256": weights_fingerprint(model), **rounded}


def refuse_other_base(model: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Compare what `base_of` gave. Raises CheckpointError: adapters mean nothing on another base than theirs. `model` is the checkpoint's."""
    if before and (wrong := [key for key in _ROUNDING if before.get(key) != after.get(key)]):
        kept = next((key for key in _ROUNDING if before.get(key)), None)
        raise CheckpointError(
            f"the checkpoint holds adapters over base weights in {'their own precision' if kept is None else '4 bits'}, and this run's are "
            f"held otherwise ({', '.join(wrong)})",
            remedy=_HOW_TO_ROUND[kept] + ", or start a new run",
        )
    recorded, present = before.get("weights_sha256"), after.get("weights_sha256")
    if recorded is not None and present is not None and recorded != present:
        revision = f" and model.revision = {model['revision']!r}" if model.get("revision") else ""
        raise CheckpointError(
            "the checkpoint holds adapters of another base model: the weights of model.path are not those it was trained on",
            remedy=f"Set model.path to that model (it was {model['path']!r}){revision}, or start a new run on this one",
        )


def find_changed_keys(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Keys on which the results may depend and whose values differ, in the order of `after`."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return [
        Change(key, old.get(key), new.get(key))
        for key in dict.fromkeys([*new, *old])
        if not key.startswith(_WITHOUT_EFFECT) and old.get(key) != new.get(key)
        if not (key in _OF_ADAPTERS and new.get(key) is None and "model.lora.path" in new)
    ]


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif _is_list(value) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                yield from _leaves(item, f"{prefix}{key}[{number}].")
        else:
            yield f"{prefix}{key}", list(value) if _is_list(value) else value


def _is_list(value: object) -> bool:
    """JSON knows one kind of list; a tuple compares equal to what it becomes there."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _record(locks: Mapping[str, Lock], kind: str) -> Mapping[str, Any]:
    record: Mapping[str, Any] = locks[kind]["record"] if kind in locks else {}
    return record


def _maker(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record.get("distribution"), record.get("name")


def _permission(record: Mapping[str, Any], place: str) -> str:
    """Name a plugin as `allow_changed` does: by its kind, which is not its place where there may be several."""
    return f"{record.get('kind', place)}:{record['name']}"


def _describe(record: Mapping[str, Any]) -> str:
    if not record:
        return "none"
    version = record.get("version") or (f"sha256 {str(record['sha256'])[:12]}" if record.get("sha256") else "no version")
    return f"{record.get('distribution') or record.get('path') or 'local file'}:{record['name']} ({version})"
