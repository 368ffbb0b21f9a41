"""The ways in which a proof cuts its batch."""

from collections.abc import Iterator, Sequence

from attrs import frozen

from skyrl_engine.proof.rollouts import LONGEST


@frozen
class Case:
    """One cut. `collator` is a reference; with neither rows nor tokens a rank takes its samples in one micro-batch."""

    collator: str
    ranks: int = 1
    micro_batch_rows: int | None = None
    micro_batch_tokens: int | None = None
    shuffled: bool = False

    @property
    def name(self) -> str:
        """The case as a person reads it: "padded, 2 rows at a time, shuffled, 2 ranks"."""
        parts = [self.collator]
        if self.micro_batch_rows is not None:
            parts.append(f"{self.micro_batch_rows} row{'s' if self.micro_batch_rows > 1 else ''} at a time")
        if self.micro_batch_tokens is not None:
            parts.append(f"{self.micro_batch_tokens} tokens at a time")
        if self.shuffled:
            parts.append("shuffled")
        parts.append("1 rank" if self.ranks == 1 else f"{self.ranks} ranks")
        return ", ".join(parts)


def cases(padding: Sequence[str], packing: Sequence[str], ranks: int) -> Iterator[Case]:
    """Micro-batches of 1, 2 and 8 rows and of a token budget, in order and shuffled, on one rank and on `ranks`.

    `padding` and `packing` are references of collators with rows of one and of several samples.
    """
    for world in dict.fromkeys((1, ranks)):
        for collator in padding:
            for rows in (1, 2, 8):
                yield Case(collator, world, micro_batch_rows=rows)
            yield Case(collator, world, micro_batch_tokens=3 * LONGEST)
            yield Case(collator, world, micro_batch_rows=3, shuffled=True)
        for collator in packing:
            for tokens in (LONGEST, 3 * LONGEST):
                yield Case(collator, world, micro_batch_tokens=tokens)
            yield Case(collator, world, micro_batch_tokens=2 * LONGEST, shuffled=True)
