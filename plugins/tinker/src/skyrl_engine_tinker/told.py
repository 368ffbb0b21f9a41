"""Words for clients: what went wrong, without the places of files on the server, which its own log has."""

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
class Told:
    """Texts on their way to clients: a model's own directory becomes the name that clients know, a checkpoint its address, any other absolute
    path `HIDDEN`.
    """

    settings: Settings
    _names: Mapping[str, str] = field(init=False)

    @_names.default
    def _known(self) -> dict[str, str]:
        places = {self.settings.directory: DIRECTORY}
        places |= {Path(each): name for name, each in self.settings.serve.models.items() if Path(each).is_absolute()}
        return {str(form): name for place, name in places.items() for form in (place, place.absolute(), place.resolve())}

    def text(self, words: str) -> str:
        """Return words without paths; what they said is in the server's log."""
        found = words
        # the longest first: one may lie in another
        for place, name in sorted(self._names.items(), key=lambda each: -len(each[0])):
            if name == DIRECTORY:
                found = re.sub(rf"{re.escape(place)}/{_CHECKPOINT}{_REST}", r"tinker://\1:train:\2/\3/\4", found)
            found = re.sub(rf"{re.escape(place)}{_REST}", lambda _: name, found)  # noqa: B023 -- called at once
        found = _BARE.sub(HIDDEN, _QUOTED.sub(lambda match: f"{match[1]}{HIDDEN}{match[1]}", found))
        if found != words:
            logger.warning("a client was told, without its paths: %s", words)
        return found

    def answer(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an answer, and where it is an error, its words without paths."""
        return {**given, "error": self.text(str(given["error"]))} if "error" in given else given
