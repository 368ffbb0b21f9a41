"""Choose what a configuration leaves open with "auto": the precision, the collator, and the token budget of micro-batches.

Each choice is told with its reason (`tell`), and is in the configuration that the run records, with which it goes on after an interruption.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from attrs import define, evolve, field, frozen

from skyrl_engine.config import ResolvedConfig, SelectedPlugin
from skyrl_engine.config.automatic import (
    COLLATOR,
    DTYPE,
    PROMPT,
    find_sizes,
    list_automatic_keys,
    with_collator,
    with_dtype,
    with_max_prompt_tokens,
    with_micro_batch_tokens,
)
from skyrl_engine.config.converter import NONE_WORD
from skyrl_engine.contracts.kinds.backend import BackendDescription
from skyrl_engine.contracts.kinds.collator import CARRIED_EXTRAS, Collator, declared_extras, measure_lengths
from skyrl_engine.contracts.kinds.context import FactoryContext
from skyrl_engine.contracts.values.bundles import Bundles
from skyrl_engine.contracts.values.columns import SampleColumns
from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.contracts.values.prefixes import LEAST_SHARED
from skyrl_engine.contracts.values.topology import Topology
from skyrl_engine.engine.capability import check_loading
from skyrl_engine.engine.model_shape import read_model_shape
from skyrl_engine.errors import EngineError
from skyrl_engine.model_facts.facts import ModelFacts
from skyrl_engine.model_facts.memory import CPU_GROUP_TOKENS, CPU_MICRO_BATCH_TOKENS, format_bytes
from skyrl_engine.model_facts.rank_memory import plan_micro_batch_tokens
from skyrl_engine.registry.kinds import KINDS
from skyrl_engine.registry.owner import Owner
from skyrl_engine.run.log import tell
from skyrl_engine.workers.process_group import pick_device

logger = logging.getLogger(__name__)

PREFERRED: Final[tuple[RowKind, ...]] = ("tree", "packed", "padded")
"""The forms of rows among which the engine chooses, the best first; the collators of this project are called as they are."""

USUAL_PROMPT: Final = 1024
"""Most tokens of a prompt in reinforcement learning, where the model has positions for them and for an answer."""

WORTH_SHARING: Final = 0.05
"""Share of a mini-batch's tokens from which computing common prefixes once is worth looking for them."""


@frozen
class Choice:
    """A value that the engine chose for `key`, and the reason, as a clause."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.reason}"


@define(eq=False)
class Choices:
    """A configuration whose open keys are chosen one after the other. `made` are the choices so far."""

    resolved: ResolvedConfig
    made: list[Choice] = field(factory=list)

    def is_open(self, key: str) -> bool:
        """Say whether a key still waits for its choice."""
        return key in list_automatic_keys(self.resolved)

    def choose_dtype(self) -> None:
        """Choose the precision by the device of the ranks, where it is open."""
        if not self.is_open(DTYPE):
            return
        device = find_device(self.resolved)
        dtype: Any = "bfloat16" if device == "cuda" else "float32"
        self.resolved = with_dtype(self.resolved, dtype)
        self._add(Choice(DTYPE, dtype, f"on {_DEVICES[device]}; the weights that are trained are float32"))

    def choose_max_prompt_tokens(self, facts: ModelFacts) -> None:
        """Choose the longest prompt of a task by the model's positions, where it is open; told where the model has few.

        An answer that takes all positions is refused later, by its own key: prompts get half of the positions then.
        """
        if not self.is_open(PROMPT):
            return
        positions, answer = facts.extended_length, self.resolved.config.rl.max_tokens
        if positions is None or positions - answer >= USUAL_PROMPT:
            self.resolved = with_max_prompt_tokens(self.resolved, USUAL_PROMPT)
            return
        tokens, reason = positions - answer, f"what rl.max_tokens = {answer:,} leaves of the model's {positions:,} positions"
        if tokens < 1:
            tokens, reason = max(1, positions // 2), f"half of the model's {positions:,} positions"
        self.resolved = with_max_prompt_tokens(self.resolved, tokens)
        self._add(Choice(PROMPT, f"{tokens:,}", reason))

    def choose_collator(
        self, collators: "Collators", *, unpaid: str | None, datasets: Sequence[SampleColumns] = ()
    ) -> SelectedPlugin:
        """Choose the best collator for this data; `unpaid` says, as a clause, why sharing prefixes would not pay. Raises PluginError."""
        name, sizes = find_sizes(self.resolved)
        rows, reason = collators.choose(
            unpaid=unpaid, datasets=datasets, counts_rows=None if sizes.micro_batch_rows is None else name
        )
        collator = collators.select(rows)
        self.resolved = with_collator(self.resolved, collator)
        self._add(Choice(COLLATOR, collator.loaded.record.name, reason))
        return collator

    def choose_micro_batch_tokens(
        self, facts: ModelFacts, description: BackendDescription, *, largest: int, shared: int = 0, batch_local: bool = False
    ) -> None:
        """Choose the token budget of micro-batches, where it is open.

        It is never less than `largest`, the tokens of what stays together, and on CPUs holds `shared`, those of a group that computes its
        prompt once, unless these are very many. There is none for `batch_local` parts, whose values depend on the cut.
        """
        name, sizes = find_sizes(self.resolved)
        key = f"{name}.micro_batch_tokens"
        if not self.is_open(key):
            return
        if sizes.micro_batch_rows is not None:
            self.resolved = with_micro_batch_tokens(self.resolved, None)
            return
        if batch_local:
            self.resolved = with_micro_batch_tokens(self.resolved, None)
            self._add(Choice(key, NONE_WORD, "a part of the loss depends on the cut, so that each rank computes one micro-batch"))
            return
        device = find_device(self.resolved)
        planned, reason = plan_budget(self.resolved, facts, description, device)
        if device == "cpu" and planned < shared:
            planned, reason = min(shared, CPU_GROUP_TOKENS), "so that a group computes its prompt once"
        if planned < largest:
            planned, reason = largest, "as many as the longest sample, or pair, may take"
        self.resolved = with_micro_batch_tokens(self.resolved, planned)
        self._add(Choice(key, f"{planned:,}", reason))

    def need_no_micro_batches(self) -> None:
        """Leave a token budget that is open without a value: no rank computes anything."""
        name, _ = find_sizes(self.resolved)
        if self.is_open(f"{name}.micro_batch_tokens"):
            self.resolved = with_micro_batch_tokens(self.resolved, None)

    def _add(self, choice: Choice) -> None:
        self.made.append(choice)
        tell(logger, str(choice))


_DEVICES: Final = {"cpu": "the CPU", "cuda": "CUDA devices"}


def find_device(resolved: ResolvedConfig) -> str:
    """Return the kind of device that ranks compute on, "cpu" or "cuda", as far as this machine tells; ranks may be on others."""
    if resolved.assumed.device_bytes is not None:
        return "cuda"
    run = resolved.config.run
    try:
        return pick_device(run.device, 0).partition(":")[0]
    except EngineError:
        return run.device  # the ranks may be where there is one; where they are here, planning refuses it


def find_device_bytes(resolved: ResolvedConfig) -> int | None:
    """Return the memory of a GPU that the plan is for, or of this machine; None where it has none."""
    if resolved.assumed.device_bytes is not None:
        return resolved.assumed.device_bytes
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else None


def plan_budget(resolved: ResolvedConfig, facts: ModelFacts, description: BackendDescription, device: str) -> tuple[int, str]:
    """Return the tokens of a micro-batch that fit a rank's memory, and the reason, as a clause."""
    if device != "cuda":
        return CPU_MICRO_BATCH_TOKENS, "the size from which CPUs compute no faster"
    if (memory := find_device_bytes(resolved)) is None:
        return CPU_MICRO_BATCH_TOKENS, "the ranks' memory is not known here"
    shape = read_model_shape(facts.model)
    layout, optimizer = description.describe_state(facts.model), resolved.config.optimizer
    tokens = (
        None
        if shape is None
        else plan_micro_batch_tokens(
            shape,
            layout,
            description.topology,
            memory=memory,
            optimizer=optimizer.use,
            ema=optimizer.ema_decay is not None,
            stochastic_rounding=optimizer.stochastic_rounding,
        )
    )
    if tokens is None:
        return CPU_MICRO_BATCH_TOKENS, "the model's files do not say what it takes"
    return tokens, f"their activations fit {format_bytes(memory)} beside the model and its optimizer"


@define(eq=False)
class Collators:
    """The collators among which the engine chooses for a run, and what its backend and its model say of their rows."""

    resolved: ResolvedConfig
    owner: Owner
    facts: ModelFacts
    description: BackendDescription
    context: FactoryContext
    _refusals: dict[RowKind, str | None] = field(factory=dict, init=False)

    def select(self, rows: RowKind) -> SelectedPlugin:
        """Return the collator of a form of rows, with its default options. Raises PluginError where it is not installed."""
        record = self.resolved.registry.resolve("collator", f"{KINDS['collator'].automatic}:{rows}")
        return SelectedPlugin.of(record, {}, "auto")

    def choose(
        self, *, unpaid: str | None, datasets: Sequence[SampleColumns] = (), counts_rows: str | None = None
    ) -> tuple[RowKind, str]:
        """Return the best form of rows, and the reason, as a clause; `counts_rows` names the table whose `micro_batch_rows` is given."""
        if counts_rows is not None:
            return "padded", f"{counts_rows}.micro_batch_rows counts rows of one sample"
        without: list[str] = []
        for rows in PREFERRED:
            reason = unpaid if rows == "tree" else None
            if reason is None and rows != "padded":
                reason = self._find_refusal(rows) or self._find_missing_extras(rows, datasets)
            if reason is None:
                return rows, "; ".join([_ADVANTAGES[rows], *without])
            without.append(f"not {rows}, because {reason}")
        raise AssertionError("padded is always possible")

    def has_rehearsed(self, rows: RowKind) -> bool:
        """Say whether the backend was asked about these rows, and has not refused them."""
        return self._refusals.get(rows, "") is None

    def _find_refusal(self, rows: RowKind) -> str | None:
        if rows == "packed" and rows in self.description.capabilities and self.has_rehearsed("tree"):
            # rows of documents ask less of a model than rows of shared prefixes
            return None
        if rows not in self._refusals:
            self._refusals[rows] = self._rehearse(rows)
        return self._refusals[rows]

    def _rehearse(self, rows: RowKind) -> str | None:
        if rows not in self.description.capabilities:
            return f"the backend does not declare the capability {rows!r}"
        for model in (self.facts.model, *list_models_beside(self.resolved)):
            try:
                check_loading(self.owner, ModelFacts(model), self.description, rows)
            except EngineError as error:
                return error.cause
        return None

    def _find_missing_extras(self, rows: RowKind, datasets: Sequence[SampleColumns]) -> str | None:
        present = {name for columns in datasets for name in columns.extras}
        needed = {capability for capability, names in CARRIED_EXTRAS.items() if names & present}
        if not needed:
            return None
        product: Collator = self.select(rows).bind("collator", self.context).product
        missing = sorted(needed - declared_extras(product))
        return f"it does not carry {' and '.join(missing)}" if missing else None


_ADVANTAGES: Final[Mapping[RowKind, str]] = {
    "tree": "common prefixes are computed once, without padding",
    "packed": "samples lie one after the other, without padding",
    "padded": "one sample per row",
}


def list_models_beside(resolved: ResolvedConfig) -> tuple[ModelConfig, ...]:
    """Return the frozen models that score the same rows as the trained one and have a path of their own."""
    config = resolved.config
    tables = [(getattr(config, name), False) for name in ("reference", "teacher") if config.has(name)]
    tables += [(table, True) for table in config.rl.reward_models] if config.has("rl") else []
    return tuple(
        evolve(
            config.model,
            path=table.path,
            revision=table.revision,
            lora=None,
            value_head=classifies,
            classifier=classifies,
            right_label=None,
        )
        for table, classifies in tables
        if table.path is not None
    )


def find_unpaid(collators: Collators, columns: SampleColumns) -> str | None:
    """Return why computing common prefixes of these samples once would not pay, as a clause; None where it would."""
    product: Collator = collators.select("tree").bind("collator", collators.context).product
    prefixes = measure_lengths(product, columns).prefixes
    tokens = int(columns.token_offsets[-1])
    shared = 0 if prefixes is None else int(prefixes.shared.sum())
    if tokens and shared >= WORTH_SHARING * tokens:
        return None
    share = f"{shared / max(tokens, 1):.1%} of their tokens in beginnings of at least {LEAST_SHARED} tokens"
    return f"samples of the first mini-batch share {share}"


def find_largest_unit(columns: SampleColumns, rows: RowKind, topology: Topology) -> int:
    """Count the tokens of the unit of samples that takes most room in a micro-batch, padding included."""
    units = Bundles.by_label(np.arange(len(columns), dtype=np.int64), columns.unit_ids)
    alignment = align_for(topology)
    tokens = -(-np.diff(columns.token_offsets) // alignment) * alignment
    sizes = units.sizes * units.maxima(tokens) if rows == "padded" else units.sums(tokens)
    return int(sizes.max(initial=1))


def find_longest(columns: SampleColumns, topology: Topology) -> int:
    """Count the tokens of the longest sample, with what pads it for ranks that share it."""
    alignment = align_for(topology)
    return -(-int(np.diff(columns.token_offsets).max(initial=1)) // alignment) * alignment


def align_for(topology: Topology) -> int:
    """Return the number of tokens to a multiple of which a sample is padded, so that ranks that share its row get equal parts."""
    return topology.tp if topology.cp == 1 else 2 * topology.tp * topology.cp
