"""The keys of a configuration that a command reads, for commands that read a part."""

import re

from attrs import frozen


@frozen
class ReadKeys:
    """The keys that a command reads of a configuration: `names` are tables and dotted keys, list positions left out; `but` are keys inside them
    that it does not read.
    """

    names: frozenset[str]
    but: frozenset[str] = frozenset()

    def has(self, key: str) -> bool:
        """Say if the command reads a key, such as `environments[0].use`, or any key below it."""
        plain = re.sub(r"\[\d+\]", "", key)
        return any(
            plain == name or plain.startswith(f"{name}.") or name.startswith(f"{plain}.") for name in self.names
        ) and not any(plain == name or plain.startswith(f"{name}.") for name in self.but)


NO_KEYS = ReadKeys(frozenset())
"""Those of a command whose key=value are options of one plugin."""
