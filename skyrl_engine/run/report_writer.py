"""Writing of a run's report beside training, by a process of its own, so that neither its time nor a failure of it is the run's."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from attrs import define, field

from skyrl_engine.run.log import tell

logger = logging.getLogger(__name__)

VARIABLE = "SKYRL_ENGINE_REPORT"
"""Environment variable; `0` leaves reports out, as suites of tests do."""
SHARE = 0.005
"""Largest share of a run's time that reports take while it trains."""
_FIRST_COST = 4.0
"""Seconds that the first report is taken to cost, before one was measured."""
_LONGEST_WAIT = 120.0
_QUIET_WAIT = 3.0
"""Seconds of waiting for the last report after which the run says what it waits for."""
_LEAVE = "import os; os.fork() and os._exit(0); "
_GIVE_WAY = "import os; os.nice(10); "
"""Lets everything else that wants to run go first."""
_COMMAND = "import runpy; runpy.run_module('skyrl_engine', run_name='__main__', alter_sys=True)"


@define(eq=False)
class ReportWriter:
    """Starts `skyrl-engine report` for a run directory while the run trains, as often as `SHARE` allows, and once at its end."""

    directory: Path
    enabled: bool
    _started: float = field(factory=time.monotonic, init=False)
    _spent: float = field(default=0.0, init=False)
    _cost: float = field(default=_FIRST_COST, init=False)
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)
    _begun: float = field(default=0.0, init=False)
    _errors: "IO[bytes] | None" = field(default=None, init=False)

    @classmethod
    def of(cls, directory: Path, *, wanted: bool) -> "ReportWriter":
        """Return the writer of a run, which writes nothing where the run or the environment does not want it."""
        return cls(directory, wanted and os.environ.get(VARIABLE, "1") != "0")

    def write_if_due(self) -> None:
        """Start a report where none is under way and the time of all, this one among them, stays below `SHARE` of the run's."""
        if not self.enabled or not self._collect():
            return
        if time.monotonic() - self._started >= (self._spent + self._cost) / SHARE:
            self._start(_GIVE_WAY)

    def write_last(self, *, wait: bool) -> None:
        """Write the report of a session that has ended; without `wait`, it is written after this process has gone on."""
        if not self.enabled:
            return
        if self._process is not None:
            self._process.kill()  # it would show the run without its end
            self._process.wait()
            self._close()
        self._start("" if wait else _LEAVE)
        if self._process is not None:
            try:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_QUIET_WAIT)
                if self._process.returncode is None:
                    tell(logger, "writing the report ...")
                self._process.wait(_LONGEST_WAIT)
            except subprocess.TimeoutExpired:
                logger.warning("the report is still being written after %.0f s; the run does not wait for it", _LONGEST_WAIT)
                return
            self._collect()

    def _start(self, first: str) -> None:
        """Start the command, whose process does `first`: it gives way, or leaves this process, so as to outlive it."""
        self._begun = time.monotonic()
        # a report needs no device
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- closed when the process has ended
        try:
            self._process = subprocess.Popen(  # noqa: S603 -- this interpreter and this package
                # -P: no module of the folder that the run was started in takes the place of one of ours
                [sys.executable, "-P", "-c", first + _COMMAND, "report", str(self.directory.resolve())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._close()
            logger.warning("no report is written: %s", error)

    def _collect(self) -> bool:
        """Return True where no report is under way any more; one that failed is warned of."""
        if self._process is None:
            return True
        if self._process.poll() is None:
            return False
        self._cost = time.monotonic() - self._begun
        self._spent += self._cost
        if self._process.returncode and self._errors is not None:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()
            logger.warning("the report could not be written: %s", said or f"it ended with status {self._process.returncode}")
        self._close()
        return True

    def _close(self) -> None:
        self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None
