"""The layers that adapters of a model sit on: `train_attn` and `train_mlp` of the API, in the engine's words."""

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import frozen

from skyrl_engine_tinker.errors import RequestError

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")


@frozen
class AdaptedLayers:
    """Adapters on attention, on the MLP or on both, which is all linear layers of the decoder."""

    attention: bool = True
    mlp: bool = True

    @classmethod
    def read(cls, lora_config: Mapping[str, Any], rank: int) -> "AdaptedLayers":
        """Read a `lora_config`. Raises RequestError for layers that cannot be trained alone.

        `train_unembed` is true in every request that leaves it out, so it cannot be refused: the unembedding has no adapters.
        """
        switches = {name: lora_config.get(name, True) for name in ("train_attn", "train_mlp", "train_unembed")}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise RequestError(f"{name} is {value!r}; it must be true or false")
        if rank == 0 and not all(switches.values()):
            raise RequestError("full weights (rank 0) are trained in all layers; leave train_attn, train_mlp and train_unembed out")
        if not switches["train_attn"] and not switches["train_mlp"]:
            raise RequestError("this server puts adapters on attention and MLP layers alone; set train_attn or train_mlp")
        return cls(switches["train_attn"], switches["train_mlp"])

    @property
    def targets(self) -> Literal["all-linear"] | tuple[str, ...]:
        """`targets` of the engine's LoraConfig."""
        if self.attention and self.mlp:
            return "all-linear"
        return ATTENTION if self.attention else MLP

    def __str__(self) -> str:
        return {(True, True): "all linear layers", (True, False): "attention alone", (False, True): "MLP layers alone"}[
            self.attention, self.mlp
        ]


EVERYWHERE: Final = AdaptedLayers()
