"""megatron-core's GPTModel with hidden states in place of logits, and scores at chosen positions only."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine.modeling.chunked_head import RequestedScores, compute_chunked_scores
from skyrl_engine.modeling.vocabulary_parallel import VocabularyParallelScore
from skyrl_engine_megatron.library import (
    GPTModel,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
)


class Decoder(GPTModel):  # type: ignore[misc] # megatron-core is untyped
    """One piece of the model on this rank: the whole model, a pipeline stage, or, interleaved, one chunk of a stage."""

    vocabulary: int

    def _preprocess(
        self, input_ids: Tensor, position_ids: Tensor, *arguments: Any, packed_seq_params: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        """Return what megatron-core prepares for the layers; in rows of trees, rotary angles by `position_ids`, one per token of the row.

        megatron-core takes angles for positions that count from 0 in every document, or, where there are as many as tokens, one for each.
        """
        prepared = super()._preprocess(input_ids, position_ids, *arguments, packed_seq_params=packed_seq_params, **options)
        if packed_seq_params is None or packed_seq_params.segments is None:
            return tuple(prepared)
        embeddings, rotary, *others = prepared
        return embeddings, rotary[position_ids[0]], *others

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return hidden states [tokens, 1, h] in place of logits, so that the head does not run over all tokens."""
        return hidden_states

    def score(
        self,
        hidden_T1H: Tensor,
        positions_N: Tensor,
        labels_N: Tensor,
        candidates: Mapping[str, Tensor],
        *,
        temperature: float,
        needs: Collection[str],
        logits_per_chunk: int,
    ) -> dict[str, Tensor]:
        """Return the vocabulary's scores that `needs` names, each [n], equal on all tensor-parallel ranks. Only the last stage calls it.

        Those of `logprobs_at:COLUMN` are [n, k], at the `candidates` int64[n, k] of the column.
        With n = 0 the head still runs, on position 0, so that every parameter takes part in the backward pass.
        """
        count = len(positions_N)
        if count == 0:
            positions_N, labels_N = positions_N.new_zeros(1), labels_N.new_zeros(1)
            candidates = {column: ids_NK.new_zeros(1, ids_NK.shape[1]) for column, ids_NK in candidates.items()}
        if self.config.sequence_parallel:
            hidden_T1H = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=True)
        else:
            hidden_T1H = copy_to_tensor_model_parallel_region(hidden_T1H)
        chosen_NH = hidden_T1H[:, 0].index_select(0, positions_N)
        tied = self.share_embeddings_and_output_weights
        weight_VH = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        share = len(weight_VH)
        first = parallel_state.get_tensor_model_parallel_rank() * share
        # rows that pad the vocabulary have no probability
        weight_VH = weight_VH[: self.vocabulary - first]
        group = parallel_state.get_tensor_model_parallel_group()
        requested = RequestedScores.of(needs, labels_N, candidates)
        score = VocabularyParallelScore(LogitRule(), temperature, requested.scores, group, first, self.vocabulary)
        values = compute_chunked_scores(chosen_NH, weight_VH, None, requested.tokens, score, max(1, logits_per_chunk // share))
        return {name: value[:count] for name, value in requested.name_values(values).items()}
