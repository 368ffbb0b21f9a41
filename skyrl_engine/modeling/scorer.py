"""The root module of every backend: model inputs in, scores at chosen positions out."""

from collections.abc import Mapping

from torch import Tensor, nn

from skyrl_engine.modeling.architecture import CausalLanguageModelParts
from skyrl_engine.modeling.chunked_head import ChunkedHead


class Scorer(nn.Module):
    """Decoder and head as one module, the only one whose forward a backend calls.

    Calling a part of a sharded model outside its root's forward mixes sharded and full weights; so both parts run in here. The modules are
    the model's own: shard the scorer, and the model's parameters are sharded.
    """

    def __init__(self, parts: CausalLanguageModelParts, *, logits_per_chunk: int) -> None:
        super().__init__()
        self.decoder = parts.decoder
        self.head = ChunkedHead(parts.head, parts.rule, logits_per_chunk)

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        positions: Tensor,
        labels: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> dict[str, Tensor]:
        """Score `labels` int64[n] at flat `positions` int64[n] (row * width + column) of `inputs` (input_ids [rows, width], ...).

        Returns "logprobs" [n] and, if asked, "entropy" [n], in nats, of softmax(logits / temperature), in the order of `positions`. With
        n = 0 the head runs all the same, on position 0: the graph, and with it every rank's collectives, stay whole.
        """
        hidden_NH = self.decoder(**inputs, use_cache=False)[0].flatten(0, 1)
        count = len(positions)
        if count == 0:
            positions, labels = positions.new_zeros(1), labels.new_zeros(1)
        values = self.head(hidden_NH.index_select(0, positions), labels, temperature, entropy)
        if count == 0:  # cloned: FSDP2 warns when the root returns a view
            values = tuple(value[:0].clone() for value in values)
        return dict(zip(("logprobs", "entropy"), values, strict=False))
