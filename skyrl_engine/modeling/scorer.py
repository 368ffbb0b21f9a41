"""The root module of every backend, which turns model inputs into scores at chosen positions."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from skyrl_engine.contracts.kinds.backend import EmbeddingNoise
from skyrl_engine.contracts.kinds.needs import LOGPROBS_AT, asks_a_teacher
from skyrl_engine.contracts.values.plan import RowKind
from skyrl_engine.errors import ModelError, UnsupportedError
from skyrl_engine.model_facts.thresholds import refuse_longer_rows
from skyrl_engine.modeling.aligned_divergence import AlignedStates
from skyrl_engine.modeling.attention_kernel import takes_one_row
from skyrl_engine.modeling.causal_lm import CausalLanguageModelParts
from skyrl_engine.modeling.chunked_head import VOCABULARY_SCORES, ChunkedHead, RequestedScores, asks_a_head
from skyrl_engine.modeling.embedding_noise import noisy_embeddings
from skyrl_engine.modeling.images import ImageTokens
from skyrl_engine.modeling.segment_attention import declare_padding, skip_document_search
from skyrl_engine.modeling.segments import REMEDY, WHOLE_ROWS, Segments, SegmentSupport
from skyrl_engine.modeling.teaching import COMPARED, HIDDEN_STATES, TeacherStates
from skyrl_engine.modeling.value_head import ValueHead
from skyrl_engine.modeling.vision import ImageDecoder, language_part

NO_CANDIDATES: Mapping[str, Tensor] = MappingProxyType({})
"""No token ids are asked about other than labels."""


class Scorer(nn.Module):
    """Decoder and heads as one module, the only one whose forward a backend calls.

    Both parts run inside this forward, because calling a part of a sharded model outside its root's forward mixes sharded and full weights.
    The modules are the model's own, so sharding the scorer shards the model.

    `segment_support` is the finding of loading about packed rows. A model that attends by segments gets `segments` in every pass, so that a
    model that does not pass them on ends in an error and not in documents that attend to each other.

    `rotary_length` is the longest row in tokens for which the model's rotary frequencies are fixed; None if they do not depend on lengths.
    """

    segment_support: SegmentSupport

    def __init__(self, parts: CausalLanguageModelParts, *, logits_per_chunk: int, value_head: ValueHead | None = None) -> None:
        super().__init__()
        self.decoder = parts.decoder
        self.head = ChunkedHead(parts.head, parts.rule, logits_per_chunk)
        self.value_head = value_head
        self.segment_support = SegmentSupport()
        self.rotary_length: int | None = None

    @property
    def images(self) -> ImageTokens | None:
        """The form in which the model takes images, or None if it takes none."""
        return self.decoder.tokens if isinstance(self.decoder, ImageDecoder) else None

    @property
    def one_row(self) -> bool:
        """True where the model's kernel attends over a row of segments alone: whole rows must be laid end to end for it."""
        return bool(self.segment_support.layers) and takes_one_row(self.segment_support.kernel)

    @property
    def computes(self) -> frozenset[str]:
        """The model scores that this scorer can be asked for, `logprobs_at` without its column and `divergence` without its kind."""
        compared = COMPARED if self.head.compares else ()
        return frozenset((*VOCABULARY_SCORES, LOGPROBS_AT, *compared, *(() if self.value_head is None else ("values",))))

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        positions: Tensor,
        labels: Tensor,
        *,
        temperature: float = 1.0,
        needs: Collection[str] = ("logprobs",),
        segments: Segments | None = None,
        padded: bool | None = None,
        candidates: Mapping[str, Tensor] = NO_CANDIDATES,
        teacher: TeacherStates | None = None,
        noise: EmbeddingNoise | None = None,
        spread: Callable[[Tensor], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Score `labels` int64[n] at flat `positions` int64[n] (row * width + column) of `inputs` (input_ids [rows, width], ...).

        Returns the scores that `needs` names, each [n] in the order of `positions`: those of `contracts.MODEL_SCORES`, of
        softmax(logits / temperature), and [n, k] of "logprobs_at:COLUMN" at the `candidates` int64[n, k] of that column. If only values are
        needed, no logits are computed. `teacher` has its states at these positions, for scores that compare with one; `HIDDEN_STATES` are
        this model's own, [n, h]. With n = 0 the heads still run, on position 0, so that every rank takes part in the same collectives.

        `padded` tells whether the attention mask hides a token (None: nobody has looked), so that no mask is read from the device.

        With `segments` the inputs are input_ids and position_ids [1, tokens] of segments end to end; raises UnsupportedError for a model
        whose tokens would see other segments than those. `noise`, of the shape of input_ids, is added to the input embeddings.

        With `spread`, `positions` int64[m] are some of n; it makes the hidden states [n, h] of all from theirs [m, h].
        """
        with noisy_embeddings(language_part(self.decoder), noise):
            hidden_NH = self._compute_hidden_states(inputs, segments, padded).flatten(0, 1)
        count = len(labels)
        chosen_NH = hidden_NH.index_select(0, positions)
        if spread is not None:
            chosen_NH = spread(chosen_NH)
        if count == 0:
            chosen_NH, labels = hidden_NH[:1], labels.new_zeros(1)
            candidates = {column: ids_NK.new_zeros(1, ids_NK.shape[1]) for column, ids_NK in candidates.items()}
        scores: dict[str, Tensor] = {}
        if HIDDEN_STATES in needs:
            scores[HIDDEN_STATES] = chosen_NH
        if asks_a_head(needs):
            requested = RequestedScores.of(needs, labels, candidates)
            compared = {}
            if asks_a_teacher(needs):
                assert teacher is not None, "a comparison is asked of a model that nobody teaches"
                compared = {"teacher": teacher.with_one_position()}
            if isinstance(aligned := compared.get("teacher"), AlignedStates):
                scores.update(aligned.compare(self.head, chosen_NH, requested, temperature))
            else:
                values = self.head(chosen_NH, requested.tokens, temperature, requested.scores, **compared)
                scores.update(requested.name_values(values))
        if "values" in needs:
            assert self.value_head is not None, "values are asked of a model without a value head"
            # cloned, here and below, because FSDP2 warns if the root returns a view
            scores["values"] = self.value_head(chosen_NH).clone()
        if count == 0:
            scores = {name: value[:0].clone() for name, value in scores.items()}
        return scores

    def _compute_hidden_states(self, inputs: Mapping[str, Tensor], segments: Segments | None, padded: bool | None = None) -> Tensor:
        """Return the decoder's hidden states [rows, width, h]."""
        support = self.segment_support
        self._refuse_longer_rows(inputs, segments)
        if segments is None:
            attention = {"segments": WHOLE_ROWS} if support.layers else {}
            with declare_padding(padded=padded):
                return self.decoder(**inputs, **attention, use_cache=False)[0]  # type: ignore[no-any-return] # nn.Module.__call__ is untyped
        rows: RowKind = "packed" if segments.parents is None else "tree"
        self.refuse_rows_unless_supported(rows)
        with skip_document_search():
            hidden_BTH: Tensor = self.decoder(**inputs, segments=segments, use_cache=False)[0]
        if len(segments.windows) != support.layers:
            raise ModelError(
                f"{len(segments.windows)} of {support.layers} layers kept the samples of a {rows} row apart",
                remedy=REMEDY,
            )
        return hidden_BTH

    def _refuse_longer_rows(self, inputs: Mapping[str, Tensor], segments: Segments | None) -> None:
        """Raise UnsupportedError for rows beyond `rotary_length`; the mask, which may be on a device, is read only where padding may do it."""
        width = inputs["input_ids"].shape[1] if segments is None else segments.longest
        if self.rotary_length is None or width <= self.rotary_length:
            return
        if segments is None and "attention_mask" in inputs:
            width = int(inputs["attention_mask"].sum(1).max())
        refuse_longer_rows(type(self.decoder).__name__, self.rotary_length, width)

    def refuse_rows_unless_supported(self, rows: RowKind) -> None:
        """Raises UnsupportedError, with the finding of loading, for rows whose samples would see each other."""
        name, support = type(self.decoder).__name__, self.segment_support
        if rows != "padded" and not support.layers:
            raise UnsupportedError(f"{name} cannot be trained on {rows} rows: {support.refusal}", remedy=REMEDY)
        if rows == "tree" and support.tree_refusal:
            raise UnsupportedError(
                f"{name} cannot be trained on rows of shared prefixes: {support.tree_refusal}",
                remedy="Use the collator packed, or another model",
            )

    def refuse_divided_rows(self, option: str) -> None:
        """Raises UnsupportedError, with the finding of loading, where ranks cannot divide documents, as `option` ("a.b = 2") asks for."""
        support = self.segment_support
        refusal = support.division_refusal if support.layers else support.refusal
        if refusal:
            raise UnsupportedError(
                f"{option} divides the tokens of every sample among ranks, which {type(self.decoder).__name__} does not allow: {refusal}",
                remedy=f"Set {option.partition(' ')[0]} = 1, or choose another model",
            )
