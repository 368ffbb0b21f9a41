"""Wrong plugins stand in modules of their own, beside the tests, so that pickle finds their classes by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
