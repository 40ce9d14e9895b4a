"""What a child gives up before it opens untrusted bytes: memory, time, files, processes, calls."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import tempfile
from contextlib import suppress
from typing import Final

from registry_service.domain import limits

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_SECCOMP: Final = 22
_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP_MODE_FILTER: Final = 2

_CHILD_FILES: Final = 1024
_CHILD_PROCESSES: Final = 16
_CHILD_WRITE_BYTES: Final = limits.MIB
_CHILD_SPARE_BYTES: Final = 3 * limits.GIB
_COPIES_OF_ADAPTER: Final = 8

# Calls that checking an adapter never makes, by architecture: (audit number, call numbers) of
# socket, socketpair, connect, bind, execve, execveat, fork, vfork, ptrace, mount, unshare, setns,
# process_vm_readv, process_vm_writev, kill, tkill, bpf, io_uring_setup, keyctl, userfaultfd.
_DENIED: Final[dict[str, tuple[int, tuple[int, ...]]]] = {
    "x86_64": (
        0xC000003E,
        (
            41,
            53,
            42,
            49,
            59,
            322,
            57,
            58,
            101,
            165,
            272,
            308,
            310,
            311,
            62,
            200,
            321,
            425,
            250,
            323,
        ),
    ),
    "aarch64": (
        0xC00000B7,
        (198, 199, 203, 200, 221, 281, 117, 40, 97, 268, 270, 271, 129, 130, 280, 425, 219, 282),
    ),
}
_X32_BIT: Final = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_EPERM: Final = 0x00050001


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def process_seal() -> None:
    """No core dumps, no tracing by siblings, and an end with the parent."""
    process_unreadable()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Nothing in the sandbox is writable, and torch asks for this name when it is imported.
    tempfile.tempdir = "/tmp"  # noqa: S108 - the sandbox has its own, and it is read-only


def process_expendable() -> None:
    """First in line when memory runs out: the worker and its neighbours must survive.

    Before the seal, after which a plain user's process may not write this any more.
    """
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123 - a file of the kernel
        file.write("900")


def process_unreadable() -> None:
    """No core dumps, and no other process of the same user may read or trace this one."""
    _prctl(_PR_SET_DUMPABLE, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def child_confine(*, adapter_bytes: int, cuda: bool) -> None:
    """Bound this process for good; called in the child, before any adapter byte is read.

    On CUDA there is no bound on address space (the driver maps far more than it uses), and no
    bound on threads or calls, which the driver needs.
    """
    process_seal()
    _limit(resource.RLIMIT_CPU, limits.CHILD_CPU_SECONDS)
    _limit(resource.RLIMIT_NOFILE, _CHILD_FILES)
    _limit(resource.RLIMIT_FSIZE, _CHILD_WRITE_BYTES)
    if cuda:
        return
    spare = _CHILD_SPARE_BYTES + _COPIES_OF_ADAPTER * adapter_bytes
    _limit(resource.RLIMIT_AS, min(limits.CHILD_ADDRESS_BYTES, _address_bytes() + spare))
    _limit(resource.RLIMIT_NPROC, _CHILD_PROCESSES)
    _calls_deny()


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _address_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - a file of the kernel
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _calls_deny() -> None:
    """A seccomp filter over the denied calls; on other architectures the sandbox stands alone."""
    known = _DENIED.get(platform.machine())
    if known is None:
        return
    audit, denied = known
    code = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        # A second numbering of the same calls begins here on x86: refused as a whole.
        (_AT_LEAST, len(denied) + 1, 0, _X32_BIT),
        *((_EQUAL, len(denied) - index, 0, call) for index, call in enumerate(denied)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
    ]
    raw = b"".join(struct.pack("<HBBI", *line) for line in code)
    held = ctypes.create_string_buffer(raw, len(raw))
    program = _Program(len(code), ctypes.cast(held, ctypes.c_void_p))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def _prctl(option: int, first: int, second: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_ulong(value) for value in (first, second, 0, 0)]
    if libc.prctl(ctypes.c_int(option), *arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")
