"""Entry points of this distribution. Importing this module costs attrs and pluggy, nothing else; torch arrives with the first build."""

from typing import TYPE_CHECKING, Literal

from attrs import define, field
from attrs.validators import ge, in_, instance_of, optional

from skyrl_engine import hookimpl

if TYPE_CHECKING:
    from skyrl_engine.contracts import FactoryContext
    from skyrl_engine_collators.packed.collator import PackedCollator
    from skyrl_engine_collators.padded.collator import PaddedCollator


@define
class PaddedConfig:
    """Options of `padded`."""

    pad_token_id: int | None = field(default=None, validator=optional(ge(0)))
    """The token that fills the left of a row; none: the tokenizer's own padding token."""
    max_sequence_length: int | None = field(default=None, validator=optional(ge(1)))
    """The longest sample allowed, in tokens; none: the run's own bound, if it has one. Nothing is truncated."""
    overlong: Literal["error", "warn"] = field(default="error", validator=in_(("error", "warn")))
    """A longer sample is an error, or one warning per batch."""


class PaddedPlugin:
    """One sample per row, padded on the left: for SFT and RL batches, which differ only in the columns they carry."""

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
        )


@define
class PackedConfig:
    """Options of `packed`."""

    policy: Literal["ffd", "balanced", "concat"] = field(default="ffd", validator=in_(("ffd", "balanced", "concat")))
    """Which samples share a row: `ffd` (first-fit decreasing) makes the fewest rows; `balanced` makes as many of equal length, where they
    hold the samples that way; `concat` keeps the order."""
    max_tokens_per_microbatch: int | None = field(default=None, validator=optional(ge(1)))
    """Tokens of a row; the run's `training.micro_batch_tokens` holds as well, so the smaller counts. With neither: a rank has one row."""
    strict_capacity: bool = field(default=True, validator=instance_of(bool))
    """Count the alignment that tensor and context parallel ranks need against the tokens of a row. Without it, a row may
    become longer, there are no empty rows, and too few samples for the ranks are an error."""
    pad_token_id: int | None = field(default=None, validator=optional(ge(0)))
    """The token that fills the rest of a row; none: the tokenizer's own padding token."""
    max_sequence_length: int | None = field(default=None, validator=optional(ge(1)))
    """The longest sample allowed, in tokens; none: the run's own bound, if it has one. Nothing is truncated."""
    overlong: Literal["error", "warn"] = field(default="error", validator=in_(("error", "warn")))
    """A longer sample is an error, or one warning per batch."""


class PackedPlugin:
    """Several samples per row, one after the other: for SFT and RL batches, which differ only in the columns they carry."""

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


padded = PaddedPlugin()
packed = PackedPlugin()
