"""``python -m gpu_worker.serving``."""

from __future__ import annotations

import sys

from gpu_worker.serving.startup import main

if __name__ == "__main__":
    sys.exit(main())
