"""`[data]`: the data to train on and to evaluate on."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from attrs import field, frozen
from attrs.validators import and_, deep_iterable, deep_mapping, ge, in_, lt, min_len, optional

from skyrl_engine.config.schema.metadata import READ_BY
from skyrl_engine.config.wording import RefusedError
from skyrl_engine.contracts.values.model import PLACE

if TYPE_CHECKING:
    from attrs import Attribute

KnownFormat = Literal[
    "tokens",
    "rollouts",
    "messages",
    "prompt_completion",
    "alpaca",
    "text",
    "segments",
    "preference",
    "unpaired_preference",
    "ratings",
    "comparison",
    "stepwise",
]
"""The names of the formats: each has a row in `data/sources/formats.py`."""

DataFormat = Literal["auto", KnownFormat]
StoppingStrategy = Literal["first_exhausted", "all_exhausted"]
LossOn = Literal["last", "all", "completion"]


def _no_empty_name(_instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    if not isinstance(value, str) and "" in value:
        raise ValueError(f"'{attribute.name}' must not hold an empty name")


def _no_such_weights(_instance: object, attribute: "Attribute[Any]", value: tuple[float, ...] | None) -> None:
    if value is None:
        return
    if any(not math.isfinite(weight) or weight < 0 for weight in value):
        raise RefusedError(f"{attribute.name} are {list(value)}, and a weight is a finite number of 0 or more", "Correct them")
    if math.isinf(sum(value)):
        raise RefusedError(f"{attribute.name} are {list(value)}, whose sum is no finite number", "Divide them by a common factor")
    if not sum(value) > 0:
        raise RefusedError(
            f"{attribute.name} are {list(value)}, which add up to 0: no dataset is drawn from", "Give a dataset a weight above 0"
        )


@frozen
class DataConfig:
    """The data to train on and to evaluate on."""

    train: str | tuple[str, ...] = field(validator=and_(min_len(1), _no_empty_name), metadata={PLACE: "path"})
    """Training data: a file (JSON, JSONL, CSV, Parquet, Arrow), a folder of such files, an address of an object store such as
    `s3://bucket/rows.jsonl`, or a hub id; or a list of them, one after the other."""

    weights: tuple[float, ...] | None = field(default=None, validator=_no_such_weights)
    """Weight of each dataset of `train`: the probability that a sample (or group, or pair) is drawn from it, times a common factor. None: every
    sample once an epoch."""

    stopping_strategy: StoppingStrategy = field(
        default="all_exhausted",
        validator=in_(get_args(StoppingStrategy)),
    )
    """End of an epoch over datasets with `weights`: `all_exhausted` when each was drawn from as often as it has samples, those with more weight
    for their size several times; `first_exhausted` when the first one was, of the others a part, of which the next epoch draws the rest."""

    eval: str | tuple[str, ...] | None = field(
        default=None, validator=optional(and_(min_len(1), _no_empty_name)), metadata={PLACE: "path"}
    )
    """Held-out data, given like `train`; none: see `eval_fraction`."""

    subset: str | None = field(default=None, validator=optional(min_len(1)))
    """Configuration of a hub dataset that has several; in a local folder, the name of a folder inside it."""

    train_split: str = field(default="train", validator=min_len(1))
    """Split of `train` to read, where it has splits."""

    eval_split: str = field(default="test", validator=min_len(1))
    """Split of `eval` to read, where it has splits."""

    eval_fraction: float = field(default=0.0, validator=[ge(0.0), lt(1.0)])
    """Share of `train` to hold out for evaluation when `eval` is not set."""

    format: DataFormat = field(default="auto", validator=in_(get_args(DataFormat)))
    """Shape of the samples; `auto` recognises it by the columns."""

    map: Mapping[str, str] = field(factory=dict, validator=deep_mapping(min_len(1), min_len(1)))
    """The data's own names of columns: `map.prompt = "question"` reads its column `question` as `prompt`. Holds for `train` and `eval`."""

    template: Literal["auto", "none"] = field(default="auto", validator=in_(("auto", "none")))
    """Writing of prompts and answers that are texts: `auto` has the model's chat template write them where its tokenizer has one, as rollouts
    and `skyrl-engine evaluate` do; `none` trains on the texts as they stand. Messages need the chat template, and rows of format `text` have
    none."""

    rating: str | None = field(default=None, validator=optional(min_len(1)))
    """The number of every answer by which several rated answers to a prompt (format `ratings`) become pairs: the highest against the lowest;
    none: `overall_score`, in rows with one answer each `helpfulness`, in rows with `answers` the `rank`, of which 1 is the best."""

    columns: tuple[str, ...] = field(default=(), validator=deep_iterable(min_len(1)))
    """Further columns to read, besides those that the loss, its terms and corrections need: one number per response token or sample."""

    loss_on: LossOn = field(default="last", validator=in_(get_args(LossOn)))
    """Tokens of messages that carry loss: those of the `last` assistant turn, those of `all` assistant turns, or the whole `completion`: every
    token from the first of all turns to the end, what the template writes between and after turns included."""

    max_length: int | None = field(default=None, validator=optional(ge(2)))
    """Longest sample in tokens; none: as long as the model allows."""

    overlong: Literal["drop", "truncate", "error"] = field(default="error", validator=in_(("drop", "truncate", "error")))
    """Treatment of samples longer than `max_length`: `error` refuses the run, `drop` leaves them out, `truncate` cuts their end.
    Of a preference pair both halves are left out, or each is cut at its end: their prompt is the same, and so is the room of their answers."""

    bad_rows: Literal["error", "drop"] = field(default="error", validator=in_(("error", "drop")))
    """Treatment of rows that cannot be used, such as a line that is no JSON, a message without a role, a conversation that the chat template
    refuses: `error` refuses the run and names the rows, `drop` leaves them out and counts them. `overlong` and `bad_images` say what becomes of
    samples that are too long, or have images that cannot be used."""

    bad_images: Literal["error", "drop"] = field(default="error", validator=in_(("error", "drop")))
    """Treatment of samples with missing, damaged, too large or unmatched images: `error` refuses the run, `drop` leaves them out."""

    max_image_pixels: int = field(default=2**26, validator=ge(1))
    """Largest image that is read, in pixels (width times height). Images beyond the limit of Pillow are refused in any case."""

    shrink_images_to: int | None = field(default=None, validator=optional(ge(1)))
    """Number of pixels to which larger images are scaled down, which bounds their tokens; none: the image processor of the model decides."""

    max_samples: int | None = field(default=None, validator=optional(ge(1)))
    """Number of rows to read from the start of `train`, and of `eval`; none: all."""

    streaming: bool = False
    """Read `train` while training, shard by shard, and keep nothing of it: for data that is larger than the memory and the disk of a cache. A
    shard is a file, or a part of a hub dataset. Needs `training.steps`."""

    buffer_size: int = field(default=10_000, validator=ge(1), metadata={READ_BY: ("streaming", (True,))})
    """Rows that wait in memory, out of which the next one is drawn at random, where `streaming` is on and `training.shuffle` too."""

    cache: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "output"})
    """Folder of the token cache; none: the user's cache folder."""
