"""The root module of every backend: model inputs in, scores at chosen positions out, in memory that does not grow with tokens x vocabulary."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from skyrl_engine.modeling.architecture import CausalLanguageModelParts, LogitRule


class ChunkedHead(nn.Module):
    """Language-model head and log-softmax over chunks of positions; a chunk's logits are recomputed in backward and never kept.

    One module around the whole loop, so that a framework that gathers weights per module call gathers the head once.
    """

    def __init__(self, linear: nn.Module, rule: LogitRule, logits_per_chunk: int) -> None:
        super().__init__()
        self.linear = linear
        self.rule = rule
        weight = linear.weight
        assert isinstance(weight, Tensor)
        self.positions_per_chunk = max(1, logits_per_chunk // weight.shape[0])

    def forward(self, hidden_NH: Tensor, labels_N: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, ...]:
        """Log-probabilities [n] and, with `entropy`, entropies [n] of the n positions, float32 (float64 for a float64 model).

        A tuple, not a list: DeepSpeed ZeRO-3 only follows tensors through tuples.
        """
        chunks = zip(torch.split(hidden_NH, self.positions_per_chunk), torch.split(labels_N, self.positions_per_chunk), strict=True)
        parts: list[tuple[Tensor, ...]] = []
        for hidden, labels in chunks:
            if torch.is_grad_enabled():
                part = checkpoint(self._score, hidden, labels, temperature, entropy, use_reentrant=False, preserve_rng_state=False)
            else:
                part = self._score(hidden, labels, temperature, entropy)
            parts.append(part)
        return tuple(torch.cat(values) for values in zip(*parts, strict=True))

    def _score(self, hidden_NH: Tensor, labels_N: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, ...]:
        logits_NV = self.linear(hidden_NH)
        if logits_NV.dtype != torch.float64:
            logits_NV = logits_NV.float()
        logits_NV = self.rule(logits_NV)
        if temperature != 1.0:
            logits_NV = logits_NV / temperature
        total_N = logits_NV.logsumexp(-1)
        logprobs_N = logits_NV.gather(-1, labels_N[:, None])[:, 0] - total_N
        if not entropy:
            return (logprobs_N,)
        probabilities_NV = torch.exp(logits_NV - total_N[:, None])
        return logprobs_N, total_N - (probabilities_NV * logits_NV).sum(-1)


class Scorer(nn.Module):
    """Decoder and head as one module, the only one whose forward a backend calls.

    Calling a part of a sharded model outside its root's forward mixes sharded and full weights; so both parts run in here, the head as a
    module. The modules are the model's own: shard the scorer, and the model's parameters are sharded.
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
        # index_select: its backward adds up deterministically where one position is asked for twice
        values = self.head(hidden_NH.index_select(0, positions), labels, temperature, entropy)
        if count == 0:  # cloned: FSDP2 warns when the root returns a view
            values = tuple(value[:0].clone() for value in values)
        return dict(zip(("logprobs", "entropy"), values, strict=False))
