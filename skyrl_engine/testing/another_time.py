"""Another moment, as the next run has it: the clocks that tell the date are ahead, for modules that are imported from then on."""

import datetime as dt
import time
from typing import Any, Self

AHEAD = dt.timedelta(days=400, hours=7, minutes=13, seconds=17.3)
"""Another year, month, weekday, hour, minute and second."""


def put_clocks_ahead() -> None:
    """Put the clocks of `time` and `datetime` ahead in this process, for good. Clocks that measure how long something takes stay."""
    seconds, functions = AHEAD.total_seconds(), {name: getattr(time, name) for name in ("time", "localtime", "gmtime")}
    nanoseconds, ctime, strftime = time.time_ns, time.ctime, time.strftime

    def now() -> float:
        return float(functions["time"]()) + seconds

    time.time = now
    time.time_ns = lambda: nanoseconds() + int(seconds * 1e9)
    time.localtime = lambda moment=None: functions["localtime"](now() if moment is None else moment)
    time.gmtime = lambda moment=None: functions["gmtime"](now() if moment is None else moment)
    time.ctime = lambda moment=None: ctime(now() if moment is None else moment)
    time.strftime = lambda words, moment=None: strftime(words, time.localtime() if moment is None else moment)
    dt.datetime, dt.date = _LaterMoment, _LaterDay  # type: ignore[misc]


class _LaterMoment(dt.datetime):
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Self:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def today(cls) -> Self:
        return cls.fromtimestamp(time.time())

    @classmethod
    def utcnow(cls) -> Self:
        return cls.fromtimestamp(time.time(), dt.UTC).replace(tzinfo=None)


class _LaterDay(dt.date):
    @classmethod
    def today(cls, *_arguments: Any) -> Self:
        return cls.fromtimestamp(time.time())
