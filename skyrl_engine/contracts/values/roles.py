"""Which half of a preference a sample is: names alone, for what must stay light to import."""

from collections.abc import Mapping
from typing import Final, Literal

ROLE: Final = "role"
"""Name of the sample value that says which half of a pair a sample is."""

CHOSEN: Final = 0
REJECTED: Final = 1

Role = Literal["chosen", "rejected"]
ROLES: Final[Mapping[Role, int]] = {"chosen": CHOSEN, "rejected": REJECTED}
