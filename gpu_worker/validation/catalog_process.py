"""Makes one base's catalog in a throw-away process of the sandbox; writes it to stdout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpu_worker.validation.confine import process_expendable, process_seal
from registry_service.domain.digests import digest_parse


def main() -> int:
    """Arguments: the base's directory or ``config.json``, and its digest."""
    process_expendable()
    process_seal()
    answers = os.dup(1)
    os.dup2(2, 1)
    from gpu_worker.validation.catalog_builder import catalog_build

    catalog = catalog_build(Path(sys.argv[1]), digest_parse(sys.argv[2]))
    with os.fdopen(answers, "wb") as file:
        file.write(catalog.to_bytes())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
