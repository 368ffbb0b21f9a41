"""Keys of other trainers that make one of ours together: rows and accumulated steps, a reward's file and function, a term and its factor."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from attrs import define, field

from skyrl_engine.config.reading.origins import KeyPath, format_key

Line = Mapping[KeyPath, int]

_ROWS: Final = ("micro_batch_size", "per_device_train_batch_size")
_STEPS: Final = "gradient_accumulation_steps"
_PACKING: Final = ("sample_packing", "packing", "padding_free")
_LENGTHS: Final = ("sequence_len", "max_length", "max_seq_length", "cutoff_len")
_ESTIMATORS: Final = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_ACTOR: Final = ("actor_rollout_ref", "actor")


@define
class Combined:
    """Keys that were combined.

    `taken` are our values with their origin by dotted key, `used` the other's keys that are done, and `said` others of them with the reason why
    nothing has to be written (True) or why they are left to the reader (False).
    """

    table: Mapping[str, Any]
    lines: Line
    taken: dict[str, tuple[Any, str]] = field(factory=dict)
    used: set[str] = field(factory=set)
    said: list[tuple[KeyPath, str, bool]] = field(factory=list)

    def find(self, *path: str) -> Any:
        """Return the value at a path; None where it is not set."""
        return find_inside(self.table, *path)

    def take(self, key: str, value: Any, *paths: KeyPath, remark: str = "", joined: str = "; ") -> None:
        """Take a value over that these keys say together."""
        present = [path for path in paths if self.find(*map(str, path)) is not None]
        origin = joined.join(self._name(path) for path in present)
        self.taken[key] = value, f"{origin}{remark}"
        self.used |= {format_key(path) for path in present}

    def say(self, why: str, *paths: KeyPath, needless: bool = True) -> None:
        """Leave these keys out, those that are set, and say why."""
        for path in paths:
            if self.find(*map(str, path)) is not None:
                self.said.append((path, why, needless))
                self.used.add(format_key(path))

    def _name(self, path: KeyPath) -> str:
        line = self.lines.get(path)
        return f"{format_key(path)}{'' if line is None else f', line {line}'}"


def combine_keys(table: Mapping[str, Any], lines: Line, trainer: str) -> Combined:
    """Return what keys of another trainer's configuration say together."""
    combined = Combined(table, lines)
    if trainer != "rl":
        _combine_batches(combined)
        _name_other_forms(combined)
    elif find_inside(table, *_ACTOR) is not None:
        _combine_reward(combined)
        _combine_actor(combined)
        _combine_terms(combined)
    return combined


def find_inside(table: Any, *names: str) -> Any:
    """Return the value at a path of tables; None where it is not set."""
    for name in names:
        table = table.get(name) if isinstance(table, Mapping) else None
    return table


def _combine_batches(combined: Combined) -> None:
    """Take rows of a device and accumulated steps over as a batch, and packed rows of a length as tokens."""
    rows = next((key for key in _ROWS if isinstance(combined.find(key), int)), None)
    if rows is None:
        return
    count, steps = combined.find(rows), combined.find(_STEPS)
    factor = steps if isinstance(steps, int) else 1
    paths = [(rows,), *([(_STEPS,)] if isinstance(steps, int) else [])]
    packed = any(combined.find(key) is True for key in _PACKING)
    remark = ", of one rank: multiply by the ranks that trained"
    if packed:
        remark += ", and by the samples that a packed row held"
    combined.take("training.batch_size", count * factor, *paths, remark=remark, joined=" times ")
    if not packed:
        combined.take("training.micro_batch_rows", count, (rows,))
        return
    length = next((key for key in _LENGTHS if isinstance(combined.find(key), int)), None)
    if length is not None:  # the length is a key of its own, too
        origin = f"{rows} times {length}: rows are packed"
        combined.taken["training.micro_batch_tokens"] = count * combined.find(length), origin


def _name_other_forms(combined: Combined) -> None:
    """Say of datasets whose rows have another form than the first one's that one run reads one form."""
    datasets = combined.find("datasets")
    if not isinstance(datasets, list):
        return
    forms = [entry.get("type") if isinstance(entry, Mapping) else None for entry in datasets]
    for number, form in enumerate(forms):
        if form is not None and forms[0] is not None and form != forms[0]:
            path: KeyPath = ("datasets", number, "type")
            why = f"a run reads rows of one form, and the first dataset's is {forms[0]!r}: write these rows in that form"
            combined.said.append((path, why, False))
            combined.used.add(format_key(path))


def _combine_reward(combined: Combined) -> None:
    """Take verl's files of tasks and its reward function over as an environment."""
    reward, tasks = (("custom_reward_function", "path"), ("data", "train_files"))
    place, data = combined.find(*reward), combined.find(*tasks)
    if not isinstance(place, str) or not isinstance(data, str | list):
        return
    name, prompt = combined.find("custom_reward_function", "name"), combined.find("data", "prompt_key")
    held_out = combined.find("data", "val_files")
    environment: dict[str, Any] = {
        "use": "function",
        "reward": f"{place if place.startswith(('.', '/', '~')) else f'./{place}'}:{name or 'compute_score'}",
        "form": "verl",
        "data": data,
        **({"eval_data": held_out} if isinstance(held_out, str | list) else {}),
        **({"map": {"prompt": prompt}} if isinstance(prompt, str) and prompt != "prompt" else {}),
    }
    paths = (reward, ("custom_reward_function", "name"), tasks, ("data", "val_files"), ("data", "prompt_key"))
    combined.take("environments", [environment], *paths)


def _combine_actor(combined: Combined) -> None:
    """Take verl's mini-batches and the two ends of its clip over."""
    batch, mini = combined.find("data", "train_batch_size"), combined.find(*_ACTOR, "ppo_mini_batch_size")
    if isinstance(batch, int) and isinstance(mini, int) and mini > 0 and batch % mini == 0:
        combined.take("rl.mini_batches", batch // mini, (*_ACTOR, "ppo_mini_batch_size"), remark=": data.train_batch_size over it")
    both = (*_ACTOR, "clip_ratio")
    for ours, theirs in (("loss.clip_low", "clip_ratio_low"), ("loss.clip_high", "clip_ratio_high")):
        path = (*_ACTOR, theirs)
        path = path if combined.find(*path) is not None else both
        if isinstance(value := combined.find(*path), int | float):
            combined.take(ours, value, path)
    combined.say("clip_ratio_low and clip_ratio_high go before it", *({both} if format_key(both) not in combined.used else ()))


def _combine_terms(combined: Combined) -> None:
    """Take verl's divergences from the reference and its entropy over, and leave out what belongs to one that is off."""
    loss = [(*_ACTOR, name) for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type")]
    terms = list(_list_terms(combined, loss))
    if terms:
        used = [path for _, paths in terms for path in paths]
        combined.take("loss.terms", [term for term, _ in terms], *used)
    if combined.find(*loss[0]) in (None, False):
        combined.say("no divergence from the reference is in the loss", *loss)
    entropy = (*_ACTOR, "entropy_coeff")
    if combined.find(*entropy) == 0:
        combined.say("no entropy is in the loss", entropy)
    use, kind = ("algorithm", "use_kl_in_reward"), ("algorithm", "kl_penalty")
    coef = ("algorithm", "kl_ctrl", "kl_coef")
    if combined.find(*use) is True and (estimator := _ESTIMATORS.get(combined.find(*kind) or "kl")):
        combined.take("rl.kl", {"coef": combined.find(*coef) or 0.001, "estimator": estimator}, use, kind, coef)
    elif combined.find(*use) in (None, False):
        more = (("algorithm", "kl_ctrl", name) for name in ("type", "horizon", "target_kl"))
        combined.say("no divergence from the reference is in the reward", use, kind, coef, *more)


def _list_terms(combined: Combined, loss: Sequence[KeyPath]) -> Iterator[tuple[dict[str, Any], Sequence[KeyPath]]]:
    use, coef, kind = (combined.find(*map(str, path)) for path in loss)
    if use is True and (estimator := _ESTIMATORS.get(kind or "low_var_kl")):
        yield {"use": "kl", "coef": 0.001 if coef is None else coef, "estimator": estimator}, loss
    entropy = combined.find(*_ACTOR, "entropy_coeff")
    if isinstance(entropy, int | float) and entropy > 0:
        yield {"use": "entropy", "coef": entropy}, [(*_ACTOR, "entropy_coeff")]
