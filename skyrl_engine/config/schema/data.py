"""`[data]`: the data to train on and to evaluate on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from attrs import field, frozen
from attrs.validators import and_, deep_iterable, deep_mapping, ge, in_, lt, min_len, optional

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
LossOn = Literal["last", "all", "completion"]


def _no_empty_name(_instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    if not isinstance(value, str) and "" in value:
        raise ValueError(f"'{attribute.name}' must not hold an empty name")


@frozen
class DataConfig:
    """The data to train on and to evaluate on."""

    train: str | tuple[str, ...] = field(validator=and_(min_len(1), _no_empty_name), metadata={PLACE: "path"})
    """Training data: a file (JSON, JSONL, CSV, Parquet, Arrow), a folder of such files, or a hub id; or a list of them, one after the other."""

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

    bad_images: Literal["error", "drop"] = field(default="error", validator=in_(("error", "drop")))
    """Treatment of samples with missing, damaged, too large or unmatched images: `error` refuses the run, `drop` leaves them out."""

    max_image_pixels: int = field(default=2**26, validator=ge(1))
    """Largest image that is read, in pixels (width times height). Images beyond the limit of Pillow are refused in any case."""

    shrink_images_to: int | None = field(default=None, validator=optional(ge(1)))
    """Number of pixels to which larger images are scaled down, which bounds their tokens; none: the image processor of the model decides."""

    max_samples: int | None = field(default=None, validator=optional(ge(1)))
    """Number of rows to read from the start of `train`, and of `eval`; none: all."""

    cache: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "output"})
    """Folder of the token cache; none: the user's cache folder."""
