"""How long the command line takes to start, beside the interpreter alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import sample_adapter as sample

ROUNDS = 15


def startup() -> list[dict[str, Any]]:
    """The median of some rounds, taken in turns, in milliseconds; compiled files are kept."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapter = sample.write(folder / "adapter", sample.files(declaration=None))
        (folder / "catalog.json").write_bytes(sample.catalog().to_bytes())
        adapterctl = "import sys; from cli.main import main; sys.exit(main(sys.argv[1:]))"
        catalog = str(folder / "catalog.json")
        commands = {
            "start: python -c pass": ["pass"],
            "start: adapterctl --help": [adapterctl, "--help"],
            "start: adapterctl check, small adapter": [
                *(adapterctl, "check", str(adapter), "--catalog", catalog, "--json"),
            ],
        }
        environment = os.environ | {"PYTHONPYCACHEPREFIX": str(folder / "compiled")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        times: dict[str, list[float]] = {what: [] for what in commands}
        for _ in range(ROUNDS):
            for what, arguments in commands.items():
                start = time.perf_counter()
                subprocess.run(
                    [sys.executable, "-c", *arguments],
                    stdout=subprocess.DEVNULL,
                    env=environment,
                    check=True,
                )
                times[what].append(time.perf_counter() - start)
    return [
        {"what": what, "ms": round(sorted(taken)[ROUNDS // 2] * 1000, 1)}
        for what, taken in times.items()
    ]
