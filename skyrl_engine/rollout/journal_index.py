"""A journal of rollouts as it is read: its records in the order in which they were written, those of them that count, and what it lacks."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from attrs import define, evolve, field

from skyrl_engine.contracts.values.rollout import Group
from skyrl_engine.rollout.ledger import JournaledGroup
from skyrl_engine.rollout.records import Entry, GroupEntries, Records
from skyrl_engine.rollout.segments import Damage, Segment, number_of, read_segment, segments_of


@define
class JournalIndex:
    """The records of a journal that count: a session that goes on from a checkpoint leaves behind what later weights sampled or trained."""

    groups: GroupEntries = field(factory=GroupEntries)
    """The last record of every ticket."""
    trained: dict[int, tuple[int, ...]] = field(factory=dict)
    """Tickets by the step that trained on them."""
    learned: dict[int, Entry] = field(factory=dict)
    """The records of steps, which hold what they learned."""
    segments: list[Segment] = field(factory=list)
    """All segments that were read, in the order in which they were written."""
    copies: list[Path] = field(factory=list)
    """Files that hold a segment that another file holds, in the place of one that is lost."""
    torn: Damage | None = None
    """The half-written record that a crash left at the end, if it did."""
    oldest: int = 1
    """The number of the oldest segment that has not expired."""
    newest: int = 0
    """The highest number of a segment, of those that are there."""
    losses: list[str] = field(factory=list)
    """Losses of the journal, a sentence each: it lacks what it once held. A half-written record at the end is none."""
    ends: dict[Path, int] = field(factory=dict)
    """The last step that was trained when a segment ended, by segment."""

    def add(self, records: Records) -> None:
        """Take the records of the next segment."""
        for row, entry in enumerate(records):
            event = entry.event
            if event == "group":
                self.groups.put(records, row)
            elif event == "trained":
                self.trained[entry.step], self.learned[entry.step] = entry.tickets, entry
            else:
                self.go_on_from(entry.version)

    def go_on_from(self, version: int) -> None:
        """Take it that a session goes on from the checkpoint of `version`."""
        self.groups.drop_later(version)
        for step in [step for step in self.trained if step > version]:
            del self.trained[step], self.learned[step]

    @property
    def damages(self) -> list[Damage]:
        """Return all parts of segments that cannot be read, what a crash left half-written among them."""
        return [damage for segment in self.segments for damage in segment.damages]

    def steps(self) -> dict[int, int]:
        """Return the step that trained on a ticket, by ticket."""
        return {ticket: step for step, tickets in self.trained.items() for ticket in tickets}

    def list_journaled_groups(self) -> dict[int, JournaledGroup]:
        """Return what a resumed ledger needs of every ticket's record."""
        return {
            ticket: JournaledGroup(
                entry.start_version,
                entry.newest_version,
                entry.dropped,
                failed=entry.failed,
            )
            for ticket, entry in self.groups.items()
        }


Listing = Mapping[str, int]
"""The names of segments that were there when a checkpoint was written, and how many bytes each had by then."""


def read_index(folder: Path, listed: Listing | None = None) -> JournalIndex:
    """Read the headers of a journal, in the order in which they were written; a folder that is not there holds none.

    `listed` are the segments that a checkpoint counts on: those of them that are not there and have not expired are lost, and so is what
    they are shorter by. A segment that is lost, or lost its beginning, may have said that a session went on from a checkpoint: groups before
    it do not count, since later weights than the checkpoint's may have sampled them. Raises RolloutError for a file that cannot be read.
    """
    sizes = {number_of(Path(name)): size for name, size in (listed or {}).items()}
    index = JournalIndex()
    index.segments, index.copies = _in_order(folder)
    index.losses += [f"{copy.name} is a copy of another segment, in the place of its own" for copy in index.copies]
    index.newest = max([0, *(segment.number for segment in index.segments), *map(number_of, segments_of(folder))])
    known = [segment.head.oldest for segment in index.segments if segment.head is not None]
    index.oldest = max(known) if known else min([*(segment.number for segment in index.segments), *sizes], default=1)
    index.losses += _missing(index, sizes)
    before: int | None = None
    for segment in index.segments:
        is_last = segment is index.segments[-1]
        torn = is_last and segment.is_torn and segment.whole_bytes >= sizes.get(segment.number, 0)
        index.torn = segment.damages[0] if torn else None
        gap = before is not None and segment.number != before + 1
        if gap or (segment.unsure and not torn):
            index.groups.clear()
        if not torn:
            index.losses += _losses_of(segment, sizes.get(segment.number, 0))
        if segment.head is not None and segment.head.resumed is not None:
            index.go_on_from(segment.head.resumed)
        index.add(segment.entries)
        index.ends[segment.path] = max(max(index.trained, default=0), max(segment.entries.newest_versions, default=0))
        before = segment.number
    if any(number > (before or 0) for number in sizes):
        index.groups.clear()
    return index


def _in_order(folder: Path) -> tuple[list[Segment], list[Path]]:
    """Return the segments of a journal by their numbers, and the files that are a copy of another."""
    segments: dict[tuple[str | None, int], Segment] = {}
    copies: list[Path] = []
    # where a number comes twice, the file that is called by it has the word
    for segment in sorted(
        map(read_segment, segments_of(folder)), key=lambda segment: (segment.number, segment.number != number_of(segment.path))
    ):
        place = segment.run, segment.number
        if place in segments:
            copies.append(segment.path)
        else:
            segments[place] = segment
    return list(_accept_unwritten(list(segments.values()))), copies


def _accept_unwritten(segments: list[Segment]) -> Iterator[Segment]:
    """Take empty files of format 2 for whole: there a segment had no byte before its first record."""
    of_format_2 = False
    for segment in segments:
        of_format_2 = segment.head is None and (of_format_2 or segment.run is not None)
        yield evolve(segment, damages=(), unsure=False) if of_format_2 and not segment.size else segment


def _missing(index: JournalIndex, sizes: Mapping[int, int]) -> Iterator[str]:
    """Yield what segments are not there, of those that were not too old to keep."""
    numbers_present = {segment.number for segment in index.segments}
    numbers = {
        *range(index.oldest, max(numbers_present, default=0)),
        *(number for number in sizes if number >= index.oldest),
    } - numbers_present
    if numbers and not numbers_present:
        yield f"all segments are gone ({len(numbers)} by the last checkpoint)"
        return
    for first, last in _ranges_of(sorted(numbers)):
        yield f"segment {first} is gone" if first == last else f"segments {first} to {last} are gone"


def _ranges_of(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of numbers that follow each other."""
    if not numbers:
        return
    bounds = [place + 1 for place, (number, next_number) in enumerate(pairwise(numbers)) if next_number != number + 1]
    for begin, end in pairwise([0, *bounds, len(numbers)]):
        yield numbers[begin], numbers[end - 1]


def _losses_of(segment: Segment, expected_size: int) -> Iterator[str]:
    """Yield what a segment has lost of what was in it, or of the bytes that a checkpoint counts on."""
    name = segment.path.name
    if segment.head is not None and segment.head.was_damaged is not None:
        yield f"{name} stands in the place of a damaged file: {segment.head.was_damaged}"
    elif segment.size < expected_size:
        yield f"{name} has {segment.size:,} of the {expected_size:,} bytes that the last checkpoint counts on"
    yield from (str(damage) for damage in segment.damages)
    if segment.number != number_of(segment.path):
        yield f"{name} is segment {segment.number} by what it says: it was renamed"


def read_groups(folder: Path) -> Iterator[Group]:
    """Read the groups of a journal that count, by ticket. One that was trained on is not dropped, whatever a filter said."""
    index = read_index(folder)
    steps = index.steps()
    for ticket in sorted(index.groups):
        yield apply_decision(index.groups[ticket].group(), trained=ticket in steps)


def apply_decision(group: Group, *, trained: bool) -> Group:
    """Return a group as the ledger decided, where its record says what a filter wanted."""
    if not trained or group.dropped is None:
        return group
    return Group(group.ticket, group.environment, group.task_key, group.start_version, group.trajectories)
