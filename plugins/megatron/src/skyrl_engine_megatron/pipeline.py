"""Run a rank's micro-batches through megatron-core's schedules: no pipelining, 1F1B, or interleaved 1F1B.

The objective runs on the last stage.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat, tee
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from skyrl_engine.contracts import (
    IMAGE_GRID,
    PIXEL_VALUES,
    EmbeddingNoise,
    MicroBatch,
    Objective,
    Ragged,
    RankBatch,
    RankOutput,
    StepCounts,
    model_score,
)
from skyrl_engine.model_facts.thresholds import refuse_longer_rows
from skyrl_engine.modeling.aligned_divergence import AlignedStates
from skyrl_engine.modeling.context_scores import gather_scores, gather_states, keep_gradient_of_first
from skyrl_engine.modeling.images import ImageTokens, place_images
from skyrl_engine.modeling.micro_batch import differentiable
from skyrl_engine.modeling.model_inputs import check_tokens
from skyrl_engine.modeling.teaching import COMPARED
from skyrl_engine_megatron.adapter_dropout import make_token_keys
from skyrl_engine_megatron.context import order_after_gather
from skyrl_engine_megatron.decoder import Decoder
from skyrl_engine_megatron.documents import Boundaries, Documents, RowShape
from skyrl_engine_megatron.groups import groups
from skyrl_engine_megatron.images import Images
from skyrl_engine_megatron.library import get_forward_backward_func, parallel_state
from skyrl_engine_megatron.router import BiasSteps, RoutedTokens, RouterLosses

_Arriving = Iterator[MicroBatch | None]


@frozen(eq=False)
class Pipeline:
    """A rank's pieces of the model, and all that a pass needs: the schedule calls `models`, and `pieces` are the decoders inside them.

    Rows of documents fit `shape`. `kernels` tells whether attention reads the documents' bounds on the device. `sees` describes how the model
    takes images (None: it takes none), and `router` holds the losses of routers (None: they have none). `bias_steps` count the experts that
    tokens choose (None: nobody counts). Rows have at most `longest_row` tokens, for which rotary frequencies were fixed (None: any number).
    Where adapters drop inputs, `dropout_seed` is the seed by which they do (None: they drop none).
    """

    models: Sequence[Any]
    pieces: Sequence[Decoder]
    stages: int
    shape: RowShape
    vocabulary: int
    logits_per_chunk: int
    device: torch.device
    kernels: bool = False
    sees: ImageTokens | None = None
    router: RouterLosses | None = None
    bias_steps: BiasSteps | None = None
    longest_row: int | None = None
    dropout_seed: int | None = None

    def run(self, batch: RankBatch, objective: Objective, *, learn: bool, steps_done: int = 0) -> list[RankOutput]:
        """Score every micro-batch and, with `learn`, differentiate and accumulate. Outputs are in order, on the last stage only.

        After each of the optimizer's steps, of which there were `steps_done`, adapters drop others of their inputs.

        The schedule takes each micro-batch when it reaches it. The interleaved schedule needs rows of one length, so micro-batches are built
        once beforehand to count their tokens; and it needs a multiple of the stages in micro-batches, so empty ones complete the last group.
        The pieces of a stage share the micro-batches that are built. A teacher's states of all micro-batches are held by the last of several
        stages while they pass.
        """
        if self.stages > 1 and any(model_score(need) in COMPARED for need in objective.needs):
            # stages would exchange the teacher's messages and their own in different orders, so the teacher goes through all of it first
            batch = list(batch)
        self._check_images(batch)
        count = len(batch)
        interleaved = len(self.pieces) > 1
        width = max((self.shape.tokens_of(micro_batch) for micro_batch in batch), default=1) if interleaved else 1
        width += -width % self.shape.row
        fill = -count % self.stages if interleaved else 0
        arriving: _Arriving = chain(iter(batch), repeat(None, fill))
        routed: list[RoutedTokens] = []
        drops = steps_done if learn and self.dropout_seed is not None else None
        outputs = get_forward_backward_func()(
            forward_step_func=lambda iterator, model: self._forward_step(
                iterator, model, objective, width, routed, learn=learn, drops=drops
            ),
            data_iterator=list(tee(arriving, len(self.pieces))) if interleaved else arriving,
            model=list(self.models),
            num_microbatches=count + fill,
            seq_length=width,
            micro_batch_size=1,
            forward_only=not learn,
        )
        collected = [output for output in outputs if output is not None]
        if learn and self.bias_steps is not None:
            self.bias_steps.add(routed)
        if self.router is not None and self.router.has_losses:
            metrics = self.router.metrics(routed, self.device)
            if collected:
                collected.append(evolve(RankOutput.empty(), metrics=metrics))
        return collected

    def _check_images(self, batch: RankBatch) -> None:
        """Let later stages refuse a micro-batch for the same reason as the first: otherwise they would wait for its message forever."""
        if self.sees is not None and not self.pieces[0].pre_process:
            for micro_batch in batch:
                place_images(micro_batch, self.sees, pixels=False)

    def _forward_step(
        self,
        iterator: _Arriving,
        model: Any,
        objective: Objective,
        width: int,
        routed: list[RoutedTokens],
        *,
        learn: bool,
        drops: int | None,
    ) -> tuple[Tensor, Any]:
        micro_batch = next(iterator)
        if micro_batch is not None:
            check_tokens(micro_batch, self.vocabulary)
            if self.longest_row is not None:
                refuse_longer_rows("the model", self.longest_row, int(micro_batch.sequence_lengths.values.max(initial=0)))
        # a model that learns is wrapped
        piece: Decoder = getattr(model, "module", model)
        documents = self.shape.documents_of(
            micro_batch or _EMPTY,
            cp_rank=parallel_state.get_context_parallel_rank(),
            width=width,
            sees=self.sees,
            pixels=piece.pre_process,
        )
        gathers = self.shape.cp > 1 and not self.kernels
        order = self._move(order_after_gather(documents.lengths, self.shape.cp)) if gathers else None
        if self.router is not None:
            step = micro_batch.step if micro_batch is not None else StepCounts(0, 0)
            held = None if documents.held_tokens is None else self._move(documents.held_tokens)
            routed.append(self.router.tokens(documents.real, self._move(documents.document_of), held, step, learn=learn))
        boundaries = Boundaries.of(documents.lengths, order, routed[-1] if routed else None, documents.segments)
        if groups.experts is not None:
            boundaries.most_tokens = groups.experts.most(documents.input_ids.shape[1])
        if drops is not None:
            boundaries.token_keys = self._make_token_keys(micro_batch or _EMPTY, documents, drops)
        with piece.add_noise(self._own_noise(documents, piece)):
            hidden_T1H: Tensor = model(
                self._move(documents.input_ids),
                self._move(documents.position_ids),
                None,
                packed_seq_params=boundaries.for_kernels(self.device) if self.kernels else boundaries,
                **self._images(micro_batch, documents, piece),
            )

        def loss(hidden_T1H: Tensor) -> tuple[Tensor, Tensor, RankOutput | None]:
            """Return, on the last stage, the sum to differentiate, a token count that is not used, and the output."""
            scores = self._scores(hidden_T1H, documents, micro_batch or _EMPTY, objective)
            if micro_batch is None:
                total, output = differentiable(torch.zeros((), device=self.device), scores), None
            else:
                total, output = objective(scores, micro_batch)
                total = differentiable(total, scores)
            return total, torch.zeros((), dtype=torch.int32, device=total.device), output

        return hidden_T1H, loss

    def _make_token_keys(self, micro_batch: MicroBatch, documents: Documents, steps_done: int) -> Tensor:
        assert documents.place_of is not None, "setup refuses trees beside dropout"
        assert self.dropout_seed is not None
        return self._move(make_token_keys(micro_batch, documents.document_of, documents.place_of, self.dropout_seed, steps_done))

    def _own_noise(self, documents: Documents, piece: Decoder) -> EmbeddingNoise | None:
        """Return the noise on the embeddings that this rank's part of the first piece makes; None for other pieces."""
        noise = documents.noise
        if noise is None or not piece.pre_process:
            return None
        keys, lengths = noise.keys, noise.lengths
        if piece.config.sequence_parallel:
            rank = parallel_state.get_tensor_model_parallel_rank()
            keys, lengths = keys.chunk(self.shape.tp)[rank], lengths.chunk(self.shape.tp)[rank]
        return EmbeddingNoise(noise.alpha, self._move(keys), self._move(lengths))

    def _images(self, micro_batch: MicroBatch | None, documents: Documents, piece: Decoder) -> dict[str, Images | None]:
        """Return the argument `images` for the first piece of the model if its tokens need any; other pieces get none."""
        if micro_batch is None or documents.images is None or not len(documents.images.places) or not piece.pre_process:
            return {}
        assert documents.feature_of is not None
        feature_of_S = documents.feature_of
        if piece.config.sequence_parallel:
            feature_of_S = feature_of_S.chunk(self.shape.tp)[parallel_state.get_tensor_model_parallel_rank()]
        inputs = micro_batch.inputs
        images = Images.of(inputs[PIXEL_VALUES], inputs[IMAGE_GRID], documents.images, feature_of_S)
        return {} if images is None else {"images": images.move_tensors(self._move)}

    def _scores(self, hidden_T1H: Tensor, documents: Documents, micro_batch: MicroBatch, objective: Objective) -> dict[str, Tensor]:
        """Return all scores of the micro-batch, on every context-parallel rank."""
        places_M, count, teacher = self._move(documents.places), len(micro_batch.labels), micro_batch.teacher
        group = parallel_state.get_context_parallel_group()
        arguments: dict[str, Any] = {
            "temperature": objective.temperature,
            "needs": objective.needs,
            "logits_per_chunk": self.logits_per_chunk,
        }
        head, positions_M = self.pieces[-1], self._move(documents.positions)
        if self.shape.cp > 1 and isinstance(teacher, AlignedStates):
            # groups of tokens may lie on several ranks: all of them compare whole micro-batches, and the first one differentiates
            whole = head.score(
                hidden_T1H,
                positions_M,
                self._move(micro_batch.labels),
                {column: self._move(ids) for column, ids in micro_batch.candidates.items()},
                teacher=teacher,
                spread=lambda own_MH: gather_states(own_MH, places_M, count, group),
                **arguments,
            )
            return {name: keep_gradient_of_first(values_N, group) for name, values_N in whole.items()}
        if teacher is not None and not isinstance(teacher, AlignedStates):
            teacher = evolve(teacher, hidden=teacher.hidden[places_M])
        own = head.score(
            hidden_T1H,
            positions_M,
            self._move(micro_batch.labels[documents.places]),
            {column: self._move(ids[documents.places]) for column, ids in micro_batch.candidates.items()},
            teacher=teacher,
            **arguments,
        )
        if self.shape.cp == 1:
            return own
        return {name: gather_scores(values_M, places_M, count, group) for name, values_M in own.items()}

    def _move(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


_EMPTY = MicroBatch(
    inputs={name: torch.zeros(1, 1, dtype=torch.int64) for name in ("input_ids", "attention_mask", "position_ids")},
    positions=torch.zeros(0, dtype=torch.int64),
    labels=torch.zeros(0, dtype=torch.int64),
    sequence_lengths=Ragged.from_list([[]], np.int64),
    samples=None,
)
"""A micro-batch of one row without a document."""
