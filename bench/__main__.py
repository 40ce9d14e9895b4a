"""``python -m bench``: print a table, write ``var/bench.json``."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path

from bench.check import check
from bench.decode import decode
from bench.http import http
from bench.llama70b import llama70b
from bench.load import load
from bench.prefix import prefix
from bench.publish import publish
from bench.resolve import resolve
from bench.revoke import revoke
from bench.slots import slots
from bench.stand import stand
from bench.startup import startup
from bench.validate import validate


def main() -> None:
    """Run all benchmarks."""
    rows = check() + llama70b() + startup() + validate()
    rows += decode() + load() + slots() + prefix() + http()
    with stand() as (world, pid, environment):
        rows += publish(world, pid)
        rows += resolve(world)
        rows += revoke(world, environment)
    for row in rows:
        print("  ".join(f"{key}: {value}" for key, value in row.items()))
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python "
        + platform.python_version(),
        "rows": rows,
    }
    path = Path("var/bench.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
