"""A frozen teacher that has another tokenizer: a micro-batch's texts are written in its own tokens, and both are aligned by the text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from attrs import define, field, frozen

from skyrl_engine.contracts.kinds.backend import MicroBatch, Teaches
from skyrl_engine.contracts.values.extras import OF_IMAGES
from skyrl_engine.contracts.values.ragged import Ragged, offsets_of
from skyrl_engine.errors import SampleError, UnsupportedError
from skyrl_engine.modeling.aligned_divergence import AlignedStates, TokenPlaces, Vocabularies
from skyrl_engine.modeling.alignment import TextTokenizer, TokenGroup, match_vocabularies, translate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_engine.contracts.values.ragged import IntArray
    from skyrl_engine.modeling.teaching import TeacherStates


@frozen(eq=False)
class _ScoredGroup:
    """A group of a sample: the places of its tokens among the micro-batch's scored ones, and the teacher's row and tokens."""

    scored: "IntArray"
    row: int
    teacher: tuple[int, int]


@define(eq=False)
class AlignedTeacher:
    """Teaches as the `Teaches` protocol says, through texts. `positions` bounds the teacher's rows in tokens; None: nothing does.

    `scored` counts tokens with loss, and `aligned` those of them that are of a group, since they were last read.
    """

    teacher: Teaches
    student: TextTokenizer
    own: TextTokenizer
    matched: Vocabularies
    positions: int | None
    scored: int = field(default=0, init=False)
    aligned: int = field(default=0, init=False)

    @classmethod
    def of(
        cls,
        teacher: Teaches,
        student: "PreTrainedTokenizerBase",
        own: "PreTrainedTokenizerBase",
        positions: int | None = None,
    ) -> "AlignedTeacher":
        """Join a teacher and the two tokenizers."""
        ours, theirs = match_vocabularies(student.get_vocab(), own.get_vocab())
        matched = Vocabularies(torch.from_numpy(ours), torch.from_numpy(theirs))
        return cls(teacher, TextTokenizer.of(student), TextTokenizer.of(own), matched, positions)

    def drain_counts(self) -> tuple[int, int]:
        """Return `aligned` and `scored`, and count anew."""
        counts, self.aligned, self.scored = (self.aligned, self.scored), 0, 0
        return counts

    @contextmanager
    def teaching(self, micro_batch: MicroBatch) -> Iterator[AlignedStates | None]:
        """Give the teacher's hidden states at its own tokens, with the places of the student's that stand for the same text.

        None on the ranks of a pipeline to whose last stage the teacher gives its states.
        """
        rows, groups = self._align(micro_batch)
        asked, places = _lay_out(rows, groups, micro_batch)
        self.scored += len(micro_batch.positions)
        self.aligned += sum(len(group.scored) for group in groups)
        with self.teacher.teaching(asked) as known:
            if known is None:
                yield None
                return
            states = cast("TeacherStates", known).gather()
            device = states.weight.device
            matched = Vocabularies(self.matched.student.to(device), self.matched.teacher.to(device))
            yield AlignedStates(
                hidden=states.hidden,
                weight=states.weight,
                bias=states.bias,
                rule=states.rule,
                places=places.to(device),
                matched=matched,
                count=len(micro_batch.positions),
            )

    def _align(self, micro_batch: MicroBatch) -> tuple[list[list[int]], list[_ScoredGroup]]:
        """Return the teacher's tokens of every sample with a group, and all groups whose tokens are all scored.

        Raises UnsupportedError for images and for rows of shared prefixes, SampleError for a text that is too long for the teacher.
        """
        if micro_batch.tree is not None or any(name in micro_batch.inputs for name in OF_IMAGES):
            raise UnsupportedError(
                "a teacher with another tokenizer reads the texts of whole samples, without images",
                remedy='Set collator.use = "packed" or "padded", and train on rows of text',
            )
        mask = micro_batch.inputs["attention_mask"].flatten().bool().numpy()
        ids = micro_batch.inputs["input_ids"].flatten().numpy()[mask]
        place_of = np.cumsum(mask) - 1
        number_of = np.full(len(ids), -1, dtype=np.int64)
        # a position is that of the token before the one it scores
        number_of[place_of[micro_batch.positions.numpy()] + 1] = np.arange(len(micro_batch.positions))
        bounds = offsets_of(micro_batch.sequence_lengths.values)
        rows: list[list[int]] = []
        groups: list[_ScoredGroup] = []
        for sample, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            if (number_of[start:end] < 0).all():
                continue
            tokens, found = translate(ids[start:end].tolist(), self.student, self.own)
            if self.positions is not None and len(tokens) > self.positions:
                raise SampleError(
                    f"sample {sample} of a micro-batch has {len(tokens):,} tokens of the teacher, which has {self.positions:,} positions",
                    sample=sample if micro_batch.sample_ids is None else int(micro_batch.sample_ids[sample]),
                    remedy="Set data.max_length, or choose a teacher with more positions",
                )
            kept = [group for group in found if _is_scored(group, number_of[start:end])]
            if kept:
                scored = [number_of[start + group.student[0] : start + group.student[1]] for group in kept]
                groups += [_ScoredGroup(numbers, len(rows), group.teacher) for numbers, group in zip(scored, kept, strict=True)]
                rows.append(tokens)
        return rows, groups


def _is_scored(group: TokenGroup, number_of: "IntArray") -> bool:
    """Say whether all tokens of the student carry loss, and all of the teacher have one before them."""
    return bool((number_of[group.student[0] : group.student[1]] >= 0).all()) and group.teacher[0] > 0


def _lay_out(rows: list[list[int]], groups: list[_ScoredGroup], micro_batch: MicroBatch) -> tuple[MicroBatch, TokenPlaces]:
    """Return padded rows of the teacher's tokens, to be scored at those of groups, and the places of both."""
    # every rank takes part in the teacher's collectives, also with no text to score
    rows = rows or [[0, 0]]
    width = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
    for number, tokens in enumerate(rows):
        ids[number, : len(tokens)], mask[number, : len(tokens)] = torch.tensor(tokens), 1
    spans = [np.arange(*group.teacher, dtype=np.int64) for group in groups]
    tokens_of_row = [np.array([group.row * width for group in groups], dtype=np.int64).repeat([len(span) for span in spans])]
    flat = torch.from_numpy(
        np.concatenate([np.zeros(0, dtype=np.int64), *spans]) + np.concatenate([np.zeros(0, np.int64), *tokens_of_row])
    )
    asked = MicroBatch(
        inputs={
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": torch.arange(width).expand(len(rows), width).contiguous(),
        },
        positions=flat - 1,
        labels=ids.flatten()[flat],
        sequence_lengths=Ragged(
            np.array([len(tokens) for tokens in rows], dtype=np.int64), np.arange(len(rows) + 1, dtype=np.int64)
        ),
        samples=None,
        step=micro_batch.step,
    )
    ends = np.cumsum([len(span) for span in spans]).astype(np.int64) - 1
    last = np.array([group.scored[-1] for group in groups], dtype=np.int64)
    is_last = np.zeros(len(flat), dtype=np.bool_)
    is_last[ends] = True
    earlier = np.flatnonzero(~is_last)
    owners = np.arange(len(groups)).repeat([len(span) for span in spans])
    befores = [group.scored[:-1] for group in groups]
    arrays = (
        last,
        ends,
        np.concatenate([np.zeros(0, dtype=np.int64), *befores]),
        last.repeat([len(before) for before in befores]),
        earlier,
        last[owners[earlier]],
    )
    student, teacher, earlier_student, groups_student, earlier_teacher, groups_teacher = map(torch.from_numpy, arrays)
    labels = asked.labels[earlier_teacher]
    return asked, TokenPlaces(student, teacher, earlier_student, groups_student, earlier_teacher, groups_teacher, labels)
