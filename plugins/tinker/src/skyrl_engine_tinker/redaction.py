"""Error messages for clients, without paths of files on the server; the server's log has the full text."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from skyrl_engine_tinker.checkpoints import KINDS
from skyrl_engine_tinker.settings import Settings

logger = logging.getLogger(__name__)

HIDDEN = "[a path of the server]"
DIRECTORY = "[serve.directory]"

_QUOTED = re.compile(r"""(['"`])(?:file:/{0,2})?~?/[^'"`\n]+\1""")
_BARE = re.compile(r"""(?<![\w.~:/\]])(?:file:/{2,3}|~/|/)[^\s'"`,;()<>\[\]{}]+""")
_REST = r"(?:/[^\s'\"`,;()<>\[\]{}]*)?"
_CHECKPOINT = rf"([0-9a-f]{{32}})-train-([0-9]{{1,9}})/({'|'.join(KINDS)})/([\w.-]+)"


@frozen
class ErrorRedactor:
    """Texts on their way to clients: a model's own directory becomes the name that clients know, a checkpoint its address, any other absolute
    path `HIDDEN`.
    """

    settings: Settings
    _names: Mapping[str, str] = field(init=False)

    @_names.default
    def _list_names(self) -> dict[str, str]:
        paths = {self.settings.directory: DIRECTORY}
        paths |= {Path(path): name for name, path in self.settings.serve.models.items() if Path(path).is_absolute()}
        return {str(form): name for path, name in paths.items() for form in (path, path.absolute(), path.resolve())}

    def redact(self, message: str) -> str:
        """Return a message without paths; the full message is in the server's log."""
        text = message
        # the longest first: one may lie in another
        for path, name in sorted(self._names.items(), key=lambda item: -len(item[0])):
            if name == DIRECTORY:
                text = re.sub(rf"{re.escape(path)}/{_CHECKPOINT}{_REST}", r"tinker://\1:train:\2/\3/\4", text)
            text = re.sub(rf"{re.escape(path)}{_REST}", lambda _: name, text)  # noqa: B023 -- called at once
        text = _BARE.sub(HIDDEN, _QUOTED.sub(lambda match: f"{match[1]}{HIDDEN}{match[1]}", text))
        if text != message:
            logger.warning("sent to a client without its paths: %s", message)
        return text

    def redact_answer(self, answer: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an answer; if it is an error, without paths in its message."""
        return {**answer, "error": self.redact(str(answer["error"]))} if "error" in answer else answer
