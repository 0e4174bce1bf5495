"""``python -m mimicnorm``."""

import sys

from mimicnorm.cli import main

sys.exit(main())
