"""Which steps of a session torch's profiler records, on every rank."""

from pathlib import Path

from attrs import define, field

from skyrl_engine.config.schema import RunConfig
from skyrl_engine.engine.engine import Engine


@define(eq=False)
class ProfiledSteps:
    """Steps `first` to `last` of a session, written to files of `directory`; none where `last` is below `first`."""

    engine: Engine
    directory: Path
    memory: bool
    first: int
    last: int
    _under_way: bool = field(default=False, init=False)

    @classmethod
    def of(cls, run: RunConfig, engine: Engine, directory: Path, done: int, total: int) -> "ProfiledSteps":
        """Return the steps that a configuration asks for, after the session's first one, which also prepares, where so many are left."""
        count = run.profile_steps or 0
        first = done + 2 if total - done > count else done + 1
        return cls(engine, directory, run.profile_memory, first, min(first + count - 1, total))

    def before_step(self, step: int) -> None:
        """Begin to record where `step` is the first. Raises UnsupportedError where a rank cannot."""
        if step == self.first <= self.last:
            self.engine.begin_profile(self.directory / f"steps-{self.first}-{self.last}", memory=self.memory)
            self._under_way = True

    def after_step(self, step: int, *, ends: bool = False) -> None:
        """Write the profile where `step` is the last, or the run `ends` with it."""
        if self._under_way and (ends or step == self.last):
            self._under_way = False
            self.engine.end_profile()
