"""Embedding and head divided along the vocabulary: each tensor-parallel rank holds the rows of its part of the tokens."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from skyrl_engine.modeling.chunked_head import ChunkedHead, Score, ScoringTeacher, compute_chunked_scores
from skyrl_engine.modeling.divided_rows import number_own
from skyrl_engine.modeling.scorer import Scorer
from skyrl_engine.modeling.vocabulary_parallel import VocabularyParallelScore
from skyrl_engine.modeling.vocabulary_parallel_teaching import DividedTeacherStates, GatheredScore
from skyrl_engine_fsdp.parameter_views import view_parameters
from skyrl_engine_fsdp.rank_sums import sum_backward, sum_forward


def divide_vocabulary(model: Any, scorer: Scorer, mesh: DeviceMesh) -> None:
    """Divide the rows of the model's embedding and head, in place; tied ones stay tied.

    One whose number of rows the ranks do not divide stays whole on every rank.
    """
    embedding, head = model.get_input_embeddings(), scorer.head.linear
    divided: dict[int, nn.Parameter] = {}
    for module in (embedding, head):
        if not isinstance(module, nn.Embedding | nn.Linear) or len(module.weight) % mesh.size():
            continue
        for name, whole in list(module.named_parameters(recurse=False)):
            if id(whole) not in divided:
                part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
                divided[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
            setattr(module, name, divided[id(whole)])
        if module is embedding:
            _look_up_own_tokens(module, mesh)
        else:
            scorer.head = VocabularyParallelHead(scorer.head, mesh)


def _look_up_own_tokens(embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Make the embedding look up this rank's tokens, give zeros for all others, and sum over ranks."""
    assert isinstance(embedding, nn.Embedding)
    group, rows = mesh.get_group(), embedding.num_embeddings // mesh.size()
    first = mesh.get_local_rank() * rows
    foreign: list[Tensor] = []
    # the row that gets no gradient from lookups, numbered among this rank's rows
    if embedding.padding_idx is not None:
        here = embedding.padding_idx - first
        embedding.padding_idx = here if 0 <= here < rows else None

    def before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        places, others = number_own(inputs[0], first, rows)
        foreign.append(others)
        return (places, *inputs[1:])

    def after(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return sum_forward(output.masked_fill(foreign.pop()[..., None], 0), group)

    view_parameters(embedding, get_local)
    embedding.register_forward_pre_hook(before)
    embedding.register_forward_hook(after)


class VocabularyParallelHead(ChunkedHead):
    """The chunked head over this rank's part of the vocabulary; its chunks have as many logits per rank as those of a whole head.

    A teacher is compared with by parts of the vocabulary too, unless its score needs whole logits: those are gathered chunk by chunk.
    """

    def __init__(self, whole: ChunkedHead, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.linear, self.rule = whole.linear, whole.rule
        self.positions_per_chunk = whole.positions_per_chunk * mesh.size()
        self.group = mesh.get_group()
        self.vocabulary = whole.linear.out_features
        self.first = mesh.get_local_rank() * (self.vocabulary // mesh.size())

    def forward(
        self,
        hidden_NH: Tensor,
        tokens_NK: Tensor,
        temperature: float,
        requested: tuple[str, ...],
        teacher: ScoringTeacher | None = None,
    ) -> tuple[Tensor, ...]:
        """Return what `ChunkedHead.forward` returns; scores and the gradient of `hidden_NH` are equal on all tensor-parallel ranks."""
        score: Score
        if teacher is None:
            score = VocabularyParallelScore(self.rule, temperature, requested, self.group, self.first, self.vocabulary)
        else:
            score = teacher.score(self.rule, temperature, requested, self.vocabulary)
            if not isinstance(score, VocabularyParallelScore):
                score = GatheredScore.of(score, self.group, self.first, self.vocabulary)
        # every part of the vocabulary contributes to the gradient of the hidden states
        hidden_NH = sum_backward(hidden_NH, self.group)
        bias_V = None if self.linear.bias is None else get_local(self.linear.bias)
        return compute_chunked_scores(hidden_NH, get_local(self.linear.weight), bias_V, tokens_NK, score, self.positions_per_chunk)

    def teach(self, hidden_NH: Tensor) -> DividedTeacherStates:
        """Return what another model is compared with at the positions of these states, by parts of the vocabulary."""
        weight_VH = get_local(self.linear.weight).detach()
        bias_V = None if self.linear.bias is None else get_local(self.linear.bias).detach()
        states_NH = hidden_NH.detach().to(weight_VH.dtype)
        return DividedTeacherStates(states_NH, weight_VH, bias_V, self.rule, self.group, self.first, self.vocabulary)


def get_local(parameter: Tensor) -> Tensor:
    """Return this rank's part of the parameter, differentiably."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
