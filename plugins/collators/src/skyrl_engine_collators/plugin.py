"""Entry points of this distribution. Importing this module imports attrs and pluggy alone; making a collator imports the rest."""

from typing import TYPE_CHECKING, Literal

from attrs import define, field
from attrs.validators import ge, in_, instance_of, optional

from skyrl_engine import hookimpl

if TYPE_CHECKING:
    from skyrl_engine.contracts import FactoryContext
    from skyrl_engine_collators.packed.collator import PackedCollator
    from skyrl_engine_collators.padded.collator import PaddedCollator
    from skyrl_engine_collators.tree.collator import TreeCollator


@define
class PaddedConfig:
    """Options of `padded`."""

    pad_token_id: int | None = field(default=None, validator=optional(ge(0)))
    """Token that fills a row on the left; none: the tokenizer's own padding token."""
    max_sequence_length: int | None = field(default=None, validator=optional(ge(1)))
    """The longest sample allowed, in tokens; none: the run's `data.max_length`, if it is set. No sample is truncated."""
    overlong: Literal["error", "warn"] = field(default="error", validator=in_(("error", "warn")))
    """A sample longer than that: `error` refuses the batch, `warn` collates it and warns once per batch."""
    group_by_length: bool = field(default=True, validator=instance_of(bool))
    """true: samples of similar length share a micro-batch, the longest of a rank's mini-batch first, which needs little padding. false: they
    keep their order. The gradient of a step and the order of outputs are the same."""


class PaddedPlugin:
    """One sample per row, padded on the left, for SFT and RL batches, which differ only in the columns they carry."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[PaddedConfig]:
        return PaddedConfig

    @hookimpl
    def skyrl_engine_make_collator(self, config: PaddedConfig | None, context: "FactoryContext") -> "PaddedCollator":
        from skyrl_engine_collators.padded.collator import PaddedCollator

        options = PaddedConfig() if config is None else config
        return PaddedCollator(
            pad_token_id=context.pad_token_id if options.pad_token_id is None else options.pad_token_id,
            max_sequence_length=(
                context.max_sequence_length if options.max_sequence_length is None else options.max_sequence_length
            ),
            overlong=options.overlong,
            group_by_length=options.group_by_length,
        )


@define
class PackedConfig:
    """Options of `packed`."""

    policy: Literal["ffd", "balanced", "concat"] = field(default="ffd", validator=in_(("ffd", "balanced", "concat")))
    """The way that samples are packed into rows: `ffd` (first-fit decreasing) needs few rows; `balanced` needs as many and evens out their
    lengths, if the samples fit so; `concat` keeps the samples' order."""
    max_tokens_per_microbatch: int | None = field(default=None, validator=optional(ge(1)))
    """Largest number of tokens in a row. If the run sets `training.micro_batch_tokens` too, the smaller applies; with neither, a rank has
    one row."""
    strict_capacity: bool = field(default=True, validator=instance_of(bool))
    """true: the padding that tensor- and context-parallel ranks need counts as tokens of a row. false: a row may become longer by it, there
    are no empty rows, and fewer samples than ranks are an error."""
    pad_token_id: int | None = field(default=None, validator=optional(ge(0)))
    """Token that fills the rest of a row; none: the tokenizer's own padding token."""
    max_sequence_length: int | None = field(default=None, validator=optional(ge(1)))
    """The longest sample allowed, in tokens; none: the run's `data.max_length`, if it is set. No sample is truncated."""
    overlong: Literal["error", "warn"] = field(default="error", validator=in_(("error", "warn")))
    """A sample longer than that: `error` refuses the batch, `warn` collates it and warns once per batch."""


class PackedPlugin:
    """Several samples per row, one after another, for SFT and RL batches, which differ only in the columns they carry."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[PackedConfig]:
        return PackedConfig

    @hookimpl
    def skyrl_engine_make_collator(self, config: PackedConfig | None, context: "FactoryContext") -> "PackedCollator":
        from skyrl_engine_collators.packed.collator import PackedCollator

        options = PackedConfig() if config is None else config
        return PackedCollator(
            pad_token_id=context.pad_token_id if options.pad_token_id is None else options.pad_token_id,
            policy=options.policy,
            max_tokens_per_microbatch=options.max_tokens_per_microbatch,
            strict_capacity=options.strict_capacity,
            max_sequence_length=(
                context.max_sequence_length if options.max_sequence_length is None else options.max_sequence_length
            ),
            overlong=options.overlong,
        )


@define
class TreeConfig:
    """Options of `tree`."""

    max_tokens_per_microbatch: int | None = field(default=None, validator=optional(ge(1)))
    """Largest number of tokens that a row computes; a shared prefix counts once. If the run sets `training.micro_batch_tokens` too, the smaller
    applies; with neither, a rank has one row."""
    least_shared: int = field(default=16, validator=ge(1))
    """The fewest tokens that a common prefix must have to be computed once."""
    pad_token_id: int | None = field(default=None, validator=optional(ge(0)))
    """Token that fills the rest of a row; none: the tokenizer's own padding token."""
    max_sequence_length: int | None = field(default=None, validator=optional(ge(1)))
    """The longest sample allowed, in tokens; none: the run's `data.max_length`, if it is set. No sample is truncated."""
    overlong: Literal["error", "warn"] = field(default="error", validator=in_(("error", "warn")))
    """A sample longer than that: `error` refuses the batch, `warn` collates it and warns once per batch."""


class TreePlugin:
    """Several samples per row, of which common prefixes are computed once: groups of attempts, pairs of answers, system prompts."""

    @hookimpl
    def skyrl_engine_config_schema(self) -> type[TreeConfig]:
        return TreeConfig

    @hookimpl
    def skyrl_engine_make_collator(self, config: TreeConfig | None, context: "FactoryContext") -> "TreeCollator":
        from skyrl_engine_collators.tree.collator import TreeCollator

        options = TreeConfig() if config is None else config
        return TreeCollator(
            pad_token_id=context.pad_token_id if options.pad_token_id is None else options.pad_token_id,
            max_tokens_per_microbatch=options.max_tokens_per_microbatch,
            least_shared=options.least_shared,
            max_sequence_length=(
                context.max_sequence_length if options.max_sequence_length is None else options.max_sequence_length
            ),
            overlong=options.overlong,
        )


padded = PaddedPlugin()
packed = PackedPlugin()
tree = TreePlugin()
