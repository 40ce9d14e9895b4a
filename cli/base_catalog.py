"""Making a base's catalog on this machine: the worker's builder, in a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Final

from cli.output import ProgressLines, say
from registry_service.domain.base_model import WEIGHT_SUFFIX
from registry_service.domain.digests import Digest
from registry_service.domain.errors import MalformedError, RefusedError, UnavailableError
from registry_service.domain.text import bounded, shown

_BUILDER: Final = "gpu_worker.validation.catalog_process"
_NEEDED: Final = ("torch", "transformers")
# The builder's last words on stderr: of its error, the name and this much of the message.
_REASON_CHARS: Final = 1_000


class WorkerMissingError(UnavailableError):
    """The packages that build a model are not installed here."""

    code = "WORKER_MISSING"
    hint = (
        "pip install 'adapter-registry[worker]', or make the catalog where it is installed and "
        "give it with --catalog"
    )


def catalog_build(source: Path, base_digest: Digest | None) -> bytes:
    """The catalog of a base's folder, or of its ``config.json`` alone.

    A catalog names its base: without ``base_digest`` the folder's weights are hashed for it.

    Raises:
        MalformedError: not a base that can be read, or neither a digest nor weights.
        RefusedError: a base that is refused. WorkerMissingError: no torch or transformers here.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise WorkerMissingError(f"making a catalog needs {' and '.join(missing)}")
    digest = base_digest or _digest(source)
    say(f"making the catalog of {source}")
    # -P: the current directory may be the very adapter that is checked.
    command = [sys.executable, "-P", "-m", _BUILDER, str(source), digest]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == 0:
        return done.stdout
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    kind, _, reason = (lines[-1] if lines else "").partition(": ")
    error = RefusedError if kind.endswith(RefusedError.__name__) else MalformedError
    said = bounded(reason, _REASON_CHARS) or f"the builder ended with {done.returncode}"
    raise error(f"no catalog of {source}: {said}")


def _digest(source: Path) -> Digest:
    if not (source.is_dir() and any(source.glob(f"*{WEIGHT_SUFFIX}"))):
        raise MalformedError(
            f"{shown(str(source))}: expected a folder with the base's weights, whose digest the "
            "catalog names; for a config.json alone give --base-digest, of 'adapterctl base show'"
        )
    from cli.base_folder import base_read

    with ProgressLines("hashing") as progress:
        return base_read(source.name, source, progress).digest
