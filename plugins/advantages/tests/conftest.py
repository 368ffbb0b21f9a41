"""The published formulas stand in a module of their own, beside the test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
