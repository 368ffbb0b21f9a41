"""The layers that adapters of a model sit on: `train_attn` and `train_mlp` of the API, in the engine's words."""

from typing import Final, Literal

from attrs import frozen

from skyrl_engine_tinker.errors import RequestError
from skyrl_engine_tinker.requests import LoraTable

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")


@frozen
class AdaptedLayers:
    """Adapters on attention, on the MLP or on both, which is all linear layers of the decoder."""

    attention: bool = True
    mlp: bool = True

    @classmethod
    def read(cls, lora: LoraTable) -> "AdaptedLayers":
        """Read a `lora_config`. Raises RequestError for layers that cannot be trained alone.

        `train_unembed` is true in every request that leaves it out, so it cannot be refused: the unembedding has no adapters.
        """
        if lora.rank == 0 and not (lora.train_attn and lora.train_mlp and lora.train_unembed):
            raise RequestError("full weights (rank 0) are trained in all layers; leave train_attn, train_mlp and train_unembed out")
        if not lora.train_attn and not lora.train_mlp:
            raise RequestError("this server puts adapters on attention and MLP layers alone; set train_attn or train_mlp")
        return cls(lora.train_attn, lora.train_mlp)

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
