"""The controller's side of what ranks print, log and warn: it becomes records of the logger `skyrl_engine.ranks`, and so lines of run.log.

Every record says rank, host and process, and holds what the rank said without them, so that a terminal shows once what several ranks, or the
controller too, warn of; the log has the warning of each.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_engine.workers.rank_output import Lines, OutputReader
from skyrl_engine.workers.ray_actor import Place

SAID = "said"
"""The attribute of a record that holds what the rank said, without rank, host and process."""

ANSWER_SECONDS = 5.0
"""A node that does not answer for so long counts as lost."""

END_SECONDS = 10.0
"""The end of a run waits so long for the last lines."""

WAIT_SECONDS = 1.0
"""A wait for lines looks so often whether they are still wanted."""

logger = logging.getLogger(__name__)
ranks_logger = logging.getLogger("skyrl_engine.ranks")


class RankLog:
    """Reads the output of ranks, given by their places, until `close`; one reader on every node that has ranks."""

    def __init__(self, ray: Any, places: Sequence[Place]) -> None:
        self._ray = ray
        self._places = places
        self._lines = [Lines() for _ in places]
        self._abandoned = threading.Event()
        self._readers = {machine: self._reader(machine) for machine in dict.fromkeys(place.machine for place in places)}
        self._thread = threading.Thread(target=self._listen, name="rank-log", daemon=True)
        self._thread.start()

    def node_answers(self, machine: str) -> bool:
        """Return whether the reader on a node still answers; a rank can die alone, its node takes the reader along."""
        try:
            return bool(self._ray.get(self._readers[machine].is_here.remote(), timeout=ANSWER_SECONDS))
        except self._ray.exceptions.RayError:
            return False

    def close(self, *, answering: bool = True) -> None:
        """Take the last lines, of ranks that have ended, and end the readers; `answering` false where Ray has ended with them.

        Nothing here uses Ray afterwards: Ray ends a process that does so after its shutdown.
        """
        if answering:
            for reader in self._readers.values():
                reader.stop.remote()
            self._thread.join(END_SECONDS)
        self._abandoned.set()
        if answering:
            for reader in self._readers.values():
                self._ray.kill(reader)
        self._thread.join(END_SECONDS)

    def _reader(self, machine: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        paths = {rank: place.output for rank, place in enumerate(self._places) if place.machine == machine}
        actor = self._ray.remote(OutputReader)
        # "here" is answered while "read" waits and "stop" is on its way.
        options = {"num_cpus": 0, "max_concurrency": 3, "scheduling_strategy": NodeAffinitySchedulingStrategy(machine, soft=False)}
        return actor.options(**options).remote(paths)

    def _listen(self) -> None:
        ray = self._ray
        pending = {reader.read.remote(): machine for machine, reader in self._readers.items()}
        while pending and not self._abandoned.is_set():
            try:
                ready, _ = ray.wait(list(pending), num_returns=1, timeout=WAIT_SECONDS)
            except OSError as error:
                logger.info("the output of ranks is no longer read: Ray has ended (%s)", error)
                break
            for reference in ready:
                machine = pending.pop(reference)
                try:
                    new: Mapping[int, bytes] = ray.get(reference)
                except (ray.exceptions.RayError, OSError):
                    logger.info("the output of %s is no longer read: its reader has ended", self._ranks_on(machine))
                    continue
                for rank, text in new.items():
                    self._say(rank, self._lines[rank].add(text))
                if new:
                    pending[self._readers[machine].read.remote()] = machine
        for rank, lines in enumerate(self._lines):
            self._say(rank, lines.end())

    def _say(self, rank: int, records: Sequence[logging.LogRecord]) -> None:
        place = self._places[rank]
        for record in records:
            setattr(record, SAID, str(record.msg))
            record.msg = f"rank {rank} ({place.name}, pid {place.pid}) {record.name}: {record.msg}"
            record.name = ranks_logger.name
            if ranks_logger.isEnabledFor(record.levelno):
                ranks_logger.handle(record)

    def _ranks_on(self, machine: str) -> str:
        return ranks_in_words([rank for rank, place in enumerate(self._places) if place.machine == machine])


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 1 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
