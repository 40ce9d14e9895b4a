"""``python -m gpu_worker.serving``."""

from __future__ import annotations

from gpu_worker.serving.startup import main, process_end

if __name__ == "__main__":
    process_end(main())
