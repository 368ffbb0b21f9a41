"""The published formulas are in their own module next to the test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
