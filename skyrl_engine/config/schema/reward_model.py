"""Tables of reward models: `[reward_model]`, to train one, and `[[rl.reward_models]]`, to have some reward attempts."""

from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen
from attrs.validators import in_, lt, matches_re, min_len, optional

from skyrl_engine.config.schema.metadata import READ_BY
from skyrl_engine.config.wording import RefusedError
from skyrl_engine.contracts.values.model import PLACE, RightLabel

if TYPE_CHECKING:
    from attrs import Attribute


@frozen
class RewardModelConfig:
    """The recipe of a reward model that is trained."""

    preset: str = "bradley_terry"
    """A published recipe by name; every key of the configuration wins over it. `none` takes the engine's defaults."""

    labels: Literal["answers", "steps"] = field(default="answers", validator=in_(("answers", "steps")))
    """Content of the data: `answers` are pairs of a chosen and a rejected one; `steps` are those of one answer, each right or wrong, which a
    process reward model learns."""

    step_separator: str = field(default="\n", validator=min_len(1), metadata={READ_BY: ("labels", ("steps",))})
    """Text after each step, the last one too. A step's value is read where the model has read the separator."""


def _only_with_steps(instance: "RewardModelTable", attribute: "Attribute[Any]", value: Any) -> None:
    if value is not None and instance.steps is None:
        raise RefusedError(
            f"{attribute.name} is of process reward models, and `steps` is not set", f"Set `steps`, or remove {attribute.name}"
        )


def _not_zero(_instance: "RewardModelTable", _attribute: "Attribute[Any]", value: float) -> None:
    if value == 0:
        raise RefusedError("weight is 0, which leaves the reward model out", "Remove the reward model, or give it another weight")


StepRule = Literal["each", "min", "mean", "last", "product"]


@frozen
class RewardModelTable:
    """A reward model whose value of an attempt is a part of its reward, of trainer rl; the parts of several are added up."""

    path: str = field(validator=min_len(1), metadata={PLACE: "path"})
    """A sequence classifier with one label, or with `steps` a token classifier with two: a Hugging Face directory or hub id."""

    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""

    name: str = field(default="reward_model", validator=matches_re(r"[A-Za-z0-9_.-]+"))
    """Name of its part of the reward: letters, digits and `_.-`. Several of one name are numbered."""

    weight: float = field(default=1.0, validator=[lt(float("inf")), _not_zero])
    """Factor of the model's value in the reward."""

    tokenizer: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path"})
    """Directory or hub id of its tokenizer; none: the model's own."""

    chat_template: str | None = field(default=None, validator=optional(min_len(1)), metadata={PLACE: "path"})
    """A Jinja file that writes its chats; none: the template of its tokenizer. Where neither the tokens nor the template are those of the
    trained model, attempts are rendered again from their messages."""

    steps: StepRule | None = field(default=None, validator=optional(in_(("each", "min", "mean", "last", "product"))))
    """Take it for a process reward model, which gives every step of an attempt's last turn the probability that it is right. `each`: each is a
    reward at its step's last token; else the one number that is made of them is the attempt's value. none: it values the whole attempt."""

    step_separator: str | None = field(default=None, validator=[optional(min_len(1)), _only_with_steps])
    """Text between steps, as the model was trained with; none: a new line."""

    right_label: RightLabel | None = field(default=None, validator=[optional(in_((0, 1))), _only_with_steps])
    """Number of the label that says that a step is right, of a token classifier with two labels; none: the one that the model's `id2label`
    calls so, and 1 where the labels have no names."""
