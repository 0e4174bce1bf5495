"""Let the tests here import the model zoo and the small networks."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [path for path in (str(HERE.parent), str(HERE)) if path not in sys.path]
