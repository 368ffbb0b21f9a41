"""megatron-core's GPTModel with hidden states in place of logits, and scores at chosen positions only."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from skyrl_engine.contracts import EmbeddingNoise
from skyrl_engine.modeling.aligned_divergence import AlignedStates
from skyrl_engine.modeling.causal_lm import LogitRule
from skyrl_engine.modeling.chunked_head import RequestedScores, Score, ScoringTeacher, asks_a_head, compute_chunked_scores
from skyrl_engine.modeling.context_scores import keep_gradient_of_first
from skyrl_engine.modeling.embedding_noise import make_noise
from skyrl_engine.modeling.teaching import HIDDEN_STATES, TeacherStates
from skyrl_engine.modeling.value_head import ValueHead
from skyrl_engine.modeling.vocabulary_parallel import VocabularyParallelScore
from skyrl_engine.modeling.vocabulary_parallel_teaching import DividedTeacherStates, GatheredScore
from skyrl_engine_megatron.library import (
    GPTModel,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    parallel_state,
)


class Decoder(GPTModel):  # type: ignore[misc] # megatron-core is untyped
    """One piece of the model on this rank: the whole model, a pipeline stage, or, interleaved, one chunk of a stage."""

    vocabulary: int
    value_head: ValueHead | None
    """The head of the model's last piece, if it has one; None on other pieces."""
    logits: LogitRule
    """The rule by which the model changes its logits."""
    scales_embedding: bool
    """True if a factor of embeddings belongs to the module that looks tokens up."""

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

    @contextmanager
    def add_noise(self, noise: EmbeddingNoise | None) -> Iterator[None]:
        """Add noise to the embeddings of the tokens that this rank embeds, until the context is left; None: none.

        It comes where transformers' module ends that looks tokens up: before a factor that the model has of its own, after one of that module.
        """
        if noise is None:
            yield
            return

        def add(_embedding: nn.Module, _inputs: Any, output_T1H: Tensor) -> Tensor:
            return output_T1H + make_noise(noise, output_T1H.shape[-1], output_T1H.dtype)[:, None]

        handle = self.embedding.register_forward_hook(add, prepend=not self.scales_embedding)
        try:
            yield
        finally:
            handle.remove()

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
        teacher: TeacherStates | None = None,
        spread: Callable[[Tensor], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return the scores that `needs` names, each [n], equal on all tensor-parallel ranks. Only the last stage calls it.

        Those of `logprobs_at:COLUMN` are [n, k], at the `candidates` int64[n, k] of the column.
        `teacher` has its states at these positions, for scores that compare with one; `HIDDEN_STATES` are this model's own, [n, h]. Where
        labels are of more positions than this rank's, `spread` makes [n, h] of all ranks of its states at `positions_N`.
        With n = 0 the heads still run, on position 0, so that every parameter takes part in the backward pass.
        """
        count = len(labels_N)
        if count == 0:
            positions_N, labels_N, spread = positions_N.new_zeros(1), labels_N.new_zeros(1), None
            teacher = None if teacher is None else teacher.with_one_position()
            candidates = {column: ids_NK.new_zeros(1, ids_NK.shape[1]) for column, ids_NK in candidates.items()}
        if self.config.sequence_parallel:
            hidden_T1H = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=True)
        else:
            hidden_T1H = copy_to_tensor_model_parallel_region(hidden_T1H)
        chosen_NH = hidden_T1H[:, 0].index_select(0, positions_N)
        if spread is not None:
            chosen_NH = spread(chosen_NH)
        scores: dict[str, Tensor] = {}
        if HIDDEN_STATES in needs:
            scores[HIDDEN_STATES] = chosen_NH
        if asks_a_head(needs):
            requested = RequestedScores.of(needs, labels_N, candidates)

            def head(
                states_NH: Tensor,
                tokens_NK: Tensor,
                temperature: float,
                names: tuple[str, ...],
                teacher: ScoringTeacher | None = None,
            ) -> tuple[Tensor, ...]:
                return self._score_tokens(states_NH, tokens_NK, temperature, names, logits_per_chunk, teacher)

            if isinstance(teacher, AlignedStates):
                scores.update(teacher.compare(head, chosen_NH, requested, temperature))
            else:
                scores.update(requested.name_values(head(chosen_NH, requested.tokens, temperature, requested.scores, teacher)))
        if "values" in needs:
            assert self.value_head is not None, "values are asked of a model without a value head"
            # every rank computes the same gradient of the states, and the gradients of all ranks are added up
            scores["values"] = self.value_head(keep_gradient_of_first(chosen_NH, parallel_state.get_tensor_model_parallel_group()))
        return {name: value[:count] for name, value in scores.items()}

    def _score_tokens(
        self,
        states_NH: Tensor,
        tokens_NK: Tensor,
        temperature: float,
        names: tuple[str, ...],
        logits_per_chunk: int,
        teacher: ScoringTeacher | None,
    ) -> tuple[Tensor, ...]:
        """Return the scores that `names` lists, of the vocabulary that the tensor-parallel ranks hold by parts."""
        weight_VH, first, share = self._own_part_of_head()
        group, rule = parallel_state.get_tensor_model_parallel_group(), self.logits
        score: Score
        if teacher is None:
            score = VocabularyParallelScore(rule, temperature, names, group, first, self.vocabulary)
        else:
            score = teacher.score(rule, temperature, names, self.vocabulary)
            if not isinstance(score, VocabularyParallelScore) and dist.get_world_size(group) > 1:
                score = GatheredScore.of(score, group, first, self.vocabulary)
        return compute_chunked_scores(states_NH, weight_VH, None, tokens_NK, score, max(1, logits_per_chunk // share))

    def teach(self, hidden_NH: Tensor) -> DividedTeacherStates:
        """Return what another model is compared with at positions where this one has the states [n, h]."""
        weight_VH, first, _ = self._own_part_of_head()
        group = parallel_state.get_tensor_model_parallel_group()
        return DividedTeacherStates(hidden_NH, weight_VH.detach(), None, self.logits, group, first, self.vocabulary)

    def _own_part_of_head(self) -> tuple[Tensor, int, int]:
        """Return this rank's part of the head, the token at which it begins, and the number of tokens of a whole part."""
        tied = self.share_embeddings_and_output_weights
        weight_VH = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        share = len(weight_VH)
        first = parallel_state.get_tensor_model_parallel_rank() * share
        # rows that pad the vocabulary have no probability
        return weight_VH[: self.vocabulary - first], first, share
