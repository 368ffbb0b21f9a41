"""run.log: what happened, with tracebacks of failures, for whoever has to find out why."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skyrl_engine.visible import visible

ENGINE = "skyrl_engine"
_APART = ("transformers", "datasets")
"""Libraries whose loggers may be cut off from the root logger, so that the handler listens to them as well."""


TOLD = "told"
"""Attribute of records that say a person, beside the log, what a run is about to do."""


def tell(logger: logging.Logger, sentence: str) -> None:
    """Log a sentence that the command shows to whoever started it, as its warnings are."""
    logger.info("%s", sentence, extra={TOLD: True})


def is_of_engine(record: logging.LogRecord) -> bool:
    """Return True for a record of the engine, of a plugin that is published with it, or of a plugin in a file of the user."""
    return record.name == ENGINE or record.name.startswith((f"{ENGINE}.", f"{ENGINE}_"))


class VisibleFormatter(logging.Formatter):
    """Formats records, tracebacks included, for people: what they hold of data and of plugins does nothing to a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class RunLogHandler(logging.FileHandler):
    """Takes the engine's own records from INFO on and everybody else's from WARNING on."""

    def filter(self, record: logging.LogRecord) -> bool:
        if self in getattr(record, "run_logs", ()):  # came by two ways, its own logger's and the root's
            return False
        record.run_logs = (*getattr(record, "run_logs", ()), self)
        return is_of_engine(record) or record.levelno >= logging.WARNING

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """A full disk must not fill the terminal with tracebacks about the log; the failure that matters is raised elsewhere."""

    def close(self) -> None:
        with suppress(OSError):  # the same full disk, met once more by what was buffered
            super().close()


@contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Append the process's log records to `path` for the duration."""
    handler = RunLogHandler(path, encoding="utf-8")
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root, engine = logging.getLogger(), logging.getLogger(ENGINE)
    level = engine.level
    listened_to = [root, *(logging.getLogger(name) for name in _APART)]
    for logger in listened_to:
        logger.addHandler(handler)
    if engine.getEffectiveLevel() > logging.INFO:
        engine.setLevel(logging.INFO)
    try:
        yield
    finally:
        engine.setLevel(level)
        for logger in listened_to:
            logger.removeHandler(handler)
        handler.close()
