"""Let the tests here import their small networks, and those of training."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [path for path in (str(HERE.parent / "training"), str(HERE)) if path not in sys.path]
