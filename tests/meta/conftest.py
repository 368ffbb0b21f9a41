"""Wrong plugins are in modules of their own, next to the tests, so that pickle finds their classes by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
