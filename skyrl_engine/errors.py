"""One hierarchy of errors: every error says what happened, where, and what to do next, and knows its exit code.

An error prints as details first (where several things are wrong, one line each) and ends in one line holding cause and remedy.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TypeVar

from attrs import define, field, frozen

T = TypeVar("T")


class EngineError(Exception):
    """Base of everything the engine raises for what a user, a plugin or the machine did.

    `cause` is one sentence without a final stop, `remedy` is the one action that helps, `details` are further lines.
    """

    exit_code: int = 4

    def __init__(self, cause: str, *, remedy: str, details: Sequence[str] = ()) -> None:
        self.cause = cause
        self.remedy = remedy
        self.details = tuple(details)
        super().__init__(cause, remedy, self.details)

    def __str__(self) -> str:
        return "\n".join([*self.details, self.summary])

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the state alone: errors travel between processes, and subclasses take other constructor arguments."""
        return (_rebuild, (type(self), self.__dict__.copy(), self.args))

    @property
    def summary(self) -> str:
        """Cause and remedy on one line."""
        return _sentences(self.cause, self.remedy)


def _sentences(cause: str, remedy: str) -> str:
    # a cause may end in a question: did you mean another name?
    return f"{cause}{'' if cause.endswith('?') else '.'} {remedy}"


def _rebuild(kind: type[EngineError], state: dict[str, object], arguments: tuple[object, ...]) -> EngineError:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    error.__dict__.update(state)
    return error


class ConfigError(EngineError):
    """The command line or the configuration cannot be used. `problems` holds every mistake found, not only the first."""

    exit_code = 2

    def __init__(self, problems: "Sequence[Problem]") -> None:
        self.problems = tuple(problems)
        assert self.problems, "a ConfigError without a problem"
        first = self.problems[0]
        if len(self.problems) == 1:
            super().__init__(f"{first.where}: {first.cause}", remedy=first.remedy)
        else:
            super().__init__(
                f"the configuration has {len(self.problems)} mistakes",
                remedy="Correct each line above",
                details=[str(problem) for problem in self.problems],
            )


@frozen
class Problem:
    """One mistake in a configuration: `where` names file (or command line) and key."""

    where: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return _sentences(f"{self.where}: {self.cause}", self.remedy)


class UnsupportedError(EngineError):
    """A combination that a backend, a model or a plugin does not support, refused while planning; names what is missing."""

    exit_code = 2


class PluginError(EngineError):
    """A plugin that was asked for cannot be used."""

    exit_code = 3


class PluginNotFoundError(PluginError):
    """No installed distribution offers the requested plugin."""


class PluginAmbiguousError(PluginError):
    """Several distributions claim one bare name and nothing pins one of them."""


class PluginBlockedError(PluginError):
    """The requested plugin is blocked by the configuration."""


class PluginDriftError(PluginError):
    """Plugins, or files of code, are not those that a lock names; `details` are a table of them."""


class PluginIndexError(PluginError):
    """An index of plugins, or a wheel that it names, cannot be read, or is not what was verified."""


class UntrustedCodeError(PluginBlockedError):
    """The configuration of a run directory names code that nobody vouches for.

    The run is not the caller's, or the code was changed since, and the caller did not allow it.
    """


class PluginIncompatibleError(PluginError):
    """The plugin's metadata excludes this engine, or a runtime requirement is missing or out of range."""


class PluginBrokenError(PluginError):
    """Importing, registering or building the plugin failed."""


class ContractError(PluginError):
    """A plugin returned something that its contract does not allow."""


class ResultError(ContractError):
    """The engine refuses the result of a plugin's call: its type, shape, numbers or metrics. No plugin raises it itself."""


class DetachedLossError(ResultError):
    """The values of a loss do not depend on the model's scores, so nothing would be learned."""


class DataError(EngineError):
    """A dataset, a sample or a column is not what it must be; names the sample and the field."""


class SampleError(DataError):
    """One sample of a micro-batch contradicts itself or the model. `sample` is its id (`sample_ids`), or its index where it has none."""

    def __init__(self, cause: str, *, sample: int, remedy: str, details: Sequence[str] = ()) -> None:
        self.sample = sample
        super().__init__(cause, remedy=remedy, details=details)


class ColumnError(DataError):
    """Rows lack a column that is needed; the remedy names one of theirs by a key of `key`, such as `map.prompt=question`.

    `key` is the table that holds the data's own names of columns: `data.map`, or the option `map` of an environment, whose place in the
    configuration the environment does not know; `under` puts it there.
    """

    def __init__(self, cause: str, *, remedy: str, key: str, details: Sequence[str] = ()) -> None:
        self.key = key
        super().__init__(cause, remedy=remedy, details=details)

    def under(self, place: str) -> "ColumnError":
        """Return the error with its table under the table `place`: of `map` under `environments.0`, `environments.0.map`."""
        key = f"{place}.{self.key}"
        cause, remedy = (named_by(text, self.key, f"{key}.") for text in (self.cause, self.remedy))
        return ColumnError(cause, remedy=remedy, key=key, details=self.details)


def named_by(text: str, key: str, spelling: str) -> str:
    """Return a text in which `spelling` stands before a column's name wherever the table `key` and a dot do."""
    return re.sub(rf"(?<![\w.]){re.escape(key)}\.(?=\w)", lambda _: spelling, text)


class ImageError(DataError):
    """An image of a sample is missing, damaged, too large or changed, or images and their places do not match; names the sample."""


class StoreError(EngineError):
    """An object store cannot be used or does not answer, or what it holds is not what it must be; names the address."""


class ModelError(EngineError):
    """A model or tokenizer cannot be loaded, trained or exported."""


class WorkerError(EngineError):
    """A rank failed or died. `rank` is its number in the world, None where Ray ended and all of them with it."""

    def __init__(self, cause: str, *, rank: int | None, remedy: str, details: Sequence[str] = ()) -> None:
        self.rank = rank
        super().__init__(cause, remedy=remedy, details=details)


class EngineClosedError(EngineError):
    """An engine is asked for something after it was closed, or after its ranks were ended because one of them failed.

    `ended` is that event as a clause.
    """

    def __init__(self, ended: str) -> None:
        super().__init__(f"the engine takes no calls any more: {ended}", remedy="Open it again, and load what was saved last")


class RolloutError(EngineError):
    """Rollouts cannot go on, be kept or be read: too many attempts fail, the sampler holds other weights, the disk refuses them."""


class OutputError(EngineError):
    """Outputs of ranks do not form the batch: samples missing, duplicated or unexpected."""


class CheckpointError(EngineError):
    """A checkpoint cannot be written, read or resumed."""


class RunRefusedError(EngineError):
    """A run has several mistakes, found while planning; `errors` are what each of them alone would raise.

    It is the cause (`__cause__`) of an error of the first one's kind, with its exit code, which is what is raised.
    """

    def __init__(self, errors: Sequence[EngineError]) -> None:
        self.errors = tuple(errors)
        remedies = {error.remedy for error in self.errors}
        shared = remedies.pop() if len(remedies) == 1 else None
        super().__init__(
            f"the run has {len(self.errors)} mistakes",
            remedy="Correct each line above" if shared is None else shared,
            # a remedy of all of them stands once, at the end
            details=[line for error in self.errors for line in (*error.details, error.summary if shared is None else error.cause)],
        )

    def as_first(self) -> EngineError:
        """Return an error of the first one's kind that tells all of them."""
        first = self.errors[0]
        if isinstance(first, ConfigError):
            told = [each.problems if isinstance(each, ConfigError) else (_problem_of(each),) for each in self.errors]
            return ConfigError([problem for problems in told for problem in problems])
        kind = next(base for base in type(first).__mro__ if base.__init__ is EngineError.__init__)  # type: ignore[misc]  # compared, not called
        return self if kind is EngineError else kind(self.cause, remedy=self.remedy, details=self.details)


def _problem_of(error: EngineError) -> Problem:
    return Problem("the run", "; ".join((*error.details, error.cause)), error.remedy)


@frozen
class _Collecting:
    """The context of `Refusals.collect`."""

    _errors: list[EngineError]

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if not isinstance(error, EngineError):
            return False
        # several of one kind were raised as one of it, from what they are
        several = error if isinstance(error, RunRefusedError) else error.__cause__
        for each in several.errors if isinstance(several, RunRefusedError) else (error,):
            if all(str(each) != str(known) for known in self._errors):
                self._errors.append(each)
        return True


@define
class Refusals:
    """Problems of a run, collected while it is planned, so that one error names them all."""

    _errors: list[EngineError] = field(factory=list, init=False)

    def __bool__(self) -> bool:
        return bool(self._errors)

    def has_named(self, text: str) -> bool:
        """Say whether an error that was collected names this text."""
        return any(text in str(error) for error in self._errors)

    def collect(self) -> "_Collecting":
        """Return a context in which an EngineError is kept, unless it is there already; what comes after the context goes on."""
        return _Collecting(self._errors)

    def collect_all(self, checks: Iterable[Callable[[T], None]], subject: T) -> None:
        """Run each check on the subject, in order, and keep what it raises."""
        for check in checks:
            with self.collect():
                check(subject)

    def raise_all(self) -> None:
        """Raise what was collected: a single error as it is, of several one of the first's kind that tells all of them."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            several = RunRefusedError(self._errors)
            raise several.as_first() from several
