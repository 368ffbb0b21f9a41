"""Proof P7 over every chat template that TRL comes with: either turns can be appended, and random dialogues show that no sampled token is ever
made again, or the template is refused with the reason.

    python tests/proof/templates_of_trl.py [FOLDER]

The folder is that of the TRL that is installed, where none is named. Ends with an error where a template breaks the promise. Run with
`nox -s peers`.
"""

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1] / "running"))

from dialogues import Spy, hold_dialogue

from skyrl_engine.errors import EngineError
from skyrl_engine.rollout.chat_renderer import ChatRenderer
from skyrl_engine.testing.templates import TEMPLATES

DIALOGUES = 20
MARKS = re.compile(r"<[|｜][^|｜<>{}']+[|｜]>|</?[a-z_]+_of_turn>|<turn\|>|<\|turn>|\[/?[A-Z_]{3,}\]")
"""Templates write each as one token."""


def main(folder: Path) -> int:
    """Return the number of templates that break the promise."""
    counts: Counter[str] = Counter()
    places = sorted(folder.glob("*.jinja"))
    for place in places:
        for history in ("append", "template"):
            outcome, reason = try_template(place, history)
            counts[f"{history}: {outcome}"] += 1
            print(f"{place.stem:36} {history:9} {outcome:9} {reason}")
    print(f"{len(places)} templates of {folder}")
    for name, count in sorted(counts.items()):
        print(f"{count:4} {name}")
    return sum(count for name, count in counts.items() if name.endswith("BROKEN"))


def try_template(place: Path, history: Literal["append", "template"]) -> tuple[str, str]:
    """Hold dialogues over a template: what came of it, and why."""
    text = place.read_text(encoding="utf-8")
    tokenizer = TEMPLATES["plain"].tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(MARKS.findall(text)))})
    tokenizer.chat_template = text
    tokenizer.name_or_path = place.stem
    spy = Spy(tokenizer)
    renderer = ChatRenderer(spy, history=history)
    try:
        renderer.validate_template(("user",))
    except EngineError as error:
        return "refused", error.cause
    roles = ["user"]
    try:
        renderer.validate_template(("tool",))
        roles.append("tool")
    except EngineError:
        pass
    for seed in range(DIALOGUES):
        try:
            hold_dialogue(renderer, spy, roles, seed)
        except AssertionError as error:
            return "BROKEN", f"dialogue {seed}: {error}"
        except EngineError as error:
            return "refused", f"in dialogue {seed}: {error.cause}"
    return "held", f"answers of {' and '.join(roles)}"


def find_templates() -> Path:
    found = importlib.util.find_spec("trl")
    assert found is not None, "TRL is not installed: run `nox -s peers`"
    assert found.origin is not None, "TRL has no place"
    return Path(found.origin).parent / "chat_templates"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else find_templates()))
